/* SPDX-License-Identifier: MIT */
/* kv_view.c: whether a view is sound, the view of a pool, and writing new K and V through a view
 * into given slots.
 *
 * Words. side: K or V. row: the width elements of one (block, head, slot) of a side. span: elements
 * from the first to the last that some axes reach, both included. */
#include <inttypes.h>
#include <stdbool.h>
#include <string.h>

#include "kernels/kernels.h"
#include "kernels/kv_layout.h"
#include "kernels/kv_store.h"
#include "kernels/shapes.h"
#include "runtime/alloc.h"
#include "runtime/fail.h"
#include "runtime/fpenv.h"
#include "runtime/kv_inner.h"

/* ---- soundness ---- */

/* Sizes of tl_kv_view that callers may know. */
static bool is_known_size(uint64_t size)
{
    return size == sizeof(tl_kv_view);
}

static tl_status check_sizes(const char *fn, const tl_kv_view *view)
{
    const struct {
        const char *name;
        int64_t n, least;
    } size[] = {{"n_blocks", view->n_blocks, 0},
                {"block_tokens", view->block_tokens, 1},
                {"n_kv_heads", view->n_kv_heads, 1},
                {"head_dim_k", view->head_dim_k, 1},
                {"head_dim_v", view->head_dim_v, 1}};
    for (size_t i = 0; i < sizeof size / sizeof size[0]; i++)
        if (size[i].n < size[i].least)
            return tl_fail(TL_EINVAL, fn, "view: %s = %" PRId64 " is below %" PRId64, size[i].name,
                           size[i].n, size[i].least);
    return TL_OK;
}

static tl_status check_format(const char *fn, const tl_kv_view *view)
{
    if (!kv_is_format(view->dtype))
        return tl_fail(TL_EINVAL, fn, "view: dtype = %d is none of " KV_FORMAT_NAMES, view->dtype);
    if (view->reserved != 0)
        return tl_fail(TL_EINVAL, fn, "view: reserved = %u is not 0", view->reserved);
    return TL_OK;
}

/* The scales of a side: where they begin, and their axes. */
struct scales {
    const char *name;
    const float *base;
    struct axis axis[3];
};

#define SCALES(view, side)                                                                    \
    {                                                                                         \
        #side "_scale", (view)->side##_scale,                                                 \
        {                                                                                     \
            {#side "_scale_block_stride", (view)->side##_scale_block_stride,                  \
             (view)->n_blocks},                                                               \
                {#side "_scale_head_stride", (view)->side##_scale_head_stride,                \
                 (view)->n_kv_heads},                                                         \
                {#side "_scale_token_stride", (view)->side##_scale_token_stride,              \
                 (view)->block_tokens}                                                        \
        }                                                                                     \
    }

static tl_status check_strides(const char *fn, const struct axis axis[3])
{
    for (int i = 0; i < 3; i++)
        if (axis[i].stride < 0)
            return tl_fail(TL_EINVAL, fn, "view: %s = %lld is negative", axis[i].name,
                           (long long)axis[i].stride);
    return TL_OK;
}

static tl_status check_no_scales(const char *fn, const tl_kv_view *view, const struct scales *s)
{
    const char *given = s->base ? s->name : NULL;
    for (int i = 0; i < 3 && !given; i++)
        given = s->axis[i].stride != 0 ? s->axis[i].name : NULL;
    return given ? tl_fail(TL_EINVAL, fn, "view: %s is given, and dtype = %d has no scales", given,
                           view->dtype)
                 : TL_OK;
}

static tl_status check_scales(const char *fn, const tl_kv_view *view, const struct scales *s)
{
    struct span span;
    if (!kv_has_scales(view->dtype))
        return check_no_scales(fn, view, s);
    if (!s->base)
        return tl_fail(TL_EINVAL, fn, "view: %s is NULL, and dtype = %d has scales", s->name,
                       view->dtype);
    if ((uintptr_t)s->base % _Alignof(float) != 0)
        return tl_fail(TL_EINVAL, fn, "view: %s at %p is not aligned for floats", s->name,
                       (const void *)s->base);
    TL_TRY(check_strides(fn, s->axis));
    if (!tl_span_of(s->base, sizeof(float), 1, s->axis, 3, &span))
        return tl_fail(TL_EINVAL, fn, "view: %s from %p on passes the address space", s->name,
                       (const void *)s->base);
    return TL_OK;
}

