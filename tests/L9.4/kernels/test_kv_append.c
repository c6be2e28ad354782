/* SPDX-License-Identifier: MIT */
/* test_kv_append.c: rounding K and V into the blocks of a sequence: the right places, the right
 * bits, and all or nothing. */
#include <fenv.h>

#include "kernels/kernels.h"
#include "kv_check.h"

/* f16 of x by arithmetic in double: the nearest multiple of the spacing at x, ties to even. */
static uint16_t f16_ref(float x)
{
    const uint16_t sign = signbit(x) ? 0x8000 : 0;
    const double a = fabs((double)x);
    if (isnan(x))
        return 0x7E00;
    if (a >= 65520.0)
        return sign | 0x7C00;
    int e = -14;
    while (e < 15 && a >= ldexp(1.0, e + 1))
        e++;
    const double steps = a / ldexp(1.0, e - 10), whole = floor(steps), rest = steps - whole;
    const uint64_t n = (uint64_t)whole + (rest > 0.5 || (rest == 0.5 && (uint64_t)whole % 2 == 1));
    /* the hidden bit of normal numbers carries into the exponent */
    return (uint16_t)(sign + n + (uint64_t)(e + 14) * 1024);
}

/* Whether f16 has nothing for x: it is NaN, or becomes infinite. */
static int is_lost(float x)
{
    return isnan(x) || (!isinf(x) && fabs((double)x) >= 65520.0);
}

/* A sequence to append to, and where its source elements lie. */
struct source {
    int64_t head_stride, token_stride;
    float *k, *v;  /* element (0, 0, 0) */
};

static uint16_t *slot_of(const tl_kv_pool *kv, unsigned char *bytes, uint32_t id, uint32_t layer,
                         int is_v, uint32_t head, uint32_t slot)
{
    const tl_kv_cfg *c = &kv->cfg;
    const size_t at =
        ((((size_t)id * c->n_layers + layer) * 2 + (size_t)is_v) * c->n_kv_heads + head) *
            c->block_tokens +
        slot;
    return (uint16_t *)(void *)bytes + at * c->head_dim;
}

/* Appends, and compares the whole pool with a picture of it in which only the written positions
 * differ. */
static void append_and_compare(tl_kv_pool *kv, uint32_t layer, const uint32_t *table,
                               int32_t n_table, int64_t pos, int64_t T, const struct source *s)
{
    const tl_kv_cfg *c = &kv->cfg;
    struct kv_snap want = kv_snap(kv);
    for (int64_t t = 0; t < T; t++)
        for (uint32_t h = 0; h < c->n_kv_heads; h++)
            for (uint32_t d = 0; d < c->head_dim; d++) {
                const int64_t at = h * s->head_stride + t * s->token_stride + d;
                const uint32_t id = table[(pos + t) / c->block_tokens],
                               slot = (uint32_t)((pos + t) % c->block_tokens);
                want.stats.unrepresentable += (uint64_t)(is_lost(s->k[at]) + is_lost(s->v[at]));
                slot_of(kv, want.bytes, id, layer, 0, h, slot)[d] = f16_ref(s->k[at]);
                slot_of(kv, want.bytes, id, layer, 1, h, slot)[d] = f16_ref(s->v[at]);
            }
    CHECK_STATUS(tl_kv_append_f32(kv, layer, table, n_table, pos, T, s->k, s->v, s->head_stride,
                                  s->token_stride),
                 TL_OK);
    struct kv_snap got = kv_snap(kv);
    const char *diff = kv_snap_diff(&want, &got);
    kv_snap_free(&want), kv_snap_free(&got);
    CHECK(!diff, "%s differ: layer %u pos %lld T %lld strides %lld %lld", diff, layer,
          (long long)pos, (long long)T, (long long)s->head_stride, (long long)s->token_stride);
}

/* the last one is followed by an unmapped page */
static float *random_floats(size_t n, uint64_t seed)
{
    static const float special[] = {0.0f,          -0.0f,         INFINITY,      -INFINITY,
                                    NAN,           65504.0f,      65519.996f,    65520.0f,
                                    1e30f,         -1e38f,        1e-41f,        5.9604645e-8f,
                                    2.9802322e-8f, 2.9802326e-8f, 6.0975552e-5f, 1.00048828125f};
    float *x = guarded(n * sizeof *x);
    for (size_t i = 0; i < n; i++) {
        const uint64_t r = rng_next(&seed);
        x[i] = r % 5 == 0   ? special[r >> 8 & 15]
               : r % 5 == 1 ? float_of((uint32_t)(r >> 20))
                            : rng_unit(&seed) * 8.0f;
    }
    return x;
}

