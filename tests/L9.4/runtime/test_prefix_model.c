/* SPDX-License-Identifier: MIT */
/* The prefix index against a plain list of what was entered, under random calls. The list knows no
 * tree and keeps no counts: what a call finds is looked for in all of it, which blocks are cached
 * follows from the definition, and the order of eviction from a time for each block. After every
 * call all that the pool and the index tell is compared. */
#include "kv_check.h"
#include "tinyllm/prefix.h"

enum {
    N_BLOCKS = 24,
    MOST_B = 16,
    MOST_BLOCKS = 6, /* of a sequence */
    MOST_TOKENS = MOST_BLOCKS * MOST_B,
    N_SEQS = 8,
    N_HASHES = 3
};

static const struct {
    const char *bytes;
    size_t n;
} spaces[] = {{NULL, 0}, {"a", 1}, {"aa", 2}, {"b", 1}, {"a\0", 2}};
enum { N_SPACES = sizeof spaces / sizeof *spaces, OUT = -1 };

struct block {
    uint32_t refs, pins, fill;
    uint64_t hash;
    int space; /* OUT: not in the index */
    uint32_t path[MOST_TOKENS], n_path; /* tokens from the first of the sequence on */
    bool cached;
    uint64_t since;
};

struct sequence {
    bool live;
    int space;
    uint32_t tokens[MOST_TOKENS], n_tokens, table[MOST_BLOCKS], n_blocks;
};

static struct {
    tl_kv_pool *kv;
    tl_prefix *px;
    uint32_t b;
    uint64_t rng, now;
    struct block block[N_BLOCKS];
    struct sequence seq[N_SEQS];
    tl_prefix_stats stats;
    uint32_t evictions;
} m;

static uint32_t below(uint32_t n)
{
    return (uint32_t)rng_below(&m.rng, n);
}

static uint32_t smaller(uint32_t x, uint32_t y)
{
    return x < y ? x : y;
}

/* ---- the list ---- */

static uint32_t common(const uint32_t *x, uint32_t n, const uint32_t *y, uint32_t k)
{
    uint32_t i = 0;
    while (i < n && i < k && x[i] == y[i])
        i++;
    return i;
}

static bool begins_with(const struct block *block, int space, const uint32_t *tokens, uint32_t n)
{
    return block->space == space && block->n_path >= n &&
           common(block->path, block->n_path, tokens, n) == n;
}

static uint32_t entry_of(int space, const uint32_t *tokens, uint32_t n)
{
    for (uint32_t id = 0; id < N_BLOCKS; id++)
        if (m.block[id].n_path == n && begins_with(&m.block[id], space, tokens, n))
            return id;
    return KV_NONE;
}

static bool stays_for_others(uint32_t id)
{
    const struct block *block = &m.block[id];
    for (uint32_t other = 0; other < N_BLOCKS && block->space != OUT; other++)
        if (m.block[other].refs > 0 && m.block[other].n_path > block->n_path &&
            begins_with(&m.block[other], block->space, block->path, block->n_path))
            return true;
    return false;
}

static bool is_frozen(const struct block *block)
{
    return block->hash != 0 || block->space != OUT;
}

/* Who has become cached since the last call: the deepest ones were so first. */
static void look_who_is_cached(void)
{
    for (int depth = MOST_TOKENS; depth >= 0; depth--) {
        for (uint32_t id = 0; id < N_BLOCKS; id++) {
            struct block *block = &m.block[id];
            if ((int)block->n_path != depth)
                continue;
            const bool cached = block->refs == 0 && is_frozen(block) && !stays_for_others(id);
            if (cached && !block->cached)
                block->since = ++m.now;
            block->cached = cached;
        }
    }
}

static uint32_t count_cached(void)
{
    uint32_t n = 0;
    for (uint32_t id = 0; id < N_BLOCKS; id++)
        n += m.block[id].cached;
    return n;
}

static uint32_t count_free(void)
{
    uint32_t n = 0;
    for (uint32_t id = 0; id < N_BLOCKS; id++)
        n += m.block[id].refs == 0 && !is_frozen(&m.block[id]);
    return n;
}

static void leave_index(struct block *block)
{
    block->space = OUT, block->hash = 0, block->n_path = 0, block->cached = false;
}

