/* SPDX-License-Identifier: MIT */
/* kv_store.c: rows of K and V put into a format, and read back. Elements that are not f32 pass
 * through pieces of f32 on the stack. */
#include "kernels/kv_store.h"

#include <string.h>

#include "numerics/lowp.h"

enum { PIECE = 256 };

/* n <= PIECE elements as f32: in place, or in `room`. */
static const float *widen(const struct kv_store *s, const void *x, float *room, int64_t n)
{
    if (s->from == TL_F32)
        return x;
    (s->from == TL_F16 ? s->kernels->f16_to_f32_n : s->kernels->bf16_to_f32_n)(x, room, n);
    return room;
}

static int64_t piece_at(int64_t at, int64_t n)
{
    return n - at < PIECE ? n - at : PIECE;
}

static const char *source_at(const struct kv_store *s, const void *x, int64_t at)
{
    return (const char *)x + at * kv_elem_bytes(s->from);
}

/* Upwards, line by line, as memory is fastest. libc takes some rows downwards, at half the speed
 * where they are in no cache, and most rows are too short for a call. */
static void copy(char *y, const char *x, int64_t n)
{
    enum { LINE = 64 };
    for (; n >= LINE; n -= LINE, x += LINE, y += LINE)
        memcpy(y, x, LINE);
    memcpy(y, x, (size_t)n);
}

/* n floats in a format without scales. */
static void narrow(const struct kv_store *s, const float *x, void *y, int64_t n)
{
    switch (s->to) {
    case TL_F16: s->kernels->f32_to_f16_n(x, y, n); break;
    case TL_BF16: s->kernels->f32_to_bf16_n(x, y, n); break;
    default: copy(y, (const char *)x, n * (int64_t)sizeof *x);
    }
}

void tl_kv_store(const struct kv_store *s, const void *x, void *y, int64_t n)
{
    float room[PIECE];
    if (s->from == s->to)
        copy(y, x, n * kv_elem_bytes(s->to));
    else if (s->from == TL_F32)
        narrow(s, x, y, n);
    else
        for (int64_t at = 0, some; at < n; at += some) {
            some = piece_at(at, n);
            narrow(s, widen(s, source_at(s, x, at), room, some),
                   (char *)y + at * kv_elem_bytes(s->to), some);
        }
}

static void to_codes(const struct kv_store *s, const void *x, void *y, float r, int64_t n)
{
    float room[PIECE];
    for (int64_t at = 0, some; at < n; at += some) {
        some = piece_at(at, n);
        const float *from = widen(s, source_at(s, x, at), room, some);
        if (s->to == TL_I8)
            s->kernels->scaled_to_i8_n(from, r, (int8_t *)y + at, some);
        else
            s->kernels->scaled_to_e4m3_n(from, r, (uint8_t *)y + at, some);
    }
}

/* The bit pattern of the largest |x[i]|. */
static uint32_t top_of(const struct kv_store *s, const void *x, int64_t n)
{
    uint32_t top = 0;
    if (s->from == TL_F32) {
        s->kernels->top_n(x, &top, n);
        return top;
    }
    s->kernels->top_half_n(x, &top, n);
    return lowp_bits(s->from == TL_F16 ? lowp_f16_to_f32((uint16_t)top)
                                       : lowp_bf16_to_f32((uint16_t)top));
}

void tl_kv_store_scaled(const struct kv_store *s, const void *x, void *y, float *scale, int64_t n)
{
    const uint32_t top = top_of(s, x, n), least = 0x0D800000; /* 2^-100 */
    if (top < least || top >= LOWP_INF) {
        if (n > 0) /* else y may be NULL */
            memset(y, 0, (size_t)n);
        *scale = lowp_float(top < least ? 0 : TL_NAN_BITS);
        return;
    }
    const float largest = lowp_float(top), most = s->to == TL_I8 ? 127 : TL_E4M3_MAX;
    *scale = largest / most;
    to_codes(s, x, y, most / largest, n);
}

