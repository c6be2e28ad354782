/* SPDX-License-Identifier: MIT */
#include "kernels/kv_positions.h"

#include <inttypes.h>

#include "kernels/shapes.h"
#include "runtime/fail.h"

tl_status tl_kv_check_sizes(const struct kv_positions *p)
{
    if (!p->kv)
        return tl_fail(TL_EINVAL, p->fn, "the pool is NULL");
    if (p->layer >= p->kv->cfg.n_layers)
        return tl_fail(TL_EINVAL, p->fn, "layer %u is out of range: the pool has %u", p->layer,
                       p->kv->cfg.n_layers);
    if (p->n_table < 0 || p->pos < 0 || p->T < 0)
        return tl_fail_i64(TL_EINVAL, p->fn, "n_table %lld, pos %lld, T %lld: none may be negative",
                           p->n_table, p->pos, p->T);
    return TL_OK;
}

tl_status tl_kv_check_table(const struct kv_positions *p)
{
    const int64_t b = p->kv->cfg.block_tokens;
    int64_t end;
    if (!p->table || !p->k || !p->v)
        return tl_fail(TL_EINVAL, p->fn, "%s is NULL with T = %" PRId64,
                       !p->table ? "block_table" : !p->k ? "k" : "v", p->T);
    if (__builtin_add_overflow(p->pos, p->T, &end))
        return tl_fail_i64(TL_EINVAL, p->fn, "pos %lld + T %lld pass INT64_MAX", p->pos, p->T);
    if ((end - 1) / b >= p->n_table)
        return tl_fail_i64(
            TL_EINVAL, p->fn,
            "positions %lld .. %lld need %lld table entries of %lld tokens, n_table is %lld",
            p->pos, end - 1, (end - 1) / b + 1, b, p->n_table);
    return TL_OK;
}

tl_status tl_kv_check_tensor(const char *fn, const tl_kv_pool *kv, const struct kv_tensor *tensor)
{
    const struct axis axis[] = {{"head_stride", tensor->head_stride, kv->cfg.n_kv_heads},
                                {"token_stride", tensor->token_stride, tensor->tokens}};
    struct span span;
    if (!tl_span_of(tensor->x, tensor->elem, kv->cfg.head_dim, axis, 2, &span))
        return tl_fail(TL_EINVAL, fn,
                       "%s: head_stride %" PRId64 ", token_stride %" PRId64
                       " pass the address space with %" PRId64 " tokens",
                       tensor->name, tensor->head_stride, tensor->token_stride, tensor->tokens);
    return TL_OK;
}
