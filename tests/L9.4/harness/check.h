/* SPDX-License-Identifier: MIT */
/* check.h: the C test harness. A test file is
 *
 *     #include "check.h"
 *     TEST(property_that_holds) { CHECK(cond, "values: %d", x); }
 *     CHECK_MAIN()
 *
 * Tests register themselves in file order. The program runs all of them, or those named in its
 * arguments, and ends with "N passed, N failed"; it exits non-zero when any failed or a name
 * matches none. A failed CHECK ends its test. */
#ifndef TL_CHECK_H
#define TL_CHECK_H

#include <math.h>
#include <setjmp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

struct check_test {
    const char *name;
    void (*run)(void);
    struct check_test *next;
};
static struct check_test *check_first, **check_last = &check_first;
static jmp_buf check_escape;

#define TEST(name)                                                             \
    static void name(void);                                                    \
    static struct check_test check_##name = {#name, name, NULL};               \
    __attribute__((constructor)) static void check_register_##name(void)       \
    {                                                                          \
        *check_last = &check_##name;                                           \
        check_last = &check_##name.next;                                       \
    }                                                                          \
    static void name(void)

#define CHECK(cond, ...)                                                       \
    do {                                                                       \
        if (!(cond)) {                                                         \
            fprintf(stderr, "%s:%d: %s\n    ", __FILE__, __LINE__, #cond);     \
            fprintf(stderr, __VA_ARGS__);                                      \
            fputc('\n', stderr);                                               \
            longjmp(check_escape, 1);                                          \
        }                                                                      \
    } while (0)

/* A status, with the library's own words where it is another one. Needs tinyllm/abi.h. */
#define CHECK_STATUS(call, want)                                                                   \
    do {                                                                                           \
        const tl_status got_ = (call);                                                             \
        CHECK(got_ == (want), "got %s, want %s; \"%s\"", tl_status_str(got_), tl_status_str(want), \
              tl_last_error());                                                                    \
    } while (0)

static inline uint32_t float_bits(float x)
{
    uint32_t u;
    memcpy(&u, &x, sizeof u);
    return u;
}

static inline float float_of(uint32_t u)
{
    float x;
    memcpy(&x, &u, sizeof x);
    return x;
}

#define CHECK_BITS(got, want, ...)                                                        \
    do {                                                                                  \
        const float got_ = (got), want_ = (want);                                         \
        if (float_bits(got_) != float_bits(want_)) {                                      \
            fprintf(stderr, "%s:%d: %s is %08x (%.9g), want %08x (%.9g)\n    ", __FILE__, \
                    __LINE__, #got, float_bits(got_), (double)got_, float_bits(want_),    \
                    (double)want_);                                                       \
            fprintf(stderr, __VA_ARGS__);                                                 \
            fputc('\n', stderr);                                                          \
            longjmp(check_escape, 1);                                                     \
        }                                                                                 \
    } while (0)

/* A repeatable stream of numbers (xorshift64*); never two equal seeds by accident: say the seed
 * where a case fails. */
static inline uint64_t rng_next(uint64_t *state)
{
    uint64_t x = *state ? *state : 0x9E3779B97F4A7C15u;
    x ^= x >> 12, x ^= x << 25, x ^= x >> 27;
    *state = x;
    return x * 0x2545F4914F6CDD1Du;
}

static inline float rng_unit(uint64_t *state) /* in [-1, 1) */
{
    return (float)((double)(rng_next(state) >> 11) * 0x1p-52 - 1.0);
}

static inline int64_t rng_below(uint64_t *state, int64_t n) /* in [0, n) */
{
    return (int64_t)(rng_next(state) % (uint64_t)n);
}

/* n bytes whose last one is followed by an unmapped page, and whose start is not aligned beyond
 * what that gives. The memory stays for the life of the test program unless given back with
 * guarded_free. */
static inline void *guarded(size_t n)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), body = (n + page - 1) / page * page;
    char *base =
        mmap(NULL, body + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED || mprotect(base + body, page, PROT_NONE) != 0) {
        perror("guarded");
        exit(2);
    }
    return base + body - n;
}

static inline void guarded_free(void *p, size_t n)
{
    const size_t page = (size_t)sysconf(_SC_PAGESIZE), body = (n + page - 1) / page * page;
    munmap((char *)p - (body - n), body + page);
}

static inline int check_wanted(const char *name, int argc, char **argv)
{
    for (int i = 1; i < argc; i++)
        if (strcmp(argv[i], name) == 0)
            return 1;
    return argc == 1;
}

/* A test that waits for ever ends by an alarm it set; then it is known which one that was. */
static const char *volatile check_running = "";

static inline void check_say_what_hung(int signal_number)
{
    const char *const words[] = {"hung in ", check_running, "\n"};
    for (int i = 0; i < 3; i++)
        if (write(STDERR_FILENO, words[i], strlen(words[i])) < 0)
            break;
    signal(signal_number, SIG_DFL);
    raise(signal_number);
}

static inline int check_main(int argc, char **argv)
{
    signal(SIGALRM, check_say_what_hung);
    volatile int passed = 0, failed = 0;
    for (struct check_test *volatile t = check_first; t; t = t->next) {
        if (!check_wanted(t->name, argc, argv))
            continue;
        check_running = t->name;
        if (setjmp(check_escape) == 0) {
            t->run();
            passed++;
        } else {
            fprintf(stderr, "FAILED %s\n", t->name);
            failed++;
        }
    }
    printf("%s: %d passed, %d failed\n",
           strrchr(argv[0], '/') ? strrchr(argv[0], '/') + 1 : argv[0], passed, failed);
    return failed != 0 || passed == 0;
}

#define CHECK_MAIN()                      \
    int main(int argc, char **argv)       \
    {                                     \
        return check_main(argc, argv);    \
    }

#endif
