/* SPDX-License-Identifier: MIT */
/* test_kv_pool.c: taking, sharing, giving back and finding blocks. Export and append have files of
 * their own. */
#include <unistd.h>

#include "kv_check.h"

/* ---- creation ---- */

static void refuse_cfg(const tl_kv_cfg *cfg, tl_status want, const char *words)
{
    int dummy;
    tl_kv_pool *out = (tl_kv_pool *)&dummy;
    CHECK_STATUS(tl_kv_pool_create(cfg, &out), want);
    CHECK(out == NULL, "out is %p", (void *)out);
    CHECK(strncmp(tl_last_error(), "tl_kv_pool_create: ", 19) == 0 &&
              strstr(tl_last_error(), words),
          "\"%s\" lacks \"%s\"", tl_last_error(), words);
}

TEST(create_names_the_zero_dimension)
{
    static const char *const names[] = {"n_blocks", "block_tokens", "n_layers", "n_kv_heads",
                                        "head_dim"};
    for (int i = 0; i < 5; i++) {
        tl_kv_cfg cfg = kv_cfg(4, 4, 1, 1, 4);
        ((uint32_t *)&cfg)[i] = 0;
        refuse_cfg(&cfg, TL_EINVAL, names[i]);
        cfg.format = 9; /* the dimension is looked at first */
        refuse_cfg(&cfg, TL_EINVAL, names[i]);
    }
    refuse_cfg(NULL, TL_EINVAL, "cfg");
    const tl_kv_cfg good = kv_cfg(4, 4, 1, 1, 4);
    CHECK_STATUS(tl_kv_pool_create(&good, NULL), TL_EINVAL);
    CHECK(strstr(tl_last_error(), "out"), "%s", tl_last_error());
}

/* The dtype of each format from 1 on. */
static const tl_dtype dtype_of[] = {TL_F16, TL_F8_E4M3, TL_I8, TL_BF16, TL_F32};

TEST(create_takes_each_format_with_its_dtype_and_nothing_else)
{
    static const uint32_t formats[] = {0, 1, 2, 3, 4, 5, 6, 255, UINT32_MAX};
    for (int i = 0; i < 9; i++)
        for (int32_t dtype = -1; dtype <= 9; dtype++) {
            tl_kv_cfg cfg = kv_cfg(4, 4, 1, 1, 4), got;
            tl_kv_pool *kv = NULL;
            cfg.format = formats[i], cfg.dtype = dtype;
            if (i >= 1 && i <= 5 && dtype == dtype_of[i - 1]) {
                CHECK_STATUS(tl_kv_pool_create(&cfg, &kv), TL_OK);
                tl_kv_pool_cfg(kv, &got);
                CHECK(memcmp(&got, &cfg, sizeof cfg) == 0, "format %u: cfg", formats[i]);
                tl_kv_pool_destroy(kv);
                continue;
            }
            /* unsupported is looked at before the size */
            cfg.n_blocks = cfg.block_tokens = UINT32_MAX;
            refuse_cfg(&cfg, TL_EUNSUPPORTED, "TL_KV_FORMAT_F16 is of TL_F16; ");
            CHECK(strstr(tl_last_error(), "; TL_KV_FORMAT_F32 is of TL_F32"), "%s",
                  tl_last_error());
        }
    tl_kv_cfg longest = kv_cfg(4, 4, 1, 1, 4);
    longest.format = UINT32_MAX, longest.dtype = INT32_MIN;
    refuse_cfg(&longest, TL_EUNSUPPORTED, "format 4294967295 of dtype -2147483648; ");
    CHECK(strstr(tl_last_error(), "TL_KV_FORMAT_F32 is of TL_F32"), "the line is cut short: %s",
          tl_last_error());
}

