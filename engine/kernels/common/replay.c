/* Replay of a captured CPU graph: its kernel launches in order, without the Python interpreter in between. */
#include <stdint.h>

#include "parallel.h" /* defines llmopt_set_parallel, which the loader calls in every library */

typedef struct {
    int (*function)(void *argument);
    void *argument;
} Entry;

/* Returns 0, or the result of the first call that fails. */
int llmopt_replay(const Entry *entries, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        int failed = entries[i].function(entries[i].argument);
        if (failed) return failed;
    }
    return 0;
}
