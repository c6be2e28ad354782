/* SPDX-License-Identifier: MIT */
/* attention.h: prefill over contiguous K and V, one decode step over a paged KV cache, and any
 * mixture of rows over anyone's paged memory, finished or as states to be merged.
 *
 * Dimensions: B sequences, H query heads, Hkv KV heads, G = H / Hkv heads in a group (query head h
 * reads KV head h / G), D head width.
 *
 *     s[j]   = scale * dot(q, k[j])                        for every key j the row sees
 *     out    = sum over j of softmax(s)[j] * v[j]          lse = ln(sum over j of e^s[j])
 *
 * A row at position p sees key j when (not causal or j <= p) and (window <= 0 or j > p - window):
 * the window counts the row's own position.
 * A sink logit joins the denominator once, unscaled, with no value. A row that sees no key: out = 0
 * and lse = -inf (with a sink: out = 0, lse = the sink). A visible score that is NaN or +inf, or a
 * sink that is, makes the row NaN, always as 0x7FC00000.
 *
 * Bits: a row of the result is a pure function of that row of q, the K and V it sees and the scalar
 * options: the same in any batch, on any number of threads, on every instruction set, in any
 * blocks, by prefill or by decode, in any float mode of the caller (ABI.md, "Bits"; the arithmetic
 * is written in c/src/numerics/canon.h and c/src/kernels/attn_rows.isa.c).
 * Threads: reentrant; calls may share a pool of blocks while nobody writes the blocks they read. */
#ifndef TINYLLM_ATTENTION_H
#define TINYLLM_ATTENTION_H

#include "arena.h"
#include "kv_pool.h"
#include "kv_view.h"
#include "observe.h"
#include "pool.h"

/* Positions that are worked on together, all anchored at absolute position 0: in one vector of
 * scores; in one unnormalised state (m, L, a); in one run of states that are merged before they
 * join what is left of them. */
#define TL_ATTN_TILE 16
#define TL_ATTN_SPLIT 1024
#define TL_ATTN_STRETCH 16384

/* The widest head, of K and of V. */
#define TL_MAX_HEAD_DIM 4096

/* Stack that a call without a pool takes; with one a thread of 32 KiB is enough for it, since the
 * memory that workers compute in belongs to the pool. */
#define TL_ATTN_STACK_BYTES 114688

TL_BEGIN_DECLS

/* Prefill (or any forward) over contiguous keys and values.
 *
 *   q            [B,H,Tq,D]    read     row i stands at position q_offset + i
 *   k, v         [B,Hkv,Tk,D]  read     key j stands at position j; may be NULL when Tk == 0
 *   o            [B,H,Tq,D]    written
 *   lse          [B,H,Tq]      written, natural logarithm; or NULL
 *   sink_logits  [H]           read; or NULL
 *   Br, Bc       tile hints, 0 picks; no bit of the result depends on them
 *   scratch      without a pool: where working memory of a size independent of Tk comes from, left
 *                at the mark it was found at; NULL: a private one. With a pool the pool's own is
 *                used
 *   tp           who works; NULL: the calling thread
 *
 * All f32, row-major and contiguous. Outputs overlap neither inputs nor each other. With D == 0
 * every dot is +0, nothing is written to o and lse is.
 * B, H or Tq == 0: TL_OK and nothing is written.
 *
 * Errors, o and lse untouched, the first of these decides:
 *   TL_EINVAL        negative dimensions; Hkv < 1 with H > 0
 *   TL_EINVAL        q_offset < 0 or q_offset + Tq past INT64_MAX; Br or Bc < 0
 *   TL_EINVAL        a size beyond the address space
 *   TL_EINVAL        a NULL tensor that would be read or written
 *   TL_ESHAPE        H % Hkv != 0 or Hkv > H
 *   TL_EUNSUPPORTED  D above TL_MAX_HEAD_DIM
 *   TL_EUNSUPPORTED  TINYLLM_ISA names what is not here
 *   TL_EINVAL        o or lse overlaps an input or the other
 *   TL_EBUSY         called on tp from inside one of its ranges
 *   TL_ENOMEM        scratch cannot grow */
