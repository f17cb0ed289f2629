/* GEMM of mul1's product bytes by the matrix tiles of AMX: 16 rows times 32 outputs.
 *
 * A vector of product words is a row of an operand tile as it is: four bytes for each of 16 outputs, to be
 * multiplied with two copies each of two inputs. The low words of 32 inputs make a tile, and their high words. */
#ifndef LLMOPT_TRELLIS_TILES_H
#define LLMOPT_TRELLIS_TILES_H

#include "trellis_values.h"

#if defined(HAS_AMX) && defined(__linux__) && !defined(__clang__) && defined(__has_include)
#if __has_include(<amxint8intrin.h>)
#define HAS_MATRIX_UNIT 1
#endif
#endif
#ifndef HAS_MATRIX_UNIT
#define HAS_MATRIX_UNIT 0
#endif

enum { UNIT_ROWS = 16 };
enum { TILE_BYTES = 1024, BLOCK_BYTES = 4 * 2 * 2 * TILE_BYTES }; /* [two tiles][low or high][half] */

#if HAS_MATRIX_UNIT
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

#pragma GCC target("amx-tile,amx-int8")

/* Whether the system lets this process use the tiles: it has to be asked once. */
static int has_matrix_unit(void) {
    static atomic_int answer = -1;
    const int request_permission = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM, XTILEDATA */
    if (atomic_load(&answer) < 0) atomic_store(&answer, syscall(SYS_arch_prctl, request_permission, tile_data) == 0);
    return atomic_load(&answer);
}

/* All tiles of this thread: 16 rows of 64 bytes. A constant, because gcc's intrinsic says that it reads eight
 * bytes, and stores to the others of a variable may be left out. */
static void begin_tiles(void) {
    static const struct {
        uint8_t palette, start, reserved[14];
        uint16_t columns[16];
        uint8_t rows[16];
    } shape = {1, 0, {0}, {64, 64, 64, 64, 64, 64, 64, 64}, {16, 16, 16, 16, 16, 16, 16, 16}};
    _tile_loadconfig(&shape);
}
static void end_tiles(void) { _tile_release(); }

/* The product bytes of 128 inputs and 32 outputs as operand tiles. */
INLINE void decode_bytes(const int bits, const uint16_t *codes, uint8_t *bytes) {
    for (int tile = 0; tile < BLOCK_TILES; tile++) {
        ivec now[MAX_BITS];
        load_spans(bits, codes + tile * bits * PAIR_WORDS, now);
        ivec before = wrotate(now[bits - 1]);
        uint8_t *to = bytes + tile / 2 * 4 * TILE_BYTES + tile % 2 * PAIRS * 64;
#pragma GCC unroll 16
        for (int place = 0; place < TILE; place++) {
            const int pair = place / 8 * 4 + place % 4, half = place % 8 / 4;
            ivec low, high;
            product_words(states_at(place, bits, now, before), &low, &high);
            istore(to + half * TILE_BYTES + pair * 64, low);
            istore(to + (2 + half) * TILE_BYTES + pair * 64, high);
        }
    }
}

/* Adds 16 rows (of which `rows` are some) to `whole` [row][BLOCK]. `inputs` are bytes [row][BLOCK / 2]. */
static __attribute__((noinline)) void multiply_tiles(int64_t rows, const uint8_t *bytes, const uint32_t *inputs,
                                                     const int32_t *starts, const float *scales, float *whole) {
    _Alignas(64) int32_t sums[2][UNIT_ROWS][16];
    _tile_zero(0);
    _tile_zero(1);
    for (int two = 0; two < BLOCK_TILES / 2; two++) {
        _tile_loadd(2, inputs + two * 2 * PAIRS, BLOCK / 2 * 4);
        for (int part = 0; part < 2; part++) {
            const uint8_t *at = bytes + (two * 2 + part) * 2 * TILE_BYTES;
            _tile_loadd(3, at, 64);
            _tile_dpbsud(0, 2, 3);
            _tile_loadd(4, at + TILE_BYTES, 64);
            _tile_dpbsud(1, 2, 4);
        }
    }
    _tile_stored(0, sums[0], 64);
    _tile_stored(1, sums[1], 64);
    for (int64_t r = 0; r < rows; r++)
        for (int half = 0; half < 2; half++) {
            float *to = whole + r * BLOCK + half * 16;
            ivec sum = iadd(iload(sums[half][r]), iset(starts[r]));
            fstore(to, ffma(itof(sum), fset(scales[r]), fload(to)));
        }
}
#else
static inline int has_matrix_unit(void) { return 0; }
static inline void begin_tiles(void) {}
static inline void end_tiles(void) {}
INLINE void decode_bytes(const int bits, const uint16_t *codes, uint8_t *bytes) {
    (void)bits, (void)codes, (void)bytes;
}
static inline void multiply_tiles(int64_t rows, const uint8_t *bytes, const uint32_t *inputs, const int32_t *starts,
                                  const float *scales, float *whole) {
    (void)rows, (void)bytes, (void)inputs, (void)starts, (void)scales, (void)whole;
}
#endif

#endif
