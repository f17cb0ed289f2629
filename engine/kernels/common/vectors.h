/* The few vector operations that the kernels use, 16 lanes wide with AVX-512 and 8 with AVX2 and NEON.
 *
 * A lane is one output channel. A panel is `PANEL` output channels, in VECTORS registers. All widths
 * accumulate in the same order, so that their results are bit-identical. */
#ifndef LLMOPT_VECTORS_H
#define LLMOPT_VECTORS_H

#include <stdint.h>
#include <string.h>

#define PANEL 32

#if defined(__aarch64__)
#include "neon.h"
#else
#include <immintrin.h>
#define HAS_MATRIX_TILES 0
/* Keeps the compiler from simplifying a loop over a vector that does not change. */
#define OPAQUE(v) __asm__ volatile("" : "+x"(v))

#if defined(__AVX512F__)

#define LANES 16
#define NARROW_IS_FASTER 0
#define UNPACKING_IS_FREE 1 /* it runs on ports that the dot products leave idle */
#define MAX_ROWS 8 /* tokens whose sums stay in registers: 8 x 2 of 32 */
typedef __m512i ivec;
typedef __m512 fvec;

static inline ivec iload(const void *p) { return _mm512_loadu_si512(p); }
static inline void istore(void *p, ivec v) { _mm512_storeu_si512(p, v); }
static inline ivec iset(int32_t x) { return _mm512_set1_epi32(x); }
static inline ivec iand(ivec a, ivec b) { return _mm512_and_si512(a, b); }
static inline ivec ior(ivec a, ivec b) { return _mm512_or_si512(a, b); }
static inline ivec ixor(ivec a, ivec b) { return _mm512_xor_si512(a, b); }
/* p[index of each lane] */
static inline ivec igather(const int32_t *p, ivec index) { return _mm512_i32gather_epi32(index, p, 4); }
/* p[byte] of each byte, which are less than 16 */
static inline ivec ilook_bytes(const uint8_t *p, ivec bytes) {
    return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)p)), bytes);
}
#define ISHR(v, n) _mm512_srli_epi32(v, n)
#define ISHL(v, n) _mm512_slli_epi32(v, n)
#define ISHR_SIGNED(v, n) _mm512_srai_epi32(v, n)
static inline ivec iwiden_s8(const void *p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p));
}
static inline ivec iwiden_u8(const void *p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
}
static inline ivec iwiden_u16(const void *p) {
    return _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
}
static inline fvec fload(const float *p) { return _mm512_loadu_ps(p); }
static inline void fstore(float *p, fvec v) { _mm512_storeu_ps(p, v); }
static inline fvec fset(float x) { return _mm512_set1_ps(x); }
static inline fvec fadd(fvec a, fvec b) { return _mm512_add_ps(a, b); }
static inline fvec fsub(fvec a, fvec b) { return _mm512_sub_ps(a, b); }
static inline fvec fmul(fvec a, fvec b) { return _mm512_mul_ps(a, b); }
static inline fvec fdiv(fvec a, fvec b) { return _mm512_div_ps(a, b); }
static inline fvec fmax_(fvec a, fvec b) { return _mm512_max_ps(a, b); }
static inline fvec fmin_(fvec a, fvec b) { return _mm512_min_ps(a, b); }
static inline fvec ffma(fvec a, fvec b, fvec c) { return _mm512_fmadd_ps(a, b, c); }
static inline fvec ffnma(fvec a, fvec b, fvec c) { return _mm512_fnmadd_ps(a, b, c); }
static inline fvec fabs_(fvec a) { return _mm512_abs_ps(a); }
static inline fvec itof(ivec v) { return _mm512_cvtepi32_ps(v); }
static inline ivec ftoi(fvec v) { return _mm512_cvtps_epi32(v); }
static inline fvec fbits(ivec v) { return _mm512_castsi512_ps(v); }
static inline ivec ibits(fvec v) { return _mm512_castps_si512(v); }
static inline fvec fload_f16(const void *p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}
static inline void istore_s8(void *p, ivec v) { _mm_storeu_si128((__m128i *)p, _mm512_cvtsepi32_epi8(v)); }
static inline void istore_u16(void *p, ivec v) {
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtepi32_epi16(v));
}
static inline fvec fzero_unless_below(fvec v, fvec bound) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(fabs_(v), bound, _CMP_LT_OQ), v);
}
static inline float fmax_lane(fvec v) { return _mm512_reduce_max_ps(v); }
static inline int32_t isum_lanes(ivec v) { return _mm512_reduce_add_epi32(v); }
static inline ivec iadd(ivec a, ivec b) { return _mm512_add_epi32(a, b); }
static inline ivec isign_low_byte(ivec v) { return _mm512_srai_epi32(_mm512_slli_epi32(v, 24), 24); }
static inline float fsum_lanes(fvec v) { return _mm512_reduce_add_ps(v); }
static inline fvec fround(fvec v) { return _mm512_roundscale_ps(v, _MM_FROUND_TO_NEAREST_INT); }
static inline fvec fzero_unless_above(fvec v, fvec x, fvec bound) {
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, bound, _CMP_GT_OQ), v);
}
#define UNPACK(half, width, a, b) _mm512_unpack##half##_epi##width(a, b)
/* 16 bytes of each of four rows, four apart. */
static inline ivec iload_quarters(const uint8_t *const *rows, int64_t at) {
    const ivec one = _mm512_castsi128_si512(_mm_loadu_si128((const __m128i *)(rows[0] + at)));
    const ivec two = _mm512_inserti32x4(one, _mm_loadu_si128((const __m128i *)(rows[4] + at)), 1);
    const ivec three = _mm512_inserti32x4(two, _mm_loadu_si128((const __m128i *)(rows[8] + at)), 2);
    return _mm512_inserti32x4(three, _mm_loadu_si128((const __m128i *)(rows[12] + at)), 3);
}

