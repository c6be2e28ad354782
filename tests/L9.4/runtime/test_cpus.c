/* SPDX-License-Identifier: MIT */
/* test_cpus.c: the CPUs a process may use, from files that stand where the system's would. */
#include <fcntl.h>
#include <ftw.h>
#include <limits.h>
#include <sched.h>
#include <stdbool.h>
#include <sys/stat.h>

#include "check.h"
#include "runtime/cpus.h"

static char root[] = "/tmp/test_cpus.XXXXXX";

static int remove_one(const char *path, const struct stat *status, int kind, struct FTW *where)
{
    (void)status, (void)kind, (void)where;
    return remove(path);
}

/* An empty root, whatever the last test left. */
static void clear_root(void)
{
    static bool made;
    if (made)
        nftw(root, remove_one, 16, FTW_DEPTH | FTW_PHYS);
    memcpy(root + sizeof root - 7, "XXXXXX", 6);
    made = mkdtemp(root) != NULL;
    CHECK(made, "no directory below /tmp");
}

/* Removes the last root when the program ends. */
__attribute__((destructor)) static void remove_root(void)
{
    nftw(root, remove_one, 16, FTW_DEPTH | FTW_PHYS);
}

static void put(const char *path, const char *text)
{
    char full[PATH_MAX];
    snprintf(full, sizeof full, "%s%s", root, path);
    for (char *slash = full + strlen(root); (slash = strchr(slash + 1, '/'));) {
        *slash = '\0';
        (void)mkdir(full, 0700);
        *slash = '/';
    }
    FILE *file = fopen(full, "w");
    CHECK(file && fputs(text, file) >= 0 && fclose(file) == 0, "%s cannot be written", full);
}

struct file {
    const char *path, *text;
};

#define CGROUP "/proc/self/cgroup"
#define V2(group) "/sys/fs/cgroup" group "/cpu.max"
#define QUOTA(group) "/sys/fs/cgroup/cpu" group "/cpu.cfs_quota_us"
#define PERIOD(group) "/sys/fs/cgroup/cpu" group "/cpu.cfs_period_us"
#define MOST_FILES 7

struct machine {
    const char *what;
    int64_t cpus; /* that the quotas pay for; 0: none stands */
    struct file file[MOST_FILES];
};

static void check_machine(const struct machine *m)
{
    clear_root();
    for (int i = 0; i < MOST_FILES && m->file[i].path; i++)
        put(m->file[i].path, m->file[i].text);
    const int64_t want = m->cpus ? m->cpus : TL_NO_QUOTA, got = tl_cpu_quota(root);
    CHECK(got == want, "%s: %lld CPUs, want %lld", m->what, (long long)got, (long long)want);
}

#define CHECK_MACHINES(machines)                                              \
    for (size_t i_ = 0; i_ < sizeof(machines) / sizeof(machines)[0]; i_++) \
    check_machine(&(machines)[i_])

