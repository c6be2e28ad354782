/* SPDX-License-Identifier: MIT */
/* paged_attn.c: one decode step over the block pool. Arguments are checked whole, then the work is
 * cut into units of one KV head of one sequence, whose query heads share a walk over its blocks. */
#include <math.h>
#include <stdbool.h>

#include "kernels/attn_rows.h"
#include "kernels/kernels.h"
#include "kernels/shapes.h"
#include "kernels/sharing.h"
#include "runtime/fail.h"
#include "runtime/fpenv.h"
#include "runtime/pool_run.h"

static const char *const FN = "tl_paged_attn_decode_f32";

int64_t tl_small_step_ns = 50000;

struct step {
    const struct tl_kernels *kernels;
    struct kv_view view;
    const float *q;
    const uint32_t *block_tables;
    int32_t max_blocks;
    const int32_t *ctx_lens;
    float *out;
    int64_t B, H, Hkv, D, window;
    float scale;
    int64_t n_units, longest, total; /* positions seen: by the sequence that sees most, by all */
    int n_classes;
};

enum { MAX_CLASSES = 4, RANGES_PER_THREAD = 4 };

/* The first position a query at the end of n positions sees. */
static int64_t first_visible(int64_t n, int64_t window)
{
    return window > 0 && window < n ? n - window : 0;
}

/* Positions that sequence seq's query sees. */
static int64_t visible(const struct step *s, int64_t seq)
{
    return s->ctx_lens[seq] - first_visible(s->ctx_lens[seq], s->window);
}

/* 0 for lengths above half of the longest, 1 above a quarter, 2 above an eighth, 3 for the rest. */
static int length_class(const struct step *s, int64_t seq)
{
    int c = 0;
    while (c < s->n_classes - 1 && visible(s, seq) <= s->longest >> (c + 1))
        c++;
    return c;
}

static tl_status check_sequence(const struct step *s, int64_t seq, const tl_kv_cfg *cfg)
{
    const int64_t n = s->ctx_lens[seq], b = cfg->block_tokens;
    if (n < 1)
        return tl_fail(TL_EINVAL, FN, "sequence %lld: ctx_len = %lld is below 1", (long long)seq,
                       (long long)n);
    const int64_t needed = (n - 1) / b + 1;
    if (needed > s->max_blocks)
        return tl_fail(TL_EINVAL, FN,
                       "sequence %lld: ctx_len = %lld needs %lld blocks of %lld, max_blocks = %lld",
                       (long long)seq, (long long)n, (long long)needed, (long long)b,
                       (long long)s->max_blocks);
    const uint32_t *table = s->block_tables + seq * s->max_blocks;
    for (int64_t i = first_visible(n, s->window) / b; i < needed; i++)
        if (table[i] >= cfg->n_blocks)
            return tl_fail(
                TL_EINVAL, FN, "sequence %lld: block_table[%lld] = %lld, the pool has %lld blocks",
                (long long)seq, (long long)i, (long long)table[i], (long long)cfg->n_blocks);
    return TL_OK;
}

static tl_status check_pointers(const struct step *s, const tl_kv_pool *kv)
{
    const char *missing = !s->q              ? "q"
                          : !kv              ? "kv"
                          : !s->block_tables ? "block_tables"
                          : !s->ctx_lens     ? "ctx_lens"
                          : !s->out          ? "out"
                                             : NULL;
    return missing ? tl_fail(TL_EINVAL, FN, "%s is NULL", missing) : TL_OK;
}

static tl_status check_sizes(const struct step *s, uint32_t layer, const tl_kv_cfg *cfg)
{
    if (s->B < 0)
        return tl_fail(TL_EINVAL, FN, "B = %lld is negative", (long long)s->B);
    if (s->max_blocks < 1)
        return tl_fail(TL_EINVAL, FN, "max_blocks = %lld is below 1", (long long)s->max_blocks);
    if (layer >= cfg->n_layers)
        return tl_fail(TL_EINVAL, FN, "layer = %lld, the pool has %lld", (long long)layer,
                       (long long)cfg->n_layers);
    if (!tl_fits_memory(sizeof(uint32_t), 2, (int64_t[]){s->B, s->max_blocks}))
        return tl_fail(TL_EINVAL, FN, "B = %lld tables of %lld do not fit in memory",
                       (long long)s->B, (long long)s->max_blocks);
    if (s->Hkv != cfg->n_kv_heads || s->D != cfg->head_dim)
        return tl_fail(TL_ESHAPE, FN, "Hkv = %lld, D = %lld, the pool has %lld, %lld",
                       (long long)s->Hkv, (long long)s->D, (long long)cfg->n_kv_heads,
                       (long long)cfg->head_dim);
    if (s->H < 1 || s->H % s->Hkv != 0)
        return tl_fail(TL_ESHAPE, FN, "H = %lld is not a positive multiple of Hkv = %lld",
                       (long long)s->H, (long long)s->Hkv);
    if (!tl_fits_memory(sizeof(float), 3, (int64_t[]){s->B, s->H, s->D}))
        return tl_fail(TL_EINVAL, FN, "q of [%lld, %lld, %lld] does not fit in memory",
                       (long long)s->B, (long long)s->H, (long long)s->D);
    return TL_OK;
}

