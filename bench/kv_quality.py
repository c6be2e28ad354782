# SPDX-License-Identifier: MIT
"""kv_quality.py: what a language model loses where K and V are stored in fewer bits.

    make bench-quality [BENCH_ARGS='--quick --threads N --json FILE']

SmolLM2-135M-Instruct, the model of `make demo` (fetched once, 93 MB), reads passages of
examples/alice.txt: 1400 tokens each, which begin at the start, at 740 and at 1480 and so overlap by
half. Beside float32 K and V stands every other way to store them, token by token: the KL divergence
of the distribution of the next token from the one with float32, in nats, and whether the likeliest
token stays the same. Nothing else differs: weights, activations and logits are float32.

"scale 1" is what an engine has that stores float8_e4m3fn with one scale of 1 for all of K and V and
never sets another. Here K and V are rounded to it and back before they go into a float32 cache,
which gives the same bits as attention over the codes: a power of two scales without rounding.

Float32 stands there a second time, in other blocks: its logits must be the same bits, or the
program ends with status 1.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import smollm2  # noqa: F401  before numpy, whose BLAS it asks for a single thread

# isort: split
import numpy as np
from screen import Screen
from smollm2.compare import Divergence, read_beside
from smollm2.fetch import MODEL_NAME, FetchError, model_path
from smollm2.gguf import GGUF
from smollm2.model import Model, from_gguf
from smollm2.rows import Crew, Floats
from smollm2.tokenizer import BpeTokenizer
from tinyllm import PagedKVCache
from tinyllm.ffi.libtinyllm import Lib, f32_ptr, load, u8_ptr

TEXT = Path(__file__).resolve().parents[1] / "examples/alice.txt"
STARTS, LENGTH = (0, 740, 1480), 1400
QUICK_STARTS, QUICK_LENGTH = (0, 740), 200
BLOCK, OTHER_BLOCK = 16, 24
AGAIN, SCALE_1 = "float32 again", "float8_e4m3fn, scale 1"


class ScaleOne(PagedKVCache):
    """A float32 cache of the values that float8_e4m3fn with a scale of 1 has."""

    def append(self, seq_id: Any, layer: int, k: Any, v: Any) -> None:
        super().append(seq_id, layer, through_e4m3(self.lib, k), through_e4m3(self.lib, v))


def through_e4m3(lib: Lib, x: Floats) -> Floats:
    """Rounded to e4m3, which saturates, and widened again."""
    codes, y = np.empty(x.shape, np.uint8), np.empty(x.shape, np.float32)
    lib.tl_f32_to_e4m3_n(f32_ptr(np.ascontiguousarray(x)), u8_ptr(codes), x.size)
    lib.tl_e4m3_to_f32_n(u8_ptr(codes), f32_ptr(y), x.size)
    return y


def caches(model: Model, tokens: int, stack: ExitStack) -> dict[str, tuple[PagedKVCache, int]]:
    """A cache for each way to store K and V, float32 first, and the bytes a token takes."""

    def new(kind: str, block: int = BLOCK, of: type[PagedKVCache] = PagedKVCache) -> PagedKVCache:
        c, n_blocks = model.config, -(-tokens // block)
        sizes = (n_blocks, block, c.layers, c.kv_heads, c.head_dim)
        return stack.enter_context(of(None, *sizes, dtype=kind))

    made = {"float32": new("float32"), AGAIN: new("float32", OTHER_BLOCK)}
    made |= {kind: new(kind) for kind in ("float16", "bfloat16", "int8", "float8_e4m3fn")}
    ways = {name: (c, c.nbytes // (c.num_blocks * c.block_size)) for name, c in made.items()}
    one_byte_each = 2 * model.config.layers * model.config.kv_width
    return ways | {SCALE_1: (new("float32", of=ScaleOne), one_byte_each)}


def measure(
    model: Model, passages: Sequence[Sequence[int]], threads: int, screen: Screen
) -> dict[str, tuple[int, list[Divergence]]]:
    """Bytes a token, and a divergence a passage, of every way but the first."""
    found: dict[str, tuple[int, list[Divergence]]] = {}
    with Crew(threads) as crew:
        for i, tokens in enumerate(passages, 1):
            with ExitStack() as stack:
                (expected, _), *others = (ways := caches(model, len(tokens), stack)).values()

                def progress(done: int, of: int, label: str = f"passage {i}") -> None:
                    screen.progress(label, done, of, "tokens")

                of_each = read_beside(
                    model, expected, [c for c, _ in others], "text", tokens, crew, progress
                )
                for name, (_, size), own in zip(list(ways)[1:], others, of_each, strict=True):
                    found.setdefault(name, (size, []))[1].append(own)
    return found


def report(found: dict[str, tuple[int, list[Divergence]]], screen: Screen) -> list[dict[str, Any]]:
    """Prints the table; the same as rows."""
    head = f"{'K and V in':24}{'bytes':>7}  {'mean KL':>8}  {'median':>8}  {'p99':>8}"
    screen.heading(f"{head}  {'top-1 kept':>10}   mean KL and top-1 of each passage")
    table = []
    for name, (size, parts) in found.items():
        kl = np.concatenate([part.kl for part in parts])
        kept = np.concatenate([part.kept for part in parts])
        median, p99 = np.quantile(kl, (0.5, 0.99))
        each = [(float(part.kl.mean()), float(part.kept.mean())) for part in parts]
        screen.say(
            f"{name:24}{size:7}  {kl.mean():8.1e}  {median:8.1e}  {p99:8.1e}  "
            f"{kept.mean():10.2%}   " + ", ".join(f"{a:.1e} {b:.1%}" for a, b in each)
        )
        table.append({
            "dtype": name, "bytes_per_token": size, "mean_kl": float(kl.mean()),
            "median_kl": float(median), "p99_kl": float(p99), "top1_kept": float(kept.mean()),
            "passages": [{"mean_kl": a, "top1_kept": b} for a, b in each],
        })  # fmt: skip
    return table


def faults(found: dict[str, tuple[int, list[Divergence]]]) -> list[str]:
    """What cannot be, in words."""
    wrong = [f"{n}: not finite" for n, (_, of) in found.items() if not all_finite(of)]
    if any(part.kl.any() or not part.kept.all() for part in found[AGAIN][1]):
        wrong.append("float32 differs from itself")
    return wrong


def all_finite(parts: list[Divergence]) -> bool:
    return all(np.isfinite(part.kl).all() for part in parts)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two passages of 200 tokens")
    parser.add_argument("--threads", type=int, default=0, metavar="N")
    parser.add_argument("--json", type=argparse.FileType("w"), metavar="FILE")
    options = parser.parse_args()
    screen, begin = Screen(), time.perf_counter()
    try:
        path = model_path(say=screen.say)
    except FetchError as error:
        print(f"kv_quality: {error}", file=sys.stderr)
        return 2
    with GGUF(path) as file:
        tokenizer, model = BpeTokenizer(file), from_gguf(file)
    text = tokenizer.encode(TEXT.read_text(encoding="utf-8"))
    starts, length = (QUICK_STARTS, QUICK_LENGTH) if options.quick else (STARTS, LENGTH)
    screen.say(f"{MODEL_NAME}, {load().tl_isa_name().decode()}: {len(starts)} passages of {length}")
    found = measure(model, [text[s : s + length] for s in starts], options.threads, screen)
    table = report(found, screen)
    screen.say(f"\n{time.perf_counter() - begin:.0f} s")
    if options.json:
        json.dump(table, options.json, indent=2)
    for fault in (wrong := faults(found)):
        print(f"kv_quality: {fault}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
