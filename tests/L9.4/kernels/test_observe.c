/* SPDX-License-Identifier: MIT */
/* test_observe.c: a trace tells who did what when and changes no bit; names of instruction sets;
 * the reading loop. */
#include <stdbool.h>
#include <time.h>

#include "attn_ref.h"
#include "tinyllm/observe.h"

/* ---- tl_kv_read ---- */

/* The first byte of every 64 of each gapless run of rows, as the header has it: slots lo .. hi-1 of
 * one side of a block. */
static uint64_t first_bytes(const unsigned char *rows, int64_t token_bytes, int64_t row_bytes,
                            int64_t lo, int64_t hi)
{
    uint64_t word = 0;
    if (token_bytes == row_bytes)
        for (int64_t at = lo * row_bytes; at < hi * row_bytes; at += 64)
            word ^= rows[at];
    else
        for (int64_t slot = lo; slot < hi; slot++)
            for (int64_t at = 0; at < row_bytes; at += 64)
                word ^= rows[slot * token_bytes + at];
    return word;
}

/* [blocks, 2, Hkv, b, D] with `gap` elements behind each row, at the end of readable memory. Scales
 * are where nothing can be read. */
struct read_case {
    unsigned char *data;
    size_t bytes;
    int64_t elem; /* bytes of an element */
    tl_kv_view view;
    uint32_t tables[3 * 5];
    int32_t ctx[3];
};

static void read_make(struct read_case *c, int32_t dtype, int64_t dim, int64_t gap, uint64_t seed)
{
    enum { BLOCKS = 9, HEADS = 2, SLOTS = 6 };
    const int64_t row = dim + gap, side = HEADS * SLOTS * row, all = BLOCKS * 2 * side - gap;
    const bool has_scales = dtype == TL_I8 || dtype == TL_F8_E4M3;
    c->elem = (int64_t)dtype_bytes(dtype);
    c->bytes = (size_t)(all * c->elem);
    c->data = guarded(c->bytes);
    for (size_t i = 0; i < c->bytes; i++)
        c->data[i] = (unsigned char)(rng_next(&seed) >> 40);
    c->view = (tl_kv_view){.size = sizeof(tl_kv_view),
                           .k = c->data,
                           .v = c->data + side * c->elem,
                           .dtype = dtype,
                           .n_blocks = BLOCKS,
                           .block_tokens = SLOTS,
                           .n_kv_heads = HEADS,
                           .head_dim_k = dim,
                           .head_dim_v = dim,
                           .k_block_stride = 2 * side,
                           .k_head_stride = SLOTS * row,
                           .k_token_stride = row,
                           .v_block_stride = 2 * side,
                           .v_head_stride = SLOTS * row,
                           .v_token_stride = row,
                           .k_scale = has_scales ? (const float *)64 : NULL,
                           .v_scale = has_scales ? (const float *)64 : NULL};
    for (int i = 0; i < 15; i++)
        c->tables[i] = (uint32_t)rng_below(&seed, BLOCKS);
    c->ctx[0] = 30, c->ctx[1] = 0, c->ctx[2] = 19;
}

/* What one sequence adds to the word. */
static uint64_t word_of(const struct read_case *c, int s, int64_t window)
{
    const int64_t first = window && window < c->ctx[s] ? c->ctx[s] - window : 0, elem = c->elem;
    uint64_t word = 0;
    for (int64_t i = 0; i * 6 < c->ctx[s]; i++)
        for (int head = 0; head < 2; head++) {
            const int64_t lo = first - i * 6 > 0 ? first - i * 6 : 0,
                          hi = c->ctx[s] - i * 6 < 6 ? c->ctx[s] - i * 6 : 6;
            const int64_t at = c->tables[s * 5 + i] * c->view.k_block_stride +
                               head * c->view.k_head_stride;
            const unsigned char *k = (const unsigned char *)c->view.k + at * elem,
                                *v = (const unsigned char *)c->view.v + at * elem;
            const int64_t token = c->view.k_token_stride * elem, row = c->view.head_dim_k * elem;
            if (lo < hi)
                word ^= first_bytes(k, token, row, lo, hi) ^ first_bytes(v, token, row, lo, hi);
        }
    return word;
}

