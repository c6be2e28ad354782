/* SPDX-License-Identifier: MIT */
/* kv_append.c: rounding new K and V to f16 into the blocks of one sequence.
 *
 * Words. entry: an index into the block table. written entries: those that positions pos .. pos+T-1
 * fall into; no other is looked at. */
#include <inttypes.h>

#include "kernels/kernels.h"
#include "kernels/shapes.h"
#include "runtime/fail.h"
#include "runtime/fpenv.h"
#include "runtime/kv_inner.h"

static const char fn[] = "tl_kv_append_f32";

/* Elements of one tensor, [n_kv_heads][T][head_dim], at the caller's strides. */
struct source {
    const float *x;
    int64_t head_stride, token_stride;
};

static tl_status check_arguments(const tl_kv_pool *kv, uint32_t layer, int32_t n_table, int64_t pos,
                                 int64_t T)
{
    if (!kv)
        return tl_fail(TL_EINVAL, fn, "the pool is NULL");
    if (layer >= kv->cfg.n_layers)
        return tl_fail(TL_EINVAL, fn, "layer %u is out of range: the pool has %u", layer,
                       kv->cfg.n_layers);
    if (n_table < 0 || pos < 0 || T < 0)
        return tl_fail_i64(TL_EINVAL, fn, "n_table %lld, pos %lld, T %lld: none may be negative",
                           n_table, pos, T);
    return TL_OK;
}

/* Everything but the table's entries; T > 0. */
static tl_status check_range(const tl_kv_pool *kv, int32_t n_table, int64_t pos, int64_t T)
{
    const int64_t b = kv->cfg.block_tokens;
    int64_t end;
    if (__builtin_add_overflow(pos, T, &end))
        return tl_fail_i64(TL_EINVAL, fn, "pos %lld + T %lld pass INT64_MAX", pos, T);
    if ((end - 1) / b >= n_table)
        return tl_fail_i64(
            TL_EINVAL, fn,
            "positions %lld .. %lld need %lld table entries of %lld tokens, n_table is %lld", pos,
            end - 1, (end - 1) / b + 1, b, n_table);
    return TL_OK;
}

static tl_status check_source(const tl_kv_pool *kv, const char *name, const struct source *from,
                              int64_t T)
{
    const struct axis axis[] = {{"head_stride", from->head_stride, kv->cfg.n_kv_heads},
                                {"token_stride", from->token_stride, T}};
    struct span span;
    if (!tl_span_of(from->x, sizeof(float), kv->cfg.head_dim, axis, 2, &span))
        return tl_fail(TL_EINVAL, fn,
                       "%s: head_stride %" PRId64 ", token_stride %" PRId64
                       " pass the address space with T = %" PRId64,
                       name, from->head_stride, from->token_stride, T);
    return TL_OK;
}

/* The earlier of entries first .. entry-1 that names the same block, or -1. A used block's `prev`
 * is free for notes: the entry that named it last. An old note is told from a fresh one by asking
 * the table, so notes are never cleared. */
static int64_t note_entry(tl_kv_pool *kv, const uint32_t *table, int64_t first, int64_t entry)
{
    struct kv_block *block = &kv->block[table[entry]];
    const int64_t noted = block->prev;
    block->prev = (uint32_t)entry;
    return noted >= first && noted < entry && table[noted] == table[entry] ? noted : -1;
}

static tl_status fail_busy(const struct kv_block *block, int64_t entry, uint32_t id)
{
    if (block->hash != 0)
        return tl_fail_i64(TL_EBUSY, fn, "block_table[%lld] = %lld is registered", entry, id);
    return tl_fail_i64(TL_EBUSY, fn, "block_table[%lld] = %lld has %lld references", entry, id,
                       block->refs);
}

/* Whether every written entry names a block of the writer's own. What is no used block decides
 * before what is shared. */
