/* Logits, scores of keys, and of queries by offset: s_ij + u . k_j + (q_i + v) . r_(i - j). pe/xlnet.py says it in
   torch. */

typedef struct {
    int64_t B, H, Q, L, D, M;
    int64_t causal;           /* what lies later than the query stays as it is */
    const float *logits;      /* (B, H, Q, L) */
    const float *query, *key; /* (B, H, Q, D) and (B, H, L, D) */
    const float *u, *v;       /* (H, D) */
    const float *offsets;     /* (H, D, M), for gradients (H, M, D): for key j of query i stands Q - 1 - i + j */
} Relative;

typedef struct {
    float *query, *key; /* as given */
    float *sums;        /* (H, 2 + M, D): of u, v and offsets; added to */
} Related;

/* Where a query's offsets begin, and how many keys it has. */
INLINE int64_t first_offset(const Relative *in, int64_t i) { return in->Q - 1 - i; }
INLINE int64_t keys_of(const Relative *in, int64_t i) { return in->causal ? in->L - first_offset(in, i) : in->L; }

/* So many vectors of keys, the last of which may be too long for the n keys that there are. */
enum { VECTORS = 4 };
INLINE void of_keys(const Relative *in, const int vectors, int64_t n, const float *query, const float *v,
                    const float *offsets, const float *logits, const float *content, float *out) {
    Floats sum[VECTORS];
    for (int k = 0; k < vectors; k++)
        sum[k] = some(logits + k * LANES, n - k * LANES) + some(content + k * LANES, n - k * LANES);
    for (int64_t d = 0; d < in->D; d++) {
        const Floats facing = all(query[d] + v[d]);
        for (int k = 0; k < vectors; k++) sum[k] += facing * some(offsets + d * in->M + k * LANES, n - k * LANES);
    }
    for (int k = 0; k < vectors; k++) put(out + k * LANES, n - k * LANES, sum[k]);
}

/* Heads from, ..., to - 1 of B H; `content` holds L numbers. */
static void relative_heads(const Relative *in, int64_t from, int64_t to, float *out, float *content) {
    for (int64_t head = from; head < to; head++) {
        const int64_t D = in->D, L = in->L, h = head % in->H;
        for (int64_t j = 0; j < L; j++) {
            Floats sum = {0};
            for (int64_t d = 0; d < D; d += LANES)
                sum += some(in->key + (head * L + j) * D + d, D - d) * some(in->u + h * D + d, D - d);
            content[j] = sum_of(sum);
        }
        for (int64_t i = 0; i < in->Q; i++) {
            const int64_t line = head * in->Q + i, at = line * L, keys = keys_of(in, i);
            const float *query = in->query + line * D, *v = in->v + h * D;
            const float *offsets = in->offsets + h * D * in->M + first_offset(in, i);
            for (int64_t j = 0; j < keys; j += VECTORS * LANES) {
                const float *logits = in->logits + at + j, *from_j = offsets + j;
                switch ((keys - j + LANES - 1) / LANES) { /* each with as many registers */
                case 1: of_keys(in, 1, keys - j, query, v, from_j, logits, content + j, out + at + j); break;
                case 2: of_keys(in, 2, keys - j, query, v, from_j, logits, content + j, out + at + j); break;
                case 3: of_keys(in, 3, keys - j, query, v, from_j, logits, content + j, out + at + j); break;
                default: of_keys(in, VECTORS, keys - j, query, v, from_j, logits, content + j, out + at + j);
                }
            }
            memcpy(out + at + keys, in->logits + at + keys, sizeof(float) * (L - keys));
        }
    }
}

static void relative_heads_back(const Relative *in, const float *grads, int64_t from, int64_t to, const Related *out,
                                float *content) {
    for (int64_t head = from; head < to; head++) {
        const int64_t D = in->D, L = in->L, M = in->M, h = head % in->H;
        const float *v = in->v + h * D, *offsets = in->offsets + h * D * M;
        float *of_u = out->sums + h * (2 + M) * D, *of_v = of_u + D, *of_offsets = of_v + D;
        memset(content, 0, sizeof(float) * L);
        for (int64_t i = 0; i < in->Q; i++) {
            const int64_t line = head * in->Q + i, first = first_offset(in, i), keys = keys_of(in, i);
            const float *query = in->query + line * D, *grad = grads + line * L;
            float *of_query = out->query + line * D;
            for (int64_t j = 0; j < keys; j += LANES) add_some(content + j, keys - j, some(grad + j, keys - j));
            for (int64_t d = 0; d < D; d += LANES) {
                const Floats facing = some(query + d, D - d) + some(v + d, D - d);
                const float *offset = offsets + first * D + d;
                float *of_offset = of_offsets + first * D + d;
                Floats even = {0}, odd = {0}; /* so that neither waits for the other */
                int64_t j = 0;
                for (; j + 1 < keys; j += 2) {
                    even += grad[j] * some(offset + j * D, D - d);
                    odd += grad[j + 1] * some(offset + (j + 1) * D, D - d);
                    add_some(of_offset + j * D, D - d, grad[j] * facing);
                    add_some(of_offset + (j + 1) * D, D - d, grad[j + 1] * facing);
                }
                if (j < keys) {
                    even += grad[j] * some(offset + j * D, D - d);
                    add_some(of_offset + j * D, D - d, grad[j] * facing);
                }
                put(of_query + d, D - d, even + odd);
            }
            for (int64_t d = 0; d < D; d++) of_v[d] += of_query[d];
        }
        for (int64_t j = 0; j < L; j++) {
            const int64_t at = (head * L + j) * D;
            for (int64_t d = 0; d < D; d++) {
                of_u[d] += content[j] * in->key[at + d];
                out->key[at + d] = content[j] * in->u[h * D + d];
            }
        }
    }
}
