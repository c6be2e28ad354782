/* SPDX-License-Identifier: MIT */
/* test_attn_formats.c: attention over K and V of eight bits with their scales, wherever codes and
 * scales lie: every row has the bits of the reference, whatever the call, the memory and the
 * machine; what no row sees is not read; outputs do not lie on scales.
 *
 * Words. case (struct eight): one call with a memory of its own, where every code and scale that no
 * row sees is poison and every array ends at an unmapped page. Where an element lies is worked out
 * from the shape of its array, the view's strides never are.
 * dense: what the rows see of a sequence, f32 [Hkv][ctx][width] and [Hkv][ctx]; NaN elsewhere. */
#include <fenv.h>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "attn_ref.h"

#define MAX_B 8
#define COUNT(array) ((int64_t)(sizeof(array) / sizeof *(array)))
#define PICK(array, rng) ((array)[rng_below(rng, COUNT(array))])

/* ---- a case ---- */

enum codes_at {
    HEADS_FIRST,     /* [blocks, Hkv, b, D] */
    TOKENS_FIRST,    /* [blocks, b, Hkv, D] */
    SIDE_BY_SIDE,    /* [blocks, Hkv, 2, b, D]; Dk and Dv are one */
    HEADS_OUTERMOST, /* [Hkv, blocks, b, D] */
    PADDED,          /* [blocks, Hkv, b, D] with 3, 7 and 5 bytes behind a row, a head, a block */
    STRIPS,          /* of each block K, the scales of K, V, and the scales of V */
    N_CODES,
    CODES_IN_PAGES = N_CODES /* every block begins a page */
};

enum scales_at {
    OF_ROWS,            /* [blocks, Hkv, b] */
    OF_ROWS_BY_TOKEN,   /* [blocks, b, Hkv] */
    OF_ROWS_IN_GAPS,    /* [blocks, Hkv, b], two floats of poison behind each */
    OF_ROWS_BY_HEAD,    /* [Hkv, blocks, b] */
    OF_TOKENS,          /* [blocks, b]: heads share */
    OF_TOKENS_BY_SLOT,  /* [b, blocks] */
    OF_HEADS,           /* [Hkv] */
    OF_BLOCKS,          /* [blocks, Hkv]: the tokens of a block share */
    OF_TENSOR,          /* one */
    N_SCALES,
    SCALES_IN_PAGES = N_SCALES, /* [blocks, Hkv, b], every block begins a page */
    TOKENS_IN_PAGES             /* [b, blocks, Hkv], every slot begins a page */
};

enum kind {
    PLAIN,
    POWERS, /* scales that are powers of two */
    TINY,   /* values and sums among the subnormals */
    WILD    /* here and there a scale or a code that is strange */
};

struct eight_spec {
    int64_t B, H, Hkv, Dk, Dv, b, window;
    int64_t q_len[MAX_B], ctx[MAX_B];
    int64_t shared; /* positions, of whole blocks, in which all sequences begin alike */
    int32_t dtype;
    enum codes_at codes;
    enum scales_at k_scales, v_scales; /* not with STRIPS */
    enum kind kind;
    float softcap;
    bool alibi, sinks;
    uint64_t seed;
};

struct side {
    unsigned char *codes;
    float *scales;
    float *dense[MAX_B], *dense_scales[MAX_B];
};

struct eight {
    struct eight_spec spec;
    int64_t total, longest, n_blocks, table_stride;
    unsigned char *codes; /* of K and V */
    float *scales[2];
    size_t code_bytes, scale_bytes[2];
    struct side side[2];
    uint32_t *tables;
    int32_t *cu, *ctx;
    float *q, *out, *lse, *slopes, *sink_logits, *workspace;
    size_t workspace_bytes;
    tl_kv_view view;
    tl_paged_attn_args args;
    float *want, *want_m, *want_L;
};

static const int32_t eight_dtypes[] = {TL_I8, TL_F8_E4M3};

static int64_t page_bytes(void)
{
    return (int64_t)sysconf(_SC_PAGESIZE);
}

static int64_t round_up(int64_t n, int64_t to)
{
    return (n + to - 1) / to * to;
}

static const char *describe(const struct eight *x)
{
    static char text[512];
    const struct eight_spec *s = &x->spec;
    snprintf(text, sizeof text,
             "%s; B %lld, H %lld, Hkv %lld, Dk %lld, Dv %lld, b %lld, window %lld, dtype %d, codes "
             "%d, scales %d %d, kind %d, softcap %g, alibi %d, sinks %d, shared %lld, q_len %lld "
             "%lld.., ctx %lld %lld.., seed %llu",
             tl_isa_name(), (long long)s->B, (long long)s->H, (long long)s->Hkv, (long long)s->Dk,
             (long long)s->Dv, (long long)s->b, (long long)s->window, s->dtype, (int)s->codes,
             (int)s->k_scales, (int)s->v_scales, (int)s->kind, (double)s->softcap, s->alibi,
             s->sinks, (long long)s->shared, (long long)s->q_len[0], (long long)s->q_len[1],
             (long long)s->ctx[0], (long long)s->ctx[1], (unsigned long long)s->seed);
    return text;
}

/* ---- where it lies ---- */

/* Bytes of a block of STRIPS up to V, and all of them. */
static int64_t strip(const struct eight *x, int64_t D)
{
    return round_up(x->spec.Hkv * x->spec.b * D, 4) + 4 * x->spec.Hkv * x->spec.b;
}

/* Which byte of `codes` is element d of the row of (block, head, slot). */
static int64_t code_at(const struct eight *x, int is_v, int64_t block, int64_t head, int64_t slot,
                       int64_t d)
{
    const struct eight_spec *s = &x->spec;
    const int64_t n = x->n_blocks, H = s->Hkv, b = s->b, D = is_v ? s->Dv : s->Dk,
                  behind_k = is_v * n * H * b * s->Dk;
    const int64_t in_block = (head * b + slot) * D + d;
    switch (s->codes) {
    case HEADS_FIRST: return behind_k + block * H * b * D + in_block;
    case TOKENS_FIRST: return behind_k + ((block * b + slot) * H + head) * D + d;
    case SIDE_BY_SIDE: return (((block * H + head) * 2 + is_v) * b + slot) * D + d;
    case HEADS_OUTERMOST: return behind_k + ((head * n + block) * b + slot) * D + d;
    case PADDED:
        return is_v * n * (H * (b * (s->Dk + 3) + 7) + 5) + block * (H * (b * (D + 3) + 7) + 5) +
               head * (b * (D + 3) + 7) + slot * (D + 3) + d;
    case STRIPS:
        return block * (strip(x, s->Dk) + strip(x, s->Dv)) + is_v * strip(x, s->Dk) + in_block;
    default: {
        const int64_t pages = round_up(H * b * (s->Dk > s->Dv ? s->Dk : s->Dv), page_bytes());
        return (is_v * n + block) * pages + in_block;
    }
    }
}

