/* SPDX-License-Identifier: MIT */
/* test_pool.c: ranges, nesting, two callers, fork, signals, float mode, sleep and wake-up of the
 * thread pool.
 *
 * Ranges run on other threads and may not CHECK: they write down what they saw, and the test looks
 * at it afterwards. A test that could wait for ever sets an alarm, which ends the program. */
#include <fenv.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/wait.h>
#include <time.h>

#include "check.h"
#include "hook.h"
#include "runtime/cpus.h"
#include "runtime/pool_run.h"
#include "threads.h"

#define WATCHDOG_SECONDS 60

static tl_pool *pool_of(int n_threads)
{
    tl_pool *pool = NULL;
    alarm(WATCHDOG_SECONDS);
    CHECK_STATUS(tl_pool_create(n_threads, &pool), TL_OK);
    CHECK(pool && (n_threads == 0 || tl_pool_threads(pool) == n_threads), "%d threads",
          tl_pool_threads(pool));
    return pool;
}

static void pool_done(tl_pool *pool)
{
    tl_pool_destroy(pool);
    alarm(0);
}

static void nap_us(long us)
{
    const struct timespec t = {.tv_sec = us / 1000000, .tv_nsec = us % 1000000 * 1000};
    nanosleep(&t, NULL);
}

/* Every thread that comes waits until `parties` have come. */
struct rendezvous {
    _Atomic int arrived;
    int parties;
};

static void meet(struct rendezvous *r)
{
    const int generation = atomic_fetch_add(&r->arrived, 1) / r->parties;
    for (int i = 0; atomic_load(&r->arrived) / r->parties == generation; i++)
        i < 100 ? (void)sched_yield() : nap_us(50);
}

static void meet_range(void *ctx, int64_t lo, int64_t hi, int worker)
{
    (void)lo, (void)hi, (void)worker;
    meet(ctx);
}

/* ---- ranges ---- */

enum { MAX_RANGES = 1001 };

struct ledger {
    int64_t n, grain;
    int threads;
    _Atomic int runs[MAX_RANGES]; /* how often the k-th range ran */
    _Atomic int bad;              /* ranges with wrong bounds or worker */
    _Atomic int busy[64];         /* per worker: is in a range */
};

static void note_range(void *ctx, int64_t lo, int64_t hi, int worker)
{
    struct ledger *ledger = ctx;
    const int64_t k = lo / ledger->grain, rest = ledger->n - lo;
    if (lo < 0 || lo >= ledger->n || lo % ledger->grain != 0 || k >= MAX_RANGES || worker < 0 ||
        worker >= ledger->threads || hi != lo + (rest < ledger->grain ? rest : ledger->grain)) {
        atomic_fetch_add(&ledger->bad, 1);
        return;
    }
    if (atomic_exchange(&ledger->busy[worker], 1) != 0)
        atomic_fetch_add(&ledger->bad, 1);
    atomic_fetch_add(&ledger->runs[k], 1);
    atomic_store(&ledger->busy[worker], 0);
}

static void check_ledger(struct ledger *ledger)
{
    const int64_t n_ranges = ledger->n / ledger->grain + (ledger->n % ledger->grain != 0);
    CHECK(ledger->bad == 0, "n=%lld grain=%lld threads=%d: %d bad ranges", (long long)ledger->n,
          (long long)ledger->grain, ledger->threads, ledger->bad);
    for (int64_t k = 0; k < MAX_RANGES; k++)
        CHECK(ledger->runs[k] == (k < n_ranges),
              "n=%lld grain=%lld threads=%d: range %lld ran %d times", (long long)ledger->n,
              (long long)ledger->grain, ledger->threads, (long long)k, ledger->runs[k]);
}

static void check_ranges(tl_pool *pool, int64_t n, int64_t grain)
{
    static struct ledger ledger;
    memset(&ledger, 0, sizeof ledger);
    ledger.n = n, ledger.grain = grain, ledger.threads = tl_pool_threads(pool);
    CHECK_STATUS(tl_parallel_for(pool, n, grain, note_range, &ledger), TL_OK);
    check_ledger(&ledger);
}

TEST(every_range_runs_exactly_once)
{
    static const int64_t sizes[] = {0, 1, 2, 3, 4, 5, 63, 64, 65, 1000, 1001};
    static const int64_t grains[] = {1, 2, 3, 7, 64, 999, 1000, 1001, 5000, INT64_MAX};
    static const int threads[] = {0 /* NULL pool */, 1, 2, 4, 64};
    for (size_t t = 0; t < sizeof threads / sizeof threads[0]; t++) {
        tl_pool *pool = threads[t] ? pool_of(threads[t]) : NULL;
        for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++)
            for (size_t j = 0; j < sizeof grains / sizeof grains[0]; j++) {
                if (threads[t] < 64 || j < 4) /* a large pool on a small machine is slow to wake */
                    check_ranges(pool, sizes[i], grains[j]);
            }
        pool_done(pool);
    }
}

struct bounds {
    _Atomic int n;
    int64_t lo[64], hi[64];
};

static void note_bounds(void *ctx, int64_t lo, int64_t hi, int worker)
{
    struct bounds *bounds = ctx;
    const int i = atomic_fetch_add(&bounds->n, 1);
    (void)worker;
    if (i < 64)
        bounds->lo[i] = lo, bounds->hi[i] = hi;
}

/* The ranges, whatever their order, are a chain from 0 to n, each as long as the grain says. */
static void check_chain(const struct bounds *bounds, int64_t n, int64_t grain, int n_ranges)
{
    CHECK(bounds->n == n_ranges, "n=%lld grain=%lld: %d ranges, want %d", (long long)n,
          (long long)grain, bounds->n, n_ranges);
    int64_t at = 0;
    for (int found = 0; found < n_ranges; found++) {
        int i = 0;
        while (i < n_ranges && bounds->lo[i] != at)
            i++;
        CHECK(i < n_ranges, "n=%lld grain=%lld: no range starts at %lld", (long long)n,
              (long long)grain, (long long)at);
        CHECK(bounds->hi[i] > at && (bounds->hi[i] == n || bounds->hi[i] - at == grain),
              "[%lld, %lld)", (long long)at, (long long)bounds->hi[i]);
        at = bounds->hi[i];
    }
    CHECK(at == n, "n=%lld: the last range ends at %lld", (long long)n, (long long)at);
}

TEST(bounds_are_64_bits_wide)
{
    static const struct {
        int64_t n, grain;
        int n_ranges;
    } cases[] = {{(INT64_C(1) << 31) + 5, INT64_C(1) << 26, 33},
                 {INT64_C(1) << 40, INT64_C(1) << 34, 64},
                 {(INT64_C(1) << 40) + 1, INT64_C(1) << 35, 33},
                 {INT64_MAX, INT64_C(1) << 58, 32},
                 {INT64_MAX, INT64_MAX / 3, 4}, /* 2^63 - 1 is 1 more than a multiple of 3 */
                 {INT64_MAX, INT64_MAX / 2 + 1, 2},
                 {INT64_MAX, INT64_MAX - 1, 2},
                 {INT64_MAX, INT64_MAX, 1},
                 {1, INT64_MAX, 1},
                 {INT64_MAX - 1, INT64_MAX, 1}};
    for (int threads = 0; threads <= 4; threads += 2) {
        tl_pool *pool = threads ? pool_of(threads) : NULL;
        for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
            struct bounds bounds = {.n = 0};
            CHECK_STATUS(tl_parallel_for(pool, cases[i].n, cases[i].grain, note_bounds, &bounds),
                         TL_OK);
            check_chain(&bounds, cases[i].n, cases[i].grain, cases[i].n_ranges);
        }
        pool_done(pool);
    }
}

struct order {
    pthread_t caller;
    int64_t next;
    int wrong;
};

static void note_order(void *ctx, int64_t lo, int64_t hi, int worker)
{
    struct order *order = ctx;
    if (lo != order->next || worker != 0 || !pthread_equal(pthread_self(), order->caller))
        order->wrong++;
    order->next = hi;
}

