/* Viterbi search over a bit-shift trellis: the path of states whose values are nearest to a sequence.
 *
 * A state has 16 bits; a step shifts K new ones in below. A node is what two states share, 16 - K bits, so that
 * a step has 65,536 transitions whatever K is: node (k, a) -> node (a, j) by the state k a j, with k and j of K
 * bits. Up to 4 bits everything is a 16-bit integer: twice the lanes of a float. No step says which transition
 * won: costs are kept every few steps, and the way back computes those few again that lead to its nodes. */
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#include "parallel.h"

/* MOST: of a 16-bit cost, half of its range; a step adds at most the other. */
enum { STATES = 65536, LANES = 16, BLOCK = 256, PAIR = 2, NARROW = 4, MOST = 32767 };

typedef struct {
    const void *targets;  /* [sequences][length]; int16 up to 4 bits, beyond float */
    const void *values;   /* [STATES], of the same type; int16 transposed: [2^K j][2^K k][a] */
    const int32_t *first; /* [sequences], the node that a path starts and ends at; -1: any */
    uint16_t *states;     /* [sequences][length] */
    int64_t sequences, length, bits, threads;
} ViterbiCall;

typedef struct {
    const ViterbiCall *call;
    atomic_long next;
    atomic_int failed;
} ViterbiJob;

/* Square of a difference, the upper 16 of its 31 bits, rounded. The difference wraps around. */
static inline uint16_t narrow_square(int16_t value, int16_t target) {
    const int16_t difference = (int16_t)(value - target);
    return (uint16_t)((((int32_t)difference * difference >> 14) + 1) >> 1);
}

static inline float wide_square(float value, float target) {
    return (value - target) * (value - target);
}

#define LESSER(a, b) ((b) < (a) ? (b) : (a))

/* One step of two sequences, which share the reading of the values. A vector runs over `a`. */
#define NARROW_STEP(NAME, K)                                                                                    \
    static void NAME(const void *table, const void *const costs[PAIR], const void *const targets[PAIR],         \
                     void *const next[PAIR]) {                                                                  \
        enum { CHOICES = 1 << (K), INNER = 1 << (16 - 2 * (K)) };                                               \
        const int16_t *restrict values = table;                                                                 \
        const int16_t target = *(const int16_t *)targets[0], target_too = *(const int16_t *)targets[1];         \
        for (int base = 0; base < INNER; base += BLOCK) {                                                       \
            uint16_t won[PAIR][CHOICES][BLOCK];                                                                 \
            const uint16_t *restrict before = (const uint16_t *)costs[0] + base;                                \
            const uint16_t *restrict before_too = (const uint16_t *)costs[1] + base;                            \
            for (int j = 0; j < CHOICES; j++) {                                                                 \
                const int16_t *row = values + j * CHOICES * INNER + base;                                       \
                for (int i = 0; i < BLOCK; i++) {                                                               \
                    uint16_t least = MOST, least_too = MOST;                                                    \
                    _Pragma("GCC unroll 16") for (int k = 0; k < CHOICES; k++) {                                \
                        const int at = k * INNER + i;                                                           \
                        const uint16_t cost = before[at] + narrow_square(row[at], target);                      \
                        const uint16_t cost_too = before_too[at] + narrow_square(row[at], target_too);          \
                        least = LESSER(least, cost);                                                            \
                        least_too = LESSER(least_too, cost_too);                                                \
                    }                                                                                           \
                    won[0][j][i] = least;                                                                       \
                    won[1][j][i] = least_too;                                                                   \
                }                                                                                               \
            }                                                                                                   \
            for (int which = 0; which < PAIR; which++) {                                                        \
                uint16_t *restrict out = (uint16_t *)next[which] + base * CHOICES;                              \
                for (int i = 0; i < BLOCK; i++)                                                                 \
                    _Pragma("GCC unroll 16") for (int j = 0; j < CHOICES; j++)                                  \
                        out[i * CHOICES + j] = won[which][j][i];                                                \
            }                                                                                                   \
        }                                                                                                       \
    }

NARROW_STEP(step_1, 1)
NARROW_STEP(step_2, 2)
NARROW_STEP(step_3, 3)
NARROW_STEP(step_4, 4)

