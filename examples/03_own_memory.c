/* SPDX-License-Identifier: MIT */
/* 03_own_memory.c: a chunk of a prompt and a decode row over an engine's own memory, in one call.
 * cc 03_own_memory.c -ltinyllm && ./a.out */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <tinyllm.h>

enum { BLOCKS = 6, SLOTS = 4, KV_HEADS = 2, HEADS = 4, WIDTH = 16 };

static void check(tl_status status)
{
    if (status != TL_OK) {
        fprintf(stderr, "%s: %s\n", tl_status_str(status), tl_last_error());
        exit(1);
    }
}

/* The engine's cache of one layer in bf16, K and then V: [2, blocks, slots, heads, width]. */
static uint16_t cache[2][BLOCKS][SLOTS][KV_HEADS][WIDTH];

int main(void)
{
    /* Where it lies. Strides count elements; the innermost axis is contiguous. */
    tl_kv_view view = {.size = sizeof view,
                       .k = cache[0],
                       .v = cache[1],
                       .dtype = TL_BF16,
                       .n_blocks = BLOCKS,
                       .block_tokens = SLOTS,
                       .n_kv_heads = KV_HEADS,
                       .head_dim_k = WIDTH,
                       .head_dim_v = WIDTH};
    view.k_block_stride = view.v_block_stride = SLOTS * KV_HEADS * WIDTH;
    view.k_token_stride = view.v_token_stride = KV_HEADS * WIDTH;
    view.k_head_stride = view.v_head_stride = WIDTH;

    /* Two sequences in the engine's block tables: one has three positions, the other six. */
    const uint32_t tables[2][2] = {{5, 0}, {1, 4}};
    const int32_t lengths[2] = {3, 6};

    /* What this step computed, K and V of nine tokens, goes where the tables say. Keys are 0, so
     * that a row of the result is the mean of the values it sees; position j of a sequence has the
     * value j. */
    static float k[9][KV_HEADS][WIDTH], v[9][KV_HEADS][WIDTH];
    int64_t slots[9];
    for (int t = 0; t < 9; t++) {
        int s = t >= 3, position = s ? t - 3 : t;
        slots[t] = (int64_t)tables[s][position / SLOTS] * SLOTS + position % SLOTS;
        for (int h = 0; h < KV_HEADS; h++)
            for (int d = 0; d < WIDTH; d++)
                v[t][h][d] = (float)position;
    }
    check(tl_kv_write_slots(&view, slots, 9, k, v, TL_F32, KV_HEADS * WIDTH, WIDTH,
                            KV_HEADS * WIDTH, WIDTH));

    /* Four rows: the newest position of the first sequence, and the last three of the second. */
    static float q[4][HEADS][WIDTH], out[4][HEADS][WIDTH];
    const int32_t first_row[3] = {0, 1, 4};
    float lse[4][HEADS];
    tl_paged_attn_args args = {
        .size = sizeof args, .view = &view, .q = q[0][0], .out = out[0][0], .lse = lse[0]};
    args.q_token_stride = args.out_token_stride = HEADS * WIDTH;
    args.q_head_stride = args.out_head_stride = WIDTH;
    args.B = 2;
    args.H = HEADS;
    args.cu_seqlens_q = first_row;
    args.ctx_lens = lengths;
    args.block_tables = tables[0];
    args.table_stride = 2;
    args.scale = 0.25f;
    check(tl_paged_attn_f32(&args));

    for (int i = 0; i < 4; i++)
        printf("row %d: %.4f, log of the number of positions seen: %.4f\n", i, (double)out[i][3][7],
               (double)lse[i][3]);
    return 0;
}
