/* Mixed-input GEMM over packed weights: y [rows, out] = x [rows, in] @ weight.T + bias.
 *
 * Three input dtypes: int8 with integer accumulation, bfloat16 and float32 with float accumulation. All
 * share one loop order: panels of output channels, blocks of input channels unpacked into L1, tiles of rows,
 * and inside a block the steps, whose sums are scaled and accumulated. A row's accumulation order does not
 * depend on the other rows, so results are batch-invariant. */
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "parallel.h"
#include "quantize.h"
#include "matrix_tile.h"
#include "row_tile.h"
#include "tile.h"
#include "unpack.h"

#include "amx_tile.h"

#define RUNS_PER_THREAD 8 /* of panels: more balance the threads' load better, fewer read longer runs */
#define ROWS_AT_ONCE 128 /* their inputs and accumulators stay in L2 */

enum { INPUT_S8 = 0, INPUT_BF16 = 1, INPUT_F32 = 2 };

typedef struct {
    const Weight *weight;
    const void *x;         /* [rows][x_stride], bfloat16 or float32; or int8 codes (quantized activations) */
    const float *scales;   /* [rows][blocks], of int8 codes; else NULL */
    void *y;               /* [rows][out_features] */
    const float *bias;     /* [out_features] or NULL */
    int64_t rows, x_stride;
    int64_t is_bf16;       /* of x */
    int64_t gives_bf16;    /* of y; else float32 */
    int64_t input_dtype;   /* INPUT_... */
    int64_t threads;
    int64_t as_e4m3;       /* float inputs: whether they are rounded to e4m3, times a scale */
    int64_t input_block;   /* input channels that share a scale: whole steps of int8, chunks of e4m3; 0: all */
    float levels;          /* the code of the largest magnitude: 127 or 127.5 of int8, 448 of e4m3 */
    float fixed_scale;     /* the static scale of int8 or e4m3 inputs; 0: dynamic */
    float threshold;       /* int8 inputs: outliers from here up count as 0; 0: no threshold */
} Call;

/* Inputs prepared for the micro-kernels: whole chunks, rows zero-padded. */
typedef struct {
    const Weight *weight;
    const Call *call;
    uint8_t *values;       /* [rows][stride] */
    int64_t stride;        /* bytes */
    void *sums;            /* [rows][steps], of `keep_sum` or float */
    float *scales;         /* [rows][steps], of int8 inputs */
    atomic_long next;
} Job;

INLINE void load_chunk(const Call *call, int64_t row, int64_t begin, int64_t in, float *values) {
    int64_t count = in - begin < CHUNK ? in - begin : CHUNK;
    int64_t at = row * call->x_stride + begin;
    if (call->is_bf16) {
        const uint16_t *x = (const uint16_t *)call->x + at;
        if (count == CHUNK) {
            for (int i = 0; i < CHUNK; i += LANES) fstore(values + i, fbits(ISHL(iwiden_u16(x + i), 16)));
            return;
        }
        for (int i = 0; i < CHUNK; i++) {
            uint32_t bits = i < count ? (uint32_t)x[i] << 16 : 0;
            memcpy(values + i, &bits, 4);
        }
        return;
    }
    const float *x = (const float *)call->x + at;
    for (int i = 0; i < CHUNK; i++) values[i] = i < count ? x[i] : 0.0f;
}

/* Keeps the scale of a step of an int8 row and its zero-point correction: -base times the sum of its inputs
 * where all codes share the base, else the scaled sum, to be multiplied by the offsets. */
INLINE void keep_sum(Job *job, int64_t at, int32_t sum, float scale) {
    job->scales[at] = scale;
    if (has_own_offsets(job->weight)) ((float *)job->sums)[at] = (float)sum * scale;
    else ((int32_t *)job->sums)[at] = -(int32_t)job->weight->base * sum;
}

static inline int64_t padded_inputs(const Weight *w) { return num_chunks(w) * CHUNK; }

/* Input channels that share an activation scale. */
static inline int64_t input_block(const Job *job) {
    return job->call->input_block ? job->call->input_block : padded_inputs(job->weight);
}

