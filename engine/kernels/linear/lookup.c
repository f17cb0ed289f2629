/* Row lookup in packed weights: y [rows, in] = weight [ids], dequantized; a tied embedding of the LM head. */
#include <stdatomic.h>
#include <string.h>

#include "parallel.h"
#include "weight.h"

typedef struct {
    const Weight *weight;  /* integer codes, a table of 16 values or 16-bit floats */
    const int64_t *ids;    /* [rows], output channels of the weight */
    void *y;               /* [rows][in_features] */
    int64_t rows;
    int64_t is_bf16;       /* of y; else float32 */
    int64_t threads;
} LookupCall;

typedef struct {
    const LookupCall *call;
    atomic_long next;
} LookupJob;

/* The codes of one output channel in a chunk: each word has four input channels. */
static void channel_codes(const Weight *w, const uint8_t *chunk, int64_t channel, uint32_t words[QUADS]) {
    int shift = 0;
    int64_t bits = w->bits;
    if (w->kind == CODES_LATTICE) { /* of all channels, since they share vectors */
        uint8_t bytes[CHUNK * PANEL];
        lattice_chunks(&w->lattice, chunk, 1, bytes);
        for (int q = 0; q < QUADS; q++) memcpy(words + q, bytes + q * QUAD_BYTES + channel * 4, 4);
        return;
    }
    memset(words, 0, QUADS * sizeof(uint32_t));
    for (int width = 8; width; width /= 2) {
        if (!(bits & width)) continue;
        int quads = 8 / width; /* that share a byte */
        uint32_t mask = 0x01010101u * ((1u << width) - 1);
        for (int row = 0; row < width; row++, chunk += QUAD_BYTES) {
            uint32_t word;
            memcpy(&word, chunk + channel * 4, 4);
            for (int i = 0; i < quads; i++) words[row * quads + i] |= (word >> (width * i) & mask) << shift;
        }
        shift += width;
    }
}

/* One output channel of 16-bit floats in a chunk, widened. */
static void channel_halves(const Weight *w, const uint8_t *chunk, int64_t channel, float values[CHUNK]) {
    for (int k = 0; k < CHUNK; k++) {
        uint16_t lanes[LANES] = {0};
        float wide[LANES];
        memcpy(lanes, chunk + (k * PANEL + channel) * 2, 2);
        fstore(wide, fload_half(w->kind == CODES_BF16, lanes));
        values[k] = wide[0];
    }
}

/* One output channel of codes in chunk `c`, dequantized; `count`: the input channels that there are. */
static void channel_values(const Weight *w, const uint8_t *chunk, int64_t panel, int64_t channel, int64_t c,
                           int64_t count, float values[CHUNK]) {
    const int own_offsets = has_own_offsets(w);
    float scales[PANEL], offsets[PANEL];
    uint32_t words[QUADS];
    channel_codes(w, chunk, channel, words);
    for (int64_t k = 0, held = -1; k < count; k++) {
        int64_t group = (c * CHUNK + k) / w->group;
        if (group != held) group_scales(w, panel, held = group, 0, scales, offsets);
        uint32_t code = words[k / 4] >> (8 * (k % 4)) & 255;
        float value = w->kind == CODES_TABLE ? w->table[code] : (float)code;
        if (!own_offsets && w->kind != CODES_TABLE) value -= (float)w->base;
        values[k] = value * scales[channel] - (own_offsets ? offsets[channel] : 0.0f);
    }
}

static void lookup_row(const LookupCall *call, int64_t row) {
    const Weight *w = call->weight;
    int64_t panel = call->ids[row] / PANEL, channel = call->ids[row] % PANEL;
    for (int64_t c = 0; c < num_chunks(w); c++) {
        const uint8_t *chunk = w->codes + (panel * num_chunks(w) + c) * chunk_bytes(w);
        int64_t left = w->in_features - c * CHUNK, count = left < CHUNK ? left : CHUNK;
        float values[CHUNK] = {0};
        if (is_half(w)) channel_halves(w, chunk, channel, values);
        else channel_values(w, chunk, panel, channel, c, count, values);
        int64_t at = row * w->in_features + c * CHUNK;
        if (!call->is_bf16) {
            memcpy((float *)call->y + at, values, (size_t)count * sizeof(float));
            continue;
        }
        uint16_t halves[CHUNK];
        store_bf16(halves, values, CHUNK);
        memcpy((uint16_t *)call->y + at, halves, (size_t)count * sizeof(uint16_t));
    }
}

static void lookup_rows(void *argument) {
    LookupJob *job = argument;
    for (;;) {
        int64_t row = atomic_fetch_add(&job->next, 1);
        if (row >= job->call->rows) return;
        lookup_row(job->call, row);
    }
}

int llmopt_lookup(const LookupCall *call) {
    LookupJob job = {.call = call};
    run_parallel(lookup_rows, &job, call->rows < 64 ? 1 : call->threads);
    return 0;
}
