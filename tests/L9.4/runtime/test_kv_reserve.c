/* SPDX-License-Identifier: MIT */
/* test_kv_reserve.c: the blocks of a step. What is taken is held against a twin pool on which every
 * sequence takes its blocks by itself, with tl_kv_cow and tl_kv_alloc. */
#include "kv_check.h"

struct call {
    tl_kv_pool *kv;
    uint32_t *tables;
    int64_t stride;
    const int32_t *cu, *ctx;
    int64_t B;
    int dry;
    tl_kv_needs *needs;
};

static tl_status run(const struct call *c)
{
    return tl_kv_reserve(c->kv, c->tables, c->stride, c->cu, c->ctx, c->B, c->dry, c->needs);
}

/* ---- a random step ---- */

enum { BLOCKS = 24, SLOTS = 4, SEQS = 7, STRIDE = 6 };

struct step {
    uint32_t tables[SEQS * STRIDE];
    int32_t cu[SEQS + 1], ctx[SEQS];
};

static uint32_t blocks_of(int32_t length)
{
    return (uint32_t)((length + SLOTS - 1) / SLOTS);
}

/* A pool in which sequences have lengths, share what their parents held, and stand in registered
 * blocks; some blocks are cached. The same seed gives the same pool. */
static tl_kv_pool *grown_pool(uint64_t seed, struct step *step)
{
    tl_kv_pool *kv = kv_new(BLOCKS, SLOTS, 2, 1, 3);
    kv_paint(kv, seed);
    int32_t length[SEQS];
    memset(step->tables, 0xEE, sizeof step->tables);
    for (int s = 0; s < SEQS; s++) {
        uint32_t *table = step->tables + s * STRIDE;
        const int parent = s > 0 && rng_below(&seed, 2) ? (int)rng_below(&seed, s) : -1;
        length[s] = (int32_t)rng_below(&seed, 10);
        if (parent >= 0 && length[parent] < length[s])
            length[s] = length[parent];
        for (uint32_t i = 0; i < blocks_of(length[s]); i++) {
            if (parent >= 0) {
                table[i] = step->tables[parent * STRIDE + i];
                tl_kv_ref(kv, table[i]);
                continue;
            }
            table[i] = kv_one(kv);
            const int full = i + 1 < blocks_of(length[s]) || rng_below(&seed, 3) == 0;
            CHECK_STATUS(tl_kv_set_fill(kv, table[i], full ? SLOTS : 1), TL_OK);
            if (full && rng_below(&seed, 2))
                CHECK_STATUS(tl_kv_register(kv, table[i], (uint64_t)table[i] + 1), TL_OK);
        }
    }
    for (int64_t n = rng_below(&seed, 4); n > 0; n--) /* cached, and free again */
        CHECK_STATUS(tl_kv_unref(kv, rng_below(&seed, 2) ? kv_named(kv, 1000 + (uint64_t)n)
                                                         : kv_one(kv)),
                     TL_OK);
    const tl_kv_stats stats = kv_stats(kv); /* and somebody else's */
    for (int64_t n = rng_below(&seed, stats.free + stats.cached); n > 0; n--)
        (void)kv_one(kv);
    step->cu[0] = 0;
    for (int s = 0; s < SEQS; s++) {
        const int32_t n = (int32_t)rng_below(&seed, 7);
        step->cu[s + 1] = step->cu[s] + n;
        step->ctx[s] = length[s] + n;
    }
    return kv;
}

/* What the sequences need one after another, on a picture of the pool. */
static tl_kv_needs counted(const tl_kv_pool *kv, const struct step *step)
{
    tl_kv_block block[BLOCKS];
    tl_kv_needs needs = {0, 0};
    CHECK_STATUS(tl_kv_blocks_get(kv, 0, BLOCKS, block), TL_OK);
    for (int s = 0; s < SEQS; s++) {
        const int32_t n = step->cu[s + 1] - step->cu[s], begin = step->ctx[s] - n;
        if (n == 0)
            continue;
        needs.fresh += blocks_of(begin + n) - blocks_of(begin);
        if (begin % SLOTS == 0)
            continue;
        tl_kv_block *tail = &block[step->tables[s * STRIDE + begin / SLOTS]];
        if (tail->hash != 0 || tail->refs > 1)
            needs.copies++, tail->refs--;
    }
    return needs;
}

