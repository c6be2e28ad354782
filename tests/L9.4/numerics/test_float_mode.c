/* SPDX-License-Identifier: MIT */
/* test_float_mode.c: whatever floating-point mode the caller is in (rounding, flush-to-zero,
 * unmasked traps, sticky flags), the bits are the same and the mode is given back exactly.
 *
 * Words. mode: the value of the unit's control register, its sticky flags included (MXCSR on x86;
 * FPCR and FPSR on Arm). */
#include "attn_ref.h"
#include "runtime/fail.h"

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
    0x1F80u & ~0x0080u, 0x1F80u & ~0x0100u, 0x1F80u & ~0x0200u, /* one trap each */
    0x1F80u & ~0x0400u, 0x1F80u & ~0x0800u,
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

/* ---- every function that computes ---- */

enum { N_X = 300, WORLD_OUT = 1 << 14 /* floats */, TOTAL_Q = 3, SPLITS = 2 };

/* What the calls read, made in the default mode, and where they write. Every option of the general
 * call is on; scalars are subnormal where a call takes them as they are. */
struct world {
    struct paged c;
    tl_kv_view view, fresh_view;
    tl_pool *tp;
    tl_paged_attn_args args;
    int32_t cu[3];
    float slopes[4], sinks[4], *q, *kv, *states, *workspace;
    tl_kv_pool *fresh; /* four blocks to append to */
    uint32_t table[4];
    int64_t slots[8];
    float f32[N_X];
    uint16_t u16[N_X];
    uint8_t u8[N_X];
    float *out; /* [WORLD_OUT] */
};

static void fill_inputs(struct world *w)
{
    static const uint32_t special[] = {0,          0x80000000, 1,          0x807FFFFF, 0x7F7FFFFF,
                                       0x7F800000, 0xFF800000, 0x7F800001, 0xFFC00000, 0x33000001,
                                       0x477FF000, 0x3F800001, 0x42B17218, 0xC2AEAC50, 0x38000001};
    uint64_t rng = 3;
    for (int i = 0; i < N_X; i++) {
        w->f32[i] = i % 2 ? 20 * rng_unit(&rng) : float_of(special[(size_t)i / 2 % 15]);
        w->u16[i] = (uint16_t)rng_next(&rng);
        w->u8[i] = (uint8_t)rng_next(&rng);
    }
    for (int i = 0; i < 4; i++)
        w->slopes[i] = 0x1.3p-4f * (float)(i + 1), w->sinks[i] = i % 2 ? 0x1p-140f : -0.3f;
    for (int i = 0; i < 8; i++)
        w->slots[i] = 8 * (i % 4) + 7 - i;
}

static float *tiny_floats(int64_t n, float scale, uint64_t seed)
{
    float *x = floats(n);
    for (int64_t i = 0; i < n; i++)
        x[i] = rng_unit(&seed) * (i % 3 ? scale : 0x1p-130f);
    return x;
}

static void world_args(struct world *w)
{
    const struct paged *c = &w->c;
    const int64_t row = c->H * c->D;
    w->cu[0] = 0, w->cu[1] = 1, w->cu[2] = TOTAL_Q;
    w->args = (tl_paged_attn_args){.size = sizeof w->args,
                                   .view = &w->view,
                                   .q = w->q,
                                   .out = w->out,
                                   .lse = w->out + TOTAL_Q * row,
                                   .q_token_stride = row,
                                   .q_head_stride = c->D,
                                   .out_token_stride = row,
                                   .out_head_stride = c->D,
                                   .B = c->B,
                                   .H = c->H,
                                   .cu_seqlens_q = w->cu,
                                   .ctx_lens = c->ctx,
                                   .block_tables = c->tables,
                                   .table_stride = c->max_blocks,
                                   .window = 1039,
                                   .alibi_slopes = w->slopes,
                                   .sink_logits = w->sinks,
                                   .scale = 0.3f,
                                   .logits_softcap = 2.5f,
                                   .tp = w->tp};
    w->args.workspace_bytes = tl_paged_attn_workspace(&w->args);
    w->workspace = must_alloc(w->args.workspace_bytes + 64);
    w->args.workspace = w->args.workspace_bytes ? w->workspace : NULL;
}

