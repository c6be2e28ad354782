# SPDX-License-Identifier: MIT
"""kv_layers.py: what K and V of a long context take where a cache knows the windows of its layers.

    python bench/kv_layers.py [--positions N] [--chunk N] [--dtype NAME] [--json FILE]

Two layouts of layers, Gemma 3 1B's and gpt-oss-20b's, without a model: random K and V of one
sequence are appended to every layer in chunks, then token by token for 32 positions. Beside a cache
that keeps all stands one made by ``layers=``. Told are the bytes of blocks in use at the end, the
most in use at any time, and what the process took from the system for them (VmRSS). Attention of
the last token in every layer must give the same bits in both, or the program ends with status 1.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

import numpy as np  # noqa: I001

from tinyllm import Layer, PagedKVCache, paged_attention_decode

BLOCK, DECODED = 16, 32
MODELS: dict[str, tuple[list[Layer], int]] = {  # and query heads
    "Gemma 3 1B": (
        [Layer(1, 256, window=0 if (i + 1) % 6 == 0 else 512) for i in range(26)],
        4,
    ),
    "gpt-oss-20b": ([Layer(8, 64, window=0 if i % 2 else 128) for i in range(24)], 64),
}


def resident() -> int:
    """Bytes of memory that this process has."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def in_use(cache: PagedKVCache, counter: str) -> int:
    """Bytes of the blocks that a counter of each group counts."""
    taken = cache.snapshot()
    groups = taken if isinstance(taken, tuple) else (taken,)
    return sum(group.counters[counter] * group.block_bytes for group in groups)


def measure(
    layers: list[Layer], n_heads: int, n: int, chunk: int, dtype: str, *, told: bool
) -> dict[str, Any]:
    """One cache, which is ``told`` the windows or keeps all."""
    gc.collect()
    before = resident()
    kinds = layers if told else [Layer(layer.n_kv_heads, layer.d_head) for layer in layers]
    sizes = {"num_blocks": -(-(n + DECODED) // BLOCK), "block_size": BLOCK}
    rng, digest = np.random.default_rng(1), hashlib.sha256()
    with PagedKVCache(layers=kinds, dtype=dtype, **sizes) as cache:
        cache.add_seq(0)
        for held in [*range(0, n, chunk), *range(n, n + DECODED)]:
            step = min(chunk, n - held) if held < n else 1
            for i, layer in enumerate(layers):
                shape = 2, layer.n_kv_heads, step, layer.d_head
                cache.append(0, i, *rng.standard_normal(shape, np.float32))
        for i, layer in enumerate(layers):
            q = rng.standard_normal((1, n_heads, layer.d_head), np.float32)
            digest.update(paged_attention_decode(q, cache, [0], i, window=layer.window))
        return {
            "in use": in_use(cache, "blocks_used"),
            "most in use": in_use(cache, "blocks_high_water"),
            "resident": resident() - before,
            "bits": digest.hexdigest(),
        }


def main() -> int:
    ask = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    ask.add_argument("--positions", type=int, default=16384)
    ask.add_argument("--chunk", type=int, default=512, help="positions of a step of the prompt")
    ask.add_argument("--dtype", default="float16")
    ask.add_argument("--json", type=Path)
    told = ask.parse_args()
    n, chunk = told.positions, told.chunk
    print(f"{n} positions in chunks of {chunk}, {DECODED} more one by one, {told.dtype}, blocks of")
    print(f"{BLOCK}; MiB\n")
    print("| layers | cache | in use | most in use | resident |\n|---|---|---|---|---|")
    results = {}
    for name, (layers, n_heads) in MODELS.items():
        pair = [measure(layers, n_heads, n, chunk, told.dtype, told=t) for t in (False, True)]
        results[name] = dict(zip(("keeps all", "layers="), pair, strict=True))
        for kind, found in results[name].items():
            columns = [f"{found[key] / 2**20:.1f}" for key in ("in use", "most in use", "resident")]
            print(f"| {name} | {kind} | {' | '.join(columns)} |")
        if pair[0]["bits"] != pair[1]["bits"]:
            print(f"{name}: attention gives other bits", file=sys.stderr)
            return 1
    if told.json:
        told.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
