/* GEMM with trellis-coded weights (EXL3) and quantized inputs: y = H (Qᵀ H (x suh)) svh in integer dot products.
 *
 * Transformed inputs are quantized in blocks of 128 that share a scale, to 8 bits or to 13. With 8 bits a weight
 * of the codebook mul1 is the sum of four bytes, times and plus a constant: for few rows the bytes are multiplied
 * as they are, each by a copy of its input, and no weight is ever put together; for more rows too where there are
 * matrix tiles. Otherwise 128 inputs of 32 outputs
 * are decoded to int16: byte sums for 8-bit inputs, else values in units of 2^-13 with the float16 rounding of
 * the format. Sums are exact, so that all processors agree, and a row does not depend on the others. */
#include <stdatomic.h>

#include "parallel.h"
#include "input_codes.h"
#include "trellis_tiles.h"

enum { MIDDLE = 510 };          /* mean of a byte sum; subtracted, so that what is added up is small */
enum { LEVELS_16 = 4095 };      /* 16 products with values below 2^15 do not overflow */
enum { BYTE_ROWS = 2 };         /* up to here bytes are multiplied as they are */
enum { ROWS_AT_ONCE = 64 };     /* for which codes are decoded once */
enum { TILE_ROWS = LANES == 16 ? 8 : 4 };
enum { BLOCK_INPUTS = BLOCK / 2 }; /* 32-bit words of a row */

typedef struct {
    const HadamardCall *call;
    uint32_t *inputs;  /* [in / 128][room][BLOCK_INPUTS]: two int16, or two int8 twice each */
    float *scales;     /* [in / 128][room] of the sums */
    int32_t *starts;   /* [in / 128][room] of the sums: less MIDDLE times all inputs */
    float *shares;     /* [rows]: what the codebook's mean adds to every transformed output */
    int64_t rows;      /* room for them: whole tiles */
    int form;          /* of a weight, as it is multiplied */
    atomic_long next;
} IntegerJob;

static int form_of(const HadamardCall *call) {
    if (call->input_bits != 8) return FORM_UNITS;
    if (call->rows <= BYTE_ROWS) return FORM_BYTES;
    return has_matrix_unit() ? FORM_TILES : FORM_SUMS;
}

static void prepare_block(const IntegerJob *job, int64_t row, int64_t number) {
    const HadamardCall *call = job->call;
    const int is_8 = call->input_bits == 8, are_bytes = job->form == FORM_BYTES || job->form == FORM_TILES;
    float block[BLOCK];
    int32_t codes[BLOCK];
    transform_block(call, row, number * BLOCK, block);
    int32_t total;
    const float scale = quantize_block(block, is_8 ? 127.0f : (float)LEVELS_16, codes, &total);
    const int64_t at = number * job->rows + row;
    /* mul1: float16 0x1eee, and what 1024 of it and 0xc931 leave beside MIDDLE of it */
    job->starts[at] = is_8 ? -MIDDLE * total : 0;
    job->scales[at] = scale * (is_8 ? 0.0067672729f : 0x1p-13f);
    if (is_8) job->shares[row] += scale * (float)total * -0.0018157959f;
    uint32_t *to = job->inputs + at * BLOCK_INPUTS;
    for (int tile = 0; tile < BLOCK; tile += TILE)
        for (int pair = 0; pair < PAIRS; pair++) {
            const int32_t *code = codes + tile + pair_input(pair);
            if (are_bytes) *to++ = (code[0] & 255) * 0x0101u + (uint32_t)(code[4] & 255) * 0x01010000u;
            else *to++ = (uint32_t)(code[0] & 0xffff) | (uint32_t)code[4] << 16;
        }
}

static void prepare_rows(void *argument) {
    IntegerJob *job = argument;
    for (;;) {
        int64_t row = atomic_fetch_add(&job->next, 1);
        if (row >= job->call->rows) return;
        job->shares[row] = 0.0f;
        for (int64_t number = 0; number < job->call->in_features / BLOCK; number++) prepare_block(job, row, number);
    }
}

/* Adds the scaled sums of some rows to `whole` [row][BLOCK], as whose lanes they lie there. */
INLINE void add_sums(const int rows, ivec sums[][2], const float *scales, float *whole) {
    for (int r = 0; r < rows; r++)
        for (int half = 0; half < 2; half++) {
            float *to = whole + r * BLOCK + half * 16;
            fstore(to, ffma(itof(sums[r][half]), fset(scales[r]), fload(to)));
        }
}

