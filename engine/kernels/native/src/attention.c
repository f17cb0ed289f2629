/* Attention over keys and values in blocks, read where they lie.
 *
 * The query heads that share a KV head, of one token or of several neighbours, are the rows of a tile. Its
 * positions go in segments, counted from the beginning of the sequence: all scores of a segment, their
 * softmax, the sum of its values; then segments are merged, in order. What a row computes depends on its
 * own position and on nothing else: not on the rows beside it, not on the other sequences of the batch, not
 * on the threads. Where there are too few tiles for the threads, segments are shared out and merged later,
 * with the same numbers. */
#include <stdatomic.h>
#include <stdlib.h>

#include "parallel.h"
#include "segment.h"

#define ITEMS_PER_THREAD 2

/* An item is a tile of rows, some of its KV heads, and all segments or one. Heads go together where that
 * leaves enough items: their vectors lie behind one another in memory. */
typedef struct {
    const Call *call;
    const int64_t *tiles_before; /* [num_spans + 1], tiles of rows */
    int64_t num_tiles;
    int64_t heads_at_once, head_runs;
    int64_t parts;               /* that the segments of a tile are shared out in; 1: they are not */
    uint8_t *states;             /* [item][heads_at_once], where they are */
    int64_t state_bytes;
    atomic_long next;
    atomic_int failed;
} Job;

static inline int64_t row_tiles(const Call *c, const Span *span) {
    return ceil_div((span->end - span->begin) * group_of(c), TILE_ROWS);
}

static int64_t scratch_bytes(const Call *c) {
    int64_t widest = larger(c->keys.dim, c->values.dim);
    int64_t floats = TILE_ROWS * (2 * c->keys.dim + SEGMENT + c->values.dim) + RUN * widest;
    return ceil_div(floats * (int64_t)sizeof(float) + (int64_t)sizeof(Scratch), 64) * 64;
}

static Scratch *lay_out(const Call *c, uint8_t *memory) {
    Scratch *s = (Scratch *)memory;
    s->queries = (float *)(memory + sizeof(Scratch));
    s->anchored = s->queries + TILE_ROWS * c->keys.dim;
    s->scores = s->anchored + TILE_ROWS * c->keys.dim;
    s->segment.mixed = s->scores + TILE_ROWS * SEGMENT;
    s->run = s->segment.mixed + TILE_ROWS * c->values.dim;
    return s;
}

/* The state of each head of an item. */
static State *state_at(const Job *job, uint8_t *states, int64_t index) {
    State *state = (State *)(states + index * job->state_bytes);
    state->mixed = (float *)(state + 1);
    return state;
}

static void start(const Tile *tile, State *state) {
    for (int64_t r = 0; r < tile->rows; r++) state->largest[r] = -INFINITY, state->sum[r] = 0.0f;
}

