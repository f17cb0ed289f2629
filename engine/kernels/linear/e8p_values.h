/* Decoding of E8P codes to bytes, 64 codes at a time: of 16 outputs and of 4 × 8 inputs.
 *
 * Vectors of codes hold four of each output, of 8 inputs each that follow one another. Vector number c of the
 * decoded ones has weight c of each code: a lane is four inputs of one output, 8 apart, as a dot product
 * takes them where the inputs are in that order (`place_of`).
 *
 * Coordinates of E8P are odd multiples of 1/4 up to 11/4; in these units, and 12 more, they are bytes. Those
 * of E8 are multiples of 1/2 up to 2; in these units and 4 more. A pattern's magnitudes have two bits each,
 * and make two bytes: tables[0] of channels 0, 1, 4, 5, tables[1] of 2, 3, 6, 7; that of channel c is in the
 * upper nibble where c > 3. The sign bits are of channels 3, 1, 0, 2, then the shift's, then 5, 4, 6: channel
 * 7 has none, as the sum of magnitudes tells it. */
#ifndef LLMOPT_E8P_VALUES_H
#define LLMOPT_E8P_VALUES_H

#include "hadamard.h"

#include "bytes.h"

enum { OUTPUTS = 16, GROUP = 32, CODES = 64, CHANNELS = 8 }; /* a group: inputs of a vector of codes */
enum { GROUPS = BLOCK / GROUP, BLOCK_VECTORS = GROUPS * CHANNELS };
enum { E8P, E8 };
enum { E8P_ZERO = 12, E8_ZERO = 4 };

/* By a nibble: the magnitude, two bits; whether it is negative; whether 1/4 is taken away. */
static const uint8_t e8p_values[64] __attribute__((aligned(64))) = {
#define E8P_SIGNS 15, 19, 23, 13, 11, 7, 3, 13, 13, 17, 21, 11, 9, 5, 1, 11
    E8P_SIGNS, E8P_SIGNS, E8P_SIGNS, E8P_SIGNS};

/* By a nibble: 0x40 where its bits have an odd sum. */
static const uint8_t odd_sums[64] __attribute__((aligned(64))) = {
#define ODD_SUMS 0, 64, 64, 0, 64, 0, 0, 64, 64, 0, 0, 64, 0, 64, 64, 0
    ODD_SUMS, ODD_SUMS, ODD_SUMS, ODD_SUMS};

INLINE ivec bset(uint8_t x) { return iset((int32_t)(x * 0x01010101u)); }

/* Where an input's byte lies among those of its group. */
static inline int place_of(int input) { return input % CHANNELS * 4 + input / CHANNELS; }

/* Bytes of codes at `kind`, of a vector: patterns and signs, or the points of E8. */
INLINE int64_t code_bytes(const int kind) { return kind == E8P ? 2 * CODES : CODES; }

/* Codes of which `codes` has the first bytes as `values` [CHANNELS], plus E8P_ZERO or E8_ZERO. */
INLINE void decode_codes(const int kind, const uint8_t *tables, const uint8_t *codes, ivec *values) {
    if (kind == E8) {
        const ivec points = iload(codes), nibble = bset(15);
        for (int c = 0; c < CHANNELS / 2; c++) {
            ivec both = ilook_256(tables + (2 + c) * 256, points);
            values[c] = iand(both, nibble), values[c + 4] = iand(ISHR(both, 4), nibble);
        }
        return;
    }
    const ivec pattern = iload(codes), signs = iload(codes + CODES);
    const ivec low = ilook_256(tables, pattern), high = ilook_256(tables + 256, pattern);
    ivec odd = ixor(iand(signs, bset(0xef)), iand(ixor(low, high), bset(0x55)));
    odd = ilook_nibbles(odd_sums, ixor(odd, ISHR(odd, 4)));
    const ivec shift = ichoose(bset(0x80), ISHL(signs, 3), ISHR(signs, 1));
    const ivec last = ichoose(bset(0x40), odd, ISHL(signs, 2));
    const ivec magnitudes[] = {low, ISHR(low, 2), high, ISHR(high, 2)};
    const ivec minus[] = {signs, ISHL(signs, 1), ISHR(signs, 1), last};
    for (int c = 0; c < CHANNELS / 2; c++) {
        ivec both = ichoose(bset(0x88), shift, ichoose(bset(0x33), magnitudes[c], minus[c]));
        values[c] = ilook_nibbles(e8p_values, both), values[c + 4] = ilook_nibbles(e8p_values, ISHR(both, 4));
    }
}

#endif
