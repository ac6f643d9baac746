/* logits + t' . e[p], p the sum of gates from the key to the newest allowed one; ops/contextual/reference.py says it in
   torch. With keys and values it is the whole attention: logits are their products with the queries, and what comes out
   is pooled by the softmax.

   All that a few queries need stays in the L1 cache. The backward computes it again, so that nothing but the norms of the
   softmax is kept. Keys are taken a vector at a time, from the newest on, so that a vector that is not full reaches
   before the oldest key. Lines are taken from the last on, so that what is written there is overwritten by its line.

   B batch, H heads, Q queries, L keys, D width of queries, P that of the table, T its rows that positions can reach; a
   line is the keys of one query, (b, h, q). Arrays are dense. */

typedef struct {
    int64_t B, H, Q, L, D, P, T;
    int64_t newest_whole;   /* whether the newest gate counts in full, whatever its step */
    float sign, scale;      /* gates are sigmoid(sign * logit) * steps; t' = SiLU(W t + b), or scale * t */
    float product;          /* of attention: logits are so many times query . key */
    float factor;           /* of the attention weights that dropout keeps */
    const float *logits;    /* (B, H, Q, L), or null for attention */
    const float *query;     /* t (B, H, Q, D); (B, Q, H, D) for attention */
    const float *keys;      /* (B, L, H, D) and values of the same shape for attention, or null */
    const float *values;
    const float *weight;    /* W (P, D) and b (P), or null: D is P then */
    const float *bias;
    const float *table;     /* (T, P) */
    const float *steps;     /* (B, H, L), or null for ones */
    const uint8_t *allowed; /* (B, 1, Q, L) */
    const int16_t *kept;    /* of attention (B, H, Q, L), 0 for weights that dropout drops, else 1; or null */
    float *norms;           /* of attention (B, H, Q, 2): the largest logit, and 1 over the sum of exponentials */
} Contextual;

typedef struct {
    float *logits, *query, *keys, *values;
    float *weight, *bias, *table, *steps; /* these are added to */
} ContextualGradients;

enum { LINES = 4, PARTS = 2 }; /* lines computed together; see `part` */
typedef float Pair __attribute__((vector_size(8)));

typedef struct { /* the scratch of a line */
    int64_t line, first, n; /* keys from the first that is allowed to the last */
    float top;              /* the position of the oldest one */
    int64_t rows;           /* of the table, which positions reach */
    int64_t pad;            /* floats before the first key, so that vectors are aligned */
    float *gate, *position; /* of each key: its gate without the step, its position */
    float *weight, *grad;   /* its attention weight, and the gradient of that */
    float *score;           /* of each row of the table, the last one twice, LANES more; then their gradients */
    int32_t *row;           /* of each key, and its parts of the gradients of this row's score and the next one's */
    Pair *parts;
    Pair *part[PARTS];      /* sums of those parts, alternating, so that no addition waits for the one before */
    float *room[4];         /* for the four that follow, LANES before the first and up(L); only for attention */
    float *logits, *result; /* of all keys: the input; the output, or where the gradient of the input goes */
    const float *grads;     /* of the output */
    float *kept;            /* attention weights that are pooled, after dropout */
} Line;

typedef struct { /* keys or values of a head: as rows (L, D) and columns (D, L), and sums of gradients (L, D) */
    float *rows, *columns, *grads;
} Items;

typedef struct {
    Line lines[LINES];
    float *query, *of_query;               /* (LINES, D), rows rounded up to full lanes as in all that follow */
    float *z, *moved, *of_moved;           /* (LINES, P): W t + b, and t' */
    float *weight, *columns, *bias;        /* (P, D), (D, P) and (P) */
    float *table, *scores;                 /* (T, P), and (P, T + 1) with the last row twice */
    float *of_weight, *of_bias, *of_table; /* sums */
    Items keys, values;                    /* the keys times `product` */
    float *pooled, *of_product;            /* (LINES, D): the pooled values or their gradients; those of queries by products */
    int64_t first, n;                      /* keys that any of the lines is allowed, from a whole vector on */
    int64_t origin, next, ahead;           /* where the query of line 0 would lie; to that of the next line, and head */
} Scratch;

INLINE float *take(float **at, int64_t n) {
    float *taken = *at;
    *at += n;
    return taken;
}

