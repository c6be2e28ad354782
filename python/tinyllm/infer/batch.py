# SPDX-License-Identifier: MIT
"""What a cache holds of its sequences, and the tables of a batch of them that kernels read.

Words. step: the calls for one new token, or some, of each sequence of a batch: what is appended to
every layer, and the attention over it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from itertools import repeat
from operator import is_
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tinyllm._arrays import int32s, shape
from tinyllm.ffi.libtinyllm import Step, step_for_all, u32_ptr
from tinyllm.infer.blocks import NO_BLOCK, fill_of
from tinyllm.infer.prefixes import Text

if TYPE_CHECKING:
    from tinyllm.infer.paged import PagedKVCache

_LARGE = 1 << 20  # bytes: a table beyond them is not kept for batches that need a fraction


class Needs(NamedTuple):
    """What a step takes from the pool, and what there is. fresh: blocks that hold new positions
    only; copies: of blocks that others hold too, or that are registered; available: free blocks,
    and cached ones, which may be evicted."""

    fresh: int
    copies: int
    available: int

    @property
    def total(self) -> int:
        """How many blocks the step takes."""
        return self.fresh + self.copies


def starts_and_counts(
    fn: str, cu_seqlens: Any, n_batch: int, total: int
) -> tuple[NDArray[np.int32] | None, list[int]]:
    """Where the tokens of each sequence begin, and the number of all, None for one each; and how
    many each has. Raises TypeError, ValueError."""
    if cu_seqlens is None:
        if total != n_batch:
            raise ValueError(f"{fn}: k has {total} tokens for {n_batch} sequences")
        return None, [1] * n_batch
    starts = int32s(fn, "cu_seqlens", cu_seqlens)
    shape(fn, "cu_seqlens", starts, (n_batch + 1,), "[B+1]")
    counts = np.diff(starts.astype(np.int64)).tolist()
    if starts[0] != 0 or starts[-1] != total or min(counts, default=0) < 0:
        raise ValueError(
            f"{fn}: cu_seqlens must rise from 0 to the {total} tokens of k, not be {starts}"
        )
    return starts, counts


class CachedSequence:
    """A table, uint32, and the length of every layer. Both are replaced when they change and never
    written, so that any thread may look. text: what was said of its tokens, None for nothing."""

    __slots__ = ("gone", "lengths", "table", "text")

    def __init__(
        self,
        table: NDArray[np.uint32],
        lengths: list[int],
        gone: int = 0,
        text: Text | None = None,
    ) -> None:
        self.table, self.lengths, self.gone, self.text = table, lengths, gone, text

    def blocks(self) -> list[int]:
        """The blocks it holds, in order."""
        held: list[int] = self.table[self.gone :].tolist()
        return held


class Growth:
    """What an append makes of some sequences, each named once; nothing of it is so until its steps
    are taken (``all_at_once``).

    tables, ends: [B] tables with the blocks that it was given, and lengths of the layer. n_more,
    n_copies: how many blocks it has to be given: behind the last, and to copy those that are not
    their sequence's alone. completed: (place in the batch, before, after) of each sequence of which
    every layer then holds more positions, and how many that were and are. kept: blocks that others
    copy and their last holder then writes to.
    """

    __slots__ = (
        "_block_size", "_copies", "_layer", "_lengths", "_more", "_sequences", "completed", "ends",
        "kept", "n_more", "tables",
    )  # fmt: skip

    def __init__(
        self, sequences: list[CachedSequence], layer: int, counts: list[int], block_size: int
    ) -> None:
        """``counts``: how many positions of ``layer`` each gets."""
        self._sequences, self._layer, self._block_size = sequences, layer, block_size
        self._lengths: list[list[int]] = []
        self.ends: list[int] = []
        self.completed: list[tuple[int, int, int]] = []
        self._more: list[tuple[int, int]] = []  # places in the batch, and blocks
        self._copies: list[tuple[int, int]] = []  # places in the batch, and in the table
        self.n_more, self.kept = 0, set[int]()
        for i, (sequence, n) in enumerate(zip(sequences, counts, strict=True)):
            lengths = sequence.lengths.copy()
            begin = lengths[layer]
            lengths[layer] = end = begin + n
            self._lengths.append(lengths)
            self.ends.append(end)
            # Where another layer stands where this one did, or further back, it holds them back.
            if begin not in lengths and (complete := min(lengths)) > begin:
                self.completed.append((i, begin, complete))
            if end > len(sequence.table) * block_size:
                more = -(-end // block_size) - len(sequence.table)
                self._more.append((i, more))
                self.n_more += more

    @property
    def n_copies(self) -> int:
        return len(self._copies)

    def copy_what_is_shared(self, is_writable: Callable[[int, int], bool]) -> None:
        """Plans copies of the blocks that would be written and are not ``is_writable`` (a block;
        how many sequences of the batch have given it up before): of the holders of a block that
        all write to it the last one keeps it."""
        b, leaving = self._block_size, Counter[int]()
        self._copies, self.kept = [], set()
        for i, (sequence, end) in enumerate(zip(self._sequences, self.ends, strict=True)):
            begin = sequence.lengths[self._layer]
            written = range(begin // b, min(-(-end // b), len(sequence.table)))
            for place in written if end > begin else ():
                block = sequence.table.item(place)
                if not is_writable(block, leaving[block]):
                    leaving[block] += 1
                    self._copies.append((i, place))
                elif leaving[block]:
                    self.kept.add(block)

    def give(self, fresh: NDArray[np.uint32]) -> None:
        """n_copies + n_more blocks."""
        self.tables = tables = [sequence.table for sequence in self._sequences]
        at = len(self._copies)
        for i, more in self._more:
            tables[i] = np.concatenate((tables[i], fresh[at : at + more]))
            at += more
        for (i, place), block in zip(self._copies, fresh, strict=False):
            if tables[i] is self._sequences[i].table:
                tables[i] = tables[i].copy()
            tables[i][place] = block

    def copied(self) -> list[tuple[int, int]]:
        """Of each copy the block it is of, and the block it is."""
        return [
            (self._sequences[i].table.item(place), self.tables[i].item(place))
            for i, place in self._copies
        ]

    def fills_of_copies(self) -> list[tuple[int, int]]:
        """Each copy, and how many positions of it every layer then holds."""
        return [
            (self.tables[i].item(place), fill_of(min(self._lengths[i]), place, self._block_size))
            for i, place in self._copies
        ]

    def set_lengths(self) -> Step:
        return step_for_all(setattr, self._sequences, repeat("lengths"), self._lengths)

    def set_tables(self) -> Step:
        return step_for_all(setattr, self._sequences, repeat("table"), self.tables)


class BatchTable:
    """Copies of some block tables, one below the other: uint32 [rows, width]. Entries behind the
    last of a table name no block.

    ptr: to all of them.
    """

    __slots__ = ("_copied", "_table", "ptr", "width")

    def __init__(self, rows: int, width: int) -> None:
        self.width = width
        self._table = np.empty((rows, width), np.uint32)
        self.ptr = u32_ptr(self._table)
        self._copied: list[NDArray[np.uint32] | None] = [None] * rows  # what each row is a copy of

    @classmethod
    def of(
        cls, tables: list[NDArray[np.uint32]], held: BatchTable | None, spare: list[BatchTable]
    ) -> BatchTable:
        """``tables``, in ``held`` where there is room, else in one of ``spare``, which nobody else
        has from then on, or a new one."""
        rows, width = len(tables), max(1, *map(len, tables)) if tables else 1
        if held is None and spare:
            held = spare.pop()
        if held is None or not held._suits(rows, width):
            held = cls(rows + rows // 2, width + width // 2)
        held._copy(tables)
        return held

    def first(self, n: int) -> NDArray[np.uint32]:
        """The first ``n`` tables."""
        return self._table[:n]

    def _suits(self, rows: int, width: int) -> bool:
        large = self._table.nbytes > _LARGE and 16 * rows * width < self._table.nbytes
        return len(self._table) >= rows and self.width >= width and not large

    def _copy(self, tables: list[NDArray[np.uint32]]) -> None:
        """Copies those that are not there already. Tables are never written, so that one that was
        copied stays as it was."""
        if all(map(is_, self._copied, tables)):
            return
        for i, (copied, table) in enumerate(zip(self._copied, tables, strict=False)):
            if copied is not table:
                n, row = len(table), self._table[i]
                self._copied[i] = None
                row[:n] = table
                row[n:] = NO_BLOCK
                self._copied[i] = table


class Batch:
    """Some sequences of a cache, for the calls of a step; ``PagedKVCache.batch`` makes it.

    It follows the cache: tables and lengths are those of the moment they are asked for, also where
    sequences have grown since. Any number of threads may read over one.
    seq_ids: the sequences, in the order of the rows.
    """

    __slots__ = ("_cache", "_table", "seq_ids")

    def __init__(self, cache: PagedKVCache, seq_ids: Sequence[Hashable]) -> None:
        self._cache, self.seq_ids = cache, seq_ids
        self._table: BatchTable | None = None

    @property
    def tables(self) -> NDArray[np.uint32]:
        """The block tables as ``paged_attention`` takes them over a view: uint32 [B,n], entries
        behind a sequence's last name no block. Good until the cache changes."""
        cache = self._cache
        with cache._handle.read():
            sequences = cache._found("tables", self.seq_ids)
            return self._tables(sequences).first(len(sequences))

    def lengths(self, layer: int) -> NDArray[np.int32]:
        """Positions that each holds in a layer: int32 [B]. Raises ValueError for a bad layer."""
        cache = self._cache
        layer = cache._layer("lengths", layer)
        with cache._handle.read():
            sequences = cache._found("lengths", self.seq_ids)
            return np.array([sequence.lengths[layer] for sequence in sequences], np.int32)

    def _of_layer(self, fn: str, layer: Any) -> tuple[Batch, int]:
        """The batch over what holds a layer, and which one it is there. Raises ValueError for a bad
        one."""
        return self, self._cache._layer(fn, layer)

    def _tables(self, sequences: list[CachedSequence]) -> BatchTable:
        tables = [sequence.table for sequence in sequences]
        self._table = table = BatchTable.of(tables, self._table, self._cache._spare)
        return table

    def _over(
        self, fn: str, layer: int, window: int, cu_seqlens_q: Any = None
    ) -> tuple[BatchTable, NDArray[np.int32]]:
        """Tables, and lengths [B] in a layer, for a call of these rows, None for one each, that see
        ``window`` positions (0: all); for who reads.

        Raises: KeyError for a sequence that is gone; ValueError for one that holds nothing in the
        layer, or lacks what the window sees.
        """
        cache = self._cache
        sequences = cache._found(fn, self.seq_ids)
        lengths = [sequence.lengths[layer] for sequence in sequences]
        if not all(lengths):
            empty = list(self.seq_ids)[lengths.index(0)]
            raise ValueError(
                f"{fn}: sequence {empty!r} holds no position in layer {cache._number_of(layer)}"
            )
        if any([sequence.gone for sequence in sequences]):
            n_rows = [1] * len(sequences)
            if cu_seqlens_q is not None:
                n_rows = np.diff(int32s(fn, "cu_seqlens_q", cu_seqlens_q)).tolist()
            for seq_id, sequence, length, rows in zip(
                self.seq_ids, sequences, lengths, n_rows, strict=False
            ):
                first = max(length - rows + 1 - window, 0) if window > 0 else 0
                if sequence.gone and rows > 0:
                    cache._refuse_gone(fn, seq_id, sequence, first)
        return self._tables(sequences), np.array(lengths, np.int32)

    def __len__(self) -> int:
        return len(self.seq_ids)

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *exc: Any) -> None:
        table, self._table = self._table, None
        if table is not None:
            self._cache._spare.append(table)
