/* SPDX-License-Identifier: MIT */
/* The prefix index by hand-made cases: what is found, what is kept and what goes first, and every
 * refusal. test_prefix_model.c holds it against a plain list under random calls. */
#include <pthread.h>

#include "kv_check.h"
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

CHECK_MAIN()