TEST(values_round_to_nearest_even_and_overflow_to_infinity)
{
    static const struct {
        uint32_t f32;
        uint16_t f16;
    } known[] = {
        {0x33800000, 0x0001}, {0x33000000, 0x0000}, {0x33000001, 0x0001}, {0x33C00000, 0x0002},
        {0x34200000, 0x0002}, {0x387FDFFF, 0x03FF}, {0x387FE000, 0x0400}, {0x3F801000, 0x3C00},
        {0x3F803000, 0x3C02}, {0x477FE000, 0x7BFF}, {0x477FEFFF, 0x7BFF}, {0x477FF000, 0x7C00},
        {0x80000000, 0x8000}, {0xB3800000, 0x8001}, {0x7F800000, 0x7C00}, {0xFF800000, 0xFC00},
        {0x7F800001, 0x7E00}, {0x7FFFFFFF, 0x7E00}, {0xFF800001, 0x7E00}, {0xC77FF000, 0xFC00}};
    enum { N = sizeof known / sizeof known[0] };
    float k[N], v[N];
    tl_kv_pool *kv = kv_new(1, 1, 1, 1, N);
    const uint32_t b = kv_one(kv);
    for (int i = 0; i < N; i++)
        k[i] = float_of(known[i].f32), v[i] = float_of(known[N - 1 - i].f32);
    CHECK_STATUS(tl_kv_append_f32(kv, 0, &b, 1, 0, 1, k, v, N, N), TL_OK);
    const uint16_t *kd = tl_kv_block_ptr(kv, b, 0, 0), *vd = tl_kv_block_ptr(kv, b, 0, 1);
    for (int i = 0; i < N; i++) {
        CHECK(kd[i] == known[i].f16 && f16_ref(k[i]) == known[i].f16, "%08X became %04X",
              known[i].f32, kd[i]);
        CHECK(vd[i] == known[N - 1 - i].f16, "%08X became %04X", known[N - 1 - i].f32, vd[i]);
    }
    tl_kv_pool_destroy(kv);
}

TEST(every_position_lands_in_its_slot_at_any_strides)
{
    static const struct {
        uint32_t b, layers, heads, dim;
    } shapes[] = {{4, 2, 3, 5}, {1, 1, 1, 1}, {16, 1, 2, 64}, {3, 3, 1, 33}};
    uint64_t seed = 31;
    for (int turn = 0; turn < 240; turn++) {
        const int i = turn % 4;
        const int64_t D = shapes[i].dim, H = shapes[i].heads, b = shapes[i].b;
        const int64_t pos = rng_below(&seed, 2 * b + 1), T = 1 + rng_below(&seed, 3 * b);
        tl_kv_pool *kv = kv_new(9, shapes[i].b, shapes[i].layers, shapes[i].heads, shapes[i].dim);
        kv_paint(kv, (uint64_t)turn);
        uint32_t table[9];
        CHECK_STATUS(tl_kv_alloc(kv, 9, table), TL_OK);
        for (int64_t j = 8; j > 0; j--) { /* shuffled */
            const int64_t other = rng_below(&seed, j + 1);
            const uint32_t swap = table[j];
            table[j] = table[other], table[other] = swap;
        }
        struct source s;
        switch (turn / 4 % 5) {
        case 0: s = (struct source){T * D, D, NULL, NULL}; break;               /* [H][T][D] */
        case 1: s = (struct source){D, H * D, NULL, NULL}; break;               /* [T][H][D] */
        case 2: s = (struct source){T * (D + 3) + 7, D + 3, NULL, NULL}; break; /* padded */
        /* one row for all */
        case 3: s = (struct source){0, 0, NULL, NULL}; break;
        default: s = (struct source){-T * D, -D, NULL, NULL}; break;            /* backwards */
        }
        const int64_t reach = (H - 1) * s.head_stride + (T - 1) * s.token_stride,
                      span = (reach < 0 ? -reach : reach) + D;
        float *k = random_floats((size_t)span, seed + 1),
              *v = random_floats((size_t)span, seed + 2);
        s.k = k + (reach < 0 ? -reach : 0), s.v = v + (reach < 0 ? -reach : 0);
        append_and_compare(kv, (uint32_t)(turn % (int)shapes[i].layers), table, 9, pos, T, &s);
        guarded_free(k, (size_t)span * sizeof *k), guarded_free(v, (size_t)span * sizeof *v);
        tl_kv_pool_destroy(kv);
    }
}

