#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("avx2,fma")
#define VARIANT kernels_avx2
#include "variant.h"
#endif