TEST(quotas_of_version_2)
{
    static const struct machine machines[] = {
        {"none", 0, {{CGROUP, "0::/\n"}, {V2(""), "max 100000\n"}}},
        {"whole CPUs", 4, {{CGROUP, "0::/\n"}, {V2(""), "400000 100000\n"}}},
        {"a part of a CPU", 3, {{CGROUP, "0::/\n"}, {V2(""), "200001 100000\n"}}},
        {"half a CPU", 1, {{CGROUP, "0::/\n"}, {V2(""), "50000 100000\n"}}},
        {"another period", 16, {{CGROUP, "0::/\n"}, {V2(""), "160000 10000\n"}}},
        {"no end of line", 4, {{CGROUP, "0::/"}, {V2(""), "400000 100000"}}},
        {"of the group", 2, {{CGROUP, "0::/a/b\n"}, {V2("/a/b"), "200000 100000\n"}}},
        {"above the group", 3, {{CGROUP, "0::/a/b\n"}, {V2("/a"), "300000 100000\n"}}},
        {"of a group not seen here", 5, {{CGROUP, "0::/x/y\n"}, {V2(""), "500000 100000\n"}}},
        {"not of a neighbour", 0, {{CGROUP, "0::/a\n"}, {V2("/b"), "100000 100000\n"}}},
        {"not of a group below", 0, {{CGROUP, "0::/a\n"}, {V2("/a/b"), "100000 100000\n"}}},
        {"a colon in the name", 2, {{CGROUP, "0::/a:b\n"}, {V2("/a:b"), "200000 100000\n"}}},
        {"the least of all: above",
         2,
         {{CGROUP, "0::/a/b\n"},
          {V2("/a/b"), "700000 100000\n"},
          {V2("/a"), "200000 100000\n"},
          {V2(""), "max 100000\n"}}},
        {"the least of all: below",
         2,
         {{CGROUP, "0::/a/b\n"},
          {V2("/a/b"), "200000 100000\n"},
          {V2("/a"), "300000 100000\n"},
          {V2(""), "900000 100000\n"}}},
    };
    CHECK_MACHINES(machines);
}

TEST(quotas_of_version_1)
{
    static const struct machine machines[] = {
        {"none", 0, {{CGROUP, "1:cpu:/\n"}, {QUOTA(""), "-1\n"}, {PERIOD(""), "100000\n"}}},
        {"two CPUs", 2, {{CGROUP, "1:cpu:/\n"}, {QUOTA(""), "200000\n"}, {PERIOD(""), "100000\n"}}},
        {"a part of a CPU",
         2,
         {{CGROUP, "1:cpu:/\n"}, {QUOTA(""), "100001\n"}, {PERIOD(""), "100000\n"}}},
        {"with another controller before",
         4,
         {{CGROUP, "4:cpuacct,cpu:/a\n"}, {QUOTA("/a"), "200000\n"}, {PERIOD("/a"), "50000\n"}}},
        {"with another controller behind",
         4,
         {{CGROUP, "4:cpu,cpuacct:/a\n"}, {QUOTA("/a"), "200000\n"}, {PERIOD("/a"), "50000\n"}}},
        {"not of another controller",
         0,
         {{CGROUP, "4:cpuset:/a\n5:cpuacct:/a\n0::/b\n"},
          {QUOTA("/a"), "200000\n"},
          {PERIOD("/a"), "50000\n"}}},
        {"above a group not seen here",
         3,
         {{CGROUP, "9:cpu:/docker/x\n"}, {QUOTA(""), "300000\n"}, {PERIOD(""), "100000\n"}}},
        {"the least of both versions",
         2,
         {{CGROUP, "3:cpuset:/\n2:cpu:/a\n0::/a\n"},
          {QUOTA("/a"), "200000\n"},
          {PERIOD("/a"), "100000\n"},
          {V2("/a"), "300000 100000\n"}}},
        {"the least of both, told in the other order",
         2,
         {{CGROUP, "0::/a\n2:cpu:/a\n"},
          {QUOTA("/a"), "200000\n"},
          {PERIOD("/a"), "100000\n"},
          {V2("/a"), "300000 100000\n"}}},
        {"a period of nothing",
         0,
         {{CGROUP, "1:cpu:/\n"}, {QUOTA(""), "200000\n"}, {PERIOD(""), "0\n"}}},
        {"no period", 0, {{CGROUP, "1:cpu:/\n"}, {QUOTA(""), "200000\n"}}},
        {"words behind the quota",
         0,
         {{CGROUP, "1:cpu:/\n"}, {QUOTA(""), "200000 us\n"}, {PERIOD(""), "100000\n"}}},
        {"words behind the period",
         0,
         {{CGROUP, "1:cpu:/\n"}, {QUOTA(""), "200000\n"}, {PERIOD(""), "100000 us\n"}}},
    };
    CHECK_MACHINES(machines);
}

