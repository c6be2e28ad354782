/* SPDX-License-Identifier: MIT */
/* test_kv_trim.c: which pages of a pool go back to the system. A page that has gone reads as zeros,
 * so a second picture of the pool's bytes, in which a plain loop over pages clears what should have
 * gone, shows what did. */
#include "kv_check.h"

static size_t page_bytes(void)
{
    return (size_t)sysconf(_SC_PAGESIZE);
}

/* A pool of n blocks of 16 * width bytes, all of whose memory is painted. */
static tl_kv_pool *painted(uint32_t n, uint32_t width)
{
    tl_kv_pool *kv = kv_new(n, 4, 1, 1, width);
    memset(kv_bytes(kv, 0), 0x5A, tl_kv_block_bytes(kv) * n);
    return kv;
}

static uint64_t trimmed(tl_kv_pool *kv, uint32_t keep)
{
    uint64_t bytes = 7;
    CHECK_STATUS(tl_kv_trim(kv, keep, &bytes), TL_OK);
    return bytes;
}

/* ---- against a loop over pages ---- */

struct model {
    tl_kv_pool *kv;
    unsigned char *bytes; /* what the pool's memory should hold */
    uint8_t *gone;        /* [pages]: since when nobody used a block of it */
    uint8_t *given;       /* [blocks] that were trimmed since they were used */
    uint32_t *freed;      /* free blocks that were used, last freed last */
    uint32_t n_freed, n_touched;
};

/* Bytes from the pool's first on that page number i has; pages lie where the system has them. */
static int64_t page_at(const struct model *m, int64_t i)
{
    const size_t page = page_bytes();
    return i * (int64_t)page - (int64_t)((uintptr_t)kv_bytes(m->kv, 0) % page);
}

static int may_go(const struct model *m, uint32_t id, uint32_t keep)
{
    for (uint32_t i = 0; i < m->n_freed; i++)
        if (m->freed[i] == id)
            return m->given[id] || i + keep < m->n_freed;
    return 0;
}

static uint64_t model_trim(struct model *m, uint32_t keep)
{
    const int64_t page = (int64_t)page_bytes(), block = (int64_t)tl_kv_block_bytes(m->kv),
                  total = block * m->kv->cfg.n_blocks;
    uint64_t bytes = 0;
    for (int64_t i = 0; page_at(m, i) < total; i++) {
        const int64_t lo = page_at(m, i), hi = lo + page;
        int goes = lo >= 0 && hi <= total;
        for (int64_t id = lo / block; goes && id * block < hi; id++)
            goes = may_go(m, (uint32_t)id, keep);
        if (goes && !m->gone[i]) {
            m->gone[i] = 1;
            memset(m->bytes + lo, 0, (size_t)page);
            bytes += (uint64_t)page;
        }
    }
    for (uint32_t i = 0; i + keep < m->n_freed; i++)
        m->given[m->freed[i]] = 1;
    return bytes;
}

static void model_use(struct model *m, uint32_t id)
{
    const int64_t page = (int64_t)page_bytes(), block = (int64_t)tl_kv_block_bytes(m->kv);
    for (int64_t i = 0; page_at(m, i) < block * (id + 1); i++)
        if (page_at(m, i) + page > block * id)
            m->gone[i] = 0;
    m->given[id] = 0;
    for (uint32_t i = 0; i < m->n_freed; i++)
        if (m->freed[i] == id) {
            memmove(m->freed + i, m->freed + i + 1, (m->n_freed - i - 1) * sizeof *m->freed);
            m->n_freed--;
        }
    memset(m->bytes + (size_t)id * (size_t)block, (int)(id % 250) + 1, (size_t)block);
    memset(kv_bytes(m->kv, id), (int)(id % 250) + 1, (size_t)block);
}

