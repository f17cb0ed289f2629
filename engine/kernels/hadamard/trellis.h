/* What the GEMMs with trellis-coded weights (EXL3) share: the call, and the transforms on both sides. */
#ifndef LLMOPT_TRELLIS_H
#define LLMOPT_TRELLIS_H

#include <stdint.h>
#include <string.h>

#include "vectors.h"

enum { TILE = 16, SPANS = 16, BLOCK = 128, MAX_BITS = 8 };
enum { CODEBOOK_3INST, CODEBOOK_MCG, CODEBOOK_MUL1 };
enum { PAIRS = 8 };

typedef struct {
    const uint16_t *trellis; /* packed states, in the layout of each GEMM */
    const float *suh;        /* [in] */
    const float *svh;        /* [out] */
    const void *x;           /* [rows][stride], bfloat16 or float32 */
    const float *bias;       /* [out]; may be NULL */
    void *y;                 /* [rows][out] */
    int64_t rows, stride, in_features, out_features, bits, codebook, x_is_bf16, y_is_bf16, threads;
    int64_t input_bits; /* of the integer GEMM: 8 or 16 */
} TrellisCall;

/* The first of the two inputs, four apart, that vectors number `pair` and `pair` with the other columns take:
 * places 0 to 15 of a span are pair (place / 8 * 4 + place % 4), and columns 8 to 15 where place % 8 > 3. */
static inline int pair_input(int pair) { return pair / 4 * 2 + pair % 2 + pair % 4 / 2 * 8; }

/* One stage of the transform: sums and differences of values `half` apart. */
INLINE void butterfly(float *values, const int half) {
    for (int start = 0; start < BLOCK; start += 2 * half)
        for (int i = start; i < start + half; i++) {
            float sum = values[i] + values[i + half], difference = values[i] - values[i + half];
            values[i] = sum, values[i + half] = difference;
        }
}

#if defined(__AVX512F__)
/* The same within vectors: of a lane and that whose number differs in the bit `half`. */
INLINE void butterfly_lanes(float *values, const int half) {
    const ivec lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const ivec others = ixor(lanes, iset(half));
    const __mmask16 upper = _mm512_test_epi32_mask(lanes, iset(half));
    for (int i = 0; i < BLOCK; i += LANES) {
        fvec own = fload(values + i), other = _mm512_permutexvar_ps(others, own);
        fstore(values + i, _mm512_mask_sub_ps(fadd(own, other), upper, other, own));
    }
}
#else
INLINE void butterfly_lanes(float *values, const int half) { butterfly(values, half); }
#endif

static inline void hadamard(float *values) {
    butterfly_lanes(values, 1), butterfly_lanes(values, 2), butterfly_lanes(values, 4), butterfly_lanes(values, 8);
    butterfly(values, 16), butterfly(values, 32), butterfly(values, 64);
    const float scale = 0.08838834764831845f; /* 1 / sqrt(128) */
    for (int i = 0; i < BLOCK; i++) values[i] *= scale;
}

static inline float from_bf16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
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
static inline void transform_block(const TrellisCall *call, int64_t row, int64_t first, float *block) {
    for (int i = 0; i < BLOCK; i++) {
        int64_t at = row * call->stride + first + i;
        float x = call->x_is_bf16 ? from_bf16(((const uint16_t *)call->x)[at]) : ((const float *)call->x)[at];
        block[i] = x * call->suh[first + i];
    }
    hadamard(block);
}

/* 128 outputs of a row, which are transformed in place. */
static inline void store_block(const TrellisCall *call, int64_t row, int64_t first, float *block) {
    float outputs[BLOCK];
    hadamard(block);
    for (int i = 0; i < BLOCK; i++) outputs[i] = block[i] * call->svh[first + i];
    if (call->bias)
        for (int i = 0; i < BLOCK; i++) outputs[i] += call->bias[first + i];
    const int64_t at = row * call->out_features + first;
    if (call->y_is_bf16) store_bf16((uint16_t *)call->y + at, outputs, BLOCK);
    else memcpy((float *)call->y + at, outputs, sizeof outputs);
}

#endif
