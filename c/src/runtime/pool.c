/* SPDX-License-Identifier: MIT */
/* pool.c: fixed workers and one blocking parallel for.
 *
 * Words: a loop is one tl_parallel_for; its ranges are claimed by number from a shared counter. The
 * turn belongs to the thread whose loop the workers run. The gate is one word that says which loop
 * is on, whether workers may still enter it, and how many are inside. A frame says that the thread
 * is inside a range of some pool. Scratch is memory for the time of a range: one piece for each
 * worker, and a few spare ones.
 *
 * A loop never needs a worker: the caller opens the gate, claims ranges like everybody, and closes
 * the gate when none are left. It then waits only for the workers that are inside, so a worker that
 * wakes late finds a closed gate and costs nobody anything.
 *
 * A loop of one range has nothing to share, so it does not wait for the turn either: it runs on its
 * caller beside the loop that has it, on a spare piece of scratch. */
#include <assert.h>
#include <pthread.h>
#include <signal.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "runtime/alloc.h"
#include "runtime/cpus.h"
#include "runtime/fail.h"
#include "runtime/fpenv.h"
#include "runtime/pool_run.h"

#define CACHE_LINE 64

/* Waking a sleeping thread costs some 50 us; a wait that may be shorter spins this long first. A
 * pool with more threads than CPUs does not spin: it would keep the awaited thread from running. */
#define SPIN_NS INT64_C(100000)
#define SPIN_POLLS_PER_CLOCK 32

/* Jobs of one range that run at once; one more takes the turn. */
#define N_SPARES 4

/* The gate, from the low bits up. */
#define GATE_INSIDE UINT64_C(0xFFFF) /* workers inside the loop */
#define GATE_OPEN (UINT64_C(1) << 16) /* workers may enter */
#define GATE_STOP (UINT64_C(1) << 17) /* workers leave for good */
#define GATE_LOOP (UINT64_C(1) << 18)  /* lowest bit of the loop's number, which takes the rest */
#define GATE_NUMBER (~(GATE_LOOP - 1))

static_assert(TL_POOL_MAX_THREADS < GATE_INSIDE, "the gate counts every worker");

/* One per pool that the thread is inside of, innermost first. The frames of a loop's caller are
 * read by the workers inside the loop too, so a way back into a pool is noticed on every thread. */
struct frame {
    const tl_pool *pool;
    const struct frame *outer;
};

static _Thread_local const struct frame *inside;

struct loop {
    tl_work_fn work;
    void *ctx;
    bool needs_scratch;
    int64_t n, grain;
    /* at most INT64_MAX: each thread may push the counter one past it, nothing wraps */
    uint64_t n_ranges;
    const struct frame *outer; /* where its caller already was */
};

struct worker {
    tl_pool *pool;
    pthread_t thread;
    int number; /* 1 .. n_threads - 1; the caller is 0 */
};

struct tl_pool {
    /* Written by tl_pool_create before the first worker starts, constant from then on (n_started:
     * until it returns). */
    tl_allocator owner;
    char *scratch; /* n_threads + N_SPARES pieces of TL_POOL_SCRATCH bytes */
    int n_threads, n_started;
    int64_t spin_ns;
    uint64_t birth; /* fork_count of the process the workers live in */

    /* in that process only; a forked child touches neither it nor the conditions */
    pthread_mutex_t lock;
    /* a turn has ended, or no caller is left: awaited by callers, and by destroy */
    pthread_cond_t turn;
    pthread_cond_t work; /* the gate has opened or says stop: awaited by idle workers */
    /* the last worker has left a closed gate: awaited by the thread that has the turn */
    pthread_cond_t done;
    int callers;     /* inside tl_parallel_for, waiting ones included. Under lock. */
    bool taken;      /* the turn. Under lock. */
    unsigned spares; /* bit i: spare piece i is in use. Under lock. */

    /* Written by the thread that has the turn, while the gate is closed and nobody inside; read by
     * those inside. */
    struct loop loop;

