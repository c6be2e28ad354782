/* SPDX-License-Identifier: MIT */
/* test_kv_append_batch.c: which calls of tl_kv_append are refused, in what order, and that a
 * refused one changes nothing. What a good one writes is test_kv_formats.c's. */
#include "kernels/attn_plan.h"
#include "kernels/kernels.h"
#include "kv_check.h"

/* The arguments of a call. */
struct call {
    tl_kv_pool *kv;
    uint32_t layer;
    const uint32_t *tables;
    int64_t table_stride;
    const int32_t *cu, *ctx;
    int64_t B;
    const void *k, *v;
    int32_t dtype;
    int64_t k_token, k_head, v_token, v_head;
    tl_pool *tp;
};

static tl_status run(const struct call *c)
{
    return tl_kv_append(c->kv, c->layer, c->tables, c->table_stride, c->cu, c->ctx, c->B, c->k,
                        c->v, c->dtype, c->k_token, c->k_head, c->v_token, c->v_head, c->tp);
}

static void refuse(tl_kv_pool *kv, const struct call *c, tl_status want, const char *words)
{
    tl_status got = TL_OK;
    CHECK_REFUSED(kv, got = run(c), "tl_kv_append", words);
    CHECK(got == want, "%s, want %s: %s", tl_status_str(got), tl_status_str(want),
          tl_last_error());
}

/* Three sequences of 2, 0 and 3 tokens in blocks of 4; D 2, two heads. */
enum { B = 3, STRIDE = 4, TOKENS = 5, HEADS = 2, D = 2 };

struct world {
    tl_kv_pool *kv;
    uint32_t tables[B * STRIDE], shared, named;
    int32_t cu[B + 1], ctx[B];
    float x[TOKENS * HEADS * D];
};

static struct call good_call(struct world *w)
{
    uint32_t ids[6];
    w->kv = kv_new(9, 4, 2, HEADS, D);
    kv_paint(w->kv, 5);
    CHECK_STATUS(tl_kv_alloc(w->kv, 6, ids), TL_OK);
    w->shared = kv_one(w->kv);
    w->named = kv_named(w->kv, 5); /* and block 8 is not used */
    tl_kv_ref(w->kv, w->shared);
    for (int i = 0; i < B * STRIDE; i++)
        w->tables[i] = UINT32_MAX;
    w->tables[0] = ids[0], w->tables[1] = ids[1];
    w->tables[2 * STRIDE + 1] = ids[2], w->tables[2 * STRIDE + 2] = ids[3];
    memcpy(w->cu, (int32_t[]){0, 2, 2, 5}, sizeof w->cu);
    memcpy(w->ctx, (int32_t[]){5, 16, 9}, sizeof w->ctx); /* positions 3, 4; none; 6, 7, 8 */
    for (int i = 0; i < TOKENS * HEADS * D; i++)
        w->x[i] = (float)i;
    return (struct call){w->kv, 1, w->tables, STRIDE, w->cu, w->ctx, B, w->x, w->x, TL_F32,
                         HEADS * D, D, HEADS * D, D, NULL};
}

TEST(the_entries_written_to_are_the_only_ones_looked_at)
{
    struct world w;
    const struct call c = good_call(&w);
    tl_set_last_error("as it was");
    CHECK_STATUS(run(&c), TL_OK);
    CHECK(strcmp(tl_last_error(), "as it was") == 0, "%s", tl_last_error());
    const uint16_t *k = tl_kv_block_ptr(w.kv, w.tables[0], 1, 0);
    CHECK(k[3 * D] == 0 && k[3 * D + 1] == 0x3C00 && k[(4 + 3) * D] == 0x4000, "position 3");
    tl_kv_pool_destroy(w.kv);
}

