/* SPDX-License-Identifier: MIT */
/* paged_rows.c: attention of any rows of any sequences over a view of paged memory, finished or as states of a range of
 * splits. Arguments are checked whole, then the work is cut into units of one KV head and a few neighbouring tokens of the
 * batch, whose rows share walks over K and V as far as they belong to one sequence.
 *
 * Words. token: one of the total_q = cu_seqlens_q[B] query positions of the batch; a token has H rows. hand: a worker, and what
 * it computes in. */
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "kernels/attn_rows.h"
#include "kernels/kernels.h"
#include "kernels/kv_view.h"
#include "kernels/shapes.h"
#include "kernels/sharing.h"
#include "kernels/trace.h"
#include "runtime/fail.h"
#include "runtime/fpenv.h"
#include "runtime/pool_run.h"

static const char *const WHOLE = "tl_paged_attn_f32", *const STATES = "tl_paged_attn_states_f32";

struct call {
    const char *fn;
    const tl_paged_attn_args *a;
    float *states; /* NULL: rows are finished; else [row][state_stride][2 + v_dim], those of splits first_split .. in front */
    int64_t first_split, n_splits, state_stride;
    const struct tl_kernels *kernels;
    struct kv_view view;
    int64_t Hkv, group, total_q;
    int64_t unit_tokens, n_units; /* tokens of a unit; units: the KV heads of some tokens one after the other, then the next tokens */
};

struct hand {
    struct attn_work work;
    int worker;
};

/* ---- the batch ---- */

/* The first token of sequence seq, and of the one behind it. */
static int64_t first_token(const struct call *c, int64_t seq)
{
    return c->a->cu_seqlens_q ? c->a->cu_seqlens_q[seq] : seq;
}

static int64_t q_len(const struct call *c, int64_t seq)
{
    return first_token(c, seq + 1) - first_token(c, seq);
}

/* The sequence of a token: the last that begins at or before it and has rows. */
static int64_t sequence_of(const struct call *c, int64_t token)
{
    int64_t lo = 0, hi = c->a->B - 1;
    while (lo < hi) {
        const int64_t mid = hi - (hi - lo) / 2;
        if (first_token(c, mid) <= token)
            lo = mid;
        else
            hi = mid - 1;
    }
    return lo;
}

/* The first position that a row at position p sees. */
static int64_t first_visible(const struct call *c, int64_t p)
{
    return c->a->window > 0 && c->a->window <= p ? p - c->a->window + 1 : 0;
}

struct range {
    int64_t lo, hi;
};

/* Positions lo .. hi-1, as far as the call is asked for their splits. */
static struct range in_splits(const struct call *c, int64_t lo, int64_t hi)
{
    const int64_t first = c->first_split * TL_ATTN_SPLIT, end = (c->first_split + c->n_splits) * TL_ATTN_SPLIT;
    return c->states ? (struct range){lo > first ? lo : first, hi < end ? hi : end} : (struct range){lo, hi};
}

/* ---- checks ---- */

static tl_status check_scalars(const struct call *c)
{
    const tl_paged_attn_args *a = c->a;
    if (a->B < 0)
        return tl_fail(TL_EINVAL, c->fn, "B = %lld is negative", (long long)a->B);
    if (a->table_stride < 1)
        return tl_fail(TL_EINVAL, c->fn, "table_stride = %lld is below 1", (long long)a->table_stride);
    if (a->scale != a->scale)
        return tl_fail(TL_EINVAL, c->fn, "scale is NaN");
    if (!(a->logits_softcap >= 0 && a->logits_softcap < INFINITY))
        return tl_fail(TL_EINVAL, c->fn, "logits_softcap = %g is not a number from 0 up", (double)a->logits_softcap);
    return TL_OK;
}

static tl_status check_trace(const struct call *c)
{
    const tl_trace *t = c->a->trace;
    if (t && (t->capacity < 0 || !tl_fits_memory(sizeof *t->events, 1, &t->capacity)))
        return tl_fail(TL_EINVAL, c->fn, "trace: capacity = %lld is no number of events", (long long)t->capacity);
    if (t && !t->events && t->capacity > 0)
        return tl_fail(TL_EINVAL, c->fn, "trace: events is NULL, capacity = %lld", (long long)t->capacity);
    return TL_OK;
}

