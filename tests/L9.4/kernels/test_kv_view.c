/* SPDX-License-Identifier: MIT */
/* test_kv_view.c: which views are sound, the view of a pool, and writing K and V into slots: the
 * right places, the right bits, nothing read for what is skipped, and all or nothing.
 *
 * Words. store: an array that a view cuts into K and V; where each element lies is worked out from
 * the shape of the array, the view's strides never are. */
#include <fenv.h>
#include <stdbool.h>

#include "hook.h"
#include "kernels/kernels.h"
#include "kernels/kv_layout.h"
#include "kv_check.h"
#include "tinyllm.h"

/* ---- stores ---- */

enum layout {
    BLOCK_HEAD_SLOT,
    BLOCK_SLOT_HEAD,
    SIDE_BY_SIDE,
    IN_TURNS,
    HEADS_OUTERMOST,
    PADDED,
    N_LAYOUTS
};

struct store {
    enum layout layout;
    int64_t N, H, b, Dk, Dv; /* SIDE_BY_SIDE and IN_TURNS: Dk == Dv */
    int32_t dtype;
    size_t n_bytes;
    unsigned char *bytes; /* the last one is followed by an unmapped page */
    tl_kv_view view;
};

/* Which element of the store is element d of the row of (block, head, slot). */
static int64_t element(const struct store *s, int is_v, int64_t block, int64_t head, int64_t slot,
                       int64_t d)
{
    const int64_t H = s->H, b = s->b, D = is_v ? s->Dv : s->Dk, rows = s->N * H * b;
    switch (s->layout) {
    /* 2 x [N,H,b,D] */
    case BLOCK_HEAD_SLOT: return is_v * rows * s->Dk + ((block * H + head) * b + slot) * D + d;
    /* 2 x [N,b,H,D] */
    case BLOCK_SLOT_HEAD: return is_v * rows * s->Dk + ((block * b + slot) * H + head) * D + d;
    /* [N,H,2,b,D] */
    case SIDE_BY_SIDE:    return (((block * H + head) * 2 + is_v) * b + slot) * D + d;
    /* [N,b,H,2,D] */
    case IN_TURNS:        return (((block * b + slot) * H + head) * 2 + is_v) * D + d;
    /* 2 x [H,N,b,D] */
    case HEADS_OUTERMOST: return is_v * rows * s->Dk + ((head * s->N + block) * b + slot) * D + d;
    default: /* rows 3, heads 7 and blocks 5 elements apart */
        return is_v * s->N * (H * (b * (s->Dk + 3) + 7) + 5) + block * (H * (b * (D + 3) + 7) + 5) +
               head * (b * (D + 3) + 7) + slot * (D + 3) + d;
    }
}

static int64_t elem_bytes(int32_t dtype)
{
    return dtype == TL_F32 ? 4 : dtype == TL_F8_E4M3 || dtype == TL_I8 ? 1 : 2;
}

static void paint(void *p, size_t n, uint64_t seed)
{
    for (size_t i = 0; i < n; i++)
        ((unsigned char *)p)[i] = (unsigned char)(rng_next(&seed) >> 33);
}

static struct store store_make(enum layout layout, int32_t dtype, int64_t N, int64_t H, int64_t b,
                               int64_t Dk, int64_t Dv)
{
    struct store s = {.layout = layout, .N = N, .H = H, .b = b, .Dk = Dk, .Dv = Dv, .dtype = dtype};
    const int64_t k = element(&s, 0, 0, 0, 0, 0), v = element(&s, 1, 0, 0, 0, 0),
                  size = elem_bytes(dtype);
    s.n_bytes = (size_t)((element(&s, 1, N - 1, H - 1, b - 1, Dv - 1) + 1) * size);
    s.bytes = guarded(s.n_bytes);
    paint(s.bytes, s.n_bytes, 77);
    s.view = (tl_kv_view){.size = sizeof(tl_kv_view), .k = s.bytes + k * size,
                          .v = s.bytes + v * size,
                          .dtype = dtype,
                          .n_blocks = N,
                          .block_tokens = b,
                          .n_kv_heads = H,
                          .head_dim_k = Dk,
                          .head_dim_v = Dv,
                          .k_block_stride = element(&s, 0, 1, 0, 0, 0) - k,
                          .k_head_stride = element(&s, 0, 0, 1, 0, 0) - k,
                          .k_token_stride = element(&s, 0, 0, 0, 1, 0) - k,
                          .v_block_stride = element(&s, 1, 1, 0, 0, 0) - v,
                          .v_head_stride = element(&s, 1, 0, 1, 0, 0) - v,
                          .v_token_stride = element(&s, 1, 0, 0, 1, 0) - v};
    return s;
}

static void store_free(struct store *s)
{
    guarded_free(s->bytes, s->n_bytes);
}

/* ---- what is to be written ---- */

/* x in a 16-bit format with `mantissa` bits behind the point and exponents from `least` on, by
 * arithmetic in double: the nearest multiple of the spacing at x, ties to even. */
static uint16_t narrow_ref(float x, int mantissa, int least)
{
    const uint16_t sign = signbit(x) ? 0x8000 : 0, inf = (uint16_t)(0x7FFF >> mantissa << mantissa);
    if (isnan(x))
        return (uint16_t)(inf | 1 << (mantissa - 1));
    if (isinf(x))
        return sign | inf;
    int e = least;
    while (fabs((double)x) >= ldexp(1.0, e + 1))
        e++;
    const double steps = ldexp(fabs((double)x), mantissa - e), whole = floor(steps),
                 rest = steps - whole;
    const double n =
        whole + (rest > 0.5 || (rest == 0.5 && fmod(whole, 2) == 1)) + ldexp(e - least, mantissa);
    /* the hidden bit of normal numbers carries into the exponent */
    return (uint16_t)(sign | (n < inf ? (uint16_t)n : inf));
}

/* Element `from` of x, of one dtype, as element `to` of y, of another. */
static void convert_ref(const void *x, int64_t from, int32_t from_dtype, void *y, int64_t to,
                        int32_t to_dtype)
{
    const int64_t size = elem_bytes(to_dtype);
    uint16_t narrow = 0;
    const void *bits =
        from_dtype == to_dtype ? (const char *)x + from * size : (const void *)&narrow;
    if (from_dtype != to_dtype) {
        const float wide = ((const float *)x)[from];
        narrow = to_dtype == TL_F16 ? narrow_ref(wide, 10, -14) : narrow_ref(wide, 7, -126);
    }
    memcpy((char *)y + to * size, bits, (size_t)size);
}

/* n elements, the last one before an unmapped page: any bits, so that of f32 numbers too most are
 * small or large. */
static void *random_elements(int64_t n, int32_t dtype, uint64_t seed)
{
    static const float special[] = {0.0f,          -0.0f,       INFINITY,    -INFINITY,
                                    65504.0f,      65519.996f,  65520.0f,    1e30f,
                                    -1e38f,        3.4e38f,     1e-41f,      5.9604645e-8f,
                                    2.9802322e-8f, 1.00390625f, 1.01171875f, 1.00048828125f};
    char *x = guarded((size_t)(n * elem_bytes(dtype)));
    paint(x, (size_t)(n * elem_bytes(dtype)), seed);
    for (int64_t i = 0; dtype == TL_F32 && i < n; i++) {
        const uint64_t r = rng_next(&seed);
        const float value = r % 5 == 0 ? special[r >> 8 & 15] : rng_unit(&seed) * 8.0f;
        if (r % 5 < 4)
            memcpy(x + i * 4, &value, 4);
    }
    return x;
}

static void elements_free(void *x, int64_t n, int32_t dtype)
{
    guarded_free(x, (size_t)(n * elem_bytes(dtype)));
}

/* One call: its slots, and where its K [0] and V [1] lie. */
struct call {
    const int64_t *slots;
    int64_t T;
    int32_t dtype;
    const void *from[2]; /* element (0, 0, 0) */
    int64_t token_stride[2], head_stride[2];
};

static tl_status write_slots(const struct store *s, const struct call *c)
{
    return tl_kv_write_slots(&s->view, c->slots, c->T, c->from[0], c->from[1], c->dtype,
                             c->token_stride[0], c->head_stride[0], c->token_stride[1],
                             c->head_stride[1]);
}

/* Writes, and compares the whole store with a picture of it in which the given slots alone
 * differ. */
static void write_and_compare(const struct store *s, const struct call *c, const char *what)
{
    unsigned char *want = malloc(s->n_bytes);
    memcpy(want, s->bytes, s->n_bytes);
    for (int is_v = 0; is_v < 2; is_v++)
        for (int64_t t = 0; t < c->T; t++)
            for (int64_t h = 0; c->slots[t] >= 0 && h < s->H; h++)
                for (int64_t d = 0; d < (is_v ? s->Dv : s->Dk); d++)
                    convert_ref(
                        c->from[is_v], t * c->token_stride[is_v] + h * c->head_stride[is_v] + d,
                        c->dtype, want,
                        element(s, is_v, c->slots[t] / s->b, h, c->slots[t] % s->b, d), s->dtype);
    tl_set_last_error("as it was");
    const tl_status status = write_slots(s, c);
    const int same = memcmp(s->bytes, want, s->n_bytes) == 0;
    free(want);
    CHECK(status == TL_OK && strcmp(tl_last_error(), "as it was") == 0, "%s: %s, \"%s\"", what,
          tl_status_str(status), tl_last_error());
    CHECK(same, "%s: other bits, or elsewhere", what);
}

/* Refused with `want`, in these words, and nothing written. */
static void check_refused(const struct store *s, const struct call *c, tl_status want,
                          const char *words)
{
    unsigned char *before = malloc(s->n_bytes);
    memcpy(before, s->bytes, s->n_bytes);
    tl_set_last_error(NULL);
    const tl_status got = write_slots(s, c);
    const int same = memcmp(s->bytes, before, s->n_bytes) == 0;
    free(before);
    CHECK(got == want, "%s, want %s: \"%s\" (%s)", tl_status_str(got), tl_status_str(want),
          tl_last_error(), words);
    CHECK(strncmp(tl_last_error(), "tl_kv_write_slots: ", 19) == 0 &&
              strstr(tl_last_error(), words),
          "\"%s\", not \"...%s\"", tl_last_error(), words);
    CHECK(same, "something was written: %s", words);
}

/* 0 .. n-1 in a shuffled order. */
static void shuffled(int64_t *a, int64_t n, uint64_t *seed)
{
    for (int64_t i = 0; i < n; i++)
        a[i] = i;
    for (int64_t i = n - 1; i > 0; i--) {
        const int64_t j = rng_below(seed, i + 1), swap = a[i];
        a[i] = a[j], a[j] = swap;
    }
}

/* ---- the view ---- */

static tl_status check_view(const tl_kv_view *view)
{
    return tl_kv_view_check("tl_x", view);
}

