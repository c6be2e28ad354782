# SPDX-License-Identifier: MIT
"""12_chunked_prefill.py: a prompt at once, in chunks, beside a decode step, and token by token.
Its rows have the same bits each time. Run it with python."""

import hashlib

import numpy as np
from tinyllm import PagedKVCache, paged_attention

LENGTH, HEADS, KV_HEADS, WIDTH = 100, 6, 2, 32
rng = np.random.default_rng(0)
q = rng.standard_normal((LENGTH, HEADS, WIDTH), np.float32)
k, v = rng.standard_normal((2, KV_HEADS, LENGTH, WIDTH), np.float32)


def read(chunk: int, with_other: bool = False) -> str:
    """The prompt in chunks of so many tokens: appended, then attended; a digest of all rows."""
    rows = []
    with PagedKVCache(None, 64, 16, 1, KV_HEADS, WIDTH) as cache:
        cache.add_seq("prompt")
        cache.add_seq("other")
        cache.append("other", 0, *rng.standard_normal((2, KV_HEADS, 40, WIDTH), np.float32))
        for begin in range(0, LENGTH, chunk):
            end = min(begin + chunk, LENGTH)
            cache.append("prompt", 0, k[:, begin:end], v[:, begin:end])
            seqs, starts, queries = ["prompt"], [0, end - begin], q[begin:end]
            if with_other:  # one row more, of a sequence that decodes meanwhile
                seqs, starts = ["prompt", "other"], [*starts, end - begin + 1]
                queries = np.concatenate((queries, q[:1]))
            tables, lengths = [cache.block_table(s) for s in seqs], [cache.seq_len(s) for s in seqs]
            out = paged_attention(queries, cache.view(0), tables, lengths, cu_seqlens_q=starts)
            rows.append(out[: end - begin])
    return hashlib.sha256(np.concatenate(rows).tobytes()).hexdigest()[:16]


for what, digest in {
    "one call": read(LENGTH),
    "chunks of 33": read(33),
    "chunks of 16, beside a decode step": read(16, with_other=True),
    "token by token": read(1),
}.items():
    print(f"{what:36} {digest}")
