/* SPDX-License-Identifier: MIT */
/* vec_scalar.h: the sixteen lanes as an array: the definition the other instruction sets are
 * compared with, and the fallback. */
#ifndef TL_VEC_SCALAR_H
#define TL_VEC_SCALAR_H

#include <math.h>

#include "lowp.h"

#define V16_REGS 1
#define V16_ROWS 1
#define V16_KEYS(rows) 1
#define V16_COLS(rows) 1
#define V16_PREFETCHES 2
#define LANES for (int i = 0; i < 16; i++)

typedef struct {
    float lane[16];
} v16;

/* a*b + c with one rounding. Without an instruction for it: the product of two f32 is exact in f64,
 * the error of adding c is known exactly (two-sum), and a sum rounded to odd keeps what the final
 * rounding to f32 must know (Boldo and Melquiond, "Emulation of FMA and correctly rounded sums",
 * 2008). No libm call: some builds of fmaf round twice. */
V16_INLINE float f32_fma(float a, float b, float c)
{
#if defined(__FP_FAST_FMAF)
    return __builtin_fmaf(a, b, c);
#else
    const double product = (double)a * b, sum = product + c;
    const double back = sum - product, error = (product - (sum - back)) + (c - back);
    uint64_t bits;
    memcpy(&bits, &sum, sizeof bits);
    /* an infinite or NaN sum has a NaN error: leave it alone */
    const uint64_t inexact = (error > 0) | (error < 0);
    const uint64_t away = (error > 0) == (sum > 0) ? 1 : UINT64_MAX;
    bits += away & (0 - (inexact & ~bits & 1));
    double odd;
    memcpy(&odd, &bits, sizeof odd);
    return (float)odd;
#endif
}

V16_INLINE v16 v16_set1(float x)
{
    v16 y;
    LANES y.lane[i] = x;
    return y;
}

V16_INLINE v16 v16_zero(void)
{
    return v16_set1(0);
}

V16_INLINE v16 v16_load_n(const float *p, int64_t n)
{
    v16 y = v16_zero();
    memcpy(y.lane, p, (size_t)n * sizeof *p);
    return y;
}

V16_INLINE v16 v16_load(const float *p)
{
    return v16_load_n(p, 16);
}

V16_INLINE void v16_store_n(float *p, v16 x, int64_t n)
{
    memcpy(p, x.lane, (size_t)n * sizeof *p);
}

V16_INLINE void v16_store(float *p, v16 x)
{
    v16_store_n(p, x, 16);
}

V16_INLINE v16 v16_load_f16_n(const uint16_t *p, int64_t n)
{
    v16 y = v16_zero();
    for (int64_t i = 0; i < n; i++)
        y.lane[i] = lowp_f16_to_f32(p[i]);
    return y;
}

V16_INLINE v16 v16_load_f16(const uint16_t *p)
{
    return v16_load_f16_n(p, 16);
}

V16_INLINE v16 v16_load_bf16_n(const uint16_t *p, int64_t n)
{
    v16 y = v16_zero();
    for (int64_t i = 0; i < n; i++)
        y.lane[i] = lowp_bf16_to_f32(p[i]);
    return y;
}

V16_INLINE v16 v16_load_bf16(const uint16_t *p)
{
    return v16_load_bf16_n(p, 16);
}

V16_INLINE v16 v16_load_i8_n(const int8_t *p, int64_t n)
{
    v16 y = v16_zero();
    for (int64_t i = 0; i < n; i++)
        y.lane[i] = p[i];
    return y;
}

V16_INLINE v16 v16_load_i8(const int8_t *p)
{
    return v16_load_i8_n(p, 16);
}

V16_INLINE uint16_t e4m3_half(uint8_t code)
{
    const uint32_t m = code & 0x7Fu, sign = (code & 0x80u) << 8;
    return (uint16_t)(sign | m << 7 | (m == 0x7F ? 0x7E00 : 0));
}

V16_INLINE void v16_e4m3_to_f16(const uint8_t *p, uint16_t *h)
{
    for (int i = 0; i < 16; i++)
        h[i] = e4m3_half(p[i]);
}

typedef struct {
    uint8_t highest;
} codes_top;

V16_INLINE bool codes_have_nan(codes_top top)
{
    return top.highest == 0x7F;
}

V16_INLINE void line_to_f16(const uint8_t *p, uint16_t *h, codes_top *top)
{
    for (int i = 0; i < 64; i++) {
        const uint8_t m = p[i] & 0x7F;
        top->highest = top->highest > m ? top->highest : m;
        h[i] = e4m3_half(p[i]);
    }
}