TL_API tl_status tl_flash_attn_fwd_f32(const float *q, const float *k, const float *v, float *o,
                                       float *lse, int64_t B, int64_t H, int64_t Hkv, int64_t Tq,
                                       int64_t Tk, int64_t D, float scale, int64_t q_offset,
                                       int causal, int64_t window, const float *sink_logits,
                                       int64_t Br, int64_t Bc, tl_arena *scratch, tl_pool *tp);

/* One decode step over the paged cache: sequence s holds ctx_lens[s] positions, the newest
 * included, and its query stands at position ctx_lens[s] - 1. Position j lives in slot j %
 * block_tokens of block block_tables[s][j / block_tokens].
 *
 *   q             [B,H,D] f32            read
 *   block_tables  [B,max_blocks] u32     read, only the entries that hold a visible position:
 *                                        entries past the last needed one, or wholly before the
 *                                        window, may be anything
 *   ctx_lens      [B] i32, in tokens     read, 1 <= ctx_lens[s] <= max_blocks * block_tokens
 *   out           [B,H,D] f32            written; does not overlap q
 *
 * K and V are read as f16 and widened exactly; slots no visible position occupies are never read.
 * Blocks that several sequences of the batch begin with are read once for all of them.
 * Allocates nothing, takes no lock but tp's, and TL_ATTN_STACK_BYTES of stack at most.
 *
 * Errors, out untouched, the first of these decides:
 *   TL_EINVAL        q, kv, block_tables, ctx_lens or out NULL (tp may be NULL)
 *   TL_EINVAL        B < 0, max_blocks < 1, layer out of range, tables beyond the address space
 *   TL_ESHAPE        Hkv or D other than the pool's; H < 1 or H % Hkv != 0
 *   TL_EUNSUPPORTED  D above TL_MAX_HEAD_DIM
 *   TL_EINVAL        q beyond the address space
 *   TL_EUNSUPPORTED  TINYLLM_ISA names what is not here
 *   TL_EINVAL        sequence by sequence: a context length below 1 or longer than max_blocks
 *                    holds, an entry that would be read and names no block
 *   TL_EINVAL        out overlaps an input
 *   TL_EBUSY         called on tp from inside one of its ranges
 * B == 0 with all else in order: TL_OK, nothing read or written. */
TL_API tl_status tl_paged_attn_decode_f32(const float *q, const tl_kv_pool *kv, uint32_t layer,
                                          const uint32_t *block_tables, int32_t max_blocks,
                                          const int32_t *ctx_lens, float *out, int64_t B, int64_t H,
                                          int64_t Hkv, int64_t D, float scale, int64_t window,
                                          tl_pool *tp);

/* What tl_paged_attn_f32 is told. Set `size`, zero the rest, and fill in what is meant: later
 * versions add members behind, and take a smaller size for what it was. Sizes known so far: 176
 * (all before `trace`), 184 (all before `first_block`), 200.
 *
 * Rows. Sequence s owns the q_len = cu_seqlens_q[s+1] - cu_seqlens_q[s] rows from cu_seqlens_q[s]
 * on; its row i stands at position p = ctx_lens[s] - q_len + i, so that the last one is the newest
 * position. Without cu_seqlens_q every sequence owns one. q_len 0 is legal and reads nothing. A row
 * sees key j when j <= p and (window <= 0 or j > p - window).
 *
 * The order of operations for a score, each rounded once:
 *
 *     s = scale * dot
 *     s = cap * tanh(s / cap)              where logits_softcap = cap > 0
 *     s = fma(alibi_slopes[h], j - p, s)   where given
 *
 * then the maximum, the exponentials, the values and the sink as everywhere in this header. */
