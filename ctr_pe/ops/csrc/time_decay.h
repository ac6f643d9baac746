/* A bias by the time between query and key, amount exp(-decay log(1 + time / unit)) + table[bucket]:
   ops/time_decay.py says it in torch. Bucket 0 holds time 0, bucket k the times of k bits. */

enum { BUCKETS = 32, SUMS = BUCKETS + 2 };

typedef struct {
    int64_t B, H, Q, L;
    float unit;
    const float *amount, *decay, *table; /* (H), (H) and (H, 32) */
    const int64_t *query, *key;          /* ages (B, Q) and (B, L), seconds */
} TimeDecay;

/* The logarithm of x in [1, 1e38], to 1e-7. */
INLINE Floats logarithm(Floats x) {
    const Ints half = (Ints)x - 0x3f3504f3, power = half >> 23; /* from the root of a half to that of two */
    const Floats part = (Floats)((half & 0x7fffff) + 0x3f3504f3) - 1.0f, s = part / (part + 2.0f), z = s * s;
    const Floats high = z * (0.4f + z * (0.285714286f + z * 0.222222222f));
    return __builtin_convertvector(power, Floats) * 0.693147181f + s * (2.0f + z * 0.666666667f + z * high);
}

/* log(1 + time / unit) and the bucket of the times between a query and its keys. */
INLINE void times_of(const TimeDecay *in, int64_t line, float *log_time, int32_t *bucket) {
    const int64_t own = in->query[line], *key = in->key + line / in->Q * in->L;
    for (int64_t j = 0; j < in->L; j++) {
        const double time = (double)(key[j] < own ? own - key[j] : key[j] - own);
        int64_t bits;
        memcpy(&bits, &time, sizeof bits);
        const int32_t power = (int32_t)(bits >> 52) - 1022;
        bucket[j] = power < 0 ? 0 : power < BUCKETS ? power : BUCKETS - 1;
        log_time[j] = 1.0f + (float)time / in->unit;
    }
    for (int64_t j = 0; j < in->L; j += LANES) store(log_time + j, logarithm(load(log_time + j)));
}

INLINE Floats bucket_values(const float *table, Ints bucket) {
#if defined(__AVX512F__) && defined(SHUFFLE)
    return SHUFFLE(load(table), load(table + LANES), bucket);
#else
    Floats found;
    for (int v = 0; v < LANES; v++) found[v] = table[bucket[v]];
    return found;
#endif
}

/* exp(-decay log_time) */
INLINE Floats power_law(Floats log_time, float decay) {
    const Floats x = -decay * log_time;
    return where(x < -87.0f, all(0.0f), exponential(lesser(all(87.0f), x)));
}

/* A line is one query, of all heads. scratch (2, padded L), zeros. */
static void time_decay_lines(const TimeDecay *in, int64_t from, int64_t to, float *out, float *scratch) {
    float *log_time = scratch;
    int32_t *bucket = (int32_t *)(scratch + padded(in->L));
    for (int64_t line = from; line < to; line++) {
        times_of(in, line, log_time, bucket);
        for (int64_t h = 0; h < in->H; h++) {
            const int64_t at = ((line / in->Q * in->H + h) * in->Q + line % in->Q) * in->L;
            for (int64_t j = 0; j < in->L; j += LANES) {
                Ints in_bucket;
                memcpy(&in_bucket, bucket + j, sizeof in_bucket);
                const Floats bias = in->amount[h] * power_law(load(log_time + j), in->decay[h])
                                     + bucket_values(in->table + h * BUCKETS, in_bucket);
                put(out + at + j, in->L - j, bias);
            }
        }
    }
}

/* To `sums` (H, 34, 16) are added the gradients of the table, of the amount, and what times -amount is that of the
   decay, each lane by itself. */
static void time_decay_lines_back(const TimeDecay *in, const float *grads, int64_t from, int64_t to, float *sums,
                                  float *scratch) {
    float *log_time = scratch;
    int32_t *bucket = (int32_t *)(scratch + padded(in->L));
    for (int64_t line = from; line < to; line++) {
        times_of(in, line, log_time, bucket);
        for (int64_t h = 0; h < in->H; h++) {
            const int64_t at = ((line / in->Q * in->H + h) * in->Q + line % in->Q) * in->L;
            float *sum = sums + h * SUMS * 16;
            Floats of_amount = {0}, of_decay = {0};
            for (int64_t j = 0; j < in->L; j += LANES) {
                const Floats grad = some(grads + at + j, in->L - j), x = load(log_time + j);
                const Floats of_power = grad * power_law(x, in->decay[h]);
                of_amount += of_power;
                of_decay += of_power * x;
                float part[LANES];
                store(part, grad);
                for (int v = 0; v < LANES; v++) sum[bucket[j + v] * 16 + v] += part[v];
            }
            store(sum + BUCKETS * 16, load(sum + BUCKETS * 16) + of_amount);
            store(sum + (BUCKETS + 1) * 16, load(sum + (BUCKETS + 1) * 16) + of_decay);
        }
    }
}