/* A block of `id`'s holder that he may write: tl_kv_cow, and by hand where the block is frozen. */
static uint32_t own(tl_kv_pool *kv, uint32_t id, uint32_t fill)
{
    tl_kv_block block;
    uint32_t copy;
    CHECK_STATUS(tl_kv_blocks_get(kv, id, 1, &block), TL_OK);
    if (block.refs == 1 && block.hash != 0) {
        copy = kv_one(kv);
        memcpy(kv_bytes(kv, copy), kv_bytes(kv, id), tl_kv_block_bytes(kv));
        CHECK_STATUS(tl_kv_unref(kv, id), TL_OK);
    } else {
        CHECK_STATUS(tl_kv_cow(kv, id, &copy), TL_OK);
    }
    if (copy != id)
        CHECK_STATUS(tl_kv_set_fill(kv, copy, fill), TL_OK);
    return copy;
}

static void one_after_another(tl_kv_pool *kv, struct step *step)
{
    for (int s = 0; s < SEQS; s++) {
        uint32_t *table = step->tables + s * STRIDE;
        const int32_t n = step->cu[s + 1] - step->cu[s], begin = step->ctx[s] - n;
        if (n > 0 && begin % SLOTS != 0)
            table[begin / SLOTS] = own(kv, table[begin / SLOTS], (uint32_t)(begin % SLOTS));
        for (uint32_t i = blocks_of(begin); n > 0 && i < blocks_of(begin + n); i++)
            table[i] = kv_one(kv);
    }
}

static void check_alike(const tl_kv_pool *kv, const tl_kv_pool *twin, const char *what,
                        uint64_t seed)
{
    struct kv_snap a = kv_snap(kv), b = kv_snap(twin);
    const char *diff = kv_snap_diff(&a, &b);
    kv_snap_free(&a), kv_snap_free(&b);
    CHECK(!diff, "seed %llu, %s: another %s", (unsigned long long)seed, what, diff);
}

TEST(a_step_takes_what_its_sequences_take_one_after_another)
{
    int n_full = 0, n_copies = 0;
    for (uint64_t seed = 1; seed <= 3000; seed++) {
        struct step step, before, want;
        tl_kv_needs needs = {9, 9};
        tl_kv_pool *kv = grown_pool(seed, &step), *twin = grown_pool(seed, &want);
        const tl_kv_needs expected = counted(kv, &step);
        const tl_kv_stats stats = kv_stats(kv);
        const int full = expected.fresh + expected.copies > stats.free + stats.cached;
        const struct call real = {kv, step.tables, STRIDE, step.cu, step.ctx, SEQS, 0, &needs};
        struct call dry = real;
        dry.dry = 1;
        before = step;
        CHECK_STATUS(run(&dry), full ? TL_EFULL : TL_OK);
        CHECK(needs.fresh == expected.fresh && needs.copies == expected.copies,
              "seed %llu: dry says %u + %u, not %u + %u", (unsigned long long)seed, needs.fresh,
              needs.copies, expected.fresh, expected.copies);
        CHECK(memcmp(&step, &before, sizeof step) == 0, "dry wrote a table");
        check_alike(kv, twin, "dry", seed);
        needs = (tl_kv_needs){9, 9};
        CHECK_STATUS(run(&real), full ? TL_EFULL : TL_OK);
        CHECK(needs.fresh == expected.fresh && needs.copies == expected.copies,
              "seed %llu: took %u + %u, not %u + %u", (unsigned long long)seed, needs.fresh,
              needs.copies, expected.fresh, expected.copies);
        if (!full)
            one_after_another(twin, &want);
        CHECK(memcmp(&step, &want, sizeof step) == 0, "seed %llu: another table",
              (unsigned long long)seed);
        check_alike(kv, twin, full ? "refused" : "taken", seed);
        kv_audit(kv);
        n_full += full, n_copies += !full && expected.copies > 1;
        tl_kv_pool_destroy(kv), tl_kv_pool_destroy(twin);
    }
    CHECK(n_full > 100 && n_copies > 100, "%d full, %d with copies", n_full, n_copies);
}

/* ---- one property each ---- */

