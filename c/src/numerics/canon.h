/* SPDX-License-Identifier: MIT */
/* canon.h: the canonical arithmetic (numerics version 1) in sixteen-lane operations: exp, tanh,
 * log, the maximum that keeps NaN.
 *
 * This text fixes the bits. It is compiled once per instruction set and must not mention one; every
 * operation is one IEEE f32 rounding to nearest even, every multiply-add is fused, nothing is
 * reassociated (-ffp-contract=off).
 * python/tinyllm/reference.py says the same in numpy. */
#ifndef TL_CANON_H
#define TL_CANON_H

#include <math.h>

#include "coef.h"
#include "float_flags.h"
#include "vec.h"

/* The one NaN that leaves the library, 0x7FC00000. */
V16_INLINE float canon_nan(void)
{
    const uint32_t bits = 0x7FC00000u;
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

V16_INLINE v16 canon_one_nan(v16 x)
{
    return v16_where_nan(x, v16_set1(canon_nan()), x);
}

/* e^x: x = k ln 2 + r with |r| <= ln 2 / 2, k the nearest integer; a polynomial in r; times 2^k; +0
 * below the normal range. For x <= EXP_OVERFLOW and -inf; not for NaN. */
V16_INLINE v16 canon_exp_below(v16 x)
{
    const v16 magic = v16_set1(EXP_MAGIC), one = v16_set1(1);
    const v16 c = v16_max(x, v16_set1(EXP_LOWEST));
    const v16 t = v16_fma(c, v16_set1(EXP_LOG2E), magic), k = v16_sub(t, magic);
    v16 r = v16_fma(k, v16_set1(-EXP_LN2_HI), c);
    r = v16_fma(k, v16_set1(-EXP_LN2_LO), r);
    v16 p = v16_set1(EXP_C6);
    p = v16_fma(p, r, v16_set1(EXP_C5));
    p = v16_fma(p, r, v16_set1(EXP_C4));
    p = v16_fma(p, r, v16_set1(EXP_C3));
    p = v16_fma(p, r, v16_set1(EXP_C2));
    p = v16_fma(p, r, one);
    p = v16_fma(p, r, one);
    return v16_pow2(p, t);
}

/* e^x for any x: +inf above EXP_OVERFLOW, NaN for NaN. */
V16_INLINE v16 canon_exp(v16 x)
{
    const v16 y = v16_where_gt(x, v16_set1(EXP_OVERFLOW), v16_set1(INFINITY), canon_exp_below(x));
    return v16_where_nan(x, v16_set1(canon_nan()), y);
}

V16_INLINE float canon_exp1(float x)
{
    return v16_first(canon_exp(v16_set1(x)));
}

/* tanh x by the order in coef.h. */
V16_INLINE v16 canon_tanh(v16 x)
{
    const v16 a = v16_with_sign(x, v16_zero()), z = v16_mul(a, a), one = v16_set1(1);
    v16 p = v16_set1(TANH_C0);
    p = v16_fma(p, z, v16_set1(TANH_C1));
    p = v16_fma(p, z, v16_set1(TANH_C2));
    p = v16_fma(p, z, v16_set1(TANH_C3));
    p = v16_fma(p, z, v16_set1(TANH_C4));
    const v16 small = v16_fma(a, v16_mul(p, z), a);
    const v16 large = v16_sub(one, v16_div(v16_set1(2), v16_add(canon_exp(v16_add(a, a)), one)));
    return v16_where_nan(x, v16_set1(canon_nan()),
                         v16_with_sign(v16_where_gt(v16_set1(TANH_SMALL), a, small, large), x));
}

/* ln x by the order in coef.h, for x positive and normal; the ends as logf has them. */
V16_INLINE float canon_log(float x)
{
    if (!(x > 0))
        return x == 0 ? -INFINITY : canon_nan();
    if (x == INFINITY)
        return x;
    int32_t word;
    memcpy(&word, &x, sizeof word);
    const int32_t exponent = (word - LOG_SQRT_HALF) >> 23;
    word -= exponent * (1 << 23);
    float f;
    memcpy(&f, &word, sizeof f);
    const float g = f - 1, n = (float)exponent;
    static const float c[] = {LOG_C10, LOG_C9, LOG_C8, LOG_C7, LOG_C6,
                              LOG_C5,  LOG_C4, LOG_C3, LOG_C2};
    float p = c[0];
    for (int i = 1; i < 9; i++)
        p = f32_fma(p, g, c[i]);
    const float square = g * g, tail = f32_fma(n, LOG_LN2_LO, square * p);
    return f32_fma(n, LOG_LN2_HI, g + tail);
}

/* The larger of two, `x` where they are equal; NaN where either is. */
V16_INLINE float canon_max2(float x, float y)
{
    if (x != x || y != y)
        return canon_nan();
    return y > x ? y : x;
}

/* The largest of m and sixteen lanes; NaN where any is, for nothing is >= NaN. Which zero it gives
 * where the largest are zeros of both signs is not said: neither exp(s - m) nor m + log(l) can
 * tell. */
V16_INLINE float canon_max(float m, v16 s)
{
    const float top = v16_fold_max(v16_max(s, v16_set1(m)));
    return m == m && v16_all_le(s, v16_set1(top)) ? top : canon_nan();
}

#endif
