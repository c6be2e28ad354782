/* SPDX-License-Identifier: MIT */
/* test_flash_attn.c: attention over contiguous K and V: its values, its bits, its scratch, and what
 * it refuses. */
#include "attn_ref.h"
#include "hook.h"

#define FLASH "tl_flash_attn_fwd_f32"

/* Random tensors for a shape, in guarded memory; o and lse painted. */
static struct flash flash_make(int64_t B, int64_t H, int64_t Hkv, int64_t Tq, int64_t Tk, int64_t D,
                               uint64_t seed)
{
    uint64_t rng = seed * 0x9E3779B97F4A7C15u + 3;
    struct flash f = {.B = B,
                      .H = H,
                      .Hkv = Hkv,
                      .Tq = Tq,
                      .Tk = Tk,
                      .D = D,
                      .scale = 0.4f,
                      .causal = 1,
                      .q_offset = max64(Tk - Tq, 0)};
    float *tensor[3];
    const int64_t n[3] = {B * H * Tq * D, B * Hkv * Tk * D, B * Hkv * Tk * D};
    for (int t = 0; t < 3; t++) {
        tensor[t] = guarded((size_t)n[t] * sizeof(float));
        for (int64_t i = 0; i < n[t]; i++)
            tensor[t][i] = 2 * rng_unit(&rng);
    }
    f.q = tensor[0], f.k = tensor[1], f.v = tensor[2];
    f.o = painted(n[0]), f.lse = painted(B * H * Tq);
    return f;
}

static void flash_free(struct flash *f)
{
    guarded_free((float *)(uintptr_t)f->q, (size_t)(flash_rows(f) * f->D) * sizeof(float));
    guarded_free((float *)(uintptr_t)f->k, (size_t)(f->B * f->Hkv * f->Tk * f->D) * sizeof(float));
    guarded_free((float *)(uintptr_t)f->v, (size_t)(f->B * f->Hkv * f->Tk * f->D) * sizeof(float));
    painted_free(f->o, flash_rows(f) * f->D);
    painted_free(f->lse, flash_rows(f));
}

/* TL_OK, every element of o and lse written, the rims left alone. */
static void flash_run(const struct flash *f)
{
    repaint(f->o, flash_rows(f) * f->D);
    if (f->lse)
        repaint(f->lse, flash_rows(f));
    CHECK_STATUS(flash_call(f), TL_OK);
    CHECK(rim_intact(f->o) && (!f->lse || rim_intact(f->lse)), "a rim was written");
    for (int64_t i = 0; i < flash_rows(f) * f->D; i++)
        CHECK(float_bits(f->o[i]) != PAINT, "element %lld of o was not written", (long long)i);
    for (int64_t i = 0; f->lse && i < flash_rows(f); i++)
        CHECK(float_bits(f->lse[i]) != PAINT, "lse %lld was not written", (long long)i);
}

/* ---- values ---- */

/* K = 0, V = j, D 1: row i is the mean of the positions it sees, lse the logarithm of their number
 * (n == 0: none seen). */
static void check_means(int64_t Tq, int64_t Tk, int64_t q_offset, int causal, int64_t window,
                        const double *want, const int64_t *n)
{
    float *q = floats(Tq), *k = floats(Tk), *v = floats(Tk), *o = painted(Tq), *lse = painted(Tq);
    for (int64_t j = 0; j < Tk; j++)
        v[j] = (float)j;
    for (int64_t i = 0; i < Tq; i++)
        q[i] = 1;
    const struct flash f = {.q = q,
                            .k = Tk ? k : NULL,
                            .v = Tk ? v : NULL,
                            .o = o,
                            .lse = lse,
                            .B = 1,
                            .H = 1,
                            .Hkv = 1,
                            .Tq = Tq,
                            .Tk = Tk,
                            .D = 1,
                            .scale = 1,
                            .q_offset = q_offset,
                            .causal = causal,
                            .window = window};
    flash_run(&f);
    for (int64_t i = 0; i < Tq; i++) {
        CHECK(fabs((double)o[i] - want[i]) <= 1e-6 * want[i], "row %lld: %.9g for %.9g",
              (long long)i, (double)o[i], want[i]);
        if (n[i] == 0)
            CHECK(float_bits(o[i]) == 0 && float_bits(lse[i]) == 0xFF800000u,
                  "empty row %lld: %08x, lse %08x", (long long)i, float_bits(o[i]),
                  float_bits(lse[i]));
        else
            CHECK(fabs((double)lse[i] - log((double)n[i])) <= 2.4e-7 * log((double)n[i]),
                  "row %lld: lse %.9g, n %lld", (long long)i, (double)lse[i], (long long)n[i]);
    }
    free(q), free(k), free(v), painted_free(o, Tq), painted_free(lse, Tq);
}

/* Sixteen keys far below, then one far above: the distance is more than a float holds, and the past
 * counts for nothing. */
TEST(a_maximum_that_rises_by_more_than_a_float_forgets_the_past)
{
    float k[20], v[20], o = 0, lse = 0;
    const float q = 1;
    for (int j = 0; j < 20; j++)
        k[j] = j == 17 ? 3e38f : -3e38f, v[j] = (float)(j + 1);
    CHECK_STATUS(tl_flash_attn_fwd_f32(&q, k, v, &o, &lse, 1, 1, 1, 1, 20, 1, 1, 0, 0, 0, NULL, 0,
                                       0, NULL, NULL),
                 TL_OK);
    CHECK_BITS(o, 18.0f, "the value of the one key that counts");
    CHECK_BITS(lse, 3e38f, "its score");
}

TEST(tiles_wholly_before_the_window)
{
    double want[640];
    int64_t n[640];
    for (int64_t p = 0; p < 640; p++) {
        n[p] = min64(10, p + 1);
        want[p] = (double)p - ((double)n[p] - 1) / 2;
    }
    CHECK(want[0] == 0 && want[9] == 4.5 && want[639] == 634.5, "the table itself");
    check_means(640, 640, 0, 1, 10, want, n);
}

