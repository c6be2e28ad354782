/* SPDX-License-Identifier: MIT */
/* test_small_stacks.c: the library on threads whose stack is no larger than it promises to need:
 * 32 KiB with a pool, TL_ATTN_STACK_BYTES without one.
 *
 * Below each stack lies a mebibyte that may not be touched, more than any frame, so that a step
 * over the end faults wherever it lands. Each call runs in a child of its own, which may die of it,
 * and in which nothing has been called before: the first call of a function may need stack to find
 * it. */
#include <pthread.h>
#include <stdbool.h>
#include <sys/wait.h>
#include <unistd.h>

#include "check.h"
#include "kernels/attn_plan.h"
#include "runtime/fail.h"
#include "threads.h"
#include "tinyllm.h"

enum { KIB = 1024, GUARD = 1024 * KIB, WITH_POOL = 32 * KIB, WITHOUT_POOL = TL_ATTN_STACK_BYTES };

/* Sanitizers widen every frame: then the calls are made, and the sizes say little. */
#if UNDER_TSAN || UNDER_ASAN
enum { WIDER = 64 };
#else
enum { WIDER = 1 };
#endif

/* ---- what is called ---- */

struct shape {
    const char *name;
    int64_t B, H, Hkv, D, ctx, q_len;
    bool options; /* of the general call: alibi, a softcap, a window */
};

/* Sequences that begin with the same four blocks; each has q_len rows. */
static const struct shape shapes[] = {
    {"one row", 1, 4, 2, 64, 20, 1, false},
    {"many sequences with a prefix", 300, 4, 1, 32, 150, 1, false},
    {"long contexts", 3, 8, 2, 32, 17500, 1, true},
    {"rows of a prompt", 2, 6, 2, 128, 700, 150, true},
    {"the widest heads", 2, 3, 1, TL_MAX_HEAD_DIM, 1100, 2, true},
};

struct step {
    const struct shape *s;
    tl_pool *tp;
    tl_kv_pool *kv;
    tl_kv_view view;
    uint32_t *tables;
    int32_t *ctx, *cu;
    float *q, *kv_rows, *states, *workspace, *slopes;
    size_t workspace_bytes;
    int64_t max_blocks, n_out, n_states;
    float *out;
};

enum { BLOCK = 16, PREFIX = 4 };

static void *zeros(int64_t n, size_t size)
{
    void *p = calloc((size_t)n + 1, size);
    CHECK(p, "no memory");
    return p;
}

static float *random_floats(int64_t n)
{
    uint64_t rng = 17;
    float *x = zeros(n, sizeof *x);
    for (int64_t i = 0; i < n; i++)
        x[i] = rng_unit(&rng);
    return x;
}

static void fill_pool(struct step *x)
{
    const struct shape *s = x->s;
    const int64_t own = x->max_blocks > PREFIX ? x->max_blocks - PREFIX : 0;
    const tl_kv_cfg cfg = {(uint32_t)(PREFIX + s->B * own), BLOCK, 1, (uint32_t)s->Hkv,
                           (uint32_t)s->D, TL_F16, TL_KV_FORMAT_V1};
    uint64_t rng = 5;
    CHECK_STATUS(tl_kv_pool_create(&cfg, &x->kv), TL_OK);
    for (uint32_t id = 0; id < cfg.n_blocks; id++)
        for (int is_v = 0; is_v < 2; is_v++) {
            uint16_t *slab = tl_kv_block_ptr(x->kv, id, 0, is_v);
            for (int64_t i = 0; i < s->Hkv * BLOCK * s->D; i++)
                slab[i] = (uint16_t)(rng_next(&rng) & 0xBBFF); /* below 1 */
        }
    for (int64_t i = 0; i < s->B; i++)
        for (int64_t j = 0; j < x->max_blocks; j++)
            x->tables[i * x->max_blocks + j] =
                (uint32_t)(j < PREFIX ? j : PREFIX + i * own + j - PREFIX);
}

