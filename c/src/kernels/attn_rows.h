/* SPDX-License-Identifier: MIT */
/* attn_rows.h: the unit of attention that every entry point is cut into: a few query rows that share one walk over the
 * K and V of one KV head. A decode step's rows are the heads of a group; a prefill's are those at neighbouring
 * positions.
 *
 * kv_view says where a layer's K and V lie; the block pool merely fills one in. A contiguous cache is a view of one
 * long block. */
#ifndef TL_ATTN_ROWS_H
#define TL_ATTN_ROWS_H

#include <stdint.h>

#include "tinyllm/attention.h"

/* One side (K or V) of a layer: element (block, head, slot, d) lies at base + block*block_stride + head*head_stride +
 * slot*token_stride + d, in elements of the view's dtype. */
struct kv_side {
    const void *base;
    int64_t block_stride, head_stride, token_stride;
};

struct kv_view {
    struct kv_side k, v;
    tl_dtype dtype; /* of both: TL_F16 or TL_F32 */
    int64_t block_tokens, head_dim;
};

enum {
    ATTN_ROWS = 16,        /* most rows of one job */
    ATTN_ROW_BLOCK = 4,    /* rows whose dots and values share registers */
    ATTN_ACC = 4096,       /* floats of unnormalised values a job holds */
    ATTN_SCORES = 4096,    /* floats of exponentiated scores a job holds: a split of ATTN_ROW_BLOCK rows */
    ATTN_RUN_TILES = 4,    /* tiles scored before their values are added, where the rows' values fit in ATTN_ACC */
    ATTN_AHEAD = 4,        /* tiles between a prefetch and its use */
    ATTN_SPLIT_TILES = TL_ATTN_SPLIT / TL_ATTN_TILE
};

/* One query row: it sees positions lo .. hi-1 (none where lo >= hi). */
struct attn_row {
    const float *q; /* [head_dim] */
    float *out;     /* [head_dim]; holds the merge of the finished splits while the job runs */
    float *lse;     /* or NULL */
    float sink;     /* -inf: none */
    int64_t lo, hi;
};

/* How a finished split joins the splits before it: out = x_scale * out + y_scale * acc, unless one side is empty. */
enum attn_join { JOIN_KEEP, JOIN_TAKE, JOIN_BLEND };

/* What a job computes in: on the stack of decode, in the arena of prefill. Nothing in it outlives the job. */
struct attn_work {
    _Alignas(64) float acc[ATTN_ACC];       /* [n_rows][columns]: the current split's values */
    _Alignas(64) float q[ATTN_ACC];         /* the rows of q, each on a cache line of its own, where they fit */
    const float *q_row[ATTN_ROWS];
    _Alignas(64) float score[ATTN_SCORES];  /* [n_rows][tiles of a run][16]: exp(s - m) */
    _Alignas(64) float sum[ATTN_ROWS][16];  /* the sixteen lanes l */
    float alpha[ATTN_ROWS][ATTN_SPLIT_TILES];                   /* what a tile rescales the past by; 1 where it does not */
    struct { uint8_t lo, hi; } seen[ATTN_ROWS][ATTN_SPLIT_TILES]; /* the slots of a tile that count for a row */
    float split_max[ATTN_ROWS];             /* m of the current split */
    float max[ATTN_ROWS], denominator[ATTN_ROWS];               /* m and L of the splits merged so far */
    float x_scale[ATTN_ROWS], y_scale[ATTN_ROWS];
    enum attn_join join[ATTN_ROWS];
    const void *key[TL_ATTN_SPLIT + ATTN_AHEAD * 16], *value[TL_ATTN_SPLIT + ATTN_AHEAD * 16]; /* rows of a run and a little more */
};

struct attn_job {
    const struct kv_view *view;
    const uint32_t *block_table; /* of the sequence */
    int64_t kv_head;
    float scale;
    struct attn_work *work;
    int n_rows; /* 1 .. attn_max_rows(head_dim) */
    struct attn_row row[ATTN_ROWS];
};

/* How many rows of this width one job takes. */
static inline int attn_max_rows(int64_t head_dim)
{
    if (head_dim <= ATTN_ACC / ATTN_ROWS)
        return ATTN_ROWS;
    const int64_t padded = (head_dim + 15) / 16 * 16;
    return padded <= ATTN_ACC / ATTN_ROW_BLOCK ? (int)(ATTN_ACC / padded) : ATTN_ROW_BLOCK;
}

#endif