TEST(view_has_its_layout)
{
    static const size_t want[] = {0,  8,  16, 24,  28,  32,  40,  48,  56,  64,  72, 80,
                                  88, 96, 104, 112, 120, 128, 136, 144, 152, 160, 168, 176, 184};
    const size_t got[] = {offsetof(tl_kv_view, size),
                          offsetof(tl_kv_view, k),
                          offsetof(tl_kv_view, v),
                          offsetof(tl_kv_view, dtype),
                          offsetof(tl_kv_view, reserved),
                          offsetof(tl_kv_view, n_blocks),
                          offsetof(tl_kv_view, block_tokens),
                          offsetof(tl_kv_view, n_kv_heads),
                          offsetof(tl_kv_view, head_dim_k),
                          offsetof(tl_kv_view, head_dim_v),
                          offsetof(tl_kv_view, k_block_stride),
                          offsetof(tl_kv_view, k_head_stride),
                          offsetof(tl_kv_view, k_token_stride),
                          offsetof(tl_kv_view, v_block_stride),
                          offsetof(tl_kv_view, v_head_stride),
                          offsetof(tl_kv_view, v_token_stride),
                          offsetof(tl_kv_view, k_scale),
                          offsetof(tl_kv_view, v_scale),
                          offsetof(tl_kv_view, k_scale_block_stride),
                          offsetof(tl_kv_view, k_scale_head_stride),
                          offsetof(tl_kv_view, k_scale_token_stride),
                          offsetof(tl_kv_view, v_scale_block_stride),
                          offsetof(tl_kv_view, v_scale_head_stride),
                          offsetof(tl_kv_view, v_scale_token_stride),
                          sizeof(tl_kv_view)};
    for (size_t i = 0; i < sizeof want / sizeof want[0]; i++)
        CHECK(got[i] == want[i], "member %zu at %zu, want %zu", i, got[i], want[i]);
}

TEST(the_view_of_a_pool_names_every_slab)
{
    tl_kv_pool *kv = kv_new(5, 4, 3, 2, 6);
    for (uint32_t layer = 0; layer < 3; layer++) {
        tl_kv_view view;
        memset(&view, 0xA5, sizeof view);
        view.size = sizeof view;
        tl_set_last_error("as it was");
        CHECK_STATUS(tl_kv_pool_view(kv, layer, &view), TL_OK);
        CHECK(strcmp(tl_last_error(), "as it was") == 0, "\"%s\"", tl_last_error());
        CHECK(view.dtype == TL_F16 && view.reserved == 0 && view.n_blocks == 5 &&
                  view.block_tokens == 4 && view.n_kv_heads == 2 && view.head_dim_k == 6 &&
                  view.head_dim_v == 6,
              "sizes");
        for (int64_t id = 0; id < 5; id++) {
            const uint16_t *k = (const uint16_t *)view.k + id * view.k_block_stride;
            const uint16_t *v = (const uint16_t *)view.v + id * view.v_block_stride;
            CHECK(k == tl_kv_block_ptr(kv, (uint32_t)id, layer, 0), "K of block %d", (int)id);
            CHECK(v == tl_kv_block_ptr(kv, (uint32_t)id, layer, 1), "V of block %d", (int)id);
        }
        CHECK(view.k_token_stride == 6 && view.k_head_stride == 24 && view.v_token_stride == 6 &&
                  view.v_head_stride == 24,
              "strides");
        CHECK_STATUS(check_view(&view), TL_OK);
    }
    tl_kv_pool_destroy(kv);
}

TEST(the_view_of_what_is_not_there_is_refused)
{
    tl_kv_pool *kv = kv_new(5, 4, 3, 2, 6);
    tl_kv_view view, before;
    memset(&view, 0xA5, sizeof view);
    view.size = sizeof view;
    before = view;
    tl_kv_view unsized = {.size = sizeof view - 8};
    const struct {
        const tl_kv_pool *kv;
        uint32_t layer;
        tl_kv_view *view;
        const char *says;
    } bad[] = {{NULL, 0, &view, "tl_kv_pool_view: kv is NULL"},
               {kv, 0, NULL, "tl_kv_pool_view: view is NULL"},
               {kv, 0, &unsized, "tl_kv_pool_view: view: size = 176, this version's is 184"},
               {kv, 3, &view, "tl_kv_pool_view: layer = 3, the pool has 3"},
               {kv, UINT32_MAX, &view, "tl_kv_pool_view: layer = 4294967295"}};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        CHECK_STATUS(tl_kv_pool_view(bad[i].kv, bad[i].layer, bad[i].view), TL_EINVAL);
        CHECK(strstr(tl_last_error(), bad[i].says) == tl_last_error(), "\"%s\", want \"%s\"",
              tl_last_error(), bad[i].says);
        CHECK(memcmp(&view, &before, sizeof view) == 0, "the view was touched");
    }
    tl_kv_pool_destroy(kv);
}

/* A sound view: 3 blocks of 2 heads of 4 slots, K rows of 5 and V rows of 7, [N,H,b,D] f16. */
static tl_kv_view sound_view(void)
{
    return (tl_kv_view){.size = sizeof(tl_kv_view), .k = (const void *)0x1000,
                        .v = (const void *)0x1000,
                        .dtype = TL_F16,
                        .n_blocks = 3,
                        .block_tokens = 4,
                        .n_kv_heads = 2,
                        .head_dim_k = 5,
                        .head_dim_v = 7,
                        .k_block_stride = 40,
                        .k_head_stride = 20,
                        .k_token_stride = 5,
                        .v_block_stride = 56,
                        .v_head_stride = 28,
                        .v_token_stride = 7};
}

/* Each member as it may not be; the first one that is wrong is named, with its value. */
TEST(every_member_that_is_not_sound_is_named)
{
    static const struct {
        size_t at;
        int64_t value;
        const char *words;
    } bad[] = {
        {offsetof(tl_kv_view, size), 0, "size = 0"},
        {offsetof(tl_kv_view, size), 112, "size = 112"},
        {offsetof(tl_kv_view, size), 185, "size = 185"},
        {offsetof(tl_kv_view, dtype), -1, "dtype = -1"},
        {offsetof(tl_kv_view, dtype), TL_F8_E5M2, "dtype = 4"},
        {offsetof(tl_kv_view, dtype), TL_U8, "dtype = 6"},
        {offsetof(tl_kv_view, dtype), TL_F8_E4M3, "k_scale is NULL, and dtype = 3 has scales"},
        {offsetof(tl_kv_view, dtype), TL_I8, "k_scale is NULL, and dtype = 5 has scales"},
        {offsetof(tl_kv_view, dtype), INT32_MAX, "dtype = 2147483647"},
        {offsetof(tl_kv_view, reserved), 1, "reserved = 1"},
        {offsetof(tl_kv_view, k_scale), 0x1000, "k_scale is given"},
        {offsetof(tl_kv_view, v_scale), 0x1000, "v_scale is given"},
        {offsetof(tl_kv_view, k_scale_block_stride), 1, "k_scale_block_stride is given"},
        {offsetof(tl_kv_view, k_scale_head_stride), -1, "k_scale_head_stride is given"},
        {offsetof(tl_kv_view, k_scale_token_stride), 1, "k_scale_token_stride is given"},
        {offsetof(tl_kv_view, v_scale_block_stride), 1, "v_scale_block_stride is given"},
        {offsetof(tl_kv_view, v_scale_head_stride), 1, "v_scale_head_stride is given"},
        {offsetof(tl_kv_view, v_scale_token_stride), 1, "v_scale_token_stride is given"},
        {offsetof(tl_kv_view, n_blocks), -1, "n_blocks = -1"},
        {offsetof(tl_kv_view, n_blocks), INT64_MIN, "n_blocks = -9223372036854775808"},
        {offsetof(tl_kv_view, block_tokens), 0, "block_tokens = 0"},
        {offsetof(tl_kv_view, block_tokens), INT64_MIN, "block_tokens = -9223372036854775808"},
        {offsetof(tl_kv_view, n_kv_heads), 0, "n_kv_heads = 0"},
        {offsetof(tl_kv_view, n_kv_heads), -1, "n_kv_heads = -1"},
        {offsetof(tl_kv_view, head_dim_k), 0, "head_dim_k = 0"},
        {offsetof(tl_kv_view, head_dim_k), -5, "head_dim_k = -5"},
        {offsetof(tl_kv_view, head_dim_v), 0, "head_dim_v = 0"},
        {offsetof(tl_kv_view, head_dim_v), INT64_MIN, "head_dim_v = -9223372036854775808"},
        {offsetof(tl_kv_view, k_block_stride), -1, "k_block_stride = -1 is negative"},
        {offsetof(tl_kv_view, k_head_stride), -20, "k_head_stride = -20 is negative"},
        {offsetof(tl_kv_view, k_token_stride), INT64_MIN,
         "k_token_stride = -9223372036854775808 is negative"},
        {offsetof(tl_kv_view, v_block_stride), INT64_MIN,
         "v_block_stride = -9223372036854775808 is negative"},
        {offsetof(tl_kv_view, v_head_stride), -1, "v_head_stride = -1 is negative"},
        {offsetof(tl_kv_view, v_token_stride), -7, "v_token_stride = -7 is negative"},
        /* one element into the next row, head, block; and no step at all */
        {offsetof(tl_kv_view, k_token_stride), 4, "k_token_stride = 4 "},
        {offsetof(tl_kv_view, k_token_stride), 0, "k_token_stride = 0 "},
        {offsetof(tl_kv_view, k_head_stride), 19, "k_head_stride = 19 "},
        {offsetof(tl_kv_view, k_head_stride), 5, "_stride = 5 "},
        {offsetof(tl_kv_view, k_block_stride), 39, "k_block_stride = 39 "},
        {offsetof(tl_kv_view, k_block_stride), 0, "k_block_stride = 0 "},
        {offsetof(tl_kv_view, v_token_stride), 6, "v_token_stride = 6 "},
        {offsetof(tl_kv_view, v_head_stride), 27, "v_head_stride = 27 "},
        {offsetof(tl_kv_view, v_head_stride), 0, "v_head_stride = 0 "},
        {offsetof(tl_kv_view, v_block_stride), 55, "v_block_stride = 55 "},
        {offsetof(tl_kv_view, head_dim_k), 6, "k_token_stride = 5 "},
        {offsetof(tl_kv_view, head_dim_v), INT64_MAX, "v_token_stride = 7 "},
        {offsetof(tl_kv_view, block_tokens), 5, "k_head_stride = 20 "},
        {offsetof(tl_kv_view, block_tokens), INT64_MAX, "k_token_stride = 5"},
        {offsetof(tl_kv_view, n_kv_heads), 3, "k_block_stride = 40 "},
        {offsetof(tl_kv_view, n_kv_heads), INT64_MAX, "k_head_stride = 20"},
        /* beyond what can be addressed */
        {offsetof(tl_kv_view, k_block_stride), INT64_MAX, "k_block_stride = 9223372036854775807"},
        {offsetof(tl_kv_view, v_block_stride), INT64_MAX / 2,
         "v_block_stride = 4611686018427387903, 2 times"},
        {offsetof(tl_kv_view, k_head_stride), INT64_MAX,
         "k_head_stride = 9223372036854775807, 1 times"},
        {offsetof(tl_kv_view, v_token_stride), INT64_MAX / 2,
         "v_token_stride = 4611686018427387903, 3 times"},
        {offsetof(tl_kv_view, v_block_stride), INT64_MAX / 4, "v of 4611686018427387958 elements"},
        {offsetof(tl_kv_view, n_blocks), INT64_MAX, "k_block_stride = 40"},
        {offsetof(tl_kv_view, n_blocks), INT64_MAX / 40, "k of 9223372036854775"},
        {offsetof(tl_kv_view, v), -54, "v of 168 elements from 0xffffffffffffffca"},
    };
    const int64_t slot = 0;
    const float x[64] = {0};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        tl_kv_view view = sound_view();
        const size_t size =
            bad[i].at == offsetof(tl_kv_view, dtype) || bad[i].at == offsetof(tl_kv_view, reserved)
                ? 4
                : 8;
        const int32_t narrow = (int32_t)bad[i].value;
        memcpy((char *)&view + bad[i].at,
               size == 4 ? (const void *)&narrow : (const void *)&bad[i].value, size);
        tl_set_last_error(NULL);
        CHECK(check_view(&view) == TL_EINVAL, "case %zu (%s) passed", i,
              bad[i].words);
        CHECK(strncmp(tl_last_error(), "tl_x: view: ", 12) == 0 &&
                  strstr(tl_last_error(), bad[i].words),
              "\"%s\", not \"...%s\"", tl_last_error(), bad[i].words);
        tl_set_last_error(NULL);
        /* Nothing is written to 0x1000: that would fault. */
        CHECK_STATUS(tl_kv_write_slots(&view, &slot, 1, x, x, TL_F32, 16, 8, 16, 8), TL_EINVAL);
        CHECK(strncmp(tl_last_error(), "tl_kv_write_slots: view: ", 25) == 0 &&
                  strstr(tl_last_error(), bad[i].words),
              "\"%s\"", tl_last_error());
    }
}

