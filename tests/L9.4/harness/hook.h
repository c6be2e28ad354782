/* SPDX-License-Identifier: MIT */
/* hook.h: an allocator hook for tests. It counts what is live, paints what it hands out, and fails
 * when told to:
 *
 *     for (long k = 1;; k++) {        every allocation fails in turn, until a run sees no failure
 *         struct hook hook;
 *         hook_install(&hook, k);
 *         status = call();
 *         hook_remove();
 *         if (hook.failed == 0) break;
 *     }
 */
#ifndef TL_HOOK_H
#define TL_HOOK_H

#include <stdlib.h>
#include <string.h>

#include "tinyllm/abi.h"

#define HOOK_PAINT 0xA5 /* no caller may count on zeros */

struct hook {
    long live, calls, failed; /* pieces out; requests so far; those refused */
    long fail_at;             /* this request and all later ones are refused; 0: none */
};

static void *hook_alloc(void *user, size_t n, size_t align)
{
    struct hook *hook = user;
    void *p;
    if (++hook->calls >= hook->fail_at && hook->fail_at > 0) {
        hook->failed++;
        return NULL;
    }
    if (posix_memalign(&p, align < sizeof(void *) ? sizeof(void *) : align, n) != 0)
        return NULL;
    memset(p, HOOK_PAINT, n);
    hook->live++;
    return p;
}

static void hook_free(void *user, void *p)
{
    struct hook *hook = user;
    hook->live--;
    free(p);
}

static inline void hook_install(struct hook *hook, long fail_at)
{
    *hook = (struct hook){.fail_at = fail_at};
    const tl_allocator allocator = {hook_alloc, hook_free, hook};
    tl_set_allocator(&allocator);
}

static inline void hook_remove(void)
{
    tl_set_allocator(NULL);
}

#endif
