/* SPDX-License-Identifier: MIT */
/* paged_attn.c: one decode step over the block pool, said in the words of attn_call.h. */
#include "kernels/attn_call.h"
#include "kernels/shapes.h"
#include "runtime/fail.h"

static const char fn[] = "tl_paged_attn_decode_f32";

static tl_status check_shape(const struct attn_call *c, const tl_kv_cfg *cfg, int64_t Hkv,
                             int64_t D)
{
    if (Hkv != cfg->n_kv_heads || D != cfg->head_dim)
        return tl_fail_i64(TL_ESHAPE, fn, "Hkv = %lld, D = %lld, the pool has %lld, %lld", Hkv, D,
                           (int64_t)cfg->n_kv_heads, (int64_t)cfg->head_dim);
    if (c->H < 1 || c->H % Hkv != 0)
        return tl_fail_i64(TL_ESHAPE, fn, "H = %lld is not a positive multiple of Hkv = %lld",
                           c->H, Hkv);
    if (!tl_fits_memory(sizeof(float), 3, (int64_t[]){c->B > 0 ? c->B : 1, c->H, D}))
        return tl_fail_i64(TL_EINVAL, fn, "q of [%lld, %lld, %lld] does not fit in memory", c->B,
                           c->H, D);
    return TL_OK;
}

tl_status tl_paged_attn_decode_f32(const float *q, const tl_kv_pool *kv, uint32_t layer,
                                   const uint32_t *block_tables, int32_t max_blocks,
                                   const int32_t *ctx_lens, float *out, int64_t B, int64_t H,
                                   int64_t Hkv, int64_t D, float scale, int64_t window, tl_pool *tp)
{
    struct attn_call c = {.fn = fn, .B = B, .H = H, .q_len_each = 1, .ctx_lens = ctx_lens,
                          .block_tables = block_tables, .table_stride = max_blocks,
                          .table_stride_name = "max_blocks", .q = q,
                          .out = out, .out_name = "out", .scale = scale,
                          .is_causal = true, .window = window, .tp = tp};
    tl_kv_view view = {.size = sizeof view};
    tl_kv_cfg cfg;
    const char *missing = !q ? "q" : !kv ? "kv" : !block_tables ? "block_tables"
                          : !ctx_lens ? "ctx_lens" : !out ? "out" : NULL;
    if (missing)
        return tl_fail(TL_EINVAL, fn, "%s is NULL", missing);
    tl_kv_pool_cfg(kv, &cfg);
    TL_TRY(tl_attn_check_batch(&c));
    if (layer >= cfg.n_layers)
        return tl_fail(TL_EINVAL, fn, "layer = %u, the pool has %u", layer, cfg.n_layers);
    TL_TRY(tl_attn_check_arrays(&c));
    TL_TRY(check_shape(&c, &cfg, Hkv, D));
    c.group = H / Hkv;
    c.q_at = c.out_at = (struct row_strides){0, H * D, D};
    TL_TRY(tl_kv_pool_view(kv, layer, &view));
    c.kv = tl_kv_layout_of(&view);
    TL_TRY(tl_attn_check(&c));
    return tl_attn_run(&c);
}
