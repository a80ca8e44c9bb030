/* Computes, for each parameter, the sums of its first moment's squares and of its second moment, which is never below
   0. */

#include "segment.h"

KERNEL void moment_sums(const int64_t *firsts, const int64_t *seconds, float *sums, int64_t many, int64_t numel)
{
    for (int64_t p = 0; p < many; p++) {
        const float *m = address_of(firsts, many, p), *v = address_of(seconds, many, p);
        const int64_t count = stop_of(firsts, many, numel, p) - firsts[p];
        sums[p] = m ? (float)sum_of(m, count, SQUARE) : 0;
        sums[many + p] = v ? (float)sum_of(v, count, MAGNITUDE) : 0;
    }
}