TEST(the_last_holder_keeps_his_block_and_the_others_copy_all_of_it)
{
    tl_kv_pool *kv = kv_new(8, 4, 2, 2, 3);
    kv_paint(kv, 3);
    const uint32_t id = kv_one(kv);
    tl_kv_ref(kv, id), tl_kv_ref(kv, id);
    CHECK_STATUS(tl_kv_set_fill(kv, id, 4), TL_OK); /* of one that holds more than these three */
    uint32_t tables[3] = {id, id, id};
    const int32_t ctx[] = {3, 2, 4};
    CHECK_STATUS(tl_kv_reserve(kv, tables, 1, NULL, ctx, 3, 0, NULL), TL_OK);
    CHECK(tables[0] == 1 && tables[1] == 2 && tables[2] == id, "%u %u %u", tables[0], tables[1],
          tables[2]);
    for (int s = 0; s < 3; s++)
        CHECK(tl_kv_refs(kv, tables[s]) == 1 && memcmp(kv_bytes(kv, tables[s]), kv_bytes(kv, id),
                                                       tl_kv_block_bytes(kv)) == 0,
              "sequence %d", s);
    CHECK(tl_kv_fill(kv, 1) == 2 && tl_kv_fill(kv, 2) == 1 && tl_kv_fill(kv, id) == 4, "fills");
    tl_kv_pool_destroy(kv);
}

TEST(a_registered_block_is_copied_by_its_one_holder_too_and_stays_cached)
{
    tl_kv_pool *kv = kv_new(2, 4, 1, 1, 2);
    const uint32_t id = kv_named(kv, 77);
    uint32_t table[1] = {id}, found;
    const int32_t ctx[] = {3};
    tl_kv_needs needs;
    CHECK_STATUS(tl_kv_reserve(kv, table, 1, NULL, ctx, 1, 0, &needs), TL_OK);
    CHECK(needs.fresh == 0 && needs.copies == 1 && table[0] == 1, "table[0] = %u", table[0]);
    CHECK(tl_kv_fill(kv, 1) == 2 && tl_kv_refs(kv, id) == 0 && tl_kv_fill(kv, id) == 4, "fills");
    CHECK_STATS(kv, 0, 1, 1, 0);
    CHECK_STATUS(tl_kv_lookup(kv, 77, &found), TL_OK);
    CHECK(found == id, "block %u", found);
    kv_audit(kv);
    tl_kv_pool_destroy(kv);
}

TEST(entries_that_hold_nothing_may_be_anything_and_those_behind_stay)
{
    tl_kv_pool *kv = kv_new(8, 4, 1, 1, 2);
    const uint32_t used = kv_one(kv);
    /* whole blocks before the new positions are not looked at */
    uint32_t tables[] = {99, used, used, UINT32_MAX, 7, 99, 99, 99};
    const int32_t cu[] = {0, 5, 5}, ctx[] = {9, INT32_MAX};
    tl_kv_needs needs;
    CHECK_STATUS(tl_kv_reserve(kv, tables, 4, cu, ctx, 2, 0, &needs), TL_OK);
    CHECK(needs.fresh == 2 && needs.copies == 0, "%u + %u", needs.fresh, needs.copies);
    const uint32_t want[] = {99, 1, 2, UINT32_MAX, 7, 99, 99, 99};
    CHECK(memcmp(tables, want, sizeof want) == 0, "%u %u %u", tables[0], tables[1], tables[2]);
    CHECK(tl_kv_refs(kv, used) == 1 && tl_kv_fill(kv, 1) == 0, "the block that stood there");
    tl_kv_pool_destroy(kv);
}

TEST(no_tokens_need_nothing)
{
    tl_kv_pool *kv = kv_new(1, 4, 1, 1, 2);
    uint32_t table[1] = {99};
    const int32_t cu[] = {0, 0}, ctx[] = {-5};
    tl_kv_needs needs = {9, 9};
    tl_set_last_error("as it was");
    CHECK_STATUS(tl_kv_reserve(kv, table, 1, cu, ctx, 1, 0, &needs), TL_OK);
    CHECK(needs.fresh == 0 && needs.copies == 0, "%u + %u", needs.fresh, needs.copies);
    CHECK_STATUS(tl_kv_reserve(kv, NULL, 1, NULL, NULL, 0, 0, NULL), TL_OK);
    CHECK_STATUS(tl_kv_reserve(kv, NULL, 1, cu, NULL, 0, 1, &needs), TL_OK);
    CHECK(strcmp(tl_last_error(), "as it was") == 0, "%s", tl_last_error());
    CHECK_STATUS(tl_kv_reserve(kv, NULL, 0, NULL, NULL, 0, 0, NULL), TL_EINVAL);
    tl_kv_pool_destroy(kv);
}

