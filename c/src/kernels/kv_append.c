/* SPDX-License-Identifier: MIT */
/* kv_append.c: new K and V of some sequences put into the blocks that their tables name.
 *
 * Words. run: the tokens of one sequence, which are positions of it that follow each other. written
 * entries: those of a block table that positions of a run fall into; no other is looked at. */
#include <inttypes.h>
#include <stdio.h>

#include "kernels/attn_plan.h"
#include "kernels/kv_positions.h"
#include "kernels/kv_step.h"
#include "kernels/kv_store.h"
#include "kernels/shapes.h"
#include "runtime/fail.h"
#include "runtime/fpenv.h"
#include "runtime/pool_run.h"

struct run {
    const uint32_t *table, *entry; /* entry: where the first of its tokens goes */
    int64_t slot, token, n;        /* that one's slot, and its number in the batch */
};

struct append {
    const char *fn; /* the public function, for messages */
    tl_kv_pool *kv;
    uint32_t layer;
    struct kv_store store;
    struct kv_tensor k, v;
    int64_t total, B; /* tokens, and sequences */
    const struct kv_step *batch;
    const struct run *only;           /* the one run there is, instead of a batch */
    _Atomic uint64_t unrepresentable; /* values found while writing */
};

static struct run run_at(const tl_kv_pool *kv, const uint32_t *table, int64_t pos, int64_t token,
                         int64_t n)
{
    const int64_t b = kv->cfg.block_tokens, entry = pos / b;
    return (struct run){table, table + entry, pos - entry * b, token, n};
}

/* In place, or in `room`. */
static const struct run *run_of(const struct append *a, int64_t seq, struct run *room)
{
    if (a->only)
        return a->only;
    const struct kv_step *batch = a->batch;
    const int64_t token = kv_first_token(batch, seq), n = kv_first_token(batch, seq + 1) - token;
    *room = run_at(a->kv, batch->block_tables + seq * batch->table_stride,
                   batch->ctx_lens[seq] - n, token, n);
    return room;
}

/* How many entries a run writes to. */
static int64_t n_entries(const struct append *a, const struct run *run)
{
    const int64_t b = a->kv->cfg.block_tokens;
    return run->n == 0               ? 0
           : run->n <= b - run->slot ? 1
                                     : (run->slot + run->n - 1) / b + 1;
}

/* ---- the batch ---- */

static tl_status check_batch(const struct append *a)
{
    TL_TRY(tl_kv_step_check_pointers(a->fn, a->kv, a->batch));
    if (a->layer >= a->kv->cfg.n_layers)
        return tl_fail(TL_EINVAL, a->fn, "layer %u is out of range: the pool has %u", a->layer,
                       a->kv->cfg.n_layers);
    TL_TRY(tl_kv_step_check_arrays(a->fn, a->batch));
    if (!kv_is_source(a->store.from))
        return tl_fail(TL_EUNSUPPORTED, a->fn, "dtype = %d is none of TL_F32, TL_F16, TL_BF16",
                       a->store.from);
    return tl_kv_step_check_cu_seqlens(a->fn, a->batch);
}

/* ---- written entries ---- */

struct place {
    int64_t seq, entry;
    uint64_t ordinal; /* of the written entries, counted from the last one; 0: none */
};

/* What a look at all written entries found: how many there are, the first that names no used block,
 * and the first whose block must not be written. */
struct findings {
    uint64_t n;
    struct place bad, busy;
};

/* Looks at the written entries from the last to the first, and leaves in each used block a note of
 * the first one that names it: its ordinal in `prev`, which is free for notes. */
static struct findings note_entries(struct append *a)
{
    tl_kv_pool *kv = a->kv;
    struct findings found = {.n = 0};
    for (int64_t seq = a->B - 1; seq >= 0; seq--) {
        struct run room;
        const struct run *run = run_of(a, seq, &room);
        for (int64_t i = n_entries(a, run) - 1; i >= 0; i--) {
            const uint32_t id = run->entry[i];
            const struct place here = {seq, run->entry - run->table + i, ++found.n};
            if (kv_refs(kv, id) == 0) {
                found.bad = here;
                continue;
            }
            if (!kv_writable(kv, id))
                found.busy = here;
            kv->block[id].prev = (uint32_t)found.n;
        }
    }
    return found;
}

