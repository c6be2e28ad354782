/* SPDX-License-Identifier: MIT */
/* envelope_ref.h: bytes of envelopes put together by hand, and sealed. */
#ifndef TL_ENVELOPE_REF_H
#define TL_ENVELOPE_REF_H

#include <stddef.h>
#include <stdint.h>

static inline void put(unsigned char *p, uint64_t x, int n)
{
    for (int i = 0; i < n; i++)
        p[i] = (unsigned char)(x >> 8 * i);
}

/* Bit by bit, so that a wrong tl_crc32c cannot vouch for itself. */
static inline uint32_t crc_ref(const unsigned char *p, size_t n)
{
    uint32_t reg = 0xFFFFFFFFu;
    for (size_t i = 0; i < n; i++) {
        reg ^= p[i];
        for (int bit = 0; bit < 8; bit++)
            reg = reg & 1 ? reg >> 1 ^ 0x82F63B78u : reg >> 1;
    }
    return ~reg;
}

static inline void seal(unsigned char *p, size_t len)
{
    put(p + len - 4, crc_ref(p, len - 4), 4);
}

#endif
