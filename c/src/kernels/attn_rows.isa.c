/* SPDX-License-Identifier: MIT */
/* attn_rows.isa.c: the arithmetic of a few query rows over one walk of K and V, the same for
 * prefill and decode.
 *
 * Words. tile: sixteen consecutive positions, [16t, 16t+16). split: 1024 positions, [1024i,
 * 1024i+1024). run: the tiles that are scored (attn_score.h) before their values are added
 * (attn_values.h): a few of them, so that K and V of a run stay in the nearest cache. walk: the
 * tiles in order, found and fetched some tiles early (attn_walk.h). column: one of the head_dim
 * elements of a value.
 *
 * For each split a row has a state (m, l, a): maximum, sixteen lanes of the denominator,
 * unnormalised values. A finished split is merged into `out`, in order; then the sink joins and the
 * row is finished. Where every value of every row fits in work->acc the columns go together, run by
 * run; a wider head is scored a whole split at a time and its columns follow in pieces. The bits
 * are the same. */
#include "kernels/attn_values.h"
#include "kernels/kernels.h"

/* ---- blocks of rows ---- */

/* What is done to a block is a function of its own for each number of rows and dtype, so that both
 * are constants inside and a compiler has all registers for one block. */
typedef void score_fn(const job_t *job, int r0, struct run run, int64_t t,
                      const struct tile_rows *rows);
typedef void values_fn(const job_t *job, int r0, struct run run, const struct tile_rows *rows,
                       struct columns columns);
typedef void absorb_fn(const job_t *job, int r0, struct run run);

#define DEFINE_BLOCK(n_rows, dtype)                                                        \
    static __attribute__((noinline)) void score_##n_rows##_##dtype(                        \
        const job_t *job, int r0, struct run run, int64_t t, const struct tile_rows *rows) \
    {                                                                                      \
        score_tile(job, r0, n_rows, run, t, rows, dtype);                                  \
    }                                                                                      \
    static __attribute__((noinline)) void values_##n_rows##_##dtype(                       \
        const job_t *job, int r0, struct run run, const struct tile_rows *rows,            \
        struct columns columns)                                                            \
    {                                                                                      \
        add_columns(job, r0, n_rows, run, rows, columns, dtype);                           \
    }
#define DEFINE_ABSORB(n_rows, _)                                                                 \
    static                                                                                       \
        __attribute__((noinline)) void absorb_##n_rows(const job_t *job, int r0, struct run run) \
    {                                                                                            \
        for (int64_t t = run.first; t < run.end; t++)                                            \
            absorb_tile(job, r0, n_rows, run, t);                                                \
    }
