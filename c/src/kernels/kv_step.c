/* SPDX-License-Identifier: MIT */
#include "kernels/kv_step.h"

#include <inttypes.h>

#include "kernels/shapes.h"
#include "runtime/fail.h"

tl_status tl_kv_step_check_pointers(const char *fn, const tl_kv_pool *kv,
                                    const struct kv_step *step)
{
    if (!kv)
        return tl_fail(TL_EINVAL, fn, "the pool is NULL");
    if (step->B < 0)
        return tl_fail_i64(TL_EINVAL, fn, "B = %lld is negative", step->B);
    if (step->B > 0 && (!step->block_tables || !step->ctx_lens))
        return tl_fail(TL_EINVAL, fn, "%s is NULL with B = %" PRId64,
                       !step->block_tables ? "block_tables" : "ctx_lens", step->B);
    return TL_OK;
}

tl_status tl_kv_step_check_arrays(const char *fn, const struct kv_step *step)
{
    if (step->table_stride < 1)
        return tl_fail_i64(TL_EINVAL, fn, "table_stride = %lld is below 1", step->table_stride);
    if (!tl_fits_memory(sizeof(uint32_t), 2, (int64_t[]){step->B, step->table_stride}))
        return tl_fail_i64(TL_EINVAL, fn, "B = %lld tables of %lld do not fit in memory", step->B,
                           step->table_stride);
    const struct span span[] = {
        tl_span("ctx_lens", step->ctx_lens, sizeof(int32_t), step->B),
        tl_span("cu_seqlens", step->cu_seqlens, sizeof(int32_t), step->B + 1),
        tl_span("block_tables", step->block_tables, sizeof(uint32_t),
                step->B * step->table_stride)};
    return tl_check_addresses(fn, span, 3);
}

tl_status tl_kv_step_check_cu_seqlens(const char *fn, const struct kv_step *step)
{
    const int32_t *cu = step->cu_seqlens;
    if (cu && cu[0] != 0)
        return tl_fail_i64(TL_EINVAL, fn, "cu_seqlens[0] = %lld is not 0", cu[0]);
    for (int64_t seq = 0; cu && seq < step->B; seq++)
        if (cu[seq + 1] < cu[seq])
            return tl_fail_i64(TL_EINVAL, fn, "cu_seqlens[%lld] = %lld decreases from %lld",
                               seq + 1, cu[seq + 1], cu[seq]);
    return TL_OK;
}

tl_status tl_kv_step_check_lengths(const char *fn, const tl_kv_pool *kv,
                                   const struct kv_step *step)
{
    const int64_t b = kv->cfg.block_tokens;
    for (int64_t seq = 0; seq < step->B; seq++) {
        const int64_t n = kv_first_token(step, seq + 1) - kv_first_token(step, seq),
                      end = step->ctx_lens[seq];
        if (end < n)
            return tl_fail_i64(TL_EINVAL, fn,
                               "sequence %lld: ctx_len = %lld is below its %lld tokens", seq, end,
                               n);
        if (n > 0 && (end - 1) / b >= step->table_stride)
            return tl_fail_i64(TL_EINVAL, fn,
                               "sequence %lld: ctx_len = %lld needs %lld blocks of %lld, "
                               "table_stride = %lld",
                               seq, end, (end - 1) / b + 1, b, step->table_stride);
    }
    return TL_OK;
}