TEST(views_at_the_edge_are_sound)
{
    tl_kv_view view = sound_view();
    tl_set_last_error("as it was");
    CHECK_STATUS(check_view(&view), TL_OK);
    view.dtype = TL_BF16;
    CHECK_STATUS(check_view(&view), TL_OK);
    view.dtype = TL_F32;
    CHECK_STATUS(check_view(&view), TL_OK);
    view.v = (const void *)(uintptr_t)(0u - 168 * sizeof(float) -
                                       1); /* 3*2*4*7 elements up to the last byte but one */
    CHECK_STATUS(check_view(&view), TL_OK);
    view = sound_view(); /* no blocks: nothing can overlap, whatever the sizes */
    view.n_blocks = 0, view.k_head_stride = view.v_token_stride = 0, view.block_tokens = INT64_MAX,
    view.k = view.v = NULL;
    CHECK_STATUS(check_view(&view), TL_OK);
    view = sound_view(); /* an axis of one is never stepped along */
    view.n_blocks = view.n_kv_heads = 1, view.k_block_stride = view.k_head_stride = 0,
    view.v_block_stride = INT64_MAX;
    CHECK_STATUS(check_view(&view), TL_OK);
    view = sound_view(); /* the farthest that bytes of f16 reach: 2 blocks from 0 */
    view.n_blocks = 2, view.k = NULL, view.k_block_stride = PTRDIFF_MAX / 2 - 40;
    CHECK_STATUS(check_view(&view), TL_OK);
    view.k_block_stride++;
    CHECK_STATUS(check_view(&view), TL_EINVAL);
    view.k_block_stride--, view.dtype = TL_F32;
    CHECK_STATUS(check_view(&view), TL_EINVAL);
}

/* The sound view in eight bits, with a scale a row. */
static tl_kv_view sound_eights(void)
{
    tl_kv_view view = sound_view();
    view.dtype = TL_I8, view.k_scale = view.v_scale = (const float *)0x1000;
    view.k_scale_block_stride = view.v_scale_block_stride = 8;
    view.k_scale_head_stride = view.v_scale_head_stride = 4;
    view.k_scale_token_stride = view.v_scale_token_stride = 1;
    return view;
}

TEST(every_member_of_scales_that_is_not_sound_is_named)
{
    static const struct {
        size_t at;
        int64_t value;
        const char *words;
    } bad[] = {
        {offsetof(tl_kv_view, k_scale), 0, "k_scale is NULL, and dtype = "},
        {offsetof(tl_kv_view, v_scale), 0, "v_scale is NULL, and dtype = "},
        {offsetof(tl_kv_view, k_scale), 0x1001, "k_scale at 0x1001 is not aligned"},
        {offsetof(tl_kv_view, k_scale), 0x1002, "k_scale at 0x1002 is not aligned"},
        {offsetof(tl_kv_view, v_scale), 0x1003, "v_scale at 0x1003 is not aligned"},
        {offsetof(tl_kv_view, k_scale_block_stride), -1, "k_scale_block_stride = -1 is negative"},
        {offsetof(tl_kv_view, k_scale_head_stride), -4, "k_scale_head_stride = -4 is negative"},
        {offsetof(tl_kv_view, k_scale_token_stride), INT64_MIN,
         "k_scale_token_stride = -9223372036854775808 is negative"},
        {offsetof(tl_kv_view, v_scale_block_stride), INT64_MIN,
         "v_scale_block_stride = -9223372036854775808 is negative"},
        {offsetof(tl_kv_view, v_scale_head_stride), -1, "v_scale_head_stride = -1 is negative"},
        {offsetof(tl_kv_view, v_scale_token_stride), -1, "v_scale_token_stride = -1 is negative"},
        {offsetof(tl_kv_view, k_scale_block_stride), INT64_MAX, "k_scale from 0x1000 on passes"},
        {offsetof(tl_kv_view, k_scale_head_stride), INT64_MAX, "k_scale from 0x1000 on passes"},
        {offsetof(tl_kv_view, v_scale_token_stride), INT64_MAX / 3, "v_scale from 0x1000 on"},
        {offsetof(tl_kv_view, v_scale_block_stride), INT64_MAX / 8, "v_scale from 0x1000 on"},
        /* of 24 scales the last would begin where memory ends */
        {offsetof(tl_kv_view, v_scale), -92, "v_scale from 0xffffffffffffffa4 on passes"},
    };
    static const int32_t dtypes[] = {TL_I8, TL_F8_E4M3};
    for (size_t i = 0; i < 2 * sizeof bad / sizeof bad[0]; i++) {
        tl_kv_view view = sound_eights();
        view.dtype = dtypes[i % 2];
        memcpy((char *)&view + bad[i / 2].at, &bad[i / 2].value, 8);
        tl_set_last_error(NULL);
        CHECK(check_view(&view) == TL_EINVAL, "case %zu (%s) passed", i, bad[i / 2].words);
        CHECK(strncmp(tl_last_error(), "tl_x: view: ", 12) == 0 &&
                  strstr(tl_last_error(), bad[i / 2].words),
              "\"%s\", not \"...%s\"", tl_last_error(), bad[i / 2].words);
        /* after what comes before it, and before what comes behind */
        view.k_token_stride = 0;
        CHECK_STATUS(check_view(&view), TL_EINVAL);
        CHECK(strstr(tl_last_error(), bad[i / 2].words), "\"%s\"", tl_last_error());
        view.head_dim_v = 0;
        CHECK_STATUS(check_view(&view), TL_EINVAL);
        CHECK(strstr(tl_last_error(), "head_dim_v = 0"), "\"%s\"", tl_last_error());
    }
}

TEST(scales_may_be_shared_and_lie_anywhere)
{
    tl_kv_view view = sound_eights();
    CHECK_STATUS(check_view(&view), TL_OK);
    view.dtype = TL_F8_E4M3;
    CHECK_STATUS(check_view(&view), TL_OK);
    view.v_scale = (const float *)(uintptr_t)(0u - 24 * sizeof(float) - 4); /* all but one word */
    CHECK_STATUS(check_view(&view), TL_OK);
    view = sound_eights(); /* one for all; one for each position; rows one into another */
    view.k_scale_block_stride = view.k_scale_head_stride = view.k_scale_token_stride = 0;
    view.v_scale_head_stride = 0;
    CHECK_STATUS(check_view(&view), TL_OK);
    view.k_scale_block_stride = view.k_scale_head_stride = view.k_scale_token_stride = 1;
    CHECK_STATUS(check_view(&view), TL_OK);
    view = sound_eights(); /* an axis of one is never stepped along */
    view.n_blocks = view.n_kv_heads = 1;
    view.k_scale_block_stride = view.v_scale_head_stride = INT64_MAX;
    CHECK_STATUS(check_view(&view), TL_OK);
    view = sound_eights(); /* no blocks have no last scale */
    view.n_blocks = 0, view.block_tokens = INT64_MAX, view.k_scale_token_stride = INT64_MAX;
    CHECK_STATUS(check_view(&view), TL_OK);
}

/* Whether in some order of the axes each steps over all that those before it span. */
static bool nests(const int64_t n[3], const int64_t stride[3], int64_t width)
{
    static const int orders[6][3] = {{0, 1, 2}, {0, 2, 1}, {1, 0, 2},
                                     {1, 2, 0}, {2, 0, 1}, {2, 1, 0}};
    for (int o = 0; o < 6; o++) {
        int64_t span = width;
        bool fits = true;
        for (int i = 0; i < 3; i++) {
            const int a = orders[o][i];
            fits = fits && (n[a] == 1 || stride[a] >= span);
            span += (n[a] - 1) * stride[a];
        }
        if (fits)
            return true;
    }
    return false;
}

/* Marks every element of every row; false where one is marked twice. */
static bool rows_apart(const int64_t n[3], const int64_t stride[3], int64_t width)
{
    static unsigned char mark[1024];
    memset(mark, 0, sizeof mark);
    for (int64_t i = 0; i < n[0] * n[1] * n[2]; i++)
        for (int64_t d = 0; d < width; d++)
            if (mark[i % n[0] * stride[0] + i / n[0] % n[1] * stride[1] +
                     i / n[0] / n[1] * stride[2] + d]++)
                return false;
    return true;
}

TEST(no_two_rows_of_a_sound_view_share_memory)
{
    uint64_t seed = 3;
    int sound = 0, refused = 0, exotic = 0;
    for (int turn = 0; turn < 60000; turn++) {
        int64_t n[3], stride[3];
        const int64_t width = 1 + rng_below(&seed, 5);
        for (int i = 0; i < 3; i++)
            n[i] = 1 + rng_below(&seed, 4), stride[i] = rng_below(&seed, i == 0 ? 90 : 30);
        tl_kv_view view = {.size = sizeof(tl_kv_view), .k = (const void *)0x1000,
                           .v = (const void *)0x1000,
                           .dtype = TL_BF16,
                           .n_blocks = n[0],
                           .n_kv_heads = n[1],
                           .block_tokens = n[2],
                           .head_dim_k = width,
                           .head_dim_v = width,
                           .k_block_stride = 1000,
                           .k_head_stride = 100,
                           .k_token_stride = 10,
                           .v_block_stride = 1000,
                           .v_head_stride = 100,
                           .v_token_stride = 10};
        if (turn % 2)
            view.k_block_stride = stride[0], view.k_head_stride = stride[1],
            view.k_token_stride = stride[2];
        else
            view.v_block_stride = stride[0], view.v_head_stride = stride[1],
            view.v_token_stride = stride[2];
        const bool got = check_view(&view) == TL_OK,
                   apart = rows_apart(n, stride, width);
        CHECK(got == nests(n, stride, width), "%d: [%d %d %d] of %d at %d %d %d", got, (int)n[0],
              (int)n[1], (int)n[2], (int)width, (int)stride[0], (int)stride[1], (int)stride[2]);
        CHECK(!got || apart, "overlap: [%d %d %d] of %d at %d %d %d", (int)n[0], (int)n[1],
              (int)n[2], (int)width, (int)stride[0], (int)stride[1], (int)stride[2]);
        sound += got, refused += !got, exotic += apart && !got;
    }
    CHECK(sound > 5000 && refused > 5000 && exotic > 0, "%d sound, %d refused, %d of them apart",
          sound, refused, exotic);
}

