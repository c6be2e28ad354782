/* SPDX-License-Identifier: MIT */
/* test_abi.c: status names, layouts, the error slot, the allocator hook and the default one. */
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>

#include "check.h"
#include "hook.h"
#include "runtime/alloc.h"
#include "runtime/fail.h"

/* ---- names, numbers, layouts ---- */

TEST(status_codes_have_their_values_and_names)
{
    static const char *const names[] = {
        "TL_OK",        "TL_EINVAL",  "TL_ENOMEM", "TL_ESHAPE",       "TL_EDTYPE", "TL_EFULL",
        "TL_ENOTFOUND", "TL_EFORMAT", "TL_EBUSY",  "TL_EUNSUPPORTED", "TL_EIO"};
    const tl_status values[] = {TL_OK,     TL_EINVAL,       TL_ENOMEM,    TL_ESHAPE,
                                TL_EDTYPE, TL_EFULL,        TL_ENOTFOUND, TL_EFORMAT,
                                TL_EBUSY,  TL_EUNSUPPORTED, TL_EIO};
    for (int i = 0; i < 11; i++) {
        CHECK(values[i] == i, "%s is %d, want %d", names[i], values[i], i);
        CHECK(strcmp(tl_status_str(i), names[i]) == 0, "status %d is called %s, want %s", i,
              tl_status_str(i), names[i]);
    }
}

TEST(other_status_values_are_unknown)
{
    const tl_status values[] = {-1, 11, 256, INT32_MAX, INT32_MIN};
    for (size_t i = 0; i < sizeof values / sizeof values[0]; i++)
        CHECK(strcmp(tl_status_str(values[i]), "TL_UNKNOWN") == 0, "status %d is called %s",
              values[i], tl_status_str(values[i]));
}

TEST(dtypes_have_their_values)
{
    const tl_dtype values[] = {TL_F32, TL_F16, TL_BF16, TL_F8_E4M3, TL_F8_E5M2,
                               TL_I8,  TL_U8,  TL_I32,  TL_Q4_G};
    for (int i = 0; i < 9; i++)
        CHECK(values[i] == i, "dtype %d has the value %d", i, values[i]);
}

TEST(version_is_1)
{
    CHECK(tl_abi_version() == 1, "version %u", tl_abi_version());
    CHECK(strcmp(tl_version(), TL_VERSION) == 0, "release %s, the header says %s", tl_version(),
          TL_VERSION);
    CHECK(TL_ABI_VERSION == 1 && TL_LAST_ERROR_CAP == 256, "%d, %d", TL_ABI_VERSION,
          TL_LAST_ERROR_CAP);
}

TEST(allocator_has_its_layout)
{
    CHECK(sizeof(tl_allocator) == 3 * sizeof(void *), "%zu bytes", sizeof(tl_allocator));
    CHECK(offsetof(tl_allocator, alloc) == 0, "alloc at %zu", offsetof(tl_allocator, alloc));
    CHECK(offsetof(tl_allocator, free) == sizeof(void *), "free at %zu",
          offsetof(tl_allocator, free));
    CHECK(offsetof(tl_allocator, user) == 2 * sizeof(void *), "user at %zu",
          offsetof(tl_allocator, user));
}

/* ---- the error slot ---- */

/* n bytes 'a', 'b', ... of period 23, and a NUL that is the last byte before an unmapped page. */
static char *guarded_text(size_t n)
{
    char *text = guarded(n + 1);
    for (size_t i = 0; i < n; i++)
        text[i] = (char)('a' + i % 23);
    text[n] = '\0';
    return text;
}

TEST(slot_keeps_up_to_255_bytes)
{
    const size_t lengths[] = {0, 1, 2, 254, 255, 256, 257, 5000};
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        const size_t n = lengths[i], want = n < 255 ? n : 255;
        char *text = guarded_text(n);
        tl_set_last_error("something longer than the shortest of the texts");
        tl_set_last_error(text);
        CHECK(strlen(tl_last_error()) == want, "n=%zu: kept %zu bytes", n, strlen(tl_last_error()));
        CHECK(memcmp(tl_last_error(), text, want) == 0, "n=%zu: \"%s\"", n, tl_last_error());
        guarded_free(text, n + 1);
    }
}

TEST(null_message_empties_the_slot)
{
    tl_set_last_error("full");
    tl_set_last_error(NULL);
    CHECK(strcmp(tl_last_error(), "") == 0, "\"%s\"", tl_last_error());
}

