/* SPDX-License-Identifier: MIT */
/* kernels.h: what an instruction set has to bring, and how the chosen one is reached.
 *
 * A *.isa.c file is compiled once per instruction set with TL_ISA defined to its name; TL_ISA_FN(f)
 * is then f_<name>.
 * None of its functions checks arguments or sets the float mode: callers do, once, at the public
 * edge. */
#ifndef TL_KERNELS_H
#define TL_KERNELS_H

#include <stdbool.h>
#include <stdint.h>

#include "numerics/isa_fn.h"
#include "runtime/cpu.h"
#include "tinyllm/abi.h"

struct attn_job;
struct attn_merge;

struct tl_kernels {
    const char *name;
    /* rows of attention that share one walk over K and V: attn_rows.h */
    void (*attn_rows)(struct attn_job *job);
    /* one row: some states merged into it */
    void (*attn_merge)(struct attn_merge *merge);
    /* one row of softmax, cols > 0, y may be x: canon's order */
    void (*softmax_row)(const float *x, float *y, int64_t cols);
    void (*softmax_online_row)(const float *x, float *y, int64_t cols);
    /* arrays, n >= 0 */
    void (*exp_n)(const float *x, float *y, int64_t n);
    void (*f32_to_f16_n)(const float *x, uint16_t *y, int64_t n);
    void (*f16_to_f32_n)(const uint16_t *x, float *y, int64_t n);
    void (*f32_to_bf16_n)(const float *x, uint16_t *y, int64_t n);
    void (*bf16_to_f32_n)(const uint16_t *x, float *y, int64_t n);
    void (*f32_to_e4m3_n)(const float *x, uint8_t *y, int64_t n);
    void (*e4m3_to_f32_n)(const uint8_t *x, float *y, int64_t n);
    void (*f32_to_e5m2_n)(const float *x, uint8_t *y, int64_t n);
    void (*e5m2_to_f32_n)(const uint8_t *x, float *y, int64_t n);
};

/* The pinned or best usable table; scalar's where TINYLLM_ISA names one that is not here. Chosen
 * once, thread-safe. */
const struct tl_kernels *tl_kernels(void);

/* The same for functions that return a status: TL_EUNSUPPORTED in fn's name, listing the names that
 * would work, where TINYLLM_ISA names one that is not here. */
tl_status tl_kernels_require(const char *fn, const struct tl_kernels **out);

/* For tests that compare instruction sets in one process: takes `name` from now on, as TINYLLM_ISA
 * would; NULL: the best.
 * Not while kernels run. */
void tl_kernels_select(const char *name);

/* The i-th table this CPU can run, slowest first; NULL past the last. */
const struct tl_kernels *tl_kernels_usable(int i);

#endif
