/* Unpacking of chunks of a panel for the float micro-kernels: to floats, or to pairs of bfloat16. */
#ifndef LLMOPT_UNPACK_H
#define LLMOPT_UNPACK_H

#include "weight.h"

/* Widens some chunks of 16-bit floats. */
static void widen_halves(const Weight *w, const uint8_t *packed, int64_t chunks, float *floats) {
    const uint16_t *halves = (const uint16_t *)packed;
    const int64_t count = chunks * CHUNK * PANEL;
    if (w->kind == CODES_BF16)
        for (int64_t i = 0; i < count; i += LANES) fstore(floats + i, fload_half(1, halves + i));
    else
        for (int64_t i = 0; i < count; i += LANES) fstore(floats + i, fload_half(0, halves + i));
}

/* Dequantizes some chunks, unscaled, to floats [channel][PANEL]. */
static void unpack_f32(const Weight *w, const uint8_t *bytes, int64_t chunks, float *floats) {
    fvec base = fset((float)w->base);
    ftable table = {0};
    if (w->kind == CODES_TABLE) table = table_load(w->table);
    for (int64_t quad = 0; quad < chunks * QUADS; quad++)
        for (int v = 0; v < VECTORS; v++) {
            ivec codes = iload(bytes + quad * QUAD_BYTES + v * LANES * 4);
            float *to = floats + quad * 4 * PANEL + v * LANES;
            for (int byte = 0; byte < 4; byte++)
                fstore(to + byte * PANEL, code_to_float((int)w->kind, 255, ISHR(codes, byte * 8), base, table));
        }
}

#if HAS_PAIRS
/* Dequantizes some chunks to bfloat16 [pair][PANEL][2]; a quad's pairs are channels (0, 2) and (1, 3). */
static void unpack_bf16(const Weight *w, const uint8_t *bytes, int64_t chunks, uint8_t *halves) {
    fvec base = fset((float)w->base);
    ftable table = {0};
    ivec high = iset((int32_t)0xffff0000);
    if (w->kind == CODES_TABLE) table = table_load(w->table);
    for (int64_t quad = 0; quad < chunks * QUADS; quad++)
        for (int v = 0; v < VECTORS; v++) {
            ivec codes = iload(bytes + quad * QUAD_BYTES + v * LANES * 4);
            ivec f[4];
            for (int byte = 0; byte < 4; byte++)
                f[byte] = ibits(code_to_float((int)w->kind, 255, ISHR(codes, byte * 8), base, table));
            uint8_t *to = halves + quad * 2 * QUAD_BYTES + v * LANES * 4;
            istore(to, ior(ISHR(f[0], 16), iand(f[2], high)));
            istore(to + QUAD_BYTES, ior(ISHR(f[1], 16), iand(f[3], high)));
        }
}

/* The same for 4-bit codes, directly from the packed bytes: `values` is the table of 16 bfloat16. */
static void unpack_bf16_4(const uint8_t *packed, int64_t chunks, htable values, uint8_t *halves) {
    for (int64_t two = 0; two < chunks * QUADS / 2; two++)
        for (int v = 0; v < VECTORS; v++) {
            ivec codes = iload(packed + two * QUAD_BYTES + v * LANES * 4);
            uint8_t *to = halves + two * 4 * QUAD_BYTES + v * LANES * 4;
            istore(to, halves_look(values, codes));
            istore(to + 2 * QUAD_BYTES, halves_look(values, ISHR(codes, 4)));
            istore(to + QUAD_BYTES, halves_look(values, ISHR(codes, 8)));
            istore(to + 3 * QUAD_BYTES, halves_look(values, ISHR(codes, 12)));
        }
}

static htable sixteen_values(const Weight *w) {
    uint16_t halves[16];
    for (int code = 0; code < 16; code++) {
        float value = w->kind == CODES_TABLE ? w->table[code] : (float)(code - w->base);
        uint32_t bits;
        memcpy(&bits, &value, 4);
        halves[code] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
    return halves_load(halves);
}
#endif

#endif