/* Assigns the scratch; returns its end. */
INLINE float *assign(const Contextual *in, float *at, Scratch *s) {
    const int64_t L = in->L, D = in->D, P = in->P, T = in->T;
    const int64_t keys = up(L), rows = up(T + 1) + 2 * LANES, dim = up(D), width = up(P);
    for (int g = 0; g < LINES; g++) {
        s->lines[g].gate = take(&at, keys);
        s->lines[g].position = take(&at, keys);
        s->lines[g].weight = take(&at, keys);
        s->lines[g].grad = take(&at, keys);
        s->lines[g].score = take(&at, rows);
        s->lines[g].row = (int32_t *)take(&at, keys);
        s->lines[g].parts = (Pair *)take(&at, 2 * keys);
        for (int k = 0; k < PARTS; k++)
            s->lines[g].part[k] = (Pair *)(take(&at, 2 * rows + LANES) + LANES); /* zeros before the first */
        for (int k = 0; in->keys && k < 4; k++) s->lines[g].room[k] = take(&at, keys + LANES) + LANES;
    }
    s->query = take(&at, LINES * dim), s->of_query = take(&at, LINES * dim);
    s->z = take(&at, LINES * width), s->moved = take(&at, LINES * width), s->of_moved = take(&at, LINES * width);
    s->weight = take(&at, P * dim), s->columns = take(&at, D * width), s->bias = take(&at, width);
    s->table = take(&at, T * width), s->scores = take(&at, P * rows);
    s->of_weight = take(&at, P * dim), s->of_bias = take(&at, width), s->of_table = take(&at, T * width);
    Items *both[] = {&s->keys, &s->values};
    for (int k = 0; in->keys && k < 2; k++) {
        both[k]->rows = take(&at, L * dim), both[k]->grads = take(&at, L * dim);
        both[k]->columns = take(&at, D * keys);
    }
    s->pooled = take(&at, LINES * dim), s->of_product = take(&at, LINES * dim);
    return at;
}

static int64_t scratch_of(const Contextual *in) {
    Scratch s;
    float none;
    return assign(in, &none, &s) - &none;
}

INLINE Scratch prepare(const Contextual *in, float *at) {
    const int64_t dim = up(in->D), width = up(in->P), rows = up(in->T + 1) + 2 * LANES;
    Scratch s;
    memset(at, 0, sizeof(float) * (assign(in, at, &s) - at));
    for (int64_t p = 0; p < in->P; p++) {
        for (int64_t t = 0; t <= in->T; t++) s.scores[p * rows + t] = in->table[(t < in->T ? t : t - 1) * in->P + p];
        for (int64_t d = 0; in->weight && d < in->D; d++)
            s.weight[p * dim + d] = s.columns[d * width + p] = in->weight[p * in->D + d];
    }
    if (in->weight) memcpy(s.bias, in->bias, sizeof(float) * in->P);
    for (int64_t t = 0; t < in->T; t++) memcpy(s.table + t * width, in->table + t * in->P, sizeof(float) * in->P);
    return s;
}

/* The vector of keys j and on. Before the oldest key it holds anything; memory before `start` must not be read. */
INLINE Floats load_keys(const float *keys, int64_t j, const float *start) {
    float some[LANES] = {0};
    const float *at = keys + j;
    if (UNLIKELY(at < start)) at = (float *)memcpy(some - j, keys, sizeof(float) * (LANES + j)) + j;
    return load(at);
}

/* Memory before `start` must not be written. */
INLINE void store_keys(float *keys, int64_t j, float *start, Floats x) {
    if (UNLIKELY(keys + j < start)) {
        float some[LANES];
        store(some, x);
        memcpy(keys, some - j, sizeof(float) * (LANES + j));
    } else {
        store(keys + j, x);
    }
}

/* Prefetches the same of the next lines, which has left the caches since it was used. The address need not be valid. */
enum { READ, WRITE };
#define prefetch_next(keys, L, how) \
    __builtin_prefetch((const void *)((uintptr_t)(keys) - 4 * LINES * sizeof *(keys) * (L)), how)

INLINE Ints are_keys(int64_t j) { return LANE + (int32_t)j >= 0; }

