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
typedef uint32_t Bits __attribute__((vector_size(4 * LANES))); /* of floats; unsigned, so that they may overflow */

INLINE int64_t up(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

/* Rounded up for vectors of any variant. */
INLINE int64_t padded(int64_t n) { return (n + 15) / 16 * 16; }

INLINE Floats load(const float *from) {
    Floats x;
    memcpy(&x, from, sizeof x);
    return x;
}

INLINE Ints of_bytes(const uint8_t *from) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from));
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)from));
#else
    return (Ints){from[0], from[1], from[2], from[3]};
#endif
}

INLINE Ints of_shorts(const int16_t *from) {
#if defined(__AVX512F__)
    return (Ints)_mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)from));
#elif defined(__AVX2__)
    return (Ints)_mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)from));
#else
    return (Ints){from[0], from[1], from[2], from[3]};
#endif
}

INLINE void store(float *to, Floats x) { memcpy(to, &x, sizeof x); }

#define UNLIKELY(x) __builtin_expect(x, 0)

/* The next n numbers; if they do not fill a vector, zeros after them. */
INLINE Floats some(const float *from, int64_t n) {
#if defined(__AVX512F__)
    return (Floats)_mm512_maskz_loadu_ps(n < LANES ? (1u << n) - 1 : 0xffff, from);
#else
    float few[LANES] = {0};
    if (UNLIKELY(n < LANES)) from = memcpy(few, from, sizeof(float) * n);
    return load(from);
#endif
}

INLINE void put(float *to, int64_t n, Floats x) {
#if defined(__AVX512F__)
    if (n < LANES)
        _mm512_mask_storeu_ps(to, (1u << n) - 1, (__m512)x);
    else
        store(to, x);
#else
    float few[LANES];
    if (UNLIKELY(n < LANES)) {
        store(few, x);
        memcpy(to, few, sizeof(float) * n);
    } else {
        store(to, x);
    }
#endif
}

/* memcpy and memset of few numbers, without a call. */
INLINE void copy(const float *from, int64_t n, float *to) {
    for (int64_t i = 0; i < n; i += LANES) put(to + i, n - i, some(from + i, n - i));
}

INLINE void clear(float *to, int64_t n) {
    for (int64_t i = 0; i < n; i += LANES) put(to + i, n - i, (Floats){0});
}

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

#if defined(__AVX512F__)
/* 2^(k / 32). */
static const float POWERS[2 * LANES] __attribute__((aligned(4 * LANES))) = {
    1.0f, 1.0218972f, 1.04427373f, 1.06714046f, 1.09050775f, 1.1143868f, 1.13878858f, 1.1637249f, 1.18920708f,
    1.21524739f, 1.24185777f, 1.26905096f, 1.29683959f, 1.32523668f, 1.35425556f, 1.38390994f, 1.41421354f,
    1.44518077f, 1.47682619f, 1.50916445f, 1.54221082f, 1.5759809f, 1.61049032f, 1.64575553f, 1.68179286f,
    1.71861935f, 1.75625217f, 1.79470909f, 1.8340081f, 1.87416768f, 1.91520655f, 1.95714414f,
};
#endif

/* As a power of two, its fraction by a polynomial, or by a table and a shorter one: to 1e-7, from -87 to 87. NaN stays
   NaN. */
INLINE Floats exponential(Floats x) {
#if defined(__AVX512F__)
    const Floats counted = x * 46.1662407f + 12582912.0f; /* the last bits are the number of 32ths, and more than those */
    const Floats r = (x * 46.1662407f - (counted - 12582912.0f)) + x * 6.16308157e-7f;
    const Ints number = (Ints)counted;
    const __m512 root = _mm512_permutex2var_ps(_mm512_load_ps(POWERS), (__m512i)number, _mm512_load_ps(POWERS + LANES));
    const Floats power = (Floats)((Bits)root + ((Bits)(number >> 5) << 23));
    return power + power * (r * (0.0216611661f + r * 0.000234601964f));
#else
    const Floats whole = (x * 1.44269504f + 12582912.0f) - 12582912.0f;
    const Floats r = (x * 1.44269504f - whole) + x * 1.92596299e-8f, rr = r * r;
    const Floats low = (1.0f + r * 0.693147181f) + rr * (0.240226507f + r * 0.0555041087f);
    const Floats high = (0.00961812911f + r * 0.00133335581f) + rr * 0.000154035304f;
    const Bits power = ((Bits)__builtin_convertvector(whole, Ints) + 127) << 23;
    return (low + rr * rr * high) * (Floats)power;
#endif
}

INLINE Floats sigmoid(Floats x) {
    return inverse(1.0f + exponential(lesser(all(87.0f), greater(all(-87.0f), -x))));
}

#if defined(__GNUC__) && !defined(__clang__)
#define SHUFFLE __builtin_shuffle
#endif

/* x[k][v] and x[v][k] change places. */
INLINE void transpose(Floats *x) {
    for (int32_t k = 1; k < LANES; k *= 2) {
        for (int i = 0; i < LANES; i++) {
            if (i & k) continue;
            const Floats low = x[i], high = x[i + k];
#ifdef SHUFFLE
            const Ints odd = (LANE & k) != 0;
            x[i] = SHUFFLE(low, high, LANE + (odd & (LANES - k)));
            x[i + k] = SHUFFLE(low, high, LANE + (odd & LANES) + (~odd & k));
#else
            for (int v = 0; v < LANES; v++) {
                x[i][v] = v & k ? high[v - k] : low[v];
                x[i + k][v] = v & k ? high[v] : low[v + k];
            }
#endif
        }
    }
}

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
