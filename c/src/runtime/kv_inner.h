/* SPDX-License-Identifier: MIT */
/* kv_inner.h: the block pool as the library's own code sees it: its state, and questions that leave
 * the error slot alone.
 *
 * Every block has one 32-byte record, and records come into use in rising order: blocks n_touched
 * and up were never allocated, are free, and their records are not initialised. So creating a pool
 * writes neither block memory nor records.
 *
 * The index is a hash table by linear hashing: it has as many buckets as touched blocks (at least
 * one), bucket i's head stands in record i, and each newly touched block splits one older bucket.
 * It is never fuller than one entry a bucket, never rehashed and never holds tombstones. */
#ifndef TL_KV_INNER_H
#define TL_KV_INNER_H

#include <stdbool.h>

#include "runtime/alloc.h"
#include "tinyllm/kv_pool.h"

#define KV_NONE UINT32_MAX /* no block: ids stop below n_blocks, which is at most this */

/* What `prev` of a free block is. */
enum { KV_RESIDENT, KV_LEAVING, KV_GIVEN_BACK };

/* Bytes within a block. */
struct kv_sizes {
    size_t row;            /* the elements of one position in a strip */
    size_t rows;           /* those of all positions: what follows is padding, then scales */
    size_t scale;          /* of one position: 4, or 0 in a format without */
    size_t scales;         /* where they begin */
    size_t strip, slab;    /* one KV head; K or V of one layer */
    size_t block;
};

struct kv_block {
    uint64_t hash;   /* 0: not registered */
    uint32_t refs;   /* 0: free or cached */
    uint32_t fill;   /* positions that hold data; 0 while free */
    uint32_t next;   /* free: the next free block; cached: the one used next after this */
    /* cached: the one used last before this; used: for notes of who looks at tables (kv_append.c,
     * kv_reserve.c, prefix.c); free: whether it has memory (kv_trim.c) */
    uint32_t prev;
    /* registered: the next block in the same bucket; in the prefix index: this block's own id,
     * which it is nowhere else */
    uint32_t chain;
    uint32_t bucket; /* of bucket number <this block's id>: its first block */
};

struct tl_kv_pool {
    tl_kv_cfg cfg;
    struct kv_sizes size;
    unsigned char *data; /* [n_blocks] of size.block */
    tl_allocator data_owner, self_owner;
    /* bucket_mask: the smallest 2^i - 1 that covers every bucket number */
    uint32_t n_touched, bucket_mask;
    uint32_t n_used, n_cached, n_evictions;
    uint64_t n_unrepresentable;
    uint32_t free_head;      /* touched free blocks, last freed first */
    uint32_t oldest, newest; /* cached blocks, by when they were last used */
    struct tl_prefix *prefix; /* the index of this pool, or NULL */
    struct kv_block block[]; /* [n_blocks] */
};

/* References on a block; 0 for an id that is none. */
static inline uint32_t kv_refs(const tl_kv_pool *kv, uint32_t id)
{
    return id < kv->n_touched ? kv->block[id].refs : 0;
}

/* Whether a touched block stands in the prefix index. */
static inline bool kv_in_prefix(const tl_kv_pool *kv, uint32_t id)
{
    return kv->block[id].chain == id && kv->block[id].hash == 0;
}

/* Whether a touched block's contents must stay, whoever holds it: a hash or a place in the prefix
 * index stands for them. */
static inline bool kv_is_frozen(const tl_kv_pool *kv, uint32_t id)
{
    return kv->block[id].hash != 0 || kv_in_prefix(kv, id);
}

/* Whether a touched block is free. */
static inline bool kv_is_free(const tl_kv_pool *kv, uint32_t id)
{
    return kv->block[id].refs == 0 && !kv_is_frozen(kv, id);
}

/* Whether a used block may be written in place: its one holder is the writer. */
static inline bool kv_writable(const tl_kv_pool *kv, uint32_t id)
{
    return kv->block[id].refs == 1 && !kv_is_frozen(kv, id);
}

/* One layer's K or V slab; id and layer in range. */
static inline void *kv_slab(const tl_kv_pool *kv, uint32_t id, uint32_t layer, bool is_v)
{
    return kv->data + id * kv->size.block + ((size_t)layer * 2 + is_v) * kv->size.slab;
}

/* The scales of a strip, in a format that has them. */
static inline float *kv_strip_scales(const tl_kv_pool *kv, void *strip)
{
    return (float *)(void *)((unsigned char *)strip + kv->size.scales);
}

/* Blocks an allocation could take. */
static inline uint32_t kv_available(const tl_kv_pool *kv)
{
    return kv->cfg.n_blocks - kv->n_used;
}

bool tl_kv_format_is_known(uint32_t format);

/* The sizes of a block in a format that is known, whatever the dimensions. False where one wraps,
 * even where a factor of 0 comes later. */
bool tl_kv_measure(const tl_kv_cfg *cfg, struct kv_sizes *out);

/* Takes one block with one reference and fill 0, evicting where nothing is free. kv_available() >
 * 0. */
uint32_t tl_kv_take(tl_kv_pool *kv);

/* A block without references that counts as used becomes cached, as the most recently used. */
void tl_kv_cache(tl_kv_pool *kv, uint32_t id);

/* A cached block counts as used again. */
void tl_kv_revive(tl_kv_pool *kv, uint32_t id);

/* A used block that is neither registered nor in the prefix index, and has no reference any more,
 * becomes free. */
void tl_kv_release(tl_kv_pool *kv, uint32_t id);
/* A block with the same K, V and fill, taken in place of one reference on a used one.
 * kv_available() > 0. */
uint32_t tl_kv_replace(tl_kv_pool *kv, uint32_t id);

/* Enters a used, full, unregistered block under a non-zero hash, unless another block holds it:
 * then that one's id, else `id`. */
uint32_t tl_kv_index_enter(tl_kv_pool *kv, uint32_t id, uint64_t hash);

/* TL_EINVAL in fn's name for a NULL pool, an id out of range or a block that is not used. */
tl_status tl_kv_check_used(const char *fn, const tl_kv_pool *kv, uint32_t id);

#endif