/* The rows and heads of an item, the last rows first: they have the most to see. */
static Tile tile_at(const Job *job, int64_t index) {
    const Call *c = job->call;
    int64_t rows_index = job->num_tiles - 1 - index / job->head_runs;
    Tile tile = {0};
    while (job->tiles_before[tile.span + 1] <= rows_index) tile.span++;
    const Span *span = c->spans + tile.span;
    int64_t tokens = span->end - span->begin;
    tile.first = (rows_index - job->tiles_before[tile.span]) * TILE_ROWS;
    tile.rows = smaller(TILE_ROWS, tokens * group_of(c) - tile.first);
    for (int64_t r = 0; r < tile.rows; r++)
        tile.own[r] = span->num_cached - tokens + (tile.first + r) / group_of(c);
    tile.heads_begin = tile.head = index % job->head_runs * job->heads_at_once;
    tile.heads_end = smaller(tile.heads_begin + job->heads_at_once, c->keys.heads);
    return tile;
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

/* Whether a row of the tile sees anything of a segment. */
static int is_seen(const Call *c, const Tile *tile, int64_t begin) {
    if (begin > tile->own[tile->rows - 1]) return 0;
    return begin < c->kept || begin + SEGMENT > sees_from(c, tile->own[0]);
}

static void attend_items(void *argument) {
    Job *job = argument;
    const Call *c = job->call;
    int64_t own_bytes = scratch_bytes(c);
    uint8_t *memory = workspace(1, own_bytes + job->heads_at_once * job->state_bytes);
    if (!memory) {
        atomic_store(&job->failed, 1);
        return;
    }
    Scratch *s = lay_out(c, memory);
    for (;;) {
        int64_t item = atomic_fetch_add(&job->next, 1);
        if (item >= job->num_tiles * job->head_runs * job->parts) return;
        Tile tile = tile_at(job, item / job->parts);
        uint8_t *states = memory + own_bytes;
        int64_t begin = 0, end = tile.own[tile.rows - 1] + 1;
        if (job->parts > 1) {
            states = job->states + item * job->heads_at_once * job->state_bytes;
            begin = item % job->parts * SEGMENT;
            end = smaller(end, begin + SEGMENT);
        }
        for (int64_t h = 0; h < tile.heads_end - tile.heads_begin; h++) start(&tile, state_at(job, states, h));
        for (; begin < end; begin += SEGMENT) {
            if (!is_seen(c, &tile, begin)) continue;
            for (tile.head = tile.heads_begin; tile.head < tile.heads_end; tile.head++) {
                load_queries(c, &tile, c->queries, c->query_stride, s->queries);
                if (c->anchored) load_queries(c, &tile, c->anchored, c->anchored_stride, s->anchored);
                attend_segment(c, &tile, begin, s);
                merge(c, &tile, &s->segment, state_at(job, states, tile.head - tile.heads_begin));
            }
        }
        if (job->parts > 1) continue;
        for (tile.head = tile.heads_begin; tile.head < tile.heads_end; tile.head++)
            store_tile(c, &tile, state_at(job, states, tile.head - tile.heads_begin));
    }
}

/* Merges what was shared out, in the order in which one thread would have. */
static void merge_parts(const Job *job, uint8_t *memory) {
    const Call *c = job->call;
    for (int64_t index = 0; index < job->num_tiles * job->head_runs; index++) {
        Tile tile = tile_at(job, index);
        for (; tile.head < tile.heads_end; tile.head++) {
            State *whole = state_at(job, memory, 0);
            start(&tile, whole);
            for (int64_t part = 0; part < job->parts; part++) {
                int64_t at = (index * job->parts + part) * job->heads_at_once;
                merge(c, &tile, state_at(job, job->states, at + tile.head - tile.heads_begin), whole);
            }
            store_tile(c, &tile, whole);
        }
    }
}

/* Chooses how much of a tile is an item, so that every thread has some. */
static void share_out(Job *job, int64_t longest) {
    int64_t wanted = job->call->threads > 1 ? job->call->threads * ITEMS_PER_THREAD : 1;
    int64_t heads = job->call->keys.heads;
    job->heads_at_once = heads;
    while (job->heads_at_once > 1 && job->num_tiles * ceil_div(heads, job->heads_at_once) < wanted)
        job->heads_at_once = ceil_div(job->heads_at_once, 2);
    job->head_runs = ceil_div(heads, job->heads_at_once);
    job->parts = job->num_tiles * job->head_runs < wanted ? ceil_div(longest, SEGMENT) : 1;
}

/* Returns 0, or 1 where there is no memory. */
int llmopt_attend(const Call *c) {
    Job job = {.call = c};
    int64_t longest = 0;
    for (int64_t i = 0; i < c->num_spans; i++) {
        job.num_tiles += row_tiles(c, c->spans + i);
        longest = larger(longest, c->spans[i].num_cached);
    }
    if (!job.num_tiles) return 0;
    share_out(&job, longest);
    job.state_bytes = ceil_div((int64_t)sizeof(State) + TILE_ROWS * c->values.dim * 4, 64) * 64;
    int64_t items = job.num_tiles * job.head_runs * job.parts;
    int64_t before_bytes = ceil_div((c->num_spans + 1) * (int64_t)sizeof(int64_t), 64) * 64;
    int64_t states_bytes = job.parts > 1 ? items * job.heads_at_once * job.state_bytes : 0;
    uint8_t *memory = workspace(0, before_bytes + states_bytes + job.state_bytes);
    if (!memory) return 1;
    int64_t *before = (int64_t *)memory;
    before[0] = 0;
    for (int64_t i = 0; i < c->num_spans; i++) before[i + 1] = before[i] + row_tiles(c, c->spans + i);
    job.tiles_before = before;
    job.states = memory + before_bytes;
    run_parallel(attend_items, &job, smaller(c->threads, items));
    if (atomic_load(&job.failed)) return 1;
    if (job.parts > 1) merge_parts(&job, memory + before_bytes + states_bytes);
    return 0;
}
