/* Attention of a tile of queries over one segment of keys: scores, softmax, weighted sum of the values.
 *
 * The rows of a tile are the query heads that share a KV head (GQA), of one token or of several neighbouring
 * ones. Keys and values are dequantized to floats one run at a time, once for all rows; keys transposed, so
 * that a lane is a position and scores need no horizontal sums. */
#ifndef LLMOPT_SEGMENT_H
#define LLMOPT_SEGMENT_H

#include <math.h>

#include "paged.h"
#include "quantize.h"

#define SEGMENT 256
#define TILE_ROWS 32

/* The query tokens of one sequence in the batch. */
typedef struct {
    int64_t begin, end;    /* their rows in the batch */
    int64_t num_cached;    /* tokens of the sequence so far */
    /* The block table omits `evicted_span` evicted tokens after the first `sink_length`. */
    int64_t sink_length, evicted_span;
    const int64_t *blocks;
    /* The last `num_drafts` tokens are a token tree: their depths in it, and which others each attends to. */
    int64_t num_drafts;
    const int64_t *depths; /* [num_drafts], from 1 on */
    const uint8_t *ancestors; /* [num_drafts][num_drafts], 0 or 1; ancestors come first */
} Span;

/* The decode sequences (one query token each), as tensors: they come first among the spans. */
typedef struct {
    const int64_t *rows, *lengths, *evicted_spans; /* [count] */
    const int64_t *blocks;                /* [count][width] */
    int64_t count, width, sink_length;
} DecodeGroup;

typedef struct {
    const void *queries;   /* [tokens][query_stride], float32 or bfloat16, heads contiguous */
    const void *sink_queries;  /* queries rotated for the `num_sink_tokens` sink keys, or NULL */
    void *out;             /* [tokens][heads][values.dim] */
    Span *spans;           /* every call rewrites those of the decode group */
    const float *sinks;    /* learned sink logits [heads], or NULL */
    int64_t num_spans, heads, query_stride, sink_query_stride, is_bf16;
    int64_t block_size;
    int64_t window;        /* 0: none */
    int64_t num_sink_tokens, chunk;   /* chunk 0: none */
    int64_t threads;
    DecodeGroup decode;
    Paged keys, values;
    float scale, softcap;  /* softcap 0: none */
} Call;

/* Running (online) softmax of the rows of a tile over some segments. */
typedef struct {
    float largest[TILE_ROWS], sum[TILE_ROWS];
    float *mixed;          /* [rows][dim], sum of the values times e^(score - largest) */
} State;

/* A tile of query rows, for some KV heads; `head` is the current one, `own` the rows' places in the sequence:
 * their positions, but for draft tokens of a tree. */
typedef struct {
    int64_t span, first, rows, own[TILE_ROWS];
    int64_t from[TILE_ROWS], least_from; /* first visible positions, sink tokens aside */
    int64_t head, heads_begin, heads_end;
} Tile;

/* A thread's buffers for one head of a tile. */
typedef struct {
    float *queries, *sink_queries; /* [rows][keys.dim], scaled */
    float *scores;         /* [rows][SEGMENT] */
    State segment, whole;
} Part;

typedef struct {
    float *run;            /* [RUN][dim] of keys or values */
    Part parts[];          /* of the heads of an item */
} Scratch;

static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

static inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

static inline int64_t group_of(const Call *c) { return c->heads / c->keys.heads; }

/* The first visible position of the query at `own`, sink tokens aside. */
static inline int64_t visible_from(const Call *c, int64_t own) {
    int64_t from = 0;
    if (c->window) from = larger(from, own - c->window + 1);
    if (c->chunk) from = larger(from, own - own % c->chunk);
    return from;
}

/* The place of the first draft token of a tree; no place where there is none. */
static inline int64_t first_draft(const Span *span) { return span->num_cached - span->num_drafts; }

/* The position of the token at a place: behind its parent in the tree, if it is of one. */
static inline int64_t position_of(const Span *span, int64_t place) {
    int64_t first = first_draft(span);
    return place < first ? place : first - 1 + span->depths[place - first];
}

