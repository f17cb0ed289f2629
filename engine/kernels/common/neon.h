/* The vector operations of vectors.h on aarch64: 8 lanes, in two registers of NEON.
 *
 * The lanes are those of AVX2 and are reduced in its order, so that results are bit-identical to that path's.
 * Dot products of bytes by FEAT_I8MM (mixed signs), FEAT_DotProd (equal signs) or plain NEON; products of
 * bfloat16 by FEAT_BF16. */
#ifndef LLMOPT_NEON_H
#define LLMOPT_NEON_H

#include <arm_neon.h>

#define LANES 8
#define UNPACKING_IS_FREE 0
#define MAX_ROWS 2 /* 2 x 4 sums of two registers each, of 32 */
#if defined(__ARM_FEATURE_MATMUL_INT8)
#define NARROW_IS_FASTER 0
#define HAS_MATRIX_TILES 1
#else
#define NARROW_IS_FASTER 1
#define HAS_MATRIX_TILES 0
#endif
#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
#define HAS_PAIRS 1
#else
#define HAS_PAIRS 0
#endif

typedef struct {
    uint32x4_t a, b;
} ivec;
typedef struct {
    float32x4_t a, b;
} fvec;

#define S32(v) vreinterpretq_s32_u32(v)
#define U32(v) vreinterpretq_u32_s32(v)
#define BOTH(Type, function, v) ((Type){function((v).a), function((v).b)})
#define BOTH_OF(Type, function, x, y) ((Type){function((x).a, (y).a), function((x).b, (y).b)})

static inline ivec iload(const void *p) {
    const uint8_t *bytes = p;
    return (ivec){vreinterpretq_u32_u8(vld1q_u8(bytes)), vreinterpretq_u32_u8(vld1q_u8(bytes + 16))};
}
static inline void istore(void *p, ivec v) {
    uint8_t *bytes = p;
    vst1q_u8(bytes, vreinterpretq_u8_u32(v.a));
    vst1q_u8(bytes + 16, vreinterpretq_u8_u32(v.b));
}
static inline ivec iset(int32_t x) {
    uint32x4_t v = vdupq_n_u32((uint32_t)x);
    return (ivec){v, v};
}
static inline ivec iand(ivec a, ivec b) { return BOTH_OF(ivec, vandq_u32, a, b); }
static inline ivec ior(ivec a, ivec b) { return BOTH_OF(ivec, vorrq_u32, a, b); }
static inline ivec ixor(ivec a, ivec b) { return BOTH_OF(ivec, veorq_u32, a, b); }
static inline ivec igather(const int32_t *p, ivec index) {
    uint32_t at[8], values[8];
    vst1q_u32(at, index.a), vst1q_u32(at + 4, index.b);
    for (int lane = 0; lane < 8; lane++) values[lane] = (uint32_t)p[at[lane]];
    return (ivec){vld1q_u32(values), vld1q_u32(values + 4)};
}
static inline uint32x4_t look_bytes(uint8x16_t table, uint32x4_t bytes) {
    return vreinterpretq_u32_u8(vqtbl1q_u8(table, vreinterpretq_u8_u32(bytes)));
}
static inline ivec ilook_bytes(const uint8_t *p, ivec bytes) {
    uint8x16_t table = vld1q_u8(p);
    return (ivec){look_bytes(table, bytes.a), look_bytes(table, bytes.b)};
}
static inline ivec iadd(ivec a, ivec b) { return BOTH_OF(ivec, vaddq_u32, a, b); }
static inline ivec shift_right(ivec v, int n) {
    uint32x4_t by = vdupq_n_u32((uint32_t)n);
    return (ivec){v.a >> by, v.b >> by};
}
static inline ivec shift_left(ivec v, int n) {
    uint32x4_t by = vdupq_n_u32((uint32_t)n);
    return (ivec){v.a << by, v.b << by};
}
#define ISHR(v, n) shift_right(v, n)
#define ISHL(v, n) shift_left(v, n)
#define ISHR_SIGNED(v, n) ((ivec){U32(vshrq_n_s32(S32((v).a), n)), U32(vshrq_n_s32(S32((v).b), n))})
static inline ivec iwiden_s8(const void *p) {
    int16x8_t words = vmovl_s8(vld1_s8(p));
    return (ivec){U32(vmovl_s16(vget_low_s16(words))), U32(vmovl_high_s16(words))};
}
static inline ivec iwords(uint16x8_t words) {
    return (ivec){vmovl_u16(vget_low_u16(words)), vmovl_high_u16(words)};
}
static inline ivec iwiden_u8(const void *p) { return iwords(vmovl_u8(vld1_u8(p))); }
static inline ivec iwiden_u16(const void *p) { return iwords(vreinterpretq_u16_u8(vld1q_u8(p))); }
static inline ivec isign_low_byte(ivec v) {
    return (ivec){U32(vshrq_n_s32(S32(vshlq_n_u32(v.a, 24)), 24)),
                  U32(vshrq_n_s32(S32(vshlq_n_u32(v.b, 24)), 24))};
}
static inline void istore_s8(void *p, ivec v) {
    vst1_s8(p, vqmovn_s16(vcombine_s16(vqmovn_s32(S32(v.a)), vqmovn_s32(S32(v.b)))));
}
static inline void istore_u16(void *p, ivec v) {
    vst1q_u8(p, vreinterpretq_u8_u16(vcombine_u16(vmovn_u32(v.a), vmovn_u32(v.b))));
}
static inline int32_t isum_lanes(ivec v) { return (int32_t)vaddvq_u32(vaddq_u32(v.a, v.b)); }

