/* SPDX-License-Identifier: MIT */
/* kv_format.h: what an element of K and V may be: the one list, and all that follows from it. */
#ifndef TL_KV_FORMAT_H
#define TL_KV_FORMAT_H

#include <stdbool.h>
#include <stdint.h>

#include "tinyllm/abi.h"

/* FORMAT(dtype, type of an element, suffix of the loads that widen it (vec.h)) */
#define KV_FORMATS(FORMAT)               \
    FORMAT(TL_F32, float, )              \
    FORMAT(TL_F16, uint16_t, _f16)       \
    FORMAT(TL_BF16, uint16_t, _bf16)     \
    FORMAT(TL_F8_E4M3, uint8_t, _e4m3)   \
    FORMAT(TL_I8, int8_t, _i8)

/* Their names, for messages. */
#define KV_FORMAT_NAMES "TL_F32, TL_F16, TL_BF16, TL_F8_E4M3, TL_I8"

/* Bytes of an element; 0 for what is no format. */
static inline int64_t kv_elem_bytes(tl_dtype dtype)
{
#define FORMAT(name, type, _) case name: return sizeof(type);
    switch (dtype) {
        KV_FORMATS(FORMAT)
    default: return 0;
    }
#undef FORMAT
}

static inline bool kv_is_format(tl_dtype dtype)
{
    return kv_elem_bytes(dtype) != 0;
}

/* Whether elements have f32 scales beside them. */
static inline bool kv_has_scales(tl_dtype dtype)
{
    return dtype == TL_F8_E4M3 || dtype == TL_I8;
}

/* Bytes of a row of `dim` elements. */
static inline int64_t kv_row_bytes(tl_dtype dtype, int64_t dim)
{
    return dim * kv_elem_bytes(dtype);
}

/* Widening, for files that are compiled once per instruction set: from element d on of the row at
 * `row`, the first n of sixteen, one register's, or the first n of one register's. */
#ifdef TL_VEC_H
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

#endif
