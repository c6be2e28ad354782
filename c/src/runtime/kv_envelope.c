/* SPDX-License-Identifier: MIT */
/* kv_envelope.c: blocks as bytes that another pool, process or machine can take in.
 *
 * Words. envelope: header, records, checksum. record: one block: hash, fill, payload. payload: its
 * K and V, [n_layers][2][n_kv_heads] strips. The layout stands in kv_pool.h, also at tl_kv_export.
 * Import trusts no byte: it checks everything before it takes a block. */
#include <inttypes.h>
#include <string.h>

#include "runtime/crc32c.h"
#include "runtime/fail.h"
#include "runtime/kv_inner.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "an envelope is little-endian, and payloads are copied as they lie in memory"
#endif

#define CRC_BYTES 4u
#define SMALLEST (TL_KV_ENVELOPE_HEADER + CRC_BYTES) /* an envelope of no blocks */
/* bytes of an envelope from which payloads are copied past the caches */
#define LARGE ((size_t)16 << 20)

static uint16_t load16(const unsigned char *p)
{
    uint16_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

static uint32_t load32(const unsigned char *p)
{
    uint32_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

static uint64_t load64(const unsigned char *p)
{
    uint64_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

/* Writes the low n bytes of value and returns where they end. */
static unsigned char *store(unsigned char *p, uint64_t value, size_t n)
{
    memcpy(p, &value, n);
    return p + n;
}

/* ---- export ---- */

/* False where the size would wrap. */
static bool envelope_bytes(const tl_kv_pool *kv, uint32_t n, size_t *out)
{
    size_t record, records;
    return tl_add_size(kv->size.block, TL_KV_RECORD_HEADER, &record) &&
           tl_mul_size(record, n, &records) && tl_add_size(records, SMALLEST, out);
}

size_t tl_kv_export_bytes(const tl_kv_pool *kv, uint32_t n)
{
    static const char fn[] = "tl_kv_export_bytes";
    size_t bytes;
    if (!kv)
        (void)tl_fail(TL_EINVAL, fn, "the pool is NULL");
    else if (!envelope_bytes(kv, n, &bytes))
        (void)tl_fail(TL_EINVAL, fn, "%u blocks of %zu bytes pass the address space", n,
                      kv->size.block);
    else
        return bytes;
    return 0;
}

static tl_status check_exportable(const char *fn, const tl_kv_pool *kv, const uint32_t *ids,
                                  uint32_t n)
{
    for (uint32_t i = 0; i < n; i++) {
        if (ids[i] >= kv->cfg.n_blocks)
            return tl_fail(TL_EINVAL, fn, "ids[%u] = %u is out of range: the pool has %u", i,
                           ids[i], kv->cfg.n_blocks);
        if (kv_refs(kv, ids[i]) == 0)
            return tl_fail(TL_EINVAL, fn, "ids[%u] = %u is not used", i, ids[i]);
        if (kv->block[ids[i]].fill == 0)
            return tl_fail(TL_EINVAL, fn, "ids[%u] = %u has fill 0", i, ids[i]);
    }
    return TL_OK;
}

static unsigned char *put_header(unsigned char *p, const tl_kv_cfg *cfg, uint32_t n)
{
    memcpy(p, TL_KV_MAGIC, 4);
    p = store(p + 4, cfg->format, 2);
    p = store(p, (uint64_t)cfg->dtype, 2);
    p = store(p, n, 4);
    p = store(p, cfg->block_tokens, 4);
    p = store(p, cfg->n_layers, 4);
    p = store(p, cfg->n_kv_heads, 4);
    return store(p, cfg->head_dim, 4);
}

/* n bytes, of which the first `kept` are copied and the rest are zeros. Returns where they end. */
static unsigned char *put_zeroed(unsigned char *p, const unsigned char *from, size_t kept, size_t n)
{
    memcpy(p, from, kept);
    memset(p + kept, 0, n - kept);
    return p + n;
}

/* A block, strip by strip: of elements and scales those of the first `fill` positions, all else
 * zeros. */
static uint32_t put_strips(unsigned char *p, const tl_kv_pool *kv, uint32_t id, uint32_t crc)
{
    const struct kv_sizes *size = &kv->size;
    const size_t fill = kv->block[id].fill;
    const unsigned char *strip = kv_slab(kv, id, 0, false), *end = strip + size->block;
    for (; strip < end; strip += size->strip) {
        unsigned char *scales = put_zeroed(p, strip, fill * size->row, size->scales);
        put_zeroed(scales, strip + size->scales, fill * size->scale, size->strip - size->scales);
        crc = tl_crc32c(p, size->strip, crc);
        p += size->strip;
    }
    return crc;
}

static uint32_t put_record(unsigned char *p, const tl_kv_pool *kv, uint32_t id, uint32_t crc,
                           bool large)
{
    unsigned char *payload = store(store(p, kv->block[id].hash, 8), kv->block[id].fill, 4);
    crc = tl_crc32c(p, TL_KV_RECORD_HEADER, crc);
    if (kv->block[id].fill < kv->cfg.block_tokens || kv->size.rows < kv->size.scales)
        return put_strips(payload, kv, id, crc);
    return tl_crc32c_copy(payload, kv_slab(kv, id, 0, false), kv->size.block, crc, large);
}

static void put_envelope(unsigned char *p, size_t bytes, const tl_kv_pool *kv, const uint32_t *ids,
                         uint32_t n)
{
    const bool large = bytes >= LARGE;
    unsigned char *record = put_header(p, &kv->cfg, n);
    uint32_t crc = tl_crc32c(p, TL_KV_ENVELOPE_HEADER, 0);
    for (uint32_t i = 0; i < n; i++, record += TL_KV_RECORD_HEADER + kv->size.block)
        crc = put_record(record, kv, ids[i], crc, large);
    store(record, crc, CRC_BYTES);
    if (large)
        tl_copies_done();
}

tl_status tl_kv_export(const tl_kv_pool *kv, const uint32_t *ids, uint32_t n, void *buf, size_t cap,
                       size_t *written)
{
    static const char fn[] = "tl_kv_export";
    size_t bytes;
    if (!kv || !written || (!ids && n > 0))
        return tl_fail(TL_EINVAL, fn, "%s is NULL",
                       !kv        ? "the pool"
                       : !written ? "written"
                                  : "ids");
    if (!envelope_bytes(kv, n, &bytes))
        return tl_fail(TL_EINVAL, fn, "%u blocks of %zu bytes pass the address space", n,
                       kv->size.block);
    TL_TRY(check_exportable(fn, kv, ids, n));
    if (cap < bytes) {
        *written = bytes;
        return tl_fail(TL_EFULL, fn, "%u blocks need %zu bytes, cap is %zu", n, bytes, cap);
    }
    if (!buf)
        return tl_fail(TL_EINVAL, fn, "buf is NULL with cap %zu", cap);
    put_envelope(buf, bytes, kv, ids, n);
    *written = bytes;
    return TL_OK;
}

/* ---- import ---- */

struct envelope {
    uint32_t dtype;
    tl_kv_cfg cfg;   /* what the header says but for the dtype; the version as the format */
    uint64_t record; /* bytes of one record, by that */
    const unsigned char *records;
};

/* Measures a record by the header's own version and dimensions, which may be anything; whether
 * n_blocks of them fill exactly `room` bytes. Where the version is no format nobody knows. */
static bool records_fill(struct envelope *e, uint64_t room)
{
    struct kv_sizes size;
    uint64_t total;
    if (!tl_kv_format_is_known(e->cfg.format))
        return true;
    if (e->cfg.n_blocks == 0)
        return room == 0;
    return tl_kv_measure(&e->cfg, &size) &&
           !__builtin_add_overflow(size.block, TL_KV_RECORD_HEADER, &e->record) &&
           !__builtin_mul_overflow(e->record, e->cfg.n_blocks, &total) && total == room;
}

/* len >= SMALLEST. */
static struct envelope read_header(const unsigned char *p)
{
    return (struct envelope){.dtype = load16(p + 6),
                             .cfg = {.format = load16(p + 4),
                                     .n_blocks = load32(p + 8),
                                     .block_tokens = load32(p + 12),
                                     .n_layers = load32(p + 16),
                                     .n_kv_heads = load32(p + 20),
                                     .head_dim = load32(p + 24)},
                             .records = p + TL_KV_ENVELOPE_HEADER};
}

static tl_status check_seal(const char *fn, const unsigned char *p, size_t len, struct envelope *e)
{
    if (!records_fill(e, len - SMALLEST))
        return tl_fail(TL_EFORMAT, fn,
                       "%zu bytes are not an envelope of %u blocks [%u,2,%u,%u,%u] in format %u",
                       len, e->cfg.n_blocks, e->cfg.n_layers, e->cfg.n_kv_heads,
                       e->cfg.block_tokens, e->cfg.head_dim, e->cfg.format);
    if (memcmp(p, TL_KV_MAGIC, 4) != 0)
        return tl_fail(TL_EFORMAT, fn, "magic %02x %02x %02x %02x is not " TL_KV_MAGIC, p[0], p[1],
                       p[2], p[3]);
    const uint32_t crc = tl_crc32c(p, len - CRC_BYTES, 0), stored = load32(p + len - CRC_BYTES);
    if (crc != stored)
        return tl_fail(TL_EFORMAT, fn, "checksum 0x%08X stored, 0x%08X found", stored, crc);
    return TL_OK;
}

static tl_status check_records(const char *fn, const struct envelope *e)
{
    const unsigned char *p = e->records;
    for (uint32_t i = 0; i < e->cfg.n_blocks; i++, p += e->record) {
        const uint64_t hash = load64(p);
        const uint32_t fill = load32(p + 8);
        if (fill < 1 || fill > e->cfg.block_tokens)
            return tl_fail(TL_EFORMAT, fn, "record %u has fill %u, outside 1 .. %u", i, fill,
                           e->cfg.block_tokens);
        if (hash != 0 && fill != e->cfg.block_tokens)
            return tl_fail(TL_EFORMAT, fn,
                           "record %u has hash 0x%016" PRIx64 " and only %u of %u tokens", i, hash,
                           fill, e->cfg.block_tokens);
    }
    return TL_OK;
}

static tl_status check_shape(const char *fn, const tl_kv_cfg *want, const tl_kv_cfg *got)
{
    const struct {
        const char *name;
        uint32_t want, got;
    } dims[] = {{"block_tokens", want->block_tokens, got->block_tokens},
                {"n_layers", want->n_layers, got->n_layers},
                {"n_kv_heads", want->n_kv_heads, got->n_kv_heads},
                {"head_dim", want->head_dim, got->head_dim}};
    for (size_t i = 0; i < sizeof dims / sizeof dims[0]; i++)
        if (dims[i].got != dims[i].want)
            return tl_fail(TL_ESHAPE, fn, "%s is %u in the envelope and %u in the pool",
                           dims[i].name, dims[i].got, dims[i].want);
    return TL_OK;
}

static tl_status check_contents(const char *fn, const tl_kv_pool *kv, const struct envelope *e)
{
    if (e->cfg.format != kv->cfg.format)
        return tl_fail(TL_EFORMAT, fn, "version is %u in the envelope, the pool's format %u",
                       e->cfg.format, kv->cfg.format);
    if (e->dtype != (uint32_t)kv->cfg.dtype)
        return tl_fail(TL_EFORMAT, fn, "dtype is %u in the envelope and %d in the pool", e->dtype,
                       kv->cfg.dtype);
    TL_TRY(check_records(fn, e));
    TL_TRY(check_shape(fn, &kv->cfg, &e->cfg));
    if (e->cfg.n_blocks > kv_available(kv))
        return tl_fail(TL_EFULL, fn, "%u blocks in the envelope, %u free or cached of %u",
                       e->cfg.n_blocks, kv_available(kv), kv->cfg.n_blocks);
    return TL_OK;
}

/* All space is taken before the first hash is looked up: evicting may remove the one that held
 * it. */
static void take_in(tl_kv_pool *kv, const struct envelope *e, size_t len, uint32_t *ids_out)
{
    const bool large = len >= LARGE;
    const unsigned char *p = e->records;
    for (uint32_t i = 0; i < e->cfg.n_blocks; i++)
        ids_out[i] = tl_kv_take(kv);
    for (uint32_t i = 0; i < e->cfg.n_blocks; i++, p += e->record) {
        const uint64_t hash = load64(p);
        kv->block[ids_out[i]].fill = load32(p + 8);
        tl_copy(kv_slab(kv, ids_out[i], 0, false), p + TL_KV_RECORD_HEADER, kv->size.block, large);
        if (hash != 0)
            (void)tl_kv_index_enter(kv, ids_out[i], hash); /* an earlier holder stays */
    }
    if (large)
        tl_copies_done();
}

tl_status tl_kv_import(tl_kv_pool *kv, const void *buf, size_t len, uint32_t *ids_out)
{
    static const char fn[] = "tl_kv_import";
    if (!kv || !buf)
        return tl_fail(TL_EINVAL, fn, "%s is NULL", kv ? "buf" : "the pool");
    if (len < SMALLEST)
        return tl_fail(TL_EFORMAT, fn, "%zu bytes; the smallest envelope has %u", len, SMALLEST);
    struct envelope e = read_header(buf);
    if (!ids_out && e.cfg.n_blocks > 0)
        return tl_fail(TL_EINVAL, fn, "ids_out is NULL with %u blocks in the envelope",
                       e.cfg.n_blocks);
    TL_TRY(check_seal(fn, buf, len, &e));
    TL_TRY(check_contents(fn, kv, &e));
    take_in(kv, &e, len, ids_out);
    return TL_OK;
}
