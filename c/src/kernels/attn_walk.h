/* SPDX-License-Identifier: MIT */
/* attn_walk.h: where K and V of tile after tile lie, found through the block table, and
 * prefetched before they are needed. Part of attn_rows.isa.c. */
#ifndef TL_ATTN_WALK_H
#define TL_ATTN_WALK_H

#include "kernels/attn_rows.h"
#include "kernels/kv_load.h"

typedef struct attn_job job_t;
typedef struct attn_work work_t;

/* The body for i = 0 .. n-1, n <= 4 or 8, written out with i a constant: GCC keeps arrays of
 * registers in registers only where every index is a constant before its loop passes. */
#define EACH_OF_4(i, n, ...) do { STEPS_4_(i, n, __VA_ARGS__) } while (0)
#define EACH_OF_8(i, n, ...)                                         \
    do {                                                             \
        STEPS_4_(i, n, __VA_ARGS__) STEPS_4_MORE_(i, n, __VA_ARGS__) \
    } while (0)
#define STEPS_4_(i, n, ...)     \
    STEP_(i, 0, n, __VA_ARGS__) \
    STEP_(i, 1, n, __VA_ARGS__) STEP_(i, 2, n, __VA_ARGS__) STEP_(i, 3, n, __VA_ARGS__)
#define STEPS_4_MORE_(i, n, ...) \
    STEP_(i, 4, n, __VA_ARGS__)  \
    STEP_(i, 5, n, __VA_ARGS__) STEP_(i, 6, n, __VA_ARGS__) STEP_(i, 7, n, __VA_ARGS__)
#define STEP_(i, number, n, ...)     \
    {                                \
        enum { i = number };         \
        if (i < (n)) {               \
            __VA_ARGS__;             \
        }                            \
    }

V16_INLINE int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

V16_INLINE int64_t max64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

V16_INLINE bool has_scales(const job_t *job)
{
    return job->kv->k.scale != NULL;
}

/* ---- finding tiles ---- */

/* The next tile to be found is the one of position `from` on a path. */
static void seek(job_t *job, const struct attn_path *path, int64_t from)
{
    work_t *work = job->work;
    work->ahead.path = *path;
    work->ahead.tile = from / 16;
    work->ahead.block = from / job->kv->block_tokens - path->first_block;
    work->ahead.slot = from % job->kv->block_tokens;
}

/* The scales of n slots of the tile ahead, from number `first` on, and prefetches of them. */
static void find_scales(job_t *job, uint32_t block, int64_t first, int64_t n,
                        struct tile_scales *scales)
{
    const struct kv_layout *kv = job->kv;
    const work_t *work = job->work;
    const float *k = kv_scale(&kv->k, work->ahead.path.k, block, work->ahead.slot);
    const float *v = kv_scale(&kv->v, work->ahead.path.v, block, work->ahead.slot);
    __builtin_prefetch(k, 0, 2);
    __builtin_prefetch(v, 0, 2);
    scales->are_spread = n != 16;
    for (int64_t i = 0; i < (n == 16 ? 1 : n); i++) {
        scales->key[first + i] = k + i * kv->k.scale_token_stride;
        scales->value[first + i] = v + i * kv->v.scale_token_stride;
    }
}

/* Slots lo .. hi-1 of the tile ahead, block by block. */
V16_INLINE void find_slots(job_t *job, int64_t lo, int64_t hi, struct tile_rows *rows,
                           struct tile_scales *scales)
{
    const struct kv_layout *kv = job->kv;
    work_t *work = job->work;
    const int64_t k_step = kv->k.token_stride * kv_elem_bytes(kv->k.dtype),
                  v_step = kv->v.token_stride * kv_elem_bytes(kv->v.dtype);
    while (lo < hi) {
        const int64_t n = min64(kv->block_tokens - work->ahead.slot, hi - lo);
        const uint32_t block = work->ahead.path.block_table[work->ahead.block];
        const char *k = kv_row(&kv->k, work->ahead.path.k, block, work->ahead.slot);
        const char *v = kv_row(&kv->v, work->ahead.path.v, block, work->ahead.slot);
        if (n == 16)
            for (int i = 0; i < 16; i++, k += k_step, v += v_step)
                rows->key[i] = k, rows->value[i] = v;
        else
            for (int64_t i = lo; i < lo + n; i++, k += k_step, v += v_step)
                rows->key[i] = k, rows->value[i] = v;
        if (has_scales(job))
            find_scales(job, block, lo, n, scales);
        lo += n;
        work->ahead.slot += n;
        if (work->ahead.slot == kv->block_tokens)
            work->ahead.block++, work->ahead.slot = 0;
    }
}

/* Finds the next tile of the walk, if there is one. Slots before or behind the path point at the
 * nearest row on it, so that a tile can be loaded whole and masked afterwards. */