/* Which float of its array is the scale of (block, head, slot). */
static int64_t scale_at(const struct eight *x, int is_v, int64_t block, int64_t head, int64_t slot)
{
    const struct eight_spec *s = &x->spec;
    const int64_t n = x->n_blocks, H = s->Hkv, b = s->b, page = page_bytes() / 4;
    if (s->codes == STRIPS)
        return block * (strip(x, s->Dk) + strip(x, s->Dv)) / 4 + head * b + slot;
    switch (is_v ? s->v_scales : s->k_scales) {
    case OF_ROWS: return (block * H + head) * b + slot;
    case OF_ROWS_BY_TOKEN: return (block * b + slot) * H + head;
    case OF_ROWS_IN_GAPS: return ((block * H + head) * b + slot) * 3;
    case OF_ROWS_BY_HEAD: return (head * n + block) * b + slot;
    case OF_TOKENS: return block * b + slot;
    case OF_TOKENS_BY_SLOT: return slot * n + block;
    case OF_HEADS: return head;
    case OF_BLOCKS: return block * H + head;
    case OF_TENSOR: return 0;
    case SCALES_IN_PAGES: return block * round_up(H * b, page) + head * b + slot;
    default: return slot * round_up(n * H, page) + block * H + head;
    }
}

static void poison_bytes(unsigned char *p, size_t n)
{
    static const unsigned char codes[] = {0x7F, 0xFF, 0x80, 0x7E, 0xFE, 0x01};
    for (size_t i = 0; i < n; i++)
        p[i] = codes[i % sizeof codes];
}

static void poison_scales(float *p, size_t n)
{
    static const uint32_t words[] = {0x7FC00000, 0x7F800000, 0xFFC00001,
                                     0x7F7FFFFF, 0xFF800000, 0x00000001};
    for (size_t i = 0; i < n; i++)
        p[i] = float_of(words[i % 6]);
}

static void make_memory(struct eight *x)
{
    const struct eight_spec *s = &x->spec;
    const int64_t n = x->n_blocks - 1, h = s->Hkv - 1, b = s->b - 1;
    const bool strips = s->codes == STRIPS, pages = s->codes == CODES_IN_PAGES;
    x->code_bytes = (size_t)(code_at(x, 1, n, h, b, s->Dv - 1) + 1);
    if (strips)
        x->code_bytes = (size_t)(x->n_blocks * (strip(x, s->Dk) + strip(x, s->Dv)));
    if (pages)
        x->code_bytes = (size_t)code_at(x, 1, x->n_blocks, 0, 0, 0);
    x->codes = guarded(x->code_bytes);
    poison_bytes(x->codes, x->code_bytes);
    for (int is_v = 0; is_v < 2; is_v++) {
        x->side[is_v].codes = x->codes;
        if (strips) {
            const int64_t D = is_v ? s->Dv : s->Dk;
            void *at = x->codes + is_v * strip(x, s->Dk) + round_up(s->Hkv * s->b * D, 4);
            x->side[is_v].scales = at;
            for (int64_t block = 0; block <= n; block++)
                poison_scales(x->side[is_v].scales + scale_at(x, is_v, block, 0, 0),
                              (size_t)(s->Hkv * s->b));
            continue;
        }
        int64_t floats_of_all = scale_at(x, is_v, n, h, b) + 1;
        if ((is_v ? s->v_scales : s->k_scales) == SCALES_IN_PAGES)
            floats_of_all = scale_at(x, is_v, x->n_blocks, 0, 0);
        if ((is_v ? s->v_scales : s->k_scales) == TOKENS_IN_PAGES)
            floats_of_all = scale_at(x, is_v, 0, 0, s->b);
        x->scale_bytes[is_v] = (size_t)floats_of_all * 4;
        x->scales[is_v] = x->side[is_v].scales = guarded(x->scale_bytes[is_v]);
        poison_scales(x->scales[is_v], (size_t)floats_of_all);
    }
}

static void make_view(struct eight *x)
{
    const struct eight_spec *s = &x->spec;
    tl_kv_view *v = &x->view;
    *v = (tl_kv_view){.size = sizeof *v,
                      .dtype = s->dtype,
                      .n_blocks = x->n_blocks,
                      .block_tokens = s->b,
                      .n_kv_heads = s->Hkv,
                      .head_dim_k = s->Dk,
                      .head_dim_v = s->Dv};
    const int64_t k0 = code_at(x, 0, 0, 0, 0, 0), v0 = code_at(x, 1, 0, 0, 0, 0);
    v->k = x->codes + k0, v->v = x->codes + v0;
    v->k_block_stride = code_at(x, 0, 1, 0, 0, 0) - k0;
    v->k_head_stride = code_at(x, 0, 0, 1, 0, 0) - k0;
    v->k_token_stride = code_at(x, 0, 0, 0, 1, 0) - k0;
    v->v_block_stride = code_at(x, 1, 1, 0, 0, 0) - v0;
    v->v_head_stride = code_at(x, 1, 0, 1, 0, 0) - v0;
    v->v_token_stride = code_at(x, 1, 0, 0, 1, 0) - v0;
    v->k_scale = x->side[0].scales, v->v_scale = x->side[1].scales;
    v->k_scale_block_stride = scale_at(x, 0, 1, 0, 0);
    v->k_scale_head_stride = scale_at(x, 0, 0, 1, 0);
    v->k_scale_token_stride = scale_at(x, 0, 0, 0, 1);
    v->v_scale_block_stride = scale_at(x, 1, 1, 0, 0);
    v->v_scale_head_stride = scale_at(x, 1, 0, 1, 0);
    v->v_scale_token_stride = scale_at(x, 1, 0, 0, 1);
}

/* ---- its values ---- */

static unsigned char random_eight(const struct eight_spec *s, uint64_t *rng)
{
    if (s->dtype == TL_I8)
        return rng_below(rng, 20) == 0 ? 0x80 : (unsigned char)rng_below(rng, 256);
    if (s->kind == WILD && rng_below(rng, 3000) == 0)
        return rng_below(rng, 2) ? 0x7F : 0xFF;
    const int64_t e = rng_below(rng, 40) == 0 ? rng_below(rng, 15) : rng_below(rng, 9);
    return (unsigned char)((rng_next(rng) >> 40 & 0x87) | (uint64_t)e << 3);
}

static float random_scale(const struct eight_spec *s, uint64_t *rng, bool is_v)
{
    static const float harmless[] = {0.0f, -0.0f, 1e-42f, -1e-40f, 1e-30f},
                       fatal[] = {INFINITY, -INFINITY, NAN, 3e38f, -3e38f};
    const int usual = s->dtype == TL_I8 ? -6 : 0;
    const float size = 1 + 0.9f * rng_unit(rng);
    if (s->kind == POWERS)
        return ldexpf(1, usual - (int)rng_below(rng, 4));
    if (s->kind == TINY && is_v)
        return ldexpf(size, usual - 130 - (int)rng_below(rng, 14));
    if (s->kind == WILD && rng_below(rng, 100) == 0)
        return PICK(fatal, rng);
    if (s->kind == WILD && rng_below(rng, 6) == 0)
        return rng_below(rng, 3) ? PICK(harmless, rng) : ldexpf(-size, usual);
    return ldexpf(size, usual);
}