static tl_status check_rest(const struct step *s, const tl_kv_cfg *cfg, const tl_pool *tp)
{
    for (int64_t seq = 0; seq < s->B; seq++)
        TL_TRY(check_sequence(s, seq, cfg));
    const size_t bytes = (size_t)(s->B * s->H * s->D) * sizeof(float);
    if (tl_overlap(s->q, bytes, s->out, bytes))
        return tl_fail(TL_EINVAL, FN, "out overlaps q");
    return tl_pool_check(FN, tp);
}

static struct attn_path path_of(const struct step *s, int64_t unit)
{
    const int64_t seq = unit / s->Hkv, n = s->ctx_lens[seq];
    return (struct attn_path){s->block_tables + seq * s->max_blocks, unit % s->Hkv,
                              first_visible(n, s->window), n};
}

/* One KV head of one sequence: its group of query heads, as many at a time as a job takes. */
static void attend_group(const struct step *s, int64_t unit, const struct attn_path *next,
                         struct attn_work *work)
{
    const int64_t group = s->H / s->Hkv, first_row = unit * group;
    const struct attn_path path = path_of(s, unit);
    struct attn_row row[ATTN_ROWS];
    struct attn_job job = {.view = &s->view,
                           .block_table = path.block_table,
                           .kv_head = path.kv_head,
                           .scale = s->scale,
                           .work = work,
                           .row = row};
    const int max_rows = attn_max_rows(s->D, s->D);
    for (int64_t g = 0; g < group; g += job.n_rows) {
        job.n_rows = (int)(group - g < max_rows ? group - g : max_rows);
        job.next = g + job.n_rows < group ? &path : next;
        for (int r = 0; r < job.n_rows; r++) {
            const int64_t at = (first_row + g + r) * s->D;
            row[r] = (struct attn_row){.q = s->q + at,
                                       .out = s->out + at,
                                       .sink = -INFINITY,
                                       .lo = path.lo,
                                       .hi = path.hi};
        }
        s->kernels->attn_rows(&job);
    }
}

/* Units are numbered once for each class of lengths, so that no long sequence is begun last. */
static void attend_units(void *ctx, int64_t lo, int64_t hi, int worker)
{
    const struct step *s = ctx;
    struct attn_work work;
    (void)worker;
    for (int64_t i = lo; i < hi; i++) {
        const int64_t unit = i % s->n_units;
        if (s->n_classes > 1 && length_class(s, unit / s->Hkv) != i / s->n_units)
            continue;
        const bool has_next = i + 1 < hi && unit + 1 < s->n_units;
        const struct attn_path next = path_of(s, has_next ? unit + 1 : unit);
        attend_group(s, unit, has_next ? &next : NULL, &work);
    }
}

static void measure_lengths(struct step *s)
{
    int64_t shortest = INT64_MAX;
    for (int64_t seq = 0; seq < s->B; seq++) {
        const int64_t n = visible(s, seq);
        s->longest = n > s->longest ? n : s->longest;
        shortest = n < shortest ? n : shortest;
        s->total += n;
    }
    for (s->n_classes = 1; s->n_classes < MAX_CLASSES && shortest <= s->longest >> s->n_classes;)
        s->n_classes++;
}

/* What stays on the caller is one range: every unit then knows the next one and fetches it
 * early. */
static tl_status run(struct step *s, tl_pool *tp)
{
    const int threads = tl_pool_threads(tp);
    int64_t grain = s->n_units = s->B * s->Hkv;
    s->n_classes = 1;
    if (threads > 1) {
        measure_lengths(s);
        if (tl_worth_sharing((double)s->total * (double)s->D, (double)s->Hkv, (double)s->H))
            grain = s->n_classes > 1 ? 1 : s->n_units / (RANGES_PER_THREAD * threads);
        else
            s->n_classes = 1;
    }
    return tl_pool_run(FN, tp, s->n_units * s->n_classes, grain > 1 ? grain : 1, attend_units, s);
}

tl_status tl_paged_attn_decode_f32(const float *q, const tl_kv_pool *kv, uint32_t layer,
                                   const uint32_t *block_tables, int32_t max_blocks,
                                   const int32_t *ctx_lens, float *out, int64_t B, int64_t H,
                                   int64_t Hkv, int64_t D, float scale, int64_t window, tl_pool *tp)
{
    struct step s = {.q = q,
                     .block_tables = block_tables,
                     .max_blocks = max_blocks,
                     .ctx_lens = ctx_lens,
                     .out = out,
                     .B = B,
                     .H = H,
                     .Hkv = Hkv,
                     .D = D,
                     .window = window,
                     .scale = scale};
    tl_kv_cfg cfg;
    TL_TRY(check_pointers(&s, kv));
    tl_kv_pool_cfg(kv, &cfg);
    TL_TRY(check_sizes(&s, layer, &cfg));
    if (cfg.format != TL_KV_FORMAT_V1 || cfg.dtype != TL_F16)
        return tl_fail(TL_EUNSUPPORTED, FN, "pool format %lld with dtype %lld",
                       (long long)cfg.format, (long long)cfg.dtype);
    TL_TRY(tl_kernels_require(FN, &s.kernels));
    TL_TRY(check_rest(&s, &cfg, tp));
    tl_kv_view view;
    TL_TRY(tl_kv_pool_view(kv, layer, &view));
    s.view = attn_view_of(&view);
    const tl_fpenv caller = tl_fpenv_enter();
    const tl_status status = run(&s, tp);
    tl_fpenv_leave(caller);
    return status;
}
