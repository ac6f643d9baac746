/* logits + t . e[p], p the sum of gates from the key to the newest one: contextual.py says it in torch.

   All that is done for one query stays in the first cache. On the way back it is done again, so that nothing is kept.

   B rows, H heads, Q queries, L keys, P width of queries and table, T rows of the table that places can reach; a line
   is one (b, h, q). Arrays are dense float32. Each thread has `contextual_scratch` floats to work in. */

#include <math.h>
#include <stdint.h>
#include <string.h>

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__) && __GNUC__ >= 12
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif
#define INLINE static inline __attribute__((always_inline))

enum { LANES = 16 };
#define EACH_LANE _Pragma("omp simd") for (int v = 0; v < LANES; v++)

typedef struct {
    int64_t B, H, Q, L, P, T;
    float sign;             /* gates are sigmoid(sign * logit) * steps */
    const float *logits;    /* (B, H, Q, L) */
    const float *query;     /* (B, H, Q, P) */
    const float *table;     /* (T, P) */
    const float *steps;     /* (B, H, Q, L), or null for ones */
    const uint8_t *allowed; /* (B, 1, Q, L) */
} Input;

typedef struct {
    float *logits, *query, *table, *steps; /* shapes of Input; the table's are one thread's part; steps may be null */
} Gradients;

typedef float Pair __attribute__((vector_size(8)));

typedef struct {
    float *own;                /* gates without their steps */
    float *gate, *place;       /* of each key; on the way back, gate holds its gradient */
    float *score;              /* of the table's rows, the last one twice; on the way back, their gradients */
    float *slope;              /* from a row's score to the next one's */
    Pair *even, *odd;          /* gradients of a row and the next; two, so that no addition waits for the one before */
    float *query, *of_query;   /* and its gradient, rounded up to full lanes */
    float *table, *gradients;  /* (T, P), and its gradients, rows rounded up to full lanes */
    float *columns;            /* (P, T + 1), the last row twice, rounded up likewise */
} Scratch;

typedef struct {
    int64_t first, n; /* from the first allowed key to the last */
    float top;        /* the oldest key's place */
    int64_t rows;     /* of the table, which places reach */
} Span;

