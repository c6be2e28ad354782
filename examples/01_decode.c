/* SPDX-License-Identifier: MIT */
/* 01_decode.c: one decode step over a paged cache, start to end.
 * cc 01_decode.c -ltinyllm && ./a.out */
#include <stdio.h>
#include <tinyllm.h>

int main(void)
{
    /* Four blocks of two positions; one layer, one KV head, head width 2. */
    const tl_kv_cfg cfg = {4, 2, 1, 1, 2, TL_F16, TL_KV_FORMAT_V1};
    const uint32_t block_table[] = {3, 1}; /* positions 0 and 1 in block 3, position 2 in block 1 */
    const int32_t ctx_len = 3;
    const float k[] = {1, 0, 0, 1, 1, 1}, v[] = {1, 2, 3, 4, 5, 6}, q[] = {1, 0};
    float out[2];
    tl_kv_pool *kv;
    uint32_t ids[4];

    if (tl_kv_pool_create(&cfg, &kv) || tl_kv_alloc(kv, 4, ids) ||
        tl_kv_append_f32(kv, 0, block_table, 2, 0, 3, k, v, 6, 2) ||
        tl_paged_attn_decode_f32(q, kv, 0, block_table, 2, &ctx_len, out, 1, 1, 1, 2, 1.0f, 0,
                                 NULL)) {
        fprintf(stderr, "%s\n", tl_last_error());
        return 1;
    }
    /* keys 0 and 2 weigh the same: [3, 4] */
    printf("[%.4f, %.4f]\n", (double)out[0], (double)out[1]);
    tl_kv_pool_destroy(kv);
    return 0;
}