static uint32_t oldest(void)
{
    uint32_t id = KV_NONE;
    for (uint32_t i = 0; i < N_BLOCKS; i++)
        if (m.block[i].cached && (id == KV_NONE || m.block[i].since < m.block[id].since))
            id = i;
    return id;
}

/* ---- everything compared ---- */

static void check_blocks(void)
{
    tl_kv_block got[N_BLOCKS];
    CHECK_STATUS(tl_kv_blocks_get(m.kv, 0, N_BLOCKS, got), TL_OK);
    for (uint32_t id = 0; id < N_BLOCKS; id++) {
        const struct block *want = &m.block[id];
        const uint64_t hash = want->space != OUT ? TL_KV_HASH_PREFIX : want->hash;
        CHECK(got[id].refs == want->refs && got[id].fill == want->fill && got[id].hash == hash,
              "block %u: %u references not %u, fill %u not %u, hash %llx not %llx", id,
              got[id].refs, want->refs, got[id].fill, want->fill, (unsigned long long)got[id].hash,
              (unsigned long long)hash);
    }
}

static void check_order(void)
{
    uint32_t got[N_BLOCKS], n = 0;
    uint64_t last = 0;
    CHECK_STATUS(tl_kv_oldest(m.kv, N_BLOCKS, got, &n), TL_OK);
    CHECK(n == count_cached(), "%u cached, not %u", n, count_cached());
    for (uint32_t i = 0; i < n; i++) {
        CHECK(m.block[got[i]].cached, "block %u is not cached", got[i]);
        CHECK(m.block[got[i]].since > last, "block %u comes too late", got[i]);
        last = m.block[got[i]].since;
    }
    CHECK_STATS(m.kv, count_free(), N_BLOCKS - count_free() - n, n, m.evictions);
}

static void check_entries(void)
{
    for (uint32_t id = 0; id < N_BLOCKS; id++) {
        const struct block *want = &m.block[id];
        tl_prefix_block got;
        CHECK_STATUS(tl_prefix_block_get(m.px, id, &got),
                     want->space == OUT ? TL_ENOTFOUND : TL_OK);
        if (want->space == OUT)
            continue;
        CHECK(got.ns_bytes == spaces[want->space].n && got.pins == want->pins &&
                  got.depth == want->n_path / m.b - 1 &&
                  (got.ns_bytes == 0 ||
                   memcmp(got.ns, spaces[want->space].bytes, got.ns_bytes) == 0),
              "block %u", id);
        const uint32_t before = want->n_path - m.b;
        CHECK(memcmp(got.tokens, want->path + before, m.b * sizeof *got.tokens) == 0,
              "tokens of block %u", id);
        CHECK(got.parent == (before ? entry_of(want->space, want->path, before) : KV_NONE),
              "block %u follows %u", id, got.parent);
    }
}

static void check_stats(void)
{
    bool there[N_SPACES] = {false};
    tl_prefix_stats got;
    tl_prefix_stats_get(m.px, &got);
    m.stats.blocks = m.stats.namespaces = m.stats.pins = 0;
    for (uint32_t id = 0; id < N_BLOCKS; id++) {
        if (m.block[id].space == OUT)
            continue;
        m.stats.blocks++, m.stats.pins += m.block[id].pins;
        m.stats.namespaces += !there[m.block[id].space];
        there[m.block[id].space] = true;
    }
    m.stats.age_ns = got.age_ns, m.stats.last_age_ns = got.last_age_ns; /* as the clock says */
    CHECK(memcmp(&got, &m.stats, sizeof got) == 0, "the index counts otherwise");
}

static void check_all(void)
{
    look_who_is_cached();
    check_blocks();
    check_order();
    check_entries();
    check_stats();
}

/* ---- the calls ---- */

