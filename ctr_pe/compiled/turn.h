/* Planes of coordinates turned by angles, their phases scaled before: pe/turning.py says it in torch.

   A vector has P = width / 2 real parts, as many imaginary parts, and the coordinate left over from an odd width. Those
   of the middle axis share their angles. */

typedef struct {
    int64_t n1, n2, n3, width;
    const float *x;       /* (n1, n2, n3, width) */
    const float *angle;   /* (n1, n3, P), or with an index (rows, P) */
    const float *scale;   /* (P), or null for ones */
    const float *added;   /* to the vectors, before they are turned: (rows, width), or null; with an index only */
    const int64_t *index; /* (n1, n3) of rows, or null */
} Turn;

typedef struct {
    float *x;                      /* (n1, n2, n3, width) */
    float *angle, *scale, *added;  /* as given, and `padded` P for the scale; added to, or null */
} Turned;

INLINE int64_t padded(int64_t planes) { return (planes + 15) / 16 * 16; }

INLINE int64_t angle_of(const Turn *in, int64_t line, int64_t i) {
    const int64_t at = line / in->n2 * in->n3 + i;
    return in->index ? in->index[at] : at;
}

/* Where vectors that share their angles follow each other, sines and cosines are computed once: (2, n3, padded P). */
INLINE void look_around(const Turn *in, int64_t line, int64_t from, float *waves) {
    const int64_t P = in->width / 2, stride = padded(P);
    if (in->scale || (line > from && line % in->n2)) return;
    for (int64_t i = 0; i < in->n3; i++) {
        const float *angle = in->angle + angle_of(in, line, i) * P;
        for (int64_t p = 0; p < P; p += LANES) {
            Floats sine, cosine;
            sine_cosine(some(angle + p, P - p), &sine, &cosine);
            store(waves + i * stride + p, sine);
            store(waves + (in->n3 + i) * stride + p, cosine);
        }
    }
}

/* Planes from p on of a vector and what turns them. */
typedef struct {
    Floats real, imaginary, phase, more, sine, cosine; /* more: the scale - 1 */
} Planes;

INLINE Planes planes(const Turn *in, int64_t line, int64_t i, int64_t p, const float *waves) {
    const int64_t P = in->width / 2, n = P - p, row = angle_of(in, line, i);
    const float *x = in->x + (line * in->n3 + i) * in->width + p;
    Planes of;
    of.real = some(x, n), of.imaginary = some(x + P, n);
    if (in->added) {
        of.real += some(in->added + row * in->width + p, n);
        of.imaginary += some(in->added + row * in->width + P + p, n);
    }
    if (in->scale) {
        of.phase = phase_of(of.real, of.imaginary);
        of.more = some(in->scale + p, n) - 1.0f;
        sine_cosine(some(in->angle + row * P + p, n) + of.more * of.phase, &of.sine, &of.cosine);
    } else {
        of.sine = load(waves + i * padded(P) + p);
        of.cosine = load(waves + (in->n3 + i) * padded(P) + p);
    }
    return of;
}

/* Lines from, ..., to - 1 of n1 n2, each of n3 vectors. */
static void turn_lines(const Turn *in, int64_t from, int64_t to, float *y, float *waves) {
    const int64_t P = in->width / 2;
    for (int64_t line = from; line < to; line++) {
        look_around(in, line, from, waves);
        for (int64_t i = 0; i < in->n3; i++) {
            const int64_t at = (line * in->n3 + i) * in->width;
            for (int64_t p = 0; p < P; p += LANES) {
                const Planes of = planes(in, line, i, p, waves);
                put(y + at + p, P - p, of.real * of.cosine - of.imaginary * of.sine);
                put(y + at + P + p, P - p, of.real * of.sine + of.imaginary * of.cosine);
            }
            if (in->width % 2) {
                y[at + 2 * P] = in->x[at + 2 * P];
                if (in->added) y[at + 2 * P] += in->added[(angle_of(in, line, i) + 1) * in->width - 1];
            }
        }
    }
}

static void turn_lines_back(const Turn *in, const float *grads, int64_t from, int64_t to, const Turned *out,
                            float *waves) {
    const int64_t P = in->width / 2;
    for (int64_t line = from; line < to; line++) {
        look_around(in, line, from, waves);
        for (int64_t i = 0; i < in->n3; i++) {
            const int64_t at = (line * in->n3 + i) * in->width, row = angle_of(in, line, i);
            float *added = out->added ? out->added + row * in->width : 0;
            for (int64_t p = 0; p < P; p += LANES) {
                const Planes of = planes(in, line, i, p, waves);
                const Floats real = some(grads + at + p, P - p), imaginary = some(grads + at + P + p, P - p);
                Floats of_real = real * of.cosine + imaginary * of.sine; /* turned back */
                Floats of_imaginary = imaginary * of.cosine - real * of.sine;
                Floats around = of_imaginary * of.real - of_real * of.imaginary;
                if (out->angle) add_some(out->angle + row * P + p, P - p, around);
                if (in->scale) {
                    store(out->scale + p, load(out->scale + p) + around * of.phase);
                    const Floats square = of.real * of.real + of.imaginary * of.imaginary;
                    around *= of.more / greater(square, all(1.17549435e-38f));
                    of_real -= around * of.imaginary;
                    of_imaginary += around * of.real;
                }
                put(out->x + at + p, P - p, of_real);
                put(out->x + at + P + p, P - p, of_imaginary);
                if (added) {
                    add_some(added + p, P - p, of_real);
                    add_some(added + P + p, P - p, of_imaginary);
                }
            }
            if (in->width % 2) {
                out->x[at + 2 * P] = grads[at + 2 * P];
                if (added) added[2 * P] += grads[at + 2 * P];
            }
        }
    }
}
