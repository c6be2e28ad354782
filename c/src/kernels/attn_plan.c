/* SPDX-License-Identifier: MIT */
/* attn_plan.c: a call is cut into units, and the units are shared out: sequences that begin with
 * the same blocks walk over them together, the longest are begun first, and the splits of a few
 * long sequences are worked on side by side. No bit depends on any of it.
 *
 * Sequences are planned 256 at a time, so that a plan has a fixed size and stands on the caller's
 * stack. */
#include "kernels/attn_plan.h"

#include "kernels/trace.h"
#include "runtime/fpenv.h"
#include "runtime/pool_run.h"

_Static_assert(sizeof(struct attn_work) <= TL_POOL_SCRATCH, "a worker's memory holds a job's");

enum {
    SHARED_TILES = 4,      /* fewer shared tiles than this are walked by each sequence for itself */
    UNITS_ENOUGH = 4,      /* for each thread: then whole walks balance well enough */
    RANGES_PER_THREAD = 4, /* where units are equally long */
};

int64_t tl_small_step_ns = 50000;

double tl_attn_ns(double elements, double kv_heads, double q_heads)
{
    return elements * (kv_heads / 4 + q_heads / 20);
}

bool tl_worth_waking(double ns)
{
    return ns >= (double)tl_small_step_ns;
}

static int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static int64_t max64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* ---- prefixes that sequences share ---- */

/* What the first row of a sequence sees; the rows behind it see all of it that is not behind their
 * window. */
static struct range seen_by_first(const struct attn_call *c, int64_t seq)
{
    return attn_seen(c, seq, attn_first_pos(c, seq));
}

/* The position where what two sequences have in the same blocks, and what every row of both sees or
 * has behind it, ends; 0 where that is too little. */
static int64_t end_of_shared(const struct attn_call *c, int64_t x, int64_t y)
{
    const struct range seen_x = seen_by_first(c, x), seen_y = seen_by_first(c, y);
    const uint32_t *table_x = attn_table(c, x), *table_y = attn_table(c, y);
    const int64_t b = c->kv.block_tokens, from = max64(seen_x.lo, seen_y.lo);
    const int64_t most = min64(seen_x.hi, seen_y.hi);
    int64_t i = from / b;
    while (i * b < most && table_x[i] == table_y[i])
        i++;
    const int64_t end = min64(i * b, most) / TL_ATTN_TILE * TL_ATTN_TILE;
    return end - from >= SHARED_TILES * TL_ATTN_TILE ? end : 0;
}

static bool may_share(const struct attn_call *c)
{
    return c->block_tables && !c->to_states;
}

/* Whether a sequence joins an item: it has room, and what is shared then is worth at least half of
 * what is shared now. */
static bool join_item(const struct attn_call *c, struct attn_plan *plan, struct attn_item *item,
                      int16_t i)
{
    const int64_t seq = plan->first_seq + i, n = attn_q_len(c, seq);
    if (item->n_tokens + n > plan->chunk_tokens)
        return false;
    const int64_t shared = end_of_shared(c, plan->first_seq + item->earliest, seq);
    if (shared == 0 || shared < item->shared / 2)
        return false;
    item->shared = item->shared ? min64(item->shared, shared) : shared;
    item->n_tokens += n;
    item->last = plan->next[item->last] = i;
    if (seen_by_first(c, seq).lo < seen_by_first(c, plan->first_seq + item->earliest).lo)
        item->earliest = i;
    return true;
}

static bool join_any(const struct attn_call *c, struct attn_plan *plan, int16_t i)
{
    for (int64_t k = 0; may_share(c) && k < plan->n_items; k++)
        if (join_item(c, plan, &plan->item[k], i))
            return true;
    return false;
}

/* ---- the plan ---- */

/* Positions that the longest unit of an item walks over. */
static int64_t item_length(const struct attn_call *c, const struct attn_plan *plan,
                           const struct attn_item *item)
{
    int64_t longest = 0;
    for (int i = item->first; i >= 0; i = plan->next[i]) {
        const struct range seen = attn_seen_by_all(c, plan->first_seq + i);
        longest = max64(longest, attn_length(seen));
    }
    return longest;
}

