/* SPDX-License-Identifier: MIT */
/* bench_formats.c: a decode step over K and V of every format, from memory, each beside f16.
 *
 *     bench_formats [--quick] [--cached] [--json FILE] [--isa NAME[,NAME]] [--threads N]
 *                   [--shape 32/8]
 *
 * --cached takes the same K and V with every call: with --shape 4/1, say, they stay in the cache.
 *
 * The same values in each: stored by tl_kv_write_slots in blocks laid out as a pool's. Before
 * anything is timed the outputs of a format must have the same bits on every instruction set, and
 * be as near to those of f32 as the format allows. GB/s are of the format's own bytes, scales
 * included; a ratio is the median over turns of the time by that of f16 in the same turn. */
#include <math.h>
#include <sys/mman.h>
#include <unistd.h>

#include "bench.h"
#include "tinyllm.h"
#include "turns.h"

static const struct format {
    const char *name;
    int32_t dtype;
    int64_t elem, scale; /* bytes of an element, and of a row's scale */
    float near;          /* bound of what outputs of values of size 1 differ by */
} formats[] = {{"f16", TL_F16, 2, 0, 2e-3f},
               {"bf16", TL_BF16, 2, 0, 2e-2f},
               {"f32", TL_F32, 4, 0, 0},
               {"int8", TL_I8, 1, 4, 3e-2f},
               {"e4m3", TL_F8_E4M3, 1, 4, 1.5e-1f}};
enum { N_FORMATS = sizeof formats / sizeof *formats, F32 = 2, BLOCK = 16, CTX = 4096 };

static const struct shape {
    const char *name;
    int64_t H, Hkv, D;
} shapes[] = {{"32/32", 32, 32, 128}, {"32/8", 32, 8, 128}, {"9/3", 9, 3, 64}, {"64/8", 64, 8, 128},
              {"1/1", 1, 1, 128}, {"4/1", 4, 1, 128}, {"8/1", 8, 1, 128}};
/* the last ones only where they are asked for */
enum { N_SHAPES = sizeof shapes / sizeof *shapes, N_ALWAYS = 4 };

struct options {
    bool quick, cached;
    FILE *json;
    const char *isa[MAX_ISAS], *shape;
    int n_isas, threads;
};

/* One format's memory, cut into steps of CTX positions that calls take in turn. */
struct memory {
    const struct format *format;
    char *data;
    size_t bytes;
    tl_kv_view view;
    uint32_t *tables; /* [n_steps][CTX / BLOCK] */
    int64_t n_steps, step;
    tl_paged_attn_args args;
};

static const int32_t ctx_len[] = {CTX}, cu_seqlens[] = {0, 1};
static struct entrant entrants[N_FORMATS];

static void expect(tl_status status)
{
    if (status != TL_OK) {
        fprintf(stderr, "bench: %s\n", tl_last_error());
        exit(2);
    }
}

static int64_t strip_bytes(const struct format *f, int64_t D)
{
    return (BLOCK * D * f->elem + 3) / 4 * 4 + BLOCK * f->scale;
}

static double step_bytes(const struct format *f, const struct shape *s)
{
    return 2.0 * (double)(CTX / BLOCK * s->Hkv * strip_bytes(f, s->D));
}

