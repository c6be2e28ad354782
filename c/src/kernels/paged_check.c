/* SPDX-License-Identifier: MIT */
/* paged_check.c: whether a call over paged memory can be done: every argument is looked at before
 * the first write. */
#include <stdbool.h>

#include "kernels/kv_view.h"
#include "kernels/paged_call.h"
#include "kernels/shapes.h"
#include "runtime/fail.h"
#include "runtime/pool_run.h"

static tl_status check_scalars(const struct call *c)
{
    const tl_paged_attn_args *a = c->a;
    if (a->B < 0)
        return tl_fail(TL_EINVAL, c->fn, "B = %lld is negative", (long long)a->B);
    if (a->table_stride < 1)
        return tl_fail(TL_EINVAL, c->fn, "table_stride = %lld is below 1",
                       (long long)a->table_stride);
    if (a->scale != a->scale)
        return tl_fail(TL_EINVAL, c->fn, "scale is NaN");
    if (!(a->logits_softcap >= 0 && a->logits_softcap < INFINITY))
        return tl_fail(TL_EINVAL, c->fn, "logits_softcap = %g is not a number from 0 up",
                       (double)a->logits_softcap);
    return TL_OK;
}

static tl_status check_trace(const struct call *c)
{
    const tl_trace *t = c->a->trace;
    if (t && (t->capacity < 0 || !tl_fits_memory(sizeof *t->events, 1, &t->capacity)))
        return tl_fail(TL_EINVAL, c->fn, "trace: capacity = %lld is no number of events",
                       (long long)t->capacity);
    if (t && !t->events && t->capacity > 0)
        return tl_fail(TL_EINVAL, c->fn, "trace: events is NULL, capacity = %lld",
                       (long long)t->capacity);
    return TL_OK;
}

static tl_status check_pointers(const struct call *c)
{
    const tl_paged_attn_args *a = c->a;
    const char *missing = !a->view           ? "view"
                          : !a->view->k      ? "view: k"
                          : !a->view->v      ? "view: v"
                          : !a->q            ? "q"
                          : !a->out && !c->to_states ? "out"
                          : !a->ctx_lens     ? "ctx_lens"
                          : !a->block_tables ? "block_tables"
                                             : NULL;
    return missing ? tl_fail(TL_EINVAL, c->fn, "%s is NULL", missing) : TL_OK;
}

/* Bytes that the rows [n, H, dim] of floats with these strides reach from their first element, down
 * and up. */
struct reach {
    int64_t below, above;
};

static bool reach_of(int64_t n, int64_t H, int64_t dim, int64_t token_stride, int64_t head_stride,
                     struct reach *reach)
{
    int64_t tokens, heads, low, high;
    *reach = (struct reach){0, 0};
    if (n == 0)
        return true;
    if (__builtin_mul_overflow(n - 1, token_stride, &tokens) ||
        __builtin_mul_overflow(H - 1, head_stride, &heads))
        return false;
    low = (tokens < 0 ? tokens : 0), high = (tokens > 0 ? tokens : 0);
    if (__builtin_add_overflow(low, heads < 0 ? heads : 0, &low) ||
        __builtin_add_overflow(high, heads > 0 ? heads : 0, &high) ||
        __builtin_add_overflow(high, dim, &high) ||
        __builtin_mul_overflow(low, (int64_t)sizeof(float), &reach->below) ||
        __builtin_mul_overflow(high, (int64_t)sizeof(float), &reach->above))
        return false;
    return reach->above - reach->below <= PTRDIFF_MAX;
}

/* Rows of out may lie anywhere, but no two in one place: the longer stride steps over all that the
 * shorter one spans. */
static bool rows_are_apart(int64_t n, int64_t H, int64_t dim, int64_t token_stride,
                           int64_t head_stride)
{
    const bool tokens_inside = token_stride < head_stride;
    const int64_t inner = tokens_inside ? token_stride : head_stride,
                  n_inner = tokens_inside ? n : H;
    const int64_t outer = tokens_inside ? head_stride : token_stride,
                  n_outer = tokens_inside ? H : n;
    return (n_inner <= 1 || inner >= dim) &&
           (n_outer <= 1 || outer >= (n_inner > 1 ? (n_inner - 1) * inner : 0) + dim);
}

static tl_status check_splits(const struct call *c)
{
    if (c->to_states && !c->states)
        return tl_fail(TL_EINVAL, c->fn, "states is NULL");
    if (c->first_split < 0 || c->n_splits < 1 || c->n_splits > INT64_MAX / TL_ATTN_SPLIT - 1 ||
        c->first_split > INT64_MAX / TL_ATTN_SPLIT - 1 - c->n_splits)
        return tl_fail(TL_EINVAL, c->fn, "first_split = %lld, n_splits = %lld: no range of splits",
                       (long long)c->first_split, (long long)c->n_splits);
    return TL_OK;
}

