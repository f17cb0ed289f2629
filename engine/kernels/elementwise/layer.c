/* Elementwise kernels: fused add + RMSNorm, SiLU and GELU gates, and fused RoPE + KV-cache write.
 *
 * Values are float32 or bfloat16, computed in float32. Rows are independent. Norms and gates round
 * intermediates to the stored dtype where torch's operations do. */
#include <float.h>
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "parallel.h"
#include "quantize.h"

/* Quantized output (int8) of a row; `codes` NULL: the output is not quantized. */
typedef struct {
    int8_t *codes;         /* [rows][size] */
    float *scales;         /* [rows][blocks] */
    int64_t block;         /* elements that share a scale, whole vectors; 0: the row */
    float levels;          /* the code of the largest magnitude */
} Quantized;

typedef struct {
    Quantized rounded;
    const void *x;         /* [rows][x_stride] */
    const void *added;     /* [rows][size], added to x first, or NULL */
    void *sum;             /* [rows][size], x + added */
    void *out;             /* [rows][size], if the output is not quantized */
    const void *weight;    /* [size], as x */
    int64_t rows, size, x_stride, is_bf16, threads;
    float eps;
    atomic_long next;
    atomic_int failed;
} NormCall;

enum { SILU = 0, GELU_TANH = 1, GELU = 2, CLAMPED_SWIGLU = 3 };

typedef struct {
    Quantized rounded;
    const void *gate, *up; /* [rows][stride] */
    void *out;             /* as above */
    int64_t rows, size, stride, is_bf16, activation, threads;
    atomic_long next;
    atomic_int failed;
} GateCall;

typedef struct {
    void *heads;           /* [rows][stride]: queries, keys, values of `dim` each; rotated in place */
    const void *cos, *sin; /* [rows][width] */
    const int64_t *slots;  /* [rows], the slot mapping */
    /* [slots][key_stride] and [value_stride], as `heads`, int8 or bfloat16; NULL: no cache write */
    uint8_t *keys, *values;
    float *key_scales, *value_scales; /* [slots][kv_heads], of an int8 cache; else NULL */
    int64_t rows, stride, queries, kv_heads, dim, width, key_stride, value_stride, is_bf16;
    int64_t cache_is_bf16, threads;
    atomic_long next;
    atomic_int failed;
} RopeAndCacheCall;

INLINE fvec load(const void *p, int64_t at, const int is_bf16) {
    if (is_bf16) return fbits(ISHL(iwiden_u16((const uint16_t *)p + at), 16));
    return fload((const float *)p + at);
}

/* The bits of the nearest bfloat16, ties to even. */
INLINE ivec rounded(fvec v) {
#if HAS_PAIRS
    return ibits_bf16(v);
#else
    ivec bits = ibits(v);
    return ISHR(iadd(bits, iadd(iset(0x7fff), iand(ISHR(bits, 16), iset(1)))), 16);
#endif
}

INLINE void store(void *p, int64_t at, fvec v, const int is_bf16) {
    if (is_bf16) istore_u16((uint16_t *)p + at, rounded(v));
    else fstore((float *)p + at, v);
}

/* The value after a store and a load: rounded to the stored dtype. */
INLINE fvec as_stored(fvec v, const int is_bf16) { return is_bf16 ? fbits(ISHL(rounded(v), 16)) : v; }

/* Quantizes a row of `size` floats, block by block; `values` is zero-padded to whole vectors. */
static void quantize_row(const Quantized *to, int64_t row, int64_t size, const float *values) {
    int64_t block = to->block ? to->block : size, blocks = (size + block - 1) / block;
    int8_t *codes = to->codes + row * size;
    for (int64_t b = 0; b < blocks; b++) {
        int64_t end = size < (b + 1) * block ? size : (b + 1) * block;
        fvec largest = fset(0.0f);
        for (int64_t i = b * block; i < end; i += LANES) largest = fmax_(largest, fabs_(fload(values + i)));
        float scale = to->scales[row * blocks + b] = scale_of(largest, to->levels);
        for (int64_t i = b * block; i < end; i += LANES) {
            ivec code = quantize_to(fload(values + i), fset(scale));
            if (i + LANES <= end) {
                istore_s8(codes + i, code);
                continue;
            }
            int8_t last[LANES];
            istore_s8(last, code);
            memcpy(codes + i, last, (size_t)(end - i));
        }
    }
}

/* This thread's workspace for a row of floats. */
static float *row_workspace(int64_t size) { return (float *)workspace(1, (size + LANES) * 4); }

