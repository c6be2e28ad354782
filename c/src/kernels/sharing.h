/* SPDX-License-Identifier: MIT */
/* sharing.h: whether a step of attention is worth sharing among threads. The answer changes no bit,
 * only the time. */
#ifndef TL_SHARING_H
#define TL_SHARING_H

#include <stdbool.h>
#include <stdint.h>

/* Nanoseconds below which a step stays with its caller: about what waking a thread that sleeps
 * costs. A variable, so that tests can share even the smallest. */
extern int64_t tl_small_step_ns;

/* For `elements` of K that each of kv_heads reads and each of q_heads multiplies (and as many of
 * V): at 4 elements a nanosecond from memory and 20 through the multipliers, which is what one core
 * of a server has. */
static inline bool tl_worth_sharing(double elements, double kv_heads, double q_heads)
{
    return elements * (kv_heads / 4 + q_heads / 20) >= (double)tl_small_step_ns;
}

#endif
