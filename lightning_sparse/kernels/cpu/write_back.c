/* Entries of a segment, ascending, to where they are in its parameters. Those at `numel` or behind it are padding. */

#include "segment.h"

/* Adds values to them, or clears them where there are no values. */
KERNEL void write_entries(const int64_t *table, const int64_t *indices, const float *values, int64_t count,
                          int64_t many, int64_t numel)
{
    for (int64_t i = 0, p = 0; i < count && indices[i] < numel; i++) {
        while (stop_of(table, many, numel, p) <= indices[i]) p++;
        float *x = address_of(table, many, p);
        if (!x || indices[i] < table[p]) continue; /* the latter where they do not ascend */
        if (values)
            x[indices[i] - table[p]] += values[i];
        else
            x[indices[i] - table[p]] = 0;
    }
}
