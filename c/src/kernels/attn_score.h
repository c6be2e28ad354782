/* SPDX-License-Identifier: MIT */
/* attn_score.h: the scores of a tile and what they do to a row's maximum and denominator. Part of
 * attn_rows.isa.c. */
#ifndef TL_ATTN_SCORE_H
#define TL_ATTN_SCORE_H

#include <float.h>

#include "kernels/attn_walk.h"
#include "numerics/canon.h"

/* Tiles [first, end), scored before their values are added. Scores and notes of the first block's
 * first tile stand at `place`, those of the next blocks ATTN_RUN_TILES further on each. */
struct run {
    int64_t first, end, place;
    bool is_fresh; /* the first of its split: values start from zero */
};

/* The tiles of a run that K and V of stay in the first-level cache at widths up to 128. */
V16_INLINE int64_t run_tiles(const struct kv_layout *kv)
{
    return kv->k.dtype == TL_F32 || kv->v.dtype == TL_F32 ? ATTN_RUN_TILES / 2 : ATTN_RUN_TILES;
}

V16_INLINE int64_t place_of(struct run run, int r0, int64_t t)
{
    return run.place + r0 / V16_ROWS * ATTN_RUN_TILES + (t - run.first);
}

V16_INLINE float *score_at(work_t *work, struct run run, int r0, int64_t t)
{
    return work->score + place_of(run, r0, t) * V16_ROWS * 16;
}

/* ---- what is seen of a tile: a mask, bit j for slot j ---- */

enum { ALL_SLOTS = 0xFFFF };

/* The slots of tile t at positions lo .. hi-1. Causal edges and windows are ranges; what takes a
 * mask does not rely on that. */
V16_INLINE uint16_t slots_between(int64_t t, int64_t lo, int64_t hi)
{
    const int64_t first = max64(lo - t * 16, 0), end = min64(hi - t * 16, 16);
    return first < end ? (uint16_t)(lanes_below(end) & ~lanes_below(first)) : 0;
}

V16_INLINE uint16_t seen_by_row(const struct attn_row *row, int64_t t)
{
    return slots_between(t, row->lo, row->hi);
}

/* Those that some row of the job sees, or more. */
V16_INLINE uint16_t seen_by_any(const work_t *work, int64_t t)
{
    return slots_between(t, work->path.lo, work->path.hi);
}

/* Those that every row of the job sees, or fewer. */
V16_INLINE uint16_t seen_by_all(const work_t *work, int64_t t)
{
    return slots_between(t, work->all_lo, work->all_hi);
}

/* ---- dots ---- */

/* The keys of a tile as they are read, and as they are stored, where those ahead are prefetched:
 * the same, but for formats that are widened first (attn_widen.h). */
struct keys {
    const void *const *row, *const *stored;
    tl_dtype dtype, stored_dtype;
};

V16_INLINE struct keys keys_from(struct keys keys, int k)
{
    return (struct keys){keys.row + k, keys.stored + k, keys.dtype, keys.stored_dtype};
}

/* Steps of sixteen elements in which a cache line goes by. */
V16_INLINE int steps_of_line(tl_dtype dtype)
{
    return 4 / (int)kv_elem_bytes(dtype);
}

/* Whether a pass over register i of a few keys prefetches the line of key k in this step, of n in
 * which the line goes by. The passes share the keys out, and the steps share them out again, so
 * that few lines are asked for at a time. */
V16_INLINE bool is_due(int i, int k, int step, int n)
{
    return k % V16_REGS == i && k / V16_REGS % n == step;
}

/* Register i of sixteen elements, from d on, of n_keys keys with n_rows rows; step of n of a line.
 * Sixteen elements of a row of q are followed by those of the next row of the block. */
