/* SPDX-License-Identifier: MIT */
/* test_float_mode.c: whatever floating-point mode the caller is in (rounding, flush-to-zero,
 * unmasked traps, sticky flags), the bits are the same and the mode is given back exactly.
 *
 * Words. mode: the value of the unit's control register, its sticky flags included (MXCSR on x86;
 * FPCR and FPSR on Arm). */
#include "attn_ref.h"

#if defined(__x86_64__)

#include <xmmintrin.h>
static uint64_t mode_get(void)
{
    return _mm_getcsr();
}
static void mode_set(uint64_t mode)
{
    _mm_setcsr((unsigned)mode);
}
#define MODE_DEFAULT 0x1F80u
#define MODE_FLAGS 0x3Fu
#define MODE_DOWN 0x3F80u
#define MODE_UP 0x5F80u
#define MODE_ZERO 0x7F80u
#define MODE_FTZ 0x9F80u
#define MODE_DAZ 0x1FC0u
#define MODE_TRAPS 0x0000u
static const uint64_t modes[] = {
    MODE_DEFAULT, MODE_DOWN, MODE_UP, MODE_ZERO, MODE_FTZ, MODE_DAZ, MODE_TRAPS,
    0xFFC0u,      /* FTZ and DAZ, toward zero */
    0x5FC0u,      /* DAZ, upward */
    0xE040u,      /* everything at once, traps unmasked */
    0x1F80u & ~(0x1000u), /* only the inexact trap unmasked: any rounding would fault */
    0x1FBFu,      /* all sticky flags up */
    0xFFFFu & ~0x1F80u, /* traps unmasked under flags that are up, FTZ, DAZ, toward zero */
    0x1F95u,      /* some flags */
};

#elif defined(__aarch64__)

/* FPCR in the upper half, FPSR in the lower. */
static uint64_t mode_get(void)
{
    uint64_t fpcr, fpsr;
    __asm__ volatile("mrs %0, fpcr\n\tmrs %1, fpsr" : "=r"(fpcr), "=r"(fpsr) : : "memory");
    return fpcr << 32 | fpsr;
}
static void mode_set(uint64_t mode)
{
    __asm__ volatile("msr fpcr, %0\n\tmsr fpsr, %1"
                     :
                     : "r"(mode >> 32), "r"(mode & 0xFFFFFFFFu)
                     : "memory");
}
#define MODE_DEFAULT 0
#define MODE_FLAGS 0x9Fu
#define MODE_UP (UINT64_C(1) << 54)
#define MODE_DOWN (UINT64_C(2) << 54)
#define MODE_ZERO (UINT64_C(3) << 54)
#define MODE_FTZ (UINT64_C(1) << 56)
#define MODE_DAZ MODE_FTZ
#define MODE_TRAPS (UINT64_C(0x9F00) << 32) /* where the CPU has no traps these bits read as zero */
static const uint64_t modes[] = {
    MODE_DEFAULT,         MODE_DOWN,  MODE_UP,       MODE_ZERO, MODE_FTZ, MODE_TRAPS,
    MODE_FTZ | MODE_ZERO, MODE_FLAGS, MODE_UP | 0x15};

#else
#error "no control register known here"
#endif

#define N_MODES ((int)(sizeof modes / sizeof *modes))

/* Runs `call` in `mode` and gives the mode found afterwards. Nothing of ours computes in
 * between. */
static uint64_t in_mode(uint64_t mode, void (*call)(void *), void *ctx)
{
    const uint64_t ours = mode_get();
    mode_set(mode);
    call(ctx);
    const uint64_t after = mode_get();
    mode_set(ours);
    return after;
}

/* What the hardware keeps of a mode: bits that it does not have read as zero. */
static uint64_t as_kept(uint64_t mode)
{
    const uint64_t ours = mode_get();
    mode_set(mode);
    const uint64_t kept = mode_get();
    mode_set(ours);
    return kept;
}

/* ---- the calls under test: each writes to `out` ---- */

struct decode {
    struct paged *c;
    tl_pool *tp;
    tl_status got;
};

