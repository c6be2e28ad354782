/* SPDX-License-Identifier: MIT */
/* test_attn_states.c: attention in pieces. The states of any division of the splits, computed by
 * any calls, merge into the bits of one call; a state is what attention.h says it is; a call reads
 * nothing of other splits; what is refused.
 *
 * Words. span: the positions of one state, TL_ATTN_SPLIT or TL_ATTN_STRETCH.
 * case (struct job): the arguments of one step, with a memory of its own. shown: the splits whose
 * positions hold their values in that memory just now; everything else in it is poison, and
 * entries that hold nothing shown are garbage.
 * piece: one call of tl_paged_attn_states_f32, and so one part of a merge. state: 2 + Dv floats, m,
 * L and a[Dv]. */
#include <fenv.h>
#include <float.h>

#include "attn_ref.h"
#include "hook.h"

#define STATES "tl_paged_attn_states_f32"
#define MERGE "tl_attn_merge_f32"
#define MAX_B 6
#define MAX_PIECES 8
#define SPLITS_IN_STRETCH (TL_ATTN_STRETCH / TL_ATTN_SPLIT)

/* ---- a case ---- */

struct job_spec {
    int64_t B, H, Hkv, Dk, Dv, block_tokens, window; /* Dv 0: Dk; block_tokens 0: 16 */
    int64_t q_len[MAX_B], ctx[MAX_B];
    int32_t dtype;
    /* elements of poison behind every row of K and V, of NaN behind every token of q */
    int64_t gap;
    enum data data;
    float softcap;
    bool alibi, sinks;
    uint64_t seed;
};

struct job {
    struct job_spec spec;
    /* rows of all sequences; splits up to the last that holds a position */
    int64_t total, n_splits, n_blocks;
    tl_kv_view view;
    void *k_memory, *v_memory;
    size_t k_bytes, v_bytes;
    float *k[MAX_B], *v[MAX_B]; /* [Hkv][ctx][width] */
    int32_t *cu, *ctx;
    uint32_t *tables, *hidden; /* whole; with garbage for what is not shown */
    int64_t table_stride, q_span;
    float *q, *slopes, *sink_logits;
    tl_paged_attn_args args;
    float *states;           /* [total, H, n_splits, 2 + Dv], by ref_piece */
    float *stretches;        /* the same of stretches, up to the last that holds a position */
    float *want, *want_lse;  /* by tl_paged_attn_f32, which is held to ref_row */
};

static int64_t dim_v(const struct job_spec *s)
{
    return s->Dv ? s->Dv : s->Dk;
}

static int64_t state_width(const struct job *x)
{
    return 2 + dim_v(&x->spec);
}

/* How many splits a state of that span holds; 0 stands for TL_ATTN_SPLIT. */
static int64_t splits_in(int64_t span)
{
    return span ? span / TL_ATTN_SPLIT : 1;
}

/* States up to the last that holds a position. */
static int64_t n_states_of(const struct job *x, int64_t span)
{
    return blocks_of(x->n_splits, splits_in(span));
}

static int64_t rows_of(const struct job *x)
{
    return x->total * x->spec.H;
}

static int64_t position(const struct job *x, int64_t s, int64_t i)
{
    return x->ctx[s] - x->spec.q_len[s] + i;
}

/* The first position that any row of the sequence sees; its context length where it has no row. */
static int64_t first_needed(const struct job *x, int64_t s)
{
    return x->spec.q_len[s] ? ref_first_seen(position(x, s, 0), x->spec.window) : x->ctx[s];
}

static const char *describe(const struct job *x)
{
    static char text[512];
    const struct job_spec *s = &x->spec;
    snprintf(text, sizeof text,
             "B %lld, H %lld, Hkv %lld, Dk %lld, Dv %lld, b %lld, window %lld, dtype %d, data %d, "
             "softcap %g, alibi %d, "
             "sinks %d, q_len %lld %lld.., ctx %lld %lld.., seed %llu",
             (long long)s->B, (long long)s->H, (long long)s->Hkv, (long long)s->Dk,
             (long long)dim_v(s), (long long)s->block_tokens, (long long)s->window, s->dtype,
             (int)s->data, (double)s->softcap, s->alibi, s->sinks, (long long)s->q_len[0],
             (long long)s->q_len[1], (long long)s->ctx[0], (long long)s->ctx[1],
             (unsigned long long)s->seed);
    return text;
}

/* ---- its memory ---- */

static int64_t element(const struct job *x, int is_v, int64_t s, int64_t head, int64_t j)
{
    const int64_t b = x->view.block_tokens, block = x->tables[s * x->table_stride + j / b];
    return is_v ? block * x->view.v_block_stride + head * x->view.v_head_stride +
                      j % b * x->view.v_token_stride
                : block * x->view.k_block_stride + head * x->view.k_head_stride +
                      j % b * x->view.k_token_stride;
}

static void show_positions(const struct job *x, int64_t s, int64_t from, int64_t to)
{
    for (int64_t head = 0; head < x->spec.Hkv; head++)
        for (int64_t j = from; j < to; j++)
            for (int is_v = 0; is_v < 2; is_v++) {
                const int64_t D = is_v ? dim_v(&x->spec) : x->spec.Dk,
                              at = element(x, is_v, s, head, j);
                const float *row = (is_v ? x->v[s] : x->k[s]) + (head * x->ctx[s] + j) * D;
                for (int64_t d = 0; d < D; d++)
                    put_value(is_v ? x->v_memory : x->k_memory, x->spec.dtype, at + d, row[d]);
            }
}

/* Leaves only what the rows see of splits first .. first + n - 1; tables in `hidden`. */
static void show(const struct job *x, int64_t first, int64_t n)
{
    const int64_t b = x->view.block_tokens, from = first * TL_ATTN_SPLIT,
                  to = from + n * TL_ATTN_SPLIT;
    poison_memory(x->k_memory, x->k_bytes, x->spec.dtype),
        poison_memory(x->v_memory, x->v_bytes, x->spec.dtype);
    for (int64_t s = 0; s < x->spec.B; s++) {
        const int64_t lo = max64(first_needed(x, s), from), hi = min64(x->ctx[s], to);
        for (int64_t i = 0; i < x->table_stride; i++) {
            const bool holds = lo < hi && i >= lo / b && i <= (hi - 1) / b;
            x->hidden[s * x->table_stride + i] =
                holds ? x->tables[s * x->table_stride + i] : garbage_id(i, (uint32_t)x->n_blocks);
        }
        show_positions(x, s, lo, hi);
    }
}

static void show_all(const struct job *x)
{
    show(x, 0, max64(x->n_splits, 1));
}

static void make_memory(struct job *x)
{
    const struct job_spec *s = &x->spec;
    const int64_t b = s->block_tokens, k = s->Dk + s->gap, v = dim_v(s) + s->gap;
    x->view = (tl_kv_view){.size = sizeof(tl_kv_view),
                        .dtype = s->dtype,
                           .n_blocks = x->n_blocks,
                           .block_tokens = b,
                           .n_kv_heads = s->Hkv,
                           .head_dim_k = s->Dk,
                           .head_dim_v = dim_v(s),
                           .k_block_stride = s->Hkv * b * k,
                           .k_head_stride = b * k,
                           .k_token_stride = k,
                           .v_block_stride = b * s->Hkv * v,
                           .v_head_stride = v,
                           .v_token_stride = s->Hkv * v};
    x->k_bytes = (size_t)(x->n_blocks * x->view.k_block_stride - s->gap) * dtype_bytes(s->dtype);
    x->v_bytes = (size_t)(x->n_blocks * x->view.v_block_stride - s->gap) * dtype_bytes(s->dtype);
    x->view.k = x->k_memory = guarded(x->k_bytes), x->view.v = x->v_memory = guarded(x->v_bytes);
}

static float make_value(const struct job_spec *s, uint64_t *rng, int64_t j, int is_v)
{
    const uint16_t code = value_code(s->data, rng, j, is_v);
    if (s->dtype == TL_F32 && s->data == DATA_PLAIN)
        return rng_unit(rng); /* all 24 bits of it */
    return ref_widen(s->dtype == TL_BF16 ? code & 0xFFF8 : code);
}

static void make_sequences(struct job *x, uint64_t *rng)
{
    uint32_t *ids = shuffled_ids((uint32_t)x->n_blocks, rng);
    const size_t bytes = (size_t)(x->spec.B * x->table_stride) * sizeof *x->tables;
    int64_t taken = 0;
    x->tables = guarded(bytes), x->hidden = guarded(bytes);
    for (int64_t s = 0; s < x->spec.B; s++) {
        for (int64_t i = 0; i < blocks_of(x->ctx[s], x->spec.block_tokens); i++)
            x->tables[s * x->table_stride + i] = ids[taken++];
        for (int is_v = 0; is_v < 2; is_v++) {
            const int64_t D = is_v ? dim_v(&x->spec) : x->spec.Dk, T = x->ctx[s];
            float *dense = floats(x->spec.Hkv * T * D);
            for (int64_t i = 0; i < x->spec.Hkv * T * D; i++)
                dense[i] = i / D % T < first_needed(x, s)
                               ? NAN
                               : make_value(&x->spec, rng, i / D % T, is_v);
            *(is_v ? &x->v[s] : &x->k[s]) = dense;
        }
    }
    free(ids);
}

static void make_rows(struct job *x, uint64_t *rng)
{
    const struct job_spec *s = &x->spec;
    const int64_t stride = s->H * s->Dk + s->gap;
    x->q_span = max64(x->total * stride - s->gap, 0);
    x->q = guarded((size_t)x->q_span * sizeof *x->q);
    for (int64_t i = 0; i < x->q_span; i++)
        x->q[i] = i % stride < s->H * s->Dk ? value_q(s->data, rng) : NAN;
    x->slopes = guarded((size_t)s->H * sizeof *x->slopes),
    x->sink_logits = guarded((size_t)s->H * sizeof *x->sink_logits);
    for (int64_t h = 0; h < s->H; h++) {
        x->slopes[h] = ldexpf(1 + 0.3f * rng_unit(rng), -8 - (int)(h % 6));
        x->sink_logits[h] = h % 5 == 4 ? -INFINITY : 3 * rng_unit(rng);
    }
    x->args = (tl_paged_attn_args){.size = sizeof x->args,
                                   .q = x->q,
                                   .q_token_stride = stride,
                                   .q_head_stride = s->Dk,
                                   .B = s->B,
                                   .H = s->H,
                                   .cu_seqlens_q = x->cu,
                                   .ctx_lens = x->ctx,
                                   .block_tables = x->hidden,
                                   .table_stride = x->table_stride,
                                   .window = s->window,
                                   .alibi_slopes = s->alibi ? x->slopes : NULL,
                                   .sink_logits = s->sinks ? x->sink_logits : NULL,
                                   .scale = 1 / sqrtf((float)s->Dk),
                                   .logits_softcap = s->softcap,
                                   .out_token_stride = s->H * dim_v(s),
                                   .out_head_stride = dim_v(s)};
}

/* Row i of sequence s for head h, as a ref_row. */
static struct ref_row row_of(const struct job *x, int64_t s, int64_t i, int64_t h)
{
    const int64_t p = position(x, s, i), head = h / (x->spec.H / x->spec.Hkv) * x->ctx[s],
                  Dv = dim_v(&x->spec);
    return (struct ref_row){.q = x->q + (x->cu[s] + i) * x->args.q_token_stride + h * x->spec.Dk,
                            .k = x->k[s] + head * x->spec.Dk,
                            .v = x->v[s] + head * Dv,
                            .D = x->spec.Dk,
                            .Dv = Dv,
                            .lo = ref_first_seen(p, x->spec.window),
                            .hi = p,
                            .p = p,
                            .scale = x->args.scale,
                            .softcap = x->spec.softcap,
                            .slope = x->spec.alibi ? x->slopes + h : NULL};
}

/* What every row must leave of every piece of that span: the caller frees it. */
static float *wanted_states(const struct job *x, int64_t span)
{
    const int64_t width = state_width(x), H = x->spec.H, n = n_states_of(x, span);
    float *states = floats(rows_of(x) * n * width), *state = states;
    for (int64_t s = 0; s < x->spec.B; s++)
        for (int64_t at = 0; at < x->spec.q_len[s] * H * n; at++, state += width) {
            const struct ref_row row = row_of(x, s, at / n / H, at / n % H);
            struct ref_state got = {.a = state + 2};
            ref_piece(&row, at % n * span, span, &got);
            state[0] = got.m, state[1] = got.L;
        }
    return states;
}

static void check_whole_rows(const struct job *x)
{
    const int64_t H = x->spec.H, Dv = dim_v(&x->spec);
    float *want = floats(Dv), m, L;
    for (int64_t s = 0; s < x->spec.B; s++)
        for (int64_t i = 0; i < x->spec.q_len[s] * H; i++) {
            struct ref_row row = row_of(x, s, i / H, i % H);
            const int64_t at = x->cu[s] * H + i;
            row.sink = x->args.sink_logits ? x->sink_logits + i % H : NULL;
            ref_row(&row, want, &m, &L);
            CHECK_SAME(x->want + at * Dv, want, Dv, "one call, sequence %lld, row %lld: %s",
                       (long long)s, (long long)i, describe(x));
            CHECK(lse_close(x->want_lse[at], m, L), "lse %.9g for %.9g + log(%.9g): %s",
                  (double)x->want_lse[at], (double)m, (double)L, describe(x));
        }
    free(want);
}

static void make_wanted(struct job *x)
{
    x->states = wanted_states(x, TL_ATTN_SPLIT), x->stretches = wanted_states(x, TL_ATTN_STRETCH);
    x->want = floats(rows_of(x) * dim_v(&x->spec)), x->want_lse = floats(rows_of(x));
    tl_paged_attn_args whole = x->args;
    whole.view = &x->view, whole.out = x->want, whole.lse = x->want_lse;
    show_all(x);
    CHECK(tl_paged_attn_f32(&whole) == TL_OK, "\"%s\": %s", tl_last_error(), describe(x));
    check_whole_rows(x);
}

static void free_wanted(struct job *x)
{
    free(x->states), free(x->stretches), free(x->want), free(x->want_lse);
}

