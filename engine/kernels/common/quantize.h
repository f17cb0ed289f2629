/* int8 quantization of activations, per token or per block: codes from -128 to 127. */
#ifndef LLMOPT_QUANTIZE_H
#define LLMOPT_QUANTIZE_H

#include "vectors.h"

/* The scale that maps the largest magnitude to code `levels`. */
INLINE float scale_of(fvec largest, float levels) {
    float scale = fmax_lane(largest) / levels;
    return scale > 0.0f ? scale : 1.0f;
}

/* The codes round(v / scale), ties to even, clamped. */
INLINE ivec quantize_to(fvec v, fvec scale) {
    return ftoi(fmin_(fmax_(fdiv(v, scale), fset(-128.0f)), fset(127.0f)));
}

#endif