    /* The thread that has the turn opens and closes it, workers count themselves in (only while it
     * is open) and out, destroy sets GATE_STOP. Whoever waits for a change announces it first
     * (sleepers, caller_sleeps) and looks once more before it sleeps; whoever makes one looks for
     * announcements after it. All of that is sequentially consistent, so one sees the other. */
    alignas(CACHE_LINE) _Atomic uint64_t gate;
    _Atomic int sleepers;       /* workers in or near a wait for `work`. Written under lock. */
    /* the turn's thread is in or near a wait for `done`. Written under lock. */
    _Atomic bool caller_sleeps;

    alignas(CACHE_LINE) _Atomic uint64_t next_range; /* reset with `loop`; each claim adds one */

    /* In a forked child: fork_count of the process one of whose threads is using the pool, 0 for
     * none. A value from another process is a leftover. */
    alignas(CACHE_LINE) _Atomic uint64_t inherited_turn;

    struct worker workers[]; /* n_threads - 1 */
};

/* ---- small words ---- */

/* For calls that fail only on an object that is not a live pool's, where nothing is left to do: the
 * library never ends the process (R8). */
static void cannot_fail(int rc)
{
    (void)rc;
}

static void lock(tl_pool *pool)
{
    cannot_fail(pthread_mutex_lock(&pool->lock));
}

static void unlock(tl_pool *pool)
{
    cannot_fail(pthread_mutex_unlock(&pool->lock));
}

/* A thread that ended while it has the turn would keep it from all others for ever, so cancellation
 * waits until the call on the pool is over. Returns what allow_cancellation is to be given. */
static int hold_cancellation(void)
{
    int before = PTHREAD_CANCEL_ENABLE;
    cannot_fail(pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &before));
    return before;
}

static void allow_cancellation(int before)
{
    cannot_fail(pthread_setcancelstate(before, &(int){0}));
}

static void cpu_relax(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb" ::: "memory");
#endif
}

/* 0 where there is no clock. */
static int64_t now_ns(void)
{
    struct timespec t;
    return clock_gettime(CLOCK_MONOTONIC, &t) == 0 ? t.tv_sec * INT64_C(1000000000) + t.tv_nsec : 0;
}

struct spin {
    int64_t end;
    unsigned polls;
};

static struct spin spin_begin(const tl_pool *pool)
{
    const int64_t now = pool->spin_ns ? now_ns() : 0;
    return (struct spin){.end = now ? now + pool->spin_ns : 0, .polls = 0};
}

/* False when the time is up. */
static bool spin_on(struct spin *spin)
{
    if (spin->end == 0 || (++spin->polls % SPIN_POLLS_PER_CLOCK == 0 && now_ns() >= spin->end))
        return false;
    cpu_relax();
    return true;
}

static void push_frame(struct frame *frame, const tl_pool *pool, const struct frame *outer)
{
    *frame = (struct frame){pool, outer};
    inside = frame;
}

static bool is_inside(const tl_pool *pool)
{
    const struct frame *frame = inside;
    while (frame && frame->pool != pool)
        frame = frame->outer;
    return frame != NULL;
}

/* ---- fork: a child has the caller's thread and none of the workers ---- */

/* 0 in the process that made the first pool, more in each child of the line */
static _Atomic uint64_t fork_count;

static void count_fork(void)
{
    atomic_fetch_add(&fork_count, 1);
}

/* Two threads that make the first pools at once may both come through: a fork that counts twice is
 * counted well enough. */
static int watch_forks(void)
{
    static _Atomic bool watched;
    const int rc = atomic_load(&watched) ? 0 : pthread_atfork(NULL, NULL, count_fork);
    if (rc == 0)
        atomic_store(&watched, true);
    return rc;
}

static bool is_inherited(const tl_pool *pool)
{
    return pool->birth != atomic_load_explicit(&fork_count, memory_order_relaxed);
}

/* The lock may have been held at the fork by a thread that is not here, so the turn of an inherited
 * pool is a word of its own. It is contended only if the child starts threads that share the pool;
 * they poll. */
static void take_inherited_turn(tl_pool *pool)
{
    const uint64_t self = atomic_load(&fork_count);
    for (;;) {
        uint64_t holder = atomic_load(&pool->inherited_turn);
        if (holder != self && atomic_compare_exchange_strong(&pool->inherited_turn, &holder, self))
            return;
        const struct timespec nap = {.tv_sec = 0, .tv_nsec = 100000};
        nanosleep(&nap, NULL);
    }
}

static void give_inherited_turn(tl_pool *pool)
{
    atomic_store(&pool->inherited_turn, 0);
}

