/* SPDX-License-Identifier: MIT */
/* attn_values.h: the values of a run, weighted by its exponentiated scores. Part of
 * attn_rows.isa.c. */
#ifndef TL_ATTN_VALUES_H
#define TL_ATTN_VALUES_H

#include "kernels/attn_score.h"

/* Where the values of the rows go: acc holds `stride` floats a row, for columns `first` and up. */
struct columns {
    int64_t first, width, stride;
};

/* n_vec vectors of the value row `v`, from column d on; the only one is n wide. */
V16_INLINE void load_values(const void *row, int64_t d, int n_vec, int64_t n, tl_dtype dtype,
                            v16 v[8])
{
    EACH_OF_8(i, n_vec,
              v[i] = n_vec > 1 || n == 16 ? kv_load(row, d + 16 * i, dtype)
                                          : kv_load_n(row, d, n, dtype));
}

/* The slots that count for a row of the block. */
V16_INLINE unsigned seen_by_some_row(const struct tile_note *note, int n_rows)
{
    unsigned any = 0;
    EACH_OF_4(r, n_rows, any |= note->seen[r]);
    return any;
}

/* n_vec vectors of columns from c on (the last `n` < 16 wide where n_vec is 1) of rows r0 ..
 * r0+n_rows-1 take in the values of a run: rescaled where a maximum rose, then plus p * v for the
 * slots that count in rising order. One row alone prefetches V here, each pass over the columns its
 * share of the rows. */
V16_INLINE void add_values(job_t *job, int r0, int n_rows, struct run run,
                           const struct tile_rows *rows, struct columns columns, int64_t c,
                           int n_vec, int64_t n, tl_dtype dtype)
{
    work_t *work = job->work;
    const int64_t d = columns.first + c;
    float *at = work->acc + r0 * columns.stride + c;
    const int64_t passes = max64(columns.width / (16 * n_vec), 1), pass = c / (16 * n_vec);
    v16 acc[4][8], v[8];
#define EACH(...) EACH_OF_4(r, n_rows, EACH_OF_8(i, n_vec, __VA_ARGS__))
    EACH(acc[r][i] = run.is_fresh ? v16_zero() : v16_load(at + r * columns.stride + 16 * i));
    for (int64_t t = run.first; t < run.end; t++, rows++) {
        const int64_t place = place_of(run, r0, t);
        const struct tile_note *note = work->note + place;
        const float *p = work->score + place * V16_ROWS * 16;
        int prefetched = n_rows == 1 && r0 == 0 && rows[ATTN_AHEAD].found ? (int)pass : 16;
        if (__builtin_expect(note->needs_rescale, 0))
            EACH(acc[r][i] = v16_mul(acc[r][i], v16_set1(note->alpha[r])));
        if (__builtin_expect(note->is_whole, 1)) {
            for (int j = 0; j < 16; j++) {
                if (j == prefetched) {
                    for (int64_t e = 0; e < job->kv->v.dim; e += 64 / kv_elem_bytes(dtype))
                        prefetch_ahead(rows->value + j, e, dtype);
                    prefetched += (int)passes;
                }
                load_values(rows->value[j], d, n_vec, n, dtype, v);
                EACH(acc[r][i] = v16_fma(v16_set1(p[16 * r + j]), v[i], acc[r][i]));
            }
        } else { /* some row does not see some slot */
            for (unsigned any = seen_by_some_row(note, n_rows); any; any &= any - 1) {
                const int j = __builtin_ctz(any);
                load_values(rows->value[j], d, n_vec, n, dtype, v);
                EACH_OF_4(r, n_rows, {
                    if (note->seen[r] >> j & 1)
                        EACH_OF_8(i, n_vec,
                                  acc[r][i] = v16_fma(v16_set1(p[16 * r + j]), v[i], acc[r][i]));
                });
            }
        }
    }
    EACH(v16_store(at + r * columns.stride + 16 * i, acc[r][i]));
#undef EACH
}

/* All columns of a block of rows. */
V16_INLINE void add_columns(job_t *job, int r0, int n_rows, struct run run,
                            const struct tile_rows *rows, struct columns columns, tl_dtype dtype)
{
    const int n_vec = V16_COLS(n_rows);
    int64_t c = 0;
    for (; c + 16 * n_vec <= columns.width; c += 16 * n_vec)
        add_values(job, r0, n_rows, run, rows, columns, c, n_vec, 16, dtype);
    for (; c < columns.width; c += 16)
        add_values(job, r0, n_rows, run, rows, columns, c, 1, min64(16, columns.width - c), dtype);
}

#endif
