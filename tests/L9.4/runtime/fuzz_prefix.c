/* SPDX-License-Identifier: MIT */
/* fuzz_prefix.c: libFuzzer on the prefix index. The input is calls on a small pool, by a caller who
 * gives back only what he holds: holds[id] says how many references those are. After each call the
 * states add up, whoever is held has all that is in front of him, and what peek finds is what the
 * blocks say they hold. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "tinyllm/prefix.h"

enum { N_BLOCKS = 12, MOST_B = 3, MOST = 5 }; /* MOST: blocks of a table */

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

struct fuzz {
    const uint8_t *at, *end;
    tl_kv_pool *kv;
    tl_prefix *px;
    uint32_t b, holds[N_BLOCKS], table[MOST], tokens[MOST * MOST_B];
    char ns[2];
    size_t ns_bytes;
};

#define MUST(cond)       \
    do {                 \
        if (!(cond))     \
            abort();     \
    } while (0)

static uint8_t next(struct fuzz *f)
{
    return f->at < f->end ? *f->at++ : 0;
}

/* ---- what is so after every call ---- */

static void check_entry(const struct fuzz *f, uint32_t id, const tl_prefix_block *block)
{
    tl_prefix_block front;
    tl_kv_block mine, of_front;
    MUST(tl_kv_blocks_get(f->kv, id, 1, &mine) == TL_OK && mine.hash == TL_KV_HASH_PREFIX);
    MUST(mine.fill == f->b && mine.refs == f->holds[id] + block->pins);
    MUST((block->parent == TL_PREFIX_NONE) == (block->depth == 0));
    if (block->depth == 0)
        return;
    MUST(tl_prefix_block_get(f->px, block->parent, &front) == TL_OK);
    MUST(front.depth == block->depth - 1 && front.ns == block->ns);
    MUST(tl_kv_blocks_get(f->kv, block->parent, 1, &of_front) == TL_OK);
}

/* The tokens of a block and of those in front of it are found, as they are. */
static void check_found(const struct fuzz *f, const tl_prefix_block *block)
{
    uint32_t tokens[N_BLOCKS * MOST_B];
    tl_prefix_block at = *block;
    int64_t found;
    const int64_t n = (block->depth + 1) * f->b;
    for (;;) {
        memcpy(tokens + at.depth * f->b, at.tokens, f->b * sizeof *tokens);
        if (at.depth == 0)
            break;
        MUST(tl_prefix_block_get(f->px, at.parent, &at) == TL_OK);
    }
    MUST(tl_prefix_peek(f->px, block->ns, block->ns_bytes, tokens, n, &found) == TL_OK);
    MUST(found == n);
}

/* Nobody is cached who has a used block behind him, nor before one behind him. */
static void check_order(const struct fuzz *f, uint32_t n_cached)
{
    uint32_t ids[N_BLOCKS], place[N_BLOCKS], n;
    memset(place, 0, sizeof place);
    MUST(tl_kv_oldest(f->kv, N_BLOCKS, ids, &n) == TL_OK && n == n_cached);
    for (uint32_t i = 0; i < n; i++)
        place[ids[i]] = i + 1;
    for (uint32_t id = 0; id < N_BLOCKS; id++) {
        tl_prefix_block block;
        if (tl_prefix_block_get(f->px, id, &block) != TL_OK || block.parent == TL_PREFIX_NONE)
            continue;
        const uint32_t front = place[block.parent];
        MUST(front == 0 || (place[id] != 0 && place[id] < front));
    }
}

static void check_all(const struct fuzz *f)
{
    tl_kv_stats stats;
    tl_prefix_stats px;
    uint64_t blocks = 0, pins = 0;
    tl_kv_stats_get(f->kv, &stats);
    tl_prefix_stats_get(f->px, &px);
    MUST(stats.free + stats.used + stats.cached == N_BLOCKS);
    for (uint32_t id = 0; id < N_BLOCKS; id++) {
        tl_prefix_block block;
        if (tl_prefix_block_get(f->px, id, &block) != TL_OK) {
            MUST(tl_kv_refs(f->kv, id) == f->holds[id]);
            continue;
        }
        blocks++, pins += block.pins;
        check_entry(f, id, &block);
        check_found(f, &block);
    }
    MUST(blocks == px.blocks && pins == px.pins && (blocks == 0) == (px.namespaces == 0));
    check_order(f, stats.cached);
}