static bool alloc_blocks(uint32_t n, uint32_t *ids)
{
    const uint32_t n_free = count_free();
    if (n > n_free + count_cached()) {
        CHECK_STATUS(tl_kv_alloc(m.kv, n, ids), TL_EFULL);
        return false;
    }
    CHECK_STATUS(tl_kv_alloc(m.kv, n, ids), TL_OK);
    for (uint32_t i = 0; i < n; i++) {
        struct block *block = &m.block[ids[i]];
        if (i >= n_free) {
            CHECK(ids[i] == oldest(), "block %u goes, not %u", ids[i], oldest());
            for (uint32_t id = 0; id < N_BLOCKS; id++)
                CHECK(block->space == OUT || m.block[id].n_path <= block->n_path ||
                          !begins_with(&m.block[id], block->space, block->path, block->n_path),
                      "block %u goes before %u, which follows it", ids[i], id);
            m.stats.evictions += block->space != OUT;
            m.evictions++;
            leave_index(block);
        }
        CHECK(block->refs == 0 && !is_frozen(block), "block %u was taken", ids[i]);
        block->refs = 1, block->fill = 0;
    }
    check_all();
    return true;
}

static void set_fill(uint32_t id, uint32_t fill)
{
    CHECK_STATUS(tl_kv_set_fill(m.kv, id, fill), TL_OK);
    m.block[id].fill = fill;
}

static void unref(uint32_t id)
{
    struct block *block = &m.block[id];
    CHECK_STATUS(tl_kv_unref(m.kv, id), TL_OK);
    if (--block->refs == 0 && !is_frozen(block))
        block->fill = 0;
    check_all();
}

/* How much of a question there is, and the block of its last tokens where those end inside one. */
static uint32_t find(int space, const uint32_t *tokens, uint32_t n, uint32_t *partial)
{
    uint32_t most = 0;
    for (uint32_t id = 0; id < N_BLOCKS; id++)
        if (m.block[id].space == space) {
            const uint32_t same = common(m.block[id].path, m.block[id].n_path, tokens, n);
            most = same > most ? same : most;
        }
    /* Of several the greatest of those that come before the question, else the least. */
    const struct block *best = NULL;
    bool best_before = false;
    for (uint32_t id = 0; id < N_BLOCKS && most % m.b; id++) {
        const struct block *block = &m.block[id];
        if (block->n_path != (most / m.b + 1) * m.b || !begins_with(block, space, tokens, most))
            continue;
        const bool before = most < n && block->path[most] < tokens[most];
        bool greater = false;
        if (best) {
            const uint32_t same = common(block->path, block->n_path, best->path, best->n_path);
            greater = block->path[same] > best->path[same];
        }
        if (!best || (before && (!best_before || greater)) ||
            (!before && !best_before && !greater)) {
            best = block, best_before = before;
            *partial = id;
        }
    }
    return most;
}

static uint32_t match(int space, const uint32_t *tokens, uint32_t n, uint32_t *table)
{
    uint32_t partial = KV_NONE;
    const uint32_t want = find(space, tokens, n, &partial);
    int64_t peeked = -1, found = -1;
    CHECK_STATUS(
        tl_prefix_peek(m.px, spaces[space].bytes, spaces[space].n, tokens, n, &peeked), TL_OK);
    CHECK(peeked == want, "peek says %d, not %u", (int)peeked, want);
    check_all();
    CHECK_STATUS(
        tl_prefix_match(m.px, spaces[space].bytes, spaces[space].n, tokens, n, table, &found),
        TL_OK);
    CHECK(found == want, "found %d, not %u", (int)found, want);
    for (uint32_t i = 0; i * m.b < want; i++) {
        const uint32_t id =
            (i + 1) * m.b <= want ? entry_of(space, tokens, (i + 1) * m.b) : partial;
        CHECK(table[i] == id, "entry %u of %u tokens: block %u, not %u", i, want, table[i], id);
        m.block[id].refs++;
    }
    m.stats.queries++, m.stats.tokens_asked += n, m.stats.tokens_found += want;
    check_all();
    return want;
}

/* ---- inserting ---- */

static tl_status insert_status(const struct sequence *seq, int space, uint32_t first, uint32_t end)
{
    if (first > 0) {
        const struct block *front = &m.block[seq->table[first - 1]];
        if (front->space != space || front->n_path != first * m.b)
            return TL_EINVAL;
    }
    for (uint32_t i = first; i < end; i++)
        if (m.block[seq->table[i]].fill != m.b)
            return TL_EINVAL;
    for (uint32_t i = first; i < end; i++) {
        const struct block *block = &m.block[seq->table[i]];
        if (block->hash != 0 ||
            (block->space != OUT && (block->n_path != (i + 1) * m.b ||
                                     !begins_with(block, space, seq->tokens, (i + 1) * m.b))))
            return TL_EBUSY;
    }
    return TL_OK;
}