/* The axes of a side. */
#define AXES(view, side)                                                    \
    {                                                                       \
        {#side "_block_stride", (view)->side##_block_stride, (view)->n_blocks},     \
            {#side "_head_stride", (view)->side##_head_stride, (view)->n_kv_heads}, \
            {#side "_token_stride", (view)->side##_token_stride, (view)->block_tokens} \
    }

static tl_status check_side(const char *fn, const char *name, const void *base, int64_t width,
                            struct axis axis[3], const tl_kv_view *view)
{
    struct span span;
    int64_t stepped_over;
    TL_TRY(check_strides(fn, axis));
    if (view->n_blocks == 0)
        return TL_OK;
    const struct axis *bad = tl_overlapping_axis(width, axis, 3, &stepped_over);
    if (bad && stepped_over > 0)
        return tl_fail(TL_EINVAL, fn,
                       "view: %s = %lld steps into the %lld elements of what it steps over",
                       bad->name, (long long)bad->stride, (long long)stepped_over);
    if (bad)
        return tl_fail(TL_EINVAL, fn, "view: %s = %lld, %lld times, passes the address space",
                       bad->name, (long long)bad->stride, (long long)bad->n - 1);
    if (!tl_span_of(base, kv_elem_bytes(view->dtype), width, axis, 3, &span))
        return tl_fail(TL_EINVAL, fn,
                       "view: %s of %lld elements from %p on passes the address space", name,
                       (long long)stepped_over, base);
    return TL_OK;
}

tl_status tl_kv_view_check(const char *fn, const tl_kv_view *view)
{
    if (!is_known_size(view->size))
        return tl_fail(TL_EINVAL, fn, "view: size = %llu, this version's is %zu",
                       (unsigned long long)view->size, sizeof *view);
    struct axis k[3] = AXES(view, k), v[3] = AXES(view, v);
    const struct scales k_scale = SCALES(view, k), v_scale = SCALES(view, v);
    TL_TRY(check_format(fn, view));
    TL_TRY(check_sizes(fn, view));
    TL_TRY(check_scales(fn, view, &k_scale));
    TL_TRY(check_scales(fn, view, &v_scale));
    TL_TRY(check_side(fn, "k", view->k, view->head_dim_k, k, view));
    return check_side(fn, "v", view->v, view->head_dim_v, v, view);
}

/* The stride of an axis with one step may be anything: it is not taken. */
#define SIDE(view, side)                                                                    \
    {                                                                                       \
        .dtype = (view)->dtype,                                                             \
        .base = (view)->side,                                                               \
        .head_stride = (view)->n_kv_heads > 1 ? (view)->side##_head_stride : 0,             \
        .block_stride = (view)->n_blocks > 1 ? (view)->side##_block_stride : 0,             \
        .token_stride = (view)->block_tokens > 1 ? (view)->side##_token_stride : 0,         \
        .dim = (view)->head_dim_##side, .scale = (view)->side##_scale,                      \
        .scale_head_stride = (view)->side##_scale_head_stride,                              \
        .scale_block_stride = (view)->side##_scale_block_stride,                            \
        .scale_token_stride = (view)->side##_scale_token_stride                             \
    }

struct kv_layout tl_kv_layout_of(const tl_kv_view *view)
{
    return (struct kv_layout){.k = SIDE(view, k),
                              .v = SIDE(view, v),
                              .n_blocks = view->n_blocks,
                              .block_tokens = view->block_tokens,
                              .n_kv_heads = view->n_kv_heads};
}

/* ---- the view of a pool ---- */

tl_status tl_kv_pool_view(const tl_kv_pool *kv, uint32_t layer, tl_kv_view *view)
{
    static const char fn[] = "tl_kv_pool_view";
    if (!kv || !view)
        return tl_fail(TL_EINVAL, fn, "%s is NULL", !kv ? "kv" : "view");
    if (!is_known_size(view->size))
        return tl_fail(TL_EINVAL, fn, "view: size = %llu, this version's is %zu",
                       (unsigned long long)view->size, sizeof *view);
    const tl_kv_cfg cfg = kv->cfg;
    if (layer >= cfg.n_layers)
        return tl_fail(TL_EINVAL, fn, "layer = %u, the pool has %u", layer, cfg.n_layers);
    const int64_t elem = kv_elem_bytes(cfg.dtype);
    const int64_t token = cfg.head_dim, head = (int64_t)kv->size.strip / elem,
                  block = (int64_t)kv->size.block / elem;
    *view = (tl_kv_view){.size = view->size,
                         .k = kv_slab(kv, 0, layer, false),
                         .v = kv_slab(kv, 0, layer, true),
                         .dtype = cfg.dtype,
                         .n_blocks = cfg.n_blocks,
                         .block_tokens = cfg.block_tokens,
                         .n_kv_heads = cfg.n_kv_heads,
                         .head_dim_k = token,
                         .head_dim_v = token,
                         .k_block_stride = block,
                         .k_head_stride = head,
                         .k_token_stride = token,
                         .v_block_stride = block,
                         .v_head_stride = head,
                         .v_token_stride = token};
    if (kv_has_scales(cfg.dtype)) {
        view->k_scale = tl_kv_scale_ptr(kv, 0, layer, 0);
        view->v_scale = tl_kv_scale_ptr(kv, 0, layer, 1);
        view->k_scale_block_stride = view->v_scale_block_stride =
            (int64_t)(kv->size.block / sizeof(float));
        view->k_scale_head_stride = view->v_scale_head_stride =
            (int64_t)(kv->size.strip / sizeof(float));
        view->k_scale_token_stride = view->v_scale_token_stride = 1;
    }
    return TL_OK;
}

/* ---- writing into slots ---- */

static const char FN[] = "tl_kv_write_slots";

/* So many slots are compared pair by pair; more are sorted in memory of the hook. */
enum { FEW = 64 };

/* What is done with the scales of a side. */
enum scaling {
    SCALES_STAY,  /* there are none, or codes come as they are */
    SCALES_OWN,   /* a row has one to itself, which is written with it */
    SCALES_SHARED /* one for all, which is read */
};

struct side {
    const char *name; /* of the caller's tensor, and of the view's member */
    const void *from;
    struct axis from_axis[2]; /* tokens, heads */
    const struct kv_side *to; /* its memory is const for the sake of all who only read it */
    enum scaling scaling;
};

struct write {
    const tl_kv_view *view;
    const int64_t *slots;
    int64_t T, end; /* tokens; those up to the last one that is not skipped */
    /* each slot is above all before it, as in a fresh sequence: none stands twice */
    bool rising;
    struct kv_layout kv; /* the view's */
    struct side side[2];
    struct kv_store store;
};

static tl_status check_arguments(const struct write *w)
{
    if (w->T < 0)
        return tl_fail_i64(TL_EINVAL, FN, "T = %lld is negative", w->T);
    if (w->T == 0)
        return TL_OK;
    if (!w->view || !w->slots)
        return tl_fail(TL_EINVAL, FN, "%s is NULL with T = %" PRId64, !w->view ? "view" : "slots",
                       w->T);
    if (!tl_fits_memory(2 * sizeof(int64_t), 1, &w->T))
        return tl_fail_i64(TL_EINVAL, FN, "T = %lld slots do not fit in memory", w->T);
    return tl_kv_view_check(FN, w->view);
}

/* Every slot is in range; fills in `end` and `rising`. */
static tl_status look_at_slots(struct write *w)
{
    const int64_t n_slots = w->view->n_blocks == 0 ? 0 : w->view->n_blocks * w->view->block_tokens;
    int64_t top = -1;
    w->rising = true;
    for (int64_t t = 0; t < w->T; t++) {
        const int64_t slot = w->slots[t];
        if (slot < -1 || slot >= n_slots)
            return tl_fail_i64(TL_EINVAL, FN,
                               "slots[%lld] = %lld is neither -1 nor one of the view's %lld", t,
                               slot, n_slots);
        if (slot < 0)
            continue;
        w->rising &= slot > top;
        top = slot;
        w->end = t + 1;
    }
    return TL_OK;
}

/* Whether rows of the caller's dtype can be put into the view's. */
static tl_status choose_conversion(struct write *w, tl_dtype dtype)
{
    const tl_dtype to = w->view->dtype;
    if (dtype != to && dtype != TL_F32 && !(kv_has_scales(to) && kv_is_source(dtype)))
        return tl_fail(TL_EUNSUPPORTED, FN, "dtype = %d cannot be written to a view of %d", dtype,
                       to);
    w->store.from = dtype;
    w->store.to = to;
    return TL_OK;
}

static tl_status choose_scaling(const struct write *w, struct side *side)
{
    const struct kv_side *to = side->to;
    struct axis axis[] = {{"block", to->scale_block_stride, w->kv.n_blocks},
                          {"head", to->scale_head_stride, w->kv.n_kv_heads},
                          {"token", to->scale_token_stride, w->kv.block_tokens}};
    const bool is_one = !axis[0].stride && !axis[1].stride && !axis[2].stride;
    int64_t span;
    if (!kv_has_scales(to->dtype) || w->store.from == to->dtype)
        side->scaling = SCALES_STAY;
    else if (is_one && to->dtype == TL_F8_E4M3)
        side->scaling = SCALES_SHARED;
    else if (!tl_overlapping_axis(1, axis, 3, &span))
        side->scaling = SCALES_OWN;
    else
        return tl_fail(TL_EUNSUPPORTED, FN,
                       "%s_scale: rows of dtype = %d share scales (strides %" PRId64 ", %" PRId64
                       ", %" PRId64 ")",
                       side->name, to->dtype, to->scale_block_stride, to->scale_head_stride,
                       to->scale_token_stride);
    return TL_OK;
}

static tl_status check_tensor(const struct write *w, struct side *side)
{
    struct span span;
    side->from_axis[0].n = w->end;
    side->from_axis[1].n = w->kv.n_kv_heads;
    if (!side->from || !side->to->base)
        return tl_fail(TL_EINVAL, FN, "%s%s is NULL and slots[%" PRId64 "] = %" PRId64,
                       side->from ? "view->" : "", side->name, w->end - 1, w->slots[w->end - 1]);
    if (!tl_span_of(side->from, kv_elem_bytes(w->store.from), side->to->dim, side->from_axis, 2,
                    &span))
        return tl_fail(TL_EINVAL, FN,
                       "%s_token_stride %" PRId64 ", %s_head_stride %" PRId64
                       " pass the address space with T = %" PRId64,
                       side->name, side->from_axis[0].stride, side->name,
                       side->from_axis[1].stride, w->T);
    return TL_OK;
}

/* Names the two tokens that were given one slot. */
static tl_status fail_twice(const struct write *w, int64_t slot)
{
    int64_t first = 0;
    while (w->slots[first] != slot)
        first++;
    int64_t second = first + 1;
    while (w->slots[second] != slot)
        second++;
    return tl_fail_i64(TL_EINVAL, FN, "slots[%lld] and slots[%lld] are both %lld", first, second,
                       slot);
}

static tl_status check_pairs(const struct write *w)
{
    for (int64_t t = 1; t < w->end; t++)
        for (int64_t u = 0; u < t; u++)
            if (w->slots[t] >= 0 && w->slots[t] == w->slots[u])
                return fail_twice(w, w->slots[t]);
    return TL_OK;
}

/* Sorts a[n] by one byte after another, from the lowest up, to and fro between a and b. Returns the
 * one it ended in.
 * 0 <= a[i] <= top. */
static const int64_t *sort_slots(int64_t *a, int64_t *b, int64_t n, int64_t top)
{
    for (int shift = 0; shift < 63 && top >> shift > 0; shift += 8) {
        int64_t begin[257] = {0}, *const sorted = b;
        for (int64_t i = 0; i < n; i++)
            begin[(a[i] >> shift & 255) + 1]++;
        for (int byte = 0; byte < 256; byte++)
            begin[byte + 1] += begin[byte];
        for (int64_t i = 0; i < n; i++)
            sorted[begin[a[i] >> shift & 255]++] = a[i];
        b = a;
        a = sorted;
    }
    return a;
}

/* room: for twice `end` slots. */
static tl_status check_sorted(const struct write *w, int64_t *room)
{
    int64_t n = 0, top = 0;
    for (int64_t t = 0; t < w->end; t++)
        if (w->slots[t] >= 0) {
            room[n++] = w->slots[t];
            top = w->slots[t] > top ? w->slots[t] : top;
        }
    const int64_t *sorted = sort_slots(room, room + w->end, n, top);
    for (int64_t i = 1; i < n; i++)
        if (sorted[i] == sorted[i - 1])
            return fail_twice(w, sorted[i]);
    return TL_OK;
}

static tl_status check_none_twice(const struct write *w)
{
    tl_allocator owner;
    if (w->rising)
        return TL_OK;
    if (w->end <= FEW)
        return check_pairs(w);
    const size_t bytes = (size_t)w->end * 2 * sizeof(int64_t);
    int64_t *room = tl_owned_alloc(bytes, sizeof(int64_t), &owner);
    if (!room)
        return tl_fail(TL_ENOMEM, FN,
                       "no %zu bytes to look for slots given twice with T = %" PRId64, bytes, w->T);
    const tl_status status = check_sorted(w, room);
    tl_owned_free(&owner, room);
    return status;
}

static void put(const struct write *w, const struct side *side, const void *x, void *y,
                float *scale, int64_t n)
{
    switch (side->scaling) {
    case SCALES_STAY: tl_kv_store(&w->store, x, y, n); break;
    case SCALES_OWN: tl_kv_store_scaled(&w->store, x, y, scale, n); break;
    case SCALES_SHARED: tl_kv_store_shared(&w->store, x, y, *scale, n); break;
    }
}

/* Heads that lie one behind the other in both places, and have no scales of their own, go as one
 * row. */
static void write_token(const struct write *w, const struct side *side, int64_t t)
{
    const struct kv_side *to = side->to;
    const int64_t block = w->slots[t] / w->kv.block_tokens;
    const int64_t slot = w->slots[t] % w->kv.block_tokens, heads = w->kv.n_kv_heads, D = to->dim;
    const bool as_one = side->scaling != SCALES_OWN && side->from_axis[1].stride == D &&
                        to->head_stride == D;
    const char *x = (const char *)side->from +
                    t * side->from_axis[0].stride * kv_elem_bytes(w->store.from);
    for (int64_t h = 0; h < (as_one ? 1 : heads); h++) {
        const struct kv_plane plane = kv_plane(to, 0, h);
        put(w, side, x + h * side->from_axis[1].stride * kv_elem_bytes(w->store.from),
            (void *)kv_row(to, plane, block, slot),
            to->scale ? (float *)kv_scale(to, plane, block, slot) : NULL, as_one ? heads * D : D);
    }
}

static void write_side(const struct write *w, const struct side *side)
{
    for (int64_t t = 0; t < w->end; t++)
        if (w->slots[t] >= 0)
            write_token(w, side, t);
}

tl_status tl_kv_write_slots(const tl_kv_view *view, const int64_t *slots, int64_t T, const void *k,
                            const void *v, int32_t dtype, int64_t k_token_stride,
                            int64_t k_head_stride, int64_t v_token_stride, int64_t v_head_stride)
{
    struct write w = {.view = view, .slots = slots, .T = T};
    TL_TRY(check_arguments(&w));
    if (T == 0)
        return TL_OK;
    w.kv = tl_kv_layout_of(view);
    w.side[0] = (struct side){"k", k, {{"token", k_token_stride, 0}, {"head", k_head_stride, 0}},
                              &w.kv.k, SCALES_STAY};
    w.side[1] = (struct side){"v", v, {{"token", v_token_stride, 0}, {"head", v_head_stride, 0}},
                              &w.kv.v, SCALES_STAY};
    TL_TRY(choose_conversion(&w, dtype));
    TL_TRY(choose_scaling(&w, &w.side[0]));
    TL_TRY(choose_scaling(&w, &w.side[1]));
    TL_TRY(tl_kernels_require(FN, &w.store.kernels));
    TL_TRY(look_at_slots(&w));
    if (w.end == 0)
        return TL_OK;
    TL_TRY(check_tensor(&w, &w.side[0]));
    TL_TRY(check_tensor(&w, &w.side[1]));
    TL_TRY(check_none_twice(&w));
    const tl_fpenv caller = tl_fpenv_enter();
    write_side(&w, &w.side[0]);
    write_side(&w, &w.side[1]);
    tl_fpenv_leave(caller);
    return TL_OK;
}
