/* Products of decoded bytes and a block of 128 inputs: int8 in dot products or matrix tiles, or floats. */
#ifndef LLMOPT_E8P_ROWS_H
#define LLMOPT_E8P_ROWS_H

#include "e8p_values.h"

#include "amx.h"

enum { FUSED_ROWS = 2 };                  /* up to here codes are decoded where they are multiplied */
enum { TILE_ROWS = LANES == 16 ? 8 : 4 }; /* whose sums stay in registers */
enum { FLOAT_ROWS = 4 };

/* Bytes [BLOCK_VECTORS][CODES] of a block of 128 inputs, or of its first groups. */
INLINE void decode_block(const int kind, int64_t groups, const uint8_t *tables, const uint8_t *codes, uint8_t *bytes) {
    for (int64_t group = 0; group < groups; group++, codes += code_bytes(kind))
        for (int v = 0; v < CODES; v += VECTOR_BYTES) {
            ivec values[CHANNELS];
            decode_codes(kind, tables, codes + v, values);
            for (int c = 0; c < CHANNELS; c++) istore(bytes + (group * CHANNELS + c) * CODES + v, values[c]);
        }
}

/* Codes times one or two rows of inputs [row][BLOCK]: sums [row][OUTPUTS], in any order, as they are exact. */
INLINE void multiply_codes(const int kind, const int rows, int64_t groups, const uint8_t *tables,
                           const uint8_t *codes, const int8_t *inputs, int32_t *sums) {
    for (int v = 0; v < CODES; v += VECTOR_BYTES) {
        ivec chains[FUSED_ROWS][4];
        for (int r = 0; r < rows; r++)
            for (int chain = 0; chain < 4; chain++) chains[r][chain] = iset(0);
        for (int64_t group = 0; group < groups; group++) {
            ivec values[CHANNELS];
            const uint8_t *at = codes + group * code_bytes(kind) + v;
            __builtin_prefetch(at + 2048), __builtin_prefetch(at + 2048 + CODES);
            decode_codes(kind, tables, at, values);
            for (int c = 0; c < CHANNELS; c++)
                for (int r = 0; r < rows; r++) {
                    ivec x = ibroadcast(inputs + r * BLOCK + group * GROUP + c * 4);
                    chains[r][c % 4] = dot4(chains[r][c % 4], values[c], x, 1);
                }
        }
        for (int r = 0; r < rows; r++)
            istore(sums + r * OUTPUTS + v / 4, iadd(iadd(chains[r][0], chains[r][1]), iadd(chains[r][2], chains[r][3])));
    }
}

/* The same with decoded bytes, for a tile of rows. */
INLINE void multiply_tile(const int rows, int64_t vectors, const uint8_t *bytes, const int8_t *inputs, int32_t *sums) {
    for (int v = 0; v < CODES; v += VECTOR_BYTES) {
        ivec tile[TILE_ROWS];
        for (int r = 0; r < rows; r++) tile[r] = iset(0);
        for (int64_t i = 0; i < vectors; i++) {
            const ivec values = iload(bytes + i * CODES + v);
            for (int r = 0; r < rows; r++) tile[r] = dot4(tile[r], values, ibroadcast(inputs + r * BLOCK + i * 4), 1);
        }
        for (int r = 0; r < rows; r++) istore(sums + r * OUTPUTS + v / 4, tile[r]);
    }
}

static __attribute__((noinline)) void multiply_rows(int64_t rows, int64_t vectors, const uint8_t *bytes,
                                                    const int8_t *inputs, int32_t *sums) {
    for (int64_t row = 0, count; row < rows; row += count) {
        count = rows - row < TILE_ROWS ? 1 : TILE_ROWS;
        if (count > 1) multiply_tile(TILE_ROWS, vectors, bytes, inputs + row * BLOCK, sums + row * OUTPUTS);
        else multiply_tile(1, vectors, bytes, inputs + row * BLOCK, sums + row * OUTPUTS);
    }
}

#if HAS_MATRIX_UNIT
/* The same by the matrix tiles of AMX, whole tiles of 16 rows: sixteen vectors are an operand as they lie. */
static __attribute__((noinline)) void multiply_units(int64_t rows, const uint8_t *bytes, const int8_t *inputs,
                                                     int32_t *sums) {
    FINISH_STORES(bytes);
    _tile_loadd(2, bytes, CODES);
    _tile_loadd(3, bytes + UNIT_ROWS * CODES, CODES);
    for (int64_t row = 0; row < rows; row += UNIT_ROWS) {
        _tile_zero(0);
        _tile_loadd(4, inputs + row * BLOCK, BLOCK);
        _tile_dpbsud(0, 4, 2);
        _tile_loadd(5, inputs + row * BLOCK + UNIT_BYTES, BLOCK);
        _tile_dpbsud(0, 5, 3);
        _tile_stored(0, sums + row * OUTPUTS, OUTPUTS * sizeof *sums);
    }
}
#else
static inline void multiply_units(int64_t rows, const uint8_t *bytes, const int8_t *inputs, int32_t *sums) {
    (void)rows, (void)bytes, (void)inputs, (void)sums;
}
#endif

/* Weights [BLOCK][OUTPUTS] of decoded bytes, which are those less `zero`, times `unit`; added to those before. */
INLINE void widen(int64_t vectors, const uint8_t *bytes, float zero, float unit, int is_first, float *weights) {
    for (int64_t i = 0; i < vectors; i++)
        for (int v = 0; v < CODES; v += VECTOR_BYTES) {
            const ivec four = iload(bytes + i * CODES + v), byte = iset(255);
            const ivec each[] = {iand(four, byte), iand(ISHR(four, 8), byte), iand(ISHR(four, 16), byte), ISHR(four, 24)};
            for (int g = 0; g < 4; g++) {
                float *to = weights + (i * 4 + g) * OUTPUTS + v / 4;
                const fvec value = fsub(itof(each[g]), fset(zero));
                fstore(to, is_first ? value : ffma(value, fset(unit), fload(to)));
            }
        }
}

/* Adds the products of weights [count][OUTPUTS] and some rows of inputs [row][stride] to sums [row][to_stride]. */
INLINE void multiply_floats(const int rows, int64_t count, const float *weights, const float *inputs, int64_t stride,
                            float *sums, int64_t to_stride) {
    for (int v = 0; v < OUTPUTS; v += LANES) {
        fvec tile[FLOAT_ROWS];
        for (int r = 0; r < rows; r++) tile[r] = fload(sums + r * to_stride + v);
        for (int64_t i = 0; i < count; i++) {
            const fvec weight = fload(weights + i * OUTPUTS + v);
            for (int r = 0; r < rows; r++) tile[r] = ffma(weight, fset(inputs[r * stride + i]), tile[r]);
        }
        for (int r = 0; r < rows; r++) fstore(sums + r * to_stride + v, tile[r]);
    }
}

#endif
