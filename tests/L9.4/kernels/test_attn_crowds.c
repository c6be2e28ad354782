/* SPDX-License-Identifier: MIT */
/* test_attn_crowds.c: batches some of whose sequences begin with the same blocks, wherever they
 * stand: a prefix is read once for all of them, the longest sequence is begun first, and every row
 * has the bits that it has alone.
 *
 * Words. crowd: such a batch; the sequences that name the same first blocks are a group. alone: in
 * no group. */
#include "attn_ref.h"

#define MAX_CROWD 320
#define ALONE (-1)

/* Positions before `shared` lie in blocks of the group, in whole blocks, except those of block
 * `own_block`, where it is not below 0; the rest in blocks of the sequence's own. */
struct member {
    int64_t group, shared, ctx, rows, own_block;
};

struct crowd_spec {
    int64_t B, H, Hkv, D, block_tokens, window;
    bool options; /* slopes, sinks, a softcap */
    bool special; /* a NaN or an infinity here and there */
    uint64_t seed;
    struct member member[MAX_CROWD];
};

struct crowd {
    struct crowd_spec spec;
    tl_kv_cfg cfg;
    tl_kv_pool *kv;
    tl_kv_view view;
    tl_paged_attn_args args;
    int64_t total, stride;
    int32_t cu[MAX_CROWD + 1], ctx[MAX_CROWD];
    uint32_t *tables;
    float *k[MAX_CROWD], *v[MAX_CROWD]; /* [Hkv][ctx][D], NaN where no row sees them */
    float *q, *out, *lse, slopes[16], sinks[16];
    float *want, *m, *L; /* by ref_row */
};

static bool in_shared(const struct crowd *c, const struct member *x, int64_t block)
{
    return x->group != ALONE && block != x->own_block &&
           (block + 1) * c->spec.block_tokens <= x->shared;
}

/* The first position that any row of the sequence sees. */
static int64_t first_of(const struct crowd *c, const struct member *x)
{
    return x->rows ? ref_first_seen(x->ctx - x->rows, c->spec.window) : x->ctx;
}

/* An f16 that depends on nothing but what it belongs to: a group or a sequence, and a place. */
static uint16_t value_of(const struct crowd_spec *spec, int64_t owner, int is_v, int64_t j,
                         int64_t at)
{
    static const uint16_t special[] = {0x7E00, 0x7C00, 0xFC00, 0xFC00};
    uint64_t rng = spec->seed * 0x9E3779B97F4A7C15u + (uint64_t)(owner * 2 + is_v + 7) * 0x1000003D;
    rng ^= (uint64_t)(j * 4099 + at + 1) * 0xD6E8FEB86659FD93u;
    rng_next(&rng);
    if (spec->special && rng_below(&rng, 1999) == 0)
        return special[rng_below(&rng, 4)];
    return random_code(&rng, is_v ? 8 : 11, is_v ? 16 : 14);
}

static void crowd_sequence(struct crowd *c, int64_t s, uint32_t *of_group, uint32_t *next)
{
    const struct member *x = &c->spec.member[s];
    const int64_t b = c->spec.block_tokens, D = c->spec.D, Hkv = c->spec.Hkv, n = x->ctx,
                  first = first_of(c, x);
    for (int64_t i = 0; i < c->stride; i++)
        c->tables[s * c->stride + i] = garbage_id(i + s, c->cfg.n_blocks);
    for (int64_t i = first / b; first < n && i < blocks_of(n, b); i++)
        if (in_shared(c, x, i)) {
            uint32_t *id = &of_group[x->group * c->stride + i];
            if (*id == UINT32_MAX)
                *id = (*next)++;
            c->tables[s * c->stride + i] = *id;
        } else {
            c->tables[s * c->stride + i] = (*next)++;
        }
    c->k[s] = floats(Hkv * n * D), c->v[s] = floats(Hkv * n * D);
    for (int64_t at = 0; at < Hkv * n * D; at++) {
        const int64_t j = at / D % n, head = at / D / n;
        if (j < first) {
            c->k[s][at] = c->v[s][at] = NAN;
            continue;
        }
        const uint32_t id = c->tables[s * c->stride + j / b];
        const int64_t owner = in_shared(c, x, j / b) ? 1000 + x->group : s;
        for (int is_v = 0; is_v < 2; is_v++) {
            const uint16_t code = value_of(&c->spec, owner, is_v, j, head * D + at % D);
            slot_row(c->kv, &c->cfg, id, 0, is_v, head, j % b)[at % D] = code;
            (is_v ? c->v : c->k)[s][at] = ref_widen(code);
        }
    }
}

