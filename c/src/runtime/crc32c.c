/* SPDX-License-Identifier: MIT */
/* crc32c.c: CRC-32C, by the fastest of three ways this CPU has: carry-less products, an instruction
 * of its own, eight tables; and copies that are summed on the way.
 *
 * Words. All ways work on the register: the reflected remainder, which starts and ends as the
 * complement of what callers see; bit 31 is x^0. A little-endian word holds the byte that comes
 * first in its low bits, which is the order that all of them read.
 * stream: one of three pieces of the input that are summed side by side, because an instruction's
 * result takes three cycles and another one can start in each. */
#include <pthread.h>
#include <string.h>

#include "runtime/cpu.h"
#include "runtime/crc32c.h"
#include "runtime/fail.h"
#include "tinyllm/kv_pool.h"

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "words are read in little-endian order"
#endif

#define POLYNOMIAL 0x82F63B78u /* Castagnoli's, reflected */

enum {
    /* bytes: longer ones lose more to the prefetcher, which sees three, than joining them costs */
    STREAM = 256,
    FOLD = CRC32C_FOLD, WIDE = CRC32C_WIDE,
    /* bytes that are summed and then copied: half of the smallest first-level cache, with the
     * copy */
    PIECE = 8192,
};

static uint64_t load64(const unsigned char *p)
{
    uint64_t x;
    memcpy(&x, p, sizeof x);
    return x;
}

/* ---- tables ---- */

static uint32_t byte[8][256];   /* [k][x]: the register after byte x and k zero bytes, from 0 */
static uint32_t stream[4][256]; /* [k][x]: the register after STREAM zero bytes, from x << 8k */
/* multipliers that move 16 bytes by FOLD and by WIDE: for their first 8 bytes, their last */
static uint64_t power[2][2];
static pthread_once_t tables_once = PTHREAD_ONCE_INIT;

/* The register after n zero bytes: times x^8n, modulo the polynomial. */
static uint32_t update_zeros(uint32_t reg, int n)
{
    for (; n > 0; n--)
        reg = reg >> 8 ^ byte[0][reg & 0xFF];
    return reg;
}

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
    for (int k = 0; k < 4; k++)
        for (uint32_t x = 1; x < 256; x++) { /* linear: one bit, and the others */
            const uint32_t others = x & (x - 1);
            stream[k][x] = others ? stream[k][others] ^ stream[k][x ^ others]
                                  : update_zeros(x << 8 * k, STREAM);
        }
    /* A word's product with x^m in bits 1 to 32 of the other is its product with x^(m+32): 31
     * because bit 63 would be x^0, one because a product of two words lies one bit short of 128.
     * The first word of two stands 64 powers above the last. */
    for (int i = 0; i < 2; i++) {
        power[i][0] = (uint64_t)update_zeros(1u << 31, (i ? WIDE : FOLD) + 4) << 1;
        power[i][1] = (uint64_t)update_zeros(1u << 31, (i ? WIDE : FOLD) - 4) << 1;
    }
}

static void need_tables(void)
{
    (void)pthread_once(&tables_once, make_tables); /* fails only for a bad control word */
}

static uint32_t update_word_by_table(uint32_t reg, uint64_t word)
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
    need_tables();
    for (; n >= 8; n -= 8, p += 8)
        reg = update_word_by_table(reg, load64(p));
    for (; n > 0; n--)
        reg = reg >> 8 ^ byte[0][(reg ^ *p++) & 0xFF];
    return ~reg;
}

/* ---- the instruction ---- */

#if defined(__x86_64__)

#include <immintrin.h>

/* In clang SSE4.2 alone does not bring it from version 14 on, and earlier ones lack the word. */
#if defined(__clang__) && __clang_major__ >= 14
#define WITH_INSTRUCTION __attribute__((target("sse4.2,crc32")))
#else
#define WITH_INSTRUCTION __attribute__((target("sse4.2")))
#endif

static inline WITH_INSTRUCTION uint32_t update_word(uint32_t reg, uint64_t word)
{
    return (uint32_t)_mm_crc32_u64(reg, word);
}

static inline WITH_INSTRUCTION uint32_t update_byte(uint32_t reg, unsigned char x)
{
    return _mm_crc32_u8(reg, x);
}

#elif defined(__aarch64__)

/* the assembler is told instead: compilers offer the intrinsic only to whole files built for it */
#define WITH_INSTRUCTION

static inline uint32_t update_word(uint32_t reg, uint64_t word)
{
    __asm__(".arch_extension crc\n\tcrc32cx %w0, %w0, %x1" : "+r"(reg) : "r"(word));
    return reg;
}

static inline uint32_t update_byte(uint32_t reg, unsigned char x)
{
    __asm__(".arch_extension crc\n\tcrc32cb %w0, %w0, %w1" : "+r"(reg) : "r"((uint32_t)x));
    return reg;
}

#endif

#if defined(WITH_INSTRUCTION)

static uint32_t update_stream_of_zeros(uint32_t reg)
{
    return stream[0][reg & 0xFF] ^ stream[1][reg >> 8 & 0xFF] ^ stream[2][reg >> 16 & 0xFF] ^
           stream[3][reg >> 24];
}

static inline WITH_INSTRUCTION uint32_t update_three_streams(uint32_t first, const unsigned char *p)
{
    uint32_t second = 0, third = 0;
    for (int i = 0; i < STREAM; i += 8) {
        first = update_word(first, load64(p + i));
        second = update_word(second, load64(p + STREAM + i));
        third = update_word(third, load64(p + 2 * STREAM + i));
    }
    return update_stream_of_zeros(update_stream_of_zeros(first) ^ second) ^ third;
}

