/* SPDX-License-Identifier: MIT */
/* test_kv_envelope_formats.c: envelopes of every format: their bytes, and that a pool takes in none
 * of another format. */
#include "envelope_ref.h"
#include "kv_check.h"
#include "kv_ref.h"

struct shape {
    uint32_t b, layers, heads, dim;
};

/* strips with and without bytes that fill them up */
static const struct shape shapes[] = {{1, 1, 1, 1}, {3, 2, 1, 5}, {4, 1, 2, 8}, {7, 1, 3, 3},
                                      {16, 2, 2, 64}, {17, 1, 1, 13}};
enum { SHAPES = sizeof shapes / sizeof *shapes };

static tl_kv_pool *new_pool(const struct ref_format *f, uint32_t n_blocks, const struct shape *s)
{
    return ref_pool(f, n_blocks, s->b, s->layers, s->heads, s->dim);
}

static size_t block_bytes(const struct ref_format *f, const struct shape *s)
{
    return ref_strip(f, s->b, s->dim) * s->heads * s->layers * 2;
}

static size_t envelope_bytes(const struct ref_format *f, const struct shape *s, size_t n)
{
    return 28 + n * (12 + block_bytes(f, s)) + 4;
}

/* The envelope that blocks 0 .. n-1 of a pool must give. */
static void draw_envelope(unsigned char *p, const tl_kv_pool *kv, const struct ref_format *f,
                          const struct shape *s, uint32_t n)
{
    const size_t len = envelope_bytes(f, s, n), strip = ref_strip(f, s->b, s->dim),
                 scales = ref_scales_at(f, s->b, s->dim), row = s->dim * (size_t)f->elem;
    const uint32_t dims[] = {n, s->b, s->layers, s->heads, s->dim};
    memset(p, 0, len);
    memcpy(p, "TLKV", 4);
    put(p + 4, f->format, 2), put(p + 6, (uint64_t)f->dtype, 2);
    for (int i = 0; i < 5; i++)
        put(p + 8 + 4 * i, dims[i], 4);
    unsigned char *record = p + 28;
    for (uint32_t id = 0; id < n; id++, record += 12 + block_bytes(f, s)) {
        const size_t fill = kv->block[id].fill;
        put(record, kv->block[id].hash, 8), put(record + 8, fill, 4);
        for (size_t at = 0; at < block_bytes(f, s); at += strip) {
            memcpy(record + 12 + at, kv_bytes(kv, id) + at, fill * row);
            if (f->has_scales)
                memcpy(record + 12 + at + scales, kv_bytes(kv, id) + at + scales, fill * 4);
        }
    }
    seal(p, len);
}

/* Painted blocks: full and named, full, and filled in part. */
static tl_kv_pool *three_blocks(const struct ref_format *f, const struct shape *s)
{
    uint32_t ids[3];
    tl_kv_pool *kv = new_pool(f, 4, s);
    kv_paint(kv, s->dim);
    CHECK_STATUS(tl_kv_alloc(kv, 3, ids), TL_OK);
    CHECK_STATUS(tl_kv_set_fill(kv, 0, s->b), TL_OK);
    CHECK_STATUS(tl_kv_set_fill(kv, 1, s->b), TL_OK);
    CHECK_STATUS(tl_kv_set_fill(kv, 2, s->b / 2 + 1), TL_OK);
    CHECK_STATUS(tl_kv_register(kv, 0, 0x1122334455667788u), TL_OK);
    return kv;
}

static const uint32_t first_three[] = {0, 1, 2};

/* What three_blocks exports, in memory that ends at an unmapped page. */
static unsigned char *export_three(const struct ref_format *f, const struct shape *s)
{
    tl_kv_pool *kv = three_blocks(f, s);
    const size_t len = envelope_bytes(f, s, 3);
    size_t written;
    unsigned char *buf = guarded(len);
    CHECK_STATUS(tl_kv_export(kv, first_three, 3, buf, len, &written), TL_OK);
    tl_kv_pool_destroy(kv);
    return buf;
}

