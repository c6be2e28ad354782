/* SPDX-License-Identifier: MIT */
/* bench_decode.c: one decode step beside the roof of the memory and a plain C loop (workload.h), in
 * groups of shapes.
 *
 *     bench_decode [--group NAME[,NAME]] [--quick] [--cached] [--plain] [--json FILE] [--isa
 *     NAME[,NAME]] [--threads N]
 *                  [B ctx H Hkv D [b]]
 *
 *   main        the shapes of models (or the one given), every instruction set, on 1 and on 2
 *               threads
 *   growth      the same work for each position of a long context, and for each sequence of a large
 *               batch?
 *   window      a window of 1024 in contexts up to 128k: the same time?
 *   small       steps of a few positions: what a call costs, and whether a pool makes it cost more
 *   unusual     head widths, blocks and groups beside the nearest common ones
 *   ragged      two threads on sequences of very different lengths
 *   validation  what checking every table entry takes of a step
 *
 * A ratio is time for the same amount of work by the time of the line it names, turn by turn.
 * README.md, beside this file, says how to read the rest. */
#include "bench.h"
#include "peak.h"
#include "turns.h"
#include "workload.h"

enum { MAX_ENTRANTS = 12 };

struct options {
    const char *groups;
    bool quick, cached, plain;
    FILE *json;
    int threads; /* 0: 1 and then 2 */
    const char *isa[MAX_ISAS];
    int n_isas;
    struct shape given; /* B == 0: none */
};

static struct entrant entrants[MAX_ENTRANTS];

static struct entrant decode_on(const char *isa, struct workload *w)
{
    return (struct entrant){.what = isa, .run = run_decode, .ctx = w, .isa = isa, .calls = 1};
}

static const char *best_isa(const struct options *o)
{
    return o->isa[o->n_isas - 1];
}

static tl_pool *pool_of(int threads)
{
    tl_pool *tp = NULL;
    if (threads > 1 && tl_pool_create(threads, &tp) != TL_OK) {
        fprintf(stderr, "bench: %s\n", tl_last_error());
        exit(2);
    }
    return tp;
}

/* ---- main: one table for each number of threads ---- */

static void shape_name(char *text, size_t cap, struct shape s)
{
    snprintf(text, cap, "B %-2lld ctx %-5lld H %2lld/%-2lld D %-3lld b %lld", (long long)s.B,
             (long long)s.ctx, (long long)s.H, (long long)s.Hkv, (long long)s.D, (long long)s.b);
}

enum { FIRST_ISA = 2 }; /* entrants before it only read */

/* A share or a ratio in a column of its own, or a dash. */
static void print_cell(const char *format, double value)
{
    char text[16];
    snprintf(text, sizeof text, format, value);
    printf(" %7s", value > 0 ? text : "-");
}

static void print_line(const struct options *o, const struct workload *w, int i, int n,
                       struct tally t, double peak)
{
    const struct spread at = spread_of(entrants[i].sample, t.kept);
    const bool roof = i == 0, reads = i < FIRST_ISA, plain = entrants[n - 1].run == run_plain;
    const double flop_s = reads ? 0 : w->flops / at.median;
    const double of_roof = paired_ratio(entrants[0].sample, entrants[i].sample, t.kept),
                 of_peak = peak > 0 ? flop_s / peak : 0;
    const double of_read = paired_ratio(entrants[1].sample, entrants[i].sample, t.kept);
    const double over_plain =
        plain ? paired_ratio(entrants[n - 1].sample, entrants[i].sample, t.kept) : 0;
    char name[64];
    shape_name(name, sizeof name, w->s);
    printf("%-36s %-7s %10.1f %10.1f %10.1f %7.2f", roof ? name : "", entrants[i].what,
           at.median * 1e6, at.p10 * 1e6, at.p90 * 1e6, w->bytes / at.median / 1e9);
    print_cell("%.1f", flop_s / 1e9);
    print_cell("%.0f%%", 100 * of_roof);
    print_cell("%.0f%%", 100 * of_read);
    print_cell("%.0f%%", 100 * of_peak);
    print_cell("%.2f", over_plain);
    if (roof)
        printf(" %6d %7d%s", t.kept, t.dropped, busy(t));
    else
        printf("\n");
    if (o->json)
        fprintf(o->json,
                "{\"group\":\"main\",\"B\":%lld,\"ctx\":%lld,\"H\":%lld,\"Hkv\":%lld,\"D\":%lld,"
                "\"b\":%lld,\"threads\":%d,"
                "\"what\":\"%s\",\"median_us\":%.3f,\"p10_us\":%.3f,\"p90_us\":%.3f,\"gb_s\":%.3f,"
                "\"gflop_s\":%.3f,"
                "\"of_roof\":%.4f,\"of_read\":%.4f,\"of_peak\":%.4f,\"over_plain\":%.4f,\"turns\":%"
                "d,\"dropped\":%d}\n",
                (long long)w->s.B, (long long)w->s.ctx, (long long)w->s.H, (long long)w->s.Hkv,
                (long long)w->s.D, (long long)w->s.b, tl_pool_threads(w->tp), entrants[i].what,
                at.median * 1e6, at.p10 * 1e6, at.p90 * 1e6, w->bytes / at.median / 1e9,
                flop_s / 1e9, of_roof, of_read, of_peak, over_plain, t.kept, t.dropped);
}

