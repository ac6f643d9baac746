/* All kernels for one kind of processor. Whoever includes this says with VARIANT what to call them. Each takes lines or
   rows from, ..., to - 1, which are one thread's. */

#include "vectors.h"

#include "contextual.h"
#include "dice.h"
#include "dropout.h"
#include "time_decay.h"

typedef struct {
    int lanes;
    int64_t (*scratch)(const Contextual *); /* floats that a thread works in */
    void (*contextual)(const Contextual *, int64_t from, int64_t to, float *out, float *scratch);
    void (*contextual_back)(const Contextual *, const float *grads, int64_t from, int64_t to,
                            const ContextualGradients *, float *scratch);
    void (*collect)(const Contextual *, float *scratch, const ContextualGradients *); /* adds a thread's sums */
    void (*dice)(const Dice *, int64_t from, int64_t to, float *y);
    void (*dice_back)(const Dice *, const float *grads, int64_t from, int64_t to, float *of_x, float *sums);
    void (*keep)(uint64_t seed, int64_t from, int64_t to, int64_t count, int16_t least, int16_t *kept);
    void (*time_decay)(const TimeDecay *, int64_t from, int64_t to, float *out, float *scratch);
    void (*time_decay_back)(const TimeDecay *, const float *grads, int64_t from, int64_t to, float *sums,
                            float *scratch);
} Variant;

const Variant VARIANT = {
    LANES,     scratch_of,     contextual_lines, contextual_lines_back, collect,
    dice_rows, dice_rows_back, keep_numbers,     time_decay_lines,      time_decay_lines_back,
};
