# SPDX-License-Identifier: MIT
"""What a cache holds of its sequences, and the table of a batch of them that kernels read."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyllm.ffi.libtinyllm import i32_ptr, u32_ptr
from tinyllm.infer.blocks import NO_BLOCK
from tinyllm.infer.prefixes import Text

_LARGE = 1 << 20  # bytes: a table beyond them is not kept for batches that need a fraction


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


class BatchTable:
    """A copy of the block tables and lengths of some sequences, as ``paged_attention`` takes them;
    good until the with block ends. ``PagedKVCache.batch`` makes it.

    tables: uint32 [B,n]; entries behind a sequence's last name no block. lengths: int32 [B].
    """

    __slots__ = (
        "_lengths", "_sequences", "_spare", "_table", "_version", "lengths", "lengths_ptr",
        "tables", "tables_ptr", "width",
    )  # fmt: skip

    def __init__(self, rows: int, width: int, spare: list[BatchTable]) -> None:
        self.width, self._spare = width, spare
        self._table, self._lengths = np.empty((rows, width), np.uint32), np.empty(rows, np.int32)
        self.tables, self.lengths = self._table, self._lengths
        self.tables_ptr, self.lengths_ptr = u32_ptr(self._table), i32_ptr(self._lengths)
        self._version = -1
        self._sequences: list[CachedSequence] = []

    @classmethod
    def borrow(cls, spare: list[BatchTable], rows: int, width: int) -> BatchTable:
        """One of ``spare``, which nobody else has from then on, or a new one."""
        try:
            batch = spare.pop()
        except IndexError:
            return cls(rows, width, spare)
        large = batch._table.nbytes > _LARGE and 16 * rows * width < batch._table.nbytes
        if len(batch._table) < rows or batch.width < width or large:
            return cls(rows + rows // 2, width + width // 2, spare)
        return batch

    def fill(self, sequences: list[CachedSequence], lengths: list[int], version: int) -> None:
        """Copies the tables of ``sequences``, unless they are there already."""
        n = len(sequences)
        self.tables, self.lengths = self._table[:n], self._lengths[:n]
        self.lengths[:] = lengths
        if self._version == version and self._sequences == sequences:
            return
        self._version = -1
        for row, sequence in zip(self.tables, sequences, strict=True):
            n = len(sequence.table)
            row[:n] = sequence.table
            row[n:] = NO_BLOCK
        self._sequences, self._version = sequences, version

    def __enter__(self) -> BatchTable:
        return self

    def __exit__(self, *exc: Any) -> None:
        self._spare.append(self)
