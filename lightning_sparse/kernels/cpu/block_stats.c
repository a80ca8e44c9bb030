/* Block maxima, for the selection of entries. */

#include "tiles.h"

KERNEL void block_maxima(const float *x, int32_t *restrict maxima, int64_t blocks, int64_t block)
{
    for (int64_t i = 0; i < blocks; i++) maxima[i] = largest_of(x + i * block, block);
}
