/* The entry points: they choose the variant for this processor, and share the work among threads. */

#include <stdlib.h>

#define VARIANT code_any
#include "variant.h"

static int widest = 16;

/* No vectors of more numbers than so many. For tests. */
void use(int lanes) { widest = lanes; }

/* For vectors of no more than so many numbers: half a vector that is empty costs as much as a full one. */
static const Variant *best_for(int64_t numbers) {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
    extern const Variant code_avx2, code_avx512;
    const int fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const int masks = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    const int wide = widest >= 16 && numbers > 8;
    if (wide && fma && masks && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq"))
        return &code_avx512;
    if (widest >= 8 && fma) return &code_avx2;
#endif
    return &code_any;
}

static const Variant *best(void) { return best_for(INT64_MAX); }

/* Where lines of thread k begin: those of a row's head are one thread's, as is the gradient of its steps. */
static int64_t first_line(const Input *in, int64_t k, int64_t threads) { return in->B * in->H * k / threads * in->Q; }

/* Room for all threads, each at a multiple of `size` floats; null where there is none. */
static float *room(const Input *in, int threads, int64_t *size) {
    const int64_t line = 64 / sizeof(float);
    *size = (best()->scratch(in) + line - 1) / line * line;
    return aligned_alloc(64, sizeof(float) * *size * threads);
}

/* out (B, H, Q, L), or (B, Q, H, D) beside keys. Whether there was memory for it. */
int contextual_forward(const Input *in, float *out, int threads) {
    int64_t size;
    float *scratch = room(in, threads, &size);
    if (!scratch) return 0;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int k = 0; k < threads; k++)
        best()->forward(in, first_line(in, k, threads), first_line(in, k + 1, threads), out, scratch + k * size);
    free(scratch);
    return 1;
}

/* grads like out, `rows` of the whole table. */
int contextual_backward(const Input *in, const float *grads, const Gradients *out, int64_t rows, int threads) {
    int64_t size;
    float *scratch = room(in, threads, &size);
    if (!scratch) return 0;
    memset(out->table, 0, sizeof(float) * rows * in->P);
    if (in->weight) memset(out->weight, 0, sizeof(float) * in->P * in->D);
    if (in->weight) memset(out->bias, 0, sizeof(float) * in->P);
    if (in->steps) memset(out->steps, 0, sizeof(float) * in->B * in->H * in->L);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int k = 0; k < threads; k++)
        best()->backward(in, grads, first_line(in, k, threads), first_line(in, k + 1, threads), out,
                         scratch + k * size);
    for (int k = 0; k < threads; k++) best()->collect(in, scratch + k * size, out);
    free(scratch);
    return 1;
}

/* out (B, H, Q, L); `room` (threads, 2, L rounded up to 16) to work in, zeros. True, for it needs no other memory. */
int fade_forward(const Fading *in, float *out, float *room, int threads) {
    const int64_t lines = in->B * in->Q, keys = (in->L + 15) / 16 * 16;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int k = 0; k < threads; k++) {
        float *far = room + 2 * keys * k;
        best()->fade(in, lines * k / threads, lines * (k + 1) / threads, out, far, (int32_t *)(far + keys));
    }
    return 1;
}

/* sums (threads, H, 34, 16). */
int fade_backward(const Fading *in, const float *grads, float *sums, float *room, int threads) {
    const int64_t lines = in->B * in->Q, keys = (in->L + 15) / 16 * 16;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int k = 0; k < threads; k++) {
        float *far = room + 2 * keys * k;
        best()->fade_back(in, grads, lines * k / threads, lines * (k + 1) / threads, sums + in->H * SUMS * 16 * k, far,
                          (int32_t *)(far + keys));
    }
    return 1;
}

/* y (rows, width). True, for it needs no memory. */
int gate_forward(const Gate *in, float *y, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int k = 0; k < threads; k++) best()->gate(in, in->rows * k / threads, in->rows * (k + 1) / threads, y);
    return 1;
}

/* To those of alpha, shift and factor (width) is added. Whether there was memory for it. */
int gate_backward(const Gate *in, const float *grads, float *of_x, float *of_alpha, float *of_shift, float *of_factor,
                  int threads) {
    const int64_t stride = stride_of(in);
    float *sums = aligned_alloc(64, sizeof(float) * 3 * stride * threads);
    if (!sums) return 0;
    memset(sums, 0, sizeof(float) * 3 * stride * threads);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int k = 0; k < threads; k++)
        best()->gate_back(in, grads, in->rows * k / threads, in->rows * (k + 1) / threads, of_x, sums + 3 * stride * k);
    for (int k = 0; k < threads; k++) {
        for (int64_t j = 0; j < in->width; j++) {
            of_alpha[j] += sums[3 * stride * k + j];
            of_shift[j] += sums[(3 * k + 1) * stride + j];
            of_factor[j] += sums[(3 * k + 2) * stride + j];
        }
    }
    free(sums);
    return 1;
}

/* kept (count), the same for any number of threads. True, for it needs no memory. */
int keep(uint64_t seed, int64_t count, int16_t least, int16_t *kept, int threads) {
    const int64_t fours = (count + 3) / 4;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int k = 0; k < threads; k++)
        best()->keep(seed, fours * k / threads, fours * (k + 1) / threads, count, least, kept);
    return 1;
}

/* out (B, H, Q, L); `room` (threads, L) to work in. True, for it needs no other memory. */
int relative_forward(const Relative *in, float *out, float *room, int threads) {
    const int64_t heads = in->B * in->H;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int k = 0; k < threads; k++)
        best()->relative(in, heads * k / threads, heads * (k + 1) / threads, out, room + in->L * k);
    return 1;
}

/* `out` for each thread, all with the same query and key. */
int relative_backward(const Relative *in, const float *grads, const Related *out, float *room, int threads) {
    const int64_t heads = in->B * in->H;
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int k = 0; k < threads; k++)
        best()->relative_back(in, grads, heads * k / threads, heads * (k + 1) / threads, out + k, room + in->L * k);
    return 1;
}

/* y (n1, n2, n3, width); for each thread `waves` (2, n3, padded P) to work in. True, for it needs no other memory. */
int turn_forward(const Turn *in, float *y, float *waves, int threads) {
    const int64_t lines = in->n1 * in->n2, room = 2 * in->n3 * padded(in->width / 2);
    const Variant *code = best_for(in->width / 2);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int k = 0; k < threads; k++)
        code->turn(in, lines * k / threads, lines * (k + 1) / threads, y, waves + k * room);
    return 1;
}

/* `out` for each thread, all with the same x. */
int turn_backward(const Turn *in, const float *grads, const Turned *out, float *waves, int threads) {
    const int64_t lines = in->n1 * in->n2, room = 2 * in->n3 * padded(in->width / 2);
    const Variant *code = best_for(in->width / 2);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int k = 0; k < threads; k++)
        code->turn_back(in, grads, lines * k / threads, lines * (k + 1) / threads, out + k, waves + k * room);
    return 1;
}
