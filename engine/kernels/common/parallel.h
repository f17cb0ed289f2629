/* Threads and working memory of a call. */
#ifndef LLMOPT_PARALLEL_H
#define LLMOPT_PARALLEL_H

#include <stdint.h>
#include <stdlib.h>

/* GOMP_parallel of the OpenMP runtime that torch has loaded: its threads are awake already, and a second
 * pool of threads would fight with it for the cores. */
typedef void (*parallel_function)(void (*work)(void *), void *argument, unsigned threads, unsigned flags);
static parallel_function parallel;

void llmopt_set_parallel(parallel_function function) { parallel = function; }

/* Runs `work` on every thread at once; the threads share out what there is among themselves. */
static inline void run_parallel(void (*work)(void *), void *argument, int64_t threads) {
    if (parallel && threads > 1) parallel(work, argument, (unsigned)threads, 0);
    else work(argument);
}

/* Memory that a thread keeps for its calls, 64 bytes aligned; NULL where there is none. What is asked for
 * under one number is lost when the same is asked for again: 0 is of a call, 1 of a thread's part in it. */
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
