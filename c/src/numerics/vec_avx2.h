/* SPDX-License-Identifier: MIT */
/* vec_avx2.h: the sixteen lanes as two AVX2 registers, with FMA and F16C. */
#ifndef TL_VEC_AVX2_H
#define TL_VEC_AVX2_H

#include <immintrin.h>
#include <math.h>

#define V16_ROWS 4
#define V16_KEYS(rows) ((rows) <= 3 ? 4 : 2)
#define V16_COLS(rows) ((rows) == 1 ? 8 : (rows) <= 3 ? 4 : 3)
#define V16_PREFETCHES 2

typedef struct {
    __m256 lo, hi;
} v16;

V16_INLINE float f32_fma(float a, float b, float c)
{
    return __builtin_fmaf(a, b, c);
}

V16_INLINE v16 v16_set1(float x)
{
    const __m256 y = _mm256_set1_ps(x);
    return (v16){y, y};
}

V16_INLINE v16 v16_zero(void)
{
    return v16_set1(0);
}

/* All ones in lanes [0, n), zeros above: a window on this array. */
static const int32_t v16_mask_window[32] = {-1, -1, -1, -1, -1, -1, -1, -1,
                                            -1, -1, -1, -1, -1, -1, -1, -1};

typedef struct {
    __m256i lo, hi;
} v16_mask;

V16_INLINE v16_mask v16_below(int64_t n)
{
    const int32_t *w = v16_mask_window + 16 - n;
    return (v16_mask){_mm256_loadu_si256((const __m256i *)w),
                      _mm256_loadu_si256((const __m256i *)(w + 8))};
}

/* mask ? a : b */
V16_INLINE v16 v16_blend(v16_mask m, v16 a, v16 b)
{
    return (v16){_mm256_blendv_ps(b.lo, a.lo, _mm256_castsi256_ps(m.lo)),
                 _mm256_blendv_ps(b.hi, a.hi, _mm256_castsi256_ps(m.hi))};
}

V16_INLINE v16 v16_load(const float *p)
{
    return (v16){_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
}

V16_INLINE v16 v16_load_n(const float *p, int64_t n)
{
    const v16_mask m = v16_below(n);
    return (v16){_mm256_maskload_ps(p, m.lo),
                 n > 8 ? _mm256_maskload_ps(p + 8, m.hi) : _mm256_setzero_ps()};
}

V16_INLINE void v16_store(float *p, v16 x)
{
    _mm256_storeu_ps(p, x.lo);
    _mm256_storeu_ps(p + 8, x.hi);
}

V16_INLINE void v16_store_n(float *p, v16 x, int64_t n)
{
    const v16_mask m = v16_below(n);
    _mm256_maskstore_ps(p, m.lo, x.lo);
    if (n > 8)
        _mm256_maskstore_ps(p + 8, m.hi, x.hi);
}

V16_INLINE v16 v16_load_f16(const uint16_t *p)
{
    return (v16){_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)),
                 _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p + 8)))};
}

V16_INLINE v16 v16_load_f16_n(const uint16_t *p, int64_t n)
{
    uint16_t lanes[16] = {0};
    memcpy(lanes, p, (size_t)n * sizeof *p);
    return v16_load_f16(lanes);
}

V16_INLINE __m256 widen_bf16(const uint16_t *p)
{
    return _mm256_castsi256_ps(
        _mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}

V16_INLINE v16 v16_load_bf16(const uint16_t *p)
{
    return (v16){widen_bf16(p), widen_bf16(p + 8)};
}

V16_INLINE v16 v16_load_bf16_n(const uint16_t *p, int64_t n)
{
    uint16_t lanes[16] = {0};
    memcpy(lanes, p, (size_t)n * sizeof *p);
    return v16_load_bf16(lanes);
}

V16_INLINE __m256 widen_i8(const int8_t *p)
{
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}

V16_INLINE v16 v16_load_i8(const int8_t *p)
{
    return (v16){widen_i8(p), widen_i8(p + 8)};
}

V16_INLINE v16 v16_load_i8_n(const int8_t *p, int64_t n)
{
    int8_t lanes[16] = {0};
    memcpy(lanes, p, (size_t)n);
    return v16_load_i8(lanes);
}

/* Sixteen codes of e4m3, sign extended, in the places of f16's fields: the sign comes into bit 15,
 * and into bit 14, where it does not belong. NaN is not yet one of f16. */
V16_INLINE __m256i e4m3_fields(__m256i code)
{
    return _mm256_and_si256(_mm256_slli_epi16(code, 7), _mm256_set1_epi16(-0x4001));
}

V16_INLINE __m256i e4m3_halves(__m256i code)
{
    const __m256i h = e4m3_fields(code);
    const __m256i nan =
        _mm256_cmpeq_epi16(_mm256_add_epi16(h, h), _mm256_set1_epi16(0x7F00));
    return _mm256_or_si256(h, _mm256_and_si256(nan, _mm256_set1_epi16(0x7E00)));
}

V16_INLINE void v16_e4m3_to_f16(const uint8_t *p, uint16_t *h)
{
    _mm256_storeu_si256((__m256i *)h, e4m3_halves(_mm256_cvtepi8_epi16(
                                          _mm_loadu_si128((const __m128i *)p))));
}

typedef __m256i codes_top;

V16_INLINE bool codes_have_nan(codes_top top)
{
    return _mm256_movemask_epi8(_mm256_cmpeq_epi8(top, _mm256_set1_epi8(0x7F))) != 0;
}

V16_INLINE void line_to_f16(const uint8_t *p, uint16_t *h, codes_top *top)
{
    for (int i = 0; i < 64; i += 32)
        *top = _mm256_max_epu8(*top, _mm256_and_si256(_mm256_loadu_si256((const __m256i *)(p + i)),
                                                      _mm256_set1_epi8(0x7F)));
    for (int i = 0; i < 64; i += 16) {
        const __m256i code = _mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)(p + i)));
        _mm256_storeu_si256((__m256i *)(h + i), e4m3_fields(code));
    }
}

