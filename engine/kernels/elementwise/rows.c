/* Rows of tables by index: token embeddings, and cos and sin of positions. */
#include <stdatomic.h>
#include <string.h>

#include "parallel.h"

typedef struct {
    const char *table;  /* [ids][bytes] */
    const int64_t *ids; /* [rows] */
    char *out;          /* [rows][bytes] */
    int64_t rows;
    int64_t bytes;
    int64_t threads;
} EmbeddingCall;

typedef struct {
    const float *cos;         /* [positions][half], as sin */
    const float *sin;
    const int64_t *positions; /* [rows] */
    void *cos_out;            /* [rows][2 * half]: cos twice */
    void *sin_out;            /* [rows][2 * half]: -sin, sin */
    int64_t rows;
    int64_t half;
    int64_t is_bf16; /* of the outputs; else float32 */
} CosSinCall;

typedef struct {
    const EmbeddingCall *call;
    atomic_long next;
} EmbeddingJob;

static void embedding_worker(void *argument) {
    EmbeddingJob *job = argument;
    const EmbeddingCall *call = job->call;
    for (int64_t row; (row = atomic_fetch_add(&job->next, 1)) < call->rows;)
        memcpy(call->out + row * call->bytes, call->table + call->ids[row] * call->bytes, (size_t)call->bytes);
}

int llmopt_embedding(const EmbeddingCall *call) {
    EmbeddingJob job = {call, 0};
    run_parallel(embedding_worker, &job, call->rows < 64 ? 1 : call->threads);
    return 0;
}

/* To the nearest, ties to even, as torch rounds. */
static uint16_t bf16_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

int llmopt_cos_sin(const CosSinCall *call) {
    int64_t half = call->half;
    for (int64_t row = 0; row < call->rows; row++) {
        const float *cos = call->cos + call->positions[row] * half, *sin = call->sin + call->positions[row] * half;
        if (call->is_bf16) {
            uint16_t *cos_out = (uint16_t *)call->cos_out + row * 2 * half;
            uint16_t *sin_out = (uint16_t *)call->sin_out + row * 2 * half;
            for (int64_t i = 0; i < half; i++) {
                cos_out[i] = cos_out[half + i] = bf16_of(cos[i]);
                sin_out[i] = bf16_of(-sin[i]);
                sin_out[half + i] = bf16_of(sin[i]);
            }
        } else {
            float *cos_out = (float *)call->cos_out + row * 2 * half;
            float *sin_out = (float *)call->sin_out + row * 2 * half;
            for (int64_t i = 0; i < half; i++) {
                cos_out[i] = cos_out[half + i] = cos[i];
                sin_out[i] = -sin[i];
                sin_out[half + i] = sin[i];
            }
        }
    }
    return 0;
}
