/* What the GEMMs with trellis-coded weights (EXL3) share: values of states, and transforms of blocks. */
#ifndef LLMOPT_TRELLIS_H
#define LLMOPT_TRELLIS_H

#include "hadamard.h"

enum { TILE = 16, SPANS = 16, MAX_BITS = 8 };
enum { CODEBOOK_3INST, CODEBOOK_MCG, CODEBOOK_MUL1 };
enum { PAIRS = 8 };

/* The first of the two inputs, four apart, that vectors number `pair` and `pair` with the other columns take:
 * places 0 to 15 of a span are pair (place / 8 * 4 + place % 4), and columns 8 to 15 where place % 8 > 3. */
static inline int pair_input(int pair) { return pair / 4 * 2 + pair % 2 + pair % 4 / 2 * 8; }

/* The orthonormal transform of 128 values. */
static inline void hadamard_block(float *values) {
    hadamard(values, BLOCK);
    const float scale = 0.08838834764831845f; /* 1 / sqrt(128) */
    for (int i = 0; i < BLOCK; i++) values[i] *= scale;
}

/* A float16 whose exponent is not the least, as float32 bits. */
static inline int32_t half_bits(uint32_t half) {
    return (int32_t)((half & 0x8000u) << 16 | (((half & 0x7fffu) << 13) + (112u << 23)));
}

static inline float float_of(int32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* The nearest float16, ties to even, of a value that is zero or no subnormal one: what the codebook holds. */
static inline float as_half(float value) {
    int32_t bits;
    memcpy(&bits, &value, 4);
    return float_of((bits + 0xfff + (bits >> 13 & 1)) & ~0x1fff);
}

/* The values of 16 states. Their sums are exact in float32, so they are rounded once. */
static inline void decode(const uint32_t *restrict states, int codebook, float *restrict values) {
    if (codebook == CODEBOOK_MUL1) {
        for (int i = 0; i < SPANS; i++) {
            uint32_t x = states[i] * 0x83DCD12Du;
            x = (x & 0x00ff00ffu) + (x >> 8 & 0x00ff00ffu);
            int32_t sum = (int32_t)((x + (x >> 16)) & 0xffffu);
            /* float16 0x1eee, and 1024 of it and 0xc931 */
            values[i] = as_half(__builtin_fmaf((float)sum, 0.006767272949f, -3.453125f));
        }
        return;
    }
    const uint32_t factor = codebook == CODEBOOK_MCG ? 0xCBAC1FEDu : 89226354u;
    const uint32_t offset = codebook == CODEBOOK_MCG ? 0 : 64248484u;
    for (int i = 0; i < SPANS; i++) {
        uint32_t x = ((states[i] * factor + offset) & 0x8fff8fffu) ^ 0x3b603b60u;
        values[i] = as_half(float_of(half_bits(x & 0xffffu)) + float_of(half_bits(x >> 16)));
    }
}

/* 128 inputs of a row, scaled and transformed. */
static inline void transform_block(const HadamardCall *call, int64_t row, int64_t first, float *block) {
    load_inputs(call, row, first, block);
    hadamard_block(block);
}

/* 128 outputs of a row, which are transformed in place. */
static inline void store_block(const HadamardCall *call, int64_t row, int64_t first, float *block) {
    hadamard_block(block);
    store_outputs(call, row, first, block);
}

#endif
