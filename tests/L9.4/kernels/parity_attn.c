/* SPDX-License-Identifier: MIT */
/* parity_attn.c: every instruction set this CPU has against the reference of attn_ref.h, and so
 * against scalar, bit for
 * bit:
 * decode over a pool, prefill in one call and prefill in chunks. A few thousand shapes chosen so
 * that every tail and every edge is met; PARITY_FULL=1 in the environment runs a far longer sweep
 * of the same tests. */
#include "attn_ref.h"

/* How often a loop over random shapes goes round: more with PARITY_FULL=1. */
static int rounds(int quick, int full)
{
    const char *wanted = getenv("PARITY_FULL");
    return wanted && strcmp(wanted, "1") == 0 ? full : quick;
}

static int64_t pick(const int64_t *from, int64_t n, uint64_t *rng)
{
    return from[rng_below(rng, n)];
}
#define PICK(array, rng) pick(array, sizeof(array) / sizeof *(array), rng)

static const int64_t few_widths[] = {1, 2, 7, 8, 15, 16, 17, 24, 31, 32, 33, 40, 48, 64, 65};
static const int64_t wide_widths[] = {160, 192, 256, 320, 576, 1100};
static const int64_t block_sizes[] = {1,  2,  3,  4,  5,  6,  7,   8,   9,   10,  11,  12, 13, 14,
                                      15, 16, 17, 18, 19, 20, 21,  22,  23,  24,  25,  26, 27, 28,
                                      29, 30, 31, 32, 33, 64, 128, 255, 256, 257, 300, 512};
static const int64_t groups[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 32};
static const int64_t short_lengths[] = {1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 63, 64, 65, 100};
static const int64_t long_lengths[] = {1023, 1024, 1025, 2047, 2048, 2049};
static const int64_t windows[] = {0, 0, 0, 1, 2, 15, 16, 17, 33, 1024, 1025, INT64_MAX};
#define COUNT(array) ((int64_t)(sizeof(array) / sizeof *(array)))

static void describe(char *text, size_t n, const struct paged_spec *s)
{
    snprintf(text, n,
             "H %lld, Hkv %lld, D %lld, blocks of %lld, ctx %lld, window %lld, data %d, scale %a, "
             "seed %llu",
             (long long)s->H, (long long)s->Hkv, (long long)s->D, (long long)s->block_tokens,
             (long long)s->ctx[0], (long long)s->window, (int)s->data, (double)s->scale,
             (unsigned long long)s->seed);
}

/* The last rows of the sequence by prefill: in one call, or in two with the second starting at row
 * `cut`. */
static void prefill(struct flash f, int64_t cut)
{
    if (cut == 0) {
        CHECK_STATUS(flash_call(&f), TL_OK);
        return;
    }
    /* one head at a time, since a chunk's rows are contiguous only within a head */
    for (int part = 0; part < 2; part++) {
        const int64_t from = part ? cut : 0, n = part ? f.Tq - cut : cut;
        for (int64_t h = 0; h < f.H; h++) {
            struct flash one = f;
            const int64_t head = h / (f.H / f.Hkv) * f.Tk * f.D, row = h * f.Tq + from;
            one.H = one.Hkv = 1, one.Tq = n, one.q_offset = f.q_offset + from;
            one.q = f.q + row * f.D, one.k = f.k + head, one.v = f.v + head,
            one.o = f.o + row * f.D, one.lse = f.lse + row;
            CHECK_STATUS(flash_call(&one), TL_OK);
        }
    }
}

/* Prefill of the case's keys: Tq rows, the last of which are the decode's queries. Keys are seen by
 * every row that reaches them, so hidden ones (NaN after a gather) are given values first. */
