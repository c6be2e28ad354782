/* SPDX-License-Identifier: MIT */
/* bench_rows.c: steps of tl_paged_attn_f32 that are no plain decode, each beside the step it is to
 * be compared with.
 *
 *     bench_rows [--quick] [--json FILE] [--isa NAME]
 *
 *   decode        one row a sequence, beside tl_paged_attn_decode_f32
 *   draft         five rows a sequence (the check of a draft), beside five calls of one row
 *   chunk         512 rows after 8k positions
 *   long          one sequence of 64k positions and one KV head on two threads: alone, shared
 *                 without and with a workspace
 *   prefix        32 sequences on one prefix of 4096 tokens with 128 of their own, beside the same
 *                 on separate copies
 *
 * Outputs of what is compared have the same bits, or the program ends with status 1 before anything
 * is timed. */
#include <math.h>
#include <stdbool.h>

#include "bench.h"
#include "tinyllm.h"
#include "turns.h"

struct step {
    tl_paged_attn_args args;
    tl_kv_pool *kv;
    uint32_t layer; /* of decode */
    bool plain;     /* tl_paged_attn_decode_f32 */
    int rows_each;  /* > 0: as so many calls of one row a sequence */
    double flops;
};

struct options {
    bool quick;
    FILE *json;
    const char *isa;
};

enum { MAX_ENTRANTS = 4 };
static struct entrant entrants[MAX_ENTRANTS];

static void expect(tl_status status)
{
    if (status != TL_OK) {
        fprintf(stderr, "bench: %s\n", tl_last_error());
        exit(2);
    }
}

/* ---- a pool and what is asked of it ---- */

struct memory {
    tl_kv_pool *kv;
    tl_kv_view view;
    uint32_t *ids; /* all blocks, in no order */
    int64_t H, Hkv, D;
};

static struct memory make_memory(int64_t H, int64_t Hkv, int64_t D, uint32_t n_blocks)
{
    static uint16_t noise[1 << 16];
    struct memory m = {.H = H, .Hkv = Hkv, .D = D};
    const tl_kv_cfg cfg = {n_blocks, 16, 1, (uint32_t)Hkv, (uint32_t)D, TL_F16, TL_KV_FORMAT_V1};
    expect(tl_kv_pool_create(&cfg, &m.kv));
    m.view.size = sizeof m.view;
    expect(tl_kv_pool_view(m.kv, 0, &m.view));
    m.ids = must(malloc(n_blocks * sizeof *m.ids));
    expect(tl_kv_alloc(m.kv, n_blocks, m.ids));
    for (uint32_t i = n_blocks; i > 1; i--) {
        const uint32_t k = (uint32_t)(bench_random() % i), id = m.ids[i - 1];
        m.ids[i - 1] = m.ids[k], m.ids[k] = id;
    }
    for (int i = 0; i < 1 << 16; i++)
        noise[i] = tl_f32_to_f16(bench_normal());
    char *data = tl_kv_block_ptr(m.kv, 0, 0, 0);
    const size_t total = n_blocks * tl_kv_block_bytes(m.kv);
    for (size_t at = 0, k = 0; at < total; at += 4096, k += 1237)
        memcpy(data + at, noise + k % (65536 - 2048), total - at < 4096 ? total - at : 4096);
    return m;
}

static void free_memory(struct memory *m)
{
    tl_kv_pool_destroy(m->kv);
    free(m->ids);
}

/* B sequences of ctx positions with `rows` query rows each, over tables of table_stride. */
static struct step make_step(const struct memory *m, int64_t B, int32_t ctx, int32_t rows,
                             const uint32_t *tables, int64_t table_stride, const float *q,
                             tl_pool *tp)
{
    const int64_t token = m->H * m->D;
    int32_t *cu = must(malloc((size_t)(2 * B + 1) * sizeof *cu)), *lens = cu + B + 1;
    for (int64_t s = 0; s <= B; s++)
        cu[s] = (int32_t)s * rows;
    for (int64_t s = 0; s < B; s++)
        lens[s] = ctx;
    return (struct step){
        .args = {.size = sizeof(tl_paged_attn_args),
                 .view = &m->view,
                 .q = q,
                 .out = must(malloc((size_t)(B * rows * token) * sizeof(float))),
                 .q_token_stride = token,
                 .q_head_stride = m->D,
                 .out_token_stride = token,
                 .out_head_stride = m->D,
                 .B = B,
                 .H = m->H,
                 .cu_seqlens_q = cu,
                 .ctx_lens = lens,
                 .block_tables = tables,
                 .table_stride = table_stride,
                 .scale = 1 / sqrtf((float)m->D),
                 .tp = tp},
        .kv = m->kv,
        .flops = 4.0 * (double)(B * rows * token) * ((double)ctx - (double)(rows - 1) / 2)};
}