TEST(only_the_entries_written_to_are_looked_at)
{
    tl_kv_pool *kv = kv_new(4, 4, 1, 1, 2);
    float x[16] = {1, 2, 3, 4, 5, 6, 7, 8};
    const struct source s = {8, 2, x, x};
    const uint32_t mine = kv_one(kv), shared = kv_one(kv), next = kv_one(kv);
    tl_kv_ref(kv, shared);
    /* no block, no block, not used, shared, the same again */
    const uint32_t other[] = {UINT32_MAX, 4, 3, shared, mine};
    for (int i = 0; i < 5; i++) {
        /* and nothing is read past the last entry written */
        uint32_t *table = guarded(2 * sizeof *table);
        table[0] = other[i], table[1] = mine;
        append_and_compare(kv, 0, table, 2, 4, 4, &s);
        append_and_compare(kv, 0, table, INT32_MAX, 7, 1, &s);
        table[0] = mine, table[1] = other[i];
        append_and_compare(kv, 0, table, 2, 0, 4, &s);
        table[0] = mine, table[1] = next;
        append_and_compare(kv, 0, table, INT32_MAX, 0, 8, &s);
        guarded_free(table, 2 * sizeof *table);
        table = guarded(sizeof *table);
        table[0] = mine;
        append_and_compare(kv, 0, table, 2, 3, 1, &s);
        guarded_free(table, sizeof *table);
    }
    tl_kv_pool_destroy(kv);
}

TEST(writing_leaves_fill_and_counts_to_the_caller)
{
    tl_kv_pool *kv = kv_new(2, 4, 1, 1, 2);
    const float x[8] = {0};
    const uint32_t b = kv_one(kv);
    CHECK_STATUS(tl_kv_set_fill(kv, b, 1), TL_OK);
    tl_set_last_error("as it was");
    CHECK_STATUS(tl_kv_append_f32(kv, 0, &b, 1, 1, 3, x, x, 6, 2), TL_OK);
    CHECK(tl_kv_fill(kv, b) == 1 && tl_kv_refs(kv, b) == 1 &&
              strcmp(tl_last_error(), "as it was") == 0,
          "touched");
    tl_kv_pool_destroy(kv);
}

TEST(no_positions_are_fine)
{
    tl_kv_pool *kv = kv_new(1, 4, 1, 1, 2);
    const float x[2] = {0};
    const uint32_t none = UINT32_MAX;
    tl_set_last_error("as it was");
    CHECK_STATUS(tl_kv_append_f32(kv, 0, &none, 1, 0, 0, x, x, 0, 0), TL_OK);
    /* the end of a full table */
    CHECK_STATUS(tl_kv_append_f32(kv, 0, &none, 1, 4, 0, x, x, 0, 0), TL_OK);
    CHECK_STATUS(tl_kv_append_f32(kv, 0, NULL, 0, 0, 0, NULL, NULL, 0, 0), TL_OK);
    CHECK_STATUS(tl_kv_append_f32(kv, 0, &none, 1, INT64_MAX, 0, x, x, INT64_MIN, INT64_MAX),
                 TL_OK);
    CHECK(strcmp(tl_last_error(), "as it was") == 0, "\"%s\"", tl_last_error());
    CHECK_STATUS(tl_kv_append_f32(kv, 1, &none, 1, 0, 0, x, x, 0, 0), TL_EINVAL);
    CHECK_STATUS(tl_kv_append_f32(kv, 0, &none, 1, -1, 0, x, x, 0, 0), TL_EINVAL);
    tl_kv_pool_destroy(kv);
}