/* Prepares a row of quantized activations: copies its codes, sums them per step. */
static void prepare_codes(Job *job, int64_t row) {
    const Weight *w = job->weight;
    int8_t *codes = (int8_t *)(job->values + row * job->stride);
    int64_t padded = padded_inputs(w), block = input_block(job);
    memcpy(codes, (const int8_t *)job->call->x + row * job->call->x_stride, (size_t)w->in_features);
    memset(codes + w->in_features, 0, (size_t)(padded - w->in_features));
    const float *scales = job->call->scales + row * ceil_div(padded, block);
    for (int64_t s = 0, k = 0; s < num_steps(w); s++) {
        float scale = scales[k / block];
        int64_t end = k + w->step < padded ? k + w->step : padded;
        ivec sum = iset(0);
        for (; k < end; k += LANES) sum = iadd(sum, iwiden_s8(codes + k));
        keep_sum(job, row * num_steps(w) + s, isum_lanes(sum), scale);
    }
}

/* Loads a chunk of a row, with outliers as 0. */
INLINE void load_inliers(const Call *call, int64_t row, int64_t begin, int64_t in, float *values) {
    load_chunk(call, row, begin, in, values);
    if (!(call->threshold > 0.0f)) return;
    for (int i = 0; i < CHUNK; i += LANES)
        fstore(values + i, fzero_unless_below(fload(values + i), fset(call->threshold)));
}

/* The static scale, or that of a block of a row. */
INLINE float scale_of_inputs(const Job *job, int64_t row, int64_t begin, int64_t end) {
    float values[CHUNK];
    if (job->call->fixed_scale != 0.0f) return job->call->fixed_scale;
    fvec largest = fset(0.0f);
    for (int64_t k = begin; k < end; k += CHUNK) {
        load_inliers(job->call, row, k, job->weight->in_features, values);
        for (int i = 0; i < CHUNK; i += LANES) largest = fmax_(largest, fabs_(fload(values + i)));
    }
    return scale_of(largest, job->call->levels);
}

/* Prepares a row: quantizes it to int8, with a dynamic scale per block or the static scale. */
static void prepare_s8(Job *job, int64_t row) {
    const Weight *w = job->weight;
    const Call *call = job->call;
    float values[CHUNK];
    int8_t *codes = (int8_t *)(job->values + row * job->stride);
    int64_t at = row * num_steps(w), padded = padded_inputs(w), block = input_block(job);
    for (int64_t begin = 0; begin < padded; begin += block) {
        int64_t end = begin + block < padded ? begin + block : padded;
        float scale = scale_of_inputs(job, row, begin, end);
        ivec sum = iset(0);
        int64_t left = w->step; /* of the step, in channels */
        for (int64_t k = begin; k < end; k += CHUNK) {
            load_inliers(call, row, k, w->in_features, values);
            for (int i = 0; i < CHUNK; i += LANES) {
                ivec code = quantize_to(fload(values + i), fset(scale));
                istore_s8(codes + k + i, code);
                sum = iadd(sum, code);
                if ((left -= LANES) == 0) {
                    keep_sum(job, at++, isum_lanes(sum), scale);
                    sum = iset(0);
                    left = w->step;
                }
            }
        }
        if (left != w->step) keep_sum(job, at++, isum_lanes(sum), scale);
    }
}

/* Rounds a chunk to e4m3 times a scale, and where the inputs are in bfloat16, to bfloat16. */
INLINE void round_chunk(const Call *call, float scale, float *values) {
    for (int i = 0; i < CHUNK; i += LANES)
        fstore(values + i, fmul(nearest_e4m3(fdiv(fload(values + i), fset(scale))), fset(scale)));
    if (!call->is_bf16) return;
    uint16_t halves[CHUNK];
    store_bf16(halves, values, CHUNK);
    for (int i = 0; i < CHUNK; i += LANES) fstore(values + i, fbits(ISHL(iwiden_u16(halves + i), 16)));
}