static struct world world_make(tl_pool *tp)
{
    struct world w = {.c = a_case(DATA_TINY), .tp = tp, .out = painted(WORLD_OUT)};
    const tl_kv_cfg fresh = kv_cfg(4, 8, 1, 2, 19);
    fill_inputs(&w);
    w.q = tiny_floats(TOTAL_Q * w.c.H * w.c.D, 1, 4);
    w.kv = tiny_floats(2 * 1030 * 19, 2, 5);
    w.states = floats(TOTAL_Q * w.c.H * SPLITS * (2 + w.c.D));
    w.fresh = make_pool(&fresh);
    CHECK_STATUS(tl_kv_alloc(w.fresh, 4, w.table), TL_OK);
    w.view.size = w.fresh_view.size = sizeof w.view;
    CHECK_STATUS(tl_kv_pool_view(w.c.kv, w.c.layer, &w.view), TL_OK);
    CHECK_STATUS(tl_kv_pool_view(w.fresh, 0, &w.fresh_view), TL_OK);
    return w;
}

/* In place: it points into itself. */
static void world_settle(struct world *w)
{
    tl_paged_attn_args args;
    world_args(w);
    args = w->args;
    CHECK_STATUS(tl_paged_attn_states_f32(&args, 0, SPLITS, w->states), TL_OK);
}

static void world_free(struct world *w)
{
    tl_kv_pool_destroy(w->fresh);
    paged_free(&w->c);
    painted_free(w->out, WORLD_OUT);
    free(w->q), free(w->kv), free(w->states), free(w->workspace);
}

static tl_status do_decode(struct world *w)
{
    const struct paged *c = &w->c;
    return tl_paged_attn_decode_f32(c->q, c->kv, c->layer, c->tables, c->max_blocks, c->ctx, w->out,
                                    c->B, c->H, c->Hkv, c->D, c->scale, c->window, w->tp);
}

static tl_status do_general(struct world *w)
{
    return tl_paged_attn_f32(&w->args);
}

static tl_status do_general_with_subnormal_scalars(struct world *w)
{
    tl_paged_attn_args args = w->args;
    args.scale = 0x1p-130f, args.logits_softcap = 0x1p-127f;
    return tl_paged_attn_f32(&args);
}

static tl_status do_states(struct world *w)
{
    return tl_paged_attn_states_f32(&w->args, 0, SPLITS, w->out);
}

static tl_status do_workspace(struct world *w)
{
    return tl_paged_attn_workspace(&w->args) == w->args.workspace_bytes ? TL_OK : TL_EIO;
}

static tl_status do_merge(struct world *w)
{
    const tl_attn_part part = {.states = w->states, .n_splits = SPLITS};
    return tl_attn_merge_f32(&part, 1, TOTAL_Q * w->c.H, w->c.H, w->c.D, w->sinks, w->out,
                             w->out + TOTAL_Q * w->c.H * w->c.D, w->tp);
}

static tl_status do_prefill(struct world *w)
{
    const struct flash f = {.q = w->q, .k = w->kv, .v = w->kv, .o = w->out,
                            .lse = w->out + 4 * 3 * 19, .B = 1, .H = 4, .Hkv = 2, .Tq = 3,
                            .Tk = 1030, .D = 19, .scale = 0.7f, .q_offset = 1027, .causal = 1,
                            .sinks = w->sinks, .tp = w->tp};
    return flash_call(&f);
}

static tl_status do_read(struct world *w)
{
    uint64_t word;
    const tl_status got = tl_kv_read(&w->view, w->c.tables, w->c.max_blocks, w->c.ctx, w->c.B, 0,
                                     w->tp, &word);
    memcpy(w->out, &word, sizeof word);
    return got;
}

static tl_status do_softmax(struct world *w)
{
    return tl_softmax_f32(w->f32, w->out, 3, N_X / 3);
}

static tl_status do_softmax_online(struct world *w)
{
    return tl_softmax_online_f32(w->f32, w->out, 3, N_X / 3);
}

static void copy_fresh(struct world *w)
{
    memcpy(w->out, tl_kv_block_ptr(w->fresh, 0, 0, 0), 4 * tl_kv_block_bytes(w->fresh));
}

static tl_status do_append(struct world *w)
{
    const tl_status got =
        tl_kv_append_f32(w->fresh, 0, w->table, 4, 3, 5, w->f32, w->f32 + 60, 95, 19);
    copy_fresh(w);
    return got;
}

