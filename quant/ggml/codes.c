/* Codes of ggml's blocks as bytes, in the order of the weights, a run of 32 at a time. */
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#include "parallel.h"

#define RUN 32
#define BLOCKS_AT_ONCE 256

enum { HALVES = 0, HALVES_5 = 1, SIGNED_8 = 2, K4 = 3, K5 = 4, K6 = 5, K2 = 6, K3 = 7 };

typedef struct {
    const uint8_t *data; /* [blocks][size] */
    uint8_t *codes;      /* [blocks][runs][RUN] */
    int64_t blocks, size, runs;
    int64_t layout;      /* one of the above */
    int64_t at;          /* byte of the block where the low bits of its codes begin */
    int64_t threads;
    atomic_long next;    /* block */
} CodesCall;

/* 16 low nibbles, then the 16 high ones. */
static void halves(const uint8_t *low, uint8_t *to) {
    for (int i = 0; i < 16; i++) to[i] = low[i] & 15;
    for (int i = 0; i < 16; i++) to[16 + i] = low[i] >> 4;
}

/* Bits of 32 bytes from `shift` up. */
static void field(const uint8_t *from, int shift, int mask, uint8_t *to) {
    for (int i = 0; i < RUN; i++) to[i] = from[i] >> shift & mask;
}

/* The same, above the `below` bits that `to` has. */
static void add_field(const uint8_t *from, int shift, int mask, int below, uint8_t *to) {
    for (int i = 0; i < RUN; i++) to[i] |= (uint8_t)((from[i] >> shift & mask) << below);
}

static void run_codes(const CodesCall *c, const uint8_t *block, int r, uint8_t *to) {
    const uint8_t *low = block + c->at;
    int half = r / 4, part = r % 4; /* of 256 weights: eight runs */
    uint32_t bits;
    switch (c->layout) {
    case HALVES: halves(low + 16 * r, to); break;
    case HALVES_5:
        halves(low, to);
        memcpy(&bits, low - 4, 4);
        for (int i = 0; i < RUN; i++) to[i] |= (uint8_t)((bits >> i & 1) << 4);
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

static void unpack_blocks(void *argument) {
    CodesCall *c = argument;
    for (;;) {
        int64_t begin = atomic_fetch_add(&c->next, BLOCKS_AT_ONCE);
        if (begin >= c->blocks) return;
        for (int64_t b = begin; b < begin + BLOCKS_AT_ONCE && b < c->blocks; b++)
            for (int r = 0; r < c->runs; r++)
                run_codes(c, c->data + b * c->size, r, c->codes + (b * c->runs + r) * RUN);
    }
}

void llmopt_codes(CodesCall *c) { run_parallel(unpack_blocks, c, c->threads); }
