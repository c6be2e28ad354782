/* SPDX-License-Identifier: MIT */
/* test_paged_attn.c: one decode step over a paged cache: its values, its bits, and what it
 * refuses. */
#include "attn_ref.h"
#include "hook.h"

#define DECODE "tl_paged_attn_decode_f32"

/* ---- values ---- */

/* Puts whole rows given as floats into a pool: head 0 of layer 0 unless said otherwise. */
static void put(const tl_kv_pool *kv, uint32_t id, int is_v, int64_t head, int64_t slot,
                const float *x)
{
    tl_kv_cfg cfg;
    tl_kv_pool_cfg(kv, &cfg);
    uint16_t *row = slot_row(kv, &cfg, id, 0, is_v, head, slot);
    for (uint32_t d = 0; d < cfg.head_dim; d++)
        row[d] = tl_f32_to_f16(x[d]);
}

static tl_kv_pool *poisoned_pool(tl_kv_cfg cfg)
{
    tl_kv_pool *kv = make_pool(&cfg);
    uint32_t *ids = must_alloc(cfg.n_blocks * sizeof *ids);
    CHECK_STATUS(tl_kv_alloc(kv, cfg.n_blocks, ids), TL_OK);
    free(ids);
    poison_pool(kv, &cfg);
    return kv;
}

TEST(hand_example)
{
    tl_kv_pool *kv = poisoned_pool(kv_cfg(4, 2, 1, 1, 2));
    const uint32_t table[] = {3, 1};
    const float k[3][2] = {{1, 0}, {0, 1}, {1, 1}}, v[3][2] = {{1, 2}, {3, 4}, {5, 6}},
                q[] = {1, 0};
    for (int j = 0; j < 3; j++) {
        put(kv, table[j / 2], 0, 0, j % 2, k[j]);
        put(kv, table[j / 2], 1, 0, j % 2, v[j]);
    }
    const int32_t ctx = 3;
    /* by symmetry the answer is the same for every scale */
    for (int power = -3; power <= 3; power++) {
        float *out = painted(2);
        CHECK_STATUS(tl_paged_attn_decode_f32(q, kv, 0, table, 2, &ctx, out, 1, 1, 1, 2,
                                              ldexpf(1, power), 0, NULL),
                     TL_OK);
        CHECK(fabsf(out[0] - 3) < 2e-6f && fabsf(out[1] - 4) < 2e-6f, "out %.9g %.9g",
              (double)out[0], (double)out[1]);
        CHECK(rim_intact(out), "the rim was written");
        painted_free(out, 2);
    }
    tl_kv_pool_destroy(kv);
}

/* softmax(scale q K^T) V with the library's row softmax over all positions; hidden ones score
 * -inf. */
static void naive_row(const struct paged *c, const float *q, const float *k, const float *v,
                      int64_t T, double *out)
{
    float *s = floats(T);
    for (int64_t j = 0; j < T; j++) {
        double dot = 0;
        const bool seen = c->window <= 0 || j > T - 1 - c->window;
        for (int64_t d = 0; seen && d < c->D; d++)
            dot += (double)q[d] * (double)k[j * c->D + d];
        s[j] = seen ? (float)((double)c->scale * dot) : -INFINITY;
    }
    CHECK_STATUS(tl_softmax_f32(s, s, 1, T), TL_OK);
    for (int64_t d = 0; d < c->D; d++) {
        out[d] = 0;
        for (int64_t j = 0; j < T; j++)
            out[d] += s[j] > 0 ? (double)s[j] * (double)v[j * c->D + d] : 0;
    }
    free(s);
}

static void check_against_naive(const struct paged *c)
{
    double want[64];
    for (int64_t s = 0; s < c->B; s++) {
        float *k = paged_gather(c, s, 0), *v = paged_gather(c, s, 1);
        for (int64_t h = 0; h < c->H; h++) {
            const int64_t head = h / (c->H / c->Hkv) * c->ctx[s] * c->D, at = (s * c->H + h) * c->D;
            naive_row(c, c->q + at, k + head, v + head, c->ctx[s], want);
            for (int64_t d = 0; d < c->D; d++)
                CHECK(fabs((double)c->out[at + d] - want[d]) < 4e-5,
                      "layer %u, window %lld, s %lld, h %lld, d %lld: %.9g for %.9g", c->layer,
                      (long long)c->window, (long long)s, (long long)h, (long long)d,
                      (double)c->out[at + d], want[d]);
        }
        free(k), free(v);
    }
}

TEST(matches_naive_over_the_gathered_cache)
{
    for (uint32_t layer = 0; layer < 2; layer++)
        for (int64_t window = 0; window <= 20; window += 20) {
            const struct paged_spec spec = {.B = 3,
                                            .H = 6,
                                            .Hkv = 2,
                                            .D = 32,
                                            .block_tokens = 8,
                                            .window = window,
                                            .ctx = {1, 37, 70},
                                            .n_layers = 2,
                                            .layer = layer,
                                            .seed = 11 + layer};
            struct paged c = paged_make(&spec);
            paged_run(&c, NULL);
            check_against_naive(&c);
            paged_free(&c);
        }
}

TEST(equals_flash_attention_bitwise)
{
    static const enum data kinds[] = {DATA_PLAIN, DATA_STEEP, DATA_RISING, DATA_TINY};
    for (int i = 0; i < 16; i++) {
        const struct paged_spec spec = {.B = 2,
                                        .H = 6,
                                        .Hkv = 3,
                                        .D = 40,
                                        .block_tokens = 1 + 5 * (i / 4),
                                        .window = i % 2 ? 21 : 0,
                                        .ctx = {77, 1100},
                                        .data = kinds[i % 4],
                                        .seed = 21 + (uint64_t)i};
        struct paged c = paged_make(&spec);
        float *want = paged_want(&c);
        paged_run(&c, NULL);
        CHECK_PAGED(&c, want, "decode, case %d", i);
        for (int64_t s = 0; s < c.B; s++) { /* hidden positions hold NaN here, too */
            float *k = paged_gather(&c, s, 0), *v = paged_gather(&c, s, 1), *o = painted(c.H * c.D);
            CHECK_STATUS(tl_flash_attn_fwd_f32(c.q + s * c.H * c.D, k, v, o, NULL, 1, c.H, c.Hkv, 1,
                                               c.ctx[s], c.D, c.scale, c.ctx[s] - 1, 1, c.window,
                                               NULL, 0, 16, NULL, NULL),
                         TL_OK);
            CHECK_SAME(o, c.out + s * c.H * c.D, c.H * c.D, "prefill, case %d, sequence %lld", i,
                       (long long)s);
            painted_free(o, c.H * c.D);
            free(k), free(v);
        }
        free(want);
        paged_free(&c);
    }
}

/* A finite but huge key just outside the window must not become the maximum that the scores are
 * shifted by. */
TEST(hidden_keys_do_not_shift_the_maximum)
{
    const struct paged_spec spec = {.B = 1,
                                    .H = 2,
                                    .Hkv = 1,
                                    .D = 24,
                                    .block_tokens = 16,
                                    .window = 21,
                                    .ctx = {90},
                                    .seed = 31};
    struct paged c = paged_make(&spec);
    float *want = paged_want(&c);
    /* positions 64 .. 68 share a block and a tile with 69 .. 79, which are seen */
    for (int64_t j = 64; j < 69; j++)
        for (int64_t d = 0; d < c.D; d++) {
            paged_row(&c, 0, j, 0, 0)[d] = 0x7BFF;
            paged_row(&c, 0, j, 0, 1)[d] = 0x7BFF;
        }
    paged_run(&c, NULL);
    CHECK_PAGED(&c, want, "window 21 of 90");
    free(want);
    paged_free(&c);
}

/* K = 0, V = j: the output is the mean position seen, so a mask that is off by one is off by a
 * half. One sequence per length, blocks of b. */
static void check_means(int64_t b, const int32_t *ctx, const double *want, int64_t B,
                        int64_t window)
{
    uint32_t tables[64];
    const int32_t max_blocks = 8;
    tl_kv_pool *kv = poisoned_pool(kv_cfg(B * max_blocks, b, 1, 1, 1));
    float *out = painted(B), q[8];
    for (int64_t s = 0; s < B; s++) {
        q[s] = 1;
        for (int32_t i = 0; i < max_blocks; i++)
            tables[s * max_blocks + i] = (uint32_t)(B * i + s);
        for (int64_t j = 0; j < ctx[s]; j++) {
            put(kv, tables[s * max_blocks + j / b], 0, 0, j % b, &(const float){0});
            put(kv, tables[s * max_blocks + j / b], 1, 0, j % b, &(const float){(float)j});
        }
    }
    CHECK_STATUS(tl_paged_attn_decode_f32(q, kv, 0, tables, max_blocks, ctx, out, B, 1, 1, 1, 1,
                                          window, NULL),
                 TL_OK);
    for (int64_t s = 0; s < B; s++)
        CHECK(fabs((double)out[s] - want[s]) <= 1e-6 * want[s],
              "window %lld, ctx %d: %.9g for %.9g", (long long)window, ctx[s], (double)out[s],
              want[s]);
    painted_free(out, B);
    tl_kv_pool_destroy(kv);
}

