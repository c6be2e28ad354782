/* SPDX-License-Identifier: MIT */
/* attn_check.c: whether a call can be done: every argument is looked at before the first write. */
#include <stdbool.h>

#include "kernels/attn_call.h"
#include "kernels/shapes.h"
#include "runtime/fail.h"
#include "runtime/pool_run.h"

tl_status tl_attn_check_batch(const struct attn_call *c)
{
    if (c->B < 0)
        return tl_fail_i64(TL_EINVAL, c->fn, "B = %lld is negative", c->B);
    if (c->table_stride < 1)
        return tl_fail(TL_EINVAL, c->fn, "%s = %lld is below 1", c->table_stride_name,
                       (long long)c->table_stride);
    return TL_OK;
}

tl_status tl_attn_check_arrays(const struct attn_call *c)
{
    if (!tl_fits_memory(sizeof(uint32_t), 2, (int64_t[]){c->B, c->table_stride}))
        return tl_fail_i64(TL_EINVAL, c->fn, "B = %lld tables of %lld do not fit in memory", c->B,
                           c->table_stride);
    const struct span span[] = {
        tl_span("ctx_lens", c->ctx_lens, sizeof *c->ctx_lens, c->B),
        tl_span("cu_seqlens_q", c->cu_seqlens_q, sizeof *c->cu_seqlens_q, c->B + 1),
        tl_span("block_tables", c->block_tables, sizeof *c->block_tables,
                c->B * c->table_stride)};
    return tl_check_addresses(c->fn, span, 3);
}

/* ---- sizes ---- */

enum { MAX_SPANS = 15 };

/* The memory of a call: what is written in front, then what is read. */
struct spans {
    int n, n_written;
    struct span of[MAX_SPANS];
};

static void add_span(struct spans *s, struct span span)
{
    s->of[s->n++] = span;
}

static tl_status fail_rows(const struct attn_call *c, const char *name, int64_t dim,
                           struct row_strides at, const char *what)
{
    return tl_fail(TL_EINVAL, c->fn, "%s of [%lld, %lld, %lld] with strides %lld, %lld %s", name,
                   (long long)c->total_q, (long long)c->H, (long long)dim, (long long)at.token,
                   (long long)at.head, what);
}

/* [total_q, H, dim] floats. */
static tl_status add_rows(const struct attn_call *c, struct spans *s, const char *name,
                          const float *base, int64_t dim, struct row_strides at)
{
    const int64_t n = c->total_q > 0 ? c->total_q : 0;
    const struct axis axes[] = {
        {"sequence", at.seq, n ? c->B : 0}, {"token", at.token, n}, {"head", at.head, c->H}};
    struct span span = {.name = name};
    if (!tl_span_of(base, sizeof(float), dim, axes, 3, &span))
        return fail_rows(c, name, dim, at, "does not fit in memory");
    add_span(s, span);
    return TL_OK;
}

/* Rows of out may lie anywhere, but no two in one place. */
static tl_status check_apart(const struct attn_call *c, int64_t dim)
{
    struct axis axes[] = {{"token", c->out_at.token, c->total_q}, {"head", c->out_at.head, c->H}};
    int64_t span;
    if (c->total_q > 0 && c->out_at.seq == 0 && tl_overlapping_axis(dim, axes, 2, &span))
        return fail_rows(c, c->out_name, dim, c->out_at, "has rows that share memory");
    return TL_OK;
}

static tl_status check_dims(const struct attn_call *c)
{
    if (c->kv.k.dim > TL_MAX_HEAD_DIM || c->kv.v.dim > TL_MAX_HEAD_DIM)
        return tl_fail_i64(TL_EUNSUPPORTED, c->fn,
                           "head dims of %lld and %lld: TL_MAX_HEAD_DIM is %lld", c->kv.k.dim,
                           c->kv.v.dim, (int64_t)TL_MAX_HEAD_DIM);
    return TL_OK;
}

