/* SPDX-License-Identifier: MIT */
/* test_kv_gather.c: positions of a sequence read back as f32, from a pool of any format, and
 * nothing written where one of them may not be. */
#include <fenv.h>

#include "kernels/kernels.h"
#include "kv_check.h"
#include "kv_ref.h"
#include "tinyllm/numerics.h"

/* Any bytes are rows and scales: the pool is painted, not appended to. */
static float want_of(const tl_kv_pool *kv, const struct ref_format *f, uint32_t layer, int is_v,
                     const uint32_t *table, int64_t pos, uint32_t head, int64_t d)
{
    const tl_kv_cfg *c = &kv->cfg;
    const size_t slot = (size_t)pos % c->block_tokens, dim = c->head_dim;
    const unsigned char *strip =
        kv_bytes(kv, 0) + ((((size_t)table[pos / c->block_tokens] * c->n_layers + layer) * 2 +
                            (size_t)is_v) * c->n_kv_heads + head) *
                              ref_strip(f, c->block_tokens, dim);
    float scale = 1;
    if (f->has_scales)
        memcpy(&scale, strip + ref_scales_at(f, c->block_tokens, dim) + 4 * slot, 4);
    return ref_value(f, strip + slot * dim * (size_t)f->elem, scale, d);
}

/* What is multiplied by a scale has one NaN; what is widened keeps its own, which is not looked
 * at here. */
static bool same(const struct ref_format *f, float got, float want)
{
    return float_bits(got) == float_bits(want) ||
           (isnan(want) && (f->has_scales ? float_bits(got) == TL_NAN_BITS : isnan(got)));
}


/* Where a tensor of [heads][T][dim] lies. */
static int64_t lay_out(int layout, int64_t heads, int64_t T, int64_t dim, int64_t *head_stride,
                       int64_t *token_stride, int64_t *at)
{
    *at = 0;
    switch (layout) {
    case 0: *head_stride = T * dim, *token_stride = dim; break;
    case 1: *head_stride = dim, *token_stride = heads * dim; break;
    case 2: *head_stride = T * (dim + 2) + 1, *token_stride = dim + 2; break;
    default:
        *head_stride = -T * dim, *token_stride = -dim;
        *at = (heads - 1) * T * dim + (T - 1) * dim;
    }
    return (layout == 3 ? *at : (heads - 1) * *head_stride + (T - 1) * *token_stride) + dim;
}

static void gather_and_compare(tl_kv_pool *kv, const struct ref_format *f, uint32_t layer,
                               const uint32_t *table, int32_t n_table, int64_t pos, int64_t T,
                               int layout)
{
    const int64_t heads = kv->cfg.n_kv_heads, dim = kv->cfg.head_dim;
    int64_t head_stride, token_stride, at;
    const int64_t span = lay_out(layout, heads, T, dim, &head_stride, &token_stride, &at);
    float *y[2];
    for (int is_v = 0; is_v < 2; is_v++) {
        y[is_v] = guarded((size_t)span * sizeof(float));
        memset(y[is_v], 0x5A, (size_t)span * sizeof(float));
    }
    struct kv_snap before = kv_snap(kv);
    CHECK_STATUS(tl_kv_gather_f32(kv, layer, table, n_table, pos, T, y[0] + at, y[1] + at,
                                  head_stride, token_stride),
                 TL_OK);
    struct kv_snap after = kv_snap(kv);
    const char *diff = kv_snap_diff(&before, &after);
    kv_snap_free(&before), kv_snap_free(&after);
    CHECK(!diff, "gathering changed the %s", diff);
    for (int is_v = 0; is_v < 2; is_v++) {
        for (int64_t h = 0; h < heads; h++)
            for (int64_t t = 0; t < T; t++)
                for (int64_t d = 0; d < dim; d++) {
                    float *got = &y[is_v][at + h * head_stride + t * token_stride + d];
                    const float want =
                        want_of(kv, f, layer, is_v, table, pos + t, (uint32_t)h, d);
                    CHECK(same(f, *got, want),
                          "%s, layout %d, (%d, %lld, %lld, %lld): %08x, want %08x", f->name, layout,
                          is_v, (long long)h, (long long)t, (long long)d, float_bits(*got),
                          float_bits(want));
                    memset(got, 0x5A, sizeof *got);
                }
        for (int64_t i = 0; i < span; i++)
            CHECK(float_bits(y[is_v][i]) == 0x5A5A5A5A, "%s: a gap was written", f->name);
        guarded_free(y[is_v], (size_t)span * sizeof(float));
    }
}

