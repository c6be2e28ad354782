/* SPDX-License-Identifier: MIT */
/* test_kv_envelope.c: blocks as bytes: what export writes, and that import takes in only what is
 * whole. */
#include "envelope_ref.h"
#include "kv_check.h"
#include "runtime/crc32c.h"

/* The envelope of one header and its parts, as the layout in kv_pool.h has them. */
enum {
    AT_VERSION = 4,
    AT_DTYPE = 6,
    AT_N = 8,
    AT_TOKENS = 12,
    AT_LAYERS = 16,
    AT_HEADS = 20,
    AT_DIM = 24,
    HEADER = 28
};

static uint64_t get(const unsigned char *p, int n)
{
    uint64_t x = 0;
    for (int i = n; i-- > 0;)
        x = x << 8 | p[i];
    return x;
}

/* A pool of [2][2 heads][4 tokens][8] blocks, of which three are used: full and hashed, full,
 * partial. */
static tl_kv_pool *three_blocks(uint32_t n_blocks, uint32_t ids[3])
{
    tl_kv_pool *kv = kv_new(n_blocks, 4, 1, 2, 8);
    kv_paint(kv, 21);
    CHECK_STATUS(tl_kv_alloc(kv, 3, ids), TL_OK);
    CHECK_STATUS(tl_kv_set_fill(kv, ids[0], 4), TL_OK);
    CHECK_STATUS(tl_kv_set_fill(kv, ids[1], 4), TL_OK);
    CHECK_STATUS(tl_kv_set_fill(kv, ids[2], 3), TL_OK);
    CHECK_STATUS(tl_kv_register(kv, ids[0], 0xA1B2C3D4E5F60718u), TL_OK);
    return kv;
}

enum { THREE_BYTES = 28 + 3 * (12 + 256) + 4 };

static size_t export_all(const tl_kv_pool *kv, const uint32_t *ids, uint32_t n, unsigned char *buf,
                         size_t cap)
{
    size_t written = 0;
    CHECK_STATUS(tl_kv_export(kv, ids, n, buf, cap, &written), TL_OK);
    CHECK(written == tl_kv_export_bytes(kv, n), "%zu written", written);
    return written;
}

/* ---- export ---- */

TEST(the_worked_example)
{
    static const uint16_t k[] = {0x3C00, 0x4000, 0x4200, 0x4400},
                          v[] = {0x3800, 0xBC00, 0x0000, 0x3400};
    static const uint32_t tokens[] = {1, 2};
    tl_kv_pool *kv = kv_new(2, 2, 1, 1, 2);
    const uint32_t b = kv_one(kv);
    unsigned char *buf = guarded(60);
    memcpy(tl_kv_block_ptr(kv, b, 0, 0), k, sizeof k);
    memcpy(tl_kv_block_ptr(kv, b, 0, 1), v, sizeof v);
    CHECK_STATUS(tl_kv_set_fill(kv, b, 2), TL_OK);
    CHECK_STATUS(tl_kv_register(kv, b, tl_kv_block_hash(0, tokens, 2)), TL_OK);
    CHECK(export_all(kv, &b, 1, buf, 60) == 60, "60 bytes");
    static const unsigned char want[60] = {
        'T',  'L',  'K',  'V',  1,    0,    1,    0,    1,    0,    0,    0,    2,    0,    0,
        0,    1,    0,    0,    0,    1,    0,    0,    0,    2,    0,    0,    0,    0x66, 0x93,
        0x7B, 0x02, 0xC1, 0xB0, 0x1A, 0xA9, 2,    0,    0,    0,    0x00, 0x3C, 0x00, 0x40, 0x00,
        0x42, 0x00, 0x44, 0x00, 0x38, 0x00, 0xBC, 0x00, 0x00, 0x00, 0x34, 0x1C, 0x54, 0x0B, 0x4F};
    for (int i = 0; i < 60; i++)
        CHECK(buf[i] == want[i], "byte %d is %02X, want %02X", i, buf[i], want[i]);
    tl_kv_pool_destroy(kv);
}

TEST(records_hold_hash_fill_and_positions_below_the_fill)
{
    uint32_t ids[3];
    tl_kv_pool *kv = three_blocks(4, ids);
    const uint32_t order[] = {ids[2], ids[0], ids[2], ids[1]}; /* the same id may stand twice */
    unsigned char buf[28 + 4 * 268 + 4];
    CHECK(export_all(kv, order, 4, buf, sizeof buf) == sizeof buf, "size");
    CHECK(memcmp(buf, "TLKV\1\0\1\0\4\0\0\0\4\0\0\0\1\0\0\0\2\0\0\0\10\0\0\0", 28) == 0, "header");
    for (int i = 0; i < 4; i++) {
        const unsigned char *record = buf + 28 + i * 268, *mem = kv_bytes(kv, order[i]);
        const uint64_t fill = order[i] == ids[2] ? 3 : 4;
        CHECK(get(record, 8) == (order[i] == ids[0] ? 0xA1B2C3D4E5F60718u : 0), "hash of record %d",
              i);
        CHECK(get(record + 8, 4) == fill, "fill of record %d", i);
        for (size_t at = 0; at < 256; at++) { /* a run of one head is 4 positions of 16 bytes */
            const unsigned char want = at / 16 % 4 < fill ? mem[at] : 0;
            CHECK(record[12 + at] == want, "record %d byte %zu: %02X, want %02X", i, at,
                  record[12 + at], want);
        }
    }
    CHECK(get(buf + sizeof buf - 4, 4) == crc_ref(buf, sizeof buf - 4), "checksum");
    tl_kv_pool_destroy(kv);
}

