/* SPDX-License-Identifier: MIT */
/* workload.h: a decode step to be timed, and what it is timed beside.
 *
 * roof: loads every byte of K and V that the step needs once, in the same order, the next block
 * prefetched.
 * read: the same, each line prefetched three times, from four blocks, two and one before: busy
 * memory drops prefetches, and no loop was found that reads faster.
 * plain: what a careful user writes without a library: gather the sequence, two loops and expf.
 *
 * The pool has as many layers as make it four times the last-level cache, and every call takes the
 * next one, so K and V come from memory; a `cached` workload has one layer. Blocks lie in no
 * order. */
#ifndef TL_BENCH_WORKLOAD_H
#define TL_BENCH_WORKLOAD_H

#include <math.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <unistd.h>

#include "bench.h"
#include "tinyllm.h"

struct shape {
    int64_t B, ctx, H, Hkv, D, b, window;
    int32_t dtype;   /* of K and V, and its format; 0: f16 */
    uint32_t format;
};

struct workload {
    struct shape s; /* ctx: the longest */
    tl_kv_pool *kv;
    tl_pool *tp; /* who works; NULL: the caller */
    uint32_t n_layers, layer;
    int32_t max_blocks, *ctx_lens;
    uint32_t n_tables, *tables; /* entries of all tables together */
    float *q, *out;
    double bytes, flops; /* of the positions that are seen */
};

/* ---- inputs ---- */

static inline int64_t first_seen(const struct workload *w, int64_t seq)
{
    const int64_t n = w->ctx_lens[seq];
    return w->s.window > 0 && w->s.window < n ? n - w->s.window : 0;
}

/* Takes blocks in no order: table entries are all different, but for a window, behind which those
 * it shows come again. */
static inline void fill_tables(struct workload *w, uint32_t n_blocks)
{
    uint32_t *ids = must(malloc(n_blocks * sizeof *ids));
    if (tl_kv_alloc(w->kv, n_blocks, ids) != TL_OK) {
        fprintf(stderr, "bench: %s\n", tl_last_error());
        exit(2);
    }
    for (uint32_t i = n_blocks; i > 1; i--) {
        const uint32_t k = (uint32_t)(bench_random() % i), id = ids[i - 1];
        ids[i - 1] = ids[k], ids[k] = id;
    }
    const uint32_t each = n_blocks / (uint32_t)w->s.B, n = (uint32_t)w->max_blocks;
    for (uint32_t i = 0; i < w->n_tables; i++)
        w->tables[i] = ids[i / n * each + i % n % each];
    free(ids);
}

static inline void fill_pool(struct workload *w, uint32_t n_blocks)
{
    static uint16_t noise[1 << 16];
    if (noise[0] == 0)
        for (int i = 0; i < 1 << 16; i++)
            noise[i] = tl_f32_to_f16(bench_normal());
    char *data = tl_kv_block_ptr(w->kv, 0, 0, 0);
    const size_t total = n_blocks * tl_kv_block_bytes(w->kv);
    for (size_t at = 0, k = 0; at < total; at += 4096, k += 1237)
        memcpy(data + at, noise + k % (65536 - 2048), total - at < 4096 ? total - at : 4096);
}

/* Any other format than f16: the sequences' positions, appended. */
static inline void append_noise(struct workload *w)
{
    const int64_t n = w->s.Hkv * w->s.ctx * w->s.D;
    float *noise = must(malloc((size_t)n * sizeof *noise));
    for (int64_t i = 0; i < n; i++)
        noise[i] = bench_normal();
    for (uint32_t layer = 0; layer < w->n_layers; layer++)
        for (int64_t seq = 0; seq < w->s.B; seq++)
            if (tl_kv_append_f32(w->kv, layer, w->tables + seq * w->max_blocks, w->max_blocks, 0,
                                 w->ctx_lens[seq], noise, noise, w->s.ctx * w->s.D,
                                 w->s.D) != TL_OK) {
                fprintf(stderr, "bench: %s\n", tl_last_error());
                exit(2);
            }
    free(noise);
}

/* The bytes of K and V that a step reads, and what it multiplies and adds. */
static inline void count_work(struct workload *w)
{
    for (int64_t seq = 0; seq < w->s.B; seq++) {
        const double seen = (double)(w->ctx_lens[seq] - first_seen(w, seq));
        w->bytes += 4.0 * seen * (double)(w->s.Hkv * w->s.D);
        w->flops += 4.0 * seen * (double)(w->s.H * w->s.D);
    }
}

