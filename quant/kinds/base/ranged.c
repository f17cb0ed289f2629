/* Sums over the groups of an integer grid, for the search of their ranges (ranged.py): the errors of several tries,
 * and the line of least squares through the weights against their levels. To the bits of torch with fold.h's sums.
 *
 * A row is a group of weights. Its points are `step * level + offset`, with levels from `low` to `high`. */
#include <stdatomic.h>

#include "fold.h"
#include "parallel.h"
#include "rounded.h"

#define VALUES_AT_ONCE 16384

typedef struct {
    const float *values;                       /* [rows][width] */
    const float *importance;                   /* [groups][width]; of a row, those of its number modulo `groups` */
    const float *steps, *offsets, *lows, *highs; /* [tries][rows]; offsets NULL: none */
    float *sums;                               /* [tries][rows] errors; or [rows][4], see `sum_line` */
    int64_t rows, width, groups, tries, centred, threads;
} RangeCall;

typedef struct {
    const RangeCall *call;
    void (*work)(const RangeCall *, int64_t row, float *scratch);
    atomic_long next;
    atomic_int failed;
} RangeJob;

/* Levels of a row by a try, float. */
static inline void find_levels(const RangeCall *call, int64_t row, int64_t at, float *restrict levels) {
    const float *restrict values = call->values + row * call->width;
    const float step = call->steps[at], low = call->lows[at], high = call->highs[at];
    if (call->offsets) {
        const float offset = call->offsets[at];
        for (int64_t i = 0; i < call->width; i++) levels[i] = bounded(rounded((values[i] - offset) / step), low, high);
    } else {
        for (int64_t i = 0; i < call->width; i++) levels[i] = bounded(rounded(values[i] / step), low, high);
    }
}

/* The weighted squared error of each try. */
static void sum_errors(const RangeCall *call, int64_t row, float *restrict scratch) {
    const float *restrict values = call->values + row * call->width;
    const float *restrict importance = call->importance + row % call->groups * call->width;
    for (int64_t number = 0; number < call->tries; number++) {
        const int64_t at = number * call->rows + row;
        const float step = call->steps[at], offset = call->offsets ? call->offsets[at] : 0.0f;
        find_levels(call, row, at, scratch);
        for (int64_t i = 0; i < call->width; i++) {
            const float lost = values[i] - scratch[i] * step - offset;
            scratch[i] = lost * lost * importance[i];
        }
        call->sums[at] = fold(scratch, call->width);
    }
}

/* Of the only try: the slope of the line as a fraction, then the mean level and the mean value, 0 if not centred. */
static void sum_line(const RangeCall *call, int64_t row, float *restrict scratch) {
    const int64_t width = call->width;
    const float *restrict values = call->values + row * width;
    const float *restrict importance = call->importance + row % call->groups * width;
    float *restrict levels = scratch + width, *restrict others = scratch + 2 * width;
    float level = 0.0f, value = 0.0f;
    find_levels(call, row, row, levels);
    if (call->centred) {
        for (int64_t i = 0; i < width; i++) scratch[i] = importance[i];
        const float total = fold(scratch, width);
        for (int64_t i = 0; i < width; i++) {
            scratch[i] = levels[i] * importance[i];
            others[i] = values[i] * importance[i];
        }
        level = fold(scratch, width) / total, value = fold(others, width) / total;
    }
    for (int64_t i = 0; i < width; i++) {
        const float centred = levels[i] - level, weighted = centred * importance[i];
        scratch[i] = weighted * (values[i] - value), others[i] = weighted * centred;
    }
    float *sums = call->sums + 4 * row;
    sums[0] = fold(scratch, width), sums[1] = fold(others, width), sums[2] = level, sums[3] = value;
}

static void sum_rows(void *argument) {
    RangeJob *job = argument;
    const RangeCall *call = job->call;
    const int64_t run = VALUES_AT_ONCE / call->width + 1;
    float *scratch = (float *)workspace(1, 3 * call->width * (int64_t)sizeof(float));
    if (!scratch) {
        job->failed = 1;
        return;
    }
    for (int64_t begin; (begin = atomic_fetch_add(&job->next, run)) < call->rows;)
        for (int64_t row = begin; row < begin + run && row < call->rows; row++) job->work(call, row, scratch);
}

/* Both return 1 if there is no memory. */
int llmopt_range_errors(const RangeCall *call) {
    RangeJob job = {.call = call, .work = sum_errors};
    run_parallel(sum_rows, &job, call->threads);
    return job.failed;
}

int llmopt_range_line(const RangeCall *call) {
    RangeJob job = {.call = call, .work = sum_line};
    run_parallel(sum_rows, &job, call->threads);
    return job.failed;
}
