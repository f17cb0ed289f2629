/* Inputs of a decode step from those of the step before it: one position further, with the sampled tokens. */
#include <stdint.h>

#include "parallel.h" /* defines llmopt_set_parallel, which the loader calls in every library */

typedef struct {
    int64_t *token_ids; /* [rows], as positions, slots and lengths */
    int64_t *positions;
    int64_t *slots;
    int64_t *lengths;
    const int64_t *tables;  /* [rows][width], block tables */
    const int64_t *sampled; /* [rows], tokens of the step before */
    int64_t rows;
    int64_t width;
    int64_t block_size;
    int64_t follows; /* 0: the host wrote the inputs */
} AdvanceCall;

int llmopt_advance_step(const AdvanceCall *call) {
    if (!call->follows) return 0;
    for (int64_t row = 0; row < call->rows; row++) {
        int64_t position = ++call->positions[row];
        const int64_t *table = call->tables + row * call->width;
        call->token_ids[row] = call->sampled[row];
        call->slots[row] = table[position / call->block_size] * call->block_size + position % call->block_size;
        call->lengths[row] = position + 1;
    }
    return 0;
}
