/* Logits and what the time between two events adds to them, amount exp(-decay log(1 + time / unit)) + table[bucket]:
   pe/time_bias.py says it in torch. Bucket 0 holds no time, bucket k times of k bits. */

enum { BUCKETS = 32, SUMS = BUCKETS + 2 };

typedef struct {
    int64_t B, H, Q, L;
    const float *logits;                 /* (B, H, Q, L) */
    const int64_t *query, *key;          /* (B, Q) and (B, L), seconds */
    const float *amount, *decay, *table; /* (H), (H) and (H, 32) */
    float unit;
} Fading;

/* The logarithm of x in [1, 1e38], to 1e-7. */
INLINE Floats logarithm(Floats x) {
    const Ints half = (Ints)x - 0x3f3504f3, power = half >> 23; /* from the root of a half to that of two */
    const Floats part = (Floats)((half & 0x7fffff) + 0x3f3504f3) - 1.0f, s = part / (part + 2.0f), z = s * s;
    const Floats high = z * (0.4f + z * (0.285714286f + z * 0.222222222f));
    return __builtin_convertvector(power, Floats) * 0.693147181f + s * (2.0f + z * 0.666666667f + z * high);
}

/* Logarithms and buckets of the times between a query and its keys. */
INLINE void apart(const Fading *in, int64_t line, float *far, int32_t *bucket) {
    const int64_t own = in->query[line], *key = in->key + line / in->Q * in->L;
    for (int64_t j = 0; j < in->L; j++) {
        const double time = (double)(key[j] < own ? own - key[j] : key[j] - own);
        int64_t bits;
        memcpy(&bits, &time, sizeof bits);
        const int32_t power = (int32_t)(bits >> 52) - 1022;
        bucket[j] = power < 0 ? 0 : power < BUCKETS ? power : BUCKETS - 1;
        far[j] = 1.0f + (float)time / in->unit;
    }
    for (int64_t j = 0; j < in->L; j += LANES) store(far + j, logarithm(load(far + j)));
}

INLINE Floats look_at(const float *table, Ints bucket) {
#if defined(__AVX512F__) && defined(SHUFFLE)
    return SHUFFLE(load(table), load(table + LANES), bucket);
#else
    Floats found;
    for (int v = 0; v < LANES; v++) found[v] = table[bucket[v]];
    return found;
#endif
}

INLINE Floats fade(Floats far, float decay) {
    const Floats x = -decay * far;
    return where(x < -87.0f, all(0.0f), exponential(lesser(all(87.0f), x)));
}

/* Lines from, ..., to - 1 of B Q, of all heads. far and bucket hold L numbers rounded up to 16. */
static void fade_lines(const Fading *in, int64_t from, int64_t to, float *out, float *far, int32_t *bucket) {
    for (int64_t line = from; line < to; line++) {
        apart(in, line, far, bucket);
        for (int64_t h = 0; h < in->H; h++) {
            const int64_t at = ((line / in->Q * in->H + h) * in->Q + line % in->Q) * in->L;
            for (int64_t j = 0; j < in->L; j += LANES) {
                Ints in_bucket;
                memcpy(&in_bucket, bucket + j, sizeof in_bucket);
                const Floats added = in->amount[h] * fade(load(far + j), in->decay[h])
                                     + look_at(in->table + h * BUCKETS, in_bucket);
                put(out + at + j, in->L - j, some(in->logits + at + j, in->L - j) + added);
            }
        }
    }
}

/* To `sums` (H, 34, 16) are added the gradients of the table, of the amount, and what times -amount is that of the
   decay, each over the lanes. */
static void fade_lines_back(const Fading *in, const float *grads, int64_t from, int64_t to, float *sums, float *far,
                            int32_t *bucket) {
    for (int64_t line = from; line < to; line++) {
        apart(in, line, far, bucket);
        for (int64_t h = 0; h < in->H; h++) {
            const int64_t at = ((line / in->Q * in->H + h) * in->Q + line % in->Q) * in->L;
            float *sum = sums + h * SUMS * 16;
            Floats of_amount = {0}, of_decay = {0};
            for (int64_t j = 0; j < in->L; j += LANES) {
                const Floats grad = some(grads + at + j, in->L - j), x = load(far + j);
                const Floats faded = grad * fade(x, in->decay[h]);
                of_amount += faded;
                of_decay += faded * x;
                float part[LANES];
                store(part, grad);
                for (int v = 0; v < LANES; v++) sum[bucket[j + v] * 16 + v] += part[v];
            }
            store(sum + BUCKETS * 16, load(sum + BUCKETS * 16) + of_amount);
            store(sum + (BUCKETS + 1) * 16, load(sum + (BUCKETS + 1) * 16) + of_decay);
        }
    }
}