/* Dot product of four unsigned weights and signed inputs in every lane, added to `sum` (VNNI). `narrow`:
 * weights of at most six bits. */
static inline ivec dot4(ivec sum, ivec weights, ivec inputs, int narrow) {
    (void)narrow;
    /* With the intrinsic, gcc 12 copies every accumulator for every instruction. */
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(weights), "v"(inputs));
    return sum;
}

/* table[low four bits of each lane] */
typedef struct {
    fvec values;
} ftable;
static inline ftable table_load(const float *p) { return (ftable){fload(p)}; }
static inline fvec table_look(ftable t, ivec codes) { return _mm512_permutexvar_ps(codes, t.values); }

#else /* AVX2 */

#define LANES 8
#define UNPACKING_IS_FREE 0
#define MAX_ROWS 2
#if defined(__AVXVNNI__)
#define NARROW_IS_FASTER 0
#else
#define NARROW_IS_FASTER 1
#endif
typedef __m256i ivec;
typedef __m256 fvec;

static inline ivec iload(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
static inline void istore(void *p, ivec v) { _mm256_storeu_si256((__m256i *)p, v); }
static inline ivec iset(int32_t x) { return _mm256_set1_epi32(x); }
static inline ivec iand(ivec a, ivec b) { return _mm256_and_si256(a, b); }
static inline ivec ior(ivec a, ivec b) { return _mm256_or_si256(a, b); }
static inline ivec ixor(ivec a, ivec b) { return _mm256_xor_si256(a, b); }
static inline ivec igather(const int32_t *p, ivec index) { return _mm256_i32gather_epi32(p, index, 4); }
static inline ivec ilook_bytes(const uint8_t *p, ivec bytes) {
    return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)p)), bytes);
}
#define ISHR(v, n) _mm256_srli_epi32(v, n)
#define ISHL(v, n) _mm256_slli_epi32(v, n)
#define ISHR_SIGNED(v, n) _mm256_srai_epi32(v, n)
static inline ivec iwiden_s8(const void *p) {
    return _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p));
}
static inline ivec iwiden_u8(const void *p) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
}
static inline ivec iwiden_u16(const void *p) {
    return _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p));
}
static inline fvec fload(const float *p) { return _mm256_loadu_ps(p); }
static inline void fstore(float *p, fvec v) { _mm256_storeu_ps(p, v); }
static inline fvec fset(float x) { return _mm256_set1_ps(x); }
static inline fvec fadd(fvec a, fvec b) { return _mm256_add_ps(a, b); }
static inline fvec fsub(fvec a, fvec b) { return _mm256_sub_ps(a, b); }
static inline fvec fmul(fvec a, fvec b) { return _mm256_mul_ps(a, b); }
static inline fvec fdiv(fvec a, fvec b) { return _mm256_div_ps(a, b); }
static inline fvec fmax_(fvec a, fvec b) { return _mm256_max_ps(a, b); }
static inline fvec fmin_(fvec a, fvec b) { return _mm256_min_ps(a, b); }
static inline fvec ffma(fvec a, fvec b, fvec c) { return _mm256_fmadd_ps(a, b, c); }
static inline fvec ffnma(fvec a, fvec b, fvec c) { return _mm256_fnmadd_ps(a, b, c); }
static inline fvec fabs_(fvec a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
static inline fvec itof(ivec v) { return _mm256_cvtepi32_ps(v); }
static inline ivec ftoi(fvec v) { return _mm256_cvtps_epi32(v); }
static inline fvec fbits(ivec v) { return _mm256_castsi256_ps(v); }
static inline ivec ibits(fvec v) { return _mm256_castps_si256(v); }
static inline fvec fload_f16(const void *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
static inline void istore_s8(void *p, ivec v) {
    __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    _mm_storel_epi64((__m128i *)p, _mm_packs_epi16(words, words));
}
static inline void istore_u16(void *p, ivec v) {
    v = _mm256_and_si256(v, _mm256_set1_epi32(0xffff));
    _mm_storeu_si128((__m128i *)p,
                     _mm_packus_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)));
}
static inline fvec fzero_unless_below(fvec v, fvec bound) {
    return _mm256_and_ps(_mm256_cmp_ps(fabs_(v), bound, _CMP_LT_OQ), v);
}
static inline float fmax_lane(fvec v) {
    __m128 half = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_max_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_max_ss(half, _mm_movehdup_ps(half)));
}
static inline int32_t isum_lanes(ivec v) {
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
    half = _mm_add_epi32(half, _mm_shuffle_epi32(half, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(half, _mm_shuffle_epi32(half, 0xb1)));
}
static inline ivec iadd(ivec a, ivec b) { return _mm256_add_epi32(a, b); }
static inline ivec isign_low_byte(ivec v) { return _mm256_srai_epi32(_mm256_slli_epi32(v, 24), 24); }
static inline float fsum_lanes(fvec v) {
    __m128 half = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
    half = _mm_add_ps(half, _mm_movehl_ps(half, half));
    return _mm_cvtss_f32(_mm_add_ss(half, _mm_movehdup_ps(half)));
}
static inline fvec fround(fvec v) { return _mm256_round_ps(v, _MM_FROUND_TO_NEAREST_INT | 8); }
static inline fvec fzero_unless_above(fvec v, fvec x, fvec bound) {
    return _mm256_and_ps(_mm256_cmp_ps(x, bound, _CMP_GT_OQ), v);
}
#define UNPACK(half, width, a, b) _mm256_unpack##half##_epi##width(a, b)
/* 16 bytes of each of two rows, four apart. */
static inline ivec iload_quarters(const uint8_t *const *rows, int64_t at) {
    const ivec one = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)(rows[0] + at)));
    return _mm256_inserti128_si256(one, _mm_loadu_si128((const __m128i *)(rows[4] + at)), 1);
}

