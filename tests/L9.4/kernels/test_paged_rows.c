/* SPDX-License-Identifier: MIT */
/* test_paged_rows.c: attention of any rows over a view of paged memory: every row has the bits of
 * plain decode at its position, whatever the call, the memory and the machine; options are close to
 * double and in their order; what is refused. And the view of a pool.
 *
 * Words. case (struct rows): one call with a memory of its own, where everything that no row sees
 * is poison, every entry that holds nothing visible is garbage, every array ends at an unmapped
 * page, and out is painted between its rows.
 * dense: the same values as f32 [Hkv][ctx][width] for each sequence, NaN where no row sees them;
 * what is expected comes from there. */
#include <fenv.h>
#include <float.h>
#include <stddef.h>

#include "attn_ref.h"
#include "hook.h"

#define ROWS "tl_paged_attn_f32"
#define MAX_B 16

/* ---- a case ---- */

enum layout {
    HEADS_FIRST,     /* [blocks, Hkv, b, D] */
    TOKENS_FIRST,    /* [blocks, b, Hkv, D] */
    SIDE_BY_SIDE,    /* [blocks, Hkv, 2, b, D]: V rows behind the K rows of their head */
    DENSE,           /* [B, Hkv, T, D]: a block for each sequence */
    HEADS_OUTERMOST, /* [Hkv, blocks, b, D] */
    SLOTS_OUTERMOST, /* [b, blocks, Hkv, D] */
    SHARED,          /* HEADS_FIRST, and V is the first columns of K */
    N_LAYOUTS,
    POOL = N_LAYOUTS /* the view of a tl_kv_pool; Dk and Dv are one */
};
static const char *const layout_names[] = {
    "heads first",     "tokens first",    "side by side", "dense",
    "heads outermost", "slots outermost", "shared",       "pool"};

enum strides {
    PACKED,     /* [total_q, H, D] */
    TRANSPOSED, /* [H, total_q, D], seen as [total_q, H, D] */
    GAPPED,     /* PACKED with poison or paint behind every head and every token */
    N_STRIDES
};

struct rows_spec {
    int64_t B, H, Hkv, Dk, Dv, block_tokens, window; /* Dv 0: Dk */
    int64_t q_len[MAX_B], ctx[MAX_B];
    enum layout layout;
    int32_t dtype;
    int64_t gap; /* elements of poison behind every token, head and block */
    enum strides strides;
    enum data data;
    bool wide;     /* values that only f32 (or bf16) holds: not to be compared with decode */
    bool one_each; /* no cu_seqlens_q; q_len is 1 */
    bool snug;     /* no block that no sequence has */
    float softcap;
    bool alibi, sinks;
    bool scale_given;
    float scale;
    uint64_t seed;
};

struct rows {
    struct rows_spec spec;
    int64_t total, longest, n_blocks;
    tl_kv_pool *pool; /* POOL only */
    tl_kv_view *view;
    void *k_memory, *v_memory; /* one and the same where K and V lie in one piece */
    size_t k_bytes, v_bytes;
    float *k[MAX_B], *v[MAX_B]; /* dense */
    int32_t *cu, *ctx;
    uint32_t *tables;
    int64_t table_stride;
    float *q, *out, *lse;
    int64_t q_span, out_span;
    float *slopes, *sink_logits;
    tl_paged_attn_args *args;
};

static int64_t dim_v(const struct rows_spec *s)
{
    return s->Dv ? s->Dv : s->Dk;
}

static int64_t rows_in(const struct rows *r, int64_t s)
{
    return r->cu[s + 1] - r->cu[s];
}

/* Where row i of sequence s stands. */
static int64_t position(const struct rows *r, int64_t s, int64_t i)
{
    return r->ctx[s] - rows_in(r, s) + i;
}

/* The first position that any row of the sequence sees; its context length where it has no row. */
static int64_t first_needed(const struct rows *r, int64_t s)
{
    return rows_in(r, s) ? ref_first_seen(position(r, s, 0), r->spec.window) : r->ctx[s];
}

static const char *describe(const struct rows *r)
{
    static const char *const strides[] = {"packed", "transposed", "gapped"};
    static char text[512];
    const struct rows_spec *s = &r->spec;
    snprintf(text, sizeof text,
             "%s, %d threads; B %lld, H %lld, Hkv %lld, Dk %lld, Dv %lld, b %lld, window %lld, %s, "
             "dtype %d, gap %lld, q %s, data %d, "
             "softcap %g, alibi %d, sinks %d, q_len %lld %lld.., ctx %lld %lld.., seed %llu",
             tl_isa_name(), tl_pool_threads(r->args->tp), (long long)s->B, (long long)s->H,
             (long long)s->Hkv, (long long)s->Dk, (long long)dim_v(s), (long long)s->block_tokens,
             (long long)s->window, layout_names[s->layout], s->dtype, (long long)s->gap,
             strides[s->strides], (int)s->data, (double)s->softcap, s->alibi, s->sinks,
             (long long)s->q_len[0], (long long)s->q_len[1], (long long)s->ctx[0],
             (long long)s->ctx[1], (unsigned long long)s->seed);
    return text;
}

/* ---- its memory ---- */

struct axes {
    int64_t block, head, token;
};

static struct axes axes_of(const struct rows *r, int64_t D)
{
    const int64_t g = r->spec.gap, b = r->view->block_tokens, Hkv = r->spec.Hkv, n = r->n_blocks;
    struct axes x = {0};
    switch (r->spec.layout) {
    case TOKENS_FIRST:
        x.head = D + g, x.token = Hkv * x.head + g, x.block = b * x.token + g;
        break;
    case HEADS_OUTERMOST:
        x.token = D + g, x.block = b * x.token + g, x.head = n * x.block + g;
        break;
    case SLOTS_OUTERMOST:
        x.head = D + g, x.block = Hkv * x.head + g, x.token = n * x.block + g;
        break;
    default:
        x.token = D + g, x.head = b * x.token + g, x.block = Hkv * x.head + g;
    }
    return x;
}

static int64_t element(const tl_kv_view *view, int is_v, int64_t block, int64_t head, int64_t slot)
{
    return is_v ? block * view->v_block_stride + head * view->v_head_stride +
                      slot * view->v_token_stride
                : block * view->k_block_stride + head * view->k_head_stride +
                      slot * view->k_token_stride;
}

/* Elements from the first to the last one of K or V. */
static int64_t view_span(const tl_kv_view *view, int is_v)
{
    return element(view, is_v, view->n_blocks - 1, view->n_kv_heads - 1, view->block_tokens - 1) +
           (is_v ? view->head_dim_v : view->head_dim_k);
}

static void make_pool_view(struct rows *r)
{
    const struct rows_spec *s = &r->spec;
    const tl_kv_cfg cfg = kv_cfg(r->n_blocks, s->block_tokens, 2, s->Hkv, s->Dk);
    uint32_t *ids = must_alloc(cfg.n_blocks * sizeof *ids);
    r->pool = make_pool(&cfg);
    CHECK_STATUS(tl_kv_alloc(r->pool, cfg.n_blocks, ids), TL_OK);
    poison_pool(r->pool, &cfg);
    CHECK_STATUS(tl_kv_pool_view(r->pool, 1, r->view), TL_OK);
    free(ids);
}

static void make_view(struct rows *r)
{
    const struct rows_spec *s = &r->spec;
    const bool shared = s->layout == SHARED, beside = s->layout == SIDE_BY_SIDE;
    *r->view =
        (tl_kv_view){.size = sizeof(tl_kv_view),
                        .dtype = s->dtype,
                     .n_blocks = r->n_blocks,
                     .n_kv_heads = s->Hkv,
                     .head_dim_k = s->Dk,
                     .head_dim_v = dim_v(s),
                     .block_tokens = s->layout == DENSE ? max64(r->longest, 1) : s->block_tokens};
    struct axes k = axes_of(r, s->Dk), v = shared ? k : axes_of(r, dim_v(s));
    const int64_t behind = beside ? r->view->block_tokens * k.token : 0; /* V behind K */
    if (beside)
        k.head = v.head = behind + r->view->block_tokens * v.token + s->gap,
        k.block = v.block = s->Hkv * k.head + s->gap;
    r->view->k_block_stride = k.block, r->view->k_head_stride = k.head,
    r->view->k_token_stride = k.token;
    r->view->v_block_stride = v.block, r->view->v_head_stride = v.head,
    r->view->v_token_stride = v.token;
    r->k_bytes = (size_t)(beside ? behind + view_span(r->view, 1) : view_span(r->view, 0)) *
                 dtype_bytes(s->dtype);
    r->k_memory = guarded(r->k_bytes);
    poison_memory(r->k_memory, r->k_bytes, s->dtype);
    r->v_memory = r->k_memory, r->v_bytes = 0;
    if (!shared && !beside) {
        r->v_bytes = (size_t)view_span(r->view, 1) * dtype_bytes(s->dtype);
        r->v_memory = guarded(r->v_bytes);
        poison_memory(r->v_memory, r->v_bytes, s->dtype);
    }
    r->view->k = r->k_memory,
    r->view->v = (char *)r->v_memory + (size_t)behind * dtype_bytes(s->dtype);
}

/* ---- its values ---- */

/* f32 with all 24 bits of fraction, or the eight of bf16; now and then beyond f16, large in V and
 * subnormal in K. */
static float wide_value(int32_t dtype, uint64_t *rng, bool is_v)
{
    const int exponent = (int)rng_below(rng, 9) - (is_v ? 2 : 7);
    const float fraction =
        dtype == TL_BF16 ? (float)(rng_below(rng, 512) - 256) / 256 : rng_unit(rng);
    const int64_t k = rng_below(rng, 64);
    if (rng_below(rng, 37) == 0)
        return is_v ? ldexpf(1 + 0.5f * (float)(k % 2), 17 + (int)k) : 0x1p-133f * (float)k;
    return ldexpf(fraction, exponent);
}

static float element_value(const struct rows_spec *s, uint64_t *rng, int64_t j, bool is_v)
{
    if (s->wide)
        return wide_value(s->dtype, rng, is_v);
    const uint16_t code = value_code(s->data, rng, j, is_v);
    /* eight bits of mantissa are in both */
    return ref_widen(s->dtype == TL_BF16 ? code & 0xFFF8 : code);
}

/* Writes positions first .. ctx-1 of a sequence into dense and into the view. */
static void write_positions(struct rows *r, int64_t s, int64_t first, uint64_t *rng)
{
    const int64_t T = r->ctx[s], b = r->view->block_tokens;
    for (int64_t j = first; j < T; j++)
        for (int64_t head = 0; head < r->spec.Hkv; head++)
            for (int is_v = 0; is_v < 2; is_v++) {
                const int64_t D = is_v ? dim_v(&r->spec) : r->spec.Dk;
                const int64_t at =
                    element(r->view, is_v, r->tables[s * r->table_stride + j / b], head, j % b);
                float *row = (is_v ? r->v[s] : r->k[s]) + (head * T + j) * D;
                for (int64_t d = 0; d < D; d++) {
                    const bool same = is_v && r->spec.layout == SHARED;
                    row[d] = same ? r->k[s][(head * T + j) * r->spec.Dk + d]
                                  : element_value(&r->spec, rng, j, is_v);
                    put_value((void *)(uintptr_t)(is_v ? r->view->v : r->view->k), r->view->dtype,
                              at + d, row[d]);
                }
            }
}

static float *nans(int64_t n)
{
    float *x = floats(n);
    for (int64_t i = 0; i < n; i++)
        x[i] = NAN;
    return x;
}

static void make_sequences(struct rows *r, uint64_t *rng)
{
    const struct rows_spec *s = &r->spec;
    uint32_t *ids = shuffled_ids((uint32_t)r->n_blocks, rng);
    int64_t taken = 0;
    r->tables = guarded((size_t)(s->B * r->table_stride) * sizeof *r->tables);
    for (int64_t i = 0; i < s->B * r->table_stride; i++)
        r->tables[i] = garbage_id(i, (uint32_t)r->n_blocks);
    for (int64_t seq = 0; seq < s->B; seq++) {
        const int64_t T = r->ctx[seq], first = first_needed(r, seq), b = r->view->block_tokens;
        r->k[seq] = nans(s->Hkv * T * s->Dk), r->v[seq] = nans(s->Hkv * T * dim_v(s));
        for (int64_t i = first / b; first < T && i < blocks_of(T, b); i++)
            r->tables[seq * r->table_stride + i] = ids[taken++];
        write_positions(r, seq, first, rng);
    }
    free(ids);
}

/* ---- its rows ---- */

static void set_strides(const struct rows *r, int64_t D, int64_t *token, int64_t *head,
                        int64_t *span)
{
    const int64_t gap = r->spec.strides == GAPPED ? 3 : 0;
    *head = r->spec.strides == TRANSPOSED ? max64(r->total, 1) * D : D + gap;
    *token = r->spec.strides == TRANSPOSED ? D : r->spec.H * *head + 2 * gap;
    *span = r->total ? (r->total - 1) * *token + (r->spec.H - 1) * *head + D : 0;
}

static const float *q_row(const struct rows *r, int64_t row, int64_t h)
{
    return r->q + row * r->args->q_token_stride + h * r->args->q_head_stride;
}

static void make_rows(struct rows *r, uint64_t *rng)
{
    const struct rows_spec *s = &r->spec;
    tl_paged_attn_args *a = r->args;
    set_strides(r, s->Dk, &a->q_token_stride, &a->q_head_stride, &r->q_span);
    set_strides(r, dim_v(s), &a->out_token_stride, &a->out_head_stride, &r->out_span);
    a->q = r->q = guarded((size_t)r->q_span * sizeof *r->q);
    for (int64_t i = 0; i < r->q_span; i++)
        r->q[i] = NAN;
    for (int64_t row = 0; row < r->total; row++)
        for (int64_t h = 0; h < s->H; h++)
            for (int64_t d = 0; d < s->Dk; d++)
                r->q[row * a->q_token_stride + h * a->q_head_stride + d] = value_q(s->data, rng);
    a->out = r->out = painted(r->out_span);
    a->lse = r->lse = painted(r->total * s->H);
}

static void make_options(struct rows *r, uint64_t *rng)
{
    const struct rows_spec *s = &r->spec;
    r->slopes = guarded((size_t)s->H * sizeof *r->slopes),
    r->sink_logits = guarded((size_t)s->H * sizeof *r->sink_logits);
    for (int64_t h = 0; h < s->H; h++) {
        r->slopes[h] = ldexpf(1 + 0.3f * rng_unit(rng), -(int)(h % 6));
        r->sink_logits[h] = h % 5 == 4 ? -INFINITY : 3 * rng_unit(rng);
    }
    r->args->alibi_slopes = s->alibi ? r->slopes : NULL;
    r->args->sink_logits = s->sinks ? r->sink_logits : NULL;
    r->args->logits_softcap = s->softcap;
}

static struct rows rows_make(const struct rows_spec *spec)
{
    uint64_t rng = spec->seed * 0x9E3779B97F4A7C15u + 7;
    struct rows r = {.spec = *spec, .n_blocks = spec->snug ? 0 : 3};
    r.args = guarded(sizeof *r.args), r.view = guarded(sizeof *r.view);
    r.view->size = sizeof *r.view;
    *r.args = (tl_paged_attn_args){.size = sizeof *r.args};
    r.cu = guarded((size_t)(spec->B + 1) * sizeof *r.cu),
    r.ctx = guarded((size_t)spec->B * sizeof *r.ctx);
    r.cu[0] = 0;
    for (int64_t s = 0; s < spec->B; s++) {
        r.total += spec->one_each ? 1 : spec->q_len[s];
        r.cu[s + 1] = (int32_t)r.total, r.ctx[s] = (int32_t)spec->ctx[s];
        r.longest = max64(r.longest, spec->ctx[s]);
        r.n_blocks += spec->layout == DENSE ? 1 : blocks_of(spec->ctx[s], spec->block_tokens);
    }
    if (spec->layout == POOL)
        make_pool_view(&r);
    else
        make_view(&r);
    r.table_stride = max64(blocks_of(r.longest, r.view->block_tokens), 1) + rng_below(&rng, 4);
    make_sequences(&r, &rng);
    make_rows(&r, &rng);
    make_options(&r, &rng);
    r.args->view = r.view, r.args->B = spec->B, r.args->H = spec->H;
    r.args->cu_seqlens_q = spec->one_each ? NULL : r.cu, r.args->ctx_lens = r.ctx;
    r.args->block_tables = r.tables, r.args->table_stride = r.table_stride;
    r.args->window = spec->window;
    r.args->scale = spec->scale_given ? spec->scale : 1 / sqrtf((float)spec->Dk);
    return r;
}

