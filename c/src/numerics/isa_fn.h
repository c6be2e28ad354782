/* SPDX-License-Identifier: MIT */
/* isa_fn.h: names in files that are compiled once per instruction set. The Makefile defines TL_ISA
 * to the set's name; TL_ISA_FN(f) is then tl_f_<name>. */
#ifndef TL_ISA_FN_H
#define TL_ISA_FN_H

#include <stdbool.h>
#include <stdint.h>

#define TL_JOIN2_(a, b) tl_##a##_##b
#define TL_JOIN_(a, b) TL_JOIN2_(a, b)
#define TL_ISA_FN(f) TL_JOIN_(f, TL_ISA)

#ifdef TL_ISA
#define KERNEL(name, arguments) void TL_ISA_FN(name) arguments;
#include "numerics/arrays.def"
#undef KERNEL
#endif

#endif
