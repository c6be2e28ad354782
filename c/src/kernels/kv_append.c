/* SPDX-License-Identifier: MIT */
/* kv_append.c: new K and V of some sequences put into the blocks that their tables name.
 *
 * Words. run: the tokens of one sequence, which are positions of it that follow each other. entry:
 * an index into a block table. written entries: those that positions of a run fall into; no other
 * is looked at. */
#include <inttypes.h>
#include <stdatomic.h>
#include <stdio.h>

#include "kernels/attn_plan.h"
#include "kernels/kv_positions.h"
#include "kernels/kv_store.h"
#include "kernels/shapes.h"
#include "runtime/fail.h"
#include "runtime/fpenv.h"
#include "runtime/pool_run.h"

struct run {
    const uint32_t *table;
    int64_t pos, token, n; /* its first position; its first token, of all the batch's */
};

struct append {
    const char *fn; /* the public function, for messages */
    tl_kv_pool *kv;
    uint32_t layer;
    struct kv_store store;
    struct kv_tensor k, v;
    tl_pool *tp;
    int64_t total; /* tokens */

    /* The batch, or the one run there is. */
    int64_t B;
    const uint32_t *block_tables;
    int64_t table_stride;
    const int32_t *cu_seqlens, *ctx_lens;
    const struct run *only;

    _Atomic uint64_t unrepresentable; /* values found while writing */
};

static int64_t first_token(const struct append *a, int64_t seq)
{
    return a->cu_seqlens ? a->cu_seqlens[seq] : seq;
}

static struct run run_of(const struct append *a, int64_t seq)
{
    if (a->only)
        return *a->only;
    const int64_t token = first_token(a, seq), n = first_token(a, seq + 1) - token;
    return (struct run){a->block_tables + seq * a->table_stride, a->ctx_lens[seq] - n, token, n};
}

/* ---- the batch ---- */

static tl_status check_arrays(const struct append *a)
{
    const struct span span[] = {
        tl_span("ctx_lens", a->ctx_lens, sizeof *a->ctx_lens, a->B),
        tl_span("cu_seqlens", a->cu_seqlens, sizeof *a->cu_seqlens, a->B + 1),
        tl_span("block_tables", a->block_tables, sizeof *a->block_tables,
                a->B * a->table_stride)};
    return tl_check_addresses(a->fn, span, 3);
}

static tl_status check_batch(const struct append *a)
{
    if (!a->kv)
        return tl_fail(TL_EINVAL, a->fn, "the pool is NULL");
    if (a->B < 0)
        return tl_fail_i64(TL_EINVAL, a->fn, "B = %lld is negative", a->B);
    if (a->B > 0 && (!a->block_tables || !a->ctx_lens))
        return tl_fail(TL_EINVAL, a->fn, "%s is NULL with B = %" PRId64,
                       !a->block_tables ? "block_tables" : "ctx_lens", a->B);
    if (a->layer >= a->kv->cfg.n_layers)
        return tl_fail(TL_EINVAL, a->fn, "layer %u is out of range: the pool has %u", a->layer,
                       a->kv->cfg.n_layers);
    if (a->table_stride < 1)
        return tl_fail_i64(TL_EINVAL, a->fn, "table_stride = %lld is below 1", a->table_stride);
    if (!tl_fits_memory(sizeof(uint32_t), 2, (int64_t[]){a->B, a->table_stride}))
        return tl_fail_i64(TL_EINVAL, a->fn, "B = %lld tables of %lld do not fit in memory", a->B,
                           a->table_stride);
    TL_TRY(check_arrays(a));
    if (!kv_is_source(a->store.from))
        return tl_fail(TL_EUNSUPPORTED, a->fn, "dtype = %d is none of TL_F32, TL_F16, TL_BF16",
                       a->store.from);
    return TL_OK;
}

static tl_status check_cu_seqlens(const struct append *a)
{
    const int32_t *cu = a->cu_seqlens;
    if (cu && cu[0] != 0)
        return tl_fail_i64(TL_EINVAL, a->fn, "cu_seqlens[0] = %lld is not 0", cu[0]);
    for (int64_t seq = 0; cu && seq < a->B; seq++)
        if (cu[seq + 1] < cu[seq])
            return tl_fail_i64(TL_EINVAL, a->fn, "cu_seqlens[%lld] = %lld decreases from %lld",
                               seq + 1, cu[seq + 1], cu[seq]);
    return TL_OK;
}