TEST(bytes_are_a_function_of_what_was_stored)
{
    unsigned char out[2][28 + 12 + 256 + 4];
    for (int i = 0; i < 2; i++) { /* other block, other pool size, other rubbish past the fill */
        tl_kv_pool *kv = kv_new(3 + (uint32_t)i * 4, 4, 1, 2, 8);
        uint32_t ids[3];
        CHECK_STATUS(tl_kv_alloc(kv, 3, ids), TL_OK);
        memset(kv_bytes(kv, 0), i ? 0x7E : 0xFF, tl_kv_block_bytes(kv) * kv->cfg.n_blocks);
        const uint32_t b = ids[2 - i];
        CHECK_STATUS(tl_kv_set_fill(kv, b, 1), TL_OK);
        for (size_t run = 0; run < 4; run++)
            memset(kv_bytes(kv, b) + run * 64, (int)run + 1, 16);
        export_all(kv, &b, 1, out[i], sizeof out[i]);
        tl_kv_pool_destroy(kv);
    }
    CHECK(memcmp(out[0], out[1], sizeof out[0]) == 0, "differ");
}

TEST(export_refuses_what_holds_nothing)
{
    uint32_t ids[3];
    size_t written = 99;
    unsigned char buf[2000];
    tl_status st = TL_OK;
    tl_kv_pool *kv = three_blocks(6, ids);
    const uint32_t empty = kv_one(kv), cached = kv_named(kv, 5);
    CHECK_STATUS(tl_kv_unref(kv, cached), TL_OK);
    const struct {
        uint32_t id;
        const char *words;
    } bad[] = {{6, "ids[1] = 6 is out of range"},
               {UINT32_MAX, "ids[1] = 4294967295 is out of range"},
               {5, "ids[1] = 5 is not used"},
               {cached, "ids[1] = 4 is not used"},
               {empty, "ids[1] = 3 has fill 0"}};
    memset(buf, 0xEE, sizeof buf);
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        const uint32_t list[] = {ids[0], bad[i].id};
        CHECK_REFUSED(kv, st = tl_kv_export(kv, list, 2, buf, sizeof buf, &written), "tl_kv_export",
                      bad[i].words);
        CHECK(st == TL_EINVAL && written == 99, "%d %zu", st, written);
        CHECK_REFUSED(kv, st = tl_kv_export(kv, list, 2, NULL, 0, &written), "tl_kv_export",
                      bad[i].words);
        CHECK(st == TL_EINVAL && written == 99, "before cap is looked at: %d %zu", st, written);
    }
    CHECK_REFUSED(kv, st = tl_kv_export(NULL, ids, 1, buf, sizeof buf, &written), "tl_kv_export",
                  "pool is NULL");
    CHECK(st == TL_EINVAL && written == 99, "%d", st);
    CHECK_REFUSED(kv, st = tl_kv_export(kv, NULL, 1, buf, sizeof buf, &written), "tl_kv_export",
                  "ids is NULL");
    CHECK(st == TL_EINVAL && written == 99, "%d", st);
    CHECK_REFUSED(kv, st = tl_kv_export(kv, ids, 1, buf, sizeof buf, NULL), "tl_kv_export",
                  "written is NULL");
    CHECK(st == TL_EINVAL, "%d", st);
    CHECK_REFUSED(kv, st = tl_kv_export(kv, ids, 1, NULL, sizeof buf, &written), "tl_kv_export",
                  "buf is NULL");
    CHECK(st == TL_EINVAL && written == 99, "%d", st);
    for (size_t i = 0; i < sizeof buf; i++)
        CHECK(buf[i] == 0xEE, "byte %zu was written", i);
    tl_kv_pool_destroy(kv);
}

TEST(a_short_buffer_stays_untouched_and_the_need_is_told)
{
    uint32_t ids[3];
    tl_kv_pool *kv = three_blocks(3, ids);
    unsigned char *buf = guarded(THREE_BYTES);
    CHECK(tl_kv_export_bytes(kv, 3) == THREE_BYTES && tl_kv_export_bytes(kv, 0) == 32, "sizes");
    memset(buf, 0xEE, THREE_BYTES);
    static const size_t caps[] = {0, 1, 32, THREE_BYTES - 1};
    for (int i = 0; i < 4; i++) {
        size_t written = 99;
        tl_status st = TL_OK;
        CHECK_REFUSED(kv, st = tl_kv_export(kv, ids, 3, i ? buf : NULL, caps[i], &written),
                      "tl_kv_export", "836 bytes");
        CHECK(st == TL_EFULL && written == THREE_BYTES, "%d %zu", st, written);
    }
    for (int i = 0; i < THREE_BYTES; i++)
        CHECK(buf[i] == 0xEE, "byte %d was written", i);
    export_all(kv, ids, 3, buf, THREE_BYTES); /* exactly enough, up to an unmapped page */
    unsigned char wide[THREE_BYTES + 9];
    memset(wide, 0xEE, sizeof wide);
    export_all(kv, ids, 3, wide, sizeof wide);
    CHECK(memcmp(buf, wide, THREE_BYTES) == 0, "cap does not show");
    for (size_t i = THREE_BYTES; i < sizeof wide; i++)
        CHECK(wide[i] == 0xEE, "byte %zu past the end was written", i);
    tl_kv_pool_destroy(kv);
}