static void bench_shape(const struct options *o, struct shape s, tl_pool *tp, const double *peak)
{
    struct workload w;
    int n = 0;
    set_up(&w, s, NULL, o->cached, tp);
    check_outputs(&w, o->isa, o->n_isas);
    entrants[n++] = (struct entrant){.what = "roof", .run = run_roof, .ctx = &w, .calls = 1};
    entrants[n++] = (struct entrant){.what = "read", .run = run_read, .ctx = &w, .calls = 1};
    for (int i = 0; i < o->n_isas; i++)
        entrants[n++] = decode_on(o->isa[i], &w);
    if (o->plain)
        entrants[n++] = (struct entrant){
            .what = "plain", .run = run_plain, .ctx = &w, .isa = best_isa(o), .calls = 1};
    const struct tally t = take_turns(entrants, n, tp, o->quick ? 0.6 : 4);
    for (int i = 0; i < n; i++)
        print_line(o, &w, i, n, t,
                   i >= FIRST_ISA && i < FIRST_ISA + o->n_isas ? peak[i - FIRST_ISA] : 0);
    fflush(stdout);
    tear_down(&w);
}

static const struct shape main_shapes[] = {
    {1, 1024, 32, 8, 128, 16, 0},  {1, 4096, 32, 8, 128, 16, 0},  {1, 16384, 32, 8, 128, 16, 0},
    {8, 1024, 32, 8, 128, 16, 0},  {8, 4096, 32, 8, 128, 16, 0},  {32, 1024, 32, 8, 128, 16, 0},
    {32, 4096, 32, 8, 128, 16, 0}, {1, 4096, 32, 32, 128, 16, 0}, {8, 2048, 9, 3, 64, 16, 0},
    {1, 4096, 64, 8, 128, 16, 0},
};

/* A pool is kept to a quarter of the machine's memory, and to 6 GB. */
static bool has_room(struct shape s)
{
    const double memory = (double)sysconf(_SC_PHYS_PAGES) * (double)sysconf(_SC_PAGESIZE);
    const double bytes = 4.0 * (double)(s.B * s.ctx * s.Hkv * s.D);
    return bytes < 6e9 && bytes < memory / 4;
}

static void group_main(const struct options *o, int threads)
{
    double peak[MAX_ISAS];
    tl_pool *tp = pool_of(threads);
    printf("\n%d thread%s; f32 fma peak:", threads, threads > 1 ? "s" : "");
    for (int i = 0; i < o->n_isas; i++) {
        peak[i] = fma_peak(o->isa[i], tp);
        printf(" %s %.1f", o->isa[i], peak[i] / 1e9);
    }
    printf(" GFLOP/s\n%-36s %-7s %10s %10s %10s %7s %7s %7s %7s %7s %7s %6s %7s\n", "", "",
           "median us", "p10", "p90", "GB/s", "GFLOP/s", "of roof", "of read", "of fma", "x plain",
           "turns", "dropped");
    for (size_t i = 0; i < (o->given.B ? 1 : sizeof main_shapes / sizeof *main_shapes); i++)
        if (has_room(o->given.B ? o->given : main_shapes[i]))
            bench_shape(o, o->given.B ? o->given : main_shapes[i], tp, peak);
    tl_pool_destroy(tp);
}

