/* Dice, f(x) = x (alpha + (1 - alpha) sigmoid(factor x + shift)), and dropout: ops/dice.py says it in torch. */

typedef struct {
    int64_t rows, width;
    const float *x;                      /* (rows, width) */
    const float *factor, *shift, *alpha; /* (width) */
    const int16_t *kept;                 /* (rows, width), 0 for what dropout drops, else 1; or null */
    float kept_factor;                   /* of what is kept */
} Dice;

/* The factors of n entries from `at` on: 0 or kept_factor. */
INLINE Floats dropout_factors(const Dice *in, int64_t at, int64_t n) {
    int16_t few[LANES] = {0};
    float wide[LANES];
    const int16_t *kept = in->kept + at;
    if (UNLIKELY(n < LANES)) kept = memcpy(few, kept, sizeof(int16_t) * n);
    for (int v = 0; v < LANES; v++) wide[v] = kept[v];
    return in->kept_factor * load(wide);
}

static void dice_rows(const Dice *in, int64_t from, int64_t to, float *y) {
    for (int64_t at = from * in->width; at < to * in->width; at += in->width) {
        for (int64_t j = 0; j < in->width; j += LANES) {
            const int64_t n = in->width - j;
            const Floats x = some(in->x + at + j, n), alpha = some(in->alpha + j, n);
            const Floats p = sigmoid(x * some(in->factor + j, n) + some(in->shift + j, n));
            Floats out = x * (alpha + (1.0f - alpha) * p);
            if (in->kept) out *= dropout_factors(in, at + j, n);
            put(y + at + j, n, out);
        }
    }
}

/* Gradients of x; to `sums` (3, padded width) are added those of factor, shift and alpha. */
static void dice_rows_back(const Dice *in, const float *grads, int64_t from, int64_t to, float *of_x, float *sums) {
    const int64_t stride = padded(in->width);
    for (int64_t at = from * in->width; at < to * in->width; at += in->width) {
        for (int64_t j = 0; j < in->width; j += LANES) {
            const int64_t n = in->width - j;
            const Floats x = some(in->x + at + j, n), alpha = some(in->alpha + j, n);
            const Floats factor = some(in->factor + j, n), p = sigmoid(x * factor + some(in->shift + j, n));
            Floats grad = some(grads + at + j, n);
            if (in->kept) grad *= dropout_factors(in, at + j, n);
            const Floats of_alpha = grad * x * (1.0f - p), of_normed = of_alpha * p * (1.0f - alpha);
            store(sums + j, load(sums + j) + of_normed * x);
            store(sums + stride + j, load(sums + stride + j) + of_normed);
            store(sums + 2 * stride + j, load(sums + 2 * stride + j) + of_alpha);
            put(of_x + at + j, n, grad * (alpha + (1.0f - alpha) * p) + of_normed * factor);
        }
    }
}
