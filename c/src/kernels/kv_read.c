/* SPDX-License-Identifier: MIT */
/* kv_read.c: a decode step without the arithmetic: its bytes are read, in its order, and nothing is
 * computed of them. One load brings a whole cache line, so no wide loads are needed; memory that is
 * busy drops prefetches, so each line is asked for more than once. */
#include "kernels/attn_call.h"
#include "runtime/fail.h"
#include "runtime/pool_run.h"

enum { LINE = 64, N_AHEAD = 3 };
/* blocks between asking for a line and reading it */
static const int64_t ahead[N_AHEAD] = {4, 2, 1};

struct reading {
    struct attn_call c; /* whose one token a sequence sees what is read */
    _Atomic uint64_t word;
};

static uint64_t read_lines(const char *at, const char *const next[N_AHEAD], int64_t n)
{
    uint64_t word = 0;
    for (int64_t i = 0; i < n; i += LINE) {
        for (int k = 0; k < N_AHEAD; k++)
            __builtin_prefetch(next[k] + i, 0, 2);
        word ^= *(const volatile unsigned char *)(at + i);
    }
    return word;
}

/* Slots of entry i of a table, and prefetches of those of entries that follow, up to `last`. */
static uint64_t read_side(const struct kv_side *side, struct kv_plane plane, const uint32_t *table,
                          int64_t i, int64_t last, struct range slots)
{
    const bool is_gapless = side->token_stride == side->dim;
    const int64_t step = is_gapless ? slots.hi - slots.lo : 1;
    uint64_t word = 0;
    for (int64_t slot = slots.lo; slot < slots.hi; slot += step) {
        const char *next[N_AHEAD];
        for (int k = 0; k < N_AHEAD; k++)
            next[k] =
                kv_row(side, plane, table[i + ahead[k] < last ? i + ahead[k] : last], slot);
        word ^= read_lines(kv_row(side, plane, table[i], slot), next,
                           step * kv_row_bytes(side->dtype, side->dim));
    }
    return word;
}

static uint64_t read_unit(const struct attn_call *c, int64_t seq, int64_t kv_head)
{
    const struct kv_layout *kv = &c->kv;
    const int64_t b = kv->block_tokens;
    const struct range seen = attn_seen_by_all(c, seq);
    const struct kv_plane k = kv_plane(&kv->k, seq, kv_head), v = kv_plane(&kv->v, seq, kv_head);
    const uint32_t *table = attn_table(c, seq);
    uint64_t word = 0;
    for (int64_t i = seen.lo / b, last = (seen.hi - 1) / b; i <= last; i++) {
        const struct range slots = {i == seen.lo / b ? seen.lo % b : 0,
                                    i == last ? (seen.hi - 1) % b + 1 : b};
        word ^= read_side(&kv->k, k, table, i, last, slots);
        word ^= read_side(&kv->v, v, table, i, last, slots);
    }
    return word;
}

static void read_units(void *ctx, int64_t lo, int64_t hi, int worker)
{
    struct reading *r = ctx;
    uint64_t word = 0;
    (void)worker;
    for (int64_t unit = lo; unit < hi; unit++)
        if (r->c.ctx_lens[unit / r->c.kv.n_kv_heads] > 0)
            word ^= read_unit(&r->c, unit / r->c.kv.n_kv_heads, unit % r->c.kv.n_kv_heads);
    r->word ^= word;
}

static tl_status check_sequence(const struct attn_call *c, int64_t seq)
{
    const int64_t n = c->ctx_lens[seq];
    if (n < 0)
        return tl_fail_i64(TL_EINVAL, c->fn, "sequence %lld: ctx_len = %lld is negative", seq, n);
    return n == 0 ? TL_OK : tl_attn_check_table(c, seq, attn_seen_by_all(c, seq));
}

tl_status tl_kv_read(const tl_kv_view *view, const uint32_t *block_tables, int64_t table_stride,
                     const int32_t *ctx_lens, int64_t B, int64_t window, tl_pool *tp,
                     uint64_t *word)
{
    static const char fn[] = "tl_kv_read";
    struct reading r = {.c = {.fn = fn, .B = B, .q_len_each = 1, .ctx_lens = ctx_lens,
                              .block_tables = block_tables, .table_stride = table_stride,
                              .table_stride_name = "table_stride", .is_causal = true,
                              .window = window}};
    int64_t n_units;
    const char *missing = !view ? "view" : !view->k ? "view: k" : !view->v ? "view: v"
                          : !block_tables ? "block_tables" : !ctx_lens ? "ctx_lens"
                          : !word ? "word" : NULL;
    if (missing)
        return tl_fail(TL_EINVAL, fn, "%s is NULL", missing);
    TL_TRY(tl_kv_view_check(fn, view));
    r.c.kv = tl_kv_layout_of(view);
    TL_TRY(tl_attn_check_batch(&r.c));
    TL_TRY(tl_attn_check_arrays(&r.c));
    for (int64_t seq = 0; seq < B; seq++)
        TL_TRY(check_sequence(&r.c, seq));
    /* of no blocks none is read */
    const int64_t heads = view->n_blocks > 0 ? r.c.kv.n_kv_heads : 0;
    if (__builtin_mul_overflow(B, heads, &n_units))
        return tl_fail_i64(TL_EINVAL, fn, "B = %lld with %lld KV heads", B, heads);
    TL_TRY(tl_pool_run(fn, tp, n_units, 1, read_units, &r));
    *word = r.word;
    return TL_OK;
}
