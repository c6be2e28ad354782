# SPDX-License-Identifier: MIT
"""Blocks: the pool in C as ``PagedKVCache`` uses it. Every method is for who is inside
(``handle``)."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyllm._arrays import Tensor, as_array, as_f32_for_f16, packed, whole_rows, with_axes
from tinyllm._check import F16, F32, UINT32_MAX
from tinyllm.errors import TlError
from tinyllm.ffi.handle import Handle
from tinyllm.ffi.libtinyllm import (
    KV_VIEW_BYTES,
    TL_EFULL,
    TL_F16,
    TL_KV_ENVELOPE_HEADER,
    TL_KV_FORMAT_V1,
    TL_KV_RECORD_HEADER,
    KvConfig,
    KvStats,
    KvView,
    Lib,
    Step,
    all_at_once,
    block_view,
    export_blocks,
    f32_ptr,
    i64_ptr,
    u16_ptr,
    u32_ptr,
)

NO_BLOCK = UINT32_MAX  # a table entry nobody reads


class Blocks:
    """``n_blocks`` blocks of f16 K and V, and the counters that the pool does not keep.

    fresh: what a call took from the pool and no table names yet. Where the call does not end well,
    ``give_back`` returns it before the next one begins. high_water: the most blocks in use at once.
    """

    def __init__(self, lib: Lib, handle: Handle) -> None:
        self.lib, self.handle = lib, handle
        self.fresh: NDArray[np.uint32] | None = None
        self.high_water = 0

    def create(self, *sizes: int) -> None:
        """sizes: blocks, positions in one, layers, KV heads, elements of a row. Raises TlError."""
        self.handle.create(self.lib.tl_kv_pool_create, KvConfig(*sizes, TL_F16, TL_KV_FORMAT_V1))
        self.n_blocks, self.block_size, self.n_layers, *row = sizes
        self._slab = (row[0], self.block_size, row[1])
        self.block_bytes = int(self.lib.tl_kv_block_bytes(self.handle.address))

    # --- taking and giving back
    # ---------------------------------------------------------------------------------------------

    def stats(self) -> KvStats:
        """The pool's counters. Called after every allocation, for the high-water mark."""
        stats = KvStats()
        self.lib.tl_kv_stats_get(self.handle.address, stats)
        if stats.used > self.high_water:
            self.high_water = stats.used
        return stats

    def take(self, n: int) -> NDArray[np.uint32] | None:
        """``n`` blocks, which are ``fresh``; None where there are not as many."""
        if n == 0:
            return np.empty(0, np.uint32)
        if n > self.n_blocks:
            return None
        self.fresh = np.full(n, NO_BLOCK, np.uint32)
        try:
            self.lib.tl_kv_alloc(self.handle.address, n, u32_ptr(self.fresh))
        except TlError as error:
            self.fresh = None  # it took none
            if error.status != TL_EFULL:
                raise
            return None
        self.stats()
        return self.fresh

    def give_back(self) -> None:
        """Returns what is ``fresh``, if a call that did not end well has left any."""
        if self.fresh is not None:
            taken = self.fresh[self.fresh != NO_BLOCK].tolist()
            all_at_once([self.unref(taken), self.keep()])

    def commit(self, *steps: Step) -> None:
        """What a write changes, all of it. Raises TlError where the pool refused a part, which
        only a caller's own dealings with the pool can bring about."""
        for result in all_at_once(steps):
            statuses = result if type(result) is list else [result]
            refused = [status for status in statuses if type(status) is int and status]
            if refused:
                raise self.lib.failure("PagedKVCache", refused[0])

    def keep(self) -> Step:
        """What is ``fresh`` is its sequence's from now on."""
        return partial(setattr, self, "fresh", None)

    def ref(self, blocks: list[int]) -> Step:
        """One more holder for each."""
        return self.lib.tl_kv_ref.steps(self.handle.address, blocks)

    def unref(self, blocks: list[int]) -> Step:
        """One holder less for each, the last block first."""
        return self.lib.tl_kv_unref.steps(self.handle.address, reversed(blocks))

    # --- fills
    # ---------------------------------------------------------------------------------------------

    def set_fill(self, block: int, fill: int) -> Step:
        """``fill`` positions of a block are held by every layer."""
        return self.lib.tl_kv_set_fill.step(self.handle.address, block, fill)

    def set_length(self, table: NDArray[np.uint32], before: int, after: int) -> Step:
        """``set_fill`` for the blocks between two lengths of a sequence."""
        span = u32_ptr(table), len(table), before, after
        return self.lib.tl_kv_set_length.step(self.handle.address, *span)

    def is_writable(self, block: int, fill: int) -> bool:
        """Whether a block that has ``fill`` is one sequence's alone and not frozen under a hash."""
        pool = self.handle.address
        if self.lib.tl_kv_refs(pool, block) > 1:
            return False
        try:  # of a block in use only a registered one refuses the fill it has
            self.lib.tl_kv_set_fill(pool, block, fill)
        except TlError:
            return False
        return True

    # --- K and V
    # ---------------------------------------------------------------------------------------------

    def rows(self, fn: str, k: Tensor, v: Tensor) -> tuple[NDArray[Any], NDArray[Any]]:
        """K and V, checked in full, as ``write`` takes them: both float32 with the same strides, or
        both uint16 codes of float16."""
        sides = []
        for name, side in (("k", k), ("v", v)):
            if type(side) is not np.ndarray or (side.dtype is not F32 and side.dtype is not F16):
                side, element = as_array(fn, name, side)
                if element != "float16":
                    side = as_f32_for_f16(fn, name, side, element)
            sides.append(with_axes(fn, name, side, 3))
        k, v = sides
        heads, n_tokens, width = k.shape
        if (heads, width) != self._slab[::2] or n_tokens < 1:
            raise ValueError(
                f"{fn}: k has shape {k.shape}, expected [n_kv_heads, T >= 1, d_head] = "
                f"({self._slab[0]}, T, {self._slab[2]})"
            )
        if v.shape != k.shape:
            raise ValueError(f"{fn}: v has shape {v.shape}, k {k.shape}")
        if k.dtype == F32 and v.dtype == F32:
            return _of_equal_strides(k, v)
        return self._codes(k), self._codes(v)

    def _codes(self, a: NDArray[Any]) -> NDArray[np.uint16]:
        if a.dtype == F16:
            return whole_rows(a).view(np.uint16)
        codes = np.empty(a.shape, np.uint16)
        self.lib.tl_f32_to_f16_n(f32_ptr(packed(a)), u16_ptr(codes), a.size)
        return codes

    def write(
        self, layer: int, table: NDArray[np.uint32], begin: int, k: NDArray[Any], v: NDArray[Any]
    ) -> None:
        """Stores what ``rows`` gave in one layer of a sequence, from position ``begin`` on."""
        n, pool = k.shape[1], self.handle.address
        (k_head, k_token, _), (v_head, v_token, _) = (
            [stride // a.itemsize for stride in a.strides] for a in (k, v)
        )
        if k.dtype == F32:
            self.lib.tl_kv_append_f32(
                pool, layer, u32_ptr(table), len(table), begin, n, f32_ptr(k), f32_ptr(v),
                k_head, k_token,
            )  # fmt: skip
            return
        places = np.arange(begin, begin + n)
        slots = table[places // self.block_size].astype(np.int64) * self.block_size
        slots += places % self.block_size
        self.lib.tl_kv_write_slots(
            self.view(layer), i64_ptr(slots), n, k.ctypes.data, v.ctypes.data, TL_F16,
            k_token, k_head, v_token, v_head,
        )  # fmt: skip

    def copy(self, source: int, target: int) -> None:
        """All of a block, all layers."""
        shape = (self.n_layers, 2, *self._slab)
        begin = (
            self.lib.tl_kv_block_ptr(self.handle.address, block, 0, 0) for block in (source, target)
        )
        old, new = (block_view(address, shape).view(np.uint16) for address in begin)
        new[...] = old

    def slab(self, block: int, layer: int, is_v: int) -> NDArray[np.float16]:
        """K or V of a block where it lies: [n_kv_heads, block_size, d_head]."""
        address = self.lib.tl_kv_block_ptr(self.handle.address, block, layer, is_v)
        return block_view(address, self._slab)

    def gather(
        self, layer: int, table: NDArray[np.uint32], length: int
    ) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
        """Copies of the K and V of ``length`` positions: [n_kv_heads, length, d_head]."""
        n_heads, b, width = self._slab
        k, v = (np.empty((n_heads, length, width), np.float16) for _ in "kv")
        for i, begin in enumerate(range(0, length, b)):
            span = slice(begin, min(begin + b, length))
            for is_v, side in enumerate((k, v)):
                side[:, span] = self.slab(int(table[i]), layer, is_v)[:, : span.stop - begin]
        return k, v

    def view(self, layer: int) -> KvView:
        """Where one layer lies."""
        struct = KvView(KV_VIEW_BYTES)
        self.lib.tl_kv_pool_view(self.handle.address, layer, struct)
        return struct

    # --- moving
    # ---------------------------------------------------------------------------------------------

    def export(self, table: NDArray[np.uint32]) -> bytearray:
        """The envelope of some blocks."""
        return export_blocks(self.lib, self.handle.address, table)

    def load(self, fn: str, envelope: NDArray[np.uint8]) -> tuple[NDArray[np.uint32], int]:
        """The blocks of an envelope, which are ``fresh``, and the positions they hold.

        Raises: ValueError where no sequence lies in blocks like that; TlError.
        """
        fills = self._fills(fn, envelope)
        self.fresh = np.full(len(fills), NO_BLOCK, np.uint32)
        try:
            self.lib.tl_kv_import(
                self.handle.address, envelope.ctypes.data, len(envelope), u32_ptr(self.fresh)
            )
        except TlError:
            self.fresh = None  # it took none
            raise
        self.stats()
        return self.fresh, sum(fills)

    def _fills(self, fn: str, envelope: NDArray[np.uint8]) -> list[int]:
        """The positions in each block of an envelope, which no one has checked yet."""
        n = int.from_bytes(envelope[8:12].tobytes(), "little")
        pool, header = self.handle.address, TL_KV_ENVELOPE_HEADER
        if len(envelope) < header or len(envelope) != self.lib.tl_kv_export_bytes(pool, n):
            return [0] * min(n, len(envelope))  # something is amiss, and the import says what
        record = TL_KV_RECORD_HEADER + self.block_bytes
        fills = [
            int.from_bytes(envelope[header + i * record + 8 :][:4].tobytes(), "little")
            for i in range(n)
        ]
        if n == 0 or any(fill != self.block_size for fill in fills[:-1]):
            raise ValueError(f"{fn}: {n} blocks with {fills[:8]} ... positions are no sequence's")
        return fills


def fill_of(length: int, i: int, block_size: int) -> int:
    """Fill of the i-th block of a sequence of which every layer holds ``length`` positions."""
    return min(max(length - i * block_size, 0), block_size)


def blocks_of(table: NDArray[np.uint32], places: Iterable[int]) -> list[int]:
    """The blocks at some places of a table."""
    return [int(table[i]) for i in places]


def _of_equal_strides(k: NDArray[Any], v: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """float32 K and V of the same strides, whole elements, 1 in the last axis: as they are, or
    copies."""
    usable = k.strides == v.strides and k.strides[2] == F32.itemsize
    if usable and whole_rows(k) is k and whole_rows(v) is v:
        return k, v
    return packed(k), packed(v)
