/* The search of fit.py for K-quants and tables of values, to its bits: eight sub-blocks ("runs") of a block at a time,
 * one a lane.
 *
 * Every sum has the order of `folded` in fit.py: the upper half is added to the lower until one is left. Nothing is
 * contracted (-ffp-contract=off), so that all instruction levels, and torch, find the same codes. */
#include <math.h>
#include <stdatomic.h>
#include <stdint.h>
#include <string.h>

#include "fold.h"
#include "parallel.h"

#if defined __AVX__
#include <immintrin.h>
#endif

#define LANES 8
#define WIDTH 256 /* weights of a block */
#define RUNS 16   /* at most */
#define BLOCKS_AT_ONCE 16

typedef float Lanes __attribute__((vector_size(4 * LANES)));
typedef int32_t Mask __attribute__((vector_size(4 * LANES)));

typedef struct {
    const float *x, *weights;            /* [count][WIDTH]; weights may be NULL */
    const float *factors;                /* largest codes that are tried for a run's step */
    const float *scale_factors;          /* the same for the scales' */
    const float *table;                  /* 16 values of codes, or NULL: codes are whole numbers */
    uint8_t *scales, *codes, *lows;      /* [count][runs], [count][WIDTH], [count][runs]; signed ones as int8 */
    uint16_t *heads;                     /* float16 [count][2], [count][1] of signed codes, or [count][runs] */
    int64_t count, runs, num_factors, num_scale_factors;
    int64_t least, levels;               /* codes: from least (0 where there are minimums) to levels */
    int64_t least_scale, scale_levels;
    int64_t rounds, squares, threads;     /* squares: derived weights are x * x, else rms + |x| */
    atomic_long next;                    /* block */
} SearchCall;

/* Half of a block of 16 runs, or a block of 8: x[weight][run]. */
typedef struct {
    Lanes x[32], w[32];
} Group;

static inline Lanes all(float value) { return value - (Lanes){0}; }
static inline Lanes pick(Mask mask, Lanes yes, Lanes no) {
    return (Lanes)((mask & (Mask)yes) | (~mask & (Mask)no));
}
#if defined __AVX__
static inline Lanes least_of(Lanes a, Lanes b) { return (Lanes)_mm256_min_ps((__m256)a, (__m256)b); }
static inline Lanes most_of(Lanes a, Lanes b) { return (Lanes)_mm256_max_ps((__m256)a, (__m256)b); }
#else
static inline Lanes least_of(Lanes a, Lanes b) { return pick(a < b, a, b); }
static inline Lanes most_of(Lanes a, Lanes b) { return pick(a > b, a, b); }
#endif
static inline Lanes inverse_of(Lanes a) { return pick(a == 0, all(0), 1 / a); }
static inline float inverse(float a) { return a == 0 ? 0 : 1 / a; }

/* Half to even; no value is beyond 2^22. */
static inline Lanes rounded(Lanes a) { return a + 12582912.0f - 12582912.0f; }
static inline Lanes code_of(Lanes a, Lanes low, Lanes high) {
    return rounded(least_of(most_of(a, low), high));
}
static inline float scale_of(float a, float low, float high) {
    a = a > low ? a : low;
    a = a < high ? a : high;
    return a + 12582912.0f - 12582912.0f;
}

/* Four of weights in steps to the nearest codes; in a table the lower of two that are as near, and of 0 for NaN. */
static inline void snap(const SearchCall *c, Lanes *scaled) {
    Lanes low = all((float)c->least), high = all((float)c->levels), found[4] = {low, low, low, low};
    if (!c->table) {
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) scaled[k] = code_of(scaled[k], low, high);
        return;
    }
    for (int k = 0; k < 4; k++) scaled[k] = pick(scaled[k] == scaled[k], scaled[k], all(0));
    for (int i = 0; i < 15; i++) {
        Lanes middle = all((c->table[i] + c->table[i + 1]) / 2), gap = all(c->table[i + 1] - c->table[i]);
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) found[k] += pick(scaled[k] > middle, gap, all(0));
    }
    memcpy(scaled, found, sizeof found);
}

