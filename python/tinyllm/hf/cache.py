# SPDX-License-Identifier: MIT
"""PagedCache: the cache of ``generate()``, whose keys and values lie in a PagedKVCache."""

from __future__ import annotations

import contextlib
import itertools
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
from tinyllm.errors import ClosedError, OutOfBlocks
from tinyllm.hf.attention import MARK, padding_of
from tinyllm.hf.config import layers_of
from tinyllm.hf.rows import Scoring, Tensor, Threads, as_stored, attend_sequences, rows_of
from tinyllm.infer.paged import PagedKVCache

__all__ = ["CACHE_KEYWORD", "PagedCache"]

# What ``model(...)`` and ``generate()`` of this version call their cache: since 5.23 it is "cache".
CACHE_KEYWORD: Final = (
    "cache" if "cache" in signature(create_causal_mask).parameters else "past_key_values"
)

_names = itertools.count()  # ids of sequences: caches that share a pool never meet


@dataclass
class _Step:
    """What one forward brings, the same for every layer: for each sequence how many columns are
    padding, and of those that bring tokens at all where their rows begin among the rows that count."""

    mask: Tensor | None
    past: int
    n_columns: int
    held: list[int]  # positions of each sequence before
    skips: list[int]  # columns of this forward that are padding, for each sequence
    active: list[int]  # the sequences with tokens
    starts: NDArray[np.int32]
    picked: Tensor | None  # the rows that count, of [B*T]; None: all of them