INLINE Ints are_allowed(const uint8_t *keys, int64_t j, const uint8_t *start) {
    uint8_t some[LANES] = {0};
    const uint8_t *at = keys + j;
    if (UNLIKELY(at < start)) at = (uint8_t *)memcpy(some - j, keys, LANES + j) + j;
    return (of_bytes(at) != 0) & are_keys(j);
}

/* 1 where dropout keeps a weight, else 0. */
INLINE Floats are_kept(const int16_t *keys, int64_t j, const int16_t *start) {
    int16_t some[LANES] = {0};
    const int16_t *at = keys + j;
    if (UNLIKELY(at < start)) at = (int16_t *)memcpy(some - j, keys, sizeof(int16_t) * (LANES + j)) + j;
    return __builtin_convertvector(of_shorts(at), Floats);
}

/* Scores of rows, and their differences to the next row. A gate is at most one, so that neighbouring keys reach rows
   close to each other: two vectors hold their scores. */
INLINE void look_up(const float *score, Ints row, Floats *value, Floats *slope) {
    Floats next;
#ifdef SHUFFLE
    const float *base = score + row[LANES - 1];
    const Ints of = row - row[LANES - 1];
    *value = SHUFFLE(load(base), load(base + LANES), of);
    next = SHUFFLE(load(base + 1), load(base + LANES + 1), of);
#else
    for (int v = 0; v < LANES; v++) (*value)[v] = score[row[v]], next[v] = score[row[v] + 1];
#endif
    *slope = next - *value;
}

/* x[0], y[0], x[1], y[1], ... */
INLINE void interleave(float *to, Floats x, Floats y) {
#ifdef SHUFFLE
    const Ints in_turn = LANE / 2 + LANE % 2 * LANES;
    store(to, SHUFFLE(x, y, in_turn));
    store(to + LANES, SHUFFLE(x, y, in_turn + LANES / 2));
#else
    for (int v = 0; v < LANES; v++) to[2 * v] = x[v], to[2 * v + 1] = y[v];
#endif
}

/* A product of matrices: out[g] = sum over i of factor[g][i] * row i, for each line g. */
INLINE void multiply_rows(const float *factor, int64_t of_line, int64_t n, const float *row, int64_t stride, int64_t width,
                    float *out, int64_t out_line) {
    for (int64_t j = 0; j < width; j += LANES) {
        Floats sum[LINES] = {{0}};
        for (int64_t i = 0; i < n; i++) {
            const Floats x = load(row + i * stride + j);
            for (int g = 0; g < LINES; g++) sum[g] += factor[g * of_line + i] * x;
        }
        for (int g = 0; g < LINES; g++) store(out + g * out_line + j, sum[g]);
    }
}

/* Its gradient: to row i of out is added the sum over lines g of factor[g][i] * x[g]. */
INLINE void add_outer(const float *factor, int64_t of_line, int64_t n, const float *x, int64_t width, float *out) {
    for (int64_t j = 0; j < width; j += LANES) {
        Floats own[LINES];
        for (int g = 0; g < LINES; g++) own[g] = load(x + g * width + j);
        for (int64_t i = 0; i < n; i++) {
            Floats sum = load(out + i * width + j);
            for (int g = 0; g < LINES; g++) sum += factor[g * of_line + i] * own[g];
            store(out + i * width + j, sum);
        }
    }
}

/* The first and the last byte that is not zero. */
INLINE void trim(const uint8_t *bytes, int64_t n, Line *to) {
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
    to->first = first, to->n = n - first, to->pad = up(to->n) - to->n;
}

INLINE const float *steps_of(const Contextual *in, const Line *to) {
    return in->steps ? in->steps + to->line / in->Q * in->L + to->first : 0;
}

INLINE const uint8_t *allowed_of(const Contextual *in, const Line *to) {
    return in->allowed + (to->line / (in->H * in->Q) * in->Q + to->line % in->Q) * in->L;
}

/* Of attention: where the first of a head's n vectors lies. */
INLINE int64_t head_at(const Contextual *in, int64_t head, int64_t n) {
    return (head / in->H * n * in->H + head % in->H) * in->D;
}

/* Where the vector of a line's query lies. */
INLINE int64_t query_at(const Scratch *s, int64_t line) { return s->origin + line * s->next; }

