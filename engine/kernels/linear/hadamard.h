/* What the GEMMs of codes between Hadamard transforms share: the call, and the transform. */
#ifndef LLMOPT_HADAMARD_H
#define LLMOPT_HADAMARD_H

#include <stdint.h>
#include <string.h>

#include "vectors.h"

enum { BLOCK = 128 }; /* of EXL3's transforms; inputs that share a scale */

typedef struct {
    const void *codes;   /* packed, in the layout of each GEMM */
    const float *su;     /* [in], signs and scales */
    const float *sv;     /* [out] */
    const void *x;       /* [rows][stride], bfloat16 or float32 */
    const float *bias;   /* [out]; may be NULL */
    void *y;             /* [rows][out] */
    int64_t rows, stride, in_features, out_features, bits, codebook, x_is_bf16, y_is_bf16, threads;
    int64_t input_bits; /* of an integer GEMM: 8 or 16; else 32 */
} HadamardCall;

/* One stage of the transform of `count` values: sums and differences of values `half` apart. */
INLINE void butterfly(float *values, const int count, const int half) {
    for (int start = 0; start < count; start += 2 * half) {
        float *restrict low = values + start, *restrict high = low + half;
        for (int i = 0; i < half; i++) {
            float sum = low[i] + high[i], difference = low[i] - high[i];
            low[i] = sum, high[i] = difference;
        }
    }
}

#if defined(__AVX512F__)
/* The same within vectors: of a lane and that whose number differs in the bit `half`. */
INLINE void butterfly_lanes(float *values, const int count, const int half) {
    const ivec lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const ivec others = ixor(lanes, iset(half));
    const __mmask16 upper = _mm512_test_epi32_mask(lanes, iset(half));
    for (int i = 0; i < count; i += LANES) {
        fvec own = fload(values + i), other = _mm512_permutexvar_ps(others, own);
        fstore(values + i, _mm512_mask_sub_ps(fadd(own, other), upper, other, own));
    }
}
#else
INLINE void butterfly_lanes(float *values, const int count, const int half) { butterfly(values, count, half); }
#endif

/* Sylvester's transform of `count` values, a power of two from 16 on, but for its factor 1 / sqrt(count). */
INLINE void hadamard(float *values, const int count) {
    butterfly_lanes(values, count, 1), butterfly_lanes(values, count, 2);
    butterfly_lanes(values, count, 4), butterfly_lanes(values, count, 8);
    for (int half = 16; half < count; half *= 2) butterfly(values, count, half);
}

static inline float from_bf16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* A block of inputs of a row, scaled. */
INLINE void load_inputs(const HadamardCall *call, int64_t row, int64_t first, float *to) {
    const int64_t at = row * call->stride + first;
    if (call->x_is_bf16)
        for (int64_t i = 0; i < BLOCK; i++) to[i] = from_bf16(((const uint16_t *)call->x)[at + i]) * call->su[first + i];
    else
        for (int64_t i = 0; i < BLOCK; i++) to[i] = ((const float *)call->x)[at + i] * call->su[first + i];
}

/* A block of transformed outputs of a row, scaled in place, to the row's place in `y`. */
INLINE void store_outputs(const HadamardCall *call, int64_t row, int64_t first, float *values) {
    for (int64_t i = 0; i < BLOCK; i++) values[i] *= call->sv[first + i];
    if (call->bias)
        for (int64_t i = 0; i < BLOCK; i++) values[i] += call->bias[first + i];
    const int64_t at = row * call->out_features + first;
    if (call->y_is_bf16) store_bf16((uint16_t *)call->y + at, values, BLOCK);
    else memcpy((float *)call->y + at, values, BLOCK * sizeof *values);
}

#endif
