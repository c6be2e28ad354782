/* SPDX-License-Identifier: MIT */
/* softmax.h: softmax of the rows of a matrix, y[r][c] = e^(x[r][c] - max_r) / sum_r.
 *
 * x, y: [rows, cols] f32, contiguous; y may be x, any other overlap is not allowed. Finite for
 * inputs as large as +-1e30. A row of -inf gives zeros (never 1/cols); a row with NaN or +inf is
 * NaN (0x7FC00000) throughout. The sum runs in sixteen lanes by column mod 16 and one fold, and a
 * row is multiplied by 1/sum, so a row's bits depend on that row alone (ABI.md, "Bits").
 * Both are reentrant, allocate nothing, and compute in a float mode of their own (ABI.md, R11).
 *
 * Errors of both, y untouched, the first of these decides:
 *   TL_EINVAL        rows or cols negative
 *   TL_EINVAL        rows * cols floats beyond the address space
 *   TL_EINVAL        x or y NULL with rows * cols > 0
 *   TL_EUNSUPPORTED  TINYLLM_ISA names what is not here */
#ifndef TINYLLM_SOFTMAX_H
#define TINYLLM_SOFTMAX_H

#include "abi.h"

TL_BEGIN_DECLS

/* Three passes: maximum, sum, write. */
TL_API tl_status tl_softmax_f32(const float *x, float *y, int64_t rows, int64_t cols);

/* Two passes: one for the maximum and the sum together (the running sum is rescaled where the
 * maximum rises), one to write.
 * Its last bits may differ from tl_softmax_f32's, never from its own. */
TL_API tl_status tl_softmax_online_f32(const float *x, float *y, int64_t rows, int64_t cols);

TL_END_DECLS

#endif
