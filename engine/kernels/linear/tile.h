/* GEMM micro-kernels: a tile of rows times a block of a panel, accumulated in registers, scaled per step. */
#ifndef LLMOPT_TILE_H
#define LLMOPT_TILE_H

#include <string.h>

#include "weight.h"

#define MAX_BLOCK_STEPS (MAX_BLOCK / 16)
#define AHEAD 512 /* prefetch distance of the codes, in input channels */
#define IN_L2 2 /* locality of a prefetch */

/* A block of a panel, unpacked for the micro-kernel. */
typedef struct {
    const uint8_t *weights;
    int64_t channels, step, steps;        /* steps: of the whole row, the stride of sums */
    const uint8_t *ahead;                 /* packed codes of a later block, to be prefetched */
    int64_t ahead_rate;                   /* bytes of them that a tile prefetches per input channel */
    int narrow, has_offsets;
    int in_nibbles;                       /* 4-bit codes as they are packed, two quads in one */
    int from;                             /* FROM_...: of floats, what the weights are */
    float scales[MAX_BLOCK_STEPS][PANEL], offsets[MAX_BLOCK_STEPS][PANEL];
} Block;

/* Prefetches packed codes of a later block from `channel` on, two cache lines at most; into L2, since L1's
 * few line-fill buffers would each wait for memory. */
INLINE void fetch_ahead(const Block *b, const uint8_t *ahead, int64_t channel) {
    __builtin_prefetch(ahead + channel * b->ahead_rate, 0, IN_L2);
    __builtin_prefetch(ahead + channel * b->ahead_rate + 64, 0, IN_L2);
}

/* Integer micro-kernel; `sums` and `input_scales` are those of the first step, [rows][b->steps]. */
INLINE void tile_s8(const int rows, const Block *b, const int narrow, const int has_offsets,
                    const int in_nibbles, const int8_t *x, int64_t stride, const uint8_t *sums,
                    const float *input_scales, float *acc, const uint8_t *ahead) {
    const int quads = in_nibbles ? 2 : 1; /* in a register of weights */
    int64_t step = b->step;
    fvec whole[MAX_ROWS][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++) whole[r][v] = fload(acc + r * PANEL + v * LANES);
    for (int64_t s = 0, k = 0; k < b->channels; s++, k += step) {
        ivec part[MAX_ROWS][VECTORS];
        for (int r = 0; r < rows; r++) {
            ivec start = has_offsets ? iset(0) : ibroadcast(sums + (r * b->steps + s) * 4);
            for (int v = 0; v < VECTORS; v++) part[r][v] = start;
        }
        int64_t end = b->channels - k < step ? b->channels : k + step;
        for (int64_t q = k; q < end; q += 4 * quads) {
            ivec weights[VECTORS];
            fetch_ahead(b, ahead, q);
            for (int v = 0; v < VECTORS; v++)
                weights[v] = iload(b->weights + q / quads * PANEL + v * LANES * 4);
            for (int quad = 0; quad < quads; quad++)
                for (int v = 0; v < VECTORS; v++) {
                    ivec codes = weights[v];
                    if (in_nibbles) codes = iand(ISHR(codes, 4 * quad), iset(0x0f0f0f0f));
                    for (int r = 0; r < rows; r++) {
                        ivec inputs = ibroadcast(x + r * stride + q + 4 * quad);
                        part[r][v] = dot4(part[r][v], codes, inputs, narrow);
                    }
                }
        }
        for (int v = 0; v < VECTORS; v++) {
            fvec scales = fload(b->scales[s] + v * LANES), offsets = fset(0.0f);
            if (has_offsets) offsets = fload(b->offsets[s] + v * LANES);
            for (int r = 0; r < rows; r++) {
                fvec scale = fmul(scales, fset(input_scales[r * b->steps + s]));
                whole[r][v] = ffma(itof(part[r][v]), scale, whole[r][v]);
                if (has_offsets)
                    whole[r][v] =
                        ffnma(offsets, fbits(ibroadcast(sums + (r * b->steps + s) * 4)), whole[r][v]);
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++) fstore(acc + r * PANEL + v * LANES, whole[r][v]);
}

#if defined(__AVX512F__)
#define FLOAT_ROWS 6
#define CHAINS 2 /* accumulators for even and odd channels: hides the latency of the FMA chain */
#else
#define FLOAT_ROWS 3
#define CHAINS 1
#endif

/* What the float micro-kernel multiplies: float32 weights and inputs; pairs of bfloat16; or float32 inputs with
 * 16-bit weights, which it widens: as they are packed, for as few rows as a tile has. */
enum { FROM_F32, FROM_PAIRS, FROM_BF16, FROM_F16 };

INLINE void tile_float(const int rows, const Block *b, const int from, const uint8_t *x, int64_t stride,
                       const float *sums, float *acc, const uint8_t *ahead) {
    int64_t step = b->step;
    const int width = from == FROM_PAIRS ? 2 : 1; /* input channels in a lane */
    const int bytes = from == FROM_BF16 || from == FROM_F16 ? 2 : 4; /* of a weight, or a pair */
    for (int64_t s = 0, k = 0; k < b->channels; s++, k += step) {
        fvec part[FLOAT_ROWS][VECTORS][CHAINS];
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < VECTORS; v++)
                for (int c = 0; c < CHAINS; c++) part[r][v][c] = fset(0.0f);
        int64_t end = b->channels - k < step ? b->channels : k + step;
        for (int64_t q = k / width; q < end / width; q += CHAINS) {
            fetch_ahead(b, ahead, q * width);
            for (int c = 0; c < CHAINS; c++) {
                const uint8_t *at = b->weights + (q + c) * PANEL * bytes;
                ivec inputs[FLOAT_ROWS];
                for (int r = 0; r < rows; r++) inputs[r] = ibroadcast(x + r * stride + (q + c) * 4);
                for (int v = 0; v < VECTORS; v++) {
                    const uint8_t *some = at + v * LANES * bytes;
                    ivec weights;
                    if (bytes == 4) weights = iload(some);
                    else weights = ibits(fload_half(from == FROM_BF16, (const uint16_t *)some));
                    for (int r = 0; r < rows; r++) {
                        fvec *sum = &part[r][v][c];
                        *sum = multiply_add(*sum, weights, inputs[r], from == FROM_PAIRS);
                    }
                }
            }
        }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < VECTORS; v++) {
                float *to = acc + r * PANEL + v * LANES;
                fvec whole = part[r][v][0];
                for (int c = 1; c < CHAINS; c++) whole = fadd(whole, part[r][v][c]);
                fvec sum = ffma(whole, fload(b->scales[s] + v * LANES), fload(to));
                if (b->has_offsets)
                    sum = ffnma(fload(b->offsets[s] + v * LANES), fset(sums[r * b->steps + s]), sum);
                fstore(to, sum);
            }
    }
}

#endif
