/* What `IntRounding` of autoround.py does with every weight, to its bits: rounding, and a step of the descent.
 *
 * A row is a group of weights with one scale and zero code, which torch computes, as it moves the ranges. */
#include <stdatomic.h>
#include <string.h>

#include "fold.h"
#include "parallel.h"
#include "rounded.h"

#define VALUES_AT_ONCE 16384

typedef struct {
    const float *weights;        /* [rows][width] */
    float *offsets;              /* [rows][width], in steps; a descent moves them */
    const float *scales, *zeros; /* [rows] */
    const float *exact;          /* [rows], zeros before they were rounded; NULL: symmetric */
    void *values;                /* [rows][width]: the rounded weights, or their gradients */
    float *slopes;               /* [rows][3], of the loss: by the step; by the lowest, by the largest value */
    int64_t rows, width, is_bf16, threads;
    float largest, rate;         /* the largest code; of a descent */
} RoundingCall;

typedef struct {
    const RoundingCall *call;
    atomic_long next;
    atomic_int failed;
} RoundingJob;

/* By bits, as gcc does not vectorize a choice between floats that are computed. */
static inline float pick(int first, float a, float b) {
    uint32_t bits, others;
    memcpy(&bits, &a, sizeof bits), memcpy(&others, &b, sizeof others);
    bits = (bits & -(uint32_t)first) | (others & ((uint32_t)first - 1));
    memcpy(&a, &bits, sizeof bits);
    return a;
}

static inline float widened(uint16_t half) {
    const uint32_t word = (uint32_t)half << 16;
    float value;
    memcpy(&value, &word, sizeof value);
    return value;
}

/* To the nearest, ties to even, as torch rounds. */
static inline uint16_t narrowed(float value) {
    uint32_t word;
    memcpy(&word, &value, sizeof word);
    return (uint16_t)((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

static void round_row(const RoundingCall *call, int64_t row) {
    const int64_t width = call->width, at = row * width;
    const float *restrict weights = call->weights + at, *restrict offsets = call->offsets + at;
    const float scale = call->scales[row], zero = call->zeros[row], largest = call->largest;
    float *restrict wide = (float *)call->values + at;
    uint16_t *restrict narrow = (uint16_t *)call->values + at;
#define ROUNDED(i) ((bounded(rounded(weights[i] / scale + offsets[i]) + zero, 0.0f, largest) - zero) * scale)
    if (call->is_bf16)
        for (int64_t i = 0; i < width; i++) narrow[i] = narrowed(ROUNDED(i));
    else
        for (int64_t i = 0; i < width; i++) wide[i] = ROUNDED(i);
}

/* The slopes of a row's range, and its offsets moved against the signs of the gradients of weights that are not
 * clamped. `terms` [3][width] are scratch, `gradient` [width] too. */
static void descend_row(const RoundingCall *call, int64_t row, float *restrict gradient, float *restrict terms) {
    const int64_t width = call->width, at = row * width;
    const float *restrict weights = call->weights + at;
    float *restrict offsets = call->offsets + at;
    float *restrict by_step = terms, *restrict by_low = terms + width, *restrict by_high = terms + 2 * width;
    const float scale = call->scales[row], zero = call->zeros[row], largest = call->largest;
    const int symmetric = !call->exact;
    const float beyond = symmetric ? 0.0f : call->exact[row] - zero;
    const float length = scale < 0.0f ? -call->rate : call->rate;
    const uint16_t *narrow = (const uint16_t *)call->values + at;
    if (call->is_bf16)
        for (int64_t i = 0; i < width; i++) gradient[i] = widened(narrow[i]);
    else memcpy(gradient, (const float *)call->values + at, (size_t)width * sizeof(float));
    for (int64_t i = 0; i < width; i++) {
        const float steps = weights[i] / scale, slope = gradient[i];
        const float wanted = rounded(steps + offsets[i]) + zero, code = bounded(wanted, 0.0f, largest);
        const int below = wanted < 0.0f, above = wanted > largest, inside = wanted == code;
        const float of_code = code - zero - pick(inside, steps, 0.0f);
        by_step[i] = pick(symmetric | inside, of_code, beyond) * slope;
        by_low[i] = pick(below, slope, 0.0f);
        by_high[i] = pick(above, slope, 0.0f);
        const float sign = (float)((slope > 0.0f) - (slope < 0.0f));
        offsets[i] = bounded(offsets[i] - pick(inside, sign * length, 0.0f), -0.5f, 0.5f);
    }
    float *slopes = call->slopes + 3 * row;
    slopes[0] = fold(by_step, width), slopes[1] = fold(by_low, width), slopes[2] = fold(by_high, width);
}

static int64_t rows_at_once(const RoundingCall *call) { return VALUES_AT_ONCE / call->width + 1; }

static void round_rows(void *argument) {
    RoundingJob *job = argument;
    const RoundingCall *call = job->call;
    const int64_t run = rows_at_once(call);
    for (int64_t begin; (begin = atomic_fetch_add(&job->next, run)) < call->rows;)
        for (int64_t row = begin; row < begin + run && row < call->rows; row++) round_row(call, row);
}

static void descend_rows(void *argument) {
    RoundingJob *job = argument;
    const RoundingCall *call = job->call;
    const int64_t run = rows_at_once(call);
    float *scratch = (float *)workspace(1, 4 * call->width * (int64_t)sizeof(float));
    if (!scratch) {
        job->failed = 1;
        return;
    }
    for (int64_t begin; (begin = atomic_fetch_add(&job->next, run)) < call->rows;)
        for (int64_t row = begin; row < begin + run && row < call->rows; row++)
            descend_row(call, row, scratch, scratch + call->width);
}

/* Writes the rounded weights to `values`. */
int llmopt_round(const RoundingCall *call) {
    RoundingJob job = {.call = call};
    run_parallel(round_rows, &job, call->threads);
    return 0;
}

/* Moves the offsets for the gradients in `values`, and gives the slopes. Returns 1 if there is no memory. */
int llmopt_descend(const RoundingCall *call) {
    RoundingJob job = {.call = call};
    run_parallel(descend_rows, &job, call->threads);
    return job.failed;
}
