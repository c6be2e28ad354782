/* SPDX-License-Identifier: MIT */
/* float_flags.h: compiler flags under which a float operation is no longer one IEEE operation stop
 * the build. The Makefile includes this before every source; canon.h includes it for builds that go
 * by other means. The Makefile also refuses by name those that leave no macro. */
#ifndef TL_FLOAT_FLAGS_H
#define TL_FLOAT_FLAGS_H

#if defined(__FAST_MATH__)
#error "libtinyllm: -ffast-math, or -Ofast, changes results: build without it, -O3 is as fast here"
#elif defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__
#error "libtinyllm: -ffinite-math-only breaks NaN and infinity: build without it"
#elif defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__) || defined(__NO_SIGNED_ZEROS__)
#error "libtinyllm: -funsafe-math-optimizations, or a part of it, changes results: build without it"
#elif defined(__GCC_IEC_559) && __GCC_IEC_559 == 0
#error "libtinyllm: a flag such as -fsingle-precision-constant makes floats differ from IEEE 754"
#elif defined(__FLT_EVAL_METHOD__) && __FLT_EVAL_METHOD__ != 0 && __FLT_EVAL_METHOD__ != 16
#error "libtinyllm: floats are computed in more than 32 bits: build with -msse2 -mfpmath=sse"
#endif

#endif
