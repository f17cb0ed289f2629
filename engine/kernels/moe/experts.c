/* Mixture of experts with packed weights in one call: token permutation, two grouped GEMMs, the gate between
 * them, and the weighted sum of a token's experts.
 *
 * Routed rows are sorted by expert; a work item is a panel of an expert and a run of its rows. Intermediates
 * are rounded to the stored dtype where the loop over experts stores them, and a token's experts are added
 * in the order of their ids, so that the results are the loop's, bit for bit. */
#include "../elementwise/layer.c"
#include "../linear/linear.c"

/* The same linear of every expert: `like` is the call of its GEMM, but for rows, inputs and outputs. */
typedef struct {
    const Weight *const *weights; /* [count], of one shape, step, base and kind of offsets */
    const float *const *biases;   /* [count] of [out_features], or NULL */
    Call like;
} ExpertLinear;

typedef struct {
    ExpertLinear gate_up, down;
    const void *x;         /* [tokens][hidden]; on_inputs: [tokens * top_k][hidden], weighted already */
    const void *routing_weights; /* [tokens][top_k] */
    const int64_t *ids;    /* [tokens][top_k]; others than first .. first + count - 1 are left out */
    void *out;             /* [tokens][hidden] */
    int64_t tokens, top_k, first, count;
    int64_t on_inputs, is_bf16, activation, threads;
} ExpertsCall;

/* The routed rows, sorted by expert. */
typedef struct {
    const ExpertsCall *call;
    int64_t rows;
    int64_t *begins;       /* [count + 1], rows of each expert */
    int64_t *pairs;        /* [rows], token * top_k + k */
    int64_t *places;       /* [tokens * top_k], the row of a pair, or -1 */
    uint8_t *x, *stacked, *gated, *y; /* [rows][hidden], [2 * inner], [inner], [hidden] */
    atomic_long next;
} Routing;

/* A grouped GEMM: the job of all rows, and the items before each expert. */
typedef struct {
    const ExpertLinear *linear;
    const Routing *routing;
    Job job;
    int64_t *items;        /* [count + 1] */
} Grouped;

/* Counting sort of the pairs by expert; stable, so that an expert's rows are in the order of the tokens. */
static void sort_by_expert(Routing *r) {
    const ExpertsCall *c = r->call;
    memset(r->begins, 0, (size_t)(c->count + 1) * sizeof(int64_t));
    for (int64_t pair = 0; pair < c->tokens * c->top_k; pair++) {
        int64_t expert = c->ids[pair] - c->first;
        if (expert >= 0 && expert < c->count) r->begins[expert + 1]++;
    }
    for (int64_t e = 0; e < c->count; e++) r->begins[e + 1] += r->begins[e];
    r->rows = r->begins[c->count];
    for (int64_t pair = 0; pair < c->tokens * c->top_k; pair++) {
        int64_t expert = c->ids[pair] - c->first;
        r->places[pair] = -1;
        if (expert < 0 || expert >= c->count) continue;
        r->places[pair] = r->begins[expert]++;
        r->pairs[r->places[pair]] = pair;
    }
    for (int64_t e = c->count; e > 0; e--) r->begins[e] = r->begins[e - 1];
    r->begins[0] = 0;
}

static inline int64_t element_bytes(const ExpertsCall *c) { return c->is_bf16 ? 2 : 4; }
static inline int64_t hidden_size(const ExpertsCall *c) { return c->gate_up.weights[0]->in_features; }

static void gather_rows(void *argument) {
    Routing *r = argument;
    const ExpertsCall *c = r->call;
    int64_t bytes = hidden_size(c) * element_bytes(c);
    for (;;) {
        int64_t row = atomic_fetch_add(&r->next, 1);
        if (row >= r->rows) return;
        int64_t from = c->on_inputs ? r->pairs[row] : r->pairs[row] / c->top_k;
        memcpy(r->x + row * bytes, (const uint8_t *)c->x + from * bytes, (size_t)bytes);
    }
}

static void multiply_items(void *argument) {
    Grouped *g = argument;
    const Routing *r = g->routing;
    const Job *all = &g->job;
    int64_t count = r->call->count, panels = ceil_div(all->weight->out_features, PANEL);
    int64_t total = g->items[count], expert = 0;
    int64_t run = total / (all->call->threads * RUNS_PER_THREAD) + 1;
    int in_tiles = has_tiles(all->weight, all->call);
    if (in_tiles) begin_tiles();
    for (;;) {
        int64_t begin = atomic_fetch_add(&g->job.next, run);
        if (begin >= total) break;
        for (int64_t item = begin; item < begin + run && item < total; item++) {
            while (g->items[expert + 1] <= item) expert++;
            Call call = *all->call;
            if (g->linear->biases) call.bias = g->linear->biases[expert];
            Job job = {.weight = g->linear->weights[expert],
                       .call = &call,
                       .values = all->values,
                       .stride = all->stride,
                       .sums = all->sums,
                       .scales = all->scales};
            int64_t within = item - g->items[expert];
            int64_t first = r->begins[expert] + within / panels * ROWS_AT_ONCE;
            int64_t left = r->begins[expert + 1] - first;
            multiply_panel(&job, within % panels, first, left < ROWS_AT_ONCE ? left : ROWS_AT_ONCE);
        }
    }
    if (in_tiles) end_tiles();
}

