/* SPDX-License-Identifier: MIT */
/* exp_ref.h: exp and log once more, one float and one operation at a time, in the order that
 * numerics/coef.h words; the distance of a float from a real number in ulp; the walk over
 * instruction sets; float modes that a caller may be in.
 * Shares nothing with the library but the constants. */
#ifndef TL_EXP_REF_H
#define TL_EXP_REF_H

#include "check.h"
#include "kernels/kernels.h"
#include "numerics/coef.h"
#include "tinyllm/numerics.h"

static inline float ref_expf(float x)
{
    if (isnan(x))
        return float_of(TL_NAN_BITS);
    if (x > EXP_OVERFLOW)
        return INFINITY;
    const float c = x < EXP_LOWEST ? EXP_LOWEST : x;
    const float t = fmaf(c, EXP_LOG2E, EXP_MAGIC), n = t - EXP_MAGIC;
    float r = fmaf(n, -EXP_LN2_HI, c);
    r = fmaf(n, -EXP_LN2_LO, r);
    const float coef[] = {EXP_C6, EXP_C5, EXP_C4, EXP_C3, EXP_C2, 1, 1};
    float p = coef[0];
    for (int i = 1; i < 7; i++)
        p = fmaf(p, r, coef[i]);
    const double y = ldexp((double)p, (int)n); /* exact: p has 24 bits */
    return y < 0x1p-126 ? 0.0f : (float)y;
}

static inline float ref_logf(float x)
{
    if (isnan(x) || x < 0)
        return float_of(TL_NAN_BITS);
    if (x == 0 || isinf(x))
        return x == 0 ? -INFINITY : x;
    int e;
    float f = 2 * frexpf(x, &e); /* [1, 2) */
    e--;
    if (float_bits(f / 2) >= LOG_SQRT_HALF) {
        f /= 2;
        e++;
    }
    const float g = f - 1, n = (float)e;
    const float coef[] = {LOG_C10, LOG_C9, LOG_C8, LOG_C7, LOG_C6, LOG_C5, LOG_C4, LOG_C3, LOG_C2};
    float p = coef[0];
    for (int i = 1; i < 9; i++)
        p = fmaf(p, g, coef[i]);
    const float h = g * g;
    float s = h * p;
    s = fmaf(n, LOG_LN2_LO, s);
    s = g + s;
    return fmaf(n, LOG_LN2_HI, s);
}

/* |got - want| in units of the last place of a float where `want` lies; want is in the normal range
 * and not 0. */
static inline double ulps_off(float got, long double want)
{
    int e;
    frexpl(want, &e); /* |want| in [2^(e-1), 2^e) */
    return (double)fabsl(ldexpl((long double)got - want, 24 - e));
}

/* Runs the statement after it once per instruction set of this CPU, selected, `k` being its table;
 * the best one stays selected.
 * (A check that fails leaves the loop and the selection as they are: the program fails anyway.) */
#define FOR_EACH_ISA(k)                                       \
    const struct tl_kernels *k;                               \
    for (int isa_ = 0; (k = select_isa(isa_)) != NULL; isa_++)

static inline const struct tl_kernels *select_isa(int i)
{
    const struct tl_kernels *k = tl_kernels_usable(i);
    tl_kernels_select(k ? k->name : NULL);
    return k;
}

/* The float mode as the program sees it, and modes that a caller may be in: every rounding,
 * flush-to-zero and denormals-are-zero, every exception unmasked, sticky flags up. */
#if defined(__x86_64__)
#include <xmmintrin.h>
enum { N_FLOAT_MODES = 32 };

static inline unsigned get_float_mode(void)
{
    return _mm_getcsr();
}

static inline void set_float_mode(unsigned mode)
{
    _mm_setcsr(mode);
}

static inline unsigned hostile_float_mode(int i)
{
    const unsigned rounding = (unsigned)(i & 3) << 13, flush = i & 4 ? 0x8040 : 0;
    const unsigned masks = i & 8 ? 0 : 0x1F80, flags = i & 16 ? 0x3F : 0;
    return rounding | flush | masks | flags;
}
#elif defined(__aarch64__)
enum { N_FLOAT_MODES = 16 };

static inline unsigned get_float_mode(void)
{
    uint64_t fpcr;
    __asm__ volatile("mrs %0, fpcr" : "=r"(fpcr) : : "memory");
    return (unsigned)fpcr;
}

static inline void set_float_mode(unsigned mode)
{
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)mode) : "memory");
}

/* rounding, flush-to-zero, the other half-precision format */
static inline unsigned hostile_float_mode(int i)
{
    return (unsigned)(i & 3) << 22 | (i & 4 ? 1u << 24 : 0) | (i & 8 ? 1u << 26 : 0);
}
#else
enum { N_FLOAT_MODES = 0 };

static inline unsigned get_float_mode(void)
{
    return 0;
}

static inline void set_float_mode(unsigned mode)
{
    (void)mode;
}

static inline unsigned hostile_float_mode(int i)
{
    return (unsigned)i;
}
#endif

#endif
