/* SPDX-License-Identifier: MIT */
/* attn_rows.isa.c: the arithmetic of a few query rows over one walk of K and V, the same for prefill and decode.
 *
 * Words. tile: sixteen consecutive positions, [16t, 16t+16). split: 1024 positions, [1024i, 1024i+1024). run: the tiles
 * that are scored before their values are added: a few of them, so that K and V of a run stay in the nearest cache.
 * column: one of the head_dim elements of a value.
 *
 * For each split a row has a state (m, l, a): maximum, sixteen lanes of the denominator, unnormalised values. A
 * finished split is merged into `out`, in order; then the sink joins and the row is finished. Where every value of
 * every row fits in work->acc the columns go together, run by run; a wider head is scored a whole split at a time and
 * its columns follow in pieces. The bits are the same. */
#include <stdbool.h>

#include "kernels/attn_rows.h"
#include "kernels/kernels.h"
#include "numerics/canon.h"

typedef struct attn_job job_t;
typedef struct attn_work work_t;

/* Tiles [first, end) of a split, scored together. */
struct run {
    int64_t first, end;
};

/* The positions that any row of the job sees. */
struct span {
    int64_t lo, hi;
};

V16_INLINE int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

V16_INLINE int64_t max64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

/* BLOCK(r, n) for the rows r .. r+n-1 of block after block; n is a constant in each call, so that what a block holds
 * stays in registers. */
#define EACH_ROW_BLOCK(n_rows, BLOCK)                        \
    do {                                                     \
        int r_ = 0;                                          \
        for (; r_ + V16_ROWS <= (n_rows); r_ += V16_ROWS)    \
            BLOCK(r_, V16_ROWS);                             \
        if (V16_ROWS == 4 && (n_rows) - r_ == 3)             \
            BLOCK(r_, 3);                                    \
        else if (V16_ROWS == 4 && (n_rows) - r_ == 2)        \
            BLOCK(r_, 2);                                    \
        else if (V16_ROWS == 4 && (n_rows) - r_ == 1)        \
            BLOCK(r_, 1);                                    \
    } while (0)

/* ---- finding K and V ---- */

V16_INLINE int64_t element_bytes(tl_dtype dtype)
{
    return dtype == TL_F32 ? 4 : 2;
}

V16_INLINE v16 load_kv(const void *row, int64_t d, tl_dtype dtype)
{
    return dtype == TL_F32 ? v16_load((const float *)row + d) : v16_load_f16((const uint16_t *)row + d);
}

V16_INLINE v16 load_kv_n(const void *row, int64_t d, int64_t n, tl_dtype dtype)
{
    return dtype == TL_F32 ? v16_load_n((const float *)row + d, n) : v16_load_f16_n((const uint16_t *)row + d, n);
}

/* row[i] = where position lo + i lies, for positions lo .. hi-1, block by block through the table. */
static void find_rows(const job_t *job, const struct kv_side *side, int64_t lo, int64_t hi, const void **row)
{
    const int64_t bytes = element_bytes(job->view->dtype), block_tokens = job->view->block_tokens;
    const int64_t step = side->token_stride * bytes;
    int64_t block = lo / block_tokens, slot = lo - block * block_tokens;
    for (int64_t left = hi - lo; left > 0; block++, slot = 0) {
        const int64_t n = min64(block_tokens - slot, left);
        const char *at = (const char *)side->base + bytes * (job->block_table[block] * side->block_stride +
                                                             job->kv_head * side->head_stride) + slot * step;
        for (int64_t i = 0; i < n; i++)
            *row++ = at + i * step;
        left -= n;
    }
}

/* Fills work->key and work->value for the positions of a run that are in the span, and of the next few tiles. Index 0
 * is the first slot of the run's first tile; slots before or behind the span point at the nearest row inside, so that a
 * tile can be loaded whole and masked afterwards. */