/* ---- writing ---- */

/* Strides of a tensor of T tokens, H heads and rows of D: as it comes, head by head, padded, one
 * row for all, backwards. */
static void source_strides(int kind, int64_t T, int64_t H, int64_t D, int64_t *token, int64_t *head)
{
    const int64_t tokens[] = {H * D, D, H * (D + 3) + 1, 0, -D},
                  heads[] = {D, T * D, D + 3, 0, -T * D};
    *token = tokens[kind], *head = heads[kind];
}

TEST(every_token_lands_in_its_slot_of_every_layout)
{
    static const int32_t dtypes[][2] = {{TL_F32, TL_F32},
                                        {TL_F16, TL_F32},
                                        {TL_BF16, TL_F32},
                                        {TL_F16, TL_F16},
                                        {TL_BF16, TL_BF16}};
    /* N H b Dk Dv */
    static const int64_t shapes[][5] = {
        {3, 2, 4, 5, 9}, {4, 1, 1, 1, 2}, {2, 3, 16, 33, 17}, {1, 2, 7, 64, 64}};
    uint64_t seed = 11;
    for (int turn = 0; turn < N_LAYOUTS * 5 * 4 * 5; turn++) {
        const int64_t *shape = shapes[turn % 4];
        const int32_t *dtype = dtypes[turn / 4 % 5];
        const enum layout layout = (enum layout)(turn / 20 % N_LAYOUTS);
        const int64_t Dv = layout == SIDE_BY_SIDE || layout == IN_TURNS ? shape[3] : shape[4],
                      H = shape[1];
        struct store s = store_make(layout, dtype[0], shape[0], H, shape[2], shape[3], Dv);
        int64_t *slots = malloc((size_t)(shape[0] * shape[2]) * sizeof *slots);
        shuffled(slots, shape[0] * shape[2], &seed);
        struct call c = {
            .slots = slots, .T = 1 + rng_below(&seed, shape[0] * shape[2]), .dtype = dtype[1]};
        for (int64_t t = 0; t < c.T; t++)
            if (rng_below(&seed, 4) == 0)
                slots[t] = -1;
        void *base[2];
        int64_t span[2];
        for (int is_v = 0; is_v < 2; is_v++) {
            const int64_t D = is_v ? Dv : shape[3];
            source_strides((turn / 120 + is_v) % 5, c.T, H, D, &c.token_stride[is_v],
                           &c.head_stride[is_v]);
            const int64_t reach = (c.T - 1) * c.token_stride[is_v] + (H - 1) * c.head_stride[is_v];
            span[is_v] = llabs(reach) + D;
            base[is_v] = random_elements(span[is_v], c.dtype, seed + (uint64_t)is_v);
            c.from[is_v] = (char *)base[is_v] + (reach < 0 ? -reach : 0) * elem_bytes(c.dtype);
        }
        char what[128];
        snprintf(what, sizeof what, "layout %d, dtypes %d %d, shape %d, strides %d, T %d",
                 (int)layout, dtype[0], dtype[1], turn % 4, turn / 120, (int)c.T);
        write_and_compare(&s, &c, what);
        elements_free(base[0], span[0], c.dtype), elements_free(base[1], span[1], c.dtype);
        free(slots);
        store_free(&s);
    }
}

TEST(values_round_as_worked_out_by_hand)
{
    static const uint32_t f32[] = {0x33800000, 0x33000000, 0x33000001, 0x3F801000,
                                   0x3F803000, 0x477FEFFF, 0x477FF000, 0x3F808000,
                                   0x3F818000, 0x3F808001, 0x7F7F7FFF, 0x7F7F8000,
                                   0x00008000, 0x00018000, 0x80000000, 0xFF800001};
    static const uint16_t f16[] = {0x0001, 0x0000, 0x0001, 0x3C00, 0x3C02, 0x7BFF, 0x7C00, 0x3C04,
                                   0x3C0C, 0x3C04, 0x7C00, 0x7C00, 0x0000, 0x0000, 0x8000, 0x7E00};
    static const uint16_t bf16[] = {0x3380, 0x3300, 0x3300, 0x3F80, 0x3F80, 0x4780, 0x4780, 0x3F80,
                                    0x3F82, 0x3F81, 0x7F7F, 0x7F80, 0x0000, 0x0002, 0x8000, 0x7FC0};
    for (int pass = 0; pass < 2; pass++) {
        struct store s = store_make(BLOCK_HEAD_SLOT, pass ? TL_BF16 : TL_F16, 1, 1, 1, 16, 16);
        const uint16_t *want = pass ? bf16 : f16, *got = (const uint16_t *)(const void *)s.bytes;
        const int64_t slot = 0;
        CHECK_STATUS(tl_kv_write_slots(&s.view, &slot, 1, f32, f32, TL_F32, 16, 16, 16, 16), TL_OK);
        for (int i = 0; i < 16; i++) {
            CHECK(got[i] == want[i] && got[16 + i] == want[i],
                  "%08X became %04X and %04X, want %04X", f32[i], got[i], got[16 + i], want[i]);
            const uint16_t ref = pass ? narrow_ref(float_of(f32[i]), 7, -126)
                                      : narrow_ref(float_of(f32[i]), 10, -14);
            CHECK(ref == want[i], "the reference says %04X of %08X", ref, f32[i]);
        }
        store_free(&s);
    }
}

TEST(the_views_own_dtype_is_copied_bit_for_bit)
{
    static const uint32_t nan32[] = {0x7F800001, 0xFFFFFFFF, 0x7FC12345, 0xFF812345,
                                     0x7F800000, 0x00000001, 0x80000000, 0x7FC00000};
    static const uint16_t nan16[] = {0x7C01, 0xFFFF, 0x7E55, 0xFC03,
                                     0x7F81, 0x0001, 0x8000, 0xFFC7};
    static const int32_t dtypes[] = {TL_F32, TL_F16, TL_BF16};
    for (int i = 0; i < 3; i++)
        for (int isa = 0; tl_kernels_usable(isa); isa++) {
            tl_kernels_select(tl_kernels_usable(isa)->name);
            struct store s = store_make(BLOCK_SLOT_HEAD, dtypes[i], 2, 1, 1, 8, 8);
            const void *x = dtypes[i] == TL_F32 ? (const void *)nan32 : (const void *)nan16;
            const size_t row = 8 * (size_t)elem_bytes(dtypes[i]);
            const int64_t slot = 1;
            const tl_status status =
                tl_kv_write_slots(&s.view, &slot, 1, x, x, dtypes[i], 8, 8, 8, 8);
            tl_kernels_select(NULL);
            CHECK_STATUS(status, TL_OK);
            CHECK(memcmp(s.bytes + row, x, row) == 0 && memcmp(s.bytes + 3 * row, x, row) == 0,
                  "dtype %d", dtypes[i]);
            store_free(&s);
        }
}

TEST(every_instruction_set_writes_the_same_bits)
{
    static const int32_t dtypes[] = {TL_F16, TL_BF16};
    enum { D = 67, T = 5, H = 2 };
    static const int64_t slots[T] = {7, 2, -1, 0, 5};
    for (int i = 0; i < 2; i++)
        for (int isa = 0; tl_kernels_usable(isa); isa++) {
            struct store s = store_make(SIDE_BY_SIDE, dtypes[i], 2, H, 4, D, D);
            void *x = random_elements(T * H * D, TL_F32, 5);
            const struct call c = {slots, T, TL_F32, {x, x}, {H * D, H * D}, {D, D}};
            tl_kernels_select(tl_kernels_usable(isa)->name);
            write_and_compare(&s, &c, tl_kernels_usable(isa)->name);
            tl_kernels_select(NULL);
            elements_free(x, T * H * D, TL_F32);
            store_free(&s);
        }
}

