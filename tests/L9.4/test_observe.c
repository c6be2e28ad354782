/* SPDX-License-Identifier: MIT */
/* test_observe.c: a trace tells who did what when and changes no bit; names of instruction sets; the reading loop. */
#include <stdbool.h>
#include <time.h>

#include "attn_ref.h"
#include "tinyllm/observe.h"

/* ---- tl_memory_read ---- */

/* The xor of the first word of every line, as the header has it. */
static uint64_t first_words(const unsigned char *p, size_t n)
{
    uint64_t word, all = 0;
    for (size_t at = 0; at + sizeof word <= n; at += 64) {
        memcpy(&word, p + at, sizeof word);
        all ^= word;
    }
    return all;
}

TEST(reading_touches_every_line_and_nothing_behind_the_end)
{
    uint64_t rng = 12;
    for (size_t n = 8; n <= 2000; n += 8) {
        unsigned char *p = guarded(n);
        for (size_t i = 0; i < n; i++)
            p[i] = (unsigned char)(rng_next(&rng) >> 40);
        CHECK(tl_memory_read(p, n) == first_words(p, n), "%zu bytes", n);
        for (size_t cut = 1; cut < 8; cut++)
            CHECK(tl_memory_read(p, n - cut) == first_words(p, n - cut), "%zu bytes", n - cut);
        guarded_free(p, n);
    }
}

TEST(reading_nothing_and_reading_badly)
{
    _Alignas(8) char bytes[16] = {1};
    tl_set_last_error(NULL);
    CHECK(tl_memory_read(NULL, 0) == 0 && tl_last_error()[0] == '\0', "%s", tl_last_error());
    CHECK(tl_memory_read(NULL, 1) == 0 && strstr(tl_last_error(), "tl_memory_read: p = ") && strstr(tl_last_error(), "NULL"), "%s",
          tl_last_error());
    CHECK(tl_memory_read(bytes + 4, 8) == 0 && strstr(tl_last_error(), "not aligned"), "%s", tl_last_error());
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
    CHECK(strcmp(tl_isa_name(), "abacus") == 0 && strcmp(tl_isa_names(), want) == 0, "\"%s\"", tl_isa_names());
    isa_restore();
}

/* ---- traces ---- */

enum { B = 4, H = 4, HKV = 2, D = 16, BLOCK = 16, TABLE = 300, ROWS_EACH = 2, TOTAL = B * ROWS_EACH, CAPACITY = 400 };

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

/* Sequences of these lengths with two rows each; the first `shared` blocks of their tables are the same. `t` is zeroed. */
static void traced_make(struct traced *t, const int32_t *ctx, int shared, int threads)
{
    const tl_kv_cfg cfg = {B * TABLE, BLOCK, 1, HKV, D, TL_F16, TL_KV_FORMAT_V1};
    uint64_t rng = 5;
    CHECK_STATUS(tl_kv_pool_create(&cfg, &t->kv), TL_OK);
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
    t->args = (tl_paged_attn_args){.size = sizeof t->args, .view = &t->view, .q = t->q, .out = t->out, .q_token_stride = H * D,
                                   .q_head_stride = D, .out_token_stride = H * D, .out_head_stride = D, .B = B, .H = H,
                                   .cu_seqlens_q = t->cu, .ctx_lens = t->ctx, .block_tables = t->tables, .table_stride = TABLE,
                                   .scale = 0.25f, .tp = threads > 1 ? make_threads(threads) : NULL};
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
        CHECK(begin <= e->begin_ns && e->begin_ns <= e->end_ns && e->end_ns <= end, "event %lld: %lld .. %lld of %lld .. %lld", (long long)i,
              (long long)e->begin_ns, (long long)e->end_ns, (long long)begin, (long long)end);
        CHECK(e->worker >= 0 && e->worker < tl_pool_threads(t->args.tp), "event %lld: worker %d", (long long)i, (int)e->worker);
    }
    CHECK(t->events[t->trace.capacity].what == 0x77777777, "an event past the capacity");
}

/* How often each (row's token, KV head, split) was walked, by events of one kind. */
static void walked(const struct traced *t, int what, int counts[TOTAL][HKV][8])
{
    memset(counts, 0, sizeof(int[TOTAL][HKV][8]));
    for (int64_t i = 0; i < t->trace.n; i++) {
        const tl_trace_event *e = &t->events[i];
        for (int64_t token = e->first_token; e->what == what && token < e->first_token + e->n_tokens; token++) {
            CHECK(what != TL_TRACE_ROWS || token / ROWS_EACH == e->seq, "token %lld is not of sequence %lld", (long long)token, (long long)e->seq);
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
                    const int lo = window && window < n ? n - ROWS_EACH + 1 - window : 0; /* of the earlier of the two rows */
                    const int want = split >= lo / 1024 && split <= (n - 1) / 1024;
                    for (int head = 0; head < HKV; head++)
                        CHECK(counts[token][head][split] == want, "token %d, head %d, split %d: %d, want %d (window %d)", token, head, split,
                              counts[token][head][split], want, window);
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
                CHECK(own[token][head][split] == want_own && shared[token][head][split] == want_shared, "token %d, head %d, split %d: %d, %d",
                      token, head, split, own[token][head][split], shared[token][head][split]);
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
            CHECK(t->events[i].seq == -1 && t->events[i].kv_head == -1 && t->events[i].n_splits == 5, "merge %lld", (long long)i);
            for (int64_t token = t->events[i].first_token; token < t->events[i].first_token + t->events[i].n_tokens; token++)
                merged[token]++;
        }
    CHECK(merged[0] >= 1 && merged[1] >= 1, "%d, %d", merged[0], merged[1]);
    free(t->args.workspace);
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
        CHECK(t->trace.n == 9 && ((unsigned char *)t->out)[0] == 0x5A, "case %zu: something was written", i);
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
