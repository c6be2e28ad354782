/* SPDX-License-Identifier: MIT */
/* bench_decode.c: one decode step beside the roof of the memory and a plain C loop, interleaved in one process.
 *
 *     bench_decode [--quick] [--cached] [--plain] [--json FILE] [--isa NAME[,NAME]] [--threads N] [B ctx H Hkv D [b]]
 *
 * roof: loads every byte of K and V once, in the same order, the next block prefetched; nothing faster can read them.
 * plain: what a careful user writes without a library: gather the sequence, two loops and expf. The pool has as many
 * layers as make it four times the last-level cache, and every repetition takes the next layer, so K and V come from
 * memory. Outputs are compared before anything is timed. Figures are medians; repetitions during which two threads did
 * not run 1.4 times as fast as one are thrown away and counted. */
#include <math.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <unistd.h>

#include "bench.h"
#include "kernels/kernels.h"
#include "tinyllm.h"

struct shape {
    int64_t B, ctx, H, Hkv, D, b;
};

struct setup {
    struct shape s;
    tl_kv_pool *kv;
    uint32_t n_layers, layer;
    int32_t max_blocks, *ctx_lens;
    uint32_t *tables;
    float *q, *out;
    double bytes, flops;
};

/* ---- what is compared ---- */

static _Atomic uint64_t keep; /* so that the loads of the roof are not removed */

#if defined(__x86_64__)
#define WIDE_LOADS __attribute__((target("avx2")))
#else
#define WIDE_LOADS
#endif

WIDE_LOADS static void read_slab(const char *p, const char *next, size_t bytes, uint64_t *sum)
{
    typedef uint64_t vec __attribute__((vector_size(32), aligned(2), may_alias));
    vec s = {0}, t = {0};
    for (size_t i = 0; i + 64 <= bytes; i += 64) {
        __builtin_prefetch(next + i, 0, 2);
        s ^= *(const vec *)(p + i);
        t ^= *(const vec *)(p + i + 32);
    }
    s ^= t;
    for (int i = 0; i < 4; i++)
        *sum ^= s[i];
}

static void roof_units(void *ctx, int64_t lo, int64_t hi, int worker)
{
    (void)worker;
    const struct setup *u = ctx;
    const size_t run = (size_t)(u->s.b * u->s.D) * 2;
    uint64_t sum = 0;
    for (int64_t unit = lo; unit < hi; unit++) {
        const uint32_t *table = u->tables + unit / u->s.Hkv * u->max_blocks;
        for (int32_t i = 0; i < u->max_blocks; i++)
            for (int is_v = 0; is_v < 2; is_v++) {
                const uint32_t next = table[i + 1 < u->max_blocks ? i + 1 : i];
                const size_t head = (size_t)(unit % u->s.Hkv) * run;
                read_slab((char *)tl_kv_block_ptr(u->kv, table[i], u->layer, is_v) + head,
                          (char *)tl_kv_block_ptr(u->kv, next, u->layer, is_v) + head, run, &sum);
            }
    }
    atomic_fetch_xor(&keep, sum);
}

static void plain_units(void *ctx, int64_t lo, int64_t hi, int worker)
{
    (void)worker;
    const struct setup *u = ctx;
    const int64_t D = u->s.D, n = u->s.ctx, group = u->s.H / u->s.Hkv;
    float *k = must(malloc((size_t)(2 * n * D + n) * sizeof *k)), *v = k + n * D, *p = v + n * D;
    for (int64_t unit = lo; unit < hi; unit++) {
        const uint32_t *table = u->tables + unit / u->s.Hkv * u->max_blocks;
        for (int64_t j = 0; j < n; j++) {
            const int64_t at = (unit % u->s.Hkv * u->s.b + j % u->s.b) * D;
            const uint16_t *ks = tl_kv_block_ptr(u->kv, table[j / u->s.b], u->layer, 0);
            const uint16_t *vs = tl_kv_block_ptr(u->kv, table[j / u->s.b], u->layer, 1);
            tl_f16_to_f32_n(ks + at, k + j * D, D);
            tl_f16_to_f32_n(vs + at, v + j * D, D);
        }
        for (int64_t g = 0; g < group; g++) {
            const int64_t row = unit / u->s.Hkv * u->s.H + unit % u->s.Hkv * group + g;
            const float *q = u->q + row * D;
            float *out = u->out + row * D, max = -INFINITY, sum = 0;
            for (int64_t j = 0; j < n; j++) {
                float dot = 0;
                for (int64_t d = 0; d < D; d++)
                    dot += q[d] * k[j * D + d];
                p[j] = dot / sqrtf((float)D);
                max = fmaxf(max, p[j]);
            }
            memset(out, 0, (size_t)D * sizeof *out);
            for (int64_t j = 0; j < n; j++) {
                p[j] = expf(p[j] - max);
                sum += p[j];
                for (int64_t d = 0; d < D; d++)
                    out[d] += p[j] * v[j * D + d];
            }
            for (int64_t d = 0; d < D; d++)
                out[d] /= sum;
        }
    }
    free(k);
}