V16_INLINE void dot_step(int n_rows, int n_keys, const float *q, struct keys keys, int i, int64_t d,
                         int step, int n, bool prefetches, vreg sum[4][4])
{
    const int lane = i * V16_REG_LANES;
    vreg y[4];
    EACH_OF_4(r, n_rows, y[r] = vreg_keep(vreg_load(q + d * n_rows + 16 * r + lane)));
    EACH_OF_4(k, n_keys, {
        const vreg x = kv_load_reg(keys.row[4 * k], d + lane, keys.dtype);
        EACH_OF_4(r, n_rows, sum[r][k] = vreg_fma(y[r], x, sum[r][k]));
        if (prefetches && is_due(i, k, step, n))
            prefetch_ahead(keys.stored + 4 * k, d, keys.stored_dtype);
    });
}

/* Register i of the lanes of the dots with keys 0, 4, ...: lane l sums d = l, l+16, ... in rising
 * order, up to `whole`, a multiple of sixteen. */
V16_INLINE void dot_reg(int n_rows, int n_keys, const float *q, struct keys keys, int i,
                        int64_t whole, bool prefetches, vreg sum[4][4])
{
    const int n_steps = steps_of_line(keys.stored_dtype), unrolled = n_steps > 2 ? n_steps : 2;
    int64_t d = 0;
    EACH_OF_4(r, n_rows, EACH_OF_4(k, n_keys, sum[r][k] = vreg_zero()));
    for (; d + 16 * unrolled <= whole; d += 16 * unrolled)
        EACH_OF_4(step, unrolled,
                  dot_step(n_rows, n_keys, q, keys, i, d + 16 * step, step % n_steps, n_steps,
                           prefetches, sum));
    for (bool begins_line = true; d < whole; d += 16, begins_line = n_steps == 1)
        dot_step(n_rows, n_keys, q, keys, i, d, 0, 1, prefetches && begins_line, sum);
}

/* The last elements of a head that is no multiple of sixteen wide: lanes past its end are left
 * alone. */
V16_INLINE void dot_rest(int n_rows, const float *q, struct keys keys, int64_t d, int64_t rest,
                         v16 lane[4][4])
{
    EACH_OF_4(k, 4, {
        const v16 x = kv_load_n(keys.row[4 * k], d, rest, keys.dtype);
        EACH_OF_4(r, n_rows,
                  lane[r][k] =
                      v16_fma_n(v16_load_n(q + d * n_rows + 16 * r, rest), x, lane[r][k], rest));
    });
}

/* lane[r][k] = the sixteen lanes of the dot of row r with key 4k, not folded yet. */
V16_INLINE void dot_lanes(int n_rows, const float *q, struct keys keys, int64_t dim,
                          bool prefetches, v16 lane[4][4])
{
    const int n_keys = V16_KEYS(n_rows);
    const int64_t whole = dim & ~(int64_t)15;
    vreg reg[4][4][4];
    EACH_OF_4(part, 4 / n_keys, EACH_OF_4(i, V16_REGS, {
        const int k0 = part * n_keys;
        vreg sum[4][4];
        dot_reg(n_rows, n_keys, q, keys_from(keys, 4 * k0), i, whole, prefetches, sum);
        EACH_OF_4(r, n_rows, EACH_OF_4(k, n_keys, reg[r][k0 + k][i] = sum[r][k]));
    }));
    EACH_OF_4(r, n_rows, EACH_OF_4(k, 4, lane[r][k] = v16_of(reg[r][k])));
    if (whole < dim)
        dot_rest(n_rows, q, keys, whole, dim - whole, lane);
}

/* dot[r] = the sixteen dots of row r with the keys of a tile, four at a time: slots g, g+4, g+8,
 * g+12. Those of slots not seen may be anything. */
V16_INLINE void tile_dots(int n_rows, const float *q, struct keys keys, int64_t dim,
                          bool prefetches, uint16_t seen, v16 *dot)
{
    v16 quad[4][4];
    for (int g = 0; g < 4; g++) {
        v16 lane[4][4];
        if (!(seen >> g & 0x1111)) {
            for (int r = 0; r < n_rows; r++)
                quad[r][g] = v16_zero();
            continue;
        }
        if (prefetches)
            dot_lanes(n_rows, q, keys_from(keys, g), dim, true, lane);
        else
            dot_lanes(n_rows, q, keys_from(keys, g), dim, false, lane);
        EACH_OF_4(r, n_rows,
                  quad[r][g] = v16_quads(lane[r][0], lane[r][1], lane[r][2], lane[r][3]));
    }
    EACH_OF_4(r, n_rows, dot[r] = v16_fold_quads(quad[r][0], quad[r][1], quad[r][2], quad[r][3]));
}

