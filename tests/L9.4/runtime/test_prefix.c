/* SPDX-License-Identifier: MIT */
/* The prefix index by hand-made cases: what is found, what is kept and what goes first, and every
 * refusal. test_prefix_model.c holds it against a plain list under random calls. */
#include <pthread.h>
#include <time.h>

#include "kv_check.h"
#include "runtime/prefix_tree.h"
#include "tinyllm/prefix.h"

enum { b = 4 }; /* tokens of a block, but where a test says otherwise */

static tl_prefix *index_of(tl_kv_pool *kv)
{
    tl_prefix *px = NULL;
    CHECK_STATUS(tl_prefix_create(kv, &px), TL_OK);
    return px;
}

/* n used, full blocks. */
static void full_blocks(tl_kv_pool *kv, uint32_t n, uint32_t *ids)
{
    CHECK_STATUS(tl_kv_alloc(kv, n, ids), TL_OK);
    for (uint32_t i = 0; i < n; i++)
        CHECK_STATUS(tl_kv_set_fill(kv, ids[i], kv->cfg.block_tokens), TL_OK);
}

static void give_back(tl_kv_pool *kv, uint32_t n, const uint32_t *ids)
{
    for (uint32_t i = 0; i < n; i++)
        CHECK_STATUS(tl_kv_unref(kv, ids[i]), TL_OK);
}

/* Enters n blocks of tokens in namespace ns from the first on, in fresh blocks. */
static void enter_text(tl_kv_pool *kv, tl_prefix *px, const char *ns, const uint32_t *tokens,
                       uint32_t n, uint32_t *ids)
{
    full_blocks(kv, n, ids);
    CHECK_STATUS(tl_prefix_insert(px, ns, strlen(ns), tokens, 0, n, ids, NULL), TL_OK);
}

static int64_t peek(const tl_prefix *px, const char *ns, const uint32_t *tokens, int64_t n)
{
    int64_t found = -1;
    CHECK_STATUS(tl_prefix_peek(px, ns, strlen(ns), tokens, n, &found), TL_OK);
    return found;
}

static tl_prefix_stats prefix_stats(const tl_prefix *px)
{
    tl_prefix_stats stats;
    memset(&stats, 0xA5, sizeof stats);
    tl_prefix_stats_get(px, &stats);
    return stats;
}

static const uint32_t text[] = {5, 6, 7, 8, 5, 6, 7, 8, 5, 6, 7, 9, 1, 2, 3, 4};

TEST(a_match_finds_the_longest_prefix_to_the_token_and_takes_references)
{
    tl_kv_pool *kv = kv_new(8, b, 1, 1, 1);
    tl_prefix *px = index_of(kv);
    uint32_t ids[4], table[5];
    enter_text(kv, px, "", text, 4, ids);
    uint32_t asked[17];
    for (int64_t same = 0; same <= 16; same++) {
        for (int64_t n = same; n <= 17; n++) {
            for (int64_t i = 0; i < 17; i++)
                asked[i] = i < same ? text[i] : 77;
            memset(table, 0xA5, sizeof table);
            int64_t found = -1;
            CHECK(peek(px, "", asked, n) == same, "peek");
            CHECK_STATUS(tl_prefix_match(px, NULL, 0, asked, n, table, &found), TL_OK);
            CHECK(found == same, "%lld of %lld, found %lld", (long long)same, (long long)n,
                  (long long)found);
            for (uint32_t i = 0; i < 5; i++) {
                const bool written = i * b < same;
                CHECK(table[i] == (written ? ids[i] : 0xA5A5A5A5u), "entry %u", i);
                CHECK(i == 4 || tl_kv_refs(kv, ids[i]) == 1u + written, "block %u", i);
            }
            give_back(kv, (uint32_t)(same + b - 1) / b, table);
        }
    }
    CHECK_STATS(kv, 4u, 4u, 0u, 0u);
    give_back(kv, 4, ids);
    CHECK_STATS(kv, 4u, 0u, 4u, 0u);
    tl_prefix_destroy(px);
    CHECK_STATS(kv, 8u, 0u, 0u, 0u);
    tl_kv_pool_destroy(kv);
}

/* One that ends inside a block, among siblings of which several have as much in common. */
TEST(of_several_that_go_on_alike_the_one_just_before_is_taken_whatever_came_first)
{
    static const uint32_t siblings[6][2] = {{1, 1}, {1, 4}, {1, 6}, {1, 9}, {2, 1}, {0, 9}};
    static const struct {
        uint32_t asked[2], n, found, of;
    } cases[] = {{{1, 5}, 2, 1, 1}, {{1, 7}, 2, 1, 2}, {{1, 0}, 2, 1, 0}, {{1, 99}, 2, 1, 3},
                 {{1, 0}, 1, 1, 0}, {{2, 0}, 2, 1, 4}, {{2, 9}, 1, 1, 4}, {{0, 1}, 2, 1, 5},
                 {{1, 6}, 2, 2, 2}, {{3, 1}, 2, 0, 0}};
    uint64_t rng = 5;
    for (int turn = 0; turn < 40; turn++) {
        tl_kv_pool *kv = kv_new(8, 2, 1, 1, 1);
        tl_prefix *px = index_of(kv);
        uint32_t ids[6], order[6] = {0, 1, 2, 3, 4, 5};
        for (int64_t i = 5; i > 0; i--) {
            const int64_t k = rng_below(&rng, i + 1);
            const uint32_t last = order[i];
            order[i] = order[k], order[k] = last;
        }
        for (int i = 0; i < 6; i++)
            enter_text(kv, px, "", siblings[order[i]], 1, &ids[order[i]]);
        for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
            uint32_t id = KV_NONE;
            int64_t found = -1;
            CHECK_STATUS(
                tl_prefix_match(px, "", 0, cases[i].asked, cases[i].n, &id, &found), TL_OK);
            CHECK(found == cases[i].found && id == (found ? ids[cases[i].of] : KV_NONE),
                  "case %zu: %d tokens of block %u, turn %d", i, (int)found, id, turn);
            if (found)
                give_back(kv, 1, &id);
        }
        tl_prefix_destroy(px);
        tl_kv_pool_destroy(kv);
    }
}

