/* From `start` to `stop`, adds `scale` times the deltas to the residual. u is the sum plus
   (a delta + b reference) / f. */

#include "segment.h"

INLINE void add_part(float *restrict u, float *restrict residual, const float *delta, float scale,
                     const float *reference, float a, float b, float factor, int64_t count)
{
    for (int64_t i = 0; i < count; i++) residual[i] += delta[i] * scale;
    if (reference)
        for (int64_t i = 0; i < count; i++) u[i] = delta[i] * a + reference[i] * b;
    else
        for (int64_t i = 0; i < count; i++) u[i] = delta[i] * a;
    if (factor != 1)
        for (int64_t i = 0; i < count; i++) u[i] = u[i] / factor;
    for (int64_t i = 0; i < count; i++) u[i] = residual[i] + u[i];
}

/* In tiles, so that all passes over a tile read from the cache. */
KERNEL void add_delta_with_payout(float *u, float *residual, const int64_t *deltas, const int64_t *references,
                                  const float *coefficients, const float *factors, double scale, int64_t many,
                                  int64_t numel, int64_t start, int64_t stop)
{
    for (int64_t p = 0; p < many && deltas[p] < stop; p++) {
        const int64_t left = deltas[p] < start ? start : deltas[p];
        const int64_t right = least(stop_of(deltas, many, numel, p), stop);
        for (int64_t at = left; at < right; at += TILE) {
            const int64_t skipped = at - deltas[p];
            const float *reference = references ? address_of(references, many, p) + skipped : 0;
            add_part(u + at, residual + at, address_of(deltas, many, p) + skipped, (float)scale, reference,
                     coefficients[p], coefficients[many + p], factors ? factors[p] : 1, least(TILE, right - at));
        }
    }
}
