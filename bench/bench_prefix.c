/* SPDX-License-Identifier: MIT */
/* bench_prefix.c: the prefix index beside block hashes, which other engines find prefixes by.
 *
 *     bench_prefix [--quick] [--json FILE] [ops chat ...]
 *
 * ops: nanoseconds a block of 16 tokens, in pools of a thousand to a million blocks that are full
 * of sequences of ten: finding and giving back, evicting, entering, becoming cached. "by hash" is
 * the same done with tl_kv_block_hash, tl_kv_register and tl_kv_lookup, in a pool of its own that
 * takes turns. Tokens are random, or all the same but for a block's last. What is looked for was
 * touched by nothing just before. chat: which share of the tokens of prompts need not be computed,
 * in a pool too small for all conversations. */
#include "bench.h"
#include "tinyllm.h"

#define CHECK(cond)                                                                           \
    do {                                                                                      \
        if (!(cond)) {                                                                        \
            fprintf(stderr, "bench_prefix.c:%d: %s: %s\n", __LINE__, #cond, tl_last_error()); \
            exit(1);                                                                          \
        }                                                                                     \
    } while (0)

static uint64_t mix(uint64_t x)
{
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 27) * 0x94D049BB133111EBu;
    return x ^ x >> 31;
}

static tl_kv_pool *new_pool(uint32_t n_blocks, uint32_t b)
{
    tl_kv_pool *kv;
    const tl_kv_cfg cfg = {n_blocks, b, 1, 1, 1, TL_F16, TL_KV_FORMAT_F16};
    CHECK(tl_kv_pool_create(&cfg, &kv) == TL_OK);
    return kv;
}

/* ---- one interface for both ways: px, or hashes where it is NULL ---- */

struct cache {
    tl_kv_pool *kv;
    tl_prefix *px;
    uint32_t b;
};

static struct cache new_cache(uint32_t n_blocks, uint32_t b, bool by_tokens)
{
    struct cache c = {.kv = new_pool(n_blocks, b), .b = b};
    if (by_tokens)
        CHECK(tl_prefix_create(c.kv, &c.px) == TL_OK);
    return c;
}

static void end_cache(struct cache *c)
{
    tl_prefix_destroy(c->px);
    tl_kv_pool_destroy(c->kv);
}

/* How many of n tokens are there; their blocks are in table, each with a reference. */
static int64_t find(const struct cache *c, const uint32_t *tokens, int64_t n, uint32_t *table)
{
    int64_t found = 0;
    if (c->px) {
        CHECK(tl_prefix_match(c->px, NULL, 0, tokens, n, table, &found) == TL_OK);
        return found;
    }
    uint64_t hash = 0;
    for (int64_t i = 0; (i + 1) * c->b <= n; i++, found += c->b) {
        hash = tl_kv_block_hash(hash, tokens + i * c->b, c->b);
        if (tl_kv_lookup(c->kv, hash, &table[i]) != TL_OK)
            break;
    }
    return found;
}

/* Enters n full blocks. Where a hash is held already the block stays without a name. */
static void enter(const struct cache *c, const uint32_t *tokens, int64_t n, const uint32_t *table)
{
    if (c->px) {
        CHECK(tl_prefix_insert(c->px, NULL, 0, tokens, 0, n, table, NULL) == TL_OK);
        return;
    }
    uint64_t hash = 0;
    for (int64_t i = 0; i < n; i++) {
        hash = tl_kv_block_hash(hash, tokens + i * c->b, c->b);
        const tl_status status = tl_kv_register(c->kv, table[i], hash);
        CHECK(status == TL_OK || status == TL_EBUSY);
    }
}

/* The last one first, so that what is evicted takes nothing with it. */
static void give_back(const struct cache *c, int64_t n, const uint32_t *table)
{
    while (n > 0)
        CHECK(tl_kv_unref(c->kv, table[--n]) == TL_OK);
}

/* ---- ops ---- */

enum { B = 16, LONG = 10, MOST_SEQS = 200, MOST_OPS_TURNS = 60 };
enum phase { PEEK, FIND, GIVE_BACK, EVICT, ENTER, CACHE, N_PHASES };
static const char *const phase_names[] = {"peek",  "find",  "give back",
                                          "evict", "enter", "become cached"};