static double sequence_ns(const struct attn_call *c, int64_t seq, int64_t n_chunks)
{
    const int64_t n = attn_q_len(c, seq);
    const struct range first = seen_by_first(c, seq), all = attn_seen_by_all(c, seq);
    const double keys = (double)attn_length(first) / 2 + (double)attn_length(all) / 2;
    const double elements = keys * (double)(c->kv.k.dim + c->kv.v.dim) / 2;
    return tl_attn_ns(elements, (double)(n_chunks * c->kv.n_kv_heads), (double)(n * c->H));
}

/* Longest first, by Shell's method: it needs no memory. */
static void sort_items(const struct attn_call *c, struct attn_plan *plan)
{
    int64_t length[ATTN_PLAN_SEQS];
    for (int64_t k = 0; k < plan->n_items; k++)
        length[k] = item_length(c, plan, &plan->item[k]);
    for (int64_t gap = plan->n_items / 2; gap > 0; gap /= 2)
        for (int64_t k = gap; k < plan->n_items; k++) {
            const struct attn_item item = plan->item[k];
            const int64_t n = length[k];
            int64_t at = k;
            for (; at >= gap && length[at - gap] < n; at -= gap) {
                plan->item[at] = plan->item[at - gap];
                length[at] = length[at - gap];
            }
            plan->item[at] = item;
            length[at] = n;
        }
    plan->longest = plan->n_items ? length[0] : 0;
    plan->shortest = plan->n_items ? length[plan->n_items - 1] : 0;
}

/* The rows of one sequence need not fill a job; those of several that share a prefix do, as long as
 * there is a unit for every thread. */
static int64_t tokens_of_chunk(const struct attn_call *c, int64_t n_seqs)
{
    const int64_t fit = max64(attn_max_rows(&c->kv) / c->group, 1);
    const int64_t threads = tl_pool_threads(c->tp);
    const int64_t fair = n_seqs * c->kv.n_kv_heads / (2 * threads);
    const bool is_decode = c->total_q == c->B;
    return threads > 1 && is_decode ? max64(min64(fit, fair), 1) : fit;
}

static void add_items(const struct attn_call *c, struct attn_plan *plan)
{
    plan->n_items = 0;
    plan->ns = 0;
    for (int16_t i = 0; i < plan->n_seqs; i++) {
        const int64_t n = attn_q_len(c, plan->first_seq + i);
        const int64_t n_chunks = (n + plan->chunk_tokens - 1) / plan->chunk_tokens;
        plan->next[i] = -1;
        if (n == 0)
            continue;
        plan->ns += sequence_ns(c, plan->first_seq + i, n_chunks);
        if (!join_any(c, plan, i))
            plan->item[plan->n_items++] = (struct attn_item){.n_tokens = n,
                                                             .n_chunks = n_chunks,
                                                             .first = i,
                                                             .last = i,
                                                             .earliest = i};
    }
}

static void make_plan(const struct attn_call *c, struct attn_plan *plan, int64_t first_seq)
{
    plan->first_seq = first_seq;
    plan->n_seqs = min64(c->B - first_seq, ATTN_PLAN_SEQS);
    plan->chunk_tokens = tokens_of_chunk(c, plan->n_seqs);
    add_items(c, plan);
    if (tl_pool_threads(c->tp) > 1)
        sort_items(c, plan);
    plan->n_units = 0;
    for (int64_t k = 0; k < plan->n_items; k++) {
        plan->item[k].first_unit = plan->n_units;
        plan->n_units += plan->item[k].n_chunks * c->kv.n_kv_heads;
    }
}

/* ---- the work ---- */

struct units {
    const struct attn_call *call;
    const struct attn_plan *plan;
};

/* Every unit of a range knows the next one, whose first tiles are prefetched. */
static void do_units(void *ctx, int64_t lo, int64_t hi, int worker, void *scratch)
{
    const struct units *u = ctx;
    for (int64_t unit = lo; unit < hi; unit++) {
        struct attn_path next;
        const bool has_next = unit + 1 < hi;
        if (has_next)
            next = tl_attn_path_of_unit(u->call, u->plan, unit + 1);
        tl_attn_unit(u->call, u->plan, unit, has_next ? &next : NULL, worker, scratch);
    }
}

