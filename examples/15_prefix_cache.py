# SPDX-License-Identifier: MIT
"""15_prefix_cache.py: a prompt finds what others have computed, to the token, while they live and
after they have ended, and computes what is new to it. Run it with python."""

import numpy as np
from tinyllm import PagedKVCache

KV_HEADS, WIDTH = 1, 8


def prefill(cache: PagedKVCache, name: str, tokens: list[int], namespace: bytes = b"") -> None:
    """Begins a sequence with what is there and computes the rest. Its last token is left to be
    computed: whoever generates wants what comes out of it."""
    found = cache.add_seq(name, tokens=tokens, namespace=namespace, leave=1)
    new = np.array(tokens[found:], np.float32)  # stands for a model: K and V of the new tokens
    rows = np.broadcast_to(new[None, :, None], (KV_HEADS, len(new), WIDTH))
    cache.append(name, 0, rows, -rows)
    table = cache.block_table(name).tolist()
    print(f"{name:6} {found:2} of {len(tokens):2} tokens were there: blocks {table}")


with PagedKVCache(
    num_blocks=8, block_size=4, n_layers=1, n_kv_heads=KV_HEADS, d_head=WIDTH
) as cache:
    system = [5, 6, 7, 8, 9, 10]
    prefill(cache, "anna", [*system, 11, 12, 13])
    prefill(cache, "ben", [*system, 20, 21])  # begins like anna, into her second block
    cache.extend("anna", [14, 15, 16])  # what she was answered
    cache.append("anna", 0, np.full((1, 3, 8), 14.0), np.full((1, 3, 8), -14.0))
    cache.free("anna")
    prefill(cache, "anna", [*system, 11, 12, 13, 14, 15, 16, 30])  # her second turn
    prefill(cache, "eve", [*system, 11, 12], namespace=b"another tenant")
    hits = cache.prefix_stats()
    print(f"{hits['tokens_found']} of {hits['tokens_asked']} tokens found; {cache.stats()}")
