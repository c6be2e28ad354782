/* SPDX-License-Identifier: MIT */
/* crc32c.h: the ways tl_crc32c computes, each callable on its own so that they can be compared, and
 * the sum of bytes that are being copied. In all of them pointers are not NULL where n > 0. */
#ifndef TL_CRC32C_H
#define TL_CRC32C_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* As tl_crc32c, by tables: runs everywhere. */
uint32_t tl_crc32c_by_table(const void *data, size_t n, uint32_t crc);

/* The same by the CPU's instruction; only where tl_cpu_features() has TL_CPU_CRC32. */
uint32_t tl_crc32c_by_instruction(const void *data, size_t n, uint32_t crc);

/* The same by carry-less products; only where it has TL_CPU_VPCLMUL. */
uint32_t tl_crc32c_by_folding(const void *data, size_t n, uint32_t crc);

/* Copies n bytes and returns their sum, in one pass over memory. With past_cache the copy goes past
 * the caches, which is for more than they hold: the caller ends with tl_copies_done() before
 * another thread may look. */
uint32_t tl_crc32c_copy(void *to, const void *from, size_t n, uint32_t crc, bool past_cache);

/* The same without products: piece by piece, each summed and then copied while it is in cache. */
uint32_t tl_crc32c_copy_in_pieces(void *to, const void *from, size_t n, uint32_t crc,
                                  bool past_cache);

/* memcpy, past the caches where past_cache is set. */
void tl_copy(void *to, const void *from, size_t n, bool past_cache);

/* Puts what was copied past the caches before everything that follows. */
void tl_copies_done(void);

/* ---- between crc32c.c and crc32c_products.avx512.c ---- */

/* bytes folded at a time: in one register, in four */
enum { CRC32C_FOLD = 64, CRC32C_WIDE = 4 * CRC32C_FOLD };
enum crc32c_store { CRC32C_STORE_NOTHING, CRC32C_STORE, CRC32C_STORE_PAST_CACHE };

/* Folds n bytes, n >= CRC32C_WIDE and a multiple of CRC32C_FOLD, behind a register to eight words
 * that have the same sum from a register of 0. `to`: where they are stored too (a multiple of
 * CRC32C_FOLD for CRC32C_STORE_PAST_CACHE), or NULL. power: for the first and the last 8 of 16
 * bytes, the multipliers that move them by CRC32C_FOLD ([0]) and CRC32C_WIDE ([1]). */
void tl_crc32c_fold(uint32_t reg, unsigned char *to, const unsigned char *p, size_t n,
                    enum crc32c_store store, const uint64_t power[2][2], uint64_t words[8]);

#endif
