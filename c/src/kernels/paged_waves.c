/* SPDX-License-Identifier: MIT */
/* paged_waves.c: a call whose few rows have long contexts, by several workers: splits side by side,
 * in waves of as many as the workspace has room for. The states of a wave are merged in the order
 * of their splits, so that no bit depends on it. */
#include <stdbool.h>

#include "kernels/paged_call.h"
#include "kernels/trace.h"
#include "runtime/fail.h"
#include "runtime/pool_run.h"

enum { UNITS_ENOUGH = 4 }; /* for each thread: then whole walks balance well enough */

/* Splits of a row that a wave works on. */
static int64_t wave_splits(const tl_pool *tp)
{
    return TL_ATTN_WAVE_SPLITS * (int64_t)tl_pool_threads(tp);
}

bool tl_paged_workspace(const tl_paged_attn_args *a, int64_t total_q, size_t *bytes)
{
    int64_t floats, rows;
    *bytes = 0;
    if (tl_pool_threads(a->tp) == 1)
        return true;
    if (__builtin_add_overflow(a->view->head_dim_v, 2, &floats) ||
        __builtin_mul_overflow(floats, wave_splits(a->tp), &floats) ||
        __builtin_add_overflow(floats, 2, &floats) ||
        __builtin_mul_overflow(total_q, a->H, &rows) ||
        __builtin_mul_overflow(floats, rows, &floats) || floats < 0 ||
        floats > PTRDIFF_MAX / (int64_t)sizeof(float))
        return false;
    *bytes = (size_t)floats * sizeof(float);
    return true;
}

/* What a workspace holds: (m, L) of every row, and the states of the splits of a wave,
 * [row][n_splits][2 + v_dim]. */
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
        tl_paged_attend_unit(&one, i / w->c.n_splits, NULL, &hand);
    }
}

static void merge_rows(void *ctx, int64_t lo, int64_t hi, int worker)
{
    const struct waves *w = ctx;
    const struct call *c = &w->c;
    const int64_t begin = trace_now(c->a->trace), H = c->a->H;
    for (int64_t i = lo; i < hi; i++) {
        const struct attn_end end = end_of(c, i / H, i % H);
        c->kernels->attn_join_row(&end, &w->merged[i],
                                  c->states + i * c->state_stride * (2 + end.dim), c->n_splits,
                                  w->last);
    }
    trace_add(c->a->trace,
              (tl_trace_event){worker, TL_TRACE_MERGE, -1, -1, lo / H, (hi - 1) / H + 1 - lo / H,
                               c->first_split, c->n_splits, begin, 0});
}

/* The splits that any row sees. */
static struct range all_splits(const struct call *c)
{
    struct range splits = {INT64_MAX, 0};
    for (int64_t seq = 0; seq < c->a->B; seq++) {
        const int64_t n = c->a->ctx_lens[seq], rows = q_len(c, seq);
        if (rows == 0)
            continue;
        const int64_t lo = first_visible(c, n - rows) / TL_ATTN_SPLIT,
                      hi = (n - 1) / TL_ATTN_SPLIT + 1;
        splits.lo = lo < splits.lo ? lo : splits.lo;
        splits.hi = hi > splits.hi ? hi : splits.hi;
    }
    return splits;
}

bool tl_paged_wants_waves(const struct call *c)
{
    const int64_t threads = tl_pool_threads(c->a->tp);
    if (!c->a->workspace || c->to_states || threads == 1 || c->n_units >= UNITS_ENOUGH * threads)
        return false;
    const struct range splits = all_splits(c);
    return splits.hi - splits.lo > 1;
}

tl_status tl_paged_run_in_waves(const struct call *c)
{
    const struct range splits = all_splits(c);
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
        TL_TRY(tl_pool_run(c->fn, c->a->tp, n_rows, (n_rows - 1) / tl_pool_threads(c->a->tp) + 1,
                           merge_rows, &w));
    }
    return TL_OK;
}
