/* SPDX-License-Identifier: MIT */
/* numerics.c: the public edge of numerics.h. Single conversions are lowp.h as it stands; arrays,
 * and exp, are checked here and run on the instruction set in use. */
#include "tinyllm/numerics.h"

#include <inttypes.h>

#include "kernels/kv_store.h"
#include "numerics/lowp.h"
#include "runtime/fail.h"
#include "runtime/fpenv.h"

/* Is there anything to do? The slot says why not, unless n is simply 0. */
static int any(const char *fn, const void *x, const void *y, int64_t n)
{
    if (n < 0)
        tl_fail_i64(TL_EINVAL, fn, "n = %lld is negative", n);
    else if (n > 0 && (!x || !y))
        tl_fail(TL_EINVAL, fn, "%s is NULL, n = %" PRId64, !x ? "x" : "y", n);
    return n > 0 && x && y;
}

/* A float mode of our own also for the conversions: instructions for f16 raise flags, and a caller
 * may have unmasked them. */
#define ARRAY_FORM(fn, member, from, to)                   \
    void fn(const from *x, to *y, int64_t n)               \
    {                                                      \
        if (!any(#fn, x, y, n))                            \
            return;                                        \
        const struct tl_kernels *kernels = tl_kernels();   \
        const tl_fpenv caller = tl_fpenv_enter();          \
        kernels->member(x, y, n);                          \
        tl_fpenv_leave(caller);                            \
    }

#define CONVERSION(name, from, to)                         \
    to tl_##name(from x)                                   \
    {                                                      \
        return lowp_##name(x);                             \
    }                                                      \
    ARRAY_FORM(tl_##name##_n, name##_n, from, to)

CONVERSION(f32_to_f16, float, uint16_t)
CONVERSION(f16_to_f32, uint16_t, float)
CONVERSION(f32_to_bf16, float, uint16_t)
CONVERSION(bf16_to_f32, uint16_t, float)
CONVERSION(f32_to_e4m3, float, uint8_t)
CONVERSION(e4m3_to_f32, uint8_t, float)
CONVERSION(f32_to_e5m2, float, uint8_t)
CONVERSION(e5m2_to_f32, uint8_t, float)

ARRAY_FORM(tl_exp_f32, exp_n, float, float)

static void store_rows(const char *fn, tl_dtype dtype, const float *x, void *codes, float *scales,
                       int64_t rows, int64_t dim)
{
    if (rows < 0 || dim < 0) {
        tl_fail_i64(TL_EINVAL, fn, "rows = %lld, dim = %lld: neither may be negative", rows, dim);
        return;
    }
    const char *missing = !rows ? NULL : !scales ? "scales" : !dim ? NULL : !x ? "x"
                          : !codes ? "codes" : NULL;
    if (missing) {
        tl_fail(TL_EINVAL, fn, "%s is NULL, rows = %" PRId64 ", dim = %" PRId64, missing, rows,
                dim);
        return;
    }
    const struct kv_store store = {tl_kernels(), TL_F32, dtype};
    const tl_fpenv caller = tl_fpenv_enter();
    for (int64_t i = 0; i < rows; i++)
        tl_kv_store_scaled(&store, x + i * dim, (uint8_t *)codes + i * dim, scales + i, dim);
    tl_fpenv_leave(caller);
}

void tl_store_i8_f32(const float *x, int8_t *codes, float *scales, int64_t rows, int64_t dim)
{
    store_rows("tl_store_i8_f32", TL_I8, x, codes, scales, rows, dim);
}

void tl_store_e4m3_f32(const float *x, uint8_t *codes, float *scales, int64_t rows, int64_t dim)
{
    store_rows("tl_store_e4m3_f32", TL_F8_E4M3, x, codes, scales, rows, dim);
}

float tl_expf(float x)
{
    float y;
    const struct tl_kernels *kernels = tl_kernels();
    const tl_fpenv caller = tl_fpenv_enter();
    kernels->exp_n(&x, &y, 1);
    tl_fpenv_leave(caller);
    return y;
}