static void rows_free(struct rows *r)
{
    tl_kv_pool_destroy(r->pool);
    if (!r->pool)
        guarded_free(r->k_memory, r->k_bytes);
    if (r->v_bytes)
        guarded_free(r->v_memory, r->v_bytes);
    for (int64_t s = 0; s < r->spec.B; s++)
        free(r->k[s]), free(r->v[s]);
    guarded_free(r->cu, (size_t)(r->spec.B + 1) * sizeof *r->cu);
    guarded_free(r->ctx, (size_t)r->spec.B * sizeof *r->ctx);
    guarded_free(r->tables, (size_t)(r->spec.B * r->table_stride) * sizeof *r->tables);
    guarded_free(r->q, (size_t)r->q_span * sizeof *r->q);
    painted_free(r->out, r->out_span);
    painted_free(r->lse, r->total * r->spec.H);
    guarded_free(r->slopes, (size_t)r->spec.H * sizeof *r->slopes);
    guarded_free(r->sink_logits, (size_t)r->spec.H * sizeof *r->sink_logits);
    guarded_free(r->args, sizeof *r->args), guarded_free(r->view, sizeof *r->view);
}

/* ---- what it must give ---- */

/* out as [total_q,H,Dv] and lse as [total_q,H]; made once, freed by wanted_free. */
struct wanted {
    float *out, *lse;
    bool lse_bits; /* lse is exact; else m and L tell what it is close to */
    float *m, *L;
};

static void wanted_free(struct wanted *w)
{
    free(w->out), free(w->lse), free(w->m), free(w->L);
}

/* Rows of n elements, `from` wide, into rows `to` wide: zeros or nothing behind. */
static void copy_rows(const float *from, int64_t from_width, float *to, int64_t to_width, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        memcpy(to + i * to_width, from + i * from_width,
               (size_t)min64(from_width, to_width) * sizeof *to);
}

/* The sequences in a pool of f16, a block for each, as wide as the wider of K and V: the zeros
 * behind a row of K and q add nothing to a dot, and each column of V is summed for itself. */
static tl_kv_pool *truth_pool(const struct rows *r, int64_t width)
{
    const tl_kv_cfg cfg = kv_cfg(r->spec.B, max64(r->longest, 1), 1, r->spec.Hkv, width);
    tl_kv_pool *kv = make_pool(&cfg);
    uint32_t *ids = must_alloc(cfg.n_blocks * sizeof *ids);
    CHECK_STATUS(tl_kv_alloc(kv, cfg.n_blocks, ids), TL_OK);
    poison_pool(kv, &cfg);
    free(ids);
    for (int64_t s = 0; s < r->spec.B; s++)
        for (int64_t at = 0; at < r->spec.Hkv * r->ctx[s]; at++)
            for (int is_v = 0; is_v < 2; is_v++) {
                const int64_t T = r->ctx[s], D = is_v ? dim_v(&r->spec) : r->spec.Dk;
                uint16_t *row = slot_row(kv, &cfg, (uint32_t)s, 0, is_v, at / T, at % T);
                for (int64_t d = 0; at % T >= first_needed(r, s) && d < width; d++)
                    put_value(row, TL_F16, d, d < D ? (is_v ? r->v[s] : r->k[s])[at * D + d] : 0);
            }
    return kv;
}

/* Each row by plain decode, all of them in one step. */
static void want_by_decode(const struct rows *r, int64_t width, float *out)
{
    tl_kv_pool *kv = truth_pool(r, width);
    uint32_t *tables = must_alloc((size_t)r->total * sizeof *tables);
    int32_t *ctx = must_alloc((size_t)r->total * sizeof *ctx);
    float *q = floats(r->total * r->spec.H * width), *wide = floats(r->total * r->spec.H * width);
    for (int64_t s = 0; s < r->spec.B; s++)
        for (int64_t i = 0; i < rows_in(r, s); i++) {
            const int64_t row = r->cu[s] + i;
            tables[row] = (uint32_t)s, ctx[row] = (int32_t)position(r, s, i) + 1;
            for (int64_t h = 0; h < r->spec.H; h++)
                copy_rows(q_row(r, row, h), r->spec.Dk, q + (row * r->spec.H + h) * width, width,
                          1);
        }
    CHECK_STATUS(tl_paged_attn_decode_f32(q, kv, 0, tables, 1, ctx, wide, r->total, r->spec.H,
                                          r->spec.Hkv, width, r->args->scale, r->spec.window, NULL),
                 TL_OK);
    copy_rows(wide, width, out, dim_v(&r->spec), r->total * r->spec.H);
    free(tables), free(ctx), free(q), free(wide);
    tl_kv_pool_destroy(kv);
}

/* lse by prefill of each sequence, whose rows must be those of decode. */
static void want_by_prefill(const struct rows *r, int64_t width, const float *out, float *lse)
{
    const struct rows_spec *spec = &r->spec;
    for (int64_t s = 0; s < spec->B; s++) {
        const int64_t n = rows_in(r, s), T = r->ctx[s], H = spec->H;
        float *q = floats(H * n * width), *k = floats(spec->Hkv * T * width),
              *v = floats(spec->Hkv * T * width);
        float *o = floats(H * n * width), *L = floats(H * n);
        copy_rows(r->k[s], spec->Dk, k, width, spec->Hkv * T);
        copy_rows(r->v[s], dim_v(spec), v, width, spec->Hkv * T);
        for (int64_t h = 0; h < H; h++)
            for (int64_t i = 0; i < n; i++)
                copy_rows(q_row(r, r->cu[s] + i, h), spec->Dk, q + (h * n + i) * width, width, 1);
        const struct flash f = {.q = q,
                                .k = k,
                                .v = v,
                                .o = o,
                                .lse = L,
                                .B = 1,
                                .H = H,
                                .Hkv = spec->Hkv,
                                .Tq = n,
                                .Tk = T,
                                .D = width,
                                .scale = r->args->scale,
                                .q_offset = T - n,
                                .causal = 1,
                                .window = spec->window};
        CHECK_STATUS(flash_call(&f), TL_OK);
        for (int64_t h = 0; h < H; h++)
            for (int64_t i = 0; i < n; i++) {
                const int64_t at = (r->cu[s] + i) * H + h;
                lse[at] = L[h * n + i];
                CHECK_SAME(o + (h * n + i) * width, out + at * dim_v(spec), dim_v(spec),
                           "decode and prefill: %s", describe(r));
            }
        free(q), free(k), free(v), free(o), free(L);
    }
}

static struct wanted wanted_plain(const struct rows *r)
{
    const int64_t width = max64(r->spec.Dk, dim_v(&r->spec)), n = r->total * r->spec.H;
    struct wanted w = {.out = floats(n * dim_v(&r->spec)), .lse = floats(n), .lse_bits = true};
    want_by_decode(r, width, w.out);
    want_by_prefill(r, width, w.out, w.lse);
    return w;
}

/* Row i of sequence s for head h, as a ref_row. */
static struct ref_row row_of(const struct rows *r, int64_t s, int64_t i, int64_t h)
{
    const int64_t p = position(r, s, i), head = h / (r->spec.H / r->spec.Hkv) * r->ctx[s],
                  Dv = dim_v(&r->spec);
    return (struct ref_row){.q = q_row(r, r->cu[s] + i, h),
                            .k = r->k[s] + head * r->spec.Dk,
                            .v = r->v[s] + head * Dv,
                            .D = r->spec.Dk,
                            .Dv = Dv,
                            .lo = ref_first_seen(p, r->spec.window),
                            .hi = p,
                            .p = p,
                            .scale = r->args->scale,
                            .softcap = r->spec.softcap,
                            .slope = r->spec.alibi ? r->slopes + h : NULL,
                            .sink = r->spec.sinks ? r->sink_logits + h : NULL};
}

/* With options, or of values that f16 does not hold: by the arithmetic of attn_ref.h. */
static struct wanted wanted_by_reference(const struct rows *r)
{
    const int64_t n = r->total * r->spec.H, Dv = dim_v(&r->spec);
    struct wanted w = {.out = floats(n * Dv), .m = floats(n), .L = floats(n)};
    for (int64_t s = 0; s < r->spec.B; s++)
        for (int64_t i = 0; i < rows_in(r, s); i++)
            for (int64_t h = 0; h < r->spec.H; h++) {
                const struct ref_row row = row_of(r, s, i, h);
                const int64_t at = (r->cu[s] + i) * r->spec.H + h;
                ref_row(&row, w.out + at * Dv, &w.m[at], &w.L[at]);
            }
    return w;
}

/* ---- running it ---- */

/* Into freshly painted outputs: TL_OK, every element written, nothing else. */
static void rows_run(const struct rows *r, tl_pool *tp)
{
    const int64_t Dv = dim_v(&r->spec), H = r->spec.H;
    repaint(r->out, r->out_span), repaint(r->lse, r->total * H);
    r->args->tp = tp;
    CHECK(tl_paged_attn_f32(r->args) == TL_OK, "\"%s\": %s", tl_last_error(), describe(r));
    CHECK(rim_intact(r->out) && rim_intact(r->lse), "the rim was written: %s", describe(r));
    int64_t painted_elements = 0;
    for (int64_t i = 0; i < r->out_span; i++)
        painted_elements += float_bits(r->out[i]) == PAINT;
    CHECK(painted_elements == r->out_span - r->total * H * Dv,
          "%lld elements of paint in a span of %lld: %s", (long long)painted_elements,
          (long long)r->out_span, describe(r));
}

static void rows_check(const struct rows *r, const struct wanted *want, tl_pool *tp)
{
    const int64_t Dv = dim_v(&r->spec), H = r->spec.H;
    rows_run(r, tp);
    for (int64_t at = 0; at < r->total * H; at++) {
        const float *got =
            r->out + at / H * r->args->out_token_stride + at % H * r->args->out_head_stride;
        CHECK_SAME(got, want->out + at * Dv, Dv, "row %lld, head %lld: %s", (long long)(at / H),
                   (long long)(at % H), describe(r));
        if (!r->args->lse)
            continue;
        if (want->lse_bits)
            CHECK_BITS(r->lse[at], want->lse[at], "lse of row %lld, head %lld: %s",
                       (long long)(at / H), (long long)(at % H), describe(r));
        else
            CHECK(lse_close(r->lse[at], want->m[at], want->L[at]),
                  "lse of row %lld, head %lld is %.9g for %.9g + log(%.9g): %s",
                  (long long)(at / H), (long long)(at % H), (double)r->lse[at], (double)want->m[at],
                  (double)want->L[at], describe(r));
    }
    if (!r->args->lse)
        CHECK(all_paint(r->lse, r->total * H), "lse was written");
}

/* With a workspace of no byte more than is asked for, full of NaN. */
static void rows_check_with_workspace(const struct rows *r, const struct wanted *want, tl_pool *tp)
{
    tl_paged_attn_args *a = r->args;
    const int64_t threads = tl_pool_threads(tp);
    a->tp = tp;
    const size_t bytes = tl_paged_attn_workspace(a), rows = (size_t)(r->total * r->spec.H);
    const size_t want_bytes =
        threads == 1
            ? 0
            : 4 * rows * (size_t)((TL_ATTN_WAVE_SPLITS * threads + 1) * (2 + dim_v(&r->spec)) + 2);
    CHECK(bytes == want_bytes, "%zu bytes for %zu: %s", bytes, want_bytes, describe(r));
    a->workspace = guarded(bytes), a->workspace_bytes = bytes;
    memset(a->workspace, 0xFF, bytes);
    rows_check(r, want, tp);
    guarded_free(a->workspace, bytes);
    a->workspace = NULL, a->workspace_bytes = 0;
}

/* On every instruction set alone and shared, and on the best one shared by every number of threads.
 * The pools are made once. */
#define MAX_THREADS 5
static void rows_check_everywhere(const struct rows *r, const struct wanted *want)
{
    static tl_pool *pools[MAX_THREADS + 1];
    for (int n = 1; n <= MAX_THREADS; n++)
        if (!pools[n])
            pools[n] = make_threads(n);
    for (int i = 0; isa_select(i); i++) {
        rows_check(r, want, NULL);
        rows_check(r, want, pools[1 + (r->spec.seed + (uint64_t)i) % MAX_THREADS]);
    }
    for (int n = 1; n <= MAX_THREADS; n++) {
        rows_check(r, want, pools[n]);
        rows_check_with_workspace(r, want, pools[n]);
    }
}

static void check_spec(const struct rows_spec *spec)
{
    struct rows r = rows_make(spec);
    struct wanted want = wanted_plain(&r);
    rows_check_everywhere(&r, &want);
    wanted_free(&want);
    rows_free(&r);
}

/* ---- the bits of decode ---- */

TEST(mixtures_of_row_counts_have_the_bits_of_decode)
{
    static const int64_t groups[] = {1, 3, 4, 5, 8, 17}, blocks[] = {1, 7, 16, 33},
                         windows[] = {0, 1, 5, 16, 21, 40, 1000};
    for (uint64_t seed = 0; seed < 42; seed++) {
        uint64_t rng = seed + 1;
        struct rows_spec spec = {.B = 1 + rng_below(&rng, 6),
                                 .Hkv = 1 + (int64_t)seed % 3,
                                 .Dk = 1 + rng_below(&rng, 40),
                                 .block_tokens = blocks[seed % 4],
                                 .window = windows[seed % 7],
                                 .layout = seed % 5 == 0 ? POOL : seed % 4,
                                 .dtype = TL_F16,
                                 .strides = seed % N_STRIDES,
                                 .data = seed % N_DATA,
                                 .gap = seed % 5 ? seed % 2 : 0,
                                 .seed = seed};
        spec.H = spec.Hkv * groups[seed % 6];
        for (int64_t s = 0; s < spec.B; s++)
            spec.q_len[s] = rng_below(&rng, 41), spec.ctx[s] = spec.q_len[s] + rng_below(&rng, 50);
        check_spec(&spec);
    }
}

/* Numbers of rows and heads that fill no round number of rows: every count of rows from 0 to 40
 * beside every group. */
TEST(every_count_of_rows_beside_every_group)
{
    static const int64_t groups[] = {1, 3, 4, 5, 8, 17};
    for (int64_t n = 0; n <= 40; n++) {
        struct rows_spec spec = {.B = 2,
                                 .Hkv = 1 + n % 2,
                                 .Dk = 9,
                                 .block_tokens = 16,
                                 .window = n % 3 ? 0 : 11,
                                 .q_len = {n, 40 - n},
                                 .ctx = {n + n % 7, 45},
                                 .dtype = n % 2 ? TL_F16 : TL_F32,
                                 .seed = 100 + (uint64_t)n};
        spec.H = spec.Hkv * groups[n % 6];
        check_spec(&spec);
    }
}

/* Rows of one call on both sides of the edge of a split, and windows that begin in one split for
 * some and in the next for others. */
TEST(rows_on_both_sides_of_a_split)
{
    static const int64_t windows[] = {0, 3, 21, 1000, 1010, 1024, 1040};
    for (uint64_t i = 0; i < 7; i++) {
        const struct rows_spec spec = {.B = 3,
                                       .H = 4,
                                       .Hkv = 2 - (int64_t)i % 2,
                                       .Dk = 8,
                                       .block_tokens = i % 2 ? 33 : 16,
                                       .window = windows[i],
                                       .q_len = {12, 33, 3},
                                       .ctx = {1030, 2060, 1024},
                                       .layout = i % 3 ? POOL : TOKENS_FIRST,
                                       .dtype = TL_F16,
                                       .data = i % 4,
                                       .seed = 200 + i};
        check_spec(&spec);
    }
}

/* Few rows of many splits: what a workspace is for. Windows leave the splits before them out. */
TEST(long_sequences_with_and_without_a_workspace)
{
    /* through the last one, the two rows begin in two splits */
    static const int64_t windows[] = {0, 1500, 4000, 3, 1025};
    for (uint64_t i = 0; i < 5; i++) {
        const struct rows_spec spec = {.B = i == 4 ? 1 : 2,
                                       .H = 3,
                                       .Hkv = 1,
                                       .Dk = 5,
                                       .Dv = i % 2 ? 5 : 9,
                                       .block_tokens = 33,
                                       .window = windows[i],
                                       .q_len = {2, 1},
                                       .ctx = {10241, i % 2 ? 9000 : 40},
                                       .dtype = TL_F16,
                                       .data = i % 2 ? DATA_RISING : DATA_PLAIN,
                                       .seed = 220 + i};
        check_spec(&spec);
    }
}

/* Rows of one call on both sides of the edges of stretches, and windows that begin in one stretch
 * for some and in the next for others, or leave whole stretches out: by decode, by prefill and by
 * the general call, all of them the rows of attn_ref.h. */
TEST(rows_over_stretches)
{
    static const struct {
        int64_t window, q_len, ctx;
    } cases[] = {{0, 3, 16386},     {0, 1, 33000},    {20, 12, 16390}, {16384, 2, 32769},
                 {17000, 1, 33100}, {16380, 9, 32770}, {700, 2, 33000}, {0, 2, 16384}};
    for (uint64_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct rows_spec spec = {.B = 2,
                                       .H = 2,
                                       .Hkv = 1 + (int64_t)i % 2,
                                       .Dk = 4,
                                       .block_tokens = i % 2 ? 33 : 16,
                                       .window = cases[i].window,
                                       .q_len = {cases[i].q_len, 1},
                                       .ctx = {cases[i].ctx, i % 3 ? 40 : 16500},
                                       .layout = i % 3 ? POOL : TOKENS_FIRST,
                                       .dtype = TL_F16,
                                       .data = i % 4 == 3 ? DATA_RISING : DATA_PLAIN,
                                       .seed = 225 + i};
        struct rows r = rows_make(&spec);
        struct wanted want = wanted_plain(&r), reference = wanted_by_reference(&r);
        CHECK_SAME(want.out, reference.out, r.total * spec.H * spec.Dk, "%s", describe(&r));
        rows_check_everywhere(&r, &want);
        rows_check(&r, &reference, NULL);
        wanted_free(&want), wanted_free(&reference);
        rows_free(&r);
    }
}

