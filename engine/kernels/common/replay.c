/* Calls that were made once, made again one after another: a step without the interpreter between them. */
#include <stdint.h>

#include "parallel.h" /* every library is told of the threads, also one that has no use for them */

typedef struct {
    int (*function)(void *argument);
    void *argument;
} Entry;

/* Returns 0, or what the first call that fails returns. */
int llmopt_replay(const Entry *entries, int64_t count) {
    for (int64_t i = 0; i < count; i++) {
        int failed = entries[i].function(entries[i].argument);
        if (failed) return failed;
    }
    return 0;
}
