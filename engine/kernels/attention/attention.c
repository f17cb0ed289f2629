/* Paged attention on CPU: online softmax over KV blocks, read in place.
 *
 * The query heads that share a KV head (GQA), of one token or of several neighbouring ones, are the rows of
 * a tile. Keys are processed in segments, counted from the beginning of the sequence: scores, softmax,
 * weighted sum of the values; then segments are merged in order (log-sum-exp rescaling). Results are
 * batch-invariant: a row depends on its position alone, not on other rows, sequences or the number of
 * threads. With too few tiles for the threads, segments are split over threads (split-KV, as in
 * Flash-Decoding) and merged afterwards, bit-identically. */
#include <stdatomic.h>
#include <stdlib.h>

#include "parallel.h"
#include "segment.h"

#define ITEMS_PER_THREAD 2
#define MAX_HEADS 64 /* of an item, fewer where there are more rows: scores stay in L2 */

/* A work item is a tile of rows, some of its KV heads, and all segments or one. Heads are grouped where that
 * leaves enough items: their vectors are contiguous in memory. */
typedef struct {
    const Call *call;
    const int64_t *tiles_before; /* [num_spans + 1], tiles of rows */
    int64_t num_tiles;
    int64_t max_rows; /* of a tile */
    int64_t heads_at_once, head_runs;
    int64_t parts; /* split-KV parts of a tile's segments; 1: no split */
    uint8_t *states; /* [item][heads_at_once], partial softmax states of the split */
    int64_t state_bytes;
    atomic_long next;
    atomic_int failed;
} Job;

static inline int64_t row_tiles(const Call *c, const Span *span) {
    return ceil_div((span->end - span->begin) * group_of(c), TILE_ROWS);
}

static int64_t part_floats(const Job *job) {
    const Call *c = job->call;
    return job->max_rows * (2 * c->keys.dim + SEGMENT + 2 * c->values.dim);
}

static int64_t scratch_bytes(const Job *job) {
    const Call *c = job->call;
    int64_t floats = job->heads_at_once * part_floats(job) + RUN * larger(c->keys.dim, c->values.dim);
    return (int64_t)sizeof(Scratch) + job->heads_at_once * (int64_t)sizeof(Part) + floats * 4;
}

static Scratch *lay_out(const Job *job, uint8_t *memory) {
    const Call *c = job->call;
    Scratch *s = (Scratch *)memory;
    float *next = (float *)(s->parts + job->heads_at_once);
    for (int64_t h = 0; h < job->heads_at_once; h++, next += part_floats(job)) {
        Part *part = s->parts + h;
        part->queries = next;
        part->sink_queries = part->queries + job->max_rows * c->keys.dim;
        part->scores = part->sink_queries + job->max_rows * c->keys.dim;
        part->segment.mixed = part->scores + job->max_rows * SEGMENT;
        part->whole.mixed = part->segment.mixed + job->max_rows * c->values.dim;
    }
    s->run = next;
    return s;
}

/* The partial state of a head of a split part. */
static State *shared_state(const Job *job, int64_t index) {
    State *state = (State *)(job->states + index * job->state_bytes);
    state->mixed = (float *)(state + 1);
    return state;
}

static void start(const Tile *tile, State *state) {
    for (int64_t r = 0; r < tile->rows; r++) state->largest[r] = -INFINITY, state->sum[r] = 0.0f;
}

/* The rows and heads of an item, the last rows first: they attend to the most keys. */
static Tile tile_at(const Job *job, int64_t index) {
    const Call *c = job->call;
    int64_t rows_index = job->num_tiles - 1 - index / job->head_runs;
    Tile tile = {0};
    while (job->tiles_before[tile.span + 1] <= rows_index) tile.span++;
    const Span *span = c->spans + tile.span;
    int64_t tokens = span->end - span->begin;
    tile.first = (rows_index - job->tiles_before[tile.span]) * TILE_ROWS;
    tile.rows = smaller(TILE_ROWS, tokens * group_of(c) - tile.first);
    tile.least_from = first_draft(span);
    for (int64_t r = 0; r < tile.rows; r++) {
        tile.own[r] = span->num_cached - tokens + (tile.first + r) / group_of(c);
        tile.from[r] = visible_from(c, position_of(span, tile.own[r]));
        tile.least_from = smaller(tile.least_from, tile.from[r]);
    }
    tile.heads_begin = tile.head = index % job->head_runs * job->heads_at_once;
    tile.heads_end = smaller(tile.heads_begin + job->heads_at_once, c->keys.heads);
    return tile;
}