static void free_step(struct step *s)
{
    free((void *)s->args.cu_seqlens_q), free(s->args.out), free(s->args.workspace);
}

static float *normal_rows(int64_t n)
{
    float *q = must(aligned_alloc(64, ((size_t)n * sizeof *q + 63) / 64 * 64));
    for (int64_t i = 0; i < n; i++)
        q[i] = bench_normal();
    return q;
}

static void run_step(void *ctx)
{
    struct step *s = ctx;
    const tl_paged_attn_args *a = &s->args;
    if (s->plain) {
        expect(tl_paged_attn_decode_f32(
            a->q, s->kv, s->layer, a->block_tables, (int32_t)a->table_stride, a->ctx_lens, a->out,
            a->B, a->H, a->view->n_kv_heads, a->view->head_dim_k, a->scale, a->window, a->tp));
        return;
    }
    if (s->rows_each == 0) {
        expect(tl_paged_attn_f32(a));
        return;
    }
    for (int i = 0; i < s->rows_each; i++) { /* one sequence only */
        const int32_t ctx_len = a->ctx_lens[0] - s->rows_each + 1 + i;
        tl_paged_attn_args one = *a;
        one.cu_seqlens_q = NULL, one.ctx_lens = &ctx_len;
        one.q += i * a->q_token_stride, one.out += i * a->out_token_stride;
        expect(tl_paged_attn_f32(&one));
    }
}

/* ---- a comparison ---- */

static void compare(const struct options *o, const char *name, struct step *step,
                    const char *const *what, int n, double seconds)
{
    tl_kernels_select(o->isa);
    for (int i = 0; i < n; i++) {
        const tl_paged_attn_args *a = &step[i].args;
        run_step(&step[i]);
        if (memcmp(step[0].args.out, a->out,
                   (size_t)(a->cu_seqlens_q[a->B] * a->out_token_stride) * sizeof(float)) != 0) {
            fprintf(stderr, "bench: %s: %s and %s differ\n", name, what[0], what[i]);
            exit(1);
        }
        entrants[i] = (struct entrant){
            .what = what[i], .run = run_step, .ctx = &step[i], .isa = o->isa, .calls = 1};
    }
    const struct tally t =
        take_turns(entrants, n, step[n - 1].args.tp, o->quick ? seconds / 5 : seconds);
    for (int i = 0; i < n; i++) {
        const struct spread at = spread_of(entrants[i].sample, t.kept);
        const double ratio = paired_ratio(entrants[0].sample, entrants[i].sample, t.kept);
        printf("%-34s %-26s %9.3f %9.3f %9.3f %8.1f %8.2f", i ? "" : name, what[i], at.median * 1e3,
               at.p10 * 1e3, at.p90 * 1e3, step[i].flops / at.median / 1e9, ratio);
        if (i == 0)
            printf(" %6d %7d%s", t.kept, t.dropped, busy(t));
        else
            printf("\n");
        if (o->json)
            fprintf(o->json,
                    "{\"case\":\"%s\",\"what\":\"%s\",\"median_us\":%.1f,\"p10_us\":%.1f,\"p90_"
                    "us\":%.1f,\"speed_up\":%.3f}\n",
                    name, what[i], at.median * 1e6, at.p10 * 1e6, at.p90 * 1e6, ratio);
        free_step(&step[i]);
    }
    fflush(stdout);
}

