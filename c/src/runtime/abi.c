/* SPDX-License-Identifier: MIT */
/* abi.c: the names of the status codes, the error slot, and where memory comes from.
 *
 * Words: the slot is the calling thread's last error; the hook is the allocator in force; the
 * default hook puts a tag of two words in front of every piece of memory, which says how the piece
 * goes back. */
#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "runtime/alloc.h"
#include "runtime/fail.h"

/* Layouts are ABI (R2). */
static_assert(sizeof(void *) != 8 || sizeof(tl_allocator) == 24, "tl_allocator is 24 bytes");
static_assert(sizeof(tl_status) == 4 && sizeof(tl_dtype) == 4, "status and dtype are 32 bits wide");

uint32_t tl_abi_version(void)
{
    return TL_ABI_VERSION;
}

const char *tl_version(void)
{
    return TL_VERSION;
}

const char *tl_status_str(tl_status s)
{
    switch (s) {
#define NAME_OF(name, value) \
    case value:              \
        return #name;
        TL_STATUS_LIST(NAME_OF)
#undef NAME_OF
    default:
        return "TL_UNKNOWN";
    }
}

/* ---- the error slot ---- */

static _Thread_local char slot[TL_LAST_ERROR_CAP];

const char *tl_last_error(void)
{
    return slot;
}

void tl_set_last_error(const char *message)
{
    const size_t n = message ? strnlen(message, sizeof slot - 1) : 0;
    if (n > 0)
        memmove(slot, message, n); /* the message may lie inside the slot */
    slot[n] = '\0';
}

/* The line is put together aside, because an argument may be the slot's own text. */
tl_status tl_fail(tl_status status, const char *fn, const char *format, ...)
{
    char line[TL_LAST_ERROR_CAP];
    const int prefix = snprintf(line, sizeof line, "%s: ", fn);
    if (prefix >= 0 && (size_t)prefix < sizeof line) {
        va_list args;
        va_start(args, format);
        vsnprintf(line + prefix, sizeof line - (size_t)prefix, format, args);
        va_end(args);
    }
    tl_set_last_error(line);
    return status;
}

/* ---- the default hook ---- */

/* From here up a piece is a mapping of its own: pages nobody writes cost nothing, and more may be
 * reserved than there is memory. Below it the C heap is faster and wastes no pages. */
#define LARGE_PIECE ((size_t)1 << 20)

/* From here up huge pages are asked for: blocks lie in no order, and each page touched costs a walk
 * through the page tables. */
#define HUGE_PIECE ((size_t)16 << 20)

struct tag {
    void *base;    /* what the system gave */
    size_t mapped; /* bytes of the mapping; 0: base is from the C heap */
};

/* The first multiple of `align` in `base` with room for a tag in front, and its tag written. */
static void *place_piece(void *base, size_t mapped, size_t align)
{
    const uintptr_t first = (uintptr_t)base + sizeof(struct tag);
    const size_t pad = (size_t)-first & (align - 1);
    struct tag *tag = (struct tag *)(void *)((char *)base + pad);
    *tag = (struct tag){base, mapped};
    return tag + 1;
}

static void *default_alloc(void *user, size_t n, size_t align)
{
    (void)user;
    if (align < sizeof(struct tag))
        align = sizeof(struct tag); /* so that the tag is aligned too */
    size_t total;
    if (!tl_add_size(n, align, &total) || !tl_add_size(total, sizeof(struct tag), &total))
        return NULL;
    if (total < LARGE_PIECE) {
        void *base = malloc(total);
        return base ? place_piece(base, 0, align) : NULL;
    }
    void *base = mmap(NULL, total, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (base == MAP_FAILED)
        return NULL;
#if defined(MADV_HUGEPAGE)
    if (total >= HUGE_PIECE)
        /* a hint: without huge pages everything works, a little slower */
        (void)madvise(base, total, MADV_HUGEPAGE);
#endif
    return place_piece(base, total, align);
}

static void default_free(void *user, void *p)
{
    (void)user;
    const struct tag tag = ((struct tag *)p)[-1];
    if (tag.mapped == 0)
        free(tag.base);
    else
        munmap(tag.base, tag.mapped);
}

/* ---- the hook in force ---- */

static const tl_allocator default_hook = {default_alloc, default_free, NULL};
static tl_allocator hook = {default_alloc, default_free, NULL};

tl_status tl_set_allocator(const tl_allocator *a)
{
    if (a && !a->alloc)
        return tl_fail(TL_EINVAL, "tl_set_allocator", "the alloc member is NULL");
    if (a && !a->free)
        return tl_fail(TL_EINVAL, "tl_set_allocator", "the free member is NULL");
    hook = a ? *a : default_hook;
    return TL_OK;
}

void *tl_owned_alloc(size_t n, size_t align, tl_allocator *owner)
{
    *owner = hook;
    return owner->alloc(owner->user, n, align);
}

void tl_owned_free(const tl_allocator *owner, void *p)
{
    if (p)
        owner->free(owner->user, p);
}

bool tl_owned_by_default(const tl_allocator *owner)
{
    return owner->alloc == default_alloc;
}

void *tl_alloc(size_t n, size_t align)
{
    if (n == 0) {
        tl_fail(TL_EINVAL, "tl_alloc", "n = 0 bytes asked for");
        return NULL;
    }
    if (align == 0 || (align & (align - 1)) != 0) {
        tl_fail(TL_EINVAL, "tl_alloc", "align = %zu is no power of two", align);
        return NULL;
    }
    void *p = hook.alloc(hook.user, n, align);
    if (!p)
        tl_fail(TL_ENOMEM, "tl_alloc", "the allocator hook has no %zu bytes aligned to %zu", n,
                align);
    return p;
}

void tl_free(void *p)
{
    tl_owned_free(&hook, p);
}
