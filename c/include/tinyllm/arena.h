/* SPDX-License-Identifier: MIT */
/* arena.h: bump allocation with marks, for scratch that a kernel takes and gives back as a stack.
 *
 * An arena owns a list of blocks and allocates from them front to back. Marks name a position;
 * resetting to one releases all that was taken after it and keeps the blocks, so that a step which
 * repeats asks the allocator hook for nothing.
 * Not thread-safe: the caller serialises calls on one arena. */
#ifndef TINYLLM_ARENA_H
#define TINYLLM_ARENA_H

#include "abi.h"

#define TL_ARENA_DEFAULT_BLOCK ((size_t)1 << 20) /* bytes */
#define TL_ARENA_DEFAULT_ALIGN ((size_t)64)
#define TL_ARENA_MAX_ALIGN ((size_t)4096)

typedef struct tl_arena tl_arena;

/* A position: `offset` bytes into block number `block`. A fresh arena's mark is (0, 0). 16
 * bytes. */
typedef struct {
    size_t offset, block;
} tl_arena_mark;

/* bytes_used: live bytes with their padding; bytes_reserved: the sizes of all blocks; high_water:
 * the largest bytes_used so far.
 * 32 bytes. */
typedef struct {
    size_t bytes_used, bytes_reserved, high_water, n_blocks;
} tl_arena_stats;

TL_BEGIN_DECLS

/* Makes an empty arena whose blocks hold `block_bytes` (0: TL_ARENA_DEFAULT_BLOCK) usable bytes
 * each, on a 64-byte boundary; no block is taken yet. *out is the caller's, to give to
 * tl_arena_destroy.
 *
 * Errors, *out NULL, the first of these decides:
 *   TL_EINVAL   out is NULL
 *   TL_EINVAL   block_bytes would wrap
 *   TL_ENOMEM   the hook failed */
TL_API tl_status tl_arena_create(size_t block_bytes, tl_arena **out);

/* n bytes at a multiple of `align` (0: TL_ARENA_DEFAULT_ALIGN; a power of two up to
 * TL_ARENA_MAX_ALIGN), uninitialised, valid until a reset to an earlier mark. A request too large
 * for block_bytes gets a block of its own.
 *
 * NULL with the slot set, and the arena unchanged, the first of these decides:
 *   arena is NULL
 *   n is 0
 *   align is no power of two, or above TL_ARENA_MAX_ALIGN
 *   n would wrap
 *   the hook failed */
TL_API void *tl_arena_alloc(tl_arena *arena, size_t n, size_t align);

/* The current position; (0, 0) with the slot set for NULL. */
TL_API tl_arena_mark tl_arena_mark_get(const tl_arena *arena);

/* Releases everything taken after `mark`, and keeps the blocks: the same requests then find the
 * same places. Nothing happens, and the slot is set, where
 *   arena is NULL
 *   the mark is later than the current position */
TL_API void tl_arena_reset_to(tl_arena *arena, tl_arena_mark mark);

/* Fills *out. NULL arena or out: nothing is written and the slot is set. */
TL_API void tl_arena_stats_get(const tl_arena *arena, tl_arena_stats *out);

/* Gives every block and the arena back to the hook each came from. NULL: nothing. */
TL_API void tl_arena_destroy(tl_arena *arena);

TL_END_DECLS

#endif
