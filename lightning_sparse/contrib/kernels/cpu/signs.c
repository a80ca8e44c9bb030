/* Signs of rows. A table has the start, the first row and the row length of each parameter; see row_table.py. */

#include "codes.h"

/* Writes the values that codes 1 and 0 of a tile have in their rows. Returns the tile's last parameter, with which the
   next tile begins. */
INLINE int64_t choose(const uint8_t *codes, int64_t start, int64_t count, const int64_t *table, int64_t many,
                      int64_t p, const float *upper, const float *lower, float *update)
{
    for (int64_t i = start, end; i < start + count; i = end) {
        while (p + 1 < many && i >= table[p + 1]) p++;
        const int64_t length = table[2 * many + p], within = (i - table[p]) / length, row = table[many + p] + within;
        const int32_t above = bits_of(upper[row]), below = bits_of(lower[row]); /* copied as bits, even NaN */
        end = least(start + count, table[p] + (within + 1) * length);
        for (int64_t j = i; j < end; j++) update[j] = of_bits(codes[j - start] ? above : below);
    }
    return p;
}

KERNEL void write_signs(const float *u, const int64_t *table, const float *upper, const float *lower, uint8_t *packed,
                        float *update, int64_t numel, int64_t many)
{
    uint8_t codes[TILE];
    for (int64_t start = 0, p = 0; start < numel; start += TILE) {
        const int64_t count = least(TILE, numel - start);
        for (int64_t i = 0; i < count; i++) codes[i] = u[start + i] >= 0;
        pack_tile(codes, start, count, 1, packed, 0);
        p = choose(codes, start, count, table, many, p, upper, lower, update);
    }
}

KERNEL void read_signs(const uint8_t *packed, const int64_t *table, const float *upper, const float *lower,
                       float *update, int64_t numel, int64_t many)
{
    uint8_t codes[TILE];
    for (int64_t start = 0, p = 0; start < numel; start += TILE) {
        const int64_t count = least(TILE, numel - start);
        unpack_tile(packed, start, count, 1, codes, 0);
        p = choose(codes, start, count, table, many, p, upper, lower, update);
    }
}
