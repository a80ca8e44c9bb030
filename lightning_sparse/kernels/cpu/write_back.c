/* Entries of a segment, ascending, to where they are in its parameters. Those at `numel` or behind it are padding. */

#include "segment.h"

/* Adds values to them, or clears them where there are no values. */
INLINE void write_entries(const int64_t *table, const int64_t *indices, const float *values, int64_t count,
                          int64_t many, int64_t numel)
{
    for (int64_t i = 0, p = 0; i < count && indices[i] < numel; i++) {
        while (stop_of(table, many, numel, p) <= indices[i]) p++;
        float *x = address_of(table, many, p);
        if (x && values)
            x[indices[i] - table[p]] += values[i];
        else if (x)
            x[indices[i] - table[p]] = 0;
    }
}

KERNEL void add_to_many(const int64_t *table, const int64_t *indices, const float *values, int64_t count, int64_t many,
                        int64_t numel)
{
    write_entries(table, indices, values, count, many, numel);
}

KERNEL void clear(const int64_t *table, const int64_t *indices, int64_t count, int64_t many, int64_t numel)
{
    write_entries(table, indices, 0, count, many, numel);
}
