/* SPDX-License-Identifier: MIT */
/* test_store.c: rows stored in eight bits, tl_store_i8_f32 and tl_store_e4m3_f32, against the rule
 * in numerics.h. */
#include <fenv.h>

#include "kernels/kernels.h"
#include "kv_ref.h"
#include "tinyllm/numerics.h"

enum { FORMATS = 2 };
static const tl_dtype dtypes[FORMATS] = {TL_I8, TL_F8_E4M3};
static const char *const names[FORMATS] = {"tl_store_i8_f32", "tl_store_e4m3_f32"};

static void store(int which, const float *x, void *codes, float *scales, int64_t rows, int64_t dim)
{
    if (which == 0)
        tl_store_i8_f32(x, codes, scales, rows, dim);
    else
        tl_store_e4m3_f32(x, codes, scales, rows, dim);
}

static void compare(int which, const float *x, const unsigned char *codes, const float *scales,
                    int64_t rows, int64_t dim)
{
    unsigned char *want = malloc((size_t)dim + 1);
    for (int64_t i = 0; i < rows; i++) {
        float scale;
        ref_store_scaled(dtypes[which], x + i * dim, dim, want, &scale);
        CHECK_BITS(scales[i], scale, "%s, row %lld of %lld", names[which], (long long)i,
                   (long long)dim);
        for (int64_t d = 0; d < dim; d++)
            CHECK(codes[i * dim + d] == want[d],
                  "%s: %.9g of a row of scale %.9g is %02X, not %02X", names[which],
                  (double)x[i * dim + d], (double)scale, codes[i * dim + d], want[d]);
    }
    free(want);
}

TEST(rows_of_any_width_are_stored_by_the_rule_at_any_alignment)
{
    uint64_t seed = 3;
    for (int isa = 0; tl_kernels_usable(isa); isa++)
        for (int which = 0; which < FORMATS; which++)
            for (int64_t dim = 1; dim <= 140; dim += dim < 40 ? 1 : 17)
                for (size_t off = 0; off < 3; off++) {
                    const int64_t rows = 3 + rng_below(&seed, REF_ROW_KINDS);
                    const size_t n = (size_t)(rows * dim);
                    float *x = guarded(n * 4), *scales = guarded((size_t)rows * 4);
                    /* codes end at an unmapped page, or a few bytes before */
                    unsigned char *room = guarded(n + off), *codes = room;
                    for (int64_t i = 0; i < rows; i++)
                        ref_row((int)(i % REF_ROW_KINDS), &seed, x + i * dim, dim);
                    tl_kernels_select(tl_kernels_usable(isa)->name);
                    store(which, x, codes, scales, rows, dim);
                    tl_kernels_select(NULL);
                    compare(which, x, codes, scales, rows, dim);
                    guarded_free(x, n * 4), guarded_free(scales, (size_t)rows * 4);
                    guarded_free(room, n + off);
                }
}

TEST(known_rows)
{
    const struct {
        float x[4];
        uint32_t scale[FORMATS];
        uint8_t codes[FORMATS][4];
    } known[] = {
        {{127, -127, 0, 1}, {0x3F800000, 0x3E912492}, {{127, 0x81, 0, 1}, {0x7E, 0xFE, 0, 0x46}}},
        {{0, -0.0f, 0, 0}, {0, 0}, {{0}, {0}}},
        {{0x1.fffffep-101f, 0, 0, 0}, {0, 0}, {{0}, {0}}},
        {{NAN, 1, 2, 3}, {0x7FC00000, 0x7FC00000}, {{0}, {0}}},
        {{1, 2, -INFINITY, 3}, {0x7FC00000, 0x7FC00000}, {{0}, {0}}},
        /* ties go to even: 0.5, 1.5, 2.5 of 127 */
        {{0.5f, 1.5f, 2.5f, 127},
         {0x3F800000, 0x3E912492},
         {{0, 2, 2, 127}, {0x3E, 0x4B, 0x51, 0x7E}}}};
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        for (int which = 0; which < FORMATS; which++) {
            unsigned char codes[4];
            float scale;
            store(which, known[i].x, codes, &scale, 1, 4);
            CHECK(float_bits(scale) == known[i].scale[which], "row %zu, %s: scale %08X", i,
                  names[which], float_bits(scale));
            compare(which, known[i].x, codes, &scale, 1, 4);
            for (int d = 0; d < 4; d++)
                CHECK(codes[d] == known[i].codes[which][d], "row %zu, %s: code %d is %02X", i,
                      names[which], d, codes[d]);
        }
}

TEST(no_code_leaves_its_range_whatever_the_largest_is)
{
    uint64_t seed = 17;
    for (int turn = 0; turn < 200000; turn++) {
        const uint32_t bits = 0x0D800000 + (uint32_t)rng_below(&seed, 0x7F800000 - 0x0D800000);
        const float x[2] = {float_of(bits), float_of(bits | 0x80000000)};
        for (int which = 0; which < FORMATS; which++) {
            unsigned char codes[2];
            float scale;
            store(which, x, codes, &scale, 1, 2);
            CHECK(codes[0] == (which ? 0x7E : 127) && codes[1] == (which ? 0xFE : 0x81) &&
                      float_bits(scale) ==
                          float_bits((float)((double)x[0] / (which ? 448.0 : 127.0))),
                  "%s of %08X: %02X, %02X, scale %g", names[which], bits, codes[0], codes[1],
                  (double)scale);
        }
    }
}