static tl_status check_shape(const struct call *c)
{
    const tl_paged_attn_args *a = c->a;
    if (a->H < 1 || a->H % a->view->n_kv_heads != 0)
        return tl_fail(TL_ESHAPE, c->fn,
                       "H = %lld is not a positive multiple of the view's %lld KV heads",
                       (long long)a->H, (long long)a->view->n_kv_heads);
    return TL_OK;
}

static tl_status check_workspace(const struct call *c)
{
    const tl_paged_attn_args *a = c->a;
    size_t bytes;
    /* fewer rows than none: cu_seqlens_q is to blame */
    if (!a->workspace || c->to_states || c->total_q < 0)
        return TL_OK;
    if ((uintptr_t)a->workspace % _Alignof(float) != 0)
        return tl_fail(TL_EINVAL, c->fn, "workspace at %p is not aligned for floats", a->workspace);
    if (!tl_paged_workspace(a, c->total_q, &bytes) || a->workspace_bytes < bytes)
        return tl_fail(TL_EINVAL, c->fn, "workspace_bytes = %zu, %zu are needed",
                       a->workspace_bytes, bytes);
    return TL_OK;
}

/* Before anything of the batch is read. */
static tl_status check_tables_size(const struct call *c)
{
    if (!tl_fits_memory(sizeof(uint32_t), 2, (int64_t[]){c->a->B, c->a->table_stride}))
        return tl_fail(TL_EINVAL, c->fn, "B = %lld tables of %lld do not fit in memory",
                       (long long)c->a->B, (long long)c->a->table_stride);
    return TL_OK;
}

static tl_status check_out_size(const struct call *c, int64_t n)
{
    const tl_paged_attn_args *a = c->a;
    struct reach reach;
    const bool fits =
        reach_of(n, a->H, a->view->head_dim_v, a->out_token_stride, a->out_head_stride, &reach) &&
        tl_fits_memory(sizeof(float), 3, (int64_t[]){n, a->H, a->view->head_dim_v});
    if (!fits || (n > 0 && !rows_are_apart(n, a->H, a->view->head_dim_v, a->out_token_stride,
                                           a->out_head_stride)))
        return tl_fail(TL_EINVAL, c->fn, "out of [%lld, %lld, %lld] with strides %lld, %lld %s",
                       (long long)n, (long long)a->H, (long long)a->view->head_dim_v,
                       (long long)a->out_token_stride, (long long)a->out_head_stride,
                       fits ? "has rows that share memory" : "does not fit in memory");
    return TL_OK;
}

static tl_status check_states_size(const struct call *c, int64_t n)
{
    const int64_t width = c->a->view->head_dim_v;
    if (width > INT64_MAX - 2 ||
        !tl_fits_memory(sizeof(float), 4, (int64_t[]){n, c->a->H, c->n_splits, 2 + width}))
        return tl_fail(TL_EINVAL, c->fn,
                       "states of [%lld, %lld, %lld, 2 + %lld] do not fit in memory", (long long)n,
                       (long long)c->a->H, (long long)c->n_splits, (long long)width);
    return TL_OK;
}

static tl_status check_size(const struct call *c)
{
    const tl_paged_attn_args *a = c->a;
    struct reach reach;
    const int64_t n = a->B > 0 && c->total_q > 0 ? c->total_q : 0;
    if (!reach_of(n, a->H, a->view->head_dim_k, a->q_token_stride, a->q_head_stride, &reach))
        return tl_fail(TL_EINVAL, c->fn,
                       "q of [%lld, %lld, %lld] with strides %lld, %lld does not fit in memory",
                       (long long)n, (long long)a->H, (long long)a->view->head_dim_k,
                       (long long)a->q_token_stride, (long long)a->q_head_stride);
    return c->states ? check_states_size(c, n) : check_out_size(c, n);
}

static tl_status check_sequence(const struct call *c, int64_t seq)
{
    const tl_paged_attn_args *a = c->a;
    const int64_t n = a->ctx_lens[seq], rows = q_len(c, seq), b = a->view->block_tokens;
    if (rows < 0)
        return tl_fail(TL_EINVAL, c->fn, "cu_seqlens_q[%lld] = %lld decreases from %lld",
                       (long long)seq + 1, (long long)first_token(c, seq + 1),
                       (long long)first_token(c, seq));
    if (n < rows || n < 0)
        return tl_fail(TL_EINVAL, c->fn, "sequence %lld: ctx_len = %lld is below its %lld rows",
                       (long long)seq, (long long)n, (long long)rows);
    if (rows == 0)
        return TL_OK;
    const int64_t needed = (n - 1) / b + 1;
    if (needed > a->table_stride)
        return tl_fail(
            TL_EINVAL, c->fn,
            "sequence %lld: ctx_len = %lld needs %lld blocks of %lld, table_stride = %lld",
            (long long)seq, (long long)n, (long long)needed, (long long)b,
            (long long)a->table_stride);
    const uint32_t *table = a->block_tables + seq * a->table_stride;
    const struct range seen = in_splits(c, first_visible(c, n - rows), n);
    for (int64_t i = seen.lo / b; seen.lo < seen.hi && i * b < seen.hi; i++)
        if (table[i] >= a->view->n_blocks)
            return tl_fail(TL_EINVAL, c->fn,
                           "sequence %lld: block_table[%lld] = %lld, the view has %lld blocks",
                           (long long)seq, (long long)i, (long long)table[i],
                           (long long)a->view->n_blocks);
    return TL_OK;
}