TEST(each_bad_argument_is_refused_and_named)
{
    struct world w;
    const struct call good = good_call(&w);
    struct call c;
    const int32_t from_1[] = {1, 2, 2, 5}, falls[] = {0, 3, 2, 5}, below_0[] = {0, -1, 2, 5};
#define BAD(member, value, want, words)  \
    do {                                 \
        c = good;                        \
        c.member = value;                \
        refuse(w.kv, &c, want, words);   \
    } while (0)
    BAD(kv, NULL, TL_EINVAL, "pool is NULL");
    BAD(B, -1, TL_EINVAL, "B = -1 is negative");
    BAD(B, INT64_MIN, TL_EINVAL, "B = -9223372036854775808 is negative");
    BAD(tables, NULL, TL_EINVAL, "block_tables is NULL with B = 3");
    BAD(ctx, NULL, TL_EINVAL, "ctx_lens is NULL with B = 3");
    BAD(layer, 2, TL_EINVAL, "layer 2 is out of range");
    BAD(layer, UINT32_MAX, TL_EINVAL, "layer 4294967295");
    BAD(table_stride, 0, TL_EINVAL, "table_stride = 0 is below 1");
    BAD(table_stride, INT64_MIN, TL_EINVAL, "table_stride = -9223372036854775808");
    BAD(table_stride, INT64_MAX / 4, TL_EINVAL, "do not fit in memory");
    BAD(B, INT64_MAX / 8, TL_EINVAL, "do not fit in memory");
    BAD(tables, (const uint32_t *)(UINTPTR_MAX - 15), TL_EINVAL, "block_tables at");
    BAD(ctx, (const int32_t *)(UINTPTR_MAX - 7), TL_EINVAL, "ctx_lens at");
    BAD(cu, (const int32_t *)(UINTPTR_MAX - 11), TL_EINVAL, "cu_seqlens at");
    for (int32_t dtype = -1; dtype <= 9; dtype++)
        if (dtype != TL_F32 && dtype != TL_F16 && dtype != TL_BF16)
            BAD(dtype, dtype, TL_EUNSUPPORTED, "is none of TL_F32, TL_F16, TL_BF16");
    BAD(cu, from_1, TL_EINVAL, "cu_seqlens[0] = 1 is not 0");
    BAD(cu, falls, TL_EINVAL, "cu_seqlens[2] = 2 decreases from 3");
    BAD(cu, below_0, TL_EINVAL, "cu_seqlens[1] = -1 decreases from 0");
    BAD(k, NULL, TL_EINVAL, "k is NULL with 5 tokens");
    BAD(v, NULL, TL_EINVAL, "v is NULL with 5 tokens");
    BAD(k_token, INT64_MAX / 8, TL_EINVAL, "k: head_stride 2, token_stride");
    BAD(k_head, INT64_MIN, TL_EINVAL, "k: head_stride -9223372036854775808");
    BAD(v_token, INT64_MIN / 2, TL_EINVAL, "v: head_stride 2, token_stride");
    BAD(v_head, INT64_MAX, TL_EINVAL, "v: head_stride 9223372036854775807");
    BAD(v, (const float *)(UINTPTR_MAX - 31), TL_EINVAL, "v: head_stride 2, token_stride 4 pass");
#undef BAD
    tl_kv_pool_destroy(w.kv);
}

