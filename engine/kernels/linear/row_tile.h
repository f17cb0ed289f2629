/* GEMV micro-kernel: one int8 row times a panel of 4-bit codes that has a float16 scale per chunk (Q4_0).
 *
 * A single row waits for memory. Scales that are read beside their codes, without a block of them first, keep
 * more reads in flight. Sums are scaled in the order of `tile_s8`: results are bit-identical. */
#ifndef LLMOPT_ROW_TILE_H
#define LLMOPT_ROW_TILE_H

#include "tile.h"

static inline int takes_row_tile(const Weight *w) {
    return w->kind == CODES_INTEGER && w->bits == 4 && w->group == CHUNK && w->step == CHUNK &&
           w->scale_kind == SCALE_F16 && w->offset_kind == OFFSET_BASE;
}

/* `sums` and `input_scales` are the row's, [chunks]; `acc` is [PANEL]. */
static void row_tile(const Weight *w, int64_t panel, const int8_t *x, const int32_t *sums,
                     const float *input_scales, float *acc) {
    const int64_t chunks = num_chunks(w), size = CHUNK * PANEL / 2;
    const uint8_t *codes = w->codes + panel * chunks * size;
    const uint16_t *scales = (const uint16_t *)w->scales + panel * chunks * PANEL;
    const ivec nibble = iset(0x0f0f0f0f);
    fvec whole[VECTORS];
    for (int v = 0; v < VECTORS; v++) whole[v] = fset(0.0f);
    for (int64_t c = 0; c < chunks; c++) {
        ivec part[VECTORS];
        for (int v = 0; v < VECTORS; v++) part[v] = iset(sums[c]);
        __builtin_prefetch(scales + AHEAD, 0, IN_L2); /* as many as input channels: PANEL is CHUNK */
        for (int two = 0; two < QUADS / 2; two++) {
            const uint8_t *ahead = codes + AHEAD * PANEL / 2 + two * QUAD_BYTES;
            __builtin_prefetch(ahead, 0, IN_L2);
            __builtin_prefetch(ahead + 64, 0, IN_L2);
            ivec low = ibroadcast(x + 8 * two), high = ibroadcast(x + 8 * two + 4);
            for (int v = 0; v < VECTORS; v++) {
                ivec both = iload(codes + two * QUAD_BYTES + v * LANES * 4);
                part[v] = dot4(part[v], iand(both, nibble), low, NARROW_IS_FASTER);
                part[v] = dot4(part[v], iand(ISHR(both, 4), nibble), high, NARROW_IS_FASTER);
            }
        }
        for (int v = 0; v < VECTORS; v++) {
            fvec scale = fmul(fload_f16(scales + v * LANES), fset(input_scales[c]));
            whole[v] = ffma(itof(part[v]), scale, whole[v]);
        }
        codes += size, scales += PANEL, x += CHUNK;
    }
    for (int v = 0; v < VECTORS; v++) fstore(acc + v * LANES, whole[v]);
}

#endif