/* The first entry in front of the first bad one whose block has the note of another; ordinal 0:
 * there is none. Ordinals may wrap: of 2^32 entries that follow each other two name one block. */
static struct place find_twin(const struct append *a, const struct findings *found)
{
    uint64_t ordinal = found->n;
    for (int64_t seq = 0; ordinal > found->bad.ordinal; seq++) {
        struct run room;
        const struct run *run = run_of(a, seq, &room);
        const int64_t n = n_entries(a, run);
        for (int64_t i = 0; i < n && ordinal > found->bad.ordinal; i++, ordinal--)
            if (a->kv->block[run->entry[i]].prev != (uint32_t)ordinal)
                return (struct place){seq, run->entry - run->table + i, ordinal};
    }
    return (struct place){.ordinal = 0};
}

/* The first written entry that names a block. */
static struct place find_block(const struct append *a, uint32_t id)
{
    for (int64_t seq = 0;; seq++) {
        struct run room;
        const struct run *run = run_of(a, seq, &room);
        const int64_t n = n_entries(a, run);
        for (int64_t i = 0; i < n; i++)
            if (run->entry[i] == id)
                return (struct place){.seq = seq, .entry = run->entry - run->table + i};
    }
}

enum { PLACE_NAME = 64 };

static const char *name_place(const struct append *a, struct place at, char name[PLACE_NAME])
{
    if (a->only)
        snprintf(name, PLACE_NAME, "block_table[%" PRId64 "]", at.entry);
    else
        snprintf(name, PLACE_NAME, "sequence %" PRId64 ": block_table[%" PRId64 "]", at.seq,
                 at.entry);
    return name;
}

static tl_status fail_at(const struct append *a, const struct findings *found, struct place twin)
{
    char name[PLACE_NAME], other[PLACE_NAME];
    const struct place at = twin.ordinal        ? twin
                            : found->bad.ordinal ? found->bad
                                                 : found->busy;
    struct run room;
    const uint32_t id = run_of(a, at.seq, &room)->table[at.entry];
    name_place(a, at, name);
    if (twin.ordinal)
        return tl_fail(TL_EINVAL, a->fn, "%s and %s are both block %u",
                       name_place(a, find_block(a, id), other), name, id);
    if (id >= a->kv->cfg.n_blocks)
        return tl_fail(TL_EINVAL, a->fn, "%s = %u is out of range: the pool has %u", name, id,
                       a->kv->cfg.n_blocks);
    const struct kv_block *block = &a->kv->block[id];
    if (kv_refs(a->kv, id) == 0)
        return tl_fail(TL_EINVAL, a->fn, "%s = %u is not used", name, id);
    if (kv_is_frozen(a->kv, id))
        return tl_fail(TL_EBUSY, a->fn, "%s = %u is %s", name, id,
                       kv_in_prefix(a->kv, id) ? "in the prefix index" : "registered");
    return tl_fail(TL_EBUSY, a->fn, "%s = %u has %u references", name, id, block->refs);
}

/* Whether every written entry names a block of the writer's own, and none another's. What is no
 * used block, or stands there twice, decides before what is shared. */
static tl_status check_entries(struct append *a)
{
    const struct findings found = note_entries(a);
    const struct place twin = find_twin(a, &found);
    return twin.ordinal || found.bad.ordinal || found.busy.ordinal ? fail_at(a, &found, twin)
                                                                   : TL_OK;
}

/* ---- writing ---- */

static const char *row_of(const struct kv_tensor *from, int64_t head, int64_t token)
{
    return (const char *)from->x +
           (head * from->head_stride + token * from->token_stride) * from->elem;
}

/* Of one tensor n tokens of one head, into slots of one block from `slot` on; n > 0. */
static void write_head(const struct append *a, const struct kv_tensor *from, int64_t head,
                       int64_t token, int64_t n, char *slab, int64_t slot, bool *lost)
{
    const struct kv_sizes *size = &a->kv->size;
    char *strip = slab + (size_t)head * size->strip;
    const struct kv_rows rows = {.x = row_of(from, head, token),
                                 .y = strip + (size_t)slot * size->row,
                                 .scale = size->scale ? kv_strip_scales(a->kv, strip) + slot : NULL,
                                 .n = n,
                                 .dim = a->kv->cfg.head_dim,
                                 .x_step = from->token_stride * from->elem,
                                 .y_step = (int64_t)size->row,
                                 .scale_step = 1};
    tl_kv_store_rows(&a->store, &rows, lost);
}