/* Row i / H of sequence s for head i % H. */
static struct ref_row row_of(const struct crowd *c, int64_t s, int64_t i)
{
    const int64_t H = c->spec.H, D = c->spec.D, h = i % H,
                  p = c->ctx[s] - c->spec.member[s].rows + i / H,
                  head = h / (H / c->spec.Hkv) * c->ctx[s] * D;
    return (struct ref_row){.q = c->q + (c->cu[s] * H + i) * D,
                            .k = c->k[s] + head,
                            .v = c->v[s] + head,
                            .D = D,
                            .lo = ref_first_seen(p, c->spec.window),
                            .hi = p,
                            .p = p,
                            .scale = c->args.scale,
                            .softcap = c->args.logits_softcap,
                            .slope = c->spec.options ? c->slopes + h : NULL,
                            .sink = c->spec.options ? c->sinks + h : NULL};
}

static void crowd_want(struct crowd *c)
{
    const int64_t H = c->spec.H;
    for (int64_t s = 0; s < c->spec.B; s++)
        for (int64_t i = 0; i < c->spec.member[s].rows * H; i++) {
            const int64_t at = c->cu[s] * H + i;
            const struct ref_row row = row_of(c, s, i);
            ref_row(&row, c->want + at * c->spec.D, c->m + at, c->L + at);
        }
}

static struct crowd *crowd_make(const struct crowd_spec *spec)
{
    struct crowd *c = must_alloc(sizeof *c);
    uint64_t rng = spec->seed + 3;
    int64_t blocks = 3, longest = 1;
    c->spec = *spec;
    for (int64_t s = 0; s < spec->B; s++) {
        const struct member *x = &spec->member[s];
        blocks += 2 * blocks_of(x->ctx, spec->block_tokens);
        longest = max64(longest, x->ctx);
        c->total += x->rows, c->cu[s + 1] = (int32_t)c->total, c->ctx[s] = (int32_t)x->ctx;
    }
    c->stride = blocks_of(longest, spec->block_tokens) + 1;
    c->cfg = kv_cfg(blocks, spec->block_tokens, 1, spec->Hkv, spec->D);
    c->kv = make_pool(&c->cfg);
    uint32_t *ids = must_alloc((size_t)blocks * sizeof *ids), next = 0,
             *of_group = must_alloc((size_t)(MAX_CROWD * c->stride) * sizeof *of_group);
    CHECK_STATUS(tl_kv_alloc(c->kv, (uint32_t)blocks, ids), TL_OK);
    poison_pool(c->kv, &c->cfg);
    memset(of_group, 0xFF, (size_t)(MAX_CROWD * c->stride) * sizeof *of_group);
    c->view.size = sizeof c->view;
    CHECK_STATUS(tl_kv_pool_view(c->kv, 0, &c->view), TL_OK);
    c->tables = guarded((size_t)(spec->B * c->stride) * sizeof *c->tables);
    for (int64_t s = 0; s < spec->B; s++)
        crowd_sequence(c, s, of_group, &next);
    free(ids), free(of_group);
    const int64_t n = c->total * spec->H, row = spec->H * spec->D;
    c->q = floats(n * spec->D), c->out = painted(n * spec->D), c->lse = painted(n);
    c->want = floats(n * spec->D), c->m = floats(n), c->L = floats(n);
    for (int64_t i = 0; i < n * spec->D; i++)
        c->q[i] = 2 * rng_unit(&rng);
    for (int h = 0; h < 16; h++)
        c->slopes[h] = 0.001f * (float)(h + 1), c->sinks[h] = 2 * rng_unit(&rng);
    c->args = (tl_paged_attn_args){.size = sizeof c->args,
                                   .view = &c->view,
                                   .q = c->q,
                                   .out = c->out,
                                   .lse = c->lse,
                                   .q_token_stride = row,
                                   .q_head_stride = spec->D,
                                   .out_token_stride = row,
                                   .out_head_stride = spec->D,
                                   .B = spec->B,
                                   .H = spec->H,
                                   .cu_seqlens_q = c->cu,
                                   .ctx_lens = c->ctx,
                                   .block_tables = c->tables,
                                   .table_stride = c->stride,
                                   .window = spec->window,
                                   .alibi_slopes = spec->options ? c->slopes : NULL,
                                   .sink_logits = spec->options ? c->sinks : NULL,
                                   .scale = 0.3f,
                                   .logits_softcap = spec->options ? 20 : 0};
    crowd_want(c);
    return c;
}

static void crowd_free(struct crowd *c)
{
    const int64_t n = c->total * c->spec.H;
    for (int64_t s = 0; s < c->spec.B; s++)
        free(c->k[s]), free(c->v[s]);
    guarded_free(c->tables, (size_t)(c->spec.B * c->stride) * sizeof *c->tables);
    painted_free(c->out, n * c->spec.D), painted_free(c->lse, n);
    free(c->q), free(c->want), free(c->m), free(c->L);
    tl_kv_pool_destroy(c->kv);
    free(c);
}

static bool one_row_each(const struct crowd *c)
{
    for (int64_t s = 0; s < c->spec.B; s++)
        if (c->spec.member[s].rows != 1)
            return false;
    return true;
}

