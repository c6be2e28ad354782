/* SPDX-License-Identifier: MIT */
/* kv_ref.h: what the tests of stored K and V hold the library against: every format's rule once
 * more, in integers and doubles, one value after another. Nothing of the library's own arithmetic
 * is used. */
#ifndef TL_KV_REF_H
#define TL_KV_REF_H

#include <stdbool.h>

#include "check.h"
#include "tinyllm/kv_pool.h"

/* ---- formats ---- */

struct ref_format {
    const char *name;
    uint32_t format;
    tl_dtype dtype;
    int elem;
    bool has_scales;
};

static const struct ref_format ref_formats[] = {
    {"f16", 1, TL_F16, 2, false},  {"e4m3", 2, TL_F8_E4M3, 1, true}, {"i8", 3, TL_I8, 1, true},
    {"bf16", 4, TL_BF16, 2, false}, {"f32", 5, TL_F32, 4, false}};

enum { REF_FORMATS = 5 };

static inline int ref_elem(tl_dtype dtype)
{
    for (int i = 0; i < REF_FORMATS; i++)
        if (ref_formats[i].dtype == dtype)
            return ref_formats[i].elem;
    return 0;
}

static inline tl_kv_pool *ref_pool(const struct ref_format *f, uint32_t n_blocks, uint32_t b,
                                    uint32_t layers, uint32_t heads, uint32_t dim)
{
    const tl_kv_cfg cfg = {n_blocks, b, layers, heads, dim, f->dtype, f->format};
    tl_kv_pool *kv = NULL;
    CHECK_STATUS(tl_kv_pool_create(&cfg, &kv), TL_OK);
    return kv;
}

/* Where things lie: bytes of a strip, and from its start to its scales. */
static inline size_t ref_scales_at(const struct ref_format *f, size_t b, size_t dim)
{
    const size_t rows = b * dim * (size_t)f->elem;
    return f->has_scales ? (rows + 3) / 4 * 4 : rows;
}

static inline size_t ref_strip(const struct ref_format *f, size_t b, size_t dim)
{
    return ref_scales_at(f, b, dim) + (f->has_scales ? 4 * b : 0);
}

/* ---- one value ---- */

/* x / 2^e to the nearest integer, ties to even; x >= 0, and what comes out is small. */
static inline uint64_t ref_steps(double x, int e)
{
    const double steps = ldexp(x, -e), whole = floor(steps), rest = steps - whole;
    const uint64_t n = (uint64_t)whole;
    return n + (rest > 0.5 || (rest == 0.5 && n % 2 == 1));
}

static inline uint16_t ref_f16(float x)
{
    const uint16_t sign = signbit(x) ? 0x8000 : 0;
    const double a = fabs((double)x);
    int e = -14;
    if (isnan(x))
        return 0x7E00;
    if (a >= 65520.0)
        return sign | 0x7C00;
    while (e < 15 && a >= ldexp(1.0, e + 1))
        e++;
    /* the hidden bit of normal numbers carries into the exponent */
    return (uint16_t)(sign + ref_steps(a, e - 10) + (uint64_t)(e + 14) * 1024);
}

static inline float ref_f16_value(uint16_t h)
{
    const int e = h >> 10 & 31, m = h & 1023;
    const double a = e == 31 ? INFINITY : e ? ldexp(1024 + m, e - 25) : ldexp(m, -24);
    if (e == 31 && m) /* the bits of a NaN, made quiet */
        return float_of((uint32_t)h >> 15 << 31 | 0x7FC00000 | (uint32_t)m << 13);
    return (float)(h >> 15 ? -a : a);
}

static inline uint16_t ref_bf16(float x)
{
    const uint32_t w = float_bits(x), rest = w & 0xFFFF, up = w >> 16;
    if (isnan(x))
        return 0x7FC0;
    return (uint16_t)(up + (rest > 0x8000 || (rest == 0x8000 && up % 2 == 1)));
}

static inline float ref_bf16_value(uint16_t h)
{
    return float_of((uint32_t)h << 16);
}

static inline float ref_e4m3_value(uint8_t h)
{
    const int e = h >> 3 & 15, m = h & 7;
    const double a = (h & 0x7F) == 0x7F ? NAN : e ? ldexp(8 + m, e - 10) : ldexp(m, -9);
    return (float)(h >> 7 ? -a : a);
}

/* The nearest code, found among all; beyond the largest the largest. Not for NaN. */
static inline uint8_t ref_e4m3(float x)
{
    static double value[0x7F];
    const double a = fabs((double)x);
    uint8_t best = 0;
    for (uint8_t c = 0; value[0x7E] == 0 && c < 0x7F; c++)
        value[c] = (double)ref_e4m3_value(c);
    for (uint8_t c = 1; c < 0x7F; c++) {
        const double now = fabs(a - value[c]), was = fabs(a - value[best]);
        if (now < was || (now == was && c % 2 == 0))
            best = c;
    }
    return (uint8_t)(best | (signbit(x) ? 0x80 : 0));
}

static inline int8_t ref_i8(float x)
{
    const int64_t n = (int64_t)ref_steps(fabs((double)x), 0);
    CHECK(n <= 127, "%g is no int8", (double)x);
    return (int8_t)(signbit(x) ? -n : n);
}

/* ---- one row ---- */

/* A value of a source as f32. */
static inline float ref_source(tl_dtype dtype, const void *x, int64_t i)
{
    uint16_t h;
    float f;
    if (dtype == TL_F32) {
        memcpy(&f, (const char *)x + i * 4, 4);
        return f;
    }
    memcpy(&h, (const char *)x + i * 2, 2);
    return dtype == TL_F16 ? ref_f16_value(h) : ref_bf16_value(h);
}

