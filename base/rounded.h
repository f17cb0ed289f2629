/* Codes of floats. */
#ifndef LLMOPT_ROUNDED_H
#define LLMOPT_ROUNDED_H

/* Half to even; beyond 2^22 nothing depends on it. */
static inline float rounded(float a) { return a + 12582912.0f - 12582912.0f; }
static inline float least_of(float a, float b) { return a < b ? a : b; }
static inline float most_of(float a, float b) { return a > b ? a : b; }
static inline float bounded(float a, float low, float high) { return least_of(most_of(a, low), high); }

#endif
