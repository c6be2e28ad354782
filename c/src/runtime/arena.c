/* SPDX-License-Identifier: MIT */
/* arena.c: bump allocation in a list of blocks that only grows.
 *
 * Words: the position is (current block, its offset); blocks before the current one keep the offset
 * at which they were left, blocks after it are empty. A request goes to the first block from the
 * current one on that holds it, and to a new block at the end of the list where none does. Blocks
 * neither move nor leave before the arena does, so the same requests from the same position always
 * find the same places. */
#include <assert.h>
#include <stdalign.h>

#include "runtime/alloc.h"
#include "runtime/fail.h"
#include "tinyllm/arena.h"

static_assert(sizeof(size_t) != 8 || sizeof(tl_arena_mark) == 16, "tl_arena_mark is 16 bytes");
static_assert(sizeof(size_t) != 8 || sizeof(tl_arena_stats) == 32, "tl_arena_stats is 32 bytes");

/* Stands behind the bytes it describes, so that they may start on any boundary and all of them are
 * usable. */
struct block {
    char *base;
    size_t size, offset; /* bytes; what is taken of them, padding included */
    size_t number;       /* 0 for the first of the arena */
    struct block *prev, *next;
    tl_allocator owner;
};

struct tl_arena {
    size_t block_bytes;
    struct block *first, *last, *current; /* all NULL until the first request */
    size_t bytes_used, bytes_reserved, high_water, n_blocks;
    tl_allocator owner;
};

/* ---- blocks ---- */

/* Bytes to ask for so that `size` usable ones and the block's description fit; false where that
 * would wrap. */
static bool block_footprint(size_t size, size_t *at, size_t *total)
{
    if (!tl_add_size(size, alignof(struct block) - 1, at))
        return false;
    *at &= ~(alignof(struct block) - 1);
    return tl_add_size(*at, sizeof(struct block), total);
}

/* A block whose first `n` bytes serve the request (n, align). NULL where the hook has none. */
static struct block *block_new(size_t size, size_t align)
{
    size_t at, total;
    tl_allocator owner;
    char *base = block_footprint(size, &at, &total) ? tl_owned_alloc(total, align, &owner) : NULL;
    if (!base)
        return NULL;
    struct block *block = (struct block *)(void *)(base + at);
    *block = (struct block){.base = base, .size = size, .owner = owner};
    return block;
}

static void block_free(struct block *block)
{
    const tl_allocator owner = block->owner;
    tl_owned_free(&owner, block->base);
}

/* Where in `block` the request (n, align) starts, counted from `offset` on; false where it does not
 * fit. */
static bool block_fits(const struct block *block, size_t offset, size_t n, size_t align,
                       size_t *start)
{
    const size_t pad = (size_t)-((uintptr_t)block->base + offset) & (align - 1);
    const size_t room = block->size - offset;
    *start = offset + pad;
    return pad <= room && n <= room - pad;
}

/* ---- the list ---- */

static struct block *find_block(const tl_arena *arena, size_t n, size_t align, size_t *start)
{
    struct block *block = arena->current;
    while (block && !block_fits(block, block->offset, n, align, start))
        block = block->next;
    return block;
}

static void append_block(tl_arena *arena, struct block *block)
{
    block->number = arena->n_blocks++;
    block->prev = arena->last;
    *(arena->last ? &arena->last->next : &arena->first) = block;
    arena->last = block;
    arena->bytes_reserved += block->size;
}