static void step(struct setup *u, const char *what, tl_pool *tp)
{
    if (strcmp(what, "roof") == 0) {
        tl_parallel_for(tp, u->s.B * u->s.Hkv, 1, roof_units, u);
    } else if (strcmp(what, "plain") == 0) {
        tl_parallel_for(tp, u->s.B * u->s.Hkv, 1, plain_units, u);
    } else {
        tl_kernels_select(what);
        if (tl_paged_attn_decode_f32(u->q, u->kv, u->layer, u->tables, u->max_blocks, u->ctx_lens, u->out, u->s.B, u->s.H, u->s.Hkv,
                                     u->s.D, 1 / sqrtf((float)u->s.D), 0, tp) != TL_OK) {
            fprintf(stderr, "bench: %s\n", tl_last_error());
            exit(2);
        }
    }
}

/* ---- inputs ---- */

static struct setup set_up(struct shape s, bool cached)
{
    struct setup u = {.s = s, .max_blocks = (int32_t)((s.ctx + s.b - 1) / s.b)};
    u.bytes = 4.0 * (double)(s.B * s.ctx * s.Hkv * s.D);
    u.flops = 4.0 * (double)(s.B * s.ctx * s.H * s.D);
    const long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
    const double want = 4.0 * (double)(cache > 0 ? cache : 32 << 20);
    u.n_layers = cached ? 1 : (uint32_t)(want / u.bytes) + 1;
    const uint32_t n_blocks = (uint32_t)(s.B * u.max_blocks);
    const tl_kv_cfg cfg = {n_blocks, (uint32_t)s.b, u.n_layers, (uint32_t)s.Hkv, (uint32_t)s.D, TL_F16, TL_KV_FORMAT_V1};
    u.tables = must(malloc(n_blocks * sizeof *u.tables));
    u.ctx_lens = must(malloc((size_t)s.B * sizeof *u.ctx_lens));
    u.q = must(malloc((size_t)(s.B * s.H * s.D) * sizeof *u.q));
    u.out = must(malloc((size_t)(s.B * s.H * s.D) * sizeof *u.out));
    if (tl_kv_pool_create(&cfg, &u.kv) != TL_OK || tl_kv_alloc(u.kv, n_blocks, u.tables) != TL_OK) {
        fprintf(stderr, "bench: %s\n", tl_last_error());
        exit(2);
    }
    for (uint32_t i = n_blocks; i > 1; i--) { /* blocks in no order */
        const uint32_t k = (uint32_t)(bench_random() % i), id = u.tables[i - 1];
        u.tables[i - 1] = u.tables[k], u.tables[k] = id;
    }
    static uint16_t noise[1 << 16];
    for (int i = 0; i < 1 << 16; i++)
        noise[i] = tl_f32_to_f16(bench_normal());
    char *data = tl_kv_block_ptr(u.kv, 0, 0, 0);
    const size_t total = n_blocks * tl_kv_block_bytes(u.kv);
    for (size_t at = 0, k = 0; at < total; at += 4096, k += 1237)
        memcpy(data + at, noise + k % (65536 - 2048), total - at < 4096 ? total - at : 4096);
    for (int64_t i = 0; i < s.B * s.H * s.D; i++)
        u.q[i] = bench_normal();
    for (int64_t i = 0; i < s.B; i++)
        u.ctx_lens[i] = (int32_t)s.ctx;
    return u;
}

