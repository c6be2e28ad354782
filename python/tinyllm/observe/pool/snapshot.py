# SPDX-License-Identifier: MIT
"""Snapshot: what a KV cache looks like at one moment, without its K and V; and the file it is kept
in.

Words. holders: the entries of block tables that name a block. Each holder has one reference, so
references beyond the holders belong to no sequence of the cache (leaked, or taken through
``cache.pool``), and holders beyond the references read a block that may be given away (dangling).
"""

from __future__ import annotations

import json
import os
from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tinyllm._check import INT32_MAX, INT64_MAX, UINT32_MAX
from tinyllm._files import write_whole
from tinyllm._kv_format import FORMATS
from tinyllm.ffi.libtinyllm import KvBlock, Lib

__all__ = ["SequenceState", "Snapshot"]

FORMAT: Final = "tinyllm-kv-snapshot"
VERSION: Final = 1

BLOCK: Final = np.dtype(
    [("id", np.int64), ("hash", np.uint64), ("refs", np.uint32), ("fill", np.uint32)]
)
_AT_ONCE: Final = 1 << 16  # blocks asked for in one call

_SIZES: Final = {
    "num_blocks": INT32_MAX,
    "block_size": UINT32_MAX,
    "n_layers": UINT32_MAX,
    "n_kv_heads": UINT32_MAX,
    "d_head": UINT32_MAX,
    "block_bytes": INT64_MAX,
}
_COUNTS: Final = ("high_water", "copies_on_write", "evictions", "failed_allocations")
# which the first files of this version do not have
_LATER_COUNTS: Final = (
    "unrepresentable", "prefix_queries", "prefix_tokens_asked", "prefix_tokens_found",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class SequenceState:
    """One sequence. table: read-only int64 [n], block ids, -1 where ``trim_front`` gave a block up.
    lengths: positions each layer holds."""

    name: str
    table: NDArray[np.int64]
    lengths: tuple[int, ...]

    @property
    def gone(self) -> int:
        """Blocks given up at the front."""
        return int(np.count_nonzero(self.table < 0))

    @property
    def held(self) -> NDArray[np.int64]:
        """The blocks it holds, in order."""
        return self.table[self.gone :]

    @property
    def runs(self) -> int:
        """Pieces of the table in which each block is followed by the next of the pool."""
        held = self.held
        return int(np.count_nonzero(np.diff(held) != 1)) + 1 if len(held) else 0


@dataclass(frozen=True, eq=False)
class Snapshot:
    """A pool of blocks and the sequences over it, as they were when ``PagedKVCache.snapshot`` was
    called.

    blocks: read-only rows of (id, hash, refs, fill), ids rising: every block that is not free, and
    every one that a table names. hash 0: under no hash and not in the prefix index (which all have
    ``TL_KV_HASH_PREFIX``). pinned: the blocks that ``pin`` named, once for each reference of the
    index's own.
    high_water: the most blocks in use at once. copies_on_write: blocks copied before a write.
    failed_allocations: calls that raised OutOfBlocks. unrepresentable: values appended that dtype,
    what K and V are stored as, had nothing for. prefix_queries, prefix_tokens_asked,
    prefix_tokens_found: of sequences that began with tokens.

    Equal snapshots show the same in every field.

    >>> cache.snapshot("cache.json")
    >>> Snapshot.load("cache.json").counters["blocks_used"]
    """

    num_blocks: int
    block_size: int
    n_layers: int
    n_kv_heads: int
    d_head: int
    block_bytes: int
    blocks: NDArray[Any]
    sequences: tuple[SequenceState, ...]
    high_water: int = 0
    copies_on_write: int = 0
    evictions: int = 0
    failed_allocations: int = 0
    dtype: str = "float16"
    unrepresentable: int = 0
    prefix_queries: int = 0
    prefix_tokens_asked: int = 0
    prefix_tokens_found: int = 0
    pinned: tuple[int, ...] = ()

    @property
    def sizes(self) -> dict[str, int]:
        """The dimensions of the pool, and the bytes of a block."""
        return {name: getattr(self, name) for name in _SIZES}

    # --- what follows from it ---------------------------------------------------------------------

    @cached_property
    def rows(self) -> tuple[NDArray[np.int64], ...]:
        """For each sequence the rows of ``blocks`` that it holds, in the order of its table."""
        ids = self.blocks["id"].copy()  # side by side, to be searched in
        return tuple(np.searchsorted(ids, sequence.held) for sequence in self.sequences)

    @cached_property
    def holders(self) -> NDArray[np.int64]:
        """int64, one per row of ``blocks``: how many entries of tables name it."""
        count = np.zeros(len(self.blocks), np.int64)
        for rows in self.rows:
            np.add.at(count, rows, 1)
        return count

    @cached_property
    def unowned(self) -> NDArray[np.int64]:
        """int64, one per row of ``blocks``: references minus holders and pins; 0 is in order."""
        surplus = self.blocks["refs"].astype(np.int64) - self.holders
        np.subtract.at(surplus, np.searchsorted(self.blocks["id"], self.pinned), 1)
        return surplus

    @cached_property
    def counters(self) -> dict[str, int]:
        """Everything that can be counted.

        blocks_{total,used,cached,free}: in each state. blocks_shared: with more than one reference.
        blocks_saved: how many more would be in use without sharing. blocks_high_water: most in use
        at once.
        slots: positions the pool has room for. tokens: positions stored in blocks in use, by every
        layer.
        tail_waste: slots of blocks in use that hold no token. sequences: live ones.
        blocks_pinned: kept by ``pin``.
        leaked: references that no sequence holds. dangling: holders without a reference.
        bytes: of K and V of all blocks, scales included.
        copies_on_write, evictions, failed_allocations: how often, since the cache was made.
        unrepresentable: values, since then. prefix_queries, prefix_tokens_asked,
        prefix_tokens_found: sequences begun with tokens, and theirs, since then.
        """
        refs, fill = self.blocks["refs"], self.blocks["fill"]
        used = refs > 0
        n_used, n_cached = int(used.sum()), int(((refs == 0) & (self.blocks["hash"] != 0)).sum())
        tokens = int(fill[used].sum(dtype=np.int64))
        return {
            "blocks_total": self.num_blocks,
            "blocks_used": n_used,
            "blocks_cached": n_cached,
            "blocks_free": self.num_blocks - n_used - n_cached,
            "blocks_shared": int((refs > 1).sum()),
            "blocks_saved": int(refs[used].sum(dtype=np.int64)) - n_used,
            "blocks_high_water": self.high_water,
            "bytes": self.num_blocks * self.block_bytes,
            "slots": self.num_blocks * self.block_size,
            "tokens": tokens,
            "tail_waste": n_used * self.block_size - tokens,
            "sequences": len(self.sequences),
            "leaked": int(self.unowned.clip(min=0).sum()),
            "dangling": int((-self.unowned).clip(min=0).sum()),
            "copies_on_write": self.copies_on_write,
            "evictions": self.evictions,
            "failed_allocations": self.failed_allocations,
            "unrepresentable": self.unrepresentable,
            "blocks_pinned": len(set(self.pinned)),
            "prefix_queries": self.prefix_queries,
            "prefix_tokens_asked": self.prefix_tokens_asked,
            "prefix_tokens_found": self.prefix_tokens_found,
        }

    def __eq__(self, other: object) -> bool:
        return (
            self._document() == other._document() if isinstance(other, Snapshot) else NotImplemented
        )

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return (
            f"<Snapshot: {self.counters['blocks_used']} of {self.num_blocks} blocks used, "
            f"{len(self.sequences)} sequences>"
        )

    # --- the file ---------------------------------------------------------------------------------

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes a JSON file. Another file of that name is replaced, by the whole of this one or
        not at all.

        Raises: OSError; nothing is left behind then.
        """
        write_whole(path, json.dumps(self._document(), separators=(",", ":")) + "\n")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Snapshot:
        """Reads what ``save`` wrote.

        Raises: OSError; ValueError for anything else than a whole snapshot of this version, saying
        what is wrong with it.
        """
        with open(path, "rb") as file:
            raw = file.read()
        try:
            document = json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"{os.fspath(path)}: no snapshot of a KV cache, or one cut off: not JSON ({error})"
            ) from None
        try:
            return _snapshot(document)
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: no snapshot of a KV cache: {error}") from None

    def _document(self) -> dict[str, Any]:
        blocks = self.blocks
        registered = blocks[blocks["hash"] != 0]
        return {
            "format": FORMAT,
            "version": VERSION,
            "pool": {**self.sizes, "dtype": self.dtype},
            "counts": {name: getattr(self, name) for name in (*_COUNTS, *_LATER_COUNTS)},
            "blocks": {name: blocks[name].tolist() for name in ("id", "refs", "fill")},
            "pinned": list(self.pinned),
            "hashes": {str(block["id"]): f"{block['hash']:016x}" for block in registered},
            "sequences": [
                {"name": s.name, "lengths": list(s.lengths), "table": s.table.tolist()}
                for s in self.sequences
            ],
        }


# --- taking one -----------------------------------------------------------------------------------


def sequence_state(
    seq_id: Hashable, table: NDArray[Any], gone: int, lengths: Iterable[int]
) -> SequenceState:
    """A sequence of a cache: its name is ``seq_id`` where that is a string, else its repr."""
    ids = table.astype(np.int64)
    ids[:gone] = -1
    return SequenceState(
        seq_id if isinstance(seq_id, str) else repr(seq_id), _read_only(ids), tuple(lengths)
    )


def pool_blocks(
    lib: Lib, pool: int, num_blocks: int, sequences: Iterable[SequenceState]
) -> NDArray[Any]:
    """The rows of ``Snapshot.blocks``."""
    named = np.zeros(num_blocks, np.bool_)
    for sequence in sequences:
        named[sequence.held] = True
    pieces = []
    for first in range(0, num_blocks, _AT_ONCE):
        n = min(_AT_ONCE, num_blocks - first)
        raw: Any = (KvBlock * n)()
        lib.tl_kv_blocks_get(pool, first, n, raw)
        piece = np.frombuffer(raw, [("hash", np.uint64), ("refs", np.uint32), ("fill", np.uint32)])
        shown = (piece["refs"] > 0) | (piece["hash"] != 0) | named[first : first + n]
        rows = np.empty(int(shown.sum()), BLOCK)
        rows["id"] = np.flatnonzero(shown) + first
        for name in ("hash", "refs", "fill"):
            rows[name] = piece[name][shown]
        pieces.append(rows)
    return _read_only(np.concatenate(pieces))


def _read_only(a: NDArray[Any]) -> NDArray[Any]:
    a.flags.writeable = False
    return a


# --- reading one ----------------------------------------------------------------------------------


def _snapshot(document: Any) -> Snapshot:
    """What ``_document`` gave. Raises: ValueError."""
    if _part(document, "the file", "format", str) != FORMAT:
        raise ValueError(f"its format is {document['format']!r:.40}, not {FORMAT!r}")
    version = _part(document, "the file", "version", int)
    if version != VERSION:
        raise ValueError(f"it has version {version}, this package reads version {VERSION}")
    pool = _part(document, "the file", "pool", dict)
    sizes = {name: _integer(pool, "pool", name, 1, high) for name, high in _SIZES.items()}
    counts = _part(document, "the file", "counts", dict)
    named = (*_COUNTS, *(name for name in _LATER_COUNTS if name in counts))
    seen = {name: _integer(counts, "counts", name, 0, INT64_MAX) for name in named}
    dtype = _part({"dtype": "float16", **pool}, "pool", "dtype", str)
    if dtype not in FORMATS:
        raise ValueError(f"'dtype' of pool is {dtype!r:.40}, none of {', '.join(FORMATS)}")
    blocks = _blocks(document, sizes)
    late = {"pinned": [], **document}  # the first files of this version do not have it
    pinned = _integers(late, "the file", "pinned", 0, sizes["num_blocks"] - 1)
    told = _part(document, "the file", "sequences", list)
    sequences = tuple(_sequence(one, f"sequences[{i}]", sizes) for i, one in enumerate(told))
    if not np.isin(pinned, blocks["id"]).all():
        raise ValueError("pinned names a block that blocks does not list")
    snapshot = Snapshot(
        **sizes, **seen, dtype=dtype, blocks=blocks, sequences=sequences,
        pinned=tuple(pinned.tolist()),
    )  # fmt: skip
    for sequence, rows in zip(sequences, snapshot.rows, strict=True):
        listed = blocks["id"][rows[rows < len(blocks)]]
        if not np.array_equal(listed, sequence.held):
            raise ValueError(f"sequence {sequence.name!r} holds a block that blocks does not list")
    return snapshot


def _blocks(document: Any, sizes: dict[str, int]) -> NDArray[Any]:
    columns = _part(document, "the file", "blocks", dict)
    limits = {"id": sizes["num_blocks"] - 1, "refs": UINT32_MAX, "fill": sizes["block_size"]}
    read = {name: _integers(columns, "blocks", name, 0, high) for name, high in limits.items()}
    if len({len(column) for column in read.values()}) > 1:
        raise ValueError("the columns of blocks differ in length")
    if (np.diff(read["id"]) <= 0).any():
        raise ValueError("the ids of blocks do not rise")
    blocks = np.zeros(len(read["id"]), BLOCK)
    for name, column in read.items():
        blocks[name] = column
    hashes = _part(document, "the file", "hashes", dict)
    rows = {str(block): row for row, block in enumerate(read["id"].tolist())} if hashes else {}
    for name, value in hashes.items():
        try:
            (blocks["hash"][rows[name]],) = np.frombuffer(bytes.fromhex(value), ">u8")
        except (KeyError, TypeError, ValueError):
            raise ValueError(f"hashes has at {name!r:.40} no hash of a listed block") from None
    return _read_only(blocks)


def _sequence(row: Any, where: str, sizes: dict[str, int]) -> SequenceState:
    lengths = _integers(row, where, "lengths", 0, INT32_MAX)
    if len(lengths) != sizes["n_layers"]:
        raise ValueError(
            f"lengths of {where} has {len(lengths)} entries for {sizes['n_layers']} layers"
        )
    table = _integers(row, where, "table", -1, sizes["num_blocks"] - 1)
    if len(table) != -(-int(lengths.max()) // sizes["block_size"]):
        raise ValueError(
            f"table of {where} has {len(table)} entries for {int(lengths.max())} positions"
        )
    if (np.diff(table >= 0) & (table[1:] < 0)).any():
        raise ValueError(f"table of {where} names no block behind one that it names")
    name = _part(row, where, "name", str)
    return SequenceState(name, _read_only(table), tuple(lengths.tolist()))


def _part(parent: Any, where: str, name: str, kind: type) -> Any:
    if type(parent) is not dict:
        raise ValueError(f"{where} is no object")
    if type(parent.get(name)) is not kind:
        found = f"is a {type(parent[name]).__name__}" if name in parent else "is missing"
        raise ValueError(f"{name!r} of {where} {found}; a {kind.__name__} is due")
    return parent[name]


def _integer(parent: Any, where: str, name: str, low: int, high: int) -> int:
    value: int = _part(parent, where, name, int)
    if not low <= value <= high:
        raise ValueError(f"{name!r} of {where} = {value} is outside {low} .. {high}")
    return value


def _integers(parent: Any, where: str, name: str, low: int, high: int) -> NDArray[np.int64]:
    values = _part(parent, where, name, list)
    if values and (set(map(type, values)) != {int} or min(values) < low or max(values) > high):
        odd = next(value for value in values if type(value) is not int or not low <= value <= high)
        raise ValueError(f"{name!r} of {where} has {odd!r:.40}, no integer of {low} .. {high}")
    return np.array(values, np.int64)
