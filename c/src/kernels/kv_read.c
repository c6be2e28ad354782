/* SPDX-License-Identifier: MIT */
/* kv_read.c: a decode step without the arithmetic: its bytes are read, in its order, and nothing is
 * computed of them. One load brings a whole cache line, so no wide loads are needed; memory that is
 * busy drops prefetches, so each line is asked for more than once. */
#include "kernels/attn_rows.h"
#include "kernels/kv_view.h"
#include "kernels/shapes.h"
#include "runtime/fail.h"
#include "runtime/pool_run.h"

enum { LINE = 64, N_AHEAD = 3 };
/* blocks between asking for a line and reading it */
static const int64_t ahead[N_AHEAD] = {4, 2, 1};

struct reading {
    struct kv_view view;
    const uint32_t *block_tables;
    const int32_t *ctx_lens;
    int64_t table_stride, Hkv, window, elem;
    _Atomic uint64_t word;
};

static int64_t first_visible(const struct reading *r, int64_t seq)
{
    const int64_t n = r->ctx_lens[seq];
    return r->window > 0 && r->window < n ? n - r->window : 0;
}

static const char *row_at(const struct reading *r, const struct kv_side *side, uint32_t block,
                          int64_t head, int64_t slot)
{
    return (const char *)side->base +
           (block * side->block_stride + head * side->head_stride + slot * side->token_stride) *
               r->elem;
}

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

/* Slots from .. to-1 of entry i of a table, and requests for those of entries that follow, up to
 * `last`. */
static uint64_t read_side(const struct reading *r, const struct kv_side *side, int64_t dim,
                          const uint32_t *table, int64_t i, int64_t last, int64_t head,
                          int64_t from, int64_t to)
{
    const bool gapless = side->token_stride == dim;
    const int64_t step = gapless ? to - from : 1;
    uint64_t word = 0;
    for (int64_t slot = from; slot < to; slot += step) {
        const char *next[N_AHEAD];
        for (int k = 0; k < N_AHEAD; k++)
            next[k] = row_at(r, side, table[i + ahead[k] < last ? i + ahead[k] : last], head, slot);
        word ^= read_lines(row_at(r, side, table[i], head, slot), next, step * dim * r->elem);
    }
    return word;
}

static void read_units(void *ctx, int64_t lo, int64_t hi, int worker)
{
    struct reading *r = ctx;
    uint64_t word = 0;
    (void)worker;
    for (int64_t unit = lo; unit < hi; unit++) {
        const int64_t seq = unit / r->Hkv, head = unit % r->Hkv, b = r->view.block_tokens,
                      n = r->ctx_lens[seq];
        const int64_t first = first_visible(r, seq), last = (n - 1) / b;
        const uint32_t *table = r->block_tables + seq * r->table_stride;
        for (int64_t i = first / b; i * b < n; i++) {
            const int64_t from = first > i * b ? first - i * b : 0,
                          to = n - i * b < b ? n - i * b : b;
            word ^= read_side(r, &r->view.k, r->view.k_dim, table, i, last, head, from, to);
            word ^= read_side(r, &r->view.v, r->view.v_dim, table, i, last, head, from, to);
        }
    }
    r->word ^= word;
}

static tl_status check_sequence(const char *fn, const struct reading *r, int64_t seq,
                                int64_t n_blocks)
{
    const int64_t n = r->ctx_lens[seq], b = r->view.block_tokens;
    if (n < 0 || (n > 0 && (n - 1) / b >= r->table_stride))
        return tl_fail(TL_EINVAL, fn,
                       "sequence %lld: ctx_len = %lld, a table has %lld blocks of %lld",
                       (long long)seq, (long long)n, (long long)r->table_stride, (long long)b);
    for (int64_t i = first_visible(r, seq) / b; i * b < n; i++)
        if (r->block_tables[seq * r->table_stride + i] >= n_blocks)
            return tl_fail(
                TL_EINVAL, fn, "sequence %lld: block_table[%lld] = %lld, the view has %lld blocks",
                (long long)seq, (long long)i, (long long)r->block_tables[seq * r->table_stride + i],
                (long long)n_blocks);
    return TL_OK;
}

tl_status tl_kv_read(const tl_kv_view *view, const uint32_t *block_tables, int64_t table_stride,
                     const int32_t *ctx_lens, int64_t B, int64_t window, tl_pool *tp,
                     uint64_t *word)
{
    static const char fn[] = "tl_kv_read";
    const char *missing = !view           ? "view"
                          : !view->k      ? "view: k"
                          : !view->v      ? "view: v"
                          : !block_tables ? "block_tables"
                          : !ctx_lens     ? "ctx_lens"
                          : !word         ? "word"
                                          : NULL;
    if (missing)
        return tl_fail(TL_EINVAL, fn, "%s is NULL", missing);
    TL_TRY(tl_kv_view_check(fn, view));
    if (B < 0 || table_stride < 1 ||
        !tl_fits_memory(sizeof(uint32_t), 2, (int64_t[]){B, table_stride}))
        return tl_fail(TL_EINVAL, fn, "B = %lld tables of %lld", (long long)B,
                       (long long)table_stride);
    struct reading r = {.view = attn_view_of(view),
                        .block_tables = block_tables,
                        .ctx_lens = ctx_lens,
                        .table_stride = table_stride,
                        .Hkv = view->n_kv_heads,
                        .window = window,
                        .elem = tl_kv_view_elem(view)};
    for (int64_t seq = 0; seq < B; seq++)
        TL_TRY(check_sequence(fn, &r, seq, view->n_blocks));
    TL_TRY(tl_pool_run(fn, tp, B * r.Hkv, 1, read_units, &r));
    *word = r.word;
    return TL_OK;
}
