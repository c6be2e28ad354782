/* SPDX-License-Identifier: MIT */
/* kv_load.h: elements of K and V widened, for files that are compiled once per instruction set:
 * from element d on of the row at `row`, the first n of sixteen, one register's, or the first n of
 * one register's. */
#ifndef TL_KV_LOAD_H
#define TL_KV_LOAD_H

#include "numerics/vec.h"
#include "runtime/kv_format.h"

#define FORMAT(name, type, suffix) \
    if (dtype == name)             \
        return v16_load##suffix##_n((const type *)row + d, n);
V16_INLINE v16 kv_load_n(const void *row, int64_t d, int64_t n, tl_dtype dtype)
{
    KV_FORMATS(FORMAT)
    __builtin_unreachable();
}
#undef FORMAT

#define FORMAT(name, type, suffix) \
    if (dtype == name)             \
        return vreg_load##suffix((const type *)row + d);
V16_INLINE vreg kv_load_reg(const void *row, int64_t d, tl_dtype dtype)
{
    KV_FORMATS(FORMAT)
    __builtin_unreachable();
}
#undef FORMAT

/* The first n lanes of a register, the others +0: nothing is read past element d + n - 1. */
#if V16_REGS == 1
#define kv_load_reg_n kv_load_n
#else
V16_INLINE vreg kv_load_reg_n(const void *row, int64_t d, int64_t n, tl_dtype dtype)
{
    const int64_t bytes = kv_elem_bytes(dtype);
    float lanes[V16_REG_LANES];
    memset(lanes, 0, sizeof lanes);
    memcpy(lanes, (const char *)row + d * bytes, (size_t)(n * bytes));
    return kv_load_reg(lanes, 0, dtype);
}
#endif

#endif
