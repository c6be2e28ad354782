/* SPDX-License-Identifier: MIT */
/* attn_rows.isa.c: the arithmetic of a few query rows over one walk of K and V, the same for
 * prefill and decode.
 *
 * Words. tile: sixteen consecutive positions, [16t, 16t+16). split: 1024 positions, [1024i,
 * 1024i+1024). run: the tiles that are scored (attn_score.h) before their values are added
 * (attn_values.h): a few of them, so that K and V of a run stay in the nearest cache. walk: the
 * tiles in order, found and prefetched some tiles early (attn_walk.h). column: one of the head_dim
 * elements of a value.
 *
 * For each split a row has a state (m, l, a): maximum, sixteen lanes of the denominator,
 * unnormalised values. A finished split is merged into the state of its stretch, in order; a
 * finished stretch into those before it; then the sink joins and the row is finished. */
#include "kernels/attn_widen.h"
#include "kernels/kernels.h"

/* ---- blocks of rows ---- */

/* What is done to a block is a function of its own for each number of rows and dtype, so that both
 * are constants inside and a compiler has all registers for one block. `stored`: `rows`, but for
 * e4m3 that was widened. */
typedef void score_fn(job_t *job, int r0, struct run run, int64_t t, const struct tile_rows *rows,
                      const struct tile_rows *stored);
typedef void values_fn(job_t *job, int r0, struct run run, const struct tile_rows *rows,
                       const struct tile_rows *stored, struct columns columns);
typedef void absorb_fn(job_t *job, int r0, struct run run);

#define DEFINE_BLOCK(n_rows, dtype, stored_dtype, suffix, at)                              \
    static __attribute__((noinline)) void score_##n_rows##suffix(                          \
        job_t *job, int r0, struct run run, int64_t t, const struct tile_rows *rows,       \
        const struct tile_rows *stored)                                                    \
    {                                                                                      \
        (void)stored;                                                                      \
        score_tile(job, r0, n_rows, run, t, rows, at, dtype, stored_dtype);                \
    }                                                                                      \
    static __attribute__((noinline)) void values_##n_rows##suffix(                         \
        job_t *job, int r0, struct run run, const struct tile_rows *rows,                  \
        const struct tile_rows *stored, struct columns columns)                            \
    {                                                                                      \
        (void)stored;                                                                      \
        add_columns(job, r0, n_rows, run, rows, at, columns, dtype, stored_dtype);         \
    }
#define DEFINE_ABSORB(n_rows, _)                                                                 \
    static                                                                                       \
        __attribute__((noinline)) void absorb_##n_rows(job_t *job, int r0, struct run run) \
    {                                                                                            \
        for (int64_t t = run.first; t < run.end; t++) {                                          \
            absorb_tile(job, r0, n_rows, run, t);                                                \
            if (has_scales(job))                                                                 \
                weigh_tile(job->work, n_rows, score_at(job->work, run, r0, t), t - run.first);   \
        }                                                                                        \
    }
