/* SPDX-License-Identifier: MIT */
/* expf.isa.c: exp of an array, canon_exp sixteen at a time. */
#include "canon.h"
#include "isa_fn.h"

void TL_ISA_FN(exp_n)(const float *x, float *y, int64_t n);

void TL_ISA_FN(exp_n)(const float *x, float *y, int64_t n)
{
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        v16_store(y + i, canon_exp(v16_load(x + i)));
    if (i < n)
        v16_store_n(y + i, canon_exp(v16_load_n(x + i, n - i)), n - i);
}
