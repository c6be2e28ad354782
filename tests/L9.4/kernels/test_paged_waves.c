/* SPDX-License-Identifier: MIT */
/* test_paged_waves.c: a workspace changes when splits are worked on, and a shared prefix how often
 * it is read; neither changes a bit. (Prefixes that are not neighbours': test_attn_crowds.c.) */
#include "attn_ref.h"

enum { H = 6, HKV = 2, D = 8, BLOCK = 16, MAX_CTX = 9600 };

struct waves_case {
    tl_kv_pool *kv;
    tl_kv_view view;
    tl_paged_attn_args args;
    int32_t cu[4], ctx[3];
    uint32_t *tables;
    float *q, *out, *lse, slopes[H], sinks[H];
};

static float small(uint64_t *rng)
{
    return (float)(rng_next(rng) % 4001) / 1000 - 2;
}

/* Three sequences of these lengths and rows; their blocks in falling order. */
static void waves_make(struct waves_case *w, const int32_t *ctx, const int32_t *rows, uint64_t seed)
{
    const int64_t most = MAX_CTX / BLOCK;
    uint64_t rng = seed;
    memset(w, 0, sizeof *w);
    const tl_kv_cfg cfg = {(uint32_t)(3 * most), BLOCK, 1, HKV, D, TL_F16, TL_KV_FORMAT_V1};
    CHECK_STATUS(tl_kv_pool_create(&cfg, &w->kv), TL_OK);
    w->view.size = sizeof w->view;
    CHECK_STATUS(tl_kv_pool_view(w->kv, 0, &w->view), TL_OK);
    uint16_t *data = tl_kv_block_ptr(w->kv, 0, 0, 0);
    static uint16_t noise[4099];
    for (int i = 0; i < 4099; i++)
        noise[i] = tl_f32_to_f16(small(&rng));
    for (size_t i = 0; i < 3 * (size_t)most * tl_kv_block_bytes(w->kv) / 2; i++)
        data[i] = noise[i % 4099];
    w->tables = must_alloc((size_t)(3 * most) * sizeof *w->tables);
    for (int64_t i = 0; i < 3 * most; i++)
        w->tables[i] = (uint32_t)(3 * most - 1 - i);
    for (int s = 0; s < 3; s++) {
        w->ctx[s] = ctx[s];
        w->cu[s + 1] = w->cu[s] + rows[s];
    }
    const int64_t n = w->cu[3] * H;
    w->q = floats(n * D), w->out = painted(n * D), w->lse = painted(n);
    for (int64_t i = 0; i < n * D; i++)
        w->q[i] = small(&rng);
    for (int h = 0; h < H; h++)
        w->slopes[h] = 0.001f * (float)(h + 1), w->sinks[h] = small(&rng);
    w->args = (tl_paged_attn_args){.size = sizeof w->args,
                                   .view = &w->view,
                                   .q = w->q,
                                   .out = w->out,
                                   .lse = w->lse,
                                   .q_token_stride = H * D,
                                   .q_head_stride = D,
                                   .out_token_stride = H * D,
                                   .out_head_stride = D,
                                   .B = 3,
                                   .H = H,
                                   .cu_seqlens_q = w->cu,
                                   .ctx_lens = w->ctx,
                                   .block_tables = w->tables,
                                   .table_stride = most,
                                   .scale = 0.2f};
}

static void waves_free(struct waves_case *w)
{
    const int64_t n = w->cu[3] * H;
    free(w->tables), free(w->q), painted_free(w->out, n * D), painted_free(w->lse, n);
    tl_kv_pool_destroy(w->kv);
}

