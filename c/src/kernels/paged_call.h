/* SPDX-License-Identifier: MIT */
/* paged_call.h: one call of tl_paged_attn_f32 or tl_paged_attn_states_f32, as its three parts know
 * it: paged_check.c says whether it can be done, paged_rows.c does it unit by unit, paged_waves.c
 * does it split by split where few rows have long contexts.
 *
 * Words. token: one of the total_q = cu_seqlens_q[B] query positions of the batch; a token has H
 * rows. hand: a worker, and what it computes in. */
#ifndef TL_PAGED_CALL_H
#define TL_PAGED_CALL_H

#include <math.h>
#include <stdbool.h>

#include "kernels/attn_rows.h"
#include "kernels/kernels.h"

struct call {
    const char *fn;
    const tl_paged_attn_args *a;
    bool to_states; /* what the caller asked for: states instead of finished rows */
    /* NULL: rows are finished; else [row][state_stride][2 + v_dim], those of splits first_split ..
     * in front */
    float *states;
    int64_t first_split, n_splits, state_stride;
    const struct tl_kernels *kernels;
    struct kv_view view;
    int64_t Hkv, group, total_q;
    /* tokens of a unit; units: the KV heads of some tokens one after the other, then the next
     * tokens */
    int64_t unit_tokens, n_units;
};

struct hand {
    struct attn_work work;
    int worker;
};

/* The first token of sequence seq, and of the one behind it. */
static inline int64_t first_token(const struct call *c, int64_t seq)
{
    return c->a->cu_seqlens_q ? c->a->cu_seqlens_q[seq] : seq;
}

static inline int64_t q_len(const struct call *c, int64_t seq)
{
    return first_token(c, seq + 1) - first_token(c, seq);
}

/* The first position that a row at position p sees. */
static inline int64_t first_visible(const struct call *c, int64_t p)
{
    return c->a->window > 0 && c->a->window <= p ? p - c->a->window + 1 : 0;
}

struct range {
    int64_t lo, hi;
};

/* Positions lo .. hi-1, as far as the call is asked for their splits. */
static inline struct range in_splits(const struct call *c, int64_t lo, int64_t hi)
{
    const int64_t first = c->first_split * TL_ATTN_SPLIT,
                  end = (c->first_split + c->n_splits) * TL_ATTN_SPLIT;
    return c->states ? (struct range){lo > first ? lo : first, hi < end ? hi : end}
                     : (struct range){lo, hi};
}

/* Where a finished row goes. */
static inline struct attn_end end_of(const struct call *c, int64_t token, int64_t head)
{
    const tl_paged_attn_args *a = c->a;
    return (struct attn_end){.out =
                                 a->out + token * a->out_token_stride + head * a->out_head_stride,
                             .lse = a->lse ? a->lse + token * a->H + head : NULL,
                             .sink = a->sink_logits ? a->sink_logits[head] : -INFINITY,
                             .dim = c->view.v_dim};
}

/* Everything about the arguments, in the order the header has it; fills in total_q and kernels.
 * TL_OK: nothing is in the way. */
tl_status tl_paged_check(struct call *c);

/* Does one unit. `next`: what is walked afterwards, or NULL. */
void tl_paged_attend_unit(const struct call *c, int64_t unit, const struct attn_path *next,
                          struct hand *hand);

/* The bytes of a workspace for these arguments. False where they would wrap. */
bool tl_paged_workspace(const tl_paged_attn_args *a, int64_t total_q, size_t *bytes);

/* Whether splits are to be worked on side by side: there is room for it, several of them, and too
 * few units to balance by themselves. */
bool tl_paged_wants_waves(const struct call *c);

/* The whole call, wave by wave: the states of some splits side by side, then their merge, in
 * order. */
tl_status tl_paged_run_in_waves(const struct call *c);

#endif
