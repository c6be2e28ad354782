/* SPDX-License-Identifier: MIT */
/* attn_rows.h: the unit of attention that every entry point is cut into: a few query rows that
 * share one walk over the K and V of one KV head. A decode step's rows are the heads of a group; a
 * prefill's are those at neighbouring positions.
 *
 * kv_view says where a layer's K and V lie; the block pool merely fills one in. A contiguous cache
 * is a view of one long block. */
#ifndef TL_ATTN_ROWS_H
#define TL_ATTN_ROWS_H

#include <stdbool.h>
#include <stdint.h>

#include "tinyllm/attention.h"

/* One side (K or V) of a layer: element (block, head, slot, d) lies at base + block*block_stride +
 * head*head_stride + slot*token_stride + d, in elements of the view's dtype. */
struct kv_side {
    const void *base;
    int64_t block_stride, head_stride, token_stride;
};

struct kv_view {
    struct kv_side k, v;
    tl_dtype dtype; /* of both: TL_F32, TL_F16 or TL_BF16 */
    int64_t block_tokens, k_dim, v_dim;
};

static inline struct kv_side attn_side_of(const tl_kv_view *v, const void *base, int64_t block,
                                          int64_t head, int64_t token)
{
    return (struct kv_side){base, v->n_blocks > 1 ? block : 0, v->n_kv_heads > 1 ? head : 0,
                            v->block_tokens > 1 ? token : 0};
}

/* The same of a sound view. The stride of an axis with one step may be anything: it is not
 * taken. */
static inline struct kv_view attn_view_of(const tl_kv_view *v)
{
    return (struct kv_view){
        .k = attn_side_of(v, v->k, v->k_block_stride, v->k_head_stride, v->k_token_stride),
        .v = attn_side_of(v, v->v, v->v_block_stride, v->v_head_stride, v->v_token_stride),
        .dtype = (tl_dtype)v->dtype,
        .block_tokens = v->block_tokens,
        .k_dim = v->head_dim_k,
        .v_dim = v->head_dim_v};
}

enum {
    ATTN_ROWS = 32,        /* most rows of one job */
    ATTN_ROW_BLOCK = 4,    /* most rows whose dots and values share registers */
    ATTN_ACC = 4096,       /* floats of unnormalised values a job holds */
    /* floats of exponentiated scores a job holds: a run of ATTN_ROWS rows, or a split of one */
    ATTN_SCORES = 4096,
    /* tiles scored before their values are added, where the rows' values fit in ATTN_ACC */
    ATTN_RUN_TILES = 4,
    ATTN_AHEAD = 4,        /* tiles between finding or fetching one and its use */
    /* the same for fetching it once more: memory that is busy drops prefetches */
    ATTN_AGAIN = 3,
    /* and a third time, where there are instructions to spare (V16_FETCHES) */
    ATTN_LAST = 1,
    /* tiles found and still needed: a power of two, ATTN_AHEAD + ATTN_RUN_TILES or more */
    ATTN_RING = 8,
    ATTN_SPLIT_TILES = TL_ATTN_SPLIT / TL_ATTN_TILE
};

/* (m, L) of the splits merged so far, whose values are in the row's out; from { -INFINITY, 0 }
 * on. */
struct attn_state {
    float m, denominator;
};

/* One query row: it sees positions lo .. hi-1 (none where lo >= hi). */
struct attn_row {
    const float *q; /* [k_dim] */
    float *out;     /* [v_dim]; holds the merge of the finished splits while the job runs */
    float *lse;     /* or NULL */
    /* NULL; or where the state of a row goes that sees no more than one split: m, L, then [v_dim],
     * which is `out` */
    float *state;
    /* of a job that resumes or suspends: the splits before, the splits so far */
    struct attn_state *carry;
    float sink;     /* -inf: none */
    float slope;    /* ALiBi's, where the job has it */
    int64_t pos, lo, hi;
};

/* Positions lo .. hi-1 of one KV head of one sequence. */
struct attn_path {
    const uint32_t *block_table;
    int64_t kv_head, lo, hi;
};

