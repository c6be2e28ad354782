/* SPDX-License-Identifier: MIT */
/* bench_runtime.c: what stands around the kernels: the block pool's bookkeeping, appending,
 * envelopes and their checksum, each raced against what nothing of its kind can beat.
 *
 *     bench_runtime [--quick] [--json FILE] [pool create append envelope crc huge ...]
 *
 * pool: nanoseconds an operation on blocks taken at random, in pools of a thousand to a million
 * blocks as small as blocks can be, so that it is the bookkeeping that is timed. "near" works on a
 * thousand blocks of the pool, "far" on all of them: near is flat, far shows the caches. append:
 * against a loop that only converts as many floats. envelope: against memcpy of the payloads. crc:
 * against reading each word once. Results are checked before anything is timed. */
#include <sys/mman.h>

#include "bench.h"
#include "kernels/kernels.h"
#include "runtime/crc32c.h"
#include "tinyllm.h"

#define CHECK(cond)                                                                       \
    do {                                                                                  \
        if (!(cond)) {                                                                    \
            fprintf(stderr, "bench_runtime.c:%d: %s: %s\n", __LINE__, #cond, tl_last_error()); \
            exit(1);                                                                      \
        }                                                                                 \
    } while (0)

static volatile uint64_t keep; /* so that what is only read is read */

static void shuffle(uint32_t *x, uint32_t n)
{
    for (uint32_t i = n; i > 1; i--) {
        const uint32_t k = (uint32_t)(bench_random() % i), last = x[i - 1];
        x[i - 1] = x[k], x[k] = last;
    }
}

static tl_kv_pool *new_pool(uint32_t n_blocks, uint32_t b, uint32_t layers, uint32_t heads,
                            uint32_t dim)
{
    tl_kv_pool *kv;
    const tl_kv_cfg cfg = {n_blocks, b, layers, heads, dim, TL_F16, TL_KV_FORMAT_V1};
    CHECK(tl_kv_pool_create(&cfg, &kv) == TL_OK);
    return kv;
}

/* ---- pool: operations on blocks in no order ---- */

enum { OPS = 1000 }; /* in one run */

struct ops {
    tl_kv_pool *kv;
    /* all blocks but those left free, shuffled; the next one, below n_near */
    uint32_t n, n_near, *ids, at;
    /* yardstick: as many as there are blocks, each as large as a block's own record */
    uint64_t *records;
    void **pieces;
};

static uint32_t next_slot(struct ops *u)
{
    u->at = u->at + 1 < u->n_near ? u->at + 1 : 0;
    return u->at;
}

static uint64_t hash_of(uint32_t id)
{
    return (id + 1) * 0xD1342543DE82EF95u;
}

static void touch_records(void *ctx)
{
    struct ops *u = ctx;
    for (int i = 0; i < OPS; i++)
        u->records[(size_t)u->ids[next_slot(u)] * 4]++;
}

static void malloc_and_free(void *ctx)
{
    struct ops *u = ctx;
    for (int i = 0; i < OPS; i++) {
        const uint32_t slot = next_slot(u);
        free(u->pieces[slot]);
        u->pieces[slot] = must(malloc(128));
    }
}

static void unref_and_alloc(void *ctx)
{
    struct ops *u = ctx;
    for (int i = 0; i < OPS; i++) {
        uint32_t *id = &u->ids[next_slot(u)];
        tl_kv_unref(u->kv, *id);
        tl_kv_alloc(u->kv, 1, id);
    }
}

static void ref_and_unref(void *ctx)
{
    struct ops *u = ctx;
    for (int i = 0; i < OPS; i++) {
        const uint32_t id = u->ids[next_slot(u)];
        tl_kv_ref(u->kv, id);
        tl_kv_unref(u->kv, id);
    }
}

static void share_copy_and_unref(void *ctx)
{
    struct ops *u = ctx;
    for (int i = 0; i < OPS; i++) {
        uint32_t copy;
        const uint32_t id = u->ids[next_slot(u)];
        tl_kv_ref(u->kv, id);
        tl_kv_cow(u->kv, id, &copy);
        tl_kv_unref(u->kv, copy);
    }
}

static void find_slab(void *ctx)
{
    struct ops *u = ctx;
    uint64_t sum = 0;
    for (int i = 0; i < OPS; i++)
        sum += (uintptr_t)tl_kv_block_ptr(u->kv, u->ids[next_slot(u)], 0, i & 1);
    keep = sum;
}

static void look_up_and_unref(void *ctx)
{
    struct ops *u = ctx;
    for (int i = 0; i < OPS; i++) {
        uint32_t found = 0;
        tl_kv_lookup(u->kv, hash_of(u->ids[next_slot(u)]), &found);
        tl_kv_unref(u->kv, found);
    }
}

static void look_up_and_miss(void *ctx)
{
    struct ops *u = ctx;
    uint64_t misses = 0;
    for (int i = 0; i < OPS; i++) {
        uint32_t found;
        misses += tl_kv_lookup(u->kv, hash_of(u->ids[next_slot(u)]) ^ 1, &found) == TL_ENOTFOUND;
    }
    keep = misses;
}

static void check_pool(struct ops *u)
{
    uint32_t id = u->ids[0], other = id;
    tl_kv_stats stats;
    CHECK(tl_kv_lookup(u->kv, hash_of(id), &other) == TL_OK && other == id);
    CHECK(tl_kv_refs(u->kv, id) == 2 && tl_kv_cow(u->kv, id, &other) == TL_OK && other != id &&
          tl_kv_refs(u->kv, id) == 1);
    CHECK(tl_kv_unref(u->kv, other) == TL_OK);
    tl_kv_stats_get(u->kv, &stats);
    CHECK(stats.used == u->n && stats.cached == 0 && stats.evictions == 0);
}

static void pool_of(struct race *r, uint32_t n_blocks, bool far)
{
    struct ops u = {.kv = new_pool(n_blocks, 1, 1, 1, 32), .n = n_blocks - 8};
    u.n_near = far || u.n < 1000 ? u.n : 1000;
    u.ids = must(malloc(n_blocks * sizeof *u.ids));
    u.records = must(calloc(n_blocks, 32));
    u.pieces = must(calloc(n_blocks, sizeof *u.pieces));
    CHECK(tl_kv_alloc(u.kv, u.n, u.ids) == TL_OK);
    for (uint32_t i = 0; i < u.n; i++)
        CHECK(tl_kv_set_fill(u.kv, u.ids[i], 1) == TL_OK &&
              tl_kv_register(u.kv, u.ids[i], hash_of(u.ids[i])) == TL_OK);
    shuffle(u.ids, u.n);
    check_pool(&u);
    snprintf(r->size, sizeof r->size, "%u blocks, %s", n_blocks, far ? "far" : "near");
    race(r, NS_EACH, OPS,
         (const struct racer[]){{"touch a record", touch_records},
                                {"tl_kv_block_ptr", find_slab},
                                {"ref, unref", ref_and_unref},
                                {"lookup (hit), unref", look_up_and_unref},
                                {"lookup (miss)", look_up_and_miss},
                                {"ref, cow, unref", share_copy_and_unref}},
         6, &u);
    tl_kv_pool_destroy(u.kv);
    u.kv = new_pool(n_blocks, 1, 1, 1, 32);
    CHECK(tl_kv_alloc(u.kv, u.n, u.ids) == TL_OK);
    shuffle(u.ids, u.n);
    race(r, NS_EACH, OPS,
         (const struct racer[]){{"free, malloc(128)", malloc_and_free},
                                {"unref, alloc", unref_and_alloc}},
         2, &u);
    for (uint32_t i = 0; i < n_blocks; i++)
        free(u.pieces[i]);
    tl_kv_pool_destroy(u.kv);
    free(u.ids), free(u.records), free(u.pieces);
}

static void bench_pool(struct race *r)
{
    for (uint32_t n = 1000; n <= 1000000; n *= 10)
        pool_of(r, n, false);
    for (uint32_t n = 100000; n <= 1000000; n *= 10)
        pool_of(r, n, true);
}

/* ---- create: pools, and all their blocks for the first time ---- */

static uint32_t create_blocks;
static uint32_t *create_ids;

static void create_and_destroy(void *ctx)
{
    (void)ctx;
    tl_kv_pool_destroy(new_pool(create_blocks, 16, 32, 8, 128));
}

static void create_and_take_all(void *ctx)
{
    (void)ctx;
    tl_kv_pool *kv = new_pool(create_blocks, 16, 1, 1, 32);
    CHECK(tl_kv_alloc(kv, create_blocks, create_ids) == TL_OK);
    tl_kv_pool_destroy(kv);
}

static void map_and_unmap(void *ctx)
{
    (void)ctx;
    const size_t bytes = (size_t)create_blocks * 2 * 1024 * 1024;
    void *p = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE,
                   -1, 0);
    CHECK(p != MAP_FAILED && munmap(p, bytes) == 0);
}

