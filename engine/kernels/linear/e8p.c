/* GEMM with E8P codes (QuIP#): y = ((x su) U Qᵀ Vᵀ) sv, with Hadamard transforms U and V of whole widths.
 *
 * Codes are decoded to bytes. For integer sums the transformed inputs are quantized in blocks of 128 that
 * share a scale, to 8 bits, or to 16 that are two bytes, as two rows: the sum of the upper bytes counts 256
 * times. For few rows codes are decoded where they are multiplied, else 128 inputs of 16 outputs for all rows,
 * which AMX multiplies where it is. E8P's codes and those of the residual have a sum each. With inputs in
 * float32 weights are too. A row does not depend on the others, and integers are exact on all processors. */
#include <stdatomic.h>

#include "parallel.h"
#include "input_codes.h"
#include "e8p_rows.h"

enum { ROWS_AT_ONCE = 64 }; /* for which codes are decoded once */
enum { LEVELS_16 = 127 * 256 + 127, MOST_PLANES = 2, MOST_LEVELS = 2 };

typedef struct {
    const HadamardCall *call;
    int64_t begin, rows;        /* of the call, at once */
    int64_t blocks, width;      /* blocks of inputs; room for a row of inputs, or of outputs */
    int64_t planes, plane_rows; /* bytes of an input, 0 for floats; rows of them, whole tiles */
    int has_unit;
    float *first, *second; /* [rows][width] */
    float *floats;         /* [rows][blocks][BLOCK], in the order of `place_of` */
    int8_t *bytes;         /* [blocks][plane_rows][BLOCK], in that order */
    float *scales;         /* [blocks][ROWS_AT_ONCE] */
    int32_t *totals;       /* [blocks][ROWS_AT_ONCE], of the codes of the inputs */
    atomic_long next;
} E8pJob;

/* The transform of a row in `first`, which ends there or in `second`, but for the factor 1 / sqrt(size). */
static float *transform(const E8pJob *job, int64_t row, int64_t width, const float *factor, int64_t order) {
    float *values = job->first + row * job->width;
    const int64_t size = width / order;
    if (factor) {
        float *turned = job->second + row * job->width;
        for (int64_t i = 0; i < order; i++) {
            float *restrict to = turned + i * size;
            memset(to, 0, (size_t)size * sizeof *to);
            for (int64_t j = 0; j < order; j++) {
                const float *restrict from = values + j * size, by = factor[i * order + j];
                for (int64_t k = 0; k < size; k++) to[k] = __builtin_fmaf(by, from[k], to[k]);
            }
        }
        values = turned;
    }
    for (int64_t i = 0; i < order; i++) hadamard(values + i * size, (int)size);
    return values;
}

static void prepare_block(const E8pJob *job, int64_t row, int64_t number, const float *values) {
    if (!job->planes) {
        float *to = job->floats + (row * job->blocks + number) * BLOCK;
        for (int i = 0; i < BLOCK; i++) to[i / GROUP * GROUP + place_of(i % GROUP)] = values[i];
        return;
    }
    int32_t codes[BLOCK];
    const int64_t at = number * ROWS_AT_ONCE + row;
    const float levels = job->planes == 1 ? 127.0f : (float)LEVELS_16;
    job->scales[at] = quantize_block(values, levels, codes, &job->totals[at]);
    int8_t *to = job->bytes + (number * job->plane_rows + row * job->planes) * BLOCK;
    for (int i = 0; i < BLOCK; i++) {
        const int place = i / GROUP * GROUP + place_of(i % GROUP);
        const int8_t low = (int8_t)(codes[i] & 255);
        if (job->planes == 1) to[place] = low;
        else to[place] = (int8_t)((codes[i] - low) / 256), to[BLOCK + place] = low;
    }
}

static void prepare_rows(void *argument) {
    E8pJob *job = argument;
    const HadamardCall *call = job->call;
    for (;;) {
        const int64_t row = atomic_fetch_add(&job->next, 1), inputs = call->in_features;
        if (row >= job->rows) return;
        load_inputs(call, job->begin + row, 0, inputs, job->first + row * job->width);
        float *values = transform(job, row, inputs, call->left, call->left_order);
        memset(values + inputs, 0, (size_t)(job->blocks * BLOCK - inputs) * sizeof *values);
        for (int64_t number = 0; number < job->blocks; number++) prepare_block(job, row, number, values + number * BLOCK);
    }
}