/* `lens`: of the B sequences, at most ctx; NULL: all are ctx. */
static inline void set_up(struct workload *w, struct shape s, const int32_t *lens, bool cached,
                          tl_pool *tp)
{
    *w = (struct workload){.s = s, .tp = tp, .max_blocks = (int32_t)((s.ctx + s.b - 1) / s.b)};
    w->ctx_lens = must(malloc((size_t)s.B * sizeof *w->ctx_lens));
    for (int64_t i = 0; i < s.B; i++)
        w->ctx_lens[i] = lens ? lens[i] : (int32_t)s.ctx;
    count_work(w);
    const long cache = sysconf(_SC_LEVEL3_CACHE_SIZE);
    w->n_layers =
        cached ? 1 : (uint32_t)(4.0 * (double)(cache > 0 ? cache : 32 << 20) / w->bytes) + 1;
    const int64_t in_window = s.window / s.b + 1;
    const uint32_t n_blocks =
        (uint32_t)(s.B * (s.window > 0 && in_window < w->max_blocks ? in_window : w->max_blocks));
    const tl_kv_cfg cfg = {n_blocks,      (uint32_t)s.b, w->n_layers,    (uint32_t)s.Hkv,
                           (uint32_t)s.D, s.dtype ? s.dtype : TL_F16,
                           s.dtype ? s.format : TL_KV_FORMAT_F16};
    if (tl_kv_pool_create(&cfg, &w->kv) != TL_OK) {
        fprintf(stderr, "bench: %s\n", tl_last_error());
        exit(2);
    }
    w->n_tables = (uint32_t)(s.B * w->max_blocks);
    w->tables = must(malloc(w->n_tables * sizeof *w->tables));
    fill_tables(w, n_blocks);
    if (s.dtype)
        append_noise(w);
    else
        fill_pool(w, n_blocks);
    w->q = must(aligned_alloc(64, ((size_t)(s.B * s.H * s.D) * sizeof *w->q + 63) / 64 * 64));
    w->out = must(aligned_alloc(64, ((size_t)(s.B * s.H * s.D) * sizeof *w->out + 63) / 64 * 64));
    for (int64_t i = 0; i < s.B * s.H * s.D; i++)
        w->q[i] = bench_normal();
}

static inline void tear_down(struct workload *w)
{
    tl_kv_pool_destroy(w->kv);
    free(w->tables), free(w->ctx_lens), free(w->q), free(w->out);
}

/* ---- what is compared: functions of a workload ---- */

static _Atomic uint64_t keep; /* so that the loads of the roof are not removed */

#if defined(__x86_64__)
#define WIDE_LOADS __attribute__((target("avx2")))
#else
#define WIDE_LOADS
#endif

/* `next`: n_next slabs whose lines are prefetched beside those of p. */
WIDE_LOADS static inline __attribute__((always_inline)) void read_slab(const char *p,
                                                                       const char *const *next,
                                                                       int n_next, size_t bytes,
                                                                       uint64_t *sum)
{
    typedef uint64_t vec __attribute__((vector_size(32), aligned(2), may_alias));
    vec s = {0}, t = {0};
    size_t i = 0;
    for (; i + 64 <= bytes; i += 64) {
        for (int k = 0; k < n_next; k++)
            __builtin_prefetch(next[k] + i, 0, 2);
        s ^= *(const vec *)(p + i);
        t ^= *(const vec *)(p + i + 32);
    }
    if (i + 32 <= bytes)
        s ^= *(const vec *)(p + i);
    s ^= t;
    for (int k = 0; k < 4; k++)
        *sum ^= s[k];
}

static inline const char *slots(const struct workload *w, uint32_t block, int is_v, int64_t head,
                                int64_t slot)
{
    return (const char *)tl_kv_block_ptr(w->kv, block, w->layer, is_v) +
           (head * w->s.b + slot) * w->s.D * 2;
}

WIDE_LOADS static inline __attribute__((always_inline)) void read_units(const struct workload *w,
                                                                        int64_t lo, int64_t hi,
                                                                        int n_next,
                                                                        const int64_t *distance)
{
    const int64_t b = w->s.b;
    uint64_t sum = 0;
    for (int64_t unit = lo; unit < hi; unit++) {
        const int64_t seq = unit / w->s.Hkv, head = unit % w->s.Hkv, n = w->ctx_lens[seq],
                      first = first_seen(w, seq), last = (n - 1) / b;
        const uint32_t *table = w->tables + seq * w->max_blocks;
        for (int64_t i = first / b; i <= last; i++) {
            const int64_t from = first > i * b ? first - i * b : 0,
                          to = n < (i + 1) * b ? n - i * b : b;
            for (int is_v = 0; is_v < 2; is_v++) {
                const char *next[3];
                for (int k = 0; k < n_next; k++)
                    next[k] = slots(w, table[i + distance[k] < last ? i + distance[k] : last], is_v,
                                    head, from);
                read_slab(slots(w, table[i], is_v, head, from), next, n_next,
                          (size_t)((to - from) * w->s.D) * 2, &sum);
            }
        }
    }
    atomic_fetch_xor(&keep, sum);
}

WIDE_LOADS static inline void roof_units(void *ctx, int64_t lo, int64_t hi, int worker)
{
    (void)worker;
    read_units(ctx, lo, hi, 1, (const int64_t[]){1});
}