/* The same in floats, where a vector runs over `j`. */
#define WIDE_STEP(NAME, K)                                                                                      \
    static void NAME(const void *table, const void *const costs[PAIR], const void *const targets[PAIR],         \
                     void *const next[PAIR]) {                                                                  \
        enum { CHOICES = 1 << (K), INNER = 1 << (16 - 2 * (K)) };                                               \
        const float *restrict values = table;                                                                   \
        const float target = *(const float *)targets[0], target_too = *(const float *)targets[1];               \
        for (int a = 0; a < INNER; a++) {                                                                       \
            for (int base = 0; base < CHOICES; base += LANES) {                                                 \
                float least[PAIR][LANES];                                                                       \
                for (int i = 0; i < LANES; i++) least[0][i] = least[1][i] = 1e30f;                              \
                for (int k = 0; k < CHOICES; k++) {                                                             \
                    const float *row = values + (k * INNER + a) * CHOICES + base;                               \
                    const float before = ((const float *)costs[0])[k * INNER + a];                              \
                    const float before_too = ((const float *)costs[1])[k * INNER + a];                          \
                    for (int i = 0; i < LANES; i++) {                                                           \
                        const float cost = before + wide_square(row[i], target);                                \
                        const float cost_too = before_too + wide_square(row[i], target_too);                    \
                        least[0][i] = LESSER(least[0][i], cost);                                                \
                        least[1][i] = LESSER(least[1][i], cost_too);                                            \
                    }                                                                                           \
                }                                                                                               \
                for (int which = 0; which < PAIR; which++)                                                      \
                    memcpy((float *)next[which] + a * CHOICES + base, least[which], sizeof(least[which]));      \
            }                                                                                                   \
        }                                                                                                       \
    }

WIDE_STEP(step_5, 5)
WIDE_STEP(step_6, 6)
WIDE_STEP(step_7, 7)
WIDE_STEP(step_8, 8)

typedef void (*step_function)(const void *, const void *const *, const void *const *, void *const *);
static const step_function STEPS[] = {0, step_1, step_2, step_3, step_4, step_5, step_6, step_7, step_8};

/* Steps between two whose costs are kept, at which 16-bit costs start from 0 again. The way back to a node computes
 * 2^(bits * stretch) transitions again: at most 64, and no more than a step where there is nothing to compute. */
static int64_t stretch_of(int64_t bits) {
    return bits > 3 ? 1 : 6 / bits;
}

/* Bytes of the costs of a node. */
static int64_t cost_bytes(int64_t bits) {
    return bits > NARROW ? sizeof(float) : sizeof(uint16_t);
}

/* Costs of one sequence: rows of all nodes, two for the steps between, then those that are kept. */
typedef struct {
    const ViterbiCall *call;
    int64_t sequence;
    uint8_t *rows;
} Search;

static int64_t row_bytes(const ViterbiCall *call) {
    return (STATES >> call->bits) * cost_bytes(call->bits);
}

static int64_t memory_bytes(const ViterbiCall *call) {
    return (3 + call->length / stretch_of(call->bits)) * row_bytes(call);
}

/* The costs before a step. */
static void *row_before(const Search *search, int64_t step) {
    const int64_t stretch = stretch_of(search->call->bits);
    return search->rows + (step % stretch ? step % 2 : 2 + step / stretch) * row_bytes(search->call);
}

static const void *target_of(const Search *search, int64_t step) {
    const ViterbiCall *call = search->call;
    return (const uint8_t *)call->targets + (search->sequence * call->length + step) * cost_bytes(call->bits);
}

/* Whether a path that starts at the first node can be at another one before a step. */
static int is_reached(const Search *search, int64_t step, int node) {
    const int64_t bits = search->call->bits, shift = bits * step < 16 ? bits * step : 16;
    const int first = search->call->first[search->sequence];
    return first < 0 || node >> shift == (first & ((STATES >> bits) - 1) >> shift);
}

static void start(const Search *search) {
    const int64_t bits = search->call->bits;
    void *row = row_before(search, 0);
    for (int node = 0; node < STATES >> bits; node++) {
        int reached = is_reached(search, 0, node);
        if (bits > NARROW) ((float *)row)[node] = reached ? 0.0f : 1e30f;
        else ((uint16_t *)row)[node] = reached ? 0 : MOST;
    }
}

