/* Rounds values to a few levels of their bucket's norm. */

#include "codes.h"

KERNEL void round_to_levels(const float *restrict u, float *norms, uint8_t *packed, float *restrict update, int64_t key,
                            int64_t step, int64_t numel, int64_t levels, int64_t bits, int64_t bucket)
{
    uint8_t codes[TILE];
    union noise noise;
    const float most = (float)levels;
    for (int64_t start = 0, i = 0, end; start < numel; start += TILE) {
        const int64_t stop = least(start + TILE, numel);
        draw(&noise, start, key, step);
        for (; i < stop; i = end) {
            const int64_t number = i / bucket, first = number * bucket;
            if (i == first) norms[number] = (float)sqrt(sum_of(u + i, least(bucket, numel - i), SQUARE));
            const float level = norms[number] / most, divisor = level > 0 ? level : 1;
            end = least(stop, first + bucket);
            for (int64_t j = i; j < end; j++) {
                const float x = u[j] / divisor + noise.numbers[j - start] * 0x1p-16f;
                /* By rounding, the largest value may exceed its norm. */
                const float sum = (x > most ? most : x < -most ? -most : x) + WHOLE;
                codes[j - start] = (uint8_t)(bits_of(sum) - WHOLE_BITS + (int32_t)levels);
                update[j] = (sum - WHOLE) * level;
            }
        }
        pack_tile(codes, start, stop - start, (int)bits, packed, (numel + 7) / 8);
    }
}

KERNEL void level_values(const float *norms, const uint8_t *packed, float *restrict update, int64_t numel,
                         int64_t levels, int64_t bits, int64_t bucket)
{
    uint8_t codes[TILE];
    for (int64_t start = 0, i = 0, end; start < numel; start += TILE) {
        const int64_t stop = least(start + TILE, numel);
        unpack_tile(packed, start, stop - start, (int)bits, codes, (numel + 7) / 8);
        for (; i < stop; i = end) {
            const float level = norms[i / bucket] / (float)levels;
            end = least(stop, (i / bucket + 1) * bucket);
            for (int64_t j = i; j < end; j++) update[j] = (float)(codes[j - start] - (int32_t)levels) * level;
        }
    }
}
