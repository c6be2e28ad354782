/* SPDX-License-Identifier: MIT */
/* kv_check.h: what the tests of the block pool share: a snapshot that shows whether a refused call
 * left everything as it was, an audit of the pool's structures against each other, and a hook that
 * counts, fails on demand and pretends to have endless memory. */
#ifndef TL_KV_CHECK_H
#define TL_KV_CHECK_H

#include "check.h"
#include "runtime/kv_inner.h"

static inline tl_kv_cfg kv_cfg(uint32_t n_blocks, uint32_t block_tokens, uint32_t n_layers,
                               uint32_t n_kv_heads, uint32_t head_dim)
{
    return (tl_kv_cfg){n_blocks, block_tokens, n_layers,       n_kv_heads,
                       head_dim, TL_F16,       TL_KV_FORMAT_V1};
}

static inline tl_kv_pool *kv_new(uint32_t n_blocks, uint32_t block_tokens, uint32_t n_layers,
                                 uint32_t n_kv_heads, uint32_t head_dim)
{
    const tl_kv_cfg cfg = kv_cfg(n_blocks, block_tokens, n_layers, n_kv_heads, head_dim);
    tl_kv_pool *kv = NULL;
    CHECK_STATUS(tl_kv_pool_create(&cfg, &kv), TL_OK);
    return kv;
}

/* One used block. */
static inline uint32_t kv_one(tl_kv_pool *kv)
{
    uint32_t id = KV_NONE;
    CHECK_STATUS(tl_kv_alloc(kv, 1, &id), TL_OK);
    return id;
}

/* One used, full block under a hash. */
static inline uint32_t kv_named(tl_kv_pool *kv, uint64_t hash)
{
    const uint32_t id = kv_one(kv);
    CHECK_STATUS(tl_kv_set_fill(kv, id, kv->cfg.block_tokens), TL_OK);
    CHECK_STATUS(tl_kv_register(kv, id, hash), TL_OK);
    return id;
}

/* All of a block's memory: K and V of every layer. */
static inline unsigned char *kv_bytes(const tl_kv_pool *kv, uint32_t id)
{
    return tl_kv_block_ptr(kv, id, 0, 0);
}

/* Gives the whole pool a content that differs from place to place. */
static inline void kv_paint(tl_kv_pool *kv, uint64_t seed)
{
    const size_t n = tl_kv_block_bytes(kv) * kv->cfg.n_blocks;
    unsigned char *p = kv_bytes(kv, 0);
    for (size_t i = 0; i < n; i++)
        p[i] = (unsigned char)(rng_next(&seed) >> 33);
}

static inline tl_kv_stats kv_stats(const tl_kv_pool *kv)
{
    tl_kv_stats stats = {7, 7, 7, 7, 7};
    tl_kv_stats_get(kv, &stats);
    return stats;
}

#define CHECK_STATS(kv, want_free, want_used, want_cached, want_evictions)                       \
    do {                                                                                         \
        const tl_kv_stats stats_ = kv_stats(kv);                                                 \
        CHECK(stats_.free == (want_free) && stats_.used == (want_used) &&                        \
                  stats_.cached == (want_cached) && stats_.evictions == (want_evictions),        \
              "free %u used %u cached %u evictions %u", stats_.free, stats_.used, stats_.cached, \
              stats_.evictions);                                                                 \
    } while (0)

/* ---- snapshot ---- */

struct kv_snap {
    tl_kv_stats stats;
    size_t n_bytes;
    uint32_t n_blocks, n_order;
    uint64_t *hash;
    uint32_t *refs, *fill, *order; /* order: cached blocks, oldest first */
    unsigned char *bytes;
};

static inline struct kv_snap kv_snap(const tl_kv_pool *kv)
{
    const uint32_t n = kv->cfg.n_blocks;
    struct kv_snap s = {.stats = kv_stats(kv), .n_blocks = n, .n_bytes = tl_kv_block_bytes(kv) * n};
    s.hash = calloc(n, sizeof *s.hash);
    s.refs = calloc(n, sizeof *s.refs);
    s.fill = calloc(n, sizeof *s.fill);
    s.order = calloc(n, sizeof *s.order);
    s.bytes = malloc(s.n_bytes);
    for (uint32_t id = 0; id < n; id++) {
        s.refs[id] = tl_kv_refs(kv, id);
        s.fill[id] = tl_kv_fill(kv, id);
        s.hash[id] = id >= kv->n_touched   ? 0
                     : kv_in_prefix(kv, id) ? TL_KV_HASH_PREFIX
                                            : kv->block[id].hash;
    }
    for (uint32_t id = kv->oldest; id != KV_NONE; id = kv->block[id].next)
        s.order[s.n_order++] = id;
    memcpy(s.bytes, kv_bytes(kv, 0), s.n_bytes);
    return s;
}

static inline void kv_snap_free(struct kv_snap *s)
{
    free(s->hash), free(s->refs), free(s->fill), free(s->order), free(s->bytes);
}

