# SPDX-License-Identifier: MIT
"""PagedKVCache: sequences over a pool of KV blocks; mirrors ``tinyllm/kv_pool.h``.

Words. table: the block ids of a sequence in order; position j is slot j % b of table[j // b], b =
block_size.
length: positions one layer of a sequence holds; layers are appended one by one, so lengths may
differ for a while. fill: positions of a block that every layer holds. gone: how many blocks at the
front of a sequence were given back; their entries in the table name no block.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from tinyllm._check import F16, F32, F64, INT32_MAX, INT64_MAX, UINT32_MAX, array, integer, packed
from tinyllm.errors import OutOfBlocks, TlError
from tinyllm.ffi.handle import Handle
from tinyllm.ffi.libtinyllm import (
    TL_EFORMAT,
    TL_EFULL,
    TL_EINVAL,
    TL_ESHAPE,
    TL_F16,
    TL_KV_ENVELOPE_HEADER,
    TL_KV_FORMAT_V1,
    TL_KV_RECORD_HEADER,
    KvConfig,
    KvStats,
    KvView,
    Lib,
    block_view,
    export_blocks,
    f32_ptr,
    i32_ptr,
    load,
    new_handle,
    u32_ptr,
)
from tinyllm.kv_view import KVView

if TYPE_CHECKING:  # loaded by the first look: an engine does without
    from tinyllm.observe.pool.picture import Picture
    from tinyllm.observe.pool.snapshot import Snapshot

__all__ = ["OutOfBlocks", "PagedKVCache"]

_F16_NAN = 0x7E00  # the one NaN that rounding to f16 gives
_NO_BLOCK = UINT32_MAX  # a table entry nobody reads


class _Sequence:
    """A table, uint32, replaced when it changes and never written, and the length of every layer."""

    __slots__ = ("gone", "lengths", "table")

    def __init__(self, table: NDArray[np.uint32], lengths: list[int], gone: int = 0) -> None:
        self.table, self.lengths, self.gone = table, lengths, gone

    def blocks(self) -> list[int]:
        """The blocks it holds, in order."""
        held: list[int] = self.table[self.gone :].tolist()
        return held


class BatchTable:
    """What a decode call reads of its sequences: a padded table and their lengths. Kept to be used again."""

    __slots__ = ("lengths", "lengths_ptr", "sequences", "table", "table_ptr", "version", "width")

    def __init__(self, rows: int, width: int) -> None:
        self.width = width
        self.table = np.empty((rows, width), np.uint32)
        self.lengths = np.empty(rows, np.int32)
        self.table_ptr, self.lengths_ptr = u32_ptr(self.table), i32_ptr(self.lengths)
        self.version = -1
        self.sequences: list[_Sequence] = []

    def fill(self, sequences: list[_Sequence], version: int) -> None:
        """Copies the tables of ``sequences``, unless they are there already."""
        if self.version == version and self.sequences == sequences:
            return
        self.version = -1
        for row, sequence in zip(self.table, sequences, strict=False):
            n = len(sequence.table)
            row[:n] = sequence.table
            row[n:] = _NO_BLOCK
        self.sequences, self.version = sequences, version


class PagedKVCache:
    """K and V of many sequences in blocks of ``block_size`` positions, shared by fork, copied when
    written.

    Not thread-safe: the caller serialises calls; any number of threads may decode while nobody
    writes.

    >>> with PagedKVCache(None, num_blocks=64, block_size=16, n_layers=2, n_kv_heads=2, d_head=64) as cache:
    ...     cache.add_seq("a")
    ...     for layer in range(2):
    ...         cache.append("a", layer, k[layer], v[layer])  # [n_kv_heads, T, d_head]
    ...     cache.fork("a", "b")

    lib: a loaded library; None is the default one.
    seq_id, in every method: a sequence, by any hashable value. One that is unknown raises KeyError,
    a closed cache ClosedError.
    num_blocks, block_size, n_layers, n_kv_heads, d_head: how many blocks there are, positions in
    one, layers, KV heads and elements of a row.

    Raises: ValueError for a size that is no positive integer below 2**32 (num_blocks: 2**31), or
    for a pool beyond the address space; TlError (``TL_ENOMEM``) where its memory cannot be
    reserved.
    """

    def __init__(
        self,
        lib: Lib | None,
        num_blocks: int,
        block_size: int,
        n_layers: int,
        n_kv_heads: int,
        d_head: int,
    ) -> None:
        fn = "PagedKVCache"
        self.num_blocks = integer(fn, "num_blocks", num_blocks, 1, INT32_MAX, ValueError)
        self.block_size = integer(fn, "block_size", block_size, 1, UINT32_MAX, ValueError)
        self.n_layers = integer(fn, "n_layers", n_layers, 1, UINT32_MAX, ValueError)
        self.n_kv_heads = integer(fn, "n_kv_heads", n_kv_heads, 1, UINT32_MAX, ValueError)
        self.d_head = integer(fn, "d_head", d_head, 1, UINT32_MAX, ValueError)
        self.lib = lib = load() if lib is None else lib
        self._handle = Handle(fn, self._create(), lib.tl_kv_pool_destroy)
        self._finalizer = weakref.finalize(self, self._handle.release)
        self._slab = (self.n_kv_heads, self.block_size, self.d_head)
        self._sequences: dict[Hashable, _Sequence] = {}
        self._version = 0  # changes whenever a table of a live sequence does
        self._spare: list[BatchTable] = []
        self._high_water = self._copies = self._failures = 0

    def _create(self) -> int:
        config = KvConfig(
            self.num_blocks,
            self.block_size,
            self.n_layers,
            self.n_kv_heads,
            self.d_head,
            TL_F16,
            TL_KV_FORMAT_V1,
        )
        try:
            return new_handle(self.lib.tl_kv_pool_create, config)
        except TlError as error:
            if error.status == TL_EINVAL:
                raise ValueError(f"PagedKVCache: {error.message}") from error
            raise

    # --- sequences
    # ------------------------------------------------------------------------------------------

    def add_seq(self, seq_id: Hashable) -> None:
        """Begins an empty sequence. Raises ValueError where ``seq_id`` is live."""
        with self._handle:
            self._refuse_live("add_seq", seq_id)
            self._sequences[seq_id] = _Sequence(np.empty(0, np.uint32), [0] * self.n_layers)

    def fork(self, parent: Hashable, child: Hashable) -> None:
        """Begins ``child`` with everything ``parent`` holds. They share its blocks until one of
        them writes.

        Raises: ValueError where ``child`` is live.
        """
        with self._handle as pool:
            source = self._sequence("fork", parent)
            self._refuse_live("fork", child)
            for block in source.blocks():
                self.lib.tl_kv_ref(pool, block)
            self._sequences[child] = _Sequence(source.table, list(source.lengths), source.gone)

    def free(self, seq_id: Hashable) -> None:
        """Ends a sequence and gives up its blocks, the last one first.

        So of a registered chain the tail is evicted first, and what is left can still be found.
        """
        with self._handle as pool:
            sequence = self._sequence("free", seq_id)
            del self._sequences[seq_id]
            self._unref(pool, sequence.blocks())

    def truncate(self, seq_id: Hashable, length: int) -> None:
        """Forgets what a sequence holds from position ``length`` on, in every layer, and gives up
        the blocks that lie wholly behind it, the last one first: a draft that was not accepted.

        A cut block that another sequence or the prefix index holds stays as it is for them, and the
        next append copies it.

        Raises: TypeError for a length that is no integer; ValueError for one beyond the longest
        layer, or one other than 0 in what ``trim_front`` gave back. Then nothing has changed.
        """
        with self._handle as pool:
            sequence = self._sequence("truncate", seq_id)
            length = integer("truncate", "length", length, 0, max(sequence.lengths))
            if 0 < length < sequence.gone * self.block_size:
                raise ValueError(
                    f"truncate: length = {length} of sequence {seq_id!r}, whose positions before "
                    f"{sequence.gone * self.block_size} were given back"
                )
            keep = -(-length // self.block_size)
            freed = sequence.blocks()[max(0, keep - sequence.gone) :]
            sequence.table, sequence.gone = sequence.table[:keep].copy(), min(sequence.gone, keep)
            sequence.lengths = [min(held, length) for held in sequence.lengths]
            self._version += 1
            if length % self.block_size:
                self._is_writable(pool, sequence, keep - 1)  # and if it is, its fill is lowered
            self._unref(pool, freed)

    def trim_front(self, seq_id: Hashable, window: int) -> None:
        """Gives up the blocks that no layer's last ``window`` positions reach: a model that sees no
        further has no use for them.

        The lengths stay, and so do the places in the table: -1 there. Attention with that window or
        a smaller one goes on as before; what would read the lost positions raises ValueError.

        Raises: TypeError for a window that is no integer, ValueError for one below 1.
        """
        with self._handle as pool:
            sequence = self._sequence("trim_front", seq_id)
            window = integer("trim_front", "window", window, 1, INT64_MAX)
            gone = max(sequence.gone, (min(sequence.lengths) - window) // self.block_size)
            freed = sequence.blocks()[: gone - sequence.gone]
            if not freed:
                return
            table = sequence.table.copy()
            table[:gone] = _NO_BLOCK
            sequence.table, sequence.gone = table, gone
            self._version += 1
            self._unref(pool, freed)

    def append(self, seq_id: Hashable, layer: int, k: NDArray[Any], v: NDArray[Any]) -> None:
        """Adds T >= 1 positions to one layer of a sequence.

        k, v: float16, float32 or float64 [n_kv_heads, T, d_head], any strides. Stored as f16:
        float16 bit for bit, the others rounded once to the nearest (ties to even; overflow is
        infinity, NaN is 0x7E00). They are not kept. What is copied on the way: float64, and a
        float32 K and V whose strides differ from each other or whose last axis is not contiguous.
        Blocks about to be written that another sequence holds, or that are registered in the prefix
        index, are copied first.

        Raises: OutOfBlocks where the pool cannot give all blocks needed; TypeError for another
        dtype; ValueError for a bad shape or layer. Then nothing has changed.
        """
        with self._handle as pool:
            sequence = self._sequence("append", seq_id)
            layer = self._layer("append", layer)
            n_tokens = self._check_kv(k, v)
            if k.dtype == F32 and v.dtype == F32:
                k, v = _alike(k, v)
            else:
                k, v = _to_f16(k), _to_f16(v)
            begin = sequence.lengths[layer]
            end = begin + n_tokens
            if end > INT32_MAX:
                raise ValueError(
                    f"append: {begin} + {n_tokens} positions are more than {INT32_MAX}"
                )

            old, b = sequence.table, self.block_size
            first, last = begin // b, -(-end // b)  # the blocks that are written: table[first:last]
            copied = [
                i
                for i in range(first, min(last, len(old)))
                if not self._is_writable(pool, sequence, i)
            ]
            fresh = self._take(pool, seq_id, len(copied), max(0, last - len(old)))
            try:
                table = np.concatenate((old, fresh[len(copied) :])) if len(fresh) else old
                for i, block in zip(copied, fresh, strict=False):
                    table[i] = block
                    self._copy_block(pool, int(old[i]), int(block))
                self._write(pool, layer, table, begin, k, v)
            except BaseException:
                self._unref(pool, fresh.tolist())
                raise
            self._commit(pool, sequence, layer, end, table, copied)

    def _commit(
        self,
        pool: int,
        sequence: _Sequence,
        layer: int,
        end: int,
        table: NDArray[np.uint32],
        copied: list[int],
    ) -> None:
        """The second half of append, which cannot fail: the new table and length take effect."""
        old, complete_before = sequence.table, min(sequence.lengths)
        if table is not old:
            sequence.table = table
            self._version += 1
        sequence.lengths[layer] = end
        complete = min(sequence.lengths)
        if complete > complete_before:
            # This layer was the one that held the fills back: their blocks are among those just
            # written.
            self.lib.tl_kv_set_length(pool, u32_ptr(table), len(table), complete_before, complete)
        for i in copied:
            self.lib.tl_kv_set_fill(pool, int(table[i]), self._fill(complete, i))
        self._copies += len(copied)
        self._unref(pool, [int(old[i]) for i in copied])

    # --- moving
    # ---------------------------------------------------------------------------------------------

    def export_seq(self, seq_id: Hashable) -> bytearray:
        """What a sequence holds, as bytes for ``import_seq`` of a cache of the same sizes,
        anywhere: K and V of all layers with a checksum (the envelope of ``tl_kv_export``), a
        function of what was stored.

        Raises: ValueError where layers hold different numbers of positions or none, or where
        ``trim_front`` gave blocks back.
        """
        with self._handle as pool:
            sequence = self._sequence("export_seq", seq_id)
            self._refuse_gone("export_seq", seq_id, sequence, 0)
            low, high = min(sequence.lengths), max(sequence.lengths)
            if low != high or high == 0:
                raise ValueError(
                    f"export_seq: the layers of sequence {seq_id!r} hold {low} to {high} positions; all must "
                    "hold the same number, at least one"
                )
            return export_blocks(self.lib, pool, sequence.table)

    def import_seq(self, seq_id: Hashable, envelope: bytes | bytearray | memoryview) -> None:
        """Begins a sequence with ``envelope``, which ``export_seq`` made: every bit of K and V, in
        other blocks.

        Any bytes are safe. The pool may have more or fewer blocks than the one they come from.
        Raises: TypeError for what holds no bytes; ValueError where ``seq_id`` is live, and for
        bytes that are damaged, of a cache of other sizes, or of no sequence; OutOfBlocks. Then
        nothing has changed.
        """
        with self._handle as pool:
            self._refuse_live("import_seq", seq_id)
            memory = np.frombuffer(envelope, np.uint8) if len(envelope) else np.empty(0, np.uint8)
            fills = self._fills_of(pool, memory)
            table = np.empty(len(fills), np.uint32)
            try:
                self.lib.tl_kv_import(pool, memory.ctypes.data, len(memory), u32_ptr(table))
            except TlError as error:
                if error.status in (TL_EFORMAT, TL_ESHAPE):
                    raise ValueError(f"import_seq: {error.message}") from error
                if error.status != TL_EFULL:
                    raise
                self._failures += 1
                raise OutOfBlocks(f"import_seq: sequence {seq_id!r}: {error.message}") from error
            self._pool_stats(pool)
            self._sequences[seq_id] = _Sequence(table, [sum(fills)] * self.n_layers)

    # --- looking
    # --------------------------------------------------------------------------------------------

    @property
    def pool(self) -> int:
        """The ``tl_kv_pool *``, for functions of ``lib``; valid until ``close()``."""
        with self._handle as pool:
            return pool

    def view(self, layer: int) -> KVView:
        """Where one layer lies, for ``paged_attention`` to read until ``close()``. Raises
        ValueError for a bad layer.

        >>> tables, lengths = [cache.block_table("a")], [cache.seq_len("a")]
        >>> out = paged_attention(q, cache.view(0), tables, lengths, cu_seqlens_q=[0, len(q)])
        """
        with self._handle as pool:
            struct = KvView()
            self.lib.tl_kv_pool_view(pool, self._layer("view", layer), struct)
            return KVView(struct, "float16", self, owner=self._handle, lib=self.lib)

    def block_table(self, seq_id: Hashable) -> NDArray[np.int32]:
        """A copy of the table: int32 [ceil(longest layer / block_size)]; -1 where ``trim_front``
        gave a block up."""
        with self._handle:
            sequence = self._sequence("block_table", seq_id)
            return sequence.table.astype(np.int32)

    def seq_len(self, seq_id: Hashable, layer: int = 0) -> int:
        """Positions one layer of a sequence holds. Raises ValueError for a bad layer."""
        with self._handle:
            sequence = self._sequence("seq_len", seq_id)
            return sequence.lengths[self._layer("seq_len", layer)]

    def gather(
        self, seq_id: Hashable, layer: int
    ) -> tuple[NDArray[np.float16], NDArray[np.float16]]:
        """Copies of one layer's K and V: float16 [n_kv_heads, length, d_head] each. Raises
        ValueError for a bad layer, or a sequence whose front was trimmed."""
        with self._handle as pool:
            sequence = self._sequence("gather", seq_id)
            layer = self._layer("gather", layer)
            self._refuse_gone("gather", seq_id, sequence, 0)
            length = sequence.lengths[layer]
            k, v = (np.empty((self.n_kv_heads, length, self.d_head), np.float16) for _ in "kv")
            for block, slots, span in self._pieces(sequence.table, 0, length):
                k[:, span] = self._view(pool, block, layer, 0)[:, slots]
                v[:, span] = self._view(pool, block, layer, 1)[:, slots]
            return k, v

    def stats(self) -> dict[str, int]:
        """Blocks ``free``, ``used`` and ``cached``, and ``evictions`` so far."""
        with self._handle as pool:
            stats = self._pool_stats(pool)
            return {
                "free": stats.free,
                "used": stats.used,
                "cached": stats.cached,
                "evictions": stats.evictions,
            }

    def num_free_blocks(self) -> int:
        """Blocks that an append can take: free ones, and cached ones, which it may evict."""
        stats = self.stats()
        return stats["free"] + stats["cached"]

    def snapshot(self, path: str | os.PathLike[str] | None = None) -> Snapshot:
        """What the pool and its sequences look like now, for pictures and counters; with ``path``
        it is also written there (``Snapshot.save``). K and V are not part of it.

        It costs one pass over the states of all blocks. Nothing may be written to the cache
        meanwhile.

        Raises: OSError where ``path`` cannot be written.
        """
        from tinyllm.observe.pool.snapshot import Snapshot, pool_blocks, sequence_state

        with self._handle as pool:
            stats = self._pool_stats(pool)
            sequences = tuple(
                sequence_state(seq_id, s.table, s.gone, s.lengths)
                for seq_id, s in self._sequences.items()
            )
            taken = Snapshot(
                num_blocks=self.num_blocks,
                block_size=self.block_size,
                n_layers=self.n_layers,
                n_kv_heads=self.n_kv_heads,
                d_head=self.d_head,
                block_bytes=self.lib.tl_kv_block_bytes(pool),
                blocks=pool_blocks(self.lib, pool, self.num_blocks, sequences),
                sequences=sequences,
                high_water=self._high_water,
                copies_on_write=self._copies,
                evictions=stats.evictions,
                failed_allocations=self._failures,
            )
        if path is not None:
            taken.save(path)
        return taken

    def look(self, mass: Mapping[Hashable, NDArray[np.floating[Any]]] | None = None) -> Picture:
        """A picture of the pool and its block tables as they are now: printed it is text for a
        terminal, in a notebook SVG; ``look().save("cache.svg")`` keeps it.

        mass: what ``attention_mass`` says of a sequence, float [H,n] or [n], drawn beside its
        table.

        >>> print(cache.look())

        Raises: KeyError for an unknown sequence in ``mass``; TypeError, ValueError for what is no
        float array over its table.
        """
        from tinyllm.observe.pool.picture import Picture

        taken = self.snapshot()
        places = {seq_id: i for i, seq_id in enumerate(self._sequences)}
        for seq_id in mass or {}:
            self._sequence("look", seq_id)
        return Picture(taken, {places[seq_id]: a for seq_id, a in (mass or {}).items()})

    def metrics(self, **labels: str) -> str:
        """The counters of ``snapshot()`` as Prometheus reads them (text format 0.0.4), with these
        labels.

        >>> cache.metrics(model="smollm2").splitlines()[2]
        'tinyllm_kv_cache_usage_ratio{model="smollm2"} 0.25'

        Raises: ValueError for a name that labels cannot have; TypeError for a value that is no
        string.
        """
        from tinyllm.observe.pool.metrics import prometheus

        return prometheus(self.snapshot(), labels)

    def _repr_svg_(self) -> str:
        return self.look().svg()

    # --- lifetime
    # -------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Gives the pool back; nothing happens the second time. Collection and interpreter exit do
        it too.

        Raises: RuntimeError while another thread is inside a call on this cache.
        """
        self._handle.close()
        self._sequences.clear()
        self._spare.clear()

    def __enter__(self) -> PagedKVCache:
        with self._handle:
            return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        sizes = ("num_blocks", "block_size", "n_layers", "n_kv_heads", "d_head")
        return f"PagedKVCache({', '.join(f'{name}={getattr(self, name)}' for name in sizes)})"

    # --- decode
    # ---------------------------------------------------------------------------------------------

    def _borrow(self, fn: str, seq_ids: Sequence[Hashable], layer: int, window: int) -> BatchTable:
        """The tables and lengths of one sequence or more, for one call, which puts them into
        ``_spare``.

        Raises: KeyError; ValueError where one holds nothing in ``layer``, or not all of ``window``.
        """
        try:
            sequences = [self._sequences[seq_id] for seq_id in seq_ids]
        except KeyError as error:
            raise KeyError(f"{fn}: no sequence {error.args[0]!r}") from None
        lengths = [sequence.lengths[layer] for sequence in sequences]
        if 0 in lengths:
            raise ValueError(
                f"{fn}: sequence {list(seq_ids)[lengths.index(0)]!r} holds no position in layer {layer}"
            )
        for seq_id, sequence, length in zip(seq_ids, sequences, lengths, strict=True):
            if sequence.gone:
                self._refuse_gone(
                    fn, seq_id, sequence, max(length - window, 0) if window > 0 else 0
                )
        rows, width = len(sequences), max([len(sequence.table) for sequence in sequences])
        try:
            batch = self._spare.pop()  # nobody else has it now, in whichever thread
        except IndexError:
            batch = None
        if batch is None or len(batch.table) < rows or batch.width < width:
            batch = BatchTable(rows + rows // 2, width + width // 2)
        batch.lengths[:rows] = lengths
        batch.fill(sequences, self._version)
        return batch

    # --- inside
    # ---------------------------------------------------------------------------------------------

    def _sequence(self, fn: str, seq_id: Hashable) -> _Sequence:
        try:
            return self._sequences[seq_id]
        except KeyError:
            raise KeyError(f"{fn}: no sequence {seq_id!r}") from None

    def _refuse_live(self, fn: str, seq_id: Hashable) -> None:
        if seq_id in self._sequences:
            raise ValueError(f"{fn}: sequence {seq_id!r} is live already")

    def _refuse_gone(self, fn: str, seq_id: Hashable, sequence: _Sequence, first: int) -> None:
        """Raises ValueError where position ``first`` was given back."""
        begin = sequence.gone * self.block_size
        if first < begin:
            raise ValueError(
                f"{fn}: position {first} of sequence {seq_id!r} is needed, and trim_front gave up those "
                f"before {begin}"
            )

    def _layer(self, fn: str, layer: Any) -> int:
        return integer(fn, "layer", layer, 0, self.n_layers - 1, ValueError)

    def _check_kv(self, k: Any, v: Any) -> int:
        """T, after checking K and V in full."""
        array("append", "k", k, F16, F32, F64, ndim=3)
        array("append", "v", v, F16, F32, F64, ndim=3)
        n_heads, n_tokens, width = k.shape
        if (n_heads, width) != (self.n_kv_heads, self.d_head) or n_tokens < 1:
            raise ValueError(
                f"append: k has shape {k.shape}, expected [n_kv_heads, T >= 1, d_head] = "
                f"({self.n_kv_heads}, T, {self.d_head})"
            )
        if v.shape != k.shape:
            raise ValueError(f"append: v has shape {v.shape}, k {k.shape}")
        return int(n_tokens)

    def _fill(self, complete: int, i: int) -> int:
        """Fill of the i-th block of a sequence of which every layer holds ``complete`` positions."""
        return min(max(complete - i * self.block_size, 0), self.block_size)

    def _fills_of(self, pool: int, envelope: NDArray[np.uint8]) -> list[int]:
        """The positions in each block of an envelope, which no one has checked yet.

        Raises: ValueError where no sequence lies in blocks like that.
        """
        n = int.from_bytes(envelope[8:12].tobytes(), "little")
        if len(envelope) < TL_KV_ENVELOPE_HEADER or len(envelope) != self.lib.tl_kv_export_bytes(
            pool, n
        ):
            return [0] * min(n, len(envelope))  # something is amiss, and the import says what
        record = TL_KV_RECORD_HEADER + self.lib.tl_kv_block_bytes(pool)
        words = (envelope[TL_KV_ENVELOPE_HEADER + i * record + 8 :][:4].tobytes() for i in range(n))
        fills = [int.from_bytes(word, "little") for word in words]
        if n == 0 or any(fill != self.block_size for fill in fills[:-1]):
            raise ValueError(
                f"import_seq: {n} blocks with {fills[:8]} ... positions are no sequence's"
            )
        return fills

    def _is_writable(self, pool: int, sequence: _Sequence, i: int) -> bool:
        """Whether the i-th block is this sequence's alone and not frozen under a hash."""
        block = int(sequence.table[i])
        if self.lib.tl_kv_refs(pool, block) > 1:
            return False
        try:  # of a block in use only a registered one refuses the fill it has
            self.lib.tl_kv_set_fill(pool, block, self._fill(min(sequence.lengths), i))
        except TlError:
            return False
        return True

    def _take(self, pool: int, seq_id: Hashable, n_copies: int, n_more: int) -> NDArray[np.uint32]:
        """Fresh blocks, all or none."""
        n = n_copies + n_more
        ids = np.empty(min(n, self.num_blocks), np.uint32)
        try:
            if n == len(ids):
                if n:
                    self.lib.tl_kv_alloc(pool, n, u32_ptr(ids))
                    self._pool_stats(pool)
                return ids
        except TlError as error:
            if error.status != TL_EFULL:
                raise
        self._failures += 1
        stats = self.stats()
        raise OutOfBlocks(
            f"append: sequence {seq_id!r} needs {n_more} more blocks and {n_copies} to copy what is shared; "
            f"{stats['free']} are free and {stats['cached']} cached of {self.num_blocks}"
        )

    def _pool_stats(self, pool: int) -> KvStats:
        """The pool's counters. Called after every allocation, so that the high-water mark follows."""
        stats = KvStats()
        self.lib.tl_kv_stats_get(pool, stats)
        if stats.used > self._high_water:
            self._high_water = stats.used
        return stats

    def _unref(self, pool: int, blocks: list[int]) -> None:
        self.lib.tl_kv_unref.each(pool, reversed(blocks))

    def _view(self, pool: int, block: int, layer: int, is_v: int) -> NDArray[np.float16]:
        return block_view(self.lib.tl_kv_block_ptr(pool, block, layer, is_v), self._slab)

    def _copy_block(self, pool: int, source: int, target: int) -> None:
        shape = (self.n_layers, 2, *self._slab)
        begin = (self.lib.tl_kv_block_ptr(pool, block, 0, 0) for block in (source, target))
        old, new = (block_view(address, shape).view(np.uint16) for address in begin)
        new[...] = old

    def _write(
        self,
        pool: int,
        layer: int,
        table: NDArray[np.uint32],
        begin: int,
        k: NDArray[Any],
        v: NDArray[Any],
    ) -> None:
        """Stores K and V, both float32 with the same strides or both float16, from position ``begin`` on."""
        n_tokens = k.shape[1]
        if k.dtype == F32:
            head, token = k.strides[0] // F32.itemsize, k.strides[1] // F32.itemsize
            self.lib.tl_kv_append_f32(
                pool,
                layer,
                u32_ptr(table),
                len(table),
                begin,
                n_tokens,
                f32_ptr(k),
                f32_ptr(v),
                head,
                token,
            )
            return
        for block, slots, span in self._pieces(table, begin, begin + n_tokens):
            self._view(pool, block, layer, 0).view(np.uint16)[:, slots] = k.view(np.uint16)[:, span]
            self._view(pool, block, layer, 1).view(np.uint16)[:, slots] = v.view(np.uint16)[:, span]

    def _pieces(
        self, table: NDArray[np.uint32], begin: int, end: int
    ) -> Iterable[tuple[int, slice, slice]]:
        """Positions begin .. end - 1 by block: the block, its slots, the same counted from ``begin``."""
        b = self.block_size
        for start in range(begin - begin % b, end, b):
            low, high = max(start, begin), min(start + b, end)
            yield (
                int(table[start // b]),
                slice(low - start, high - start),
                slice(low - begin, high - begin),
            )


def _alike(k: NDArray[Any], v: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
    """float32 K and V of the same strides, in whole elements, 1 in the last axis: as they are, or copies."""
    usable = k.strides == v.strides and k.flags.aligned and v.flags.aligned
    if (
        usable
        and k.strides[2] == F32.itemsize
        and not any(stride % F32.itemsize for stride in k.strides)
    ):
        return k, v
    return packed(k), packed(v)


def _to_f16(a: NDArray[Any]) -> NDArray[np.float16]:
    """float16 as it is; the others rounded once, whatever infinities that makes."""
    if a.dtype == F16:
        return a
    with np.errstate(all="ignore"):
        half = a.astype(np.float16, order="C", subok=False)
    half.view(np.uint16)[np.isnan(a)] = _F16_NAN
    return half
