/* SPDX-License-Identifier: MIT */
/* trace.h: events of a call that is watched. A call that is not pays for one comparison a piece of
 * work. */
#ifndef TL_KERNELS_TRACE_H
#define TL_KERNELS_TRACE_H

#include <time.h>

#include "tinyllm/observe.h"

static inline int64_t trace_now(const tl_trace *trace)
{
    struct timespec t;
    if (!trace)
        return 0;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Workers add at once; who reads waits for the call's end. */
static inline void trace_add(tl_trace *trace, tl_trace_event event)
{
    if (!trace)
        return;
    event.end_ns = trace_now(trace);
    const int64_t at = __atomic_fetch_add(&trace->n, 1, __ATOMIC_RELAXED);
    if (at < trace->capacity)
        trace->events[at] = event;
}

#endif