static int64_t rows_in(const struct eight *x, int64_t s)
{
    return x->cu[s + 1] - x->cu[s];
}

/* The first position that any row of the sequence sees. */
static int64_t first_needed(const struct eight *x, int64_t s)
{
    return rows_in(x, s) ? ref_first_seen(x->ctx[s] - rows_in(x, s), x->spec.window) : x->ctx[s];
}

static uint32_t block_of(const struct eight *x, int64_t s, int64_t j)
{
    return x->tables[s * x->table_stride + j / x->spec.b];
}

static void write_seen(struct eight *x, uint64_t *rng)
{
    const struct eight_spec *sp = &x->spec;
    for (int64_t s = 0; s < sp->B; s++)
        for (int64_t j = first_needed(x, s); j < x->ctx[s]; j++)
            for (int64_t i = 0; i < 2 * sp->Hkv; i++) {
                const int is_v = i % 2;
                const int64_t block = block_of(x, s, j), D = is_v ? sp->Dv : sp->Dk;
                for (int64_t d = 0; d < D; d++)
                    x->codes[code_at(x, is_v, block, i / 2, j % sp->b, d)] = random_eight(sp, rng);
                x->side[is_v].scales[scale_at(x, is_v, block, i / 2, j % sp->b)] =
                    random_scale(sp, rng, is_v);
            }
}

/* After all is written, for rows may share blocks and scales. */
static void gather(struct eight *x)
{
    const struct eight_spec *sp = &x->spec;
    for (int64_t s = 0; s < sp->B; s++)
        for (int is_v = 0; is_v < 2; is_v++) {
            const int64_t T = x->ctx[s], D = is_v ? sp->Dv : sp->Dk, lo = first_needed(x, s);
            float *dense = x->side[is_v].dense[s] = floats(sp->Hkv * T * D),
                  *scales = x->side[is_v].dense_scales[s] = floats(sp->Hkv * T);
            for (int64_t i = 0; i < sp->Hkv * T; i++) {
                const int64_t j = i % T, head = i / T;
                const int64_t block = j < lo ? 0 : block_of(x, s, j);
                scales[i] = j < lo ? NAN
                                   : ref_code_scale(sp->dtype,
                                                    x->side[is_v].scales[scale_at(
                                                        x, is_v, block, head, j % sp->b)]);
                for (int64_t d = 0; d < D; d++)
                    dense[i * D + d] =
                        j < lo ? NAN
                               : ref_code(sp->dtype,
                                          x->codes[code_at(x, is_v, block, head, j % sp->b, d)]);
            }
        }
}

/* What row i of a sequence, head h, is to the reference. */
static struct ref_row row_of(const struct eight *x, int64_t s, int64_t i, int64_t h)
{
    const struct eight_spec *sp = &x->spec;
    const int64_t T = x->ctx[s], head = h / (sp->H / sp->Hkv), p = T - rows_in(x, s) + i;
    return (struct ref_row){.q = x->q + ((x->cu[s] + i) * sp->H + h) * sp->Dk,
                            .k = x->side[0].dense[s] + head * T * sp->Dk,
                            .v = x->side[1].dense[s] + head * T * sp->Dv,
                            .ks = x->side[0].dense_scales[s] + head * T,
                            .vs = x->side[1].dense_scales[s] + head * T,
                            .D = sp->Dk,
                            .Dv = sp->Dv,
                            .lo = ref_first_seen(p, sp->window),
                            .hi = p,
                            .p = p,
                            .scale = x->args.scale,
                            .softcap = sp->softcap,
                            .slope = sp->alibi ? x->slopes + h : NULL,
                            .sink = sp->sinks ? x->sink_logits + h : NULL};
}

static void make_wanted(struct eight *x)
{
    const int64_t H = x->spec.H;
    x->want = floats(x->total * H * x->spec.Dv);
    x->want_m = floats(x->total * H), x->want_L = floats(x->total * H);
    for (int64_t s = 0; s < x->spec.B; s++)
        for (int64_t i = 0; i < rows_in(x, s) * H; i++) {
            const struct ref_row row = row_of(x, s, i / H, i % H);
            const int64_t at = x->cu[s] * H + i;
            ref_row(&row, x->want + at * x->spec.Dv, x->want_m + at, x->want_L + at);
        }
}

/* ---- making one ---- */

static void make_tables(struct eight *x, uint64_t *rng)
{
    const struct eight_spec *sp = &x->spec;
    uint32_t *ids = shuffled_ids((uint32_t)x->n_blocks, rng);
    x->table_stride = blocks_of(x->longest, sp->b) + rng_below(rng, 3);
    x->tables = guarded((size_t)(sp->B * x->table_stride) * sizeof *x->tables);
    for (int64_t s = 0, taken = 0; s < sp->B; s++) {
        const int64_t first = first_needed(x, s) / sp->b, end = blocks_of(x->ctx[s], sp->b);
        for (int64_t i = 0; i < x->table_stride; i++) {
            uint32_t *entry = &x->tables[s * x->table_stride + i];
            if (s > 0 && i < sp->shared / sp->b)
                *entry = x->tables[i];
            else
                *entry = i >= first && i < end && rows_in(x, s)
                             ? ids[taken++]
                             : garbage_id(i + s, (uint32_t)x->n_blocks);
        }
    }
    free(ids);
}

static void make_rows(struct eight *x, uint64_t *rng)
{
    const struct eight_spec *sp = &x->spec;
    const int64_t n_q = x->total * sp->H * sp->Dk, n_out = x->total * sp->H * sp->Dv;
    x->q = guarded((size_t)n_q * sizeof *x->q);
    for (int64_t i = 0; i < n_q; i++)
        x->q[i] = 2 * rng_unit(rng);
    x->out = painted(n_out), x->lse = painted(x->total * sp->H);
    x->slopes = guarded((size_t)sp->H * 4), x->sink_logits = guarded((size_t)sp->H * 4);
    for (int64_t h = 0; h < sp->H; h++) {
        x->slopes[h] = ldexpf(1 + 0.3f * rng_unit(rng), -(int)(h % 6));
        x->sink_logits[h] = h % 5 == 4 ? -INFINITY : 3 * rng_unit(rng);
    }
    x->args = (tl_paged_attn_args){.size = sizeof x->args,
                                   .q = x->q,
                                   .out = x->out,
                                   .lse = x->lse,
                                   .q_token_stride = sp->H * sp->Dk,
                                   .q_head_stride = sp->Dk,
                                   .out_token_stride = sp->H * sp->Dv,
                                   .out_head_stride = sp->Dv,
                                   .B = sp->B,
                                   .H = sp->H,
                                   .cu_seqlens_q = x->cu,
                                   .ctx_lens = x->ctx,
                                   .block_tables = x->tables,
                                   .table_stride = x->table_stride,
                                   .window = sp->window,
                                   .alibi_slopes = sp->alibi ? x->slopes : NULL,
                                   .sink_logits = sp->sinks ? x->sink_logits : NULL,
                                   .scale = 1 / sqrtf((float)sp->Dk),
                                   .logits_softcap = sp->softcap};
}

