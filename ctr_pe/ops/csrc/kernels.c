/* The entry points, called from ctr_pe/ops/<op>/cpu.py. Each takes plain numbers and pointers to dense arrays, chooses
   the variant for this processor and shares the work among threads. They return 1, or 0 where there is no memory left
   to work in. Optional arrays may be null. */

#include <stdlib.h>

#define VARIANT kernels_any
#include "variant.h"

static int64_t widest = 16;

/* For tests: no vectors of more than so many floats. */
int use_lanes(int64_t lanes) {
    widest = lanes;
    return 1;
}

static const Variant *best(void) {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
    extern const Variant kernels_avx2, kernels_avx512;
    const int fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const int masks = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    if (widest >= 16 && fma && masks && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq"))
        return &kernels_avx512;
    if (widest >= 8 && fma) return &kernels_avx2;
#endif
    return &kernels_any;
}

/* Floats in a vector on this processor. */
int vector_lanes(void) { return best()->lanes; }

const char *compiler(void) {
#if defined(__clang__)
    return "clang " __clang_version__;
#elif defined(__GNUC__)
    return "gcc " __VERSION__;
#else
    return "unknown";
#endif
}

/* For each thread `size` floats, rounded up to cache lines, as `size` then says. */
static float *allocate(int64_t *size, int64_t threads) {
    *size = (*size + 15) / 16 * 16;
    return aligned_alloc(64, sizeof(float) * (*size ? *size : 16) * threads);
}

/* out (n): the sum over threads of arrays that lie `stride` apart. */
static void add_up(const float *from, int64_t stride, int64_t threads, int64_t n, float *out) {
    memcpy(out, from, sizeof(float) * n);
    for (int64_t k = 1; k < threads; k++)
        for (int64_t i = 0; i < n; i++) out[i] += from[k * stride + i];
}

/* ---- Contextual positions ---- */

/* The first line of thread k. A row's head is one thread's, as is the gradient of its steps. */
static int64_t first_line(const Contextual *in, int64_t k, int64_t threads) {
    return in->B * in->H * k / threads * in->Q;
}

static int contextual_forward(Contextual in, float *out, int64_t threads) {
    if (!in.B || !in.H || !in.Q) return 1;
    int64_t size = best()->scratch(&in);
    float *scratch = allocate(&size, threads);
    if (!scratch) return 0;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t k = 0; k < threads; k++)
        best()->contextual(&in, first_line(&in, k, threads), first_line(&in, k + 1, threads), out, scratch + k * size);
    free(scratch);
    return 1;
}

static int contextual_backward(Contextual in, int64_t rows, const float *grads, ContextualGradients out,
                               int64_t threads) {
    memset(out.table, 0, sizeof(float) * rows * in.P);
    if (in.weight) memset(out.weight, 0, sizeof(float) * in.P * in.D);
    if (in.weight) memset(out.bias, 0, sizeof(float) * in.P);
    if (in.steps) memset(out.steps, 0, sizeof(float) * in.B * in.H * in.L);
    if (in.keys && !in.Q) {
        memset(out.keys, 0, sizeof(float) * in.B * in.L * in.H * in.D);
        memset(out.values, 0, sizeof(float) * in.B * in.L * in.H * in.D);
    }
    if (!in.B || !in.H || !in.Q) return 1;
    int64_t size = best()->scratch(&in);
    float *scratch = allocate(&size, threads);
    if (!scratch) return 0;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t k = 0; k < threads; k++)
        best()->contextual_back(&in, grads, first_line(&in, k, threads), first_line(&in, k + 1, threads), &out,
                                scratch + k * size);
    for (int64_t k = 0; k < threads; k++) best()->collect(&in, scratch + k * size, &out);
    free(scratch);
    return 1;
}

/* A position counts keys, so that no more than L + 1 rows of the table are reached. */
static int64_t reached(int64_t rows, int64_t L) { return rows < L + 1 ? rows : L + 1; }

