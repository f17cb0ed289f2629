/* Rounding a row to 8 bits: a scale for all of it, codes from -128 to 127. */
#ifndef LLMOPT_QUANTIZE_H
#define LLMOPT_QUANTIZE_H

#include "vectors.h"

/* The scale with which the largest magnitude takes `levels` codes. */
INLINE float scale_of(fvec largest, float levels) {
    float scale = fmax_lane(largest) / levels;
    return scale > 0.0f ? scale : 1.0f;
}

/* v / scale, to the nearest, ties to even. */
INLINE ivec quantize_to(fvec v, fvec scale) {
    return ftoi(fmin_(fmax_(fdiv(v, scale), fset(-128.0f)), fset(127.0f)));
}

#endif