/* Adds exact sums [level][plane row][OUTPUTS] of a block of inputs to the rows' sums. */
static void add_sums(const E8pJob *job, int64_t number, int levels, const int *zeros, const int32_t *sums, float *to) {
    const int64_t level_sums = job->plane_rows * OUTPUTS;
    for (int64_t row = 0; row < job->rows; row++, to += job->width) {
        const int64_t at = number * ROWS_AT_ONCE + row;
        const int32_t *from = sums + row * job->planes * OUTPUTS;
        for (int v = 0; v < OUTPUTS; v += LANES, from += LANES) {
            fvec value = fset(0.0f);
            for (int level = 0; level < levels; level++) {
                ivec sum = iload(from + level * level_sums);
                if (job->planes == 2) sum = iadd(ISHL(sum, 8), iload(from + level * level_sums + OUTPUTS));
                fvec exact = itof(iadd(sum, iset(-zeros[level] * job->totals[at])));
                value = level ? ffma(exact, fset(job->call->residual), value) : exact;
            }
            fstore(to + v, ffma(value, fset(job->scales[at]), fload(to + v)));
        }
    }
}

static void multiply_level(const E8pJob *job, const int kind, int64_t groups, int64_t number, const uint8_t *codes,
                           int32_t *sums) {
    const uint8_t *tables = job->call->tables;
    const int8_t *inputs = job->bytes + number * job->plane_rows * BLOCK;
    const int64_t rows = job->rows * job->planes;
    if (rows == 1) {
        if (kind == E8P) multiply_codes(E8P, 1, groups, tables, codes, inputs, sums);
        else multiply_codes(E8, 1, groups, tables, codes, inputs, sums);
    } else if (rows == 2) {
        if (kind == E8P) multiply_codes(E8P, 2, groups, tables, codes, inputs, sums);
        else multiply_codes(E8, 2, groups, tables, codes, inputs, sums);
    } else {
        _Alignas(64) uint8_t bytes[BLOCK_VECTORS * CODES];
        if (kind == E8P) decode_block(E8P, groups, tables, codes, bytes);
        else decode_block(E8, groups, tables, codes, bytes);
        if (groups < GROUPS) memset(bytes + groups * CHANNELS * CODES, 0, (size_t)(GROUPS - groups) * CHANNELS * CODES);
        if (job->has_unit) multiply_units(rows, bytes, inputs, sums);
        else multiply_rows(rows, groups * CHANNELS, bytes, inputs, sums);
    }
}

static void multiply_block_of_floats(const E8pJob *job, int levels, const int *kinds, const int *zeros, int64_t groups,
                                     int64_t number, const uint8_t *codes, float *to) {
    _Alignas(64) uint8_t bytes[BLOCK_VECTORS * CODES];
    _Alignas(64) float weights[BLOCK * OUTPUTS];
    for (int level = 0; level < levels; level++) {
        if (kinds[level] == E8P) decode_block(E8P, groups, job->call->tables, codes, bytes);
        else decode_block(E8, groups, job->call->tables, codes, bytes);
        codes += groups * code_bytes(kinds[level]);
        widen(groups * CHANNELS, bytes, (float)zeros[level], job->call->residual, level == 0, weights);
    }
    const int64_t stride = job->blocks * BLOCK;
    for (int64_t row = 0, count; row < job->rows; row += count, to += count * job->width) {
        const float *inputs = job->floats + row * stride + number * BLOCK;
        count = job->rows - row < FLOAT_ROWS ? 1 : FLOAT_ROWS;
        if (count > 1) multiply_floats(FLOAT_ROWS, groups * GROUP, weights, inputs, stride, to, job->width);
        else multiply_floats(1, groups * GROUP, weights, inputs, stride, to, job->width);
    }
}

