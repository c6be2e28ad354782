# SPDX-License-Identifier: MIT
"""PagedKVCache: sequences over a pool of KV blocks; mirrors ``tinyllm/kv_pool.h``.

Words. table: the block ids of a sequence in order; position j is slot j % b of table[j // b], b =
block_size.
length: positions one layer of a sequence holds; layers are appended one by one, so lengths may
differ for a while. fill: positions of a block that every layer holds. gone: how many blocks at the
front of a sequence were given back; their entries in the table name no block.
fresh: blocks that a call took from the pool and no table names yet.
"""

from __future__ import annotations

import contextlib
import os
import warnings
import weakref
from array import array
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence, Set
from functools import partial
from typing import TYPE_CHECKING, Any, Final, overload

import numpy as np
from numpy.typing import NDArray

from tinyllm._arrays import Tensor
from tinyllm._check import INT32_MAX, INT64_MAX, UINT32_MAX, integer
from tinyllm._kv_format import format_named
from tinyllm._not_copied import NotCopied
from tinyllm._words import plural
from tinyllm.errors import OutOfBlocks, TlError
from tinyllm.ffi.handle import Handle, address_of, reading
from tinyllm.ffi.libtinyllm import (
    TL_EBUSY,
    TL_EFORMAT,
    TL_EFULL,
    TL_EINVAL,
    TL_ESHAPE,
    Lib,
    Step,
    load,
)
from tinyllm.infer.batch import (
    Batch,
    BatchTable,
    CachedSequence,
    Growth,
    Needs,
    starts_and_counts,
)
from tinyllm.infer.blocks import NO_BLOCK, Blocks, Rows, fill_of
from tinyllm.infer.layers import Layer, checked_layers
from tinyllm.infer.memory import blocks_within, byte_count
from tinyllm.infer.prefixes import Prefixes, Text, namespace_of, tokens_of
from tinyllm.kv_view import KVView
from tinyllm.threads import ThreadPool, handle_of

if TYPE_CHECKING:  # loaded by the first look or swap: an engine does without
    from tinyllm.infer.cold import ColdTier
    from tinyllm.infer.stores import Store
    from tinyllm.observe.pool.picture import Picture
    from tinyllm.observe.pool.snapshot import Snapshot

__all__ = ["Batch", "Needs", "OutOfBlocks", "PagedKVCache"]

_NEEDED: Final[Any] = object()
SLACK: Final = 32  # positions that layers with a window keep beyond it
_SIZES: Final = {
    "num_blocks": INT32_MAX,
    "block_size": UINT32_MAX,
    "n_layers": UINT32_MAX,
    "n_kv_heads": UINT32_MAX,
    "d_head": UINT32_MAX,
}


