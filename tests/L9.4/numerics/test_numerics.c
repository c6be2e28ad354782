/* SPDX-License-Identifier: MIT */
/* test_numerics.c: numerics.h. The small formats are compared with their definition (a search for
 * the nearest value, in double), exp with long double, everything with itself on each instruction
 * set. */
#include "exp_ref.h"
/* compiled here without any instruction set: the scalar lanes and their own fma */
#include "numerics/canon.h"
#include "tinyllm/isa.h"

/* ---- the formats by definition ---- */

struct format {
    const char *name;
    uint32_t mant, bias, sign; /* fraction bits, exponent bias, the sign bit */
    uint32_t top;              /* the largest finite magnitude */
    uint32_t over, inf, nan;   /* what finite overflow, infinity and NaN become */
    uint32_t (*narrow)(float x);
    float (*widen)(uint32_t code);
};

#define ADAPT(format, code)                        \
    static uint32_t narrow_##format(float x)       \
    {                                              \
        return tl_f32_to_##format(x);              \
    }                                              \
    static float widen_##format(uint32_t h)        \
    {                                              \
        return tl_##format##_to_f32((code)h);      \
    }
ADAPT(f16, uint16_t)
ADAPT(bf16, uint16_t)
ADAPT(e4m3, uint8_t)
ADAPT(e5m2, uint8_t)

static const struct format formats[] = {
    {"f16", 10, 15, 0x8000, 0x7BFF, 0x7C00, 0x7C00, 0x7E00, narrow_f16, widen_f16},
    {"bf16", 7, 127, 0x8000, 0x7F7F, 0x7F80, 0x7F80, 0x7FC0, narrow_bf16, widen_bf16},
    {"e4m3", 3, 7, 0x80, 0x7E, 0x7E, 0x7E, 0x7F, narrow_e4m3, widen_e4m3},
    {"e5m2", 2, 15, 0x80, 0x7B, 0x7B, 0x7C, 0x7F, narrow_e5m2, widen_e5m2},
};
#define FOR_EACH_FORMAT(f) \
    for (const struct format *f = formats; f < formats + sizeof formats / sizeof *formats; f++)

/* The value of a finite magnitude, and of the one after the largest, as though the format went
 * on. */
static double value_of(const struct format *f, uint32_t m)
{
    const uint32_t e = m >> f->mant, one = 1u << f->mant;
    const double fraction = (double)(m & (one - 1)) / one;
    return e ? ldexp(1 + fraction, (int)e - (int)f->bias) : ldexp(fraction, 1 - (int)f->bias);
}

static uint32_t nearest_code(const struct format *f, float x)
{
    const uint32_t sign = signbit(x) ? f->sign : 0;
    if (isnan(x))
        return f->nan;
    if (isinf(x))
        return sign | f->inf;
    const double a = fabs((double)x);
    /* value(lo) <= a, and a < value(hi) unless hi is past the top */
    uint32_t lo = 0, hi = f->top + 1;
    while (hi - lo > 1) {
        const uint32_t mid = (lo + hi) / 2;
        if (value_of(f, mid) <= a)
            lo = mid;
        else
            hi = mid;
    }
    const double half = (value_of(f, lo) + value_of(f, lo + 1)) / 2;
    const uint32_t m = lo + (a > half || (a == half && lo % 2));
    return sign | (m > f->top ? f->over : m);
}

static void check_narrow(const struct format *f, float x)
{
    const uint32_t got = f->narrow(x), want = nearest_code(f, x);
    CHECK(got == want, "%s of %08x (%a) is %04x, want %04x", f->name, float_bits(x), (double)x, got,
          want);
}

TEST(every_code_widens_to_its_value)
{
    FOR_EACH_FORMAT(f)
        for (uint32_t code = 0; code < 2 * f->sign; code++) {
            const uint32_t m = code & ~f->sign, got = float_bits(f->widen(code));
            const float sign = code & f->sign ? -1.0f : 1.0f;
            if (m <= f->top)
                CHECK_BITS(f->widen(code), (float)value_of(f, m) * sign, "%s %04x", f->name, code);
            else if (m == f->inf)
                CHECK_BITS(f->widen(code), INFINITY * sign, "%s %04x", f->name, code);
            else
                CHECK((got & 0x7F800000) == 0x7F800000 && (got & 0x7FFFFF) != 0 &&
                          got >> 31 == (code & f->sign ? 1 : 0) &&
                          /* bf16 keeps its own bits, signalling ones too */
                          (got & 0x400000 || f->mant == 7),
                      "%s %04x widens to %08x, no quiet NaN of its sign", f->name, code, got);
        }
}

