/* SPDX-License-Identifier: MIT */
/* cpus.h: how many CPUs this process may use. Both read the system's files anew at each call and
 * take no memory. Thread-safe. */
#ifndef TL_CPUS_H
#define TL_CPUS_H

#include <stdint.h>

#define TL_NO_QUOTA INT64_MAX

/* The CPUs that the quotas of this process's control groups pay for, a part of one counted as one;
 * TL_NO_QUOTA where there is none, or none that can be read. `root` stands before the path of every
 * file: "" but in tests. */
int64_t tl_cpu_quota(const char *root);

/* The CPUs in the calling thread's affinity mask, which is what threads it starts inherit, but no
 * more than the quota; at least 1. */
int tl_usable_cpus(const char *root);

#endif