static struct eight *eight_make(const struct eight_spec *spec)
{
    uint64_t rng = spec->seed * 0x9E3779B97F4A7C15u + 3;
    struct eight *x = must_alloc(sizeof *x);
    x->spec = *spec;
    if (spec->codes == SIDE_BY_SIDE)
        x->spec.Dv = spec->Dk;
    x->cu = guarded((size_t)(spec->B + 1) * sizeof *x->cu);
    x->ctx = guarded((size_t)spec->B * sizeof *x->ctx);
    x->cu[0] = 0, x->n_blocks = 2;
    for (int64_t s = 0; s < spec->B; s++) {
        x->total += spec->q_len[s];
        x->cu[s + 1] = (int32_t)x->total, x->ctx[s] = (int32_t)spec->ctx[s];
        x->longest = max64(x->longest, spec->ctx[s]);
        x->n_blocks += blocks_of(spec->ctx[s], spec->b);
    }
    make_memory(x);
    make_view(x);
    make_tables(x, &rng);
    make_rows(x, &rng);
    write_seen(x, &rng);
    gather(x);
    make_wanted(x);
    x->args.view = &x->view;
    return x;
}

static void eight_free(struct eight *x)
{
    guarded_free(x->codes, x->code_bytes);
    for (int is_v = 0; is_v < 2; is_v++) {
        if (x->scales[is_v])
            guarded_free(x->scales[is_v], x->scale_bytes[is_v]);
        for (int64_t s = 0; s < x->spec.B; s++)
            free(x->side[is_v].dense[s]), free(x->side[is_v].dense_scales[s]);
    }
    guarded_free(x->cu, (size_t)(x->spec.B + 1) * sizeof *x->cu);
    guarded_free(x->ctx, (size_t)x->spec.B * sizeof *x->ctx);
    guarded_free(x->tables, (size_t)(x->spec.B * x->table_stride) * sizeof *x->tables);
    guarded_free(x->q, (size_t)(x->total * x->spec.H * x->spec.Dk) * sizeof *x->q);
    painted_free(x->out, x->total * x->spec.H * x->spec.Dv);
    painted_free(x->lse, x->total * x->spec.H);
    guarded_free(x->slopes, (size_t)x->spec.H * 4);
    guarded_free(x->sink_logits, (size_t)x->spec.H * 4);
    free(x->want), free(x->want_m), free(x->want_L);
    free(x);
}

/* ---- running one ---- */

static tl_pool *threads(int n)
{
    static tl_pool *made[8];
    if (!made[n])
        made[n] = make_threads(n);
    return made[n];
}

static void check_out(const struct eight *x, const char *how)
{
    const int64_t rows = x->total * x->spec.H;
    CHECK_SAME(x->out, x->want, rows * x->spec.Dv, "%s, %s", how, describe(x));
    for (int64_t r = 0; r < rows; r++)
        CHECK(lse_close(x->lse[r], x->want_m[r], x->want_L[r]), "%s: lse %.9g, m %.9g, L %.9g: %s",
              how, (double)x->lse[r], (double)x->want_m[r], (double)x->want_L[r], describe(x));
    CHECK(rim_intact(x->out) && rim_intact(x->lse), "%s wrote a rim: %s", how, describe(x));
}

static void run_whole(struct eight *x, int n_threads)
{
    tl_paged_attn_args args = x->args;
    args.tp = n_threads > 1 ? threads(n_threads) : NULL;
    const size_t bytes = tl_paged_attn_workspace(&args);
    float *workspace = bytes ? guarded(bytes) : NULL;
    args.workspace = workspace, args.workspace_bytes = bytes;
    repaint(x->out, x->total * x->spec.H * x->spec.Dv), repaint(x->lse, x->total * x->spec.H);
    CHECK_STATUS(tl_paged_attn_f32(&args), TL_OK);
    if (workspace)
        guarded_free(workspace, bytes);
    check_out(x, n_threads > 1 ? "several threads" : "one thread");
}

/* In two parts, the second from split `cut` on, and merged. */
static void run_pieces(struct eight *x, int64_t cut, int64_t span, int n_threads)
{
    const int64_t unit = span / TL_ATTN_SPLIT, n_rows = x->total * x->spec.H,
                  n_splits = round_up(x->longest, span) / TL_ATTN_SPLIT,
                  floats_of_row = 2 + x->spec.Dv;
    tl_paged_attn_args args = x->args;
    tl_attn_part parts[2];
    float *states[2] = {NULL};
    int64_t n_parts = 0;
    args.tp = n_threads > 1 ? threads(n_threads) : NULL;
    args.out = NULL, args.lse = NULL, args.sink_logits = NULL, args.state_span = span;
    cut = min64(cut / unit * unit, n_splits);
    for (int i = 0; i < 2; i++) {
        const int64_t first = i ? cut : 0, n = i ? n_splits - cut : cut;
        if (n == 0)
            continue;
        states[i] = painted(n_rows * n / unit * floats_of_row);
        CHECK_STATUS(tl_paged_attn_states_f32(&args, first, n, states[i]), TL_OK);
        parts[n_parts++] = (tl_attn_part){states[i], first, n, span};
    }
    repaint(x->out, n_rows * x->spec.Dv), repaint(x->lse, n_rows);
    CHECK_STATUS(tl_attn_merge_f32(parts, n_parts, n_rows, x->spec.H, x->spec.Dv,
                                   x->args.sink_logits, x->out, x->lse, NULL),
                 TL_OK);
    for (int i = 0; i < 2; i++)
        if (states[i])
            painted_free(states[i], n_rows * (i ? n_splits - cut : cut) / unit * floats_of_row);
    check_out(x, "in pieces");
}

/* By every instruction set, in every way; lse has the same bits in all of them. */
static void run_everywhere(struct eight *x)
{
    const int64_t n = x->total * x->spec.H;
    float *lse = NULL;
    uint64_t rng = x->spec.seed;
    for (int isa = 0; isa_select(isa); isa++)
        for (int way = 0; way < 3; way++) {
            if (way < 2)
                run_whole(x, way ? 3 : 1);
            else
                run_pieces(x, rng_below(&rng, blocks_of(x->longest, TL_ATTN_SPLIT) + 1),
                           x->spec.seed % 2 ? TL_ATTN_SPLIT : TL_ATTN_STRETCH, isa ? 1 : 3);
            if (!lse) {
                lse = floats(n);
                memcpy(lse, x->lse, (size_t)n * sizeof *lse);
            }
            CHECK_SAME(x->lse, lse, n, "lse, way %d: %s", way, describe(x));
        }
    free(lse);
}