static tl_status check_entries(tl_kv_pool *kv, const uint32_t *table, int64_t first, int64_t last)
{
    int64_t busy = -1;
    for (int64_t entry = first; entry <= last; entry++) {
        const uint32_t id = table[entry];
        if (id >= kv->cfg.n_blocks)
            return tl_fail_i64(TL_EINVAL, fn,
                               "block_table[%lld] = %lld is out of range: the pool has %lld", entry,
                               id, kv->cfg.n_blocks);
        if (kv_refs(kv, id) == 0)
            return tl_fail_i64(TL_EINVAL, fn, "block_table[%lld] = %lld is not used", entry, id);
        const int64_t twin = note_entry(kv, table, first, entry);
        if (twin >= 0)
            return tl_fail_i64(TL_EINVAL, fn, "block_table[%lld] and [%lld] are both block %lld",
                               twin, entry, id);
        if (busy < 0 && !kv_writable(kv, id))
            busy = entry;
    }
    return busy < 0 ? TL_OK : fail_busy(&kv->block[table[busy]], busy, table[busy]);
}

/* Tokens t .. t+n-1 of one head, all of one block, into y, the slot of the first. */
static void write_head(const struct tl_kernels *kernels, const struct source *from, int64_t head,
                       int64_t t, int64_t n, int64_t D, uint16_t *y)
{
    const float *x = from->x + head * from->head_stride + t * from->token_stride;
    if (from->token_stride == D)
        kernels->f32_to_f16_n(x, y, n * D);
    else
        for (int64_t i = 0; i < n; i++)
            kernels->f32_to_f16_n(x + i * from->token_stride, y + i * D, D);
}

struct append {
    const tl_kv_pool *kv;
    const struct tl_kernels *kernels;
    uint32_t layer;
    const uint32_t *entry; /* where the first token goes: its entry of the table */
    int64_t slot, T;
};

/* One tensor, in the order in which the source lies in memory: one head's tokens after another's,
 * or one token's heads. */
static void write_tensor(const struct append *append, bool is_v, const struct source *from)
{
    const tl_kv_pool *kv = append->kv;
    const int64_t b = kv->cfg.block_tokens, D = kv->cfg.head_dim, heads = kv->cfg.n_kv_heads,
                  T = append->T;
    const bool by_token = T == 1 || from->head_stride < from->token_stride;
    for (int64_t head = 0; head < heads; head += by_token ? heads : 1) {
        const uint32_t *entry = append->entry;
        int64_t slot = append->slot;
        for (int64_t t = 0, n; t < T; t += n, entry++, slot = 0) {
            uint16_t *y =
                (uint16_t *)kv_slab(kv, *entry, append->layer, is_v) + (head * b + slot) * D;
            n = b - slot < T - t ? b - slot : T - t;
            if (!by_token)
                write_head(append->kernels, from, head, t, n, D, y);
            else
                for (int64_t i = 0; i < n; i++)
                    for (int64_t h = 0; h < heads; h++)
                        write_head(append->kernels, from, h, t + i, 1, D, y + (h * b + i) * D);
        }
    }
}

tl_status tl_kv_append_f32(tl_kv_pool *kv, uint32_t layer, const uint32_t *block_table,
                           int32_t n_table, int64_t pos, int64_t T, const float *k, const float *v,
                           int64_t head_stride, int64_t token_stride)
{
    const struct tl_kernels *kernels;
    TL_TRY(check_arguments(kv, layer, n_table, pos, T));
    if (T == 0)
        return TL_OK;
    if (!block_table || !k || !v)
        return tl_fail(TL_EINVAL, fn, "%s is NULL with T = %" PRId64,
                       !block_table ? "block_table" : !k ? "k" : "v", T);
    TL_TRY(check_range(kv, n_table, pos, T));
    const struct source keys = {k, head_stride, token_stride},
                        values = {v, head_stride, token_stride};
    TL_TRY(check_source(kv, "k", &keys, T));
    TL_TRY(check_source(kv, "v", &values, T));
    TL_TRY(tl_kernels_require(fn, &kernels));
    const int64_t b = kv->cfg.block_tokens, entry = pos / b, slot = pos % b;
    TL_TRY(check_entries(kv, block_table, entry, entry + (slot + T - 1) / b));
    const struct append append = {kv, kernels, layer, block_table + entry, slot, T};
    const tl_fpenv caller = tl_fpenv_enter();
    write_tensor(&append, false, &keys);
    write_tensor(&append, true, &values);
    tl_fpenv_leave(caller);
    return TL_OK;
}