static void find_run(const job_t *job, struct run run, struct span span)
{
    const int64_t origin = run.first * 16, lo = max64(origin, span.lo), hi = min64((run.end + ATTN_AHEAD) * 16, span.hi);
    const void **key = job->work->key, **value = job->work->value;
    find_rows(job, &job->view->k, lo, hi, key + (lo - origin));
    find_rows(job, &job->view->v, lo, hi, value + (lo - origin));
    for (int64_t i = 0; i < lo - origin; i++)
        key[i] = key[lo - origin];
    for (int64_t i = hi - origin; i < (run.end + ATTN_AHEAD) * 16 - origin; i++) {
        key[i] = key[hi - origin - 1];
        value[i] = value[hi - origin - 1];
    }
}

/* Rows of K and of V some tiles ahead, fetched into the second-level cache a line at a time while others are computed
 * with. */
struct ahead {
    bool wanted;
    const void *const *key, *const *value;
};

V16_INLINE void prefetch(const void *row, int64_t d, tl_dtype dtype)
{
    __builtin_prefetch((const char *)row + d * element_bytes(dtype), 0, 2);
}

/* ---- scores ---- */

/* One step of the dots of n_rows rows with V16_KEYS(n_rows) keys: elements d .. d+15 of each. */
V16_INLINE void dot_step(int n_rows, const float *const *q, const void *const *key, int64_t d, tl_dtype dtype,
                         v16 acc[V16_ROWS][4])
{
    const int n_keys = V16_KEYS(n_rows);
#pragma GCC unroll 4
    for (int k = 0; k < n_keys; k++) {
        const v16 x = load_kv(key[4 * k], d, dtype);
#pragma GCC unroll 4
        for (int r = 0; r < n_rows; r++)
            acc[r][k] = v16_fma(v16_load(q[r] + d), x, acc[r][k]);
    }
}

V16_INLINE void dot_rest(int n_rows, const float *const *q, const void *const *key, int64_t d, int64_t rest, tl_dtype dtype,
                         v16 acc[V16_ROWS][4])
{
    const int n_keys = V16_KEYS(n_rows);
#pragma GCC unroll 4
    for (int k = 0; k < n_keys; k++) {
        const v16 x = load_kv_n(key[4 * k], d, rest, dtype);
#pragma GCC unroll 4
        for (int r = 0; r < n_rows; r++)
            acc[r][k] = v16_fma_n(v16_load_n(q[r] + d, rest), x, acc[r][k], rest);
    }
}

/* The lanes of the dots with keys key[0], key[4], ..., not folded yet. Lane i sums d = i, i+16, ... in rising order;
 * lanes past the head width are left alone in the last step. Thirty-two elements of f16 are a cache line: the first
 * half of a step fetches one of K ahead, the second one of V. */
V16_INLINE void dot_lanes(int n_rows, const float *const *q, const void *const *key, int64_t dim, tl_dtype dtype,
                          struct ahead ahead, v16 acc[V16_ROWS][4])
{
    const int n_keys = V16_KEYS(n_rows);
    const int64_t whole = dim & ~(int64_t)15;
    int64_t d = 0;
#pragma GCC unroll 4
    for (int r = 0; r < n_rows; r++)
#pragma GCC unroll 4
        for (int k = 0; k < n_keys; k++)
            acc[r][k] = v16_zero();
    for (; d + 32 <= whole; d += 32) {
        for (int k = 0; ahead.wanted && k < n_keys; k++)
            prefetch(ahead.key[4 * k], d, dtype);
        dot_step(n_rows, q, key, d, dtype, acc);
        for (int k = 0; ahead.wanted && k < n_keys; k++)
            prefetch(ahead.value[4 * k], d, dtype);
        dot_step(n_rows, q, key, d + 16, dtype, acc);
    }
    if (d < whole)
        dot_step(n_rows, q, key, d, dtype, acc);
    if (whole < dim)
        dot_rest(n_rows, q, key, whole, dim - whole, dtype, acc);
}

