# SPDX-License-Identifier: MIT
"""Draws docs/timeline.svg: one call on two threads, the fastest of two hundred, so that what else
the machine does is not the subject.

    PYTHONPATH=python python3 docs/timeline.py docs/timeline.svg
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import tinyllm

HEADS, KV_HEADS, D = 32, 4, 64


def main(path: str) -> None:
    """Three chats on one prompt of 4096 tokens, one of 9000 of its own, 16 tokens of a prompt."""
    rng = np.random.default_rng(0)

    def grow(name: str, n: int) -> None:
        cache.append(name, 0, *rng.standard_normal((2, KV_HEADS, n, D), np.float32))

    with tinyllm.PagedKVCache(None, 1000, 16, 1, KV_HEADS, D) as cache:
        cache.add_seq("prompt")
        grow("prompt", 4096)
        for chat, n in (("a", 300), ("b", 40), ("c", 900)):
            cache.fork("prompt", chat)
            grow(chat, n)
        for alone, n in (("d", 9000), ("e", 700)):
            cache.add_seq(alone)
            grow(alone, n)
        rows = {"a": 1, "b": 1, "c": 1, "d": 1, "e": 16}
        q = rng.standard_normal((sum(rows.values()), HEADS, D), np.float32)
        tables, lengths = [cache.block_table(s) for s in rows], [cache.seq_len(s) for s in rows]
        starts = np.cumsum([0, *rows.values()])
        with tinyllm.timeline() as t:
            for _ in range(200):
                tinyllm.paged_attention(
                    q, cache.view(0), tables, lengths, cu_seqlens_q=starts, threads=2
                )
    fastest = min(range(len(t.calls)), key=lambda i: t.calls[i].end_ns - t.calls[i].begin_ns)
    Path(path).write_text(t.svg(fastest), encoding="utf-8")
    print(t.text(fastest, width=64))


if __name__ == "__main__":
    main(sys.argv[1])