static void check_case(const struct eight_spec *spec)
{
    struct eight *x = eight_make(spec);
    run_everywhere(x);
    eight_free(x);
}

/* A small case around what a test holds fixed. */
static struct eight_spec random_spec(uint64_t seed)
{
    static const int64_t widths[] = {1, 3, 7, 8, 15, 16, 17, 24, 31, 32, 33, 40, 64, 70};
    static const int64_t sizes[] = {1, 2, 3, 5, 8, 15, 16, 17, 24, 32, 33, 48, 64, 100};
    uint64_t rng = seed * 0x9E3779B97F4A7C15u + 5;
    struct eight_spec s = {.B = 1 + rng_below(&rng, 3), .seed = seed};
    s.dtype = PICK(eight_dtypes, &rng);
    s.Hkv = 1 + rng_below(&rng, 3), s.H = s.Hkv * (1 + rng_below(&rng, 5));
    s.Dk = PICK(widths, &rng), s.Dv = PICK(widths, &rng), s.b = PICK(sizes, &rng);
    s.codes = (enum codes_at)rng_below(&rng, N_CODES);
    s.k_scales = (enum scales_at)rng_below(&rng, N_SCALES);
    s.v_scales = (enum scales_at)rng_below(&rng, N_SCALES);
    for (int64_t i = 0; i < s.B; i++) {
        s.ctx[i] = 1 + rng_below(&rng, 70);
        s.q_len[i] = 1 + rng_below(&rng, min64(s.ctx[i], 4));
    }
    s.window = rng_below(&rng, 4) == 0 ? 1 + rng_below(&rng, 60) : 0;
    s.alibi = rng_below(&rng, 4) == 0, s.sinks = rng_below(&rng, 4) == 0;
    s.softcap = rng_below(&rng, 4) == 0 ? 3 : 0;
    return s;
}

static bool is_full(void)
{
    const char *wanted = getenv("PARITY_FULL");
    return wanted && strcmp(wanted, "1") == 0;
}

/* ---- bits ---- */

TEST(every_code_widens_as_the_format_says)
{
    /* one position, one row: p is 1, so that out is code times scale, and the scale is 1; NaN in
     * either half of a cache line */
    for (int i = 0; i < 4; i++)
        for (int isa = 0; isa_select(isa); isa++)
            for (int64_t Dv = 1; Dv <= 256; Dv += Dv == 1 ? 254 : 1) {
                unsigned char codes[256];
                const float one = 1, q = 0;
                const int32_t ctx = 1;
                const uint32_t table = 0;
                float out[256];
                for (int c = 0; c < 256; c++)
                    codes[(c + i / 2 * 40) % 256] = (unsigned char)(255 - c);
                const tl_kv_view view = {.size = sizeof view,
                                         .k = codes + 130,
                                         .v = codes,
                                         .dtype = eight_dtypes[i % 2],
                                         .n_blocks = 1,
                                         .block_tokens = 1,
                                         .n_kv_heads = 1,
                                         .head_dim_k = 1,
                                         .head_dim_v = Dv,
                                         .k_scale = &one,
                                         .v_scale = &one};
                const tl_paged_attn_args args = {.size = sizeof args,
                                                 .view = &view,
                                                 .q = &q,
                                                 .out = out,
                                                 .B = 1,
                                                 .H = 1,
                                                 .ctx_lens = &ctx,
                                                 .block_tables = &table,
                                                 .table_stride = 1,
                                                 .scale = 1};
                CHECK_STATUS(tl_paged_attn_f32(&args), TL_OK);
                for (int64_t c = 0; c < Dv; c++) {
                    const unsigned char code = codes[c];
                    const float value = eight_dtypes[i % 2] == TL_I8
                                            ? (float)(int8_t)code
                                            : 256 * ref_code(TL_F8_E4M3, code);
                    CHECK_BITS(out[c], ref_canon(value + 0.0f), "%s, dtype %d, code %02X",
                               tl_isa_name(), eight_dtypes[i % 2], code);
                }
            }
}

TEST(every_layout_of_codes_and_scales)
{
    for (int codes = 0; codes < N_CODES; codes++)
        for (int scales = 0; scales < N_SCALES; scales++)
            for (int i = 0; i < 2; i++) {
                static const int64_t sizes[] = {16, 17, 32, 100, 3, 64, 1};
                struct eight_spec s = random_spec((uint64_t)(100 + 20 * codes + scales));
                s.codes = (enum codes_at)codes, s.k_scales = (enum scales_at)scales;
                s.v_scales = (enum scales_at)((scales + codes + 1) % N_SCALES);
                s.dtype = eight_dtypes[i];
                s.Hkv = 2 + scales % 2, s.H = s.Hkv * (1 + codes % 3);
                s.b = sizes[(codes + scales) % 7];
                check_case(&s);
            }
}

TEST(every_head_width)
{
    static const int64_t widths[] = {1,  7,   15,  16,  17,  24,  48,  63,  64,  65,  72, 80,
                                     96, 127, 128, 129, 160, 192, 240, 255, 256, 257, 300, 576};
    for (int64_t w = 0; w < COUNT(widths); w++)
        for (int64_t i = 0; i < 4; i++) {
            struct eight_spec s = random_spec((uint64_t)(1000 + 10 * w + i));
            s.dtype = eight_dtypes[i % 2];
            s.Dk = widths[w], s.Dv = i < 2 ? s.Dk : widths[(w * 7 + 5) % COUNT(widths)];
            s.B = 1, s.Hkv = 1, s.H = 1 + (w + i) % 5, s.q_len[0] = min64(s.q_len[0], 2);
            check_case(&s);
        }
}

/* Beyond what is widened a tile at a time, up to the limit. */
TEST(wide_heads)
{
    static const int64_t widths[] = {1000, 2048, 4095, 4096};
    for (int64_t w = 0; w < COUNT(widths); w++)
        for (int64_t i = 0; i < 4; i++) {
            struct eight_spec s = random_spec((uint64_t)(1500 + 10 * w + i));
            s.dtype = eight_dtypes[i % 2];
            s.Dk = i < 2 ? widths[w] : 16 * (1 + w), s.Dv = i < 2 && w % 2 ? 33 : widths[w];
            s.B = 1, s.Hkv = 1, s.H = 2, s.q_len[0] = 1, s.ctx[0] = min64(s.ctx[0], 36);
            check_case(&s);
        }
}

