/* SPDX-License-Identifier: MIT */
/* test_arena.c: bump allocation, alignment by address, marks, growth, and what stays the same when
 * a call fails. */
#include <stdbool.h>
#include <stddef.h>

#include "check.h"
#include "hook.h"
#include "tinyllm/arena.h"

static tl_arena_stats stats_of(const tl_arena *arena)
{
    tl_arena_stats s = {111, 222, 333, 444};
    tl_arena_stats_get(arena, &s);
    return s;
}

static tl_arena *arena_of(size_t block_bytes)
{
    tl_arena *arena = NULL;
    CHECK_STATUS(tl_arena_create(block_bytes, &arena), TL_OK);
    CHECK(arena, "no arena");
    return arena;
}

#define CHECK_STATS(arena, used, reserved, high, blocks)                           \
    do {                                                                           \
        const tl_arena_stats s_ = stats_of(arena);                                 \
        CHECK(s_.bytes_used == (used) && s_.bytes_reserved == (reserved) &&        \
                  s_.high_water == (high) && s_.n_blocks == (blocks),              \
              "used %zu, reserved %zu, high water %zu, blocks %zu", s_.bytes_used, \
              s_.bytes_reserved, s_.high_water, s_.n_blocks);                      \
    } while (0)

static bool same_stats(tl_arena_stats a, tl_arena_stats b)
{
    return a.bytes_used == b.bytes_used && a.bytes_reserved == b.bytes_reserved &&
           a.high_water == b.high_water && a.n_blocks == b.n_blocks;
}

static bool same_mark(tl_arena_mark a, tl_arena_mark b)
{
    return a.block == b.block && a.offset == b.offset;
}

/* ---- layouts, creation ---- */

TEST(structs_have_their_layouts)
{
    CHECK(sizeof(tl_arena_mark) == 16 && offsetof(tl_arena_mark, offset) == 0 &&
              offsetof(tl_arena_mark, block) == 8,
          "tl_arena_mark, %zu bytes", sizeof(tl_arena_mark));
    CHECK(sizeof(tl_arena_stats) == 32 && offsetof(tl_arena_stats, bytes_used) == 0 &&
              offsetof(tl_arena_stats, bytes_reserved) == 8 &&
              offsetof(tl_arena_stats, high_water) == 16 &&
              offsetof(tl_arena_stats, n_blocks) == 24,
          "tl_arena_stats, %zu bytes", sizeof(tl_arena_stats));
}

TEST(fresh_arena_holds_no_block)
{
    tl_arena *arena = arena_of(128);
    CHECK_STATS(arena, 0, 0, 0, 0);
    CHECK(same_mark(tl_arena_mark_get(arena), (tl_arena_mark){0, 0}), "a fresh mark is not (0, 0)");
    tl_arena_reset_to(arena, (tl_arena_mark){0, 0});
    CHECK_STATS(arena, 0, 0, 0, 0);
    tl_arena_destroy(arena);
}

TEST(default_block_is_a_mebibyte)
{
    tl_arena *arena = arena_of(0);
    CHECK(tl_arena_alloc(arena, 1, 1), "%s", tl_last_error());
    CHECK_STATS(arena, 1, (size_t)1 << 20, 1, 1);
    tl_arena_destroy(arena);
}

TEST(create_refuses_bad_arguments)
{
    tl_arena *arena = (tl_arena *)&arena;
    struct hook hook;
    hook_install(&hook, 0);
    const tl_status no_out = tl_arena_create(64, NULL), wraps = tl_arena_create(SIZE_MAX, &arena);
    hook_remove();
    CHECK(no_out == TL_EINVAL, "NULL out: %d", no_out);
    CHECK(wraps == TL_EINVAL && arena == NULL, "SIZE_MAX: %d", wraps);
    CHECK(strncmp(tl_last_error(), "tl_arena_create: ", 17) == 0, "\"%s\"", tl_last_error());
    CHECK(strstr(tl_last_error(), "18446744073709551615"), "\"%s\"", tl_last_error());
    CHECK(hook.calls == 0, "the hook was asked");
}

