/* SPDX-License-Identifier: MIT */
/* softmax.isa.c: one row of softmax. Lane i of the sum takes columns i, i+16, ... in rising order,
 * then sixteen lanes fold to one; the row is multiplied by 1/sum. A lane past the last column
 * counts as -inf, whose exp is +0. */
#include "kernels/kernels.h"
#include "numerics/canon.h"

V16_INLINE v16 load_tile(const float *x, int64_t c, int64_t cols)
{
    return c + 16 <= cols ? v16_load(x + c)
                          : v16_only(v16_load_n(x + c, cols - c), lanes_below(cols - c));
}

V16_INLINE void store_tile(float *y, int64_t c, int64_t cols, v16 value)
{
    if (c + 16 <= cols)
        v16_store(y + c, value);
    else
        v16_store_n(y + c, value, cols - c);
}

static void fill(float *y, int64_t cols, float value)
{
    for (int64_t c = 0; c < cols; c++)
        y[c] = value;
}

/* Rows that have no finite maximum: all -inf gives zeros, NaN or +inf gives NaN. */
static int degenerate(float m, float *y, int64_t cols)
{
    if (m > -INFINITY && m < INFINITY)
        return 0;
    fill(y, cols, m == -INFINITY ? 0 : canon_nan());
    return 1;
}

/* The largest of a row, NaN where any is: v16_max leaves a NaN of its first operand out, and
 * nothing is >= NaN. */
V16_INLINE float row_max(const float *x, int64_t cols)
{
    v16 top = v16_set1(-INFINITY);
    for (int64_t c = 0; c < cols; c += 16) {
        const v16 s = load_tile(x, c, cols);
        top = v16_max(s, top);
        if (!v16_all_le(s, top))
            return canon_nan();
    }
    return v16_fold_max(top);
}

/* exp(s - m), m finite and no lane above it. */
V16_INLINE v16 weights(v16 s, float m)
{
    return canon_exp_below(v16_sub(s, v16_set1(m)));
}

void TL_ISA_FN(softmax_row)(const float *x, float *y, int64_t cols)
{
    const float m = row_max(x, cols); /* 1. maximum */
    if (degenerate(m, y, cols))
        return;
    v16 sum = v16_zero();
    for (int64_t c = 0; c < cols; c += 16) { /* 2. exponentials and their sum */
        const v16 p = weights(load_tile(x, c, cols), m);
        sum = v16_add(sum, p);
        store_tile(y, c, cols, p);
    }
    const v16 factor = v16_set1(1 / v16_fold(sum));
    for (int64_t c = 0; c < cols; c += 16) /* 3. write */
        store_tile(y, c, cols, v16_mul(load_tile(y, c, cols), factor));
}

void TL_ISA_FN(softmax_online_row)(const float *x, float *y, int64_t cols)
{
    float m = -INFINITY;
    v16 sum = v16_zero();
    /* 1. maximum, and the sum relative to it: at a tile that may raise it */
    for (int64_t c = 0; c < cols;) {
        const float old = m;
        m = canon_max(old, load_tile(x, c, cols));
        if (!(m < INFINITY))
            break;
        if (m > old)
            sum = v16_mul(sum, v16_set1(canon_exp1(old - m)));
        for (; c < cols; c += 16) { /* that tile, and those that follow without raising it */
            const v16 s = load_tile(x, c, cols);
            if (!v16_all_le(s, v16_set1(m)))
                break;
            if (m != -INFINITY)
                sum = v16_add(sum, weights(s, m));
        }
    }
    if (degenerate(m, y, cols))
        return;
    const v16 factor = v16_set1(1 / v16_fold(sum));
    for (int64_t c = 0; c < cols; c += 16) /* 2. write */
        store_tile(y, c, cols, v16_mul(weights(load_tile(x, c, cols), m), factor));
}