static void check_crowd_rows(const struct crowd *c, tl_pool *tp, bool lse, const char *entry)
{
    const int64_t H = c->spec.H, D = c->spec.D;
    for (int64_t at = 0; at < c->total * H; at++) {
        CHECK_SAME(c->out + at * D, c->want + at * D, D,
                   "%s, %s, %d threads, seed %llu: token %lld, head %lld", entry, tl_isa_name(),
                   tl_pool_threads(tp), (unsigned long long)c->spec.seed, (long long)(at / H),
                   (long long)(at % H));
        CHECK(!lse || lse_close(c->lse[at], c->m[at], c->L[at]),
              "lse %.9g of token %lld, head %lld", (double)c->lse[at], (long long)(at / H),
              (long long)(at % H));
    }
    CHECK(rim_intact(c->out) && rim_intact(c->lse), "the rim was written");
}

/* The states of the first split or stretch, on the threads of the call before. */
static void check_crowd_states(const struct crowd *c, int64_t span)
{
    const int64_t width = 2 + c->spec.D, n = c->total * c->spec.H;
    float *states = painted(n * width), *state = states, *want = floats(width);
    tl_paged_attn_args args = c->args;
    args.state_span = span;
    CHECK_STATUS(tl_paged_attn_states_f32(&args, 0, span / TL_ATTN_SPLIT, states), TL_OK);
    for (int64_t s = 0; s < c->spec.B; s++)
        for (int64_t i = 0; i < c->spec.member[s].rows * c->spec.H; i++, state += width) {
            const struct ref_row row = row_of(c, s, i);
            struct ref_state got = {.a = want + 2};
            ref_piece(&row, 0, span, &got);
            want[0] = got.m, want[1] = got.L;
            for (int64_t d = 0; d < width; d++)
                if (!isnan(state[d]) || !isnan(want[d]))
                    CHECK_BITS(state[d], want[d], "states of %lld, sequence %lld, element %lld",
                               (long long)span, (long long)s, (long long)d);
        }
    CHECK(rim_intact(states), "the rim of states was written");
    painted_free(states, n * width), free(want);
}

/* By the general call with and without a workspace, and where it can be by the plain step. */
static void check_crowd(struct crowd *c, tl_pool *tp)
{
    const int64_t n = c->total * c->spec.H;
    c->args.tp = tp;
    for (int work = 0; work < 2; work++) {
        const size_t bytes = work ? tl_paged_attn_workspace(&c->args) : 0, room = bytes ? bytes : 4;
        c->args.workspace = work ? guarded(room) : NULL, c->args.workspace_bytes = bytes;
        repaint(c->out, n * c->spec.D), repaint(c->lse, n);
        CHECK_STATUS(tl_paged_attn_f32(&c->args), TL_OK);
        check_crowd_rows(c, tp, true, work ? "with a workspace" : "without a workspace");
        if (work)
            guarded_free(c->args.workspace, room);
    }
    c->args.workspace = NULL, c->args.workspace_bytes = 0;
    if (c->spec.options || !one_row_each(c))
        return;
    repaint(c->out, n * c->spec.D);
    CHECK_STATUS(tl_paged_attn_decode_f32(c->q, c->kv, 0, c->tables, (int32_t)c->stride, c->ctx,
                                          c->out, c->spec.B, c->spec.H, c->spec.Hkv, c->spec.D,
                                          c->args.scale, c->spec.window, tp),
                 TL_OK);
    check_crowd_rows(c, tp, false, "decode");
}

static void check_crowd_spec(const struct crowd_spec *spec)
{
    static tl_pool *pools[5];
    struct crowd *c = crowd_make(spec);
    for (int isa = 0; isa_select(isa); isa++)
        check_crowd(c, NULL);
    check_crowd_states(c, TL_ATTN_STRETCH);
    for (int n = 1; n <= 4; n += n) {
        if (!pools[n])
            pools[n] = make_threads(n);
        check_crowd(c, pools[n]);
    }
    check_crowd_states(c, TL_ATTN_SPLIT);
    crowd_free(c);
}

/* Two groups, alternating, with sequences that are in none between them. */
TEST(groups_that_are_no_neighbours_change_no_bit)
{
    for (uint64_t i = 0; i < 8; i++) {
        static const int64_t blocks[] = {16, 7, 33, 100}, shared[] = {1200, 2048, 1024, 300};
        struct crowd_spec spec = {.B = 11,
                                  .H = 6,
                                  .Hkv = i % 2 ? 2 : 6,
                                  .D = 8,
                                  .block_tokens = blocks[i % 4],
                                  .options = i % 3 == 2,
                                  .seed = 3000 + i};
        for (int64_t s = 0; s < spec.B; s++)
            spec.member[s] = (struct member){.group = s % 3 == 2 ? ALONE : s % 3,
                                             .shared = shared[(uint64_t)s % 3 ? i % 4 : i / 2],
                                             .ctx = 310 + s * 97 + (int64_t)(i % 3) * 900,
                                             .rows = 1,
                                             .own_block = -1};
        check_crowd_spec(&spec);
    }
}

