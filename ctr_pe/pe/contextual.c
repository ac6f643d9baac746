/* logits + query . e[p], p the sum of gates from the key to the newest one: contextual.py says it in torch.

A query's gates, positions and scores stay in the first cache from the logits to the result. Going backward they are
computed again, so that nothing is kept but what came in.

   B rows, H heads, Q queries, L keys, P width of the table, T rows of it that positions can reach; "line" (b, h, q).
   All arrays are dense float32. Scratch is the caller's, one piece of `scratch_size` floats for each thread. */

#include <stdint.h>
#include <string.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__) && !defined(__clang__)
#define FOR_EACH_PROCESSOR __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define FOR_EACH_PROCESSOR
#endif
#define INLINE static inline __attribute__((always_inline))

enum { LANES = 16 };
#define LANE _Pragma("omp simd") for (int v = 0; v < LANES; v++)

typedef struct {
    int64_t B, H, Q, L, P, T;
    float sign;            /* gates are sigmoid(sign * logit) * steps */
    const float *logits;   /* (B, H, Q, L) */
    const float *query;    /* (B, H, Q, P) */
    const float *table;    /* (T, P) */
    const float *steps;    /* (B, H, Q, L), or null for ones */
    const uint8_t *allowed; /* (B, 1, Q, L) */
} Input;

typedef struct {
    float *own;    /* sigmoids, a gate without its step */
    float *gate;
    float *place;
    float *score;  /* of the table's rows under the query, the last row once more */
    float *slope;  /* from a row's score to the next one's */
    float *above, *below; /* gradients of rows: two interleaved halves, so that one store need not wait for the last */
    float *wide;   /* the table, (T, P) with P rounded up */
    float *tall;   /* and turned, (P, T) with T rounded up */
    float *grad;   /* as wide */
    float *part;   /* (P rounded up) */
} Scratch;

typedef struct {
    int64_t first, last; /* the keys from the first allowed one to the last, exclusive */
    int64_t rows;        /* of the table that their positions reach */
} Span;

INLINE int64_t up(int64_t n) { return (n + LANES - 1) / LANES * LANES; }

int64_t scratch_size(int64_t L, int64_t P, int64_t T) {
    return 3 * (up(L) + LANES) + 6 * (up(T) + 2 * LANES) + 2 * T * up(P) + P * (up(T) + LANES) + up(P);
}

INLINE Scratch lay_out(const Input *in, float *at) {
    int64_t keys = up(in->L) + LANES, rows = up(in->T) + 2 * LANES, width = up(in->P);
    Scratch s;
    s.own = at, at += keys;
    s.gate = at, at += keys;
    s.place = at, at += keys;
    s.score = at, at += rows;
    s.slope = at, at += rows;
    s.above = at, at += 2 * rows;
    s.below = at, at += 2 * rows;
    s.wide = at, at += in->T * width;
    s.grad = at, at += in->T * width;
    s.tall = at, at += in->P * (up(in->T) + LANES);
    s.part = at;
    memset(s.wide, 0, sizeof(float) * 2 * in->T * width);
    memset(s.tall, 0, sizeof(float) * in->P * (up(in->T) + LANES));
    for (int64_t t = 0; t < in->T; t++)
        for (int64_t p = 0; p < in->P; p++) {
            float x = in->table[t * in->P + p];
            s.wide[t * width + p] = x;
            s.tall[p * up(in->T) + t] = x;
        }
    return s;
}

/* To 1e-7: exp as a power of two, its fraction by a polynomial. NaN stays NaN. */
INLINE float sigmoid(float x) {
    x = x < -87.0f ? -87.0f : x;
    x = x > 87.0f ? 87.0f : x;
    float y = x * -1.44269504f;
    float whole = (y + 12582912.0f) - 12582912.0f;
    float r = (x * -1.0f - whole * 0.693145752f) - whole * 1.42860677e-6f; /* ln 2 in two parts */
    float e = 1.0f + r * (1.0f + r * (0.5f + r * (0.16666667f + r * (0.041666668f + r * (0.008333334f + r * 0.0013888889f)))));
    union {
        int32_t i;
        float f;
    } power;
    power.i = ((int32_t)whole + 127) << 23;
    return 1.0f / (1.0f + e * power.f);
}