static void call_decode(void *ctx)
{
    struct decode *d = ctx;
    d->got = paged_call(d->c, d->tp);
}

struct prefill {
    struct flash f;
    tl_status got;
};

static void call_flash(void *ctx)
{
    struct prefill *p = ctx;
    p->got = flash_call(&p->f);
}

struct rows {
    const float *x;
    float *y;
    int64_t n_rows, cols;
    tl_status got;
};

static void call_softmax(void *ctx)
{
    struct rows *r = ctx;
    r->got = tl_softmax_f32(r->x, r->y, r->n_rows, r->cols);
}

static void call_softmax_online(void *ctx)
{
    struct rows *r = ctx;
    r->got = tl_softmax_online_f32(r->x, r->y, r->n_rows, r->cols);
}

static void call_exp(void *ctx)
{
    struct rows *r = ctx;
    tl_exp_f32(r->x, r->y, r->n_rows * r->cols);
    r->got = TL_OK;
    for (int64_t i = 0; i < 8; i++) {
        const float y = tl_expf(r->x[i]);
        if (float_bits(y) != float_bits(r->y[i]))
            r->got = TL_EINVAL;
    }
}

static struct paged a_case(enum data data)
{
    const struct paged_spec spec = {.B = 2,
                                    .H = 4,
                                    .Hkv = 2,
                                    .D = 19,
                                    .block_tokens = 8,
                                    .ctx = {1040, 50},
                                    .data = data,
                                    .scale_given = true,
                                    .scale = data == DATA_TINY ? 0x1p120f : 0.3f,
                                    .seed = 11};
    return paged_make(&spec);
}

/* Guards the guards: in each of these modes the same arithmetic, left in the caller's mode, has
 * other bits. */
static void reference_row(void *ctx)
{
    float m, L, *out = ctx;
    static float q[4] = {0x1.8p-128f, 0x1.234568p-127f, 0x1.cp-127f, 0x1.fp-129f}, k[12], v[12];
    for (int i = 0; i < 12; i++)
        k[i] = 0.1f + (float)i, v[i] = (float)(i + 1) * 0x1.23456p-140f;
    for (int i = 0; i < 4; i++) { /* even columns are ordinary numbers, odd ones subnormal */
        v[i * 3] = 1.0f / (float)(i + 3);
        v[i * 3 + 1] = -1.0f / (float)(i + 7);
    }
    ref_row(&(const struct ref_row){.q = q, .k = k, .v = v, .D = 4, .hi = 2, .scale = 0x1p126f},
            out, &m, &L);
}

TEST(the_modes_matter_to_code_that_does_not_set_its_own)
{
    static const uint64_t sensitive[] = {MODE_DOWN, MODE_UP, MODE_ZERO, MODE_FTZ, MODE_DAZ};
    float want[4], got[4];
    in_mode(MODE_DEFAULT, reference_row, want);
    for (int i = 0; i < 5; i++) {
        in_mode(sensitive[i], reference_row, got);
        CHECK(!same_bits(got, want, 4), "mode %d leaves every bit as it is", i);
    }
}

static void check_decode(enum data data, tl_pool *tp)
{
    struct paged c = a_case(data);
    float *want = paged_want(&c);
    for (int isa = 0; isa_select(isa); isa++)
        for (int m = 0; m < N_MODES; m++) {
            struct decode d = {&c, tp, TL_EIO};
            repaint(c.out, paged_size(&c));
            const uint64_t kept = as_kept(modes[m]), after = in_mode(modes[m], call_decode, &d);
            CHECK(d.got == TL_OK, "%s", tl_status_str(d.got));
            CHECK(after == kept, "%s: mode %llx came back as %llx", tl_isa_name(),
                  (unsigned long long)kept, (unsigned long long)after);
            CHECK_PAGED(&c, want, "%s, mode %llx, data %d", tl_isa_name(),
                        (unsigned long long)modes[m], (int)data);
        }
    free(want);
    paged_free(&c);
}

TEST(decode_in_every_mode)
{
    for (int data = 0; data < N_DATA; data++)
        check_decode((enum data)data, NULL);
}

