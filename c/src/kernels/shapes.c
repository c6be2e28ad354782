/* SPDX-License-Identifier: MIT */
#include "kernels/shapes.h"

#include <string.h>

#include "runtime/fail.h"

bool tl_span_of(const void *base, int64_t elem, int64_t width, const struct axis *axis, int n_axes,
                struct span *span)
{
    int64_t below = 0, above = width, bytes_below, bytes_above;
    span->lo = span->hi = (uintptr_t)base;
    for (int i = 0; i < n_axes; i++)
        if (axis[i].n <= 0)
            return true;
    for (int i = 0; i < n_axes; i++) {
        int64_t way, *const side = axis[i].stride < 0 ? &below : &above;
        if (__builtin_mul_overflow(axis[i].n - 1, axis[i].stride, &way) ||
            __builtin_add_overflow(*side, way, side))
            return false;
    }
    if (__builtin_mul_overflow(below, elem, &bytes_below) ||
        __builtin_mul_overflow(above, elem, &bytes_above) ||
        bytes_above > PTRDIFF_MAX + bytes_below)
        return false;
    if (!base)
        return true;
    return !__builtin_sub_overflow(span->lo, (uintptr_t)0 - (uintptr_t)bytes_below, &span->lo) &&
           !__builtin_add_overflow(span->hi, (uintptr_t)bytes_above, &span->hi);
}

/* How far a stride steps, whichever way. */
static uint64_t step_of(const struct axis *axis)
{
    return axis->stride < 0 ? 0 - (uint64_t)axis->stride : (uint64_t)axis->stride;
}

static void sort_by_step(struct axis *axis, int n)
{
    for (int i = 1; i < n; i++)
        for (int j = i; j > 0 && step_of(&axis[j]) < step_of(&axis[j - 1]); j--) {
            const struct axis shorter = axis[j];
            axis[j] = axis[j - 1];
            axis[j - 1] = shorter;
        }
}

const struct axis *tl_overlapping_axis(int64_t width, struct axis *axis, int n_axes,
                                       int64_t *stepped_over)
{
    *stepped_over = width;
    sort_by_step(axis, n_axes);
    for (int i = 0; i < n_axes; i++) {
        int64_t way;
        if (axis[i].n <= 1)
            continue;
        if (step_of(&axis[i]) < (uint64_t)*stepped_over)
            return &axis[i];
        if (__builtin_mul_overflow(axis[i].n - 1, step_of(&axis[i]), &way) ||
            __builtin_add_overflow(*stepped_over, way, stepped_over)) {
            *stepped_over = 0;
            return &axis[i];
        }
    }
    return NULL;
}

tl_status tl_check_addresses(const char *fn, const struct span *span, int n)
{
    for (int i = 0; i < n; i++)
        if (span[i].hi < span[i].lo)
            return tl_fail(TL_EINVAL, fn, "%s at %p: the address space ends before it does",
                           span[i].name, (void *)span[i].lo);
    return TL_OK;
}

static bool share_memory(const struct span *a, const struct span *b)
{
    return a->lo < a->hi && b->lo < b->hi && a->lo < b->hi && b->lo < a->hi;
}

static bool is_plural(const char *name)
{
    return name[strlen(name) - 1] == 's';
}

tl_status tl_check_spans(const char *fn, const struct span *span, int n_written, int n)
{
    for (int i = 0; i < n_written; i++)
        for (int k = i + 1; k < n; k++)
            if (share_memory(&span[i], &span[k]))
                return tl_fail(TL_EINVAL, fn, "%s %s %s", span[i].name,
                               is_plural(span[i].name) ? "overlap" : "overlaps", span[k].name);
    return TL_OK;
}
