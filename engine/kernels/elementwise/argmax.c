/* Argmax of each row of logits [rows, vocab]: the first of the largest, as NumPy's. */
#include <stdatomic.h>

#include "parallel.h"
#include "vectors.h"

enum { BLOCK = 2048 }; /* elements whose maximum is compared at once: 8 KB, which stay in L1 */

typedef struct {
    const float *logits; /* [rows][vocab] */
    int64_t *tokens;     /* [rows] */
    int64_t rows;
    int64_t vocab;
    int64_t threads;
} ArgmaxCall;

typedef struct {
    const ArgmaxCall *call;
    atomic_long next;
} ArgmaxJob;

static float largest_of(const float *x, int64_t count) {
    int64_t i = 0;
    float largest = x[0];
    if (count >= 2 * LANES) {
        fvec a = fload(x), b = fload(x + LANES);
        for (i = 2 * LANES; i + 2 * LANES <= count; i += 2 * LANES) {
            a = fmax_(a, fload(x + i));
            b = fmax_(b, fload(x + i + LANES));
        }
        largest = fmax_lane(fmax_(a, b));
    }
    for (; i < count; i++) largest = x[i] > largest ? x[i] : largest;
    return largest;
}

static int64_t argmax(const float *x, int64_t vocab) {
    int64_t at = 0;
    float largest = x[0];
    for (int64_t begin = 0; begin < vocab; begin += BLOCK) {
        int64_t count = vocab - begin < BLOCK ? vocab - begin : BLOCK;
        float of_block = largest_of(x + begin, count);
        if (begin && !(of_block > largest)) continue;
        largest = of_block;
        at = begin;
    }
    int64_t end = vocab - at < BLOCK ? vocab : at + BLOCK;
    for (int64_t i = at; i < end; i++)
        if (x[i] == largest) return i;
    return 0; /* all are NaN */
}

static void argmax_worker(void *argument) {
    ArgmaxJob *job = argument;
    const ArgmaxCall *call = job->call;
    for (int64_t row; (row = atomic_fetch_add(&job->next, 1)) < call->rows;)
        call->tokens[row] = argmax(call->logits + row * call->vocab, call->vocab);
}

int llmopt_argmax(const ArgmaxCall *call) {
    ArgmaxJob job = {call, 0};
    run_parallel(argmax_worker, &job, call->rows < call->threads ? call->rows : call->threads);
    return 0;
}