static void clear_records(void *ctx)
{
    (void)ctx;
    char *p = must(malloc((size_t)create_blocks * 32));
    memset(p, 1, (size_t)create_blocks * 32);
    keep = (uint64_t)p[create_blocks];
    free(p);
}

static void bench_create(struct race *r)
{
    for (create_blocks = 1000; create_blocks <= 1000000; create_blocks *= 1000) {
        create_ids = must(malloc(create_blocks * sizeof *create_ids));
        snprintf(r->size, sizeof r->size, "%u blocks of 2 MiB", create_blocks);
        race(r, NS_EACH, 1,
             (const struct racer[]){{"mmap, munmap", map_and_unmap},
                                    {"create, destroy", create_and_destroy}},
             2, NULL);
        snprintf(r->size, sizeof r->size, "each of %u blocks", create_blocks);
        race(r, NS_EACH, create_blocks,
             (const struct racer[]){{"malloc, write 32 bytes", clear_records},
                                    {"create, alloc, destroy", create_and_take_all}}, 2, NULL);
        free(create_ids);
    }
}

/* ---- append ---- */

struct append {
    tl_kv_pool *kv;
    uint32_t *table, layers, layer;
    int64_t heads, dim, T, pos, head_stride, token_stride;
    float *x; /* [layers][2] tensors of heads * T * dim */
    uint16_t *y;
};

