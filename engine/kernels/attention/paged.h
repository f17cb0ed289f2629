/* Paged KV cache: reads of stored keys and values as floats, from any cache dtype.
 *
 * A stored vector is read in words of 32 bits, which hold one float, two bfloat16 or four 8-bit codes;
 * `word_part` extracts the floats of a word. */
#ifndef LLMOPT_PAGED_H
#define LLMOPT_PAGED_H

#include <string.h>

#include "vectors.h"

#define RUN 32 /* positions per tile of keys or values */

enum { STORED_F32 = 0, STORED_BF16 = 1, STORED_S8 = 2, STORED_E4M3 = 3 };

typedef struct {
    const uint8_t *data;
    const float *scales;   /* [slots][heads] of 8-bit types, else NULL */
    int64_t type;          /* STORED_... */
    int64_t dim, heads;
    int64_t slot_bytes, head_bytes; /* from one slot or head to the next */
} Paged;

/* The cache slots of a run of positions of a sequence. */
typedef struct {
    int64_t slots[RUN];
} SlotRun;

static inline int64_t word_floats(const Paged *p) {
    return p->type == STORED_F32 ? 1 : p->type == STORED_BF16 ? 2 : 4;
}

/* Float `part` of every word; 0 <= part < word_floats. */
INLINE fvec word_part(int64_t type, ivec word, int part) {
    if (type == STORED_F32) return fbits(word);
    if (type == STORED_BF16) return fbits(part ? iand(word, iset((int32_t)0xffff0000)) : ISHL(word, 16));
    ivec byte = ISHR(word, 8 * part);
    return type == STORED_S8 ? itof(isign_low_byte(byte)) : e4m3_to_float(byte);
}

static inline const uint8_t *vector_at(const Paged *p, int64_t slot, int64_t head) {
    return p->data + slot * p->slot_bytes + head * p->head_bytes;
}

/* Prefetches into L2: the vectors of a run of many heads are more than L1 holds. (It must be inline: gcc treats a
 * function that only prefetches as having no effect, and drops calls of it.) */
INLINE void fetch(const uint8_t *vectors, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(vectors + at, 0, 2);
}

/* Two 8-bit codes of every word as a pair of bfloat16, which hold them exactly; 0 <= part < 2. */
INLINE ivec word_pair(int64_t type, ivec word, int part) {
    ivec low = ibits(word_part(type, word, 2 * part)), high = ibits(word_part(type, word, 2 * part + 1));
    return ior(ISHR(low, 16), high);
}

/* A run of vectors of `words` words, transposed to floats [dim][RUN], or with `pairs` to pairs of bfloat16
 * [dim / 2][RUN]; unscaled. */
INLINE void read_columns_of(const int64_t type, const int pairs, int64_t words, const Paged *p,
                            const SlotRun *slot_run, int64_t head, float *columns) {
    const int parts = type == STORED_F32 ? 1 : type == STORED_BF16 || pairs ? 2 : 4;
    for (int half = 0; half < RUN; half += LANES)
        for (int64_t first = 0; first < words; first += LANES) {
            const int64_t count = words - first < LANES ? words - first : LANES;
            const uint8_t *vectors[LANES];
            uint8_t padded[LANES][LANES * 4];
            for (int i = 0; i < LANES; i++) {
                vectors[i] = vector_at(p, slot_run->slots[half + i], head) + first * 4;
                if (count < LANES) vectors[i] = memcpy(padded[i], vectors[i], (size_t)count * 4);
            }
            ivec block[LANES];
            load_transposed(vectors, block);
            for (int64_t w = 0; w < count; w++)
                for (int part = 0; part < parts; part++)
                    fstore(columns + ((first + w) * parts + part) * RUN + half,
                           pairs ? fbits(word_pair(type, block[w], part)) : word_part(type, block[w], part));
        }
}

/* What the columns of a run are read as: floats, pairs of bfloat16, or int8 codes, four in a word. */
enum { AS_FLOATS = 0, AS_PAIRS = 1, AS_CODES = 2 };

static void read_columns(const Paged *p, const SlotRun *slot_run, int64_t head, int as, float *columns) {
    int64_t words = p->dim / word_floats(p);
    int is_whole = as == AS_CODES || (as == AS_PAIRS && p->type == STORED_BF16);
    switch (is_whole ? STORED_F32 : p->type) { /* a word that stays as it is is moved like a float */
    case STORED_F32: read_columns_of(STORED_F32, 0, words, p, slot_run, head, columns); break;
    case STORED_BF16: read_columns_of(STORED_BF16, 0, words, p, slot_run, head, columns); break;
    case STORED_S8: read_columns_of(STORED_S8, 0, words, p, slot_run, head, columns); break;
    default:
        if (as == AS_PAIRS) read_columns_of(STORED_E4M3, 1, words, p, slot_run, head, columns);
        else read_columns_of(STORED_E4M3, 0, words, p, slot_run, head, columns);
    }
}

/* LANES elements of a vector as the bits of floats. */
INLINE ivec element_bits(const int64_t type, const uint8_t *vector, int64_t d) {
    if (type == STORED_F32) return iload(vector + d * 4);
    if (type == STORED_BF16) return ISHL(iwiden_u16((const uint16_t *)vector + d), 16);
    if (type == STORED_S8) return ibits(itof(iwiden_s8(vector + d)));
    return ibits(e4m3_to_float(iwiden_u8(vector + d)));
}

/* Interleaves two vectors into pairs of bfloat16, which hold them exactly, the first in the lower halves. */
INLINE void pair_rows(const int64_t type, const uint8_t *first, const uint8_t *second, int64_t dim,
                      float *pairs) {
    for (int64_t d = 0; d < dim; d += LANES)
        istore(pairs + d, ior(ISHR(element_bits(type, first, d), 16), element_bits(type, second, d)));
}

/* A run of vectors as rows, floats [RUN][dim], unscaled; with `pairs`, two neighbouring positions per word in
 * bfloat16, [RUN / 2][dim]. dim is a multiple of 16. */
static void read_rows(const Paged *p, const SlotRun *slot_run, int64_t head, int pairs, float *rows) {
    if (pairs) {
        for (int i = 0; i < RUN; i += 2) {
            const uint8_t *first = vector_at(p, slot_run->slots[i], head);
            const uint8_t *second = vector_at(p, slot_run->slots[i + 1], head);
            float *to = rows + i / 2 * p->dim;
            if (p->type == STORED_BF16) pair_rows(STORED_BF16, first, second, p->dim, to);
            else if (p->type == STORED_S8) pair_rows(STORED_S8, first, second, p->dim, to);
            else pair_rows(STORED_E4M3, first, second, p->dim, to);
        }
        return;
    }
    for (int i = 0; i < RUN; i++) {
        const uint8_t *vector = vector_at(p, slot_run->slots[i], head);
        for (int64_t d = 0; d < p->dim; d += LANES)
            istore(rows + i * p->dim + d, element_bits(p->type, vector, d));
    }
}

/* The scale of each vector of a run. */
static inline void read_scales(const Paged *p, const SlotRun *slot_run, int64_t head, float *scales) {
    for (int i = 0; i < RUN; i++) scales[i] = p->scales[slot_run->slots[i] * p->heads + head];
}

#endif
