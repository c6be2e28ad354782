/* SPDX-License-Identifier: MIT */
/* bench.h: timing for benchmarks that interleave what they compare: a clock, order statistics, repeatable inputs, and a
 * probe that tells whether two threads really have two cores at the moment. */
#ifndef TL_BENCH_H
#define TL_BENCH_H

#include <pthread.h>
#include <sched.h>
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

#endif