/* ---- the other groups: lines with a ratio ---- */

/* One line: what entrants[i] takes for each of `amount` units of work, beside entrants[base]. */
struct line {
    char name[64];
    double amount;
    int base;
};

static void print_ratios(const struct options *o, const char *group, const char *unit, double scale,
                         const struct line *line, int n, struct tally t)
{
    for (int i = 0; i < n; i++) {
        const double to_unit = scale / line[i].amount;
        const struct spread at = spread_of(entrants[i].sample, t.kept);
        const struct line *base = &line[line[i].base];
        const double ratio =
            paired_ratio(entrants[i].sample, entrants[line[i].base].sample, t.kept) * base->amount /
            line[i].amount;
        printf("%-36s %10.2f %10.2f %10.2f %s", line[i].name, at.median * to_unit, at.p10 * to_unit,
               at.p90 * to_unit, unit);
        printf(line[i].base == i ? "\n" : "  %5.2f of %s\n", ratio, base->name);
        if (o->json)
            fprintf(o->json,
                    "{\"group\":\"%s\",\"line\":\"%s\",\"unit\":\"%s\",\"median\":%.5g,\"p10\":%."
                    "5g,\"p90\":%.5g,\"base\":\"%s\","
                    "\"ratio\":%.4f}\n",
                    group, line[i].name, unit, at.median * to_unit, at.p10 * to_unit,
                    at.p90 * to_unit, base->name, ratio);
    }
    if (t.dropped > t.kept)
        printf("machine busy: %d turns, %d dropped\n", t.kept, t.dropped);
    fflush(stdout);
}

static void print_title(const char *group, const char *says, const struct options *o, int threads)
{
    printf("\n%s: %s\n%s, %d thread%s\n%-36s %10s %10s %10s\n", group, says, best_isa(o), threads,
           threads > 1 ? "s" : "", "", "median", "p10", "p90");
}

/* Shapes side by side on the best instruction set; line i is by `amount[i]`, beside line `base`. */
static void bench_side_by_side(const struct options *o, const char *group, const char *unit,
                               double scale, const struct shape *shapes, const struct line *line,
                               int n, tl_pool *tp)
{
    struct workload *w = must(calloc((size_t)n, sizeof *w));
    const char *const isa = best_isa(o);
    for (int i = 0; i < n; i++) {
        set_up(&w[i], shapes[i], NULL, o->cached, tp);
        check_outputs(&w[i], &isa, 1);
        entrants[i] = decode_on(isa, &w[i]);
    }
    const struct tally t = take_turns(entrants, n, tp, (o->quick ? 0.5 : 3) * n / 2);
    print_ratios(o, group, unit, scale, line, n, t);
    for (int i = 0; i < n; i++)
        tear_down(&w[i]);
    free(w);
}

static void group_growth(const struct options *o, int threads)
{
    static const int64_t ctx[] = {4096, 1024, 16384, 65536}, batch[] = {1, 2, 4, 8, 16, 32};
    struct shape shapes[6];
    struct line line[6];
    tl_pool *tp = pool_of(threads);
    print_title("growth",
                "does a position of a long context, a sequence of a large batch, cost more?", o,
                threads);
    for (int i = 0; i < 4; i++) {
        shapes[i] = (struct shape){1, ctx[i], 32, 8, 128, 16, 0};
        line[i] = (struct line){.amount = (double)ctx[i] / 1024, .base = 0};
        snprintf(line[i].name, sizeof line[i].name, "B 1, ctx %lldk", (long long)ctx[i] / 1024);
    }
    bench_side_by_side(o, "growth", "us a 1k positions", 1e6, shapes, line, 4, tp);
    for (int i = 0; i < 6; i++) {
        shapes[i] = (struct shape){batch[i], 1024, 32, 8, 128, 16, 0};
        line[i] = (struct line){.amount = (double)batch[i], .base = 0};
        snprintf(line[i].name, sizeof line[i].name, "B %lld, ctx 1k", (long long)batch[i]);
    }
    bench_side_by_side(o, "growth", "us a sequence", 1e6, shapes, line, 6, tp);
    tl_pool_destroy(tp);
}

