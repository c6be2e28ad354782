# SPDX-License-Identifier: MIT
"""PagedCall: the checked arguments of one call over a KVView, and the struct that C reads them
from."""

from __future__ import annotations

import math
from copy import copy
from time import monotonic_ns
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tinyllm._arrays import (
    Tensor,
    are_integers,
    as_array,
    floats,
    int32s,
    packed,
    shape,
    whole_rows,
    with_axes,
)
from tinyllm._check import INT64_MAX, UINT32_MAX, integer
from tinyllm._observers import OBSERVERS, Observer
from tinyllm._pieces import LONG, in_pieces, positions_seen
from tinyllm.errors import TlError
from tinyllm.ffi.handle import address_of, reading
from tinyllm.ffi.libtinyllm import (
    PAGED_ATTN_ARGS_BYTES,
    TL_ATTN_SPLIT,
    TL_EINVAL,
    TL_ESHAPE,
    Function,
    PagedAttnArgs,
    f32_ptr,
    i32_ptr,
    u32_ptr,
)
from tinyllm.kv_view import KVView
from tinyllm.threads import ThreadPool, handle_of

# bytes: rows that need more are enough to keep every thread busy one by one
_MOST_WORKSPACE = 1 << 26

_U32 = np.dtype(np.uint32)  # the one instance that arrays of it have


