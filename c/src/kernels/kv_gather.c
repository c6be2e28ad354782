/* SPDX-License-Identifier: MIT */
/* kv_gather.c: K and V of positions of one sequence read back as f32. */
#include <inttypes.h>

#include "kernels/kv_positions.h"
#include "kernels/kv_store.h"
#include "kernels/shapes.h"
#include "runtime/fail.h"
#include "runtime/fpenv.h"

static const char fn[] = "tl_kv_gather_f32";

/* Whether no two elements share a place, those of k and v together: in bytes, the step from one
 * tensor to the other being an axis like the others. Both are within the address space. */
static tl_status check_apart(const struct kv_positions *p)
{
    const int64_t elem = sizeof(float), heads = p->kv->cfg.n_kv_heads;
    const int64_t width = p->kv->cfg.head_dim * elem;
    struct axis axis[] = {
        {"head_stride", heads > 1 ? p->head_stride * elem : 0, heads},
        {"token_stride", p->T > 1 ? p->token_stride * elem : 0, p->T},
        {"v - k", (int64_t)((uintptr_t)p->v - (uintptr_t)p->k), 2}};
    int64_t stepped_over;
    const struct axis *bad = tl_overlapping_axis(width, axis, 3, &stepped_over);
    if (bad)
        return tl_fail(TL_EINVAL, fn,
                       "%s = %" PRId64 " bytes steps into the %" PRId64
                       " bytes of what it steps over",
                       bad->name, bad->stride, stepped_over);
    return TL_OK;
}

static tl_status check_entries(const struct kv_positions *p)
{
    const int64_t b = p->kv->cfg.block_tokens, last = (p->pos + p->T - 1) / b;
    for (int64_t entry = p->pos / b; entry <= last; entry++) {
        const uint32_t id = p->table[entry];
        if (id >= p->kv->cfg.n_blocks)
            return tl_fail_i64(TL_EINVAL, fn,
                               "block_table[%lld] = %lld is out of range: the pool has %lld", entry,
                               id, p->kv->cfg.n_blocks);
        if (kv_refs(p->kv, id) == 0)
            return tl_fail_i64(TL_EINVAL, fn, "block_table[%lld] = %lld is not used", entry, id);
    }
    return TL_OK;
}

/* n tokens of one head, those in slots `slot` and up of one strip. */
static void read_strip(const struct kv_store *store, const struct kv_positions *p,
                       unsigned char *strip, int64_t slot, float *y, int64_t n)
{
    const struct kv_sizes *size = &p->kv->size;
    const int64_t D = p->kv->cfg.head_dim;
    const unsigned char *x = strip + (size_t)slot * size->row;
    if (size->scale == 0 && p->token_stride == D) {
        tl_kv_widen(store, x, 1, y, n * D);
        return;
    }
    const float *scale = size->scale ? kv_strip_scales(p->kv, strip) + slot : NULL;
    for (int64_t i = 0; i < n; i++)
        tl_kv_widen(store, x + (size_t)i * size->row, scale ? scale[i] : 1,
                    y + i * p->token_stride, D);
}

static void read_tensor(const struct kv_store *store, const struct kv_positions *p, bool is_v,
                        float *y)
{
    const tl_kv_pool *kv = p->kv;
    const int64_t b = kv->cfg.block_tokens;
    for (int64_t head = 0; head < kv->cfg.n_kv_heads; head++) {
        int64_t slot = p->pos % b;
        const uint32_t *entry = p->table + p->pos / b;
        for (int64_t t = 0, n; t < p->T; t += n, entry++, slot = 0) {
            n = b - slot < p->T - t ? b - slot : p->T - t;
            unsigned char *slab = kv_slab(kv, *entry, p->layer, is_v);
            read_strip(store, p, slab + (size_t)head * kv->size.strip, slot,
                       y + head * p->head_stride + t * p->token_stride, n);
        }
    }
}

tl_status tl_kv_gather_f32(const tl_kv_pool *kv, uint32_t layer, const uint32_t *block_table,
                           int32_t n_table, int64_t pos, int64_t T, float *k, float *v,
                           int64_t head_stride, int64_t token_stride)
{
    const struct kv_positions p = {fn, kv, layer, block_table, n_table, pos, T, k, v, head_stride,
                                   token_stride};
    TL_TRY(tl_kv_check_sizes(&p));
    if (T == 0)
        return TL_OK;
    TL_TRY(tl_kv_check_table(&p));
    const struct kv_tensor keys = {"k", k, sizeof *k, T, head_stride, token_stride},
                           values = {"v", v, sizeof *v, T, head_stride, token_stride};
    struct kv_store store = {.from = TL_F32, .to = kv->cfg.dtype};
    TL_TRY(tl_kv_check_tensor(fn, kv, &keys));
    TL_TRY(tl_kv_check_tensor(fn, kv, &values));
    TL_TRY(check_apart(&p));
    TL_TRY(tl_kernels_require(fn, &store.kernels));
    TL_TRY(check_entries(&p));
    const tl_fpenv caller = tl_fpenv_enter();
    read_tensor(&store, &p, false, k);
    read_tensor(&store, &p, true, v);
    tl_fpenv_leave(caller);
    return TL_OK;
}