TEST(sizes_that_wrap_are_refused)
{
    struct kv_hook hook = {.fail_at = -1, .endless = 1};
    kv_hook_install(&hook);
    tl_kv_pool *kv = kv_new(1, 1u << 10, 1u << 10, 1u << 10, 1u << 10); /* a block of 4 TiB */
    const uint32_t b = kv_one(kv);
    size_t written = 99;
    CHECK(tl_kv_export_bytes(kv, 1) == 32 + 12 + ((size_t)1 << 42), "one");
    CHECK(tl_kv_export_bytes(kv, (1u << 22) - 1) ==
              32 + ((size_t)12 + ((size_t)1 << 42)) * ((1u << 22) - 1),
          "many");
    tl_set_last_error(NULL);
    CHECK(tl_kv_export_bytes(kv, 1u << 22) == 0, "2^64");
    CHECK(strncmp(tl_last_error(), "tl_kv_export_bytes: 4194304", 27) == 0, "\"%s\"",
          tl_last_error());
    CHECK(tl_kv_export_bytes(kv, UINT32_MAX) == 0 && tl_kv_export_bytes(NULL, 1) == 0, "more");
    CHECK_STATUS(tl_kv_export(kv, &b, UINT32_MAX, NULL, 0, &written), TL_EINVAL);
    CHECK(written == 99 && strstr(tl_last_error(), "4294967295 blocks of 4398046511104 bytes"),
          "%zu, \"%s\"", written, tl_last_error());
    tl_kv_pool_destroy(kv);
    tl_set_allocator(NULL);
}

/* ---- import ---- */

TEST(import_gives_back_what_was_exported)
{
    uint32_t ids[3], got[3] = {99, 99, 99}, found;
    tl_kv_pool *from = three_blocks(3, ids);
    unsigned char buf[THREE_BYTES + 16], again[THREE_BYTES];
    for (size_t offset = 0; offset < 16; offset++) { /* any alignment */
        tl_kv_pool *to = kv_new(5, 4, 1, 2, 8);
        kv_paint(to, 5 + offset);
        export_all(from, ids, 3, buf + offset, THREE_BYTES);
        CHECK_STATUS(tl_kv_import(to, buf + offset, THREE_BYTES, got), TL_OK);
        for (int i = 0; i < 3; i++)
            CHECK(tl_kv_refs(to, got[i]) == 1 && tl_kv_fill(to, got[i]) == tl_kv_fill(from, ids[i]),
                  "block %d", i);
        CHECK_STATUS(tl_kv_lookup(to, 0xA1B2C3D4E5F60718u, &found), TL_OK);
        CHECK(found == got[0], "%u", found);
        export_all(to, got, 3, again, sizeof again);
        CHECK(memcmp(again, buf + offset, THREE_BYTES) == 0, "re-exported bytes differ");
        kv_audit(to);
        CHECK_STATUS(tl_kv_unref(to, found), TL_OK);
        for (int i = 0; i < 3; i++)
            CHECK_STATUS(tl_kv_unref(to, got[i]), TL_OK);
        CHECK_STATS(to, 4, 0, 1, 0);
        tl_kv_pool_destroy(to);
    }
    tl_kv_pool_destroy(from);
}

/* So large that payloads are copied past the caches: the same bytes, at any alignment. */
TEST(large_envelopes_hold_the_same_bytes)
{
    enum {
        N = 9,
        BLOCK = 32 * 2 * 8 * 16 * 128 * 2,
        RECORD = 12 + BLOCK,
        BYTES = 28 + N * RECORD + 4
    };
    uint32_t ids[N], got[N];
    tl_kv_pool *from = kv_new(N, 16, 32, 8, 128), *to = kv_new(N, 16, 32, 8, 128);
    /* one begins at an odd address, one does not */
    unsigned char *buf = guarded(BYTES + 1), *again = guarded(BYTES + 1);
    kv_paint(from, 31);
    CHECK(tl_kv_block_bytes(from) == BLOCK, "%zu", tl_kv_block_bytes(from));
    CHECK_STATUS(tl_kv_alloc(from, N, ids), TL_OK);
    for (uint32_t i = 0; i < N; i++)
        CHECK_STATUS(tl_kv_set_fill(from, ids[i], i == 4 ? 5 : 16), TL_OK);
    export_all(from, ids, N, buf + 1, BYTES);
    for (int i = 0; i < N; i++) {
        const unsigned char *p = buf + 1 + 28 + (size_t)i * RECORD + 12,
                            *mem = kv_bytes(from, ids[i]);
        for (size_t run = 0; run < BLOCK; run += 16 * 128 * 2) {
            const size_t kept = (i == 4 ? 5 : 16) * 128 * 2;
            CHECK(memcmp(p + run, mem + run, kept) == 0, "record %d, run at %zu", i, run);
            for (size_t k = kept; k < 16 * 128 * 2; k++)
                CHECK(p[run + k] == 0, "record %d, byte %zu", i, run + k);
        }
    }
    CHECK(get(buf + 1 + BYTES - 4, 4) == tl_crc32c_by_table(buf + 1, BYTES - 4, 0), "checksum");
    CHECK_STATUS(tl_kv_import(to, buf + 1, BYTES, got), TL_OK);
    export_all(to, got, N, again, BYTES);
    CHECK(memcmp(again, buf + 1, BYTES) == 0, "re-exported bytes differ");
    guarded_free(buf, BYTES + 1), guarded_free(again, BYTES + 1);
    tl_kv_pool_destroy(from), tl_kv_pool_destroy(to);
}