static tl_status check_pointers(const struct call *c)
{
    const tl_paged_attn_args *a = c->a;
    const char *missing = !a->view           ? "view"
                          : !a->view->k      ? "view: k"
                          : !a->view->v      ? "view: v"
                          : !a->q            ? "q"
                          : !a->out && c->fn == WHOLE ? "out"
                          : !a->ctx_lens     ? "ctx_lens"
                          : !a->block_tables ? "block_tables"
                                             : NULL;
    return missing ? tl_fail(TL_EINVAL, c->fn, "%s is NULL", missing) : TL_OK;
}

/* Bytes that the rows [n, H, dim] of floats with these strides reach from their first element, down and up. */
struct reach {
    int64_t below, above;
};

static bool reach_of(int64_t n, int64_t H, int64_t dim, int64_t token_stride, int64_t head_stride, struct reach *reach)
{
    int64_t tokens, heads, low, high;
    *reach = (struct reach){0, 0};
    if (n == 0)
        return true;
    if (__builtin_mul_overflow(n - 1, token_stride, &tokens) || __builtin_mul_overflow(H - 1, head_stride, &heads))
        return false;
    low = (tokens < 0 ? tokens : 0), high = (tokens > 0 ? tokens : 0);
    if (__builtin_add_overflow(low, heads < 0 ? heads : 0, &low) || __builtin_add_overflow(high, heads > 0 ? heads : 0, &high) ||
        __builtin_add_overflow(high, dim, &high) || __builtin_mul_overflow(low, (int64_t)sizeof(float), &reach->below) ||
        __builtin_mul_overflow(high, (int64_t)sizeof(float), &reach->above))
        return false;
    return reach->above - reach->below <= PTRDIFF_MAX;
}

/* Rows of out may lie anywhere, but no two in one place: the longer stride steps over all that the shorter one spans. */
static bool rows_are_apart(int64_t n, int64_t H, int64_t dim, int64_t token_stride, int64_t head_stride)
{
    const bool tokens_inside = token_stride < head_stride;
    const int64_t inner = tokens_inside ? token_stride : head_stride, n_inner = tokens_inside ? n : H;
    const int64_t outer = tokens_inside ? head_stride : token_stride, n_outer = tokens_inside ? H : n;
    return (n_inner <= 1 || inner >= dim) && (n_outer <= 1 || outer >= (n_inner > 1 ? (n_inner - 1) * inner : 0) + dim);
}

static tl_status check_splits(const struct call *c)
{
    if (c->fn == STATES && !c->states)
        return tl_fail(TL_EINVAL, c->fn, "states is NULL");
    if (c->first_split < 0 || c->n_splits < 1 || c->n_splits > INT64_MAX / TL_ATTN_SPLIT - 1 ||
        c->first_split > INT64_MAX / TL_ATTN_SPLIT - 1 - c->n_splits)
        return tl_fail(TL_EINVAL, c->fn, "first_split = %lld, n_splits = %lld: no range of splits", (long long)c->first_split,
                       (long long)c->n_splits);
    return TL_OK;
}

static tl_status check_shape(const struct call *c)
{
    const tl_paged_attn_args *a = c->a;
    if (a->H < 1 || a->H % a->view->n_kv_heads != 0)
        return tl_fail(TL_ESHAPE, c->fn, "H = %lld is not a positive multiple of the view's %lld KV heads", (long long)a->H,
                       (long long)a->view->n_kv_heads);
    return TL_OK;
}

/* Splits of a row that a wave works on. */
static int64_t wave_splits(const tl_pool *tp)
{
    return TL_ATTN_WAVE_SPLITS * (int64_t)tl_pool_threads(tp);
}

/* False where it would wrap. */
static bool workspace_size(const tl_paged_attn_args *a, int64_t total_q, size_t *bytes)
{
    int64_t floats, rows;
    *bytes = 0;
    if (tl_pool_threads(a->tp) == 1)
        return true;
    if (__builtin_add_overflow(a->view->head_dim_v, 2, &floats) || __builtin_mul_overflow(floats, wave_splits(a->tp), &floats) ||
        __builtin_add_overflow(floats, 2, &floats) || __builtin_mul_overflow(total_q, a->H, &rows) ||
        __builtin_mul_overflow(floats, rows, &floats) || floats < 0 || floats > PTRDIFF_MAX / (int64_t)sizeof(float))
        return false;
    *bytes = (size_t)floats * sizeof(float);
    return true;
}

