# SPDX-License-Identifier: MIT
"""Snapshot: its counters are those of an independent account of every block, leaks show, and a file
gives back what was saved or says what is wrong with it."""

from __future__ import annotations

import copy
import json
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tinyllm import ClosedError, OutOfBlocks, PagedKVCache
from tinyllm.ffi.libtinyllm import Lib, u32_ptr
from tinyllm.observe.pool.metrics import prometheus
from tinyllm.observe.pool.picture import Picture
from tinyllm.observe.pool.snapshot import Snapshot

B, BLOCKS, LAYERS = 4, 12, 2


def rows(n_tokens: int, n_heads: int = 1, width: int = 2) -> Any:
    return np.ones((n_heads, n_tokens, width), np.float32)


@pytest.fixture
def cache(lib: Lib) -> Iterator[PagedKVCache]:
    """12 blocks of 4 positions, two layers."""
    with PagedKVCache(lib, BLOCKS, B, LAYERS, 1, 2) as c:
        yield c


def append(cache: PagedKVCache, seq: Any, n_tokens: int) -> None:
    for layer in range(cache.n_layers):
        cache.append(seq, layer, rows(n_tokens), rows(n_tokens))


# --- counters against an account of every block ---------------------------------------------------


class Block:
    """A block of the account: who has it is counted on demand, what it holds is kept."""

    def __init__(self) -> None:
        self.fill = 0


