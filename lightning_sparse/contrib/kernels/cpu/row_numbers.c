/* Computes a few numbers of each row. A table has the start, the first row and the row length of each parameter. */

#include "tiles.h"

INLINE uint8_t is_used(const float *x, int64_t length)
{
    int64_t i = 0;
    while (i < length && x[i] == 0) i++;
    return i < length;
}

INLINE void signed_means(const float *x, int64_t length, float *upper, float *lower)
{
    double above = 0, below = 0;
    int64_t negatives = 0;
    for (int64_t start = 0; start < length; start += PIECE) {
        const int64_t count = least(PIECE, length - start);
        int32_t found = 0;
        above += sum_of_piece(x + start, count, POSITIVE);
        below += sum_of_piece(x + start, count, NEGATIVE);
        for (int64_t i = 0; i < count; i++) found += x[start + i] < 0;
        negatives += found;
    }
    *upper = (float)(above / (negatives < length ? length - negatives : 1));
    *lower = (float)(below / (negatives ? negatives : 1));
}

INLINE float clipped_maximum(const float *x, int64_t length, double clip)
{
    double squares = 0;
    int32_t most = 0;
    for (int64_t start = 0; start < length; start += PIECE) {
        const int64_t count = least(PIECE, length - start);
        const int32_t own = largest_of(x + start, count);
        most = own > most ? own : most;
        squares += sum_of_piece(x + start, count, SQUARE);
    }
    const double limit = sqrt(squares / length) * clip, largest = of_bits(most);
    return (float)(limit >= largest ? largest : limit); /* NaN stays NaN */
}

/* `kind` is the index of a number in `SUMS` of row_numbers.py. */
KERNEL void row_numbers(const float *u, const int64_t *table, void *out, int64_t kind, double clip, int64_t rows,
                        int64_t numel, int64_t many)
{
    float *numbers = out;
    for (int64_t p = 0; p < many; p++) {
        const int64_t length = table[2 * many + p], stop = p + 1 < many ? table[p + 1] : numel;
        for (int64_t start = table[p], row = table[many + p]; start < stop; start += length, row++) {
            if (kind == 0) ((uint8_t *)out)[row] = is_used(u + start, length);
            if (kind == 1) numbers[row] = (float)(sum_of(u + start, length, MAGNITUDE) / length);
            if (kind == 2) signed_means(u + start, length, numbers + row, numbers + rows + row);
            if (kind == 3) numbers[row] = clipped_maximum(u + start, length, clip);
        }
    }
}