TEST(nan_payloads_are_kept_when_widened)
{
    CHECK(float_bits(tl_f16_to_f32(0x7C01)) == 0x7FC02000, "%08x",
          float_bits(tl_f16_to_f32(0x7C01)));
    CHECK(float_bits(tl_f16_to_f32(0xFE01)) == 0xFFC02000, "%08x",
          float_bits(tl_f16_to_f32(0xFE01)));
    CHECK(float_bits(tl_bf16_to_f32(0x7F81)) == 0x7F810000, "%08x",
          float_bits(tl_bf16_to_f32(0x7F81)));
    CHECK(float_bits(tl_bf16_to_f32(0xFFFF)) == 0xFFFF0000, "%08x",
          float_bits(tl_bf16_to_f32(0xFFFF)));
    CHECK(float_bits(tl_e4m3_to_f32(0xFF)) == 0xFFF00000, "%08x", float_bits(tl_e4m3_to_f32(0xFF)));
    CHECK(float_bits(tl_e5m2_to_f32(0x7D)) == 0x7FE00000, "%08x", float_bits(tl_e5m2_to_f32(0x7D)));
}

TEST(every_code_survives_the_round_trip)
{
    FOR_EACH_FORMAT(f)
        for (uint32_t code = 0; code < 2 * f->sign; code++) {
            const uint32_t m = code & ~f->sign, back = f->narrow(f->widen(code));
            const uint32_t want = m <= f->top || m == f->inf ? code : f->nan;
            CHECK(back == want, "%s %04x came back as %04x, want %04x", f->name, code, back, want);
        }
}

TEST(narrowing_goes_to_the_nearest_and_ties_to_even)
{
    FOR_EACH_FORMAT(f)
        for (uint32_t m = 0; m <= f->top; m++) {
            const float value = (float)value_of(f, m),
                        tie = (float)((value_of(f, m) + value_of(f, m + 1)) / 2);
            const float xs[] = {value, tie, nextafterf(tie, 0), nextafterf(tie, INFINITY),
                                nextafterf(value, INFINITY)};
            for (size_t i = 0; i < sizeof xs / sizeof *xs; i++) {
                check_narrow(f, xs[i]);
                check_narrow(f, -xs[i]);
            }
        }
}

TEST(narrowing_of_any_word)
{
    uint64_t rng = 11;
    FOR_EACH_FORMAT(f) {
        for (int i = 0; i < 300000; i++)
            check_narrow(f, float_of((uint32_t)(rng_next(&rng) >> 32)));
        for (int i = 0; i < 300000; i++) /* where the small formats live */
            check_narrow(f, ldexpf(rng_unit(&rng), (int)rng_below(&rng, 60) - 36));
    }
}

struct code_case {
    uint32_t bits, code;
};

static void check_cases(const struct format *f, const struct code_case *c, size_t n)
{
    for (size_t i = 0; i < n; i++)
        CHECK(f->narrow(float_of(c[i].bits)) == c[i].code, "%s of %08x is %04x, want %04x", f->name,
              c[i].bits, f->narrow(float_of(c[i].bits)), c[i].code);
}
#define CHECK_CASES(f, cases) check_cases(f, cases, sizeof cases / sizeof *cases)

TEST(f16_edges)
{
    static const struct code_case cases[] = {
        {0x33800000, 0x0001}, {0x33000000, 0x0000}, {0x33000001, 0x0001}, {0x33C00000, 0x0002},
        {0x34200000, 0x0002}, {0x387FDFFF, 0x03FF}, {0x387FE000, 0x0400}, {0x3F801000, 0x3C00},
        {0x3F803000, 0x3C02}, {0x477FE000, 0x7BFF}, {0x477FEFFF, 0x7BFF}, {0x477FF000, 0x7C00},
        {0x80000000, 0x8000}, {0xB3800000, 0x8001}, {0x7F800000, 0x7C00}, {0xFF800000, 0xFC00},
        {0x7F7FFFFF, 0x7C00}, {0x00000001, 0x0000}, {0x807FFFFF, 0x8000}, {0x7F800001, 0x7E00},
        {0x7FFFFFFF, 0x7E00}, {0xFF800001, 0x7E00}, {0xFFC00000, 0x7E00},
    };
    CHECK_CASES(&formats[0], cases);
}

