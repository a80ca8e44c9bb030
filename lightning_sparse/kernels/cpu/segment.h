/* Where the parameters of a segment lie: a table has the start of each in the segment, and then its address, 0 where it
   has none; native.py. */

#ifndef SEGMENT_H
#define SEGMENT_H

#include "tiles.h"

INLINE float *address_of(const int64_t *table, int64_t many, int64_t p) { return (float *)(intptr_t)table[many + p]; }

/* Where a parameter ends in the segment, of which `numel` is the length. */
INLINE int64_t stop_of(const int64_t *table, int64_t many, int64_t numel, int64_t p)
{
    return p + 1 < many ? table[p + 1] : numel;
}

#endif