TEST(null_arguments_do_nothing_and_set_the_slot)
{
    tl_arena *arena = arena_of(64);
    tl_arena_stats s = {1, 2, 3, 4};
    tl_set_last_error("");
    CHECK(tl_arena_alloc(NULL, 1, 1) == NULL, "served");
    CHECK(strncmp(tl_last_error(), "tl_arena_alloc: ", 16) == 0, "\"%s\"", tl_last_error());
    CHECK(same_mark(tl_arena_mark_get(NULL), (tl_arena_mark){0, 0}), "mark of NULL");
    CHECK(strncmp(tl_last_error(), "tl_arena_mark_get: ", 19) == 0, "\"%s\"", tl_last_error());
    tl_arena_reset_to(NULL, (tl_arena_mark){0, 0});
    CHECK(strncmp(tl_last_error(), "tl_arena_reset_to: ", 19) == 0, "\"%s\"", tl_last_error());
    tl_arena_stats_get(NULL, &s);
    CHECK(strncmp(tl_last_error(), "tl_arena_stats_get: ", 20) == 0, "\"%s\"", tl_last_error());
    CHECK(s.bytes_used == 1 && s.bytes_reserved == 2 && s.high_water == 3 && s.n_blocks == 4,
          "written");
    tl_set_last_error("");
    tl_arena_stats_get(arena, NULL);
    CHECK(strncmp(tl_last_error(), "tl_arena_stats_get: ", 20) == 0, "\"%s\"", tl_last_error());
    tl_set_last_error("kept");
    tl_arena_destroy(NULL);
    CHECK(strcmp(tl_last_error(), "kept") == 0, "\"%s\"", tl_last_error());
    tl_arena_destroy(arena);
}

/* ---- places ---- */

TEST(all_bytes_of_a_block_are_usable)
{
    tl_arena *arena = arena_of(128);
    char *a = tl_arena_alloc(arena, 64, 64), *b = tl_arena_alloc(arena, 64, 64);
    CHECK(a && b == a + 64 && (uintptr_t)a % 64 == 0, "%p, %p", (void *)a, (void *)b);
    CHECK_STATS(arena, 128, 128, 128, 1);
    memset(a, 1, 128);
    char *c = tl_arena_alloc(arena, 1, 1);
    CHECK(c && (uintptr_t)c % 64 == 0 && (c < a || c >= a + 128), "%p is inside the full block",
          (void *)c);
    CHECK_STATS(arena, 129, 256, 129, 2);
    tl_arena_destroy(arena);
}

TEST(padding_is_counted_once)
{
    tl_arena *arena = arena_of(64);
    char *a = tl_arena_alloc(arena, 1, 64), *b = tl_arena_alloc(arena, 48, 16);
    CHECK(b == a + 16, "at %td, want 16", b - a);
    CHECK_STATS(arena, 64, 64, 64, 1);
    CHECK(tl_arena_alloc(arena, 1, 1), "%s", tl_last_error());
    CHECK_STATS(arena, 65, 128, 65, 2);
    tl_arena_destroy(arena);
}

TEST(a_block_fills_to_the_last_byte)
{
    tl_arena *arena = arena_of(30);
    char *a = tl_arena_alloc(arena, 10, 64), *b = tl_arena_alloc(arena, 14, 16);
    CHECK(b == a + 16, "at %td, want 16", b - a);
    memset(a, 1, 10), memset(b, 2, 14);
    CHECK_STATS(arena, 30, 30, 30, 1);
    tl_arena_reset_to(arena, (tl_arena_mark){0, 0});
    CHECK(tl_arena_alloc(arena, 10, 64) == a, "another first place after a reset");
    CHECK(tl_arena_alloc(arena, 15, 16) != b, "15 bytes do not fit in the 14 that are left");
    CHECK_STATS(arena, 25, 60, 30, 2);
    tl_arena_destroy(arena);
}