V16_INLINE v16 v16_load_e4m3(const uint8_t *p)
{
    const __m256i h = e4m3_halves(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)p)));
    return (v16){_mm256_cvtph_ps(_mm256_castsi256_si128(h)),
                 _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1))};
}

V16_INLINE v16 v16_load_e4m3_n(const uint8_t *p, int64_t n)
{
    uint8_t lanes[16] = {0};
    memcpy(lanes, p, (size_t)n);
    return v16_load_e4m3(lanes);
}

V16_INLINE void v16_store_f16(uint16_t *p, v16 x)
{
    _mm_storeu_si128((__m128i *)p,
                     _mm256_cvtps_ph(x.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    _mm_storeu_si128((__m128i *)(p + 8),
                     _mm256_cvtps_ph(x.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
    const int nan_lo = _mm256_movemask_ps(_mm256_cmp_ps(x.lo, x.lo, _CMP_UNORD_Q));
    const int nan_hi = _mm256_movemask_ps(_mm256_cmp_ps(x.hi, x.hi, _CMP_UNORD_Q));
    /* the instruction keeps payloads; here there is one NaN */
    for (int nan = nan_lo | nan_hi << 8; nan; nan &= nan - 1)
        p[__builtin_ctz((unsigned)nan)] = 0x7E00;
}

V16_INLINE void v16_store_f16_n(uint16_t *p, v16 x, int64_t n)
{
    uint16_t lanes[16];
    v16_store_f16(lanes, x);
    memcpy(p, lanes, (size_t)n * sizeof *p);
}

V16_INLINE v16 v16_add(v16 a, v16 b)
{
    return (v16){_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)};
}

V16_INLINE v16 v16_sub(v16 a, v16 b)
{
    return (v16){_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)};
}

V16_INLINE v16 v16_mul(v16 a, v16 b)
{
    return (v16){_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)};
}

V16_INLINE v16 v16_div(v16 a, v16 b)
{
    return (v16){_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)};
}

V16_INLINE v16 v16_with_sign(v16 x, v16 sign)
{
    const __m256 top = _mm256_set1_ps(-0.0f);
    return (v16){_mm256_or_ps(_mm256_and_ps(top, sign.lo), _mm256_andnot_ps(top, x.lo)),
                 _mm256_or_ps(_mm256_and_ps(top, sign.hi), _mm256_andnot_ps(top, x.hi))};
}

V16_INLINE v16 v16_fma(v16 a, v16 b, v16 c)
{
    return (v16){_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}

V16_INLINE v16 v16_fma_n(v16 a, v16 b, v16 c, int64_t n)
{
    return v16_blend(v16_below(n), v16_fma(a, b, c), c);
}

V16_INLINE v16 v16_max(v16 x, v16 y)
{
    return (v16){_mm256_max_ps(x.lo, y.lo), _mm256_max_ps(x.hi, y.hi)};
}

V16_INLINE v16 v16_where_gt(v16 x, v16 y, v16 a, v16 b)
{
    return (v16){_mm256_blendv_ps(b.lo, a.lo, _mm256_cmp_ps(x.lo, y.lo, _CMP_GT_OQ)),
                 _mm256_blendv_ps(b.hi, a.hi, _mm256_cmp_ps(x.hi, y.hi, _CMP_GT_OQ))};
}

V16_INLINE v16 v16_where_nan(v16 x, v16 a, v16 b)
{
    return (v16){_mm256_blendv_ps(b.lo, a.lo, _mm256_cmp_ps(x.lo, x.lo, _CMP_UNORD_Q)),
                 _mm256_blendv_ps(b.hi, a.hi, _mm256_cmp_ps(x.hi, x.hi, _CMP_UNORD_Q))};
}

V16_INLINE v16 v16_only(v16 x, uint16_t mask)
{
    const __m256i bits = _mm256_set1_epi32(mask);
    const __m256i lo = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i hi = _mm256_slli_epi32(lo, 8);
    const v16_mask in = {_mm256_cmpeq_epi32(_mm256_and_si256(bits, lo), lo),
                         _mm256_cmpeq_epi32(_mm256_and_si256(bits, hi), hi)};
    return v16_blend(in, x, v16_set1(-INFINITY));
}

V16_INLINE int v16_all_le(v16 x, v16 y)
{
    return _mm256_movemask_ps(_mm256_and_ps(_mm256_cmp_ps(x.lo, y.lo, _CMP_LE_OQ),
                                            _mm256_cmp_ps(x.hi, y.hi, _CMP_LE_OQ))) == 0xFF;
}

V16_INLINE __m256 pow2_half(__m256 p, __m256 t)
{
    const __m256i bits =
        _mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(_mm256_castps_si256(t), 23));
    return _mm256_castsi256_ps(
        _mm256_and_si256(bits, _mm256_cmpgt_epi32(bits, _mm256_set1_epi32(0x007FFFFF))));
}