/* Where the sixteen rows of a tile lie. */
struct tile_rows {
    const void *key[16], *value[16];
    bool found; /* false past the end of the walk */
};

/* What the values of a block of rows must know of a tile that was scored. */
struct tile_note {
    /* the slots that count for each row; [0] for all where they are alike */
    uint8_t lo[ATTN_ROW_BLOCK], hi[ATTN_ROW_BLOCK];
    bool alike;                                     /* all rows of the block count the same slots */
    /* the past of some row is to be multiplied by alpha first */
    bool rescaled;
    /* set where rescaled; 1 for rows whose maximum did not rise */
    float alpha[ATTN_ROW_BLOCK];
};

/* How a finished split joins the splits before it: out = x_scale * out + y_scale * acc, unless one
 * side is empty. */
struct join {
    enum { JOIN_KEEP, JOIN_TAKE, JOIN_BLEND } how;
    float x_scale, y_scale;
};

/* Where a row ends up. */
struct attn_end {
    float *out; /* [dim] */
    float *lse; /* or NULL */
    float sink; /* -inf: none */
    int64_t dim;
};

/* What a job computes in: on the stack of decode, in the arena of prefill. Nothing in it outlives
 * the job. */
struct attn_work {
    _Alignas(64) float acc[ATTN_ACC];       /* [n_rows][columns]: the current split's values */
    _Alignas(64) float q_copy[ATTN_ACC];    /* [row block][d / 16][row of the block][16] */
    _Alignas(64) float score[ATTN_SCORES];  /* [row block][tile of a run][row][16]: exp(s - m) */
    _Alignas(64) float sum[ATTN_ROWS][16];  /* the sixteen lanes l */
    struct tile_note note[ATTN_SCORES / 16]; /* the same without [row][16] */
    bool steady[ATTN_ROWS];                 /* of a row block: every m is a number and not -inf */
    float split_max[ATTN_ROWS];             /* m of the current split */
    float max[ATTN_ROWS], denominator[ATTN_ROWS]; /* m and L of the splits merged so far */
    struct join join[ATTN_ROWS];
    /* q_copy, or the only row of a wide head where it lies */
    const float *q;
    int64_t q_stride, acc_stride;           /* floats of a row in it and in acc */

    /* The walk: tiles are found ATTN_AHEAD before they are scored. Number n of the walk is ring[n %
     * ATTN_RING] and again ATTN_RING further on, so that those after it follow in memory. */
    struct attn_path path;                  /* what is walked: what any row of the job sees */
    int64_t all_lo, all_hi;                 /* the positions that every row sees */
    struct {
        struct attn_path path;              /* `path`, and towards its end the job's `next` */
        /* the tile to be found next, and where its first position is in the table */
        int64_t n, tile, block, slot;
        bool is_next;
    } ahead;
    struct tile_rows ring[2 * ATTN_RING];
};

struct attn_job {
    const struct kv_view *view;
    const uint32_t *block_table; /* of the sequence */
    int64_t kv_head;
    float scale, softcap; /* 0: none */
    bool has_alibi;
    bool resumes;  /* rows go on from their carry and out; lo is where a split begins */
    /* rows are not finished: their carry and out are left for a job that resumes; hi is where a
     * split ends */
    bool suspends;
    struct attn_work *work;
    /* what the caller will walk after this, to be fetched early; or NULL */
    const struct attn_path *next;
    int n_rows; /* 1 .. attn_max_rows(k_dim, v_dim) */
    const struct attn_row *row;
};

/* Floats of a row so wide, on whole vectors. */
static inline int64_t attn_padded(int64_t dim)
{
    return (dim + 15) / 16 * 16;
}

/* How many rows of these widths one job takes: as many as have room for their queries and values,
 * or one. */
static inline int attn_max_rows(int64_t k_dim, int64_t v_dim)
{
    const int64_t dim = k_dim > v_dim ? k_dim : v_dim;
    if (dim <= ATTN_ACC / ATTN_ROWS)
        return ATTN_ROWS;
    return attn_padded(dim) <= ATTN_ACC ? (int)(ATTN_ACC / attn_padded(dim)) : 1;
}

#endif