static struct job job_make(const struct job_spec *spec)
{
    uint64_t rng = spec->seed * 0x9E3779B97F4A7C15u + 11;
    struct job x = {.spec = *spec, .n_blocks = 3};
    int64_t longest = 1;
    if (!x.spec.block_tokens)
        x.spec.block_tokens = 16;
    x.cu = guarded((size_t)(spec->B + 1) * sizeof *x.cu),
    x.ctx = guarded((size_t)spec->B * sizeof *x.ctx);
    x.cu[0] = 0;
    for (int64_t s = 0; s < spec->B; s++) {
        x.total += spec->q_len[s], x.cu[s + 1] = (int32_t)x.total, x.ctx[s] = (int32_t)spec->ctx[s];
        x.n_blocks += blocks_of(spec->ctx[s], x.spec.block_tokens),
            longest = max64(longest, spec->ctx[s]);
    }
    x.n_splits = blocks_of(longest, TL_ATTN_SPLIT);
    x.table_stride = blocks_of(longest, x.spec.block_tokens) + rng_below(&rng, 4);
    make_memory(&x);
    make_sequences(&x, &rng);
    make_rows(&x, &rng);
    make_wanted(&x);
    return x;
}

static void job_free(struct job *x)
{
    guarded_free(x->k_memory, x->k_bytes), guarded_free(x->v_memory, x->v_bytes);
    for (int64_t s = 0; s < x->spec.B; s++)
        free(x->k[s]), free(x->v[s]);
    guarded_free(x->cu, (size_t)(x->spec.B + 1) * sizeof *x->cu);
    guarded_free(x->ctx, (size_t)x->spec.B * sizeof *x->ctx);
    guarded_free(x->tables, (size_t)(x->spec.B * x->table_stride) * sizeof *x->tables);
    guarded_free(x->hidden, (size_t)(x->spec.B * x->table_stride) * sizeof *x->hidden);
    guarded_free(x->q, (size_t)x->q_span * sizeof *x->q);
    guarded_free(x->slopes, (size_t)x->spec.H * sizeof *x->slopes);
    guarded_free(x->sink_logits, (size_t)x->spec.H * sizeof *x->sink_logits);
    free_wanted(x);
}

/* ---- running it ---- */

/* Both NaN, or the same bits: what a NaN looks like inside a state is its maker's own. */
static bool same_number(float a, float b)
{
    return float_bits(a) == float_bits(b) || (isnan(a) && isnan(b));
}

/* One call: splits first .. first + n - 1, in states of that span. */
struct piece {
    int64_t first, n, span;
};
static const struct piece two = {0, 2, 0};

static int64_t piece_size(const struct job *x, struct piece p)
{
    return rows_of(x) * (p.n / splits_in(p.span)) * state_width(x);
}

/* Its states against the reference; empty ones behind the last position. */
static void check_states(const struct job *x, const float *states, struct piece p)
{
    const int64_t width = state_width(x), per = splits_in(p.span), n = p.n / per,
                  there = n_states_of(x, p.span);
    const float *const wanted = per == 1 ? x->states : x->stretches;
    for (int64_t at = 0; at < rows_of(x) * n * width; at++) {
        const int64_t row = at / width / n, index = p.first / per + at / width % n, i = at % width;
        const float want = index < there ? wanted[(row * there + index) * width + i]
                           : i == 0      ? -INFINITY
                                         : 0;
        if (!same_number(states[at], want))
            CHECK_BITS(states[at], want,
                       "%s: %s of the state of row %lld, head %lld, number %lld of %lld splits (of "
                       "a call from split %lld on, %lld splits): %s",
                       tl_isa_name(),
                       i == 0   ? "m"
                       : i == 1 ? "L"
                                : "a",
                       (long long)(row / x->spec.H), (long long)(row % x->spec.H), (long long)index,
                       (long long)per, (long long)p.first, (long long)p.n, describe(x));
    }
}

static tl_status states_call(const struct job *x, struct piece p, float *states, tl_pool *tp)
{
    tl_paged_attn_args args = x->args;
    args.view = &x->view, args.tp = tp, args.state_span = p.span;
    return tl_paged_attn_states_f32(&args, p.first, p.n, states);
}

/* Into fresh paint, with nothing but those splits shown: all written, nothing else. The caller
 * frees it (painted_free). */
static float *states_run(const struct job *x, struct piece p, tl_pool *tp)
{
    float *states = painted(piece_size(x, p));
    show(x, p.first, p.n);
    CHECK(states_call(x, p, states, tp) == TL_OK,
          "\"%s\", splits from %lld on, %lld, span %lld: %s", tl_last_error(),
          (long long)p.first, (long long)p.n, (long long)p.span, describe(x));
    CHECK(rim_intact(states), "the rim was written: %s", describe(x));
    check_states(x, states, p); /* which sees what was not written */
    return states;
}

struct division {
    int n;
    tl_attn_part part[MAX_PIECES];
};

static struct piece piece_of(const tl_attn_part *part)
{
    return (struct piece){part->first_split, part->n_splits, part->span};
}

static void division_free(const struct job *x, struct division *d)
{
    for (int i = 0; i < d->n; i++)
        painted_free((float *)(uintptr_t)d->part[i].states,
                     piece_size(x, piece_of(&d->part[i])));
}

/* A pool of n threads, made once. */
#define MAX_THREADS 4
static tl_pool *threads(int n)
{
    static tl_pool *pools[MAX_THREADS + 1];
    if (!pools[n])
        pools[n] = make_threads(n);
    return pools[n];
}

/* One piece for each of sizes[0 .. n-1], in splits, or negative in stretches; the others' splits
 * hidden from it; each on another instruction set and another number of threads, the last piece
 * first. */
static struct division divide(const struct job *x, const int64_t *sizes, int n)
{
    struct division d = {.n = n};
    int n_isas = 0;
    while (isa_select(n_isas))
        n_isas++;
    for (int64_t i = 0, first = 0; i < n; first += d.part[i].n_splits, i++)
        d.part[i] = (tl_attn_part){
            .first_split = first,
            .n_splits = sizes[i] < 0 ? -sizes[i] * SPLITS_IN_STRETCH : sizes[i],
            .span = sizes[i] < 0 ? TL_ATTN_STRETCH : i % 2 ? TL_ATTN_SPLIT : 0};
    for (int i = n - 1; i >= 0; i--) {
        const int turn = i + (int)(x->spec.seed % 12);
        isa_select(turn % n_isas);
        d.part[i].states = states_run(x, piece_of(&d.part[i]),
                                      turn % 3 ? threads(1 + turn % MAX_THREADS) : NULL);
    }
    isa_restore();
    return d;
}

static void check_merge(const struct job *x, const struct division *d, tl_pool *tp)
{
    const int64_t n = rows_of(x), Dv = dim_v(&x->spec);
    float *out = painted(n * Dv), *lse = painted(n);
    tl_attn_part *parts = guarded((size_t)d->n * sizeof *parts);
    memcpy(parts, d->part, (size_t)d->n * sizeof *parts);
    CHECK(tl_attn_merge_f32(parts, d->n, n, x->spec.H, Dv, x->args.sink_logits, out, lse, tp) ==
              TL_OK,
          "\"%s\": %s", tl_last_error(), describe(x));
    CHECK(rim_intact(out) && rim_intact(lse), "the rim was written: %s", describe(x));
    CHECK_SAME(out, x->want, n * Dv, "%s: out of %d pieces, the first of %lld: %s", tl_isa_name(),
               d->n, (long long)parts[0].n_splits, describe(x));
    CHECK_SAME(lse, x->want_lse, n, "%s: lse of %d pieces, the first of %lld: %s", tl_isa_name(),
               d->n, (long long)parts[0].n_splits, describe(x));
    repaint(out, n * Dv), repaint(lse, n);
    CHECK_STATUS(
        tl_attn_merge_f32(parts, d->n, n, x->spec.H, Dv, x->args.sink_logits, out, NULL, tp),
        TL_OK);
    CHECK_SAME(out, x->want, n * Dv, "out without lse: %s", describe(x));
    CHECK(all_paint(lse, n), "lse was written without being given");
    painted_free(out, n * Dv), painted_free(lse, n);
    guarded_free(parts, (size_t)d->n * sizeof *parts);
}

static void check_division(const struct job *x, const int64_t *sizes, int n)
{
    struct division d = divide(x, sizes, n);
    for (int i = 0; isa_select(i); i++)
        check_merge(x, &d, i % 2 ? threads(3) : NULL);
    for (int t = 1; t <= MAX_THREADS; t++)
        check_merge(x, &d, threads(t));
    division_free(x, &d);
}

/* One by one, in twos, all at once, the first alone, and with splits that no row reaches. */
static void check_divisions(const struct job *x)
{
    const int64_t S = x->n_splits;
    int64_t ones[MAX_PIECES], twos[MAX_PIECES];
    CHECK(S < MAX_PIECES, "%lld splits", (long long)S);
    for (int i = 0; i < MAX_PIECES; i++)
        ones[i] = 1, twos[i] = 2;
    check_division(x, ones, (int)S);
    check_division(x, ones, (int)S + 1);
    check_division(x, twos, (int)(S + 1) / 2);
    check_division(x, (const int64_t[]){S}, 1);
    check_division(x, (const int64_t[]){S + 3}, 1);
    check_division(x, (const int64_t[]){1, S + 4, 2}, 3);
    if (S > 2)
        check_division(x, (const int64_t[]){S - 1, 1}, 2);
    check_division(x, (const int64_t[]){-1}, 1);
}

/* A context over stretches: of splits, of stretches, and of both, cut where stretches begin and
 * where they do not. */
static void check_long_divisions(const struct job *x)
{
    const int64_t S = x->n_splits, T = n_states_of(x, TL_ATTN_STRETCH);
    check_division(x, (const int64_t[]){S}, 1);
    check_division(x, (const int64_t[]){-T}, 1);
    check_division(x, (const int64_t[]){-T - 1, 3}, 2);
    check_division(x, (const int64_t[]){-1, S - 16 + 2}, 2);
    check_division(x, (const int64_t[]){16, -T}, 2);
    check_division(x, (const int64_t[]){5, 11, -1, 1, 7, 8, -T}, 7);
    check_division(x, (const int64_t[]){15, 2, 15, -1, -1}, 5);
}

static void check_spec(const struct job_spec *spec)
{
    struct job x = job_make(spec);
    check_divisions(&x);
    job_free(&x);
}

/* ---- the bits of one call ---- */

TEST(any_division_of_one_context_has_the_bits_of_one_call)
{
    static const int64_t contexts[] = {1, 2, 1023, 1024, 1025, 2048, 2049, 3000, 5000},
                         blocks[] = {33, 16, 3000};
    static const int32_t dtypes[] = {TL_F16, TL_F32, TL_BF16};
    for (int i = 0; i < 9; i++)
        for (int64_t rows = 1; rows <= 3; rows += 2) {
            const struct job_spec spec = {.B = 1,
                                          .H = 4,
                                          .Hkv = 2,
                                          .Dk = 17,
                                          .Dv = i % 2 ? 17 : 9,
                                          .block_tokens = blocks[i % 3],
                                          .q_len = {min64(rows, contexts[i])},
                                          .ctx = {contexts[i]},
                                          .dtype = dtypes[i % 3],
                                          .gap = i % 2,
                                          .seed = (uint64_t)i};
            check_spec(&spec);
        }
}

TEST(mixtures_of_rows_windows_and_options_have_the_bits_of_one_call)
{
    static const int64_t contexts[] = {1, 1023, 1024, 1025, 3000, 5000, 2048, 40, 700, 1040, 2070},
                         lens[] = {1, 0, 5, 40};
    static const int64_t groups[] = {1, 3, 4, 9},
                         windows[] = {0, 1, 1000, 7, 1024, 1030, 2500, 0, 40},
                         blocks[] = {16, 7, 64, 33, 1};
    static const int32_t dtypes[] = {TL_F16, TL_F32, TL_BF16};
    for (uint64_t seed = 0; seed < 24; seed++) {
        uint64_t rng = seed + 77;
        struct job_spec spec = {.B = 1 + (int64_t)seed % 4,
                                .Hkv = 1 + (int64_t)seed % 2,
                                .Dk = 1 + rng_below(&rng, 24),
                                .Dv = rng_below(&rng, 21),
                                .block_tokens = blocks[seed % 5],
                                .window = windows[seed % 9],
                                .dtype = dtypes[seed % 3],
                                .gap = (int64_t)seed % 3,
                                .data = (enum data)(seed % 7 % N_DATA),
                                .softcap = seed % 3 == 1 ? 2.5f : 0,
                                .alibi = seed % 4 == 1,
                                .sinks = seed % 2,
                                .seed = seed};
        spec.H = spec.Hkv * groups[seed % 4];
        for (int64_t s = 0; s < spec.B; s++) {
            spec.ctx[s] = contexts[rng_below(&rng, 11)];
            spec.q_len[s] = min64(lens[(int64_t)(seed + (uint64_t)s) % 4], spec.ctx[s]);
        }
        check_spec(&spec);
    }
}

/* Rows of one call on both sides of an edge, so that the same split is empty for some and not for
 * others, at either end. */
TEST(splits_that_some_rows_of_a_call_see)
{
    static const int64_t windows[] = {0, 1, 2, 15, 16, 17, 1023, 1024, 1025},
                         blocks[] = {7, 16, 2500};
    for (uint64_t i = 0; i < 9; i++) {
        const struct job_spec spec = {.B = 3,
                                      .H = 3,
                                      .Hkv = 1,
                                      .Dk = 8,
                                      .Dv = 5,
                                      .block_tokens = blocks[i % 3],
                                      .window = windows[i],
                                      .q_len = {40, 5, 9},
                                      .ctx = {1040, 2050, 3073},
                                      .dtype = i % 2 ? TL_F16 : TL_F32,
                                      .data = DATA_RISING,
                                      .sinks = i % 2,
                                      .seed = 50 + i};
        check_spec(&spec);
    }
}

/* Around the edges of stretches, windows that leave whole stretches out, begin in one or end
 * there. */