TEST(what_cannot_be_read_is_no_quota)
{
    static const char *const bad[] = {"", "\n", " ", "100000\n", "100000 \n", "0 100000\n",
                                      "100000 0\n", "-1 100000\n", "100000 -1\n", "1e5 100000\n",
                                      "100000 100000 100000\n", "100000 100000x\n", "max\n",
                                      "99999999999999999999 100000\n",
                                      "100000 99999999999999999999\n", "\xFF\xFE\n"};
    static const char *const lines[] = {"", "\n", "0\n", "0:\n", ":::\n", "0:cpu\n", "1::/\n",
                                        "x::/\n", "\n\n\n"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        const struct machine m = {bad[i], 0, {{CGROUP, "0::/\n"}, {V2(""), bad[i]}}};
        check_machine(&m);
    }
    for (size_t i = 0; i < sizeof lines / sizeof lines[0]; i++) {
        const struct machine m = {lines[i], 0, {{CGROUP, lines[i]}, {V2(""), "100000 100000\n"}}};
        check_machine(&m);
    }
    static const struct machine no_cgroup = {"no cgroup", 0, {{V2(""), "100000 100000\n"}}};
    static const struct machine empty = {"nothing", 0, {{NULL, NULL}}};
    check_machine(&no_cgroup);
    check_machine(&empty);
    clear_root();
    put(CGROUP "/is/a/directory", "");
    CHECK(tl_cpu_quota(root) == TL_NO_QUOTA, "a directory is a quota");
}

/* Lines and names longer than anything: they are cut, and nothing else happens. */
TEST(no_length_is_too_long)
{
    enum { LONG = 20000 };
    static char text[LONG + 16], max[LONG + 16];
    clear_root();
    memset(text, 'a', LONG);
    memcpy(text, "0::/", 4);
    put(CGROUP, text);
    CHECK(tl_cpu_quota(root) == TL_NO_QUOTA, "a name of 20000 letters");
    for (int i = 5; i < LONG; i += 2)
        text[i] = '/';
    put(CGROUP, text);
    put(V2(""), "200000 100000\n");
    CHECK(tl_cpu_quota(root) == 2, "a group 10000 deep");
    memset(max, '1', LONG);
    put(V2(""), max);
    CHECK(tl_cpu_quota(root) == TL_NO_QUOTA, "a quota of 20000 digits");
}

static int cpus_of_mask(void)
{
    cpu_set_t mask;
    CHECK(sched_getaffinity(0, sizeof mask, &mask) == 0, "no affinity mask");
    return CPU_COUNT(&mask);
}

TEST(no_more_than_the_mask_and_no_more_than_the_quota)
{
    const int mask = cpus_of_mask();
    char text[64];
    clear_root();
    CHECK(tl_usable_cpus(root) == mask, "%d without a quota", tl_usable_cpus(root));
    put(CGROUP, "0::/\n");
    put(V2(""), "123456789000000 1000\n");
    CHECK(tl_usable_cpus(root) == mask, "%d with a quota of more", tl_usable_cpus(root));
    for (int n = 1; n <= mask; n++) {
        snprintf(text, sizeof text, "%d 100000\n", n * 100000 - 1);
        put(V2(""), text);
        CHECK(tl_usable_cpus(root) == n, "%d with a quota of %d", tl_usable_cpus(root), n);
    }
}

static int open_files(void)
{
    int n = 0;
    for (int file = 0; file < 256; file++)
        n += fcntl(file, F_GETFD) != -1;
    return n;
}

TEST(no_file_stays_open)
{
    clear_root();
    put(CGROUP, "0::/a\n1:cpu:/\n");
    put(V2("/a"), "100000 100000\n");
    put(QUOTA("") "/is/a/directory", "");
    const int before = open_files(), n = tl_usable_cpus(root), after = open_files();
    CHECK(n == 1 && before == after, "%d CPUs, %d files", n, after - before);
}

CHECK_MAIN()