static void check_prefill(const struct paged *c, int64_t Tq, uint64_t *rng, const char *what)
{
    const int64_t T = c->ctx[0], n = c->H * Tq * c->D, nk = c->Hkv * T * c->D;
    float *q = floats(n), *k = paged_gather(c, 0, 0), *v = paged_gather(c, 0, 1),
          *first_lse = floats(c->H * Tq), *want = floats(n), m, L;
    float *last = floats(c->D);
    const int64_t hidden = ref_first_seen(T - 1, c->window);
    for (int64_t i = 0; i < nk; i++)
        if (i / c->D % T < hidden)
            k[i] = rng_unit(rng), v[i] = rng_unit(rng);
    for (int64_t i = 0; i < n; i++)
        q[i] = rng_unit(rng);
    for (int64_t h = 0; h < c->H; h++)
        memcpy(q + (h * Tq + Tq - 1) * c->D, c->q + h * c->D, (size_t)c->D * sizeof *q);
    struct flash f = {.q = q,
                      .k = k,
                      .v = v,
                      .o = painted(n),
                      .lse = painted(c->H * Tq),
                      .B = 1,
                      .H = c->H,
                      .Hkv = c->Hkv,
                      .Tq = Tq,
                      .Tk = T,
                      .D = c->D,
                      .scale = c->scale,
                      .q_offset = T - Tq,
                      .causal = 1,
                      .window = c->window};
    for (int64_t r = 0; r < c->H * Tq; r++) {
        const struct ref_row row = flash_row(&f, 0, r / Tq, r % Tq);
        ref_row(&row, want + r * c->D, &m, &L);
        /* replaced by the first instruction set's bits once they have been found close */
        first_lse[r] = m + logf(L);
    }
    for (int isa = 0; isa_select(isa); isa++)
        for (int64_t cut = 0; cut < 2 && cut < Tq; cut++) {
            repaint(f.o, n), repaint(f.lse, c->H * Tq);
            prefill(f, cut ? 1 + rng_below(rng, Tq - 1) : 0);
            CHECK_SAME(f.o, want, n, "prefill by %s, Tq %lld, cut %lld: %s", tl_isa_name(),
                       (long long)Tq, (long long)cut, what);
            if (isa == 0 && cut == 0) {
                for (int64_t r = 0; r < c->H * Tq; r++) {
                    const struct ref_row row = flash_row(&f, 0, r / Tq, r % Tq);
                    ref_row(&row, last, &m, &L);
                    CHECK(lse_close(f.lse[r], m, L), "lse %.9g: m %.9g, L %.9g: %s",
                          (double)f.lse[r], (double)m, (double)L, what);
                }
                memcpy(first_lse, f.lse, (size_t)(c->H * Tq) * sizeof *first_lse);
            }
            CHECK_SAME(f.lse, first_lse, c->H * Tq, "lse by %s: %s", tl_isa_name(), what);
            CHECK(rim_intact(f.o) && rim_intact(f.lse), "a rim was written: %s", what);
        }
    painted_free(f.o, n), painted_free(f.lse, c->H * Tq);
    free(q), free(k), free(v), free(first_lse), free(want), free(last);
}

/* One shape: decode on every instruction set, and where Tq > 0 prefill of the last Tq rows. */
static void check_shape(const struct paged_spec *spec, int64_t Tq)
{
    char what[256];
    uint64_t rng = spec->seed + 77;
    struct paged c = paged_make(spec);
    float *want = paged_want(&c);
    describe(what, sizeof what, spec);
    for (int isa = 0; isa_select(isa); isa++) {
        paged_run(&c, NULL);
        CHECK_PAGED(&c, want, "decode by %s: %s", tl_isa_name(), what);
    }
    if (Tq > 0)
        check_prefill(&c, min64(Tq, c.ctx[0]), &rng, what);
    free(want);
    paged_free(&c);
}

/* A random shape around what a test holds fixed: the work of a row set is bounded, scalar being
 * slow. */
static struct paged_spec random_spec(uint64_t seed)
{
    uint64_t rng = seed * 0x9E3779B97F4A7C15u + 9;
    struct paged_spec s = {.B = 1, .seed = seed};
    s.Hkv = 1 + rng_below(&rng, 2);
    s.H = s.Hkv * PICK(groups, &rng);
    s.D = PICK(few_widths, &rng);
    s.block_tokens = PICK(block_sizes, &rng);
    s.window = PICK(windows, &rng);
    s.ctx[0] = PICK(short_lengths, &rng);
    s.data = (enum data)rng_below(&rng, N_DATA);
    s.scale_given = rng_below(&rng, 4) == 0;
    s.scale = s.scale_given ? 2 * rng_unit(&rng) : 0;
    return s;
}

static int64_t work(const struct paged_spec *s)
{
    return s->H * s->D * s->ctx[0];
}

TEST(every_head_width)
{
    for (int round = 0; round < rounds(1, 40); round++) {
        for (int64_t D = 1; D <= 130; D++)
            for (int i = 0; i < 2; i++) {
                struct paged_spec s = random_spec((uint64_t)(1000 * round + 2 * D + i));
                s.D = D;
                s.H = min64(s.H, s.Hkv * 9);
                check_shape(&s, i ? 3 : 0);
            }
        for (int64_t w = 0; w < COUNT(wide_widths); w++)
            for (int64_t g = 1; g <= 9; g += 2) {
                struct paged_spec s = random_spec((uint64_t)(5000 + 1000 * round + 10 * w + g));
                s.D = wide_widths[w], s.Hkv = 1, s.H = g;
                s.ctx[0] = min64(s.ctx[0], 48);
                check_shape(&s, 2);
            }
    }
}

/* Wide rows with more than one split behind them. */
TEST(wide_heads_over_many_splits)
{
    for (int round = 0; round < rounds(1, 6); round++)
        for (int64_t w = 0; w < COUNT(wide_widths); w++) {
            struct paged_spec s = random_spec((uint64_t)(100000 + 100 * round + w));
            s.D = wide_widths[w], s.Hkv = 1, s.H = 1 + (w + round) % 3,
            s.ctx[0] = 1024 + 17 * w + 300 * round;
            check_shape(&s, w % 2);
        }
}

