/* SPDX-License-Identifier: MIT */
/* kv_pool.h: a pool of fixed-size blocks that hold the K and V of a paged cache, counted by
 * reference.
 *
 * A block holds K and V of b = block_tokens positions for every layer and KV head,
 *
 *     [n_layers][2][n_kv_heads] strips                second axis: 0 K, 1 V
 *
 * A strip is [b][head_dim] elements of the pool's dtype. In the formats of eight bits it goes on:
 * zeros up to a multiple of 4 bytes, then [b] f32 scales, one for each position; a value is scale *
 * element. An entry is stored once and never scaled anew, so blocks can be shared in every format:
 *
 *     format                dtype        bytes of a row   a value is
 *     TL_KV_FORMAT_F16      TL_F16       2 D              rounded to nearest even
 *     TL_KV_FORMAT_E4M3     TL_F8_E4M3   D + 4            as tl_store_e4m3_f32 stores its row
 *     TL_KV_FORMAT_I8       TL_I8        D + 4            as tl_store_i8_f32 stores its row
 *     TL_KV_FORMAT_BF16     TL_BF16      2 D              rounded to nearest even
 *     TL_KV_FORMAT_F32      TL_F32       4 D              itself
 *
 * A block is in exactly one state, so that free + used + cached == n_blocks always:
 *   free    no reference, not registered
 *   used    at least one reference, or kept for a block behind it in a prefix index (prefix.h)
 *   cached  no reference, registered under a hash or in a prefix index: a lookup or a match revives
 *           it, an allocation may evict it
 *
 * Words. fill: how many positions of a block hold data. hash: the name of a full block, chained
 * over its prefix.
 * Sharing is taking one more reference; writing to what is shared goes through tl_kv_cow. A
 * sequence is a block_table:
 * position j lives in slot j % b of block block_table[j / b].
 *
 * Threads: not thread-safe; the caller serialises calls on one pool. Any number of kernels may read
 * a pool while nobody writes.
 * Every operation is O(1) per block. Sizes and offsets are 64-bit throughout. On failure nothing
 * changes (ABI.md R6). */
#ifndef TINYLLM_KV_POOL_H
#define TINYLLM_KV_POOL_H

#include "abi.h"
#include "pool.h"

/* The formats; an envelope's version is its format. */
#define TL_KV_FORMAT_F16 1u
#define TL_KV_FORMAT_E4M3 2u
#define TL_KV_FORMAT_I8 3u
#define TL_KV_FORMAT_BF16 4u
#define TL_KV_FORMAT_F32 5u
#define TL_KV_FORMAT_V1 TL_KV_FORMAT_F16 /* its name when there was no other */
#define TL_KV_MAGIC "TLKV"
#define TL_KV_ENVELOPE_HEADER 28u   /* bytes before the first record */
#define TL_KV_RECORD_HEADER 12u     /* u64 hash, u32 fill before each payload */
/* every slab starts on it whenever a slab's size is a multiple of it */
#define TL_KV_ALIGN 64u
#define TL_KV_MAX_REFS UINT32_MAX   /* references one block can have */
#define TL_KV_HASH_PREFIX UINT64_MAX /* what tl_kv_blocks_get says of a block in a prefix index */

typedef struct tl_kv_pool tl_kv_pool;

/* 28 bytes, in this order. */
typedef struct {
    uint32_t n_blocks, block_tokens, n_layers, n_kv_heads, head_dim;
    int32_t dtype;   /* the one of the format */
    uint32_t format; /* TL_KV_FORMAT_F16, ... */
} tl_kv_cfg;

/* Blocks in each state, how many cached blocks allocations have taken so far, and how many values
 * appended so far the format has nothing for: NaN in every format; finite values that became
 * infinite; in eight bits infinities as well, and all of a row with one of these is then NaN. 24
 * bytes. */
typedef struct {
    uint32_t free, used, cached, evictions;
    uint64_t unrepresentable;
} tl_kv_stats;

/* A block at one moment. refs > 0: used; no reference and a hash: cached, or kept for one behind it
 * in a prefix index; else free. 16 bytes. */
typedef struct {
    uint64_t hash;       /* it is registered under; TL_KV_HASH_PREFIX: in a prefix index; 0: none */
    uint32_t refs, fill; /* a free block's fill is 0 */
} tl_kv_block;

/* What a step takes from the pool. 8 bytes. */
typedef struct {
    uint32_t fresh;  /* blocks that hold new positions only */
    uint32_t copies; /* of blocks that must not be written */
} tl_kv_needs;

TL_BEGIN_DECLS