TEST(an_envelope_of_no_blocks)
{
    tl_kv_pool *kv = kv_new(1, 2, 1, 1, 2);
    unsigned char *buf = guarded(32);
    tl_status st = TL_OK;
    tl_set_last_error("as it was");
    CHECK(export_all(kv, NULL, 0, buf, 32) == 32, "size");
    CHECK_STATUS(tl_kv_import(kv, buf, 32, NULL), TL_OK);
    CHECK(strcmp(tl_last_error(), "as it was") == 0, "\"%s\"", tl_last_error());
    CHECK_STATS(kv, 1, 0, 0, 0);
    put(buf + AT_DIM, 3, 4);
    seal(buf, 32);
    CHECK_REFUSED(kv, st = tl_kv_import(kv, buf, 32, NULL), "tl_kv_import", "head_dim is 3");
    CHECK(st == TL_ESHAPE, "%d", st);
    for (int at = AT_TOKENS; at <= AT_DIM; at += 4) /* nothing is multiplied in vain */
        put(buf + at, UINT32_MAX, 4);
    seal(buf, 32);
    CHECK_REFUSED(kv, st = tl_kv_import(kv, buf, 32, NULL), "tl_kv_import",
                  "block_tokens is 4294967295");
    CHECK(st == TL_ESHAPE, "%d", st);
    tl_kv_pool_destroy(kv);
}

TEST(import_refuses_null)
{
    uint32_t ids[3], out[3] = {99, 99, 99};
    tl_kv_pool *kv = three_blocks(6, ids);
    unsigned char buf[THREE_BYTES];
    tl_status st = TL_OK;
    export_all(kv, ids, 3, buf, sizeof buf);
    CHECK_REFUSED(kv, st = tl_kv_import(NULL, buf, sizeof buf, out), "tl_kv_import",
                  "pool is NULL");
    CHECK(st == TL_EINVAL, "%d", st);
    CHECK_REFUSED(kv, st = tl_kv_import(kv, NULL, sizeof buf, out), "tl_kv_import", "buf is NULL");
    CHECK(st == TL_EINVAL, "%d", st);
    CHECK_REFUSED(kv, st = tl_kv_import(kv, NULL, 0, NULL), "tl_kv_import", "buf is NULL");
    CHECK(st == TL_EINVAL, "%d", st);
    CHECK_REFUSED(kv, st = tl_kv_import(kv, buf, sizeof buf, NULL), "tl_kv_import",
                  "ids_out is NULL");
    CHECK(st == TL_EINVAL && out[0] == 99, "%d", st);
    tl_kv_pool_destroy(kv);
}

/* Import is refused with that status and words, and neither pool nor ids change. `buf` ends at an
 * unmapped page. */
static void refuse(tl_kv_pool *kv, const unsigned char *bytes, size_t len, tl_status want,
                   const char *words)
{
    uint32_t out[4] = {91, 92, 93, 94};
    tl_status st = TL_OK;
    unsigned char *buf = guarded(len ? len : 1);
    memcpy(buf, bytes, len);
    CHECK_REFUSED(kv, st = tl_kv_import(kv, len ? buf : buf + 1, len, out), "tl_kv_import", words);
    CHECK(st == want, "%s, want %s: %s", tl_status_str(st), tl_status_str(want), tl_last_error());
    CHECK(out[0] == 91 && out[1] == 92 && out[2] == 93 && out[3] == 94, "ids_out was written");
    guarded_free(buf, len ? len : 1);
}

TEST(every_truncation_is_refused) /* EX-01 */
{
    uint32_t ids[3];
    tl_kv_pool *kv = three_blocks(8, ids);
    unsigned char buf[THREE_BYTES + 1] = {0};
    export_all(kv, ids, 3, buf, sizeof buf);
    for (size_t len = 0; len < THREE_BYTES; len++)
        refuse(kv, buf, len, TL_EFORMAT, "bytes");
    refuse(kv, buf, sizeof buf, TL_EFORMAT, "837 bytes");
    /* sealed again, so that the length itself has to tell */
    for (size_t len = 32; len < THREE_BYTES; len++) {
        unsigned char cut[THREE_BYTES];
        memcpy(cut, buf, len);
        seal(cut, len);
        refuse(kv, cut, len, TL_EFORMAT, "bytes");
    }
    tl_kv_pool_destroy(kv);
}

