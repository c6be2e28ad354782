/* SPDX-License-Identifier: MIT */
/* pool.h: a fixed set of worker threads and one blocking parallel for.
 *
 * A pool is a guest in its process: idle workers sleep, asynchronous signals never land on them,
 * nothing cancels them, a forked child gets its ranges run on its own thread. The float mode of a
 * range that a worker runs is the library's own (round to nearest, subnormals kept, traps masked);
 * ranges that the caller runs have the caller's.
 *
 * A range has to return. One that is left by longjmp, a C++ exception or pthread_exit stays in the
 * pool for ever: later calls on that pool and its destruction may wait for it without end, its
 * thread must not call on a pool again, and an exception that reaches a worker ends the program.
 * Without a pool nothing is held, and a range may be left by all of them. pthread_cancel is safe:
 * while a thread is inside a call on a pool, waiting for its turn included, or creates or destroys
 * one, cancellation is off; it acts at the thread's next cancellation point. */
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
 * control groups, read when the pool is made.
 * From the allocator hook it takes (n_threads + 4) * 128 KiB of work memory for the kernels, which
 * is touched only as they use it, and little else.
 *
 * Errors, *out NULL, the first of these decides:
 *   TL_EINVAL   out is NULL
 *   TL_EINVAL   n_threads is below 0 or above TL_POOL_MAX_THREADS
 *   TL_EIO      forks cannot be watched
 *   TL_ENOMEM   the hook failed
 *   TL_EIO      a lock or a thread was refused; threads already started are joined */
TL_API tl_status tl_pool_create(int n_threads, tl_pool **out);

/* Calls fn(ctx, lo, hi, worker) exactly once for each range
 *
 *     lo = k * grain, hi = min(lo + grain, n)      k = 0 .. ceil(n / grain) - 1
 *
 * whatever the number of threads, and returns when all have finished; what the ranges wrote is then
 * visible to the caller. Who runs a range, and when, is open. A NULL pool runs them in rising order
 * on the caller as worker 0. n == 0 calls nothing.
 *
 * Errors, nothing called, the first of these decides:
 *   TL_EINVAL   n < 0
 *   TL_EINVAL   grain < 1
 *   TL_EINVAL   fn is NULL
 *   TL_EBUSY    called from inside a range of `pool`, at once and even for n == 0; also when the
 *               way back led through a range of another pool
 *
 * Threads: a second thread calling on the same pool waits for the first, unless its call is one
 * range (grain >= n): that runs on its caller at once, beside whatever the pool does, as worker 0.
 * Inside a range, calls on NULL or on another pool run; two threads that enter two pools in
 * opposite order wait for each other for ever, as with any two locks.
 * After fork() the child runs ranges on its own thread, and its threads take turns whatever the
 * number of ranges. A child forked inside a range leaves it by _exit or exec only: the threads that
 * run the other ranges are not there. */
TL_API tl_status tl_parallel_for(tl_pool *pool, int64_t n, int64_t grain, tl_range_fn fn,
                                 void *ctx);

/* Threads that may run ranges, the caller included; 1 for NULL. */
TL_API int tl_pool_threads(const tl_pool *pool);

/* Waits for all calls on the pool to end, joins the workers, frees the pool. In a forked child it
 * frees the child's copy and returns. NULL: nothing. Called from inside a range of `pool`: nothing
 * happens and the slot is set. */
TL_API void tl_pool_destroy(tl_pool *pool);

TL_END_DECLS

#endif
