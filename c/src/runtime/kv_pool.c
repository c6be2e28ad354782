/* SPDX-License-Identifier: MIT */
/* kv_pool.c: the KV block pool: taking, sharing and giving back blocks, and the index of full ones
 * by hash.
 *
 * Words. touched: allocated at least once. index: registered blocks by hash. oldest, newest: the
 * ends of the list of cached blocks in order of last use. kv_inner.h explains the structures;
 * kv_envelope.c holds export and import, prefix.c the index by tokens. */
#include <inttypes.h>
#include <string.h>

#include "runtime/fail.h"
#include "runtime/kv_format.h"
#include "runtime/kv_inner.h"
#include "runtime/prefix_inner.h"

/* bytes from which block memory starts on a boundary of this size: a huge page */
#define LARGE_DATA ((size_t)2 << 20)

_Static_assert(sizeof(struct kv_block) == 32, "a block's record grew");
_Static_assert(sizeof(tl_kv_cfg) == 28 && sizeof(tl_kv_stats) == 24 && sizeof(tl_kv_needs) == 8,
               "layouts are ABI");

/* ---- the index ---- */

static uint32_t bucket_of(const tl_kv_pool *kv, uint64_t hash)
{
    /* Fibonacci hashing: 2^64 over the golden ratio spreads hashes that differ in any few bits over
     * the upper half. */
    const uint32_t mixed = (uint32_t)(((hash ^ hash >> 32) * 0x9E3779B97F4A7C15u) >> 32);
    const uint32_t bucket = mixed & kv->bucket_mask;
    return bucket < kv->n_touched ? bucket : bucket & kv->bucket_mask >> 1;
}

/* Where the id of the block with that hash stands, or the KV_NONE at the end of the chain it would
 * be in. */
static uint32_t *index_link(tl_kv_pool *kv, uint64_t hash)
{
    uint32_t *link = &kv->block[bucket_of(kv, hash)].bucket;
    while (*link != KV_NONE && kv->block[*link].hash != hash)
        link = &kv->block[*link].chain;
    return link;
}

uint32_t tl_kv_index_enter(tl_kv_pool *kv, uint32_t id, uint64_t hash)
{
    uint32_t *link = index_link(kv, hash);
    if (*link != KV_NONE)
        return *link;
    kv->block[id].hash = hash;
    kv->block[id].chain = KV_NONE;
    *link = id;
    return id;
}

static void index_remove(tl_kv_pool *kv, uint32_t id)
{
    uint32_t *link = index_link(kv, kv->block[id].hash);
    *link = kv->block[id].chain;
    kv->block[id].hash = 0;
}

/* Moves the blocks of bucket `from` that belong into the new bucket `to`. */
static void split_bucket(tl_kv_pool *kv, uint32_t from, uint32_t to)
{
    uint32_t *link = &kv->block[from].bucket;
    while (*link != KV_NONE) {
        const uint32_t id = *link;
        struct kv_block *block = &kv->block[id];
        if (bucket_of(kv, block->hash) == to) {
            *link = block->chain;
            block->chain = kv->block[to].bucket;
            kv->block[to].bucket = id;
        } else {
            link = &block->chain;
        }
    }
}

/* ---- blocks changing state ---- */

/* The first untouched block, its record made and the index grown by its bucket. */
static uint32_t touch_next(tl_kv_pool *kv)
{
    const uint32_t id = kv->n_touched++;
    if (id > kv->bucket_mask)
        kv->bucket_mask = kv->bucket_mask * 2 + 1;
    kv->block[id] =
        (struct kv_block){.next = KV_NONE, .prev = KV_NONE, .chain = KV_NONE, .bucket = KV_NONE};
    if (id > 0)
        split_bucket(kv, id & kv->bucket_mask >> 1, id);
    return id;
}

static void cached_append(tl_kv_pool *kv, uint32_t id)
{
    struct kv_block *block = &kv->block[id];
    block->prev = kv->newest;
    block->next = KV_NONE;
    *(kv->newest == KV_NONE ? &kv->oldest : &kv->block[kv->newest].next) = id;
    kv->newest = id;
    kv->n_cached++;
}

static void cached_remove(tl_kv_pool *kv, uint32_t id)
{
    const struct kv_block *block = &kv->block[id];
    *(block->prev == KV_NONE ? &kv->oldest : &kv->block[block->prev].next) = block->next;
    *(block->next == KV_NONE ? &kv->newest : &kv->block[block->next].prev) = block->prev;
    kv->n_cached--;
}

