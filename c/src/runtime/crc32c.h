/* SPDX-License-Identifier: MIT */
/* crc32c.h: the two ways tl_crc32c computes, each callable on its own so that they can be compared. */
#ifndef TL_CRC32C_H
#define TL_CRC32C_H

#include <stddef.h>
#include <stdint.h>

/* As tl_crc32c; data is not NULL where n > 0. */
uint32_t tl_crc32c_by_table(const void *data, size_t n, uint32_t crc);

/* The same by the CPU's instruction; only where tl_cpu_features() has TL_CPU_CRC32. */
uint32_t tl_crc32c_by_instruction(const void *data, size_t n, uint32_t crc);

#endif