V16_INLINE v16 v16_pow2(v16 p, v16 t)
{
    return (v16){pow2_half(p.lo, t.lo), pow2_half(p.hi, t.hi)};
}

V16_INLINE float v16_first(v16 x)
{
    return _mm256_cvtss_f32(x.lo);
}

V16_INLINE float v16_fold_max(v16 x)
{
    const __m256 eight = _mm256_max_ps(x.lo, x.hi);
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

V16_INLINE float v16_fold(v16 x)
{
    const __m256 eight = _mm256_add_ps(x.lo, x.hi);
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

#define V16_REGS 2
#define V16_REG_LANES 8

typedef __m256 vreg;

V16_INLINE vreg vreg_zero(void)
{
    return _mm256_setzero_ps();
}

V16_INLINE vreg vreg_set1(float x)
{
    return _mm256_set1_ps(x);
}

V16_INLINE vreg vreg_load(const float *p)
{
    return _mm256_loadu_ps(p);
}

V16_INLINE void vreg_store(float *p, vreg x)
{
    _mm256_storeu_ps(p, x);
}

V16_INLINE vreg vreg_mul(vreg a, vreg b)
{
    return _mm256_mul_ps(a, b);
}

V16_INLINE vreg vreg_load_f16(const uint16_t *p)
{
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
}

V16_INLINE vreg vreg_load_bf16(const uint16_t *p)
{
    return widen_bf16(p);
}

V16_INLINE vreg vreg_load_i8(const int8_t *p)
{
    return widen_i8(p);
}

V16_INLINE vreg vreg_load_e4m3(const uint8_t *p)
{
    const __m256i code = _mm256_castsi128_si256(
        _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i *)p)));
    return _mm256_cvtph_ps(_mm256_castsi256_si128(e4m3_halves(code)));
}

V16_INLINE vreg vreg_fma(vreg a, vreg b, vreg c)
{
    return _mm256_fmadd_ps(a, b, c);
}

V16_INLINE vreg vreg_keep(vreg x)
{
    __asm__("" : "+x"(x));
    return x;
}

V16_INLINE v16 v16_of(const vreg *r)
{
    return (v16){r[0], r[1]};
}

V16_INLINE __m256 quad_pair(v16 a, v16 b)
{
    const __m256 x = _mm256_add_ps(a.lo, a.hi), y = _mm256_add_ps(b.lo, b.hi);
    return _mm256_add_ps(_mm256_permute2f128_ps(x, y, 0x20), _mm256_permute2f128_ps(x, y, 0x31));
}

V16_INLINE v16 v16_quads(v16 a, v16 b, v16 c, v16 d)
{
    return (v16){quad_pair(a, b), quad_pair(c, d)};
}

V16_INLINE __m256 fold_quads_half(__m256 p0, __m256 p1, __m256 p2, __m256 p3)
{
    const __m256 x =
        _mm256_add_ps(_mm256_shuffle_ps(p0, p1, 0x44), _mm256_shuffle_ps(p0, p1, 0xEE));
    const __m256 y =
        _mm256_add_ps(_mm256_shuffle_ps(p2, p3, 0x44), _mm256_shuffle_ps(p2, p3, 0xEE));
    return _mm256_add_ps(_mm256_shuffle_ps(x, y, 0x88), _mm256_shuffle_ps(x, y, 0xDD));
}

V16_INLINE v16 v16_fold_quads(v16 p0, v16 p1, v16 p2, v16 p3)
{
    return (v16){fold_quads_half(p0.lo, p1.lo, p2.lo, p3.lo),
                 fold_quads_half(p0.hi, p1.hi, p2.hi, p3.hi)};
}

#endif