INLINE void norm_row(const NormCall *c, int64_t row, const int is_bf16, float *values) {
    const void *x = c->x;
    int64_t from = row * c->x_stride, to = row * c->size;
    fvec squares = fset(0.0f);
    for (int64_t i = 0; i < c->size; i += LANES) {
        fvec v = load(x, from + i, is_bf16);
        if (c->added) {
            v = as_stored(fadd(v, load(c->added, to + i, is_bf16)), is_bf16);
            store(c->sum, to + i, v, is_bf16);
        }
        squares = ffma(v, v, squares);
    }
    if (c->added) x = c->sum, from = to;
    fvec factor = fset(1.0f / sqrtf(fsum_lanes(squares) / (float)c->size + c->eps));
    for (int64_t i = 0; i < c->size; i += LANES) {
        fvec v = as_stored(fmul(load(x, from + i, is_bf16), factor), is_bf16);
        v = fmul(v, load(c->weight, i, is_bf16));
        if (!values) {
            store(c->out, to + i, v, is_bf16);
            continue;
        }
        fstore(values + i, as_stored(v, is_bf16));
    }
    if (values) quantize_row(&c->rounded, row, c->size, values);
}

/* x / (1 + e^-z), where z has the sign of x, with e^-|z| on both sides of zero. */
INLINE fvec times_sigmoid(fvec x, fvec z) {
    fvec none = fset(0.0f), e = exp_not_above_zero(fsub(none, fabs_(z)));
    return fdiv(fadd(fmax_(x, none), fmul(fmin_(x, none), e)), fadd(fset(1.0f), e));
}

INLINE fvec sigmoid(fvec z) {
    fvec none = fset(0.0f), e = exp_not_above_zero(fsub(none, fabs_(z)));
    return fdiv(exp_not_above_zero(fmin_(z, none)), fadd(fset(1.0f), e));
}

/* GELU by the error function: x (1 - erfc(x / sqrt 2) / 2), or x erfc(-x / sqrt 2) / 2 below zero; erfc within
 * 1.2e-7 of itself (Press et al., "Numerical Recipes in C", 2nd ed., section 6.2). */
INLINE fvec gelu(fvec x) {
    const float terms[] = {-0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f, -0.18628806f,
                           0.09678418f,  0.37409196f, 1.00002368f,  -1.26551223f};
    fvec z = fmul(fabs_(x), fset(0.70710678f));
    fvec t = fdiv(fset(1.0f), ffma(z, fset(0.5f), fset(1.0f)));
    fvec sum = fset(0.17087277f);
    for (int i = 0; i < 9; i++) sum = ffma(sum, t, fset(terms[i]));
    fvec half = fmul(fmul(t, exp_not_above_zero(ffnma(z, z, sum))), fset(0.5f)), none = fset(0.0f);
    return ffma(fmin_(x, none), half, fmul(fmax_(x, none), fsub(fset(1.0f), half)));
}

/* SiLU; or GELU, by its tanh approximation too, where (1 + tanh u) / 2 is the sigmoid of 2u. */
INLINE fvec activate(int64_t activation, fvec x) {
    if (activation == SILU) return times_sigmoid(x, x);
    if (activation == GELU) return gelu(x);
    fvec cube = ffma(fmul(fset(0.044715f), fmul(x, x)), x, x);
    return times_sigmoid(x, fmul(fset(1.5957691216f), cube));
}

/* Clamped SwiGLU (gpt-oss): (up + 1) gate sigmoid(1.702 gate), both clamped to 7, every step as stored. */
INLINE fvec clamped_swiglu(fvec gate, fvec up, const int is_bf16) {
    const fvec limit = fset(7.0f);
    gate = fmin_(gate, limit);
    up = fmin_(fmax_(up, fset(-7.0f)), limit);
    fvec opened = sigmoid(as_stored(fmul(gate, fset(1.702f)), is_bf16));
    fvec gated = as_stored(fmul(gate, as_stored(opened, is_bf16)), is_bf16);
    return fmul(as_stored(fadd(up, fset(1.0f)), is_bf16), gated);
}

/* activation(gate) * up, unrounded. */
INLINE fvec open_gate(int64_t activation, fvec gate, fvec up, const int is_bf16) {
    if (activation == CLAMPED_SWIGLU) return clamped_swiglu(gate, up, is_bf16);
    return fmul(as_stored(activate(activation, gate), is_bf16), up);
}

INLINE void gate_row(const GateCall *c, int64_t row, const int is_bf16, float *values) {
    const int64_t width = is_bf16 ? 2 : 4;
    const uint8_t *gate = (const uint8_t *)c->gate + row * c->stride * width;
    const uint8_t *up = (const uint8_t *)c->up + row * c->stride * width;
    uint8_t *out = (uint8_t *)c->out + row * c->size * width;
    uint8_t last[3][LANES * 4]; /* buffers of the tail that does not fill a vector */
    for (int64_t i = 0; i < c->size; i += LANES) {
        const uint8_t *from = gate + i * width, *other = up + i * width;
        uint8_t *to = out + i * width;
        size_t left = (size_t)((c->size - i) * width);
        if (c->size - i < LANES) {
            memset(last, 0, sizeof last);
            memcpy(last[0], from, left), memcpy(last[1], other, left);
            from = last[0], other = last[1], to = last[2];
        }
        fvec v = open_gate(c->activation, load(from, 0, is_bf16), load(other, 0, is_bf16), is_bf16);
        if (values) {
            fstore(values + i, as_stored(v, is_bf16));
            continue;
        }
        store(to, 0, v, is_bf16);
        if (to == last[2]) memcpy(out + i * width, last[2], left);
    }
    if (values) quantize_row(&c->rounded, row, c->size, values);
}