/* Every token's rows have pages of their own, and those of skipped tokens may not be read. */
TEST(nothing_is_read_for_a_skipped_token)
{
    enum { T = 70, D = 6, H = 2 };
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    const int64_t stride = (int64_t)(page / sizeof(float));
    uint64_t seed = 21;
    for (int turn = 0; turn < 40; turn++) {
        struct store s =
            store_make((enum layout)(turn % N_LAYOUTS), turn % 3 ? TL_F16 : TL_F32, 10, H, 7, D, D);
        char *pages =
            mmap(NULL, T * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        CHECK(pages != MAP_FAILED, "no pages");
        paint(pages, T * page, (uint64_t)turn);
        int64_t slots[T];
        shuffled(slots, T, &seed);
        for (int t = 0; t < T; t++)
            if (turn == 0 ? t != 0 : turn == 1 ? t != T - 1 : rng_below(&seed, 2) == 0) {
                slots[t] = -1;
                CHECK(mprotect(pages + (size_t)t * page, page, PROT_NONE) == 0, "not protected");
            }
        const bool backwards = turn % 2;
        if (backwards)
            for (int t = 0; t < T / 2; t++) {
                const int64_t swap = slots[t];
                slots[t] = slots[T - 1 - t], slots[T - 1 - t] = swap;
            }
        const char *first = backwards ? pages + (T - 1) * page : pages;
        const struct call c = {slots,
                               T,
                               TL_F32,
                               {first, first},
                               {backwards ? -stride : stride, backwards ? -stride : stride},
                               {D, D}};
        write_and_compare(&s, &c, "with skipped tokens");
        munmap(pages, T * page);
        store_free(&s);
    }
}

TEST(a_skipped_first_token_may_lie_anywhere)
{
    enum { D = 4 };
    struct store s = store_make(BLOCK_HEAD_SLOT, TL_F32, 1, 1, 3, D, D);
    float *x = random_elements(D, TL_F32, 9);
    const int64_t slots[] = {-1, 2}, near_null = 8;
    const int64_t stride = (int64_t)(((uintptr_t)x - (uintptr_t)near_null) / sizeof(float));
    CHECK(((uintptr_t)x - (uintptr_t)near_null) % sizeof(float) == 0,
          "x is not where it was meant to be");
    /* token 0 would be at address 8, token 1 is x */
    const void *from = (const void *)(uintptr_t)near_null;
    CHECK_STATUS(tl_kv_write_slots(&s.view, slots, 2, from, from, TL_F32, stride, 0, stride, 0),
                 TL_OK);
    CHECK(memcmp(s.bytes + 2 * D * sizeof *x, x, D * sizeof *x) == 0 &&
              memcmp(s.bytes + 5 * D * sizeof *x, x, D * sizeof *x) == 0,
          "bits");
    store_free(&s);
}

TEST(no_tokens_and_only_skipped_ones_need_nothing)
{
    struct store s = store_make(BLOCK_HEAD_SLOT, TL_F16, 2, 2, 3, 5, 5);
    unsigned char *before = malloc(s.n_bytes);
    memcpy(before, s.bytes, s.n_bytes);
    int64_t skipped[200];
    struct hook hook;
    for (int i = 0; i < 200; i++)
        skipped[i] = -1;
    tl_set_last_error("as it was");
    hook_install(&hook, 1);
    const tl_status none = tl_kv_write_slots(NULL, NULL, 0, NULL, NULL, 99, INT64_MIN, INT64_MAX,
                                             INT64_MIN, INT64_MAX);
    const tl_status one = tl_kv_write_slots(&s.view, skipped, 1, NULL, NULL, TL_F32, INT64_MIN,
                                            INT64_MAX, INT64_MIN, INT64_MAX);
    const tl_status many = tl_kv_write_slots(&s.view, skipped, 200, NULL, NULL, TL_F16, INT64_MIN,
                                             INT64_MAX, INT64_MIN, INT64_MAX);
    tl_kv_view empty = s.view;
    empty.n_blocks = 0, empty.k = empty.v = NULL;
    const tl_status nowhere =
        tl_kv_write_slots(&empty, skipped, 200, NULL, NULL, TL_F32, 0, 0, 0, 0);
    hook_remove();
    CHECK(none == TL_OK && one == TL_OK && many == TL_OK && nowhere == TL_OK, "%d %d %d %d: %s",
          none, one, many, nowhere, tl_last_error());
    CHECK(strcmp(tl_last_error(), "as it was") == 0 && hook.calls == 0,
          "\"%s\", %ld pieces asked for", tl_last_error(), hook.calls);
    CHECK(memcmp(s.bytes, before, s.n_bytes) == 0, "something was written");
    free(before);
    store_free(&s);
}

TEST(strides_that_are_never_stepped_along_may_be_anything)
{
    enum { D = 5 };
    struct store s = store_make(BLOCK_SLOT_HEAD, TL_F16, 2, 1, 3, D, D);
    void *x = random_elements(D, TL_F32, 2);
    const int64_t slots[] = {4, -1, -1};
    for (int64_t T = 1; T <= 3; T++) {
        const struct call c = {
            slots, T, TL_F32, {x, x}, {INT64_MIN, INT64_MAX}, {INT64_MAX, INT64_MIN}};
        CHECK_STATUS(write_slots(&s, &c), TL_OK);
        const struct call plain = {slots, 1, TL_F32, {x, x}, {D, D}, {D, D}};
        write_and_compare(&s, &plain, "the same again");
    }
    elements_free(x, D, TL_F32);
    store_free(&s);
}

/* ---- eight bits ---- */

enum scales_at {
    OF_ROWS,          /* [N,H,b] */
    OF_ROWS_BY_TOKEN, /* [N,b,H] */
    OF_ROWS_IN_GAPS,  /* [N,H,b], a float behind each */
    OF_ROWS_BY_HEAD,  /* [H,N,b] */
    N_OF_ROWS,
    OF_TENSOR = N_OF_ROWS, /* one */
    OF_TOKENS,             /* [N,b] */
    OF_HEADS,              /* [H] */
    OF_BLOCKS              /* [N,H] */
};

/* A store of eight bits, with its scales: of K and V behind one another. */
struct eights {
    struct store s;
    enum scales_at at;
    int64_t n_scales; /* of a side */
    float *scales;    /* the last one is followed by an unmapped page */
};

static int64_t scale_at(const struct eights *x, int64_t block, int64_t head, int64_t slot)
{
    const int64_t N = x->s.N, H = x->s.H, b = x->s.b;
    switch (x->at) {
    case OF_ROWS: return (block * H + head) * b + slot;
    case OF_ROWS_BY_TOKEN: return (block * b + slot) * H + head;
    case OF_ROWS_IN_GAPS: return ((block * H + head) * b + slot) * 2;
    case OF_ROWS_BY_HEAD: return (head * N + block) * b + slot;
    case OF_TENSOR: return 0;
    case OF_TOKENS: return block * b + slot;
    case OF_HEADS: return head;
    default: return block * H + head;
    }
}

static struct eights eights_make(enum layout layout, enum scales_at at, int32_t dtype,
                                 const int64_t shape[5])
{
    struct eights x = {.s = store_make(layout, dtype, shape[0], shape[1], shape[2], shape[3],
                                       shape[4]),
                       .at = at};
    tl_kv_view *view = &x.s.view;
    x.n_scales = scale_at(&x, shape[0] - 1, shape[1] - 1, shape[2] - 1) + 1;
    x.scales = guarded((size_t)x.n_scales * 8);
    paint(x.scales, (size_t)x.n_scales * 8, 78);
    view->k_scale = x.scales, view->v_scale = x.scales + x.n_scales;
    view->k_scale_block_stride = view->v_scale_block_stride = scale_at(&x, 1, 0, 0);
    view->k_scale_head_stride = view->v_scale_head_stride = scale_at(&x, 0, 1, 0);
    view->k_scale_token_stride = view->v_scale_token_stride = scale_at(&x, 0, 0, 1);
    return x;
}

static void eights_free(struct eights *x)
{
    store_free(&x->s);
    guarded_free(x->scales, (size_t)x->n_scales * 8);
}

/* An element of a source, as f32. */
static float wide_ref(const void *x, int64_t at, int32_t dtype)
{
    if (dtype == TL_F32)
        return ((const float *)x)[at];
    const uint16_t h = ((const uint16_t *)x)[at];
    if (dtype == TL_BF16)
        return float_of((uint32_t)h << 16);
    const int e = h >> 10 & 31, f = h & 1023;
    const float size = e == 31 ? (f ? NAN : INFINITY)
                               : ldexpf((float)(e ? 1024 + f : f), (e ? e : 1) - 25);
    return h >> 15 ? -size : size;
}

/* As narrow_ref, with three bits, no infinity and saturation. */
static uint8_t e4m3_ref(float x)
{
    const uint8_t sign = signbit(x) ? 0x80 : 0;
    if (isnan(x))
        return 0x7F;
    if (fabsf(x) >= 480)
        return sign | 0x7E;
    int e = -6;
    while (fabs((double)x) >= ldexp(1.0, e + 1))
        e++;
    const double steps = ldexp(fabs((double)x), 3 - e), whole = floor(steps), rest = steps - whole;
    const double n =
        whole + (rest > 0.5 || (rest == 0.5 && fmod(whole, 2) == 1)) + 8.0 * (e + 6);
    return (uint8_t)(sign | (n < 0x7E ? (int)n : 0x7E));
}

static uint8_t code_ref(int32_t dtype, float x)
{
    return dtype == TL_F8_E4M3 ? e4m3_ref(x) : (uint8_t)(int8_t)nearbyint((double)x);
}

/* The codes of one row, and its scale. */
static void store_ref(const float *x, int64_t D, int32_t dtype, uint8_t *codes, float *scale)
{
    float largest = 0;
    bool finite = true;
    for (int64_t d = 0; d < D; d++) {
        finite = finite && isfinite(x[d]);
        largest = fabsf(x[d]) > largest ? fabsf(x[d]) : largest;
    }
    const float top = dtype == TL_I8 ? 127 : 448;
    const bool stored = finite && largest >= 0x1p-100f;
    *scale = !finite ? float_of(0x7FC00000) : stored ? largest / top : 0;
    const float r = top / largest;
    for (int64_t d = 0; d < D; d++)
        codes[d] = stored ? code_ref(dtype, x[d] * r) : 0;
}

/* The row of token t and head h as it must stand in a picture of the store and of the scales. */
static void row_ref(const struct eights *x, const struct call *c, int is_v, int64_t t, int64_t h,
                    unsigned char *bytes, float *scales)
{
    enum { MOST = 640 };
    const struct store *s = &x->s;
    const int64_t block = c->slots[t] / s->b, slot = c->slots[t] % s->b, D = is_v ? s->Dv : s->Dk,
                  from = t * c->token_stride[is_v] + h * c->head_stride[is_v],
                  to = element(s, is_v, block, h, slot, 0);
    float *scale = scales + is_v * x->n_scales + scale_at(x, block, h, slot), row[MOST];
    if (c->dtype == s->dtype) {
        memcpy(bytes + to, (const char *)c->from[is_v] + from, (size_t)D);
        return;
    }
    for (int64_t d = 0; d < D; d++)
        row[d] = wide_ref(c->from[is_v], from + d, c->dtype);
    if (x->at == OF_TENSOR) {
        const float r = 1 / *scale;
        for (int64_t d = 0; d < D; d++)
            bytes[to + d] = e4m3_ref(row[d] * r);
    } else {
        store_ref(row, D, s->dtype, bytes + to, scale);
    }
}

/* Writes, and compares codes and scales with a picture of them in which the given slots alone
 * differ. */
static void write_eights_and_compare(const struct eights *x, const struct call *c,
                                     const char *what)
{
    const size_t n_bytes = (size_t)x->n_scales * 8;
    unsigned char *bytes = malloc(x->s.n_bytes);
    float *scales = malloc(n_bytes);
    memcpy(bytes, x->s.bytes, x->s.n_bytes), memcpy(scales, x->scales, n_bytes);
    for (int is_v = 0; is_v < 2; is_v++)
        for (int64_t t = 0; t < c->T; t++)
            for (int64_t h = 0; c->slots[t] >= 0 && h < x->s.H; h++)
                row_ref(x, c, is_v, t, h, bytes, scales);
    tl_set_last_error("as it was");
    const tl_status status = write_slots(&x->s, c);
    const int same = memcmp(x->s.bytes, bytes, x->s.n_bytes) == 0,
              same_scales = memcmp(x->scales, scales, n_bytes) == 0;
    free(bytes), free(scales);
    CHECK(status == TL_OK && strcmp(tl_last_error(), "as it was") == 0, "%s: %s, \"%s\"", what,
          tl_status_str(status), tl_last_error());
    CHECK(same, "%s: other codes, or elsewhere", what);
    CHECK(same_scales, "%s: other scales, or elsewhere", what);
}

/* Elements of a source: rows of any size, some of which cannot be stored or are too small to be. */
static void *random_source(int64_t n, int64_t D, int32_t dtype, uint64_t seed)
{
    static const float special[] = {NAN, INFINITY, -INFINITY, 3.4e38f, -0.0f, 1e-45f};
    char *x = guarded((size_t)(n * elem_bytes(dtype)));
    float size = 1;
    paint(x, (size_t)(n * elem_bytes(dtype)), seed);
    for (int64_t i = 0; (dtype == TL_F32 || dtype == TL_F16 || dtype == TL_BF16) && i < n; i++) {
        if (i % D == 0) {
            const int64_t k = rng_below(&seed, 12);
            static const float sizes[] = {0, 1e-31f, 0x1p-100f, 1e-36f, 1e30f};
            size = k < 5 ? sizes[k] : ldexpf(1, (int)rng_below(&seed, 12) - 6);
        }
        float value = size * rng_unit(&seed);
        if (rng_below(&seed, 12) == 0)
            value = rng_below(&seed, 2) ? size : -size;
        if (rng_below(&seed, 300) == 0)
            value = special[rng_below(&seed, 6)];
        if (rng_below(&seed, 5) == 0) /* where size is the most, halfway between two of int8 */
            value = size * ((float)rng_below(&seed, 127) + 0.5f) / 127;
        const uint16_t narrow =
            dtype == TL_F16 ? narrow_ref(value, 10, -14) : narrow_ref(value, 7, -126);
        memcpy(x + i * elem_bytes(dtype), dtype == TL_F32 ? (const void *)&value : &narrow,
               (size_t)elem_bytes(dtype));
    }
    return x;
}

/* One call of random tokens and strides into a store. */
static void check_eights(const struct eights *x, int32_t dtype, int strides, uint64_t seed,
                         const char *what)
{
    const struct store *s = &x->s;
    const int64_t n = s->N * s->b;
    int64_t *slots = malloc((size_t)n * sizeof *slots), span[2];
    void *base[2];
    shuffled(slots, n, &seed);
    struct call c = {.slots = slots, .T = 1 + rng_below(&seed, n), .dtype = dtype};
    for (int64_t t = 0; t < c.T; t++)
        if (rng_below(&seed, 4) == 0)
            slots[t] = -1;
    for (int is_v = 0; is_v < 2; is_v++) {
        const int64_t D = is_v ? s->Dv : s->Dk;
        source_strides((strides + is_v) % 5, c.T, s->H, D, &c.token_stride[is_v],
                       &c.head_stride[is_v]);
        const int64_t reach = (c.T - 1) * c.token_stride[is_v] + (s->H - 1) * c.head_stride[is_v];
        span[is_v] = llabs(reach) + D;
        base[is_v] = random_source(span[is_v], D, dtype, seed + (uint64_t)is_v);
        c.from[is_v] = (char *)base[is_v] + (reach < 0 ? -reach : 0) * elem_bytes(dtype);
    }
    write_eights_and_compare(x, &c, what);
    elements_free(base[0], span[0], dtype), elements_free(base[1], span[1], dtype);
    free(slots);
}

static const int64_t eight_shapes[][5] = {
    {3, 2, 4, 5, 9}, {4, 1, 1, 1, 2}, {2, 3, 16, 33, 17}, {1, 2, 7, 64, 64}, {2, 1, 5, 300, 577}};

TEST(rows_of_eight_bits_come_with_scales_of_their_own)
{
    static const int32_t sources[] = {TL_F32, TL_F16, TL_BF16};
    for (int turn = 0; turn < 2 * 3 * 5 * N_OF_ROWS * N_LAYOUTS; turn++)
        for (int isa = 0; tl_kernels_usable(isa); isa++) {
            char what[128];
            int64_t shape[5];
            const enum layout layout = (enum layout)(turn / 24 % N_LAYOUTS);
            const int32_t dtype = turn % 2 ? TL_I8 : TL_F8_E4M3, source = sources[turn / 2 % 3];
            memcpy(shape, eight_shapes[turn / 6 % 5], sizeof shape);
            if (layout == SIDE_BY_SIDE || layout == IN_TURNS)
                shape[4] = shape[3];
            struct eights x =
                eights_make(layout, (enum scales_at)(turn / 6 % N_OF_ROWS), dtype, shape);
            snprintf(what, sizeof what, "%s, layout %d, scales %d, dtypes %d %d, turn %d",
                     tl_kernels_usable(isa)->name, (int)layout, (int)x.at, dtype, source, turn);
            tl_kernels_select(tl_kernels_usable(isa)->name);
            check_eights(&x, source, turn / 144, (uint64_t)turn + 1, what);
            tl_kernels_select(NULL);
            eights_free(&x);
        }
}

TEST(one_scale_for_a_tensor_is_read_and_stays)
{
    static const int32_t sources[] = {TL_F32, TL_F16, TL_BF16};
    static const float scales[] = {1,    0.5f,    0.0037f, 3e-4f, -0.02f, 1e-38f,
                                   1e38, 1e-42f, 0,       -0.0f, INFINITY, NAN};
    for (int turn = 0; turn < 12 * 3 * 5; turn++)
        for (int isa = 0; tl_kernels_usable(isa); isa++) {
            char what[128];
            const int32_t source = sources[turn % 3];
            struct eights x = eights_make((enum layout)(turn % 2), OF_TENSOR, TL_F8_E4M3,
                                          eight_shapes[turn / 3 % 5]);
            x.scales[0] = scales[turn / 15], x.scales[1] = scales[(turn / 15 + 1) % 12];
            snprintf(what, sizeof what, "%s, scales %a %a, dtype %d, turn %d",
                     tl_kernels_usable(isa)->name, (double)x.scales[0], (double)x.scales[1],
                     source, turn);
            tl_kernels_select(tl_kernels_usable(isa)->name);
            check_eights(&x, source, turn, (uint64_t)turn + 1, what);
            tl_kernels_select(NULL);
            eights_free(&x);
        }
}

TEST(codes_are_copied_and_their_scales_left_alone)
{
    for (int turn = 0; turn < 2 * 8 * 5 * 3; turn++) {
        char what[128];
        const int32_t dtype = turn % 2 ? TL_I8 : TL_F8_E4M3;
        struct eights x = eights_make((enum layout)(turn % 2), (enum scales_at)(turn / 2 % 8),
                                      dtype, eight_shapes[turn / 16 % 5]);
        snprintf(what, sizeof what, "dtype %d, scales %d, turn %d", dtype, (int)x.at, turn);
        check_eights(&x, dtype, turn / 16, (uint64_t)turn + 1, what);
        eights_free(&x);
    }
}

/* A view of one row has a scale that no other row shares. */
TEST(the_one_row_of_a_view_has_its_own_scale)
{
    static const int64_t shape[] = {1, 1, 1, 7, 4};
    struct eights x = eights_make(BLOCK_HEAD_SLOT, OF_TENSOR, TL_I8, shape);
    x.at = OF_ROWS;
    check_eights(&x, TL_F32, 0, 5, "one row");
    eights_free(&x);
}

TEST(scales_that_rows_share_are_not_written)
{
    static const struct {
        enum scales_at at;
        int32_t view, from;
        const char *words;
    } bad[] = {
        {OF_TENSOR, TL_I8, TL_F32, "k_scale: rows of dtype = 5 share scales (strides 0, 0, 0)"},
        {OF_TENSOR, TL_I8, TL_F16, "k_scale"},
        {OF_TOKENS, TL_F8_E4M3, TL_F32,
         "k_scale: rows of dtype = 3 share scales (strides 4, 0, 1)"},
        {OF_TOKENS, TL_I8, TL_BF16, "k_scale"},
        {OF_HEADS, TL_F8_E4M3, TL_F32, "k_scale"},
        {OF_HEADS, TL_I8, TL_F32, "k_scale"},
        {OF_BLOCKS, TL_F8_E4M3, TL_F16, "k_scale"},
        {OF_BLOCKS, TL_I8, TL_F32, "k_scale: rows of dtype = 5 share scales (strides 2, 1, 0)"},
        {OF_ROWS, TL_I8, TL_F8_E4M3, "dtype = 3 cannot be written to a view of 5"},
        {OF_ROWS, TL_F8_E4M3, TL_I8, "dtype = 5 cannot be written to a view of 3"},
        {OF_TENSOR, TL_F8_E4M3, TL_F8_E5M2, "dtype = 4 cannot be written to a view of 3"},
        {OF_ROWS, TL_I8, TL_U8, "dtype = 6 cannot be written to a view of 5"},
        {OF_ROWS, TL_I8, -1, "dtype = -1 cannot be written to a view of 5"},
    };
    static const int64_t shape[] = {3, 2, 4, 5, 9};
    const float from[64] = {0};
    const int64_t slots[] = {3, 11, 0}, no_slot = 12;
    for (size_t i = 0; i < sizeof bad / sizeof *bad; i++) {
        struct eights x = eights_make(BLOCK_HEAD_SLOT, bad[i].at, bad[i].view, shape);
        float *before = malloc((size_t)x.n_scales * 8);
        memcpy(before, x.scales, (size_t)x.n_scales * 8);
        struct call c = {slots, 3, bad[i].from, {from, from}, {0, 0}, {0, 0}};
        check_refused(&x.s, &c, TL_EUNSUPPORTED, bad[i].words);
        c.slots = &no_slot, c.T = 1; /* before the slots, and an instruction set that is not here */
        tl_kernels_select("abacus");
        check_refused(&x.s, &c, TL_EUNSUPPORTED, bad[i].words);
        tl_kernels_select(NULL);
        const int same = memcmp(before, x.scales, (size_t)x.n_scales * 8) == 0;
        free(before);
        CHECK(same, "a scale was written: %s", bad[i].words);
        eights_free(&x);
    }
    /* of V alone; and where two rows have one scale by strides that are not 0 */
    for (int i = 0; i < 2; i++) {
        struct eights x = eights_make(BLOCK_HEAD_SLOT, OF_ROWS, TL_I8, shape);
        const struct call c = {slots, 3, TL_F32, {from, from}, {0, 0}, {0, 0}};
        if (i == 0)
            x.s.view.v_scale_head_stride = 0;
        else
            x.s.view.v_scale_head_stride = 3;
        check_refused(&x.s, &c, TL_EUNSUPPORTED, "v_scale: rows of dtype = 5 share scales");
        eights_free(&x);
    }
    /* the other dtypes take f32 alone, as ever */
    for (int i = 0; i < 4; i++) {
        struct store s = store_make(BLOCK_HEAD_SLOT, i % 2 ? TL_F16 : TL_F32, 3, 2, 5, 4, 4);
        const struct call c = {slots, 3, i < 2 ? TL_BF16 : TL_I8, {from, from}, {0, 0}, {0, 0}};
        check_refused(&s, &c, TL_EUNSUPPORTED, "cannot be written to a view of");
        store_free(&s);
    }
}

TEST(nothing_is_written_where_a_slot_of_eight_bits_is_given_twice)
{
    static const int64_t shape[] = {3, 2, 4, 5, 9}, slots[] = {3, 7, 3}, far[] = {3, 7, 12};
    const float from[64] = {1, 2, 3};
    struct eights x = eights_make(BLOCK_SLOT_HEAD, OF_ROWS_BY_TOKEN, TL_F8_E4M3, shape);
    float *before = malloc((size_t)x.n_scales * 8);
    memcpy(before, x.scales, (size_t)x.n_scales * 8);
    struct call c = {slots, 3, TL_F32, {from, from}, {0, 0}, {0, 0}};
    check_refused(&x.s, &c, TL_EINVAL, "slots[0] and slots[2] are both 3");
    c.slots = far;
    check_refused(&x.s, &c, TL_EINVAL, "slots[2] = 12");
    c.slots = (const int64_t[]){3, 7, 1}, c.from[1] = NULL;
    check_refused(&x.s, &c, TL_EINVAL, "v is NULL");
    CHECK(memcmp(before, x.scales, (size_t)x.n_scales * 8) == 0, "a scale was written");
    free(before);
    eights_free(&x);
}

TEST(float_modes_of_the_caller_reach_no_code_and_no_scale)
{
    static const int modes[] = {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO, FE_TONEAREST};
    static const int64_t shape[] = {2, 2, 4, 33, 20}, slots[] = {5, 0, -1, 7};
    for (int i = 0; i < 16; i++) {
        struct eights x = eights_make(BLOCK_HEAD_SLOT, i % 4 == 3 ? OF_TENSOR : OF_ROWS,
                                      i % 2 ? TL_F8_E4M3 : TL_I8, shape);
        float *from = random_source(4 * 2 * 33, 33, TL_F32, (uint64_t)i + 3);
        const struct call c = {slots, 4, TL_F32, {from, from}, {66, 40}, {33, 20}};
        unsigned char *bytes = malloc(x.s.n_bytes);
        float *scales = malloc((size_t)x.n_scales * 8);
        if (x.at == OF_TENSOR)
            x.scales[0] = 0.003f, x.scales[1] = 1e-39f;
        memcpy(bytes, x.s.bytes, x.s.n_bytes), memcpy(scales, x.scales, (size_t)x.n_scales * 8);
        for (int64_t r = 0; r < 2 * 4 * 2; r++)
            if (slots[r / 4] >= 0)
                row_ref(&x, &c, r % 2, r / 4, r / 2 % 2, bytes, scales);
        feclearexcept(FE_ALL_EXCEPT);
        fesetround(modes[i / 4]);
        const tl_status got = write_slots(&x.s, &c);
        const int after = fegetround(), flags = fetestexcept(FE_ALL_EXCEPT);
        fesetround(FE_TONEAREST);
        const int same = memcmp(bytes, x.s.bytes, x.s.n_bytes) == 0 &&
                         memcmp(scales, x.scales, (size_t)x.n_scales * 8) == 0;
        free(bytes), free(scales);
        elements_free(from, 4 * 2 * 33, TL_F32);
        eights_free(&x);
        CHECK(got == TL_OK && same && after == modes[i / 4] && flags == 0,
              "%s, same %d, mode %d became %d, flags %x", tl_status_str(got), same, modes[i / 4],
              after, (unsigned)flags);
    }
}

/* ---- refusals ---- */

TEST(bad_arguments_are_refused_and_named)
{
    enum { D = 4, H = 2 };
    struct store s = store_make(BLOCK_HEAD_SLOT, TL_F16, 3, H, 5, D, D);
    const float x[64] = {0};
    const int64_t good[] = {3, 14, 0};
    const struct call ok = {good, 3, TL_F32, {x, x}, {8, 8}, {4, 4}};
    const struct {
        int64_t T;
        const void *k, *v;
        int32_t dtype;
        int64_t strides[4]; /* of tokens, of heads: K then V */
        tl_status want;
        const char *words;
    } bad[] = {
        {-1, x, x, TL_F32, {8, 8, 4, 4}, TL_EINVAL, "T = -1 "},
        {INT64_MIN, x, x, TL_F32, {8, 8, 4, 4}, TL_EINVAL, "T = -9223372036854775808 "},
        {INT64_MAX, x, x, TL_F32, {8, 8, 4, 4}, TL_EINVAL, "T = 9223372036854775807 "},
        {3, NULL, x, TL_F32, {8, 8, 4, 4}, TL_EINVAL, "k is NULL"},
        {3, x, NULL, TL_F32, {8, 8, 4, 4}, TL_EINVAL, "v is NULL"},
        {3, x, x, TL_BF16, {8, 8, 4, 4}, TL_EUNSUPPORTED,
         "dtype = 2 cannot be written to a view of 1"},
        {3, x, x, -1, {8, 8, 4, 4}, TL_EUNSUPPORTED, "dtype = -1"},
        {3, x, x, TL_F8_E4M3, {8, 8, 4, 4}, TL_EUNSUPPORTED, "dtype = 3"},
        {3, x, x, INT32_MIN, {8, 8, 4, 4}, TL_EUNSUPPORTED, "dtype = -2147483648"},
        {3, x, x, TL_F32, {INT64_MAX, 8, 4, 4}, TL_EINVAL, "k_token_stride 9223372036854775807"},
        {3, x, x, TL_F32, {8, INT64_MIN, 4, 4}, TL_EINVAL, "v_token_stride -9223372036854775808"},
        {3,
         x,
         x,
         TL_F32,
         {8, INT64_MAX / 8, 4, 4},
         TL_EINVAL,
         "v_token_stride 1152921504606846975"},
        {3, x, x, TL_F32, {8, 8, INT64_MIN, 4}, TL_EINVAL, "k_head_stride -9223372036854775808"},
        {3, x, x, TL_F32, {8, 8, 4, INT64_MAX / 4}, TL_EINVAL, "v_head_stride 2305843009213693951"},
        {3, (const void *)16, x, TL_F32, {-8, 8, 4, 4}, TL_EINVAL, "k_token_stride -8"},
        {3, x, x, TL_F16, {8, 8, 4, INT64_MAX / 2}, TL_EINVAL, "v_head_stride 4611686018427387903"},
    };
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        const struct call c = {good,
                               bad[i].T,
                               bad[i].dtype,
                               {bad[i].k, bad[i].v},
                               {bad[i].strides[0], bad[i].strides[1]},
                               {bad[i].strides[2], bad[i].strides[3]}};
        check_refused(&s, &c, bad[i].want, bad[i].words);
    }
    struct call c = ok;
    c.slots = NULL;
    check_refused(&s, &c, TL_EINVAL, "slots is NULL");
    CHECK_STATUS(tl_kv_write_slots(NULL, good, 3, x, x, TL_F32, 8, 4, 8, 4), TL_EINVAL);
    CHECK(strcmp(tl_last_error(), "tl_kv_write_slots: view is NULL with T = 3") == 0, "\"%s\"",
          tl_last_error());
    struct store nowhere = s;
    nowhere.view.k = NULL;
    check_refused(&nowhere, &ok, TL_EINVAL, "view->k is NULL");
    nowhere.view = s.view, nowhere.view.v = NULL;
    check_refused(&nowhere, &ok, TL_EINVAL, "view->v is NULL");
    write_and_compare(&s, &ok, "all in order");
    struct store wide = store_make(BLOCK_HEAD_SLOT, TL_F32, 3, H, 5, D, D); /* nothing is widened */
    c = ok, c.dtype = TL_F16;
    check_refused(&wide, &c, TL_EUNSUPPORTED, "dtype = 1 cannot be written to a view of 0");
    store_free(&wide);
    store_free(&s);
}

