/* SPDX-License-Identifier: MIT */
/* bench_numerics.c: conversions, exp and softmax on every instruction set this CPU has, raced
 * against memcpy of as many bytes.
 *
 *     bench_numerics [--quick] [--json FILE] [f32_to_f16 ... exp softmax online ...]
 *
 * GB/s counts bytes read and bytes written; memcpy moves half that number from one place to
 * another, so that it reads and writes as many together. Sizes: rows that stay in the first-level
 * cache, arrays that stay in the second, and more than any cache holds. Results are compared with
 * scalar's, bit for bit, before anything is timed.
 *
 * Where the array is in cache, instructions are the limit of all but f16 and bf16_to_f32. Sixteen
 * elements on AVX-512, where a 512-bit fma, addition or word operation starts every cycle, two of
 * them if they are of different kinds (Zen 4), and memcpy of 128 bytes takes four cycles from the
 * second-level cache: exp has 9 fma and 9 others, so 9 cycles at the least (12 are measured);
 * softmax has exp and three passes, of 2, 2 and 3 instructions on vectors (17 measured), online two
 * exps (30 measured). f32_to_bf16 has 5 word operations to round, 2 for NaN and 2 to pack,
 * f32_to_e4m3 and f32_to_e5m2 some 15 and 17. AVX2 has twice as many of each. */
#include <math.h>

#include "bench.h"
#include "kernels/kernels.h"
#include "tinyllm.h"

enum { LARGEST = 16 << 20, MOST_ISAS = 4 };

/* One kind of work: `run` on arrays x to y of n elements; in and out are bytes of one element. */
struct work {
    const char *name;
    void (*run)(const struct tl_kernels *k, const void *x, void *y, int64_t n);
    size_t in, out;
};

#define WORK(member, from, to)                                                              \
    static void run_##member(const struct tl_kernels *k, const void *x, void *y, int64_t n) \
    {                                                                                       \
        k->member((const from *)x, (to *)y, n);                                             \
    }
WORK(f32_to_f16_n, float, uint16_t)
WORK(f16_to_f32_n, uint16_t, float)
WORK(f32_to_bf16_n, float, uint16_t)
WORK(bf16_to_f32_n, uint16_t, float)
WORK(f32_to_e4m3_n, float, uint8_t)
WORK(e4m3_to_f32_n, uint8_t, float)
WORK(f32_to_e5m2_n, float, uint8_t)
WORK(e5m2_to_f32_n, uint8_t, float)
WORK(exp_n, float, float)
WORK(softmax_row, float, float)
WORK(softmax_online_row, float, float)

static const struct work works[] = {
    {"f32_to_f16", run_f32_to_f16_n, 4, 2},   {"f16_to_f32", run_f16_to_f32_n, 2, 4},
    {"f32_to_bf16", run_f32_to_bf16_n, 4, 2}, {"bf16_to_f32", run_bf16_to_f32_n, 2, 4},
    {"f32_to_e4m3", run_f32_to_e4m3_n, 4, 1}, {"e4m3_to_f32", run_e4m3_to_f32_n, 1, 4},
    {"f32_to_e5m2", run_f32_to_e5m2_n, 4, 1}, {"e5m2_to_f32", run_e5m2_to_f32_n, 1, 4},
    {"exp", run_exp_n, 4, 4},                 {"softmax", run_softmax_row, 4, 4},
    {"online", run_softmax_online_row, 4, 4},
};

struct data {
    const struct work *work;
    const void *x;
    void *y;
    int64_t n;
};

static const struct tl_kernels *tables[MOST_ISAS];

static void copy(void *ctx)
{
    const struct data *u = ctx;
    memcpy(u->y, u->x, (size_t)u->n * (u->work->in + u->work->out) / 2);
}

#define RUN_ON(i)                                       \
    static void run_on_##i(void *ctx)                   \
    {                                                   \
        const struct data *u = ctx;                     \
        u->work->run(tables[i], u->x, u->y, u->n);      \
    }
RUN_ON(0) RUN_ON(1) RUN_ON(2) RUN_ON(3)

/* Numbers as they come; codes of every kind where the input is codes. */
static void *new_input(const struct work *work)
{
    uint8_t *x = must(tl_alloc((size_t)LARGEST * 4, 64));
    for (size_t i = 0; i < (size_t)LARGEST * work->in; i += 4) {
        const float value = 3 * bench_normal();
        const uint32_t codes = (uint32_t)bench_random();
        if (work->in == 4)
            memcpy(x + i, &value, 4);
        else
            memcpy(x + i, &codes, 4);
    }
    return x;
}

static void check_bits(const struct work *work, const void *x, void *y, int n_isas)
{
    const int64_t n = 100003;
    void *first = must(malloc((size_t)n * 4));
    work->run(tables[0], x, first, n);
    for (int i = 1; i < n_isas; i++) {
        work->run(tables[i], x, y, n);
        if (memcmp(first, y, (size_t)n * work->out) != 0) {
            fprintf(stderr, "bench: %s on %s and %s differ\n", work->name, tables[0]->name,
                    tables[i]->name);
            exit(1);
        }
    }
    free(first);
}

static void bench_work(struct race *r, const struct work *work, int n_isas)
{
    static const int64_t sizes[] = {128, 2048, 65536, LARGEST};
    struct data u = {work, new_input(work), must(tl_alloc((size_t)LARGEST * 4, 64)), 0};
    struct racer racers[MOST_ISAS + 1] = {
        {"memcpy", copy}, {NULL, run_on_0}, {NULL, run_on_1}, {NULL, run_on_2}, {NULL, run_on_3}};
    memset(u.y, 1, (size_t)LARGEST * 4);
    check_bits(work, u.x, u.y, n_isas);
    for (int i = 0; i < n_isas; i++)
        racers[i + 1].what = tables[i]->name;
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        u.n = sizes[i];
        snprintf(r->size, sizeof r->size, "%lld", (long long)u.n);
        racers[1].run = u.n == LARGEST ? racers[n_isas].run : run_on_0; /* scalar takes too long */
        racers[1].what = u.n == LARGEST ? tables[n_isas - 1]->name : tables[0]->name;
        race(r, GB_PER_S, (double)u.n * (double)(work->in + work->out), racers,
             u.n == LARGEST ? 2 : n_isas + 1, &u);
    }
    tl_free((void *)u.x), tl_free(u.y);
}

int main(int argc, char **argv)
{
    struct race r = race_arguments(argc, argv);
    int n_isas = 0;
    while (n_isas < MOST_ISAS && (tables[n_isas] = tl_kernels_usable(n_isas)))
        n_isas++;
    printf("%s; %s; GB/s of bytes read and written\n", cpu_model(), __VERSION__);
    for (size_t i = 0; i < sizeof works / sizeof works[0]; i++)
        if (race_group(&r, works[i].name))
            bench_work(&r, &works[i], n_isas);
    if (r.json)
        fclose(r.json);
    return 0;
}
