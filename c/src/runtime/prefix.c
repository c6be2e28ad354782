/* SPDX-License-Identifier: MIT */
/* prefix.c: the prefix index: which blocks of a pool hold which tokens.
 *
 * Words. node: the record of a block that is in the index; records are as many as the pool's
 * blocks, and not initialised while their block is not in it. space: the record of a namespace.
 * siblings: the nodes behind one node, or the first ones of a space, as a tree in order of their
 * tokens. out: used as the pool counts, that is, not in its list of cached blocks.
 *
 * A node is cached exactly when it has no reference and none of its children is out. So whoever is
 * cached has everything behind it cached as well, and before it in the pool's list: the oldest
 * cached block has nothing behind it. Every node keeps how many of its children are out. */
#include <inttypes.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "runtime/fail.h"
#include "runtime/kv_inner.h"
#include "runtime/prefix_inner.h"
#include "runtime/prefix_tree.h"

struct node {
    struct tree tree; /* among its siblings; first, so that it leads to the node */
    struct tree *behind;
    struct space *space;
    int64_t cached_at; /* nanoseconds of the monotonic clock */
    uint32_t parent, depth, n_out, pins;
};

struct space {
    struct tree tree; /* among the spaces; first */
    struct tree *first;
    uint64_t n_blocks; /* at least one */
    tl_allocator owner;
    size_t n_bytes;
    unsigned char bytes[];
};

struct tl_prefix {
    tl_kv_pool *kv; /* NULL once it is gone */
    uint32_t block_tokens;
    uint64_t random;
    struct tree *spaces; /* in order of length, then bytes */
    tl_prefix_stats stats;
    tl_allocator owner;
    uint32_t *tokens;             /* [n_blocks][block_tokens] */
    _Alignas(64) struct node node[]; /* [n_blocks] */
};

_Static_assert(sizeof(struct node) == 64, "a node is a cache line");
_Static_assert(sizeof(tl_prefix_stats) == 72 && sizeof(tl_prefix_block) == 40, "layouts are ABI");
_Static_assert(TL_PREFIX_NONE == KV_NONE, "one name for no block");

/* ---- order ---- */

static uint32_t id_of(const tl_prefix *px, const struct tree *tree)
{
    return (uint32_t)((const struct node *)(const void *)tree - px->node);
}

static uint32_t *tokens_of(const tl_prefix *px, uint32_t id)
{
    return px->tokens + (size_t)id * px->block_tokens;
}

/* How many tokens a and b, of n each, begin with in common. */
static uint32_t common_tokens(const uint32_t *a, const uint32_t *b, uint32_t n)
{
    uint32_t i = 0;
    while (i < n && a[i] == b[i])
        i++;
    return i;
}

struct block_key {
    const tl_prefix *px;
    const uint32_t *tokens; /* a block's */
};

static int compare_block(const void *key_, const struct tree *tree)
{
    const struct block_key *key = key_;
    const uint32_t *theirs = tokens_of(key->px, id_of(key->px, tree)), n = key->px->block_tokens,
                   i = common_tokens(key->tokens, theirs, n);
    return i == n ? 0 : key->tokens[i] < theirs[i] ? -1 : 1;
}

struct name {
    const void *bytes;
    size_t n;
};

static int compare_space(const void *key, const struct tree *tree)
{
    const struct name *name = key;
    const struct space *space = (const void *)tree;
    if (name->n != space->n_bytes)
        return name->n < space->n_bytes ? -1 : 1;
    return name->n == 0 ? 0 : memcmp(name->bytes, space->bytes, name->n);
}

