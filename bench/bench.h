/* SPDX-License-Identifier: MIT */
/* bench.h: timing for benchmarks that interleave what they compare: a clock, order statistics,
 * repeatable inputs; and races of single functions against a yardstick. */
#ifndef TL_BENCH_H
#define TL_BENCH_H

#include <pthread.h>
#include <sched.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static inline double now_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline int compare_double(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Sorts the sample and returns its quantile q in [0, 1]. */
static inline double quantile(double *sample, int n, double q)
{
    qsort(sample, (size_t)n, sizeof *sample, compare_double);
    return sample[(int)(q * (n - 1) + 0.5)];
}

static inline void *must(void *p)
{
    if (!p) {
        fprintf(stderr, "bench: out of memory\n");
        exit(2);
    }
    return p;
}

static inline uint64_t bench_random(void)
{
    static uint64_t x = 88172645463325252u;
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    return x;
}

/* Roughly normal, mean 0, deviation 1. */
static inline float bench_normal(void)
{
    float sum = 0;
    for (int i = 0; i < 4; i++)
        sum += (float)(bench_random() >> 40) * 0x1p-24f - 0.5f;
    return sum * 1.7320508f;
}

static inline void pin_to_cpu(int cpu)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    pthread_setaffinity_np(pthread_self(), sizeof set, &set);
}

static inline const char *cpu_model(void)
{
    static char model[128] = "unknown CPU";
    char line[256];
    FILE *f = fopen("/proc/cpuinfo", "r");
    while (f && fgets(line, sizeof line, f))
        if (sscanf(line, "model name : %127[^\n]", model) == 1)
            break;
    if (f)
        fclose(f);
    return model;
}

/* ---- races: functions that do the same amount of work take turns; the first is the yardstick
 * ---- */

struct racer {
    const char *what;
    void (*run)(void *ctx);
};

enum unit { NS_EACH, GB_PER_S };

/* What the command line says, and what is raced on what: lines begin with `group` and `size`. */
struct race {
    bool quick;
    FILE *json;
    char **wanted; /* groups, up to NULL; none: all */
    const char *group;
    char size[64];
};

enum { MAX_RACERS = 8, MAX_TURNS = 400 };

/* bench [--quick] [--json FILE] [GROUP ...] */
static inline struct race race_arguments(int argc, char **argv)
{
    struct race r = {.wanted = argv + argc};
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--quick") == 0) {
            r.quick = true;
        } else if (strcmp(argv[i], "--json") == 0 && i + 1 < argc) {
            r.json = fopen(argv[++i], "w");
        } else {
            r.wanted = argv + i;
            break;
        }
    }
    return r;
}

/* Whether this group is to run; its lines go under that name from now on. */
static inline bool race_group(struct race *r, const char *group)
{
    bool wanted = !*r->wanted;
    for (char **name = r->wanted; *name; name++)
        wanted |= strcmp(*name, group) == 0;
    r->group = group;
    return wanted;
}

/* Seconds this thread had a CPU: what other processes take of it does not count. */
static inline double cpu_s(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline double seconds_of(const struct racer *racer, void *ctx, int runs)
{
    const double start = cpu_s();
    for (int i = 0; i < runs; i++)
        racer->run(ctx);
    return (cpu_s() - start) / runs;
}

/* How many runs take about a fifth of a millisecond, that is, very much longer than reading the
 * clock. */
static inline int runs_per_turn(const struct racer *racer, void *ctx)
{
    int runs = 1;
    for (racer->run(ctx); runs < 1 << 24; runs *= 2) {
        const double once = seconds_of(racer, ctx, runs), again = seconds_of(racer, ctx, runs);
        if ((once < again ? once : again) * runs >= 100e-6)
            break;
    }
    return runs * 2;
}

/* `amount` is what one run does: operations (NS_EACH) or bytes (GB_PER_S). Prints a line for each
 * racer: median, p10 to p90, and the median over all turns of its time by the yardstick's in the
 * same turn. */
static inline void race(const struct race *r, enum unit unit, double amount,
                        const struct racer *racers, int n, void *ctx)
{
    static double sample[MAX_RACERS][MAX_TURNS], ratio[MAX_TURNS];
    int runs[MAX_RACERS], turns = 0;
    for (int w = 0; w < n; w++)
        runs[w] = runs_per_turn(&racers[w], ctx);
    const double end = now_s() + (r->quick ? 0.1 : 0.6);
    while (turns < 9 || (turns < MAX_TURNS && now_s() < end)) {
        for (int w = 0; w < n; w++)
            sample[w][turns] = seconds_of(&racers[w], ctx, runs[w]);
        turns++;
    }
    double of_yardstick[MAX_RACERS], scale = unit == NS_EACH ? 1e9 / amount : 1e-9 * amount;
    for (int w = 0; w < n; w++) {
        for (int i = 0; i < turns; i++)
            ratio[i] = sample[w][i] / sample[0][i];
        of_yardstick[w] = quantile(ratio, turns, 0.5);
    }
    for (int w = 0; w < n; w++) {
        double at[3]; /* p10, median, p90 of what is shown */
        for (int i = 0; i < 3; i++) {
            const double t =
                quantile(sample[w], turns, unit == NS_EACH ? 0.1 + 0.4 * i : 0.9 - 0.4 * i);
            at[i] = unit == NS_EACH ? t * scale : scale / t;
        }
        const char *name = unit == NS_EACH ? "ns" : "GB/s";
        printf("%-11s %-26s %-22s %8.1f %-4s (%.1f - %.1f)", r->group, r->size, racers[w].what,
               at[1], name, at[0], at[2]);
        printf(w > 0 ? "  %.2f times %s\n" : "\n", of_yardstick[w], racers[0].what);
        if (r->json)
            fprintf(r->json,
                    "{\"group\":\"%s\",\"size\":\"%s\",\"what\":\"%s\",\"unit\":\"%s\",\"median\":%"
                    ".4g,\"p10\":%.4g,"
                    "\"p90\":%.4g,\"yardstick\":\"%s\",\"times_yardstick\":%.4g}\n",
                    r->group, r->size, racers[w].what, name, at[1], at[0], at[2], racers[0].what,
                    of_yardstick[w]);
    }
    fflush(stdout);
}

#endif