/* Where the queries lie; those of one head for attention. */
INLINE void locate(const Contextual *in, int64_t from, Scratch *s) {
    s->next = in->D, s->origin = s->ahead = 0;
    if (in->keys) {
        const int64_t head = from / in->Q, at = head_at(in, head, in->Q);
        s->next = in->H * in->D, s->origin = at - from * s->next;
        s->ahead = head ? head_at(in, head - 1, in->Q) - at : 0;
    }
}

/* Gates and positions of a line. */
INLINE void sum_gates(const Contextual *in, Line *to) {
    const float *logits = to->logits + to->first, *steps = steps_of(in, to);
    const uint8_t *allowed = allowed_of(in, to) + to->first;
    const float sign = in->sign, end = (float)(in->T - 1);
    double sum = 0.0; /* in float64, because histories may be long */
    for (int64_t j = to->n - LANES; j > -LANES; j -= LANES) {
        const Floats x = load_keys(logits, j, in->logits);
        if (!in->keys) prefetch_next(logits + j, in->L, READ);
        Floats gate = where(are_allowed(allowed, j, in->allowed), sigmoid(sign * x), all(0.0f));
        store(to->gate + to->pad + j, gate);
        if (steps) {
            Floats step = load_keys(steps, j, in->steps);
            if (in->newest_whole && j == to->n - LANES) step[LANES - 1] = 1.0f;
            gate = where(gate == 0.0f, gate, gate * step); /* what lies before the keys may be NaN */
            gate = where(gate < 0.0f, all(0.0f), gate); /* no position lies before the table */
        }
        gate = sums_from(gate);
        const Floats position = (float)sum + gate;
        store(to->position + to->pad + j, lesser(position, all(end)));
        sum += gate[0];
    }
    to->top = (float)sum;
    to->rows = !to->n ? 0 : to->top < end ? (int64_t)to->top + 2 : in->T;
}

/* Numbers of keys for several lines: those of the first line, and the distance to the next one's. */
#define lines_of(s, x) (s)->lines[0].x + (s)->first, (s)->lines[1].x - (s)->lines[0].x

/* A number for each key of a line: the products of vectors (LINES, D) with items. */
INLINE void multiply_items(const Contextual *in, const float *vectors, const Items *items, const Scratch *s, float *out,
                     int64_t out_line) {
    multiply_rows(vectors, up(in->D), in->D, items->columns + s->first, up(in->L), s->n, out, out_line);
}

/* Sums the gates of lines, and scores their queries against the table; returns how many rows of it are reached. Lines
   before the first count as lines without keys. */
INLINE int64_t start(const Contextual *in, int64_t line, int64_t from, float *result, const float *grads, Scratch *s) {
    const int64_t dim = up(in->D), width = up(in->P), row = up(in->T + 1) + 2 * LANES;
    int64_t rows = 0, first = in->L, last = 0;
    for (int g = LINES - 1; g >= 0; g--) {
        Line *of = s->lines + g;
        const int64_t at = (line + g) * in->L;
        of->line = line + g;
        of->first = of->n = of->rows = 0;
        of->top = 0.0f;
        of->logits = in->keys ? of->room[0] : (float *)in->logits + at;
        of->result = in->keys ? of->room[1] : result + at;
        of->grads = in->keys ? of->room[2] : grads ? grads + at : 0;
        of->kept = in->keys ? of->room[3] : 0;
        if (of->line < from) continue;
        copy(in->query + query_at(s, of->line), in->D, s->query + g * dim);
        __builtin_prefetch(in->query + query_at(s, of->line) + s->ahead);
        trim(allowed_of(in, of), in->L, of);
        first = of->n && of->first < first ? of->first : first;
        last = of->n && of->first + of->n > last ? of->first + of->n : last;
    }
    s->first = first / LANES * LANES, s->n = last > s->first ? last - s->first : 0;
    if (in->keys) multiply_items(in, s->query, &s->keys, s, lines_of(s, logits));
    for (int g = LINES - 1; g >= 0; g--) {
        if (s->lines[g].n) sum_gates(in, s->lines + g);
        rows = s->lines[g].rows > rows ? s->lines[g].rows : rows;
    }
    if (in->weight) {
        multiply_rows(s->query, dim, in->D, s->columns, width, width, s->z, width);
        for (int g = 0; g < LINES; g++) {
            for (int64_t p = 0; p < width; p += LANES) {
                const Floats z = load(s->z + g * width + p) + load(s->bias + p);
                store(s->z + g * width + p, z);
                store(s->moved + g * width + p, z * sigmoid(z));
            }
        }
    } else {
        for (int64_t p = 0; p < LINES * width; p += LANES) store(s->moved + p, in->scale * load(s->query + p));
    }
    multiply_rows(s->moved, width, in->P, s->scores, row, up(rows + 1), s->lines[0].score,
            s->lines[1].score - s->lines[0].score);
    return rows;
}

