/* Vectors of as many floats as the processor takes, and what is computed with them. */

#include <math.h>
#include <stdint.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
enum { LANES = 16 };
#define LANE ((Ints){0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15})
#elif defined(__AVX2__)
enum { LANES = 8 };
#define LANE ((Ints){0, 1, 2, 3, 4, 5, 6, 7})
#else
enum { LANES = 4 };
#define LANE ((Ints){0, 1, 2, 3})
#endif
typedef float Floats __attribute__((vector_size(4 * LANES)));
typedef int32_t Ints __attribute__((vector_size(4 * LANES)));

INLINE int64_t up(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

INLINE Floats load(const float *from) {
    Floats x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE void store(float *to, Floats x) { memcpy(to, &x, sizeof x); }

#define UNLIKELY(x) __builtin_expect(x, 0)

INLINE Floats where(Ints mask, Floats yes, Floats no) { return (Floats)((mask & (Ints)yes) | (~mask & (Ints)no)); }
INLINE Floats all(float x) { return (Floats){0} + x; }

/* The lesser and the greater of two; y where either is no number. */
INLINE Floats lesser(Floats x, Floats y) {
#if defined(__AVX512F__)
    return (Floats)_mm512_min_ps((__m512)x, (__m512)y);
#elif defined(__AVX2__)
    return (Floats)_mm256_min_ps((__m256)x, (__m256)y);
#else
    return where(x < y, x, y);
#endif
}

INLINE Floats greater(Floats x, Floats y) {
#if defined(__AVX512F__)
    return (Floats)_mm512_max_ps((__m512)x, (__m512)y);
#elif defined(__AVX2__)
    return (Floats)_mm256_max_ps((__m256)x, (__m256)y);
#else
    return where(x > y, x, y);
#endif
}

/* 1 / x, x in [1, 1e38]. */
INLINE Floats inverse(Floats x) {
#if defined(__AVX512F__)
    const Floats y = (Floats)_mm512_rcp14_ps((__m512)x);
    return y * (2.0f - x * y);
#else
    return 1.0f / x;
#endif
}

/* As a power of two, its fraction by a polynomial: to 1e-7, from -87 to 87. NaN stays NaN. */
INLINE Floats exponential(Floats x) {
    const Floats whole = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    const Floats r = (x * 1.44269504f - whole) + x * 1.92596299e-8f, rr = r * r;
    const Floats low = (1.0f + r * 0.693147181f) + rr * (0.240226507f + r * 0.0555041087f);
    const Floats high = (0.00961812911f + r * 0.00133335581f) + rr * 0.000154035304f;
    const Ints power = (__builtin_convertvector(whole, Ints) + 127) << 23;
    return (low + rr * rr * high) * (Floats)power;
}

INLINE Floats sigmoid(Floats x) {
    return inverse(1.0f + exponential(lesser(all(87.0f), greater(all(-87.0f), -x))));
}

#if defined(__GNUC__) && !defined(__clang__)
#define SHUFFLE __builtin_shuffle
#endif

/* Sums of each lane and all after it. */
INLINE Floats sums_from(Floats x) {
#ifdef SHUFFLE
    for (int32_t k = 1; k < LANES; k *= 2) x += SHUFFLE(x, all(0.0f), LANE + k);
#else
    for (int v = LANES - 2; v >= 0; v--) x[v] += x[v + 1];
#endif
    return x;
}

/* Sums of each lane and all before it. */
INLINE Floats sums_to(Floats x) {
#ifdef SHUFFLE
    for (int32_t k = 1; k < LANES; k *= 2) x += SHUFFLE(all(0.0f), x, LANE + (LANES - k));
#else
    for (int v = 1; v < LANES; v++) x[v] += x[v - 1];
#endif
    return x;
}

INLINE float sum_of(Floats x) {
#ifdef SHUFFLE
    for (int32_t k = LANES / 2; k; k /= 2) x += SHUFFLE(x, (LANE + k) % LANES);
#else
    for (int v = 1; v < LANES; v++) x[0] += x[v];
#endif
    return x[0];
}

INLINE float largest_of(Floats x) {
#ifdef SHUFFLE
    for (int32_t k = LANES / 2; k; k /= 2) {
        x = greater(SHUFFLE(x, (LANE + k) % LANES), x);
    }
#else
    for (int v = 1; v < LANES; v++) x[0] = x[v] > x[0] ? x[v] : x[0];
#endif
    return x[0];
}
