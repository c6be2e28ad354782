/* SPDX-License-Identifier: MIT */
/* test_kv_formats.c: what is appended to a pool of any format stands there as the format's rule
 * says, byte for byte, whichever way it was appended, and nothing else changes.
 *
 * Words. picture: what the memory of a pool must look like, put together by kv_ref.h alone. */
#include <fenv.h>

#include "kernels/attn_plan.h"
#include "kernels/kernels.h"
#include "kv_check.h"
#include "kv_ref.h"
#include "tinyllm/kv_view.h"
#include "tinyllm/numerics.h"

static const tl_dtype sources[] = {TL_F32, TL_F16, TL_BF16};

/* A pool, and its picture. */
struct world {
    const struct ref_format *f;
    uint32_t b, heads, dim, layers, layer;
    tl_kv_pool *kv;
    unsigned char *picture;
    uint64_t lost;
};

/* ---- the picture ---- */

static unsigned char *strip_of(const struct world *w, unsigned char *bytes, uint32_t id, int is_v,
                               uint32_t head)
{
    const size_t strip = ref_strip(w->f, w->b, w->dim),
                 slab = ((size_t)id * w->layers + w->layer) * 2 + (size_t)is_v;
    return bytes + (slab * w->heads + head) * strip;
}

static void draw_row(struct world *w, uint32_t id, int is_v, uint32_t head, uint32_t slot,
                     tl_dtype from, const void *x)
{
    unsigned char *strip = strip_of(w, w->picture, id, is_v, head);
    float scale = 0;
    ref_store(w->f, from, x, w->dim, strip + (size_t)slot * w->dim * (size_t)w->f->elem, &scale);
    if (w->f->has_scales)
        memcpy(strip + ref_scales_at(w->f, w->b, w->dim) + 4 * (size_t)slot, &scale, 4);
    for (uint32_t d = 0; d < w->dim; d++)
        w->lost += ref_is_lost(w->f, from, ref_source(from, x, d));
}

static size_t pool_bytes(const struct world *w)
{
    return tl_kv_block_bytes(w->kv) * w->kv->cfg.n_blocks;
}

static void open_world(struct world *w, uint32_t n_blocks)
{
    w->kv = ref_pool(w->f, n_blocks, w->b, w->layers, w->heads, w->dim);
    CHECK(tl_kv_block_bytes(w->kv) == ref_strip(w->f, w->b, w->dim) * w->heads * 2 * w->layers,
          "%s: %zu bytes of a block", w->f->name, tl_kv_block_bytes(w->kv));
    kv_paint(w->kv, 77);
    w->picture = malloc(pool_bytes(w));
    memcpy(w->picture, kv_bytes(w->kv, 0), pool_bytes(w));
    w->lost = 0;
}

static void compare_and_close(struct world *w, const char *way)
{
    const unsigned char *got = kv_bytes(w->kv, 0);
    for (size_t i = 0; i < pool_bytes(w); i++)
        CHECK(got[i] == w->picture[i],
              "%s of %s, b %u D %u: byte %zu of a strip of %zu is %02X, want %02X", way, w->f->name,
              w->b, w->dim, i % ref_strip(w->f, w->b, w->dim), ref_strip(w->f, w->b, w->dim),
              got[i], w->picture[i]);
    CHECK(kv_stats(w->kv).unrepresentable == w->lost, "%s of %s, b %u D %u: %llu lost, want %llu",
          way, w->f->name, w->b, w->dim, (unsigned long long)kv_stats(w->kv).unrepresentable,
          (unsigned long long)w->lost);
    free(w->picture);
    tl_kv_pool_destroy(w->kv);
}

/* ---- a batch ---- */

enum { SEQS = 4, TABLE = 24 };

/* Entries that the longest sequence there may be needs. */
static uint32_t n_table(const struct world *w)
{
    return (3 * w->b + 20) / w->b + 1;
}