TEST(nothing_is_found_in_another_namespace)
{
    static const struct {
        const char *bytes;
        size_t n;
    } ns[] = {{NULL, 0}, {"a", 1}, {"aa", 2}, {"a\0", 2}, {"\0", 1}, {"b", 1}, {"\xff", 1}};
    enum { N = sizeof ns / sizeof *ns };
    tl_kv_pool *kv = kv_new(N, b, 1, 1, 1);
    tl_prefix *px = index_of(kv);
    uint32_t ids[N];
    full_blocks(kv, N, ids);
    for (int i = 0; i < N; i++) {
        for (int k = 0; k < N; k++) {
            int64_t found = -1;
            uint32_t id = KV_NONE;
            CHECK_STATUS(tl_prefix_match(px, ns[k].bytes, ns[k].n, text, b, &id, &found), TL_OK);
            CHECK(found == (k < i ? b : 0) && id == (k < i ? ids[k] : KV_NONE), "%d in %d", k, i);
            if (found)
                give_back(kv, 1, &id);
        }
        CHECK_STATUS(tl_prefix_insert(px, ns[i].bytes, ns[i].n, text, 0, 1, &ids[i], NULL), TL_OK);
        CHECK(prefix_stats(px).namespaces == (uint64_t)i + 1, "namespaces");
    }
    CHECK_STATUS(tl_prefix_drop(px, "a", 1), TL_OK);
    CHECK_STATUS(tl_prefix_drop(px, "a", 1), TL_OK);
    CHECK(peek(px, "a", text, b) == 0 && peek(px, "aa", text, b) == b, "dropped");
    CHECK(prefix_stats(px).namespaces == N - 1 && prefix_stats(px).blocks == N - 1, "counts");
    tl_prefix_destroy(px);
    tl_kv_pool_destroy(kv);
}

/* ---- who stays ---- */

TEST(eviction_takes_the_least_recently_used_and_what_follows_before_what_it_follows)
{
    tl_kv_pool *kv = kv_new(7, b, 1, 1, 1);
    tl_prefix *px = index_of(kv);
    uint32_t first[3], other[3], named = kv_named(kv, 9), order[7], n = 0, ids[7];
    static const uint32_t second[] = {9, 9, 9, 9, 8, 8, 8, 8, 7, 7, 7, 7};
    enter_text(kv, px, "x", text, 3, first);
    enter_text(kv, px, "x", second, 3, other);
    give_back(kv, 3, first); /* front first: what is in front waits for what follows */
    give_back(kv, 1, &named);
    give_back(kv, 3, other);
    CHECK_STATS(kv, 0u, 0u, 7u, 0u);
    CHECK_STATUS(tl_kv_oldest(kv, 7, order, &n), TL_OK);
    const uint32_t want[] = {first[2], first[1], first[0], named, other[2], other[1], other[0]};
    CHECK(n == 7 && memcmp(order, want, sizeof want) == 0, "another order");
    kv_audit(kv);
    /* A match of two blocks makes them the last to go, but for what follows them. */
    int64_t found;
    CHECK_STATUS(tl_prefix_match(px, "x", 1, text, 8, ids, &found), TL_OK);
    CHECK(found == 8, "found %d", (int)found);
    give_back(kv, 2, ids);
    CHECK_STATUS(tl_kv_alloc(kv, 7, ids), TL_OK);
    const uint32_t gone[] = {first[2], named, other[2], other[1], other[0], first[1], first[0]};
    CHECK(memcmp(ids, gone, sizeof gone) == 0, "another order of eviction");
    CHECK_STATS(kv, 0u, 7u, 0u, 7u);
    CHECK(prefix_stats(px).evictions == 6 && prefix_stats(px).blocks == 0 &&
              prefix_stats(px).namespaces == 0,
          "counts");
    tl_prefix_destroy(px);
    tl_kv_pool_destroy(kv);
}

TEST(a_block_in_front_of_a_used_one_counts_as_used_and_is_never_taken)
{
    tl_kv_pool *kv = kv_new(4, b, 1, 1, 1);
    tl_prefix *px = index_of(kv);
    uint32_t ids[3], more[4], n;
    enter_text(kv, px, "", text, 3, ids);
    give_back(kv, 2, ids);
    CHECK_STATS(kv, 1u, 3u, 0u, 0u);
    CHECK(tl_kv_refs(kv, ids[0]) == 0, "a reference is left");
    tl_kv_block block;
    CHECK_STATUS(tl_kv_blocks_get(kv, ids[0], 1, &block), TL_OK);
    CHECK(block.refs == 0 && block.hash == TL_KV_HASH_PREFIX && block.fill == b, "the block");
    CHECK_STATUS(tl_kv_oldest(kv, 4, more, &n), TL_OK);
    CHECK(n == 0, "%u cached", n);
    kv_audit(kv);
    CHECK_STATUS(tl_kv_alloc(kv, 2, more), TL_EFULL);
    CHECK_REFUSED(kv, (void)tl_kv_unref(kv, ids[0]), "tl_kv_unref", "is not used");
    CHECK_STATUS(tl_kv_alloc(kv, 1, more), TL_OK);
    CHECK(peek(px, "", text, 12) == 12, "lost");
    /* The last reference on what follows makes all three cached. */
    give_back(kv, 1, &ids[2]);
    CHECK_STATS(kv, 0u, 1u, 3u, 0u);
    /* A new block behind a cached one keeps what is in front of it. */
    CHECK_STATUS(tl_kv_set_fill(kv, more[0], b), TL_OK);
    const uint32_t table[] = {ids[0], more[0]};
    static const uint32_t other[] = {1, 1, 1, 1};
    CHECK_STATUS(tl_prefix_insert(px, "", 0, other, 1, 1, table, NULL), TL_OK);
    CHECK_STATS(kv, 0u, 2u, 2u, 0u);
    CHECK_STATUS(tl_kv_alloc(kv, 2, more), TL_OK);
    CHECK(more[0] == ids[2] && more[1] == ids[1], "%u and %u went", more[0], more[1]);
    CHECK_STATUS(tl_kv_alloc(kv, 1, more), TL_EFULL);
    CHECK_STATUS(tl_kv_cow(kv, ids[0], more), TL_EINVAL);
    tl_prefix_destroy(px);
    CHECK_STATS(kv, 1u, 3u, 0u, 2u); /* and what was kept is free */
    tl_kv_pool_destroy(kv);
}

TEST(what_is_entered_again_without_twins_was_used_just_now)
{
    tl_kv_pool *kv = kv_new(6, b, 1, 1, 1);
    tl_prefix *px = index_of(kv);
    static const uint32_t other[] = {9, 9, 9, 9};
    uint32_t ids[2], one, again[2], order[6], n;
    enter_text(kv, px, "", text, 2, ids);
    enter_text(kv, px, "", other, 1, &one);
    give_back(kv, 2, ids);
    give_back(kv, 1, &one);
    full_blocks(kv, 2, again);
    CHECK_STATUS(tl_prefix_insert(px, "", 0, text, 0, 2, again, NULL), TL_OK);
    CHECK_STATUS(tl_kv_oldest(kv, 6, order, &n), TL_OK);
    const uint32_t want[] = {one, ids[1], ids[0]};
    CHECK(n == 3 && memcmp(order, want, sizeof want) == 0, "%u: %u %u %u", n, order[0], order[1],
          order[2]);
    CHECK(tl_kv_refs(kv, ids[0]) == 0 && tl_kv_refs(kv, again[0]) == 1, "references");
    tl_prefix_destroy(px);
    tl_kv_pool_destroy(kv);
}

