/* SPDX-License-Identifier: MIT */
/* attn_ref.h: attention worked out a second time, one row and one position at a time, and the
 * hostile surroundings it is tested in.
 *
 * ref_row is the arithmetic of ABI.md ("Bits") spelled out in scalar C: the library must equal it
 * bit for bit.
 * ref64_row is plain softmax in double: the library must come close to it. Both share no code with
 * the library but tl_expf and the coefficients of tanh.
 *
 * Words. lane, tile, split, stretch: as in attention.h. case: one decode step (struct paged) in a
 * pool of its own, where every slot that no row sees holds poison, every table entry that must not
 * be read holds garbage, and every array ends at an unmapped page. */
#ifndef TL_ATTN_REF_H
#define TL_ATTN_REF_H

#include <stdbool.h>

#include "check.h"
#include "kernels/kernels.h"
#include "kernels/attn_plan.h"
#include "numerics/coef.h"
#include "tinyllm.h"

#define PAINT 0x7FC0BEEFu /* what outputs hold before a call: a NaN that no kernel writes */
/* painted words in front of every output; behind it the page is unmapped */
#define RIM 16

static inline int64_t min64(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

static inline int64_t max64(int64_t a, int64_t b)
{
    return a > b ? a : b;
}

static inline void *must_alloc(size_t n)
{
    void *p = calloc(1, n ? n : 1);
    if (!p)
        exit(2);
    return p;
}

static inline float *floats(int64_t n)
{
    return must_alloc((size_t)n * sizeof(float));
}

/* ---- the arithmetic ---- */

/* One row of q against the keys of its KV head: k is [positions][D] from position 0, v likewise or
 * Dv wide; positions lo .. hi are seen. Of eight bits k and v are the codes, widened (ref_code). */
struct ref_row {
    const float *q, *k, *v;
    int64_t D, lo, hi;
    float scale;
    const float *sink;  /* or NULL */
    int64_t Dv;         /* 0: D */
    float softcap;      /* 0: none */
    const float *slope; /* of alibi, or NULL */
    int64_t p;          /* where the row stands: read where there is a slope */
    /* [positions], of eight bits: what dots and weights are multiplied by (ref_code_scale) */
    const float *ks, *vs;
};

static inline int64_t ref_width(const struct ref_row *r)
{
    return r->Dv ? r->Dv : r->D;
}

struct ref_state {
    float m, L;
    float *a; /* [Dv] */
};

static inline float ref_max(float a, float b)
{
    return isnan(a) || isnan(b) ? NAN : a > b ? a : b;
}

static inline float ref_fold(const float *lane)
{
    float x[16];
    memcpy(x, lane, sizeof x);
    for (int half = 8; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            x[i] = x[i] + x[i + half];
    return x[0];
}

static inline float ref_tanh(float x)
{
    const float a = fabsf(x), z = a * a;
    if (a < TANH_SMALL) {
        float p = TANH_C0;
        p = fmaf(p, z, TANH_C1);
        p = fmaf(p, z, TANH_C2);
        p = fmaf(p, z, TANH_C3);
        p = fmaf(p, z, TANH_C4);
        p = p * z;
        return copysignf(fmaf(a, p, a), x);
    }
    const float t = tl_expf(2 * a) + 1, q = 2 / t;
    return copysignf(1 - q, x);
}

/* j - p by way of the tile: each step rounds, exact below 2^24. */
static inline float ref_distance(int64_t j, int64_t p)
{
    const int64_t tile = j / TL_ATTN_TILE * TL_ATTN_TILE;
    return (float)(tile - p) + (float)(j - tile);
}

static inline float ref_score(const struct ref_row *r, int64_t j)
{
    float lane[16] = {0};
    for (int64_t d = 0; d < r->D; d++)
        lane[d % 16] = fmaf(r->q[d], r->k[j * r->D + d], lane[d % 16]);
    float dot = ref_fold(lane);
    if (r->ks)
        dot = r->ks[j] * dot;
    float s = r->scale * dot;
    if (r->softcap > 0) {
        const float y = s / r->softcap;
        s = r->softcap * ref_tanh(y);
    }
    return r->slope ? fmaf(*r->slope, ref_distance(j, r->p), s) : s;
}

/* Positions from .. to, all of one split, in tiles of sixteen. */
static inline void ref_split(const struct ref_row *r, int64_t from, int64_t to,
                             struct ref_state *state)
{
    const int64_t Dv = ref_width(r);
    float m = -INFINITY, lane[16] = {0}, *a = state->a;
    memset(a, 0, (size_t)Dv * sizeof *a);
    for (int64_t tile = from / TL_ATTN_TILE; tile <= to / TL_ATTN_TILE; tile++) {
        const int64_t lo = max64(from, tile * TL_ATTN_TILE),
                      hi = min64(to, tile * TL_ATTN_TILE + TL_ATTN_TILE - 1);
        float s[TL_ATTN_TILE], top = m;
        for (int64_t j = lo; j <= hi; j++) {
            s[j - lo] = ref_score(r, j);
            top = ref_max(top, s[j - lo]);
        }
        if (top == -INFINITY)
            continue;
        if (!(top <= m)) {
            const float alpha = tl_expf(m - top);
            for (int i = 0; i < 16; i++)
                lane[i] = lane[i] * alpha;
            for (int64_t d = 0; d < Dv; d++)
                a[d] = a[d] * alpha;
            m = top;
        }
        for (int64_t j = lo; j <= hi; j++) {
            const float p = tl_expf(s[j - lo] - m);
            const float w = r->vs ? p * r->vs[j] : p;
            lane[j % 16] = lane[j % 16] + p;
            for (int64_t d = 0; d < Dv; d++)
                a[d] = fmaf(w, r->v[j * Dv + d], a[d]);
        }
    }
    state->m = m;
    state->L = ref_fold(lane);
}

static inline void ref_merge(struct ref_state *x, const struct ref_state *y, int64_t D)
{
    if (y->m == -INFINITY)
        return;
    if (x->m == -INFINITY) {
        x->m = y->m, x->L = y->L;
        memcpy(x->a, y->a, (size_t)D * sizeof *x->a);
        return;
    }
    const float m = ref_max(x->m, y->m), ax = tl_expf(x->m - m), ay = tl_expf(y->m - m);
    const float yl = ay * y->L;
    x->L = fmaf(ax, x->L, yl);
    for (int64_t d = 0; d < D; d++) {
        const float ya = ay * y->a[d];
        x->a[d] = fmaf(ax, x->a[d], ya);
    }
    x->m = m;
}

static inline void ref_sink(struct ref_state *x, float sink, int64_t D)
{
    if (isnan(sink) || sink == INFINITY) {
        x->m = x->L = NAN;
        for (int64_t d = 0; d < D; d++)
            x->a[d] = NAN;
    } else if (x->m == -INFINITY) {
        x->m = sink, x->L = 1;
    } else {
        const float m = ref_max(x->m, sink), shrink = tl_expf(x->m - m);
        x->L = fmaf(shrink, x->L, tl_expf(sink - m));
        for (int64_t d = 0; m > x->m && d < D; d++)
            x->a[d] = shrink * x->a[d];
        x->m = m;
    }
}

static inline float ref_canon(float x)
{
    return isnan(x) ? float_of(TL_NAN_BITS) : x;
}

/* Positions from .. to, all of one stretch: its splits, merged left to right. */
static inline void ref_stretch(const struct ref_row *r, int64_t from, int64_t to,
                               struct ref_state *state)
{
    const int64_t Dv = ref_width(r);
    struct ref_state next = {-INFINITY, 0, floats(Dv)};
    state->m = -INFINITY, state->L = 0;
    memset(state->a, 0, (size_t)Dv * sizeof *state->a);
    for (int64_t split = from / TL_ATTN_SPLIT; split <= to / TL_ATTN_SPLIT; split++) {
        const int64_t first = split * TL_ATTN_SPLIT;
        ref_split(r, max64(from, first), min64(to, first + TL_ATTN_SPLIT - 1), &next);
        ref_merge(state, &next, Dv);
    }
    free(next.a);
}

/* What the row sees of the positions of one state, a split or a stretch; m = -inf and zeros where
 * it sees nothing. */
static inline void ref_piece(const struct ref_row *r, int64_t first, int64_t span,
                             struct ref_state *state)
{
    const int64_t from = max64(r->lo, first), to = min64(r->hi, first + span - 1);
    state->m = -INFINITY, state->L = 0;
    memset(state->a, 0, (size_t)ref_width(r) * sizeof *state->a);
    if (from <= to)
        (span == TL_ATTN_SPLIT ? ref_split : ref_stretch)(r, from, to, state);
}

static inline void ref_finish(const struct ref_state *x, int64_t D, float *out)
{
    const float inverse = 1.0f / x->L;
    for (int64_t d = 0; d < D; d++)
        out[d] = x->L == 0 ? 0.0f : ref_canon(x->a[d] * inverse);
}

/* out [Dv], and what lse is made of: lse = m + log(L). L == 0: nothing was seen. */
static inline void ref_row(const struct ref_row *r, float *out, float *m, float *L)
{
    const int64_t Dv = ref_width(r);
    float *buffer = floats(2 * Dv);
    struct ref_state run = {-INFINITY, 0, buffer}, next = {-INFINITY, 0, buffer + Dv};
    for (int64_t first = r->lo / TL_ATTN_STRETCH * TL_ATTN_STRETCH; first <= r->hi;
         first += TL_ATTN_STRETCH) {
        ref_piece(r, first, TL_ATTN_STRETCH, &next);
        ref_merge(&run, &next, Dv);
    }
    if (r->sink && *r->sink != -INFINITY)
        ref_sink(&run, *r->sink, Dv);
    ref_finish(&run, Dv, out);
    *m = run.m, *L = run.L;
    free(buffer);
}

/* The logarithm's last bits are the library's own; here it is held to two ulp of itself and one of
 * the sum. */
static inline bool lse_close(float lse, float m, float L)
{
    if (L == 0)
        return lse == -INFINITY;
    if (isnan(m) || isnan(L))
        return float_bits(lse) == TL_NAN_BITS;
    const double log_l = log((double)L), want = (double)m + log_l;
    return fabs((double)lse - want) <= 0x1p-22 * fabs(log_l) + 0x1p-23 * fabs(want);
}

/* Plain softmax in double. */
static inline void ref64_row(const struct ref_row *r, double *out, double *lse)
{
    double top = r->sink ? (double)*r->sink : -INFINITY, sum = 0;
    double *s = must_alloc((size_t)max64(1, r->hi - r->lo + 1) * sizeof *s);
    for (int64_t j = r->lo; j <= r->hi; j++) {
        double dot = 0;
        for (int64_t d = 0; d < r->D; d++)
            dot += (double)r->q[d] * (double)r->k[j * r->D + d];
        s[j - r->lo] = (double)r->scale * dot;
        top = fmax(top, s[j - r->lo]);
    }
    if (r->sink)
        sum = exp((double)*r->sink - top);
    for (int64_t d = 0; d < r->D; d++)
        out[d] = 0;
    for (int64_t j = r->lo; j <= r->hi; j++) {
        const double p = exp(s[j - r->lo] - top);
        sum += p;
        for (int64_t d = 0; d < r->D; d++)
            out[d] += p * (double)r->v[j * r->D + d];
    }
    for (int64_t d = 0; d < r->D; d++)
        out[d] = sum > 0 ? out[d] / sum : 0;
    *lse = sum > 0 ? top + log(sum) : -INFINITY;
    free(s);
}

/* The first position a row at p sees through `window`; no sum that could overflow. */
static inline int64_t ref_first_seen(int64_t p, int64_t window)
{
    return window <= 0 || window > p ? 0 : p - window + 1;
}

/* ---- values ---- */

/* f16 codes left where nothing may be read: NaN of either sign, infinities, the largest number, the
 * smallest. */
static const uint16_t poison_codes[] = {0x7E00, 0xFE01, 0x7C00, 0xFC00, 0x7BFF, 0x0001};
#define N_POISON ((int64_t)(sizeof poison_codes / sizeof *poison_codes))

static inline float ref_widen(uint16_t h)
{
    static float table[65536];
    static bool made;
    for (int i = 0; !made && i < 65536; i++) {
        const int e = i >> 10 & 31, f = i & 1023;
        const float size =
            e == 31 ? (f ? NAN : INFINITY) : ldexpf((float)(e ? 1024 + f : f), (e ? e : 1) - 25);
        table[i] = i >> 15 ? -size : size;
    }
    made = true;
    return table[h];
}

/* An int8 is its integer; an e4m3 2^-8 of its value, which its scale gives back. */
static inline float ref_code(int32_t dtype, uint8_t code)
{
    const int e = code >> 3 & 15, f = code & 7;
    if (dtype == TL_I8)
        return (float)(code < 128 ? code : code - 256);
    const float size = (code & 127) == 127
                           ? NAN
                           : ldexpf((float)(e ? 8 + f : f), (e ? e : 1) - 10 - 8);
    return code >> 7 ? -size : size;
}

static inline float ref_code_scale(int32_t dtype, float scale)
{
    return dtype == TL_I8 ? scale : 256 * scale;
}

static inline size_t dtype_bytes(int32_t dtype)
{
    return dtype == TL_F32 ? 4 : dtype == TL_F16 || dtype == TL_BF16 ? 2 : 1;
}

/* Puts x, which dtype holds exactly. */
static inline void put_value(void *memory, int32_t dtype, int64_t at, float x)
{
    const uint32_t bits = float_bits(x);
    if (dtype == TL_F32) {
        ((float *)memory)[at] = x;
    } else if (dtype == TL_BF16) {
        CHECK((bits & 0xFFFF) == 0, "%a is no bf16", (double)x);
        ((uint16_t *)memory)[at] = (uint16_t)(bits >> 16);
    } else {
        const uint16_t code = tl_f32_to_f16(x);
        CHECK(isnan(x) || ref_widen(code) == x, "%a is no f16", (double)x);
        ((uint16_t *)memory)[at] = code;
    }
}

/* All of a memory of one dtype. */
static inline void poison_memory(void *memory, size_t bytes, int32_t dtype)
{
    static const uint32_t f32[] = {0x7FC00000, 0xFFC00001, 0x7F800000,
                                   0xFF800000, 0x7F7FFFFF, 0x7F800001};
    static const uint16_t bf16[] = {0x7FC0, 0xFFC1, 0x7F80, 0xFF80, 0x7F7F, 0x7F81};
    for (size_t i = 0; i < bytes / dtype_bytes(dtype); i++)
        if (dtype == TL_F32)
            ((uint32_t *)memory)[i] = f32[i % 6];
        else
            ((uint16_t *)memory)[i] = dtype == TL_BF16 ? bf16[i % 6] : poison_codes[i % N_POISON];
}

/* A random sign and fraction, the exponent field in [e_lo, e_hi]: 15 is [1, 2), 0 is subnormal. */
static inline uint16_t random_code(uint64_t *rng, int e_lo, int e_hi)
{
    const uint64_t x = rng_next(rng) >> 20;
    const uint64_t e = (uint64_t)e_lo + (x >> 16) % (uint64_t)(e_hi - e_lo + 1);
    return (uint16_t)((x & 0x8000) | e << 10 | (x & 0x3FF));
}

enum data {
    DATA_PLAIN,
    DATA_STEEP,   /* scores so far apart that most weights vanish */
    DATA_RISING,  /* a new maximum in every tile: each one rescales */
    DATA_TINY,    /* products and sums down among the subnormals */
    DATA_SPECIAL, /* a NaN or an infinity here and there among what is seen */
    N_DATA
};

static inline uint16_t value_code(enum data data, uint64_t *rng, int64_t j, bool is_v)
{
    static const uint16_t special[] = {0x7C00, 0xFC00, 0xFC00, 0x7E00, 0xFD55, 0x8000};
    switch (data) {
    case DATA_STEEP:
        return random_code(rng, is_v ? 8 : 16, is_v ? 16 : 18);
    case DATA_RISING:
        return is_v ? random_code(rng, 8, 16)
                    : tl_f32_to_f16(0.0625f * (float)(j % 1500) + 0.5f * rng_unit(rng));
    case DATA_TINY:
        return random_code(rng, 0, is_v ? 1 : 14);
    case DATA_SPECIAL:
        if (rng_below(rng, 199) == 0)
            return special[rng_below(rng, 6)];
        return random_code(rng, 9, 14);
    default:
        return random_code(rng, is_v ? 8 : 11, is_v ? 16 : 14);
    }
}

static inline float value_q(enum data data, uint64_t *rng)
{
    const float x = 2 * rng_unit(rng);
    return data == DATA_TINY ? x * 0x1p-130f : data == DATA_RISING ? fabsf(x) : x;
}

/* ---- outputs with a painted rim ---- */

static inline float *painted(int64_t n)
{
    float *base = guarded((size_t)(n + RIM) * sizeof(float));
    for (int64_t i = 0; i < n + RIM; i++)
        base[i] = float_of(PAINT);
    return base + RIM;
}

static inline void painted_free(float *p, int64_t n)
{
    guarded_free(p - RIM, (size_t)(n + RIM) * sizeof(float));
}

static inline void repaint(float *p, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        p[i] = float_of(PAINT);
}

static inline bool all_paint(const float *p, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        if (float_bits(p[i]) != PAINT)
            return false;
    return true;
}

static inline bool rim_intact(const float *p)
{
    return all_paint(p - RIM, RIM);
}

static inline bool same_bits(const float *a, const float *b, int64_t n)
{
    return n == 0 || memcmp(a, b, (size_t)n * sizeof *a) == 0;
}

/* The first index where two arrays differ, for messages. */
static inline int64_t first_difference(const float *a, const float *b, int64_t n)
{
    int64_t i = 0;
    while (i < n && float_bits(a[i]) == float_bits(b[i]))
        i++;
    return i;
}

#define CHECK_SAME(got, want, n, ...)                                                 \
    do {                                                                              \
        const float *const a_ = (got), *const b_ = (want);                            \
        const int64_t n_ = (n), at_ = first_difference(a_, b_, n_);                   \
        if (at_ < n_) {                                                               \
            fprintf(stderr, "element %lld of %lld: ", (long long)at_, (long long)n_); \
            CHECK_BITS(a_[at_], b_[at_], __VA_ARGS__);                                \
        }                                                                             \
    } while (0)

/* ---- one decode step in a hostile pool ---- */

/* What a case is made from; zeros stand for 1 layer, scale D ** -0.5 (by scale_given). */
struct paged_spec {
    int64_t B, H, Hkv, D, block_tokens, window;
    int64_t ctx[32];
    uint32_t n_layers, layer;
    enum data data;
    bool scale_given;
    float scale;
    uint64_t seed;
};

struct paged {
    tl_kv_pool *kv;
    tl_kv_cfg cfg;
    uint32_t layer;
    int64_t B, H, Hkv, D, window;
    float scale;
    int32_t max_blocks, *ctx; /* [B] */
    uint32_t *tables;         /* [B,max_blocks] */
    float *q, *out;           /* [B,H,D] */
};

static inline int64_t paged_size(const struct paged *c)
{
    return c->B * c->H * c->D;
}

static inline tl_kv_pool *make_pool(const tl_kv_cfg *cfg)
{
    tl_kv_pool *kv = NULL;
    CHECK_STATUS(tl_kv_pool_create(cfg, &kv), TL_OK);
    return kv;
}

static inline tl_kv_cfg kv_cfg(int64_t n_blocks, int64_t block_tokens, int64_t n_layers,
                               int64_t n_kv_heads, int64_t head_dim)
{
    return (tl_kv_cfg){(uint32_t)n_blocks,   (uint32_t)block_tokens, (uint32_t)n_layers,
                       (uint32_t)n_kv_heads, (uint32_t)head_dim,     TL_F16,
                       TL_KV_FORMAT_V1};
}

/* Where position j of one KV head lives. */
static inline uint16_t *slot_row(const tl_kv_pool *kv, const tl_kv_cfg *cfg, uint32_t id,
                                 uint32_t layer, int is_v, int64_t head, int64_t slot)
{
    uint16_t *slab = tl_kv_block_ptr(kv, id, layer, is_v);
    CHECK(slab, "no slab: block %u, layer %u: %s", id, layer, tl_last_error());
    return slab + (head * cfg->block_tokens + slot) * cfg->head_dim;
}

static inline uint16_t *paged_row(const struct paged *c, int64_t s, int64_t j, int64_t head,
                                  int is_v)
{
    const uint32_t id = c->tables[s * c->max_blocks + j / c->cfg.block_tokens];
    return slot_row(c->kv, &c->cfg, id, c->layer, is_v, head, j % c->cfg.block_tokens);
}

/* Every element of every block, all layers: poison. The blocks are taken, and then given poison by
 * way of their slabs. */
static inline void poison_pool(tl_kv_pool *kv, const tl_kv_cfg *cfg)
{
    const int64_t n = (int64_t)cfg->n_kv_heads * cfg->block_tokens * cfg->head_dim;
    for (uint32_t id = 0; id < cfg->n_blocks; id++)
        for (uint32_t layer = 0; layer < cfg->n_layers; layer++)
            for (int is_v = 0; is_v < 2; is_v++) {
                uint16_t *slab = tl_kv_block_ptr(kv, id, layer, is_v);
                for (int64_t i = 0; i < n; i++)
                    slab[i] = poison_codes[(i + id) % N_POISON];
            }
}

static inline uint32_t *shuffled_ids(uint32_t n, uint64_t *rng)
{
    uint32_t *ids = must_alloc(n * sizeof *ids);
    for (uint32_t i = 0; i < n; i++)
        ids[i] = i;
    for (uint32_t i = n; i > 1; i--) {
        const int64_t j = rng_below(rng, i);
        const uint32_t t = ids[i - 1];
        ids[i - 1] = ids[j], ids[j] = t;
    }
    return ids;
}

static inline uint32_t garbage_id(int64_t i, uint32_t n_blocks)
{
    const uint32_t garbage[] = {UINT32_MAX, 0x80000000u, INT32_MAX, n_blocks, 0};
    return garbage[i % 5];
}

static inline void write_visible(const struct paged *c, int64_t s, enum data data, uint64_t *rng)
{
    for (int64_t j = ref_first_seen(c->ctx[s] - 1, c->window); j < c->ctx[s]; j++)
        for (int64_t head = 0; head < c->Hkv; head++)
            for (int is_v = 0; is_v < 2; is_v++) {
                uint16_t *row = paged_row(c, s, j, head, is_v);
                for (int64_t d = 0; d < c->D; d++)
                    row[d] = value_code(data, rng, j, is_v);
            }
}

static inline int64_t blocks_of(int64_t ctx, int64_t block_tokens)
{
    return (ctx + block_tokens - 1) / block_tokens;
}

static inline struct paged paged_make(const struct paged_spec *spec)
{
    uint64_t rng = spec->seed * 0x9E3779B97F4A7C15u + 1;
    const uint32_t n_layers = spec->n_layers ? spec->n_layers : 1;
    int64_t needed = 0, longest = 0;
    for (int64_t s = 0; s < spec->B; s++) {
        needed += blocks_of(spec->ctx[s], spec->block_tokens);
        longest = max64(longest, blocks_of(spec->ctx[s], spec->block_tokens));
    }
    struct paged c = {.layer = spec->layer,
                      .B = spec->B,
                      .H = spec->H,
                      .Hkv = spec->Hkv,
                      .D = spec->D,
                      .window = spec->window};
    c.cfg = kv_cfg(needed + 3, spec->block_tokens, n_layers, c.Hkv, c.D);
    c.scale = spec->scale_given ? spec->scale : 1 / sqrtf((float)c.D);
    c.max_blocks = (int32_t)(longest + rng_below(&rng, 3));
    c.kv = make_pool(&c.cfg);
    c.ctx = guarded((size_t)c.B * sizeof *c.ctx);
    c.tables = guarded((size_t)(c.B * c.max_blocks) * sizeof *c.tables);
    c.q = guarded((size_t)paged_size(&c) * sizeof *c.q);
    c.out = painted(paged_size(&c));
    uint32_t *ids = must_alloc(c.cfg.n_blocks * sizeof *ids);
    CHECK_STATUS(tl_kv_alloc(c.kv, c.cfg.n_blocks, ids), TL_OK);
    free(ids);
    poison_pool(c.kv, &c.cfg);
    ids = shuffled_ids(c.cfg.n_blocks, &rng);
    for (int64_t s = 0, taken = 0; s < c.B; s++) {
        c.ctx[s] = (int32_t)spec->ctx[s];
        const int64_t first = ref_first_seen(c.ctx[s] - 1, c.window) / spec->block_tokens;
        for (int64_t i = 0; i < c.max_blocks; i++) {
            const bool read = i >= first && i < blocks_of(c.ctx[s], spec->block_tokens);
            c.tables[s * c.max_blocks + i] =
                read ? ids[taken++] : garbage_id(i + s, c.cfg.n_blocks);
        }
        write_visible(&c, s, spec->data, &rng);
    }
    free(ids);
    for (int64_t i = 0; i < paged_size(&c); i++)
        c.q[i] = value_q(spec->data, &rng);
    return c;
}

static inline void paged_free(struct paged *c)
{
    tl_kv_pool_destroy(c->kv);
    guarded_free(c->ctx, (size_t)c->B * sizeof *c->ctx);
    guarded_free(c->tables, (size_t)(c->B * c->max_blocks) * sizeof *c->tables);
    guarded_free(c->q, (size_t)paged_size(c) * sizeof *c->q);
    painted_free(c->out, paged_size(c));
}

/* One sequence's K or V as f32 [Hkv][T][D]; positions its newest row does not see are NaN. */
static inline float *paged_gather(const struct paged *c, int64_t s, int is_v)
{
    const int64_t T = c->ctx[s], lo = ref_first_seen(T - 1, c->window);
    float *dense = floats(c->Hkv * T * c->D);
    for (int64_t head = 0; head < c->Hkv; head++)
        for (int64_t j = 0; j < T; j++) {
            const uint16_t *row = j < lo ? NULL : paged_row(c, s, j, head, is_v);
            for (int64_t d = 0; d < c->D; d++)
                dense[(head * T + j) * c->D + d] = row ? ref_widen(row[d]) : NAN;
        }
    return dense;
}

/* What a step must give, [B,H,D]: the caller frees it. */
static inline float *paged_want(const struct paged *c)
{
    float *want = floats(paged_size(c)), m, L;
    for (int64_t s = 0; s < c->B; s++) {
        float *k = paged_gather(c, s, 0), *v = paged_gather(c, s, 1);
        for (int64_t h = 0; h < c->H; h++) {
            const int64_t at = (s * c->H + h) * c->D, head = h / (c->H / c->Hkv) * c->ctx[s] * c->D;
            const struct ref_row row = {.q = c->q + at,
                                        .k = k + head,
                                        .v = v + head,
                                        .D = c->D,
                                        .scale = c->scale,
                                        .lo = ref_first_seen(c->ctx[s] - 1, c->window),
                                        .hi = c->ctx[s] - 1};
            ref_row(&row, want + at, &m, &L);
        }
        free(k), free(v);
    }
    return want;
}

static inline tl_status paged_call(const struct paged *c, tl_pool *tp)
{
    return tl_paged_attn_decode_f32(c->q, c->kv, c->layer, c->tables, c->max_blocks, c->ctx, c->out,
                                    c->B, c->H, c->Hkv, c->D, c->scale, c->window, tp);
}

/* Runs the step into freshly painted out: TL_OK, all written, the rim left alone. (A row may
 * rightly hold NaN, never the paint.) */
static inline void paged_run(const struct paged *c, tl_pool *tp)
{
    repaint(c->out, paged_size(c));
    CHECK_STATUS(paged_call(c, tp), TL_OK);
    CHECK(rim_intact(c->out), "the rim of out was written");
    for (int64_t i = 0; i < paged_size(c); i++)
        CHECK(float_bits(c->out[i]) != PAINT, "element %lld was not written", (long long)i);
}

#define CHECK_PAGED(c, want, ...) CHECK_SAME((c)->out, want, paged_size(c), __VA_ARGS__)

/* ---- prefill ---- */

struct flash {
    const float *q, *k, *v;
    float *o, *lse;
    int64_t B, H, Hkv, Tq, Tk, D;
    float scale;
    int64_t q_offset;
    int causal;
    int64_t window;
    const float *sinks;
    int64_t Br, Bc;
    tl_arena *scratch;
    tl_pool *tp;
};

static inline tl_status flash_call(const struct flash *f)
{
    return tl_flash_attn_fwd_f32(f->q, f->k, f->v, f->o, f->lse, f->B, f->H, f->Hkv, f->Tq, f->Tk,
                                 f->D, f->scale, f->q_offset, f->causal, f->window, f->sinks, f->Br,
                                 f->Bc, f->scratch, f->tp);
}

static inline int64_t flash_rows(const struct flash *f)
{
    return f->B * f->H * f->Tq;
}

/* Row i of head h of sequence b, as a ref_row. */
static inline struct ref_row flash_row(const struct flash *f, int64_t b, int64_t h, int64_t i)
{
    const int64_t p = f->q_offset + i, head = (b * f->Hkv + h / (f->H / f->Hkv)) * f->Tk * f->D;
    return (struct ref_row){.q = f->q + ((b * f->H + h) * f->Tq + i) * f->D,
                            .k = f->k + (f->Tk ? head : 0),
                            .v = f->v + (f->Tk ? head : 0),
                            .D = f->D,
                            .scale = f->scale,
                            .lo = ref_first_seen(p, f->window),
                            .hi = f->causal ? min64(p, f->Tk - 1) : f->Tk - 1,
                            .sink = f->sinks ? f->sinks + h : NULL};
}

/* Every row of o against ref_row bit for bit, every lse (where there is one) within its
 * tolerance. */
#define CHECK_FLASH(f, ...)                                                                 \
    do {                                                                                    \
        float *const want_row_ = floats((f)->D), m_, L_;                                    \
        for (int64_t r_ = 0; r_ < flash_rows(f); r_++) {                                    \
            const int64_t i_ = r_ % (f)->Tq, h_ = r_ / (f)->Tq % (f)->H,                    \
                          b_seq_ = r_ / (f)->Tq / (f)->H;                                   \
            const struct ref_row row_ = flash_row(f, b_seq_, h_, i_);                       \
            ref_row(&row_, want_row_, &m_, &L_);                                            \
            if (!same_bits((f)->o + r_ * (f)->D, want_row_, (f)->D))                        \
                fprintf(stderr, "sequence %lld, head %lld, row %lld:\n", (long long)b_seq_, \
                        (long long)h_, (long long)i_);                                      \
            CHECK_SAME((f)->o + r_ * (f)->D, want_row_, (f)->D, __VA_ARGS__);               \
            if ((f)->lse && !lse_close((f)->lse[r_], m_, L_)) {                             \
                fprintf(stderr, "row %lld: lse %.9g, m %.9g, L %.9g\n", (long long)r_,      \
                        (double)(f)->lse[r_], (double)m_, (double)L_);                      \
                CHECK(false, __VA_ARGS__);                                                  \
            }                                                                               \
        }                                                                                   \
        free(want_row_);                                                                    \
    } while (0)

/* ---- instruction sets, pools ---- */

/* The kernels in force when the program began, TINYLLM_ISA included: what isa_restore goes back
 * to. */
static inline void isa_restore(void)
{
    static char initial[64];
    if (!initial[0])
        snprintf(initial, sizeof initial, "%s", tl_isa_name());
    tl_kernels_select(initial);
}

/* Selects the i-th usable instruction set and gives its name; NULL, with the initial one restored,
 * past the last. */
static inline const char *isa_select(int i)
{
    const struct tl_kernels *k = tl_kernels_usable(i);
    isa_restore();
    if (k)
        tl_kernels_select(k->name);
    return k ? k->name : NULL;
}

/* A pool that shares even the smallest step. */
static inline tl_pool *make_threads(int n)
{
    tl_pool *tp = NULL;
    tl_small_step_ns = 0;
    CHECK_STATUS(tl_pool_create(n, &tp), TL_OK);
    return tp;
}

/* ---- calls that may be refused ---- */

struct inside {
    tl_status (*call)(const void *);
    const void *x;
    tl_status got;
    char message[TL_LAST_ERROR_CAP];
};

static inline void call_inside(void *ctx, int64_t lo, int64_t hi, int worker)
{
    (void)lo, (void)hi, (void)worker;
    struct inside *in = ctx;
    in->got = in->call(in->x);
    snprintf(in->message, sizeof in->message, "%s", tl_last_error());
}

/* The status of call(x), from inside a range of a pool if one is given, with the message in this
 * thread's slot wherever it ran. */
static inline tl_status run_call(tl_status (*call)(const void *), const void *x, tl_pool *inside_of)
{
    struct inside in = {.call = call, .x = x};
    tl_set_last_error("no message was set");
    if (!inside_of)
        return call(x);
    CHECK_STATUS(tl_parallel_for(inside_of, 1, 1, call_inside, &in), TL_OK);
    tl_set_last_error(in.message);
    return in.got;
}

/* ---- messages ---- */

/* Whether the error slot holds `value` as a whole number, not as digits of another. */
static inline bool error_mentions(int64_t value)
{
    char digits[32];
    snprintf(digits, sizeof digits, "%lld", (long long)value);
    const size_t n = strlen(digits);
    for (const char *p = tl_last_error(); (p = strstr(p, digits)) != NULL; p++) {
        const bool front = p == tl_last_error() ||
                           !((p[-1] >= '0' && p[-1] <= '9') || p[-1] == '-' || p[-1] == '.');
        const bool back = !(p[n] >= '0' && p[n] <= '9');
        if (front && back)
            return true;
    }
    return false;
}

static inline bool error_names(const char *fn)
{
    const size_t n = strlen(fn);
    return strncmp(tl_last_error(), fn, n) == 0 && tl_last_error()[n] == ':' &&
           strchr(tl_last_error(), '\n') == NULL;
}

#endif