class _Layer(CacheLayerMixin):  # type: ignore[misc]
    """What transformers asks of one layer; every answer comes from the cache."""

    is_sliding = False  # all tokens are kept, and the kernel sees the window
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
        return int(self._cache.columns[self._index])

    def get_mask_sizes(self, query: Any) -> tuple[int, int]:
        """Keys of the next forward, and where they begin; ``query`` was a tensor before it became a count."""
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
    threads: what attention runs on: None is as many threads as torch uses, else as for
    ``paged_attention``.

    Beams, copies and repeated rows share blocks until they are written. ``copy.deepcopy`` makes
    such a copy of the whole cache: many turns can go on from one prompt. ``crop`` gives blocks
    back, ``reset`` all of them; the pool itself is kept until ``close``, before which copies should
    be done.
    ``kv`` is the PagedKVCache, None before the first forward; ``seq_ids`` the ids in it, one a row.
    Keys and values are stored as float16: those of a float32 or bfloat16 model are rounded once.
    Not thread-safe.

    Raises: ValueError for a model whose layers need something else (another type of attention than
    full and sliding, keys shared by layers, no plain KV heads), and for sizes that are no positive
    integers.
    OutOfBlocks (in a forward) where the pool is too small: the cache is then as before that
    forward.
    """

    def __init__(
        self, config: Any, num_blocks: int = 1024, block_size: int = 16, *, threads: Threads = None
    ) -> None:
        fn = "PagedCache"
        n_layers = layers_of(fn, config)
        self._num_blocks = integer(fn, "num_blocks", num_blocks, 1, 2**31 - 1, ValueError)
        self._block_size = integer(fn, "block_size", block_size, 1, 2**32 - 1, ValueError)
        self._threads = threads
        self._begin(None, [], [0] * n_layers)

    def _begin(self, kv: PagedKVCache | None, rows: list[int], columns: list[int]) -> None:
        self.kv, self.seq_ids, self.columns = kv, rows, columns
        self._step: _Step | None = None
        self._offered: int | None = None  # the layer whose keys wait for the attention function
        self._closed, self._is_copy = False, False
        self._finalizer = None if kv is None else weakref.finalize(self, _free, kv, rows)
        super().__init__(layers=[_Layer(self, i) for i in range(len(columns))])

    # --- what the layers say
    # ------------------------------------------------------------------------------

    def offer(self, layer: int, key: Tensor) -> None:
        """Marks keys: so the attention function finds this cache, which stores them when it has the mask."""
        if self._closed:
            raise ClosedError("this PagedCache is closed")
        if self._offered is not None:
            waiting, self._offered = self._offered, None
            raise RuntimeError(
                f"PagedCache: nobody took the keys of layer {waiting}: the model runs another attention; "
                "tinyllm.hf.register() and model.set_attn_implementation('tinyllm') first"
            )
        if self.kv is None:
            _, n_heads, _, width = key.shape
            self.kv = PagedKVCache(
                None, self._num_blocks, self._block_size, len(self.columns), n_heads, width
            )
            self._finalizer = weakref.finalize(self, _free, self.kv, self.seq_ids)
        setattr(key, MARK, self)
        self._offered = layer

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        scoring: Scoring,
    ) -> Tensor:
        """Stores the new keys and values of one layer, then attention of its rows: [B,T,H,D]."""
        self._offered = None
        kv = self.kv
        if kv is None or key.shape != value.shape:
            raise ValueError(
                f"PagedCache: keys are {tuple(key.shape)} and values {tuple(value.shape)}"
            )
        n_batch, n_heads, n_columns, width = query.shape
        step = self._next_step(layer, n_batch, n_columns, mask)
        self._store(kv, layer, step, as_stored(key), as_stored(value))
        rows = rows_of(query)
        if step.picked is None:
            out = torch.empty((n_batch, n_columns, n_heads, width))
            self._over(kv, layer, step, rows, scoring, out.flatten(0, 1))
        else:  # padding stays zero
            some = torch.empty((len(step.picked), n_heads, width))
            self._over(kv, layer, step, rows[step.picked], scoring, some)
            out = torch.zeros((n_batch, n_columns, n_heads, width))
            out.flatten(0, 1)[step.picked] = some
        self.columns[layer] = step.past + n_columns
        return out

    def _over(
        self, kv: PagedKVCache, layer: int, step: _Step, rows: Tensor, scoring: Scoring, out: Tensor
    ) -> None:
        if step.active:
            seq_ids = [self.seq_ids[s] for s in step.active]
            attend_sequences(kv, layer, seq_ids, step.starts, rows, scoring, self._threads, out)

    def _store(
        self, kv: PagedKVCache, layer: int, step: _Step, k: NDArray[Any], v: NDArray[Any]
    ) -> None:
        try:
            for s in step.active:
                kv.append(
                    self.seq_ids[s], layer, k[s, :, step.skips[s] :], v[s, :, step.skips[s] :]
                )
        except BaseException as error:
            self._roll_back(kv, step)
            if isinstance(error, OutOfBlocks):
                raise OutOfBlocks(self._shortage(kv, step)) from error
            raise

    def _next_step(self, layer: int, n_batch: int, n_columns: int, mask: Tensor | None) -> _Step:
        """The step that ``layer`` is in: the one of the layer before, or a new one."""
        step, past = self._step, self.columns[layer]
        if step is not None and (
            step.mask is mask and step.past == past and step.n_columns == n_columns
        ):
            return step
        if not self.seq_ids:
            self._add_rows(n_batch)
        if len(self.seq_ids) != n_batch:
            raise ValueError(
                f"PagedCache: a forward of {n_batch} sequences, and the cache holds {len(self.seq_ids)}: "
                "reset() begins anew, batch_repeat_interleave(n) repeats each"
            )
        pads = [0] * n_batch if mask is None else padding_of(mask, n_batch, past + n_columns)
        held = self._held(layer, past, pads)
        skips = [min(max(n - past, 0), n_columns) for n in pads]
        active = [s for s, skip in enumerate(skips) if skip < n_columns]
        starts = np.cumsum([0, *(n_columns - skips[s] for s in active)], dtype=np.int32)
        picked = None
        if any(skips):
            places = torch.arange(n_batch * n_columns).view(n_batch, n_columns)
            picked = torch.cat([row[skip:] for row, skip in zip(places, skips, strict=True)])
        self._step = _Step(mask, past, n_columns, held, skips, active, starts, picked)
        return self._step

    def _add_rows(self, n: int) -> None:
        assert self.kv is not None
        for _ in range(n):
            row = next(_names)
            self.kv.add_seq(row)
            self.seq_ids.append(row)

    def _held(self, layer: int, past: int, pads: Sequence[int]) -> list[int]:
        """Positions of each sequence in ``layer``.

        Raises: ValueError where the mask says others; RuntimeError where a forward was cut short.
        """
        assert self.kv is not None
        if layer == 0 and len(set(self.columns)) > 1:
            raise RuntimeError(
                "PagedCache: a forward was cut short, and layers differ in length: reset()"
            )
        held = [self.kv.seq_len(seq_id, layer) for seq_id in self.seq_ids]
        for row, (n, pad) in enumerate(zip(held, pads, strict=True)):
            if n != max(past - pad, 0):
                raise ValueError(
                    f"PagedCache: row {row} holds {n} positions, and by attention_mask {max(past - pad, 0)}: "
                    "it covers all columns, old and new, and the padding of the first forward stays"
                )
        return held

    def _roll_back(self, kv: PagedKVCache, step: _Step) -> None:
        """As before the forward that failed."""
        for seq_id, held in zip(self.seq_ids, step.held, strict=True):
            kv.truncate(seq_id, held)
        self._set_columns(step.past)

    def _shortage(self, kv: PagedKVCache, step: _Step) -> str:
        held = [n + step.n_columns - skip for n, skip in zip(step.held, step.skips, strict=True)]
        needed = sum(-(-n // kv.block_size) for n in held)
        return (
            f"PagedCache: {len(held)} sequences of up to {max(held)} positions take up to {needed} blocks of "
            f"{kv.block_size}; the pool has {kv.num_blocks}, and {kv.num_free_blocks()} are free. "
            "PagedCache(config, num_blocks=n): n is the sum of ceil(positions / block_size) of all sequences "
            "at their longest, each beam being one. The cache is as before this forward"
        )

    # --- what generate() does to the whole cache
    # ----------------------------------------------------------

    def crop(self, n: int) -> None:
        """Below 0: takes the last ``-n`` columns away. Above 0: keeps the first n, as transformers
        meant it before 5.23. 0 changes nothing."""
        n_columns = self.columns[0]
        keep = n_columns if n == 0 else max(n_columns + n, 0) if n < 0 else min(n, n_columns)
        if keep == n_columns or self.kv is None:
            return
        for seq_id in self.seq_ids:
            self.kv.truncate(seq_id, max(self.kv.seq_len(seq_id) - (n_columns - keep), 0))
        self._set_columns(keep)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequence i becomes what ``beam_idx[i]`` is: forks, which share blocks until they write."""
        self._become(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """The same, of any number of sequences."""
        self._become(indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence ``repeats`` times, side by side: one prompt becomes a batch over the same blocks."""
        self._become([row for row in range(len(self.seq_ids)) for _ in range(repeats)])

    def _become(self, rows: list[int]) -> None:
        if self.kv is not None:
            old, new = list(self.seq_ids), self._forks(rows)
            self.seq_ids[:] = new
            self._step = None
            for seq_id in old:
                self.kv.free(seq_id)

    def _forks(self, rows: Sequence[int]) -> list[int]:
        assert self.kv is not None
        forks = []
        for row in rows:
            forks.append(next(_names))
            self.kv.fork(self.seq_ids[row], forks[-1])
        return forks

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        """A cache with the same content, in the same pool, sharing blocks: ``copy.deepcopy(cache)``."""
        twin: PagedCache = type(self).__new__(type(self))
        twin._num_blocks, twin._block_size, twin._threads = (
            self._num_blocks,
            self._block_size,
            self._threads,
        )
        forks = [] if self.kv is None else self._forks(range(len(self.seq_ids)))
        twin._begin(self.kv, forks, list(self.columns))
        twin._closed, twin._is_copy = self._closed, self.kv is not None
        return twin

    # --- lifetime
    # -----------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Gives all blocks back; the next forward may bring another batch."""
        if self.kv is not None:
            _free(self.kv, self.seq_ids)
        self._offered = None
        self._set_columns(0)

    def close(self) -> None:
        """Gives the pool back, or of a copy the blocks that it holds; nothing happens the second
        time. Using the cache then raises ClosedError, and so do copies of one that is closed."""
        if self.kv is not None:
            _free(self.kv, self.seq_ids)
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
            f"sequences={len(self.seq_ids)}, columns={self.columns[0]})"
        )

    def _set_columns(self, n: int) -> None:
        self.columns[:] = [n] * len(self.columns)
        self._step = None
        if n == 0 and self.kv is not None:
            _free(self.kv, self.seq_ids)


def _free(kv: PagedKVCache, seq_ids: list[int]) -> None:
    """Ends sequences, also of a cache that is collected; a closed pool has none."""
    while seq_ids:
        seq_id = seq_ids.pop()
        with contextlib.suppress(ClosedError):
            kv.free(seq_id)