TEST(the_oldest_are_told_as_many_as_asked)
{
    tl_kv_pool *kv = kv_new(3, b, 1, 1, 1);
    uint32_t a = kv_named(kv, 1), c = kv_named(kv, 2), got[3] = {77, 77, 77}, n = 77;
    give_back(kv, 1, &c);
    give_back(kv, 1, &a);
    CHECK_STATUS(tl_kv_oldest(kv, 0, NULL, &n), TL_OK);
    CHECK(n == 0, "%u", n);
    CHECK_STATUS(tl_kv_oldest(kv, 1, got, &n), TL_OK);
    CHECK(n == 1 && got[0] == c && got[1] == 77, "%u", n);
    CHECK_STATUS(tl_kv_oldest(kv, UINT32_MAX, got, &n), TL_OK);
    CHECK(n == 2 && got[1] == a && got[2] == 77, "%u", n);
    n = 77;
    CHECK_REFUSED(kv, (void)tl_kv_oldest(NULL, 1, got, &n), "tl_kv_oldest", "the pool is NULL");
    CHECK_REFUSED(kv, (void)tl_kv_oldest(kv, 1, got, NULL), "tl_kv_oldest", "n_found is NULL");
    CHECK_REFUSED(kv, (void)tl_kv_oldest(kv, 1, NULL, &n), "tl_kv_oldest", "ids is NULL");
    CHECK(n == 77, "written");
    tl_kv_pool_destroy(kv);
}

/* ---- twins ---- */

TEST(a_twin_is_handed_over_with_a_reference_and_what_follows_goes_behind_it)
{
    tl_kv_pool *kv = kv_new(9, b, 1, 1, 1);
    tl_prefix *px = index_of(kv);
    uint32_t ids[2], own[4], twins[4];
    enter_text(kv, px, "", text, 2, ids);
    full_blocks(kv, 4, own);
    give_back(kv, 1, &ids[1]); /* cached, and the other kept in its own right */
    memset(twins, 0xA5, sizeof twins);
    CHECK_STATUS(tl_prefix_insert(px, "", 0, text, 0, 3, own, twins), TL_OK);
    const uint32_t want[] = {ids[0], ids[1], TL_PREFIX_NONE, 0xA5A5A5A5u};
    CHECK(memcmp(twins, want, sizeof want) == 0, "%u %u %u", twins[0], twins[1], twins[2]);
    CHECK(tl_kv_refs(kv, ids[0]) == 2 && tl_kv_refs(kv, ids[1]) == 1 &&
              tl_kv_refs(kv, own[0]) == 1,
          "references");
    tl_prefix_block block;
    CHECK_STATUS(tl_prefix_block_get(px, own[0], &block), TL_ENOTFOUND);
    CHECK_STATUS(tl_prefix_block_get(px, own[2], &block), TL_OK);
    CHECK(block.parent == ids[1] && block.depth == 2, "follows %u", block.parent);
    /* Again: the first two are twins once more, the third stands at its place. */
    CHECK_STATUS(tl_prefix_insert(px, "", 0, text, 0, 3, own, twins), TL_OK);
    CHECK(twins[0] == ids[0] && twins[1] == ids[1] && twins[2] == TL_PREFIX_NONE, "again");
    CHECK(tl_kv_refs(kv, ids[0]) == 3, "references");
    /* One that can have no more is not handed over, and stays the one in front. */
    kv->block[ids[1]].refs = TL_KV_MAX_REFS;
    CHECK_STATUS(tl_prefix_insert(px, "", 0, text, 0, 3, own, twins), TL_OK);
    CHECK(twins[0] == ids[0] && twins[1] == TL_PREFIX_NONE && twins[2] == TL_PREFIX_NONE, "full");
    kv->block[ids[1]].refs = 2;
    /* What goes on goes on behind the index's own. */
    const uint32_t table[] = {ids[0], ids[1], own[2], own[3]};
    CHECK_STATUS(tl_prefix_insert(px, "", 0, text + 12, 3, 1, table, twins), TL_OK);
    CHECK(peek(px, "", text, 16) == 16 && prefix_stats(px).blocks == 4, "all four");
    tl_prefix_destroy(px);
    tl_kv_pool_destroy(kv);
}

/* ---- pins ---- */

TEST(what_is_pinned_stays_until_it_has_been_unpinned_as_often)
{
    tl_kv_pool *kv = kv_new(3, b, 1, 1, 1);
    tl_prefix *px = index_of(kv);
    uint32_t ids[3], more[3];
    tl_prefix_block block;
    enter_text(kv, px, "n", text, 3, ids);
    CHECK_STATUS(tl_prefix_pin(px, "n", 1, text, 2 * b + 3), TL_OK); /* two blocks */
    CHECK_STATUS(tl_prefix_pin(px, "n", 1, text, 2 * b), TL_OK);
    give_back(kv, 3, ids);
    CHECK(prefix_stats(px).pins == 2, "pins");
    CHECK_STATUS(tl_prefix_block_get(px, ids[1], &block), TL_OK);
    CHECK(block.pins == 2 && tl_kv_refs(kv, ids[1]) == 2, "%u pins", block.pins);
    CHECK_STATS(kv, 0u, 2u, 1u, 0u);
    CHECK_REFUSED(kv, (void)tl_kv_unref(kv, ids[1]), "tl_kv_unref",
                  "no reference but for its 2 pins");
    uint32_t copy;
    CHECK_REFUSED(kv, (void)tl_kv_cow(kv, ids[1], &copy), "tl_kv_cow",
                  "no reference but for its 2 pins");
    CHECK_STATUS(tl_kv_alloc(kv, 1, more), TL_OK);
    CHECK(more[0] == ids[2], "%u was taken", more[0]);
    CHECK_STATUS(tl_kv_alloc(kv, 1, more), TL_EFULL);
    CHECK_STATUS(tl_prefix_unpin(px, "n", 1, text, b), TL_ENOTFOUND); /* not what is pinned */
    CHECK_STATUS(tl_prefix_unpin(px, "n", 1, text, 2 * b), TL_OK);
    CHECK_STATS(kv, 0u, 3u, 0u, 1u);
    CHECK_STATUS(tl_prefix_unpin(px, "n", 1, text, 2 * b + 1), TL_OK);
    CHECK_STATS(kv, 0u, 1u, 2u, 1u);
    CHECK_STATUS(tl_prefix_unpin(px, "n", 1, text, 2 * b), TL_ENOTFOUND);
    CHECK_STATUS(tl_prefix_pin(px, "n", 1, text, 3 * b), TL_ENOTFOUND); /* the third has gone */
    CHECK_STATUS(tl_prefix_pin(px, "m", 1, text, b), TL_ENOTFOUND);
    /* A pin takes what is cached out of reach, and goes with its namespace. */
    CHECK_STATUS(tl_prefix_pin(px, "n", 1, text, b), TL_OK);
    CHECK_STATS(kv, 0u, 2u, 1u, 1u);
    CHECK_STATUS(tl_prefix_drop(px, "n", 1), TL_OK);
    CHECK_STATS(kv, 2u, 1u, 0u, 1u);
    CHECK(prefix_stats(px).pins == 0 && prefix_stats(px).blocks == 0, "counts");
    tl_prefix_destroy(px);
    tl_kv_pool_destroy(kv);
}