static void tear_down(struct setup *u)
{
    tl_kv_pool_destroy(u->kv);
    free(u->tables), free(u->ctx_lens), free(u->q), free(u->out);
}

/* Every instruction set has the same bits, and they are near the plain loop. */
static void check_outputs(struct setup *u, const char *const *what, int n)
{
    const size_t count = (size_t)(u->s.B * u->s.H * u->s.D);
    float *first = must(malloc(count * sizeof *first));
    step(u, what[1], NULL); /* what[0] is the roof */
    memcpy(first, u->out, count * sizeof *first);
    for (int i = 2; i < n; i++) {
        const bool plain = strcmp(what[i], "plain") == 0;
        step(u, what[i], NULL);
        for (size_t k = 0; k < count; k++)
            if (plain ? !(fabsf(first[k] - u->out[k]) < 1e-4f) : memcmp(&first[k], &u->out[k], sizeof(float)) != 0) {
                fprintf(stderr, "bench: %s and %s differ at %zu: %g, %g\n", what[1], what[i], k, (double)first[k], (double)u->out[k]);
                exit(1);
            }
    }
    free(first);
}

/* ---- two cores? ---- */

static double probe_seconds[2];

static void probe(void *ctx, int64_t lo, int64_t hi, int worker)
{
    (void)ctx, (void)hi, (void)worker;
    const double start = now_s();
    volatile uint64_t sink;
    uint64_t x = 1;
    for (int i = 0; i < 400000; i++) /* a millisecond: waking a worker must not show */
        x = x * 6364136223846793005u + 1442695040888963407u;
    sink = x;
    (void)sink;
    probe_seconds[lo] = now_s() - start;
}

static bool two_cores(tl_pool *tp)
{
    double alone = 1e9;
    for (int i = 0; i < 3; i++) {
        probe(NULL, 0, 1, 0);
        alone = probe_seconds[0] < alone ? probe_seconds[0] : alone;
    }
    const double start = now_s();
    tl_parallel_for(tp, 2, 1, probe, NULL);
    return 2 * alone / (now_s() - start) >= 1.4;
}

/* ---- a shape ---- */

enum { MAX_WHAT = 6, MAX_REPS = 400 };

static void bench_shape(struct shape s, const char *const *what, int n_what, int threads, bool quick, bool cached, FILE *json)
{
    static double sample[MAX_WHAT][MAX_REPS];
    struct setup u = set_up(s, cached);
    tl_pool *tp = NULL;
    if (threads > 1 && tl_pool_create(threads, &tp) != TL_OK)
        exit(2);
    check_outputs(&u, what, n_what);
    int reps = (int)((quick ? 1.5e9 : 6e9) / u.bytes), kept = 0, dropped = 0;
    reps = reps < 9 ? 9 : reps > MAX_REPS ? MAX_REPS : reps;
    for (int i = -1; i < reps; i++) {
        double t[MAX_WHAT];
        if (tp && !two_cores(tp) && dropped++ < 2 * reps) {
            i--;
            continue;
        }
        for (int w = 0; w < n_what; w++) {
            u.layer = (u.layer + 1) % u.n_layers;
            const double start = now_s();
            step(&u, what[w], tp);
            t[w] = now_s() - start;
        }
        if (i >= 0) {
            for (int w = 0; w < n_what; w++)
                sample[w][kept] = t[w];
            kept++;
        }
    }
    double roof = 0;
    printf("B %lld, ctx %lld, H %lld/%lld, D %lld, b %lld, %d thread%s (%d repetitions, %d dropped)\n", (long long)s.B, (long long)s.ctx,
           (long long)s.H, (long long)s.Hkv, (long long)s.D, (long long)s.b, threads, threads > 1 ? "s" : "", kept, dropped);
    for (int w = 0; w < n_what; w++) {
        const double p10 = quantile(sample[w], kept, 0.1), p90 = quantile(sample[w], kept, 0.9), median = quantile(sample[w], kept, 0.5);
        if (strcmp(what[w], "roof") == 0)
            roof = median;
        printf("  %-7s %10.1f us  (p10 %10.1f, p90 %10.1f)  %6.2f GB/s  %6.1f GFLOP/s", what[w], median * 1e6, p10 * 1e6, p90 * 1e6,
               u.bytes / median / 1e9, strcmp(what[w], "roof") ? u.flops / median / 1e9 : 0.0);
        printf(roof > 0 ? "  %3.0f%% of roof\n" : "\n", 100 * roof / median);
        if (json)
            fprintf(json, "{\"B\":%lld,\"ctx\":%lld,\"H\":%lld,\"Hkv\":%lld,\"D\":%lld,\"b\":%lld,\"threads\":%d,\"what\":\"%s\","
                          "\"median_us\":%.3f,\"p10_us\":%.3f,\"p90_us\":%.3f,\"gb_s\":%.3f,\"of_roof\":%.4f}\n",
                    (long long)s.B, (long long)s.ctx, (long long)s.H, (long long)s.Hkv, (long long)s.D, (long long)s.b, threads, what[w],
                    median * 1e6, p10 * 1e6, p90 * 1e6, u.bytes / median / 1e9, roof > 0 ? roof / median : 0.0);
    }
    fflush(stdout);
    tl_pool_destroy(tp);
    tear_down(&u);
}