static float *tensor(const struct append *u, int is_v)
{
    return u->x + (2 * (int64_t)u->layer + is_v) * u->heads * u->T * u->dim;
}

static void next_layer(struct append *u)
{
    u->layer = u->layer + 1 < u->layers ? u->layer + 1 : 0;
}

static void convert_only(void *ctx)
{
    struct append *u = ctx;
    const int64_t n = u->heads * u->T * u->dim;
    next_layer(u);
    tl_f32_to_f16_n(tensor(u, 0), u->y + 2 * u->layer * n, n);
    tl_f32_to_f16_n(tensor(u, 1), u->y + (2 * u->layer + 1) * n, n);
}

static void append_all(void *ctx)
{
    struct append *u = ctx;
    next_layer(u);
    tl_kv_append_f32(u->kv, u->layer, u->table, 1 << 20, u->pos, u->T, tensor(u, 0), tensor(u, 1),
                     u->head_stride, u->token_stride);
}

static void check_append(struct append *u)
{
    append_all(u);
    for (int64_t head = 0; head < u->heads; head++)
        for (int64_t t = 0; t < u->T; t++)
            for (int64_t d = 0; d < u->dim; d++) {
                const uint16_t *slab =
                    tl_kv_block_ptr(u->kv, u->table[(u->pos + t) / 16], u->layer, 1);
                CHECK(slab[(head * 16 + (u->pos + t) % 16) * u->dim + d] ==
                      tl_f32_to_f16(tensor(u, 1)[head * u->head_stride + t * u->token_stride + d]));
            }
}

