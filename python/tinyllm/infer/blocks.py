# SPDX-License-Identifier: MIT
"""Blocks: the pool in C as ``PagedKVCache`` uses it. Every method is for who is inside
(``handle``)."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tinyllm._arrays import Tensor, as_array, as_f32, as_f32_for_f16, whole_rows, with_axes
from tinyllm._check import UINT32_MAX
from tinyllm._kv_format import FORMATS, KvFormat
from tinyllm.errors import TlError
from tinyllm.ffi.handle import Handle
from tinyllm.ffi.libtinyllm import (
    KV_VIEW_BYTES,
    TL_EFULL,
    TL_KV_ENVELOPE_HEADER,
    TL_KV_MAGIC,
    TL_KV_RECORD_HEADER,
    KvBlock,
    KvConfig,
    KvNeeds,
    KvStats,
    KvView,
    Lib,
    Step,
    all_at_once,
    export_blocks,
    f32_ptr,
    i32_ptr,
    memory_at,
    step_for_all,
    u32_ptr,
    u64_ptr,
)
from tinyllm.kv_view import codes_of, scales_of

if TYPE_CHECKING:
    from tinyllm.infer.batch import BatchTable

NO_BLOCK = UINT32_MAX  # a table entry nobody reads


class Rows(NamedTuple):
    """K and V [total, n_kv_heads, d_head] of one of the types that the library takes. overflowed:
    how many became infinite before, on the way to float32."""

    k: NDArray[Any]
    v: NDArray[Any]
    form: KvFormat
    overflowed: int


class Blocks:
    """``n_blocks`` blocks of K and V in one format, and the counters that the pool does not keep.

    fresh: what a call took from the pool and no table names yet. given_up: blocks of which it has
    given up references that tables still stand for, one for each time they stand there. Where the
    call does not end well, ``give_back`` undoes both before the next one begins.
    high_water: the most blocks in use at once. overflowed: values that became infinite where the
    pool could not see it.
    touched: the most blocks that hold memory. The pool takes what was freed last first, so these
    are the blocks that were ever used at once; ``trim`` takes some away.
    """

    def __init__(self, lib: Lib, handle: Handle, form: KvFormat) -> None:
        self.lib, self.handle, self.form = lib, handle, form
        self.fresh: NDArray[np.uint32] | None = None
        self.given_up: list[int] = []
        self.before_taking: Callable[[int], None] | None = None  # told how many it will be
        self.high_water = self.overflowed = self.touched = 0
        self._views: dict[int, KvView] = {}

    def create(self, *sizes: int) -> None:
        """sizes: blocks, positions in one, layers, KV heads, elements of a row. Raises TlError."""
        config = KvConfig(*sizes, self.form.tl_dtype, self.form.tl_format)
        self.handle.create(self.lib.tl_kv_pool_create, config)
        self.n_blocks, self.block_size, self.n_layers, *row = sizes
        self._slab = (row[0], self.block_size, row[1])
        self.block_bytes = int(self.lib.tl_kv_block_bytes(self.handle.address))

    # --- taking and giving back
    # ---------------------------------------------------------------------------------------------

    def stats(self) -> KvStats:
        """The pool's counters. Called after every allocation, for the high-water mark."""
        stats = self._counters()
        if stats.used > self.high_water:
            self.high_water = stats.used
        self.touched = max(self.touched, int(stats.used + stats.cached))
        return stats

    def unrepresentable(self) -> int:
        """How many values so far the format had nothing for."""
        return int(self._counters().unrepresentable)

    def _counters(self) -> KvStats:
        stats = KvStats()
        self.lib.tl_kv_stats_get(self.handle.address, stats)
        stats.unrepresentable += self.overflowed
        return stats

    def take(self, n: int) -> NDArray[np.uint32] | None:
        """``n`` blocks, which are ``fresh``; None where there are not as many. Who writes to them
        then calls ``stats``."""
        if n == 0:
            return np.empty(0, np.uint32)
        if n > self.n_blocks:
            return None
        fresh = self._taking(n)
        try:
            self.lib.tl_kv_alloc(self.handle.address, n, u32_ptr(fresh))
        except TlError as error:
            self.fresh = None  # it took none
            if error.status != TL_EFULL:
                raise
            return None
        return fresh

    def _taking(self, n: int) -> NDArray[np.uint32]:
        """``room`` for blocks that the pool is about to give, evicting others where it must."""
        if self.before_taking is not None:
            self.before_taking(n)
        return self.room(n)

    def next_evicted(self, n: int) -> list[int]:
        """The cached blocks that taking ``n`` evicts, the first first."""
        stats = self._counters()
        n = n - stats.free if n <= stats.free + stats.cached else 0
        if n <= 0:
            return []
        ids, found = np.empty(n, np.uint32), np.zeros(1, np.uint32)
        self.lib.tl_kv_oldest(self.handle.address, n, u32_ptr(ids), u32_ptr(found))
        evicted: list[int] = ids[: found[0]].tolist()
        return evicted

    def room(self, n: int) -> NDArray[np.uint32]:
        """Where a call writes ``n`` blocks that it takes references on: they are ``fresh``."""
        self.fresh = np.full(n, NO_BLOCK, np.uint32)
        return self.fresh

    def without(self, fresh: NDArray[np.uint32], i: int) -> list[Step]:
        """The i-th of what is ``fresh`` is given back."""
        return [self.unref([int(fresh[i])]), partial(fresh.__setitem__, i, NO_BLOCK)]

    def copies(
        self, tables: BatchTable, starts: NDArray[np.int32], lengths: NDArray[np.int32]
    ) -> int:
        """How many blocks a step would copy; arguments as for ``write``."""
        needs = KvNeeds()
        try:
            self.lib.tl_kv_reserve(
                self.handle.address, tables.ptr, tables.width, i32_ptr(starts), i32_ptr(lengths),
                len(lengths), True, needs,
            )  # fmt: skip
        except TlError as error:
            if error.status != TL_EFULL:
                raise
        return int(needs.copies)

    def give_up(self, blocks: list[int]) -> None:
        """Before the tables change, a reference on each of these, which somebody else holds too."""
        all_at_once([partial(setattr, self, "given_up", blocks), self.unref(blocks)])

    def give_back(self) -> None:
        """Undoes what a call that did not end well has left."""
        if self.fresh is not None:
            taken = self.fresh[self.fresh != NO_BLOCK].tolist()
            all_at_once([self.ref(self.given_up), self.unref(taken), self.keep()])

    def commit(self, *steps: Step) -> None:
        """What a write changes, all of it. Raises TlError where the pool refused a part, which
        only a caller's own dealings with the pool can bring about."""
        for result in all_at_once(steps):
            statuses = result if type(result) is list else [result]
            refused = [status for status in statuses if type(status) is int and status]
            if refused:
                raise self.lib.failure("PagedKVCache", refused[0])

    def keep(self) -> Step:
        """What is ``fresh`` is its sequence's from now on, and ``given_up`` is no more."""
        return step_for_all(setattr, repeat(self), ("fresh", "given_up"), (None, []))

    def ref(self, blocks: list[int]) -> Step:
        """One more holder for each."""
        return self.lib.tl_kv_ref.steps(self.handle.address, blocks)

    def unref(self, blocks: Sequence[int]) -> Step:
        """One holder less for each, the last block first."""
        return self.lib.tl_kv_unref.steps(self.handle.address, reversed(blocks))

    # --- memory
    # ---------------------------------------------------------------------------------------------

    def idle_bytes(self) -> int:
        """Memory that free blocks hold, at most."""
        return (self.touched - self.n_blocks + int(self.stats().free)) * self.block_bytes

    def trim(self, keep: int) -> int:
        """Gives the memory of free blocks back but for the ``keep`` freed last: how many bytes.
        Raises TlError."""
        given = np.zeros(1, np.uint64)
        self.lib.tl_kv_trim(self.handle.address, keep, u64_ptr(given))
        if given[0]:  # none of a caller's own allocator, which keeps what it has
            self.touched = min(self.touched, self.n_blocks - int(self.stats().free) + keep)
        return int(given[0])

    # --- fills
    # ---------------------------------------------------------------------------------------------

    def set_fills(self, fills: Sequence[tuple[int, int]]) -> Step:
        """Of each block, how many positions every layer holds."""
        return self.lib.tl_kv_set_fill.steps(self.handle.address, *zip(*fills, strict=True))

    def set_length(self, table: NDArray[np.uint32], before: int, after: int) -> Step:
        """``set_fills`` for the blocks between two lengths of a sequence."""
        span = u32_ptr(table), len(table), before, after
        return self.lib.tl_kv_set_length.step(self.handle.address, *span)

    def is_writable(self, block: int, leaving: int = 0) -> bool:
        """Whether a used block is one holder's alone, when ``leaving`` others have given it up, and
        not frozen by an index."""
        state = KvBlock()
        self.lib.tl_kv_blocks_get(self.handle.address, block, 1, state)
        return bool(state.refs - leaving == 1 and state.hash == 0)

    # --- K and V
    # ---------------------------------------------------------------------------------------------

    def rows(self, fn: str, k: Tensor, v: Tensor, *, by_head: bool) -> Rows:
        """K and V, checked in full, as ``write`` takes them; ``by_head`` they come as
        [n_kv_heads, T >= 1, d_head]."""
        (k, of_k), (v, of_v) = (as_array(fn, name, side) for name, side in (("k", k), ("v", v)))
        given, overflowed = of_k, 0
        if of_k != of_v or of_k not in ("float32", "float16", "bfloat16"):
            rounded = as_f32_for_f16 if self.form.name == "float16" else as_f32
            wide, given = (k, v), "float32"
            k, v = rounded(fn, "k", k, of_k), rounded(fn, "v", v, of_v)
            if not self.form.has_scales:  # of which an infinity is counted by itself
                overflowed = _overflowed(wide[0], k) + _overflowed(wide[1], v)
        held = with_axes(fn, "k", k, 3).shape
        heads, n_tokens, width = held if by_head else (held[1], held[0], held[2])
        if (heads, width) != self._slab[::2] or n_tokens < by_head:
            n_heads, _, d = self._slab
            wanted = (
                f"[n_kv_heads, T >= 1, d_head] = ({n_heads}, T, {d})"
                if by_head
                else f"[total, n_kv_heads, d_head] = (total, {n_heads}, {d})"
            )
            raise ValueError(f"{fn}: k has shape {k.shape}, expected {wanted}")
        if with_axes(fn, "v", v, 3).shape != k.shape:
            raise ValueError(f"{fn}: v has shape {v.shape}, k {k.shape}")
        k, v = whole_rows(k), whole_rows(v)
        if by_head:
            k, v = k.transpose(1, 0, 2), v.transpose(1, 0, 2)
        return Rows(k, v, FORMATS[given], overflowed)

    def write(
        self, layer: int, tables: BatchTable, starts: NDArray[np.int32] | None,
        lengths: NDArray[np.int32], rows: Rows, tp: int | None,
    ) -> None:  # fmt: skip
        """Stores the rows of some sequences, whose lengths are given with them, in one layer;
        ``starts`` as ``cu_seqlens`` of tl_kv_append. Raises TlError: ``TL_EBUSY`` where a block is
        not its sequence's to write to. Then nothing is written."""
        k, v, itemsize = rows.k, rows.v, rows.k.itemsize
        (k_token, k_head, _), (v_token, v_head, _) = k.strides, v.strides
        self.lib.tl_kv_append(
            self.handle.address, layer, tables.ptr, tables.width, i32_ptr(starts),
            i32_ptr(lengths), len(lengths), k.ctypes.data, v.ctypes.data, rows.form.tl_dtype,
            k_token // itemsize, k_head // itemsize, v_token // itemsize, v_head // itemsize, tp,
        )  # fmt: skip

    def copy(self, source: int, target: int) -> None:
        """All of a block, all layers."""
        begin = (
            self.lib.tl_kv_block_ptr(self.handle.address, block, 0, 0) for block in (source, target)
        )
        old, new = (memory_at(address, self.block_bytes) for address in begin)
        new[...] = old

    def slab(self, block: int, layer: int, is_v: int) -> NDArray[Any]:
        """The elements of K or V of a block where they lie: [n_kv_heads, block_size, d_head]."""
        side: NDArray[Any] = codes_of(self.view(layer), self.form)[is_v][block]
        return side.view(self.form.element)

    def gather(
        self, layer: int, table: NDArray[np.uint32], length: int
    ) -> tuple[NDArray[Any], NDArray[Any]]:
        """Copies of the K and V of ``length`` positions: [n_kv_heads, length, d_head], as float16
        where that is what they are, else as float32."""
        if self.form.name == "float16":
            k, v = self.gather_codes(layer, table, length)
            return k, v
        n_heads, _, width = self._slab
        k, v = (np.empty((n_heads, length, width), np.float32) for _ in "kv")
        self.lib.tl_kv_gather_f32(
            self.handle.address, layer, u32_ptr(table), len(table), 0, length, f32_ptr(k),
            f32_ptr(v), length * width, width,
        )  # fmt: skip
        return k, v

    def gather_codes(
        self, layer: int, table: NDArray[np.uint32], length: int
    ) -> tuple[NDArray[Any], ...]:
        """The same as the elements that are stored, and their scales, float32 [n_kv_heads, length],
        where the format has them."""
        view = self.view(layer)
        sides: list[NDArray[Any]] = [a.view(self.form.element) for a in codes_of(view, self.form)]
        if self.form.has_scales:
            sides += scales_of(view)
        b, held = self.block_size, table[: -(-length // self.block_size)]
        return tuple(_in_order(side, held, b, length) for side in sides)

    def view(self, layer: int) -> KvView:
        """Where one layer lies, which never changes."""
        struct = self._views.get(layer)
        if struct is None:
            struct = KvView(KV_VIEW_BYTES)
            self.lib.tl_kv_pool_view(self.handle.address, layer, struct)
            self._views[layer] = struct
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
        fresh = self._taking(len(fills))
        try:
            self.lib.tl_kv_import(
                self.handle.address, envelope.ctypes.data, len(envelope), u32_ptr(fresh)
            )
        except TlError:
            self.fresh = None  # it took none
            raise
        self.stats()
        return fresh, sum(fills)

    def header(self, n: int) -> bytes:
        """What an envelope of ``n`` blocks begins with."""
        n_heads, b, width = self._slab
        form = (TL_KV_MAGIC, self.form.tl_format, self.form.tl_dtype)
        return struct.pack("<4sHH5I", *form, n, b, self.n_layers, n_heads, width)

    def envelope(self, blocks: list[int], held: NDArray[np.int64]) -> NDArray[np.uint8]:
        """The envelope of some blocks as one sequence holds them, whatever others hold in them.

        held: positions in each block of each layer, [blocks, n_layers]; what lies past them is
        zeros. No block has a hash.
        """
        record = TL_KV_RECORD_HEADER + self.block_bytes
        out = np.empty(TL_KV_ENVELOPE_HEADER + len(blocks) * record + 4, np.uint8)
        out[:TL_KV_ENVELOPE_HEADER] = np.frombuffer(self.header(len(blocks)), np.uint8)
        records = out[TL_KV_ENVELOPE_HEADER:-4].reshape(len(blocks), record)
        for row, block, n in zip(records, blocks, held, strict=True):
            head, payload = row[:TL_KV_RECORD_HEADER], row[TL_KV_RECORD_HEADER:]
            head[...] = np.frombuffer(struct.pack("<QI", 0, int(n.max())), np.uint8)
            payload[...] = memory_at(
                self.lib.tl_kv_block_ptr(self.handle.address, block, 0, 0), self.block_bytes
            )
            self._clear(payload, n.tolist())
        crc = self.lib.tl_crc32c(out.ctypes.data, len(out) - 4, 0)
        out[-4:] = np.frombuffer(struct.pack("<I", crc), np.uint8)
        return out

    def _clear(self, payload: NDArray[np.uint8], held: list[int]) -> None:
        """Zeros past the positions that each layer of a block holds."""
        n_heads, b, width = self._slab
        row = width * self.form.element.itemsize
        strips = payload.reshape(self.n_layers, 2 * n_heads, -1)
        scales = strips.shape[2] - 4 * b * self.form.has_scales
        for layer, n in zip(strips, held, strict=True):
            layer[:, n * row : scales] = 0
            layer[:, scales + 4 * n :] = 0

    def load_all(self, envelopes: list[NDArray[np.uint8]], n: int) -> NDArray[np.uint32]:
        """The ``n`` blocks of some envelopes together, which are ``fresh``. Raises TlError."""
        fresh, begin = self._taking(n), 0
        for envelope in envelopes:
            ids = u32_ptr(fresh[begin:])
            self.lib.tl_kv_import(self.handle.address, envelope.ctypes.data, len(envelope), ids)
            begin += self.blocks_in(envelope)
        self.stats()
        return fresh

    def other_format(self, envelope: NDArray[np.uint8]) -> str | None:
        """The dtype that an envelope says it holds, where that is another one."""
        version = int.from_bytes(envelope[4:6].tobytes(), "little")
        names = [form.name for form in FORMATS.values() if form.tl_format == version]
        return names[0] if names and names[0] != self.form.name else None

    def blocks_in(self, envelope: NDArray[np.uint8]) -> int:
        """How many blocks an envelope says it holds."""
        return int.from_bytes(envelope[8:12].tobytes(), "little")

    def _fills(self, fn: str, envelope: NDArray[np.uint8]) -> list[int]:
        """The positions in each block of an envelope, which no one has checked yet."""
        n = self.blocks_in(envelope)
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


def _overflowed(wide: NDArray[Any], single: NDArray[np.float32]) -> int:
    """How many finite numbers became infinite on the way to float32."""
    if wide.dtype.kind != "f" or wide.dtype.itemsize <= 4:
        return 0
    return int(np.count_nonzero(np.isinf(single)) - np.count_nonzero(np.isinf(wide)))


def _in_order(
    side: NDArray[Any], blocks: NDArray[np.uint32], block_size: int, length: int
) -> NDArray[Any]:
    """[n_kv_heads, length, ...] of [blocks, n_kv_heads, block_size, ...], block by block."""
    out = np.empty((side.shape[1], length, *side.shape[3:]), side.dtype)
    for block, begin in zip(blocks, range(0, length, block_size), strict=True):
        part = out[:, begin : begin + block_size]
        part[...] = side[block, :, : part.shape[1]]
    return out


def fill_of(length: int, i: int, block_size: int) -> int:
    """Fill of the i-th block of a sequence of which every layer holds ``length`` positions."""
    return min(max(length - i * block_size, 0), block_size)