TEST(contexts_over_stretches_have_the_bits_of_one_call)
{
    static const struct {
        int64_t ctx, window, q_len;
    } cases[] = {{16384, 0, 1},     {16385, 0, 3},  {16390, 20, 9},     {32768, 16384, 2},
                 {32769, 16384, 2}, {33000, 0, 1},  {33000, 17000, 1},  {33000, 700, 2},
                 {32770, 16386, 5}, {40000, 0, 1},  {49153, 16400, 3},  {20000, 0, 1}};
    static const int64_t blocks[] = {33, 16, 3000, 1};
    static const int32_t dtypes[] = {TL_F16, TL_F32, TL_BF16};
    for (uint64_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct job_spec spec = {.B = 2,
                                      .H = 2,
                                      .Hkv = 1,
                                      .Dk = 3,
                                      .Dv = i % 2 ? 2 : 5,
                                      .block_tokens = blocks[i % 4],
                                      .window = cases[i].window,
                                      .q_len = {cases[i].q_len, 1},
                                      .ctx = {cases[i].ctx, i % 3 ? 17000 : 30},
                                      .dtype = dtypes[i % 3],
                                      .data = i % 4 == 1 ? DATA_RISING : DATA_PLAIN,
                                      .softcap = i % 5 == 1 ? 2.5f : 0,
                                      .alibi = i % 4 == 2,
                                      .sinks = i % 2,
                                      .seed = 400 + i};
        struct job x = job_make(&spec);
        check_long_divisions(&x);
        job_free(&x);
    }
}

/* A rank that owns a stretch has the table of its blocks and no other, and K and V of them. */
TEST(a_part_of_the_table_is_enough_for_its_stretch)
{
    static const int64_t blocks[] = {16, 33, 5000, 1}, windows[] = {0, 17000, 700};
    for (uint64_t i = 0; i < 12; i++) {
        const struct job_spec spec = {.B = 2,
                                      .H = 2,
                                      .Hkv = 1,
                                      .Dk = 3,
                                      .block_tokens = blocks[i % 4],
                                      .window = windows[i % 3],
                                      .q_len = {2, 1},
                                      .ctx = {33000, 16500},
                                      .dtype = TL_F16,
                                      .seed = 440 + i};
        struct job x = job_make(&spec);
        const int64_t b = spec.block_tokens;
        for (int64_t k = 0; k < 4; k++) {
            const int64_t first = k * TL_ATTN_STRETCH / b,
                          last = ((k + 1) * TL_ATTN_STRETCH - 1) / b, n = last - first + 1;
            const struct piece whole = {16 * k, 16, TL_ATTN_STRETCH}, splits = {16 * k, 16, 0};
            uint32_t *part = guarded((size_t)(2 * n) * sizeof *part);
            show(&x, 16 * k, 16);
            for (int64_t j = 0; j < 2 * n; j++) {
                const int64_t at = first + j % n;
                part[j] = at < x.table_stride ? x.hidden[j / n * x.table_stride + at]
                                              : garbage_id(j, (uint32_t)x.n_blocks);
            }
            struct job rank = x;
            rank.args.block_tables = part, rank.args.table_stride = n;
            rank.args.first_block = first;
            for (int t = 0; t < 2; t++) {
                const struct piece p = t ? whole : splits;
                float *states = painted(piece_size(&x, p));
                CHECK(states_call(&rank, p, states, t ? threads(3) : NULL) == TL_OK,
                      "\"%s\": stretch %lld, blocks from %lld on, %lld: %s", tl_last_error(),
                      (long long)k, (long long)first, (long long)n, describe(&x));
                check_states(&x, states, p);
                CHECK(rim_intact(states), "the rim was written");
                painted_free(states, piece_size(&x, p));
            }
            guarded_free(part, (size_t)(2 * n) * sizeof *part);
        }
        job_free(&x);
    }
}

/* 40 blocks of 1000: positions of stretch 1 lie in blocks 16 to 32. */
TEST(a_part_of_the_table_that_misses_a_visible_position_is_refused)
{
    const struct job_spec spec = {.B = 2,
                                  .H = 1,
                                  .Hkv = 1,
                                  .Dk = 2,
                                  .block_tokens = 1000,
                                  .q_len = {1, 1},
                                  .ctx = {10, 39500},
                                  .dtype = TL_F16,
                                  .seed = 460};
    struct job x = job_make(&spec);
    static const struct {
        int64_t window, first_block, n;
        tl_status want;
    } cases[] = {{0, 16, 17, TL_OK},         {0, 17, 17, TL_EINVAL},     {0, 16, 16, TL_EINVAL},
                 {0, 0, 33, TL_OK},          {0, 0, 32, TL_EINVAL},      {0, 33, 7, TL_EINVAL},
                 {22501, 17, 16, TL_EINVAL}, {22500, 17, 16, TL_OK},     {8000, 31, 2, TL_OK},
                 {8000, 32, 1, TL_EINVAL},   {6000, 40, 1, TL_OK},       {0, 16, 1, TL_EINVAL}};
    const struct piece p = {16, 16, TL_ATTN_STRETCH};
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const int64_t n = cases[i].n;
        uint32_t *part = guarded((size_t)(2 * n) * sizeof *part);
        float *states = painted(piece_size(&x, p));
        show_all(&x);
        for (int64_t j = 0; j < 2 * n; j++) {
            const int64_t at = cases[i].first_block + j % n;
            part[j] = j >= n && at < x.table_stride ? x.tables[x.table_stride + at] : UINT32_MAX;
        }
        struct job rank = x;
        rank.args.block_tables = part, rank.args.table_stride = n;
        rank.args.first_block = cases[i].first_block, rank.args.window = cases[i].window;
        const tl_status got = states_call(&rank, p, states, NULL);
        CHECK(got == cases[i].want, "case %zu: %s, \"%s\"", i, tl_status_str(got), tl_last_error());
        CHECK(got == TL_OK || (error_names(STATES) && error_mentions(1)), "case %zu: \"%s\"", i,
              tl_last_error());
        CHECK(got == TL_OK || strstr(tl_last_error(), "first_block") ||
                  strstr(tl_last_error(), "needs"),
              "case %zu: an entry was looked at: \"%s\"", i, tl_last_error());
        CHECK(got == TL_OK || all_paint(states, piece_size(&x, p)), "case %zu: written", i);
        guarded_free(part, (size_t)(2 * n) * sizeof *part);
        painted_free(states, piece_size(&x, p));
    }
    job_free(&x);
}

/* The widest values are taken, and one more is not, with everything else in order. */
TEST(head_widths_end_where_the_header_says)
{
    enum { MOST = TL_MAX_HEAD_DIM + 1 };
    float *kv = floats(MOST), *q = floats(MOST), *states = painted(2 + MOST);
    const int32_t ctx = 1;
    const uint32_t table = 0;
    for (int i = 0; i < 4; i++) {
        const int64_t dk = i & 1 ? MOST : MOST - 1, dv = i & 2 ? MOST : MOST - 1;
        const tl_kv_view view = {.size = sizeof view,
                                 .k = kv,
                                 .v = kv,
                                 .dtype = TL_F32,
                                 .n_blocks = 1,
                                 .block_tokens = 1,
                                 .n_kv_heads = 1,
                                 .head_dim_k = dk,
                                 .head_dim_v = dv,
                                 .k_block_stride = dk,
                                 .k_head_stride = dk,
                                 .k_token_stride = dk,
                                 .v_block_stride = dv,
                                 .v_head_stride = dv,
                                 .v_token_stride = dv};
        tl_paged_attn_args args = {.size = sizeof args,
                                   .view = &view,
                                   .q = q,
                                   .q_token_stride = dk,
                                   .q_head_stride = dk,
                                   .B = 1,
                                   .H = 1,
                                   .ctx_lens = &ctx,
                                   .block_tables = &table,
                                   .table_stride = 1,
                                   .scale = 1};
        repaint(states, 2 + MOST);
        CHECK_STATUS(tl_paged_attn_states_f32(&args, 0, 1, states), i ? TL_EUNSUPPORTED : TL_OK);
        CHECK(i == 0 || (error_names(STATES) && error_mentions(MOST)), "\"%s\"", tl_last_error());
        CHECK(i == 0 || all_paint(states, 2 + MOST), "states were written");
    }
    const tl_attn_part part = {floats(2 + MOST), 0, 1, 0};
    for (int64_t dim = MOST - 1; dim <= MOST; dim++) {
        repaint(states, 2 + MOST);
        CHECK_STATUS(tl_attn_merge_f32(&part, 1, 1, 1, dim, NULL, states, NULL, NULL),
                     dim == MOST ? TL_EUNSUPPORTED : TL_OK);
        CHECK(dim < MOST || (error_names(MERGE) && error_mentions(MOST)), "\"%s\"",
              tl_last_error());
        CHECK(dim < MOST || all_paint(states, 2 + MOST), "out was written");
    }
    free((float *)(uintptr_t)part.states), free(kv), free(q), painted_free(states, 2 + MOST);
}

TEST(heads_of_the_widest_values)
{
    for (uint64_t i = 0; i < 3; i++) {
        const struct job_spec spec = {.B = 2,
                                      .H = 3,
                                      .Hkv = 1,
                                      .Dk = 5,
                                      .Dv = TL_MAX_HEAD_DIM,
                                      .window = i == 2 ? 30 : 0,
                                      .q_len = {2, 1},
                                      .ctx = {1041, i ? 9 : 1100},
                                      .dtype = i % 2 ? TL_F32 : TL_F16,
                                      .sinks = true,
                                      .seed = 70 + i};
        check_spec(&spec);
    }
}

/* A sequence alone leaves the states that it leaves in a batch. */
TEST(states_do_not_depend_on_the_batch)
{
    const struct job_spec spec = {.B = 3,
                                  .H = 6,
                                  .Hkv = 2,
                                  .Dk = 12,
                                  .q_len = {5, 40, 1},
                                  .ctx = {1030, 2100, 1},
                                  .dtype = TL_F16,
                                  .seed = 80};
    struct job x = job_make(&spec);
    const int64_t width = state_width(&x);
    float *alone = floats(40 * 6 * 3 * width);
    show_all(&x);
    for (int64_t s = 0; s < 3; s++) {
        tl_paged_attn_args args = x.args;
        const int32_t cu[] = {0, (int32_t)spec.q_len[s]};
        args.view = &x.view, args.B = 1, args.cu_seqlens_q = spec.q_len[s] == 1 ? NULL : cu;
        args.q = x.q + x.cu[s] * args.q_token_stride, args.ctx_lens = x.ctx + s,
        args.block_tables = x.hidden + s * x.table_stride;
        CHECK_STATUS(tl_paged_attn_states_f32(&args, 0, 3, alone), TL_OK);
        CHECK_SAME(alone, x.states + x.cu[s] * 6 * 3 * width, spec.q_len[s] * 6 * 3 * width,
                   "sequence %lld alone", (long long)s);
    }
    free(alone);
    job_free(&x);
}

/* ---- what a state is ---- */

/* With equal keys the scores are 0: m = 0, L counts and a sums, all exactly. Values 1, 2, 3 in
 * turn. */
TEST(an_example_by_hand)
{
    enum { T = 1030 };
    static float k[T][2], v[T][1];
    for (int j = 0; j < T; j++)
        v[j][0] = (float)(1 + j % 3);
    const tl_kv_view view = {.size = sizeof view,
                             .k = k,
                             .v = v,
                             .dtype = TL_F32,
                             .n_blocks = 1,
                             .block_tokens = T,
                             .n_kv_heads = 1,
                             .head_dim_k = 2,
                             .head_dim_v = 1,
                             .k_token_stride = 2,
                             .v_token_stride = 1};
    const float q[] = {3, -7}, sink = 0;
    const int32_t ctx = T;
    const uint32_t table = 0;
    const tl_paged_attn_args args = {.size = sizeof args,
                                     .view = &view,
                                     .q = q,
                                     .q_token_stride = 2,
                                     .q_head_stride = 2,
                                     .B = 1,
                                     .H = 1,
                                     .ctx_lens = &ctx,
                                     .block_tables = &table,
                                     .table_stride = 1,
                                     .scale = 1};
    float s[3][3], out, lse;
    CHECK_STATUS(tl_paged_attn_states_f32(&args, 0, 3, s[0]), TL_OK);
    /* 1024 = 341 * 3 + 1 values: 341 * 6 + 1; then six more, of 2 3 1 2 3 1 */
    static const float want[3][3] = {{0, 1024, 2047}, {0, 6, 12}, {-INFINITY, 0, 0}};
    CHECK_SAME(s[0], want[0], 9, "states");
    const tl_attn_part parts[] = {{s[0], 0, 3, 0}};
    CHECK_STATUS(tl_attn_merge_f32(parts, 1, 1, 1, 1, NULL, &out, &lse, NULL), TL_OK);
    CHECK(fabsf(out - 2059.0f / 1030) <= 0x1p-22f && fabsf(lse - logf(1030)) <= 0x1p-20f,
          "out %.9g, lse %.9g", (double)out, (double)lse);
    CHECK_STATUS(tl_attn_merge_f32(parts, 1, 1, 1, 1, &sink, &out, &lse, NULL), TL_OK);
    CHECK(fabsf(out - 2059.0f / 1031) <= 0x1p-22f && fabsf(lse - logf(1031)) <= 0x1p-20f,
          "with a sink: out %.9g, lse %.9g", (double)out, (double)lse);
}

/* A score in double, and how far f32 may be from it: a dot of D terms passes through ceil(D/16)
 * fma, four sums and the scale; the softcap adds the rounding of s / cap (of which x / cosh(x)^2 <
 * 0.45 comes through), 1.5 ulp of tanh and a product; alibi one fma, its distance being exact
 * here. */
static double score64(const struct ref_row *r, int64_t j, double *error)
{
    const double u = 0x1p-24, cap = (double)r->softcap;
    double dot = 0, size = 0;
    for (int64_t d = 0; d < r->D; d++) {
        const double x = (double)r->q[d] * (double)r->k[j * r->D + d];
        dot += x, size += fabs(x);
    }
    double s = (double)r->scale * dot;
    *error = 1.01 * u * (double)((r->D + 15) / 16 + 5) * fabs((double)r->scale) * size +
             0x1p-149 * (double)(r->D + 6);
    if (cap > 0)
        s = cap * tanh(s / cap), *error += 5 * u * cap;
    if (r->slope)
        s += (double)*r->slope * (double)(j - r->p), *error += 1.01 * u * fabs(s);
    return s;
}