/* From the first byte that is not zero to the last, exclusive. */
INLINE Span trim(const uint8_t *bytes, int64_t n) {
    Span span = {0, n, 0};
    uint64_t eight;
    for (; n - span.first >= 8; span.first += 8) {
        memcpy(&eight, bytes + span.first, 8);
        if (eight) break;
    }
    while (span.first < n && !bytes[span.first]) span.first++;
    for (; span.last - span.first >= 8; span.last -= 8) {
        memcpy(&eight, bytes + span.last - 8, 8);
        if (eight) break;
    }
    while (span.last > span.first && !bytes[span.last - 1]) span.last--;
    return span;
}

/* Gates of a line; returns their sum. */
INLINE float open_gates(const Input *in, int64_t line, Span *span, const Scratch *s) {
    const uint8_t *allowed = in->allowed + (line / (in->H * in->Q) * in->Q + line % in->Q) * in->L;
    *span = trim(allowed, in->L);
    const int64_t n = span->last - span->first, whole = up(n);
    const float sign = in->sign;
    float *restrict own = s->own, *restrict gate = s->gate;
    float sum[LANES] = {0};
    allowed += span->first;
    memcpy(own, in->logits + line * in->L + span->first, sizeof(float) * n);
    for (int64_t j = n; j < whole; j++) own[j] = sign * -100.0f;
    for (int64_t j = 0; j < whole; j += LANES) LANE own[j + v] = sigmoid(sign * own[j + v]);
    for (int64_t j = 0; j < n; j++) own[j] = allowed[j] ? own[j] : 0.0f;
    if (in->steps) {
        memcpy(gate, in->steps + line * in->L + span->first, sizeof(float) * n);
        for (int64_t j = n; j < whole; j++) gate[j] = 0.0f;
        for (int64_t j = 0; j < whole; j += LANES) LANE gate[j + v] *= own[j + v];
    } else {
        memcpy(gate, own, sizeof(float) * whole);
    }
    for (int64_t j = 0; j < whole; j += LANES) LANE sum[v] += gate[j + v];
    for (int half = LANES / 2; half; half /= 2)
        for (int v = 0; v < half; v++) sum[v] += sum[v + half];
    return sum[0];
}

/* Scores the rows that positions up to `top` reach, with room for its rounding. */
INLINE void score_rows(const Input *in, int64_t line, float top, Span *span, const Scratch *s) {
    int64_t rows = top < (float)(in->T - 1) ? (int64_t)top + 3 : in->T;
    span->rows = rows = rows < in->T ? rows : in->T;
    const float *query = in->query + line * in->P;
    int64_t stride = up(in->T);
    for (int64_t k = 0; k < rows; k += LANES) {
        float sum[LANES] = {0};
        for (int64_t p = 0; p < in->P; p++) {
            float factor = query[p];
            const float *row = s->tall + p * stride + k;
            LANE sum[v] += factor * row[v];
        }
        memcpy(s->score + k, sum, sizeof sum);
    }
    s->score[rows] = s->score[rows - 1];
    for (int64_t k = 0; k < rows; k += LANES) LANE s->slope[k + v] = s->score[k + v + 1] - s->score[k + v];
}

FOR_EACH_PROCESSOR static void forward_lines(const Input *in, int64_t from, int64_t to, float *out, float *scratch) {
    Scratch s = lay_out(in, scratch);
    const float end = (float)(in->T - 1);
    for (int64_t line = from; line < to; line++) {
        Span span;
        float top = open_gates(in, line, &span, &s);
        const float *logits = in->logits + line * in->L;
        float *result = out + line * in->L;
        memcpy(result, logits, sizeof(float) * in->L);
        if (span.first == span.last) continue;
        if (top != top) {
            for (int64_t j = span.first; j < span.last; j++) result[j] = top;
            continue;
        }
        score_rows(in, line, top, &span, &s);
        result += span.first, logits += span.first;
        const float *restrict gate = s.gate, *restrict score = s.score, *restrict slope = s.slope;
        float place = 0.0f;
        for (int64_t j = span.last - span.first - 1; j >= 0; j--) {
            place += gate[j];
            float at = place < end ? place : end;
            int32_t row = (int32_t)at;
            result[j] = logits[j] + (score[row] + (at - (float)row) * slope[row]);
        }
    }
}

/* From here on in a line, `place` holds the gradients of gates. */
INLINE void give_back(const float *grad, int64_t j, float *rows, float *total, Scratch *s) {
    int32_t row = (int32_t)s->place[j];
    float upper = grad[j] * (s->place[j] - (float)row);
    rows[2 * row] += grad[j] - upper;
    rows[2 * row + 1] += upper;
    *total += grad[j] * s->slope[row];
    s->place[j] = *total;
}