static __attribute__((noinline)) void do_on_stack(tl_work_fn work_fn, void *ctx, int64_t n)
{
    struct attn_work work;
    work_fn(ctx, 0, n, 0, &work);
}

/* n pieces of work, `grain` at a time, by the pool; without one by the caller. */
static tl_status do_work(const struct attn_call *c, int64_t n, int64_t grain, tl_work_fn work_fn,
                         void *ctx)
{
    if (c->tp)
        return tl_pool_run_with_scratch(c->fn, c->tp, n, grain, work_fn, ctx);
    if (c->work)
        work_fn(ctx, 0, n, 0, c->work);
    else
        do_on_stack(work_fn, ctx, n);
    return TL_OK;
}

/* ---- splits side by side ---- */

/* Splits of a row that a wave works on. */
static int64_t wave_splits(const tl_pool *tp)
{
    return TL_ATTN_WAVE_SPLITS * (int64_t)tl_pool_threads(tp);
}

bool tl_attn_workspace(const struct attn_call *c, int64_t total_q, size_t *bytes)
{
    int64_t floats, rows;
    *bytes = 0;
    if (tl_pool_threads(c->tp) == 1)
        return true;
    if (__builtin_add_overflow(c->kv.v.dim, 2, &floats) ||
        __builtin_mul_overflow(floats, wave_splits(c->tp) + 1, &floats) ||
        __builtin_add_overflow(floats, 2, &floats) ||
        __builtin_mul_overflow(total_q, c->H, &rows) ||
        __builtin_mul_overflow(floats, rows, &floats) || floats < 0 ||
        floats > PTRDIFF_MAX / (int64_t)sizeof(float))
        return false;
    *bytes = (size_t)floats * sizeof(float);
    return true;
}

/* What a workspace holds: of every row the state of the stretches behind, that of the current one,
 * and the states of the splits of a wave. */
struct waves {
    const struct attn_call *call;
    const struct attn_plan *plan;
    struct attn_call wave; /* which gives states, into the workspace */
    struct attn_state *merged;
    float *stretch;
    bool is_last;
};

/* Number i of a wave: one split of one unit. */
static void do_splits(void *ctx, int64_t lo, int64_t hi, int worker, void *scratch)
{
    const struct waves *w = ctx;
    struct attn_call one = w->wave;
    one.n_splits = 1;
    for (int64_t i = lo; i < hi; i++) {
        const int64_t k = i % w->wave.n_splits;
        one.first_split = w->wave.first_split + k;
        one.out = w->wave.out + k * attn_state_floats(&one);
        tl_attn_unit(&one, w->plan, i / w->wave.n_splits, NULL, worker, scratch);
    }
}

/* Rows are merged where they lie one token after another, whichever sequence they belong to. */
static void merge_rows(void *ctx, int64_t lo, int64_t hi, int worker)
{
    const struct waves *w = ctx;
    const struct attn_call *c = w->call;
    const int64_t begin_ns = trace_now(c->trace), H = c->H, floats = attn_state_floats(c);
    for (int64_t i = lo; i < hi; i++) {
        struct attn_merge merge = {
            .end = attn_end_of(c, 0, i / H, i % H),
            .merged = &w->merged[i],
            .stretch = w->stretch + i * floats,
            .states = w->wave.out + attn_row_at(w->wave.out_at, 0, i / H, i % H),
            .first_split = w->wave.first_split,
            .n = w->wave.n_splits,
            .span_splits = 1,
            .is_last = w->is_last};
        c->kernels->attn_merge(&merge);
    }
    trace_add(c->trace, (tl_trace_event){worker, TL_TRACE_MERGE, -1, -1, lo / H,
                                         (hi - 1) / H + 1 - lo / H, w->wave.first_split,
                                         w->wave.n_splits, begin_ns, 0});
}