/* Merges the softmax states of `from` into `into`; either may be empty. */
static void merge(const Call *c, const Tile *tile, const State *from, State *into) {
    int64_t dim = c->values.dim;
    for (int64_t r = 0; r < tile->rows; r++) {
        if (!(from->largest[r] > -INFINITY)) continue;
        int is_first = !(into->largest[r] > -INFINITY);
        float largest = is_first || from->largest[r] > into->largest[r] ? from->largest[r] : into->largest[r];
        float old = is_first ? 0.0f : expf(into->largest[r] - largest),
              new = expf(from->largest[r] - largest);
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
        if (c->sinks) { /* learned sink logit: an extra score that weighs no value */
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

/* Whether any position of a segment is visible to a row of the tile. */
static int is_visible(const Call *c, const Tile *tile, int64_t begin) {
    if (begin > tile->own[tile->rows - 1]) return 0;
    return begin < c->num_sink_tokens || begin + SEGMENT > tile->least_from;
}

static void attend_items(void *argument) {
    Job *job = argument;
    const Call *c = job->call;
    uint8_t *memory = workspace(1, scratch_bytes(job));
    if (!memory) {
        atomic_store(&job->failed, 1);
        return;
    }
    Scratch *s = lay_out(job, memory);
    for (;;) {
        int64_t item = atomic_fetch_add(&job->next, 1);
        if (item >= job->num_tiles * job->head_runs * job->parts) return;
        Tile tile = tile_at(job, item / job->parts);
        int64_t heads = tile.heads_end - tile.heads_begin;
        int64_t begin = 0, end = tile.own[tile.rows - 1] + 1;
        if (job->parts > 1) {
            begin = item % job->parts * SEGMENT;
            end = smaller(end, begin + SEGMENT);
        }
        State *wholes[MAX_HEADS];
        for (int64_t h = 0; h < heads; h++) {
            tile.head = tile.heads_begin + h;
            load_queries(c, &tile, c->queries, c->query_stride, s->parts[h].queries);
            if (c->sink_queries)
                load_queries(c, &tile, c->sink_queries, c->sink_query_stride, s->parts[h].sink_queries);
            wholes[h] =
                job->parts > 1 ? shared_state(job, item * job->heads_at_once + h) : &s->parts[h].whole;
            start(&tile, wholes[h]);
        }
        for (; begin < end; begin += SEGMENT) {
            if (!is_visible(c, &tile, begin)) continue;
            attend_segment(c, &tile, begin, s);
            for (int64_t h = 0; h < heads; h++) merge(c, &tile, &s->parts[h].segment, wholes[h]);
        }
        if (job->parts > 1) continue;
        for (tile.head = tile.heads_begin; tile.head < tile.heads_end; tile.head++)
            store_tile(c, &tile, wholes[tile.head - tile.heads_begin]);
    }
}

/* Merges the split parts, in the order of the unsplit computation. */
static void merge_parts(const Job *job, State *whole) {
    const Call *c = job->call;
    for (int64_t index = 0; index < job->num_tiles * job->head_runs; index++) {
        Tile tile = tile_at(job, index);
        for (; tile.head < tile.heads_end; tile.head++) {
            start(&tile, whole);
            for (int64_t part = 0; part < job->parts; part++) {
                int64_t at = (index * job->parts + part) * job->heads_at_once;
                merge(c, &tile, shared_state(job, at + tile.head - tile.heads_begin), whole);
            }
            store_tile(c, &tile, whole);
        }
    }
}

/* Chooses the heads per item and the split, so that every thread has work. */
static void share_out(Job *job, int64_t longest) {
    int64_t wanted = job->call->threads > 1 ? job->call->threads * ITEMS_PER_THREAD : 1;
    int64_t heads = job->call->keys.heads;
    job->heads_at_once = smaller(heads, larger(1, MAX_HEADS / job->max_rows));
    while (job->heads_at_once > 1 && job->num_tiles * ceil_div(heads, job->heads_at_once) < wanted)
        job->heads_at_once = ceil_div(job->heads_at_once, 2);
    job->head_runs = ceil_div(heads, job->heads_at_once);
    job->parts = job->num_tiles * job->head_runs < wanted ? ceil_div(longest, SEGMENT) : 1;
}

static void write_spans(const DecodeGroup *group, Span *spans) {
    for (int64_t i = 0; i < group->count; i++)
        spans[i] = (Span){
            .begin = group->rows[i],
            .end = group->rows[i] + 1,
            .num_cached = group->lengths[i],
            .sink_length = group->sink_length,
            .evicted_span = group->evicted_spans[i],
            .blocks = group->blocks + i * group->width,
        };
}

/* Returns 0, or 1 if a workspace cannot be allocated. */
int llmopt_attend(const Call *c) {
    Job job = {.call = c};
    int64_t longest = 0;
    write_spans(&c->decode, c->spans);
    for (int64_t i = 0; i < c->num_spans; i++) {
        int64_t rows = (c->spans[i].end - c->spans[i].begin) * group_of(c);
        job.num_tiles += row_tiles(c, c->spans + i);
        job.max_rows = larger(job.max_rows, smaller(rows, TILE_ROWS));
        longest = larger(longest, c->spans[i].num_cached);
    }
    if (!job.num_tiles) return 0;
    share_out(&job, longest);
    job.state_bytes = ceil_div((int64_t)sizeof(State) + job.max_rows * c->values.dim * 4, 64) * 64;
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
    if (job.parts > 1) {
        State *whole = (State *)(memory + before_bytes + states_bytes);
        whole->mixed = (float *)(whole + 1);
        merge_parts(&job, whole);
    }
    return 0;
}
