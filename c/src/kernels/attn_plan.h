/* SPDX-License-Identifier: MIT */
/* attn_plan.h: how a call is cut into units (attn_plan.c makes it, attn_unit.c follows it).
 *
 * Words. item: sequences that are worked on together: one by itself, or several that begin with the
 * same blocks, whose rows fit one job. chunk: the tokens of an item that one job takes. */
#ifndef TL_ATTN_PLAN_H
#define TL_ATTN_PLAN_H

#include "kernels/attn_call.h"

/* Sequences that are planned together. */
enum { ATTN_PLAN_SEQS = 256 };

struct attn_item {
    /* its units: chunk by chunk, the last first, for one KV head after another */
    int64_t first_unit;
    int64_t shared;     /* the position where what all of them share ends; 0: one sequence */
    int64_t n_tokens, n_chunks;
    /* Sequences, counted from the plan's first: those of the item from `first` on by `next`, and
     * the one that sees the earliest position. */
    int16_t first, last, earliest;
};

struct attn_plan {
    int64_t first_seq, n_seqs, n_items, n_units;
    int64_t chunk_tokens; /* most of them */
    int64_t longest, shortest; /* positions that a unit walks over */
    double ns;            /* what all of it costs one thread, by a rough measure */
    struct attn_item item[ATTN_PLAN_SEQS];
    int16_t next[ATTN_PLAN_SEQS];
};

/* Nanoseconds below which a step stays with its caller: about what waking a thread that sleeps
 * costs. A variable, so that tests can share even the smallest. */
extern int64_t tl_small_step_ns;

/* What work costs one thread, roughly: of `elements` of K, and as many of V, that each of kv_heads
 * reads and each of q_heads multiplies. At 4 elements a nanosecond from memory and 20 through the
 * multipliers, which is what one core of a server has. */
double tl_attn_ns(double elements, double kv_heads, double q_heads);

/* Whether so much work for one thread is worth waking others. */
bool tl_worth_waking(double ns);

/* What the first rows of a unit walk over. */
struct attn_path tl_attn_path_of_unit(const struct attn_call *c, const struct attn_plan *plan,
                                      int64_t unit);

/* Does one unit. `next`: what is walked afterwards, or NULL. */
void tl_attn_unit(const struct attn_call *c, const struct attn_plan *plan, int64_t unit,
                  const struct attn_path *next, int worker, struct attn_work *work);

#endif
