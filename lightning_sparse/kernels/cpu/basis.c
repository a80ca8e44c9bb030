/* Orthonormal bases of the columns of matrices, with the same bits on every processor; see basis.py. */

#include "tiles.h"

/* The dot product of two columns. Its terms are rounded so that all sums are exact and do not depend on the order. */
INLINE double dot(const double *x, const double *y, int64_t count)
{
    double most[LANES] = {0}, sums[LANES] = {0};
    int exponent;
    for (int64_t start = 0; start < count; start += LANES)
        for (int64_t i = 0; i < least(LANES, count - start); i++) {
            const double term = fabs(x[start + i] * y[start + i]);
            most[i] = term > most[i] ? term : most[i];
        }
    for (int i = 1; i < LANES; i++) most[0] = most[i] > most[0] ? most[i] : most[0];
    const double bound = (double)count * most[0];
    frexp(bound, &exponent);
    const double large = bound > 0 && bound <= 1e300 ? ldexp(3, exponent) : 0;
    for (int64_t start = 0; start < count; start += LANES)
        for (int64_t i = 0; i < least(LANES, count - start); i++)
            sums[i] += (x[start + i] * y[start + i] + large) - large;
    for (int i = 1; i < LANES; i++) sums[0] += sums[i];
    return sums[0];
}

INLINE void subtract(double *x, const double *y, double factor, int64_t count)
{
    for (int64_t i = 0; i < count; i++) x[i] -= factor * y[i];
}

/* Computes the basis of each matrix, given its number of rows; all matrices have `rank` columns. `scratch` has room for
   the largest matrix, column by column. */
KERNEL void bases(const float *p, const int64_t *rows, float *out, double *scratch, double dependent, int64_t rank,
                  int64_t many)
{
    for (int64_t number = 0; number < many; number++) {
        const int64_t count = rows[number];
        for (int64_t r = 0; r < rank; r++) {
            double *column = scratch + r * count;
            for (int64_t i = 0; i < count; i++) column[i] = p[i * rank + r];
            const double before = dot(column, column, count);
            for (int64_t i = 0; i < 2 * r; i++) {
                const double *other = scratch + i % r * count;
                subtract(column, other, dot(other, column, count), count);
            }
            const double after = dot(column, column, count), length = sqrt(after);
            const double limit = before * dependent * dependent;
            const int is_zero = after <= limit && limit < INFINITY; /* NaN and infinities stay visible */
            for (int64_t i = 0; i < count; i++) {
                column[i] = is_zero ? 0 : column[i] / length;
                out[i * rank + r] = (float)column[i];
            }
        }
        p += count * rank;
        out += count * rank;
    }
}