TEST(null_pool_and_pool_of_one_run_in_order_on_the_caller)
{
    tl_pool *one = pool_of(1), *const pools[] = {NULL, one};
    for (int i = 0; i < 2; i++) {
        struct order order = {.caller = pthread_self()};
        CHECK_STATUS(tl_parallel_for(pools[i], 1000, 7, note_order, &order), TL_OK);
        CHECK(order.wrong == 0 && order.next == 1000, "%d ranges wrong, end %lld", order.wrong,
              (long long)order.next);
    }
    CHECK(tl_pool_threads(NULL) == 1, "%d", tl_pool_threads(NULL));
    pool_done(one);
}

static void write_squares(void *ctx, int64_t lo, int64_t hi, int worker)
{
    (void)worker;
    for (int64_t i = lo; i < hi; i++)
        ((int64_t *)ctx)[i] = i * i;
}

TEST(what_ranges_wrote_is_visible_to_the_caller)
{
    static int64_t squares[5000];
    tl_pool *pool = pool_of(4);
    for (int round = 0; round < 20; round++) {
        memset(squares, 0xFF, sizeof squares);
        CHECK_STATUS(tl_parallel_for(pool, 5000, 37, write_squares, squares), TL_OK);
        for (int64_t i = 0; i < 5000; i++)
            CHECK(squares[i] == i * i, "round %d: element %lld is %lld", round, (long long)i,
                  (long long)squares[i]);
    }
    pool_done(pool);
}

struct late {
    struct rendezvous all;
    _Atomic int ended;
};

static void end_late(void *ctx, int64_t lo, int64_t hi, int worker)
{
    struct late *late = ctx;
    (void)lo, (void)hi;
    meet(&late->all);
    if (worker != 0)
        nap_us(5000);
    atomic_fetch_add(&late->ended, 1);
}

TEST(a_call_ends_after_its_last_range)
{
    tl_pool *pool = pool_of(3);
    struct late late = {.all = {.parties = 3}};
    for (int round = 1; round <= 3; round++) {
        CHECK_STATUS(tl_parallel_for(pool, 3, 1, end_late, &late), TL_OK);
        CHECK(late.ended == 3 * round, "round %d: %d ranges had ended", round, late.ended);
    }
    pool_done(pool);
}

/* ---- bad arguments ---- */

static void never(void *ctx, int64_t lo, int64_t hi, int worker)
{
    (void)lo, (void)hi, (void)worker;
    ++*(_Atomic int *)ctx;
}

static void never_with_scratch(void *ctx, int64_t lo, int64_t hi, int worker, void *scratch)
{
    (void)scratch;
    never(ctx, lo, hi, worker);
}

TEST(empty_calls_run_nothing)
{
    tl_pool *pool = pool_of(4), *one = pool_of(1), *const pools[] = {NULL, one, pool};
    for (int i = 0; i < 3; i++) {
        tl_set_last_error("kept");
        CHECK_STATUS(tl_parallel_for(pools[i], 0, 1, never, NULL), TL_OK); /* would write to NULL */
        CHECK_STATUS(tl_parallel_for(pools[i], 0, INT64_MAX, never, NULL), TL_OK);
        CHECK(strcmp(tl_last_error(), "kept") == 0, "\"%s\"", tl_last_error());
    }
    tl_pool_destroy(one);
    pool_done(pool);
}

TEST(bad_arguments_are_refused)
{
    static const struct {
        int64_t n, grain;
        bool fn;
        const char *says;
    } bad[] = {{-1, 1, true, "tl_parallel_for: n = -1"},
               {INT64_MIN, 1, true, "tl_parallel_for: n = -9223372036854775808"},
               {10, 0, true, "tl_parallel_for: grain = 0"},
               {10, -3, true, "tl_parallel_for: grain = -3"},
               {0, 0, true, "tl_parallel_for: grain = 0"},
               {10, 1, false, "tl_parallel_for: "},
               {0, 1, false, "tl_parallel_for: "}};
    tl_pool *pool = pool_of(4), *one = pool_of(1), *const pools[] = {NULL, one, pool};
    _Atomic int ran = 0;
    for (int i = 0; i < 3; i++)
        for (size_t j = 0; j < sizeof bad / sizeof bad[0]; j++) {
            tl_set_last_error("");
            CHECK_STATUS(
                tl_parallel_for(pools[i], bad[j].n, bad[j].grain, bad[j].fn ? never : NULL, &ran),
                TL_EINVAL);
            CHECK(strncmp(tl_last_error(), bad[j].says, strlen(bad[j].says)) == 0, "\"%s\"",
                  tl_last_error());
        }
    CHECK(ran == 0, "%d ranges ran", ran);
    tl_pool_destroy(one);
    pool_done(pool);
}

TEST(kernels_report_in_their_own_name)
{
    CHECK_STATUS(tl_pool_run("tl_x", NULL, -1, 1, never, NULL), TL_EINVAL);
    CHECK(strncmp(tl_last_error(), "tl_x: n = -1", 12) == 0, "\"%s\"", tl_last_error());
}

TEST(create_refuses_bad_counts)
{
    static const int bad[] = {-1, INT32_MIN, TL_POOL_MAX_THREADS + 1, 100000, INT32_MAX};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        tl_pool *pool = (tl_pool *)&pool;
        CHECK_STATUS(tl_pool_create(bad[i], &pool), TL_EINVAL);
        CHECK(pool == NULL, "n_threads=%d left something", bad[i]);
        char count[16];
        snprintf(count, sizeof count, "%d", bad[i]);
        CHECK(strncmp(tl_last_error(), "tl_pool_create: ", 16) == 0, "\"%s\"", tl_last_error());
        CHECK(strstr(tl_last_error(), count), "\"%s\"", tl_last_error());
    }
    CHECK_STATUS(tl_pool_create(2, NULL), TL_EINVAL);
    CHECK_STATUS(tl_pool_create(-1, NULL), TL_EINVAL);
}

TEST(destroy_of_null_does_nothing)
{
    tl_set_last_error("kept");
    tl_pool_destroy(NULL);
    CHECK(strcmp(tl_last_error(), "kept") == 0, "\"%s\"", tl_last_error());
}

/* ---- nesting ---- */

struct nest {
    tl_pool *pool, *other;
    struct rendezvous all; /* so that every thread is in a range */
    _Atomic int wrong, inner_ran, ranges_ran;
};

static void expect_status(struct nest *nest, tl_status got, tl_status want)
{
    if (got != want)
        atomic_fetch_add(&nest->wrong, 1);
}

static void expect_busy(struct nest *nest)
{
    tl_set_last_error("");
    expect_status(nest, tl_parallel_for(nest->pool, 100, 1, never, &nest->inner_ran), TL_EBUSY);
    if (strncmp(tl_last_error(), "tl_parallel_for: ", 17) != 0)
        atomic_fetch_add(&nest->wrong, 1);
    expect_status(nest, tl_parallel_for(nest->pool, 0, 1, never, &nest->inner_ran), TL_EBUSY);
    /* looked at first */
    expect_status(nest, tl_parallel_for(nest->pool, -1, 1, never, &nest->inner_ran), TL_EINVAL);
    expect_status(nest,
                  tl_pool_run_with_scratch("tl_x", nest->pool, 1, 1, never_with_scratch,
                                           &nest->inner_ran),
                  TL_EBUSY);
    tl_set_last_error("");
    expect_status(nest, tl_pool_check("tl_x", nest->pool), TL_EBUSY);
    if (strncmp(tl_last_error(), "tl_x: ", 6) != 0)
        atomic_fetch_add(&nest->wrong, 1);
}

static void busy_range(void *ctx, int64_t lo, int64_t hi, int worker)
{
    struct nest *nest = ctx;
    (void)lo, (void)hi, (void)worker;
    meet(&nest->all);
    expect_busy(nest);
    atomic_fetch_add(&nest->ranges_ran, 1);
}

