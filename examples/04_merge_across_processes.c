/* SPDX-License-Identifier: MIT */
/* 04_merge_across_processes.c: a long sequence in two processes, merged to the bits of one call.
 * cc 04_merge_across_processes.c -ltinyllm && ./a.out */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <tinyllm.h>
#include <unistd.h>

enum {
    LENGTH = 40000, /* two stretches of 16384 positions, and part of a third */
    SLOTS = 16,
    BLOCKS = LENGTH / SLOTS,
    HEADS = 2,
    WIDTH = 32,
    SPLITS = TL_ATTN_STRETCH / TL_ATTN_SPLIT, /* of a stretch */
    STATE = 2 + WIDTH /* floats: the largest score, the sum of exponentials, the weighted values */
};

typedef struct {
    float k[BLOCKS][SLOTS][WIDTH], v[BLOCKS][SLOTS][WIDTH]; /* one KV head */
} memory;

static void check(tl_status status)
{
    if (status != TL_OK) {
        fprintf(stderr, "%s: %s\n", tl_status_str(status), tl_last_error());
        exit(1);
    }
}

static float value(uint32_t i) /* something in [-0.5, 0.5) that every process can make again */
{
    return (float)(i * 2654435761u >> 8) * 0x1p-24f - 0.5f;
}

/* K and V of the positions from `first` up to `last`, in blocks from 0 on. */
static void store(memory *m, int first, int last)
{
    for (int j = first; j < last; j++) {
        int block = (j - first) / SLOTS;
        for (int d = 0; d < WIDTH; d++) {
            m->k[block][j % SLOTS][d] = 8 * value((uint32_t)(2 * j * WIDTH + d));
            m->v[block][j % SLOTS][d] = value((uint32_t)((2 * j + 1) * WIDTH + d));
        }
    }
}

static void view_of(const memory *m, tl_kv_view *view)
{
    *view = (tl_kv_view){.size = sizeof *view,
                         .k = m->k,
                         .v = m->v,
                         .dtype = TL_F32,
                         .n_blocks = BLOCKS,
                         .block_tokens = SLOTS,
                         .n_kv_heads = 1,
                         .head_dim_k = WIDTH,
                         .head_dim_v = WIDTH};
    view->k_block_stride = view->v_block_stride = SLOTS * WIDTH;
    view->k_head_stride = view->v_head_stride = SLOTS * WIDTH;
    view->k_token_stride = view->v_token_stride = WIDTH;
}

int main(void)
{
    static memory here; /* after the fork each process has its own */
    static float q[HEADS][WIDTH], merged[HEADS][WIDTH], whole[HEADS][WIDTH];
    const int32_t length = LENGTH;
    uint32_t table[BLOCKS];
    tl_kv_view view;
    float *states = mmap(NULL, sizeof(float[3][HEADS][STATE]), PROT_READ | PROT_WRITE,
                         MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (states == MAP_FAILED)
        return 1;
    /* [HEADS, 1, STATE] and [HEADS, 2, STATE] */
    float *first = states, *rest = states + HEADS * STATE;

    for (uint32_t i = 0; i < BLOCKS; i++)
        table[i] = i; /* each process names its own blocks, from 0 on */
    for (uint32_t d = 0; d < HEADS * WIDTH; d++)
        q[d / WIDTH][d % WIDTH] = value(UINT32_MAX - d);
    view_of(&here, &view);
    tl_paged_attn_args args = {.size = sizeof args,
                               .view = &view,
                               .q = q[0],
                               .out = whole[0],
                               .B = 1,
                               .H = HEADS,
                               .scale = 0.25f};
    args.q_token_stride = args.out_token_stride = HEADS * WIDTH;
    args.q_head_stride = args.out_head_stride = WIDTH;
    args.ctx_lens = &length;
    args.block_tables = table;
    args.table_stride = BLOCKS;

    args.state_span = TL_ATTN_STRETCH; /* one state a stretch, not one a split */
    pid_t child = fork();
    if (child == 0) { /* holds stretches 1 and 2: positions from 16384 on */
        store(&here, TL_ATTN_STRETCH, LENGTH);
        args.first_block = TL_ATTN_STRETCH / SLOTS; /* of the context: table[0] names it */
        check(tl_paged_attn_states_f32(&args, SPLITS, 2 * SPLITS, rest));
        _exit(0);
    }
    store(&here, 0, TL_ATTN_STRETCH); /* the parent holds stretch 0 */
    check(tl_paged_attn_states_f32(&args, 0, SPLITS, first));
    int status;
    if (waitpid(child, &status, 0) != child || status != 0)
        return 1;
    const tl_attn_part parts[] = {{first, 0, SPLITS, TL_ATTN_STRETCH},
                                  {rest, SPLITS, 2 * SPLITS, TL_ATTN_STRETCH}};
    check(tl_attn_merge_f32(parts, 2, HEADS, HEADS, WIDTH, NULL, merged[0], NULL, NULL));

    /* The same in one call, by a process that holds everything. */
    store(&here, 0, LENGTH);
    args.state_span = 0;
    check(tl_paged_attn_f32(&args));
    int equal = memcmp(merged, whole, sizeof whole) == 0;
    printf("two processes: %+.6f %+.6f ...\n", (double)merged[0][0], (double)merged[0][1]);
    printf("one call:      %+.6f %+.6f ...\n", (double)whole[0][0], (double)whole[0][1]);
    printf("%d of %d values have the same bits\n", equal ? HEADS * WIDTH : 0, HEADS * WIDTH);
    return equal ? 0 : 1;
}
