/* SPDX-License-Identifier: MIT */
/* store.isa.c: rows of K and V in eight bits: the largest magnitude of a row, and its elements
 * times a factor as codes. The caller has set the float mode. */
#include "isa_fn.h"
#include "narrow.h"

/* *top = the largest bit pattern of |x[i]|, or what it was. */
void TL_ISA_FN(top_n)(const float *restrict x, uint32_t *restrict top, int64_t n)
{
    uint32_t most = *top;
    for (int64_t i = 0; i < n; i++) {
        const uint32_t m = lowp_bits(x[i]) & ~LOWP_SIGN;
        most = most > m ? most : m;
    }
    *top = most;
}

/* The same of f16 or bf16, as their bit patterns are. */
void TL_ISA_FN(top_half_n)(const uint16_t *restrict x, uint32_t *restrict top, int64_t n)
{
    uint16_t most = (uint16_t)*top;
    for (int64_t i = 0; i < n; i++) {
        const uint16_t m = x[i] & 0x7FFF;
        most = most > m ? most : m;
    }
    *top = most;
}

/* y[i] = x[i] * r to the nearest integer, ties to even, where that is one of int8: added to 1.5 *
 * 2^23, whose unit in the last place is 1, the sum's low bits are it. */
void TL_ISA_FN(scaled_to_i8_n)(const float *restrict x, float r, int8_t *restrict y, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = (int8_t)lowp_bits(x[i] * r + 12582912.0f);
}

void TL_ISA_FN(scaled_to_e4m3_n)(const float *restrict x, float r, uint8_t *restrict y, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        y[i] = narrow_to_e4m3(x[i] * r);
}
