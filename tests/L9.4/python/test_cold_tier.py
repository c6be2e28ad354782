# SPDX-License-Identifier: MIT
"""Blocks that the prefix index gave up, and that come back from a store: the bits that were
computed, or nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from test_prefix_cache import SIZES, TEXT, check, say, write
from tinyllm import Layer, MemoryStore, OutOfBlocks, PagedKVCache
from tinyllm.infer import cold

OTHER = list(range(1000, 1060))  # 15 of 16 blocks


class Store(dict):  # type: ignore[type-arg]
    """A dict that fails on demand."""

    fails = ""

    def __getitem__(self, key: str) -> Any:
        if self.fails == "get":
            raise OSError("the disk is gone")
        return super().__getitem__(key)

    def __setitem__(self, key: str, value: Any) -> None:
        if self.fails == "set":
            raise OSError("no space left")
        super().__setitem__(key, value)


@pytest.fixture
def store() -> Store:
    return Store()


@pytest.fixture
def cache(store: Store) -> Any:
    with PagedKVCache(num_blocks=16, cold=store, **SIZES) as cache:
        yield cache


def pushed_out(cache: PagedKVCache, namespace: bytes = b"") -> None:
    """A text of two full blocks, which then leave the pool."""
    say(cache, "a", TEXT, namespace)
    cache.free("a")
    say(cache, "b", OTHER)
    cache.append("b", 0, *np.ones((2, 1, 4, 4), np.float16))  # the last block
    assert cache.match_len(TEXT, namespace) == 0
    cache.free("b")


@pytest.mark.parametrize("namespace", [b"", b"tenant\0" * 9])
def test_what_was_evicted_comes_back_with_every_bit(cache: PagedKVCache, namespace: bytes) -> None:
    pushed_out(cache, namespace)
    assert cache.add_seq("c", [*TEXT[:8], 77], namespace) == 8
    check(cache, "c", TEXT, namespace)
    write(cache, "c", TEXT, namespace)
    check(cache, "c", TEXT, namespace)
    assert cache.add_seq("d", TEXT, namespace) == 8  # and is found in the pool again
    assert cache.snapshot().counters["leaked"] == 0


def test_what_an_import_evicts_is_kept_too(cache: PagedKVCache) -> None:
    say(cache, "long", OTHER)
    kept = cache.export_seq("long")
    cache.drop_namespace(b"")  # and with it the blocks that were found under it
    cache.free("long")
    say(cache, "a", TEXT, b"x")
    cache.free("a")
    cache.import_seq("b", kept)  # 15 of 16 blocks
    assert cache.match_len(TEXT, b"x") == 4
    cache.free("b")
    assert cache.add_seq("c", TEXT, b"x") == 8
    check(cache, "c", TEXT, b"x")


@pytest.mark.parametrize("store", [7, "s3://bucket", object()])
def test_what_is_no_store_is_refused_when_the_cache_is_made(store: Any) -> None:
    with pytest.raises(TypeError, match="cold must be a mapping of str to bytes, not"):
        PagedKVCache(num_blocks=4, cold=store, **SIZES)


def test_layers_with_windows_have_no_cold_tier(store: Store) -> None:
    layers = [Layer(1, 4), Layer(1, 4, window=8)]
    with pytest.raises(TypeError, match="layers with windows keep no texts"):
        PagedKVCache(num_blocks=4, block_size=4, layers=layers, cold=store)


def test_another_process_finds_what_a_store_keeps(store: Store) -> None:
    with PagedKVCache(num_blocks=16, cold=store, **SIZES) as first:
        pushed_out(first)
    with PagedKVCache(num_blocks=16, cold=store, **SIZES) as second:
        assert second.add_seq("a", TEXT) == 8
        check(second, "a", TEXT)


def test_other_tokens_and_namespaces_find_nothing(cache: PagedKVCache) -> None:
    pushed_out(cache, b"x")
    assert cache.add_seq("c", TEXT, b"y") == 0
    assert cache.add_seq("d", [1, *TEXT[1:]], b"x") == 0
    assert cache.add_seq("e", [*TEXT[:5], 1, *TEXT[6:]], b"x") == 4


def test_tokens_are_compared_and_no_name_decides(
    cache: PagedKVCache, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Even where all texts had one name, none would be taken for another."""
    monkeypatch.setattr(cold, "_key", lambda packed: "one name")
    pushed_out(cache)
    assert list(store) == ["one name"]  # of the block that was evicted last, the first of the text
    assert cache.add_seq("c", [9, *TEXT]) == 0
    assert cache.add_seq("d", TEXT) == 4
    check(cache, "d", TEXT)


def test_an_entry_under_anothers_name_is_refused(cache: PagedKVCache, store: Store) -> None:
    pushed_out(cache)
    store.update(dict(zip(sorted(store), [store[key] for key in sorted(store)[::-1]], strict=True)))
    with pytest.warns(UserWarning, match="has what belongs to .* its tokens are computed"):
        assert cache.add_seq("c", TEXT) == 0


@pytest.mark.parametrize("place", [0, 3, 30, 100, 200, -1])
def test_damaged_bytes_are_computed_anew(cache: PagedKVCache, store: Store, place: int) -> None:
    pushed_out(cache)
    for key, entry in list(store.items()):
        damaged = bytearray(entry)
        damaged[place] ^= 1
        store[key] = bytes(damaged)
    with pytest.warns(UserWarning, match="its tokens are computed"):
        assert cache.add_seq("c", TEXT) == 0
    write(cache, "c", TEXT)
    check(cache, "c", TEXT)


def test_a_store_that_fails_costs_its_blocks_and_no_more(cache: PagedKVCache, store: Store) -> None:
    store.fails = "set"
    with pytest.warns(UserWarning, match=r"no space left; what it was to keep is evicted"):
        pushed_out(cache)
    assert not store
    store.fails = ""
    pushed_out(cache)
    store.fails = "get"
    with pytest.warns(UserWarning, match="the disk is gone; its tokens are computed"):
        assert cache.add_seq("c", TEXT) == 0


def test_a_full_memory_store_is_such_a_store() -> None:
    with PagedKVCache(num_blocks=16, cold=MemoryStore(limit=10), **SIZES) as cache:
        with pytest.warns(UserWarning, match="what it was to keep is evicted"):
            pushed_out(cache)
        assert cache.add_seq("c", TEXT) == 0


def test_no_more_comes_back_than_there_is_room_for(cache: PagedKVCache) -> None:
    pushed_out(cache)
    say(cache, "b", list(range(2000, 2060)))
    assert cache.add_seq("c", TEXT) == 4
    check(cache, "c", TEXT)
    with pytest.raises(OutOfBlocks):
        write(cache, "c", TEXT)


def test_a_sequence_that_was_swapped_out_is_said_as_before(cache: PagedKVCache) -> None:
    kept: dict[str, bytes] = {}
    cache.add_seq("a", TEXT, b"tenant")
    write(cache, "a", TEXT[:9], b"tenant")
    cache.swap_out("a", kept)
    assert cache.match_len(TEXT, b"tenant") == 8  # others find it meanwhile
    cache.drop_namespace(b"tenant")
    cache.swap_in("a", kept)
    assert cache.said("a") == TEXT
    write(cache, "a", TEXT, b"tenant")
    cache.extend("a", [1])
    assert cache.add_seq("b", TEXT, b"tenant") == 8
    check(cache, "b", TEXT, b"tenant")
