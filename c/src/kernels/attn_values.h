/* SPDX-License-Identifier: MIT */
/* attn_values.h: the values of a run, weighted by its exponentiated scores. Part of
 * attn_rows.isa.c. */
#ifndef TL_ATTN_VALUES_H
#define TL_ATTN_VALUES_H

#include "kernels/attn_score.h"

/* Some columns of the values: those of acc from `first` on take in the value rows, which begin
 * there. */
struct columns {
    int64_t first, width;
};

/* What is prefetched beside the values of a pass: the lines of V that begin in its columns. */
struct lines {
    int64_t d; /* where the first begins */
    bool are_due;
};

V16_INLINE int64_t line_elements(tl_dtype dtype)
{
    return 64 / kv_elem_bytes(dtype);
}

V16_INLINE struct lines lines_of(int64_t d, int64_t width, bool prefetches, tl_dtype dtype)
{
    const int64_t line = line_elements(dtype), first = (d + line - 1) / line * line;
    return (struct lines){first, prefetches && first < d + width};
}

/* Registers d, d + V16_REG_LANES, ... of a value row, times p[16r] for row r. The fewer of weights
 * and values stay in registers. */
V16_INLINE void add_slot(int n_rows, int n_regs, const float *p, const void *row, int64_t d,
                         int64_t n, tl_dtype dtype, vreg acc[][8])
{
    vreg v[8], w[4];
#define LOAD(i) (n == V16_REG_LANES ? kv_load_reg(row, d + V16_REG_LANES * i, dtype) \
                                    : kv_load_reg_n(row, d, n, dtype))
    if (n_regs < n_rows) {
        EACH_OF_8(i, n_regs, v[i] = vreg_keep(LOAD(i)));
        EACH_OF_4(r, n_rows, {
            w[r] = vreg_set1(p[16 * r]);
            EACH_OF_8(i, n_regs, acc[r][i] = vreg_fma(w[r], v[i], acc[r][i]));
        });
    } else {
        EACH_OF_4(r, n_rows, w[r] = vreg_keep(vreg_set1(p[16 * r])));
        EACH_OF_8(i, n_regs, {
            v[i] = LOAD(i);
            EACH_OF_4(r, n_rows, acc[r][i] = vreg_fma(w[r], v[i], acc[r][i]));
        });
    }
#undef LOAD
}

/* A tile of which every row sees every slot; `stored`: where those ahead are prefetched, which is
 * elsewhere for formats that are widened first (attn_widen.h). */
V16_INLINE void add_whole(int n_rows, int n_regs, const float *p, const struct tile_rows *rows,
                          const struct tile_rows *stored, int64_t d, int64_t n,
                          struct lines lines, tl_dtype dtype, tl_dtype stored_dtype,
                          vreg acc[][8])
{
    const int64_t line = line_elements(stored_dtype);
    const int n_lines = (int)((n_regs * V16_REG_LANES + line - 1) / line);
    if (lines.are_due)
        for (int j = 0; j < 16; j++) {
            EACH_OF_8(i, n_lines,
                      prefetch_ahead(stored->value + j, lines.d + i * line, stored_dtype));
            add_slot(n_rows, n_regs, p + j, rows->value[j], d, n, dtype, acc);
        }
    else
        for (int j = 0; j < 16; j++)
            add_slot(n_rows, n_regs, p + j, rows->value[j], d, n, dtype, acc);
}

/* Any tile: slot by slot in rising order, each for the rows that see it. */
V16_INLINE void add_seen(int n_rows, int n_regs, const float *p, const struct tile_rows *rows,
                         const struct tile_note *note, int64_t d, int64_t n, tl_dtype dtype,
                         vreg acc[][8])
{
    unsigned any = 0;
    EACH_OF_4(r, n_rows, any |= note->seen[r]);
    for (; any; any &= any - 1) {
        const int j = __builtin_ctz(any);
        EACH_OF_4(r, n_rows, {
            if (note->seen[r] >> j & 1)
                add_slot(1, n_regs, p + 16 * r + j, rows->value[j], d, n, dtype, acc + r);
        });
    }
}

/* n_regs registers of columns from c on (the only one `n` wide) of rows r0 .. r0+n_rows-1 take in
 * the values of a run: rescaled where a maximum rose, then plus p * v for the slots that count in
 * rising order. */
V16_INLINE void add_values(job_t *job, int r0, int n_rows, struct run run,
                           const struct tile_rows *rows, const struct tile_rows *stored,
                           struct columns columns, int64_t c, int n_regs, int64_t n,
                           tl_dtype dtype, tl_dtype stored_dtype)
{
    work_t *work = job->work;
    float *at = work->acc + r0 * work->acc_stride + columns.first + c;
    vreg acc[4][8];
#define EACH(...) EACH_OF_4(r, n_rows, EACH_OF_8(i, n_regs, __VA_ARGS__))
#define AT (at + r * work->acc_stride + V16_REG_LANES * i)
    EACH(acc[r][i] = run.is_fresh ? vreg_zero() : vreg_load(AT));
    for (int64_t t = run.first; t < run.end; t++, rows++, stored++) {
        const int64_t place = place_of(run, r0, t);
        const struct tile_note *note = work->note + place;
        const float *p = work->score + place * V16_ROWS * 16;
        if (__builtin_expect(note->needs_rescale, 0))
            EACH(acc[r][i] = vreg_mul(acc[r][i], vreg_set1(note->alpha[r])));
        if (__builtin_expect(note->is_whole, 1))
            add_whole(n_rows, n_regs, p, rows, stored, c, n,
                      lines_of(columns.first + c, n_regs * V16_REG_LANES,
                               r0 == 0 && stored[ATTN_AHEAD].found, stored_dtype),
                      dtype, stored_dtype, acc);
        else
            add_seen(n_rows, n_regs, p, rows, note, c, n, dtype, acc);
    }
    EACH(vreg_store(AT, acc[r][i]));
#undef AT
#undef EACH
}

/* All columns of a block of rows, in passes of as many registers as the file holds. Of what is left
 * two halves are taken rather than a whole and a rest. */
V16_INLINE void add_columns(job_t *job, int r0, int n_rows, struct run run,
                            const struct tile_rows *rows, const struct tile_rows *stored,
                            struct columns columns, tl_dtype dtype, tl_dtype stored_dtype)
{
    const int whole = V16_COLS(n_rows), half = (whole + 1) / 2, quarter = (half + 1) / 2,
              lanes = V16_REG_LANES;
    int64_t c = 0;
#define PASS(n_regs)                                                                       \
    add_values(job, r0, n_rows, run, rows, stored, columns, c, n_regs, lanes, dtype,       \
               stored_dtype),                                                              \
        c += n_regs * lanes
    while (columns.width - c >= whole * lanes &&
           (whole == 2 * half || columns.width - c != 2 * half * lanes))
        PASS(whole);
    while (half > 1 && columns.width - c >= half * lanes)
        PASS(half);
    while (quarter > 1 && columns.width - c >= quarter * lanes)
        PASS(quarter);
#undef PASS
    for (; c < columns.width; c += lanes)
        add_values(job, r0, n_rows, run, rows, stored, columns, c, 1,
                   min64(lanes, columns.width - c), dtype, stored_dtype);
}

#endif
