/* SPDX-License-Identifier: MIT */
/* kv_store.h: rows of K and V put into a format, and read back: what appending to a pool and
 * writing through a view share. Nothing here checks arguments or sets the float mode. */
#ifndef TL_KV_STORE_H
#define TL_KV_STORE_H

#include "kernels/kernels.h"
#include "runtime/kv_format.h"
#include "tinyllm/numerics.h"

struct kv_store {
    const struct tl_kernels *kernels;
    tl_dtype from, to; /* both formats, from without scales unless they are equal */
};

/* Elements of a dtype that rows come in: TL_F32, TL_F16 and TL_BF16. */
static inline bool kv_is_source(tl_dtype dtype)
{
    return kv_is_format(dtype) && !kv_has_scales(dtype);
}

/* n elements in a format without scales, which may be those of several rows; where from and to are
 * equal they are copied, of whatever format. */
void tl_kv_store(const struct kv_store *s, const void *x, void *y, int64_t n);

/* One row of n elements in eight bits, and its scale. */
void tl_kv_store_scaled(const struct kv_store *s, const void *x, void *y, float *scale, int64_t n);

/* n elements in e4m3, under a scale that others share. */
void tl_kv_store_shared(const struct kv_store *s, const void *x, void *y, float scale, int64_t n);

/* Rows of dim elements that are apart by steps in bytes, those of scales in floats. */
struct kv_rows {
    const char *x;
    char *y;
    float *scale; /* NULL in a format without */
    int64_t n, dim, x_step, y_step, scale_step;
};

/* Each as above. *lost becomes true where they may hold what the format has nothing for: only then
 * tl_kv_unrepresentable need be asked. */
void tl_kv_store_rows(const struct kv_store *s, const struct kv_rows *rows, bool *lost);

/* How many of n elements the format has nothing for (tl_kv_stats in kv_pool.h). */
int64_t tl_kv_unrepresentable(const struct kv_store *s, const void *x, int64_t n);

/* n elements of the format `to` as f32, times the scale where the format has them. */
void tl_kv_widen(const struct kv_store *s, const void *x, float scale, float *y, int64_t n);

#endif