/* out (B, H, Q, L) */
int contextual_bias(int64_t B, int64_t H, int64_t Q, int64_t L, int64_t D, int64_t P, int64_t rows,
                    int64_t newest_whole, double sign, double scale, const float *logits, const float *query,
                    const float *weight, const float *bias, const float *table, const float *steps,
                    const uint8_t *allowed, float *out, int64_t threads) {
    const Contextual in = {.B = B, .H = H, .Q = Q, .L = L, .D = D, .P = P, .T = reached(rows, L),
                           .newest_whole = newest_whole, .sign = sign, .scale = scale, .logits = logits,
                           .query = query, .weight = weight, .bias = bias, .table = table, .steps = steps,
                           .allowed = allowed};
    return contextual_forward(in, out, threads);
}

int contextual_bias_backward(int64_t B, int64_t H, int64_t Q, int64_t L, int64_t D, int64_t P, int64_t rows,
                             int64_t newest_whole, double sign, double scale, const float *logits, const float *query,
                             const float *weight, const float *bias, const float *table, const float *steps,
                             const uint8_t *allowed, const float *grads, float *of_logits, float *of_query,
                             float *of_weight, float *of_bias, float *of_table, float *of_steps, int64_t threads) {
    const Contextual in = {.B = B, .H = H, .Q = Q, .L = L, .D = D, .P = P, .T = reached(rows, L),
                           .newest_whole = newest_whole, .sign = sign, .scale = scale, .logits = logits,
                           .query = query, .weight = weight, .bias = bias, .table = table, .steps = steps,
                           .allowed = allowed};
    const ContextualGradients out = {.logits = of_logits, .query = of_query, .weight = of_weight, .bias = of_bias,
                                     .table = of_table, .steps = of_steps};
    return contextual_backward(in, rows, grads, out, threads);
}

/* out (B, Q, H, D); norms (B, H, Q, 2) are kept for the backward. */
int contextual_attention(int64_t B, int64_t H, int64_t Q, int64_t L, int64_t D, int64_t P, int64_t rows, double sign,
                         double scale, double product, double factor, const float *query, const float *keys,
                         const float *values, const float *weight, const float *bias, const float *table,
                         const float *steps, const uint8_t *allowed, const int16_t *kept, float *norms, float *out,
                         int64_t threads) {
    const Contextual in = {.B = B, .H = H, .Q = Q, .L = L, .D = D, .P = P, .T = reached(rows, L), .newest_whole = 1,
                           .sign = sign, .scale = scale, .product = product, .factor = factor, .query = query,
                           .keys = keys, .values = values, .weight = weight, .bias = bias, .table = table,
                           .steps = steps, .allowed = allowed, .kept = kept, .norms = norms};
    return contextual_forward(in, out, threads);
}

int contextual_attention_backward(int64_t B, int64_t H, int64_t Q, int64_t L, int64_t D, int64_t P, int64_t rows,
                                  double sign, double scale, double product, double factor, const float *query,
                                  const float *keys, const float *values, const float *weight, const float *bias,
                                  const float *table, const float *steps, const uint8_t *allowed, const int16_t *kept,
                                  float *norms, const float *grads, float *of_query, float *of_keys, float *of_values,
                                  float *of_weight, float *of_bias, float *of_table, float *of_steps,
                                  int64_t threads) {
    const Contextual in = {.B = B, .H = H, .Q = Q, .L = L, .D = D, .P = P, .T = reached(rows, L), .newest_whole = 1,
                           .sign = sign, .scale = scale, .product = product, .factor = factor, .query = query,
                           .keys = keys, .values = values, .weight = weight, .bias = bias, .table = table,
                           .steps = steps, .allowed = allowed, .kept = kept, .norms = norms};
    const ContextualGradients out = {.query = of_query, .keys = of_keys, .values = of_values, .weight = of_weight,
                                     .bias = of_bias, .table = of_table, .steps = of_steps};
    return contextual_backward(in, rows, grads, out, threads);
}

/* ---- Dice ---- */