/* ---- maximum and denominator ---- */

/* The maxima of a block whose rows see the same slots, where all that happens is that some rise:
 * false, and nothing changed, where a score is NaN or +inf or a maximum not finite. */
static __attribute__((noinline)) bool raise_maxima(work_t *work, int r0, int n_rows,
                                                   const float *score, struct tile_note *note)
{
    float m[4];
    for (int r = 0; r < n_rows; r++) {
        const v16 s = v16_load(score + 16 * r);
        const float old = work->split_max[r0 + r], highest = v16_fold_max(s);
        m[r] = highest > old ? highest : old;
        if (!v16_all_le(s, v16_set1(FLT_MAX)) || !(m[r] > -INFINITY && m[r] < INFINITY))
            return false;
    }
    for (int r = 0; r < n_rows; r++) {
        const float old = work->split_max[r0 + r];
        note->alpha[r] = 1;
        if (m[r] > old && old > -INFINITY) { /* from -inf on there is nothing yet to rescale */
            const v16 alpha = canon_exp_below(v16_set1(old - m[r]));
            v16_store(work->sum[r0 + r], v16_mul(v16_load(work->sum[r0 + r]), alpha));
            note->alpha[r] = v16_first(alpha);
            note->needs_rescale = true;
        }
        work->split_max[r0 + r] = m[r];
    }
    return work->max_is_finite[r0 / V16_ROWS] = true;
}

/* One row takes in the scores of the slots it sees of a tile, whatever they are. False where they
 * count for nothing: none is seen, or m stays at -inf. */
static bool absorb_row(work_t *work, int row, float *score, uint16_t seen, float *alpha)
{
    if (!seen)
        return false;
    const v16 s = v16_only(v16_load(score), seen);
    const float old = work->split_max[row],
                m = v16_all_le(s, v16_set1(old)) ? old : canon_max(old, s);
    v16 sum = v16_load(work->sum[row]);
    if (m != old) { /* as NaN does */
        *alpha = canon_exp1(old - m);
        sum = v16_mul(sum, v16_set1(*alpha));
        work->split_max[row] = m;
    }
    if (m == -INFINITY)
        return false;
    const v16 x = v16_sub(s, v16_set1(m)), p = m < INFINITY ? canon_exp_below(x) : canon_exp(x);
    v16_store(work->sum[row], v16_add(sum, p));
    v16_store(score, p);
    return true;
}

/* Any tile of a block: its rows one by one. */
static __attribute__((noinline)) void absorb_rows(job_t *job, int r0, int n_rows, int64_t t,
                                                  float *score, struct tile_note *note)
{
    work_t *work = job->work;
    bool is_finite = true;
    note->is_whole = note->needs_rescale = true;
    for (int r = 0; r < n_rows; r++) {
        const uint16_t seen = seen_by_row(&job->row[r0 + r], t);
        note->alpha[r] = 1;
        const bool counts = absorb_row(work, r0 + r, score + 16 * r, seen, &note->alpha[r]);
        note->seen[r] = counts ? seen : 0;
        note->is_whole &= note->seen[r] == ALL_SLOTS;
        is_finite &= work->split_max[r0 + r] > -INFINITY && work->split_max[r0 + r] < INFINITY;
    }
    work->max_is_finite[r0 / V16_ROWS] = is_finite;
}

/* A block of rows takes in the scores of a tile: raises m, adds exp(s - m) to l and leaves it in
 * place of s. Where m does not rise nothing is rescaled. Slots not seen add exp(-inf) = +0, which
 * changes no lane of l. */
