/* SPDX-License-Identifier: MIT */
/* attn_merge.c: finished rows from states that were kept, of splits or of stretches, in one piece
 * or in many. */
#include <math.h>

#include "kernels/attn_plan.h"
#include "kernels/shapes.h"
#include "runtime/fail.h"
#include "runtime/fpenv.h"
#include "runtime/pool_run.h"

static const char fn[] = "tl_attn_merge_f32";

struct merge {
    const struct tl_kernels *kernels;
    const tl_attn_part *parts;
    int64_t n_parts, n_rows, H, dim;
    const float *sink_logits;
    float *out, *lse;
};

/* ---- checks ---- */

static int64_t span_splits(const tl_attn_part *part)
{
    return (part->span ? part->span : TL_ATTN_SPLIT) / TL_ATTN_SPLIT;
}

static int64_t n_states(const tl_attn_part *part)
{
    return part->n_splits / span_splits(part);
}

static tl_status check_sizes(const struct merge *m)
{
    if (m->n_parts < 1 || m->n_rows < 0 || m->H < 1 || m->dim < 1)
        return tl_fail_i64(TL_EINVAL, fn, "n_parts = %lld, n_rows = %lld, H = %lld, dim = %lld",
                           m->n_parts, m->n_rows, m->H, m->dim);
    if (m->n_rows % m->H != 0)
        return tl_fail_i64(TL_EINVAL, fn, "n_rows = %lld is no multiple of H = %lld", m->n_rows,
                           m->H);
    if (!tl_fits_memory(sizeof *m->parts, 1, &m->n_parts))
        return tl_fail_i64(TL_EINVAL, fn, "%lld parts do not fit in memory", m->n_parts);
    if (!m->parts)
        return tl_fail(TL_EINVAL, fn, "parts is NULL");
    const struct span parts = tl_span("parts", m->parts, sizeof *m->parts, m->n_parts);
    TL_TRY(tl_check_addresses(fn, &parts, 1));
    if (m->n_rows > 0 && !m->out)
        return tl_fail(TL_EINVAL, fn, "out is NULL");
    if (!tl_fits_memory(sizeof(float), 2, (int64_t[]){m->n_rows, m->dim}))
        return tl_fail_i64(TL_EINVAL, fn, "out of [%lld, %lld] does not fit in memory", m->n_rows,
                           m->dim);
    if (m->dim > TL_MAX_HEAD_DIM)
        return tl_fail_i64(TL_EUNSUPPORTED, fn, "dim = %lld: TL_MAX_HEAD_DIM is %lld", m->dim,
                           (int64_t)TL_MAX_HEAD_DIM);
    return TL_OK;
}

/* `due`: the split that the part must begin at. */
static tl_status check_part(const struct merge *m, int64_t i, int64_t due)
{
    const tl_attn_part *part = &m->parts[i];
    if (part->n_splits < 1)
        return tl_fail_i64(TL_EINVAL, fn, "part %lld has n_splits = %lld", i, part->n_splits);
    if (part->span != 0 && part->span != TL_ATTN_SPLIT && part->span != TL_ATTN_STRETCH)
        return tl_fail_i64(TL_EINVAL, fn,
                           "part %lld: span = %lld is neither TL_ATTN_SPLIT nor TL_ATTN_STRETCH", i,
                           part->span);
    if (part->first_split != due)
        return tl_fail_i64(TL_EINVAL, fn, "part %lld begins at split %lld, due is split %lld", i,
                           part->first_split, due);
    if (part->first_split % span_splits(part) != 0 || part->n_splits % span_splits(part) != 0)
        return tl_fail_i64(TL_EINVAL, fn,
                           "part %lld: first_split = %lld, n_splits = %lld are no multiples of the "
                           "%lld of a stretch", i, part->first_split, part->n_splits,
                           span_splits(part));
    if (m->n_rows > 0 && !part->states)
        return tl_fail_i64(TL_EINVAL, fn, "part %lld: states is NULL", i);
    if (!tl_fits_memory(sizeof(float), 3, (int64_t[]){m->n_rows, n_states(part), 2 + m->dim}))
        return tl_fail_i64(TL_EINVAL, fn,
                           "part %lld: %lld rows of the states of %lld splits do not fit in "
                           "memory", i, m->n_rows, part->n_splits);
    return TL_OK;
}

