/* SPDX-License-Identifier: MIT */
/* attn_rows.h: the job that every entry point is cut into: a few query rows that share one walk
 * over the K and V of one KV head. A decode step's rows are the heads of a group, of one sequence
 * or of several that begin with the same blocks; a prefill's are those at neighbouring
 * positions. */
#ifndef TL_ATTN_ROWS_H
#define TL_ATTN_ROWS_H

#include <stdbool.h>
#include <stdint.h>

#include "kernels/kv_layout.h"
#include "tinyllm/attention.h"

enum {
    ATTN_ROWS = 32,        /* most rows of one job */
    ATTN_ROW_BLOCK = 4,    /* most rows whose dots and values share registers */
    ATTN_ACC = TL_MAX_HEAD_DIM, /* floats of unnormalised values a job holds: one row at least */
    /* floats of exponentiated scores a job holds: a run of ATTN_ROWS rows */
    ATTN_SCORES = 2048,
    ATTN_RUN_TILES = 4, /* tiles scored before their values are added */
    ATTN_AHEAD = 4,        /* tiles between finding or prefetching one and its use */
    /* the same for prefetching it once more: memory that is busy drops prefetches */
    ATTN_AGAIN = 3,
    /* and a third time, where there are instructions to spare (V16_PREFETCHES) */
    ATTN_LAST = 1,
    /* tiles found and still needed: a power of two, ATTN_AHEAD + ATTN_RUN_TILES or more */
    ATTN_RING = 8,
    ATTN_WIDE_DIM = 128,    /* widest keys of e4m3 that are widened a tile at a time */
    ATTN_WIDE_COLUMNS = 64, /* of values, together: a cache line of codes */
    ATTN_SPLIT_TILES = TL_ATTN_SPLIT / TL_ATTN_TILE,
    ATTN_STRETCH_SPLITS = TL_ATTN_STRETCH / TL_ATTN_SPLIT
};

/* (m, L) of what was merged so far; from { -INFINITY, 0 } on. */
struct attn_state {
    float m, denominator;
};

/* One query row: it sees positions lo .. hi-1 (none where lo >= hi). */
struct attn_row {
    const float *q; /* [k_dim] */
    /* [v_dim]: the result, and until then the merge of the stretches that are behind; of a state,
     * its values, with m and L in front of them */
    float *out;
    float *lse;  /* or NULL */
    float sink;  /* -inf: none */
    float slope; /* ALiBi's, where the job has it */
    int64_t pos, lo, hi;
};

/* What a job begins with, and what it leaves of its rows. */
enum attn_part {
    ATTN_WHOLE, /* from nothing to finished rows */
    /* from nothing; what there is stays in `work`, for jobs that go on with some rows */
    ATTN_BEGIN,
    ATTN_GO_ON, /* from what ATTN_BEGIN left of rows from, from+1, ..., to finished rows. Jobs that
                 * go on take the rows in rising order */
    ATTN_STATE  /* from nothing to one state a row, of positions within one stretch */
};

/* Positions lo .. hi-1 of one KV head of one sequence. */
struct attn_path {
    const uint32_t *block_table; /* entry i: positions (first_block + i) * block_tokens and up */
    int64_t first_block;
    struct kv_plane k, v;
    int64_t lo, hi;
};

/* Where the sixteen rows of a tile lie. */
struct tile_rows {
    const void *key[16], *value[16];
    bool found; /* false past the end of the walk */
};

/* Where its scales lie, where K and V have them: those of sixteen slots from the first on, a token
 * stride apart, or each by itself. */
struct tile_scales {
    const float *key[16], *value[16];
    bool are_spread;
};

/* What the values of a block of rows must know of a tile that was scored. */
struct tile_note {
    uint16_t seen[ATTN_ROW_BLOCK]; /* bit j: slot j counts for the row */
    bool is_whole;                 /* every slot counts for every row */
    bool needs_rescale;            /* the past of some row is to be multiplied by alpha first */
    /* set where needs_rescale; 1 for rows whose maximum did not rise */
    float alpha[ATTN_ROW_BLOCK];
};

/* How a newer state's values join the older ones: x_scale * older + y_scale * newer, unless one
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

/* Some states of one row, in order, to be merged into those before them. */
struct attn_merge {
    struct attn_end end;
    struct attn_state *merged; /* of the stretches behind; their values are in end.out */
    float *stretch;            /* [2 + dim]: the state of the current stretch; m -inf: none yet */
    const float *states;       /* [n][2 + dim] */
    int64_t first_split, n, span_splits; /* state i: span_splits splits from first_split on */
    bool is_last;              /* the row is finished afterwards */
};

