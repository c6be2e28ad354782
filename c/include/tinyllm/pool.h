/* SPDX-License-Identifier: MIT */
/* pool.h: a fixed set of worker threads and one blocking parallel for.
 *
 * A pool is a guest in its process: idle workers sleep, asynchronous signals never land on them, a
 * forked child gets its ranges run on its own thread. The float mode of a range that a worker runs
 * is the library's own (round to nearest, subnormals kept, traps masked); ranges that the caller
 * runs have the caller's. */
#ifndef TINYLLM_POOL_H
#define TINYLLM_POOL_H

#include "abi.h"

#define TL_POOL_MAX_THREADS 4096

typedef struct tl_pool tl_pool;

/* One range [lo, hi) of a parallel for. `worker` is in [0, tl_pool_threads); of one call it belongs
 * to one thread for the duration of the range, so it can index scratch of that call. */
typedef void (*tl_range_fn)(void *ctx, int64_t lo, int64_t hi, int worker);

TL_BEGIN_DECLS

/* Starts n_threads - 1 workers; the caller of tl_parallel_for is the other one. 1 starts none; 0
 * means the CPUs this process may use: its affinity mask, but no more than the CPU quota of its
 * control groups, read when the pool is made. TL_EINVAL: n_threads < 0 or above
 * TL_POOL_MAX_THREADS, NULL out. TL_ENOMEM:
 * the hook failed.
 * TL_EIO: a thread could not be started; those already started are joined. On failure *out is
 * NULL. */
TL_API tl_status tl_pool_create(int n_threads, tl_pool **out);

/* Calls fn(ctx, lo, hi, worker) exactly once for each range
 *
 *     lo = k * grain, hi = min(lo + grain, n)      k = 0 .. ceil(n / grain) - 1
 *
 * whatever the number of threads, and returns when all have finished; what the ranges wrote is then
 * visible to the caller. Who runs a range, and when, is open. A NULL pool runs them in rising order
 * on the caller as worker 0. n == 0 calls nothing.
 * TL_EINVAL, looked at first: n < 0, grain < 1, NULL fn. TL_EBUSY: called on `pool` from inside one
 * of its own ranges, at once and whatever n is; also when the way back led through a range of
 * another pool.
 * Threads: a second thread calling on the same pool waits for the first, unless its call is one
 * range (grain >= n): that runs at once, beside whatever the pool does. Inside a range, calls on
 * NULL or on another pool run; two threads that enter two pools in opposite order wait for each
 * other for ever, as with any two locks.
 * After fork() the child runs ranges on its own thread. A child forked inside a range leaves it by
 * _exit or exec only:
 * the threads that run the other ranges are not there. */
TL_API tl_status tl_parallel_for(tl_pool *pool, int64_t n, int64_t grain, tl_range_fn fn,
                                 void *ctx);

/* Threads that may run ranges, the caller included; 1 for NULL. */
TL_API int tl_pool_threads(const tl_pool *pool);

/* Waits for a running tl_parallel_for, joins the workers, frees the pool. NULL: nothing. From
 * inside one of the pool's own ranges:
 * nothing is done and the slot is set. In a forked child it frees the child's copy and returns. */
TL_API void tl_pool_destroy(tl_pool *pool);

TL_END_DECLS

#endif
