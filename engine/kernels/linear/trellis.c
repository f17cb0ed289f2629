/* GEMM with trellis-coded weights (EXL3): y = H (Qᵀ H (x suh)) svh, 16 × 16 weights decoded at a time.
 *
 * A work item is 128 output channels, one block of the Hadamard transform. A tile's 256 states are decoded in 16
 * vectors of 16: as `b` bits a weight make 16 weights `b` whole words, the states at one place of each such span
 * lie at the same shift, and no lane needs a shift of its own. A lane's weights belong to one output channel
 * (lane / 2, or 8 more), and two neighbouring lanes to inputs four apart. The sums of a row are in an order that
 * does not depend on the other rows. */
#include <stdatomic.h>

#include "parallel.h"
#include "trellis.h"

enum { ROWS = 8 };

typedef struct {
    const HadamardCall *call;
    const float *inputs; /* [rows][in / 16][PAIRS][2], transformed, in the order of `pair_input` */
    atomic_long next;
} TrellisJob;

static void transform_inputs(const HadamardCall *call, float *inputs) {
    for (int64_t row = 0; row < call->rows; row++) {
        for (int64_t first = 0; first < call->in_features; first += BLOCK) {
            float block[BLOCK];
            transform_block(call, row, first, block);
            float *out = inputs + row * call->in_features + first;
            for (int tile = 0; tile < BLOCK; tile += TILE)
                for (int pair = 0; pair < PAIRS; pair++)
                    for (int other = 0; other < 2; other++)
                        *out++ = block[tile + pair_input(pair) + 4 * other];
        }
    }
}

/* A tile's values [place][span]. */
static inline void decode_tile(const uint16_t *restrict packed, int bits, int codebook, float values[TILE][SPANS]) {
    uint32_t words[MAX_BITS][SPANS]; /* of each span, with the word before in the upper half */
    uint32_t before = packed[16 * bits - 2]; /* the halves of a 32-bit word are swapped */
    for (int span = 0; span < SPANS; span++)
        for (int word = 0; word < bits; word++) {
            uint32_t now = packed[(span * bits + word) ^ 1];
            words[word][span] = before << 16 | now;
            before = now;
        }
    for (int place = 0; place < TILE; place++) {
        const int end = (place + 1) * bits, word = (end - 1) / 16, shift = 16 - ((end - 1) % 16 + 1);
        uint32_t states[SPANS];
        for (int i = 0; i < SPANS; i++) states[i] = words[word][i] >> shift & 0xffffu;
        decode(states, codebook, values[place]);
    }
}

static inline void add_tile(const float values[TILE][SPANS], const float *restrict inputs, float sums[2][SPANS]) {
    float first[SPANS], second[SPANS];
    memcpy(first, sums[0], sizeof first);
    memcpy(second, sums[1], sizeof second);
    for (int pair = 0; pair < PAIRS; pair++) {
        const int place = pair / 4 * 8 + pair % 4;
        float x[SPANS];
        for (int i = 0; i < SPANS; i++) x[i] = inputs[2 * pair + i % 2];
        for (int i = 0; i < SPANS; i++) first[i] = __builtin_fmaf(values[place][i], x[i], first[i]);
        for (int i = 0; i < SPANS; i++) second[i] = __builtin_fmaf(values[place + 4][i], x[i], second[i]);
    }
    memcpy(sums[0], first, sizeof first);
    memcpy(sums[1], second, sizeof second);
}

static void store_sums(const HadamardCall *call, int64_t row, int64_t first, float sums[BLOCK / TILE][2][SPANS]) {
    float block[BLOCK];
    for (int i = 0; i < BLOCK; i++) {
        const float *lanes = sums[i / TILE][i % TILE / 8] + i % 8 * 2;
        block[i] = lanes[0] + lanes[1];
    }
    store_block(call, row, first, block);
}

static inline __attribute__((always_inline)) void block_of(const TrellisJob *job, int64_t block, int bits, int codebook) {
    const HadamardCall *call = job->call;
    const int64_t tiles_in = call->in_features / TILE, tiles_out = call->out_features / TILE;
    for (int64_t begin = 0; begin < call->rows; begin += ROWS) {
        const int64_t count = call->rows - begin < ROWS ? call->rows - begin : ROWS;
        float sums[ROWS][BLOCK / TILE][2][SPANS];
        memset(sums, 0, sizeof sums);
        for (int64_t tile_in = 0; tile_in < tiles_in; tile_in++)
            for (int64_t tile = 0; tile < BLOCK / TILE; tile++) {
                const int64_t at = tile_in * tiles_out + block * (BLOCK / TILE) + tile;
                float values[TILE][SPANS];
                decode_tile((const uint16_t *)call->codes + at * 16 * bits, bits, codebook, values);
                for (int64_t row = 0; row < count; row++)
                    add_tile(values, job->inputs + ((begin + row) * tiles_in + tile_in) * TILE, sums[row][tile]);
            }
        for (int64_t row = 0; row < count; row++) store_sums(call, begin + row, block * BLOCK, sums[row]);
    }
}

static void multiply_blocks(void *argument) {
    TrellisJob *job = argument;
    const int codebook = (int)job->call->codebook, bits = (int)job->call->bits;
    for (;;) {
        int64_t block = atomic_fetch_add(&job->next, 1);
        if (block >= job->call->out_features / BLOCK) return;
        /* Known bits are decoded faster; each copy takes its time to compile. */
        if (codebook == CODEBOOK_MUL1 && bits == 2) block_of(job, block, 2, CODEBOOK_MUL1);
        else if (codebook == CODEBOOK_MUL1 && bits == 3) block_of(job, block, 3, CODEBOOK_MUL1);
        else if (codebook == CODEBOOK_MUL1 && bits == 4) block_of(job, block, 4, CODEBOOK_MUL1);
        else if (codebook == CODEBOOK_MUL1) block_of(job, block, bits, CODEBOOK_MUL1);
        else if (codebook == CODEBOOK_MCG) block_of(job, block, bits, CODEBOOK_MCG);
        else block_of(job, block, bits, CODEBOOK_3INST);
    }
}

/* 0, or 1 where memory ran out. */
int llmopt_trellis(const HadamardCall *call) {
    float *inputs = (float *)workspace(0, call->rows * call->in_features * (int64_t)sizeof(float));
    if (!inputs) return 1;
    transform_inputs(call, inputs);
    TrellisJob job = {.call = call, .inputs = inputs};
    run_parallel(multiply_blocks, &job, call->threads);
    return 0;
}