static void check_reading(int32_t dtype, int64_t dim, int64_t gap, int64_t window, int threads)
{
    struct read_case c;
    read_make(&c, dtype, dim, gap, (uint64_t)(dim * 31 + window));
    tl_pool *tp = threads > 1 ? make_threads(threads) : NULL;
    uint64_t want = 0, got = 99;
    for (int s = 0; s < 3; s++)
        want ^= word_of(&c, s, window);
    CHECK_STATUS(tl_kv_read(&c.view, c.tables, 5, c.ctx, 3, window, tp, &got), TL_OK);
    CHECK(got == want, "dtype %d, D %lld, gap %lld, window %lld: %llx, want %llx", dtype,
          (long long)dim, (long long)gap, (long long)window, (unsigned long long)got,
          (unsigned long long)want);
    tl_pool_destroy(tp);
    guarded_free(c.data, c.bytes);
}

TEST(reading_touches_every_line_of_what_a_step_sees_and_nothing_else)
{
    static const int32_t dtypes[] = {TL_F16, TL_I8, TL_F32, TL_F8_E4M3};
    for (int i = 0; i < 4; i++)
        for (int64_t dim = 1; dim <= 130; dim += dim < 8 ? 1 : 61)
            for (int64_t gap = 0; gap <= 3; gap += 3)
                for (int64_t window = 0; window <= 25; window += 5)
                    for (int threads = 1; threads <= 3; threads += 2)
                        check_reading(dtypes[i], dim, gap, window, threads);
}

