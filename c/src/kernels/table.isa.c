/* SPDX-License-Identifier: MIT */
/* table.isa.c: what one instruction set brings, as the table that dispatch.c chooses from. */
#include "kernels/kernels.h"

#define STRING2_(x) #x
#define STRING_(x) STRING2_(x)

/* KERNEL(member, arguments): declares the function this instruction set gives for a member of
 * struct tl_kernels. */
#define KERNEL_LIST(KERNEL)                                                              \
    KERNEL(attn_rows, (struct attn_job *))                            \
    KERNEL(attn_merge, (struct attn_merge *))                         \
    KERNEL(softmax_row, (const float *, float *, int64_t))                               \
    KERNEL(softmax_online_row, (const float *, float *, int64_t))                        \
    KERNEL(exp_n, (const float *, float *, int64_t))                                     \
    KERNEL(f32_to_f16_n, (const float *, uint16_t *, int64_t))                           \
    KERNEL(f16_to_f32_n, (const uint16_t *, float *, int64_t))                           \
    KERNEL(f32_to_bf16_n, (const float *, uint16_t *, int64_t))                          \
    KERNEL(bf16_to_f32_n, (const uint16_t *, float *, int64_t))                          \
    KERNEL(f32_to_e4m3_n, (const float *, uint8_t *, int64_t))                           \
    KERNEL(e4m3_to_f32_n, (const uint8_t *, float *, int64_t))                           \
    KERNEL(f32_to_e5m2_n, (const float *, uint8_t *, int64_t))                           \
    KERNEL(e5m2_to_f32_n, (const uint8_t *, float *, int64_t))

#define DECLARE_(member, arguments) void TL_ISA_FN(member) arguments;
#define ENTER_(member, arguments) .member = TL_ISA_FN(member),

KERNEL_LIST(DECLARE_)

extern const struct tl_kernels TL_ISA_FN(tl_kernels);
const struct tl_kernels TL_ISA_FN(tl_kernels) = {.name = STRING_(TL_ISA), KERNEL_LIST(ENTER_)};
