/* Lookup tables of output channels and sparse weights (SqueezeLLM): w = table[channel][code] + sparse.
 *
 * A lane is an output channel, so a table is read by gathers: entry `code` of all channels of a panel is
 * contiguous, [1 << bits][PANEL]. */
#ifndef LLMOPT_CHANNEL_TABLE_H
#define LLMOPT_CHANNEL_TABLE_H

#include "weight.h"

#define MAX_TABLE (256 * PANEL)

/* The tables of a panel as floats, rounded to bfloat16 if they are multiplied so. */
static void widen_tables(const Weight *w, int64_t panel, int in_bf16, float *values) {
    int64_t size = ((int64_t)1 << w->bits) * PANEL;
    const uint16_t *halves = w->channels.values + panel * size;
    for (int64_t at = 0; at < size; at += LANES) {
        fstore(values + at, fload_f16(halves + at));
        if (!in_bf16) continue;
        uint16_t rounded[LANES];
        store_bf16(rounded, values + at, LANES);
        istore(values + at, ISHL(iwiden_u16(rounded), 16));
    }
}

/* 0, 1, 2, ... */
static inline ivec lane_numbers(void) {
    int32_t numbers[LANES];
    for (int i = 0; i < LANES; i++) numbers[i] = i;
    return iload(numbers);
}

/* The table values of byte `byte` (0..3) of every lane; `values` begins at the vector's first channel. */
INLINE ivec channel_values(const float *values, ivec quad, int byte, ivec lanes) {
    ivec code = iand(ISHR(quad, byte * 8), iset(0xff));
    return igather((const int32_t *)values, ior(ISHL(code, 5), lanes)); /* PANEL is 2^5 */
}

/* Some chunks as floats [channel][PANEL]. */
static void look_up_f32(const float *values, const uint8_t *bytes, int64_t chunks, float *floats) {
    ivec lanes = lane_numbers();
    for (int64_t quad = 0; quad < chunks * QUADS; quad++)
        for (int v = 0; v < PANEL; v += LANES) {
            ivec codes = iload(bytes + quad * QUAD_BYTES + v * 4);
            for (int byte = 0; byte < 4; byte++)
                istore(floats + (quad * 4 + byte) * PANEL + v, channel_values(values + v, codes, byte, lanes));
        }
}

#if HAS_PAIRS
/* Some chunks as bfloat16 [pair][PANEL][2], as `unpack_bf16` orders them; the values are bfloat16 already. */
static void look_up_bf16(const float *values, const uint8_t *bytes, int64_t chunks, uint8_t *halves) {
    ivec lanes = lane_numbers();
    for (int64_t quad = 0; quad < chunks * QUADS; quad++)
        for (int v = 0; v < PANEL; v += LANES) {
            ivec codes = iload(bytes + quad * QUAD_BYTES + v * 4), f[4];
            for (int byte = 0; byte < 4; byte++) f[byte] = channel_values(values + v, codes, byte, lanes);
            uint8_t *to = halves + quad * 2 * QUAD_BYTES + v * 4;
            istore(to, ior(ISHR(f[0], 16), f[2]));
            istore(to + QUAD_BYTES, ior(ISHR(f[1], 16), f[3]));
        }
}
#endif

/* The place of an input channel among the prepared bfloat16 inputs: the middle two of every four are swapped. */
static inline int64_t place_of_half(int64_t k) { return (k & ~3) | (k & 1) << 1 | (k & 2) >> 1; }

/* Adds the products of a panel's sparse weights with `rows` prepared rows of inputs, `stride` bytes apart. */
static void add_sparse(const Weight *w, int64_t panel, int in_bf16, const uint8_t *inputs, int64_t stride,
                       int64_t rows, float *acc) {
    const ChannelTables *t = &w->channels;
    int64_t begin = panel * PANEL, left = w->out_features - begin, count = left < PANEL ? left : PANEL;
    for (int64_t channel = 0; channel < count; channel++)
        for (int32_t n = t->rows[begin + channel]; n < t->rows[begin + channel + 1]; n++)
            for (int64_t r = 0; r < rows; r++) {
                const uint8_t *row = inputs + r * stride;
                float x;
                if (in_bf16) {
                    uint32_t bits = (uint32_t)((const uint16_t *)row)[place_of_half(t->columns[n])] << 16;
                    memcpy(&x, &bits, 4);
                } else memcpy(&x, row + (int64_t)t->columns[n] * 4, 4);
                acc[r * PANEL + channel] += t->sparse[n] * x;
            }
}

#endif