/* 16 outputs, whose sums go to `first`. */
static void multiply_outputs(const E8pJob *job, int64_t unit) {
    const HadamardCall *call = job->call;
    const int levels = call->bits == 2 ? 1 : 2, kinds[] = {E8P, call->bits == 3 ? E8 : E8P};
    const int zeros[] = {E8P_ZERO, call->bits == 3 ? E8_ZERO : E8P_ZERO};
    const int64_t all_groups = call->in_features / GROUP, group_bytes = CODES * call->bits;
    const uint8_t *codes = (const uint8_t *)call->codes + unit * all_groups * group_bytes;
    int32_t sums[MOST_LEVELS * MOST_PLANES * ROWS_AT_ONCE * OUTPUTS];
    float *to = job->first + unit * OUTPUTS;
    for (int64_t row = 0; row < job->rows; row++) memset(to + row * job->width, 0, OUTPUTS * sizeof *to);
    for (int64_t number = 0; number < job->blocks; number++) {
        const int64_t left = all_groups - number * GROUPS, groups = left < GROUPS ? left : GROUPS;
        if (job->planes) {
            for (int level = 0; level < levels; level++)
                multiply_level(job, kinds[level], groups, number, codes + level * groups * code_bytes(E8P),
                               sums + level * job->plane_rows * OUTPUTS);
            add_sums(job, number, levels, zeros, sums, to);
        } else
            multiply_block_of_floats(job, levels, kinds, zeros, groups, number, codes, to);
        codes += groups * group_bytes;
    }
}

static void multiply_units_of_outputs(void *argument) {
    E8pJob *job = argument;
    if (job->has_unit) begin_tiles();
    for (;;) {
        const int64_t unit = atomic_fetch_add(&job->next, 1);
        if (unit >= (job->call->out_features + OUTPUTS - 1) / OUTPUTS) break;
        multiply_outputs(job, unit);
    }
    if (job->has_unit) end_tiles();
}

static void finish_rows(void *argument) {
    E8pJob *job = argument;
    const HadamardCall *call = job->call;
    for (;;) {
        const int64_t row = atomic_fetch_add(&job->next, 1), outputs = call->out_features;
        if (row >= job->rows) return;
        float *sums = job->first + row * job->width;
        for (int64_t i = 0; i < outputs; i++) sums[i] *= call->scales[i];
        store_outputs(call, job->begin + row, 0, outputs, transform(job, row, outputs, call->right, call->right_order));
    }
}

static void run_stage(E8pJob *job, void (*stage)(void *), int64_t threads) {
    atomic_store(&job->next, 0);
    run_parallel(stage, job, threads);
}

/* 0, or 1 where memory ran out. */
int llmopt_e8p(const HadamardCall *call) {
    const int64_t most = call->rows < ROWS_AT_ONCE ? call->rows : ROWS_AT_ONCE;
    const int64_t widest = call->in_features > call->out_features ? call->in_features : call->out_features;
    E8pJob job = {.call = call, .planes = call->input_bits == 8 ? 1 : call->input_bits == 16 ? 2 : 0};
    job.blocks = (call->in_features + BLOCK - 1) / BLOCK;
    job.width = (widest + BLOCK - 1) / BLOCK * BLOCK;
    job.plane_rows = (most * job.planes + UNIT_ROWS - 1) / UNIT_ROWS * UNIT_ROWS;
    job.has_unit = most * job.planes > FUSED_ROWS && has_matrix_unit();
    const int64_t values = most * job.width, inputs = job.blocks * BLOCK * (job.planes ? job.plane_rows : 4 * most);
    job.first = (float *)workspace(0, 8 * values + inputs + job.blocks * ROWS_AT_ONCE * 8);
    if (!job.first) return 1;
    job.second = job.first + values;
    job.floats = job.second + values;
    job.bytes = (int8_t *)job.floats;
    job.scales = (float *)(job.bytes + inputs);
    job.totals = (int32_t *)(job.scales + job.blocks * ROWS_AT_ONCE);
    for (job.begin = 0; job.begin < call->rows; job.begin += most) {
        job.rows = call->rows - job.begin < most ? call->rows - job.begin : most;
        const int64_t few = job.rows < 3 ? 1 : call->threads;
        run_stage(&job, prepare_rows, few);
        run_stage(&job, multiply_units_of_outputs, call->threads);
        run_stage(&job, finish_rows, few);
    }
    return 0;
}