TEST(a_call_from_inside_is_busy_on_every_thread)
{
    static const int threads[] = {1, 2, 4, 8};
    for (int i = 0; i < 8; i++) {
        /* a job for every thread, or one of one range */
        const int n_threads = threads[i / 2], n = i % 2 ? 1 : n_threads;
        struct nest nest = {.pool = pool_of(n_threads), .all = {.parties = n}};
        CHECK_STATUS(tl_parallel_for(nest.pool, n, 1, busy_range, &nest), TL_OK);
        CHECK(nest.wrong == 0 && nest.inner_ran == 0 && nest.ranges_ran == n,
              "threads=%d n=%d: %d wrong, %d inner, %d ran", n_threads, n, nest.wrong,
              nest.inner_ran, nest.ranges_ran);
        CHECK_STATUS(tl_pool_check("tl_x", nest.pool), TL_OK);
        check_ranges(nest.pool, 100, 3); /* and works afterwards */
        pool_done(nest.pool);
    }
    CHECK_STATUS(tl_pool_check("tl_x", NULL), TL_OK);
}

static void busy_from_there(void *ctx, int64_t lo, int64_t hi, int worker)
{
    struct nest *nest = ctx;
    (void)lo, (void)hi, (void)worker;
    expect_busy(nest);
}

static void null_pool_range(void *ctx, int64_t lo, int64_t hi, int worker)
{
    struct nest *nest = ctx;
    (void)lo, (void)hi, (void)worker;
    expect_status(nest, tl_parallel_for(NULL, 10, 3, never, &nest->inner_ran), TL_OK);
    expect_status(nest, tl_parallel_for(NULL, 2, 1, busy_from_there, nest), TL_OK);
}

TEST(a_null_pool_runs_inside_a_range_and_hides_nothing)
{
    for (int threads = 1; threads <= 4; threads *= 2) {
        struct nest nest = {.pool = pool_of(threads)};
        CHECK_STATUS(tl_parallel_for(nest.pool, 8, 1, null_pool_range, &nest), TL_OK);
        CHECK(nest.wrong == 0 && nest.inner_ran == 8 * 4, "threads=%d: %d wrong, %d inner", threads,
              nest.wrong, nest.inner_ran);
        pool_done(nest.pool);
    }
}

static void back_into_the_first(void *ctx, int64_t lo, int64_t hi, int worker)
{
    struct nest *nest = ctx;
    (void)lo, (void)hi, (void)worker;
    meet(&nest->all);
    expect_busy(nest);
    tl_set_last_error("");
    tl_pool_destroy(nest->pool);
    if (strncmp(tl_last_error(), "tl_pool_destroy: ", 17) != 0)
        atomic_fetch_add(&nest->wrong, 1);
}

static void into_the_other(void *ctx, int64_t lo, int64_t hi, int worker)
{
    struct nest *nest = ctx;
    (void)lo, (void)hi, (void)worker;
    nest->all.parties = tl_pool_threads(nest->other);
    expect_status(
        nest,
        tl_parallel_for(nest->other, tl_pool_threads(nest->other), 1, back_into_the_first, nest),
        TL_OK);
    expect_status(nest, tl_parallel_for(nest->other, 50, 1, never, &nest->inner_ran), TL_OK);
    expect_busy(nest);
}

TEST(another_pool_runs_inside_a_range_and_the_way_back_is_busy)
{
    for (int threads = 1; threads <= 4; threads *= 2) {
        struct nest nest = {.pool = pool_of(threads), .other = pool_of(3), .all = {.parties = 3}};
        CHECK_STATUS(tl_parallel_for(nest.pool, 1, 1, into_the_other, &nest), TL_OK);
        CHECK(nest.wrong == 0 && nest.inner_ran == 50, "threads=%d: %d wrong, %d inner", threads,
              nest.wrong, nest.inner_ran);
        check_ranges(nest.pool, 100, 3);
        check_ranges(nest.other, 100, 3);
        tl_pool_destroy(nest.other);
        pool_done(nest.pool);
    }
}

static void both_ways(void *ctx, int64_t lo, int64_t hi, int worker)
{
    struct nest *nest = ctx;
    (void)lo, (void)hi, (void)worker;
    expect_status(nest, tl_parallel_for(nest->other, 10, 1, busy_from_there, nest), TL_OK);
}

TEST(many_ranges_use_another_pool_at_once)
{
    struct nest nest = {.pool = pool_of(4), .other = pool_of(3)};
    CHECK_STATUS(tl_parallel_for(nest.pool, 40, 1, both_ways, &nest), TL_OK);
    CHECK(nest.wrong == 0 && nest.inner_ran == 0, "%d wrong, %d inner", nest.wrong, nest.inner_ran);
    tl_pool_destroy(nest.other);
    pool_done(nest.pool);
}

static void destroy_from_inside(void *ctx, int64_t lo, int64_t hi, int worker)
{
    struct nest *nest = ctx;
    (void)lo, (void)hi, (void)worker;
    meet(&nest->all);
    tl_set_last_error("");
    tl_pool_destroy(nest->pool);
    if (strncmp(tl_last_error(), "tl_pool_destroy: ", 17) != 0)
        atomic_fetch_add(&nest->wrong, 1);
}

TEST(destroy_from_inside_does_nothing)
{
    for (int threads = 1; threads <= 4; threads *= 2) {
        struct nest nest = {.pool = pool_of(threads), .all = {.parties = threads}};
        CHECK_STATUS(tl_parallel_for(nest.pool, threads, 1, destroy_from_inside, &nest), TL_OK);
        CHECK(nest.wrong == 0, "threads=%d: %d wrong", threads, nest.wrong);
        check_ranges(nest.pool, 100, 3);
        pool_done(nest.pool);
    }
}

/* ---- several threads ---- */

static void count_range(void *ctx, int64_t lo, int64_t hi, int worker)
{
    (void)lo, (void)hi, (void)worker;
    atomic_fetch_add((_Atomic int *)ctx, 1);
}

struct gatekept {
    tl_pool *pool;
    _Atomic int begun, may_end, ended, second_ran;
    tl_status second_status;
};

static void wait_inside(void *ctx, int64_t lo, int64_t hi, int worker)
{
    struct gatekept *g = ctx;
    (void)lo, (void)hi, (void)worker;
    atomic_store(&g->begun, 1);
    while (!atomic_load(&g->may_end))
        nap_us(100);
    nap_us(2000);
    atomic_fetch_add(&g->ended, 1);
}

static void *first_caller(void *arg)
{
    struct gatekept *g = arg;
    tl_parallel_for(g->pool, 4, 1, wait_inside, g);
    return NULL;
}

static void *lone_plain_caller(void *arg)
{
    struct gatekept *g = arg;
    tl_parallel_for(g->pool, 4, 4, wait_inside, g);
    return NULL;
}

static void *second_caller(void *arg)
{
    struct gatekept *g = arg;
    g->second_status = tl_parallel_for(g->pool, 10, 1, never, &g->second_ran);
    return NULL;
}

static pthread_t start(void *(*fn)(void *), void *arg)
{
    pthread_t thread;
    CHECK(pthread_create(&thread, NULL, fn, arg) == 0, "no thread");
    return thread;
}

TEST(a_second_caller_waits_for_the_first)
{
    for (int threads = 1; threads <= 4; threads += 3) {
        struct gatekept g = {.pool = pool_of(threads), .second_status = TL_EIO};
        const pthread_t first = start(first_caller, &g);
        while (!atomic_load(&g.begun))
            nap_us(100);
        const pthread_t second = start(second_caller, &g);
        nap_us(30000);
        const int early = g.second_ran;
        atomic_store(&g.may_end, 1);
        pthread_join(second, NULL);
        pthread_join(first, NULL);
        CHECK(early == 0, "threads=%d: %d ranges ran while the first job did", threads, early);
        CHECK(g.second_status == TL_OK && g.second_ran == 10 && g.ended == 4,
              "threads=%d: status %d, %d and %d ranges", threads, g.second_status, g.second_ran,
              g.ended);
        pool_done(g.pool);
    }
}

