/* SPDX-License-Identifier: MIT */
/* flash_attn.c: prefill over contiguous K and V, said in the words of attn_call.h: each entry of
 * the batch is a sequence of one long block. */
#include "kernels/attn_call.h"
#include "kernels/shapes.h"
#include "runtime/fail.h"

static const char fn[] = "tl_flash_attn_fwd_f32";

struct dims {
    int64_t B, H, Hkv, Tq, Tk, D;
};

static tl_status check_dims(const struct dims *n, int64_t q_offset, int64_t Br, int64_t Bc)
{
    if (n->B < 0 || n->H < 0 || n->Hkv < 0 || n->Tq < 0 || n->Tk < 0 || n->D < 0)
        return tl_fail_i64(TL_EINVAL, fn,
                           "B = %lld, H = %lld, Hkv = %lld, Tq = %lld, Tk = %lld, D = %lld: none "
                           "may be negative", n->B, n->H, n->Hkv, n->Tq, n->Tk, n->D);
    if (n->H > 0 && n->Hkv < 1)
        return tl_fail_i64(TL_EINVAL, fn, "Hkv = %lld with H = %lld", n->Hkv, n->H);
    if (q_offset < 0 || q_offset > INT64_MAX - n->Tq)
        return tl_fail_i64(TL_EINVAL, fn, "q_offset = %lld with Tq = %lld", q_offset, n->Tq);
    if (Br < 0 || Bc < 0)
        return tl_fail_i64(TL_EINVAL, fn, "Br = %lld, Bc = %lld: neither may be negative", Br, Bc);
    if (!tl_fits_memory(sizeof(float), 4, (int64_t[]){n->B, n->H, n->Tq, n->D}) ||
        !tl_fits_memory(sizeof(float), 3, (int64_t[]){n->B, n->H, n->Tq}) ||
        !tl_fits_memory(sizeof(float), 4, (int64_t[]){n->B, n->Hkv, n->Tk, n->D}))
        return tl_fail_i64(TL_EINVAL, fn,
                           "B = %lld, H = %lld, Hkv = %lld, Tq = %lld, Tk = %lld, D = %lld do not "
                           "fit in memory", n->B, n->H, n->Hkv, n->Tq, n->Tk, n->D);
    return TL_OK;
}

static tl_status check_tensors(const struct dims *n, const float *q, const float *k, const float *v,
                               const float *o)
{
    if (n->B == 0 || n->H == 0 || n->Tq == 0 || n->D == 0)
        return TL_OK;
    const char *missing = !q                ? "q"
                          : !o              ? "o"
                          : n->Tk > 0 && !k ? "k"
                          : n->Tk > 0 && !v ? "v"
                                            : NULL;
    return missing ? tl_fail(TL_EINVAL, fn, "%s is NULL", missing) : TL_OK;
}

static struct kv_side side_of(const struct dims *n, const float *base)
{
    static const float nothing;
    const bool is_there = n->Tk > 0 && n->D > 0;
    return (struct kv_side){.dtype = TL_F32, .base = (const char *)(is_there ? base : &nothing),
                            .seq_stride = n->Hkv * n->Tk * n->D, .head_stride = n->Tk * n->D,
                            .token_stride = n->D, .dim = n->D};
}

/* Without a pool the calling thread computes in memory of the arena. */
static tl_status run_in(tl_arena *scratch, struct attn_call *c)
{
    const tl_arena_mark mark = tl_arena_mark_get(scratch);
    c->work = tl_arena_alloc(scratch, sizeof *c->work, _Alignof(struct attn_work));
    const tl_status status = c->work ? tl_attn_run(c)
                                     : tl_fail(TL_ENOMEM, fn, "scratch cannot grow by %zu bytes",
                                               sizeof *c->work);
    tl_arena_reset_to(scratch, mark);
    return status;
}

static tl_status run_in_own_arena(struct attn_call *c)
{
    tl_arena *arena;
    if (tl_arena_create(0, &arena) != TL_OK)
        return tl_fail(TL_ENOMEM, fn, "no memory for scratch");
    const tl_status status = run_in(arena, c);
    tl_arena_destroy(arena);
    return status;
}

tl_status tl_flash_attn_fwd_f32(const float *q, const float *k, const float *v, float *o,
                                float *lse, int64_t B, int64_t H, int64_t Hkv, int64_t Tq,
                                int64_t Tk, int64_t D, float scale, int64_t q_offset, int causal,
                                int64_t window, const float *sink_logits, int64_t Br, int64_t Bc,
                                tl_arena *scratch, tl_pool *tp)
{
    struct dims n = {B, H, Hkv, Tq, Tk, D};
    TL_TRY(check_dims(&n, q_offset, Br, Bc));
    TL_TRY(check_tensors(&n, q, k, v, o));
    if (H > 0 && (Hkv > H || H % Hkv != 0))
        return tl_fail_i64(TL_ESHAPE, fn, "H = %lld is not a multiple of Hkv = %lld", H, Hkv);
    static float nothing; /* what rows of D = 0 point to */
    if (B == 0 || H == 0 || Tq == 0)
        n = (struct dims){.D = D}; /* of nothing the sizes may be anything */
    const struct row_strides rows = {(n.H - 1) * n.Tq * D, D, n.Tq * D};
    struct attn_call c = {.fn = fn, .B = n.B, .H = n.H,
                          .group = n.H > 0 ? H / Hkv : 0, .q_len_each = n.Tq,
                          .ctx_len_each = n.Tk,
                          .has_q_offset = true, .q_offset = q_offset,
                          .kv = {.k = side_of(&n, k), .v = side_of(&n, v),
                                 .n_blocks = 1, .block_tokens = n.Tk, .n_kv_heads = n.Hkv},
                          .table_stride = 1,
                          .q = D > 0 ? q : &nothing, .q_at = rows,
                          .out = D > 0 ? o : &nothing, .out_at = rows, .out_name = "o",
                          .lse = lse, .lse_at = {(n.H - 1) * n.Tq, 1, n.Tq}, .scale = scale,
                          .is_causal = causal != 0, .window = window, .sink_logits = sink_logits,
                          .tp = tp};
    TL_TRY(tl_attn_check(&c));
    if (c.total_q == 0 || tp)
        return tl_attn_run(&c);
    return scratch ? run_in(scratch, &c) : run_in_own_arena(&c);
}
