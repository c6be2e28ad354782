/* SPDX-License-Identifier: MIT */
/* bench_prefill.c: attention of many rows at once over contiguous K and V, causal, beside the fma
 * peak of the machine.
 *
 *     bench_prefill [--quick] [--json FILE] [--isa NAME[,NAME]] [--threads N] [H Hkv D Tq past]
 *
 * Tq rows stand at the end of past + Tq keys. Counted are the keys that a row sees: the causal
 * half. At a small size a plain C loop (two loops and expf for each row) stands beside them. Before
 * anything is timed every instruction set has the same bits, and rows spread over the whole output
 * are near the plain loop. */
#include <math.h>
#include <stdbool.h>

#include "bench.h"
#include "peak.h"
#include "tinyllm.h"
#include "turns.h"
#include "workload.h"

struct prompt {
    int64_t H, Hkv, D, Tq, past;
};

struct prefill {
    struct prompt p;
    float *q, *k, *v, *out;
    tl_arena *scratch;
    tl_pool *tp;
    double flops;
};

struct options {
    bool quick;
    FILE *json;
    int threads; /* 0: 1 and then 2 */
    const char *isa[MAX_ISAS];
    int n_isas;
    struct prompt given; /* H == 0: none */
};

enum { MAX_ENTRANTS = 6 };
static struct entrant entrants[MAX_ENTRANTS];

static float *normal_floats(int64_t n)
{
    float *x = must(aligned_alloc(64, ((size_t)n * sizeof *x + 63) / 64 * 64));
    for (int64_t i = 0; i < n; i++)
        x[i] = bench_normal();
    return x;
}

static void set_up_prompt(struct prefill *f, struct prompt p, tl_pool *tp)
{
    const int64_t keys = p.past + p.Tq;
    *f = (struct prefill){.p = p, .tp = tp};
    f->q = normal_floats(p.H * p.Tq * p.D), f->out = normal_floats(p.H * p.Tq * p.D);
    f->k = normal_floats(p.Hkv * keys * p.D), f->v = normal_floats(p.Hkv * keys * p.D);
    f->flops = 4.0 * (double)(p.H * p.D) * (double)p.Tq * ((double)p.past + ((double)p.Tq + 1) / 2);
    if (tl_arena_create(0, &f->scratch) != TL_OK)
        exit(2);
}

static void tear_down_prompt(struct prefill *f)
{
    tl_arena_destroy(f->scratch);
    free(f->q), free(f->k), free(f->v), free(f->out);
}

static void run_prefill(void *ctx)
{
    const struct prefill *f = ctx;
    const struct prompt *p = &f->p;
    if (tl_flash_attn_fwd_f32(f->q, f->k, f->v, f->out, NULL, 1, p->H, p->Hkv, p->Tq,
                              p->past + p->Tq, p->D, 1 / sqrtf((float)p->D), p->past, 1, 0, NULL, 0,
                              0, f->scratch, f->tp) != TL_OK) {
        fprintf(stderr, "bench: %s\n", tl_last_error());
        exit(2);
    }
}

/* Row i, of head i / Tq, by the plain loop. */
static void plain_prompt_row(const struct prefill *f, int64_t i, float *weights, float *out)
{
    const struct prompt *p = &f->p;
    const int64_t kv_head = i / p->Tq / (p->H / p->Hkv), at = kv_head * (p->past + p->Tq) * p->D;
    plain_row(f->q + i * p->D, f->k + at, f->v + at, weights, out, p->past + i % p->Tq + 1, p->D);
}

static void plain_rows(void *ctx, int64_t lo, int64_t hi, int worker)
{
    (void)worker;
    const struct prefill *f = ctx;
    float *weights = must(malloc((size_t)(f->p.past + f->p.Tq) * sizeof *weights));
    for (int64_t i = lo; i < hi; i++)
        plain_prompt_row(f, i, weights, f->out + i * f->p.D);
    free(weights);
}

static void run_plain_rows(void *ctx)
{
    struct prefill *f = ctx;
    tl_parallel_for(f->tp, f->p.H * f->p.Tq, 16, plain_rows, f);
}

static void check_rows(const struct prefill *f, const char *isa)
{
    const int64_t rows = f->p.H * f->p.Tq, D = f->p.D;
    float *weights = must(malloc((size_t)(f->p.past + f->p.Tq) * sizeof *weights)),
          *expected = must(malloc((size_t)D * sizeof *expected));
    for (int64_t i = 0; i < rows; i += i < 64 ? 1 : 1 + (int64_t)(bench_random() % 499)) {
        plain_prompt_row(f, i, weights, expected);
        for (int64_t d = 0; d < D; d++)
            if (!(fabsf(expected[d] - f->out[i * D + d]) < 1e-4f))
                refuse("plain", isa, i * D + d, expected[d], f->out[i * D + d]);
    }
    free(weights), free(expected);
}

static void check_prefill(struct prefill *f, const struct options *o)
{
    const int64_t count = f->p.H * f->p.Tq * f->p.D;
    float *first = must(malloc((size_t)count * sizeof *first));
    for (int i = 0; i < o->n_isas; i++) {
        tl_kernels_select(o->isa[i]);
        memset(f->out, 0xFF, (size_t)count * sizeof *f->out);
        run_prefill(f);
        check_rows(f, o->isa[i]);
        if (i == 0)
            memcpy(first, f->out, (size_t)count * sizeof *first);
        for (int64_t k = 0; k < count; k++)
            if (memcmp(&first[k], &f->out[k], sizeof(float)) != 0)
                refuse(o->isa[0], o->isa[i], k, first[k], f->out[k]);
    }
    free(first);
}