INLINE int64_t up(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

int64_t contextual_scratch(int64_t L, int64_t P, int64_t T) {
    return 3 * up(L) + 6 * (up(T) + LANES) + 2 * up(P) + 2 * T * up(P) + P * up(T + 1);
}

INLINE Scratch prepare(const Input *in, float *at) {
    const int64_t keys = up(in->L), rows = up(in->T), width = up(in->P);
    Scratch s;
    memset(at, 0, sizeof(float) * contextual_scratch(in->L, in->P, in->T));
    s.own = at, at += keys;
    s.gate = at, at += keys;
    s.place = at, at += keys;
    s.score = at, at += rows + LANES;
    s.slope = at, at += rows + LANES;
    s.even = (Pair *)at, at += 2 * (rows + LANES);
    s.odd = (Pair *)at, at += 2 * (rows + LANES);
    s.query = at, at += width;
    s.of_query = at, at += width;
    s.table = at, at += in->T * width;
    s.gradients = at, at += in->T * width;
    s.columns = at;
    for (int64_t p = 0; p < in->P; p++) {
        float *column = s.columns + p * up(in->T + 1);
        for (int64_t t = 0; t < in->T; t++) s.table[t * width + p] = column[t] = in->table[t * in->P + p];
        column[in->T] = column[in->T - 1];
    }
    return s;
}

/* exp as a power of two, its fraction by a polynomial: to 1e-7. NaN stays NaN. */
INLINE float sigmoid(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 87.0f ? 87.0f : x;
    float whole = (x * -1.44269504f + 12582912.0f) - 12582912.0f;
    float r = (x * -1.44269504f - whole) - x * 1.92596299e-8f;
    float e = 0.00961812911f + r * (0.00133335581f + r * 0.000154035304f);
    e = 1.0f + r * (0.693147181f + r * (0.240226507f + r * (0.0555041087f + r * e)));
    union {
        int32_t i;
        float f;
    } power;
    power.i = ((int32_t)whole + 127) << 23;
    return 1.0f / (1.0f + e * power.f);
}

/* out = sum of factor[i] * row i. Four sums in turn, because an addition waits for the one before it. */
INLINE void combine(const float *factor, int64_t n, const float *row, int64_t stride, int64_t width, float *out) {
    for (int64_t j = 0; j < width; j += LANES) {
        float a[LANES] = {0}, b[LANES] = {0}, c[LANES] = {0}, d[LANES] = {0};
        const float *restrict from = row + j;
        float *restrict to = out + j;
        int64_t i = 0;
        for (; i + 3 < n; i += 4, from += 4 * stride) {
            EACH_LANE a[v] += factor[i] * from[v];
            EACH_LANE b[v] += factor[i + 1] * from[v + stride];
            EACH_LANE c[v] += factor[i + 2] * from[v + 2 * stride];
            EACH_LANE d[v] += factor[i + 3] * from[v + 3 * stride];
        }
        for (; i < n; i++, from += stride) EACH_LANE a[v] += factor[i] * from[v];
        EACH_LANE to[v] = (a[v] + b[v]) + (c[v] + d[v]);
    }
}

/* Sums of the gates from the newest key on, which end at the last row. Returns the oldest key's sum. Four at a time,
   because an addition waits for the one before it, and to more than float's digits, because histories may be long. */
INLINE float add_up(const float *gate, int64_t n, float end, float *restrict place) {
    double sum = 0.0;
    int64_t j = n - 1;
    for (; j >= 3; j -= 4) {
        float two = gate[j] + gate[j - 1], three = two + gate[j - 2], four = three + gate[j - 3];
        float a = (float)(sum + gate[j]), b = (float)(sum + two), c = (float)(sum + three), d = (float)(sum += four);
        place[j] = a < end ? a : end;
        place[j - 1] = b < end ? b : end;
        place[j - 2] = c < end ? c : end;
        place[j - 3] = d < end ? d : end;
    }
    for (; j >= 0; j--) {
        float a = (float)(sum += gate[j]);
        place[j] = a < end ? a : end;
    }
    return (float)sum;
}

/* The first and the last byte that is not zero. */
INLINE Span trim(const uint8_t *bytes, int64_t n) {
    int64_t first = 0;
    uint64_t eight;
    for (; n - first >= 8; first += 8) {
        memcpy(&eight, bytes + first, 8);
        if (eight) break;
    }
    while (first < n && !bytes[first]) first++;
    for (; n - first >= 8; n -= 8) {
        memcpy(&eight, bytes + n - 8, 8);
        if (eight) break;
    }
    while (n > first && !bytes[n - 1]) n--;
    return (Span){first, n - first, 0.0f, 0};
}

/* Gates, places and scores of a line. */
INLINE Span walk(const Input *in, int64_t line, const Scratch *s) {
    const int64_t of_row = in->Q * in->L, bytes = in->B * of_row, floats = in->H * bytes;
    const int64_t start = line / (in->H * in->Q) * of_row + line % in->Q * in->L;
    Span span = trim(in->allowed + start, in->L);
    const int64_t n = span.n, at = line * in->L + span.first, whole = up(n);
    const float sign = in->sign, end = (float)(in->T - 1), *logits = in->logits + at, *gate = s->own;
    const uint8_t *allowed = in->allowed + start + span.first;
    float *restrict own = s->own;
    if (!n) return span;
    /* Where full lanes would read past the end of the array: */
    if (at + whole > floats) logits = memcpy(s->gate, logits, sizeof(float) * n);
    if (start + span.first + whole > bytes) allowed = memcpy(s->place, allowed, n);
    for (int64_t j = 0; j < whole; j += LANES) {
        const int left = n - j < LANES ? (int)(n - j) : LANES;
        float open[LANES];
        EACH_LANE open[v] = sigmoid(sign * logits[j + v]);
        EACH_LANE own[j + v] = allowed[j + v] ? open[v] : 0.0f;
        for (int v = left; v < LANES; v++) own[j + v] = 0.0f;
    }
    if (in->steps) {
        for (int64_t j = 0; j < n; j++) {
            float step = own[j] * in->steps[at + j];
            s->gate[j] = step < 0.0f ? 0.0f : step; /* no place lies before the table */
        }
        gate = s->gate;
    }
    span.top = add_up(gate, n, end, s->place);

    const float *query = in->query + line * in->P;
    span.rows = span.top < end ? (int64_t)span.top + 2 : in->T;
    combine(query, in->P, s->columns, up(in->T + 1), up(span.rows + 1), s->score);
    const float *restrict score = s->score;
    float *restrict slope = s->slope;
    for (int64_t k = 0; k < span.rows; k += LANES) EACH_LANE slope[k + v] = score[k + v + 1] - score[k + v];
    return span;
}

FOR_EACH_PROCESSOR static void forward_lines(const Input *in, int64_t from, int64_t to, float *out, float *scratch) {
    const Scratch s = prepare(in, scratch);
    const float *restrict place = s.place, *restrict score = s.score, *restrict slope = s.slope;
    for (int64_t line = from; line < to; line++) {
        const Span span = walk(in, line, &s);
        float *restrict result = out + line * in->L;
        memcpy(result, in->logits + line * in->L, sizeof(float) * in->L);
        result += span.first;
        if (isnan(span.top)) {
            for (int64_t j = 0; j < span.n; j++) result[j] = span.top;
            continue;
        }
        for (int64_t j = 0; j < span.n; j++) {
            int32_t row = (int32_t)place[j];
            result[j] += score[row] + (place[j] - (float)row) * slope[row];
        }
    }
}

/* Of one key: its share in the gradients of two rows; returns the gradient of its place. */
INLINE float to_rows(float grad, float place, Pair *rows, const float *slope) {
    int32_t row = (int32_t)place;
    float upper = grad * (place - (float)row);
    rows[row] += (Pair){grad - upper, upper};
    return grad * slope[row];
}

/* From the gradients of the results to those of scores, into `score`, of logits and of steps. A gate is in the places
   of its key and of all older ones. */
INLINE void to_gates(float sign, const float *grad, const float *steps, float *restrict logits,
                     float *restrict of_steps, const Span *span, const Scratch *s) {
    const int64_t n = span->n, rows = span->rows;
    const float *restrict place = s->place, *restrict slope = s->slope, *restrict own = s->own;
    Pair *restrict even = s->even, *restrict odd = s->odd;
    float *restrict score = s->score, *restrict gate = s->gate, carry = 0.0f;
    double sum = 0.0;
    int64_t j = 0;
    memset(even, 0, sizeof(Pair) * rows);
    memset(odd, 0, sizeof(Pair) * rows);
    for (; j + 3 < n; j += 4) {
        float a = to_rows(grad[j], place[j], even, slope), b = a + to_rows(grad[j + 1], place[j + 1], odd, slope);
        float c = b + to_rows(grad[j + 2], place[j + 2], even, slope);
        float d = c + to_rows(grad[j + 3], place[j + 3], odd, slope);
        float of_gates[4] = {(float)(sum + a), (float)(sum + b), (float)(sum + c), (float)(sum + d)};
        sum += d;
        memcpy(gate + j, of_gates, sizeof of_gates);
    }
    for (; j < n; j++) gate[j] = (float)(sum += to_rows(grad[j], place[j], even, slope));
    if (steps)
        for (j = 0; j < n; j++) {
            of_steps[j] = gate[j] * own[j];
            gate[j] *= steps[j];
        }
    for (j = 0; j + 3 < n; j += 4) /* as they were stored: a wider load would wait for all of them */
        for (int v = 0; v < 4; v++)
            logits[j + v] = grad[j + v] + sign * gate[j + v] * own[j + v] * (1.0f - own[j + v]);
    for (; j < n; j++) logits[j] = grad[j] + sign * gate[j] * own[j] * (1.0f - own[j]);
    for (int64_t k = 0; k < rows; k++) {
        Pair both = even[k] + odd[k];
        score[k] = both[0] + carry;
        carry = both[1]; /* zero at the last row, past which no place lies */
    }
}

FOR_EACH_PROCESSOR static void backward_lines(const Input *in, const float *grads, int64_t from, int64_t to,
                                              Gradients out, float *scratch) {
    const Scratch s = prepare(in, scratch);
    const int64_t width = up(in->P);
    for (int64_t line = from; line < to; line++) {
        const Span span = walk(in, line, &s);
        const int64_t at = line * in->L + span.first;
        float *restrict logits = out.logits + at, *query = out.query + line * in->P;
        memcpy(logits - span.first, grads + line * in->L, sizeof(float) * in->L);
        if (out.steps) memset(out.steps + line * in->L, 0, sizeof(float) * in->L);
        if (!span.n || isnan(span.top)) {
            for (int64_t j = 0; j < span.n; j++) logits[j] = span.top;
            for (int64_t p = 0; p < in->P; p++) query[p] = span.top;
            continue;
        }
        const float *steps = in->steps ? in->steps + at : 0;
        to_gates(in->sign, grads + at, steps, logits, steps ? out.steps + at : 0, &span, &s);
        memcpy(s.query, in->query + line * in->P, sizeof(float) * in->P);
        combine(s.score, span.rows, s.table, width, width, s.of_query);
        memcpy(query, s.of_query, sizeof(float) * in->P);
        for (int64_t k = 0; k < span.rows; k++)
            for (int64_t p = 0; p < width; p += LANES) {
                const float factor = s.score[k], *restrict x = s.query + p;
                float *restrict gradient = s.gradients + k * width + p;
                EACH_LANE gradient[v] += factor * x[v];
            }
    }
    for (int64_t t = 0; t < in->T; t++)
        memcpy(out.table + t * in->P, s.gradients + t * width, sizeof(float) * in->P);
}

/* out (B, H, Q, L). */
void contextual_forward(const Input *in, float *out, float *scratch, int threads) {
    const int64_t lines = in->B * in->H * in->Q, size = contextual_scratch(in->L, in->P, in->T);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int k = 0; k < threads; k++)
        forward_lines(in, lines * k / threads, lines * (k + 1) / threads, out, scratch + k * size);
}

/* grads (B, H, Q, L). The gradients of the table have an axis (threads) more. */
void contextual_backward(const Input *in, const float *grads, const Gradients *out, float *scratch, int threads) {
    const int64_t lines = in->B * in->H * in->Q, size = contextual_scratch(in->L, in->P, in->T);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int k = 0; k < threads; k++) {
        Gradients own = *out;
        own.table += k * in->T * in->P;
        backward_lines(in, grads, lines * k / threads, lines * (k + 1) / threads, own, scratch + k * size);
    }
}
