/* SPDX-License-Identifier: MIT */
/* memory_read.c: how fast one thread reads. One load fetches a whole cache line, so no wide loads are needed; prefetches keep
 * more lines on their way than a core asks for by itself. */
#include "runtime/fail.h"
#include "tinyllm/observe.h"

enum { LINE = 64, AHEAD = 4096, LINES_A_TURN = 8 };

static inline uint64_t word_at(const char *p)
{
    return *(const volatile uint64_t *)p;
}

uint64_t tl_memory_read(const void *p, size_t n)
{
    static const char fn[] = "tl_memory_read";
    const char *at = p;
    uint64_t word = 0;
    if ((!p && n > 0) || (uintptr_t)p % sizeof word != 0) {
        (void)tl_fail(TL_EINVAL, fn, "p = %p is %s", p, p ? "not aligned to 8 bytes" : "NULL");
        return 0;
    }
    for (; n >= LINES_A_TURN * LINE; at += LINES_A_TURN * LINE, n -= LINES_A_TURN * LINE)
        for (int i = 0; i < LINES_A_TURN; i++) {
            __builtin_prefetch((const void *)((uintptr_t)at + AHEAD + (uintptr_t)(i * LINE)), 0, 2); /* past the end it does nothing */
            word ^= word_at(at + i * LINE);
        }
    for (; n >= sizeof word; at += LINE, n -= n < LINE ? n : LINE)
        word ^= word_at(at);
    return word;
}