/* More rows over one prefix than a job takes; at their end all of them see the same positions. */
TEST(a_group_of_many_changes_no_bit)
{
    for (uint64_t i = 0; i < 4; i++) {
        struct crowd_spec spec = {.B = 32,
                                  .H = i % 2 ? 16 : 3,
                                  .Hkv = 1,
                                  .D = 5,
                                  .block_tokens = 16,
                                  .seed = 3100 + i};
        for (int64_t s = 0; s < spec.B; s++)
            spec.member[s] = (struct member){
                .shared = 640, .ctx = i / 2 ? 640 : 650 + s, .rows = 1, .own_block = -1};
        check_crowd_spec(&spec);
    }
}

/* From a few tiles on; contexts that end inside a block of the prefix, and at its first position;
 * prefixes of several depths; a block of one's own amid those of the group. */
TEST(prefixes_of_any_depth_change_no_bit)
{
    static const int64_t depths[] = {16, 48, 64, 100, 400, 1020, 1100, 2000};
    for (uint64_t i = 0; i < 10; i++) {
        uint64_t rng = 60 + i;
        struct crowd_spec spec = {.B = 9,
                                  .H = 4,
                                  .Hkv = 2,
                                  .D = 6,
                                  .block_tokens = i % 3 == 0 ? 1 : i % 3 == 1 ? 16 : 20,
                                  .options = i % 4 == 3,
                                  .seed = 3200 + i};
        for (int64_t s = 0; s < spec.B; s++)
            spec.member[s] = (struct member){.group = rng_below(&rng, 2),
                                             .shared = depths[rng_below(&rng, 8)],
                                             .ctx = 1 + rng_below(&rng, i % 2 ? 130 : 2300),
                                             .rows = 1,
                                             .own_block = s % 4 == 3 ? rng_below(&rng, 6) : -1};
        check_crowd_spec(&spec);
    }
}

/* Contexts of one prefix that end at different places, so that each window begins elsewhere; blocks
 * before it are given back, and their entries garbage. */
TEST(windows_over_a_shared_prefix_change_no_bit)
{
    static const int64_t windows[] = {1, 17, 300, 1024, 1500};
    for (uint64_t i = 0; i < 10; i++) {
        uint64_t rng = 70 + i;
        struct crowd_spec spec = {.B = 8,
                                  .H = 4,
                                  .Hkv = i % 2 ? 4 : 1,
                                  .D = 6,
                                  .block_tokens = i % 2 ? 16 : 33,
                                  .window = windows[i % 5],
                                  .options = i % 4 == 1,
                                  .special = i % 3 == 2,
                                  .seed = 3300 + i};
        for (int64_t s = 0; s < spec.B; s++)
            spec.member[s] = (struct member){.group = s % 4 == 2 ? ALONE : 0,
                                             .shared = 2000,
                                             .ctx = i % 3 ? 1900 + rng_below(&rng, 400) : 2000,
                                             .rows = i / 5 ? 1 : 1 + rng_below(&rng, 4),
                                             .own_block = -1};
        check_crowd_spec(&spec);
    }
}

/* Of one prefix some members have given more back than others: one goes on behind all that is
 * shared, and one has a block of its own that only the member with the earliest window still
 * sees. */
TEST(windows_that_begin_at_different_places_change_no_bit)
{
    static const int64_t ctx[][3] = {{1500, 2900, 1300}, {2500, 1600, 1700}, {2900, 1300, 1500}};
    for (uint64_t i = 0; i < 6; i++) {
        struct crowd_spec spec = {.B = 3,
                                  .H = 2,
                                  .Hkv = 1,
                                  .D = 5,
                                  .block_tokens = 16,
                                  .window = 1500,
                                  .seed = 3350 + i};
        for (int64_t s = 0; s < spec.B; s++)
            spec.member[s] = (struct member){.shared = 3200,
                                             .ctx = ctx[i % 3][s],
                                             .rows = i / 3 ? 3 : 1,
                                             .own_block = i % 3 == 1 && s == 2 ? 20 : -1};
        check_crowd_spec(&spec);
    }
}

