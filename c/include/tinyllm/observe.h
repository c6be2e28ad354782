/* SPDX-License-Identifier: MIT */
/* observe.h: what a call did and when, and what the memory could do: for tools that draw and measure. */
#ifndef TINYLLM_OBSERVE_H
#define TINYLLM_OBSERVE_H

#include "abi.h"

/* What an event was. */
#define TL_TRACE_ROWS 0   /* rows of one sequence walked over K and V */
#define TL_TRACE_SHARED 1 /* rows of several sequences, from `seq` on, walked over the splits they share */
#define TL_TRACE_MERGE 2  /* states of splits merged; seq and kv_head are -1 */

/* One piece of work of a call. 72 bytes, in this order. */
typedef struct {
    int32_t worker, what;
    int64_t seq, kv_head, first_token, n_tokens;
    int64_t first_split, n_splits; /* of TL_ATTN_SPLIT positions each: those that any of the rows sees */
    int64_t begin_ns, end_ns;      /* CLOCK_MONOTONIC */
} tl_trace_event;

/* Where a call writes its events down, in no order. The caller owns all of it; not to be given to two calls at once. */
typedef struct {
    tl_trace_event *events; /* [capacity]; may be NULL for 0 */
    int64_t capacity;
    int64_t n; /* written: events there were; those past capacity are not kept */
} tl_trace;

TL_BEGIN_DECLS

/* Loads one 64-bit word from every cache line (64 bytes) that begins in n bytes from p on, as fast as one thread can, and
 * returns the xor of those words: the speed no attention over the same bytes can pass by much. p: 8-byte aligned; the last
 * line is read only where 8 bytes of it are within n. Reentrant. NULL with n > 0, or p not aligned: 0, with the slot set. */
TL_API uint64_t tl_memory_read(const void *p, size_t n);

TL_END_DECLS

#endif