/* With head_major x is [heads][T][dim], else [T][heads][dim]. */
static void append_of(struct race *r, int64_t heads, int64_t dim, int64_t T, bool head_major,
                      bool cached)
{
    const double bytes = (double)(2 * heads * T * dim) * (sizeof(float) + sizeof(uint16_t));
    const uint32_t layers = cached ? 1 : (uint32_t)(160e6 / bytes) + 1;
    struct append u = {.layers = layers, .heads = heads, .dim = dim, .T = T, .pos = T == 1 ? 5 : 0};
    const uint32_t n_blocks = (uint32_t)((T + 15) / 16);
    const int64_t n = 2 * (int64_t)u.layers * heads * T * dim;
    u.head_stride = head_major ? T * dim : dim, u.token_stride = head_major ? dim : heads * dim;
    u.kv = new_pool(n_blocks, 16, u.layers, (uint32_t)heads, (uint32_t)dim);
    u.table = must(malloc(n_blocks * sizeof *u.table));
    CHECK(tl_kv_alloc(u.kv, n_blocks, u.table) == TL_OK);
    shuffle(u.table, n_blocks);
    u.x = must(tl_alloc((size_t)n * sizeof *u.x, 64)),
    u.y = must(tl_alloc((size_t)n * sizeof *u.y, 64));
    for (int64_t i = 0; i < n; i++)
        u.x[i] = bench_normal();
    check_append(&u);
    snprintf(r->size, sizeof r->size, "%dx%d, T %d%s%s", (int)heads, (int)dim, (int)T,
             head_major ? "" : ", by token", cached ? ", cached" : "");
    const struct racer racers[] = {{"conversion loop", convert_only},
                                   {"tl_kv_append_f32", append_all}};
    if (T == 1)
        race(r, NS_EACH, 1, racers, 2, &u);
    else
        race(r, GB_PER_S, bytes, racers, 2, &u);
    tl_kv_pool_destroy(u.kv);
    tl_free(u.x), tl_free(u.y), free(u.table);
}

static void bench_append(struct race *r)
{
    append_of(r, 8, 128, 2048, true, false);
    append_of(r, 8, 128, 2048, false, false);
    append_of(r, 3, 64, 2048, false, false);
    append_of(r, 8, 128, 64, true, true);
    append_of(r, 8, 128, 64, false, true);
    append_of(r, 8, 128, 1, true, true);
    append_of(r, 3, 64, 1, true, true);
    append_of(r, 1, 8, 1, true, true);
}

/* ---- envelope ---- */

struct move {
    tl_kv_pool *from, *to;
    uint32_t n, *ids, *ids_in;
    unsigned char *buf;
    size_t bytes, block;
};

static void copy_out(void *ctx)
{
    struct move *u = ctx;
    memcpy(u->buf, tl_kv_block_ptr(u->from, 0, 0, 0), u->n * u->block);
}

static void copy_in(void *ctx)
{
    struct move *u = ctx;
    memcpy(tl_kv_block_ptr(u->to, 0, 0, 0), u->buf, u->n * u->block);
}

static void export_all(void *ctx)
{
    struct move *u = ctx;
    size_t written;
    tl_kv_export(u->from, u->ids, u->n, u->buf, u->bytes, &written);
}

static void import_all(void *ctx)
{
    struct move *u = ctx;
    CHECK(tl_kv_import(u->to, u->buf, u->bytes, u->ids_in) == TL_OK);
    for (uint32_t i = 0; i < u->n; i++)
        tl_kv_unref(u->to, u->ids_in[i]);
}