static tl_status check_workspace(const struct call *c)
{
    const tl_paged_attn_args *a = c->a;
    size_t bytes;
    if (!a->workspace || c->fn == STATES || c->total_q < 0) /* fewer rows than none: cu_seqlens_q is to blame */
        return TL_OK;
    if ((uintptr_t)a->workspace % _Alignof(float) != 0)
        return tl_fail(TL_EINVAL, c->fn, "workspace at %p is not aligned for floats", a->workspace);
    if (!workspace_size(a, c->total_q, &bytes) || a->workspace_bytes < bytes)
        return tl_fail(TL_EINVAL, c->fn, "workspace_bytes = %zu, %zu are needed", a->workspace_bytes, bytes);
    return TL_OK;
}

/* Before anything of the batch is read. */
static tl_status check_tables_size(const struct call *c)
{
    if (!tl_fits_memory(sizeof(uint32_t), 2, (int64_t[]){c->a->B, c->a->table_stride}))
        return tl_fail(TL_EINVAL, c->fn, "B = %lld tables of %lld do not fit in memory", (long long)c->a->B, (long long)c->a->table_stride);
    return TL_OK;
}

static tl_status check_out_size(const struct call *c, int64_t n)
{
    const tl_paged_attn_args *a = c->a;
    struct reach reach;
    const bool fits = reach_of(n, a->H, a->view->head_dim_v, a->out_token_stride, a->out_head_stride, &reach) &&
                      tl_fits_memory(sizeof(float), 3, (int64_t[]){n, a->H, a->view->head_dim_v});
    if (!fits || (n > 0 && !rows_are_apart(n, a->H, a->view->head_dim_v, a->out_token_stride, a->out_head_stride)))
        return tl_fail(TL_EINVAL, c->fn, "out of [%lld, %lld, %lld] with strides %lld, %lld %s", (long long)n, (long long)a->H,
                       (long long)a->view->head_dim_v, (long long)a->out_token_stride, (long long)a->out_head_stride,
                       fits ? "has rows that share memory" : "does not fit in memory");
    return TL_OK;
}

static tl_status check_states_size(const struct call *c, int64_t n)
{
    const int64_t width = c->a->view->head_dim_v;
    if (width > INT64_MAX - 2 || !tl_fits_memory(sizeof(float), 4, (int64_t[]){n, c->a->H, c->n_splits, 2 + width}))
        return tl_fail(TL_EINVAL, c->fn, "states of [%lld, %lld, %lld, 2 + %lld] do not fit in memory", (long long)n, (long long)c->a->H,
                       (long long)c->n_splits, (long long)width);
    return TL_OK;
}

static tl_status check_size(const struct call *c)
{
    const tl_paged_attn_args *a = c->a;
    struct reach reach;
    const int64_t n = a->B > 0 && c->total_q > 0 ? c->total_q : 0;
    if (!reach_of(n, a->H, a->view->head_dim_k, a->q_token_stride, a->q_head_stride, &reach))
        return tl_fail(TL_EINVAL, c->fn, "q of [%lld, %lld, %lld] with strides %lld, %lld does not fit in memory", (long long)n, (long long)a->H,
                       (long long)a->view->head_dim_k, (long long)a->q_token_stride, (long long)a->q_head_stride);
    return c->states ? check_states_size(c, n) : check_out_size(c, n);
}

static tl_status check_sequence(const struct call *c, int64_t seq)
{
    const tl_paged_attn_args *a = c->a;
    const int64_t n = a->ctx_lens[seq], rows = q_len(c, seq), b = a->view->block_tokens;
    if (rows < 0)
        return tl_fail(TL_EINVAL, c->fn, "cu_seqlens_q[%lld] = %lld decreases from %lld", (long long)seq + 1, (long long)first_token(c, seq + 1),
                       (long long)first_token(c, seq));
    if (n < rows || n < 0)
        return tl_fail(TL_EINVAL, c->fn, "sequence %lld: ctx_len = %lld is below its %lld rows", (long long)seq, (long long)n,
                       (long long)rows);
    if (rows == 0)
        return TL_OK;
    const int64_t needed = (n - 1) / b + 1;
    if (needed > a->table_stride)
        return tl_fail(TL_EINVAL, c->fn, "sequence %lld: ctx_len = %lld needs %lld blocks of %lld, table_stride = %lld", (long long)seq,
                       (long long)n, (long long)needed, (long long)b, (long long)a->table_stride);
    const uint32_t *table = a->block_tables + seq * a->table_stride;
    const struct range seen = in_splits(c, first_visible(c, n - rows), n);
    for (int64_t i = seen.lo / b; seen.lo < seen.hi && i * b < seen.hi; i++)
        if (table[i] >= a->view->n_blocks)
            return tl_fail(TL_EINVAL, c->fn, "sequence %lld: block_table[%lld] = %lld, the view has %lld blocks", (long long)seq,
                           (long long)i, (long long)table[i], (long long)a->view->n_blocks);
    return TL_OK;
}