struct ops {
    struct cache cache;
    bool alike;     /* the tokens */
    uint64_t n_seqs; /* ever entered */
    double sample[N_PHASES][MOST_OPS_TURNS];
};

static uint32_t tokens_of[MOST_SEQS][LONG * B], tables[MOST_SEQS][LONG];

static void write_tokens(bool alike, uint64_t seq, uint32_t *tokens)
{
    for (uint32_t i = 0; i < LONG * B; i++)
        tokens[i] = !alike           ? (uint32_t)(mix(seq * 1000 + i + 1) % 50000)
                    : i % B < B - 1 ? 7
                    : i < B         ? (uint32_t)mix(seq)
                                    : (uint32_t)seq + i;
}

static void take_blocks(const struct cache *c, uint32_t *table)
{
    CHECK(tl_kv_alloc(c->kv, LONG, table) == TL_OK);
}

static void fill_blocks(const struct cache *c, const uint32_t *table)
{
    for (int i = 0; i < LONG; i++)
        CHECK(tl_kv_set_fill(c->kv, table[i], B) == TL_OK);
}

static void fill_pool(struct ops *u, uint32_t n_blocks)
{
    for (uint32_t i = 0; i < n_blocks / LONG; i++) {
        write_tokens(u->alike, u->n_seqs++, tokens_of[0]);
        take_blocks(&u->cache, tables[0]);
        fill_blocks(&u->cache, tables[0]);
        enter(&u->cache, tokens_of[0], LONG, tables[0]);
        give_back(&u->cache, LONG, tables[0]);
    }
}

/* n sequences of the newer half, which no eviction has reached. */
static void choose_some(const struct ops *u, int n, uint32_t n_blocks)
{
    for (int i = 0; i < n; i++)
        write_tokens(u->alike, u->n_seqs - 1 - bench_random() % (n_blocks / LONG / 2),
                     tokens_of[i]);
}

static void peek_some(struct ops *u, int n, int turn)
{
    const double start = cpu_s();
    for (int i = 0; i < n; i++) {
        int64_t found = 0;
        CHECK(tl_prefix_peek(u->cache.px, NULL, 0, tokens_of[i], LONG * B, &found) == TL_OK);
        CHECK(found == LONG * B);
    }
    u->sample[PEEK][turn] = cpu_s() - start;
}

static void find_some(struct ops *u, int n, int turn)
{
    const double start = cpu_s();
    for (int i = 0; i < n; i++)
        CHECK(find(&u->cache, tokens_of[i], LONG * B, tables[i]) == LONG * B);
    const double found = cpu_s();
    for (int i = 0; i < n; i++)
        give_back(&u->cache, LONG, tables[i]);
    u->sample[FIND][turn] = found - start;
    u->sample[GIVE_BACK][turn] = cpu_s() - found;
}

/* n new sequences take the place of those used longest ago. */
static void turn_over_some(struct ops *u, int n, int turn)
{
    const struct cache *c = &u->cache;
    for (int i = 0; i < n; i++)
        write_tokens(u->alike, u->n_seqs++, tokens_of[i]);
    double at[5] = {cpu_s()};
    for (int i = 0; i < n; i++)
        take_blocks(c, tables[i]);
    at[1] = cpu_s();
    for (int i = 0; i < n; i++)
        fill_blocks(c, tables[i]);
    at[2] = cpu_s();
    for (int i = 0; i < n; i++)
        enter(c, tokens_of[i], LONG, tables[i]);
    at[3] = cpu_s();
    for (int i = 0; i < n; i++)
        give_back(c, LONG, tables[i]);
    at[4] = cpu_s();
    u->sample[EVICT][turn] = at[1] - at[0];
    u->sample[ENTER][turn] = at[3] - at[2];
    u->sample[CACHE][turn] = at[4] - at[3];
}

static void print_line(const struct race *r, const char *what, double *sample, int turns,
                       double scale, const char *unit)
{
    const double p10 = quantile(sample, turns, 0.1) * scale,
                 p50 = quantile(sample, turns, 0.5) * scale,
                 p90 = quantile(sample, turns, 0.9) * scale;
    printf("%-6s %-28s %-24s %8.1f %-4s (%.1f - %.1f)\n", r->group, r->size, what, p50, unit, p10,
           p90);
    if (r->json)
        fprintf(r->json,
                "{\"group\":\"%s\",\"size\":\"%s\",\"what\":\"%s\",\"unit\":\"%s\",\"median\":%.4g,"
                "\"p10\":%.4g,\"p90\":%.4g}\n",
                r->group, r->size, what, unit, p50, p10, p90);
    fflush(stdout);
}

