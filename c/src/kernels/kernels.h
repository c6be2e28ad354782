/* SPDX-License-Identifier: MIT */
/* kernels.h: what an instruction set has to bring, and how the chosen one is reached.
 *
 * A *.isa.c file is compiled once per instruction set with TL_ISA defined to its name; TL_ISA_FN(f)
 * is then tl_f_<name>. None of its functions checks arguments or sets the float mode: callers do,
 * once, at the public edge. */
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
#define KERNEL(member, arguments) void (*member) arguments;
#include "kernels.def"
#undef KERNEL
};

#ifdef TL_ISA
#define KERNEL(member, arguments) void TL_ISA_FN(member) arguments;
#include "kernels.def"
#undef KERNEL
#endif

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