static size_t larger(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* A new block serves the request at its offset 0, whatever the alignment. */
static struct block *grow(tl_arena *arena, size_t n, size_t align)
{
    struct block *block =
        block_new(larger(n, arena->block_bytes), larger(align, TL_ARENA_DEFAULT_ALIGN));
    if (block)
        append_block(arena, block);
    return block;
}

/* Moves the position to the end of the request. */
static void *take(tl_arena *arena, struct block *block, size_t start, size_t n)
{
    arena->bytes_used += start + n - block->offset;
    arena->high_water = larger(arena->high_water, arena->bytes_used);
    block->offset = start + n;
    arena->current = block;
    return block->base + start;
}

/* ---- the public functions ---- */

tl_status tl_arena_create(size_t block_bytes, tl_arena **out)
{
    static const char fn[] = "tl_arena_create";
    if (!out)
        return tl_fail(TL_EINVAL, fn, "out is NULL");
    *out = NULL;
    size_t at, total;
    if (!block_footprint(block_bytes, &at, &total))
        return tl_fail(TL_EINVAL, fn, "block_bytes = %zu would wrap", block_bytes);
    tl_allocator owner;
    tl_arena *arena = tl_owned_alloc(sizeof *arena, alignof(tl_arena), &owner);
    if (!arena)
        return tl_fail(TL_ENOMEM, fn, "the allocator hook has no %zu bytes", sizeof *arena);
    *arena = (tl_arena){.block_bytes = block_bytes ? block_bytes : TL_ARENA_DEFAULT_BLOCK,
                        .owner = owner};
    *out = arena;
    return TL_OK;
}

static tl_status check_request(const char *fn, const tl_arena *arena, size_t n, size_t align)
{
    size_t at, total;
    if (!arena)
        return tl_fail(TL_EINVAL, fn, "arena is NULL");
    if (n == 0)
        return tl_fail(TL_EINVAL, fn, "n = 0 bytes asked for");
    if ((align & (align - 1)) != 0 || align > TL_ARENA_MAX_ALIGN)
        return tl_fail(TL_EINVAL, fn, "align = %zu is no power of two up to %zu", align,
                       TL_ARENA_MAX_ALIGN);
    if (!block_footprint(n, &at, &total))
        return tl_fail(TL_EINVAL, fn, "n = %zu bytes would wrap", n);
    return TL_OK;
}

void *tl_arena_alloc(tl_arena *arena, size_t n, size_t align)
{
    static const char fn[] = "tl_arena_alloc";
    if (check_request(fn, arena, n, align) != TL_OK)
        return NULL;
    if (align == 0)
        align = TL_ARENA_DEFAULT_ALIGN;
    size_t start = 0;
    struct block *block = find_block(arena, n, align, &start);
    if (!block) {
        start = 0;
        block = grow(arena, n, align);
    }
    if (!block) {
        tl_fail(TL_ENOMEM, fn,
                "the allocator hook has no block for n = %zu, align = %zu, block_bytes = %zu", n,
                align, arena->block_bytes);
        return NULL;
    }
    return take(arena, block, start, n);
}

static tl_arena_mark position(const tl_arena *arena)
{
    const struct block *block = arena->current;
    return block ? (tl_arena_mark){.offset = block->offset, .block = block->number}
                 : (tl_arena_mark){0, 0};
}

tl_arena_mark tl_arena_mark_get(const tl_arena *arena)
{
    if (!arena) {
        tl_fail(TL_EINVAL, "tl_arena_mark_get", "arena is NULL");
        return (tl_arena_mark){0, 0};
    }
    return position(arena);
}

/* Empties the current block down to `offset`. */
static void release_down_to(tl_arena *arena, size_t offset)
{
    arena->bytes_used -= arena->current->offset - offset;
    arena->current->offset = offset;
}

void tl_arena_reset_to(tl_arena *arena, tl_arena_mark mark)
{
    static const char fn[] = "tl_arena_reset_to";
    if (!arena) {
        tl_fail(TL_EINVAL, fn, "arena is NULL");
        return;
    }
    const tl_arena_mark now = position(arena);
    if (mark.block > now.block || (mark.block == now.block && mark.offset > now.offset)) {
        tl_fail(
            TL_EINVAL, fn,
            "the mark (block %zu, offset %zu) is later than the position (block %zu, offset %zu)",
            mark.block, mark.offset, now.block, now.offset);
        return;
    }
    if (!arena->current)
        return;
    for (; arena->current->number > mark.block; arena->current = arena->current->prev)
        release_down_to(arena, 0);
    /* A mark that an earlier reset has passed may lie beyond where its block was left since:
     * nothing to release. */
    if (mark.offset < arena->current->offset)
        release_down_to(arena, mark.offset);
}

void tl_arena_stats_get(const tl_arena *arena, tl_arena_stats *out)
{
    if (!arena || !out) {
        tl_fail(TL_EINVAL, "tl_arena_stats_get", "%s is NULL", arena ? "out" : "arena");
        return;
    }
    *out = (tl_arena_stats){arena->bytes_used, arena->bytes_reserved, arena->high_water,
                            arena->n_blocks};
}

void tl_arena_destroy(tl_arena *arena)
{
    if (!arena)
        return;
    for (struct block *block = arena->first, *next; block; block = next) {
        next = block->next;
        block_free(block);
    }
    const tl_allocator owner = arena->owner;
    tl_owned_free(&owner, arena);
}
