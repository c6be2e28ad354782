/* SPDX-License-Identifier: MIT */
/* flash_attn.c: prefill over contiguous K and V. Each KV head of a batch entry is a view of one
 * long block; its query rows, the heads of the group at one position after another, are cut into
 * jobs of neighbours, which see nearly the same keys. */
#include <math.h>
#include <stdbool.h>

#include "kernels/attn_rows.h"
#include "kernels/kernels.h"
#include "kernels/shapes.h"
#include "kernels/sharing.h"
#include "runtime/fail.h"
#include "runtime/fpenv.h"
#include "runtime/pool_run.h"

static const char *const FN = "tl_flash_attn_fwd_f32";

struct prefill {
    const struct tl_kernels *kernels;
    const float *q, *k, *v, *sink_logits;
    float *o, *lse;
    int64_t B, H, Hkv, Tq, Tk, D, q_offset, window, Br, Bc;
    float scale;
    int causal;
    struct attn_work *work; /* one for each worker */
    int64_t jobs_per_head;
};

static tl_status check_dims(const struct prefill *f)
{
    if (f->B < 0 || f->H < 0 || f->Hkv < 0 || f->Tq < 0 || f->Tk < 0 || f->D < 0)
        return tl_fail(
            TL_EINVAL, FN,
            "B = %lld, H = %lld, Hkv = %lld, Tq = %lld, Tk = %lld, D = %lld: none may be negative",
            (long long)f->B, (long long)f->H, (long long)f->Hkv, (long long)f->Tq, (long long)f->Tk,
            (long long)f->D);
    if (f->H > 0 && f->Hkv < 1)
        return tl_fail(TL_EINVAL, FN, "Hkv = %lld with H = %lld", (long long)f->Hkv,
                       (long long)f->H);
    if (f->q_offset < 0 || f->q_offset > INT64_MAX - f->Tq)
        return tl_fail(TL_EINVAL, FN, "q_offset = %lld with Tq = %lld", (long long)f->q_offset,
                       (long long)f->Tq);
    if (f->Br < 0 || f->Bc < 0)
        return tl_fail(TL_EINVAL, FN, "Br = %lld, Bc = %lld: neither may be negative",
                       (long long)f->Br, (long long)f->Bc);
    if (!tl_fits_memory(sizeof(float), 4, (int64_t[]){f->B, f->H, f->Tq, f->D}) ||
        !tl_fits_memory(sizeof(float), 3, (int64_t[]){f->B, f->H, f->Tq}) ||
        !tl_fits_memory(sizeof(float), 4, (int64_t[]){f->B, f->Hkv, f->Tk, f->D}))
        return tl_fail(
            TL_EINVAL, FN,
            "B = %lld, H = %lld, Hkv = %lld, Tq = %lld, Tk = %lld, D = %lld do not fit in memory",
            (long long)f->B, (long long)f->H, (long long)f->Hkv, (long long)f->Tq, (long long)f->Tk,
            (long long)f->D);
    return TL_OK;
}

static tl_status check_tensors(const struct prefill *f)
{
    if (f->B == 0 || f->H == 0 || f->Tq == 0 || f->D == 0)
        return TL_OK;
    const char *missing = !f->q                ? "q"
                          : !f->o              ? "o"
                          : f->Tk > 0 && !f->k ? "k"
                          : f->Tk > 0 && !f->v ? "v"
                                               : NULL;
    if (missing)
        return tl_fail(TL_EINVAL, FN, "%s is NULL", missing);
    return TL_OK;
}

static tl_status check_overlap(const struct prefill *f)
{
    const size_t rows = (size_t)(f->B * f->H * f->Tq),
                 q_bytes = rows * (size_t)f->D * sizeof(float), lse_bytes = rows * sizeof(float);
    const size_t kv_bytes = (size_t)(f->B * f->Hkv * f->Tk * f->D) * sizeof(float);
    const struct {
        const char *name;
        const void *at;
        size_t bytes;
    } input[] = {{"q", f->q, q_bytes},
                 {"k", f->k, kv_bytes},
                 {"v", f->v, kv_bytes},
                 {"sink_logits", f->sink_logits, (size_t)f->H * sizeof(float)},
                 {"lse", f->lse, lse_bytes}};
    for (int i = 0; i < 5; i++)
        if (tl_overlap(f->o, q_bytes, input[i].at, input[i].bytes))
            return tl_fail(TL_EINVAL, FN, "o overlaps %s", input[i].name);
    for (int i = 0; i < 4; i++)
        if (tl_overlap(f->lse, lse_bytes, input[i].at, input[i].bytes))
            return tl_fail(TL_EINVAL, FN, "lse overlaps %s", input[i].name);
    return TL_OK;
}

static tl_status check(const struct prefill *f)
{
    TL_TRY(check_dims(f));
    TL_TRY(check_tensors(f));
    if (f->B > 0 && f->H > 0 && f->Tq > 0)
        TL_TRY(check_overlap(f));
    if (f->H > 0 && (f->Hkv > f->H || f->H % f->Hkv != 0))
        return tl_fail(TL_ESHAPE, FN, "H = %lld is not a multiple of Hkv = %lld", (long long)f->H,
                       (long long)f->Hkv);
    return TL_OK;
}

/* The keys lo .. hi-1 that the row at position p sees. */
static void see(const struct prefill *f, int64_t p, struct attn_row *row)
{
    row->lo = f->window > 0 && f->window <= p ? p - f->window + 1 : 0;
    row->hi = f->causal && p < f->Tk ? p + 1 : f->Tk;
}