static inline ivec dot4(ivec sum, ivec weights, ivec inputs, int narrow) {
#if defined(__AVXVNNI__)
    (void)narrow;
    return _mm256_dpbusd_avx_epi32(sum, weights, inputs);
#else
    if (narrow) { /* two products of at most 63 x 128 fit in 16 bits */
        ivec pairs = _mm256_maddubs_epi16(weights, inputs);
        return iadd(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
    /* maddubs would saturate: even and odd bytes as words of their own instead. */
    ivec even = _mm256_madd_epi16(iand(weights, iset(0x00ff00ff)),
                                  _mm256_srai_epi16(_mm256_slli_epi16(inputs, 8), 8));
    ivec odd = _mm256_madd_epi16(_mm256_srli_epi16(weights, 8), _mm256_srai_epi16(inputs, 8));
    return iadd(sum, iadd(even, odd));
#endif
}

typedef struct {
    fvec low, high;
} ftable;
static inline ftable table_load(const float *p) { return (ftable){fload(p), fload(p + 8)}; }
static inline fvec table_look(ftable t, ivec codes) {
    fvec low = _mm256_permutevar8x32_ps(t.low, codes);
    fvec high = _mm256_permutevar8x32_ps(t.high, codes);
    return _mm256_blendv_ps(low, high, fbits(ISHL(codes, 28))); /* bit 3 becomes the sign */
}

#endif

/* Lane i of to[w] is word w of row i: four words of each row at a time, four rows of which share the lanes of 16
 * bytes, within which unpacking stays. */
static inline void load_transposed(const uint8_t *const rows[LANES], ivec to[LANES]) {
    for (int w = 0; w < LANES; w += 4) {
        ivec v[4];
        for (int i = 0; i < 4; i++) v[i] = iload_quarters(rows + i, w * 4);
        const ivec a = UNPACK(lo, 32, v[0], v[1]), b = UNPACK(hi, 32, v[0], v[1]);
        const ivec c = UNPACK(lo, 32, v[2], v[3]), d = UNPACK(hi, 32, v[2], v[3]);
        to[w] = UNPACK(lo, 64, a, c), to[w + 1] = UNPACK(hi, 64, a, c);
        to[w + 2] = UNPACK(lo, 64, b, d), to[w + 3] = UNPACK(hi, 64, b, d);
    }
}

#if defined(__AVX512BF16__)
#define HAS_PAIRS 1
static inline fvec pairs_multiply_add(fvec sum, ivec a, ivec b) {
    __asm__("vdpbf16ps %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}
/* The bits of the nearest bfloat16, ties to even. */
static inline ivec ibits_bf16(fvec v) { return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(v)); }
static inline void store_nearest_bf16(uint16_t *to, fvec v) {
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(v));
}

/* table[low four bits of each 16], of 16-bit values */
typedef __m512i htable;
static inline htable halves_load(const uint16_t *p) {
    return _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)p));
}
static inline ivec halves_look(htable t, ivec codes) { return _mm512_permutexvar_epi16(codes, t); }
#else
#define HAS_PAIRS 0
#endif