/* Writes the vectors of a slot quantized to int8, a scale for each: the largest element has the code 127. */
INLINE void write_quantized(const RopeAndCacheCall *c, int64_t at, const int is_bf16, int8_t *codes,
                            float *scales) {
    for (int64_t head = 0; head < c->kv_heads; head++, at += c->dim, codes += c->dim) {
        fvec largest = fset(0.0f);
        for (int64_t i = 0; i < c->dim; i += LANES) largest = fmax_(largest, fabs_(load(c->heads, at + i, is_bf16)));
        float scale = scales[head] = fmaxf(fmax_lane(largest) / 127.0f, FLT_MIN);
        for (int64_t i = 0; i < c->dim; i += LANES)
            istore_s8(codes + i, quantize_to(load(c->heads, at + i, is_bf16), fset(scale)));
    }
}

/* Writes the vectors of a slot as bfloat16; their elements fill whole vectors where `heads` are wider. */
INLINE void write_bf16(const RopeAndCacheCall *c, int64_t at, const int is_bf16, uint16_t *to) {
    int64_t size = c->kv_heads * c->dim;
    if (is_bf16) memcpy(to, (const uint16_t *)c->heads + at, (size_t)size * 2);
    else for (int64_t i = 0; i < size; i += LANES) store(to, i, load(c->heads, at + i, 0), 1);
}

INLINE void rope_and_cache_row(const RopeAndCacheCall *c, int64_t row, const int is_bf16, float *values) {
    (void)values;
    int64_t half = c->width / 2, angle = row * c->width, begin = row * c->stride;
    for (int64_t head = 0; head < c->queries + c->kv_heads; head++) {
        int64_t at = begin + head * c->dim;
        for (int64_t i = 0; i < half; i += LANES) {
            fvec a = load(c->heads, at + i, is_bf16), b = load(c->heads, at + half + i, is_bf16);
            fvec low = fmul(b, load(c->sin, angle + i, is_bf16));
            fvec high = fmul(a, load(c->sin, angle + half + i, is_bf16));
            store(c->heads, at + i, ffma(a, load(c->cos, angle + i, is_bf16), low), is_bf16);
            store(c->heads, at + half + i, ffma(b, load(c->cos, angle + half + i, is_bf16), high), is_bf16);
        }
    }
    if (!c->keys) return;
    int64_t slot = c->slots[row], new_keys = begin + c->queries * c->dim;
    if (c->key_scales) {
        write_quantized(c, new_keys, is_bf16, (int8_t *)c->keys + slot * c->key_stride,
                        c->key_scales + slot * c->kv_heads);
        write_quantized(c, new_keys + c->kv_heads * c->dim, is_bf16, (int8_t *)c->values + slot * c->value_stride,
                        c->value_scales + slot * c->kv_heads);
        return;
    }
    int64_t size = c->kv_heads * c->dim;
    if (c->cache_is_bf16) {
        write_bf16(c, new_keys, is_bf16, (uint16_t *)c->keys + slot * c->key_stride);
        write_bf16(c, new_keys + size, is_bf16, (uint16_t *)c->values + slot * c->value_stride);
        return;
    }
    const float *first = (const float *)c->heads + new_keys;
    memcpy((float *)c->keys + slot * c->key_stride, first, (size_t)size * 4);
    memcpy((float *)c->values + slot * c->value_stride, first + size, (size_t)size * 4);
}

/* The worker of a thread; `codes`: whether the output is quantized, which takes a row of workspace. */
#define ROWS_OF(Type, function, one_row, codes, size) \
    static void function(void *argument) { \
        Type *c = argument; \
        float *values = NULL; \
        if ((codes) && !(values = row_workspace(size))) { \
            atomic_store(&c->failed, 1); \
            return; \
        } \
        for (;;) { \
            int64_t row = atomic_fetch_add(&c->next, 1); \
            if (row >= c->rows) return; \
            if (c->is_bf16) one_row(c, row, 1, values); \
            else one_row(c, row, 0, values); \
        } \
    }

ROWS_OF(NormCall, norm_rows, norm_row, c->rounded.codes, c->size)
ROWS_OF(GateCall, gate_rows, gate_row, c->rounded.codes, c->size)
ROWS_OF(RopeAndCacheCall, rope_and_cache_rows, rope_and_cache_row, NULL, 0)

/* Each returns 0, or 1 if a workspace cannot be allocated. */
#define CALL_OF(Type, name, function) \
    int name(Type *c) { \
        atomic_store(&c->next, 0); \
        atomic_store(&c->failed, 0); \
        run_parallel(function, c, c->threads); \
        return atomic_load(&c->failed); \
    }

CALL_OF(NormCall, llmopt_norm, norm_rows)
CALL_OF(GateCall, llmopt_gate, gate_rows)
CALL_OF(RopeAndCacheCall, llmopt_rope_and_cache, rope_and_cache_rows)
