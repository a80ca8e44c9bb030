/* Products of matrices M with thin ones: P = M Q^T, Q = P^T M, or M = P Q.

   A table has the start of each M in u, its rows and its columns. P and Q of all matrices are concatenated. The loops
   process one part at a time, which stays in the second-level cache, for 4 columns of P. Each part is summed in fp32,
   and then the parts are. */

#include "tiles.h"

#define ROWS 128 /* rows of a part, which has TILE columns */
#define WIDTH 4  /* columns of P at a time */

struct part {
    float *m, *p, *q;                 /* the start of the part in each */
    int64_t rows, columns;            /* of the part */
    int64_t stride, rank;             /* distances between rows of M and Q, and of P */
    int width;                        /* number of columns of P and rows of Q */
    int is_leftmost, is_top, is_first; /* first part of a row, of a column, of P's columns? */
};

/* The dot products of a row with four rows of Q. */
INLINE void dot_products(const float *x, int64_t count, const float *const q[WIDTH], float sums[WIDTH])
{
    float lanes[WIDTH][LANES], a[LANES] = {0}, b[LANES] = {0}, c[LANES] = {0}, d[LANES] = {0}; /* in registers */
    const int64_t full = count / LANES * LANES;
    for (int64_t start = 0; start < full; start += LANES)
        for (int i = 0; i < LANES; i++) {
            a[i] += x[start + i] * q[0][start + i];
            b[i] += x[start + i] * q[1][start + i];
            c[i] += x[start + i] * q[2][start + i];
            d[i] += x[start + i] * q[3][start + i];
        }
    memcpy(lanes[0], a, sizeof a), memcpy(lanes[1], b, sizeof b);
    memcpy(lanes[2], c, sizeof c), memcpy(lanes[3], d, sizeof d);
    for (int r = 0; r < WIDTH; r++) {
        for (int i = 0; i < count - full; i++) lanes[r][i] += x[full + i] * q[r][full + i];
        for (int half = LANES / 2; half; half /= 2)
            for (int i = 0; i < half; i++) lanes[r][i] += lanes[r][i + half];
        sums[r] = lanes[r][0];
    }
}

INLINE void left(struct part part)
{
    const float *q[WIDTH];
    for (int r = 0; r < WIDTH; r++) q[r] = part.q + (r < part.width ? r : 0) * part.stride;
    for (int64_t i = 0; i < part.rows; i++) {
        float sums[WIDTH], *p = part.p + i * part.rank;
        dot_products(part.m + i * part.stride, part.columns, q, sums);
        for (int r = 0; r < part.width; r++) p[r] = part.is_leftmost ? sums[r] : p[r] + sums[r];
    }
}

/* Processes four rows of M at a time, and reads each of their elements once for all rows of Q. */
INLINE void right(struct part part)
{
    const int64_t stride = part.stride, fours = part.rows / 4 * 4;
    const float *restrict m = part.m;
    float sums[WIDTH][TILE] = {{0}};
    for (int64_t i = 0; i < fours; i += 4, m += 4 * stride) {
        float p[4][WIDTH] = {{0}}; /* columns behind the width are not used */
        for (int k = 0; k < 4; k++)
            for (int r = 0; r < part.width; r++) p[k][r] = part.p[(i + k) * part.rank + r];
        for (int64_t j = 0; j < part.columns; j++) {
            const float a = m[j], b = m[stride + j], c = m[2 * stride + j], d = m[3 * stride + j];
            for (int r = 0; r < WIDTH; r++) sums[r][j] += (p[0][r] * a + p[1][r] * b) + (p[2][r] * c + p[3][r] * d);
        }
    }
    for (int r = 0; r < part.width; r++) {
        float *q = part.q + r * stride;
        for (int64_t i = fours; i < part.rows; i++)
            for (int64_t j = 0; j < part.columns; j++) sums[r][j] += part.p[i * part.rank + r] * part.m[i * stride + j];
        for (int64_t j = 0; j < part.columns; j++) q[j] = part.is_top ? sums[r][j] : q[j] + sums[r][j];
    }
}

/* Adds one product after the other, as plain torch does, because all ranks need the same bits. */
INLINE void add_products(struct part part, int width)
{
    for (int64_t i = 0; i < part.rows; i++) {
        const float *p = part.p + i * part.rank, *restrict q = part.q;
        float *restrict m = part.m + i * part.stride;
        for (int64_t j = 0; j < part.columns; j++) {
            float sum = part.is_first ? p[0] * q[j] : m[j] + p[0] * q[j];
            for (int r = 1; r < width; r++) sum += p[r] * q[r * part.stride + j];
            m[j] = sum;
        }
    }
}

INLINE void product(struct part part)
{
    if (part.width == WIDTH) {
        add_products(part, WIDTH);
        return;
    }
    for (int r = 0; r < part.width; r++, part.p++, part.q += part.stride, part.is_first = 0) add_products(part, 1);
}

/* `kind` is the index of a product in `KINDS` of low_rank.py. */
KERNEL void low_rank(float *u, const int64_t *table, float *p, float *q, int64_t kind, int64_t rank, int64_t many)
{
    for (; many--; p += rank * table[1], q += rank * table[2], table += 3) {
        const int64_t rows = table[1], columns = table[2];
        for (int64_t i = 0; i < rows; i += ROWS)
            for (int64_t j = 0; j < columns; j += TILE)
                for (int64_t r = 0; r < rank; r += WIDTH) {
                    const struct part part = {
                        u + table[0] + i * columns + j, p + i * rank + r, q + r * columns + j,
                        least(ROWS, rows - i), least(TILE, columns - j), columns, rank,
                        (int)least(WIDTH, rank - r), j == 0, i == 0, r == 0,
                    };
                    if (kind == 0) left(part);
                    if (kind == 1) right(part);
                    if (kind == 2) product(part);
                }
    }
}