static void group_window(const struct options *o, int threads)
{
    static const int64_t ctx[] = {1, 4, 16, 64, 128};
    struct shape shapes[5];
    struct line line[5];
    tl_pool *tp = pool_of(threads);
    print_title("window", "a window of 1024 costs the same wherever it stands", o, threads);
    for (int i = 0; i < 5; i++) {
        shapes[i] = (struct shape){1, ctx[i] * 1024, 32, 8, 128, 16, 1024};
        line[i] = (struct line){.amount = 1, .base = 0};
        snprintf(line[i].name, sizeof line[i].name, "ctx %lldk", (long long)ctx[i]);
    }
    bench_side_by_side(o, "window", "us a step", 1e6, shapes, line, 5, tp);
    tl_pool_destroy(tp);
}

/* In cache. A pool whose workers are needed for nothing must not make a step cost more. */
static void group_small(const struct options *o)
{
    static const int64_t ctx[] = {1, 2, 16, 64};
    static const struct shape of[] = {{1, 0, 32, 8, 128, 16, 0}, {1, 0, 9, 3, 64, 16, 0}};
    const char *const isa = best_isa(o);
    tl_pool *tp = pool_of(n_cpus() > 1 ? 2 : 1);
    print_title("small", "a call of a few positions, and the same call given a pool of two threads",
                o, 1);
    for (int k = 0; k < 2; k++)
        for (int i = 0; i < 4; i++) {
            struct shape s = of[k];
            struct workload w[2];
            struct line line[2] = {{.amount = 1, .base = 0}, {.amount = 1, .base = 0}};
            s.ctx = ctx[i];
            snprintf(line[0].name, sizeof line[0].name, "H %lld/%lld D %lld ctx %lld",
                     (long long)s.H, (long long)s.Hkv, (long long)s.D, (long long)s.ctx);
            snprintf(line[1].name, sizeof line[1].name, "  with a pool of 2");
            for (int p = 0; p < (tp ? 2 : 1); p++) {
                set_up(&w[p], s, NULL, true, p ? tp : NULL);
                check_outputs(&w[p], &isa, 1);
                entrants[p] = decode_on(isa, &w[p]);
                entrants[p].calls = calls_per_turn(&entrants[p]);
            }
            const struct tally t = take_turns(entrants, tp ? 2 : 1, tp, o->quick ? 0.2 : 1);
            print_ratios(o, "small", "us a call", 1e6, line, tp ? 2 : 1, t);
            for (int p = 0; p < (tp ? 2 : 1); p++)
                tear_down(&w[p]);
        }
    tl_pool_destroy(tp);
}

/* `what` is "D", "b" or "G", whose value `common` and `unusual` have. */
static void beside_common(const struct options *o, const char *what, int64_t common,
                          int64_t unusual, tl_pool *tp)
{
    const int64_t value[2] = {common, unusual};
    struct shape shapes[2];
    struct line line[2];
    for (int i = 0; i < 2; i++) {
        const int64_t G = *what == 'G' ? value[i] : 4, D = *what == 'D' ? value[i] : 128,
                      b = *what == 'b' ? value[i] : 16;
        shapes[i] = (struct shape){1, 4096, 8 * G, 8, D, b, 0};
        line[i] = (struct line){.amount = 4.0 * 4096 * 8 * (double)D / 1024, .base = 0};
        snprintf(line[i].name, sizeof line[i].name, "%s %lld", what, (long long)value[i]);
    }
    bench_side_by_side(o, "unusual", "ns a KiB of K and V", 1e9, shapes, line, 2, tp);
}

