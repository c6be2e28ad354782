/* SPDX-License-Identifier: MIT */
/* kv_layout.h: where the K and V of one layer lie, as kernels walk them: a public view without what
 * only checks need. The block pool merely fills one in, and a contiguous cache is a layout of one
 * long block for each sequence. */
#ifndef TL_KV_LAYOUT_H
#define TL_KV_LAYOUT_H

#include "runtime/kv_format.h"
#include "tinyllm/kv_view.h"

/* One side (K or V): element d of (sequence, KV head, block, slot) lies at base + the sum of index
 * times stride, in elements of the dtype; the row's scale likewise, in floats, where the dtype has
 * scales. */
struct kv_side {
    tl_dtype dtype;
    const char *base;
    int64_t seq_stride, head_stride, block_stride, token_stride, dim;
    const float *scale;
    int64_t scale_head_stride, scale_block_stride, scale_token_stride;
};

struct kv_layout {
    struct kv_side k, v;
    int64_t n_blocks, block_tokens, n_kv_heads;
};

/* One KV head of a sequence: where its rows are, and their scales or NULL. */
struct kv_plane {
    const char *rows;
    const float *scales;
};

static inline struct kv_plane kv_plane(const struct kv_side *side, int64_t seq, int64_t kv_head)
{
    return (struct kv_plane){
        side->base + kv_elem_bytes(side->dtype) *
                         (seq * side->seq_stride + kv_head * side->head_stride),
        side->scale ? side->scale + kv_head * side->scale_head_stride : NULL};
}

/* Row `slot` of a block in a plane. */
static inline const char *kv_row(const struct kv_side *side, struct kv_plane plane, int64_t block,
                                 int64_t slot)
{
    return plane.rows +
           kv_elem_bytes(side->dtype) * (block * side->block_stride + slot * side->token_stride);
}

/* Its scale, of a side that has them. */
static inline const float *kv_scale(const struct kv_side *side, struct kv_plane plane,
                                    int64_t block, int64_t slot)
{
    return plane.scales + (block * side->scale_block_stride + slot * side->scale_token_stride);
}

/* TL_EINVAL in fn's name, with the member and its values, unless the view (not NULL) is sound as
 * kv_view.h says. Whether k and v are NULL is left to fn, which knows if they will be used. Of a
 * sound view n_blocks * block_tokens * n_kv_heads * head_dim_k (likewise v) stays below INT64_MAX,
 * unless n_blocks is 0. */
tl_status tl_kv_view_check(const char *fn, const tl_kv_view *view);

/* The layout of a sound view. */
struct kv_layout tl_kv_layout_of(const tl_kv_view *view);

#endif