TEST(bf16_edges)
{
    static const struct code_case cases[] = {
        {0x3F808000, 0x3F80}, {0x3F808001, 0x3F81}, {0x3F818000, 0x3F82}, {0x7F7F7FFF, 0x7F7F},
        {0x7F7F8000, 0x7F80}, {0x7F7FFFFF, 0x7F80}, {0x00008000, 0x0000}, {0x00008001, 0x0001},
        {0x80018000, 0x8002}, {0xFF7FFFFF, 0xFF80}, {0x7F800000, 0x7F80}, {0xFF800000, 0xFF80},
        {0x7F800001, 0x7FC0}, {0xFFFFFFFF, 0x7FC0}, {0xFF800001, 0x7FC0},
    };
    CHECK_CASES(&formats[1], cases);
}

TEST(e4m3_edges)
{
    static const struct code_case cases[] = {
        /* 448, 464.. */
        {0x43E00000, 0x7E},
        {0x43E7FFFF, 0x7E},
        {0x43E80000, 0x7E},
        {0x43E80001, 0x7E},
        {0x7F7FFFFF, 0x7E},
        /* 2^-10 */
        {0x7F800000, 0x7E},
        {0xFF800000, 0xFE},
        {0xC3E80001, 0xFE},
        {0x3A800000, 0x00},
        {0xBA800000, 0x80},
        {0x3A800001, 0x01},
        {0x3B000000, 0x01},
        {0x3B400000, 0x02},
        {0x3C700000, 0x08},
        {0x3C800000, 0x08},
        {0x3F800000, 0x38},
        {0x3F880000, 0x38},
        {0x3F980000, 0x3A},
        {0x80000000, 0x80},
        {0x00000001, 0x00},
        {0x7FC00000, 0x7F},
        {0xFF800001, 0x7F},
    };
    CHECK_CASES(&formats[2], cases);
}

TEST(e5m2_edges)
{
    static const struct code_case cases[] = {
        /* 57344, 61440 */
        {0x47600000, 0x7B},
        {0x476FFFFF, 0x7B},
        {0x47700000, 0x7B},
        {0x7F7FFFFF, 0x7B},
        {0xFF7FFFFF, 0xFB},
        /* 2^-17, 2^-16 */
        {0x7F800000, 0x7C},
        {0xFF800000, 0xFC},
        {0x37000000, 0x00},
        {0x37000001, 0x01},
        {0x37800000, 0x01},
        {0x37C00000, 0x02},
        {0x3F800000, 0x3C},
        {0x3F900000, 0x3C},
        {0x3FB00000, 0x3E},
        {0x80000000, 0x80},
        {0x7FC00000, 0x7F},
        {0xFFC00001, 0x7F},
    };
    CHECK_CASES(&formats[3], cases);
}

/* ---- exp ---- */

#define CHECK_EXP(bits, want) \
    CHECK_BITS(tl_expf(float_of(bits)), want, "%s, exp of %08x", k->name, (unsigned)(bits))

TEST(exp_edges)
{
    FOR_EACH_ISA(k) {
        CHECK_EXP(0x00000000, 1.0f);
        CHECK_EXP(0x80000000, 1.0f);
        CHECK_EXP(0x3F800000, 2.7182817f); /* the nearest floats to e, 1/e and e^10 */
        CHECK_EXP(0xBF800000, 0.36787945f);
        CHECK_EXP(0x41200000, 22026.465f);
        CHECK_EXP(0x7F800000, INFINITY);
        CHECK_EXP(0xFF800000, 0.0f);
        CHECK_EXP(0x42B17218, INFINITY);
        CHECK_EXP(0x42B20000, INFINITY);
        CHECK_EXP(0x4B400000, INFINITY); /* as large as the constant that rounds */
        CHECK_EXP(0x4F000000, INFINITY);
        CHECK_EXP(0x7F7FFFFF, INFINITY);
        CHECK_EXP(0xC2CFF1B6, 0.0f);
        CHECK_EXP(0xC2D00000, 0.0f);
        CHECK_EXP(0xC3000000, 0.0f);
        CHECK_EXP(0xCB400000, 0.0f);
        CHECK_EXP(0xFF7FFFFF, 0.0f);
        CHECK_EXP(0x7FC00000, float_of(TL_NAN_BITS));
        CHECK_EXP(0xFFC12345, float_of(TL_NAN_BITS));
        CHECK_EXP(0x7F800001, float_of(TL_NAN_BITS));
        CHECK_EXP(0x00000001, 1.0f);
        CHECK_EXP(0x80000001, 1.0f);
        CHECK_EXP(0x322BCC77, 1.0f); /* 1e-8 */
        CHECK_EXP(0xB22BCC77, 1.0f);
        const float last = tl_expf(TL_EXPF_OVERFLOW); /* e^88.7228317 = 3.40279851e38 */
        CHECK(ulps_off(last, 3.4027985085217e38L) <= TL_EXPF_MAX_ULP, "%s: %.9g", k->name,
              (double)last);
        const float least = tl_expf(float_of(0xC2AEAC4F));
        CHECK(ulps_off(least, expl(float_of(0xC2AEAC4F))) <= TL_EXPF_MAX_ULP, "%s: %.9g", k->name,
              (double)least);
    }
}

