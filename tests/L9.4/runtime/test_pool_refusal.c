/* SPDX-License-Identifier: MIT */
/* test_pool_refusal.c: a pool whose memory, locks or threads the system refuses. The pool is
 * compiled into this program with the calls that may be refused replaced by ones that count and
 * refuse on demand. */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <sys/wait.h>

#include "check.h"
#include "hook.h"
#include "threads.h"

static int calls_seen, refuse_at; /* the refuse_at-th call and all later ones fail; 0: none */
static int objects;               /* locks and conditions alive */

static bool is_refused(void)
{
    return ++calls_seen >= refuse_at && refuse_at > 0;
}

static int limited_create(pthread_t *thread, const pthread_attr_t *attr, void *(*fn)(void *),
                          void *arg)
{
    return is_refused() ? 11 /* EAGAIN */ : pthread_create(thread, attr, fn, arg);
}

static int limited_mutex_init(pthread_mutex_t *mutex, const pthread_mutexattr_t *attr)
{
    const int rc = is_refused() ? 12 /* ENOMEM */ : pthread_mutex_init(mutex, attr);
    objects += rc == 0;
    return rc;
}

static int limited_cond_init(pthread_cond_t *cond, const pthread_condattr_t *attr)
{
    const int rc = is_refused() ? 12 : pthread_cond_init(cond, attr);
    objects += rc == 0;
    return rc;
}

static int counted_mutex_destroy(pthread_mutex_t *mutex)
{
    objects--;
    return pthread_mutex_destroy(mutex);
}

static int counted_cond_destroy(pthread_cond_t *cond)
{
    objects--;
    return pthread_cond_destroy(cond);
}

static int limited_sigmask(int how, const sigset_t *set, sigset_t *old)
{
    /* a mask that was in force is always taken */
    const bool is_restore = how == SIG_SETMASK && old == NULL;
    return !is_restore && is_refused() ? 22 /* EINVAL */ : pthread_sigmask(how, set, old);
}

static int cpus_here; /* that this process is said to have */

static int fixed_cpus(const char *root)
{
    (void)root;
    return cpus_here;
}

static int limited_atfork(void (*prepare)(void), void (*parent)(void), void (*child)(void))
{
    return is_refused() ? 12 : pthread_atfork(prepare, parent, child);
}

#define tl_usable_cpus fixed_cpus
#define pthread_atfork limited_atfork
#define pthread_create limited_create
#define pthread_mutex_init limited_mutex_init
#define pthread_cond_init limited_cond_init
#define pthread_mutex_destroy counted_mutex_destroy
#define pthread_cond_destroy counted_cond_destroy
#define pthread_sigmask limited_sigmask
#include "runtime/pool.c"
#undef pthread_sigmask
#undef pthread_atfork
#undef tl_usable_cpus

static bool same_signals(const sigset_t *a, const sigset_t *b)
{
    for (int sig = 1; sig <= SIGRTMAX; sig++)
        if (sigismember(a, sig) != sigismember(b, sig))
            return false;
    return true;
}

static void count_range(void *ctx, int64_t lo, int64_t hi, int worker)
{
    (void)lo, (void)hi, (void)worker;
    atomic_fetch_add((_Atomic int *)ctx, 1);
}

/* The first test: forks are watched from the first pool on. */
TEST(a_watch_on_forks_that_is_refused_is_asked_for_again)
{
    tl_pool *pool = (tl_pool *)&pool;
    for (int i = 0; i < 2; i++) {
        calls_seen = 0, refuse_at = 1;
        CHECK_STATUS(tl_pool_create(2, &pool), TL_EIO);
        CHECK(pool == NULL && calls_seen == 1, "%d calls", calls_seen);
        CHECK(strstr(tl_last_error(), "tl_pool_create: fork ") && strstr(tl_last_error(), "12"),
              "\"%s\"", tl_last_error());
    }
    refuse_at = 0;
    CHECK_STATUS(tl_pool_create(2, &pool), TL_OK);
    tl_pool_destroy(pool);
}

static void watch_forks_now(void)
{
    refuse_at = 0;
    CHECK(watch_forks() == 0, "forks cannot be watched");
}

/* Seven workers: a lock, three conditions, the signal mask, seven threads make twelve calls that
 * may be refused. */
TEST(every_refusal_of_the_system_leaves_nothing_behind)
{
    watch_forks_now();
    const int threads = threads_at_rest();
    sigset_t before, after;
    sigemptyset(&before);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    int k = 1;
    for (bool done = false; !done; k++) {
        struct hook hook;
        tl_pool *pool = (tl_pool *)&pool;
        _Atomic int ran = 0;
        alarm(30);
        hook_install(&hook, 0);
        calls_seen = 0, refuse_at = k;
        const tl_status status = tl_pool_create(8, &pool);
        done = calls_seen < k;
        refuse_at = 0;
        CHECK(status == (done ? TL_OK : TL_EIO), "k=%d: status %d", k, status);
        CHECK(done == (pool != NULL), "k=%d: out is %p", k, (void *)pool);
        CHECK(done || strncmp(tl_last_error(), "tl_pool_create: ", 16) == 0, "\"%s\"",
              tl_last_error());
        CHECK(tl_parallel_for(pool, 100, 1, count_range, &ran) == TL_OK && ran == 100,
              "k=%d: %d ranges", k, ran);
        tl_pool_destroy(pool);
        hook_remove();
        alarm(0);
        pthread_sigmask(SIG_BLOCK, NULL, &after);
        CHECK(hook.live == 0 && objects == 0, "k=%d: %ld pieces, %d objects leaked", k, hook.live,
              objects);
        CHECK(threads_become(threads), "k=%d: %d threads left", k, threads_of_process() - threads);
        CHECK(same_signals(&before, &after), "k=%d: the signal mask changed", k);
    }
    CHECK(k - 2 == 12, "%d calls were refused in turn", k - 2);
}