static void check_move(struct move *u)
{
    export_all(u);
    CHECK(tl_kv_import(u->to, u->buf, u->bytes, u->ids_in) == TL_OK);
    for (uint32_t i = 0; i < u->n; i++)
        CHECK(memcmp(tl_kv_block_ptr(u->from, u->ids[i], 0, 0),
                     tl_kv_block_ptr(u->to, u->ids_in[i], 0, 0), u->block) == 0 &&
              tl_kv_unref(u->to, u->ids_in[i]) == TL_OK);
}

/* n blocks of 16 tokens, `fill` of them there. */
static void move_of(struct race *r, uint32_t n, uint32_t layers, uint32_t heads, uint32_t dim,
                    uint32_t fill)
{
    struct move u = {.from = new_pool(n, 16, layers, heads, dim),
                     .to = new_pool(n, 16, layers, heads, dim),
                     .n = n};
    u.ids = must(malloc(n * sizeof *u.ids)), u.ids_in = must(malloc(n * sizeof *u.ids_in));
    u.block = tl_kv_block_bytes(u.from), u.bytes = tl_kv_export_bytes(u.from, n);
    u.buf = must(tl_alloc(u.bytes, 2 << 20));
    CHECK(tl_kv_alloc(u.from, n, u.ids) == TL_OK);
    uint32_t *words = tl_kv_block_ptr(u.from, 0, 0, 0);
    for (size_t i = 0; i < n * u.block / 4; i++)
        words[i] = (uint32_t)bench_random();
    for (uint32_t i = 0; i < n; i++)
        CHECK(tl_kv_set_fill(u.from, u.ids[i], 16) == TL_OK);
    shuffle(u.ids, n);
    check_move(&u);
    for (uint32_t i = 0; i < n; i++)
        CHECK(tl_kv_set_fill(u.from, u.ids[i], fill) == TL_OK);
    snprintf(r->size, sizeof r->size, "%u x %zu KiB%s", n, u.block / 1024,
             fill < 16 ? ", part" : "");
    race(r, GB_PER_S, (double)u.bytes,
         (const struct racer[]){{"memcpy out", copy_out}, {"tl_kv_export", export_all}}, 2, &u);
    export_all(&u);
    race(r, GB_PER_S, (double)u.bytes,
         (const struct racer[]){{"memcpy in", copy_in}, {"tl_kv_import", import_all}}, 2, &u);
    tl_kv_pool_destroy(u.from), tl_kv_pool_destroy(u.to);
    free(u.ids), free(u.ids_in), tl_free(u.buf);
}

static void bench_envelope(struct race *r)
{
    move_of(r, 1, 1, 1, 128, 16);    /*   8 KiB: first-level cache */
    move_of(r, 1, 30, 3, 64, 16);    /* 360 KiB: second */
    move_of(r, 8, 16, 8, 128, 16);   /*   8 MiB: last */
    move_of(r, 100, 32, 8, 128, 16); /* 200 MiB: memory */
    move_of(r, 100, 32, 8, 128, 15);
    move_of(r, 3200, 4, 2, 128, 16); /* 200 MiB of smaller blocks */
    move_of(r, 25600, 1, 1, 128, 16);
}

/* ---- crc ---- */

struct sum {
    unsigned char *p;
    size_t n;
};

static void read_words(void *ctx)
{
    const struct sum *u = ctx;
    uint64_t sum = 0, word;
    for (size_t i = 0; i + 8 <= u->n; i += 8) {
        memcpy(&word, u->p + i, 8);
        sum ^= word;
    }
    keep = sum;
}

static void crc_by_table(void *ctx)
{
    const struct sum *u = ctx;
    keep = tl_crc32c_by_table(u->p, u->n, 0);
}

static void crc_by_instruction(void *ctx)
{
    const struct sum *u = ctx;
    keep = tl_crc32c_by_instruction(u->p, u->n, 0);
}

static void crc(void *ctx)
{
    const struct sum *u = ctx;
    keep = tl_crc32c(u->p, u->n, 0);
}

