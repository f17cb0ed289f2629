/* Attention over keys and values in blocks, read where they lie.
 *
 * The query heads that share a KV head, of one token or of several neighbours, are the rows of a tile. Its
 * positions go in segments, counted from the beginning of the sequence: all scores of a segment, their
 * softmax, the sum of its values; then segments are merged, in order. What a row computes depends on its
 * own position and on nothing else: not on the rows beside it, not on the other sequences of the batch, not
 * on the threads. Where there are too few tiles for the threads, segments are shared out and merged later,
 * with the same numbers. */
#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>

#include "paged.h"
#include "parallel.h"

#define SEGMENT 256
#define TILE_ROWS 32
#define TILES_PER_THREAD 2 /* with fewer, segments are shared out */

/* The tokens of one sequence in the batch. */
typedef struct {
    int64_t begin, end;    /* where they lie in the batch */
    int64_t num_cached;    /* tokens of the sequence so far */
    int64_t front, gap;    /* positions from `front` on lie `gap` slots further to the front */
    const int64_t *blocks;
} Span;

typedef struct {
    const void *queries;   /* [tokens][query_stride], float32 or bfloat16, heads behind one another */
    const void *anchored;  /* the same for the `kept` first keys, or NULL */
    void *out;             /* [tokens][heads][values.dim] */
    const Span *spans;
    const float *sinks;    /* [heads] or NULL */
    int64_t num_spans, heads, query_stride, anchored_stride, is_bf16;
    int64_t block_size;
    int64_t window;        /* 0: none */
    int64_t kept, chunk;   /* chunk 0: none */
    int64_t threads;
    Paged keys, values;
    float scale, softcap;  /* softcap 0: none */
} Call;

/* Some rows of a tile over some segments: its running softmax. */
typedef struct {
    float largest[TILE_ROWS], sum[TILE_ROWS];
    float *mixed;          /* [rows][dim], values weighed by e^(score - largest) */
} State;

typedef struct {
    int64_t span, head, first, rows, own[TILE_ROWS];
} Tile;

/* What a thread works with, beside the states. */
typedef struct {
    float *queries, *anchored; /* [TILE_ROWS][keys.dim], scaled */
    float *run;            /* [RUN][dim] of keys or values */
    float *scores;         /* [TILE_ROWS][SEGMENT] */
    State segment, whole;
} Scratch;

typedef struct {
    const Call *call;
    const int64_t *tiles_before; /* [num_spans + 1] */
    int64_t num_tiles, parts;    /* parts: that a tile is shared out in; 1: it is not */
    uint8_t *states;             /* [num_tiles][parts], where it is */
    int64_t state_bytes;
    atomic_long next;
    atomic_int failed;
} Job;

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

static inline int64_t group_of(const Call *c) { return c->heads / c->keys.heads; }

static inline int64_t row_tiles(const Call *c, const Span *span) {
    return (((span->end - span->begin) * group_of(c)) + TILE_ROWS - 1) / TILE_ROWS;
}

/* The first position in the back that the token at `own` sees. */
static inline int64_t sees_from(const Call *c, int64_t own) {
    int64_t from = 0;
    if (c->window) from = larger(from, own - c->window + 1);
    if (c->chunk) from = larger(from, own - own % c->chunk);
    return from;
}

static int64_t scratch_bytes(const Call *c) {
    int64_t widest = larger(c->keys.dim, c->values.dim);
    int64_t floats = 2 * TILE_ROWS * c->keys.dim + RUN * widest + TILE_ROWS * SEGMENT +
                     2 * TILE_ROWS * c->values.dim;
    return floats * (int64_t)sizeof(float) + (int64_t)sizeof(Scratch);
}

static Scratch *lay_out(const Call *c, uint8_t *memory) {
    Scratch *s = (Scratch *)memory;
    float *next = (float *)(memory + sizeof(Scratch));
    s->queries = next;
    s->anchored = s->queries + TILE_ROWS * c->keys.dim;
    s->run = s->anchored + TILE_ROWS * c->keys.dim;
    s->scores = s->run + RUN * larger(c->keys.dim, c->values.dim);
    s->segment.mixed = s->scores + TILE_ROWS * SEGMENT;
    s->whole.mixed = s->segment.mixed + TILE_ROWS * c->values.dim;
    return s;
}