#define ENTER_BLOCK(n_rows, dtype) \
    [dtype][n_rows] = {score_##n_rows##_##dtype, values_##n_rows##_##dtype},
#define ENTER_ABSORB(n_rows, _) [n_rows] = absorb_##n_rows,

#if V16_ROWS == 4
#define EACH_COUNT(DO, dtype) DO(1, dtype) DO(2, dtype) DO(3, dtype) DO(4, dtype)
#else
#define EACH_COUNT(DO, dtype) DO(1, dtype)
#endif

EACH_COUNT(DEFINE_BLOCK, TL_F16)
EACH_COUNT(DEFINE_BLOCK, TL_BF16)
EACH_COUNT(DEFINE_BLOCK, TL_F32)
EACH_COUNT(DEFINE_ABSORB, )
static const struct {
    score_fn *score;
    values_fn *values;
} block_fns[][V16_ROWS + 1] = {EACH_COUNT(ENTER_BLOCK, TL_F16) EACH_COUNT(ENTER_BLOCK, TL_BF16)
                                   EACH_COUNT(ENTER_BLOCK, TL_F32)};
static absorb_fn *const absorb_fns[V16_ROWS + 1] = {EACH_COUNT(ENTER_ABSORB, )};

V16_INLINE int rows_of_block(const job_t *job, int r0)
{
    return (int)min64(V16_ROWS, job->n_rows - r0);
}

/* All dots first, then all exponentials: what takes long to come hides behind its like. */
static void score_run(const job_t *job, struct run run)
{
    for (int64_t t = run.first; t < run.end; t++) {
        const struct tile_rows *rows = rows_here(job->work);
        find_tile(job);
        for (int r0 = 0; r0 < job->n_rows; r0 += V16_ROWS)
            block_fns[job->view->dtype][rows_of_block(job, r0)].score(job, r0, run, t, rows);
    }
    for (int r0 = 0; r0 < job->n_rows; r0 += V16_ROWS)
        absorb_fns[rows_of_block(job, r0)](job, r0, run);
}

static void add_run(const job_t *job, struct run run, const struct tile_rows *rows,
                    struct columns columns)
{
    for (int r0 = 0; r0 < job->n_rows; r0 += V16_ROWS)
        block_fns[job->view->dtype][rows_of_block(job, r0)].values(job, r0, run, rows, columns);
}

/* ---- splits ---- */

/* A split starts from m = -inf, l = 0. */
static void open_split(const job_t *job)
{
    for (int r = 0; r < job->n_rows; r++) {
        job->work->split_max[r] = -INFINITY;
        job->work->steady[r] = false;
        memset(job->work->sum[r], 0, sizeof job->work->sum[r]);
    }
}

/* Merges the state (m, L) = (y, sum) of a split into that of the splits before it, and says how its
 * values are to follow. */
V16_INLINE struct join join_state(float *m, float *denominator, float y, float sum)
{
    const float x = *m;
    if (y == -INFINITY)
        return (struct join){JOIN_KEEP, 0, 0};
    if (x == -INFINITY) {
        *m = y;
        *denominator = sum;
        return (struct join){JOIN_TAKE, 0, 0};
    }
    *m = canon_max2(x, y);
    const struct join join = {JOIN_BLEND, canon_exp1(x - *m), canon_exp1(y - *m)};
    *denominator = f32_fma(join.x_scale, *denominator, join.y_scale * sum);
    return join;
}

/* out = the split's values, or x_scale * out + y_scale * values. */
static void join_values(struct join join, const float *values, float *out, int64_t width)
{
    const v16 x_scale = v16_set1(join.x_scale), y_scale = v16_set1(join.y_scale);
    for (int64_t c = 0; c < width && join.how != JOIN_KEEP; c += 16) {
        const int64_t n = width - c;
        v16 y = n < 16 ? v16_load_n(values + c, n) : v16_load(values + c);
        if (join.how == JOIN_BLEND)
            y = v16_fma(x_scale, n < 16 ? v16_load_n(out + c, n) : v16_load(out + c),
                        v16_mul(y_scale, y));
        if (n < 16)
            v16_store_n(out + c, y, n);
        else
            v16_store(out + c, y);
    }
}

static void join_split(const job_t *job)
{
    work_t *work = job->work;
    for (int r = 0; r < job->n_rows; r++)
        work->join[r] = join_state(&work->max[r], &work->denominator[r], work->split_max[r],
                                   v16_fold(v16_load(work->sum[r])));
}

static void join_columns(const job_t *job, struct columns columns)
{
    const work_t *work = job->work;
    for (int r = 0; r < job->n_rows; r++)
        join_values(work->join[r], work->acc + r * columns.stride, job->row[r].out + columns.first,
                    columns.width);
}

/* All columns together, run by run. The values of a lone split stay in acc. */
static void narrow_split(const job_t *job, struct run split, bool lone)
{
    const struct columns all = {0, job->view->v_dim, job->work->acc_stride};
    for (int64_t t = split.first; t < split.end; t += ATTN_RUN_TILES) {
        const struct run run = {t, min64(t + ATTN_RUN_TILES, split.end), 0, t == split.first};
        const struct tile_rows *rows = rows_here(job->work);
        score_run(job, run);
        add_run(job, run, rows, all);
    }
    join_split(job);
    if (!lone)
        join_columns(job, all);
}

/* Scores of the whole split first, then the columns in pieces that fit, with a walk for each. */
static void wide_split(const job_t *job, struct run split)
{
    const int64_t dim = job->view->v_dim, from = max64(split.first * 16, job->work->path.lo);
    score_run(job, split);
    join_split(job);
    for (int64_t first = 0; first < dim; first += ATTN_ACC) {
        const struct columns piece = {first, min64(ATTN_ACC, dim - first), ATTN_ACC};
        walk_from(job, from);
        for (int64_t t = split.first; t < split.end; t++) {
            const struct run one = {t, t + 1, t - split.first, t == split.first};
            add_run(job, one, rows_here(job->work), piece);
            find_tile(job);
        }
        join_columns(job, piece);
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

/* The sink joins the denominator of (m, L), which sees at least one key: returns what the values
 * shrink by. */
static float join_sink(float sink, float *m, float *denominator)
{
    const float top = canon_max2(*m, sink), shrink = canon_exp1(*m - top);
    *denominator = f32_fma(shrink, *denominator, canon_exp1(sink - top));
    *m = top;
    return shrink;
}

/* Writes what a row amounts to, once the last split has joined. `values` are the unnormalised ones;
 * they may be out itself. */
static void finish_row(const struct attn_end *end, float m, float denominator, const float *values)
{
    float lse = 0;
    const bool empty = m == -INFINITY, has_sink = end->sink != -INFINITY;
    if (has_sink && !(end->sink < INFINITY)) {
        fill_row(end->out, end->dim, canon_nan());
        lse = canon_nan();
    } else if (empty) {
        fill_row(end->out, end->dim, 0);
        lse = end->sink + 0; /* m + log(1) */
    } else {
        if (has_sink && !(end->sink <= m)) {
            scale_row(values, end->out, end->dim, join_sink(end->sink, &m, &denominator));
            values = end->out;
        } else if (has_sink) {
            join_sink(end->sink, &m, &denominator);
        }
        scale_row(values, end->out, end->dim, 1 / denominator);
        if (end->lse)
            lse = m + canon_log(denominator);
    }
    if (end->lse)
        *end->lse = lse != lse ? canon_nan() : lse;
}

/* Writes the state of the one split a row was asked for. */
static void keep_state(float *state, float m, float denominator, const float *values, int64_t dim)
{
    const bool empty = m == -INFINITY;
    state[0] = m != m ? canon_nan() : m;
    state[1] = empty ? 0 : denominator != denominator ? canon_nan() : denominator;
    if (empty)
        fill_row(state + 2, dim, 0);
    else
        scale_row(values, state + 2, dim, 1); /* times 1: one NaN, and nothing else changes */
}

static void end_row(const job_t *job, int r, const float *values)
{
    const struct attn_row *row = &job->row[r];
    const float m = job->work->max[r], denominator = job->work->denominator[r];
    if (job->suspends)
        *row->carry = (struct attn_state){m, denominator};
    else if (row->state)
        keep_state(row->state, m, denominator, values, job->view->v_dim);
    else
        finish_row(&(struct attn_end){row->out, row->lse, row->sink, job->view->v_dim}, m,
                   denominator, values);
}

/* ---- states that were kept ---- */

void TL_ISA_FN(attn_join_row)(const struct attn_end *end, struct attn_state *row,
                              const float *states, int64_t n_splits, bool last);

void TL_ISA_FN(attn_join_row)(const struct attn_end *end, struct attn_state *row,
                              const float *states, int64_t n_splits, bool last)
{
    for (int64_t i = 0; i < n_splits; i++, states += 2 + end->dim)
        join_values(join_state(&row->m, &row->denominator, states[0], states[1]), states + 2,
                    end->out, end->dim);
    if (last)
        finish_row(end, row->m, row->denominator, end->out);
}

/* ---- a job ---- */

/* Rows of q are read again with every tile: a block's rows are laid side by side on cache lines of
 * their own, so that one pointer reaches them all and no load crosses two lines. A wide head, which
 * comes alone, is read where it lies. */
static void line_up_queries(const job_t *job, bool narrow)
{
    work_t *work = job->work;
    const int64_t dim = job->view->k_dim;
    work->q = narrow ? work->q_copy : job->row[0].q;
    work->q_stride = attn_padded(dim);
    work->acc_stride = attn_padded(job->view->v_dim);
    for (int r = 0; narrow && r < job->n_rows; r++) {
        const int r0 = r / V16_ROWS * V16_ROWS, in_block = rows_of_block(job, r0);
        float *to = work->q_copy + r0 * work->q_stride + (r - r0) * 16;
        const float *q = job->row[r].q;
        for (int64_t d = 0; d < dim; d += 16, to += in_block * 16)
            v16_store(to, dim - d < 16 ? v16_load_n(q + d, dim - d) : v16_load(q + d));
    }
}

void TL_ISA_FN(attn_rows)(const struct attn_job *job);

void TL_ISA_FN(attn_rows)(const struct attn_job *job)
{
    const bool narrow =
        job->n_rows * attn_padded(max64(job->view->k_dim, job->view->v_dim)) <= ATTN_ACC;
    line_up_queries(job, narrow);
    find_path(job);
    for (int r = 0; r < job->n_rows; r++) {
        job->work->max[r] = job->resumes ? job->row[r].carry->m : -INFINITY;
        job->work->denominator[r] = job->resumes ? job->row[r].carry->denominator : 0;
    }
    const int64_t first = job->work->path.lo / 16, end = (job->work->path.hi + 15) / 16;
    if (first < end)
        walk_from(job, job->work->path.lo);
    const bool lone = narrow && !job->resumes && !job->suspends &&
                      first / ATTN_SPLIT_TILES == (end - 1) / ATTN_SPLIT_TILES;
    for (int64_t t = first; t < end;) {
        const int64_t split_end = (t / ATTN_SPLIT_TILES + 1) * ATTN_SPLIT_TILES;
        const struct run split = {t, min64(split_end, end), 0, true};
        open_split(job);
        if (narrow)
            narrow_split(job, split, lone);
        else
            wide_split(job, split);
        t = split.end;
    }
    for (int r = 0; r < job->n_rows; r++)
        end_row(job, r, lone ? job->work->acc + r * job->work->acc_stride : job->row[r].out);
}
