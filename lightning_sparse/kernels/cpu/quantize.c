/* Quantizes blocks to 4 or 8 bits. A table has the first block, the start and the stop of each parameter. */

#include "tiles.h"

/* max / L, rounded up to the next number of bf16, as bits. */
INLINE int32_t scale_of(int32_t largest, int32_t levels)
{
    const float exact = of_bits(largest) / (float)levels;
    const int32_t high = exact != exact ? 0x7FC0 : (bits_of(exact) + 0xFFFF) >> 16;
    /* L steps must not overflow, so scales of the largest numbers round down: L + 1/2 steps still reach the value. */
    return high - (of_bits(high << 16) * (float)levels == INFINITY && exact < INFINITY);
}

/* Returns the number of steps of a value, rounded, and writes the value of these steps. */
INLINE uint32_t steps_of(float x, float divisor, float scale, float *value)
{
    const float sum = x / divisor + WHOLE;
    *value = (sum - WHOLE) * scale;
    return (uint32_t)(bits_of(sum) - WHOLE_BITS);
}

INLINE void quantize_block(const float *restrict x, int64_t count, int64_t block, int bits, uint16_t *high,
                           uint8_t *restrict codes, float *restrict value)
{
    const int32_t found = scale_of(largest_of(x, count), (1 << (bits - 1)) - 1);
    const float scale = of_bits(found << 16), divisor = scale > 0 ? scale : 1;
    const int64_t half = block / 2, both = count > half ? count - half : 0;
    *high = (uint16_t)found;
    if (bits == 8) {
        for (int64_t i = 0; i < count; i++) codes[i] = (uint8_t)steps_of(x[i], divisor, scale, value + i);
        memset(codes + count, 0, block - count);
        return;
    }
    /* A byte holds an element of the first half, and one of the other half. */
    for (int64_t i = 0; i < both; i++) {
        const uint32_t first = steps_of(x[i], divisor, scale, value + i);
        codes[i] = (uint8_t)(first + 8 + 16 * (steps_of(x[i + half], divisor, scale, value + i + half) + 8));
    }
    for (int64_t i = both; i < half; i++)
        codes[i] = (uint8_t)((i < count ? steps_of(x[i], divisor, scale, value + i) : 0) + 8 + 16 * 8);
}

INLINE void dequantize_block(const uint8_t *restrict codes, int64_t count, int64_t block, int bits, uint16_t high,
                             float *restrict value)
{
    const float scale = of_bits((int32_t)((uint32_t)high << 16));
    const int64_t half = block / 2;
    if (bits == 8)
        for (int64_t i = 0; i < count; i++) value[i] = (float)(int8_t)codes[i] * scale;
    else {
        for (int64_t i = 0; i < least(half, count); i++) value[i] = (float)((codes[i] & 15) - 8) * scale;
        for (int64_t i = half; i < count; i++) value[i] = (float)((codes[i - half] >> 4) - 8) * scale;
    }
}

/* Quantizes all blocks, or dequantizes them without `u`. Most blocks are full, and have a length known to the compiler
   if it is 64. */
INLINE void all_blocks(const float *u, const int64_t *table, uint16_t *scales, uint8_t *codes, float *update,
                       int64_t many, int bits, int64_t block)
{
    for (int64_t p = 0; p < many; p++) {
        const int64_t stop = table[2 * many + p];
        for (int64_t i = table[many + p], row = table[p]; i < stop; i += block, row++) {
            const int64_t count = stop - i;
            uint8_t *own = codes + row * (block * bits / 8);
            if (u && count >= block)
                quantize_block(u + i, block, block, bits, scales + row, own, update + i);
            else if (u)
                quantize_block(u + i, count, block, bits, scales + row, own, update + i);
            else
                dequantize_block(own, least(block, count), block, bits, scales[row], update + i);
        }
    }
}

KERNEL void quantize(const float *u, const int64_t *table, uint16_t *scales, uint8_t *codes, float *update,
                     int64_t many, int64_t bits, int64_t block)
{
    if (block != 64)
        all_blocks(u, table, scales, codes, update, many, (int)bits, block);
    else if (bits == 4)
        all_blocks(u, table, scales, codes, update, many, 4, 64);
    else
        all_blocks(u, table, scales, codes, update, many, 8, 64);
}

KERNEL void dequantize(float *update, const int64_t *table, uint16_t *scales, uint8_t *codes, int64_t many,
                       int64_t bits, int64_t block)
{
    all_blocks(0, table, scales, codes, update, many, (int)bits, block);
}
