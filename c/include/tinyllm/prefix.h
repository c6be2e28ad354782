/* SPDX-License-Identifier: MIT */
/* prefix.h: which blocks of a pool hold which tokens, so that a sequence begins with what another
 * one, living or ended, has computed.
 *
 * The index is a forest: a root for each namespace, below it a node for each full block, with its
 * block_tokens tokens and the block in front of it. A node is found by comparing tokens, from the
 * root on; nothing is known by a hash, so no two texts are ever taken for one. The children of a
 * node stand in an ordered tree whose shape comes from secret random numbers, so tokens chosen to
 * make it slow cost what other tokens do. With c children behind a node a step costs O(log c)
 * comparisons; behind most there is one.
 *
 * Words. A namespace is any bytes (a model, an adapter, a tenant's salt): what is entered under
 * some bytes is found under equal ones and in no other way.
 * A match may end inside a block: up to there its K and V are those of the tokens asked, since
 * they depend on nothing behind. Who goes on from there writes to a copy (tl_kv_reserve).
 * A twin of a block is another one with the same tokens behind the same blocks.
 *
 * A block in the index is to the pool what a registered one is: its fill and contents are frozen,
 * and it becomes cached, not free, when its last reference goes. It is evicted as the least
 * recently used, but only behind every block that follows it in the index: one without references
 * that has such a block with references stays, and counts as used. So whatever is evicted takes
 * nothing with it that could still be found. A block is in the index at one place at most, and not
 * registered under a hash as well.
 *
 * Threads: as the pool, with which the index is one object: the caller serialises calls on both.
 * tl_prefix_peek, tl_prefix_block_get and tl_prefix_stats_get only read.
 * All memory is taken by tl_prefix_create, but for a record a namespace; the tokens of a block are
 * touched when it is entered. On failure nothing changes (ABI.md R6). */
#ifndef TINYLLM_PREFIX_H
#define TINYLLM_PREFIX_H

#include "kv_pool.h"

#define TL_PREFIX_NONE UINT32_MAX /* no block */

typedef struct tl_prefix tl_prefix;

/* 72 bytes. */
typedef struct {
    uint64_t queries, tokens_asked, tokens_found; /* of tl_prefix_match */
    uint64_t blocks, namespaces, pins;            /* held now */
    uint64_t evictions;           /* blocks of the index that allocations have taken */
    uint64_t age_ns, last_age_ns; /* how long those had been cached: all together, and the last */
} tl_prefix_stats;

/* What the index knows of a block; the pointers are into the index, good until it or the pool
 * changes. 40 bytes. */
typedef struct {
    const void *ns;         /* the namespace; not NULL */
    size_t ns_bytes;
    const uint32_t *tokens; /* [block_tokens] */
    int64_t depth;          /* blocks in front of it */
    uint32_t parent;        /* the one right in front of it; TL_PREFIX_NONE: there is none */
    uint32_t pins;
} tl_prefix_block;

TL_BEGIN_DECLS

/* Makes the index of a pool, which has one at most. It is destroyed before the pool; where the pool
 * goes first, nothing but tl_prefix_destroy may be called (other functions say TL_EINVAL).
 *
 * Errors, *out NULL, the first of these decides:
 *   TL_EINVAL   out or kv NULL
 *   TL_EBUSY    the pool has an index
 *   TL_EINVAL   a size beyond the address space
 *   TL_ENOMEM   the hook failed */
TL_API tl_status tl_prefix_create(tl_kv_pool *kv, tl_prefix **out);

/* Takes every block out of the index and frees it: cached ones become free, used ones stay with
 * their holders, and pins are given back. NULL: nothing. */
TL_API void tl_prefix_destroy(tl_prefix *px);

/* Finds the longest prefix of tokens[n_tokens] there is: *n_found of them, whose K and V lie in
 * block_table[ceil(*n_found / block_tokens)] in order. The caller has a reference on each of these
 * blocks; what the rest of block_table[ceil(n_tokens / block_tokens)] holds stays. Nothing found is
 * TL_OK too. Who needs the output of the last token asks for one token less than there are.
 * A block with TL_KV_MAX_REFS references ends the match before it.
 *
 * Errors, nothing taken or written, the first of these decides:
 *   TL_EINVAL   px or n_found NULL; ns NULL with ns_bytes > 0
 *   TL_EINVAL   n_tokens < 0; tokens or block_table NULL with n_tokens > 0
 *   TL_EINVAL   the pool is gone */