static tl_status check_sequences(const struct call *c)
{
    if (c->a->cu_seqlens_q && c->a->cu_seqlens_q[0] != 0)
        return tl_fail(TL_EINVAL, c->fn, "cu_seqlens_q[0] = %lld is not 0", (long long)c->a->cu_seqlens_q[0]);
    for (int64_t seq = 0; seq < c->a->B; seq++)
        TL_TRY(check_sequence(c, seq));
    return TL_OK;
}

/* The elements of one side of a view, from its base on. */
static size_t side_bytes(const tl_kv_view *v, int64_t dim, int64_t block_stride, int64_t head_stride, int64_t token_stride)
{
    if (v->n_blocks == 0)
        return 0;
    return (size_t)((v->n_blocks - 1) * block_stride + (v->n_kv_heads - 1) * head_stride + (v->block_tokens - 1) * token_stride + dim) *
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
    } span[] = {{"states", c->states, rows * (size_t)(c->n_splits * (2 + v->head_dim_v)) * sizeof(float)},
                {"out", whole ? (const char *)a->out + out.below : NULL, (size_t)(out.above - out.below)},
                {"lse", whole ? a->lse : NULL, rows * sizeof(float)},
                {"workspace", whole ? a->workspace : NULL, a->workspace_bytes},
                {"trace", a->trace ? a->trace->events : NULL, a->trace ? (size_t)a->trace->capacity * sizeof *a->trace->events : 0},
                {"q", (const char *)a->q + q.below, (size_t)(q.above - q.below)},
                {"the view's k", v->k, side_bytes(v, v->head_dim_k, v->k_block_stride, v->k_head_stride, v->k_token_stride)},
                {"the view's v", v->v, side_bytes(v, v->head_dim_v, v->v_block_stride, v->v_head_stride, v->v_token_stride)},
                {"ctx_lens", a->ctx_lens, (size_t)a->B * sizeof *a->ctx_lens},
                {"cu_seqlens_q", a->cu_seqlens_q, (size_t)(a->B + 1) * sizeof *a->cu_seqlens_q},
                {"block_tables", a->block_tables, (size_t)(a->B * a->table_stride) * sizeof *a->block_tables},
                {"alibi_slopes", a->alibi_slopes, (size_t)a->H * sizeof(float)},
                {"sink_logits", whole ? a->sink_logits : NULL, (size_t)a->H * sizeof(float)}};
    const int n_spans = sizeof span / sizeof span[0];
    for (int i = 0; i < WRITTEN; i++)
        for (int k = i + 1; k < n_spans; k++)
            if (tl_overlap(span[i].at, span[i].bytes, span[k].at, span[k].bytes))
                return tl_fail(TL_EINVAL, c->fn, "%s overlap%s %s", span[i].name, i == 0 ? "" : "s", span[k].name);
    return TL_OK;
}

/* ---- the work ---- */

/* Where a finished row goes. */
static struct attn_end end_of(const struct call *c, int64_t token, int64_t head)
{
    const tl_paged_attn_args *a = c->a;
    return (struct attn_end){.out = a->out + token * a->out_token_stride + head * a->out_head_stride,
                             .lse = a->lse ? a->lse + token * a->H + head : NULL,
                             .sink = a->sink_logits ? a->sink_logits[head] : -INFINITY, .dim = c->view.v_dim};
}

static struct attn_row row_of(const struct call *c, int64_t token, int64_t head, int64_t pos)
{
    const tl_paged_attn_args *a = c->a;
    struct attn_row row = {.q = a->q + token * a->q_token_stride + head * a->q_head_stride, .sink = -INFINITY,
                           .slope = a->alibi_slopes ? a->alibi_slopes[head] : 0, .pos = pos, .lo = first_visible(c, pos), .hi = pos + 1};
    if (c->states) {
        row.state = c->states + (token * a->H + head) * c->state_stride * (2 + c->view.v_dim);
    } else {
        const struct attn_end end = end_of(c, token, head);
        row.out = end.out, row.lse = end.lse, row.sink = end.sink;
    }
    return row;
}