TEST(the_window_counts_the_row_itself)
{
    static const struct {
        int64_t window;
        double want;
    } rows[] = {{1, 7}, {2, 6.5}, {3, 6}, {8, 3.5}, {9, 3.5}};
    for (size_t i = 0; i < 5; i++)
        check_means(1 + (int64_t)i, &(const int32_t){8}, &rows[i].want, 1, rows[i].window);
    check_means(4, (const int32_t[]){3, 9}, (const double[]){1.5, 7.5}, 2, 2);
}

TEST(no_value_of_window_overflows)
{
    static const int64_t all[] = {0,
                                  -1,
                                  INT64_MIN,
                                  INT64_MIN + 1,
                                  INT64_MAX,
                                  INT64_MAX - 1,
                                  INT64_MAX - 7,
                                  INT32_MAX,
                                  -(INT64_C(1) << 32)};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        check_means(4, (const int32_t[]){8, 1, 29}, (const double[]){3.5, 0, 14}, 3, all[i]);
}

/* Windows either side of the edges of blocks, tiles and splits; the blocks before them have garbage
 * ids. */
TEST(windows_around_every_edge)
{
    static const int64_t edges[] = {1,    2,    7,    15,   16,   17,   31,   32,   33,  1000,
                                    1008, 1023, 1024, 1025, 1075, 1076, 1077, 2100, 5000};
    for (size_t i = 0; i < sizeof edges / sizeof *edges; i++) {
        const struct paged_spec spec = {.B = 3,
                                        .H = 3,
                                        .Hkv = 1,
                                        .D = 9,
                                        .block_tokens = i % 3 == 0   ? 16
                                                        : i % 3 == 1 ? 7
                                                                     : 100,
                                        .window = edges[i],
                                        .ctx = {2100, 1024, 1025},
                                        .seed = 41 + i};
        struct paged c = paged_make(&spec);
        float *want = paged_want(&c);
        paged_run(&c, NULL);
        CHECK_PAGED(&c, want, "window %lld", (long long)edges[i]);
        free(want);
        paged_free(&c);
    }
}

TEST(query_heads_read_the_kv_head_of_their_group)
{
    static const struct {
        int64_t H, Hkv;
        float want[6];
    } rows[] = {{6, 2, {1, 1, 1, 2, 2, 2}},
                {3, 3, {1, 2, 3}},
                {4, 1, {1, 1, 1, 1}},
                {6, 3, {1, 1, 2, 2, 3, 3}}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        tl_kv_pool *kv = poisoned_pool(kv_cfg(2, 3, 1, rows[i].Hkv, 1));
        for (int64_t head = 0; head < rows[i].Hkv; head++) {
            put(kv, 1, 0, head, 0, &(const float){1});
            put(kv, 1, 1, head, 0, &(const float){(float)(head + 1)});
        }
        const float q[6] = {1, -2, 3, 1, 1, 1};
        float *out = painted(rows[i].H);
        CHECK_STATUS(
            tl_paged_attn_decode_f32(q, kv, 0, &(const uint32_t){1}, 1, &(const int32_t){1}, out, 1,
                                     rows[i].H, rows[i].Hkv, 1, 1, 0, NULL),
            TL_OK);
        CHECK_SAME(out, rows[i].want, rows[i].H, "H %lld, Hkv %lld", (long long)rows[i].H,
                   (long long)rows[i].Hkv);
        painted_free(out, rows[i].H);
        tl_kv_pool_destroy(kv);
    }
}

/* Numbers of KV heads and groups that fill no round number of rows, alone and shared. */
TEST(any_number_of_kv_heads_and_groups)
{
    static const int64_t kv_heads[] = {1, 2, 3, 5, 7, 11, 33}, groups[] = {1, 3, 5, 11, 16, 17, 33};
    tl_pool *tp = make_threads(2);
    for (int i = 0; i < 49; i++) {
        const int64_t Hkv = kv_heads[i % 7], group = groups[i / 7];
        const struct paged_spec spec = {.B = 7,
                                        .H = Hkv * group,
                                        .Hkv = Hkv,
                                        .D = i % 3 ? 5 : 17,
                                        .block_tokens = 16,
                                        .ctx = {3, 4, 5, 6, 7, 8, 9},
                                        .seed = 46 + (uint64_t)i};
        struct paged c = paged_make(&spec);
        float *want = paged_want(&c);
        for (int threads = 1; threads <= 2; threads++) {
            paged_run(&c, threads == 1 ? NULL : tp);
            CHECK_PAGED(&c, want, "Hkv %lld, groups of %lld, %d threads", (long long)Hkv,
                        (long long)group, threads);
        }
        free(want);
        paged_free(&c);
    }
    tl_pool_destroy(tp);
}

/* D 1, q 1, scale 1: the keys are the scores. */
static float decode_scores(const float *scores, const float *v, int n)
{
    tl_kv_pool *kv = poisoned_pool(kv_cfg(2, 1100, 1, 1, 1));
    for (int j = 0; j < n; j++) {
        put(kv, 1, 0, 0, j, scores + j);
        put(kv, 1, 1, 0, j, v + j);
    }
    float *out = painted(1);
    CHECK_STATUS(tl_paged_attn_decode_f32(&(const float){1}, kv, 0, &(const uint32_t){1}, 1,
                                          &(const int32_t){n}, out, 1, 1, 1, 1, 1, 0, NULL),
                 TL_OK);
    const float x = *out;
    painted_free(out, 1);
    tl_kv_pool_destroy(kv);
    return x;
}

TEST(large_scores_neither_overflow_nor_vanish)
{
    const float x = decode_scores((const float[]){1000, 999, -1000}, (const float[]){1, 2, 4}, 3);
    CHECK(fabsf(x - 1.2689414f) < 3e-7f, "%.9g", (double)x);
    CHECK_BITS(decode_scores((const float[]){-65504}, (const float[]){0.1f}, 1),
               tl_f16_to_f32(tl_f32_to_f16(0.1f)), "one key is its value");
    const float far = decode_scores((const float[]){-60000, 60000}, (const float[]){5, -3}, 2);
    CHECK_BITS(far, -3.0f, "the lesser weight vanishes");
}

/* What visible keys and values that are no numbers do; every NaN is 0x7FC00000 whatever went in. */
TEST(infinities_and_nans_that_are_seen)
{
    const float inf = INFINITY, nan_row = float_of(TL_NAN_BITS), one[] = {1, 1, 1};
    static const float bad[] = {NAN, -NAN, INFINITY};
    for (size_t i = 0; i < 3; i++)
        for (int at = 0; at < 3; at++) {
            float s[3] = {0, 1, 2};
            s[at] = bad[i];
            CHECK_BITS(decode_scores(s, one, 3), nan_row, "score %g at %d", (double)bad[i], at);
        }
    CHECK_BITS(decode_scores((const float[]){-inf, 0, -inf}, (const float[]){7, 5, 9}, 3), 5.0f,
               "-inf is a key of no weight");
    CHECK_BITS(decode_scores((const float[]){-inf, -inf}, (const float[]){7, NAN}, 2), 0.0f,
               "nothing but -inf is nothing");
    CHECK_BITS(decode_scores((const float[]){-inf, inf}, one, 2), nan_row, "-inf and +inf");
    CHECK_BITS(decode_scores((const float[]){0, 0}, (const float[]){inf, 1}, 2), inf,
               "an infinite value");
    CHECK_BITS(decode_scores((const float[]){0, 0}, (const float[]){1, -inf}, 2), -inf,
               "a value of -inf");
    CHECK_BITS(decode_scores((const float[]){0, 0}, (const float[]){inf, -inf}, 2), nan_row,
               "opposite infinities");
    CHECK_BITS(decode_scores((const float[]){0, -1000}, (const float[]){1, inf}, 2), nan_row,
               "a weight of 0 times infinity");
    CHECK_BITS(decode_scores((const float[]){-inf, 0}, (const float[]){-NAN, 1}, 2), nan_row,
               "a NaN value");
    /* in a tile before anything finite was seen, -inf hides its value; in a later one, its weight
     * of 0 meets it */
    float s[40], v[40];
    for (int j = 0; j < 40; j++)
        s[j] = j < 16 ? -inf : 0, v[j] = j < 16 ? NAN : 2;
    CHECK_BITS(decode_scores(s, v, 40), 2.0f, "a tile of -inf leaves no trace");
    s[20] = -inf, v[20] = inf;
    CHECK_BITS(decode_scores(s, v, 40), nan_row, "0 * inf inside a tile that counts");
}

