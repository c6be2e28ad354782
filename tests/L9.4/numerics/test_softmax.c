/* SPDX-License-Identifier: MIT */
/* test_softmax.c: softmax.h, against plain softmax in double for the values and against the stated
 * order of operations, in scalar C, for the bits. */
#include "exp_ref.h"
#include "tinyllm/isa.h"
#include "tinyllm/softmax.h"

typedef tl_status softmax_fn(const float *x, float *y, int64_t rows, int64_t cols);

/* ---- the order of operations ---- */

static float max_or_nan(float a, float b)
{
    return isnan(a) || isnan(b) ? NAN : a > b ? a : b;
}

static float fold_by_halves(const float *lane)
{
    float eight[8], four[4];
    for (int i = 0; i < 8; i++)
        eight[i] = lane[i] + lane[i + 8];
    for (int i = 0; i < 4; i++)
        four[i] = eight[i] + eight[i + 4];
    const float even = four[0] + four[2], odd = four[1] + four[3];
    return even + odd;
}

/* No finite maximum: zeros for a row of -inf, NaN otherwise. */
static int write_degenerate(float m, float *y, int64_t cols)
{
    if (isfinite(m))
        return 0;
    for (int64_t c = 0; c < cols; c++)
        y[c] = m == -INFINITY ? 0 : float_of(TL_NAN_BITS);
    return 1;
}

static void write_row(const float *x, float *y, int64_t cols, float m, const float *lane)
{
    const float factor = 1 / fold_by_halves(lane);
    for (int64_t c = 0; c < cols; c++)
        y[c] = ref_expf(x[c] - m) * factor;
}

static tl_status ref_softmax(const float *x, float *y, int64_t rows, int64_t cols)
{
    for (int64_t r = 0; r < rows; r++, x += cols, y += cols) {
        float m = -INFINITY, lane[16] = {0};
        for (int64_t c = 0; c < cols; c++)
            m = max_or_nan(m, x[c]);
        if (write_degenerate(m, y, cols))
            continue;
        for (int64_t c = 0; c < cols; c++)
            lane[c % 16] = lane[c % 16] + ref_expf(x[c] - m);
        write_row(x, y, cols, m, lane);
    }
    return TL_OK;
}

/* The running maximum rises a tile of sixteen columns at a time. */
static tl_status ref_softmax_online(const float *x, float *y, int64_t rows, int64_t cols)
{
    for (int64_t r = 0; r < rows; r++, x += cols, y += cols) {
        float m = -INFINITY, lane[16] = {0};
        for (int64_t tile = 0; tile < cols; tile += 16) {
            const int64_t end = tile + 16 < cols ? tile + 16 : cols;
            float top = m;
            for (int64_t c = tile; c < end; c++)
                top = max_or_nan(top, x[c]);
            if (top == -INFINITY)
                continue;
            for (int i = 0; i < 16 && !(top == m); i++)
                lane[i] = lane[i] * ref_expf(m - top);
            m = top;
            for (int64_t c = tile; c < end; c++)
                lane[c % 16] = lane[c % 16] + ref_expf(x[c] - m);
        }
        if (!write_degenerate(m, y, cols))
            write_row(x, y, cols, m, lane);
    }
    return TL_OK;
}

static const struct {
    const char *name;
    softmax_fn *run, *ref;
} variants[] = {
    {"tl_softmax_f32", tl_softmax_f32, ref_softmax},
    {"tl_softmax_online_f32", tl_softmax_online_f32, ref_softmax_online},
};
#define FOR_EACH_VARIANT(v) for (int v = 0; v < 2; v++)

/* ---- inputs ---- */

static void fill_row(float *x, int64_t n, uint64_t *rng, double spread)
{
    for (int64_t i = 0; i < n; i++)
        x[i] = (float)(rng_unit(rng) * spread);
}

