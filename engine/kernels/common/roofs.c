/* Roofline ceilings: memory-read bandwidth, and peak 8-bit integer operations per second. */
#include <stdatomic.h>

#include "parallel.h"
#include "vectors.h"

#define SLICE (1 << 20)

typedef struct {
    const uint8_t *data;
    int64_t bytes, rounds;
    atomic_long next;
    _Atomic int32_t sink; /* keeps the compiler from eliminating the work */
} Roof;

static void read_slices(void *argument) {
    Roof *roof = argument;
    ivec sums[4] = {iset(0), iset(0), iset(0), iset(0)};
    for (;;) {
        int64_t begin = atomic_fetch_add(&roof->next, SLICE);
        if (begin >= roof->bytes) break;
        int64_t end = roof->bytes - begin < SLICE ? roof->bytes : begin + SLICE;
        const int64_t width = LANES * 4;
        for (int64_t at = begin; at + 4 * width <= end; at += 4 * width)
            for (int i = 0; i < 4; i++) sums[i] = iadd(sums[i], iload(roof->data + at + i * width));
    }
    roof->sink += isum_lanes(iadd(iadd(sums[0], sums[1]), iadd(sums[2], sums[3])));
}

/* Reads `bytes` once. */
int32_t llmopt_read(const void *data, int64_t bytes, int64_t threads) {
    Roof roof = {.data = data, .bytes = bytes};
    run_parallel(read_slices, &roof, threads);
    return roof.sink;
}

/* Independent accumulators in registers: the peak rate of dot products without loads. */
static void multiply_registers(void *argument) {
    Roof *roof = argument;
    ivec sums[12], weights = iset(0x01020304), inputs = iset((int32_t)roof->rounds);
    for (int i = 0; i < 12; i++) sums[i] = iset(i);
    for (int64_t round = 0; round < roof->rounds; round++) {
        for (int i = 0; i < 12; i++) sums[i] = dot4(sums[i], weights, inputs, 0);
        __asm__ volatile("" : "+x"(weights), "+x"(inputs)); /* else the loop would be simplified away */
    }
    for (int i = 1; i < 12; i++) sums[0] = iadd(sums[0], sums[i]);
    roof->sink += isum_lanes(sums[0]);
}

/* Runs the operations and returns their number: two (multiply, add) per pair of bytes. */
int64_t llmopt_multiply(int64_t rounds, int64_t threads) {
    Roof roof = {.rounds = rounds};
    run_parallel(multiply_registers, &roof, threads);
    return roof.sink == 1 ? 0 : rounds * threads * 12 * LANES * 4 * 2;
}
