# SPDX-License-Identifier: MIT
"""LayeredKVCache: a PagedKVCache whose layers are of different kinds, and give back what no window
reaches.

Words. kind: layers with the same KV heads, width and window. group: the layers of one kind, a
PagedKVCache of their own. Every group has the same sequences; a change of all of them is one commit
of the steps of each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from tinyllm._arrays import Tensor
from tinyllm._check import INT32_MAX, INT64_MAX, UINT32_MAX, integer
from tinyllm._kv_format import format_named
from tinyllm.errors import ConcurrentUseError, OutOfBlocks
from tinyllm.ffi.libtinyllm import Lib, Step
from tinyllm.infer.batch import Batch, CachedSequence, Needs
from tinyllm.infer.layers import Layer, checked_layers, kinds_of, named_layers
from tinyllm.infer.memory import blocks_within
from tinyllm.infer.paged import _NEEDED, SLACK, PagedKVCache, bytes_of, refuse_both
from tinyllm.infer.prefixes import namespace_of, tokens_of
from tinyllm.kv_view import KVView
from tinyllm.threads import ThreadPool

if TYPE_CHECKING:
    from tinyllm.infer.stores import Store
    from tinyllm.observe.pool.pictures import Pictures
    from tinyllm.observe.pool.snapshot import Snapshot

__all__ = ["LayerGroup", "LayeredKVCache"]

_T = TypeVar("_T")


class LayerGroup(PagedKVCache):
    """The layers of one kind in a LayeredKVCache, to be looked at: what is written to one group
    alone the others do not have. numbers: what the model calls its layers."""

    _callers = 3

    def __init__(
        self, lib: Lib | None, num_blocks: int, block_size: int, kind: Layer,
        numbers: Sequence[int], slack: int, dtype: Any, trim_above: int | str | None,
    ) -> None:  # fmt: skip
        super().__init__(
            lib, num_blocks, block_size, len(numbers), kind.n_kv_heads, kind.d_head, dtype=dtype,
            trim_above=trim_above,
        )  # fmt: skip
        self.kind, self.numbers, self.slack = kind, tuple(numbers), slack
        self.layers, self._window = (kind,) * self.n_layers, kind.window

    def _append(self, fn: str, seq_ids: Sequence[Hashable], *step: Any) -> str | None:
        """Appends, and then gives up what no row reaches that begins where the shortest layer
        ended, but for the slack."""
        begins = [min(sequence.lengths) for sequence in self._found(fn, seq_ids)]
        lost = super()._append(fn, seq_ids, *step)
        if self._window:
            self._give_back(seq_ids, begins)
        return lost

    def _give_back(self, seq_ids: Sequence[Hashable], begins: list[int]) -> None:
        firsts = [begin - self._window - self.slack for begin in begins]
        held = [self._sequences[seq_id].gone for seq_id in seq_ids]
        # A list: in a generator that is closed early an interrupt is not heard.
        if all([n // self.block_size <= gone for n, gone in zip(firsts, held, strict=True)]):
            return
        # Where a reader came in between, the next append does it.
        with suppress(ConcurrentUseError), self._handle.write(), self._handle.turn:
            self._settle()
            for seq_id, first in zip(seq_ids, firsts, strict=True):
                self._blocks.commit(*self._begun_at(self._sequences[seq_id], first))
            self._trim_idle()

    def _number_of(self, layer: int) -> int:
        return self.numbers[layer]

    def __repr__(self) -> str:
        closed = ", closed" if self._handle.closed else ""
        return f"<LayerGroup: layers {named_layers(self.numbers)}, {self.kind}{closed}>"


class LayeredKVCache(PagedKVCache):
    """What ``PagedKVCache(layers=[...])`` makes where layers are of several kinds, or have a
    window: a PagedKVCache that holds of each layer what its attention can see.

    >>> full, near = Layer(1, 256), Layer(1, 256, window=512)
    >>> layers = ([near] * 5 + [full]) * 4 + [near] * 2  # Gemma 3 1B
    >>> cache = PagedKVCache(num_blocks=1024, block_size=16, layers=layers)

    layers: a ``Layer`` for each layer. Those of one kind (the same KV heads, width and window) form
    a group, with ``num_blocks`` blocks of its own: memory that is reserved, and taken by blocks
    that are used. ``groups`` are in the order of their first layers.
    slack: positions that layers with a window keep beyond it. 0 or more.

    An append gives up the blocks of its group that lie wholly before L - window - slack, L being
    what all layers of the group held before it: no row at L or later reaches them, and ``truncate``
    can go back to L - slack. A sequence so holds, of a group with a window, window + slack
    positions, those of the last two steps and two blocks more at most, however long it is. What
    would read a position that was given up raises ValueError: a call with a larger window, gather,
    export_seq, and a truncate beyond the slack.

    Everything works as it does for a PagedKVCache, and what is said of a pool there is said of a
    group: OutOfBlocks where one group lacks blocks. stats() and nbytes are sums,
    num_free_blocks() the fewest of any group, block_table that of a layer; snapshot() gives one for
    each group, ``pool`` is there in the groups alone.

    Raises: as PagedKVCache; TypeError for layers that are none, or n_layers, n_kv_heads or d_head
    beside them; ValueError for no layers, and for a slack that is no integer below 2**31.
    """

    groups: tuple[LayerGroup, ...]

    def __init__(
        self,
        lib: Lib | None = None,
        num_blocks: int = _NEEDED,
        block_size: int = _NEEDED,
        n_layers: int = _NEEDED,
        n_kv_heads: int = _NEEDED,
        d_head: int = _NEEDED,
        *,
        layers: Sequence[Layer],
        slack: int = SLACK,
        dtype: Any = "float16",
        memory: int | str | None = None,
        force: bool = False,
        trim_above: int | str | None = None,
        cold: Store | None = None,
    ) -> None:
        fn = "PagedKVCache"
        if cold is not None:
            raise TypeError(f"{fn}: layers with windows keep no texts, so nothing goes to cold")
        refuse_both(fn, "layers", n_layers=n_layers, n_kv_heads=n_kv_heads, d_head=d_head)
        self.layers = checked_layers(fn, layers)
        self.slack = integer(fn, "slack", slack, 0, INT32_MAX, ValueError)
        if memory is not None:
            refuse_both(fn, "memory", num_blocks=num_blocks)
            b = integer(fn, "block_size", block_size, 1, UINT32_MAX, ValueError)
            form = format_named(fn, dtype)
            strips = [2 * of.n_kv_heads * form.strip_bytes(b, of.d_head) for of in self.layers]
            num_blocks = blocks_within(fn, memory, sum(strips), force=force)
        made: list[LayerGroup] = []
        try:
            for kind, numbers in kinds_of(self.layers).items():
                made.append(
                    LayerGroup(
                        lib, num_blocks, block_size, kind, numbers, self.slack, dtype, trim_above
                    )
                )
        except BaseException:
            for group in made:
                group.close()
            raise
        self.groups, first = tuple(made), made[0]
        self.lib, self.dtype, self.n_layers = first.lib, first.dtype, len(self.layers)
        self.num_blocks, self.block_size = first.num_blocks, first.block_size
        places = {number: (group, i) for group in made for i, number in enumerate(group.numbers)}
        self._places = [places[number] for number in range(self.n_layers)]
        # The first group says whether the cache is closed, and which sequences there are.
        self._handle, self._sequences = first._handle, first._sequences

    def __getattr__(self, name: str) -> Any:
        if name in ("n_kv_heads", "d_head"):
            sizes = {getattr(layer, name) for layer in self.layers}
            if len(sizes) == 1:
                return sizes.pop()
            raise AttributeError(f"{name} differs between layers: see cache.layers[i].{name}")
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")

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
        """As ``PagedKVCache.add_seq``; what it finds is nothing, 0: a text whose beginning windows
        have left is nobody's prefix."""
        if tokens is not None:
            tokens_of("add_seq", tokens)
        namespace_of("add_seq", namespace)

        def begun(group: LayerGroup) -> list[Step]:
            group._refuse_live("add_seq", seq_id)
            empty = CachedSequence(np.empty(0, np.uint32), [0] * group.n_layers)
            return [partial(group._sequences.__setitem__, seq_id, empty)]

        self._write(begun)
        return 0

    def fork(self, parent: Hashable, child: Hashable) -> None:
        def forked(group: LayerGroup) -> list[Step]:
            source = group._sequence("fork", parent)
            group._refuse_live("fork", child)
            return group._forked(source, child)

        self._write(forked)

    def free(self, seq_id: Hashable) -> None:
        def freed(group: LayerGroup) -> list[Step]:
            blocks = group._sequence("free", seq_id).blocks()
            return [partial(group._sequences.pop, seq_id), group._blocks.unref(blocks)]

        self._write(freed)

    def truncate(self, seq_id: Hashable, length: int, *, unsay: bool = True) -> None:
        """As ``PagedKVCache.truncate``. It can always go back ``slack`` positions from what all
        layers held before the last append, and to 0.

        Raises: TypeError, ValueError as there; ValueError also where a layer with a window would
        not find all that its next row sees.
        """

        def cut(group: LayerGroup) -> list[Step]:
            longest = max(max(g._sequence("truncate", seq_id).lengths) for g in self.groups)
            n = integer("truncate", "length", length, 0, longest)
            sequence = group._sequences[seq_id]
            if n >= max(sequence.lengths):
                return []
            return group._cut(seq_id, sequence, n)

        self._write(cut)

    def trim_front(self, seq_id: Hashable, window: int) -> None:
        window = integer("trim_front", "window", window, 1, INT64_MAX)

        def trimmed(group: LayerGroup) -> list[Step]:
            sequence = group._sequence("trim_front", seq_id)
            return group._begun_at(sequence, min(sequence.lengths) - window)

        self._write(trimmed)

    def append(self, seq_id: Hashable, layer: int, k: Tensor, v: Tensor) -> None:
        """As ``PagedKVCache.append``; then the layer's group gives up what no row reaches any
        more."""
        self._refuse_closed()
        group, i = self._of_layer("append", layer)
        try:
            group.append(seq_id, i, k, v)
        except OutOfBlocks as error:
            raise self._told(group, error) from error

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
        """As ``PagedKVCache.append_batch``, and as ``append`` here: the blocks are taken when the
        first layer of each group is appended."""
        self._refuse_closed()
        group, i = self._of_layer("append_batch", layer)
        try:
            group.append_batch(seq_ids, i, k, v, cu_seqlens, threads=threads)
        except OutOfBlocks as error:
            raise self._told(group, error) from error

    def needs(self, n_tokens: Mapping[Hashable, int]) -> Needs:
        """As ``PagedKVCache.needs``, of the group that has least to spare."""
        each = self._look(lambda group: group.needs(n_tokens))
        return max(each, key=lambda needs: needs.total - needs.available)

    def _told(self, group: LayerGroup, error: OutOfBlocks) -> OutOfBlocks:
        """``error``, which says of which layers it speaks."""
        return OutOfBlocks(
            f"{error}, for layers {named_layers(group.numbers)}",
            error.needed, error.free, error.cached,
        )  # fmt: skip

    # --- what takes a pool of one kind
    # ---------------------------------------------------------------------------------------------

    def extend(self, seq_id: Hashable, tokens: Any) -> None:
        """As ``PagedKVCache.extend``, and nobody finds it."""
        tokens_of("extend", tokens)
        self.seq_len(seq_id)

    def said(self, seq_id: Hashable) -> list[int]:
        """Nothing: what was said is not kept."""
        self.seq_len(seq_id)
        return []

    def match_len(self, tokens: Any, namespace: bytes = b"") -> int:
        """0: see ``add_seq``."""
        tokens_of("match_len", tokens), namespace_of("match_len", namespace)
        self._refuse_closed()
        return 0

    def pin(self, tokens: Any, namespace: bytes = b"") -> NoReturn:
        """Raises LookupError: see ``add_seq``."""
        self._refuse_text("pin", tokens, namespace)

    def unpin(self, tokens: Any, namespace: bytes = b"") -> NoReturn:
        """Raises LookupError: see ``add_seq``."""
        self._refuse_text("unpin", tokens, namespace)

    def _refuse_text(self, fn: str, tokens: Any, namespace: bytes) -> NoReturn:
        tokens_of(fn, tokens), namespace_of(fn, namespace)
        self._refuse_closed()
        raise LookupError(f"{fn}: a cache whose layers have windows keeps no texts")

    def drop_namespace(self, namespace: bytes) -> None:
        """Nothing is there to be dropped."""
        namespace_of("drop_namespace", namespace)
        self._refuse_closed()

    def prefix_stats(self) -> dict[str, float]:
        """As ``PagedKVCache.prefix_stats``: zeros."""
        return self.groups[0].prefix_stats()

    def swap_out(self, *args: Any, **more: Any) -> NoReturn:
        """Raises TypeError: a sequence leaves as ``export_seq`` gives it, while no window has gone
        past its beginning."""
        raise TypeError("swap_out: layers of several kinds are not offered; export_seq is")

    def swap_in(self, *args: Any, **more: Any) -> NoReturn:
        """Raises TypeError, as ``swap_out``."""
        raise TypeError("swap_in: layers of several kinds are not offered; import_seq is")

    def trim(self, keep: int = 0) -> int:
        """As ``PagedKVCache.trim``, of each group."""
        self._refuse_closed()
        return sum(group.trim(keep) for group in self.groups)

    # --- moving
    # ---------------------------------------------------------------------------------------------

    def export_seq(self, seq_id: Hashable) -> bytearray:
        """As ``PagedKVCache.export_seq``: the envelopes of all groups, one after the other.

        Raises: ValueError as there, and so for a sequence that a window has gone past.
        """

        def exported() -> bytearray:
            sequences = [group._sequence("export_seq", seq_id) for group in self.groups]
            held = {n for sequence in sequences for n in sequence.lengths}
            if len(held) > 1:
                raise ValueError(
                    f"export_seq: the layers of sequence {seq_id!r} hold {min(held)} to "
                    f"{max(held)} positions; all must hold the same number, at least one"
                )
            return bytearray().join(group.export_seq(seq_id) for group in self.groups)

        return _inside([group._handle.read for group in self.groups], exported)

    def import_seq(self, seq_id: Hashable, envelope: bytes | bytearray | memoryview) -> None:
        memory = bytes_of(envelope)

        def loaded() -> None:
            steps: list[Step] = []
            held = []
            for group, part in zip(self.groups, self._parted(memory), strict=True):
                group._refuse_live("import_seq", seq_id)
                try:
                    sequence = group._loaded(seq_id, part)
                except OutOfBlocks as error:
                    raise self._told(group, error) from error
                held.append(sequence.lengths[0])
                begun = partial(group._sequences.__setitem__, seq_id, sequence)
                steps += [begun, group._blocks.keep()]
            if len(set(held)) > 1:
                raise ValueError(f"import_seq: layers of {held} positions are no sequence's")
            self.groups[0]._blocks.commit(*steps)

        self._inside_all(loaded)

    def _parted(self, memory: NDArray[np.uint8]) -> list[NDArray[np.uint8]]:
        """The envelope of each group, by their own account of how long they are, which no one has
        checked; what is left is the last one's."""
        parts = []
        for group in self.groups[:-1]:
            n_blocks = int.from_bytes(memory[8:12].tobytes(), "little")
            size = int(self.lib.tl_kv_export_bytes(group.pool, n_blocks))
            parts.append(memory[:size])
            memory = memory[size:]
        return [*parts, memory]

    # --- looking
    # --------------------------------------------------------------------------------------------

    @property
    def pool(self) -> NoReturn:
        """Raises TypeError: there is one for each group."""
        raise TypeError("a LayeredKVCache has a pool for each kind of layer: cache.groups[i].pool")

    @property
    def nbytes(self) -> int:
        return sum(group.nbytes for group in self.groups)

    @property
    def resident_bytes(self) -> int:
        return sum(group.resident_bytes for group in self.groups)

    def view(self, layer: int) -> KVView:
        group, i = self._of_layer("view", layer)
        return group.view(i)

    def batch(self, seq_ids: Sequence[Hashable]) -> LayeredBatch:
        self._refuse_closed()
        return LayeredBatch(self, [group.batch(seq_ids) for group in self.groups])

    def block_table(self, seq_id: Hashable, layer: int = 0) -> NDArray[np.int32]:
        """As ``PagedKVCache.block_table``, of the group of ``layer``."""
        group, i = self._of_layer("block_table", layer)
        return group.block_table(seq_id, i)

    def seq_len(self, seq_id: Hashable, layer: int = 0) -> int:
        group, i = self._of_layer("seq_len", layer)
        return group.seq_len(seq_id, i)

    def least_length(self, seq_id: Hashable) -> int:
        self._refuse_closed()
        return max(group.least_length(seq_id) for group in self.groups)

    def gather(self, seq_id: Hashable, layer: int) -> tuple[NDArray[Any], NDArray[Any]]:
        group, i = self._of_layer("gather", layer)
        return group.gather(seq_id, i)

    def gather_codes(
        self, seq_id: Hashable, layer: int
    ) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.float32], NDArray[np.float32]]:
        group, i = self._of_layer("gather_codes", layer)
        return group.gather_codes(seq_id, i)

    def stats(self) -> dict[str, int]:
        """The sums of what the groups say; ``groups[i].stats()`` is that of one."""
        each = self._look(LayerGroup.stats)
        return {name: sum(stats[name] for stats in each) for name in each[0]}

    def num_free_blocks(self) -> int:
        """Blocks that an append to any layer can take: those of the group that has the fewest."""
        return min(self._look(LayerGroup.num_free_blocks))

    def snapshot(  # type: ignore[override]
        self, path: str | os.PathLike[str] | None = None
    ) -> tuple[Snapshot, ...]:
        """One for each group, all of the same moment. Raises TypeError for a path, which is of one:
        ``groups[i].snapshot(path)``."""
        if path is not None:
            raise TypeError("snapshot: a file holds one group: cache.groups[i].snapshot(path)")
        return tuple(self._look(LayerGroup.snapshot))

    def look(  # type: ignore[override]
        self, mass: Mapping[Hashable, NDArray[np.floating[Any]]] | None = None, layer: int = 0
    ) -> Pictures:
        """A picture of each group, one below the other. mass: as for ``PagedKVCache.look``, of
        ``layer``, drawn in its group.

        Raises: as there; ValueError for a bad layer.
        """
        from tinyllm.observe.pool.pictures import Pictures

        shown, _ = self._of_layer("look", layer)
        pictures = self._look(lambda group: group.look(mass if group is shown else None))
        return Pictures({repr(g): p for g, p in zip(self.groups, pictures, strict=True)})

    def metrics(self, **labels: str) -> str:
        """As ``PagedKVCache.metrics``, a line for each group, with the label ``layers``: "0-4,6".

        Raises: as there; ValueError for a label of that name.
        """
        from tinyllm.observe.pool.metrics import prometheus, together

        if "layers" in labels:
            raise ValueError("metrics: layers is the label that tells the groups apart")
        return together(
            prometheus(taken, {**labels, "layers": named_layers(group.numbers)})
            for group, taken in zip(self.groups, self.snapshot(), strict=True)
        )

    # --- lifetime
    # -------------------------------------------------------------------------------------------

    def close(self) -> None:
        try:
            _inside(self._writers(), self._end)
        except ConcurrentUseError as error:
            raise ConcurrentUseError(f"{error}, so it cannot be closed") from None

    def _end(self) -> None:
        """For who is inside all groups: the first goes first, for it says that all have gone."""
        for group in self.groups:
            group._handle._end()
        self._forget()

    def __enter__(self) -> LayeredKVCache:
        self._refuse_closed()
        return self

    def __exit__(self, kind: object, exception: object, traceback: object) -> None:
        try:
            self.close()
        except ConcurrentUseError:
            if exception is None:
                raise

    def _forget(self) -> None:
        for group in self.groups:
            group._forget()

    def __repr__(self) -> str:
        kinds = "; ".join(f"{named_layers(g.numbers)}: {g.kind}" for g in self.groups)
        closed = ", closed" if self._handle.closed else ""
        return (
            f"LayeredKVCache(num_blocks={self.num_blocks}, block_size={self.block_size}, "
            f"layers {kinds}, slack={self.slack}, dtype={self.dtype!r}{closed})"
        )

    # --- inside
    # ---------------------------------------------------------------------------------------------

    def _of_layer(self, fn: str, layer: Any) -> tuple[LayerGroup, int]:
        return self._places[self._layer(fn, layer)]

    def _write(self, changes: Callable[[LayerGroup], list[Step]]) -> None:
        """Makes the changes of every group at once, or none where one of them raises."""

        def made() -> None:
            steps = [step for group in self.groups for step in changes(group)]
            self.groups[0]._blocks.commit(*steps)
            for group in self.groups:
                group._trim_idle()

        self._inside_all(made)

    def _inside_all(self, do: Callable[[], _T]) -> _T:
        """``do()`` while nobody else is inside any group, and none has fresh blocks left over."""

        def settled() -> _T:
            for group in self.groups:
                group._settle()
            return do()

        return _inside(self._writers(), settled)

    def _writers(self) -> list[Callable[[], Any]]:
        handles = [group._handle for group in self.groups]
        return [enter for h in handles for enter in (h.write, partial(getattr, h, "turn"))]

    def _look(self, at: Callable[[LayerGroup], _T]) -> list[_T]:
        """What ``at`` says of each group, between two writes of all."""
        self._refuse_closed()
        return _inside(
            [group._handle.look for group in self.groups],
            lambda: [at(group) for group in self.groups],
        )