/* Against the sum of e^(s - m) over the m that the state has. A weight is off by the error of its
 * score, by the roundings of the differences of maxima it went through (which telescope to |s -
 * m|), by at most 65 exponentials of 1.5 ulp and their products, and L by 68 sums, a[d] by 1024 fma
 * more. What e^x under 2^-126 loses is in `lost`. */
static void check_state64(const struct ref_row *r, int64_t from, int64_t to, const float *state,
                          const char *text)
{
    const double u = 0x1p-24, m = (double)state[0];
    double top = -INFINITY, top_error = 0, L = 0, L_error = 0x1p-116, error;
    for (int64_t j = from; j <= to; j++) {
        const double s = score64(r, j, &error), p = exp(s - m);
        top = fmax(top, s), top_error = fmax(top_error, error);
        L += p, L_error += p * 1.1 * (error + u * (fabs(s - m) + 65 * 4 + 68));
    }
    CHECK(fabs(m - top) <= top_error, "m is %.9g, want %.17g within %.3g: %s", m, top, top_error,
          text);
    CHECK(fabs((double)state[1] - L) <= L_error, "L is %.9g, want %.17g within %.3g: %s",
          (double)state[1], L, L_error, text);
    for (int64_t d = 0; d < ref_width(r); d++) {
        double a = 0, a_error = 0, lost = 0x1p-116;
        for (int64_t j = from; j <= to; j++) {
            const double s = score64(r, j, &error), p = exp(s - m),
                         v = (double)r->v[j * ref_width(r) + d];
            a += p * v, a_error += p * fabs(v) * 1.1 * (error + u * (fabs(s - m) + 65 * 4 + 1024)),
                lost += 0x1p-116 * fabs(v);
        }
        CHECK(fabs((double)state[2 + d] - a) <= a_error + lost,
              "a[%lld] is %.9g, want %.17g within %.3g: %s", (long long)d, (double)state[2 + d], a,
              a_error + lost, text);
    }
}

TEST(states_are_close_to_double)
{
    for (uint64_t seed = 0; seed < 12; seed++) {
        const struct job_spec spec = {.B = 2,
                                      .H = 4,
                                      .Hkv = 2,
                                      .Dk = 20,
                                      .Dv = 3,
                                      .window = seed % 4 == 3 ? 1100 : 0,
                                      .q_len = {2, 1},
                                      .ctx = {2100, 1025},
                                      .dtype = seed % 2 ? TL_F32 : TL_F16,
                                      .data = (enum data)(seed % DATA_SPECIAL),
                                      .softcap = seed % 3 == 1 ? 3 : 0,
                                      .alibi = seed % 3 == 2,
                                      .seed = 100 + seed};
        struct job x = job_make(&spec);
        const struct piece all = {0, x.n_splits, 0};
        float *states = states_run(&x, all, NULL);
        for (int64_t s = 0; s < spec.B; s++)
            for (int64_t at = 0; at < spec.q_len[s] * spec.H * x.n_splits; at++) {
                const int64_t split = at % x.n_splits, row = at / x.n_splits;
                const struct ref_row r = row_of(&x, s, row / spec.H, row % spec.H);
                const int64_t from = max64(r.lo, split * TL_ATTN_SPLIT),
                              to = min64(r.hi, split * TL_ATTN_SPLIT + TL_ATTN_SPLIT - 1);
                const float *state =
                    states + (x.cu[s] * spec.H * x.n_splits + at) * state_width(&x);
                if (from <= to)
                    check_state64(&r, from, to, state, describe(&x));
            }
        painted_free(states, piece_size(&x, all));
        job_free(&x);
    }
}

/* Empty: behind the last position, before the window, behind the row's own position, in a call far
 * off. */
TEST(a_split_that_a_row_does_not_see_is_minus_infinity_and_zeros)
{
    static const int64_t firsts[] = {
        0, 1, 2, 3, 4, 1000, INT64_C(1) << 40, INT64_MAX / TL_ATTN_SPLIT - 3};
    const struct job_spec spec = {.B = 1,
                                  .H = 2,
                                  .Hkv = 1,
                                  .Dk = 6,
                                  .Dv = 4,
                                  .window = 10,
                                  .q_len = {40},
                                  .ctx = {2060},
                                  .dtype = TL_F16,
                                  .seed = 120};
    struct job x = job_make(&spec);
    for (int f = 0; f < 8; f++) {
        const struct piece here = {firsts[f], 2, 0};
        float *states = painted(piece_size(&x, here));
        if (firsts[f] < 4)
            show(&x, firsts[f], 2);
        else
            show(&x, 4, 1); /* nothing at all */
        CHECK_STATUS(states_call(&x, here, states, NULL), TL_OK);
        for (int64_t at = 0; at < rows_of(&x) * 2; at++) {
            const int64_t split = firsts[f] + at % 2, p = 2020 + at / 4;
            const bool sees = split <= 2 && split * 1024 <= p && split * 1024 + 1023 > p - 10;
            const float *state = states + at * 6;
            CHECK((state[0] > -INFINITY) == sees, "m %g, row at %lld, split %lld", (double)state[0],
                  (long long)p, (long long)split);
            CHECK(!sees || state[1] >= 1, "L %g, row at %lld, split %lld", (double)state[1],
                  (long long)p, (long long)split);
            for (int i = 1; !sees && i < 6; i++)
                CHECK_BITS(state[i], 0.0f, "element %d, row at %lld, split %lld", i, (long long)p,
                           (long long)split);
        }
        painted_free(states, piece_size(&x, here));
    }
    job_free(&x);
}

/* ---- other splits are not read ---- */

/* Keys, values and entries of other splits lie on pages that nobody can read: a split of 1024 rows
 * of K of 16 f32, of V of 32 and of entries are 16, 32 and 1 pages of 4096 bytes. */
TEST(memory_of_other_splits_is_not_touched)
{
    enum { N = 4, DK = 16, DV = 32, T = N * TL_ATTN_SPLIT };
    const size_t k_split = TL_ATTN_SPLIT * DK * sizeof(float),
                 v_split = TL_ATTN_SPLIT * DV * sizeof(float);
    const size_t table_split = TL_ATTN_SPLIT * sizeof(uint32_t),
                 page = (size_t)sysconf(_SC_PAGESIZE);
    if (table_split % page != 0)
        return; /* on larger pages, poison and garbage have to do (all other tests) */
    char *k = guarded(N * k_split), *v = guarded(N * v_split), *table = guarded(N * table_split);
    uint64_t rng = 9;
    float q[2 * DK], whole[N][2 + DV], one[2][2 + DV];
    for (int i = 0; i < 2 * DK; i++)
        q[i] = rng_unit(&rng);
    for (int i = 0; i < T * DV; i++)
        ((float *)(void *)v)[i] = rng_unit(&rng), ((float *)(void *)k)[i / 2] = rng_unit(&rng);
    for (uint32_t i = 0; i < T; i++)
        ((uint32_t *)(void *)table)[i] = i;
    const tl_kv_view view = {.size = sizeof view,
                             .k = k,
                             .v = v,
                             .dtype = TL_F32,
                             .n_blocks = T,
                             .block_tokens = 1,
                             .n_kv_heads = 1,
                             .head_dim_k = DK,
                             .head_dim_v = DV,
                             .k_block_stride = DK,
                             .v_block_stride = DV,
                             .k_head_stride = DK,
                             .k_token_stride = DK,
                             .v_head_stride = DV,
                             .v_token_stride = DV};
    const int32_t ctx = T;
    tl_paged_attn_args args = {.size = sizeof args,
                               .view = &view,
                               .q = q,
                               .q_token_stride = DK,
                               .q_head_stride = DK,
                               .B = 1,
                               .H = 1,
                               .ctx_lens = &ctx,
                               .block_tables = (const uint32_t *)(void *)table,
                               .table_stride = T,
                               .scale = 1};
    CHECK_STATUS(tl_paged_attn_states_f32(&args, 0, N, whole[0]), TL_OK);
    for (int isa = 0; isa_select(isa); isa++)
        for (int split = 0; split < N; split++) {
            mprotect(k, N * k_split, PROT_NONE), mprotect(v, N * v_split, PROT_NONE),
                mprotect(table, N * table_split, PROT_NONE);
            const size_t n = (size_t)split;
            mprotect(k + n * k_split, k_split, PROT_READ),
                mprotect(v + n * v_split, v_split, PROT_READ);
            mprotect(table + n * table_split, table_split, PROT_READ);
            args.tp = split % 2 ? threads(3) : NULL;
            CHECK_STATUS(tl_paged_attn_states_f32(&args, split, 1, one[0]), TL_OK);
            CHECK_SAME(one[0], whole[split], 2 + DV, "%s, split %d", tl_isa_name(), split);
        }
    mprotect(k, N * k_split, PROT_NONE), mprotect(v, N * v_split, PROT_NONE),
        mprotect(table, N * table_split, PROT_NONE);
    CHECK_STATUS(tl_paged_attn_states_f32(&args, N, 2, one[0]), TL_OK); /* nothing of it is there */
    CHECK(one[0][0] == -INFINITY && one[1][0] == -INFINITY && one[1][1] == 0, "m %g and %g",
          (double)one[0][0], (double)one[1][0]);
    guarded_free(k, N * k_split), guarded_free(v, N * v_split),
        guarded_free(table, N * table_split);
}

/* out, its strides, lse, sink_logits and the workspace may be anything: no address at all, or the
 * states themselves. */
TEST(members_that_are_not_used_are_not_looked_at)
{
    const struct job_spec spec = {.B = 2,
                                  .H = 4,
                                  .Hkv = 2,
                                  .Dk = 8,
                                  .q_len = {3, 1},
                                  .ctx = {1030, 20},
                                  .dtype = TL_F16,
                                  .sinks = true,
                                  .seed = 130};
    struct job x = job_make(&spec);
    float *states = painted(piece_size(&x, two));
    static const int64_t strides[] = {0, -1, INT64_MIN, INT64_MAX, 1};
    show_all(&x);
    for (int i = 0; i < 5; i++) {
        repaint(states, piece_size(&x, two));
        x.args.out = i % 2    ? NULL
                     : i == 4 ? states
                              : (float *)16,
        x.args.lse = i % 2 ? (float *)16 : states;
        x.args.sink_logits = i % 2 ? (const float *)16 : states;
        x.args.out_token_stride = strides[i], x.args.out_head_stride = strides[4 - i];
        x.args.workspace = i % 2 ? (void *)13 : states,
        x.args.workspace_bytes = i < 2 ? SIZE_MAX : 4;
        CHECK_STATUS(states_call(&x, two, states, NULL), TL_OK);
        check_states(&x, states, two);
    }
    painted_free(states, piece_size(&x, two));
    job_free(&x);
}

/* ---- numbers that are none ---- */

/* One score is NaN or +inf, in each split in turn: the row that sees it is NaN whatever the
 * division, the others not. */
TEST(nan_and_infinite_scores_reach_the_merged_row)
{
    static const float bad[] = {NAN, INFINITY};
    static const int64_t where[] = {0, 1023, 1024, 2047, 2048, 2099};
    for (int i = 0; i < 12; i++) {
        const struct job_spec spec = {.B = 1,
                                      .H = 2,
                                      .Hkv = 2,
                                      .Dk = 3,
                                      .Dv = 18,
                                      .window = i % 4 == 3 ? 1090 : 0,
                                      .q_len = {2},
                                      .ctx = {2100},
                                      .dtype = TL_F32,
                                      .sinks = i % 3 == 1,
                                      .seed = 140 + (uint64_t)i};
        struct job x = job_make(&spec);
        const int64_t j = where[i / 2];
        for (int row = 0; row < 2; row++)
            x.q[row * 6 + 2] = 1; /* of head 0 */
        if (j >= first_needed(&x, 0))
            x.k[0][j * 3 + 2] = bad[i % 2]; /* head 0 alone */
        free_wanted(&x);
        make_wanted(&x);
        for (int64_t at = 0; at < 4; at++) {
            const int64_t p = 2098 + at / 2;
            const bool none = at % 2 == 0 && j <= p && j >= ref_first_seen(p, spec.window);
            CHECK(isnan(x.want_lse[at]) == none, "lse %g of row %lld, bad at %lld",
                  (double)x.want_lse[at], (long long)at, (long long)j);
            for (int64_t d = 0; none && d < 18; d++)
                CHECK_BITS(x.want[at * 18 + d], float_of(TL_NAN_BITS), "row %lld, bad at %lld",
                           (long long)at, (long long)j);
        }
        check_divisions(&x);
        job_free(&x);
    }
}

/* The same in each stretch, at its ends and inside; and a stretch of nothing but -inf is as if it
 * were not there. */
TEST(special_scores_in_one_stretch_reach_the_row)
{
    static const float bad[] = {NAN, INFINITY, -INFINITY};
    static const int64_t where[] = {0, 16383, 16384, 20000, 32767, 32768, 32999};
    for (int i = 0; i < 21; i++) {
        const struct job_spec spec = {.B = 1,
                                      .H = 2,
                                      .Hkv = 2,
                                      .Dk = 2,
                                      .Dv = 3,
                                      .block_tokens = 100,
                                      .window = i % 4 == 3 ? 17000 : 0,
                                      .q_len = {1},
                                      .ctx = {33000},
                                      .dtype = TL_F32,
                                      .sinks = i % 3 == 1,
                                      .seed = 470 + (uint64_t)i};
        struct job x = job_make(&spec);
        const int64_t j = where[i / 3], stretch = j / TL_ATTN_STRETCH * TL_ATTN_STRETCH;
        const bool all = bad[i % 3] < 0; /* -inf: the whole stretch */
        x.q[1] = 1; /* of head 0 */
        for (int64_t at = all ? stretch : j; at < (all ? stretch + TL_ATTN_STRETCH : j + 1); at++)
            if (at >= first_needed(&x, 0) && at < 33000)
                x.k[0][at * 2 + 1] = bad[i % 3];
        free_wanted(&x);
        make_wanted(&x);
        const bool none = !all && j >= first_needed(&x, 0);
        CHECK(isnan(x.want_lse[0]) == none && !isnan(x.want_lse[1]), "lse %g and %g, %g at %lld",
              (double)x.want_lse[0], (double)x.want_lse[1], (double)bad[i % 3], (long long)j);
        check_division(&x, (const int64_t[]){-3}, 1);
        check_division(&x, (const int64_t[]){7, 9, -1, 1}, 4);
        job_free(&x);
    }
}

