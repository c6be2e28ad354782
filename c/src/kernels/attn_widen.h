/* SPDX-License-Identifier: MIT */
/* attn_widen.h: K and V of e4m3, widened to f16 a tile at a time in the nearest cache, so that
 * every row of a job reads them as f16: exactly, NaN included, but for a factor of 2^-8, which the
 * scales give back (take_scales). Part of attn_rows.isa.c. */
#ifndef TL_ATTN_WIDEN_H
#define TL_ATTN_WIDEN_H

#include "kernels/attn_values.h"

V16_INLINE bool widens_keys(const job_t *job)
{
    return job->kv->k.dtype == TL_F8_E4M3 && job->kv->k.dim <= ATTN_WIDE_DIM;
}

V16_INLINE bool widens_values(const job_t *job)
{
    return job->kv->v.dtype == TL_F8_E4M3;
}

/* Columns first .. first+n-1 of the sixteen rows of a tile, to rows of `stride`, whatever they
 * are. */
static __attribute__((noinline)) void widen_any(const void *const *row, int64_t first, int64_t n,
                                                uint16_t *to, int64_t stride)
{
    for (int j = 0; j < 16; j++, to += stride)
        for (int64_t d = 0; d < n; d += 16) {
            uint8_t codes[16] = {0};
            memcpy(codes, (const uint8_t *)row[j] + first + d, (size_t)min64(n - d, 16));
            v16_e4m3_to_f16(codes, to + d);
        }
}

/* The same, faster where they are whole cache lines and hold no NaN. */
static void widen_rows(const void *const *row, int64_t first, int64_t n, uint16_t *to,
                       int64_t stride)
{
    codes_top top = {0};
    if (n % 64 == 0)
        for (int j = 0; j < 16; j++) {
            const uint8_t *codes = (const uint8_t *)row[j] + first;
            for (int64_t d = 0; d < n; d += 64)
                line_to_f16(codes + d, to + j * stride + d, &top);
        }
    if (__builtin_expect(n % 64 != 0 || codes_have_nan(top), 0))
        widen_any(row, first, n, to, stride);
}

/* Where widened rows lie, the same for a whole job. */
static void lay_out_wide(job_t *job)
{
    work_t *work = job->work;
    const int64_t stride = attn_padded(job->kv->k.dim);
    for (int j = 0; widens_keys(job) && j < 16; j++)
        work->wide_rows->key[j] = work->wide_k + j * stride;
    for (int i = 0; widens_values(job) && i < ATTN_RUN_TILES; i++)
        for (int j = 0; j < 16; j++)
            work->wide_rows[i].value[j] = work->wide_v + (i * 16 + j) * ATTN_WIDE_COLUMNS;
}

/* The keys of a tile; returns where they lie now. */
static const struct tile_rows *widen_keys(job_t *job, const struct tile_rows *rows)
{
    const int64_t dim = job->kv->k.dim;
    widen_rows(rows->key, 0, dim, job->work->wide_k, attn_padded(dim));
    return job->work->wide_rows;
}

/* Some columns of the values of a run; likewise. */
static const struct tile_rows *widen_values(job_t *job, struct run run,
                                            const struct tile_rows *rows, struct columns columns)
{
    uint16_t *to = job->work->wide_v;
    for (int64_t t = run.first; t < run.end; t++, rows++, to += 16 * ATTN_WIDE_COLUMNS)
        widen_rows(rows->value, columns.first, columns.width, to, ATTN_WIDE_COLUMNS);
    return job->work->wide_rows;
}

#endif