/* Tiles of nothing but -inf, their values NaN, before the first finite score of a sequence and of
 * its second split, whose weight beside that of the first is 1. */
TEST(tiles_of_minus_infinity_leave_no_trace)
{
    float s[1072], v[1072];
    for (int hidden = 16; hidden <= 48; hidden += 16) {
        for (int j = 0; j < hidden + 16; j++)
            s[j] = j < hidden ? -INFINITY : 3, v[j] = j < hidden ? NAN : 2;
        CHECK_BITS(decode_scores(s, v, hidden + 16), 2.0f, "%d at the beginning", hidden);
    }
    for (int hidden = 16; hidden <= 32; hidden += 16) {
        for (int j = 0; j < 1024 + hidden + 16; j++)
            s[j] = j < 1024            ? -60000
                   : j < 1024 + hidden ? -INFINITY
                                       : 0,
            v[j] = j < 1024            ? 7
                   : j < 1024 + hidden ? NAN
                                       : 2;
        CHECK_BITS(decode_scores(s, v, 1024 + hidden + 16), 2.0f,
                   "%d at the beginning of the second split", hidden);
    }
}

/* One sequence's values, all NaN and infinite, are not what the next one on the same thread starts
 * from. */
TEST(non_numbers_of_one_sequence_stay_there)
{
    static const uint16_t bad[] = {0x7E00, 0x7C00, 0xFC00};
    for (int i = 0; i < 6; i++) {
        const struct paged_spec spec = {.B = 3,
                                        .H = 4,
                                        .Hkv = 2,
                                        .D = 24,
                                        .block_tokens = 16,
                                        .ctx = {20, i < 3 ? 70 : 1100, 5},
                                        .seed = 541 + (uint64_t)i};
        struct paged c = paged_make(&spec);
        for (int64_t head = 0; head < c.Hkv; head++)
            for (int64_t d = 0; d < c.D; d++)
                paged_row(&c, 0, 3, head, 1)[d] = bad[i % 3];
        float *want = paged_want(&c);
        paged_run(&c, NULL);
        for (int64_t x = 0; x < paged_size(&c); x++)
            CHECK(isfinite(want[x]) == (x >= c.H * c.D), "the reference itself");
        CHECK_PAGED(&c, want, "code %04x", bad[i % 3]);
        free(want);
        paged_free(&c);
    }
}

TEST(seen_nans_and_infinities_bit_for_bit)
{
    for (uint64_t seed = 0; seed < 40; seed++) {
        const struct paged_spec spec = {.B = 2,
                                        .H = 4,
                                        .Hkv = 2,
                                        .D = 5 + (int64_t)seed,
                                        .block_tokens = 6,
                                        .ctx = {1 + (int64_t)seed, seed % 5 == 0 ? 1030 : 20},
                                        .data = DATA_SPECIAL,
                                        .seed = 500 + seed};
        struct paged c = paged_make(&spec);
        float *want = paged_want(&c);
        paged_run(&c, NULL);
        CHECK_PAGED(&c, want, "seed %llu", (unsigned long long)seed);
        free(want);
        paged_free(&c);
    }
}

TEST(every_scale_follows_the_arithmetic)
{
    static const float scales[] = {0,    -0.0f, -1,  -0.125f, 1e-30f,   0x1p-149f,
                                   1e4f, 3e38f, NAN, -NAN,    INFINITY, -INFINITY};
    for (size_t i = 0; i < sizeof scales / sizeof *scales; i++) {
        const struct paged_spec spec = {.B = 2,
                                        .H = 2,
                                        .Hkv = 1,
                                        .D = 20,
                                        .block_tokens = 8,
                                        .ctx = {50, 3},
                                        .scale_given = true,
                                        .scale = scales[i],
                                        .seed = 61};
        struct paged c = paged_make(&spec);
        float *want = paged_want(&c);
        paged_run(&c, NULL);
        CHECK_PAGED(&c, want, "scale %g", (double)scales[i]);
        if (isnan(scales[i]))
            for (int64_t j = 0; j < paged_size(&c); j++)
                CHECK_BITS(c.out[j], float_of(TL_NAN_BITS), "scale NaN");
        free(want);
        paged_free(&c);
    }
}

/* The independent check of the reference itself: plain softmax in double, on every head width that
 * has tails. */
TEST(close_to_double_at_every_head_width)
{
    static const int64_t widths[] = {1,  2,  3,  7,  8,  9,  15,  16,  17,  31,  33,  40, 46,
                                     59, 64, 80, 96, 100, 112, 128, 160, 192, 200, 256, 576};
    for (size_t i = 0; i < sizeof widths / sizeof *widths; i++) {
        const struct paged_spec spec = {.B = 1,
                                        .H = 4,
                                        .Hkv = 2,
                                        .D = widths[i],
                                        .block_tokens = 16,
                                        .ctx = {37},
                                        .seed = 71 + i};
        struct paged c = paged_make(&spec);
        paged_run(&c, NULL);
        float *k = paged_gather(&c, 0, 0), *v = paged_gather(&c, 0, 1), largest = 0;
        double *want = must_alloc((size_t)c.D * sizeof *want), lse;
        for (int64_t j = 0; j < c.Hkv * 37 * c.D; j++)
            largest = fmaxf(largest, fabsf(v[j]));
        for (int64_t h = 0; h < c.H; h++) {
            const struct ref_row row = {.q = c.q + h * c.D,
                                        .k = k + h / 2 * 37 * c.D,
                                        .v = v + h / 2 * 37 * c.D,
                                        .D = c.D,
                                        .hi = 36,
                                        .scale = c.scale};
            ref64_row(&row, want, &lse);
            for (int64_t d = 0; d < c.D; d++)
                CHECK(fabs((double)c.out[h * c.D + d] - want[d]) <= 1e-5 * (double)largest,
                      "D %lld, head %lld, d %lld: %.9g for %.9g", (long long)c.D, (long long)h,
                      (long long)d, (double)c.out[h * c.D + d], want[d]);
        }
        free(k), free(v), free(want);
        paged_free(&c);
    }
}

/* Contexts that end before, at and behind the edge of a stretch, alone and side by side. */
TEST(contexts_over_stretches_follow_the_arithmetic)
{
    static const int64_t windows[] = {0, 20, 16384, 17000, 40000};
    tl_pool *tp = make_threads(3);
    for (size_t i = 0; i < 5; i++) {
        const struct paged_spec spec = {.B = 5,
                                        .H = 2,
                                        .Hkv = 1,
                                        .D = 4,
                                        .block_tokens = i % 2 ? 33 : 16,
                                        .window = windows[i],
                                        .ctx = {16384, 33000, 16385, 7, 32769},
                                        .data = i % 2 ? DATA_RISING : DATA_PLAIN,
                                        .seed = 541 + i};
        struct paged c = paged_make(&spec);
        float *want = paged_want(&c);
        for (int isa = 0; isa_select(isa); isa++) {
            paged_run(&c, NULL);
            CHECK_PAGED(&c, want, "%s, window %lld", tl_isa_name(), (long long)c.window);
            paged_run(&c, tp);
            CHECK_PAGED(&c, want, "%s, window %lld, three threads", tl_isa_name(),
                        (long long)c.window);
        }
        free(want);
        paged_free(&c);
    }
    tl_pool_destroy(tp);
}

/* A pool may hold wider rows; they are not attended. */
TEST(head_widths_end_where_the_header_says)
{
    for (int64_t D = TL_MAX_HEAD_DIM; D <= TL_MAX_HEAD_DIM + 1; D++) {
        const struct paged_spec spec = {
            .B = 1, .H = 2, .Hkv = 1, .D = D, .block_tokens = 2, .ctx = {3}, .seed = 550};
        struct paged c = paged_make(&spec);
        const bool wide = D > TL_MAX_HEAD_DIM;
        CHECK_STATUS(paged_call(&c, NULL), wide ? TL_EUNSUPPORTED : TL_OK);
        CHECK(!wide || (error_names(DECODE) && error_mentions(D)), "\"%s\"", tl_last_error());
        CHECK(!wide || all_paint(c.out, paged_size(&c)), "out was written");
        c.D = D - 1; /* decides before */
        CHECK_STATUS(paged_call(&c, NULL), TL_ESHAPE);
        c.D = D, c.ctx[0] = 0; /* and this behind */
        CHECK_STATUS(paged_call(&c, NULL), wide ? TL_EUNSUPPORTED : TL_EINVAL);
        paged_free(&c);
    }
}

