/* Roofline ceilings: memory-read bandwidth, and peak 8-bit integer operations per second. */
#include <stdatomic.h>

#include "parallel.h"
#include "vectors.h"

#include "amx.h"

#define SLICE (1 << 20)
#define ROUNDS_AT_ONCE 4096

typedef struct {
    const uint8_t *data;
    int64_t bytes, slice, rounds;
    atomic_long next;
    _Atomic int32_t sink; /* keeps the compiler from eliminating the work */
} Roof;

static void read_slices(void *argument) {
    Roof *roof = argument;
    ivec sums[4] = {iset(0), iset(0), iset(0), iset(0)};
    for (;;) {
        int64_t begin = atomic_fetch_add(&roof->next, roof->slice);
        if (begin >= roof->bytes) break;
        int64_t end = roof->bytes - begin < roof->slice ? roof->bytes : begin + roof->slice;
        const int64_t width = LANES * 4;
        for (int64_t at = begin; at + 4 * width <= end; at += 4 * width)
            for (int i = 0; i < 4; i++) sums[i] = iadd(sums[i], iload(roof->data + at + i * width));
    }
    roof->sink += isum_lanes(iadd(iadd(sums[0], sums[1]), iadd(sums[2], sums[3])));
}

/* Reads `bytes` once. */
int32_t llmopt_read(const void *data, int64_t bytes, int64_t threads) {
    Roof roof = {.data = data, .bytes = bytes, .slice = SLICE};
    run_parallel(read_slices, &roof, threads);
    return roof.sink;
}

/* Independent accumulators in registers: the peak rate of dot products without loads. */
static void multiply_registers(void *argument) {
    Roof *roof = argument;
    ivec sums[12], weights = iset(0x01020304), inputs = iset((int32_t)roof->rounds);
    for (int i = 0; i < 12; i++) sums[i] = iset(i);
    while (atomic_fetch_add(&roof->next, ROUNDS_AT_ONCE) < roof->rounds)
        for (int round = 0; round < ROUNDS_AT_ONCE; round++) {
            for (int i = 0; i < 12; i++) sums[i] = dot4(sums[i], weights, inputs, 0);
            OPAQUE(weights);
            OPAQUE(inputs);
        }
    for (int i = 1; i < 12; i++) sums[0] = iadd(sums[0], sums[i]);
    roof->sink += isum_lanes(sums[0]);
}

#if HAS_MATRIX_UNIT
/* The same with AMX's tiles: four of sums, as the linears have them. */
static void multiply_tiles(void *argument) {
    Roof *roof = argument;
    begin_tiles();
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    while (atomic_fetch_add(&roof->next, ROUNDS_AT_ONCE) < roof->rounds)
        for (int round = 0; round < ROUNDS_AT_ONCE; round++) {
            _tile_dpbsud(0, 4, 6);
            _tile_dpbsud(1, 4, 7);
            _tile_dpbsud(2, 5, 6);
            _tile_dpbsud(3, 5, 7);
        }
    end_tiles();
}
enum { TILE_OPERATIONS = 4 * UNIT_ROWS * 16 * UNIT_BYTES * 2 };
#endif

/* Runs the operations, of all threads together, and returns their number: two (multiply, add) per pair of
 * bytes. Those of AMX where the system gives its tiles: a round of them takes as long as ten of the vectors'. */
int64_t llmopt_multiply(int64_t rounds, int64_t threads) {
    int64_t count = has_matrix_unit() ? rounds / 10 : rounds;
    Roof roof = {.rounds = (count * threads + ROUNDS_AT_ONCE - 1) / ROUNDS_AT_ONCE * ROUNDS_AT_ONCE};
#if HAS_MATRIX_UNIT
    if (has_matrix_unit()) {
        run_parallel(multiply_tiles, &roof, threads);
        return roof.rounds * TILE_OPERATIONS;
    }
#endif
    run_parallel(multiply_registers, &roof, threads);
    return roof.sink == 1 ? 0 : roof.rounds * 12 * LANES * 4 * 2;
}

/* Reads `bytes` in so many parallel calls of equal parts, as a decode step does. */
int32_t llmopt_read_in_calls(const void *data, int64_t bytes, int64_t calls, int64_t threads) {
    int64_t part = bytes / calls, slice = (part / (threads * 8) + 1023) / 1024 * 1024;
    int32_t sum = 0;
    for (int64_t i = 0; i < calls; i++) {
        Roof roof = {.data = (const uint8_t *)data + i * part, .bytes = part, .slice = slice};
        run_parallel(read_slices, &roof, threads);
        sum += roof.sink;
    }
    return sum;
}
