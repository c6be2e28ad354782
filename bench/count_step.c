/* SPDX-License-Identifier: MIT */
/* count_step.c: instructions that small fixed steps take, counted one by one: a number without
 * noise, for what timing is too coarse or the machine too busy to show.
 *
 *     count_step [--isa NAME[,NAME]]          prints lines: step, instruction set, instructions
 *
 * The trap flag makes the CPU raise SIGTRAP after every instruction; the handler counts. That works
 * for any instruction set the CPU has and needs no privilege, but takes some ten microseconds an
 * instruction on a virtual machine. So steps are small: one KV head of each shape (a step of eight
 * takes eight times as many), and one tile of positions for scalar code. x86-64 only. */
#include <gnu/libc-version.h>
#include <signal.h>

#include "bench.h"
#include "tinyllm.h"
#include "turns.h"
#include "workload.h"

#if defined(__clang__)
#define COMPILER __VERSION__
#else
#define COMPILER "gcc " __VERSION__
#endif

enum { PAST = 32, ROWS = 32 };

#define INT8 TL_I8, TL_KV_FORMAT_I8
#define E4M3 TL_F8_E4M3, TL_KV_FORMAT_E4M3

static const struct step {
    const char *name;
    struct shape s;
    bool prefill; /* ROWS rows after PAST keys; ctx is both together */
    bool scalar;  /* for scalar code, and for nothing else */
} steps[] = {
    {"decode-call", {1, 1, 4, 1, 128, 16, 0}, false, false},
    {"decode-4/1-D128-ctx1024", {1, 1024, 4, 1, 128, 16, 0}, false, false},
    {"decode-3/1-D64-ctx1024", {1, 1024, 3, 1, 64, 16, 0}, false, false},
    {"decode-1/1-D128-ctx1024", {1, 1024, 1, 1, 128, 16, 0}, false, false},
    {"decode-4/1-D128-ctx1024-int8", {1, 1024, 4, 1, 128, 16, 0, INT8}, false, false},
    {"decode-1/1-D128-ctx1024-int8", {1, 1024, 1, 1, 128, 16, 0, INT8}, false, false},
    {"decode-4/1-D128-ctx1024-e4m3", {1, 1024, 4, 1, 128, 16, 0, E4M3}, false, false},
    {"decode-1/1-D128-ctx1024-e4m3", {1, 1024, 1, 1, 128, 16, 0, E4M3}, false, false},
    {"prefill-4/1-D128-rows32-past32", {1, PAST + ROWS, 4, 1, 128, 16, 0}, true, false},
    {"decode-4/1-D128-ctx16", {1, 16, 4, 1, 128, 16, 0}, false, true},
};
enum { N_STEPS = sizeof steps / sizeof *steps };

static volatile uint64_t count;

static void count_one(int signal)
{
    (void)signal;
    count++;
}

/* The red zone below the stack pointer is the compiler's: step over it. */
#if defined(__x86_64__)
#define SET_FLAGS(how)                                            \
    __asm__ volatile("lea -128(%%rsp), %%rsp; pushfq; " how       \
                     ", (%%rsp); popfq; lea 128(%%rsp), %%rsp" :: \
                         : "memory", "cc")
#define TRAP_ON() SET_FLAGS("orq $0x100")
#define TRAP_OFF() SET_FLAGS("andq $~0x100")
#else
#define TRAP_ON() (void)0
#define TRAP_OFF() (void)0
#endif

struct prompt {
    float *q, *k, *v, *out;
    tl_arena *scratch;
};

static float *normal_floats(int64_t n)
{
    float *x = must(aligned_alloc(64, (size_t)n * sizeof *x));
    for (int64_t i = 0; i < n; i++)
        x[i] = bench_normal();
    return x;
}

static tl_status run_step(const struct step *step, struct workload *w, const struct prompt *p)
{
    const struct shape *s = &step->s;
    if (!step->prefill)
        return decode(w);
    return tl_flash_attn_fwd_f32(p->q, p->k, p->v, p->out, NULL, 1, s->H, s->Hkv, ROWS, s->ctx,
                                 s->D, 1 / sqrtf((float)s->D), PAST, 1, 0, NULL, 0, 0, p->scratch,
                                 NULL);
}

static uint64_t count_step(const struct step *step, struct workload *w, const struct prompt *p)
{
    for (int i = 0; i < 2; i++) /* what happens once in a process is over then */
        if (run_step(step, w, p) != TL_OK) {
            fprintf(stderr, "count_step: %s\n", tl_last_error());
            exit(2);
        }
    count = 0;
    TRAP_ON();
    run_step(step, w, p);
    TRAP_OFF();
    return count;
}

int main(int argc, char **argv)
{
    static struct workload w[N_STEPS];
    struct prompt p = {normal_floats(4 * ROWS * 128), normal_floats((PAST + ROWS) * 128),
                       normal_floats((PAST + ROWS) * 128), normal_floats(4 * ROWS * 128), NULL};
    const struct sigaction action = {.sa_handler = count_one};
    const struct tl_kernels *table;
    if (tl_arena_create(0, &p.scratch) != TL_OK || sigaction(SIGTRAP, &action, NULL) != 0)
        return 2;
    /* all of them always: the inputs are then the same whatever is counted */
    for (int i = 0; i < N_STEPS; i++)
        set_up(&w[i], steps[i].s, NULL, true, NULL);
    printf("made with: %s, glibc %s\n", COMPILER, gnu_get_libc_version());
#if defined(__x86_64__)
    for (int k = 0; (table = tl_kernels_usable(k)); k++)
        for (int i = 0; i < N_STEPS; i++) {
            if (steps[i].scalar != (strcmp(table->name, "scalar") == 0) ||
                (argc > 2 && !strstr(argv[2], table->name)))
                continue;
            tl_kernels_select(table->name);
            printf("%-32s %-7s %9llu\n", steps[i].name, table->name,
                   (unsigned long long)count_step(&steps[i], &w[i], &p));
            fflush(stdout);
        }
#else
    (void)table, (void)argc, (void)argv, (void)count_step, (void)steps;
#endif
    for (int i = 0; i < N_STEPS; i++)
        tear_down(&w[i]);
    tl_arena_destroy(p.scratch);
    free(p.q), free(p.k), free(p.v), free(p.out);
    return 0;
}
