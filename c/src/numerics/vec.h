/* SPDX-License-Identifier: MIT */
/* vec.h: sixteen f32 lanes, whatever the register. Each instruction set has one file with these
 * operations; everything that computes is written in them once (canon.h) and compiled for each.
 *
 *   v16_zero, v16_set1(x)              every lane +0, or x
 *   v16_load(p), v16_store(p, x)       p[0..15], any alignment
 *   v16_load_n, v16_store_n            p[0..n-1] only, 0 <= n <= 16; lanes from n on load as +0
 *   v16_load_f16[_n], v16_store_f16[_n]  the same from and to f16: widened exactly (NaN quiet),
 *                                        rounded to nearest even (NaN 0x7E00)
 *   v16_load_bf16[_n]                  from bf16, widened by a shift
 *   v16_load_i8[_n]                    from int8
 *   v16_load_e4m3[_n]                  from e4m3, as 2^-8 of it: its fields moved into those of
 *                                      f16, whose bias is greater by 8 (NaN quiet)
 *   v16_e4m3_to_f16(p, h)              the same as f16: sixteen of p into h
 *   line_to_f16(p, h, top)             v16_e4m3_to_f16 of the 64 codes at p, where none is NaN,
 *                                      and the magnitudes that `top`, from zero on, has seen
 *   codes_have_nan(top)                whether any of them was
 *   v16_add, v16_sub, v16_mul, v16_div one rounding each
 *   v16_with_sign(x, s)                |x| with the sign of s
 *   v16_fma(a, b, c)                   a*b + c with one rounding;  f32_fma: the same for one float
 *   v16_fma_n(a, b, c, n)              lanes from n on keep c
 *   v16_max(x, y)                      x > y ? x : y        (NaN: y)
 *   v16_where_gt(x, y, a, b)           x > y ? a : b        (NaN: b)
 *   v16_where_nan(x, a, b)             x is NaN ? a : b
 *   v16_only(x, mask)                  lanes whose bit in the mask is 0 become -inf
 *   v16_all_le(x, y)                   every lane x <= y; false where any is NaN
 *   v16_pow2(p, t)                     p * 2^k exactly, k the integer that t holds above EXP_MAGIC;
 *                                      +0 below 2^-126
 *   v16_first(x)                       lane 0
 *   v16_fold_max(x)                    the largest lane, by the halves of v16_fold with v16_max;
 *                                      not for NaN
 *   v16_fold(x)                        sixteen lanes to one by halves: i with i+8, i+4, i+2, i+1
 *   v16_quads(a, b, c, d)              the first two halvings of four vectors: quad n holds what is
 *                                      left of the n-th
 *   v16_fold_quads(p0, p1, p2, p3)     the last two: lane 4*n + g is the fold of quad n of p_g
 *
 * The last two together are sixteen folds in fifteen additions, each with the bits v16_fold gives.
 * The additions within a fold have two operands, so their order does not matter; which lanes meet
 * does.
 *
 * A v16 is V16_REGS registers of V16_REG_LANES lanes. Dots are summed a register at a time, so that
 * a small register file holds several keys and rows at once:
 *
 *   vreg, vreg_zero, vreg_set1, vreg_load, vreg_load_f16, vreg_load_bf16, vreg_load_i8,
 *   vreg_load_e4m3, vreg_store, vreg_mul, vreg_fma        as for v16, on one register
 *   vreg_keep(x)                                          x, in a register: not read from memory
 *                                                         again for each use
 *   v16_of(r)                                             the sixteen lanes of r[0 .. V16_REGS-1]
 *
 * V16_ROWS query rows are taken together; V16_KEYS(rows) dots of each run side by side, 1, 2 or 4,
 * and V16_COLS(rows) registers of values, up to 8: as many accumulators as the register file holds,
 * and enough of them to hide the latency of an fma. V16_PREFETCHES, 2 or 3, is how often a
 * cache line may be prefetched before arithmetic waits for it. */
#ifndef TL_VEC_H
#define TL_VEC_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* Operations on registers must be inlined whatever the compiler thinks; arrays are better left to
 * its judgement. */
#if defined(TL_ISA_avx512) || defined(TL_ISA_avx2) || defined(TL_ISA_neon)
#define V16_INLINE static inline __attribute__((always_inline, unused))
#else
#define V16_INLINE static inline __attribute__((unused))
#endif

#if defined(TL_ISA_avx512)
#include "vec_avx512.h"
#elif defined(TL_ISA_avx2)
#include "vec_avx2.h"
#elif defined(TL_ISA_neon)
#include "vec_neon.h"
#else
#include "vec_scalar.h"
#endif

/* The mask of lanes 0 .. n-1, 0 <= n <= 16. */
V16_INLINE uint16_t lanes_below(int64_t n)
{
    return (uint16_t)((1u << n) - 1);
}

/* Where one register, or one array, is a whole v16. */
#if V16_REGS == 1
#define V16_REG_LANES 16
#define vreg_zero v16_zero
#define vreg_set1 v16_set1
#define vreg_store v16_store
#define vreg_mul v16_mul
#define vreg_load v16_load
#define vreg_load_f16 v16_load_f16
#define vreg_load_bf16 v16_load_bf16
#define vreg_load_i8 v16_load_i8
#define vreg_load_e4m3 v16_load_e4m3
#define vreg_fma v16_fma
#define vreg_keep(x) (x)

typedef v16 vreg;

V16_INLINE v16 v16_of(const vreg *r)
{
    return r[0];
}
#endif

#endif
