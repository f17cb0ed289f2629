/* Packed weights: their layout, and the unpacking of a panel.
 *
 * Output channels are tiled into panels of PANEL, input channels into chunks of CHUNK. A chunk of a panel is
 * contiguous: the bit planes of its codes, widest first. A chunk is eight quads (four input channels of every
 * output channel of the panel, PANEL x 4 bytes); a plane of p bits packs 8 / p quads into one, the first in
 * the lowest bits. So 4-bit codes are 512 bytes, and 5-bit codes 512 for the low four bits and 128 for the
 * highest. 16-bit floats are no planes: [channel][PANEL]. Panels and chunks are zero-padded.
 *
 * Scales and offsets are [panel][group][PANEL]: w = scale * code - offset. */
#ifndef LLMOPT_WEIGHT_H
#define LLMOPT_WEIGHT_H

#include "vectors.h"

#define CHUNK 32
#define QUADS 8
#define QUAD_BYTES (PANEL * 4)
#define MAX_BLOCK 512 /* input channels that are unpacked at once */

#include "lattice.h"

enum { CODES_INTEGER = 0, CODES_TABLE = 1, CODES_FP8 = 2, CODES_LATTICE = 3, CODES_BF16 = 4,
       CODES_F16 = 5 };
enum { SCALE_F32 = 0, SCALE_F16 = 1, SCALE_NESTED = 2, SCALE_TABLE = 3, SCALE_NIBBLE = 4,
       SCALE_ODD = 5 };
enum { OFFSET_BASE = 0, OFFSET_CODE = 1, OFFSET_F16 = 2, OFFSET_NESTED = 3, OFFSET_NIBBLE = 4 };

typedef struct {
    int64_t out_features, in_features;
    int64_t bits;
    int64_t kind;          /* CODES_... */
    int64_t base;          /* the zero point, or a code near it; lattices and tables as bytes: 128 */
    int64_t group;         /* input channels that share a scale; CHUNK divides it, or it is 16 */
    int64_t step;          /* input channels that are accumulated before a scale is applied */
    int64_t scale_kind;    /* float32; float16; int8 times the float16 of `nested` groups; bytes that index
                              256 float32 `outer_scales`; as int8, the low four bits of a byte;
                              or odd numbers 2 n + 1, the n of two groups in a byte */
    int64_t offset_kind;   /* base * scale; code * scale; float16; int8 times the nested float16; or
                              likewise, the high four bits of the scale's byte */
    int64_t nested;
    const uint8_t *codes;
    const void *scales, *offsets, *outer_scales, *outer_offsets;
    const float *table;    /* 16 values, CODES_TABLE; whole numbers below 128 if they are read as bytes */
    Lattice lattice;       /* CODES_LATTICE, whose `bits` are 8: those that it is unpacked to */
    float unit;            /* a power of two, of nested scales */
} Weight;

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
static inline int64_t num_chunks(const Weight *w) { return ceil_div(w->in_features, CHUNK); }
static inline int64_t num_groups(const Weight *w) { return ceil_div(w->in_features, w->group); }
static inline int64_t num_steps(const Weight *w) { return ceil_div(num_chunks(w) * CHUNK, w->step); }
static inline int64_t chunk_bytes(const Weight *w) {
    return w->kind == CODES_LATTICE ? lattice_bytes(&w->lattice) : w->bits * PANEL * CHUNK / 8;
}

/* Whether the weights are 16-bit floats, with scales of 1. */
static inline int is_half(const Weight *w) { return w->kind == CODES_BF16 || w->kind == CODES_F16; }

/* LANES 16-bit floats, widened. */
INLINE fvec fload_half(const int is_bf16, const uint16_t *at) {
    return is_bf16 ? fbits(ISHL(iwiden_u16(at), 16)) : fload_f16(at);
}

/* Whether there are offsets other than base * scale. */
static inline int has_own_offsets(const Weight *w) { return w->offset_kind != OFFSET_BASE; }

/* The scales of one group of a panel, and its offsets if the weight has some, less `base * scale`: `base`
 * is subtracted from the codes. */