/* Sequences of a batch: so many tokens each, behind so many positions. */
struct step {
    int64_t n[SEQS], before[SEQS];
    int32_t cu[SEQS + 1], ctx[SEQS];
    uint32_t tables[SEQS][TABLE];
    tl_dtype from;
    char *x[2];                   /* k and v, each ending at an unmapped page */
    size_t bytes;                 /* of each */
    int64_t token_stride, head_stride, at; /* elements; `at`: of element 0 */
};

static const char *source_row(const struct step *s, int is_v, int64_t token, int64_t head)
{
    return s->x[is_v] +
           (s->at + token * s->token_stride + head * s->head_stride) * ref_elem(s->from);
}

enum { LAYOUTS = 4 };

static void lay_out(struct step *s, int layout, int64_t total, int64_t heads, int64_t dim)
{
    s->at = 0;
    switch (layout) {
    case 0: s->token_stride = heads * dim, s->head_stride = dim; break;
    case 1: s->token_stride = dim, s->head_stride = total * dim; break;
    case 2: s->token_stride = dim + 3, s->head_stride = total * (dim + 3) + 5; break;
    default:
        s->token_stride = -(heads * dim + 1), s->head_stride = dim;
        s->at = (total - 1) * (heads * dim + 1);
    }
    const int64_t span = (layout == 3 ? s->at : (total - 1) * s->token_stride) +
                         (heads - 1) * s->head_stride + dim;
    s->bytes = (size_t)(span * ref_elem(s->from));
    for (int i = 0; i < 2; i++) {
        s->x[i] = guarded(s->bytes);
        memset(s->x[i], 0xFF, s->bytes); /* NaN between the rows */
    }
}

/* Tokens, tables and rows of a batch; the blocks are taken from the pool in no order. */
static void make_step(struct world *w, struct step *s, tl_dtype from, int layout, uint64_t seed)
{
    int64_t total = 0;
    uint32_t ids[SEQS * TABLE];
    s->from = from;
    const uint32_t n = n_table(w);
    CHECK(n <= TABLE, "%u", n);
    CHECK_STATUS(tl_kv_alloc(w->kv, SEQS * n, ids), TL_OK);
    memset(s->tables, 0xFF, sizeof s->tables); /* what is behind is no block */
    for (int seq = 0; seq < SEQS; seq++) {
        s->n[seq] = seq == 1 ? 0 : 1 + rng_below(&seed, 4 * (int64_t)w->b < 21 ? 4 * w->b : 21);
        s->before[seq] = rng_below(&seed, 2 * w->b + 1);
        s->cu[seq] = (int32_t)total;
        total += s->n[seq];
        s->ctx[seq] = (int32_t)(s->before[seq] + s->n[seq]);
        for (uint32_t i = 0; i < n; i++)
            s->tables[seq][i] = ids[(SEQS * n - 1) - (i * SEQS + (uint32_t)seq)];
    }
    s->cu[SEQS] = (int32_t)total;
    lay_out(s, layout, total, w->heads, w->dim);
    for (int64_t t = 0; t < total; t++)
        for (uint32_t h = 0; h < w->heads; h++)
            for (int is_v = 0; is_v < 2; is_v++)
                ref_source_row(from, (int)rng_below(&seed, REF_ROW_KINDS + 20), &seed,
                               (char *)source_row(s, is_v, t, h), w->dim);
    for (int seq = 0; seq < SEQS; seq++)
        for (int64_t t = 0; t < s->n[seq]; t++)
            for (uint32_t h = 0; h < w->heads; h++)
                for (int is_v = 0; is_v < 2; is_v++) {
                    const int64_t pos = s->before[seq] + t;
                    draw_row(w, s->tables[seq][pos / w->b], is_v, h, (uint32_t)(pos % w->b), from,
                             source_row(s, is_v, s->cu[seq] + t, h));
                }
}

static void free_step(struct step *s)
{
    guarded_free(s->x[0], s->bytes), guarded_free(s->x[1], s->bytes);
}

/* ---- the ways ---- */