TEST(decode_on_workers_in_every_mode)
{
    tl_pool *tp = make_threads(3);
    check_decode(DATA_TINY, tp);
    check_decode(DATA_STEEP, tp);
    tl_pool_destroy(tp);
}

TEST(flash_in_every_mode)
{
    enum { H = 4, TQ = 3, TK = 1030, D = 21, N = H * TQ * D, NK = 2 * TK * D };
    uint64_t rng = 5;
    float *q = floats(N), *k = floats(NK), *v = floats(NK), *first = floats(H * TQ);
    const float sinks[H] = {0.1f, -3, 0x1p-140f, 7};
    for (int i = 0; i < N; i++)
        q[i] = rng_unit(&rng) * 0x1p-125f;
    for (int i = 0; i < NK; i++)
        k[i] = rng_unit(&rng), v[i] = i % 3 ? rng_unit(&rng) : rng_unit(&rng) * 0x1p-130f;
    struct prefill p = {.f = {.q = q,
                              .k = k,
                              .v = v,
                              .o = painted(N),
                              .lse = painted(H * TQ),
                              .B = 1,
                              .H = H,
                              .Hkv = 2,
                              .Tq = TQ,
                              .Tk = TK,
                              .D = D,
                              .scale = 0x1p124f,
                              .q_offset = TK - TQ,
                              .causal = 1,
                              .sinks = sinks}};
    for (int isa = 0; isa_select(isa); isa++)
        for (int m = 0; m < N_MODES; m++) {
            repaint(p.f.o, N), repaint(p.f.lse, H * TQ);
            const uint64_t kept = as_kept(modes[m]), after = in_mode(modes[m], call_flash, &p);
            CHECK(p.got == TL_OK && after == kept, "%s, mode %llx came back as %llx",
                  tl_status_str(p.got), (unsigned long long)kept, (unsigned long long)after);
            if (isa == 0 && m == 0)
                memcpy(first, p.f.lse, H * TQ * sizeof *first);
            CHECK_SAME(p.f.lse, first, H * TQ, "%s, mode %llx: lse", tl_isa_name(),
                       (unsigned long long)modes[m]);
            CHECK_FLASH(&p.f, "%s, mode %llx", tl_isa_name(), (unsigned long long)modes[m]);
        }
    painted_free(p.f.o, N), painted_free(p.f.lse, H * TQ);
    free(q), free(k), free(v), free(first);
}

TEST(softmax_and_exp_in_every_mode)
{
    enum { ROWS = 3, COLS = 53, N = ROWS * COLS };
    static void (*const calls[])(void *) = {call_softmax, call_softmax_online, call_exp};
    uint64_t rng = 7;
    float *x = floats(N), *want = floats(N);
    for (int i = 0; i < N; i++)
        x[i] = i % 7 == 0 ? rng_unit(&rng) * 0x1p-140f : 90 * rng_unit(&rng);
    x[5] = x[60] = -INFINITY;
    for (int c = 0; c < 3; c++)
        for (int isa = 0; isa_select(isa); isa++)
            for (int m = 0; m < N_MODES; m++) {
                struct rows r = {x, painted(N), ROWS, COLS, TL_EIO};
                const uint64_t kept = as_kept(modes[m]), after = in_mode(modes[m], calls[c], &r);
                if (isa == 0 && m == 0)
                    memcpy(want, r.y, N * sizeof *want); /* mode 0 is the default */
                CHECK(r.got == TL_OK && after == kept, "call %d: %s, mode %llx came back as %llx",
                      c, tl_status_str(r.got), (unsigned long long)kept, (unsigned long long)after);
                CHECK_SAME(r.y, want, N, "call %d, %s, mode %llx", c, tl_isa_name(),
                           (unsigned long long)modes[m]);
                CHECK(rim_intact(r.y), "call %d wrote the rim", c);
                painted_free(r.y, N);
            }
    free(x), free(want);
}

/* A refused call gives the mode back too, and building its message computes nothing that could
 * trap. */
