#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#pragma GCC target("arch=x86-64-v4")
#define VARIANT contextual_v4
#include "lines.h"
#endif