/* Whether the draft token at `own` attends to the one at `place`. */
static inline int sees_draft(const Call *c, const Span *span, int64_t own, int64_t place, int64_t from) {
    int64_t first = first_draft(span), position = position_of(span, place);
    return span->ancestors[(own - first) * span->num_drafts + place - first] &&
           (position >= from || position < c->num_sink_tokens);
}

/* Token (row of the batch) and query head of row r of a tile. */
static inline int64_t token_of(const Call *c, const Tile *tile, int64_t r) {
    return c->spans[tile->span].begin + (tile->first + r) / group_of(c);
}
static inline int64_t head_of(const Call *c, const Tile *tile, int64_t r) {
    return tile->head * group_of(c) + (tile->first + r) % group_of(c);
}

/* Whether scores are integer dot products: int8 keys and queries quantized to int8, as in llama.cpp. */
static inline int in_codes(const Call *c) { return c->is_bf16 && c->keys.type == STORED_S8; }

/* Whether to use bfloat16 dot products on keys or values, without widening them to float32. */
static inline int in_pairs(const Call *c, const Paged *p) {
    return HAS_PAIRS && c->is_bf16 && p->type != STORED_F32 && !(p == &c->keys && in_codes(c));
}

/* A query quantized to int8: its codes [dim] are followed by these, in the room of its floats. */
typedef struct {
    float scale;
    int32_t start;         /* of its dot products with 128 + key: -128 times the sum of its codes */
} QuantizedQuery;

static void quantize_query(const uint16_t *from, int64_t dim, float factor, int8_t *codes) {
    fvec largest = fset(0.0f);
    for (int64_t d = 0; d < dim; d += LANES)
        largest = fmax_(largest, fabs_(fbits(ISHL(iwiden_u16(from + d), 16))));
    float scale = scale_of(largest, 127.0f);
    ivec sum = iset(0);
    for (int64_t d = 0; d < dim; d += LANES) {
        ivec code = quantize_to(fbits(ISHL(iwiden_u16(from + d), 16)), fset(scale));
        istore_s8(codes + d, code);
        sum = iadd(sum, code);
    }
    QuantizedQuery query = {scale * factor, -128 * isum_lanes(sum)};
    memcpy(codes + dim, &query, sizeof query);
}

/* Loads queries as scaled floats; or as codes; or as bfloat16 pairs, whose scores are scaled later. */
static void load_queries(const Call *c, const Tile *tile, const void *from, int64_t stride, float *to) {
    int64_t dim = c->keys.dim;
    for (int64_t r = 0; r < tile->rows; r++) {
        int64_t at = token_of(c, tile, r) * stride + head_of(c, tile, r) * dim;
        if (in_codes(c)) {
            quantize_query((const uint16_t *)from + at, dim, c->scale, (int8_t *)(to + r * dim));
            continue;
        }
        if (in_pairs(c, &c->keys)) {
            memcpy(to + r * dim, (const uint16_t *)from + at, (size_t)dim * 2);
            continue;
        }
        for (int64_t d = 0; d < dim; d += LANES) {
            fvec x = c->is_bf16 ? fbits(ISHL(iwiden_u16((const uint16_t *)from + at + d), 16))
                                : fload((const float *)from + at + d);
            fstore(to + r * dim + d, fmul(x, fset(c->scale)));
        }
    }
}

/* The cache slots of a run of positions. Positions invisible to every row may be evicted: the slot of a
 * visible position is read in their place, so that no uninitialised value (NaN) is read. */