TEST(create_refuses_sizes_that_wrap_without_asking_for_memory)
{
    struct kv_hook hook = {.fail_at = -1};
    kv_hook_install(&hook);
    static const uint32_t all = UINT32_MAX;
    const tl_kv_cfg bad[] = {
        kv_cfg((1u << 31) - 1, 1u << 20, 1, 1u << 10, 1u << 10),  /* 2^73 */
        kv_cfg(all, all, 1, 1, 1),
        kv_cfg(1, all, all, 1, 1),
        kv_cfg(all, all, all, all, all),
        kv_cfg(1u << 31, 1u << 31, 1, 1, 1),                      /* 2^64: 0 if it wrapped */
        kv_cfg(1, 1u << 16, 1u << 15, 1u << 16, 1u << 15),        /* a block of 2^64 */
        /* 2^63: fits size_t, not an address difference */
        kv_cfg(1u << 30, 1u << 30, 1, 1, 2),
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        refuse_cfg(&bad[i], TL_EINVAL, "address space");
    /* in eight bits it may be the scales that are too many */
    for (uint32_t format = 2; format <= 3; format++) {
        tl_kv_cfg cfg = kv_cfg(1, all, 1, 1, all);
        cfg.format = format, cfg.dtype = dtype_of[format - 1];
        refuse_cfg(&cfg, TL_EINVAL, "address space");
        cfg = kv_cfg(1, 1u << 20, 1u << 20, 1u << 20, 4); /* strips of 2^23 bytes: 2^64 */
        cfg.format = format, cfg.dtype = dtype_of[format - 1];
        refuse_cfg(&cfg, TL_EINVAL, "address space");
    }
    CHECK(hook.calls == 0, "%d calls", hook.calls);
    tl_set_allocator(NULL);
}

TEST(create_fails_clean_at_every_allocation)
{
    const tl_kv_cfg cfg = kv_cfg(8, 4, 2, 2, 8);
    int at = 0;
    for (;; at++) {
        struct kv_hook hook = {.fail_at = at};
        tl_kv_pool *kv = (tl_kv_pool *)&hook;
        kv_hook_install(&hook);
        const tl_status got = tl_kv_pool_create(&cfg, &kv);
        if (got == TL_OK) {
            tl_kv_pool_destroy(kv);
            CHECK(hook.live == 0, "%d pieces leak", hook.live);
            break;
        }
        CHECK(got == TL_ENOMEM && !kv && hook.live == 0, "call %d: %s, %d pieces live", at,
              tl_status_str(got), hook.live);
        CHECK(strncmp(tl_last_error(), "tl_kv_pool_create: no ", 22) == 0, "%s", tl_last_error());
    }
    CHECK(at >= 1 && at <= 3, "%d allocations", at);
    tl_set_allocator(NULL);
}

TEST(memory_goes_back_to_the_hook_it_came_from_and_use_takes_none)
{
    struct kv_hook first = {.fail_at = -1}, second = {.fail_at = 0};
    uint32_t ids[8], copy;
    kv_hook_install(&first);
    tl_kv_pool *kv = kv_new(8, 2, 1, 1, 4);
    const int calls = first.calls;
    kv_hook_install(&second);
    for (int round = 0; round < 50; round++) {
        CHECK_STATUS(tl_kv_alloc(kv, 4, ids), TL_OK);
        tl_kv_ref(kv, ids[0]);
        CHECK_STATUS(tl_kv_cow(kv, ids[0], &copy), TL_OK);
        CHECK_STATUS(tl_kv_set_fill(kv, copy, 2), TL_OK);
        CHECK_STATUS(tl_kv_register(kv, copy, 1 + (uint64_t)round), TL_OK);
        CHECK_STATUS(tl_kv_unref(kv, copy), TL_OK);
        for (int i = 0; i < 4; i++)
            CHECK_STATUS(tl_kv_unref(kv, ids[i]), TL_OK);
    }
    tl_kv_pool_destroy(kv);
    CHECK(first.live == 0 && first.calls == calls && second.calls == 0 && second.live == 0,
          "first %d live %d, second %d", first.calls, first.live, second.calls);
    tl_set_allocator(NULL);
    tl_kv_pool_destroy(NULL);
}

TEST(a_million_blocks_cost_little_beside_their_memory)
{
    struct kv_hook hook = {.fail_at = -1, .endless = 1};
    kv_hook_install(&hook);
    tl_kv_pool *kv = kv_new(1000000, 16, 32, 8, 128); /* 2 MiB a block */
    const size_t data = (size_t)1000000 * 16 * 32 * 8 * 128 * 2 * 2;
    CHECK(hook.bytes - data <= 40u * 1000000, "%zu bytes of records", hook.bytes - data);
    CHECK(hook.calls <= 3, "%d allocations", hook.calls);
    CHECK(hook.last == data && hook.last_align >= TL_KV_ALIGN, "last %zu at %zu", hook.last,
          hook.last_align);
    tl_kv_pool_destroy(kv);
    CHECK(hook.live == 0, "%d live", hook.live);
    tl_set_allocator(NULL);
}

static long resident_bytes(void)
{
    long size = 0, resident = 0;
    FILE *f = fopen("/proc/self/statm", "r");
    CHECK(f != NULL, "no statm");
    const int got = fscanf(f, "%ld %ld", &size, &resident);
    fclose(f);
    CHECK(got == 2, "statm");
    return resident * sysconf(_SC_PAGESIZE);
}

TEST(creating_touches_no_block_memory)
{
    static const struct {
        uint32_t n_blocks, tokens, layers, heads, dim;
    } shape[] = {{1u << 16, 16, 1, 8, 128},   /* 4 GiB in blocks of 64 KiB */
                 {1u << 22, 16, 1, 1, 16}};   /* 4 GiB in blocks of 1 KiB: records count too */
    for (int i = 0; i < 2; i++) {
        const long before = resident_bytes();
        tl_kv_pool *kv = kv_new(shape[i].n_blocks, shape[i].tokens, shape[i].layers, shape[i].heads,
                                shape[i].dim);
        const long created = resident_bytes() - before;
        CHECK(created < 64 << 20, "shape %d: creating made %ld bytes resident", i, created);
        for (int j = 0; j < 100; j++)
            memset(kv_bytes(kv, kv_one(kv)), 1, tl_kv_block_bytes(kv));
        const long used = resident_bytes() - before;
        CHECK(used < 96 << 20, "shape %d: 100 blocks made %ld bytes resident", i, used);
        tl_kv_pool_destroy(kv);
    }
}

TEST(offsets_are_64_bit_in_a_pool_of_hundreds_of_gigabytes)
{
    const tl_kv_cfg cfg = kv_cfg(153600, 16, 32, 8, 128); /* 300 GiB in blocks of 2 MiB */
    tl_kv_pool *kv;
    const tl_status got = tl_kv_pool_create(&cfg, &kv);
    if (got == TL_ENOMEM) { /* an address space limit, or strict overcommit */
        fprintf(stderr, "    no 300 GiB of address space here: %s\n", tl_last_error());
        return;
    }
    CHECK_STATUS(got, TL_OK);
    const size_t slab = (size_t)16 * 8 * 128 * 2;
    unsigned char *first = tl_kv_block_ptr(kv, 0, 0, 0), *last = tl_kv_block_ptr(kv, 153599, 31, 1);
    CHECK((size_t)(last - first) == (size_t)153600 * 64 * slab - slab, "last slab at %zu",
          (size_t)(last - first));
    last[slab - 1] = 0x5A;
    first[0] = 0xA5;
    CHECK(last[slab - 1] == 0x5A && first[0] == 0xA5, "written");
    tl_kv_pool_destroy(kv);
}

TEST(slabs_lie_in_the_documented_order_on_64_byte_boundaries)
{
    static const uint32_t dims[][4] = {{16, 2, 3, 64}, {1, 1, 1, 32}, {4, 3, 2, 8},
                                       {2, 5, 16, 1},  {3, 2, 1, 5},  {16, 8, 8, 128}};
    for (size_t i = 0; i < sizeof dims / sizeof dims[0]; i++) {
        const uint32_t *d = dims[i];
        const size_t slab = (size_t)2 * d[0] * d[2] * d[3];
        tl_kv_pool *kv = kv_new(5, d[0], d[1], d[2], d[3]);
        CHECK(tl_kv_block_bytes(kv) == slab * 2 * d[1], "%zu", tl_kv_block_bytes(kv));
        for (uint32_t id = 0; id < 5; id++)
            for (uint32_t layer = 0; layer < d[1]; layer++)
                for (int is_v = 0; is_v < 2; is_v++) {
                    const unsigned char *p = tl_kv_block_ptr(kv, id, layer, is_v ? -7 : 0);
                    const size_t at = ((size_t)id * d[1] + layer) * 2 * slab + (is_v ? slab : 0);
                    CHECK(p == kv_bytes(kv, 0) + at, "block %u layer %u %d", id, layer, is_v);
                    CHECK(slab % 64 != 0 || (uintptr_t)p % 64 == 0, "%p", (const void *)p);
                }
        tl_kv_cfg cfg = {0};
        tl_kv_pool_cfg(kv, &cfg);
        const tl_kv_cfg want = kv_cfg(5, d[0], d[1], d[2], d[3]);
        CHECK(memcmp(&cfg, &want, sizeof cfg) == 0, "cfg");
        tl_kv_pool_destroy(kv);
    }
}

/* ---- every function against NULL and ids that are none ---- */

static const uint32_t not_ids[] = {4, 5, 0x7FFFFFFF, 0x80000000, UINT32_MAX};

static void say(const char *fn, const char *words)
{
    const size_t n = strlen(fn);
    CHECK(strncmp(tl_last_error(), fn, n) == 0 && tl_last_error()[n] == ':' &&
              strstr(tl_last_error(), words),
          "\"%s\" is not \"%s: ...%s...\"", tl_last_error(), fn, words);
    tl_set_last_error(NULL);
}

TEST(null_is_refused_and_named)
{
    tl_kv_pool *kv = kv_new(4, 4, 1, 1, 4);
    uint32_t id = 77;
    tl_kv_stats stats = {1, 2, 3, 4, 5};
    tl_kv_cfg cfg = kv_cfg(1, 2, 3, 4, 5);
    tl_set_last_error(NULL);
    CHECK_STATUS(tl_kv_alloc(NULL, 1, &id), TL_EINVAL);
    say("tl_kv_alloc", "pool is NULL");
    CHECK_STATUS(tl_kv_alloc(NULL, 0, &id), TL_EINVAL);
    say("tl_kv_alloc", "pool is NULL");
    CHECK_STATUS(tl_kv_alloc(kv, 1, NULL), TL_EINVAL);
    say("tl_kv_alloc", "ids is NULL");
    tl_kv_ref(NULL, 0);
    say("tl_kv_ref", "pool is NULL");
    CHECK_STATUS(tl_kv_unref(NULL, 0), TL_EINVAL);
    say("tl_kv_unref", "pool is NULL");
    CHECK_STATUS(tl_kv_cow(NULL, 0, &id), TL_EINVAL);
    say("tl_kv_cow", "pool is NULL");
    CHECK_STATUS(tl_kv_cow(kv, 0, NULL), TL_EINVAL);
    say("tl_kv_cow", "out is NULL");
    CHECK_STATUS(tl_kv_set_fill(NULL, 0, 0), TL_EINVAL);
    say("tl_kv_set_fill", "pool is NULL");
    CHECK_STATUS(tl_kv_set_length(NULL, &id, 1, 0, 0), TL_EINVAL);
    say("tl_kv_set_length", "pool is NULL");
    CHECK_STATUS(tl_kv_set_length(kv, NULL, 1, 0, 0), TL_EINVAL);
    say("tl_kv_set_length", "block_table is NULL");
    CHECK(tl_kv_fill(NULL, 0) == 0, "fill");
    say("tl_kv_fill", "pool is NULL");
    CHECK(tl_kv_refs(NULL, 0) == 0, "refs");
    say("tl_kv_refs", "pool is NULL");
    CHECK_STATUS(tl_kv_register(NULL, 0, 1), TL_EINVAL);
    say("tl_kv_register", "pool is NULL");
    CHECK_STATUS(tl_kv_lookup(NULL, 1, &id), TL_EINVAL);
    say("tl_kv_lookup", "pool is NULL");
    CHECK_STATUS(tl_kv_lookup(kv, 1, NULL), TL_EINVAL);
    say("tl_kv_lookup", "id is NULL");
    CHECK(tl_kv_block_ptr(NULL, 0, 0, 0) == NULL, "ptr");
    say("tl_kv_block_ptr", "pool is NULL");
    CHECK(tl_kv_block_bytes(NULL) == 0, "bytes");
    say("tl_kv_block_bytes", "pool is NULL");
    tl_kv_pool_cfg(NULL, &cfg);
    say("tl_kv_pool_cfg", "pool is NULL");
    tl_kv_pool_cfg(kv, NULL);
    say("tl_kv_pool_cfg", "out is NULL");
    tl_kv_block block = {5, 6, 7};
    CHECK_STATUS(tl_kv_blocks_get(NULL, 0, 1, &block), TL_EINVAL);
    say("tl_kv_blocks_get", "pool is NULL");
    CHECK_STATUS(tl_kv_blocks_get(kv, 0, 1, NULL), TL_EINVAL);
    say("tl_kv_blocks_get", "out is NULL");
    tl_kv_stats_get(NULL, &stats);
    say("tl_kv_stats_get", "pool is NULL");
    tl_kv_stats_get(kv, NULL);
    say("tl_kv_stats_get", "out is NULL");
    CHECK(tl_kv_block_hash(5, NULL, 3) == 0, "hash");
    say("tl_kv_block_hash", "3");
    CHECK(id == 77 && block.hash == 5 && block.fill == 7 && stats.free == 1 &&
              stats.evictions == 4 && stats.unrepresentable == 5 && cfg.head_dim == 5,
          "an output was written");
    CHECK_STATS(kv, 4, 0, 0, 0);
    tl_kv_pool_destroy(kv);
}

TEST(a_length_fills_the_blocks_of_its_positions_and_no_others)
{
    tl_kv_pool *kv = kv_new(8, 4, 1, 1, 4);
    uint32_t table[4];
    CHECK_STATUS(tl_kv_alloc(kv, 4, table), TL_OK);
    for (int64_t first = 0; first <= 16; first++)
        for (int64_t length = first; length <= 16; length++) {
            for (int i = 0; i < 4; i++)
                CHECK_STATUS(tl_kv_set_fill(kv, table[i], 1), TL_OK);
            CHECK_STATUS(tl_kv_set_length(kv, table, 4, first, length), TL_OK);
            for (int64_t i = 0; i < 4; i++) {
                bool touched = false;
                for (int64_t p = first; p < length; p++)
                    touched |= p / 4 == i;
                const uint32_t want = !touched              ? 1
                                      : length >= 4 * i + 4 ? 4
                                                            : (uint32_t)(length - 4 * i);
                CHECK(tl_kv_fill(kv, table[i]) == want,
                      "positions %lld to %lld, block %lld: %u, want %u", (long long)first,
                      (long long)length, (long long)i, tl_kv_fill(kv, table[i]), want);
            }
        }
    tl_kv_pool_destroy(kv);
}

TEST(a_length_that_cannot_be_set_changes_no_fill)
{
    tl_kv_pool *kv = kv_new(8, 4, 1, 1, 4);
    const uint32_t good[3] = {kv_one(kv), kv_one(kv), kv_one(kv)}, named = kv_named(kv, 5),
                   freed = kv_one(kv);
    CHECK_STATUS(tl_kv_unref(kv, freed), TL_OK);
    const struct {
        uint32_t table[3];
        int32_t n_table;
        int64_t first, length;
        const char *word;
    } bad[] = {
        {{good[0], good[1], good[2]}, 3, 0, 13, "positions 0 to 13: the table has 3 blocks of 4"},
        {{good[0], good[1], good[2]}, 3, -1, 3, "positions -1 to 3"},
        {{good[0], good[1], good[2]}, 3, 5, 4, "positions 5 to 4"},
        {{good[0], good[1], good[2]}, 3, 0, INT64_MAX, "positions 0 to"},
        {{good[0], good[1], good[2]}, -1, 0, 0, "has -1 blocks"},
        {{good[0], good[1], named}, 3, 0, 12, "is registered"},
        {{good[0], good[1], freed}, 3, 0, 9, "is not used"},
        {{good[0], good[1], 8}, 3, 0, 9, "block 8 is out of range"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        CHECK_STATUS(
            tl_kv_set_length(kv, bad[i].table, bad[i].n_table, bad[i].first, bad[i].length),
            TL_EINVAL);
        CHECK(strstr(tl_last_error(), bad[i].word), "case %zu: %s", i, tl_last_error());
        CHECK(tl_kv_fill(kv, good[0]) == 0 && tl_kv_fill(kv, good[1]) == 0,
              "case %zu: a fill was set", i);
    }
    CHECK_STATUS(tl_kv_set_length(kv, NULL, 0, 0, 0), TL_OK);
    tl_kv_pool_destroy(kv);
}

TEST(a_look_at_blocks_tells_free_used_and_cached_apart)
{
    tl_kv_pool *kv = kv_new(6, 4, 1, 1, 4);
    const uint32_t named = kv_named(kv, 99), used = kv_one(kv), freed = kv_one(kv),
                   cached = kv_named(kv, 7);
    tl_kv_block got[7];
    tl_kv_ref(kv, used);
    CHECK_STATUS(tl_kv_set_fill(kv, used, 3), TL_OK);
    CHECK_STATUS(tl_kv_unref(kv, freed), TL_OK);
    CHECK_STATUS(tl_kv_unref(kv, cached), TL_OK);
    memset(got, 0x77, sizeof got);
    CHECK_STATUS(tl_kv_blocks_get(kv, 0, 6, got), TL_OK);
    for (uint32_t id = 0; id < 6; id++) { /* blocks 4 and 5 were never handed out */
        const uint64_t hash = id == named ? 99 : id == cached ? 7 : 0;
        const uint32_t refs = id == named  ? 1
                              : id == used ? 2
                                           : 0,
                       fill = id == named || id == cached ? 4
                              : id == used                ? 3
                                                          : 0;
        CHECK(got[id].hash == hash && got[id].refs == refs && got[id].fill == fill,
              "block %u: hash %llu, refs %u, fill %u", id, (unsigned long long)got[id].hash,
              got[id].refs, got[id].fill);
    }
    CHECK(got[6].refs == 0x77777777, "written past the range");
    memset(got, 0x77, sizeof got);
    CHECK_STATUS(tl_kv_blocks_get(kv, used, 1, got), TL_OK);
    CHECK(got[0].fill == 3 && got[1].fill == 0x77777777, "a range of one");
    CHECK_STATUS(tl_kv_blocks_get(kv, 6, 0, NULL), TL_OK);
    const uint32_t bad[][2] = {{0, 7}, {6, 1}, {7, 0}, {1, UINT32_MAX}, {UINT32_MAX, 2}};
    for (int i = 0; i < 5; i++) {
        got[0].refs = 0x77777777;
        CHECK_STATUS(tl_kv_blocks_get(kv, bad[i][0], bad[i][1], got), TL_EINVAL);
        CHECK(strstr(tl_last_error(), "out of range, the pool has 6") && got[0].refs == 0x77777777,
              "case %d: %s", i, tl_last_error());
    }
    tl_kv_pool_destroy(kv);
}

TEST(ids_out_of_range_are_refused_and_named)
{
    tl_kv_pool *kv = kv_new(4, 4, 2, 1, 4);
    kv_paint(kv, 1);
    kv_one(kv);
    for (size_t i = 0; i < sizeof not_ids / sizeof not_ids[0]; i++) {
        const uint32_t id = not_ids[i];
        uint32_t out = 99, got = 1;
        void *p = kv;
        tl_status st = TL_OK;
        char words[32];
        snprintf(words, sizeof words, "block %u is out of range", id);
        CHECK_REFUSED(kv, tl_kv_ref(kv, id), "tl_kv_ref", words);
        CHECK_REFUSED(kv, st = tl_kv_unref(kv, id), "tl_kv_unref", words);
        CHECK(st == TL_EINVAL, "unref %d", st);
        CHECK_REFUSED(kv, st = tl_kv_cow(kv, id, &out), "tl_kv_cow", words);
        CHECK(st == TL_EINVAL && out == 99, "cow %d", st);
        CHECK_REFUSED(kv, st = tl_kv_set_fill(kv, id, 1), "tl_kv_set_fill", words);
        CHECK(st == TL_EINVAL, "set_fill %d", st);
        CHECK_REFUSED(kv, got = tl_kv_fill(kv, id), "tl_kv_fill", words);
        CHECK(got == 0, "fill %u", got);
        CHECK_REFUSED(kv, got = tl_kv_refs(kv, id) + 1, "tl_kv_refs", words);
        CHECK(got == 1, "refs %u", got);
        CHECK_REFUSED(kv, st = tl_kv_register(kv, id, 5), "tl_kv_register", words);
        CHECK(st == TL_EINVAL, "register %d", st);
        CHECK_REFUSED(kv, p = tl_kv_block_ptr(kv, id, 0, 0), "tl_kv_block_ptr", words);
        CHECK(p == NULL, "%p", p);
    }
    void *p = kv;
    CHECK_REFUSED(kv, p = tl_kv_block_ptr(kv, 0, 2, 0), "tl_kv_block_ptr", "layer 2");
    CHECK(p == NULL, "%p", p);
    tl_kv_pool_destroy(kv);
}

TEST(free_and_cached_blocks_take_no_reference_copy_fill_or_hash)
{
    tl_kv_pool *kv = kv_new(4, 2, 1, 1, 4);
    const uint32_t cached = kv_named(kv, 50), given_back = kv_one(kv), never_taken = 3;
    CHECK_STATUS(tl_kv_set_fill(kv, given_back, 2), TL_OK);
    CHECK_STATUS(tl_kv_unref(kv, cached), TL_OK);
    CHECK_STATUS(tl_kv_unref(kv, given_back), TL_OK);
    const uint32_t ids[] = {cached, given_back, never_taken};
    for (int i = 0; i < 3; i++) {
        const uint32_t id = ids[i];
        uint32_t out = 99;
        tl_status st = TL_OK;
        char words[32];
        snprintf(words, sizeof words, "block %u is not used", id);
        CHECK_REFUSED(kv, tl_kv_ref(kv, id), "tl_kv_ref", words);
        CHECK_REFUSED(kv, st = tl_kv_unref(kv, id), "tl_kv_unref", words);
        CHECK(st == TL_EINVAL, "unref %d", st);
        CHECK_REFUSED(kv, st = tl_kv_cow(kv, id, &out), "tl_kv_cow", words);
        CHECK(st == TL_EINVAL && out == 99, "cow %d", st);
        CHECK_REFUSED(kv, st = tl_kv_set_fill(kv, id, 2), "tl_kv_set_fill", words);
        CHECK(st == TL_EINVAL, "set_fill %d", st);
        CHECK_REFUSED(kv, st = tl_kv_register(kv, id, 50), "tl_kv_register", words);
        CHECK(st == TL_EINVAL, "register %d", st);
        CHECK(tl_kv_refs(kv, id) == 0 && tl_kv_block_ptr(kv, id, 0, 0) != NULL, "block %u", id);
    }
    CHECK(tl_kv_fill(kv, cached) == 2 && tl_kv_fill(kv, given_back) == 0 &&
              tl_kv_fill(kv, never_taken) == 0,
          "fills");
    tl_kv_pool_destroy(kv);
}

/* ---- references ---- */

TEST(a_fresh_pool_hands_out_its_blocks_in_order)
{
    uint32_t ids[6];
    tl_kv_pool *kv = kv_new(6, 1, 1, 1, 1);
    CHECK_STATS(kv, 6, 0, 0, 0);
    CHECK_STATUS(tl_kv_alloc(kv, 2, ids), TL_OK);
    CHECK_STATUS(tl_kv_alloc(kv, 4, ids + 2), TL_OK);
    for (uint32_t i = 0; i < 6; i++)
        CHECK(ids[i] == i && tl_kv_refs(kv, i) == 1 && tl_kv_fill(kv, i) == 0, "ids[%u] = %u", i,
              ids[i]);
    CHECK_STATS(kv, 0, 6, 0, 0);
    tl_kv_pool_destroy(kv);
}

TEST(giving_back_more_than_was_taken_is_refused) /* KV-01 */
{
    tl_kv_pool *kv = kv_new(4, 4, 1, 1, 4);
    tl_status st = TL_OK;
    uint32_t seen = 0;
    const uint32_t b = kv_one(kv);
    CHECK(tl_kv_refs(kv, b) == 1, "one");
    tl_kv_ref(kv, b);
    CHECK(tl_kv_refs(kv, b) == 2, "two");
    CHECK_STATUS(tl_kv_unref(kv, b), TL_OK);
    CHECK_STATUS(tl_kv_unref(kv, b), TL_OK);
    CHECK_STATS(kv, 4, 0, 0, 0);
    CHECK_REFUSED(kv, st = tl_kv_unref(kv, b), "tl_kv_unref", "not used");
    CHECK(st == TL_EINVAL, "%d", st);
    CHECK_REFUSED(kv, tl_kv_ref(kv, b), "tl_kv_ref", "not used");
    for (int i = 0; i < 4; i++)
        seen |= 1u << kv_one(kv);
    CHECK(seen == 15, "ids %x", seen);
    uint32_t id = 99;
    CHECK_REFUSED(kv, st = tl_kv_alloc(kv, 1, &id), "tl_kv_alloc", "1 blocks wanted");
    CHECK(st == TL_EFULL && id == 99, "%d %u", st, id);
    tl_kv_pool_destroy(kv);
}

TEST(a_count_of_references_never_wraps) /* KV-01 */
{
    tl_kv_pool *kv = kv_new(2, 1, 1, 1, 1);
    const uint32_t b = kv_named(kv, 9);
    uint32_t id = 99, copy = 99;
    tl_status st = TL_OK;
    kv->block[b].refs = TL_KV_MAX_REFS - 2;
    tl_kv_ref(kv, b);
    CHECK_STATUS(tl_kv_lookup(kv, 9, &id), TL_OK);
    CHECK(tl_kv_refs(kv, b) == TL_KV_MAX_REFS && id == b, "at the limit");
    id = 99;
    CHECK_REFUSED(kv, tl_kv_ref(kv, b), "tl_kv_ref", "4294967295 references");
    CHECK_REFUSED(kv, st = tl_kv_lookup(kv, 9, &id), "tl_kv_lookup", "4294967295 references");
    CHECK(st == TL_EFULL && id == 99, "lookup %d, id %u", st, id);
    CHECK_STATUS(tl_kv_cow(kv, b, &copy), TL_OK);
    CHECK(copy != b && tl_kv_refs(kv, b) == TL_KV_MAX_REFS - 1 && tl_kv_refs(kv, copy) == 1,
          "a copy takes one off");
    tl_kv_ref(kv, b);
    CHECK_STATUS(tl_kv_unref(kv, b), TL_OK);
    CHECK(tl_kv_refs(kv, b) == TL_KV_MAX_REFS - 1, "and unref another");
    tl_kv_pool_destroy(kv);
}

TEST(alloc_is_all_or_nothing)
{
    tl_kv_pool *kv = kv_new(5, 1, 1, 1, 2);
    uint32_t ids[6] = {90, 91, 92, 93, 94, 95};
    tl_status st = TL_OK;
    kv_paint(kv, 2);
    const uint32_t a = kv_named(kv, 1), b = kv_named(kv, 2);
    kv_one(kv);
    CHECK_STATUS(tl_kv_unref(kv, a), TL_OK);
    CHECK_STATUS(tl_kv_unref(kv, b), TL_OK);
    CHECK_STATS(kv, 2, 1, 2, 0);
    CHECK_REFUSED(kv, st = tl_kv_alloc(kv, 5, ids), "tl_kv_alloc",
                  "5 blocks wanted, 2 free and 2 cached of 5");
    CHECK(st == TL_EFULL && ids[0] == 90 && ids[4] == 94, "%d", st);
    CHECK_REFUSED(kv, st = tl_kv_alloc(kv, UINT32_MAX, ids), "tl_kv_alloc",
                  "4294967295 blocks wanted");
    CHECK(st == TL_EFULL && ids[0] == 90, "%d", st);
    tl_set_last_error("as it was");
    CHECK_STATUS(tl_kv_alloc(kv, 0, ids), TL_OK);
    CHECK_STATUS(tl_kv_alloc(kv, 0, NULL), TL_OK);
    CHECK(ids[0] == 90 && strcmp(tl_last_error(), "as it was") == 0, "none");
    CHECK_STATUS(tl_kv_alloc(kv, 4, ids), TL_OK);
    CHECK(ids[2] == a && ids[3] == b && ids[4] == 94, "cached ones go last, oldest first: %u %u",
          ids[2], ids[3]);
    CHECK_STATS(kv, 0, 5, 0, 2);
    tl_kv_pool_destroy(kv);
}

TEST(alloc_gives_fill_0_and_leaves_memory_alone)
{
    tl_kv_pool *kv = kv_new(1, 4, 1, 2, 4);
    const uint32_t b = kv_one(kv);
    memset(kv_bytes(kv, b), 0x3C, tl_kv_block_bytes(kv));
    CHECK_STATUS(tl_kv_set_fill(kv, b, 3), TL_OK);
    CHECK_STATUS(tl_kv_unref(kv, b), TL_OK);
    CHECK(kv_one(kv) == b && tl_kv_fill(kv, b) == 0, "fill %u", tl_kv_fill(kv, b));
    for (size_t i = 0; i < tl_kv_block_bytes(kv); i++)
        CHECK(kv_bytes(kv, b)[i] == 0x3C, "byte %zu", i);
    tl_kv_pool_destroy(kv);
}

/* ---- copy on write ---- */

TEST(cow_of_a_sole_reference_is_the_block_itself)
{
    tl_kv_pool *kv = kv_new(1, 2, 1, 1, 4);
    const uint32_t b = kv_named(kv, 3);
    uint32_t out = 99;
    CHECK_STATUS(tl_kv_cow(kv, b, &out), TL_OK);
    CHECK(out == b && tl_kv_refs(kv, b) == 1, "registered too");
    CHECK_STATS(kv, 0, 1, 0, 0);
    tl_kv_pool_destroy(kv);
}

TEST(cow_of_a_shared_block_moves_one_reference_to_a_copy)
{
    tl_kv_pool *kv = kv_new(3, 4, 2, 2, 8);
    kv_paint(kv, 3);
    const uint32_t b = kv_one(kv);
    uint32_t out = 99;
    CHECK_STATUS(tl_kv_set_fill(kv, b, 3), TL_OK);
    tl_kv_ref(kv, b);
    tl_kv_ref(kv, b);
    CHECK_STATUS(tl_kv_cow(kv, b, &out), TL_OK);
    CHECK(out != b && tl_kv_refs(kv, b) == 2 && tl_kv_refs(kv, out) == 1 &&
              tl_kv_fill(kv, out) == 3,
          "copy %u", out);
    CHECK(memcmp(kv_bytes(kv, b), kv_bytes(kv, out), tl_kv_block_bytes(kv)) == 0,
          "positions past the fill move too");
    CHECK_STATS(kv, 1, 2, 0, 0);
    tl_kv_pool_destroy(kv);
}

TEST(the_copy_of_a_registered_block_has_no_hash)
{
    tl_kv_pool *kv = kv_new(3, 2, 1, 1, 4);
    const uint32_t b = kv_named(kv, 3);
    uint32_t copy, found;
    tl_kv_ref(kv, b);
    CHECK_STATUS(tl_kv_cow(kv, b, &copy), TL_OK);
    CHECK_STATUS(tl_kv_unref(kv, copy), TL_OK);
    CHECK_STATS(kv, 2, 1, 0, 0); /* free, not cached */
    CHECK_STATUS(tl_kv_lookup(kv, 3, &found), TL_OK);
    CHECK(found == b, "%u", found);
    tl_kv_pool_destroy(kv);
}

TEST(cow_evicts_as_alloc_does_but_never_what_it_copies)
{
    tl_kv_pool *kv = kv_new(2, 2, 1, 1, 4);
    uint32_t out = 99, found = 99;
    tl_status st = TL_OK;
    kv_paint(kv, 4);
    const uint32_t shared = kv_named(kv, 1), other = kv_named(kv, 2);
    tl_kv_ref(kv, shared);
    CHECK_REFUSED(kv, st = tl_kv_cow(kv, shared, &out), "tl_kv_cow", "block 0");
    CHECK(st == TL_EFULL && out == 99, "%d", st);
    CHECK_STATUS(tl_kv_unref(kv, other), TL_OK);
    CHECK_STATUS(tl_kv_cow(kv, shared, &out), TL_OK);
    CHECK(out == other && tl_kv_refs(kv, shared) == 1, "%u", out);
    CHECK_STATS(kv, 0, 2, 0, 1);
    CHECK_STATUS(tl_kv_lookup(kv, 2, &found), TL_ENOTFOUND);
    CHECK_STATUS(tl_kv_lookup(kv, 1, &found), TL_OK);
    CHECK(found == shared && memcmp(kv_bytes(kv, 0), kv_bytes(kv, 1), tl_kv_block_bytes(kv)) == 0,
          "content");
    tl_kv_pool_destroy(kv);
}

/* ---- fill and index ---- */

TEST(only_full_blocks_enter_the_index) /* KV-08 */
{
    tl_kv_pool *kv = kv_new(2, 4, 1, 1, 4);
    const uint32_t b = kv_one(kv);
    tl_status st = TL_OK;
    CHECK_REFUSED(kv, st = tl_kv_register(kv, b, 7), "tl_kv_register", "0 tokens of 4");
    CHECK(st == TL_EINVAL, "%d", st);
    CHECK_STATUS(tl_kv_set_fill(kv, b, 3), TL_OK);
    CHECK_REFUSED(kv, st = tl_kv_register(kv, b, 7), "tl_kv_register", "3 tokens of 4");
    CHECK(st == TL_EINVAL, "%d", st);
    CHECK_REFUSED(kv, st = tl_kv_set_fill(kv, b, 5), "tl_kv_set_fill", "fill 5");
    CHECK(st == TL_EINVAL, "%d", st);
    CHECK_REFUSED(kv, st = tl_kv_set_fill(kv, b, UINT32_MAX), "tl_kv_set_fill", "fill 4294967295");
    CHECK(st == TL_EINVAL, "%d", st);
    CHECK_STATUS(tl_kv_set_fill(kv, b, 0), TL_OK);
    CHECK_STATUS(tl_kv_set_fill(kv, b, 4), TL_OK);
    CHECK(tl_kv_fill(kv, b) == 4, "fill");
    CHECK_REFUSED(kv, st = tl_kv_register(kv, b, 0), "tl_kv_register", "hash 0");
    CHECK(st == TL_EINVAL, "%d", st);
    CHECK_STATUS(tl_kv_register(kv, b, 7), TL_OK);
    for (uint32_t fill = 0; fill <= 4; fill++) {
        CHECK_REFUSED(kv, st = tl_kv_set_fill(kv, b, fill), "tl_kv_set_fill", "registered");
        CHECK(st == TL_EINVAL, "%d", st);
    }
    tl_kv_pool_destroy(kv);
}

TEST(a_hash_has_one_holder_and_a_block_one_hash)
{
    tl_kv_pool *kv = kv_new(3, 1, 1, 1, 4);
    const uint32_t a = kv_named(kv, 7), b = kv_one(kv);
    tl_status st = TL_OK;
    uint32_t found;
    CHECK_STATUS(tl_kv_register(kv, a, 7), TL_OK);
    CHECK_REFUSED(kv, st = tl_kv_register(kv, a, 8), "tl_kv_register", "0x0000000000000007");
    CHECK(st == TL_EINVAL, "%d", st);
    /* TL_EINVAL before TL_EBUSY */
    CHECK_REFUSED(kv, st = tl_kv_register(kv, b, 7), "tl_kv_register", "0 tokens of 1");
    CHECK(st == TL_EINVAL, "%d", st);
    CHECK_STATUS(tl_kv_set_fill(kv, b, 1), TL_OK);
    CHECK_REFUSED(kv, st = tl_kv_register(kv, b, 7), "tl_kv_register", "belongs to block 0");
    CHECK(st == TL_EBUSY, "%d", st);
    CHECK_STATUS(tl_kv_register(kv, b, 8), TL_OK); /* it was unregistered still */
    /* both wrong: TL_EINVAL */
    CHECK_REFUSED(kv, st = tl_kv_register(kv, a, 8), "tl_kv_register", "is registered under");
    CHECK(st == TL_EINVAL, "%d", st);
    CHECK_STATUS(tl_kv_unref(kv, a), TL_OK);
    const uint32_t c = kv_one(kv);
    CHECK_STATUS(tl_kv_set_fill(kv, c, 1), TL_OK);
    /* a cached holder counts */
    CHECK_REFUSED(kv, st = tl_kv_register(kv, c, 7), "tl_kv_register", "belongs to block 0");
    CHECK(st == TL_EBUSY, "%d", st);
    CHECK_STATUS(tl_kv_lookup(kv, 7, &found), TL_OK);
    CHECK(found == a, "%u", found);
    tl_kv_pool_destroy(kv);
}

TEST(a_hit_takes_a_reference_and_a_miss_leaves_everything)
{
    tl_kv_pool *kv = kv_new(2, 1, 1, 1, 4);
    const uint64_t hash = 0x8000000000000001u;
    const uint32_t b = kv_named(kv, hash);
    uint32_t id = 99;
    tl_set_last_error("as it was");
    static const uint64_t absent[] = {0, 1, 0x80000000u, 0x8000000000000000u, UINT64_MAX};
    for (int i = 0; i < 5; i++)
        CHECK_STATUS(tl_kv_lookup(kv, absent[i], &id), TL_ENOTFOUND);
    CHECK(id == 99 && strcmp(tl_last_error(), "as it was") == 0 && tl_kv_refs(kv, b) == 1,
          "a miss");
    CHECK_STATUS(tl_kv_lookup(kv, hash, &id), TL_OK);
    CHECK(id == b && tl_kv_refs(kv, b) == 2, "a hit on a used block");
    CHECK_STATUS(tl_kv_unref(kv, b), TL_OK);
    CHECK_STATUS(tl_kv_unref(kv, b), TL_OK);
    CHECK_STATS(kv, 1, 0, 1, 0);
    CHECK_STATUS(tl_kv_lookup(kv, hash, &id), TL_OK);
    CHECK(id == b && tl_kv_refs(kv, b) == 1 && tl_kv_fill(kv, b) == 1, "a hit on a cached block");
    CHECK_STATS(kv, 1, 1, 0, 0);
    CHECK(strcmp(tl_last_error(), "as it was") == 0, "\"%s\"", tl_last_error());
    tl_kv_pool_destroy(kv);

    kv = kv_new(2, 1, 1, 1, 4); /* no block was ever taken */
    CHECK_STATUS(tl_kv_lookup(kv, 5, &id), TL_ENOTFOUND);
    tl_kv_pool_destroy(kv);
}

TEST(a_reused_block_is_not_found_under_its_old_hash) /* KV-03 */
{
    tl_kv_pool *kv = kv_new(1, 1, 1, 1, 4);
    uint32_t id = 99;
    const uint32_t b = kv_named(kv, 101);
    CHECK_STATUS(tl_kv_unref(kv, b), TL_OK);
    CHECK_STATS(kv, 0, 0, 1, 0);
    CHECK(kv_one(kv) == b, "same block");
    CHECK_STATS(kv, 0, 1, 0, 1);
    CHECK_STATUS(tl_kv_lookup(kv, 101, &id), TL_ENOTFOUND);
    CHECK(tl_kv_refs(kv, b) == 1 && id == 99, "no reference");
    CHECK_STATUS(tl_kv_set_fill(kv, b, 1), TL_OK);
    CHECK_STATUS(tl_kv_register(kv, b, 102), TL_OK);
    CHECK_STATUS(tl_kv_unref(kv, b), TL_OK);
    CHECK_STATUS(tl_kv_lookup(kv, 102, &id), TL_OK);
    CHECK_STATUS(tl_kv_lookup(kv, 101, &id), TL_ENOTFOUND);
    tl_kv_pool_destroy(kv);
}

TEST(the_end_of_a_chain_given_back_first_goes_first) /* KV-06 */
{
    tl_kv_pool *kv = kv_new(3, 1, 1, 1, 4);
    uint32_t id;
    uint32_t chain[3];
    for (uint32_t i = 0; i < 3; i++)
        chain[i] = kv_named(kv, 11 + i);
    for (int i = 2; i >= 0; i--)
        CHECK_STATUS(tl_kv_unref(kv, chain[i]), TL_OK);
    CHECK_STATS(kv, 0, 0, 3, 0);
    CHECK(kv_one(kv) == chain[2], "the block of the last hash");
    CHECK_STATUS(tl_kv_lookup(kv, 11, &id), TL_OK);
    CHECK_STATUS(tl_kv_lookup(kv, 12, &id), TL_OK);
    CHECK_STATUS(tl_kv_lookup(kv, 13, &id), TL_ENOTFOUND);
    tl_status st = TL_OK;
    /* all are held */
    CHECK_REFUSED(kv, st = tl_kv_alloc(kv, 1, &id), "tl_kv_alloc", "0 free and 0 cached");
    CHECK(st == TL_EFULL, "%d", st);
    CHECK_STATUS(tl_kv_lookup(kv, 11, &id), TL_OK);
    CHECK_STATUS(tl_kv_lookup(kv, 12, &id), TL_OK);
    tl_kv_pool_destroy(kv);
}

TEST(a_hit_makes_a_cached_block_the_most_recent) /* KV-06 */
{
    tl_kv_pool *kv = kv_new(3, 1, 1, 1, 4);
    const uint32_t x = kv_named(kv, 1), y = kv_named(kv, 2), z = kv_one(kv);
    uint32_t id;
    CHECK_STATUS(tl_kv_unref(kv, x), TL_OK);
    CHECK_STATUS(tl_kv_unref(kv, y), TL_OK);
    CHECK_STATUS(tl_kv_lookup(kv, 1, &id), TL_OK);
    CHECK_STATUS(tl_kv_unref(kv, id), TL_OK);
    CHECK_STATUS(tl_kv_unref(kv, z), TL_OK);
    CHECK(kv_one(kv) == z, "a free block before any cached one");
    CHECK(kv_one(kv) == y, "then the one not touched since");
    CHECK(kv_one(kv) == x, "then the other");
    CHECK_STATS(kv, 0, 3, 0, 2);
    tl_kv_pool_destroy(kv);
}

/* ---- the hash ---- */

TEST(block_hashes_chain_over_the_prefix) /* KV-13 */
{
    static const uint32_t tokens[] = {1, 2, 3, 4};
    CHECK(tl_kv_block_hash(0, tokens, 2) == 0xA91AB0C1027B9366u, "first block");
    CHECK(tl_kv_block_hash(0xA91AB0C1027B9366u, tokens + 2, 2) == 0x03DF829571605C60u,
          "second block");
    /* FNV-1a over eight zero bytes, by its definition. */
    uint64_t want = 0xCBF29CE484222325u;
    for (int i = 0; i < 8; i++)
        want *= 0x100000001B3u;
    CHECK(tl_kv_block_hash(0, NULL, 0) == want, "no tokens");
}

TEST(every_byte_of_parent_and_tokens_counts) /* KV-13 */
{
    const uint32_t base[] = {0x01020304, 0xFFFFFFFF, 0};
    const uint64_t hash = tl_kv_block_hash(0x1122334455667788u, base, 3);
    for (int bit = 0; bit < 64; bit++)
        CHECK(tl_kv_block_hash(0x1122334455667788u ^ 1ull << bit, base, 3) != hash, "parent bit %d",
              bit);
    for (int bit = 0; bit < 96; bit++) {
        uint32_t other[3];
        memcpy(other, base, sizeof other);
        other[bit / 32] ^= 1u << bit % 32;
        CHECK(tl_kv_block_hash(0x1122334455667788u, other, 3) != hash, "token bit %d", bit);
    }
    CHECK(tl_kv_block_hash(0x1122334455667788u, base, 2) != hash, "length");
    /* Salts as first parents keep whole chains apart. */
    uint64_t chain[3] = {0, tl_kv_block_hash(0, (const uint32_t[]){'a'}, 1),
                         tl_kv_block_hash(0, (const uint32_t[]){'b'}, 1)};
    for (uint32_t block = 0; block < 4; block++) {
        uint32_t tokens[4];
        for (uint32_t i = 0; i < 4; i++)
            tokens[i] = 4 * block + i;
        for (int salt = 0; salt < 3; salt++)
            chain[salt] = tl_kv_block_hash(chain[salt], tokens, 4);
        CHECK(chain[0] != chain[1] && chain[1] != chain[2] && chain[0] != chain[2], "block %u",
              block);
    }
}

TEST(a_hash_of_0_becomes_1)
{
    /* FNV-1a 64 of the eight bytes D5 6B B9 53 42 87 08 36 is 0. */
    const uint64_t parent = 0x3608874253B96BD5u;
    uint64_t plain = 0xCBF29CE484222325u;
    for (int i = 0; i < 8; i++)
        plain = (plain ^ (parent >> 8 * i & 0xFF)) * 0x100000001B3u;
    CHECK(plain == 0, "0x%llx", (unsigned long long)plain);
    CHECK(tl_kv_block_hash(parent, NULL, 0) == 1, "not 1");
}

/* ---- the index under load ---- */

static uint32_t longest_chain(const tl_kv_pool *kv, double *mean_walk)
{
    uint64_t walked = 0, n = 0;
    uint32_t longest = 0;
    for (uint32_t bucket = 0; bucket < kv->n_touched; bucket++) {
        uint32_t length = 0;
        for (uint32_t id = kv->block[bucket].bucket; id != KV_NONE; id = kv->block[id].chain)
            walked += ++length, n++;
        longest = length > longest ? length : longest;
    }
    *mean_walk = n ? (double)walked / (double)n : 0;
    return longest;
}

static uint64_t patterned(int pattern, uint32_t i)
{
    const uint32_t tokens[] = {i, i + 1};
    switch (pattern) {
    case 0: return i + 1;
    case 1: return (uint64_t)(i + 1) << 32;
    case 2: return (uint64_t)(i + 1) << 47;
    case 3: return (uint64_t)(i + 1) * 4096;
    case 4: return UINT64_MAX - i;
    default: return tl_kv_block_hash(0, tokens, 2);
    }
}

TEST(the_index_finds_all_and_stays_short_for_any_pattern_of_hashes)
{
    enum { N = 20000 };
    for (int pattern = 0; pattern < 6; pattern++) {
        tl_kv_pool *kv = kv_new(N, 1, 1, 1, 1);
        uint32_t id = KV_NONE;
        double walk;
        for (uint32_t i = 0; i < N; i++)
            CHECK(kv_named(kv, patterned(pattern, i)) == i, "block %u", i);
        for (uint32_t i = 0; i < N; i++)
            CHECK(tl_kv_lookup(kv, patterned(pattern, i), &id) == TL_OK && id == i,
                  "pattern %d: %u gives %u", pattern, i, id);
        for (uint32_t i = N; i < 2 * N; i++)
            CHECK(tl_kv_lookup(kv, patterned(pattern, i), &id) == TL_ENOTFOUND, "pattern %d: %u",
                  pattern, i);
        const uint32_t longest = longest_chain(kv, &walk);
        CHECK(walk < 2.5 && longest < 24, "pattern %d: %.2f blocks walked, at most %u", pattern,
              walk, longest);
        kv_audit(kv);
        tl_kv_pool_destroy(kv);
    }
}

TEST(the_index_does_not_decay_as_hashes_come_and_go)
{
    enum { N = 1000, TURNS = 200000 };
    tl_kv_pool *kv = kv_new(N, 1, 1, 1, 1);
    uint64_t seed = 5, hash[N];
    double walk;
    /* a ring of cached blocks, each evicted by the N-th after it */
    for (uint32_t turn = 0; turn < TURNS; turn++) {
        const uint64_t fresh = rng_next(&seed) | 1;
        const uint32_t id = kv_named(kv, fresh);
        CHECK(id == turn % N, "turn %u: block %u", turn, id);
        hash[id] = fresh;
        CHECK_STATUS(tl_kv_unref(kv, id), TL_OK);
    }
    CHECK_STATS(kv, 0, 0, N, TURNS - N);
    const uint32_t longest = longest_chain(kv, &walk);
    CHECK(walk < 2.5 && longest < 24, "%.2f walked, at most %u", walk, longest);
    kv_audit(kv);
    for (uint32_t i = 0; i < N; i++) {
        uint32_t id;
        CHECK_STATUS(tl_kv_lookup(kv, hash[i], &id), TL_OK);
        CHECK(id == i, "%u", id);
    }
    tl_kv_pool_destroy(kv);
}

/* ---- random steps against a model that does everything the slow way ---- */

enum { MODEL_BLOCKS = 24, MODEL_TOKENS = 4, MODEL_HASHES = 40 };

struct model {
    uint32_t refs[MODEL_BLOCKS], fill[MODEL_BLOCKS], evictions;
    uint64_t hash[MODEL_BLOCKS], used_at[MODEL_BLOCKS], clock;
    uint16_t mark[MODEL_BLOCKS]; /* what stands in the block's memory */
};

static int model_holder(const struct model *m, uint64_t hash)
{
    for (int i = 0; i < MODEL_BLOCKS; i++)
        if (hash != 0 && m->hash[i] == hash)
            return i;
    return -1;
}

static tl_kv_stats model_stats(const struct model *m)
{
    tl_kv_stats s = {.evictions = m->evictions};
    for (int i = 0; i < MODEL_BLOCKS; i++)
        *(m->refs[i] ? &s.used : m->hash[i] ? &s.cached : &s.free) += 1;
    return s;
}

/* The model follows an allocation that gave `id`: it had to be a free block, or the one cached for
 * longest. */
static void model_take(struct model *m, uint32_t id, uint16_t mark)
{
    CHECK(id < MODEL_BLOCKS && m->refs[id] == 0, "block %u was taken while used", id);
    const tl_kv_stats s = model_stats(m);
    if (m->hash[id] != 0) {
        CHECK(s.free == 0, "block %u evicted with %u free", id, s.free);
        for (int i = 0; i < MODEL_BLOCKS; i++)
            CHECK(m->refs[i] || !m->hash[i] || m->used_at[i] >= m->used_at[id],
                  "%u evicted before the older %d", id, i);
        m->evictions++;
    }
    m->hash[id] = 0, m->refs[id] = 1, m->fill[id] = 0, m->mark[id] = mark;
}

static void stamp(tl_kv_pool *kv, uint32_t id, uint16_t mark)
{
    uint16_t *k = tl_kv_block_ptr(kv, id, 0, 0), *v = tl_kv_block_ptr(kv, id, 0, 1);
    k[0] = v[MODEL_TOKENS * 2 - 1] = mark;
}

static void step_alloc(tl_kv_pool *kv, struct model *m, uint64_t *seed)
{
    uint32_t ids[8] = {0};
    const uint32_t n = (uint32_t)rng_below(seed, 9);
    const tl_kv_stats s = model_stats(m);
    CHECK_STATUS(tl_kv_alloc(kv, n, ids), n <= s.free + s.cached ? TL_OK : TL_EFULL);
    for (uint32_t i = 0; n <= s.free + s.cached && i < n; i++) {
        const uint16_t mark = (uint16_t)rng_next(seed);
        model_take(m, ids[i], mark);
        stamp(kv, ids[i], mark);
    }
}

static void step_unref(tl_kv_pool *kv, struct model *m, uint32_t id)
{
    const int ok = id < MODEL_BLOCKS && m->refs[id] > 0;
    CHECK_STATUS(tl_kv_unref(kv, id), ok ? TL_OK : TL_EINVAL);
    if (ok && --m->refs[id] == 0) {
        m->used_at[id] = ++m->clock;
        m->fill[id] = m->hash[id] ? m->fill[id] : 0;
    }
}

static void step_cow(tl_kv_pool *kv, struct model *m, uint32_t id)
{
    uint32_t out = 99;
    const tl_kv_stats s = model_stats(m);
    const int used = id < MODEL_BLOCKS && m->refs[id] > 0,
              full = used && m->refs[id] > 1 && s.free + s.cached == 0;
    CHECK_STATUS(tl_kv_cow(kv, id, &out), !used ? TL_EINVAL : full ? TL_EFULL : TL_OK);
    if (!used || full) {
        CHECK(out == 99, "out %u", out);
    } else if (m->refs[id] == 1) {
        CHECK(out == id, "out %u", out);
    } else {
        CHECK(out != id, "a shared block came back");
        model_take(m, out, m->mark[id]);
        m->fill[out] = m->fill[id];
        m->refs[id]--;
    }
}

static void step_register(tl_kv_pool *kv, struct model *m, uint32_t id, uint64_t hash)
{
    const int holder = model_holder(m, hash);
    const int bad = id >= MODEL_BLOCKS || !m->refs[id] || m->fill[id] != MODEL_TOKENS ||
                    hash == 0 || (m->hash[id] && m->hash[id] != hash);
    const tl_status want = bad ? TL_EINVAL : holder >= 0 && holder != (int)id ? TL_EBUSY : TL_OK;
    CHECK_STATUS(tl_kv_register(kv, id, hash), want);
    if (want == TL_OK)
        m->hash[id] = hash;
}

static void step_lookup(tl_kv_pool *kv, struct model *m, uint64_t hash)
{
    uint32_t out = 99;
    const int holder = model_holder(m, hash);
    CHECK_STATUS(tl_kv_lookup(kv, hash, &out), holder < 0 ? TL_ENOTFOUND : TL_OK);
    CHECK(holder < 0 ? out == 99 : out == (uint32_t)holder, "hash %llu gave %u",
          (unsigned long long)hash, out);
    if (holder >= 0)
        m->refs[holder]++;
}

static void step_set_fill(tl_kv_pool *kv, struct model *m, uint32_t id, uint32_t fill)
{
    const int ok = id < MODEL_BLOCKS && m->refs[id] && !m->hash[id] && fill <= MODEL_TOKENS;
    CHECK_STATUS(tl_kv_set_fill(kv, id, fill), ok ? TL_OK : TL_EINVAL);
    if (ok)
        m->fill[id] = fill;
}

/* Exports up to three blocks and takes them in again: copies with hashes that are held already, or
 * no longer. */
static void step_travel(tl_kv_pool *kv, struct model *m, uint64_t *seed)
{
    unsigned char buf[28 + 3 * (12 + 4 * MODEL_TOKENS * 2) + 4];
    uint32_t from[3], to[3] = {99, 99, 99}, mark[3], fill[3];
    uint64_t hash[3];
    size_t written = 0;
    const uint32_t n = (uint32_t)rng_below(seed, 4);
    int ok = 1;
    for (uint32_t i = 0; i < n; i++) {
        from[i] = (uint32_t)rng_below(seed, MODEL_BLOCKS);
        ok = ok && m->refs[from[i]] && m->fill[from[i]];
        mark[i] = m->mark[from[i]], fill[i] = m->fill[from[i]], hash[i] = m->hash[from[i]];
    }
    CHECK_STATUS(tl_kv_export(kv, from, n, buf, sizeof buf, &written), ok ? TL_OK : TL_EINVAL);
    if (!ok)
        return;
    for (uint32_t i = 0; i < n && rng_below(seed, 2); i++)
        step_unref(kv, m, from[i]);
    const tl_kv_stats s = model_stats(m);
    const tl_status want = n <= s.free + s.cached ? TL_OK : TL_EFULL;
    CHECK_STATUS(tl_kv_import(kv, buf, written, to), want);
    for (uint32_t i = 0; want == TL_OK && i < n; i++)
        model_take(m, to[i], (uint16_t)mark[i]);
    for (uint32_t i = 0; want == TL_OK && i < n; i++) {
        m->fill[to[i]] = fill[i];
        if (fill[i] < MODEL_TOKENS) { /* V's last slot came as zeros */
            stamp(kv, to[i], (uint16_t)mark[i]);
        }
        if (model_holder(m, hash[i]) < 0)
            m->hash[to[i]] = hash[i];
    }
}

static void compare_with_model(const tl_kv_pool *kv, const struct model *m)
{
    const tl_kv_stats got = kv_stats(kv), want = model_stats(m);
    CHECK(memcmp(&got, &want, sizeof got) == 0, "stats %u %u %u %u, want %u %u %u %u", got.free,
          got.used, got.cached, got.evictions, want.free, want.used, want.cached, want.evictions);
    CHECK(got.free + got.used + got.cached == MODEL_BLOCKS, "sum");
    for (uint32_t id = 0; id < MODEL_BLOCKS; id++) {
        CHECK(tl_kv_refs(kv, id) == m->refs[id] && tl_kv_fill(kv, id) == m->fill[id], "block %u",
              id);
        if (m->refs[id] || m->hash[id]) {
            const uint16_t *k = tl_kv_block_ptr(kv, id, 0, 0), *v = tl_kv_block_ptr(kv, id, 0, 1);
            CHECK(k[0] == m->mark[id] && v[MODEL_TOKENS * 2 - 1] == m->mark[id],
                  "contents of block %u", id);
        }
    }
}

static void random_step(tl_kv_pool *kv, struct model *m, uint64_t *seed)
{
    const uint32_t id = (uint32_t)rng_below(seed, MODEL_BLOCKS + (rng_below(seed, 20) == 0));
    const uint64_t hash = (uint64_t)rng_below(seed, MODEL_HASHES);
    switch (rng_below(seed, 12)) {
    case 0:
        step_alloc(kv, m, seed);
        break;
    case 1:
        tl_kv_ref(kv, id);
        if (id < MODEL_BLOCKS && m->refs[id])
            m->refs[id]++;
        break;
    case 2:
        step_cow(kv, m, id);
        break;
    case 3:
        step_set_fill(kv, m, id, (uint32_t)rng_below(seed, MODEL_TOKENS + 2));
        break;
    case 4:
    case 5:
        step_set_fill(kv, m, id, MODEL_TOKENS);
        step_register(kv, m, id, hash);
        break;
    case 6:
        step_lookup(kv, m, hash);
        break;
    case 7:
        step_travel(kv, m, seed);
        break;
    default:
        step_unref(kv, m, id);
    }
}

TEST(random_steps_equal_the_model)
{
    tl_kv_pool *kv = kv_new(MODEL_BLOCKS, MODEL_TOKENS, 1, 1, 2);
    struct model m = {.clock = 0};
    uint64_t seed = 20240229;
    uint32_t seen[3] = {0, 0, 0};
    for (int step = 0; step < 300000; step++) {
        random_step(kv, &m, &seed);
        compare_with_model(kv, &m);
        if (step % 64 == 0)
            kv_audit(kv);
        const tl_kv_stats s = kv_stats(kv);
        seen[0] += s.free == 0, seen[1] += s.cached > 2, seen[2] += s.used == MODEL_BLOCKS;
    }
    CHECK(seen[0] > 1000 && seen[1] > 1000 && seen[2] > 100 && m.evictions > 1000,
          "the walk stayed in a corner: %u %u %u %u", seen[0], seen[1], seen[2], m.evictions);
    for (uint32_t id = 0; id < MODEL_BLOCKS; id++)
        while (m.refs[id])
            step_unref(kv, &m, id);
    compare_with_model(kv, &m);
    CHECK(kv_stats(kv).used == 0, "used after all is given back");
    tl_kv_pool_destroy(kv);
}

CHECK_MAIN()