static inline Lanes fold_lanes(Lanes *parts, int count) {
    for (int half = count / 2; half; half /= 2)
        for (int i = 0; i < half; i++) parts[i] += parts[i + half];
    return parts[0];
}

/* Of `width` terms, four of which are a quarter apart: what `fold_lanes` makes of a quarter's sums. */
#define QUARTERS(sum, term) (sum) = ((term)[0] + (term)[2]) + ((term)[1] + (term)[3])

static inline float float_of(uint16_t bits) {
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, rest = bits & 0x7fff, word;
    float value;
    if (rest < 0x400) { /* subnormal: a multiple of 2^-24 */
        value = (float)rest * 0x1p-24f;
        return sign ? -value : value;
    }
    word = sign | (rest >= 0x7c00 ? 0x7f800000 | (rest & 0x3ff) << 13 : (rest << 13) + 0x38000000);
    memcpy(&value, &word, 4);
    return value;
}

static inline uint16_t half_of(float value) {
    uint32_t word;
    memcpy(&word, &value, 4);
    uint16_t sign = (uint16_t)(word >> 16 & 0x8000);
    word &= 0x7fffffff;
    if (word > 0x7f800000) return sign | 0x7e00;
    if (word >= 0x477ff000) return sign | 0x7c00; /* rounds beyond 65504 */
    if (word < 0x38800000) {                      /* below 2^-14: a multiple of 2^-24 */
        float magnitude;
        memcpy(&magnitude, &word, 4);
        magnitude = magnitude * 0x1p24f + 8388608.0f - 8388608.0f;
        return sign | (uint16_t)magnitude;
    }
    word += 0xfff + (word >> 13 & 1);
    return sign | (uint16_t)((word >> 13) - 0x1c000);
}

/* The weighted squared errors of the codes that `step * code - offset` has nearest to each weight. */
static inline Lanes on_grid(const SearchCall *c, const Group *g, int width, Lanes step, Lanes offset, Lanes *codes) {
    Lanes inverse_step = inverse_of(step), sums[8];
    int quarter = width / 4;
    for (int j = 0; j < quarter; j++) {
        Lanes code[4], term[4];
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) code[k] = (g->x[j + k * quarter] + offset) * inverse_step;
        snap(c, code);
#pragma GCC unroll 4
        for (int k = 0; k < 4; k++) {
            int i = j + k * quarter;
            Lanes error = code[k] * step - offset - g->x[i];
            term[k] = g->w[i] * (error * error);
            if (codes) codes[i] = code[k];
        }
        QUARTERS(sums[j], term);
    }
    return fold_lanes(sums, quarter);
}

static Lanes total_weight(const Group *g, int width) {
    Lanes sums[8];
    for (int j = 0; j < width / 4; j++) {
        const Lanes *w = g->w + j;
        int q = width / 4;
        sums[j] = (w[0] + w[2 * q]) + (w[q] + w[3 * q]);
    }
    return fold_lanes(sums, width / 4);
}