/* dot[r] = the sixteen dots of row r with the keys of a tile. */
V16_INLINE void tile_dots(int n_rows, const float *const *q, const void *const *key, int64_t dim, tl_dtype dtype,
                          struct ahead ahead, v16 *dot)
{
    const int n_keys = V16_KEYS(n_rows);
    v16 quad[V16_ROWS][4];
    for (int g = 0; g < 4; g++) {
        v16 lanes[V16_ROWS][4];
#pragma GCC unroll 4
        for (int k0 = 0; k0 < 4; k0 += n_keys) {
            v16 acc[V16_ROWS][4];
            const int j = g + 4 * k0;
            dot_lanes(n_rows, q, key + j, dim, dtype, (struct ahead){ahead.wanted, ahead.key + j, ahead.value + j}, acc);
#pragma GCC unroll 4
            for (int r = 0; r < n_rows; r++)
#pragma GCC unroll 4
                for (int k = 0; k < n_keys; k++)
                    lanes[r][k0 + k] = acc[r][k];
        }
#pragma GCC unroll 4
        for (int r = 0; r < n_rows; r++)
            quad[r][g] = v16_quads(lanes[r][0], lanes[r][1], lanes[r][2], lanes[r][3]);
    }
#pragma GCC unroll 4
    for (int r = 0; r < n_rows; r++)
        dot[r] = v16_fold_quads(quad[r][0], quad[r][1], quad[r][2], quad[r][3]);
}

/* Where the scores of row r and tile t of a run stand, and then their exponentials. */
static inline float *score_of(work_t *work, struct run run, int r, int64_t t)
{
    return work->score + (r * (run.end - run.first) + (t - run.first)) * 16;
}

/* One row takes in the scores of a tile, of which it sees slots lo .. hi-1: raises m, adds exp(s - m) to l and leaves
 * it in place of s.
 * Where m does not rise nothing is rescaled. A tile that leaves m at -inf counts for nothing. */
static void absorb_tile(work_t *work, int r, int64_t tile, float *score, int lo, int hi)
{
    work->alpha[r][tile] = 1;
    work->seen[r][tile].lo = work->seen[r][tile].hi = 0;
    if (lo >= hi)
        return;
    v16 s = v16_load(score), sum = v16_load(work->sum[r]);
    if (hi - lo < 16)
        s = v16_only(s, lo, hi);
    if (__builtin_expect(!v16_all_le(s, v16_set1(work->split_max[r])), 0)) {
        const float m = canon_max(work->split_max[r], s), alpha = canon_exp1(work->split_max[r] - m);
        sum = v16_mul(sum, v16_set1(alpha));
        work->alpha[r][tile] = alpha;
        work->split_max[r] = m;
    }
    if (work->split_max[r] == -INFINITY)
        return;
    const v16 x = v16_sub(s, v16_set1(work->split_max[r]));
    const v16 p = work->split_max[r] < INFINITY ? canon_exp_below(x) : canon_exp(x);
    v16_store(work->sum[r], v16_add(sum, p));
    v16_store(score, p);
    work->seen[r][tile].lo = (uint8_t)lo;
    work->seen[r][tile].hi = (uint8_t)hi;
}

static void absorb_tiles(const job_t *job, struct run run, int64_t t)
{
    for (int r = 0; r < job->n_rows; r++) {
        const struct attn_row *row = &job->row[r];
        const int lo = (int)min64(max64(row->lo - t * 16, 0), 16), hi = (int)min64(max64(row->hi - t * 16, 0), 16);
        absorb_tile(job->work, r, t % ATTN_SPLIT_TILES, score_of(job->work, run, r, t), lo, hi);
    }
}

V16_INLINE void score_block(const job_t *job, int r0, int n_rows, struct run run, int64_t t, tl_dtype dtype)
{
    work_t *work = job->work;
    v16 dot[V16_ROWS];
    const int64_t at = (t - run.first) * 16, next = at + ATTN_AHEAD * 16;
    const struct ahead ahead = {r0 == 0, work->key + next, work->value + next};
    tile_dots(n_rows, work->q_row + r0, work->key + at, job->view->head_dim, dtype, ahead, dot);
#pragma GCC unroll 4
    for (int r = 0; r < n_rows; r++)
        v16_store(score_of(work, run, r0 + r, t), v16_mul(v16_set1(job->scale), dot[r]));
}

V16_INLINE void score_run(const job_t *job, struct run run, tl_dtype dtype)
{
    for (int64_t t = run.first; t < run.end; t++) {
#define SCORE_BLOCK(r, n) score_block(job, r, n, run, t, dtype)
        EACH_ROW_BLOCK(job->n_rows, SCORE_BLOCK);
        absorb_tiles(job, run, t);
    }
}

/* ---- values ---- */

