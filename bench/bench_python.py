# SPDX-License-Identifier: MIT
"""bench_python.py: what the Python layer adds to a call of the C library.

    python bench/bench_python.py [--quick] [--json FILE]

Each row is one loop in which the Python call and the bare C call (ctypes, every argument converted
beforehand) take turns on the same data, after both have given the same bytes. "added" is the median
of the differences, turn by turn, with p10 and p90. The steps are tiny, so that what is added is not
lost in the spread of the work itself; appends go to blocks that were written before, in a sequence
that begins anew each turn (untimed), or goes on by one position. The rows of a step of 32
sequences, 8 KV heads, D 128, set one Python call beside another, which the row names last.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter_ns
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "python"))

import numpy as np  # noqa: I001

from tinyllm import KVView, PagedKVCache, paged_attention, paged_attention_decode
from tinyllm.ffi.libtinyllm import Lib, f32_ptr, i32_ptr, load, signatures, u32_ptr

Call = Callable[[], object]
BLOCK, LAYER = 16, 0


def bare(lib: Lib, name: str) -> Any:
    """The C function with its argument types and nothing around it."""
    function = ctypes.CDLL(str(lib.path))[name]
    function.argtypes, function.restype = signatures()[name][1], ctypes.c_int32
    return function


def nothing() -> None:
    """What happens untimed between two turns, where nothing has to."""


def take_turns(python: Call, c: Call, turns: int, between: Call = nothing) -> np.ndarray[Any, Any]:
    """Microseconds [2, turns] of ``python`` and of ``c``."""
    times = np.empty((2, turns))
    gc.disable()
    for i in range(-turns // 10, turns):
        between()
        start = perf_counter_ns()
        python()
        middle = perf_counter_ns()
        c()
        times[:, i] = middle - start, perf_counter_ns() - middle
    gc.enable()
    return times / 1e3


def decode(
    lib: Lib, B: int, H: int, Hkv: int, D: int, ctx: int, turns: int
) -> np.ndarray[Any, Any]:
    """One decode step of B sequences of ``ctx`` positions."""
    rng = np.random.default_rng(B)
    seqs = [f"seq {i}" for i in range(B)]
    q = rng.standard_normal((B, H, D), np.float32)
    out, expected = np.empty_like(q), np.empty_like(q)
    lengths = np.full(B, ctx, np.int32)
    with PagedKVCache(lib, B * -(-ctx // BLOCK), BLOCK, 1, Hkv, D) as cache:
        for seq in seqs:
            cache.add_seq(seq)
            cache.append(seq, LAYER, *rng.standard_normal((2, Hkv, ctx, D), np.float32))
        table = np.stack([cache.block_table(seq) for seq in seqs]).astype(np.uint32)
        call = bare(lib, "tl_paged_attn_decode_f32")
        args = (
            f32_ptr(q), cache.pool, LAYER, u32_ptr(table), table.shape[1], i32_ptr(lengths),
            f32_ptr(expected), B, H, Hkv, D, D**-0.5, 0, None,
        )  # fmt: skip
        assert call(*args) == 0
        paged_attention_decode(q, cache, seqs, LAYER, out=out)
        assert out.tobytes() == expected.tobytes()
        return take_turns(
            lambda: paged_attention_decode(q, cache, seqs, LAYER, out=out),
            lambda: call(*args),
            turns,
        )


def append(lib: Lib, T: int, n_layers: int, turns: int, anew: bool) -> np.ndarray[Any, Any]:
    """T positions of one layer, H 8, D 128: of a sequence that begins ``anew`` each turn, or goes
    on.

    Of several layers it is the first, so that the fills of the blocks stay what they are.
    """
    Hkv, D = 8, 128
    rng = np.random.default_rng(T)
    k, v = rng.standard_normal((2, Hkv, T, D), np.float32)
    need = -(-T // BLOCK)
    room = need if anew else -(-(T * (turns + turns // 10 + 2)) // BLOCK)
    with PagedKVCache(lib, room + need, BLOCK, n_layers, Hkv, D) as cache:
        table = np.empty(need, np.uint32)
        lib.tl_kv_alloc(cache.pool, need, u32_ptr(table))
        call = bare(lib, "tl_kv_append_f32")
        args = (cache.pool, LAYER, u32_ptr(table), need, 0, T, f32_ptr(k), f32_ptr(v), T * D, D)
        assert call(*args) == 0
        cache.add_seq("a")

        def between() -> None:
            if anew:
                cache.free("a")
                cache.add_seq("a")

        def python() -> None:
            cache.append("a", LAYER, k, v)

        python()
        stored = cache.gather("a", LAYER)
        assert (stored[0] == k.astype(np.float16)).all() and (
            stored[1] == v.astype(np.float16)
        ).all()
        return take_turns(python, lambda: call(*args), turns, between)


SEQS, HEADS, D = 32, 8, 128  # of a step


def step_caches(lib: Lib, ctx: int, n_layers: int = 1) -> tuple[PagedKVCache, list[str]]:
    """A cache with room for more, and its ``SEQS`` sequences, about ``ctx`` positions each."""
    rng = np.random.default_rng(ctx)
    n_blocks = SEQS * (-(-(ctx + SEQS) // BLOCK) + 300)
    cache = PagedKVCache(lib, n_blocks, BLOCK, n_layers, HEADS, D)
    seqs = [f"seq {i}" for i in range(SEQS)]
    for i, seq in enumerate(seqs):
        cache.add_seq(seq)
        for layer in range(n_layers):
            cache.append(seq, layer, *rng.standard_normal((2, HEADS, ctx + i, D), np.float32))
    return cache, seqs


def append_step(lib: Lib, turns: int, n_layers: int = 1, layer: int = 0) -> np.ndarray[Any, Any]:
    """A token of each sequence, beside ``KVView.write_slots`` to arrays and slots that are there.

    In 16 turns each sequence gets a block, two of them in one turn; then all are cut again.
    """
    k, v = np.random.default_rng(1).standard_normal((2, SEQS, HEADS, D), np.float32)
    own = np.zeros((2, SEQS, HEADS, BLOCK, D), np.float16)
    view, slots = KVView.from_arrays(*own, lib=lib), np.arange(SEQS, dtype=np.int64) * BLOCK
    cache, seqs = step_caches(lib, 100, n_layers)

    def between() -> None:
        nonlocal slots
        slots = slots // BLOCK * BLOCK + (slots + 1) % BLOCK
        for other in range(n_layers):
            if other != layer:
                cache.append_batch(seqs, other, k, v)
        if cache.seq_len(seqs[0], layer) >= 100 + BLOCK:
            for i, seq in enumerate(seqs):
                cache.truncate(seq, 100 + i)

    with cache:
        return take_turns(
            lambda: cache.append_batch(seqs, layer, k, v),
            lambda: view.write_slots(slots, k, v),
            turns,
            between,
        )


def tables_of_a_step(lib: Lib, turns: int) -> np.ndarray[Any, Any]:
    """The tables of a step as an array, in which two sequences have got a block, beside
    nothing."""
    k, v = np.zeros((2, HEADS, BLOCK, D), np.float32)
    cache, seqs = step_caches(lib, 1000)

    def between() -> None:
        for seq in seqs[3:5]:
            cache.append(seq, 0, k, v)
            cache.truncate(seq, cache.seq_len(seq) - 1)
        if cache.seq_len(seqs[3]) > 5000:
            for seq in seqs[3:5]:
                cache.truncate(seq, 1000)

    with cache, cache.batch(seqs) as step:
        return take_turns(lambda: step.tables, nothing, turns, between)


def attend_step(lib: Lib, turns: int, **options: Any) -> np.ndarray[Any, Any]:
    """``paged_attention`` over a batch, beside ``paged_attention_decode`` of the same sequences."""
    q = np.random.default_rng(2).standard_normal((SEQS, HEADS, D), np.float32)
    out = np.empty_like(q)
    cache, seqs = step_caches(lib, 16)
    with cache, cache.batch(seqs) as step:
        return take_turns(
            lambda: paged_attention(q, step, 0, out=out, **options),
            lambda: paged_attention_decode(q, cache, seqs, 0, out=out),
            turns,
        )


def rows(lib: Lib, quick: bool) -> list[tuple[str, float, Callable[[], np.ndarray[Any, Any]]]]:
    """What is measured: its name, the most microseconds it may add, and how."""
    n = 300 if quick else 3000
    return [
        ("decode B 1, H 8/2, D 64, ctx 16", 15, lambda: decode(lib, 1, 8, 2, 64, 16, n)),
        ("decode B 8, H 8/2, D 64, ctx 16", 15, lambda: decode(lib, 8, 8, 2, 64, 16, n)),
        ("decode B 32, H 8/2, D 64, ctx 16", 15, lambda: decode(lib, 32, 8, 2, 64, 16, n)),
        ("decode B 1, H 32/8, D 128, ctx 1024", 15, lambda: decode(lib, 1, 32, 8, 128, 1024, n)),
        ("append 1 position, of 1 layer", 20, lambda: append(lib, 1, 1, n, False)),
        ("append 1 position, of 32 layers", 20, lambda: append(lib, 1, 32, n, False)),
        ("append 512 positions, of 1 layer", 20, lambda: append(lib, 512, 1, n // 3, True)),
        ("append 512 positions, first of 4 layers", 20, lambda: append(lib, 512, 4, n // 3, True)),
        ("append_batch, write_slots", 60, lambda: append_step(lib, n)),
        ("append_batch, write_slots; layer 1 of 4", 60, lambda: append_step(lib, n, 4, 0)),
        ("append_batch, write_slots; layer 4 of 4", 60, lambda: append_step(lib, n, 4, 3)),
        ("tables of a step", 10, lambda: tables_of_a_step(lib, n)),
        ("paged_attention of a step, decode", 0, lambda: attend_step(lib, n)),
        ("the same with lse", 0, lambda: attend_step(lib, n, return_lse=True)),
    ]


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=argparse.FileType("w"))
    options = parser.parse_args()
    print(f"Python {sys.version.split()[0]}, numpy {np.__version__}; microseconds, medians")
    print(f"{'':40} {'Python':>8} {'C':>8} {'added':>8} {'p10':>8} {'p90':>8} {'target':>8}")
    for name, target, measure in rows(load(), options.quick):
        times = measure()
        python, c = np.median(times, axis=1)
        p10, added, p90 = np.quantile(times[0] - times[1], (0.1, 0.5, 0.9))
        missed = " !" if added > target else ""
        figures = "".join(f" {us:8.1f}" for us in (python, c, added, p10, p90))
        print(f"{name:40}{figures} {target:8g}{missed}")
        if options.json:
            row = {
                "what": name,
                "python_us": python,
                "c_us": c,
                "added_us": added,
                "p10_us": p10,
                "p90_us": p90,
            }
            print(json.dumps(row), file=options.json)


if __name__ == "__main__":
    main()