/* ---- the ranges of a loop ---- */

static void *scratch_of(const tl_pool *pool, int piece)
{
    return pool->scratch + (size_t)piece * TL_POOL_SCRATCH;
}

static int64_t range_end(const struct loop *loop, int64_t lo)
{
    return loop->n - lo > loop->grain ? lo + loop->grain : loop->n;
}

static void run_in_order(const struct loop *loop, void *scratch)
{
    for (int64_t lo = 0, hi; lo < loop->n; lo = hi) {
        hi = range_end(loop, lo);
        loop->work(loop->ctx, lo, hi, 0, scratch);
    }
}

/* Claims ranges until none are left. A worker enters the float mode before each: the last one may
 * have left another. */
static void run_claimed(tl_pool *pool, int number)
{
    const struct loop *loop = &pool->loop;
    void *scratch = scratch_of(pool, number);
    for (;;) {
        const uint64_t k = atomic_fetch_add_explicit(&pool->next_range, 1, memory_order_relaxed);
        if (k >= loop->n_ranges)
            return;
        const int64_t lo = (int64_t)k * loop->grain;
        if (number != 0)
            (void)tl_fpenv_enter();
        loop->work(loop->ctx, lo, range_end(loop, lo), number, scratch);
    }
}

/* ---- workers ---- */

static bool has_news(uint64_t gate, uint64_t seen)
{
    return (gate & GATE_STOP) != 0 || (gate & GATE_NUMBER) != seen;
}

/* Returns when there is a loop other than number `seen`, or the pool stops. */
static void await_news(tl_pool *pool, uint64_t seen)
{
    for (struct spin spin = spin_begin(pool); spin_on(&spin);)
        if (has_news(atomic_load_explicit(&pool->gate, memory_order_relaxed), seen))
            return;
    lock(pool);
    atomic_fetch_add(&pool->sleepers, 1);
    while (!has_news(atomic_load(&pool->gate), seen))
        cannot_fail(pthread_cond_wait(&pool->work, &pool->lock));
    atomic_fetch_sub(&pool->sleepers, 1);
    unlock(pool);
}

/* True: the worker is counted in, and `loop` stays as it is until it leaves. */
static bool enter_gate(tl_pool *pool, uint64_t *seen)
{
    uint64_t gate = atomic_load(&pool->gate);
    do {
        *seen = gate & GATE_NUMBER;
        if ((gate & GATE_OPEN) == 0)
            return false;
    } while (!atomic_compare_exchange_weak(&pool->gate, &gate, gate + 1));
    return true;
}

static void leave_gate(tl_pool *pool)
{
    const uint64_t gate = atomic_fetch_sub(&pool->gate, 1) - 1;
    if ((gate & (GATE_OPEN | GATE_INSIDE)) != 0 || !atomic_load(&pool->caller_sleeps))
        return;
    lock(pool); /* the caller is now either waiting or has seen the gate */
    unlock(pool);
    cannot_fail(pthread_cond_signal(&pool->done));
}

static void *worker_main(void *arg)
{
    const struct worker *self = arg;
    tl_pool *pool = self->pool;
    uint64_t seen = 0;
    struct frame here;
    (void)hold_cancellation(); /* a range may let others know the thread */
    while ((atomic_load(&pool->gate) & GATE_STOP) == 0) {
        if (enter_gate(pool, &seen)) {
            push_frame(&here, pool, pool->loop.outer);
            run_claimed(pool, self->number);
            leave_gate(pool);
        }
        await_news(pool, seen);
    }
    return NULL;
}

/* ---- the caller ---- */

static void take_turn(tl_pool *pool)
{
    lock(pool);
    pool->callers++;
    while (pool->taken)
        cannot_fail(pthread_cond_wait(&pool->turn, &pool->lock));
    pool->taken = true;
    unlock(pool);
}

/* The signal goes out under the lock: once the lock is free, destroy may free the pool. */
static void give_turn(tl_pool *pool)
{
    lock(pool);
    pool->taken = false;
    pool->callers--;
    cannot_fail(pthread_cond_broadcast(&pool->turn));
    unlock(pool);
}

