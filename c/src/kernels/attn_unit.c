/* SPDX-License-Identifier: MIT */
/* attn_unit.c: one unit of a plan, as jobs of rows for the kernels. */
#include <string.h>

#include "kernels/attn_plan.h"
#include "kernels/trace.h"

/* Who works on a unit, and what it is part of. */
struct unit {
    const struct attn_call *c;
    const struct attn_plan *plan;
    const struct attn_item *item;
    int64_t kv_head, chunk;
    int worker;
    struct attn_work *work;
};

/* Some tokens of one sequence. */
struct tokens {
    int64_t seq, first, end;
};

static struct unit find_unit(const struct attn_call *c, const struct attn_plan *plan, int64_t unit)
{
    int64_t lo = 0, hi = plan->n_items - 1;
    while (lo < hi) {
        const int64_t mid = hi - (hi - lo) / 2;
        if (plan->item[mid].first_unit <= unit)
            lo = mid;
        else
            hi = mid - 1;
    }
    const struct attn_item *item = &plan->item[lo];
    const int64_t n = unit - item->first_unit;
    return (struct unit){.c = c,
                         .plan = plan,
                         .item = item,
                         .kv_head = n / item->n_chunks,
                         .chunk = item->n_chunks - 1 - n % item->n_chunks};
}

static struct attn_path path_of(const struct unit *u, int64_t seq, struct range seen)
{
    const struct attn_call *c = u->c;
    return (struct attn_path){.block_table = attn_table(c, seq),
                              .first_block = c->first_block,
                              .k = kv_plane(&c->kv.k, seq, u->kv_head),
                              .v = kv_plane(&c->kv.v, seq, u->kv_head),
                              .lo = seen.lo,
                              .hi = seen.hi};
}

/* The tokens of a unit of one sequence. */
static struct tokens tokens_of(const struct unit *u)
{
    const int64_t seq = u->plan->first_seq + u->item->first;
    const int64_t first = attn_first_token(u->c, seq) + u->chunk * u->plan->chunk_tokens;
    const int64_t end = attn_first_token(u->c, seq + 1);
    return (struct tokens){
        seq, first, end - first > u->plan->chunk_tokens ? first + u->plan->chunk_tokens : end};
}

static int64_t position_of(const struct attn_call *c, int64_t seq, int64_t token)
{
    return attn_first_pos(c, seq) + token - attn_first_token(c, seq);
}

/* What the rows of some tokens see, all together. */
static struct range seen_by(const struct attn_call *c, struct tokens t)
{
    return (struct range){attn_seen(c, t.seq, position_of(c, t.seq, t.first)).lo,
                          attn_seen(c, t.seq, position_of(c, t.seq, t.end - 1)).hi};
}

struct attn_path tl_attn_path_of_unit(const struct attn_call *c, const struct attn_plan *plan,
                                      int64_t unit)
{
    const struct unit u = find_unit(c, plan, unit);
    if (u.item->shared) {
        const int64_t seq = plan->first_seq + u.item->earliest;
        return path_of(&u, seq,
                       (struct range){attn_seen_by_all(c, seq).lo, u.item->shared});
    }
    const struct tokens t = tokens_of(&u);
    return path_of(&u, t.seq, seen_by(c, t));
}

/* ---- rows ---- */

/* Rows first .. first+n-1 of some tokens: the heads of the group at one token after another. */
static void fill_rows(const struct unit *u, struct tokens t, int64_t first, int n,
                      struct attn_row *row)
{
    const struct attn_call *c = u->c;
    int64_t token = t.first + first / c->group, head = first % c->group;
    for (int r = 0; r < n; token++, head = 0) {
        const int64_t pos = position_of(c, t.seq, token);
        const struct range seen = attn_seen(c, t.seq, pos);
        for (; head < c->group && r < n; head++, r++) {
            const int64_t h = u->kv_head * c->group + head;
            const struct attn_end end = attn_end_of(c, t.seq, token, h);
            row[r] = (struct attn_row){.q = c->q + attn_row_at(c->q_at, t.seq, token, h),
                                       .out = end.out,
                                       .lse = end.lse,
                                       .sink = end.sink,
                                       .slope = c->alibi_slopes ? c->alibi_slopes[h] : 0,
                                       .pos = pos,
                                       .lo = seen.lo,
                                       .hi = seen.hi};
        }
    }
}

static struct attn_job job_of(const struct unit *u, int64_t seq, enum attn_part part,
                              struct attn_row *row)
{
    const struct attn_call *c = u->c;
    return (struct attn_job){.kv = &c->kv,
                             .path = path_of(u, seq, (struct range){0, 0}),
                             .part = part,
                             .scale = c->scale,
                             .softcap = c->softcap,
                             .has_alibi = c->alibi_slopes != NULL,
                             .row = row,
                             .work = u->work};
}

/* ---- jobs ---- */

/* The states of the rows of a job, one after another: each is what is left of rows that see nothing
 * else. */
static void keep_states(const struct unit *u, struct attn_job *job)
{
    const struct attn_call *c = u->c;
    struct attn_row whole[ATTN_ROWS];
    const int64_t span = c->span_splits * TL_ATTN_SPLIT, n = c->n_splits / c->span_splits;
    memcpy(whole, job->row, (size_t)job->n_rows * sizeof *whole);
    for (int64_t k = 0; k < n; k++) {
        const int64_t first = c->first_split * TL_ATTN_SPLIT + k * span;
        for (int r = 0; r < job->n_rows; r++) {
            struct attn_row *row = &job->row[r];
            row->lo = whole[r].lo > first ? whole[r].lo : first;
            row->hi = whole[r].hi - first < span ? whole[r].hi : first + span;
            row->out = whole[r].out + k * attn_state_floats(c) + 2;
        }
        c->kernels->attn_rows(job);
    }
}