static struct step make_step(const struct shape *s, tl_pool *tp)
{
    const int64_t rows = s->B * s->q_len;
    struct step x = {.s = s, .tp = tp, .max_blocks = (s->ctx + BLOCK - 1) / BLOCK};
    x.tables = zeros(s->B * x.max_blocks, sizeof *x.tables);
    x.ctx = zeros(s->B, sizeof *x.ctx), x.cu = zeros(s->B + 1, sizeof *x.cu);
    for (int64_t i = 0; i < s->B; i++)
        x.ctx[i] = (int32_t)s->ctx, x.cu[i + 1] = (int32_t)((i + 1) * s->q_len);
    fill_pool(&x);
    x.view.size = sizeof x.view;
    CHECK_STATUS(tl_kv_pool_view(x.kv, 0, &x.view), TL_OK);
    x.q = random_floats(rows * s->H * s->D);
    x.slopes = random_floats(s->H);
    x.kv_rows = random_floats(s->Hkv * s->ctx * s->D);
    x.n_states = (s->ctx - 1) / TL_ATTN_SPLIT + 1;
    x.n_out = rows * s->H * (s->D + 2) * x.n_states;
    x.states = zeros(x.n_out, sizeof *x.states);
    x.out = zeros(x.n_out, sizeof *x.out);
    return x;
}

static tl_paged_attn_args args_of(const struct step *x)
{
    const struct shape *s = x->s;
    const int64_t row = s->H * s->D;
    return (tl_paged_attn_args){.size = sizeof(tl_paged_attn_args),
                                .view = &x->view,
                                .q = x->q,
                                .out = x->out,
                                .q_token_stride = row,
                                .q_head_stride = s->D,
                                .out_token_stride = row,
                                .out_head_stride = s->D,
                                .B = s->B,
                                .H = s->H,
                                .cu_seqlens_q = x->cu,
                                .ctx_lens = x->ctx,
                                .block_tables = x->tables,
                                .table_stride = x->max_blocks,
                                .window = s->options ? s->ctx - 3 : 0,
                                .alibi_slopes = s->options ? x->slopes : NULL,
                                .sink_logits = s->options ? x->slopes : NULL,
                                .scale = 0.3f,
                                .logits_softcap = s->options ? 20 : 0,
                                .tp = x->tp,
                                .workspace = x->workspace,
                                .workspace_bytes = x->workspace_bytes};
}

static tl_status do_decode(struct step *x)
{
    const struct shape *s = x->s;
    return tl_paged_attn_decode_f32(x->q, x->kv, 0, x->tables, (int32_t)x->max_blocks, x->ctx,
                                    x->out, s->B, s->H, s->Hkv, s->D, 0.3f, 0, x->tp);
}

static tl_status do_general(struct step *x)
{
    const tl_paged_attn_args args = args_of(x);
    return tl_paged_attn_f32(&args);
}

static tl_status do_general_with_workspace(struct step *x)
{
    tl_paged_attn_args args = args_of(x);
    x->workspace_bytes = tl_paged_attn_workspace(&args);
    x->workspace = malloc(x->workspace_bytes + 1);
    args = args_of(x);
    const tl_status got = tl_paged_attn_f32(&args);
    free(x->workspace);
    x->workspace = NULL, x->workspace_bytes = 0;
    return got;
}

static tl_status do_states(struct step *x)
{
    tl_paged_attn_args args = args_of(x);
    args.sink_logits = NULL;
    return tl_paged_attn_states_f32(&args, 0, x->n_states, x->out);
}

static tl_status do_merge(struct step *x)
{
    const struct shape *s = x->s;
    const tl_attn_part part = {.states = x->states, .n_splits = x->n_states};
    return tl_attn_merge_f32(&part, 1, s->B * s->q_len * s->H, s->H, s->D, x->slopes, x->out, NULL,
                             x->tp);
}

