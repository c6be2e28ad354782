/* SPDX-License-Identifier: MIT */
/* paged_rows.c: attention of any rows over a view of paged memory, finished or as states, said in
 * the words of attn_call.h. */
#include <string.h>

#include "kernels/attn_call.h"
#include "kernels/shapes.h"
#include "runtime/fail.h"
#include "runtime/fpenv.h"

/* The arguments of a caller who may know less of them than this version does. */
static tl_status read_args(const char *fn, const tl_paged_attn_args *args, tl_paged_attn_args *all)
{
    if (!args)
        return tl_fail(TL_EINVAL, fn, "args is NULL");
    if (args->size != offsetof(tl_paged_attn_args, trace) &&
        args->size != offsetof(tl_paged_attn_args, first_block) && args->size != sizeof *all)
        return tl_fail(TL_EINVAL, fn, "size = %llu, this version's is %zu",
                       (unsigned long long)args->size, sizeof *all);
    *all = (tl_paged_attn_args){0};
    memcpy(all, args, args->size);
    return TL_OK;
}

static tl_status check_pointers(const char *fn, const tl_paged_attn_args *a, const char *out_name,
                                const float *out)
{
    const char *missing = !a->view           ? "view"
                          : !a->view->k      ? "view: k"
                          : !a->view->v      ? "view: v"
                          : !a->q            ? "q"
                          : !out             ? out_name
                          : !a->ctx_lens     ? "ctx_lens"
                          : !a->block_tables ? "block_tables"
                                             : NULL;
    return missing ? tl_fail(TL_EINVAL, fn, "%s is NULL", missing) : TL_OK;
}

#define INFINITY_BITS 0x7F800000u
#define SIGN_BIT 0x80000000u