static int64_t row_floats(const struct attn_call *c)
{
    return c->to_states ? attn_state_floats(c) * (c->n_splits / c->span_splits) : c->kv.v.dim;
}

static tl_status check_states_size(const struct attn_call *c)
{
    const int64_t n = c->total_q > 0 ? c->total_q : 0;
    if (!c->to_states)
        return TL_OK;
    const int64_t n_states = c->n_splits / c->span_splits;
    if (!tl_fits_memory(sizeof(float), 4, (int64_t[]){n, c->H, n_states, attn_state_floats(c)}))
        return tl_fail_i64(TL_EINVAL, c->fn,
                           "states of [%lld, %lld, %lld, 2 + %lld] do not fit in memory",
                           c->total_q, c->H, n_states, c->kv.v.dim);
    return TL_OK;
}

static tl_status check_sizes(const struct attn_call *c, struct spans *s)
{
    const int64_t n = c->total_q > 0 ? c->total_q : 0;
    s->n = 0;
    TL_TRY(check_states_size(c));
    if (!tl_fits_memory(sizeof(float), 3, (int64_t[]){n, c->H, c->kv.v.dim}))
        return fail_rows(c, c->out_name, c->kv.v.dim, c->out_at, "does not fit in memory");
    TL_TRY(add_rows(c, s, c->out_name, c->out, row_floats(c), c->out_at));
    TL_TRY(check_apart(c, row_floats(c)));
    add_span(s, tl_span("lse", c->lse, sizeof(float), n * c->H));
    add_span(s, tl_span("workspace", c->workspace, 1, (int64_t)c->workspace_bytes));
    add_span(s, tl_span("trace", c->trace ? c->trace->events : NULL, sizeof(tl_trace_event),
                        c->trace ? c->trace->capacity : 0));
    s->n_written = s->n;
    TL_TRY(add_rows(c, s, "q", c->q, c->kv.k.dim, c->q_at));
    return tl_check_addresses(c->fn, s->of, s->n);
}

/* A side of K and V, and its scales; the layout was checked. */
static void add_side(const struct attn_call *c, struct spans *s, const char *name,
                     const char *scale_name, const struct kv_side *side)
{
    const struct axis axes[] = {{"sequence", side->seq_stride, c->block_tables ? 1 : c->B},
                                {"block", side->block_stride, c->kv.n_blocks},
                                {"head", side->head_stride, c->kv.n_kv_heads},
                                {"token", side->token_stride, c->kv.block_tokens}};
    struct span span = {.name = name};
    (void)tl_span_of(side->base, kv_elem_bytes(side->dtype), side->dim, axes, 4, &span);
    add_span(s, span);
    const struct axis scale_axes[] = {{"block", side->scale_block_stride, c->kv.n_blocks},
                                      {"head", side->scale_head_stride, c->kv.n_kv_heads},
                                      {"token", side->scale_token_stride, c->kv.block_tokens}};
    span = (struct span){.name = scale_name};
    (void)tl_span_of(side->scale, sizeof(float), 1, scale_axes, 3, &span);
    add_span(s, span);
}

static tl_status check_overlap(const struct attn_call *c, struct spans *s)
{
    add_side(c, s, c->block_tables ? "the view's k" : "k", "the view's k_scale", &c->kv.k);
    add_side(c, s, c->block_tables ? "the view's v" : "v", "the view's v_scale", &c->kv.v);
    add_span(s, tl_span("ctx_lens", c->ctx_lens, sizeof *c->ctx_lens, c->B));
    add_span(s, tl_span("cu_seqlens_q", c->cu_seqlens_q, sizeof *c->cu_seqlens_q, c->B + 1));
    add_span(s, tl_span("block_tables", c->block_tables, sizeof *c->block_tables,
                        c->B * c->table_stride));
    add_span(s, tl_span("alibi_slopes", c->alibi_slopes, sizeof(float), c->H));
    add_span(s, tl_span("sink_logits", c->sink_logits, sizeof(float), c->H));
    return tl_check_spans(c->fn, s->of, s->n_written, s->n);
}

