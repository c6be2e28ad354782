/* SPDX-License-Identifier: MIT */
/* observe.h: what a call did and when, and what the memory could do: for tools that draw and
 * measure. */
#ifndef TINYLLM_OBSERVE_H
#define TINYLLM_OBSERVE_H

#include "kv_view.h"
#include "pool.h"

/* What an event was. */
#define TL_TRACE_ROWS 0   /* rows of one sequence walked over K and V */
/* rows of several sequences, `seq` the first of them, walked over a prefix that they share */
#define TL_TRACE_SHARED 1
#define TL_TRACE_MERGE 2  /* states of splits merged; seq and kv_head are -1 */

/* One piece of work of a call. 72 bytes, in this order. */
typedef struct {
    int32_t worker, what;
    /* tokens of the batch from first_token on; of a shared prefix n_tokens in all, wherever they
     * are */
    int64_t seq, kv_head, first_token, n_tokens;
    /* of TL_ATTN_SPLIT positions each: those that any of the rows sees */
    int64_t first_split, n_splits;
    int64_t begin_ns, end_ns;      /* CLOCK_MONOTONIC */
} tl_trace_event;

/* Where a call writes its events down, in no order. The caller owns all of it; not to be given to
 * two calls at once. */
typedef struct {
    tl_trace_event *events; /* [capacity]; may be NULL for 0 */
    int64_t capacity;
    int64_t n; /* written: events there were; those past capacity are not kept */
} tl_trace;

TL_BEGIN_DECLS

/* Reads what a decode step would, in its order, and computes nothing: the first byte of every 64 of
 * the K and V rows of the last `window` (<= 0: all) of ctx_lens[s] positions of B sequences, head
 * by head. *word: the xor of those bytes. A step of attention over the same bytes cannot be much
 * faster; the time of this call is what it is measured against.
 *
 *   block_tables  [B] rows of table_stride entries; only entries of positions that are read are
 *                 looked at
 *   ctx_lens      [B] tokens, >= 0
 *
 * Allocates nothing. Threads: as for tl_paged_attn_f32.
 * Errors, *word untouched, the first of these decides:
 *   TL_EINVAL   view, its k or v, block_tables, ctx_lens or word NULL (tp may be NULL)
 *   TL_EINVAL   a view that is not sound (kv_view.h)
 *   TL_EINVAL   B < 0, table_stride < 1, tables beyond the address space
 *   TL_EINVAL   sequence by sequence: a context length that is negative or beyond the table, an
 *               entry that would be read and names no block
 *   TL_EBUSY    called on tp from inside one of its ranges */
TL_API tl_status tl_kv_read(const tl_kv_view *view, const uint32_t *block_tables,
                            int64_t table_stride, const int32_t *ctx_lens, int64_t B,
                            int64_t window, tl_pool *tp, uint64_t *word);

TL_END_DECLS

#endif
