/* SPDX-License-Identifier: MIT */
/* pool_run.h: the thread pool as kernels use it: the error names the kernel that was called, and
 * whether a pool may be used is known before the first write. */
#ifndef TL_POOL_RUN_H
#define TL_POOL_RUN_H

#include "tinyllm/pool.h"

/* TL_EBUSY, slot set in fn's name, when the calling thread is inside one of `pool`'s own ranges;
 * else TL_OK. */
tl_status tl_pool_check(const char *fn, const tl_pool *pool);

/* tl_parallel_for, its failures reported in fn's name. */
tl_status tl_pool_run(const char *fn, tl_pool *pool, int64_t n, int64_t grain, tl_range_fn range,
                      void *ctx);

#endif
