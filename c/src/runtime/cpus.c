/* SPDX-License-Identifier: MIT */
/* cpus.c: how many CPUs this process may use.
 *
 * A container's "2 CPUs" are a quota of CPU time: every CPU of the machine is there, and threads
 * that together use more than two are all stopped for the rest of each period.
 *
 * Words. group: a control group of Linux, a directory; those above it limit it too. Version 2 of
 * them keeps quota and period in one file, version 1 in two, and a machine may have both. */
#include "runtime/cpus.h"

#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

/* ---- files ---- */

/* What stands in root/mount/group/name, cut to cap - 1 bytes; "" where nothing can be read. */
static void read_file(const char *root, const char *mount, const char *group, const char *name,
                      char *text, size_t cap)
{
    char path[PATH_MAX]; /* one that is longer loses its name, and is no file */
    size_t n = 0;
    ssize_t got = 0;
    snprintf(path, sizeof path, "%s%s%s/%s", root, mount, group, name);
    const int file = open(path, O_RDONLY | O_CLOEXEC);
    while (file >= 0 && n < cap - 1 && (got = read(file, text + n, cap - 1 - n)) > 0)
        n += (size_t)got;
    if (file >= 0)
        close(file);
    text[got < 0 ? 0 : n] = '\0';
}

/* Moves *text behind the decimal number that stands there. 0: there is none, or it is too large. */
static int64_t take_number(const char **text)
{
    int64_t n = 0;
    for (; **text >= '0' && **text <= '9'; ++*text)
        if (__builtin_mul_overflow(n, 10, &n) || __builtin_add_overflow(n, **text - '0', &n))
            return 0;
    return n;
}

static bool is_end(const char *text)
{
    return strcmp(text, "\n") == 0 || *text == '\0';
}

/* ---- quotas, in CPUs ---- */

static int64_t cpus_for(int64_t quota, int64_t period)
{
    return quota > 0 && period > 0 ? (quota - 1) / period + 1 : TL_NO_QUOTA;
}

/* "<quota> <period>", or "max <period>" */
static int64_t quota_v2(const char *root, const char *group)
{
    char text[64];
    read_file(root, "/sys/fs/cgroup", group, "cpu.max", text, sizeof text);
    const char *at = text;
    const int64_t quota = take_number(&at);
    at += *at == ' ';
    const int64_t period = take_number(&at);
    return is_end(at) ? cpus_for(quota, period) : TL_NO_QUOTA;
}

/* A quota of -1 is none. */
static int64_t quota_v1(const char *root, const char *group)
{
    char quota_text[32], period_text[32];
    read_file(root, "/sys/fs/cgroup/cpu", group, "cpu.cfs_quota_us", quota_text,
              sizeof quota_text);
    read_file(root, "/sys/fs/cgroup/cpu", group, "cpu.cfs_period_us", period_text,
              sizeof period_text);
    const char *quota_at = quota_text, *period_at = period_text;
    const int64_t quota = take_number(&quota_at), period = take_number(&period_at);
    return is_end(quota_at) && is_end(period_at) ? cpus_for(quota, period) : TL_NO_QUOTA;
}

typedef int64_t (*quota_fn)(const char *root, const char *group);

/* The least of a group, which is cut down to nothing, and of all above it. A container may be told
 * the name of a group that it does not see, and have its own at the top: what is not there is no
 * quota. */
static int64_t least_quota(quota_fn quota_of, const char *root, char *group)
{
    int64_t least = TL_NO_QUOTA;
    for (;;) {
        const int64_t quota = quota_of(root, group);
        char *last = strrchr(group, '/');
        least = quota < least ? quota : least;
        if (!last)
            return least;
        *last = '\0';
    }
}

static bool lists_cpu(const char *controllers)
{
    for (size_t n; *controllers; controllers += n + (controllers[n] == ',')) {
        n = strcspn(controllers, ",");
        if (n == 3 && memcmp(controllers, "cpu", 3) == 0)
            return true;
    }
    return false;
}

/* A line of /proc/self/cgroup: "<number>:<controllers, by commas>:<group>"; version 2 is number 0
 * and lists none. */
static int64_t quota_of_line(const char *root, char *line)
{
    char *controllers = strchr(line, ':');
    char *group = controllers ? strchr(controllers + 1, ':') : NULL;
    if (!group)
        return TL_NO_QUOTA;
    *controllers++ = '\0';
    *group++ = '\0';
    if (strcmp(line, "0") == 0 && *controllers == '\0')
        return least_quota(quota_v2, root, group);
    return lists_cpu(controllers) ? least_quota(quota_v1, root, group) : TL_NO_QUOTA;
}

int64_t tl_cpu_quota(const char *root)
{
    char text[8192], *rest = text;
    int64_t least = TL_NO_QUOTA;
    read_file(root, "", "/proc/self", "cgroup", text, sizeof text);
    for (char *line; (line = strsep(&rest, "\n"));) {
        const int64_t quota = quota_of_line(root, line);
        least = quota < least ? quota : least;
    }
    return least;
}

/* ---- affinity ---- */

static long cpus_of_mask(void)
{
    long n = 0;
#if defined(__linux__)
    /* large machines have more CPUs than cpu_set_t */
    unsigned long mask[65536 / (8 * sizeof(unsigned long))] = {0};
    if (sched_getaffinity(0, sizeof mask, (cpu_set_t *)(void *)mask) == 0)
        for (size_t i = 0; i < sizeof mask / sizeof mask[0]; i++)
            n += __builtin_popcountl(mask[i]);
#endif
    return n > 0 ? n : sysconf(_SC_NPROCESSORS_ONLN);
}

int tl_usable_cpus(const char *root)
{
    const long mask = cpus_of_mask();
    const int64_t quota = tl_cpu_quota(root);
    const int64_t n = quota < mask ? quota : mask;
    return n < 1 ? 1 : n > INT_MAX ? INT_MAX : (int)n;
}