TEST(every_block_size)
{
    static const int64_t sizes[] = {1,  2,  3,  4,  7,  8,  12, 15, 16,  17, 20,
                                    24, 31, 32, 33, 48, 64, 65, 100, 128, 200};
    for (int64_t z = 0; z < COUNT(sizes); z++)
        for (int64_t i = 0; i < 4; i++) {
            struct eight_spec s = random_spec((uint64_t)(2000 + 10 * z + i));
            s.dtype = eight_dtypes[i % 2], s.b = sizes[z];
            s.ctx[0] = 1 + (sizes[z] * 13 + 29 * i) % 170;
            s.q_len[0] = min64(s.q_len[0], s.ctx[0]);
            if (i < 2) /* where sixteen scales may be one load */
                s.k_scales = OF_ROWS, s.v_scales = OF_TOKENS;
            check_case(&s);
        }
}

TEST(every_group_and_count_of_rows)
{
    static const int64_t groups[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 16};
    for (int64_t g = 0; g < COUNT(groups); g++)
        for (int64_t i = 0; i < 6; i++) {
            struct eight_spec s = random_spec((uint64_t)(3000 + 10 * g + i));
            s.dtype = eight_dtypes[i % 2];
            s.Hkv = 1 + i % 2, s.H = s.Hkv * groups[g];
            s.Dk = 16 + 24 * (i % 3), s.Dv = 64 + 10 * (i % 2), s.B = 2;
            s.ctx[0] = 40 + 5 * i, s.q_len[0] = 1 + 3 * (i % 4);
            check_case(&s);
        }
}

TEST(every_length_around_tiles)
{
    for (int64_t T = 1; T <= 70; T++)
        for (int64_t i = 0; i < 2; i++) {
            struct eight_spec s = random_spec((uint64_t)(4000 + 2 * T + i));
            s.dtype = eight_dtypes[i], s.B = 1, s.H = s.Hkv * 2;
            s.ctx[0] = T, s.q_len[0] = T % 5 == 0 ? T : 1;
            check_case(&s);
        }
}

TEST(windows_sinks_caps_and_slopes)
{
    static const int64_t windows[] = {0, 1, 5, 15, 16, 17, 32, 40, INT64_MAX};
    for (int64_t w = 0; w < COUNT(windows); w++)
        for (int64_t i = 0; i < 8; i++) {
            struct eight_spec s = random_spec((uint64_t)(5000 + 10 * w + i));
            s.dtype = eight_dtypes[(w + i) % 2], s.window = windows[w];
            s.softcap = i & 1 ? 4 : 0, s.alibi = i & 2, s.sinks = i & 4;
            s.ctx[0] = 50 + 7 * i, s.q_len[0] = 1 + 2 * (i % 4);
            check_case(&s);
        }
}

TEST(contexts_over_splits)
{
    static const int64_t lengths[] = {1023, 1024, 1025, 2047, 2049, 3100};
    for (int64_t t = 0; t < COUNT(lengths); t++)
        for (int64_t i = 0; i < 2; i++) {
            struct eight_spec s = random_spec((uint64_t)(6000 + 2 * t + i));
            s.dtype = eight_dtypes[i], s.B = 1 + t % 2, s.Hkv = 1 + t % 2, s.H = 3 * s.Hkv;
            s.Dk = 5 + 9 * t, s.Dv = 20 + t, s.b = t % 2 ? 16 + t : 32;
            s.ctx[0] = lengths[t], s.q_len[0] = 1 + t % 3, s.ctx[1] = 90, s.q_len[1] = 2;
            s.window = t == 4 ? 1500 : 0;
            check_case(&s);
        }
}

TEST(contexts_over_stretches)
{
    static const int64_t lengths[] = {16384, 16385, 33000};
    for (int64_t t = 0; t < COUNT(lengths); t++)
        for (int64_t i = 0; i < 2; i++) {
            struct eight_spec s = random_spec((uint64_t)(6500 + 2 * t + i));
            s.dtype = eight_dtypes[i], s.B = 1, s.Hkv = 1, s.H = 2, s.Dk = 5 + t, s.Dv = 3;
            s.b = 64, s.ctx[0] = lengths[t], s.q_len[0] = 1;
            s.window = t == 2 ? 17000 : 0;
            check_case(&s);
        }
}

TEST(prefixes_that_sequences_share)
{
    for (int64_t i = 0; i < 24; i++) {
        struct eight_spec s = random_spec((uint64_t)(7000 + i));
        s.dtype = eight_dtypes[i % 2], s.B = 2 + i % 5, s.b = i % 3 ? 16 : 20;
        s.H = s.Hkv * (1 + i % 4), s.window = 0;
        s.shared = s.b * (6 + i % 7);
        for (int64_t seq = 0; seq < s.B; seq++)
            s.ctx[seq] = s.shared + 1 + (seq * 17 + i) % 50, s.q_len[seq] = 1 + (i + seq) % 2;
        if (i == 20)
            s.b = 32, s.shared = 32 * 34, s.ctx[0] = 1100, s.ctx[1] = 1200, s.B = 2;
        check_case(&s);
    }
}

TEST(random_cases)
{
    for (int i = 0; i < (is_full() ? 20000 : 300); i++) {
        struct eight_spec s = random_spec((uint64_t)(100000 + i));
        check_case(&s);
    }
}

/* ---- scales ---- */

/* Scales that are powers of two: the f32 values they stand for, in a memory of their own. */
static void check_against_f32(struct eight *x)
{
    const struct eight_spec *sp = &x->spec;
    const int64_t n = x->n_blocks, H = sp->Hkv, b = sp->b, n_out = x->total * sp->H * sp->Dv;
    float *memory[2];
    for (int is_v = 0; is_v < 2; is_v++) {
        const int64_t D = is_v ? sp->Dv : sp->Dk;
        memory[is_v] = guarded((size_t)(n * H * b * D) * 4);
        for (int64_t i = 0; i < n * H * b; i++) {
            const int64_t block = i / (H * b), head = i / b % H, slot = i % b;
            const float scale = ref_code_scale(
                sp->dtype, x->side[is_v].scales[scale_at(x, is_v, block, head, slot)]);
            for (int64_t d = 0; d < D; d++)
                memory[is_v][i * D + d] =
                    scale *
                    ref_code(sp->dtype, x->codes[code_at(x, is_v, block, head, slot, d)]);
        }
    }
    const tl_kv_view view = {.size = sizeof view,
                             .k = memory[0],
                             .v = memory[1],
                             .dtype = TL_F32,
                             .n_blocks = n,
                             .block_tokens = b,
                             .n_kv_heads = H,
                             .head_dim_k = sp->Dk,
                             .head_dim_v = sp->Dv,
                             .k_block_stride = H * b * sp->Dk,
                             .k_head_stride = b * sp->Dk,
                             .k_token_stride = sp->Dk,
                             .v_block_stride = H * b * sp->Dv,
                             .v_head_stride = b * sp->Dv,
                             .v_token_stride = sp->Dv};
    float *out = floats(n_out), *lse = floats(x->total * sp->H);
    tl_paged_attn_args args = x->args;
    args.view = &view, args.out = out, args.lse = lse;
    for (int isa = 0; isa_select(isa); isa++) {
        run_whole(x, 1);
        CHECK_STATUS(tl_paged_attn_f32(&args), TL_OK);
        CHECK_SAME(out, x->out, n_out, "as f32: %s", describe(x));
        CHECK_SAME(lse, x->lse, x->total * sp->H, "lse as f32: %s", describe(x));
    }
    free(out), free(lse);
    guarded_free(memory[0], (size_t)(n * H * b * sp->Dk) * 4);
    guarded_free(memory[1], (size_t)(n * H * b * sp->Dv) * 4);
}