void tl_kv_store_shared(const struct kv_store *s, const void *x, void *y, float scale, int64_t n)
{
    to_codes(s, x, y, 1 / scale, n);
}

/* ---- what a format has nothing for ---- */

/* How many of n <= PIECE floats have a magnitude of these bits or more. */
static int64_t count_from(const float *x, uint32_t bits, int64_t n)
{
    int64_t count = 0;
    for (int64_t i = 0; i < n; i++)
        count += (lowp_bits(x[i]) & ~LOWP_SIGN) >= bits;
    return count;
}

/* The least magnitude that becomes infinite, or in eight bits is not stored. */
static uint32_t first_lost(const struct kv_store *s)
{
    if (s->to == TL_F32)
        return LOWP_INF + 1;
    return s->to == TL_F16 ? 0x477FF000 /* 65520 */ : s->to == TL_BF16 ? 0x7F7F8000 : LOWP_INF;
}

int64_t tl_kv_unrepresentable(const struct kv_store *s, const void *x, int64_t n)
{
    float room[PIECE];
    const uint32_t lost = first_lost(s);
    int64_t count = 0;
    if (top_of(s, x, n) < lost)
        return 0;
    for (int64_t at = 0, some; at < n; at += some) {
        some = piece_at(at, n);
        const float *from = widen(s, source_at(s, x, at), room, some);
        count += count_from(from, lost, some);
        if (lost < LOWP_INF) /* infinities are there in these */
            count -= count_from(from, LOWP_INF, some) - count_from(from, LOWP_INF + 1, some);
    }
    return count;
}

/* ---- rows under a watch ---- */

/* f32 to f16, what pools hold most: all rows in one call. */
static void store_f16_rows(const struct kv_store *s, const struct kv_rows *r, bool *lost)
{
    const int64_t x_step = r->x_step / (int64_t)sizeof(float),
                  y_step = r->y_step / (int64_t)sizeof(uint16_t);
    const bool is_gapless = x_step == r->dim && y_step == r->dim;
    s->kernels->f32_to_f16_rows((const float *)(const void *)r->x, x_step,
                                (uint16_t *)(void *)r->y, y_step, is_gapless ? 1 : r->n,
                                is_gapless ? r->n * r->dim : r->dim, lost);
}

void tl_kv_store_rows(const struct kv_store *s, const struct kv_rows *r, bool *lost)
{
    if (s->from == TL_F32 && s->to == TL_F16) {
        store_f16_rows(s, r, lost);
        return;
    }
    const int64_t x_row = kv_row_bytes(s->from, r->dim), y_row = kv_row_bytes(s->to, r->dim);
    const bool is_gapless = !r->scale && r->x_step == x_row && r->y_step == y_row;
    const int64_t rows = is_gapless ? 1 : r->n, n = is_gapless ? r->n * r->dim : r->dim;
    for (int64_t i = 0; i < rows; i++) {
        const char *x = r->x + i * r->x_step;
        char *y = r->y + i * r->y_step;
        if (r->scale) {
            float *scale = r->scale + i * r->scale_step;
            tl_kv_store_scaled(s, x, y, scale, n);
            *lost |= *scale != *scale;
        } else {
            tl_kv_store(s, x, y, n);
            *lost |= top_of(s, x, n) >= first_lost(s);
        }
    }
}

/* ---- reading back ---- */

void tl_kv_widen(const struct kv_store *s, const void *x, float scale, float *y, int64_t n)
{
    switch (s->to) {
    case TL_F16: s->kernels->f16_to_f32_n(x, y, n); return;
    case TL_BF16: s->kernels->bf16_to_f32_n(x, y, n); return;
    case TL_F32: copy((char *)y, x, n * (int64_t)sizeof *y); return;
    case TL_F8_E4M3: s->kernels->e4m3_to_f32_n(x, y, n); break;
    default:
        for (int64_t i = 0; i < n; i++)
            y[i] = ((const int8_t *)x)[i];
    }
    for (int64_t i = 0; i < n; i++) {
        const float value = scale * y[i];
        y[i] = value == value ? value : lowp_float(TL_NAN_BITS);
    }
}