/* Where e^x is subnormal the result is +0. Within the error of the boundary it may be the least
 * normal number instead. */
TEST(exp_below_the_normal_range_is_zero)
{
    FOR_EACH_ISA(k)
        for (uint32_t bits = 0xC2AEAC50; bits < 0xC2D00001; bits += bits < 0xC2AEB000 ? 1 : 97) {
            const float y = tl_expf(float_of(bits));
            const int edge = expl(float_of(bits)) > 0x1p-126L * (1 - 0x1p-23L);
            CHECK(float_bits(y) == 0 || (edge && y == 0x1p-126f), "%s: exp of %08x is %a", k->name,
                  bits, (double)y);
        }
}

/* Every 997th float of [-104, 89], ascending. */
enum { EXP_STEP = 997, EXP_CHUNK = 4096 };

static int next_chunk(int64_t *at, float *x)
{
    /* -104 and 89 as signed magnitudes */
    const int64_t first = -(int64_t)0x42D00000, last = 0x42B20000;
    int n = 0;
    for (; n < EXP_CHUNK && first + *at * EXP_STEP <= last; n++, ++*at) {
        const int64_t m = first + *at * EXP_STEP;
        x[n] = float_of(m < 0 ? 0x80000000u | (uint32_t)-m : (uint32_t)m);
    }
    return n;
}

TEST(exp_is_within_its_bound)
{
    float x[EXP_CHUNK], y[EXP_CHUNK], worst_x = 0;
    double worst = 0;
    int64_t at = 0, n_checked = 0;
    for (int n; (n = next_chunk(&at, x)) > 0;) {
        tl_exp_f32(x, y, n);
        for (int i = 0; i < n; i++) {
            const long double want = expl(x[i]);
            if (want < 0x1p-126L || x[i] > TL_EXPF_OVERFLOW)
                continue;
            const double off = ulps_off(y[i], want);
            n_checked++;
            if (off > worst) {
                worst = off;
                worst_x = x[i];
            }
        }
    }
    CHECK(worst <= TL_EXPF_MAX_ULP, "%.4f ulp at %a (%08x)", worst, (double)worst_x,
          float_bits(worst_x));
    CHECK(n_checked > 2200000, "only %lld inputs", (long long)n_checked);
}

TEST(exp_never_falls_by_more_than_an_ulp)
{
    float x[EXP_CHUNK], y[EXP_CHUNK], before = 0;
    int64_t at = 0;
    for (int n; (n = next_chunk(&at, x)) > 0;) {
        tl_exp_f32(x, y, n);
        for (int i = 0; i < n; before = y[i++])
            CHECK(float_bits(y[i]) + 1 >= float_bits(before), "exp(%a) = %a comes after %a",
                  (double)x[i], (double)y[i], (double)before);
    }
    for (uint32_t bits = 0x3E000000; bits < 0x3E010000; bits++) /* neighbours: 1/8 and up */
        CHECK(float_bits(tl_expf(float_of(bits + 1))) + 1 >= float_bits(tl_expf(float_of(bits))),
              "after %08x", bits);
}

TEST(exp_is_the_stated_arithmetic_on_every_instruction_set)
{
    float x[EXP_CHUNK], y[EXP_CHUNK];
    FOR_EACH_ISA(k) {
        int64_t at = 0;
        for (int n; (n = next_chunk(&at, x)) > 0;) {
            tl_exp_f32(x, y, n);
            for (int i = 0; i < n; i++)
                CHECK_BITS(y[i], ref_expf(x[i]), "%s, exp of %08x", k->name, float_bits(x[i]));
        }
        uint64_t rng = 5;
        for (int i = 0; i < 200000; i++) {
            const float any = float_of((uint32_t)(rng_next(&rng) >> 32));
            CHECK_BITS(tl_expf(any), ref_expf(any), "%s, exp of %08x", k->name, float_bits(any));
        }
    }
}