/* Prepares a row in floats; in bfloat16 the middle two of every four are swapped, to match the weights. */
static void prepare_float(Job *job, int64_t row) {
    const Weight *w = job->weight;
    float values[CHUNK], scale = 0.0f;
    float *sums = (float *)job->sums + row * num_steps(w);
    const int64_t block = input_block(job);
    if (has_own_offsets(w)) memset(sums, 0, (size_t)num_steps(w) * sizeof(float));
    for (int64_t k = 0; k < w->in_features; k += CHUNK) {
        load_chunk(job->call, row, k, w->in_features, values);
        if (job->call->as_e4m3) {
            const int64_t end = k + block < w->in_features ? k + block : w->in_features;
            if (k % block == 0) scale = scale_of_inputs(job, row, k, end);
            round_chunk(job->call, scale, values);
        }
        for (int i = 0; i < CHUNK && has_own_offsets(w); i += CHUNK / 2) { /* a step is no shorter */
            float *sum = sums + (k + i) / w->step;
            for (int j = i; j < i + CHUNK / 2; j++) *sum += values[j];
        }
        if (job->call->input_dtype == INPUT_F32) {
            memcpy(job->values + row * job->stride + k * 4, values, sizeof values);
            continue;
        }
        uint16_t *halves = (uint16_t *)(job->values + row * job->stride) + k;
        for (int i = 0; i < CHUNK; i++) {
            uint32_t bits;
            memcpy(&bits, values + i, 4);
            halves[(i & ~3) | (i & 1) << 1 | (i & 2) >> 1] = (uint16_t)(bits >> 16);
        }
    }
}

static void prepare_rows(void *argument) {
    Job *job = argument;
    for (;;) {
        int64_t row = atomic_fetch_add(&job->next, 1);
        if (row >= job->call->rows) return;
        if (job->call->scales) prepare_codes(job, row);
        else if (job->call->input_dtype == INPUT_S8) prepare_s8(job, row);
        else prepare_float(job, row);
    }
}

/* Whether threads that multiply rows of a call have AMX's tiles. */
static inline int has_tiles(const Weight *w, const Call *call) {
    return call->input_dtype == INPUT_S8 && call->rows >= UNIT_ROWS && fits_matrix_unit(w);
}

/* Rows of a tile: their accumulators fit registers (with short steps, those of the whole block too). */
static int tile_rows(int64_t input_dtype, int64_t step) {
    if (HAS_MATRIX_TILES && input_dtype == INPUT_S8) return MATRIX_ROWS;
    return input_dtype != INPUT_S8 ? FLOAT_ROWS : step < 128 && MAX_ROWS > 6 ? 6 : MAX_ROWS;
}

static void multiply_tiles(const Job *job, const Block *b, int64_t first, int64_t step_at, int64_t k,
                           int64_t rows, float *acc) {
    int64_t input_dtype = job->call->input_dtype;
    int most = tile_rows(input_dtype, b->step);
    const uint8_t *ahead = b->ahead;
    int64_t width = input_dtype == INPUT_S8 ? 1 : input_dtype == INPUT_BF16 ? 2 : 4;
    for (int64_t r = 0, tiles = ceil_div(rows, most); r < rows; tiles--) {
        int count = (int)ceil_div(rows - r, tiles); /* tiles of about the same size */
        const uint8_t *x = job->values + (first + r) * job->stride + k * width;
        int64_t at = (first + r) * b->steps + step_at;
        const uint8_t *sums = (const uint8_t *)job->sums + at * 4;
        const float *input_scales = job->scales + at;
        float *to = acc + r * PANEL;
        /* clang-format off */
#define S8_OF(n, narrow, offsets, nibbles) \
    tile_s8(n, b, narrow, offsets, nibbles, (const int8_t *)x, job->stride, sums, input_scales, to, ahead)
#define S8_AS(n, narrow, nibbles) \
    if (b->has_offsets) S8_OF(n, narrow, 1, nibbles); \
    else S8_OF(n, narrow, 0, nibbles);
#define S8(n) \
    case n: \
        if (b->in_nibbles) { S8_AS(n, NARROW_IS_FASTER, 1) } \
        else if (NARROW_IS_FASTER && b->narrow) { S8_AS(n, 1, 0) } \
        else { S8_AS(n, 0, 0) } \
        break;
#define FLOATS(n, from) \
    case n: \
        tile_float(n, b, from, x, job->stride, (const float *)sums, to, ahead); \
        break;
        if (HAS_MATRIX_TILES && input_dtype == INPUT_S8 && count > MAX_ROWS) {
            matrix_tile(count, b, (const int8_t *)x, job->stride, sums, input_scales, to, ahead);
        } else if (input_dtype == INPUT_S8) {
            switch (count) {
#if MAX_ROWS == 8
                S8(8) S8(7) S8(6) S8(5) S8(4) S8(3)
#endif
                S8(2) S8(1)
            }
#if FLOAT_ROWS == 6
#define FLOAT_TILES(from) \
    FLOATS(6, from) FLOATS(5, from) FLOATS(4, from) FLOATS(3, from) FLOATS(2, from) FLOATS(1, from)
#else
#define FLOAT_TILES(from) FLOATS(3, from) FLOATS(2, from) FLOATS(1, from)
#endif
#if HAS_PAIRS
        } else if (b->from == FROM_PAIRS) {
            switch (count) { FLOAT_TILES(FROM_PAIRS) }
#endif
        } else if (b->from == FROM_BF16) {
            switch (count) { FLOAT_TILES(FROM_BF16) }
        } else if (b->from == FROM_F16) {
            switch (count) { FLOAT_TILES(FROM_F16) }
        } else {
            switch (count) { FLOAT_TILES(FROM_F32) }
        }
        /* clang-format on */
        r += count;
        ahead += b->channels * b->ahead_rate;
    }
}

