/* SPDX-License-Identifier: MIT */
/* kv_view.h: whether a caller's view of paged memory can be walked at all, asked by every function
 * that takes one. */
#ifndef TL_KERNELS_KV_VIEW_H
#define TL_KERNELS_KV_VIEW_H

#include "tinyllm/kv_view.h"

/* TL_EINVAL in fn's name, with the member and its values, unless the view (not NULL) is sound as
 * tl_paged_attn_f32 says.
 * Whether k and v are NULL is left to fn, which knows if they will be used.
 *
 * That no two rows of K (or of V) share memory is shown by nesting: of the axes block, head and
 * slot, those longer than 1 are taken by rising stride, and each must step over all that the
 * shorter ones span. Every layout that permutes or pads the axes passes. Refused with the layouts
 * that do overlap are a few that interleave without it, in which one axis falls into the gaps of
 * another: 2 heads 24 elements apart with 3 slots 16 apart and rows of 8, say. Nothing stores a
 * cache so, and telling them apart would take a search.
 *
 * A view that passes has n_blocks * block_tokens * n_kv_heads * head_dim_k (likewise v) below
 * INT64_MAX, unless n_blocks is 0. */
tl_status tl_kv_view_check(const char *fn, const tl_kv_view *view);

/* Bytes of one element of a sound view. */
static inline int64_t tl_kv_view_elem(const tl_kv_view *view)
{
    return view->dtype == TL_F32 ? 4 : 2;
}

#endif