V16_INLINE void absorb_tile(job_t *job, int r0, int n_rows, struct run run, int64_t t)
{
    work_t *work = job->work;
    float *score = score_at(work, run, r0, t);
    struct tile_note *note = work->note + place_of(run, r0, t);
    const uint16_t seen = seen_by_any(work, t);
    const bool same_mask = seen == seen_by_all(work, t);
    bool keeps_maxima = same_mask & work->max_is_finite[r0 / V16_ROWS];
    v16 s[4];
    EACH_OF_4(r, n_rows, s[r] = v16_load(score + 16 * r));
    if (seen != ALL_SLOTS && same_mask)
        EACH_OF_4(r, n_rows, s[r] = v16_only(s[r], seen));
    EACH_OF_4(r, n_rows, keeps_maxima &= v16_all_le(s[r], v16_set1(work->split_max[r0 + r])));
    EACH_OF_4(r, n_rows, note->seen[r] = seen);
    note->is_whole = seen == ALL_SLOTS;
    note->needs_rescale = false;
    if (__builtin_expect(!keeps_maxima, 0)) {
        EACH_OF_4(r, n_rows, v16_store(score + 16 * r, s[r]));
        if (!same_mask || !raise_maxima(work, r0, n_rows, score, note)) {
            absorb_rows(job, r0, n_rows, t, score, note);
            return;
        }
    }
    EACH_OF_4(r, n_rows, {
        const v16 p = canon_exp_below(v16_sub(s[r], v16_set1(work->split_max[r0 + r])));
        v16_store(work->sum[r0 + r], v16_add(v16_load(work->sum[r0 + r]), p));
        v16_store(score + 16 * r, p);
    });
}

/* The weights of the values: what stands at `score` times their scales, number i of the run's. */
V16_INLINE void weigh_tile(const work_t *work, int n_rows, float *score, int64_t i)
{
    const v16 vs = v16_load(work->v_scale[i]);
    EACH_OF_4(r, n_rows, v16_store(score + 16 * r, v16_mul(v16_load(score + 16 * r), vs)));
}

/* What some models do to a scaled score: a soft cap, then a slope over the distance to the key. */
static __attribute__((noinline)) void adjust_scores(job_t *job, int r0, int n_rows, int64_t t,
                                                  float *score)
{
    static const float lane_number[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const v16 cap = v16_set1(job->softcap), lane = v16_load(lane_number);
    for (int r = 0; r < n_rows; r++) {
        const struct attn_row *row = &job->row[r0 + r];
        v16 s = v16_load(score + 16 * r);
        if (job->softcap > 0)
            s = v16_mul(cap, canon_tanh(v16_div(s, cap)));
        if (job->has_alibi)
            s = v16_fma(v16_set1(row->slope), v16_add(v16_set1((float)(t * 16 - row->pos)), lane),
                        s);
        v16_store(score + 16 * r, s);
    }
}

/* The scores of a block of rows and a tile. The first block prefetches K
 * for all. */
V16_INLINE void score_tile(job_t *job, int r0, int n_rows, struct run run, int64_t t,
                           const struct tile_rows *rows, const struct tile_rows *stored,
                           tl_dtype dtype, tl_dtype stored_dtype)
{
    work_t *work = job->work;
    float *score = score_at(work, run, r0, t);
    v16 dot[4];
    const bool prefetches = r0 == 0 && stored[ATTN_AHEAD].found;
    const struct keys keys = {rows->key, stored->key, dtype, stored_dtype};
    tile_dots(n_rows, work->q_copy + r0 * work->q_stride, keys, job->kv->k.dim, prefetches,
              seen_by_any(work, t), dot);
    if (has_scales(job))
        EACH_OF_4(r, n_rows, dot[r] = v16_mul(v16_load(work->k_scale), dot[r]));
    EACH_OF_4(r, n_rows, v16_store(score + 16 * r, v16_mul(v16_set1(job->scale), dot[r])));
    if (job->softcap > 0 || job->has_alibi)
        adjust_scores(job, r0, n_rows, t, score);
}

#endif