TEST(rows_that_see_no_key)
{
    check_means(4, 4, 0, 1, 1, (const double[]){0, 1, 2, 3}, (const int64_t[]){1, 1, 1, 1});
    for (int causal = -2; causal <= 2; causal++) /* any but 0 */
        check_means(2, 2, 0, causal, 0, (const double[]){causal ? 0 : 0.5, 0.5},
                    (const int64_t[]){causal ? 1 : 2, 2});
    check_means(4, 2, 0, 1, 1, (const double[]){0, 1, 0, 0}, (const int64_t[]){1, 1, 0, 0});
    check_means(4, 2, 0, 1, 2, (const double[]){0, 0.5, 1, 0}, (const int64_t[]){1, 2, 1, 0});
    check_means(4, 2, 0, 1, 0, (const double[]){0, 0.5, 0.5, 0.5}, (const int64_t[]){1, 2, 2, 2});
    check_means(3, 0, 0, 1, 0, (const double[]){0, 0, 0}, (const int64_t[]){0, 0, 0});
    check_means(3, 0, 9, 0, 4, (const double[]){0, 0, 0}, (const int64_t[]){0, 0, 0});
    check_means(2, 3, 5000, 1, 7, (const double[]){0, 0}, (const int64_t[]){0, 0});
    /* sees 1 .. p */
    check_means(1, 1, INT64_MAX - 1, 1, INT64_MAX - 1, (const double[]){0}, (const int64_t[]){0});
    /* sees 0 .. p */
    check_means(1, 1, INT64_MAX - 1, 1, INT64_MAX, (const double[]){0}, (const int64_t[]){1});
}

TEST(rows_without_a_key_for_some_values)
{
    const float v[] = {3, 5}, k[] = {0, 0}, q[] = {1, 1, 1, 1}, inf = INFINITY;
    static const struct {
        int64_t window;
        float o[4], lse_empty_from;
    } rows[] = {{1, {3, 5, 0, 0}, 2}, {2, {3, 4, 5, 0}, 3}, {0, {3, 4, 4, 4}, 4}};
    for (int i = 0; i < 3; i++) {
        float *o = painted(4), *lse = painted(4);
        const struct flash f = {.q = q,
                                .k = k,
                                .v = v,
                                .o = o,
                                .lse = lse,
                                .B = 1,
                                .H = 1,
                                .Hkv = 1,
                                .Tq = 4,
                                .Tk = 2,
                                .D = 1,
                                .scale = 1,
                                .causal = 1,
                                .window = rows[i].window};
        flash_run(&f);
        CHECK_SAME(o, rows[i].o, 4, "window %lld", (long long)rows[i].window);
        for (int r = 0; r < 4; r++)
            CHECK((lse[r] == -inf) == ((float)r >= rows[i].lse_empty_from),
                  "window %lld, lse %d is %g", (long long)rows[i].window, r, (double)lse[r]);
        painted_free(o, 4), painted_free(lse, 4);
    }
}

TEST(the_query_stands_at_q_offset)
{
    check_means(2, 4, 2, 1, 0, (const double[]){1.0, 1.5}, (const int64_t[]){3, 4});
    check_means(2, 4, 2, 0, 0, (const double[]){1.5, 1.5}, (const int64_t[]){4, 4});
    /* not causal: the window still bounds below */
    check_means(2, 4, 2, 0, 2, (const double[]){2.0, 2.5}, (const int64_t[]){3, 2});
    check_means(1, 8, 7, 1, 1, (const double[]){7}, (const int64_t[]){1});
    check_means(1, 8, 7, 1, 2, (const double[]){6.5}, (const int64_t[]){2});
    check_means(1, 8, 7, 1, 9, (const double[]){3.5}, (const int64_t[]){8});
    check_means(1, 8, 7, 1, INT64_MAX, (const double[]){3.5}, (const int64_t[]){8});
    check_means(1, 8, 7, 1, INT64_MIN, (const double[]){3.5}, (const int64_t[]){8});
}

/* D 1, q 1, scale 1: the keys are the scores. */
static void flash_scores(const float *scores, const float *v, int64_t n, const float *sink,
                         float *o, float *lse)
{
    float *po = painted(1), *pl = painted(1);
    const struct flash f = {.q = &(const float){1},
                            .k = scores,
                            .v = v,
                            .o = po,
                            .lse = pl,
                            .B = 1,
                            .H = 1,
                            .Hkv = 1,
                            .Tq = 1,
                            .Tk = n,
                            .D = 1,
                            .scale = 1,
                            .q_offset = max64(n - 1, 0),
                            .causal = 1,
                            .sinks = sink};
    flash_run(&f);
    *o = *po, *lse = *pl;
    painted_free(po, 1), painted_free(pl, 1);
}

TEST(large_scores_and_what_lse_means)
{
    float o, lse;
    flash_scores((const float[]){1000, 999, -1000}, (const float[]){1, 2, 4}, 3, NULL, &o, &lse);
    CHECK(fabsf(o - 1.2689414f) < 3e-7f && fabsf(lse - 1000.31326f) < 7e-5f, "%.9g, lse %.9g",
          (double)o, (double)lse);
    flash_scores((const float[8]){0}, (const float[8]){0}, 8, NULL, &o, &lse);
    CHECK(fabsf(lse - 2.0794415f) < 3e-7f, "eight zeros: lse %.9g", (double)lse);
    flash_scores((const float[]){0}, (const float[]){0.1f}, 1, NULL, &o, &lse);
    CHECK_BITS(lse, 0.0f, "one zero");
    CHECK_BITS(o, 0.1f, "one zero");
    flash_scores((const float[]){-5}, (const float[]){0.3f}, 1, NULL, &o, &lse);
    CHECK_BITS(lse, -5.0f, "one key");
    CHECK_BITS(o, 0.3f, "one key");
    flash_scores((const float[]){3e38f, -3e38f}, (const float[]){7, 1}, 2, NULL, &o, &lse);
    CHECK_BITS(o, 7.0f, "the largest score takes all");
    CHECK_BITS(lse, 3e38f, "and is the lse");
}