static void append_batch(struct world *w, const struct step *s, tl_pool *tp)
{
    CHECK_STATUS(tl_kv_append(w->kv, w->layer, s->tables[0], TABLE, s->cu, s->ctx, SEQS,
                              source_row(s, 0, 0, 0), source_row(s, 1, 0, 0), s->from,
                              s->token_stride, s->head_stride, s->token_stride, s->head_stride,
                              tp),
                 TL_OK);
}

/* Batches of one token for each sequence that has one left, the way decoding goes. */
static void append_token_by_token(struct world *w, const struct step *s)
{
    for (int64_t t = 0; t < 21; t++)
        for (int seq = 0; seq < SEQS; seq++) {
            const int32_t ctx = (int32_t)(s->before[seq] + t + 1);
            if (t < s->n[seq])
                CHECK_STATUS(tl_kv_append(w->kv, w->layer, s->tables[seq], TABLE, NULL, &ctx, 1,
                                          source_row(s, 0, s->cu[seq] + t, 0),
                                          source_row(s, 1, s->cu[seq] + t, 0), s->from,
                                          s->token_stride, s->head_stride, s->token_stride,
                                          s->head_stride, NULL),
                             TL_OK);
        }
}

/* Sequence by sequence, in pieces of up to 5 tokens. */
static void append_in_pieces(struct world *w, const struct step *s)
{
    for (int seq = 0; seq < SEQS; seq++)
        for (int64_t t = 0, n; t < s->n[seq]; t += n) {
            n = s->n[seq] - t < 5 ? s->n[seq] - t : 5;
            CHECK_STATUS(
                tl_kv_append_f32(w->kv, w->layer, s->tables[seq], TABLE, s->before[seq] + t, n,
                                 (const float *)(const void *)source_row(s, 0, s->cu[seq] + t, 0),
                                 (const float *)(const void *)source_row(s, 1, s->cu[seq] + t, 0),
                                 s->head_stride, s->token_stride),
                TL_OK);
        }
}

enum { WAYS = 4 };
static const char *const way_names[WAYS] = {"a batch", "single tokens", "a batch on threads",
                                            "pieces of f32"};

static void append_one_way(struct world *w, const struct step *s, int way, tl_pool *tp)
{
    switch (way) {
    case 0: append_batch(w, s, NULL); break;
    case 1: append_token_by_token(w, s); break;
    case 2: append_batch(w, s, tp); break;
    default: append_in_pieces(w, s);
    }
}

TEST(every_way_of_appending_stores_what_the_format_says)
{
    static const uint32_t blocks[] = {1, 3, 7, 16, 17}, dims[] = {1, 3, 16, 64, 80, 130};
    const int64_t small = tl_small_step_ns;
    tl_pool *tp = NULL;
    CHECK_STATUS(tl_pool_create(3, &tp), TL_OK);
    tl_small_step_ns = 0;
    for (int format = 0; format < REF_FORMATS; format++)
        for (int i = 0; i < 5 * 6 * 3; i++)
            for (int way = 0; way < WAYS; way++) {
                const tl_dtype from = sources[i % 3];
                struct world w = {.f = &ref_formats[format], .b = blocks[i / 18],
                                  .dim = dims[i / 3 % 6], .heads = 1 + (uint32_t)(i % 4),
                                  .layers = 2, .layer = (uint32_t)(i % 2)};
                struct step s;
                if (way == 3 && from != TL_F32)
                    continue;
                open_world(&w, SEQS * n_table(&w) + 2);
                make_step(&w, &s, from, (i + i / 4) % LAYOUTS, (uint64_t)i + 1);
                append_one_way(&w, &s, way, tp);
                compare_and_close(&w, way_names[way]);
                free_step(&s);
            }
    tl_small_step_ns = small;
    tl_pool_destroy(tp);
}