/* y (rows, width) */
int dice(int64_t rows, int64_t width, const float *x, const float *factor, const float *shift, const float *alpha,
         const int16_t *kept, double kept_factor, float *y, int64_t threads) {
    const Dice in = {rows, width, x, factor, shift, alpha, kept, kept_factor};
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t k = 0; k < threads; k++) best()->dice(&in, rows * k / threads, rows * (k + 1) / threads, y);
    return 1;
}

/* The gradients of x (rows, width), factor, shift and alpha (width). */
int dice_backward(int64_t rows, int64_t width, const float *grads, const float *x, const float *factor,
                  const float *shift, const float *alpha, const int16_t *kept, double kept_factor, float *of_x,
                  float *of_factor, float *of_shift, float *of_alpha, int64_t threads) {
    const Dice in = {rows, width, x, factor, shift, alpha, kept, kept_factor};
    int64_t size = 3 * padded(width);
    float *scratch = allocate(&size, threads);
    if (!scratch) return 0;
    memset(scratch, 0, sizeof(float) * size * threads);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t k = 0; k < threads; k++)
        best()->dice_back(&in, grads, rows * k / threads, rows * (k + 1) / threads, of_x, scratch + k * size);
    add_up(scratch, size, threads, width, of_factor);
    add_up(scratch + padded(width), size, threads, width, of_shift);
    add_up(scratch + 2 * padded(width), size, threads, width, of_alpha);
    free(scratch);
    return 1;
}

/* ---- Dropout ---- */

/* kept (count), the same for any number of threads */
int keep_mask(const int64_t *seed, int64_t count, int64_t least, int16_t *kept, int64_t threads) {
    const int64_t fours = (count + 3) / 4;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t k = 0; k < threads; k++)
        best()->keep(*seed, fours * k / threads, fours * (k + 1) / threads, count, least, kept);
    return 1;
}

/* ---- Time decay ---- */

/* out (B, H, Q, L) */
int time_decay(int64_t B, int64_t H, int64_t Q, int64_t L, double unit, const float *amount, const float *decay,
               const float *table, const int64_t *query, const int64_t *key, float *out, int64_t threads) {
    const TimeDecay in = {B, H, Q, L, unit, amount, decay, table, query, key};
    int64_t size = 2 * padded(L);
    float *scratch = allocate(&size, threads);
    if (!scratch) return 0;
    memset(scratch, 0, sizeof(float) * size * threads);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t k = 0; k < threads; k++)
        best()->time_decay(&in, B * Q * k / threads, B * Q * (k + 1) / threads, out, scratch + k * size);
    free(scratch);
    return 1;
}

/* The gradients of amount (H), decay (H) and table (32, H). */
int time_decay_backward(int64_t B, int64_t H, int64_t Q, int64_t L, double unit, const float *grads,
                        const float *amount, const float *decay, const int64_t *query, const int64_t *key,
                        float *of_amount, float *of_decay, float *of_table, int64_t threads) {
    const TimeDecay in = {B, H, Q, L, unit, amount, decay, 0, query, key};
    const int64_t own = H * SUMS * 16;
    int64_t size = own + 2 * padded(L);
    float *scratch = allocate(&size, threads);
    if (!scratch) return 0;
    memset(scratch, 0, sizeof(float) * size * threads);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int64_t k = 0; k < threads; k++)
        best()->time_decay_back(&in, grads, B * Q * k / threads, B * Q * (k + 1) / threads, scratch + k * size,
                                scratch + k * size + own);
    for (int64_t h = 0; h < H; h++) {
        for (int64_t i = 0; i < SUMS; i++) {
            float sum = 0.0f;
            for (int64_t k = 0; k < threads; k++)
                for (int64_t v = 0; v < 16; v++) sum += scratch[k * size + (h * SUMS + i) * 16 + v];
            if (i < BUCKETS) of_table[i * H + h] = sum;
            if (i == BUCKETS) of_amount[h] = sum;
            if (i == BUCKETS + 1) of_decay[h] = -amount[h] * sum;
        }
    }
    free(scratch);
    return 1;
}