static tl_status do_prefill(struct step *x)
{
    const struct shape *s = x->s;
    return tl_flash_attn_fwd_f32(x->q, x->kv_rows, x->kv_rows, x->out, NULL, 1, s->H, s->Hkv,
                                 s->q_len, s->ctx, s->D, 0.3f, s->ctx - s->q_len, 1, 0, NULL, 0, 0,
                                 NULL, x->tp);
}

static tl_status do_read(struct step *x)
{
    uint64_t word = 0;
    const tl_status got = tl_kv_read(&x->view, x->tables, x->max_blocks, x->ctx, x->s->B, 0, x->tp,
                                     &word);
    memcpy(x->out, &word, sizeof word);
    return got;
}

static tl_status do_append(struct step *x)
{
    const struct shape *s = x->s;
    uint32_t ids[2];
    TL_TRY(tl_kv_alloc(x->kv, 2, ids));
    TL_TRY(tl_kv_append_f32(x->kv, 0, ids, 2, 3, 17, x->kv_rows, x->kv_rows, 17 * s->D,
                                  s->D));
    tl_f16_to_f32_n(tl_kv_block_ptr(x->kv, ids[0], 0, 0), x->out, 4 * s->D);
    return TL_OK;
}

/* More slots than are compared in place, in falling order. */
static tl_status do_slots(struct step *x)
{
    int64_t slots[100];
    for (int i = 0; i < 100; i++)
        slots[i] = i < x->view.n_blocks * BLOCK ? (x->view.n_blocks * BLOCK - 1 - i) : -1;
    return tl_kv_write_slots(&x->view, slots, 100, x->q, x->q, TL_F32, 0, 0, 0, 0);
}

static tl_status do_softmax(struct step *x)
{
    TL_TRY(tl_softmax_f32(x->q, x->out, 1, x->s->H * x->s->D));
    return tl_softmax_online_f32(x->q, x->out, 1, x->s->H * x->s->D);
}

/* The message is put together on this stack too. */
static tl_status do_refusal(struct step *x)
{
    tl_paged_attn_args args = args_of(x);
    args.logits_softcap = -1;
    return tl_paged_attn_f32(&args) == TL_EINVAL ? TL_OK : TL_EIO;
}

static const struct function {
    const char *name;
    tl_status (*call)(struct step *);
} functions[] = {
    {"decode", do_decode},
    {"the general call", do_general},
    {"the general call with a workspace", do_general_with_workspace},
    {"states", do_states},
    {"merge", do_merge},
    {"prefill", do_prefill},
    {"read", do_read},
    {"append", do_append},
    {"write_slots", do_slots},
    {"softmax", do_softmax},
    {"a refused call", do_refusal},
};
enum { N_FUNCTIONS = sizeof functions / sizeof functions[0] };
enum { N_SHAPES = sizeof shapes / sizeof shapes[0] };

/* ---- a thread with a small stack ---- */

struct run {
    const struct function *f;
    struct step *x;
    tl_status got;
};

static void *run_function(void *arg)
{
    struct run *run = arg;
    run->got = run->f->call(run->x);
    return NULL;
}

/* Runs it on a stack of so many bytes, above a guard. False: no such thread. */
static bool run_on_stack(struct run *run, size_t bytes)
{
    pthread_attr_t attr;
    pthread_t thread;
    char *base = mmap(NULL, GUARD + bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED || mprotect(base + GUARD, bytes, PROT_READ | PROT_WRITE) != 0 ||
        pthread_attr_init(&attr) != 0 || pthread_attr_setstack(&attr, base + GUARD, bytes) != 0 ||
        pthread_create(&thread, &attr, run_function, run) != 0)
        return false;
    const int rc = pthread_join(thread, NULL);
    pthread_attr_destroy(&attr);
    munmap(base, GUARD + bytes);
    return rc == 0;
}

enum { FINE, NO_THREAD, REFUSED, OTHER_BITS };

static void free_step(struct step *x)
{
    tl_kv_pool_destroy(x->kv);
    free(x->tables), free(x->ctx), free(x->cu), free(x->q), free(x->slopes), free(x->kv_rows);
    free(x->states), free(x->out);
}

