/* SPDX-License-Identifier: MIT */
/* lowp.isa.c: arrays of small floats, with the bits of lowp.h. f16 goes through the instruction
 * set's own conversion, codes of eight bits widen through f16; the others are loops that the
 * compiler turns into whatever registers there are. The caller has set the float mode, so that
 * here, other than in lowp.h, a float operation may round. */
#include "isa_fn.h"
#include "narrow.h"
#include "vec.h"

void TL_ISA_FN(f32_to_f16_n)(const float *x, uint16_t *y, int64_t n)
{
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        v16_store_f16(y + i, v16_load(x + i));
    if (i < n)
        v16_store_f16_n(y + i, v16_load_n(x + i, n - i), n - i);
}

/* Whether a value is not finite shows in the sum of squares: up to 2^31 it has none of a value of
 * 65520 or more, and none of NaN. That is one fma for sixteen values, and only those that are large
 * as a whole give a false alarm. */
void TL_ISA_FN(f32_to_f16_rows)(const float *x, int64_t x_step, uint16_t *y, int64_t y_step,
                                int64_t rows, int64_t n, bool *lost)
{
    v16 even = v16_zero(), odd = v16_zero(); /* two, so that none waits for the other */
    for (int64_t row = 0; row < rows; row++) {
        const float *from = x + row * x_step;
        uint16_t *to = y + row * y_step;
        int64_t i = 0;
        for (; i + 32 <= n; i += 32) {
            const v16 a = v16_load(from + i), b = v16_load(from + i + 16);
            v16_store_f16(to + i, a);
            v16_store_f16(to + i + 16, b);
            even = v16_fma(a, a, even);
            odd = v16_fma(b, b, odd);
        }
        for (; i < n; i += 16) {
            const int64_t some = n - i < 16 ? n - i : 16;
            const v16 a = v16_load_n(from + i, some);
            v16_store_f16_n(to + i, a, some);
            even = v16_fma(a, a, even);
        }
    }
    if (!v16_all_le(v16_add(even, odd), v16_set1(0x1p31f)))
        *lost = true;
}

void TL_ISA_FN(f16_to_f32_n)(const uint16_t *x, float *y, int64_t n)
{
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        v16_store(y + i, v16_load_f16(x + i));
    if (i < n)
        v16_store_n(y + i, v16_load_f16_n(x + i, n - i), n - i);
}

#define EACH(convert, from, to, one)                                                         \
    void TL_ISA_FN(convert##_n)(const from *restrict x, to *restrict y, int64_t n)           \
    {                                                                                        \
        for (int64_t i = 0; i < n; i++)                                                      \
            y[i] = one(x[i]);                                                                \
    }

EACH(f32_to_bf16, float, uint16_t, lowp_f32_to_bf16)
EACH(bf16_to_f32, uint16_t, float, lowp_bf16_to_f32)

/* ---- eight bits ---- */

EACH(f32_to_e4m3, float, uint8_t, narrow_to_e4m3)
EACH(f32_to_e5m2, float, uint8_t, narrow_to_e5m2)

enum { PIECE = 256 };

/* e5m2 is the upper byte of f16. */
void TL_ISA_FN(e5m2_to_f32_n)(const uint8_t *x, float *y, int64_t n)
{
    uint16_t half[PIECE];
    for (int64_t at = 0, some; at < n; at += some) {
        some = n - at < PIECE ? n - at : PIECE;
        for (int64_t i = 0; i < some; i++)
            half[i] = (uint16_t)(x[at + i] << 8);
        TL_ISA_FN(f16_to_f32_n)(half, y + at, some);
    }
}

/* As f16, the fields of e4m3 mean 2^-8 of it, its bias being 7 where f16 has 15; NaN becomes one of
 * f16, which keeps its bits. */
void TL_ISA_FN(e4m3_to_f32_n)(const uint8_t *x, float *y, int64_t n)
{
    uint16_t half[PIECE];
    for (int64_t at = 0, some; at < n; at += some) {
        some = n - at < PIECE ? n - at : PIECE;
        for (int64_t i = 0; i < some; i++) {
            const uint16_t m = x[at + i] & 0x7Fu, nan = (uint16_t)((m == 0x7F) << 14);
            half[i] = (uint16_t)((x[at + i] & 0x80u) << 8 | (uint16_t)(m << 7) | nan);
        }
        for (int64_t i = 0; i < some; i += 16) {
            const int64_t lanes = some - i < 16 ? some - i : 16;
            const v16 h = lanes == 16 ? v16_load_f16(half + i) : v16_load_f16_n(half + i, lanes);
            const v16 value = v16_where_nan(h, h, v16_mul(h, v16_set1(256)));
            if (lanes == 16)
                v16_store(y + at + i, value);
            else
                v16_store_n(y + at + i, value, lanes);
        }
    }
}