WIDE_LOADS static inline void fastest_units(void *ctx, int64_t lo, int64_t hi, int worker)
{
    (void)worker;
    read_units(ctx, lo, hi, 3, (const int64_t[]){4, 2, 1});
}

/* One row of plain attention over n gathered keys and values. */
static inline void plain_row(const float *q, const float *k, const float *v, float *p, float *out,
                             int64_t n, int64_t D)
{
    float max = -INFINITY, sum = 0;
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

static inline void plain_units(void *ctx, int64_t lo, int64_t hi, int worker)
{
    (void)worker;
    const struct workload *w = ctx;
    const int64_t D = w->s.D, b = w->s.b, group = w->s.H / w->s.Hkv;
    float *k = must(malloc((size_t)(2 * w->s.ctx * D + w->s.ctx) * sizeof *k)),
          *v = k + w->s.ctx * D, *p = v + w->s.ctx * D;
    for (int64_t unit = lo; unit < hi; unit++) {
        const int64_t seq = unit / w->s.Hkv, head = unit % w->s.Hkv, first = first_seen(w, seq),
                      n = w->ctx_lens[seq] - first;
        const uint32_t *table = w->tables + seq * w->max_blocks;
        for (int64_t j = 0; j < n; j++) {
            const uint32_t block = table[(first + j) / b];
            tl_f16_to_f32_n((const uint16_t *)slots(w, block, 0, head, (first + j) % b), k + j * D,
                            D);
            tl_f16_to_f32_n((const uint16_t *)slots(w, block, 1, head, (first + j) % b), v + j * D,
                            D);
        }
        for (int64_t g = 0; g < group; g++) {
            const int64_t at = (seq * w->s.H + head * group + g) * D;
            plain_row(w->q + at, k, v, p, w->out + at, n, D);
        }
    }
    free(k);
}

static inline void next_layer(struct workload *w)
{
    w->layer = (w->layer + 1) % w->n_layers;
}

static inline void run_roof(void *workload)
{
    struct workload *w = workload;
    next_layer(w);
    tl_parallel_for(w->tp, w->s.B * w->s.Hkv, 1, roof_units, w);
}

static inline void run_read(void *workload)
{
    struct workload *w = workload;
    next_layer(w);
    tl_parallel_for(w->tp, w->s.B * w->s.Hkv, 1, fastest_units, w);
}

static inline void run_plain(void *workload)
{
    struct workload *w = workload;
    next_layer(w);
    tl_parallel_for(w->tp, w->s.B * w->s.Hkv, 1, plain_units, w);
}

static inline tl_status decode(struct workload *w)
{
    return tl_paged_attn_decode_f32(w->q, w->kv, w->layer, w->tables, w->max_blocks, w->ctx_lens,
                                    w->out, w->s.B, w->s.H, w->s.Hkv, w->s.D,
                                    1 / sqrtf((float)w->s.D), w->s.window, w->tp);
}

static inline void run_decode(void *workload)
{
    struct workload *w = workload;
    next_layer(w);
    if (decode(w) != TL_OK) {
        fprintf(stderr, "bench: %s\n", tl_last_error());
        exit(2);
    }
}

/* ---- are they right? ---- */

static inline void refuse(const char *a, const char *b, int64_t at, float x, float y)
{
    fprintf(stderr, "bench: %s and %s differ at %lld: %g, %g\n", a, b, (long long)at, (double)x,
            (double)y);
    exit(1);
}

/* Every instruction set of `isas` has the same bits, on the workload's threads, and they are near
 * the plain loop. */
static inline void check_outputs(struct workload *w, const char *const *isas, int n_isas)
{
    const int64_t count = w->s.B * w->s.H * w->s.D;
    float *plain = must(malloc((size_t)count * sizeof *plain)),
          *first = must(malloc((size_t)count * sizeof *first));
    plain_units(w, 0, w->s.B * w->s.Hkv, 0);
    memcpy(plain, w->out, (size_t)count * sizeof *plain);
    for (int i = 0; i < n_isas; i++) {
        tl_kernels_select(isas[i]);
        memset(w->out, 0xFF, (size_t)count * sizeof *w->out);
        if (decode(w) != TL_OK) {
            fprintf(stderr, "bench: %s\n", tl_last_error());
            exit(2);
        }
        if (i == 0)
            memcpy(first, w->out, (size_t)count * sizeof *first);
        for (int64_t k = 0; k < count; k++)
            if (!(fabsf(plain[k] - w->out[k]) < 1e-4f))
                refuse("plain", isas[i], k, plain[k], w->out[k]);
            else if (memcmp(&first[k], &w->out[k], sizeof(float)) != 0)
                refuse(isas[0], isas[i], k, first[k], w->out[k]);
    }
    free(plain), free(first);
}

#endif