/* Every pair reads K and V of one context of 4096 positions with 8 KV heads. */
static void group_unusual(const struct options *o, int threads)
{
    static const struct {
        const char *what;
        int64_t common, unusual;
    } pairs[] = {{"D", 64, 80}, {"D", 128, 96}, {"D", 128, 112}, {"D", 128, 192}, {"D", 128, 256},
                 {"b", 16, 1},  {"b", 16, 8},   {"b", 16, 32},   {"b", 16, 64},   {"G", 4, 1},
                 {"G", 4, 2},   {"G", 4, 3},    {"G", 4, 5},     {"G", 8, 6},     {"G", 8, 16}};
    tl_pool *tp = pool_of(threads);
    print_title("unusual",
                "a byte of K and V beside the nearest common shape (more queries a group are more "
                "arithmetic)",
                o, threads);
    for (size_t i = 0; i < sizeof pairs / sizeof *pairs; i++)
        beside_common(o, pairs[i].what, pairs[i].common, pairs[i].unusual, tp);
    tl_pool_destroy(tp);
}

static void bench_ragged(const struct options *o, const char *name, const int32_t *lens,
                         tl_pool *tp)
{
    const char *const isa = best_isa(o);
    struct workload w;
    int32_t longest = 0;
    for (int i = 0; i < 16; i++)
        longest = lens[i] > longest ? lens[i] : longest;
    set_up(&w, (struct shape){16, longest, 32, 8, 128, 16, 0}, lens, o->cached, tp);
    check_outputs(&w, &isa, 1);
    struct workload alone = w;
    alone.tp = NULL;
    struct line line[2] = {{.amount = 1, .base = 0}, {.amount = 1, .base = 0}};
    snprintf(line[0].name, sizeof line[0].name, "%s, 1 thread", name);
    snprintf(line[1].name, sizeof line[1].name, "%s, 2 threads", name);
    entrants[0] = decode_on(isa, &alone), entrants[1] = decode_on(isa, &w);
    const struct tally t = take_turns(entrants, 2, tp, o->quick ? 1 : 4);
    print_ratios(o, "ragged", "us a step", 1e6, line, 2, t);
    const double speed_up = paired_ratio(entrants[0].sample, entrants[1].sample, t.kept);
    printf("%-36s %10.2f times as fast; %d turns, %d dropped%s", "", speed_up, t.kept, t.dropped,
           busy(t));
    tear_down(&w);
}

static void group_ragged(const struct options *o)
{
    static const int32_t mixed[16] = {64,    16384, 200,  3000, 1024, 77,  8192, 512,
                                      12000, 100,   2048, 640,  5000, 333, 1500, 4096};
    static const int32_t one_long[16] = {64, 64, 64, 64, 64, 64, 64, 16384,
                                         64, 64, 64, 64, 64, 64, 64, 64};
    int32_t even[16];
    tl_pool *tp = pool_of(n_cpus() > 1 ? 2 : 1);
    print_title("ragged", "batches of 16 on two threads", o, n_cpus() > 1 ? 2 : 1);
    for (int i = 0; i < 16; i++)
        even[i] = 3456;
    if (tp) {
        bench_ragged(o, "all 3456", even, tp);
        bench_ragged(o, "64 to 16k", mixed, tp);
        bench_ragged(o, "one of 16k among 64", one_long, tp);
    } else {
        printf("one CPU: nothing to compare\n");
    }
    tl_pool_destroy(tp);
}

/* A call that is refused at the very last table entry has checked all of them and computed nothing.
 * What a refusal at the first entry takes (the call, and writing its message) is in both, so that
 * their difference is the checking. */
static void run_refused(void *workload)
{
    struct workload *w = workload;
    if (decode(w) != TL_EINVAL) {
        fprintf(stderr, "bench: a bad table was accepted\n");
        exit(2);
    }
}

