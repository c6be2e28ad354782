/* SPDX-License-Identifier: MIT */
/* kv_trim.c: memory of free blocks given back to the operating system.
 *
 * Words. A free block is resident, leaving (this call gives it back) or given back, until it is
 * used again; its record says which. run: touched free blocks that lie side by side and are not
 * kept. A page goes where all of it lies in one run and a leaving block has a part of it: then it
 * had not gone before. */
#include <errno.h>
#include <sys/mman.h>
#include <unistd.h>

#include "runtime/fail.h"
#include "runtime/kv_inner.h"

struct trim {
    tl_kv_pool *kv;
    uintptr_t page;  /* bytes of one */
    uintptr_t end;   /* of the memory that has gone so far */
    uint64_t *bytes;
};

/* Says of every free block but the `keep` that were freed last, and those that have gone, that it
 * leaves. */
static void choose(tl_kv_pool *kv, uint32_t keep)
{
    for (uint32_t id = kv->free_head; id != KV_NONE; id = kv->block[id].next) {
        struct kv_block *block = &kv->block[id];
        if (block->prev != KV_GIVEN_BACK)
            block->prev = keep > 0 ? KV_RESIDENT : KV_LEAVING;
        keep -= keep > 0;
    }
}

static bool is_in_a_run(const tl_kv_pool *kv, uint32_t id)
{
    return id < kv->n_touched && kv_is_free(kv, id) && kv->block[id].prev != KV_RESIDENT;
}

static bool is_leaving(const tl_kv_pool *kv, uint32_t id)
{
    return kv->block[id].prev == KV_LEAVING;
}

static uintptr_t lower(uintptr_t a, uintptr_t b)
{
    return a < b ? a : b;
}

static uintptr_t higher(uintptr_t a, uintptr_t b)
{
    return a > b ? a : b;
}

static uintptr_t address_of(const struct trim *t, uint32_t id)
{
    return (uintptr_t)t->kv->data + id * t->kv->size.block;
}

static uintptr_t down(const struct trim *t, uintptr_t address)
{
    return address - address % t->page;
}

static uintptr_t up(const struct trim *t, uintptr_t address)
{
    return down(t, address + t->page - 1);
}

/* The pages of leaving blocks from .. to-1 that lie in the run first .. end-1. */
static tl_status give_back(struct trim *t, uint32_t first, uint32_t end, uint32_t from, uint32_t to)
{
    const uintptr_t lo = higher(higher(up(t, address_of(t, first)), down(t, address_of(t, from))),
                                t->end),
                    hi = lower(down(t, address_of(t, end)), up(t, address_of(t, to)));
    if (lo < hi && madvise((void *)lo, hi - lo, MADV_DONTNEED) != 0)
        return tl_fail(TL_EIO, "tl_kv_trim", "madvise of %zu bytes at %p: errno %d",
                       (size_t)(hi - lo), (void *)lo, errno);
    if (lo < hi) {
        t->end = hi;
        *t->bytes += hi - lo;
    }
    for (uint32_t id = from; id < to; id++)
        t->kv->block[id].prev = KV_GIVEN_BACK;
    return TL_OK;
}

static tl_status give_back_run(struct trim *t, uint32_t first, uint32_t end)
{
    for (uint32_t from = first, to; from < end; from = to) {
        to = from + 1;
        if (!is_leaving(t->kv, from))
            continue;
        while (to < end && is_leaving(t->kv, to))
            to++;
        TL_TRY(give_back(t, first, end, from, to));
    }
    return TL_OK;
}

tl_status tl_kv_trim(tl_kv_pool *kv, uint32_t keep, uint64_t *bytes)
{
    if (!kv || !bytes)
        return tl_fail(TL_EINVAL, "tl_kv_trim", "%s is NULL", kv ? "bytes" : "the pool");
    *bytes = 0;
    if (!tl_owned_by_default(&kv->data_owner))
        return TL_OK;
    struct trim t = {.kv = kv, .page = (uintptr_t)sysconf(_SC_PAGESIZE), .bytes = bytes};
    choose(kv, keep);
    for (uint32_t id = 0; id < kv->n_touched; id++) {
        const uint32_t first = id;
        while (is_in_a_run(kv, id))
            id++;
        TL_TRY(give_back_run(&t, first, id));
    }
    return TL_OK;
}