/* Outside of the keys of a line: the logits as they are, or for attention a weight of zero. */
INLINE void fill_rest(const Contextual *in, const float *from, float *to, const Line *of) {
    const int64_t last = of->first + of->n;
    if (in->keys) {
        clear(to, of->first);
        clear(to + last, in->L - last);
    } else {
        copy(from, of->first, to);
        copy(from + last, in->L - last, to + last);
    }
}

/* The logits of a line with the bias: into the result, or for attention in place of the positions; the largest of each
   lane. */
INLINE Floats biased_logits(const Contextual *in, const Line *of, float *start) {
    const float *logits = of->logits + of->first;
    float *result = of->result + of->first;
    Floats most = all(-INFINITY);
    for (int64_t j = of->n - LANES; j > -LANES; j -= LANES) {
        const Floats position = load(of->position + of->pad + j);
        const Ints row = __builtin_convertvector(position, Ints);
        Floats value, slope;
        if (isnan(of->top)) {
            value = all(of->top);
        } else {
            look_up(of->score, row, &value, &slope);
            value += (position - __builtin_convertvector(row, Floats)) * slope;
        }
        value += load_keys(logits, j, in->logits);
        if (!in->keys) prefetch_next(result + j, in->L, WRITE);
        if (in->keys) {
            value = where(load(of->gate + of->pad + j) == 0.0f, all(-INFINITY), value);
            most = greater(value, most);
            store(of->position + of->pad + j, value);
        } else {
            store_keys(result, j, start, value);
        }
    }
    return most;
}

/* exp(x - top) of the biased logits, which stand in place of the positions; their sum in each lane. */
INLINE Floats exponentials(const Line *of, float top) {
    Floats sum = {0};
    for (int64_t j = of->n - LANES; j > -LANES; j -= LANES) {
        const Floats x = load(of->position + of->pad + j) - top;
        const Floats weight = where(x < -87.0f, all(0.0f), exponential(x));
        sum += weight;
        store(of->position + of->pad + j, weight);
    }
    return sum;
}

/* Copies items of a head, times a factor, as rows and as columns; either may be null. */
INLINE void copy_items(const Contextual *in, const float *items, int64_t ahead, float factor, float *rows, float *columns) {
    const int64_t dim = up(in->D), keys = up(in->L), next = in->H * in->D;
    for (int64_t j = 0; j < in->L; j += LANES) {
        for (int64_t d = 0; d < in->D; d += LANES) {
            Floats x[LANES] = {{0}};
            for (int64_t k = 0; k < LANES && j + k < in->L; k++) {
                x[k] = factor * some(items + (j + k) * next + d, in->D - d);
                __builtin_prefetch(items + (j + k) * next + d + ahead);
                if (rows) store(rows + (j + k) * dim + d, x[k]);
            }
            if (!columns) continue;
            transpose(x);
            for (int64_t k = 0; k < LANES && d + k < in->D; k++) store(columns + (d + k) * keys + j, x[k]);
        }
    }
}

