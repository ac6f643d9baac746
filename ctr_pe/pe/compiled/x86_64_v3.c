#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("arch=x86-64-v3")
#define VARIANT contextual_v3
#include "lines.h"
#endif