static void bench_ops_of(struct race *r, uint32_t n_blocks, bool alike)
{
    static struct ops ways[2];
    const int n = n_blocks / 40 < MOST_SEQS ? (int)n_blocks / 40 : MOST_SEQS,
              turns = r->quick ? 9 : MOST_OPS_TURNS;
    for (int way = 0; way < 2; way++) {
        ways[way] = (struct ops){.cache = new_cache(n_blocks, B, way == 0), .alike = alike};
        fill_pool(&ways[way], n_blocks);
    }
    for (int turn = 0; turn < turns; turn++)
        for (int way = 0; way < 2; way++) {
            if (way == 0) {
                choose_some(&ways[way], n, n_blocks);
                peek_some(&ways[way], n, turn);
            }
            choose_some(&ways[way], n, n_blocks);
            find_some(&ways[way], n, turn);
            turn_over_some(&ways[way], n, turn);
        }
    snprintf(r->size, sizeof r->size, "%u blocks, %s", n_blocks, alike ? "all alike" : "random");
    for (int phase = 0; phase < N_PHASES; phase++)
        for (int way = 0; way < (phase == PEEK ? 1 : 2); way++) {
            char what[64];
            snprintf(what, sizeof what, "%s%s", phase_names[phase], way ? ", by hash" : "");
            print_line(r, what, ways[way].sample[phase], turns, 1e9 / (n * LONG), "ns");
        }
    for (int way = 0; way < 2; way++)
        end_cache(&ways[way].cache);
}

static void bench_ops(struct race *r)
{
    for (uint32_t n_blocks = 1000; n_blocks <= 1000000; n_blocks *= 10)
        for (int alike = 0; alike < 2; alike++)
            bench_ops_of(r, n_blocks, alike);
}

/* ---- chat ---- */

/* Conversations begin with one of a few system prompts. A turn is a message and its answer; now and
 * then the last message is changed from some word on instead. Some sequences run at a time; then
 * their blocks are given back. Lengths are uniform. */
enum {
    N_PROMPTS = 4,
    PROMPT_LOW = 200,
    PROMPT_HIGH = 1200,
    MESSAGE_LOW = 5,
    MESSAGE_HIGH = 200,
    ANSWER_LOW = 20,
    ANSWER_HIGH = 400,
    MOST_TURNS = 8,
    MOST_TOKENS = PROMPT_HIGH + MOST_TURNS * (MESSAGE_HIGH + ANSWER_HIGH),
    N_TALKS = 300,
    RUNNING = 8,
    N_REQUESTS = 6000,
    POOL_TOKENS = 256 * 1024,
    SEEDS = 9
};

struct talk {
    int64_t n, message; /* tokens; where the last message begins */
    int turns_left;
    uint32_t tokens[MOST_TOKENS];
};

struct running {
    int64_t n_blocks;
    uint32_t table[MOST_TOKENS + 1];
};

struct chat {
    struct cache cache;
    uint64_t rng;
    struct talk *talks;       /* [N_TALKS] */
    struct running *running;  /* [RUNNING] */
    int64_t asked, found;     /* tokens of prompts */
    double seconds;           /* in the cache */
};

static int64_t uniform(struct chat *c, int64_t low, int64_t high)
{
    c->rng = mix(c->rng + 0x9E3779B97F4A7C15u);
    return low + (int64_t)(c->rng % (uint64_t)(high - low + 1));
}

static void say(struct chat *c, struct talk *talk, int64_t n)
{
    while (n-- > 0)
        talk->tokens[talk->n++] = (uint32_t)uniform(c, 0, 49999);
}

static void begin_talk(struct chat *c, struct talk *talk)
{
    const uint64_t prompt = (uint64_t)uniform(c, 1, N_PROMPTS);
    const int64_t n = PROMPT_LOW + (int64_t)(mix(prompt) % (PROMPT_HIGH - PROMPT_LOW + 1));
    for (int64_t i = 0; i < n; i++)
        talk->tokens[i] = (uint32_t)(mix(prompt * 10000 + (uint64_t)i) % 50000);
    talk->n = n;
    talk->message = 0;
    talk->turns_left = (int)uniform(c, 1, MOST_TURNS);
}