/* Infinities and NaN in K and V at random. States hold the same bits on every instruction set, NaN
 * included. */
TEST(states_of_special_numbers_have_the_same_bits_everywhere)
{
    for (uint64_t seed = 0; seed < 4; seed++) {
        const struct job_spec spec = {.B = 2,
                                      .H = 4,
                                      .Hkv = 2,
                                      .Dk = 5,
                                      .Dv = 21,
                                      .window = seed % 2 ? 60 : 0,
                                      .q_len = {3, 1},
                                      .ctx = {1060, 90},
                                      .dtype = seed % 2 ? TL_F16 : TL_F32,
                                      .data = DATA_SPECIAL,
                                      .seed = 160 + seed};
        struct job x = job_make(&spec);
        float *first = NULL;
        for (int i = 0; isa_select(i); i++) {
            float *states = states_run(&x, two, i % 2 ? threads(2) : NULL);
            if (first)
                CHECK_SAME(states, first, piece_size(&x, two), "%s for the first: %s",
                           tl_isa_name(), describe(&x));
            if (first)
                painted_free(states, piece_size(&x, two));
            else
                first = states;
        }
        painted_free(first, piece_size(&x, two));
        job_free(&x);
    }
}

/* Keys of -inf: the row sees them and all their weights are 0. As if it saw nothing. */
TEST(rows_whose_scores_are_all_minus_infinity_are_empty)
{
    for (int sinks = 0; sinks < 2; sinks++) {
        const struct job_spec spec = {.B = 1,
                                      .H = 2,
                                      .Hkv = 1,
                                      .Dk = 1,
                                      .Dv = 3,
                                      .q_len = {2},
                                      .ctx = {1030},
                                      .dtype = TL_F32,
                                      .sinks = sinks,
                                      .seed = 170};
        struct job x = job_make(&spec);
        for (int64_t j = 0; j < 1030; j++)
            x.k[0][j] = -INFINITY;
        for (int64_t i = 0; i < 4; i++)
            x.q[i] = 1;
        free_wanted(&x);
        make_wanted(&x);
        for (int64_t i = 0; i < 8; i++)
            CHECK(x.states[i * 5] == -INFINITY && x.states[i * 5 + 1] == 0, "m %g",
                  (double)x.states[i * 5]);
        for (int64_t i = 0; i < 4; i++)
            CHECK_BITS(x.want_lse[i], sinks ? x.sink_logits[i % 2] : -INFINITY, "row %lld",
                       (long long)i);
        check_divisions(&x);
        job_free(&x);
    }
}

/* ---- merging by hand ---- */

/* S random states, some empty, in parts of the given sizes. `odd`: -0, infinities and NaN
 * among them. */
struct heap {
    int64_t n_rows, H, dim, S;
    float *states; /* [n_rows][S][2 + dim] */
    float *sinks;
    const int8_t *spans; /* [S] splits of each state, 1 or 16; NULL: splits */
};

static void random_state(float *state, int64_t dim, uint64_t *rng, bool odd)
{
    static const float odds[] = {-0.0f, INFINITY, NAN, -INFINITY, 0x1p-149f, -0x1p-140f, FLT_MAX};
    const bool empty = rng_below(rng, 3) == 0;
    state[0] = empty ? -INFINITY : 20 * rng_unit(rng),
    state[1] = empty ? 0 : 1 + 500 * fabsf(rng_unit(rng));
    for (int64_t d = 0; d < dim; d++)
        state[2 + d] = empty ? 0 : rng_below(rng, 4) ? state[1] * rng_unit(rng) : -0.0f;
    if (odd && !empty && rng_below(rng, 3) == 0)
        state[2 + rng_below(rng, dim)] = odds[rng_below(rng, 7)];
    if (odd && !empty && rng_below(rng, 12) == 0)
        state[0] = rng_below(rng, 2) ? NAN : INFINITY, state[1] = NAN; /* as such scores leave it */
}

static struct heap heap_make(int64_t n_rows, int64_t H, int64_t dim, int64_t S, bool odd,
                             uint64_t seed)
{
    uint64_t rng = seed * 31 + 5;
    struct heap x = {
        n_rows, H,   dim, S, floats(n_rows * S * (2 + dim)), guarded((size_t)H * sizeof(float)),
        NULL};
    for (int64_t i = 0; i < n_rows * S; i++)
        random_state(x.states + i * (2 + dim), dim, &rng, odd);
    for (int64_t h = 0; h < H; h++)
        x.sinks[h] = h % 4 == 3          ? -INFINITY
                     : odd && h % 4 == 2 ? (h % 8 == 2 ? NAN : INFINITY)
                                         : 20 * rng_unit(&rng);
    return x;
}

static void heap_free(struct heap *x)
{
    free(x->states), guarded_free(x->sinks, (size_t)x->H * sizeof(float));
}

/* Splits first .. first + n - 1 of every row, in a buffer of their own that ends at an unmapped
 * page. */
static float *cut_part(const struct heap *x, int64_t first, int64_t n)
{
    const int64_t width = 2 + x->dim;
    float *part = guarded((size_t)(x->n_rows * n * width) * sizeof *part);
    for (int64_t row = 0; row < x->n_rows; row++)
        memcpy(part + row * n * width, x->states + (row * x->S + first) * width,
               (size_t)(n * width) * sizeof *part);
    return part;
}

static void want_row(const struct heap *x, int64_t row, const float *sink, float *out, float *m,
                     float *L)
{
    const int64_t width = 2 + x->dim;
    float *buffer = floats(2 * x->dim), *copy = floats(width);
    struct ref_state whole = {-INFINITY, 0, buffer}, stretch = {-INFINITY, 0, buffer + x->dim};
    for (int64_t i = 0, split = 0; i < x->S; i++) {
        memcpy(copy, x->states + (row * x->S + i) * width, (size_t)width * sizeof *copy);
        const struct ref_state next = {copy[0], copy[1], copy + 2};
        ref_merge(&stretch, &next, x->dim);
        split += x->spans ? x->spans[i] : 1;
        if (split % SPLITS_IN_STRETCH == 0 || i == x->S - 1) {
            ref_merge(&whole, &stretch, x->dim);
            stretch.m = -INFINITY, stretch.L = 0;
        }
    }
    if (sink && *sink != -INFINITY)
        ref_sink(&whole, *sink, x->dim);
    ref_finish(&whole, x->dim, out);
    *m = whole.m, *L = whole.L;
    free(buffer), free(copy);
}

/* Parts of sizes[0 .. n-1] states, all of one part of one span. */
static void check_heap(const struct heap *x, const int64_t *sizes, int n, bool sinks, tl_pool *tp)
{
    tl_attn_part parts[MAX_PIECES];
    float *out = painted(x->n_rows * x->dim), *lse = painted(x->n_rows), *want = floats(x->dim), m,
          L;
    for (int64_t i = 0, first = 0, split = 0; i < n; first += sizes[i], i++) {
        const int64_t per = x->spans ? x->spans[first] : 1;
        parts[i] = (tl_attn_part){cut_part(x, first, sizes[i]), split, sizes[i] * per,
                                  per == 1 && i % 2 ? 0 : per * TL_ATTN_SPLIT};
        split += sizes[i] * per;
    }
    CHECK_STATUS(
        tl_attn_merge_f32(parts, n, x->n_rows, x->H, x->dim, sinks ? x->sinks : NULL, out, lse, tp),
        TL_OK);
    CHECK(rim_intact(out) && rim_intact(lse), "the rim was written");
    for (int64_t row = 0; row < x->n_rows; row++) {
        want_row(x, row, sinks ? x->sinks + row % x->H : NULL, want, &m, &L);
        CHECK_SAME(out + row * x->dim, want, x->dim,
                   "%s: row %lld of %lld, H %lld, dim %lld, %d parts of %lld states", tl_isa_name(),
                   (long long)row, (long long)x->n_rows, (long long)x->H, (long long)x->dim, n,
                   (long long)x->S);
        CHECK(lse_close(lse[row], m, L), "%s: lse of row %lld is %.9g for %.9g + log(%.9g)",
              tl_isa_name(), (long long)row, (double)lse[row], (double)m, (double)L);
    }
    for (int i = 0; i < n; i++)
        guarded_free((float *)(uintptr_t)parts[i].states,
                     (size_t)(x->n_rows * sizes[i] * (2 + x->dim)) * sizeof(float));
    painted_free(out, x->n_rows * x->dim), painted_free(lse, x->n_rows), free(want);
}

TEST(states_by_hand_merge_left_to_right)
{
    static const int64_t dims[] = {1, 3, 15, 16, 17, 40, 64, 130}, heads[] = {1, 2, 6, 9};
    static const int64_t sizes[][5] = {{5}, {1, 1, 1, 1, 1}, {2, 2, 1}, {1, 4}, {4, 1}};
    static const int n[] = {1, 5, 3, 2, 2};
    for (uint64_t seed = 0; seed < 32; seed++) {
        const int64_t H = heads[seed % 4];
        struct heap x =
            heap_make(H * (1 + (int64_t)seed % 5), H, dims[seed % 8], 5, seed % 2, seed);
        for (int isa = 0; isa_select(isa); isa++)
            for (int i = 0; i < 5; i++)
                check_heap(&x, sizes[i], n[i], (seed + (uint64_t)i) % 2,
                           i % 2 ? threads(1 + i) : NULL);
        heap_free(&x);
    }
}

/* Splits of several stretches, and stretches among them. */
TEST(states_by_hand_merge_within_stretches_first)
{
    enum { S = 40 }; /* 16 splits, a stretch, 15 splits and one more, two stretches, 5 splits */
    int8_t mixed[S];
    for (int i = 0; i < S; i++)
        mixed[i] = i == 16 || i == 33 || i == 34 ? SPLITS_IN_STRETCH : 1;
    static const int64_t mixed_sizes[][7] = {{16, 1, 16, 2, 5}, {7, 9, 1, 15, 1, 2, 5}};
    static const int64_t sizes[][5] = {{40}, {16, 16, 8}, {15, 2, 23}, {1, 14, 2, 15, 8}};
    static const int n_mixed[] = {5, 7}, n[] = {1, 3, 3, 5};
    for (uint64_t seed = 0; seed < 12; seed++) {
        struct heap x = heap_make(6, 3, seed % 3 ? 5 : 40, S, seed % 2, 300 + seed);
        for (int isa = 0; isa_select(isa); isa++)
            for (int i = 0; i < 4; i++) {
                tl_pool *tp = i % 2 ? threads(1 + i) : NULL;
                x.spans = NULL;
                check_heap(&x, sizes[i], n[i], seed % 2, tp);
                x.spans = mixed;
                check_heap(&x, mixed_sizes[i % 2], n_mixed[i % 2], seed % 2, tp);
            }
        heap_free(&x);
    }
}

/* A stretch with nothing in it is no state to be merged, in splits or as a stretch: -0 stays -0. */
TEST(an_empty_stretch_takes_no_part)
{
    enum { S = 48 };
    for (int empty = 0; empty < 3; empty++) {
        float splits[S][3], stretches[3][3], out[3], lse[3];
        for (int i = 0; i < S; i++)
            splits[i][0] = -INFINITY, splits[i][1] = NAN, splits[i][2] = 7;
        for (int k = 0; k < 3; k++) {
            float *at = splits[16 * k + 5 * k];
            if (k != empty)
                at[0] = (float)k, at[1] = 1, at[2] = -0.0f;
            memcpy(stretches[k], at, sizeof stretches[k]);
        }
        const tl_attn_part all[] = {{splits[0], 0, S, 0}, {stretches[0], 0, S, TL_ATTN_STRETCH}};
        const tl_attn_part both[] = {{splits[0], 0, 16, 0},
                                     {stretches[1], 16, 32, TL_ATTN_STRETCH}};
        for (int isa = 0; isa_select(isa); isa++) {
            CHECK_STATUS(tl_attn_merge_f32(all, 1, 1, 1, 1, NULL, out, lse, NULL), TL_OK);
            CHECK_STATUS(tl_attn_merge_f32(all + 1, 1, 1, 1, 1, NULL, out + 1, lse + 1, NULL),
                         TL_OK);
            CHECK_STATUS(tl_attn_merge_f32(both, 2, 1, 1, 1, NULL, out + 2, lse + 2, NULL), TL_OK);
            for (int i = 0; i < 3; i++) {
                CHECK_BITS(out[i], -0.0f, "%s, empty %d, division %d", tl_isa_name(), empty, i);
                CHECK_BITS(lse[i], lse[0], "%s, empty %d, division %d", tl_isa_name(), empty, i);
            }
        }
    }
}

/* What stands behind m = -inf is not read as a number: an empty state joins nothing, whoever wrote
 * it. */
TEST(an_empty_state_takes_no_part)
{
    static const float rest[] = {0, -0.0f, 7, NAN, INFINITY};
    for (int place = 0; place < 3; place++)
        for (int i = 0; i < 5; i++)
            for (int isa = 0; isa_select(isa); isa++) {
                float states[3][4] = {{2, 3, -0.0f, 6}, {1, 2, -0.0f, 4}, {5, 1, -0.0f, 1}},
                      alone[2], with[2], lse[2];
                for (int e = 0; e < 4; e++)
                    states[place][e] = e ? rest[i] : -INFINITY;
                float others[2][4];
                memcpy(others[0], states[place == 0], sizeof others[0]),
                    memcpy(others[1], states[place == 2 ? 1 : 2], sizeof others[1]);
                const tl_attn_part all = {states[0], 0, 3, 0},
                                   rest_of = {others[0], 0, 2, 0};
                CHECK_STATUS(tl_attn_merge_f32(&rest_of, 1, 1, 1, 2, NULL, alone, lse, NULL),
                             TL_OK);
                CHECK_STATUS(tl_attn_merge_f32(&all, 1, 1, 1, 2, NULL, with, lse + 1, NULL), TL_OK);
                CHECK_BITS(alone[0], -0.0f, "place %d", place); /* fma(x, -0, y * -0) */
                CHECK_SAME(with, alone, 2, "%s: %g behind -inf at %d", tl_isa_name(),
                           (double)rest[i], place);
                CHECK_BITS(lse[1], lse[0], "%s: %g behind -inf at %d", tl_isa_name(),
                           (double)rest[i], place);
            }
}

