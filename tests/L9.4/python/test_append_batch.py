# SPDX-License-Identifier: MIT
"""append_batch is appends one by one, bit for bit, but whole or not at all; needs says what it
takes; OutOfBlocks says what is missing."""

from __future__ import annotations

import pickle
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinyllm import OutOfBlocks, PagedKVCache, ThreadPool
from tinyllm.errors import ClosedError
from tinyllm.ffi.libtinyllm import Lib

HEADS, WIDTH, BLOCK, LAYERS, BLOCKS = 2, 3, 4, 2, 24


def make(lib: Lib, num_blocks: int = BLOCKS, dtype: str = "float16") -> PagedKVCache:
    return PagedKVCache(lib, num_blocks, BLOCK, LAYERS, HEADS, WIDTH, dtype=dtype)


@pytest.fixture
def cache(lib: Lib) -> Iterator[PagedKVCache]:
    """Sequences a, b and c of 6, 4 and 0 positions."""
    with make(lib) as made:
        for seq, n in (("a", 6), ("b", 4), ("c", 0)):
            made.add_seq(seq)
            for layer in range(LAYERS if n else 0):
                made.append(seq, layer, *rows(n).transpose(0, 2, 1, 3))
        yield made


def rows(n: int, seed: int = 0) -> Any:
    """K and V [2, n, HEADS, WIDTH]."""
    return np.random.default_rng(seed + n).standard_normal((2, n, HEADS, WIDTH), np.float32)


def seen(cache: PagedKVCache) -> Any:
    """All that an engine can find out."""
    sequences = {
        seq: (
            [[a.tobytes() for a in cache.gather(seq, layer)] for layer in range(LAYERS)],
            [cache.seq_len(seq, layer) for layer in range(LAYERS)],
            [cache.lib.tl_kv_fill(cache.pool, int(block)) for block in cache.block_table(seq)],
        )
        for seq in cache
    }
    counters = cache.snapshot().counters
    assert (counters["leaked"], counters["dangling"]) == (0, 0)
    return sequences, cache.stats(), counters["copies_on_write"]


def refusal(append: Callable[..., object], *args: Any) -> OutOfBlocks | None:
    try:
        append(*args)
    except OutOfBlocks as error:
        return error
    return None


# --- against appends one by one
# ----------------------------------------------------------------------------------------------


def some_other_call(dice: random.Random, caches: list[PagedKVCache], names: Iterator[int]) -> None:
    """The same on both: a fork, an end, a cut, a block that is registered."""
    seq, what, other = dice.choice(list(caches[0])), dice.randrange(4), next(names)
    length = dice.randrange(max(caches[0].seq_len(seq, layer) for layer in range(LAYERS)) + 1)
    for cache in caches:
        if what == 0:
            cache.fork(seq, other)
        elif what == 1 and len(cache) > 3:
            cache.free(seq)
        elif what == 2:
            cache.truncate(seq, length)
        elif what == 3:
            for block in cache.block_table(seq)[:1].tolist():
                if cache.lib.tl_kv_fill(cache.pool, block) == BLOCK:
                    states = {int(row["id"]): row for row in cache.snapshot().blocks}
                    if not states[block]["hash"]:
                        cache.lib.tl_kv_register(cache.pool, block, 1 + other)