TEST(bytes_are_those_of_the_positions_stored_and_zeros)
{
    for (int format = 0; format < REF_FORMATS; format++)
        for (int i = 0; i < SHAPES; i++) {
            const struct ref_format *f = &ref_formats[format];
            const size_t len = envelope_bytes(f, &shapes[i], 3);
            tl_kv_pool *kv = three_blocks(f, &shapes[i]);
            unsigned char *got = guarded(len), *want = malloc(len);
            size_t written = 0;
            draw_envelope(want, kv, f, &shapes[i], 3);
            CHECK(tl_kv_export_bytes(kv, 3) == len, "%s, shape %d: %zu bytes, want %zu", f->name, i,
                  tl_kv_export_bytes(kv, 3), len);
            CHECK_STATUS(tl_kv_export(kv, first_three, 3, got, len, &written), TL_OK);
            CHECK(written == len, "%zu", written);
            for (size_t at = 0; at < len; at++)
                CHECK(got[at] == want[at], "%s, shape %d: byte %zu is %02X, want %02X", f->name, i,
                      at, got[at], want[at]);
            guarded_free(got, len), free(want);
            tl_kv_pool_destroy(kv);
        }
}

TEST(a_pool_of_the_same_format_takes_them_in)
{
    for (int format = 0; format < REF_FORMATS; format++)
        for (int i = 0; i < SHAPES; i++) {
            const struct ref_format *f = &ref_formats[format];
            const size_t len = envelope_bytes(f, &shapes[i], 3);
            unsigned char *buf = export_three(f, &shapes[i]), *again = malloc(len);
            tl_kv_pool *to = new_pool(f, 5, &shapes[i]);
            uint32_t got[3], found;
            size_t written;
            kv_paint(to, 99);
            (void)kv_one(to); /* so that ids differ */
            CHECK_STATUS(tl_kv_import(to, buf, len, got), TL_OK);
            CHECK_STATUS(tl_kv_lookup(to, 0x1122334455667788u, &found), TL_OK);
            CHECK(found == got[0] && got[0] != 0, "%s: block %u", f->name, found);
            CHECK_STATUS(tl_kv_export(to, got, 3, again, len, &written), TL_OK);
            CHECK(written == len && memcmp(buf, again, len) == 0, "%s, shape %d", f->name, i);
            kv_audit(to);
            guarded_free(buf, len), free(again);
            tl_kv_pool_destroy(to);
        }
}

static void refuse(tl_kv_pool *kv, const unsigned char *buf, size_t len, const char *words)
{
    uint32_t out[3] = {91, 92, 93};
    tl_status got = TL_OK;
    CHECK_REFUSED(kv, got = tl_kv_import(kv, buf, len, out), "tl_kv_import", words);
    CHECK(got == TL_EFORMAT && out[0] == 91 && out[2] == 93, "%s", tl_status_str(got));
}

TEST(a_pool_of_another_format_takes_none)
{
    for (int from = 0; from < REF_FORMATS; from++)
        for (int i = 0; i < SHAPES; i++) {
            const struct ref_format *f = &ref_formats[from];
            const size_t len = envelope_bytes(f, &shapes[i], 3);
            unsigned char *buf = export_three(f, &shapes[i]);
            for (int to = 0; to < REF_FORMATS; to++) {
                char words[100];
                if (to == from)
                    continue;
                tl_kv_pool *kv = new_pool(&ref_formats[to], 5, &shapes[i]);
                snprintf(words, sizeof words, "version is %u in the envelope, the pool's format %u",
                         f->format, ref_formats[to].format);
                refuse(kv, buf, len, words);
                tl_kv_pool_destroy(kv);
            }
            guarded_free(buf, len);
        }
}

TEST(a_format_has_one_dtype)
{
    const struct shape *s = &shapes[2];
    for (int format = 0; format < REF_FORMATS; format++)
        for (uint32_t dtype = 0; dtype < 8; dtype++) {
            const struct ref_format *f = &ref_formats[format];
            const size_t len = envelope_bytes(f, s, 3);
            unsigned char *buf = export_three(f, s);
            tl_kv_pool *kv = new_pool(f, 5, s);
            uint32_t out[3];
            char words[100];
            put(buf + 6, dtype, 2);
            seal(buf, len);
            snprintf(words, sizeof words, "dtype is %u in the envelope and %d in the pool", dtype,
                     f->dtype);
            if ((tl_dtype)dtype == f->dtype)
                CHECK_STATUS(tl_kv_import(kv, buf, len, out), TL_OK);
            else
                refuse(kv, buf, len, words);
            guarded_free(buf, len);
            tl_kv_pool_destroy(kv);
        }
}

