/* SPDX-License-Identifier: MIT */
/* table.isa.c: what one instruction set brings, as the table that dispatch.c chooses from. */
#include "kernels/kernels.h"

#define STRING2_(x) #x
#define STRING_(x) STRING2_(x)

extern const struct tl_kernels TL_ISA_FN(kernels);
const struct tl_kernels TL_ISA_FN(kernels) = {
    .name = STRING_(TL_ISA),
#define KERNEL(member, arguments) .member = TL_ISA_FN(member),
#include "kernels.def"
#undef KERNEL
};