TEST(bad_arguments_are_refused_and_named)
{
    tl_kv_pool *kv = kv_new(3, 4, 2, 2, 2);
    float x[64] = {0};
    uint32_t table[3];
    kv_paint(kv, 1);
    CHECK_STATUS(tl_kv_alloc(kv, 3, table), TL_OK);
    const struct {
        tl_kv_pool *kv;
        uint32_t layer;
        const uint32_t *table;
        int32_t n_table;
        int64_t pos, T;
        const float *k, *v;
        int64_t head_stride, token_stride;
        const char *words;
    } bad[] = {
        {NULL, 0, table, 3, 0, 1, x, x, 2, 2, "pool is NULL"},
        {kv, 0, NULL, 3, 0, 1, x, x, 2, 2, "block_table is NULL"},
        {kv, 0, table, 3, 0, 1, NULL, x, 2, 2, "k is NULL"},
        {kv, 0, table, 3, 0, 1, x, NULL, 2, 2, "v is NULL"},
        {kv, 2, table, 3, 0, 1, x, x, 2, 2, "layer 2"},
        {kv, UINT32_MAX, table, 3, 0, 1, x, x, 2, 2, "layer 4294967295"},
        {kv, 0, table, -1, 0, 1, x, x, 2, 2, "n_table -1"},
        {kv, 0, table, INT32_MIN, 0, 1, x, x, 2, 2, "n_table -2147483648"},
        {kv, 0, table, 3, -1, 1, x, x, 2, 2, "pos -1"},
        {kv, 0, table, 3, INT64_MIN, 1, x, x, 2, 2, "pos -9223372036854775808"},
        {kv, 0, table, 3, 0, -1, x, x, 2, 2, "T -1"},
        {kv, 0, table, 3, INT64_MAX, 1, x, x, 2, 2, "pos 9223372036854775807 + T 1"},
        {kv, 0, table, 3, 1, INT64_MAX, x, x, 2, 2, "INT64_MAX"},
        {kv, 0, table, 3, INT64_MAX - 1, 1, x, x, 2, 2, "n_table is 3"},
        {kv, 0, table, 3, 0, INT64_MAX, x, x, 0, 0, "n_table is 3"},
        {kv, 0, table, 0, 0, 1, x, x, 2, 2, "need 1 table entries of 4 tokens, n_table is 0"},
        {kv, 0, table, 3, 12, 1, x, x, 2, 2, "positions 12 .. 12 need 4 table entries"},
        {kv, 0, table, 2, 7, 2, x, x, 2, 2, "positions 7 .. 8 need 3 table entries"},
        {kv, 0, table, 3, 0, 2, x, x, INT64_MAX, 2, "head_stride 9223372036854775807"},
        {kv, 0, table, 3, 0, 2, x, x, INT64_MIN, 2, "head_stride -9223372036854775808"},
        {kv, 0, table, 3, 0, 3, x, x, 2, INT64_MAX, "token_stride 9223372036854775807"},
        {kv, 0, table, 3, 0, 3, x, x, 2, INT64_MAX / 2, "token_stride 4611686018427387903"},
        {kv, 0, table, 3, 0, 3, x, x, 2, INT64_MIN / 2, "token_stride -4611686018427387904"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        tl_status st = TL_OK;
        CHECK_REFUSED(kv,
                      st = tl_kv_append_f32(bad[i].kv, bad[i].layer, bad[i].table, bad[i].n_table,
                                            bad[i].pos, bad[i].T, bad[i].k, bad[i].v,
                                            bad[i].head_stride, bad[i].token_stride),
                      "tl_kv_append_f32", bad[i].words);
        CHECK(st == TL_EINVAL, "case %zu: %s", i, tl_status_str(st));
    }
    tl_kv_pool_destroy(kv);
}

/* Where K or V lies decides too: this one ends past the last address. */
TEST(keys_or_values_alone_may_leave_the_address_space)
{
    tl_kv_pool *kv = kv_new(1, 4, 1, 1, 2);
    float x[8] = {0}, *const last = (float *)(UINTPTR_MAX - 15);
    const uint32_t own = kv_one(kv);
    CHECK_REFUSED(kv, (void)tl_kv_append_f32(kv, 0, &own, 1, 0, 4, x, last, 8, 2),
                  "tl_kv_append_f32", ": v: head_stride 8, token_stride 2 pass the address space");
    CHECK_REFUSED(kv, (void)tl_kv_append_f32(kv, 0, &own, 1, 0, 4, last, x, 8, 2),
                  "tl_kv_append_f32", ": k: head_stride 8, token_stride 2 pass the address space");
    tl_kv_pool_destroy(kv);
}

TEST(an_unknown_instruction_set_is_refused_with_the_names_that_work)
{
    tl_kv_pool *kv = kv_new(2, 4, 1, 1, 2);
    const float x[8] = {0};
    const uint32_t own = kv_one(kv), none = 7;
    tl_status got[4];
    tl_kernels_select("abacus");
    CHECK_REFUSED(kv, got[0] = tl_kv_append_f32(kv, 0, &own, 1, 0, 1, x, x, 2, 2),
                  "tl_kv_append_f32", "TINYLLM_ISA=abacus is not here; these are: ");
    /* before the table's entries are looked at, after all else */
    CHECK_REFUSED(kv, got[1] = tl_kv_append_f32(kv, 0, &none, 1, 0, 1, x, x, 2, 2),
                  "tl_kv_append_f32", "TINYLLM_ISA=abacus");
    CHECK_REFUSED(kv, got[2] = tl_kv_append_f32(kv, 0, &own, 1, 0, 2, x, x, 2, INT64_MAX),
                  "tl_kv_append_f32", "address space");
    got[3] = tl_kv_append_f32(kv, 0, &own, 1, 0, 0, x, x, 2, 2); /* nothing is to be done */
    tl_kernels_select(NULL);
    tl_kv_pool_destroy(kv);
    CHECK(got[0] == TL_EUNSUPPORTED && got[1] == TL_EUNSUPPORTED && got[2] == TL_EINVAL &&
              got[3] == TL_OK,
          "%d, %d, %d, %d", got[0], got[1], got[2], got[3]);
}

TEST(nothing_is_written_unless_every_block_may_be)
{
    tl_kv_pool *kv = kv_new(8, 2, 1, 1, 2);
    float x[32];
    uint32_t own[4];
    for (int i = 0; i < 32; i++)
        x[i] = (float)i;
    kv_paint(kv, 2);
    CHECK_STATUS(tl_kv_alloc(kv, 4, own), TL_OK);
    const uint32_t named = kv_named(kv, 5), shared = kv_one(kv), cached = kv_named(kv, 6),
                   unused = 7;
    tl_kv_ref(kv, shared);
    CHECK_STATUS(tl_kv_unref(kv, cached), TL_OK);
    const struct {
        uint32_t id;
        tl_status want;
        const char *words;
    } bad[] = {{8, TL_EINVAL, "= 8 is out of range"},
               {UINT32_MAX, TL_EINVAL, "= 4294967295 is out of range"},
               {unused, TL_EINVAL, "= 7 is not used"},
               {cached, TL_EINVAL, "= 6 is not used"},
               {named, TL_EBUSY, "= 4 is registered"},
               {shared, TL_EBUSY, "= 5 has 2 references"},
               {own[3], TL_EINVAL, "are both block 3"}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++)
        for (int at = 0; at < 3; at++) { /* first, in the middle, last */
            uint32_t table[5] = {own[0], own[1], own[2], own[3], own[3]};
            tl_status st = TL_OK;
            char words[64];
            table[at + 1] = bad[i].id;
            if (bad[i].id == own[3])
                table[0] = table[4] = UINT32_MAX, table[3] = own[3],
                table[at == 2 ? 1 : at + 1] = own[3];
            snprintf(words, sizeof words, bad[i].id == own[3] ? "block_table[" : "block_table[%d] ",
                     at + 1);
            CHECK_REFUSED(kv, st = tl_kv_append_f32(kv, 0, table, 5, 3, 5, x, x, 10, 2),
                          "tl_kv_append_f32", words);
            CHECK(st == bad[i].want && strstr(tl_last_error(), bad[i].words), "%s: %s",
                  tl_status_str(st), tl_last_error());
        }
    /* What names no used block decides before what is shared, wherever it stands. */
    const uint32_t both[] = {shared, named, unused};
    tl_status st = TL_OK;
    CHECK_REFUSED(kv, st = tl_kv_append_f32(kv, 0, both, 3, 0, 6, x, x, 12, 2), "tl_kv_append_f32",
                  "block_table[2] = 7");
    CHECK(st == TL_EINVAL, "%s", tl_status_str(st));
    CHECK_REFUSED(kv, st = tl_kv_append_f32(kv, 0, both, 2, 0, 4, x, x, 12, 2), "tl_kv_append_f32",
                  "block_table[0] = 5");
    CHECK(st == TL_EBUSY, "%s", tl_status_str(st));
    tl_kv_pool_destroy(kv);
}

TEST(a_block_named_twice_is_found_among_the_entries_written_only)
{
    enum { N = 40 };
    tl_kv_pool *kv = kv_new(N, 1, 1, 1, 1);
    float x[N];
    uint32_t table[N];
    uint64_t seed = 8;
    int twins = 0;
    for (int i = 0; i < N; i++)
        x[i] = (float)i;
    CHECK_STATUS(tl_kv_alloc(kv, N, table), TL_OK);
    for (int turn = 0; turn < 3000; turn++) {
        const int64_t first = rng_below(&seed, N), T = 1 + rng_below(&seed, N - first);
        for (int i = 0; i < N; i++) /* notes of earlier turns are about other tables */
            table[i] = (uint32_t)((i * 7 + turn) % N);
        for (int64_t i = rng_below(&seed, 3); i > 0; i--)
            table[rng_below(&seed, N)] = (uint32_t)rng_below(&seed, N);
        int twin = 0;
        for (int64_t i = first; i < first + T; i++)
            for (int64_t j = first; j < i; j++)
                twin |= table[i] == table[j];
        twins += twin;
        CHECK_STATUS(tl_kv_append_f32(kv, 0, table, N, first, T, x, x, 0, 1),
                     twin ? TL_EINVAL : TL_OK);
    }
    CHECK(twins > 300 && twins < 2700, "%d of 3000", twins);
    kv_audit(kv);
    tl_kv_pool_destroy(kv);
}

TEST(notes_on_used_blocks_do_not_reach_the_list_of_cached_ones)
{
    tl_kv_pool *kv = kv_new(6, 1, 1, 1, 1);
    const float x[6] = {0};
    uint32_t ids[6];
    CHECK_STATUS(tl_kv_alloc(kv, 6, ids), TL_OK);
    for (uint32_t round = 0; round < 3; round++) {
        CHECK_STATUS(tl_kv_append_f32(kv, 0, ids, 6, 0, 6, x, x, 0, 1), TL_OK);
        for (uint32_t i = 0; i < 6; i++) {
            CHECK_STATUS(tl_kv_set_fill(kv, ids[i], 1), TL_OK);
            CHECK_STATUS(tl_kv_register(kv, ids[i], 1 + i), TL_OK);
            CHECK_STATUS(tl_kv_unref(kv, ids[i]), TL_OK);
            kv_audit(kv);
        }
        CHECK_STATUS(tl_kv_alloc(kv, 6, ids), TL_OK);
        kv_audit(kv);
    }
    tl_kv_pool_destroy(kv);
}

TEST(the_callers_rounding_mode_does_not_reach_the_bits)
{
    static const int modes[] = {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO, FE_TONEAREST};
    enum { D = 67 };
    tl_kv_pool *kv = kv_new(1, 1, 1, 1, D);
    const uint32_t b = kv_one(kv);
    float *x = random_floats(D, 4);
    uint16_t want[D];
    for (int i = 0; i < D; i++)
        want[i] = f16_ref(x[i]);
    for (int m = 0; m < 4; m++) {
        memset(kv_bytes(kv, b), 0x11, tl_kv_block_bytes(kv));
        fesetround(modes[m]);
        const tl_status st = tl_kv_append_f32(kv, 0, &b, 1, 0, 1, x, x, D, D);
        const int after = fegetround();
        fesetround(FE_TONEAREST);
        CHECK_STATUS(st, TL_OK);
        CHECK(after == modes[m], "the mode %d became %d", modes[m], after);
        CHECK(memcmp(tl_kv_block_ptr(kv, b, 0, 0), want, sizeof want) == 0, "mode %d", modes[m]);
    }
    tl_kv_pool_destroy(kv);
}

CHECK_MAIN()