TEST(reading_badly_is_refused)
{
    struct read_case c;
    uint64_t word = 5;
    read_make(&c, TL_F16, 16, 0, 3);
    const tl_kv_view sound = c.view;
    const tl_kv_view no_k = {.v = sound.v}, no_v = {.k = sound.k};
    const tl_kv_view odd = {.size = sizeof odd, .k = sound.k, .v = sound.v,
                            .dtype = TL_F8_E5M2};
    CHECK_STATUS(tl_kv_read(&sound, c.tables, 5, c.ctx, 0, 0, NULL, &word), TL_OK);
    CHECK(word == 0, "%llx of nothing", (unsigned long long)word);
    word = 5;
    const struct {
        const tl_kv_view *view;
        const uint32_t *tables;
        int64_t table_stride;
        const int32_t *ctx;
        int64_t B;
        const char *word;
    } bad[] = {{NULL, c.tables, 5, c.ctx, 3, "view is NULL"},
               {&no_k, c.tables, 5, c.ctx, 3, "view: k is NULL"},
               {&no_v, c.tables, 5, c.ctx, 3, "view: v is NULL"},
               {&odd, c.tables, 5, c.ctx, 3, "dtype = 4"},
               {&sound, NULL, 5, c.ctx, 3, "block_tables is NULL"},
               {&sound, c.tables, 5, NULL, 3, "ctx_lens is NULL"},
               {&sound, c.tables, 0, c.ctx, 3, "table_stride = 0 is below 1"},
               {&sound, c.tables, 5, c.ctx, -1, "B = -1"},
               {&sound, c.tables, INT64_MAX / 2, c.ctx, 3, "B = 3 tables"},
               {&sound, c.tables, 4, c.ctx, 3,
                "sequence 0: ctx_len = 30 needs 5 blocks of 6, table_stride = 4"},
               {&sound, c.tables, 5, (const int32_t[]){1, -1, 1}, 3, "sequence 1: ctx_len = -1"},
               {&sound, (const uint32_t[]){0, 1, 9}, 3, (const int32_t[]){13}, 1,
                "sequence 0: block_table[2] = 9, there are 9 blocks"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        CHECK_STATUS(tl_kv_read(bad[i].view, bad[i].tables, bad[i].table_stride, bad[i].ctx,
                                bad[i].B, 0, NULL, &word),
                     TL_EINVAL);
        CHECK(strstr(tl_last_error(), bad[i].word) && word == 5, "case %zu: %s", i,
              tl_last_error());
    }
    /* more units than can be numbered */
    tl_kv_view heads = {.size = sizeof heads, .k = (const void *)64, .v = (const void *)64,
                        .dtype = TL_F16, .n_blocks = 1, .block_tokens = 1,
                        .n_kv_heads = INT64_C(1) << 60, .head_dim_k = 1, .head_dim_v = 1,
                        .k_head_stride = 1, .v_head_stride = 1};
    CHECK_STATUS(tl_kv_read(&heads, c.tables, 1, (const int32_t[16]){0}, 16, 0, NULL, &word),
                 TL_EINVAL);
    CHECK(strstr(tl_last_error(), "B = 16 with 1152921504606846976 KV heads") && word == 5, "%s",
          tl_last_error());
    /* without blocks there may be any number of heads, and none is gone through */
    heads.n_blocks = 0, heads.n_kv_heads = INT64_MAX;
    CHECK_STATUS(tl_kv_read(&heads, c.tables, 1, (const int32_t[4]){0}, 4, 0, NULL, &word), TL_OK);
    CHECK(word == 0, "%llx of nothing", (unsigned long long)word);
    word = 5;
    /* behind the window */
    CHECK_STATUS(tl_kv_read(&sound, (const uint32_t[]){9, 9, 1}, 3, (const int32_t[]){13}, 1, 1,
                            NULL, &word),
                 TL_OK);
    CHECK_STATUS(tl_kv_read(&sound, c.tables, 5, c.ctx, 3, 0, NULL, NULL), TL_EINVAL);
    CHECK(strstr(tl_last_error(), "word is NULL"), "%s", tl_last_error());
    guarded_free(c.data, c.bytes);
}

/* ---- names ---- */

TEST(usable_instruction_sets_are_named_best_first_whatever_is_in_force)
{
    char want[64] = "";
    int n = 0;
    while (isa_select(n))
        n++;
    while (n-- > 0) {
        strcat(want, want[0] ? " " : "");
        strcat(want, tl_kernels_usable(n)->name);
    }
    CHECK(strcmp(tl_isa_names(), want) == 0, "\"%s\", want \"%s\"", tl_isa_names(), want);
    tl_kernels_select("abacus");
    CHECK(strcmp(tl_isa_name(), "abacus") == 0 && strcmp(tl_isa_names(), want) == 0, "\"%s\"",
          tl_isa_names());
    isa_restore();
}

/* ---- traces ---- */

enum {
    B = 4,
    H = 4,
    HKV = 2,
    D = 16,
    BLOCK = 16,
    TABLE = 300,
    ROWS_EACH = 2,
    TOTAL = B * ROWS_EACH,
    CAPACITY = 400
};

struct traced {
    tl_kv_pool *kv;
    tl_kv_view view;
    tl_paged_attn_args args;
    tl_trace trace;
    tl_trace_event events[CAPACITY + 1]; /* the last one is nobody's */
    int32_t cu[B + 1], ctx[B];
    uint32_t tables[B * TABLE];
    float q[TOTAL * H * D], out[TOTAL * H * D], want[TOTAL * H * D];
};

/* Sequences of these lengths with two rows each; the first `shared` blocks of their tables are the
 * same. `t` is zeroed. */
static void traced_make(struct traced *t, const int32_t *ctx, int shared, int threads)
{
    const tl_kv_cfg cfg = {B * TABLE, BLOCK, 1, HKV, D, TL_F16, TL_KV_FORMAT_V1};
    uint64_t rng = 5;
    CHECK_STATUS(tl_kv_pool_create(&cfg, &t->kv), TL_OK);
    t->view.size = sizeof t->view;
    CHECK_STATUS(tl_kv_pool_view(t->kv, 0, &t->view), TL_OK);
    uint16_t *data = tl_kv_block_ptr(t->kv, 0, 0, 0);
    for (size_t i = 0; i < B * TABLE * tl_kv_block_bytes(t->kv) / 2; i++)
        data[i] = (uint16_t)(0x3000 | (rng_next(&rng) >> 50 & 0x83FF));
    for (int i = 0; i < TOTAL * H * D; i++)
        t->q[i] = rng_unit(&rng);
    for (int s = 0; s < B; s++) {
        t->ctx[s] = ctx[s], t->cu[s + 1] = (s + 1) * ROWS_EACH;
        for (int i = 0; i < TABLE; i++)
            t->tables[s * TABLE + i] = (uint32_t)(i < shared ? i : s * TABLE + i);
    }
    memset(t->events, 0x77, sizeof t->events);
    t->trace = (tl_trace){t->events, CAPACITY, -5};
    t->args = (tl_paged_attn_args){.size = sizeof t->args,
                                   .view = &t->view,
                                   .q = t->q,
                                   .out = t->out,
                                   .q_token_stride = H * D,
                                   .q_head_stride = D,
                                   .out_token_stride = H * D,
                                   .out_head_stride = D,
                                   .B = B,
                                   .H = H,
                                   .cu_seqlens_q = t->cu,
                                   .ctx_lens = t->ctx,
                                   .block_tables = t->tables,
                                   .table_stride = TABLE,
                                   .scale = 0.25f,
                                   .tp = threads > 1 ? make_threads(threads) : NULL};
    CHECK_STATUS(tl_paged_attn_f32(&t->args), TL_OK);
    memcpy(t->want, t->out, sizeof t->want);
    t->args.trace = &t->trace;
}

static void traced_free(struct traced *t)
{
    tl_pool_destroy(t->args.tp);
    tl_kv_pool_destroy(t->kv);
    free(t);
}

static int64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Runs the call: its bits, and that every event lies in its time, on a thread that is there. */
static void traced_run(struct traced *t)
{
    const int64_t begin = now();
    memset(t->out, 0x5A, sizeof t->out);
    CHECK_STATUS(tl_paged_attn_f32(&t->args), TL_OK);
    const int64_t end = now();
    CHECK_SAME(t->out, t->want, TOTAL * H * D, "with a trace");
    for (int64_t i = 0; i < t->trace.n && i < t->trace.capacity; i++) {
        const tl_trace_event *e = &t->events[i];
        CHECK(begin <= e->begin_ns && e->begin_ns <= e->end_ns && e->end_ns <= end,
              "event %lld: %lld .. %lld of %lld .. %lld", (long long)i, (long long)e->begin_ns,
              (long long)e->end_ns, (long long)begin, (long long)end);
        CHECK(e->worker >= 0 && e->worker < tl_pool_threads(t->args.tp), "event %lld: worker %d",
              (long long)i, (int)e->worker);
    }
    CHECK(t->events[t->trace.capacity].what == 0x77777777, "an event past the capacity");
}

/* How often each (row's token, KV head, split) was walked, by events of one kind. */
static void walked(const struct traced *t, int what, int counts[TOTAL][HKV][8])
{
    memset(counts, 0, sizeof(int[TOTAL][HKV][8]));
    for (int64_t i = 0; i < t->trace.n; i++) {
        const tl_trace_event *e = &t->events[i];
        for (int64_t token = e->first_token;
             e->what == what && token < e->first_token + e->n_tokens; token++) {
            CHECK(what != TL_TRACE_ROWS || token / ROWS_EACH == e->seq,
                  "token %lld is not of sequence %lld", (long long)token, (long long)e->seq);
            for (int64_t split = e->first_split; split < e->first_split + e->n_splits; split++)
                counts[token][e->kv_head][split]++;
        }
    }
}

static const int32_t ragged[B] = {4700, 17, 1025, 2048};

TEST(every_row_and_split_is_traced_once_and_no_bit_changes)
{
    for (int threads = 1; threads <= 3; threads++)
        for (int window = 0; window <= 1500; window += 1500) {
            struct traced *t = must_alloc(sizeof *t);
            memset(t, 0, sizeof *t);
            traced_make(t, ragged, 0, threads);
            t->args.window = window, t->args.trace = NULL;
            CHECK_STATUS(tl_paged_attn_f32(&t->args), TL_OK);
            memcpy(t->want, t->out, sizeof t->want);
            t->args.trace = &t->trace;
            traced_run(t);
            int counts[TOTAL][HKV][8];
            walked(t, TL_TRACE_ROWS, counts);
            for (int token = 0; token < TOTAL; token++)
                for (int split = 0; split < 8; split++) {
                    const int n = ragged[token / ROWS_EACH];
                    /* of the earlier of the two rows */
                    const int lo = window && window < n ? n - ROWS_EACH + 1 - window : 0;
                    const int want = split >= lo / 1024 && split <= (n - 1) / 1024;
                    for (int head = 0; head < HKV; head++)
                        CHECK(counts[token][head][split] == want,
                              "token %d, head %d, split %d: %d, want %d (window %d)", token, head,
                              split, counts[token][head][split], want, window);
                }
            traced_free(t);
        }
}

TEST(a_walk_over_what_is_shared_is_an_event_of_its_own)
{
    static const int32_t ctx[B] = {2500, 2300, 2048 + 7, 2060};
    struct traced *t = must_alloc(sizeof *t);
    memset(t, 0, sizeof *t);
    traced_make(t, ctx, 2048 / BLOCK, 1);
    traced_run(t);
    int shared[TOTAL][HKV][8], own[TOTAL][HKV][8];
    walked(t, TL_TRACE_SHARED, shared);
    walked(t, TL_TRACE_ROWS, own);
    for (int token = 0; token < TOTAL; token++)
        for (int head = 0; head < HKV; head++)
            for (int split = 0; split < 8; split++) {
                const int want_own = split == 2, want_shared = split < 2;
                CHECK(own[token][head][split] == want_own &&
                          shared[token][head][split] == want_shared,
                      "token %d, head %d, split %d: %d, %d", token, head, split,
                      own[token][head][split], shared[token][head][split]);
            }
    traced_free(t);
}

TEST(splits_side_by_side_and_their_merge_are_traced)
{
    static const int32_t ctx[B] = {4700, 2, 2, 2};
    struct traced *t = must_alloc(sizeof *t);
    memset(t, 0, sizeof *t);
    traced_make(t, ctx, 0, 2);
    for (int s = 2; s <= B; s++)
        t->cu[s] = t->cu[1]; /* only the first has rows */
    t->args.workspace_bytes = tl_paged_attn_workspace(&t->args);
    t->args.workspace = must_alloc(t->args.workspace_bytes);
    memset(t->out, 0x5A, sizeof t->out);
    CHECK_STATUS(tl_paged_attn_f32(&t->args), TL_OK);
    CHECK_SAME(t->out, t->want, ROWS_EACH * H * D, "with a trace");
    int counts[TOTAL][HKV][8], merged[ROWS_EACH] = {0};
    walked(t, TL_TRACE_ROWS, counts);
    for (int i = 0; i < ROWS_EACH * HKV * 5; i++)
        CHECK(counts[i / (HKV * 5)][i / 5 % HKV][i % 5] == 1, "piece %d", i);
    for (int64_t i = 0; i < t->trace.n; i++)
        if (t->events[i].what == TL_TRACE_MERGE) {
            CHECK(t->events[i].seq == -1 && t->events[i].kv_head == -1 &&
                      t->events[i].n_splits == 5,
                  "merge %lld", (long long)i);
            for (int64_t token = t->events[i].first_token;
                 token < t->events[i].first_token + t->events[i].n_tokens; token++)
                merged[token]++;
        }
    CHECK(merged[0] >= 1 && merged[1] >= 1, "%d, %d", merged[0], merged[1]);
    free(t->args.workspace);
    traced_free(t);
}

/* The merges of a call on so many threads with a workspace; below step_ns a step is small. */
static int64_t merges_of(const int32_t *ctx, int threads, int64_t step_ns)
{
    struct traced *t = must_alloc(sizeof *t);
    int64_t n = 0;
    memset(t, 0, sizeof *t);
    traced_make(t, ctx, 0, threads);
    t->args.workspace_bytes = tl_paged_attn_workspace(&t->args);
    t->args.workspace = must_alloc(t->args.workspace_bytes);
    tl_small_step_ns = step_ns;
    traced_run(t);
    tl_small_step_ns = 0;
    for (int64_t i = 0; i < t->trace.n; i++)
        n += t->events[i].what == TL_TRACE_MERGE;
    free(t->args.workspace);
    traced_free(t);
    return n;
}

/* Eight units are few for three threads, and enough for two; one split is not worked on side by
 * side. */
TEST(splits_go_side_by_side_only_where_it_helps)
{
    static const int32_t one_split[B] = {700, 1024, 3, 900}, two_splits[B] = {700, 1025, 3, 900};
    CHECK(merges_of(two_splits, 3, 0) > 0, "few units");
    CHECK(merges_of(two_splits, 2, 0) == 0, "enough units");
    CHECK(merges_of(one_split, 3, 0) == 0, "one split");
}

/* The two rows of a sequence read ctx positions, one of them one less, of K and
 * V, 16 elements wide, for 2 KV heads, and multiply them for 4 heads: at 4 and 20 elements a
 * nanosecond. */
TEST(a_step_wakes_workers_from_the_time_that_is_worth_it)
{
    double ns = 0;
    for (int s = 0; s < B; s++)
        ns += (ragged[s] - 0.5) * D * (HKV / 4.0 + ROWS_EACH * H / 20.0);
    for (int64_t step = (int64_t)ns - 1; step <= (int64_t)ns + 1; step++)
        CHECK((merges_of(ragged, 3, step) > 0) == ((double)step <= ns),
              "%g ns, worth it from %lld on", ns, (long long)step);
}

/* The last rows of a prompt see the most. */
TEST(the_last_chunk_of_a_prompt_is_begun_first)
{
    enum { PROMPT = 4 * 32 + 3 };
    const tl_kv_cfg cfg = {10, BLOCK, 1, 1, D, TL_F16, TL_KV_FORMAT_V1};
    tl_kv_pool *kv = make_pool(&cfg);
    tl_kv_view view = {.size = sizeof view};
    CHECK_STATUS(tl_kv_pool_view(kv, 0, &view), TL_OK);
    const uint32_t table[10] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9};
    const int32_t cu[] = {0, PROMPT}, ctx[] = {PROMPT + 9};
    float *q = floats(PROMPT * D), *out = floats(PROMPT * D);
    tl_trace_event events[8];
    tl_trace trace = {events, 8, 0};
    const tl_paged_attn_args args = {.size = sizeof args,
                                     .view = &view,
                                     .q = q,
                                     .out = out,
                                     .q_token_stride = D,
                                     .q_head_stride = D,
                                     .out_token_stride = D,
                                     .out_head_stride = D,
                                     .B = 1,
                                     .H = 1,
                                     .cu_seqlens_q = cu,
                                     .ctx_lens = ctx,
                                     .block_tables = table,
                                     .table_stride = 10,
                                     .scale = 1,
                                     .trace = &trace};
    CHECK_STATUS(tl_paged_attn_f32(&args), TL_OK);
    CHECK(trace.n == 5, "%lld events", (long long)trace.n);
    for (int i = 0; i < 5; i++)
        CHECK(events[i].first_token == 32 * (4 - i) && events[i].n_tokens == (i ? 32 : 3),
              "event %d: tokens %lld, %lld of them", i, (long long)events[i].first_token,
              (long long)events[i].n_tokens);
    free(q), free(out);
    tl_kv_pool_destroy(kv);
}