/* From the window's edge and over two splits. */
TEST(heads_as_wide_as_may_be)
{
    static const struct {
        int64_t H, D, block_tokens, window;
    /* 25 of 1040: from 1015 on */
    } rows[] = {{1, TL_MAX_HEAD_DIM, 7, 25},
                {2, TL_MAX_HEAD_DIM - 1, 16, 25},
                {1, TL_MAX_HEAD_DIM, 16, 0},
                {1, TL_MAX_HEAD_DIM - 16, 100, 25}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const struct paged_spec spec = {.B = 1,
                                        .H = rows[i].H,
                                        .Hkv = 1,
                                        .D = rows[i].D,
                                        .block_tokens = rows[i].block_tokens,
                                        .window = rows[i].window,
                                        .ctx = {1040},
                                        .seed = 551 + i};
        struct paged c = paged_make(&spec);
        float *want = paged_want(&c);
        for (int isa = 0; isa_select(isa); isa++) {
            paged_run(&c, NULL);
            CHECK_PAGED(&c, want, "%s, D %lld, window %lld", tl_isa_name(), (long long)c.D,
                        (long long)c.window);
        }
        free(want);
        paged_free(&c);
    }
}

/* ---- what may not be read ---- */

/* A hook whose memory ends at an unmapped page (but for what alignment asks), filled with f16
 * NaN. */
static void *edge_alloc(void *user, size_t n, size_t align)
{
    (void)user;
    const size_t whole = n + 4096 + sizeof(size_t);
    char *base = guarded(whole);
    memset(base, 0xFF, whole);
    char *p = base + whole - n;
    p -= (uintptr_t)p % align;
    memcpy(p - sizeof whole, &whole, sizeof whole);
    memcpy(p - 2 * sizeof whole, &base, sizeof base);
    return p;
}

static void edge_free(void *user, void *p)
{
    (void)user;
    size_t whole;
    char *base;
    memcpy(&whole, (char *)p - sizeof whole, sizeof whole);
    memcpy(&base, (char *)p - 2 * sizeof whole, sizeof base);
    guarded_free(base, whole);
}

TEST(nothing_past_the_pool_is_read)
{
    const tl_allocator edge = {edge_alloc, edge_free, NULL};
    for (int64_t D = 1; D <= 130; D += D < 36 ? 1 : 13)
        for (int i = 0; (isa_select(i)); i++) {
            CHECK_STATUS(tl_set_allocator(&edge), TL_OK);
            tl_kv_pool *kv = poisoned_pool(kv_cfg(2, 16, 1, 1, D));
            CHECK_STATUS(tl_set_allocator(NULL), TL_OK);
            float *row = floats(D), *q = guarded((size_t)D * sizeof *q), *out = painted(D), m, L,
                  *want = floats(D);
            for (int64_t d = 0; d < D; d++)
                row[d] = 0.5f * (float)(d % 5), q[d] = 1;
            float *dense = floats(16 * D);
            for (int64_t j = 0; j < 16; j++) {
                put(kv, 1, 0, 0, j, row);
                put(kv, 1, 1, 0, j, row);
                memcpy(dense + j * D, row, (size_t)D * sizeof *row);
            }
            uint32_t *table = guarded(sizeof *table);
            int32_t *ctx = guarded(sizeof *ctx);
            *table = 1, *ctx = 16;
            CHECK_STATUS(
                tl_paged_attn_decode_f32(q, kv, 0, table, 1, ctx, out, 1, 1, 1, D, 0.25f, 0, NULL),
                TL_OK);
            ref_row(
                &(const struct ref_row){
                    .q = q, .k = dense, .v = dense, .D = D, .hi = 15, .scale = 0.25f},
                want, &m, &L);
            CHECK_SAME(out, want, D, "D %lld", (long long)D);
            CHECK(rim_intact(out), "D %lld: the rim was written", (long long)D);
            tl_kv_pool_destroy(kv);
            guarded_free(q, (size_t)D * sizeof *q);
            guarded_free(table, sizeof *table);
            guarded_free(ctx, sizeof *ctx);
            painted_free(out, D);
            free(row), free(want), free(dense);
        }
}

TEST(garbage_in_entries_that_are_not_needed)
{
    static const uint32_t garbage[] = {UINT32_MAX, 0x80000000u, INT32_MAX, 6, 1};
    tl_kv_pool *kv = poisoned_pool(kv_cfg(6, 4, 1, 1, 3));
    const float k[3] = {1, 0.5f, -1}, v[3] = {2, 4, 8}, q[3] = {1, 1, 1};
    for (int j = 0; j < 5; j++) {
        put(kv, j < 4 ? 2 : 0, 0, 0, j % 4, k);
        put(kv, j < 4 ? 2 : 0, 1, 0, j % 4, v);
    }
    uint32_t *table = guarded(6 * sizeof *table);
    for (int32_t ctx = 4; ctx <= 5; ctx++)
        for (int g = 0; g < 5; g++) {
            float *out = painted(3);
            for (int i = 0; i < 6; i++)
                table[i] = garbage[g];
            table[0] = 2;
            if (ctx == 5)
                table[1] = 0;
            CHECK_STATUS(
                tl_paged_attn_decode_f32(q, kv, 0, table, 6, &ctx, out, 1, 1, 1, 3, 1, 0, NULL),
                TL_OK);
            /* equal keys: the mean of equal values */
            CHECK_SAME(out, v, 3, "ctx %d, entries %u", ctx, garbage[g]);
            painted_free(out, 3);
        }
    guarded_free(table, 6 * sizeof *table);
    tl_kv_pool_destroy(kv);
}

/* Slots past the context, with each kind of poison in K, in V and in both: the bits of a clean
 * cache. */
TEST(poison_in_unwritten_slots_does_not_leak)
{
    const struct paged_spec spec = {
        .B = 1, .H = 2, .Hkv = 2, .D = 5, .block_tokens = 8, .ctx = {3}, .seed = 81};
    struct paged c = paged_make(&spec);
    float *want = paged_want(&c);
    for (int i = 0; i < N_POISON; i++)
        for (int where = 0; where < 4; where++) {
            for (int64_t slot = 3; slot < 8; slot++)
                for (int64_t x = 0; x < 2 * 5; x++)
                    for (int is_v = 0; is_v < 2; is_v++)
                        paged_row(&c, 0, slot, x / 5, is_v)[x % 5] =
                            where >> is_v & 1 ? poison_codes[i] : 0;
            paged_run(&c, NULL);
            CHECK_PAGED(&c, want, "code %04x, where %d", poison_codes[i], where);
        }
    free(want);
    paged_free(&c);
}

static uint32_t pool_checksum(const struct paged *c)
{
    uint32_t crc = 0;
    for (uint32_t id = 0; id < c->cfg.n_blocks; id++)
        crc = tl_crc32c(tl_kv_block_ptr(c->kv, id, 0, 0), tl_kv_block_bytes(c->kv), crc);
    return crc;
}

TEST(nothing_but_out_is_written)
{
    const struct paged_spec spec = {
        .B = 3, .H = 4, .Hkv = 2, .D = 16, .block_tokens = 8, .ctx = {9, 1030, 30}, .seed = 91};
    struct paged c = paged_make(&spec);
    tl_kv_stats before, after;
    tl_kv_stats_get(c.kv, &before);
    const uint32_t pool = pool_checksum(&c), q = tl_crc32c(c.q, (size_t)paged_size(&c) * 4, 0);
    const uint32_t tables = tl_crc32c(c.tables, (size_t)(c.B * c.max_blocks) * 4, 0),
                   lens = tl_crc32c(c.ctx, (size_t)c.B * 4, 0);
    tl_set_last_error("kept");
    paged_run(&c, NULL);
    tl_kv_stats_get(c.kv, &after);
    CHECK(strcmp(tl_last_error(), "kept") == 0, "success set the slot: %s", tl_last_error());
    CHECK(pool == pool_checksum(&c) && memcmp(&before, &after, sizeof before) == 0,
          "the pool changed");
    CHECK(q == tl_crc32c(c.q, (size_t)paged_size(&c) * 4, 0), "q changed");
    CHECK(tables == tl_crc32c(c.tables, (size_t)(c.B * c.max_blocks) * 4, 0) &&
              lens == tl_crc32c(c.ctx, (size_t)c.B * 4, 0),
          "tables or lengths changed");
    paged_free(&c);
}