TEST(positions_up_to_the_last_int32_are_counted)
{
    tl_kv_pool *kv = kv_new(4, 1, 1, 1, 1);
    static uint32_t table[1];
    const int32_t cu[] = {0, INT32_MAX}, ctx[] = {INT32_MAX};
    tl_kv_needs needs = {9, 9};
    struct call c = {kv, table, INT32_MAX, cu, ctx, 1, 1, &needs};
    CHECK_STATUS(run(&c), TL_EFULL); /* no entry is looked at */
    CHECK(needs.fresh == INT32_MAX && needs.copies == 0, "%u + %u", needs.fresh, needs.copies);
    tl_kv_pool_destroy(kv);
}

TEST(the_allocator_hook_is_not_asked)
{
    tl_kv_pool *kv = kv_new(4, 4, 1, 1, 2);
    struct kv_hook hook = {.fail_at = 0};
    uint32_t tables[2] = {kv_one(kv)};
    const int32_t cu[] = {0, 4}, ctx[] = {7};
    uint64_t bytes;
    tl_kv_ref(kv, tables[0]);
    kv_hook_install(&hook);
    CHECK_STATUS(tl_kv_reserve(kv, tables, 2, cu, ctx, 1, 0, NULL), TL_OK);
    CHECK_STATUS(tl_kv_trim(kv, 0, &bytes), TL_OK);
    tl_set_allocator(NULL);
    CHECK(hook.calls == 0, "%d calls", hook.calls);
    tl_kv_pool_destroy(kv);
}

/* ---- refusals ---- */

/* Three sequences of 2, 0 and 3 tokens in blocks of 4, the first in block 0 from position 1 on, the
 * last in block 1 from position 7 on. */
struct world {
    tl_kv_pool *kv;
    uint32_t tables[3 * STRIDE];
    int32_t cu[4], ctx[3];
    tl_kv_needs needs;
};

static struct call good_call(struct world *w)
{
    w->kv = kv_new(6, 4, 1, 1, 2);
    kv_paint(w->kv, 8);
    memset(w->tables, 0xFF, sizeof w->tables);
    w->tables[0] = kv_one(w->kv), w->tables[2 * STRIDE + 1] = kv_one(w->kv);
    memcpy(w->cu, (int32_t[]){0, 2, 2, 5}, sizeof w->cu);
    memcpy(w->ctx, (int32_t[]){3, 24, 10}, sizeof w->ctx);
    w->needs = (tl_kv_needs){9, 9};
    return (struct call){w->kv, w->tables, STRIDE, w->cu, w->ctx, 3, 0, &w->needs};
}

static void refuse(struct world *w, const struct call *c, tl_status want, const char *words)
{
    uint32_t before[3 * STRIDE];
    tl_status got = TL_OK;
    memcpy(before, w->tables, sizeof before);
    w->needs = (tl_kv_needs){9, 9};
    CHECK_REFUSED(w->kv, got = run(c), "tl_kv_reserve", words);
    CHECK(got == want, "%s, want %s: %s", tl_status_str(got), tl_status_str(want),
          tl_last_error());
    CHECK(memcmp(w->tables, before, sizeof before) == 0, "a table was written");
    CHECK(want == TL_EFULL || (w->needs.fresh == 9 && w->needs.copies == 9), "needs was written");
}