TEST(a_sink_joins_the_denominator_once)
{
    const float inf = INFINITY, nan_row = float_of(TL_NAN_BITS), zero[2] = {0, 0}, v[2] = {3, 5};
    float o, lse;
    flash_scores(zero, v, 2, &(const float){0}, &o, &lse); /* (3 + 5) / (1 + 1 + 1) */
    CHECK(fabsf(o - 8.0f / 3) < 3e-7f && fabsf(lse - logf(3)) < 2e-7f, "%.9g, lse %.9g", (double)o,
          (double)lse);
    flash_scores(zero, v, 2, &(const float){100}, &o, &lse);
    CHECK(fabs((double)o / (8 * exp(-100.0)) - 1) < 1e-6 || float_bits(o) == 0,
          "a sink above all: %.9g", (double)o);
    CHECK_BITS(lse, 100.0f, "a sink above all");
    flash_scores(zero, v, 2, &(const float){-100}, &o, &lse);
    CHECK_BITS(o, 4.0f, "a sink below all");
    flash_scores(zero, v, 2, &(const float){-inf}, &o, &lse);
    CHECK_BITS(o, 4.0f, "no sink");
    CHECK(fabsf(lse - logf(2)) < 2e-7f, "no sink: lse %.9g", (double)lse);
    static const float bad[] = {NAN, -NAN, INFINITY};
    for (int i = 0; i < 3; i++) {
        flash_scores(zero, v, 2, bad + i, &o, &lse);
        CHECK_BITS(o, nan_row, "sink %g", (double)bad[i]);
        CHECK_BITS(lse, nan_row, "sink %g", (double)bad[i]);
        flash_scores(NULL, NULL, 0, bad + i, &o, &lse);
        CHECK_BITS(o, nan_row, "sink %g and no key", (double)bad[i]);
        CHECK_BITS(lse, nan_row, "sink %g and no key", (double)bad[i]);
    }
    flash_scores(NULL, NULL, 0, &(const float){1.25f}, &o, &lse);
    CHECK_BITS(o, 0.0f, "a sink and no key");
    CHECK_BITS(lse, 1.25f, "a sink and no key");
    flash_scores((const float[]){-inf, -inf}, v, 2, &(const float){-2.5f}, &o, &lse);
    CHECK_BITS(o, 0.0f, "a sink and keys of -inf");
    CHECK_BITS(lse, -2.5f, "a sink and keys of -inf");
    flash_scores(NULL, NULL, 0, &(const float){-inf}, &o, &lse);
    CHECK_BITS(o, 0.0f, "nothing at all");
    CHECK_BITS(lse, -inf, "nothing at all");
    flash_scores((const float[]){NAN, 0}, v, 2, &(const float){1}, &o, &lse);
    CHECK_BITS(o, nan_row, "a NaN score under a sink");
    flash_scores((const float[]){inf, 0}, v, 2, &(const float){1}, &o, &lse);
    CHECK_BITS(lse, nan_row, "an infinite score under a sink");
}

TEST(sinks_are_per_head_and_not_scaled)
{
    const float sinks[4] = {0.5f, -1, 3, -INFINITY};
    for (int64_t window = 0; window <= 30; window += 30) {
        struct flash f = flash_make(2, 4, 2, 5, 1100, 20, 5);
        f.sinks = sinks, f.window = window;
        flash_run(&f);
        CHECK_FLASH(&f, "window %lld", (long long)window);
        flash_free(&f);
    }
}

TEST(non_numbers_that_are_seen)
{
    static const float special[] = {NAN, -NAN, INFINITY, -INFINITY};
    for (int where = 0; where < 3; where++)
        for (int x = 0; x < 4; x++)
            for (int64_t at = 3; at < 1100; at += 350) {
                struct flash f = flash_make(1, 2, 1, 3, 1100, 6, 7);
                float *tensor = (float *)(uintptr_t)(where == 0 ? f.q : where == 1 ? f.k : f.v);
                tensor[where == 0 ? at % 18 : at * 6 + 2] = special[x];
                flash_run(&f);
                CHECK_FLASH(&f, "%g in %s", (double)special[x],
                            where == 0   ? "q"
                            : where == 1 ? "k"
                                         : "v");
                flash_free(&f);
            }
}

/* A NaN or an infinity at one position: the rows before it, and those whose window it has left,
 * know nothing of it. */
TEST(keys_a_row_does_not_see_leave_no_trace)
{
    static const float special[] = {NAN, INFINITY, -INFINITY};
    for (int64_t window = 0; window <= 9; window += 9)
        for (int is_v = 0; is_v < 2; is_v++)
            for (int x = 0; x < 3; x++)
                for (int64_t at = 5; at < 40; at += 11) {
                    struct flash f = flash_make(1, 6, 2, 40, 40, 20, 8);
                    float *tensor = (float *)(uintptr_t)(is_v ? f.v : f.k);
                    for (int64_t d = 0; d < f.D; d++)
                        tensor[at * f.D + d] = tensor[(f.Tk + at) * f.D + d] = special[x];
                    f.window = window;
                    flash_run(&f);
                    CHECK_FLASH(&f, "%g in %s at %lld, window %lld", (double)special[x],
                                is_v ? "v" : "k", (long long)at, (long long)window);
                    for (int64_t r = 0; r < flash_rows(&f); r++) {
                        const bool sees = r % f.Tq >= at && (window == 0 || r % f.Tq < at + window);
                        CHECK(sees || isfinite(f.o[r * f.D]), "row %lld", (long long)r);
                    }
                    flash_free(&f);
                }
}

TEST(a_head_as_wide_as_may_be)
{
    for (int64_t window = 0; window <= 11; window += 11) {
        struct flash f = flash_make(1, 1, 1, 3, 1030, TL_MAX_HEAD_DIM, 9);
        f.window = window, f.scale = 1 / sqrtf(TL_MAX_HEAD_DIM);
        flash_run(&f);
        CHECK_FLASH(&f, "window %lld", (long long)window);
        flash_free(&f);
    }
}

TEST(head_widths_end_where_the_header_says)
{
    enum { MOST = TL_MAX_HEAD_DIM + 1 };
    for (int64_t D = MOST - 1; D <= MOST + 1; D++) {
        struct flash f = flash_make(1, 2, 1, 1, 2, D, 8);
        repaint(f.o, flash_rows(&f) * D), repaint(f.lse, flash_rows(&f));
        const tl_status want = D < MOST ? TL_OK : TL_EUNSUPPORTED;
        CHECK_STATUS(flash_call(&f), want);
        CHECK(D < MOST || (error_names(FLASH) && error_mentions(D)), "\"%s\"", tl_last_error());
        CHECK(D < MOST || (all_paint(f.o, flash_rows(&f) * D) && all_paint(f.lse, flash_rows(&f))),
              "something was written");
        struct flash odd = f;
        odd.H = 2, odd.Hkv = 2, odd.q_offset = -1; /* decides before */
        CHECK_STATUS(flash_call(&odd), TL_EINVAL);
        odd = f, odd.H = 1, odd.Hkv = 2;
        CHECK_STATUS(flash_call(&odd), TL_ESHAPE);
        flash_free(&f);
    }
}