TEST(decode_allocates_nothing)
{
    static const int64_t widths[] = {3, 128, 1100};
    tl_pool *tp = make_threads(3);
    for (int i = 0; i < 6; i++) {
        const struct paged_spec spec = {.B = 2,
                                        .H = 32,
                                        .Hkv = 1,
                                        .D = widths[i / 2],
                                        .block_tokens = 16,
                                        .ctx = {70, 1030},
                                        .seed = 95};
        struct paged c = paged_make(&spec);
        float *want = paged_want(&c);
        struct hook refuse;
        hook_install(&refuse, 1);
        const tl_status got = paged_call(&c, i % 2 ? tp : NULL);
        hook_remove();
        CHECK(got == TL_OK && refuse.calls == 0, "D %lld: %s after %ld calls of the hook",
              (long long)c.D, tl_status_str(got), refuse.calls);
        CHECK_PAGED(&c, want, "D %lld", (long long)c.D);
        free(want);
        paged_free(&c);
    }
    tl_pool_destroy(tp);
}

/* ---- batch, threads, sharing ---- */

/* One sequence of a case, in a batch of its own. */
static struct paged alone(const struct paged *c, int64_t s, float *out)
{
    struct paged one = *c;
    one.B = 1, one.ctx += s, one.tables += s * c->max_blocks, one.q += s * c->H * c->D,
    one.out = out;
    return one;
}

TEST(shared_blocks_and_batch_invariance)
{
    enum { B = 16 };
    struct paged_spec spec = {
        .B = B, .H = 4, .Hkv = 2, .D = 12, .block_tokens = 16, .data = DATA_PLAIN, .seed = 101};
    for (int s = 0; s < B; s++)
        spec.ctx[s] = 33 + 3 * s + (s % 5 == 4 ? 1100 : 0);
    struct paged c = paged_make(&spec);
    for (int64_t s = 1; s < B; s++) /* positions 0 .. 31 of all are those of the first */
        memcpy(c.tables + s * c.max_blocks, c.tables, 2 * sizeof *c.tables);
    float *want = paged_want(&c), *out = painted(c.H * c.D);
    paged_run(&c, NULL);
    CHECK_PAGED(&c, want, "the batch");
    for (int64_t s = 0; s < B; s++) {
        const struct paged one = alone(&c, s, out);
        paged_run(&one, NULL);
        CHECK_SAME(out, want + s * c.H * c.D, c.H * c.D, "sequence %lld alone", (long long)s);
    }
    painted_free(out, c.H * c.D);
    free(want);
    paged_free(&c);
}

TEST(batch_order_and_thread_count_change_nothing)
{
    enum { B = 7 };
    const struct paged_spec spec = {.B = B,
                                    .H = 4,
                                    .Hkv = 1,
                                    .D = 8,
                                    .block_tokens = 16,
                                    .ctx = {1, 2, 17, 64, 65, 500, 3000},
                                    .seed = 111};
    struct paged c = paged_make(&spec), back = c;
    const int64_t row = c.H * c.D;
    float *want = paged_want(&c);
    back.tables = must_alloc((size_t)(B * c.max_blocks) * sizeof *back.tables),
    back.ctx = must_alloc(B * sizeof *back.ctx);
    back.q = floats(B * row), back.out = painted(B * row);
    for (int64_t s = 0; s < B; s++) {
        memcpy(back.tables + s * c.max_blocks, c.tables + (B - 1 - s) * c.max_blocks,
               (size_t)c.max_blocks * sizeof *c.tables);
        memcpy(back.q + s * row, c.q + (B - 1 - s) * row, (size_t)row * sizeof *c.q);
        back.ctx[s] = c.ctx[B - 1 - s];
    }
    static const int threads[] = {1, 2, 3, 5};
    for (int t = 0; t < 4; t++) {
        tl_pool *tp = make_threads(threads[t]);
        for (int repeat = 0; repeat < 20; repeat++) {
            paged_run(&c, tp);
            CHECK_PAGED(&c, want, "%d threads", threads[t]);
        }
        paged_run(&back, tp);
        for (int64_t s = 0; s < B; s++)
            CHECK_SAME(back.out + s * row, want + (B - 1 - s) * row, row, "reversed, %d threads",
                       threads[t]);
        tl_pool_destroy(tp);
    }
    free(back.tables), free(back.ctx), free(back.q), painted_free(back.out, B * row);
    free(want);
    paged_free(&c);
}

TEST(pool_result_equals_serial_bitwise)
{
    const struct paged_spec specs[] = {
        {.B = 5,
         .H = 6,
         .Hkv = 3,
         .D = 40,
         .block_tokens = 16,
         .ctx = {5, 300, 1, 64, 1100},
         .seed = 121},
        {.B = 1, .H = 8, .Hkv = 1, .D = 16, .block_tokens = 32, .ctx = {4000}, .seed = 122},
        {.B = 1, .H = 1, .Hkv = 1, .D = 3, .block_tokens = 1, .ctx = {1}, .seed = 123},
        {.B = 3,
         .H = 32,
         .Hkv = 2,
         .D = 64,
         .block_tokens = 8,
         .window = 60,
         .ctx = {200, 61, 7},
         .seed = 124},
    };
    static const int threads[] = {4, 2, 3, 5, 6, 7, 8};
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++) {
        struct paged c = paged_make(&specs[i]);
        float *want = floats(paged_size(&c));
        paged_run(&c, NULL);
        memcpy(want, c.out, (size_t)paged_size(&c) * sizeof *want);
        for (int t = 0; t < 7; t++) {
            tl_pool *tp = make_threads(threads[t]);
            for (int repeat = 0; repeat < 3; repeat++) {
                paged_run(&c, tp);
                CHECK_PAGED(&c, want, "case %zu, %d threads", i, threads[t]);
            }
            tl_pool_destroy(tp);
        }
        free(want);
        paged_free(&c);
    }
}

/* Shared, sequences are begun by the class of their length: each once, whatever classes there
 * are. */
TEST(lengths_of_every_class_are_attended_once)
{
    enum { B = 13 };
    const struct paged_spec specs[] = {
        {.B = B,
         .H = 4,
         .Hkv = 2,
         .D = 24,
         .block_tokens = 16,
         .seed = 131,
         /* a half, a quarter and an eighth of 1040 */
         .ctx = {1040, 1, 2, 521, 520, 519, 261, 260, 130, 131, 129, 65, 1039}},
        {.B = B,
         .H = 4,
         .Hkv = 2,
         .D = 24,
         .block_tokens = 16,
         .window = 64,
         .seed = 132,
         .ctx = {1040, 1, 8, 9, 16, 17, 32, 33, 63, 64, 65, 500, 1000}},
        {.B = B,
         .H = 2,
         .Hkv = 2,
         .D = 24,
         .block_tokens = 16,
         .seed = 133,
         .ctx = {7, 7, 7, 7, 7, 7, 4, 7, 7, 7, 7, 7, 7}},
        {.B = B,
         .H = 2,
         .Hkv = 2,
         .D = 24,
         .block_tokens = 16,
         .seed = 134,
         .ctx = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 900}},
    };
    for (size_t i = 0; i < sizeof specs / sizeof *specs; i++) {
        struct paged c = paged_make(&specs[i]);
        float *want = paged_want(&c);
        for (int threads = 2; threads <= 5; threads++) {
            tl_pool *tp = make_threads(threads);
            paged_run(&c, tp);
            CHECK_PAGED(&c, want, "case %zu, %d threads", i, threads);
            tl_pool_destroy(tp);
        }
        free(want);
        paged_free(&c);
    }
}

TEST(a_step_is_shared_when_it_costs_more_than_waking_a_thread)
{
    tl_small_step_ns = 50000;
    CHECK(!tl_worth_waking(tl_attn_ns(64 * 128, 8, 32)), "sharing"); /* a few microseconds */
    CHECK(tl_worth_waking(tl_attn_ns(4096 * 128, 8, 32)), "sharing"); /* a millisecond */
    CHECK(!tl_worth_waking(tl_attn_ns(0, 8, 32)), "sharing");
    CHECK(tl_worth_waking(tl_attn_ns(1e15, 1e3, 1e3)), "sharing");
    tl_small_step_ns = 0;
    CHECK(tl_worth_waking(tl_attn_ns(1, 1, 1)), "sharing");
    /* what is read, and what is multiplied */
    CHECK(tl_attn_ns(40, 3, 0) == 30 && tl_attn_ns(40, 0, 3) == 6, "%g, %g", tl_attn_ns(40, 3, 0),
          tl_attn_ns(40, 0, 3));
}

