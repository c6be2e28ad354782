/* SPDX-License-Identifier: MIT */
/* test_fixtures.c: paged steps recorded in files (fixtures/README.md has the format), read, checked
 * and written.
 *
 *     test_fixtures [NAME...]              the tests
 *     test_fixtures --check PATH           whether the library agrees with a file; status 1 and a
 *                                          message if not
 *     test_fixtures --write PATH [SEED]    records a random step: inputs, and what the library
 *                                          makes of them
 */
#include <dirent.h>
#include <stdarg.h>

#include "attn_ref.h"

enum { HEADER = 56, VERSION = 1, N_DIMS = 7 };
static const char *const dim_names[N_DIMS] = {"B",        "H",         "Hkv", "D", "block_tokens",
                                              "n_blocks", "max_blocks"};

struct fixture {
    uint32_t dim[N_DIMS];
    int64_t window;
    float scale;
    const uint8_t *q, *ctx, *tables, *k, *v, *out; /* into the bytes of the file */
};
enum { DIM_B, DIM_H, DIM_HKV, DIM_D, DIM_TOKENS, DIM_BLOCKS, DIM_MAX_BLOCKS };

/* ---- bytes ---- */

static uint64_t get(const uint8_t *at, int n)
{
    uint64_t x = 0;
    for (int i = 0; i < n; i++)
        x |= (uint64_t)at[i] << 8 * i;
    return x;
}

static uint8_t *put(uint8_t *at, uint64_t x, int n)
{
    for (int i = 0; i < n; i++)
        at[i] = (uint8_t)(x >> 8 * i);
    return at + n;
}

static uint8_t *slurp(const char *path, size_t *n)
{
    FILE *file = fopen(path, "rb");
    if (!file)
        return NULL;
    fseek(file, 0, SEEK_END);
    const long size = ftell(file);
    rewind(file);
    uint8_t *bytes = size < 0 ? NULL : must_alloc((size_t)size);
    *n = bytes ? fread(bytes, 1, (size_t)size, file) : 0;
    fclose(file);
    return bytes;
}

/* ---- reading ---- */

__attribute__((format(printf, 2, 3))) static bool refuse(char *why, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(why, 256, format, args);
    va_end(args);
    return false;
}

/* The length that the dimensions ask for, or 0 where it would not fit 64 bits. */
static uint64_t length_of(const uint32_t *dim)
{
    typedef unsigned __int128 wide;
    const wide rows = (wide)dim[DIM_B] * dim[DIM_H] * dim[DIM_D];
    const wide limit = (wide)1 << 62;
    if (rows > limit || (wide)dim[DIM_BLOCKS] * dim[DIM_HKV] > limit / dim[DIM_TOKENS] / dim[DIM_D])
        return 0;
    const wide slab = (wide)dim[DIM_BLOCKS] * dim[DIM_HKV] * dim[DIM_TOKENS] * dim[DIM_D];
    const wide n =
        HEADER + 8 * rows + 4 * (wide)dim[DIM_B] * (1 + (wide)dim[DIM_MAX_BLOCKS]) + 4 * slab + 4;
    return n > limit ? 0 : (uint64_t)n;
}

/* Takes a file apart; false, with the reason in why[256], for anything that is not a whole file of
 * this version. */