static Tile tile_at(const Job *job, int64_t index) {
    const Call *c = job->call;
    Tile tile = {0};
    while (job->tiles_before[tile.span + 1] <= index) tile.span++;
    const Span *span = c->spans + tile.span;
    int64_t rows = (span->end - span->begin) * group_of(c), within = index - job->tiles_before[tile.span];
    tile.head = within % c->keys.heads;
    tile.first = within / c->keys.heads * TILE_ROWS;
    tile.rows = smaller(TILE_ROWS, rows - tile.first);
    for (int64_t r = 0; r < tile.rows; r++)
        tile.own[r] = span->num_cached - (span->end - span->begin) + (tile.first + r) / group_of(c);
    return tile;
}

/* Where row r of a tile lies: the token in the batch, and its head. */
static inline int64_t token_of(const Call *c, const Tile *tile, int64_t r) {
    return c->spans[tile->span].begin + (tile->first + r) / group_of(c);
}
static inline int64_t head_of(const Call *c, const Tile *tile, int64_t r) {
    return tile->head * group_of(c) + (tile->first + r) % group_of(c);
}

static void load_queries(const Call *c, const Tile *tile, const void *from, int64_t stride, float *to) {
    int64_t dim = c->keys.dim;
    for (int64_t r = 0; r < tile->rows; r++) {
        int64_t at = token_of(c, tile, r) * stride + head_of(c, tile, r) * dim;
        for (int64_t d = 0; d < dim; d += LANES) {
            fvec x = c->is_bf16 ? fbits(ISHL(iwiden_u16((const uint16_t *)from + at + d), 16))
                                : fload((const float *)from + at + d);
            fstore(to + r * dim + d, fmul(x, fset(c->scale)));
        }
    }
}

/* Where a run of positions lies. Those that no row of the tile sees need not be held: a position that one
 * does see stands for them, so that what is read is a number. */
static void find_places(const Call *c, const Tile *tile, int64_t begin, Places *places) {
    const Span *span = c->spans + tile->span;
    int64_t from = sees_from(c, tile->own[0]), last = tile->own[tile->rows - 1];
    for (int i = 0; i < RUN; i++) {
        int64_t p = begin + i;
        if (p > last || (p < from && p >= c->kept)) p = last;
        if (p >= span->front) p -= span->gap;
        places->slots[i] = span->blocks[p / c->block_size] * c->block_size + p % c->block_size;
    }
}

/* Queries times a run of keys, for a few rows. */
INLINE void multiply_keys(const int rows, const float *queries, const float *columns, int64_t dim,
                          float *scores) {
    fvec sums[MAX_ROWS][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++) sums[r][v] = fset(0.0f);
    for (int64_t d = 0; d < dim; d++)
        for (int r = 0; r < rows; r++) {
            fvec query = fset(queries[r * dim + d]);
            for (int v = 0; v < VECTORS; v++)
                sums[r][v] = ffma(query, fload(columns + d * RUN + v * LANES), sums[r][v]);
        }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++) fstore(scores + r * SEGMENT + v * LANES, sums[r][v]);
}

/* Adds a run of values, weighed, to 32 or 16 elements of a few rows. */
INLINE void multiply_values(const int rows, const int vectors, const float *weights, const float *values,
                            int64_t dim, float *mixed) {
    fvec sums[MAX_ROWS][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) sums[r][v] = fload(mixed + r * dim + v * LANES);
    for (int i = 0; i < RUN; i++)
        for (int r = 0; r < rows; r++) {
            fvec weight = fset(weights[r * SEGMENT + i]);
            for (int v = 0; v < vectors; v++)
                sums[r][v] = ffma(weight, fload(values + i * dim + v * LANES), sums[r][v]);
        }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) fstore(mixed + r * dim + v * LANES, sums[r][v]);
}