typedef struct {
    uint64_t size;               /* sizeof(tl_paged_attn_args) */
    const tl_kv_view *view;
    const float *q;              /* [total_q, H, head_dim_k], strides below; innermost contiguous */
    float *out;                  /* [total_q, H, head_dim_v], likewise; written */
    float *lse;                  /* [total_q, H] contiguous, written; or NULL */
    int64_t q_token_stride, q_head_stride, out_token_stride, out_head_stride; /* elements */
    int64_t B, H;
    const int32_t *cu_seqlens_q; /* [B+1], from 0, not decreasing; NULL: one row a sequence */
    /* [B] tokens, a sequence's own rows included; >= q_len, and >= 1 without cu_seqlens_q */
    const int32_t *ctx_lens;
    /* [B] rows of table_stride entries; only entries that hold a visible position are read */
    const uint32_t *block_tables;
    int64_t table_stride;        /* also how many entries a table has */
    int64_t window;              /* <= 0: none */
    const float *alibi_slopes;   /* [H], or NULL */
    /* [H], or NULL: joins each row's denominator once; -inf is no sink */
    const float *sink_logits;
    float scale;
    float logits_softcap;        /* > 0, or 0: none */
    tl_pool *tp;                 /* who works; NULL: the calling thread */
    /* where splits may be worked on side by side, aligned for floats; NULL: none. Not read
     * before */
    void *workspace;
    /* at least tl_paged_attn_workspace's where workspace is not NULL */
    size_t workspace_bytes;
    /* where the call writes down who did what when; NULL: nowhere. Changes no bit */
    tl_trace *trace;
    /* of tl_paged_attn_states_f32, 0 elsewhere: entry i of a table is the block of positions
     * (first_block + i) * block_tokens and up, so that who owns a part of a context passes no more
     * than its own entries */
    int64_t first_block;
    /* of tl_paged_attn_states_f32, 0 elsewhere: positions of one state, TL_ATTN_SPLIT (also as 0)
     * or TL_ATTN_STRETCH */
    int64_t state_span;
} tl_paged_attn_args;

/* Splits that one worker has in a workspace at a time. */
#define TL_ATTN_WAVE_SPLITS 4

/* Bytes of workspace that let a few long sequences keep every worker of args->tp busy, by working
 * on several splits of a row at once: total_q * H rows, each with the states of TL_ATTN_WAVE_SPLITS
 * splits for every worker, that of the current stretch, and one (m, L):
 *
 *     4 * total_q * H * ((TL_ATTN_WAVE_SPLITS * threads + 1) * (2 + head_dim_v) + 2)
 *
 * whatever the contexts are; 0 for one worker. Without a workspace the call gives the same bits.
 * Only B, H, cu_seqlens_q, the view's head_dim_v and tp are looked at.
 *
 * 0 with the slot set (TL_EINVAL): args or its view NULL; a size that is not known; B < 0 or H < 1;
 * a number of bytes that would wrap. */
TL_API size_t tl_paged_attn_workspace(const tl_paged_attn_args *args);

/* Attention of any rows of any sequences over paged memory: decode, chunked prefill, the check of a
 * draft, and any mixture of them in one call, with any combination of options. Every row has the
 * bits that plain decode at its position has.
 *
 * Sequences of a batch that begin with the same blocks share one walk over them, wherever they
 * stand among 256 neighbours; the longest sequences are begun first.
 * Allocates nothing, takes no lock but the pool's, and TL_ATTN_STACK_BYTES of stack at most.
 *
 * Errors, out and lse untouched, the first of these decides:
 *   TL_EINVAL        args NULL or a size that is not known
 *   TL_EINVAL        view, its k or v, q, out, ctx_lens or block_tables NULL
 *   TL_EINVAL        a view that is not sound (kv_view.h)
 *   TL_EINVAL        B < 0, table_stride < 1, first_block or state_span not 0
 *   TL_EINVAL        a scale that is NaN, a softcap that is negative, infinite or NaN
 *   TL_EINVAL        a trace with a negative capacity, one beyond the address space, or no events
 *   TL_ESHAPE        H < 1 or no multiple of the view's KV heads
 *   TL_EUNSUPPORTED  a head_dim of the view above TL_MAX_HEAD_DIM
 *   TL_EINVAL        tables, q or out beyond the address space; rows of out that share memory
 *   TL_EINVAL        a workspace that is short or not aligned for floats
 *   TL_EUNSUPPORTED  TINYLLM_ISA names what is not here
 *   TL_EINVAL        cu_seqlens_q does not begin at 0; then sequence by sequence: it decreases, a
 *                    context length below q_len (or below 1) or beyond the table, an entry that
 *                    would be read and names no block
 *   TL_EINVAL        out, lse, the workspace or the trace's events overlap an input or one another
 *   TL_EBUSY         called on tp from inside one of its ranges
 * B == 0 with all else in order: TL_OK. */
