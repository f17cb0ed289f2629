/* Elementwise kernels: fused add + RMSNorm, SiLU and GELU gates, and fused RoPE + KV-cache write.
 *
 * Values are float32 or bfloat16, computed in float32. Rows are independent. Norms and gates round
 * intermediates to the stored dtype where torch's operations do. */
#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "parallel.h"
#include "quantize.h"

/* Quantized output (per-token int8) of a row; `codes` NULL: the output is not quantized. */
typedef struct {
    int8_t *codes;         /* [rows][size] */
    float *scales;         /* [rows] */
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

typedef struct {
    Quantized rounded;
    const void *gate, *up; /* [rows][stride] */
    void *out;             /* as above */
    int64_t rows, size, stride, is_bf16, is_gelu, threads;
    atomic_long next;
    atomic_int failed;
} GateCall;

typedef struct {
    void *heads;           /* [rows][stride]: queries, keys, values of `dim` each; rotated in place */
    const void *cos, *sin; /* [rows][width] */
    const int64_t *slots;  /* [rows], the slot mapping */
    uint8_t *keys, *values; /* [slots][key_stride] and [value_stride], as `heads`; NULL: no cache write */
    int64_t rows, stride, queries, kv_heads, dim, width, key_stride, value_stride, is_bf16, threads;
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
    return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(v));
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

/* Quantizes a row of `size` floats; `values` is padded to whole vectors. */
static void quantize_row(const Quantized *to, int64_t row, int64_t size, const float *values, fvec largest) {
    float scale = scale_of(largest, to->levels);
    int8_t *codes = to->codes + row * size;
    to->scales[row] = scale;
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) istore_s8(codes + i, quantize_to(fload(values + i), fset(scale)));
    if (i < size) {
        int8_t last[LANES];
        istore_s8(last, quantize_to(fload(values + i), fset(scale)));
        memcpy(codes + i, last, (size_t)(size - i));
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
    fvec largest = fset(0.0f);
    for (int64_t i = 0; i < c->size; i += LANES) {
        fvec v = as_stored(fmul(load(x, from + i, is_bf16), factor), is_bf16);
        v = fmul(v, load(c->weight, i, is_bf16));
        if (!values) {
            store(c->out, to + i, v, is_bf16);
            continue;
        }
        v = as_stored(v, is_bf16);
        fstore(values + i, v);
        largest = fmax_(largest, fabs_(v));
    }
    if (values) quantize_row(&c->rounded, row, c->size, values, largest);
}

/* x / (1 + e^-z), where z has the sign of x, with e^-|z| on both sides of zero. */
INLINE fvec times_sigmoid(fvec x, fvec z) {
    fvec none = fset(0.0f), e = exp_not_above_zero(fsub(none, fabs_(z)));
    return fdiv(fadd(fmax_(x, none), fmul(fmin_(x, none), e)), fadd(fset(1.0f), e));
}

/* SiLU; or GELU by its tanh approximation, where (1 + tanh u) / 2 is the sigmoid of 2u. */
INLINE fvec activation(const GateCall *c, fvec x) {
    if (!c->is_gelu) return times_sigmoid(x, x);
    fvec cube = ffma(fmul(fset(0.044715f), fmul(x, x)), x, x);
    return times_sigmoid(x, fmul(fset(1.5957691216f), cube));
}

INLINE void gate_row(const GateCall *c, int64_t row, const int is_bf16, float *values) {
    fvec largest = fset(0.0f);
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
        fvec opened = as_stored(activation(c, load(from, 0, is_bf16)), is_bf16);
        fvec v = fmul(opened, load(other, 0, is_bf16));
        if (values) {
            v = as_stored(v, is_bf16);
            fstore(values + i, v);
            largest = fmax_(largest, fabs_(v));
            continue;
        }
        store(to, 0, v, is_bf16);
        if (to == last[2]) memcpy(out + i * width, last[2], left);
    }
    if (values) quantize_row(&c->rounded, row, c->size, values, largest);
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
    int64_t width = is_bf16 ? 2 : 4, bytes = c->kv_heads * c->dim * width;
    const uint8_t *first = (const uint8_t *)c->heads + (begin + c->queries * c->dim) * width;
    memcpy(c->keys + c->slots[row] * c->key_stride * width, first, (size_t)bytes);
    memcpy(c->values + c->slots[row] * c->value_stride * width, first + bytes, (size_t)bytes);
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