TL_API tl_status tl_prefix_match(tl_prefix *px, const void *ns, size_t ns_bytes,
                                 const uint32_t *tokens, int64_t n_tokens, uint32_t *block_table,
                                 int64_t *n_found);

/* How many tokens tl_prefix_match would find, and nothing else: no reference, no place in the order
 * of use, no count. Errors as there. */
TL_API tl_status tl_prefix_peek(const tl_prefix *px, const void *ns, size_t ns_bytes,
                                const uint32_t *tokens, int64_t n_tokens, int64_t *n_found);

/* Enters n full blocks, block_table[first] .. block_table[first+n-1], which hold the K and V of
 * tokens[n * block_tokens] in all layers. They follow block_table[first-1], which must be in the
 * index at that place already (first == 0: they begin the sequence); entries before it are not
 * looked at. A block that is at its place already stays; where a twin is there the index keeps
 * that, and what follows is entered behind it.
 *
 *   twins   [n], or NULL to leave out: for each block its twin, on which the caller then has a
 *           reference, to put it into his table and give up his own; TL_PREFIX_NONE where there is
 *           none, or one that has TL_KV_MAX_REFS references. Without twins the last of them counts
 *           as used just now, and what is in front of it
 *
 * Errors, nothing entered, twins untouched, the first of these decides; n == 0: TL_OK where the
 * first two do not.
 *   TL_EINVAL   px NULL; ns NULL with ns_bytes > 0; the pool is gone
 *   TL_EINVAL   first or n < 0, or first + n beyond the address space
 *   TL_EINVAL   tokens or block_table NULL
 *   TL_EINVAL   block_table[first-1] is not in the index, in another namespace or at another place
 *   TL_EINVAL   block by block: an id out of range, a block that is not used, one that is not full,
 *               one that stands there twice
 *   TL_EBUSY    a block that is registered under a hash, or in the index at another place
 *   TL_ENOMEM   no memory for a new namespace */
TL_API tl_status tl_prefix_insert(tl_prefix *px, const void *ns, size_t ns_bytes,
                                  const uint32_t *tokens, int64_t first, int64_t n,
                                  const uint32_t *block_table, uint32_t *twins);

/* Keeps the first n_tokens / block_tokens blocks of some tokens from eviction until tl_prefix_unpin
 * has been called as often with the same tokens: each time the last of them gets one reference of
 * the index's own, which tl_kv_unref does not take.
 *
 * Errors, nothing pinned, the first of these decides:
 *   TL_EINVAL      px NULL; ns NULL with ns_bytes > 0; the pool is gone
 *   TL_EINVAL      n_tokens below block_tokens, or tokens NULL
 *   TL_ENOTFOUND   not all of these blocks are there; the error slot stays too
 *   TL_EFULL       the last has TL_KV_MAX_REFS references */
TL_API tl_status tl_prefix_pin(tl_prefix *px, const void *ns, size_t ns_bytes,
                               const uint32_t *tokens, int64_t n_tokens);

/* Takes one pin back. Errors as tl_prefix_pin, and TL_ENOTFOUND for what is not pinned. */
TL_API tl_status tl_prefix_unpin(tl_prefix *px, const void *ns, size_t ns_bytes,
                                 const uint32_t *tokens, int64_t n_tokens);

/* Forgets a namespace: its blocks leave the index as in tl_prefix_destroy. TL_OK for one that holds
 * nothing.
 *
 * Errors, nothing forgotten:
 *   TL_EINVAL   px NULL; ns NULL with ns_bytes > 0; the pool is gone */
TL_API tl_status tl_prefix_drop(tl_prefix *px, const void *ns, size_t ns_bytes);

/* What the index knows of block `id`.
 *
 * Errors, *out untouched, the first of these decides:
 *   TL_EINVAL      px or out NULL; the pool is gone; id out of range
 *   TL_ENOTFOUND   the block is not in the index; the error slot stays too */
TL_API tl_status tl_prefix_block_get(const tl_prefix *px, uint32_t id, tl_prefix_block *out);

/* Fills *out. NULL: nothing is written and the slot is set. */
TL_API void tl_prefix_stats_get(const tl_prefix *px, tl_prefix_stats *out);

TL_END_DECLS

#endif
