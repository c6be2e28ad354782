/* SPDX-License-Identifier: MIT */
/* attn_merge.c: finished rows from states that were kept split by split, in one piece or in
 * many. */
#include <math.h>
#include <stdbool.h>

#include "kernels/attn_rows.h"
#include "kernels/kernels.h"
#include "kernels/shapes.h"
#include "kernels/sharing.h"
#include "runtime/fail.h"
#include "runtime/fpenv.h"
#include "runtime/pool_run.h"

static const char *const FN = "tl_attn_merge_f32";

struct merge {
    const struct tl_kernels *kernels;
    const tl_attn_part *parts;
    int64_t n_parts, n_rows, H, dim;
    const float *sink_logits;
    float *out, *lse;
};

static size_t part_bytes(const struct merge *m, const tl_attn_part *part)
{
    return (size_t)(m->n_rows * part->n_splits * (2 + m->dim)) * sizeof(float);
}

static tl_status check_sizes(const struct merge *m)
{
    if (m->n_parts < 1 || m->n_rows < 0 || m->H < 1 || m->dim < 1)
        return tl_fail(TL_EINVAL, FN, "n_parts = %lld, n_rows = %lld, H = %lld, dim = %lld",
                       (long long)m->n_parts, (long long)m->n_rows, (long long)m->H,
                       (long long)m->dim);
    if (m->n_rows % m->H != 0)
        return tl_fail(TL_EINVAL, FN, "n_rows = %lld is no multiple of H = %lld",
                       (long long)m->n_rows, (long long)m->H);
    if (m->n_parts > PTRDIFF_MAX / (int64_t)sizeof *m->parts)
        return tl_fail(TL_EINVAL, FN, "%lld parts do not fit in memory", (long long)m->n_parts);
    if (!m->parts)
        return tl_fail(TL_EINVAL, FN, "parts is NULL");
    if (m->n_rows > 0 && !m->out)
        return tl_fail(TL_EINVAL, FN, "out is NULL");
    if (m->dim > INT64_MAX - 2 || !tl_fits_memory(sizeof(float), 2, (int64_t[]){m->n_rows, m->dim}))
        return tl_fail(TL_EINVAL, FN, "out of [%lld, %lld] does not fit in memory",
                       (long long)m->n_rows, (long long)m->dim);
    return TL_OK;
}

/* Every split from 0 on is there once. */
static tl_status check_parts(const struct merge *m)
{
    int64_t due = 0;
    for (int64_t i = 0; i < m->n_parts; i++) {
        const tl_attn_part *part = &m->parts[i];
        if (part->n_splits < 1)
            return tl_fail(TL_EINVAL, FN, "part %lld has n_splits = %lld", (long long)i,
                           (long long)part->n_splits);
        if (part->first_split != due)
            return tl_fail(TL_EINVAL, FN, "part %lld begins at split %lld, due is split %lld",
                           (long long)i, (long long)part->first_split, (long long)due);
        if (m->n_rows > 0 && !part->states)
            return tl_fail(TL_EINVAL, FN, "part %lld: states is NULL", (long long)i);
        if (__builtin_add_overflow(due, part->n_splits, &due) ||
            !tl_fits_memory(sizeof(float), 3, (int64_t[]){m->n_rows, part->n_splits, 2 + m->dim}))
            return tl_fail(TL_EINVAL, FN,
                           "part %lld: %lld rows of %lld splits do not fit in memory", (long long)i,
                           (long long)m->n_rows, (long long)part->n_splits);
    }
    return TL_OK;
}

static tl_status check_overlap(const struct merge *m)
{
    const size_t out_bytes = (size_t)(m->n_rows * m->dim) * sizeof(float),
                 lse_bytes = (size_t)m->n_rows * sizeof(float);
    const size_t sink_bytes = (size_t)m->H * sizeof(float),
                 parts_bytes = (size_t)m->n_parts * sizeof *m->parts;
    if (tl_overlap(m->out, out_bytes, m->lse, lse_bytes))
        return tl_fail(TL_EINVAL, FN, "out overlaps lse");
    if (tl_overlap(m->out, out_bytes, m->sink_logits, sink_bytes) ||
        tl_overlap(m->lse, lse_bytes, m->sink_logits, sink_bytes))
        return tl_fail(TL_EINVAL, FN, "out or lse overlaps sink_logits");
    if (tl_overlap(m->out, out_bytes, m->parts, parts_bytes) ||
        tl_overlap(m->lse, lse_bytes, m->parts, parts_bytes))
        return tl_fail(TL_EINVAL, FN, "out or lse overlaps parts");
    for (int64_t i = 0; i < m->n_parts; i++)
        if (tl_overlap(m->out, out_bytes, m->parts[i].states, part_bytes(m, &m->parts[i])) ||
            tl_overlap(m->lse, lse_bytes, m->parts[i].states, part_bytes(m, &m->parts[i])))
            return tl_fail(TL_EINVAL, FN, "out or lse overlaps the states of part %lld",
                           (long long)i);
    return TL_OK;
}

static void merge_rows(void *ctx, int64_t lo, int64_t hi, int worker)
{
    const struct merge *m = ctx;
    (void)worker;
    for (int64_t row = lo; row < hi; row++) {
        const struct attn_end end = {.out = m->out + row * m->dim,
                                     .lse = m->lse ? m->lse + row : NULL,
                                     .sink =
                                         m->sink_logits ? m->sink_logits[row % m->H] : -INFINITY,
                                     .dim = m->dim};
        struct attn_state state = {-INFINITY, 0};
        for (int64_t i = 0; i < m->n_parts; i++) {
            const tl_attn_part *part = &m->parts[i];
            m->kernels->attn_join_row(&end, &state,
                                      part->states + row * part->n_splits * (2 + m->dim),
                                      part->n_splits, i == m->n_parts - 1);
        }
    }
}

tl_status tl_attn_merge_f32(const tl_attn_part *parts, int64_t n_parts, int64_t n_rows, int64_t H,
                            int64_t dim, const float *sink_logits, float *out, float *lse,
                            tl_pool *tp)
{
    struct merge m = {NULL, parts, n_parts, n_rows, H, dim, sink_logits, out, lse};
    TL_TRY(check_sizes(&m));
    TL_TRY(check_parts(&m));
    TL_TRY(check_overlap(&m));
    TL_TRY(tl_kernels_require(FN, &m.kernels));
    TL_TRY(tl_pool_check(FN, tp));
    const tl_attn_part *last = &parts[n_parts - 1];
    const double states = (double)n_rows * (double)(last->first_split + last->n_splits);
    const int64_t grain = tl_worth_sharing(states * (double)dim, 1, 1)
                              ? n_rows / (4 * (int64_t)tl_pool_threads(tp))
                              : n_rows;
    const tl_fpenv caller = tl_fpenv_enter();
    const tl_status status = tl_pool_run(FN, tp, n_rows, grain > 1 ? grain : 1, merge_rows, &m);
    tl_fpenv_leave(caller);
    return status;
}