class LayeredBatch(Batch):
    """Some sequences of a LayeredKVCache: a batch of each group."""

    __slots__ = ("_each",)

    def __init__(self, cache: LayeredKVCache, each: list[Batch]) -> None:
        super().__init__(cache, each[0].seq_ids)
        self._each = dict(zip(cache.groups, each, strict=True))

    @property
    def tables(self) -> NoReturn:
        """Raises TypeError: each kind of layer has its own, ``cache.groups[i].batch(ids)``."""
        raise TypeError("each kind of layer has tables of its own: cache.groups[i].batch(ids)")

    def lengths(self, layer: int) -> NDArray[np.int32]:
        of, i = self._of_layer("lengths", layer)
        return of.lengths(i)

    def _of_layer(self, fn: str, layer: Any) -> tuple[Batch, int]:
        group, i = self._cache._of_layer(fn, layer)
        return self._each[group], i  # type: ignore[index]

    def __exit__(self, *exc: Any) -> None:
        for of in self._each.values():
            of.__exit__(*exc)


def _inside(enter: Sequence[Callable[[], Any]], do: Callable[[], _T]) -> _T:
    """``do()`` in the with blocks of what ``enter`` gives, one in the other. No ExitStack: out of a
    with block an interrupt leads through functions of C alone."""
    if not enter:
        return do()
    with enter[0]():
        return _inside(enter[1:], do)
