/* SPDX-License-Identifier: MIT */
/* numerics.h: small floating-point formats and exp, with fixed bits.
 *
 * To a small format: round to nearest, ties to even. From one: exact for every code. Conversions of
 * one value compute in integers only, so that the caller's float mode cannot reach them; arrays and
 * tl_expf set a float mode of their own and give the caller's back with its sticky flags.
 * Rows of eight-bit K and V have a scale each: see "storing". Everything here is reentrant. */
#ifndef TINYLLM_NUMERICS_H
#define TINYLLM_NUMERICS_H

#include "abi.h"

/* Bounds the tests read. */
#define TL_EXPF_MAX_ULP 1.5            /* |tl_expf(x) - e^x| where e^x is a normal float */
#define TL_EXPF_OVERFLOW 88.7228317f   /* 0x42B17217, the largest x with a finite result */
#define TL_E4M3_MAX 448.0f
#define TL_E5M2_MAX 57344.0f
#define TL_NAN_BITS 0x7FC00000u        /* the one NaN that kernels write */

TL_BEGIN_DECLS

/* f16 (IEEE binary16): subnormals kept, overflow (|x| >= 65520) to infinity, any NaN to 0x7E00.
 * Widening keeps every value; a NaN widens to a quiet NaN. */
TL_API uint16_t tl_f32_to_f16(float x);
TL_API float tl_f16_to_f32(uint16_t h);

/* bf16 (the upper half of an f32): overflow to infinity, any NaN to 0x7FC0. Widening appends 16
 * zero bits, NaN included. */
TL_API uint16_t tl_f32_to_bf16(float x);
TL_API float tl_bf16_to_f32(uint16_t h);

/* e4m3 (OCP E4M3FN: bias 7, no infinity, largest TL_E4M3_MAX): beyond it, and infinities, saturate
 * to 0x7E / 0xFE; any NaN to 0x7F; |x| <= 2^-10 to zero with the sign of x. */
TL_API uint8_t tl_f32_to_e4m3(float x);
TL_API float tl_e4m3_to_f32(uint8_t h);

/* e5m2 (OCP: bias 15, largest TL_E5M2_MAX): finite overflow saturates to 0x7B / 0xFB, infinities
 * stay 0x7C / 0xFC, any NaN to 0x7F. */
TL_API uint8_t tl_f32_to_e5m2(float x);
TL_API float tl_e5m2_to_f32(uint8_t h);

/* Array forms: y[i] = convert(x[i]) for i < n, the same bits at every index, length and alignment.
 * x and y do not overlap. n == 0 does nothing.
 *
 * Nothing is written, and the slot is set, the first of these decides:
 *   n < 0
 *   x or y NULL with n > 0 */
TL_API void tl_f32_to_f16_n(const float *x, uint16_t *y, int64_t n);
TL_API void tl_f16_to_f32_n(const uint16_t *x, float *y, int64_t n);
TL_API void tl_f32_to_bf16_n(const float *x, uint16_t *y, int64_t n);
TL_API void tl_bf16_to_f32_n(const uint16_t *x, float *y, int64_t n);
TL_API void tl_f32_to_e4m3_n(const float *x, uint8_t *y, int64_t n);
TL_API void tl_e4m3_to_f32_n(const uint8_t *x, float *y, int64_t n);
TL_API void tl_f32_to_e5m2_n(const float *x, uint8_t *y, int64_t n);
TL_API void tl_e5m2_to_f32_n(const uint8_t *x, float *y, int64_t n);

/* Storing rows in eight bits, as block pools do: of x [rows, dim] the codes [rows, dim] and a scale
 * a row, so that scale * code is the value. Nothing else enters: a row has the same codes wherever
 * and with whatever it is stored. With A the largest |x[d]| of the row and top = 127, or
 * TL_E4M3_MAX:
 *
 *     scale = A / top, r = top / A; code[d] = x[d] * r, rounded to the nearest code, ties to even
 *     A below 2^-100: scale +0, codes 0
 *     a NaN or an infinity in the row: scale NaN (TL_NAN_BITS), codes 0
 *
 * each division and product rounded once, so that no code needs a bound. scale * code, stored
 * again, gives the same codes and scale. No two of x, codes and scales overlap. rows == 0 does
 * nothing; dim == 0 writes scales of +0.
 *
 * Nothing is written, and the slot is set, the first of these decides:
 *   rows or dim < 0
 *   x, codes or scales NULL where they would be used */
TL_API void tl_store_i8_f32(const float *x, int8_t *codes, float *scales, int64_t rows,
                            int64_t dim);
TL_API void tl_store_e4m3_f32(const float *x, uint8_t *codes, float *scales, int64_t rows,
                              int64_t dim);

/* e^x within TL_EXPF_MAX_ULP wherever e^x is a normal float (the worst input found stands in
 * c/src/numerics/coef.h); correctly rounded at 1, -1 and 10; exactly 1 at +-0.
 * x > TL_EXPF_OVERFLOW: +inf. Below the normal range, -inf included: +0. NaN: 0x7FC00000. */
TL_API float tl_expf(float x);

/* y[i] = tl_expf(x[i]) for i < n, bit for bit. x == y is allowed, any other overlap is not. n
 * and NULL as for the conversions. */
TL_API void tl_exp_f32(const float *x, float *y, int64_t n);

TL_END_DECLS

#endif
