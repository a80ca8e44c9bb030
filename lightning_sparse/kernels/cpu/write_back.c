/* Writes a segment's ascending entries to its parameters. Entries with the index `numel` or above are padding. */

#include "segment.h"

/* Adds values to the parameters at the indices, or sets them to zero if there are no values. */
KERNEL void write_entries(const int64_t *table, const int64_t *indices, const float *values, int64_t count,
                          int64_t many, int64_t numel)
{
    for (int64_t i = 0, p = 0; i < count && indices[i] < numel; i++) {
        while (stop_of(table, many, numel, p) <= indices[i]) p++;
        float *x = address_of(table, many, p);
        if (!x || indices[i] < table[p]) continue; /* the latter if indices do not ascend */
        if (values)
            x[indices[i] - table[p]] += values[i];
        else
            x[indices[i] - table[p]] = 0;
    }
}