/* The state of a split is what is left of a row that sees nothing else. */
static void keep_states(const struct call *c, const struct attn_job *job, struct attn_row *row)
{
    struct attn_row whole[ATTN_ROWS];
    memcpy(whole, row, (size_t)job->n_rows * sizeof *row);
    for (int64_t split = c->first_split; split < c->first_split + c->n_splits; split++) {
        const int64_t first = split * TL_ATTN_SPLIT, end = first + TL_ATTN_SPLIT;
        for (int r = 0; r < job->n_rows; r++) {
            row[r].lo = whole[r].lo > first ? whole[r].lo : first;
            row[r].hi = whole[r].hi < end ? whole[r].hi : end;
            row[r].state = whole[r].state + (split - c->first_split) * (2 + c->view.v_dim);
            row[r].out = row[r].state + 2;
        }
        c->kernels->attn_rows(job);
    }
}

static struct attn_job job_of(const struct call *c, int64_t seq, int64_t kv_head, struct attn_row *row, struct hand *hand)
{
    return (struct attn_job){.view = &c->view, .block_table = c->a->block_tables + seq * c->a->table_stride, .kv_head = kv_head,
                             .scale = c->a->scale, .softcap = c->a->logits_softcap, .has_alibi = c->a->alibi_slopes != NULL,
                             .work = &hand->work, .row = row};
}

/* Position of token 0, were it of this sequence. */
static int64_t position_of_zero(const struct call *c, int64_t seq)
{
    return c->a->ctx_lens[seq] - first_token(c, seq + 1);
}

/* Writes down what a hand did since begin_ns: tokens [first, end), from sequence seq on, over positions lo .. hi-1. */
static void note(const struct call *c, const struct hand *hand, int32_t what, int64_t seq, int64_t kv_head, int64_t first, int64_t end,
                 struct range seen, int64_t begin_ns)
{
    const int64_t first_split = seen.lo / TL_ATTN_SPLIT, end_split = seen.lo < seen.hi ? (seen.hi - 1) / TL_ATTN_SPLIT + 1 : first_split;
    trace_add(c->a->trace, (tl_trace_event){hand->worker, what, seq, kv_head, first, end - first, first_split, end_split - first_split,
                                            begin_ns, 0});
}

/* Rows of tokens [first, end) of one sequence and KV head; from position `from` on, with what `carry` holds, if that is not
 * NULL. `next`: what is walked afterwards, or NULL. */
static void attend_tokens(const struct call *c, int64_t seq, int64_t kv_head, int64_t first, int64_t end, int64_t from,
                          struct attn_state *carry, const struct attn_path *next, struct hand *hand)
{
    const int64_t n_rows = (end - first) * c->group, max_rows = attn_max_rows(c->view.k_dim, c->view.v_dim);
    const int64_t begin_ns = trace_now(c->a->trace), zero = position_of_zero(c, seq);
    struct attn_row row[ATTN_ROWS];
    struct attn_job job = job_of(c, seq, kv_head, row, hand);
    job.resumes = carry != NULL;
    for (int64_t i = 0; i < n_rows; i += job.n_rows) {
        job.n_rows = (int)(n_rows - i < max_rows ? n_rows - i : max_rows);
        job.next = i + job.n_rows < n_rows ? NULL : next;
        for (int r = 0; r < job.n_rows; r++) {
            const int64_t token = first + (i + r) / c->group, head = kv_head * c->group + (i + r) % c->group;
            row[r] = row_of(c, token, head, zero + token);
            if (carry) {
                row[r].lo = from;
                row[r].carry = carry + i + r;
            }
        }
        if (c->states)
            keep_states(c, &job, row);
        else
            c->kernels->attn_rows(&job);
    }
    note(c, hand, TL_TRACE_ROWS, seq, kv_head, first, end, in_splits(c, carry ? from : first_visible(c, zero + first), zero + end), begin_ns);
}

/* ---- prefixes that sequences share ---- */

