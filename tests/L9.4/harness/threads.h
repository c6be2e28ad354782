/* SPDX-License-Identifier: MIT */
/* threads.h: how many threads the process has, for tests of what starts and ends them, and
 * which sanitizer watches. */
#ifndef TL_THREADS_H
#define TL_THREADS_H

#include <dirent.h>
#include <pthread.h>
#include <stdbool.h>
#include <time.h>

#if defined(__has_feature) /* clang's way to say it */
#define TL_HAS_FEATURE(x) __has_feature(x)
#else
#define TL_HAS_FEATURE(x) 0
#endif

#if defined(__SANITIZE_THREAD__) || TL_HAS_FEATURE(thread_sanitizer)
#define UNDER_TSAN 1
#else
#define UNDER_TSAN 0
#endif

#if defined(__SANITIZE_ADDRESS__) || TL_HAS_FEATURE(address_sanitizer)
#define UNDER_ASAN 1
#else
#define UNDER_ASAN 0
#endif

static inline int threads_of_process(void)
{
    DIR *dir = opendir("/proc/self/task");
    int n = 0;
    for (const struct dirent *entry; dir && (entry = readdir(dir));)
        n += entry->d_name[0] != '.';
    if (dir)
        closedir(dir);
    return n;
}

/* True when the count becomes `want` within a second: a joined thread may stand in /proc for a
 * moment. */
static inline bool threads_become(int want)
{
    const struct timespec nap = {.tv_sec = 0, .tv_nsec = 1000000};
    for (int i = 0; i < 1000 && threads_of_process() != want; i++)
        nanosleep(&nap, NULL);
    return threads_of_process() == want;
}

static inline void *thread_that_waits(void *until)
{
    pthread_mutex_lock(until);
    pthread_mutex_unlock(until);
    return NULL;
}

/* The count while the test has started no thread. A sanitizer or an emulator starts threads of its
 * own with the program's first, so one comes and goes before. */
static inline int threads_at_rest(void)
{
    static pthread_mutex_t until = PTHREAD_MUTEX_INITIALIZER;
    pthread_t thread;
    pthread_mutex_lock(&until);
    const bool started = pthread_create(&thread, NULL, thread_that_waits, &until) == 0;
    const int with_it = threads_of_process();
    pthread_mutex_unlock(&until);
    if (started)
        pthread_join(thread, NULL);
    threads_become(with_it - started);
    return with_it - started;
}

#endif