/* Work takes time, and what is begun behind it by the same thread is begun later. */
TEST(events_end_when_their_work_does)
{
    struct traced *t = must_alloc(sizeof *t);
    memset(t, 0, sizeof *t);
    traced_make(t, ragged, 0, 1);
    traced_run(t);
    for (int64_t i = 0; i < t->trace.n; i++)
        CHECK(t->events[i].n_splits < 2 || t->events[i].end_ns > t->events[i].begin_ns,
              "event %lld took no time", (long long)i);
    for (int64_t i = 1; i < t->trace.n; i++)
        CHECK(t->events[i].begin_ns >= t->events[i - 1].end_ns, "event %lld begins too early",
              (long long)i);
    traced_free(t);
}

/* Sooner or later another thread than the calling one gets a unit. */
TEST(events_name_the_worker_that_made_them)
{
    struct traced *t = must_alloc(sizeof *t);
    bool is_another = false;
    memset(t, 0, sizeof *t);
    traced_make(t, ragged, 0, 3);
    for (int run = 0; run < 2000 && !is_another; run++) {
        traced_run(t);
        for (int64_t i = 0; i < t->trace.n; i++)
            is_another |= t->events[i].worker > 0;
    }
    CHECK(is_another, "every event is of worker 0");
    traced_free(t);
}