static void insert(struct sequence *seq, int space, uint32_t first, uint32_t end, bool want_twins)
{
    uint32_t twins[MOST_BLOCKS];
    memset(twins, 0xA5, sizeof twins);
    const tl_status status = insert_status(seq, space, first, end);
    CHECK_STATUS(tl_prefix_insert(m.px, spaces[space].bytes, spaces[space].n,
                                  seq->tokens + first * m.b, first, end - first, seq->table,
                                  want_twins ? twins : NULL),
                 status);
    uint32_t last = KV_NONE;
    for (uint32_t i = first; i < end && status == TL_OK; i++) {
        const uint32_t id = seq->table[i], there = entry_of(space, seq->tokens, (i + 1) * m.b);
        struct block *block = &m.block[id];
        last = there == KV_NONE ? id : there;
        if (there == KV_NONE) {
            block->space = space, block->n_path = (i + 1) * m.b;
            memcpy(block->path, seq->tokens, block->n_path * sizeof *block->path);
        }
        if (want_twins) {
            const uint32_t want = last == id ? KV_NONE : last;
            CHECK(twins[i - first] == want, "twin of %u: %u, not %u", id, twins[i - first], want);
            m.block[last].refs += last != id;
        }
    }
    for (uint32_t i = status == TL_OK && want_twins ? end - first : 0; i < MOST_BLOCKS; i++)
        CHECK(twins[i] == 0xA5A5A5A5u, "twins[%u] was written", i);
    /* Used just now, with all in front of it. */
    for (uint32_t id = 0; id < N_BLOCKS && last != KV_NONE; id++)
        if (begins_with(&m.block[last], m.block[id].space, m.block[id].path, m.block[id].n_path))
            m.block[id].cached = false;
    check_all();
    for (uint32_t i = first; i < end && status == TL_OK && want_twins; i++)
        if (twins[i - first] != KV_NONE) {
            const uint32_t own = seq->table[i];
            seq->table[i] = twins[i - first];
            unref(own);
        }
}

/* ---- what happens ---- */

static uint32_t random_token(void)
{
    return below(100) < 97 - 60 / m.b ? 1 : below(3);
}

static struct sequence *some_sequence(bool live)
{
    struct sequence *seq = &m.seq[below(N_SEQS)];
    return seq->live == live ? seq : NULL;
}

/* The tokens of an entry, some of them, or new ones. */
static uint32_t random_tokens(uint32_t *tokens, int *space)
{
    uint32_t n = 0;
    const struct block *block = &m.block[below(N_BLOCKS)];
    *space = (int)below(N_SPACES);
    if (block->space != OUT) {
        *space = block->space;
        n = below(block->n_path + 1);
        memcpy(tokens, block->path, n * sizeof *tokens);
    }
    const uint32_t more = below(MOST_BLOCKS * m.b - n + 1);
    for (uint32_t i = 0; i < more; i++)
        tokens[n++] = random_token();
    return n;
}

static void give_up(struct sequence *seq)
{
    const uint32_t how = below(3);
    seq->live = false;
    for (uint32_t n = seq->n_blocks; n > 0; n--) { /* back first, front first, or as it comes */
        const uint32_t i = how == 0 ? n - 1 : how == 1 ? 0 : below(n), id = seq->table[i];
        memmove(seq->table + i, seq->table + i + 1, (n - i - 1) * sizeof *seq->table);
        unref(id);
    }
}

/* Makes room for the tokens, and says what the blocks hold. */
static bool grow(struct sequence *seq, uint32_t n_tokens)
{
    const uint32_t n = (n_tokens + m.b - 1) / m.b;
    if (n > seq->n_blocks && !alloc_blocks(n - seq->n_blocks, seq->table + seq->n_blocks))
        return false;
    const uint32_t from = seq->n_tokens / m.b;
    seq->n_blocks = n, seq->n_tokens = n_tokens;
    for (uint32_t i = from; i < n; i++)
        if (!is_frozen(&m.block[seq->table[i]]))
            set_fill(seq->table[i], smaller(n_tokens - i * m.b, m.b));
    return true;
}