TEST(every_block_size)
{
    for (int round = 0; round < rounds(2, 60); round++)
        for (int64_t b = 0; b < COUNT(block_sizes); b++) {
            struct paged_spec s = random_spec((uint64_t)(200000 + 100 * round + b));
            s.block_tokens = block_sizes[b];
            s.ctx[0] = 1 + (s.ctx[0] * 37 + b) % (2 * s.block_tokens + 70);
            s.H = min64(s.H, s.Hkv * 6);
            check_shape(&s, round % 2);
        }
}

TEST(every_length_around_tiles_and_splits)
{
    for (int round = 0; round < rounds(2, 12); round++) {
        for (int64_t T = 1; T <= 100; T++) {
            struct paged_spec s = random_spec((uint64_t)(300000 + 1000 * round + T));
            s.ctx[0] = T, s.H = min64(s.H, s.Hkv * 9);
            check_shape(&s, T % 3 == 0 ? T : 0);
        }
        for (int64_t t = 0; t < COUNT(long_lengths); t++)
            for (int64_t w = 0; w < COUNT(windows); w += 2 - rounds(0, 1)) {
                struct paged_spec s = random_spec((uint64_t)(400000 + 1000 * round + 20 * t + w));
                s.ctx[0] = long_lengths[t], s.window = windows[w];
                s.D = 1 + (s.D + w) % 40, s.Hkv = 1, s.H = 1 + (t + w) % 5;
                check_shape(&s, w % 2 + 1);
            }
    }
}

TEST(lengths_around_stretches)
{
    static const int64_t lengths[] = {16383, 16384, 16385, 17500, 32768, 32769, 33800};
    for (int round = 0; round < rounds(1, 8); round++)
        for (int64_t t = 0; t < COUNT(lengths); t++) {
            struct paged_spec s = random_spec((uint64_t)(450000 + 1000 * round + t));
            uint64_t rng = s.seed;
            s.ctx[0] = lengths[t] + 300 * round;
            s.window = t % 2 ? 0 : 1 + rng_below(&rng, s.ctx[0]);
            s.D = 1 + s.D % 12, s.Hkv = 1, s.H = 1 + t % 5;
            check_shape(&s, t % 3);
        }
}

TEST(every_group_size)
{
    for (int round = 0; round < rounds(1, 10); round++)
        for (int64_t g = 0; g < COUNT(groups); g++)
            for (int64_t Hkv = 1; Hkv <= 3; Hkv++)
                for (int64_t d = 0; d < COUNT(few_widths); d += 3) {
                    struct paged_spec s =
                        random_spec((uint64_t)(500000 + 10000 * round + 100 * g + 20 * Hkv + d));
                    s.Hkv = Hkv, s.H = Hkv * groups[g],
                    s.D = few_widths[(d + g) % COUNT(few_widths)];
                    check_shape(&s, 1);
                }
}

TEST(random_shapes)
{
    for (int round = 0; round < rounds(500, 32000); round++) {
        struct paged_spec s = random_spec((uint64_t)(1000000 + round));
        if (round % 8 == 0)
            s.ctx[0] = 1 + (round * 131) % 2300;
        while (work(&s) > rounds(200000, 1000000) && s.H > s.Hkv)
            s.H = s.H / s.Hkv / 2 * s.Hkv;
        check_shape(&s, round % 5);
    }
}

/* Sequences, KV heads and layers side by side, with workers: no instruction set takes a neighbour's
 * row. */
TEST(batches_of_everything)
{
    tl_pool *tp = make_threads(3);
    for (int round = 0; round < rounds(20, 300); round++) {
        struct paged_spec s = random_spec((uint64_t)(2000000 + round));
        uint64_t rng = s.seed;
        s.B = 1 + rng_below(&rng, 6), s.n_layers = 3, s.layer = (uint32_t)rng_below(&rng, 3);
        s.H = min64(s.H, s.Hkv * 4), s.D = min64(s.D, 40);
        for (int64_t i = 0; i < s.B; i++)
            s.ctx[i] = 1 + rng_below(&rng, i == 2 ? 1200 : 90);
        struct paged c = paged_make(&s);
        float *want = paged_want(&c);
        for (int isa = 0; isa_select(isa); isa++)
            for (int threads = 0; threads < 2; threads++) {
                paged_run(&c, threads ? tp : NULL);
                CHECK_PAGED(&c, want, "%s, round %d, pool %d", tl_isa_name(), round, threads);
            }
        free(want);
        paged_free(&c);
    }
    tl_pool_destroy(tp);
}

CHECK_MAIN()
