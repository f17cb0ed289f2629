/* Viterbi search over a bit-shift trellis: the path of states whose values are nearest to a sequence.
 *
 * A state has 16 bits; a step shifts K new ones in below. A node is what two states share, 16 - K bits, so that
 * a step has 65,536 transitions whatever K is: node (k, a) -> node (a, j) by the state k a j, with k and j of K
 * bits. Costs are non-negative floats, which compare like integers; the lowest K bits of a cost hold the k of
 * the transition that won, so that minimum and argument are one operation. */
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#include "parallel.h"

enum { STATES = 65536, LANES = 16, BLOCK = 256, PAIR = 2 };

typedef struct {
    const float *targets; /* [sequences][length] */
    const float *values;  /* [STATES], for K < 4 transposed: [2^K j][2^K k][a] */
    const int32_t *first; /* [sequences], the node that a path starts and ends at; -1: any */
    uint16_t *states;     /* [sequences][length] */
    int64_t sequences, length, bits, threads;
} ViterbiCall;

typedef struct {
    const ViterbiCall *call;
    atomic_long next;
    atomic_int failed;
} ViterbiJob;

static inline int32_t bits_of(float value) {
    int32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline float float_of(int32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

/* What a path costs with one more state, and the k of that transition. */
#define COST(before, value, target, k, mask) \
    ((bits_of(__builtin_fmaf((value) - (target), (value) - (target), before)) & ~(mask)) | (k))

/* One step of two sequences, which share the reading of the values, where a vector runs over `a`: K of 1 to 3.
 * `taken` gets the k of all j of an `a` in one word. */
#define STEP_OVER_A(NAME, K, WORD)                                                                              \
    static void NAME(const float *restrict values, const float *const costs[PAIR], const float target[PAIR],    \
                     float *const next[PAIR], uint8_t *const taken[PAIR]) {                                     \
        enum { CHOICES = 1 << (K), INNER = 1 << (16 - 2 * (K)), MASK = CHOICES - 1 };                           \
        const float wanted = target[0], wanted_too = target[1];                                                 \
        for (int base = 0; base < INNER; base += BLOCK) {                                                       \
            int32_t won[PAIR][CHOICES][BLOCK];                                                                  \
            const float *restrict before = costs[0] + base, *restrict before_too = costs[1] + base;             \
            for (int j = 0; j < CHOICES; j++) {                                                                 \
                const float *row = values + j * CHOICES * INNER + base;                                         \
                for (int i = 0; i < BLOCK; i++) {                                                               \
                    int32_t least = COST(before[i], row[i], wanted, 0, MASK);                                   \
                    int32_t least_too = COST(before_too[i], row[i], wanted_too, 0, MASK);                       \
                    _Pragma("GCC unroll 8") for (int k = 1; k < CHOICES; k++) {                                 \
                        const float value = row[k * INNER + i];                                                 \
                        int32_t cost = COST(before[k * INNER + i], value, wanted, k, MASK);                     \
                        int32_t cost_too = COST(before_too[k * INNER + i], value, wanted_too, k, MASK);         \
                        least = cost < least ? cost : least;                                                    \
                        least_too = cost_too < least_too ? cost_too : least_too;                                \
                    }                                                                                           \
                    won[0][j][i] = least;                                                                       \
                    won[1][j][i] = least_too;                                                                   \
                }                                                                                               \
            }                                                                                                   \
            for (int which = 0; which < PAIR; which++) {                                                        \
                float *restrict out = next[which] + base * CHOICES;                                             \
                WORD *restrict words = (WORD *)taken[which] + base;                                             \
                for (int i = 0; i < BLOCK; i++) {                                                               \
                    uint32_t word = 0;                                                                          \
                    _Pragma("GCC unroll 8") for (int j = 0; j < CHOICES; j++) {                                 \
                        word |= (uint32_t)(won[which][j][i] & MASK) << ((K) * j);                               \
                        out[i * CHOICES + j] = float_of(won[which][j][i]);                                      \
                    }                                                                                           \
                    words[i] = (WORD)word;                                                                      \
                }                                                                                               \
            }                                                                                                   \
        }                                                                                                       \
    }

STEP_OVER_A(step_1, 1, uint8_t)
STEP_OVER_A(step_2, 2, uint8_t)
STEP_OVER_A(step_3, 3, uint32_t)

/* The same where a vector runs over `j`: K of 4 to 8. `taken` gets the k of each node. */
#define STEP_OVER_J(NAME, K)                                                                                    \
    static void NAME(const float *restrict values, const float *const costs[PAIR], const float target[PAIR],    \
                     float *const next[PAIR], uint8_t *const taken[PAIR]) {                                     \
        enum { CHOICES = 1 << (K), INNER = 1 << (16 - 2 * (K)), MASK = CHOICES - 1 };                           \
        for (int a = 0; a < INNER; a++) {                                                                       \
            for (int base = 0; base < CHOICES; base += LANES) {                                                 \
                int32_t least[PAIR][LANES];                                                                     \
                for (int i = 0; i < LANES; i++) least[0][i] = least[1][i] = INT32_MAX;                          \
                for (int k = 0; k < CHOICES; k++) {                                                             \
                    const float *row = values + (k * INNER + a) * CHOICES + base;                               \
                    const float before = costs[0][k * INNER + a], before_too = costs[1][k * INNER + a];         \
                    for (int i = 0; i < LANES; i++) {                                                           \
                        int32_t cost = COST(before, row[i], target[0], k, MASK);                                \
                        int32_t cost_too = COST(before_too, row[i], target[1], k, MASK);                        \
                        least[0][i] = cost < least[0][i] ? cost : least[0][i];                                  \
                        least[1][i] = cost_too < least[1][i] ? cost_too : least[1][i];                          \
                    }                                                                                           \
                }                                                                                               \
                for (int which = 0; which < PAIR; which++) {                                                    \
                    float *restrict out = next[which] + a * CHOICES + base;                                     \
                    uint8_t *restrict bytes = taken[which] + a * CHOICES + base;                                \
                    for (int i = 0; i < LANES; i++) {                                                           \
                        bytes[i] = (uint8_t)(least[which][i] & MASK);                                           \
                        out[i] = float_of(least[which][i]);                                                     \
                    }                                                                                           \
                }                                                                                               \
            }                                                                                                   \
        }                                                                                                       \
    }

STEP_OVER_J(step_4, 4)
STEP_OVER_J(step_5, 5)
STEP_OVER_J(step_6, 6)
STEP_OVER_J(step_7, 7)
STEP_OVER_J(step_8, 8)

typedef void (*step_function)(const float *, const float *const *, const float *, float *const *,
                              uint8_t *const *);
static const step_function STEPS[] = {0, step_1, step_2, step_3, step_4, step_5, step_6, step_7, step_8};

/* Bytes of the transitions that one step took. */
static int64_t taken_bytes(int64_t bits) {
    if (bits > 3) return 1 << (16 - bits);
    return (bits == 3 ? 4 : 1) << (16 - 2 * bits);
}

static int transition(const uint8_t *taken, int64_t bits, int node) {
    if (bits > 3) return taken[node];
    int a = node >> bits, j = node & ((1 << bits) - 1);
    uint32_t word = taken[a];
    if (bits == 3) memcpy(&word, taken + 4 * a, 4);
    return (int)(word >> (bits * j)) & ((1 << bits) - 1);
}

/* Bytes that the search for one sequence needs. */
static int64_t memory_bytes(const ViterbiCall *call) {
    return 2 * (STATES >> call->bits) * (int64_t)sizeof(float) + call->length * taken_bytes(call->bits);
}

/* The path that ends at a node, or at the cheapest one. */
static void trace(const ViterbiCall *call, int64_t sequence, const float *costs, const uint8_t *taken) {
    const int64_t bits = call->bits, each = taken_bytes(bits);
    int node = call->first[sequence];
    if (node < 0) {
        node = 0;
        for (int other = 1; other < STATES >> bits; other++)
            if (costs[other] < costs[node]) node = other;
    }
    uint16_t *states = call->states + sequence * call->length;
    for (int64_t i = call->length - 1; i >= 0; i--) {
        int state = transition(taken + i * each, (int)bits, node) << (16 - bits) | node;
        states[i] = (uint16_t)state;
        node = state >> bits;
    }
}

/* Searches for two sequences; the last one of an odd number is searched for twice. */
static void search(const ViterbiCall *call, int64_t begin, uint8_t *memory) {
    const int64_t bits = call->bits, nodes = STATES >> bits, each = taken_bytes(bits);
    const float *costs[PAIR], *targets[PAIR];
    float *next[PAIR];
    uint8_t *taken[PAIR];
    for (int64_t which = 0; which < PAIR; which++, memory += memory_bytes(call)) {
        int64_t sequence = begin + which < call->sequences ? begin + which : begin;
        targets[which] = call->targets + sequence * call->length;
        const int first = call->first[sequence];
        float *start = (float *)memory;
        for (int node = 0; node < nodes; node++) start[node] = first < 0 || node == first ? 0.0f : 1e30f;
        costs[which] = start;
        next[which] = start + nodes;
        taken[which] = (uint8_t *)(start + 2 * nodes);
    }
    for (int64_t i = 0; i < call->length; i++) {
        const float target[PAIR] = {targets[0][i], targets[1][i]};
        uint8_t *const now[PAIR] = {taken[0] + i * each, taken[1] + i * each};
        STEPS[bits](call->values, costs, target, next, now);
        for (int which = 0; which < PAIR; which++) {
            float *before = (float *)costs[which];
            costs[which] = next[which], next[which] = before;
        }
    }
    for (int64_t which = 0; which < PAIR && begin + which < call->sequences; which++)
        trace(call, begin + which, costs[which], taken[which]);
}

static void search_all(void *argument) {
    ViterbiJob *job = argument;
    const ViterbiCall *call = job->call;
    uint8_t *memory = workspace(1, PAIR * memory_bytes(call));
    if (!memory) {
        job->failed = 1;
        return;
    }
    for (;;) {
        int64_t begin = PAIR * atomic_fetch_add(&job->next, 1);
        if (begin >= call->sequences) return;
        search(call, begin, memory);
    }
}

/* 0, or 1 where memory ran out. */
int llmopt_viterbi(const ViterbiCall *call) {
    ViterbiJob job = {.call = call};
    run_parallel(search_all, &job, call->threads);
    return job.failed;
}