void tl_kv_cache(tl_kv_pool *kv, uint32_t id)
{
    kv->n_used--;
    cached_append(kv, id);
}

void tl_kv_revive(tl_kv_pool *kv, uint32_t id)
{
    cached_remove(kv, id);
    kv->n_used++;
}

static uint32_t evict_oldest(tl_kv_pool *kv)
{
    const uint32_t id = kv->oldest;
    cached_remove(kv, id);
    if (kv_in_prefix(kv, id))
        tl_prefix_evict(kv->prefix, id);
    else
        index_remove(kv, id);
    kv->n_evictions += kv->n_evictions != UINT32_MAX;
    return id;
}

uint32_t tl_kv_take(tl_kv_pool *kv)
{
    uint32_t id = kv->free_head;
    if (id != KV_NONE)
        kv->free_head = kv->block[id].next;
    else if (kv->n_touched < kv->cfg.n_blocks)
        id = touch_next(kv);
    else
        id = evict_oldest(kv);
    kv->block[id].refs = 1;
    kv->block[id].fill = 0;
    kv->n_used++;
    return id;
}

/* The last reference is gone. */
static void retire(tl_kv_pool *kv, uint32_t id)
{
    if (kv_in_prefix(kv, id))
        tl_prefix_retire(kv->prefix, id);
    else if (kv->block[id].hash != 0)
        tl_kv_cache(kv, id);
    else
        tl_kv_release(kv, id);
}

void tl_kv_release(tl_kv_pool *kv, uint32_t id)
{
    kv->n_used--;
    kv->block[id].fill = 0;
    kv->block[id].prev = KV_RESIDENT;
    kv->block[id].next = kv->free_head;
    kv->free_head = id;
}

static void drop(tl_kv_pool *kv, uint32_t id)
{
    if (--kv->block[id].refs == 0)
        retire(kv, id);
}

/* A used block is not among those that can be evicted. The whole of it moves: layers may hold more
 * than the fill. */
uint32_t tl_kv_replace(tl_kv_pool *kv, uint32_t id)
{
    const uint32_t copy = tl_kv_take(kv);
    memcpy(kv_slab(kv, copy, 0, false), kv_slab(kv, id, 0, false), kv->size.block);
    kv->block[copy].fill = kv->block[id].fill;
    drop(kv, id);
    return copy;
}

/* ---- formats ---- */

/* FORMAT(format, dtype) */
#define FORMATS(FORMAT)                     \
    FORMAT(TL_KV_FORMAT_F16, TL_F16)        \
    FORMAT(TL_KV_FORMAT_E4M3, TL_F8_E4M3)   \
    FORMAT(TL_KV_FORMAT_I8, TL_I8)          \
    FORMAT(TL_KV_FORMAT_BF16, TL_BF16)      \
    FORMAT(TL_KV_FORMAT_F32, TL_F32)

struct format {
    uint32_t format;
    tl_dtype dtype;
};

/* NULL where there is none. */
static const struct format *find_format(uint32_t format)
{
#define FORMAT(...) {__VA_ARGS__},
    static const struct format formats[] = {FORMATS(FORMAT)};
#undef FORMAT
    for (size_t i = 0; i < sizeof formats / sizeof formats[0]; i++)
        if (formats[i].format == format)
            return &formats[i];
    return NULL;
}

bool tl_kv_format_is_known(uint32_t format)
{
    return find_format(format) != NULL;
}

bool tl_kv_measure(const tl_kv_cfg *cfg, struct kv_sizes *out)
{
    const struct format *format = find_format(cfg->format);
    const size_t scale = kv_has_scales(format->dtype) ? sizeof(float) : 0;
    size_t scales;
    if (!tl_mul_size(cfg->head_dim, (size_t)kv_elem_bytes(format->dtype), &out->row) ||
        !tl_mul_size(out->row, cfg->block_tokens, &out->rows))
        return false;
    const size_t padding = scale ? -out->rows % scale : 0;
    out->scale = scale;
    return tl_add_size(out->rows, padding, &out->scales) &&
           tl_mul_size(cfg->block_tokens, scale, &scales) &&
           tl_add_size(out->scales, scales, &out->strip) &&
           tl_mul_size(out->strip, cfg->n_kv_heads, &out->slab) &&
           tl_mul_size(out->slab, cfg->n_layers, &out->block) &&
           tl_mul_size(out->block, 2, &out->block);
}

