/* GEMM micro-kernel of AMX: 32 rows times a panel, 64 input channels at a time.
 *
 * Sixteen quads of 16 output channels are an operand tile as they are packed. Sums are scaled in the order of
 * `tile_s8`: results are bit-identical. */
#ifndef LLMOPT_AMX_TILE_H
#define LLMOPT_AMX_TILE_H

#include "tile.h"

#include "amx.h"

enum { PAIR_ROWS = 2 * UNIT_ROWS };

/* Whether the steps of a weight are whole tiles, and this processor and the system have these. */
static inline int fits_matrix_unit(const Weight *w) {
    return w->step % UNIT_BYTES == 0 && num_chunks(w) * CHUNK % UNIT_BYTES == 0 && has_matrix_unit();
}

#if HAS_MATRIX_UNIT
/* Products of one or two tiles of rows, `apart` rows apart, with a step of a panel; sums are [row][PANEL]. */
INLINE void multiply_step(const int two, const int8_t *x, int64_t stride, int64_t apart, const uint8_t *weights,
                          int64_t channels, int32_t *sums, const uint8_t *ahead, int64_t ahead_rate) {
    _tile_zero(0);
    _tile_zero(1);
    if (two) {
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < channels; k += UNIT_BYTES) {
        const uint8_t *later = ahead + k * ahead_rate;
        for (int64_t at = 0; at < UNIT_BYTES * ahead_rate; at += 64) __builtin_prefetch(later + at);
        _tile_loadd(4, x + k, stride);
        _tile_loadd(6, weights + k * PANEL, QUAD_BYTES);
        _tile_dpbsud(0, 4, 6);
        _tile_loadd(7, weights + k * PANEL + UNIT_BYTES, QUAD_BYTES);
        _tile_dpbsud(1, 4, 7);
        if (!two) continue;
        _tile_loadd(5, x + apart * stride + k, stride);
        _tile_dpbsud(2, 5, 6);
        _tile_dpbsud(3, 5, 7);
    }
    _tile_stored(0, sums, PANEL * 4);
    _tile_stored(1, sums + 16, PANEL * 4);
    if (!two) return;
    _tile_stored(2, sums + apart * PANEL, PANEL * 4);
    _tile_stored(3, sums + apart * PANEL + 16, PANEL * 4);
}

/* Adds the scaled sums of a step to the accumulators. */
INLINE void scale_rows(int64_t rows, const Block *b, int64_t s, const int has_offsets, const int32_t *parts,
                       const uint8_t *sums, const float *input_scales, float *acc) {
    fvec scales[VECTORS], offsets[VECTORS];
    for (int v = 0; v < VECTORS; v++) {
        scales[v] = fload(b->scales[s] + v * LANES);
        if (has_offsets) offsets[v] = fload(b->offsets[s] + v * LANES);
    }
    for (int64_t r = 0; r < rows; r++) {
        const ivec sum = ibroadcast(sums + (r * b->steps + s) * 4);
        const fvec input_scale = fset(input_scales[r * b->steps + s]);
        for (int v = 0; v < VECTORS; v++) {
            float *to = acc + r * PANEL + v * LANES;
            ivec part = iload(parts + r * PANEL + v * LANES);
            if (!has_offsets) part = iadd(part, sum);
            fvec whole = ffma(itof(part), fmul(scales[v], input_scale), fload(to));
            if (has_offsets) whole = ffnma(offsets[v], fbits(sum), whole);
            fstore(to, whole);
        }
    }
}

/* At least UNIT_ROWS rows times a block. A last tile that is not whole begins earlier, at rows that are there:
 * their sums are not added again. */
static __attribute__((noinline)) void amx_tiles(int64_t rows, const Block *b, const int8_t *x, int64_t stride,
                                                const uint8_t *sums, const float *input_scales, float *acc) {
    _Alignas(64) int32_t parts[PAIR_ROWS * PANEL];
    const uint8_t *ahead = b->ahead;
    FINISH_STORES(b->weights);
    for (int64_t r = 0; r < rows; r += PAIR_ROWS) {
        const int64_t left = rows - r, count = left < PAIR_ROWS ? left : PAIR_ROWS, two = count > UNIT_ROWS;
        const int64_t first = two || left == UNIT_ROWS ? r : rows - UNIT_ROWS, skipped = r - first;
        for (int64_t s = 0, k = 0; k < b->channels; s++, k += b->step) {
            const int64_t channels = b->channels - k < b->step ? b->channels - k : b->step;
            const int8_t *from = x + first * stride + k;
            const uint8_t *weights = b->weights + k * PANEL, *later = ahead + k * b->ahead_rate;
            const int64_t apart = two ? count - UNIT_ROWS : 0;
            if (two) multiply_step(1, from, stride, apart, weights, channels, parts, later, b->ahead_rate);
            else multiply_step(0, from, stride, apart, weights, channels, parts, later, b->ahead_rate);
            const int32_t *own = parts + skipped * PANEL;
            const uint8_t *own_sums = sums + r * b->steps * 4;
            const float *scales = input_scales + r * b->steps;
            if (b->has_offsets) scale_rows(count, b, s, 1, own, own_sums, scales, acc + r * PANEL);
            else scale_rows(count, b, s, 0, own, own_sums, scales, acc + r * PANEL);
        }
        ahead += b->channels * b->ahead_rate;
    }
}
#else
static inline void amx_tiles(int64_t rows, const Block *b, const int8_t *x, int64_t stride, const uint8_t *sums,
                             const float *input_scales, float *acc) {
    (void)rows, (void)b, (void)x, (void)stride, (void)sums, (void)input_scales, (void)acc;
}
#endif

#endif