static void begin(void)
{
    struct sequence *seq = some_sequence(false);
    if (!seq)
        return;
    const uint32_t n = random_tokens(seq->tokens, &seq->space);
    const uint32_t found = below(4) ? match(seq->space, seq->tokens, n, seq->table) : 0;
    seq->live = true;
    seq->n_blocks = (found + m.b - 1) / m.b, seq->n_tokens = found;
    if (found % m.b) { /* goes on in a copy */
        uint32_t copy;
        const uint32_t shared = seq->table[seq->n_blocks - 1];
        const bool room = alloc_blocks(1, &copy);
        seq->n_tokens -= found % m.b;
        seq->n_blocks--;
        unref(shared);
        if (room)
            seq->table[seq->n_blocks++] = copy;
    }
    if (!grow(seq, n))
        give_up(seq);
}

static void go_on(void)
{
    struct sequence *seq = some_sequence(true);
    if (!seq)
        return;
    const uint32_t n = seq->n_tokens + below(MOST_BLOCKS * m.b - seq->n_tokens + 1);
    for (uint32_t i = seq->n_tokens; i < n; i++)
        seq->tokens[i] = random_token();
    (void)grow(seq, n);
}

static void enter(void)
{
    struct sequence *seq = some_sequence(true);
    if (!seq)
        return;
    const uint32_t end = below(4) ? seq->n_tokens / m.b : below(seq->n_blocks + 1),
                   first = below(2) ? 0 : below(end + 1);
    if (first < end)
        insert(seq, below(8) ? seq->space : (int)below(N_SPACES), first, end, below(2));
}

static void fork_one(void)
{
    const struct sequence *from = some_sequence(true);
    struct sequence *to = some_sequence(false);
    if (!from || !to)
        return;
    *to = *from;
    to->n_blocks = to->n_tokens / m.b; /* the full ones */
    to->n_tokens = to->n_blocks * m.b;
    for (uint32_t i = 0; i < to->n_blocks; i++) {
        tl_kv_ref(m.kv, to->table[i]);
        m.block[to->table[i]].refs++;
    }
    check_all();
}

static void end(void)
{
    struct sequence *seq = some_sequence(true);
    if (seq)
        give_up(seq);
}

static void pin_or_unpin(void)
{
    uint32_t tokens[MOST_TOKENS];
    int space;
    const uint32_t n = random_tokens(tokens, &space), full = n / m.b * m.b,
                   id = full ? entry_of(space, tokens, full) : KV_NONE;
    const bool pin = below(2);
    const tl_status status = (pin ? tl_prefix_pin : tl_prefix_unpin)(
        m.px, spaces[space].bytes, spaces[space].n, tokens, n);
    CHECK_STATUS(status, !full                                             ? TL_EINVAL
                         : id == KV_NONE || (!pin && m.block[id].pins == 0) ? TL_ENOTFOUND
                                                                            : TL_OK);
    if (status == TL_OK && pin)
        m.block[id].pins++, m.block[id].refs++;
    else if (status == TL_OK)
        m.block[id].pins--, m.block[id].refs--;
    check_all();
}

static void unpin_all(void)
{
    for (uint32_t id = 0; id < N_BLOCKS; id++) {
        struct block *block = &m.block[id];
        while (block->pins > 0) {
            CHECK_STATUS(tl_prefix_unpin(m.px, spaces[block->space].bytes, spaces[block->space].n,
                                         block->path, block->n_path),
                         TL_OK);
            block->pins--, block->refs--;
            check_all();
        }
    }
}

static void drop_all_of(int space)
{
    for (uint32_t id = 0; id < N_BLOCKS; id++) {
        struct block *block = &m.block[id];
        if (block->space != space)
            continue;
        leave_index(block);
        block->refs -= block->pins;
        block->pins = 0;
        block->fill = block->refs ? block->fill : 0;
    }
}

static void drop(void)
{
    const int space = (int)below(N_SPACES);
    CHECK_STATUS(tl_prefix_drop(m.px, spaces[space].bytes, spaces[space].n), TL_OK);
    drop_all_of(space);
    check_all();
}

