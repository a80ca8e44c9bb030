/* u, from `start` to `stop`: `scale` times the gradients are added to the residual, and u is that plus
   a m / (b sqrt(v) + c). */

#include "segment.h"

INLINE void add_part(float *restrict u, float *restrict residual, const float *grad, float scale, const float *m,
                     const float *v, int root, double a, double b, double c, int64_t count)
{
    for (int64_t i = 0; i < count; i++) residual[i] += grad[i] * scale;
    if (!m)
        memcpy(u, residual, count * sizeof *u);
    else if (!v || b == 0) { /* v may be infinite */
        const float factor = (float)(a / c);
        for (int64_t i = 0; i < count; i++) u[i] = residual[i] + m[i] * factor;
    } else {
        const float factor = (float)(a / b), least_divisor = (float)(c / b);
        if (root)
            for (int64_t i = 0; i < count; i++) u[i] = residual[i] + factor * m[i] / (sqrtf(v[i]) + least_divisor);
        else
            for (int64_t i = 0; i < count; i++) u[i] = residual[i] + factor * m[i] / (v[i] + least_divisor);
    }
}

KERNEL void add_with_payout(float *u, float *residual, const int64_t *grads, const int64_t *firsts,
                            const int64_t *seconds, const float *coefficients, double scale, int64_t many,
                            int64_t numel, int64_t root, int64_t start, int64_t stop)
{
    for (int64_t p = 0; p < many && grads[p] < stop; p++) {
        const int64_t left = grads[p] < start ? start : grads[p], skipped = left - grads[p];
        const int64_t count = least(stop_of(grads, many, numel, p), stop) - left;
        if (count <= 0) continue;
        const float *m = address_of(firsts, many, p), *v = seconds ? address_of(seconds, many, p) : 0;
        add_part(u + left, residual + left, address_of(grads, many, p) + skipped, (float)scale, m ? m + skipped : 0,
                 v ? v + skipped : 0, (int)root, coefficients[p], coefficients[many + p], coefficients[2 * many + p],
                 count);
    }
}
