/* SPDX-License-Identifier: MIT */
/* fail.h: how every function reports a failure: one line in the calling thread's error slot, then
 * the status. */
#ifndef TL_FAIL_H
#define TL_FAIL_H

#include "tinyllm/abi.h"

/* Sets the slot to "<fn>: <message>" and returns `status`, so that a check reads
 *     if (n < 0) return tl_fail(TL_EINVAL, fn, "n = %lld is negative", (long long)n);
 * `fn` is the public function that was called, not the one that noticed. */
__attribute__((format(printf, 3, 4))) tl_status tl_fail(tl_status status, const char *fn,
                                                        const char *format, ...);

/* Leaves the calling function with the status of `call` unless that is TL_OK. */
#define TL_TRY(call)                      \
    do {                                  \
        const tl_status status_ = (call); \
        if (status_ != TL_OK)             \
            return status_;               \
    } while (0)

#endif
