/* SPDX-License-Identifier: MIT */
/* test_crc32c.c: CRC-32C by table, by instruction, by folding and by definition; and copies that
 * are summed on the way. */
#include "check.h"
#include "kernels/kernels.h"
#include "runtime/crc32c.h"
#include "tinyllm/kv_pool.h"

/* LONGEST passes two and a half times the 768 bytes of three streams */
enum { LONGEST = 2100, OFFSETS = 16, MOST_WAYS = 4 };

typedef uint32_t (*crc_fn)(const void *data, size_t n, uint32_t crc);

/* Every way this CPU can compute it; the public function stands last. */
static int ways(crc_fn *out)
{
    int n = 0;
    out[n++] = tl_crc32c_by_table;
    if (tl_cpu_features() & TL_CPU_CRC32)
        out[n++] = tl_crc32c_by_instruction;
    if (tl_cpu_features() & TL_CPU_VPCLMUL)
        out[n++] = tl_crc32c_by_folding;
    out[n++] = tl_crc32c;
    return n;
}

/* One byte into the register, bit by bit: the definition. */
static uint32_t shift_in(uint32_t reg, unsigned char x)
{
    reg ^= x;
    for (int bit = 0; bit < 8; bit++)
        reg = reg & 1 ? reg >> 1 ^ 0x82F63B78u : reg >> 1;
    return reg;
}

static void fill_random(unsigned char *p, size_t n, uint64_t seed)
{
    for (size_t i = 0; i < n; i++)
        p[i] = (unsigned char)(rng_next(&seed) >> 40);
}

TEST(known_values)
{
    unsigned char zeros[32] = {0}, ones[32], up[32], down[32];
    memset(ones, 0xFF, sizeof ones);
    for (int i = 0; i < 32; i++)
        up[i] = (unsigned char)i, down[i] = (unsigned char)(31 - i);
    const struct {
        const void *data;
        size_t n;
        uint32_t crc;
    } known[] = {{"123456789", 9, 0xE3069283}, {"", 0, 0},
                 {zeros, 32, 0x8A9136AA},      {ones, 32, 0x62A8AB43},
                 {up, 32, 0x46DD794E},         {down, 32, 0x113FDB5C},
                 {"a", 1, 0xC1D04330},         {zeros, 1, 0x527D5351}};
    crc_fn way[MOST_WAYS];
    const int n = ways(way);
    for (int w = 0; w < n; w++)
        for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
            CHECK(way[w](known[i].data, known[i].n, 0) == known[i].crc, "way %d value %zu: %08X", w,
                  i, way[w](known[i].data, known[i].n, 0));
}

TEST(every_length_at_every_offset_equals_the_definition)
{
    static unsigned char buf[LONGEST + OFFSETS];
    crc_fn way[MOST_WAYS];
    const int n_ways = ways(way);
    fill_random(buf, sizeof buf, 11);
    for (size_t offset = 0; offset < OFFSETS; offset++) {
        uint32_t reg = 0xFFFFFFFFu;
        for (size_t n = 0; n <= LONGEST; n++) {
            for (int w = 0; w < n_ways; w++)
                CHECK(way[w](buf + offset, n, 0) == ~reg, "way %d, %zu bytes at %zu", w, n, offset);
            reg = shift_in(reg, buf[(offset + n) % sizeof buf]);
        }
    }
}

TEST(nothing_is_read_past_the_end)
{
    crc_fn way[MOST_WAYS];
    const int n_ways = ways(way);
    for (size_t n = 1; n <= 70; n++) {
        unsigned char *p = guarded(n);
        uint32_t reg = 0xFFFFFFFFu;
        fill_random(p, n, n);
        for (size_t i = 0; i < n; i++)
            reg = shift_in(reg, p[i]);
        for (int w = 0; w < n_ways; w++)
            CHECK(way[w](p, n, 0) == ~reg, "way %d, %zu bytes", w, n);
        guarded_free(p, n);
    }
}

TEST(any_start_at_any_length_equals_the_definition)
{
    static unsigned char buf[LONGEST];
    const uint32_t starts[] = {1, 0x80000000u, 0xFFFFFFFFu, 0xE3069283u, 0x0BADF00Du};
    crc_fn way[MOST_WAYS];
    const int n_ways = ways(way);
    fill_random(buf, sizeof buf, 13);
    for (size_t s = 0; s < sizeof starts / sizeof starts[0]; s++) {
        uint32_t reg = ~starts[s];
        for (size_t n = 0; n < LONGEST; reg = shift_in(reg, buf[n++]))
            for (int w = 0; w < n_ways; w++)
                CHECK(way[w](buf, n, starts[s]) == ~reg, "way %d, %zu bytes from %08X", w, n,
                      starts[s]);
    }
}