TL_API tl_status tl_paged_attn_f32(const tl_paged_attn_args *args);

/* States: what a range of positions leaves of each row, to be merged later, elsewhere, by anybody.
 * A state is 2 + head_dim_v floats: m (the largest score), L (the sum of exp(s - m)), then the
 * values weighted by exp(s - m), unnormalised. Where a row sees nothing, m = -inf and zeros.
 *
 *   args      as for tl_paged_attn_f32; out, its strides, lse, sink_logits and the workspace are
 *             not used. state_span: whether a state is that of a split or of a whole stretch.
 *             first_block: where the tables begin
 *   states    [total_q, H, n_splits * TL_ATTN_SPLIT / span, 2 + head_dim_v], written: splits
 *             first_split .. first_split + n_splits - 1, or the stretches that they make up
 *
 * Only K and V of those splits are read; only table entries that hold their visible positions are
 * looked at, and no table needs to reach further.
 *
 * Errors, states untouched: as tl_paged_attn_f32's, with these where `out` would be looked at:
 *   TL_EINVAL   a state_span that is none of the three; first_block < 0
 *   TL_EINVAL   states NULL, first_split < 0, n_splits < 1, a range past INT64_MAX
 *   TL_EINVAL   states of stretches, and first_split or n_splits no multiple of
 *               TL_ATTN_STRETCH / TL_ATTN_SPLIT
 *   TL_EINVAL   states beyond the address space
 *   TL_EINVAL   a visible position before first_block's first */
TL_API tl_status tl_paged_attn_states_f32(const tl_paged_attn_args *args, int64_t first_split,
                                          int64_t n_splits, float *states);

/* The states of some splits of every row. 32 bytes. */
typedef struct tl_attn_part {
    const float *states; /* [n_rows, n_splits * TL_ATTN_SPLIT / span, 2 + dim] */
    int64_t first_split, n_splits;
    int64_t span; /* positions of one state: TL_ATTN_SPLIT (also as 0) or TL_ATTN_STRETCH */
} tl_attn_part;

/* Merges states into finished rows: bit for bit what tl_paged_attn_f32 gives, however the splits
 * were divided.
 *
 *   parts        [n_parts], in rising order, that together hold split 0 up to some last one, each
 *                once, as states of splits or of stretches; splits behind the last that any row
 *                sees may be there (they are empty) or not
 *   n_rows, H    rows, of which row i belongs to head i % H (as [total_q, H])
 *   sink_logits  [H], or NULL
 *   out          [n_rows, dim] contiguous, written;  lse  [n_rows], written, or NULL
 *
 * Errors, outputs untouched, the first of these decides; n_rows == 0: TL_OK.
 *   TL_EINVAL        n_parts < 1, n_rows < 0, H < 1 or n_rows no multiple of it, dim < 1
 *   TL_EINVAL        parts or out NULL, a size beyond the address space
 *   TL_EUNSUPPORTED  dim above TL_MAX_HEAD_DIM
 *   TL_EINVAL        part by part: n_splits < 1; a span that is none of the three; it does not
 *                    begin where the one before it ends (the first: at split 0); states of
 *                    stretches, and first_split or n_splits no multiple of TL_ATTN_STRETCH /
 *                    TL_ATTN_SPLIT; states NULL or beyond the address space
 *   TL_EINVAL        out or lse overlaps an input or the other
 *   TL_EUNSUPPORTED  TINYLLM_ISA names what is not here
 *   TL_EBUSY         called on tp from inside one of its ranges */
TL_API tl_status tl_attn_merge_f32(const tl_attn_part *parts, int64_t n_parts, int64_t n_rows,
                                   int64_t H, int64_t dim, const float *sink_logits, float *out,
                                   float *lse, tl_pool *tp);

TL_END_DECLS

#endif