TEST(destroy_waits_for_a_running_call)
{
    for (int threads = 1; threads <= 4; threads += 3) {
        struct gatekept g = {.pool = pool_of(threads)};
        const pthread_t first = start(first_caller, &g);
        while (!atomic_load(&g.begun))
            nap_us(100);
        atomic_store(&g.may_end, 1);
        tl_pool_destroy(g.pool);
        const int ended = g.ended;
        pthread_join(first, NULL);
        alarm(0);
        CHECK(ended == 4, "threads=%d: destroy returned when %d of 4 ranges had ended", threads,
              ended);
    }
}

struct crowd {
    tl_pool *pool;
    /* busy: per worker number, whoever's job it is */
    _Atomic int busy[4], clashes, ranges, failures;
};

static void crowded_range(void *ctx, int64_t lo, int64_t hi, int worker)
{
    struct crowd *crowd = ctx;
    (void)lo, (void)hi;
    if (atomic_exchange(&crowd->busy[worker], 1) != 0)
        atomic_fetch_add(&crowd->clashes, 1);
    if (atomic_fetch_add(&crowd->ranges, 1) % 5 == 0)
        sched_yield();
    atomic_store(&crowd->busy[worker], 0);
}

/* A job of one range shares its number, 0, with the job that has the turn. */
static void lone_range(void *ctx, int64_t lo, int64_t hi, int worker)
{
    struct crowd *crowd = ctx;
    (void)lo, (void)hi;
    atomic_fetch_add(&crowd->clashes, worker != 0);
    atomic_fetch_add(&crowd->ranges, 1);
}

static void *call_often(void *arg)
{
    struct crowd *crowd = arg;
    for (int i = 0; i < 300; i++)
        if (tl_parallel_for(crowd->pool, i % 17, 1, i % 17 == 1 ? lone_range : crowded_range,
                            crowd) != TL_OK)
            atomic_fetch_add(&crowd->failures, 1);
    return NULL;
}

TEST(several_callers_share_a_pool)
{
    struct crowd crowd = {.pool = pool_of(4)};
    pthread_t callers[5];
    int want = 0;
    for (int i = 0; i < 300; i++)
        want += 5 * (i % 17);
    for (int i = 0; i < 5; i++)
        callers[i] = start(call_often, &crowd);
    for (int i = 0; i < 5; i++)
        pthread_join(callers[i], NULL);
    CHECK(crowd.failures == 0 && crowd.clashes == 0 && crowd.ranges == want,
          "%d failures, %d clashes, %d ranges, want %d", crowd.failures, crowd.clashes,
          crowd.ranges, want);
    pool_done(crowd.pool);
}

/* ---- a job of one range ---- */

static void wait_inside_with_scratch(void *ctx, int64_t lo, int64_t hi, int worker, void *scratch)
{
    (void)scratch;
    wait_inside(ctx, lo, hi, worker);
}

static void *lone_caller(void *arg)
{
    struct gatekept *g = arg;
    tl_pool_run_with_scratch("tl_x", g->pool, 1, 1, wait_inside_with_scratch, g);
    return NULL;
}

static void count_with_scratch(void *ctx, int64_t lo, int64_t hi, int worker, void *scratch)
{
    (void)lo, (void)hi, (void)worker;
    memset(scratch, 0x5A, TL_POOL_SCRATCH);
    atomic_fetch_add((_Atomic int *)ctx, 1);
}

/* The watchdog ends a test in which it does wait. */
TEST(a_job_of_one_range_does_not_wait)
{
    for (int threads = 1; threads <= 4; threads += 3) {
        struct gatekept g = {.pool = pool_of(threads)};
        const pthread_t first = start(first_caller, &g);
        while (!atomic_load(&g.begun))
            nap_us(100);
        _Atomic int ran = 0;
        CHECK_STATUS(tl_parallel_for(g.pool, 1, 1, count_range, &ran), TL_OK);
        CHECK_STATUS(tl_parallel_for(g.pool, 10, 10, count_range, &ran), TL_OK);
        for (int i = 0; i < 9; i++) /* more often than there are spare pieces */
            CHECK_STATUS(tl_pool_run_with_scratch("tl_x", g.pool, 5, 9, count_with_scratch, &ran),
                         TL_OK);
        CHECK(ran == 11 && g.ended == 0, "threads=%d: %d ranges, %d of the first job have ended",
              threads, ran, g.ended);
        atomic_store(&g.may_end, 1);
        pthread_join(first, NULL);
        pool_done(g.pool);
    }
}

TEST(destroy_waits_for_a_job_of_one_range)
{
    static void *(*const callers[])(void *) = {lone_caller, lone_plain_caller};
    for (int i = 0; i < 4; i++) {
        struct gatekept g = {.pool = pool_of(1 + i)};
        const pthread_t first = start(callers[i % 2], &g);
        while (!atomic_load(&g.begun))
            nap_us(100);
        atomic_store(&g.may_end, 1);
        tl_pool_destroy(g.pool);
        const int ended = g.ended;
        pthread_join(first, NULL);
        alarm(0);
        CHECK(ended == 1, "caller %d: destroy returned before the range had ended", i);
    }
}

/* ---- cancellation ---- */

struct cancelled {
    struct gatekept g;
    void *(*call)(void *g);
    _Atomic int returned;
};

static void *call_and_end(void *arg)
{
    struct cancelled *c = arg;
    c->call(&c->g);
    atomic_store(&c->returned, 1);
    pthread_testcancel();
    return NULL;
}

/* A range that sleeps is a place to be cancelled in. The watchdog ends a test that finds the pool
 * in use for ever. */
TEST(a_caller_is_cancelled_when_its_call_is_over)
{
    static void *(*const calls[])(void *) = {first_caller, lone_caller, lone_plain_caller};
    for (int i = 0; i < 6; i++) {
        struct cancelled c = {.g = {.pool = pool_of(1 + i / 3 * 2)}, .call = calls[i % 3]};
        const pthread_t thread = start(call_and_end, &c);
        while (!atomic_load(&c.g.begun))
            nap_us(100);
        pthread_cancel(thread);
        nap_us(5000);
        atomic_store(&c.g.may_end, 1);
        void *result;
        pthread_join(thread, &result);
        check_ranges(c.g.pool, 100, 3);
        pool_done(c.g.pool);
        CHECK(result == PTHREAD_CANCELED && c.returned && c.g.ended == (i % 3 ? 1 : 4),
              "call %d: returned is %d, %d ranges have ended", i, c.returned, c.g.ended);
    }
}

TEST(a_caller_that_waits_for_its_turn_is_cancelled_after_it)
{
    struct gatekept g = {.pool = pool_of(2)};
    const pthread_t first = start(first_caller, &g);
    while (!atomic_load(&g.begun))
        nap_us(100);
    struct cancelled c = {.g = {.pool = g.pool}, .call = second_caller};
    const pthread_t thread = start(call_and_end, &c);
    nap_us(20000); /* it waits */
    pthread_cancel(thread);
    atomic_store(&g.may_end, 1);
    void *result;
    pthread_join(thread, &result);
    pthread_join(first, NULL);
    check_ranges(g.pool, 100, 3);
    pool_done(g.pool);
    CHECK(result == PTHREAD_CANCELED && c.g.second_ran == 10, "%d ranges", c.g.second_ran);
}

static void *destroying(void *arg)
{
    struct gatekept *g = arg;
    tl_pool_destroy(g->pool);
    return NULL;
}

TEST(a_thread_that_destroys_a_pool_is_cancelled_after_it)
{
    struct hook hook;
    hook_install(&hook, 0);
    struct gatekept g = {.pool = pool_of(3)};
    hook_remove();
    const pthread_t first = start(first_caller, &g);
    while (!atomic_load(&g.begun))
        nap_us(100);
    struct cancelled c = {.g = {.pool = g.pool}, .call = destroying};
    const pthread_t thread = start(call_and_end, &c);
    nap_us(20000); /* it waits */
    pthread_cancel(thread);
    atomic_store(&g.may_end, 1);
    void *result;
    pthread_join(thread, &result);
    pthread_join(first, NULL);
    alarm(0);
    CHECK(result == PTHREAD_CANCELED && c.returned && hook.live == 0, "%ld pieces left", hook.live);
}