/* `fit_affine`: step and offset of each run. */
static void fit_affine(const SearchCall *c, const Group *g, int width, Lanes *step_found, Lanes *offset_found) {
    int quarter = width / 4;
    Lanes low = g->x[0], high = g->x[0], codes[32], sums[3][8], zero = all(0), top = all((float)c->levels);
    for (int i = 1; i < width; i++) low = least_of(g->x[i], low), high = most_of(g->x[i], high);
    low = least_of(low, zero);
    Lanes span = high - low, inverse_span = inverse_of(span);
    Lanes best = all(INFINITY), best_step = span / top, best_low = low;
    for (int j = 0; j < quarter; j++) {
        Lanes term[4];
        for (int k = 0; k < 4; k++) term[k] = g->w[j + k * quarter] * g->x[j + k * quarter];
        QUARTERS(sums[0][j], term);
    }
    Lanes sum_x = fold_lanes(sums[0], quarter), sum_w = total_weight(g, width);
    for (int f = 0; f < c->num_factors; f++) {
        Lanes factor = c->factors[f] * inverse_span;
        for (int j = 0; j < quarter; j++) {
            Lanes l[4], ll[4], xl[4];
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) {
                int i = j + k * quarter;
                Lanes code = rounded(least_of((g->x[i] - low) * factor, top)); /* not negative */
                codes[i] = code;
                l[k] = g->w[i] * code;
                ll[k] = l[k] * code, xl[k] = l[k] * g->x[i];
            }
            QUARTERS(sums[0][j], l), QUARTERS(sums[1][j], ll), QUARTERS(sums[2][j], xl);
        }
        Lanes sum_l = fold_lanes(sums[0], quarter), sum_ll = fold_lanes(sums[1], quarter);
        Lanes sum_xl = fold_lanes(sums[2], quarter);
        Lanes determinant = sum_w * sum_ll - sum_l * sum_l;
        Lanes step = (sum_w * sum_xl - sum_x * sum_l) / determinant;
        Lanes offset = (sum_ll * sum_x - sum_l * sum_xl) / determinant;
        step = pick(offset > zero, sum_xl / sum_ll, step);
        offset = pick(offset > zero, zero, offset);
        for (int j = 0; j < quarter; j++) {
            Lanes term[4];
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) {
                int i = j + k * quarter;
                Lanes error = codes[i] * step + offset - g->x[i];
                term[k] = g->w[i] * (error * error);
            }
            QUARTERS(sums[0][j], term);
        }
        Lanes error = fold_lanes(sums[0], quarter);
        Mask better = (error < best) & (step > zero);
        best = pick(better, error, best);
        best_step = pick(better, step, best_step), best_low = pick(better, offset, best_low);
    }
    *step_found = best_step, *offset_found = -best_low;
}

/* `fit_signed`: the step of each run. */
static Lanes fit_signed(const SearchCall *c, const Group *g, int width) {
    int quarter = width / 4;
    Lanes largest = g->x[0], sums[2][8];
    for (int i = 1; i < width; i++) {
        Lanes size = most_of(g->x[i], -g->x[i]);
        largest = pick(size > most_of(largest, -largest), g->x[i], largest);
    }
    Lanes inverse = inverse_of(largest), gained = all(0), found = largest / c->factors[c->num_factors / 2];
    for (int f = 0; f < c->num_factors; f++) {
        Lanes factor = c->factors[f] * inverse;
        for (int j = 0; j < quarter; j++) {
            Lanes code[4], products[4], squares[4];
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) code[k] = g->x[j + k * quarter] * factor;
            snap(c, code);
#pragma GCC unroll 4
            for (int k = 0; k < 4; k++) {
                int i = j + k * quarter;
                Lanes weighted = g->w[i] * code[k];
                products[k] = weighted * g->x[i], squares[k] = weighted * code[k];
            }
            QUARTERS(sums[0][j], products), QUARTERS(sums[1][j], squares);
        }
        Lanes products = fold_lanes(sums[0], quarter), squares = fold_lanes(sums[1], quarter);
        Lanes gain = products * products / squares;
        Mask better = gain > gained;
        gained = pick(better, gain, gained), found = pick(better, products / squares, found);
    }
    return found;
}

