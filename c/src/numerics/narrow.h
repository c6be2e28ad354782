/* SPDX-License-Identifier: MIT */
/* narrow.h: f32 to the floats of eight bits, with the bits of lowp.h, for loops: each rounds in a
 * float register, in the mode that the caller has set. */
#ifndef TL_NARROW_H
#define TL_NARROW_H

#include "lowp.h"

/* lowp_narrow of a finite magnitude w by one addition: to a power of two whose unit in the last
 * place is the step of the format at w, so that the sum is rounded there, and its fraction counts
 * steps: all of them below the smallest normal number, and from 2^mant to 2^(mant + 1) in each
 * binade above. */
static inline uint32_t narrow(uint32_t w, uint32_t mant, uint32_t bias)
{
    const uint32_t least = (128 - bias) << 23, exponent = w & LOWP_INF,
                   binade = exponent > least ? exponent : least;
    const uint32_t power = binade + ((23 - mant) << 23);
    const uint32_t steps = lowp_bits(lowp_float(w) + lowp_float(power)) - power;
    return steps + ((binade - least) >> (23 - mant));
}

static inline uint8_t narrow_to_e4m3(float x)
{
    const uint32_t w = lowp_bits(x), m = w & ~LOWP_SIGN;
    const uint32_t code = narrow(lowp_min(m, 0x43E00000), 3, 7); /* 448 */
    return (uint8_t)(m > LOWP_INF ? 0x7F : code | w >> 31 << 7);
}

static inline uint8_t narrow_to_e5m2(float x)
{
    const uint32_t w = lowp_bits(x), m = w & ~LOWP_SIGN;
    const uint32_t code = narrow(lowp_min(m, 0x47600000), 2, 15) + (m == LOWP_INF); /* 57344 */
    return (uint8_t)(m > LOWP_INF ? 0x7F : code | w >> 31 << 7);
}

#endif
