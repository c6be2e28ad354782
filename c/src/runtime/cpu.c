/* SPDX-License-Identifier: MIT */
/* cpu.c: what this CPU and its operating system offer. Looked up when first asked, never at load
 * time. */
#include <stdatomic.h>

#include "runtime/cpu.h"

#if defined(__x86_64__)

#include <cpuid.h>

/* cpuid leaf 1, ecx */
#define FMA_BIT (1u << 12)
#define SSE42_BIT (1u << 20)
#define OSXSAVE_BIT (1u << 27)
#define AVX_BIT (1u << 28)
#define F16C_BIT (1u << 29)
/* cpuid leaf 7, ebx */
#define AVX2_BIT (1u << 5)
#define AVX512_BITS (1u << 16 | 1u << 17 | 1u << 30 | 1u << 31) /* F, DQ, BW, VL */
/* cpuid leaf 7, ecx */
#define VPCLMUL_BIT (1u << 10)
/* XCR0: register state the operating system saves */
#define YMM_STATE 0x06u /* xmm, ymm */
#define ZMM_STATE 0xE6u /* and mask registers, both upper parts */

static unsigned saved_state(void)
{
    unsigned low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return low;
}

static unsigned look_up(void)
{
    unsigned a, b, c, d, have = 0;
    if (!__get_cpuid(1, &a, &b, &c, &d))
        return 0;
    const unsigned leaf1 = c;
    if (leaf1 & SSE42_BIT)
        have |= TL_CPU_CRC32;
    const unsigned state = (leaf1 & OSXSAVE_BIT) ? saved_state() : 0;
    if ((state & YMM_STATE) != YMM_STATE || !(leaf1 & AVX_BIT))
        return have;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d))
        b = c = 0;
    const unsigned leaf7 = b, leaf7_c = c;
    have |= (leaf1 & FMA_BIT) ? TL_CPU_FMA : 0;
    have |= (leaf1 & F16C_BIT) ? TL_CPU_F16C : 0;
    have |= (leaf7 & AVX2_BIT) ? TL_CPU_AVX2 : 0;
    if ((state & ZMM_STATE) == ZMM_STATE && (leaf7 & AVX512_BITS) == AVX512_BITS)
        have |=
            TL_CPU_AVX512 | ((leaf7_c & VPCLMUL_BIT) && (have & TL_CPU_CRC32) ? TL_CPU_VPCLMUL : 0);
    return have;
}

#elif defined(__aarch64__) && defined(__linux__)

#include <sys/auxv.h>

#define ASIMD_BIT (1ul << 1) /* of AT_HWCAP */
#define CRC32_BIT (1ul << 7)

static unsigned look_up(void)
{
    const unsigned long have = getauxval(AT_HWCAP);
    return ((have & ASIMD_BIT) ? TL_CPU_NEON : 0) | ((have & CRC32_BIT) ? TL_CPU_CRC32 : 0);
}

#else

static unsigned look_up(void)
{
    return 0;
}

#endif

/* In a virtual machine cpuid traps into the hypervisor and may cost tens of microseconds, so the
 * answer is kept.
 * Threads that ask at the same time find the same one. */
unsigned tl_cpu_features(void)
{
    static _Atomic unsigned known;
    const unsigned is_known = 1u << 31;
    unsigned features = atomic_load_explicit(&known, memory_order_relaxed);
    if (features == 0) {
        features = look_up() | is_known;
        atomic_store_explicit(&known, features, memory_order_relaxed);
    }
    return features & ~is_known;
}