static void bench_crc(struct race *r)
{
    static const size_t sizes[] = {12, 64, 256, 1024, 4096, 16384, 1 << 18, 64 << 20};
    struct sum u = {.p = must(tl_alloc(64 << 20, 64))};
    for (size_t i = 0; i < 64 << 20; i++)
        u.p[i] = (unsigned char)bench_random();
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        u.n = sizes[i];
        CHECK(tl_crc32c(u.p, u.n, 0) == tl_crc32c_by_table(u.p, u.n, 0));
        snprintf(r->size, sizeof r->size, "%zu bytes", u.n);
        race(r, GB_PER_S, (double)u.n,
             (const struct racer[]){{"read each word", read_words},
                                    {"tl_crc32c", crc},
                                    {"by table", crc_by_table},
                                    {"by instruction", crc_by_instruction}},
             tl_cpu_features() & TL_CPU_CRC32 ? 4 : 3, &u);
    }
    tl_free(u.p);
}

/* ---- huge: what a large pool gets, and what it gains ---- */

/* Bytes of huge pages in this process. */
static size_t huge_bytes(void)
{
    char line[256];
    size_t sum = 0, kb;
    FILE *f = fopen("/proc/self/smaps", "r");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "AnonHugePages: %zu kB", &kb) == 1)
            sum += kb * 1024;
    if (f)
        fclose(f);
    return sum;
}

struct reach {
    const unsigned char *p[2]; /* in pages as they come, in small pages */
    size_t bytes;
};

/* One word each of OPS places that nobody can foresee. */
static void reach_into(const unsigned char *p, size_t bytes)
{
    uint64_t sum = bench_random();
    for (int i = 0; i < OPS; i++) {
        uint64_t word;
        memcpy(&word, p + (sum * 0x9E3779B97F4A7C15u >> 20) % (bytes / 64) * 64, 8);
        sum += word + 1; /* every load waits for the one before */
    }
    keep = sum;
}

static void reach_small(void *ctx)
{
    const struct reach *u = ctx;
    reach_into(u->p[1], u->bytes);
}

static void reach_pool(void *ctx)
{
    const struct reach *u = ctx;
    reach_into(u->p[0], u->bytes);
}

static void bench_huge(struct race *r)
{
    const size_t before = huge_bytes();
    tl_kv_pool *kv = new_pool(256, 16, 16, 8, 128);
    struct reach u = {.bytes = 256 * tl_kv_block_bytes(kv)};
    unsigned char *pool = tl_kv_block_ptr(kv, 0, 0, 0);
    unsigned char *small =
        mmap(NULL, u.bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(small != MAP_FAILED);
    (void)madvise(small, u.bytes, MADV_NOHUGEPAGE);
    memset(pool, 1, u.bytes), memset(small, 1, u.bytes);
    printf("huge     %zu of the pool's %zu MiB lie in huge pages\n", (huge_bytes() - before) >> 20,
           u.bytes >> 20);
    u.p[0] = pool, u.p[1] = small;
    snprintf(r->size, sizeof r->size, "a load in %zu MiB", u.bytes >> 20);
    race(r, NS_EACH, OPS,
         (const struct racer[]){{"small pages", reach_small}, {"the pool", reach_pool}}, 2, &u);
    munmap(small, u.bytes);
    tl_kv_pool_destroy(kv);
}

int main(int argc, char **argv)
{
    struct race r = race_arguments(argc, argv);
    printf("%s; %s; %s\n", cpu_model(), __VERSION__, tl_isa_name());
    if (race_group(&r, "pool"))
        bench_pool(&r);
    if (race_group(&r, "create"))
        bench_create(&r);
    if (race_group(&r, "append"))
        bench_append(&r);
    if (race_group(&r, "envelope"))
        bench_envelope(&r);
    if (race_group(&r, "crc"))
        bench_crc(&r);
    if (race_group(&r, "huge"))
        bench_huge(&r);
    if (r.json)
        fclose(r.json);
    return 0;
}