TEST(alignment_is_by_address)
{
    for (size_t align = 1; align <= 4096; align <<= 1)
        for (size_t before = 0; before <= 130; before += 13) {
            tl_arena *arena = arena_of(16384);
            if (before)
                tl_arena_alloc(arena, before, 1);
            char *p = tl_arena_alloc(arena, 10, align);
            CHECK(p && (uintptr_t)p % align == 0, "align %zu after %zu bytes: %p", align, before,
                  (void *)p);
            CHECK(stats_of(arena).n_blocks == 1, "%zu blocks", stats_of(arena).n_blocks);
            tl_arena_destroy(arena);
        }
}

TEST(align_0_is_64)
{
    tl_arena *arena = arena_of(256);
    char *a = tl_arena_alloc(arena, 1, 0), *b = tl_arena_alloc(arena, 1, 0);
    CHECK((uintptr_t)a % 64 == 0 && b == a + 64, "%p, %p", (void *)a, (void *)b);
    CHECK_STATS(arena, 65, 256, 65, 1);
    tl_arena_destroy(arena);
}

TEST(a_whole_block_fits_at_any_alignment)
{
    tl_arena *arena = arena_of(100);
    for (size_t align = 1; align <= 4096; align <<= 1) {
        char *p = tl_arena_alloc(arena, 100, align);
        CHECK(p && (uintptr_t)p % align == 0, "align %zu: %p", align, (void *)p);
        memset(p, 1, 100);
    }
    CHECK_STATS(arena, 1300, 1300, 1300, 13);
    tl_arena_destroy(arena);
}

TEST(a_large_request_gets_a_block_of_its_own)
{
    tl_arena *arena = arena_of(64);
    char *a = tl_arena_alloc(arena, 32, 1), *b = tl_arena_alloc(arena, 1001, 1),
         *c = tl_arena_alloc(arena, 16, 1);
    CHECK(a && b && c, "%s", tl_last_error());
    memset(a, 1, 32), memset(b, 2, 1001), memset(c, 3, 16);
    CHECK(a[31] == 1 && b[0] == 2 && b[1000] == 2, "they overlap");
    CHECK_STATS(arena, 1049, 1129, 1049, 3);
    tl_arena_destroy(arena);
}

/* ---- marks ---- */

TEST(reset_releases_and_keeps_the_blocks)
{
    struct hook hook;
    hook_install(&hook, 0);
    tl_arena *arena = arena_of(64);
    tl_arena_alloc(arena, 10, 1);
    const tl_arena_mark mark = tl_arena_mark_get(arena);
    char *first[3] = {tl_arena_alloc(arena, 20, 1), tl_arena_alloc(arena, 1000, 1),
                      tl_arena_alloc(arena, 60, 1)};
    const long calls = hook.calls;
    for (int round = 0; round < 5; round++) {
        tl_arena_reset_to(arena, mark);
        CHECK_STATS(arena, 10, 1128, 1090, 3);
        CHECK(tl_arena_alloc(arena, 20, 1) == first[0], "round %d: the first request moved", round);
        CHECK(tl_arena_alloc(arena, 1000, 1) == first[1], "round %d: the large request moved",
              round);
        CHECK(tl_arena_alloc(arena, 60, 1) == first[2], "round %d: the last request moved", round);
    }
    CHECK(hook.calls == calls, "the hook was asked %ld times more", hook.calls - calls);
    tl_arena_destroy(arena);
    hook_remove();
    CHECK(hook.live == 0, "%ld pieces leaked", hook.live);
}

/* Blocks of 64, 64 and 1000 bytes: a large request passes over the first two, and a small one still
 * finds them. */