/* Whole splits that two sequences have in the same blocks, and that every row of both sees. */
static int64_t shared_splits(const struct call *c, int64_t x, int64_t y)
{
    const tl_paged_attn_args *a = c->a;
    const uint32_t *tx = a->block_tables + x * a->table_stride, *ty = a->block_tables + y * a->table_stride;
    const int64_t seen_x = a->ctx_lens[x] - q_len(c, x) + 1, seen_y = a->ctx_lens[y] - q_len(c, y) + 1, b = a->view->block_tokens;
    const int64_t most = (seen_x < seen_y ? seen_x : seen_y) / TL_ATTN_SPLIT * TL_ATTN_SPLIT;
    int64_t i = 0;
    while (i * b < most && tx[i] == ty[i])
        i++;
    return (i * b < most ? i * b : most) / TL_ATTN_SPLIT;
}

static bool may_share(const struct call *c)
{
    return c->a->B > 1 && c->a->window <= 0 && !c->states;
}

static bool any_shared(const struct call *c)
{
    for (int64_t seq = 0; may_share(c) && seq + 1 < c->a->B; seq++)
        if (q_len(c, seq) > 0 && q_len(c, seq + 1) > 0 && shared_splits(c, seq, seq + 1) > 0)
            return true;
    return false;
}

/* Tokens [first, end), at most a job's rows, of sequences from seq on that share n_splits splits: one walk over those for all,
 * then each sequence by itself. */
static void attend_sharing(const struct call *c, int64_t seq, int64_t kv_head, int64_t first, int64_t end, int64_t n_splits,
                           struct hand *hand)
{
    struct attn_row row[ATTN_ROWS];
    struct attn_state carry[ATTN_ROWS];
    struct attn_job job = job_of(c, seq, kv_head, row, hand);
    const int64_t begin_ns = trace_now(c->a->trace);
    job.suspends = true;
    for (int64_t token = first, s = seq; token < end; token++) {
        while (first_token(c, s + 1) <= token)
            s++;
        for (int64_t g = 0; g < c->group; g++, job.n_rows++) {
            row[job.n_rows] = row_of(c, token, kv_head * c->group + g, position_of_zero(c, s) + token);
            row[job.n_rows].hi = n_splits * TL_ATTN_SPLIT;
            row[job.n_rows].carry = &carry[job.n_rows];
        }
    }
    c->kernels->attn_rows(&job);
    note(c, hand, TL_TRACE_SHARED, seq, kv_head, first, end, (struct range){0, n_splits * TL_ATTN_SPLIT}, begin_ns);
    for (int64_t token = first, to; token < end; token = to, seq++) {
        to = first_token(c, seq + 1) < end ? first_token(c, seq + 1) : end;
        if (to > token)
            attend_tokens(c, seq, kv_head, token, to, n_splits * TL_ATTN_SPLIT, carry + (token - first) * c->group, NULL, hand);
    }
}

/* Where the sequences end, among tokens before `end`, that share as many splits with sequence seq as the next one does. */
static int64_t end_of_sharing(const struct call *c, int64_t seq, int64_t end, int64_t *n_splits)
{
    int64_t s = seq + 1;
    *n_splits = s < c->a->B && first_token(c, s) < end && q_len(c, s) > 0 ? shared_splits(c, seq, s) : 0;
    while (*n_splits > 0 && s < c->a->B && first_token(c, s) < end && q_len(c, s) > 0 && shared_splits(c, seq, s) >= *n_splits)
        s++;
    return first_token(c, s) < end ? first_token(c, s) : end;
}

/* What the first rows of a unit walk. */
static struct attn_path path_of(const struct call *c, int64_t unit)
{
    const int64_t token = unit / c->Hkv * c->unit_tokens, seq = sequence_of(c, token), pos = position_of_zero(c, seq) + token;
    return (struct attn_path){c->a->block_tables + seq * c->a->table_stride, unit % c->Hkv, first_visible(c, pos), pos + 1};
}

static void attend_unit(const struct call *c, int64_t unit, const struct attn_path *next, struct hand *hand)
{
    const int64_t kv_head = unit % c->Hkv, begin = unit / c->Hkv * c->unit_tokens;
    const int64_t end = begin + c->unit_tokens < c->total_q ? begin + c->unit_tokens : c->total_q;
    for (int64_t token = begin, seq = sequence_of(c, begin), to, n_splits = 0; token < end; token = to) {
        while (first_token(c, seq + 1) <= token)
            seq++;
        to = may_share(c) ? end_of_sharing(c, seq, end, &n_splits) : first_token(c, seq + 1);
        to = to < end ? to : end;
        if (n_splits > 0)
            attend_sharing(c, seq, kv_head, token, to, n_splits, hand);
        else
            attend_tokens(c, seq, kv_head, token, to, 0, NULL, to == end ? next : NULL, hand);
    }
}