INLINE void group_scales(const Weight *w, int64_t panel, int64_t group, int64_t base, float *scales,
                         float *offsets) {
    if (is_half(w)) {
        for (int i = 0; i < PANEL; i += LANES) fstore(scales + i, fset(1.0f));
        return;
    }
    int64_t at = (panel * num_groups(w) + group) * PANEL;
    int64_t outer = 0, byte_at = at;
    if (w->scale_kind == SCALE_ODD) byte_at = (panel * ceil_div(num_groups(w), 2) + group / 2) * PANEL;
    if (w->nested) outer = (panel * ceil_div(num_groups(w), w->nested) + group / w->nested) * PANEL;
    for (int i = 0; i < PANEL; i += LANES) {
        fvec scale;
        const uint8_t *bytes = (const uint8_t *)w->scales + byte_at + i; /* where they are bytes */
        if (w->scale_kind == SCALE_F32) scale = fload((const float *)w->scales + at + i);
        else if (w->scale_kind == SCALE_F16) scale = fload_f16((const uint16_t *)w->scales + at + i);
        else if (w->scale_kind == SCALE_TABLE)
            scale = fbits(igather((const int32_t *)w->outer_scales, iwiden_u8(bytes)));
        else {
            ivec steps = w->scale_kind == SCALE_NESTED ? iwiden_s8(bytes) : iwiden_u8(bytes);
            if (w->scale_kind == SCALE_ODD) {
                steps = iand(group % 2 ? ISHR(steps, 4) : steps, iset(15));
                steps = iadd(ISHL(steps, 1), iset(1));
            } else if (w->scale_kind == SCALE_NIBBLE) steps = iand(steps, iset(15));
            fvec whole = fload_f16((const uint16_t *)w->outer_scales + outer + i);
            scale = fmul(fmul(whole, itof(steps)), fset(w->unit));
        }
        fstore(scales + i, scale);
        if (!has_own_offsets(w)) continue;
        if (w->offset_kind == OFFSET_CODE) {
            ivec zero = iwiden_u8((const uint8_t *)w->offsets + at + i);
            fstore(offsets + i, fmul(fsub(itof(zero), fset((float)base)), scale));
            continue;
        }
        fvec offset;
        if (w->offset_kind == OFFSET_F16) offset = fload_f16((const uint16_t *)w->offsets + at + i);
        else {
            ivec steps = w->offset_kind == OFFSET_NIBBLE ? ISHR(iwiden_u8(bytes), 4)
                                                         : iwiden_s8((const int8_t *)w->offsets + at + i);
            offset = fmul(fload_f16((const uint16_t *)w->outer_offsets + outer + i), itof(steps));
        }
        fstore(offsets + i, ffnma(fset((float)base), scale, offset));
    }
}

/* Codes of a chunk as bytes, [QUADS][PANEL][4]. */
INLINE void chunk_to_bytes(int64_t bits, const uint8_t *packed, uint8_t *bytes) {
    for (int at = 0; at < QUAD_BYTES; at += LANES * 4) {
        const uint8_t *four = packed + at;
        const uint8_t *two = packed + at + (bits & 4 ? 4 * QUAD_BYTES : 0);
        const uint8_t *one = two + (bits & 2 ? 2 * QUAD_BYTES : 0);
        ivec low = iset(0), ones = iset(0), twos = iset(0);
        if (bits & 1) ones = iload(one);
        for (int quad = 0; quad < QUADS; quad++) {
            ivec code = iset(0);
            int shift = 0;
            if (bits & 4) {
                if (quad % 2 == 0) low = iload(four + quad / 2 * QUAD_BYTES);
                code = iand(low, iset(0x0f0f0f0f));
                low = ISHR(low, 4);
                shift = 4;
            }
            if (bits & 2) {
                if (quad % 4 == 0) twos = iload(two + quad / 4 * QUAD_BYTES);
                code = ior(code, ISHL(iand(twos, iset(0x03030303)), shift));
                twos = ISHR(twos, 2);
                shift += 2;
            }
            if (bits & 1) {
                code = ior(code, ISHL(iand(ones, iset(0x01010101)), shift));
                ones = ISHR(ones, 1);
            }
            istore(bytes + quad * QUAD_BYTES + at, code);
        }
    }
}

/* The codes of some chunks as bytes: in place if they have 8 bits, else unpacked into `scratch`. */
static const uint8_t *codes_as_bytes(const Weight *w, const uint8_t *packed, int64_t chunks,
                                     uint8_t *scratch) {
    if (w->kind == CODES_LATTICE) {
        lattice_chunks(&w->lattice, packed, chunks, scratch);
        return scratch;
    }
    if (w->bits == 8) return packed;
    int64_t size = chunk_bytes(w);
    for (int64_t c = 0; c < chunks; c++) {
        uint8_t *bytes = scratch + c * CHUNK * PANEL;
        switch (w->bits) {
        case 2: chunk_to_bytes(2, packed + c * size, bytes); break;
        case 3: chunk_to_bytes(3, packed + c * size, bytes); break;
        case 4: chunk_to_bytes(4, packed + c * size, bytes); break;
        case 5: chunk_to_bytes(5, packed + c * size, bytes); break;
        default: chunk_to_bytes(6, packed + c * size, bytes); break;
        }
    }
    return scratch;
}

/* The codes of some chunks as bytes for the integer GEMM: those of a table as 128 + value. */
static const uint8_t *operand_bytes(const Weight *w, const uint8_t *packed, int64_t chunks,
                                    uint8_t *scratch) {
    const uint8_t *codes = codes_as_bytes(w, packed, chunks, scratch);
    if (w->kind != CODES_TABLE) return codes;
    uint8_t values[16];
    for (int code = 0; code < 16; code++) values[code] = (uint8_t)(128 + (int)w->table[code]);
    for (int64_t at = 0; at < chunks * CHUNK * PANEL; at += LANES * 4)
        istore(scratch + at, ilook_bytes(values, iload(scratch + at)));
    return scratch;
}

/* Dequantizes a code in the low bits of every lane to float, unscaled, less `base`; `mask`: its bits. Bits above
 * them count for nothing. */
INLINE fvec code_to_float(const int kind, const int mask, ivec code, fvec base, ftable table) {
    if (kind == CODES_TABLE) return table_look(table, code);
    if (kind == CODES_FP8) return e4m3_to_float(code);
    return fsub(itof(iand(code, iset(mask))), base);
}

#endif