TEST(every_position_comes_back_from_any_format)
{
    static const uint32_t blocks[] = {1, 3, 7, 16, 17}, dims[] = {1, 3, 16, 64, 80, 130};
    uint64_t seed = 21;
    for (int isa = 0; tl_kernels_usable(isa); isa++)
        for (int format = 0; format < REF_FORMATS; format++)
            for (int i = 0; i < 5 * 6; i++) {
                const struct ref_format *f = &ref_formats[format];
                const uint32_t b = blocks[i / 6];
                tl_kv_pool *kv = ref_pool(f, 6, b, 2, 1 + (uint32_t)(i + format) % 3, dims[i % 6]);
                uint32_t ids[6];
                kv_paint(kv, (uint64_t)i + 7);
                CHECK_STATUS(tl_kv_alloc(kv, 6, ids), TL_OK);
                const uint32_t table[] = {UINT32_MAX, ids[4], ids[1], ids[5], ids[1]};
                const int64_t pos = b + rng_below(&seed, b), T = 1 + rng_below(&seed, 5 * b - pos);
                tl_kernels_select(tl_kernels_usable(isa)->name);
                gather_and_compare(kv, f, (uint32_t)i % 2, table, 5, pos, T, (i + i / 6) % 4);
                tl_kernels_select(NULL);
                tl_kv_pool_destroy(kv);
            }
}

/* Every code, under scales of all sorts; infinities and NaN among them. */
TEST(every_code_comes_back_times_its_scale)
{
    static const float scales[] = {1, -0.0f, 0.1f, 0x1p-140f, 3e38f, INFINITY, -2};
    for (int format = 1; format <= 2; format++)
        for (size_t i = 0; i < sizeof scales / sizeof *scales; i++) {
            tl_kv_pool *kv = ref_pool(&ref_formats[format], 1, 1, 1, 1, 256);
            const uint32_t id = kv_one(kv);
            for (int c = 0; c < 256; c++)
                kv_bytes(kv, id)[c] = (unsigned char)c;
            memcpy(kv_bytes(kv, id) + 260, kv_bytes(kv, id), 256);
            *tl_kv_scale_ptr(kv, id, 0, 0) = scales[i];
            *tl_kv_scale_ptr(kv, id, 0, 1) = NAN;
            gather_and_compare(kv, &ref_formats[format], 0, &id, 1, 0, 1, 0);
            tl_kv_pool_destroy(kv);
        }
}