TEST(slot_takes_its_own_text)
{
    tl_set_last_error("tl_x: n = 3");
    tl_set_last_error(tl_last_error());
    CHECK(strcmp(tl_last_error(), "tl_x: n = 3") == 0, "whole: \"%s\"", tl_last_error());
    tl_set_last_error(tl_last_error() + 6);
    CHECK(strcmp(tl_last_error(), "n = 3") == 0, "tail: \"%s\"", tl_last_error());
    tl_set_last_error(tl_last_error() + 5);
    CHECK(strcmp(tl_last_error(), "") == 0, "end: \"%s\"", tl_last_error());
}

static void *other_thread(void *found)
{
    *(bool *)found = strcmp(tl_last_error(), "") == 0;
    tl_set_last_error("the other thread's");
    return NULL;
}

TEST(slot_belongs_to_the_thread)
{
    pthread_t thread;
    bool was_empty = false;
    tl_set_last_error("mine");
    CHECK(pthread_create(&thread, NULL, other_thread, &was_empty) == 0, "no thread");
    CHECK(pthread_join(thread, NULL) == 0, "not joined");
    CHECK(was_empty, "a new thread's slot was not empty");
    CHECK(strcmp(tl_last_error(), "mine") == 0, "\"%s\"", tl_last_error());
}

TEST(fail_writes_function_and_values_and_returns_the_status)
{
    CHECK(tl_fail(TL_ESHAPE, "tl_x", "n = %d is not %s", 5, "six") == TL_ESHAPE, "another status");
    CHECK(strcmp(tl_last_error(), "tl_x: n = 5 is not six") == 0, "\"%s\"", tl_last_error());
}

TEST(fail_quotes_the_slot_itself)
{
    tl_set_last_error("inner");
    tl_fail(TL_EIO, "tl_x", "because of \"%s\"", tl_last_error());
    CHECK(strcmp(tl_last_error(), "tl_x: because of \"inner\"") == 0, "\"%s\"", tl_last_error());
}

TEST(fail_cuts_long_lines)
{
    char *text = guarded_text(1000);
    tl_fail(TL_EIO, "tl_x", "%s", text);
    CHECK(strlen(tl_last_error()) == 255, "%zu bytes", strlen(tl_last_error()));
    CHECK(memcmp(tl_last_error(), "tl_x: abc", 9) == 0, "\"%s\"", tl_last_error());
    tl_fail(TL_EIO, text, "n = %d", 7);
    CHECK(strlen(tl_last_error()) == 255 && memcmp(tl_last_error(), text, 255) == 0, "\"%s\"",
          tl_last_error());
    guarded_free(text, 1001);
}

/* ---- the hook ---- */

struct seen {
    size_t n, align;
    void *freed;
    int allocs, frees;
};
static char piece[64];

static void *seen_alloc(void *user, size_t n, size_t align)
{
    struct seen *seen = user;
    seen->n = n, seen->align = align, seen->allocs++;
    return piece;
}

static void seen_free(void *user, void *p)
{
    struct seen *seen = user;
    seen->freed = p, seen->frees++;
}

TEST(hook_gets_the_request_and_the_piece_back)
{
    struct seen seen = {0};
    tl_allocator allocator = {seen_alloc, seen_free, &seen};
    CHECK_STATUS(tl_set_allocator(&allocator), TL_OK);
    memset(&allocator, 0, sizeof allocator); /* the library keeps a copy */
    void *p = tl_alloc(37, 32);
    tl_free(p);
    CHECK_STATUS(tl_set_allocator(NULL), TL_OK);
    CHECK(p == piece && seen.n == 37 && seen.align == 32 && seen.allocs == 1,
          "n=%zu align=%zu allocs=%d", seen.n, seen.align, seen.allocs);
    CHECK(seen.freed == piece && seen.frees == 1, "frees=%d", seen.frees);
}

TEST(hook_without_a_member_is_refused_and_the_old_one_stays)
{
    struct seen seen = {0};
    const tl_allocator good = {seen_alloc, seen_free, &seen}, no_alloc = {NULL, seen_free, &seen},
                       no_free = {seen_alloc, NULL, &seen};
    CHECK_STATUS(tl_set_allocator(&good), TL_OK);
    const tl_status first = tl_set_allocator(&no_alloc), second = tl_set_allocator(&no_free);
    tl_free(tl_alloc(1, 1));
    tl_set_allocator(NULL);
    CHECK(first == TL_EINVAL && second == TL_EINVAL, "%d, %d", first, second);
    CHECK(strcmp(tl_last_error(), "tl_set_allocator: the free member is NULL") == 0, "\"%s\"",
          tl_last_error());
    CHECK(seen.allocs == 1 && seen.frees == 1, "allocs=%d frees=%d", seen.allocs, seen.frees);
}