TEST(each_bad_argument_is_refused_and_named)
{
    struct world w;
    const struct call good = good_call(&w);
    struct call c;
    const int32_t from_1[] = {1, 2, 2, 5}, falls[] = {0, 3, 2, 5}, short_ctx[] = {1, 24, 10},
                  below_0[] = {3, -1, 10}, past[] = {3, 24, 25}, far[] = {3, INT32_MAX, 10};
#define BAD(member, value, words)           \
    do {                                    \
        c = good;                           \
        c.member = value;                   \
        refuse(&w, &c, TL_EINVAL, words);   \
    } while (0)
    BAD(kv, NULL, "pool is NULL");
    BAD(B, -1, "B = -1 is negative");
    BAD(tables, NULL, "block_tables is NULL with B = 3");
    BAD(ctx, NULL, "ctx_lens is NULL with B = 3");
    BAD(stride, 0, "table_stride = 0 is below 1");
    BAD(stride, INT64_MAX / 4, "do not fit in memory");
    BAD(tables, (uint32_t *)(UINTPTR_MAX - 15), "block_tables at");
    BAD(cu, from_1, "cu_seqlens[0] = 1 is not 0");
    BAD(cu, falls, "cu_seqlens[2] = 2 decreases from 3");
    BAD(ctx, short_ctx, "sequence 0: ctx_len = 1 is below its 2 tokens");
    BAD(ctx, below_0, "sequence 1: ctx_len = -1 is below its 0 tokens");
    BAD(ctx, past, "sequence 2: ctx_len = 25 needs 7 blocks of 4, table_stride = 6");
#undef BAD
    c = good, c.dry = 1, c.needs = NULL;
    refuse(&w, &c, TL_EINVAL, "needs is NULL with dry");
    c = good, c.ctx = far; /* who gets no tokens may be as long as he likes */
    CHECK_STATUS(run(&c), TL_OK);
    tl_kv_pool_destroy(w.kv);
}

TEST(each_bad_entry_is_refused_and_named)
{
    struct world w;
    const struct call c = good_call(&w);
    uint32_t *first = &w.tables[0], *last = &w.tables[2 * STRIDE + 1];
    const uint32_t held = *first;
    const struct {
        uint32_t id;
        const char *words;
    } bad[] = {{6, "sequence 2: block_table[1] = 6 is out of range: the pool has 6"},
               {UINT32_MAX, "sequence 2: block_table[1] = 4294967295 is out of range"},
               {5, "sequence 2: block_table[1] = 5 is not used"},
               {held, "sequence 2: block_table[1] = 0 stands in more tables than its 1 ref"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        *last = bad[i].id;
        refuse(&w, &c, TL_EINVAL, bad[i].words);
    }
    *first = 5; /* the first bad entry decides */
    refuse(&w, &c, TL_EINVAL, "sequence 0: block_table[0] = 5 is not used");
    tl_kv_pool_destroy(w.kv);
}

TEST(a_full_pool_says_how_many_are_missing)
{
    struct world w;
    const struct call c = good_call(&w);
    w.ctx[2] = 18, w.cu[3] = 13; /* 11 tokens from position 7 on: blocks 2, 3 and 4 */
    tl_kv_ref(w.kv, w.tables[0]);
    for (int i = 0; i < 3; i++)
        (void)kv_named(w.kv, 50 + (uint64_t)i);
    CHECK_STATUS(tl_kv_unref(w.kv, 4), TL_OK);
    /* free: 5; cached: 4 */
    refuse(&w, &c, TL_EFULL,
           "3 new blocks and 1 copies wanted, 1 free and 1 cached of 6: 2 are missing");
    CHECK(w.needs.fresh == 3 && w.needs.copies == 1, "%u + %u", w.needs.fresh, w.needs.copies);
    CHECK_STATUS(tl_kv_unref(w.kv, 3), TL_OK);
    CHECK_STATUS(tl_kv_unref(w.kv, 2), TL_OK);
    CHECK_STATUS(run(&c), TL_OK); /* exactly enough: three cached blocks are evicted */
    CHECK_STATS(w.kv, 0, 6, 0, 3);
    kv_audit(w.kv);
    tl_kv_pool_destroy(w.kv);
}

TEST(the_first_fault_decides)
{
    struct world w;
    const struct call good = good_call(&w);
    const int32_t falls[] = {0, 3, 2, 5};
    struct call c = good;
    /* from the last kind of fault to the first: each that is added decides */
    for (int i = 0; i < 4; i++)
        (void)kv_one(w.kv);
    refuse(&w, &c, TL_EFULL, "are missing");
    w.tables[2 * STRIDE + 1] = 9;
    refuse(&w, &c, TL_EINVAL, "block_table[1] = 9");
    w.ctx[2] = 99;
    refuse(&w, &c, TL_EINVAL, "ctx_len = 99");
    c.cu = falls;
    refuse(&w, &c, TL_EINVAL, "decreases");
    c.stride = 0;
    refuse(&w, &c, TL_EINVAL, "table_stride");
    c.dry = 1, c.needs = NULL;
    refuse(&w, &c, TL_EINVAL, "needs is NULL");
    tl_kv_pool_destroy(w.kv);
}

CHECK_MAIN()