TEST(close_to_double)
{
    static const int64_t shapes[][5] = {
        {1, 1, 1, 1, 1}, {4, 2, 70, 70, 33}, {3, 1, 5, 1500, 64}, {2, 2, 9, 40, 130}};
    for (int i = 0; i < 8; i++) {
        const int64_t *s = shapes[i / 2];
        struct flash f = flash_make(1, s[0], s[1], s[2], s[3], s[4], 11);
        const float sinks[4] = {0, 1, -1, 2};
        f.causal = i % 2, f.sinks = i % 2 ? sinks : NULL, f.scale = 1 / sqrtf((float)s[4]);
        flash_run(&f);
        double *want = must_alloc((size_t)f.D * sizeof *want), lse;
        for (int64_t r = 0; r < flash_rows(&f); r++) {
            const struct ref_row row = flash_row(&f, 0, r / f.Tq, r % f.Tq);
            ref64_row(&row, want, &lse);
            for (int64_t d = 0; d < f.D; d++)
                CHECK(fabs((double)f.o[r * f.D + d] - want[d]) < 2e-5,
                      "case %d, row %lld: %.9g for %.9g", i, (long long)r, (double)f.o[r * f.D + d],
                      want[d]);
            CHECK(fabs((double)f.lse[r] - lse) < 1e-5, "case %d, row %lld: lse %.9g for %.9g", i,
                  (long long)r, (double)f.lse[r], lse);
        }
        free(want);
        flash_free(&f);
    }
}

/* ---- bits ---- */

TEST(equals_the_reference_bit_for_bit)
{
    static const struct {
        int64_t H, Hkv, Tq, Tk, D, q_offset, window;
        int causal;
    } rows[] = {{1, 1, 40, 40, 1, 0, 0, 1},         {6, 2, 20, 70, 15, 50, 0, 1},
                {4, 4, 9, 33, 16, 24, 7, 1},        {2, 1, 3, 2050, 40, 2047, 0, 1},
                {2, 1, 3, 2050, 40, 2047, 1030, 1}, {8, 1, 6, 100, 31, 0, 0, 0},
                {3, 3, 10, 20, 65, 30, 25, 0},      {16, 1, 2, 50, 320, 48, 0, 1},
                {33, 3, 2, 18, 7, 17, 0, 1},        {2, 2, 8, 5, 128, 0, 0, 1},
                {1, 1, 2, 1040, 1100, 1030, 0, 1},  {2, 1, 20, 1045, 6, 1010, 0, 1}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        struct flash f =
            flash_make(2, rows[i].H, rows[i].Hkv, rows[i].Tq, rows[i].Tk, rows[i].D, 31 + i);
        f.q_offset = rows[i].q_offset, f.window = rows[i].window, f.causal = rows[i].causal;
        flash_run(&f);
        CHECK_FLASH(&f, "case %zu", i);
        float *o = painted(flash_rows(&f) * f.D);
        struct flash without = f;
        without.o = o, without.lse = NULL;
        flash_run(&without);
        CHECK_SAME(o, f.o, flash_rows(&f) * f.D, "case %zu without lse", i);
        painted_free(o, flash_rows(&f) * f.D);
        flash_free(&f);
    }
}

/* Rows on both sides of the edges of stretches; windows that begin in one stretch or leave some
 * out; rows that are not causal, which see every stretch. */
TEST(rows_over_stretches_equal_the_reference)
{
    static const struct {
        int64_t Tq, Tk, q_offset, window;
        int causal;
    } rows[] = {{5, 16387, 16382, 0, 1},  {3, 33000, 32766, 0, 1},     {2, 33000, 32998, 17000, 1},
                {6, 32771, 32765, 700, 1}, {2, 16400, 3, 0, 0},         {9, 32772, 32763, 16384, 1},
                {1, 49160, 49159, 0, 1},   {2, 33000, 32000, 16000, 0}};
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        const float sinks[2] = {0.5f, -INFINITY};
        struct flash f = flash_make(1, 2, 1, rows[i].Tq, rows[i].Tk, 4, 231 + i);
        f.q_offset = rows[i].q_offset, f.window = rows[i].window, f.causal = rows[i].causal;
        f.sinks = i % 2 ? sinks : NULL;
        for (int isa = 0; isa_select(isa); isa++) {
            flash_run(&f);
            CHECK_FLASH(&f, "%s, case %zu", tl_isa_name(), i);
        }
        flash_free(&f);
    }
}

/* Copies rows [from, from + n) of every head out of [B*H][Tq][D]. */
static void take_rows(float *to, const float *all, int64_t heads, int64_t Tq, int64_t D,
                      int64_t from, int64_t n)
{
    for (int64_t h = 0; h < heads; h++)
        memcpy(to + h * n * D, all + (h * Tq + from) * D, (size_t)(n * D) * sizeof *to);
}

/* Rows from .. from + n of `f` in a call of their own, over only the keys they may see: the same
 * bits, lse too. */
static void check_chunk(const struct flash *f, int64_t from, int64_t n)
{
    const int64_t heads = f->B * f->H, Tk = min64(f->Tk, f->q_offset + from + n);
    struct flash part = *f;
    float *q = floats(heads * n * f->D), *k = floats(f->B * f->Hkv * Tk * f->D),
          *v = floats(f->B * f->Hkv * Tk * f->D);
    float *want = floats(heads * n * f->D), *want_lse = floats(heads * n);
    take_rows(q, f->q, heads, f->Tq, f->D, from, n);
    take_rows(k, f->k, f->B * f->Hkv, f->Tk, f->D, 0, Tk);
    take_rows(v, f->v, f->B * f->Hkv, f->Tk, f->D, 0, Tk);
    take_rows(want, f->o, heads, f->Tq, f->D, from, n);
    take_rows(want_lse, f->lse, heads, f->Tq, 1, from, n);
    part.q = q, part.k = k, part.v = v, part.Tq = n, part.Tk = Tk,
    part.q_offset = f->q_offset + from;
    part.o = painted(heads * n * f->D), part.lse = painted(heads * n);
    flash_run(&part);
    CHECK_SAME(part.o, want, heads * n * f->D, "rows %lld + %lld", (long long)from, (long long)n);
    CHECK_SAME(part.lse, want_lse, heads * n, "lse of rows %lld + %lld", (long long)from,
               (long long)n);
    painted_free(part.o, heads * n * f->D), painted_free(part.lse, heads * n);
    free(q), free(k), free(v), free(want), free(want_lse);
}

TEST(chunks_equal_one_call)
{
    static const int64_t chunks[] = {1, 3, 64, 149};
    for (int64_t window = 0; window <= 7; window += 7)
        for (int c = 0; c < 4; c++) {
            struct flash f = flash_make(1, 4, 2, 150, 150, 10, 51);
            f.window = window;
            flash_run(&f);
            for (int64_t from = 0; from < 150; from += chunks[c])
                check_chunk(&f, from, min64(chunks[c], 150 - from));
            flash_free(&f);
        }
    struct flash f = flash_make(1, 2, 1, 40, 1044, 8, 52); /* rows on both sides of position 1024 */
    flash_run(&f);
    for (int64_t from = 0; from < 40; from += 7)
        check_chunk(&f, from, min64(7, 40 - from));
    flash_free(&f);
}