TEST(null_brings_the_default_hook_back)
{
    struct seen seen = {0};
    const tl_allocator allocator = {seen_alloc, seen_free, &seen};
    tl_set_allocator(&allocator);
    CHECK_STATUS(tl_set_allocator(NULL), TL_OK);
    void *p = tl_alloc(16, 16);
    CHECK(p && p != piece && seen.allocs == 0, "the old hook was asked");
    tl_free(p);
}

TEST(alloc_refuses_bad_requests_without_asking_the_hook)
{
    static const struct {
        size_t n, align;
        const char *says;
    } bad[] = {{0, 64, "tl_alloc: n = 0"},
               {8, 0, "tl_alloc: align = 0"},
               {8, 3, "tl_alloc: align = 3"},
               {8, 96, "tl_alloc: align = 96"},
               {8, SIZE_MAX, "tl_alloc: align = 18446744073709551615"}};
    struct seen seen = {0};
    const tl_allocator allocator = {seen_alloc, seen_free, &seen};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        tl_set_last_error("");
        tl_set_allocator(&allocator);
        void *p = tl_alloc(bad[i].n, bad[i].align);
        tl_set_allocator(NULL);
        CHECK(p == NULL && seen.allocs == 0, "n=%zu align=%zu was served", bad[i].n, bad[i].align);
        CHECK(strstr(tl_last_error(), bad[i].says) == tl_last_error(), "\"%s\", want \"%s...\"",
              tl_last_error(), bad[i].says);
    }
}

TEST(alloc_says_what_a_failing_hook_was_asked)
{
    struct hook hook;
    hook_install(&hook, 1);
    void *p = tl_alloc(123, 64);
    hook_remove();
    CHECK(p == NULL && hook.failed == 1, "served");
    CHECK(strncmp(tl_last_error(), "tl_alloc: ", 10) == 0, "\"%s\"", tl_last_error());
    CHECK(strstr(tl_last_error(), "123") && strstr(tl_last_error(), "64"), "\"%s\"",
          tl_last_error());
}

TEST(free_of_null_asks_nobody_and_leaves_the_slot)
{
    struct seen seen = {0};
    const tl_allocator allocator = {seen_alloc, seen_free, &seen};
    tl_set_allocator(&allocator);
    tl_set_last_error("kept");
    tl_free(NULL);
    tl_owned_free(&allocator, NULL);
    tl_set_allocator(NULL);
    CHECK(seen.frees == 0 && strcmp(tl_last_error(), "kept") == 0, "frees=%d \"%s\"", seen.frees,
          tl_last_error());
}

TEST(success_leaves_the_slot)
{
    tl_set_last_error("kept");
    tl_free(tl_alloc(10, 8));
    tl_set_allocator(NULL);
    CHECK(strcmp(tl_last_error(), "kept") == 0, "\"%s\"", tl_last_error());
}

TEST(owned_memory_goes_back_to_its_hook)
{
    struct hook first, second;
    tl_allocator owner;
    hook_install(&first, 0);
    void *p = tl_owned_alloc(100, 64, &owner);
    hook_install(&second, 0);
    tl_owned_free(&owner, p);
    hook_remove();
    CHECK(p && first.calls == 1 && first.live == 0 && second.live == 0, "live: %ld and %ld",
          first.live, second.live);
}

TEST(owned_alloc_leaves_the_slot_when_the_hook_fails)
{
    struct hook hook;
    tl_allocator owner;
    hook_install(&hook, 1);
    tl_set_last_error("kept");
    void *p = tl_owned_alloc(100, 64, &owner);
    hook_remove();
    CHECK(p == NULL && strcmp(tl_last_error(), "kept") == 0, "\"%s\"", tl_last_error());
}

TEST(size_arithmetic_never_wraps)
{
    size_t out = 7;
    CHECK(tl_add_size(SIZE_MAX - 1, 1, &out) && out == SIZE_MAX, "%zu", out);
    CHECK(!tl_add_size(SIZE_MAX, 1, &out), "a sum wrapped");
    /* 2^64 - 1 is a multiple of 3 */
    CHECK(tl_mul_size(SIZE_MAX / 3, 3, &out) && out == SIZE_MAX, "%zu", out);
    CHECK(!tl_mul_size(SIZE_MAX / 3 + 1, 3, &out), "a product wrapped");
    CHECK(tl_mul_size(0, SIZE_MAX, &out) && out == 0, "%zu", out);
}

