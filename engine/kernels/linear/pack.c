/* Weight packing: from one byte per code to the layout that weight.h describes. */
#include <stdatomic.h>
#include <string.h>

#include "parallel.h"
#include "weight.h"

typedef struct {
    const uint8_t *codes;  /* [out_features][in_features] */
    uint8_t *packed;       /* [panels][chunks][bits][QUAD_BYTES] */
    int64_t out_features, in_features, bits, threads;
    atomic_long next;      /* panel */
} PackCall;

/* A chunk of a panel: words[o] are the eight quads of output channel o. */
static void pack_chunk(uint32_t words[PANEL][QUADS], int64_t bits, uint32_t *packed) {
    int shift = 0;
    for (int width = 8; width; width /= 2) {
        if (!(bits & width)) continue;
        int quads = 8 / width; /* that share a byte */
        uint32_t mask = 0x01010101u * ((1u << width) - 1);
        for (int row = 0; row < width; row++, packed += PANEL)
            for (int o = 0; o < PANEL; o++) {
                uint32_t word = 0;
                for (int i = 0; i < quads; i++)
                    word |= (words[o][row * quads + i] >> shift & mask) << (width * i);
                packed[o] = word;
            }
        shift += width;
    }
}

static void pack_panels(void *argument) {
    PackCall *c = argument;
    int64_t chunks = (c->in_features + CHUNK - 1) / CHUNK;
    int64_t size = c->bits * QUAD_BYTES;
    for (;;) {
        int64_t panel = atomic_fetch_add(&c->next, 1), first = panel * PANEL;
        if (first >= c->out_features) return;
        int64_t rows = c->out_features - first < PANEL ? c->out_features - first : PANEL;
        for (int64_t chunk = 0; chunk < chunks; chunk++) {
            uint32_t words[PANEL][QUADS] = {0};
            int64_t left = c->in_features - chunk * CHUNK;
            for (int64_t o = 0; o < rows; o++)
                memcpy(words[o], c->codes + (first + o) * c->in_features + chunk * CHUNK,
                       (size_t)(left < CHUNK ? left : CHUNK));
            pack_chunk(words, c->bits, (uint32_t *)(c->packed + (panel * chunks + chunk) * size));
        }
    }
}

void llmopt_pack(PackCall *c) { run_parallel(pack_panels, c, c->threads); }