TEST(options_over_stretches)
{
    for (uint64_t i = 0; i < 4; i++) {
        const struct rows_spec spec = {.B = 1,
                                       .H = 3,
                                       .Hkv = 1,
                                       .Dk = 4,
                                       .Dv = i % 2 ? 3 : 7,
                                       .block_tokens = 100,
                                       .window = i / 2 ? 17000 : 0,
                                       .q_len = {2},
                                       .ctx = {33000},
                                       .dtype = i % 2 ? TL_F32 : TL_BF16,
                                       .wide = i % 2,
                                       .softcap = i % 3 ? 3 : 0,
                                       .alibi = i % 2,
                                       .sinks = true,
                                       .seed = 245 + i};
        struct rows r = rows_make(&spec);
        struct wanted want = wanted_by_reference(&r);
        rows_check_everywhere(&r, &want);
        wanted_free(&want);
        rows_free(&r);
    }
}

/* Up to the widest that is promised, on either side. */
TEST(heads_of_every_width_up_to_the_limit)
{
    static const int64_t widths[][2] = {{1100, 1100},
                                        {TL_MAX_HEAD_DIM, 8},
                                        {8, TL_MAX_HEAD_DIM},
                                        {TL_MAX_HEAD_DIM, TL_MAX_HEAD_DIM},
                                        {33, TL_MAX_HEAD_DIM - 1}};
    for (uint64_t i = 0; i < 5; i++)
        for (int64_t window = 0; window <= 25; window += 25) {
            const struct rows_spec spec = {.B = 2,
                                           .H = 3,
                                           .Hkv = 1,
                                           .Dk = widths[i][0],
                                           .Dv = widths[i][1],
                                           .block_tokens = 7,
                                           .window = window,
                                           .q_len = {3, 1},
                                           .ctx = {window ? 1040 : 40, 9},
                                           .dtype = i % 2 ? TL_F32 : TL_F16,
                                           .seed = 230 + i};
            struct rows r = rows_make(&spec);
            struct wanted want = wanted_plain(&r);
            for (int isa = 0; isa_select(isa); isa++)
                rows_check(&r, &want, NULL);
            wanted_free(&want);
            rows_free(&r);
        }
}

/* A prompt of T tokens in a pool of its own. */
struct prompt {
    struct paged c; /* one sequence; q and out of it are not used */
    float *k, *v, *q, *want;
    int64_t T, window;
};

/* Every row by plain decode of the same pool through the same table. */
static void prompt_want(struct prompt *x)
{
    const struct paged *c = &x->c;
    const int64_t row = c->H * c->D;
    uint32_t *tables = must_alloc((size_t)(x->T * c->max_blocks) * sizeof *tables);
    int32_t *ctx = must_alloc((size_t)x->T * sizeof *ctx);
    uint64_t rng = 5;
    x->q = floats(x->T * row), x->want = floats(x->T * row);
    for (int64_t i = 0; i < x->T * row; i++)
        x->q[i] = 2 * rng_unit(&rng);
    for (int64_t p = 0; p < x->T; p++) {
        memcpy(tables + p * c->max_blocks, c->tables, (size_t)c->max_blocks * sizeof *tables);
        ctx[p] = (int32_t)p + 1;
    }
    CHECK_STATUS(
        tl_paged_attn_decode_f32(x->q, c->kv, c->layer, tables, c->max_blocks, ctx, x->want, x->T,
                                 c->H, c->Hkv, c->D, c->scale, x->window, NULL),
        TL_OK);
    free(tables), free(ctx);
}

static void prompt_write(const struct prompt *x, int64_t from, int64_t to)
{
    const struct paged *c = &x->c;
    for (int64_t j = from; j < to; j++)
        for (int64_t head = 0; head < c->Hkv; head++)
            for (int64_t d = 0; d < c->D; d++) {
                paged_row(c, 0, j, head, 0)[d] = tl_f32_to_f16(x->k[(head * x->T + j) * c->D + d]);
                paged_row(c, 0, j, head, 1)[d] = tl_f32_to_f16(x->v[(head * x->T + j) * c->D + d]);
            }
}

/* In calls of n rows, positions written as they come: those to come are poison. */
static void check_cut(const struct prompt *x, int64_t n, tl_pool *tp)
{
    const struct paged *c = &x->c;
    const int64_t row = c->H * c->D;
    float *out = painted(x->T * row);
    tl_kv_view view = {.size = sizeof view};
    CHECK_STATUS(tl_kv_pool_view(c->kv, c->layer, &view), TL_OK);
    poison_pool(c->kv, &c->cfg);
    for (int64_t at = 0; at < x->T; at += n) {
        const int32_t ctx = (int32_t)min64(at + n, x->T), cu[] = {0, ctx - (int32_t)at};
        const tl_paged_attn_args args = {.size = sizeof args,
                                         .view = &view,
                                         .q = x->q + at * row,
                                         .out = out + at * row,
                                         .q_token_stride = row,
                                         .q_head_stride = c->D,
                                         .out_token_stride = row,
                                         .out_head_stride = c->D,
                                         .B = 1,
                                         .H = c->H,
                                         .cu_seqlens_q = cu,
                                         .ctx_lens = &ctx,
                                         .block_tables = c->tables,
                                         .table_stride = c->max_blocks,
                                         .window = x->window,
                                         .scale = c->scale,
                                         .tp = tp};
        prompt_write(x, at, ctx);
        CHECK_STATUS(tl_paged_attn_f32(&args), TL_OK);
        CHECK_SAME(out, x->want, ctx * row,
                   "%s, T %lld in calls of %lld, window %lld, b %u, %d threads", tl_isa_name(),
                   (long long)x->T, (long long)n, (long long)x->window, c->cfg.block_tokens,
                   tl_pool_threads(tp));
        CHECK(all_paint(out + ctx * row, (x->T - ctx) * row) && rim_intact(out),
              "rows to come were written");
    }
    painted_free(out, x->T * row);
}

static void check_cuts(int64_t T, int64_t H, int64_t Hkv, int64_t D, int64_t b, int64_t window,
                       const int64_t *cuts, int n_cuts)
{
    const struct paged_spec spec = {.B = 1,
                                    .H = H,
                                    .Hkv = Hkv,
                                    .D = D,
                                    .block_tokens = b,
                                    .ctx = {T},
                                    .n_layers = 2,
                                    .layer = 1,
                                    .seed = (uint64_t)(b + window)};
    struct prompt x = {.c = paged_make(&spec), .T = T, .window = window};
    tl_pool *tp = make_threads(2);
    x.k = paged_gather(&x.c, 0, 0), x.v = paged_gather(&x.c, 0, 1);
    prompt_want(&x);
    for (int isa = 0; isa_select(isa); isa++)
        for (int i = 0; i < n_cuts; i++)
            check_cut(&x, cuts[i], i % 2 ? tp : NULL);
    tl_pool_destroy(tp);
    free(x.k), free(x.v), free(x.q), free(x.want);
    paged_free(&x.c);
}

TEST(any_cut_of_a_prompt_has_the_bits_of_decode)
{
    static const int64_t cuts[] = {1, 2, 5, 7, 16, 33, 110}, blocks[] = {1, 7, 16, 33};
    for (int i = 0; i < 4; i++)
        for (int64_t window = 0; window <= 20; window += 20)
            check_cuts(110, 6, i % 2 ? 2 : 6, 12 + i, blocks[i], window, cuts, 7);
    static const int64_t long_cuts[] = {700, 1060, 33};
    check_cuts(1060, 2, 1, 8, 33, 0, long_cuts, 3);
    check_cuts(1060, 3, 1, 5, 16, 1000, long_cuts, 3);
}

TEST(decode_steps_beside_a_long_prefill)
{
    for (uint64_t i = 0; i < 2; i++) {
        struct rows_spec spec = {.B = MAX_B,
                                 .H = 8,
                                 .Hkv = 2,
                                 .Dk = 32,
                                 .block_tokens = 16,
                                 .window = i ? 50 : 0,
                                 .dtype = TL_F16,
                                 .seed = 240 + i};
        for (int64_t s = 0; s < MAX_B; s++)
            spec.q_len[s] = s == 5       ? 200
                            : s % 7 == 3 ? 4
                                         : 1,
            spec.ctx[s] = s == 5 ? 230 : 4 + 61 * s;
        check_spec(&spec);
    }
}

/* Puts x into all of one position of a sequence, into K, V or both (bits 0 and 1 of where). */
static void fill_position(struct rows *r, int64_t s, int64_t j, int where, float x)
{
    const int64_t b = r->view->block_tokens, T = r->ctx[s];
    for (int64_t head = 0; head < r->spec.Hkv; head++)
        for (int is_v = 0; is_v < 2; is_v++) {
            const int64_t D = is_v ? dim_v(&r->spec) : r->spec.Dk;
            const int64_t at =
                element(r->view, is_v, r->tables[s * r->table_stride + j / b], head, j % b);
            for (int64_t d = 0; where >> is_v & 1 && d < D; d++) {
                (is_v ? r->v[s] : r->k[s])[(head * T + j) * D + d] = x;
                put_value(is_v ? r->v_memory : r->k_memory, r->view->dtype, at + d, x);
            }
        }
}

/* A NaN, an infinity or a huge number that only some rows of a call see: in K or V of a position
 * that the earlier ones do not see yet and the later ones no more, or in a row of q. */
TEST(what_one_row_sees_reaches_no_other)
{
    static const float bad[] = {NAN, INFINITY, -INFINITY, 65504};
    for (int i = 0; i < 48; i++) {
        const struct rows_spec spec = {.B = 2,
                                       .H = i % 2 ? 4 : 5,
                                       .Hkv = 1,
                                       .Dk = 17,
                                       .block_tokens = 7,
                                       .window = i % 3 ? 0 : 6,
                                       .q_len = {13, 2},
                                       .ctx = {40, 5},
                                       .dtype = TL_F16,
                                       .seed = 245};
        struct rows r = rows_make(&spec);
        if (i / 4 % 4 == 0)
            r.q[i * r.args->q_head_stride % r.q_span] = bad[i % 4];
        else
            fill_position(&r, 0, 28 + i % 12, i / 4 % 4, bad[i % 4]);
        struct wanted want = wanted_plain(&r);
        rows_check_everywhere(&r, &want);
        wanted_free(&want);
        rows_free(&r);
    }
}

TEST(without_cu_seqlens_every_sequence_has_one_row)
{
    for (uint64_t i = 0; i < 4; i++) {
        const struct rows_spec spec = {.B = 5,
                                       .H = 6,
                                       .Hkv = 2,
                                       .Dk = 20,
                                       .block_tokens = 16,
                                       .window = i % 2 ? 9 : 0,
                                       .q_len = {1, 1, 1, 1, 1},
                                       .ctx = {1, 70, 16, 17, 1030},
                                       .dtype = TL_F16,
                                       .one_each = i < 2,
                                       .strides = i % 3,
                                       .seed = 250};
        check_spec(&spec);
    }
}

/* Whatever value the window has, no sum of it and a position overflows. */
TEST(no_value_of_the_window_overflows)
{
    static const int64_t windows[] = {-1,        INT64_MIN,       INT64_MIN + 1,
                                      INT64_MAX, INT64_MAX - 1,   INT64_MAX - 40,
                                      INT32_MAX, INT64_C(1) << 32};
    for (size_t i = 0; i < sizeof windows / sizeof *windows; i++) {
        const struct rows_spec spec = {.B = 2,
                                       .H = 2,
                                       .Hkv = 1,
                                       .Dk = 4,
                                       .block_tokens = 4,
                                       .window = windows[i],
                                       .q_len = {9, 2},
                                       .ctx = {9, 40},
                                       .dtype = TL_F16,
                                       .seed = 255};
        struct rows r = rows_make(&spec);
        struct wanted want = wanted_plain(&r);
        rows_check(&r, &want, NULL);
        wanted_free(&want);
        rows_free(&r);
    }
}

/* ---- anyone's memory ---- */

TEST(every_layout_and_dtype_has_the_bits_of_the_pool)
{
    static const int32_t dtypes[] = {TL_F32, TL_F16, TL_BF16};
    for (int layout = 0; layout < N_LAYOUTS; layout++)
        for (int i = 0; i < 3; i++)
            for (int64_t gap = 0; gap <= 3; gap += 3) {
                const struct rows_spec spec = {.B = 3,
                                               .H = 6,
                                               .Hkv = 3,
                                               .Dk = 20,
                                               .block_tokens = layout % 2 ? 7 : 16,
                                               .window = gap ? 19 : 0,
                                               .q_len = {5, 0, 18},
                                               .ctx = {50, 9, 33},
                                               .layout = layout,
                                               .dtype = dtypes[i],
                                               .gap = gap,
                                               .strides = i,
                                               .seed = 300 + (uint64_t)i};
                check_spec(&spec);
            }
}

TEST(k_and_v_of_different_widths)
{
    static const int64_t widths[][2] = {{24, 40}, {64, 16}, {5, 17},    {17, 5}, {1, 130},
                                        {130, 1}, {16, 15}, {192, 128}, {15, 16}};
    static const int32_t dtypes[] = {TL_F32, TL_F16, TL_BF16};
    for (int i = 0; i < 9; i++)
        for (int layout = 0; layout < N_LAYOUTS; layout++) {
            const struct rows_spec spec = {.B = 2,
                                           .H = 4,
                                           .Hkv = layout % 2 ? 1 : 2,
                                           .Dk = widths[i][0],
                                           .Dv = widths[i][1],
                                           .block_tokens = 16,
                                           .window = i % 2 ? 0 : 13,
                                           .q_len = {6, 1},
                                           .ctx = {37, 18},
                                           .layout = layout,
                                           .dtype = dtypes[(i + layout) % 3],
                                           .gap = i % 3,
                                           .strides = (i + layout) % N_STRIDES,
                                           .seed = 330 + (uint64_t)i};
            if (layout != SHARED || spec.Dv <= spec.Dk)
                check_spec(&spec);
        }
}

/* All 24 bits of an f32 take part, and the range of f32 and bf16 that f16 has not, subnormals
 * included. */
TEST(values_that_f16_does_not_hold)
{
    for (uint64_t i = 0; i < 12; i++) {
        const struct rows_spec spec = {.B = 2,
                                       .H = 4,
                                       .Hkv = 2,
                                       .Dk = 19,
                                       .Dv = i % 3 ? 19 : 33,
                                       .block_tokens = 16,
                                       .q_len = {8, 1},
                                       .ctx = {i % 4 ? 40 : 1030, 30},
                                       .layout = i % N_LAYOUTS == SHARED ? DENSE : i % N_LAYOUTS,
                                       .dtype = i % 2 ? TL_F32 : TL_BF16,
                                       .wide = true,
                                       .seed = 360 + i};
        struct rows r = rows_make(&spec);
        struct wanted want = wanted_by_reference(&r);
        rows_check_everywhere(&r, &want);
        wanted_free(&want);
        rows_free(&r);
    }
}

/* The last element of K, of V, of q and of out is the last one before an unmapped page. */
TEST(nothing_past_the_memory_is_read)
{
    static const int32_t dtypes[] = {TL_F32, TL_F16, TL_BF16};
    for (int64_t D = 1; D <= 130; D += D < 36 ? 1 : 13)
        for (int i = 0; i < 3; i++) {
            const struct rows_spec spec = {.B = 1,
                                           .H = 2,
                                           .Hkv = 2,
                                           .Dk = D,
                                           .Dv = 1 + D * 7 % 36,
                                           .block_tokens = 5,
                                           .q_len = {1 + D % 5},
                                           .ctx = {10},
                                           .layout = (enum layout)(D % 2),
                                           .dtype = dtypes[i],
                                           .snug = true,
                                           .seed = (uint64_t)D};
            check_spec(&spec);
        }
}

/* Two sequences over the same blocks, as after a fork. */
TEST(sequences_may_share_blocks)
{
    const struct rows_spec spec = {.B = 2,
                                   .H = 4,
                                   .Hkv = 2,
                                   .Dk = 16,
                                   .block_tokens = 7,
                                   .q_len = {4, 9},
                                   .ctx = {40, 40},
                                   .dtype = TL_F16,
                                   .seed = 370};
    struct rows r = rows_make(&spec);
    memcpy(r.tables + r.table_stride, r.tables, (size_t)r.table_stride * sizeof *r.tables);
    memcpy(r.k[1], r.k[0], (size_t)(2 * 40 * 16) * sizeof(float)),
        memcpy(r.v[1], r.v[0], (size_t)(2 * 40 * 16) * sizeof(float));
    struct wanted want = wanted_plain(&r);
    rows_check_everywhere(&r, &want);
    wanted_free(&want);
    rows_free(&r);
}

