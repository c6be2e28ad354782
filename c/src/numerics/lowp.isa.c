/* SPDX-License-Identifier: MIT */
/* lowp.isa.c: arrays of small floats. f16 goes through the instruction set's own conversion; the others are lowp.h in a
 * loop that the compiler turns into whatever registers there are. */
#include "isa_fn.h"
#include "lowp.h"
#include "vec.h"

void TL_ISA_FN(f32_to_f16_n)(const float *x, uint16_t *y, int64_t n);
void TL_ISA_FN(f16_to_f32_n)(const uint16_t *x, float *y, int64_t n);

void TL_ISA_FN(f32_to_f16_n)(const float *x, uint16_t *y, int64_t n)
{
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        v16_store_f16(y + i, v16_load(x + i));
    if (i < n)
        v16_store_f16_n(y + i, v16_load_n(x + i, n - i), n - i);
}

void TL_ISA_FN(f16_to_f32_n)(const uint16_t *x, float *y, int64_t n)
{
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        v16_store(y + i, v16_load_f16(x + i));
    if (i < n)
        v16_store_n(y + i, v16_load_f16_n(x + i, n - i), n - i);
}

#define EACH(convert, from, to)                                                              \
    void TL_ISA_FN(convert##_n)(const from *restrict x, to *restrict y, int64_t n);          \
    void TL_ISA_FN(convert##_n)(const from *restrict x, to *restrict y, int64_t n)           \
    {                                                                                        \
        for (int64_t i = 0; i < n; i++)                                                      \
            y[i] = lowp_##convert(x[i]);                                                     \
    }

EACH(f32_to_bf16, float, uint16_t)
EACH(bf16_to_f32, uint16_t, float)
EACH(f32_to_e4m3, float, uint8_t)
EACH(e4m3_to_f32, uint8_t, float)
EACH(f32_to_e5m2, float, uint8_t)
EACH(e5m2_to_f32, uint8_t, float)