V16_INLINE v16 v16_load_e4m3_n(const uint8_t *p, int64_t n)
{
    v16 y = v16_zero();
    for (int64_t i = 0; i < n; i++)
        y.lane[i] = lowp_f16_to_f32(e4m3_half(p[i]));
    return y;
}

V16_INLINE v16 v16_load_e4m3(const uint8_t *p)
{
    return v16_load_e4m3_n(p, 16);
}

V16_INLINE void v16_store_f16_n(uint16_t *p, v16 x, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        p[i] = lowp_f32_to_f16(x.lane[i]);
}

V16_INLINE void v16_store_f16(uint16_t *p, v16 x)
{
    v16_store_f16_n(p, x, 16);
}

V16_INLINE v16 v16_add(v16 a, v16 b)
{
    LANES a.lane[i] += b.lane[i];
    return a;
}

V16_INLINE v16 v16_sub(v16 a, v16 b)
{
    LANES a.lane[i] -= b.lane[i];
    return a;
}

V16_INLINE v16 v16_mul(v16 a, v16 b)
{
    LANES a.lane[i] *= b.lane[i];
    return a;
}

V16_INLINE v16 v16_div(v16 a, v16 b)
{
    LANES a.lane[i] /= b.lane[i];
    return a;
}

V16_INLINE v16 v16_with_sign(v16 x, v16 sign)
{
    LANES x.lane[i] = copysignf(x.lane[i], sign.lane[i]);
    return x;
}

V16_INLINE v16 v16_fma(v16 a, v16 b, v16 c)
{
    LANES c.lane[i] = f32_fma(a.lane[i], b.lane[i], c.lane[i]);
    return c;
}

V16_INLINE v16 v16_fma_n(v16 a, v16 b, v16 c, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        c.lane[i] = f32_fma(a.lane[i], b.lane[i], c.lane[i]);
    return c;
}

V16_INLINE v16 v16_max(v16 x, v16 y)
{
    LANES x.lane[i] = x.lane[i] > y.lane[i] ? x.lane[i] : y.lane[i];
    return x;
}

V16_INLINE v16 v16_where_gt(v16 x, v16 y, v16 a, v16 b)
{
    LANES b.lane[i] = x.lane[i] > y.lane[i] ? a.lane[i] : b.lane[i];
    return b;
}

V16_INLINE v16 v16_where_nan(v16 x, v16 a, v16 b)
{
    LANES b.lane[i] = x.lane[i] != x.lane[i] ? a.lane[i] : b.lane[i];
    return b;
}

V16_INLINE v16 v16_only(v16 x, uint16_t mask)
{
    LANES x.lane[i] = mask >> i & 1 ? x.lane[i] : -INFINITY;
    return x;
}

V16_INLINE int v16_all_le(v16 x, v16 y)
{
    int all = 1;
    LANES all &= x.lane[i] <= y.lane[i];
    return all;
}

V16_INLINE v16 v16_pow2(v16 p, v16 t)
{
    LANES
    {
        uint32_t bits, k;
        memcpy(&bits, &p.lane[i], sizeof bits);
        memcpy(&k, &t.lane[i], sizeof k);
        bits += k << 23;
        bits = (int32_t)bits < 0x00800000 ? 0 : bits;
        memcpy(&p.lane[i], &bits, sizeof bits);
    }
    return p;
}

V16_INLINE float v16_first(v16 x)
{
    return x.lane[0];
}

V16_INLINE float v16_fold_max(v16 x)
{
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            x.lane[i] = x.lane[i] > x.lane[i + half] ? x.lane[i] : x.lane[i + half];
    return x.lane[0];
}

V16_INLINE float v16_fold(v16 x)
{
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            x.lane[i] += x.lane[i + half];
    return x.lane[0];
}

V16_INLINE v16 v16_quads(v16 a, v16 b, v16 c, v16 d)
{
    const v16 x[4] = {a, b, c, d};
    v16 y;
    LANES
    {
        const float *l = x[i / 4].lane + i % 4;
        y.lane[i] = (l[0] + l[8]) + (l[4] + l[12]);
    }
    return y;
}

V16_INLINE v16 v16_fold_quads(v16 p0, v16 p1, v16 p2, v16 p3)
{
    const v16 p[4] = {p0, p1, p2, p3};
    v16 y;
    LANES
    {
        const float *l = p[i % 4].lane + i / 4 * 4;
        y.lane[i] = (l[0] + l[2]) + (l[1] + l[3]);
    }
    return y;
}

#undef LANES
#endif