static void attend_units(void *ctx, int64_t lo, int64_t hi, int worker)
{
    const struct call *c = ctx;
    struct hand hand;
    hand.worker = worker;
    for (int64_t unit = lo; unit < hi; unit++) {
        const struct attn_path next = path_of(c, unit + 1 < hi ? unit + 1 : unit);
        attend_unit(c, unit, unit + 1 < hi ? &next : NULL, &hand);
    }
}

/* ---- splits side by side ---- */

/* What a workspace holds: (m, L) of every row, and the states of the splits of a wave, [row][n_splits][2 + v_dim]. */
struct waves {
    struct call c; /* states, first_split, n_splits: of the wave */
    struct attn_state *merged;
    bool last;
};

/* Unit number unit of a wave: one split of one of the call's units. */
static void attend_splits(void *ctx, int64_t lo, int64_t hi, int worker)
{
    const struct waves *w = ctx;
    struct hand hand;
    hand.worker = worker;
    for (int64_t i = lo; i < hi; i++) {
        const int64_t k = i % w->c.n_splits;
        struct call one = w->c;
        one.first_split += k;
        one.n_splits = 1;
        one.states += k * (2 + one.view.v_dim);
        attend_unit(&one, i / w->c.n_splits, NULL, &hand);
    }
}

static void merge_rows(void *ctx, int64_t lo, int64_t hi, int worker)
{
    const struct waves *w = ctx;
    const struct call *c = &w->c;
    const int64_t begin = trace_now(c->a->trace), H = c->a->H;
    for (int64_t i = lo; i < hi; i++) {
        const struct attn_end end = end_of(c, i / H, i % H);
        c->kernels->attn_join_row(&end, &w->merged[i], c->states + i * c->state_stride * (2 + end.dim), c->n_splits, w->last);
    }
    trace_add(c->a->trace, (tl_trace_event){worker, TL_TRACE_MERGE, -1, -1, lo / H, (hi - 1) / H + 1 - lo / H, c->first_split, c->n_splits,
                                            begin, 0});
}

/* The splits that any row sees. */
static struct range all_splits(const struct call *c)
{
    struct range splits = {INT64_MAX, 0};
    for (int64_t seq = 0; seq < c->a->B; seq++) {
        const int64_t n = c->a->ctx_lens[seq], rows = q_len(c, seq);
        if (rows == 0)
            continue;
        const int64_t lo = first_visible(c, n - rows) / TL_ATTN_SPLIT, hi = (n - 1) / TL_ATTN_SPLIT + 1;
        splits.lo = lo < splits.lo ? lo : splits.lo;
        splits.hi = hi > splits.hi ? hi : splits.hi;
    }
    return splits;
}

/* Wave by wave: the states of some splits side by side, then their merge, in order. */
static tl_status run_in_waves(const struct call *c, struct range splits)
{
    const int64_t n_rows = c->total_q * c->a->H, most = wave_splits(c->a->tp);
    struct waves w = {.c = *c, .merged = c->a->workspace};
    w.c.states = (float *)(w.merged + n_rows);
    w.c.state_stride = most;
    for (int64_t i = 0; i < n_rows; i++)
        w.merged[i] = (struct attn_state){-INFINITY, 0};
    for (int64_t first = splits.lo; first < splits.hi; first += most) {
        w.c.first_split = first;
        w.c.n_splits = splits.hi - first < most ? splits.hi - first : most;
        w.last = first + w.c.n_splits == splits.hi;
        TL_TRY(tl_pool_run(c->fn, c->a->tp, c->n_units * w.c.n_splits, 1, attend_splits, &w));
        TL_TRY(tl_pool_run(c->fn, c->a->tp, n_rows, (n_rows - 1) / tl_pool_threads(c->a->tp) + 1, merge_rows, &w));
    }
    return TL_OK;
}

/* ---- how the work is shared ---- */

enum { UNITS_ENOUGH = 4 }; /* for each thread: then whole walks balance well enough */

