/* Rounds values to two bits, a sign and one of two magnitudes of 128 values; see two_bits.py. */

#include "tiles.h"

#define GROUP 128

INLINE double added_up(const double *lanes)
{
    double sum = 0;
    for (int i = 0; i < LANES; i++) sum += lanes[i];
    return sum;
}

KERNEL void round_to_two_bits(const float *restrict values, float *restrict table, uint8_t *restrict packed,
                              float *restrict update, int64_t rows, int64_t each, int64_t groups)
{
    for (int64_t row = 0; row < rows; row++)
        for (int64_t g = 0; g < groups; g++) {
            const int64_t start = g * GROUP, here = least(GROUP, each - start), count = here > 0 ? here : 0;
            float x[GROUP] = {0}, sizes[GROUP];
            double sums[LANES] = {0}, larger_sums[LANES] = {0}, smaller_sums[LANES] = {0};
            int32_t zeros = 0, many = 0;
            memcpy(x, values + row * each + (count ? start : 0), (size_t)count * sizeof(float));
            for (int i = 0; i < GROUP; i++) {
                sizes[i] = fabsf(x[i]);
                zeros += sizes[i] == 0;
            }
            for (int i = 0; i < GROUP; i += LANES)
                for (int j = 0; j < LANES; j++) sums[j] += sizes[i + j];
            const double mean = zeros ? 0 : added_up(sums) / GROUP;
            uint8_t codes[GROUP];
            for (int i = 0; i < GROUP; i += LANES)
                for (int j = 0; j < LANES; j++) {
                    const int is_larger = sizes[i + j] > mean;
                    larger_sums[j] += is_larger ? (double)sizes[i + j] : 0;
                    smaller_sums[j] += is_larger ? 0 : (double)sizes[i + j];
                    codes[i + j] = (uint8_t)(is_larger + 2 * (x[i + j] < 0));
                    many += is_larger;
                }
            const float larger = (float)(added_up(larger_sums) / (many ? many : 1));
            const float smaller = (float)(added_up(smaller_sums) / (many < GROUP ? GROUP - many : 1));
            table[2 * (row * groups + g)] = smaller;
            table[2 * (row * groups + g) + 1] = larger;
            uint8_t *bytes = packed + (row * groups + g) * (GROUP / 4);
            for (int i = 0; i < GROUP / 4; i++)
                bytes[i] = (uint8_t)(codes[i] | codes[32 + i] << 2 | codes[64 + i] << 4 | codes[96 + i] << 6);
            for (int i = 0; i < count; i++) {
                const float size = codes[i] & 1 ? larger : smaller;
                update[row * each + start + i] = codes[i] & 2 ? -size : size;
            }
        }
}

KERNEL void two_bit_values(const float *restrict table, const uint8_t *restrict packed, float *restrict out,
                           int64_t rows, int64_t each, int64_t groups)
{
    for (int64_t row = 0; row < rows; row++)
        for (int64_t g = 0; g < groups; g++) {
            const float smaller = table[2 * (row * groups + g)], larger = table[2 * (row * groups + g) + 1];
            const uint8_t *bytes = packed + (row * groups + g) * (GROUP / 4);
            const int64_t start = g * GROUP, count = least(GROUP, each - start);
            for (int quarter = 0; quarter < 4; quarter++)
                for (int64_t i = quarter * 32; i < least(count, quarter * 32 + 32); i++) {
                    const int code = bytes[i - quarter * 32] >> (2 * quarter);
                    const float size = code & 1 ? larger : smaller;
                    out[row * each + start + i] = code & 2 ? -size : size;
                }
        }
}