/* A batch into a pool of a format, from f32 and from bf16, read back. Pools are made and counted in
 * the caller's mode, too. */
static tl_status append_and_gather(struct world *w, tl_dtype dtype, uint32_t format, float *out)
{
    static const int32_t cu[] = {0, 5}, ctx[] = {8};
    const tl_kv_cfg cfg = {4, 8, 1, 2, 19, dtype, format};
    tl_kv_pool *kv;
    uint32_t ids[4];
    TL_TRY(tl_kv_pool_create(&cfg, &kv));
    tl_status got = tl_kv_alloc(kv, 4, ids);
    for (int i = 0; i < 2 && got == TL_OK; i++) {
        const void *x = i ? (const void *)w->u16 : w->f32;
        got = tl_kv_append(kv, 0, ids + 2 * i, 2, cu, ctx, 1, x, x, i ? TL_BF16 : TL_F32, 38, 19,
                           19, 38, w->tp);
        if (got == TL_OK)
            got = tl_kv_gather_f32(kv, 0, ids + 2 * i, 2, 3, 5, out, out + 190, 95, 19);
        out += 380;
    }
    tl_kv_pool_destroy(kv);
    return got;
}

static tl_status do_formats(struct world *w)
{
    static const tl_dtype dtypes[] = {TL_F16, TL_F8_E4M3, TL_I8, TL_BF16, TL_F32};
    for (uint32_t i = 0; i < 5; i++)
        TL_TRY(append_and_gather(w, dtypes[i], i + 1, w->out + i * 760));
    return TL_OK;
}

static tl_status do_store_i8(struct world *w)
{
    tl_store_i8_f32(w->f32, (int8_t *)(void *)(w->out + 100), w->out, N_X / 10, 10);
    return TL_OK;
}

static tl_status do_store_e4m3(struct world *w)
{
    tl_store_e4m3_f32(w->f32, (uint8_t *)(void *)(w->out + 100), w->out, N_X / 10, 10);
    return TL_OK;
}

static tl_status do_slots(struct world *w)
{
    const tl_status got = tl_kv_write_slots(&w->fresh_view, w->slots, 7, w->f32, w->f32 + 30,
                                            TL_F32, 38, 19, 38, 19);
    copy_fresh(w);
    return got;
}

/* The same memory as bf16. */
static tl_status do_slots_bf16(struct world *w)
{
    tl_kv_view view = w->fresh_view;
    view.dtype = TL_BF16;
    const tl_status got = tl_kv_write_slots(&view, w->slots, 7, w->f32, w->f32 + 30, TL_F32, 38, 19,
                                            38, 19);
    copy_fresh(w);
    return got;
}

static tl_status do_exp(struct world *w)
{
    tl_exp_f32(w->f32, w->out, N_X);
    return TL_OK;
}

static tl_status do_expf(struct world *w)
{
    for (int i = 0; i < N_X; i++)
        w->out[i] = tl_expf(w->f32[i]);
    return TL_OK;
}

#define CONVERSION(name, input, to)                        \
    static tl_status do_##name##_n(struct world *w)        \
    {                                                      \
        tl_##name##_n(w->input, (to *)(void *)w->out, N_X); \
        return TL_OK;                                      \
    }                                                      \
    static tl_status do_##name(struct world *w)            \
    {                                                      \
        to *y = (to *)(void *)w->out;                      \
        for (int i = 0; i < N_X; i++)                      \
            y[i] = tl_##name(w->input[i]);                 \
        return TL_OK;                                      \
    }

#define CONVERSIONS(X)                                                          \
    X(f32_to_f16, f32, uint16_t) X(f16_to_f32, u16, float) X(f32_to_bf16, f32, uint16_t) \
    X(bf16_to_f32, u16, float) X(f32_to_e4m3, f32, uint8_t) X(e4m3_to_f32, u8, float)    \
    X(f32_to_e5m2, f32, uint8_t) X(e5m2_to_f32, u8, float)

CONVERSIONS(CONVERSION)

