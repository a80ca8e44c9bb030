#ifndef CODES_H
#define CODES_H

#include "tiles.h"

/* Codes of a few bits each, in one byte each, or packed in planes of 8, 4, 2 and 1 bits; see codes.py. */

/* A word holds the codes of one byte of the plane. To pack, first neighbours move together, then pairs, then fours. To
   unpack, they move apart. `pack` takes the bits from `shift` on. `unpack` writes them there, and keeps lower bits. */
#define PLANE(bits, word)                                                                                             \
    INLINE void pack_##bits(const uint8_t *restrict codes, int64_t groups, int shift, uint8_t *restrict plane)        \
    {                                                                                                                 \
        const word every = (word)(0x0101010101010101u * ((1u << bits) - 1));                                          \
        for (int64_t i = 0; i < groups * bits; i++) {                                                                 \
            word x;                                                                                                   \
            memcpy(&x, codes + sizeof x * i, sizeof x);                                                               \
            x = (word)(x >> shift & every);                                                                           \
            for (int gap = 8 - bits; gap <= (8 - bits) * 4 / bits; gap *= 2) x = (word)(x | x >> gap);                \
            plane[i] = (uint8_t)x;                                                                                    \
        }                                                                                                             \
    }                                                                                                                 \
    INLINE void unpack_##bits(uint8_t *restrict codes, int64_t groups, int shift, const uint8_t *restrict plane)      \
    {                                                                                                                 \
        const word every = (word)(0x0101010101010101u * ((1u << bits) - 1));                                          \
        for (int64_t i = 0; i < groups * bits; i++) {                                                                 \
            word x = plane[i], lower = 0;                                                                             \
            for (int gap = (8 - bits) * 4 / bits; gap >= 8 - bits; gap /= 2) x = (word)(x | x << gap);                \
            if (shift) memcpy(&lower, codes + sizeof x * i, sizeof x);                                                \
            x = (word)((x & every) << shift | lower);                                                                 \
            memcpy(codes + sizeof x * i, &x, sizeof x);                                                               \
        }                                                                                                             \
    }
PLANE(1, uint64_t)
PLANE(2, uint32_t)
PLANE(4, uint16_t)

/* Packs the codes of a tile, which begins at a multiple of 8, into planes of `all` groups of 8; zeros pad the last. */
INLINE void pack_tile(uint8_t *codes, int64_t start, int64_t count, int bits, uint8_t *packed, int64_t all)
{
    const int64_t groups = (count + 7) / 8, first = start / 8;
    memset(codes + count, 0, 8 * groups - count);
    if (bits == 8) memcpy(packed + 8 * first, codes, 8 * groups);
    if (bits & 4) pack_4(codes, groups, 0, packed + 4 * first);
    if (bits & 2) pack_2(codes, groups, bits & 4, packed + (bits & 4) * all + 2 * first);
    if (bits & 1) pack_1(codes, groups, bits & 6, packed + (bits & 6) * all + first);
}

INLINE void unpack_tile(const uint8_t *packed, int64_t start, int64_t count, int bits, uint8_t *codes, int64_t all)
{
    const int64_t groups = (count + 7) / 8, first = start / 8;
    if (bits == 8) memcpy(codes, packed + 8 * first, 8 * groups);
    if (bits & 4) unpack_4(codes, groups, 0, packed + 4 * first);
    if (bits & 2) unpack_2(codes, groups, bits & 4, packed + (bits & 4) * all + 2 * first);
    if (bits & 1) unpack_1(codes, groups, bits & 6, packed + (bits & 6) * all + first);
}

/* Random numbers of a tile's elements, times 2^16, in the two halves of each word; see uniform.py. */
union noise {
    uint32_t words[TILE / 2];
    int16_t numbers[TILE];
};

INLINE void draw(union noise *noise, int64_t start, int64_t key, int64_t step)
{
    const uint32_t first = (uint32_t)key + (uint32_t)(start / 2) * (uint32_t)step;
    for (uint32_t i = 0; i < TILE / 2; i++) {
        uint32_t word = first + i * (uint32_t)step;
        word = (word ^ (uint32_t)((int32_t)word >> 15)) * 0x7FEB352Du;
        word = (word ^ (uint32_t)((int32_t)word >> 16)) * 0x846CA68Bu;
        noise->words[i] = word | 0x00010001u;
    }
}

#endif