/* Makes a pool of free blocks. Block memory is reserved, not touched: the default hook commits
 * pages as they are written. *out is the caller's, to give to tl_kv_pool_destroy.
 *
 * Errors, *out NULL, the first of these decides:
 *   TL_EINVAL        out or cfg NULL
 *   TL_EINVAL        a dimension of 0
 *   TL_EUNSUPPORTED  another format, or a dtype that is not the format's
 *   TL_EINVAL        a size beyond the address space
 *   TL_ENOMEM        the hook failed */
TL_API tl_status tl_kv_pool_create(const tl_kv_cfg *cfg, tl_kv_pool **out);

/* Frees the pool with everything in it, whatever references are held. NULL: nothing. */
TL_API void tl_kv_pool_destroy(tl_kv_pool *kv);

/* Takes n blocks, each with one reference and fill 0, and writes their ids to ids[n]. Free blocks
 * go first, then cached ones, least recently used first; an evicted block leaves the index and
 * counts. Memory is not cleared. n == 0 is TL_OK.
 *
 * Errors, nothing taken or evicted, the first of these decides:
 *   TL_EINVAL   kv NULL, or ids NULL with n > 0
 *   TL_EFULL    free + cached < n */
TL_API tl_status tl_kv_alloc(tl_kv_pool *kv, uint32_t n, uint32_t *ids);

/* One more reference on a used block. Nothing happens, and the slot is set, where
 *   kv is NULL, id is out of range, or the block is not used
 *   it has TL_KV_MAX_REFS references */
TL_API void tl_kv_ref(tl_kv_pool *kv, uint32_t id);

/* One reference less; at 0 the block becomes cached (as the most recently used) if it is
 * registered, else free.
 *
 * Errors, nothing changed:
 *   TL_EINVAL   kv NULL, id out of range, or a block that is not used: nobody holds a reference, or
 *               tl_prefix_pin alone */
TL_API tl_status tl_kv_unref(tl_kv_pool *kv, uint32_t id);

/* A block that may be written in place of `id`, for one of its holders. One reference: *out = id.
 * More: a fresh block with the same K, V and fill takes over one reference; the copy is not
 * registered. `id` itself is never evicted to make room for its copy.
 * A registered block with one reference comes back as it is: its contents must still not be written
 * (appending refuses it).
 *
 * Errors, *out untouched, the first of these decides:
 *   TL_EINVAL   out NULL
 *   TL_EINVAL   kv NULL, id out of range, or a block that is not used
 *   TL_EFULL    every block is used */
TL_API tl_status tl_kv_cow(tl_kv_pool *kv, uint32_t id, uint32_t *out);

/* Says how many positions of a used block hold data, 0 .. block_tokens.
 *
 * Errors, the fill stays, the first of these decides:
 *   TL_EINVAL   kv NULL, id out of range, or a block that is not used
 *   TL_EINVAL   a registered block
 *   TL_EINVAL   n_tokens above block_tokens */
TL_API tl_status tl_kv_set_fill(tl_kv_pool *kv, uint32_t id, uint32_t n_tokens);

/* The same for a sequence that holds `length` positions, in the blocks that positions first ..
 * length-1 stand in: each is full but perhaps the last. first == length: TL_OK, nothing is set.
 *
 * Errors, no fill set, the first of these decides:
 *   TL_EINVAL   kv NULL, or block_table NULL with n_table > 0
 *   TL_EINVAL   n_table or first < 0, length below first or past the table
 *   TL_EINVAL   entry by entry: an id out of range, a block that is not used, a registered one */
TL_API tl_status tl_kv_set_length(tl_kv_pool *kv, const uint32_t *block_table, int32_t n_table,
                                  int64_t first, int64_t length);

/* The fill of a block; 0 with the slot set for a bad id. */
TL_API uint32_t tl_kv_fill(const tl_kv_pool *kv, uint32_t id);

/* References held on a block; 0 with the slot set for a bad id. */
TL_API uint32_t tl_kv_refs(const tl_kv_pool *kv, uint32_t id);

/* A name for a full block, for callers who keep an index of their own. It resists no attacker: two
 * blocks of ordinary tokens with one name are found in less than a second, and who hits the wrong
 * one reads another's K and V; prefix.h compares tokens instead. FNV-1a 64 over the parent's hash
 * (8 bytes, little-endian; 0 for the first block) and then each token id (4 bytes each); a result
 * of 0 becomes 1. A salt is a non-zero first parent. Pure and reentrant. 0 with the slot set where
 * toks is NULL with n > 0. */
TL_API uint64_t tl_kv_block_hash(uint64_t parent, const uint32_t *toks, uint32_t n);

