/* SPDX-License-Identifier: MIT */
/* vec_neon.h: the sixteen lanes as four NEON registers (AArch64, whose baseline has fused
 * multiply-add and f16 conversion). */
#ifndef TL_VEC_NEON_H
#define TL_VEC_NEON_H

#include <arm_neon.h>
#include <math.h>

#define V16_ROWS 4
#define V16_KEYS(rows) 4
#define V16_COLS(rows) ((rows) <= 2 ? 8 : 4)
#define V16_PREFETCHES 2
#define QUARTERS for (int i = 0; i < 4; i++)

typedef struct {
    float32x4_t q[4];
} v16;

V16_INLINE float f32_fma(float a, float b, float c)
{
    return __builtin_fmaf(a, b, c);
}

V16_INLINE v16 v16_set1(float x)
{
    const float32x4_t y = vdupq_n_f32(x);
    return (v16){{y, y, y, y}};
}

V16_INLINE v16 v16_zero(void)
{
    return v16_set1(0);
}

V16_INLINE v16 v16_load(const float *p)
{
    return (v16){{vld1q_f32(p), vld1q_f32(p + 4), vld1q_f32(p + 8), vld1q_f32(p + 12)}};
}

V16_INLINE v16 v16_load_n(const float *p, int64_t n)
{
    float lanes[16] = {0};
    memcpy(lanes, p, (size_t)n * sizeof *p);
    return v16_load(lanes);
}

V16_INLINE void v16_store(float *p, v16 x)
{
    QUARTERS vst1q_f32(p + 4 * i, x.q[i]);
}

V16_INLINE void v16_store_n(float *p, v16 x, int64_t n)
{
    float lanes[16];
    v16_store(lanes, x);
    memcpy(p, lanes, (size_t)n * sizeof *p);
}

V16_INLINE v16 v16_load_f16(const uint16_t *p)
{
    v16 y;
    QUARTERS y.q[i] = vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p + 4 * i)));
    return y;
}

V16_INLINE v16 v16_load_f16_n(const uint16_t *p, int64_t n)
{
    uint16_t lanes[16] = {0};
    memcpy(lanes, p, (size_t)n * sizeof *p);
    return v16_load_f16(lanes);
}

V16_INLINE float32x4_t widen_bf16(const uint16_t *p)
{
    return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16));
}

V16_INLINE v16 v16_load_bf16(const uint16_t *p)
{
    v16 y;
    QUARTERS y.q[i] = widen_bf16(p + 4 * i);
    return y;
}

V16_INLINE v16 v16_load_bf16_n(const uint16_t *p, int64_t n)
{
    uint16_t lanes[16] = {0};
    memcpy(lanes, p, (size_t)n * sizeof *p);
    return v16_load_bf16(lanes);
}

V16_INLINE float32x4_t widen_i8(int16x4_t x)
{
    return vcvtq_f32_s32(vmovl_s16(x));
}

V16_INLINE v16 v16_load_i8(const int8_t *p)
{
    v16 y;
    for (int i = 0; i < 2; i++) {
        const int16x8_t x = vmovl_s8(vld1_s8(p + 8 * i));
        y.q[2 * i] = widen_i8(vget_low_s16(x));
        y.q[2 * i + 1] = widen_i8(vget_high_s16(x));
    }
    return y;
}

V16_INLINE v16 v16_load_i8_n(const int8_t *p, int64_t n)
{
    int8_t lanes[16] = {0};
    memcpy(lanes, p, (size_t)n);
    return v16_load_i8(lanes);
}

/* Codes of e4m3, sign extended, in the places of f16's fields: the sign comes into bit 15, and into
 * bit 14, where it does not belong. NaN is not yet one of f16. */
V16_INLINE uint16x8_t e4m3_fields(int16x8_t code)
{
    return vandq_u16(vreinterpretq_u16_s16(vshlq_n_s16(code, 7)), vdupq_n_u16(0xBFFF));
}

V16_INLINE uint16x8_t e4m3_halves(int16x8_t code)
{
    const uint16x8_t h = e4m3_fields(code);
    const uint16x8_t nan = vceqq_u16(vaddq_u16(h, h), vdupq_n_u16(0x7F00));
    return vorrq_u16(h, vandq_u16(nan, vdupq_n_u16(0x7E00)));
}

V16_INLINE void v16_e4m3_to_f16(const uint8_t *p, uint16_t *h)
{
    for (int i = 0; i < 2; i++)
        vst1q_u16(h + 8 * i, e4m3_halves(vmovl_s8(vld1_s8((const int8_t *)p + 8 * i))));
}

typedef uint8x16_t codes_top;

V16_INLINE bool codes_have_nan(codes_top top)
{
    return vmaxvq_u8(top) == 0x7F;
}