static tl_status check_sequences(const struct append *a)
{
    const int64_t b = a->kv->cfg.block_tokens;
    for (int64_t seq = 0; !a->only && seq < a->B; seq++) {
        const int64_t n = first_token(a, seq + 1) - first_token(a, seq), end = a->ctx_lens[seq];
        if (end < n)
            return tl_fail_i64(TL_EINVAL, a->fn,
                               "sequence %lld: ctx_len = %lld is below its %lld tokens", seq, end,
                               n);
        if (n > 0 && (end - 1) / b >= a->table_stride)
            return tl_fail_i64(TL_EINVAL, a->fn,
                               "sequence %lld: ctx_len = %lld needs %lld blocks of %lld, "
                               "table_stride = %lld",
                               seq, end, (end - 1) / b + 1, b, a->table_stride);
    }
    return TL_OK;
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
        const struct run run = run_of(a, seq);
        if (run.n == 0)
            continue;
        const struct kv_entries written = kv_entries_of(kv, run.pos, run.n);
        for (int64_t entry = written.last; entry >= written.first; entry--) {
            const uint32_t id = run.table[entry];
            const struct place here = {seq, entry, ++found.n};
            if (id >= kv->cfg.n_blocks || kv_refs(kv, id) == 0) {
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
        const struct run run = run_of(a, seq);
        if (run.n == 0)
            continue;
        const struct kv_entries written = kv_entries_of(a->kv, run.pos, run.n);
        for (int64_t entry = written.first;
             entry <= written.last && ordinal > found->bad.ordinal; entry++, ordinal--)
            if (a->kv->block[run.table[entry]].prev != (uint32_t)ordinal)
                return (struct place){seq, entry, ordinal};
    }
    return (struct place){.ordinal = 0};
}

/* The first written entry that names a block. */
static struct place find_block(const struct append *a, uint32_t id)
{
    for (int64_t seq = 0;; seq++) {
        const struct run run = run_of(a, seq);
        if (run.n == 0)
            continue;
        const struct kv_entries written = kv_entries_of(a->kv, run.pos, run.n);
        for (int64_t entry = written.first; entry <= written.last; entry++)
            if (run.table[entry] == id)
                return (struct place){.seq = seq, .entry = entry};
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
    const uint32_t id = run_of(a, at.seq).table[at.entry];
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
    if (block->hash != 0)
        return tl_fail(TL_EBUSY, a->fn, "%s = %u is registered", name, id);
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

/* Some positions of one block, n from `slot` on, and the first token for them. */
struct piece {
    uint32_t id;
    int64_t slot, n, token;
};

/* One head of a piece into its strip. Returns how many values were lost. */
static int64_t write_head(const struct append *a, const struct kv_tensor *from, int64_t head,
                          const struct piece *piece, unsigned char *strip)
{
    const struct kv_sizes *size = &a->kv->size;
    const int64_t D = a->kv->cfg.head_dim, token_bytes = from->token_stride * from->elem;
    const char *x = (const char *)from->x + head * from->head_stride * from->elem +
                    piece->token * token_bytes;
    unsigned char *y = strip + (size_t)piece->slot * size->row;
    float *scale = kv_strip_scales(a->kv, strip) + piece->slot;
    int64_t lost = 0;
    if (size->scale)
        for (int64_t i = 0; i < piece->n; i++, x += token_bytes, y += size->row) {
            tl_kv_store_scaled(&a->store, x, y, &scale[i], D);
            if (scale[i] != scale[i])
                lost += tl_kv_unrepresentable(&a->store, x, D);
        }
    else {
        const bool is_gapless = from->token_stride == D;
        const int64_t rows = is_gapless ? 1 : piece->n, width = is_gapless ? piece->n * D : D;
        for (int64_t i = 0; i < rows; i++, x += token_bytes, y += size->row) {
            tl_kv_store(&a->store, x, y, width);
            lost += tl_kv_unrepresentable(&a->store, x, width);
        }
    }
    return lost;
}

/* One tensor of a run, in the order in which the source lies in memory: one head's tokens after
 * another's, or one token's heads. */
static int64_t write_tensor(const struct append *a, const struct kv_tensor *from, bool is_v,
                            const struct run *run)
{
    const tl_kv_pool *kv = a->kv;
    const int64_t b = kv->cfg.block_tokens, heads = kv->cfg.n_kv_heads;
    const bool by_token = run->n == 1 || from->head_stride < from->token_stride;
    const struct kv_entries written = kv_entries_of(kv, run->pos, run->n);
    int64_t lost = 0;
    for (int64_t head = 0; head < heads; head += by_token ? heads : 1) {
        struct piece piece = {.slot = written.slot};
        for (int64_t entry = written.first, t = 0; t < run->n; t += piece.n, entry++) {
            piece.id = run->table[entry];
            piece.slot = t == 0 ? written.slot : 0;
            piece.n = b - piece.slot < run->n - t ? b - piece.slot : run->n - t;
            piece.token = run->token + t;
            unsigned char *slab = kv_slab(kv, piece.id, a->layer, is_v);
            if (!by_token) {
                lost += write_head(a, from, head, &piece, slab + (size_t)head * kv->size.strip);
                continue;
            }
            const struct piece all = piece;
            for (int64_t i = 0; i < all.n; i++)
                for (int64_t h = 0; h < heads; h++) {
                    const struct piece one = {all.id, all.slot + i, 1, all.token + i};
                    lost += write_head(a, from, h, &one, slab + (size_t)h * kv->size.strip);
                }
        }
    }
    return lost;
}

/* The sequence that a token belongs to. */
static int64_t sequence_of(const struct append *a, int64_t token)
{
    int64_t lo = 0, hi = a->B;
    if (a->only || !a->cu_seqlens)
        return a->only ? 0 : token;
    while (hi - lo > 1) {
        const int64_t mid = lo + (hi - lo) / 2;
        *(a->cu_seqlens[mid] <= token ? &lo : &hi) = mid;
    }
    return lo;
}

static void write_tokens(void *ctx, int64_t lo, int64_t hi, int worker)
{
    struct append *a = ctx;
    int64_t lost = 0;
    (void)worker;
    for (int64_t seq = sequence_of(a, lo); lo < hi; seq++) {
        struct run run = run_of(a, seq);
        const int64_t skipped = lo - run.token;
        run.pos += skipped;
        run.token = lo;
        run.n = run.n - skipped < hi - lo ? run.n - skipped : hi - lo;
        if (run.n == 0)
            continue;
        lost += write_tensor(a, &a->k, false, &run);
        lost += write_tensor(a, &a->v, true, &run);
        lo += run.n;
    }
    if (lost)
        a->unrepresentable += (uint64_t)lost;
}

/* An element costs about as much as reading and writing it; what is worth waking workers for is
 * shared out. */
static int64_t grain_of(const struct append *a)
{
    const tl_kv_cfg *cfg = &a->kv->cfg;
    const int64_t threads = tl_pool_threads(a->tp);
    const double elements = 2.0 * (double)a->total * cfg->n_kv_heads * cfg->head_dim;
    if (threads == 1 || !tl_worth_waking(elements / 4))
        return a->total;
    return a->total / (4 * threads) + 1;
}

/* Everything from the tensors on; total > 0. */
static tl_status append(struct append *a)
{
    TL_TRY(tl_kv_check_tensor(a->fn, a->kv, &a->k));
    TL_TRY(tl_kv_check_tensor(a->fn, a->kv, &a->v));
    TL_TRY(tl_kernels_require(a->fn, &a->store.kernels));
    TL_TRY(check_sequences(a));
    TL_TRY(check_entries(a));
    TL_TRY(tl_pool_check(a->fn, a->tp));
    const tl_fpenv caller = tl_fpenv_enter();
    const tl_status status = tl_pool_run(a->fn, a->tp, a->total, grain_of(a), write_tokens, a);
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
    struct append a = {.fn = "tl_kv_append", .kv = kv, .layer = layer, .tp = tp, .B = B,
                       .block_tables = block_tables, .table_stride = table_stride,
                       .cu_seqlens = cu_seqlens, .ctx_lens = ctx_lens, .store.from = dtype};
    TL_TRY(check_batch(&a));
    TL_TRY(check_cu_seqlens(&a));
    a.total = first_token(&a, B);
    if (a.total == 0)
        return TL_OK;
    if (!k || !v)
        return tl_fail(TL_EINVAL, a.fn, "%s is NULL with %" PRId64 " tokens", !k ? "k" : "v",
                       a.total);
    const int64_t elem = kv_elem_bytes(dtype);
    a.store.to = kv->cfg.dtype;
    a.k = (struct kv_tensor){"k", k, elem, a.total, k_head_stride, k_token_stride};
    a.v = (struct kv_tensor){"v", v, elem, a.total, v_head_stride, v_token_stride};
    return append(&a);
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
    const struct run run = {block_table, pos, 0, T};
    struct append a = {.fn = p.fn, .kv = kv, .layer = layer, .B = 1, .total = T, .only = &run,
                       .store = {.from = TL_F32, .to = kv->cfg.dtype},
                       .k = {"k", k, sizeof *k, T, head_stride, token_stride},
                       .v = {"v", v, sizeof *v, T, head_stride, token_stride}};
    return append(&a);
}