TEST(a_block_too_small_for_a_request_is_skipped)
{
    tl_arena *arena = arena_of(64);
    char *a = tl_arena_alloc(arena, 64, 1), *b = tl_arena_alloc(arena, 64, 1),
         *big = tl_arena_alloc(arena, 1000, 1);
    tl_arena_reset_to(arena, (tl_arena_mark){0, 0});
    CHECK(tl_arena_alloc(arena, 500, 1) == big, "the large request did not find the large block");
    CHECK_STATS(arena, 500, 1128, 1128, 3); /* what is skipped is not used */
    CHECK(same_mark(tl_arena_mark_get(arena), (tl_arena_mark){.offset = 500, .block = 2}),
          "another position");
    CHECK(tl_arena_alloc(arena, 64, 1) == big + 500, "the position went back");
    tl_arena_reset_to(arena, (tl_arena_mark){.offset = 500, .block = 2});
    CHECK_STATS(arena, 500, 1128, 1128, 3);
    /* inside what was skipped */
    tl_arena_reset_to(arena, (tl_arena_mark){.offset = 0, .block = 1});
    CHECK_STATS(arena, 0, 1128, 1128, 3);
    CHECK(tl_arena_alloc(arena, 64, 1) == b, "not the second block");
    tl_arena_reset_to(arena, (tl_arena_mark){0, 0});
    CHECK(tl_arena_alloc(arena, 64, 1) == a && tl_arena_alloc(arena, 64, 1) == b,
          "the small requests moved");
    tl_arena_destroy(arena);
}

TEST(a_later_mark_is_ignored)
{
    tl_arena *arena = arena_of(64);
    const tl_arena_mark later_than_fresh[] = {{1, 0}, {0, 1}, {SIZE_MAX, 0}, {0, SIZE_MAX}};
    for (int i = 0; i < 4; i++) {
        tl_set_last_error("");
        tl_arena_reset_to(arena, later_than_fresh[i]);
        CHECK(strncmp(tl_last_error(), "tl_arena_reset_to: ", 19) == 0, "fresh, mark %d: \"%s\"", i,
              tl_last_error());
        CHECK_STATS(arena, 0, 0, 0, 0);
    }
    tl_arena_alloc(arena, 64, 1), tl_arena_alloc(arena, 10, 1);
    const tl_arena_mark later[] = {{11, 1}, {0, 2}, {SIZE_MAX, 1}, {0, SIZE_MAX}};
    for (int i = 0; i < 4; i++) {
        tl_set_last_error("");
        tl_arena_reset_to(arena, later[i]);
        CHECK(strncmp(tl_last_error(), "tl_arena_reset_to: ", 19) == 0, "mark %d: \"%s\"", i,
              tl_last_error());
        CHECK(same_mark(tl_arena_mark_get(arena), (tl_arena_mark){.offset = 10, .block = 1}),
              "mark %d moved it", i);
        CHECK_STATS(arena, 74, 128, 74, 2);
    }
    tl_set_last_error("kept");
    tl_arena_reset_to(arena, (tl_arena_mark){.offset = 10, .block = 1});
    CHECK_STATS(arena, 74, 128, 74, 2);
    CHECK(strcmp(tl_last_error(), "kept") == 0, "the current position counts as later: \"%s\"",
          tl_last_error());
    tl_arena_destroy(arena);
}

TEST(a_mark_that_a_reset_has_passed_takes_nothing)
{
    tl_arena *arena = arena_of(64);
    tl_arena_alloc(arena, 50, 1);
    const tl_arena_mark stale = tl_arena_mark_get(arena);
    tl_arena_reset_to(arena, (tl_arena_mark){0, 0});
    tl_arena_alloc(arena, 20, 1), tl_arena_alloc(arena, 60, 1);
    /* before the position in order, past what its block holds now */
    tl_arena_reset_to(arena, stale);
    CHECK_STATS(arena, 20, 128, 80, 2);
    tl_arena_destroy(arena);
}

TEST(high_water_is_the_largest_use)
{
    tl_arena *arena = arena_of(1000);
    tl_arena_alloc(arena, 100, 1);
    const tl_arena_mark mark = tl_arena_mark_get(arena);
    tl_arena_alloc(arena, 500, 1);
    tl_arena_reset_to(arena, mark);
    tl_arena_alloc(arena, 200, 1);
    CHECK_STATS(arena, 300, 1000, 600, 1);
    tl_arena_alloc(arena, 301, 1);
    CHECK_STATS(arena, 601, 1000, 601, 1);
    tl_arena_destroy(arena);
}

