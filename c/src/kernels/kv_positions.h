/* SPDX-License-Identifier: MIT */
/* kv_positions.h: some positions of one sequence in a block pool, and the caller's tensors for
 * them: what appending and gathering ask alike. */
#ifndef TL_KV_POSITIONS_H
#define TL_KV_POSITIONS_H

#include "runtime/kv_inner.h"

struct kv_positions {
    const char *fn; /* the public function, for messages */
    const tl_kv_pool *kv;
    uint32_t layer;
    const uint32_t *table;
    int32_t n_table;
    int64_t pos, T;
    const float *k, *v; /* [n_kv_heads][T][head_dim] at these strides */
    int64_t head_stride, token_stride;
};

/* The first three questions of kv_pool.h: all there are where T is 0. */
tl_status tl_kv_check_sizes(const struct kv_positions *p);

/* Those up to the tensors; T > 0. */
tl_status tl_kv_check_table(const struct kv_positions *p);

/* A tensor of `tokens` for every KV head, rows of elem bytes an element. */
struct kv_tensor {
    const char *name; /* k or v */
    const void *x;
    int64_t elem, tokens, head_stride, token_stride;
};

/* TL_EINVAL where some of it lies beyond the address space. */
tl_status tl_kv_check_tensor(const char *fn, const tl_kv_pool *kv, const struct kv_tensor *tensor);

#endif