/* A digest (FNV-1a over words, low byte first) of the bits that numerics version 1 stands for. It
 * was worked out by a program of its own; when it no longer holds, tl_numerics_version() has to
 * change. */
static uint64_t digest(uint64_t h, float y)
{
    for (int i = 0; i < 4; i++)
        h = (h ^ (float_bits(y) >> 8 * i & 0xFF)) * 0x100000001B3u;
    return h;
}
#define DIGEST_START 0xCBF29CE484222325u

TEST(exp_bits_are_those_of_this_numerics_version)
{
    float x[EXP_CHUNK], y[EXP_CHUNK];
    FOR_EACH_ISA(k) {
        uint64_t h = DIGEST_START;
        int64_t at = 0;
        for (int n; (n = next_chunk(&at, x)) > 0;) {
            tl_exp_f32(x, y, n);
            for (int i = 0; i < n; i++)
                h = digest(h, y[i]);
        }
        CHECK(h == 0xBE75B39A09466255u && tl_numerics_version() == 2, "%s: %016llx", k->name,
              (unsigned long long)h);
    }
}

/* ---- log, which has no public name ---- */

TEST(log_edges)
{
    CHECK_BITS(canon_log(1.0f), 0.0f, "log 1");
    CHECK_BITS(canon_log(0.0f), -INFINITY, "log 0");
    CHECK_BITS(canon_log(-0.0f), -INFINITY, "log -0");
    CHECK_BITS(canon_log(INFINITY), INFINITY, "log inf");
    CHECK_BITS(canon_log(-1.0f), float_of(TL_NAN_BITS), "log -1");
    CHECK_BITS(canon_log(-INFINITY), float_of(TL_NAN_BITS), "log -inf");
    CHECK_BITS(canon_log(float_of(0xFFC00001)), float_of(TL_NAN_BITS), "log NaN");
    CHECK_BITS(canon_log(8.0f), 2.0794415f, "log 8"); /* 2.07944154167983592825 */
    CHECK_BITS(canon_log(2.0f), 0.6931472f, "log 2"); /* 0.69314718055994530942 */
}

TEST(log_is_the_stated_arithmetic_and_within_its_bound)
{
    double worst = 0;
    uint64_t h = DIGEST_START;
    for (uint32_t bits = 0x00800000; bits < 0x7F800000; bits += 1499) {
        const float x = float_of(bits), y = canon_log(x);
        CHECK_BITS(y, ref_logf(x), "log of %08x", bits);
        h = digest(h, y);
        if (bits != 0x3F800000)
            worst = fmax(worst, ulps_off(y, logl(x)));
    }
    CHECK(worst <= 1.0, "%.4f ulp", worst);
    CHECK(h == 0x2DB94E35DDC47FD3u, "%016llx", (unsigned long long)h); /* numerics version 1 */
}

/* ---- fma without an instruction for it ---- */

static float hostile_float(uint64_t *rng)
{
    static const uint32_t special[] = {
        0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x00800000,
        0x3F800000, 0xBF800000, 0x3F800001, 0x3F7FFFFF, 0x7F7FFFFF, 0xFF7FFFFF,
        0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC12345, 0x7F800001, 0x33800000,
        0x477FF000, 0x43E80000, 0x42B17218, 0xC2AEAC50, 0xC2D00000, 0x4B400000,
    };
    switch (rng_below(rng, 4)) {
    case 0:
        return float_of(special[rng_below(rng, sizeof special / sizeof *special)]);
    case 1:
        return float_of((uint32_t)(rng_next(rng) >> 32));
    default:
        return ldexpf(rng_unit(rng), (int)rng_below(rng, 40) - 24);
    }
}

/* The product lands within a few ulp of c's last place or far below it, where a double rounding
 * would show. */
static float near_tie(uint64_t *rng, float a, float b)
{
    const double product = (double)a * b;
    switch (rng_below(rng, 4)) {
    case 0:
        return -(float)product;
    case 1:
        return (float)ldexp(product, 24);
    case 2:
        return (float)ldexp(rng_unit(rng), ilogb(product) + 20 + (int)rng_below(rng, 10));
    default:
        return ldexpf(rng_unit(rng) < 0 ? -1 : 1, ilogb(product) - (int)rng_below(rng, 60) + 4);
    }
}

