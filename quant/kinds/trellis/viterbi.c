/* Viterbi search over a bit-shift trellis: the path of states whose values are nearest to a sequence.
 *
 * A state has 16 bits; a step shifts K new ones in below. A node is what two states share, 16 - K bits, so that
 * a step has 65,536 transitions whatever K is: node (k, a) -> node (a, j) by the state k a j, with k and j of K
 * bits. Up to 4 bits everything is a 16-bit integer: twice the lanes of a float. No step says which transition
 * won: costs are kept every few steps, and the way back computes those few again that lead to its nodes. */
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#include "parallel.h"

/* MOST: of a 16-bit cost, half of its range; a step adds at most the other. */
enum { STATES = 65536, LANES = 32, PAIR = 2, NARROW = 4, MOST = 32767 };

typedef struct {
    const void *targets;  /* [sequences][length]; int16 up to 4 bits, beyond float */
    const void *values;   /* [STATES], of the same type; int16 as [a / LANES][2^K j][2^K k][a % LANES] */
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

#define PRAGMA(text) _Pragma(#text)
#define UNROLLED(count) PRAGMA(GCC unroll count)
#define LESSER(a, b) ((b) < (a) ? (b) : (a))

/* One step of two sequences, which share the reading of the values. A vector runs over `a`; AT_ONCE of the vectors
 * that choices j win stay in registers until they are stored in turns. */
#define NARROW_STEP(NAME, K, AT_ONCE)                                                                           \
    static void NAME(const void *table, const void *const costs[PAIR], const void *const targets[PAIR],         \
                     void *const next[PAIR]) {                                                                  \
        enum { CHOICES = 1 << (K), INNER = 1 << (16 - 2 * (K)) };                                               \
        const int16_t *restrict values = table;                                                                 \
        const int16_t target = *(const int16_t *)targets[0], target_too = *(const int16_t *)targets[1];         \
        for (int base = 0; base < INNER; base += LANES) {                                                       \
            uint16_t won[PAIR][CHOICES][LANES];                                                                 \
            const uint16_t *restrict before = (const uint16_t *)costs[0] + base;                                \
            const uint16_t *restrict before_too = (const uint16_t *)costs[1] + base;                            \
            UNROLLED(AT_ONCE) for (int j = 0; j < CHOICES; j++) {                                               \
                const int16_t *row = values + (base * CHOICES + j * LANES) * CHOICES;                           \
                for (int i = 0; i < LANES; i++) {                                                               \
                    uint16_t least = MOST, least_too = MOST;                                                    \
                    _Pragma("GCC unroll 16") for (int k = 0; k < CHOICES; k++) {                                \
                        const int at = k * INNER + i;                                                           \
                        const int16_t value = row[k * LANES + i];                                               \
                        const uint16_t cost = before[at] + narrow_square(value, target);                        \
                        const uint16_t cost_too = before_too[at] + narrow_square(value, target_too);            \
                        least = LESSER(least, cost);                                                            \
                        least_too = LESSER(least_too, cost_too);                                                \
                    }                                                                                           \
                    won[0][j][i] = least;                                                                       \
                    won[1][j][i] = least_too;                                                                   \
                }                                                                                               \
            }                                                                                                   \
            _Pragma("GCC unroll 2") for (int which = 0; which < PAIR; which++) {                                \
                uint16_t *restrict out = (uint16_t *)next[which] + base * CHOICES;                              \
                for (int i = 0; i < LANES; i++)                                                                 \
                    _Pragma("GCC unroll 16") for (int j = 0; j < CHOICES; j++)                                  \
                        out[i * CHOICES + j] = won[which][j][i];                                                \
            }                                                                                                   \
        }                                                                                                       \
    }

NARROW_STEP(step_1, 1, 2)
NARROW_STEP(step_2, 2, 4)
NARROW_STEP(step_3, 3, 8)
NARROW_STEP(step_4, 4, 1)

static inline int32_t bits_of(float value) {
    int32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

/* The same in floats, where a vector runs over `j`. As they are not negative, they compare like integers. */
#define WIDE_STEP(NAME, K)                                                                                      \
    static void NAME(const void *table, const void *const costs[PAIR], const void *const targets[PAIR],         \
                     void *const next[PAIR]) {                                                                  \
        enum { CHOICES = 1 << (K), INNER = 1 << (16 - 2 * (K)) };                                               \
        const float *restrict values = table;                                                                   \
        const float target = *(const float *)targets[0], target_too = *(const float *)targets[1];               \
        for (int a = 0; a < INNER; a++) {                                                                       \
            int32_t least[CHOICES], least_too[CHOICES];                                                         \
            for (int j = 0; j < CHOICES; j++) least[j] = least_too[j] = INT32_MAX;                              \
            for (int k = 0; k < CHOICES; k++) {                                                                 \
                const float *restrict row = values + (k * INNER + a) * CHOICES;                                 \
                const float before = ((const float *)costs[0])[k * INNER + a];                                  \
                const float before_too = ((const float *)costs[1])[k * INNER + a];                              \
                for (int j = 0; j < CHOICES; j++) {                                                             \
                    const int32_t cost = bits_of(before + wide_square(row[j], target));                         \
                    const int32_t cost_too = bits_of(before_too + wide_square(row[j], target_too));             \
                    least[j] = LESSER(least[j], cost);                                                          \
                    least_too[j] = LESSER(least_too[j], cost_too);                                              \
                }                                                                                               \
            }                                                                                                   \
            memcpy((float *)next[0] + a * CHOICES, least, sizeof(least));                                       \
            memcpy((float *)next[1] + a * CHOICES, least_too, sizeof(least));                                   \
        }                                                                                                       \
    }

WIDE_STEP(step_5, 5)
WIDE_STEP(step_6, 6)
WIDE_STEP(step_7, 7)
WIDE_STEP(step_8, 8)

typedef void (*step_function)(const void *, const void *const *, const void *const *, void *const *);
static const step_function STEPS[] = {0, step_1, step_2, step_3, step_4, step_5, step_6, step_7, step_8};

/* Steps between two whose costs are kept, at which 16-bit costs start from 0 again. The way back over them begins
 * in 64 nodes, or in those before a single step. */
static int stretch_of(int bits) {
    return bits > 3 ? 1 : 6 / bits;
}

enum { STRETCH = 6, WAYS = 256 }; /* the longest stretch, and the most nodes that it begins in */

/* Bytes of a target, or of the costs of a node. */
static int64_t number_bytes(int bits) {
    return bits > NARROW ? sizeof(float) : sizeof(uint16_t);
}

/* Rows of the costs of all nodes: two for the steps between, then those that are kept. */
static int64_t memory_bytes(const ViterbiCall *call) {
    const int bits = (int)call->bits;
    return (3 + call->length / stretch_of(bits)) * (STATES >> bits) * number_bytes(bits);
}

/* The search for one sequence. */
typedef struct {
    const void *targets, *values;
    uint8_t *rows;
    int bits, first;
} Search;

/* The costs before a step. */
static void *row_before(const Search *search, int64_t step) {
    const int stretch = stretch_of(search->bits);
    const int64_t row = step % stretch ? step % 2 : 2 + step / stretch;
    return search->rows + row * (STATES >> search->bits) * number_bytes(search->bits);
}

static const void *target_of(const Search *search, int64_t step) {
    return (const uint8_t *)search->targets + step * number_bytes(search->bits);
}

static float cost_of(const Search *search, const void *row, int node) {
    return search->bits > NARROW ? ((const float *)row)[node] : ((const uint16_t *)row)[node];
}

/* Before the first step. */
static void start(const Search *search) {
    void *row = row_before(search, 0);
    for (int node = 0; node < STATES >> search->bits; node++) {
        const int open = search->first < 0 || search->first == node;
        if (search->bits > NARROW) ((float *)row)[node] = open ? 0.0f : 1e30f;
        else ((uint16_t *)row)[node] = open ? 0 : MOST;
    }
}

static uint16_t least_of(const uint16_t *costs, int nodes) {
    uint16_t least = MOST;
    for (int node = 0; node < nodes; node++) least = LESSER(least, costs[node]);
    return least;
}

/* Subtracts the smallest of 16-bit costs from all. */
static void lower(uint16_t *costs, int nodes) {
    const uint16_t least = least_of(costs, nodes);
    for (int node = 0; node < nodes; node++) costs[node] -= least;
}

/* What the step from the node (k, a) to the node (a, j) costs. */
static inline float cost_of_step(const Search *search, const void *target, int k, int node) {
    const int bits = search->bits;
    if (bits > NARROW)
        return wide_square(((const float *)search->values)[k << (16 - bits) | node], *(const float *)target);
    const int a = node >> bits, j = node & ((1 << bits) - 1);
    const int16_t *values = (const int16_t *)search->values + ((a / LANES * LANES) << 2 * bits);
    const int16_t value = values[(j << bits | k) * LANES + a % LANES];
    return narrow_square(value, *(const int16_t *)target);
}

/* Whether a path that starts at the first node can be at another one before a step. */
static int is_reached(const Search *search, int64_t step, int node) {
    const int shift = search->bits * step < 16 ? (int)(search->bits * step) : 16;
    return search->first < 0 || node >> shift == (search->first & ((STATES >> search->bits) - 1) >> shift);
}

/* The node some steps before `last`, whose upper bits are its lower ones; its other bits, the `way`, are free. */
static inline int node_before(const Search *search, int way, int steps, int last) {
    return way << (16 - search->bits - search->bits * steps) | last >> search->bits * steps;
}

/* Asks for the costs that the way back from a node over so many steps reads. */
static void prefetch_ways(const Search *search, int64_t begin, int steps, int last) {
    const uint8_t *row = row_before(search, begin);
    for (int way = 0; way < 1 << search->bits * steps; way++)
        __builtin_prefetch(row + node_before(search, way, steps, last) * number_bytes(search->bits));
}

/* The states of the steps from `begin` to `end`, backwards from a node behind them; the node before them. */
static int trace_stretch(const Search *search, int64_t begin, int64_t end, int last, uint16_t *states) {
    const int bits = search->bits, size = 16 - bits, length = (int)(end - begin);
    float costs[STRETCH + 1][WAYS];
    for (int way = 0; way < 1 << bits * length; way++)
        costs[length][way] = cost_of(search, row_before(search, begin), node_before(search, way, length, last));
    for (int distance = length - 1; distance > 0; distance--) {
        const void *target = target_of(search, end - 1 - distance);
        for (int way = 0; way < 1 << bits * distance; way++) {
            const int node = node_before(search, way, distance, last);
            float least = MOST;
            for (int k = 0; k < 1 << bits; k++) {
                const float before = costs[distance + 1][k << bits * distance | way];
                const float cost = before + cost_of_step(search, target, k, node);
                least = LESSER(least, cost);
            }
            costs[distance][way] = least;
        }
    }
    int node = last;
    for (int distance = 0, way = 0; distance < length; distance++) {
        const int64_t step = end - 1 - distance;
        const void *target = target_of(search, step);
        float least = INFINITY;
        int chosen = 0;
        for (int k = 0; k < 1 << bits; k++) {
            if (!is_reached(search, step, k << (size - bits) | node >> bits)) continue;
            const float before = costs[distance + 1][k << bits * distance | way];
            const float cost = before + cost_of_step(search, target, k, node);
            if (cost < least) least = cost, chosen = k;
        }
        states[step] = (uint16_t)(chosen << size | node);
        way |= chosen << bits * distance;
        node = states[step] >> bits;
    }
    return node;
}

/* The node that a path ends at: its first one, or the cheapest. */
static int last_node(const Search *search, const void *row) {
    const int nodes = STATES >> search->bits;
    int node = 0;
    if (search->first >= 0) return search->first;
    if (search->bits > NARROW) {
        for (int other = 1; other < nodes; other++)
            if (((const float *)row)[other] < ((const float *)row)[node]) node = other;
        return node;
    }
    const uint16_t least = least_of(row, nodes);
    while (((const uint16_t *)row)[node] != least) node++;
    return node;
}

/* The paths of a pair, a stretch of each at a time: the costs that one is to read come meanwhile. */
static void trace(const Search searches[PAIR], int64_t length, uint16_t *const states[PAIR]) {
    const int stretch = stretch_of(searches[0].bits);
    int nodes[PAIR];
    for (int which = 0; which < PAIR; which++)
        nodes[which] = last_node(&searches[which], row_before(&searches[which], length));
    for (int64_t end = length, begin; end > 0; end = begin) {
        begin = (end - 1) / stretch * stretch;
        for (int which = 0; which < PAIR; which++) {
            nodes[which] = trace_stretch(&searches[which], begin, end, nodes[which], states[which]);
            if (begin) prefetch_ways(&searches[which], begin - stretch, stretch, nodes[which]);
        }
    }
}

/* Searches for two sequences; the last one of an odd number is searched for twice. */
static void search_pair(const ViterbiCall *call, int64_t pair, uint8_t *memory) {
    const int bits = (int)call->bits;
    Search searches[PAIR];
    for (int which = 0; which < PAIR; which++) {
        int64_t sequence = pair + which < call->sequences ? pair + which : pair;
        const void *targets = (const uint8_t *)call->targets + sequence * call->length * number_bytes(bits);
        uint8_t *rows = memory + which * memory_bytes(call);
        searches[which] = (Search){targets, call->values, rows, bits, call->first[sequence]};
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
        STEPS[bits](call->values, costs, targets, next);
        for (int which = 0; which < PAIR; which++)
            if (bits <= NARROW && (step + 1) % stretch_of(bits) == 0) lower(next[which], STATES >> bits);
    }
    uint16_t *const states = call->states + pair * call->length;
    trace(searches, call->length, (uint16_t *[]){states, pair + 1 < call->sequences ? states + call->length : states});
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
