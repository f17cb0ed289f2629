/* GEMM micro-kernel of FEAT_I8MM for several rows: USMMLA multiplies 2 x 8 weights by 8 x 2 inputs.
 *
 * Two quads of a panel, interleaved, are pairs of output channels with eight input channels each; so the
 * packed weights serve as they are. Sums are scaled in the order of `tile_s8`: results are bit-identical. */
#ifndef LLMOPT_MATRIX_TILE_H
#define LLMOPT_MATRIX_TILE_H

#include "tile.h"

#define MATRIX_ROWS 8

#if HAS_MATRIX_TILES
#define ROW_PAIRS (MATRIX_ROWS / 2)

/* Codes of eight input channels of eight output channels, two output channels in a register. */
INLINE void interleave(const int in_nibbles, const uint8_t *at, uint8x16_t pairs[4]) {
    ivec first = iload(at), second;
    if (in_nibbles) {
        second = iand(ISHR(first, 4), iset(0x0f0f0f0f));
        first = iand(first, iset(0x0f0f0f0f));
    } else {
        second = iload(at + QUAD_BYTES);
    }
    pairs[0] = vreinterpretq_u8_u32(vzip1q_u32(first.a, second.a));
    pairs[1] = vreinterpretq_u8_u32(vzip2q_u32(first.a, second.a));
    pairs[2] = vreinterpretq_u8_u32(vzip1q_u32(first.b, second.b));
    pairs[3] = vreinterpretq_u8_u32(vzip2q_u32(first.b, second.b));
}

/* Adds the scaled sums of a step to the accumulators of one row and eight output channels. */
INLINE void scale_step(const Block *b, int64_t s, int v, const int has_offsets, ivec part, const uint8_t *sum,
                       float input_scale, float *acc) {
    fvec whole = fload(acc);
    if (!has_offsets) part = iadd(part, ibroadcast(sum));
    whole = ffma(itof(part), fmul(fload(b->scales[s] + v * LANES), fset(input_scale)), whole);
    if (has_offsets) whole = ffnma(fload(b->offsets[s] + v * LANES), fbits(ibroadcast(sum)), whole);
    fstore(acc, whole);
}

/* `pairs` pairs of rows; the last pair of an odd number of rows is the last row twice. `sums` and
 * `input_scales` are those of the first step, [rows][b->steps]. */
INLINE void tile_matrix(const int pairs, int rows, const Block *b, const int has_offsets, const int in_nibbles,
                        const int8_t *x, int64_t stride, const uint8_t *sums, const float *input_scales,
                        float *acc, const uint8_t *ahead) {
    const int64_t bytes = in_nibbles ? QUAD_BYTES : 2 * QUAD_BYTES; /* of eight input channels */
    for (int64_t s = 0, k = 0; k < b->channels; s++, k += b->step) {
        int64_t end = b->channels - k < b->step ? b->channels : k + b->step;
        for (int v = 0; v < VECTORS; v++) {
            int32x4_t part[ROW_PAIRS][4]; /* two output channels of two rows */
            for (int p = 0; p < pairs; p++)
                for (int c = 0; c < 4; c++) part[p][c] = vdupq_n_s32(0);
            for (int64_t q = k; q < end; q += 8) {
                uint8x16_t weights[4];
                if (v == 0) fetch_ahead(b, ahead, q);
                interleave(in_nibbles, b->weights + q / 8 * bytes + v * LANES * 4, weights);
                for (int p = 0; p < pairs; p++) {
                    const int8_t *first = x + 2 * p * stride + q;
                    const int8_t *second = 2 * p + 1 < rows ? first + stride : first;
                    int8x16_t inputs = vcombine_s8(vld1_s8(first), vld1_s8(second));
                    for (int c = 0; c < 4; c++) part[p][c] = vusmmlaq_s32(part[p][c], weights[c], inputs);
                }
            }
            for (int p = 0; p < pairs; p++) {
                int64_t at = 2 * p * b->steps + s, next = at + b->steps;
                float *to = acc + 2 * p * PANEL + v * LANES;
                ivec even = {U32(vuzp1q_s32(part[p][0], part[p][1])), U32(vuzp1q_s32(part[p][2], part[p][3]))};
                ivec odd = {U32(vuzp2q_s32(part[p][0], part[p][1])), U32(vuzp2q_s32(part[p][2], part[p][3]))};
                scale_step(b, s, v, has_offsets, even, sums + at * 4, input_scales[at], to);
                if (2 * p + 1 == rows) continue;
                scale_step(b, s, v, has_offsets, odd, sums + next * 4, input_scales[next], to + PANEL);
            }
        }
    }
}

INLINE void matrix_tile_as(int rows, const Block *b, const int has_offsets, const int in_nibbles, const int8_t *x,
                           int64_t stride, const uint8_t *sums, const float *input_scales, float *acc,
                           const uint8_t *ahead) {
#define PAIRS(n) tile_matrix(n, rows, b, has_offsets, in_nibbles, x, stride, sums, input_scales, acc, ahead)
    switch ((rows + 1) / 2) {
    case 4: PAIRS(4); break;
    case 3: PAIRS(3); break;
    case 2: PAIRS(2); break;
    default: PAIRS(1); break;
    }
#undef PAIRS
}

static void matrix_tile(int rows, const Block *b, const int8_t *x, int64_t stride, const uint8_t *sums,
                        const float *input_scales, float *acc, const uint8_t *ahead) {
#define TILE_AS(offsets, nibbles) \
    matrix_tile_as(rows, b, offsets, nibbles, x, stride, sums, input_scales, acc, ahead)
    if (b->in_nibbles && b->has_offsets) TILE_AS(1, 1);
    else if (b->in_nibbles) TILE_AS(0, 1);
    else if (b->has_offsets) TILE_AS(1, 0);
    else TILE_AS(0, 0);
#undef TILE_AS
}
#else
static inline void matrix_tile(int rows, const Block *b, const int8_t *x, int64_t stride, const uint8_t *sums,
                               const float *input_scales, float *acc, const uint8_t *ahead) {
    (void)rows, (void)b, (void)x, (void)stride, (void)sums, (void)input_scales, (void)acc, (void)ahead;
}
#endif

#endif