static void check_fma(float a, float b, float c)
{
    const float got = f32_fma(a, b, c), want = fmaf(a, b, c);
    if (!isnan(got) || !isnan(want))
        CHECK_BITS(got, want, "fma(%a, %a, %a)", (double)a, (double)b, (double)c);
}

TEST(emulated_fma_rounds_once)
{
    /* just above a tie that an f64 sum can just not see */
    check_fma(0x1.000002p0f, 0x1.000002p-25f, 1.0f);
    check_fma(0x1p-12f, 0x1p-12f, 1.0f);
    check_fma(0x1p-12f, 0x1.8p-11f, -0x1.fffffep0f);
    check_fma(0x1.fffffep127f, 0x1.fffffep127f, -INFINITY);
    check_fma(0x1p-149f, 0x1p-149f, 0x1p-149f);
    check_fma(-0x1p-149f, 0x1p-1f, 0x1p-126f);
    uint64_t rng = 21;
    for (int i = 0; i < 1500000; i++)
        check_fma(hostile_float(&rng), hostile_float(&rng), hostile_float(&rng));
    for (int i = 0; i < 1500000; i++) {
        const float a = rng_unit(&rng), b = rng_unit(&rng);
        if (a != 0 && b != 0)
            check_fma(a, b, near_tie(&rng, a, b));
    }
    /* subnormal results, and products of few bits that make exact ties */
    for (int i = 0; i < 500000; i++) {
        const float a = ldexpf((float)rng_below(&rng, 64), -70),
                    b = ldexpf((float)rng_below(&rng, 64) + 0.5f, -76);
        check_fma(a, b, float_of((uint32_t)rng_below(&rng, 0x1000000)));
        check_fma(a, ldexpf(b, 82),
                  -ldexpf(1 + (float)rng_below(&rng, 0x800000) * 0x1p-23f,
                          (int)rng_below(&rng, 30) - 50));
    }
}

/* ---- arrays ---- */

/* One conversion, or exp: its array form and its single form, the sizes of what goes in and comes
 * out. */
struct array_form {
    const char *name;
    size_t in, out;
    void (*run)(const void *x, void *y, int64_t n);
    void (*one)(const void *x, void *y);
};

#define FORMS(X)                                    \
    X(tl_f32_to_f16_n, tl_f32_to_f16, float, uint16_t)   \
    X(tl_f16_to_f32_n, tl_f16_to_f32, uint16_t, float)   \
    X(tl_f32_to_bf16_n, tl_f32_to_bf16, float, uint16_t) \
    X(tl_bf16_to_f32_n, tl_bf16_to_f32, uint16_t, float) \
    X(tl_f32_to_e4m3_n, tl_f32_to_e4m3, float, uint8_t)  \
    X(tl_e4m3_to_f32_n, tl_e4m3_to_f32, uint8_t, float)  \
    X(tl_f32_to_e5m2_n, tl_f32_to_e5m2, float, uint8_t)  \
    X(tl_e5m2_to_f32_n, tl_e5m2_to_f32, uint8_t, float)  \
    X(tl_exp_f32, tl_expf, float, float)

#define DEFINE_FORM(many, single, from, to)                   \
    static void run_##many(const void *x, void *y, int64_t n) \
    {                                                         \
        many(x, y, n);                                        \
    }                                                         \
    static void one_##many(const void *x, void *y)            \
    {                                                         \
        from a;                                               \
        memcpy(&a, x, sizeof a);                              \
        const to b = single(a);                               \
        memcpy(y, &b, sizeof b);                              \
    }
FORMS(DEFINE_FORM)

#define LIST_FORM(many, single, from, to) {#many, sizeof(from), sizeof(to), run_##many, one_##many},
static const struct array_form forms[] = {FORMS(LIST_FORM)};
#define FOR_EACH_FORM(f) \
    for (const struct array_form *f = forms; f < forms + sizeof forms / sizeof *forms; f++)

enum { MOST = 67, SHIFTS = 16 };

static void fill_input(const struct array_form *f, void *x, int64_t n, uint64_t *rng)
{
    for (int64_t i = 0; i < n; i++) {
        const uint64_t word = rng_next(rng);
        const float value = hostile_float(rng);
        memcpy((char *)x + (size_t)i * f->in, f->in == sizeof value ? (const void *)&value : &word,
               f->in);
    }
}