/* The same values in blocks of other sizes, and at addresses that are no multiple of anything but
 * 4. */
TEST(block_size_and_alignment_change_nothing)
{
    const struct paged_spec spec = {
        .B = 1, .H = 6, .Hkv = 2, .D = 33, .block_tokens = 2100, .ctx = {2100}, .seed = 131};
    struct paged c = paged_make(&spec);
    float *want = paged_want(&c);
    static const int64_t sizes[] = {1, 3, 16, 17, 100, 255, 1024, 2099};
    for (int i = 0; i < 8; i++) {
        struct paged_spec other_spec = spec;
        other_spec.block_tokens = sizes[i], other_spec.seed = 132 + (uint64_t)i;
        struct paged other = paged_make(&other_spec);
        for (int64_t j = 0; j < 2100; j++)
            for (int64_t head = 0; head < 2; head++)
                for (int is_v = 0; is_v < 2; is_v++)
                    memcpy(paged_row(&other, 0, j, head, is_v), paged_row(&c, 0, j, head, is_v),
                           33 * sizeof(uint16_t));
        float *q = floats(paged_size(&c) + 16), *out = painted(paged_size(&c) + i);
        memcpy(q + i, c.q, (size_t)paged_size(&c) * sizeof *q);
        struct paged moved = other;
        moved.q = q + i, moved.out = out;
        paged_run(&moved, NULL);
        CHECK_SAME(out, want, paged_size(&c), "blocks of %lld", (long long)sizes[i]);
        free(q), painted_free(out, paged_size(&c) + i);
        paged_free(&other);
    }
    free(want);
    paged_free(&c);
}

/* ---- what is refused ---- */

/* A step of three sequences that is in order until faults are put in. q and out are one array, so
 * that a test sees every write. */
enum {
    BAD_B = 3,
    BAD_H = 4,
    BAD_HKV = 2,
    BAD_D = 5,
    BAD_BLOCKS = 13,
    BAD_B_TOKENS = 4,
    BAD_SIZE = BAD_B * BAD_H * BAD_D
};
struct bad {
    float *both; /* q, then out; guarded */
    uint32_t tables[BAD_B * BAD_BLOCKS];
    int32_t ctx[BAD_B];
    struct paged call;
    tl_pool *tp;
    bool inside; /* called from inside a range of tp */
    const uint32_t *tables_arg;
    const int32_t *ctx_arg;
};

static void bad_fresh(struct bad *x, tl_kv_pool *kv, float *both, tl_pool *tp)
{
    *x = (struct bad){.both = both, .tp = tp, .tables_arg = x->tables, .ctx_arg = x->ctx};
    x->call = (struct paged){.kv = kv,
                             .layer = 1,
                             .B = BAD_B,
                             .H = BAD_H,
                             .Hkv = BAD_HKV,
                             .D = BAD_D,
                             .scale = 0.5f,
                             .max_blocks = BAD_BLOCKS,
                             .q = both,
                             .out = both + BAD_SIZE};
    for (int i = 0; i < BAD_B * BAD_BLOCKS; i++)
        x->tables[i] = (uint32_t)i % 20;
    x->ctx[0] = 50, x->ctx[1] = 47, x->ctx[2] = 52; /* 13, 12 and 13 entries */
    for (int i = 0; i < BAD_SIZE; i++)
        both[i] = 0.25f * (float)i;
    repaint(both + BAD_SIZE, BAD_SIZE);
}

static tl_status bad_call(const void *bad)
{
    const struct bad *x = bad;
    const struct paged *c = &x->call;
    return tl_paged_attn_decode_f32(c->q, c->kv, c->layer, x->tables_arg, c->max_blocks, x->ctx_arg,
                                    c->out, c->B, c->H, c->Hkv, c->D, c->scale, c->window, x->tp);
}

static tl_status bad_run(const struct bad *x)
{
    return run_call(bad_call, x, x->inside ? x->tp : NULL);
}

/* The faults. Each puts itself into a call; `rank` says who decides where two are there: the lower
 * one. */
#define FAULT(name, ...)                       \
    static void name(struct bad *x)            \
    {                                          \
        __VA_ARGS__;                           \
    }
FAULT(null_q, x->call.q = NULL)
FAULT(null_kv, x->call.kv = NULL)
FAULT(null_tables, x->tables_arg = NULL)
FAULT(null_ctx, x->ctx_arg = NULL)
FAULT(null_out, x->call.out = NULL)
FAULT(negative_B, x->call.B = -1)
FAULT(smallest_B, x->call.B = INT64_MIN)
FAULT(impossible_B, x->call.B = INT64_MAX)
FAULT(impossible_B_by_q, x->call.B = INT64_C(1) << 60)
FAULT(no_blocks, x->call.max_blocks = 0)
FAULT(negative_blocks, x->call.max_blocks = INT32_MIN)
FAULT(layer_past_the_last, x->call.layer = 2)
FAULT(layer_minus_one, x->call.layer = UINT32_MAX)
FAULT(other_Hkv, x->call.Hkv = 1)
FAULT(Hkv_zero, x->call.Hkv = 0)
FAULT(Hkv_negative, x->call.Hkv = -2)
FAULT(Hkv_past_32_bits, x->call.Hkv = BAD_HKV + (INT64_C(1) << 32))
FAULT(H_and_Hkv_past_32_bits, x->call.H = 2 * (x->call.Hkv = BAD_HKV + (INT64_C(1) << 32)))
FAULT(other_D, x->call.D = BAD_D + 1)
FAULT(D_zero, x->call.D = 0)
FAULT(D_past_32_bits, x->call.D = BAD_D + (INT64_C(1) << 32))
FAULT(H_zero, x->call.H = 0)
FAULT(H_negative, x->call.H = -4)
FAULT(H_smallest, x->call.H = INT64_MIN)
FAULT(H_uneven, x->call.H = 3)
FAULT(foreign_isa, (void)x; tl_kernels_select("abacus"))
FAULT(s1_empty, x->ctx[1] = 0)
FAULT(s1_negative, x->ctx[1] = -1)
FAULT(s1_smallest, x->ctx[1] = INT32_MIN)
FAULT(s1_one_too_long, x->ctx[1] = BAD_BLOCKS * BAD_B_TOKENS + 1)
FAULT(s1_longest, x->ctx[1] = INT32_MAX)
FAULT(s1_entry_0, x->tables[BAD_BLOCKS] = 20)
FAULT(s1_entry_8, x->tables[BAD_BLOCKS + 8] = UINT32_MAX)
FAULT(s1_entry_11, x->tables[BAD_BLOCKS + 11] = 0x80000000u)
FAULT(s2_empty, x->ctx[2] = 0)
FAULT(s2_too_long, x->ctx[2] = 1000)
FAULT(s2_entry_12, x->tables[2 * BAD_BLOCKS + 12] = INT32_MAX)
FAULT(out_is_q, x->call.out = x->call.q)
FAULT(out_meets_q, x->call.out = x->call.q ? x->call.q + BAD_SIZE - 1 : NULL)
FAULT(q_meets_out, x->call.q = x->call.out ? x->call.out + BAD_SIZE - 1 : NULL)
FAULT(from_inside, x->inside = true)