/* What a job computes in: a worker's memory in the pool, or the caller's stack. */
struct attn_work {
    /* The rows' states, which ATTN_BEGIN leaves for ATTN_GO_ON. */
    _Alignas(64) float acc[ATTN_ACC];      /* [row][acc_stride]: the current split's values */
    /* likewise: the current stretch's, where it is not the first of the walk, whose values are in
     * the rows' out */
    _Alignas(64) float stretch[ATTN_ACC];
    _Alignas(64) float sum[ATTN_ROWS][16]; /* the sixteen lanes l of the current split */
    float split_max[ATTN_ROWS];            /* its m */
    struct attn_state in_stretch[ATTN_ROWS]; /* of the finished splits of the current stretch */
    struct attn_state merged[ATTN_ROWS];     /* of the stretches behind it */
    struct attn_place {
        bool split_is_open;  /* acc, sum and split_max hold what is not yet in in_stretch */
        int64_t stretch;     /* the number of the current one; -1: none yet */
        int64_t n_stretches; /* of the walk up to here, the current one included */
    } at, begun; /* where the job is; where ATTN_BEGIN stopped */

    /* What is forgotten when a job ends. */
    _Alignas(64) float q_copy[ATTN_ACC];     /* [row block][d / 16][row of the block][16] */
    _Alignas(64) float score[ATTN_SCORES];   /* [row block][tile of a run][row][16]: exp(s - m) */
    struct tile_note note[ATTN_SCORES / 16]; /* the same without [row][16] */
    bool max_is_finite[ATTN_ROWS];           /* of a row block: every m is a number and not -inf */
    int64_t q_stride, acc_stride;            /* floats of a row in q_copy and in acc */

    /* The walk: tiles are found ATTN_AHEAD before they are scored. Number n of the walk is ring[n %
     * ATTN_RING] and again ATTN_RING further on, so that those after it follow in memory. */
    struct attn_path path;  /* what is walked: what any row of the job sees */
    int64_t all_lo, all_hi; /* the positions that every row sees */
    struct {
        struct attn_path path; /* `path`, and towards its end the job's `next` */
        /* the tile to be found next, and where its first position is in the table */
        int64_t n, tile, block, slot;
        bool is_next;
    } ahead;
    struct tile_rows ring[2 * ATTN_RING];

    /* Formats with scales, which are found with the rows. */
    struct tile_scales scales[ATTN_RING]; /* number n of the walk: [n % ATTN_RING] */
    _Alignas(64) float k_scale[16];       /* of the tile that is scored */
    _Alignas(64) float v_scale[ATTN_RUN_TILES][16]; /* of the run */

    /* e4m3, widened to f16 (attn_widen.h): a tile of K, ATTN_WIDE_COLUMNS of a run of V, and where
     * the rows of these lie. */
    _Alignas(64) uint16_t wide_k[16 * ATTN_WIDE_DIM];
    _Alignas(64) uint16_t wide_v[ATTN_RUN_TILES * 16 * ATTN_WIDE_COLUMNS];
    struct tile_rows wide_rows[ATTN_RUN_TILES];
};

struct attn_job {
    const struct kv_layout *kv;
    struct attn_path path; /* lo, hi: not looked at, the rows say what is seen */
    enum attn_part part;
    int from; /* ATTN_GO_ON: the first of its rows, by its number in the job that began them */
    float scale, softcap; /* softcap 0: none */
    bool has_alibi;
    /* what the caller will walk after this, to be prefetched; or NULL */
    const struct attn_path *next;
    int n_rows; /* 1 .. attn_max_rows(kv) */
    struct attn_row *row;
    struct attn_work *work;
};

/* Floats of a row so wide, on whole vectors. */
static inline int64_t attn_padded(int64_t dim)
{
    return (dim + 15) / 16 * 16;
}

/* How many rows one job takes: as many as have room for their queries and values. */
static inline int attn_max_rows(const struct kv_layout *kv)
{
    const int64_t dim = attn_padded(kv->k.dim > kv->v.dim ? kv->k.dim : kv->v.dim);
    return dim <= ATTN_ACC / ATTN_ROWS ? ATTN_ROWS : (int)(ATTN_ACC / dim);
}

#endif
