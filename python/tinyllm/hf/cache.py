# SPDX-License-Identifier: MIT
"""PagedCache: the cache of ``generate()``, whose keys and values lie in a PagedKVCache."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.masking_utils import create_causal_mask

from tinyllm._check import integer
from tinyllm._kv_format import format_named
from tinyllm.errors import ClosedError, OutOfBlocks
from tinyllm.hf.attention import MARK, seen_columns
from tinyllm.hf.config import kv_shape_of, layers_with, windows_of
from tinyllm.hf.rows import (
    Scoring,
    Tensor,
    Threads,
    as_stored,
    attend_sequences,
    in_a_row,
    new_f32,
    rows_of,
)
from tinyllm.infer.paged import SLACK, PagedKVCache

__all__ = ["CACHE_KEYWORD", "PagedCache"]

# What ``model(...)`` and ``generate()`` of this version call their cache: since 5.23 it is "cache".
CACHE_KEYWORD: Final = (
    "cache" if "cache" in signature(create_causal_mask).parameters else "past_key_values"
)

_names = itertools.count()  # ids of sequences: caches that share a pool never meet


@dataclass(frozen=True)
class _Past:
    """What a cache holds between two forwards: the same in every layer. Replaced, never changed."""

    rows: tuple[int, ...] = ()  # sequences of the pool, one a row of the batch
    n_columns: int = 0
    seen: Tensor | None = None  # bool [B,n_columns], False for padding; None: there is none

    def held(self) -> list[int]:
        """Positions of each sequence: its columns without the padding."""
        if self.seen is None:
            return [self.n_columns] * len(self.rows)
        counts: list[int] = self.seen.sum(1).tolist()
        return counts

    def first(self, n: int) -> _Past:
        """The first ``n`` columns of it; of none nothing is left, sequences included."""
        if n == 0:
            return _Past()
        return _Past(self.rows, n, None if self.seen is None else self.seen[:, :n])

    def chosen(self, rows: Sequence[int], names: tuple[int, ...]) -> _Past:
        """The same for other rows, which are called ``names``."""
        seen = None if self.seen is None else self.seen[list(rows)]
        return _Past(names, self.n_columns, seen)


@dataclass
class _Step:
    """One forward, the same for every layer. Of the sequences that bring tokens at all it says
    which columns those are, and where their rows begin among the rows that count."""

    before: _Past
    after: _Past
    mask: Tensor | None
    n_columns: int
    active: list[int]  # the sequences with tokens
    places: list[slice | NDArray[np.int64]]  # their columns of this forward that are no padding
    starts: NDArray[np.int32]
    picked: Tensor | None  # the rows that count, of [B*T]; None: all of them
    thread: int
    n_done: int = 0  # layers that have stored and attended


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """What transformers asks of one layer; every answer comes from the cache."""

    is_sliding = False  # columns are counted from the first one; the kernel sees the window
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, cache: PagedCache, index: int) -> None:
        super().__init__()
        self._cache, self._index = weakref.proxy(cache), index

    def lazy_initialization(self, *args: Any) -> None:
        self.is_initialized = True

    def update(
        self, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        self.is_initialized = True
        self._cache.offer(self._index, key)
        return key, value

    def get_seq_length(self) -> int:
        return int(self._cache.n_columns)

    def get_mask_sizes(self, query: Any) -> tuple[int, int]:
        """Keys of the next forward, and where they begin; ``query`` was a tensor before it became
        a count."""
        return self.get_seq_length() + (query if isinstance(query, int) else len(query)), 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before 5.23


class PagedCache(Cache):  # type: ignore[misc]
    """A cache for ``generate()`` and ``model(...)``, whose keys and values lie in blocks of a pool.

    >>> with PagedCache(model.config, num_blocks=512) as cache:
    # past_key_values=cache before 5.23
    ...     model.generate(ids, cache=cache, max_new_tokens=100)

    config: the model's. num_blocks: blocks of ``block_size`` positions, of all layers each; a
    sequence of n positions takes ceil(n / block_size), and every beam is a sequence. Their memory
    is reserved at the first forward and touched when it is used.
    prefix: a PagedKVCache of ``new_kv(model.config, ...)`` to lie in, instead of a pool of one's
    own: texts that went through it, by whichever cache, are found again (``recall``). Its sizes and
    its dtype are the ones that count, and it stays open.
    dtype: what keys and values are stored as, as for PagedKVCache: a name, or torch's dtype.
    slack: layers with a window give back what it has gone past, but for so many positions, which
    ``crop`` can always take back; None: they keep all, and ``crop`` goes back to any column.
    threads: what attention runs on: None is as many threads as torch uses, else as for
    ``paged_attention``.

    Beams, copies and repeated rows share blocks until they are written. ``copy.deepcopy`` makes
    such a copy of the whole cache: many turns can go on from one prompt. ``crop`` gives blocks
    back, ``reset`` all of them; the pool itself is kept until ``close``, before which copies should
    be done.
    ``kv`` is the PagedKVCache, None before the first forward; ``seq_ids`` the ids in it, one a row;
    ``n_columns`` how many columns the cache holds, padding included.
    Keys and values are stored as ``dtype``, float16 unless it is said: those of a model of another
    type are rounded once. Prompts are read back from there like everything else, so that no bit
    depends on how a text was brought.
    A row holds its tokens without the padding, wherever that lies: a window counts tokens.

    A forward is all or nothing: one that fails or is interrupted before its last layer has attended
    leaves the cache as it was, and can be called again. After that it is stored, whatever becomes
    of its logits: ``crop`` takes it back.
    One cache serves one model and one thread at a time. Where two run forwards at once, one of them
    raises RuntimeError, and the other is right.

    Raises: ValueError for a model whose layers need something else (another type of attention than
    full and sliding, keys shared by layers, no plain KV heads), and for sizes that are no positive
    integers; TypeError for another dtype.
    OutOfBlocks (in a forward) where the pool is too small: the cache is then as before that
    forward.
    """

    def __init__(
        self,
        config: Any,
        num_blocks: int = 1024,
        block_size: int = 16,
        *,
        dtype: Any = "float16",
        threads: Threads = None,
        prefix: PagedKVCache | None = None,
        slack: int | None = SLACK,
    ) -> None:
        fn = "PagedCache"
        self._windows = windows_of(fn, config)
        if prefix is not None:
            num_blocks, block_size, dtype = _sizes_of(fn, prefix, config, len(self._windows))
        if slack is not None:
            slack = integer(fn, "slack", slack, 0, 2**31 - 1, ValueError)
        self._slack = slack
        self._num_blocks = integer(fn, "num_blocks", num_blocks, 1, 2**31 - 1, ValueError)
        self._block_size = integer(fn, "block_size", block_size, 1, 2**32 - 1, ValueError)
        self._dtype = format_named(fn, dtype).name
        self._threads = threads
        self._begin(prefix)

    def _begin(self, kv: PagedKVCache | None) -> None:
        self._lock = threading.RLock()
        self._past = _Past()
        self._step: _Step | None = None
        self._unfinished = False  # the pool may hold more than ``_past`` says
        self._owned: list[int] = []  # every sequence begun here, before it is begun
        self._offered: tuple[int, int] | None = None  # layer and thread of keys nobody took yet
        self._chosen = False  # rows went other ways than ``recall`` knew
        self._closed, self._is_copy = False, kv is not None
        self._finalizer: Any = None
        self._use(kv)
        super().__init__(layers=[_Layer(self, i) for i in range(len(self._windows))])

    def _use(self, kv: PagedKVCache | None) -> None:
        if kv is not None:
            self._finalizer = weakref.finalize(self, _free, kv, self._owned)
        self.kv = kv

    def _leave(self) -> None:
        """Parts with a pool that holds nothing of this cache; copies may go on in it."""
        if self._finalizer is not None:
            self._finalizer.detach()
        self.kv, self._is_copy = None, False

    @property
    def n_columns(self) -> int:
        """Columns that every layer holds; those of a forward count when all layers have them."""
        return self._past.n_columns

    @property
    def seq_ids(self) -> list[int]:
        """The id of each row in ``kv``."""
        return list(self._past.rows)

    # --- texts that were there before
    # ----------------------------------------------------------------------------------------------

    def recall(self, input_ids: Tensor, namespace: bytes = b"") -> int:
        """Begins with what the pool still knows of a batch of prompts without padding: how many
        columns that is, at most all but the last. ``generate`` with the same ids and this cache
        then computes the rest, and ``remember`` lets others find it.

        >>> with PagedCache(model.config, prefix=kv) as cache:
        ...     cache.recall(ids)
        ...     ids = model.generate(ids, cache=cache, max_new_tokens=100)
        ...     cache.remember(ids)

        input_ids: [B,T], T >= 1. namespace: as for ``PagedKVCache.add_seq``.

        Raises: ValueError for a cache that holds something, or one made without ``prefix``; as
        ``add_seq``. Then the cache is as it was.
        """
        with self._lock:
            self._settle()
            kv = self.kv
            if kv is None or self._past.n_columns:
                what = "holds a text already: reset() first" if kv else "was made without prefix"
                raise ValueError(f"recall: this cache {what}")
            ids = _rows_of_ids("recall", input_ids)
            names = tuple(itertools.islice(_names, len(ids)))
            self._unfinished = True
            found = []
            for name, row in zip(names, ids, strict=True):
                self._owned.append(name)
                found.append(kv.add_seq(name, row, namespace, leave=1))
            for name in names:
                kv.truncate(name, min(found))  # what comes behind is said by ``remember``
            self._chosen = False
            self._become(_Past(names, min(found)))
            return min(found)

    def remember(self, sequences: Tensor) -> None:
        """Says which tokens the rows hold, so that other caches of the pool find them.

        sequences: [B,T], the ids of every row from its first on, as ``generate`` returns them; the
        columns that the cache holds of them count.

        Raises: ValueError where rows were chosen among beams or repeated, or are another number,
        and for fewer columns than the cache holds; as ``PagedKVCache.extend``.
        """
        with self._lock:
            self._settle()
            past, ids = self._past, _rows_of_ids("remember", sequences)
            if self._chosen or past.seen is not None or len(ids) != len(past.rows):
                raise ValueError(
                    f"remember: {len(ids)} texts, and the {len(past.rows)} rows of this cache have "
                    "to be as they were recalled: none chosen, repeated or padded"
                )
            if min(map(len, ids), default=0) < past.n_columns:
                raise ValueError(
                    f"remember: {len(ids[0])} columns, and the cache holds {past.n_columns}"
                )
            assert self.kv is not None
            for name, row in zip(past.rows, ids, strict=True):
                self.kv.extend(name, row[len(self.kv.said(name)) : past.n_columns])

    # --- a forward, layer by layer
    # ----------------------------------------------------------------------------------------------

    def offer(self, layer: int, key: Tensor) -> None:
        """Marks keys: so the attention function finds this cache, which stores them when it has the
        mask. Those of layer 0 begin a forward; what one before it left unfinished is taken back."""
        if self._closed:
            raise ClosedError("this PagedCache is closed")
        with self._lock:
            self._refuse_another_attention(layer)
            _, n_heads, n_columns, width = key.shape
            shape = n_heads, width
            if self.kv is not None and shape != (self.kv.n_kv_heads, self.kv.d_head):
                if self._past.rows:
                    raise ValueError(
                        f"PagedCache: {n_heads} KV heads of {width}, and the cache holds "
                        f"{self.kv.n_kv_heads} of {self.kv.d_head}: a cache serves one model"
                    )
                self._settle()
                self._leave()
            if self.kv is None:
                self._use(self._new_kv(*shape))
            if layer == 0:
                self._refuse_fewer_layers(n_columns)
                self._settle()
            setattr(key, MARK, self)
            self._offered = layer, threading.get_ident()

    def _new_kv(self, n_kv_heads: int, width: int) -> PagedKVCache:
        return PagedKVCache(
            num_blocks=self._num_blocks,
            block_size=self._block_size,
            layers=layers_with(self._windows, n_kv_heads, width, self._slack),
            slack=self._slack or 0,
            dtype=self._dtype,
        )

    def _refuse_another_attention(self, layer: int) -> None:
        """Raises RuntimeError where the keys of the layer before were not taken. At layer 0 that
        may as well be a forward cut short, unless there is no other layer."""
        offered, self._offered = self._offered, None
        if offered is None or offered[1] != threading.get_ident():
            return
        if layer == offered[0] + 1 or len(self.layers) == 1:
            raise RuntimeError(
                f"PagedCache: nobody took the keys of layer {offered[0]}: the model runs another "
                "attention; tinyllm.hf.register() and then "
                "model.set_attn_implementation('tinyllm') first"
            )

    def _refuse_fewer_layers(self, n_columns: int) -> None:
        """Raises RuntimeError for a token behind a first prompt that went through some layers only:
        it would be read without that prompt."""
        step, n_layers = self._step, len(self.layers)
        if not self._unfinished or step is None or self._past.n_columns or not step.n_done:
            return
        if n_columns == 1 < step.n_columns:
            raise RuntimeError(
                f"PagedCache: {step.n_columns} columns went through {step.n_done} of {n_layers} "
                "layers and are not kept: bring them again, reset() before another prompt, or set "
                "config.num_hidden_layers to the layers that the model has"
            )

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scoring: Scoring,
        positions: Tensor | None = None,
    ) -> Tensor:
        """Stores the new keys and values of one layer, then attention of its rows: [B,T,H,D] in the
        type of ``query``. Where it raises, ``take_back`` undoes the forward."""
        with self._lock:
            self._offered = None
            kv = self.kv
            if kv is None or key.shape != value.shape:
                raise ValueError(
                    f"PagedCache: keys are {tuple(key.shape)} and values {tuple(value.shape)}"
                )
            n_batch, n_heads, n_columns, width = query.shape
            if layer == 0:
                step = self._new_step(n_batch, n_columns, mask, positions)
                self._start(kv, step)
            else:
                step = self._same_step(layer, n_batch, n_columns, mask)
            self._store(kv, layer, step, as_stored(key), as_stored(value))
            rows = rows_of(query)
            if step.picked is None:
                out = new_f32(n_batch, n_columns, n_heads, width)
                self._over(kv, layer, step, rows, scoring, out.flatten(0, 1))
            else:  # padding stays zero
                some = new_f32(len(step.picked), n_heads, width)
                self._over(kv, layer, step, rows[step.picked], scoring, some)
                out = new_f32(n_batch, n_columns, n_heads, width).zero_()
                out.flatten(0, 1)[step.picked] = some
            out = out.to(query.dtype)
            step.n_done = layer + 1
            if step.n_done == len(self.layers):
                self._past = step.after
                self._unfinished = False
            return out

    def _over(
        self, kv: PagedKVCache, layer: int, step: _Step, rows: Tensor, scoring: Scoring, out: Tensor
    ) -> None:
        if step.active:
            seq_ids = [step.after.rows[s] for s in step.active]
            attend_sequences(kv, layer, seq_ids, step.starts, rows, scoring, self._threads, out)

    def _store(
        self, kv: PagedKVCache, layer: int, step: _Step, k: NDArray[Any], v: NDArray[Any]
    ) -> None:
        try:
            for s, place in zip(step.active, step.places, strict=True):
                kv.append(step.after.rows[s], layer, k[s][:, place], v[s][:, place])
        except OutOfBlocks as error:
            self.take_back()
            raise OutOfBlocks(self._shortage(kv, step)) from error

    def _new_step(
        self, n_batch: int, n_columns: int, mask: Tensor | None, positions: Tensor | None
    ) -> _Step:
        """What the forward that begins brings. Raises ValueError where it does not fit the past."""
        past = self._past
        if past.rows and len(past.rows) != n_batch:
            raise ValueError(
                f"PagedCache: a forward of {n_batch} sequences, and the cache holds "
                f"{len(past.rows)}: reset() begins anew, batch_repeat_interleave(n) repeats each"
            )
        seen = None if mask is None else mask.bool()
        if (begin := _begins_again(past, seen, n_columns, positions)) is not None:
            past = self._cut(begin)
        if seen is not None:
            seen = seen_columns(seen, n_batch, past.n_columns + n_columns)
        _refuse_other_padding(past, seen)
        rows = past.rows or tuple(itertools.islice(_names, n_batch))
        after = _Past(rows, past.n_columns + n_columns, None if seen is None else seen.clone())
        new = None if seen is None or seen[:, past.n_columns :].all() else seen[:, past.n_columns :]
        return _Step(past, after, mask, n_columns, *_rows_that_count(new, n_batch, n_columns))

    def _start(self, kv: PagedKVCache, step: _Step) -> None:
        """From here on the pool holds more than ``_past`` says, or other sequences."""
        self._step = step
        self._unfinished = True
        if step.before is not self._past:
            self._past = step.before
            self._match(kv)
        if not step.before.rows:
            for row in step.after.rows:
                self._owned.append(row)
                kv.add_seq(row)

    def _same_step(self, layer: int, n_batch: int, n_columns: int, mask: Tensor | None) -> _Step:
        """The step of the layers before.

        Raises: RuntimeError where this layer is not the next one of a forward of this thread;
        ValueError where it brings something else.
        """
        step = self._step
        if step is None or step.thread != threading.get_ident() or step.n_done != layer:
            raise RuntimeError(
                f"PagedCache: layer {layer} does not follow the layer before it: another forward "
                "began on this cache (two threads, two models?), or the model leaves layers out"
            )
        n_past = step.before.n_columns
        if (n_batch, n_columns) != (len(step.after.rows), step.n_columns):
            raise ValueError(
                f"PagedCache: layer {layer} has queries of {(n_batch, n_columns)} sequences and "
                f"columns, the layers before {(len(step.after.rows), step.n_columns)}"
            )
        if mask is not step.mask:
            seen = None if mask is None else seen_columns(mask, n_batch, n_past + n_columns)
            if not _same_columns(seen, step.after.seen):
                raise ValueError(
                    f"PagedCache: attention_mask of layer {layer} hides other columns than that of "
                    "the layers before"
                )
        return step

    def take_back(self) -> None:
        """As before the forward of this thread that fails."""
        with self._lock:
            self._offered = None
            step = self._step
            if step is not None and step.thread == threading.get_ident():
                self._unfinished = True
                self._past = step.before
                self._settle()

    def _settle(self) -> None:
        """Makes the pool hold what ``_past`` says. Can be interrupted and begun again."""
        if self._unfinished:
            if self.kv is not None:
                self._match(self.kv)
            self._unfinished = False
        self._step = None

    def _match(self, kv: PagedKVCache) -> None:
        """Ends the sequences that are not in ``_past``, and cuts those that are."""
        rows = self._past.rows
        for row in [row for row in self._owned if row not in rows]:
            with contextlib.suppress(KeyError):  # interrupted before it was begun
                kv.free(row)
            self._owned.remove(row)
        for row, held in zip(rows, self._past.held(), strict=True):
            if any(kv.seq_len(row, layer) > held for layer in range(kv.n_layers)):
                kv.truncate(row, held)

    def _shortage(self, kv: PagedKVCache, step: _Step) -> str:
        held = step.after.held()
        needed = sum(-(-n // kv.block_size) for n in held)
        return (
            f"PagedCache: {len(held)} sequences of up to {max(held)} positions take up to {needed} "
            f"blocks of {kv.block_size}; the pool has {kv.num_blocks}, and {kv.num_free_blocks()} "
            "are free. PagedCache(config, num_blocks=n): n is the sum of ceil(positions / "
            "block_size) of all sequences at their longest, each beam being one. The cache is as "
            "before this forward"
        )

    # --- what generate() does to the whole cache
    # ----------------------------------------------------------------------------------------------

    def crop(self, n: int) -> None:
        """Below 0: takes the last ``-n`` columns away. Above 0: keeps the first n, as transformers
        meant it before 5.23. 0 changes nothing."""
        with self._lock:
            self._settle()
            held = self._past.n_columns
            keep = held if n == 0 else max(held + n, 0) if n < 0 else min(n, held)
            if keep < held:
                self._become(self._cut(keep))

    def _cut(self, n: int) -> _Past:
        """The first n columns of what is held. Raises ValueError where layers with a window would
        not find all that a row behind them sees."""
        past = self._past.first(n)
        for row, (name, held) in enumerate(zip(past.rows, past.held(), strict=True)):
            least = self.kv.least_length(name) if self.kv is not None else 0
            if 0 < held < least:
                raise ValueError(
                    f"PagedCache: with {n} columns row {row} has {held} positions, and its layers "
                    f"with a window have given back what it takes to go on before {least}: "
                    "PagedCache(config, slack=n) keeps n positions more, slack=None all"
                )
        return past

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence i becomes what ``beam_idx[i]`` is: forks, which share blocks until written."""
        self._choose(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """The same, of any number of sequences."""
        self._choose(indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence ``repeats`` times, side by side: one prompt becomes a batch over the same
        blocks."""
        self._choose([row for row in range(len(self.seq_ids)) for _ in range(repeats)])

    def _choose(self, rows: list[int]) -> None:
        with self._lock:
            self._settle()
            if self.kv is not None:
                self._unfinished = self._chosen = True
                self._become(self._forks(self.kv, self._past, rows))

    def _become(self, past: _Past) -> None:
        """The one assignment is what an interrupt comes before or after."""
        self._unfinished = True
        self._past = past
        self._settle()

    def _forks(self, kv: PagedKVCache, past: _Past, rows: Sequence[int]) -> _Past:
        """``past`` in other rows, by forks of its sequences that belong to this cache."""
        names = tuple(itertools.islice(_names, len(rows)))
        for row, name in zip(rows, names, strict=True):
            self._owned.append(name)
            kv.fork(past.rows[row], name)
        return past.chosen(rows, names)

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        """A cache with the same content in the same pool, sharing blocks."""
        with self._lock:
            self._settle()
            twin: PagedCache = type(self).__new__(type(self))
            twin._num_blocks, twin._block_size = self._num_blocks, self._block_size
            twin._dtype, twin._threads = self._dtype, self._threads
            twin._windows, twin._slack = self._windows, self._slack
            twin._begin(self.kv)
            twin._closed = self._closed
            if self.kv is not None:
                twin._past = twin._forks(self.kv, self._past, range(len(self._past.rows)))
            return twin

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a PagedCache cannot be pickled, and copy.copy would share its sequences: "
            "copy.deepcopy makes one that goes its own way, kv.export_seq gives the bytes of a "
            "sequence"
        )

    # --- lifetime
    # ----------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Gives all blocks back; the next forward may bring another batch."""
        with self._lock:
            self._offered = None
            self._become(_Past())

    def close(self) -> None:
        """Gives the pool back, or of a copy the blocks that it holds; nothing happens the second
        time. Using the cache then raises ClosedError, and so do copies of one that is closed."""
        with self._lock:
            if self.kv is not None:
                _free(self.kv, self._owned)
                if not self._is_copy:
                    self.kv.close()
            self._closed = True

    def __enter__(self) -> PagedCache:
        if self._closed:
            raise ClosedError("this PagedCache is closed")
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return (
            f"PagedCache(num_blocks={self._num_blocks}, block_size={self._block_size}, "
            f"dtype={self._dtype!r}, sequences={len(self.seq_ids)}, columns={self.n_columns})"
        )


def _rows_that_count(
    seen: Tensor | None, n_batch: int, n_columns: int
) -> tuple[list[int], list[slice | NDArray[np.int64]], NDArray[np.int32], Tensor | None, int]:
    """The last members of a _Step, of the new columns ``seen`` [B,T]; None: no padding."""
    me = threading.get_ident()
    if seen is None:
        starts = np.arange(n_batch + 1, dtype=np.int32) * np.int32(n_columns)
        return list(range(n_batch)), [slice(0, n_columns)] * n_batch, starts, None, me
    found = [np.flatnonzero(row) for row in seen.numpy()]
    active = [s for s, columns in enumerate(found) if len(columns)]
    starts = np.cumsum([0, *(len(found[s]) for s in active)], dtype=np.int32)
    picked = torch.from_numpy(np.flatnonzero(seen.numpy()))
    return active, [in_a_row(found[s]) for s in active], starts, picked, me


def _begins_again(
    past: _Past, seen: Tensor | None, n_columns: int, positions: Tensor | None
) -> int | None:
    """Where generate() goes on from a text that the cache holds to its end, or further: the column
    that it begins at. With n columns of text and m >= n in the cache it brings those from m - n
    on. None for any other forward.

    Raises: ValueError for a mask too narrow for other reasons.
    """
    if seen is not None and seen.ndim == 2 and seen.shape[1] < past.n_columns + n_columns:
        begin = int(seen.shape[1]) - n_columns
        if begin >= 0 and positions is not None:
            wanted = (seen.cumsum(1) - 1)[:, begin:]
            if bool(((positions == wanted) | ~seen[:, begin:]).all()):
                return begin
        raise ValueError(
            f"PagedCache: attention_mask has {seen.shape[1]} columns; it covers all, the "
            f"{past.n_columns} that the cache holds and the {n_columns} of this forward"
        )
    if seen is None and positions is not None and past.n_columns >= n_columns:
        begin = (past.n_columns - n_columns) // 2
        wanted = torch.arange(begin, begin + n_columns, device="cpu")
        if 2 * begin + n_columns == past.n_columns and bool((positions == wanted).all()):
            return begin
    return None


def _refuse_other_padding(past: _Past, seen: Tensor | None) -> None:
    """Raises ValueError where a mask of all columns says otherwise of the past than it was then."""
    old = None if seen is None else seen[:, : past.n_columns]
    if _same_columns(old, past.seen):
        return
    held = past.held()
    told = [past.n_columns] * len(held) if old is None else old.sum(1).tolist()
    row = next((s for s in range(len(held)) if held[s] != told[s]), None)
    what = (
        "attention_mask hides other columns of the past than it did then"
        if row is None
        else f"row {row} holds {held[row]} positions, and by attention_mask {told[row]}"
    )
    raise ValueError(
        f"PagedCache: {what}: it covers all columns, old and new, and what was padding stays "
        "padding"
    )


def _same_columns(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two masks show the same columns; None shows all."""
    if a is None or b is None:
        return all(mask is None or bool(mask.all()) for mask in (a, b))
    return bool(torch.equal(a, b))


def _sizes_of(fn: str, prefix: PagedKVCache, config: Any, n_layers: int) -> tuple[int, int, str]:
    """``num_blocks``, ``block_size`` and ``dtype`` of a pool that is there. Raises: TypeError for
    what is none; ValueError for one of another model."""
    if not isinstance(prefix, PagedKVCache):
        raise TypeError(f"{fn}: prefix must be a PagedKVCache, not {type(prefix).__name__}")
    wanted = n_layers, *kv_shape_of(config)
    if (found := (prefix.n_layers, prefix.n_kv_heads, prefix.d_head)) != wanted:
        raise ValueError(
            f"{fn}: prefix has layers, KV heads and width {found}, the model {wanted}: "
            "new_kv(config, num_blocks) fits"
        )
    return prefix.num_blocks, prefix.block_size, prefix.dtype


def _rows_of_ids(fn: str, ids: Tensor) -> list[list[int]]:
    """The rows of a batch of token ids. Raises ValueError for what is no such batch."""
    if getattr(ids, "ndim", 0) != 2 or 0 in ids.shape:
        raise ValueError(f"{fn}: token ids are [B,T], at least one, not {ids!r:.60}")
    rows: list[list[int]] = ids.tolist()
    return rows


def _free(kv: PagedKVCache, rows: list[int]) -> None:
    """Ends sequences, also of a cache that is collected; a closed pool has none."""
    while rows:
        with contextlib.suppress(ClosedError, KeyError):
            kv.free(rows[-1])
        rows.pop()
