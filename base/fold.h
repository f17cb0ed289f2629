/* The sum of floats in one order, whatever the instructions: the upper half is added to the lower until one is
 * left; of an odd count the middle one stays where it is. `parts` is overwritten. */
#ifndef LLMOPT_FOLD_H
#define LLMOPT_FOLD_H

#include <stdint.h>

static inline float fold(float *parts, int64_t count) {
    while (count > 1) {
        const int64_t half = (count + 1) / 2;
        for (int64_t i = 0; i < count - half; i++) parts[i] += parts[half + i];
        count = half;
    }
    return parts[0];
}

#endif