/* Every split from 0 on is there once. */
static tl_status check_parts(const struct merge *m)
{
    for (int64_t i = 0, due = 0; i < m->n_parts; i++) {
        TL_TRY(check_part(m, i, due));
        if (__builtin_add_overflow(due, m->parts[i].n_splits, &due))
            return tl_fail_i64(TL_EINVAL, fn, "part %lld ends past INT64_MAX", i);
    }
    return TL_OK;
}

static tl_status check_overlap(const struct merge *m)
{
    struct span span[5] = {tl_span("out", m->out, sizeof(float), m->n_rows * m->dim),
                           tl_span("lse", m->lse, sizeof(float), m->n_rows),
                           tl_span("sink_logits", m->sink_logits, sizeof(float), m->H),
                           tl_span("parts", m->parts, sizeof *m->parts, m->n_parts)};
    TL_TRY(tl_check_addresses(fn, span, 4));
    for (int64_t i = 0; i < m->n_parts; i++) {
        const tl_attn_part *part = &m->parts[i];
        span[4] = tl_span("the states of a part", part->states, sizeof(float),
                          m->n_rows * n_states(part) * (2 + m->dim));
        TL_TRY(tl_check_addresses(fn, span + 4, 1));
        TL_TRY(tl_check_spans(fn, span, 2, 5));
    }
    return TL_OK;
}

/* ---- the merge ---- */

static void merge_row(const struct merge *m, int64_t row, float *stretch)
{
    struct attn_state merged = {-INFINITY, 0};
    struct attn_merge merge = {.end = {.out = m->out + row * m->dim,
                                       .lse = m->lse ? m->lse + row : NULL,
                                       .sink = m->sink_logits ? m->sink_logits[row % m->H]
                                                              : -INFINITY,
                                       .dim = m->dim},
                               .merged = &merged, .stretch = stretch};
    stretch[0] = -INFINITY;
    stretch[1] = 0;
    for (int64_t i = 0; i < m->n_parts; i++) {
        const tl_attn_part *part = &m->parts[i];
        merge.states = part->states + row * n_states(part) * (2 + m->dim);
        merge.first_split = part->first_split;
        merge.n = n_states(part);
        merge.span_splits = span_splits(part);
        merge.is_last = i == m->n_parts - 1;
        m->kernels->attn_merge(&merge);
    }
}

static void merge_rows(void *ctx, int64_t lo, int64_t hi, int worker)
{
    const struct merge *m = ctx;
    float stretch[2 + TL_MAX_HEAD_DIM];
    (void)worker;
    for (int64_t row = lo; row < hi; row++)
        merge_row(m, row, stretch);
}

/* A state costs as much as reading its floats; what is worth waking workers for is shared out. */
static int64_t grain_of(const struct merge *m, const tl_pool *tp)
{
    double floats = 0;
    for (int64_t i = 0; i < m->n_parts; i++)
        floats += (double)m->n_rows * (double)n_states(&m->parts[i]) * (double)m->dim;
    if (!tl_worth_waking(floats / 4))
        return m->n_rows;
    return m->n_rows / (4 * (int64_t)tl_pool_threads(tp));
}

tl_status tl_attn_merge_f32(const tl_attn_part *parts, int64_t n_parts, int64_t n_rows, int64_t H,
                            int64_t dim, const float *sink_logits, float *out, float *lse,
                            tl_pool *tp)
{
    struct merge m = {NULL, parts, n_parts, n_rows, H, dim, sink_logits, out, lse};
    TL_TRY(check_sizes(&m));
    TL_TRY(check_parts(&m));
    TL_TRY(check_overlap(&m));
    TL_TRY(tl_kernels_require(fn, &m.kernels));
    TL_TRY(tl_pool_check(fn, tp));
    const tl_fpenv caller = tl_fpenv_enter();
    const int64_t grain = grain_of(&m, tp);
    const tl_status status =
        tl_pool_run(fn, tp, n_rows, grain > 1 ? grain : 1, merge_rows, &m);
    tl_fpenv_leave(caller);
    return status;
}