static void *create_when_told(void *arg)
{
    struct cancelled *c = arg;
    while (!atomic_load(&c->g.may_end))
        (void)sched_yield();
    tl_pool_create(2, &c->g.pool);
    atomic_store(&c->returned, 1);
    pthread_testcancel();
    return NULL;
}

TEST(a_thread_that_creates_a_pool_is_cancelled_after_it)
{
    struct cancelled c = {.returned = 0};
    const pthread_t thread = start(create_when_told, &c);
    pthread_cancel(thread);
    atomic_store(&c.g.may_end, 1);
    void *result;
    pthread_join(thread, &result);
    CHECK(result == PTHREAD_CANCELED && c.returned, "cancelled in the middle");
    check_ranges(c.g.pool, 100, 3);
    pool_done(c.g.pool);
}

static void cancel_this_thread(void *ctx, int64_t lo, int64_t hi, int worker)
{
    meet_range(ctx, lo, hi, worker);
    if (worker != 0) {
        pthread_cancel(pthread_self());
        pthread_testcancel();
    }
}

TEST(workers_are_never_cancelled)
{
    struct rendezvous all = {.parties = 3};
    tl_pool *pool = pool_of(3);
    for (int i = 0; i < 3; i++)
        CHECK_STATUS(tl_parallel_for(pool, 3, 1, cancel_this_thread, &all), TL_OK);
    CHECK(all.arrived == 9, "%d ranges", all.arrived);
    pool_done(pool);
}

/* ---- scratch ---- */

enum { LONE_JOBS = 12 };

struct pieces {
    tl_pool *pool;
    struct rendezvous all; /* those whose ranges have to run at once */
    void *piece[64];
    _Atomic int n, wrong;
};

static bool is_filled(const unsigned char *piece, int with)
{
    for (size_t i = 0; i < TL_POOL_SCRATCH; i++)
        if (piece[i] != with)
            return false;
    return true;
}

static void fill_piece(void *ctx, int64_t lo, int64_t hi, int worker, void *scratch)
{
    struct pieces *pieces = ctx;
    (void)lo, (void)hi, (void)worker;
    const int i = atomic_fetch_add(&pieces->n, 1);
    pieces->piece[i] = scratch;
    if ((uintptr_t)scratch % 64 != 0)
        atomic_fetch_add(&pieces->wrong, 1);
    memset(scratch, i, TL_POOL_SCRATCH);
    meet(&pieces->all);
    if (!is_filled(scratch, i))
        atomic_fetch_add(&pieces->wrong, 1);
}

static void *fill_alone(void *arg)
{
    struct pieces *pieces = arg;
    if (tl_pool_run_with_scratch("tl_x", pieces->pool, 1, 1, fill_piece, pieces) != TL_OK)
        atomic_fetch_add(&pieces->wrong, 1);
    return NULL;
}

TEST(every_range_has_scratch_of_its_own)
{
    for (int threads = 1; threads <= 5; threads += 2) {
        struct pieces pieces = {.pool = pool_of(threads), .all = {.parties = threads}};
        CHECK_STATUS(
            tl_pool_run_with_scratch("tl_x", pieces.pool, threads, 1, fill_piece, &pieces), TL_OK);
        CHECK(pieces.n == threads && pieces.wrong == 0, "threads=%d: %d ranges, %d wrong", threads,
              pieces.n, pieces.wrong);
        pool_done(pieces.pool);
    }
}

/* Four jobs of one range and a job of four run at once, each range in its own piece. */
TEST(jobs_of_one_range_have_scratch_of_their_own)
{
    struct pieces pieces = {.pool = pool_of(4), .all = {.parties = 8}};
    pthread_t callers[4];
    for (int round = 0; round < 3; round++) {
        atomic_store(&pieces.n, 0);
        for (int i = 0; i < 4; i++)
            callers[i] = start(fill_alone, &pieces);
        CHECK_STATUS(tl_pool_run_with_scratch("tl_x", pieces.pool, 4, 1, fill_piece, &pieces),
                     TL_OK);
        for (int i = 0; i < 4; i++)
            pthread_join(callers[i], NULL);
        CHECK(pieces.n == 8 && pieces.wrong == 0, "%d ranges, %d wrong", pieces.n, pieces.wrong);
    }
    pool_done(pieces.pool);
}

TEST(more_jobs_of_one_range_than_spare_pieces)
{
    struct pieces pieces = {.pool = pool_of(2), .all = {.parties = 1}};
    pthread_t callers[LONE_JOBS];
    for (int i = 0; i < LONE_JOBS; i++)
        callers[i] = start(fill_alone, &pieces);
    for (int i = 0; i < LONE_JOBS; i++)
        pthread_join(callers[i], NULL);
    CHECK(pieces.n == LONE_JOBS && pieces.wrong == 0, "%d ranges, %d wrong", pieces.n,
          pieces.wrong);
    pool_done(pieces.pool);
}

TEST(the_last_spare_piece_gone_a_job_of_one_range_takes_the_turn)
{
    struct gatekept g = {.pool = pool_of(3)};
    pthread_t lone[5];
    for (int i = 0; i < 5; i++) { /* four pieces, and the turn */
        atomic_store(&g.begun, 0);
        lone[i] = start(lone_caller, &g);
        while (!atomic_load(&g.begun))
            nap_us(100);
    }
    struct pieces pieces = {.pool = g.pool, .all = {.parties = 1}};
    const pthread_t late = start(fill_alone, &pieces), other = start(second_caller, &g);
    _Atomic int ran = 0;
    CHECK_STATUS(tl_parallel_for(g.pool, 1, 1, count_range, &ran), TL_OK);
    nap_us(30000);
    const int early = pieces.n + g.second_ran;
    atomic_store(&g.may_end, 1);
    for (int i = 0; i < 5; i++)
        pthread_join(lone[i], NULL);
    pthread_join(late, NULL);
    pthread_join(other, NULL);
    CHECK(early == 0 && ran == 1, "%d ranges ran with no scratch free, %d without scratch", early,
          ran);
    CHECK(pieces.n == 1 && pieces.wrong == 0 && g.ended == 5 && g.second_ran == 10,
          "%d and %d ranges, %d wrong", pieces.n, g.ended, pieces.wrong);
    pool_done(g.pool);
}

/* Jobs of every size from several threads, each range filling its piece. */
static void mark_piece(void *ctx, int64_t lo, int64_t hi, int worker, void *scratch)
{
    struct pieces *pieces = ctx;
    (void)lo, (void)hi, (void)worker;
    const int mark = atomic_fetch_add(&pieces->n, 1);
    int *const ends[] = {scratch, (int *)scratch + TL_POOL_SCRATCH / sizeof(int) - 1};
    *ends[0] = *ends[1] = mark;
    if (mark % 5 == 0)
        sched_yield();
    if (*ends[0] != mark || *ends[1] != mark)
        atomic_fetch_add(&pieces->wrong, 1);
}

static void *mark_often(void *arg)
{
    struct pieces *pieces = arg;
    for (int i = 0; i < 300; i++)
        if (tl_pool_run_with_scratch("tl_x", pieces->pool, i % 4, 1, mark_piece, pieces) != TL_OK)
            atomic_fetch_add(&pieces->wrong, 1);
    return NULL;
}

TEST(several_callers_share_the_scratch)
{
    struct pieces pieces = {.pool = pool_of(3)};
    pthread_t callers[6];
    for (int i = 0; i < 6; i++)
        callers[i] = start(mark_often, &pieces);
    for (int i = 0; i < 6; i++)
        pthread_join(callers[i], NULL);
    CHECK(pieces.n == 6 * 450 && pieces.wrong == 0, "%d ranges, %d wrong", pieces.n, pieces.wrong);
    pool_done(pieces.pool);
}