#if MAX_ROWS == 8
#define FOR_ROWS(count, DO) \
    switch (count) { \
    case 8: DO(8); break; case 7: DO(7); break; case 6: DO(6); break; case 5: DO(5); break; \
    case 4: DO(4); break; case 3: DO(3); break; case 2: DO(2); break; default: DO(1); break; \
    }
#else
#define FOR_ROWS(count, DO) \
    switch (count) { \
    case 2: DO(2); break; default: DO(1); break; \
    }
#endif

static void score_run(const Call *c, int64_t rows, const float *queries, const float *columns,
                      float *scores) {
    int64_t dim = c->keys.dim;
    for (int64_t r = 0; r < rows; r += MAX_ROWS) {
#define DO(n) multiply_keys(n, queries + r * dim, columns, dim, scores + r * SEGMENT)
        FOR_ROWS(smaller(rows - r, MAX_ROWS), DO)
#undef DO
    }
}

static void mix_run(const Call *c, int64_t rows, const float *weights, const float *values, float *mixed) {
    int64_t dim = c->values.dim;
    for (int64_t r = 0; r < rows; r += MAX_ROWS) {
        int64_t count = smaller(rows - r, MAX_ROWS), d = 0;
        for (; d + PANEL <= dim; d += PANEL) {
#define DO(n) multiply_values(n, VECTORS, weights + r * SEGMENT, values + d, dim, mixed + r * dim + d)
            FOR_ROWS(count, DO)
#undef DO
        }
        if (d < dim) {
#define DO(n) multiply_values(n, VECTORS / 2, weights + r * SEGMENT, values + d, dim, mixed + r * dim + d)
            FOR_ROWS(count, DO)
#undef DO
        }
    }
}

/* Softcap, and minus infinity where a row does not see: a run of scores that begins at `begin`. */
static void finish_scores(const Call *c, const Tile *tile, int64_t begin, const float *scales,
                          float *scores) {
    for (int64_t r = 0; r < tile->rows; r++) {
        float *row = scores + r * SEGMENT;
        for (int i = 0; i < RUN; i += LANES) {
            fvec s = fload(row + i);
            if (scales) s = fmul(s, fload(scales + i));
            if (c->softcap > 0.0f) { /* tanh |x| = (1 - e^-2|x|) / (1 + e^-2|x|) */
                fvec x = fdiv(s, fset(c->softcap)), one = fset(1.0f);
                fvec e = exp_not_above_zero(fmul(fabs_(x), fset(-2.0f)));
                fvec size = fmul(fdiv(fsub(one, e), fadd(one, e)), fset(c->softcap));
                s = fbits(ior(ibits(size), iand(ibits(s), iset((int32_t)0x80000000))));
            }
            fstore(row + i, s);
        }
        int64_t own = tile->own[r], from = larger(sees_from(c, own), c->kept);
        for (int64_t p = larger(begin, own + 1); p < begin + RUN; p++) row[p - begin] = -INFINITY;
        for (int64_t p = larger(begin, c->kept); p < smaller(from, begin + RUN); p++)
            row[p - begin] = -INFINITY;
    }
}

/* Scores of a segment in place become weights; the largest of each row and their sum go to `state`. */
static void soften(const Tile *tile, int64_t count, float *scores, State *state) {
    for (int64_t r = 0; r < tile->rows; r++) {
        float *row = scores + r * SEGMENT;
        fvec most = fset(-INFINITY), sum = fset(0.0f);
        for (int64_t i = 0; i < count; i += LANES) most = fmax_(most, fload(row + i));
        float largest = state->largest[r] = fmax_lane(most);
        fvec shift = fset(largest > -INFINITY ? largest : 0.0f);
        for (int64_t i = 0; i < count; i += LANES) {
            fvec weight = exp_not_above_zero(fsub(fload(row + i), shift));
            fstore(row + i, weight);
            sum = fadd(sum, weight);
        }
        state->sum[r] = fsum_lanes(sum);
    }
}

