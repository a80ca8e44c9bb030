/* Packs codes of a few bits into bytes, and unpacks them. */

#include "codes.h"

KERNEL void pack_codes(const void *codes, uint8_t *packed, int64_t numel, int64_t all, int64_t bits, int64_t width)
{
    uint8_t low[TILE], high[TILE];
    for (int64_t start = 0; start < numel; start += TILE) {
        const int64_t count = least(TILE, numel - start);
        const uint8_t *narrow = (const uint8_t *)codes + start;
        const int16_t *wide = (const int16_t *)codes + start;
        for (int64_t i = 0; i < count; i++) low[i] = width == 1 ? narrow[i] : (uint8_t)wide[i];
        pack_tile(low, start, count, (int)least(bits, 8), packed, all);
        if (bits <= 8) continue;
        for (int64_t i = 0; i < count; i++) high[i] = (uint8_t)(wide[i] >> 8);
        pack_tile(high, start, count, (int)bits - 8, packed + 8 * all, all);
    }
}

KERNEL void unpack_codes(const uint8_t *packed, void *codes, int64_t numel, int64_t all, int64_t bits)
{
    uint8_t low[TILE], high[TILE];
    for (int64_t start = 0; start < numel; start += TILE) {
        const int64_t count = least(TILE, numel - start);
        int16_t *wide = (int16_t *)codes + start;
        unpack_tile(packed, start, count, (int)least(bits, 8), bits <= 8 ? (uint8_t *)codes + start : low, all);
        if (bits <= 8) continue;
        unpack_tile(packed + 8 * all, start, count, (int)bits - 8, high, all);
        for (int64_t i = 0; i < count; i++) wide[i] = (int16_t)(low[i] | high[i] << 8);
    }
}