/* Keys that the rows of all sequences see, once for each of a sequence's tokens. */
static double seen_keys(const struct call *c)
{
    double n = 0;
    for (int64_t seq = 0; seq < c->a->B; seq++) {
        const int64_t ctx = c->a->ctx_lens[seq];
        n += (double)q_len(c, seq) * (double)(c->a->window > 0 && c->a->window < ctx ? c->a->window : ctx);
    }
    return n;
}

/* Whether splits are to be worked on side by side: there is room for it, and too few units to balance by themselves. */
static bool wants_waves(const struct call *c)
{
    const int64_t threads = tl_pool_threads(c->a->tp);
    return c->a->workspace && !c->states && threads > 1 && c->n_units < UNITS_ENOUGH * threads;
}

static tl_status run(struct call *c)
{
    const tl_paged_attn_args *a = c->a;
    const int64_t fit = attn_max_rows(c->view.k_dim, c->view.v_dim) / c->group;
    c->unit_tokens = fit > 1 && (c->total_q > a->B || any_shared(c)) ? fit : 1;
    c->n_units = c->Hkv * ((c->total_q - 1) / c->unit_tokens + 1);
    const bool shared = tl_worth_sharing(seen_keys(c) * (double)(c->view.k_dim + c->view.v_dim) / 2,
                                         (double)c->Hkv / (double)c->unit_tokens, (double)a->H);
    if (shared && wants_waves(c)) {
        const struct range splits = all_splits(c);
        if (splits.hi - splits.lo > 1)
            return run_in_waves(c, splits);
    }
    return tl_pool_run(c->fn, a->tp, c->n_units, shared ? 1 : c->n_units, attend_units, c);
}

static tl_status check(struct call *c)
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

/* The arguments of a caller who may know less of them than this version does. */
static tl_status read_args(const char *fn, const tl_paged_attn_args *args, tl_paged_attn_args *all)
{
    if (!args)
        return tl_fail(TL_EINVAL, fn, "args is NULL");
    if (args->size != offsetof(tl_paged_attn_args, trace) && args->size != sizeof *all)
        return tl_fail(TL_EINVAL, fn, "size = %llu, this version's is %zu", (unsigned long long)args->size, sizeof *all);
    *all = (tl_paged_attn_args){0};
    memcpy(all, args, args->size);
    return TL_OK;
}

static tl_status check_and_run(struct call *c)
{
    const tl_paged_attn_args *a = c->a;
    TL_TRY(check(c));
    if (a->trace)
        a->trace->n = 0;
    if (c->total_q == 0)
        return TL_OK;
    c->Hkv = a->view->n_kv_heads;
    c->group = a->H / c->Hkv;
    c->view = attn_view_of(a->view);
    const tl_fpenv caller = tl_fpenv_enter();
    const tl_status status = run(c);
    tl_fpenv_leave(caller);
    return status;
}

tl_status tl_paged_attn_f32(const tl_paged_attn_args *args)
{
    tl_paged_attn_args all;
    struct call c = {.fn = WHOLE, .a = &all, .n_splits = 1};
    TL_TRY(read_args(WHOLE, args, &all));
    return check_and_run(&c);
}

tl_status tl_paged_attn_states_f32(const tl_paged_attn_args *args, int64_t first_split, int64_t n_splits, float *states)
{
    tl_paged_attn_args all;
    struct call c = {.fn = STATES, .a = &all, .states = states, .first_split = first_split, .n_splits = n_splits,
                     .state_stride = n_splits};
    TL_TRY(read_args(STATES, args, &all));
    return check_and_run(&c);
}

size_t tl_paged_attn_workspace(const tl_paged_attn_args *args)
{
    static const char fn[] = "tl_paged_attn_workspace";
    tl_paged_attn_args all;
    size_t bytes = 0;
    if (read_args(fn, args, &all) != TL_OK)
        return 0;
    if (!all.view || all.B < 0 || all.H < 1) {
        (void)tl_fail(TL_EINVAL, fn, all.view ? "B = %lld, H = %lld" : "view is NULL", (long long)all.B, (long long)all.H);
        return 0;
    }
    const struct call c = {.fn = fn, .a = &all};
    if (!workspace_size(&all, all.B > 0 ? first_token(&c, all.B) : 0, &bytes))
        (void)tl_fail(TL_EINVAL, fn, "more bytes than memory has");
    return bytes;
}