static void print_prefill(const struct options *o, const struct prefill *f, int i, int n,
                          struct tally t, double peak)
{
    const struct spread at = spread_of(entrants[i].sample, t.kept);
    const double over_plain = entrants[n - 1].run == run_plain_rows
                                  ? paired_ratio(entrants[n - 1].sample, entrants[i].sample, t.kept)
                                  : 0;
    char name[64];
    snprintf(name, sizeof name, "H %2lld/%-2lld D %-3lld rows %-4lld after %lld", (long long)f->p.H,
             (long long)f->p.Hkv, (long long)f->p.D, (long long)f->p.Tq, (long long)f->p.past);
    printf("%-36s %-7s %10.2f %10.2f %10.2f %7.1f", i ? "" : name, entrants[i].what,
           at.median * 1e3, at.p10 * 1e3, at.p90 * 1e3, f->flops / at.median / 1e9);
    printf(peak > 0 ? " %6.0f%%" : "       -", 100 * f->flops / at.median / peak);
    printf(over_plain > 0 ? " %7.2f" : "       -", over_plain);
    if (i == 0)
        printf(" %6d %7d%s", t.kept, t.dropped, busy(t));
    else
        printf("\n");
    if (o->json)
        fprintf(o->json,
                "{\"H\":%lld,\"Hkv\":%lld,\"D\":%lld,\"Tq\":%lld,\"past\":%lld,\"threads\":%d,"
                "\"what\":\"%s\",\"median_us\":%.1f,"
                "\"p10_us\":%.1f,\"p90_us\":%.1f,\"gflop_s\":%.2f,\"of_peak\":%.4f,\"over_plain\":%"
                ".3f}\n",
                (long long)f->p.H, (long long)f->p.Hkv, (long long)f->p.D, (long long)f->p.Tq,
                (long long)f->p.past, tl_pool_threads(f->tp), entrants[i].what, at.median * 1e6,
                at.p10 * 1e6, at.p90 * 1e6, f->flops / at.median / 1e9,
                peak > 0 ? f->flops / at.median / peak : 0, over_plain);
}

static void bench_prompt(const struct options *o, struct prompt p, tl_pool *tp, const double *peak)
{
    struct prefill f;
    int n = 0;
    set_up_prompt(&f, p, tp);
    check_prefill(&f, o);
    for (int i = 0; i < o->n_isas; i++)
        entrants[n++] = (struct entrant){
            .what = o->isa[i], .run = run_prefill, .ctx = &f, .isa = o->isa[i], .calls = 1};
    if (p.past + p.Tq <= 128)
        entrants[n++] =
            (struct entrant){.what = "plain", .run = run_plain_rows, .ctx = &f, .calls = 1};
    const struct tally t = take_turns(entrants, n, tp, o->quick ? 0.5 : 3);
    for (int i = 0; i < n; i++)
        print_prefill(o, &f, i, n, t, i < o->n_isas ? peak[i] : 0);
    fflush(stdout);
    tear_down_prompt(&f);
}

static void bench_threads(const struct options *o, int threads)
{
    static const struct prompt prompts[] = {
        {32, 8, 128, 128, 0}, {32, 8, 128, 512, 0}, {32, 8, 128, 2048, 0}, {32, 8, 128, 512, 2048},
        {9, 3, 64, 128, 0},   {9, 3, 64, 512, 0},   {9, 3, 64, 2048, 0},   {9, 3, 64, 512, 2048}};
    double peak[MAX_ISAS];
    tl_pool *tp = NULL;
    if (threads > 1 && tl_pool_create(threads, &tp) != TL_OK)
        exit(2);
    printf("\n%d thread%s; f32 fma peak:", threads, threads > 1 ? "s" : "");
    for (int i = 0; i < o->n_isas; i++) {
        peak[i] = fma_peak(o->isa[i], tp);
        printf(" %s %.1f", o->isa[i], peak[i] / 1e9);
    }
    printf(" GFLOP/s\n%-36s %-7s %10s %10s %10s %7s %7s %7s %6s %7s\n", "", "", "median ms", "p10",
           "p90", "GFLOP/s", "of fma", "x plain", "turns", "dropped");
    for (size_t i = 0; i < (o->given.H ? 1 : sizeof prompts / sizeof *prompts); i++)
        bench_prompt(o, o->given.H ? o->given : prompts[i], tp, peak);
    tl_pool_destroy(tp);
}

static struct options options_of(int argc, char **argv)
{
    struct options o = {.n_isas = 0};
    int64_t dims[5] = {0};
    int n_dims = 0;
    for (int i = 1; i < argc; i++) {
        const bool has_value = i + 1 < argc;
        if (strcmp(argv[i], "--quick") == 0)
            o.quick = true;
        else if (strcmp(argv[i], "--json") == 0 && has_value)
            o.json = must(fopen(argv[++i], "w"));
        else if (strcmp(argv[i], "--threads") == 0 && has_value)
            o.threads = atoi(argv[++i]);
        else if (strcmp(argv[i], "--isa") == 0 && has_value)
            o.n_isas = isas_named(o.isa, argv[++i]);
        else if (n_dims < 5)
            dims[n_dims++] = atoll(argv[i]);
    }
    if (n_dims == 5)
        o.given = (struct prompt){dims[0], dims[1], dims[2], dims[3], dims[4]};
    if (o.n_isas == 0)
        o.n_isas = isas_usable(o.isa);
    return o;
}

int main(int argc, char **argv)
{
    const struct options o = options_of(argc, argv);
    printf("%s; %s\n", cpu_model(), __VERSION__);
    for (int threads = o.threads ? o.threads : 1; threads <= (o.threads      ? o.threads
                                                              : n_cpus() > 1 ? 2
                                                                             : 1);
         threads++)
        bench_threads(&o, threads);
    if (o.json)
        fclose(o.json);
    return 0;
}