static void attend_segment(const Call *c, const Tile *tile, int64_t begin, Scratch *s) {
    int64_t from = sees_from(c, tile->own[0]), last = tile->own[tile->rows - 1];
    int64_t end = smaller(begin + SEGMENT, last + 1);
    Places places[SEGMENT / RUN];
    int64_t runs[SEGMENT / RUN], count = 0; /* those that a row may see */
    for (int64_t p = begin; p < end; p += RUN)
        if (p < c->kept || p + RUN > from) runs[count++] = p;
    float scales[RUN], *of_keys = c->keys.scales ? scales : NULL;
    for (int64_t i = 0; i < count; i++) {
        find_places(c, tile, runs[i], places + i);
        read_columns(&c->keys, places + i, tile->head, s->run);
        float *scores = s->scores + i * RUN;
        score_run(c, tile->rows, s->queries, s->run, scores);
        if (c->anchored && runs[i] < c->kept) {
            float first[TILE_ROWS * SEGMENT];
            score_run(c, tile->rows, s->anchored, s->run, first);
            for (int64_t r = 0; r < tile->rows; r++)
                memcpy(scores + r * SEGMENT, first + r * SEGMENT,
                       (size_t)smaller(RUN, c->kept - runs[i]) * sizeof(float));
        }
        if (of_keys) read_scales(&c->keys, places + i, tile->head, scales);
        finish_scores(c, tile, runs[i], of_keys, scores);
    }
    soften(tile, count * RUN, s->scores, &s->segment);
    memset(s->segment.mixed, 0, (size_t)(tile->rows * c->values.dim) * sizeof(float));
    for (int64_t i = 0; i < count; i++) {
        float *weights = s->scores + i * RUN;
        if (c->values.scales) {
            read_scales(&c->values, places + i, tile->head, scales);
            for (int64_t r = 0; r < tile->rows; r++)
                for (int k = 0; k < RUN; k += LANES)
                    fstore(weights + r * SEGMENT + k,
                           fmul(fload(weights + r * SEGMENT + k), fload(scales + k)));
        }
        read_rows(&c->values, places + i, tile->head, s->run);
        mix_run(c, tile->rows, weights, s->run, s->segment.mixed);
    }
}

/* Takes the rows of `from` into `into`; either may have seen nothing. */
static void merge(const Call *c, const Tile *tile, const State *from, State *into) {
    int64_t dim = c->values.dim;
    for (int64_t r = 0; r < tile->rows; r++) {
        if (!(from->largest[r] > -INFINITY)) continue;
        int is_first = !(into->largest[r] > -INFINITY);
        float largest = is_first || from->largest[r] > into->largest[r] ? from->largest[r] : into->largest[r];
        float old = is_first ? 0.0f : expf(into->largest[r] - largest), new = expf(from->largest[r] - largest);
        into->largest[r] = largest;
        into->sum[r] = (is_first ? 0.0f : into->sum[r] * old) + from->sum[r] * new;
        for (int64_t d = 0; d < dim; d += LANES) {
            fvec added = fmul(fload(from->mixed + r * dim + d), fset(new));
            if (!is_first) added = ffma(fload(into->mixed + r * dim + d), fset(old), added);
            fstore(into->mixed + r * dim + d, added);
        }
    }
}

static void store_tile(const Call *c, const Tile *tile, State *state) {
    int64_t dim = c->values.dim;
    for (int64_t r = 0; r < tile->rows; r++) {
        int64_t head = head_of(c, tile, r);
        float *mixed = state->mixed + r * dim, factor = 1.0f, sum = state->sum[r];
        if (c->sinks) { /* a score more, that weighs no value */
            float sink = c->sinks[head], most = fmaxf(sink, state->largest[r]);
            factor = expf(state->largest[r] - most);
            sum = sum * factor + expf(sink - most);
        }
        int64_t at = (token_of(c, tile, r) * c->heads + head) * dim;
        for (int64_t d = 0; d < dim; d += LANES)
            fstore(mixed + d, fmul(fload(mixed + d), fset(factor / sum)));
        if (c->is_bf16) store_bf16((uint16_t *)c->out + at, mixed, dim);
        else memcpy((float *)c->out + at, mixed, (size_t)dim * sizeof(float));
    }
}

static void start(const Tile *tile, State *state) {
    for (int64_t r = 0; r < tile->rows; r++) state->largest[r] = -INFINITY, state->sum[r] = 0.0f;
}

