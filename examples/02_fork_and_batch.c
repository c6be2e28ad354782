/* SPDX-License-Identifier: MIT */
/* 02_fork_and_batch.c: a sequence is forked, both go on by themselves and are decoded in one call.
 * cc 02_fork_and_batch.c -ltinyllm && ./a.out */
#include <stdio.h>
#include <stdlib.h>
#include <tinyllm.h>

static void check(tl_status status)
{
    if (status != TL_OK) {
        fprintf(stderr, "%s: %s\n", tl_status_str(status), tl_last_error());
        exit(1);
    }
}

int main(void)
{
    /* Eight blocks of two positions; one layer, one KV head, head width 1. Keys are 0, so that a
     * row is the mean of its values. */
    const tl_kv_cfg cfg = {8, 2, 1, 1, 1, TL_F16, TL_KV_FORMAT_V1};
    const float keys[3] = {0}, values[] = {1, 2, 3}, ten = 10, q[2] = {1, 1};
    /* sequences a and b: position j is slot j % 2 of block tables[s][j / 2] */
    uint32_t tables[2][2];
    int32_t lengths[2] = {3, 4};
    float out[2];
    tl_kv_pool *kv;
    tl_kv_stats stats;

    check(tl_kv_pool_create(&cfg, &kv));
    check(tl_kv_alloc(kv, 2, tables[0]));
    check(tl_kv_append_f32(kv, 0, tables[0], 2, 0, 3, keys, values, 3, 1));

    /* Fork: b gets the same table, and one reference on every block in it. */
    for (int i = 0; i < 2; i++) {
        tables[1][i] = tables[0][i];
        tl_kv_ref(kv, tables[1][i]);
    }
    /* b writes position 3, in the block that a holds too: copy on write gives b one of its own. */
    check(tl_kv_cow(kv, tables[1][1], &tables[1][1]));
    check(tl_kv_append_f32(kv, 0, tables[1], 2, 3, 1, keys, &ten, 1, 1));

    check(tl_paged_attn_decode_f32(q, kv, 0, &tables[0][0], 2, lengths, out, 2, 1, 1, 1, 1.0f, 0,
                                   NULL));
    tl_kv_stats_get(kv, &stats);
    printf("a: mean of 1 2 3 = %g\n", (double)out[0]);
    printf("b: mean of 1 2 3 10 = %g\n", (double)out[1]);
    printf("%u blocks are used; block %u has %u holders\n", stats.used, tables[0][0],
           tl_kv_refs(kv, tables[0][0]));
    tl_kv_pool_destroy(kv);
    return 0;
}