/* Blocks as a pool of one layer has them: [2][Hkv] strips of elements and then scales. */
static void lay_out(struct memory *m, const struct shape *s)
{
    const struct format *f = m->format;
    const int64_t strip = strip_bytes(f, s->D), slab = s->Hkv * strip,
                  n_blocks = m->n_steps * CTX / BLOCK;
    m->bytes = (size_t)(2 * slab * n_blocks);
    m->data = mmap(NULL, m->bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (m->data == MAP_FAILED)
        must(NULL);
    (void)madvise(m->data, m->bytes, MADV_HUGEPAGE);
    m->view = (tl_kv_view){.size = sizeof m->view, .k = m->data, .v = m->data + slab,
                           .dtype = f->dtype, .n_blocks = n_blocks, .block_tokens = BLOCK,
                           .n_kv_heads = s->Hkv, .head_dim_k = s->D, .head_dim_v = s->D,
                           .k_block_stride = 2 * slab / f->elem, .k_head_stride = strip / f->elem,
                           .k_token_stride = s->D, .v_block_stride = 2 * slab / f->elem,
                           .v_head_stride = strip / f->elem, .v_token_stride = s->D};
    if (!f->scale)
        return;
    const int64_t codes = strip - BLOCK * f->scale;
    m->view.k_scale = (const float *)(const void *)(m->data + codes);
    m->view.v_scale = (const float *)(const void *)(m->data + slab + codes);
    m->view.k_scale_block_stride = m->view.v_scale_block_stride = 2 * slab / 4;
    m->view.k_scale_head_stride = m->view.v_scale_head_stride = strip / 4;
    m->view.k_scale_token_stride = m->view.v_scale_token_stride = 1;
}

/* The same values in every format: a window on noise, which moves from block to block. */
static void fill(struct memory *m, const float *noise, int64_t n_noise, const struct shape *s)
{
    int64_t slots[BLOCK];
    const int64_t token = s->Hkv * s->D;
    for (int64_t block = 0; block < m->view.n_blocks; block++) {
        const int64_t room = n_noise - BLOCK * token;
        const float *k = noise + block * 1237 % room, *v = noise + block * 4057 % room;
        for (int i = 0; i < BLOCK; i++)
            slots[i] = block * BLOCK + i;
        expect(tl_kv_write_slots(&m->view, slots, BLOCK, k, v, TL_F32, token, s->D, token, s->D));
    }
}

static void make_memory(struct memory *m, const struct format *f, const struct shape *s,
                        int64_t n_steps, const uint32_t *tables, const float *q, tl_pool *tp)
{
    *m = (struct memory){.format = f, .n_steps = n_steps};
    lay_out(m, s);
    m->tables = (uint32_t *)tables;
    m->args = (tl_paged_attn_args){.size = sizeof m->args, .view = &m->view, .q = q,
                                   .out = must(malloc((size_t)(s->H * s->D) * sizeof(float))),
                                   .q_token_stride = s->H * s->D, .q_head_stride = s->D,
                                   .out_token_stride = s->H * s->D, .out_head_stride = s->D, .B = 1,
                                   .H = s->H, .cu_seqlens_q = cu_seqlens, .ctx_lens = ctx_len,
                                   .table_stride = CTX / BLOCK, .scale = 1 / sqrtf((float)s->D),
                                   .tp = tp};
}

static void run_step(void *ctx)
{
    struct memory *m = ctx;
    m->args.block_tables = m->tables + m->step * (CTX / BLOCK);
    m->step = (m->step + 1) % m->n_steps;
    expect(tl_paged_attn_f32(&m->args));
}

static void check_outputs(struct memory *m, const struct shape *s, const struct options *o)
{
    const int64_t n = s->H * s->D;
    float *first = must(malloc((size_t)n * sizeof *first));
    for (int f = 0; f < N_FORMATS; f++)
        for (int i = 0; i < o->n_isas; i++) {
            tl_kernels_select(o->isa[i]);
            m[f].step = m[F32].step = 0;
            run_step(&m[F32]);
            run_step(&m[f]);
            if (i == 0)
                memcpy(first, m[f].args.out, (size_t)n * sizeof *first);
            for (int64_t d = 0; d < n; d++) {
                const float got = m[f].args.out[d], exact = m[F32].args.out[d];
                if (memcmp(&got, &first[d], sizeof got) != 0 ||
                    !(fabsf(got - exact) <= m[f].format->near)) {
                    fprintf(stderr, "bench: %s on %s: %g at %lld, f32 %g\n", m[f].format->name,
                            o->isa[i], (double)got, (long long)d, (double)exact);
                    exit(1);
                }
            }
        }
    free(first);
}

static void show(const struct shape *s, const char *isa, const struct options *o,
                 const struct tally t)
{
    for (int f = 0; f < N_FORMATS; f++) {
        const struct spread of = spread_of(entrants[f].sample, t.kept);
        const double ratio = paired_ratio(entrants[f].sample, entrants[0].sample, t.kept),
                     bytes = step_bytes(&formats[f], s);
        printf("%-6s D %3lld  %-7s %d  %-5s %8.1f us (%.1f - %.1f) %6.1f GB/s  %.2f of f16%s",
               s->name, (long long)s->D, isa, o->threads, formats[f].name, 1e6 * of.median,
               1e6 * of.p10, 1e6 * of.p90, 1e-9 * bytes / of.median, ratio, busy(t));
        if (o->json)
            fprintf(o->json,
                    "{\"shape\":\"%s\",\"isa\":\"%s\",\"threads\":%d,\"format\":\"%s\","
                    "\"us\":%.4g,\"of_f16\":%.4g}\n",
                    s->name, isa, o->threads, formats[f].name, 1e6 * of.median, ratio);
    }
    fflush(stdout);
}

static void bench_shape(const struct shape *s, const struct options *o)
{
    static struct memory m[N_FORMATS];
    enum { NOISE = 1 << 21 };
    const long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
    const double least = 2.5 * (double)(cache > 0 ? cache : 32 << 20);
    const int64_t n_steps = o->cached ? 1 : (int64_t)(least / step_bytes(&formats[3], s)) + 1,
                  n_blocks = n_steps * CTX / BLOCK;
    uint32_t *tables = must(malloc((size_t)n_blocks * sizeof *tables));
    float *noise = must(malloc(NOISE * sizeof *noise)), *q = noise + NOISE - s->H * s->D;
    tl_pool *tp = NULL;
    if (o->threads > 1)
        expect(tl_pool_create(o->threads, &tp));
    for (int i = 0; i < NOISE; i++)
        noise[i] = bench_normal();
    for (int64_t i = 0; i < n_blocks; i++) {
        const int64_t k = (int64_t)(bench_random() % (uint64_t)(i + 1));
        tables[i] = tables[k], tables[k] = (uint32_t)i;
    }
    for (int f = 0; f < N_FORMATS; f++) {
        make_memory(&m[f], &formats[f], s, n_steps, tables, q, tp);
        fill(&m[f], noise, NOISE, s);
        entrants[f] = (struct entrant){.what = formats[f].name, .run = run_step, .ctx = &m[f]};
    }
    check_outputs(m, s, o);
    for (int i = 0; i < o->n_isas; i++) {
        for (int f = 0; f < N_FORMATS; f++) {
            entrants[f].isa = o->isa[i];
            entrants[f].calls = 4;
        }
        show(s, o->isa[i], o, take_turns(entrants, N_FORMATS, tp, o->quick ? 1 : 6));
    }
    for (int f = 0; f < N_FORMATS; f++) {
        munmap(m[f].data, m[f].bytes);
        free(m[f].args.out);
    }
    tl_pool_destroy(tp);
    free(tables), free(noise);
}

static struct options read_options(int argc, char **argv)
{
    struct options o = {.threads = 1};
    for (int i = 1; i < argc; i++) {
        const bool has_value = i + 1 < argc;
        if (strcmp(argv[i], "--quick") == 0)
            o.quick = true;
        else if (strcmp(argv[i], "--cached") == 0)
            o.cached = true;
        else if (strcmp(argv[i], "--json") == 0 && has_value)
            o.json = fopen(argv[++i], "w");
        else if (strcmp(argv[i], "--isa") == 0 && has_value)
            o.n_isas = isas_named(o.isa, argv[++i]);
        else if (strcmp(argv[i], "--threads") == 0 && has_value)
            o.threads = atoi(argv[++i]);
        else if (strcmp(argv[i], "--shape") == 0 && has_value)
            o.shape = argv[++i];
        else {
            fprintf(stderr, "bench_formats [--quick] [--cached] [--json FILE] [--isa NAME[,NAME]] "
                            "[--threads N] [--shape 32/8]\n");
            exit(2);
        }
    }
    if (o.n_isas == 0)
        o.n_isas = isas_usable(o.isa);
    return o;
}

int main(int argc, char **argv)
{
    struct options o = read_options(argc, argv);
    printf("%s, decode of one token over %d positions from memory, blocks of %d\n", cpu_model(),
           CTX, BLOCK);
    if (o.threads == 1)
        pin_to_cpu(0);
    for (int i = 0; i < N_SHAPES; i++)
        if (o.shape ? strcmp(o.shape, shapes[i].name) == 0 : i < N_ALWAYS)
            bench_shape(&shapes[i], &o);
    if (o.json)
        fclose(o.json);
    return 0;
}
