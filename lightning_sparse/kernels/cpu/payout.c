/* u, from `start` to `stop`: `scale` times the deltas are added to the residual, and u is that plus
   a delta + b reference. */

#include "segment.h"

INLINE void add_part(float *restrict u, float *restrict residual, const float *delta, float scale,
                     const float *reference, float a, float b, int64_t count)
{
    for (int64_t i = 0; i < count; i++) {
        residual[i] += delta[i] * scale;
        u[i] = residual[i] + delta[i] * a;
    }
    if (reference)
        for (int64_t i = 0; i < count; i++) u[i] += reference[i] * b;
}

KERNEL void add_delta_with_payout(float *u, float *residual, const int64_t *deltas, const int64_t *references,
                            const float *coefficients, double scale, int64_t many, int64_t numel, int64_t start,
                            int64_t stop)
{
    for (int64_t p = 0; p < many && deltas[p] < stop; p++) {
        const int64_t left = deltas[p] < start ? start : deltas[p], skipped = left - deltas[p];
        const int64_t count = least(stop_of(deltas, many, numel, p), stop) - left;
        if (count <= 0) continue;
        const float *reference = references ? address_of(references, many, p) + skipped : 0;
        add_part(u + left, residual + left, address_of(deltas, many, p) + skipped, (float)scale, reference,
                 coefficients[p], coefficients[many + p], count);
    }
}