/* splitmix64 from a secret state. */
static uint64_t next_priority(tl_prefix *px)
{
    uint64_t x = px->random += 0x9E3779B97F4A7C15u;
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

/* ---- finding ---- */

static struct space *find_space(const tl_prefix *px, const struct name *name)
{
    struct tree *at = px->spaces;
    for (int order; at && (order = compare_space(name, at)) != 0;)
        at = order < 0 ? at->left : at->right;
    return (struct space *)(void *)at;
}

struct found {
    uint32_t id, common; /* common 0: none, and no id */
};

/* Of some siblings the one that begins with most of n tokens, 1 .. block_tokens. Those with most in
 * common stand next to where the tokens would: just before, which is taken where both have as many,
 * or just after. */
static struct found find_closest(const tl_prefix *px, const struct tree *siblings,
                                 const uint32_t *tokens, uint32_t n)
{
    struct found before = {KV_NONE, 0}, after = {KV_NONE, 0};
    while (siblings) {
        const uint32_t id = id_of(px, siblings), *theirs = tokens_of(px, id),
                       common = common_tokens(tokens, theirs, n);
        if (common == px->block_tokens)
            return (struct found){id, common};
        if (common == n || tokens[common] < theirs[common]) {
            after = (struct found){id, common};
            siblings = siblings->left;
        } else {
            before = (struct found){id, common};
            siblings = siblings->right;
        }
    }
    return before.common >= after.common ? before : after;
}

/* The one of some siblings with these block_tokens tokens, or KV_NONE. */
static uint32_t find_block(const tl_prefix *px, const struct tree *siblings, const uint32_t *tokens)
{
    const struct found found = find_closest(px, siblings, tokens, px->block_tokens);
    return found.common == px->block_tokens ? found.id : KV_NONE;
}

/* How many of n tokens there are, their blocks into block_table unless it is NULL. */
static int64_t find_prefix(const tl_prefix *px, const struct name *name, const uint32_t *tokens,
                           int64_t n, uint32_t *block_table)
{
    const struct space *space = find_space(px, name);
    const struct tree *siblings = space ? space->first : NULL;
    const uint32_t b = px->block_tokens;
    int64_t at = 0;
    for (size_t i = 0; at < n; i++) {
        const uint32_t want = n - at < b ? (uint32_t)(n - at) : b;
        const struct found found = find_closest(px, siblings, tokens + at, want);
        if (found.common == 0 || px->kv->block[found.id].refs == TL_KV_MAX_REFS)
            break;
        if (block_table)
            block_table[i] = found.id;
        at += found.common;
        if (found.common < b)
            break;
        siblings = px->node[found.id].behind;
    }
    return at;
}

/* The last of the n blocks that hold tokens[n * block_tokens], n > 0, or KV_NONE. */
static uint32_t find_path(const tl_prefix *px, const struct name *name, const uint32_t *tokens,
                          int64_t n)
{
    const struct space *space = find_space(px, name);
    const struct tree *siblings = space ? space->first : NULL;
    uint32_t id = KV_NONE;
    for (int64_t i = 0; i < n; i++, tokens += px->block_tokens) {
        id = find_block(px, siblings, tokens);
        if (id == KV_NONE)
            break;
        siblings = px->node[id].behind;
    }
    return id;
}

/* ---- used and cached ---- */

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

/* One more block right behind `id` is out: so are `id` and those in front of it. */
static void child_went_out(tl_prefix *px, uint32_t id)
{
    while (id != KV_NONE && px->node[id].n_out++ == 0 && px->kv->block[id].refs == 0) {
        tl_kv_revive(px->kv, id);
        id = px->node[id].parent;
    }
}

static void take_reference(tl_prefix *px, uint32_t id)
{
    if (px->kv->block[id].refs++ == 0 && px->node[id].n_out == 0) {
        tl_kv_revive(px->kv, id);
        child_went_out(px, px->node[id].parent);
    }
}

static void give_reference(tl_prefix *px, uint32_t id)
{
    if (--px->kv->block[id].refs == 0)
        tl_prefix_retire(px, id);
}

void tl_prefix_retire(tl_prefix *px, uint32_t id)
{
    if (px->node[id].n_out > 0)
        return;
    const int64_t now = now_ns();
    do {
        px->node[id].cached_at = now;
        tl_kv_cache(px->kv, id);
        id = px->node[id].parent;
    } while (id != KV_NONE && --px->node[id].n_out == 0 && px->kv->block[id].refs == 0);
}

uint32_t tl_prefix_pins(const tl_prefix *px, uint32_t id)
{
    return px->node[id].pins;
}

/* ---- entering and leaving ---- */

/* Where the siblings behind a block hang, or the first ones of a space. */
static struct tree **siblings_behind(tl_prefix *px, struct space *space, uint32_t parent)
{
    return parent == KV_NONE ? &space->first : &px->node[parent].behind;
}

static struct space *new_space(tl_prefix *px, const struct name *name)
{
    size_t size;
    tl_allocator owner;
    if (!tl_add_size(sizeof(struct space), name->n, &size))
        return NULL;
    struct space *space = tl_owned_alloc(size, _Alignof(struct space), &owner);
    if (!space)
        return NULL;
    *space = (struct space){
        .tree.priority = next_priority(px), .owner = owner, .n_bytes = name->n};
    if (name->n > 0)
        memcpy(space->bytes, name->bytes, name->n);
    tree_insert(&px->spaces, &space->tree, name, compare_space);
    px->stats.namespaces++;
    return space;
}

static void free_space(tl_prefix *px, struct space *space)
{
    const struct name name = {space->bytes, space->n_bytes};
    const tl_allocator owner = space->owner;
    tree_remove(&px->spaces, &space->tree, &name, compare_space);
    px->stats.namespaces--;
    tl_owned_free(&owner, space);
}

/* Enters a used block that is in no index. */
static void enter(tl_prefix *px, struct space *space, uint32_t parent, uint32_t id,
                  const uint32_t *tokens)
{
    struct node *node = &px->node[id];
    const struct block_key key = {px, tokens};
    *node = (struct node){.tree.priority = next_priority(px),
                          .space = space,
                          .parent = parent,
                          .depth = parent == KV_NONE ? 0 : px->node[parent].depth + 1};
    memcpy(tokens_of(px, id), tokens, px->block_tokens * sizeof *tokens);
    tree_insert(siblings_behind(px, space, parent), &node->tree, &key, compare_block);
    px->kv->block[id].chain = id;
    space->n_blocks++;
    px->stats.blocks++;
    child_went_out(px, parent);
}

void tl_prefix_evict(tl_prefix *px, uint32_t id)
{
    const struct node *node = &px->node[id];
    const struct block_key key = {px, tokens_of(px, id)};
    px->stats.last_age_ns = (uint64_t)(now_ns() - node->cached_at);
    px->stats.age_ns += px->stats.last_age_ns;
    px->stats.evictions++;
    px->stats.blocks--;
    tree_remove(siblings_behind(px, node->space, node->parent), &node->tree, &key, compare_block);
    px->kv->block[id].chain = KV_NONE;
    if (--node->space->n_blocks == 0)
        free_space(px, node->space);
}

/* A block of a space that goes leaves the index: it keeps what references are no pins. */
static void let_go(tl_prefix *px, uint32_t id)
{
    const struct node *node = &px->node[id];
    struct kv_block *block = &px->kv->block[id];
    if (block->refs == 0 && node->n_out == 0)
        tl_kv_revive(px->kv, id);
    block->chain = KV_NONE;
    block->refs -= node->pins;
    px->stats.pins -= node->pins;
    px->stats.blocks--;
    if (block->refs == 0)
        tl_kv_release(px->kv, id);
}

/* One more tree of siblings to let go, on a stack through the parents of their roots. */
static void push(tl_prefix *px, struct tree *siblings, uint32_t *top)
{
    if (siblings) {
        const uint32_t id = id_of(px, siblings);
        px->node[id].parent = *top;
        *top = id;
    }
}

static void drop_space(tl_prefix *px, struct space *space)
{
    uint32_t top = KV_NONE;
    push(px, px->kv ? space->first : NULL, &top);
    while (top != KV_NONE) {
        const uint32_t id = top;
        const struct node *node = &px->node[id];
        top = node->parent;
        push(px, node->tree.left, &top);
        push(px, node->tree.right, &top);
        push(px, node->behind, &top);
        let_go(px, id);
    }
    free_space(px, space);
}

/* ---- making an index ---- */

/* False where a size would wrap, or pass what a pointer difference can hold. */
static bool measure(const tl_kv_cfg *cfg, size_t *records, size_t *bytes)
{
    size_t tokens;
    return tl_mul_size(cfg->n_blocks, sizeof(struct node), records) &&
           tl_add_size(*records, sizeof(tl_prefix), records) &&
           tl_mul_size(cfg->n_blocks, sizeof(uint32_t), &tokens) &&
           tl_mul_size(tokens, cfg->block_tokens, &tokens) &&
           tl_add_size(*records, tokens, bytes) && *bytes <= PTRDIFF_MAX;
}

/* Where the system has no random numbers, what nobody outside the process can see. */
static uint64_t random_seed(const tl_prefix *px)
{
    uint64_t seed;
    if (getentropy(&seed, sizeof seed) != 0)
        seed = (uint64_t)now_ns() * 0x9E3779B97F4A7C15u ^ (uintptr_t)px ^ (uintptr_t)&seed << 20;
    return seed;
}

tl_status tl_prefix_create(tl_kv_pool *kv, tl_prefix **out)
{
    static const char fn[] = "tl_prefix_create";
    size_t records, bytes;
    tl_allocator owner;
    if (!out)
        return tl_fail(TL_EINVAL, fn, "out is NULL");
    *out = NULL;
    if (!kv)
        return tl_fail(TL_EINVAL, fn, "the pool is NULL");
    if (kv->prefix)
        return tl_fail(TL_EBUSY, fn, "the pool has an index, and one is the most");
    if (!measure(&kv->cfg, &records, &bytes))
        return tl_fail(TL_EINVAL, fn, "the tokens of %u blocks of %u pass the address space",
                       kv->cfg.n_blocks, kv->cfg.block_tokens);
    tl_prefix *px = tl_owned_alloc(bytes, TL_KV_ALIGN, &owner);
    if (!px)
        return tl_fail(TL_ENOMEM, fn, "no %zu bytes for the tokens of %u blocks of %u", bytes,
                       kv->cfg.n_blocks, kv->cfg.block_tokens);
    *px = (tl_prefix){.kv = kv,
                      .block_tokens = kv->cfg.block_tokens,
                      .random = random_seed(px),
                      .owner = owner,
                      .tokens = (uint32_t *)(void *)((unsigned char *)px + records)};
    kv->prefix = px;
    *out = px;
    return TL_OK;
}

void tl_prefix_detach(tl_prefix *px)
{
    px->kv = NULL;
}

void tl_prefix_destroy(tl_prefix *px)
{
    if (!px)
        return;
    while (px->spaces)
        drop_space(px, (struct space *)(void *)px->spaces);
    if (px->kv)
        px->kv->prefix = NULL;
    const tl_allocator owner = px->owner;
    tl_owned_free(&owner, px);
}

/* ---- checks at the public edge ---- */

static tl_status check_name(const char *fn, const tl_prefix *px, const struct name *name)
{
    if (!px)
        return tl_fail(TL_EINVAL, fn, "the index is NULL");
    if (!name->bytes && name->n > 0)
        return tl_fail(TL_EINVAL, fn, "ns is NULL with ns_bytes = %zu", name->n);
    return TL_OK;
}

static tl_status check_pool(const char *fn, const tl_prefix *px)
{
    return px->kv ? TL_OK : tl_fail(TL_EINVAL, fn, "the pool of this index is gone");
}

/* The question of tl_prefix_match and tl_prefix_peek. */
static tl_status check_question(const char *fn, const tl_prefix *px, const struct name *name,
                                const int64_t *n_found, int64_t n_tokens, bool tokens, bool table)
{
    TL_TRY(check_name(fn, px, name));
    if (!n_found)
        return tl_fail(TL_EINVAL, fn, "n_found is NULL");
    if (n_tokens < 0)
        return tl_fail_i64(TL_EINVAL, fn, "n_tokens = %lld is negative", n_tokens);
    if (n_tokens > 0 && (!tokens || !table))
        return tl_fail(TL_EINVAL, fn, "%s is NULL with n_tokens = %" PRId64,
                       tokens ? "block_table" : "tokens", n_tokens);
    return check_pool(fn, px);
}

/* ---- asking ---- */

tl_status tl_prefix_match(tl_prefix *px, const void *ns, size_t ns_bytes, const uint32_t *tokens,
                          int64_t n_tokens, uint32_t *block_table, int64_t *n_found)
{
    const struct name name = {ns, ns_bytes};
    TL_TRY(check_question("tl_prefix_match", px, &name, n_found, n_tokens, tokens, block_table));
    const int64_t found = find_prefix(px, &name, tokens, n_tokens, block_table);
    for (int64_t i = 0; i * px->block_tokens < found; i++)
        take_reference(px, block_table[i]);
    px->stats.queries++;
    px->stats.tokens_asked += (uint64_t)n_tokens;
    px->stats.tokens_found += (uint64_t)found;
    *n_found = found;
    return TL_OK;
}

tl_status tl_prefix_peek(const tl_prefix *px, const void *ns, size_t ns_bytes,
                         const uint32_t *tokens, int64_t n_tokens, int64_t *n_found)
{
    const struct name name = {ns, ns_bytes};
    TL_TRY(check_question("tl_prefix_peek", px, &name, n_found, n_tokens, tokens, true));
    *n_found = find_prefix(px, &name, tokens, n_tokens, NULL);
    return TL_OK;
}

/* ---- inserting ---- */

/* The arguments of tl_prefix_insert. */
struct insert {
    tl_prefix *px;
    struct name name;
    const uint32_t *tokens;
    int64_t first, n;
    const uint32_t *table;
};

static const char insert_fn[] = "tl_prefix_insert";

static const uint32_t *tokens_at(const struct insert *in, int64_t i)
{
    return in->tokens + i * in->px->block_tokens;
}

static tl_status check_range(const struct insert *in)
{
    size_t end, tokens;
    if (in->first < 0 || in->n < 0)
        return tl_fail_i64(TL_EINVAL, insert_fn, "first = %lld, n = %lld", in->first, in->n);
    if (!tl_add_size((size_t)in->first, (size_t)in->n, &end) ||
        !tl_mul_size(end, sizeof(uint32_t), &tokens) ||
        !tl_mul_size(tokens, in->px->block_tokens, &tokens) || tokens > PTRDIFF_MAX)
        return tl_fail_i64(TL_EINVAL, insert_fn,
                           "first = %lld, n = %lld blocks of %lld tokens pass the address space",
                           in->first, in->n, in->px->block_tokens);
    return TL_OK;
}

/* Whether the block in front of the new ones, where there is one, is at that place. */
static tl_status check_front(const struct insert *in, const struct space *space)
{
    if (in->first == 0)
        return TL_OK;
    const tl_kv_pool *kv = in->px->kv;
    const uint32_t id = in->table[in->first - 1];
    const int64_t at = in->first - 1;
    if (id >= kv->n_touched || !kv_in_prefix(kv, id))
        return tl_fail_i64(TL_EINVAL, insert_fn, "block_table[%lld] = %lld is not in the index", at,
                           id);
    const struct node *node = &in->px->node[id];
    if (node->space != space)
        return tl_fail_i64(TL_EINVAL, insert_fn, "block_table[%lld] = %lld is in another namespace",
                           at, id);
    if (node->depth != at)
        return tl_fail_i64(TL_EINVAL, insert_fn,
                           "block_table[%lld] = %lld has %lld blocks in front of it in the index",
                           at, id, node->depth);
    return TL_OK;
}

/* Leaves in each block, in `prev`, which is free for notes, which of the new ones it is; so one
 * whose note names an earlier one stands there twice. */
static tl_status check_blocks(const struct insert *in)
{
    tl_kv_pool *kv = in->px->kv;
    const uint32_t *ids = in->table + in->first;
    for (int64_t i = 0; i < in->n; i++) {
        const int64_t at = in->first + i;
        const uint32_t id = ids[i];
        if (id >= kv->cfg.n_blocks)
            return tl_fail_i64(TL_EINVAL, insert_fn,
                               "block_table[%lld] = %lld is out of range: the pool has %lld", at,
                               id, kv->cfg.n_blocks);
        if (kv_refs(kv, id) == 0)
            return tl_fail_i64(TL_EINVAL, insert_fn, "block_table[%lld] = %lld is not used", at,
                               id);
        struct kv_block *block = &kv->block[id];
        if (block->fill != kv->cfg.block_tokens)
            return tl_fail_i64(TL_EINVAL, insert_fn,
                               "block_table[%lld] = %lld holds %lld tokens of %lld", at, id,
                               block->fill, kv->cfg.block_tokens);
        if (block->prev < i && ids[block->prev] == id)
            return tl_fail_i64(TL_EINVAL, insert_fn,
                               "block_table[%lld] and block_table[%lld] are both block %lld",
                               in->first + block->prev, at, id);
        block->prev = (uint32_t)i; /* is not cut: of more blocks than there are one comes twice */
    }
    return TL_OK;
}

/* Whether each of them is in no index, or at its place already. */
static tl_status check_places(const struct insert *in, struct space *space)
{
    tl_prefix *px = in->px;
    const tl_kv_pool *kv = px->kv;
    const struct tree *siblings = NULL;
    if (space)
        siblings = *siblings_behind(px, space, in->first ? in->table[in->first - 1] : KV_NONE);
    for (int64_t i = 0; i < in->n; i++) {
        const uint32_t id = in->table[in->first + i],
                       there = find_block(px, siblings, tokens_at(in, i));
        if (kv->block[id].hash != 0)
            return tl_fail(TL_EBUSY, insert_fn,
                           "block_table[%" PRId64 "] = %u is registered under 0x%016" PRIx64,
                           in->first + i, id, kv->block[id].hash);
        if (kv_in_prefix(kv, id) && there != id)
            return tl_fail_i64(TL_EBUSY, insert_fn,
                               "block_table[%lld] = %lld is in the index at another place",
                               in->first + i, id);
        siblings = there == KV_NONE ? NULL : px->node[there].behind;
    }
    return TL_OK;
}

/* Enters what is not there; the twin of each block into twins, where the caller wants them and can
 * have a reference. The last block that stands at these places afterwards. */
static uint32_t enter_all(const struct insert *in, struct space *space, uint32_t *twins)
{
    tl_prefix *px = in->px;
    uint32_t parent = in->first ? in->table[in->first - 1] : KV_NONE;
    for (int64_t i = 0; i < in->n; i++) {
        const uint32_t id = in->table[in->first + i], *tokens = tokens_at(in, i);
        uint32_t there = find_block(px, *siblings_behind(px, space, parent), tokens);
        if (there == KV_NONE)
            enter(px, space, parent, there = id, tokens);
        if (twins) {
            const bool twin = there != id && px->kv->block[there].refs != TL_KV_MAX_REFS;
            twins[i] = twin ? there : KV_NONE;
            if (twin)
                take_reference(px, there);
        }
        parent = there;
    }
    return parent;
}

tl_status tl_prefix_insert(tl_prefix *px, const void *ns, size_t ns_bytes, const uint32_t *tokens,
                           int64_t first, int64_t n, const uint32_t *block_table, uint32_t *twins)
{
    const struct insert in = {px, {ns, ns_bytes}, tokens, first, n, block_table};
    TL_TRY(check_name(insert_fn, px, &in.name));
    TL_TRY(check_pool(insert_fn, px));
    TL_TRY(check_range(&in));
    if (n == 0)
        return TL_OK;
    if (!tokens || !block_table)
        return tl_fail(TL_EINVAL, insert_fn, "%s is NULL", tokens ? "block_table" : "tokens");
    struct space *space = find_space(px, &in.name);
    TL_TRY(check_front(&in, space));
    TL_TRY(check_blocks(&in));
    TL_TRY(check_places(&in, space));
    if (!space && !(space = new_space(px, &in.name)))
        return tl_fail(TL_ENOMEM, insert_fn, "no memory for a namespace of %zu bytes", ns_bytes);
    const uint32_t last = enter_all(&in, space, twins);
    if (px->kv->block[last].refs == 0) { /* it was used just now, and all in front of it */
        take_reference(px, last);
        give_reference(px, last);
    }
    return TL_OK;
}

/* ---- pins ---- */

static tl_status check_path(const char *fn, const tl_prefix *px, const struct name *name,
                            const uint32_t *tokens, int64_t n_tokens)
{
    TL_TRY(check_name(fn, px, name));
    TL_TRY(check_pool(fn, px));
    if (n_tokens < px->block_tokens)
        return tl_fail_i64(TL_EINVAL, fn, "n_tokens = %lld is below a block's %lld", n_tokens,
                           px->block_tokens);
    return tokens ? TL_OK : tl_fail(TL_EINVAL, fn, "tokens is NULL");
}

tl_status tl_prefix_pin(tl_prefix *px, const void *ns, size_t ns_bytes, const uint32_t *tokens,
                        int64_t n_tokens)
{
    static const char fn[] = "tl_prefix_pin";
    const struct name name = {ns, ns_bytes};
    TL_TRY(check_path(fn, px, &name, tokens, n_tokens));
    const uint32_t id = find_path(px, &name, tokens, n_tokens / px->block_tokens);
    if (id == KV_NONE)
        return TL_ENOTFOUND;
    if (px->kv->block[id].refs == TL_KV_MAX_REFS)
        return tl_fail(TL_EFULL, fn, "block %u has %u references, the most there can be", id,
                       TL_KV_MAX_REFS);
    take_reference(px, id);
    px->node[id].pins++;
    px->stats.pins++;
    return TL_OK;
}

tl_status tl_prefix_unpin(tl_prefix *px, const void *ns, size_t ns_bytes, const uint32_t *tokens,
                          int64_t n_tokens)
{
    const struct name name = {ns, ns_bytes};
    TL_TRY(check_path("tl_prefix_unpin", px, &name, tokens, n_tokens));
    const uint32_t id = find_path(px, &name, tokens, n_tokens / px->block_tokens);
    if (id == KV_NONE || px->node[id].pins == 0)
        return TL_ENOTFOUND;
    px->node[id].pins--;
    px->stats.pins--;
    give_reference(px, id);
    return TL_OK;
}

/* ---- forgetting, looking ---- */

tl_status tl_prefix_drop(tl_prefix *px, const void *ns, size_t ns_bytes)
{
    static const char fn[] = "tl_prefix_drop";
    const struct name name = {ns, ns_bytes};
    TL_TRY(check_name(fn, px, &name));
    TL_TRY(check_pool(fn, px));
    struct space *space = find_space(px, &name);
    if (space)
        drop_space(px, space);
    return TL_OK;
}

tl_status tl_prefix_block_get(const tl_prefix *px, uint32_t id, tl_prefix_block *out)
{
    static const char fn[] = "tl_prefix_block_get";
    if (!px || !out)
        return tl_fail(TL_EINVAL, fn, "%s is NULL", px ? "out" : "the index");
    TL_TRY(check_pool(fn, px));
    if (id >= px->kv->cfg.n_blocks)
        return tl_fail(TL_EINVAL, fn, "block %u is out of range: the pool has %u", id,
                       px->kv->cfg.n_blocks);
    if (id >= px->kv->n_touched || !kv_in_prefix(px->kv, id))
        return TL_ENOTFOUND;
    const struct node *node = &px->node[id];
    *out = (tl_prefix_block){.ns = node->space->bytes,
                             .ns_bytes = node->space->n_bytes,
                             .tokens = tokens_of(px, id),
                             .depth = node->depth,
                             .parent = node->parent,
                             .pins = node->pins};
    return TL_OK;
}

void tl_prefix_stats_get(const tl_prefix *px, tl_prefix_stats *out)
{
    static const char fn[] = "tl_prefix_stats_get";
    if (!px || !out)
        (void)tl_fail(TL_EINVAL, fn, "%s is NULL", px ? "out" : "the index");
    else if (check_pool(fn, px) == TL_OK)
        *out = px->stats;
}
