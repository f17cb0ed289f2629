/* Operations on vectors of bytes, four in each lane of vectors.h: choices of bits, and tables. */
#ifndef LLMOPT_BYTES_H
#define LLMOPT_BYTES_H

#include "vectors.h"

enum { VECTOR_BYTES = 4 * LANES };

/* The bits of `a` where `mask` has ones, else those of `b`. */
INLINE ivec ichoose(ivec mask, ivec a, ivec b) {
#if defined(__AVX512F__)
    return _mm512_ternarylogic_epi32(mask, a, b, 0xca);
#else
    return ixor(b, iand(mask, ixor(a, b)));
#endif
}

#if defined(__AVX512VBMI__)
/* table[low four bits of each byte]; the table is four times the same 16 bytes. */
INLINE ivec ilook_nibbles(const uint8_t *table, ivec v) { return _mm512_permutexvar_epi8(v, iload(table)); }

/* table[each byte], of 256 */
INLINE ivec ilook_256(const uint8_t *table, ivec v) {
    ivec low = _mm512_permutex2var_epi8(iload(table), v, iload(table + 64));
    ivec high = _mm512_permutex2var_epi8(iload(table + 128), v, iload(table + 192));
    return _mm512_mask_blend_epi8(_mm512_movepi8_mask(v), low, high);
}
#else
INLINE ivec ilook_nibbles(const uint8_t *table, ivec v) { return ilook_bytes(table, iand(v, iset(0x0f0f0f0f))); }

INLINE ivec ilook_256(const uint8_t *table, ivec v) {
    uint8_t bytes[VECTOR_BYTES];
    istore(bytes, v);
    for (int i = 0; i < VECTOR_BYTES; i++) bytes[i] = table[bytes[i]];
    return iload(bytes);
}
#endif

#endif