static void find_slots(const Call *c, const Tile *tile, int64_t begin, SlotRun *slot_run) {
    const Span *span = c->spans + tile->span;
    int64_t from = tile->least_from, last = tile->own[tile->rows - 1];
    int64_t before = -2, slot = 0, left = 0; /* left: of the block that `slot` is in */
    for (int i = 0; i < RUN; i++) {
        int64_t p = begin + i;
        if (p > last || (p < from && p >= c->num_sink_tokens)) p = last;
        if (p >= span->sink_length) p -= span->evicted_span;
        if (p == before + 1 && left > 1) {
            slot++, left--;
        } else if (p != before) {
            int64_t within = p % c->block_size;
            slot = span->blocks[p / c->block_size] * c->block_size + within;
            left = c->block_size - within;
        }
        slot_run->slots[i] = slot;
        before = p;
    }
}

/* Q K^T of a few rows and a run of keys; `depth` elements or pairs of a head. */
INLINE void multiply_keys(const int rows, const int pairs, const float *queries, int64_t stride,
                          const float *columns, int64_t depth, float *scores) {
    fvec sums[MAX_ROWS][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++) sums[r][v] = fset(0.0f);
    for (int64_t d = 0; d < depth; d++)
        for (int r = 0; r < rows; r++) {
            ivec query = ibroadcast(queries + r * stride + d);
            for (int v = 0; v < VECTORS; v++)
                sums[r][v] = multiply_add(sums[r][v], query, iload(columns + d * RUN + v * LANES), pairs);
        }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++) fstore(scores + r * SEGMENT + v * LANES, sums[r][v]);
}

/* The same of int8 codes, four elements at a time; `dim` elements of a head. */
INLINE void multiply_codes(const int rows, const float *queries, int64_t dim, const float *columns,
                           float *scores) {
    ivec sums[MAX_ROWS][VECTORS];
    QuantizedQuery query[MAX_ROWS];
    for (int r = 0; r < rows; r++) {
        memcpy(query + r, (const int8_t *)(queries + r * dim) + dim, sizeof query[r]);
        for (int v = 0; v < VECTORS; v++) sums[r][v] = iset(query[r].start);
    }
    for (int64_t d = 0; d < dim / 4; d++)
        for (int v = 0; v < VECTORS; v++) {
            ivec keys = ixor(iload(columns + d * RUN + v * LANES), iset((int32_t)0x80808080));
            for (int r = 0; r < rows; r++)
                sums[r][v] = dot4(sums[r][v], keys, ibroadcast((const int8_t *)(queries + r * dim) + d * 4), 0);
        }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < VECTORS; v++)
            fstore(scores + r * SEGMENT + v * LANES, fmul(itof(sums[r][v]), fset(query[r].scale)));
}

/* P V: adds a weighted run of values to 32 or 16 elements of a few rows; `depth` positions or pairs. */
INLINE void multiply_values(const int rows, const int vectors, const int pairs, const float *weights,
                            int64_t stride, const float *values, int64_t depth, int64_t dim, float *mixed) {
    fvec sums[MAX_ROWS][VECTORS];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) sums[r][v] = fload(mixed + r * dim + v * LANES);
    for (int i = 0; i < depth; i++)
        for (int r = 0; r < rows; r++) {
            ivec weight = ibroadcast(weights + r * stride + i);
            for (int v = 0; v < vectors; v++)
                sums[r][v] = multiply_add(sums[r][v], weight, iload(values + i * dim + v * LANES), pairs);
        }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) fstore(mixed + r * dim + v * LANES, sums[r][v]);
}

/* clang-format off */
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
/* clang-format on */

INLINE void score_rows(const int pairs, const Call *c, int64_t rows, const float *queries,
                       const float *columns, float *scores) {
    int64_t dim = c->keys.dim, depth = pairs ? dim / 2 : dim;
    for (int64_t r = 0; r < rows; r += MAX_ROWS) {
#define DO(n) multiply_keys(n, pairs, queries + r * dim, dim, columns, depth, scores + r * SEGMENT)
        FOR_ROWS(smaller(rows - r, MAX_ROWS), DO)
#undef DO
    }
}