/* One q for all heads. */
TEST(heads_may_read_one_row_of_q)
{
    const struct rows_spec spec = {.B = 2,
                                   .H = 6,
                                   .Hkv = 2,
                                   .Dk = 16,
                                   .block_tokens = 7,
                                   .q_len = {4, 9},
                                   .ctx = {40, 20},
                                   .dtype = TL_F16,
                                   .seed = 380};
    struct rows r = rows_make(&spec);
    r.args->q_head_stride = 0;
    struct wanted want = wanted_plain(&r);
    rows_check(&r, &want, NULL);
    wanted_free(&want);
    rows_free(&r);
}

/* Rows of q from the last to the first. */
TEST(rows_of_q_may_lie_backwards)
{
    const struct rows_spec spec = {.B = 2,
                                   .H = 6,
                                   .Hkv = 2,
                                   .Dk = 16,
                                   .block_tokens = 7,
                                   .q_len = {4, 9},
                                   .ctx = {40, 20},
                                   .dtype = TL_F16,
                                   .strides = GAPPED,
                                   .seed = 382};
    struct rows r = rows_make(&spec);
    float *const first = r.q;
    for (int i = 1; i < 4; i++) {
        r.q = first;
        set_strides(&r, 16, &r.args->q_token_stride, &r.args->q_head_stride, &r.q_span);
        if (i & 1)
            r.q += (r.total - 1) * r.args->q_token_stride, r.args->q_token_stride *= -1;
        if (i & 2)
            r.q += (spec.H - 1) * r.args->q_head_stride, r.args->q_head_stride *= -1;
        r.args->q = r.q;
        struct wanted want = wanted_plain(&r);
        rows_check(&r, &want, NULL);
        wanted_free(&want);
    }
    r.q = first;
    rows_free(&r);
}

/* Rows of out from the last to the first. */
TEST(rows_of_out_may_lie_backwards)
{
    const struct rows_spec spec = {.B = 2,
                                   .H = 6,
                                   .Hkv = 2,
                                   .Dk = 16,
                                   .block_tokens = 7,
                                   .q_len = {4, 9},
                                   .ctx = {40, 20},
                                   .dtype = TL_F16,
                                   .strides = GAPPED,
                                   .seed = 383};
    struct rows r = rows_make(&spec);
    struct wanted want = wanted_plain(&r);
    float *const first = r.out;
    for (int i = 1; i < 4; i++) {
        r.args->out = first;
        set_strides(&r, 16, &r.args->out_token_stride, &r.args->out_head_stride, &r.out_span);
        if (i & 1)
            r.args->out += (r.total - 1) * r.args->out_token_stride,
                r.args->out_token_stride *= -1;
        if (i & 2)
            r.args->out += (spec.H - 1) * r.args->out_head_stride, r.args->out_head_stride *= -1;
        repaint(first, r.out_span);
        CHECK_STATUS(tl_paged_attn_f32(r.args), TL_OK);
        int64_t paint = 0;
        for (int64_t at = 0; at < r.out_span; at++)
            paint += float_bits(first[at]) == PAINT;
        CHECK(paint == r.out_span - r.total * 6 * 16 && rim_intact(first), "%lld words of paint",
              (long long)paint);
        for (int64_t at = 0; at < r.total * 6; at++)
            CHECK_SAME(r.args->out + at / 6 * r.args->out_token_stride +
                           at % 6 * r.args->out_head_stride,
                       want.out + at * 16, 16, "backwards %d, row %lld", i, (long long)at);
    }
    wanted_free(&want);
    rows_free(&r);
}

/* A stride over an axis of one is never used. */
TEST(strides_of_axes_of_one_may_be_anything)
{
    static const int64_t odd[] = {0, 1, INT64_MAX};
    for (int i = 0; i < 9; i++) {
        const struct rows_spec spec = {.B = 1,
                                       .H = 3,
                                       .Hkv = 1,
                                       .Dk = 6,
                                       .block_tokens = i / 3 == 1 ? 1 : 16,
                                       .q_len = {1},
                                       .ctx = {i / 3 == 1 ? 3 : 9},
                                       .layout = i / 3 == 2 ? DENSE : HEADS_FIRST,
                                       .dtype = TL_F16,
                                       .seed = 385};
        struct rows r = rows_make(&spec);
        tl_kv_view *const view = r.view;
        if (i / 3 == 0)
            view->k_head_stride = view->v_head_stride = odd[i % 3];
        else if (i / 3 == 1)
            view->k_token_stride = view->v_token_stride = odd[i % 3];
        else
            view->n_blocks = r.tables[0] + 1,
            view->k_head_stride = view->v_head_stride = odd[i % 3];
        struct wanted want = wanted_plain(&r);
        rows_check(&r, &want, NULL);
        wanted_free(&want);
        rows_free(&r);
    }
}

/* ---- options ---- */

enum order {
    AS_WRITTEN,
    ALIBI_BEFORE_SOFTCAP,
    SCALE_AFTER_SOFTCAP,
    SCALED_ALIBI,
    ALIBI_FROM_ZERO,
    SCALED_SINK,
    CAPPED_SINK,
    TWO_SINKS,
    N_ORDERS
};

/* A score and the error that f32 may make of it, u a half ulp of 1: of the dot a rounding for each
 * step of a lane, four of the fold; a capped score is no steeper than what it caps; tanh is within
 * two ulp. */
static double score64(const struct ref_row *r, int64_t j, enum order order, double *error)
{
    const double u = 0x1p-24, scale = (double)r->scale, cap = (double)r->softcap;
    double dot = 0, size = 0;
    for (int64_t d = 0; d < r->D; d++) {
        const double x = (double)r->q[d] * (double)r->k[j * r->D + d];
        dot += x, size += fabs(x);
    }
    const double distance = order == ALIBI_FROM_ZERO ? (double)j : (double)(j - r->p);
    const double bias =
        r->slope ? (double)*r->slope * distance * (order == SCALED_ALIBI ? scale : 1) : 0;
    double s = order == SCALE_AFTER_SOFTCAP ? dot : scale * dot;
    *error = fabs(scale) * size * (double)(r->D / 16 + 6) * u;
    if (order == ALIBI_BEFORE_SOFTCAP)
        s += bias;
    if (cap > 0) {
        *error += fabs(s) * u;
        s = cap * tanh(s / cap);
        *error += fabs(s) * 5 * u;
    }
    s *= order == SCALE_AFTER_SOFTCAP ? scale : 1;
    s += order == ALIBI_BEFORE_SOFTCAP ? 0 : bias;
    *error += r->slope ? fabs(s) * u : 0;
    return s;
}

struct closeness {
    double lse, out_bound, lse_bound;
};

/* The row in double, and how far f32 may be from it. Weights are off by a factor within 1 +-
 * weight: the errors of the scores; s - m, once and once more for each change of the maximum, which
 * sum to the range of the scores; three half ulps of exp for each, and two roundings. Then sums of
 * n. */
static struct closeness ref64_options(const struct ref_row *r, enum order order, double *out)
{
    const int64_t n = r->hi - r->lo + 1, Dv = ref_width(r);
    const double u = 0x1p-24, cap = (double)r->softcap;
    double *s = must_alloc((size_t)n * sizeof *s), top = -INFINITY, low = INFINITY, error = 0,
           sum = 0, largest = 0;
    double sink = r->sink ? (double)*r->sink : -INFINITY;
    sink = order == SCALED_SINK              ? sink * (double)r->scale
           : order == CAPPED_SINK && cap > 0 ? cap * tanh(sink / cap)
                                             : sink;
    for (int64_t j = r->lo; j <= r->hi; j++) {
        double e;
        s[j - r->lo] = score64(r, j, order, &e);
        top = fmax(top, s[j - r->lo]), low = fmin(low, s[j - r->lo]), error = fmax(error, e);
    }
    if (sink > -INFINITY)
        top = fmax(top, sink), low = fmin(low, sink);
    sum = exp(sink - top) * (order == TWO_SINKS ? 2 : 1);
    memset(out, 0, (size_t)Dv * sizeof *out);
    for (int64_t j = r->lo; j <= r->hi; j++) {
        const double p = exp(s[j - r->lo] - top);
        sum += p;
        for (int64_t d = 0; d < Dv; d++) {
            out[d] += p * (double)r->v[j * Dv + d];
            largest = fmax(largest, fabs((double)r->v[j * Dv + d]));
        }
    }
    for (int64_t d = 0; d < Dv; d++)
        out[d] /= sum;
    free(s);
    const double rescales = (double)(n / TL_ATTN_TILE + 2 + 2 * (n / TL_ATTN_SPLIT + 2));
    const double weight = error + (2 * (top - low) + 5 * rescales + 5) * u,
                 lanes = (double)(n / 16 + 8) * u;
    struct closeness c = {.lse = top + log(sum)};
    c.out_bound = 1.1 * largest * (2 * weight + lanes + (double)(n + 8) * u);
    c.lse_bound =
        1.1 * (weight + lanes + 4 * u * fabs(log(sum)) + 4 * u * fabs(c.lse) + 2 * u * fabs(top));
    return c;
}

static void check_close(const struct rows *r)
{
    const int64_t Dv = dim_v(&r->spec), H = r->spec.H;
    double *want = must_alloc((size_t)Dv * sizeof *want);
    for (int64_t s = 0; s < r->spec.B; s++)
        for (int64_t at = 0; at < rows_in(r, s) * H; at++) {
            const int64_t i = at / H, h = at % H, row = r->cu[s] + i;
            const struct ref_row ref = row_of(r, s, i, h);
            const struct closeness c = ref64_options(&ref, AS_WRITTEN, want);
            const float *got =
                r->out + row * r->args->out_token_stride + h * r->args->out_head_stride;
            for (int64_t d = 0; d < Dv; d++)
                CHECK(fabs((double)got[d] - want[d]) <= c.out_bound,
                      "row %lld, head %lld, d %lld: %.9g for %.9g, bound %g: %s", (long long)row,
                      (long long)h, (long long)d, (double)got[d], want[d], c.out_bound,
                      describe(r));
            if (r->args->lse)
                CHECK(fabs((double)r->lse[row * H + h] - c.lse) <= c.lse_bound,
                      "row %lld, head %lld: lse %.9g for %.9g, bound %g: %s", (long long)row,
                      (long long)h, (double)r->lse[row * H + h], c.lse, c.lse_bound, describe(r));
        }
    free(want);
}

/* Every combination of options, with and without lse, a window and several rows: the bits of the
 * arithmetic, and close to double. */
TEST(every_combination_of_options)
{
    static const float caps[] = {0, 0.5f, 30};
    for (int i = 0; i < 96; i++) {
        const int64_t n = i / 48 ? 9 : 1;
        const struct rows_spec spec = {.B = 2,
                                       .H = 6,
                                       .Hkv = i % 5 ? 2 : 1,
                                       .Dk = 24,
                                       .Dv = i % 7 ? 24 : 17,
                                       .block_tokens = i % 3 ? 16 : 7,
                                       .window = i / 24 % 2 ? 21 : 0,
                                       .q_len = {n, n},
                                       .ctx = {70, n + 2},
                                       .layout = i % 4,
                                       .dtype = i % 11 ? TL_F16 : TL_F32,
                                       .strides = i % N_STRIDES,
                                       .softcap = caps[i % 3],
                                       .alibi = i / 3 % 2,
                                       .sinks = i / 6 % 2,
                                       .scale_given = true,
                                       .scale = 0.7f,
                                       .seed = 400 + (uint64_t)i};
        struct rows r = rows_make(&spec);
        struct wanted want = wanted_by_reference(&r);
        r.args->lse = i / 12 % 2 ? r.lse : NULL;
        rows_check_everywhere(&r, &want);
        check_close(&r);
        wanted_free(&want);
        rows_free(&r);
    }
}

TEST(options_across_splits)
{
    static const float caps[] = {0, 5};
    for (int i = 0; i < 8; i++) {
        const struct rows_spec spec = {.B = 2,
                                       .H = 4,
                                       .Hkv = 2,
                                       .Dk = 8,
                                       .block_tokens = 33,
                                       .window = i % 2 ? 1010 : 0,
                                       .q_len = {9, 1},
                                       .ctx = {1029, 2050},
                                       .dtype = TL_F16,
                                       .softcap = caps[i / 2 % 2],
                                       .alibi = i / 4 == 0,
                                       .sinks = true,
                                       .scale_given = true,
                                       .scale = 0.5f,
                                       .seed = 500 + (uint64_t)i};
        struct rows r = rows_make(&spec);
        struct wanted want = wanted_by_reference(&r);
        rows_check_everywhere(&r, &want);
        check_close(&r);
        wanted_free(&want);
        rows_free(&r);
    }
}

/* With nothing but sinks prefill says the bits, of lse too. */
TEST(sinks_and_lse_have_the_bits_of_prefill)
{
    const struct rows_spec spec = {.B = 1,
                                   .H = 5,
                                   .Hkv = 1,
                                   .Dk = 24,
                                   .block_tokens = 16,
                                   .window = 30,
                                   .q_len = {23},
                                   .ctx = {61},
                                   .dtype = TL_F16,
                                   .strides = TRANSPOSED,
                                   .sinks = true,
                                   .seed = 510};
    struct rows r = rows_make(&spec);
    float *o = floats(5 * 23 * 24), *lse = floats(5 * 23), *q = floats(5 * 23 * 24);
    memcpy(q, r.q, 5 * 23 * 24 * sizeof *q); /* [H, total_q, D] as it lies */
    const struct flash f = {.q = q,
                            .k = r.k[0],
                            .v = r.v[0],
                            .o = o,
                            .lse = lse,
                            .B = 1,
                            .H = 5,
                            .Hkv = 1,
                            .Tq = 23,
                            .Tk = 61,
                            .D = 24,
                            .scale = r.args->scale,
                            .q_offset = 38,
                            .causal = 1,
                            .window = 30,
                            .sinks = r.sink_logits};
    CHECK_STATUS(flash_call(&f), TL_OK);
    rows_run(&r, NULL);
    CHECK_SAME(r.out, o, 5 * 23 * 24, "out");
    for (int64_t i = 0; i < 23; i++)
        for (int64_t h = 0; h < 5; h++)
            CHECK_BITS(r.lse[i * 5 + h], lse[h * 23 + i], "lse of row %lld, head %lld",
                       (long long)i, (long long)h);
    free(o), free(lse), free(q);
    rows_free(&r);
}

/* One head, D 1, q 1: keys are dots. K and V lie as [1, 1, T, 1], in f32. */
struct one_row {
    const float *dots, *v;
    int32_t ctx;
    float scale, softcap, slope, sink; /* a slope or sink of 0: none */
};

static void one_row_call(const struct one_row *x, float *out, float *lse)
{
    const tl_kv_view view = {.size = sizeof view,
                             .k = x->dots,
                             .v = x->v,
                             .dtype = TL_F32,
                             .n_blocks = 1,
                             .block_tokens = x->ctx,
                             .n_kv_heads = 1,
                             .head_dim_k = 1,
                             .head_dim_v = 1,
                             .k_block_stride = x->ctx,
                             .k_head_stride = x->ctx,
                             .k_token_stride = 1,
                             .v_block_stride = x->ctx,
                             .v_head_stride = x->ctx,
                             .v_token_stride = 1};
    const float q = 1;
    const uint32_t table = 0;
    const tl_paged_attn_args args = {.size = sizeof args,
                                     .view = &view,
                                     .q = &q,
                                     .out = out,
                                     .lse = lse,
                                     .q_token_stride = 1,
                                     .q_head_stride = 1,
                                     .out_token_stride = 1,
                                     .out_head_stride = 1,
                                     .B = 1,
                                     .H = 1,
                                     .ctx_lens = &x->ctx,
                                     .block_tables = &table,
                                     .table_stride = 1,
                                     .alibi_slopes = x->slope != 0 ? &x->slope : NULL,
                                     .sink_logits = x->sink != 0 ? &x->sink : NULL,
                                     .scale = x->scale,
                                     .logits_softcap = x->softcap};
    CHECK_STATUS(tl_paged_attn_f32(&args), TL_OK);
}

/* Dots 0 and 1 doubled, capped at 1: 0 and tanh 2; a slope of a half takes a half from the older;
 * the sink stays as it is. */
TEST(an_example_by_hand)
{
    const float dots[] = {0, 1}, v[] = {0, 1};
    const double older = exp(-0.5), newer = exp(0.96402758007581688), sink = exp(0.25);
    float out, lse;
    one_row_call(&(struct one_row){dots, v, 2, 2, 1, 0.5f, 0.25f}, &out, &lse);
    CHECK(fabs((double)out - newer / (older + newer + sink)) < 4e-7, "out %.9g for %.9g",
          (double)out, newer / (older + newer + sink));
    CHECK(fabs((double)lse - log(older + newer + sink)) < 4e-7, "lse %.9g for %.9g", (double)lse,
          log(older + newer + sink));
}

/* On scores that tell every order of operations from the right one: none of the wrong ones is
 * near. */
