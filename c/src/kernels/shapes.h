/* SPDX-License-Identifier: MIT */
/* shapes.h: where arrays with strides lie, and whether they may: questions about arguments that
 * every call asks before it reads or writes.
 *
 * Words. axis: one index of an array, n steps of `stride` elements. row: the innermost `width`
 * elements, which are contiguous. */
#ifndef TL_SHAPES_H
#define TL_SHAPES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "tinyllm/abi.h"

struct axis {
    const char *name; /* of its stride */
    int64_t stride, n;
};

/* Memory from `lo` up to, not including, `hi`; none where they are equal. */
struct span {
    const char *name; /* of the argument */
    uintptr_t lo, hi;
};

/* Whether an array of n non-negative dimensions of `size`-byte elements can exist: its bytes stay
 * within ptrdiff_t. */
static inline bool tl_fits_memory(int64_t size, int n, const int64_t *dims)
{
    bool fits = true, empty = false;
    for (int i = 0; i < n; i++) {
        empty |= dims[i] == 0;
        fits = fits && !__builtin_mul_overflow(size, dims[i], &size);
    }
    return empty || (fits && size <= PTRDIFF_MAX);
}

/* The memory of rows of `width` elements of `elem` bytes at base + the sum of i * stride over the
 * axes. False where some of it lies outside the address space. An axis without a step (n 0) makes
 * it empty, and so does a NULL base. */
bool tl_span_of(const void *base, int64_t elem, int64_t width, const struct axis *axis, int n_axes,
                struct span *span);

/* n contiguous elements, whose bytes are known to fit. They may still pass the end of memory, which
 * tl_check_addresses finds: hi is then below lo. */
static inline struct span tl_span(const char *name, const void *base, int64_t elem, int64_t n)
{
    const uintptr_t lo = (uintptr_t)base;
    return (struct span){name, lo, base ? lo + (uintptr_t)(elem * n) : lo};
}

/* Whether no two rows share memory, shown by nesting: of the axes, those longer than 1 are taken by
 * rising length of their stride, and each must step over all that the shorter ones span. NULL, or
 * the axis that does not; `axis` is sorted. *stepped_over: what it had to step over, or 0 where its
 * own way passes INT64_MAX. */
const struct axis *tl_overlapping_axis(int64_t width, struct axis *axis, int n_axes,
                                       int64_t *stepped_over);

/* TL_EINVAL in fn's name where a span passes the end of memory. */
tl_status tl_check_addresses(const char *fn, const struct span *span, int n);

/* TL_EINVAL in fn's name where one of the first n_written spans shares memory with any other. */
tl_status tl_check_spans(const char *fn, const struct span *span, int n_written, int n);

#endif
