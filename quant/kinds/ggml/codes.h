/* Codes of ggml's blocks as bytes, in the order of the weights, a run of 32 at a time. */
#ifndef LLMOPT_CODES_H
#define LLMOPT_CODES_H

#include <stdint.h>
#include <string.h>

#define RUN 32
#define K_RUNS 8 /* of a block of 256 weights; others are one run */

enum { HALVES = 0, HALVES_5 = 1, SIGNED_8 = 2, K4 = 3, K5 = 4, K6 = 5, K2 = 6, K3 = 7 };

typedef struct {
    int64_t size, runs;  /* bytes and runs of a block */
    int64_t layout;      /* one of the above */
    int64_t at;          /* byte of the block where the low bits of its codes begin */
} Blocks;

typedef uint8_t Bytes16 __attribute__((vector_size(16)));

/* 16 low nibbles, then the 16 high ones. */
static inline void halves(const uint8_t *from, uint8_t *to) {
    Bytes16 bytes, low, high;
    memcpy(&bytes, from, 16);
    low = bytes & 15, high = bytes >> 4;
    memcpy(to, &low, 16);
    memcpy(to + 16, &high, 16);
}

/* Bits of 32 bytes from `shift` up. */
static inline void field(const uint8_t *restrict from, int shift, int mask, uint8_t *restrict to) {
    for (int i = 0; i < RUN; i++) to[i] = from[i] >> shift & mask;
}

/* The same, above the `below` bits that `to` has. */
static inline void add_field(const uint8_t *restrict from, int shift, int mask, int below,
                             uint8_t *restrict to) {
    for (int i = 0; i < RUN; i++) to[i] |= (uint8_t)((from[i] >> shift & mask) << below);
}

/* The bits of a byte, above the `below` bits that eight codes have. */
static inline void add_bits(uint64_t byte, int below, uint8_t *to) {
    uint64_t codes, each = byte * 0x0101010101010101 & 0x8040201008040201; /* bit i of byte i */
    memcpy(&codes, to, 8);
    codes |= (each + 0x7f7f7f7f7f7f7f7f >> 7 & 0x0101010101010101) << below;
    memcpy(to, &codes, 8);
}

static inline void run_codes(const Blocks *b, const uint8_t *block, int r, uint8_t *to) {
    const uint8_t *low = block + b->at;
    int half = r / 4, part = r % 4; /* of 256 weights */
    switch (b->layout) {
    case HALVES: halves(low + 16 * r, to); break;
    case HALVES_5:
        halves(low, to);
        for (int i = 0; i < RUN / 8; i++) add_bits(low[i - 4], 4, to + 8 * i);
        break;
    case SIGNED_8:
        for (int i = 0; i < RUN; i++) to[i] = low[i] ^ 128;
        break;
    case K4: field(low + r / 2 * 32, r % 2 * 4, 15, to); break;
    case K5:
        field(low + r / 2 * 32, r % 2 * 4, 15, to);
        add_field(block + 16, r, 1, 4, to);
        break;
    case K6:
        field(low + half * 64 + part % 2 * 32, part / 2 * 4, 15, to);
        add_field(block + 128 + half * 32, 2 * part, 3, 4, to);
        break;
    case K2: field(low + half * 32, 2 * part, 3, to); break;
    default:
        field(low + half * 32, 2 * part, 3, to);
        add_field(block, r, 1, 2, to);
        break;
    }
}

#endif