TEST(every_flipped_bit_is_refused) /* EX-01 */
{
    uint32_t ids[3];
    tl_kv_pool *kv = three_blocks(8, ids);
    unsigned char buf[THREE_BYTES];
    export_all(kv, ids, 3, buf, sizeof buf);
    for (size_t bit = 0; bit < 8 * sizeof buf; bit++) {
        buf[bit / 8] ^= (unsigned char)(1 << bit % 8);
        refuse(kv, buf, sizeof buf, TL_EFORMAT,
               bit < 32                 ? "magic"
               : bit >= 96 && bit < 224 ? "bytes are not"
                                        : "");
        buf[bit / 8] ^= (unsigned char)(1 << bit % 8);
    }
    tl_kv_pool_destroy(kv);
}

TEST(each_check_of_import_says_what_it_found)
{
    uint32_t ids[3];
    tl_kv_pool *kv = three_blocks(8, ids);
    unsigned char good[THREE_BYTES], buf[THREE_BYTES];
    export_all(kv, ids, 3, good, sizeof good);
    const struct {
        size_t at;
        uint64_t value;
        int n, sealed;
        tl_status want;
        const char *words;
    } change[] = {
        {0, 'X', 1, 1, TL_EFORMAT, "magic 58 4c 4b 56"},
        {THREE_BYTES - 4, 0, 4, 0, TL_EFORMAT, "checksum 0x00000000 stored"},
        {AT_VERSION, 4, 2, 0, TL_EFORMAT, "checksum"},
        {AT_VERSION, 4, 2, 1, TL_EFORMAT, "version is 4 in the envelope, the pool's format 1"},
        {AT_VERSION, 2, 2, 1, TL_EFORMAT, "836 bytes are not an envelope of 3 blocks"},
        {AT_VERSION, 0, 2, 0, TL_EFORMAT, "checksum"},
        {AT_VERSION, 0, 2, 1, TL_EFORMAT, "version is 0 in the envelope"},
        {AT_VERSION, 6, 2, 1, TL_EFORMAT, "version is 6 in the envelope"},
        {AT_DTYPE, 2, 2, 1, TL_EFORMAT, "dtype is 2 in the envelope and 1 in the pool"},
        {AT_DTYPE, 0, 2, 1, TL_EFORMAT, "dtype is 0"},
        {HEADER + 8, 0, 4, 1, TL_EFORMAT, "record 0 has fill 0"},
        {HEADER + 268 + 8, 5, 4, 1, TL_EFORMAT, "record 1 has fill 5"},
        {HEADER + 2 * 268 + 8, UINT32_MAX, 4, 1, TL_EFORMAT, "record 2 has fill 4294967295"},
        {HEADER + 2 * 268, 77, 8, 1, TL_EFORMAT,
         "record 2 has hash 0x000000000000004d and only 3 of 4 tokens"},
        {HEADER + 8, 3, 4, 1, TL_EFORMAT,
         "record 0 has hash 0xa1b2c3d4e5f60718 and only 3 of 4 tokens"},
        {AT_N, 2, 4, 1, TL_EFORMAT, "836 bytes are not an envelope of 2 blocks"},
        {AT_N, 4, 4, 1, TL_EFORMAT, "836 bytes are not an envelope of 4 blocks"},
        {AT_N, 0, 4, 1, TL_EFORMAT, "836 bytes are not an envelope of 0 blocks"},
        {AT_N, UINT32_MAX, 4, 1, TL_EFORMAT, "blocks"},
    };
    for (size_t i = 0; i < sizeof change / sizeof change[0]; i++) {
        memcpy(buf, good, sizeof buf);
        put(buf + change[i].at, change[i].value, change[i].n);
        if (change[i].sealed)
            seal(buf, sizeof buf);
        refuse(kv, buf, sizeof buf, change[i].want, change[i].words);
    }
    tl_kv_pool_destroy(kv);
}

TEST(foreign_geometry_names_the_field) /* EX-01 */
{
    static const struct {
        uint32_t b, layers, heads, dim;
        const char *words;
    } pools[] = {{8, 1, 2, 8, "block_tokens is 4 in the envelope and 8 in the pool"},
                 {4, 2, 2, 8, "n_layers is 1 in the envelope and 2 in the pool"},
                 {4, 1, 1, 8, "n_kv_heads is 2 in the envelope and 1 in the pool"},
                 {4, 1, 2, 4, "head_dim is 8 in the envelope and 4 in the pool"},
                 {2, 1, 2, 16, "block_tokens"}, /* blocks of the same size */
                 {4, 2, 1, 8, "n_layers"},
                 {4, 1, 4, 4, "n_kv_heads"}};
    uint32_t ids[3];
    unsigned char buf[THREE_BYTES];
    tl_kv_pool *from = three_blocks(3, ids);
    export_all(from, ids, 3, buf, sizeof buf);
    for (size_t i = 0; i < sizeof pools / sizeof pools[0]; i++) {
        tl_kv_pool *kv = kv_new(1, pools[i].b, pools[i].layers, pools[i].heads, pools[i].dim);
        /* before space: 3 blocks do not fit in 1 */
        refuse(kv, buf, sizeof buf, TL_ESHAPE, pools[i].words);
        put(buf + HEADER + 8, 9, 4);
        seal(buf, sizeof buf);
        /* records are looked at before dimensions */
        refuse(kv, buf, sizeof buf, TL_EFORMAT, "fill 9");
        put(buf + HEADER + 8, 4, 4);
        seal(buf, sizeof buf);
        tl_kv_pool_destroy(kv);
    }
    tl_kv_pool_destroy(from);
}