TEST(a_workspace_changes_no_bit)
{
    static const int32_t ctx[][3] = {{9400, 5, 40},      {1, 1025, 9000}, {1024, 1023, 8193},
                                     {3000, 3000, 3000}, {9217, 0, 12},   {5000, 9, 2100},
                                     {3540, 5, 40}};
    /* the last: the rows of one sequence begin in two splits */
    static const int32_t rows[][3] = {{1, 1, 1},  {1, 3, 2}, {7, 0, 1}, {40, 1, 1},
                                      {1, 0, 1}, {1, 1, 1}, {40, 0, 0}};
    for (int i = 0; i < 7; i++)
        for (int options = 0; options < 4; options++) {
            struct waves_case w;
            waves_make(&w, ctx[i], rows[i], 900 + (uint64_t)i);
            const int64_t n = w.cu[3] * H;
            w.args.window = options & 1 ? 2500 : 0;
            if (options & 2)
                w.args.sink_logits = w.sinks, w.args.alibi_slopes = w.slopes,
                w.args.logits_softcap = 20;
            CHECK_STATUS(tl_paged_attn_f32(&w.args), TL_OK);
            float *want = floats(n * D), *want_lse = floats(n);
            memcpy(want, w.out, (size_t)(n * D) * sizeof *want),
                memcpy(want_lse, w.lse, (size_t)n * sizeof *want_lse);
            for (int threads = 1; threads <= 4; threads++) {
                tl_pool *tp = make_threads(threads);
                w.args.tp = tp;
                w.args.workspace_bytes = tl_paged_attn_workspace(&w.args);
                const size_t states = TL_ATTN_WAVE_SPLITS * (size_t)threads + 1,
                             formula = threads == 1 ? 0 : 4 * (size_t)n * (states * (2 + D) + 2);
                CHECK(w.args.workspace_bytes == formula, "%zu bytes, %zu by the header",
                      w.args.workspace_bytes, formula);
                const size_t room = w.args.workspace_bytes ? w.args.workspace_bytes : 4;
                w.args.workspace = guarded(room);
                memset(w.out, 0x5A, (size_t)(n * D) * sizeof *w.out),
                    memset(w.lse, 0x5A, (size_t)n * sizeof *w.lse);
                CHECK_STATUS(tl_paged_attn_f32(&w.args), TL_OK);
                CHECK_SAME(w.out, want, n * D, "case %d, options %d, %d threads", i, options,
                           threads);
                CHECK_SAME(w.lse, want_lse, n, "case %d, options %d, %d threads: lse", i, options,
                           threads);
                guarded_free(w.args.workspace, room);
                tl_pool_destroy(tp);
            }
            free(want), free(want_lse);
            waves_free(&w);
        }
}

TEST(a_workspace_that_cannot_serve_is_refused)
{
    struct waves_case w;
    waves_make(&w, (const int32_t[]){5000, 3, 4}, (const int32_t[]){1, 1, 1}, 77);
    tl_pool *tp = make_threads(2);
    w.args.tp = tp;
    const size_t bytes = tl_paged_attn_workspace(&w.args);
    char *room = must_alloc(bytes + 8);
    w.args.workspace = room, w.args.workspace_bytes = bytes - 1;
    CHECK_STATUS(tl_paged_attn_f32(&w.args), TL_EINVAL);
    CHECK(error_mentions((int64_t)bytes) && error_mentions((int64_t)bytes - 1), "%s",
          tl_last_error());
    w.args.workspace = room + 2, w.args.workspace_bytes = bytes;
    CHECK_STATUS(tl_paged_attn_f32(&w.args), TL_EINVAL);
    w.args.workspace = w.q;
    CHECK_STATUS(tl_paged_attn_f32(&w.args), TL_EINVAL);
    CHECK(strstr(tl_last_error(), "workspace") && strstr(tl_last_error(), "q"), "%s",
          tl_last_error());
    w.args.workspace = w.out;
    CHECK_STATUS(tl_paged_attn_f32(&w.args), TL_EINVAL);
    w.args.workspace = w.lse;
    CHECK_STATUS(tl_paged_attn_f32(&w.args), TL_EINVAL);
    CHECK(all_paint(w.out, w.cu[3] * H * D) && all_paint(w.lse, w.cu[3] * H),
          "outputs were written");
    w.args.workspace = room;
    CHECK_STATUS(tl_paged_attn_f32(&w.args), TL_OK);
    free(room);
    tl_pool_destroy(tp);
    waves_free(&w);
}