#endif /* the processor */

#define VECTORS (PANEL / LANES)

#define INLINE static inline __attribute__((always_inline))

/* Broadcasts four bytes to every lane. */
INLINE ivec ibroadcast(const void *p) {
    int32_t word;
    memcpy(&word, p, 4);
    return iset(word);
}

/* sum + a * b: of floats, or with `pairs` of two bfloat16 in every lane, where HAS_PAIRS. */
INLINE fvec multiply_add(fvec sum, ivec a, ivec b, const int pairs) {
#if HAS_PAIRS
    if (pairs) return pairs_multiply_add(sum, a, b);
#else
    (void)pairs;
#endif
    return ffma(fbits(a), fbits(b), sum);
}

/* `count` floats, a multiple of LANES, as bfloat16: to the nearest, ties to even. */
INLINE void store_bf16(uint16_t *to, const float *values, int64_t count) {
    for (int64_t i = 0; i < count; i += LANES) {
#if HAS_PAIRS
        store_nearest_bf16(to + i, fload(values + i));
#else
        ivec bits = ibits(fload(values + i));
        ivec up = iadd(iset(0x7fff), iand(ISHR(bits, 16), iset(1)));
        istore_u16(to + i, ISHR(iadd(bits, up), 16));
#endif
    }
}

/* Dequantizes an e4m3 code in the lowest byte of each lane: its bits, shifted into a float, are the value
 * times 2^-120. The shift back to the right leaves copies of the sign between it and the exponent. */
INLINE fvec e4m3_to_float(ivec code) {
    ivec bits = iand(ISHR_SIGNED(ISHL(code, 24), 4), iset((int32_t)0x87f00000));
    return fmul(fbits(bits), fset(0x1p120f));
}

/* e^x within 2 units in the last place for x <= 0, and 0 from -87 down.
 * Cody and Waite, "Software Manual for the Elementary Functions", 1980: 2^n times a short series. */
INLINE fvec exp_not_above_zero(fvec x) {
    const fvec lowest = fset(-87.0f);
    fvec n = fround(fmul(fmax_(x, lowest), fset(1.44269504f)));
    fvec r = ffnma(n, fset(0.693359375f), fmax_(x, lowest));
    r = ffnma(n, fset(-2.12194440e-4f), r);
    fvec sum = fset(1.0f / 5040);
    const float terms[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    for (int i = 0; i < 7; i++) sum = ffma(sum, r, fset(terms[i]));
    fvec power = fbits(ISHL(iadd(ftoi(n), iset(127)), 23));
    return fzero_unless_above(fmul(sum, power), x, lowest);
}

#endif
