/* The k-th largest magnitude, and the entries that reach a magnitude. Magnitudes are bits without the sign. */

#include "tiles.h"

#define MAGNITUDE 0x7FFFFFFF
#define AHEAD 16 /* number of blocks to prefetch ahead of the search */

/* Finds the upper 11 bits first, and then twice the next 10 bits, from counts of the numbers that have the bits found
   before. */
KERNEL void kth_largest(const int32_t *bits, int64_t *result, int64_t numel, int64_t k)
{
    int32_t found = 0;
    for (int low = 20; low >= 0; low -= 10) {
        const int high = low + (low == 20 ? 11 : 10);
        int64_t counts[1 << 11] = {0};
        for (int64_t i = 0; i < numel; i++) {
            const int32_t magnitude = bits[i] & MAGNITUDE;
            if ((int64_t)magnitude >> high == found) counts[(magnitude >> low) & ((1 << (high - low)) - 1)]++;
        }
        int32_t bin = (1 << (high - low)) - 1;
        for (; bin > 0 && counts[bin] < k; bin--) k -= counts[bin];
        found = (int32_t)((int64_t)found << (high - low)) + bin;
    }
    *result = found;
}

/* Searches blocks `first` to `last` of a list, or of all blocks if there is no list. The last block may have fewer
   elements. `count` is the number of entries found so far, and is updated. Once there are `enough`, only magnitudes
   above the threshold are added. The results have room for all elements of the blocks. */
KERNEL void entries_of_blocks(const int32_t *bits, const int64_t *blocks, int64_t *restrict indices,
                              int32_t *restrict magnitudes, int64_t *count, int64_t first, int64_t last,
                              int64_t block, int64_t numel, int64_t threshold, int64_t enough)
{
    int64_t added = 0;
    for (int64_t number = first; number < last; number++) {
        if (blocks && number + AHEAD < last)
            for (int64_t i = 0; i < block; i += LANES) __builtin_prefetch(bits + blocks[number + AHEAD] * block + i);
        const int64_t start = (blocks ? blocks[number] : number) * block, stop = least(start + block, numel);
        for (int64_t left = start; left < stop; left += LANES) {
            const int64_t found = *count + added, size = least(LANES, stop - left);
            const int32_t below = (int32_t)threshold - (found < enough); /* magnitudes above it are wanted */
            int32_t any = size < LANES;
            if (size == LANES)
                for (int i = 0; i < LANES; i++) any |= (bits[left + i] & MAGNITUDE) > below;
            if (!any) continue;
            /* An element that is not wanted is overwritten by the next one. */
            for (int64_t i = left; i < left + size; i++) {
                const int32_t magnitude = bits[i] & MAGNITUDE;
                indices[added] = i;
                magnitudes[added] = magnitude;
                added += magnitude > below;
            }
        }
    }
    *count += added;
}