/* Wakes as many sleepers as there are ranges for them. */
static void wake_workers(tl_pool *pool, uint64_t wanted)
{
    if (atomic_load(&pool->sleepers) == 0)
        return;
    lock(pool); /* each sleeper is now either waiting or has seen the gate */
    const uint64_t sleepers = (uint64_t)atomic_load(&pool->sleepers);
    unlock(pool);
    for (uint64_t i = 0; i < wanted && i < sleepers; i++)
        cannot_fail(pthread_cond_signal(&pool->work));
}

static void open_gate(tl_pool *pool, const struct loop *loop)
{
    pool->loop = *loop;
    atomic_store_explicit(&pool->next_range, 0, memory_order_relaxed);
    /* it was closed and empty, so this opens the next loop */
    atomic_fetch_add(&pool->gate, GATE_LOOP + GATE_OPEN);
    wake_workers(pool, loop->n_ranges - 1);
}

static bool is_empty(tl_pool *pool)
{
    return (atomic_load(&pool->gate) & GATE_INSIDE) == 0;
}

/* All ranges are claimed: lets nobody in any more, and waits until those inside have finished
 * theirs. */
static void close_gate(tl_pool *pool)
{
    atomic_fetch_and(&pool->gate, ~GATE_OPEN);
    struct spin spin = spin_begin(pool);
    do {
        if (is_empty(pool))
            return;
    } while (spin_on(&spin));
    lock(pool);
    /* Before the gate is looked at once more. By an exchange: emulators have been seen to let a
     * load overtake a store here. */
    (void)atomic_exchange(&pool->caller_sleeps, true);
    while (!is_empty(pool))
        cannot_fail(pthread_cond_wait(&pool->done, &pool->lock));
    atomic_store(&pool->caller_sleeps, false);
    unlock(pool);
}

static void run_together(tl_pool *pool, const struct loop *loop)
{
    open_gate(pool, loop);
    run_claimed(pool, 0);
    close_gate(pool);
}

static void run_in_turn(tl_pool *pool, const struct loop *loop)
{
    const bool inherited = is_inherited(pool);
    (inherited ? take_inherited_turn : take_turn)(pool);
    struct frame here;
    push_frame(&here, pool, loop->outer);
    if (inherited || pool->n_threads == 1 || loop->n_ranges == 1)
        run_in_order(loop, scratch_of(pool, 0));
    else
        run_together(pool, loop);
    inside = here.outer;
    (inherited ? give_inherited_turn : give_turn)(pool);
}

/* Counts in a caller that runs beside the turn; *spare is the bit of its piece of scratch, 0 where
 * it needs none. False: no piece is free. */
static bool enter_beside(tl_pool *pool, bool needs_scratch, unsigned *spare)
{
    lock(pool);
    const unsigned unused = ~pool->spares & ((1u << N_SPARES) - 1);
    *spare = needs_scratch ? unused & -unused : 0;
    const bool may = !needs_scratch || *spare != 0;
    pool->spares |= *spare;
    pool->callers += may;
    unlock(pool);
    return may;
}

static void leave_beside(tl_pool *pool, unsigned spare)
{
    lock(pool);
    pool->spares &= ~spare;
    if (--pool->callers == 0)
        cannot_fail(pthread_cond_broadcast(&pool->turn));
    unlock(pool);
}

static void run_beside(tl_pool *pool, const struct loop *loop, unsigned spare)
{
    struct frame here;
    push_frame(&here, pool, loop->outer);
    run_in_order(loop, spare ? scratch_of(pool, pool->n_threads + __builtin_ctz(spare)) : NULL);
    inside = here.outer;
    leave_beside(pool, spare);
}

/* In a forked child all loops take turns: pieces that others had at the fork are never given back
 * there. */
static void run_on_pool(tl_pool *pool, const struct loop *loop)
{
    const int cancellation = hold_cancellation();
    unsigned spare;
    if (loop->n_ranges == 1 && !is_inherited(pool) &&
        enter_beside(pool, loop->needs_scratch, &spare))
        run_beside(pool, loop, spare);
    else
        run_in_turn(pool, loop);
    allow_cancellation(cancellation);
}

/* ---- tl_parallel_for ---- */

tl_status tl_pool_check(const char *fn, const tl_pool *pool)
{
    if (pool && is_inside(pool))
        return tl_fail(TL_EBUSY, fn, "called from inside a range of the same pool of %d threads",
                       pool->n_threads);
    return TL_OK;
}