/* `fit_positive`: codes of the runs' values, and their one step, as stored. */
static uint16_t fit_positive(const SearchCall *c, const float *values, const float *weights, float *found) {
    int runs = (int)c->runs;
    float largest = values[0], best = INFINITY, top = (float)c->scale_levels, codes[RUNS], parts[2][RUNS];
    uint16_t head = 0;
    for (int r = 1; r < runs; r++) largest = values[r] > largest ? values[r] : largest;
    memset(found, 0, sizeof(float) * RUNS);
    for (int f = 0; f < c->num_scale_factors; f++) {
        float factor = c->scale_factors[f] * inverse(largest);
        for (int r = 0; r < runs; r++) {
            float code = scale_of(values[r] * factor, 0, top);
            parts[0][r] = weights[r] * code * code, parts[1][r] = weights[r] * values[r] * code;
        }
        float squares = fold(parts[0], runs), products = fold(parts[1], runs);
        uint16_t half = half_of(squares > 0 ? products / squares : 0);
        float step = float_of(half), inverse_step = inverse(step);
        for (int r = 0; r < runs; r++) {
            codes[r] = scale_of(values[r] * inverse_step, 0, top);
            float error = codes[r] * step - values[r];
            parts[0][r] = weights[r] * (error * error);
        }
        float error = fold(parts[0], runs);
        if (error < best) best = error, head = half, memcpy(found, codes, sizeof codes);
    }
    return head;
}

/* `fit_signed` of the runs' steps, whose codes may be negative. */
static float fit_head(const SearchCall *c, const float *steps, const float *costs) {
    int runs = (int)c->runs;
    float largest = steps[0], gained = 0, parts[2][RUNS];
    for (int r = 1; r < runs; r++) largest = fabsf(steps[r]) > fabsf(largest) ? steps[r] : largest;
    float found = largest / c->scale_factors[c->num_scale_factors / 2];
    for (int f = 0; f < c->num_scale_factors; f++) {
        float factor = c->scale_factors[f] * inverse(largest);
        for (int r = 0; r < runs; r++) {
            float code = scale_of(steps[r] * factor, (float)c->least_scale, (float)c->scale_levels);
            float weighted = costs[r] * code;
            parts[0][r] = weighted * steps[r], parts[1][r] = weighted * code;
        }
        float products = fold(parts[0], runs), squares = fold(parts[1], runs);
        float gain = products * products / squares;
        if (gain > gained) gained = gain, found = products / squares;
    }
    return found;
}

static void read_groups(const SearchCall *c, int64_t block, int width, Group *groups) {
    const float *x = c->x + block * WIDTH, *w = c->weights ? c->weights + block * WIDTH : NULL;
    for (int r = 0; r < c->runs; r++) {
        Group *g = groups + r / LANES;
        float squares[32], mean = 0;
        if (!w && !c->squares) {
            for (int i = 0; i < width; i++) squares[i] = x[i + r * width] * x[i + r * width];
            mean = sqrtf(fold(squares, width) / (float)width);
        }
        for (int i = 0; i < width; i++) {
            float value = x[i + r * width];
            g->x[i][r % LANES] = value;
            if (w) g->w[i][r % LANES] = w[i + r * width];
            else g->w[i][r % LANES] = !c->squares ? mean + fabsf(value) : value * value;
        }
    }
}

static inline float fold_runs(const Lanes *sums, int groups) {
    float parts[RUNS];
    memcpy(parts, sums, (size_t)groups * sizeof *sums);
    return fold(parts, groups * LANES);
}

typedef struct {
    Lanes scales[2], lows[2], errors[2];
    uint16_t heads[2];
} Found;

/* Codes of all groups for heads, and the runs' errors. */
static void codes_on_grid(const SearchCall *c, const Group *groups, int width, Found *f, Lanes (*codes)[32]) {
    float scale = float_of(f->heads[0]), low = float_of(f->heads[1]);
    for (int n = 0; n < c->runs / LANES; n++)
        f->errors[n] = on_grid(c, groups + n, width, scale * f->scales[n], low * f->lows[n], codes[n]);
}