/* Row number i of a (batch, KV head): position i / group, head i % group within the group. */
static struct attn_row row_of(const struct prefill *f, int64_t batch, int64_t kv_head, int64_t i)
{
    const int64_t group = f->H / f->Hkv, head = kv_head * group + i % group, pos = i / group;
    const int64_t at = (batch * f->H + head) * f->Tq + pos;
    struct attn_row row = {.sink = f->sink_logits ? f->sink_logits[head] : -INFINITY,
                           .lse = f->lse ? f->lse + at : NULL};
    static float nothing;
    row.q = f->D ? f->q + at * f->D : &nothing;
    row.out = f->D ? f->o + at * f->D : &nothing;
    see(f, f->q_offset + pos, &row);
    return row;
}

static void attend_rows(const struct prefill *f, int64_t batch, int64_t kv_head, int64_t first,
                        struct attn_work *work)
{
    static const uint32_t only_block = 0;
    static const float nothing;
    const int64_t n_rows = f->H / f->Hkv * f->Tq, head = batch * f->Hkv + kv_head,
                  max_rows = attn_max_rows(f->D, f->D);
    const int64_t at = head * f->Tk * f->D;
    const bool there = f->Tk > 0 && f->D > 0;
    const struct kv_view view = {.k = {there ? f->k + at : &nothing, 0, 0, f->D},
                                 .v = {there ? f->v + at : &nothing, 0, 0, f->D},
                                 .dtype = TL_F32,
                                 .block_tokens = f->Tk,
                                 .k_dim = f->D,
                                 .v_dim = f->D};
    struct attn_row row[ATTN_ROWS];
    struct attn_job job = {.view = &view,
                           .block_table = &only_block,
                           .kv_head = 0,
                           .scale = f->scale,
                           .work = work,
                           .row = row};
    job.n_rows = (int)(n_rows - first < max_rows ? n_rows - first : max_rows);
    for (int r = 0; r < job.n_rows; r++)
        row[r] = row_of(f, batch, kv_head, first + r);
    f->kernels->attn_rows(&job);
}

static void attend_jobs(void *ctx, int64_t lo, int64_t hi, int worker)
{
    const struct prefill *f = ctx;
    for (int64_t i = lo; i < hi; i++) {
        const int64_t head = i / f->jobs_per_head,
                      first = i % f->jobs_per_head * attn_max_rows(f->D, f->D);
        attend_rows(f, head / f->Hkv, head % f->Hkv, first, f->work + worker);
    }
}

static tl_status run(struct prefill *f, tl_arena *scratch, tl_pool *tp)
{
    f->work = tl_arena_alloc(scratch, (size_t)tl_pool_threads(tp) * sizeof *f->work,
                             _Alignof(struct attn_work));
    if (!f->work)
        return tl_fail(TL_ENOMEM, FN, "scratch cannot grow by %zu bytes",
                       (size_t)tl_pool_threads(tp) * sizeof *f->work);
    f->jobs_per_head = (f->H / f->Hkv * f->Tq - 1) / attn_max_rows(f->D, f->D) + 1;
    const tl_fpenv caller = tl_fpenv_enter();
    const int64_t n_jobs = f->B * f->Hkv * f->jobs_per_head;
    const bool shared = tl_worth_sharing(
        (double)f->B * (double)f->Tq * (double)f->Tk * (double)f->D, 0, (double)f->H);
    const tl_status status = tl_pool_run(FN, tp, n_jobs, shared ? 1 : n_jobs, attend_jobs, f);
    tl_fpenv_leave(caller);
    return status;
}

static tl_status run_in_own_arena(struct prefill *f, tl_pool *tp)
{
    tl_arena *arena;
    if (tl_arena_create(0, &arena) != TL_OK)
        return tl_fail(TL_ENOMEM, FN, "no memory for scratch");
    const tl_status status = run(f, arena, tp);
    tl_arena_destroy(arena);
    return status;
}

tl_status tl_flash_attn_fwd_f32(const float *q, const float *k, const float *v, float *o,
                                float *lse, int64_t B, int64_t H, int64_t Hkv, int64_t Tq,
                                int64_t Tk, int64_t D, float scale, int64_t q_offset, int causal,
                                int64_t window, const float *sink_logits, int64_t Br, int64_t Bc,
                                tl_arena *scratch, tl_pool *tp)
{
    struct prefill f = {.q = q,
                        .k = k,
                        .v = v,
                        .o = o,
                        .lse = lse,
                        .B = B,
                        .H = H,
                        .Hkv = Hkv,
                        .Tq = Tq,
                        .Tk = Tk,
                        .D = D,
                        .scale = scale,
                        .q_offset = q_offset,
                        .causal = causal,
                        .window = window,
                        .sink_logits = sink_logits,
                        .Br = Br,
                        .Bc = Bc};
    TL_TRY(check(&f));
    TL_TRY(tl_kernels_require(FN, &f.kernels));
    TL_TRY(tl_pool_check(FN, tp));
    if (B == 0 || H == 0 || Tq == 0)
        return TL_OK;
    if (!scratch)
        return run_in_own_arena(&f, tp);
    const tl_arena_mark mark = tl_arena_mark_get(scratch);
    const tl_status status = run(&f, scratch, tp);
    tl_arena_reset_to(scratch, mark);
    return status;
}
