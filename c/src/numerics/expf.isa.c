/* SPDX-License-Identifier: MIT */
/* expf.isa.c: exp of an array, canon_exp sixteen at a time. */
#include "canon.h"
#include "isa_fn.h"

/* canon_exp, whose two choices cost a sixth of it: they are not made where no lane needs them. */
V16_INLINE v16 exp_of_any(v16 x)
{
    return v16_all_le(x, v16_set1(EXP_OVERFLOW)) ? canon_exp_below(x) : canon_exp(x);
}

void TL_ISA_FN(exp_n)(const float *x, float *y, int64_t n)
{
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        v16_store(y + i, exp_of_any(v16_load(x + i)));
    if (i < n)
        v16_store_n(y + i, exp_of_any(v16_load_n(x + i, n - i)), n - i);
}