static const struct fault {
    const char *name;
    int rank;
    tl_status want;
    void (*put)(struct bad *);
    int64_t mentions[3]; /* numbers the message has to give; -1: none */
} faults[] = {
#define F(name, ...) {#name, __VA_ARGS__}
    F(null_q, 0, TL_EINVAL, null_q, {-1, -1, -1}),
    F(null_kv, 0, TL_EINVAL, null_kv, {-1, -1, -1}),
    F(null_tables, 0, TL_EINVAL, null_tables, {-1, -1, -1}),
    F(null_ctx, 0, TL_EINVAL, null_ctx, {-1, -1, -1}),
    F(null_out, 0, TL_EINVAL, null_out, {-1, -1, -1}),
    F(negative_B, 10, TL_EINVAL, negative_B, {-1, -1, -1}),
    F(smallest_B, 10, TL_EINVAL, smallest_B, {INT64_MIN, -1, -1}),
    F(impossible_B, 10, TL_EINVAL, impossible_B, {INT64_MAX, -1, -1}),
    F(impossible_B_by_q, 10, TL_EINVAL, impossible_B_by_q, {INT64_C(1) << 60, -1, -1}),
    F(no_blocks, 10, TL_EINVAL, no_blocks, {0, -1, -1}),
    F(negative_blocks, 10, TL_EINVAL, negative_blocks, {INT32_MIN, -1, -1}),
    F(layer_past_the_last, 10, TL_EINVAL, layer_past_the_last, {2, -1, -1}),
    F(layer_minus_one, 10, TL_EINVAL, layer_minus_one, {UINT32_MAX, -1, -1}),
    F(other_Hkv, 20, TL_ESHAPE, other_Hkv, {1, BAD_HKV, -1}),
    F(Hkv_zero, 20, TL_ESHAPE, Hkv_zero, {0, BAD_HKV, -1}),
    F(Hkv_negative, 20, TL_ESHAPE, Hkv_negative, {-2, BAD_HKV, -1}),
    F(Hkv_past_32_bits, 20, TL_ESHAPE, Hkv_past_32_bits, {BAD_HKV + (INT64_C(1) << 32), -1, -1}),
    F(H_and_Hkv_past_32_bits, 20, TL_ESHAPE, H_and_Hkv_past_32_bits,
      {BAD_HKV + (INT64_C(1) << 32), BAD_HKV, -1}),
    F(other_D, 20, TL_ESHAPE, other_D, {BAD_D + 1, BAD_D, -1}),
    F(D_zero, 20, TL_ESHAPE, D_zero, {0, BAD_D, -1}),
    F(D_past_32_bits, 20, TL_ESHAPE, D_past_32_bits, {BAD_D + (INT64_C(1) << 32), -1, -1}),
    F(H_zero, 20, TL_ESHAPE, H_zero, {0, -1, -1}),
    F(H_negative, 20, TL_ESHAPE, H_negative, {-4, -1, -1}),
    F(H_smallest, 20, TL_ESHAPE, H_smallest, {INT64_MIN, -1, -1}),
    F(H_uneven, 20, TL_ESHAPE, H_uneven, {3, BAD_HKV, -1}),
    F(foreign_isa, 30, TL_EUNSUPPORTED, foreign_isa, {-1, -1, -1}),
    F(s1_empty, 40, TL_EINVAL, s1_empty, {1, 0, -1}),
    F(s1_negative, 40, TL_EINVAL, s1_negative, {1, -1, -1}),
    F(s1_smallest, 40, TL_EINVAL, s1_smallest, {1, INT32_MIN, -1}),
    F(s1_one_too_long, 40, TL_EINVAL, s1_one_too_long, {1, 53, -1}),
    F(s1_longest, 40, TL_EINVAL, s1_longest, {1, INT32_MAX, -1}),
    F(s1_entry_0, 41, TL_EINVAL, s1_entry_0, {1, 0, 20}),
    F(s1_entry_8, 42, TL_EINVAL, s1_entry_8, {1, 8, UINT32_MAX}),
    F(s1_entry_11, 43, TL_EINVAL, s1_entry_11, {1, 11, 0x80000000u}),
    F(s2_empty, 50, TL_EINVAL, s2_empty, {2, 0, -1}),
    F(s2_too_long, 50, TL_EINVAL, s2_too_long, {2, 1000, -1}),
    F(s2_entry_12, 51, TL_EINVAL, s2_entry_12, {2, 12, INT32_MAX}),
    F(out_is_q, 60, TL_EINVAL, out_is_q, {-1, -1, -1}),
    F(out_meets_q, 60, TL_EINVAL, out_meets_q, {-1, -1, -1}),
    F(q_meets_out, 60, TL_EINVAL, q_meets_out, {-1, -1, -1}),
    F(from_inside, 70, TL_EBUSY, from_inside, {-1, -1, -1}),
};
#define N_FAULTS (sizeof faults / sizeof *faults)

/* Runs a call with one or two faults in it: refused with the status of `first`, nothing written. */
static void check_refused(struct bad *x, const struct fault *first, const struct fault *second)
{
    float before[2 * BAD_SIZE];
    memcpy(before, x->both, sizeof before);
    isa_restore();
    if (second)
        second->put(x);
    first->put(x); /* last, so that the one that decides wins a field both want */
    const tl_status got = bad_run(x);
    isa_restore();
    const char *other = second ? second->name : "nothing else";
    CHECK(got == first->want, "%s and %s: got %s, want %s; \"%s\"", first->name, other,
          tl_status_str(got), tl_status_str(first->want), tl_last_error());
    CHECK(error_names(DECODE), "%s and %s: \"%s\"", first->name, other, tl_last_error());
    CHECK(memcmp(before, x->both, sizeof before) == 0, "%s and %s: something was written",
          first->name, other);
}

static void check_pair(tl_kv_pool *kv, float *both, tl_pool *tp, const struct fault *a,
                       const struct fault *b)
{
    struct bad x;
    char alone_message[TL_LAST_ERROR_CAP];
    bad_fresh(&x, kv, both, tp);
    check_refused(&x, a, NULL);
    snprintf(alone_message, sizeof alone_message, "%s", tl_last_error());
    bad_fresh(&x, kv, both, tp);
    check_refused(&x, a, b);
    if (a->want == b->want) /* the status cannot tell who decided; the words can */
        CHECK(strcmp(tl_last_error(), alone_message) == 0,
              "%s decides before %s: \"%s\" for \"%s\"", a->name, b->name, tl_last_error(),
              alone_message);
}

static void check_single(tl_kv_pool *kv, float *both, tl_pool *tp, const struct fault *f)
{
    struct bad x;
    bad_fresh(&x, kv, both, tp);
    check_refused(&x, f, NULL);
    for (int i = 0; i < 3; i++)
        CHECK(f->mentions[i] == -1 || error_mentions(f->mentions[i]), "%s: no %lld in \"%s\"",
              f->name, (long long)f->mentions[i], tl_last_error());
}

TEST(bad_tables_and_shapes)
{
    tl_kv_pool *kv =
        make_pool(&(const tl_kv_cfg){20, BAD_B_TOKENS, 2, BAD_HKV, BAD_D, TL_F16, TL_KV_FORMAT_V1});
    float *both = guarded(2 * BAD_SIZE * sizeof *both);
    struct bad x;
    for (int threads = 1; threads <= 2; threads++) {
        tl_pool *tp = make_threads(threads);
        bad_fresh(&x, kv, both, tp);
        CHECK_STATUS(bad_run(&x), TL_OK); /* without faults all is in order */
        CHECK(!all_paint(both + BAD_SIZE, BAD_SIZE), "a good call wrote nothing");
        for (size_t i = 0; i < N_FAULTS; i++)
            check_single(kv, both, tp, &faults[i]);
        for (size_t i = 0; i < N_FAULTS; i++)
            for (size_t j = 0; j < N_FAULTS; j++)
                if (faults[i].rank < faults[j].rank)
                    check_pair(kv, both, tp, &faults[i], &faults[j]);
        tl_pool_destroy(tp);
    }
    guarded_free(both, 2 * BAD_SIZE * sizeof *both);
    tl_kv_pool_destroy(kv);
}

TEST(ids_and_lengths_at_their_limits)
{
    static const struct {
        uint32_t table[3];
        int32_t ctx;
        tl_status want;
    } rows[] = {
        {{2, UINT32_MAX, 0}, 5, TL_EINVAL},
        {{2, 8, 0}, 5, TL_EINVAL},
        {{2, 0x80000000u, 0}, 5, TL_EINVAL},
        {{2, 1, 0}, 13, TL_EINVAL},
        {{2, 1, 0}, -1, TL_EINVAL},
        {{2, 1, 0}, INT32_MAX, TL_EINVAL},
        {{2, 1, 0}, 0, TL_EINVAL},
        {{2, 1, 7}, 12, TL_OK},
        {{2, 8, 8}, 4, TL_OK},
        {{8, 8, 8}, 1, TL_EINVAL},
        {{2, 1, UINT32_MAX}, 9, TL_EINVAL},
        {{2, 1, UINT32_MAX}, 8, TL_OK},
    };
    tl_kv_pool *kv = make_pool(&(const tl_kv_cfg){8, 4, 1, 1, 1, TL_F16, TL_KV_FORMAT_V1});
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        float *out = painted(1);
        CHECK_STATUS(tl_paged_attn_decode_f32(&(const float){1}, kv, 0, rows[i].table, 3,
                                              &rows[i].ctx, out, 1, 1, 1, 1, 1, 0, NULL),
                     rows[i].want);
        CHECK(all_paint(out, 1) == (rows[i].want != TL_OK), "row %zu: out %08x", i,
              float_bits(*out));
        painted_free(out, 1);
    }
    tl_kv_pool_destroy(kv);
}

/* The window decides which entries are needed: a bad one before it is passed over, the first one
 * inside is not. */