/* First on the small stack, then where there is room, and the bits are the same. */
static int try_function(const struct function *f, const struct shape *s, bool with_pool)
{
    size_t bytes = (with_pool ? WITH_POOL : WITHOUT_POOL) * (size_t)WIDER;
    const long smallest = sysconf(_SC_THREAD_STACK_MIN); /* 128 KiB with glibc on Arm */
    bytes = smallest > (long)bytes ? (size_t)smallest : bytes;
    tl_pool *tp = NULL;
    tl_small_step_ns = 0; /* wake the workers for any step */
    if (with_pool && tl_pool_create(3, &tp) != TL_OK)
        return NO_THREAD;
    struct step small = make_step(s, tp), large = make_step(s, NULL);
    if (f->call == do_merge)
        for (int i = 0; i < 2; i++) {
            struct step *x = i ? &large : &small;
            if (do_states(&large) != TL_OK)
                return REFUSED;
            memcpy(x->states, large.out, (size_t)x->n_out * sizeof *x->states);
        }
    memset(large.out, 0, (size_t)large.n_out * sizeof *large.out);
    struct run run = {f, &small, TL_EIO};
    if (!run_on_stack(&run, bytes))
        return NO_THREAD;
    if (run.got != TL_OK || f->call(&large) != TL_OK)
        return REFUSED;
    const bool same = memcmp(small.out, large.out, (size_t)small.n_out * sizeof *small.out) == 0;
    free_step(&small), free_step(&large);
    tl_pool_destroy(tp);
    return same ? FINE : OTHER_BITS;
}

static void check_function(const struct function *f, const struct shape *s, bool with_pool)
{
    int status = -1;
    if (UNDER_TSAN) { /* it lets no forked child start threads */
        CHECK(try_function(f, s, with_pool) == FINE, "%s of %s", f->name, s->name);
        return;
    }
    fflush(NULL);
    const pid_t child = fork();
    if (child == 0) {
        alarm(120);
        _exit(try_function(f, s, with_pool));
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child, "no child");
    CHECK(!WIFSIGNALED(status), "%s of %s, %s a pool: signal %d: %d KiB of stack are not enough",
          f->name, s->name, with_pool ? "with" : "without", WTERMSIG(status),
          (with_pool ? WITH_POOL : WITHOUT_POOL) / KIB);
    CHECK(WEXITSTATUS(status) == FINE, "%s of %s, %s a pool: %d", f->name, s->name,
          with_pool ? "with" : "without", WEXITSTATUS(status));
}

static void check_functions(bool with_pool)
{
    const int n_shapes = UNDER_TSAN ? 2 : N_SHAPES;
    for (int i = 0; i < N_FUNCTIONS; i++)
        for (int k = 0; k < n_shapes; k++)
            check_function(&functions[i], &shapes[k], with_pool);
}

#if !UNDER_TSAN

/* A frame as large as a stack is noticed, so a test that passes has seen that none is. */
static tl_status do_too_much(struct step *x)
{
    volatile char frame[WITH_POOL * WIDER + GUARD / 2]; /* it ends within the guard */
    frame[0] = (char)x->n_out;
    return frame[0] == (char)x->n_out ? TL_OK : TL_EIO;
}

TEST(a_frame_past_the_guard_is_noticed)
{
    static const struct function f = {"too much", do_too_much};
    int status = -1;
    const pid_t child = fork();
    if (child == 0) {
        signal(SIGSEGV, SIG_DFL), signal(SIGBUS, SIG_DFL);
        _exit(try_function(&f, &shapes[0], true));
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child, "no child");
    CHECK(WIFSIGNALED(status) || WEXITSTATUS(status) > OTHER_BITS, "status %x", (unsigned)status);
}

#endif

TEST(with_a_pool_32_kib_of_stack_are_enough)
{
    check_functions(true);
}

TEST(without_a_pool_the_promised_stack_is_enough)
{
    check_functions(false);
}

CHECK_MAIN()
