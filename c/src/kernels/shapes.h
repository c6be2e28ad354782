/* SPDX-License-Identifier: MIT */
/* shapes.h: questions about arguments that every attention call asks. */
#ifndef TL_SHAPES_H
#define TL_SHAPES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

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

/* Whether [a, a + a_bytes) and [b, b + b_bytes) share a byte. NULL shares none. */
static inline bool tl_overlap(const void *a, size_t a_bytes, const void *b, size_t b_bytes)
{
    const uintptr_t x = (uintptr_t)a, y = (uintptr_t)b;
    return a && b && a_bytes && b_bytes && x < y + b_bytes && y < x + a_bytes;
}

#endif