TEST(powers_of_two_have_the_bits_of_the_values_in_f32)
{
    for (int i = 0; i < 120; i++) {
        struct eight_spec s = random_spec((uint64_t)(8000 + i));
        s.kind = POWERS, s.dtype = eight_dtypes[i % 2];
        if (i < 10)
            s.ctx[0] = 1000 + 20 * i, s.H = s.Hkv * 2, s.Dk = min64(s.Dk, 24);
        struct eight *x = eight_make(&s);
        check_against_f32(x);
        eight_free(x);
    }
}

TEST(strange_scales_and_codes)
{
    for (int i = 0; i < 300; i++) {
        struct eight_spec s = random_spec((uint64_t)(9000 + i));
        s.kind = WILD, s.dtype = eight_dtypes[i % 2];
        check_case(&s);
    }
}

TEST(values_among_the_subnormals)
{
    for (int i = 0; i < 40; i++) {
        struct eight_spec s = random_spec((uint64_t)(9500 + i));
        s.kind = TINY, s.dtype = eight_dtypes[i % 2], s.sinks = false;
        check_case(&s);
    }
}

/* One strange scale of K or of V, at one position after another. */
TEST(a_strange_scale_reaches_the_rows_that_see_it)
{
    static const float strange[] = {NAN, INFINITY, -INFINITY, 0.0f, -0.0f, -3.0f, 1e-44f, 3e38f};
    struct eight_spec s = random_spec(9700);
    s.B = 1, s.H = 4, s.Hkv = 2, s.Dk = s.Dv = 18, s.b = 32, s.ctx[0] = 40, s.q_len[0] = 24;
    s.window = 10, s.codes = HEADS_FIRST, s.k_scales = s.v_scales = OF_ROWS;
    s.alibi = s.sinks = false, s.softcap = 0;
    for (int i = 0; i < 2; i++)
        for (int is_v = 0; is_v < 2; is_v++)
            for (int64_t j = 7; j < 40; j += 3) {
                s.dtype = eight_dtypes[i];
                struct eight *x = eight_make(&s);
                const float scale = strange[j % COUNT(strange)];
                x->side[is_v].scales[scale_at(x, is_v, block_of(x, 0, j), 1, j % s.b)] = scale;
                x->side[is_v].dense_scales[0][40 + j] = ref_code_scale(s.dtype, scale);
                free(x->want), free(x->want_m), free(x->want_L);
                make_wanted(x);
                run_everywhere(x);
                eight_free(x);
            }
}

/* ---- memory ---- */

/* Every page of [p, p + n) in which nothing is written, by `used`, is taken away. */
static void unmap_unused(unsigned char *p, size_t n, const unsigned char *used)
{
    const size_t page = (size_t)page_bytes();
    CHECK((uintptr_t)p % page == 0 && n % page == 0, "no whole pages");
    for (size_t at = 0; at < n; at += page) {
        bool is_used = false;
        for (size_t i = at; i < at + page; i++)
            is_used |= used[i];
        if (!is_used && mprotect(p + at, page, PROT_NONE) != 0)
            CHECK(false, "not taken away");
    }
}

static void unmap_unseen(struct eight *x)
{
    const struct eight_spec *sp = &x->spec;
    unsigned char *codes = must_alloc(x->code_bytes),
                  *scales[] = {must_alloc(x->scale_bytes[0]), must_alloc(x->scale_bytes[1])};
    for (int64_t s = 0; s < sp->B; s++)
        for (int64_t j = first_needed(x, s); j < x->ctx[s]; j++)
            for (int64_t i = 0; i < 2 * sp->Hkv; i++) {
                const int64_t block = block_of(x, s, j);
                const int is_v = i % 2;
                const int64_t D = is_v ? sp->Dv : sp->Dk;
                memset(codes + code_at(x, is_v, block, i / 2, j % sp->b, 0), 1, (size_t)D);
                memset(scales[is_v] + 4 * scale_at(x, is_v, block, i / 2, j % sp->b), 1, 4);
            }
    unmap_unused(x->codes, x->code_bytes, codes);
    for (int is_v = 0; is_v < 2; is_v++)
        unmap_unused((unsigned char *)x->scales[is_v], x->scale_bytes[is_v], scales[is_v]);
    free(codes), free(scales[0]), free(scales[1]);
}

TEST(what_no_row_sees_may_not_be_there)
{
    for (int i = 0; i < 60; i++) {
        struct eight_spec s = random_spec((uint64_t)(10000 + i));
        s.dtype = eight_dtypes[i % 2], s.codes = CODES_IN_PAGES;
        s.k_scales = i % 3 ? SCALES_IN_PAGES : TOKENS_IN_PAGES;
        s.v_scales = i % 3 == 2 ? TOKENS_IN_PAGES : SCALES_IN_PAGES;
        s.b = i % 4 == 0 ? 32 : s.b, s.window = i % 2 ? 1 + i : 0;
        s.Dk = min64(s.Dk, 40), s.Dv = min64(s.Dv, 40);
        struct eight *x = eight_make(&s);
        unmap_unseen(x);
        run_everywhere(x);
        eight_free(x);
    }
}

/* A view of the one block that is read, whose K, V and scales each end where memory does. The
 * strides of its blocks and heads are never taken. */
static void check_alone(const struct eight_spec *spec)
{
    struct eight *x = eight_make(spec);
    const int64_t block = block_of(x, 0, 0), b = spec->b;
    void *codes[2], *scales[2];
    for (int is_v = 0; is_v < 2; is_v++) {
        const size_t n = (size_t)(b * (is_v ? spec->Dv : spec->Dk));
        codes[is_v] = guarded(n), scales[is_v] = guarded((size_t)b * 4);
        memcpy(codes[is_v], x->codes + code_at(x, is_v, block, 0, 0, 0), n);
        memcpy(scales[is_v], x->side[is_v].scales + scale_at(x, is_v, block, 0, 0), (size_t)b * 4);
    }
    x->view.k = codes[0], x->view.v = codes[1];
    x->view.k_scale = scales[0], x->view.v_scale = scales[1];
    x->view.n_blocks = 1, x->tables[0] = 0;
    x->view.k_scale_block_stride = x->view.v_scale_head_stride = INT64_MAX;
    run_everywhere(x);
    for (int is_v = 0; is_v < 2; is_v++) {
        guarded_free(codes[is_v], (size_t)(b * (is_v ? spec->Dv : spec->Dk)));
        guarded_free(scales[is_v], (size_t)b * 4);
    }
    eight_free(x);
}