/* ---- making a pool ---- */

static tl_status check_cfg(const char *fn, const tl_kv_cfg *cfg)
{
    const struct {
        const char *name;
        uint32_t value;
    } dims[] = {{"n_blocks", cfg->n_blocks},
                {"block_tokens", cfg->block_tokens},
                {"n_layers", cfg->n_layers},
                {"n_kv_heads", cfg->n_kv_heads},
                {"head_dim", cfg->head_dim}};
    for (size_t i = 0; i < sizeof dims / sizeof dims[0]; i++)
        if (dims[i].value == 0)
            return tl_fail(TL_EINVAL, fn, "%s is 0", dims[i].name);
    const struct format *format = find_format(cfg->format);
#define FORMAT(name, dtype) "; " #name " is of " #dtype
    if (!format || cfg->dtype != format->dtype)
        return tl_fail(TL_EUNSUPPORTED, fn, "format %u of dtype %d" FORMATS(FORMAT), cfg->format,
                       cfg->dtype);
#undef FORMAT
    return TL_OK;
}

struct sizes {
    struct kv_sizes of;
    size_t data, self;
};

/* False where a size would wrap, or pass what a pointer difference can hold. */
static bool measure(const tl_kv_cfg *cfg, struct sizes *out)
{
    size_t records;
    return tl_kv_measure(cfg, &out->of) &&
           tl_mul_size(out->of.block, cfg->n_blocks, &out->data) && out->data <= PTRDIFF_MAX &&
           tl_mul_size(cfg->n_blocks, sizeof(struct kv_block), &records) &&
           tl_add_size(records, sizeof(tl_kv_pool), &out->self) && out->self <= PTRDIFF_MAX;
}

static tl_status new_pool(const char *fn, const tl_kv_cfg *cfg, const struct sizes *size,
                          tl_kv_pool **out)
{
    tl_allocator self_owner, data_owner;
    tl_kv_pool *kv = tl_owned_alloc(size->self, TL_KV_ALIGN, &self_owner);
    if (!kv)
        return tl_fail(TL_ENOMEM, fn, "no %zu bytes for the records of %u blocks", size->self,
                       cfg->n_blocks);
    void *data = tl_owned_alloc(size->data, size->data >= LARGE_DATA ? LARGE_DATA : TL_KV_ALIGN,
                                &data_owner);
    if (!data) {
        tl_owned_free(&self_owner, kv);
        return tl_fail(TL_ENOMEM, fn, "no %zu bytes for %u blocks of %zu", size->data,
                       cfg->n_blocks, size->of.block);
    }
    *kv = (tl_kv_pool){.cfg = *cfg,
                       .size = size->of,
                       .data = data,
                       .data_owner = data_owner,
                       .self_owner = self_owner,
                       .free_head = KV_NONE,
                       .oldest = KV_NONE,
                       .newest = KV_NONE};
    kv->block[0].bucket = KV_NONE; /* the bucket that is there before any block is touched */
    *out = kv;
    return TL_OK;
}

tl_status tl_kv_pool_create(const tl_kv_cfg *cfg, tl_kv_pool **out)
{
    static const char fn[] = "tl_kv_pool_create";
    struct sizes size;
    if (!out)
        return tl_fail(TL_EINVAL, fn, "out is NULL");
    *out = NULL;
    if (!cfg)
        return tl_fail(TL_EINVAL, fn, "cfg is NULL");
    TL_TRY(check_cfg(fn, cfg));
    if (!measure(cfg, &size))
        return tl_fail(
            TL_EINVAL, fn,
            "%u blocks of %u tokens, %u layers, %u KV heads, head_dim %u pass the address space",
            cfg->n_blocks, cfg->block_tokens, cfg->n_layers, cfg->n_kv_heads, cfg->head_dim);
    return new_pool(fn, cfg, &size, out);
}

void tl_kv_pool_destroy(tl_kv_pool *kv)
{
    if (!kv)
        return;
    if (kv->prefix)
        tl_prefix_detach(kv->prefix);
    const tl_allocator self_owner = kv->self_owner;
    tl_owned_free(&kv->data_owner, kv->data);
    tl_owned_free(&self_owner, kv);
}