/* What the single form makes of each element. */
static void expect(const struct array_form *f, const void *x, void *want, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        f->one((const char *)x + (size_t)i * f->in, (char *)want + (size_t)i * f->out);
}

TEST(arrays_give_the_single_bits_at_every_length_and_offset)
{
    enum { SPAN = MOST + 2 * SHIFTS };
    float x[SPAN], y[SPAN], want[SPAN];
    uint64_t rng = 31;
    FOR_EACH_ISA(k)
        FOR_EACH_FORM(f)
            for (int n = 0; n <= MOST; n++)
                for (int shift = 0; shift < SHIFTS; shift++) {
                    const size_t size = f->out, total = SPAN * size, at = (size_t)shift * size;
                    char *in = (char *)x + (size_t)(SHIFTS - 1 - shift) * f->in;
                    fill_input(f, in, n, &rng);
                    memset(y, 0xA5, total);
                    memset(want, 0xA5, total);
                    expect(f, in, (char *)want + at, n);
                    f->run(in, (char *)y + at, n);
                    CHECK(memcmp(y, want, total) == 0, "%s %s, n = %d, shifted by %d", k->name,
                          f->name, n, shift);
                }
}

TEST(arrays_touch_nothing_past_n)
{
    uint64_t rng = 41;
    FOR_EACH_FORM(f) {
        char *x = guarded(MOST * f->in), *y = guarded(MOST * f->out), want[MOST * sizeof(float)];
        FOR_EACH_ISA(k)
            for (int n = 0; n <= MOST; n++) {
                char *in = x + (size_t)(MOST - n) * f->in, *out = y + (size_t)(MOST - n) * f->out;
                fill_input(f, in, n, &rng);
                expect(f, in, want, n);
                f->run(in, out, n);
                CHECK(memcmp(out, want, (size_t)n * f->out) == 0, "%s %s, n = %d", k->name, f->name,
                      n);
            }
        guarded_free(x, MOST * f->in);
        guarded_free(y, MOST * f->out);
    }
}

TEST(every_code_and_its_neighbours_on_every_instruction_set)
{
    enum { CODES = 65536 };
    static uint16_t code[CODES], back[CODES];
    static float wide[CODES];
    for (int i = 0; i < CODES; i++)
        code[i] = (uint16_t)i;
    FOR_EACH_ISA(k) {
        tl_f16_to_f32_n(code, wide, CODES);
        for (int i = 0; i < CODES; i++)
            CHECK_BITS(wide[i], tl_f16_to_f32(code[i]), "%s, f16 %04x", k->name, i);
        for (int d = -1; d <= 1; d++) { /* ties between codes, and the floats around them */
            for (int i = 0; i < CODES; i++)
                wide[i] = float_of(float_bits(tl_f16_to_f32(code[i])) + 0x1000 + (uint32_t)d);
            tl_f32_to_f16_n(wide, back, CODES);
            for (int i = 0; i < CODES; i++)
                CHECK(back[i] == tl_f32_to_f16(wide[i]), "%s, f16 of %08x is %04x", k->name,
                      float_bits(wide[i]), back[i]);
        }
    }
}

/* Upper halves of every kind, so that a code of any narrow format, every tie between two and the
 * floats beside it are there. */
TEST(arrays_round_as_single_floats_do_around_every_tie)
{
    enum { UPPER = 65536 };
    static const uint32_t lower[] = {0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF};
    static float x[UPPER];
    static uint16_t got[UPPER], want[UPPER];
    for (size_t l = 0; l < sizeof lower / sizeof lower[0]; l++) {
        for (uint32_t i = 0; i < UPPER; i++)
            x[i] = float_of(i << 16 | lower[l]);
        FOR_EACH_FORM(f) {
            if (f->in != sizeof(float) || f->out == sizeof(float))
                continue;
            expect(f, x, want, UPPER);
            FOR_EACH_ISA(k) {
                f->run(x, got, UPPER);
                CHECK(memcmp(got, want, UPPER * f->out) == 0, "%s %s, lower half %04x", k->name,
                      f->name, lower[l]);
            }
        }
    }
}

TEST(long_arrays_give_the_single_bits)
{
    enum { LONG = 1100 };
    static const int64_t lengths[] = {255, 256, 257, 271,  272,  273,
                                      511, 512, 513, 1023, 1025, LONG};
    static float x[LONG], got[LONG + 1], want[LONG + 1];
    uint64_t rng = 51;
    FOR_EACH_ISA(k)
        FOR_EACH_FORM(f)
            for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
                fill_input(f, x, lengths[i], &rng);
                memset(got, 0xA5, sizeof got);
                memset(want, 0xA5, sizeof want);
                expect(f, x, want, lengths[i]);
                f->run(x, got, lengths[i]);
                CHECK(memcmp(got, want, sizeof got) == 0, "%s %s, n = %d", k->name, f->name,
                      (int)lengths[i]);
            }
}