/* What differs, or NULL. */
static inline const char *kv_snap_diff(const struct kv_snap *a, const struct kv_snap *b)
{
    const size_t n = a->n_blocks;
    return memcmp(&a->stats, &b->stats, sizeof a->stats) != 0   ? "stats"
           : memcmp(a->refs, b->refs, n * sizeof *a->refs) != 0 ? "refs"
           : memcmp(a->fill, b->fill, n * sizeof *a->fill) != 0 ? "fill"
           : memcmp(a->hash, b->hash, n * sizeof *a->hash) != 0 ? "hash"
           : a->n_order != b->n_order || memcmp(a->order, b->order, n * sizeof *a->order) != 0
               ? "order of use"
           : memcmp(a->bytes, b->bytes, a->n_bytes) != 0 ? "bytes"
                                                         : NULL;
}

/* `statement` changes nothing in the pool, and sets the slot to a line that starts with the
 * function's name and holds `words`.
 * It may use longjmp-free statements only, so that the snapshots are given back. */
#define CHECK_REFUSED(kv, statement, fn, words)                                        \
    do {                                                                               \
        struct kv_snap before_ = kv_snap(kv);                                          \
        tl_set_last_error(NULL);                                                       \
        statement;                                                                     \
        const char *said_ = tl_last_error();                                           \
        const int named_ =                                                             \
            strncmp(said_, fn ": ", sizeof(fn ": ") - 1) == 0 && strstr(said_, words); \
        CHECK(named_, "the slot says \"%s\", not \"" fn ": ...%s...\"", said_, words); \
        struct kv_snap after_ = kv_snap(kv);                                           \
        const char *diff_ = kv_snap_diff(&before_, &after_);                           \
        kv_snap_free(&before_), kv_snap_free(&after_);                                 \
        CHECK(!diff_, #statement " changed the %s", diff_);                            \
    } while (0)

/* ---- audit ---- */

/* The structures agree with each other: every block in exactly one state, lists whole in both
 * directions, and every registered block, and no other, in the one bucket a lookup of its hash
 * walks. Blocks of a prefix index that are kept without references are used. */
static inline void kv_audit(const tl_kv_pool *kv)
{
    uint32_t n_free = kv->cfg.n_blocks - kv->n_touched, n_cached = 0, n_used = 0, n_named = 0,
             n_indexed = 0, n_idle = 0;
    for (uint32_t id = kv->free_head; id != KV_NONE; id = kv->block[id].next, n_free++)
        CHECK(kv->block[id].refs == 0 && !kv_is_frozen(kv, id) && n_free < kv->cfg.n_blocks,
              "free block %u", id);
    for (uint32_t id = kv->oldest, prev = KV_NONE; id != KV_NONE;
         prev = id, id = kv->block[id].next, n_cached++)
        CHECK(kv->block[id].refs == 0 && kv_is_frozen(kv, id) && kv->block[id].prev == prev &&
                  (kv->block[id].next != KV_NONE || kv->newest == id) &&
                  n_cached < kv->cfg.n_blocks,
              "cached block %u", id);
    for (uint32_t id = 0; id < kv->n_touched; id++) {
        n_used += kv->block[id].refs > 0;
        n_named += kv->block[id].hash != 0;
        n_idle += kv->block[id].refs == 0 && kv_is_frozen(kv, id);
        for (uint32_t at = kv->block[id].bucket; at != KV_NONE;
             at = kv->block[at].chain, n_indexed++)
            CHECK(kv->block[at].hash != 0 && n_indexed < kv->cfg.n_blocks, "block %u in bucket %u",
                  at, id);
    }
    CHECK(n_idle >= n_cached, "%u cached blocks of %u", n_cached, n_idle);
    n_used += n_idle - n_cached;
    const tl_kv_stats s = kv_stats(kv);
    CHECK(s.free == n_free && s.cached == n_cached && s.used == n_used, "counted %u %u %u", n_free,
          n_used, n_cached);
    CHECK(n_free + n_used + n_cached == kv->cfg.n_blocks, "a block is lost or in two states");
    CHECK(n_named == n_indexed, "%u blocks have a hash, %u are in the index", n_named, n_indexed);
}

/* ---- hook ---- */

/* Counts; fails call number fail_at (from 0, -1: none); with `endless`, a request above 1 GiB gets
 * memory of 4 KiB. */
struct kv_hook {
    int calls, live, fail_at, endless;
    size_t bytes, last, last_align;
};

static inline void *kv_hook_alloc(void *user, size_t n, size_t align)
{
    struct kv_hook *hook = user;
    void *p = NULL;
    if (hook->calls++ == hook->fail_at)
        return NULL;
    hook->bytes += n;
    hook->last = n, hook->last_align = align;
    if (posix_memalign(&p, align < sizeof(void *) ? sizeof(void *) : align,
                       hook->endless && n > 1u << 30 ? 4096 : n))
        return NULL;
    hook->live++;
    return p;
}

static inline void kv_hook_free(void *user, void *p)
{
    ((struct kv_hook *)user)->live--;
    free(p);
}

static inline void kv_hook_install(struct kv_hook *hook)
{
    const tl_allocator a = {kv_hook_alloc, kv_hook_free, hook};
    CHECK_STATUS(tl_set_allocator(&a), TL_OK);
}

#endif