/* Drafts and prompts over a shared prefix, and sequences without a row among them. */
TEST(several_rows_over_a_shared_prefix_change_no_bit)
{
    for (uint64_t i = 0; i < 8; i++) {
        uint64_t rng = 80 + i;
        struct crowd_spec spec = {.B = 7,
                                  .H = 3,
                                  .Hkv = 1,
                                  .D = 7,
                                  .block_tokens = 16,
                                  .options = i % 2,
                                  .special = i % 4 == 2,
                                  .seed = 3400 + i};
        for (int64_t s = 0; s < spec.B; s++) {
            const int64_t rows = i % 3 == 0 ? 3 : rng_below(&rng, 20);
            spec.member[s] = (struct member){.group = s % 3 == 1 ? 1 : 0,
                                             .shared = 1100,
                                             .ctx = rows + 1000 + rng_below(&rng, 300),
                                             .rows = rows,
                                             .own_block = -1};
        }
        check_crowd_spec(&spec);
    }
}

/* One prompt several times over: rows stand inside of what they share. */
TEST(prompts_that_are_alike_change_no_bit)
{
    for (uint64_t i = 0; i < 4; i++) {
        struct crowd_spec spec = {.B = 5,
                                  .H = 2,
                                  .Hkv = 1,
                                  .D = 4,
                                  .block_tokens = i % 2 ? 16 : 7,
                                  .window = i / 2 ? 40 : 0,
                                  .seed = 3450 + i};
        for (int64_t s = 0; s < spec.B; s++) {
            const int64_t ctx = s % 2 ? 130 : 100 + 9 * s;
            spec.member[s] = (struct member){.group = s == 1 ? ALONE : 0,
                                             .shared = 120,
                                             .ctx = ctx,
                                             .rows = s == 4 ? 1 : ctx - 20 * (s % 3),
                                             .own_block = -1};
        }
        check_crowd_spec(&spec);
    }
}

/* More sequences than are looked through for a shared prefix at a time, in groups that reach from
 * the first to the last. */
TEST(hundreds_of_sequences_change_no_bit)
{
    for (uint64_t i = 0; i < 2; i++) {
        struct crowd_spec spec = {.B = MAX_CROWD - (int64_t)i * 60,
                                  .H = 2,
                                  .Hkv = 1,
                                  .D = 3,
                                  .block_tokens = 16,
                                  .seed = 3470 + i};
        for (int64_t s = 0; s < spec.B; s++)
            spec.member[s] = (struct member){.group = s % 5 == 4 ? ALONE : s * s % 7,
                                             .shared = 160,
                                             .ctx = 100 + s * 37 % 150,
                                             .rows = 1,
                                             .own_block = -1};
        check_crowd_spec(&spec);
    }
}

/* Only sequences behind the first hundreds have rows: a few units, one of them long. */
TEST(a_long_sequence_behind_hundreds_changes_no_bit)
{
    struct crowd_spec spec = {
        .B = 300, .H = 2, .Hkv = 1, .D = 3, .block_tokens = 16, .seed = 3480};
    for (int64_t s = 0; s < spec.B; s++)
        spec.member[s] = (struct member){
            .group = ALONE, .ctx = s == 280 ? 5000 : 3, .rows = s > 278, .own_block = -1};
    for (int64_t s = 282; s < spec.B; s++)
        spec.member[s].rows = 0;
    check_crowd_spec(&spec);
}

/* The first of three sequences with the same table has no row this time. */
TEST(a_member_without_rows_takes_no_part)
{
    struct crowd_spec spec = {.B = 3, .H = 2, .Hkv = 1, .D = 3, .block_tokens = 16, .seed = 3490};
    for (int64_t s = 0; s < spec.B; s++)
        spec.member[s] = (struct member){
            .shared = 320, .ctx = 330 + s, .rows = s > 0, .own_block = -1};
    struct crowd *c = crowd_make(&spec);
    memcpy(c->tables, c->tables + c->stride, (size_t)c->stride * sizeof *c->tables);
    check_crowd(c, NULL);
    crowd_free(c);
}

/* A prefix that goes over the edge of a stretch. */
TEST(a_shared_prefix_over_stretches_changes_no_bit)
{
    struct crowd_spec spec = {
        .B = 5, .H = 2, .Hkv = 1, .D = 3, .block_tokens = 50, .seed = 3500};
    for (int64_t s = 0; s < spec.B; s++)
        spec.member[s] = (struct member){.group = s == 2 ? ALONE : 0,
                                         .shared = 33000,
                                         .ctx = 33000 + s * 100 - (s == 4 ? 16700 : 0),
                                         .rows = 1,
                                         .own_block = -1};
    check_crowd_spec(&spec);
    spec.window = 17000;
    check_crowd_spec(&spec);
    spec.B = 3, spec.window = 0; /* and that ends behind the first split of a later one */
    for (int64_t s = 0; s < spec.B; s++)
        spec.member[s] = (struct member){
            .shared = 18000, .ctx = 18000 + s * 700, .rows = 1, .own_block = -1};
    check_crowd_spec(&spec);
}