TEST(nothing_past_the_memory_is_read)
{
    for (int64_t D = 1; D <= 340; D += D < 36 ? 1 : 61)
        for (int64_t i = 0; i < 4; i++) {
            struct eight_spec s = random_spec((uint64_t)(11000 + 10 * D + i));
            s.dtype = eight_dtypes[i % 2], s.B = 1, s.Hkv = 1, s.H = 1 + D % 3;
            s.Dk = D, s.Dv = i < 2 ? D : 341 - D;
            s.b = 1 + (9 * D + 16 * i) % 45, s.ctx[0] = s.b, s.q_len[0] = 1, s.window = 0;
            s.codes = HEADS_FIRST, s.k_scales = s.v_scales = OF_ROWS;
            check_alone(&s);
        }
}

/* ---- surroundings ---- */

TEST(float_modes_of_the_caller_do_not_reach_the_bits)
{
    static const int modes[] = {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO, FE_TONEAREST};
    for (int i = 0; i < 16; i++)
        for (int isa = 0; isa_select(isa); isa++) {
            struct eight_spec s = random_spec((uint64_t)(12000 + i));
            s.dtype = eight_dtypes[i % 2], s.kind = i < 8 ? TINY : WILD;
            struct eight *x = eight_make(&s);
            tl_paged_attn_args args = x->args;
            args.tp = i % 3 == 0 ? threads(3) : NULL;
            feclearexcept(FE_ALL_EXCEPT);
            fesetround(modes[i / 2 % 4]);
#if defined(__x86_64__)
            const unsigned before = _mm_getcsr() | 0x8040; /* FTZ and DAZ */
            _mm_setcsr(before);
#endif
            const tl_status got = tl_paged_attn_f32(&args);
#if defined(__x86_64__)
            const unsigned after = _mm_getcsr();
            _mm_setcsr(0x1F80);
            CHECK(after == before, "mode %x became %x", before, after);
#endif
            fesetround(FE_TONEAREST);
            CHECK(got == TL_OK, "%s", tl_status_str(got));
            check_out(x, "in another mode");
            eight_free(x);
        }
}

/* ---- refusals ---- */

static void check_refused(const struct eight *x, tl_status got, const char *words)
{
    CHECK(got == TL_EINVAL && strstr(tl_last_error(), words), "%s \"%s\", want \"%s\"",
          tl_status_str(got), tl_last_error(), words);
    CHECK(all_paint(x->out, x->total * x->spec.H * x->spec.Dv) &&
              all_paint(x->lse, x->total * x->spec.H),
          "an output was written: %s", words);
}

/* Scales that lie where an output does, but for one float before and behind it. */
TEST(outputs_do_not_lie_on_scales)
{
    struct eight_spec s = random_spec(13000);
    s.B = 1, s.Hkv = 2, s.H = 4, s.Dk = s.Dv = 8, s.b = 4, s.ctx[0] = 20, s.q_len[0] = 1;
    s.codes = HEADS_FIRST, s.k_scales = s.v_scales = OF_ROWS, s.dtype = TL_I8;
    struct eight *x = eight_make(&s);
    const int64_t n = scale_at(x, 0, x->n_blocks - 1, 1, 3) + 1, n_out = 4 * 8, n_lse = 4;
    float *memory = painted(n + n_out + n), *states = NULL;
    for (int is_v = 0; is_v < 2; is_v++)
        for (int64_t by = 0; by < 4; by++) {
            /* out ends where the scales begin, or one later; or begins where they end, or one
             * earlier */
            const bool overlaps = by % 2;
            float *const scales = memory + n_out, *const out = by == 0   ? scales - n_out
                                                               : by == 1 ? scales - n_out + 1
                                                               : by == 2 ? scales + n
                                                                         : scales + n - 1;
            for (int64_t i = 0; i < n; i++)
                scales[i] = 1;
            tl_kv_view view = x->view;
            *(is_v ? &view.v_scale : &view.k_scale) = scales;
            tl_paged_attn_args args = x->args;
            args.view = &view, args.out = out;
            const tl_status got = tl_paged_attn_f32(&args);
            if (!overlaps) {
                CHECK_STATUS(got, TL_OK);
                continue;
            }
            CHECK(got == TL_EINVAL && strstr(tl_last_error(), is_v ? "v_scale" : "k_scale") &&
                      strstr(tl_last_error(), "out"),
                  "%s \"%s\"", tl_status_str(got), tl_last_error());
            for (int64_t i = 0; i < n; i++)
                CHECK(scales[i] == 1, "a scale was written");
        }
    /* the others: lse, a workspace, states */
    float *const scales = memory + n_out;
    for (int is_v = 0; is_v < 2; is_v++) {
        const char *name = is_v ? "v_scale" : "k_scale";
        tl_kv_view view = x->view;
        *(is_v ? &view.v_scale : &view.k_scale) = scales;
        tl_paged_attn_args args = x->args;
        args.view = &view;
        repaint(x->out, n_out), repaint(x->lse, n_lse);
        args.lse = scales + n - 1;
        check_refused(x, tl_paged_attn_f32(&args), name);
        args.lse = NULL, args.tp = threads(2);
        args.workspace_bytes = tl_paged_attn_workspace(&args);
        CHECK(args.workspace_bytes > 0, "no workspace");
        float *work = guarded(args.workspace_bytes + (size_t)n * 4);
        *(is_v ? &view.v_scale : &view.k_scale) = work;
        args.workspace = work + n - 1;
        check_refused(x, tl_paged_attn_f32(&args), name);
        args.workspace = NULL, args.workspace_bytes = 0;
        states = work;
        check_refused(x, tl_paged_attn_states_f32(&args, 0, 1, states + n - 1), name);
        CHECK_STATUS(tl_paged_attn_states_f32(&args, 0, 1, states + n), TL_OK);
        guarded_free(work, args.workspace_bytes + (size_t)n * 4);
    }
    painted_free(memory, n + n_out + n);
    eight_free(x);
}

TEST(views_that_are_not_sound_are_refused)
{
    struct eight_spec s = random_spec(13100);
    struct eight *x = eight_make(&s);
    repaint(x->out, x->total * x->spec.H * x->spec.Dv), repaint(x->lse, x->total * x->spec.H);
    tl_kv_view view = x->view;
    tl_paged_attn_args args = x->args;
    args.view = &view;
    view.k_scale = NULL;
    check_refused(x, tl_paged_attn_f32(&args), "k_scale is NULL");
    view = x->view, view.v_scale = NULL;
    check_refused(x, tl_paged_attn_f32(&args), "v_scale is NULL");
    view = x->view, view.v_scale_token_stride = -1;
    check_refused(x, tl_paged_attn_f32(&args), "v_scale_token_stride = -1 is negative");
    view = x->view, view.dtype = TL_F8_E5M2;
    check_refused(x, tl_paged_attn_f32(&args), "dtype = 4");
    eight_free(x);
}

CHECK_MAIN()
