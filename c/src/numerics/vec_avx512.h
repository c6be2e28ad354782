/* SPDX-License-Identifier: MIT */
/* vec_avx512.h: the sixteen lanes as one AVX-512 register. */
#ifndef TL_VEC_AVX512_H
#define TL_VEC_AVX512_H

#include <immintrin.h>
#include <math.h>

#define V16_REGS 1
#define V16_ROWS 4
#define V16_KEYS(rows) 4
#define V16_COLS(rows) ((rows) <= 2 ? 8 : 4)
#define V16_PREFETCHES 3

typedef __m512 v16;

V16_INLINE float f32_fma(float a, float b, float c)
{
    return __builtin_fmaf(a, b, c);
}

V16_INLINE v16 v16_set1(float x)
{
    return _mm512_set1_ps(x);
}

V16_INLINE v16 v16_zero(void)
{
    return _mm512_setzero_ps();
}

/* Lanes [0, n). */
V16_INLINE __mmask16 v16_below(int64_t n)
{
    return (__mmask16)((1u << n) - 1);
}

V16_INLINE v16 v16_load(const float *p)
{
    return _mm512_loadu_ps(p);
}

V16_INLINE v16 v16_load_n(const float *p, int64_t n)
{
    return _mm512_maskz_loadu_ps(v16_below(n), p);
}

V16_INLINE void v16_store(float *p, v16 x)
{
    _mm512_storeu_ps(p, x);
}

V16_INLINE void v16_store_n(float *p, v16 x, int64_t n)
{
    _mm512_mask_storeu_ps(p, v16_below(n), x);
}

V16_INLINE v16 v16_load_f16(const uint16_t *p)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
}

V16_INLINE v16 v16_load_f16_n(const uint16_t *p, int64_t n)
{
    return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(v16_below(n), p));
}

V16_INLINE __m512 widen_bf16(__m256i h)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
}

V16_INLINE v16 v16_load_bf16(const uint16_t *p)
{
    return widen_bf16(_mm256_loadu_si256((const __m256i *)p));
}

V16_INLINE v16 v16_load_bf16_n(const uint16_t *p, int64_t n)
{
    return widen_bf16(_mm256_maskz_loadu_epi16(v16_below(n), p));
}

V16_INLINE v16 v16_load_i8(const int8_t *p)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}

V16_INLINE v16 v16_load_i8_n(const int8_t *p, int64_t n)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(v16_below(n), p)));
}

/* Sign extension brings the sign into bit 15, and into bit 14, where it does not belong. */
V16_INLINE __m256i e4m3_halves(__m128i code)
{
    const __m256i h = _mm256_and_si256(_mm256_slli_epi16(_mm256_cvtepi8_epi16(code), 7),
                                       _mm256_set1_epi16(-0x4001));
    const __mmask16 nan =
        _mm256_cmpeq_epi16_mask(_mm256_add_epi16(h, h), _mm256_set1_epi16(0x7F00));
    return _mm256_or_si256(h, _mm256_maskz_set1_epi16(nan, 0x7E00));
}

V16_INLINE void v16_e4m3_to_f16(const uint8_t *p, uint16_t *h)
{
    _mm256_storeu_si256((__m256i *)h, e4m3_halves(_mm_loadu_si128((const __m128i *)p)));
}

typedef __m512i codes_top;

V16_INLINE bool codes_have_nan(codes_top top)
{
    return _mm512_cmpeq_epi8_mask(top, _mm512_set1_epi8(0x7F)) != 0;
}

V16_INLINE void line_to_f16(const uint8_t *p, uint16_t *h, codes_top *top)
{
    *top = _mm512_max_epu8(*top, _mm512_and_si512(_mm512_loadu_si512(p), _mm512_set1_epi8(0x7F)));
    for (int i = 0; i < 64; i += 32) {
        const __m512i code = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)(p + i)));
        _mm512_storeu_si512(h + i, _mm512_and_si512(_mm512_slli_epi16(code, 7),
                                                    _mm512_set1_epi16(-0x4001)));
    }
}

V16_INLINE v16 v16_load_e4m3(const uint8_t *p)
{
    return _mm512_cvtph_ps(e4m3_halves(_mm_loadu_si128((const __m128i *)p)));
}

V16_INLINE v16 v16_load_e4m3_n(const uint8_t *p, int64_t n)
{
    return _mm512_cvtph_ps(e4m3_halves(_mm_maskz_loadu_epi8(v16_below(n), p)));
}

