/* GEMM with trellis-coded weights (EXL3): y = H (Qᵀ H (x suh)) svh, 16 × 16 weights decoded at a time.
 *
 * A work item is 128 output channels, one block of the Hadamard transform. A tile's 256 states are decoded in 16
 * vectors of 16: as `b` bits a weight make 16 weights `b` whole words, the states at one place of each such span
 * lie at the same shift, and no lane needs a shift of its own. A lane's weights belong to one output channel
 * (lane / 2, or 8 more), and two neighbouring lanes to inputs four apart. The sums of a row are in an order that
 * does not depend on the other rows. */
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#include "parallel.h"

enum { TILE = 16, SPANS = 16, BLOCK = 128, ROWS = 8, MAX_BITS = 8 };
enum { CODEBOOK_3INST, CODEBOOK_MCG, CODEBOOK_MUL1 };

typedef struct {
    const uint16_t *trellis; /* [in / 16][out / 16][16 bits] */
    const float *suh;        /* [in] */
    const float *svh;        /* [out] */
    const void *x;           /* [rows][stride], bfloat16 or float32 */
    const float *bias;       /* [out]; may be NULL */
    void *y;                 /* [rows][out] */
    int64_t rows, stride, in_features, out_features, bits, codebook, x_is_bf16, y_is_bf16, threads;
} TrellisCall;

typedef struct {
    const TrellisCall *call;
    const float *inputs; /* [rows][in / 16][PAIRS][2], transformed, in the order of `pair_input` */
    atomic_long next;
} TrellisJob;

enum { PAIRS = 8 };

/* The first of the two inputs, four apart, that vectors number `pair` and `pair` with the other columns take:
 * places 0 to 15 of a span are pair (place / 8 * 4 + place % 4), and columns 8 to 15 where place % 8 > 3. */
static int pair_input(int pair) { return pair / 4 * 2 + pair % 2 + pair % 4 / 2 * 8; }

static void hadamard(float *values) {
    for (int half = 1; half < BLOCK; half *= 2)
        for (int start = 0; start < BLOCK; start += 2 * half)
            for (int i = start; i < start + half; i++) {
                float sum = values[i] + values[i + half], difference = values[i] - values[i + half];
                values[i] = sum, values[i + half] = difference;
            }
    const float scale = 0.08838834764831845f; /* 1 / sqrt(128) */
    for (int i = 0; i < BLOCK; i++) values[i] *= scale;
}

static float from_bf16(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static uint16_t to_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, 4);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 64);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

static void transform_inputs(const TrellisCall *call, float *inputs) {
    for (int64_t row = 0; row < call->rows; row++) {
        for (int64_t first = 0; first < call->in_features; first += BLOCK) {
            float block[BLOCK];
            for (int i = 0; i < BLOCK; i++) {
                int64_t at = row * call->stride + first + i;
                float x = call->x_is_bf16 ? from_bf16(((const uint16_t *)call->x)[at]) : ((const float *)call->x)[at];
                block[i] = x * call->suh[first + i];
            }
            hadamard(block);
            float *out = inputs + row * call->in_features + first;
            for (int tile = 0; tile < BLOCK; tile += TILE)
                for (int pair = 0; pair < PAIRS; pair++)
                    for (int other = 0; other < 2; other++)
                        *out++ = block[tile + pair_input(pair) + 4 * other];
        }
    }
}

/* A float16 whose exponent is not the least, as float32 bits. */
static inline int32_t half_bits(uint32_t half) {
    return (int32_t)((half & 0x8000u) << 16 | ((half & 0x7fffu) << 13) + (112u << 23));
}

static inline float float_of(int32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* The nearest float16, ties to even, of a value that is zero or no subnormal one: what the codebook holds. */
static inline float as_half(float value) {
    int32_t bits;
    memcpy(&bits, &value, 4);
    return float_of((bits + 0xfff + (bits >> 13 & 1)) & ~0x1fff);
}

/* The values of 16 states. Their sums are exact in float32, so they are rounded once. */
static inline void decode(const uint32_t *restrict states, int codebook, float *restrict values) {
    if (codebook == CODEBOOK_MUL1) {
        for (int i = 0; i < SPANS; i++) {
            uint32_t x = states[i] * 0x83DCD12Du;
            x = (x & 0x00ff00ffu) + (x >> 8 & 0x00ff00ffu);
            int32_t sum = (int32_t)((x + (x >> 16)) & 0xffffu);
            /* float16 0x1eee, and 1024 of it and 0xc931 */
            values[i] = as_half(__builtin_fmaf((float)sum, 0.006767272949f, -3.453125f));
        }
        return;
    }
    const uint32_t factor = codebook == CODEBOOK_MCG ? 0xCBAC1FEDu : 89226354u;
    const uint32_t offset = codebook == CODEBOOK_MCG ? 0 : 64248484u;
    for (int i = 0; i < SPANS; i++) {
        uint32_t x = ((states[i] * factor + offset) & 0x8fff8fffu) ^ 0x3b603b60u;
        values[i] = as_half(float_of(half_bits(x & 0xffffu)) + float_of(half_bits(x >> 16)));
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

static void store_block(const TrellisCall *call, int64_t row, int64_t first, float sums[BLOCK / TILE][2][SPANS]) {
    float block[BLOCK];
    for (int i = 0; i < BLOCK; i++) {
        const float *lanes = sums[i / TILE][i % TILE / 8] + i % 8 * 2;
        block[i] = lanes[0] + lanes[1];
    }
    hadamard(block);
    for (int i = 0; i < BLOCK; i++) {
        float y = block[i] * call->svh[first + i];
        if (call->bias) y += call->bias[first + i];
        int64_t at = row * call->out_features + first + i;
        if (call->y_is_bf16) ((uint16_t *)call->y)[at] = to_bf16(y);
        else ((float *)call->y)[at] = y;
    }
}

static inline __attribute__((always_inline)) void block_of(const TrellisJob *job, int64_t block, int bits, int codebook) {
    const TrellisCall *call = job->call;
    const int64_t tiles_in = call->in_features / TILE, tiles_out = call->out_features / TILE;
    for (int64_t begin = 0; begin < call->rows; begin += ROWS) {
        const int64_t count = call->rows - begin < ROWS ? call->rows - begin : ROWS;
        float sums[ROWS][BLOCK / TILE][2][SPANS];
        memset(sums, 0, sizeof sums);
        for (int64_t tile_in = 0; tile_in < tiles_in; tile_in++)
            for (int64_t tile = 0; tile < BLOCK / TILE; tile++) {
                const int64_t at = tile_in * tiles_out + block * (BLOCK / TILE) + tile;
                float values[TILE][SPANS];
                decode_tile(call->trellis + at * 16 * bits, bits, codebook, values);
                for (int64_t row = 0; row < count; row++)
                    add_tile(values, job->inputs + ((begin + row) * tiles_in + tile_in) * TILE, sums[row][tile]);
            }
        for (int64_t row = 0; row < count; row++) store_block(call, begin + row, block * BLOCK, sums[row]);
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
int llmopt_trellis(const TrellisCall *call) {
    float *inputs = (float *)workspace(0, call->rows * call->in_features * (int64_t)sizeof(float));
    if (!inputs) return 1;
    transform_inputs(call, inputs);
    TrellisJob job = {.call = call, .inputs = inputs};
    run_parallel(multiply_blocks, &job, call->threads);
    return 0;
}