/* Of two sequences the second sees nothing but -inf in what they share and somewhat behind it. */
TEST(scores_of_minus_infinity_over_a_shared_prefix_change_no_bit)
{
    struct crowd_spec spec = {
        .B = 2, .H = 4, .Hkv = 1, .D = 4, .block_tokens = 16, .seed = 3510};
    for (int64_t s = 0; s < spec.B; s++)
        spec.member[s] =
            (struct member){.shared = 640, .ctx = 700 + s, .rows = 1, .own_block = -1};
    struct crowd *c = crowd_make(&spec);
    for (int64_t s = 0; s < spec.B; s++)
        for (int64_t j = 0; j < c->ctx[s]; j++) {
            const uint16_t code = j < 680 ? 0x7BFF : 0;
            const uint32_t id = c->tables[s * c->stride + j / 16];
            slot_row(c->kv, &c->cfg, id, 0, 0, 0, j % 16)[0] = code;
            c->k[s][j * spec.D] = ref_widen(code);
            if (s == 0 || j < 640 || j >= 672)
                continue;
            slot_row(c->kv, &c->cfg, id, 0, 1, 0, j % 16)[0] = 0x7C00; /* has no weight */
            c->v[s][j * spec.D] = INFINITY;
        }
    for (int64_t h = 0; h < spec.H; h++)
        c->q[(spec.H + h) * spec.D] = -3e38f;
    crowd_want(c);
    for (int isa = 0; isa_select(isa); isa++)
        check_crowd(c, NULL);
    crowd_free(c);
}

/* ---- what is read how often, and what is begun first ---- */

#define MAX_EVENTS 512
struct events {
    tl_trace trace;
    tl_trace_event event[MAX_EVENTS];
};

static void run_traced(struct crowd *c, struct events *e)
{
    e->trace = (tl_trace){e->event, MAX_EVENTS, 0};
    c->args.trace = &e->trace;
    CHECK_STATUS(tl_paged_attn_f32(&c->args), TL_OK);
    c->args.trace = NULL;
    CHECK(e->trace.n <= MAX_EVENTS, "%lld events", (long long)e->trace.n);
    check_crowd_rows(c, c->args.tp, true, "with a trace");
}

static bool covers(const tl_trace_event *e, int what, int64_t head, int64_t split)
{
    return e->what == what && e->kv_head == head && e->first_split <= split &&
           split < e->first_split + e->n_splits;
}

/* Splits of a prefix that belong to a group alone are walked once for all its members: two groups
 * of three and two, and two sequences in none, none beside another of its own. */
TEST(a_shared_prefix_is_walked_once)
{
    static const int64_t group[] = {0, 1, ALONE, 0, 1, ALONE, 0};
    struct crowd_spec spec = {
        .B = 7, .H = 4, .Hkv = 2, .D = 8, .block_tokens = 16, .seed = 3600};
    for (int64_t s = 0; s < spec.B; s++)
        spec.member[s] = (struct member){.group = group[s],
                                         .shared = 2048,
                                         .ctx = 2060 + 30 * s,
                                         .rows = 1,
                                         .own_block = -1};
    struct crowd *c = crowd_make(&spec);
    struct events *e = must_alloc(sizeof *e);
    run_traced(c, e);
    for (int64_t head = 0; head < 2; head++)
        for (int64_t split = 0; split < 3; split++) {
            int together = 0, each[7] = {0};
            for (int64_t i = 0; i < e->trace.n; i++) {
                together += covers(&e->event[i], TL_TRACE_SHARED, head, split);
                if (covers(&e->event[i], TL_TRACE_ROWS, head, split))
                    each[e->event[i].seq]++;
            }
            CHECK(together == (split < 2 ? 2 : 0), "head %lld, split %lld: walked %d times",
                  (long long)head, (long long)split, together);
            for (int s = 0; s < 7; s++)
                CHECK(each[s] == (split == 2 || group[s] == ALONE),
                      "head %lld, split %lld, sequence %d: walked %d times alone", (long long)head,
                      (long long)split, s, each[s]);
        }
    free(e);
    crowd_free(c);
}

/* Forty tiles, less than a split. */
TEST(a_prefix_shorter_than_a_split_is_walked_once)
{
    struct crowd_spec spec = {
        .B = 5, .H = 4, .Hkv = 2, .D = 8, .block_tokens = 16, .seed = 3610};
    for (int64_t s = 0; s < spec.B; s++)
        spec.member[s] = (struct member){.group = s % 2 ? ALONE : 0,
                                         .shared = 640,
                                         .ctx = 660 + 9 * s,
                                         .rows = 1,
                                         .own_block = -1};
    struct crowd *c = crowd_make(&spec);
    struct events *e = must_alloc(sizeof *e);
    run_traced(c, e);
    for (int64_t head = 0; head < 2; head++) {
        int together = 0;
        for (int64_t i = 0; i < e->trace.n; i++)
            together += covers(&e->event[i], TL_TRACE_SHARED, head, 0);
        CHECK(together == 1, "head %lld: walked %d times", (long long)head, together);
    }
    free(e);
    crowd_free(c);
}