static void walk(uint32_t n_blocks, uint32_t width, uint64_t seed)
{
    struct model m = {.kv = painted(n_blocks, width)};
    const size_t total = tl_kv_block_bytes(m.kv) * n_blocks;
    uint32_t held[600], n_held = 0;
    m.bytes = malloc(total);
    memset(m.bytes, 0x5A, total);
    m.gone = calloc(total / page_bytes() + 2, 1);
    m.given = calloc(n_blocks, 1);
    m.freed = calloc(n_blocks, sizeof *m.freed);
    for (int turn = 0; turn < 60; turn++) {
        const int64_t takes = rng_below(&seed, 5); /* of five */
        for (int64_t n = rng_below(&seed, n_blocks / 2); n > 0; n--) {
            const tl_kv_stats stats = kv_stats(m.kv);
            if (rng_below(&seed, 5) < takes && stats.free > 0) {
                held[n_held] = kv_one(m.kv);
                model_use(&m, held[n_held++]);
            } else if (n_held > 0) {
                const int64_t i = rng_below(&seed, n_held);
                const uint32_t id = held[i];
                held[i] = held[--n_held];
                if (rng_below(&seed, 60) == 0) { /* cached: its contents stay for good */
                    CHECK_STATUS(tl_kv_set_fill(m.kv, id, 4), TL_OK);
                    CHECK_STATUS(tl_kv_register(m.kv, id, 1 + (uint64_t)id), TL_OK);
                } else {
                    m.freed[m.n_freed++] = id;
                }
                CHECK_STATUS(tl_kv_unref(m.kv, id), TL_OK);
            }
        }
        const uint32_t keep = (uint32_t)rng_below(&seed, 2) * (uint32_t)rng_below(&seed, n_blocks);
        const struct kv_snap before = kv_snap(m.kv);
        const uint64_t got = trimmed(m.kv, keep), want = model_trim(&m, keep);
        struct kv_snap after = kv_snap(m.kv);
        CHECK(got == want, "turn %d, %u blocks of %zu, keep %u: %llu bytes, not %llu", turn,
              n_blocks, tl_kv_block_bytes(m.kv), keep, (unsigned long long)got,
              (unsigned long long)want);
        CHECK(memcmp(after.bytes, m.bytes, total) == 0, "turn %d: other pages have gone", turn);
        memcpy(before.bytes, after.bytes, total);
        const char *diff = kv_snap_diff(&before, &after);
        CHECK(!diff, "trim changed the %s", diff);
        kv_audit(m.kv);
        struct kv_snap old = before;
        kv_snap_free(&old), kv_snap_free(&after);
    }
    free(m.bytes), free(m.gone), free(m.given), free(m.freed);
    tl_kv_pool_destroy(m.kv);
}

TEST(exactly_whole_pages_of_free_blocks_go_each_once)
{
    const uint32_t widths[] = {30, 100, 256, 300, 700, 1024};
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++)
        for (uint64_t seed = 1; seed <= 4; seed++)
            walk(seed % 2 ? 24 : 90, widths[i], seed * 100 + i);
    walk(300, 256, 9); /* beyond a mebibyte: a mapping of its own */
    walk(300, 700, 10);
}

TEST(untouched_blocks_are_left_alone)
{
    tl_kv_pool *kv = painted(64, 1024);
    CHECK(trimmed(kv, 0) == 0, "nothing was used");
    CHECK(kv_bytes(kv, 0)[0] == 0x5A, "and yet it went");
    tl_kv_pool_destroy(kv);
}

/* ---- memory that really goes ---- */

/* Pages of a range that are in memory; -1 where the system does not tell. */
static long resident(const void *p, size_t n)
{
    const size_t page = page_bytes();
    const uintptr_t lo = (uintptr_t)p / page * page, hi = (uintptr_t)p + n;
    const size_t pages = (hi - lo + page - 1) / page;
    unsigned char *there = calloc(pages, 1);
    long found = 0;
    if (mincore((void *)lo, hi - lo, there) != 0)
        found = -1;
    for (size_t i = 0; found >= 0 && i < pages; i++)
        found += there[i] & 1;
    free(there);
    return found;
}

static int mincore_tells(void)
{
    const size_t page = page_bytes();
    char *p = mmap(NULL, 64 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED)
        return 0;
    (void)madvise(p, 64 * page, MADV_NOHUGEPAGE);
    const long before = resident(p, 64 * page);
    memset(p, 1, 64 * page);
    const long after = resident(p, 64 * page);
    munmap(p, 64 * page);
    return before == 0 && after == 64;
}

/* kB of this process that are in memory, or -1. */
static long rss(void)
{
    FILE *f = fopen("/proc/self/statm", "r");
    long size, pages = -1;
    if (!f)
        return -1;
    if (fscanf(f, "%ld %ld", &size, &pages) != 2)
        pages = -1;
    fclose(f);
    return pages < 0 ? -1 : pages * (long)(page_bytes() / 1024);
}

TEST(memory_goes_back_to_the_system_and_used_and_cached_blocks_keep_theirs)
{
    enum { N = 512 }; /* of 64 KiB */
    tl_kv_pool *kv = painted(N, 4096);
    uint32_t ids[N];
    CHECK_STATUS(tl_kv_alloc(kv, N, ids), TL_OK);
    for (int i = 0; i < N; i++)
        memset(kv_bytes(kv, ids[i]), i % 255 + 1, tl_kv_block_bytes(kv));
    CHECK_STATUS(tl_kv_set_fill(kv, ids[5], 4), TL_OK);
    CHECK_STATUS(tl_kv_register(kv, ids[5], 55), TL_OK);
    for (int i = 0; i < N; i++)
        if (i != 7)
            CHECK_STATUS(tl_kv_unref(kv, ids[i]), TL_OK);
    const long before = rss();
    const uint64_t bytes = trimmed(kv, 10);
    const long after = rss();
    CHECK(bytes == (N - 12) * (uint64_t)tl_kv_block_bytes(kv), "%llu bytes",
          (unsigned long long)bytes);
    if (before > 0 && before - after > 0) /* other systems tell no such thing */
        CHECK(before - after > (long)(bytes / 1024 / 4 * 3), "%ld kB, then %ld", before, after);
    if (mincore_tells())
        for (int i = 0; i < N; i++) {
            const long want = i == 5 || i == 7 || i >= N - 10
                                  ? (long)(tl_kv_block_bytes(kv) / page_bytes())
                                  : 0;
            const long got = resident(kv_bytes(kv, ids[i]), tl_kv_block_bytes(kv));
            CHECK(got == want, "block %d: %ld pages, not %ld", i, got, want);
        }
    for (size_t i = 0; i < tl_kv_block_bytes(kv); i++)
        CHECK(kv_bytes(kv, ids[5])[i] == 6 && kv_bytes(kv, ids[7])[i] == 8 &&
                  kv_bytes(kv, ids[N - 1])[i] == (N - 1) % 255 + 1,
              "byte %zu", i);
    CHECK(trimmed(kv, 10) == 0, "given back twice");
    CHECK(trimmed(kv, 9) == tl_kv_block_bytes(kv), "one more");
    tl_kv_pool_destroy(kv);
}