TEST(the_order_of_operations)
{
    const float dots[] = {0.3f, 2, -1, 1.2f}, v[] = {1, -2, 4, 0.5f}, slope = 0.75f, sink = 1.5f,
                one = 1;
    const struct ref_row row = {.q = &one,
                                .k = dots,
                                .v = v,
                                .D = 1,
                                .hi = 3,
                                .p = 3,
                                .scale = 1.25f,
                                .softcap = 0.9f,
                                .slope = &slope,
                                .sink = &sink};
    float out, lse;
    double want, other;
    one_row_call(&(struct one_row){dots, v, 4, 1.25f, 0.9f, slope, sink}, &out, &lse);
    const struct closeness right = ref64_options(&row, AS_WRITTEN, &want);
    CHECK(fabs((double)out - want) <= right.out_bound &&
              fabs((double)lse - right.lse) <= right.lse_bound,
          "out %.9g for %.9g, lse %.9g for %.9g", (double)out, want, (double)lse, right.lse);
    for (int wrong = 1; wrong < N_ORDERS; wrong++) {
        const struct closeness c = ref64_options(&row, wrong, &other);
        CHECK(fabs(other - want) > 100 * right.out_bound &&
                  fabs(c.lse - right.lse) > 100 * right.lse_bound,
              "order %d is no different", wrong);
    }
}

/* Far from position 0 the distance is still exact: 2^24 is where floats stop counting. */
TEST(alibi_beyond_the_integers_of_f32)
{
    enum { B_TOKENS = 1 << 20, SEEN = 40 };
    const int32_t ctx = (1 << 24) + B_TOKENS / 2 + 8; /* the newest position is odd: no float */
    uint16_t *memory = guarded(2 * B_TOKENS * sizeof *memory);
    uint32_t tables[17];
    memset(tables, 0xFF, sizeof tables);
    memset(memory, 0xFF, 2 * B_TOKENS * sizeof *memory);
    tables[16] = 0;
    double sum = 0, mean = 0;
    const float slope = 0.0703125f, q = 1;
    for (int i = 0; i < SEEN; i++) { /* i positions before the newest */
        const int64_t slot = ctx - 1 - i - 16 * (int64_t)B_TOKENS;
        memory[slot] = 0, memory[B_TOKENS + slot] = tl_f32_to_f16((float)i);
        sum += exp(-(double)slope * i), mean += exp(-(double)slope * i) * i;
    }
    const tl_kv_view view = {.size = sizeof view,
                             .k = memory,
                             .v = memory + B_TOKENS,
                             .dtype = TL_F16,
                             .n_blocks = 1,
                             .block_tokens = B_TOKENS,
                             .n_kv_heads = 1,
                             .head_dim_k = 1,
                             .head_dim_v = 1,
                             .k_token_stride = 1,
                             .v_token_stride = 1};
    for (int32_t rows = 1; rows <= 3; rows += 2) {
        const int32_t cu[] = {0, rows};
        float qs[3] = {q, q, q}, *out = painted(3), *lse = painted(3);
        const tl_paged_attn_args args = {.size = sizeof args,
                                         .view = &view,
                                         .q = qs,
                                         .out = out,
                                         .lse = lse,
                                         .q_token_stride = 1,
                                         .q_head_stride = 1,
                                         .out_token_stride = 1,
                                         .out_head_stride = 1,
                                         .B = 1,
                                         .H = 1,
                                         .cu_seqlens_q = cu,
                                         .ctx_lens = &ctx,
                                         .block_tables = tables,
                                         .table_stride = 17,
                                         .window = SEEN - rows + 1,
                                         .alibi_slopes = &slope,
                                         .scale = 1};
        for (int i = 0; i < rows - 1; i++) /* fewer are seen than summed: take them out again */
            sum -= exp(-(double)slope * (SEEN - 1 - i)),
                mean -= exp(-(double)slope * (SEEN - 1 - i)) * (SEEN - 1 - i);
        CHECK_STATUS(tl_paged_attn_f32(&args), TL_OK);
        CHECK(fabs((double)out[rows - 1] - mean / sum) < 1e-4 &&
                  fabs((double)lse[rows - 1] - log(sum)) < 1e-5,
              "%d rows: out %.9g for %.9g, lse %.9g for %.9g", rows, (double)out[rows - 1],
              mean / sum, (double)lse[rows - 1], log(sum));
        painted_free(out, 3), painted_free(lse, 3);
    }
    guarded_free(memory, 2 * B_TOKENS * sizeof *memory);
}

/* Numbers that are none, in what is seen and in the options themselves: bit for bit as the
 * arithmetic says. */
TEST(special_numbers_in_every_option)
{
    static const float slopes[] = {0, -0.0f, -1, 1e-40f, 3e38f, INFINITY, -INFINITY, NAN};
    static const float scales[] = {0, -0.5f, 1e30f, INFINITY, -INFINITY, 0x1p-149f};
    static const float sinks[] = {NAN, -NAN, INFINITY, -INFINITY, 3e38f, -3e38f, 0, 1e-40f},
                       caps[] = {0, 0x1p-149f, 1e-30f, 1, 3.4e38f};
    for (int i = 0; i < 120; i++) {
        const struct rows_spec spec = {.B = 2,
                                       .H = 4,
                                       .Hkv = 2,
                                       .Dk = 6,
                                       .block_tokens = 7,
                                       .window = i % 7 ? 0 : 12,
                                       .q_len = {3, 1},
                                       .ctx = {40, 17},
                                       .dtype = i % 2 ? TL_F16 : TL_BF16,
                                       .data = i % 3 ? DATA_SPECIAL : DATA_PLAIN,
                                       .softcap = caps[i % 5],
                                       .alibi = i / 2 % 3 == 0,
                                       .sinks = i / 5 % 2,
                                       .scale_given = i % 4 == 0,
                                       .scale = scales[i / 4 % 6],
                                       .seed = 600 + (uint64_t)i};
        struct rows r = rows_make(&spec);
        for (int64_t h = 0; h < 4; h++) {
            r.slopes[h] = slopes[(h + i) % 8];
            r.sink_logits[h] = sinks[(3 * h + i / 3) % 8];
        }
        struct wanted want = wanted_by_reference(&r);
        rows_check_everywhere(&r, &want);
        wanted_free(&want);
        rows_free(&r);
    }
}

/* No cap, no slopes and no sinks are those of 0, of 0 and of -inf: a row of plain decode either
 * way. */
TEST(options_that_say_nothing_change_nothing)
{
    struct rows_spec spec = {.B = 2,
                             .H = 4,
                             .Hkv = 2,
                             .Dk = 16,
                             .block_tokens = 16,
                             .q_len = {5, 1},
                             .ctx = {40, 20},
                             .dtype = TL_F16,
                             .alibi = true,
                             .sinks = true,
                             .seed = 700};
    struct rows r = rows_make(&spec);
    struct wanted want = wanted_plain(&r);
    for (int64_t h = 0; h < 4; h++)
        r.slopes[h] = 0, r.sink_logits[h] = -INFINITY;
    rows_check_everywhere(&r, &want);
    wanted_free(&want);
    rows_free(&r);
}

/* ---- what a call leaves alone ---- */

TEST(sequences_without_rows_read_and_leave_nothing)
{
    const struct rows_spec spec = {.B = 5,
                                   .H = 4,
                                   .Hkv = 2,
                                   .Dk = 16,
                                   .block_tokens = 16,
                                   .q_len = {0, 3, 0, 0, 1},
                                   /* their entries are garbage */
                                   .ctx = {0, 30, 1, 77, 9},
                                   .dtype = TL_F16,
                                   .seed = 710};
    check_spec(&spec);
}

/* A sequence without rows between others: nothing of its table is looked at, not even whether it
 * would be long enough. Its context length has only to be one, that is not below 0. */
TEST(a_sequence_without_rows_is_not_looked_at)
{
    const struct rows_spec spec = {.B = 5,
                                   .H = 4,
                                   .Hkv = 2,
                                   .Dk = 16,
                                   .block_tokens = 16,
                                   .q_len = {1, 0, 3, 0, 1},
                                   .ctx = {60, 5, 30, 9, 1},
                                   .dtype = TL_F16,
                                   .seed = 712};
    static const int32_t lengths[] = {0, 1, 5, 60, 100000};
    struct rows r = rows_make(&spec);
    struct wanted want = wanted_plain(&r);
    for (int i = 0; i < 5; i++) {
        for (int s = 1; s < 5; s += 2) {
            r.ctx[s] = lengths[i];
            for (int64_t at = 0; at < r.table_stride; at++)
                r.tables[s * r.table_stride + at] = UINT32_MAX - (uint32_t)(at % 3);
        }
        rows_check_everywhere(&r, &want);
        float *states = painted(r.total * spec.H * (2 + spec.Dk));
        CHECK(tl_paged_attn_states_f32(r.args, 0, 1, states) == TL_OK, "length %d: %s", lengths[i],
              tl_last_error());
        painted_free(states, r.total * spec.H * (2 + spec.Dk));
    }
    wanted_free(&want);
    r.ctx[1] = r.ctx[3] = 5; /* as rows_free knows them */
    rows_free(&r);
}

TEST(a_call_of_no_rows_is_in_order)
{
    const struct rows_spec spec = {.B = 3,
                                   .H = 4,
                                   .Hkv = 2,
                                   .Dk = 16,
                                   .block_tokens = 16,
                                   .ctx = {0, 30, 1},
                                   .dtype = TL_F16,
                                   .seed = 711};
    struct rows r = rows_make(&spec);
    tl_pool *tp = make_threads(2);
    rows_run(&r, NULL);
    rows_run(&r, tp);
    r.view->n_blocks = 0;
    rows_run(&r, NULL);
    r.args->q_token_stride = r.args->out_token_stride = INT64_MAX; /* never stepped along */
    rows_run(&r, NULL);
    CHECK(rim_intact(r.out) && rim_intact(r.lse), "something was written");
    tl_pool_destroy(tp);
    rows_free(&r);
}

TEST(an_empty_batch_reads_and_writes_nothing)
{
    char *edge = (char *)guarded(8) + 8; /* cannot be read */
    float *out = painted(4);
    const int32_t cu[] = {0};
    tl_pool *tp = make_threads(2);
    tl_kv_view view = {.size = sizeof view,
                             .k = edge,
                       .v = edge,
                       .dtype = TL_F16,
                       .n_blocks = 4,
                       .block_tokens = 4,
                       .n_kv_heads = 2,
                       .head_dim_k = 3,
                       .head_dim_v = 3,
                       .k_block_stride = 24,
                       .k_head_stride = 12,
                       .k_token_stride = 3,
                       .v_block_stride = 24,
                       .v_head_stride = 12,
                       .v_token_stride = 3};
    tl_paged_attn_args args = {.size = sizeof args,
                               .view = &view,
                               .q = (float *)edge,
                               .out = out,
                               .lse = out + 2,
                               .q_token_stride = 12,
                               .q_head_stride = 3,
                               .out_token_stride = 12,
                               .out_head_stride = 3,
                               .H = 4,
                               .ctx_lens = (int32_t *)edge,
                               .block_tables = (uint32_t *)edge,
                               .table_stride = 1,
                               .alibi_slopes = (float *)edge,
                               .sink_logits = (float *)edge,
                               .scale = 1};
    for (int i = 0; i < 4; i++) {
        args.cu_seqlens_q = i % 2 ? cu : NULL, args.tp = i / 2 ? tp : NULL;
        CHECK_STATUS(tl_paged_attn_f32(&args), TL_OK);
    }
    args.H = 3;
    CHECK_STATUS(tl_paged_attn_f32(&args), TL_ESHAPE);
    args.H = 4, args.q = NULL;
    CHECK_STATUS(tl_paged_attn_f32(&args), TL_EINVAL);
    CHECK(all_paint(out, 4) && rim_intact(out), "something was written");
    tl_pool_destroy(tp);
    painted_free(out, 4);
    guarded_free(edge - 8, 8);
}

static uint32_t checksum_of_inputs(const struct rows *r)
{
    uint32_t crc = tl_crc32c(r->k_memory, r->k_bytes, 0);
    crc = tl_crc32c(r->v_memory, r->v_bytes, crc);
    crc = tl_crc32c(r->q, (size_t)r->q_span * sizeof *r->q, crc);
    crc = tl_crc32c(r->cu, (size_t)(r->spec.B + 1) * sizeof *r->cu, crc);
    crc = tl_crc32c(r->ctx, (size_t)r->spec.B * sizeof *r->ctx, crc);
    crc = tl_crc32c(r->tables, (size_t)(r->spec.B * r->table_stride) * sizeof *r->tables, crc);
    crc = tl_crc32c(r->slopes, (size_t)r->spec.H * sizeof *r->slopes, crc);
    crc = tl_crc32c(r->sink_logits, (size_t)r->spec.H * sizeof *r->sink_logits, crc);
    return tl_crc32c(r->view, sizeof *r->view, crc);
}

TEST(nothing_but_out_and_lse_is_written_and_nothing_allocated)
{
    for (int i = 0; i < 6; i++) {
        const struct rows_spec spec = {.B = 3,
                                       .H = 8,
                                       .Hkv = 1,
                                       .Dk = i % 3 == 2 ? 1100 : 24,
                                       .block_tokens = 7,
                                       .q_len = {40, 1, 7},
                                       .ctx = {70, 1030, 7},
                                       .dtype = TL_F16,
                                       .gap = 2,
                                       .strides = GAPPED,
                                       .softcap = i / 3 ? 4.0f : 0.0f,
                                       .alibi = i / 3,
                                       .sinks = true,
                                       .seed = 720};
        struct rows r = rows_make(&spec);
        tl_pool *tp = i % 2 ? make_threads(3) : NULL;
        struct hook refuse;
        const uint32_t before = checksum_of_inputs(&r);
        r.args->tp = tp;
        tl_set_last_error("kept");
        hook_install(&refuse, 1);
        const tl_status got = tl_paged_attn_f32(r.args);
        hook_remove();
        CHECK(got == TL_OK && refuse.calls == 0, "%s after %ld calls of the hook",
              tl_status_str(got), refuse.calls);
        CHECK(strcmp(tl_last_error(), "kept") == 0, "success set the slot: %s", tl_last_error());
        CHECK(before == checksum_of_inputs(&r), "an input changed: %s", describe(&r));
        tl_pool_destroy(tp);
        rows_free(&r);
    }
}