TEST(exp_in_place)
{
    float x[MOST], y[MOST];
    uint64_t rng = 51;
    FOR_EACH_ISA(k)
        for (int n = 0; n <= MOST; n++) {
            for (int i = 0; i < n; i++)
                x[i] = hostile_float(&rng);
            tl_exp_f32(x, y, n);
            tl_exp_f32(x, x, n);
            CHECK(memcmp(x, y, (size_t)n * sizeof *x) == 0, "%s, n = %d", k->name, n);
        }
}

/* ---- arguments ---- */

static void check_refused(const struct array_form *f, const void *x, void *y, int64_t n,
                          const char *because)
{
    tl_set_last_error("");
    f->run(x, y, n);
    const size_t prefix = strlen(f->name);
    CHECK(strncmp(tl_last_error(), f->name, prefix) == 0 && tl_last_error()[prefix] == ':' &&
              strstr(tl_last_error(), because),
          "%s: want \"%s\" in \"%s\"", f->name, because, tl_last_error());
}

TEST(bad_arguments_write_nothing_and_set_the_slot)
{
    const float x[2] = {1, 2};
    float y[2], paint[2];
    memset(paint, 0xA5, sizeof paint);
    FOR_EACH_FORM(f) {
        memcpy(y, paint, sizeof y);
        check_refused(f, x, y, -1, "-1");
        check_refused(f, x, y, INT64_MIN, "-9223372036854775808");
        check_refused(f, NULL, y, 2, "x is NULL");
        check_refused(f, x, NULL, 2, "y is NULL");
        check_refused(f, NULL, NULL, 1, "NULL");
        CHECK(memcmp(y, paint, sizeof y) == 0, "%s wrote", f->name);
    }
}

TEST(no_elements_is_no_error)
{
    FOR_EACH_FORM(f) {
        tl_set_last_error("earlier");
        f->run(NULL, NULL, 0);
        CHECK(strcmp(tl_last_error(), "earlier") == 0, "%s: \"%s\"", f->name, tl_last_error());
    }
}

TEST(an_unknown_instruction_set_runs_scalar)
{
    const float x[3] = {1, -1, 10};
    float y[3];
    tl_kernels_select("nonesuch");
    tl_exp_f32(x, y, 3);
    const struct tl_kernels *used = tl_kernels();
    tl_kernels_select(NULL);
    CHECK(strcmp(used->name, "scalar") == 0, "%s", used->name);
    CHECK_BITS(y[2], 22026.465f, "exp 10");
}

/* ---- the caller's float mode ---- */

enum { MODE_INPUTS = 48 };

struct mode_results {
    float in[MODE_INPUTS], single[9][MODE_INPUTS], array[9][MODE_INPUTS];
};

/* No arithmetic of the test's own in here: it would run in the caller's mode. */
__attribute__((noinline)) static void run_everything(struct mode_results *r)
{
    for (int i = 0; i < 9; i++) {
        expect(&forms[i], r->in, r->single[i], MODE_INPUTS);
        forms[i].run(r->in, r->array[i], MODE_INPUTS - 1);
    }
}

TEST(the_callers_float_mode_neither_matters_nor_changes)
{
    static struct mode_results plain, hostile;
    uint64_t rng = 61;
    const unsigned before = get_float_mode();
    FOR_EACH_ISA(k)
        for (int i = 0; i < N_FLOAT_MODES; i++) {
            memset(&plain, 0, sizeof plain);
            for (int j = 0; j < MODE_INPUTS; j++)
                plain.in[j] = hostile_float(&rng);
            hostile = plain;
            run_everything(&plain);
            set_float_mode(hostile_float_mode(i));
            const unsigned entered = get_float_mode();
            run_everything(&hostile);
            const unsigned left = get_float_mode();
            set_float_mode(before);
            CHECK(left == entered, "%s, mode %08x came back as %08x", k->name, entered, left);
            CHECK(memcmp(&plain, &hostile, sizeof plain) == 0, "%s, other bits in mode %08x",
                  k->name, entered);
        }
}

CHECK_MAIN()