static const struct function {
    const char *name;
    tl_status (*call)(struct world *);
    bool works_on_pool;
} functions[] = {
    {"tl_paged_attn_decode_f32", do_decode, true},
    {"tl_paged_attn_f32", do_general, true},
    {"tl_paged_attn_f32, subnormal scalars", do_general_with_subnormal_scalars, true},
    {"tl_paged_attn_states_f32", do_states, true},
    {"tl_paged_attn_workspace", do_workspace, true},
    {"tl_attn_merge_f32", do_merge, true},
    {"tl_flash_attn_fwd_f32", do_prefill, true},
    {"tl_kv_read", do_read, true},
    {"tl_softmax_f32", do_softmax, false},
    {"tl_softmax_online_f32", do_softmax_online, false},
    {"tl_kv_append_f32", do_append, false},
    {"tl_kv_append, tl_kv_gather_f32", do_formats, true},
    {"tl_store_i8_f32", do_store_i8, false},
    {"tl_store_e4m3_f32", do_store_e4m3, false},
    {"tl_kv_write_slots", do_slots, false},
    {"tl_kv_write_slots, bf16", do_slots_bf16, false},
    {"tl_exp_f32", do_exp, false},
    {"tl_expf", do_expf, false},
#define BOTH_WAYS(name, input, to) \
    {"tl_" #name "_n", do_##name##_n, false}, {"tl_" #name, do_##name, false},
    CONVERSIONS(BOTH_WAYS)
#undef BOTH_WAYS
};
enum { N_FUNCTIONS = sizeof functions / sizeof functions[0] };

/* One function in one mode. A trap that goes off comes back as a status that no function has. */
struct trial {
    struct world *w;
    tl_status (*call)(struct world *);
    tl_status got;
};

enum { TRAPPED = 99 };
static sigjmp_buf trap_escape;

static void on_trap(int signal_number)
{
    (void)signal_number;
    siglongjmp(trap_escape, 1);
}

static void call_trial(void *ctx)
{
    struct trial *t = ctx;
    if (sigsetjmp(trap_escape, 1) == 0)
        t->got = t->call(t->w);
    else
        t->got = TRAPPED;
}

/* The bits are those of the default mode, which other tests compare with a reference, on every
 * instruction set; the mode is the caller's again, and no flag is up that was not. */
static void check_function(const struct function *f, struct world *w, const float *want)
{
    for (int m = 0; m < N_MODES; m++) {
        struct trial t = {w, f->call, TL_EIO};
        repaint(w->out, WORLD_OUT);
        const uint64_t kept = as_kept(modes[m]), after = in_mode(modes[m], call_trial, &t);
        CHECK(t.got != TRAPPED, "%s, %s: a trap went off in mode %llx", f->name, tl_isa_name(),
              (unsigned long long)kept);
        CHECK(t.got == TL_OK, "%s, %s, mode %llx: %s", f->name, tl_isa_name(),
              (unsigned long long)kept, tl_status_str(t.got));
        CHECK(after == kept, "%s, %s: mode %llx came back as %llx", f->name, tl_isa_name(),
              (unsigned long long)kept, (unsigned long long)after);
        CHECK_SAME(w->out, want, WORLD_OUT, "%s, %s, mode %llx", f->name, tl_isa_name(),
                   (unsigned long long)kept);
    }
}

static void check_functions(tl_pool *tp)
{
    struct sigaction action = {.sa_handler = on_trap}, before;
    struct world w = world_make(tp);
    float *want = floats(WORLD_OUT);
    world_settle(&w);
    sigaction(SIGFPE, &action, &before);
    for (int i = 0; i < N_FUNCTIONS; i++) {
        if (tp && !functions[i].works_on_pool)
            continue;
        repaint(w.out, WORLD_OUT);
        CHECK_STATUS(functions[i].call(&w), TL_OK);
        memcpy(want, w.out, WORLD_OUT * sizeof *want);
        for (int isa = 0; isa_select(isa); isa++)
            check_function(&functions[i], &w, want);
    }
    sigaction(SIGFPE, &before, NULL);
    free(want);
    world_free(&w);
}

TEST(every_function_in_every_mode)
{
    check_functions(NULL);
}

TEST(every_function_on_workers_in_every_mode)
{
    tl_pool *tp = make_threads(3);
    check_functions(tp);
    tl_pool_destroy(tp);
}

static tl_status refuse_scale(struct world *w)
{
    tl_paged_attn_args args = w->args;
    const uint32_t signalling = 0x7F800001u;
    memcpy(&args.scale, &signalling, sizeof signalling);
    return tl_paged_attn_f32(&args);
}

static tl_status refuse_softcap(struct world *w)
{
    tl_paged_attn_args args = w->args;
    const uint32_t signalling = 0x7F800001u;
    memcpy(&args.logits_softcap, &signalling, sizeof signalling);
    return tl_paged_attn_f32(&args);
}

static tl_status refuse_quiet_softcap(struct world *w)
{
    tl_paged_attn_args args = w->args;
    const uint32_t quiet = 0x7FC00000u;
    memcpy(&args.logits_softcap, &quiet, sizeof quiet);
    return tl_paged_attn_f32(&args);
}

static tl_status refuse_negative_softcap(struct world *w)
{
    tl_paged_attn_args args = w->args;
    args.logits_softcap = -0x1.234568p-127f;
    return tl_paged_attn_f32(&args);
}

static tl_status refuse_states(struct world *w)
{
    return tl_paged_attn_states_f32(&w->args, 0, 0, w->out);
}

static tl_status refuse_merge(struct world *w)
{
    const tl_attn_part part = {.states = w->states, .first_split = 1, .n_splits = 1};
    return tl_attn_merge_f32(&part, 1, TOTAL_Q * w->c.H, w->c.H, w->c.D, w->sinks, w->out, NULL,
                             w->tp);
}

static tl_status refuse_append(struct world *w)
{
    return tl_kv_append_f32(w->fresh, 0, w->table, 4, 30, 5, w->f32, w->f32, 95, 19);
}

static tl_status refuse_batch(struct world *w)
{
    static const int32_t ctx = 40;
    return tl_kv_append(w->fresh, 0, w->table, 4, NULL, &ctx, 1, w->f32, w->f32, TL_F32, 38, 19, 38,
                        19, w->tp);
}

static tl_status refuse_gather(struct world *w)
{
    return tl_kv_gather_f32(w->fresh, 0, w->table, 4, 30, 5, w->out, w->out + 190, 95, 19);
}

static tl_status refuse_store(struct world *w)
{
    tl_store_i8_f32(NULL, (int8_t *)(void *)(w->out + 100), w->out, 3, 10);
    return TL_EINVAL;
}

static tl_status refuse_slots(struct world *w)
{
    const int64_t slot = 32;
    return tl_kv_write_slots(&w->fresh_view, &slot, 1, w->f32, w->f32, TL_F32, 38, 19, 38, 19);
}

static tl_status refuse_array(struct world *w)
{
    tl_f32_to_f16_n(NULL, (uint16_t *)(void *)w->out, 5);
    return TL_EINVAL;
}

/* Scalars that are refused are looked at without a float operation: one on a signalling NaN traps,
 * and so does every comparison by size with a quiet one. */
TEST(refused_calls_of_every_function_in_every_mode)
{
    static const struct function refusals[] = {
        {"a signalling scale", refuse_scale, false},
        {"a signalling softcap", refuse_softcap, false},
        {"a quiet softcap", refuse_quiet_softcap, false},
        {"a negative softcap", refuse_negative_softcap, false},
        {"states", refuse_states, false},
        {"merge", refuse_merge, false},
        {"append", refuse_append, false},
        {"a batch to append", refuse_batch, false},
        {"gather", refuse_gather, false},
        {"rows in eight bits", refuse_store, false},
        {"slots", refuse_slots, false},
        {"an array", refuse_array, false},
    };
    struct sigaction action = {.sa_handler = on_trap}, before;
    struct world w = world_make(NULL);
    world_settle(&w);
    sigaction(SIGFPE, &action, &before);
    for (size_t i = 0; i < sizeof refusals / sizeof refusals[0]; i++)
        for (int m = 0; m < N_MODES; m++) {
            struct trial t = {&w, refusals[i].call, TL_OK};
            repaint(w.out, WORLD_OUT);
            const uint64_t kept = as_kept(modes[m]), after = in_mode(modes[m], call_trial, &t);
            CHECK(t.got != TRAPPED, "%s: a trap went off in mode %llx", refusals[i].name,
                  (unsigned long long)kept);
            CHECK(t.got == TL_EINVAL, "%s: %s", refusals[i].name, tl_status_str(t.got));
            CHECK(after == kept, "%s: mode %llx came back as %llx", refusals[i].name,
                  (unsigned long long)kept, (unsigned long long)after);
            CHECK(all_paint(w.out, WORLD_OUT), "%s: out was written", refusals[i].name);
        }
    sigaction(SIGFPE, &before, NULL);
    world_free(&w);
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