static bool parse(const uint8_t *bytes, size_t n, struct fixture *f, char *why)
{
    if (n < HEADER + 4)
        return refuse(why, "%zu bytes are no fixture", n);
    if (memcmp(bytes, "TLFX", 4) != 0)
        return refuse(why, "magic is %02x%02x%02x%02x, not TLFX", bytes[0], bytes[1], bytes[2],
                      bytes[3]);
    if (get(bytes + 4, 4) != VERSION)
        return refuse(why, "version %u, not %d", (unsigned)get(bytes + 4, 4), VERSION);
    if (get(bytes + 8, 4) != tl_numerics_version())
        return refuse(why, "arithmetic version %u, not %u", (unsigned)get(bytes + 8, 4),
                      tl_numerics_version());
    for (int i = 0; i < N_DIMS; i++) {
        f->dim[i] = (uint32_t)get(bytes + 12 + 4 * i, 4);
        if (f->dim[i] == 0)
            return refuse(why, "%s is 0", dim_names[i]);
    }
    if (get(bytes + 52, 4) != 0)
        return refuse(why, "the reserved word is %u", (unsigned)get(bytes + 52, 4));
    if (length_of(f->dim) != n)
        return refuse(why, "length %zu, not %llu", n, (unsigned long long)length_of(f->dim));
    if (get(bytes + n - 4, 4) != tl_crc32c(bytes, n - 4, 0))
        return refuse(why, "checksum %08x, not %08x", (unsigned)get(bytes + n - 4, 4),
                      tl_crc32c(bytes, n - 4, 0));
    const size_t rows = (size_t)f->dim[DIM_B] * f->dim[DIM_H] * f->dim[DIM_D];
    const size_t slab =
        (size_t)f->dim[DIM_BLOCKS] * f->dim[DIM_HKV] * f->dim[DIM_TOKENS] * f->dim[DIM_D];
    f->window = (int64_t)get(bytes + 40, 8);
    f->scale = float_of((uint32_t)get(bytes + 48, 4));
    f->q = bytes + HEADER;
    f->ctx = f->q + 4 * rows;
    f->tables = f->ctx + 4 * (size_t)f->dim[DIM_B];
    f->k = f->tables + 4 * (size_t)f->dim[DIM_B] * f->dim[DIM_MAX_BLOCKS];
    f->v = f->k + 2 * slab;
    f->out = f->v + 2 * slab;
    return true;
}

/* The recorded call as a case to run, and the recorded bits in *want. */
static struct paged load(const struct fixture *f, float **want)
{
    struct paged c = {.B = f->dim[DIM_B],
                      .H = f->dim[DIM_H],
                      .Hkv = f->dim[DIM_HKV],
                      .D = f->dim[DIM_D],
                      .window = f->window,
                      .scale = f->scale,
                      .max_blocks = (int32_t)f->dim[DIM_MAX_BLOCKS]};
    c.cfg = kv_cfg(f->dim[DIM_BLOCKS], f->dim[DIM_TOKENS], 1, c.Hkv, c.D);
    c.kv = make_pool(&c.cfg);
    c.q = guarded((size_t)paged_size(&c) * 4), c.out = painted(paged_size(&c)),
    *want = floats(paged_size(&c));
    c.ctx = guarded((size_t)c.B * 4), c.tables = guarded((size_t)(c.B * c.max_blocks) * 4);
    for (int64_t i = 0; i < paged_size(&c); i++) {
        c.q[i] = float_of((uint32_t)get(f->q + 4 * i, 4));
        (*want)[i] = float_of((uint32_t)get(f->out + 4 * i, 4));
    }
    for (int64_t i = 0; i < c.B; i++)
        c.ctx[i] = (int32_t)get(f->ctx + 4 * i, 4);
    for (int64_t i = 0; i < c.B * c.max_blocks; i++)
        c.tables[i] = (uint32_t)get(f->tables + 4 * i, 4);
    const int64_t slab = c.Hkv * c.cfg.block_tokens * c.D;
    for (uint32_t id = 0; id < c.cfg.n_blocks; id++)
        for (int is_v = 0; is_v < 2; is_v++) {
            uint16_t *to = tl_kv_block_ptr(c.kv, id, 0, is_v);
            for (int64_t i = 0; i < slab; i++)
                to[i] = (uint16_t)get((is_v ? f->v : f->k) + 2 * (id * slab + i), 2);
        }
    return c;
}

/* Parses the file and holds the library, on every instruction set, and the reference to the
 * recorded bits. */
static void check_file(const char *path)
{
    struct fixture f;
    char why[256] = "";
    size_t n = 0;
    uint8_t *bytes = slurp(path, &n);
    CHECK(bytes, "%s: cannot be read", path);
    CHECK(parse(bytes, n, &f, why), "%s: %s", path, why);
    float *recorded;
    struct paged c = load(&f, &recorded);
    for (int isa = 0; isa_select(isa); isa++) {
        paged_run(&c, NULL);
        CHECK_PAGED(&c, recorded, "%s, %s", path, tl_isa_name());
    }
    float *reference = paged_want(&c);
    CHECK_SAME(reference, recorded, paged_size(&c), "%s: the C reference", path);
    free(reference), free(recorded), free(bytes);
    paged_free(&c);
}