/* A NaN in a state may have any bits; in what becomes of it there is one. */
TEST(a_nan_of_any_bits_merges_to_the_one)
{
    const uint32_t nans[] = {0x7FC01234, 0xFFC00001, 0x7F800001, 0xFFFFFFFF};
    for (int i = 0; i < 4; i++)
        for (int at = 0; at < 3; at++) {
            float states[] = {1, 2, 3}, out = 0, lse = 0;
            states[at] = float_of(nans[i]);
            const tl_attn_part part = {states, 0, 1, 0};
            CHECK_STATUS(tl_attn_merge_f32(&part, 1, 1, 1, 1, NULL, &out, &lse, NULL), TL_OK);
            CHECK_BITS(at == 0 ? lse : out, float_of(TL_NAN_BITS), "float %d is %08x", at, nans[i]);
            CHECK_BITS(at == 1 ? lse : out, at == 0 ? out : float_of(TL_NAN_BITS),
                       "float %d is %08x", at, nans[i]);
        }
}

/* Nothing in any split: out = +0 and lse = -inf; with a sink, lse is the sink, and a sink of NaN or
 * +inf is NaN. */
TEST(rows_of_empty_states)
{
    static const float sinks[] = {0, -INFINITY, 2.5f, NAN, INFINITY, -100};
    float states[6 * 2][5] = {{0}}, out[6 * 3], lse[6];
    for (int i = 0; i < 12; i++)
        states[i][0] = -INFINITY;
    for (int isa = 0; isa_select(isa); isa++)
        for (int cut = 0; cut < 2; cut++)
            for (int with = 0; with < 2; with++) {
                const tl_attn_part one[] = {{states[0], 0, 2, 0}},
                                   halves[] = {{states[0], 0, 1, 0},
                                                {states[6], 1, 1, TL_ATTN_SPLIT}};
                CHECK_STATUS(tl_attn_merge_f32(cut ? halves : one, cut + 1, 6, 6, 3,
                                               with ? sinks : NULL, out, lse, NULL),
                             TL_OK);
                for (int h = 0; h < 6; h++) {
                    const bool none = with && (h == 3 || h == 4);
                    CHECK_BITS(lse[h],
                               none   ? float_of(TL_NAN_BITS)
                               : with ? sinks[h]
                                      : -INFINITY,
                               "%s, sink %g", tl_isa_name(), (double)sinks[h]);
                    for (int d = 0; d < 3; d++)
                        CHECK_BITS(out[h * 3 + d], none ? float_of(TL_NAN_BITS) : 0, "%s, sink %g",
                                   tl_isa_name(), (double)sinks[h]);
                }
            }
}

TEST(merges_of_no_rows_are_in_order)
{
    float word = float_of(PAINT);
    const tl_attn_part part = {&word, 0, 1, 0}, null = {NULL, 0, 1, 0};
    CHECK_STATUS(tl_attn_merge_f32(&part, 1, 0, 3, 4, NULL, &word, &word, NULL), TL_OK);
    CHECK_STATUS(tl_attn_merge_f32(&null, 1, 0, 1, 4, NULL, NULL, NULL, threads(2)), TL_OK);
    CHECK_BITS(word, float_of(PAINT), "written");
}

TEST(steps_of_no_rows_leave_nothing)
{
    const struct job_spec spec = {
        .B = 2, .H = 2, .Hkv = 1, .Dk = 4, .ctx = {1030, 9}, .dtype = TL_F16, .seed = 180};
    struct job x = job_make(&spec);
    float *states = painted(8);
    show(&x, 5, 1); /* nothing */
    CHECK_STATUS(states_call(&x, two, states, threads(2)), TL_OK);
    x.args.B = 0;
    CHECK_STATUS(states_call(&x, two, states, NULL), TL_OK);
    CHECK(all_paint(states, 8) && rim_intact(states), "states were written");
    painted_free(states, 8);
    job_free(&x);
}

/* ---- what a call leaves alone ---- */