TEST(an_unknown_instruction_set_is_refused_with_the_names_that_work)
{
    struct store s = store_make(BLOCK_HEAD_SLOT, TL_F16, 3, 2, 5, 4, 4);
    const float x[8] = {0};
    const int64_t slot = 3, no_slot = 15;
    struct call c = {&slot, 1, TL_F32, {x, x}, {8, 8}, {4, 4}};
    tl_kernels_select("abacus");
    check_refused(&s, &c, TL_EUNSUPPORTED, "TINYLLM_ISA=abacus is not here; these are: ");
    c.dtype = TL_F16; /* copied as it is, and refused all the same */
    check_refused(&s, &c, TL_EUNSUPPORTED, "TINYLLM_ISA=abacus");
    c.slots = &no_slot; /* before the slots are looked at, after the dtype */
    check_refused(&s, &c, TL_EUNSUPPORTED, "TINYLLM_ISA=abacus");
    c.dtype = TL_BF16;
    check_refused(&s, &c, TL_EUNSUPPORTED, "dtype = 2");
    tl_kernels_select(NULL);
    c.dtype = TL_F32;
    check_refused(&s, &c, TL_EINVAL, "slots[0] = 15");
    store_free(&s);
}

TEST(a_slot_that_is_not_there_is_refused_wherever_it_stands)
{
    enum { T = 9, D = 2 };
    static const int64_t not_slots[] = {
        -2, -3, 15, 16, INT64_MIN, INT64_MIN + 1, INT64_MAX, (int64_t)1 << 32, -((int64_t)1 << 32)};
    struct store s = store_make(BLOCK_SLOT_HEAD, TL_F16, 3, 1, 5, D, D);
    const float x[T * D] = {1, 2, 3};
    for (size_t i = 0; i < sizeof not_slots / sizeof not_slots[0]; i++)
        for (int at = 0; at < T; at++) {
            int64_t slots[T] = {3, -1, 14, 0, 7, 8, -1, 2, 5};
            char words[96];
            slots[at] = not_slots[i];
            snprintf(words, sizeof words, "slots[%d] = %lld is neither -1 nor one of the view's 15",
                     at, (long long)not_slots[i]);
            const struct call c = {slots, T, TL_F32, {x, x}, {D, D}, {0, 0}};
            check_refused(&s, &c, TL_EINVAL, words);
        }
    struct store empty = s;
    const int64_t slot = 0;
    const struct call c = {&slot, 1, TL_F32, {x, x}, {D, D}, {0, 0}};
    empty.view.n_blocks = 0;
    check_refused(&empty, &c, TL_EINVAL, "slots[0] = 0 is neither -1 nor one of the view's 0");
    store_free(&s);
}