/* ---- writing ---- */

/* A case and its results as the bytes of a file. */
static uint8_t *record(const struct paged *c, size_t *n)
{
    const uint32_t dim[N_DIMS] = {(uint32_t)c->B,         (uint32_t)c->H,      (uint32_t)c->Hkv,
                                  (uint32_t)c->D,         c->cfg.block_tokens, c->cfg.n_blocks,
                                  (uint32_t)c->max_blocks};
    *n = length_of(dim);
    uint8_t *bytes = must_alloc(*n), *at = bytes;
    memcpy(at, "TLFX", 4);
    at = put(at + 4, VERSION, 4);
    at = put(at, tl_numerics_version(), 4);
    for (int i = 0; i < N_DIMS; i++)
        at = put(at, dim[i], 4);
    at = put(at, (uint64_t)c->window, 8);
    at = put(at, float_bits(c->scale), 4);
    at = put(at, 0, 4);
    for (int64_t i = 0; i < paged_size(c); i++)
        at = put(at, float_bits(c->q[i]), 4);
    for (int64_t i = 0; i < c->B; i++)
        at = put(at, (uint32_t)c->ctx[i], 4);
    for (int64_t i = 0; i < c->B * c->max_blocks; i++)
        at = put(at, c->tables[i], 4);
    for (int is_v = 0; is_v < 2; is_v++)
        for (uint32_t id = 0; id < c->cfg.n_blocks; id++) {
            const uint16_t *slab = tl_kv_block_ptr(c->kv, id, 0, is_v);
            for (int64_t i = 0; i < c->Hkv * c->cfg.block_tokens * c->D; i++)
                at = put(at, slab[i], 2);
        }
    for (int64_t i = 0; i < paged_size(c); i++)
        at = put(at, float_bits(c->out[i]), 4);
    put(at, tl_crc32c(bytes, *n - 4, 0), 4);
    return bytes;
}

static struct paged random_case(uint64_t seed)
{
    uint64_t rng = seed * 0x9E3779B97F4A7C15u + 5;
    struct paged_spec s = {.B = 1 + rng_below(&rng, 3),
                           .Hkv = 1 + rng_below(&rng, 2),
                           .D = 1 + rng_below(&rng, 40),
                           .block_tokens = 1 + rng_below(&rng, 20),
                           .data = (enum data)(seed % N_DATA),
                           .seed = seed};
    s.H = s.Hkv * (1 + rng_below(&rng, 4));
    s.window = rng_below(&rng, 2) ? 1 + rng_below(&rng, 50) : 0;
    for (int64_t i = 0; i < s.B; i++)
        s.ctx[i] = 1 + rng_below(&rng, i == 0 && seed % 3 == 0 ? 1300 : 70);
    return paged_make(&s);
}

static int write_file(const char *path, uint64_t seed)
{
    struct paged c = random_case(seed);
    size_t n;
    if (paged_call(&c, NULL) != TL_OK) {
        fprintf(stderr, "%s\n", tl_last_error());
        return 1;
    }
    uint8_t *bytes = record(&c, &n);
    FILE *file = fopen(path, "wb");
    const bool written = file && fwrite(bytes, 1, n, file) == n;
    const bool closed = file && fclose(file) == 0;
    if (!written || !closed)
        perror(path);
    free(bytes);
    paged_free(&c);
    return !(written && closed);
}

/* ---- the tests ---- */

/* The folder beside this source; tests run from the top of the tree. */
static void fixture_path(char *path, size_t n, const char *name)
{
    const char *slash = strrchr(__FILE__, '/');
    snprintf(path, n, "%.*s../fixtures/%s", slash ? (int)(slash - __FILE__ + 1) : 0, __FILE__,
             name);
}

TEST(file_fixtures)
{
    char path[512];
    int n = 0;
    fixture_path(path, sizeof path, "");
    DIR *folder = opendir(path);
    CHECK(folder, "no folder %s", path);
    for (struct dirent *entry; (entry = readdir(folder)) != NULL;) {
        const char *dot = strrchr(entry->d_name, '.');
        if (!dot || strcmp(dot, ".tlfx") != 0)
            continue;
        fixture_path(path, sizeof path, entry->d_name);
        check_file(path);
        n++;
    }
    closedir(folder);
    CHECK(n >= 8, "only %d files", n);
}

