/* AMX: permission to use the matrix tiles, and their configuration on a thread.
 *
 * Include it last: what follows is compiled for a processor with AMX where there is one. */
#ifndef LLMOPT_AMX_H
#define LLMOPT_AMX_H

#include "vectors.h"

#if defined(HAS_AMX) && defined(__linux__) && !defined(__clang__) && defined(__has_include)
#if __has_include(<amxint8intrin.h>)
#define HAS_MATRIX_UNIT 1
#endif
#endif
#ifndef HAS_MATRIX_UNIT
#define HAS_MATRIX_UNIT 0
#endif

enum { UNIT_ROWS = 16, UNIT_BYTES = 64 }; /* of a tile */

#if HAS_MATRIX_UNIT
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

#pragma GCC target("amx-tile,amx-int8")

/* GCC does not know that a tile load reads memory: stores before it would be dropped, or moved behind it. */
#define FINISH_STORES(p) __asm__ volatile("" : : "r"(p) : "memory")

/* Whether the system lets this process use the tiles: it has to be asked once. */
static int has_matrix_unit(void) {
    static atomic_int answer = -1;
    const int request_permission = 0x1023, tile_data = 18; /* ARCH_REQ_XCOMP_PERM, XTILEDATA */
    if (atomic_load(&answer) < 0)
        atomic_store(&answer, syscall(SYS_arch_prctl, request_permission, tile_data) == 0);
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
#else
static inline int has_matrix_unit(void) { return 0; }
static inline void begin_tiles(void) {}
static inline void end_tiles(void) {}
#endif

#endif
