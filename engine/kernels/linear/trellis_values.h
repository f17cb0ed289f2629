/* Decoding of trellis codes for integer GEMMs: 32 states at a time, of two tiles of neighbouring outputs.
 *
 * Codes are [word][tile][span]: a span of 16 weights is `bits` words of 16 bits, so that the states at one
 * place of all 32 spans lie at the same shift of a word and the word before it. Two neighbouring spans hold
 * weights of one output channel (span / 2, or 8 more in places 4 to 7 and 12 to 15) and of two inputs four
 * apart: a lane is a pair of inputs. */
#ifndef LLMOPT_TRELLIS_VALUES_H
#define LLMOPT_TRELLIS_VALUES_H

#include "trellis.h"
#include "words.h"

#if defined(HAS_AVX512FP16) && !defined(__clang__) && defined(__has_include)
#if __has_include(<avx512fp16intrin.h>)
#define HAS_HALVES 1
#pragma GCC target("avx512fp16")
#endif
#endif
#ifndef HAS_HALVES
#define HAS_HALVES 0
#endif

enum { PAIR_WORDS = 2 * SPANS, BLOCK_TILES = BLOCK / TILE, BLOCK_PAIRS = BLOCK_TILES / 2 };
enum { BLOCK_VALUES = BLOCK_TILES * TILE * PAIR_WORDS }; /* of 128 inputs and 32 outputs */
enum { PAIR_VECTORS = 16 / LANES };
/* States; mul1's product bytes, in registers or in matrix tiles, and their sums; values in units of 2^-13. */
enum { FORM_STATES, FORM_BYTES, FORM_TILES, FORM_SUMS, FORM_UNITS };

/* The states at one place of the spans, of which `now` are the words and `last` the last ones. */
INLINE ivec states_at(const int place, const int bits, const ivec *now, ivec before) {
    const int end = (place + 1) * bits, word = (end - 1) / 16, used = (end - 1) % 16 + 1;
    if (used == 16) return now[word];
    return wfunnel(word ? now[word - 1] : before, now[word], used);
}

INLINE void load_spans(const int bits, const uint16_t *codes, ivec *now) {
    for (int word = 0; word < bits; word++) {
        now[word] = iload(codes + word * PAIR_WORDS);
        __builtin_prefetch(codes + word * PAIR_WORDS + 1024);
    }
}

/* x = 0x83DCD12D s, whose four bytes make a value of mul1: its low words, and its high words. */
INLINE void product_words(ivec states, ivec *low, ivec *high) {
    *low = wmultiply_low(states, wset(0xD12D));
    *high = wadd(wmultiply_high(states, wset(0xD12D)), wmultiply_low(states, wset(0x83DC)));
}

/* The values of mul1 from byte sums, in units of 2^-13, rounded as float16 is. */
#if HAS_HALVES
INLINE ivec units_of_sums(ivec sums) {
    __m512h factor = (__m512h)wset(0x52ee), offset = (__m512h)wset(0xf6e8); /* 55.4375 and -28288 */
    return _mm512_cvtph_epi16(_mm512_fmadd_ph(_mm512_cvtepu16_ph(sums), factor, offset));
}
#endif

static inline int16_t units_of(float value) {
    const float shifter = 12582912.0f; /* 1.5 * 2^23: the sum's low bits are the nearest integer, ties to even */
    int32_t bits;
    value = value * 8192.0f + shifter;
    memcpy(&bits, &value, 4);
    return (int16_t)bits;
}

/* States to values in units of 2^-13, in place. */
static void convert_states(const int codebook, uint16_t *values) {
    for (int begin = 0; begin < BLOCK_VALUES; begin += SPANS) {
        uint32_t states[SPANS];
        float floats[SPANS];
        for (int i = 0; i < SPANS; i++) states[i] = values[begin + i];
        decode(states, codebook, floats);
        for (int i = 0; i < SPANS; i++) values[begin + i] = (uint16_t)units_of(floats[i]);
    }
}

/* 128 inputs of 32 outputs, int16 [tile][place][PAIR_WORDS]. */
INLINE void decode_pair(const int form, const int bits, const uint16_t *codes, uint16_t *values) {
    for (int tile = 0; tile < BLOCK_TILES; tile++)
        for (int v = 0; v < PAIR_VECTORS; v++) {
            ivec now[MAX_BITS];
            load_spans(bits, codes + tile * bits * PAIR_WORDS + v * 2 * LANES, now);
            ivec before = wrotate(now[bits - 1]);
#pragma GCC unroll 16
            for (int place = 0; place < TILE; place++) {
                ivec result = states_at(place, bits, now, before);
                if (form != FORM_STATES) {
                    ivec low, high;
                    product_words(result, &low, &high);
                    result = wadd(wsum_bytes(low), wsum_bytes(high));
                }
#if HAS_HALVES
                if (form == FORM_UNITS) result = units_of_sums(result);
#endif
                istore(values + (tile * TILE + place) * PAIR_WORDS + v * 2 * LANES, result);
            }
        }
}

/* The same in units of 2^-13. */
INLINE void decode_units(const int codebook, const int bits, const uint16_t *codes, uint16_t *values) {
    if (HAS_HALVES && codebook == CODEBOOK_MUL1) {
        decode_pair(FORM_UNITS, bits, codes, values);
        return;
    }
    decode_pair(FORM_STATES, bits, codes, values);
    if (codebook == CODEBOOK_MUL1) convert_states(CODEBOOK_MUL1, values);
    else if (codebook == CODEBOOK_MCG) convert_states(CODEBOOK_MCG, values);
    else convert_states(CODEBOOK_3INST, values);
}

#endif
