/* SPDX-License-Identifier: MIT */
/* attn_widen.h: K and V of e4m3, widened to f16 a tile at a time in the nearest cache, so that every
 * row of a job reads them as f16: exactly, NaN included, but for a factor of 2^-8, which the scales
 * give back (take_scales). Part of attn_rows.isa.c. */
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

/* Columns first .. first+n-1 of the sixteen rows of a tile, to rows of `stride`. */
static void widen_rows(const void *const *row, int64_t first, int64_t n, uint16_t *to,
                       int64_t stride)
{
    for (int j = 0; j < 16; j++, to += stride) {
        const uint8_t *codes = (const uint8_t *)row[j] + first;
        int64_t d = 0;
        for (; d + 64 <= n && __builtin_expect(!line_has_nan(codes + d), 1); d += 64)
            line_to_f16(codes + d, to + d);
        for (; d + 16 <= n; d += 16)
            v16_e4m3_to_f16(codes + d, to + d);
        if (d < n) {
            uint8_t last[16] = {0};
            memcpy(last, codes + d, (size_t)(n - d));
            v16_e4m3_to_f16(last, to + d);
        }
    }
}

/* The keys of a tile; returns where they lie now. */
static const struct tile_rows *widen_keys(job_t *job, const struct tile_rows *rows)
{
    work_t *work = job->work;
    const int64_t dim = job->kv->k.dim, stride = attn_padded(dim);
    widen_rows(rows->key, 0, dim, work->wide_k, stride);
    for (int j = 0; j < 16; j++)
        work->wide_rows->key[j] = work->wide_k + j * stride;
    return work->wide_rows;
}

/* Some columns of the values of a run; likewise. */
static const struct tile_rows *widen_values(job_t *job, struct run run,
                                            const struct tile_rows *rows, struct columns columns)
{
    work_t *work = job->work;
    for (int64_t i = 0; i < run.end - run.first; i++) {
        uint16_t *to = work->wide_v + i * 16 * ATTN_WIDE_COLUMNS;
        widen_rows(rows[i].value, columns.first, columns.width, to, ATTN_WIDE_COLUMNS);
        for (int j = 0; j < 16; j++)
            work->wide_rows[i].value[j] = to + j * ATTN_WIDE_COLUMNS;
    }
    return work->wide_rows;
}

#endif