/* In chunks that end before, at and behind the edge of a stretch, on every number of threads. */
TEST(chunks_over_a_stretch_equal_one_call)
{
    struct flash f = flash_make(1, 2, 1, 40, 16404, 3, 241);
    flash_run(&f);
    CHECK_FLASH(&f, "one call");
    for (int threads = 0; threads < 4; threads++) {
        tl_pool *tp = threads ? make_threads(threads) : NULL;
        f.tp = tp;
        for (int64_t from = 0; from < 40; from += 20 - 1 + threads)
            check_chunk(&f, from, min64(20 - 1 + threads, 40 - from));
        tl_pool_destroy(tp);
    }
    flash_free(&f);
}

TEST(the_last_row_equals_decode)
{
    static const int64_t windows[] = {0, 7, 1025};
    for (int i = 0; i < 6; i++) {
        const struct paged_spec spec = {.B = 1,
                                        .H = 4,
                                        .Hkv = 2,
                                        .D = 24,
                                        .block_tokens = 16,
                                        .window = windows[i / 2],
                                        .ctx = {i % 2 ? 1500 : 150},
                                        .data = DATA_PLAIN,
                                        .seed = 61};
        struct paged c = paged_make(&spec);
        paged_run(&c, NULL);
        const int64_t T = c.ctx[0];
        struct flash f = flash_make(1, 4, 2, 3, T, 24, 62);
        float *k = paged_gather(&c, 0, 0), *v = paged_gather(&c, 0, 1),
              *last = floats(paged_size(&c));
        for (int64_t h = 0; h < 4; h++)
            memcpy((float *)(uintptr_t)f.q + (h * 3 + 2) * 24, c.q + h * 24, 24 * sizeof(float));
        struct flash over = f;
        over.k = k, over.v = v, over.scale = c.scale, over.window = c.window;
        flash_run(&over); /* rows before the last may see NaN: they are not looked at */
        take_rows(last, f.o, 4, 3, 24, 2, 1);
        CHECK_SAME(last, c.out, paged_size(&c), "case %d", i);
        free(k), free(v), free(last);
        flash_free(&f);
        paged_free(&c);
    }
}

TEST(tile_hints_threads_and_scratch_change_nothing)
{
    static const int64_t hints[][2] = {
        {0, 16}, {1, 1}, {16, 0}, {3, 7}, {64, 64}, {1000, 5000}, {INT64_MAX, INT64_MAX}};
    for (int shape = 0; shape < 3; shape++) {
        struct flash f = shape == 0   ? flash_make(2, 6, 2, 37, 100, 20, 71)
                         : shape == 1 ? flash_make(1, 2, 1, 4, 2100, 33, 72)
                                      : flash_make(3, 1, 1, 1, 60, 300, 73);
        flash_run(&f);
        CHECK_FLASH(&f, "shape %d", shape);
        struct flash again = f;
        again.o = painted(flash_rows(&f) * f.D), again.lse = painted(flash_rows(&f));
        tl_arena *arena = NULL;
        CHECK_STATUS(tl_arena_create(256, &arena), TL_OK);
        for (int i = 0; i < 7; i++)
            for (int threads = 0; threads <= 6; threads += 3) {
                again.Br = hints[i][0], again.Bc = hints[i][1],
                again.scratch = i % 2 ? arena : NULL;
                again.tp = threads ? make_threads(threads) : NULL;
                flash_run(&again);
                CHECK_SAME(again.o, f.o, flash_rows(&f) * f.D, "shape %d, hint %d, %d threads",
                           shape, i, threads);
                CHECK_SAME(again.lse, f.lse, flash_rows(&f), "shape %d, hint %d, %d threads: lse",
                           shape, i, threads);
                tl_pool_destroy(again.tp);
            }
        tl_arena_destroy(arena);
        painted_free(again.o, flash_rows(&f) * f.D), painted_free(again.lse, flash_rows(&f));
        flash_free(&f);
    }
}

/* Each sequence, and each head with its KV head, in a call of its own. */
TEST(batch_mates_and_other_heads_change_nothing)
{
    struct flash f = flash_make(3, 6, 2, 4, 90, 17, 81);
    flash_run(&f);
    for (int64_t r = 0; r < f.B * f.H; r++) {
        struct flash one = f;
        one.B = one.H = one.Hkv = 1;
        one.q = f.q + r * f.Tq * f.D;
        one.k = f.k + (r / f.H * f.Hkv + r % f.H / 3) * f.Tk * f.D, one.v = f.v + (one.k - f.k);
        one.o = painted(f.Tq * f.D), one.lse = painted(f.Tq);
        flash_run(&one);
        CHECK_SAME(one.o, f.o + r * f.Tq * f.D, f.Tq * f.D, "head %lld alone", (long long)r);
        CHECK_SAME(one.lse, f.lse + r * f.Tq, f.Tq, "lse of head %lld alone", (long long)r);
        painted_free(one.o, f.Tq * f.D), painted_free(one.lse, f.Tq);
    }
    flash_free(&f);
}

TEST(every_instruction_set_gives_the_same_lse)
{
    static const int64_t lengths[] = {1, 2, 3, 17, 100, 1025, 3000};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        struct flash f = flash_make(1, 4, 2, 2, lengths[i], 9, 91 + i);
        const float sinks[4] = {0.1f, 5, -3, -INFINITY};
        f.sinks = i % 2 ? sinks : NULL, f.q_offset = lengths[i] - 1;
        float first[8], first_o[72];
        for (int isa = 0; isa_select(isa); isa++) {
            flash_run(&f);
            if (isa == 0)
                memcpy(first, f.lse, sizeof first), memcpy(first_o, f.o, sizeof first_o);
            CHECK_SAME(f.lse, first, 8, "%s, Tk %lld: lse", tl_isa_name(), (long long)lengths[i]);
            CHECK_SAME(f.o, first_o, 72, "%s, Tk %lld", tl_isa_name(), (long long)lengths[i]);
        }
        flash_free(&f);
    }
}

/* ---- nothing to do ---- */

TEST(empty_calls_need_no_tensors)
{
    static const int64_t empties[][6] = {/* B, H, Hkv, Tq, Tk, D */
                                         {0, 4, 2, 3, 5, 8},
                                         {2, 0, 0, 3, 5, 8},
                                         {2, 4, 2, 0, 5, 8},
                                         {0, 0, 0, 0, 0, 0},
                                         {INT64_MAX, INT64_MAX, 1, 0, 0, 8},
                                         {2, 4, 2, 0, 0, 0}};
    for (size_t i = 0; i < sizeof empties / sizeof *empties; i++) {
        const int64_t *e = empties[i];
        struct flash f = {.B = e[0],
                          .H = e[1],
                          .Hkv = e[2],
                          .Tq = e[3],
                          .Tk = e[4],
                          .D = e[5],
                          .scale = 1,
                          .causal = 1};
        CHECK_STATUS(flash_call(&f), TL_OK);
        f.o = painted(4), f.lse = painted(4);
        CHECK_STATUS(flash_call(&f), TL_OK);
        CHECK(all_paint(f.o, 4) && all_paint(f.lse, 4), "case %zu wrote", i);
        painted_free(f.o, 4), painted_free(f.lse, 4);
    }
}