/* Enters a used, full block into the index under a non-zero hash; again under the same hash is
 * TL_OK. From then on its fill and contents are frozen until it is evicted.
 *
 * Errors, the index as it was, the first of these decides:
 *   TL_EINVAL   kv NULL, id out of range, or a block that is not used
 *   TL_EINVAL   a block that is not full
 *   TL_EINVAL   hash 0
 *   TL_EINVAL   registered under another hash, or in a prefix index
 *   TL_EBUSY    another block is registered under the hash */
TL_API tl_status tl_kv_register(tl_kv_pool *kv, uint32_t id, uint64_t hash);

/* Finds the block registered under `hash`, takes a reference on it (a cached block becomes used)
 * and writes its id.
 *
 * Errors, *id untouched, the first of these decides:
 *   TL_EINVAL      kv or id NULL
 *   TL_ENOTFOUND   no such block, or hash 0; the error slot stays too
 *   TL_EFULL       the block has TL_KV_MAX_REFS references */
TL_API tl_status tl_kv_lookup(tl_kv_pool *kv, uint64_t hash, uint32_t *id);

/* One layer's K (is_v 0) or V (else) of a block: its n_kv_heads strips; the pool's memory. NULL
 * with the slot set where
 *   kv is NULL, or id is out of range
 *   layer is out of range */
TL_API void *tl_kv_block_ptr(const tl_kv_pool *kv, uint32_t id, uint32_t layer, int is_v);

/* The [block_tokens] scales of the first of these strips; those of KV head h are h *
 * k_scale_head_stride floats further on (tl_kv_pool_view). NULL with the slot set where
 *   kv is NULL, or id is out of range
 *   layer is out of range
 *   the format has no scales */
TL_API float *tl_kv_scale_ptr(const tl_kv_pool *kv, uint32_t id, uint32_t layer, int is_v);

/* The configuration the pool was made with. NULL: nothing is written and the slot is set. */
TL_API void tl_kv_pool_cfg(const tl_kv_pool *kv, tl_kv_cfg *out);

/* Bytes of one block: K and V of all layers, scales included; 0 with the slot set for NULL. */
TL_API size_t tl_kv_block_bytes(const tl_kv_pool *kv);

/* Bytes of an envelope of n blocks; 0 with the slot set for NULL or a size that would wrap. */
TL_API size_t tl_kv_export_bytes(const tl_kv_pool *kv, uint32_t n);

/* Writes an envelope (little-endian) of n blocks to buf, and its size to *written:
 *
 *     "TLKV", u16 version (the format), u16 dtype, u32 n_blocks block_tokens n_layers n_kv_heads
 *     head_dim, n records: u64 hash (0: unregistered), u32 fill, the block with elements and scales
 *     of positions at or past the fill, and what fills up a strip, as zeros; u32 CRC-32C of all
 *     before it
 *
 * so the bytes are a pure function of what was stored. An id may stand twice.
 *
 * Errors, buf and (but where it says so) *written untouched, the first of these decides:
 *   TL_EINVAL   kv or written NULL, or ids NULL with n > 0
 *   TL_EINVAL   a size beyond the address space
 *   TL_EINVAL   id by id: out of range, a block that is not used, or one with fill 0
 *   TL_EFULL    cap is short: *written is the size needed, and buf may be NULL
 *   TL_EINVAL   buf NULL */
TL_API tl_status tl_kv_export(const tl_kv_pool *kv, const uint32_t *ids, uint32_t n, void *buf,
                              size_t cap, size_t *written);

/* Takes blocks for every record of an envelope, fills them and writes their ids to ids_out[n_blocks
 * of the envelope]. Each has one reference; a full block with a hash is registered unless its hash
 * already is. Any byte string is safe.
 *
 * Errors, nothing taken and ids_out untouched, the first of these decides:
 *   TL_EINVAL    kv or buf NULL
 *   TL_EFORMAT   too short for an envelope
 *   TL_EINVAL    ids_out NULL, and the envelope has blocks
 *   TL_EFORMAT   a length that its own version and dimensions contradict, where the version is a
 *                format
 *   TL_EFORMAT   another magic
 *   TL_EFORMAT   a checksum that does not fit
 *   TL_EFORMAT   a version other than the pool's format, or a dtype other than its
 *   TL_EFORMAT   record by record: a fill outside 1 .. block_tokens, a hash on a block that is not
 *                full
 *   TL_ESHAPE    a dimension other than the pool's
 *   TL_EFULL     free + cached < the envelope's blocks */