static void store_rows(const Job *job, int64_t panel, int64_t first, int64_t rows, const float *acc) {
    const Weight *w = job->weight;
    const Call *call = job->call;
    int64_t begin = panel * PANEL;
    int64_t count = w->out_features - begin < PANEL ? w->out_features - begin : PANEL;
    float bias[PANEL] = {0};
    if (call->bias) memcpy(bias, call->bias + begin, (size_t)count * sizeof(float));
    for (int64_t r = 0; r < rows; r++) {
        float values[PANEL];
        uint16_t halves[PANEL];
        int64_t at = (first + r) * w->out_features + begin;
        for (int i = 0; i < PANEL; i += LANES)
            fstore(values + i, fadd(fload(acc + r * PANEL + i), fload(bias + i)));
        if (call->gives_bf16 && count == PANEL) store_bf16((uint16_t *)call->y + at, values, PANEL);
        else if (call->gives_bf16) {
            store_bf16(halves, values, PANEL);
            memcpy((uint16_t *)call->y + at, halves, (size_t)count * sizeof(uint16_t));
        } else memcpy((float *)call->y + at, values, (size_t)count * sizeof(float));
    }
}

/* Prefetches where some rows of a panel will be stored: lines far apart, for which the stores would wait. */
static inline void fetch_outputs(const Job *job, int64_t panel, int64_t first, int64_t end) {
    const int64_t width = job->call->gives_bf16 ? 2 : 4;
    for (int64_t r = first; r < end; r++) {
        const int64_t at = r * job->weight->out_features + panel * PANEL;
        const uint8_t *to = (const uint8_t *)job->call->y + at * width;
        __builtin_prefetch(to, 1);
        if (width == 4) __builtin_prefetch(to + 64, 1);
    }
}

static void multiply_row(const Job *job, int64_t panel, int64_t row, float *acc) {
    const Weight *w = job->weight;
    const int8_t *x = (const int8_t *)(job->values + row * job->stride);
    const int64_t at = row * num_steps(w);
    const uint8_t *sums = (const uint8_t *)job->sums + at * 4;
    const float *scales = job->scales + at;
    const int plain = w->scale_kind == SCALE_F16 && w->offset_kind == OFFSET_BASE;
    if (w->bits == 4 && plain) row_tile(4, 1, w, panel, x, sums, scales, acc);
    else if (w->bits == 4) row_tile(4, 0, w, panel, x, sums, scales, acc);
    else if (w->bits == 8 && plain) row_tile(8, 1, w, panel, x, sums, scales, acc);
    else if (w->bits == 8) row_tile(8, 0, w, panel, x, sums, scales, acc);
    else row_tile(0, 0, w, panel, x, sums, scales, acc);
}

