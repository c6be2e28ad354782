/* SPDX-License-Identifier: MIT */
/* softmax.c: arguments of the row softmaxes, then row by row. */
#include "tinyllm/softmax.h"

#include "kernels/kernels.h"
#include "runtime/alloc.h"
#include "runtime/fail.h"
#include "runtime/fpenv.h"

typedef void row_fn(const float *x, float *y, int64_t cols);

static tl_status check(const char *fn, const float *x, const float *y, int64_t rows, int64_t cols)
{
    size_t n;
    if (rows < 0 || cols < 0)
        return tl_fail_i64(TL_EINVAL, fn, "rows = %lld, cols = %lld: neither may be negative",
                           rows, cols);
    if (!tl_mul_size((size_t)rows, (size_t)cols, &n) || n > PTRDIFF_MAX / sizeof(float))
        return tl_fail_i64(TL_EINVAL, fn,
                           "rows = %lld times cols = %lld floats do not fit in memory", rows,
                           cols);
    if (n > 0 && (!x || !y))
        return tl_fail(TL_EINVAL, fn, "%s is NULL", !x ? "x" : "y");
    return TL_OK;
}

static void each_row(row_fn *row, const float *x, float *y, int64_t rows, int64_t cols)
{
    if (cols == 0)
        return;
    const tl_fpenv caller = tl_fpenv_enter();
    for (int64_t r = 0; r < rows; r++)
        row(x + r * cols, y + r * cols, cols);
    tl_fpenv_leave(caller);
}

tl_status tl_softmax_f32(const float *x, float *y, int64_t rows, int64_t cols)
{
    const struct tl_kernels *kernels;
    TL_TRY(check("tl_softmax_f32", x, y, rows, cols));
    TL_TRY(tl_kernels_require("tl_softmax_f32", &kernels));
    each_row(kernels->softmax_row, x, y, rows, cols);
    return TL_OK;
}

tl_status tl_softmax_online_f32(const float *x, float *y, int64_t rows, int64_t cols)
{
    const struct tl_kernels *kernels;
    TL_TRY(check("tl_softmax_online_f32", x, y, rows, cols));
    TL_TRY(tl_kernels_require("tl_softmax_online_f32", &kernels));
    each_row(kernels->softmax_online_row, x, y, rows, cols);
    return TL_OK;
}