TL_API tl_status tl_kv_import(tl_kv_pool *kv, const void *buf, size_t len, uint32_t *ids_out);

/* Fills *out. NULL: nothing is written and the slot is set. */
TL_API void tl_kv_stats_get(const tl_kv_pool *kv, tl_kv_stats *out);

/* Writes what blocks first .. first+n-1 are to out[n]: for tools that look at a whole pool. n == 0
 * within the pool's blocks is TL_OK.
 *
 * Errors, out untouched, the first of these decides:
 *   TL_EINVAL   kv NULL, or out NULL with n > 0
 *   TL_EINVAL   a range past the pool's blocks */
TL_API tl_status tl_kv_blocks_get(const tl_kv_pool *kv, uint32_t first, uint32_t n,
                                  tl_kv_block *out);

/* CRC-32C (Castagnoli; reflected 0x82F63B78, init and final xor all ones) of n bytes; `crc` is 0 to
 * begin, or an earlier result to go on from. tl_crc32c("123456789", 9, 0) == 0xE3069283. Any
 * alignment. Reentrant. NULL with n > 0: crc unchanged, with the slot set. */
TL_API uint32_t tl_crc32c(const void *data, size_t n, uint32_t crc);

/* Makes room for the new tokens of a step, before its first tl_kv_append: every block that they
 * will be written to is there and the sequence's own. Where the first new position falls into a
 * block that others hold too, or that is registered or in a prefix index, the table gets a copy, as
 * by tl_kv_cow, with the positions before it as its fill; blocks behind the last that holds
 * anything are allocated, with fill 0, whatever stood in the table there.
 *
 *   block_tables   [B][table_stride] u32, in and out; entries past those needed stay
 *   cu_seqlens, ctx_lens   as tl_kv_append: new tokens, and lengths with them
 *   dry            not 0: nothing is taken and no table written; needs alone is
 *   needs          what is, or would be, taken; may be NULL unless dry. Written with TL_EFULL too
 *
 * Blocks are taken in the order of the sequences. Where as many sequences of the step as hold a
 * block write to it, the last keeps it, unless it is registered or in a prefix index. A block that
 * the last of its holders gives up on the way is cached, and is not counted as one to take.
 *
 * Errors, nothing taken and no table written, the first of these decides; no tokens: TL_OK where
 * those up to and with cu_seqlens do not.
 *   TL_EINVAL   kv NULL; B < 0; block_tables or ctx_lens NULL with B > 0; needs NULL with dry
 *   TL_EINVAL   table_stride < 1, or tables that do not fit in memory
 *   TL_EINVAL   cu_seqlens does not begin at 0, or decreases
 *   TL_EINVAL   sequence by sequence: ctx_len below its tokens, or past the table
 *   TL_EINVAL   entry by entry of those that hold the last position before the new ones where these
 *               begin inside its block: an id out of range, a block that is not used, or one that
 *               stands in more tables than it has references
 *   TL_EFULL    free + cached are fewer than needed: the message says how many are missing */
TL_API tl_status tl_kv_reserve(tl_kv_pool *kv, uint32_t *block_tables, int64_t table_stride,
                               const int32_t *cu_seqlens, const int32_t *ctx_lens, int64_t B,
                               int dry, tl_kv_needs *needs);

/* The cached blocks that the next allocations evict, n at most, first things first: ids[*n_found].
 *
 * Errors, nothing written, the first of these decides:
 *   TL_EINVAL   kv or n_found NULL, or ids NULL with n > 0 */
TL_API tl_status tl_kv_oldest(const tl_kv_pool *kv, uint32_t n, uint32_t *ids, uint32_t *n_found);

/* Gives the memory of free blocks back to the operating system, but for the `keep` that were freed
 * last; it is taken again, as zeros, when they are used. *bytes is how much that was: whole pages,
 * and those of blocks that were given back before are not counted again. Nothing, 0 bytes, where
 * the pool's memory came from a caller's allocator hook.
 *
 * Errors:
 *   TL_EINVAL   kv or bytes NULL
 *   TL_EIO      the system refused; *bytes is what had gone before */
TL_API tl_status tl_kv_trim(tl_kv_pool *kv, uint32_t keep, uint64_t *bytes);