/* Nothing is shared where tables differ from the first block on, whatever they say later. */
TEST(a_table_that_differs_in_front_shares_nothing)
{
    struct crowd_spec spec = {
        .B = 2, .H = 2, .Hkv = 1, .D = 8, .block_tokens = 16, .seed = 3620};
    for (int64_t s = 0; s < spec.B; s++)
        spec.member[s] =
            (struct member){.shared = 3000, .ctx = 3000, .rows = 1, .own_block = s ? 0 : -1};
    struct crowd *c = crowd_make(&spec);
    struct events *e = must_alloc(sizeof *e);
    run_traced(c, e);
    for (int64_t i = 0; i < e->trace.n; i++)
        CHECK(e->event[i].what != TL_TRACE_SHARED, "event %lld is of a shared walk", (long long)i);
    free(e);
    crowd_free(c);
}

static int64_t events_of(const struct events *e, int what)
{
    int64_t n = 0;
    for (int64_t i = 0; i < e->trace.n; i++)
        n += e->event[i].what == what;
    return n;
}

/* The events of shared walks of a crowd of one KV head. */
static int64_t shared_walks(const struct crowd_spec *spec, tl_pool *tp)
{
    struct crowd *c = crowd_make(spec);
    struct events *e = must_alloc(sizeof *e);
    c->args.tp = tp;
    run_traced(c, e);
    const int64_t n = events_of(e, TL_TRACE_SHARED);
    free(e);
    crowd_free(c);
    return n;
}

TEST(four_tiles_are_worth_a_shared_walk)
{
    for (int64_t shared = 60; shared <= 66; shared++) {
        struct crowd_spec spec = {
            .B = 2, .H = 2, .Hkv = 1, .D = 8, .block_tokens = 1, .seed = 3630};
        for (int64_t s = 0; s < spec.B; s++)
            spec.member[s] =
                (struct member){.shared = shared, .ctx = 90, .rows = 1, .own_block = -1};
        CHECK(shared_walks(&spec, NULL) == (shared >= 64), "%lld positions: %lld walks",
              (long long)shared, (long long)shared_walks(&spec, NULL));
    }
}

/* As many sequences as are planned together, of which the first and the last begin alike. */
TEST(the_first_and_the_last_of_a_plan_share)
{
    struct crowd_spec spec = {
        .B = 256, .H = 2, .Hkv = 1, .D = 3, .block_tokens = 16, .seed = 3475};
    for (int64_t s = 0; s < spec.B; s++) {
        const bool is_outer = s == 0 || s == spec.B - 1;
        spec.member[s] = (struct member){.group = is_outer ? 0 : ALONE,
                                         .shared = 160,
                                         .ctx = is_outer ? 170 : 3,
                                         .rows = 1,
                                         .own_block = -1};
    }
    CHECK(shared_walks(&spec, NULL) == 1, "%lld walks", (long long)shared_walks(&spec, NULL));
}

/* Entries before both windows are not compared: they are garbage, another one in each table. */
TEST(windows_share_whatever_stands_behind_them)
{
    struct crowd_spec spec = {
        .B = 2, .H = 2, .Hkv = 1, .D = 8, .block_tokens = 16, .window = 1500, .seed = 3640};
    for (int64_t s = 0; s < spec.B; s++)
        spec.member[s] =
            (struct member){.shared = 1984, .ctx = 2000 + 100 * s, .rows = 1, .own_block = -1};
    CHECK(shared_walks(&spec, NULL) == 1, "%lld walks", (long long)shared_walks(&spec, NULL));
}

/* Two share two splits, a third with them less than the half of that. */
TEST(who_shares_little_does_not_shorten_the_walk)
{
    struct crowd_spec spec = {.B = 3, .H = 2, .Hkv = 1, .D = 8, .block_tokens = 16, .seed = 3650};
    for (int64_t s = 0; s < spec.B; s++)
        spec.member[s] = (struct member){
            .shared = s == 2 ? 400 : 2048, .ctx = 2060, .rows = 1, .own_block = -1};
    struct crowd *c = crowd_make(&spec);
    struct events *e = must_alloc(sizeof *e);
    run_traced(c, e);
    for (int64_t split = 0; split < 3; split++)
        for (int64_t i = 0; i < e->trace.n; i++) {
            const tl_trace_event *x = &e->event[i];
            const bool is_alone = x->what == TL_TRACE_ROWS;
            const bool want = is_alone ? split == 2 || x->seq == 2 : split < 2;
            CHECK(covers(x, x->what, 0, split) == want, "split %lld, event %lld",
                  (long long)split, (long long)i);
        }
    CHECK(events_of(e, TL_TRACE_SHARED) == 1, "shared walks");
    free(e);
    crowd_free(c);
}

/* Eight sequences fill one job; with other threads they go in units, two for each thread. A prompt
 * is not cut for that. */