/* No head width: every dot is +0, so lse counts the keys; there is nothing else to read or
 * write. */
TEST(a_head_width_of_zero_still_has_an_lse)
{
    float *lse = painted(6);
    struct flash f = {.lse = lse,
                      .B = 1,
                      .H = 2,
                      .Hkv = 1,
                      .Tq = 3,
                      .Tk = 40,
                      .scale = 2,
                      .q_offset = 20,
                      .causal = 1};
    CHECK_STATUS(flash_call(&f), TL_OK);
    for (int64_t i = 0; i < 6; i++)
        CHECK(fabs((double)lse[i] - log(21 + (double)(i % 3))) < 4e-7, "lse %lld is %.9g",
              (long long)i, (double)lse[i]);
    const float sinks[2] = {0, -INFINITY};
    f.sinks = sinks;
    CHECK_STATUS(flash_call(&f), TL_OK);
    for (int64_t i = 0; i < 6; i++)
        CHECK(fabs((double)lse[i] - log((i < 3 ? 22 : 21) + (double)(i % 3))) < 4e-7,
              "with sinks, lse %lld is %.9g", (long long)i, (double)lse[i]);
    f.sinks = NULL, f.scale = INFINITY; /* inf * +0 */
    CHECK_STATUS(flash_call(&f), TL_OK);
    for (int64_t i = 0; i < 6; i++)
        CHECK_BITS(lse[i], float_of(TL_NAN_BITS), "scale inf");
    f.scale = 1, f.Tk = 0;
    CHECK_STATUS(flash_call(&f), TL_OK);
    for (int64_t i = 0; i < 6; i++)
        CHECK_BITS(lse[i], -INFINITY, "no keys");
    CHECK(rim_intact(lse), "the rim was written");
    f.lse = NULL, f.Tk = 40;
    CHECK_STATUS(flash_call(&f), TL_OK);
    painted_free(lse, 6);
}

/* ---- scratch ---- */

static const int64_t scratch_shapes[][5] = {/* H, Hkv, Tq, Tk, D */
                                            {1, 1, 1, 50, 8},
                                            {4, 2, 40, 40, 64},
                                            {32, 1, 3, 1100, 64},
                                            {2, 1, 2, 30, 1100},
                                            {40, 1, 20, 30, 300}};
#define N_SCRATCH (sizeof scratch_shapes / sizeof *scratch_shapes)

static struct flash scratch_case(size_t i)
{
    const int64_t *s = scratch_shapes[i];
    return flash_make(1, s[0], s[1], s[2], s[3], s[4], 101 + i);
}

TEST(the_arena_is_left_at_its_mark)
{
    for (size_t i = 0; i < N_SCRATCH; i++) {
        struct flash f = scratch_case(i);
        tl_arena *arena = NULL;
        CHECK_STATUS(tl_arena_create(4096, &arena), TL_OK);
        char *mine = tl_arena_alloc(arena, 100, 0);
        memset(mine, 'x', 100);
        const tl_arena_mark mark = tl_arena_mark_get(arena);
        tl_arena_stats before, after;
        tl_arena_stats_get(arena, &before);
        f.scratch = arena;
        flash_run(&f);
        CHECK_FLASH(&f, "case %zu", i);
        const tl_arena_mark now = tl_arena_mark_get(arena);
        tl_arena_stats_get(arena, &after);
        CHECK(now.offset == mark.offset && now.block == mark.block &&
                  after.bytes_used == before.bytes_used,
              "case %zu: mark %zu:%zu, was %zu:%zu", i, now.block, now.offset, mark.block,
              mark.offset);
        for (int b = 0; b < 100; b++)
            CHECK(mine[b] == 'x', "case %zu wrote to memory taken before", i);
        tl_arena_destroy(arena);
        flash_free(&f);
    }
}

/* With a pool there is nothing to take and nothing to ask for. */
TEST(a_pool_brings_its_own_scratch)
{
    tl_pool *tp = make_threads(2);
    for (size_t i = 0; i < N_SCRATCH; i++) {
        struct flash f = scratch_case(i);
        tl_arena_stats stats;
        struct hook refuse;
        CHECK_STATUS(tl_arena_create(64, &f.scratch), TL_OK);
        f.tp = tp;
        hook_install(&refuse, 1);
        const tl_status got = flash_call(&f);
        hook_remove();
        tl_arena_stats_get(f.scratch, &stats);
        CHECK(got == TL_OK && refuse.calls == 0 && stats.high_water == 0,
              "case %zu: %s, %ld requests, %zu bytes", i, tl_status_str(got), refuse.calls,
              stats.high_water);
        tl_arena_destroy(f.scratch);
        flash_free(&f);
    }
    tl_pool_destroy(tp);
}

static size_t high_water(int64_t H, int64_t Tq, int64_t Tk, int64_t D, tl_pool *tp)
{
    struct flash f = flash_make(1, H, 1, Tq, Tk, D, 111);
    tl_arena_stats stats;
    CHECK_STATUS(tl_arena_create(64, &f.scratch), TL_OK);
    f.tp = tp, f.q_offset = 6000;
    flash_run(&f);
    tl_arena_stats_get(f.scratch, &stats);
    tl_arena_destroy(f.scratch);
    flash_free(&f);
    return stats.high_water;
}

TEST(scratch_does_not_grow_with_the_context)
{
    tl_pool *tp = make_threads(3);
    for (int i = 0; i < 4; i++) {
        const int64_t D = i % 2 ? 300 : 16;
        const size_t small = high_water(6, 4, 3, D, i / 2 ? tp : NULL);
        static const int64_t lengths[] = {0, 40, 1024, 1025, 5000};
        for (int t = 0; t < 5; t++) {
            const size_t large = high_water(6, 4, lengths[t], D, i / 2 ? tp : NULL);
            CHECK(small == large, "D %lld: %zu bytes for 3 keys, %zu for %lld", (long long)D, small,
                  large, (long long)lengths[t]);
        }
    }
    tl_pool_destroy(tp);
}

/* One call whose k-th request of memory is refused, as are all later ones. Either it asks for less
 * and is right, or it is TL_ENOMEM with nothing written and the arena, where there is one, at its
 * mark. Whether it was refused. */