/* The splits that any row sees. */
static struct range all_splits(const struct attn_call *c)
{
    struct range splits = {INT64_MAX, 0};
    for (int64_t seq = 0; seq < c->B; seq++) {
        if (attn_q_len(c, seq) == 0)
            continue;
        const struct range seen = attn_seen_by_all(c, seq);
        splits.lo = min64(splits.lo, seen.lo / TL_ATTN_SPLIT);
        splits.hi = max64(splits.hi, (seen.hi - 1) / TL_ATTN_SPLIT + 1);
    }
    return splits;
}

/* Whether splits are to be worked on side by side: there is room for it, several of them, and too
 * few units to balance by themselves. */
static bool wants_waves(const struct attn_call *c, const struct attn_plan *plan)
{
    if (!c->workspace || c->B > ATTN_PLAN_SEQS ||
        plan->n_units >= UNITS_ENOUGH * (int64_t)tl_pool_threads(c->tp))
        return false;
    const struct range splits = all_splits(c);
    return splits.hi - splits.lo > 1;
}

static void lay_out_workspace(const struct attn_call *c, struct waves *w, int64_t most)
{
    const int64_t n_rows = c->total_q * c->H, floats = attn_state_floats(c);
    w->merged = c->workspace;
    w->stretch = (float *)(w->merged + n_rows);
    for (int64_t i = 0; i < n_rows; i++) {
        w->merged[i] = (struct attn_state){-INFINITY, 0};
        w->stretch[i * floats] = -INFINITY;
        w->stretch[i * floats + 1] = 0;
    }
    w->wave.out = w->stretch + n_rows * floats;
    w->wave.out_at = (struct row_strides){0, c->H * most * floats, most * floats};
}

/* Wave by wave: the states of some splits side by side, then their merge, in order. */
static tl_status run_in_waves(const struct attn_call *c, struct attn_plan *plan)
{
    const struct range splits = all_splits(c);
    const int64_t most = wave_splits(c->tp), n_rows = c->total_q * c->H;
    struct waves w = {.call = c, .plan = plan, .wave = *c};
    w.wave.to_states = true;
    w.wave.span_splits = 1;
    lay_out_workspace(c, &w, most);
    make_plan(&w.wave, plan, 0); /* once more: states share no walk */
    for (int64_t first = splits.lo; first < splits.hi; first += most) {
        w.wave.first_split = first;
        w.wave.n_splits = min64(splits.hi - first, most);
        w.is_last = first + w.wave.n_splits == splits.hi;
        const tl_status status = tl_pool_run_with_scratch(
            c->fn, c->tp, plan->n_units * w.wave.n_splits, 1, do_splits, &w);
        if (status != TL_OK)
            return status;
        const int64_t grain = (n_rows - 1) / tl_pool_threads(c->tp) + 1;
        const tl_status merged = tl_pool_run(c->fn, c->tp, n_rows, grain, merge_rows, &w);
        if (merged != TL_OK)
            return merged;
    }
    return TL_OK;
}

/* ---- the call ---- */

/* Units of about the same length go several at a time. */
static int64_t grain_of(const struct attn_call *c, const struct attn_plan *plan)
{
    const int64_t threads = tl_pool_threads(c->tp);
    const bool is_even = plan->shortest > plan->longest / 2 && c->total_q == c->B;
    return is_even ? max64(plan->n_units / (RANGES_PER_THREAD * threads), 1) : 1;
}

static tl_status run_part(const struct attn_call *c, int64_t first_seq)
{
    struct attn_plan plan;
    struct units units = {c, &plan};
    make_plan(c, &plan, first_seq);
    if (plan.n_units == 0)
        return TL_OK;
    const bool wakes = tl_pool_threads(c->tp) > 1 && tl_worth_waking(plan.ns);
    if (wakes && wants_waves(c, &plan))
        return run_in_waves(c, &plan);
    return do_work(c, plan.n_units, wakes ? grain_of(c, &plan) : plan.n_units, do_units, &units);
}

tl_status tl_attn_run(const struct attn_call *c)
{
    tl_status status = TL_OK;
    const tl_fpenv caller = tl_fpenv_enter();
    if (c->trace)
        c->trace->n = 0;
    for (int64_t seq = 0; seq < c->B && status == TL_OK; seq += ATTN_PLAN_SEQS)
        status = run_part(c, seq);
    tl_fpenv_leave(caller);
    return status;
}