V16_INLINE __m256i v16_to_f16(v16 x)
{
    const __m256i h = _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    /* the instruction keeps payloads; here there is one NaN */
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm256_mask_mov_epi16(h, nan, _mm256_set1_epi16(0x7E00));
}

V16_INLINE void v16_store_f16(uint16_t *p, v16 x)
{
    _mm256_storeu_si256((__m256i *)p, v16_to_f16(x));
}

V16_INLINE void v16_store_f16_n(uint16_t *p, v16 x, int64_t n)
{
    _mm256_mask_storeu_epi16(p, v16_below(n), v16_to_f16(x));
}

V16_INLINE v16 v16_add(v16 a, v16 b)
{
    return _mm512_add_ps(a, b);
}

V16_INLINE v16 v16_sub(v16 a, v16 b)
{
    return _mm512_sub_ps(a, b);
}

V16_INLINE v16 v16_mul(v16 a, v16 b)
{
    return _mm512_mul_ps(a, b);
}

V16_INLINE v16 v16_div(v16 a, v16 b)
{
    return _mm512_div_ps(a, b);
}

V16_INLINE v16 v16_with_sign(v16 x, v16 sign)
{
    return _mm512_castsi512_ps(_mm512_ternarylogic_epi32(
        _mm512_set1_epi32(INT32_MIN), _mm512_castps_si512(sign), _mm512_castps_si512(x), 0xCA));
}

V16_INLINE v16 v16_fma(v16 a, v16 b, v16 c)
{
    return _mm512_fmadd_ps(a, b, c);
}

V16_INLINE v16 v16_fma_n(v16 a, v16 b, v16 c, int64_t n)
{
    return _mm512_mask3_fmadd_ps(a, b, c, v16_below(n));
}

V16_INLINE v16 v16_max(v16 x, v16 y)
{
    return _mm512_max_ps(x, y);
}

V16_INLINE v16 v16_where_gt(v16 x, v16 y, v16 a, v16 b)
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, y, _CMP_GT_OQ), b, a);
}

V16_INLINE v16 v16_where_nan(v16 x, v16 a, v16 b)
{
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), b, a);
}

V16_INLINE v16 v16_only(v16 x, uint16_t mask)
{
    return _mm512_mask_blend_ps(mask, _mm512_set1_ps(-INFINITY), x);
}

V16_INLINE int v16_all_le(v16 x, v16 y)
{
    return _mm512_cmp_ps_mask(x, y, _CMP_LE_OQ) == 0xFFFF;
}

V16_INLINE v16 v16_pow2(v16 p, v16 t)
{
    const __m512i bits =
        _mm512_add_epi32(_mm512_castps_si512(p), _mm512_slli_epi32(_mm512_castps_si512(t), 23));
    return _mm512_castsi512_ps(
        _mm512_maskz_mov_epi32(_mm512_cmpgt_epi32_mask(bits, _mm512_set1_epi32(0x007FFFFF)), bits));
}

V16_INLINE float v16_first(v16 x)
{
    return _mm512_cvtss_f32(x);
}

V16_INLINE float v16_fold_max(v16 x)
{
    const __m256 eight = _mm256_max_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    const __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)));
}

V16_INLINE float v16_fold(v16 x)
{
    const __m256 eight = _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1));
    const __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

/* Halvings of two vectors at once, one shuffle each: what stays where it is comes from a blend,
 * what it meets from across. */
V16_INLINE __m512 halve_eights(v16 a, v16 b)
{
    return _mm512_add_ps(_mm512_mask_blend_ps(0xFF00, a, b), _mm512_shuffle_f32x4(a, b, 0x4E));
}

V16_INLINE v16 v16_quads(v16 a, v16 b, v16 c, v16 d)
{
    const __m512 ac = halve_eights(a, c), bd = halve_eights(b, d);
    const __m512 away = _mm512_mask_blend_ps(0x0F0F, ac, bd),
                 here = _mm512_mask_blend_ps(0xF0F0, ac, bd);
    return _mm512_add_ps(here, _mm512_shuffle_f32x4(away, away, 0xB1));
}

V16_INLINE __m512 halve_quads(__m512 p, __m512 q)
{
    return _mm512_add_ps(_mm512_mask_blend_ps(0xCCCC, p, q), _mm512_shuffle_ps(p, q, 0x4E));
}

V16_INLINE v16 v16_fold_quads(v16 p0, v16 p1, v16 p2, v16 p3)
{
    const __m512 x = halve_quads(p0, p1), y = halve_quads(p2, p3);
    return _mm512_add_ps(_mm512_shuffle_ps(x, y, 0x88), _mm512_shuffle_ps(x, y, 0xDD));
}

#endif