static void bench_rows(const struct options *o)
{
    struct memory m = make_memory(32, 8, 128, 8 * 4096 / 16 + 8704 / 16);
    float *q = normal_rows(512 * 32 * 128);
    struct step decode[] = {make_step(&m, 8, 4096, 1, m.ids, 256, q, NULL),
                            make_step(&m, 8, 4096, 1, m.ids, 256, q, NULL)};
    decode[0].plain = true;
    compare(o, "decode: B 8, ctx 4096, H 32/8", decode,
            (const char *const[]){"decode call", "rows call"}, 2, 2);
    struct step draft[] = {make_step(&m, 1, 4096, 5, m.ids, 256, q, NULL),
                           make_step(&m, 1, 4096, 5, m.ids, 256, q, NULL)};
    draft[0].rows_each = 5;
    compare(o, "draft: 5 rows at ctx 4096", draft, (const char *const[]){"five calls", "one call"},
            2, 2);
    struct step chunk[] = {make_step(&m, 1, 8704, 512, m.ids, 8704 / 16, q, NULL)};
    compare(o, "chunk: 512 rows after 8192", chunk, (const char *const[]){"one call"}, 1, 3);
    free(q), free_memory(&m);
}

static void bench_long(const struct options *o)
{
    struct memory m = make_memory(4, 1, 128, 65536 / 16);
    float *q = normal_rows(4 * 128);
    tl_pool *tp = NULL;
    expect(tl_pool_create(2, &tp));
    struct step s[] = {make_step(&m, 1, 65536, 1, m.ids, 4096, q, NULL),
                       make_step(&m, 1, 65536, 1, m.ids, 4096, q, tp),
                       make_step(&m, 1, 65536, 1, m.ids, 4096, q, tp)};
    s[2].args.workspace_bytes = tl_paged_attn_workspace(&s[2].args);
    s[2].args.workspace = must(malloc(s[2].args.workspace_bytes));
    compare(o, "long: ctx 65536, H 4/1", s,
            (const char *const[]){"1 thread", "2 threads", "2 threads and a workspace"}, 3, 2);
    tl_pool_destroy(tp);
    free(q), free_memory(&m);
}

static void bench_prefix(const struct options *o, int64_t Hkv)
{
    enum { B = 32, PREFIX = 4096 / 16, EACH = (4096 + 128) / 16 };
    struct memory m = make_memory(32, Hkv, 128, B * EACH);
    float *q = normal_rows(B * 32 * 128);
    uint32_t *shared = must(malloc(B * EACH * sizeof *shared));
    for (int s = 0; s < B; s++)
        for (int i = 0; i < EACH; i++) {
            const uint32_t own = m.ids[s * EACH + i], first = m.ids[i];
            shared[s * EACH + i] = i < PREFIX ? first : own;
            if (s > 0 && i < PREFIX)
                memcpy(tl_kv_block_ptr(m.kv, own, 0, 0), tl_kv_block_ptr(m.kv, first, 0, 0),
                       tl_kv_block_bytes(m.kv));
        }
    struct step s[] = {make_step(&m, B, 4096 + 128, 1, m.ids, EACH, q, NULL),
                       make_step(&m, B, 4096 + 128, 1, shared, EACH, q, NULL)};
    char name[64];
    snprintf(name, sizeof name, "prefix: 32 on 4096 tokens, H 32/%lld", (long long)Hkv);
    compare(o, name, s, (const char *const[]){"separate copies", "shared blocks"}, 2, 5);
    free(shared), free(q), free_memory(&m);
}

int main(int argc, char **argv)
{
    struct options o = {.quick = false};
    const char *isa[MAX_ISAS];
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--quick") == 0)
            o.quick = true;
        else if (strcmp(argv[i], "--json") == 0 && i + 1 < argc)
            o.json = must(fopen(argv[++i], "w"));
        else if (strcmp(argv[i], "--isa") == 0 && i + 1 < argc)
            o.isa = argv[++i];
    }
    if (!o.isa)
        o.isa = isa[isas_usable(isa) - 1];
    printf("%s; %s; %s\n", cpu_model(), __VERSION__, o.isa);
    printf("%-34s %-26s %9s %9s %9s %8s %8s %6s %7s\n", "", "", "median ms", "p10", "p90",
           "GFLOP/s", "times", "turns", "dropped");
    bench_rows(&o);
    bench_long(&o);
    bench_prefix(&o, 32);
    bench_prefix(&o, 8);
    if (o.json)
        fclose(o.json);
    return 0;
}