static tl_status check_loop(const char *fn, const struct loop *loop)
{
    if (loop->n < 0)
        return tl_fail_i64(TL_EINVAL, fn, "n = %lld is negative", loop->n);
    if (loop->grain < 1)
        return tl_fail_i64(TL_EINVAL, fn, "grain = %lld is below 1", loop->grain);
    if (!loop->work)
        return tl_fail(TL_EINVAL, fn, "the range function is NULL");
    return TL_OK;
}

static tl_status run(const char *fn, tl_pool *pool, struct loop *loop)
{
    TL_TRY(check_loop(fn, loop));
    TL_TRY(tl_pool_check(fn, pool));
    if (loop->n == 0)
        return TL_OK;
    loop->n_ranges = (uint64_t)(loop->n / loop->grain) + (loop->n % loop->grain != 0);
    loop->outer = inside;
    if (pool)
        run_on_pool(pool, loop);
    else
        run_in_order(loop, NULL);
    return TL_OK;
}

tl_status tl_pool_run_with_scratch(const char *fn, tl_pool *pool, int64_t n, int64_t grain,
                                   tl_work_fn work, void *ctx)
{
    struct loop loop = {.work = work, .ctx = ctx, .needs_scratch = true, .n = n, .grain = grain};
    return run(fn, pool, &loop);
}

struct plain {
    tl_range_fn range;
    void *ctx;
};

static void without_scratch(void *ctx, int64_t lo, int64_t hi, int worker, void *scratch)
{
    const struct plain *plain = ctx;
    (void)scratch;
    plain->range(plain->ctx, lo, hi, worker);
}

tl_status tl_pool_run(const char *fn, tl_pool *pool, int64_t n, int64_t grain, tl_range_fn range,
                      void *ctx)
{
    struct plain plain = {range, ctx};
    struct loop loop = {.work = range ? without_scratch : NULL, .ctx = &plain, .n = n,
                      .grain = grain};
    return run(fn, pool, &loop);
}

tl_status tl_parallel_for(tl_pool *pool, int64_t n, int64_t grain, tl_range_fn fn, void *ctx)
{
    return tl_pool_run("tl_parallel_for", pool, n, grain, fn, ctx);
}

/* ---- create and destroy ---- */

/* Signals that a thread causes itself must reach it; all others belong to the threads of the
 * program. */
static int block_asynchronous_signals(sigset_t *before)
{
    static const int synchronous[] = {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP};
    sigset_t blocked;
    sigfillset(&blocked);
    for (size_t i = 0; i < sizeof synchronous / sizeof synchronous[0]; i++)
        sigdelset(&blocked, synchronous[i]);
    return pthread_sigmask(SIG_SETMASK, &blocked, before);
}

static int start_workers(tl_pool *pool)
{
    sigset_t before;
    int rc = block_asynchronous_signals(&before);
    if (rc != 0)
        return rc;
    while (rc == 0 && pool->n_started < pool->n_threads - 1) {
        struct worker *worker = &pool->workers[pool->n_started];
        *worker = (struct worker){.pool = pool, .number = pool->n_started + 1};
        rc = pthread_create(&worker->thread, NULL, worker_main, worker);
        pool->n_started += rc == 0;
    }
    cannot_fail(pthread_sigmask(SIG_SETMASK, &before, NULL));
    return rc;
}

static void stop_workers(tl_pool *pool)
{
    lock(pool);
    atomic_fetch_or(&pool->gate, GATE_STOP);
    cannot_fail(pthread_cond_broadcast(&pool->work));
    unlock(pool);
    for (int i = 0; i < pool->n_started; i++)
        cannot_fail(pthread_join(pool->workers[i].thread, NULL));
}

/* The lock and the three conditions, all or none. */
static int sync_init(tl_pool *pool)
{
    pthread_cond_t *const conditions[] = {&pool->turn, &pool->work, &pool->done};
    int rc = pthread_mutex_init(&pool->lock, NULL), made = 0;
    if (rc != 0)
        return rc;
    while (made < 3 && (rc = pthread_cond_init(conditions[made], NULL)) == 0)
        made++;
    if (rc == 0)
        return 0;
    while (made-- > 0)
        cannot_fail(pthread_cond_destroy(conditions[made]));
    cannot_fail(pthread_mutex_destroy(&pool->lock));
    return rc;
}