TEST(every_allocation_fails_in_turn)
{
    const int threads = threads_at_rest();
    long k = 1;
    for (bool done = false; !done; k++) {
        struct hook hook;
        tl_pool *pool = (tl_pool *)&pool;
        hook_install(&hook, k);
        const tl_status status = tl_pool_create(4, &pool);
        hook_remove();
        done = hook.failed == 0;
        CHECK(status == (done ? TL_OK : TL_ENOMEM) && done == (pool != NULL), "k=%ld: status %d", k,
              status);
        CHECK(done || strncmp(tl_last_error(), "tl_pool_create: ", 16) == 0, "\"%s\"",
              tl_last_error());
        tl_pool_destroy(pool);
        CHECK(hook.live == 0 && threads_become(threads), "k=%ld: %ld pieces leaked", k, hook.live);
    }
    CHECK(k > 2, "no allocation was seen");
}

/* ---- how many threads ---- */

TEST(the_default_is_the_usable_cpus)
{
    for (cpus_here = 1; cpus_here <= 5; cpus_here++) {
        tl_pool *pool = NULL;
        CHECK_STATUS(tl_pool_create(0, &pool), TL_OK);
        const int n = tl_pool_threads(pool);
        tl_pool_destroy(pool);
        CHECK(n == cpus_here, "%d threads on %d CPUs", n, cpus_here);
    }
    watch_forks_now();
    cpus_here = INT32_MAX;
    tl_pool *pool = NULL;
    calls_seen = 0, refuse_at = 6; /* a lock, three conditions, the mask, and no thread */
    CHECK_STATUS(tl_pool_create(0, &pool), TL_EIO);
    refuse_at = 0;
    CHECK(strstr(tl_last_error(), " 0 of 4095 workers"), "\"%s\"", tl_last_error());
}

TEST(a_pool_with_more_threads_than_usable_cpus_does_not_spin)
{
    for (cpus_here = 1; cpus_here <= 4; cpus_here++)
        for (int n = 1; n <= 5; n++) {
            tl_pool *pool = NULL;
            CHECK_STATUS(tl_pool_create(n, &pool), TL_OK);
            const bool spins = pool->spin_ns > 0;
            tl_pool_destroy(pool);
            CHECK(spins == (n <= cpus_here), "%d threads on %d CPUs: spins is %d", n,
                  cpus_here, spins);
        }
}

/* ---- the gate ---- */

/* In a pool without workers, so that nobody else does. */
TEST(nobody_enters_a_closed_gate)
{
    tl_pool *pool = NULL;
    uint64_t seen = 77;
    CHECK_STATUS(tl_pool_create(1, &pool), TL_OK);
    const bool closed = enter_gate(pool, &seen), nobody = is_empty(pool);
    const uint64_t first = seen;
    atomic_fetch_add(&pool->gate, GATE_LOOP + GATE_OPEN);
    const bool open = enter_gate(pool, &seen), somebody = !is_empty(pool);
    tl_pool_destroy(pool);
    CHECK(!closed && nobody && first == 0, "a closed gate was entered");
    CHECK(open && somebody && seen == GATE_LOOP, "an open gate was not entered");
}

/* ---- fork ---- */

#if !UNDER_TSAN

static void count_work(void *ctx, int64_t lo, int64_t hi, int worker, void *scratch)
{
    (void)scratch;
    count_range(ctx, lo, hi, worker);
}

static int use_and_destroy(tl_pool *pool)
{
    _Atomic int ran = 0;
    alarm(20);
    tl_parallel_for(pool, 1, 1, count_range, &ran);
    tl_parallel_for(pool, 9, 1, count_range, &ran);
    tl_pool_run_with_scratch("tl_x", pool, 1, 1, count_work, &ran);
    tl_pool_run_with_scratch("tl_x", pool, 9, 1, count_work, &ran);
    tl_pool_destroy(pool);
    return ran != 20;
}

/* Held by a thread that is not in the child, it would never be free there. */
TEST(a_child_does_without_the_lock)
{
    tl_pool *pool = NULL;
    int status = -1;
    CHECK_STATUS(tl_pool_create(2, &pool), TL_OK);
    lock(pool);
    const pid_t child = fork();
    if (child == 0)
        _exit(use_and_destroy(pool));
    const bool waited = child > 0 && waitpid(child, &status, 0) == child;
    unlock(pool);
    tl_pool_destroy(pool);
    CHECK(waited && WIFEXITED(status) && WEXITSTATUS(status) == 0, "status %x", (unsigned)status);
}

#endif

CHECK_MAIN()
