/* SPDX-License-Identifier: MIT */
/* sweep_expf.c: exp of every float from the lowest that is looked at to the overflow, and log of
 * every float from 1/2 to 2^40 (which holds every softmax denominator). No part of `make test`: it
 * takes some two minutes of CPU time. Every instruction set must give the same bits of exp
 * everywhere; the worst error of each function is printed with the input it stands at, and compared
 * with the bound that numerics/coef.h states.
 *
 *     make c/build/tests/sweep_expf && c/build/tests/sweep_expf
 *
 * The reference is exp and log in double, 2^28 times finer than the error looked for. */
#include <pthread.h>

#include "exp_ref.h"
#include "numerics/canon.h"

#define EXP_BOUND 0.9889 /* coef.h */
#define LOG_BOUND 0.8868

enum { CHUNK = 4096, MAX_THREADS = 64, MAX_ISAS = 8 };

struct worst {
    double ulps;
    float at;
    uint64_t checked, falls; /* inputs looked at; neighbours by which exp goes down */
    uint64_t differing;      /* inputs where two instruction sets disagree */
};

/* Words first, first + 1, ..., last of one function, dealt out to the threads chunk by chunk. */
struct sweep {
    uint32_t first, last;
    void (*chunk)(const float *x, int n, struct worst *w);
    struct worst worst[MAX_THREADS];
    int threads;
};

/* ulps_off for a normal double, by its exponent field: this runs billions of times. */
static double distance(float got, double want)
{
    uint64_t bits;
    double per_ulp;
    memcpy(&bits, &want, sizeof bits);
    bits = (2 * 1023 + 23 - (bits >> 52 & 0x7FF)) << 52;
    memcpy(&per_ulp, &bits, sizeof per_ulp);
    return fabs((got - want) * per_ulp);
}

static void look(struct worst *w, float x, float got, double want)
{
    const double off = distance(got, want);
    w->checked++;
    if (!(off <= w->ulps)) { /* a NaN too */
        w->ulps = off;
        w->at = x;
    }
}

static void exp_chunk(const float *x, int n, struct worst *w)
{
    static _Thread_local float y[MAX_ISAS][CHUNK];
    const struct tl_kernels *k;
    int isas = 0;
    for (; isas < MAX_ISAS && (k = tl_kernels_usable(isas)); isas++)
        k->exp_n(x, y[isas], n);
    const float *const best = y[isas - 1];
    for (int i = 0; i < n; i++) {
        const double want = exp((double)x[i]);
        for (int s = 0; s < isas; s++)
            w->differing += float_bits(y[s][i]) != float_bits(best[i]);
        if (want >= 0x1p-126)
            look(w, x[i], best[i], want);
        else if (best[i] != 0 && best[i] != 0x1p-126f)
            look(w, x[i], NAN, 1); /* neither flushed nor rounded up to the least normal number */
        const float before = i ? best[i - 1] : best[0];
        w->falls += signbit(x[i]) ? best[i] > before : best[i] < before;
    }
}

static void log_chunk(const float *x, int n, struct worst *w)
{
    for (int i = 0; i < n; i++) {
        const float y = canon_log(x[i]);
        if (x[i] != 1)
            look(w, x[i], y, log((double)x[i]));
        else if (float_bits(y) != 0)
            look(w, x[i], NAN, 1);
    }
}

struct share {
    struct sweep *sweep;
    int thread;
};

static void *run_share(void *arg)
{
    const struct share *share = arg;
    struct sweep *s = share->sweep;
    float x[CHUNK];
    for (uint64_t at = s->first + (uint64_t)share->thread * CHUNK; at <= s->last;
         at += (uint64_t)s->threads * CHUNK) {
        const int n = s->last - at < CHUNK - 1 ? (int)(s->last - at) + 1 : CHUNK;
        for (int i = 0; i < n; i++)
            x[i] = float_of((uint32_t)at + (uint32_t)i);
        s->chunk(x, n, &s->worst[share->thread]);
    }
    return NULL;
}

static struct worst run_sweep(struct sweep *s)
{
    pthread_t thread[MAX_THREADS];
    struct share share[MAX_THREADS];
    struct worst all = {0};
    for (int i = 0; i < s->threads; i++) {
        share[i] = (struct share){s, i};
        if (pthread_create(&thread[i], NULL, run_share, &share[i]) != 0) {
            perror("pthread_create");
            exit(2);
        }
    }
    for (int i = 0; i < s->threads; i++) {
        pthread_join(thread[i], NULL);
        const struct worst *w = &s->worst[i];
        if (!(w->ulps <= all.ulps)) {
            all.ulps = w->ulps;
            all.at = w->at;
        }
        all.checked += w->checked;
        all.falls += w->falls;
        all.differing += w->differing;
    }
    return all;
}

static void sweep(const char *what, uint32_t first, uint32_t last,
                  void (*chunk)(const float *, int, struct worst *), double bound)
{
    const long cpus = sysconf(_SC_NPROCESSORS_ONLN);
    struct sweep s = {.first = first, .last = last, .chunk = chunk};
    s.threads = cpus < 1 ? 1 : cpus > MAX_THREADS ? MAX_THREADS : (int)cpus;
    const struct worst w = run_sweep(&s);
    printf("%s: %llu inputs, worst %.6f ulp at %a (%08x, %.9g), bound %.4f;\n", what,
           (unsigned long long)w.checked, w.ulps, (double)w.at, float_bits(w.at), (double)w.at,
           bound);
    printf("    goes down %llu times; %llu differ by instruction set\n",
           (unsigned long long)w.falls, (unsigned long long)w.differing);
    fflush(stdout);
    CHECK(w.ulps <= bound, "%s: %.6f ulp at %a", what, w.ulps, (double)w.at);
    CHECK(w.differing == 0, "%s: %llu results differ by instruction set", what,
          (unsigned long long)w.differing);
}

TEST(exp_of_positive_floats)
{
    sweep("exp, x >= 0", 0x00000000, 0x42B17217, exp_chunk, EXP_BOUND);
}

TEST(exp_of_negative_floats)
{
    sweep("exp, x <= -0", 0x80000000, 0xC2D00001, exp_chunk, EXP_BOUND);
}

TEST(log_of_denominators)
{
    sweep("log", 0x3F000000, 0x53800000, log_chunk, LOG_BOUND);
}

CHECK_MAIN()
