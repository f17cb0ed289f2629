/* Threads and per-thread workspaces of a call. */
#ifndef LLMOPT_PARALLEL_H
#define LLMOPT_PARALLEL_H

#include <stdint.h>
#include <stdlib.h>

/* As GOMP_parallel: the pool of pool.c; or that function of the OpenMP runtime that torch has loaded, where its
 * threads spin between calls and a pool would share the cores with them. */
typedef void (*parallel_function)(void (*work)(void *), void *argument, unsigned threads, unsigned flags);
static parallel_function parallel;

void llmopt_set_parallel(parallel_function function) { parallel = function; }

/* Runs `work` on all threads; they divide the work items among themselves (an atomic counter). */
static inline void run_parallel(void (*work)(void *), void *argument, int64_t threads) {
    if (parallel && threads > 1) parallel(work, argument, (unsigned)threads, 0);
    else work(argument);
}

/* Workspace of a thread, 64-byte aligned, reused between calls; NULL if allocation fails. A request for a
 * number invalidates the previous workspace of that number: 0 is the call's, 1 a worker thread's. */
static inline uint8_t *workspace(int number, int64_t bytes) {
    static _Thread_local struct {
        uint8_t *memory;
        int64_t held;
    } kept[2];
    if (bytes > kept[number].held) {
        free(kept[number].memory);
        int64_t rounded = (bytes + 4095) / 4096 * 4096;
        kept[number].memory = aligned_alloc(64, (size_t)rounded);
        kept[number].held = kept[number].memory ? rounded : 0;
    }
    return kept[number].memory;
}

#endif
