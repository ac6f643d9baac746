/* The entry points: chooses the variant for this processor, and shares lines among threads. */

#define VARIANT contextual_any
#include "lines.h"

static int widest = 16;

/* No vectors of more numbers than so many. For tests. */
void contextual_use(int lanes) { widest = lanes; }

static const Variant *best(void) {
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
    extern const Variant contextual_avx2, contextual_avx512;
    const int fma = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const int masks = __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    if (widest >= 16 && fma && masks && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq"))
        return &contextual_avx512;
    if (widest >= 8 && fma) return &contextual_avx2;
#endif
    return &contextual_any;
}

int64_t contextual_scratch(int64_t L, int64_t D, int64_t P, int64_t T) { return best()->scratch(L, D, P, T); }

/* Where lines of thread k begin: those of a row's head are one thread's, as is the gradient of its steps. */
static int64_t first_line(const Input *in, int64_t k, int64_t threads) { return in->B * in->H * k / threads * in->Q; }

/* out (B, H, Q, L). Each thread has `contextual_scratch` floats to work in. */
void contextual_forward(const Input *in, float *out, float *scratch, int threads) {
    const int64_t size = contextual_scratch(in->L, in->D, in->P, in->T);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int k = 0; k < threads; k++)
        best()->forward(in, first_line(in, k, threads), first_line(in, k + 1, threads), out, scratch + k * size);
}

/* grads (B, H, Q, L). The gradients of weight, bias, table and steps are zero before. */
void contextual_backward(const Input *in, const float *grads, const Gradients *out, float *scratch, int threads) {
    const int64_t size = contextual_scratch(in->L, in->D, in->P, in->T);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int k = 0; k < threads; k++)
        best()->backward(in, grads, first_line(in, k, threads), first_line(in, k + 1, threads), out,
                         scratch + k * size);
    for (int k = 0; k < threads; k++) best()->collect(in, scratch + k * size, out);
}