int main(int argc, char **argv)
{
    const char *what[MAX_WHAT] = {"roof"};
    int n_what = 1, threads = 0, n_dims = 0;
    int64_t dims[6] = {0, 0, 0, 0, 0, 16};
    bool quick = false, plain = false, cached = false;
    FILE *json = NULL;
    char *isas = NULL;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--quick") == 0)
            quick = true;
        else if (strcmp(argv[i], "--cached") == 0)
            cached = true;
        else if (strcmp(argv[i], "--plain") == 0)
            plain = true;
        else if (strcmp(argv[i], "--json") == 0 && i + 1 < argc)
            json = fopen(argv[++i], "w");
        else if (strcmp(argv[i], "--isa") == 0 && i + 1 < argc)
            isas = argv[++i];
        else if (strcmp(argv[i], "--threads") == 0 && i + 1 < argc)
            threads = atoi(argv[++i]);
        else if (n_dims < 6)
            dims[n_dims++] = atoll(argv[i]);
    }
    const struct tl_kernels *table;
    if (isas)
        for (char *name = strtok(isas, ","); name && n_what < MAX_WHAT - 1; name = strtok(NULL, ","))
            what[n_what++] = name;
    else
        for (int i = 0; (table = tl_kernels_usable(i)) && n_what < MAX_WHAT - 1; i++)
            if (strcmp(table->name, "scalar") != 0)
                what[n_what++] = table->name;
    if (plain)
        what[n_what++] = "plain";
    printf("%s; %s\n", cpu_model(), __VERSION__);
    static const struct shape shapes[] = {
        {1, 4096, 32, 32, 128, 16}, {1, 1024, 32, 8, 128, 16}, {1, 4096, 32, 8, 128, 16}, {1, 16384, 32, 8, 128, 16},
        {8, 4096, 32, 8, 128, 16}, {32, 1024, 32, 8, 128, 16}, {8, 2048, 9, 3, 64, 16}, {1, 4096, 64, 8, 128, 16},
    };
    const int n_shapes = n_dims >= 5 ? 1 : (int)(sizeof shapes / sizeof shapes[0]);
    for (int t = threads ? threads : 1; t <= (threads ? threads : 2); t++)
        for (int i = 0; i < n_shapes; i++) {
            const struct shape s = n_dims >= 5 ? (struct shape){dims[0], dims[1], dims[2], dims[3], dims[4], dims[5]} : shapes[i];
            bench_shape(s, what, n_what, t, quick, cached, json);
        }
    if (json)
        fclose(json);
    return 0;
}