TEST(what_is_written_reads_back)
{
    for (uint64_t seed = 0; seed < 12; seed++) {
        struct paged c = random_case(seed);
        struct fixture f;
        char why[256] = "";
        size_t n, again_n;
        paged_run(&c, NULL);
        uint8_t *bytes = record(&c, &n);
        CHECK(parse(bytes, n, &f, why), "seed %llu: %s", (unsigned long long)seed, why);
        float *recorded;
        struct paged loaded = load(&f, &recorded);
        CHECK_SAME(recorded, c.out, paged_size(&c), "seed %llu", (unsigned long long)seed);
        paged_run(&loaded, NULL);
        CHECK_PAGED(&loaded, recorded, "seed %llu", (unsigned long long)seed);
        uint8_t *again = record(&loaded, &again_n);
        CHECK(n == again_n && memcmp(bytes, again, n) == 0, "seed %llu: other bytes",
              (unsigned long long)seed);
        free(bytes), free(again), free(recorded);
        paged_free(&c), paged_free(&loaded);
    }
}

/* Bytes changed with the checksum made right again. */
static bool parses_with(const uint8_t *good, size_t n, size_t at, uint64_t value, int width,
                        char *why)
{
    struct fixture f;
    uint8_t *bytes = must_alloc(n);
    memcpy(bytes, good, n);
    put(bytes + at, value, width);
    put(bytes + n - 4, tl_crc32c(bytes, n - 4, 0), 4);
    const bool ok = parse(bytes, n, &f, why);
    free(bytes);
    return ok;
}

TEST(a_bad_file_is_refused_with_a_message)
{
    static const struct {
        size_t at;
        uint64_t value;
        int width;
        const char *says;
    } rows[] = {{0, 'X', 1, "magic"},          {4, 2, 4, "version 2"},
                {4, 0, 4, "version 0"},        {8, 9, 4, "arithmetic version 9"},
                {12, 0, 4, "B is 0"},          {24, 0, 4, "D is 0"},
                {36, 0, 4, "max_blocks is 0"}, {52, 1, 4, "reserved"},
                {12, UINT32_MAX, 4, "length"}, {16, 9999, 4, "length"},
                {32, UINT32_MAX, 4, "length"}, {36, UINT32_MAX, 4, "length"},
                {12, UINT64_MAX, 8, "length"}, {20, UINT64_MAX, 8, "length"},
                {28, UINT64_MAX, 8, "length"}};
    struct paged c = random_case(1);
    struct fixture f;
    char why[256];
    size_t n;
    paged_run(&c, NULL);
    uint8_t *good = record(&c, &n), *edge = guarded(n);
    CHECK(parses_with(good, n, 4, 1, 4, why), "the good file: %s", why);
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++) {
        why[0] = 0;
        CHECK(!parses_with(good, n, rows[i].at, rows[i].value, rows[i].width, why) &&
                  strstr(why, rows[i].says),
              "row %zu: \"%s\"", i, why);
    }
    /* cut files end at an unmapped page */
    for (size_t cut = 1; cut <= n; cut += cut < 200 ? 1 : 97) {
        memcpy(edge + cut, good, n - cut);
        CHECK(!parse(edge + cut, n - cut, &f, why), "%zu bytes cut off", cut);
    }
    for (size_t bit = 0; bit < 8 * n; bit += bit < 8 * HEADER ? 1 : 61) {
        memcpy(edge, good, n);
        edge[bit / 8] ^= (uint8_t)(1u << bit % 8);
        CHECK(!parse(edge, n, &f, why), "bit %zu flipped", bit);
    }
    guarded_free(edge, n);
    free(good);
    paged_free(&c);
}

/* check_file outside the harness: a failed CHECK lands here, its message printed. */
static int check_one(const char *path)
{
    if (setjmp(check_escape) != 0)
        return 1;
    check_file(path);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc >= 3 && strcmp(argv[1], "--write") == 0)
        return write_file(argv[2], argc > 3 ? strtoull(argv[3], NULL, 10) : 1);
    if (argc == 3 && strcmp(argv[1], "--check") == 0)
        return check_one(argv[2]);
    return check_main(argc, argv);
}