TEST(lengths_that_match_only_by_wrapping_are_refused)
{
    tl_kv_pool *kv = kv_new(2, 1, 1, 1, 1);
    const struct {
        uint32_t n, tokens, layers, heads, dim;
        size_t len;
    } forged[] = {
        {1, 1, 1u << 31, 1u << 31, 1, 44},              /* payload 2^64: 0 */
        {1, 1u << 31, 1u << 31, 1u << 31, 1u << 31, 44}, /* payload 2^126 */
        {1, UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX, 48},
        {1u << 31, 2147483645, 1, 1, 1, 32},            /* a record of 2^33, 2^31 times: 2^64 */
        /* 2^32 times 2^30 is 2^62: no wrap, and not there */
        {1u << 30, 1, 1, 1, 1073741821, 32},
        {UINT32_MAX, 1, 1, 1, 1, 48},
    };
    for (size_t i = 0; i < sizeof forged / sizeof forged[0]; i++) {
        unsigned char buf[64] = "TLKV\1\0\1\0";
        const uint32_t fields[] = {forged[i].n, forged[i].tokens, forged[i].layers, forged[i].heads,
                                   forged[i].dim};
        for (int f = 0; f < 5; f++)
            put(buf + AT_N + 4 * f, fields[f], 4);
        put(buf + HEADER + 8, 1, 4);
        seal(buf, forged[i].len);
        refuse(kv, buf, forged[i].len, TL_EFORMAT, "bytes are not");
    }
    /* Dimensions of 0 make records without payload: fills are wrong for b = 0, the shape for the
     * others. */
    for (int at = AT_TOKENS; at <= AT_DIM; at += 4) {
        unsigned char buf[44] = "TLKV\1\0\1\0\1\0\0\0\1\0\0\0\1\0\0\0\1\0\0\0\1\0\0";
        put(buf + at, 0, 4);
        put(buf + HEADER + 8, 1, 4);
        seal(buf, sizeof buf);
        refuse(kv, buf, sizeof buf, at == AT_TOKENS ? TL_EFORMAT : TL_ESHAPE,
               at == AT_TOKENS ? "fill 1" : "is 0");
    }
    tl_kv_pool_destroy(kv);
}

TEST(import_without_space_takes_nothing)
{
    uint32_t ids[3], held[3], out[3];
    unsigned char buf[THREE_BYTES];
    tl_kv_pool *from = three_blocks(3, ids), *kv = kv_new(5, 4, 1, 2, 8);
    export_all(from, ids, 3, buf, sizeof buf);
    kv_paint(kv, 8);
    const uint32_t cached = kv_named(kv, 123);
    CHECK_STATUS(tl_kv_alloc(kv, 3, held), TL_OK);
    CHECK_STATUS(tl_kv_unref(kv, cached), TL_OK);
    refuse(kv, buf, sizeof buf, TL_EFULL, "3 blocks in the envelope, 2 free or cached of 5");
    CHECK_STATUS(tl_kv_unref(kv, held[0]), TL_OK);
    CHECK_STATUS(tl_kv_import(kv, buf, sizeof buf, out), TL_OK);
    CHECK(out[0] == held[0] && out[1] == 4 && out[2] == cached,
          "free ones first, then the cached one");
    CHECK_STATS(kv, 0, 5, 0, 1);
    kv_audit(kv);
    tl_kv_pool_destroy(from);
    tl_kv_pool_destroy(kv);
}

/* An envelope of n full blocks of one f16 each (b 1, D 1, one layer and head) under the hashes
 * given. */
static size_t forge(unsigned char *buf, const uint64_t *hash, uint32_t n)
{
    const size_t len = 28 + (size_t)n * 16 + 4;
    memcpy(buf, "TLKV\1\0\1\0", 8);
    put(buf + AT_N, n, 4);
    for (int at = AT_TOKENS; at <= AT_DIM; at += 4)
        put(buf + at, 1, 4);
    for (uint32_t i = 0; i < n; i++) {
        put(buf + HEADER + 16 * i, hash[i], 8);
        put(buf + HEADER + 16 * i + 8, 1, 4);
        put(buf + HEADER + 16 * i + 12, 0x10001u * (i + 1), 4);
    }
    seal(buf, len);
    return len;
}

