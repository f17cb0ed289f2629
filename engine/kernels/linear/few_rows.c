/* Few rows times a bfloat16 weight in oneDNN's layout, [blocks][pairs of inputs][block][2]: y = x @ weight.T.
 *
 * Decode waits for the weight, and for threads: oneDNN's own take turns with those of the kernels around it.
 * Sums are floats; a row's order of them does not depend on the other rows. */
#include <stdatomic.h>

#include "parallel.h"
#include "vectors.h"

enum { AT_ONCE = 4, WIDEST = 64, AHEAD_BYTES = 4096 };

typedef struct {
    const uint32_t *weight; /* [blocks][pairs][block], two bfloat16 each */
    const uint16_t *x;      /* [rows][x_stride] */
    uint16_t *y;            /* [rows][out_features] */
    int64_t block, pairs;   /* pairs: with the padding */
    int64_t out_features, in_features; /* in_features: even */
    int64_t rows, x_stride, threads;
} Call;

typedef struct {
    const Call *call;
    atomic_long next;
    atomic_int differs;
} Job;

static inline int64_t num_blocks(const Call *call) {
    return (call->out_features + call->block - 1) / call->block;
}

/* Output channels of a block, without the padding. */
static inline int64_t channels_of(const Call *call, int64_t block) {
    const int64_t left = call->out_features - block * call->block;
    return left < call->block ? left : call->block;
}

/* sum + both products of two pairs of bfloat16 in every lane. */
INLINE fvec add_products(fvec sum, ivec a, ivec b) {
#if HAS_PAIRS
    return multiply_add(sum, a, b, 1);
#else
    const ivec high = iset((int32_t)0xffff0000);
    sum = ffma(fbits(ISHL(a, 16)), fbits(ISHL(b, 16)), sum);
    return ffma(fbits(iand(a, high)), fbits(iand(b, high)), sum);
#endif
}

/* Some rows times `vectors` of the output channels of a block. */
INLINE void multiply(const Call *call, const uint32_t *weight, const uint16_t *x, const int vectors,
                     const int rows, float *sums) {
    fvec sum[AT_ONCE][4];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) sum[r][v] = fset(0.0f);
    for (int64_t k = 0; k < call->in_features; k += 2) {
        for (int v = 0; v < vectors; v++) {
            const uint32_t *from = weight + v * LANES;
            __builtin_prefetch((const uint8_t *)from + AHEAD_BYTES);
            const ivec pairs = iload(from);
            for (int r = 0; r < rows; r++)
                sum[r][v] = add_products(sum[r][v], pairs, ibroadcast(x + r * call->x_stride + k));
        }
        weight += call->block;
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) fstore(sums + r * WIDEST + v * LANES, sum[r][v]);
}

static void multiply_block(const Call *call, int64_t block, int64_t row, int rows) {
    const uint32_t *weight = call->weight + block * call->pairs * call->block;
    const uint16_t *x = call->x + row * call->x_stride;
    float sums[AT_ONCE * WIDEST];
    for (int64_t at = 0; at < call->block; at += 4 * LANES) {
        const int64_t left = (call->block - at) / LANES;
        const int vectors = left < 4 ? (int)left : 4;
        /* clang-format off */
#define MULTIPLY(v, r) case 8 * v + r: multiply(call, weight + at, x, v, r, sums + at); break;
#define ROWS(v) MULTIPLY(v, 1) MULTIPLY(v, 2) MULTIPLY(v, 3) MULTIPLY(v, 4)
        switch (8 * vectors + rows) { ROWS(1) ROWS(2) ROWS(3) ROWS(4) }
        /* clang-format on */
    }
    const int64_t count = channels_of(call, block);
    for (int r = 0; r < rows; r++) {
        uint16_t halves[WIDEST];
        store_bf16(halves, sums + r * WIDEST, call->block);
        uint16_t *to = call->y + (row + r) * call->out_features + block * call->block;
        memcpy(to, halves, (size_t)count * sizeof(uint16_t));
    }
}

static void multiply_blocks(void *argument) {
    Job *job = argument;
    const Call *call = job->call;
    const int64_t blocks = num_blocks(call);
    const int64_t run = blocks / (call->threads * 8) + 1; /* neighbours in memory */
    for (;;) {
        const int64_t begin = atomic_fetch_add(&job->next, run);
        if (begin >= blocks) return;
        for (int64_t block = begin; block < begin + run && block < blocks; block++)
            for (int64_t row = 0; row < call->rows; row += AT_ONCE) {
                const int64_t left = call->rows - row;
                multiply_block(call, block, row, left < AT_ONCE ? (int)left : AT_ONCE);
            }
    }
}

int llmopt_few_rows(const Call *call) {
    Job job = {.call = call};
    run_parallel(multiply_blocks, &job, call->threads);
    return 0;
}

static void compare_blocks(void *argument) {
    Job *job = argument;
    const Call *call = job->call;
    const int64_t pairs = call->in_features / 2;
    for (int64_t block; (block = atomic_fetch_add(&job->next, 1)) < num_blocks(call) && !job->differs;) {
        const uint32_t *packed = call->weight + block * call->pairs * call->block;
        const int64_t count = channels_of(call, block);
        uint32_t bits = 0;
        for (int64_t i = 0; i < count; i++) {
            const uint16_t *row = call->x + (block * call->block + i) * call->x_stride;
            for (int64_t k = 0; k < pairs; k++) {
                uint32_t pair;
                memcpy(&pair, row + 2 * k, sizeof pair);
                bits |= pair ^ packed[k * call->block + i];
            }
        }
        if (bits) job->differs = 1;
    }
}

/* Whether the weight is `x` [out_features][x_stride] in the layout that the call says. */
int llmopt_is_packed(const Call *call) {
    Job job = {.call = call};
    run_parallel(compare_blocks, &job, call->threads);
    return !job.differs;
}