TEST(events_past_the_capacity_are_counted_and_not_written)
{
    struct traced *t = must_alloc(sizeof *t);
    memset(t, 0, sizeof *t);
    traced_make(t, ragged, 0, 2);
    traced_run(t);
    const int64_t n = t->trace.n;
    CHECK(n > 3, "%lld events", (long long)n);
    for (int64_t capacity = 0; capacity <= 3; capacity++) {
        memset(t->events, 0x77, sizeof t->events);
        t->trace = (tl_trace){capacity ? t->events : NULL, capacity, 0};
        traced_run(t);
        CHECK(t->trace.n == n, "%lld events, %lld with room", (long long)t->trace.n, (long long)n);
    }
    traced_free(t);
}

TEST(a_trace_that_cannot_be_written_is_refused_before_anything_is)
{
    struct traced *t = must_alloc(sizeof *t);
    memset(t, 0, sizeof *t);
    traced_make(t, ragged, 0, 1);
    const struct {
        tl_trace trace;
        const char *word;
    } bad[] = {{{t->events, -1, 9}, "capacity = -1"},
               {{NULL, 1, 9}, "events is NULL"},
               {{t->events, INT64_MAX / 8, 9}, "capacity"},
               {{(tl_trace_event *)t->out, 1, 9}, "out overlaps trace"},
               {{(tl_trace_event *)t->q, 1, 9}, "trace overlaps q"},
               {{(tl_trace_event *)t->tables, 1, 9}, "trace overlaps block_tables"}};
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        t->trace = bad[i].trace;
        memset(t->out, 0x5A, sizeof t->out);
        CHECK_STATUS(tl_paged_attn_f32(&t->args), TL_EINVAL);
        CHECK(strstr(tl_last_error(), bad[i].word), "case %zu: %s", i, tl_last_error());
        CHECK(t->trace.n == 9 && ((unsigned char *)t->out)[0] == 0x5A,
              "case %zu: something was written", i);
    }
    traced_free(t);
}

TEST(a_caller_who_knows_no_trace_says_a_smaller_size)
{
    struct traced *t = must_alloc(sizeof *t);
    memset(t, 0, sizeof *t);
    traced_make(t, ragged, 0, 1);
    const size_t size = offsetof(tl_paged_attn_args, trace);
    tl_paged_attn_args *old = guarded(size); /* nothing of it is readable past that size */
    t->args.size = size;
    memcpy(old, &t->args, size);
    memset(t->out, 0x5A, sizeof t->out);
    CHECK_STATUS(tl_paged_attn_f32(old), TL_OK);
    CHECK_SAME(t->out, t->want, TOTAL * H * D, "by a struct of %zu bytes", size);
    CHECK(t->trace.n == -5, "a trace was written");
    guarded_free(old, size);
    traced_free(t);
}

CHECK_MAIN()