/* The bytes of the products of 128 inputs and 32 outputs times those inputs. */
INLINE void multiply_bytes(const int rows, const int bits, const uint16_t *codes, const uint32_t *inputs,
                           const int32_t *starts, const float *scales, float *whole) {
    for (int v = 0; v < PAIR_VECTORS; v++) {
        ivec low_sums[BYTE_ROWS][2], high_sums[BYTE_ROWS][2];
        for (int r = 0; r < rows; r++)
            for (int half = 0; half < 2; half++) low_sums[r][half] = iset(starts[r]), high_sums[r][half] = iset(0);
        for (int tile = 0; tile < BLOCK_TILES; tile++) {
            ivec now[MAX_BITS];
            load_spans(bits, codes + tile * bits * PAIR_WORDS + v * 2 * LANES, now);
            ivec before = wrotate(now[bits - 1]);
#pragma GCC unroll 16
            for (int place = 0; place < TILE; place++) {
                const int pair = place / 8 * 4 + place % 4, half = place % 8 / 4;
                ivec low, high;
                product_words(states_at(place, bits, now, before), &low, &high);
                for (int r = 0; r < rows; r++) {
                    ivec x = ibroadcast(inputs + r * BLOCK_INPUTS + tile * PAIRS + pair);
                    low_sums[r][half] = dot4(low_sums[r][half], low, x, 0);
                    high_sums[r][half] = dot4(high_sums[r][half], high, x, 0);
                }
            }
        }
        for (int r = 0; r < rows; r++)
            for (int half = 0; half < 2; half++) low_sums[r][half] = iadd(low_sums[r][half], high_sums[r][half]);
        add_sums(rows, low_sums, scales, whole + v * LANES);
    }
}

/* Decoded int16 times int16 inputs, for a tile of rows. */
INLINE void multiply_values(const int rows, const int form, const uint16_t *values, const uint32_t *inputs,
                            const int32_t *starts, const float *scales, float *whole) {
    for (int v = 0; v < PAIR_VECTORS; v++) {
        ivec sums[TILE_ROWS][2];
        for (int tile = 0; tile < BLOCK_TILES; tile++) {
            if (tile == 0 || form == FORM_UNITS)
                for (int r = 0; r < rows; r++) sums[r][0] = sums[r][1] = iset(starts[r]);
            for (int pair = 0; pair < PAIRS; pair++) {
                const int place = pair / 4 * 8 + pair % 4;
                const uint16_t *at = values + (tile * TILE + place) * PAIR_WORDS + v * 2 * LANES;
                ivec first = iload(at), second = iload(at + 4 * PAIR_WORDS);
                for (int r = 0; r < rows; r++) {
                    ivec x = ibroadcast(inputs + r * BLOCK_INPUTS + tile * PAIRS + pair);
                    sums[r][0] = dot2(sums[r][0], first, x);
                    sums[r][1] = dot2(sums[r][1], second, x);
                }
            }
            if (form == FORM_UNITS) add_sums(rows, sums, scales, whole + v * LANES);
        }
        if (form == FORM_SUMS) add_sums(rows, sums, scales, whole + v * LANES);
    }
}

INLINE void multiply_rows_as(const int form, int64_t rows, const uint16_t *values, const uint32_t *inputs,
                             const int32_t *starts, const float *scales, float *whole) {
    for (int64_t row = 0, count; row < rows; row += count) {
        const uint32_t *x = inputs + row * BLOCK_INPUTS;
        float *to = whole + row * BLOCK;
        count = rows - row >= TILE_ROWS ? TILE_ROWS : rows - row >= TILE_ROWS / 2 ? TILE_ROWS / 2 : 1;
        if (count == TILE_ROWS) multiply_values(TILE_ROWS, form, values, x, starts + row, scales + row, to);
        else if (count > 1) multiply_values(TILE_ROWS / 2, form, values, x, starts + row, scales + row, to);
        else multiply_values(1, form, values, x, starts + row, scales + row, to);
    }
}

static __attribute__((noinline)) void multiply_rows(int form, int64_t rows, const uint16_t *values,
                                                    const uint32_t *inputs, const int32_t *starts,
                                                    const float *scales, float *whole) {
    if (form == FORM_SUMS) multiply_rows_as(FORM_SUMS, rows, values, inputs, starts, scales, whole);
    else multiply_rows_as(FORM_UNITS, rows, values, inputs, starts, scales, whole);
}

/* Sums of 128 outputs, from the order of lanes [pair][half][tile][8]. */
static void store_sums(const IntegerJob *job, int64_t row, int64_t first, const float *whole) {
    float block[BLOCK];
    for (int pair = 0; pair < BLOCK_PAIRS; pair++)
        for (int part = 0; part < 4; part++) {
            float *to = block + pair * 2 * TILE + part % 2 * TILE + part / 2 * 8;
            for (int i = 0; i < 8; i++) to[i] = whole[pair * 2 * TILE + part * 8 + i] + job->shares[row];
        }
    store_block(job->call, row, first, block);
}