TEST(bad_work_is_refused_in_the_callers_name)
{
    tl_pool *pool = pool_of(2);
    _Atomic int ran = 0;
    CHECK_STATUS(tl_pool_run_with_scratch("tl_x", pool, -1, 1, count_with_scratch, &ran),
                 TL_EINVAL);
    CHECK(strncmp(tl_last_error(), "tl_x: n = -1", 12) == 0, "\"%s\"", tl_last_error());
    CHECK_STATUS(tl_pool_run_with_scratch("tl_x", pool, 1, 1, NULL, &ran), TL_EINVAL);
    CHECK_STATUS(tl_pool_run_with_scratch("tl_x", pool, 0, 1, count_with_scratch, &ran), TL_OK);
    CHECK(ran == 0, "%d ranges ran", ran);
    pool_done(pool);
}

/* Memory of the test's own, so that the pages touched can be asked for. */
struct mapped {
    void *p;
    size_t n;
};

static void *mapped_alloc(void *user, size_t n, size_t align)
{
    struct mapped *m = user;
    void *p = mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED || align > 4096)
        return NULL;
    *m = (struct mapped){p, n};
    return p;
}

static void mapped_free(void *user, void *p)
{
    munmap(p, ((struct mapped *)user)->n);
}

TEST(scratch_is_not_touched_before_it_is_used)
{
    struct mapped m;
    const tl_allocator allocator = {mapped_alloc, mapped_free, &m};
    tl_set_allocator(&allocator);
    tl_pool *pool = pool_of(16);
    tl_set_allocator(NULL);
    check_ranges(pool, 1000, 1);
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), n_pages = (m.n + page - 1) / page;
    unsigned char resident[4096] = {0};
    size_t touched = 0;
    const int rc = n_pages <= sizeof resident ? mincore(m.p, m.n, resident) : -1;
    for (size_t i = 0; i < n_pages && rc == 0; i++)
        touched += resident[i] & 1;
    pool_done(pool);
    CHECK(m.n >= (16 + 4) * TL_POOL_SCRATCH && rc == 0, "%zu bytes", m.n);
    CHECK(touched * page < TL_POOL_SCRATCH / 4, "%zu of %zu pages touched", touched, n_pages);
}

/* ---- sleep and wake-up ---- */

/* Each job ends only if every thread takes part, so one wake-up lost is one job that never ends.
 * Pauses of every length around the time a worker spins catch it awake, asleep, and on its way. */
TEST(no_wake_up_is_lost)
{
    static const int threads[] = {2, 3, 8};
    for (int t = 0; t < 3; t++) {
        tl_pool *pool = pool_of(threads[t]);
        struct rendezvous all = {.parties = threads[t]};
        uint64_t rng = 7;
        const int jobs = 1500 / threads[t];
        for (int i = 0; i < jobs; i++) {
            CHECK_STATUS(tl_parallel_for(pool, threads[t], 1, meet_range, &all), TL_OK);
            if (i % 2)
                nap_us((long)rng_below(&rng, 300));
        }
        CHECK(all.arrived == jobs * threads[t], "%d ranges, want %d", all.arrived,
              jobs * threads[t]);
        pool_done(pool);
    }
}

TEST(high_contention)
{
    static const int threads[] = {2, 8};
    for (int t = 0; t < 2; t++) {
        tl_pool *pool = pool_of(threads[t]);
        _Atomic int ran = 0;
        int want = 0;
        for (int i = 0; i < 4000; i++) {
            CHECK_STATUS(tl_parallel_for(pool, 1 + i % 40, 1, count_range, &ran), TL_OK);
            want += 1 + i % 40;
            CHECK(ran == want, "job %d: %d ranges, want %d", i, ran, want);
        }
        pool_done(pool);
    }
}

TEST(pools_come_and_go)
{
    for (int i = 0; i < 200; i++) {
        tl_pool *pool = pool_of(1 + i % 5);
        _Atomic int ran = 0;
        if (i % 3)
            CHECK_STATUS(tl_parallel_for(pool, 10, 1, count_range, &ran), TL_OK);
        CHECK(ran == (i % 3 ? 10 : 0), "%d ranges", ran);
        pool_done(pool);
    }
}

TEST(destroy_wakes_all_who_sleep)
{
    for (int i = 0; i < 3; i++) {
        tl_pool *pool = pool_of(8);
        check_ranges(pool, 100, 1);
        nap_us(50000); /* bounded spinning is over by then */
        pool_done(pool);
    }
}