static void score_run(const Call *c, int64_t rows, const float *queries, const float *columns,
                      float *scores) {
    if (in_codes(c)) {
        int64_t dim = c->keys.dim;
        for (int64_t r = 0; r < rows; r += MAX_ROWS) {
#define DO(n) multiply_codes(n, queries + r * dim, dim, columns, scores + r * SEGMENT)
            FOR_ROWS(smaller(rows - r, MAX_ROWS), DO)
#undef DO
        }
    } else if (in_pairs(c, &c->keys)) score_rows(1, c, rows, queries, columns, scores);
    else score_rows(0, c, rows, queries, columns, scores);
}

INLINE void mix_rows(const int pairs, const Call *c, int64_t rows, const float *weights, int64_t stride,
                     const float *values, float *mixed) {
    int64_t dim = c->values.dim, depth = pairs ? RUN / 2 : RUN;
    for (int64_t r = 0; r < rows; r += MAX_ROWS) {
        int64_t count = smaller(rows - r, MAX_ROWS), d = 0;
        const float *own = weights + r * stride;
        for (; d + PANEL <= dim; d += PANEL) {
#define DO(n) multiply_values(n, VECTORS, pairs, own, stride, values + d, depth, dim, mixed + r * dim + d)
            FOR_ROWS(count, DO)
#undef DO
        }
        if (d < dim) {
#define DO(n) multiply_values(n, VECTORS / 2, pairs, own, stride, values + d, depth, dim, mixed + r * dim + d)
            FOR_ROWS(count, DO)
#undef DO
        }
    }
}

/* Attention weights are rounded to bfloat16 if the values are multiplied so, as in torch's attention. */
static void mix_run(const Call *c, int64_t rows, const float *weights, const float *values, float *mixed) {
    if (!in_pairs(c, &c->values)) {
        mix_rows(0, c, rows, weights, SEGMENT, values, mixed);
        return;
    }
    float pairs[TILE_ROWS * RUN / 2];
    for (int64_t r = 0; r < rows; r++)
        store_bf16((uint16_t *)(pairs + r * (RUN / 2)), weights + r * SEGMENT, RUN);
    mix_rows(1, c, rows, pairs, RUN / 2, values, mixed);
}

/* Scales, softcap and causal / window / tree mask of a run of scores that begins at `begin`. */
static void finish_scores(const Call *c, const Tile *tile, int64_t begin, const float *scales,
                          float *scores) {
    const Span *span = c->spans + tile->span;
    for (int64_t r = 0; r < tile->rows; r++) {
        float *row = scores + r * SEGMENT;
        for (int i = 0; i < RUN; i += LANES) {
            fvec s = fload(row + i);
            if (in_pairs(c, &c->keys)) s = fmul(s, fset(c->scale));
            if (scales) s = fmul(s, fload(scales + i));
            if (c->softcap > 0.0f) { /* tanh |x| = (1 - e^-2|x|) / (1 + e^-2|x|) */
                fvec x = fdiv(s, fset(c->softcap)), one = fset(1.0f);
                fvec e = exp_not_above_zero(fmul(fabs_(x), fset(-2.0f)));
                fvec size = fmul(fdiv(fsub(one, e), fadd(one, e)), fset(c->softcap));
                s = fbits(ior(ibits(size), iand(ibits(s), iset((int32_t)0x80000000))));
            }
            fstore(row + i, s);
        }
        int64_t own = tile->own[r], from = larger(tile->from[r], c->num_sink_tokens);
        int64_t first = first_draft(span);
        for (int64_t p = larger(begin, own + 1); p < begin + RUN; p++) row[p - begin] = -INFINITY;
        for (int64_t p = larger(begin, c->num_sink_tokens); p < smaller(smaller(from, first), begin + RUN); p++)
            row[p - begin] = -INFINITY;
        for (int64_t p = larger(begin, first); p < smaller(own + 1, begin + RUN); p++)
            if (!sees_draft(c, span, own, p, tile->from[r])) row[p - begin] = -INFINITY;
    }
}

/* Softmax numerators of a segment, in place; each row's maximum and sum go to `state`. */
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

/* Prefetches the share of a run that is the current head's, of as many whole positions for each: their heads are
 * contiguous, so that memory is read in its order. */