TEST(a_bad_entry_counts_only_inside_the_window)
{
    tl_kv_pool *kv = poisoned_pool(kv_cfg(8, 4, 1, 1, 1));
    uint32_t table[] = {UINT32_MAX, UINT32_MAX, 3, 5};
    for (uint32_t id = 3; id <= 5; id += 2)
        for (int slot = 0; slot < 4; slot++) {
            put(kv, id, 0, 0, slot, &(const float){1});
            put(kv, id, 1, 0, slot, &(const float){2});
        }
    for (int64_t window = 1; window <= 14; window++) {
        float *out = painted(1);
        /* position 13 of block 3; position 8 begins block 2 */
        const tl_status want = window <= 6 ? TL_OK : TL_EINVAL;
        CHECK_STATUS(
            tl_paged_attn_decode_f32(&(const float){1}, kv, 0, table, 4, &(const int32_t){14}, out,
                                     1, 1, 1, 1, 1, window, NULL),
            want);
        if (want == TL_OK)
            CHECK_BITS(*out, 2.0f, "window %lld", (long long)window);
        else
            CHECK(all_paint(out, 1) && error_mentions(window <= 10), "window %lld: \"%s\"",
                  (long long)window, tl_last_error());
        painted_free(out, 1);
    }
    tl_kv_pool_destroy(kv);
}

TEST(head_counts_that_do_not_divide)
{
    static const int64_t pairs[][2] = {{3, 2},  {2, 3},  {4, 0}, {0, 1},
                                       {-4, 2}, {4, -2}, {1, 2}, {0, 2}};
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        for (int64_t of_pool = 1; of_pool <= 3; of_pool++) {
            tl_kv_pool *kv = make_pool(
                &(const tl_kv_cfg){1, 4, 1, (uint32_t)of_pool, 1, TL_F16, TL_KV_FORMAT_V1});
            float *out = painted(8), q[8] = {0};
            CHECK_STATUS(
                tl_paged_attn_decode_f32(q, kv, 0, &(const uint32_t){0}, 1, &(const int32_t){1},
                                         out, 1, pairs[i][0], pairs[i][1], 1, 1, 0, NULL),
                TL_ESHAPE);
            CHECK(all_paint(out, 8), "out was written");
            painted_free(out, 8);
            tl_kv_pool_destroy(kv);
        }
}

/* H may be any multiple of the pool's Hkv in 64 bits: what does not fit the address space is
 * refused, not wrapped. */
TEST(impossible_numbers_of_heads)
{
    static const int64_t heads[] = {INT64_MAX - 1, INT64_C(1) << 62, INT64_C(1) << 61,
                                    INT64_C(1) << 60, INT64_C(1) << 59};
    tl_kv_pool *kv = make_pool(&(const tl_kv_cfg){1, 4, 1, 2, 16, TL_F16, TL_KV_FORMAT_V1});
    for (size_t i = 0; i < sizeof heads / sizeof *heads; i++)
        for (int64_t B = 1; B <= 4; B++) {
            float *out = painted(8), q[8] = {0};
            const int32_t ctx[4] = {1, 1, 1, 1};
            const uint32_t table[4] = {0};
            CHECK_STATUS(tl_paged_attn_decode_f32(q, kv, 0, table, 1, ctx, out, B, heads[i], 2, 16,
                                                  1, 0, NULL),
                         TL_EINVAL);
            CHECK(all_paint(out, 8) && error_names(DECODE), "\"%s\"", tl_last_error());
            painted_free(out, 8);
        }
    tl_kv_pool_destroy(kv);
}

TEST(an_empty_batch_reads_and_writes_nothing)
{
    tl_kv_pool *kv = make_pool(&(const tl_kv_cfg){2, 4, 1, 2, 3, TL_F16, TL_KV_FORMAT_V1});
    float *out = painted(4);
    void *edge = (char *)guarded(8) + 8; /* a pointer that cannot be read */
    tl_pool *tp = make_threads(2);
    for (int i = 0; i < 2; i++)
        CHECK_STATUS(tl_paged_attn_decode_f32(edge, kv, 0, edge, 1, edge, out, 0, 4, 2, 3, 1, 0,
                                              i ? tp : NULL),
                     TL_OK);
    CHECK_STATUS(tl_paged_attn_decode_f32(edge, kv, 0, edge, 1, edge, out, 0, 3, 2, 3, 1, 0, NULL),
                 TL_ESHAPE);
    CHECK_STATUS(tl_paged_attn_decode_f32(edge, kv, 0, edge, 1, edge, out, 0, INT64_C(1) << 61, 2,
                                          3, 1, 0, NULL),
                 TL_EINVAL); /* a row of q that no memory holds */
    CHECK_STATUS(tl_paged_attn_decode_f32(edge, kv, 1, edge, 1, edge, out, 0, 4, 2, 3, 1, 0, NULL),
                 TL_EINVAL);
    CHECK_STATUS(tl_paged_attn_decode_f32(NULL, kv, 0, edge, 1, edge, out, 0, 4, 2, 3, 1, 0, NULL),
                 TL_EINVAL);
    CHECK(all_paint(out, 4) && rim_intact(out), "something was written");
    struct bad x = {.tp = tp, .inside = true, .tables_arg = edge, .ctx_arg = edge};
    x.call = (struct paged){
        .kv = kv, .B = 0, .H = 4, .Hkv = 2, .D = 3, .max_blocks = 1, .q = edge, .out = out};
    CHECK_STATUS(bad_run(&x), TL_EBUSY);
    tl_pool_destroy(tp);
    painted_free(out, 4);
    guarded_free((char *)edge - 8, 8);
    tl_kv_pool_destroy(kv);
}

/* Inside a range of tp: refused on tp from every worker, fine with NULL and with another pool. */
struct nested {
    struct paged *c; /* one per range, each with an out of its own */
    tl_pool *outer, *other;
    tl_status on_outer[8], on_null[8];
    bool untouched[8];
};

static void decode_nested(void *ctx, int64_t lo, int64_t hi, int worker)
{
    (void)hi, (void)worker;
    struct nested *n = ctx;
    const struct paged *c = &n->c[lo];
    n->on_outer[lo] = paged_call(c, n->outer);
    n->untouched[lo] = all_paint(c->out, paged_size(c));
    n->on_null[lo] = paged_call(c, lo % 2 ? n->other : NULL);
}

TEST(busy_inside_a_range_of_its_own_pool)
{
    const struct paged_spec spec = {
        .B = 2, .H = 2, .Hkv = 1, .D = 8, .block_tokens = 4, .ctx = {9, 30}, .seed = 141};
    struct paged c = paged_make(&spec), each[8];
    float *want = paged_want(&c);
    for (int threads = 1; threads <= 4; threads += 3) {
        struct nested n = {.c = each, .outer = make_threads(threads), .other = make_threads(2)};
        for (int i = 0; i < 8; i++)
            each[i] = c, each[i].out = painted(paged_size(&c));
        CHECK_STATUS(tl_parallel_for(n.outer, 8, 1, decode_nested, &n), TL_OK);
        for (int i = 0; i < 8; i++) {
            CHECK(n.on_outer[i] == TL_EBUSY && n.untouched[i], "range %d: %s", i,
                  tl_status_str(n.on_outer[i]));
            CHECK(n.on_null[i] == TL_OK, "range %d: %s", i, tl_status_str(n.on_null[i]));
            CHECK_PAGED(&each[i], want, "range %d, %d threads", i, threads);
            painted_free(each[i].out, paged_size(&c));
        }
        paged_run(&c, n.outer); /* and the pool is still good */
        CHECK_PAGED(&c, want, "afterwards");
        tl_pool_destroy(n.outer), tl_pool_destroy(n.other);
    }
    free(want);
    paged_free(&c);
}

TEST(an_unknown_instruction_set_is_refused_with_the_names_that_work)
{
    const struct paged_spec spec = {
        .B = 1, .H = 1, .Hkv = 1, .D = 4, .block_tokens = 4, .ctx = {2}, .seed = 151};
    struct paged c = paged_make(&spec);
    isa_restore();
    tl_kernels_select("abacus");
    const tl_status got = paged_call(&c, NULL);
    isa_restore();
    CHECK(got == TL_EUNSUPPORTED && strstr(tl_last_error(), "abacus") &&
              strstr(tl_last_error(), "scalar"),
          "%s \"%s\"", tl_status_str(got), tl_last_error());
    CHECK(all_paint(c.out, paged_size(&c)), "out was written");
    paged_run(&c, NULL);
    paged_free(&c);
}

CHECK_MAIN()