/* Near ties it shows which factor the codes come from, and how it was rounded. */
TEST(codes_come_from_products_with_top_over_the_largest)
{
    enum { D = 256 };
    uint64_t seed = 41;
    for (int turn = 0; turn < 400; turn++)
        for (int which = 0; which < FORMATS; which++) {
            unsigned char codes[D];
            float x[D], scale;
            x[0] = float_of(0x3F800000 + (uint32_t)rng_below(&seed, 0x800000));
            for (int d = 1; d < D; d++) {
                const double tie = which ? (double)(ref_e4m3_value((uint8_t)(d / 2)) +
                                                    ref_e4m3_value((uint8_t)(d / 2 - (d > 3)))) / 2
                                         : d / 2 + 0.5,
                             most = which ? 448 : 127;
                const float near = (float)(tie / most * (double)x[0]);
                x[d] = float_of(float_bits(near) + (uint32_t)rng_below(&seed, 3) - (near > 0));
                if (!(x[d] <= x[0]))
                    x[d] = 0;
            }
            store(which, x, codes, &scale, 1, D);
            compare(which, x, codes, &scale, 1, D);
        }
}

TEST(what_is_read_back_and_stored_again_is_the_same)
{
    enum { D = 33 };
    uint64_t seed = 23;
    for (int turn = 0; turn < 3000; turn++)
        for (int which = 0; which < FORMATS; which++) {
            unsigned char codes[D], again[D];
            float x[D], scale, scale_again;
            ref_row(turn % REF_ROW_KINDS, &seed, x, D);
            store(which, x, codes, &scale, 1, D);
            for (int d = 0; d < D; d++)
                x[d] = scale * (which ? ref_e4m3_value(codes[d]) : (float)(int8_t)codes[d]);
            store(which, x, again, &scale_again, 1, D);
            CHECK_BITS(scale_again, scale, "%s, turn %d", names[which], turn);
            CHECK(memcmp(codes, again, D) == 0, "%s, turn %d: codes", names[which], turn);
        }
}

TEST(the_callers_rounding_does_not_reach_the_codes)
{
    static const int modes[] = {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
    enum { ROWS = REF_ROW_KINDS, D = 35 };
    uint64_t seed = 5;
    float x[ROWS * D], scales[ROWS];
    unsigned char codes[ROWS * D];
    for (int i = 0; i < ROWS; i++)
        ref_row(i, &seed, x + i * D, D);
    for (int which = 0; which < FORMATS; which++)
        for (int m = 0; m < 3; m++) {
            fesetround(modes[m]);
            store(which, x, codes, scales, ROWS, D);
            const int after = fegetround();
            fesetround(FE_TONEAREST);
            CHECK(after == modes[m], "the mode %d became %d", modes[m], after);
            compare(which, x, codes, scales, ROWS, D);
        }
}

TEST(rows_of_no_elements_have_scales_of_0)
{
    for (int which = 0; which < FORMATS; which++) {
        float scales[3] = {7, 7, 7};
        tl_set_last_error("as it was");
        store(which, NULL, NULL, scales, 2, 0);
        CHECK(float_bits(scales[0]) == 0 && float_bits(scales[1]) == 0 && scales[2] == 7,
              "%g, %g, %g", (double)scales[0], (double)scales[1], (double)scales[2]);
        store(which, NULL, NULL, NULL, 0, 5);
        store(which, NULL, NULL, NULL, 0, 0);
        CHECK(strcmp(tl_last_error(), "as it was") == 0, "\"%s\"", tl_last_error());
    }
}

TEST(bad_arguments_write_nothing_and_are_named)
{
    const float x[4] = {1, 2, 3, 4};
    for (int which = 0; which < FORMATS; which++) {
        unsigned char codes[4] = {9, 9, 9, 9};
        float scales[2] = {7, 7};
        const struct {
            const float *x;
            void *codes;
            float *scales;
            int64_t rows, dim;
            const char *words;
        } bad[] = {{x, codes, scales, -1, 2, "rows = -1, dim = 2: neither may be negative"},
                   {x, codes, scales, 2, -2, "rows = 2, dim = -2"},
                   {NULL, NULL, NULL, INT64_MIN, 2, "rows = -9223372036854775808"},
                   {NULL, NULL, NULL, 0, -1, "rows = 0, dim = -1"},
                   {NULL, codes, scales, 2, 2, "x is NULL, rows = 2, dim = 2"},
                   {x, NULL, scales, 2, 2, "codes is NULL"},
                   {x, codes, NULL, 2, 2, "scales is NULL"},
                   {NULL, NULL, NULL, 2, 0, "scales is NULL, rows = 2, dim = 0"}};
        for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
            tl_set_last_error(NULL);
            store(which, bad[i].x, bad[i].codes, bad[i].scales, bad[i].rows, bad[i].dim);
            const size_t n = strlen(names[which]);
            CHECK(strncmp(tl_last_error(), names[which], n) == 0 && tl_last_error()[n] == ':' &&
                      strstr(tl_last_error(), bad[i].words),
                  "%s, case %zu: \"%s\"", names[which], i, tl_last_error());
            CHECK(codes[0] == 9 && codes[3] == 9 && scales[0] == 7 && scales[1] == 7,
                  "%s, case %zu wrote", names[which], i);
        }
    }
}

CHECK_MAIN()
