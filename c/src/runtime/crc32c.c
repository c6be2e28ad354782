/* SPDX-License-Identifier: MIT */
/* crc32c.c: CRC-32C, by the CPU's instruction where it has one and by eight tables otherwise.
 *
 * Words. Both ways work on the register: the reflected remainder, which starts and ends as the complement of what
 * callers see. A little-endian word holds the byte that comes first in its low bits, which is the order both the
 * instruction and the tables eat. */
#include <pthread.h>
#include <stdbool.h>
#include <string.h>

#include "runtime/cpu.h"
#include "runtime/crc32c.h"
#include "runtime/fail.h"
#include "tinyllm/kv_pool.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words are eaten in little-endian order"
#endif

#define POLYNOMIAL 0x82F63B78u /* Castagnoli's, reflected */

static uint64_t load64(const unsigned char *p)
{
    uint64_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

/* ---- tables: byte[k][x] is the register after byte x and k zero bytes, from 0 ---- */

static uint32_t byte[8][256];
static pthread_once_t tables_once = PTHREAD_ONCE_INIT;

static void make_tables(void)
{
    for (uint32_t x = 0; x < 256; x++) {
        uint32_t reg = x;
        for (int bit = 0; bit < 8; bit++)
            reg = reg >> 1 ^ (reg & 1 ? POLYNOMIAL : 0);
        byte[0][x] = reg;
    }
    for (int k = 1; k < 8; k++)
        for (int x = 0; x < 256; x++)
            byte[k][x] = byte[k - 1][x] >> 8 ^ byte[0][byte[k - 1][x] & 0xFF];
}

static uint32_t eat_word_by_table(uint32_t reg, uint64_t word)
{
    uint32_t next = 0;
    word ^= reg;
    for (int i = 0; i < 8; i++)
        next ^= byte[7 - i][word >> 8 * i & 0xFF];
    return next;
}

uint32_t tl_crc32c_by_table(const void *data, size_t n, uint32_t crc)
{
    const unsigned char *p = data;
    uint32_t reg = ~crc;
    (void)pthread_once(&tables_once, make_tables); /* fails only for a bad control word */
    for (; n >= 8; n -= 8, p += 8)
        reg = eat_word_by_table(reg, load64(p));
    for (; n > 0; n--)
        reg = reg >> 8 ^ byte[0][(reg ^ *p++) & 0xFF];
    return ~reg;
}

/* ---- the instruction ---- */

#if defined(__x86_64__)

#include <nmmintrin.h>

#define WITH_INSTRUCTION __attribute__((target("sse4.2")))

static inline WITH_INSTRUCTION uint32_t eat_word(uint32_t reg, uint64_t word)
{
    return (uint32_t)_mm_crc32_u64(reg, word);
}

static inline WITH_INSTRUCTION uint32_t eat_byte(uint32_t reg, unsigned char x)
{
    return _mm_crc32_u8(reg, x);
}

#elif defined(__aarch64__)

#define WITH_INSTRUCTION /* the assembler is told instead: compilers offer the intrinsic only to whole files built for it */

static inline uint32_t eat_word(uint32_t reg, uint64_t word)
{
    __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(reg) : "r"(word));
    return reg;
}

static inline uint32_t eat_byte(uint32_t reg, unsigned char x)
{
    __asm__(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(reg) : "r"((uint32_t)x));
    return reg;
}

#endif

#if defined(WITH_INSTRUCTION)

WITH_INSTRUCTION uint32_t tl_crc32c_by_instruction(const void *data, size_t n, uint32_t crc)
{
    const unsigned char *p = data;
    uint32_t reg = ~crc;
    for (; n >= 8; n -= 8, p += 8)
        reg = eat_word(reg, load64(p));
    for (; n > 0; n--)
        reg = eat_byte(reg, *p++);
    return ~reg;
}

#else

uint32_t tl_crc32c_by_instruction(const void *data, size_t n, uint32_t crc)
{
    return tl_crc32c_by_table(data, n, crc);
}

#endif

uint32_t tl_crc32c(const void *data, size_t n, uint32_t crc)
{
    if (!data && n > 0) {
        (void)tl_fail(TL_EINVAL, "tl_crc32c", "data is NULL with n = %zu", n);
        return crc;
    }
    return tl_cpu_features() & TL_CPU_CRC32 ? tl_crc32c_by_instruction(data, n, crc) : tl_crc32c_by_table(data, n, crc);
}
