/* SPDX-License-Identifier: MIT */
/* crc32c_products.avx512.c: the part of the sum that needs AVX-512 and its carry-less products: a
 * file of its own, so that all others run on every CPU. Called only where tl_cpu_features() has
 * TL_CPU_VPCLMUL.
 *
 * 16 bytes times x^(8d) count d bytes further on what the 16 count where they are: so they are
 * multiplied and added there. */
#include "runtime/crc32c.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define WITH_PRODUCTS __attribute__((target("avx512f,vpclmulqdq")))
#define INLINE static inline __attribute__((always_inline))

/* CRC32C_FOLD bytes at `at`; a constant `store` leaves no branch. */
INLINE WITH_PRODUCTS __m512i take(unsigned char *to, const unsigned char *p, size_t at,
                                  enum crc32c_store store)
{
    const __m512i x = _mm512_loadu_si512(p + at);
    if (store == CRC32C_STORE)
        _mm512_storeu_si512(to + at, x);
    else if (store == CRC32C_STORE_PAST_CACHE)
        _mm512_stream_si512((void *)(to + at), x);
    return x;
}

INLINE WITH_PRODUCTS __m512i fold(__m512i x, const uint64_t by[2], __m512i onto)
{
    const __m512i k = _mm512_broadcast_i32x4(_mm_loadu_si128((const void *)by));
    return _mm512_ternarylogic_epi64(_mm512_clmulepi64_epi128(x, k, 0x00),
                                     _mm512_clmulepi64_epi128(x, k, 0x11), onto, 0x96);
}

INLINE WITH_PRODUCTS void fold_all(uint32_t reg, unsigned char *to, const unsigned char *p,
                                   size_t n, enum crc32c_store store, const uint64_t power[2][2],
                                   uint64_t words[8])
{
    __m512i x[4];
    size_t at = CRC32C_WIDE;
    for (size_t i = 0; i < 4; i++)
        x[i] = take(to, p, i * CRC32C_FOLD, store);
    x[0] = _mm512_xor_si512(x[0], _mm512_maskz_set1_epi32(1, (int)reg));
    for (; at + CRC32C_WIDE <= n; at += CRC32C_WIDE)
        for (size_t i = 0; i < 4; i++)
            x[i] = fold(x[i], power[1], take(to, p, at + i * CRC32C_FOLD, store));
    for (int i = 1; i < 4; i++)
        x[i] = fold(x[i - 1], power[0], x[i]);
    for (; at < n; at += CRC32C_FOLD)
        x[3] = fold(x[3], power[0], take(to, p, at, store));
    _mm512_storeu_si512(words, x[3]);
}

WITH_PRODUCTS void tl_crc32c_fold(uint32_t reg, unsigned char *to, const unsigned char *p, size_t n,
                                  enum crc32c_store store, const uint64_t power[2][2],
                                  uint64_t words[8])
{
    if (store == CRC32C_STORE_NOTHING)
        fold_all(reg, to, p, n, CRC32C_STORE_NOTHING, power, words);
    else if (store == CRC32C_STORE)
        fold_all(reg, to, p, n, CRC32C_STORE, power, words);
    else
        fold_all(reg, to, p, n, CRC32C_STORE_PAST_CACHE, power, words);
}
#endif