TEST(every_instruction_set_stores_the_same_bytes)
{
    static const uint32_t dims[] = {1, 15, 16, 17, 33, 64, 130};
    for (int isa = 0; tl_kernels_usable(isa); isa++)
        for (int format = 0; format < REF_FORMATS; format++)
            for (int i = 0; i < 7 * 3; i++) {
                struct world w = {.f = &ref_formats[format], .b = 5, .dim = dims[i / 3], .heads = 3,
                                  .layers = 1};
                struct step s;
                open_world(&w, SEQS * n_table(&w));
                make_step(&w, &s, sources[i % 3], i % LAYOUTS, (uint64_t)i + 500);
                tl_kernels_select(tl_kernels_usable(isa)->name);
                append_batch(&w, &s, NULL);
                tl_kernels_select(NULL);
                compare_and_close(&w, tl_kernels_usable(isa)->name);
                free_step(&s);
            }
}

TEST(the_callers_rounding_does_not_reach_what_is_stored)
{
    static const int modes[] = {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
    for (int format = 0; format < REF_FORMATS; format++)
        for (int m = 0; m < 3; m++)
            for (int i = 0; i < 3; i++) {
                struct world w = {.f = &ref_formats[format], .b = 4, .dim = 67, .heads = 2,
                                  .layers = 1};
                struct step s;
                open_world(&w, SEQS * n_table(&w));
                make_step(&w, &s, sources[i], 0, 900);
                fesetround(modes[m]);
                const tl_status got = tl_kv_append(
                    w.kv, 0, s.tables[0], TABLE, s.cu, s.ctx, SEQS, s.x[0], s.x[1], s.from,
                    s.token_stride, s.head_stride, s.token_stride, s.head_stride, NULL);
                const int after = fegetround();
                fesetround(FE_TONEAREST);
                CHECK(got == TL_OK && after == modes[m], "%d, mode %d", got, after);
                compare_and_close(&w, "in another mode");
                free_step(&s);
            }
}

/* K and V need not lie alike. */
TEST(keys_and_values_have_strides_of_their_own)
{
    enum { T = 5, H = 3, D = 7 };
    struct world w = {.f = &ref_formats[2], .b = 4, .dim = D, .heads = H, .layers = 1};
    uint32_t table[2];
    float k[T * H * D], v[H * T * D];
    uint64_t seed = 3;
    const int32_t cu[] = {0, T}, ctx[] = {T};
    open_world(&w, 3);
    CHECK_STATUS(tl_kv_alloc(w.kv, 2, table), TL_OK);
    ref_row(0, &seed, k, T * H * D), ref_row(0, &seed, v, T * H * D);
    for (int t = 0; t < T; t++)
        for (int h = 0; h < H; h++) {
            const uint32_t id = table[t / 4], slot = (uint32_t)t % 4;
            draw_row(&w, id, 0, (uint32_t)h, slot, TL_F32, k + (t * H + h) * D);
            draw_row(&w, id, 1, (uint32_t)h, slot, TL_F32, v + (h * T + t) * D);
        }
    CHECK_STATUS(tl_kv_append(w.kv, 0, table, 2, cu, ctx, 1, k, v, TL_F32, H * D, D, D, T * D,
                              NULL),
                 TL_OK);
    compare_and_close(&w, "two layouts");
}

/* ---- what is counted ---- */

TEST(values_a_format_has_nothing_for_are_counted)
{
    const struct {
        uint32_t bits;
        int lost[REF_FORMATS]; /* f16, e4m3, i8, bf16, f32; of the value alone in its row */
    } known[] = {{0x00000000, {0, 0, 0, 0, 0}}, {0x477FEFFF, {0, 0, 0, 0, 0}},
                 {0x477FF000, {1, 0, 0, 0, 0}}, /* 65520 */
                 {0xC7800000, {1, 0, 0, 0, 0}}, {0x7F7F7FFF, {1, 0, 0, 0, 0}},
                 {0x7F7F8000, {1, 0, 0, 1, 0}}, /* halfway past the largest bf16 */
                 {0xFF7FFFFF, {1, 0, 0, 1, 0}}, {0x7F800000, {0, 1, 1, 0, 0}},
                 {0xFF800000, {0, 1, 1, 0, 0}}, {0x7F800001, {1, 1, 1, 1, 1}},
                 {0x7FC00000, {1, 1, 1, 1, 1}}, {0xFFFFFFFF, {1, 1, 1, 1, 1}},
                 {0x80000001, {0, 0, 0, 0, 0}}};
    for (int format = 0; format < REF_FORMATS; format++)
        for (size_t i = 0; i < sizeof known / sizeof *known; i++)
            for (int at = 0; at < 80; at++) { /* in K or V, in whichever lane */
                float x[2][40] = {{0}};
                tl_kv_pool *kv = ref_pool(&ref_formats[format], 1, 1, 1, 1, 40);
                const uint32_t id = kv_one(kv);
                x[at / 40][at % 40] = float_of(known[i].bits);
                CHECK_STATUS(tl_kv_append_f32(kv, 0, &id, 1, 0, 1, x[0], x[1], 40, 40), TL_OK);
                CHECK(kv_stats(kv).unrepresentable == (uint64_t)known[i].lost[format],
                      "%s, %08X at %d: %llu", ref_formats[format].name, known[i].bits, at,
                      (unsigned long long)kv_stats(kv).unrepresentable);
                tl_kv_pool_destroy(kv);
            }
}

TEST(a_refused_call_counts_nothing)
{
    tl_kv_pool *kv = ref_pool(&ref_formats[2], 2, 2, 1, 1, 2);
    const float x[4] = {NAN, 1, 2, INFINITY};
    const uint32_t table[] = {kv_one(kv), 1}; /* not used */
    CHECK_STATUS(tl_kv_append_f32(kv, 0, table, 2, 1, 2, x, x, 4, 2), TL_EINVAL);
    CHECK(kv_stats(kv).unrepresentable == 0, "counted");
    CHECK_STATUS(tl_kv_append_f32(kv, 0, table, 1, 0, 2, x, x, 4, 2), TL_OK);
    CHECK_STATUS(tl_kv_append_f32(kv, 0, table, 1, 0, 2, x, x, 4, 2), TL_OK);
    const unsigned long long n = kv_stats(kv).unrepresentable;
    CHECK(n == 8, "%llu", n);
    tl_kv_pool_destroy(kv);
}

/* Large values that f16 has are not lost, however many there are. */
TEST(rows_of_large_values_lose_none)
{
    enum { D = 300 };
    float x[D];
    tl_kv_pool *kv = ref_pool(&ref_formats[0], 1, 1, 1, 1, D);
    const uint32_t id = kv_one(kv);
    for (int d = 0; d < D; d++)
        x[d] = d % 2 ? 65504 : -65519;
    CHECK_STATUS(tl_kv_append_f32(kv, 0, &id, 1, 0, 1, x, x, D, D), TL_OK);
    CHECK(kv_stats(kv).unrepresentable == 0, "counted");
    x[299] = 65520;
    CHECK_STATUS(tl_kv_append_f32(kv, 0, &id, 1, 0, 1, x, x, D, D), TL_OK);
    CHECK(kv_stats(kv).unrepresentable == 2, "not counted");
    tl_kv_pool_destroy(kv);
}

/* ---- reading back ---- */

TEST(what_is_read_back_and_stored_again_is_the_same)
{
    enum { T = 9, D = 53 };
    for (int format = 0; format < REF_FORMATS; format++) {
        tl_kv_pool *kv = ref_pool(&ref_formats[format], 4, 4, 1, 2, D);
        uint32_t ids[4];
        float x[2][2 * T * D], y[2][2 * T * D];
        uint64_t seed = 12;
        static const uint32_t first[] = {0, 1, 2}, second[] = {3, 1, 2};
        CHECK_STATUS(tl_kv_alloc(kv, 4, ids), TL_OK);
        for (int i = 0; i < 2 * 2 * T; i++)
            ref_row(i % REF_ROW_KINDS, &seed, x[0] + i * D, D);
        CHECK_STATUS(tl_kv_append_f32(kv, 0, first, 3, 0, T, x[0], x[1], T * D, D), TL_OK);
        unsigned char *was = malloc(3 * tl_kv_block_bytes(kv));
        memcpy(was, kv_bytes(kv, 0), 3 * tl_kv_block_bytes(kv));
        CHECK_STATUS(tl_kv_gather_f32(kv, 0, first, 3, 0, T, y[0], y[1], T * D, D), TL_OK);
        CHECK_STATUS(tl_kv_append_f32(kv, 0, second, 3, 0, T, y[0], y[1], T * D, D), TL_OK);
        CHECK(memcmp(was, kv_bytes(kv, 3), tl_kv_block_bytes(kv)) == 0, "%s: block 0",
              ref_formats[format].name);
        CHECK(memcmp(was + tl_kv_block_bytes(kv), kv_bytes(kv, 1), 2 * tl_kv_block_bytes(kv)) == 0,
              "%s: blocks 1 and 2", ref_formats[format].name);
        free(was);
        tl_kv_pool_destroy(kv);
    }
}

/* ---- pieces of memory ---- */

TEST(scales_lie_behind_the_rows_of_their_strip)
{
    static const uint32_t dims[][4] = {{16, 2, 3, 64}, {1, 1, 1, 1}, {3, 2, 2, 5}, {7, 1, 3, 3},
                                       {17, 2, 2, 130}};
    for (int format = 0; format < REF_FORMATS; format++)
        for (int i = 0; i < 5; i++) {
            const struct ref_format *f = &ref_formats[format];
            const uint32_t b = dims[i][0], layers = dims[i][1], heads = dims[i][2],
                           dim = dims[i][3];
            tl_kv_pool *kv = ref_pool(f, 3, b, layers, heads, dim);
            const size_t strip = ref_strip(f, b, dim);
            for (uint32_t id = 0; id < 3; id++)
                for (uint32_t layer = 0; layer < layers; layer++)
                    for (int is_v = 0; is_v < 2; is_v++) {
                        const size_t at = (((size_t)id * layers + layer) * 2 + (size_t)is_v) *
                                          heads * strip;
                        CHECK(tl_kv_block_ptr(kv, id, layer, is_v) == kv_bytes(kv, 0) + at,
                              "%s: rows", f->name);
                        tl_set_last_error(NULL);
                        const void *scales = tl_kv_scale_ptr(kv, id, layer, is_v);
                        if (f->has_scales)
                            CHECK(scales == kv_bytes(kv, 0) + at + ref_scales_at(f, b, dim) &&
                                      (uintptr_t)scales % 4 == 0,
                                  "%s: scales", f->name);
                        else
                            CHECK(!scales && strstr(tl_last_error(), "tl_kv_scale_ptr: format"),
                                  "%s: \"%s\"", f->name, tl_last_error());
                    }
            tl_kv_pool_destroy(kv);
        }
}

TEST(scales_of_what_is_not_there_are_refused)
{
    tl_kv_pool *kv = ref_pool(&ref_formats[2], 3, 4, 2, 1, 4),
               *plain = ref_pool(&ref_formats[0], 3, 4, 2, 1, 4);
    const struct {
        const tl_kv_pool *kv;
        uint32_t id, layer;
        const char *words;
    } bad[] = {{NULL, 0, 0, "pool is NULL"},
               {NULL, 9, 9, "pool is NULL"},
               {kv, 3, 0, "block 3 is out of range"},
               {kv, UINT32_MAX, 7, "block 4294967295 is out of range"},
               {kv, 2, 2, "layer 2 is out of range"},
               {plain, 3, 0, "block 3"}, /* the format decides last */
               {plain, 0, 2, "layer 2"},
               {plain, 0, 0, "format 1, of dtype 1, has no scales"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        tl_set_last_error(NULL);
        CHECK(!tl_kv_scale_ptr(bad[i].kv, bad[i].id, bad[i].layer, 0), "case %zu", i);
        CHECK(strncmp(tl_last_error(), "tl_kv_scale_ptr: ", 17) == 0 &&
                  strstr(tl_last_error(), bad[i].words),
              "case %zu: \"%s\"", i, tl_last_error());
    }
    tl_kv_pool_destroy(kv), tl_kv_pool_destroy(plain);
}

TEST(the_view_of_a_pool_finds_every_row_and_scale)
{
    static const uint32_t dims[][3] = {{16, 3, 64}, {1, 1, 1}, {3, 2, 5}, {7, 3, 3}};
    for (int format = 0; format < REF_FORMATS; format++)
        for (int i = 0; i < 4; i++) {
            const struct ref_format *f = &ref_formats[format];
            const uint32_t b = dims[i][0], heads = dims[i][1], dim = dims[i][2];
            tl_kv_pool *kv = ref_pool(f, 3, b, 2, heads, dim);
            tl_kv_view v = {.size = sizeof v};
            CHECK_STATUS(tl_kv_pool_view(kv, 1, &v), TL_OK);
            CHECK(v.dtype == f->dtype && v.reserved == 0 && v.n_blocks == 3 &&
                      v.block_tokens == b && v.n_kv_heads == heads && v.head_dim_k == dim &&
                      v.head_dim_v == dim,
                  "%s", f->name);
            for (uint32_t id = 0; id < 3; id++)
                for (uint32_t h = 0; h < heads; h++)
                    for (uint32_t slot = 0; slot < b; slot++) {
                        const unsigned char *k = tl_kv_block_ptr(kv, id, 1, 0),
                                            *w = tl_kv_block_ptr(kv, id, 1, 1);
                        const size_t row = h * ref_strip(f, b, dim) +
                                           (size_t)slot * dim * (size_t)f->elem,
                                     scale = h * ref_strip(f, b, dim) + ref_scales_at(f, b, dim) +
                                             4 * (size_t)slot;
                        CHECK((const unsigned char *)v.k +
                                      (id * v.k_block_stride + h * v.k_head_stride +
                                       slot * v.k_token_stride) * f->elem == k + row &&
                                  (const unsigned char *)v.v +
                                      (id * v.v_block_stride + h * v.v_head_stride +
                                       slot * v.v_token_stride) * f->elem == w + row,
                              "%s: row (%u, %u, %u)", f->name, id, h, slot);
                        if (!f->has_scales)
                            continue;
                        CHECK((const void *)(v.k_scale + id * v.k_scale_block_stride +
                                             h * v.k_scale_head_stride +
                                             slot * v.k_scale_token_stride) == k + scale &&
                                  (const void *)(v.v_scale + id * v.v_scale_block_stride +
                                                 h * v.v_scale_head_stride +
                                                 slot * v.v_scale_token_stride) == w + scale,
                              "%s: scale (%u, %u, %u)", f->name, id, h, slot);
                    }
            if (!f->has_scales)
                CHECK(!v.k_scale && !v.v_scale && v.k_scale_block_stride == 0 &&
                          v.k_scale_head_stride == 0 && v.k_scale_token_stride == 0 &&
                          v.v_scale_block_stride == 0 && v.v_scale_head_stride == 0 &&
                          v.v_scale_token_stride == 0,
                      "%s: scales", f->name);
            tl_kv_pool_destroy(kv);
        }
}

/* ---- sharing ---- */

TEST(a_copy_on_write_takes_rows_and_scales_along)
{
    for (int format = 0; format < REF_FORMATS; format++) {
        enum { D = 5, B = 3 };
        tl_kv_pool *kv = ref_pool(&ref_formats[format], 3, B, 2, 2, D);
        float x[2 * B * D], y[4][2 * B * D];
        uint64_t seed = 8;
        uint32_t copy;
        const uint32_t id = kv_one(kv);
        ref_row(0, &seed, x, 2 * B * D);
        kv_paint(kv, 4);
        CHECK_STATUS(tl_kv_append_f32(kv, 1, &id, 1, 0, B, x, x, B * D, D), TL_OK);
        CHECK_STATUS(tl_kv_set_fill(kv, id, 2), TL_OK);
        tl_kv_ref(kv, id);
        CHECK_STATUS(tl_kv_append_f32(kv, 1, &id, 1, 2, 1, x, x, B * D, D), TL_EBUSY);
        CHECK_STATUS(tl_kv_cow(kv, id, &copy), TL_OK);
        CHECK(copy != id && tl_kv_fill(kv, copy) == 2, "%s: block %u", ref_formats[format].name,
              copy);
        CHECK(memcmp(kv_bytes(kv, id), kv_bytes(kv, copy), tl_kv_block_bytes(kv)) == 0, "%s: bytes",
              ref_formats[format].name);
        CHECK_STATUS(tl_kv_gather_f32(kv, 1, &id, 1, 0, B, y[0], y[1], B * D, D), TL_OK);
        /* the copy is its holder's own: what goes into it leaves the other as it was */
        CHECK_STATUS(tl_kv_append_f32(kv, 1, &copy, 1, 2, 1, x + 1, x + 1, B * D, D), TL_OK);
        CHECK_STATUS(tl_kv_gather_f32(kv, 1, &id, 1, 0, B, y[2], y[3], B * D, D), TL_OK);
        CHECK(memcmp(y[0], y[2], sizeof y[0]) == 0 && memcmp(y[1], y[3], sizeof y[1]) == 0,
              "%s: the original changed", ref_formats[format].name);
        tl_kv_pool_destroy(kv);
    }
}

/* A truncated sequence is appended to again; the rows that went are as if they had never been. */
TEST(appending_over_what_was_cut_off_leaves_no_trace_of_it)
{
    for (int format = 0; format < REF_FORMATS; format++) {
        enum { D = 9, B = 4, T = 7 };
        float x[T * D], other[T * D];
        uint64_t seed = 8;
        ref_row(0, &seed, x, T * D), ref_row(3, &seed, other, T * D);
        tl_kv_pool *kv = ref_pool(&ref_formats[format], 2, B, 1, 1, D),
                   *fresh = ref_pool(&ref_formats[format], 2, B, 1, 1, D);
        uint32_t ids[2];
        CHECK_STATUS(tl_kv_alloc(kv, 2, ids), TL_OK);
        CHECK_STATUS(tl_kv_alloc(fresh, 2, ids), TL_OK);
        CHECK_STATUS(tl_kv_append_f32(kv, 0, ids, 2, 0, T, other, other, T * D, D), TL_OK);
        for (int i = 0; i < 2; i++) {
            CHECK_STATUS(tl_kv_append_f32(i ? kv : fresh, 0, ids, 2, 0, T, x, x, T * D, D), TL_OK);
            CHECK_STATUS(tl_kv_set_length(i ? kv : fresh, ids, 2, 0, T), TL_OK);
        }
        unsigned char a[2000], b[2000];
        size_t n[2];
        CHECK_STATUS(tl_kv_export(kv, ids, 2, a, sizeof a, &n[0]), TL_OK);
        CHECK_STATUS(tl_kv_export(fresh, ids, 2, b, sizeof b, &n[1]), TL_OK);
        CHECK(n[0] == n[1] && memcmp(a, b, n[0]) == 0, "%s", ref_formats[format].name);
        tl_kv_pool_destroy(kv), tl_kv_pool_destroy(fresh);
    }
}

TEST(blocks_are_evicted_in_every_format)
{
    for (int format = 0; format < REF_FORMATS; format++) {
        tl_kv_pool *kv = ref_pool(&ref_formats[format], 2, 3, 1, 1, 5);
        const float x[15] = {1, 2, 3};
        for (uint64_t turn = 1; turn <= 7; turn++) {
            const uint32_t id = kv_one(kv);
            CHECK_STATUS(tl_kv_append_f32(kv, 0, &id, 1, 0, 3, x, x, 15, 5), TL_OK);
            CHECK_STATUS(tl_kv_set_fill(kv, id, 3), TL_OK);
            CHECK_STATUS(tl_kv_register(kv, id, turn), TL_OK);
            CHECK_STATUS(tl_kv_append_f32(kv, 0, &id, 1, 0, 3, x, x, 15, 5), TL_EBUSY);
            CHECK_STATUS(tl_kv_unref(kv, id), TL_OK);
            kv_audit(kv);
        }
        CHECK_STATS(kv, 0, 0, 2, 5);
        tl_kv_pool_destroy(kv);
    }
}

CHECK_MAIN()