V16_INLINE void line_to_f16(const uint8_t *p, uint16_t *h, codes_top *top)
{
    for (int i = 0; i < 64; i += 16)
        *top = vmaxq_u8(*top, vandq_u8(vld1q_u8(p + i), vdupq_n_u8(0x7F)));
    for (int i = 0; i < 64; i += 8)
        vst1q_u16(h + i, e4m3_fields(vmovl_s8(vld1_s8((const int8_t *)p + i))));
}

V16_INLINE v16 v16_load_e4m3(const uint8_t *p)
{
    uint16_t half[16];
    v16_e4m3_to_f16(p, half);
    return v16_load_f16(half);
}

V16_INLINE v16 v16_load_e4m3_n(const uint8_t *p, int64_t n)
{
    uint8_t lanes[16] = {0};
    memcpy(lanes, p, (size_t)n);
    return v16_load_e4m3(lanes);
}

V16_INLINE void v16_store_f16(uint16_t *p, v16 x)
{
    QUARTERS
    {
        const uint16x4_t h = vreinterpret_u16_f16(vcvt_f16_f32(x.q[i]));
        /* the instruction keeps payloads; here there is one NaN */
        const uint16x4_t number = vmovn_u32(vceqq_f32(x.q[i], x.q[i]));
        vst1_u16(p + 4 * i, vbsl_u16(number, h, vdup_n_u16(0x7E00)));
    }
}

V16_INLINE void v16_store_f16_n(uint16_t *p, v16 x, int64_t n)
{
    uint16_t lanes[16];
    v16_store_f16(lanes, x);
    memcpy(p, lanes, (size_t)n * sizeof *p);
}

V16_INLINE v16 v16_add(v16 a, v16 b)
{
    QUARTERS a.q[i] = vaddq_f32(a.q[i], b.q[i]);
    return a;
}

V16_INLINE v16 v16_sub(v16 a, v16 b)
{
    QUARTERS a.q[i] = vsubq_f32(a.q[i], b.q[i]);
    return a;
}

V16_INLINE v16 v16_mul(v16 a, v16 b)
{
    QUARTERS a.q[i] = vmulq_f32(a.q[i], b.q[i]);
    return a;
}

V16_INLINE v16 v16_div(v16 a, v16 b)
{
    QUARTERS a.q[i] = vdivq_f32(a.q[i], b.q[i]);
    return a;
}

V16_INLINE v16 v16_with_sign(v16 x, v16 sign)
{
    QUARTERS x.q[i] = vbslq_f32(vdupq_n_u32(0x80000000u), sign.q[i], x.q[i]);
    return x;
}

V16_INLINE v16 v16_fma(v16 a, v16 b, v16 c)
{
    QUARTERS c.q[i] = vfmaq_f32(c.q[i], a.q[i], b.q[i]);
    return c;
}

/* The numbers of the lanes of quarter i. */
V16_INLINE int32x4_t lane_numbers(int i)
{
    static const int32_t first[4] = {0, 1, 2, 3};
    return vaddq_s32(vld1q_s32(first), vdupq_n_s32(4 * i));
}

V16_INLINE v16 v16_fma_n(v16 a, v16 b, v16 c, int64_t n)
{
    const v16 all = v16_fma(a, b, c);
    QUARTERS c.q[i] =
        vbslq_f32(vcltq_s32(lane_numbers(i), vdupq_n_s32((int32_t)n)), all.q[i], c.q[i]);
    return c;
}

V16_INLINE v16 v16_max(v16 x, v16 y) /* not vmaxq, which keeps NaN */
{
    QUARTERS x.q[i] = vbslq_f32(vcgtq_f32(x.q[i], y.q[i]), x.q[i], y.q[i]);
    return x;
}

V16_INLINE v16 v16_where_gt(v16 x, v16 y, v16 a, v16 b)
{
    QUARTERS b.q[i] = vbslq_f32(vcgtq_f32(x.q[i], y.q[i]), a.q[i], b.q[i]);
    return b;
}

V16_INLINE v16 v16_where_nan(v16 x, v16 a, v16 b)
{
    QUARTERS b.q[i] = vbslq_f32(vceqq_f32(x.q[i], x.q[i]), b.q[i], a.q[i]);
    return b;
}

V16_INLINE v16 v16_only(v16 x, uint16_t mask)
{
    static const uint32_t bits[4] = {1, 2, 4, 8};
    const uint32x4_t bit = vld1q_u32(bits);
    QUARTERS x.q[i] = vbslq_f32(vtstq_u32(vdupq_n_u32((uint32_t)mask >> 4 * i), bit), x.q[i],
                                vdupq_n_f32(-INFINITY));
    return x;
}