INLINE void multiply_float_row(const Job *job, const int pairs, int64_t panel, int64_t row, float *acc) {
    const Weight *w = job->weight;
    const uint8_t *x = job->values + row * job->stride;
    const float *sums = (const float *)job->sums + row * num_steps(w);
    if (w->kind == CODES_TABLE) float_row_tile(pairs, 4, CODES_TABLE, w, panel, x, sums, acc);
    else if (w->kind == CODES_FP8) float_row_tile(pairs, 8, CODES_FP8, w, panel, x, sums, acc);
    else if (w->bits == 4) float_row_tile(pairs, 4, CODES_INTEGER, w, panel, x, sums, acc);
    else if (w->bits == 8) float_row_tile(pairs, 8, CODES_INTEGER, w, panel, x, sums, acc);
    else float_row_tile(pairs, 0, CODES_INTEGER, w, panel, x, sums, acc);
}

static void multiply_panel(const Job *job, int64_t panel, int64_t first, int64_t rows) {
    const Weight *w = job->weight;
    int input_dtype = (int)job->call->input_dtype;
    _Alignas(64) uint8_t scratch[MAX_BLOCK * PANEL], floats[MAX_BLOCK * PANEL * 4];
    _Alignas(64) float acc[ROWS_AT_ONCE * PANEL];
    if (rows == 1 && input_dtype == INPUT_S8 && takes_row_tile(w)) {
        multiply_row(job, panel, first, acc);
        store_rows(job, panel, first, rows, acc);
        return;
    }
    if (rows == 1 && input_dtype != INPUT_S8 && takes_float_row(w)) {
        if (HAS_PAIRS && input_dtype == INPUT_BF16) multiply_float_row(job, 1, panel, first, acc);
        else multiply_float_row(job, 0, panel, first, acc);
        store_rows(job, panel, first, rows, acc);
        return;
    }
    memset(acc, 0, (size_t)rows * PANEL * sizeof(float));
    Block b; /* without an initializer, which would clear 8 KB of scales for every panel */
    b.step = w->step, b.steps = num_steps(w);
    b.narrow = w->bits <= 6 && w->kind == CODES_INTEGER;
    int in_tiles = rows >= UNIT_ROWS && has_tiles(w, job->call);
    int most = in_tiles ? PAIR_ROWS : tile_rows(input_dtype, w->step);
    /* The tiles of a block divide the prefetch, so that memory reads and compute overlap. */
    b.ahead_rate = ceil_div(chunk_bytes(w) / CHUNK, ceil_div(rows, most));
    b.in_nibbles = input_dtype == INPUT_S8 && !in_tiles && w->bits == 4 && w->kind == CODES_INTEGER &&
                   (UNPACKING_IS_FREE || rows <= most);
    b.has_offsets = has_own_offsets(w);
    b.from = input_dtype == INPUT_BF16 ? FROM_PAIRS : FROM_F32;
    if (is_half(w) && rows <= most) b.from = w->kind == CODES_BF16 ? FROM_BF16 : FROM_F16;
    int64_t base = input_dtype == INPUT_S8 ? 0 : w->base; /* already subtracted from unpacked floats */
    int64_t chunks = num_chunks(w), size = chunk_bytes(w);
    /* Short steps are batched into a block, whose floats fit half of L1: beside them lie the rows of a tile. */
    const int64_t short_steps = input_dtype == INPUT_F32 ? 128 : 256;
    int64_t block = w->step >= short_steps ? w->step : short_steps / w->step * w->step;
    int64_t block_chunks = block / CHUNK;
    const uint8_t *packed = w->codes + panel * chunks * size;
#if HAS_PAIRS
    htable sixteen = {0};
    if (w->bits == 4 && input_dtype == INPUT_BF16) sixteen = sixteen_values(w);
#endif
    for (int64_t c = 0; c < chunks; c += block_chunks) {
        int64_t now = chunks - c < block_chunks ? chunks - c : block_chunks;
        b.channels = now * CHUNK;
        int64_t step_at = c * CHUNK / w->step;
        for (int64_t s = 0; s * w->step < b.channels; s++) {
            int64_t group = (step_at + s) * w->step / w->group;
            if (group >= num_groups(w)) group = num_groups(w) - 1;
            group_scales(w, panel, group, base, b.scales[s], b.offsets[s]);
        }
        const uint8_t *run = packed + c * size;
        b.ahead = run + AHEAD / CHUNK * size;
        fetch_outputs(job, panel, first + c * rows / chunks, first + (c + now) * rows / chunks);
        if (b.in_nibbles || b.from == FROM_BF16 || b.from == FROM_F16) {
            b.weights = run;
        } else if (is_half(w)) {
            widen_halves(w, run, now, (float *)floats);
            b.weights = floats;
        } else if (input_dtype == INPUT_S8) {
            b.weights = operand_bytes(w, run, now, scratch);
        } else if (input_dtype == INPUT_F32) {
            unpack_f32(w, codes_as_bytes(w, run, now, scratch), now, (float *)floats);
            b.weights = floats;
#if HAS_PAIRS
        } else {
            if (w->bits == 4) unpack_bf16_4(run, now, sixteen, floats);
            else unpack_bf16(w, codes_as_bytes(w, run, now, scratch), now, floats);
            b.weights = floats;
#endif
        }
        if (in_tiles) {
            int64_t at = first * b.steps + step_at;
            amx_tiles(rows, &b, (const int8_t *)job->values + first * job->stride + c * CHUNK, job->stride,
                      (const uint8_t *)job->sums + at * 4, job->scales + at, acc);
        } else multiply_tiles(job, &b, first, step_at, c * CHUNK, rows, acc);
    }
    store_rows(job, panel, first, rows, acc);
}

