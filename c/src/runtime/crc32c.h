/* SPDX-License-Identifier: MIT */
/* crc32c.h: the ways tl_crc32c computes, each callable on its own so that they can be compared, and the sum of bytes that
 * are being copied. In all of them pointers are not NULL where n > 0. */
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

/* Copies n bytes and returns their sum, in one pass over memory. With past_cache the copy goes past the caches, which is
 * for more than they hold: the caller ends with tl_copies_done() before another thread may look. */
uint32_t tl_crc32c_copy(void *to, const void *from, size_t n, uint32_t crc, bool past_cache);

/* The same without products: piece by piece, each summed and then copied while it is in cache. */
uint32_t tl_crc32c_copy_in_pieces(void *to, const void *from, size_t n, uint32_t crc, bool past_cache);

/* memcpy, past the caches where past_cache is set. */
void tl_copy(void *to, const void *from, size_t n, bool past_cache);

/* Puts what was copied past the caches before everything that follows. */
void tl_copies_done(void);

#endif