TEST(a_block_that_can_have_no_more_references_ends_a_match_and_refuses_a_pin)
{
    tl_kv_pool *kv = kv_new(4, b, 1, 1, 1);
    tl_prefix *px = index_of(kv);
    uint32_t ids[3], table[3];
    int64_t found;
    enter_text(kv, px, "", text, 3, ids);
    for (uint32_t i = 0; i < 3; i++) {
        kv->block[ids[i]].refs = TL_KV_MAX_REFS;
        CHECK_STATUS(tl_prefix_match(px, "", 0, text, 11, table, &found), TL_OK);
        CHECK(found == i * b && peek(px, "", text, 11) == i * b, "found %d", (int)found);
        give_back(kv, i, table);
        CHECK_REFUSED(kv, (void)tl_prefix_pin(px, "", 0, text, (i + 1) * b), "tl_prefix_pin",
                      "4294967295 references");
        kv->block[ids[i]].refs = TL_KV_MAX_REFS - 1;
        CHECK_STATUS(tl_prefix_match(px, "", 0, text, 12, table, &found), TL_OK);
        CHECK(found == 12 && tl_kv_refs(kv, ids[i]) == TL_KV_MAX_REFS, "the last one");
        give_back(kv, 3, table);
        kv->block[ids[i]].refs = 1;
    }
    tl_prefix_destroy(px);
    tl_kv_pool_destroy(kv);
}

/* ---- what the pool makes of it ---- */

TEST(a_block_in_the_index_is_frozen_and_its_copy_and_envelope_are_not_in_it)
{
    tl_kv_pool *kv = kv_new(4, b, 1, 1, 1);
    tl_prefix *px = index_of(kv);
    const float k[b] = {1, 2, 3, 4};
    const int32_t length = b;
    uint32_t id, copy;
    enter_text(kv, px, "", text, 1, &id);
    CHECK_REFUSED(kv, (void)tl_kv_append_f32(kv, 0, &id, 1, 0, 1, k, k, b, 1), "tl_kv_append_f32",
                  "is in the prefix index");
    CHECK_REFUSED(kv,
                  (void)tl_kv_append(kv, 0, &id, 1, NULL, &length, 1, k, k, TL_F32, 1, 1, 1, 1,
                                     NULL),
                  "tl_kv_append", "is in the prefix index");
    CHECK(tl_kv_append_f32(kv, 0, &id, 1, 0, 1, k, k, b, 1) == TL_EBUSY, "append");
    CHECK_REFUSED(kv, (void)tl_kv_set_fill(kv, id, 1), "tl_kv_set_fill", "is in the prefix index");
    CHECK_REFUSED(kv, (void)tl_kv_set_length(kv, &id, 1, 0, 1), "tl_kv_set_length",
                  "is in the prefix index");
    CHECK_REFUSED(kv, (void)tl_kv_register(kv, id, 5), "tl_kv_register", "is in the prefix index");
    unsigned char envelope[256];
    size_t written;
    CHECK_STATUS(tl_kv_export(kv, &id, 1, envelope, sizeof envelope, &written), TL_OK);
    uint64_t hash;
    memcpy(&hash, envelope + TL_KV_ENVELOPE_HEADER, sizeof hash);
    CHECK(hash == 0, "hash %llx", (unsigned long long)hash);
    tl_kv_ref(kv, id);
    CHECK_STATUS(tl_kv_cow(kv, id, &copy), TL_OK);
    tl_prefix_block block;
    CHECK(copy != id, "no copy");
    CHECK_STATUS(tl_prefix_block_get(px, copy, &block), TL_ENOTFOUND);
    CHECK_STATUS(tl_kv_append_f32(kv, 0, &copy, 1, 0, 1, k, k, b, 1), TL_OK);
    give_back(kv, 1, &copy);
    CHECK_STATUS(tl_kv_cow(kv, id, &copy), TL_OK);
    CHECK(copy == id, "one holder gets the block itself");
    /* Out of the index it is an ordinary block. */
    CHECK_STATUS(tl_prefix_drop(px, "", 0), TL_OK);
    CHECK_STATUS(tl_kv_append_f32(kv, 0, &id, 1, 0, 1, k, k, b, 1), TL_OK);
    CHECK_STATUS(tl_kv_register(kv, id, 5), TL_OK);
    tl_prefix_destroy(px);
    kv_audit(kv);
    tl_kv_pool_destroy(kv);
}

static int64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

TEST(an_evicted_block_is_ordinary_when_it_comes_back)
{
    tl_kv_pool *kv = kv_new(1, b, 1, 1, 1);
    tl_prefix *px = index_of(kv);
    uint32_t id;
    const int64_t start = now_ns();
    enter_text(kv, px, "", text, 1, &id);
    give_back(kv, 1, &id);
    const struct timespec nap = {.tv_nsec = 3000000};
    nanosleep(&nap, NULL);
    CHECK_STATUS(tl_kv_alloc(kv, 1, &id), TL_OK);
    const int64_t most = now_ns() - start;
    const tl_prefix_stats stats = prefix_stats(px);
    CHECK(stats.evictions == 1 && stats.last_age_ns >= 3000000 &&
              stats.last_age_ns <= (uint64_t)most && stats.age_ns == stats.last_age_ns,
          "age %llu of %lld", (unsigned long long)stats.last_age_ns, (long long)most);
    CHECK_STATUS(tl_kv_set_fill(kv, id, b), TL_OK);
    give_back(kv, 1, &id);
    CHECK_STATS(kv, 1u, 0u, 0u, 1u); /* free, not cached */
    enter_text(kv, px, "", text + 4, 1, &id);
    give_back(kv, 1, &id);
    CHECK_STATUS(tl_kv_alloc(kv, 1, &id), TL_OK);
    const tl_prefix_stats again = prefix_stats(px);
    CHECK(again.age_ns == stats.age_ns + again.last_age_ns && again.evictions == 2, "ages add up");
    tl_prefix_destroy(px);
    tl_kv_pool_destroy(kv);
}

/* ---- refusals ---- */

enum { SNAP_BLOCKS = 16 };