/* Neighbouring codes of scales and minimums, where a run errs less with them. */
static void try_neighbours(const SearchCall *c, const Group *g, int width, int n, Found *f) {
    static const int8_t affine[][2] = {{0, -1}, {0, 1}, {-1, 0}, {-1, -1}, {-1, 1}, {1, 0}, {1, -1}, {1, 1}};
    static const int8_t scaled[][2] = {{-1, 0}, {1, 0}};
    const int8_t(*shifts)[2] = c->least ? scaled : affine;
    float scale = float_of(f->heads[0]), low = float_of(f->heads[1]);
    Lanes first = f->scales[n], first_low = f->lows[n];
    Lanes bottom = all((float)c->least_scale), top = all((float)c->scale_levels);
    for (int s = 0; s < (c->least ? 2 : 8); s++) {
        Lanes tried = least_of(most_of(first + (float)shifts[s][0], bottom), top);
        Lanes tried_low = least_of(most_of(first_low + (float)shifts[s][1], bottom), top);
        Lanes errors = on_grid(c, g, width, scale * tried, low * tried_low, NULL);
        Mask better = errors < f->errors[n];
        f->errors[n] = pick(better, errors, f->errors[n]);
        f->scales[n] = pick(better, tried, f->scales[n]), f->lows[n] = pick(better, tried_low, f->lows[n]);
    }
}

/* Least-squares heads for given codes; those before where there are none. */
static void refit(const SearchCall *c, const Group *groups, int width, const Found *f, Lanes (*codes)[32],
                  uint16_t *heads) {
    int count = (int)c->runs / LANES, quarter = width / 4;
    Lanes folded[5][2], sums[5][8];
    for (int n = 0; n < count; n++) {
        Lanes low = f->lows[n];
        for (int j = 0; j < quarter; j++) {
            Lanes term[5][4];
            for (int k = 0; k < 4; k++) {
                int i = j + k * quarter;
                Lanes grid = codes[n][i] * f->scales[n], w = groups[n].w[i], x = groups[n].x[i];
                term[0][k] = w * grid * grid, term[1][k] = w * grid * x;
                if (!c->least) term[2][k] = w * grid * low, term[3][k] = w * low * low, term[4][k] = w * low * x;
            }
            for (int t = 0; t < (c->least ? 2 : 5); t++) QUARTERS(sums[t][j], term[t]);
        }
        for (int t = 0; t < (c->least ? 2 : 5); t++) folded[t][n] = fold_lanes(sums[t], quarter);
    }
    float aa = fold_runs(folded[0], count), ax = fold_runs(folded[1], count);
    if (c->least) {
        heads[0] = aa > 0 ? half_of(ax / aa) : f->heads[0], heads[1] = 0;
        return;
    }
    float ab = fold_runs(folded[2], count), bb = fold_runs(folded[3], count), bx = fold_runs(folded[4], count);
    float determinant = aa * bb - ab * ab;
    float scale = (bb * ax - ab * bx) / determinant, low = (ab * ax - aa * bx) / determinant;
    int usable = scale >= 0 && low >= 0 && scale < INFINITY && low < INFINITY;
    heads[0] = usable ? half_of(scale) : f->heads[0], heads[1] = usable ? half_of(low) : f->heads[1];
}

static void first_scales(const SearchCall *c, const Group *groups, int width, Found *f) {
    int count = (int)c->runs / LANES;
    float steps[RUNS], offsets[RUNS], total[RUNS], codes[RUNS];
    for (int n = 0; n < count; n++) {
        Lanes step, offset = all(0), weight;
        if (c->least) {
            step = fit_signed(c, groups + n, width);
            Lanes sums[8], inverse = inverse_of(step);
            int quarter = width / 4;
            for (int j = 0; j < quarter; j++) {
                Lanes term[4];
                for (int k = 0; k < 4; k++) {
                    Lanes x = groups[n].x[j + k * quarter];
                    term[k] = groups[n].w[j + k * quarter] * (x * x);
                }
                QUARTERS(sums[j], term);
            }
            weight = fold_lanes(sums, quarter) * (inverse * inverse);
        } else {
            fit_affine(c, groups + n, width, &step, &offset);
            weight = total_weight(groups + n, width);
        }
        memcpy(steps + n * LANES, &step, sizeof step);
        memcpy(offsets + n * LANES, &offset, sizeof step);
        memcpy(total + n * LANES, &weight, sizeof step);
    }
    if (c->least) {
        f->heads[0] = half_of(fit_head(c, steps, total)), f->heads[1] = 0;
        float inverse_head = inverse(float_of(f->heads[0]));
        for (int r = 0; r < c->runs; r++)
            codes[r] = scale_of(steps[r] * inverse_head, (float)c->least_scale, (float)c->scale_levels);
    } else {
        f->heads[0] = fit_positive(c, steps, total, codes);
        float low_codes[RUNS];
        f->heads[1] = fit_positive(c, offsets, total, low_codes);
        memcpy(f->lows, low_codes, (size_t)count * sizeof(Lanes));
    }
    memcpy(f->scales, codes, (size_t)count * sizeof(Lanes));
}