static tl_status check_workspace(const struct attn_call *c)
{
    size_t bytes;
    if (!c->workspace || c->total_q < 0) /* fewer rows than none: cu_seqlens_q is to blame */
        return TL_OK;
    if ((uintptr_t)c->workspace % _Alignof(float) != 0)
        return tl_fail(TL_EINVAL, c->fn, "workspace at %p is not aligned for floats", c->workspace);
    if (!tl_attn_workspace(c, c->total_q, &bytes) || c->workspace_bytes < bytes)
        return tl_fail(TL_EINVAL, c->fn, "workspace_bytes = %zu, %zu are needed",
                       c->workspace_bytes, bytes);
    return TL_OK;
}

/* ---- sequences ---- */

tl_status tl_attn_check_table(const struct attn_call *c, int64_t seq, struct range seen)
{
    const int64_t b = c->kv.block_tokens;
    if (seen.lo >= seen.hi || !c->block_tables)
        return TL_OK;
    const int64_t first = seen.lo / b - c->first_block,
                  needed = (seen.hi - 1) / b + 1 - c->first_block;
    if (first < 0)
        return tl_fail_i64(TL_EINVAL, c->fn,
                           "sequence %lld: position %lld lies before first_block = %lld", seq,
                           seen.lo, c->first_block);
    if (needed > c->table_stride)
        return tl_fail(TL_EINVAL, c->fn,
                       "sequence %lld: ctx_len = %lld needs %lld blocks of %lld, %s = %lld",
                       (long long)seq, (long long)attn_ctx_len(c, seq), (long long)needed,
                       (long long)b, c->table_stride_name, (long long)c->table_stride);
    const uint32_t *table = attn_table(c, seq);
    for (int64_t i = first; i < needed; i++)
        if (table[i] >= c->kv.n_blocks)
            return tl_fail_i64(TL_EINVAL, c->fn,
                               "sequence %lld: block_table[%lld] = %lld, there are %lld blocks",
                               seq, i, (int64_t)table[i], c->kv.n_blocks);
    return TL_OK;
}

static tl_status check_sequence(const struct attn_call *c, int64_t seq)
{
    const int64_t n = attn_ctx_len(c, seq), rows = attn_q_len(c, seq);
    if (rows < 0)
        return tl_fail_i64(TL_EINVAL, c->fn, "cu_seqlens_q[%lld] = %lld decreases from %lld",
                           seq + 1, attn_first_token(c, seq + 1), attn_first_token(c, seq));
    if (n < 0 || (!c->has_q_offset && n < rows))
        return tl_fail_i64(TL_EINVAL, c->fn,
                           "sequence %lld: ctx_len = %lld is below its %lld rows", seq, n, rows);
    return rows == 0 ? TL_OK : tl_attn_check_table(c, seq, attn_seen_by_all(c, seq));
}

static tl_status check_sequences(const struct attn_call *c)
{
    if (c->cu_seqlens_q && c->cu_seqlens_q[0] != 0)
        return tl_fail_i64(TL_EINVAL, c->fn, "cu_seqlens_q[0] = %lld is not 0",
                           (int64_t)c->cu_seqlens_q[0]);
    for (int64_t seq = 0; seq < c->B; seq++)
        TL_TRY(check_sequence(c, seq));
    return TL_OK;
}

tl_status tl_attn_check(struct attn_call *c)
{
    struct spans spans;
    TL_TRY(check_dims(c));
    TL_TRY(tl_attn_check_arrays(c));
    c->total_q = c->B > 0 ? attn_first_token(c, c->B) : 0;
    TL_TRY(check_sizes(c, &spans));
    TL_TRY(check_workspace(c));
    TL_TRY(tl_kernels_require(c->fn, &c->kernels));
    TL_TRY(check_sequences(c));
    TL_TRY(check_overlap(c, &spans));
    return tl_pool_check(c->fn, c->tp);
}
