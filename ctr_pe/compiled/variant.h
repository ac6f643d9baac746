/* All of it for one kind of processor. Whoever includes this says with VARIANT what to call it. */

#include "vectors.h"

#include "contextual.h"
#include "fading.h"
#include "gate.h"
#include "keep.h"
#include "relative.h"
#include "turn.h"

typedef struct {
    int64_t (*scratch)(const Input *); /* floats that a thread wants to work in */
    /* Lines from, ..., to - 1. */
    void (*forward)(const Input *, int64_t from, int64_t to, float *out, float *scratch);
    void (*backward)(const Input *, const float *grads, int64_t from, int64_t to, const Gradients *, float *scratch);
    void (*collect)(const Input *, float *scratch, const Gradients *); /* a thread's part in the shared ones */

    void (*fade)(const Fading *, int64_t from, int64_t to, float *out, float *far, int32_t *bucket);
    void (*fade_back)(const Fading *, const float *grads, int64_t from, int64_t to, float *sums, float *far,
                      int32_t *bucket);

    void (*gate)(const Gate *, int64_t from, int64_t to, float *y);
    void (*gate_back)(const Gate *, const float *grads, int64_t from, int64_t to, float *of_x, float *sums);

    void (*keep)(uint64_t seed, int64_t from, int64_t to, int64_t count, int16_t least, int16_t *kept);

    void (*relative)(const Relative *, int64_t from, int64_t to, float *out, float *content);
    void (*relative_back)(const Relative *, const float *grads, int64_t from, int64_t to, const Related *,
                          float *content);

    void (*turn)(const Turn *, int64_t from, int64_t to, float *y, float *waves);
    void (*turn_back)(const Turn *, const float *grads, int64_t from, int64_t to, const Turned *, float *waves);
} Variant;

const Variant VARIANT = {
    scratch_of, forward_lines,  backward_lines, collect,    fade_lines,      fade_lines_back,
    gate_rows,  gate_rows_back, keep_numbers,   relative_heads, relative_heads_back,
    turn_lines, turn_lines_back,
};
