/* SPDX-License-Identifier: MIT */
/* dispatch.c: which instruction set runs. The tables stand in isas.def's order, slowest first; the
 * last one this CPU can run is taken at first use, unless TINYLLM_ISA names one. */
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/kernels.h"
#include "runtime/fail.h"
#include "tinyllm/isa.h"

#define ISA(isa, needs) extern const struct tl_kernels tl_kernels_##isa;
#include "isas.def"
#undef ISA

static const struct {
    const struct tl_kernels *table;
    unsigned needs;
} isas[] = {
#define ISA(isa, needs) {&tl_kernels_##isa, needs},
#include "isas.def"
#undef ISA
};
enum { N_ISAS = sizeof isas / sizeof isas[0] };

/* Written once under `once` (and by tests), read freely afterwards. */
static struct {
    const struct tl_kernels *table; /* what runs: scalar where the name is of no use */
    bool rejected;                  /* TINYLLM_ISA names what is not here */
    char name[32];
    char usable[64];                /* every name that would do, the best first */
} chosen;
static pthread_once_t once = PTHREAD_ONCE_INIT;

const struct tl_kernels *tl_kernels_usable(int i)
{
    const unsigned have = tl_cpu_features();
    for (int k = 0; k < N_ISAS; k++)
        if ((have & isas[k].needs) == isas[k].needs && i-- == 0)
            return isas[k].table;
    return NULL;
}

static void choose(const char *name)
{
    const struct tl_kernels *table, *best = NULL, *named = NULL;
    for (int i = 0; (table = tl_kernels_usable(i)); i++) {
        best = table;
        if (name && strcmp(name, table->name) == 0)
            named = table;
    }
    chosen.rejected = name && !named;
    chosen.table = chosen.rejected ? isas[0].table : named ? named : best;
    snprintf(chosen.name, sizeof chosen.name, "%s", chosen.rejected ? name : chosen.table->name);
}

static void list_usable(void)
{
    int n = 0;
    size_t at = 0;
    while (tl_kernels_usable(n))
        n++;
    for (int i = n - 1; i >= 0 && at < sizeof chosen.usable; i--)
        at += (size_t)snprintf(chosen.usable + at, sizeof chosen.usable - at, at ? " %s" : "%s",
                               tl_kernels_usable(i)->name);
}

static void choose_from_environment(void)
{
    const char *name = getenv("TINYLLM_ISA");
    list_usable();
    choose(name && *name ? name : NULL);
}

const struct tl_kernels *tl_kernels(void)
{
    pthread_once(&once, choose_from_environment);
    return chosen.table;
}

void tl_kernels_select(const char *name)
{
    pthread_once(&once, choose_from_environment);
    choose(name);
}

tl_status tl_kernels_require(const char *fn, const struct tl_kernels **out)
{
    const struct tl_kernels *table = tl_kernels();
    if (chosen.rejected)
        return tl_fail(TL_EUNSUPPORTED, fn, "TINYLLM_ISA=%s is not here; these are: %s",
                       chosen.name, chosen.usable);
    *out = table;
    return TL_OK;
}

const char *tl_isa_name(void)
{
    tl_kernels();
    return chosen.name;
}

const char *tl_isa_names(void)
{
    tl_kernels();
    return chosen.usable;
}

uint32_t tl_numerics_version(void)
{
    return TL_NUMERICS_VERSION;
}