/* Bytes of the prepared inputs of a grouped GEMM of some rows. */
static int64_t grouped_bytes(const ExpertLinear *linear, int64_t rows) {
    return prepared_bytes(linear->weights[0], linear->like.input_dtype, rows);
}

static void multiply_grouped(const Routing *r, const ExpertLinear *linear, const void *x, void *y,
                             int64_t *items, uint8_t *memory) {
    const Weight *w = linear->weights[0];
    Call call = linear->like;
    call.weight = w, call.x = x, call.y = y, call.rows = r->rows, call.x_stride = w->in_features;
    Grouped g = {.linear = linear, .routing = r, .items = items};
    lay_out_job(&g.job, &call, memory);
    items[0] = 0;
    for (int64_t e = 0; e < r->call->count; e++) {
        int64_t runs = ceil_div(r->begins[e + 1] - r->begins[e], ROWS_AT_ONCE);
        items[e + 1] = items[e] + runs * ceil_div(w->out_features, PANEL);
    }
    run_parallel(prepare_rows, &g.job, r->rows < 3 ? 1 : call.threads);
    atomic_store(&g.job.next, 0);
    run_parallel(multiply_items, &g, call.threads);
}

INLINE float routing_weight(const ExpertsCall *c, int64_t pair, const int is_bf16) {
    if (!is_bf16) return ((const float *)c->routing_weights)[pair];
    uint32_t bits = (uint32_t)((const uint16_t *)c->routing_weights)[pair] << 16;
    float weight;
    memcpy(&weight, &bits, 4);
    return weight;
}

/* The sum of a token's experts, in the order of their ids. */
INLINE void combine_token(const Routing *r, int64_t token, const int is_bf16) {
    const ExpertsCall *c = r->call;
    int64_t hidden = hidden_size(c), at = token * c->top_k;
    for (int64_t i = 0; i < hidden; i += LANES) store(c->out, token * hidden + i, fset(0.0f), is_bf16);
    for (int64_t k = 0, last = -1; k < c->top_k; k++) {
        int64_t least = -1; /* place of the next id: rows are sorted by expert, so places are in its order */
        for (int64_t j = 0; j < c->top_k; j++)
            if (r->places[at + j] > last && (least < 0 || r->places[at + j] < least)) least = r->places[at + j];
        if (least < 0) return;
        last = least;
        int64_t pair = r->pairs[least];
        float weight = routing_weight(c, pair, is_bf16);
        for (int64_t i = 0; i < hidden; i += LANES) {
            fvec y = load(r->y, least * hidden + i, is_bf16);
            if (!c->on_inputs) y = as_stored(fmul(y, fset(weight)), is_bf16);
            store(c->out, token * hidden + i, fadd(load(c->out, token * hidden + i, is_bf16), y), is_bf16);
        }
    }
}

static void combine_tokens(void *argument) {
    Routing *r = argument;
    for (;;) {
        int64_t token = atomic_fetch_add(&r->next, 1);
        if (token >= r->call->tokens) return;
        if (r->call->is_bf16) combine_token(r, token, 1);
        else combine_token(r, token, 0);
    }
}

static uint8_t *take(uint8_t **memory, int64_t bytes) {
    uint8_t *taken = *memory;
    *memory += ceil_div(bytes, 64) * 64;
    return taken;
}

/* Returns 0, or 1 if the workspace cannot be allocated. */
int llmopt_experts(const ExpertsCall *c) {
    int64_t pairs = c->tokens * c->top_k, hidden = hidden_size(c), inner = c->down.weights[0]->in_features;
    int64_t size = element_bytes(c), numbers = (2 * pairs + 2 * (c->count + 1)) * 8;
    int64_t floats = pairs * (2 * hidden + 3 * inner) * size;
    int64_t prepared = grouped_bytes(&c->gate_up, pairs), other = grouped_bytes(&c->down, pairs);
    if (other > prepared) prepared = other;
    uint8_t *memory = workspace(0, numbers + floats + prepared + 64 * 9);
    if (!memory) return 1;
    Routing r = {.call = c};
    r.begins = (int64_t *)take(&memory, (c->count + 1) * 8);
    int64_t *items = (int64_t *)take(&memory, (c->count + 1) * 8);
    r.pairs = (int64_t *)take(&memory, pairs * 8);
    r.places = (int64_t *)take(&memory, pairs * 8);
    r.x = take(&memory, pairs * hidden * size);
    r.stacked = take(&memory, pairs * 2 * inner * size);
    r.gated = take(&memory, pairs * inner * size);
    r.y = take(&memory, pairs * hidden * size);
    sort_by_expert(&r);
    int64_t threads = r.rows < 3 ? 1 : c->threads;
    run_parallel(gather_rows, &r, threads);
    multiply_grouped(&r, &c->gate_up, r.x, r.stacked, items, memory);
    GateCall gate = {.gate = r.stacked,
                     .up = r.stacked + inner * size,
                     .out = r.gated,
                     .rows = r.rows,
                     .size = inner,
                     .stride = 2 * inner,
                     .is_bf16 = c->is_bf16,
                     .activation = c->activation};
    run_parallel(gate_rows, &gate, threads);
    multiply_grouped(&r, &c->down, r.gated, r.y, items, memory);
    atomic_store(&r.next, 0);
    run_parallel(combine_tokens, &r, threads);
    return 0;
}