/* ---- against a model: a stack of pieces and marks ---- */

enum { DEPTH = 200 };
struct piece {
    size_t n, align;
    unsigned char *p;
    tl_arena_mark before;
    size_t used_before;
};

static void paint(const struct piece *piece, int colour)
{
    memset(piece->p, colour, piece->n);
}

static bool is_painted(const struct piece *piece, int colour)
{
    for (size_t i = 0; i < piece->n; i++)
        if (piece->p[i] != (unsigned char)colour)
            return false;
    return true;
}

TEST(live_pieces_never_overlap_and_replays_find_the_same_places)
{
    struct piece stack[DEPTH];
    uint64_t rng = 20240;
    tl_arena *arena = arena_of(700);
    int depth = 0;
    size_t high = 0;
    for (int step = 0; step < 4000; step++) {
        if (depth < DEPTH && rng_below(&rng, 8) != 0) {
            struct piece *top = &stack[depth];
            *top =
                (struct piece){.n = (size_t)rng_below(&rng, rng_below(&rng, 10) ? 300 : 3000) + 1,
                               .align = (size_t)1 << rng_below(&rng, 13),
                               .before = tl_arena_mark_get(arena),
                               .used_before = stats_of(arena).bytes_used};
            top->p = tl_arena_alloc(arena, top->n, top->align);
            CHECK(top->p && (uintptr_t)top->p % top->align == 0, "step %d: %s", step,
                  tl_last_error());
            const size_t grew = stats_of(arena).bytes_used - top->used_before;
            CHECK(grew >= top->n && grew < top->n + top->align, "step %d: %zu bytes use %zu", step,
                  top->n, grew);
            high = stats_of(arena).bytes_used > high ? stats_of(arena).bytes_used : high;
            paint(top, depth++);
            continue;
        }
        const int keep = (int)rng_below(&rng, depth + 1);
        for (int i = 0; i < depth; i++)
            CHECK(is_painted(&stack[i], i), "step %d: piece %d was overwritten", step, i);
        if (keep == depth)
            continue;
        const tl_arena_stats full = stats_of(arena);
        tl_arena_reset_to(arena, stack[keep].before);
        CHECK(stats_of(arena).bytes_used == stack[keep].used_before,
              "step %d: %zu bytes used, want %zu", step, stats_of(arena).bytes_used,
              stack[keep].used_before);
        for (int i = keep; i < depth; i++) {
            void *again = tl_arena_alloc(arena, stack[i].n, stack[i].align);
            CHECK(again == stack[i].p, "step %d: piece %d moved", step, i);
        }
        CHECK(same_stats(stats_of(arena), full), "step %d: a replay changed the counts", step);
        tl_arena_reset_to(arena, stack[keep].before);
        depth = keep;
    }
    CHECK(stats_of(arena).high_water == high, "high water %zu, want %zu",
          stats_of(arena).high_water, high);
    tl_arena_destroy(arena);
}

/* ---- failures ---- */

TEST(a_bad_request_changes_nothing)
{
    static const struct {
        size_t n, align;
    } bad[] = {{0, 64},
               {0, 0},
               {1, 3},
               {1, 63},
               {1, 8192},
               {1, SIZE_MAX},
               {1, SIZE_MAX / 2 + 1},
               {SIZE_MAX, 1},
               {SIZE_MAX - 6, 1},
               {SIZE_MAX - 6, 4096},
               {SIZE_MAX / 2 + 1, 1},
               {SIZE_MAX / 2 + 1, 64}};
    tl_arena *arena = arena_of(64);
    char *a = tl_arena_alloc(arena, 10, 1);
    const tl_arena_stats stats = stats_of(arena);
    const tl_arena_mark mark = tl_arena_mark_get(arena);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        tl_set_last_error("");
        CHECK(!tl_arena_alloc(arena, bad[i].n, bad[i].align), "n=%zu align=%zu was served",
              bad[i].n, bad[i].align);
        CHECK(strncmp(tl_last_error(), "tl_arena_alloc: ", 16) == 0, "\"%s\"", tl_last_error());
        CHECK(same_stats(stats, stats_of(arena)) && same_mark(mark, tl_arena_mark_get(arena)),
              "n=%zu align=%zu changed it", bad[i].n, bad[i].align);
    }
    CHECK(tl_arena_alloc(arena, 54, 1) == a + 10, "the next request is not where it was to be");
    tl_arena_destroy(arena);
}