/* A row of f32 in eight bits. One rounding each: a quotient or product of two floats is exact
 * enough in double. */
static inline void ref_store_scaled(tl_dtype to, const float *x, int64_t dim, unsigned char *codes,
                                    float *scale)
{
    const double top = to == TL_I8 ? 127 : 448;
    double largest = 0;
    bool is_number = true;
    for (int64_t d = 0; d < dim; d++) {
        is_number = is_number && isfinite(x[d]);
        largest = fmax(largest, fabs((double)x[d]));
        codes[d] = 0;
    }
    *scale = is_number ? 0.0f : float_of(0x7FC00000);
    if (!is_number || largest < 0x1p-100)
        return;
    *scale = (float)(largest / top);
    const float r = (float)(top / largest);
    for (int64_t d = 0; d < dim; d++) {
        const float product = (float)((double)x[d] * (double)r);
        codes[d] = to == TL_I8 ? (unsigned char)ref_i8(product) : ref_e4m3(product);
    }
}

/* A row of a source in a format, as its strip holds it, and its scale where there is one. */
static inline void ref_store(const struct ref_format *f, tl_dtype from, const void *x, int64_t dim,
                             unsigned char *y, float *scale)
{
    if (from == f->dtype) {
        memcpy(y, x, (size_t)(dim * f->elem));
        return;
    }
    float *wide = malloc((size_t)dim * sizeof *wide);
    for (int64_t d = 0; d < dim; d++) {
        wide[d] = ref_source(from, x, d);
        if (f->has_scales)
            continue;
        const uint16_t h = f->dtype == TL_F16 ? ref_f16(wide[d]) : ref_bf16(wide[d]);
        /* f32 keeps what was widened, but for the bits of a NaN */
        memcpy(y + d * f->elem, f->dtype == TL_F32 ? (void *)&wide[d] : (void *)&h,
               (size_t)f->elem);
    }
    if (f->has_scales)
        ref_store_scaled(f->dtype, wide, dim, y, scale);
    free(wide);
}

/* Whether a format has nothing for a value of a source. */
static inline bool ref_is_lost(const struct ref_format *f, tl_dtype from, float x)
{
    if (isnan(x))
        return true;
    if (from == f->dtype || f->dtype == TL_F32)
        return false;
    if (f->has_scales)
        return isinf(x);
    return isfinite(x) && isinf(f->dtype == TL_F16 ? ref_f16_value(ref_f16(x))
                                                   : ref_bf16_value(ref_bf16(x)));
}

/* Element d of a stored row as f32. */
static inline float ref_value(const struct ref_format *f, const void *y, float scale, int64_t d)
{
    const unsigned char *code = (const unsigned char *)y + d;
    if (!f->has_scales)
        return ref_source(f->dtype, y, d);
    const float value = f->dtype == TL_I8 ? (float)(int8_t)*code : ref_e4m3_value(*code);
    return (float)((double)scale * (double)value);
}

/* ---- rows to store ---- */

enum { REF_ROW_KINDS = 12 };

/* A row of f32, one of the kinds there are. */
static inline void ref_row(int kind, uint64_t *seed, float *x, int64_t dim)
{
    const float size = kind == 1   ? 0
                       : kind == 2 ? 0x1p-101f  /* below what eight bits scale */
                       : kind == 3 ? 3e38f
                       : kind == 4 ? 0x1p-130f  /* subnormal */
                       : kind == 5 ? 1e5f       /* f16 overflows */
                       : kind == 6 ? 0x1p-99f
                                   : 4;
    for (int64_t d = 0; d < dim; d++)
        x[d] = rng_unit(seed) * size;
    float *at = &x[rng_below(seed, dim)];
    switch (kind) {
    case 1: *at = -0.0f; break;
    case 3: *at = float_of(0x7F7F8000 + (uint32_t)rng_below(seed, 3) - 1); break;
    case 5: *at = float_of(0x477FF000 + (uint32_t)rng_below(seed, 3) - 1); break;
    case 7: *at = float_of(0x7FC00001 + (uint32_t)rng_below(seed, 99)); break;
    case 8: *at = -INFINITY; break;
    case 9: *at = 0x1p-100f; break;
    case 10:
        for (int64_t d = 0; d < dim; d++) /* ties of int8 and of e4m3, for the largest is 127 */
            x[d] = (float)(rng_below(seed, 255) - 127) * 0.5f;
        *at = 127;
        break;
    case 11: *at = float_of(0x7F800001 + (uint32_t)rng_below(seed, 99)); break; /* signalling */
    default: break;
    }
}

/* The same as elements of a source dtype: rounded, but that NaN keeps bits of its own. */
static inline void ref_source_row(tl_dtype dtype, int kind, uint64_t *seed, void *x, int64_t dim)
{
    float *wide = malloc((size_t)dim * sizeof *wide);
    ref_row(kind, seed, wide, dim);
    for (int64_t d = 0; d < dim; d++) {
        const uint16_t nan = (uint16_t)(rng_next(seed) >> 50 | (dtype == TL_F16 ? 0x7E00 : 0x7FC0)),
                       h = isnan(wide[d]) ? nan
                           : dtype == TL_F16 ? ref_f16(wide[d])
                                             : ref_bf16(wide[d]);
        if (dtype == TL_F32)
            memcpy((char *)x + d * 4, &wide[d], 4);
        else
            memcpy((char *)x + d * 2, &h, 2);
    }
    free(wide);
}

#endif