@given(st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_a_batch_is_its_appends_one_by_one(lib: Lib, dice: random.Random) -> None:
    names = iter(range(10**6))
    with make(lib) as whole, make(lib) as parts:
        for name in ("x", "y", "z"):
            whole.add_seq(name), parts.add_seq(name)
        for turn in range(12):
            some_other_call(dice, [whole, parts], names)
            ids = dice.sample(list(whole), dice.randrange(1, len(whole) + 1))
            counts = [dice.choice([0, 1, 1, 2, 3, 7]) for _ in ids]
            layers = dice.choice([[0], [1], [0, 1], [0, 1], [1, 0]])
            for layer in layers:
                k, v = rows(sum(counts), turn)
                starts = np.cumsum([0, *counts])
                before = seen(whole)
                error = refusal(whole.append_batch, ids, layer, k, v, starts)
                if error:
                    assert seen(whole) == before
                    assert error.needed > error.free + error.cached
                    assert [error.free, error.cached] == [before[1][n] for n in ("free", "cached")]
                    continue
                for seq, begin, n in zip(ids, starts, counts, strict=False):
                    if n:
                        mine = slice(begin, begin + n)
                        parts.append(seq, layer, *(a[mine].transpose(1, 0, 2) for a in (k, v)))
                assert seen(whole) == seen(parts)


@given(st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_needs_are_what_a_step_takes(lib: Lib, dice: random.Random) -> None:
    names = iter(range(10**6))
    with make(lib) as cache:
        for name in ("x", "y", "z"):
            cache.add_seq(name)
        for _ in range(12):
            some_other_call(dice, [cache], names)
            ids = dice.sample(list(cache), dice.randrange(1, len(cache) + 1))
            counts = [dice.choice([0, 1, 2, 7]) for _ in ids]
            before, needs = seen(cache), cache.needs(dict(zip(ids, counts, strict=True)))
            assert seen(cache) == before
            assert needs.available == before[1]["free"] + before[1]["cached"]
            held = sum(len(cache.block_table(seq)) for seq in ids)
            values = *rows(sum(counts)), np.cumsum([0, *counts])
            error = refusal(cache.append_batch, ids, 0, *values)
            if error:
                assert error.needed == needs.total > needs.available
                continue
            cache.append_batch(ids, 1, *values)
            assert needs.total == needs.fresh + needs.copies <= needs.available
            assert sum(len(cache.block_table(seq)) for seq in ids) - held == needs.fresh
            assert seen(cache)[2] - before[2] == needs.copies


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8", "float8_e4m3fn"])
@pytest.mark.parametrize("given", [np.float16, np.float32, np.float64])
def test_strides_types_and_threads_change_no_bit(lib: Lib, dtype: str, given: Any) -> None:
    k, v = rows(9).astype(given)
    starts = [0, 4, 4, 9]
    padded = np.zeros((2, 18, HEADS + 1, 2 * WIDTH), given)
    padded[:, ::2, 1:, WIDTH:] = k, v
    laid = [(k, v), padded[:, ::2, 1:, WIDTH:], tuple(a[:, ::-1][:, ::-1] for a in (k, v))]
    laid.append(tuple(np.asfortranarray(a) for a in (k, v)))
    with ThreadPool(2, lib=lib) as pool:
        found = set()
        for given_k, given_v in laid:
            for threads in (None, 1, 2, pool):
                with make(lib, dtype=dtype) as cache:
                    for seq in "abc":
                        cache.add_seq(seq)
                    cache.append_batch(
                        ["a", "b", "c"], 1, given_k, given_v, starts, threads=threads
                    )
                    found.add(b"".join(a.tobytes() for s in "abc" for a in cache.gather(s, 1)))
    assert len(found) == 1


# --- one property each
# ----------------------------------------------------------------------------------------------


def test_the_first_layer_takes_the_blocks_of_a_step(cache: PagedKVCache) -> None:
    k, v = rows(3)
    free = cache.stats()["free"]
    cache.append_batch(["a", "b", "c"], 0, k, v)
    assert cache.stats()["free"] == free - 2  # b and c begin a block
    cache.append_batch(["a", "b", "c"], 1, k, v)
    assert cache.stats()["free"] == free - 2
    assert [cache.seq_len(seq, 1) for seq in "abc"] == [7, 5, 1]


def test_of_forks_that_all_write_the_last_keeps_the_block(cache: PagedKVCache) -> None:
    cache.fork("a", "d"), cache.fork("a", "e")
    shared = int(cache.block_table("a")[1])
    assert cache.needs({"a": 1, "d": 1, "e": 1})[:2] == (0, 2)
    for layer in range(LAYERS):
        cache.append_batch(["a", "d", "e"], layer, *rows(3))
    tables = [int(cache.block_table(seq)[1]) for seq in "ade"]
    assert tables[2] == shared
    assert len(set(tables)) == 3
    assert cache.lib.tl_kv_fill(cache.pool, shared) == 3
    assert cache.snapshot().counters["copies_on_write"] == 2


def test_a_copy_is_as_full_as_its_shortest_layer(cache: PagedKVCache) -> None:
    cache.fork("a", "d")
    cache.append_batch(["a"], 0, *rows(1))
    assert cache.lib.tl_kv_fill(cache.pool, int(cache.block_table("a")[1])) == 2  # of 3 in layer 0
    cache.append_batch(["a"], 1, *rows(1))
    assert cache.lib.tl_kv_fill(cache.pool, int(cache.block_table("a")[1])) == 3


def test_needs_are_counted_from_the_longest_layer_on(cache: PagedKVCache) -> None:
    cache.append_batch(["a"], 0, *rows(3), [0, 3])  # 9 positions in 3 blocks
    assert cache.needs({"a": 3})[:2] == (0, 0)
    assert cache.needs({"a": 4})[:2] == (1, 0)


def test_copies_are_needed_too_where_nothing_is_left(lib: Lib) -> None:
    with make(lib, num_blocks=2) as cache:
        cache.add_seq("a")
        for layer in range(LAYERS):
            cache.append_batch(["a"], layer, *rows(6), [0, 6])
        cache.fork("a", "b")
        assert cache.needs({"b": 3}) == (1, 1, 0)
        assert cache.needs({"b": 3}).total == 2
        with pytest.raises(OutOfBlocks, match="need 1 more blocks and 1 to copy") as caught:
            cache.append_batch(["b"], 0, *rows(3), [0, 3])
        assert (caught.value.needed, caught.value.free, caught.value.cached) == (2, 0, 0)
        with pytest.raises(OutOfBlocks, match="sequence 'b' needs 0 more blocks and 1 to copy"):
            cache.append("b", 0, *rows(1).transpose(0, 2, 1, 3))


def test_layers_that_lag_behind_copy_each_block_they_write(cache: PagedKVCache) -> None:
    cache.append_batch(["a", "b"], 0, *rows(14), [0, 7, 14])
    cache.fork("a", "d")
    before, free = cache.gather("d", 1), cache.stats()["free"]
    cache.append_batch(["a", "b"], 1, *rows(14, 5), [0, 7, 14])
    assert free - cache.stats()["free"] == 3  # positions 6 to 12 of a; b's are its own
    for old, new in zip(before, cache.gather("d", 1), strict=True):
        assert old.tobytes() == new.tobytes()


def test_a_batch_that_does_not_fit_says_how_much_is_missing(lib: Lib) -> None:
    with make(lib, num_blocks=3) as cache:
        for seq in "ab":
            cache.add_seq(seq)
        cache.append_batch(["a"], 0, *rows(4), [0, 4])
        before = seen(cache)
        with pytest.raises(OutOfBlocks) as caught:
            cache.append_batch(["a", "b"], 0, *rows(14), [0, 5, 14])
        assert str(caught.value) == (
            "append_batch: 2 sequences need 5 more blocks and 0 to copy what is shared; 2 are free "
            "and 0 cached of 3"
        )
        for error in (caught.value, pickle.loads(pickle.dumps(caught.value))):
            assert (error.needed, error.free, error.cached) == (5, 2, 0)
            assert str(error) == str(caught.value)
        assert seen(cache) == before
        assert cache.snapshot().counters["failed_allocations"] == 1
        with pytest.raises(OutOfBlocks) as caught:
            cache.append("a", 0, *rows(16).transpose(0, 2, 1, 3))
        assert (caught.value.needed, caught.value.free, caught.value.cached) == (4, 2, 0)
        envelope = bytearray()
        with make(lib) as other:
            other.add_seq("long")
            for layer in range(LAYERS):
                other.append("long", layer, *rows(16).transpose(0, 2, 1, 3))
            envelope = other.export_seq("long")
        with pytest.raises(OutOfBlocks) as caught:
            cache.import_seq("long", envelope)
        assert (caught.value.needed, caught.value.free, caught.value.cached) == (4, 2, 0)


def test_values_the_dtype_has_nothing_for_are_told_once_of_either_append(lib: Lib) -> None:
    k = np.full((1, HEADS, WIDTH), 1e30, np.float32)
    with make(lib) as cache:
        cache.add_seq("a")
        with pytest.warns(UserWarning, match=r"^append_batch: float16 has nothing for 12 appended"):
            cache.append_batch(["a"], 0, k, k)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cache.append_batch(["a"], 0, k, k)
            cache.append("a", 0, k.transpose(1, 0, 2), k.transpose(1, 0, 2))
        assert cache.stats()["unrepresentable"] == 36


def test_no_tokens_are_fine(cache: PagedKVCache) -> None:
    before = seen(cache)
    cache.append_batch([], 0, *rows(0))
    cache.append_batch([], 0, *rows(0), [0])
    cache.append_batch(["a", "c"], 1, *rows(0), [0, 0, 0])
    assert cache.needs({})[:2] == cache.needs({"a": 0, "c": 0})[:2] == (0, 0)
    assert seen(cache) == before


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"seq_ids": ["a", "x"]}, KeyError, "append_batch: no sequence 'x'"),
        ({"seq_ids": ["a", "a"]}, ValueError, "append_batch: sequence 'a' is named twice"),
        ({"seq_ids": "ab"}, TypeError, "append_batch: seq_ids must be a list of ids, not 'ab'"),
        ({"seq_ids": {"a", "b"}}, TypeError, "append_batch: seq_ids must be a list"),
        ({"seq_ids": ["a"]}, ValueError, "append_batch: k has 2 tokens for 1 sequences"),
        ({"layer": 2}, ValueError, "append_batch: layer = 2"),
        ({"layer": "0"}, ValueError, "append_batch: layer"),
        ({"k": rows(2)[0][:, :1]}, ValueError, "append_batch: k has shape (2, 1, 3), expected [t"),
        ({"k": rows(2)[0][0]}, ValueError, "append_batch: k must have 3 axes"),
        ({"v": rows(3)[1]}, ValueError, "append_batch: v has shape (3, 2, 3), k (2, 2, 3)"),
        ({"k": rows(2)[0] > 0}, TypeError, "append_batch: k must be real numbers, not bool"),
        ({"cu_seqlens": [0, 1]}, ValueError, "append_batch: cu_seqlens has shape (2,)"),
        ({"cu_seqlens": [1, 1, 2]}, ValueError, "append_batch: cu_seqlens must rise from 0 to"),
        ({"cu_seqlens": [0, 1, 3]}, ValueError, "append_batch: cu_seqlens must rise from 0 to"),
        ({"cu_seqlens": [0, 3, 2]}, ValueError, "append_batch: cu_seqlens must rise from 0 to"),
        ({"cu_seqlens": [0, 0.5, 2]}, TypeError, "append_batch: cu_seqlens"),
        ({"threads": 1.5}, TypeError, "append_batch: threads must be"),
        ({"threads": -1}, ValueError, "append_batch: threads"),
    ],
)  # fmt: skip
def test_each_bad_argument_is_refused_and_named(
    cache: PagedKVCache, options: dict[str, Any], error: type[Exception], words: str
) -> None:
    k, v = rows(2)
    before = seen(cache)
    with pytest.raises(error) as caught:
        cache.append_batch(**{"seq_ids": ["a", "b"], "layer": 0, "k": k, "v": v, **options})
    assert words in str(caught.value)
    assert seen(cache) == before


def test_bad_needs_are_refused_and_named(cache: PagedKVCache) -> None:
    for bad, error, words in (
        (["a"], TypeError, "needs: n_tokens must be a mapping of ids to numbers"),
        ({"x": 1}, KeyError, "needs: no sequence 'x'"),
        ({"a": -1}, ValueError, r"needs: n_tokens\['a'\]"),
        ({"a": 1.5}, TypeError, r"needs: n_tokens\['a'\]"),
        ({"a": 2**31 - 1}, ValueError, "needs: more than 2147483647 positions"),
    ):
        with pytest.raises(error, match=words):
            cache.needs(bad)  # type: ignore[arg-type]
    assert cache.needs({"a": 2**31 - 20}).fresh == 2**29 - 5


def test_a_closed_pool_of_threads_is_refused_before_anything(lib: Lib, cache: PagedKVCache) -> None:
    pool = ThreadPool(2, lib=lib)
    pool.close()
    before = seen(cache)
    with pytest.raises(ClosedError):
        cache.append_batch(["a", "b"], 0, *rows(2), threads=pool)
    assert seen(cache) == before