/* ---- checks at the public edge ---- */

static tl_status check_id(const char *fn, const tl_kv_pool *kv, uint32_t id)
{
    if (!kv)
        return tl_fail(TL_EINVAL, fn, "the pool is NULL");
    if (id >= kv->cfg.n_blocks)
        return tl_fail(TL_EINVAL, fn, "block %u is out of range: the pool has %u", id,
                       kv->cfg.n_blocks);
    return TL_OK;
}

tl_status tl_kv_check_used(const char *fn, const tl_kv_pool *kv, uint32_t id)
{
    TL_TRY(check_id(fn, kv, id));
    if (kv_refs(kv, id) == 0)
        return tl_fail(TL_EINVAL, fn, "block %u is not used: nobody holds a reference", id);
    return TL_OK;
}

/* Whether a caller can hold a reference: pins are the prefix index's own. */
static tl_status check_held(const char *fn, const tl_kv_pool *kv, uint32_t id)
{
    TL_TRY(tl_kv_check_used(fn, kv, id));
    if (kv_in_prefix(kv, id) && tl_prefix_pins(kv->prefix, id) == kv->block[id].refs)
        return tl_fail(TL_EINVAL, fn, "block %u has no reference but for its %u pins", id,
                       kv->block[id].refs);
    return TL_OK;
}

/* ---- references ---- */

tl_status tl_kv_alloc(tl_kv_pool *kv, uint32_t n, uint32_t *ids)
{
    static const char fn[] = "tl_kv_alloc";
    if (!kv || (!ids && n > 0))
        return tl_fail(TL_EINVAL, fn, "%s is NULL", kv ? "ids" : "the pool");
    if (n > kv_available(kv))
        return tl_fail(TL_EFULL, fn, "%u blocks wanted, %u free and %u cached of %u", n,
                       kv_available(kv) - kv->n_cached, kv->n_cached, kv->cfg.n_blocks);
    for (uint32_t i = 0; i < n; i++)
        ids[i] = tl_kv_take(kv);
    return TL_OK;
}

void tl_kv_ref(tl_kv_pool *kv, uint32_t id)
{
    static const char fn[] = "tl_kv_ref";
    if (tl_kv_check_used(fn, kv, id) != TL_OK)
        return;
    if (kv->block[id].refs == TL_KV_MAX_REFS)
        (void)tl_fail(TL_EFULL, fn, "block %u has %u references, the most there can be", id,
                      TL_KV_MAX_REFS);
    else
        kv->block[id].refs++;
}

tl_status tl_kv_unref(tl_kv_pool *kv, uint32_t id)
{
    TL_TRY(check_held("tl_kv_unref", kv, id));
    drop(kv, id);
    return TL_OK;
}

uint32_t tl_kv_refs(const tl_kv_pool *kv, uint32_t id)
{
    return check_id("tl_kv_refs", kv, id) == TL_OK ? kv_refs(kv, id) : 0;
}

tl_status tl_kv_cow(tl_kv_pool *kv, uint32_t id, uint32_t *out)
{
    static const char fn[] = "tl_kv_cow";
    if (!out)
        return tl_fail(TL_EINVAL, fn, "out is NULL");
    TL_TRY(check_held(fn, kv, id));
    if (kv->block[id].refs == 1) {
        *out = id;
        return TL_OK;
    }
    if (kv_available(kv) == 0)
        return tl_fail(TL_EFULL, fn, "no block for a copy of block %u: all %u are used", id,
                       kv->cfg.n_blocks);
    *out = tl_kv_replace(kv, id);
    return TL_OK;
}

/* ---- fill, hash, index ---- */

static tl_status check_fill_may_change(const char *fn, const tl_kv_pool *kv, uint32_t id)
{
    TL_TRY(tl_kv_check_used(fn, kv, id));
    if (kv_is_frozen(kv, id))
        return tl_fail(TL_EINVAL, fn, "block %u is %s, its fill stays %u", id,
                       kv_in_prefix(kv, id) ? "in the prefix index" : "registered",
                       kv->block[id].fill);
    return TL_OK;
}