TEST(any_split_gives_the_whole)
{
    unsigned char buf[1700];
    crc_fn way[MOST_WAYS];
    const int n_ways = ways(way);
    fill_random(buf, sizeof buf, 12);
    for (int w = 0; w < n_ways; w++) {
        const uint32_t whole = tl_crc32c_by_table(buf, sizeof buf, 0),
                       small = tl_crc32c_by_table(buf, 40, 0);
        for (size_t i = 0; i <= sizeof buf; i++)
            CHECK(way[w](buf + i, sizeof buf - i, way[w](buf, i, 0)) == whole,
                  "way %d split at %zu", w, i);
        for (size_t i = 0; i <= 40; i++)
            for (size_t j = i; j <= 40; j++)
                CHECK(way[w](buf + j, 40 - j, way[w](buf + i, j - i, way[w](buf, i, 0))) == small,
                      "way %d at %zu %zu", w, i, j);
    }
}

/* The bytes, their sum, and nothing beside them. */
static void check_copy(const unsigned char *from, size_t n, size_t at, uint32_t want,
                       const char *what, bool past_cache)
{
    static unsigned char buf[64 + 20000 + 64];
    unsigned char *to = buf + 64 - (uintptr_t)buf % 64 + at;
    memset(buf, 0x5A, sizeof buf);
    uint32_t crc = want; /* of tl_copy, which sums nothing */
    if (strcmp(what, "tl_crc32c_copy") == 0)
        crc = tl_crc32c_copy(to, from, n, 0x12345678, past_cache);
    else if (strcmp(what, "tl_crc32c_copy_in_pieces") == 0)
        crc = tl_crc32c_copy_in_pieces(to, from, n, 0x12345678, past_cache);
    else
        tl_copy(to, from, n, past_cache);
    tl_copies_done();
    CHECK(crc == want, "%s past_cache %d, %zu bytes to %zu: %08X, want %08X", what, past_cache, n,
          at, crc, want);
    CHECK(memcmp(to, from, n) == 0, "%s past_cache %d, %zu bytes to %zu: other bytes", what,
          past_cache, n, at);
    for (unsigned char *p = buf; p < buf + sizeof buf; p++)
        CHECK((p >= to && p < to + n) || *p == 0x5A,
              "%s past_cache %d, %zu bytes to %zu: byte %td written", what, past_cache, n, at,
              p - to);
}

TEST(copies_are_exact_and_summed)
{
    static const char *const whats[] = {"tl_crc32c_copy", "tl_crc32c_copy_in_pieces", "tl_copy"};
    static const size_t sizes[] = {0,    1,    2,    12,   16,    60,   63,   64,   65,
                                   127,  128,  191,  255,  256,   257,  300,  319,  320,
                                   321,  511,  512,  1000, 1023,  1024, 1025, 4096, 8191,
                                   8192, 8193, 8200, 8256, 16384, 19900};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        const size_t n = sizes[i];
        unsigned char *from = guarded(n ? n : 1); /* reads past the end die */
        uint32_t reg = ~0x12345678u;
        fill_random(from, n, 14 + n);
        for (size_t k = 0; k < n; k++)
            reg = shift_in(reg, from[k]);
        for (size_t at = 0; at < 64; at += n < 1100 ? 1 : 13)
            for (int w = 0; w < 3; w++)
                for (int past_cache = 0; past_cache < 2; past_cache++)
                    check_copy(from, n, at, ~reg, whats[w], past_cache);
        guarded_free(from, n ? n : 1);
    }
}

TEST(no_bytes_leave_the_sum_as_it_is)
{
    crc_fn way[MOST_WAYS];
    const int n_ways = ways(way);
    tl_set_last_error("as it was");
    for (int w = 0; w < n_ways; w++) {
        CHECK(way[w](NULL, 0, 0) == 0 && way[w](NULL, 0, 0xDEADBEEF) == 0xDEADBEEF, "way %d", w);
        CHECK(way[w]("x", 0, 0x12345678) == 0x12345678, "way %d", w);
    }
    CHECK(strcmp(tl_last_error(), "as it was") == 0, "\"%s\"", tl_last_error());
}

TEST(null_with_bytes_sets_the_slot_and_leaves_the_sum)
{
    tl_set_last_error(NULL);
    CHECK(tl_crc32c(NULL, 5, 0xABCD) == 0xABCD, "sum");
    CHECK(strncmp(tl_last_error(), "tl_crc32c: ", 11) == 0 && strstr(tl_last_error(), "5"),
          "\"%s\"", tl_last_error());
}

CHECK_MAIN()
