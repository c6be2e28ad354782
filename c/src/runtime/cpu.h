/* SPDX-License-Identifier: MIT */
/* cpu.h: what this CPU and its operating system offer, as bits. */
#ifndef TL_CPU_H
#define TL_CPU_H

#define TL_CPU_AVX2 1u
#define TL_CPU_FMA 2u
#define TL_CPU_F16C 4u
#define TL_CPU_AVX512 8u /* F, BW, DQ and VL */
#define TL_CPU_NEON 16u
#define TL_CPU_CRC32 32u /* the CPU's own CRC-32C instruction */
/* carry-less products of AVX-512 registers; never without AVX512 and CRC32 */
#define TL_CPU_VPCLMUL 64u

/* As TL_CPU_ bits. Looked up at the first call; cheap afterwards. Thread-safe. */
unsigned tl_cpu_features(void);

#endif
