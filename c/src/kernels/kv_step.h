/* SPDX-License-Identifier: MIT */
/* kv_step.h: the new tokens of a step, as tl_kv_reserve and tl_kv_append are told of them, and what
 * both ask before they look at a table. */
#ifndef TL_KV_STEP_H
#define TL_KV_STEP_H

#include "runtime/kv_inner.h"

struct kv_step {
    const uint32_t *block_tables;
    int64_t table_stride;
    const int32_t *cu_seqlens, *ctx_lens;
    int64_t B;
};

/* The number of a sequence's first token; of sequence B: how many tokens there are. */
static inline int64_t kv_first_token(const struct kv_step *step, int64_t seq)
{
    return step->cu_seqlens ? step->cu_seqlens[seq] : seq;
}

/* TL_EINVAL in fn's name, in this order: a NULL pool or B < 0, or tables or lengths that are NULL;
 * arrays that cannot be; cu_seqlens that do not begin at 0 or decrease; and last, of a sequence, a
 * length below its tokens or past its table. */
tl_status tl_kv_step_check_pointers(const char *fn, const tl_kv_pool *kv,
                                    const struct kv_step *step);
tl_status tl_kv_step_check_arrays(const char *fn, const struct kv_step *step);
tl_status tl_kv_step_check_cu_seqlens(const char *fn, const struct kv_step *step);
tl_status tl_kv_step_check_lengths(const char *fn, const tl_kv_pool *kv,
                                   const struct kv_step *step);

#endif
