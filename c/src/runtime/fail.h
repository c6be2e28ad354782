/* SPDX-License-Identifier: MIT */
/* fail.h: how every function reports a failure: one line in the calling thread's error slot, then
 * the status. */
#ifndef TL_FAIL_H
#define TL_FAIL_H

#include "tinyllm/abi.h"

/* Sets the slot to "<fn>: <message>" and returns `status`, so that a check reads
 *     if (!out) return tl_fail(TL_EINVAL, fn, "out is NULL");
 * `fn` is the public function that was called, not the one that noticed. */
__attribute__((format(printf, 3, 4))) tl_status tl_fail(tl_status status, const char *fn,
                                                        const char *format, ...);

/* The same where all values are integers that int64_t holds, up to six: the format prints each with
 * %lld, whatever their types,
 *     if (n < 0) return tl_fail_i64(TL_EINVAL, fn, "n = %lld is negative", n);
 * Where a string stands among them, "%" PRId64 says the same of an int64_t. */
#define tl_fail_i64(status, fn, format, ...) \
    tl_fail(status, fn, format, TL_I64_PICK_(__VA_ARGS__, 6, 5, 4, 3, 2, 1)(__VA_ARGS__))
#define TL_I64_PICK_(a, b, c, d, e, f, n, ...) TL_I64_##n##_
#define TL_I64_1_(a) (long long)(a)
#define TL_I64_2_(a, ...) (long long)(a), TL_I64_1_(__VA_ARGS__)
#define TL_I64_3_(a, ...) (long long)(a), TL_I64_2_(__VA_ARGS__)
#define TL_I64_4_(a, ...) (long long)(a), TL_I64_3_(__VA_ARGS__)
#define TL_I64_5_(a, ...) (long long)(a), TL_I64_4_(__VA_ARGS__)
#define TL_I64_6_(a, ...) (long long)(a), TL_I64_5_(__VA_ARGS__)

/* Leaves the calling function with the status of `call` unless that is TL_OK. */
#define TL_TRY(call)                      \
    do {                                  \
        const tl_status status_ = (call); \
        if (status_ != TL_OK)             \
            return status_;               \
    } while (0)

#endif
