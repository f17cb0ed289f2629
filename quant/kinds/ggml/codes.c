/* Codes of ggml's blocks as bytes, in the order of the weights. */
#include <stdatomic.h>
#include <stdint.h>

#include "codes.h"
#include "parallel.h"

#define BLOCKS_AT_ONCE 256

typedef struct {
    const uint8_t *data; /* [count][blocks.size] */
    uint8_t *codes;      /* [count][blocks.runs][RUN] */
    Blocks blocks;
    int64_t count, threads;
    atomic_long next;    /* block */
} CodesCall;

static void unpack_blocks(void *argument) {
    CodesCall *c = argument;
    int64_t size = c->blocks.size, runs = c->blocks.runs;
    for (;;) {
        int64_t begin = atomic_fetch_add(&c->next, BLOCKS_AT_ONCE);
        if (begin >= c->count) return;
        for (int64_t b = begin; b < begin + BLOCKS_AT_ONCE && b < c->count; b++)
            for (int r = 0; r < runs; r++)
                run_codes(&c->blocks, c->data + b * size, r, c->codes + (b * runs + r) * RUN);
    }
}

void llmopt_codes(CodesCall *c) { run_parallel(unpack_blocks, c, c->threads); }