struct px_snap {
    tl_prefix_stats stats;
    tl_status status[SNAP_BLOCKS];
    tl_prefix_block block[SNAP_BLOCKS];
};

static struct px_snap px_snap(const tl_kv_pool *kv, const tl_prefix *px)
{
    struct px_snap s;
    memset(&s, 0, sizeof s);
    tl_prefix_stats_get(px, &s.stats);
    for (uint32_t id = 0; id < kv->cfg.n_blocks; id++)
        s.status[id] = tl_prefix_block_get(px, id, &s.block[id]);
    return s;
}

/* `call` says `want` and those words, and changes neither pool nor index. */
#define REFUSED(call, want, fn, words)                                                        \
    do {                                                                                      \
        const struct px_snap was_ = px_snap(kv, px);                                          \
        tl_status status_ = TL_OK;                                                            \
        CHECK_REFUSED(kv, status_ = (call), fn, words);                                       \
        CHECK(status_ == (want), "%s, not %s", tl_status_str(status_), tl_status_str(want)); \
        const struct px_snap is_ = px_snap(kv, px);                                           \
        CHECK(memcmp(&was_, &is_, sizeof was_) == 0, #call " changed the index");             \
    } while (0)

TEST(questions_are_refused_whole)
{
    tl_kv_pool *kv = kv_new(4, b, 1, 1, 1);
    tl_prefix *px = index_of(kv);
    uint32_t ids[2], table[2] = {77, 77};
    int64_t n = 77;
    enter_text(kv, px, "", text, 2, ids);
    REFUSED(tl_prefix_match(NULL, "", 0, text, 8, table, &n), TL_EINVAL, "tl_prefix_match",
            "the index is NULL");
    REFUSED(tl_prefix_match(px, NULL, 1, text, -1, table, &n), TL_EINVAL, "tl_prefix_match",
            "ns is NULL with ns_bytes = 1");
    REFUSED(tl_prefix_match(px, "", 0, text, -1, table, NULL), TL_EINVAL, "tl_prefix_match",
            "n_found is NULL");
    REFUSED(tl_prefix_match(px, "", 0, NULL, -1, table, &n), TL_EINVAL, "tl_prefix_match",
            "n_tokens = -1 is negative");
    REFUSED(tl_prefix_match(px, "", 0, NULL, 8, table, &n), TL_EINVAL, "tl_prefix_match",
            "tokens is NULL with n_tokens = 8");
    REFUSED(tl_prefix_match(px, "", 0, text, 8, NULL, &n), TL_EINVAL, "tl_prefix_match",
            "block_table is NULL with n_tokens = 8");
    REFUSED(tl_prefix_peek(NULL, "", 0, text, 8, &n), TL_EINVAL, "tl_prefix_peek",
            "the index is NULL");
    REFUSED(tl_prefix_peek(px, NULL, 2, text, 8, &n), TL_EINVAL, "tl_prefix_peek",
            "ns is NULL with ns_bytes = 2");
    REFUSED(tl_prefix_peek(px, "", 0, text, 8, NULL), TL_EINVAL, "tl_prefix_peek",
            "n_found is NULL");
    REFUSED(tl_prefix_peek(px, "", 0, text, -5, &n), TL_EINVAL, "tl_prefix_peek",
            "n_tokens = -5 is negative");
    REFUSED(tl_prefix_peek(px, "", 0, NULL, 1, &n), TL_EINVAL, "tl_prefix_peek",
            "tokens is NULL with n_tokens = 1");
    CHECK(n == 77 && table[0] == 77, "written");
    CHECK_STATUS(tl_prefix_match(px, NULL, 0, NULL, 0, NULL, &n), TL_OK);
    CHECK(n == 0 && prefix_stats(px).queries == 1, "nothing asked");
    tl_prefix_destroy(px);
    tl_kv_pool_destroy(kv);
}

#define INSERT "tl_prefix_insert"

TEST(an_insertion_is_refused_whole)
{
    tl_kv_pool *kv = kv_new(10, b, 1, 1, 1);
    tl_prefix *px = index_of(kv);
    uint32_t ids[3], own[3], half = kv_one(kv), named = kv_named(kv, 3), gone, twins[3];
    enter_text(kv, px, "n", text, 3, ids);
    full_blocks(kv, 3, own);
    full_blocks(kv, 1, &gone);
    give_back(kv, 1, &gone);
    memset(twins, 0xA5, sizeof twins);
    /* px, ns, pool, range; then, with nothing to enter, all is well */
    REFUSED(tl_prefix_insert(NULL, "n", 1, text, 0, 1, own, twins), TL_EINVAL, INSERT,
            "the index is NULL");
    REFUSED(tl_prefix_insert(px, NULL, 1, text, -1, 1, own, twins), TL_EINVAL, INSERT,
            "ns is NULL with ns_bytes = 1");
    REFUSED(tl_prefix_insert(px, "n", 1, NULL, -1, 1, own, twins), TL_EINVAL, INSERT,
            "first = -1, n = 1");
    REFUSED(tl_prefix_insert(px, "n", 1, NULL, 0, -1, own, twins), TL_EINVAL, INSERT,
            "first = 0, n = -1");
    REFUSED(tl_prefix_insert(px, "n", 1, text, INT64_MAX, INT64_MAX, own, twins), TL_EINVAL, INSERT,
            "pass the address space");
    REFUSED(tl_prefix_insert(px, "n", 1, text, 0, INT64_MAX / 16 + 1, own, twins), TL_EINVAL,
            INSERT, "pass the address space");
    CHECK_STATUS(tl_prefix_insert(px, "n", 1, NULL, 7, 0, NULL, twins), TL_OK);
    REFUSED(tl_prefix_insert(px, "n", 1, NULL, 0, 1, own, twins), TL_EINVAL, INSERT,
            "tokens is NULL");
    REFUSED(tl_prefix_insert(px, "n", 1, text, 0, 1, NULL, twins), TL_EINVAL, INSERT,
            "block_table is NULL");
    /* the block in front, before any of those behind */
    const uint32_t behind_own[] = {own[0], 99}, behind_99[] = {99, 99}, behind_0[] = {ids[0], 99},
                   skipped[] = {ids[0], ids[0], 99};
    REFUSED(tl_prefix_insert(px, "n", 1, text, 1, 1, behind_own, twins), TL_EINVAL, INSERT,
            "is not in the index");
    REFUSED(tl_prefix_insert(px, "n", 1, text, 1, 1, behind_99, twins), TL_EINVAL, INSERT,
            "block_table[0] = 99 is not in the index");
    REFUSED(tl_prefix_insert(px, "m", 1, text, 1, 1, behind_0, twins), TL_EINVAL, INSERT,
            "is in another namespace");
    REFUSED(tl_prefix_insert(px, "n", 1, text, 2, 1, skipped, twins), TL_EINVAL, INSERT,
            "has 0 blocks in front of it in the index");
    /* block by block */
    const uint32_t far[] = {own[0], 10, 10}, unused[] = {own[0], gone, 10}, never[] = {own[0], 9},
                   short_one[] = {own[0], half, gone}, twice[] = {own[0], own[1], own[0]},
                   busy[] = {named, own[0], half}, busy_alone[] = {own[0], named},
                   elsewhere[] = {own[0], own[1], ids[0]}, later[] = {ids[1]};
    REFUSED(tl_prefix_insert(px, "n", 1, text, 0, 3, far, twins), TL_EINVAL, INSERT,
            "block_table[1] = 10 is out of range: the pool has 10");
    REFUSED(tl_prefix_insert(px, "n", 1, text, 0, 3, unused, twins), TL_EINVAL, INSERT,
            "is not used");
    REFUSED(tl_prefix_insert(px, "n", 1, text, 0, 2, never, twins), TL_EINVAL, INSERT,
            "block_table[1] = 9 is not used");
    REFUSED(tl_prefix_insert(px, "n", 1, text, 0, 3, short_one, twins), TL_EINVAL, INSERT,
            "holds 0 tokens of 4");
    REFUSED(tl_prefix_insert(px, "n", 1, text, 0, 3, twice, twins), TL_EINVAL, INSERT,
            "block_table[0] and block_table[2] are both block");
    REFUSED(tl_prefix_insert(px, "n", 1, text, 0, 3, busy, twins), TL_EINVAL, INSERT,
            "holds 0 tokens of 4"); /* before what is busy */
    REFUSED(tl_prefix_insert(px, "n", 1, text, 0, 2, busy_alone, twins), TL_EBUSY, INSERT,
            "is registered under 0x0000000000000003");
    REFUSED(tl_prefix_insert(px, "n", 1, text, 0, 3, elsewhere, twins), TL_EBUSY, INSERT,
            "is in the index at another place");
    REFUSED(tl_prefix_insert(px, "n", 1, text + 4, 0, 1, later, twins), TL_EBUSY, INSERT,
            "is in the index at another place");
    REFUSED(tl_prefix_insert(px, "m", 1, text, 0, 3, ids, twins), TL_EBUSY, INSERT,
            "is in the index at another place");
    for (int i = 0; i < 3; i++)
        CHECK(twins[i] == 0xA5A5A5A5u, "twins[%d] was written", i);
    CHECK_STATUS(tl_prefix_insert(px, "n", 1, text, 0, 3, ids, twins), TL_OK); /* are there */
    CHECK(twins[0] == TL_PREFIX_NONE && twins[2] == TL_PREFIX_NONE, "no twins of themselves");
    tl_prefix_destroy(px);
    kv_audit(kv);
    tl_kv_pool_destroy(kv);
}

TEST(pins_drops_and_looks_are_refused_whole)
{
    tl_kv_pool *kv = kv_new(4, b, 1, 1, 1);
    tl_prefix *px = index_of(kv);
    uint32_t ids[2];
    tl_prefix_block block, painted;
    memset(&block, 0xA5, sizeof block);
    painted = block;
    enter_text(kv, px, "n", text, 2, ids);
    REFUSED(tl_prefix_pin(NULL, "n", 1, text, 4), TL_EINVAL, "tl_prefix_pin", "the index is NULL");
    REFUSED(tl_prefix_pin(px, NULL, 1, text, 3), TL_EINVAL, "tl_prefix_pin", "ns is NULL");
    REFUSED(tl_prefix_pin(px, "n", 1, NULL, 3), TL_EINVAL, "tl_prefix_pin",
            "n_tokens = 3 is below a block's 4");
    REFUSED(tl_prefix_pin(px, "n", 1, NULL, 4), TL_EINVAL, "tl_prefix_pin", "tokens is NULL");
    REFUSED(tl_prefix_unpin(NULL, "n", 1, text, 4), TL_EINVAL, "tl_prefix_unpin",
            "the index is NULL");
    REFUSED(tl_prefix_unpin(px, NULL, 1, text, 3), TL_EINVAL, "tl_prefix_unpin", "ns is NULL");
    REFUSED(tl_prefix_unpin(px, "n", 1, NULL, -4), TL_EINVAL, "tl_prefix_unpin",
            "n_tokens = -4 is below a block's 4");
    REFUSED(tl_prefix_unpin(px, "n", 1, NULL, 4), TL_EINVAL, "tl_prefix_unpin", "tokens is NULL");
    REFUSED(tl_prefix_drop(NULL, "n", 1), TL_EINVAL, "tl_prefix_drop", "the index is NULL");
    REFUSED(tl_prefix_drop(px, NULL, 1), TL_EINVAL, "tl_prefix_drop", "ns is NULL");
    REFUSED(tl_prefix_block_get(NULL, 0, &block), TL_EINVAL, "tl_prefix_block_get",
            "the index is NULL");
    REFUSED(tl_prefix_block_get(px, 0, NULL), TL_EINVAL, "tl_prefix_block_get", "out is NULL");
    REFUSED(tl_prefix_block_get(px, 4, &block), TL_EINVAL, "tl_prefix_block_get",
            "block 4 is out of range: the pool has 4");
    CHECK_REFUSED(kv, tl_prefix_stats_get(px, NULL), "tl_prefix_stats_get", "out is NULL");
    tl_prefix_stats stats = {.queries = 77};
    CHECK_REFUSED(kv, tl_prefix_stats_get(NULL, &stats), "tl_prefix_stats_get",
                  "the index is NULL");
    tl_set_last_error("kept");
    CHECK_STATUS(tl_prefix_block_get(px, 3, &block), TL_ENOTFOUND); /* never touched */
    CHECK_STATUS(tl_prefix_pin(px, "n", 1, text, 12), TL_ENOTFOUND);
    CHECK_STATUS(tl_prefix_unpin(px, "n", 1, text, 8), TL_ENOTFOUND);
    CHECK(strcmp(tl_last_error(), "kept") == 0, "a miss says \"%s\"", tl_last_error());
    CHECK(stats.queries == 77 && memcmp(&block, &painted, sizeof block) == 0, "written");
    tl_prefix_destroy(px);
    tl_kv_pool_destroy(kv);
}

/* ---- beginning and end ---- */

TEST(a_pool_has_one_index_at_a_time)
{
    tl_kv_pool *kv = kv_new(4, b, 1, 1, 1), *other = kv_new(4, b, 1, 1, 1);
    tl_prefix *px = index_of(kv), *second = (tl_prefix *)&px;
    uint32_t ids[4], id;
    CHECK_STATUS(tl_prefix_create(kv, &second), TL_EBUSY);
    CHECK(second == NULL && strstr(tl_last_error(), "tl_prefix_create: the pool has an index"),
          "\"%s\"", tl_last_error());
    CHECK_STATUS(tl_prefix_create(kv, NULL), TL_EINVAL);
    CHECK(strstr(tl_last_error(), "out is NULL"), "\"%s\"", tl_last_error());
    second = (tl_prefix *)&px;
    CHECK_STATUS(tl_prefix_create(NULL, &second), TL_EINVAL);
    CHECK(second == NULL && strstr(tl_last_error(), "the pool is NULL"), "\"%s\"",
          tl_last_error());
    /* Two pools, two indexes, each with its own. */
    second = index_of(other);
    enter_text(kv, px, "", text, 3, ids);
    enter_text(other, second, "", text, 1, &id);
    CHECK(peek(px, "", text, 16) == 12 && peek(second, "", text, 16) == 4, "mixed up");
    /* Used blocks outlive the index, cached ones do not. */
    give_back(kv, 2, ids + 1);
    CHECK_STATS(kv, 1u, 1u, 2u, 0u);
    tl_prefix_destroy(px);
    CHECK_STATS(kv, 3u, 1u, 0u, 0u);
    CHECK(tl_kv_refs(kv, ids[0]) == 1 && tl_kv_fill(kv, ids[0]) == b, "lost");
    px = index_of(kv);
    CHECK(peek(px, "", text, 16) == 0, "a new index knows something");
    CHECK_STATUS(tl_prefix_insert(px, "", 0, text, 0, 1, ids, NULL), TL_OK);
    give_back(kv, 1, ids);
    CHECK_STATS(kv, 3u, 0u, 1u, 0u);
    tl_prefix_destroy(px);
    tl_prefix_destroy(second);
    tl_prefix_destroy(NULL);
    tl_kv_pool_destroy(kv);
    tl_kv_pool_destroy(other);
}

TEST(an_index_whose_pool_went_first_can_only_be_destroyed)
{
    struct kv_hook hook = {.fail_at = -1};
    kv_hook_install(&hook);
    tl_kv_pool *kv = kv_new(4, b, 1, 1, 1);
    tl_prefix *px = index_of(kv);
    uint32_t ids[3], table[4];
    int64_t n;
    tl_prefix_block block;
    enter_text(kv, px, "gone", text, 3, ids);
    CHECK_STATUS(tl_prefix_pin(px, "gone", 4, text, 4), TL_OK);
    tl_kv_pool_destroy(kv);
#define GONE(call)                                                                              \
    do {                                                                                        \
        tl_set_last_error(NULL);                                                                \
        call;                                                                                   \
        CHECK(strstr(tl_last_error(), "the pool of this index is gone"), "\"%s\"",             \
              tl_last_error());                                                                 \
    } while (0)
    GONE(CHECK_STATUS(tl_prefix_match(px, "", 0, text, 4, table, &n), TL_EINVAL));
    GONE(CHECK_STATUS(tl_prefix_peek(px, "", 0, text, 4, &n), TL_EINVAL));
    GONE(CHECK_STATUS(tl_prefix_insert(px, "", 0, text, 0, 0, ids, NULL), TL_EINVAL));
    GONE(CHECK_STATUS(tl_prefix_pin(px, "gone", 4, text, 4), TL_EINVAL));
    GONE(CHECK_STATUS(tl_prefix_unpin(px, "gone", 4, text, 4), TL_EINVAL));
    GONE(CHECK_STATUS(tl_prefix_drop(px, "gone", 4), TL_EINVAL));
    GONE(CHECK_STATUS(tl_prefix_block_get(px, 0, &block), TL_EINVAL));
    tl_prefix_stats stats = {.queries = 77};
    GONE(tl_prefix_stats_get(px, &stats));
    CHECK(stats.queries == 77, "written");
    tl_prefix_destroy(px);
    CHECK(hook.live == 0, "%d pieces left", hook.live);
    tl_set_allocator(NULL);
}

/* Index and namespaces; each goes back to where it came from. */
TEST(every_allocation_may_fail_and_changes_nothing)
{
    tl_kv_pool *kv = kv_new(4, b, 1, 1, 1);
    for (int fail_at = 0; fail_at <= 3; fail_at++) {
        struct kv_hook hook = {.fail_at = fail_at};
        kv_hook_install(&hook);
        tl_prefix *px = (tl_prefix *)&hook;
        uint32_t ids[2], twins[2] = {77, 77};
        if (tl_prefix_create(kv, &px) == TL_ENOMEM) {
            CHECK(px == NULL && strstr(tl_last_error(), "tl_prefix_create: no "), "\"%s\"",
                  tl_last_error());
        } else {
            full_blocks(kv, 2, ids);
            for (uint32_t i = 0; i < 2; i++) {
                const char *ns = i ? "b" : "a";
                if (hook.calls == fail_at)
                    REFUSED(tl_prefix_insert(px, ns, 1, text, 0, 1, &ids[i], twins), TL_ENOMEM,
                            INSERT, "no memory for a namespace of 1 bytes");
                else
                    CHECK_STATUS(tl_prefix_insert(px, ns, 1, text, 0, 1, &ids[i], NULL), TL_OK);
            }
            give_back(kv, 2, ids);
            const uint64_t n = prefix_stats(px).namespaces;
            CHECK(hook.live == 1 + (int)n && twins[0] == 77, "%d live", hook.live);
            uint32_t all[4];
            CHECK_STATUS(tl_kv_alloc(kv, 4, all), TL_OK); /* evicts what was entered */
            CHECK(hook.live == 1 && prefix_stats(px).namespaces == 0, "%d live", hook.live);
            give_back(kv, 4, all);
            hook.fail_at = -1;
            enter_text(kv, px, "c", text, 1, ids);
            tl_set_allocator(NULL);
            tl_prefix_destroy(px);
            give_back(kv, 1, ids);
        }
        tl_set_allocator(NULL);
        CHECK(hook.live == 0, "%d live", hook.live);
    }
    CHECK(kv_stats(kv).free == 4, "blocks left");
    tl_kv_pool_destroy(kv);
}

TEST(creating_an_index_writes_none_of_its_records)
{
    struct kv_hook hook = {.fail_at = -1, .endless = 1};
    kv_hook_install(&hook);
    tl_kv_pool *kv = kv_new(1u << 30, 16, 1, 1, 1); /* 128 GiB of records and tokens */
    tl_prefix *px = index_of(kv);
    CHECK(hook.last >= (size_t)128 << 30 && hook.calls == 3, "%zu bytes", hook.last);
    CHECK(peek(px, "", text, 16) == 0, "found");
    tl_prefix_destroy(px);
    tl_kv_pool_destroy(kv);
    /* K and V just fit, the records do not. */
    kv = kv_new(1u << 31, (1u << 30) - 1, 1, 1, 1);
    CHECK_STATUS(tl_prefix_create(kv, &px), TL_EINVAL);
    CHECK(px == NULL && strstr(tl_last_error(), "pass the address space"), "\"%s\"",
          tl_last_error());
    tl_kv_pool_destroy(kv);
    CHECK(hook.live == 0, "%d live", hook.live);
    tl_set_allocator(NULL);
}

/* ---- many ---- */

/* Ends at once, deep as it is: with recursion the stack would not do. */
TEST(a_million_blocks_behind_each_other_are_found_cached_evicted_and_dropped)
{
    const uint32_t n = 1000000;
    tl_kv_pool *kv = kv_new(n, 1, 1, 1, 1);
    tl_prefix *px = index_of(kv);
    uint32_t *ids = malloc(n * sizeof *ids), *tokens = malloc(n * sizeof *tokens);
    CHECK(ids && tokens, "memory");
    for (uint32_t i = 0; i < n; i++)
        tokens[i] = i % 3;
    for (int how = 0; how < 3; how++) {
        enter_text(kv, px, "deep", tokens, n, ids);
        CHECK(peek(px, "deep", tokens, n) == n, "found");
        if (how > 0)
            give_back(kv, n, ids); /* front first: all wait for the last */
        if (how == 1)
            CHECK_STATUS(tl_kv_alloc(kv, n, ids), TL_OK);
        else
            CHECK_STATUS(tl_prefix_drop(px, "deep", 4), TL_OK);
        CHECK(prefix_stats(px).blocks == 0, "blocks");
        CHECK_STATS(kv, how == 2 ? n : 0u, how == 2 ? 0u : n, 0u, how > 0 ? n : 0u);
        if (how < 2)
            give_back(kv, n, ids);
    }
    free(ids), free(tokens);
    tl_prefix_destroy(px);
    tl_kv_pool_destroy(kv);
}

/* In rising order, which makes a tree without chance a list: then this takes minutes. */
TEST(two_hundred_thousand_that_differ_in_the_last_token_are_told_apart)
{
    enum { N = 200000, B = 16 };
    tl_kv_pool *kv = kv_new(N, B, 1, 1, 1);
    tl_prefix *px = index_of(kv);
    uint32_t tokens[B] = {0}, *ids = malloc(N * sizeof *ids), id;
    CHECK(ids != NULL, "memory");
    for (uint32_t i = 0; i < N; i++) {
        tokens[B - 1] = 2 * i;
        enter_text(kv, px, "", tokens, 1, &ids[i]);
    }
    for (uint32_t i = 0; i < 2 * N; i += 7) {
        int64_t found = -1;
        tokens[B - 1] = i;
        CHECK_STATUS(tl_prefix_match(px, "", 0, tokens, B, &id, &found), TL_OK);
        CHECK(found == (i % 2 ? B - 1 : B) && id == ids[i / 2], "%u: %d of %u", i, (int)found, id);
        give_back(kv, 1, &id);
    }
    give_back(kv, N, ids);
    CHECK_STATUS(tl_kv_alloc(kv, N / 2, ids), TL_OK);
    CHECK(prefix_stats(px).blocks == N / 2, "blocks");
    free(ids);
    tl_prefix_destroy(px);
    tl_kv_pool_destroy(kv);
}

struct item {
    struct tree tree;
    uint32_t key;
};

static int compare_item(const void *key, const struct tree *tree)
{
    const struct item *item = (const void *)tree;
    const uint32_t mine = *(const uint32_t *)key, theirs = item->key;
    return (mine > theirs) - (mine < theirs);
}

/* Every node in order and below a higher one; how many there are. */
static uint32_t count_tree(const struct tree *root, uint64_t low, uint64_t high)
{
    if (!root)
        return 0;
    const uint64_t key = ((const struct item *)(const void *)root)->key;
    CHECK(key >= low && key < high, "%llu is not in order", (unsigned long long)key);
    for (int side = 0; side < 2; side++) {
        const struct tree *below = side ? root->right : root->left;
        CHECK(!below || below->priority <= root->priority, "%llu", (unsigned long long)key);
    }
    return 1 + count_tree(root->left, low, key) + count_tree(root->right, key + 1, high);
}

TEST(a_tree_is_in_order_and_below_higher_ones_whatever_comes_and_goes)
{
    enum { N = 200 };
    static struct item items[N];
    bool there[N] = {false};
    struct tree *root = NULL;
    uint32_t n = 0;
    uint64_t rng = 3;
    for (int turn = 0; turn < 20000; turn++) {
        const uint32_t key = (uint32_t)rng_below(&rng, N);
        if (there[key]) {
            tree_remove(&root, &items[key].tree, &key, compare_item);
        } else {
            items[key] = (struct item){.tree.priority = rng_next(&rng) % 64, .key = key};
            tree_insert(&root, &items[key].tree, &key, compare_item);
        }
        there[key] = !there[key];
        n += there[key] ? 1 : -1u;
        CHECK(count_tree(root, 0, N) == n, "%u are there", n);
    }
}

/* ---- readers ---- */

struct reader {
    pthread_t thread;
    const tl_prefix *px;
    int64_t want;
    bool wrong;
};

static void *read_much(void *reader_)
{
    struct reader *reader = reader_;
    for (int i = 0; i < 2000; i++) {
        int64_t found = -1;
        tl_prefix_block block;
        tl_prefix_stats stats;
        tl_prefix_stats_get(reader->px, &stats);
        reader->wrong |= tl_prefix_peek(reader->px, "", 0, text, 16, &found) != TL_OK ||
                         found != reader->want || (int64_t)stats.blocks * b != reader->want;
        (void)tl_prefix_block_get(reader->px, 0, &block);
    }
    return NULL;
}

TEST(any_number_may_look_while_nobody_writes)
{
    tl_kv_pool *kv = kv_new(4, b, 1, 1, 1);
    tl_prefix *px = index_of(kv);
    uint32_t ids[4];
    full_blocks(kv, 4, ids);
    for (int64_t n = 0; n <= 4; n++) {
        struct reader readers[4];
        if (n > 0)
            CHECK_STATUS(
                tl_prefix_insert(px, "", 0, text + (n - 1) * b, n - 1, 1, ids, NULL), TL_OK);
        for (int i = 0; i < 4; i++) {
            readers[i] = (struct reader){.px = px, .want = n * b};
            CHECK(pthread_create(&readers[i].thread, NULL, read_much, &readers[i]) == 0, "thread");
        }
        for (int i = 0; i < 4; i++) {
            pthread_join(readers[i].thread, NULL);
            CHECK(!readers[i].wrong, "reader %d, %d blocks", i, (int)n);
        }
    }
    tl_prefix_destroy(px);
    tl_kv_pool_destroy(kv);
}

CHECK_MAIN()