TEST(a_group_is_cut_for_as_many_threads_as_there_are)
{
    static const int64_t want[2][5] = {{0, 1, 4, 0, 8}, {0, 1, 1, 0, 1}};
    for (int rows = 1; rows <= 2; rows++)
        for (int n = 1; n <= 2; n++) {
            tl_pool *tp = make_threads(n);
            struct crowd_spec spec = {
                .B = 8, .H = 2, .Hkv = 1, .D = 8, .block_tokens = 16, .seed = 3660};
            for (int64_t s = 0; s < spec.B; s++)
                spec.member[s] = (struct member){
                    .shared = 320, .ctx = 330 + s, .rows = rows, .own_block = -1};
            const int64_t got = shared_walks(&spec, tp);
            CHECK(got == want[rows - 1][n], "%d rows, %d threads: %lld walks", rows, n,
                  (long long)got);
            tl_pool_destroy(tp);
        }
}

/* The longest context of the sequences that an event is the first of. */
static int64_t length_of_item(const struct crowd *c, const tl_trace_event *e)
{
    int64_t longest = c->ctx[e->seq];
    for (int64_t s = 0; e->what == TL_TRACE_SHARED && s < c->spec.B; s++)
        if (c->spec.member[s].group == c->spec.member[e->seq].group)
            longest = max64(longest, c->ctx[s]);
    return longest;
}

/* What is too small to wake another thread is done by one, in the order that several would begin
 * it: the longest first, a group as its longest member. */
TEST(the_longest_items_are_begun_first)
{
    tl_pool *tp = make_threads(2);
    tl_small_step_ns = INT64_MAX;
    for (uint64_t i = 0; i < 12; i++) {
        uint64_t rng = 90 + i;
        struct crowd_spec spec = {.B = 3 + 2 * (int64_t)i,
                                  .H = 1,
                                  .Hkv = 1,
                                  .D = 4,
                                  .block_tokens = 16,
                                  .seed = 3670 + i};
        for (int64_t s = 0; s < spec.B; s++)
            spec.member[s] = (struct member){.group = s > 2 && s < 6 && i % 2 ? 0 : ALONE,
                                             .shared = 160,
                                             .ctx = 170 + rng_below(&rng, 400),
                                             .rows = 2,
                                             .own_block = -1};
        struct crowd *c = crowd_make(&spec);
        struct events *e = must_alloc(sizeof *e);
        int64_t before = INT64_MAX;
        c->args.tp = tp;
        run_traced(c, e);
        for (int64_t k = 0; k < e->trace.n; k++) {
            const bool goes_on = e->event[k].what == TL_TRACE_ROWS &&
                                 spec.member[e->event[k].seq].group != ALONE;
            const int64_t n = length_of_item(c, &e->event[k]);
            CHECK(goes_on || n <= before, "case %d, event %lld: %lld positions behind %lld", (int)i,
                  (long long)k, (long long)n, (long long)before);
            before = goes_on ? before : n;
        }
        free(e);
        crowd_free(c);
    }
    tl_small_step_ns = 0;
    tl_pool_destroy(tp);
}

/* Whether one of the first `threads` events begun is of that sequence. */
static bool begun_first(const struct events *e, int threads, int64_t seq)
{
    for (int64_t i = 0; i < e->trace.n; i++) {
        int earlier = 0;
        for (int64_t j = 0; j < e->trace.n; j++)
            earlier += e->event[j].begin_ns < e->event[i].begin_ns;
        if (e->event[i].seq == seq && earlier < threads)
            return true;
    }
    return false;
}

/* On two threads the longest sequence is one of the first two that are begun, wherever it stands.
 * (The thread that takes it may lose its CPU before it looks at the clock, hence five of nine.) */
TEST(the_longest_sequence_is_begun_first)
{
    tl_pool *tp = make_threads(2);
    for (int64_t place = 0; place < 14; place += 4)
        for (int rows = 1; rows <= 2; rows++) {
            struct crowd_spec spec = {
                .B = 14, .H = 2, .Hkv = 1, .D = 16, .block_tokens = 16, .seed = 3700};
            for (int64_t s = 0; s < spec.B; s++)
                spec.member[s] = (struct member){.group = ALONE,
                                                 .ctx = s == place ? 3000 : 200 + s,
                                                 .rows = rows,
                                                 .own_block = -1};
            struct crowd *c = crowd_make(&spec);
            struct events *e = must_alloc(sizeof *e);
            int first = 0;
            c->args.tp = tp;
            for (int i = 0; i < 9; i++) {
                run_traced(c, e);
                first += begun_first(e, 2, place);
            }
            CHECK(first >= 5, "sequence %lld, %d rows: begun first %d times of 9", (long long)place,
                  rows, first);
            free(e);
            crowd_free(c);
        }
    tl_pool_destroy(tp);
}

CHECK_MAIN()