class PagedKVCache(NotCopied):
    """K and V of many sequences in blocks of ``block_size`` positions, shared by fork, copied when
    written.

    >>> sizes = {"block_size": 16, "n_layers": 2, "n_kv_heads": 2, "d_head": 64}
    >>> with PagedKVCache(num_blocks=64, **sizes) as cache:
    ...     cache.add_seq("a")
    ...     for layer in range(2):
    ...         cache.append("a", layer, k[layer], v[layer])  # [n_kv_heads, T, d_head]
    ...     cache.fork("a", "b")

    lib: a loaded library; None is the default one.
    num_blocks, block_size, n_layers, n_kv_heads, d_head: how many blocks there are, positions in
    one, layers, KV heads and elements of a row.
    layers, slack: instead of the last three, a ``Layer`` for each layer. Where one has a window, or
    they differ, what is made is a ``LayeredKVCache``, which says more.
    memory: instead of num_blocks, what their K and V may take: bytes, or a text with one of kB, MB,
    GB, TB, KiB, MiB, GiB, TiB, like "4GiB". force: more than the machine or its container can give
    now is not refused.
    cold: a store (``swap_out``) for blocks of the prefix index that others need the room of: whole
    texts' tokens are kept with each and compared when ``add_seq`` asks for them again. A store that
    fails is warned of, and costs no more than what it should have kept.
    trim_above: bytes, or such a text. Where free blocks hold more memory after a call that freed
    some, the longest free give theirs back to the system, down to half of it. None: all keep it.
    dtype: what K and V are stored as, by name or as a dtype of numpy, ml_dtypes or torch:
    "float16", "bfloat16" or "float32"; or "int8" or "float8_e4m3fn", of which each row of d_head
    elements has a scale of its own, d_head + 4 bytes. What is stored is never scaled anew.
    seq_id, in every method: a sequence, by any hashable value. One that is unknown raises KeyError,
    a closed cache ClosedError.

    Containers' words work: ``"a" in cache``, ``len(cache)``, ``for seq_id in cache`` speak of the
    sequences. An empty cache is true all the same.

    Threads: one at a time may write (add_seq, fork, free, truncate, trim_front, append, import_seq,
    swap_in, swap_out, trim, close), any number may read (gather, export_seq, and attention over the
    cache), and not both: a second writer, or a reader beside a writer, raises ConcurrentUseError at
    once and changes nothing. Everything else may be called at any time from any thread; stats,
    snapshot, metrics, look and view wait for the end of a write, and the next write for theirs. Who
    hands tables to ``paged_attention`` himself sees to it that nobody frees those sequences
    meanwhile.
    A call that an exception of a signal handler ends (KeyboardInterrupt) has done all or nothing.

    Raises: TypeError for a size that is missing, both num_blocks and memory, and another dtype;
    ValueError for a size that is no positive integer below 2**32 (num_blocks: 2**31), memory that
    holds no block, or a pool beyond the address space; OutOfMemory for memory that is not there;
    TlError (``TL_ENOMEM``) where it cannot be reserved.
    """

    _instead = (
        "its blocks belong to one pool; fork begins a sequence with what another holds, export_seq "
        "and import_seq take one to another cache"
    )
    num_blocks: int
    block_size: int
    n_layers: int
    n_kv_heads: int
    d_head: int
    dtype: str
    layers: tuple[Layer, ...]
    _window = 0  # what rows see of a sequence, where that is always the same
    _callers = 2  # frames of this package that a warning of append passes over, and one

    def __new__(cls, *args: Any, layers: Any = None, **more: Any) -> PagedKVCache:
        """With ``layers`` of several kinds, or with a window, a LayeredKVCache."""
        if cls is PagedKVCache and layers is not None:
            kinds = set(checked_layers("PagedKVCache", layers))
            if len(kinds) > 1 or kinds.pop().window:
                from tinyllm.infer.layered import LayeredKVCache

                cls = LayeredKVCache
        return super().__new__(cls)

    @overload
    def __init__(
        self,
        lib: Lib | None,
        num_blocks: int,
        block_size: int,
        n_layers: int,
        n_kv_heads: int,
        d_head: int,
        *,
        dtype: Any = "float16",
        trim_above: int | str | None = None,
        cold: Store | None = None,
    ) -> None: ...

    @overload
    def __init__(
        self,
        *,
        num_blocks: int,
        block_size: int,
        n_layers: int,
        n_kv_heads: int,
        d_head: int,
        dtype: Any = "float16",
        trim_above: int | str | None = None,
        cold: Store | None = None,
        lib: Lib | None = None,
    ) -> None: ...

    @overload
    def __init__(
        self,
        *,
        memory: int | str,
        block_size: int,
        n_layers: int,
        n_kv_heads: int,
        d_head: int,
        dtype: Any = "float16",
        force: bool = False,
        trim_above: int | str | None = None,
        cold: Store | None = None,
        lib: Lib | None = None,
    ) -> None: ...

    @overload
    def __init__(
        self,
        lib: Lib | None = None,
        *,
        num_blocks: int,
        block_size: int,
        layers: Sequence[Layer],
        slack: int = SLACK,
        dtype: Any = "float16",
    ) -> None: ...

    def __init__(
        self,
        lib: Lib | None = None,
        num_blocks: int = _NEEDED,
        block_size: int = _NEEDED,
        n_layers: int = _NEEDED,
        n_kv_heads: int = _NEEDED,
        d_head: int = _NEEDED,
        *,
        dtype: Any = "float16",
        memory: int | str | None = None,
        force: bool = False,
        trim_above: int | str | None = None,
        cold: Store | None = None,
        layers: Sequence[Layer] | None = None,
        slack: int = SLACK,
    ) -> None:
        fn = "PagedKVCache"
        if layers is not None:
            refuse_both(fn, "layers", n_layers=n_layers, n_kv_heads=n_kv_heads, d_head=d_head)
            integer(fn, "slack", slack, 0, INT32_MAX, ValueError)
            n_layers, n_kv_heads, d_head = len(layers), layers[0].n_kv_heads, layers[0].d_head
        if memory is not None:
            refuse_both(fn, "memory", num_blocks=num_blocks)
        given = (1 if memory is not None else num_blocks, block_size, n_layers, n_kv_heads, d_head)
        missing = [name for name, n in zip(_SIZES, given, strict=True) if n is _NEEDED]
        if missing:
            raise TypeError(f"{fn}: {', '.join(missing)} must be given")
        if lib is not None and not isinstance(lib, Lib):
            raise TypeError(f"{fn}: lib must be a Lib or None, not {lib!r}")
        for (name, high), n in zip(_SIZES.items(), given, strict=True):
            setattr(self, name, integer(fn, name, n, 1, high, ValueError))
        form = format_named(fn, dtype)
        if memory is not None:
            strip = form.strip_bytes(self.block_size, self.d_head)
            block_bytes = 2 * self.n_layers * self.n_kv_heads * strip
            self.num_blocks = blocks_within(fn, memory, block_bytes, force=force)
        self._trim_above = (
            None if trim_above is None else byte_count(fn, "trim_above", trim_above, 0)
        )
        self.lib = lib = load() if lib is None else lib
        self._handle = Handle(fn, lib.tl_kv_pool_destroy)
        self._prefixes = Prefixes(lib, self._handle, self.block_size)
        for release in (self._handle.release, self._prefixes.release):
            # Handle has its own way to end with the interpreter.
            weakref.finalize(self, release).atexit = False
        self._blocks, self.dtype = Blocks(lib, self._handle, form), form.name
        self._sequences: dict[Hashable, CachedSequence] = {}
        self._cold: ColdTier | None = None
        if cold is not None:
            from tinyllm.infer.cold import ColdTier

            self._cold = ColdTier(fn, cold, self._blocks, self._prefixes)
            self._blocks.before_taking = self._cold.before_taking
        self._spare: list[BatchTable] = []
        self._copies = self._failures = 0
        self._warned = False  # of values that the dtype has nothing for
        try:
            self._blocks.create(*(getattr(self, name) for name in _SIZES))
        except TlError as error:
            if error.status == TL_EINVAL:
                raise ValueError(f"PagedKVCache: {error.reason}") from error
            raise
        self.layers = (Layer(self.n_kv_heads, self.d_head),) * self.n_layers

    # --- sequences
    # ------------------------------------------------------------------------------------------

    def add_seq(
        self,
        seq_id: Hashable,
        tokens: Any = None,
        namespace: bytes = b"",
        *,
        leave: int = 0,
        whole_blocks: bool = False,
    ) -> int:
        """Begins a sequence with what is there already of the positions of ``tokens``: K and V of
        all layers that other sequences, living or ended, have computed for the same first tokens.
        How many positions that is; the caller computes and appends the rest.

        >>> n = cache.add_seq("b", tokens=prompt, leave=1)  # the last token's output is wanted
        >>> for layer in range(cache.n_layers):
        ...     cache.append("b", layer, k[layer], v[layer])  # of prompt[n:]

        tokens: ids, integers below 2**32 in one dimension; None, which finds nothing: an empty
        sequence. All of them count as said (``extend``), found or not.
        namespace: any bytes, a model, an adapter, a tenant's salt. Tokens are found that were said
        under equal bytes, and no others.
        leave: how many of the last tokens are not to be found.
        whole_blocks: what is found ends with a block; else anywhere, and the next append copies the
        block that it ends in. Where a namespace has users who must not guess each other's texts by
        the time that theirs take, whole blocks make that a matter of 16 tokens at once instead of
        one.

        Raises: ValueError where ``seq_id`` is live, for ids and a ``leave`` out of range;
        TypeError for what are no tokens or no bytes.
        """
        said = array("I") if tokens is None else tokens_of("add_seq", tokens)
        text = Text(namespace_of("add_seq", namespace), said)
        asked = len(said) - integer("add_seq", "leave", leave, 0, INT32_MAX)
        kept = self._asked(text, asked)
        with self._handle.write(), self._handle.turn:
            self._settle()
            self._refuse_live("add_seq", seq_id)
            table, found = np.empty(0, np.uint32), 0
            if asked > 0:
                self._enter_all()
                room = self._blocks.room(-(-asked // self.block_size))
                found = self._prefixes.match(text, asked, room)
                self._blocks.stats()
                text.entered, within = divmod(found, self.block_size)
                if whole_blocks and within:
                    self._blocks.commit(*self._blocks.without(room, text.entered))
                    found -= within
                table = room[: -(-found // self.block_size)].copy()
            told = None if tokens is None and not text.namespace else text
            begun = CachedSequence(table, [found] * self.n_layers, 0, told)
            self._blocks.commit(
                partial(self._sequences.__setitem__, seq_id, begun), self._blocks.keep()
            )
            return self._warmed(begun, found, kept) if kept else found

    def _asked(self, text: Text, n_tokens: int) -> dict[int, NDArray[np.uint8]]:
        """Envelopes of blocks that the cold tier has behind what the pool has, by their place.
        Nobody waits for the store."""
        if self._cold is None or n_tokens < self.block_size:
            return {}
        with self._handle.read():
            first = self._prefixes.peek(text.namespace, text.tokens[:n_tokens]) // self.block_size
        found = self._cold.ask(text, first, n_tokens // self.block_size)
        return dict(enumerate(found, first))

    def _warmed(
        self, sequence: CachedSequence, found: int, kept: dict[int, NDArray[np.uint8]]
    ) -> int:
        """Puts what the cold tier had behind the positions ``found``, in place of a block that they
        end in, as far as there is room; how many there are then."""
        first = found // self.block_size
        stats = self._blocks.stats()
        envelopes: list[NDArray[np.uint8]] = []
        while first + len(envelopes) in kept and len(envelopes) < stats.free + stats.cached:
            envelopes.append(kept[first + len(envelopes)])
        if not envelopes:
            return found
        fresh = self._blocks.load_all(envelopes, len(envelopes))
        table = np.concatenate((sequence.table[:first], fresh))
        length = len(table) * self.block_size
        self._blocks.commit(
            self._blocks.unref(sequence.table[first:].tolist()),
            partial(setattr, sequence, "table", table),
            partial(setattr, sequence, "lengths", [length] * self.n_layers),
            self._blocks.keep(),
        )
        return length

    def extend(self, seq_id: Hashable, tokens: Any) -> None:
        """Says which tokens follow those that were said of a sequence so far: those whose K and V
        were appended, or will be next. Full blocks of which every layer's K and V are there and
        whose tokens were said are found by ``add_seq`` from then on, this sequence living or not.

        Where another sequence has computed the same block meanwhile, this one takes that up and
        gives its own back, so its table may change.

        Raises: TypeError, ValueError for what are no tokens, as ``add_seq``; ValueError where with
        them fewer tokens are said than the longest layer holds, or where blocks hold other tokens
        already than those. Then nothing has changed.
        """
        more = tokens_of("extend", tokens)
        with self._handle.write(), self._handle.turn:
            self._settle()
            sequence = self._sequence("extend", seq_id)
            text = sequence.text or Text(b"", array("I"))
            said, held = len(text.tokens) + len(more), max(sequence.lengths)
            if said < held:
                raise ValueError(
                    f"extend: sequence {seq_id!r} holds {held} positions, and with these {said} "
                    "tokens are said"
                )
            self._blocks.commit(
                partial(text.tokens.extend, more), partial(setattr, sequence, "text", text)
            )
            try:
                self._enter(sequence, exchange=True)
            except TlError as error:
                if error.status not in (TL_EBUSY, TL_EINVAL):
                    raise
                del text.tokens[said - len(more) :]
                raise ValueError(f"extend: sequence {seq_id!r}: {error.reason}") from error

    def fork(self, parent: Hashable, child: Hashable) -> None:
        """Begins ``child`` with everything ``parent`` holds. They share its blocks until one of
        them writes.

        Raises: ValueError where ``child`` is live.
        """
        with self._handle.write(), self._handle.turn:
            self._settle()
            source = self._sequence("fork", parent)
            self._refuse_live("fork", child)
            self._blocks.commit(*self._forked(source, child))

    def _forked(self, source: CachedSequence, child: Hashable) -> list[Step]:
        text = source.text.copy() if source.text else None
        twin = CachedSequence(source.table, source.lengths, source.gone, text)
        return [
            partial(self._sequences.__setitem__, child, twin),
            self._blocks.ref(source.blocks()),
        ]

    def free(self, seq_id: Hashable) -> None:
        """Ends a sequence and gives up its blocks, the last one first. Those whose tokens were said
        can be found until others need their room: the least recently used go first, and of a text
        its end.
        """
        with self._handle.write(), self._handle.turn:
            self._settle()
            sequence = self._sequence("free", seq_id)
            with contextlib.suppress(TlError):
                self._enter(sequence)
            self._blocks.commit(
                partial(self._sequences.pop, seq_id), self._blocks.unref(sequence.blocks())
            )
            self._trim_idle()

    def truncate(self, seq_id: Hashable, length: int, *, unsay: bool = True) -> None:
        """Forgets what a sequence holds from position ``length`` on, in every layer, and gives up
        the blocks that lie wholly behind it, the last one first: a draft that was not accepted.

        unsay: forgets the tokens said of these positions too; False where the same ones will be
        appended again, as after a forward that failed.
        A cut block that another sequence or the prefix index holds stays as it is for them, and the
        next append copies it.

        Raises: TypeError for a length that is no integer; ValueError for one beyond the longest
        layer, or one other than 0 in what ``trim_front`` gave back. Then nothing has changed.
        """
        with self._handle.write(), self._handle.turn:
            self._settle()
            sequence = self._sequence("truncate", seq_id)
            length = integer("truncate", "length", length, 0, max(sequence.lengths))
            self._blocks.commit(*self._cut(seq_id, sequence, length, unsay))
            self._trim_idle()

    def _cut(
        self, seq_id: Hashable, sequence: CachedSequence, length: int, unsay: bool = True
    ) -> list[Step]:
        """What ``truncate`` changes, of a length that is in range. Raises ValueError for one in
        what was given back."""
        if 0 < length < self._least_length(sequence):
            sees = f", and a row sees {self._window} positions" if self._window else ""
            raise ValueError(
                f"truncate: length = {length} of sequence {seq_id!r}, whose positions before "
                f"{sequence.gone * self.block_size} were given back{sees}"
            )
        keep = -(-length // self.block_size)
        lengths = [min(held, length) for held in sequence.lengths]
        fill: list[Step] = []  # of the block that is cut, where it is this sequence's alone
        if length % self.block_size and self._blocks.is_writable(int(sequence.table[keep - 1])):
            cut = fill_of(min(lengths), keep - 1, self.block_size)
            fill = [self._blocks.set_fills([(int(sequence.table[keep - 1]), cut)])]
        said = sequence.text.cut(length, self.block_size, unsay) if sequence.text else []
        return [
            *said,
            partial(setattr, sequence, "table", sequence.table[:keep].copy()),
            partial(setattr, sequence, "lengths", lengths),
            partial(setattr, sequence, "gone", min(sequence.gone, keep)),
            *fill,
            self._blocks.unref(sequence.blocks()[max(0, keep - sequence.gone) :]),
        ]

    def _least_length(self, sequence: CachedSequence) -> int:
        """How far ``truncate`` can go back, but for 0: behind it a row finds all that it sees."""
        if not sequence.gone:
            return 0
        least = sequence.gone * self.block_size + max(self._window - 1, 0)
        return min(least, *sequence.lengths)

    def trim_front(self, seq_id: Hashable, window: int) -> None:
        """Gives up the blocks that no layer's last ``window`` positions reach: a model that sees no
        further has no use for them.

        The lengths stay, and so do the places in the table: -1 there. Attention with that window or
        a smaller one goes on as before; what would read the lost positions raises ValueError.

        Raises: TypeError for a window that is no integer, ValueError for one below 1.
        """
        with self._handle.write(), self._handle.turn:
            self._settle()
            sequence = self._sequence("trim_front", seq_id)
            window = integer("trim_front", "window", window, 1, INT64_MAX)
            self._blocks.commit(*self._begun_at(sequence, min(sequence.lengths) - window))
            self._trim_idle()

    def _begun_at(self, sequence: CachedSequence, first: int) -> list[Step]:
        """Gives up the blocks that lie wholly before position ``first``."""
        gone = max(sequence.gone, first // self.block_size)
        freed = sequence.blocks()[: gone - sequence.gone]
        if not freed:
            return []
        table = sequence.table.copy()
        table[:gone] = NO_BLOCK
        return [
            partial(setattr, sequence, "table", table),
            partial(setattr, sequence, "gone", gone),
            self._blocks.unref(freed),
        ]

    def append(self, seq_id: Hashable, layer: int, k: Tensor, v: Tensor) -> None:
        """Adds T >= 1 positions to one layer of a sequence.

        k, v: [n_kv_heads, T, d_head], any strides: float16, float32 or bfloat16, or any other real
        numbers, in numpy's arrays, tensors or lists. They are not kept. What both are of the
        cache's own dtype is stored bit for bit. Else they are rounded to it, float16, bfloat16 and
        float32 once, others to float32 first, unless the cache is float16 (to nearest, ties to
        even; overflow is infinity, NaN 0x7E00 in float16, 0x7FC0 in bfloat16). In int8 and
        float8_e4m3fn a row has the scale largest |x| / 127, or / 448, and a row with NaN or
        infinity is NaN (``tl_store_i8_f32``). Copied on the way is what is none of the three, what
        has no contiguous last axis, and K and V of two types.
        Blocks about to be written that another sequence holds, or that are registered in the prefix
        index, are copied first.

        Raises: OutOfBlocks where the pool cannot give all blocks needed; TypeError for what are no
        arrays of real numbers; ValueError for a bad shape or layer. Then nothing has changed.
        Warns: UserWarning, once a cache, of the first values that the dtype has nothing for. They
        are stored as said, and counted in ``stats()``.
        """
        layer = self._layer("append", layer)
        rows = self._blocks.rows("append", k, v, by_head=True)
        n = len(rows.k)
        starts = None if n == 1 else np.array((0, n))
        lost = self._append("append", [seq_id], layer, rows, starts, [n], None)
        if lost:
            warnings.warn(lost, UserWarning, stacklevel=self._callers)

    def append_batch(
        self,
        seq_ids: Sequence[Hashable],
        layer: int,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor | None = None,
        *,
        threads: int | ThreadPool | None = None,
    ) -> None:
        """``append`` for a step of many sequences: the same bits, in one call.

        seq_ids: the sequences, each once.
        k, v: [total, n_kv_heads, d_head], any strides, the tokens of one sequence behind those of
        the one before; types as for ``append``.
        cu_seqlens: integers [B+1] that rise from 0 to total: sequence s gets the tokens from
        cu_seqlens[s] up to cu_seqlens[s+1], which may be none. None: one each.
        threads: who works where it pays; None is the calling thread, a count or a ThreadPool as for
        ``paged_attention``.

        The blocks of a step are taken when its first layer is appended, all or none.

        >>> for layer in range(n_layers):
        ...     cache.append_batch(["a", "b"], layer, k, v)  # [2, n_kv_heads, d_head]

        Raises: OutOfBlocks, also where ``needs`` would say it; TypeError for what are no arrays of
        real numbers, or no list of ids; ValueError for a bad shape or layer, for cu_seqlens that do
        not fit, or a sequence that is named twice; ClosedError; ConcurrentUseError. Then nothing
        has changed.
        Warns: as ``append``.
        """
        fn = "append_batch"
        layer = self._layer(fn, layer)
        seq_ids = ids_in_order(fn, seq_ids)
        rows = self._blocks.rows(fn, k, v, by_head=False)
        starts, counts = starts_and_counts(fn, cu_seqlens, len(seq_ids), len(rows.k))
        if len(set(seq_ids)) != len(seq_ids):
            twice = next(seq_id for seq_id in seq_ids if list(seq_ids).count(seq_id) > 1)
            raise ValueError(f"{fn}: sequence {twice!r} is named twice")
        workers = handle_of(fn, threads, self.lib)
        lost = self._append(fn, seq_ids, layer, rows, starts, counts, workers)
        if lost:
            warnings.warn(lost, UserWarning, stacklevel=self._callers)

    def needs(self, n_tokens: Mapping[Hashable, int]) -> Needs:
        """What a step would take from the pool; nothing is taken. It finds its blocks where
        ``total`` is not above ``available``.

        n_tokens: how many tokens each sequence gets, in every layer. Where the layers of one hold
        different numbers of positions, they are counted from the longest on.

        >>> cache.needs({"a": 1, "prompt": 512})
        Needs(fresh=32, copies=1, available=200)

        Raises: TypeError for what is no mapping of integers; ValueError for a number below 0, or
        positions that no int32 counts.
        """
        if not isinstance(n_tokens, Mapping):
            raise TypeError(
                f"needs: n_tokens must be a mapping of ids to numbers, not {n_tokens!r}"
            )
        counts = [
            integer("needs", f"n_tokens[{seq_id!r}]", n, 0, INT32_MAX)
            for seq_id, n in n_tokens.items()
        ]
        b = self.block_size
        with self._handle.look():
            self._settle()
            sequences = self._found("needs", list(n_tokens))
            lengths = [max(sequence.lengths) for sequence in sequences]
            ends = [length + n for length, n in zip(lengths, counts, strict=True)]
            if max(ends, default=0) > INT32_MAX:
                raise ValueError(f"needs: more than {INT32_MAX} positions")
            fresh = sum(
                [-(-end // b) - len(s.table) for s, end in zip(sequences, ends, strict=True)]
            )
            # One token says whether the last block, where it has room, is to be copied.
            first = [n > 0 and length % b > 0 for n, length in zip(counts, lengths, strict=True)]
            held = BatchTable.of([sequence.table for sequence in sequences], None, self._spare)
            starts = np.cumsum([0, *first]).astype(np.int32)
            copies = self._blocks.copies(held, starts, np.add(lengths, first).astype(np.int32))
            self._spare.append(held)
            stats = self._blocks.stats()
        return Needs(fresh, copies, stats.free + stats.cached)

    def _append(
        self,
        fn: str,
        seq_ids: Sequence[Hashable],
        layer: int,
        rows: Rows,
        starts: NDArray[Any] | None,
        counts: list[int],
        workers: Handle | None,
    ) -> str | None:
        """Both kinds of append. What a warning has to say, if any."""
        with self._handle.write(), self._handle.turn, reading(workers):
            self._settle()
            plan = Growth(self._found(fn, seq_ids), layer, counts, self.block_size)
            if max(plan.ends, default=0) > INT32_MAX:
                end, n = max(zip(plan.ends, counts, strict=True))
                raise ValueError(f"{fn}: {end - n} + {n} positions are more than {INT32_MAX}")
            if not len(rows.k):
                return None
            lengths, tp = np.array(plan.ends, np.int32), address_of(workers)
            starts = None if starts is None else starts.astype(np.int32, copy=False)
            try:  # most steps write to what is their sequences' alone
                held = self._room(fn, seq_ids, plan)
                self._blocks.write(layer, held, starts, lengths, rows, tp)
            except TlError as error:
                if error.status not in (TL_EBUSY, TL_EINVAL):  # of two writers it is TL_EINVAL
                    raise
                self._blocks.give_back()
                plan.copy_what_is_shared(self._blocks.is_writable)
                held = self._room(fn, seq_ids, plan)
                for old, new in plan.copied():
                    self._blocks.copy(old, new)
                self._blocks.give_up([old for old, _ in plan.copied() if old in plan.kept])
                self._blocks.write(layer, held, starts, lengths, rows, tp)
            if plan.n_more or plan.n_copies:  # held beside what they are copies of, for this moment
                self._blocks.stats()
            overflowed = self._blocks.overflowed + rows.overflowed
            self._blocks.commit(
                partial(setattr, self._blocks, "overflowed", overflowed), *self._grown(plan)
            )
            self._spare.append(held)
            return None if self._warned else self._lost(fn)

    def _lost(self, fn: str) -> str | None:
        """What a warning says, once, of values that the dtype has nothing for."""
        n = self._blocks.unrepresentable()
        if not n:
            return None
        self._warned = True
        form, values = self._blocks.form, plural(n, "appended value")
        return f"{fn}: {form.name} has nothing for {values} ({form.lost}); {form.advice}"

    def _grown(self, plan: Growth) -> list[Step]:
        """The second half of an append, which cannot fail: new tables and lengths take effect."""
        steps = [plan.set_lengths()]
        if plan.n_more or plan.n_copies:
            steps += [plan.set_tables(), self._blocks.keep()]
        steps += self._completed(plan)
        if plan.n_copies:
            steps += [
                self._blocks.set_fills(plan.fills_of_copies()),
                partial(setattr, self, "_copies", self._copies + plan.n_copies),
                self._blocks.unref([old for old, _ in plan.copied() if old not in plan.kept]),
            ]
        return steps

    def _completed(self, plan: Growth) -> list[Step]:
        """What follows where all layers of a sequence have reached a new length: this layer was
        the one that held the fills back, and their blocks are among those just written."""
        b, steps, fills = self.block_size, [], []
        for i, before, after in plan.completed:
            table, place = plan.tables[i], before // b
            if after <= (place + 1) * b:  # as in most steps: one block, which costs less
                fills.append((table.item(place), after - place * b))
            else:
                steps.append(self._blocks.set_length(table, before, after))
        return [*steps, self._blocks.set_fills(fills)] if fills else steps

    # --- the prefix index
    # -----------------------------------------------------------------------------------------

    def said(self, seq_id: Hashable) -> list[int]:
        """The tokens said of a sequence so far."""
        self._refuse_closed()
        text = self._sequence("said", seq_id).text
        return text.tokens.tolist() if text else []

    def match_len(self, tokens: Any, namespace: bytes = b"") -> int:
        """How many of the first ``tokens`` are there under a ``namespace``, of sequences that ended
        and of what living ones had said by the last ``extend`` or ``add_seq``; nothing is taken or
        counted.

        Raises: TypeError, ValueError as ``add_seq``.
        """
        said, under = tokens_of("match_len", tokens), namespace_of("match_len", namespace)
        with self._handle.read():
            return self._prefixes.peek(under, said)

    def pin(self, tokens: Any, namespace: bytes = b"") -> None:
        """Keeps the full blocks of ``tokens`` under a ``namespace``, a system prompt say, until
        ``unpin`` was called as often: they stay in use, whoever needs room.

        Raises: LookupError where they are not all there; TypeError, ValueError as ``add_seq``, and
        for fewer tokens than a block has.
        """
        self._named("pin", tokens, namespace, self._prefixes.pin)

    def unpin(self, tokens: Any, namespace: bytes = b"") -> None:
        """Takes back what ``pin`` did with the same ``tokens`` and ``namespace``.

        Raises: as ``pin``; LookupError for what is not pinned.
        """
        self._named("unpin", tokens, namespace, self._prefixes.unpin)

    def _named(self, fn: str, tokens: Any, namespace: bytes, change: Any) -> None:
        said, under = tokens_of(fn, tokens), namespace_of(fn, namespace)
        if len(said) < self.block_size:
            raise ValueError(f"{fn}: {len(said)} tokens fill no block of {self.block_size}")
        with self._handle.write(), self._handle.turn:
            self._settle()
            self._enter_all()
            change(under, said)

    def drop_namespace(self, namespace: bytes) -> None:
        """Forgets all that was said under ``namespace``, pins included: nobody finds it any more.
        Sequences under it that live go on, and nobody finds what they say either.

        Raises: TypeError for what are no bytes.
        """
        under = namespace_of("drop_namespace", namespace)
        with self._handle.write(), self._handle.turn:
            self._settle()
            texts = [s.text for s in self._sequences.values() if s.text]
            dropped = [partial(setattr, t, "dropped", True) for t in texts if t.namespace == under]
            self._blocks.commit(*dropped)
            self._prefixes.drop(under)

    def prefix_stats(self) -> dict[str, float]:
        """What the prefix index counts. ``queries``: sequences begun with tokens; ``tokens_asked``
        and ``tokens_found``: theirs. ``blocks``, ``namespaces`` and ``pins``: held now.
        ``evictions``: blocks of it that others took; ``mean_age``, ``last_age``: seconds that those
        had lain unused. Young ones say that the pool is too small."""
        with self._handle.look():
            self._refuse_closed()
            return self._prefixes.counts()._asdict()

    def _enter_all(self) -> None:
        """``_enter`` for every sequence, before the index is asked. One that said other tokens of a
        block than its fork did hears of it from its own ``extend``."""
        for sequence in self._sequences.values():
            with contextlib.suppress(TlError):
                self._enter(sequence)

    def _enter(self, sequence: CachedSequence, *, exchange: bool = False) -> None:
        """Enters the full blocks whose tokens are said and whose K and V are all there. Those that
        have twins are exchanged for them, or left to the next call that may. Raises TlError."""
        text = sequence.text
        if text is None or text.dropped or sequence.gone > 0:  # without its beginning it is none
            return
        n = min(len(text.tokens), min(sequence.lengths)) // self.block_size - text.entered
        if n <= 0:
            return
        twins = self._blocks.room(n)
        self._prefixes.enter(text, sequence.table, twins)
        places = np.flatnonzero(twins != NO_BLOCK)
        if len(places) and not exchange:
            self._blocks.commit(partial(setattr, text, "entered", text.entered + int(places[0])))
            self._blocks.give_back()
            return
        steps = [partial(setattr, text, "entered", text.entered + n), self._blocks.keep()]
        if len(places):
            own, table = sequence.table[text.entered + places].tolist(), sequence.table.copy()
            table[text.entered + places] = twins[places]
            steps += [partial(setattr, sequence, "table", table), self._blocks.unref(own)]
        self._blocks.commit(*steps)

    # --- memory
    # ---------------------------------------------------------------------------------------------

    def trim(self, keep: int = 0) -> int:
        """Gives the memory of free blocks back to the system, but for the ``keep`` that were freed
        last, and says how many bytes that were: whole pages. It is taken again when they are used.

        Raises: TypeError for what is no integer; ValueError for one below 0 or above 2**32-1;
        TlError (``TL_EIO``) where the system refuses.
        """
        keep = integer("trim", "keep", keep, 0, UINT32_MAX)
        with self._handle.write(), self._handle.turn:
            self._settle()
            return self._blocks.trim(keep)

    def _trim_idle(self) -> None:
        """Gives memory back where free blocks hold more than ``trim_above``. Down to half of it, so
        that the next few blocks do not call the system again."""
        if self._trim_above is not None and self._blocks.idle_bytes() > self._trim_above:
            with contextlib.suppress(TlError):  # the blocks are free, whatever becomes of pages
                self._blocks.trim(self._trim_above // 2 // self._blocks.block_bytes)

    # --- moving
    # ---------------------------------------------------------------------------------------------

    def export_seq(self, seq_id: Hashable) -> bytearray:
        """What a sequence holds, as bytes for ``import_seq`` of a cache of the same sizes and
        dtype, anywhere: K and V of all layers, scales included, with a checksum (the envelope of
        ``tl_kv_export``), a function of what was stored.

        Raises: ValueError where layers hold different numbers of positions or none, or where
        ``trim_front`` gave blocks back.
        """
        with self._handle.read():
            sequence = self._sequence("export_seq", seq_id)
            self._refuse_gone("export_seq", seq_id, sequence, 0)
            low, high = min(sequence.lengths), max(sequence.lengths)
            if low != high or high == 0:
                raise ValueError(
                    f"export_seq: the layers of sequence {seq_id!r} hold {low} to {high} "
                    "positions; all must hold the same number, at least one"
                )
            last = len(sequence.table) - 1
            fills = np.full((last + 1, self.n_layers), self.block_size)
            fills[last] = fill_of(high, last, self.block_size)
            if self.lib.tl_kv_fill(self.pool, int(sequence.table[last])) != fills[last, 0]:
                # Another sequence, from which this one was forked and then cut, holds more of it.
                return bytearray(self._blocks.envelope(sequence.blocks(), fills))
            return self._blocks.export(sequence.table)

    def import_seq(self, seq_id: Hashable, envelope: bytes | bytearray | memoryview) -> None:
        """Begins a sequence with ``envelope``, which ``export_seq`` made: every bit of K and V, in
        other blocks.

        Any bytes are safe. The pool may have more or fewer blocks than the one they come from.

        Raises: TypeError for what holds no bytes; ValueError where ``seq_id`` is live, and for
        bytes that are damaged, of a cache of other sizes or another dtype, or of no sequence;
        OutOfBlocks. Then nothing has changed.
        """
        with self._handle.write(), self._handle.turn:
            self._settle()
            self._refuse_live("import_seq", seq_id)
            sequence = self._loaded(seq_id, bytes_of(envelope))
            self._blocks.commit(
                partial(self._sequences.__setitem__, seq_id, sequence), self._blocks.keep()
            )

    def _loaded(self, seq_id: Hashable, memory: NDArray[np.uint8]) -> CachedSequence:
        """The sequence of an envelope, in blocks that are fresh. Raises as ``import_seq``."""
        try:
            table, length = self._blocks.load("import_seq", memory)
        except TlError as error:
            if error.status in (TL_EFORMAT, TL_ESHAPE):
                other = self._blocks.other_format(memory) if "version" in error.reason else None
                told = f"; it is {other}, and the cache {self.dtype}" if other else ""
                raise ValueError(f"import_seq: {error.reason}{told}") from error
            if error.status != TL_EFULL:
                raise
            self._failures += 1
            stats, needed = self._blocks.stats(), self._blocks.blocks_in(memory)
            raise OutOfBlocks(
                f"import_seq: sequence {seq_id!r}: {error.reason}",
                needed, stats.free, stats.cached,
            ) from error  # fmt: skip
        return CachedSequence(table, [length] * self.n_layers)

    def swap_out(
        self,
        seq_id: Hashable,
        store: Store,
        *,
        key: str | None = None,
        replace: bool = False,
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        """Takes a sequence out of the pool into ``store`` and frees its blocks; ``swap_in`` brings
        it back with every bit, in a cache of the same sizes and dtype, anywhere. Layers may hold
        different numbers of positions, and ``trim_front`` may have given some up. What was said of
        its tokens goes with it, and its blocks can be found as after ``free``.

        store: a dict, ``MemoryStore``, ``FileStore``, what ``open_store`` gives, or any mapping of
        str to bytes (``tinyllm.infer.stores.Store``). It gets entries of 64 MiB or one block.
        key: the name there, under which it writes "<key>/head", "<key>/0" and so on; None: one that
        follows from ``seq_id``, a str, int or bytes. replace: what the store has under it is
        forgotten, rather than refused. progress: called with the bytes of K and V done and to be
        done, first with 0; what it raises ends the swap.

        All is read back and compared before anything is freed. Until then others may read and write
        the cache, but not this sequence; the last step is a write.

        Raises: TypeError for an id that needs a key, and what is no store; ValueError where the
        store has that key; StoreError where it fails or gives other bytes back; ConcurrentUseError
        where the sequence was written meanwhile. Then it is in the cache as before, and what the
        store got is removed, unless that fails too.
        """
        from tinyllm.infer import offload

        offload.swap_out(self, seq_id, store, key, replace, progress)

    def swap_in(
        self,
        seq_id: Hashable,
        store: Store,
        *,
        key: str | None = None,
        keep: bool = False,
        progress: Callable[[int, int], object] | None = None,
    ) -> None:
        """Begins a sequence with what ``swap_out`` stored: every bit, in other blocks, and what was
        said of its tokens. Then the store's entries are removed, unless ``keep``.

        seq_id: may be another than it was; store, key, progress: as of ``swap_out``. What is read
        is kept beside the pool until the sequence is live, which is the only write.

        Raises: KeyError where the store has none; ValueError where ``seq_id`` is live, and for one
        of a cache of other sizes or another dtype; StoreError where the store fails, or what it
        gives is damaged, not whole or another's; OutOfBlocks; TypeError as ``swap_out``. Then
        nothing has changed, here and there.
        Warns: UserWarning where the sequence is live and the store does not remove its entries.
        """
        from tinyllm.infer import offload

        left = offload.swap_in(self, seq_id, store, key, keep, progress)
        if left:
            warnings.warn(f"{left}; the sequence is live", UserWarning, stacklevel=2)

    # --- looking
    # --------------------------------------------------------------------------------------------

    @property
    def pool(self) -> int:
        """The ``tl_kv_pool *``, for functions of ``lib``; valid until ``close()``."""
        return self._handle.address

    @property
    def nbytes(self) -> int:
        """Bytes of K and V of all blocks, scales included. They are reserved, and taken when a
        block is used."""
        self._refuse_closed()
        return self.num_blocks * self._blocks.block_bytes

    @property
    def resident_bytes(self) -> int:
        """How many of them have been taken from the system, in whole blocks: the used, the cached,
        and the free that ``trim`` has not given back."""
        self._refuse_closed()
        return self._blocks.touched * self._blocks.block_bytes

    def __contains__(self, seq_id: object) -> bool:
        self._refuse_closed()
        return seq_id in self._sequences

    def __iter__(self) -> Iterator[Hashable]:
        self._refuse_closed()
        return iter(list(self._sequences))  # of this moment, whoever writes during the loop

    def __len__(self) -> int:
        self._refuse_closed()
        return len(self._sequences)

    def __bool__(self) -> bool:
        return True

    def view(self, layer: int) -> KVView:
        """Where one layer lies, for ``paged_attention`` to read until ``close()``. Raises
        ValueError for a bad layer.

        >>> tables, lengths = [cache.block_table("a")], [cache.seq_len("a")]
        >>> out = paged_attention(q, cache.view(0), tables, lengths, cu_seqlens_q=[0, len(q)])
        """
        layer = self._layer("view", layer)
        with self._handle.look():
            self._refuse_closed()
            return KVView(
                self._blocks.view(layer), self.dtype, self, owner=self._handle, lib=self.lib
            )

    def batch(self, seq_ids: Sequence[Hashable]) -> Batch:
        """Some sequences for the calls of a step: ``paged_attention`` takes it in place of tables
        and lengths, which it holds in memory that is used again when the with block ends.

        >>> with cache.batch(["a", "b"]) as step:
        ...     for layer in range(n_layers):
        ...         cache.append_batch(step.seq_ids, layer, k, v)
        ...         out = paged_attention(q, step, layer)

        Raises: TypeError for what is no list of ids.
        """
        seq_ids = ids_in_order("batch", seq_ids)
        with self._handle.read():
            self._found("batch", seq_ids)
        return Batch(self, seq_ids)

    def block_table(self, seq_id: Hashable, layer: int = 0) -> NDArray[np.int32]:
        """A copy of the table: int32 [ceil(longest layer / block_size)]; -1 where ``trim_front``
        gave a block up. layer: one of those that share it, which are all but in a LayeredKVCache.

        Raises: ValueError for a bad layer.
        """
        self._refuse_closed()
        self._layer("block_table", layer)
        return self._sequence("block_table", seq_id).table.astype(np.int32)

    def seq_len(self, seq_id: Hashable, layer: int = 0) -> int:
        """Positions one layer of a sequence holds. Raises ValueError for a bad layer."""
        self._refuse_closed()
        return self._sequence("seq_len", seq_id).lengths[self._layer("seq_len", layer)]

    def least_length(self, seq_id: Hashable) -> int:
        """How far ``truncate`` can take a sequence back, but for 0: 0 where all positions are still
        there."""
        self._refuse_closed()
        return self._least_length(self._sequence("least_length", seq_id))

    def gather(self, seq_id: Hashable, layer: int) -> tuple[NDArray[Any], NDArray[Any]]:
        """Copies of one layer's K and V, [n_kv_heads, length, d_head] each: of a float16 cache
        float16, of another the float32 that its values are (in int8 and float8_e4m3fn scale *
        element, rounded once).

        Raises: ValueError for a bad layer, or a sequence whose front was trimmed.
        """
        k, v = self._gathered("gather", seq_id, layer, self._blocks.gather)
        return k, v

    def gather_codes(
        self, seq_id: Hashable, layer: int
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.float32], NDArray[np.float32]]:
        """Copies of what an int8 or float8_e4m3fn cache stores of one layer: K and V as int8, or
        as uint8 codes, [n_kv_heads, length, d_head], then their scales, float32
        [n_kv_heads, length].

        Raises: TypeError for a cache of another dtype; ValueError as ``gather``.
        """
        self._refuse_closed()
        if not self._blocks.form.has_scales:
            raise TypeError(f"gather_codes: the cache is {self.dtype}, which has no scales: gather")
        k, v, k_scales, v_scales = self._gathered(
            "gather_codes", seq_id, layer, self._blocks.gather_codes
        )
        return k, v, k_scales, v_scales

    def _gathered(self, fn: str, seq_id: Hashable, layer: int, of: Any) -> Any:
        layer = self._layer(fn, layer)
        with self._handle.read():
            sequence = self._sequence(fn, seq_id)
            self._refuse_gone(fn, seq_id, sequence, 0)
            return of(layer, sequence.table, sequence.lengths[layer])

    def stats(self) -> dict[str, int]:
        """Blocks ``free``, ``used`` and ``cached``, ``evictions`` so far, and ``unrepresentable``:
        how many appended values the dtype had nothing for."""
        with self._handle.look():
            self._settle()
            stats = self._blocks.stats()
        names = ("free", "used", "cached", "evictions", "unrepresentable")
        return {name: int(getattr(stats, name)) for name in names}

    def num_free_blocks(self) -> int:
        """Blocks that an append can take: free ones, and cached ones, which it may evict."""
        stats = self.stats()
        return stats["free"] + stats["cached"]

    def snapshot(self, path: str | os.PathLike[str] | None = None) -> Snapshot:
        """What the pool and its sequences look like now, for pictures and counters; with ``path``
        it is also written there (``Snapshot.save``). K and V are not part of it.

        It costs one pass over the states of all blocks, for which writers wait. Any thread may take
        it at any time, of a cache at work too: it shows a moment between two writes.

        Raises: OSError where ``path`` cannot be written.
        """
        taken, _ = self._taken()
        if path is not None:
            taken.save(path)
        return taken

    def _taken(self) -> tuple[Snapshot, list[Hashable]]:
        """A snapshot, and the ids of its sequences."""
        from tinyllm.observe.pool.snapshot import Snapshot, pool_blocks, sequence_state

        with self._handle.look():
            self._settle()
            stats = self._blocks.stats()
            sequences = tuple(
                sequence_state(seq_id, s.table, s.gone, s.lengths)
                for seq_id, s in self._sequences.items()
            )
            rows = pool_blocks(self.lib, self.pool, self.num_blocks, sequences)
            prefix = self._prefixes.counts()
            taken = Snapshot(
                num_blocks=self.num_blocks,
                block_size=self.block_size,
                n_layers=self.n_layers,
                n_kv_heads=self.n_kv_heads,
                d_head=self.d_head,
                block_bytes=self._blocks.block_bytes,
                dtype=self.dtype,
                blocks=rows,
                sequences=sequences,
                high_water=self._blocks.high_water,
                copies_on_write=self._copies,
                evictions=stats.evictions,
                failed_allocations=self._failures,
                unrepresentable=stats.unrepresentable,
                prefix_queries=prefix.queries,
                prefix_tokens_asked=prefix.tokens_asked,
                prefix_tokens_found=prefix.tokens_found,
                pinned=self._prefixes.pinned(rows["id"]) if prefix.pins else (),
            )
            return taken, list(self._sequences)

    def look(
        self,
        mass: Mapping[Hashable, NDArray[np.floating[Any]]] | None = None,
        *,
        sequences: Sequence[Hashable] | None = None,
        sort: str | None = None,
    ) -> Picture:
        """A picture of the pool and its block tables as they are now: printed it is text for a
        terminal, in a notebook SVG; ``look().save("cache.svg")`` keeps it.

        mass: what ``attention_mass`` says of a sequence, float [H,n] or [n], drawn beside its
        table. sequences: ids of those whose tables are shown, in this order; None is the first 20
        of all. sort: show those with most "blocks" or "tokens" first, or by "name". The map is of
        the whole pool, and a sequence keeps its letter and its colour, whichever are shown.

        >>> print(cache.look())
        >>> print(cache.look(sequences=["anna", "ben"]))

        Raises: KeyError for an unknown sequence in ``mass`` or ``sequences``; ValueError for one
        named twice, an unknown ``sort``, another shape than that of its table; TypeError for what
        is no list of ids, no float array.
        """
        from tinyllm.observe.pool.layout import listed
        from tinyllm.observe.pool.picture import Picture

        chosen = None if sequences is None else listed(sequences)
        taken, ids = self._taken()
        places = {seq_id: i for i, seq_id in enumerate(ids)}
        for seq_id in (*(mass or {}), *(chosen or [])):
            if seq_id not in places:
                raise KeyError(f"look: no sequence {seq_id!r}")
        return Picture(
            taken,
            {places[seq_id]: a for seq_id, a in (mass or {}).items()},
            sequences=None if chosen is None else [places[seq_id] for seq_id in chosen],
            sort=sort,
        )

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

        Raises: ConcurrentUseError while another thread is inside a call on this cache.
        """
        self._handle.close()
        self._forget()

    def __enter__(self) -> PagedKVCache:
        self._refuse_closed()
        return self

    def __exit__(self, kind: object, exception: object, traceback: object) -> None:
        self._handle.close_after(exception)
        if self._handle.closed:
            self._forget()

    def _forget(self) -> None:
        self._prefixes.release()
        self._sequences.clear()
        self._spare.clear()

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name}={getattr(self, name)}" for name in _SIZES)
        closed = ", closed" if self._handle.closed else ""
        return f"PagedKVCache({sizes}, dtype={self.dtype!r}{closed})"

    # --- inside
    # ---------------------------------------------------------------------------------------------

    def _found(self, fn: str, seq_ids: Sequence[Hashable]) -> list[CachedSequence]:
        try:
            return [self._sequences[seq_id] for seq_id in seq_ids]
        except KeyError as error:
            raise KeyError(f"{fn}: no sequence {error.args[0]!r}") from None

    def _refuse_closed(self) -> None:
        self._handle.address  # noqa: B018  it says so

    def _settle(self) -> None:
        """Before writes and looks: gives back the fresh blocks of a call that did not end well.
        Raises ClosedError."""
        self._refuse_closed()
        self._blocks.give_back()

    def _sequence(self, fn: str, seq_id: Hashable) -> CachedSequence:
        try:
            return self._sequences[seq_id]
        except KeyError:
            raise KeyError(f"{fn}: no sequence {seq_id!r}") from None

    def _refuse_live(self, fn: str, seq_id: Hashable) -> None:
        if seq_id in self._sequences:
            raise ValueError(f"{fn}: sequence {seq_id!r} is live already")

    def _refuse_gone(self, fn: str, seq_id: Hashable, sequence: CachedSequence, first: int) -> None:
        """Raises ValueError where position ``first`` was given back."""
        begin = sequence.gone * self.block_size
        if first < begin:
            giver = f"a window of {self._window}" if self._window else "trim_front"
            raise ValueError(
                f"{fn}: position {first} of sequence {seq_id!r} is needed, and {giver} gave up "
                f"those before {begin}"
            )

    def _layer(self, fn: str, layer: Any) -> int:
        return integer(fn, "layer", layer, 0, self.n_layers - 1, ValueError)

    def _number_of(self, layer: int) -> int:
        """What whoever made the cache calls a layer of it."""
        return layer

    def _of_layer(self, fn: str, layer: Any) -> tuple[PagedKVCache, int]:
        """The cache that holds a layer, and which one it is there. Raises ValueError for a bad
        one."""
        return self, self._layer(fn, layer)

    def _room(self, fn: str, seq_ids: Sequence[Hashable], plan: Growth) -> BatchTable:
        """The tables of an append with all its fresh blocks in them."""
        fresh = self._blocks.take(plan.n_copies + plan.n_more)
        if fresh is not None:
            plan.give(fresh)
            return BatchTable.of(plan.tables, None, self._spare)
        plan.copy_what_is_shared(self._blocks.is_writable)
        self._failures += 1
        stats = self._blocks.stats()
        one = fn == "append"
        who = f"sequence {seq_ids[0]!r} needs" if one else f"{len(seq_ids)} sequences need"
        raise OutOfBlocks(
            f"{fn}: {who} {plan.n_more} more blocks and {plan.n_copies} to copy what is shared; "
            f"{stats.free} are free and {stats.cached} cached of {self.num_blocks}",
            plan.n_more + plan.n_copies, stats.free, stats.cached,
        )  # fmt: skip


def ids_in_order(fn: str, seq_ids: Any) -> Sequence[Hashable]:
    """``seq_ids``. Raises TypeError for what is one string, or has no order or no length."""
    if type(seq_ids) in (list, tuple):
        return seq_ids  # type: ignore[no-any-return]
    unordered = isinstance(seq_ids, (str, bytes, bytearray, Mapping, Set))
    if unordered or not hasattr(seq_ids, "__len__") or not hasattr(seq_ids, "__iter__"):
        raise TypeError(f"{fn}: seq_ids must be a list of ids, not {seq_ids!r}")
    return seq_ids  # type: ignore[no-any-return]


def refuse_both(fn: str, told: str, **sizes: Any) -> None:
    """Raises TypeError where one of the sizes that follow from what was told is given too."""
    given = [name for name, n in sizes.items() if n is not _NEEDED]
    if given:
        raise TypeError(f"{fn}: {told} and {given[0]} are given, and one follows from the other")


def bytes_of(envelope: bytes | bytearray | memoryview) -> NDArray[np.uint8]:
    """What a caller hands over as bytes. Raises TypeError for what holds none."""
    return np.frombuffer(envelope, np.uint8) if len(envelope) else np.empty(0, np.uint8)