TEST(each_bad_sequence_is_refused_and_named)
{
    struct world w;
    const struct call c = good_call(&w);
    const struct {
        int32_t ctx[B];
        const char *words;
    } bad[] = {{{1, 16, 9}, "sequence 0: ctx_len = 1 is below its 2 tokens"},
               {{5, -1, 9}, "sequence 1: ctx_len = -1 is below its 0 tokens"},
               {{5, 16, INT32_MIN}, "sequence 2: ctx_len = -2147483648 is below its 3 tokens"},
               {{17, 16, 9}, "sequence 0: ctx_len = 17 needs 5 blocks of 4, table_stride = 4"},
               {{5, 16, INT32_MAX}, "sequence 2: ctx_len = 2147483647 needs 536870912 blocks"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        memcpy(w.ctx, bad[i].ctx, sizeof w.ctx);
        refuse(w.kv, &c, TL_EINVAL, bad[i].words);
    }
    /* a sequence without tokens may have as many positions as it likes */
    memcpy(w.ctx, (int32_t[]){5, INT32_MAX, 9}, sizeof w.ctx);
    CHECK_STATUS(run(&c), TL_OK);
    tl_kv_pool_destroy(w.kv);
}

TEST(each_bad_entry_is_refused_and_named)
{
    struct world w;
    const struct call c = good_call(&w);
    uint32_t good[B * STRIDE];
    memcpy(good, w.tables, sizeof good);
    static const int written[] = {0, 1, 2 * STRIDE + 1, 2 * STRIDE + 2};
    const struct {
        uint32_t id;
        tl_status want;
        const char *words;
    } bad[] = {{9, TL_EINVAL, "= 9 is out of range: the pool has 9"},
               {UINT32_MAX, TL_EINVAL, "= 4294967295 is out of range"},
               {8, TL_EINVAL, "= 8 is not used"},
               {w.shared, TL_EBUSY, "= 6 has 2 references"},
               {w.named, TL_EBUSY, "= 7 is registered"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++)
        for (int at = 0; at < 4; at++) {
            char words[80];
            memcpy(w.tables, good, sizeof good);
            w.tables[written[at]] = bad[i].id;
            snprintf(words, sizeof words, ": sequence %d: block_table[%d] %s", written[at] / STRIDE,
                     written[at] % STRIDE, bad[i].words);
            refuse(w.kv, &c, bad[i].want, words);
        }
    memcpy(w.tables, good, sizeof good);
    CHECK_STATUS(run(&c), TL_OK);
    tl_kv_pool_destroy(w.kv);
}

/* The first entry that cannot be written decides, and what cannot be decides before what is
 * shared. */
TEST(of_several_bad_entries_the_first_decides)
{
    struct world w;
    const struct call c = good_call(&w);
    const uint32_t a = w.tables[0], b = w.tables[1], d = w.tables[2 * STRIDE + 1], freed = 4;
    CHECK_STATUS(tl_kv_unref(w.kv, freed), TL_OK);
    const struct {
        uint32_t entry[4]; /* those that are written to, in order */
        tl_status want;
        const char *words;
    } bad[] = {
        {{a, b, a, d}, TL_EINVAL,
         "sequence 0: block_table[0] and sequence 2: block_table[1] are both block 0"},
        {{a, b, d, a}, TL_EINVAL,
         "sequence 0: block_table[0] and sequence 2: block_table[2] are both block 0"},
        {{a, a, d, 8}, TL_EINVAL,
         "sequence 0: block_table[0] and sequence 0: block_table[1] are both block 0"},
        {{a, b, b, a}, TL_EINVAL,
         "sequence 0: block_table[1] and sequence 2: block_table[1] are both block 1"},
        {{a, a, a, a}, TL_EINVAL,
         "sequence 0: block_table[0] and sequence 0: block_table[1] are both block 0"},
        {{a, 9, a, d}, TL_EINVAL, "sequence 0: block_table[1] = 9 is out of range"},
        {{a, b, a, 9}, TL_EINVAL, "are both block 0"},
        {{8, 9, a, a}, TL_EINVAL, "sequence 0: block_table[0] = 8 is not used"},
        {{w.shared, w.named, a, 8}, TL_EINVAL, "sequence 2: block_table[2] = 8 is not used"},
        {{w.shared, w.named, a, freed}, TL_EINVAL, "sequence 2: block_table[2] = 4 is not used"},
        {{w.shared, w.named, a, b}, TL_EBUSY, "sequence 0: block_table[0] = 6 has 2 references"},
        {{a, w.named, w.shared, b}, TL_EBUSY, "sequence 0: block_table[1] = 7 is registered"},
        {{w.shared, a, b, w.shared}, TL_EINVAL, "are both block 6"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        w.tables[0] = bad[i].entry[0], w.tables[1] = bad[i].entry[1];
        w.tables[2 * STRIDE + 1] = bad[i].entry[2], w.tables[2 * STRIDE + 2] = bad[i].entry[3];
        refuse(w.kv, &c, bad[i].want, bad[i].words);
    }
    tl_kv_pool_destroy(w.kv);
}

/* Notes that an earlier call left in blocks are not taken for those of this one. */
TEST(blocks_named_twice_are_found_in_any_batch)
{
    enum { N = 12, MOST = 5 };
    tl_kv_pool *kv = kv_new(N, 2, 1, 1, 1);
    const float x[2 * MOST * 4] = {0};
    uint32_t ids[N], tables[MOST * 4];
    uint64_t seed = 4;
    int twins = 0;
    CHECK_STATUS(tl_kv_alloc(kv, N, ids), TL_OK);
    for (int turn = 0; turn < 4000; turn++) {
        const int64_t n_seqs = 1 + rng_below(&seed, MOST);
        int32_t cu[MOST + 1] = {0}, ctx[MOST];
        int named[N] = {0}, twin = 0, next = (int)rng_below(&seed, N);
        for (int64_t s = 0; s < n_seqs; s++) {
            const int32_t n = (int32_t)rng_below(&seed, 4);
            ctx[s] = n + (int32_t)rng_below(&seed, 9 - n);
            cu[s + 1] = cu[s] + n;
            for (int i = 0; i < 4; i++) {
                const uint32_t id = rng_below(&seed, 12) == 0 ? (uint32_t)rng_below(&seed, N)
                                                              : (uint32_t)(next++ % N);
                tables[s * 4 + i] = id;
                if (n > 0 && i >= (ctx[s] - n) / 2 && i <= (ctx[s] - 1) / 2)
                    twin |= named[id]++ > 0;
            }
        }
        twins += twin;
        CHECK_STATUS(tl_kv_append(kv, 0, tables, 4, cu, ctx, n_seqs, x, x, TL_F32, 1, 1, 1, 1,
                                  NULL),
                     twin ? TL_EINVAL : TL_OK);
    }
    CHECK(twins > 400 && twins < 3600, "%d of 4000", twins);
    kv_audit(kv);
    tl_kv_pool_destroy(kv);
}

TEST(no_tokens_are_fine)
{
    struct world w;
    const struct call good = good_call(&w);
    const int32_t none[B + 1] = {0}, from_1[] = {1, 1, 1, 1}, falls[] = {0, 1, 0, 0}, zero = 0;
    tl_set_last_error("as it was");
    struct call c = good;
    c.cu = none, c.k = c.v = NULL, c.k_token = c.v_head = INT64_MAX;
    memcpy(w.ctx, (int32_t[]){-1, 99, -7}, sizeof w.ctx); /* nobody asks */
    CHECK_STATUS(run(&c), TL_OK);
    c = (struct call){.kv = w.kv, .table_stride = 1, .dtype = TL_BF16};
    CHECK_STATUS(run(&c), TL_OK);
    c.cu = &zero;
    CHECK_STATUS(run(&c), TL_OK);
    CHECK(strcmp(tl_last_error(), "as it was") == 0, "%s", tl_last_error());
    c.cu = from_1;
    refuse(w.kv, &c, TL_EINVAL, "cu_seqlens[0] = 1");
    c.cu = NULL, c.dtype = TL_I8;
    refuse(w.kv, &c, TL_EUNSUPPORTED, "dtype = 5");
    c.table_stride = 0;
    refuse(w.kv, &c, TL_EINVAL, "table_stride = 0");
    c = good;
    c.cu = falls;
    refuse(w.kv, &c, TL_EINVAL, "cu_seqlens[2] = 0 decreases from 1");
    tl_kv_pool_destroy(w.kv);
}

struct inside {
    const struct call *call;
    tl_status got;
    char said[TL_LAST_ERROR_CAP];
};

static void call_inside(void *ctx, int64_t lo, int64_t hi, int worker)
{
    struct inside *in = ctx;
    (void)lo, (void)hi, (void)worker;
    in->got = run(in->call);
    snprintf(in->said, sizeof in->said, "%s", tl_last_error());
}

/* Every fault at once, then one less each time: the order of the header. */
TEST(the_first_fault_decides)
{
    struct world w;
    const struct call good = good_call(&w);
    struct call c = good;
    tl_pool *tp = NULL;
    const int32_t from_1[] = {1, 2, 2, 5};
    CHECK_STATUS(tl_pool_create(2, &tp), TL_OK);
    c.tp = tp;
    w.tables[0] = 8, w.tables[1] = w.shared;
    w.ctx[0] = 1;
    tl_kernels_select("abacus");
    c.k_head = INT64_MAX, c.v = NULL, c.cu = from_1, c.dtype = TL_I8, c.table_stride = 0;
    c.layer = 2, c.B = -1, c.kv = NULL;
    struct inside in = {.call = &c};
    const struct {
        const char *words;
        tl_status want;
    } order[] = {{"pool is NULL", TL_EINVAL},
                 {"B = -1", TL_EINVAL},
                 {"layer 2", TL_EINVAL},
                 {"table_stride = 0", TL_EINVAL},
                 {"dtype = 5", TL_EUNSUPPORTED},
                 {"cu_seqlens[0]", TL_EINVAL},
                 {"v is NULL", TL_EINVAL},
                 {"k: head_stride", TL_EINVAL},
                 {"TINYLLM_ISA=abacus", TL_EUNSUPPORTED},
                 {"ctx_len = 1", TL_EINVAL},
                 {"= 8 is not used", TL_EINVAL},
                 {"= 6 has 2 references", TL_EBUSY},
                 {"called from inside a range", TL_EBUSY}};
    struct kv_snap before = kv_snap(w.kv);
    for (int i = 0; i < 13; i++) {
        switch (i) {
        case 1: c.kv = good.kv; break;
        case 2: c.B = good.B; break;
        case 3: c.layer = 0; break;
        case 4: c.table_stride = STRIDE; break;
        case 5: c.dtype = TL_F32; break;
        case 6: c.cu = good.cu; break;
        case 7: c.v = good.v; break;
        case 8: c.k_head = good.k_head; break;
        case 9: tl_kernels_select(NULL); break;
        case 10: w.ctx[0] = 5; break;
        case 11: w.tables[0] = 0; break;
        case 12: w.tables[1] = 1; break;
        default: break;
        }
        CHECK_STATUS(tl_parallel_for(tp, 1, 1, call_inside, &in), TL_OK);
        CHECK(in.got == order[i].want && strncmp(in.said, "tl_kv_append: ", 14) == 0 &&
                  strstr(in.said, order[i].words),
              "fault %d: %s, \"%s\", want \"%s\"", i, tl_status_str(in.got), in.said,
              order[i].words);
    }
    struct kv_snap after = kv_snap(w.kv);
    const char *diff = kv_snap_diff(&before, &after);
    kv_snap_free(&before), kv_snap_free(&after);
    CHECK(!diff, "the %s changed", diff);
    CHECK_STATUS(run(&c), TL_OK);
    tl_pool_destroy(tp);
    tl_kv_pool_destroy(w.kv);
}

/* Who works on it, and in how many ranges, does not show; workers share the work where it pays. */
TEST(large_batches_are_shared_out_and_counted_whole)
{
    enum { N = 64, T = 48, WIDE = 128 };
    const int64_t small = tl_small_step_ns;
    tl_pool *tp = NULL;
    float *x = malloc((size_t)N * T * WIDE * sizeof *x);
    int32_t cu[N + 1] = {0}, ctx[N];
    uint32_t tables[N * 3];
    uint64_t seed = 6, lost = 0;
    tl_kv_pool *kv[2];
    for (int64_t i = 0; i < (int64_t)N * T * WIDE; i++) {
        x[i] = rng_unit(&seed);
        if (rng_below(&seed, 1000) == 0)
            x[i] = NAN, lost += 2;
    }
    for (int s = 0; s < N; s++)
        cu[s + 1] = cu[s] + T, ctx[s] = T;
    CHECK_STATUS(tl_pool_create(4, &tp), TL_OK);
    for (int i = 0; i < 2; i++) {
        kv[i] = kv_new(N * 3, 16, 1, 1, WIDE);
        memset(kv_bytes(kv[i], 0), 0, (size_t)N * 3 * tl_kv_block_bytes(kv[i]));
        CHECK_STATUS(tl_kv_alloc(kv[i], N * 3, tables), TL_OK);
        tl_small_step_ns = i ? 0 : INT64_MAX;
        CHECK_STATUS(tl_kv_append(kv[i], 0, tables, 3, cu, ctx, N, x, x, TL_F32, WIDE, WIDE, WIDE,
                                  WIDE, tp),
                     TL_OK);
        CHECK(kv_stats(kv[i]).unrepresentable == lost, "%llu counted, want %llu",
              (unsigned long long)kv_stats(kv[i]).unrepresentable, (unsigned long long)lost);
    }
    tl_small_step_ns = small;
    CHECK(memcmp(kv_bytes(kv[0], 0), kv_bytes(kv[1], 0), N * 3 * tl_kv_block_bytes(kv[0])) == 0,
          "bytes differ");
    tl_kv_pool_destroy(kv[0]), tl_kv_pool_destroy(kv[1]);
    tl_pool_destroy(tp);
    free(x);
}

CHECK_MAIN()
