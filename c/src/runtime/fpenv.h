/* SPDX-License-Identifier: MIT */
/* fpenv.h: the float mode the arithmetic is defined in: round to nearest even, subnormals kept, no
 * traps.
 *
 * Every function that rounds enters it and gives the caller's mode back, sticky flags included; a
 * pool worker enters it before every range. Only the unit that our code computes with is touched
 * (MXCSR on x86, FPCR on Arm). */
#ifndef TL_FPENV_H
#define TL_FPENV_H

#include <stdint.h>

#if defined(__x86_64__)

#include <xmmintrin.h>
typedef unsigned int tl_fpenv;

static inline tl_fpenv tl_fpenv_enter(void)
{
    const tl_fpenv caller = _mm_getcsr();
    _mm_setcsr(0x1F80u); /* all exceptions masked, nearest even, no FTZ, no DAZ */
    return caller;
}

static inline void tl_fpenv_leave(tl_fpenv caller)
{
    _mm_setcsr(caller);
}

#elif defined(__aarch64__)

typedef struct {
    uint64_t fpcr, fpsr;
} tl_fpenv;

static inline tl_fpenv tl_fpenv_enter(void)
{
    tl_fpenv caller;
    __asm__ volatile("mrs %0, fpcr" : "=r"(caller.fpcr) : : "memory");
    __asm__ volatile("mrs %0, fpsr" : "=r"(caller.fpsr) : : "memory");
    __asm__ volatile("msr fpcr, %0" : : "r"((uint64_t)0) : "memory");
    return caller;
}

static inline void tl_fpenv_leave(tl_fpenv caller)
{
    __asm__ volatile("msr fpsr, %0" : : "r"(caller.fpsr) : "memory");
    __asm__ volatile("msr fpcr, %0" : : "r"(caller.fpcr) : "memory");
}

#else

#include <fenv.h>
typedef fenv_t tl_fpenv;

static inline tl_fpenv tl_fpenv_enter(void)
{
    tl_fpenv caller;
    fegetenv(&caller);
    fesetenv(FE_DFL_ENV);
    return caller;
}

static inline void tl_fpenv_leave(tl_fpenv caller)
{
    fesetenv(&caller);
}

#endif
#endif