TEST(the_mode_survives_a_refused_call)
{
    struct paged c = a_case(DATA_PLAIN);
    struct paged bad[4] = {c, c, c, c};
    /* a signalling NaN, never to be touched */
    bad[0].scale = float_of(0x7F800001u), bad[0].q = NULL;
    bad[1].D++;
    bad[2].layer = 7;
    bad[3].out = bad[3].q;
    struct prefill p = {.f = {.B = -1, .scale = float_of(0x7F800001u)}};
    struct rows r = {NULL, c.out, 2, 2, TL_OK};
    for (int m = 0; m < N_MODES; m++) {
        const uint64_t kept = as_kept(modes[m]);
        for (int i = 0; i < 4; i++) {
            struct decode d = {&bad[i], NULL, TL_OK};
            CHECK(in_mode(modes[m], call_decode, &d) == kept && d.got != TL_OK, "decode %d: %s", i,
                  tl_status_str(d.got));
        }
        CHECK(in_mode(modes[m], call_flash, &p) == kept && p.got == TL_EINVAL, "flash: %s",
              tl_status_str(p.got));
        CHECK(in_mode(modes[m], call_softmax, &r) == kept && r.got == TL_EINVAL, "softmax: %s",
              tl_status_str(r.got));
        CHECK(in_mode(modes[m], call_softmax_online, &r) == kept && r.got == TL_EINVAL,
              "online: %s", tl_status_str(r.got));
    }
    CHECK(all_paint(c.out, paged_size(&c)), "out was written");
    paged_free(&c);
}

/* ---- pools ---- */

static void create_pool(void *ctx)
{
    tl_pool_create(4, ctx);
}

TEST(a_pool_made_in_another_mode)
{
    for (int m = 0; m < N_MODES; m++) {
        struct paged c = a_case(m % 2 ? DATA_TINY : DATA_PLAIN);
        float *want = paged_want(&c);
        tl_pool *tp = NULL;
        const uint64_t kept = as_kept(modes[m]), after = in_mode(modes[m], create_pool, &tp);
        CHECK(tp && after == kept, "mode %llx came back as %llx", (unsigned long long)kept,
              (unsigned long long)after);
        for (int repeat = 0; repeat < 3; repeat++) {
            paged_run(&c, tp);
            CHECK_PAGED(&c, want, "creator's mode %llx", (unsigned long long)modes[m]);
        }
        tl_pool_destroy(tp);
        free(want);
        paged_free(&c);
    }
}

/* Ranges that leave their thread in another mode, each noting the one it found. */
struct disturb {
    uint64_t mode, found[32];
    int worker[32];
};

static void disturb_range(void *ctx, int64_t lo, int64_t hi, int worker)
{
    (void)hi;
    struct disturb *d = ctx;
    d->found[lo] = mode_get();
    d->worker[lo] = worker;
    usleep(300); /* so that every worker gets some */
    mode_set(d->mode);
}

TEST(a_range_that_changed_the_mode_of_its_worker)
{
    tl_pool *tp = make_threads(4);
    for (int m = 0; m < N_MODES; m++) {
        struct paged c = a_case(m % 2 ? DATA_TINY : DATA_PLAIN);
        float *want = paged_want(&c);
        struct disturb d = {.mode = modes[m]};
        const uint64_t ours = mode_get();
        tl_parallel_for(tp, 32, 1, disturb_range, &d);
        mode_set(ours); /* what the caller's own ranges did to the caller is the caller's affair */
        paged_run(&c, tp);
        CHECK_PAGED(&c, want, "ranges left mode %llx", (unsigned long long)modes[m]);
        for (int i = 0; i < 32; i++)
            CHECK(d.worker[i] == 0 || (d.found[i] & ~(uint64_t)MODE_FLAGS) == as_kept(MODE_DEFAULT),
                  "range %d on worker %d began in mode %llx", i, d.worker[i],
                  (unsigned long long)d.found[i]);
        free(want);
        paged_free(&c);
    }
    tl_pool_destroy(tp);
}

CHECK_MAIN()
