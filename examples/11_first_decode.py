# SPDX-License-Identifier: MIT
"""11_first_decode.py: K and V go into a cache, a sequence is forked, both are decoded at once.
Keys are 0, so that a row of the result is the mean of the values it sees. Run it with python."""

import numpy as np
from tinyllm import PagedKVCache, paged_attention_decode

with PagedKVCache(None, num_blocks=8, block_size=4, n_layers=1, n_kv_heads=2, d_head=16) as cache:

    def append(seq: str, *values: float) -> None:
        """One position for each value, the same in all heads."""
        v = np.broadcast_to(np.array(values, np.float32)[None, :, None], (2, len(values), 16))
        cache.append(seq, 0, np.zeros_like(v), v)  # [n_kv_heads, T, d_head]

    cache.add_seq("a")
    append("a", 1, 2, 3, 4, 5, 6)
    cache.fork("a", "b")  # shares the blocks of a
    append("b", 27)  # copies the one it writes to, which a holds too
    q = np.ones((2, 4, 16), np.float32)  # a query for each sequence, four heads over two KV heads
    out = paged_attention_decode(q, cache, ["a", "b"], layer=0)
    for seq, row in zip("ab", out, strict=True):
        blocks = cache.block_table(seq).tolist()
        print(f"{seq}: {cache.seq_len(seq)} positions in blocks {blocks}, mean {row[0, 0]:.4f}")
    print(f"blocks: {cache.stats()}")
