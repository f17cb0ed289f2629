/* Thread pool of the C kernels: a caller never waits for a worker that has not begun.
 *
 * The threads of a call divide its work items among themselves, so a worker that the system has not scheduled
 * by the time they are done is not needed: the call closes, and only those within it are awaited. OpenMP's
 * barrier waits for every thread, and beside a busy process each of hundreds of calls a step then takes a time
 * slice of the system. Waits spin for a bounded time and then sleep. */
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <time.h>

#include "parallel.h" /* defines llmopt_set_parallel, which the loader calls in every library */

#define WORKER_SPIN_NS 100000 /* for the next call of a step */
#define CALLER_SPIN_NS 50000  /* for the last items of the workers */
#define MAX_WORKERS 1023

/* The call: its number in the upper half, then how many more workers may join, and how many are in it. */
#define NUMBER ((uint64_t)1 << 32)
#define PLACE ((uint64_t)1 << 16)
#define PLACES (NUMBER - PLACE)
#define ACTIVE (PLACE - 1)

static struct {
    _Alignas(64) _Atomic uint64_t call;
    void (*work)(void *);
    void *argument;
    _Alignas(64) atomic_int is_busy, asleep, caller_sleeps;
    int workers; /* started; of the caller that holds is_busy */
    pthread_mutex_t mutex;
    pthread_cond_t begun, ended;
} pool = {.mutex = PTHREAD_MUTEX_INITIALIZER, .begun = PTHREAD_COND_INITIALIZER, .ended = PTHREAD_COND_INITIALIZER};

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static inline void pause_briefly(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

/* Spins until `mask` of the call differs from `value` (or equals it, with `until_equal`); 0 if it takes longer. */
static int spin(uint64_t mask, uint64_t value, int until_equal, int64_t nanoseconds) {
    int64_t end = 0;
    for (int round = 0;; round++) {
        if (((atomic_load(&pool.call) & mask) == value) == until_equal) return 1;
        if (round % 16 == 15) {
            if (!end) end = now_ns() + nanoseconds;
            else if (now_ns() > end) return 0;
        }
        pause_briefly();
    }
}

/* Waits for a call other than `number`. */
static uint64_t next_call(uint64_t number) {
    if (!spin(~(NUMBER - 1), number, 0, WORKER_SPIN_NS)) {
        pthread_mutex_lock(&pool.mutex);
        atomic_fetch_add(&pool.asleep, 1);
        while ((atomic_load(&pool.call) & ~(NUMBER - 1)) == number) pthread_cond_wait(&pool.begun, &pool.mutex);
        atomic_fetch_sub(&pool.asleep, 1);
        pthread_mutex_unlock(&pool.mutex);
    }
    return atomic_load(&pool.call);
}

static void *serve(void *first) {
    uint64_t number = (uint64_t)(uintptr_t)first * NUMBER;
    for (;;) {
        uint64_t call = next_call(number);
        number = call & ~(NUMBER - 1);
        int joined = 0;
        while (!joined && (call & ~(NUMBER - 1)) == number && (call & PLACES))
            joined = atomic_compare_exchange_weak(&pool.call, &call, call - PLACE + 1);
        if (!joined) continue;
        pool.work(pool.argument);
        if (((atomic_fetch_sub(&pool.call, 1) - 1) & ACTIVE) == 0 && atomic_load(&pool.caller_sleeps)) {
            pthread_mutex_lock(&pool.mutex);
            pthread_cond_signal(&pool.ended);
            pthread_mutex_unlock(&pool.mutex);
        }
    }
    return NULL;
}

/* A forked process has no workers, and the caller that forked it may hold anything. */
static void forget_workers(void) {
    pool.workers = 0;
    atomic_store(&pool.call, 0);
    atomic_store(&pool.is_busy, 0);
    atomic_store(&pool.asleep, 0);
    atomic_store(&pool.caller_sleeps, 0);
    pthread_mutex_init(&pool.mutex, NULL);
    pthread_cond_init(&pool.begun, NULL);
    pthread_cond_init(&pool.ended, NULL);
}

static void start_workers(int wanted) {
    static int prepared;
    if (!prepared++) pthread_atfork(NULL, NULL, forget_workers);
    pthread_attr_t detached;
    if (pthread_attr_init(&detached)) return;
    pthread_attr_setdetachstate(&detached, PTHREAD_CREATE_DETACHED);
    void *number = (void *)(uintptr_t)(atomic_load(&pool.call) / NUMBER);
    for (pthread_t thread; pool.workers < wanted; pool.workers++)
        if (pthread_create(&thread, &detached, serve, number)) break; /* fewer then */
    pthread_attr_destroy(&detached);
}

static void await_workers(void) {
    if (spin(ACTIVE, 0, 1, CALLER_SPIN_NS)) return;
    pthread_mutex_lock(&pool.mutex);
    atomic_store(&pool.caller_sleeps, 1);
    while (atomic_load(&pool.call) & ACTIVE) pthread_cond_wait(&pool.ended, &pool.mutex);
    atomic_store(&pool.caller_sleeps, 0);
    pthread_mutex_unlock(&pool.mutex);
}

/* Runs `work` on this thread and on at most `threads - 1` others, like GOMP_parallel; returns when all that
 * began have ended. A call during another one, from another thread or from within, runs on its own thread. */
void llmopt_pool_run(void (*work)(void *), void *argument, unsigned threads, unsigned flags) {
    int wanted = threads > MAX_WORKERS ? MAX_WORKERS : (int)threads - 1;
    (void)flags;
    if (wanted < 1 || atomic_exchange(&pool.is_busy, 1)) {
        work(argument);
        return;
    }
    if (pool.workers < wanted) start_workers(wanted);
    pool.work = work;
    pool.argument = argument;
    uint64_t number = (atomic_load(&pool.call) & ~(NUMBER - 1)) + NUMBER;
    atomic_store(&pool.call, number + (uint64_t)wanted * PLACE);
    if (atomic_load(&pool.asleep)) {
        pthread_mutex_lock(&pool.mutex);
        pthread_cond_broadcast(&pool.begun);
        pthread_mutex_unlock(&pool.mutex);
    }
    work(argument);
    atomic_fetch_and(&pool.call, ~PLACES);
    await_workers();
    atomic_store(&pool.is_busy, 0);
}