static void multiply_panels(void *argument) {
    Job *job = argument;
    int64_t panels = ceil_div(job->weight->out_features, PANEL), rows = job->call->rows;
    int64_t total = panels * ceil_div(rows, ROWS_AT_ONCE);
    int64_t run = total / (job->call->threads * RUNS_PER_THREAD) + 1; /* neighbours in memory */
    int in_tiles = has_tiles(job->weight, job->call);
    if (in_tiles) begin_tiles();
    for (;;) {
        int64_t begin = atomic_fetch_add(&job->next, run);
        if (begin >= total) break;
        for (int64_t item = begin; item < begin + run && item < total; item++) {
            int64_t first = item / panels * ROWS_AT_ONCE;
            int64_t count = rows - first < ROWS_AT_ONCE ? rows - first : ROWS_AT_ONCE;
            multiply_panel(job, item % panels, first, count);
        }
    }
    if (in_tiles) end_tiles();
}

/* Whether the bfloat16 GEMM (AVX512-BF16) is compiled in. */
int llmopt_has_bf16(void) {
#if HAS_PAIRS
    return 1;
#else
    return 0;
#endif
}

static inline int64_t prepared_stride(const Weight *w, int64_t input_dtype) {
    int64_t width = input_dtype == INPUT_S8 ? 1 : input_dtype == INPUT_BF16 ? 2 : 4;
    return padded_inputs(w) * width + 64; /* power-of-two strides would conflict in the cache sets */
}

static inline int64_t sums_bytes(const Weight *w, int64_t rows) {
    return ceil_div(rows * num_steps(w) * 4, 64) * 64;
}

/* Bytes of prepared rows, their sums and their scales. */
static inline int64_t prepared_bytes(const Weight *w, int64_t input_dtype, int64_t rows) {
    return rows * prepared_stride(w, input_dtype) + 2 * sums_bytes(w, rows);
}

/* The job of a call, with its prepared rows in `memory`. */
static void lay_out_job(Job *job, const Call *call, uint8_t *memory) {
    const Weight *w = call->weight;
    job->weight = w, job->call = call;
    job->stride = prepared_stride(w, call->input_dtype);
    job->values = memory;
    job->sums = memory + call->rows * job->stride;
    job->scales = (float *)((uint8_t *)job->sums + sums_bytes(w, call->rows));
}

/* Returns 0, or 1 if the workspace cannot be allocated. */
int llmopt_linear(const Call *call) {
    uint8_t *memory = workspace(0, prepared_bytes(call->weight, call->input_dtype, call->rows));
    if (!memory) return 1;
    Job job = {0};
    lay_out_job(&job, call, memory);
    run_parallel(prepare_rows, &job, call->rows < 3 ? 1 : call->threads);
    atomic_store(&job.next, 0);
    run_parallel(multiply_panels, &job, call->threads);
    return 0;
}
