/* Tables of a segment's parameters: first the start of each in the segment, then the address of each, 0 if it has none;
   see native.py. */

#ifndef SEGMENT_H
#define SEGMENT_H

#include "tiles.h"

INLINE float *address_of(const int64_t *table, int64_t many, int64_t p) { return (float *)(intptr_t)table[many + p]; }

/* The end of a parameter in the segment, whose length is `numel`. */
INLINE int64_t stop_of(const int64_t *table, int64_t many, int64_t numel, int64_t p)
{
    return p + 1 < many ? table[p + 1] : numel;
}

#endif
