/* Rotation of planes: pairs of coordinates, each a complex number. ops/rotation/reference.py says it in torch. Either
   the phases are scaled before (EulerFormer), or rows of tables say what is added to a vector and how far it then turns.

   A vector has P = width / 2 real parts, as many imaginary parts, and the coordinate left over from an odd width. */

typedef struct {
    int64_t n1, n2, n3, width; /* vectors along the axis of n2 share their angles */
    const float *x;            /* (n1, n2, n3, width) */
    const float *angle;        /* (n1, n3, P), or with an index (rows, P) */
    const float *scale;        /* (P), or null: phases stay as they are */
    const float *added;        /* (rows, width), added before the rotation; or null */
    const int64_t *index;      /* (n1, n3) of rows, or null */
} Rotation;

typedef struct {
    float *x;                     /* (n1, n2, n3, width) */
    float *angle, *scale, *added; /* as given, and `padded` P for the scale; added to; angle and added may be null */
} RotationGradients;

/* The row of angles of a line's vector i. */
INLINE int64_t angle_of(const Rotation *in, int64_t line, int64_t i) {
    const int64_t at = line / in->n2 * in->n3 + i;
    return in->index ? in->index[at] : at;
}

/* Planes from p on of a vector and their angle. */
typedef struct {
    Floats real, imaginary, phase, more, sine, cosine; /* more: the scale - 1 */
} Planes;

INLINE Planes planes(const Rotation *in, int64_t line, int64_t i, int64_t p) {
    const int64_t P = in->width / 2, n = P - p, row = angle_of(in, line, i);
    const float *x = in->x + (line * in->n3 + i) * in->width + p;
    Floats angle = some(in->angle + row * P + p, n);
    Planes of = {.real = some(x, n), .imaginary = some(x + P, n)};
    if (in->added) {
        of.real += some(in->added + row * in->width + p, n);
        of.imaginary += some(in->added + row * in->width + P + p, n);
    }
    if (in->scale) {
        of.phase = phase_of(of.real, of.imaginary);
        of.more = some(in->scale + p, n) - 1.0f;
        angle += of.more * of.phase;
    }
    sine_cosine(angle, &of.sine, &of.cosine);
    return of;
}

/* A line is n3 vectors. */
static void rotate_lines(const Rotation *in, int64_t from, int64_t to, float *y) {
    const int64_t P = in->width / 2;
    for (int64_t line = from; line < to; line++) {
        for (int64_t i = 0; i < in->n3; i++) {
            const int64_t at = (line * in->n3 + i) * in->width;
            for (int64_t p = 0; p < P; p += LANES) {
                const Planes of = planes(in, line, i, p);
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

static void rotate_lines_back(const Rotation *in, const float *grads, int64_t from, int64_t to, const RotationGradients *out) {
    const int64_t P = in->width / 2;
    for (int64_t line = from; line < to; line++) {
        for (int64_t i = 0; i < in->n3; i++) {
            const int64_t at = (line * in->n3 + i) * in->width, row = angle_of(in, line, i);
            float *added = out->added ? out->added + row * in->width : 0;
            for (int64_t p = 0; p < P; p += LANES) {
                const Planes of = planes(in, line, i, p);
                const Floats real = some(grads + at + p, P - p), imaginary = some(grads + at + P + p, P - p);
                Floats of_real = real * of.cosine + imaginary * of.sine; /* rotated back */
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