/* Writes down what a worker did since begin_ns. */
static void note(const struct unit *u, int32_t what, struct tokens t, struct range seen,
                 int64_t begin_ns)
{
    const int64_t first_split = seen.lo / TL_ATTN_SPLIT;
    const int64_t end_split =
        seen.lo < seen.hi ? (seen.hi - 1) / TL_ATTN_SPLIT + 1 : first_split;
    trace_add(u->c->trace,
              (tl_trace_event){u->worker, what, t.seq, u->kv_head, t.first, t.end - t.first,
                               first_split, end_split - first_split, begin_ns, 0});
}

/* Rows of tokens of one sequence, as many at a time as a job takes. */
static void attend_tokens(const struct unit *u, struct tokens t, const struct attn_path *next)
{
    const struct attn_call *c = u->c;
    const int64_t n_rows = (t.end - t.first) * c->group, max_rows = attn_max_rows(&c->kv);
    const int64_t begin_ns = trace_now(c->trace);
    struct attn_row row[ATTN_ROWS];
    struct attn_job job = job_of(u, t.seq, c->to_states ? ATTN_STATE : ATTN_WHOLE, row);
    for (int64_t i = 0; i < n_rows; i += job.n_rows) {
        job.n_rows = (int)(n_rows - i < max_rows ? n_rows - i : max_rows);
        job.next = i + job.n_rows < n_rows ? NULL : next;
        fill_rows(u, t, i, job.n_rows, row);
        if (c->to_states)
            keep_states(u, &job);
        else
            c->kernels->attn_rows(&job);
    }
    if (c->trace)
        note(u, TL_TRACE_ROWS, t, seen_by(c, t), begin_ns);
}

static struct tokens all_tokens(const struct unit *u, int i)
{
    const int64_t seq = u->plan->first_seq + i;
    return (struct tokens){seq, attn_first_token(u->c, seq), attn_first_token(u->c, seq + 1)};
}

/* One walk over what the sequences of the item share, for all of their rows; it stops there. */
static void begin_shared(const struct unit *u, const struct attn_path *next)
{
    const struct attn_call *c = u->c;
    const int64_t begin_ns = trace_now(c->trace), earliest = u->plan->first_seq + u->item->earliest;
    struct attn_row row[ATTN_ROWS];
    struct attn_job job = job_of(u, earliest, ATTN_BEGIN, row);
    job.next = next;
    for (int i = u->item->first; i >= 0; i = u->plan->next[i]) {
        const struct tokens t = all_tokens(u, i);
        const int n = (int)((t.end - t.first) * c->group);
        fill_rows(u, t, 0, n, row + job.n_rows);
        for (int r = 0; r < n; r++)
            row[job.n_rows++].hi = u->item->shared;
    }
    c->kernels->attn_rows(&job);
    if (!c->trace)
        return;
    const int64_t first = attn_first_token(c, u->plan->first_seq + u->item->first);
    note(u, TL_TRACE_SHARED,
         (struct tokens){u->plan->first_seq + u->item->first, first, first + u->item->n_tokens},
         (struct range){attn_seen_by_all(c, earliest).lo, u->item->shared}, begin_ns);
}

/* What is left of a sequence behind the shared part. */
static struct range behind_shared(const struct unit *u, struct tokens t)
{
    const struct range seen = seen_by(u->c, t);
    return (struct range){seen.lo > u->item->shared ? seen.lo : u->item->shared, seen.hi};
}

/* Each sequence by itself, from where the shared walk stopped; `from`: its first row there. */
static void finish_one(const struct unit *u, struct tokens t, int from,
                       const struct attn_path *next)
{
    const struct attn_call *c = u->c;
    const int64_t begin_ns = trace_now(c->trace);
    struct attn_row row[ATTN_ROWS];
    struct attn_job job = job_of(u, t.seq, ATTN_GO_ON, row);
    job.from = from;
    job.next = next;
    job.n_rows = (int)((t.end - t.first) * c->group);
    fill_rows(u, t, 0, job.n_rows, row);
    for (int r = 0; r < job.n_rows; r++)
        row[r].lo = row[r].lo > u->item->shared ? row[r].lo : u->item->shared;
    c->kernels->attn_rows(&job);
    if (c->trace)
        note(u, TL_TRACE_ROWS, t, behind_shared(u, t), begin_ns);
}

static void attend_shared(const struct unit *u, const struct attn_path *next)
{
    const int first = u->item->first;
    struct tokens t = all_tokens(u, first);
    struct attn_path path = path_of(u, t.seq, behind_shared(u, t));
    begin_shared(u, &path);
    int from = 0;
    for (int i = first; i >= 0; i = u->plan->next[i]) {
        const int behind = u->plan->next[i];
        t = all_tokens(u, i);
        if (behind >= 0) {
            const struct tokens t_next = all_tokens(u, behind);
            path = path_of(u, t_next.seq, behind_shared(u, t_next));
        }
        finish_one(u, t, from, behind >= 0 ? &path : next);
        from += (int)((t.end - t.first) * u->c->group);
    }
}

void tl_attn_unit(const struct attn_call *c, const struct attn_plan *plan, int64_t unit,
                  const struct attn_path *next, int worker, struct attn_work *work)
{
    struct unit u = find_unit(c, plan, unit);
    u.worker = worker;
    u.work = work;
    if (u.item->shared)
        attend_shared(&u, next);
    else
        attend_tokens(&u, tokens_of(&u), next);
}