INLINE void fetch_share(const Paged *p, const SlotRun *slot_run, const Tile *tile) {
    const int64_t heads = tile->heads_end - tile->heads_begin, at = tile->head - tile->heads_begin;
    const int64_t bytes = (heads - 1) * p->head_bytes + p->dim * 4 / word_floats(p);
    for (int64_t i = RUN * at / heads; i < RUN * (at + 1) / heads; i++)
        fetch(vector_at(p, slot_run->slots[i], tile->heads_begin), bytes);
}

/* One segment for all heads of a tile. The heads of a position are contiguous in memory, so heads are the
 * innermost loop and reads are sequential. */
static void attend_segment(const Call *c, Tile *tile, int64_t begin, Scratch *s) {
    int64_t from = tile->least_from, last = tile->own[tile->rows - 1];
    int64_t end = smaller(begin + SEGMENT, last + 1);
    SlotRun slot_run[SEGMENT / RUN];
    int64_t runs[SEGMENT / RUN], count = 0; /* those visible to some row */
    for (int64_t p = begin; p < end; p += RUN)
        if (p < c->num_sink_tokens || p + RUN > from) runs[count++] = p;
    float scales[RUN], *of_keys = c->keys.scales ? scales : NULL;
    for (int64_t i = 0; i < count; i++) find_slots(c, tile, runs[i], slot_run + i);
    for (int64_t i = 0; i < count; i++) {
        for (tile->head = tile->heads_begin; tile->head < tile->heads_end; tile->head++) {
            const Part *part = s->parts + (tile->head - tile->heads_begin);
            if (i + 1 < count) fetch_share(&c->keys, slot_run + i + 1, tile);
            else fetch_share(&c->values, slot_run, tile);
            int as = in_codes(c) ? AS_CODES : in_pairs(c, &c->keys) ? AS_PAIRS : AS_FLOATS;
            read_columns(&c->keys, slot_run + i, tile->head, as, s->run);
            float *scores = part->scores + i * RUN;
            score_run(c, tile->rows, part->queries, s->run, scores);
            if (c->sink_queries && runs[i] < c->num_sink_tokens) {
                float sink_scores[TILE_ROWS * SEGMENT];
                score_run(c, tile->rows, part->sink_queries, s->run, sink_scores);
                for (int64_t r = 0; r < tile->rows; r++)
                    memcpy(scores + r * SEGMENT, sink_scores + r * SEGMENT,
                           (size_t)smaller(RUN, c->num_sink_tokens - runs[i]) * sizeof(float));
            }
            if (of_keys) read_scales(&c->keys, slot_run + i, tile->head, scales);
            finish_scores(c, tile, runs[i], of_keys, scores);
        }
    }
    for (int64_t h = 0; h < tile->heads_end - tile->heads_begin; h++) {
        Part *part = s->parts + h;
        soften(tile, count * RUN, part->scores, &part->segment);
        memset(part->segment.mixed, 0, (size_t)(tile->rows * c->values.dim) * sizeof(float));
    }
    for (int64_t i = 0; i < count; i++) {
        for (tile->head = tile->heads_begin; tile->head < tile->heads_end; tile->head++) {
            Part *part = s->parts + (tile->head - tile->heads_begin);
            float *weights = part->scores + i * RUN;
            if (c->values.scales) {
                read_scales(&c->values, slot_run + i, tile->head, scales);
                for (int64_t r = 0; r < tile->rows; r++)
                    for (int k = 0; k < RUN; k += LANES)
                        fstore(weights + r * SEGMENT + k,
                               fmul(fload(weights + r * SEGMENT + k), fload(scales + k)));
            }
            if (i + 1 < count) fetch_share(&c->values, slot_run + i + 1, tile);
            read_rows(&c->values, slot_run + i, tile->head, in_pairs(c, &c->values), s->run);
            mix_run(c, tile->rows, weights, s->run, part->segment.mixed);
        }
    }
}

#endif
