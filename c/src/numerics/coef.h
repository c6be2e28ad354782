/* SPDX-License-Identifier: MIT */
/* coef.h: the constants of exp, log and tanh and the exact order in which they are used. Printed by
 * tools/fit_coef.py.
 *
 * Words: add, sub, mul and fma are f32 operations with one rounding each, to nearest even; bits(x)
 * is the word of a float, float(w) its inverse; words add modulo 2^32; everything else is integer
 * arithmetic.
 *
 * exp(x):
 *     0x7FC00000 where x is NaN; +inf where x > EXP_OVERFLOW; c = x, or EXP_LOWEST where x is less
 *     t = fma(c, EXP_LOG2E, EXP_MAGIC)   bits(t) = bits(EXP_MAGIC) + k, k the integer that
 *                                        c * log2(e) is rounded to
 *     n = sub(t, EXP_MAGIC)              k as a float, exact
 *     r = fma(n, -EXP_LN2_HI, c)         exact
 *     r = fma(n, -EXP_LN2_LO, r)         |r| <= ln 2 / 2 and a hair; the one rounding of the
 *                                        reduction
 *     p = EXP_C6
 *     p = fma(p, r, EXP_C5); ... ; p = fma(p, r, EXP_C2)
 *     p = fma(p, r, 1)
 *     p = fma(p, r, 1)
 *     w = bits(p) + (bits(t) << 23)      p * 2^k: the low nine bits of bits(EXP_MAGIC) are zero
 *     +0 where w, read as signed, is < 0x00800000 (p * 2^k < 2^-126), else float(w)
 *
 * log(x), x positive and normal:
 *     e = (bits(x) - LOG_SQRT_HALF) >> 23  signed; x = 2^e * f with f from sqrt(1/2) up to sqrt(2)
 *     g = sub(float(bits(x) - (e << 23)), 1)   f - 1, exact
 *     n = e as a float, exact
 *     p = LOG_C10; p = fma(p, g, LOG_C9); ... ; p = fma(p, g, LOG_C2)
 *     h = mul(g, g)
 *     s = mul(h, p)
 *     s = fma(n, LOG_LN2_LO, s)
 *     s = add(g, s)
 *     result = fma(n, LOG_LN2_HI, s)
 *     +-0: -inf; +inf: +inf; NaN and below 0: 0x7FC00000; log(1) is +0. Not for subnormal x.
 *
 * tanh(x): a = |x|, and the result has the sign of x; 0x7FC00000 where x is NaN
 *     where a < TANH_SMALL:
 *         z = mul(a, a)
 *         p = TANH_C0; p = fma(p, z, TANH_C1); ... ; p = fma(p, z, TANH_C4)
 *         result = fma(a, mul(p, z), a)
 *     else:
 *         e = add(exp(add(a, a)), 1)
 *         result = sub(1, 2 / e)   one rounded division; 1 from a = 9.011 on, +inf included */
#ifndef TL_COEF_H
#define TL_COEF_H

/* exp: within 0.9889 ulp wherever e^x is a normal float (worst: x = 0x1.86e35p+5, the word
 * 0x424371A8); the polynomial alone within 0.18. e, 1/e and e^10 are correctly rounded.
 * EXP_OVERFLOW, 0x42B17217: beyond it e^x rounds to more than the largest float. EXP_LOWEST: far
 * below where results become +0; k stays within nine bits. */
#define EXP_OVERFLOW 0x1.62e42ep+6f
#define EXP_LOWEST -104.0f
#define EXP_LOG2E 0x1.715476p+0f
#define EXP_MAGIC 0x1.8p23f
#define EXP_LN2_HI 0x1.62e4p-1f /* fifteen bits: its product with k is exact */
#define EXP_LN2_LO 0x1.7f7d1cp-20f
#define EXP_C2 0x1.ffffe6p-2f
#define EXP_C3 0x1.5553e2p-3f
#define EXP_C4 0x1.555e46p-5f
#define EXP_C5 0x1.128b74p-7f
#define EXP_C6 0x1.6969eap-10f

/* log: within 0.8868 ulp for every positive normal float (worst: x = 0x1.69919p-1, the word
 * 0x3F34C8C8); the polynomial alone within 0.07. */
#define LOG_SQRT_HALF 0x3F3504F3 /* the word of the float nearest to sqrt(1/2) */
#define LOG_LN2_HI EXP_LN2_HI
#define LOG_LN2_LO EXP_LN2_LO
#define LOG_C2 -0x1.fffff8p-2f
#define LOG_C3 0x1.55555p-2f
#define LOG_C4 -0x1.000438p-2f
#define LOG_C5 0x1.99a428p-3f
#define LOG_C6 -0x1.542402p-3f
#define LOG_C7 0x1.226b2ap-3f
#define LOG_C8 -0x1.0f4f0ep-3f
#define LOG_C9 0x1.087e6p-3f
#define LOG_C10 -0x1.383ebcp-4f

/* tanh: within 1.371 ulp for every float (worst: x = 0x1.42ac4ep-1, the word 0x3F215627); the
 * polynomial alone within 0.08. */
#define TANH_SMALL 0x1.4p-1f
#define TANH_C0 -0x1.750ce2p-8f
#define TANH_C1 0x1.51f8cep-6f
#define TANH_C2 -0x1.b835a4p-5f
#define TANH_C3 0x1.1106f6p-3f
#define TANH_C4 -0x1.555532p-2f

#endif
