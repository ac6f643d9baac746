/* Dice, f(x) = x (alpha + (1 - alpha) sigmoid(factor x + shift)), and dropout: units/pieces.py says it in torch. */

typedef struct {
    int64_t rows, width;
    const float *x;                      /* (rows, width) */
    const float *factor, *shift, *alpha; /* (width) */
    const int16_t *kept;                 /* (rows, width), 0 for what dropout leaves out, else 1; or null */
    float scale;                         /* of what is kept */
} Gate;

INLINE Floats shares(const Gate *in, int64_t at, int64_t n) {
    int16_t few[LANES] = {0};
    float wide[LANES];
    const int16_t *kept = in->kept + at;
    if (UNLIKELY(n < LANES)) kept = memcpy(few, kept, sizeof(int16_t) * n);
    for (int v = 0; v < LANES; v++) wide[v] = kept[v];
    return in->scale * load(wide);
}

/* Rows from, ..., to - 1 of y. */
static void gate_rows(const Gate *in, int64_t from, int64_t to, float *y) {
    for (int64_t at = from * in->width; at < to * in->width; at += in->width) {
        for (int64_t j = 0; j < in->width; j += LANES) {
            const int64_t n = in->width - j;
            const Floats x = some(in->x + at + j, n), alpha = some(in->alpha + j, n);
            const Floats p = sigmoid(x * some(in->factor + j, n) + some(in->shift + j, n));
            Floats out = x * (alpha + (1.0f - alpha) * p);
            if (in->kept) out *= shares(in, at + j, n);
            put(y + at + j, n, out);
        }
    }
}

/* Of rows of sums, for vectors of any size. */
INLINE int64_t stride_of(const Gate *in) { return (in->width + 15) / 16 * 16; }

/* Gradients of x; to `sums` (3, stride) are added those of alpha, shift and factor. */
static void gate_rows_back(const Gate *in, const float *grads, int64_t from, int64_t to, float *of_x, float *sums) {
    const int64_t stride = stride_of(in);
    for (int64_t at = from * in->width; at < to * in->width; at += in->width) {
        for (int64_t j = 0; j < in->width; j += LANES) {
            const int64_t n = in->width - j;
            const Floats x = some(in->x + at + j, n), alpha = some(in->alpha + j, n);
            const Floats factor = some(in->factor + j, n), p = sigmoid(x * factor + some(in->shift + j, n));
            Floats grad = some(grads + at + j, n);
            if (in->kept) grad *= shares(in, at + j, n);
            const Floats of_alpha = grad * x * (1.0f - p), of_normed = of_alpha * p * (1.0f - alpha);
            store(sums + j, load(sums + j) + of_alpha);
            store(sums + stride + j, load(sums + stride + j) + of_normed);
            store(sums + 2 * stride + j, load(sums + 2 * stride + j) + of_normed * x);
            put(of_x + at + j, n, grad * (alpha + (1.0f - alpha) * p) + of_normed * factor);
        }
    }
}