/* Whether a row of the tile sees anything between two positions. */
static int is_seen(const Call *c, const Tile *tile, int64_t begin, int64_t end) {
    return begin <= tile->own[tile->rows - 1] && (begin < c->kept || end > sees_from(c, tile->own[0]));
}

/* The state of one part of a tile that is shared out. */
static State *state_at(const Job *job, int64_t item) {
    return (State *)(job->states + item * job->state_bytes);
}

static void attend_items(void *argument) {
    Job *job = argument;
    const Call *c = job->call;
    uint8_t *memory = workspace(1, scratch_bytes(c));
    if (!memory) {
        atomic_store(&job->failed, 1);
        return;
    }
    Scratch *s = lay_out(c, memory);
    for (;;) {
        int64_t item = atomic_fetch_add(&job->next, 1);
        if (item >= job->num_tiles * job->parts) return;
        Tile tile = tile_at(job, job->num_tiles - 1 - item / job->parts); /* the longest come last */
        int64_t part = item % job->parts, last = tile.own[tile.rows - 1];
        load_queries(c, &tile, c->queries, c->query_stride, s->queries);
        if (c->anchored) load_queries(c, &tile, c->anchored, c->anchored_stride, s->anchored);
        State *to = &s->whole;
        if (job->parts > 1) {
            to = state_at(job, item);
            to->mixed = (float *)(to + 1);
        }
        start(&tile, to);
        int64_t begin = job->parts > 1 ? part * SEGMENT : 0;
        int64_t end = job->parts > 1 ? begin + SEGMENT : last + 1;
        for (; begin < smaller(end, last + 1); begin += SEGMENT) {
            if (!is_seen(c, &tile, begin, begin + SEGMENT)) continue;
            attend_segment(c, &tile, begin, s);
            merge(c, &tile, &s->segment, to);
        }
        if (job->parts == 1) store_tile(c, &tile, to);
    }
}

/* Merges what was shared out, in the order in which one thread would have. */
static void merge_parts(Job *job, Scratch *s) {
    const Call *c = job->call;
    for (int64_t index = 0; index < job->num_tiles; index++) {
        Tile tile = tile_at(job, job->num_tiles - 1 - index);
        start(&tile, &s->whole);
        for (int64_t part = 0; part < job->parts; part++)
            merge(c, &tile, state_at(job, index * job->parts + part), &s->whole);
        store_tile(c, &tile, &s->whole);
    }
}

/* Returns 0, or 1 where there is no memory. */
int llmopt_attend(const Call *c) {
    int64_t longest = 0, before_bytes = (c->num_spans + 1) * (int64_t)sizeof(int64_t);
    int64_t tiles = 0;
    for (int64_t i = 0; i < c->num_spans; i++) {
        tiles += row_tiles(c, c->spans + i) * c->keys.heads;
        longest = larger(longest, c->spans[i].num_cached);
    }
    Job job = {.call = c, .num_tiles = tiles, .parts = 1};
    if (c->threads > 1 && tiles < c->threads * TILES_PER_THREAD)
        job.parts = (longest + SEGMENT - 1) / SEGMENT;
    job.state_bytes = (int64_t)sizeof(State) + TILE_ROWS * c->values.dim * (int64_t)sizeof(float);
    before_bytes = (before_bytes + 63) / 64 * 64;
    uint8_t *memory = workspace(0, before_bytes + (job.parts > 1 ? tiles * job.parts * job.state_bytes : 0));
    if (!memory) return 1;
    int64_t *before = (int64_t *)memory;
    before[0] = 0;
    for (int64_t i = 0; i < c->num_spans; i++)
        before[i + 1] = before[i] + row_tiles(c, c->spans + i) * c->keys.heads;
    job.tiles_before = before;
    job.states = memory + before_bytes;
    run_parallel(attend_items, &job, smaller(c->threads, tiles * job.parts));
    if (atomic_load(&job.failed)) return 1;
    if (job.parts > 1) {
        uint8_t *scratch = workspace(1, scratch_bytes(c));
        if (!scratch) return 1;
        merge_parts(&job, lay_out(c, scratch));
    }
    return 0;
}