static void search_block(const SearchCall *c, int64_t block) {
    Group groups[2];
    Lanes codes[2][32], others[2][32];
    int count = (int)c->runs / LANES, width = WIDTH / (int)c->runs;
    Found f = {0};
    read_groups(c, block, width, groups);
    first_scales(c, groups, width, &f);
    codes_on_grid(c, groups, width, &f, codes);
    for (int round = 0; round < c->rounds; round++) {
        for (int n = 0; n < count; n++) try_neighbours(c, groups + n, width, n, &f);
        codes_on_grid(c, groups, width, &f, codes);
        Found other = f;
        refit(c, groups, width, &f, codes, other.heads);
        codes_on_grid(c, groups, width, &other, others);
        if (fold_runs(other.errors, count) < fold_runs(f.errors, count)) {
            f = other;
            memcpy(codes, others, sizeof codes);
        }
    }
    for (int r = 0; r < c->runs; r++) {
        int n = r / LANES, lane = r % LANES;
        c->scales[block * c->runs + r] = (uint8_t)(int8_t)f.scales[n][lane];
        if (c->lows) c->lows[block * c->runs + r] = (uint8_t)f.lows[n][lane];
        for (int i = 0; i < width; i++)
            c->codes[block * WIDTH + r * width + i] = (uint8_t)(int8_t)codes[n][i][lane];
    }
    int heads = c->least ? 1 : 2;
    memcpy(c->heads + block * heads, f.heads, (size_t)heads * sizeof *f.heads);
}

static inline Lanes halves(Lanes values) {
    for (int i = 0; i < LANES; i++) values[i] = float_of(half_of(values[i]));
    return values;
}

/* `fit_nl`: eight blocks of 32 as one of eight runs, each with a head of its own and no scale. */
static void fit_heads(const SearchCall *c, int64_t block) {
    Group g;
    Lanes codes[32], squares[8], products[8], zero = all(0);
    read_groups(c, block, 32, &g);
    Lanes step = halves(fit_signed(c, &g, 32)), error = on_grid(c, &g, 32, step, zero, codes);
    for (int j = 0; j < 8; j++) {
        Lanes square[4], product[4];
        for (int k = 0; k < 4; k++) {
            int i = j + 8 * k;
            Lanes weighted = g.w[i] * codes[i];
            square[k] = weighted * codes[i], product[k] = weighted * g.x[i];
        }
        QUARTERS(squares[j], square), QUARTERS(products[j], product);
    }
    Lanes sum = fold_lanes(squares, 8);
    Lanes refitted = halves(pick(sum > zero, fold_lanes(products, 8) / sum, step));
    step = pick(on_grid(c, &g, 32, refitted, zero, NULL) < error, refitted, step);
    for (int i = 0; i < LANES; i++) c->heads[block * LANES + i] = half_of(step[i]);
}

static void search_blocks(void *argument) {
    SearchCall *c = argument;
    void (*search)(const SearchCall *, int64_t) = c->scales ? search_block : fit_heads;
    for (;;) {
        int64_t begin = atomic_fetch_add(&c->next, BLOCKS_AT_ONCE);
        if (begin >= c->count) return;
        for (int64_t b = begin; b < begin + BLOCKS_AT_ONCE && b < c->count; b++) search(c, b);
    }
}

void llmopt_search_blocks(SearchCall *c) { run_parallel(search_blocks, c, c->threads); }