static void find_tile(job_t *job)
{
    work_t *work = job->work;
    struct tile_rows *rows = &work->ring[work->ahead.n % ATTN_RING];
    struct tile_scales *scales = &work->scales[work->ahead.n++ % ATTN_RING];
    if (work->ahead.tile * 16 >= work->ahead.path.hi && job->next && !work->ahead.is_next) {
        seek(job, job->next, job->next->lo);
        work->ahead.is_next = true;
    }
    const int64_t origin = work->ahead.tile++ * 16;
    const int64_t lo = max64(work->ahead.path.lo - origin, 0),
                  hi = min64(work->ahead.path.hi - origin, 16);
    rows[0].found = rows[ATTN_RING].found = lo < hi;
    if (lo >= hi)
        return;
    find_slots(job, lo, hi, rows, scales);
    for (int64_t i = 0; i < lo; i++)
        rows->key[i] = rows->key[lo], rows->value[i] = rows->value[lo];
    for (int64_t i = hi; i < 16; i++)
        rows->key[i] = rows->key[hi - 1], rows->value[i] = rows->value[hi - 1];
    rows[ATTN_RING] = rows[0];
}

/* Begins to walk the job's path at position `from`. */
static void walk_from(job_t *job, int64_t from)
{
    work_t *work = job->work;
    seek(job, &work->path, from);
    work->ahead.n = 0;
    work->ahead.is_next = false;
    for (int i = 0; i < ATTN_AHEAD; i++)
        find_tile(job);
}

/* The tile to be scored next. Those found after it follow in memory. */
V16_INLINE const struct tile_rows *rows_here(const work_t *work)
{
    return &work->ring[(work->ahead.n - ATTN_AHEAD) % ATTN_RING];
}

/* Sixteen scales of one side of a tile. Those of slots off the path may be anything. */
V16_INLINE v16 load_scales(const float *const *at, bool are_spread, int64_t lo, int64_t hi,
                           int64_t token_stride)
{
    if (__builtin_expect(!are_spread && token_stride == 1, 1))
        return v16_load(at[0]);
    float lane[16] = {0};
    for (int64_t i = lo; i < hi; i++)
        lane[i] = are_spread ? *at[i] : at[0][i * token_stride];
    return v16_load(lane);
}

/* The scales of the tile to be scored next, number i of its run. Codes of e4m3 widen to 2^-8 of
 * their values. */
static void take_scales(job_t *job, int64_t t, int64_t i)
{
    work_t *work = job->work;
    const struct kv_side *k = &job->kv->k, *v = &job->kv->v;
    const struct tile_scales *scales = &work->scales[(work->ahead.n - ATTN_AHEAD) % ATTN_RING];
    const int64_t lo = max64(work->path.lo - t * 16, 0), hi = min64(work->path.hi - t * 16, 16);
    const v16 ks = load_scales(scales->key, scales->are_spread, lo, hi, k->scale_token_stride),
              vs = load_scales(scales->value, scales->are_spread, lo, hi, v->scale_token_stride);
    v16_store(work->k_scale, k->dtype == TL_F8_E4M3 ? v16_mul(ks, v16_set1(256)) : ks);
    v16_store(work->v_scale[i], v->dtype == TL_F8_E4M3 ? v16_mul(vs, v16_set1(256)) : vs);
}

static void find_path(job_t *job)
{
    work_t *work = job->work;
    work->path = job->path;
    work->path.lo = INT64_MAX, work->path.hi = 0;
    work->all_lo = 0, work->all_hi = INT64_MAX;
    for (int r = 0; r < job->n_rows; r++) {
        work->all_lo = max64(work->all_lo, job->row[r].lo);
        work->all_hi = min64(work->all_hi, job->row[r].hi);
        if (job->row[r].lo < job->row[r].hi) {
            work->path.lo = min64(work->path.lo, job->row[r].lo);
            work->path.hi = max64(work->path.hi, job->row[r].hi);
        }
    }
}

/* ---- prefetching ---- */

/* The cache line of element d, into the second-level cache: in the first it would be in the way. */
V16_INLINE void prefetch_line(const void *row, int64_t d, tl_dtype dtype)
{
    __builtin_prefetch((const char *)row + d * kv_elem_bytes(dtype), 0, 2);
}

/* Element d of a row that follows `row` by some tiles, `row` being an entry of tile_rows. */
V16_INLINE void prefetch_ahead(const void *const *row, int64_t d, tl_dtype dtype)
{
    const int tile = sizeof(struct tile_rows) / sizeof *row;
    prefetch_line(row[ATTN_AHEAD * tile], d, dtype);
    prefetch_line(row[ATTN_AGAIN * tile], d, dtype);
    if (V16_PREFETCHES == 3)
        prefetch_line(row[ATTN_LAST * tile], d, dtype);
}

#endif
