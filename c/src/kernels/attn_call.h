/* SPDX-License-Identifier: MIT */
/* attn_call.h: one call of attention, whichever public function was asked. Each of those says in
 * these words what it was given (paged_attn.c, paged_rows.c, flash_attn.c); attn_check.c says
 * whether it can be done, attn_plan.c cuts it into units and shares them out, attn_unit.c does one
 * unit as jobs of rows for the kernels (attn_rows.h).
 *
 * Words. token: one of the total_q query positions of the batch, numbered over all sequences; a
 * token has H rows. unit: the rows of some tokens that read one KV head. */
#ifndef TL_ATTN_CALL_H
#define TL_ATTN_CALL_H

#include <math.h>
#include <stdbool.h>

#include "kernels/attn_rows.h"
#include "kernels/kernels.h"

/* A row of a (sequence, token, head) lies at the sum of index times stride, in floats. */
struct row_strides {
    int64_t seq, token, head;
};

struct attn_call {
    const char *fn; /* the public function, for messages */
    const struct tl_kernels *kernels;

    /* The batch. */
    int64_t B, H, group, total_q;
    const int32_t *cu_seqlens_q; /* NULL: each sequence has q_len_each tokens */
    int64_t q_len_each;
    const int32_t *ctx_lens; /* NULL: each sequence has ctx_len_each positions */
    int64_t ctx_len_each;
    bool has_q_offset; /* sequences begin at position q_offset, else they end at their newest one */
    int64_t q_offset;

    /* What is read. */
    struct kv_layout kv;
    const uint32_t *block_tables; /* NULL: every sequence is one block, its own */
    int64_t table_stride, first_block;
    const char *table_stride_name;
    const float *q;
    struct row_strides q_at;

    /* What is written: finished rows, or states of a range of splits, [row][state][2 + v_dim]. */
    float *out, *lse;
    struct row_strides out_at, lse_at;
    const char *out_name;
    bool to_states;
    int64_t first_split, n_splits, span_splits; /* span_splits: of one state */

    float scale, softcap; /* softcap 0: none */
    bool is_causal;
    int64_t window; /* <= 0: none */
    const float *alibi_slopes, *sink_logits;

    /* Who works, and in what. */
    tl_pool *tp;
    struct attn_work *work; /* the calling thread's, where there is no pool; NULL: on its stack */
    void *workspace;
    size_t workspace_bytes;
    tl_trace *trace;
};

/* Positions lo .. hi-1. */
struct range {
    int64_t lo, hi;
};

static inline int64_t attn_length(struct range range)
{
    return range.lo < range.hi ? range.hi - range.lo : 0;
}

/* ---- a sequence ---- */

/* The first token of sequence seq, and of the one behind it. */
static inline int64_t attn_first_token(const struct attn_call *c, int64_t seq)
{
    return c->cu_seqlens_q ? c->cu_seqlens_q[seq] : seq * c->q_len_each;
}

static inline int64_t attn_q_len(const struct attn_call *c, int64_t seq)
{
    return attn_first_token(c, seq + 1) - attn_first_token(c, seq);
}

static inline int64_t attn_ctx_len(const struct attn_call *c, int64_t seq)
{
    return c->ctx_lens ? c->ctx_lens[seq] : c->ctx_len_each;
}

/* The position of a sequence's first token. */
static inline int64_t attn_first_pos(const struct attn_call *c, int64_t seq)
{
    return c->has_q_offset ? c->q_offset : attn_ctx_len(c, seq) - attn_q_len(c, seq);
}

static inline const uint32_t *attn_table(const struct attn_call *c, int64_t seq)
{
    static const uint32_t own_block = 0;
    return c->block_tables ? c->block_tables + seq * c->table_stride : &own_block;
}

/* ---- a row ---- */

static inline struct range attn_in_splits(const struct attn_call *c, struct range seen)
{
    const int64_t first = c->first_split * TL_ATTN_SPLIT,
                  end = (c->first_split + c->n_splits) * TL_ATTN_SPLIT;
    if (!c->to_states)
        return seen;
    return (struct range){seen.lo > first ? seen.lo : first, seen.hi < end ? seen.hi : end};
}

/* What a row at position pos sees, as far as the call is asked for it. */
static inline struct range attn_seen(const struct attn_call *c, int64_t seq, int64_t pos)
{
    const int64_t n = attn_ctx_len(c, seq);
    const struct range seen = {c->window > 0 && c->window <= pos ? pos - c->window + 1 : 0,
                               c->is_causal && pos < n ? pos + 1 : n};
    return attn_in_splits(c, seen);
}

/* What the rows of a sequence see, all together; it has some. */
static inline struct range attn_seen_by_all(const struct attn_call *c, int64_t seq)
{
    const int64_t pos = attn_first_pos(c, seq);
    return (struct range){attn_seen(c, seq, pos).lo,
                          attn_seen(c, seq, pos + attn_q_len(c, seq) - 1).hi};
}

static inline int64_t attn_row_at(struct row_strides at, int64_t seq, int64_t token, int64_t head)
{
    return seq * at.seq + token * at.token + head * at.head;
}

/* Where a finished row goes. */
static inline struct attn_end attn_end_of(const struct attn_call *c, int64_t seq, int64_t token,
                                          int64_t head)
{
    return (struct attn_end){
        .out = c->out + attn_row_at(c->out_at, seq, token, head),
        .lse = c->lse ? c->lse + attn_row_at(c->lse_at, seq, token, head) : NULL,
        .sink = c->sink_logits ? c->sink_logits[head] : -INFINITY,
        .dim = c->kv.v.dim};
}

/* Floats of a state. */
static inline int64_t attn_state_floats(const struct attn_call *c)
{
    return 2 + c->kv.v.dim;
}

/* ---- the parts ---- */

/* Whether B and table_stride can be; whether arrays
 * of that size can, which are read from then on. TL_EINVAL. */
tl_status tl_attn_check_batch(const struct attn_call *c);
tl_status tl_attn_check_arrays(const struct attn_call *c);

/* Whether positions `seen` of a sequence can be found through its table. TL_EINVAL. */
tl_status tl_attn_check_table(const struct attn_call *c, int64_t seq, struct range seen);

/* All the rest, in the order the headers have it; fills in total_q and kernels. Every pointer that
 * will be used is there, the scalars are sound, B is not negative and H a multiple of the KV heads.
 * TL_OK: nothing is in the way. */
tl_status tl_attn_check(struct attn_call *c);

/* Does it. The call was checked. */
tl_status tl_attn_run(const struct attn_call *c);

/* Bytes of a workspace for total_q tokens. False where they would wrap. */
bool tl_attn_workspace(const struct attn_call *c, int64_t total_q, size_t *bytes);

#endif