class Account:
    """Sequences as lists of Block objects (None: given up), as PagedKVCache's docstrings say."""

    def __init__(self) -> None:
        self.tables: dict[int, list[Block | None]] = {}
        self.lengths: dict[int, list[int]] = {}
        self.copies = self.failures = self.high_water = 0

    def holders(self) -> dict[Block, int]:
        count: dict[Block, int] = {}
        for table in self.tables.values():
            for block in table:
                if block is not None:
                    count[block] = count.get(block, 0) + 1
        return count

    def add(self, seq: int) -> None:
        self.tables[seq], self.lengths[seq] = [], [0] * LAYERS

    def fork(self, parent: int, child: int) -> None:
        self.tables[child], self.lengths[child] = (
            list(self.tables[parent]),
            list(self.lengths[parent]),
        )

    def free(self, seq: int) -> None:
        del self.tables[seq], self.lengths[seq]

    def append(self, seq: int, layer: int, n: int) -> bool:
        held, table, lengths = self.holders(), self.tables[seq], self.lengths[seq]
        begin, end = lengths[layer], lengths[layer] + n
        touched = range(begin // B, (end - 1) // B + 1)
        shared = [i for i in touched if i < len(table) and held[self._at(table, i)] > 1]
        fresh = sum(i >= len(table) for i in touched)
        if len(held) + len(shared) + fresh > BLOCKS:
            self.failures += 1
            return False
        self.high_water = max(self.high_water, len(held) + len(shared) + fresh)
        self.copies += len(shared)
        for i in shared:
            table[i] = Block()
        table += [Block() for _ in range(fresh)]
        lengths[layer] = end
        for i in touched:
            self._at(table, i).fill = min(max(min(lengths) - i * B, 0), B)
        return True

    def truncate(self, seq: int, length: int) -> None:
        keep = -(-length // B)
        self.tables[seq] = self.tables[seq][:keep]
        self.lengths[seq] = [min(n, length) for n in self.lengths[seq]]
        last = self.tables[seq][-1] if length % B else None
        if last is not None and self.holders()[last] == 1:
            last.fill = min(max(min(self.lengths[seq]) - (keep - 1) * B, 0), B)

    def trim(self, seq: int, window: int) -> None:
        for i in range(max(0, min(self.lengths[seq]) - window) // B):
            self.tables[seq][i] = None

    @staticmethod
    def _at(table: list[Block | None], i: int) -> Block:
        block = table[i]
        assert block is not None
        return block


_STEPS = st.lists(
    st.tuples(
        st.sampled_from(("add", "append", "append", "append", "fork", "free", "truncate", "trim")),
        st.integers(0, 99),
        st.integers(1, 9),
        st.integers(0, LAYERS - 1),
    ),
    max_size=60,
)


def play(cache: PagedKVCache, account: Account, steps: list[tuple[str, int, int, int]]) -> None:
    """The same steps on both."""
    for i, (what, pick, n, layer) in enumerate(steps):
        live = list(account.tables)
        if what == "add" or not live:
            cache.add_seq(i)
            account.add(i)
            continue
        seq = live[pick % len(live)]
        if what == "append":
            try:
                cache.append(seq, layer, rows(n), rows(n))
                fits = True
            except OutOfBlocks:
                fits = False
            assert account.append(seq, layer, n) == fits
        elif what == "fork":
            cache.fork(seq, i)
            account.fork(seq, i)
        elif what == "free":
            cache.free(seq)
            account.free(seq)
        elif what == "truncate":
            gone = sum(block is None for block in account.tables[seq])
            length = min(max(n * 2, gone * B), max(account.lengths[seq]))
            cache.truncate(seq, length)
            account.truncate(seq, length)
        else:
            cache.trim_front(seq, n)
            account.trim(seq, n)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(_STEPS)
def test_counters_equal_an_account_of_every_block(
    lib: Lib, steps: list[tuple[str, int, int, int]]
) -> None:
    account = Account()
    with PagedKVCache(lib, BLOCKS, B, LAYERS, 1, 2) as cache:
        play(cache, account, steps)
        seen = cache.snapshot()
    held = account.holders()
    tokens = sum(block.fill for block in held)
    assert seen.counters == {
        "blocks_total": BLOCKS,
        "blocks_used": len(held),
        "blocks_cached": 0,
        "blocks_free": BLOCKS - len(held),
        "blocks_shared": sum(n > 1 for n in held.values()),
        "blocks_saved": sum(n - 1 for n in held.values()),
        "blocks_high_water": account.high_water,
        "bytes": BLOCKS * LAYERS * 2 * B * 1 * 2 * 2,
        "slots": BLOCKS * B,
        "tokens": tokens,
        "tail_waste": len(held) * B - tokens,
        "sequences": len(account.tables),
        "leaked": 0,
        "dangling": 0,
        "copies_on_write": account.copies,
        "evictions": 0,
        "failed_allocations": account.failures,
        "unrepresentable": 0,
        "blocks_pinned": 0,
        "prefix_queries": 0,
        "prefix_tokens_asked": 0,
        "prefix_tokens_found": 0,
    }
    assert [s.name for s in seen.sequences] == [repr(seq) for seq in account.tables]
    for sequence, table, lengths in zip(
        seen.sequences, account.tables.values(), account.lengths.values(), strict=True
    ):
        assert list(sequence.lengths) == lengths
        assert [block < 0 for block in sequence.table.tolist()] == [
            block is None for block in table
        ]
        by_id = {int(row["id"]): row for row in seen.blocks}
        for block_id, block in zip(sequence.table.tolist(), table, strict=True):
            if block is not None:
                assert (by_id[block_id]["fill"], by_id[block_id]["refs"]) == (
                    block.fill,
                    held[block],
                )


def test_a_block_of_the_prefix_index_is_cached_then_evicted(cache: PagedKVCache) -> None:
    cache.add_seq("a")
    append(cache, "a", 2 * B)
    first, _ = cache.block_table("a").tolist()
    cache.lib.tl_kv_register(cache.pool, first, 0xFEED)
    cache.free("a")
    seen = cache.snapshot()
    assert seen.blocks.tolist() == [(first, 0xFEED, 0, B)]
    assert (seen.counters["blocks_cached"], seen.counters["blocks_free"]) == (1, BLOCKS - 1)
    assert (seen.counters["blocks_used"], seen.counters["tokens"]) == (0, 0)
    cache.add_seq("b")
    append(cache, "b", BLOCKS * B)
    assert (cache.snapshot().counters["evictions"], cache.snapshot().counters["blocks_cached"]) == (
        1,
        0,
    )


def test_runs_count_the_pieces_of_a_table(cache: PagedKVCache) -> None:
    cache.add_seq("a")
    assert cache.snapshot().sequences[0].runs == 0
    append(cache, "a", 2 * B)
    cache.add_seq("b")
    append(cache, "b", 1)
    append(cache, "a", 1)
    assert [s.runs for s in cache.snapshot().sequences] == [2, 1]


def test_the_high_water_mark_is_that_of_moments_nobody_looked_at(cache: PagedKVCache) -> None:
    cache.add_seq("a")
    append(cache, "a", 5 * B)
    cache.free("a")
    counters = cache.snapshot().counters
    assert (counters["blocks_used"], counters["blocks_high_water"]) == (0, 5)


def test_blocks_that_a_failing_append_looked_for_are_no_high_water(lib: Lib) -> None:
    """One block is left for the new positions, and none for the copy of the shared one."""
    with PagedKVCache(lib, 4, 4, 1, 1, 2) as cache:
        cache.add_seq("a")
        cache.append("a", 0, *np.ones((2, 1, 10, 2), np.float16))
        cache.fork("a", "b")
        with pytest.raises(OutOfBlocks):
            cache.append("b", 0, *np.ones((2, 1, 3, 2), np.float16))
        assert cache.snapshot().counters["blocks_high_water"] == 3
        cache.append("b", 0, *np.ones((2, 1, 1, 2), np.float16))
        assert cache.snapshot().counters["blocks_high_water"] == 4


def test_names_are_strings_as_they_are_and_repr_of_the_rest(cache: PagedKVCache) -> None:
    for seq_id in ("chat 1", 7, ("user", 3), "\x1b[31m"):
        cache.add_seq(seq_id)
    assert [s.name for s in cache.snapshot().sequences] == [
        "chat 1",
        "7",
        "('user', 3)",
        "\x1b[31m",
    ]


# --- references without an owner ------------------------------------------------------------------


def test_references_taken_past_the_cache_are_leaked_and_nothing_breaks(cache: PagedKVCache) -> None:
    cache.add_seq("a")
    append(cache, "a", B)
    (block,) = cache.block_table("a").tolist()
    cache.lib.tl_kv_ref(cache.pool, block)
    taken = np.empty(2, np.uint32)
    cache.lib.tl_kv_alloc(cache.pool, 2, u32_ptr(taken))
    seen = cache.snapshot()
    assert (seen.counters["leaked"], seen.counters["dangling"]) == (3, 0)
    assert seen.blocks["id"][seen.unowned > 0].tolist() == sorted([block, *taken.tolist()])
    assert seen.counters["blocks_high_water"] == 3


def test_a_reference_given_back_behind_the_caches_back_is_dangling(cache: PagedKVCache) -> None:
    cache.add_seq("a")
    append(cache, "a", 2 * B)
    block = int(cache.block_table("a")[1])
    cache.lib.tl_kv_unref(cache.pool, block)
    seen = cache.snapshot()
    assert (seen.counters["leaked"], seen.counters["dangling"]) == (0, 1)
    assert seen.blocks["id"][seen.unowned < 0].tolist() == [block]
    cache.lib.tl_kv_alloc(cache.pool, 1, u32_ptr(np.empty(1, np.uint32)))


def test_a_failed_append_counts_and_a_failed_check_does_not(cache: PagedKVCache) -> None:
    cache.add_seq("a")
    with pytest.raises(OutOfBlocks):
        cache.append("a", 0, rows(BLOCKS * B + 1), rows(BLOCKS * B + 1))
    with pytest.raises(ValueError, match="layer"):
        cache.append("a", LAYERS, rows(1), rows(1))
    counters = cache.snapshot().counters
    assert (counters["failed_allocations"], counters["blocks_high_water"]) == (1, 0)


def test_a_closed_cache_has_no_snapshot(lib: Lib, tmp_path: Path) -> None:
    cache = PagedKVCache(lib, 2, 4, 1, 1, 2)
    cache.close()
    with pytest.raises(ClosedError):
        cache.snapshot(tmp_path / "x.json")
    assert list(tmp_path.iterdir()) == []


# --- the file -------------------------------------------------------------------------------------


@pytest.fixture
def busy(cache: PagedKVCache) -> PagedKVCache:
    """Blocks shared, cut at the front, registered, taken past the cache; a layer that lags."""
    cache.add_seq("a")
    append(cache, "a", 3 * B + 1)
    cache.fork("a", ("b", 2))
    append(cache, ("b", 2), 2)
    cache.trim_front("a", B)
    cache.append("a", 1, rows(1), rows(1))
    cache.lib.tl_kv_register(cache.pool, int(cache.block_table(("b", 2))[0]), 2**64 - 1)
    cache.lib.tl_kv_alloc(cache.pool, 1, u32_ptr(np.empty(1, np.uint32)))
    cache.add_seq("\ud800 <&> \x00")
    return cache


def test_a_file_gives_back_the_snapshot(busy: PagedKVCache, tmp_path: Path) -> None:
    taken = busy.snapshot(tmp_path / "cache.json")
    read = Snapshot.load(tmp_path / "cache.json")
    assert read == taken
    assert read.counters == taken.counters
    assert [p.name for p in tmp_path.iterdir()] == ["cache.json"]
    busy.free("a")
    assert busy.snapshot(tmp_path / "cache.json") != taken
    assert Snapshot.load(tmp_path / "cache.json") == busy.snapshot()


def test_every_field_takes_part_in_equality(busy: PagedKVCache, tmp_path: Path) -> None:
    document = saved(busy, tmp_path)
    for change in (
        lambda d: d["pool"].update(block_bytes=1),
        lambda d: d["counts"].update(evictions=99),
        lambda d: d["blocks"]["fill"].__setitem__(0, 0),
        lambda d: d["hashes"].clear(),
        lambda d: d["sequences"][0].update(name="other"),
        lambda d: d["sequences"].pop(),
    ):
        other = copy.deepcopy(document)
        change(other)
        (tmp_path / "other.json").write_text(json.dumps(other))
        assert Snapshot.load(tmp_path / "other.json") != busy.snapshot()
    assert busy.snapshot() != 3


def test_what_a_snapshot_holds_cannot_be_written(busy: PagedKVCache) -> None:
    taken = busy.snapshot()
    with pytest.raises(ValueError, match="read-only"):
        taken.blocks["refs"] = 0
    with pytest.raises(ValueError, match="read-only"):
        taken.sequences[0].table[0] = 0
    with pytest.raises(AttributeError):
        taken.evictions = 3  # type: ignore[misc]


def test_a_write_that_fails_leaves_the_old_file_and_nothing_else(
    busy: PagedKVCache, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cache.json"
    taken = busy.snapshot(path)
    busy.free("a")

    def fails(_: int) -> None:
        raise OSError("no space left")

    monkeypatch.setattr("os.fsync", fails)
    with pytest.raises(OSError, match="no space"):
        busy.snapshot(path)
    assert Snapshot.load(path) == taken
    assert [p.name for p in tmp_path.iterdir()] == ["cache.json"]
    with pytest.raises(OSError):
        busy.snapshot(tmp_path / "no" / "such" / "folder.json")


def saved(cache: PagedKVCache, tmp_path: Path) -> Any:
    cache.snapshot(tmp_path / "cache.json")
    return json.loads((tmp_path / "cache.json").read_text())


def test_every_beginning_of_a_file_is_refused(busy: PagedKVCache, tmp_path: Path) -> None:
    busy.snapshot(tmp_path / "cache.json")
    whole = (tmp_path / "cache.json").read_bytes().rstrip()
    for n in range(0, len(whole), 7):
        (tmp_path / "cut.json").write_bytes(whole[:n])
        with pytest.raises(ValueError, match=r"cut\.json: no snapshot .* cut off"):
            Snapshot.load(tmp_path / "cut.json")


@pytest.mark.parametrize(
    "raw", [b"\x00\xff\xfe", b"\x89PNG\r\n", b"[" * 100_000, b"9" * 5000, b'"', b"TLKV" + bytes(24)]
)
def test_garbage_is_refused(tmp_path: Path, raw: bytes) -> None:
    (tmp_path / "x.json").write_bytes(raw)
    with pytest.raises(ValueError, match=r"x\.json: no snapshot"):
        Snapshot.load(tmp_path / "x.json")


@pytest.mark.parametrize(
    "raw", ["null", "[]", "3", "{}", '{"format": 3}', '{"format": "safetensors"}']
)
def test_other_json_is_refused(tmp_path: Path, raw: str) -> None:
    (tmp_path / "x.json").write_text(raw)
    with pytest.raises(ValueError, match=r"x\.json: no snapshot"):
        Snapshot.load(tmp_path / "x.json")


BAD: dict[str, tuple[Callable[[Any], Any], str]] = {
    "version": (lambda d: d.update(version=2), "version 2, this package reads version 1"),
    "no pool": (lambda d: d.pop("pool"), "'pool' of the file is missing"),
    "pool is a list": (lambda d: d.update(pool=[]), "'pool' of the file is a list"),
    "no blocks in a pool": (lambda d: d["pool"].update(num_blocks=0), "'num_blocks' of pool = 0"),
    "too many blocks": (
        lambda d: d["pool"].update(num_blocks=2**31),
        "'num_blocks' of pool = 2147483648",
    ),
    "a size that is true": (
        lambda d: d["pool"].update(block_size=True),
        "'block_size' of pool is a bool",
    ),
    "a count below 0": (lambda d: d["counts"].update(evictions=-1), "'evictions' of counts = -1"),
    "columns differ": (lambda d: d["blocks"]["refs"].pop(), "differ in length"),
    "ids fall": (lambda d: d["blocks"]["id"].reverse(), "do not rise"),
    "an id twice": (lambda d: d["blocks"]["id"].__setitem__(1, 0), "do not rise"),
    "a block that is not there": (
        lambda d: d["blocks"]["id"].__setitem__(-1, 12),
        "'id' of blocks has 12",
    ),
    "a fill beyond the block": (
        lambda d: d["blocks"]["fill"].__setitem__(0, 5),
        "'fill' of blocks has 5",
    ),
    "half a reference": (
        lambda d: d["blocks"]["refs"].__setitem__(0, 0.5),
        "'refs' of blocks has 0.5",
    ),
    "a hash of nobody": (lambda d: d["hashes"].update({"77": "0" * 16}), "hashes has at '77'"),
    "a short hash": (lambda d: d["hashes"].update({"0": "12"}), "hashes has at '0'"),
    "a hash of words": (lambda d: d["hashes"].update({"0": "g" * 16}), "hashes has at '0'"),
    "a hash that is a number": (lambda d: d["hashes"].update({"0": 12}), "hashes has at '0'"),
    "a name that is none": (
        lambda d: d["sequences"][0].update(name=7),
        r"'name' of sequences\[0\] is a int",
    ),
    "a sequence that is none": (
        lambda d: d["sequences"].append(None),
        r"sequences\[3\] is no object",
    ),
    "lengths for another model": (
        lambda d: d["sequences"][0]["lengths"].pop(),
        "has 1 entries for 2 layers",
    ),
    "a table cut": (lambda d: d["sequences"][0]["table"].pop(), "has 3 entries for 14 positions"),
    "a hole": (lambda d: d["sequences"][1]["table"].__setitem__(1, -1), "names no block behind"),
    "an unlisted block": (lambda d: d["sequences"][1]["table"].__setitem__(1, 11), "does not list"),
    "an entry out of range": (
        lambda d: d["sequences"][1]["table"].__setitem__(1, 12),
        "'table' of",
    ),
}


@pytest.mark.parametrize("what", BAD)
def test_a_file_that_contradicts_itself_is_refused(
    busy: PagedKVCache, tmp_path: Path, what: str
) -> None:
    document = saved(busy, tmp_path)
    spoil, message = BAD[what]
    spoil(document)
    (tmp_path / "bad.json").write_text(json.dumps(document))
    with pytest.raises(ValueError, match=message):
        Snapshot.load(tmp_path / "bad.json")


@pytest.fixture
def written(busy: PagedKVCache, tmp_path: Path) -> str:
    """The text of a snapshot."""
    return json.dumps(saved(busy, tmp_path))


def _places(part: Any, where: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where every value of a JSON document stands."""
    yield where
    if isinstance(part, (dict, list)):
        for key, value in part.items() if isinstance(part, dict) else enumerate(part):
            yield from _places(value, (*where, key))


_VALUES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-2, 20),
    st.sampled_from((2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 10**30, 1.5, float("nan"))),
    st.text(max_size=5),
    st.lists(st.integers(-1, 12), max_size=4),
    st.dictionaries(st.text(max_size=2), st.integers(), max_size=2),
)


@settings(
    max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_whatever_stands_in_a_file_it_is_refused_or_can_be_drawn(
    written: str, tmp_path: Path, data: st.DataObject
) -> None:
    document = json.loads(written)
    for _ in range(data.draw(st.integers(1, 3))):
        where = data.draw(st.sampled_from([place for place in _places(document) if place]))
        parent = document
        for key in where[:-1]:
            parent = parent[key]
        parent[where[-1]] = data.draw(_VALUES)
    (tmp_path / "odd.json").write_text(json.dumps(document))
    try:
        read = Snapshot.load(tmp_path / "odd.json")
    except ValueError as error:
        refusal = str(error)
    else:
        refusal = ""
    if refusal:
        assert "odd.json: no snapshot" in refusal
        return
    ET.fromstring(Picture(read).svg())
    assert max(map(len, Picture(read).text(80, colour=False).splitlines())) <= 80
    assert prometheus(read).count("\n") == 3 * 23
    read.save(tmp_path / "again.json")
    assert Snapshot.load(tmp_path / "again.json") == read


def test_a_missing_file_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Snapshot.load(tmp_path / "none.json")
