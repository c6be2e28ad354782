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
 * Elements of eight bits have f32 scales beside them: a value is scale * element, the scale of
 * (block, head, slot) being
 *
 *     k_scale[block * k_scale_block_stride + head * k_scale_head_stride +
 *             slot * k_scale_token_stride]
 *
 * with strides in floats. A stride of 0 shares: all three, one scale for a tensor; that of the head
 * alone, one for each position.
 *
 * A view owns nothing: the memory stays its owner's, and must outlive every call that reads it.
 * Views are plain data. */
#ifndef TINYLLM_KV_VIEW_H
#define TINYLLM_KV_VIEW_H

#include "abi.h"
#include "kv_pool.h"

/* 184 bytes, in this order. Set `size` and zero the rest before filling it in: later versions add
 * members behind, and take a smaller size for what it was. */
typedef struct {
    uint64_t size;     /* sizeof(tl_kv_view) */
    const void *k, *v; /* written through by tl_kv_write_slots alone */
    int32_t dtype;     /* TL_F32, TL_F16, TL_BF16, TL_F8_E4M3 or TL_I8: of both */
    uint32_t reserved; /* 0 */
    int64_t n_blocks, block_tokens, n_kv_heads, head_dim_k, head_dim_v;
    int64_t k_block_stride, k_head_stride, k_token_stride;
    int64_t v_block_stride, v_head_stride, v_token_stride;
    /* of TL_F8_E4M3 and TL_I8; NULL and 0 for the others */
    const float *k_scale, *v_scale;
    int64_t k_scale_block_stride, k_scale_head_stride, k_scale_token_stride;
    int64_t v_scale_block_stride, v_scale_head_stride, v_scale_token_stride;
} tl_kv_view;

TL_BEGIN_DECLS

/* Whether a view is sound: asked by every function that takes one, in this order, each TL_EINVAL.
 *
 *   size         is not one that is known
 *   dtype        is none of those above
 *   reserved     is not 0
 *   sizes        block_tokens, n_kv_heads or a head_dim below 1, n_blocks below 0
 *   scales       of a dtype without, one or a stride of one is given; of a dtype with, one is NULL
 *                or not aligned for floats, a stride is negative, or the last one lies past the end
 *                of memory
 *   strides      negative, or two elements of K (or of V) share memory. Shown by nesting: of the
 *                axes block, head and slot, those longer than 1 are taken by rising stride, and
 *                each must step over all that the shorter ones span. Every layout that permutes or
 *                pads the axes passes; refused are a few that interleave without sharing, in which
 *                one axis falls into the gaps of another
 *   addresses    the last element lies past the end of memory
 *
 * K and V may share memory with each other, and so may scales. */

/* Fills in the view of one layer of a pool, in whichever format. It stays good as long as the pool.
 *
 *   kv      the pool
 *   layer   which of its layers
 *   view    view->size is the caller's; that many bytes are written
 *
 * Errors, *view untouched:
 *   TL_EINVAL   kv or view NULL
 *   TL_EINVAL   view->size is not one that is known
 *   TL_EINVAL   layer out of range */
TL_API tl_status tl_kv_pool_view(const tl_kv_pool *kv, uint32_t layer, tl_kv_view *view);

/* Writes K and V of T tokens into the slots an engine's own tables gave them.
 *
 *   view      where to; its memory is written
 *   slots     [T] i64: slot number block * block_tokens + offset, or -1: this token is skipped
 *   k         [T, n_kv_heads, head_dim_k]: head h of token t at k + t*k_token_stride +
 *             h*k_head_stride, innermost contiguous
 *   v         [T, n_kv_heads, head_dim_v], likewise
 *   dtype     of k and v: the view's own, whose elements are copied as they are, and no scale is
 *             written; or TL_F32, which is rounded to the view's dtype as tl_f32_to_f16 and
 *             tl_f32_to_bf16 do; or, to a view of eight bits, TL_F32, TL_F16 or TL_BF16:
 *
 *             no two rows share a scale   codes and scale as tl_store_i8_f32 or tl_store_e4m3_f32
 *                                         has them
 *             one scale for a tensor      (all its strides 0) and e4m3: tl_f32_to_e4m3(x * r), r =
 *                                         1 / scale rounded once: what does not fit saturates. The
 *                                         scale is read and stays
 *
 * Strides in elements of dtype; they may be 0 or negative. k and v are read only for tokens that
 * are not skipped.
 * Nothing but the given slots is written. Not thread-safe for one slot. T == 0: TL_OK.
 *
 * Errors, nothing written, the first of these decides:
 *   TL_EINVAL        T < 0; view or slots NULL; T slots do not fit in memory
 *   TL_EINVAL        a view that is not sound
 *   TL_EUNSUPPORTED  a dtype, or scales of k or v, that cannot be written as above
 *   TL_EUNSUPPORTED  TINYLLM_ISA names what is not here
 *   TL_EINVAL        a slot below -1, or at or past n_blocks * block_tokens
 *   TL_EINVAL        k, v or the view's k or v NULL where they would be used
 *   TL_EINVAL        strides of k or v that leave the address space
 *   TL_EINVAL        a slot given twice
 *   TL_ENOMEM        more than 64 slots that do not rise, and the allocator hook has no 16 * T
 *                    bytes to look for slots given twice */
TL_API tl_status tl_kv_write_slots(const tl_kv_view *view, const int64_t *slots, int64_t T,
                                   const void *k, const void *v, int32_t dtype,
                                   int64_t k_token_stride, int64_t k_head_stride,
                                   int64_t v_token_stride, int64_t v_head_stride);

TL_END_DECLS

#endif