/* ---- the default hook ---- */

TEST(default_pieces_are_aligned_writable_and_apart)
{
    static const size_t sizes[] = {
        1, 15, 16, 17, 4096, 100001, (1u << 20) - 100, 1u << 20, (1u << 20) + 1, 3000001};
    enum { N_SIZES = sizeof sizes / sizeof sizes[0] };
    for (size_t align = 1; align <= (size_t)1 << 22; align <<= 1) {
        unsigned char *p[N_SIZES];
        for (int i = 0; i < N_SIZES; i++) {
            p[i] = tl_alloc(sizes[i], align);
            CHECK(p[i] && (uintptr_t)p[i] % align == 0, "n=%zu align=%zu: %p", sizes[i], align,
                  (void *)p[i]);
            p[i][0] = p[i][sizes[i] / 2] = p[i][sizes[i] - 1] = (unsigned char)(i + 1);
        }
        for (int i = 0; i < N_SIZES; i++) {
            CHECK(p[i][0] == i + 1 && p[i][sizes[i] / 2] == i + 1 && p[i][sizes[i] - 1] == i + 1,
                  "n=%zu align=%zu overwritten", sizes[i], align);
            tl_free(p[i]);
        }
    }
}

TEST(default_hook_refuses_sizes_that_wrap)
{
    static const size_t sizes[] = {SIZE_MAX, SIZE_MAX - 6, SIZE_MAX - 63, SIZE_MAX - 4096,
                                   SIZE_MAX / 2 + 1};
    static const size_t aligns[] = {1, 64, 4096, (size_t)1 << 21, SIZE_MAX / 2 + 1};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
        for (size_t j = 0; j < sizeof aligns / sizeof aligns[0]; j++)
            CHECK(tl_alloc(sizes[i], aligns[j]) == NULL, "n=%zu align=%zu was served", sizes[i],
                  aligns[j]);
    CHECK(tl_alloc(64, SIZE_MAX / 2 + 1) == NULL,
          "an alignment of half the address space was served");
}

/* Field 0 (address space) or 1 (resident) of /proc/self/statm, in bytes. */
static size_t memory_now(int field)
{
    unsigned long pages[2] = {0, 0};
    FILE *f = fopen("/proc/self/statm", "r");
    if (!f || fscanf(f, "%lu %lu", &pages[0], &pages[1]) != 2)
        exit(2);
    fclose(f);
    return pages[field] * (size_t)sysconf(_SC_PAGESIZE);
}

/* Twice what the machine has. Sanitizers and emulators keep books on it, hence the loose bound. */
TEST(default_hook_reserves_large_pieces_without_committing_them)
{
    const size_t n = 2 * (size_t)sysconf(_SC_PHYS_PAGES) * (size_t)sysconf(_SC_PAGESIZE);
    const size_t space = memory_now(0), resident = memory_now(1);
    char *p = tl_alloc(n, 64);
    CHECK(p, "%s", tl_last_error());
    for (size_t at = 0; at < n; at += n / 16 + 12345)
        p[at] = (char)(at >> 20);
    for (size_t at = 0; at < n; at += n / 16 + 12345)
        CHECK(p[at] == (char)(at >> 20), "byte %zu is %d", at, p[at]);
    CHECK(memory_now(1) - resident < n / 32, "%zu bytes committed", memory_now(1) - resident);
    CHECK(memory_now(0) - space >= n, "only %zu bytes reserved", memory_now(0) - space);
    tl_free(p);
    CHECK(memory_now(0) < space + n / 2, "the address space is still taken");
}

TEST(default_hook_gives_everything_back)
{
    tl_free(tl_alloc((size_t)5 << 20, 64));
    const size_t space = memory_now(0);
    for (int i = 0; i < 1000; i++)
        tl_free(tl_alloc(((size_t)2 << 20) + (size_t)i, (size_t)1 << (i % 22)));
    for (int i = 0; i < 40000; i++) /* from the C heap */
        tl_free(tl_alloc(4000, (size_t)1 << (i % 12)));
    CHECK(memory_now(0) <= space + ((size_t)64 << 20), "grew by %zu bytes", memory_now(0) - space);
}

CHECK_MAIN()
