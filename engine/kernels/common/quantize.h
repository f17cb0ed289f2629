/* Quantization of activations, per token or per block: int8 codes from -128 to 127, or values of e4m3. */
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

/* The nearest value of e4m3, ties to even, of `v` clamped to +-448; NaN stays. Adding and subtracting 2^20 times
 * the power of two below |v|, at least 2^-6, leaves the three bits of a mantissa. */
INLINE fvec nearest_e4m3(fvec v) {
    const fvec magnitude = fmin_(fset(448.0f), fabs_(v));
    const ivec exponent = iand(ibits(fmax_(fset(0x1p-6f), magnitude)), iset(0x7f800000));
    const fvec large = fbits(iadd(exponent, iset(20 << 23)));
    const fvec rounded = fsub(fadd(magnitude, large), large);
    return fbits(ior(ibits(rounded), iand(ibits(v), iset((int32_t)0x80000000))));
}

#endif
