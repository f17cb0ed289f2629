/* Operations on vectors of 16-bit words, two in each lane of vectors.h, and dot products of their pairs. */
#ifndef LLMOPT_WORDS_H
#define LLMOPT_WORDS_H

#include "vectors.h"

#if defined(__AVX512F__)

/* The upper words of (before:now) << left, left of 1 to 15. */
INLINE ivec wfunnel(ivec before, ivec now, const int left) {
#if defined(__AVX512VBMI2__)
    return _mm512_shldv_epi16(before, now, _mm512_set1_epi16((short)left));
#else
    return ior(_mm512_slli_epi16(before, (unsigned)left), _mm512_srli_epi16(now, (unsigned)(16 - left)));
#endif
}
INLINE ivec wset(uint16_t x) { return _mm512_set1_epi16((short)x); }
INLINE ivec wadd(ivec a, ivec b) { return _mm512_add_epi16(a, b); }
INLINE ivec wmultiply_low(ivec a, ivec b) { return _mm512_mullo_epi16(a, b); }
INLINE ivec wmultiply_high(ivec a, ivec b) { return _mm512_mulhi_epu16(a, b); }
/* The sum of both bytes of each word. */
INLINE ivec wsum_bytes(ivec v) { return _mm512_maddubs_epi16(v, _mm512_set1_epi8(1)); }
/* Each word from the place before, in circles of 16. */
INLINE ivec wrotate(ivec v) {
    ivec halves = _mm512_shuffle_i64x2(v, v, 0xb1);
    return _mm512_alignr_epi8(v, halves, 14);
}
/* Dot products of two signed words in every lane, added to `sum`. */
INLINE ivec dot2(ivec sum, ivec a, ivec b) {
    __asm__("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(a), "v"(b));
    return sum;
}

#elif defined(__AVX2__)

INLINE ivec wfunnel(ivec before, ivec now, const int left) {
    return ior(_mm256_slli_epi16(before, left), _mm256_srli_epi16(now, 16 - left));
}
INLINE ivec wset(uint16_t x) { return _mm256_set1_epi16((short)x); }
INLINE ivec wadd(ivec a, ivec b) { return _mm256_add_epi16(a, b); }
INLINE ivec wmultiply_low(ivec a, ivec b) { return _mm256_mullo_epi16(a, b); }
INLINE ivec wmultiply_high(ivec a, ivec b) { return _mm256_mulhi_epu16(a, b); }
INLINE ivec wsum_bytes(ivec v) { return _mm256_maddubs_epi16(v, _mm256_set1_epi8(1)); }
INLINE ivec wrotate(ivec v) { return _mm256_alignr_epi8(v, _mm256_permute4x64_epi64(v, 0x4e), 14); }
INLINE ivec dot2(ivec sum, ivec a, ivec b) {
#if defined(__AVXVNNI__)
    return _mm256_dpwssd_avx_epi32(sum, a, b);
#else
    return iadd(sum, _mm256_madd_epi16(a, b));
#endif
}

#else /* NEON */

#define U16(v) vreinterpretq_u16_u32(v)
#define OF_U16(v) vreinterpretq_u32_u16(v)
#define EACH_U16(expression_a, expression_b) ((ivec){OF_U16(expression_a), OF_U16(expression_b)})

INLINE uint16x8_t funnel_8(uint32x4_t before, uint32x4_t now, int left) {
    return vorrq_u16(vshlq_u16(U16(before), vdupq_n_s16((int16_t)left)),
                     vshlq_u16(U16(now), vdupq_n_s16((int16_t)(left - 16))));
}
INLINE ivec wfunnel(ivec before, ivec now, const int left) {
    return EACH_U16(funnel_8(before.a, now.a, left), funnel_8(before.b, now.b, left));
}
INLINE ivec wset(uint16_t x) { return EACH_U16(vdupq_n_u16(x), vdupq_n_u16(x)); }
INLINE ivec wadd(ivec a, ivec b) {
    return EACH_U16(vaddq_u16(U16(a.a), U16(b.a)), vaddq_u16(U16(a.b), U16(b.b)));
}
INLINE ivec wmultiply_low(ivec a, ivec b) {
    return EACH_U16(vmulq_u16(U16(a.a), U16(b.a)), vmulq_u16(U16(a.b), U16(b.b)));
}
INLINE uint16x8_t multiply_high_8(uint16x8_t a, uint16x8_t b) {
    uint32x4_t low = vmull_u16(vget_low_u16(a), vget_low_u16(b)), high = vmull_high_u16(a, b);
    return vuzp2q_u16(U16(low), U16(high));
}
INLINE ivec wmultiply_high(ivec a, ivec b) {
    return EACH_U16(multiply_high_8(U16(a.a), U16(b.a)), multiply_high_8(U16(a.b), U16(b.b)));
}
INLINE ivec wsum_bytes(ivec v) {
    return EACH_U16(vpaddlq_u8(vreinterpretq_u8_u32(v.a)), vpaddlq_u8(vreinterpretq_u8_u32(v.b)));
}
INLINE ivec wrotate(ivec v) {
    return EACH_U16(vextq_u16(U16(v.b), U16(v.a), 7), vextq_u16(U16(v.a), U16(v.b), 7));
}
INLINE uint32x4_t dot2_half(uint32x4_t sum, uint32x4_t a, uint32x4_t b) {
    int16x8_t x = vreinterpretq_s16_u32(a), y = vreinterpretq_s16_u32(b);
    int32x4_t low = vmull_s16(vget_low_s16(x), vget_low_s16(y)), high = vmull_high_s16(x, y);
    return vaddq_u32(sum, U32(vpaddq_s32(low, high)));
}
INLINE ivec dot2(ivec sum, ivec a, ivec b) {
    return (ivec){dot2_half(sum.a, a.a, b.a), dot2_half(sum.b, a.b, b.b)};
}

#endif

#endif