/* The header's own version says how long a record is, whatever the pool's format. */
TEST(the_length_must_be_that_of_the_version)
{
    const struct shape *s = &shapes[3];
    for (int format = 0; format < REF_FORMATS; format++)
        for (int as = 0; as < REF_FORMATS; as++) {
            const struct ref_format *f = &ref_formats[format], *g = &ref_formats[as];
            const size_t len = envelope_bytes(f, s, 3);
            unsigned char *buf = export_three(f, s);
            tl_kv_pool *kv = new_pool(f, 5, s);
            put(buf + 4, g->format, 2);
            seal(buf, len);
            if (envelope_bytes(g, s, 3) != len)
                refuse(kv, buf, len, "bytes are not an envelope of 3 blocks [1,2,3,7,3] in format");
            else if (as != format)
                refuse(kv, buf, len, "version is");
            guarded_free(buf, len);
            tl_kv_pool_destroy(kv);
        }
}

/* Of a version that is no format nobody knows how long it should be: magic and checksum are looked
 * at, then the version. */
TEST(versions_that_are_no_format_are_named)
{
    static const uint16_t versions[] = {0, 6, 255, 65535};
    const struct shape *s = &shapes[0];
    for (int i = 0; i < 4; i++)
        for (size_t len = 32; len < 60; len += 9) {
            unsigned char buf[60] = "TLKV";
            char words[60];
            tl_kv_pool *kv = new_pool(&ref_formats[2], 5, s);
            put(buf + 4, versions[i], 2);
            put(buf + 8, 2, 4);
            seal(buf, len);
            snprintf(words, sizeof words, "version is %u in the envelope, the pool's format 3",
                     versions[i]);
            refuse(kv, buf, len, words);
            buf[len - 1] ^= 1;
            refuse(kv, buf, len, "checksum");
            buf[0] = 'X';
            refuse(kv, buf, len, "magic");
            tl_kv_pool_destroy(kv);
        }
}

TEST(lengths_that_match_only_by_wrapping_are_refused)
{
    const struct {
        uint32_t version, n, tokens, layers, heads, dim;
        size_t len;
    } forged[] = {
        {3, 1, 1u << 20, 1u << 20, 1u << 20, 4, 44},  /* strips of 2^23, payload 2^64 */
        {2, 1, UINT32_MAX, 1, 1, UINT32_MAX, 44},     /* rows below 2^64, not with scales */
        {2, 1, UINT32_MAX, UINT32_MAX, UINT32_MAX, UINT32_MAX, 44},
        {5, 1, 1u << 30, 1u << 31, 1, 1, 44},         /* 2^64 */
        {5, 1, UINT32_MAX, 0, 1, UINT32_MAX, 44},     /* a factor of 0 behind what wraps */
        {4, 1, 1u << 31, 1u << 31, 1, 1, 44},
    };
    for (size_t i = 0; i < sizeof forged / sizeof *forged; i++) {
        unsigned char buf[48] = "TLKV";
        const uint32_t dims[] = {forged[i].n, forged[i].tokens, forged[i].layers, forged[i].heads,
                                 forged[i].dim};
        tl_kv_pool *kv = new_pool(&ref_formats[forged[i].version - 1], 5, &shapes[0]);
        put(buf + 4, forged[i].version, 2);
        put(buf + 6, (uint64_t)ref_formats[forged[i].version - 1].dtype, 2);
        for (int d = 0; d < 5; d++)
            put(buf + 8 + 4 * d, dims[d], 4);
        put(buf + 36, 1, 4);
        seal(buf, forged[i].len);
        refuse(kv, buf, forged[i].len, "bytes are not an envelope of 1 blocks");
        tl_kv_pool_destroy(kv);
    }
}

/* Blocks of kilobytes, so that sums are taken many bytes at a time. */
TEST(large_blocks_have_the_same_bytes)
{
    static const struct shape large[] = {{16, 4, 8, 128}, {17, 3, 5, 129}};
    for (int format = 0; format < REF_FORMATS; format++)
        for (int i = 0; i < 2; i++) {
            const struct ref_format *f = &ref_formats[format];
            const size_t len = envelope_bytes(f, &large[i], 3);
            tl_kv_pool *kv = three_blocks(f, &large[i]);
            unsigned char *got = malloc(len), *want = malloc(len);
            size_t written;
            draw_envelope(want, kv, f, &large[i], 3);
            CHECK_STATUS(tl_kv_export(kv, first_three, 3, got, len, &written), TL_OK);
            CHECK(written == len && memcmp(got, want, len) == 0, "%s, shape %d", f->name, i);
            free(got), free(want);
            tl_kv_pool_destroy(kv);
        }
}

CHECK_MAIN()