/* Where the values of a block of rows go: acc holds `stride` floats a row, for columns `first` and up. */
struct columns {
    int64_t first, width, stride;
};

/* n_vec vectors of columns from c on (the last `n` < 16 wide where n_vec is 1) of rows r0 .. r0+n_rows-1 take in the
 * values of a run: rescaled by each tile's alpha, then plus score * v for the seen slots in rising order. The rows see
 * the same slots. */
V16_INLINE void add_values(const job_t *job, int r0, int n_rows, struct run run, struct columns columns, int64_t c,
                           int n_vec, int64_t n, tl_dtype dtype)
{
    work_t *work = job->work;
    float *at = work->acc + r0 * columns.stride + c;
    v16 acc[V16_ROWS][V16_MAX_COLS];
#pragma GCC unroll 4
    for (int r = 0; r < n_rows; r++)
#pragma GCC unroll 8
        for (int i = 0; i < n_vec; i++)
            acc[r][i] = v16_load(at + r * columns.stride + 16 * i);
    for (int64_t t = run.first; t < run.end; t++) {
        const int64_t tile = t % ATTN_SPLIT_TILES;
        const void *const *value = work->value + (t - run.first) * 16;
        const float *score[V16_ROWS];
#pragma GCC unroll 4
        for (int r = 0; r < n_rows; r++) {
            const float alpha = work->alpha[r0 + r][tile];
            if (alpha != 1)
#pragma GCC unroll 8
                for (int i = 0; i < n_vec; i++)
                    acc[r][i] = v16_mul(acc[r][i], v16_set1(alpha));
            score[r] = score_of(work, run, r0 + r, t);
        }
        for (int j = work->seen[r0][tile].lo; j < work->seen[r0][tile].hi; j++) {
            v16 v[V16_MAX_COLS];
#pragma GCC unroll 8
            for (int i = 0; i < n_vec; i++)
                v[i] = n_vec > 1 || n == 16 ? load_kv(value[j], columns.first + c + 16 * i, dtype)
                                            : load_kv_n(value[j], columns.first + c, n, dtype);
#pragma GCC unroll 4
            for (int r = 0; r < n_rows; r++)
#pragma GCC unroll 8
                for (int i = 0; i < n_vec; i++)
                    acc[r][i] = v16_fma(v16_set1(score[r][j]), v[i], acc[r][i]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < n_rows; r++)
#pragma GCC unroll 8
        for (int i = 0; i < n_vec; i++)
            v16_store(at + r * columns.stride + 16 * i, acc[r][i]);
}

/* All columns of a block of rows. */
V16_INLINE void add_columns(const job_t *job, int r0, int n_rows, struct run run, struct columns columns, tl_dtype dtype)
{
    const int n_vec = V16_COLS(n_rows);
    int64_t c = 0;
    for (; c + 16 * n_vec <= columns.width; c += 16 * n_vec)
        add_values(job, r0, n_rows, run, columns, c, n_vec, 16, dtype);
    for (; c < columns.width; c += 16)
        add_values(job, r0, n_rows, run, columns, c, 1, min64(16, columns.width - c), dtype);
}

/* Whether rows r0 .. r0+n_rows-1 see the same slots of every tile of a run. */
static bool see_alike(const work_t *work, int r0, int n_rows, struct run run)
{
    for (int r = r0 + 1; r < r0 + n_rows; r++)
        if (memcmp(work->seen[r] + run.first % ATTN_SPLIT_TILES, work->seen[r0] + run.first % ATTN_SPLIT_TILES,
                   (size_t)(run.end - run.first) * sizeof work->seen[0][0]) != 0)
            return false;
    return true;
}

/* add_columns a row at a time: out of line, because it is rare. */
static __attribute__((noinline)) void add_rows_apart(const job_t *job, int r0, int n_rows, struct run run,
                                                     struct columns columns)
{
    for (int r = r0; r < r0 + n_rows; r++) {
        if (job->view->dtype == TL_F32)
            add_columns(job, r, 1, run, columns, TL_F32);
        else
            add_columns(job, r, 1, run, columns, TL_F16);
    }
}

/* Rows that see different slots, as at the edge of a causal mask, go one by one. */
V16_INLINE void add_block(const job_t *job, int r0, int n_rows, struct run run, struct columns columns, tl_dtype dtype)
{
    if (n_rows == 1 || see_alike(job->work, r0, n_rows, run))
        add_columns(job, r0, n_rows, run, columns, dtype);
    else
        add_rows_apart(job, r0, n_rows, run, columns);
}

V16_INLINE void add_run(const job_t *job, struct run run, struct columns columns, tl_dtype dtype)
{
#define ADD_BLOCK(r, n) add_block(job, r, n, run, columns, dtype)
    EACH_ROW_BLOCK(job->n_rows, ADD_BLOCK);
}

/* ---- splits ---- */

/* A split starts from m = -inf, l = 0. */
static void open_split(const job_t *job)
{
    for (int r = 0; r < job->n_rows; r++) {
        job->work->split_max[r] = -INFINITY;
        memset(job->work->sum[r], 0, sizeof job->work->sum[r]);
    }
}

/* Merges the (m, L) of the scored split into those of the splits before it, and says how its values are to follow. */
static void join_split(const job_t *job)
{
    work_t *work = job->work;
    for (int r = 0; r < job->n_rows; r++) {
        const float x = work->max[r], y = work->split_max[r], sum = v16_fold(v16_load(work->sum[r]));
        if (y == -INFINITY) {
            work->join[r] = JOIN_KEEP;
        } else if (x == -INFINITY) {
            work->join[r] = JOIN_TAKE;
            work->max[r] = y;
            work->denominator[r] = sum;
        } else {
            const float m = canon_max2(x, y), x_scale = canon_exp1(x - m), y_scale = canon_exp1(y - m);
            work->join[r] = JOIN_BLEND;
            work->x_scale[r] = x_scale;
            work->y_scale[r] = y_scale;
            work->max[r] = m;
            work->denominator[r] = f32_fma(x_scale, work->denominator[r], y_scale * sum);
        }
    }
}

/* out = the split's values, or x_scale * out + y_scale * values. */
static void join_columns(const job_t *job, struct columns columns)
{
    const work_t *work = job->work;
    for (int r = 0; r < job->n_rows; r++) {
        if (work->join[r] == JOIN_KEEP)
            continue;
        float *out = job->row[r].out + columns.first;
        const float *acc = work->acc + r * columns.stride;
        const v16 x_scale = v16_set1(work->x_scale[r]), y_scale = v16_set1(work->y_scale[r]);
        for (int64_t c = 0; c < columns.width; c += 16) {
            const int64_t n = columns.width - c;
            v16 y = v16_load(acc + c);
            if (work->join[r] == JOIN_BLEND)
                y = v16_fma(x_scale, n < 16 ? v16_load_n(out + c, n) : v16_load(out + c), v16_mul(y_scale, y));
            if (n < 16)
                v16_store_n(out + c, y, n);
            else
                v16_store(out + c, y);
        }
    }
}

/* All columns together, run by run. */
V16_INLINE void narrow_split(const job_t *job, struct run split, struct span span, tl_dtype dtype)
{
    const int64_t dim = job->view->head_dim;
    const struct columns all = {0, dim, (dim + 15) / 16 * 16};
    memset(job->work->acc, 0, (size_t)(job->n_rows * all.stride) * sizeof(float));
    for (int64_t t = split.first; t < split.end; t += ATTN_RUN_TILES) {
        const struct run run = {t, min64(t + ATTN_RUN_TILES, split.end)};
        find_run(job, run, span);
        score_run(job, run, dtype);
        add_run(job, run, all, dtype);
    }
    join_split(job);
    join_columns(job, all);
}

/* Scores of the whole split first, then the columns in pieces that fit. */
V16_INLINE void wide_split(const job_t *job, struct run split, struct span span, tl_dtype dtype)
{
    const int64_t dim = job->view->head_dim, stride = ATTN_ACC / ATTN_ROW_BLOCK;
    find_run(job, split, span);
    score_run(job, split, dtype);
    join_split(job);
    for (int64_t first = 0; first < dim; first += stride) {
        const struct columns piece = {first, min64(stride, dim - first), stride};
        memset(job->work->acc, 0, sizeof job->work->acc);
        add_run(job, split, piece, dtype);
        join_columns(job, piece);
    }
}

/* ---- the end of a row ---- */

static void scale_row(float *out, int64_t dim, float factor)
{
    const v16 f = v16_set1(factor);
    int64_t d = 0;
    for (; d + 16 <= dim; d += 16)
        v16_store(out + d, canon_one_nan(v16_mul(v16_load(out + d), f)));
    if (d < dim)
        v16_store_n(out + d, canon_one_nan(v16_mul(v16_load_n(out + d, dim - d), f)), dim - d);
}

static void fill_row(float *out, int64_t dim, float value)
{
    for (int64_t d = 0; d < dim; d++)
        out[d] = value;
}

/* The sink joins the denominator of (m, L, out), which sees at least one key. */
static void join_sink(float sink, float *m, float *denominator, float *out, int64_t dim)
{
    const float top = canon_max2(*m, sink), shrink = canon_exp1(*m - top);
    *denominator = f32_fma(shrink, *denominator, canon_exp1(sink - top));
    if (!(top <= *m))
        scale_row(out, dim, shrink);
    *m = top;
}

static void finish_row(const job_t *job, int r)
{
    const struct attn_row *row = &job->row[r];
    const int64_t dim = job->view->head_dim;
    float m = job->work->max[r], denominator = job->work->denominator[r], lse;
    const bool empty = m == -INFINITY, has_sink = row->sink != -INFINITY;
    if (has_sink && !(row->sink < INFINITY)) {
        fill_row(row->out, dim, canon_nan());
        lse = canon_nan();
    } else if (empty) {
        fill_row(row->out, dim, 0);
        lse = row->sink + 0; /* m + log(1) */
    } else {
        if (has_sink)
            join_sink(row->sink, &m, &denominator, row->out, dim);
        scale_row(row->out, dim, 1 / denominator);
        lse = m + canon_log(denominator);
    }
    if (row->lse)
        *row->lse = lse != lse ? canon_nan() : lse;
}

/* ---- a job ---- */

static struct span seen_by_any(const job_t *job)
{
    struct span span = {INT64_MAX, 0};
    for (int r = 0; r < job->n_rows; r++)
        if (job->row[r].lo < job->row[r].hi) {
            span.lo = min64(span.lo, job->row[r].lo);
            span.hi = max64(span.hi, job->row[r].hi);
        }
    return span;
}

/* Rows of q are read again with every tile: copies on cache lines of their own spare the loads that cross two. */
static void line_up_queries(const job_t *job, bool narrow)
{
    const int64_t dim = job->view->head_dim, stride = (dim + 15) / 16 * 16;
    for (int r = 0; r < job->n_rows; r++) {
        float *copy = job->work->q + r * stride;
        if (narrow)
            memcpy(copy, job->row[r].q, (size_t)dim * sizeof *copy);
        job->work->q_row[r] = narrow ? copy : job->row[r].q;
    }
}

V16_INLINE void attn_rows(const job_t *job, tl_dtype dtype)
{
    const bool narrow = job->n_rows * ((job->view->head_dim + 15) / 16 * 16) <= ATTN_ACC;
    line_up_queries(job, narrow);
    const struct span span = seen_by_any(job);
    for (int r = 0; r < job->n_rows; r++)
        job->work->max[r] = -INFINITY;
    for (int64_t t = span.lo / 16; t * 16 < span.hi;) {
        const int64_t split_end = (t / ATTN_SPLIT_TILES + 1) * ATTN_SPLIT_TILES;
        const struct run split = {t, min64(split_end, (span.hi + 15) / 16)};
        open_split(job);
        if (narrow)
            narrow_split(job, split, span, dtype);
        else
            wide_split(job, split, span, dtype);
        t = split.end;
    }
    for (int r = 0; r < job->n_rows; r++)
        finish_row(job, r);
}

void TL_ISA_FN(attn_rows_f16)(const struct attn_job *job);
void TL_ISA_FN(attn_rows_f32)(const struct attn_job *job);

void TL_ISA_FN(attn_rows_f16)(const struct attn_job *job)
{
    attn_rows(job, TL_F16);
}

void TL_ISA_FN(attn_rows_f32)(const struct attn_job *job)
{
    attn_rows(job, TL_F32);
}