/* Several lines at a time, so that the processor need not wait for the results of one. */
INLINE void forward_lines(const Contextual *in, int64_t from, int64_t to, float *out, Scratch *s) {
    float *begin = in->keys ? 0 : out + from * in->L;
    locate(in, from, s);
    for (int64_t line = to - LINES; line > from - LINES; line -= LINES) {
        start(in, line, from, out, 0, s);
        Floats found[LINES];
        for (int g = LINES - 1; g >= 0; g--) found[g] = biased_logits(in, s->lines + g, begin);
        float top[LINES];
        for (int g = 0; in->keys && g < LINES; g++) top[g] = largest_of(found[g]);
        for (int g = 0; in->keys && g < LINES; g++) found[g] = exponentials(s->lines + g, top[g]);
        for (int g = LINES - 1; in->keys && g >= 0 && line + g >= from; g--) {
            const Line *of = s->lines + g;
            float *norms = in->norms + 2 * (line + g);
            norms[0] = top[g], norms[1] = 1.0f / sum_of(found[g]);
            const int16_t *kept = in->kept ? in->kept + (line + g) * in->L + of->first : 0;
            for (int64_t j = of->n - LANES; j > -LANES; j -= LANES) {
                Floats weight = load(of->position + of->pad + j) * norms[1];
                if (kept) {
                    weight *= in->factor * are_kept(kept, j, in->kept);
                    prefetch_next(kept + j, in->L, READ);
                }
                store_keys(of->result + of->first, j, begin, weight);
            }
        }
        for (int g = LINES - 1; g >= 0 && line + g >= from; g--) {
            Line *of = s->lines + g;
            fill_rest(in, of->logits, of->result, of);
        }
        if (in->keys) {
            const int64_t dim = up(in->D);
            multiply_rows(lines_of(s, result), s->n, s->values.rows + s->first * dim, dim, dim, s->pooled, dim);
            for (int g = line < from ? (int)(from - line) : 0; g < LINES; g++)
                copy(s->pooled + g * dim, in->D, out + query_at(s, line + g));
        }
    }
}

static void contextual_lines(const Contextual *in, int64_t from, int64_t to, float *out, float *scratch) {
    Scratch s = prepare(in, scratch);
    if (!in->keys) {
        forward_lines(in, from, to, out, &s);
        return;
    }
    for (int64_t head = to / in->Q - 1; head >= from / in->Q; head--) {
        const int64_t at = head_at(in, head, in->L), ahead = head ? head_at(in, head - 1, in->L) - at : 0;
        copy_items(in, in->keys + at, ahead, in->product, 0, s.keys.columns);
        copy_items(in, in->values + at, ahead, 1.0f, s.values.rows, 0);
        forward_lines(in, head * in->Q, (head + 1) * in->Q, out, &s);
    }
}

/* Sums the gradients of scores over keys, as parts: a row's own, and the next one's. */
INLINE void scatter_parts(Line *of) {
    int64_t j = 0;
    Pair *parts = of->parts + of->pad;
    const int32_t *row = of->row + of->pad;
    for (; j < of->n - 1; j += PARTS)
        for (int k = 0; k < PARTS; k++) of->part[k][row[j + k]] += parts[j + k];
    if (j < of->n) of->part[0][row[j]] += parts[j];
}

INLINE void add_parts(Line *of) {
    for (int64_t k = 0; k < of->rows; k += LANES) {
        Floats sum[2] = {{0}};
        for (int part = 0; part < PARTS; part++) {
            const float *from = (float *)of->part[part] + 2 * k;
            for (int half = 0; half < 2; half++) sum[half] += load(from + half * LANES) + load(from + half * LANES - 1);
        }
#ifdef SHUFFLE
        store(of->score + k, SHUFFLE(sum[0], sum[1], 2 * LANE));
#else
        for (int v = 0; v < LANES; v++) of->score[k + v] = sum[2 * v / LANES][2 * v % LANES];
#endif
    }
    for (int64_t k = 0; k < of->rows; k += LANES / 2)
        for (int part = 0; part < PARTS; part++) store((float *)of->part[part] + 2 * k, all(0.0f));
}

/* Attention weights and their gradients before dropout; returns the sum of their products, which the backward of the
   softmax takes off. */
INLINE float weights_again(const Contextual *in, const float *start, Line *of) {
    const float *norms = in->norms + 2 * of->line, *logits = of->logits + of->first, *grads = of->grads + of->first;
    const int16_t *kept = in->kept ? in->kept + of->line * in->L + of->first : 0;
    Floats products = {0};
    for (int64_t j = of->n - LANES; j > -LANES; j -= LANES) {
        Floats value, slope;
        const Floats position = load(of->position + of->pad + j);
        const Ints row = __builtin_convertvector(position, Ints);
        look_up(of->score, row, &value, &slope);
        value += (position - __builtin_convertvector(row, Floats)) * slope + load_keys(logits, j, in->logits);
        value -= norms[0];
        const Ints none = (load(of->gate + of->pad + j) == 0.0f) | (value < -87.0f);
        const Floats weight = where(none, all(0.0f), exponential(value)) * norms[1];
        Floats grad = load_keys(grads, j, start), factor = all(1.0f);
        if (kept) {
            factor = in->factor * are_kept(kept, j, in->kept);
            grad *= factor;
            prefetch_next(kept + j, in->L, READ);
        }
        store(of->kept + of->first + j, weight * factor);
        grad = where(are_keys(j), grad, all(0.0f));
        store(of->weight + of->pad + j, weight);
        store(of->grad + of->pad + j, grad);
        products += weight * grad;
    }
    return sum_of(products);
}