/* slots, in which first < second are alike, is refused in words that name both. */
static void check_twins(const struct store *s, const int64_t *slots, int64_t T, int64_t first,
                        int64_t second)
{
    static const float x[1] = {1};
    struct hook hook;
    char words[96];
    snprintf(words, sizeof words, "slots[%lld] and slots[%lld] are both %lld", (long long)first,
             (long long)second, (long long)slots[first]);
    const struct call c = {slots, T, TL_F32, {x, x}, {0, 0}, {0, 0}};
    hook_install(&hook, 0);
    tl_set_last_error(NULL);
    const tl_status got = write_slots(s, &c);
    hook_remove();
    CHECK(got == TL_EINVAL && strstr(tl_last_error(), words), "%s \"%s\", not \"%s\"",
          tl_status_str(got), tl_last_error(), words);
    CHECK(hook.live == 0, "%ld pieces not given back", hook.live);
}

/* In rising order, where the twin breaks the order or not, and in any order. */
static void check_twins_everywhere(int64_t T, int n_random)
{
    struct store s = store_make(BLOCK_HEAD_SLOT, TL_F16, T + 9, 1, 2, 1, 1);
    unsigned char *before = malloc(s.n_bytes);
    int64_t *slots = malloc((size_t)(2 * T + 18) * sizeof *slots);
    uint64_t seed = 5;
    memcpy(before, s.bytes, s.n_bytes);
    for (int rising = 0; rising < 2; rising++)
        for (int64_t pair = 0; pair < (n_random ? n_random : T * T); pair++) {
            const int64_t i = n_random && pair > 2 ? rng_below(&seed, T)
                              : n_random           ? (pair == 2 ? T - 2 : 0)
                                                   : pair / T;
            const int64_t j = n_random && pair > 2 ? rng_below(&seed, T)
                              : n_random           ? (pair == 0 ? 1 : T - 1)
                                                   : pair % T;
            if (i >= j)
                continue;
            if (rising)
                for (int64_t t = 0; t < T; t++)
                    slots[t] = 2 * t + 3;
            else
                shuffled(slots, 2 * T + 18, &seed);
            for (int64_t t = 0; t < T; t++)
                if (t != i && t != j && rng_below(&seed, 5) == 0)
                    slots[t] = -1;
            slots[pair % 2 ? i : j] = slots[pair % 2 ? j : i];
            check_twins(&s, slots, T, i, j);
        }
    CHECK(memcmp(s.bytes, before, s.n_bytes) == 0, "something was written");
    free(slots), free(before);
    store_free(&s);
}

