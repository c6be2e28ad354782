/* SPDX-License-Identifier: MIT */
/* kv_reserve.c: the blocks that a step's new tokens are going to be written to.
 *
 * Words. tail: the block in which the last position before a sequence's new ones stands, where it
 * has room for the first of these; a sequence that begins a block with them has none. writer: a
 * sequence of the step, to its tail. */
#include <inttypes.h>

#include "kernels/kv_step.h"
#include "runtime/fail.h"

/* One sequence. The tail stands at table[first - 1] where slot > 0; table[first] .. table[last - 1]
 * are the entries of fresh blocks. */
struct growth {
    int64_t first, last;
    uint32_t slot; /* where the first new position goes in the tail; 0: there is no tail */
};

struct needs {
    uint64_t fresh, copies;
};

/* All zeros where it gets no tokens. */
static struct growth growth_of(const tl_kv_pool *kv, const struct kv_step *step, int64_t seq)
{
    const int64_t b = kv->cfg.block_tokens, end = step->ctx_lens[seq],
                  n = kv_first_token(step, seq + 1) - kv_first_token(step, seq), begin = end - n;
    if (n == 0)
        return (struct growth){0, 0, 0};
    const int64_t whole = begin / b, slot = begin - whole * b;
    return (struct growth){whole + (slot > 0), (end - 1) / b + 1, (uint32_t)slot};
}

static uint32_t *table_of(const struct kv_step *step, uint32_t *tables, int64_t seq)
{
    return tables + seq * step->table_stride;
}

/* ---- counting ---- */

static tl_status fail_at(const char *fn, const tl_kv_pool *kv, int64_t seq, int64_t entry,
                         uint32_t id)
{
    if (id >= kv->cfg.n_blocks)
        return tl_fail(TL_EINVAL, fn,
                       "sequence %" PRId64 ": block_table[%" PRId64
                       "] = %u is out of range: the pool has %u",
                       seq, entry, id, kv->cfg.n_blocks);
    if (kv_refs(kv, id) == 0)
        return tl_fail(TL_EINVAL, fn,
                       "sequence %" PRId64 ": block_table[%" PRId64 "] = %u is not used", seq,
                       entry, id);
    return tl_fail(TL_EINVAL, fn,
                   "sequence %" PRId64 ": block_table[%" PRId64
                   "] = %u stands in more tables than its %u references allow",
                   seq, entry, id, kv->block[id].refs);
}

/* Adds to *needs. Each tail's `prev`, which is free for notes, counts its writers up to here: each
 * of them finds the references that those before it have left. */
static tl_status count(const char *fn, tl_kv_pool *kv, const struct kv_step *step,
                       uint32_t *tables, struct needs *needs)
{
    for (int64_t seq = 0; seq < step->B; seq++) {
        const struct growth grown = growth_of(kv, step, seq);
        const uint32_t id = grown.slot ? table_of(step, tables, seq)[grown.first - 1] : KV_NONE;
        if (kv_refs(kv, id) > 0)
            kv->block[id].prev = 0;
    }
    for (int64_t seq = 0; seq < step->B; seq++) {
        const struct growth grown = growth_of(kv, step, seq);
        needs->fresh += (uint64_t)(grown.last - grown.first);
        if (grown.slot == 0)
            continue;
        const uint32_t id = table_of(step, tables, seq)[grown.first - 1],
                       refs = kv_refs(kv, id);
        if (refs == 0 || kv->block[id].prev == refs)
            return fail_at(fn, kv, seq, grown.first - 1, id);
        needs->copies += kv_is_frozen(kv, id) || refs - kv->block[id].prev > 1;
        kv->block[id].prev++;
    }
    return TL_OK;
}

/* Both stop at the largest number there is. */
static tl_kv_needs told(struct needs needs)
{
    return (tl_kv_needs){(uint32_t)(needs.fresh < UINT32_MAX ? needs.fresh : UINT32_MAX),
                         (uint32_t)(needs.copies < UINT32_MAX ? needs.copies : UINT32_MAX)};
}

static tl_status fail_full(const char *fn, const tl_kv_pool *kv, struct needs needs)
{
    const uint64_t wanted = needs.fresh + needs.copies, available = kv_available(kv);
    return tl_fail(TL_EFULL, fn,
                   "%" PRIu64 " new blocks and %" PRIu64 " copies wanted, %u free and %u cached of "
                   "%u: %" PRIu64 " are missing",
                   needs.fresh, needs.copies, kv_available(kv) - kv->n_cached, kv->n_cached,
                   kv->cfg.n_blocks, wanted - available);
}

/* ---- taking ---- */

static void own_tail(tl_kv_pool *kv, uint32_t *tail, uint32_t fill)
{
    if (kv_writable(kv, *tail))
        return;
    *tail = tl_kv_replace(kv, *tail);
    kv->block[*tail].fill = fill;
}

/* Cannot fail: a block that is given up on the way is one more to take, never one less. */
static void take(tl_kv_pool *kv, const struct kv_step *step, uint32_t *tables)
{
    for (int64_t seq = 0; seq < step->B; seq++) {
        const struct growth grown = growth_of(kv, step, seq);
        uint32_t *table = table_of(step, tables, seq);
        if (grown.slot > 0)
            own_tail(kv, &table[grown.first - 1], grown.slot);
        for (int64_t i = grown.first; i < grown.last; i++)
            table[i] = tl_kv_take(kv);
    }
}

tl_status tl_kv_reserve(tl_kv_pool *kv, uint32_t *block_tables, int64_t table_stride,
                        const int32_t *cu_seqlens, const int32_t *ctx_lens, int64_t B, int dry,
                        tl_kv_needs *needs)
{
    static const char fn[] = "tl_kv_reserve";
    const struct kv_step step = {block_tables, table_stride, cu_seqlens, ctx_lens, B};
    struct needs counted = {0, 0};
    TL_TRY(tl_kv_step_check_pointers(fn, kv, &step));
    if (dry && !needs)
        return tl_fail(TL_EINVAL, fn, "needs is NULL with dry");
    TL_TRY(tl_kv_step_check_arrays(fn, &step));
    TL_TRY(tl_kv_step_check_cu_seqlens(fn, &step));
    if (kv_first_token(&step, B) > 0) {
        TL_TRY(tl_kv_step_check_lengths(fn, kv, &step));
        TL_TRY(count(fn, kv, &step, block_tables, &counted));
    }
    if (needs)
        *needs = told(counted);
    if (counted.fresh + counted.copies > kv_available(kv))
        return fail_full(fn, kv, counted);
    if (!dry && counted.fresh + counted.copies > 0)
        take(kv, &step, block_tables);
    return TL_OK;
}