static bool refused_and_harmless(const struct flash *f, bool with_arena, long k)
{
    const int64_t n = flash_rows(f) * f->D;
    struct flash call = *f;
    struct hook hook;
    if (with_arena)
        CHECK_STATUS(tl_arena_create(64, &call.scratch), TL_OK);
    repaint(f->o, n), repaint(f->lse, flash_rows(f));
    hook_install(&hook, k);
    const tl_status got = flash_call(&call);
    hook_remove();
    if (hook.failed == 0) {
        CHECK(got == TL_OK, "nothing was refused: %s \"%s\"", tl_status_str(got), tl_last_error());
        CHECK_FLASH(f, "with %ld requests", hook.calls);
    } else {
        CHECK(got == TL_ENOMEM && error_names("tl_flash_attn_fwd_f32"), "request %ld: %s \"%s\"", k,
              tl_status_str(got), tl_last_error());
        CHECK(all_paint(f->o, n) && all_paint(f->lse, flash_rows(f)),
              "request %ld: something was written", k);
    }
    if (with_arena) {
        const tl_arena_mark mark = tl_arena_mark_get(call.scratch);
        CHECK(mark.offset == 0 && mark.block == 0, "request %ld: mark %zu:%zu", k, mark.block,
              mark.offset);
        tl_arena_destroy(call.scratch);
    } else {
        CHECK(hook.live == 0, "request %ld: %ld pieces were kept", k, hook.live);
    }
    return hook.failed > 0;
}

TEST(scratch_that_cannot_grow_is_enomem_and_writes_nothing)
{
    tl_pool *tp = make_threads(3);
    for (size_t i = 0; i < N_SCRATCH; i++)
        for (int variant = 0; variant < 4; variant++) {
            struct flash f = scratch_case(i);
            f.tp = variant / 2 ? tp : NULL;
            long k = 1;
            while (refused_and_harmless(&f, variant % 2, k))
                CHECK(++k < 50, "request %ld was refused, too", k);
            flash_free(&f);
        }
    tl_pool_destroy(tp);
}

/* ---- what is refused ---- */

/* A call in order until a fault is put in; q, k, v, o, lse and sinks are one array, so that a test
 * sees every write. */
enum { BAD_B = 2, BAD_H = 4, BAD_HKV = 2, BAD_TQ = 3, BAD_TK = 6, BAD_D = 5 };
enum {
    AT_Q = 0,
    AT_K = AT_Q + BAD_B * BAD_H * BAD_TQ * BAD_D,
    AT_V = AT_K + BAD_B * BAD_HKV * BAD_TK * BAD_D,
    AT_O = AT_V + BAD_B * BAD_HKV * BAD_TK * BAD_D,
    AT_LSE = AT_O + BAD_B * BAD_H * BAD_TQ * BAD_D,
    AT_SINKS = AT_LSE + BAD_B * BAD_H * BAD_TQ,
    BAD_SIZE = AT_SINKS + BAD_H
};
struct bad {
    struct flash f;
    float *all;
    bool inside; /* called from inside a range of tp */
};

static void bad_fresh(struct bad *x, float *all, tl_pool *tp)
{
    for (int i = 0; i < BAD_SIZE; i++)
        all[i] = 0.125f * (float)(i % 29);
    repaint(all + AT_O, AT_SINKS - AT_O);
    x->all = all, x->inside = false;
    x->f = (struct flash){.q = all + AT_Q,
                          .k = all + AT_K,
                          .v = all + AT_V,
                          .o = all + AT_O,
                          .lse = all + AT_LSE,
                          .B = BAD_B,
                          .H = BAD_H,
                          .Hkv = BAD_HKV,
                          .Tq = BAD_TQ,
                          .Tk = BAD_TK,
                          .D = BAD_D,
                          .scale = 0.5f,
                          .q_offset = 3,
                          .causal = 1,
                          .sinks = all + AT_SINKS,
                          .tp = tp};
}

static tl_status bad_call(const void *flash)
{
    return flash_call(flash);
}

static tl_status bad_run(const struct bad *x)
{
    return run_call(bad_call, &x->f, x->inside ? x->f.tp : NULL);
}

#define FAULT(name, ...)                       \
    static void name(struct bad *x)            \
    {                                          \
        __VA_ARGS__;                           \
    }
FAULT(negative_B, x->f.B = -1)
FAULT(negative_H, x->f.H = -4)
FAULT(negative_Hkv, x->f.Hkv = -2)
FAULT(negative_Hkv_of_no_heads, x->f.Hkv = -2; x->f.H = 0)
FAULT(no_Hkv, x->f.Hkv = 0)
FAULT(negative_Tq, x->f.Tq = INT64_MIN)
FAULT(negative_Tk, x->f.Tk = -6)
FAULT(negative_D, x->f.D = -5)
FAULT(negative_offset, x->f.q_offset = -1)
FAULT(offset_past_the_end, x->f.q_offset = INT64_MAX - BAD_TQ + 1)
FAULT(negative_Br, x->f.Br = -1)
FAULT(negative_Bc, x->f.Bc = INT64_MIN)
FAULT(impossible_B, x->f.B = INT64_MAX)
FAULT(impossible_H, x->f.H = INT64_MAX - 1)
FAULT(impossible_Tq, x->f.Tq = INT64_MAX - 3)
FAULT(impossible_Tk, x->f.Tk = INT64_MAX)
FAULT(impossible_lse, x->f.D = 0; x->f.B = INT64_C(1) << 40; x->f.Tq = INT64_C(1) << 30)
FAULT(impossible_D, x->f.D = INT64_C(1) << 60)
FAULT(null_q, x->f.q = NULL)
FAULT(null_k, x->f.k = NULL)
FAULT(null_v, x->f.v = NULL)
FAULT(null_o, x->f.o = NULL)
FAULT(o_is_q, x->f.o = x->all + AT_Q)
FAULT(o_meets_q, x->f.o = x->all + flash_rows(&x->f) * BAD_D - 1)
FAULT(o_is_k, x->f.o = x->all + AT_K)
FAULT(o_is_v, x->f.o = x->all + AT_V)
FAULT(o_begins_in_v, x->f.o = x->all + AT_O - 1; x->f.lse = NULL)
FAULT(o_meets_lse, x->f.lse = x->f.o + flash_rows(&x->f) * BAD_D - 1)
FAULT(lse_in_q, x->f.lse = x->all + AT_Q + 3)
FAULT(lse_in_k, x->f.lse = x->all + AT_K + 3)
FAULT(lse_in_v, x->f.lse = x->all + AT_V + 3)
FAULT(o_meets_sinks, x->f.sinks = x->all + AT_O + 7)
FAULT(lse_meets_sinks, x->f.sinks = x->f.lse + flash_rows(&x->f) - 1)
FAULT(uneven_heads, x->f.H = 3)
FAULT(fewer_heads, x->f.H = 1)
FAULT(foreign_isa, (void)x; tl_kernels_select("abacus"))
FAULT(from_inside, x->inside = true)