static inline fvec fload(const float *p) { return (fvec){vld1q_f32(p), vld1q_f32(p + 4)}; }
static inline void fstore(float *p, fvec v) { vst1q_f32(p, v.a), vst1q_f32(p + 4, v.b); }
static inline fvec fset(float x) {
    float32x4_t v = vdupq_n_f32(x);
    return (fvec){v, v};
}
static inline fvec fadd(fvec a, fvec b) { return BOTH_OF(fvec, vaddq_f32, a, b); }
static inline fvec fsub(fvec a, fvec b) { return BOTH_OF(fvec, vsubq_f32, a, b); }
static inline fvec fmul(fvec a, fvec b) { return BOTH_OF(fvec, vmulq_f32, a, b); }
static inline fvec fdiv(fvec a, fvec b) { return BOTH_OF(fvec, vdivq_f32, a, b); }
/* The second where either is NaN, as on x86. */
static inline float32x4_t larger_of(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
static inline float32x4_t smaller_of(float32x4_t a, float32x4_t b) { return vbslq_f32(vcltq_f32(a, b), a, b); }
static inline fvec fmax_(fvec a, fvec b) { return BOTH_OF(fvec, larger_of, a, b); }
static inline fvec fmin_(fvec a, fvec b) { return BOTH_OF(fvec, smaller_of, a, b); }
static inline fvec ffma(fvec a, fvec b, fvec c) {
    return (fvec){vfmaq_f32(c.a, a.a, b.a), vfmaq_f32(c.b, a.b, b.b)};
}
static inline fvec ffnma(fvec a, fvec b, fvec c) {
    return (fvec){vfmsq_f32(c.a, a.a, b.a), vfmsq_f32(c.b, a.b, b.b)};
}
static inline fvec fabs_(fvec a) { return BOTH(fvec, vabsq_f32, a); }
static inline fvec fround(fvec v) { return BOTH(fvec, vrndnq_f32, v); }
static inline fvec itof(ivec v) { return (fvec){vcvtq_f32_s32(S32(v.a)), vcvtq_f32_s32(S32(v.b))}; }
static inline ivec ftoi(fvec v) { return (ivec){U32(vcvtnq_s32_f32(v.a)), U32(vcvtnq_s32_f32(v.b))}; }
static inline fvec fbits(ivec v) { return BOTH(fvec, vreinterpretq_f32_u32, v); }
static inline ivec ibits(fvec v) { return BOTH(ivec, vreinterpretq_u32_f32, v); }
static inline fvec fload_f16(const void *p) {
    float16x8_t halves = vreinterpretq_f16_u8(vld1q_u8(p));
    return (fvec){vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
}
static inline fvec fzero_unless_below(fvec v, fvec bound) {
    ivec keep = {vcaltq_f32(v.a, bound.a), vcaltq_f32(v.b, bound.b)};
    return fbits(iand(keep, ibits(v)));
}
static inline fvec fzero_unless_above(fvec v, fvec x, fvec bound) {
    ivec keep = BOTH_OF(ivec, vcgtq_f32, x, bound);
    return fbits(iand(keep, ibits(v)));
}
static inline float fmax_lane(fvec v) { return vmaxvq_f32(larger_of(v.a, v.b)); }
static inline float fsum_lanes(fvec v) {
    float32x4_t half = vaddq_f32(v.a, v.b);
    float32x2_t pair = vadd_f32(vget_low_f32(half), vget_high_f32(half));
    return vget_lane_f32(pair, 0) + vget_lane_f32(pair, 1);
}

static inline void transpose_4(uint32x4_t *w, uint32x4_t *x, uint32x4_t *y, uint32x4_t *z) {
    uint64x2_t a = vreinterpretq_u64_u32(vtrn1q_u32(*w, *x)), b = vreinterpretq_u64_u32(vtrn2q_u32(*w, *x));
    uint64x2_t c = vreinterpretq_u64_u32(vtrn1q_u32(*y, *z)), d = vreinterpretq_u64_u32(vtrn2q_u32(*y, *z));
    *w = vreinterpretq_u32_u64(vtrn1q_u64(a, c));
    *x = vreinterpretq_u32_u64(vtrn1q_u64(b, d));
    *y = vreinterpretq_u32_u64(vtrn2q_u64(a, c));
    *z = vreinterpretq_u32_u64(vtrn2q_u64(b, d));
}
/* Lane i of to[w] is word w of row i. */
static inline void load_transposed(const uint8_t *const rows[LANES], ivec to[LANES]) {
    for (int w = 0; w < LANES; w += 4) {
        ivec *v = to + w;
        for (int i = 0; i < 4; i++) {
            v[i].a = vld1q_u32((const uint32_t *)(rows[i] + w * 4));
            v[i].b = vld1q_u32((const uint32_t *)(rows[4 + i] + w * 4));
        }
        transpose_4(&v[0].a, &v[1].a, &v[2].a, &v[3].a);
        transpose_4(&v[0].b, &v[1].b, &v[2].b, &v[3].b);
    }
}

/* Dot product of four unsigned weights and signed inputs in every lane, added to `sum`. `narrow`: weights of
 * at most six bits, which are the same signed and unsigned. */
static inline uint32x4_t dot4_half(uint32x4_t sum, uint32x4_t weights, uint32x4_t inputs, int narrow) {
    int8x16_t x = vreinterpretq_s8_u32(inputs), w = vreinterpretq_s8_u32(weights);
#if defined(__ARM_FEATURE_MATMUL_INT8)
    (void)narrow, (void)w;
    return U32(vusdotq_s32(S32(sum), vreinterpretq_u8_u32(weights), x));
#elif defined(__ARM_FEATURE_DOTPROD)
    if (!narrow) { /* weights less 128, and 128 times the sum of the inputs, which panels share */
        w = veorq_s8(w, vdupq_n_s8(-128));
        sum = vaddq_u32(sum, vshlq_n_u32(U32(vdotq_s32(vdupq_n_s32(0), vdupq_n_s8(1), x)), 7));
    }
    return U32(vdotq_s32(S32(sum), w, x));
#else
    int16x8_t low, high; /* 255 x -128 fits 16 bits */
    if (narrow) {
        low = vmull_s8(vget_low_s8(w), vget_low_s8(x));
        high = vmull_high_s8(w, x);
    } else {
        uint8x16_t u = vreinterpretq_u8_u32(weights);
        low = vmulq_s16(vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(u))), vmovl_s8(vget_low_s8(x)));
        high = vmulq_s16(vreinterpretq_s16_u16(vmovl_high_u8(u)), vmovl_high_s8(x));
    }
    return vaddq_u32(sum, U32(vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high))));
