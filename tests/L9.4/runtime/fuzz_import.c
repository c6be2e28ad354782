/* SPDX-License-Identifier: MIT */
/* fuzz_import.c: libFuzzer on the one parser of foreign bytes, tl_kv_import. Every input goes into
 * a pool of each format twice: as it is, and with its checksum put right, so that what lies behind
 * the checksum is reached. A refusal must leave the pool as it was; what was taken must export to
 * the same bytes again (but for hashes another block held). */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "tinyllm/kv_pool.h"

/* Strips of two rows of one element: those of eight bits have padding before the scales. */
enum { N_BLOCKS = 6, ROWS = 2, MOST_BLOCK = 2 * 12 };

static const struct format {
    uint32_t format;
    tl_dtype dtype;
    size_t row, scales, scale, strip; /* bytes */
} formats[] = {{TL_KV_FORMAT_F16, TL_F16, 2, 4, 0, 4},
               {TL_KV_FORMAT_E4M3, TL_F8_E4M3, 1, 4, 4, 12},
               {TL_KV_FORMAT_I8, TL_I8, 1, 4, 4, 12},
               {TL_KV_FORMAT_BF16, TL_BF16, 2, 4, 0, 4},
               {TL_KV_FORMAT_F32, TL_F32, 4, 8, 0, 8}};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static tl_kv_pool *new_pool(const struct format *f)
{
    const tl_kv_cfg cfg = {N_BLOCKS, ROWS, 1, 1, 1, f->dtype, f->format};
    tl_kv_pool *kv;
    if (tl_kv_pool_create(&cfg, &kv) != TL_OK)
        abort();
    return kv;
}

static uint32_t count_of(const uint8_t *envelope)
{
    uint32_t n;
    memcpy(&n, envelope + 8, sizeof n);
    return n;
}

/* Rows and scales of the positions stored; all else is zeros. */
static int same_payload(const struct format *f, const uint8_t *again, const uint8_t *data,
                        uint32_t fill)
{
    for (size_t at = 0; at < 2 * f->strip; at++) {
        const size_t i = at % f->strip;
        const int stored = i < f->scales ? i < fill * f->row : i < f->scales + fill * f->scale;
        if (again[at] != (stored ? data[at] : 0))
            return 0;
    }
    return 1;
}

static void check_taken(tl_kv_pool *kv, const struct format *f, const uint32_t *ids,
                        const uint8_t *data, size_t size)
{
    uint8_t again[TL_KV_ENVELOPE_HEADER + N_BLOCKS * (TL_KV_RECORD_HEADER + MOST_BLOCK) + 4];
    size_t written = 0;
    const uint32_t n = count_of(data);
    if (n > N_BLOCKS || tl_kv_export(kv, ids, n, again, sizeof again, &written) != TL_OK ||
        written != size)
        abort();
    for (uint32_t i = 0; i < n; i++) {
        const size_t record = TL_KV_ENVELOPE_HEADER + i * (TL_KV_RECORD_HEADER + 2 * f->strip);
        uint32_t fill;
        memcpy(&fill, data + record + 8, sizeof fill);
        if (memcmp(again + record + 8, data + record + 8, 4) != 0 ||
            tl_kv_fill(kv, ids[i]) != fill || tl_kv_refs(kv, ids[i]) != 1 ||
            !same_payload(f, again + record + 12, data + record + 12, fill))
            abort();
        tl_kv_unref(kv, ids[i]);
    }
}

static void import_once(tl_kv_pool *kv, const struct format *f, const uint8_t *data, size_t size)
{
    uint32_t ids[N_BLOCKS];
    tl_kv_stats before, after;
    memset(ids, 0xA5, sizeof ids);
    tl_kv_stats_get(kv, &before);
    const tl_status status = tl_kv_import(kv, data, size, ids);
    tl_kv_stats_get(kv, &after);
    if (status == TL_OK)
        check_taken(kv, f, ids, data, size);
    else if (memcmp(&before, &after, sizeof before) != 0 || ids[0] != 0xA5A5A5A5u)
        abort();
}

static void import_into(const struct format *f, const uint8_t *data, size_t size)
{
    tl_kv_pool *kv = new_pool(f);
    import_once(kv, f, data, size);
    if (size >= 4) {
        uint8_t *whole = malloc(size);
        if (!whole)
            abort();
        memcpy(whole, data, size);
        const uint32_t crc = tl_crc32c(whole, size - 4, 0);
        memcpy(whole + size - 4, &crc, sizeof crc);
        import_once(kv, f, whole, size);
        import_once(kv, f, whole, size); /* hashes are held by cached blocks now */
        free(whole);
    }
    tl_kv_pool_destroy(kv);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    for (size_t i = 0; i < sizeof formats / sizeof *formats; i++)
        import_into(&formats[i], data, size);
    return 0;
}
