# SPDX-License-Identifier: MIT
"""PagedKVCache: what is stored is what comes back, sharing never shows, and a call that fails
changes nothing."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from numpy.typing import NDArray
from tinyllm import OutOfBlocks, PagedKVCache
from tinyllm.ffi.libtinyllm import TL_EINVAL, TL_ENOTFOUND, Lib, TlError, u32_ptr
from tinyllm.infer.blocks import Blocks

HEADS, WIDTH = 2, 3
_numbers = itertools.count(1)


def kv(
    n_tokens: int, n_heads: int = HEADS, width: int = WIDTH, dtype: Any = np.float32
) -> tuple[Any, Any]:
    """K and V [n_heads, n_tokens, width] of small integers (exact in f16), other ones on every
    call."""
    rng = np.random.default_rng(next(_numbers))
    k, v = rng.integers(-2000, 2000, (2, n_heads, n_tokens, width))
    return k.astype(dtype), v.astype(dtype)


def make(lib: Lib, num_blocks: int = 8, block_size: int = 4, n_layers: int = 1) -> PagedKVCache:
    return PagedKVCache(lib, num_blocks, block_size, n_layers, HEADS, WIDTH)


@pytest.fixture
def cache(lib: Lib) -> Iterator[PagedKVCache]:
    """8 blocks of 4 positions, one layer."""
    with make(lib) as c:
        yield c


@pytest.fixture
def layered(lib: Lib) -> Iterator[PagedKVCache]:
    """8 blocks of 4 positions, three layers."""
    with make(lib, n_layers=3) as c:
        yield c


def bits(a: NDArray[Any]) -> NDArray[np.uint16]:
    assert a.dtype == np.float16
    return a.view(np.uint16)


def assert_holds(cache: PagedKVCache, seq: Any, layer: int, k: Any, v: Any) -> None:
    got_k, got_v = cache.gather(seq, layer)
    np.testing.assert_array_equal(bits(got_k), bits(np.asarray(k, np.float16)))
    np.testing.assert_array_equal(bits(got_v), bits(np.asarray(v, np.float16)))


def refs(cache: PagedKVCache, seq: Any) -> list[int]:
    return [cache.lib.tl_kv_refs(cache.pool, int(b)) for b in cache.block_table(seq)]


def fills(cache: PagedKVCache, seq: Any) -> list[int]:
    return [cache.lib.tl_kv_fill(cache.pool, int(b)) for b in cache.block_table(seq)]


def snapshot(cache: PagedKVCache, *sequences: Any) -> Any:
    """Everything that can be seen of the cache and some of its sequences."""
    seen: list[Any] = [cache.stats()]
    for seq in sequences:
        seen += [cache.block_table(seq).tolist(), refs(cache, seq), fills(cache, seq)]
        for layer in range(cache.n_layers):
            seen += [
                cache.seq_len(seq, layer),
                *(bits(a).tolist() for a in cache.gather(seq, layer)),
            ]
    return seen


# --- storing and reading back
# -------------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [[1], [4], [5], [1, 1, 1, 1, 1], [3, 9, 1], [8, 4], [32]])
def test_gather_gives_back_what_was_appended(cache: PagedKVCache, pieces: list[int]) -> None:
    cache.add_seq("a")
    ks, vs = [], []
    for n in pieces:
        k, v = kv(n)
        cache.append("a", 0, k, v)
        ks.append(k)
        vs.append(v)
    total = sum(pieces)
    assert cache.seq_len("a") == total
    assert len(cache.block_table("a")) == -(-total // 4)
    assert_holds(cache, "a", 0, np.concatenate(ks, axis=1), np.concatenate(vs, axis=1))


def test_position_j_is_slot_j_mod_b_of_block_j_div_b(cache: PagedKVCache) -> None:
    import ctypes

    cache.add_seq("a")
    k, v = kv(6)
    cache.append("a", 0, k, v)
    table = cache.block_table("a")
    for is_v, values in ((0, k), (1, v)):
        for j in range(6):
            slab = cache.lib.tl_kv_block_ptr(cache.pool, int(table[j // 4]), 0, is_v)
            codes = (ctypes.c_uint16 * (HEADS * 4 * WIDTH)).from_address(slab)
            stored = np.frombuffer(codes, np.float16).reshape(HEADS, 4, WIDTH)
            np.testing.assert_array_equal(stored[:, j % 4], values[:, j].astype(np.float16))


def test_gather_and_block_table_are_copies_of_documented_type(cache: PagedKVCache) -> None:
    cache.add_seq("a")
    k, v = kv(5)
    cache.append("a", 0, k, v)
    table, gathered = cache.block_table("a"), cache.gather("a", 0)
    assert table.dtype == np.int32
    assert [a.dtype for a in gathered] == [np.float16, np.float16]
    assert [a.shape for a in gathered] == [(HEADS, 5, WIDTH)] * 2
    table[:] = -1
    for a in gathered:
        a[:] = 9
    assert (cache.block_table("a") >= 0).all()
    assert_holds(cache, "a", 0, k, v)
    cache.add_seq("empty")
    assert cache.block_table("empty").shape == (0,)
    assert [a.shape for a in cache.gather("empty", 0)] == [(HEADS, 0, WIDTH)] * 2


def test_float16_is_stored_bit_for_bit_nan_payloads_included(lib: Lib) -> None:
    codes = np.arange(65536, dtype=np.uint16)
    k = codes.view(np.float16).reshape(2, 4096, 8)
    v = codes[::-1].copy().view(np.float16).reshape(2, 4096, 8)
    with PagedKVCache(lib, 300, 16, 1, 2, 8) as cache:
        cache.add_seq(0)
        cache.append(0, 0, k, v)
        got_k, got_v = cache.gather(0, 0)
        np.testing.assert_array_equal(bits(got_k), bits(k))
        np.testing.assert_array_equal(bits(got_v), bits(v))


INF = float("inf")
ROUNDED = [  # value, float16 code: nearest, ties to even; overflow is infinity
    (65504.0, 0x7BFF), (65519.99, 0x7BFF), (65520.0, 0x7C00), (-65520.0, 0xFC00), (1e30, 0x7C00),
    (INF, 0x7C00),
    (2.0**-24, 0x0001), (2.0**-25, 0x0000), (-(2.0**-24), 0x8001), (1.5 * 2.0**-24, 0x0002),
    (-0.0, 0x8000), (1 + 2.0**-11, 0x3C00), (1 + 3 * 2.0**-11, 0x3C02),
    (float("nan"), 0x7E00), (-float("nan"), 0x7E00),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_values_are_rounded_to_nearest_even_and_overflow_to_infinity(lib: Lib, dtype: Any) -> None:
    values = np.array([x for x, _ in ROUNDED], dtype).reshape(1, len(ROUNDED), 1)
    with PagedKVCache(lib, 4, 4, 1, 1, 1) as cache, warnings.catch_warnings():
        warnings.simplefilter("error")  # numpy's
        warnings.filterwarnings("ignore", "append: float16 has nothing for 10 appended values")
        cache.add_seq(0)
        with np.errstate(all="raise"):
            cache.append(0, 0, values, values[:, ::-1])
        k, v = cache.gather(0, 0)
    assert bits(k).ravel().tolist() == [code for _, code in ROUNDED]
    assert bits(v).ravel().tolist() == [code for _, code in ROUNDED][::-1]


def test_float64_is_rounded_once(lib: Lib) -> None:
    # To float32 first this would be the tie 1 + 2**-11, and then 1.0.
    values = np.full((1, 1, 1), 1 + 2.0**-11 + 2.0**-40)
    with PagedKVCache(lib, 1, 1, 1, 1, 1) as cache:
        cache.add_seq(0)
        cache.append(0, 0, values, -values)
        k, v = cache.gather(0, 0)
    assert (bits(k).item(), bits(v).item()) == (0x3C01, 0xBC01)


@given(st.lists(st.floats(width=32), min_size=1, max_size=20))
@settings(max_examples=200, deadline=None)
@pytest.mark.filterwarnings("ignore:append")  # of what float16 cannot hold, on purpose
def test_all_three_types_round_to_the_same_codes(values: list[float]) -> None:
    codes = []
    single = np.array(values, np.float32).reshape(1, -1, 1)
    for a in (single, single.astype(np.float64)):
        with PagedKVCache(None, 10, 4, 1, 1, 1) as cache:
            cache.add_seq(0)
            cache.append(0, 0, a, a)
            codes.append([bits(x).ravel().tolist() for x in cache.gather(0, 0)])
            stored = cache.gather(0, 0)[0]
            cache.add_seq(1)
            cache.append(1, 0, stored, stored)
            codes.append([bits(x).ravel().tolist() for x in cache.gather(1, 0)])
    assert codes[0] == codes[1] == codes[2] == codes[3]


def layouts(n_tokens: int, dtype: Any) -> dict[str, Any]:
    """One K and V in memory layouts that give the same numbers."""
    k, v = kv(n_tokens, dtype=dtype)
    both = np.stack([k, v])
    fused = np.ascontiguousarray(
        both.transpose(2, 0, 1, 3)
    )  # [T, 2, heads, width]: one projection's output
    wide = np.zeros((2, HEADS, n_tokens, 2 * WIDTH), dtype)
    wide[..., ::2] = both
    backwards = np.ascontiguousarray(both[:, ::-1, ::-1])
    shifted = np.zeros(both.nbytes + 1, np.uint8)
    shifted[1:] = np.frombuffer(both.tobytes(), np.uint8)
    misaligned = shifted[1:].view(dtype).reshape(both.shape)
    return {
        "contiguous": (k, v),
        "token_major": (fused[:, 0].transpose(1, 0, 2), fused[:, 1].transpose(1, 0, 2)),
        "fortran": (np.asfortranarray(k), np.asfortranarray(v)),
        "strided_last_axis": (wide[0, ..., ::2], wide[1, ..., ::2]),
        "negative_strides": (backwards[0, ::-1, ::-1], backwards[1, ::-1, ::-1]),
        "different_strides": (k, fused[:, 1].transpose(1, 0, 2)),
        "misaligned": (misaligned[0], misaligned[1]),
        "reversed_last_axis": (k[..., ::-1].copy()[..., ::-1], v[..., ::-1].copy()[..., ::-1]),
    }


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
@pytest.mark.parametrize("n_tokens", [1, 11])
@pytest.mark.parametrize("name", list(layouts(1, np.float32)))
def test_any_strides_store_the_same_and_the_callers_arrays_stay(
    cache: PagedKVCache, name: str, n_tokens: int, dtype: Any
) -> None:
    all_of_them = layouts(n_tokens, dtype)
    k, v = all_of_them[name]
    wanted = [a.astype(np.float16) for a in all_of_them["contiguous"]]
    before = k.tobytes(), v.tobytes()
    for a in (k, v):
        a.flags.writeable = False
    cache.add_seq("a")
    cache.append("a", 0, *kv(2))
    cache.append("a", 0, k, v)
    got = cache.gather("a", 0)
    np.testing.assert_array_equal(bits(got[0][:, 2:]), bits(wanted[0]))
    np.testing.assert_array_equal(bits(got[1][:, 2:]), bits(wanted[1]))
    assert (k.tobytes(), v.tobytes()) == before


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_broadcast_arrays_are_stored_as_the_numbers_they_show(
    cache: PagedKVCache, dtype: Any
) -> None:
    k = np.broadcast_to(np.arange(WIDTH, dtype=dtype), (HEADS, 6, WIDTH))
    v = np.broadcast_to(np.array(7, dtype), (HEADS, 6, WIDTH))
    cache.add_seq("a")
    cache.append("a", 0, k, v)
    assert_holds(cache, "a", 0, np.array(k), np.array(v))


def test_k_and_v_may_have_different_types(cache: PagedKVCache) -> None:
    k, v = kv(5)
    cache.add_seq("a")
    cache.append("a", 0, k.astype(np.float16), v)
    cache.append("a", 0, k, v.astype(np.float64))
    assert_holds(cache, "a", 0, np.concatenate([k, k], axis=1), np.concatenate([v, v], axis=1))


# --- layers
# -------------------------------------------------------------------------------------------------


def test_layers_grow_one_by_one_and_a_fill_counts_what_all_hold(layered: PagedKVCache) -> None:
    layered.add_seq("a")
    held: list[tuple[Any, Any]] = [kv(6), kv(5), kv(3)]
    layered.append("a", 0, *held[0])
    assert len(layered.block_table("a")) == 2
    assert fills(layered, "a") == [0, 0]
    layered.append("a", 1, *held[1])
    assert fills(layered, "a") == [0, 0]
    layered.append("a", 2, *held[2])
    assert fills(layered, "a") == [3, 0]
    assert [layered.seq_len("a", i) for i in range(3)] == [6, 5, 3]
    assert layered.seq_len("a") == 6
    layered.append("a", 2, *kv(3))
    assert fills(layered, "a") == [4, 1]
    layered.append("a", 1, *kv(1))
    assert fills(layered, "a") == [4, 2]
    assert len(layered.block_table("a")) == 2
    for layer in range(2):
        got = layered.gather("a", layer)
        for a, b in zip(got, held[layer], strict=True):
            np.testing.assert_array_equal(a[:, : b.shape[1]], b)


def test_a_fork_between_layers_keeps_both_sides_apart(layered: PagedKVCache) -> None:
    layered.add_seq("a")
    first, second = kv(6), kv(6)
    layered.append("a", 0, *first)
    layered.fork("a", "b")
    layered.append("b", 1, *second)  # blocks 0 and 1 are the parent's too: both are copied
    assert refs(layered, "a") == refs(layered, "b") == [1, 1]
    assert layered.seq_len("a", 1) == 0
    assert_holds(layered, "b", 0, *first)
    assert_holds(layered, "b", 1, *second)
    assert_holds(layered, "a", 0, *first)
    layered.append("a", 1, *first)
    assert_holds(layered, "a", 1, *first)
    assert_holds(layered, "b", 1, *second)
    for seq in "ab":
        layered.append(seq, 2, *kv(5))
        assert fills(layered, seq) == [4, 1]


# --- sharing and copy on write
# ------------------------------------------------------------------------------


def test_fork_shares_every_block_and_copies_none(cache: PagedKVCache) -> None:
    cache.add_seq("a")
    k, v = kv(6)
    cache.append("a", 0, k, v)
    cache.fork("a", "b")
    assert cache.block_table("b").tolist() == cache.block_table("a").tolist()
    assert refs(cache, "a") == [2, 2]
    assert cache.stats() == {
        "free": 6,
        "used": 2,
        "cached": 0,
        "evictions": 0,
        "unrepresentable": 0,
    }
    assert_holds(cache, "b", 0, k, v)


@pytest.mark.parametrize("writer", ["a", "b"])
@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_writing_copies_only_the_shared_block_that_is_written(
    cache: PagedKVCache, writer: str, dtype: Any
) -> None:
    cache.add_seq("a")
    k, v = kv(6)
    cache.append("a", 0, k, v)
    cache.fork("a", "b")
    more = kv(1, dtype=dtype)
    cache.append(writer, 0, *more)
    other = {"a": "b", "b": "a"}[writer]
    assert refs(cache, "a") == refs(cache, "b") == [2, 1]
    assert cache.block_table("a")[1] != cache.block_table("b")[1]
    assert fills(cache, writer) == [4, 3]
    assert fills(cache, other) == [4, 2]
    assert_holds(cache, other, 0, k, v)
    assert_holds(cache, writer, 0, np.concatenate([k, more[0]], 1), np.concatenate([v, more[1]], 1))
    before = cache.block_table(other).tolist()
    cache.append(other, 0, *kv(1))  # the last holder writes in place
    assert cache.block_table(other).tolist() == before
    assert cache.stats()["used"] == 3


def test_appending_at_a_block_boundary_copies_nothing(cache: PagedKVCache) -> None:
    cache.add_seq("a")
    cache.append("a", 0, *kv(4))
    cache.fork("a", "b")
    cache.append("b", 0, *kv(1))
    cache.append("a", 0, *kv(1))
    assert refs(cache, "a") == refs(cache, "b") == [2, 1]
    assert cache.stats()["used"] == 3


def test_sequences_that_differ_in_the_last_token_share_exactly_the_full_block(
    cache: PagedKVCache,
) -> None:
    """Tokens 1 2 3 4 5 and 1 2 3 4 6: K and V of a token are made from the token."""

    def of(*tokens: int) -> tuple[Any, Any]:
        k = np.tile(np.array(tokens, np.float32)[None, :, None], (HEADS, 1, WIDTH))
        return k, -k

    cache.add_seq("five")
    cache.append("five", 0, *of(1, 2, 3, 4))
    cache.fork("five", "six")
    cache.append("five", 0, *of(5))
    cache.append("six", 0, *of(6))
    shared = set(cache.block_table("five").tolist()) & set(cache.block_table("six").tolist())
    assert len(shared) == 1
    assert_holds(cache, "five", 0, *of(1, 2, 3, 4, 5))
    assert_holds(cache, "six", 0, *of(1, 2, 3, 4, 6))


@pytest.mark.parametrize(("fill", "allowed"), [(0, False), (1, False), (3, False), (4, True)])
def test_only_a_full_block_can_be_registered(cache: PagedKVCache, fill: int, allowed: bool) -> None:
    cache.add_seq("a")
    cache.append("a", 0, *kv(max(fill, 1)))
    block = int(cache.block_table("a")[0])
    cache.lib.tl_kv_set_fill(cache.pool, block, fill)
    if allowed:
        cache.lib.tl_kv_register(cache.pool, block, 77)
        for other in (3, 4, 5):
            with pytest.raises(TlError):  # frozen from here on
                cache.lib.tl_kv_set_fill(cache.pool, block, other)
    else:
        with pytest.raises(TlError) as caught:
            cache.lib.tl_kv_register(cache.pool, block, 77)
        assert caught.value.status == TL_EINVAL


def lookup(cache: PagedKVCache, name: int) -> int | None:
    out = np.zeros(1, np.uint32)
    try:
        cache.lib.tl_kv_lookup(cache.pool, name, u32_ptr(out))
    except TlError as error:
        if error.status != TL_ENOTFOUND:
            raise
        return None
    return int(out[0])


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_a_registered_block_is_copied_before_it_is_written(cache: PagedKVCache, dtype: Any) -> None:
    cache.add_seq("a")
    k, v = kv(2)
    cache.append("a", 0, k, v)
    block = int(cache.block_table("a")[0])
    cache.lib.tl_kv_set_fill(cache.pool, block, 4)  # somebody vouches for slots nobody wrote
    cache.lib.tl_kv_register(cache.pool, block, 99)
    more = kv(1, dtype=dtype)
    cache.append("a", 0, *more)
    fresh = int(cache.block_table("a")[0])
    assert fresh != block
    assert cache.stats() == {
        "free": 6,
        "used": 1,
        "cached": 1,
        "evictions": 0,
        "unrepresentable": 0,
    }
    assert fills(cache, "a") == [3]
    assert_holds(cache, "a", 0, np.concatenate([k, more[0]], 1), np.concatenate([v, more[1]], 1))
    assert lookup(cache, 99) == block


def test_a_sequence_grows_behind_its_registered_blocks(cache: PagedKVCache) -> None:
    cache.add_seq("a")
    k, v = kv(8)
    cache.append("a", 0, k, v)
    first, second = cache.block_table("a").tolist()
    cache.lib.tl_kv_register(cache.pool, first, 1)
    cache.lib.tl_kv_register(cache.pool, second, 2)
    more = kv(5)
    cache.append("a", 0, *more)
    assert cache.block_table("a").tolist()[:2] == [first, second]
    assert fills(cache, "a") == [4, 4, 4, 1]
    assert_holds(cache, "a", 0, np.concatenate([k, more[0]], 1), np.concatenate([v, more[1]], 1))


def test_freed_registered_chains_are_evicted_from_their_tail(lib: Lib) -> None:
    with make(lib, num_blocks=3) as cache:
        cache.add_seq("a")
        cache.append("a", 0, *kv(12))
        parent, chain = 0, []
        for block, tokens in zip(
            cache.block_table("a"), np.arange(12, dtype=np.uint32).reshape(3, 4), strict=True
        ):
            parent = lib.tl_kv_block_hash(parent, u32_ptr(tokens), 4)
            lib.tl_kv_register(cache.pool, int(block), parent)
            chain.append(parent)
        cache.free("a")
        assert cache.stats() == {
            "free": 0,
            "used": 0,
            "cached": 3,
            "evictions": 0,
            "unrepresentable": 0,
        }
        assert cache.num_free_blocks() == 3
        cache.add_seq("b")
        cache.append("b", 0, *kv(1))
        assert cache.stats() == {
            "free": 0,
            "used": 1,
            "cached": 2,
            "evictions": 1,
            "unrepresentable": 0,
        }
        assert [lookup(cache, name) is not None for name in chain] == [True, True, False]


# --- running out
# --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_out_of_blocks_changes_nothing(lib: Lib, dtype: Any) -> None:
    with make(lib, num_blocks=4, n_layers=2) as cache:
        cache.add_seq("a")
        for layer in range(2):
            cache.append("a", layer, *kv(6))
        cache.fork("a", "b")
        before = snapshot(cache, "a", "b")
        with pytest.raises(OutOfBlocks, match=r"'b'.* 2 more .* 1 to copy .* 2 are free"):
            cache.append("b", 1, *kv(10, dtype=dtype))  # two blocks more and a copy, two are free
        assert snapshot(cache, "a", "b") == before
        cache.append("b", 1, *kv(6, dtype=dtype))  # one more and a copy: it fits exactly
        assert cache.stats()["free"] == 0
        before = snapshot(cache, "a", "b")
        with pytest.raises(OutOfBlocks):
            cache.append("a", 0, *kv(3, dtype=dtype))
        assert snapshot(cache, "a", "b") == before
        cache.append("a", 0, *kv(2, dtype=dtype))  # what needs no block still goes
        assert isinstance(OutOfBlocks("x"), RuntimeError)


def test_running_out_evicts_nothing_and_what_is_cached_can_be_taken(lib: Lib) -> None:
    with make(lib, num_blocks=3) as cache:
        cache.add_seq("old")
        cache.append("old", 0, *kv(8))
        for name, block in enumerate(cache.block_table("old"), start=1):
            lib.tl_kv_register(cache.pool, int(block), name)
        cache.free("old")
        cache.add_seq("new")
        with pytest.raises(OutOfBlocks, match="1 are free and 2 cached of 3"):
            cache.append("new", 0, *kv(13))
        assert cache.stats() == {
            "free": 1,
            "used": 0,
            "cached": 2,
            "evictions": 0,
            "unrepresentable": 0,
        }
        assert cache.num_free_blocks() == 3
        cache.append("new", 0, *kv(12))
        assert cache.stats() == {
            "free": 0,
            "used": 3,
            "cached": 0,
            "evictions": 2,
            "unrepresentable": 0,
        }


def test_a_request_beyond_any_pool_is_out_of_blocks_without_a_large_array(lib: Lib) -> None:
    with PagedKVCache(lib, 2, 1, 1, 1, 1) as cache:
        cache.add_seq(0)
        huge = np.broadcast_to(np.float16(1), (1, 2**31 - 1, 1))
        with pytest.raises(OutOfBlocks, match=str(2**31 - 1)):
            cache.append(0, 0, huge, huge)
        longer = np.broadcast_to(np.float16(1), (1, 2**31, 1))
        with pytest.raises(ValueError, match=str(2**31)):
            cache.append(0, 0, longer, longer)
        assert cache.stats()["free"] == 2


def test_a_failure_half_way_gives_the_fresh_blocks_back(
    cache: PagedKVCache, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.add_seq("a")
    cache.append("a", 0, *kv(6))
    cache.fork("a", "b")
    before = snapshot(cache, "a", "b")

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    for step in ("copy", "write"):
        with monkeypatch.context() as patch:
            patch.setattr(Blocks, step, stop)
            with pytest.raises(KeyboardInterrupt):
                cache.append("b", 0, *kv(9))
        assert snapshot(cache, "a", "b") == before
    cache.append("b", 0, *kv(9))


# --- bad arguments
# ------------------------------------------------------------------------------------------


class Refuses:
    """Calls that must raise and leave everything as it was."""

    @pytest.fixture(autouse=True)
    def _filled(self, layered: PagedKVCache) -> Iterator[None]:
        self.cache = layered
        layered.add_seq("a")
        layered.append("a", 0, *kv(5))
        layered.fork("a", "b")
        before = snapshot(layered, "a", "b")
        yield
        assert snapshot(layered, "a", "b") == before


class TestBadArguments(Refuses):
    @pytest.mark.parametrize("seq", ["c", -1, 0, None, ("a",), 2**80])
    def test_an_unknown_id_is_a_key_error_everywhere(self, seq: Any) -> None:
        cache, (k, v) = self.cache, kv(1)
        calls = (
            lambda: cache.append(seq, 0, k, v), lambda: cache.fork(seq, "new"),
            lambda: cache.free(seq), lambda: cache.block_table(seq), lambda: cache.seq_len(seq),
            lambda: cache.gather(seq, 0),
        )  # fmt: skip
        for call in calls:
            with pytest.raises(KeyError):
                call()

    def test_a_freed_id_is_unknown_and_may_begin_again(self) -> None:
        cache = self.cache
        cache.add_seq("c")
        cache.append("c", 0, *kv(3))
        cache.free("c")
        for call in (
            lambda: cache.free("c"),
            lambda: cache.seq_len("c"),
            lambda: cache.fork("c", "d"),
        ):
            with pytest.raises(KeyError):
                call()
        cache.add_seq("c")
        assert cache.seq_len("c") == 0
        cache.free("c")

    def test_a_live_id_cannot_begin_again(self) -> None:
        with pytest.raises(ValueError, match="'a'"):
            self.cache.add_seq("a")
        for parent, child in (("a", "b"), ("a", "a"), ("b", "a")):
            with pytest.raises(ValueError, match="live"):
                self.cache.fork(parent, child)

    @pytest.mark.parametrize("layer", [-1, 3, 2**32, 2**32 + 1, 2**64, 0.0, "0", None, True])
    def test_a_bad_layer_is_a_value_error(self, layer: Any) -> None:
        cache, (k, v) = self.cache, kv(1)
        for call in (
            lambda: cache.append("a", layer, k, v), lambda: cache.seq_len("a", layer),
            lambda: cache.gather("a", layer),
        ):  # fmt: skip
            with pytest.raises(ValueError, match="layer"):
                call()

    @pytest.mark.parametrize(
        "shape",
        [
            (WIDTH, 5, HEADS), (5, HEADS, WIDTH), (HEADS, 0, WIDTH), (HEADS, 5),
            (1, HEADS, 5, WIDTH), (HEADS + 1, 5, WIDTH),
            (HEADS, 5, WIDTH + 1), (1, 5, WIDTH), (), (0, 0, 0),
        ],
    )  # fmt: skip
    def test_a_wrong_shape_is_a_value_error(self, shape: tuple[int, ...]) -> None:
        good, bad = np.zeros((HEADS, 5, WIDTH), np.float32), np.zeros(shape, np.float32)
        for k, v in ((bad, good), (good, bad), (bad, bad)):
            with pytest.raises(ValueError, match=r"append: [kv] "):
                self.cache.append("a", 0, k, v)

    def test_k_and_v_of_different_lengths_are_a_value_error(self) -> None:
        with pytest.raises(ValueError, match=r"\(2, 4, 3\).*\(2, 5, 3\)"):
            self.cache.append("a", 0, kv(5)[0], kv(4)[1])

    @pytest.mark.parametrize(
        "dtype",
        [
            bool,
            complex,
            object,
            "S4",
            "m8[s]",
        ],
    )
    def test_what_are_no_real_numbers_is_a_type_error(self, dtype: Any) -> None:
        good, bad = np.zeros((HEADS, 1, WIDTH), np.float32), np.zeros((HEADS, 1, WIDTH), dtype)
        for k, v in ((bad, good), (good, bad)):
            with pytest.raises(TypeError, match=r"^append: [kv] must be real numbers, not"):
                self.cache.append("a", 0, k, v)

    @pytest.mark.parametrize("what", [None, "k", {1.0}, [[1.0], [2.0, 3.0]], object()])
    def test_what_is_no_array_is_a_type_error(self, what: Any) -> None:
        with pytest.raises(TypeError, match=r"^append: k must be"):
            self.cache.append("a", 0, what, np.zeros((HEADS, 1, WIDTH), np.float32))
        masked = np.ma.zeros((HEADS, 1, WIDTH), np.float32)
        with pytest.raises(TypeError, match="MaskedArray"):
            self.cache.append("a", 0, masked, masked)

    def test_an_id_that_cannot_be_hashed_is_a_type_error(self) -> None:
        for call in (
            self.cache.add_seq,
            self.cache.free,
            self.cache.seq_len,
            lambda i: self.cache.fork("a", i),
        ):
            with pytest.raises(TypeError):
                call([1])


GOOD = {"num_blocks": 4, "block_size": 2, "n_layers": 1, "n_kv_heads": 1, "d_head": 1}


@pytest.mark.parametrize("name", list(GOOD))
@pytest.mark.parametrize(
    "value",
    [
        0,
        -1,
        2**32,
        2**32 + 4,
        2**64 + 4,
        1.0,
        1.5,
        "4",
        None,
        True,
        np.bool_(True),
        [4],
        np.float32(4),
    ],
)
def test_a_size_that_is_no_positive_uint32_is_a_value_error(
    lib: Lib, name: str, value: Any
) -> None:
    with pytest.raises(ValueError, match=name):
        PagedKVCache(lib, **{**GOOD, name: value})


@pytest.mark.parametrize("integer", [np.int8, np.uint8, np.int64, np.uint64, np.intp])
def test_numpy_integers_are_sizes(lib: Lib, integer: Any) -> None:
    with PagedKVCache(lib, *(integer(n) for n in GOOD.values())) as cache:
        assert cache.stats()["free"] == 4
        cache.add_seq(0)
        k = np.ones((1, 1, 1), np.float32)
        cache.append(0, integer(0), k, k)
        assert cache.seq_len(0, integer(0)) == 1


@pytest.mark.parametrize(
    "sizes",
    [
        (2**31 - 1, 2**20, 1, 2**10, 2**10),
        (2**31 - 1, 2**32 - 1, 2**32 - 1, 2**32 - 1, 2**32 - 1),
        (1, 2**32 - 1, 2**32 - 1, 1, 1),
    ],
)
def test_sizes_that_multiply_beyond_memory_raise_and_reserve_nothing(
    lib: Lib, sizes: tuple[int, ...]
) -> None:
    with pytest.raises((ValueError, TlError), match=r"^PagedKVCache: (?!tl_)|tl_kv_pool_create"):
        PagedKVCache(lib, *sizes)


def test_more_blocks_than_an_int32_table_can_name_are_a_value_error(lib: Lib) -> None:
    with pytest.raises(ValueError, match="num_blocks"):
        PagedKVCache(lib, 2**31, 1, 1, 1, 1)


def test_any_hashable_value_is_a_sequence_id(cache: PagedKVCache) -> None:
    ids = ["a", 0, -1, 2**80, None, ("a", 1), frozenset([1]), 1.5, b"a", np.int64(7)]
    for i in ids:
        cache.add_seq(i)
    for n, i in enumerate(ids[:8], start=1):
        cache.append(i, 0, *kv(n % 4 + 1))
    assert [cache.seq_len(i) for i in ids[:8]] == [n % 4 + 1 for n in range(1, 9)]
    assert cache.seq_len(7) == 0  # equal values are one id, as in a dict


def test_a_pool_larger_than_memory_costs_nothing_until_it_is_written(lib: Lib) -> None:
    with PagedKVCache(lib, 2**16, 16, 32, 8, 128) as cache:  # 128 GiB
        cache.add_seq("a")
        k = np.ones((8, 3, 128), np.float32)
        cache.append("a", 31, k, k)
        assert_holds(cache, "a", 31, k, k)


def test_a_cache_is_a_container_of_its_sequences(lib: Lib) -> None:
    cache = PagedKVCache(num_blocks=8, block_size=4, n_layers=3, n_kv_heads=2, d_head=5, lib=lib)
    assert len(cache) == 0
    assert list(cache) == []
    assert cache  # for `cache or default`
    for seq in ("a", 7, None):
        cache.add_seq(seq)
    assert [seq in cache for seq in ("a", 7, None, "b", 7.0)] == [True, True, True, False, True]
    assert len(cache) == 3
    assert list(cache) == ["a", 7, None]
    for seq in cache:  # what is written meanwhile does not disturb
        cache.free(seq)
    assert len(cache) == 0
    assert cache.nbytes == 8 * 2 * 3 * 2 * 4 * 5 * 2
    cache.close()


def test_lib_comes_first_or_by_its_name(lib: Lib) -> None:
    sizes = {"num_blocks": 1, "block_size": 1, "n_layers": 1, "n_kv_heads": 1, "d_head": 1}
    for args, options in (
        ((lib, 1, 1, 1, 1, 1), {}), ((None, 1, 1, 1, 1, 1), {}), ((lib,), sizes), ((), sizes),
        ((), {"lib": lib, **sizes}), ((), {"lib": None, **sizes}),
    ):  # fmt: skip
        with PagedKVCache(*args, **options) as cache:
            assert cache.lib is lib
    with pytest.raises(TypeError, match=r"^PagedKVCache: block_size, d_head must be given"):
        PagedKVCache(num_blocks=1, n_layers=1, n_kv_heads=1)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"^PagedKVCache: d_head must be given"):
        PagedKVCache(1, 1, 1, 1, 1)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match=r"^PagedKVCache: lib must be a Lib or None, not 1"):
        PagedKVCache(1, 1, 1, 1, 1, 1)  # type: ignore[call-overload]


def test_a_table_of_one_large_batch_is_not_kept(lib: Lib) -> None:
    with PagedKVCache(lib, 40000, 1, 1, 1, 1) as cache:
        for seq, n in (("long", 30000), ("short", 3)):
            cache.add_seq(seq)
            cache.append(seq, 0, *np.ones((2, 1, n, 1), np.float32))
        for ids, most in ((["long"] * 40, 16 << 20), (["short"], 1000), (["short"], 1000)):
            with cache.batch(ids) as batch:
                held = batch.tables.base
                assert held is not None
                assert held.nbytes < most
                for table, seq in zip(batch.tables, ids, strict=True):
                    n = cache.seq_len(seq)
                    assert (table[:n] == cache.block_table(seq)).all()
                assert batch.lengths(0).tolist() == [cache.seq_len(seq) for seq in ids]
        assert len(cache._spare) == 1


def test_float16_goes_where_float32_goes_in_a_large_pool(lib: Lib) -> None:
    """A slot is a block times its positions, more than 32 bits hold."""
    with PagedKVCache(lib, 2**20, 2**13, 1, 1, 1) as cache:
        cache.add_seq("a")
        ids = np.empty(2**19 + 1, np.uint32)
        lib.tl_kv_alloc(cache.pool, len(ids), u32_ptr(ids))  # the next block is behind them
        k = np.arange(5, dtype=np.float16).reshape(1, 5, 1)
        cache.append("a", 0, k, -k)
        assert int(cache.block_table("a")[0]) * 2**13 >= 2**32
        assert_holds(cache, "a", 0, k, -k)


# --- against a model
# ----------------------------------------------------------------------------------------

BLOCKS, BLOCK, LAYERS = 24, 4, 2
Stored = tuple[NDArray[np.float16], NDArray[np.float16]]


class CacheAgainstModel(RuleBasedStateMachine):
    """Random calls on a pool of 24 blocks of 4 and two layers, and beside them a dictionary of what
    every sequence holds.

    The model knows nothing of blocks but how many a length needs. What the pool says is checked
    after every step: the counters add up, a block has one reference per sequence that holds it and
    per lookup still held, every sequence reads back what it was given.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cache = PagedKVCache(None, BLOCKS, BLOCK, LAYERS, HEADS, WIDTH)
        self.model: dict[int, list[Stored]] = {}
        self.registered: dict[int, tuple[int, Any]] = {}  # hash: block, its contents
        self.held: list[int] = []  # blocks that a lookup took a reference on
        self.names = itertools.count(1)
        self.n_gone = 0

    def teardown(self) -> None:
        for seq in list(self.model):
            self.cache.free(seq)
        for block in self.held:
            self.cache.lib.tl_kv_unref(self.cache.pool, block)
        assert self.cache.stats()["used"] == 0
        assert self.cache.num_free_blocks() == BLOCKS
        self.cache.close()

    def some(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.model)))

    @initialize()
    def begin(self) -> None:
        self.add()

    @rule()
    def add(self) -> None:
        seq = next(self.names)
        self.cache.add_seq(seq)
        empty = np.zeros((HEADS, 0, WIDTH), np.float16)
        self.model[seq] = [(empty, empty)] * LAYERS

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        parent, child = self.some(data), next(self.names)
        self.cache.fork(parent, child)
        self.model[child] = list(self.model[parent])

    def append_to(self, seq: int, layer: int, n: int, dtype: Any) -> None:
        k, v = kv(n, dtype=dtype)
        free, before = self.cache.num_free_blocks(), self.cache.block_table(seq)
        lengths = [held[0].shape[1] for held in self.model[seq]]
        end = lengths[layer] + n
        shared = [
            b for b in before[lengths[layer] // BLOCK : -(-end // BLOCK)] if self.owners(int(b)) > 1
        ]
        need = max(0, -(-end // BLOCK) - len(before)) + len(shared)
        if need > free:
            with pytest.raises(OutOfBlocks):
                self.cache.append(seq, layer, k, v)
            assert self.cache.block_table(seq).tolist() == before.tolist()
            assert self.cache.num_free_blocks() == free
            return
        self.cache.append(seq, layer, k, v)
        old_k, old_v = self.model[seq][layer]
        self.model[seq][layer] = (
            np.concatenate([old_k, k.astype(np.float16)], axis=1),
            np.concatenate([old_v, v.astype(np.float16)], axis=1),
        )
        assert self.cache.num_free_blocks() == free - need

    def owners(self, block: int) -> int:
        tables = [self.cache.block_table(seq).tolist() for seq in self.model]
        return sum(table.count(block) for table in tables) + self.held.count(block)

    @precondition(lambda self: self.model)
    @rule(
        data=st.data(),
        layer=st.integers(0, LAYERS - 1),
        n=st.integers(1, 9),
        dtype=st.sampled_from([np.float16, np.float32]),
    )
    def append(self, data: st.DataObject, layer: int, n: int, dtype: Any) -> None:
        self.append_to(self.some(data), layer, n, dtype)

    @precondition(lambda self: self.model)
    @rule(data=st.data(), n=st.integers(1, 9))
    def append_to_all_layers(self, data: st.DataObject, n: int) -> None:
        seq = self.some(data)
        for layer in range(LAYERS):
            self.append_to(seq, layer, n, np.float32)

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        seq = self.some(data)
        self.cache.free(seq)
        del self.model[seq]
        for call in (self.cache.free, self.cache.block_table, self.cache.seq_len):
            with pytest.raises(KeyError):
                call(seq)

    def contents(self, seq: int, i: int) -> Any:
        span = slice(i * BLOCK, (i + 1) * BLOCK)
        return [a[:, span].tolist() for layer in self.model[seq] for a in layer]

    @precondition(lambda self: self.model)
    @rule(data=st.data())
    def register_what_is_full(self, data: st.DataObject) -> None:
        seq = self.some(data)
        complete = min(held[0].shape[1] for held in self.model[seq])
        for i, block in enumerate(self.cache.block_table(seq).tolist()):
            if block in [b for b, _ in self.registered.values()]:
                continue
            name = next(self.names) + 1000
            if (i + 1) * BLOCK <= complete:
                self.cache.lib.tl_kv_register(self.cache.pool, block, name)
                self.registered[name] = (block, self.contents(seq, i))
            else:
                with pytest.raises(TlError):
                    self.cache.lib.tl_kv_register(self.cache.pool, block, name)

    @precondition(lambda self: self.registered)
    @rule(data=st.data())
    def look_up(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.registered)))
        block, wanted = self.registered[name]
        assert lookup(self.cache, name) == block
        self.held.append(block)
        found = []
        for layer in range(LAYERS):
            for is_v in range(2):
                found.append(self.cache._blocks.slab(block, layer, is_v).tolist())
        assert found == wanted

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def let_go(self, data: st.DataObject) -> None:
        block = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.cache.lib.tl_kv_unref(self.cache.pool, block)

    @invariant()
    def counters_add_up(self) -> None:
        stats = self.cache.stats()
        assert stats["free"] + stats["used"] + stats["cached"] == BLOCKS
        in_use = {b for seq in self.model for b in self.cache.block_table(seq).tolist()} | set(
            self.held
        )
        assert stats["used"] == len(in_use)
        for block in range(BLOCKS):
            assert self.cache.lib.tl_kv_refs(self.cache.pool, block) == self.owners(block)

    @invariant()
    def evicted_names_are_gone(self) -> None:
        """A name is either found at its block or was evicted; as many are gone as evictions were
        counted."""
        for name in list(self.registered):
            block = lookup(self.cache, name)
            if block is None:
                del self.registered[name]
                self.n_gone += 1
            else:
                assert block == self.registered[name][0]
                self.cache.lib.tl_kv_unref(self.cache.pool, block)
        assert self.cache.stats()["evictions"] == self.n_gone

    @invariant()
    def every_sequence_holds_what_it_was_given(self) -> None:
        for seq, layers in self.model.items():
            lengths = [k.shape[1] for k, _ in layers]
            assert [self.cache.seq_len(seq, layer) for layer in range(LAYERS)] == lengths
            assert len(self.cache.block_table(seq)) == -(-max(lengths) // BLOCK)
            assert fills(self.cache, seq) == [
                min(max(min(lengths) - i * BLOCK, 0), BLOCK)
                for i in range(len(self.cache.block_table(seq)))
            ]
            for layer, (k, v) in enumerate(layers):
                assert_holds(self.cache, seq, layer, k, v)


def test_random_calls_agree_with_a_model(lib: Lib) -> None:
    run_state_machine_as_test(  # type: ignore[no-untyped-call]
        CacheAgainstModel,
        settings=settings(
            max_examples=40, stateful_step_count=50, deadline=None, derandomize=True,
            suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
        ),
    )  # fmt: skip