static double cpu_seconds(void)
{
    struct timespec t;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

TEST(idle_workers_sleep)
{
    tl_pool *pools[2] = {pool_of(2), pool_of(8)};
    for (int i = 0; i < 2; i++)
        check_ranges(pools[i], 100, 1);
    nap_us(50000); /* bounded spinning is over by then */
    const double before = cpu_seconds();
    nap_us(300000);
    const double used = cpu_seconds() - before;
    CHECK(used < 0.01 * 0.3, "%.6f s of CPU time in 0.3 s of doing nothing", used);
    tl_pool_destroy(pools[1]);
    pool_done(pools[0]);
}

/* ---- a guest in its process ---- */

struct masks {
    struct rendezvous all;
    sigset_t of[4];
};

static void note_mask(void *ctx, int64_t lo, int64_t hi, int worker)
{
    struct masks *masks = ctx;
    (void)lo, (void)hi;
    pthread_sigmask(SIG_BLOCK, NULL, &masks->of[worker]);
    meet(&masks->all);
}

static bool is_synchronous(int sig)
{
    return sig == SIGSEGV || sig == SIGBUS || sig == SIGFPE || sig == SIGILL || sig == SIGTRAP;
}

/* Without SIGKILL, SIGSTOP, and what the C library or an emulator keeps for itself. */
static sigset_t blockable_signals(void)
{
    sigset_t all, before, blockable;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_sigmask(SIG_SETMASK, &before, &blockable);
    return blockable;
}

TEST(workers_block_all_asynchronous_signals)
{
    sigset_t before, after;
    sigemptyset(&before), sigaddset(&before, SIGUSR2), sigaddset(&before, SIGFPE);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    tl_pool *pool = pool_of(4);
    pthread_sigmask(SIG_BLOCK, NULL, &after);
    struct masks masks = {.all = {.parties = 4}};
    CHECK_STATUS(tl_parallel_for(pool, 4, 1, note_mask, &masks), TL_OK);
    const sigset_t blockable = blockable_signals();
    for (int sig = 1; sig <= SIGRTMAX; sig++) {
        if (!sigismember(&blockable, sig))
            continue;
        CHECK(sigismember(&before, sig) == sigismember(&after, sig),
              "signal %d changed for the creator", sig);
        CHECK(sigismember(&before, sig) == sigismember(&masks.of[0], sig),
              "signal %d changed for the caller", sig);
        for (int worker = 1; worker < 4; worker++)
            CHECK(sigismember(&masks.of[worker], sig) == !is_synchronous(sig),
                  "signal %d on worker %d: blocked is %d", sig, worker,
                  sigismember(&masks.of[worker], sig));
    }
    sigemptyset(&before);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pool_done(pool);
}

static pthread_t handled_on;
static volatile sig_atomic_t handled;

static void on_signal(int sig)
{
    (void)sig;
    handled_on = pthread_self();
    handled = 1;
}

TEST(a_signal_waits_for_the_programs_own_thread)
{
    tl_pool *pool = pool_of(4);
    check_ranges(pool, 100, 1);
    struct sigaction action = {.sa_handler = on_signal}, old;
    sigset_t usr1, pending;
    sigemptyset(&usr1), sigaddset(&usr1, SIGUSR1);
    sigaction(SIGUSR1, &action, &old);
    pthread_sigmask(SIG_BLOCK, &usr1, NULL);
    handled = 0;
    kill(getpid(), SIGUSR1);
    nap_us(20000);
    const int early = handled,
              is_pending = sigpending(&pending) == 0 && sigismember(&pending, SIGUSR1);
    pthread_sigmask(SIG_UNBLOCK, &usr1, NULL);
    for (int i = 0; i < 1000 && !handled; i++)
        nap_us(1000);
    sigaction(SIGUSR1, &old, NULL);
    CHECK(!early && is_pending, "the signal landed on a worker");
    CHECK(handled && pthread_equal(handled_on, pthread_self()),
          "the signal was not delivered here");
    pool_done(pool);
}

/* The mode a thread computes in, seen from outside: which way 1/3 and -1/3 are rounded, and whether
 * subnormals live. */
struct mode {
    float third, minus_third, subnormal;
};

static struct mode mode_now(void)
{
    /* volatile: computed here and now */
    volatile float one = 1, minus_one = -1, three = 3, small = 0x1p-126f, half = 0.5f;
    volatile float third = one / three, minus_third = minus_one / three, subnormal = small * half;
    return (struct mode){third, minus_third, subnormal};
}

static bool is_mode(struct mode m, uint32_t third, uint32_t minus_third, uint32_t subnormal)
{
    return float_bits(m.third) == third && float_bits(m.minus_third) == minus_third &&
           float_bits(m.subnormal) == subnormal;
}

static bool is_default_mode(struct mode m)
{
    return is_mode(m, 0x3EAAAAAB, 0xBEAAAAAB, 0x00400000);
}

static bool is_upward_mode(struct mode m)
{
    return is_mode(m, 0x3EAAAAAB, 0xBEAAAAAA, 0x00400000);
}

struct modes {
    struct rendezvous all;
    _Atomic int wrong;
};

static void note_mode(void *ctx, int64_t lo, int64_t hi, int worker)
{
    struct modes *modes = ctx;
    (void)lo, (void)hi;
    meet(&modes->all);
    const struct mode mode = mode_now();
    if (worker == 0 ? !is_upward_mode(mode) : !is_default_mode(mode))
        atomic_fetch_add(&modes->wrong, 1);
    if (worker != 0)
        fesetround(FE_DOWNWARD); /* must not outlive the range */
}

TEST(workers_have_their_own_float_mode_and_the_caller_keeps_his)
{
    CHECK(is_default_mode(mode_now()), "the test starts in another mode");
    fesetround(FE_UPWARD);
    tl_pool *pool = NULL;
    const tl_status created = tl_pool_create(4, &pool);
    struct modes modes = {.all = {.parties = 4}};
    for (int i = 0; i < 10; i++)
        tl_parallel_for(pool, 4, 1, note_mode, &modes);
    const int round = fegetround();
    const struct mode kept = mode_now();
    fesetround(FE_TONEAREST);
    CHECK(created == TL_OK && modes.all.arrived == 40, "%d ranges", modes.all.arrived);
    CHECK(modes.wrong == 0, "%d ranges in a wrong mode", modes.wrong);
    CHECK(round == FE_UPWARD && is_upward_mode(kept), "the caller's mode changed");
    tl_pool_destroy(pool);
}

#if defined(__x86_64__)
#include <xmmintrin.h>

static void note_csr(void *ctx, int64_t lo, int64_t hi, int worker)
{
    (void)hi;
    ((unsigned *)ctx)[lo] = _mm_getcsr() | (worker == 0 ? 1u << 31 : 0);
    nap_us(100);
}

/* Flush-to-zero, denormals-are-zero and sticky flags of the creator reach no worker; the caller's
 * word stays whole. */
TEST(the_control_word_is_unchanged_by_parallel_calls)
{
    const unsigned before = _mm_getcsr(), odd = 0x1F80u | 0x8000u | 0x0040u | 0x003Fu;
    unsigned seen[40] = {0};
    tl_pool *pool = NULL;
    _mm_setcsr(odd);
    const tl_status created = tl_pool_create(4, &pool);
    const tl_status ran = tl_parallel_for(pool, 40, 1, note_csr, seen);
    const unsigned after = _mm_getcsr();
    tl_pool_destroy(pool);
    _mm_setcsr(before);
    CHECK(created == TL_OK && ran == TL_OK, "%d, %d", created, ran);
    CHECK(after == odd, "%08x, was %08x", after, odd);
    for (int i = 0; i < 40; i++)
        CHECK(seen[i] == 0x1F80u || seen[i] == (odd | 1u << 31), "range %d ran with %08x", i,
              seen[i]);
}
#endif

/* ---- how many threads ---- */

TEST(default_count_is_the_affinity_mask)
{
    cpu_set_t all, one;
    const int64_t quota = tl_cpu_quota("");
    CHECK(sched_getaffinity(0, sizeof all, &all) == 0, "no affinity mask");
    const int cpus = quota < CPU_COUNT(&all) ? (int)quota : CPU_COUNT(&all);
    int first = 0;
    while (!CPU_ISSET(first, &all))
        first++;
    tl_pool *pool = pool_of(0);
    CHECK(tl_pool_threads(pool) == cpus, "%d threads on %d CPUs", tl_pool_threads(pool), cpus);
    pool_done(pool);

    CPU_ZERO(&one);
    CPU_SET(first, &one);
    CHECK(sched_setaffinity(0, sizeof one, &one) == 0, "the mask is not to be had");
    const int before = threads_at_rest();
    tl_pool *single = NULL, *eight = NULL;
    const tl_status created = tl_pool_create(0, &single);
    const int with_single = threads_of_process(), count = tl_pool_threads(single);
    const tl_status created8 = tl_pool_create(8, &eight);
    const int with_eight = threads_of_process();
    _Atomic int ran = 0;
    alarm(WATCHDOG_SECONDS);
    for (int i = 0; i < 50; i++)
        tl_parallel_for(eight, 100, 1, count_range, &ran);
    sched_setaffinity(0, sizeof all, &all);
    tl_pool_destroy(single);
    pool_done(eight);
    CHECK(created == TL_OK && count == 1 && with_single == before, "%d threads counted, %d started",
          count, with_single - before);
    CHECK(created8 == TL_OK && with_eight == before + 7 && ran == 5000, "%d started, %d ranges",
          with_eight - before, ran);
}

TEST(destroy_joins_every_worker)
{
    const int before = threads_at_rest();
    tl_pool *pool = pool_of(6);
    CHECK(threads_of_process() == before + 5, "%d threads started", threads_of_process() - before);
    pool_done(pool);
    CHECK(threads_become(before), "%d threads left", threads_of_process() - before);
}

/* ---- memory ---- */

TEST(memory_goes_back_to_the_hook_it_came_from)
{
    struct hook first, second;
    hook_install(&first, 0);
    tl_pool *pool = pool_of(3);
    hook_install(&second, 0);
    check_ranges(pool, 100, 1);
    pool_done(pool);
    hook_remove();
    CHECK(first.calls > 0 && first.live == 0 && second.calls == 0 && second.live == 0,
          "live: %ld and %ld", first.live, second.live);
}

TEST(calls_allocate_nothing)
{
    tl_pool *pool = pool_of(3);
    struct hook hook;
    hook_install(&hook, 1);
    _Atomic int ran = 0;
    const tl_status status = tl_parallel_for(pool, 100, 1, count_range, &ran);
    hook_remove();
    CHECK(status == TL_OK && ran == 100 && hook.calls == 0, "%ld requests", hook.calls);
    pool_done(pool);
}

/* ---- fork ---- */

/* Not under ThreadSanitizer: its own state does not survive a fork while other threads run, and it
 * lets such a child start no threads. */
#if !UNDER_TSAN

struct family {
    tl_pool *pool;
    int threads;
    _Atomic int stop;
};

static int child_uses_pool(struct family *family)
{
    struct ledger *ledger = calloc(1, sizeof *ledger);
    ledger->n = 1000, ledger->grain = 7, ledger->threads = 1; /* worker 0 only */
    if (tl_pool_threads(family->pool) != family->threads)
        return 1;
    for (int i = 0; i < 3; i++) {
        memset(ledger->runs, 0, sizeof ledger->runs);
        if (tl_parallel_for(family->pool, 1000, 7, note_range, ledger) != TL_OK || ledger->bad != 0)
            return 2;
        for (int k = 0; k < MAX_RANGES; k++)
            if (ledger->runs[k] != (k < 143))
                return 3;
    }
    free(ledger);
    struct nest nest = {.pool = family->pool, .all = {.parties = 1}};
    if (tl_parallel_for(family->pool, 5, 1, busy_range, &nest) != TL_OK || nest.ranges_ran != 5)
        return 4;
    if (nest.wrong || nest.inner_ran)
        return 6;
    if (tl_parallel_for(family->pool, 5, 1, destroy_from_inside, &nest) != TL_OK || nest.wrong)
        return 5;
    return 0;
}

static int child_uses_and_destroys_pool(struct family *family)
{
    const int wrong = child_uses_pool(family);
    tl_pool_destroy(family->pool);
    return wrong;
}

static int child_only_destroys_pool(struct family *family)
{
    tl_pool_destroy(family->pool);
    return 0;
}

static int child_makes_its_own_pool(struct family *family)
{
    tl_pool *own = NULL;
    if (tl_pool_create(3, &own) != TL_OK)
        return 10;
    struct rendezvous all = {.parties = 3};
    for (int i = 0; i < 5; i++)
        if (tl_parallel_for(own, 3, 1, meet_range, &all) != TL_OK)
            return 11;
    struct nest nest = {.pool = family->pool, .other = own, .all = {.parties = 3}};
    if (all.arrived != 15 || tl_parallel_for(family->pool, 1, 1, into_the_other, &nest) != TL_OK ||
        nest.wrong)
        return 12;
    tl_pool_destroy(own);
    return child_uses_and_destroys_pool(family);
}

/* The inherited pool has one worker now, number 0: threads of the child take turns. */
static int child_shares_pool_between_threads(struct family *family)
{
    struct crowd crowd = {.pool = family->pool};
    pthread_t callers[3];
    for (int i = 0; i < 3; i++)
        if (pthread_create(&callers[i], NULL, call_often, &crowd) != 0)
            return 20;
    for (int i = 0; i < 3; i++)
        pthread_join(callers[i], NULL);
    return crowd.failures || crowd.clashes ? 21 : 0;
}

static int in_child(int (*fn)(struct family *), struct family *family)
{
    const pid_t pid = fork();
    if (pid == 0) {
        alarm(20);
        _exit(fn(family));
    }
    int status = -1;
    if (pid < 0 || waitpid(pid, &status, 0) != pid)
        return -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
}

static int child_has_a_child(struct family *family)
{
    const int wrong = in_child(child_uses_and_destroys_pool, family);
    return wrong ? wrong : child_uses_and_destroys_pool(family);
}

static void *child_thread(void *arg)
{
    return arg;
}

static int child_starts_a_thread(struct family *family)
{
    pthread_t thread;
    close(1), close(2); /* an emulator that cannot says so */
    return pthread_create(&thread, NULL, child_thread, family) != 0 ||
           pthread_join(thread, NULL) != 0;
}

static int (*const children[])(struct family *) = {
    child_uses_pool,   child_uses_and_destroys_pool, child_only_destroys_pool,
    /* the last two start threads */
    child_has_a_child, child_makes_its_own_pool,     child_shares_pool_between_threads,
};

/* Some emulators of other CPUs cannot start threads in a child forked beside threads: then the last
 * two are left out. */
static int count_children(void)
{
    struct family family = {.pool = pool_of(4)};
    const int n = in_child(child_starts_a_thread, &family) == 0 ? 6 : 4;
    pool_done(family.pool);
    return n;
}

TEST(a_forked_child_runs_ranges_on_its_own_thread)
{
    const int n = count_children();
    for (int threads = 1; threads <= 4; threads += 3)
        for (int used = 0; used < 2; used++)
            for (int i = 0; i < n; i++) {
                struct family family = {.pool = pool_of(threads), .threads = threads};
                if (used)
                    check_ranges(family.pool, 100, 1);
                const int wrong = in_child(children[i], &family);
                CHECK(wrong == 0, "threads=%d used=%d child %d: %d", threads, used, i, wrong);
                check_ranges(family.pool, 1000, 3); /* the parent notices nothing */
                pool_done(family.pool);
            }
}

static void *keep_pool_busy(void *arg)
{
    struct family *family = arg;
    _Atomic int ran = 0;
    while (!atomic_load(&family->stop))
        if (tl_parallel_for(family->pool, 20, 1, count_range, &ran) != TL_OK)
            return arg;
    return NULL;
}

TEST(a_child_forked_while_the_pool_is_busy_can_use_it)
{
    const int n = count_children();
    struct family family = {.pool = pool_of(4), .threads = 4};
    const pthread_t one = start(keep_pool_busy, &family), two = start(keep_pool_busy, &family);
    int wrong = 0;
    for (int i = 0; i < 30 && !wrong; i++) {
        nap_us(i * 37 % 500);
        wrong = in_child(children[i % n], &family);
    }
    atomic_store(&family.stop, 1);
    void *failed_one, *failed_two;
    pthread_join(one, &failed_one), pthread_join(two, &failed_two);
    CHECK(wrong == 0, "%d", wrong);
    CHECK(!failed_one && !failed_two, "a call of the parent failed");
    check_ranges(family.pool, 1000, 3);
    pool_done(family.pool);
}

static int child_needs_scratch(struct family *family)
{
    struct pieces pieces = {.pool = family->pool, .all = {.parties = 1}};
    for (int i = 0; i < LONE_JOBS; i++)
        fill_alone(&pieces);
    if (pieces.n != LONE_JOBS || pieces.wrong)
        return 30;
    return child_uses_and_destroys_pool(family);
}

TEST(a_child_forked_while_all_scratch_is_in_use_can_use_it)
{
    struct gatekept g = {.pool = pool_of(2)};
    pthread_t lone[5];
    for (int i = 0; i < 5; i++) { /* four pieces, and the turn */
        atomic_store(&g.begun, 0);
        lone[i] = start(lone_caller, &g);
        while (!atomic_load(&g.begun))
            nap_us(100);
    }
    struct family family = {.pool = g.pool, .threads = 2};
    const int wrong = in_child(child_needs_scratch, &family);
    atomic_store(&g.may_end, 1);
    for (int i = 0; i < 5; i++)
        pthread_join(lone[i], NULL);
    CHECK(wrong == 0, "%d", wrong);
    check_ranges(g.pool, 1000, 3);
    pool_done(g.pool);
}

struct inner_fork {
    struct family family;
    _Atomic int wrong, forked;
};

static int child_knows_it_is_inside(struct family *family)
{
    struct nest nest = {.pool = family->pool};
    expect_busy(&nest);
    tl_set_last_error("");
    tl_pool_destroy(family->pool);
    return nest.wrong || nest.inner_ran || strncmp(tl_last_error(), "tl_pool_destroy: ", 17) != 0;
}

static void fork_inside(void *ctx, int64_t lo, int64_t hi, int worker)
{
    struct inner_fork *inner = ctx;
    (void)lo, (void)hi, (void)worker;
    if (in_child(child_knows_it_is_inside, &inner->family) != 0)
        atomic_fetch_add(&inner->wrong, 1);
    atomic_fetch_add(&inner->forked, 1);
}

TEST(a_child_forked_inside_a_range_is_still_inside)
{
    struct inner_fork inner = {.family = {.pool = pool_of(3), .threads = 3}};
    CHECK_STATUS(tl_parallel_for(inner.family.pool, 12, 1, fork_inside, &inner), TL_OK);
    CHECK(inner.wrong == 0 && inner.forked == 12, "%d of %d children wrong", inner.wrong,
          inner.forked);
    pool_done(inner.family.pool);
}

#endif

CHECK_MAIN()
