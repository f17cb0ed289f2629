/* Transformed inputs as integers: blocks of 128 that share a scale. */
#ifndef LLMOPT_INPUT_CODES_H
#define LLMOPT_INPUT_CODES_H

#include "hadamard.h"

#include "quantize.h"

/* Codes round(v / scale) of a block from -levels to levels, and their sum; the scale. */
INLINE float quantize_block(const float *block, const float levels, int32_t *codes, int32_t *total) {
    fvec largest = fset(0.0f);
    for (int i = 0; i < BLOCK; i += LANES) largest = fmax_(largest, fabs_(fload(block + i)));
    /* No value of a block is finite where one input is not, and no code holds them: the scale is NaN. */
    const float none = block[0] - block[0], scale = none != 0.0f ? none : scale_of(largest, levels);
    ivec sum = iset(0);
    for (int i = 0; i < BLOCK; i += LANES) {
        fvec code = fdiv(fload(block + i), fset(scale));
        istore(codes + i, ftoi(fmin_(fmax_(code, fset(-levels)), fset(levels))));
        sum = iadd(sum, iload(codes + i));
    }
    *total = isum_lanes(sum);
    return scale;
}

#endif
