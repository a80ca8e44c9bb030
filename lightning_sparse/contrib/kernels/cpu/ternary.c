/* Rounds values to -1, 0 and 1. A table begins with the start of each parameter. */

#include "codes.h"

KERNEL void round_to_ternary(const float *restrict u, const int64_t *table, const float *own, const float *scales,
                             uint8_t *packed, float *restrict update, int64_t key, int64_t step, int64_t numel,
                             int64_t many)
{
    uint8_t codes[TILE];
    union noise noise;
    for (int64_t start = 0, p = 0; start < numel; start += TILE) {
        const int64_t stop = least(start + TILE, numel);
        draw(&noise, start, key, step);
        for (int64_t i = start, end; i < stop; i = end) {
            while (p + 1 < many && i >= table[p + 1]) p++;
            end = p + 1 < many ? least(stop, table[p + 1]) : stop;
            const float scale = scales[p], limit = own[p] > 0 ? own[p] : 1, share = scale > 0 ? own[p] / scale : 0;
            for (int64_t j = i; j < end; j++) {
                const float x = u[j] / limit, clipped = x > 1 ? 1 : x < -1 ? -1 : x; /* NaN stays NaN */
                const float sum = clipped * share + noise.numbers[j - start] * 0x1p-16f + WHOLE;
                codes[j - start] = (uint8_t)(bits_of(sum) - WHOLE_BITS + 1);
                update[j] = (sum - WHOLE) * scale;
            }
        }
        pack_tile(codes, start, stop - start, 2, packed, 0);
    }
}

KERNEL void ternary_values(const void *codes, const int64_t *table, const float *scales, float *restrict update,
                           int64_t size, int64_t numel, int64_t many, int64_t width)
{
    const uint8_t *narrow = codes;
    const int16_t *wide = codes;
    for (int64_t p = 0; p < many; p++) {
        const int64_t stop = p + 1 < many ? table[p + 1] : numel;
        for (int64_t i = table[p]; i < stop; i++)
            update[i] = (float)((width == 1 ? narrow[i] : wide[i]) - (int32_t)size) / (float)size * scales[p];
    }
}
