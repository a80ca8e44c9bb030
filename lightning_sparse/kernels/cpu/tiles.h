/* Code that the loops on the CPU share. native.py loads them, if a C compiler was available at the installation.

   The Python file of the same name calls each KERNEL of the files beside this one, and describes the arguments. Results
   equal plain torch's to the last bit, with these exceptions: sums, products that torch fuses with a sum, roots, and
   zeros of quantizers. These zeros are positive, as they are after decoding. A kernel works in one thread. It processes
   one tile at a time, which stays in the first-level cache. So each call reads u from memory once, and writes every
   result once.

   Sums use 16 lanes in fp32. Pieces are then added up in fp64, or in fp32 by low_rank.c. The compiler may neither
   reorder nor fuse operations, so sums are the same on every processor. It can vectorize loops over lanes. */

#ifndef TILES_H
#define TILES_H

#include <math.h>
#include <stdint.h>
#include <string.h>

/* The compiler makes a version for each generation of processors, and the loader chooses one. */
#if defined(__x86_64__) && defined(__GLIBC__) && defined(__GNUC__) && __GNUC__ >= 12
#define KERNEL __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define KERNEL
#endif
#define INLINE static inline __attribute__((always_inline))

#define TILE 1024  /* elements to process at a time, a multiple of 8 */
#define PIECE 1024 /* elements that are summed in fp32 */
#define LANES 16

/* Added to round to the nearest integer, of two to the even one. For |x| < 2^22, x + 1.5 * 2^23 has no fraction bits,
   and its last bits hold the integer. */
#define WHOLE 12582912.0f
#define WHOLE_BITS 0x4B400000

INLINE int64_t least(int64_t x, int64_t y) { return x < y ? x : y; }

INLINE int32_t bits_of(float x)
{
    int32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

INLINE float of_bits(int32_t bits)
{
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* The bits of the largest magnitude; NaN is larger than infinity. */
INLINE int32_t largest_of(const float *x, int64_t count)
{
    int32_t largest = 0;
    for (int64_t i = 0; i < count; i++) {
        const int32_t bits = bits_of(x[i]) & 0x7FFFFFFF;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

/* Sums. */

enum term { SQUARE, MAGNITUDE, POSITIVE, NEGATIVE };

INLINE float term_of(float x, enum term term)
{
    if (term == SQUARE) return x * x;
    if (term == MAGNITUDE) return fabsf(x);
    return (term == POSITIVE ? x < 0 : x > 0) ? 0 : x; /* NaN is in both sums */
}

/* The sum of a piece's elements, each times a factor. */
INLINE float sum_of_lanes(const float *x, int64_t count, enum term term, float factor)
{
    float sums[LANES] = {0};
    const int64_t full = count / LANES * LANES;
    for (int64_t start = 0; start < full; start += LANES)
        for (int i = 0; i < LANES; i++) sums[i] += term_of(x[start + i] * factor, term);
    for (int i = 0; i < count - full; i++) sums[i] += term_of(x[full + i] * factor, term);
    for (int half = LANES / 2; half; half /= 2)
        for (int i = 0; i < half; i++) sums[i] += sums[i + half];
    return sums[0];
}

/* The sum of a piece. If it may be out of fp32's range, elements are multiplied by a power of two: 0.5 / PIECE, or for
   squares a factor that makes the largest element 1 or more. */
INLINE double sum_of_piece(const float *x, int64_t count, enum term term)
{
    const float sum = sum_of_lanes(x, count, term, 1);
    if (fabsf(sum) < 1e30f && (term != SQUARE || sum > 1e-30f)) return sum;
    const int32_t exponent = largest_of(x, count) >> 23;
    const float factor = term == SQUARE ? of_bits((254 - (exponent < 253 ? exponent : 253)) << 23) : 0.5f / PIECE;
    const double scaled = sum_of_lanes(x, count, term, factor) / (double)factor;
    return term == SQUARE ? scaled / factor : scaled;
}

INLINE double sum_of(const float *x, int64_t count, enum term term)
{
    double sum = 0;
    for (int64_t start = 0; start < count; start += PIECE)
        sum += sum_of_piece(x + start, least(PIECE, count - start), term);
    return sum;
}

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