FOR_EACH_PROCESSOR static void backward_lines(const Input *in, int64_t from, int64_t to, const float *grads,
                                              float *of_logits, float *of_query, float *of_table, float *of_steps,
                                              float *scratch) {
    Scratch s = lay_out(in, scratch);
    const float end = (float)(in->T - 1);
    const int64_t P = in->P, width = up(P);
    for (int64_t line = from; line < to; line++) {
        Span span;
        float top = open_gates(in, line, &span, &s);
        const float *grad = grads + line * in->L, *query = in->query + line * P;
        float *result = of_logits + line * in->L, *steps = of_steps ? of_steps + line * in->L : 0;
        memcpy(result, grad, sizeof(float) * in->L);
        if (steps) memset(steps, 0, sizeof(float) * in->L);
        if (span.first == span.last || top != top) {
            for (int64_t j = span.first; j < span.last; j++) result[j] = top;
            for (int64_t p = 0; p < P; p++) of_query[line * P + p] = span.first == span.last ? 0.0f : top;
            continue;
        }
        score_rows(in, line, top, &span, &s);
        int64_t n = span.last - span.first, rows = span.rows;
        grad += span.first, result += span.first;
        float place = 0.0f;
        for (int64_t j = n - 1; j >= 0; j--) {
            place += s.gate[j];
            s.place[j] = place < end ? place : end;
        }
        memset(s.above, 0, sizeof(float) * 2 * (rows + 1));
        memset(s.below, 0, sizeof(float) * 2 * (rows + 1));
        float total = 0.0f;
        int64_t j = 0;
        for (; j + 1 < n; j += 2) {
            give_back(grad, j, s.above, &total, &s);
            give_back(grad, j + 1, s.below, &total, &s);
        }
        if (j < n) give_back(grad, j, s.above, &total, &s);

        if (steps) {
            const float *step = in->steps + line * in->L + span.first;
            for (j = 0; j < n; j++) {
                steps[span.first + j] = s.place[j] * s.own[j];
                s.place[j] *= step[j];
            }
        }
        const float sign = in->sign, *restrict own = s.own;
        float *restrict change = s.place;
        for (j = 0; j < n; j += LANES) LANE change[j + v] *= sign * own[j + v] * (1.0f - own[j + v]);
        for (j = 0; j < n; j++) result[j] += change[j];

        float carry = 0.0f;
        for (int64_t k = 0; k < rows; k++) {
            s.score[k] = s.above[2 * k] + s.below[2 * k] + carry;
            carry = s.above[2 * k + 1] + s.below[2 * k + 1];
        }
        s.score[rows - 1] += carry;
        for (int64_t p = 0; p < P; p += LANES) {
            float sum[LANES] = {0}, line_query[LANES] = {0};
            memcpy(line_query, query + p, sizeof(float) * (P - p < LANES ? P - p : LANES));
            for (int64_t k = 0; k < rows; k++) {
                float factor = s.score[k];
                const float *restrict row = s.wide + k * width + p;
                float *restrict gradient = s.grad + k * width + p;
                LANE sum[v] += factor * row[v];
                LANE gradient[v] += factor * line_query[v];
            }
            memcpy(of_query + line * P + p, sum, sizeof(float) * (P - p < LANES ? P - p : LANES));
        }
    }
    for (int64_t t = 0; t < in->T; t++) memcpy(of_table + t * P, s.grad + t * width, sizeof(float) * P);
}

/* out (B, H, Q, L). */
void forward(const Input *in, float *out, float *scratch, int threads) {
    int64_t lines = in->B * in->H * in->Q, size = scratch_size(in->L, in->P, in->T);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int k = 0; k < threads; k++)
        forward_lines(in, lines * k / threads, lines * (k + 1) / threads, out, scratch + k * size);
}

/* of_logits and of_steps (or null) (B, H, Q, L), of_query (B, H, Q, P), of_table (threads, T, P), to be summed. */
void backward(const Input *in, const float *grads, float *of_logits, float *of_query, float *of_table, float *of_steps,
              float *scratch, int threads) {
    int64_t lines = in->B * in->H * in->Q, size = scratch_size(in->L, in->P, in->T);
#pragma omp parallel for num_threads(threads) schedule(static, 1)
    for (int k = 0; k < threads; k++)
        backward_lines(in, lines * k / threads, lines * (k + 1) / threads, grads, of_logits, of_query,
                       of_table + k * in->T * in->P, of_steps, scratch + k * size);
}