TEST(padding_never_wraps_a_size)
{
    tl_arena *arena = arena_of(16384);
    char *a = tl_arena_alloc(arena, 10, 1);
    const size_t to_page = (size_t)-(uintptr_t)(a + 10) & 4095;
    char *b = to_page < 1024 ? tl_arena_alloc(arena, 1024, 1) : a + 9;
    /* of a request aligned to 4096 */
    const size_t pad = (size_t)-(uintptr_t)(to_page < 1024 ? b + 1024 : b + 1) & 4095;
    const tl_arena_stats stats = stats_of(arena);
    CHECK(pad >= 1024, "pad %zu", pad);
    for (size_t over = 1; over <= 64; over++)
        CHECK(!tl_arena_alloc(arena, over - pad, 4096), "n = 2^64 - %zu was served", pad - over);
    CHECK(same_stats(stats, stats_of(arena)), "changed");
    tl_arena_destroy(arena);
}

/* Stands for a kernel's scratch: growth, an oversize block, a reset. */
static bool use_arena(tl_arena *arena)
{
    static const size_t sizes[] = {40, 40, 5000, 64, 3, 64};
    for (int i = 0; i < 6; i++) {
        const tl_arena_stats stats = stats_of(arena);
        const tl_arena_mark mark = tl_arena_mark_get(arena);
        if (tl_arena_alloc(arena, sizes[i], 32))
            continue;
        CHECK(same_stats(stats, stats_of(arena)) && same_mark(mark, tl_arena_mark_get(arena)),
              "request %d changed it", i);
        CHECK(strncmp(tl_last_error(), "tl_arena_alloc: ", 16) == 0, "\"%s\"", tl_last_error());
        return false;
    }
    return true;
}

TEST(every_allocation_fails_in_turn)
{
    long k = 1;
    for (bool done = false; !done; k++) {
        struct hook hook;
        tl_arena *arena = (tl_arena *)&arena;
        hook_install(&hook, k);
        const tl_status status = tl_arena_create(64, &arena);
        if (status != TL_OK) {
            CHECK(status == TL_ENOMEM && arena == NULL, "k=%ld: status %d", k, status);
            CHECK(strncmp(tl_last_error(), "tl_arena_create: ", 17) == 0, "\"%s\"",
                  tl_last_error());
        } else {
            done = use_arena(arena);
            hook.fail_at = 0;
            CHECK(use_arena(arena), "k=%ld: the arena is not usable after a failure", k);
        }
        tl_arena_destroy(arena);
        hook_remove();
        CHECK(hook.live == 0, "k=%ld: %ld pieces leaked", k, hook.live);
        CHECK(done == (hook.failed == 0), "k=%ld: %ld requests were refused", k, hook.failed);
    }
    CHECK(k > 4, "only %ld allocations were seen", k - 2);
}

TEST(everything_goes_back_to_the_hook_it_came_from)
{
    struct hook first, second;
    hook_install(&first, 0);
    tl_arena *arena = arena_of(64);
    tl_arena_alloc(arena, 64, 1);
    hook_install(&second, 0);
    tl_arena_alloc(arena, 64, 1);
    CHECK(first.live > 0 && second.live > 0, "live: %ld and %ld", first.live, second.live);
    hook_remove();
    tl_arena_destroy(arena);
    CHECK(first.live == 0 && second.live == 0, "live: %ld and %ld", first.live, second.live);
}

CHECK_MAIN()