INLINE void block_of(const IntegerJob *job, int64_t block, const int bits) {
    const HadamardCall *call = job->call;
    const int64_t blocks = call->in_features / BLOCK, size = BLOCK_TILES * bits * PAIR_WORDS;
    _Alignas(64) uint16_t values[BLOCK_VALUES];
    _Alignas(64) uint8_t bytes[BLOCK_BYTES];
    _Alignas(64) float whole[ROWS_AT_ONCE][BLOCK];
    for (int64_t begin = 0; begin < call->rows; begin += ROWS_AT_ONCE) {
        const int64_t rows = call->rows - begin < ROWS_AT_ONCE ? call->rows - begin : ROWS_AT_ONCE;
        const uint16_t *codes = (const uint16_t *)call->codes + block * blocks * BLOCK_PAIRS * size;
        memset(whole, 0, (size_t)rows * sizeof whole[0]);
        for (int64_t number = 0; number < blocks; number++)
            for (int pair = 0; pair < BLOCK_PAIRS; pair++, codes += size) {
                const int64_t at = number * job->rows + begin;
                const uint32_t *inputs = job->inputs + at * BLOCK_INPUTS;
                const int32_t *starts = job->starts + at;
                const float *scales = job->scales + at;
                float *to = whole[0] + pair * 2 * TILE;
                if (job->form == FORM_BYTES) {
                    if (rows == 1) multiply_bytes(1, bits, codes, inputs, starts, scales, to);
                    else multiply_bytes(2, bits, codes, inputs, starts, scales, to);
                } else if (job->form == FORM_TILES) {
                    decode_bytes(bits, codes, bytes);
                    for (int64_t row = 0; row < rows; row += UNIT_ROWS)
                        multiply_tiles(rows - row < UNIT_ROWS ? rows - row : UNIT_ROWS, bytes,
                                       inputs + row * BLOCK_INPUTS, starts + row, scales + row, to + row * BLOCK);
                } else if (job->form == FORM_SUMS) {
                    decode_pair(FORM_SUMS, bits, codes, values);
                    multiply_rows(FORM_SUMS, rows, values, inputs, starts, scales, to);
                } else {
                    decode_units((int)call->codebook, bits, codes, values);
                    multiply_rows(FORM_UNITS, rows, values, inputs, starts, scales, to);
                }
            }
        for (int64_t row = 0; row < rows; row++) store_sums(job, begin + row, block * BLOCK, whole[row]);
    }
}

static void multiply_block(const IntegerJob *job, int64_t block) {
    switch (job->call->bits) { /* shifts of known bits are constants */
    case 1: block_of(job, block, 1); break;
    case 2: block_of(job, block, 2); break;
    case 3: block_of(job, block, 3); break;
    case 4: block_of(job, block, 4); break;
    case 5: block_of(job, block, 5); break;
    case 6: block_of(job, block, 6); break;
    case 7: block_of(job, block, 7); break;
    default: block_of(job, block, 8); break;
    }
}

static void multiply_blocks(void *argument) {
    IntegerJob *job = argument;
    if (job->form == FORM_TILES) begin_tiles();
    for (;;) {
        int64_t block = atomic_fetch_add(&job->next, 1);
        if (block >= job->call->out_features / BLOCK) break;
        multiply_block(job, block);
    }
    if (job->form == FORM_TILES) end_tiles();
}

/* 0, or 1 where memory ran out. */
int llmopt_trellis_integer(const HadamardCall *call) {
    IntegerJob job = {.call = call, .form = form_of(call)};
    job.rows = (call->rows + UNIT_ROWS - 1) / UNIT_ROWS * UNIT_ROWS;
    const int64_t numbers = job.rows * (call->in_features / BLOCK);
    job.inputs = (uint32_t *)workspace(0, numbers * (BLOCK_INPUTS + 2) * 4 + call->rows * 4);
    if (!job.inputs) return 1;
    job.scales = (float *)(job.inputs + numbers * BLOCK_INPUTS);
    job.starts = (int32_t *)(job.scales + numbers);
    job.shares = (float *)(job.starts + numbers);
    run_parallel(prepare_rows, &job, call->rows < 3 ? 1 : call->threads);
    atomic_store(&job.next, 0);
    run_parallel(multiply_blocks, &job, call->threads);
    return 0;
}