TEST(the_size_of_a_workspace_is_asked_for_with_care)
{
    struct waves_case w;
    waves_make(&w, (const int32_t[]){5, 3, 4}, (const int32_t[]){1, 1, 1}, 78);
    tl_pool *tp = make_threads(3);
    w.args.tp = tp;
    CHECK(tl_paged_attn_workspace(NULL) == 0 && strstr(tl_last_error(), "args"), "%s",
          tl_last_error());
    tl_paged_attn_args bad = w.args;
    bad.size--;
    CHECK(tl_paged_attn_workspace(&bad) == 0, "another size");
    bad = w.args, bad.H = 0;
    CHECK(tl_paged_attn_workspace(&bad) == 0, "no heads");
    bad = w.args, bad.B = -1;
    CHECK(tl_paged_attn_workspace(&bad) == 0, "B below 0");
    const int32_t below[] = {0, 0, 0, -1};
    bad = w.args, bad.cu_seqlens_q = below;
    CHECK(tl_paged_attn_workspace(&bad) == 0, "fewer rows than none");
    bad = w.args, bad.H = INT64_MAX / 8;
    CHECK(tl_paged_attn_workspace(&bad) == 0, "a size that wraps");
    tl_pool_destroy(tp);
    waves_free(&w);
}

/* out and lse of every sequence by a call of its own. */
static void alone(const struct waves_case *w, float *out, float *lse)
{
    for (int s = 0; s < 3; s++) {
        const int32_t rows = w->cu[s + 1] - w->cu[s], cu[] = {0, rows};
        tl_paged_attn_args one = w->args;
        one.B = 1, one.cu_seqlens_q = cu, one.ctx_lens += s,
        one.block_tables += s * one.table_stride, one.tp = NULL;
        one.q += (int64_t)w->cu[s] * H * D;
        one.out = out + (int64_t)w->cu[s] * H * D, one.lse = lse + (int64_t)w->cu[s] * H;
        CHECK_STATUS(tl_paged_attn_f32(&one), TL_OK);
    }
}

TEST(a_prefix_that_is_shared_is_read_once_and_changes_no_bit)
{
    static const int32_t ctx[][3] = {{5000, 4200, 4500},
                                     {2048, 2049, 2100},
                                     {1025, 3000, 1024},
                                     {3000, 10, 3000},
                                     {1030, 1040, 1034}};
    static const int32_t rows[][3] = {{1, 1, 1}, {1, 2, 1}, {1, 1, 1}, {1, 1, 1}, {3, 9, 11}};
    static const int shared[][2] = {{0, 0},   {63, 64},  {64, 64},   {64, 63},
                                    {65, 64}, {130, 70}, {129, 250}, {600, 600}};
    for (int i = 0; i < 5; i++)
        for (int k = 0; k < 8; k++)
            for (int options = 0; options < 4; options++) {
                struct waves_case w;
                waves_make(&w, ctx[i], rows[i], 1900 + (uint64_t)i);
                const int64_t n = w.cu[3] * H, stride = w.args.table_stride;
                for (int s = 1; s < 3; s++)
                    memcpy(w.tables + s * stride, w.tables + (s - 1) * stride,
                           (size_t)shared[k][s - 1] * sizeof *w.tables);
                w.args.window = options == 3 ? 1500 : 0;
                if (options & 1)
                    w.args.sink_logits = w.sinks, w.args.alibi_slopes = w.slopes,
                    w.args.logits_softcap = 20;
                float *want = floats(n * D), *want_lse = floats(n);
                alone(&w, want, want_lse);
                tl_pool *tp = options == 2 ? make_threads(3) : NULL;
                w.args.tp = tp;
                CHECK_STATUS(tl_paged_attn_f32(&w.args), TL_OK);
                CHECK_SAME(w.out, want, n * D, "case %d, shared %d and %d, options %d", i,
                           shared[k][0], shared[k][1], options);
                CHECK_SAME(w.lse, want_lse, n, "case %d, shared %d and %d, options %d: lse", i,
                           shared[k][0], shared[k][1], options);
                tl_pool_destroy(tp);
                free(want), free(want_lse);
                waves_free(&w);
            }
}

CHECK_MAIN()