TEST(the_first_holder_of_a_hash_stays)
{
    unsigned char buf[28 + 4 * 16 + 4];
    uint32_t out[4], found;
    tl_kv_pool *kv = kv_new(8, 1, 1, 1, 1);
    const uint32_t holder = kv_named(kv, 70);
    const size_t len = forge(buf, (const uint64_t[]){70, 80, 0, 80}, 4);
    CHECK_STATUS(tl_kv_import(kv, buf, len, out), TL_OK);
    CHECK_STATUS(tl_kv_lookup(kv, 70, &found), TL_OK);
    CHECK(found == holder, "the pool's own: %u", found);
    CHECK_STATUS(tl_kv_lookup(kv, 80, &found), TL_OK);
    CHECK(found == out[1], "the envelope's first: %u", found);
    kv_audit(kv);
    for (int i = 0; i < 4; i++)
        CHECK(tl_kv_refs(kv, out[i]) == (i == 1 ? 2u : 1u) && kv_bytes(kv, out[i])[0] == i + 1,
              "block %d", i);
    CHECK_STATUS(tl_kv_unref(kv, out[0]), TL_OK);
    CHECK_STATUS(tl_kv_unref(kv, out[2]), TL_OK);
    CHECK_STATUS(tl_kv_unref(kv, out[3]), TL_OK);
    CHECK_STATS(kv, 6, 2, 0, 0); /* unregistered ones become free */
    tl_kv_pool_destroy(kv);
}

TEST(a_hash_evicted_to_make_room_goes_to_the_newcomer)
{
    unsigned char buf[28 + 2 * 16 + 4];
    uint32_t out[2], found;
    tl_kv_pool *kv = kv_new(3, 1, 1, 1, 1);
    const uint32_t old = kv_named(kv, 70), kept = kv_named(kv, 80);
    kv_one(kv);
    CHECK_STATUS(tl_kv_unref(kv, old), TL_OK);
    CHECK_STATUS(tl_kv_unref(kv, kept), TL_OK);
    size_t len = forge(buf, (const uint64_t[]){70}, 1); /* takes `old`, which held 70 */
    CHECK_STATUS(tl_kv_import(kv, buf, len, out), TL_OK);
    CHECK(out[0] == old, "%u", out[0]);
    CHECK_STATUS(tl_kv_lookup(kv, 70, &found), TL_OK);
    CHECK(found == out[0], "%u", found);
    CHECK_STATS(kv, 0, 2, 1, 1);
    CHECK_STATUS(tl_kv_unref(kv, found), TL_OK);
    CHECK_STATUS(tl_kv_unref(kv, found), TL_OK);
    /* Both cached now, 80 the older: importing 70 and 80 evicts both, and both go to the
     * newcomers. */
    len = forge(buf, (const uint64_t[]){70, 80}, 2);
    CHECK_STATUS(tl_kv_import(kv, buf, len, out), TL_OK);
    CHECK(out[0] == kept && out[1] == old, "%u %u", out[0], out[1]);
    CHECK_STATUS(tl_kv_lookup(kv, 70, &found), TL_OK);
    CHECK(found == out[0], "%u", found);
    CHECK_STATUS(tl_kv_lookup(kv, 80, &found), TL_OK);
    CHECK(found == out[1], "%u", found);
    kv_audit(kv);
    tl_kv_pool_destroy(kv);
}

/* ---- anything at all ---- */

/* What import has to answer, worked out with numbers that cannot wrap (long division instead of
 * products). */
static tl_status verdict(const tl_kv_pool *kv, const unsigned char *p, size_t len)
{
    if (len < 32)
        return TL_EFORMAT;
    const uint64_t n = get(p + AT_N, 4), dim[4] = {get(p + AT_TOKENS, 4), get(p + AT_LAYERS, 4),
                                                   get(p + AT_HEADS, 4), get(p + AT_DIM, 4)};
    const size_t body = len - 32;
    if (n == 0 ? body != 0 : body % n != 0 || body / n < 12)
        return TL_EFORMAT;
    /* has to be 4 times the product of the dimensions */
    const uint64_t payload = n == 0 ? 0 : body / n - 12;
    const int empty = dim[0] == 0 || dim[1] == 0 || dim[2] == 0 || dim[3] == 0;
    uint64_t left = payload;
    for (int i = 0; n > 0 && !empty && i < 4; i++) {
        if (left % dim[i] != 0)
            return TL_EFORMAT;
        left /= dim[i];
    }
    if (n > 0 && left != (empty ? 0 : 4))
        return TL_EFORMAT;
    if (memcmp(p, "TLKV", 4) != 0 || get(p + len - 4, 4) != crc_ref(p, len - 4) ||
        get(p + 4, 4) != 0x00010001u)
        return TL_EFORMAT;
    for (uint64_t i = 0; i < n; i++) {
        const unsigned char *record = p + 28 + i * (12 + payload);
        const uint64_t fill = get(record + 8, 4);
        if (fill < 1 || fill > dim[0] || (get(record, 8) != 0 && fill != dim[0]))
            return TL_EFORMAT;
    }
    if (dim[0] != kv->cfg.block_tokens || dim[1] != kv->cfg.n_layers ||
        dim[2] != kv->cfg.n_kv_heads || dim[3] != kv->cfg.head_dim)
        return TL_ESHAPE;
    const tl_kv_stats s = kv_stats(kv);
    return n > s.free + s.cached ? TL_EFULL : TL_OK;
}

/* One change a writer with a fault might make; lengths and headers are hit often, and so are other
 * ways to cut the same bytes. */