/* A block with a name of the user's, kept for a while after. */
static void name_one(void)
{
    struct sequence *seq = some_sequence(true);
    const uint64_t hash = below(N_HASHES) + 1;
    if (!seq || seq->n_tokens < m.b)
        return;
    const uint32_t id = seq->table[seq->n_tokens / m.b - 1];
    struct block *block = &m.block[id];
    bool held = false;
    for (uint32_t i = 0; i < N_BLOCKS; i++)
        held |= i != id && m.block[i].hash == hash;
    const tl_status want = block->hash == hash        ? TL_OK
                           : is_frozen(block)         ? TL_EINVAL
                           : held                     ? TL_EBUSY
                                                      : TL_OK;
    CHECK_STATUS(tl_kv_register(m.kv, id, hash), want);
    if (want == TL_OK)
        block->hash = hash;
    check_all();
}

static void look_up(void)
{
    const uint64_t hash = below(N_HASHES) + 1;
    uint32_t id = KV_NONE;
    for (uint32_t i = 0; i < N_BLOCKS; i++)
        id = m.block[i].hash == hash ? i : id;
    uint32_t got = KV_NONE;
    CHECK_STATUS(tl_kv_lookup(m.kv, hash, &got), id == KV_NONE ? TL_ENOTFOUND : TL_OK);
    CHECK(got == id, "block %u, not %u", got, id);
    if (id == KV_NONE)
        return;
    m.block[id].refs++;
    check_all();
    unref(id);
}

/* What is in the index or under a name is frozen, whoever holds it. */
static void change_fill(void)
{
    const uint32_t id = below(N_BLOCKS), fill = below(m.b + 1);
    struct block *block = &m.block[id];
    const bool may = block->refs > 0 && !is_frozen(block) && block->fill < m.b;
    if (block->refs > 0 && !is_frozen(block) && !may)
        return; /* a full block of a sequence stays full */
    CHECK_STATUS(tl_kv_set_fill(m.kv, id, may ? block->fill : fill), may ? TL_OK : TL_EINVAL);
    check_all();
}

static void run(uint32_t block_tokens, uint64_t seed, int steps)
{
    static void (*const calls[])(void) = {begin, begin, begin, begin, go_on,    go_on,
                                          enter, enter, enter, enter, fork_one, end,
                                          end,   end,   pin_or_unpin, pin_or_unpin, name_one,
                                          look_up, change_fill};
    memset(&m, 0, sizeof m);
    m.b = block_tokens, m.rng = seed;
    m.kv = kv_new(N_BLOCKS, block_tokens, 1, 1, 1);
    CHECK_STATUS(tl_prefix_create(m.kv, &m.px), TL_OK);
    for (uint32_t id = 0; id < N_BLOCKS; id++)
        m.block[id].space = OUT;
    for (int i = 0; i < steps; i++) {
        calls[below(sizeof calls / sizeof *calls)]();
        if (below(200) == 0)
            drop();
        if (below(100) == 0)
            unpin_all();
    }
    CHECK(m.stats.evictions > (uint64_t)steps / 100 && m.stats.tokens_found > (uint64_t)steps / 20,
          "the walk saw too little: %llu evictions, %llu tokens found",
          (unsigned long long)m.stats.evictions, (unsigned long long)m.stats.tokens_found);
    tl_prefix_destroy(m.px);
    for (int space = 0; space < N_SPACES; space++)
        drop_all_of(space);
    look_who_is_cached();
    check_blocks();
    check_order();
    kv_audit(m.kv);
    tl_kv_pool_destroy(m.kv);
}

TEST(what_the_index_does_is_what_the_list_says_with_blocks_of_one_token)
{
    for (uint64_t seed = 1; seed <= 4; seed++)
        run(1, seed, 20000);
}

TEST(what_the_index_does_is_what_the_list_says_with_blocks_of_three_tokens)
{
    for (uint64_t seed = 11; seed <= 14; seed++)
        run(3, seed, 20000);
}

TEST(what_the_index_does_is_what_the_list_says_with_blocks_of_sixteen_tokens)
{
    for (uint64_t seed = 21; seed <= 24; seed++)
        run(16, seed, 20000);
}

CHECK_MAIN()