#define DEFINE_PLAIN(n_rows, dtype) DEFINE_BLOCK(n_rows, dtype, dtype, _##dtype, rows)
#define DEFINE_WIDE(n_rows, _) DEFINE_BLOCK(n_rows, TL_F16, TL_F8_E4M3, _wide, stored)
#define ENTER_BLOCK(n_rows, dtype) \
    [dtype][n_rows] = {score_##n_rows##_##dtype, values_##n_rows##_##dtype},
#define ENTER_WIDE(n_rows, _) [n_rows] = {score_##n_rows##_wide, values_##n_rows##_wide},
#define ENTER_ABSORB(n_rows, _) [n_rows] = absorb_##n_rows,

#if V16_ROWS == 4
#define EACH_COUNT(DO, dtype) DO(1, dtype) DO(2, dtype) DO(3, dtype) DO(4, dtype)
#else
#define EACH_COUNT(DO, dtype) DO(1, dtype)
#endif

#define DEFINE_FORMAT(dtype, type, suffix) EACH_COUNT(DEFINE_PLAIN, dtype)
#define ENTER_FORMAT(dtype, type, suffix) EACH_COUNT(ENTER_BLOCK, dtype)
KV_FORMATS(DEFINE_FORMAT)
EACH_COUNT(DEFINE_WIDE, )
EACH_COUNT(DEFINE_ABSORB, )
struct block_fns {
    score_fn *score;
    values_fn *values;
};
static const struct block_fns block_fns[][V16_ROWS + 1] = {KV_FORMATS(ENTER_FORMAT)};
static const struct block_fns wide_fns[V16_ROWS + 1] = {EACH_COUNT(ENTER_WIDE, )};
static absorb_fn *const absorb_fns[V16_ROWS + 1] = {EACH_COUNT(ENTER_ABSORB, )};

V16_INLINE int rows_of_block(job_t *job, int r0)
{
    return (int)min64(V16_ROWS, job->n_rows - r0);
}

/* All dots first, then all exponentials, so that neither waits for the other's latency. */
static void score_run(job_t *job, struct run run)
{
    const bool widens = widens_keys(job);
    const struct block_fns *fns = widens ? wide_fns : block_fns[job->kv->k.dtype];
    for (int64_t t = run.first; t < run.end; t++) {
        const struct tile_rows *stored = rows_here(job->work), *rows = stored;
        if (has_scales(job))
            take_scales(job, t, t - run.first);
        find_tile(job);
        if (widens)
            rows = widen_keys(job, stored);
        for (int r0 = 0; r0 < job->n_rows; r0 += V16_ROWS)
            fns[rows_of_block(job, r0)].score(job, r0, run, t, rows, stored);
    }
    for (int r0 = 0; r0 < job->n_rows; r0 += V16_ROWS)
        absorb_fns[rows_of_block(job, r0)](job, r0, run);
}

/* All columns together, or as many as are widened together. */
static void add_run(job_t *job, struct run run, const struct tile_rows *stored)
{
    const struct kv_side *side = &job->kv->v;
    const bool widens = widens_values(job);
    const struct block_fns *fns = widens ? wide_fns : block_fns[side->dtype];
    const int64_t width = widens ? ATTN_WIDE_COLUMNS : side->dim;
    for (int64_t first = 0; first < side->dim; first += width) {
        const struct columns columns = {first, min64(width, side->dim - first)};
        const struct tile_rows *rows = widens ? widen_values(job, run, stored, columns) : stored;
        for (int r0 = 0; r0 < job->n_rows; r0 += V16_ROWS)
            fns[rows_of_block(job, r0)].values(job, r0, run, rows, stored, columns);
    }
}

/* ---- splits and stretches ---- */

static const struct attn_state nothing = {-INFINITY, 0};

/* Merges a newer state into the older one, and says how its values are to follow. */
V16_INLINE struct join join_state(struct attn_state *older, struct attn_state newer)
{
    const float x = older->m, y = newer.m;
    if (y == -INFINITY)
        return (struct join){JOIN_KEEP, 0, 0};
    if (x == -INFINITY) {
        *older = newer;
        return (struct join){JOIN_TAKE, 0, 0};
    }
    older->m = canon_max2(x, y);
    const struct join join = {JOIN_BLEND, canon_exp1(x - older->m), canon_exp1(y - older->m)};
    older->denominator =
        f32_fma(join.x_scale, older->denominator, join.y_scale * newer.denominator);
    return join;
}

/* older = the newer values, or x_scale * older + y_scale * newer. */
static void join_values(struct join join, const float *newer, float *older, int64_t width)
{
    const v16 x_scale = v16_set1(join.x_scale), y_scale = v16_set1(join.y_scale);
    for (int64_t c = 0; c < width && join.how != JOIN_KEEP; c += 16) {
        const int64_t n = width - c;
        v16 y = n < 16 ? v16_load_n(newer + c, n) : v16_load(newer + c);
        if (join.how == JOIN_BLEND)
            y = v16_fma(x_scale, n < 16 ? v16_load_n(older + c, n) : v16_load(older + c),
                        v16_mul(y_scale, y));
        if (n < 16)
            v16_store_n(older + c, y, n);
        else
            v16_store(older + c, y);
    }
}

/* The values of the current stretch: the first one's lie where the merge of all will. */
V16_INLINE float *stretch_values(job_t *job, int r)
{
    const work_t *work = job->work;
    return work->at.n_stretches > 1 ? job->work->stretch + r * work->acc_stride : job->row[r].out;
}

/* The current stretch joins those behind it. */
static void close_stretch(job_t *job)
{
    work_t *work = job->work;
    for (int r = 0; r < job->n_rows; r++) {
        const struct join join = join_state(&work->merged[r], work->in_stretch[r]);
        if (work->at.n_stretches > 1)
            join_values(join, stretch_values(job, r), job->row[r].out, job->kv->v.dim);
        work->in_stretch[r] = nothing;
    }
}

/* A split starts from m = -inf, l = 0. */
static void open_split(job_t *job, int64_t split)
{
    work_t *work = job->work;
    if (work->at.stretch != split / ATTN_STRETCH_SPLITS) {
        if (work->at.n_stretches > 0)
            close_stretch(job);
        work->at.stretch = split / ATTN_STRETCH_SPLITS;
        work->at.n_stretches++;
    }
    for (int r = 0; r < job->n_rows; r++) {
        work->split_max[r] = -INFINITY;
        work->max_is_finite[r] = false;
        memset(work->sum[r], 0, sizeof work->sum[r]);
    }
    work->at.split_is_open = true;
}

/* The current split joins its stretch. One that is all there is is the whole of the row, and its
 * values stay in acc. */
static void close_split(job_t *job, bool is_lone)
{
    work_t *work = job->work;
    struct attn_state *into = is_lone ? work->merged : work->in_stretch;
    for (int r = 0; r < job->n_rows; r++) {
        const struct attn_state split = {work->split_max[r], v16_fold(v16_load(work->sum[r]))};
        const struct join join = join_state(&into[r], split);
        if (!is_lone)
            join_values(join, work->acc + r * work->acc_stride, stretch_values(job, r),
                        job->kv->v.dim);
    }
    work->at.split_is_open = false;
}

/* Tiles of one split, run by run. */
static void walk_split(job_t *job, struct run tiles)
{
    const int64_t split = tiles.first / ATTN_SPLIT_TILES, n = run_tiles(job->kv);
    bool is_fresh = !job->work->at.split_is_open;
    if (is_fresh)
        open_split(job, split);
    for (int64_t t = tiles.first; t < tiles.end; t += n, is_fresh = false) {
        const struct run run = {t, min64(t + n, tiles.end), 0, is_fresh};
        const struct tile_rows *rows = rows_here(job->work);
        score_run(job, run);
        add_run(job, run, rows);
    }
}

/* ---- the end of a row ---- */

static void scale_row(const float *from, float *to, int64_t dim, float factor)
{
    const v16 f = v16_set1(factor);
    int64_t d = 0;
    for (; d + 16 <= dim; d += 16)
        v16_store(to + d, canon_one_nan(v16_mul(v16_load(from + d), f)));
    if (d < dim)
        v16_store_n(to + d, canon_one_nan(v16_mul(v16_load_n(from + d, dim - d), f)), dim - d);
}

static void fill_row(float *out, int64_t dim, float value)
{
    for (int64_t d = 0; d < dim; d++)
        out[d] = value;
}

/* The sink joins a state that sees at least one key: returns what the values shrink by. */
static float join_sink(float sink, struct attn_state *row)
{
    const float top = canon_max2(row->m, sink), shrink = canon_exp1(row->m - top);
    row->denominator = f32_fma(shrink, row->denominator, canon_exp1(sink - top));
    row->m = top;
    return shrink;
}

/* Writes what a row amounts to, once the last stretch has joined. `values` are the unnormalised
 * ones; they may be out itself. */
static void finish_row(const struct attn_end *end, struct attn_state row, const float *values)
{
    float lse = 0;
    const bool empty = row.m == -INFINITY, has_sink = end->sink != -INFINITY;
    if (has_sink && !(end->sink < INFINITY)) {
        fill_row(end->out, end->dim, canon_nan());
        lse = canon_nan();
    } else if (empty) {
        fill_row(end->out, end->dim, 0);
        lse = end->sink + 0; /* m + log(1) */
    } else {
        if (has_sink && !(end->sink <= row.m)) {
            scale_row(values, end->out, end->dim, join_sink(end->sink, &row));
            values = end->out;
        } else if (has_sink) {
            join_sink(end->sink, &row);
        }
        scale_row(values, end->out, end->dim, 1 / row.denominator);
        if (end->lse)
            lse = row.m + canon_log(row.denominator);
    }
    if (end->lse)
        *end->lse = lse != lse ? canon_nan() : lse;
}

/* Writes a state as it is handed out: m and L in front of the values. */
static void keep_state(float *out, int64_t dim, struct attn_state row, const float *values)
{
    const bool empty = row.m == -INFINITY;
    out[-2] = row.m != row.m ? canon_nan() : row.m;
    out[-1] = empty                                  ? 0
              : row.denominator != row.denominator ? canon_nan()
                                                     : row.denominator;
    if (empty)
        fill_row(out, dim, 0);
    else
        scale_row(values, out, dim, 1); /* times 1: one NaN, and nothing else changes */
}

static void end_row(job_t *job, int r, const float *values)
{
    const struct attn_row *row = &job->row[r];
    const struct attn_state merged = job->work->merged[r];
    if (job->part == ATTN_STATE)
        keep_state(row->out, job->kv->v.dim, merged, values);
    else
        finish_row(&(struct attn_end){row->out, row->lse, row->sink, job->kv->v.dim}, merged,
                   values);
}

/* ---- states that were kept ---- */

/* What is in the current stretch joins the stretches behind it. */
static void close_kept_stretch(struct attn_merge *merge)
{
    float *stretch = merge->stretch;
    join_values(join_state(merge->merged, (struct attn_state){stretch[0], stretch[1]}), stretch + 2,
                merge->end.out, merge->end.dim);
    stretch[0] = -INFINITY;
    stretch[1] = 0;
}

void TL_ISA_FN(attn_merge)(struct attn_merge *merge)
{
    const int64_t dim = merge->end.dim;
    const float *state = merge->states;
    for (int64_t i = 0; i < merge->n; i++, state += 2 + dim) {
        const struct attn_state newer = {state[0], state[1]};
        if ((merge->first_split + i * merge->span_splits) % ATTN_STRETCH_SPLITS == 0)
            close_kept_stretch(merge);
        if (merge->span_splits == ATTN_STRETCH_SPLITS) {
            join_values(join_state(merge->merged, newer), state + 2, merge->end.out, dim);
        } else {
            struct attn_state stretch = {merge->stretch[0], merge->stretch[1]};
            join_values(join_state(&stretch, newer), state + 2, merge->stretch + 2, dim);
            merge->stretch[0] = stretch.m;
            merge->stretch[1] = stretch.denominator;
        }
    }
    if (!merge->is_last)
        return;
    close_kept_stretch(merge);
    finish_row(&merge->end, *merge->merged, merge->end.out);
}

/* ---- a job ---- */

/* Rows of q are read again with every tile: a block's rows are laid side by side on cache lines of
 * their own, so that one pointer reaches them all and no load crosses two lines. */
static void line_up_queries(job_t *job)
{
    work_t *work = job->work;
    const int64_t dim = job->kv->k.dim;
    work->q_stride = attn_padded(dim);
    work->acc_stride = attn_padded(job->kv->v.dim);
    for (int r = 0; r < job->n_rows; r++) {
        const int r0 = r / V16_ROWS * V16_ROWS, in_block = rows_of_block(job, r0);
        float *to = work->q_copy + r0 * work->q_stride + (r - r0) * 16;
        const float *q = job->row[r].q;
        for (int64_t d = 0; d < dim; d += 16, to += in_block * 16)
            v16_store(to, dim - d < 16 ? v16_load_n(q + d, dim - d) : v16_load(q + d));
    }
}

/* Nothing has been seen yet. */
static void begin_rows(job_t *job)
{
    work_t *work = job->work;
    for (int r = 0; r < job->n_rows; r++)
        work->in_stretch[r] = work->merged[r] = nothing;
    work->at = (struct attn_place){.stretch = -1};
}

/* Goes on with rows `from` and up of the job that began them: they become rows 0 and up. The rows
 * in front of them are done with. */
static void take_rows(job_t *job)
{
    work_t *work = job->work;
    const size_t n = (size_t)job->n_rows, from = (size_t)job->from;
    const size_t stride = (size_t)work->acc_stride;
    memmove(work->acc, work->acc + from * stride, n * stride * sizeof *work->acc);
    memmove(work->stretch, work->stretch + from * stride, n * stride * sizeof *work->stretch);
    memmove(work->sum, work->sum + from, n * sizeof *work->sum);
    memmove(work->split_max, work->split_max + from, n * sizeof *work->split_max);
    memmove(work->in_stretch, work->in_stretch + from, n * sizeof *work->in_stretch);
    memmove(work->merged, work->merged + from, n * sizeof *work->merged);
    memset(work->max_is_finite, 0, sizeof work->max_is_finite);
    work->at = work->begun;
}

void TL_ISA_FN(attn_rows)(struct attn_job *job)
{
    work_t *work = job->work;
    line_up_queries(job);
    lay_out_wide(job);
    find_path(job);
    if (job->part == ATTN_GO_ON)
        take_rows(job);
    else
        begin_rows(job);
    const int64_t first = work->path.lo / 16, end = (work->path.hi + 15) / 16;
    const bool is_lone = (job->part == ATTN_WHOLE || job->part == ATTN_STATE) &&
                         first / ATTN_SPLIT_TILES == (end - 1) / ATTN_SPLIT_TILES;
    if (first < end)
        walk_from(job, work->path.lo);
    for (int64_t t = first; t < end;) {
        const int64_t split_end = (t / ATTN_SPLIT_TILES + 1) * ATTN_SPLIT_TILES;
        const struct run tiles = {t, min64(split_end, end), 0, false};
        walk_split(job, tiles);
        t = tiles.end;
        if (t == split_end || (t == end && job->part != ATTN_BEGIN))
            close_split(job, is_lone);
    }
    if (job->part == ATTN_BEGIN) {
        work->begun = work->at;
        return;
    }
    if (work->at.split_is_open)
        close_split(job, false);
    if (!is_lone)
        close_stretch(job);
    for (int r = 0; r < job->n_rows; r++)
        end_row(job, r, is_lone ? work->acc + r * work->acc_stride : job->row[r].out);
}