static size_t mutate(unsigned char *p, size_t len, uint64_t *seed)
{
    static const uint32_t odd[] = {0, 1, 2, 3, 4, 5, 8, 16, 0x7FFFFFFF, 0x80000000u, UINT32_MAX};
    const int field = AT_N + 4 * (int)rng_below(seed, 5),
              other = AT_TOKENS + 4 * (int)rng_below(seed, 4);
    const size_t record = 28 + 44 * (size_t)rng_below(seed, 3);
    switch (rng_below(seed, 10)) {
    case 0:
        len += len == 0;
        p[rng_below(seed, (int64_t)len)] ^= (unsigned char)(1 << rng_below(seed, 8));
        break;
    case 1:
        put(p + field, odd[rng_below(seed, 11)], 4);
        break;
    case 2: { /* swap two dimensions: the same length */
        const uint64_t a = get(p + other, 4), at = AT_TOKENS + 4 * (uint64_t)rng_below(seed, 4);
        put(p + other, get(p + at, 4), 4);
        put(p + at, a, 4);
        break;
    }
    case 3:
        if (record + 12 <= len)
            put(p + record + 8, odd[rng_below(seed, 11)], 4);
        break;
    case 4:
        if (record + 12 <= len)
            put(p + record, (uint64_t)rng_below(seed, 6), 8);
        break;
    case 5:
        len = (size_t)rng_below(seed, 200);
        break;
    case 6:
        put(p + 4 + 2 * rng_below(seed, 2), (uint64_t)rng_below(seed, 3), 2);
        break;
    case 7: /* one record less, in header and length */
        if (get(p + AT_N, 4) > 0 && len >= 32 + 44) {
            put(p + AT_N, get(p + AT_N, 4) - 1, 4);
            len -= 44;
        }
        break;
    default:
        break;
    }
    return len;
}

TEST(mutated_envelopes_get_the_verdict_they_deserve)
{
    enum { LEN = 28 + 3 * 44 + 4 }; /* b 2, one layer, 2 heads, D 2: a payload of 32 */
    uint64_t seed = 77;
    uint32_t ids[3], seen[10] = {0};
    unsigned char good[LEN], buf[256];
    tl_kv_pool *kv = kv_new(5, 2, 1, 2, 2);
    kv_paint(kv, 6);
    for (int i = 0; i < 3; i++)
        ids[i] = kv_named(kv, 1 + (uint64_t)i);
    export_all(kv, ids, 3, good, sizeof good);
    for (int i = 0; i < 3; i++)
        CHECK_STATUS(tl_kv_unref(kv, ids[i]), TL_OK);
    for (int turn = 0; turn < 30000; turn++) {
        uint32_t out[8], extra = KV_NONE;
        memset(buf, 0, sizeof buf);
        memcpy(buf, good, LEN);
        size_t len = LEN;
        for (int64_t i = rng_below(&seed, 4); i >= 0; i--)
            len = mutate(buf, len, &seed);
        if (len >= 4 && rng_below(&seed, 8) != 0)
            seal(buf, len);
        if (rng_below(&seed, 4) == 0) /* now and then too little space */
            for (extra = 0; extra < 3; extra++)
                ids[extra] = kv_one(kv);
        const tl_status want = verdict(kv, buf, len);
        seen[want]++;
        if (want != TL_OK) {
            refuse(kv, buf, len, want, "");
        } else {
            CHECK_STATUS(tl_kv_import(kv, buf, len, out), TL_OK);
            for (uint64_t i = 0; i < get(buf + AT_N, 4); i++) {
                const unsigned char *record = buf + 28 + 44 * i;
                CHECK(tl_kv_refs(kv, out[i]) == 1 && tl_kv_fill(kv, out[i]) == get(record + 8, 4),
                      "block %u", out[i]);
                CHECK(memcmp(kv_bytes(kv, out[i]), record + 12, 32) == 0, "contents of %u", out[i]);
            }
            kv_audit(kv);
            for (uint64_t i = 0; i < get(buf + AT_N, 4); i++)
                CHECK_STATUS(tl_kv_unref(kv, out[i]), TL_OK);
        }
        for (uint32_t i = 0; extra != KV_NONE && i < 3; i++)
            CHECK_STATUS(tl_kv_unref(kv, ids[i]), TL_OK);
    }
    CHECK(seen[TL_OK] > 1000 && seen[TL_EFORMAT] > 1000 && seen[TL_ESHAPE] > 300 &&
              seen[TL_EFULL] > 300,
          "%u fine, %u format, %u shape, %u full", seen[TL_OK], seen[TL_EFORMAT], seen[TL_ESHAPE],
          seen[TL_EFULL]);
    tl_kv_pool_destroy(kv);
}

TEST(random_bytes_are_safe)
{
    tl_kv_pool *kv = kv_new(4, 2, 1, 1, 2);
    uint64_t seed = 99;
    for (int turn = 0; turn < 20000; turn++) {
        unsigned char bytes[128];
        const size_t len = (size_t)rng_below(&seed, sizeof bytes);
        for (size_t i = 0; i < len; i++)
            bytes[i] = (unsigned char)(rng_next(&seed) >> 20);
        refuse(kv, bytes, len, TL_EFORMAT, "");
    }
    tl_kv_pool_destroy(kv);
}

CHECK_MAIN()