static const struct fault {
    const char *name;
    int rank; /* where two are there the lower decides */
    tl_status want;
    void (*put)(struct bad *);
    int64_t mentions; /* a number the message has to give, or UNSAID */
} faults[] = {
#define UNSAID 77
#define F(name, ...) {#name, __VA_ARGS__}
    F(negative_B, 0, TL_EINVAL, negative_B, -1),
    F(negative_H, 0, TL_EINVAL, negative_H, -4),
    F(negative_Hkv, 0, TL_EINVAL, negative_Hkv, -2),
    F(negative_Hkv_of_no_heads, 0, TL_EINVAL, negative_Hkv_of_no_heads, -2),
    F(no_Hkv, 0, TL_EINVAL, no_Hkv, 0),
    F(negative_Tq, 0, TL_EINVAL, negative_Tq, INT64_MIN),
    F(negative_Tk, 0, TL_EINVAL, negative_Tk, -6),
    F(negative_D, 0, TL_EINVAL, negative_D, -5),
    F(negative_offset, 0, TL_EINVAL, negative_offset, -1),
    F(offset_past_the_end, 0, TL_EINVAL, offset_past_the_end, INT64_MAX - BAD_TQ + 1),
    F(negative_Br, 0, TL_EINVAL, negative_Br, -1),
    F(negative_Bc, 0, TL_EINVAL, negative_Bc, INT64_MIN),
    F(impossible_B, 0, TL_EINVAL, impossible_B, INT64_MAX),
    F(impossible_H, 0, TL_EINVAL, impossible_H, INT64_MAX - 1),
    F(impossible_Tq, 0, TL_EINVAL, impossible_Tq, INT64_MAX - 3),
    F(impossible_Tk, 0, TL_EINVAL, impossible_Tk, INT64_MAX),
    F(impossible_lse, 0, TL_EINVAL, impossible_lse, INT64_C(1) << 40),
    F(impossible_D, 0, TL_EINVAL, impossible_D, INT64_C(1) << 60),
    F(null_q, 0, TL_EINVAL, null_q, UNSAID),
    F(null_k, 0, TL_EINVAL, null_k, UNSAID),
    F(null_v, 0, TL_EINVAL, null_v, UNSAID),
    F(null_o, 0, TL_EINVAL, null_o, UNSAID),
    F(o_is_q, 25, TL_EINVAL, o_is_q, UNSAID),
    F(o_meets_q, 25, TL_EINVAL, o_meets_q, UNSAID),
    F(o_is_k, 25, TL_EINVAL, o_is_k, UNSAID),
    F(o_is_v, 25, TL_EINVAL, o_is_v, UNSAID),
    F(o_begins_in_v, 25, TL_EINVAL, o_begins_in_v, UNSAID),
    F(o_meets_lse, 25, TL_EINVAL, o_meets_lse, UNSAID),
    F(lse_in_q, 25, TL_EINVAL, lse_in_q, UNSAID),
    F(lse_in_k, 25, TL_EINVAL, lse_in_k, UNSAID),
    F(lse_in_v, 25, TL_EINVAL, lse_in_v, UNSAID),
    F(o_meets_sinks, 25, TL_EINVAL, o_meets_sinks, UNSAID),
    F(lse_meets_sinks, 25, TL_EINVAL, lse_meets_sinks, UNSAID),
    F(uneven_heads, 10, TL_ESHAPE, uneven_heads, 3),
    F(fewer_heads, 10, TL_ESHAPE, fewer_heads, BAD_HKV),
    F(foreign_isa, 20, TL_EUNSUPPORTED, foreign_isa, UNSAID),
    F(from_inside, 30, TL_EBUSY, from_inside, UNSAID),
};
#define N_FAULTS (sizeof faults / sizeof *faults)

static void check_refused(float *all, tl_pool *tp, const struct fault *first,
                          const struct fault *second)
{
    struct bad x;
    float before[BAD_SIZE];
    bad_fresh(&x, all, tp);
    memcpy(before, all, sizeof before);
    isa_restore();
    if (second)
        second->put(&x);
    first->put(&x);
    const tl_status got = bad_run(&x);
    isa_restore();
    const char *other = second ? second->name : "nothing else";
    CHECK(got == first->want, "%s and %s: got %s, want %s; \"%s\"", first->name, other,
          tl_status_str(got), tl_status_str(first->want), tl_last_error());
    CHECK(error_names(FLASH), "%s and %s: \"%s\"", first->name, other, tl_last_error());
    CHECK(memcmp(before, all, sizeof before) == 0, "%s and %s: something was written", first->name,
          other);
    if (!second && first->mentions != UNSAID)
        CHECK(error_mentions(first->mentions), "%s: no %lld in \"%s\"", first->name,
              (long long)first->mentions, tl_last_error());
}

TEST(bad_arguments_are_refused_in_order)
{
    float *all = guarded(BAD_SIZE * sizeof *all);
    for (int threads = 1; threads <= 2; threads++) {
        tl_pool *tp = make_threads(threads);
        struct bad x;
        bad_fresh(&x, all, tp);
        CHECK_STATUS(bad_run(&x), TL_OK);
        CHECK(!all_paint(all + AT_O, AT_LSE - AT_O), "a good call wrote nothing");
        for (size_t i = 0; i < N_FAULTS; i++) {
            check_refused(all, tp, &faults[i], NULL);
            for (size_t j = 0; j < N_FAULTS; j++)
                if (faults[i].rank < faults[j].rank)
                    check_refused(all, tp, &faults[i], &faults[j]);
        }
        tl_pool_destroy(tp);
    }
    guarded_free(all, BAD_SIZE * sizeof *all);
}

TEST(busy_comes_before_memory)
{
    float *all = guarded(BAD_SIZE * sizeof *all);
    tl_pool *tp = make_threads(2);
    struct bad x;
    bad_fresh(&x, all, tp);
    x.inside = true;
    struct hook refuse;
    hook_install(&refuse, 1);
    const tl_status got = bad_run(&x);
    hook_remove();
    CHECK(got == TL_EBUSY && all_paint(all + AT_O, AT_SINKS - AT_O), "%s", tl_status_str(got));
    tl_pool_destroy(tp);
    guarded_free(all, BAD_SIZE * sizeof *all);
}

CHECK_MAIN()
