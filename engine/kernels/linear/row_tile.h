/* GEMV micro-kernel: one int8 row times a panel of integer codes that has a scale per chunk.
 *
 * A single row waits for memory. Scales that are read beside their codes, without a block of them first, keep
 * more reads in flight. Sums are scaled in the order of `tile_s8`: results are bit-identical. */
#ifndef LLMOPT_ROW_TILE_H
#define LLMOPT_ROW_TILE_H

#include "tile.h"

static inline int takes_row_tile(const Weight *w) {
    return w->kind == CODES_INTEGER && w->group == CHUNK && w->step == CHUNK;
}

/* `bits` 4 or 8: multiplied as they are packed; 0: any but 8, unpacked to bytes. `plain`: float16 scales and no
 * offsets. `sums` and `input_scales` are the row's, [chunks]; `acc` is [PANEL]. */
INLINE void row_tile(const int bits, const int plain, const Weight *w, int64_t panel, const int8_t *x,
                     const uint8_t *sums, const float *input_scales, float *acc) {
    const int64_t chunks = num_chunks(w), size = bits ? bits * PANEL * CHUNK / 8 : chunk_bytes(w);
    const int has_offsets = !plain && has_own_offsets(w);
    const int narrow = NARROW_IS_FASTER && bits != 8 && w->bits <= 6;
    const int quads = bits == 4 ? 2 : 1; /* in a register of codes */
    const uint8_t *codes = w->codes + panel * chunks * size;
    const uint16_t *halves = (const uint16_t *)w->scales + panel * chunks * PANEL;
    _Alignas(64) uint8_t bytes[CHUNK * PANEL];
    float scales[PANEL], offsets[PANEL] = {0};
    fvec whole[VECTORS];
    for (int v = 0; v < VECTORS; v++) whole[v] = fset(0.0f);
    for (int64_t c = 0; c < chunks; c++) {
        const uint8_t *from = codes;
        ivec part[VECTORS];
        for (int v = 0; v < VECTORS; v++) part[v] = has_offsets ? iset(0) : ibroadcast(sums + 4 * c);
        /* As many scales ahead as input channels: PANEL is CHUNK. */
        if (plain) __builtin_prefetch(halves + AHEAD, 0, IN_L2);
        else group_scales(w, panel, c, 0, scales, offsets);
        if (!bits) {
            chunk_to_bytes(w->bits, codes, bytes);
            from = bytes;
        }
        for (int quad = 0; quad < QUADS; quad += quads) {
            const uint8_t *ahead = codes + AHEAD / CHUNK * size + quad * size / QUADS;
            __builtin_prefetch(ahead, 0, IN_L2);
            __builtin_prefetch(ahead + 64, 0, IN_L2);
            for (int v = 0; v < VECTORS; v++) {
                ivec some = iload(from + quad / quads * QUAD_BYTES + v * LANES * 4);
                for (int i = 0; i < quads; i++) {
                    ivec each = bits == 4 ? iand(ISHR(some, 4 * i), iset(0x0f0f0f0f)) : some;
                    part[v] = dot4(part[v], each, ibroadcast(x + 4 * (quad + i)), narrow);
                }
            }
        }
        for (int v = 0; v < VECTORS; v++) {
            fvec own = plain ? fload_f16(halves + v * LANES) : fload(scales + v * LANES);
            whole[v] = ffma(itof(part[v]), fmul(own, fset(input_scales[c])), whole[v]);
            if (has_offsets)
                whole[v] = ffnma(fload(offsets + v * LANES), fbits(ibroadcast(sums + 4 * c)), whole[v]);
        }
        codes += size, halves += PANEL, x += CHUNK;
    }
    for (int v = 0; v < VECTORS; v++) fstore(acc + v * LANES, whole[v]);
}

#endif