static void sync_destroy(tl_pool *pool)
{
    cannot_fail(pthread_cond_destroy(&pool->turn));
    cannot_fail(pthread_cond_destroy(&pool->work));
    cannot_fail(pthread_cond_destroy(&pool->done));
    cannot_fail(pthread_mutex_destroy(&pool->lock));
}

static void free_pool(tl_pool *pool)
{
    const tl_allocator owner = pool->owner;
    tl_owned_free(&owner, pool);
}

/* The scratch lies behind the workers. It is not touched: a piece costs memory once it is used. */
static tl_pool *new_pool(int n_threads, int cpus)
{
    const size_t used = sizeof(tl_pool) + (size_t)(n_threads - 1) * sizeof(struct worker);
    const size_t scratch_at = (used + CACHE_LINE - 1) / CACHE_LINE * CACHE_LINE;
    const size_t bytes = scratch_at + (size_t)(n_threads + N_SPARES) * TL_POOL_SCRATCH;
    tl_allocator owner;
    tl_pool *pool = tl_owned_alloc(bytes, alignof(tl_pool), &owner);
    if (!pool)
        return NULL;
    memset(pool, 0, scratch_at);
    pool->owner = owner;
    pool->scratch = (char *)pool + scratch_at;
    pool->n_threads = n_threads;
    pool->spin_ns = n_threads <= cpus ? SPIN_NS : 0;
    pool->birth = atomic_load(&fork_count);
    return pool;
}

/* Everything of a new pool but its memory; an error number, and nothing left, where the system
 * refuses. */
static int bring_up(tl_pool *pool)
{
    int rc = sync_init(pool);
    if (rc != 0)
        return rc;
    rc = start_workers(pool);
    if (rc != 0) {
        stop_workers(pool);
        sync_destroy(pool);
    }
    return rc;
}

static tl_status create(const char *fn, int n_threads, tl_pool **out)
{
    int rc = watch_forks();
    if (rc != 0)
        return tl_fail(TL_EIO, fn, "fork cannot be watched: error %d", rc);
    const int cpus = tl_usable_cpus("");
    if (n_threads == 0)
        n_threads = cpus < TL_POOL_MAX_THREADS ? cpus : TL_POOL_MAX_THREADS;
    tl_pool *pool = new_pool(n_threads, cpus);
    if (!pool)
        return tl_fail(TL_ENOMEM, fn, "the allocator hook has no memory for a pool of %d threads",
                       n_threads);
    rc = bring_up(pool);
    if (rc != 0) {
        const int started = pool->n_started;
        free_pool(pool);
        return tl_fail(TL_EIO, fn, "refused with error %d after %d of %d workers had started", rc,
                       started, n_threads - 1);
    }
    *out = pool;
    return TL_OK;
}

tl_status tl_pool_create(int n_threads, tl_pool **out)
{
    static const char fn[] = "tl_pool_create";
    if (!out)
        return tl_fail(TL_EINVAL, fn, "out is NULL");
    *out = NULL;
    if (n_threads < 0 || n_threads > TL_POOL_MAX_THREADS)
        return tl_fail(TL_EINVAL, fn, "n_threads = %d is outside 0 .. %d", n_threads,
                       TL_POOL_MAX_THREADS);
    const int cancellation = hold_cancellation();
    const tl_status status = create(fn, n_threads, out);
    allow_cancellation(cancellation);
    return status;
}

int tl_pool_threads(const tl_pool *pool)
{
    return pool ? pool->n_threads : 1;
}

static void await_callers(tl_pool *pool)
{
    lock(pool);
    while (pool->callers > 0)
        cannot_fail(pthread_cond_wait(&pool->turn, &pool->lock));
    unlock(pool);
}

void tl_pool_destroy(tl_pool *pool)
{
    if (!pool || tl_pool_check("tl_pool_destroy", pool) != TL_OK)
        return;
    const int cancellation = hold_cancellation();
    if (is_inherited(pool)) {
        take_inherited_turn(pool);
    } else {
        await_callers(pool);
        stop_workers(pool);
        sync_destroy(pool);
    }
    free_pool(pool);
    allow_cancellation(cancellation);
}
