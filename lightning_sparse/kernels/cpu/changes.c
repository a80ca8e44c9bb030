/* Computes w - x of each parameter, or f(w - x) + r w if there are factors. The output may be x. */

#include "segment.h"

KERNEL void changes(const int64_t *outs, const int64_t *weights, const int64_t *stepped, const float *factors,
                    const float *rests, int64_t many, int64_t numel)
{
    for (int64_t p = 0; p < many; p++) {
        const int64_t count = stop_of(outs, many, numel, p) - outs[p];
        const float *w = address_of(weights, many, p), *x = address_of(stepped, many, p);
        const float factor = factors ? factors[p] : 1, rest = factors ? rests[p] : 0;
        for (int64_t start = 0; start < count; start += TILE) {
            const int64_t size = least(TILE, count - start);
            float change[TILE];
            for (int64_t i = 0; i < size; i++) change[i] = w[start + i] - x[start + i];
            if (factor != 1)
                for (int64_t i = 0; i < size; i++) change[i] = change[i] * factor + w[start + i] * rest;
            memcpy(address_of(outs, many, p) + start, change, size * sizeof *change);
        }
    }
}