/* From the gradients of a line's output to those of its logits, steps and scores. A gate is in the positions of its key
   and of all older ones. */
INLINE void line_backward(const Contextual *in, const float *start, const ContextualGradients *out, float *out_start, Line *of) {
    const int64_t n = of->n;
    const float *steps = steps_of(in, of), *grads = of->grads + of->first;
    float *of_steps = steps ? out->steps + (steps - in->steps) : 0, *result = of->result + of->first;
    const float mean = in->keys ? weights_again(in, start, of) : 0.0f;
    double sum = 0.0;
    for (int64_t j = -of->pad; j < n; j += LANES) {
        const Floats gate = load(of->gate + of->pad + j), position = load(of->position + of->pad + j);
        if (!in->keys) prefetch_next(result + j, in->L, WRITE);
        Floats x;
        if (in->keys) {
            x = load(of->weight + of->pad + j) * (load(of->grad + of->pad + j) - mean);
        } else {
            prefetch_next(grads + j, in->L, READ);
            x = where(are_keys(j), load_keys(grads, j, start), all(0.0f));
        }
        const Ints row = __builtin_convertvector(position, Ints);
        const Floats upper = x * (position - __builtin_convertvector(row, Floats)), lower = x - upper;
        Floats value, slope;
        memcpy(of->row + of->pad + j, &row, sizeof row);
        interleave((float *)(of->parts + of->pad + j), lower, upper);
        look_up(of->score, row, &value, &slope);
        Floats of_gate = sums_to(x * slope);
        const double before = sum;
        sum += of_gate[LANES - 1];
        of_gate += (float)before;
        if (steps) {
            Floats step = load_keys(steps, j, in->steps), of_step = of_gate * gate;
            if (in->newest_whole && j == n - LANES) step[LANES - 1] = 1.0f, of_step[LANES - 1] = 0.0f;
            for (int v = j < 0 ? -j : 0; v < LANES; v++) of_steps[j + v] += of_step[v];
            of_gate *= step;
        }
        store_keys(result, j, out_start, x + in->sign * of_gate * gate * (1.0f - gate));
    }
}

