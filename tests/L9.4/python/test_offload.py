# SPDX-License-Identifier: MIT
"""A sequence that leaves the pool for a store comes back with every bit, and is always in one
of them."""

from __future__ import annotations

import itertools
import os
import re
import struct
import sys
import time
import warnings
from collections.abc import Callable, Iterator, MutableMapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinyllm
from numpy.typing import NDArray
from tinyllm import (
    ClosedError,
    ConcurrentUseError,
    FileStore,
    MemoryStore,
    OutOfBlocks,
    PagedKVCache,
    StoreError,
    open_store,
    paged_attention_decode,
)
from tinyllm.ffi.libtinyllm import Lib
from tinyllm.infer import offload, stores

LAYERS, HEADS, B, WIDTH = 2, 2, 4, 3
DTYPES = ["float16", "bfloat16", "float32", "int8", "float8_e4m3fn"]


def make(lib: Lib, num_blocks: int = 24, dtype: str = "float16", **sizes: int) -> PagedKVCache:
    wanted = {
        "block_size": B, "n_layers": LAYERS, "n_kv_heads": HEADS, "d_head": WIDTH, **sizes,
    }  # fmt: skip
    return PagedKVCache(lib=lib, num_blocks=num_blocks, dtype=dtype, **wanted)


def rows(seed: int, n: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal((2, HEADS, n, WIDTH), np.float32)


def begin(cache: PagedKVCache, seq: Any, *lengths: int) -> None:
    """A sequence of these lengths, in blocks out of order that others had before."""
    cache.add_seq("before")
    cache.append("before", 0, *rows(0, 23))
    cache.append("before", 1, *rows(1, 23))
    cache.add_seq(seq)
    cache.free("before")
    for layer, length in enumerate(lengths):
        if length:
            cache.append(seq, layer, *rows(10 + layer, length))


def cut_fork(cache: PagedKVCache) -> None:
    begin(cache, "parent", 11, 11)
    cache.fork("parent", "a")
    cache.truncate("a", 6)


def trimmed(cache: PagedKVCache, *lengths: int) -> None:
    begin(cache, "a", *lengths)
    cache.trim_front("a", 3)


SHAPES: dict[str, Callable[[PagedKVCache], object]] = {
    "one position": lambda cache: begin(cache, "a", 1, 1),
    "whole blocks": lambda cache: begin(cache, "a", 8, 8),
    "a last block in part": lambda cache: begin(cache, "a", 14, 14),
    "layers apart": lambda cache: begin(cache, "a", 5, 14),
    "a layer without any": lambda cache: begin(cache, "a", 9, 0),
    "empty": lambda cache: begin(cache, "a"),
    "a front given back": lambda cache: trimmed(cache, 14, 14),
    "a front given back, layers apart": lambda cache: trimmed(cache, 17, 13),
    "a fork that was cut": cut_fork,
}


@pytest.fixture(params=["one block a part", "one part"])
def parts(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_PART_BYTES", 1 if "block" in request.param else 1 << 26)


def assert_twins(one: PagedKVCache, two: PagedKVCache) -> None:
    """Everything that can be seen of sequence "a" is the same, bit for bit."""
    gone = int((one.block_table("a") < 0).sum())
    assert (one.block_table("a") < 0).tolist() == (two.block_table("a") < 0).tolist()
    q = np.random.default_rng(5).standard_normal((1, 2 * HEADS, WIDTH), np.float32)
    for layer in range(LAYERS):
        n = one.seq_len("a", layer)
        assert n == two.seq_len("a", layer)
        if not gone:
            for mine, its in zip(one.gather("a", layer), two.gather("a", layer), strict=True):
                assert mine.tobytes() == its.tobytes()
        if n:
            mine, its = (
                paged_attention_decode(q, cache, ["a"], layer, window=n - gone * B)
                for cache in (one, two)
            )
            assert mine.tobytes() == its.tobytes()


def fills(cache: PagedKVCache) -> list[int]:
    """Of the blocks that sequence "a" holds."""
    table = cache.block_table("a")
    return [cache.lib.tl_kv_fill(cache.pool, int(block)) for block in table if block >= 0]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.usefixtures("parts")
def test_a_sequence_comes_back_with_every_bit_and_goes_on(lib: Lib, shape: str, dtype: str) -> None:
    with make(lib, dtype=dtype) as cache, make(lib, dtype=dtype) as twin:
        for each in (cache, twin):
            SHAPES[shape](each)
        store: dict[str, bytes] = {}
        cache.swap_out("a", store)
        assert "a" not in cache
        assert cache.snapshot().counters["leaked"] == 0
        begin(cache, "in the way", 3, 3)
        cache.swap_in("a", store)
        assert not store
        cache.free("in the way")
        assert_twins(cache, twin)
        least, table = min(cache.seq_len("a", i) for i in range(LAYERS)), cache.block_table("a")
        held = range(int((table < 0).sum()), len(table))
        assert fills(cache) == [min(max(least - i * B, 0), B) for i in held]
        for each in (cache, twin):
            for layer in range(LAYERS):
                each.append("a", layer, *rows(20 + layer, 7))
        assert_twins(cache, twin)
        cache.free("a")
        if "parent" in cache:
            cache.free("parent")
        assert cache.stats()["free"] == 24


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_stored_is_the_envelope_that_export_gives(lib: Lib, dtype: str) -> None:
    with make(lib, dtype=dtype) as cache:
        begin(cache, "a", 14, 14)
        envelope, store = cache.export_seq("a"), dict[str, bytes]()
        cache.swap_out("a", store)
        assert set(store) == {"str-a/head", "str-a/0"}
        entry = store["str-a/0"]
        front = struct.pack("<4sIIIQ", b"TLKS", 1, 7, 0, len(envelope)) + b"str-a/0"
        assert entry[:-4] == front + envelope
        assert entry[-4:] == struct.pack("<I", lib.tl_crc32c(entry[:-4], len(entry) - 4, 0))
        body = store["str-a/head"][24 + len("str-a/head") : -4]
        assert body[:28] == envelope[:28]
        assert struct.unpack("<QQqqI", body[28:]) == (
            0,
            1,
            14,
            14,
            *struct.unpack("<I", envelope[-4:]),
        )


def test_nothing_of_another_sequence_is_stored(lib: Lib) -> None:
    for shape in ("a fork that was cut", "layers apart", "a layer without any", "one position"):
        with make(lib) as cache:
            SHAPES[shape](cache)
            lengths, store = [cache.seq_len("a", i) for i in range(LAYERS)], dict[str, bytes]()
            cache.swap_out("a", store)
            payload = LAYERS * 2 * HEADS * B * WIDTH * 2
            records = np.frombuffer(store["str-a/0"][24 + 7 + 28 : -8], np.uint8)
            blocks = records.reshape(-1, 12 + payload)[:, 12:].copy().view(np.float16)
            blocks = blocks.reshape(-1, LAYERS, 2, HEADS, B, WIDTH)
            for layer, length in enumerate(lengths):
                # [2, heads, positions, width], as they were appended
                held = np.moveaxis(blocks[:, layer], 0, 2).reshape(2, HEADS, -1, WIDTH)
                wanted = rows(10 + layer, 11 if "fork" in shape else max(length, 1))
                np.testing.assert_array_equal(
                    held[:, :, :length], wanted[:, :, :length].astype("e")
                )
                assert not held[:, :, length:].any()


def test_a_fork_that_was_cut_is_exported_as_long_as_it_is(lib: Lib) -> None:
    with make(lib) as cache:
        cut_fork(cache)
        cache.import_seq("b", cache.export_seq("a"))
        assert [cache.seq_len("b", i) for i in range(LAYERS)] == [6, 6]
        for layer in range(LAYERS):
            for mine, its in zip(cache.gather("a", layer), cache.gather("b", layer), strict=True):
                assert mine.tobytes() == its.tobytes()


# --- keys
# -------------------------------------------------------------------------------------------------


def test_the_key_follows_from_the_id_or_is_given(lib: Lib) -> None:
    ids = ["7", 7, b"7", "a/b", "a%2Fb", "a/head", "", "\udc80", "x" * 300, "x" * 301, -1, "ü", "."]
    with make(lib) as cache:
        store: dict[str, bytes] = {}
        for seq in ids:
            cache.add_seq(seq)
            cache.append(seq, 0, *rows(hash(seq) % 1000, 1))
        kept = {seq: cache.gather(seq, 0)[0].tobytes() for seq in ids}
        for seq in ids:
            cache.swap_out(seq, store)
        assert len(store) == 2 * len(ids)
        assert {"str-7/head", "int-7/head", "bytes-7/head", "int--1/head"} < set(store)
        for seq in ids:
            cache.swap_in(seq, store)
            assert cache.gather(seq, 0)[0].tobytes() == kept[seq]
        assert not store
        cache.add_seq((1, 2))
        with pytest.raises(TypeError, match=r"swap_out: sequence \(1, 2\) has no key of its own"):
            cache.swap_out((1, 2), store)
        for key, error in ((b"a", TypeError), (3, TypeError), ("", ValueError)):
            with pytest.raises(error, match="swap_out: key"):
                cache.swap_out((1, 2), store, key=key)  # type: ignore[arg-type]
        cache.swap_out((1, 2), store, key="pair")
        assert list(store) == ["pair/head"]
        cache.swap_in("another name", store, key="pair")
        assert cache.seq_len("another name") == 0


def test_no_sequence_of_a_store_is_overwritten_unless_said(lib: Lib) -> None:
    store: dict[str, bytes] = {}
    with make(lib) as one, make(lib) as two:
        begin(one, "a", 14, 14)
        begin(two, "a", 2, 2)
        one.swap_out("a", store)
        before = dict(store)
        with pytest.raises(ValueError, match="swap_out: the store holds 'str-a' already"):
            two.swap_out("a", store)
        assert "a" in two
        assert store == before
        two.swap_out("a", store, replace=True)
        one.swap_in("a", store)
        assert one.seq_len("a") == 2
        assert not store


def test_replacing_leaves_no_part_behind(lib: Lib, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(offload, "_PART_BYTES", 1)
    store: dict[str, bytes] = {}
    with make(lib) as cache:
        for n in (14, 2):
            begin(cache, "a", n, n)
            cache.swap_out("a", store, replace=True)
        assert set(store) == {"str-a/head", "str-a/0"}
        store["str-a/head"] = b"what nobody can read"
        begin(cache, "a", 9, 9)
        cache.swap_out("a", store, replace=True)
        cache.swap_in("a", store)
        assert cache.seq_len("a") == 9


def test_unknown_live_and_closed_are_refused(lib: Lib) -> None:
    with make(lib) as cache:
        with pytest.raises(KeyError, match="swap_out: no sequence 'a'"):
            cache.swap_out("a", {})
        with pytest.raises(KeyError, match="swap_in: the store holds no 'str-a'"):
            cache.swap_in("a", {})
        cache.add_seq("a")
        with pytest.raises(ValueError, match="swap_in: sequence 'a' is live already"):
            cache.swap_in("a", {})
        for call in (cache.swap_out, partial(cache.swap_in, key="b")):
            with pytest.raises(TypeError, match="store must be a mapping of str to bytes, not 3"):
                call("a" if call == cache.swap_out else "b", 3)  # type: ignore[operator]
    for call in (cache.swap_out, cache.swap_in):
        with pytest.raises(ClosedError):
            call("a", {})


# --- damage
# -------------------------------------------------------------------------------------------------


@pytest.fixture
def swapped(lib: Lib, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[PagedKVCache, Any]]:
    """A cache and a dict that has its sequence "a", of three blocks in as many parts."""
    monkeypatch.setattr(offload, "_PART_BYTES", 1)
    with make(lib) as cache:
        begin(cache, "a", 10, 10)
        store: dict[str, bytes] = {}
        cache.swap_out("a", store)
        yield cache, store


def assert_refused(
    cache: PagedKVCache, store: Any, error: Any = StoreError, said: str = "swap_in: "
) -> None:
    before, held = cache.snapshot(), dict(store)
    with pytest.raises(error, match=said):
        cache.swap_in("a", store)
    assert cache.snapshot() == before
    assert dict(store) == held


def test_a_bit_that_flipped_anywhere_is_found(swapped: tuple[PagedKVCache, Any]) -> None:
    cache, store = swapped
    for key, entry in list(store.items()):
        for i in range(len(entry)):
            damaged = bytearray(entry)
            damaged[i] ^= 1 << i % 8
            store[key] = bytes(damaged)
            assert_refused(cache, store)
        store[key] = entry
    cache.swap_in("a", store)


def test_what_is_cut_or_longer_or_no_bytes_is_refused(swapped: tuple[PagedKVCache, Any]) -> None:
    cache, store = swapped
    for key, entry in list(store.items()):
        wrong: list[Any] = [entry[:n] for n in range(len(entry))]
        wrong += [entry + b"\0", entry + entry, bytes(len(entry)), "text", 7]
        for bad in wrong:
            store[key] = bad
            assert_refused(cache, store)
        store[key] = entry
    for key, entry in list(store.items()):  # other kinds of bytes are as good
        store[key] = memoryview(bytearray(entry))
    cache.swap_in("a", store)


def test_parts_that_are_missing_or_in_one_anothers_place_are_refused(
    swapped: tuple[PagedKVCache, Any],
) -> None:
    cache, store = swapped
    sound = dict(store)
    for i in range(3):
        del store[f"str-a/{i}"]
        assert_refused(cache, store, said=f"'str-a/{i}', a part of 'str-a', is missing")
        store.update(sound)
    store["str-a/0"], store["str-a/1"] = store["str-a/1"], store["str-a/0"]
    assert_refused(cache, store, said="under 'str-a/0' the store has what belongs to b'str-a/1'")
    store.update(sound)
    begin(cache, "b", 10, 10)
    cache.swap_out("b", store)
    store["str-a/head"] = store["str-b/head"]
    assert_refused(cache, store, said="belongs to b'str-b/head'")
    store.update(sound)
    cache.swap_in("a", store)


@pytest.mark.parametrize("key", ["str-a/head", "str-a/1"])
def test_entries_of_two_moments_are_refused(swapped: tuple[PagedKVCache, Any], key: str) -> None:
    cache, store = swapped
    earlier = dict(store)
    cache.swap_in("a", store)
    cache.truncate("a", 0)
    for layer in range(LAYERS):
        cache.append("a", layer, *rows(99, 10))
    cache.swap_out("a", store)
    store[key] = earlier[key]
    assert_refused(cache, store, said="is of another moment than 'str-a'")


def test_a_sequence_of_another_cache_is_refused(lib: Lib) -> None:
    with make(lib) as cache:
        for other, said in (
            (make(lib, dtype="int8"), "'str-a' is int8, and the cache float16"),
            (make(lib, dtype="bfloat16"), "'str-a' is bfloat16, and the cache float16"),
            (make(lib, block_size=8), "block_size = 8, and the cache 4"),
            (make(lib, n_layers=1), "n_layers = 1, and the cache 2"),
            (make(lib, n_kv_heads=1), "n_kv_heads = 1, and the cache 2"),
            (make(lib, d_head=5), "d_head = 5, and the cache 3"),
        ):
            store: dict[str, bytes] = {}
            with other:
                other.add_seq("a")
                other.swap_out("a", store)
            assert_refused(cache, store, ValueError, said)


def sealed(lib: Lib, key: str, body: bytes) -> bytes:
    """An entry as the page of the format says, with a right checksum."""
    entry = struct.pack("<4sIIIQ", b"TLKS", 1, len(key), 0, len(body)) + key.encode() + body
    return entry + struct.pack("<I", lib.tl_crc32c(entry, len(entry), 0))


@pytest.mark.parametrize(
    ("gone", "n_parts", "lengths"),
    [
        (0, 3, (11, 13)), (0, 3, (-1, 10)), (1, 3, (10, 10)), (2, 3, (18, 5)),
        (1 << 63, 3, (10, 10)),
        (0, 2, (10, 10)), (0, 1 << 62, (10, 10)), (0, 3, (1 << 40, 10)), (0, 3, (2, 2)),
    ],
)  # fmt: skip
def test_a_head_of_no_sequence_is_refused(
    swapped: tuple[PagedKVCache, Any], gone: int, n_parts: int, lengths: tuple[int, int]
) -> None:
    cache, store = swapped
    body = bytearray(store["str-a/head"][24 + len("str-a/head") : -4])
    struct.pack_into("<QQqq", body, 28, gone, n_parts, *lengths)
    store["str-a/head"] = sealed(cache.lib, "str-a/head", bytes(body))
    assert_refused(cache, store, said="'str-a' is no sequence")


def test_a_sound_entry_with_an_unsound_part_is_refused(swapped: tuple[PagedKVCache, Any]) -> None:
    """Who seals bytes of his own gets no further than the checks of the pool."""
    cache, store = swapped
    body = bytearray(store["str-a/1"][24 + 7 : -4])
    body[50] ^= 1  # in K and V, of which the envelope has a checksum of its own
    store["str-a/1"] = sealed(cache.lib, "str-a/1", bytes(body))
    assert_refused(cache, store, said="swap_in: 'str-a': .*checksum")


def test_where_blocks_are_missing_the_store_keeps_the_sequence(
    swapped: tuple[PagedKVCache, Any],
) -> None:
    cache, store = swapped
    held = dict(store)
    begin(cache, "b", 80, 80)
    cache.append("b", 0, *rows(3, 8))
    failures = cache.snapshot().failed_allocations
    with pytest.raises(OutOfBlocks, match="swap_in: sequence 'a' needs 3 blocks; 2 are free and 0"):
        cache.swap_in("a", store)
    assert store == held
    assert cache.snapshot().failed_allocations == failures + 1
    assert cache.stats()["used"] == 22
    cache.truncate("b", 80)
    cache.truncate("b", 76)
    cache.swap_in("a", store)
    assert cache.seq_len("a") == 10


# --- stores that fail
# -------------------------------------------------------------------------------------------------


class Failing(dict[str, Any]):
    """Its n-th call raises, before or after it has done what it was asked for; later ones too where
    it is ``broken``."""

    def __init__(self, n: int, after: bool, broken: bool, error: type[BaseException]) -> None:
        self.left, self.after, self.broken, self.error = n, after, broken, error

    def call(self, do: Callable[..., Any], *args: Any) -> Any:
        self.left -= 1
        fails = self.left < 0 if self.broken else self.left == -1
        if fails and not self.after:
            raise self.error("no")
        try:
            return do(*args)
        finally:
            if fails:
                raise self.error("no")

    def __getitem__(self, key: str) -> Any:
        return self.call(super().__getitem__, key)

    def __setitem__(self, key: str, value: Any) -> None:
        self.call(super().__setitem__, key, value)

    def __delitem__(self, key: str) -> None:
        self.call(super().__delitem__, key)


def whole_somewhere(cache: PagedKVCache, store: dict[str, Any], wanted: bytes) -> None:
    """Sequence "a" is in the cache, or can be had from the store; and a store that has its head has
    all of it."""
    assert cache.snapshot().counters["leaked"] == 0
    if dict.__contains__(store, "str-a/head"):
        cache.swap_in("again", dict.copy(store), key="str-a")
        assert bytes(cache.export_seq("again")) == wanted
        cache.free("again")
    if "a" not in cache:
        cache.swap_in("a", dict.copy(store))
    assert bytes(cache.export_seq("a")) == wanted


@pytest.mark.parametrize("error", [OSError, StoreError, ValueError, KeyboardInterrupt])
@pytest.mark.parametrize(
    ("after", "broken"), [(False, False), (False, True), (True, False), (True, True)]
)
@pytest.mark.parametrize("way", ["out", "in"])
def test_a_store_that_raises_at_any_call_loses_nothing(
    lib: Lib, monkeypatch: pytest.MonkeyPatch, way: str, after: bool, broken: bool, error: Any
) -> None:
    monkeypatch.setattr(offload, "_PART_BYTES", 1)
    with make(lib) as cache:
        begin(cache, "a", 10, 10)
        wanted = bytes(cache.export_seq("a"))
        for n in itertools.count():
            store = Failing(n, after, broken, error)
            if way == "in":
                kept: dict[str, bytes] = {}
                cache.swap_out("a", kept)
                dict.update(store, kept)
            before, raised = cache.snapshot(), None
            swap = cache.swap_out if way == "out" else cache.swap_in
            with warnings.catch_warnings(record=True) as warned:
                warnings.simplefilter("always")
                try:
                    swap("a", store)
                except (StoreError, KeyboardInterrupt) as stopped:
                    raised = type(stopped)
            if store.left >= 0:
                break  # there was no such call
            if raised:
                assert raised is (KeyboardInterrupt if error is KeyboardInterrupt else StoreError)
            if way == "out":
                assert raised
                assert cache.snapshot() == before
                assert broken or not store
            elif raised is StoreError:
                assert cache.snapshot() == before
            elif not raised:
                assert re.search("remove .*; the sequence is live", str(warned[0].message))
            whole_somewhere(cache, store, wanted)
        assert n > 5


class Careless(dict[str, bytes]):
    """Keeps something other than it was given."""

    def __init__(self, kept: Callable[[bytes], Any]) -> None:
        self.kept = kept

    def __setitem__(self, key: str, value: bytes) -> None:
        kept = self.kept(value)
        if kept is not None:
            super().__setitem__(key, kept)


@pytest.mark.parametrize(
    "kept",
    [
        lambda entry: None,
        lambda entry: entry[:-1],
        lambda entry: entry[:50] + bytes([entry[50] ^ 1]) + entry[51:],
        lambda entry: entry + b"\0",
        lambda entry: "text",
    ],
    ids=["nothing", "less", "a bit less", "more", "no bytes"],
)
def test_nothing_is_freed_before_the_store_has_all_of_it(lib: Lib, kept: Any) -> None:
    with make(lib) as cache:
        begin(cache, "a", 10, 10)
        before, store = cache.snapshot(), Careless(kept)
        with pytest.raises(StoreError, match="swap_out: the store"):
            cache.swap_out("a", store)
        assert cache.snapshot() == before
        assert not store


def test_a_full_store_keeps_what_it_had(lib: Lib) -> None:
    with make(lib) as cache:
        begin(cache, "a", 14, 14)
        begin(cache, "b", 10, 10)
        store = MemoryStore("1.5kB")
        cache.swap_out("a", store)
        assert 0 < store.nbytes <= 1500
        held = dict(store)
        with pytest.raises(StoreError, match=r"limit of 1.46 KiB"):
            cache.swap_out("b", store)
        assert dict(store) == held
        assert "b" in cache
        for key in held:  # in place of its own an entry has room
            store[key] = bytes(len(held[key]))
        store["one"] = bytes(1500 - store.nbytes)
        with pytest.raises(StoreError):
            store["two"] = b"1"
        with pytest.raises(StoreError):
            store["one"] += b"1"
        store["one"] = b""
        store["two"] = bytes(1500 - store.nbytes)
        for key in held:
            del store[key]
        store["one"] = bytes(1500 - store.nbytes)
        assert store.nbytes == 1500
        with pytest.raises(ValueError, match="MemoryStore: limit"):
            MemoryStore("much")


def test_entries_are_kept_where_asked(swapped: tuple[PagedKVCache, Any]) -> None:
    cache, store = swapped
    held = dict(store)
    cache.swap_in("a", store, keep=True)
    assert store == held
    cache.swap_in("b", store, key="str-a")
    assert not store
    assert cache.export_seq("a") == cache.export_seq("b")


# --- progress, others meanwhile
# -------------------------------------------------------------------------------------------------


def test_progress_rises_from_nothing_to_all(lib: Lib, monkeypatch: pytest.MonkeyPatch) -> None:
    block = LAYERS * 2 * HEADS * B * WIDTH * 2
    for part_blocks, steps in ((1, [0, 1, 2, 3, 4]), (3, [0, 3, 4]), (9, [0, 4])):
        monkeypatch.setattr(offload, "_PART_BYTES", part_blocks * block + 5)
        with make(lib) as cache:
            begin(cache, "a", 14, 14)
            store: dict[str, bytes] = {}
            for call in (cache.swap_out, cache.swap_in):
                told: list[tuple[int, int]] = []
                call("a", store, progress=lambda *done, told=told: told.append(done))
                assert told == [(n * block, 4 * block) for n in steps]


@pytest.mark.parametrize("when", range(4))
def test_what_progress_raises_ends_the_swap(
    lib: Lib, monkeypatch: pytest.MonkeyPatch, when: int
) -> None:
    monkeypatch.setattr(offload, "_PART_BYTES", 1)
    calls = iter(range(100))

    def stop(done: int, total: int) -> None:
        if next(calls) == when:
            raise RuntimeError("enough")

    with make(lib) as cache:
        begin(cache, "a", 10, 10)
        before, store = cache.snapshot(), dict[str, bytes]()
        with pytest.raises(RuntimeError, match="enough"):
            cache.swap_out("a", store, progress=stop)
        assert cache.snapshot() == before
        assert not store
        cache.swap_out("a", store)
        held, calls = dict(store), iter(range(100))
        with pytest.raises(RuntimeError, match="enough"):
            cache.swap_in("a", store, progress=stop)
        assert "a" not in cache
        assert store == held


@pytest.mark.parametrize("when", range(4))
def test_others_may_write_during_a_swap_but_not_the_sequence(
    lib: Lib, monkeypatch: pytest.MonkeyPatch, when: int
) -> None:
    monkeypatch.setattr(offload, "_PART_BYTES", 1)
    changes: dict[str, Callable[[PagedKVCache], object]] = {
        "append": lambda cache: cache.append("a", 0, *rows(1, 1)),
        "truncate": lambda cache: cache.truncate("a", 9),
        "front": lambda cache: cache.trim_front("a", 1),
        "free": lambda cache: cache.free("a"),
        "another": lambda cache: (cache.free("a"), cache.add_seq("a")),
        "others": lambda cache: (cache.append("b", 0, *rows(1, 3)), cache.fork("a", "c")),
    }
    for name, change in changes.items():
        with make(lib) as cache:
            begin(cache, "a", 10, 10)
            cache.fork("a", "b")
            store, calls = dict[str, bytes](), iter(range(100))
            wanted = cache.export_seq("a")

            def during(
                done: int, total: int, cache: Any = cache, change: Any = change, calls: Any = calls
            ) -> None:
                if next(calls) == when:
                    change(cache)

            if name == "others":
                cache.swap_out("a", store, progress=during)
                cache.swap_in("a", store)
                assert cache.export_seq("a") == wanted
                assert cache.export_seq("c") == wanted
            else:
                with pytest.raises(ConcurrentUseError, match="'a' was written meanwhile"):
                    cache.swap_out("a", store, progress=during)
                assert not store
            assert cache.snapshot().counters["leaked"] == 0


def test_a_swap_beside_a_reader_frees_nothing(lib: Lib) -> None:
    with make(lib) as cache:
        begin(cache, "a", 10, 10)
        before, store = cache.snapshot(), dict[str, bytes]()
        with cache._handle.read(), pytest.raises(ConcurrentUseError):
            cache.swap_out("a", store)
        assert cache.snapshot() == before
        assert not store


# --- interrupts
# -------------------------------------------------------------------------------------------------

OURS = os.path.dirname(tinyllm.__file__)


def interrupted(call: Callable[[], Any], place: int) -> bool:
    """Whether ``call`` was ended at the n-th place of the package's own code where Python looks for
    signals."""
    left = place

    def at_call(frame: Any, event: str, result: Any) -> None:
        nonlocal left
        ours = frame.f_code.co_filename.startswith(OURS)
        if ours and event in ("call", "return", "c_return"):
            left -= 1
            if left == 0:
                raise KeyboardInterrupt

    before = sys.getprofile()
    sys.setprofile(at_call)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.setprofile(before)
    return False


@pytest.mark.parametrize("way", ["out", "in"])
def test_an_interrupt_at_any_place_loses_nothing(
    lib: Lib, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    monkeypatch.setattr(offload, "_PART_BYTES", 400)
    wanted, places, outcomes = b"", itertools.count(1), set()
    for place in places:
        with make(lib) as cache:
            begin(cache, "a", 10, 10)
            wanted, store = bytes(cache.export_seq("a")), dict[str, bytes]()
            if way == "in":
                cache.swap_out("a", store)
            swap = cache.swap_out if way == "out" else cache.swap_in
            stopped = interrupted(partial(swap, "a", store), place)
            outcomes.add("a" in cache)
            whole_somewhere(cache, store, wanted)
            cache.free("a")
            assert cache.stats()["free"] == 24
            if not stopped:
                break
    assert place > 100
    assert outcomes == {False, True}


# --- files
# -------------------------------------------------------------------------------------------------


def stores_of(tmp_path: Path) -> dict[str, MutableMapping[str, bytes]]:
    return {
        "memory": MemoryStore(),
        "files": FileStore(tmp_path / "some" / "where"),
        "by path": open_store(tmp_path / "b"),
        "by url": open_store(f"file://{tmp_path}/with%20blank"),
    }


@pytest.mark.parametrize("kind", ["memory", "files", "by path", "by url", "fsspec memory", "local"])
def test_a_store_is_a_mapping_that_keeps_bytes(lib: Lib, tmp_path: Path, kind: str) -> None:
    if kind in ("fsspec memory", "local"):
        pytest.importorskip("fsspec")
        url = "memory://kv/deep" if "memory" in kind else f"local://{tmp_path}/deep/down"
        store: MutableMapping[str, bytes] = open_store(url)
        assert isinstance(store, stores.FsspecStore)
    else:
        store = stores_of(tmp_path)[kind]
    assert isinstance(store, stores.Store)
    assert list(store) == []
    keys = [
        "a/head",
        "a/0",
        ".",
        "..",
        "../up",
        ".hidden.part",
        "%41",
        "ü/é",
        "A",
        "a",
        "\n",
        "a.kv",
    ]
    for i, key in enumerate(keys):
        assert key not in store
        with pytest.raises(KeyError):
            store[key]
        with pytest.raises(KeyError):
            del store[key]
        store[key] = bytes([i])
    assert sorted(store) == sorted(keys)
    assert len(store) == len(keys)
    assert [store[key] for key in keys] == [bytes([i]) for i in range(len(keys))]
    store["a"] = b"another"
    assert store["a"] == b"another"
    assert 3 not in store
    with make(lib) as cache:
        begin(cache, "a", 14, 14)
        wanted = cache.export_seq("a")
        cache.swap_out("a", store)
        assert "str-a/head" in store
        cache.swap_in("a", store)
        assert cache.export_seq("a") == wanted
    for key in keys:
        del store[key]
    assert list(store) == []
    outside = {path.name for path in tmp_path.iterdir()}
    assert outside <= {"some", "b", "with blank", "deep"}


def test_a_file_is_on_the_disk_before_its_name_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, done = FileStore(tmp_path), []
    fsync, rename = os.fsync, os.replace

    def seen_fsync(file: int) -> None:
        done.append(("sync", Path(os.readlink(f"/proc/self/fd/{file}")).suffix))
        fsync(file)

    def seen_rename(old: Any, new: Any) -> None:
        done.append(("rename", Path(old).read_bytes()))
        rename(old, new)

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "replace", seen_rename)
    store["a"] = b"all of it"
    assert done == [("sync", ".part"), ("rename", b"all of it"), ("sync", "")]


def test_a_process_that_dies_while_writing_leaves_the_old_entry(tmp_path: Path) -> None:
    store = FileStore(tmp_path)
    store["a"] = b"old"
    child = os.fork()
    if child == 0:
        os.replace = lambda *_: os._exit(9)  # type: ignore[assignment]
        store["a"] = b"new"
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9
    (part,) = tmp_path.glob(".*")
    assert (store["a"], list(store), len(store)) == (b"old", ["a"], 1)
    assert list(FileStore(tmp_path)) == ["a"]
    assert part.exists()  # it may be another process's that is at work
    hours_ago = time.time() - 2 * 3600
    os.utime(part, (hours_ago, hours_ago))
    os.utime(tmp_path / "a.kv", (hours_ago, hours_ago))
    assert FileStore(tmp_path)["a"] == b"old"
    assert not part.exists()


def test_a_disk_that_is_full_is_a_store_error(
    lib: Lib, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with make(lib) as cache:
        begin(cache, "a", 10, 10)
        store = FileStore(tmp_path)
        monkeypatch.setattr(Path, "write_bytes", full)
        with pytest.raises(StoreError, match=r"cannot keep 'str-a/0': OSError: .*No space left"):
            cache.swap_out("a", store)
        assert "a" in cache
        assert list(tmp_path.iterdir()) == []


def test_a_process_takes_over_what_another_swapped_out(
    lib: Lib, tmp_path: Path, run_silently: Callable[..., str]
) -> None:
    with make(lib) as cache:
        begin(cache, "a", 10, 10)
        wanted = bytes(cache.export_seq("a"))
        cache.swap_out("a", FileStore(tmp_path))
    said = run_silently(
        f"""
from tinyllm import FileStore, PagedKVCache
with PagedKVCache(num_blocks=3, block_size=4, n_layers=2, n_kv_heads=2, d_head=3) as cache:
    cache.swap_in("a", FileStore({str(tmp_path)!r}))
    print(bytes(cache.export_seq("a")).hex())
"""
    )
    assert bytes.fromhex(said) == wanted
    assert list(tmp_path.iterdir()) == []


def test_urls_need_fsspec_and_directories_take_no_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(TypeError, match="open_store: a directory takes no options, and anon is"):
        open_store(tmp_path, anon=True)
    monkeypatch.setitem(sys.modules, "fsspec", None)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(ImportError, match=r"s3://bucket/x needs fsspec: pip install"):
        open_store("s3://bucket/x")


# --- single blocks
# -------------------------------------------------------------------------------------------------


def test_one_block_is_kept_with_what_belongs_to_it(lib: Lib) -> None:
    store: dict[str, bytes] = {}
    with make(lib) as cache, make(lib, dtype="int8") as other:
        begin(cache, "a", 8, 8)
        blocks, block = cache._blocks, int(cache.block_table("a")[1])
        offload.put_block("evict", blocks, block, store, "block-1", b"its tokens")
        assert list(store) == ["block-1"]
        found = offload.get_block("revive", blocks, store, "block-1")
        assert found is not None
        envelope, extra = found
        assert extra == b"its tokens"
        wanted = cache.export_seq("a")
        record = (len(wanted) - 32) // 2
        assert envelope[28:-4].tobytes() == wanted[28 + record : -4]
        with cache._handle.write(), cache._handle.turn:
            (fresh,) = blocks.load_all([envelope], 1).tolist()
            assert blocks.slab(fresh, 1, 1).tobytes() == blocks.slab(block, 1, 1).tobytes()
            blocks.give_back()
        assert offload.get_block("revive", blocks, store, "block-2") is None
        with pytest.raises(StoreError, match="revive: 'block-1' is not 1 block of a cache like"):
            offload.get_block("revive", other._blocks, store, "block-1")
        entry = store["block-1"]
        for i in range(len(entry)):
            store["block-1"] = entry[:i] + bytes([entry[i] ^ 16]) + entry[i + 1 :]
            with pytest.raises(StoreError, match="revive: "):
                offload.get_block("revive", blocks, store, "block-1")