class PagedCall:
    """What every call over a view is told. Arrays are as the library reads them, and live as long
    as this.

    q [total_q,H,Dk]; ctx_lens int32 [B]; cu_seqlens_q int32 [B+1], or None for a row each;
    block_tables uint32 [B,n]; alibi_slopes float32 [H] or None. ``attend`` adds sink_logits, out,
    lse and args, what it tells the library; for observers begin_ns and end_ns, the call on the
    clock of ``time.monotonic_ns``.
    trace: for whoever traces the call first, and those after him.
    """

    __slots__ = (
        "_room",
        "alibi_slopes",
        "args",
        "begin_ns",
        "block_tables",
        "ctx_lens",
        "cu_seqlens_q",
        "end_ns",
        "fn",
        "kv",
        "lib",
        "lse",
        "out",
        "q",
        "scale",
        "sink_logits",
        "softcap",
        "threads",
        "trace",
        "window",
    )  # fmt: skip
    trace: Any

    def __init__(
        self,
        fn: str,
        q: Tensor,
        kv: KVView,
        block_tables: Any,
        ctx_lens: Any,
        cu_seqlens_q: Any,
        scale: float | None,
        window: int | None,
        softcap: float,
        alibi_slopes: Tensor | None,
        threads: int | ThreadPool | None,
    ) -> None:
        """Raises what ``paged_attention`` says of these arguments; the tables' entries are not
        looked at."""
        if not isinstance(kv, KVView):
            raise TypeError(f"{fn}: kv must be a KVView, not {type(kv).__name__}")
        self.fn, self.kv, self.threads, self.lib = fn, kv, threads, kv._library()
        self.q = q = whole_rows(floats(fn, "q", q, 3))
        n_rows, n_heads, width = q.shape
        dim_k = kv.head_dims[0]
        if width != dim_k:
            raise ValueError(
                f"{fn}: q has shape {q.shape}, expected [total_q,H,Dk] with Dk = {dim_k}"
            )
        self.ctx_lens = int32s(fn, "ctx_lens", ctx_lens)
        n_batch = len(self.ctx_lens)
        self.cu_seqlens_q = _starts(fn, cu_seqlens_q, n_batch, n_rows)
        self.block_tables = _tables(fn, block_tables, n_batch)
        self.alibi_slopes = per_head(fn, "alibi_slopes", alibi_slopes, n_heads)
        self.window = window_of(fn, window)
        self.scale = scale_of(fn, scale, width)
        self.softcap = _cap(fn, softcap)

    def attend(
        self,
        out: NDArray[np.float32],
        lse: NDArray[np.float32] | None,
        sink_logits: NDArray[np.float32] | None,
    ) -> None:
        """Writes ``out`` [total_q,H,Dv], which may have strides, and ``lse`` [total_q,H].

        A long call that nobody watches is made in pieces; after an interrupt the rows of those that
        are done are written.

        Raises: ValueError for what the library refuses; ClosedError; ConcurrentUseError; TlError.
        """
        self.out, self.lse, self.sink_logits = out, lse, sink_logits
        observers = OBSERVERS.get()
        workers = handle_of(self.fn, self.threads, self.lib)
        with self.kv.reading(), reading(workers):
            tp = address_of(workers)
            if observers:
                self._set_up(tp)
                self._watched(observers)
            elif self._is_long() and self._can_be_cut(out):
                in_pieces(self._work(), lambda begin, end: self._piece(begin, end)._run(tp))
            else:
                self._run(tp)

    def _run(self, tp: int | None) -> None:
        self._set_up(tp)
        obey(self.fn, self.lib.tl_paged_attn_f32, self.args)

    def _set_up(self, tp: int | None) -> None:
        args = self.args = self._arguments(tp, self.out, self.lse, self.sink_logits)
        room = self._workspace() if tp else None
        if room is not None:
            args.workspace, args.workspace_bytes = room.ctypes.data, room.nbytes
            self._room = room

    def _watched(self, observers: tuple[Observer, ...]) -> None:
        self.trace = None
        for observer in observers:
            observer.before(self)
        self.begin_ns = monotonic_ns()
        obey(self.fn, self.lib.tl_paged_attn_f32, self.args)
        self.end_ns = monotonic_ns()
        for observer in observers:
            observer.after(self)

    def states(
        self,
        first_split: int,
        n_splits: int,
        states: NDArray[np.float32],
        *,
        span: int = TL_ATTN_SPLIT,
        first_block: int = 0,
    ) -> None:
        """Writes ``states`` [total_q,H,n,2+Dv], contiguous, n of ``span`` positions each. Raises as
        ``attend``."""
        workers = handle_of(self.fn, self.threads, self.lib)
        with self.kv.reading(), reading(workers):
            args = self._arguments(address_of(workers), None, None, None)
            args.state_span, args.first_block = span, first_block
            obey(
                self.fn,
                self.lib.tl_paged_attn_states_f32,
                args,
                first_split,
                n_splits,
                f32_ptr(states),
            )

    # --- pieces of a long call
    # -------------------------------------------------------------------------------------------

    def _is_long(self) -> bool:
        most = self.block_tables.shape[1] * self.kv.block_size
        return bool(self.q.size * most > LONG and self._work().sum() > LONG)

    def _rows_of(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Where the rows of each sequence begin, and the number of all; and how many it has."""
        starts = self.cu_seqlens_q
        begins = np.arange(len(self.q) + 1) if starts is None else starts.astype(np.int64)
        return begins, np.diff(begins)

    def _work(self) -> NDArray[np.int64]:
        """What each row costs."""
        begins, counts = self._rows_of()
        first = self.ctx_lens - counts - begins[:-1]  # position of a row minus its number
        position = np.repeat(first, counts.clip(min=0)) + np.arange(counts.clip(min=0).sum())
        return positions_seen(position, INT64_MAX, self.window).clip(min=1) * self.q[:1].size

    def _can_be_cut(self, out: NDArray[np.float32]) -> bool:
        """Whether no piece can be refused when others are done. Where there is a doubt the library
        gets the whole call, and says what is wrong with it before it begins."""
        begins, counts = self._rows_of()
        b, last = self.kv.block_size, self.ctx_lens.astype(np.int64) - 1
        first = (last - counts + 1 - self.window + 1).clip(min=0) if self.window > 0 else 0 * last
        entry = np.arange(self.block_tables.shape[1])
        needed = (entry >= (first // b)[:, None]) & (entry <= (last // b)[:, None])
        needed[counts == 0] = False
        inputs = (
            self.q, self.block_tables, self.ctx_lens, self.cu_seqlens_q, self.alibi_slopes,
            self.sink_logits, *self.kv.arrays(),
        )  # fmt: skip
        return bool(
            begins[0] == 0
            and (counts >= 0).all()
            and (last + 1 >= np.maximum(counts, self.cu_seqlens_q is None)).all()
            and (last < b * len(entry)).all()
            and (self.block_tables[needed] < self.kv.num_blocks).all()
            and not any(np.may_share_memory(out, a) for a in inputs if a is not None)
        )

    def _piece(self, begin: int, end: int) -> PagedCall:
        """The call for rows ``begin`` .. ``end`` - 1."""
        begins, _ = self._rows_of()
        low = int(np.searchsorted(begins, begin, "left"))
        low -= int(begins[low] != begin)
        high = int(np.searchsorted(begins, end, "left"))
        part = copy(self)
        if self.cu_seqlens_q is not None:
            starts = begins[low : high + 1].clip(begin, end)
            behind = begins[low + 1 : high + 1] - starts[1:]  # rows of later pieces
            part.cu_seqlens_q = (starts - begin).astype(np.int32)
            part.ctx_lens = (self.ctx_lens[low:high] - behind).astype(np.int32)
        else:
            part.ctx_lens = self.ctx_lens[low:high]
        part.block_tables = self.block_tables[low:high]
        part.q, part.out = self.q[begin:end], self.out[begin:end]
        part.lse = None if self.lse is None else self.lse[begin:end]
        return part

    def _arguments(
        self,
        tp: int | None,
        out: NDArray[np.float32] | None,
        lse: NDArray[np.float32] | None,
        sink_logits: NDArray[np.float32] | None,
    ) -> PagedAttnArgs:
        q, tables = self.q, self.block_tables
        q_token, q_head, _ = q.strides
        out_token, out_head = (0, 0) if out is None else out.strides[:2]
        return PagedAttnArgs(
            PAGED_ATTN_ARGS_BYTES, self.kv._pointer, f32_ptr(q), f32_ptr(out), f32_ptr(lse),
            q_token // 4, q_head // 4, out_token // 4, out_head // 4, len(self.ctx_lens),
            q.shape[1], i32_ptr(self.cu_seqlens_q), i32_ptr(self.ctx_lens), u32_ptr(tables),
            tables.shape[1], self.window, f32_ptr(self.alibi_slopes), f32_ptr(sink_logits),
            self.scale, self.softcap, tp,
        )  # fmt: skip

    def _workspace(self) -> NDArray[np.uint8] | None:
        """Memory in which several threads can share a long sequence, where that is worth having."""
        if self.ctx_lens.max(initial=0) <= TL_ATTN_SPLIT:
            return None
        size = int(self.lib.tl_paged_attn_workspace(self.args))
        return np.empty(size, np.uint8) if 0 < size <= _MOST_WORKSPACE else None


def obey(fn: str, function: Function, *args: Any) -> None:
    """Calls ``function``; what it refuses in its arguments is a ValueError."""
    try:
        function(*args)
    except TlError as error:
        if error.status in (TL_EINVAL, TL_ESHAPE):
            raise ValueError(f"{fn}: {error.reason}") from error
        raise


def window_of(fn: str, window: Any) -> int:
    return 0 if window is None else integer(fn, "window", window, -INT64_MAX - 1, INT64_MAX)


def scale_of(fn: str, scale: Any, width: int) -> float:
    if scale is None:
        return float(width**-0.5) if width else 1.0
    if not _is_number(scale):
        raise TypeError(f"{fn}: scale must be a number or None, not {scale!r}")
    return float(scale)


def per_head(fn: str, name: str, values: Any, n_heads: int) -> NDArray[np.float32] | None:
    if values is None:
        return None
    a = floats(fn, name, values, 1)
    shape(fn, name, a, (n_heads,), "[H]")
    return packed(a)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _cap(fn: str, softcap: Any) -> float:
    if type(softcap) in (int, float) and softcap == 0:
        return 0.0
    if not _is_number(softcap):
        raise TypeError(f"{fn}: softcap must be a number, not {softcap!r}")
    with np.errstate(all="ignore"):
        cap = float(np.float32(softcap))
    if not 0 <= cap < math.inf or (cap == 0 and softcap != 0):
        raise ValueError(f"{fn}: softcap must be 0 or a positive float32, not {softcap!r}")
    return cap


def _starts(fn: str, cu_seqlens_q: Any, n_batch: int, n_rows: int) -> NDArray[np.int32] | None:
    """Where the rows of each sequence begin, and the number of all; None for one each."""
    if cu_seqlens_q is None:
        if n_rows != n_batch:
            raise ValueError(f"{fn}: q has {n_rows} rows for {n_batch} sequences")
        return None
    starts = int32s(fn, "cu_seqlens_q", cu_seqlens_q)
    shape(fn, "cu_seqlens_q", starts, (n_batch + 1,), "[B+1]")
    if starts[-1] != n_rows:
        raise ValueError(f"{fn}: cu_seqlens_q[{n_batch}] = {starts[-1]}, q has {n_rows} rows")
    return starts


def _tables(fn: str, tables: Any, n_batch: int) -> NDArray[np.uint32]:
    """The tables as uint32 [B, n >= 1]; what they do not have, or is negative, names no block."""
    if type(tables) is np.ndarray and tables.dtype is _U32 and tables.flags.carray and tables.size:
        ids = with_axes(fn, "block_tables", tables, 2)
    elif isinstance(tables, (list, tuple)):
        rows = [_block_ids(fn, f"block_tables[{s}]", row, 1) for s, row in enumerate(tables)]
        padded = np.full((len(rows), max([1, *map(len, rows)])), UINT32_MAX, np.uint32)
        for line, row in zip(padded, rows, strict=True):
            line[: len(row)] = row
        ids = padded
    else:
        ids = packed(_block_ids(fn, "block_tables", tables, 2))
    if len(ids) != n_batch:
        raise ValueError(f"{fn}: block_tables has {len(ids)} tables for {n_batch} sequences")
    return ids if ids.shape[1] else np.full((n_batch, 1), UINT32_MAX, np.uint32)


def _block_ids(fn: str, name: str, value: Any, ndim: int) -> NDArray[np.uint32]:
    ids, element = as_array(fn, name, value)
    with_axes(fn, name, ids, ndim)
    if not are_integers(ids, element) and ids.size:
        raise TypeError(f"{fn}: {name} must be integers, not {element}")
    if ids.dtype.isnative and ids.dtype.itemsize == 4 and ids.size:
        return ids.view(np.uint32)  # of int32 a negative entry is beyond any number of blocks
    if ids.size and ids.max() > UINT32_MAX:
        raise ValueError(f"{fn}: {name} has an entry {ids.max()}, which no uint32 holds")
    return np.where(ids < 0, UINT32_MAX, ids).astype(np.uint32)