TEST(the_callers_rounding_does_not_reach_what_is_read)
{
    static const int modes[] = {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
    enum { D = 67 };
    for (int format = 0; format < REF_FORMATS; format++)
        for (int m = 0; m < 3; m++) {
            const struct ref_format *f = &ref_formats[format];
            tl_kv_pool *kv = ref_pool(f, 1, 1, 1, 1, D);
            const uint32_t id = kv_one(kv);
            float k[D], v[D];
            kv_paint(kv, 3);
            fesetround(modes[m]);
            const tl_status got = tl_kv_gather_f32(kv, 0, &id, 1, 0, 1, k, v, D, D);
            const int after = fegetround();
            fesetround(FE_TONEAREST);
            CHECK(got == TL_OK && after == modes[m], "%d, mode %d", got, after);
            for (int d = 0; d < D; d++)
                CHECK(same(f, k[d], want_of(kv, f, 0, 0, &id, 0, 0, d)) &&
                          same(f, v[d], want_of(kv, f, 0, 1, &id, 0, 0, d)),
                      "%s, element %d", f->name, d);
            tl_kv_pool_destroy(kv);
        }
}

/* Shared and registered blocks are read like others, and so is what is behind a fill. */
TEST(whose_blocks_they_are_is_not_asked)
{
    tl_kv_pool *kv = ref_pool(&ref_formats[2], 3, 2, 1, 1, 4);
    kv_paint(kv, 9);
    const uint32_t table[] = {kv_named(kv, 5), kv_one(kv)};
    tl_kv_ref(kv, table[1]);
    gather_and_compare(kv, &ref_formats[2], 0, table, 2, 0, 4, 0);
    gather_and_compare(kv, &ref_formats[2], 0, table, 2, 3, 1, 1);
    tl_kv_pool_destroy(kv);
}

/* ---- refusals ---- */

struct call {
    tl_kv_pool *kv;
    uint32_t layer;
    const uint32_t *table;
    int32_t n_table;
    int64_t pos, T;
    float *k, *v;
    int64_t head_stride, token_stride;
};

static float painted[2][64];

static void refuse(tl_kv_pool *kv, const struct call *c, tl_status want, const char *words)
{
    tl_status got = TL_OK;
    memset(painted, 0x5A, sizeof painted);
    CHECK_REFUSED(kv,
                  got = tl_kv_gather_f32(c->kv, c->layer, c->table, c->n_table, c->pos, c->T, c->k,
                                         c->v, c->head_stride, c->token_stride),
                  "tl_kv_gather_f32", words);
    CHECK(got == want, "%s, want %s: %s", tl_status_str(got), tl_status_str(want),
          tl_last_error());
    for (size_t i = 0; i < sizeof painted; i++)
        CHECK(((unsigned char *)painted)[i] == 0x5A, "an output was written: %s", words);
}

TEST(each_bad_argument_is_refused_and_named)
{
    float *const k = painted[0], *const v = painted[1], *const last = (float *)(UINTPTR_MAX - 15);
    tl_kv_pool *kv = ref_pool(&ref_formats[1], 5, 4, 2, 2, 2);
    uint32_t ids[3];
    CHECK_STATUS(tl_kv_alloc(kv, 3, ids), TL_OK);
    const uint32_t cached = kv_named(kv, 6);
    CHECK_STATUS(tl_kv_unref(kv, cached), TL_OK);
    const uint32_t good[] = {ids[2], ids[0], ids[1]}, high[] = {ids[0], 5, ids[1]},
                   highest[] = {ids[0], ids[1], UINT32_MAX}, unused[] = {4, ids[0], ids[1]},
                   evictable[] = {ids[0], cached, ids[1]};
    const struct {
        struct call call;
        const char *words;
    } bad[] = {
        {{NULL, 0, good, 3, 0, 5, k, v, 10, 2}, "pool is NULL"},
        {{kv, 2, good, 3, 0, 5, k, v, 10, 2}, "layer 2 is out of range"},
        {{kv, 0, good, -1, 0, 5, k, v, 10, 2}, "n_table -1, pos 0, T 5: none may be negative"},
        {{kv, 0, good, 3, -1, 5, k, v, 10, 2}, "pos -1"},
        {{kv, 0, good, 3, 0, -5, k, v, 10, 2}, "T -5"},
        {{kv, 0, NULL, 3, 0, 5, k, v, 10, 2}, "block_table is NULL with T = 5"},
        {{kv, 0, good, 3, 0, 5, NULL, v, 10, 2}, "k is NULL with T = 5"},
        {{kv, 0, good, 3, 0, 5, k, NULL, 10, 2}, "v is NULL with T = 5"},
        {{kv, 0, good, 3, INT64_MAX - 4, 5, k, v, 10, 2}, "pass INT64_MAX"},
        {{kv, 0, good, 3, 8, 5, k, v, 10, 2}, "positions 8 .. 12 need 4 table entries"},
        {{kv, 0, good, 0, 0, 1, k, v, 10, 2}, "n_table is 0"},
        {{kv, 0, good, 3, 0, 5, k, v, INT64_MAX, 2}, "k: head_stride 9223372036854775807"},
        {{kv, 0, good, 3, 0, 5, k, v, 10, INT64_MIN}, "token_stride -9223372036854775808"},
        {{kv, 0, good, 3, 0, 5, last, v, 10, 2}, ": k: head_stride 10"},
        {{kv, 0, good, 3, 0, 5, k, last, 10, 2}, ": v: head_stride 10"},
        {{kv, 0, good, 3, 0, 5, k, v, 0, 2}, "head_stride = 0 bytes steps into the 8"},
        {{kv, 0, good, 3, 0, 5, k, v, 10, 1}, "token_stride = 4 bytes steps into the 8"},
        {{kv, 0, good, 3, 0, 5, k, v, 9, 2}, "head_stride = 36 bytes steps into the 40"},
        {{kv, 0, good, 3, 0, 5, k, v, -9, 2}, "head_stride = -36 bytes steps into the 40"},
        {{kv, 0, good, 3, 0, 5, k, k, 10, 2}, "v - k = 0 bytes steps into the 8"},
        {{kv, 0, good, 3, 0, 5, k, k + 1, 10, 2}, "v - k = 4 bytes steps into the 8"},
        {{kv, 0, good, 3, 0, 5, k + 19, k, 10, 2}, "v - k = -76 bytes steps into the 80"},
        {{kv, 0, high, 3, 0, 5, k, v, 10, 2}, "block_table[1] = 5 is out of range: the pool has 5"},
        {{kv, 0, highest, 3, 4, 5, k, v, 10, 2}, "block_table[2] = 4294967295 is out of range"},
        {{kv, 0, unused, 3, 3, 1, k, v, 10, 2}, "block_table[0] = 4 is not used"},
        {{kv, 0, evictable, 3, 0, 5, k, v, 10, 2}, "block_table[1] = 3 is not used"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        refuse(kv, &bad[i].call, TL_EINVAL, bad[i].words);
    tl_kv_pool_destroy(kv);
}

TEST(the_first_fault_decides)
{
    float *const k = painted[0], *const v = painted[1];
    tl_kv_pool *kv = ref_pool(&ref_formats[1], 3, 4, 2, 2, 2);
    const uint32_t bad[] = {kv_one(kv), 2}, good[] = {0, kv_one(kv)};
    struct call c = {NULL, 2, NULL, -1, 7, 2, k, k, INT64_MAX, 2};
    refuse(kv, &c, TL_EINVAL, "pool is NULL");
    c.kv = kv;
    refuse(kv, &c, TL_EINVAL, "layer 2");
    c.layer = 1;
    refuse(kv, &c, TL_EINVAL, "n_table -1");
    c.n_table = 2;
    refuse(kv, &c, TL_EINVAL, "block_table is NULL");
    c.table = bad;
    refuse(kv, &c, TL_EINVAL, "positions 7 .. 8 need 3 table entries");
    c.pos = 3;
    refuse(kv, &c, TL_EINVAL, "address space");
    c.head_stride = 4;
    tl_kernels_select("abacus");
    refuse(kv, &c, TL_EINVAL, "v - k");
    c.v = v;
    refuse(kv, &c, TL_EUNSUPPORTED, "TINYLLM_ISA=abacus is not here");
    tl_kernels_select(NULL);
    refuse(kv, &c, TL_EINVAL, "block_table[1] = 2 is not used");
    c.table = good;
    CHECK_STATUS(tl_kv_gather_f32(kv, 1, good, 2, 3, 2, k, v, 4, 2), TL_OK);
    tl_kv_pool_destroy(kv);
}

/* Interleaved outputs share a span, but no place. */
TEST(keys_and_values_may_be_interleaved)
{
    enum { T = 5, H = 2, D = 3 };
    tl_kv_pool *kv = ref_pool(&ref_formats[3], 2, 4, 1, H, D);
    uint32_t ids[2];
    float y[T][2][H][D];
    kv_paint(kv, 1);
    CHECK_STATUS(tl_kv_alloc(kv, 2, ids), TL_OK);
    CHECK_STATUS(tl_kv_gather_f32(kv, 0, ids, 2, 1, T, y[0][0][0], y[0][1][0], D, 2 * H * D),
                 TL_OK);
    for (int64_t t = 0; t < T; t++)
        for (int is_v = 0; is_v < 2; is_v++)
            for (uint32_t h = 0; h < H; h++)
                for (int64_t d = 0; d < D; d++)
                    CHECK(same(&ref_formats[3], y[t][is_v][h][d],
                               want_of(kv, &ref_formats[3], 0, is_v, ids, 1 + t, h, d)),
                          "(%lld, %d, %u, %lld)", (long long)t, is_v, h, (long long)d);
    tl_kv_pool_destroy(kv);
}

TEST(no_positions_are_fine)
{
    tl_kv_pool *kv = ref_pool(&ref_formats[0], 1, 4, 1, 2, 2);
    tl_set_last_error("as it was");
    CHECK_STATUS(tl_kv_gather_f32(kv, 0, NULL, 0, INT64_MAX, 0, NULL, NULL, INT64_MIN, INT64_MAX),
                 TL_OK);
    CHECK(strcmp(tl_last_error(), "as it was") == 0, "\"%s\"", tl_last_error());
    CHECK_STATUS(tl_kv_gather_f32(kv, 1, NULL, 0, 0, 0, NULL, NULL, 0, 0), TL_EINVAL);
    CHECK_STATUS(tl_kv_gather_f32(kv, 0, NULL, 0, -1, 0, NULL, NULL, 0, 0), TL_EINVAL);
    CHECK_STATUS(tl_kv_gather_f32(NULL, 0, NULL, 0, 0, 0, NULL, NULL, 0, 0), TL_EINVAL);
    tl_kv_pool_destroy(kv);
}

/* The stride of one head, or of one position, is not taken. */
TEST(strides_that_are_not_taken_may_be_anything)
{
    enum { D = 3 };
    for (int format = 0; format < REF_FORMATS; format++) {
        tl_kv_pool *kv = ref_pool(&ref_formats[format], 1, 4, 1, 1, D);
        const uint32_t id = kv_one(kv);
        const float x[2][D] = {{1, 2, 3}, {4, 5, 6}};
        float y[2][D];
        CHECK_STATUS(tl_kv_append_f32(kv, 0, &id, 1, 2, 1, x[0], x[1], INT64_MAX, INT64_MIN),
                     TL_OK);
        CHECK_STATUS(tl_kv_gather_f32(kv, 0, &id, 1, 2, 1, y[0], y[1], INT64_MIN, INT64_MAX),
                     TL_OK);
        for (int d = 0; d < D; d++)
            CHECK(fabsf(y[0][d] - x[0][d]) < 0.1f && fabsf(y[1][d] - x[1][d]) < 0.2f, "%s: %g %g",
                  ref_formats[format].name, (double)y[0][d], (double)y[1][d]);
        tl_kv_pool_destroy(kv);
    }
}

CHECK_MAIN()
