/* SPDX-License-Identifier: MIT */
/* pool_run.h: the thread pool as kernels use it: the error names the kernel that was called, and
 * whether a pool may be used is known before the first write. */
#ifndef TL_POOL_RUN_H
#define TL_POOL_RUN_H

#include "tinyllm/pool.h"

/* Bytes of scratch that each range of tl_pool_run_with_scratch may use, on a cache line of its
 * own. */
#define TL_POOL_SCRATCH ((size_t)128 << 10)

/* TL_EBUSY, slot set in fn's name, when the calling thread is inside one of `pool`'s own ranges;
 * else TL_OK. */
tl_status tl_pool_check(const char *fn, const tl_pool *pool);

/* tl_parallel_for, its failures reported in fn's name. */
tl_status tl_pool_run(const char *fn, tl_pool *pool, int64_t n, int64_t grain, tl_range_fn range,
                      void *ctx);

/* As tl_range_fn. `scratch`: TL_POOL_SCRATCH bytes that no other thread uses during the range, with
 * anything in them. */
typedef void (*tl_work_fn)(void *ctx, int64_t lo, int64_t hi, int worker, void *scratch);

/* The same for work that needs scratch; it is the pool's, so `pool` is not NULL. A loop of one
 * range waits for the pool only where all spare pieces of scratch are in use. */
tl_status tl_pool_run_with_scratch(const char *fn, tl_pool *pool, int64_t n, int64_t grain,
                                   tl_work_fn work, void *ctx);

#endif