TEST(nothing_is_allocated_and_no_mode_of_the_caller_reaches_the_bits)
{
    static const int modes[] = {FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
    const struct job_spec spec = {.B = 2,
                                  .H = 4,
                                  .Hkv = 2,
                                  .Dk = 24,
                                  .Dv = 40,
                                  .q_len = {5, 1},
                                  .ctx = {1040, 30},
                                  .dtype = TL_F16,
                                  .softcap = 2,
                                  .alibi = true,
                                  .sinks = true,
                                  .seed = 190};
    struct job x = job_make(&spec);
    float *states = painted(piece_size(&x, two)), *out = painted(rows_of(&x) * 40),
          *lse = painted(rows_of(&x));
    show_all(&x);
    for (int i = 0; i < 8; i++) {
        const tl_attn_part part = {states, 0, 2, 0};
        struct hook refuse;
        repaint(states, piece_size(&x, two)), repaint(out, rows_of(&x) * 40),
            repaint(lse, rows_of(&x));
        tl_pool *tp = i < 4 ? NULL : threads(3);
        tl_set_last_error("kept");
        hook_install(&refuse, 1);
        fesetround(modes[i % 4]);
        const tl_status got = states_call(&x, two, states, tp);
        const tl_status merged =
            tl_attn_merge_f32(&part, 1, rows_of(&x), 4, 40, x.sink_logits, out, lse, tp);
        const int after = fegetround();
        fesetround(FE_TONEAREST);
        hook_remove();
        CHECK(got == TL_OK && merged == TL_OK && refuse.calls == 0,
              "%s, %s after %ld calls of the hook", tl_status_str(got), tl_status_str(merged),
              refuse.calls);
        CHECK(after == modes[i % 4], "mode %d after %d", after, modes[i % 4]);
        CHECK(strcmp(tl_last_error(), "kept") == 0, "success set the slot: %s", tl_last_error());
        check_states(&x, states, two);
        CHECK_SAME(out, x.want, rows_of(&x) * 40, "mode %d", modes[i % 4]);
        CHECK_SAME(lse, x.want_lse, rows_of(&x), "mode %d", modes[i % 4]);
    }
    painted_free(states, piece_size(&x, two)), painted_free(out, rows_of(&x) * 40),
        painted_free(lse, rows_of(&x));
    job_free(&x);
}

/* ---- states: what is refused ---- */

#define NO INT64_C(-77777) /* no number */

/* A step in order until a fault is put in: rows 3, 1, 0 and 2 of four sequences. All that it points
 * to lies in one memory, so that a test sees every write. */
enum {
    BAD_B = 4,
    BAD_H = 4,
    BAD_HKV = 2,
    BAD_DK = 5,
    BAD_DV = 3,
    BAD_TOKENS = 256,
    BAD_BLOCKS = 20,
    BAD_TABLE = 13,
    BAD_ROWS = 6,
    BAD_N = 2,
    BAD_STATES = BAD_ROWS * BAD_H * BAD_N * (2 + BAD_DV),
    BAD_K = BAD_BLOCKS * BAD_HKV * BAD_TOKENS * BAD_DK,
    BAD_V = BAD_BLOCKS * BAD_HKV * BAD_TOKENS * BAD_DV,
};
/* every member is of words of four bytes; the spaces take states that are moved */
struct bad_memory {
    float front[BAD_STATES], q[BAD_ROWS * BAD_H * BAD_DK], space_1[BAD_STATES], k[BAD_K],
        space_2[BAD_STATES], v[BAD_V];
    float space_3[BAD_STATES], slopes[BAD_H], space_4[BAD_STATES];
    int32_t cu[BAD_B + 1];
    float space_5[BAD_STATES];
    int32_t ctx[BAD_B];
    float space_6[BAD_STATES];
    uint32_t tables[BAD_B * BAD_TABLE];
    float space_7[BAD_STATES], states[BAD_STATES], back[BAD_STATES];
};

struct bad {
    struct bad_memory *m;
    tl_kv_view view;
    tl_paged_attn_args args;
    int64_t first, n;
    float *states;
    bool no_args, inside; /* called with NULL; from inside a range of tp */
};

static void bad_fresh(struct bad *x, struct bad_memory *m, tl_pool *tp)
{
    /* 13, 4, no and 13 entries */
    static const int32_t cu[] = {0, 3, 4, 4, 6}, ctx[] = {3200, 1024, 9, 3328};
    repaint((float *)m, (int64_t)(sizeof *m / sizeof(float)));
    for (int i = 0; i < BAD_ROWS * BAD_H * BAD_DK; i++)
        m->q[i] = 0.25f * (float)(i % 7);
    for (int i = 0; i < BAD_K; i++)
        m->k[i] = 0.25f * (float)(i % 5);
    for (int i = 0; i < BAD_V; i++)
        m->v[i] = 0.25f * (float)(i % 9);
    for (int i = 0; i < BAD_H; i++)
        m->slopes[i] = 0.5f;
    memcpy(m->cu, cu, sizeof cu), memcpy(m->ctx, ctx, sizeof ctx);
    for (uint32_t i = 0; i < BAD_B * BAD_TABLE; i++)
        m->tables[i] = i % BAD_BLOCKS;
    *x = (struct bad){.m = m, .first = 1, .n = BAD_N, .states = m->states};
    x->view = (tl_kv_view){.size = sizeof(tl_kv_view),
                        .k = m->k,
                           .v = m->v,
                           .dtype = TL_F32,
                           .n_blocks = BAD_BLOCKS,
                           .block_tokens = BAD_TOKENS,
                           .n_kv_heads = BAD_HKV,
                           .head_dim_k = BAD_DK,
                           .head_dim_v = BAD_DV,
                           .k_block_stride = BAD_HKV * BAD_TOKENS * BAD_DK,
                           .k_head_stride = BAD_TOKENS * BAD_DK,
                           .k_token_stride = BAD_DK,
                           .v_block_stride = BAD_HKV * BAD_TOKENS * BAD_DV,
                           .v_head_stride = BAD_TOKENS * BAD_DV,
                           .v_token_stride = BAD_DV};
    x->args = (tl_paged_attn_args){.size = sizeof x->args,
                                   .view = &x->view,
                                   .q = m->q,
                                   .q_token_stride = BAD_H * BAD_DK,
                                   .q_head_stride = BAD_DK,
                                   .B = BAD_B,
                                   .H = BAD_H,
                                   .cu_seqlens_q = m->cu,
                                   .ctx_lens = m->ctx,
                                   .block_tables = m->tables,
                                   .table_stride = BAD_TABLE,
                                   .alibi_slopes = m->slopes,
                                   .scale = 0.5f,
                                   .logits_softcap = 3,
                                   .tp = tp};
}

static tl_status bad_call(const void *bad)
{
    const struct bad *x = bad;
    return tl_paged_attn_states_f32(x->no_args ? NULL : &x->args, x->first, x->n, x->states);
}

/* A call from inside a range of a pool, its message brought back to this thread's slot. */
/* The faults, one a line: name, status, what it does, a word and the numbers that the message has
 * to hold. */
#define A x->args
#define V x->view
#define M x->m
#define WORDS(p) ((float *)(void *)(p))
#define FAULTS(F)                                                                                  \
    F(null_args, TL_EINVAL, x->no_args = true, "args", NO, NO, NO)                                 \
    F(size_0, TL_EINVAL, A.size = 0, "size", 0, NO, NO)                                            \
    F(size_of_a_later_version, TL_EINVAL, A.size += 8, "size", sizeof A + 8, NO, NO)               \
    F(null_view, TL_EINVAL, A.view = NULL, "view", NO, NO, NO)                                     \
    F(null_k, TL_EINVAL, V.k = NULL, "k", NO, NO, NO)                                              \
    F(null_v, TL_EINVAL, V.v = NULL, "v", NO, NO, NO)                                              \
    F(null_q, TL_EINVAL, A.q = NULL, "q", NO, NO, NO)                                              \
    F(null_ctx, TL_EINVAL, A.ctx_lens = NULL, "ctx_lens", NO, NO, NO)                              \
    F(null_tables, TL_EINVAL, A.block_tables = NULL, "block_tables", NO, NO, NO)                   \
    F(null_states, TL_EINVAL, x->states = NULL, "states", NO, NO, NO)                              \
    F(dtype_f8, TL_EINVAL, V.dtype = TL_F8_E4M3, "dtype", TL_F8_E4M3, NO, NO)                      \
    F(blocks_of_0, TL_EINVAL, V.block_tokens = 0, "block_tokens", 0, NO, NO)                       \
    F(no_kv_heads, TL_EINVAL, V.n_kv_heads = 0, "n_kv_heads", 0, NO, NO)                           \
    F(no_dim_k, TL_EINVAL, V.head_dim_k = 0, "head_dim_k", 0, NO, NO)                              \
    F(negative_dim_v, TL_EINVAL, V.head_dim_v = -1, "head_dim_v", -1, NO, NO)                      \
    F(negative_n_blocks, TL_EINVAL, V.n_blocks = -1, "n_blocks", -1, NO, NO)                       \
    F(v_token_back, TL_EINVAL, V.v_token_stride = -3, "stride", -3, NO, NO)                        \
    F(k_tokens_overlap, TL_EINVAL, V.k_token_stride = 4, "k", 4, NO, NO)                           \
    F(impossible_view, TL_EINVAL, V.n_blocks = INT64_MAX, "view", NO, NO, NO)                      \
    F(negative_B, TL_EINVAL, A.B = -1, "B", -1, NO, NO)                                            \
    F(no_entries, TL_EINVAL, A.table_stride = 0, "table_stride", 0, NO, NO)                        \
    F(scale_nan, TL_EINVAL, A.scale = NAN, "scale", NO, NO, NO)                                    \
    F(softcap_negative, TL_EINVAL, A.logits_softcap = -30, "softcap", -30, NO, NO)                 \
    F(softcap_infinite, TL_EINVAL, A.logits_softcap = INFINITY, "softcap", NO, NO, NO)             \
    F(H_zero, TL_ESHAPE, A.H = 0, "H", 0, NO, NO)                                                  \
    F(H_uneven, TL_ESHAPE, A.H = 3, "H", 3, BAD_HKV, NO)                                           \
    F(impossible_B, TL_EINVAL, A.B = INT64_MAX, "B", INT64_MAX, NO, NO)                            \
    F(impossible_table_stride, TL_EINVAL, A.table_stride = INT64_MAX, "tables", INT64_MAX, NO, NO) \
    F(impossible_q_stride, TL_EINVAL, A.q_token_stride = INT64_MAX, "q", INT64_MAX, NO, NO)        \
    F(first_below_0, TL_EINVAL, x->first = -1, "first_split", -1, NO, NO)                          \
    F(first_smallest, TL_EINVAL, x->first = INT64_MIN, "first_split", INT64_MIN, NO, NO)           \
    F(no_splits, TL_EINVAL, x->n = 0, "n_splits", 0, NO, NO)                                       \
    F(fewer_splits, TL_EINVAL, x->n = INT64_MIN, "n_splits", INT64_MIN, NO, NO)                    \
    F(last_past_the_end, TL_EINVAL, x->first = INT64_MAX, "split", INT64_MAX, BAD_N, NO)           \
    F(range_past_the_end, TL_EINVAL, x->n = INT64_MAX, "split", 1, INT64_MAX, NO)                  \
    F(span_of_nothing_known, TL_EINVAL, A.state_span = 2048, "state_span", 2048, NO, NO)           \
    F(span_below_0, TL_EINVAL, A.state_span = -1024, "state_span", -1024, NO, NO)                  \
    F(span_largest, TL_EINVAL, A.state_span = INT64_MAX, "state_span", INT64_MAX, NO, NO)          \
    F(stretch_from_split_1, TL_EINVAL, A.state_span = TL_ATTN_STRETCH;                             \
      x->n = 16, "first_split", 1, NO, NO)                                                         \
    F(stretch_from_split_15, TL_EINVAL, A.state_span = TL_ATTN_STRETCH;                            \
      x->first = 15; x->n = 16, "first_split", 15, NO, NO)                                         \
    F(stretch_of_2_splits, TL_EINVAL, A.state_span = TL_ATTN_STRETCH;                              \
      x->first = 0, "n_splits", 2, NO, NO)                                                         \
    F(stretch_and_a_half, TL_EINVAL, A.state_span = TL_ATTN_STRETCH;                               \
      x->first = 16; x->n = 24, "n_splits", 24, NO, NO)                                            \
    F(first_block_below_0, TL_EINVAL, A.first_block = -1, "first_block", -1, NO, NO)               \
    F(first_block_smallest, TL_EINVAL, A.first_block = INT64_MIN, "first_block", INT64_MIN, NO,    \
      NO)                                                                                          \
    F(first_block_largest, TL_EINVAL, A.first_block = INT64_MAX, "", INT64_MAX, NO, NO)            \
    F(first_block_past_the_first_split, TL_EINVAL, A.first_block = 5, "", 0, 5, NO)                \
    F(view_of_size_0, TL_EINVAL, V.size = 0, "size", 0, NO, NO)                                    \
    F(view_of_an_earlier_size, TL_EINVAL, V.size = 112, "size", 112, NO, NO)                       \
    F(view_of_a_later_size, TL_EINVAL, V.size += 8, "size", sizeof(tl_kv_view) + 8, NO, NO)        \
    F(k_scale_of_f32, TL_EINVAL, V.k_scale = M->q, "scale", NO, NO, NO)                            \
    F(v_scale_of_f32, TL_EINVAL, V.v_scale = M->q, "scale", NO, NO, NO)                            \
    F(impossible_states, TL_EINVAL, M->cu[4] = INT32_MAX;                                          \
      x->n = INT64_C(1) << 40, "states", INT64_C(1) << 40, INT32_MAX, NO)                          \
    F(first_past_all_positions, TL_EINVAL, x->first = INT64_MAX / TL_ATTN_SPLIT, "split",          \
      INT64_MAX / TL_ATTN_SPLIT, BAD_N, NO)                                                        \
    F(impossible_strides_of_states, TL_EINVAL, A.H = 4096;                                         \
      x->n = INT64_C(1) << 52, "states", 4096, INT64_C(1) << 52, NO)                               \
    F(foreign_isa, TL_EUNSUPPORTED, (void)x; tl_kernels_select("abacus"), "abacus", NO, NO, NO)    \
    F(cu_begins_at_1, TL_EINVAL, M->cu[0] = 1, "cu_seqlens_q", 1, NO, NO)                          \
    F(s0_ctx_below_rows, TL_EINVAL, M->ctx[0] = 2, "ctx_len", 0, 2, 3)                             \
    F(s0_ctx_too_long, TL_EINVAL, M->ctx[0] = BAD_TABLE * BAD_TOKENS + 1;                          \
      x->first = 2, "ctx_len", 0, BAD_TABLE *BAD_TOKENS + 1, NO)                                   \
    F(s0_entry_4, TL_EINVAL, M->tables[4] = BAD_BLOCKS, "", 0, 4, BAD_BLOCKS)                      \
    F(s0_entry_11, TL_EINVAL, M->tables[11] = UINT32_MAX, "", 0, 11, UINT32_MAX)                   \
    F(s1_decreases, TL_EINVAL, M->cu[2] = 2, "cu_seqlens_q", 2, 3, NO)                             \
    F(s1_ctx_below_rows, TL_EINVAL, M->ctx[1] = 0, "ctx_len", 1, 0, NO)                            \
    F(s2_ctx_below_0, TL_EINVAL, M->ctx[2] = -1, "ctx_len", 2, -1, NO)                             \
    F(s3_entry_7, TL_EINVAL, M->tables[3 * BAD_TABLE + 7] = 0x80000000u, "", 3, 7, 0x80000000u)    \
    F(states_are_q, TL_EINVAL, x->states = M->q, "states", NO, NO, NO)                             \
    F(states_end_in_q, TL_EINVAL, x->states = M->q - BAD_STATES + 1, "states", NO, NO, NO)         \
    F(states_begin_in_q, TL_EINVAL, x->states = M->space_1 - 1, "states", NO, NO, NO)              \
    F(states_end_in_k, TL_EINVAL, x->states = M->k - BAD_STATES + 1, "states", NO, NO, NO)         \
    F(states_begin_in_k, TL_EINVAL, x->states = M->space_2 - 1, "states", NO, NO, NO)              \
    F(states_end_in_v, TL_EINVAL, x->states = M->v - BAD_STATES + 1, "states", NO, NO, NO)         \
    F(states_begin_in_v, TL_EINVAL, x->states = M->space_3 - 1, "states", NO, NO, NO)              \
    F(states_over_slopes, TL_EINVAL, x->states = M->slopes - 5, "states", NO, NO, NO)              \
    F(states_end_in_cu, TL_EINVAL, x->states = WORDS(M->cu) - BAD_STATES + 1, "states", NO, NO,    \
      NO)                                                                                          \
    F(states_begin_in_ctx, TL_EINVAL, x->states = M->space_6 - 1, "states", NO, NO, NO)            \
    F(states_end_in_tables, TL_EINVAL, x->states = WORDS(M->tables) - BAD_STATES + 1, "states",    \
      NO, NO, NO)                                                                                  \
    F(states_begin_in_tables, TL_EINVAL, x->states = M->space_7 - 1, "states", NO, NO, NO)         \
    F(from_inside, TL_EBUSY, x->inside = true, "", NO, NO, NO)

#define F_PUT(name, status, does, word, a, b, c) \
    static void put_##name(struct bad *x)        \
    {                                            \
        does;                                    \
    }
FAULTS(F_PUT)

#undef A
#define A ((struct bad *)NULL)->args /* for sizeof */
static const struct fault {
    const char *name;
    tl_status want;
    void (*put)(struct bad *);
    const char *word;
    int64_t numbers[3];
} faults[] = {
#define F_ROW(name, status, does, word, a, b, c) \
    {#name, status, put_##name, word, {(int64_t)(a), (int64_t)(b), (int64_t)(c)}},
    FAULTS(F_ROW)};
#undef A
#undef V
#undef M
#define N_FAULTS (sizeof faults / sizeof *faults)

/* The message names the function, holds the word behind the name, and the numbers. */
static void check_message(const char *fault, const char *fn, const char *word,
                          const int64_t *numbers)
{
    CHECK(error_names(fn), "%s: \"%s\"", fault, tl_last_error());
    CHECK(strstr(tl_last_error() + strlen(fn), word), "%s: no \"%s\" in \"%s\"", fault, word,
          tl_last_error());
    for (int i = 0; i < 3; i++)
        CHECK(numbers[i] == NO || error_mentions(numbers[i]), "%s: no %lld in \"%s\"", fault,
              (long long)numbers[i], tl_last_error());
}

TEST(every_fault_of_a_step_is_refused_with_its_values)
{
    struct bad_memory *m = guarded(sizeof *m), *before = must_alloc(sizeof *m);
    struct bad x;
    bad_fresh(&x, m, threads(2));
    CHECK_STATUS(run_call(bad_call, &x, NULL), TL_OK);
    CHECK(!all_paint(m->states, BAD_STATES) && all_paint(m->back, BAD_STATES) &&
              all_paint(m->space_7, BAD_STATES),
          "a good call");
    for (size_t i = 0; i < N_FAULTS; i++) {
        bad_fresh(&x, m, threads(2));
        isa_restore();
        faults[i].put(&x);
        memcpy(before, m, sizeof *m);
        const tl_status got = run_call(bad_call, &x, x.inside ? x.args.tp : NULL);
        isa_restore();
        CHECK(got == faults[i].want, "%s: got %s, want %s; \"%s\"", faults[i].name,
              tl_status_str(got), tl_status_str(faults[i].want), tl_last_error());
        check_message(faults[i].name, STATES, faults[i].word, faults[i].numbers);
        CHECK(memcmp(before, m, sizeof *m) == 0, "%s: something was written", faults[i].name);
    }
    free(before), guarded_free(m, sizeof *m);
}

/* Splits 1 and 2 of a table of blocks of 256: entries 4 .. 11 are looked at where a row sees them,
 * no other. */
TEST(a_bad_entry_counts_only_in_its_splits)
{
    struct bad_memory *m = guarded(sizeof *m);
    struct bad x;
    /* of 1000: from the first row at 3197 - 999, entry 8 on; at 3326 - 999, entry 9 on */
    for (int window = 0; window < 2; window++)
        for (int s = 0; s < BAD_B; s++)
            for (int i = 0; i < BAD_TABLE; i++) {
                const int first = window ? s ? 9 : 8 : 4;
                /* of 1, nothing lies there; 2 has no row */
                const bool counts = (s == 0 || s == 3) && i >= first && i <= 11;
                bad_fresh(&x, m, NULL);
                x.args.window = window ? 1000 : 0;
                m->tables[s * BAD_TABLE + i] = BAD_BLOCKS + 7;
                CHECK(bad_call(&x) == (counts ? TL_EINVAL : TL_OK),
                      "window %lld, sequence %d, entry %d: \"%s\"", (long long)x.args.window, s, i,
                      tl_last_error());
                CHECK(!counts || all_paint(m->states, BAD_STATES), "states were written");
                CHECK(!counts || (error_mentions(s) && error_mentions(i) &&
                                  error_mentions(BAD_BLOCKS + 7)),
                      "\"%s\"", tl_last_error());
            }
    guarded_free(m, sizeof *m);
}

TEST(states_that_only_touch_an_input_are_in_order)
{
    struct bad_memory *m = guarded(sizeof *m);
    struct bad x;
    for (int i = 0; i < 4; i++) {
        bad_fresh(&x, m, NULL);
        x.states = i == 0   ? m->space_1
                   : i == 1 ? m->q - BAD_STATES
                   : i == 2 ? m->space_3
                            : WORDS(m->tables) - BAD_STATES;
        CHECK_STATUS(bad_call(&x), TL_OK);
    }
    guarded_free(m, sizeof *m);
}

/* ---- merge: what is refused ---- */

/* A merge in order until a fault is put in: splits 0, 1 .. 2 and 3 .. 5 of six rows of three
 * heads. */
enum {
    MIX_ROWS = 6,
    MIX_H = 3,
    MIX_DIM = 4,
    MIX_OUT = MIX_ROWS * MIX_DIM,
    MIX_STATE = MIX_ROWS * (2 + MIX_DIM)
};
struct mix_memory {
    float front[MIX_OUT], states_0[MIX_STATE], space_1[MIX_OUT], states_1[2 * MIX_STATE],
        space_2[MIX_OUT], states_2[3 * MIX_STATE];
    float space_3[MIX_OUT], sinks[MIX_H], space_4[MIX_OUT + MIX_H]; /* what is behind is aligned */
    tl_attn_part parts[3];
    float space_5[MIX_OUT], out[MIX_OUT], space_6[MIX_OUT], lse[MIX_ROWS], back[MIX_OUT];
};

struct mix {
    struct mix_memory *m;
    const tl_attn_part *parts;
    int64_t n_parts, n_rows, H, dim;
    const float *sinks;
    float *out, *lse;
    tl_pool *tp;
    bool inside;
};

static void mix_fresh(struct mix *x, struct mix_memory *m, tl_pool *tp)
{
    float *const states[] = {m->states_0, m->states_1, m->states_2};
    repaint((float *)m, (int64_t)(sizeof *m / sizeof(float)));
    for (int i = 0, first = 0; i < 3; first += ++i) {
        m->parts[i] = (tl_attn_part){states[i], first, i + 1, 0};
        for (int at = 0; at < (i + 1) * MIX_STATE; at++)
            states[i][at] = 1 + 0.5f * (float)(at % 5);
    }
    for (int h = 0; h < MIX_H; h++)
        m->sinks[h] = 1;
    *x =
        (struct mix){m, m->parts, 3, MIX_ROWS, MIX_H, MIX_DIM, m->sinks, m->out, m->lse, tp, false};
}

static tl_status mix_call(const void *mix)
{
    const struct mix *x = mix;
    return tl_attn_merge_f32(x->parts, x->n_parts, x->n_rows, x->H, x->dim, x->sinks, x->out,
                             x->lse, x->tp);
}

static void swap_parts(struct mix_memory *m, int a, int b)
{
    const tl_attn_part t = m->parts[a];
    m->parts[a] = m->parts[b], m->parts[b] = t;
}

#define M x->m
#define P x->m->parts
#define MIX_FAULTS(F)                                                                              \
    F(null_parts, TL_EINVAL, x->parts = NULL, "parts", NO, NO, NO)                                 \
    F(null_states_0, TL_EINVAL, P[0].states = NULL, "states", 0, NO, NO)                           \
    F(null_states_2, TL_EINVAL, P[2].states = NULL, "states", 2, NO, NO)                           \
    F(null_out, TL_EINVAL, x->out = NULL, "out", NO, NO, NO)                                       \
    F(no_parts, TL_EINVAL, x->n_parts = 0, "n_parts", 0, NO, NO)                                   \
    F(fewer_parts, TL_EINVAL, x->n_parts = INT64_MIN, "n_parts", INT64_MIN, NO, NO)                \
    F(impossible_parts, TL_EINVAL, x->n_parts = INT64_MAX, "parts", INT64_MAX, NO, NO)             \
    F(impossible_parts_by_bytes, TL_EINVAL, x->n_parts = INT64_C(1) << 60, "parts",                \
      INT64_C(1) << 60, NO, NO)                                                                    \
    F(negative_rows, TL_EINVAL, x->n_rows = -1, "n_rows", -1, NO, NO)                              \
    F(negative_tokens, TL_EINVAL, x->n_rows = -MIX_H, "n_rows", -MIX_H, NO, NO)                    \
    F(fewest_rows, TL_EINVAL, x->n_rows = INT64_MIN, "n_rows", INT64_MIN, NO, NO)                  \
    F(no_heads, TL_EINVAL, x->H = 0, "H", 0, NO, NO)                                               \
    F(negative_heads, TL_EINVAL, x->H = -3, "H", -3, NO, NO)                                       \
    F(half_a_row, TL_EINVAL, x->H = 4, "n_rows", MIX_ROWS, 4, NO)                                  \
    F(more_heads_than_rows, TL_EINVAL, x->H = 12, "n_rows", MIX_ROWS, 12, NO)                      \
    F(no_dim, TL_EINVAL, x->dim = 0, "dim", 0, NO, NO)                                             \
    F(negative_dim, TL_EINVAL, x->dim = -4, "dim", -4, NO, NO)                                     \
    F(impossible_dim, TL_EINVAL, x->dim = INT64_MAX, "", INT64_MAX, NO, NO)                        \
    F(impossible_dim_by_one, TL_EINVAL, x->dim = INT64_MAX - 2, "", INT64_MAX - 2, NO, NO)         \
    F(impossible_dim_by_bytes, TL_EINVAL, x->dim = INT64_C(1) << 60, "", INT64_C(1) << 60, NO, NO) \
    F(impossible_rows, TL_EINVAL, x->n_rows = INT64_MAX / 3 * 3, "", INT64_MAX / 3 * 3, NO, NO)    \
    F(no_splits, TL_EINVAL, P[1].n_splits = 0, "n_splits", 1, 0, NO)                               \
    F(fewer_splits, TL_EINVAL, P[0].n_splits = -1, "n_splits", 0, -1, NO)                          \
    F(impossible_splits, TL_EINVAL, P[2].n_splits = INT64_C(1) << 58, "", 2, INT64_C(1) << 58, NO) \
    F(splits_past_the_end, TL_EINVAL, P[2].n_splits = INT64_MAX, "", 2, INT64_MAX, NO)             \
    F(first_is_1, TL_EINVAL, P[0].first_split = 1, "", 1, NO, NO)                                  \
    F(first_is_below_0, TL_EINVAL, P[0].first_split = -1, "", -1, NO, NO)                          \
    F(first_is_missing, TL_EINVAL, x->parts = P + 1; x->n_parts = 2, "", 1, NO, NO)                \
    F(second_is_missing, TL_EINVAL, P[1] = P[2]; x->n_parts = 2, "", 1, 3, NO)                     \
    F(second_is_twice, TL_EINVAL, P[2] = P[1], "", 2, 1, 3)                                        \
    F(first_is_twice, TL_EINVAL, P[1] = P[0], "", 1, 0, NO)                                        \
    F(parts_overlap, TL_EINVAL, P[2].first_split = 2, "", 2, 3, NO)                                \
    F(parts_with_a_gap, TL_EINVAL, P[2].first_split = 4, "", 2, 3, 4)                              \
    F(parts_out_of_order, TL_EINVAL, swap_parts(M, 1, 2), "", 1, 3, NO)                            \
    F(parts_in_falling_order, TL_EINVAL, swap_parts(M, 0, 2), "", 3, NO, NO)                       \
    F(part_at_the_end, TL_EINVAL, P[1].first_split = INT64_MAX, "", 1, INT64_MAX, NO)              \
    F(part_below_0, TL_EINVAL, P[1].first_split = INT64_MIN, "", 1, INT64_MIN, NO)                 \
    F(span_of_nothing_known, TL_EINVAL, P[1].span = 2048, "span", 1, 2048, NO)                     \
    F(span_below_0, TL_EINVAL, P[2].span = -TL_ATTN_SPLIT, "span", 2, -TL_ATTN_SPLIT, NO)          \
    F(stretch_of_one_split, TL_EINVAL, P[0].span = TL_ATTN_STRETCH, "", 0, 1, NO)                  \
    F(stretch_from_split_3, TL_EINVAL, P[2].span = TL_ATTN_STRETCH;                                \
      P[2].n_splits = 16, "", 2, 3, NO)                                                            \
    F(stretch_and_a_half, TL_EINVAL, P[0].span = TL_ATTN_STRETCH;                                  \
      P[0].n_splits = 24; P[1].first_split = 24; P[2].first_split = 26, "", 0, 24, NO)             \
    F(split_over_a_stretch, TL_EINVAL, P[0].span = TL_ATTN_STRETCH;                                \
      P[0].n_splits = 16, "", 1, 16, NO)                                                           \
    F(gap_behind_a_stretch, TL_EINVAL, P[0].span = TL_ATTN_STRETCH;                                \
      P[0].n_splits = 16; P[1].first_split = 17; P[2].first_split = 19, "", 1, 16, 17)             \
    F(impossible_stretches, TL_EINVAL, P[0].span = TL_ATTN_STRETCH;                                \
      P[0].n_splits = INT64_C(1) << 62; x->n_parts = 1, "", 0, NO, NO)                             \
    F(out_is_states, TL_EINVAL, x->out = M->states_1, "out", NO, NO, NO)                           \
    F(out_ends_in_states, TL_EINVAL, x->out = M->states_2 - MIX_OUT + 1, "out", NO, NO, NO)        \
    F(out_begins_in_states, TL_EINVAL, x->out = M->space_1 - 1, "out", NO, NO, NO)                 \
    F(out_begins_in_the_last_states, TL_EINVAL, x->out = M->space_3 - 1, "out", NO, NO, NO)        \
    F(out_over_sinks, TL_EINVAL, x->out = M->sinks - 5, "out", NO, NO, NO)                         \
    F(out_ends_in_parts, TL_EINVAL, x->out = WORDS(P) - MIX_OUT + 1, "out", NO, NO, NO)            \
    F(out_begins_in_parts, TL_EINVAL, x->out = M->space_5 - 1, "out", NO, NO, NO)                  \
    F(lse_in_states, TL_EINVAL, x->lse = M->states_2 + 9, "lse", NO, NO, NO)                       \
    F(lse_ends_in_states, TL_EINVAL, x->lse = M->states_0 - MIX_ROWS + 1, "lse", NO, NO, NO)       \
    F(lse_is_sinks, TL_EINVAL, x->lse = M->sinks, "lse", NO, NO, NO)                               \
    F(lse_in_parts, TL_EINVAL, x->lse = WORDS(P) + 3, "lse", NO, NO, NO)                           \
    F(lse_in_out, TL_EINVAL, x->lse = M->out + 8, "lse", NO, NO, NO)                               \
    F(lse_begins_in_out, TL_EINVAL, x->lse = M->space_6 - 1, "lse", NO, NO, NO)                    \
    F(out_ends_in_lse, TL_EINVAL, x->out = M->lse - MIX_OUT + 1, "lse", NO, NO, NO)                \
    F(foreign_isa, TL_EUNSUPPORTED, (void)x; tl_kernels_select("abacus"), "abacus", NO, NO, NO)    \
    F(from_inside, TL_EBUSY, x->inside = true, "", NO, NO, NO)

#define F_PUT_MIX(name, status, does, word, a, b, c) \
    static void mix_##name(struct mix *x)            \
    {                                                \
        does;                                        \
    }
MIX_FAULTS(F_PUT_MIX)

static const struct mix_fault {
    const char *name;
    tl_status want;
    void (*put)(struct mix *);
    const char *word;
    int64_t numbers[3];
} mix_faults[] = {
#define F_ROW_MIX(name, status, does, word, a, b, c) \
    {#name, status, mix_##name, word, {(int64_t)(a), (int64_t)(b), (int64_t)(c)}},
    MIX_FAULTS(F_ROW_MIX)};
#undef M
#undef P
#define N_MIX_FAULTS (sizeof mix_faults / sizeof *mix_faults)

/* With one fault, or two of which the first decides by its status. */
static void check_mix_refused(struct mix_memory *m, const struct mix_fault *f,
                              const struct mix_fault *second)
{
    static struct mix_memory before;
    struct mix x;
    mix_fresh(&x, m, threads(2));
    isa_restore();
    if (second)
        second->put(&x);
    f->put(&x);
    memcpy(&before, m, sizeof before);
    const tl_status got = run_call(mix_call, &x, x.inside ? x.tp : NULL);
    isa_restore();
    CHECK(got == f->want, "%s and %s: got %s, want %s; \"%s\"", f->name,
          second ? second->name : "nothing else", tl_status_str(got), tl_status_str(f->want),
          tl_last_error());
    CHECK(memcmp(&before, m, sizeof before) == 0, "%s: something was written", f->name);
    if (!second)
        check_message(f->name, MERGE, f->word, f->numbers);
}

TEST(every_fault_of_a_merge_is_refused_with_its_values)
{
    struct mix_memory *m = must_alloc(sizeof *m);
    struct mix x;
    mix_fresh(&x, m, threads(2));
    CHECK_STATUS(run_call(mix_call, &x, NULL), TL_OK);
    CHECK(all_paint(m->space_5, MIX_OUT) && all_paint(m->space_6, MIX_OUT) &&
              all_paint(m->back, MIX_OUT),
          "a good call wrote too much");
    for (int i = 0; i < MIX_OUT; i++)
        CHECK(float_bits(m->out[i]) != PAINT && float_bits(m->lse[i % MIX_ROWS]) != PAINT,
              "element %d was not written", i);
    for (size_t i = 0; i < N_MIX_FAULTS; i++)
        check_mix_refused(m, &mix_faults[i], NULL);
    free(m);
}

/* A stretch is one state, not sixteen: out may lie right behind it, and not in its last float. */
TEST(the_states_of_a_stretch_end_where_they_say)
{
    float *memory = painted(2 * MIX_STATE + MIX_OUT);
    for (int i = 0; i < 2 * MIX_STATE; i++)
        memory[i] = 1;
    const tl_attn_part part = {memory, 0, 32, TL_ATTN_STRETCH};
    for (int at = -1; at < 1; at++)
        CHECK_STATUS(tl_attn_merge_f32(&part, 1, MIX_ROWS, MIX_H, MIX_DIM, NULL,
                                       memory + 2 * MIX_STATE + at, NULL, NULL),
                     at ? TL_EINVAL : TL_OK);
    painted_free(memory, 2 * MIX_STATE + MIX_OUT);
}

/* The instruction set is looked at behind all arguments, the pool last. */
TEST(of_two_faults_of_a_merge_the_one_listed_first_decides)
{
    struct mix_memory *m = must_alloc(sizeof *m);
    for (size_t i = 0; i < N_MIX_FAULTS; i++)
        for (size_t j = N_MIX_FAULTS - 2; j < N_MIX_FAULTS; j++)
            if (i < j)
                check_mix_refused(m, &mix_faults[i], &mix_faults[j]);
    free(m);
}

/* Arrays so near the end of the address space that they would go on at its beginning. */
TEST(arrays_that_wrap_the_address_space_are_refused)
{
    float *const end = (float *)(UINTPTR_MAX - 63);
    struct bad_memory *m = guarded(sizeof *m);
    struct bad x;
    for (int i = 0; i < 2; i++) {
        bad_fresh(&x, m, NULL);
        *(i ? &x.states : (float **)(uintptr_t)&x.args.q) = end;
        CHECK_STATUS(bad_call(&x), TL_EINVAL);
        CHECK(error_names(STATES) && all_paint(m->states, BAD_STATES), "\"%s\"", tl_last_error());
    }
    guarded_free(m, sizeof *m);
}

/* On no pool, or on another than the one whose range it is called from, a call runs. */
TEST(calls_from_inside_a_range_of_another_pool_run)
{
    struct bad_memory *m = guarded(sizeof *m);
    struct mix_memory *n = must_alloc(sizeof *n);
    for (int i = 0; i < 2; i++) {
        struct bad x;
        struct mix y;
        bad_fresh(&x, m, i ? threads(3) : NULL), mix_fresh(&y, n, i ? threads(3) : NULL);
        CHECK_STATUS(run_call(bad_call, &x, threads(2)), TL_OK);
        CHECK_STATUS(run_call(mix_call, &y, threads(2)), TL_OK);
        CHECK(!all_paint(m->states, BAD_STATES) && !all_paint(n->out, MIX_OUT),
              "nothing was written");
    }
    free(n), guarded_free(m, sizeof *m);
}

CHECK_MAIN()
