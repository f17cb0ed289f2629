/* Weight packing: from one byte per code, ggml's blocks or 16-bit floats, to the layout that weight.h describes. */
#include <stdatomic.h>
#include <string.h>

#include "../quant/kinds/ggml/codes.h"
#include "parallel.h"
#include "weight.h"

typedef struct {
    const uint8_t *codes;  /* [out_features][in_features], of bytes or 16-bit floats; or as many blocks */
    uint8_t *packed;       /* [panels][chunks][bits][QUAD_BYTES] */
    Blocks blocks;         /* of no runs: bytes */
    int64_t out_features, in_features, bits, threads;
    atomic_long next;      /* panel */
} PackCall;

#define CHUNKS_AT_ONCE 8 /* of an output channel: those of a panel fit L1 */

/* The codes of a chunk of an output channel, as its quads: of blocks, a run. */
INLINE void read_chunk(const PackCall *c, const uint8_t *row, int64_t chunk, uint32_t quads[QUADS]) {
    const Blocks *b = &c->blocks;
    if (b->runs == 1) {
        run_codes(b, row + chunk * b->size, 0, (uint8_t *)quads);
        return;
    }
    if (b->runs) {
        run_codes(b, row + chunk / K_RUNS * b->size, (int)(chunk % K_RUNS), (uint8_t *)quads);
        return;
    }
    int64_t left = c->in_features - chunk * CHUNK;
    if (left >= CHUNK) memcpy(quads, row + chunk * CHUNK, CHUNK);
    else memcpy(quads, row + chunk * CHUNK, (size_t)left);
}

/* The bit planes of a chunk of a panel. */
INLINE void pack_chunk(uint32_t quads[QUADS][PANEL], int bits, uint32_t *packed) {
    int shift = 0;
    for (int width = 8; width; width /= 2) {
        if (!(bits & width)) continue;
        int shared = 8 / width; /* quads that share a byte */
        uint32_t mask = 0x01010101u * ((1u << width) - 1);
        for (int row = 0; row < width; row++, packed += PANEL)
            for (int o = 0; o < PANEL; o++) {
                uint32_t word = 0;
                for (int i = 0; i < shared; i++)
                    word |= (quads[row * shared + i][o] >> shift & mask) << (width * i);
                packed[o] = word;
            }
        shift += width;
    }
}

INLINE void pack_panel(const PackCall *c, int64_t panel, int bits) {
    int64_t chunks = ceil_div(c->in_features, CHUNK), words = bits * PANEL;
    int64_t rows = c->out_features - panel * PANEL, row_bytes = c->in_features;
    if (c->blocks.runs) row_bytes = c->in_features / (c->blocks.runs * RUN) * c->blocks.size;
    const uint8_t *codes = c->codes + panel * PANEL * row_bytes;
    uint32_t *packed = (uint32_t *)c->packed + panel * chunks * words;
    uint32_t quads[CHUNKS_AT_ONCE][QUADS][PANEL] = {0};
    for (int64_t begin = 0; begin < chunks; begin += CHUNKS_AT_ONCE) {
        int64_t count = chunks - begin < CHUNKS_AT_ONCE ? chunks - begin : CHUNKS_AT_ONCE;
        for (int64_t o = 0; o < PANEL && o < rows; o++)
            for (int64_t k = 0; k < count; k++) {
                uint32_t own[QUADS] = {0};
                read_chunk(c, codes + o * row_bytes, begin + k, own);
                for (int q = 0; q < QUADS; q++) quads[k][q][o] = own[q];
            }
        for (int64_t k = 0; k < count; k++)
            pack_chunk(quads[k], bits, packed + (begin + k) * words);
    }
}

static void pack_halves(const PackCall *c, int64_t panel) {
    const int64_t channels = ceil_div(c->in_features, CHUNK) * CHUNK;
    const uint16_t *from = (const uint16_t *)c->codes + panel * PANEL * c->in_features;
    uint16_t *to = (uint16_t *)c->packed + panel * channels * PANEL;
    const int64_t left = c->out_features - panel * PANEL, rows = left < PANEL ? left : PANEL;
    if (rows < PANEL) memset(to, 0, (size_t)(channels * PANEL) * sizeof(uint16_t));
    memset(to + c->in_features * PANEL, 0, (size_t)((channels - c->in_features) * PANEL) * sizeof(uint16_t));
    for (int64_t k = 0; k < c->in_features; k += CHUNK) {
        const int64_t end = c->in_features - k < CHUNK ? c->in_features : k + CHUNK;
        for (int64_t o = 0; o < rows; o++)
            for (int64_t i = k; i < end; i++) to[i * PANEL + o] = from[o * c->in_features + i];
    }
}

static void pack_panels(void *argument) {
    PackCall *c = argument;
    for (;;) {
        int64_t panel = atomic_fetch_add(&c->next, 1);
        if (panel * PANEL >= c->out_features) return;
        switch (c->bits) { /* so that the compiler unrolls the common ones */
        case 4: pack_panel(c, panel, 4); break;
        case 5: pack_panel(c, panel, 5); break;
        case 6: pack_panel(c, panel, 6); break;
        case 8: pack_panel(c, panel, 8); break;
        case 16: pack_halves(c, panel); break;
        default: pack_panel(c, panel, (int)c->bits); break;
        }
    }
}

void llmopt_pack(PackCall *c) { run_parallel(pack_panels, c, c->threads); }

/* Indexes scales by value. */
typedef struct {
    const uint16_t *scales; /* float16, [rows][columns] at these strides */
    int64_t rows, columns, row_stride, column_stride;
    uint8_t *indices;       /* [rows][columns] */
    uint16_t *values;       /* [256], in the order in which they come */
} IndexCall;

/* How many values there are; 257: more than bytes tell apart, after as many scales as that took. */
int64_t llmopt_index_scales(IndexCall *c) {
    static _Thread_local uint16_t index_of[1 << 16]; /* plus one; 0: not seen */
    int64_t count = 0;
    uint8_t *to = c->indices;
    for (int64_t row = 0; row < c->rows && count <= 256; row++) {
        const uint16_t *from = c->scales + row * c->row_stride;
        for (int64_t column = 0; column < c->columns; column++) {
            uint16_t *index = &index_of[from[column * c->column_stride]];
            if (!*index) {
                if (count++ == 256) break;
                c->values[count - 1] = from[column * c->column_stride];
                *index = (uint16_t)count;
            }
            *to++ = (uint8_t)(*index - 1);
        }
    }
    for (int64_t i = 0; i < (count < 256 ? count : 256); i++) index_of[c->values[i]] = 0;
    return count;
}