#endif
}
static inline ivec dot4(ivec sum, ivec weights, ivec inputs, int narrow) {
    return (ivec){dot4_half(sum.a, weights.a, inputs.a, narrow),
                  dot4_half(sum.b, weights.b, inputs.b, narrow)};
}

/* table[low four bits of each lane] */
typedef struct {
    uint8x16x4_t values;
} ftable;
static inline ftable table_load(const float *p) {
    ftable t;
    for (int i = 0; i < 4; i++) t.values.val[i] = vreinterpretq_u8_f32(vld1q_f32(p + 4 * i));
    return t;
}
static inline float32x4_t look_4(ftable t, uint32x4_t codes) {
    uint32x4_t code = vandq_u32(codes, vdupq_n_u32(15));
    uint32x4_t bytes = vmlaq_n_u32(vdupq_n_u32(0x03020100), code, 0x04040404);
    return vreinterpretq_f32_u8(vqtbl4q_u8(t.values, vreinterpretq_u8_u32(bytes)));
}
static inline fvec table_look(ftable t, ivec codes) {
    return (fvec){look_4(t, codes.a), look_4(t, codes.b)};
}

/* Keeps the compiler from simplifying a loop over a vector that does not change. */
#define OPAQUE(v) __asm__ volatile("" : "+w"((v).a), "+w"((v).b))

#if HAS_PAIRS
static inline fvec pairs_multiply_add(fvec sum, ivec a, ivec b) {
    return (fvec){vbfdotq_f32(sum.a, vreinterpretq_bf16_u32(a.a), vreinterpretq_bf16_u32(b.a)),
                  vbfdotq_f32(sum.b, vreinterpretq_bf16_u32(a.b), vreinterpretq_bf16_u32(b.b))};
}
static inline uint16x8_t nearest_bf16(fvec v) {
    return vreinterpretq_u16_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(v.a), v.b));
}
/* The bits of the nearest bfloat16, ties to even. */
static inline ivec ibits_bf16(fvec v) { return iwords(nearest_bf16(v)); }
static inline void store_nearest_bf16(uint16_t *to, fvec v) { vst1q_u16(to, nearest_bf16(v)); }

/* table[low four bits of each 16], of 16-bit values */
typedef uint8x16x2_t htable;
static inline htable halves_load(const uint16_t *p) {
    return (htable){{vreinterpretq_u8_u16(vld1q_u16(p)), vreinterpretq_u8_u16(vld1q_u16(p + 8))}};
}
static inline uint32x4_t halves_look_4(htable t, uint32x4_t codes) {
    uint16x8_t code = vandq_u16(vreinterpretq_u16_u32(codes), vdupq_n_u16(15));
    uint16x8_t bytes = vmlaq_n_u16(vdupq_n_u16(0x0100), code, 0x0202);
    return vreinterpretq_u32_u8(vqtbl2q_u8(t, vreinterpretq_u8_u16(bytes)));
}
static inline ivec halves_look(htable t, ivec codes) {
    return (ivec){halves_look_4(t, codes.a), halves_look_4(t, codes.b)};
}
#endif

#endif