V16_INLINE int v16_all_le(v16 x, v16 y)
{
    uint32x4_t all = vcleq_f32(x.q[0], y.q[0]);
    for (int i = 1; i < 4; i++)
        all = vandq_u32(all, vcleq_f32(x.q[i], y.q[i]));
    return vminvq_u32(all) != 0;
}

V16_INLINE v16 v16_pow2(v16 p, v16 t)
{
    QUARTERS
    {
        const int32x4_t bits = vaddq_s32(vreinterpretq_s32_f32(p.q[i]),
                                         vshlq_n_s32(vreinterpretq_s32_f32(t.q[i]), 23));
        const uint32x4_t normal = vcgtq_s32(bits, vdupq_n_s32(0x007FFFFF));
        p.q[i] = vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_s32(bits), normal));
    }
    return p;
}

V16_INLINE float v16_first(v16 x)
{
    return vgetq_lane_f32(x.q[0], 0);
}

V16_INLINE float32x4_t quad_of(v16 x)
{
    return vaddq_f32(vaddq_f32(x.q[0], x.q[2]), vaddq_f32(x.q[1], x.q[3]));
}

V16_INLINE float v16_fold_max(v16 x)
{
    const v16 y = v16_max((v16){{x.q[0], x.q[1]}}, (v16){{x.q[2], x.q[3]}});
    const float32x4_t four = vbslq_f32(vcgtq_f32(y.q[0], y.q[1]), y.q[0], y.q[1]);
    const float a = vgetq_lane_f32(four, 0), b = vgetq_lane_f32(four, 1),
                c = vgetq_lane_f32(four, 2), d = vgetq_lane_f32(four, 3);
    const float ac = a > c ? a : c, bd = b > d ? b : d;
    return ac > bd ? ac : bd;
}

V16_INLINE float v16_fold(v16 x)
{
    const float32x4_t four = quad_of(x);
    const float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

#define V16_REGS 4
#define V16_REG_LANES 4

typedef float32x4_t vreg;

V16_INLINE vreg vreg_zero(void)
{
    return vdupq_n_f32(0);
}

V16_INLINE vreg vreg_set1(float x)
{
    return vdupq_n_f32(x);
}

V16_INLINE vreg vreg_load(const float *p)
{
    return vld1q_f32(p);
}

V16_INLINE void vreg_store(float *p, vreg x)
{
    vst1q_f32(p, x);
}

V16_INLINE vreg vreg_mul(vreg a, vreg b)
{
    return vmulq_f32(a, b);
}

V16_INLINE vreg vreg_load_f16(const uint16_t *p)
{
    return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
}

V16_INLINE vreg vreg_load_bf16(const uint16_t *p)
{
    return widen_bf16(p);
}

/* Four codes, sign extended. */
V16_INLINE int16x4_t load_4_codes(const void *p)
{
    uint32_t codes;
    memcpy(&codes, p, sizeof codes);
    return vget_low_s16(vmovl_s8(vcreate_s8(codes)));
}

V16_INLINE vreg vreg_load_i8(const int8_t *p)
{
    return widen_i8(load_4_codes(p));
}

V16_INLINE vreg vreg_load_e4m3(const uint8_t *p)
{
    const int16x4_t code = load_4_codes(p);
    const uint16x8_t half = e4m3_halves(vcombine_s16(code, code));
    return vcvt_f32_f16(vreinterpret_f16_u16(vget_low_u16(half)));
}

V16_INLINE vreg vreg_fma(vreg a, vreg b, vreg c)
{
    return vfmaq_f32(c, a, b);
}

V16_INLINE vreg vreg_keep(vreg x)
{
    __asm__("" : "+w"(x));
    return x;
}

V16_INLINE v16 v16_of(const vreg *r)
{
    return (v16){{r[0], r[1], r[2], r[3]}};
}

V16_INLINE v16 v16_quads(v16 a, v16 b, v16 c, v16 d)
{
    return (v16){{quad_of(a), quad_of(b), quad_of(c), quad_of(d)}};
}

V16_INLINE float32x4_t halve_two(float32x4_t a, float32x4_t b)
{
    return vaddq_f32(vcombine_f32(vget_low_f32(a), vget_low_f32(b)),
                     vcombine_f32(vget_high_f32(a), vget_high_f32(b)));
}

V16_INLINE v16 v16_fold_quads(v16 p0, v16 p1, v16 p2, v16 p3)
{
    QUARTERS
    {
        const float32x4_t x = halve_two(p0.q[i], p1.q[i]), y = halve_two(p2.q[i], p3.q[i]);
        p0.q[i] = vaddq_f32(vuzp1q_f32(x, y), vuzp2q_f32(x, y));
    }
    return p0;
}

#undef QUARTERS
#endif
