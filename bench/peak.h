/* SPDX-License-Identifier: MIT */
/* peak.h: the most f32 fused multiply-adds the machine does, by a loop of nothing else: twelve
 * independent accumulators hide the latency of any core. What attention can never exceed. */
#ifndef TL_BENCH_PEAK_H
#define TL_BENCH_PEAK_H

#include "bench.h"
#include "tinyllm/pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

enum { PEAK_CHAINS = 12, PEAK_STEPS = 200000 };

static volatile float peak_sink;

#define PEAK_LOOP(name, target, vec, set1, fma)           \
    target static inline void name(void)                  \
    {                                                     \
        vec acc[PEAK_CHAINS];                             \
        const vec x = set1(0.999f), y = set1(1e-3f);      \
        for (int k = 0; k < PEAK_CHAINS; k++)             \
            acc[k] = set1((float)k);                      \
        for (int i = 0; i < PEAK_STEPS; i++)              \
            for (int k = 0; k < PEAK_CHAINS; k++)         \
                acc[k] = fma(acc[k], x, y);               \
        for (int k = 1; k < PEAK_CHAINS; k++)             \
            acc[0] = fma(acc[0], x, acc[k]);              \
        float sum;                                        \
        memcpy(&sum, acc, sizeof sum);                    \
        peak_sink = sum;                                  \
    }

#if defined(__x86_64__)
PEAK_LOOP(peak_avx2, __attribute__((target("avx2,fma"))), __m256, _mm256_set1_ps, _mm256_fmadd_ps)
PEAK_LOOP(peak_avx512, __attribute__((target("avx512f"))), __m512, _mm512_set1_ps, _mm512_fmadd_ps)
#elif defined(__aarch64__)
#define PEAK_FMA(a, x, y) vfmaq_f32(y, a, x)
PEAK_LOOP(peak_neon, , float32x4_t, vdupq_n_f32, PEAK_FMA)
#endif

static const struct {
    const char *isa;
    void (*run)(void);
    int lanes;
} peaks[] = {
#if defined(__x86_64__)
    {"avx2", peak_avx2, 8},
    {"avx512", peak_avx512, 16},
#elif defined(__aarch64__)
    {"neon", peak_neon, 4},
#endif
    {NULL, NULL, 0}};

static inline void peak_range(void *run, int64_t lo, int64_t hi, int worker)
{
    (void)lo, (void)hi, (void)worker;
    (*(void (**)(void))run)();
}

/* Flops a second of an instruction set this CPU has, on all threads of `tp` at once (NULL: the
 * caller): the best of thirty tries of about a millisecond. 0 where there is no loop for it. */
static inline double fma_peak(const char *isa, tl_pool *tp)
{
    const int threads = tl_pool_threads(tp);
    double best = 0;
    for (int i = 0; peaks[i].isa; i++)
        for (int k = 0; k < 30 && strcmp(peaks[i].isa, isa) == 0; k++) {
            void (*run)(void) = peaks[i].run;
            const double start = now_s();
            tl_parallel_for(tp, threads, 1, peak_range, &run);
            const double flops =
                2.0 * PEAK_CHAINS * PEAK_STEPS * peaks[i].lanes * threads / (now_s() - start);
            best = flops > best ? flops : best;
        }
    return best;
}

#endif