TEST(what_is_used_again_can_go_again)
{
    tl_kv_pool *kv = painted(64, 1024); /* a mapping, from a boundary on */
    const uint32_t id = kv_one(kv);
    for (int turn = 0; turn < 3; turn++) {
        memset(kv_bytes(kv, id), 3, tl_kv_block_bytes(kv));
        CHECK_STATUS(tl_kv_unref(kv, id), TL_OK);
        const uint64_t bytes = trimmed(kv, 0);
        CHECK(bytes >= tl_kv_block_bytes(kv) - page_bytes(), "turn %d: %llu bytes", turn,
              (unsigned long long)bytes);
        CHECK(kv_one(kv) == id, "another block");
    }
    tl_kv_pool_destroy(kv);
}

TEST(memory_of_a_hook_stays_whatever_hook_is_there_later)
{
    struct kv_hook hook = {.fail_at = -1};
    kv_hook_install(&hook);
    tl_kv_pool *theirs = painted(64, 1024);
    tl_set_allocator(NULL);
    tl_kv_pool *ours = painted(64, 1024);
    for (int i = 0; i < 2; i++) {
        tl_kv_pool *kv = i ? ours : theirs;
        CHECK_STATUS(tl_kv_unref(kv, kv_one(kv)), TL_OK);
    }
    CHECK(trimmed(theirs, 0) == 0 && kv_bytes(theirs, 0)[8192] == 0x5A, "the hook's has gone");
    kv_hook_install(&hook);
    CHECK(trimmed(ours, 0) > 0, "ours has stayed");
    tl_set_allocator(NULL);
    tl_kv_pool_destroy(theirs), tl_kv_pool_destroy(ours);
    CHECK(hook.live == 0, "%d pieces", hook.live);
}

/* ---- refusals ---- */

TEST(each_bad_argument_is_refused_and_named)
{
    tl_kv_pool *kv = painted(64, 1024);
    CHECK_STATUS(tl_kv_unref(kv, kv_one(kv)), TL_OK);
    uint64_t bytes = 7;
    tl_status got = TL_OK;
    CHECK_REFUSED(kv, got = tl_kv_trim(kv, 0, NULL), "tl_kv_trim", "bytes is NULL");
    CHECK(got == TL_EINVAL, "%d", got);
    CHECK_REFUSED(kv, got = tl_kv_trim(NULL, 0, &bytes), "tl_kv_trim", "the pool is NULL");
    CHECK(got == TL_EINVAL && bytes == 7, "%d", got);
    tl_kv_pool_destroy(kv);
}

TEST(what_the_system_refuses_is_said_and_goes_later)
{
    tl_kv_pool *kv = painted(128, 4096); /* 64 KiB each, and from 2 MiB on they begin on a page */
    const size_t block = tl_kv_block_bytes(kv);
    uint32_t ids[5];
    uint64_t bytes = 7;
    CHECK_STATUS(tl_kv_alloc(kv, 5, ids), TL_OK);
    unsigned char *locked = kv_bytes(kv, ids[2]);
    if (mlock(locked, page_bytes()) != 0 ||
        madvise(locked, page_bytes(), MADV_DONTNEED) == 0) {
        tl_kv_pool_destroy(kv); /* not allowed here, or a system that gives locked pages back */
        return;
    }
    for (int i = 0; i < 5; i += 2)
        CHECK_STATUS(tl_kv_unref(kv, ids[i]), TL_OK);
    tl_set_last_error(NULL);
    CHECK_STATUS(tl_kv_trim(kv, 0, &bytes), TL_EIO);
    CHECK(strncmp(tl_last_error(), "tl_kv_trim: madvise of 65536 bytes at ", 38) == 0, "%s",
          tl_last_error());
    CHECK(bytes == block, "%llu bytes", (unsigned long long)bytes);
    CHECK_STATUS(tl_kv_trim(kv, 2, &bytes), TL_OK); /* the two that have stayed are the last */
    CHECK(bytes == 0, "%llu bytes", (unsigned long long)bytes);
    munlock(locked, page_bytes());
    CHECK(trimmed(kv, 0) == 2 * block, "the others");
    tl_kv_pool_destroy(kv);
}

CHECK_MAIN()
