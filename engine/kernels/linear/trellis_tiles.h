/* GEMM of mul1's product bytes by the matrix tiles of AMX: 16 rows times 32 outputs.
 *
 * A vector of product words is a row of an operand tile as it is: four bytes for each of 16 outputs, to be
 * multiplied with two copies each of two inputs. The low words of 32 inputs make a tile, and their high words. */
#ifndef LLMOPT_TRELLIS_TILES_H
#define LLMOPT_TRELLIS_TILES_H

#include "trellis_values.h"

#include "amx.h"

enum { TILE_BYTES = 1024, BLOCK_BYTES = 4 * 2 * 2 * TILE_BYTES }; /* [two tiles][low or high][half] */

#if HAS_MATRIX_UNIT
/* The product bytes of 128 inputs and 32 outputs as operand tiles. */
INLINE void decode_bytes(const int bits, const uint16_t *codes, uint8_t *bytes) {
    for (int tile = 0; tile < BLOCK_TILES; tile++) {
        ivec now[MAX_BITS];
        load_spans(bits, codes + tile * bits * PAIR_WORDS, now);
        ivec before = wrotate(now[bits - 1]);
        uint8_t *to = bytes + tile / 2 * 4 * TILE_BYTES + tile % 2 * PAIRS * 64;
#pragma GCC unroll 16
        for (int place = 0; place < TILE; place++) {
            const int pair = place / 8 * 4 + place % 4, half = place % 8 / 4;
            ivec low, high;
            product_words(states_at(place, bits, now, before), &low, &high);
            istore(to + half * TILE_BYTES + pair * 64, low);
            istore(to + (2 + half) * TILE_BYTES + pair * 64, high);
        }
    }
}

/* Adds 16 rows (of which `rows` are some) to `whole` [row][BLOCK]. `inputs` are bytes [row][BLOCK / 2]. */
static __attribute__((noinline)) void multiply_tiles(int64_t rows, const uint8_t *bytes, const uint32_t *inputs,
                                                     const int32_t *starts, const float *scales, float *whole) {
    _Alignas(64) int32_t sums[2][UNIT_ROWS][16];
    _tile_zero(0);
    _tile_zero(1);
    for (int two = 0; two < BLOCK_TILES / 2; two++) {
        _tile_loadd(2, inputs + two * 2 * PAIRS, BLOCK / 2 * 4);
        for (int part = 0; part < 2; part++) {
            const uint8_t *at = bytes + (two * 2 + part) * 2 * TILE_BYTES;
            _tile_loadd(3, at, 64);
            _tile_dpbsud(0, 2, 3);
            _tile_loadd(4, at + TILE_BYTES, 64);
            _tile_dpbsud(1, 2, 4);
        }
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    for (int64_t r = 0; r < rows; r++)
        for (int half = 0; half < 2; half++) {
            float *to = whole + r * BLOCK + half * 16;
            ivec sum = iadd(iload(sums[half][r]), iset(starts[r]));
            fstore(to, ffma(itof(sum), fset(scales[r]), fload(to)));
        }
}
#else
INLINE void decode_bytes(const int bits, const uint16_t *codes, uint8_t *bytes) {
    (void)bits, (void)codes, (void)bytes;
}
static inline void multiply_tiles(int64_t rows, const uint8_t *bytes, const uint32_t *inputs, const int32_t *starts,
                                  const float *scales, float *whole) {
    (void)rows, (void)bytes, (void)inputs, (void)starts, (void)scales, (void)whole;
}
#endif

#endif