static uint32_t bits_of(float x)
{
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* Only here is it a double: the conversion is a float operation, and has to wait for our mode. */
static tl_status fail_softcap(const char *fn, const volatile float *softcap)
{
    const tl_fpenv caller = tl_fpenv_enter();
    (void)tl_fail(TL_EINVAL, fn, "logits_softcap = %g is not a number from 0 up", (double)*softcap);
    tl_fpenv_leave(caller);
    return TL_EINVAL;
}

/* By their bits: to compare a NaN or a subnormal raises flags, or traps, in the caller's mode. */
static tl_status check_scalars(const struct attn_call *c)
{
    const uint32_t softcap = bits_of(c->softcap);
    if ((bits_of(c->scale) & ~SIGN_BIT) > INFINITY_BITS)
        return tl_fail(TL_EINVAL, c->fn, "scale is NaN");
    if (softcap >= INFINITY_BITS && softcap != SIGN_BIT) /* -0 is 0 */
        return fail_softcap(c->fn, &c->softcap);
    return TL_OK;
}

static tl_status check_trace(const char *fn, const tl_trace *t)
{
    if (t && (t->capacity < 0 || !tl_fits_memory(sizeof *t->events, 1, &t->capacity)))
        return tl_fail_i64(TL_EINVAL, fn, "trace: capacity = %lld is no number of events",
                           t->capacity);
    if (t && !t->events && t->capacity > 0)
        return tl_fail_i64(TL_EINVAL, fn, "trace: events is NULL, capacity = %lld", t->capacity);
    return TL_OK;
}

/* What both calls have in common, up to where they write. `out` is that. */
static tl_status read_call(const char *fn, const tl_paged_attn_args *a, const char *out_name,
                           float *out, struct attn_call *c)
{
    TL_TRY(check_pointers(fn, a, out_name, out));
    *c = (struct attn_call){.fn = fn, .B = a->B, .H = a->H, .cu_seqlens_q = a->cu_seqlens_q,
                            .q_len_each = 1, .ctx_lens = a->ctx_lens,
                            .block_tables = a->block_tables, .table_stride = a->table_stride,
                            .table_stride_name = "table_stride", .q = a->q,
                            .q_at = {0, a->q_token_stride, a->q_head_stride}, .out = out,
                            .out_name = out_name, .span_splits = 1, .n_splits = 1,
                            .scale = a->scale, .softcap = a->logits_softcap, .is_causal = true,
                            .window = a->window, .alibi_slopes = a->alibi_slopes, .tp = a->tp,
                            .trace = a->trace};
    TL_TRY(tl_kv_view_check(fn, a->view));
    c->kv = tl_kv_layout_of(a->view);
    TL_TRY(tl_attn_check_batch(c));
    TL_TRY(check_scalars(c));
    return check_trace(fn, a->trace);
}

static tl_status check_shape(struct attn_call *c)
{
    if (c->H < 1 || c->H % c->kv.n_kv_heads != 0)
        return tl_fail_i64(TL_ESHAPE, c->fn,
                           "H = %lld is not a positive multiple of the view's %lld KV heads", c->H,
                           c->kv.n_kv_heads);
    c->group = c->H / c->kv.n_kv_heads;
    return TL_OK;
}

tl_status tl_paged_attn_f32(const tl_paged_attn_args *args)
{
    static const char fn[] = "tl_paged_attn_f32";
    tl_paged_attn_args a;
    struct attn_call c;
    TL_TRY(read_args(fn, args, &a));
    TL_TRY(read_call(fn, &a, "out", a.out, &c));
    if (a.first_block != 0 || a.state_span != 0)
        return tl_fail_i64(TL_EINVAL, fn,
                           "first_block = %lld, state_span = %lld are for states alone",
                           a.first_block, a.state_span);
    TL_TRY(check_shape(&c));
    c.out_at = (struct row_strides){0, a.out_token_stride, a.out_head_stride};
    c.lse = a.lse;
    c.lse_at = (struct row_strides){0, a.H, 1};
    c.sink_logits = a.sink_logits;
    c.workspace = a.workspace;
    c.workspace_bytes = a.workspace ? a.workspace_bytes : 0;
    TL_TRY(tl_attn_check(&c));
    return tl_attn_run(&c);
}

/* ---- states ---- */

static tl_status read_range(const tl_paged_attn_args *a, int64_t first_split, int64_t n_splits,
                            struct attn_call *c)
{
    const int64_t span = a->state_span ? a->state_span : TL_ATTN_SPLIT;
    if (span != TL_ATTN_SPLIT && span != TL_ATTN_STRETCH)
        return tl_fail_i64(TL_EINVAL, c->fn,
                           "state_span = %lld is neither TL_ATTN_SPLIT nor TL_ATTN_STRETCH", span);
    if (a->first_block < 0)
        return tl_fail_i64(TL_EINVAL, c->fn, "first_block = %lld is negative", a->first_block);
    if (first_split < 0 || n_splits < 1 || n_splits > INT64_MAX / TL_ATTN_SPLIT - 1 ||
        first_split > INT64_MAX / TL_ATTN_SPLIT - 1 - n_splits)
        return tl_fail_i64(TL_EINVAL, c->fn,
                           "first_split = %lld, n_splits = %lld: no range of splits", first_split,
                           n_splits);
    c->span_splits = span / TL_ATTN_SPLIT;
    if (first_split % c->span_splits != 0 || n_splits % c->span_splits != 0)
        return tl_fail_i64(TL_EINVAL, c->fn,
                           "first_split = %lld, n_splits = %lld are no multiples of the %lld of a "
                           "stretch", first_split, n_splits, c->span_splits);
    c->to_states = true;
    c->first_block = a->first_block;
    c->first_split = first_split;
    c->n_splits = n_splits;
    return TL_OK;
}

/* How far rows of states are apart; 0 where that does not fit, which tl_attn_check finds. */
static struct row_strides strides_of_states(const struct attn_call *c)
{
    int64_t row, token;
    if (c->kv.v.dim > TL_MAX_HEAD_DIM ||
        __builtin_mul_overflow(c->n_splits / c->span_splits, attn_state_floats(c), &row) ||
        __builtin_mul_overflow(row, c->H, &token))
        return (struct row_strides){0};
    return (struct row_strides){0, token, row};
}

tl_status tl_paged_attn_states_f32(const tl_paged_attn_args *args, int64_t first_split,
                                   int64_t n_splits, float *states)
{
    static const char fn[] = "tl_paged_attn_states_f32";
    tl_paged_attn_args a;
    struct attn_call c;
    TL_TRY(read_args(fn, args, &a));
    TL_TRY(read_call(fn, &a, "states", states, &c));
    TL_TRY(read_range(&a, first_split, n_splits, &c));
    TL_TRY(check_shape(&c));
    c.out_at = strides_of_states(&c);
    TL_TRY(tl_attn_check(&c));
    return tl_attn_run(&c);
}

/* ---- the workspace ---- */

size_t tl_paged_attn_workspace(const tl_paged_attn_args *args)
{
    static const char fn[] = "tl_paged_attn_workspace";
    tl_paged_attn_args a;
    size_t bytes = 0;
    if (read_args(fn, args, &a) != TL_OK)
        return 0;
    if (!a.view || a.B < 0 || a.H < 1) {
        (void)tl_fail(TL_EINVAL, fn, a.view ? "B = %lld, H = %lld" : "view is NULL",
                      (long long)a.B, (long long)a.H);
        return 0;
    }
    const struct attn_call c = {.fn = fn, .H = a.H, .cu_seqlens_q = a.cu_seqlens_q,
                                .q_len_each = 1, .kv.v.dim = a.view->head_dim_v, .tp = a.tp};
    if (!tl_attn_workspace(&c, a.B > 0 ? attn_first_token(&c, a.B) : 0, &bytes))
        (void)tl_fail(TL_EINVAL, fn, "more bytes than memory has");
    return bytes;
}