WITH_INSTRUCTION uint32_t tl_crc32c_by_instruction(const void *data, size_t n, uint32_t crc)
{
    const unsigned char *p = data;
    uint32_t reg = ~crc;
    if (n >= 3 * STREAM)
        need_tables();
    for (; n >= 3 * STREAM; n -= 3 * STREAM, p += 3 * STREAM)
        reg = update_three_streams(reg, p);
    for (; n >= 8; n -= 8, p += 8)
        reg = update_word(reg, load64(p));
    for (; n > 0; n--)
        reg = update_byte(reg, *p++);
    return ~reg;
}

#else

uint32_t tl_crc32c_by_instruction(const void *data, size_t n, uint32_t crc)
{
    return tl_crc32c_by_table(data, n, crc);
}

#endif

/* ---- carry-less products (crc32c_products.avx512.c) ---- */

#if defined(__x86_64__)

/* The register after n bytes, n >= WIDE and a multiple of FOLD, which are copied on the way if
 * store says so. */
static WITH_INSTRUCTION uint32_t update_folds(uint32_t reg, unsigned char *to,
                                              const unsigned char *p, size_t n,
                                              enum crc32c_store store)
{
    uint64_t words[8];
    need_tables();
    tl_crc32c_fold(reg, to, p, n, store, power, words);
    reg = 0;
    for (int i = 0; i < 8; i++)
        reg = update_word(reg, words[i]);
    return reg;
}

uint32_t tl_crc32c_by_folding(const void *data, size_t n, uint32_t crc)
{
    const unsigned char *p = data;
    const size_t whole = n >= WIDE ? n / FOLD * FOLD : 0;
    if (whole)
        crc = ~update_folds(~crc, NULL, p, whole, CRC32C_STORE_NOTHING);
    return tl_crc32c_by_instruction(p + whole, n - whole, crc);
}

static uint32_t copy_by_folding(unsigned char *to, const unsigned char *from, size_t n,
                                uint32_t crc, bool past_cache)
{
    const size_t first = past_cache ? -(uintptr_t)to % FOLD : 0;
    if (n < first + WIDE)
        return tl_crc32c_copy_in_pieces(to, from, n, crc, false);
    const size_t whole = (n - first) / FOLD * FOLD, last = n - first - whole;
    crc = tl_crc32c_copy_in_pieces(to, from, first, crc, false);
    crc = ~update_folds(~crc, to + first, from + first, whole,
                        past_cache ? CRC32C_STORE_PAST_CACHE : CRC32C_STORE);
    return tl_crc32c_copy_in_pieces(to + n - last, from + n - last, last, crc, false);
}

#else

uint32_t tl_crc32c_by_folding(const void *data, size_t n, uint32_t crc)
{
    return tl_crc32c_by_instruction(data, n, crc);
}

#define copy_by_folding tl_crc32c_copy_in_pieces

#endif

/* ---- the best there is ---- */

static uint32_t sum(const void *data, size_t n, uint32_t crc)
{
    const unsigned have = tl_cpu_features();
    if ((have & TL_CPU_VPCLMUL) && n >= WIDE)
        return tl_crc32c_by_folding(data, n, crc);
    return have & TL_CPU_CRC32 ? tl_crc32c_by_instruction(data, n, crc)
                               : tl_crc32c_by_table(data, n, crc);
}

uint32_t tl_crc32c(const void *data, size_t n, uint32_t crc)
{
    if (!data && n > 0) {
        (void)tl_fail(TL_EINVAL, "tl_crc32c", "data is NULL with n = %zu", n);
        return crc;
    }
    return sum(data, n, crc);
}

/* ---- copies ---- */

#if defined(__x86_64__)

/* Stores that pass the caches need not read what they overwrite, and leave the caches to others. */
static void copy_past_cache(unsigned char *to, const unsigned char *from, size_t n)
{
    const size_t first = -(uintptr_t)to % 64 < n ? -(uintptr_t)to % 64 : n;
    memcpy(to, from, first);
    to += first, from += first, n -= first;
    for (; n >= 64; n -= 64, to += 64, from += 64)
        for (int i = 0; i < 64; i += 16)
            _mm_stream_si128((__m128i *)(void *)(to + i),
                             _mm_loadu_si128((const __m128i *)(const void *)(from + i)));
    memcpy(to, from, n);
}

void tl_copies_done(void)
{
    _mm_sfence();
}

#else

#define copy_past_cache memcpy /* the C library's knows when to */

void tl_copies_done(void)
{
}

#endif

void tl_copy(void *to, const void *from, size_t n, bool past_cache)
{
    if (past_cache)
        copy_past_cache(to, from, n);
    else
        memcpy(to, from, n);
}

uint32_t tl_crc32c_copy_in_pieces(void *to, const void *from, size_t n, uint32_t crc,
                                  bool past_cache)
{
    for (size_t at = 0; at < n; at += PIECE) {
        const size_t piece = n - at < PIECE ? n - at : PIECE;
        crc = sum((const unsigned char *)from + at, piece, crc);
        tl_copy((unsigned char *)to + at, (const unsigned char *)from + at, piece, past_cache);
    }
    return crc;
}

uint32_t tl_crc32c_copy(void *to, const void *from, size_t n, uint32_t crc, bool past_cache)
{
    return tl_cpu_features() & TL_CPU_VPCLMUL
               ? copy_by_folding(to, from, n, crc, past_cache)
               : tl_crc32c_copy_in_pieces(to, from, n, crc, past_cache);
}
