/* SPDX-License-Identifier: MIT */
/* isa.h: which instruction set the kernels run on, and the name of the arithmetic they follow.
 *
 * Every instruction set gives the same bits (ABI.md, "Bits"); choosing one is a matter of speed and
 * of tests. The best one the CPU has is taken at first use. TINYLLM_ISA=scalar|avx2|avx512|neon in
 * the environment, exact names, pins one before first use; an empty value counts as unset. */
#ifndef TINYLLM_ISA_H
#define TINYLLM_ISA_H

#include "abi.h"

#define TL_NUMERICS_VERSION 2

TL_BEGIN_DECLS

/* The instruction set in use: "scalar", "avx2", "avx512" or "neon". Where TINYLLM_ISA names one
 * that this CPU or build does not have, that name, cut to 31 bytes: then every function that
 * computes and returns a status (those of attention.h and softmax.h, tl_kv_append,
 * tl_kv_append_f32, tl_kv_gather_f32, tl_kv_write_slots) returns TL_EUNSUPPORTED, listing the names
 * that would work, and those of numerics.h, which return none, run on scalar. Static storage.
 * Thread-safe. */
TL_API const char *tl_isa_name(void);

/* The instruction sets that this build and CPU have, the best one first, a blank between two:
 * "avx512 avx2 scalar". Static storage. Thread-safe. */
TL_API const char *tl_isa_names(void);

/* The version of the arithmetic: it changes whenever any output bit may. Equal versions give equal
 * bits. */
TL_API uint32_t tl_numerics_version(void);

TL_END_DECLS

#endif