tl_status tl_kv_set_fill(tl_kv_pool *kv, uint32_t id, uint32_t n_tokens)
{
    static const char fn[] = "tl_kv_set_fill";
    TL_TRY(check_fill_may_change(fn, kv, id));
    if (n_tokens > kv->cfg.block_tokens)
        return tl_fail(TL_EINVAL, fn, "fill %u of block %u: a block holds %u tokens", n_tokens, id,
                       kv->cfg.block_tokens);
    kv->block[id].fill = n_tokens;
    return TL_OK;
}

tl_status tl_kv_set_length(tl_kv_pool *kv, const uint32_t *block_table, int32_t n_table,
                           int64_t first, int64_t length)
{
    static const char fn[] = "tl_kv_set_length";
    if (!kv || (!block_table && n_table > 0))
        return tl_fail(TL_EINVAL, fn, "%s is NULL", kv ? "block_table" : "the pool");
    const int64_t b = kv->cfg.block_tokens;
    if (first < 0 || length < first || length > n_table * b)
        return tl_fail_i64(TL_EINVAL, fn,
                           "positions %lld to %lld: the table has %lld blocks of %lld", first,
                           length, n_table, b);
    const int64_t from = first / b, end = first < length ? (length - 1) / b + 1 : from;
    for (int64_t i = from; i < end; i++)
        TL_TRY(check_fill_may_change(fn, kv, block_table[i]));
    for (int64_t i = from; i < end; i++)
        kv->block[block_table[i]].fill = (uint32_t)(length - i * b < b ? length - i * b : b);
    return TL_OK;
}

uint32_t tl_kv_fill(const tl_kv_pool *kv, uint32_t id)
{
    if (check_id("tl_kv_fill", kv, id) != TL_OK)
        return 0;
    return id < kv->n_touched ? kv->block[id].fill : 0;
}

/* FNV-1a over the n_bytes low bytes of value, lowest first. */
static uint64_t fnv1a(uint64_t hash, uint64_t value, int n_bytes)
{
    for (int i = 0; i < n_bytes; i++)
        hash = (hash ^ (value >> 8 * i & 0xFF)) * 0x100000001B3u;
    return hash;
}

uint64_t tl_kv_block_hash(uint64_t parent, const uint32_t *toks, uint32_t n)
{
    if (!toks && n > 0) {
        (void)tl_fail(TL_EINVAL, "tl_kv_block_hash", "toks is NULL with n = %u", n);
        return 0;
    }
    uint64_t hash = fnv1a(0xCBF29CE484222325u, parent, 8);
    for (uint32_t i = 0; i < n; i++)
        hash = fnv1a(hash, toks[i], 4);
    return hash ? hash : 1;
}

tl_status tl_kv_register(tl_kv_pool *kv, uint32_t id, uint64_t hash)
{
    static const char fn[] = "tl_kv_register";
    TL_TRY(tl_kv_check_used(fn, kv, id));
    const struct kv_block *block = &kv->block[id];
    if (block->fill != kv->cfg.block_tokens)
        return tl_fail(TL_EINVAL, fn, "block %u holds %u tokens of %u; only a full one has a name",
                       id, block->fill, kv->cfg.block_tokens);
    if (hash == 0)
        return tl_fail(TL_EINVAL, fn, "hash 0 for block %u", id);
    if (kv_in_prefix(kv, id))
        return tl_fail(TL_EINVAL, fn, "block %u is in the prefix index", id);
    if (block->hash == hash)
        return TL_OK;
    if (block->hash != 0)
        return tl_fail(TL_EINVAL, fn,
                       "block %u is registered under 0x%016" PRIx64 ", not 0x%016" PRIx64, id,
                       block->hash, hash);
    const uint32_t holder = tl_kv_index_enter(kv, id, hash);
    if (holder != id)
        return tl_fail(TL_EBUSY, fn,
                       "hash 0x%016" PRIx64 " wanted for block %u belongs to block %u", hash, id,
                       holder);
    return TL_OK;
}

tl_status tl_kv_lookup(tl_kv_pool *kv, uint64_t hash, uint32_t *id)
{
    static const char fn[] = "tl_kv_lookup";
    if (!kv || !id)
        return tl_fail(TL_EINVAL, fn, "%s is NULL", kv ? "id" : "the pool");
    const uint32_t found = *index_link(kv, hash); /* 0 is no registered block's */
    if (found == KV_NONE)
        return TL_ENOTFOUND;
    struct kv_block *block = &kv->block[found];
    if (block->refs == TL_KV_MAX_REFS)
        return tl_fail(TL_EFULL, fn, "block %u has %u references, the most there can be", found,
                       TL_KV_MAX_REFS);
    if (block->refs++ == 0)
        tl_kv_revive(kv, found);
    *id = found;
    return TL_OK;
}