/* Mostly ordinary numbers, with what breaks softmaxes strewn in. */
static void fill_hostile(float *x, int64_t n, uint64_t *rng)
{
    static const float odd[] = {-INFINITY, -INFINITY,     1e30f,          -1e30f, 0, -0.0f,
                                0x1p-149f, 3.4028235e38f, -3.4028235e38f, -104,   88};
    fill_row(x, n, rng, 20);
    for (int64_t i = 0; i < n; i++)
        if (rng_below(rng, 12) == 0)
            x[i] = odd[rng_below(rng, sizeof odd / sizeof *odd)];
    if (n > 0 && rng_below(rng, 10) == 0)
        x[rng_below(rng, n)] = rng_below(rng, 2) ? INFINITY : float_of(0xFFC01234);
}

/* ---- values ---- */

#define CHECK_ROW(n, ...)                  \
    do {                                   \
        const float x_[n] = {__VA_ARGS__}; \
        check_values(x_, n, #__VA_ARGS__); \
    } while (0)

/* Each weight within the error of rounding x - max, of exp, of the sum and of the product. */
static void check_values(const float *x, int64_t n, const char *what)
{
    double m = -INFINITY, sum = 0;
    float *y = guarded((size_t)n * sizeof *y);
    for (int64_t i = 0; i < n; i++)
        m = fmax(m, x[i]);
    for (int64_t i = 0; i < n; i++)
        sum += exp(x[i] - m);
    FOR_EACH_ISA(k)
        FOR_EACH_VARIANT(v) {
            CHECK_STATUS(variants[v].run(x, y, 1, n), TL_OK);
            for (int64_t i = 0; i < n; i++) {
                const double want = exp(x[i] - m) / sum;
                const double rounding = (fmin(m - x[i], 110) + 6) * 0x1p-24 + (double)n * 0x1p-28;
                CHECK(fabs(y[i] - want) <= want * rounding + 0x1p-125,
                      "%s %s of %s: [%lld] is %.9g, want %.9g", k->name, variants[v].name, what,
                      (long long)i, (double)y[i], want);
            }
        }
    guarded_free(y, (size_t)n * sizeof *y);
}

TEST(weights_are_those_of_softmax)
{
    uint64_t rng = 3;
    CHECK_ROW(2, 0, 0);
    CHECK_ROW(3, 1000, 999, -1000);
    CHECK_ROW(3, -1e30f, -1e30f, -1e30f);
    CHECK_ROW(4, 1e30f, -1e30f, 1e30f, 0);
    CHECK_ROW(2, 0, -INFINITY);
    CHECK_ROW(3, 3.4028235e38f, -3.4028235e38f, 0);
    for (int n = 1; n < 100; n++) {
        float x[100];
        fill_row(x, n, &rng, n % 3 ? 8 : 60);
        check_values(x, n, "random numbers");
    }
    static float rising[5000];
    for (int i = 0; i < 5000; i++)
        rising[i] = (float)i * 0.01f; /* the maximum rises in every tile */
    check_values(rising, 5000, "a rising row");
}

TEST(worked_rows)
{
    const float masked[2] = {0, -INFINITY}, one[1] = {-7.25f}, two[2] = {5, 5},
                far[3] = {1e30f, -1e30f, 1e30f};
    float y[3];
    FOR_EACH_ISA(k)
        FOR_EACH_VARIANT(v) {
            CHECK_STATUS(variants[v].run(masked, y, 1, 2), TL_OK);
            CHECK_BITS(y[0], 1.0f, "%s", k->name);
            CHECK_BITS(y[1], 0.0f, "%s", k->name);
            CHECK_STATUS(variants[v].run(one, y, 1, 1), TL_OK);
            CHECK_BITS(y[0], 1.0f, "%s: a single column", k->name);
            CHECK_STATUS(variants[v].run(two, y, 1, 2), TL_OK);
            CHECK_BITS(y[0], 0.5f, "%s", k->name);
            CHECK_BITS(y[1], 0.5f, "%s", k->name);
            CHECK_STATUS(variants[v].run(far, y, 1, 3), TL_OK);
            CHECK_BITS(y[0], 0.5f, "%s", k->name);
            CHECK_BITS(y[1], 0.0f, "%s", k->name);
            CHECK_BITS(y[2], 0.5f, "%s", k->name);
        }
}

/* One special value at every place of rows of every length: the whole row is NaN, or zeros where
 * nothing is left. */
static void check_filled(const float *x, int64_t n, float want, const char *what)
{
    float y[64];
    FOR_EACH_ISA(k)
        FOR_EACH_VARIANT(v) {
            CHECK_STATUS(variants[v].run(x, y, 1, n), TL_OK);
            for (int64_t i = 0; i < n; i++)
                CHECK_BITS(y[i], want, "%s %s, %s, column %lld of %lld", k->name, variants[v].name,
                           what, (long long)i, (long long)n);
        }
}

TEST(nan_and_infinity_reach_the_whole_row)
{
    static const uint32_t poison[] = {0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF, 0x7F800000};
    float x[64];
    uint64_t rng = 5;
    for (int64_t n = 1; n <= 64; n += n < 34 ? 1 : 15)
        for (int64_t at = 0; at < n; at++)
            for (int p = 0; p < 5; p++) {
                fill_row(x, n, &rng, 5);
                x[at] = float_of(poison[p]);
                check_filled(x, n, float_of(TL_NAN_BITS), "a NaN or +inf");
                for (int64_t i = 0; i < n; i++)
                    x[i] = i == at ? x[i] : -INFINITY;
                check_filled(x, n, float_of(TL_NAN_BITS), "a NaN or +inf among -inf");
            }
}

TEST(a_row_of_minus_infinity_is_zeros)
{
    float x[64];
    for (int i = 0; i < 64; i++)
        x[i] = -INFINITY;
    for (int64_t n = 1; n <= 64; n++)
        check_filled(x, n, 0, "-inf throughout");
}

TEST(many_equal_values_sum_to_one)
{
    enum { N = 100003 };
    static float x[N], y[N];
    for (int i = 0; i < N; i++)
        x[i] = 3.5f;
    FOR_EACH_ISA(k)
        FOR_EACH_VARIANT(v) {
            double sum = 0;
            CHECK_STATUS(variants[v].run(x, y, 1, N), TL_OK);
            for (int i = 0; i < N; i++)
                sum += y[i];
            CHECK(fabs(sum - 1) <= 1e-5, "%s %s: %.9f", k->name, variants[v].name, sum);
            CHECK_BITS(y[N - 1], y[0], "%s: equal columns differ", k->name);
        }
}

/* ---- bits ---- */

/* Any number of columns, at any alignment, an unmapped page behind and paint in front: the stated
 * bits and nothing else. */
TEST(bits_are_the_stated_order_on_every_instruction_set)
{
    enum { MOST = 131, RIM = 16, ROWS = 3 };
    uint64_t rng = 7;
    for (int64_t cols = 1; cols <= MOST; cols++) {
        const size_t n = (size_t)(ROWS * cols);
        float *x = guarded(n * sizeof *x), *y = (float *)guarded((RIM + n) * sizeof *y) + RIM,
              want[ROWS * MOST];
        for (int round = 0; round < 6; round++) {
            fill_hostile(x, (int64_t)n, &rng);
            FOR_EACH_VARIANT(v) {
                variants[v].ref(x, want, ROWS, cols);
                FOR_EACH_ISA(k) {
                    memset(y - RIM, 0xA5, (RIM + n) * sizeof *y);
                    CHECK_STATUS(variants[v].run(x, y, ROWS, cols), TL_OK);
                    for (size_t i = 0; i < n; i++)
                        CHECK_BITS(y[i], want[i], "%s %s, %lld columns, element %zu", k->name,
                                   variants[v].name, (long long)cols, i);
                    for (int i = 1; i <= RIM; i++)
                        CHECK(float_bits(y[-i]) == 0xA5A5A5A5, "%s wrote in front of y", k->name);
                }
            }
        }
        guarded_free(x, n * sizeof *x);
        guarded_free(y - RIM, (RIM + n) * sizeof *y);
    }
}

TEST(long_rows_have_the_stated_bits)
{
    enum { N = 20011 };
    static float x[N], y[N], want[N];
    uint64_t rng = 9;
    for (int round = 0; round < 4; round++) {
        fill_row(x, N, &rng, round < 2 ? 4 : 40);
        FOR_EACH_VARIANT(v) {
            variants[v].ref(x, want, 1, N);
            FOR_EACH_ISA(k) {
                CHECK_STATUS(variants[v].run(x, y, 1, N), TL_OK);
                for (int i = 0; i < N; i++)
                    CHECK_BITS(y[i], want[i], "%s %s, column %d", k->name, variants[v].name, i);
            }
        }
    }
}

TEST(in_place_gives_the_same_bits)
{
    enum { MOST = 70, ROWS = 2 };
    float x[ROWS * MOST], y[ROWS * MOST];
    uint64_t rng = 13;
    FOR_EACH_ISA(k)
        FOR_EACH_VARIANT(v)
            for (int64_t cols = 1; cols <= MOST; cols++)
                for (int round = 0; round < 4; round++) {
                    fill_hostile(x, ROWS * cols, &rng);
                    CHECK_STATUS(variants[v].run(x, y, ROWS, cols), TL_OK);
                    CHECK_STATUS(variants[v].run(x, x, ROWS, cols), TL_OK);
                    CHECK(memcmp(x, y, (size_t)(ROWS * cols) * sizeof *x) == 0,
                          "%s %s, %lld columns", k->name, variants[v].name, (long long)cols);
                }
}

TEST(a_row_does_not_know_its_neighbours)
{
    enum { ROWS = 9, COLS = 37 };
    float x[ROWS * COLS], together[ROWS * COLS], alone[COLS];
    uint64_t rng = 17;
    fill_hostile(x, ROWS * COLS, &rng);
    x[4 * COLS + 3] = NAN;
    FOR_EACH_ISA(k)
        FOR_EACH_VARIANT(v) {
            CHECK_STATUS(variants[v].run(x, together, ROWS, COLS), TL_OK);
            for (int r = 0; r < ROWS; r++) {
                CHECK_STATUS(variants[v].run(x + r * COLS, alone, 1, COLS), TL_OK);
                CHECK(memcmp(alone, together + r * COLS, sizeof alone) == 0, "%s %s, row %d",
                      k->name, variants[v].name, r);
            }
        }
}

__attribute__((noinline)) static tl_status run_in_mode(unsigned mode, softmax_fn *run,
                                                       const float *x, float *y, int64_t n,
                                                       unsigned *left)
{
    set_float_mode(mode);
    const tl_status status = run(x, y, 1, n);
    *left = get_float_mode();
    return status;
}

TEST(the_callers_float_mode_neither_matters_nor_changes)
{
    enum { COLS = 53 };
    float x[COLS], plain[COLS], y[COLS];
    uint64_t rng = 19;
    const unsigned before = get_float_mode();
    FOR_EACH_ISA(k)
        FOR_EACH_VARIANT(v)
            for (int i = 0; i < N_FLOAT_MODES; i++) {
                unsigned entered, left;
                fill_hostile(x, COLS, &rng);
                CHECK_STATUS(variants[v].run(x, plain, 1, COLS), TL_OK);
                set_float_mode(hostile_float_mode(i));
                entered = get_float_mode();
                const tl_status status = run_in_mode(entered, variants[v].run, x, y, COLS, &left);
                set_float_mode(before);
                CHECK(status == TL_OK, "%s, mode %08x", k->name, entered);
                CHECK(left == entered, "%s, mode %08x came back as %08x", k->name, entered, left);
                CHECK(memcmp(y, plain, sizeof y) == 0, "%s %s, other bits in mode %08x", k->name,
                      variants[v].name, entered);
            }
}

/* ---- arguments ---- */

static void check_refused(int v, const float *x, float *y, int64_t rows, int64_t cols,
                          tl_status want, const char *because)
{
    const size_t prefix = strlen(variants[v].name);
    tl_set_last_error("");
    CHECK_STATUS(variants[v].run(x, y, rows, cols), want);
    CHECK(strncmp(tl_last_error(), variants[v].name, prefix) == 0 && tl_last_error()[prefix] == ':',
          "\"%s\"", tl_last_error());
    CHECK(strstr(tl_last_error(), because), "want \"%s\" in \"%s\"", because, tl_last_error());
}

TEST(bad_arguments_are_refused_and_nothing_is_written)
{
    const float x[4] = {1, 2, 3, 4};
    float y[4], paint[4];
    memset(paint, 0xA5, sizeof paint);
    memcpy(y, paint, sizeof y);
    FOR_EACH_VARIANT(v) {
        check_refused(v, x, y, -1, 2, TL_EINVAL, "rows = -1");
        check_refused(v, x, y, 2, -3, TL_EINVAL, "cols = -3");
        check_refused(v, x, y, -2, -2, TL_EINVAL, "-2");
        check_refused(v, x, y, 0, -1, TL_EINVAL, "-1");
        check_refused(v, x, y, -1, 0, TL_EINVAL, "-1");
        check_refused(v, x, y, INT64_MIN, 1, TL_EINVAL, "-9223372036854775808");
        check_refused(v, x, y, INT64_MAX, 2, TL_EINVAL, "9223372036854775807");
        /* 2^64 elements: 0 if it wrapped */
        check_refused(v, x, y, (int64_t)1 << 32, (int64_t)1 << 32, TL_EINVAL, "4294967296");
        /* 2^63 bytes */
        check_refused(v, x, y, (int64_t)1 << 61, 1, TL_EINVAL, "2305843009213693952");
        check_refused(v, NULL, y, 2, 2, TL_EINVAL, "x");
        check_refused(v, x, NULL, 2, 2, TL_EINVAL, "y");
    }
    CHECK(memcmp(y, paint, sizeof y) == 0, "y was written");
}

TEST(no_rows_or_no_columns_is_no_error)
{
    tl_set_last_error("earlier");
    FOR_EACH_VARIANT(v) {
        CHECK_STATUS(variants[v].run(NULL, NULL, 0, 5), TL_OK);
        CHECK_STATUS(variants[v].run(NULL, NULL, 5, 0), TL_OK);
        CHECK_STATUS(variants[v].run(NULL, NULL, 0, INT64_MAX), TL_OK);
        CHECK_STATUS(variants[v].run(NULL, NULL, INT64_MAX, 0), TL_OK);
    }
    CHECK(strcmp(tl_last_error(), "earlier") == 0, "\"%s\"", tl_last_error());
}

TEST(an_unknown_instruction_set_is_refused_with_the_names_that_work)
{
    const float x[2] = {1, 2};
    float y[2] = {7, 7};
    FOR_EACH_VARIANT(v) {
        tl_kernels_select("avx1024");
        const tl_status status = variants[v].run(x, y, 1, 2);
        tl_kernels_select(NULL);
        CHECK(status == TL_EUNSUPPORTED, "%s", tl_status_str(status));
        const char *line = tl_last_error();
        CHECK(strstr(line, variants[v].name) && strstr(line, "avx1024") && strstr(line, "scalar"),
              "\"%s\"", line);
        CHECK(y[0] == 7 && y[1] == 7, "y was written");
    }
}

CHECK_MAIN()
