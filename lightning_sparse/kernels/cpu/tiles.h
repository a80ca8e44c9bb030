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

#endif
