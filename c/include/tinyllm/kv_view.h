/* SPDX-License-Identifier: MIT */
/* kv_view.h: where the K and V of one layer lie, in whoever's memory.
 *
 * A view says how paged memory is cut: n_blocks blocks of block_tokens positions for n_kv_heads
 * heads, K rows of head_dim_k and V rows of head_dim_v elements. Element d of the K row of (block,
 * head, slot) is
 *
 *     k[block * k_block_stride + head * k_head_stride + slot * k_token_stride + d]
 *
 * with strides in elements of dtype; the innermost axis is contiguous. V likewise. So a view reads
 * in place
 *
 *     the block pool (tl_kv_pool_view)
 *     [blocks, Hkv, b, D]        block_stride Hkv*b*D, head_stride b*D, token_stride D
 *     [blocks, b, Hkv, D]        block_stride b*Hkv*D, head_stride D,   token_stride Hkv*D
 *     [blocks, Hkv, 2, b, D]     K rows and then V rows of a head side by side: v = k + b*D,
 *                                head_stride 2*b*D
 *     [B, Hkv, T, D]             B blocks of T positions: the table of sequence s is {s}
 *
 * A view owns nothing: the memory stays its owner's, and must outlive every call that reads it.
 * Views are plain data. */
#ifndef TINYLLM_KV_VIEW_H
#define TINYLLM_KV_VIEW_H

#include "abi.h"
#include "kv_pool.h"

/* 112 bytes, in this order. */
typedef struct {
    const void *k, *v;     /* never written through, except by tl_kv_write_slots */
    int32_t dtype;         /* TL_F32, TL_F16 or TL_BF16: of both */
    uint32_t reserved;     /* 0 */
    int64_t n_blocks, block_tokens, n_kv_heads, head_dim_k, head_dim_v;
    int64_t k_block_stride, k_head_stride, k_token_stride;
    int64_t v_block_stride, v_head_stride, v_token_stride;
} tl_kv_view;

TL_BEGIN_DECLS

/* Fills in the view of one layer of a pool. It stays good as long as the pool. On failure *view is
 * untouched: TL_EINVAL (kv or view NULL, layer out of range). */
TL_API tl_status tl_kv_pool_view(const tl_kv_pool *kv, uint32_t layer, tl_kv_view *view);

/* Writes K and V of T tokens into the slots an engine's own tables gave them.
 *
 *   view      where to; its memory is written
 *   slots     [T] i64: slot number block * block_tokens + offset, or -1: this token is skipped
 *   k         [T, n_kv_heads, head_dim_k]: head h of token t at k + t*k_token_stride +
 *             h*k_head_stride, innermost contiguous
 *   v         [T, n_kv_heads, head_dim_v], likewise
 *   dtype     of k and v: TL_F32, which is rounded to the view's dtype as tl_f32_to_f16 and
 *             tl_f32_to_bf16 do, or the view's own, which is copied as it is
 *
 * Strides in elements of dtype; they may be 0 or negative. k and v are read only for tokens that
 * are not skipped.
 * Nothing but the given slots is written. Not thread-safe for one slot. T == 0: TL_OK.
 * Errors, nothing written: TL_EINVAL (a NULL pointer that would be used, T < 0, a view that is not
 * sound (see tl_paged_attn_f32), a slot below -1 or at or past n_blocks * block_tokens, a slot
 * given twice); TL_EUNSUPPORTED (dtype is neither TL_F32 nor the view's); TL_ENOMEM (more than 64
 * slots that do not rise, and the allocator hook has no 16 * T bytes to look for ones given twice).
 * Source strides that leave the address space: TL_EINVAL. */
TL_API tl_status tl_kv_write_slots(const tl_kv_view *view, const int64_t *slots, int64_t T,
                                   const void *k, const void *v, int32_t dtype,
                                   int64_t k_token_stride, int64_t k_head_stride,
                                   int64_t v_token_stride, int64_t v_head_stride);

TL_END_DECLS

#endif