/* Stores the new K and V of a step's tokens, one layer's, in the pool's format. What is appended
 * are the last positions that attention over the same ctx_lens then sees.
 *
 *   block_tables   [B][table_stride] u32
 *   cu_seqlens     [B + 1] i32 from 0: tokens cu_seqlens[s] .. cu_seqlens[s+1]-1 are sequence s's;
 *                  NULL: one token each
 *   ctx_lens       [B] i32: positions of each sequence, these tokens included
 *   k, v           [total, n_kv_heads, head_dim]: head h of token t at k + t*k_token_stride +
 *                  h*k_head_stride, innermost contiguous. Strides in elements of dtype; they may be
 *                  anything, zero and negative too, as long as those elements are there to be read
 *   dtype          TL_F32, TL_F16 or TL_BF16: f16 and bf16 are widened first, unless it is the
 *                  pool's own, whose elements are copied as they are
 *   tp             who works where it pays, or NULL: the caller
 *
 * Only the table entries written to are looked at. Fills are the caller's to set
 * (tl_kv_set_length). Values the format has nothing for are counted (tl_kv_stats).
 *
 * Errors, nothing written, the first of these decides; no tokens: TL_OK where those up to and with
 * cu_seqlens do not.
 *   TL_EINVAL        kv NULL; B < 0; block_tables or ctx_lens NULL with B > 0
 *   TL_EINVAL        layer out of range
 *   TL_EINVAL        table_stride < 1, or tables that do not fit in memory
 *   TL_EUNSUPPORTED  dtype is none of those above
 *   TL_EINVAL        cu_seqlens does not begin at 0, or decreases; k or v NULL
 *   TL_EINVAL        elements of k, of v beyond the address space
 *   TL_EUNSUPPORTED  TINYLLM_ISA names what is not here
 *   TL_EINVAL        sequence by sequence: ctx_len below its tokens, or past the table
 *   TL_EINVAL        entry by entry of those written to: an id out of range, a block that is not
 *                    used, or one that stands there twice, in whichever table
 *   TL_EBUSY         a block that is registered, or has several references
 *   TL_EBUSY         tp is in use */
TL_API tl_status tl_kv_append(tl_kv_pool *kv, uint32_t layer, const uint32_t *block_tables,
                              int64_t table_stride, const int32_t *cu_seqlens,
                              const int32_t *ctx_lens, int64_t B, const void *k, const void *v,
                              int32_t dtype, int64_t k_token_stride, int64_t k_head_stride,
                              int64_t v_token_stride, int64_t v_head_stride, tl_pool *tp);

/* The same for T positions of one sequence, pos .. pos+T-1, in f32.
 *
 *   k, v   [n_kv_heads][T][head_dim] f32: element (h, t, d) at h*head_stride + t*token_stride + d
 *
 * Errors, nothing written, the first of these decides; T == 0: TL_OK where the first three do not.
 *   TL_EINVAL        kv NULL
 *   TL_EINVAL        layer out of range
 *   TL_EINVAL        n_table, pos or T < 0
 *   TL_EINVAL        block_table, k or v NULL
 *   TL_EINVAL        pos + T past INT64_MAX or the table
 *   TL_EINVAL        elements of k, of v beyond the address space
 *   TL_EUNSUPPORTED  TINYLLM_ISA names what is not here
 *   TL_EINVAL        entry by entry of those written to: an id out of range, a block that is not
 *                    used, or one that stands there twice
 *   TL_EBUSY         a block that is registered, or has several references */
TL_API tl_status tl_kv_append_f32(tl_kv_pool *kv, uint32_t layer, const uint32_t *block_table,
                                  int32_t n_table, int64_t pos, int64_t T, const float *k,
                                  const float *v, int64_t head_stride, int64_t token_stride);

/* Reads positions pos .. pos+T-1 of one sequence back as f32, widened exactly; in eight bits scale
 * * element, rounded once (NaN: TL_NAN_BITS of numerics.h). k and v as above, written; no two of
 * their elements in one place. A block's fill is not asked.
 *
 * Errors, nothing written, the first of these decides; T == 0: TL_OK where the first three do not.
 *   TL_EINVAL        kv NULL
 *   TL_EINVAL        layer out of range
 *   TL_EINVAL        n_table, pos or T < 0
 *   TL_EINVAL        block_table, k or v NULL
 *   TL_EINVAL        pos + T past INT64_MAX or the table
 *   TL_EINVAL        elements of k, of v beyond the address space, or two in one place
 *   TL_EUNSUPPORTED  TINYLLM_ISA names what is not here
 *   TL_EINVAL        entry by entry of those read: an id out of range, or a block that is not
 *                    used */
TL_API tl_status tl_kv_gather_f32(const tl_kv_pool *kv, uint32_t layer,
                                  const uint32_t *block_table, int32_t n_table, int64_t pos,
                                  int64_t T, float *k, float *v, int64_t head_stride,
                                  int64_t token_stride);

TL_END_DECLS

#endif