static void bench_validation(const struct options *o, struct shape s)
{
    const char *const isa = best_isa(o);
    struct workload w, bad[2];
    struct line line[3] = {
        {.amount = 1, .base = 0}, {.amount = 1, .base = 1}, {.amount = 1, .base = 2}};
    set_up(&w, s, NULL, o->cached, NULL);
    check_outputs(&w, &isa, 1);
    entrants[0] = decode_on(isa, &w);
    for (int i = 0; i < 2; i++) {
        bad[i] = w;
        bad[i].tables = must(malloc(w.n_tables * sizeof *w.tables));
        memcpy(bad[i].tables, w.tables, w.n_tables * sizeof *w.tables);
        bad[i].tables[i ? w.n_tables - 1 : 0] = UINT32_MAX;
        entrants[i + 1] = (struct entrant){
            .what = "refused", .run = run_refused, .ctx = &bad[i], .isa = isa, .calls = 1};
        entrants[i + 1].calls = calls_per_turn(&entrants[i + 1]);
        snprintf(line[i + 1].name, sizeof line[i + 1].name, "  refused at its %s entry",
                 i ? "last" : "first");
    }
    shape_name(line[0].name, sizeof line[0].name, s);
    const struct tally t = take_turns(entrants, 3, NULL, o->quick ? 0.3 : 2);
    print_ratios(o, "validation", "us a call", 1e6, line, 3, t);
    const double step = spread_of(entrants[0].sample, t.kept).median;
    const double checks =
        spread_of(entrants[2].sample, t.kept).median - spread_of(entrants[1].sample, t.kept).median;
    printf("%-36s %10.3f%% of the step is checking\n", "", 100 * checks / step);
    for (int i = 0; i < 2; i++)
        free(bad[i].tables);
    tear_down(&w);
}

static void group_validation(const struct options *o)
{
    print_title("validation", "the share of a step that goes into checking its tables", o, 1);
    bench_validation(o, (struct shape){1, 4096, 32, 8, 128, 16, 0});
    bench_validation(o, (struct shape){32, 1024, 32, 8, 128, 16, 0});
    bench_validation(o, (struct shape){32, 1024, 9, 3, 64, 16, 0});
    bench_validation(o, (struct shape){8, 4096, 9, 3, 64, 1, 0});
}

/* ---- the command line ---- */

static bool wanted(const struct options *o, const char *group)
{
    const size_t n = strlen(group);
    for (const char *at = o->groups; (at = strstr(at, group)); at += n)
        if ((at == o->groups || at[-1] == ',') && (at[n] == '\0' || at[n] == ','))
            return true;
    return false;
}

static struct options options_of(int argc, char **argv)
{
    struct options o = {.groups = "main"};
    int64_t dims[6] = {0, 0, 0, 0, 0, 16};
    int n_dims = 0;
    for (int i = 1; i < argc; i++) {
        const bool has_value = i + 1 < argc;
        if (strcmp(argv[i], "--quick") == 0)
            o.quick = true;
        else if (strcmp(argv[i], "--cached") == 0)
            o.cached = true;
        else if (strcmp(argv[i], "--plain") == 0)
            o.plain = true;
        else if (strcmp(argv[i], "--group") == 0 && has_value)
            o.groups = argv[++i];
        else if (strcmp(argv[i], "--json") == 0 && has_value)
            o.json = must(fopen(argv[++i], "w"));
        else if (strcmp(argv[i], "--threads") == 0 && has_value)
            o.threads = atoi(argv[++i]);
        else if (strcmp(argv[i], "--isa") == 0 && has_value)
            o.n_isas = isas_named(o.isa, argv[++i]);
        else if (n_dims < 6)
            dims[n_dims++] = atoll(argv[i]);
    }
    if (n_dims >= 5)
        o.given = (struct shape){dims[0], dims[1], dims[2], dims[3], dims[4], dims[5], 0};
    if (o.n_isas == 0)
        o.n_isas = isas_usable(o.isa);
    return o;
}

int main(int argc, char **argv)
{
    const struct options o = options_of(argc, argv);
    const int few = o.threads ? o.threads : 1, many = o.threads ? o.threads : n_cpus() > 1 ? 2 : 1;
    printf("%s; %s\n", cpu_model(), __VERSION__);
    if (wanted(&o, "main"))
        for (int threads = few; threads <= many; threads++)
            group_main(&o, threads);
    if (wanted(&o, "growth"))
        group_growth(&o, few);
    if (wanted(&o, "window"))
        group_window(&o, few);
    if (wanted(&o, "small"))
        group_small(&o);
    if (wanted(&o, "unusual"))
        group_unusual(&o, few);
    if (wanted(&o, "ragged"))
        group_ragged(&o);
    if (wanted(&o, "validation"))
        group_validation(&o);
    if (o.json)
        fclose(o.json);
    return 0;
}
