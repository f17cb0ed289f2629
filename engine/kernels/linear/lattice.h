/* Lattice codes: points of 4 or 8 weights from a codebook, with the signs of their weights (ggml's IQ1 to IQ3).
 *
 * A chunk of a panel is: the low byte of every point's index, [CHUNK / dim][PANEL]; the indices' higher bits,
 * those of several points in a byte, [..][PANEL]; and the signs, a byte for eight weights, [4][PANEL]. It is
 * unpacked to bytes of 128 + weight, so that 8-bit weights with the zero point 128 are what follows. */
#ifndef LLMOPT_LATTICE_H
#define LLMOPT_LATTICE_H

#include "vectors.h"

typedef struct {
    const int32_t *points; /* [..][dim / 4], four weights in a word: their magnitudes if there are signs */
    int64_t dim;           /* weights in a point, 4 or 8 */
    int64_t high_bits;     /* of an index, above its low byte: 0, 1, 2 or 4 */
    int64_t has_signs;
} Lattice;

static inline int64_t high_bytes(const Lattice *l) {
    return (CHUNK / l->dim * l->high_bits + 7) / 8; /* of an output channel in a chunk */
}

static inline int64_t lattice_bytes(const Lattice *l) {
    return PANEL * (CHUNK / l->dim + high_bytes(l) + (l->has_signs ? CHUNK / 8 : 0));
}

/* 16 masks: byte i of mask n is all ones if bit i of n is set. */
static inline ftable sign_masks(void) {
    uint32_t masks[16];
    float values[16];
    for (uint32_t n = 0; n < 16; n++)
        masks[n] = (n & 1) * 0xffu | (n & 2) * 0x7f80u | (n & 4) * 0x3fc000u | (n & 8) * 0x1fe00000u;
    memcpy(values, masks, sizeof values);
    return table_load(values);
}

/* 128 + word, or 128 - word where the mask says so, in every byte; words of at most 127. */
INLINE ivec with_signs(ivec word, ivec mask) {
    ivec moved = ixor(ior(word, iset((int32_t)0x80808080)), mask);
    return iadd(moved, iand(mask, iset(0x01010101)));
}

/* A chunk as bytes [QUADS][PANEL][4] of 128 + weight. */
INLINE void lattice_chunk_of(const Lattice *l, const int quads, const int has_signs, const uint8_t *packed,
                             ftable masks, uint8_t *bytes) {
    const int points = QUADS / quads; /* of a channel; quads: in a point */
    const int64_t bits = l->high_bits, high = points * PANEL, signs = high + high_bytes(l) * PANEL;
    const ivec most = iset((1 << bits) - 1);
    for (int at = 0; at < PANEL; at += LANES)
        for (int p = 0; p < points; p++) {
            ivec index = iwiden_u8(packed + p * PANEL + at);
            if (bits) {
                ivec more = iwiden_u8(packed + high + p * bits / 8 * PANEL + at);
                index = ior(index, ISHL(iand(ISHR(more, (int)(p * bits % 8)), most), 8));
            }
            for (int q = 0; q < quads; q++) {
                int quad = p * quads + q;
                ivec word = igather(l->points + q, quads == 2 ? ISHL(index, 1) : index);
                if (has_signs) {
                    ivec nibble = iwiden_u8(packed + signs + quad / 2 * PANEL + at);
                    nibble = iand(ISHR(nibble, quad % 2 * 4), iset(15));
                    word = with_signs(word, ibits(table_look(masks, nibble)));
                }
                istore(bytes + quad * QUAD_BYTES + at * 4, word);
            }
        }
}

static inline void lattice_chunks(const Lattice *l, const uint8_t *packed, int64_t chunks, uint8_t *bytes) {
    ftable masks = sign_masks();
    for (int64_t c = 0; c < chunks; c++, packed += lattice_bytes(l), bytes += CHUNK * PANEL) {
        if (l->dim == 4) lattice_chunk_of(l, 1, 1, packed, masks, bytes);
        else if (l->has_signs) lattice_chunk_of(l, 2, 1, packed, masks, bytes);
        else lattice_chunk_of(l, 2, 0, packed, masks, bytes);
    }
}

#endif
