/* SPDX-License-Identifier: MIT */
/* paged_rows.c: attention of any rows of any sequences over a view of paged memory, finished or as
 * states of a range of splits. The work is cut into units of one KV head and a few neighbouring
 * tokens of the batch, whose rows share walks over K and V as far as they belong to one sequence,
 * or to sequences that begin with the same blocks. */
#include <math.h>
#include <stdbool.h>
#include <string.h>

#include "kernels/paged_call.h"
#include "kernels/sharing.h"
#include "kernels/trace.h"
#include "runtime/fail.h"
#include "runtime/fpenv.h"
#include "runtime/pool_run.h"

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

static struct attn_row row_of(const struct call *c, int64_t token, int64_t head, int64_t pos)
{
    const tl_paged_attn_args *a = c->a;
    struct attn_row row = {.q = a->q + token * a->q_token_stride + head * a->q_head_stride,
                           .sink = -INFINITY,
                           .slope = a->alibi_slopes ? a->alibi_slopes[head] : 0,
                           .pos = pos,
                           .lo = first_visible(c, pos),
                           .hi = pos + 1};
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

static struct attn_job job_of(const struct call *c, int64_t seq, int64_t kv_head,
                              struct attn_row *row, struct hand *hand)
{
    return (struct attn_job){.view = &c->view,
                             .block_table = c->a->block_tables + seq * c->a->table_stride,
                             .kv_head = kv_head,
                             .scale = c->a->scale,
                             .softcap = c->a->logits_softcap,
                             .has_alibi = c->a->alibi_slopes != NULL,
                             .work = &hand->work,
                             .row = row};
}

/* Position of token 0, were it of this sequence. */
static int64_t position_of_zero(const struct call *c, int64_t seq)
{
    return c->a->ctx_lens[seq] - first_token(c, seq + 1);
}

/* Writes down what a hand did since begin_ns: tokens [first, end), from sequence seq on, over
 * positions lo .. hi-1. */
static void note(const struct call *c, const struct hand *hand, int32_t what, int64_t seq,
                 int64_t kv_head, int64_t first, int64_t end, struct range seen, int64_t begin_ns)
{
    const int64_t first_split = seen.lo / TL_ATTN_SPLIT,
                  end_split = seen.lo < seen.hi ? (seen.hi - 1) / TL_ATTN_SPLIT + 1 : first_split;
    trace_add(c->a->trace, (tl_trace_event){hand->worker, what, seq, kv_head, first, end - first,
                                            first_split, end_split - first_split, begin_ns, 0});
}

/* Rows of tokens [first, end) of one sequence and KV head; from position `from` on, with what
 * `carry` holds, if that is not NULL. `next`: what is walked afterwards, or NULL. */
static void attend_tokens(const struct call *c, int64_t seq, int64_t kv_head, int64_t first,
                          int64_t end, int64_t from, struct attn_state *carry,
                          const struct attn_path *next, struct hand *hand)
{
    const int64_t n_rows = (end - first) * c->group,
                  max_rows = attn_max_rows(c->view.k_dim, c->view.v_dim);
    const int64_t begin_ns = trace_now(c->a->trace), zero = position_of_zero(c, seq);
    struct attn_row row[ATTN_ROWS];
    struct attn_job job = job_of(c, seq, kv_head, row, hand);
    job.resumes = carry != NULL;
    for (int64_t i = 0; i < n_rows; i += job.n_rows) {
        job.n_rows = (int)(n_rows - i < max_rows ? n_rows - i : max_rows);
        job.next = i + job.n_rows < n_rows ? NULL : next;
        for (int r = 0; r < job.n_rows; r++) {
            const int64_t token = first + (i + r) / c->group,
                          head = kv_head * c->group + (i + r) % c->group;
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
    note(c, hand, TL_TRACE_ROWS, seq, kv_head, first, end,
         in_splits(c, carry ? from : first_visible(c, zero + first), zero + end), begin_ns);
}

/* ---- prefixes that sequences share ---- */

/* Whole splits that two sequences have in the same blocks, and that every row of both sees. */
static int64_t shared_splits(const struct call *c, int64_t x, int64_t y)
{
    const tl_paged_attn_args *a = c->a;
    const uint32_t *tx = a->block_tables + x * a->table_stride,
                   *ty = a->block_tables + y * a->table_stride;
    const int64_t seen_x = a->ctx_lens[x] - q_len(c, x) + 1,
                  seen_y = a->ctx_lens[y] - q_len(c, y) + 1, b = a->view->block_tokens;
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

/* Tokens [first, end), at most a job's rows, of sequences from seq on that share n_splits splits:
 * one walk over those for all, then each sequence by itself. */
static void attend_sharing(const struct call *c, int64_t seq, int64_t kv_head, int64_t first,
                           int64_t end, int64_t n_splits, struct hand *hand)
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
            row[job.n_rows] =
                row_of(c, token, kv_head * c->group + g, position_of_zero(c, s) + token);
            row[job.n_rows].hi = n_splits * TL_ATTN_SPLIT;
            row[job.n_rows].carry = &carry[job.n_rows];
        }
    }
    c->kernels->attn_rows(&job);
    note(c, hand, TL_TRACE_SHARED, seq, kv_head, first, end,
         (struct range){0, n_splits * TL_ATTN_SPLIT}, begin_ns);
    for (int64_t token = first, to; token < end; token = to, seq++) {
        to = first_token(c, seq + 1) < end ? first_token(c, seq + 1) : end;
        if (to > token)
            attend_tokens(c, seq, kv_head, token, to, n_splits * TL_ATTN_SPLIT,
                          carry + (token - first) * c->group, NULL, hand);
    }
}

/* Where the sequences end, among tokens before `end`, that share as many splits with sequence seq
 * as the next one does. */
static int64_t end_of_sharing(const struct call *c, int64_t seq, int64_t end, int64_t *n_splits)
{
    int64_t s = seq + 1;
    *n_splits =
        s < c->a->B && first_token(c, s) < end && q_len(c, s) > 0 ? shared_splits(c, seq, s) : 0;
    while (*n_splits > 0 && s < c->a->B && first_token(c, s) < end && q_len(c, s) > 0 &&
           shared_splits(c, seq, s) >= *n_splits)
        s++;
    return first_token(c, s) < end ? first_token(c, s) : end;
}

/* What the first rows of a unit walk. */
static struct attn_path path_of(const struct call *c, int64_t unit)
{
    const int64_t token = unit / c->Hkv * c->unit_tokens, seq = sequence_of(c, token),
                  pos = position_of_zero(c, seq) + token;
    return (struct attn_path){c->a->block_tables + seq * c->a->table_stride, unit % c->Hkv,
                              first_visible(c, pos), pos + 1};
}

void tl_paged_attend_unit(const struct call *c, int64_t unit, const struct attn_path *next,
                          struct hand *hand)
{
    const int64_t kv_head = unit % c->Hkv, begin = unit / c->Hkv * c->unit_tokens;
    const int64_t end = begin + c->unit_tokens < c->total_q ? begin + c->unit_tokens : c->total_q;
    for (int64_t token = begin, seq = sequence_of(c, begin), to, n_splits = 0; token < end;
         token = to) {
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
        tl_paged_attend_unit(c, unit, unit + 1 < hi ? &next : NULL, &hand);
    }
}

/* ---- the call ---- */

/* Keys that the rows of all sequences see, once for each of a sequence's tokens. */
static double seen_keys(const struct call *c)
{
    double n = 0;
    for (int64_t seq = 0; seq < c->a->B; seq++) {
        const int64_t ctx = c->a->ctx_lens[seq];
        n += (double)q_len(c, seq) *
             (double)(c->a->window > 0 && c->a->window < ctx ? c->a->window : ctx);
    }
    return n;
}

static tl_status run(struct call *c)
{
    const tl_paged_attn_args *a = c->a;
    const int64_t fit = attn_max_rows(c->view.k_dim, c->view.v_dim) / c->group;
    c->unit_tokens = fit > 1 && (c->total_q > a->B || any_shared(c)) ? fit : 1;
    c->n_units = c->Hkv * ((c->total_q - 1) / c->unit_tokens + 1);
    const bool shared = tl_worth_sharing(seen_keys(c) * (double)(c->view.k_dim + c->view.v_dim) / 2,
                                         (double)c->Hkv / (double)c->unit_tokens, (double)a->H);
    if (shared && tl_paged_wants_waves(c))
        return tl_paged_run_in_waves(c);
    return tl_pool_run(c->fn, a->tp, c->n_units, shared ? 1 : c->n_units, attend_units, c);
}

/* The arguments of a caller who may know less of them than this version does. */
static tl_status read_args(const char *fn, const tl_paged_attn_args *args, tl_paged_attn_args *all)
{
    if (!args)
        return tl_fail(TL_EINVAL, fn, "args is NULL");
    if (args->size != offsetof(tl_paged_attn_args, trace) && args->size != sizeof *all)
        return tl_fail(TL_EINVAL, fn, "size = %llu, this version's is %zu",
                       (unsigned long long)args->size, sizeof *all);
    *all = (tl_paged_attn_args){0};
    memcpy(all, args, args->size);
    return TL_OK;
}

static tl_status check_and_run(struct call *c)
{
    const tl_paged_attn_args *a = c->a;
    TL_TRY(tl_paged_check(c));
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
    struct call c = {.fn = "tl_paged_attn_f32", .a = &all, .n_splits = 1};
    TL_TRY(read_args(c.fn, args, &all));
    return check_and_run(&c);
}

tl_status tl_paged_attn_states_f32(const tl_paged_attn_args *args, int64_t first_split,
                                   int64_t n_splits, float *states)
{
    tl_paged_attn_args all;
    struct call c = {.fn = "tl_paged_attn_states_f32",
                     .a = &all,
                     .to_states = true,
                     .states = states,
                     .first_split = first_split,
                     .n_splits = n_splits,
                     .state_stride = n_splits};
    TL_TRY(read_args(c.fn, args, &all));
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
        (void)tl_fail(TL_EINVAL, fn, all.view ? "B = %lld, H = %lld" : "view is NULL",
                      (long long)all.B, (long long)all.H);
        return 0;
    }
    const struct call c = {.fn = fn, .a = &all};
    if (!tl_paged_workspace(&all, all.B > 0 ? first_token(&c, all.B) : 0, &bytes))
        (void)tl_fail(TL_EINVAL, fn, "more bytes than memory has");
    return bytes;
}