/* The same of all heads, one token after another. */
static void write_heads(const struct append *a, const struct kv_tensor *from, int64_t token,
                        int64_t n, char *slab, int64_t slot, bool *lost)
{
    const struct kv_sizes *size = &a->kv->size;
    const int64_t heads = a->kv->cfg.n_kv_heads;
    struct kv_rows rows = {.x = row_of(from, 0, token),
                           .y = slab + (size_t)slot * size->row,
                           .scale = size->scale ? kv_strip_scales(a->kv, slab) + slot : NULL,
                           .n = heads,
                           .dim = a->kv->cfg.head_dim,
                           /* the stride of one head may be anything */
                           .x_step = heads > 1 ? from->head_stride * from->elem : 0,
                           .y_step = (int64_t)size->strip,
                           .scale_step = (int64_t)(size->strip / sizeof(float))};
    for (;;) {
        tl_kv_store_rows(&a->store, &rows, lost);
        if (--n == 0)
            return;
        rows.x += from->token_stride * from->elem;
        rows.y += size->row;
        rows.scale += size->scale != 0;
    }
}

/* A run, one tensor, in the order in which the source lies in memory: one head's tokens after
 * another's, or one token's heads. */
static void write_tensor(const struct append *a, const struct kv_tensor *from, bool is_v,
                         const struct run *run, bool *lost)
{
    const tl_kv_pool *kv = a->kv;
    const int64_t b = kv->cfg.block_tokens, heads = kv->cfg.n_kv_heads;
    const bool by_token = run->n == 1 || from->head_stride < from->token_stride;
    for (int64_t head = 0; head < heads; head += by_token ? heads : 1) {
        const uint32_t *entry = run->entry;
        int64_t slot = run->slot;
        for (int64_t t = 0, n; t < run->n; t += n, entry++, slot = 0) {
            char *slab = kv_slab(kv, *entry, a->layer, is_v);
            n = b - slot < run->n - t ? b - slot : run->n - t;
            if (!by_token)
                write_head(a, from, head, run->token + t, n, slab, slot, lost);
            else
                write_heads(a, from, run->token + t, n, slab, slot, lost);
        }
    }
}

/* The sequence that a token belongs to. */
static int64_t sequence_of(const struct append *a, int64_t token)
{
    int64_t lo = 0, hi = a->B;
    if (a->only || !a->batch->cu_seqlens)
        return a->only ? 0 : token;
    while (hi - lo > 1) {
        const int64_t mid = lo + (hi - lo) / 2;
        *(a->batch->cu_seqlens[mid] <= token ? &lo : &hi) = mid;
    }
    return lo;
}

/* What some tokens hold that the format has nothing for. */
static uint64_t count_lost(const struct append *a, int64_t lo, int64_t hi)
{
    int64_t n = 0;
    for (int64_t token = lo; token < hi; token++)
        for (int64_t head = 0; head < a->kv->cfg.n_kv_heads; head++)
            n += tl_kv_unrepresentable(&a->store, row_of(&a->k, head, token), a->kv->cfg.head_dim) +
                 tl_kv_unrepresentable(&a->store, row_of(&a->v, head, token), a->kv->cfg.head_dim);
    return (uint64_t)n;
}

/* The tokens of a run from one of them up to `end`, where it has so many: itself, or in `room`. */
static const struct run *part_of(const struct append *a, const struct run *run, int64_t token,
                                 int64_t end, struct run *room)
{
    const int64_t behind = run->token + run->n;
    if (token == run->token && behind <= end)
        return run;
    *room = run_at(a->kv, run->entry, run->slot + token - run->token, token,
                   (behind < end ? behind : end) - token);
    return room;
}

static void write_tokens(void *ctx, int64_t lo, int64_t hi, int worker)
{
    struct append *a = ctx;
    bool lost = false;
    (void)worker;
    for (int64_t seq = sequence_of(a, lo), token = lo; token < hi; seq++) {
        struct run whole, part;
        const struct run *run = part_of(a, run_of(a, seq, &whole), token, hi, &part);
        write_tensor(a, &a->k, false, run, &lost);
        write_tensor(a, &a->v, true, run, &lost);
        token += run->n;
    }
    if (lost)
        a->unrepresentable += count_lost(a, lo, hi);
}