/* ---- calls ---- */

static void alloc_one(struct fuzz *f)
{
    uint32_t id;
    const uint32_t fill = next(f) % 4 ? f->b : 0, slot = next(f) % MOST;
    if (tl_kv_alloc(f->kv, 1, &id) != TL_OK)
        return;
    MUST(f->holds[id] == 0);
    f->holds[id] = 1;
    f->table[slot] = id;
    MUST(tl_kv_set_fill(f->kv, id, fill) == TL_OK);
}

static void unref_one(struct fuzz *f)
{
    const uint32_t id = next(f) % N_BLOCKS;
    MUST((tl_kv_unref(f->kv, id) == TL_OK) == (f->holds[id] > 0));
    f->holds[id] -= f->holds[id] > 0;
}

static void match(struct fuzz *f)
{
    int64_t found;
    MUST(tl_prefix_match(f->px, f->ns, f->ns_bytes, f->tokens, next(f) % (MOST * f->b + 1),
                         f->table, &found) == TL_OK);
    for (int64_t i = 0; i * f->b < found; i++)
        f->holds[f->table[i]]++;
}

static void insert(struct fuzz *f)
{
    uint32_t twins[MOST];
    const uint8_t how = next(f);
    const int64_t first = how % 4, n = how / 4 % (MOST - first + 1);
    const tl_status status =
        tl_prefix_insert(f->px, f->ns, f->ns_bytes, f->tokens + first * f->b, first, n, f->table,
                         how & 128 ? twins : NULL);
    MUST(status == TL_OK || status == TL_EINVAL || status == TL_EBUSY);
    for (int64_t i = 0; status == TL_OK && how & 128 && i < n; i++)
        if (twins[i] != TL_PREFIX_NONE)
            f->holds[twins[i]]++;
}

static void change(struct fuzz *f)
{
    const uint8_t what = next(f);
    if (what < 64)
        f->tokens[what % (MOST * f->b)] = what / 32;
    else if (what < 96)
        f->table[what % MOST] = next(f) % (N_BLOCKS + 1);
    else
        f->ns_bytes = what % 3, f->ns[0] = what / 3 % 2, f->ns[1] = what / 6 % 2;
}

static void copy_one(struct fuzz *f)
{
    uint32_t copy;
    const uint32_t id = next(f) % N_BLOCKS;
    if (f->holds[id] == 0 || tl_kv_cow(f->kv, id, &copy) != TL_OK)
        return;
    f->holds[id]--, f->holds[copy]++;
}

static void call(struct fuzz *f)
{
    const uint8_t what = next(f);
    const int64_t n = what / 16 % (MOST * f->b + 1);
    switch (what % 16) {
    case 0: case 1: case 2: alloc_one(f); break;
    case 3: case 4: case 5: unref_one(f); break;
    case 6: case 7: match(f); break;
    case 8: case 9: case 10: insert(f); break;
    case 11: (void)tl_prefix_pin(f->px, f->ns, f->ns_bytes, f->tokens, n); break;
    case 12: (void)tl_prefix_unpin(f->px, f->ns, f->ns_bytes, f->tokens, n); break;
    case 13: copy_one(f); break;
    case 14:
        if (what == 14)
            MUST(tl_prefix_drop(f->px, f->ns, f->ns_bytes) == TL_OK);
        else if (f->holds[what / 16 % N_BLOCKS])
            (void)tl_kv_register(f->kv, what / 16 % N_BLOCKS, what / 64 + 1u);
        break;
    default: change(f);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct fuzz f = {.at = data, .end = data + size};
    f.b = 1 + next(&f) % MOST_B;
    const tl_kv_cfg cfg = {N_BLOCKS, f.b, 1, 1, 1, TL_F16, TL_KV_FORMAT_F16};
    MUST(tl_kv_pool_create(&cfg, &f.kv) == TL_OK && tl_prefix_create(f.kv, &f.px) == TL_OK);
    while (f.at < f.end) {
        call(&f);
        check_all(&f);
    }
    if (size % 2)
        tl_kv_pool_destroy(f.kv), tl_prefix_destroy(f.px);
    else
        tl_prefix_destroy(f.px), tl_kv_pool_destroy(f.kv);
    return 0;
}