/* Now and then the last message changes, from some token on, and its answer goes. */
static void add_message(struct chat *c, struct talk *talk)
{
    if (talk->message > 0 && uniform(c, 0, 9) == 0)
        talk->n = talk->message + uniform(c, 1, MESSAGE_LOW);
    else
        talk->message = talk->n;
    say(c, talk, uniform(c, MESSAGE_LOW, MESSAGE_HIGH - MESSAGE_LOW));
}

/* The prompt is looked for, but for its last token, whose output is needed; the answer follows; all
 * full blocks are entered. */
static void serve(struct chat *c, struct talk *talk, struct running *run)
{
    const struct cache *cache = &c->cache;
    const int64_t b = cache->b, prompt = talk->n;
    double start = cpu_s();
    give_back(cache, run->n_blocks, run->table);
    const int64_t found = find(cache, talk->tokens, prompt - 1, run->table);
    c->seconds += cpu_s() - start;
    c->asked += prompt, c->found += found;
    say(c, talk, uniform(c, ANSWER_LOW, ANSWER_HIGH));
    start = cpu_s();
    const int64_t shared = found / b, n = (talk->n + b - 1) / b;
    uint32_t partial = 0;
    if (found % b) /* goes on in a copy, for which there must be room beside it */
        partial = run->table[shared];
    CHECK(tl_kv_alloc(cache->kv, (uint32_t)(n - shared), run->table + shared) == TL_OK);
    if (found % b)
        CHECK(tl_kv_unref(cache->kv, partial) == TL_OK);
    CHECK(tl_kv_set_length(cache->kv, run->table, (int32_t)n, shared * b, talk->n) == TL_OK);
    enter(cache, talk->tokens, talk->n / b, run->table);
    run->n_blocks = n;
    c->seconds += cpu_s() - start;
}

/* The share of tokens found; *ns is how long the cache took for each token of the prompts. */
static double chat(uint32_t b, bool by_tokens, uint64_t seed, int n_requests, double *ns)
{
    struct chat c = {.cache = new_cache(POOL_TOKENS / b, b, by_tokens), .rng = seed};
    c.talks = must(calloc(N_TALKS, sizeof *c.talks));
    c.running = must(calloc(RUNNING, sizeof *c.running));
    for (int i = 0; i < n_requests; i++) {
        struct talk *talk = &c.talks[uniform(&c, 0, N_TALKS - 1)];
        if (talk->turns_left-- == 0)
            begin_talk(&c, talk);
        add_message(&c, talk);
        serve(&c, talk, &c.running[i % RUNNING]);
    }
    end_cache(&c.cache);
    free(c.talks), free(c.running);
    *ns = 1e9 * c.seconds / (double)c.asked;
    return (double)c.found / (double)c.asked;
}

static void bench_chat(struct race *r)
{
    static const uint32_t sizes[] = {16, 128};
    const int n_requests = r->quick ? N_REQUESTS / 4 : N_REQUESTS;
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes; i++) {
        double share[2][SEEDS], ns[2][SEEDS];
        for (int seed = 0; seed < SEEDS; seed++)
            for (int way = 0; way < 2; way++)
                share[way][seed] =
                    chat(sizes[i], way == 0, (uint64_t)seed + 1, n_requests, &ns[way][seed]);
        snprintf(r->size, sizeof r->size, "blocks of %u", sizes[i]);
        for (int way = 0; way < 2; way++) {
            print_line(r, way ? "not computed, by hash" : "not computed", share[way], SEEDS, 100,
                       "%");
            print_line(r, way ? "time a token, by hash" : "time a token", ns[way], SEEDS, 1, "ns");
        }
    }
}

int main(int argc, char **argv)
{
    struct race r = race_arguments(argc, argv);
    printf("%s; %s\n", cpu_model(), __VERSION__);
    if (race_group(&r, "ops"))
        bench_ops(&r);
    if (race_group(&r, "chat"))
        bench_chat(&r);
    if (r.json)
        fclose(r.json);
    return 0;
}