/* An element costs about as much as reading and writing it; what is worth waking workers for is
 * shared out. */
static int64_t grain_of(const struct append *a, const tl_pool *tp)
{
    const tl_kv_cfg *cfg = &a->kv->cfg;
    const int64_t threads = tl_pool_threads(tp);
    const double elements = 2.0 * (double)a->total * cfg->n_kv_heads * cfg->head_dim;
    if (threads == 1 || !tl_worth_waking(elements / 4))
        return a->total;
    return a->total / (4 * threads) + 1;
}

/* TL_EBUSY before the first range where tp is in use. */
static tl_status write_all(struct append *a, tl_pool *tp)
{
    if (tp)
        return tl_pool_run(a->fn, tp, a->total, grain_of(a, tp), write_tokens, a);
    write_tokens(a, 0, a->total, 0);
    return TL_OK;
}

/* Everything from the tensors on; total > 0. */
static tl_status append(struct append *a, tl_pool *tp)
{
    TL_TRY(tl_kv_check_tensor(a->fn, a->kv, &a->k));
    TL_TRY(tl_kv_check_tensor(a->fn, a->kv, &a->v));
    TL_TRY(tl_kernels_require(a->fn, &a->store.kernels));
    if (a->batch)
        TL_TRY(tl_kv_step_check_lengths(a->fn, a->kv, a->batch));
    TL_TRY(check_entries(a));
    const tl_fpenv caller = tl_fpenv_enter();
    const tl_status status = write_all(a, tp);
    tl_fpenv_leave(caller);
    a->kv->n_unrepresentable += a->unrepresentable;
    return status;
}

tl_status tl_kv_append(tl_kv_pool *kv, uint32_t layer, const uint32_t *block_tables,
                       int64_t table_stride, const int32_t *cu_seqlens, const int32_t *ctx_lens,
                       int64_t B, const void *k, const void *v, int32_t dtype,
                       int64_t k_token_stride, int64_t k_head_stride, int64_t v_token_stride,
                       int64_t v_head_stride, tl_pool *tp)
{
    const struct kv_step batch = {block_tables, table_stride, cu_seqlens, ctx_lens, B};
    struct append a = {.fn = "tl_kv_append", .kv = kv, .layer = layer, .B = B, .batch = &batch,
                       .store.from = dtype};
    TL_TRY(check_batch(&a));
    a.total = kv_first_token(&batch, B);
    if (a.total == 0)
        return TL_OK;
    if (!k || !v)
        return tl_fail(TL_EINVAL, a.fn, "%s is NULL with %" PRId64 " tokens", !k ? "k" : "v",
                       a.total);
    const int64_t elem = kv_elem_bytes(dtype);
    a.store.to = kv->cfg.dtype;
    a.k = (struct kv_tensor){"k", k, elem, a.total, k_head_stride, k_token_stride};
    a.v = (struct kv_tensor){"v", v, elem, a.total, v_head_stride, v_token_stride};
    return append(&a, tp);
}

tl_status tl_kv_append_f32(tl_kv_pool *kv, uint32_t layer, const uint32_t *block_table,
                           int32_t n_table, int64_t pos, int64_t T, const float *k, const float *v,
                           int64_t head_stride, int64_t token_stride)
{
    const struct kv_positions p = {"tl_kv_append_f32", kv, layer, block_table, n_table, pos, T, k,
                                   v, head_stride, token_stride};
    TL_TRY(tl_kv_check_sizes(&p));
    if (T == 0)
        return TL_OK;
    TL_TRY(tl_kv_check_table(&p));
    const struct run run = run_at(kv, block_table, pos, 0, T);
    /* every member by name: otherwise all of it is cleared first, which takes longer than a row */
    struct append a = {.fn = p.fn,
                       .kv = kv,
                       .layer = layer,
                       .store = {.kernels = NULL, .from = TL_F32, .to = kv->cfg.dtype},
                       .k = {"k", k, sizeof *k, T, head_stride, token_stride},
                       .v = {"v", v, sizeof *v, T, head_stride, token_stride},
                       .total = T,
                       .B = 1,
                       .batch = NULL,
                       .only = &run,
                       .unrepresentable = 0};
    return append(&a, NULL);
}