/* Whatever mode the caller computes in, and it finds it again. */
TEST(rounding_modes_of_the_caller_do_not_reach_the_bits)
{
    static const int modes[] = {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
    const struct rows_spec spec = {.B = 2,
                                   .H = 4,
                                   .Hkv = 2,
                                   .Dk = 24,
                                   .block_tokens = 7,
                                   .q_len = {9, 1},
                                   .ctx = {40, 30},
                                   .dtype = TL_F16,
                                   .softcap = 2,
                                   .alibi = true,
                                   .sinks = true,
                                   .seed = 730};
    struct rows r = rows_make(&spec);
    struct wanted want = wanted_by_reference(&r);
    for (int i = 0; i < 3; i++) {
        repaint(r.out, r.out_span);
        fesetround(modes[i]);
        const tl_status got = tl_paged_attn_f32(r.args);
        const int after = fegetround();
        fesetround(FE_TONEAREST);
        CHECK(got == TL_OK && after == modes[i], "%s, mode %d after %d", tl_status_str(got), after,
              modes[i]);
        CHECK_SAME(r.out, want.out, r.out_span, "mode %d", modes[i]);
    }
    wanted_free(&want);
    rows_free(&r);
}

/* ---- what is refused ---- */

/* A call that is in order until faults are put in: rows 3, 1, 0 and 2 of four sequences, with every
 * option. All that it points to, args and view aside, lies in one memory, so that a test sees every
 * write; paint in front and behind takes an output that is moved. */
enum {
    BAD_B = 4,
    BAD_H = 4,
    BAD_HKV = 2,
    BAD_DK = 5,
    BAD_DV = 3,
    BAD_TOKENS = 4,
    BAD_BLOCKS = 20,
    BAD_TABLE = 13,
    BAD_ROWS = 6,
    BAD_OUT = BAD_ROWS * BAD_H * BAD_DV,
    BAD_LSE = BAD_ROWS * BAD_H,
    BAD_WORK = BAD_LSE * ((TL_ATTN_WAVE_SPLITS * 2 + 1) * (2 + BAD_DV) + 2), /* for two threads */
    BAD_K = BAD_BLOCKS * BAD_HKV * BAD_TOKENS * BAD_DK,
    BAD_V = BAD_BLOCKS * BAD_HKV * BAD_TOKENS * BAD_DV,
};
struct bad_memory { /* every member is of words of four bytes */
    float front[BAD_OUT];
    float q[BAD_ROWS * BAD_H * BAD_DK];
    float space_1[BAD_OUT], k[BAD_K], space_2[BAD_OUT], v[BAD_V];
    float space_3[BAD_OUT], slopes[BAD_H], space_4[BAD_OUT], sinks[BAD_H];
    float space_5[BAD_OUT];
    int32_t cu[BAD_B + 1];
    float space_6[BAD_OUT];
    int32_t ctx[BAD_B];
    float space_7[BAD_OUT];
    uint32_t tables[BAD_B * BAD_TABLE];
    float space_8[BAD_OUT], out[BAD_OUT], space_9[BAD_OUT], lse[BAD_LSE];
    float space_10[BAD_WORK], work[BAD_WORK];
    float back[BAD_WORK];
};

struct bad {
    struct bad_memory *m;
    tl_kv_view view;
    tl_paged_attn_args args;
    bool no_args, inside; /* called with NULL; from inside a range of tp */
};

static void bad_fresh(struct bad *x, struct bad_memory *m, tl_pool *tp)
{
    /* 13, 12, no and 13 entries */
    static const int32_t cu[] = {0, 3, 4, 4, 6}, ctx[] = {50, 47, 9, 52};
    repaint((float *)m, (int64_t)(sizeof *m / sizeof(float)));
    for (int i = 0; i < BAD_ROWS * BAD_H * BAD_DK; i++)
        m->q[i] = 0.25f * (float)(i % 7);
    for (int i = 0; i < BAD_K; i++)
        m->k[i] = 0.25f * (float)(i % 5);
    for (int i = 0; i < BAD_V; i++)
        m->v[i] = 0.25f * (float)(i % 9);
    for (int i = 0; i < BAD_H; i++)
        m->slopes[i] = 0.5f, m->sinks[i] = 1;
    memcpy(m->cu, cu, sizeof cu), memcpy(m->ctx, ctx, sizeof ctx);
    for (uint32_t i = 0; i < BAD_B * BAD_TABLE; i++)
        m->tables[i] = i % BAD_BLOCKS;
    *x = (struct bad){.m = m};
    x->view = (tl_kv_view){.size = sizeof(tl_kv_view),
                        .k = m->k,
                           .v = m->v,
                           .dtype = TL_F32,
                           .n_blocks = BAD_BLOCKS,
                           .block_tokens = BAD_TOKENS,
                           .n_kv_heads = BAD_HKV,
                           .head_dim_k = BAD_DK,
                           .head_dim_v = BAD_DV,
                           .k_block_stride = BAD_HKV * BAD_TOKENS * BAD_DK,
                           .k_head_stride = BAD_TOKENS * BAD_DK,
                           .k_token_stride = BAD_DK,
                           .v_block_stride = BAD_HKV * BAD_TOKENS * BAD_DV,
                           .v_head_stride = BAD_TOKENS * BAD_DV,
                           .v_token_stride = BAD_DV};
    x->args = (tl_paged_attn_args){.size = sizeof x->args,
                                   .view = &x->view,
                                   .q = m->q,
                                   .out = m->out,
                                   .lse = m->lse,
                                   .q_token_stride = BAD_H * BAD_DK,
                                   .q_head_stride = BAD_DK,
                                   .out_token_stride = BAD_H * BAD_DV,
                                   .out_head_stride = BAD_DV,
                                   .B = BAD_B,
                                   .H = BAD_H,
                                   .cu_seqlens_q = m->cu,
                                   .ctx_lens = m->ctx,
                                   .block_tables = m->tables,
                                   .table_stride = BAD_TABLE,
                                   .alibi_slopes = m->slopes,
                                   .sink_logits = m->sinks,
                                   .scale = 0.5f,
                                   .logits_softcap = 3,
                                   .tp = tp,
                                   .workspace = m->work,
                                   .workspace_bytes = sizeof m->work};
}

static tl_status bad_call(const void *bad)
{
    const struct bad *x = bad;
    return tl_paged_attn_f32(x->no_args ? NULL : &x->args);
}

static tl_status bad_run(const struct bad *x)
{
    return run_call(bad_call, x, x->inside ? x->args.tp : NULL);
}

/* The faults, one a line: name, rank, status, what it does, a word and the numbers that the message
 * has to hold. Where two faults are there, that of the lower rank decides; of one rank, either. */
#define NO INT64_C(-77777) /* no number */
#define A x->args
#define V x->view
#define M x->m
#define FAULTS(F)                                                                                  \
    F(null_args, 0, TL_EINVAL, x->no_args = true, "args", NO, NO, NO)                              \
    F(size_0, 0, TL_EINVAL, A.size = 0, "size", 0, NO, NO)                                         \
    F(size_8, 0, TL_EINVAL, A.size = 8, "size", 8, NO, NO)                                         \
    F(size_one_less, 0, TL_EINVAL, A.size--, "size", sizeof A - 1, NO, NO)                         \
    F(size_of_a_later_version, 0, TL_EINVAL, A.size += 8, "size", sizeof A + 8, NO, NO)            \
    F(size_negative, 0, TL_EINVAL, A.size = UINT64_MAX, "size", NO, NO, NO)                        \
    F(null_view, 10, TL_EINVAL, A.view = NULL, "view", NO, NO, NO)                                 \
    F(null_k, 10, TL_EINVAL, V.k = NULL, "k", NO, NO, NO)                                          \
    F(null_v, 10, TL_EINVAL, V.v = NULL, "v", NO, NO, NO)                                          \
    F(null_q, 10, TL_EINVAL, A.q = NULL, "q", NO, NO, NO)                                          \
    F(null_out, 10, TL_EINVAL, A.out = NULL, "out", NO, NO, NO)                                    \
    F(null_ctx, 10, TL_EINVAL, A.ctx_lens = NULL, "ctx_lens", NO, NO, NO)                          \
    F(null_tables, 10, TL_EINVAL, A.block_tables = NULL, "block_tables", NO, NO, NO)               \
    F(dtype_f8, 10, TL_EINVAL, V.dtype = TL_F8_E4M3, "dtype", 3, NO, NO)                           \
    F(dtype_negative, 10, TL_EINVAL, V.dtype = -1, "dtype", -1, NO, NO)                            \
    F(dtype_unknown, 10, TL_EINVAL, V.dtype = INT32_MAX, "dtype", INT32_MAX, NO, NO)               \
    F(blocks_of_0, 10, TL_EINVAL, V.block_tokens = 0, "block_tokens", 0, NO, NO)                   \
    F(blocks_of_less, 10, TL_EINVAL, V.block_tokens = -4, "block_tokens", -4, NO, NO)              \
    F(no_kv_heads, 10, TL_EINVAL, V.n_kv_heads = 0, "n_kv_heads", 0, NO, NO)                       \
    F(negative_kv_heads, 10, TL_EINVAL, V.n_kv_heads = -2, "n_kv_heads", -2, NO, NO)               \
    F(no_dim_k, 10, TL_EINVAL, V.head_dim_k = 0, "head_dim_k", 0, NO, NO)                          \
    F(negative_dim_k, 10, TL_EINVAL, V.head_dim_k = INT64_MIN, "head_dim_k", INT64_MIN, NO, NO)    \
    F(no_dim_v, 10, TL_EINVAL, V.head_dim_v = 0, "head_dim_v", 0, NO, NO)                          \
    F(negative_dim_v, 10, TL_EINVAL, V.head_dim_v = -1, "head_dim_v", -1, NO, NO)                  \
    F(negative_n_blocks, 10, TL_EINVAL, V.n_blocks = -1, "n_blocks", -1, NO, NO)                   \
    F(k_block_back, 10, TL_EINVAL, V.k_block_stride = -40, "stride", -40, NO, NO)                  \
    F(k_head_back, 10, TL_EINVAL, V.k_head_stride = -20, "stride", -20, NO, NO)                    \
    F(k_token_back, 10, TL_EINVAL, V.k_token_stride = INT64_MIN, "stride", INT64_MIN, NO, NO)      \
    F(v_block_back, 10, TL_EINVAL, V.v_block_stride = -24, "stride", -24, NO, NO)                  \
    F(v_head_back, 10, TL_EINVAL, V.v_head_stride = -12, "stride", -12, NO, NO)                    \
    F(v_token_back, 10, TL_EINVAL, V.v_token_stride = -3, "stride", -3, NO, NO)                    \
    F(k_tokens_overlap, 10, TL_EINVAL, V.k_token_stride = 4, "k", 4, NO, NO)                       \
    F(k_tokens_are_one, 10, TL_EINVAL, V.k_token_stride = 0, "k", 0, NO, NO)                       \
    F(k_heads_overlap, 10, TL_EINVAL, V.k_head_stride = 19, "k", 19, NO, NO)                       \
    F(k_heads_are_one, 10, TL_EINVAL, V.k_head_stride = 0, "k", 0, NO, NO)                         \
    F(k_heads_are_tokens, 10, TL_EINVAL, V.k_head_stride = V.k_token_stride, "k", 5, NO, NO)       \
    F(k_blocks_overlap, 10, TL_EINVAL, V.k_block_stride = 39, "k", 39, NO, NO)                     \
    F(k_blocks_are_one, 10, TL_EINVAL, V.k_block_stride = 0, "k", 0, NO, NO)                       \
    F(v_tokens_overlap, 10, TL_EINVAL, V.v_token_stride = 2, "v", 2, NO, NO)                       \
    F(v_heads_overlap, 10, TL_EINVAL, V.v_head_stride = 11, "v", 11, NO, NO)                       \
    F(v_blocks_overlap, 10, TL_EINVAL, V.v_block_stride = 23, "v", 23, NO, NO)                     \
    F(v_blocks_are_one, 10, TL_EINVAL, V.v_block_stride = 0, "v", 0, NO, NO)                       \
    F(impossible_n_blocks, 10, TL_EINVAL, V.n_blocks = INT64_MAX, "view", NO, NO, NO)              \
    F(impossible_n_blocks_by_bytes, 10, TL_EINVAL, V.n_blocks = INT64_C(1) << 57, "view", NO, NO,  \
      NO)                                                                                          \
    F(impossible_k_block_stride, 10, TL_EINVAL, V.k_block_stride = INT64_MAX, "view", NO, NO, NO)  \
    F(impossible_k_head_stride, 10, TL_EINVAL, V.k_head_stride = INT64_MAX, "view", NO, NO, NO)    \
    F(impossible_v_block_stride, 10, TL_EINVAL, V.v_block_stride = INT64_MAX / 16, "view", NO, NO, \
      NO)                                                                                          \
    F(impossible_v_token_stride, 10, TL_EINVAL, V.v_token_stride = INT64_MAX / 3, "view", NO, NO,  \
      NO)                                                                                          \
    F(impossible_block_tokens, 10, TL_EINVAL, V.block_tokens = INT64_MAX, "view", NO, NO, NO)      \
    F(impossible_dim_k, 10, TL_EINVAL, V.head_dim_k = INT64_MAX, "view", NO, NO, NO)               \
    F(impossible_dim_v, 10, TL_EINVAL, V.head_dim_v = INT64_MAX, "view", NO, NO, NO)               \
    F(view_of_size_0, 10, TL_EINVAL, V.size = 0, "size", 0, NO, NO)                                \
    F(view_of_an_earlier_size, 10, TL_EINVAL, V.size = 112, "size", 112, NO, NO)                   \
    F(view_of_a_later_size, 10, TL_EINVAL, V.size += 8, "size", sizeof(tl_kv_view) + 8, NO, NO)    \
    F(k_scale_of_f32, 10, TL_EINVAL, V.k_scale = M->q, "scale", NO, NO, NO)                        \
    F(v_scale_of_f32, 10, TL_EINVAL, V.v_scale = M->q, "scale", NO, NO, NO)                        \
    F(negative_B, 10, TL_EINVAL, A.B = -1, "B", -1, NO, NO)                                        \
    F(smallest_B, 10, TL_EINVAL, A.B = INT64_MIN, "B", INT64_MIN, NO, NO)                          \
    F(no_entries, 10, TL_EINVAL, A.table_stride = 0, "table_stride", 0, NO, NO)                    \
    F(negative_entries, 10, TL_EINVAL, A.table_stride = -13, "table_stride", -13, NO, NO)          \
    F(scale_nan, 10, TL_EINVAL, A.scale = NAN, "scale", NO, NO, NO)                                \
    F(softcap_negative, 10, TL_EINVAL, A.logits_softcap = -30, "softcap", -30, NO, NO)             \
    F(softcap_tiny_negative, 10, TL_EINVAL, A.logits_softcap = -0x1p-149f, "softcap", NO, NO, NO)  \
    F(softcap_infinite, 10, TL_EINVAL, A.logits_softcap = INFINITY, "softcap", NO, NO, NO)         \
    F(softcap_nan, 10, TL_EINVAL, A.logits_softcap = NAN, "softcap", NO, NO, NO)                   \
    F(H_zero, 20, TL_ESHAPE, A.H = 0, "H", 0, NO, NO)                                              \
    F(H_negative, 20, TL_ESHAPE, A.H = -4, "H", -4, NO, NO)                                        \
    F(H_smallest, 20, TL_ESHAPE, A.H = INT64_MIN, "H", INT64_MIN, NO, NO)                          \
    F(H_uneven, 20, TL_ESHAPE, A.H = 3, "H", 3, BAD_HKV, NO)                                       \
    F(H_below_Hkv, 20, TL_ESHAPE, A.H = 1, "H", 1, BAD_HKV, NO)                                    \
    F(out_heads_overlap, 30, TL_EINVAL, A.out_head_stride = 2, "out", 2, NO, NO)                   \
    F(out_heads_are_one, 30, TL_EINVAL, A.out_head_stride = 0, "out", 0, NO, NO)                   \
    F(out_tokens_overlap, 30, TL_EINVAL, A.out_token_stride = 11, "out", 11, NO, NO)               \
    F(out_tokens_are_one, 30, TL_EINVAL, A.out_token_stride = 0, "out", 0, NO, NO)                 \
    F(out_tokens_are_heads, 30, TL_EINVAL, A.out_token_stride = BAD_DV, "out", BAD_DV, NO, NO)     \
    F(impossible_B, 30, TL_EINVAL, A.B = INT64_MAX, "B", INT64_MAX, NO, NO)                        \
    F(impossible_B_by_bytes, 30, TL_EINVAL, A.B = INT64_C(1) << 60, "B", INT64_C(1) << 60, NO, NO) \
    F(impossible_table_stride, 30, TL_EINVAL, A.table_stride = INT64_MAX, "tables", INT64_MAX, NO, \
      NO)                                                                                          \
    F(impossible_table_stride_by_bytes, 30, TL_EINVAL, A.table_stride = INT64_C(1) << 60,          \
      "tables", INT64_C(1) << 60, NO, NO)                                                          \
    F(impossible_q_token_stride, 30, TL_EINVAL, A.q_token_stride = INT64_MAX, "q", INT64_MAX, NO,  \
      NO)                                                                                          \
    F(impossible_q_way, 30, TL_EINVAL, A.q_token_stride = (int64_t)(UINT64_MAX / 5 + 1), "q",      \
      UINT64_MAX / 5 + 1, NO, NO)                                                                  \
    F(impossible_q_head_stride, 30, TL_EINVAL, A.q_head_stride = INT64_C(1) << 61, "q",            \
      INT64_C(1) << 61, NO, NO)                                                                    \
    F(impossible_out_token_stride, 30, TL_EINVAL, A.out_token_stride = INT64_C(1) << 61, "out",    \
      INT64_C(1) << 61, NO, NO)                                                                    \
    F(impossible_out_head_stride, 30, TL_EINVAL, A.out_head_stride = INT64_MAX, "out", INT64_MAX,  \
      NO, NO)                                                                                      \
    F(impossible_H, 30, TL_EINVAL, A.H = INT64_C(1) << 60, "", INT64_C(1) << 60, NO, NO)           \
    F(workspace_short, 30, TL_EINVAL, A.workspace = M->work;                                       \
      A.workspace_bytes = 8, "workspace", 8, NO, NO)                                               \
    F(workspace_of_nothing, 30, TL_EINVAL, A.workspace = M->work;                                  \
      A.workspace_bytes = 0, "workspace", 0, NO, NO)                                               \
    F(workspace_odd, 30, TL_EINVAL, A.workspace = (char *)M->work - 2, "workspace", NO, NO, NO)    \
    F(foreign_isa, 40, TL_EUNSUPPORTED, (void)x;                                                   \
      tl_kernels_select("abacus"), "abacus", NO, NO, NO)                                           \
    F(cu_begins_at_1, 50, TL_EINVAL, M->cu[0] = 1, "cu_seqlens_q", 1, NO, NO)                      \
    F(cu_begins_below_0, 50, TL_EINVAL, M->cu[0] = -1, "cu_seqlens_q", -1, NO, NO)                 \
    F(s0_ctx_below_rows, 51, TL_EINVAL, M->ctx[0] = 2, "ctx_len", 0, 2, 3)                         \
    F(s0_ctx_negative, 51, TL_EINVAL, M->ctx[0] = INT32_MIN, "ctx_len", 0, INT32_MIN, NO)          \
    F(s0_ctx_too_long, 52, TL_EINVAL, M->ctx[0] = BAD_TABLE * BAD_TOKENS + 1, "ctx_len", 0, 53,    \
      NO)                                                                                          \
    F(s0_entry_12, 53, TL_EINVAL, M->tables[12] = BAD_BLOCKS, "", 0, 12, BAD_BLOCKS)               \
    F(s1_decreases, 60, TL_EINVAL, M->cu[2] = 2, "cu_seqlens_q", 2, 3, NO)                         \
    F(s1_decreases_below_0, 60, TL_EINVAL, M->cu[2] = INT32_MIN, "cu_seqlens_q", 2, INT32_MIN, 3)  \
    F(s1_ctx_below_rows, 61, TL_EINVAL, M->ctx[1] = 0, "ctx_len", 1, 0, NO)                        \
    F(s1_ctx_longest, 62, TL_EINVAL, M->ctx[1] = INT32_MAX, "ctx_len", 1, INT32_MAX, NO)           \
    F(s1_entry_0, 63, TL_EINVAL, M->tables[BAD_TABLE] = BAD_BLOCKS, "", 1, 0, BAD_BLOCKS)          \
    F(s1_entry_8, 64, TL_EINVAL, M->tables[BAD_TABLE + 8] = UINT32_MAX, "", 1, 8, UINT32_MAX)      \
    F(s1_entry_11, 65, TL_EINVAL, M->tables[BAD_TABLE + 11] = 0x80000000u, "", 1, 11, 0x80000000u) \
    F(s2_ctx_below_0, 71, TL_EINVAL, M->ctx[2] = -1, "ctx_len", 2, -1, NO)                         \
    F(s3_decreases, 80, TL_EINVAL, M->cu[4] = 3, "cu_seqlens_q", 4, 3, NO)                         \
    F(s3_ctx_below_rows, 81, TL_EINVAL, M->ctx[3] = 1, "ctx_len", 3, 1, 2)                         \
    F(s3_too_many_rows, 81, TL_EINVAL, M->cu[4] = INT32_MAX;                                       \
      A.workspace = NULL, "ctx_len", 3, 52, INT32_MAX - 4)                                         \
    F(s3_entry_0, 83, TL_EINVAL, M->tables[3 * BAD_TABLE] = INT32_MAX, "", 3, 0, INT32_MAX)        \
    F(out_is_q, 90, TL_EINVAL, A.out = M->q, "out", NO, NO, NO)                                    \
    F(out_ends_in_q, 90, TL_EINVAL, A.out = M->q - BAD_OUT + 1, "out", NO, NO, NO)                 \
    F(out_begins_in_q, 90, TL_EINVAL, A.out = M->space_1 - 1, "out", NO, NO, NO)                   \
    F(out_ends_in_k, 90, TL_EINVAL, A.out = M->k - BAD_OUT + 1, "out", NO, NO, NO)                 \
    F(out_begins_in_k, 90, TL_EINVAL, A.out = M->space_2 - 1, "out", NO, NO, NO)                   \
    F(out_in_v, 90, TL_EINVAL, A.out = M->v + 30, "out", NO, NO, NO)                               \
    F(out_begins_in_v, 90, TL_EINVAL, A.out = M->space_3 - 1, "out", NO, NO, NO)                   \
    F(out_over_slopes, 90, TL_EINVAL, A.out = M->slopes - 5, "out", NO, NO, NO)                    \
    F(out_begins_in_sinks, 90, TL_EINVAL, A.out = M->space_5 - 1, "out", NO, NO, NO)               \
    F(out_ends_in_cu, 90, TL_EINVAL, A.out = (float *)(void *)M->cu - BAD_OUT + 1, "out", NO, NO,  \
      NO)                                                                                          \
    F(out_begins_in_cu, 90, TL_EINVAL, A.out = M->space_6 - 1, "out", NO, NO, NO)                  \
    F(out_over_ctx, 90, TL_EINVAL, A.out = M->space_7 - 30, "out", NO, NO, NO)                     \
    F(out_ends_in_tables, 90, TL_EINVAL, A.out = (float *)(void *)M->tables - BAD_OUT + 1, "out",  \
      NO, NO, NO)                                                                                  \
    F(out_begins_in_tables, 90, TL_EINVAL, A.out = M->space_8 - 1, "out", NO, NO, NO)              \
    F(lse_in_out, 90, TL_EINVAL, A.lse = M->out + 8, "lse", NO, NO, NO)                            \
    F(lse_begins_in_out, 90, TL_EINVAL, A.lse = M->space_9 - 1, "lse", NO, NO, NO)                 \
    F(out_ends_in_lse, 90, TL_EINVAL, A.out = M->lse - BAD_OUT + 1, "out", NO, NO, NO)             \
    F(lse_ends_in_q, 90, TL_EINVAL, A.lse = M->q - BAD_LSE + 1, "lse", NO, NO, NO)                 \
    F(lse_begins_in_q, 90, TL_EINVAL, A.lse = M->space_1 - 1, "lse", NO, NO, NO)                   \
    F(lse_in_k, 90, TL_EINVAL, A.lse = M->k + 100, "lse", NO, NO, NO)                              \
    F(lse_begins_in_v, 90, TL_EINVAL, A.lse = M->space_3 - 1, "lse", NO, NO, NO)                   \
    F(lse_over_slopes, 90, TL_EINVAL, A.lse = M->slopes - 5, "lse", NO, NO, NO)                    \
    F(lse_is_sinks, 90, TL_EINVAL, A.lse = M->sinks, "lse", NO, NO, NO)                            \
    F(lse_is_cu, 90, TL_EINVAL, A.lse = (float *)(void *)M->cu, "lse", NO, NO, NO)                 \
    F(lse_begins_in_ctx, 90, TL_EINVAL, A.lse = M->space_7 - 1, "lse", NO, NO, NO)                 \
    F(lse_ends_in_tables, 90, TL_EINVAL, A.lse = (float *)(void *)M->tables - BAD_LSE + 1, "lse",  \
      NO, NO, NO)                                                                                  \
    F(work_in_out, 90, TL_EINVAL, A.workspace = M->out + 8, "workspace", NO, NO, NO)               \
    F(work_ends_in_out, 90, TL_EINVAL, A.workspace = M->out - BAD_WORK + 1, "workspace", NO, NO,   \
      NO)                                                                                          \
    F(work_ends_in_lse, 90, TL_EINVAL, A.workspace = M->lse - BAD_WORK + 1, "workspace", NO, NO,   \
      NO)                                                                                          \
    F(work_begins_in_lse, 90, TL_EINVAL, A.workspace = M->space_10 - 1, "workspace", NO, NO, NO)   \
    F(work_begins_in_q, 90, TL_EINVAL, A.workspace = M->space_1 - 1, "workspace", NO, NO, NO)      \
    F(work_in_k, 90, TL_EINVAL, A.workspace = M->k, "workspace", NO, NO, NO)                       \
    F(work_begins_in_v, 90, TL_EINVAL, A.workspace = M->space_3 - 1, "workspace", NO, NO, NO)      \
    F(work_over_slopes, 90, TL_EINVAL, A.workspace = M->slopes - 9, "workspace", NO, NO, NO)       \
    F(work_begins_in_sinks, 90, TL_EINVAL, A.workspace = M->space_5 - 1, "workspace", NO, NO, NO)  \
    F(work_begins_in_cu, 90, TL_EINVAL, A.workspace = M->space_6 - 1, "workspace", NO, NO, NO)     \
    F(work_begins_in_ctx, 90, TL_EINVAL, A.workspace = M->space_7 - 1, "workspace", NO, NO, NO)    \
    F(work_begins_in_tables, 90, TL_EINVAL, A.workspace = M->space_8 - 1, "workspace", NO, NO, NO) \
    F(from_inside, 100, TL_EBUSY, x->inside = true, "", NO, NO, NO)

#define F_PUT(name, rank, status, does, word, a, b, c) \
    static void put_##name(struct bad *x)              \
    {                                                  \
        does;                                          \
    }
FAULTS(F_PUT)

#undef A
#define A ((struct bad *)NULL)->args /* for sizeof */
static const struct fault {
    const char *name;
    int rank;
    tl_status want;
    void (*put)(struct bad *);
    const char *word;
    int64_t numbers[3];
} faults[] = {
#define F_ROW(name, rank, status, does, word, a, b, c) \
    {#name, rank, status, put_##name, word, {(int64_t)(a), (int64_t)(b), (int64_t)(c)}},
    FAULTS(F_ROW)};
#undef A
#undef V
#undef M
#define N_FAULTS (sizeof faults / sizeof *faults)

/* Runs a call with one or two faults in it: refused with the status of `first`, nothing written. */
static void check_refused(struct bad *x, const struct fault *first, const struct fault *second)
{
    static struct bad_memory before;
    isa_restore();
    if (second)
        second->put(x);
    first->put(x); /* last, so that the one that decides wins a field both want */
    memcpy(&before, x->m, sizeof before);
    const tl_status got = bad_run(x);
    isa_restore();
    const char *other = second ? second->name : "nothing else";
    CHECK(got == first->want, "%s and %s: got %s, want %s; \"%s\"", first->name, other,
          tl_status_str(got), tl_status_str(first->want), tl_last_error());
    CHECK(error_names(ROWS), "%s and %s: \"%s\"", first->name, other, tl_last_error());
    CHECK(memcmp(&before, x->m, sizeof before) == 0, "%s and %s: something was written",
          first->name, other);
}

static void check_single(struct bad_memory *m, tl_pool *tp, const struct fault *f)
{
    struct bad x;
    bad_fresh(&x, m, tp);
    check_refused(&x, f, NULL);
    CHECK(strstr(tl_last_error() + strlen(ROWS), f->word), "%s: no \"%s\" in \"%s\"", f->name,
          f->word, tl_last_error());
    for (int i = 0; i < 3; i++)
        CHECK(f->numbers[i] == NO || error_mentions(f->numbers[i]), "%s: no %lld in \"%s\"",
              f->name, (long long)f->numbers[i], tl_last_error());
}

static void check_pair(struct bad_memory *m, tl_pool *tp, const struct fault *a,
                       const struct fault *b)
{
    struct bad x;
    char alone_message[TL_LAST_ERROR_CAP];
    bad_fresh(&x, m, tp);
    check_refused(&x, a, NULL);
    snprintf(alone_message, sizeof alone_message, "%s", tl_last_error());
    bad_fresh(&x, m, tp);
    check_refused(&x, a, b);
    /* b may change how many rows there are */
    const size_t n = a->rank == 30 ? strcspn(alone_message, "0123456789") : sizeof alone_message;
    if (a->want == b->want) /* the status cannot tell who decided; the words can */
        CHECK(strncmp(tl_last_error(), alone_message, n) == 0,
              "%s decides before %s: \"%s\" for \"%s\"", a->name, b->name, tl_last_error(),
              alone_message);
}

TEST(every_fault_is_refused_with_its_values)
{
    struct bad_memory *m = guarded(sizeof *m);
    struct bad x;
    tl_pool *tp = make_threads(2);
    bad_fresh(&x, m, tp);
    CHECK_STATUS(bad_run(&x), TL_OK); /* without faults all is in order */
    CHECK(!all_paint(m->out, BAD_OUT) && !all_paint(m->lse, BAD_LSE), "a good call wrote nothing");
    for (size_t i = 0; i < N_FAULTS; i++)
        check_single(m, tp, &faults[i]);
    tl_pool_destroy(tp);
    guarded_free(m, sizeof *m);
}

TEST(of_two_faults_the_one_listed_first_decides)
{
    struct bad_memory *m = guarded(sizeof *m);
    tl_pool *tp = make_threads(2);
    for (size_t i = 0; i < N_FAULTS; i++)
        for (size_t j = 0; j < N_FAULTS; j++)
            if (faults[i].rank < faults[j].rank)
                check_pair(m, tp, &faults[i], &faults[j]);
    tl_pool_destroy(tp);
    guarded_free(m, sizeof *m);
}

TEST(a_workspace_short_by_a_byte)
{
    struct bad_memory *m = guarded(sizeof *m);
    for (int threads = 1; threads <= 2; threads++) {
        tl_pool *tp = make_threads(threads);
        struct bad x;
        bad_fresh(&x, m, tp);
        const size_t need = tl_paged_attn_workspace(&x.args);
        CHECK(need == (threads == 1 ? 0 : sizeof m->work), "%zu bytes for %d threads", need,
              threads);
        x.args.workspace_bytes = threads == 1 ? 0 : need - 1;
        CHECK_STATUS(bad_run(&x), threads == 1 ? TL_OK : TL_EINVAL);
        if (threads == 2)
            CHECK(error_names(ROWS) && error_mentions((int64_t)need) &&
                      error_mentions((int64_t)need - 1) && all_paint(m->out, BAD_OUT),
                  "\"%s\"", tl_last_error());
        tl_pool_destroy(tp);
    }
    guarded_free(m, sizeof *m);
}

/* 0 and a message where the bytes cannot be said; what does not bear on them is not looked at. */
TEST(bytes_of_workspace_that_cannot_be_said)
{
    struct bad_memory *m = guarded(sizeof *m);
    tl_pool *tp = make_threads(2);
    struct bad x;
    const uint64_t floats_each = BAD_WORK / BAD_LSE; /* of a row */
    for (int i = 0; i < 13; i++) {
        bad_fresh(&x, m, tp);
        tl_paged_attn_args *a = &x.args;
        if (i == 0)
            a->view = NULL;
        else if (i == 1)
            a->size = 0;
        else if (i == 2)
            a->B = -1;
        else if (i == 3)
            a->H = 0;
        else if (i == 4)
            a->H = INT64_MAX;
        else if (i == 5)
            a->H = INT64_C(1) << 57;
        else if (i == 6)
            x.view.head_dim_v = INT64_MAX;
        else if (i == 7)
            a->B = INT64_MAX, a->cu_seqlens_q = NULL;
        else if (i == 8)
            a->size += 8;
        else if (i == 10) /* rows, their floats and their bytes that wrap to a few */
            a->H = (int64_t)(UINT64_MAX / BAD_ROWS + 1);
        else if (i == 11)
            a->H = (int64_t)(UINT64_MAX / (BAD_ROWS * floats_each) + 1);
        else if (i == 12)
            a->H = (int64_t)(UINT64_MAX / (BAD_ROWS * floats_each * sizeof(float)) + 1);
        tl_set_last_error("no message was set");
        CHECK(tl_paged_attn_workspace(i == 9 ? NULL : a) == 0 &&
                  error_names("tl_paged_attn_workspace"),
              "case %d: \"%s\"", i, tl_last_error());
    }
    bad_fresh(&x, m, tp);
    x.args.q = NULL, x.args.out = NULL, x.args.ctx_lens = NULL, x.args.block_tables = NULL,
    x.args.workspace = NULL, x.view.k = NULL;
    CHECK(tl_paged_attn_workspace(&x.args) == sizeof m->work, "with nothing but what is looked at");
    x.args.cu_seqlens_q = NULL; /* a row a sequence */
    CHECK(tl_paged_attn_workspace(&x.args) == sizeof m->work / BAD_ROWS * BAD_B,
          "without cu_seqlens_q");
    tl_pool_destroy(tp);
    guarded_free(m, sizeof *m);
}

/* Without cu_seqlens_q every sequence has a row, so that no context may be empty. */
TEST(an_empty_context_has_no_row)
{
    struct bad_memory *m = guarded(sizeof *m), before;
    struct bad x;
    static const int32_t bad[] = {0, -1, INT32_MIN, BAD_TABLE * BAD_TOKENS + 1};
    for (int i = 0; i < 4; i++) {
        bad_fresh(&x, m, NULL);
        x.args.cu_seqlens_q = NULL;
        m->ctx[2] = bad[i];
        memcpy(&before, m, sizeof before);
        CHECK_STATUS(bad_run(&x), TL_EINVAL);
        CHECK(error_names(ROWS) && error_mentions(2) && error_mentions(bad[i]), "\"%s\"",
              tl_last_error());
        CHECK(memcmp(&before, m, sizeof before) == 0, "something was written");
    }
    guarded_free(m, sizeof *m);
}

/* Which entries are needed follows from the window and from the first row: garbage before is passed
 * over. */
TEST(a_bad_entry_counts_only_where_a_row_sees)
{
    struct bad_memory *m = guarded(sizeof *m);
    struct bad x;
    for (int64_t window = 1; window <= 60; window++)
        for (int32_t rows = 1; rows <= 3; rows++) {
            bad_fresh(&x, m, NULL);
            for (int i = 0; i < 9; i++) /* positions 0 .. 35 of the first sequence, of 50 */
                m->tables[i] = UINT32_MAX - (uint32_t)i;
            for (int s = 1; s <= BAD_B; s++)
                m->cu[s] = rows;
            x.args.window = window;
            const int64_t first = max64(50 - rows - window + 1, 0); /* that the first row sees */
            const tl_status want = first >= 36 ? TL_OK : TL_EINVAL;
            CHECK(bad_run(&x) == want, "window %lld, %d rows: \"%s\"", (long long)window, rows,
                  tl_last_error());
            CHECK(want == TL_OK ||
                      (error_mentions(first / 4) && error_mentions(UINT32_MAX - first / 4)),
                  "window %lld, %d rows: \"%s\"", (long long)window, rows, tl_last_error());
            CHECK(want == TL_OK || all_paint(m->out, BAD_OUT), "out was written");
        }
    guarded_free(m, sizeof *m);
}

/* Right behind an input, or in front of one, is not in it. */
TEST(outputs_that_only_touch_are_in_order)
{
    struct bad_memory *m = guarded(sizeof *m);
    struct bad x;
    bad_fresh(&x, m, NULL);
    x.args.out = m->space_1, x.args.lse = m->space_2; /* right behind q, right behind k */
    CHECK_STATUS(bad_run(&x), TL_OK);
    bad_fresh(&x, m, NULL);
    x.args.lse = m->out - BAD_LSE; /* right in front of out */
    CHECK_STATUS(bad_run(&x), TL_OK);
    guarded_free(m, sizeof *m);
}

/* A softcap of -0 is one of 0, and every scale but NaN is one. */
TEST(scales_and_caps_at_their_limits)
{
    static const float scales[] = {0, -1, INFINITY, -INFINITY, 0x1p-149f},
                       caps[] = {0, -0.0f, 0x1p-149f, FLT_MAX};
    struct bad_memory *m = guarded(sizeof *m);
    struct bad x;
    for (int i = 0; i < 20; i++) {
        bad_fresh(&x, m, NULL);
        x.args.scale = scales[i / 4], x.args.logits_softcap = caps[i % 4];
        CHECK_STATUS(bad_run(&x), TL_OK);
    }
    guarded_free(m, sizeof *m);
}

/* Inside a range of its own pool it is refused from every worker, without rows or sequences too; on
 * none or another it runs. */
TEST(busy_inside_a_range_of_its_own_pool)
{
    struct bad_memory *m = guarded(sizeof *m);
    for (int threads = 1; threads <= 3; threads += 2) {
        tl_pool *tp = make_threads(threads), *other = make_threads(2);
        struct bad x;
        bad_fresh(&x, m, tp);
        x.inside = true, x.args.B = 0;
        CHECK_STATUS(bad_run(&x), TL_EBUSY);
        bad_fresh(&x, m, tp);
        x.args.workspace = NULL;
        for (int i = 0; i < 2; i++) {
            x.args.tp = i ? other : NULL;
            CHECK_STATUS(run_call(bad_call, &x, tp), TL_OK);
        }
        x.inside = false, x.args.tp = tp;
        CHECK_STATUS(bad_run(&x), TL_OK); /* and the pool is still good */
        tl_pool_destroy(tp), tl_pool_destroy(other);
    }
    guarded_free(m, sizeof *m);
}

/* ---- strides and addresses at their limits ---- */

/* Two sequences of a row and two heads, all in order. */
struct two {
    float q[8], out[8], lse[4], k[16], v[16];
    int32_t ctx[2];
    uint32_t tables[2];
    tl_kv_view view;
    tl_paged_attn_args args;
};

static void two_fresh(struct two *x)
{
    memset(x, 0, sizeof *x);
    x->ctx[0] = x->ctx[1] = 2, x->tables[1] = 1;
    repaint(x->out, 8), repaint(x->lse, 4);
    x->view = (tl_kv_view){.size = sizeof x->view,
                           .k = x->k,
                           .v = x->v,
                           .dtype = TL_F32,
                           .n_blocks = 2,
                           .block_tokens = 2,
                           .n_kv_heads = 2,
                           .head_dim_k = 2,
                           .head_dim_v = 2,
                           .k_block_stride = 8,
                           .k_head_stride = 4,
                           .k_token_stride = 2,
                           .v_block_stride = 8,
                           .v_head_stride = 4,
                           .v_token_stride = 2};
    x->args = (tl_paged_attn_args){.size = sizeof x->args,
                                   .view = &x->view,
                                   .q = x->q,
                                   .out = x->out,
                                   .lse = x->lse,
                                   .q_token_stride = 4,
                                   .q_head_stride = 2,
                                   .out_token_stride = 4,
                                   .out_head_stride = 2,
                                   .B = 2,
                                   .H = 2,
                                   .ctx_lens = x->ctx,
                                   .block_tables = x->tables,
                                   .table_stride = 1,
                                   .scale = 1};
}

/* Whether rows at base + t * token + h * head, two of each and two floats wide, would leave the
 * address space. */
static bool leaves_memory(const float *base, int64_t token, int64_t head)
{
    typedef __int128 wide;
    const wide at = (wide)(uintptr_t)base,
               low = (wide)(token < 0 ? token : 0) + (head < 0 ? head : 0),
               high = (wide)(token > 0 ? token : 0) + (head > 0 ? head : 0) + 2;
    return at + 4 * low < 0 || at + 4 * high > (wide)UINTPTR_MAX + 1;
}

/* Every pair of strides that leaves the address space is refused, whichever of the two does it and
 * wherever the other one would lead back. */
TEST(strides_that_leave_the_address_space)
{
    static const int64_t far[] = {INT64_C(1) << 61,       (INT64_C(1) << 61) - 17, INT64_MAX,
                                  INT64_C(1) << 62,       (INT64_C(1) << 62) - 5,  INT64_MAX / 4,
                                  INT64_MAX / 8 * 7,      INT64_C(3) << 60};
    struct two *x = guarded(sizeof *x);
    int64_t strides[20], n = 0, refused = 0;
    for (int i = 0; i < 8; i++)
        strides[n++] = far[i], strides[n++] = -far[i];
    strides[n++] = INT64_MIN, strides[n++] = 2, strides[n++] = -2, strides[n++] = 0;
    for (int i = 0; i < n * n * 3; i++) {
        const int64_t token = strides[i / 3 / n], head = strides[i / 3 % n];
        const bool is_out = i % 3 == 1, is_states = i % 3 == 2;
        two_fresh(x);
        if (!leaves_memory(is_out ? x->out : x->q, token, head))
            continue;
        *(is_out ? &x->args.out_token_stride : &x->args.q_token_stride) = token;
        *(is_out ? &x->args.out_head_stride : &x->args.q_head_stride) = head;
        float states[16];
        repaint(states, 16);
        const tl_status got = is_states ? tl_paged_attn_states_f32(&x->args, 0, 1, states)
                                        : tl_paged_attn_f32(&x->args);
        CHECK(got == TL_EINVAL && error_names(is_states ? "tl_paged_attn_states_f32" : ROWS),
              "%s: strides %lld and %lld: %s, \"%s\"", is_out ? "out" : "q", (long long)token,
              (long long)head, tl_status_str(got), tl_last_error());
        CHECK(all_paint(x->out, 8) && all_paint(x->lse, 4) && all_paint(states, 16), "written");
        refused++;
    }
    CHECK(refused > 900, "%lld pairs", (long long)refused);
    guarded_free(x, sizeof *x);
}

/* What begins at an address in order and leaves the address space behind it, or before it. */
TEST(arrays_that_wrap_the_address_space)
{
    float *const end = (float *)(UINTPTR_MAX - 15), *const begin = (float *)16;
    struct two *x = guarded(sizeof *x);
    tl_trace trace = {(tl_trace_event *)(UINTPTR_MAX - 15), 1, 9};
    for (int i = 0; i < 13; i++) {
        two_fresh(x);
        tl_paged_attn_args *a = &x->args;
        if (i == 0)
            a->q = end;
        else if (i == 1)
            a->out = end;
        else if (i == 2)
            a->q = begin, a->q_token_stride = -8;
        else if (i == 3)
            a->q = begin, a->q_head_stride = -8;
        else if (i == 4)
            a->out = begin, a->out_token_stride = -8;
        else if (i == 5)
            a->out = begin, a->out_head_stride = -8, a->out_token_stride = 2;
        else if (i == 6)
            a->lse = (float *)(UINTPTR_MAX - 7);
        else if (i == 7)
            a->ctx_lens = (int32_t *)(UINTPTR_MAX - 3);
        else if (i == 8)
            a->cu_seqlens_q = (int32_t *)(UINTPTR_MAX - 7);
        else if (i == 9)
            a->block_tables = (uint32_t *)(UINTPTR_MAX - 3);
        else if (i == 10)
            a->trace = &trace;
        else if (i == 11) /* all of it can be addressed, and is too long */
            a->q = (float *)(UINTPTR_MAX / 2 + 1), a->q_token_stride = INT64_C(1) << 60,
            a->q_head_stride = -(INT64_C(1) << 60);
        else
            x->view.k = end;
        const tl_status got = tl_paged_attn_f32(a);
        CHECK(got == TL_EINVAL && error_names(ROWS), "case %d: %s, \"%s\"", i, tl_status_str(got),
              tl_last_error());
        CHECK(all_paint(x->out, 8) && all_paint(x->lse, 4), "case %d: something was written", i);
    }
    guarded_free(x, sizeof *x);
}

TEST(a_part_of_the_table_and_spans_are_for_states_only)
{
    static const int64_t numbers[] = {1, -1, TL_ATTN_SPLIT, TL_ATTN_STRETCH, INT64_MAX, INT64_MIN};
    struct two *x = guarded(sizeof *x);
    for (int i = 0; i < 12; i++) {
        two_fresh(x);
        *(i % 2 ? &x->args.first_block : &x->args.state_span) = numbers[i / 2];
        CHECK_STATUS(tl_paged_attn_f32(&x->args), TL_EINVAL);
        CHECK(error_names(ROWS) && strstr(tl_last_error(), i % 2 ? "first_block" : "state_span") &&
                  error_mentions(numbers[i / 2]),
              "\"%s\"", tl_last_error());
        CHECK(all_paint(x->out, 8) && all_paint(x->lse, 4), "something was written");
    }
    /* a caller who does not know them has room for something else there */
    for (int i = 0; i < 2; i++) {
        two_fresh(x);
        x->args.size = i ? offsetof(tl_paged_attn_args, first_block)
                         : offsetof(tl_paged_attn_args, trace);
        x->args.first_block = 7, x->args.state_span = 7;
        CHECK_STATUS(tl_paged_attn_f32(&x->args), TL_OK);
    }
    guarded_free(x, sizeof *x);
}

/* A view of no blocks may say any width: 2 + head_dim_v is past INT64_MAX for some. */
TEST(widths_beyond_everything_are_refused)
{
    static const int64_t widths[] = {TL_MAX_HEAD_DIM + 1,    INT64_C(1) << 40, INT64_C(1) << 61,
                                     INT64_MAX - 2,          INT64_MAX - 1,    INT64_MAX};
    struct two *x = guarded(sizeof *x);
    for (int i = 0; i < 24; i++)
        for (int rows = 0; rows < 2; rows++) {
            const int64_t width = widths[i / 4];
            two_fresh(x);
            x->view.n_blocks = rows ? 2 : 0, x->args.B = rows ? 2 : 0;
            *(i % 2 ? &x->view.head_dim_v : &x->view.head_dim_k) = width;
            if (i % 2)
                x->view.v_token_stride = x->view.v_head_stride = x->view.v_block_stride = width;
            else
                x->view.k_token_stride = x->view.k_head_stride = x->view.k_block_stride = width;
            float states[16];
            repaint(states, 16);
            const tl_status got = i / 2 % 2 ? tl_paged_attn_states_f32(&x->args, 0, 1, states)
                                            : tl_paged_attn_f32(&x->args);
            CHECK(got == TL_EUNSUPPORTED || got == TL_EINVAL, "width %lld, %d rows: %s",
                  (long long)width, rows, tl_status_str(got));
            CHECK(all_paint(x->out, 8) && all_paint(states, 16), "something was written");
        }
    guarded_free(x, sizeof *x);
}

/* One wider than the widest, all else in order. */
TEST(head_widths_end_where_the_header_says)
{
    enum { MOST = TL_MAX_HEAD_DIM + 1 };
    float *kv = floats(MOST), *out = painted(MOST), *states = painted(2 + MOST);
    for (int i = 0; i < 4; i++) {
        const int64_t dk = i & 1 ? MOST : MOST - 1, dv = i & 2 ? MOST : MOST - 1;
        struct two x;
        two_fresh(&x);
        x.ctx[0] = 1;
        x.view.k = x.view.v = kv, x.view.n_blocks = x.view.block_tokens = x.view.n_kv_heads = 1;
        x.view.head_dim_k = dk, x.view.head_dim_v = dv;
        x.view.k_token_stride = x.view.k_head_stride = x.view.k_block_stride = dk;
        x.view.v_token_stride = x.view.v_head_stride = x.view.v_block_stride = dv;
        x.args.q = kv, x.args.B = x.args.H = 1, x.args.out = out;
        x.args.q_token_stride = x.args.q_head_stride = dk;
        x.args.out_token_stride = x.args.out_head_stride = dv;
        repaint(out, MOST);
        const tl_status want = i ? TL_EUNSUPPORTED : TL_OK;
        CHECK_STATUS(tl_paged_attn_f32(&x.args), want);
        CHECK(i == 0 || (error_names(ROWS) && error_mentions(MOST)), "\"%s\"", tl_last_error());
        CHECK(i == 0 || (all_paint(out, MOST) && all_paint(x.lse, 4)), "something was written");
        x.args.H = 0; /* a shape decides before */
        CHECK_STATUS(tl_paged_attn_f32(&x.args), TL_ESHAPE);
        x.args.H = 1, x.tables[0] = 5; /* and a table behind */
        CHECK_STATUS(tl_paged_attn_f32(&x.args), i ? TL_EUNSUPPORTED : TL_EINVAL);
    }
    free(kv), painted_free(out, MOST), painted_free(states, 2 + MOST);
}

/* ---- the view of a pool ---- */

TEST(the_view_of_a_pool_names_its_memory)
{
    static const tl_kv_cfg cfgs[] = {{5, 7, 3, 2, 9, TL_F16, TL_KV_FORMAT_V1},
                                     {1, 1, 1, 1, 1, TL_F16, TL_KV_FORMAT_V1},
                                     {9, 16, 2, 8, 64, TL_F16, TL_KV_FORMAT_V1}};
    CHECK(sizeof(tl_kv_view) == 184, "a view of %zu bytes", sizeof(tl_kv_view));
    for (int i = 0; i < 3; i++) {
        const tl_kv_cfg *cfg = &cfgs[i];
        tl_kv_pool *kv = make_pool(cfg);
        for (uint32_t layer = 0; layer < cfg->n_layers; layer++) {
            tl_kv_view *view = guarded(sizeof *view);
            memset(view, 0xA5, sizeof *view);
            view->size = sizeof *view;
            tl_set_last_error("kept");
            CHECK_STATUS(tl_kv_pool_view(kv, layer, view), TL_OK);
            CHECK(strcmp(tl_last_error(), "kept") == 0, "success set the slot: %s",
                  tl_last_error());
            CHECK(view->dtype == TL_F16 && view->reserved == 0, "dtype %d, reserved %u",
                  view->dtype, view->reserved);
            CHECK(view->size == sizeof *view && !view->k_scale && !view->v_scale,
                  "pool %d: size %llu, scales", i, (unsigned long long)view->size);
            CHECK(view->n_blocks == cfg->n_blocks && view->block_tokens == cfg->block_tokens &&
                      view->n_kv_heads == cfg->n_kv_heads && view->head_dim_k == cfg->head_dim &&
                      view->head_dim_v == cfg->head_dim,
                  "pool %d: dimensions", i);
            for (uint32_t id = 0; id < cfg->n_blocks; id++)
                for (int64_t at = 0; at < cfg->n_kv_heads * cfg->block_tokens; at++)
                    for (int is_v = 0; is_v < 2; is_v++) {
                        const int64_t head = at / cfg->block_tokens, slot = at % cfg->block_tokens;
                        const uint16_t *row = (const uint16_t *)(is_v ? view->v : view->k) +
                                              element(view, is_v, id, head, slot);
                        CHECK(row == slot_row(kv, cfg, id, layer, is_v, head, slot),
                              "pool %d, layer %u, block %u, head %lld, slot %lld, %c", i, layer, id,
                              (long long)head, (long long)slot, is_v ? 'V' : 'K');
                    }
            guarded_free(view, sizeof *view);
        }
        tl_kv_pool_destroy(kv);
    }
}

TEST(no_view_of_what_is_not_there)
{
    tl_kv_pool *kv = make_pool(&(const tl_kv_cfg){2, 4, 3, 1, 5, TL_F16, TL_KV_FORMAT_V1});
    tl_kv_view view, before;
    memset(&view, 0xA5, sizeof view);
    view.size = sizeof view;
    memcpy(&before, &view, sizeof before);
    static const uint32_t layers[] = {3, 4, UINT32_MAX, 0x80000000u};
    for (int i = 0; i < 4; i++) {
        CHECK_STATUS(tl_kv_pool_view(kv, layers[i], &view), TL_EINVAL);
        CHECK(error_names("tl_kv_pool_view") && error_mentions(layers[i]) && error_mentions(3),
              "\"%s\"", tl_last_error());
    }
    CHECK_STATUS(tl_kv_pool_view(NULL, 0, &view), TL_EINVAL);
    CHECK(error_names("tl_kv_pool_view") && strstr(tl_last_error(), "kv"), "\"%s\"",
          tl_last_error());
    tl_set_last_error("");
    CHECK_STATUS(tl_kv_pool_view(kv, 0, NULL), TL_EINVAL);
    CHECK(error_names("tl_kv_pool_view"), "\"%s\"", tl_last_error());
    static const uint64_t sizes[] = {0, 8, 112, sizeof view - 8, sizeof view + 8, UINT64_MAX};
    for (int i = 0; i < 6; i++) {
        view.size = before.size = sizes[i];
        CHECK_STATUS(tl_kv_pool_view(kv, 0, &view), TL_EINVAL);
        CHECK(error_names("tl_kv_pool_view") && strstr(tl_last_error(), "size"), "\"%s\"",
              tl_last_error());
    }
    CHECK(memcmp(&view, &before, sizeof view) == 0, "the view was written");
    tl_kv_pool_destroy(kv);
}

CHECK_MAIN()
