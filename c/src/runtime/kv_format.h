/* SPDX-License-Identifier: MIT */
/* kv_format.h: what an element of K and V may be: the one list, and what follows from it
 * for whoever stores or finds one. How one is widened: kernels/kv_load.h. */
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

#endif
