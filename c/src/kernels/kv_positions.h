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

/* The entries of a table that n > 0 positions from pos on fall into, and the slot of the first. */
struct kv_entries {
    int64_t first, last, slot;
};

static inline struct kv_entries kv_entries_of(const tl_kv_pool *kv, int64_t pos, int64_t n)
{
    const int64_t b = kv->cfg.block_tokens, first = pos / b, slot = pos - first * b;
    return (struct kv_entries){first, n <= b - slot ? first : first + (slot + n - 1) / b, slot};
}

#endif