/* ---- looking at a pool ---- */

static tl_status check_slab(const char *fn, const tl_kv_pool *kv, uint32_t id, uint32_t layer)
{
    TL_TRY(check_id(fn, kv, id));
    if (layer >= kv->cfg.n_layers)
        return tl_fail(TL_EINVAL, fn, "layer %u is out of range: the pool has %u", layer,
                       kv->cfg.n_layers);
    return TL_OK;
}

void *tl_kv_block_ptr(const tl_kv_pool *kv, uint32_t id, uint32_t layer, int is_v)
{
    if (check_slab("tl_kv_block_ptr", kv, id, layer) != TL_OK)
        return NULL;
    return kv_slab(kv, id, layer, is_v != 0);
}

float *tl_kv_scale_ptr(const tl_kv_pool *kv, uint32_t id, uint32_t layer, int is_v)
{
    static const char fn[] = "tl_kv_scale_ptr";
    if (check_slab(fn, kv, id, layer) != TL_OK)
        return NULL;
    if (kv->size.scale == 0) {
        (void)tl_fail(TL_EUNSUPPORTED, fn, "format %u, of dtype %d, has no scales",
                      kv->cfg.format, kv->cfg.dtype);
        return NULL;
    }
    return kv_strip_scales(kv, kv_slab(kv, id, layer, is_v != 0));
}

void tl_kv_pool_cfg(const tl_kv_pool *kv, tl_kv_cfg *out)
{
    if (!kv || !out)
        (void)tl_fail(TL_EINVAL, "tl_kv_pool_cfg", "%s is NULL", kv ? "out" : "the pool");
    else
        *out = kv->cfg;
}

size_t tl_kv_block_bytes(const tl_kv_pool *kv)
{
    if (kv)
        return kv->size.block;
    (void)tl_fail(TL_EINVAL, "tl_kv_block_bytes", "the pool is NULL");
    return 0;
}

static tl_kv_block look_at(const tl_kv_pool *kv, uint32_t id)
{
    const struct kv_block *block = &kv->block[id];
    return (tl_kv_block){kv_in_prefix(kv, id) ? TL_KV_HASH_PREFIX : block->hash, block->refs,
                         block->fill};
}

tl_status tl_kv_blocks_get(const tl_kv_pool *kv, uint32_t first, uint32_t n, tl_kv_block *out)
{
    static const char fn[] = "tl_kv_blocks_get";
    if (!kv || (!out && n > 0))
        return tl_fail(TL_EINVAL, fn, "%s is NULL", kv ? "out" : "the pool");
    if (first > kv->cfg.n_blocks || n > kv->cfg.n_blocks - first)
        return tl_fail_i64(TL_EINVAL, fn,
                           "blocks %lld to %lld are out of range, the pool has %lld", first,
                           (int64_t)first + n, kv->cfg.n_blocks);
    for (uint32_t i = 0; i < n; i++)
        out[i] = first + i < kv->n_touched ? look_at(kv, first + i) : (tl_kv_block){0, 0, 0};
    return TL_OK;
}

tl_status tl_kv_oldest(const tl_kv_pool *kv, uint32_t n, uint32_t *ids, uint32_t *n_found)
{
    static const char fn[] = "tl_kv_oldest";
    if (!kv || !n_found || (!ids && n > 0))
        return tl_fail(TL_EINVAL, fn, "%s is NULL", !kv ? "the pool" : n_found ? "ids" : "n_found");
    uint32_t found = 0;
    for (uint32_t id = kv->oldest; found < n && id != KV_NONE; id = kv->block[id].next)
        ids[found++] = id;
    *n_found = found;
    return TL_OK;
}

void tl_kv_stats_get(const tl_kv_pool *kv, tl_kv_stats *out)
{
    if (!kv || !out)
        (void)tl_fail(TL_EINVAL, "tl_kv_stats_get", "%s is NULL", kv ? "out" : "the pool");
    else
        *out = (tl_kv_stats){kv_available(kv) - kv->n_cached, kv->n_used, kv->n_cached,
                             kv->n_evictions, kv->n_unrepresentable};
}