static tl_status check_sequences(const struct call *c)
{
    if (c->a->cu_seqlens_q && c->a->cu_seqlens_q[0] != 0)
        return tl_fail(TL_EINVAL, c->fn, "cu_seqlens_q[0] = %lld is not 0",
                       (long long)c->a->cu_seqlens_q[0]);
    for (int64_t seq = 0; seq < c->a->B; seq++)
        TL_TRY(check_sequence(c, seq));
    return TL_OK;
}

/* The elements of one side of a view, from its base on. */
static size_t side_bytes(const tl_kv_view *v, int64_t dim, int64_t block_stride,
                         int64_t head_stride, int64_t token_stride)
{
    if (v->n_blocks == 0)
        return 0;
    return (size_t)((v->n_blocks - 1) * block_stride + (v->n_kv_heads - 1) * head_stride +
                    (v->block_tokens - 1) * token_stride + dim) *
           (size_t)tl_kv_view_elem(v);
}

static tl_status check_overlap(const struct call *c)
{
    const tl_paged_attn_args *a = c->a;
    const tl_kv_view *v = a->view;
    const bool whole = !c->states;
    struct reach q, out;
    (void)reach_of(c->total_q, a->H, v->head_dim_k, a->q_token_stride, a->q_head_stride, &q);
    (void)reach_of(c->total_q, a->H, v->head_dim_v, a->out_token_stride, a->out_head_stride, &out);
    const size_t rows = (size_t)(c->total_q * a->H);
    enum { WRITTEN = 5 }; /* the first ones; the rest is read */
    const struct {
        const char *name;
        const void *at;
        size_t bytes;
    } span[] = {
        {"states", c->states, rows * (size_t)(c->n_splits * (2 + v->head_dim_v)) * sizeof(float)},
        {"out", whole ? (const char *)a->out + out.below : NULL, (size_t)(out.above - out.below)},
        {"lse", whole ? a->lse : NULL, rows * sizeof(float)},
        {"workspace", whole ? a->workspace : NULL, a->workspace_bytes},
        {"trace", a->trace ? a->trace->events : NULL,
         a->trace ? (size_t)a->trace->capacity * sizeof *a->trace->events : 0},
        {"q", (const char *)a->q + q.below, (size_t)(q.above - q.below)},
        {"the view's k", v->k,
         side_bytes(v, v->head_dim_k, v->k_block_stride, v->k_head_stride, v->k_token_stride)},
        {"the view's v", v->v,
         side_bytes(v, v->head_dim_v, v->v_block_stride, v->v_head_stride, v->v_token_stride)},
        {"ctx_lens", a->ctx_lens, (size_t)a->B * sizeof *a->ctx_lens},
        {"cu_seqlens_q", a->cu_seqlens_q, (size_t)(a->B + 1) * sizeof *a->cu_seqlens_q},
        {"block_tables", a->block_tables,
         (size_t)(a->B * a->table_stride) * sizeof *a->block_tables},
        {"alibi_slopes", a->alibi_slopes, (size_t)a->H * sizeof(float)},
        {"sink_logits", whole ? a->sink_logits : NULL, (size_t)a->H * sizeof(float)}};
    const int n_spans = sizeof span / sizeof span[0];
    for (int i = 0; i < WRITTEN; i++)
        for (int k = i + 1; k < n_spans; k++)
            if (tl_overlap(span[i].at, span[i].bytes, span[k].at, span[k].bytes))
                return tl_fail(TL_EINVAL, c->fn, "%s overlap%s %s", span[i].name, i == 0 ? "" : "s",
                               span[k].name);
    return TL_OK;
}

tl_status tl_paged_check(struct call *c)
{
    const tl_paged_attn_args *a = c->a;
    TL_TRY(check_pointers(c));
    TL_TRY(tl_kv_view_check(c->fn, a->view));
    TL_TRY(check_scalars(c));
    TL_TRY(check_trace(c));
    TL_TRY(check_splits(c));
    TL_TRY(check_shape(c));
    TL_TRY(check_tables_size(c));
    c->total_q = a->B > 0 ? first_token(c, a->B) : 0;
    TL_TRY(check_size(c));
    TL_TRY(check_workspace(c));
    TL_TRY(tl_kernels_require(c->fn, &c->kernels));
    TL_TRY(check_sequences(c));
    TL_TRY(check_overlap(c));
    return tl_pool_check(c->fn, a->tp);
}