TEST(a_slot_given_twice_is_found_wherever_both_stand)
{
    check_twins_everywhere(2, 0);
    check_twins_everywhere(64, 0);
    check_twins_everywhere(65, 0);
    check_twins_everywhere(5000, 60);
}

/* Slots that differ in few of their bytes are told apart, and alike ones are found, up to the
 * largest there can be. The view is of memory that is not there: no refused call comes near it. */
TEST(slots_of_any_size_are_told_apart)
{
    enum { T = 300 };
    int64_t slots[T];
    uint64_t seed = 6;
    for (int bit = 8; bit <= 60; bit++) {
        struct store s = {.view = {.size = sizeof(tl_kv_view), .k = (const void *)0x1000,
                                   .v = (const void *)0x1000,
                                   .dtype = TL_F16,
                                   .n_blocks = (int64_t)1 << bit,
                                   .block_tokens = 2,
                                   .n_kv_heads = 1,
                                   .head_dim_k = 1,
                                   .head_dim_v = 1,
                                   .k_block_stride = 2,
                                   .k_head_stride = 0,
                                   .k_token_stride = 1,
                                   .v_block_stride = 2,
                                   .v_head_stride = 0,
                                   .v_token_stride = 1}};
        for (int turn = 0; turn < 20; turn++) {
            const int64_t i = rng_below(&seed, T - 1), j = i + 1 + rng_below(&seed, T - 1 - i);
            int64_t base[T + 1];
            shuffled(base, T + 1, &seed);
            /* the bits that differ stand low, high, or spread over both ends */
            for (int t = 0; t < T; t++)
                slots[t] = turn % 3 == 0 || bit < 24 ? base[t] & (((int64_t)2 << bit) - 1)
                           : turn % 3 == 1           ? base[t] << (bit - 9)
                                                     : (base[t] & 15) | base[t] >> 4 << (bit - 5);
            if (bit < 9)
                for (int t = 0; t < T; t++)
                    slots[t] = base[t] < 512 ? base[t] : -1;
            slots[j] = slots[i];
            check_twins(&s, slots, T, i, j);
        }
    }
}

TEST(slots_of_any_size_pass_where_none_stands_twice)
{
    /* 2^25 slots of one f16, K and V in the same memory, few of its pages ever used */
    enum { T = 400, BITS = 25 };
    const size_t n = (size_t)2 << BITS;
    uint16_t *memory =
        mmap(NULL, n, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    CHECK(memory != MAP_FAILED, "no address space");
    const tl_kv_view view = {.size = sizeof(tl_kv_view), .k = memory,
                             .v = memory,
                             .dtype = TL_F16,
                             .n_blocks = (int64_t)1 << (BITS - 4),
                             .block_tokens = 16,
                             .n_kv_heads = 1,
                             .head_dim_k = 1,
                             .head_dim_v = 1,
                             .k_block_stride = 16,
                             .k_head_stride = 0,
                             .k_token_stride = 1,
                             .v_block_stride = 16,
                             .v_head_stride = 0,
                             .v_token_stride = 1};
    uint16_t x[T];
    int64_t slots[T];
    uint64_t seed = 15;
    for (int shift = 0; shift <= BITS - 9; shift++) {
        shuffled(slots, T, &seed);
        for (int t = 0; t < T; t++)
            slots[t] <<= shift, x[t] = (uint16_t)(t + 1000 * shift + 1);
        CHECK_STATUS(tl_kv_write_slots(&view, slots, T, x, x, TL_F16, 1, 0, 1, 0), TL_OK);
        for (int t = 0; t < T; t++)
            CHECK(memory[slots[t]] == x[t], "shift %d: slot %lld", shift, (long long)slots[t]);
    }
    munmap(memory, n);
}

TEST(without_memory_nothing_is_written)
{
    static const int64_t sizes[] = {64, 65, 5000};
    for (int i = 0; i < 3; i++) {
        const int64_t T = sizes[i];
        struct store s = store_make(BLOCK_SLOT_HEAD, TL_F16, T, 1, 1, 1, 1);
        int64_t *slots = malloc((size_t)T * sizeof *slots);
        void *x = random_elements(T, TL_F32, 3);
        for (int64_t t = 0; t < T; t++)
            slots[t] = T - 1 - t;
        const struct call c = {slots, T, TL_F32, {x, x}, {1, 1}, {0, 0}};
        long k = 1;
        for (;; k++) {
            struct hook hook;
            unsigned char *before = malloc(s.n_bytes);
            memcpy(before, s.bytes, s.n_bytes);
            hook_install(&hook, k);
            tl_set_last_error(NULL);
            const tl_status got = write_slots(&s, &c);
            hook_remove();
            const int same = memcmp(s.bytes, before, s.n_bytes) == 0;
            free(before);
            CHECK(hook.live == 0, "T = %lld: %ld pieces not given back", (long long)T, hook.live);
            if (hook.failed == 0) {
                CHECK(got == TL_OK && !same, "%s", tl_status_str(got));
                break;
            }
            CHECK(got == TL_ENOMEM && same, "%s, %s", tl_status_str(got),
                  same ? "untouched" : "written");
            CHECK(strncmp(tl_last_error(), "tl_kv_write_slots: ", 19) == 0 &&
                      strstr(tl_last_error(), T == 65 ? "T = 65" : "T = 5000"),
                  "\"%s\"", tl_last_error());
        }
        CHECK(k == (T > 64 ? 2 : 1), "T = %lld: %ld pieces asked for", (long long)T, k - 1);
        for (int64_t t = 0; t < T; t++) /* a fresh sequence asks for none */
            slots[t] = t;
        struct hook hook;
        hook_install(&hook, 1);
        const tl_status got = write_slots(&s, &c);
        hook_remove();
        CHECK(got == TL_OK && hook.calls == 0, "%s, %ld pieces asked for", tl_status_str(got),
              hook.calls);
        elements_free(x, T, TL_F32);
        free(slots);
        store_free(&s);
    }
}

/* ---- surroundings ---- */

TEST(the_callers_float_mode_does_not_reach_the_bits_and_comes_back)
{
    static const int modes[] = {FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO, FE_TONEAREST};
    static const int32_t dtypes[] = {TL_F16, TL_BF16, TL_F32};
    enum { D = 67, T = 3 };
    static const int64_t slots[T] = {2, 0, 1};
    void *x = random_elements(T * D, TL_F32, 4);
    for (int i = 0; i < 12; i++)
        for (int isa = 0; tl_kernels_usable(isa); isa++) {
            struct store s = store_make(BLOCK_HEAD_SLOT, dtypes[i % 3], 1, 1, T, D, D);
            unsigned char *want = malloc(s.n_bytes);
            for (int64_t t = 0; t < T; t++)
                for (int64_t d = 0; d < 2 * D; d++)
                    convert_ref(x, t * D + d % D, TL_F32, want,
                                element(&s, d >= D, 0, 0, slots[t], d % D), s.dtype);
            const struct call c = {slots, T, TL_F32, {x, x}, {D, D}, {D, D}};
            tl_kernels_select(tl_kernels_usable(isa)->name);
            feclearexcept(FE_ALL_EXCEPT);
            fesetround(modes[i / 3]);
            const tl_status got = write_slots(&s, &c);
            const int after = fegetround(), flags = fetestexcept(FE_ALL_EXCEPT);
            fesetround(FE_TONEAREST);
            tl_kernels_select(NULL);
            const int same = memcmp(s.bytes, want, s.n_bytes) == 0;
            free(want);
            store_free(&s);
            CHECK(got == TL_OK && same, "%s, dtype %d, mode %d: %s", tl_kernels_usable(isa)->name,
                  dtypes[i % 3], modes[i / 3], tl_status_str(got));
            CHECK(after == modes[i / 3] && flags == 0, "%s, dtype %d: mode %d became %d, flags %x",
                  tl_kernels_usable(isa)->name, dtypes[i % 3], modes[i / 3], after,
                  (unsigned)flags);
        }
    elements_free(x, T * D, TL_F32);
}

/* The same tokens into two pools, by append and by slots: the blocks, and what decode reads from
 * them, have the same bits. */
TEST(slots_of_a_pool_read_like_appended_ones)
{
    enum { H = 3, G = 2, D = 33, B = 7, N = 40, LAYERS = 2, T = 150, MAX = (T + B - 1) / B };
    tl_kv_pool *appended = kv_new(N, B, LAYERS, H, D), *slotted = kv_new(N, B, LAYERS, H, D);
    uint64_t seed = 12;
    uint32_t ids[N], table[MAX];
    int64_t order[N], slots[T];
    float *k = guarded(T * H * D * sizeof *k), *v = guarded(T * H * D * sizeof *v),
          *q = guarded(H * G * D * sizeof *q), out[2][H * G * D];
    kv_paint(appended, 1), kv_paint(slotted, 1);
    CHECK_STATUS(tl_kv_alloc(appended, N, ids), TL_OK);
    CHECK_STATUS(tl_kv_alloc(slotted, N, ids), TL_OK);
    shuffled(order, N, &seed);
    for (int i = 0; i < MAX; i++)
        table[i] = (uint32_t)order[i];
    for (int t = 0; t < T; t++)
        slots[t] = (int64_t)table[t / B] * B + t % B;
    for (int i = 0; i < T * H * D; i++)
        k[i] = rng_unit(&seed) * 2, v[i] = rng_unit(&seed);
    for (int i = 0; i < H * G * D; i++)
        q[i] = rng_unit(&seed);
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        tl_kv_view view = {.size = sizeof view};
        CHECK_STATUS(tl_kv_pool_view(slotted, layer, &view), TL_OK);
        CHECK_STATUS(tl_kv_append_f32(appended, layer, table, MAX, 0, T, k, v, D, H * D), TL_OK);
        CHECK_STATUS(tl_kv_write_slots(&view, slots, T, k, v, TL_F32, H * D, D, H * D, D), TL_OK);
        CHECK(memcmp(kv_bytes(appended, 0), kv_bytes(slotted, 0), N * tl_kv_block_bytes(slotted)) ==
                  0,
              "layer %u", layer);
        for (int32_t ctx = 1; ctx <= T; ctx += 37) {
            tl_kv_pool *pools[] = {appended, slotted};
            for (int i = 0; i < 2; i++) {
                memset(out[i], 0x55 + i, sizeof out[i]);
                CHECK_STATUS(tl_paged_attn_decode_f32(q, pools[i], layer, table, MAX, &ctx, out[i],
                                                      1, H * G, H, D, 0.2f, 0, NULL),
                             TL_OK);
            }
            CHECK(memcmp(out[0], out[1], sizeof out[0]) == 0, "layer %u, %d positions", layer, ctx);
        }
    }
    tl_kv_pool_destroy(appended);
    tl_kv_pool_destroy(slotted);
}

CHECK_MAIN()
