/* GEMV micro-kernels: one row times a panel.
 *
 * A single row waits for memory. An int8 row reads the scale of each chunk of integer codes beside them, without
 * a block of scales first, which keeps more reads in flight; a row of floats dequantizes codes in registers. Sums
 * are taken and scaled in the order of `tile_s8` and `tile_float`: results are bit-identical. */
#ifndef LLMOPT_ROW_TILE_H
#define LLMOPT_ROW_TILE_H

#include "tile.h"
#include "unpack.h"

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

static inline int takes_float_row(const Weight *w) {
    return w->kind == CODES_INTEGER || w->kind == CODES_TABLE || w->kind == CODES_FP8;
}

/* What codes are dequantized with. */
typedef struct {
    fvec base;
    ftable table;
#if HAS_PAIRS
    htable sixteen;
#endif
} Dequantizer;

static inline Dequantizer dequantizer(const Weight *w, const int pairs) {
    Dequantizer d = {.base = fset((float)w->base)};
    if (w->kind == CODES_TABLE) d.table = table_load(w->table);
#if HAS_PAIRS
    if (pairs && w->bits == 4) d.sixteen = sixteen_values(w);
#else
    (void)pairs;
#endif
    return d;
}

/* The weights of term `i` of a word of codes, in the order of the unpacked ones. */
INLINE ivec term(const int pairs, const int bits, const int kind, const int i, ivec word, const Dequantizer *d) {
    const int mask = bits == 4 ? 15 : 255;
#if HAS_PAIRS
    if (pairs && bits == 4) return halves_look(d->sixteen, ISHR(word, i % 2 * 8 + i / 2 * 4));
    if (pairs) {
        fvec low = code_to_float(kind, mask, ISHR(word, i * 8), d->base, d->table);
        fvec high = code_to_float(kind, mask, ISHR(word, i * 8 + 16), d->base, d->table);
        return ior(ISHR(ibits(low), 16), iand(ibits(high), iset((int32_t)0xffff0000)));
    }
#endif
    return ibits(code_to_float(kind, mask, ISHR(word, i % 4 * 8 + i / 4 * 4), d->base, d->table));
}

/* `pairs`: of bfloat16, as prepared; else float32. `bits` 4 or 8: read as they are packed; 0: any other, unpacked
 * to bytes. `kind` is the weight's; `sums` are those of the row's steps; `acc` is [PANEL]. */
INLINE void float_row_tile(const int pairs, const int bits, const int kind, const Weight *w, int64_t panel,
                           const uint8_t *x, const float *sums, float *acc) {
    const int each = bits == 4 ? 8 : 4, terms = pairs ? each / 2 : each; /* input channels in a word of codes */
    const int64_t size = bits ? bits * PANEL * CHUNK / 8 : chunk_bytes(w), chunks = num_chunks(w);
    const uint8_t *packed = w->codes + panel * chunks * size;
    const Dequantizer d = dequantizer(w, pairs);
    _Alignas(64) uint8_t bytes[CHUNK * PANEL];
    float scales[PANEL], offsets[PANEL];
    fvec whole[VECTORS], part[VECTORS][CHAINS];
    for (int v = 0; v < VECTORS; v++) whole[v] = fset(0.0f);
    for (int64_t c = 0, left = 0, s = 0; c < chunks; c++, packed += size) {
        const uint8_t *from = bits ? packed : codes_as_bytes(w, packed, 1, bytes);
        for (int k = 0; k < CHUNK; k += each, from += QUAD_BYTES, x += 4 * terms) {
            if (left == 0) {
                left = w->step;
                for (int v = 0; v < VECTORS; v++)
                    for (int chain = 0; chain < CHAINS; chain++) part[v][chain] = fset(0.0f);
            }
            const uint8_t *ahead = packed + AHEAD / CHUNK * size + k * size / CHUNK;
            __builtin_prefetch(ahead, 0, IN_L2);
            __builtin_prefetch(ahead + 64, 0, IN_L2);
            ivec words[VECTORS];
            for (int v = 0; v < VECTORS; v++) words[v] = iload(from + v * LANES * 4);
            for (int i = 0; i < terms; i++) {
                const ivec input = ibroadcast(x + 4 * i);
                for (int v = 0; v < VECTORS; v++) {
                    fvec *sum = &part[v][i % CHAINS];
                    *sum = multiply_add(*sum, term(pairs, bits, kind, i, words[v], &d), input, pairs);
                }
            }
            if ((left -= each) > 0 && (c + 1 < chunks || k + each < CHUNK)) continue;
            left = 0;
            int64_t group = s * w->step / w->group;
            if (group >= num_groups(w)) group = num_groups(w) - 1;
            group_scales(w, panel, group, w->base, scales, offsets);
            for (int v = 0; v < VECTORS; v++) {
                fvec sum = part[v][0];
                for (int chain = 1; chain < CHAINS; chain++) sum = fadd(sum, part[v][chain]);
                whole[v] = ffma(sum, fload(scales + v * LANES), whole[v]);
                if (has_own_offsets(w)) whole[v] = ffnma(fload(offsets + v * LANES), fset(sums[s]), whole[v]);
            }
            s++;
        }
    }
    for (int v = 0; v < VECTORS; v++) fstore(acc + v * LANES, whole[v]);
}

#endif