static float cost_of(const void *row, int64_t bits, int node) {
    return bits > NARROW ? ((const float *)row)[node] : ((const uint16_t *)row)[node];
}

static int cheapest_node(const void *row, int64_t bits) {
    int best = 0;
    for (int node = 1; node < STATES >> bits; node++)
        if (cost_of(row, bits, node) < cost_of(row, bits, best)) best = node;
    return best;
}

/* Subtracts the smallest of 16-bit costs from all. */
static void lower(uint16_t *costs, int64_t nodes) {
    uint16_t least = MOST;
    for (int64_t node = 0; node < nodes; node++) least = LESSER(least, costs[node]);
    for (int64_t node = 0; node < nodes; node++) costs[node] -= least;
}

/* What the cheapest path to a node costs before a step. */
static float cost_before(const Search *search, int64_t step, int node);

/* The same for a path that ends with a step from the node (k, a) to the node (a, j). */
static float cost_through(const Search *search, int64_t step, int k, int node) {
    const int64_t bits = search->call->bits;
    const int a = node >> bits, j = node & ((1 << bits) - 1);
    const void *values = search->call->values, *target = target_of(search, step);
    const float before = cost_before(search, step, k << (16 - 2 * bits) | a);
    if (bits > NARROW) return before + wide_square(((const float *)values)[k << (16 - bits) | node], *(const float *)target);
    const int16_t value = ((const int16_t *)values)[(j << bits | k) << (16 - 2 * bits) | a];
    return before + narrow_square(value, *(const int16_t *)target);
}

static float cost_before(const Search *search, int64_t step, int node) {
    const int64_t bits = search->call->bits;
    if (step % stretch_of(bits) == 0) return cost_of(row_before(search, step), bits, node);
    float least = MOST;
    for (int k = 0; k < 1 << bits; k++) {
        float cost = cost_through(search, step - 1, k, node);
        least = LESSER(least, cost);
    }
    return least;
}

/* The path that ends at the first node, or at the cheapest one: backwards, always from the cheapest node that it can
 * have been at. */
static void trace(const Search *search) {
    const ViterbiCall *call = search->call;
    const int64_t bits = call->bits;
    const int first = call->first[search->sequence];
    int node = first < 0 ? cheapest_node(row_before(search, call->length), bits) : first;
    uint16_t *states = call->states + search->sequence * call->length;
    for (int64_t step = call->length - 1; step >= 0; step--) {
        float least = 1e38f;
        int chosen = 0;
        for (int k = 0; k < 1 << bits; k++) {
            if (!is_reached(search, step, k << (16 - 2 * bits) | node >> bits)) continue;
            float cost = cost_through(search, step, k, node);
            if (cost < least) least = cost, chosen = k;
        }
        states[step] = (uint16_t)(chosen << (16 - bits) | node);
        node = states[step] >> bits;
    }
}

/* Searches for two sequences; the last one of an odd number is searched for twice. */
static void search_pair(const ViterbiCall *call, int64_t begin, uint8_t *memory) {
    Search searches[PAIR];
    for (int which = 0; which < PAIR; which++) {
        int64_t sequence = begin + which < call->sequences ? begin + which : begin;
        searches[which] = (Search){call, sequence, memory + which * memory_bytes(call)};
        start(&searches[which]);
    }
    for (int64_t step = 0; step < call->length; step++) {
        const void *costs[PAIR], *targets[PAIR];
        void *next[PAIR];
        for (int which = 0; which < PAIR; which++) {
            costs[which] = row_before(&searches[which], step);
            next[which] = row_before(&searches[which], step + 1);
            targets[which] = target_of(&searches[which], step);
        }
        STEPS[call->bits](call->values, costs, targets, next);
        for (int which = 0; which < PAIR; which++)
            if (call->bits <= NARROW && (step + 1) % stretch_of(call->bits) == 0)
                lower(next[which], STATES >> call->bits);
    }
    for (int which = 0; which < PAIR && begin + which < call->sequences; which++) trace(&searches[which]);
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
        search_pair(call, begin, memory);
    }
}

/* 0, or 1 where memory ran out. */
int llmopt_viterbi(const ViterbiCall *call) {
    ViterbiJob job = {.call = call};
    run_parallel(search_all, &job, call->threads);
    return job.failed;
}
