/* SPDX-License-Identifier: MIT */
/* lowp.h: the small formats, one float at a time: f16, bf16, e4m3 and e5m2 from and to f32.
 *
 * Everything works on words: a sign, and a magnitude whose order is that of the numbers. Nothing
 * here rounds in a float register (the one product is exact, its operands and result zero or
 * normal), so no float mode reaches these functions and they raise no flag. A loop over one of them
 * vectorises. */
#ifndef TL_LOWP_H
#define TL_LOWP_H

#include <stdint.h>
#include <string.h>

#define LOWP_SIGN 0x80000000u
#define LOWP_INF 0x7F800000u

static inline uint32_t lowp_bits(float x)
{
    uint32_t w;
    memcpy(&w, &x, sizeof w);
    return w;
}

static inline float lowp_float(uint32_t w)
{
    float x;
    memcpy(&x, &w, sizeof x);
    return x;
}

/* m / 2^shift to the nearest integer, ties to even; 1 <= shift <= 31. */
static inline uint32_t lowp_round(uint32_t m, uint32_t shift)
{
    return (m + ((1u << shift) / 2 - 1) + (m >> shift & 1)) >> shift;
}

static inline uint32_t lowp_min(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

/* The magnitude w of an f32 as one with `mant` fraction bits and the given bias, as though its
 * exponent had no upper
 * end: what is too large comes out above every code of the format, for the caller to bound. */
static inline uint32_t lowp_narrow(uint32_t w, uint32_t mant, uint32_t bias)
{
    /* least: of a normal number there */
    const uint32_t cut = 23 - mant, exponent = w >> 23, least = 128 - bias;
    const uint32_t normal = lowp_round(w, cut) - ((127 - bias) << mant);
    const uint32_t below = exponent < least ? least - exponent : 0;
    /* 25 and more give 0 */
    const uint32_t subnormal = lowp_round((w & 0x7FFFFF) | 0x800000, lowp_min(cut + below, 31));
    return below ? subnormal : normal;
}

/* The f32 word of a finite magnitude m in such a format. */
static inline uint32_t lowp_widen(uint32_t m, uint32_t mant, uint32_t bias)
{
    const uint32_t normal = (m << (23 - mant)) + ((127 - bias) << 23);
    const float step = lowp_float((128 - bias - mant) << 23); /* between subnormals */
    return m >> mant ? normal : lowp_bits((float)(int32_t)m * step);
}

static inline uint16_t lowp_f32_to_f16(float x)
{
    const uint32_t w = lowp_bits(x), m = w & ~LOWP_SIGN, sign = w >> 31 << 15;
    return (uint16_t)(m > LOWP_INF ? 0x7E00 : sign | lowp_min(lowp_narrow(m, 10, 15), 0x7C00));
}

static inline float lowp_f16_to_f32(uint16_t h)
{
    const uint32_t m = h & 0x7FFFu, sign = (uint32_t)h >> 15 << 31,
                   quiet = m > 0x7C00 ? 0x400000 : 0;
    return lowp_float(sign | (m < 0x7C00 ? lowp_widen(m, 10, 15) : LOWP_INF | m << 13 | quiet));
}

static inline uint16_t lowp_f32_to_bf16(float x)
{
    const uint32_t w = lowp_bits(x);
    return (uint16_t)((w & ~LOWP_SIGN) > LOWP_INF ? 0x7FC0 : lowp_round(w, 16));
}

static inline float lowp_bf16_to_f32(uint16_t h)
{
    return lowp_float((uint32_t)h << 16);
}

static inline uint8_t lowp_f32_to_e4m3(float x)
{
    const uint32_t w = lowp_bits(x), m = w & ~LOWP_SIGN, sign = w >> 31 << 7;
    return (uint8_t)(m > LOWP_INF ? 0x7F : sign | lowp_min(lowp_narrow(m, 3, 7), 0x7E));
}

static inline float lowp_e4m3_to_f32(uint8_t h)
{
    const uint32_t m = h & 0x7Fu, sign = (uint32_t)h >> 7 << 31;
    /* 0x7F: every fraction bit set, so quiet */
    return lowp_float(sign | (m < 0x7F ? lowp_widen(m, 3, 7) : LOWP_INF | m << 20));
}

static inline uint8_t lowp_f32_to_e5m2(float x)
{
    const uint32_t w = lowp_bits(x), m = w & ~LOWP_SIGN, sign = w >> 31 << 7;
    const uint32_t largest = m == LOWP_INF ? 0x7C : 0x7B;
    return (uint8_t)(m > LOWP_INF ? 0x7F : sign | lowp_min(lowp_narrow(m, 2, 15), largest));
}

static inline float lowp_e5m2_to_f32(uint8_t h)
{
    const uint32_t m = h & 0x7Fu, sign = (uint32_t)h >> 7 << 31, quiet = m > 0x7C ? 0x400000 : 0;
    return lowp_float(sign | (m < 0x7C ? lowp_widen(m, 2, 15) : LOWP_INF | m << 21 | quiet));
}

#endif