/* grads: of the output. */
INLINE void backward_lines(const Contextual *in, const float *grads, int64_t from, int64_t to, const ContextualGradients *out,
                          Scratch *s) {
    const int64_t dim = up(in->D), width = up(in->P), of_score = s->lines[1].score - s->lines[0].score;
    float *begin = in->keys ? 0 : out->logits + from * in->L;
    locate(in, from, s);
    for (int64_t line = to - LINES; line > from - LINES; line -= LINES) {
        const int64_t rows = start(in, line, from, out->logits, grads, s);
        for (int g = LINES - 1; in->keys && g >= 0 && line + g >= from; g--) {
            copy(grads + query_at(s, line + g), in->D, s->pooled + g * dim);
            __builtin_prefetch(grads + query_at(s, line + g) + s->ahead);
        }
        if (in->keys) multiply_items(in, s->pooled, &s->values, s, s->lines[0].room[2] + s->first,
                              s->lines[1].room[2] - s->lines[0].room[2]);
        float invalid[LINES] = {0};
        for (int g = LINES - 1; g >= 0; g--) {
            Line *of = s->lines + g;
            if (isnan(of->top)) {
                for (int64_t j = of->first; j < of->first + of->n; j++) {
                    of->result[j] = of->top;
                    if (in->keys) of->kept[j] = of->top;
                }
                invalid[g] = of->top;
                of->rows = 0;
            } else if (of->n) {
                line_backward(in, in->keys ? 0 : grads, out, begin, of);
            }
            if (in->keys || of->line >= from) fill_rest(in, of->grads, of->result, of);
            if (in->keys) fill_rest(in, 0, of->kept, of);
        }
        if (in->keys) {
            multiply_rows(lines_of(s, result), s->n, s->keys.rows + s->first * dim, dim, dim, s->of_product, dim);
            add_outer(lines_of(s, result), s->n, s->query, dim, s->keys.grads + s->first * dim);
            add_outer(lines_of(s, kept), s->n, s->pooled, dim, s->values.grads + s->first * dim);
        }
        /* In turn, so that nothing is read that was just written. */
        for (int g = 0; g < LINES; g++)
            if (s->lines[g].rows) scatter_parts(s->lines + g);
        for (int g = 0; g < LINES; g++) {
            add_parts(s->lines + g);
            memset(s->lines[g].score + s->lines[g].rows, 0, sizeof(float) * (rows - s->lines[g].rows));
        }
        multiply_rows(s->lines[0].score, of_score, rows, s->table, width, width, s->of_moved, width);
        add_outer(s->lines[0].score, of_score, rows, s->moved, width, s->of_table);
        if (in->weight) {
            for (int64_t p = 0; p < LINES * width; p += LANES) {
                const Floats z = load(s->z + p), p_z = sigmoid(z);
                store(s->of_moved + p, load(s->of_moved + p) * (p_z + z * p_z * (1.0f - p_z)));
            }
            for (int64_t p = 0; p < width; p += LANES)
                for (int g = 0; g < LINES; g++)
                    store(s->of_bias + p, load(s->of_bias + p) + load(s->of_moved + g * width + p));
            add_outer(s->of_moved, width, in->P, s->query, dim, s->of_weight);
            multiply_rows(s->of_moved, width, in->P, s->weight, dim, dim, s->of_query, dim);
        } else {
            for (int64_t p = 0; p < LINES * width; p += LANES) store(s->of_query + p, in->scale * load(s->of_moved + p));
        }
        for (int g = line < from ? (int)(from - line) : 0; g < LINES; g++) {
            float *query = out->query + query_at(s, line + g);
            for (int64_t d = 0; in->keys && d < dim; d += LANES) {
                const Floats of_query = load(s->of_query + g * dim + d);
                store(s->of_query + g * dim + d, of_query + load(s->of_product + g * dim + d));
            }
            copy(s->of_query + g * dim, in->D, query);
            for (int64_t d = 0; isnan(invalid[g]) && d < in->D; d++) query[d] = invalid[g];
        }
    }
}

static void contextual_lines_back(const Contextual *in, const float *grads, int64_t from, int64_t to, const ContextualGradients *out,
                           float *scratch) {
    Scratch s = prepare(in, scratch);
    if (!in->keys) {
        backward_lines(in, grads, from, to, out, &s);
        return;
    }
    const int64_t dim = up(in->D);
    for (int64_t head = to / in->Q - 1; head >= from / in->Q; head--) {
        const int64_t at = head_at(in, head, in->L), ahead = head ? head_at(in, head - 1, in->L) - at : 0;
        copy_items(in, in->keys + at, ahead, in->product, s.keys.rows, s.keys.columns);
        copy_items(in, in->values + at, ahead, 1.0f, s.values.rows, s.values.columns);
        memset(s.keys.grads, 0, sizeof(float) * in->L * dim);
        memset(s.values.grads, 0, sizeof(float) * in->L * dim);
        backward_lines(in, grads, head * in->Q, (head + 1) * in->Q, out, &s);
        for (int64_t j = 0; j < in->L; j++) {
            float *key = s.keys.grads + j * dim;
            for (int64_t d = 0; d < dim; d += LANES) store(key + d, in->product * load(key + d));
            copy(key, in->D, out->keys + at + j * in->H * in->D);
            copy(s.values.grads + j * dim, in->D, out->values + at + j * in->H * in->D);
        }
    }
}

static void collect(const Contextual *in, float *scratch, const ContextualGradients *out) {
    const int64_t dim = up(in->D), width = up(in->P);
    Scratch s;
    assign(in, scratch, &s);
    for (int64_t t = 0; t < in->T; t++)
        for (int64_t p = 0; p < in->P; p++) out->table[t * in->P + p] += s.of_table[t * width + p];
    for (int64_t p = 0; in->weight && p < in->P; p++) {
        for (int64_t d = 0; d < in->D; d++) out->weight[p * in->D + d] += s.of_weight[p * dim + d];
        out->bias[p] += s.of_bias[p];
    }
}
