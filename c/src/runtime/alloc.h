/* SPDX-License-Identifier: MIT */
/* alloc.h: memory that remembers where it came from, so that it goes back to the hook that gave it
 * even when another has been installed since; and size arithmetic that cannot wrap. */
#ifndef TL_ALLOC_H
#define TL_ALLOC_H

#include <stdbool.h>

#include "tinyllm/abi.h"

/* n bytes from the hook in force, whose copy is stored in *owner; NULL (slot untouched) where the
 * hook has none. n > 0, align a power of two. */
void *tl_owned_alloc(size_t n, size_t align, tl_allocator *owner);

/* Gives p back to the hook it came from. NULL: nothing. */
void tl_owned_free(const tl_allocator *owner, void *p);

/* Whether the library took it from the system by itself. */
bool tl_owned_by_default(const tl_allocator *owner);

/* *out = a * b, or false where that would wrap. */
static inline bool tl_mul_size(size_t a, size_t b, size_t *out)
{
    return !__builtin_mul_overflow(a, b, out);
}

/* *out = a + b, or false where that would wrap. */
static inline bool tl_add_size(size_t a, size_t b, size_t *out)
{
    return !__builtin_add_overflow(a, b, out);
}

#endif
