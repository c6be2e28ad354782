/* SPDX-License-Identifier: MIT */
/* turns.h: entrants that may differ in everything take turns in one process, so that whatever
 * disturbs the machine disturbs them alike. Ratios are formed turn by turn and their median is
 * shown.
 *
 * turn: every entrant once. Dropped, counted and done again is what the machine spoilt: a run
 * during which the system took the CPU away from the caller; and, where threads take part, a turn
 * before which two threads did not do 1.4 times the work of one. Where that never ends, what comes
 * counts. */
#ifndef TL_BENCH_TURNS_H
#define TL_BENCH_TURNS_H

#include <stdbool.h>
#include <sys/resource.h>

#include "bench.h"
#include "kernels/kernels.h"
#include "tinyllm/pool.h"

struct entrant {
    const char *what;
    void (*run)(void *ctx);
    void *ctx;
    const char *isa; /* what its kernels run on; NULL: it has none */
    int calls;       /* of one turn; the sample is their mean */
    double sample[MAX_TURNS];
};

struct tally {
    int kept, dropped; /* turns; turns and runs */
};

/* ---- two cores? ---- */

static double probe_seconds[2];

static inline void probe(void *ctx, int64_t lo, int64_t hi, int worker)
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

static inline bool two_cores(tl_pool *tp)
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

/* CPUs this process may run on. */
static inline int n_cpus(void)
{
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

/* ---- instruction sets that enter ---- */

enum { MAX_ISAS = 4 };

/* Those of a list like "avx2,avx512", which is cut up. Returns how many. */
static inline int isas_named(const char **isa, char *list)
{
    int n = 0;
    for (char *name = strtok(list, ","); name && n < MAX_ISAS; name = strtok(NULL, ","))
        isa[n++] = name;
    return n;
}

/* All this CPU has, slowest first; scalar only where there is nothing else. */
static inline int isas_usable(const char **isa)
{
    const struct tl_kernels *table;
    int n = 0;
    for (int i = 0; (table = tl_kernels_usable(i)) && n < MAX_ISAS; i++)
        if (strcmp(table->name, "scalar") != 0)
            isa[n++] = table->name;
    if (n == 0)
        isa[n++] = "scalar";
    return n;
}

/* ---- turns ---- */

/* How often the system has taken the CPU away from this thread. */
static inline long preemptions(void)
{
    struct rusage usage;
    return getrusage(RUSAGE_THREAD, &usage) == 0 ? usage.ru_nivcsw : 0;
}

static inline double run_once(struct entrant *e)
{
    if (e->isa)
        tl_kernels_select(e->isa);
    const double start = now_s();
    for (int i = 0; i < e->calls; i++)
        e->run(e->ctx);
    return (now_s() - start) / e->calls;
}

static inline double run_undisturbed(struct entrant *e, struct tally *tally)
{
    for (int tries = 0;; tries++) {
        const long before = preemptions();
        const double seconds = run_once(e);
        if (preemptions() == before || tries == 3)
            return seconds;
        tally->dropped++;
    }
}

/* For about so many seconds. The first turn, which warms up, does not count and tells how many
 * there is time for. `tp`:
 * the pool some entrant runs on, or NULL. */
static inline struct tally take_turns(struct entrant *e, int n, tl_pool *tp, double seconds)
{
    struct tally tally = {0, 0};
    const double start = now_s();
    for (int i = 0; i < n; i++)
        run_once(&e[i]);
    const double wanted = seconds / (now_s() - start);
    const int turns = wanted < 9 ? 9 : wanted > MAX_TURNS ? MAX_TURNS : (int)wanted;
    int patience = 4 * turns;
    while (tally.kept < turns) {
        if (tp && patience > 0 && !two_cores(tp)) {
            tally.dropped++, patience--;
            continue;
        }
        for (int i = 0; i < n; i++)
            e[i].sample[tally.kept] = run_undisturbed(&e[i], &tally);
        tally.kept++;
    }
    return tally;
}

/* Calls of a turn that take a fifth of a millisecond, far longer than reading the clock. */
static inline int calls_per_turn(struct entrant *e)
{
    e->calls = 1;
    while (run_once(e) * e->calls < 100e-6 && e->calls < 1 << 20)
        e->calls *= 2;
    return e->calls * 2;
}

/* ---- what is said of the samples ---- */

/* Ends a line that shows a tally. */
static inline const char *busy(struct tally t)
{
    return t.dropped > t.kept ? "  machine busy\n" : "\n";
}

struct spread {
    double p10, median, p90;
};

static inline struct spread spread_of(const double *sample, int n)
{
    double sorted[MAX_TURNS];
    memcpy(sorted, sample, (size_t)n * sizeof *sorted);
    return (struct spread){quantile(sorted, n, 0.1), quantile(sorted, n, 0.5),
                           quantile(sorted, n, 0.9)};
}

/* The median of a / b over the turns. */
static inline double paired_ratio(const double *a, const double *b, int n)
{
    double ratio[MAX_TURNS];
    for (int i = 0; i < n; i++)
        ratio[i] = a[i] / b[i];
    return quantile(ratio, n, 0.5);
}

#endif
