# SPDX-License-Identifier: MIT
"""paged_attention, paged_attention_decode and flash_attention; mirror ``tinyllm/attention.h``.

A row of a result has the same bits in any batch, on any number of threads, on every instruction set, in any
blocks, by each of the functions.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from tinyllm._check import (
    F32,
    INT64_MAX,
    UINT32_MAX,
    Tensor,
    array,
    as_array,
    int32s,
    integer,
    packed,
    shape,
)
from tinyllm.errors import TlError
from tinyllm.ffi.libtinyllm import (
    PAGED_ATTN_ARGS_BYTES,
    TL_ATTN_SPLIT,
    TL_EINVAL,
    TL_ESHAPE,
    Lib,
    PagedAttnArgs,
    f32_ptr,
    i32_ptr,
    load,
    u32_ptr,
)
from tinyllm.infer.paged import PagedKVCache
from tinyllm.kv_view import KVView, whole_rows
from tinyllm.threads import ThreadPool, handle_of

__all__ = ["flash_attention", "paged_attention", "paged_attention_decode"]

_MOST_WORKSPACE = 1 << 26  # bytes: rows that need more are enough to keep every thread busy one by one


def paged_attention_decode(
    q: NDArray[np.float32],
    cache: PagedKVCache,
    seq_ids: Sequence[Hashable],
    layer: int,
    *,
    scale: float | None = None,
    window: int | None = 0,
    threads: int | ThreadPool | None = None,
    out: NDArray[np.float32] | None = None,
) -> NDArray[np.float32]:
    """Attention of one new token per sequence over what ``layer`` of ``cache`` holds, the token included.

    q: float32 [B,H,D], one row per entry of ``seq_ids``; copied only where it is not C-contiguous. H is a
    multiple of the cache's KV heads; query head h reads KV head h // (H // n_kv_heads).
    scale: what dot products are multiplied by, rounded to float32; None is D ** -0.5.
    window: how many of the last positions are seen, the newest included; 0 or less, or None, is all.
    threads: None is the calling thread; a count stands for a pool the process keeps (0: all CPUs it may use);
    or a ThreadPool.
    out: C-contiguous float32 [B,H,D] that does not overlap q, written and returned; None makes a new one.

    Raises: TypeError for a wrong type or dtype; ValueError for a wrong shape, layer or count, or a sequence
    that holds nothing in ``layer`` or lacks positions the window sees (``trim_front``); OverflowError or
    ValueError for an integer out of range; KeyError for an unknown sequence; ClosedError; TlError
    (``TL_EUNSUPPORTED`` where TINYLLM_ISA names what is not here). ``out`` is then untouched.
    """
    fn = "paged_attention_decode"
    if not isinstance(cache, PagedKVCache):
        raise TypeError(f"{fn}: cache must be a PagedKVCache, not {type(cache).__name__}")
    lib = cache.lib
    with cache._handle as kv:
        array(fn, "q", q, F32, ndim=3)
        n_batch, n_heads, width = q.shape
        if width != cache.d_head or n_heads < 1 or n_heads % cache.n_kv_heads:
            raise ValueError(
                f"{fn}: q has shape {q.shape}, expected [B,H,D] with H a multiple of {cache.n_kv_heads} "
                f"and D = {cache.d_head}"
            )
        if len(seq_ids) != n_batch:
            raise ValueError(f"{fn}: q has {n_batch} rows for {len(seq_ids)} sequences")
        layer = cache._layer(fn, layer)
        window = _window(fn, window)
        factor = _scale(fn, scale, width)
        q = packed(q)
        out = np.empty(q.shape, np.float32) if out is None else _output(fn, out, q)
        workers = handle_of(fn, threads, lib)
        if n_batch == 0:
            return out
        batch = cache._borrow(fn, seq_ids, layer, window)
        with workers as tp:
            lib.tl_paged_attn_decode_f32(
                f32_ptr(q), kv, layer, batch.table_ptr, batch.width, batch.lengths_ptr, f32_ptr(out),
                n_batch, n_heads, cache.n_kv_heads, width, factor, window, tp,
            )  # fmt: skip
        cache._spare.append(batch)
        return out


@overload
def paged_attention(
    q: Tensor,
    kv: KVView,
    block_tables: Any,
    ctx_lens: Any,
    *,
    cu_seqlens_q: Any = None,
    scale: float | None = None,
    window: int | None = 0,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: Literal[False] = False,
    threads: int | ThreadPool | None = None,
    out: Tensor | None = None,
) -> NDArray[np.float32]: ...


@overload
def paged_attention(
    q: Tensor,
    kv: KVView,
    block_tables: Any,
    ctx_lens: Any,
    *,
    cu_seqlens_q: Any = None,
    scale: float | None = None,
    window: int | None = 0,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: Literal[True],
    threads: int | ThreadPool | None = None,
    out: Tensor | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]: ...


def paged_attention(
    q: Tensor,
    kv: KVView,
    block_tables: Any,
    ctx_lens: Any,
    *,
    cu_seqlens_q: Any = None,
    scale: float | None = None,
    window: int | None = 0,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    return_lse: bool = False,
    threads: int | ThreadPool | None = None,
    out: Tensor | None = None,
) -> NDArray[np.float32] | tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Attention of any rows of B sequences over what ``kv`` holds: decode, chunks of prompts, the check of a
    draft, or all of them in one call. out [total_q,H,Dv], with ``return_lse`` also lse [total_q,H] (natural
    logarithm).

    q: float32 [total_q,H,Dk], copied only where its last axis is not contiguous. H is a multiple of the
    view's KV heads; query head h reads KV head h // (H // n_kv_heads).
    block_tables: integers [B,n], or one sequence of integers for each sequence; position j is slot j % b of
    block table[j // b]. What no visible position needs may be anything; a negative entry names no block.
    Copied where it is no C-contiguous array of 32-bit integers.
    ctx_lens: integers [B], positions a sequence holds, its own rows included.
    cu_seqlens_q: integers [B+1] from 0 to total_q: sequence s owns the rows from cu_seqlens_q[s] up to
    cu_seqlens_q[s+1], the last of them at position ctx_lens[s] - 1. None: one row each.
    scale, window, threads: as for paged_attention_decode, the scale of Dk.
    softcap: where it is above 0 a score s becomes softcap * tanh(s / softcap).
    alibi_slopes: float32 [H], times key position minus row position is added to the score, after the cap.
    sink_logits: float32 [H], joins the denominator once per head.
    out: float32 [total_q,H,Dv] whose last axis is contiguous, written and returned; None makes a new one.

    Arrays may be numpy's, or what gives its memory by DLPack or the buffer protocol.

    Raises: TypeError for a wrong type or dtype; ValueError for a wrong shape, an integer out of range,
    lengths that do not fit each other or their tables, a table entry that is needed and names no block, or an
    ``out`` that overlaps something; ClosedError; TlError (``TL_EUNSUPPORTED``). ``out`` is then untouched.
    """
    fn = "paged_attention"
    if not isinstance(kv, KVView):
        raise TypeError(f"{fn}: kv must be a KVView, not {type(kv).__name__}")
    dim_k, dim_v = kv.head_dims
    rows = whole_rows(array(fn, "q", as_array(fn, "q", q), F32, ndim=3))
    n_rows, n_heads, width = rows.shape
    if width != dim_k:
        raise ValueError(f"{fn}: q has shape {rows.shape}, expected [total_q,H,Dk] with Dk = {dim_k}")
    lengths = int32s(fn, "ctx_lens", ctx_lens)
    n_batch = len(lengths)
    starts = _starts(fn, cu_seqlens_q, n_batch, n_rows)
    tables = _tables(fn, block_tables, n_batch)
    sinks = _per_head(fn, "sink_logits", sink_logits, n_heads)
    slopes = _per_head(fn, "alibi_slopes", alibi_slopes, n_heads)
    target = np.empty((n_rows, n_heads, dim_v), np.float32)
    if out is not None:
        target = _target(fn, out, target.shape)
    lse = np.empty((n_rows, n_heads), np.float32) if return_lse else None
    lib = kv._library()
    q_token, q_head, _ = rows.strides
    out_token, out_head, _ = target.strides
    args = PagedAttnArgs(
        PAGED_ATTN_ARGS_BYTES, kv._pointer, f32_ptr(rows), f32_ptr(target), f32_ptr(lse),
        q_token // 4, q_head // 4, out_token // 4, out_head // 4, n_batch, n_heads,
        i32_ptr(starts), i32_ptr(lengths), u32_ptr(tables), tables.shape[1], _window(fn, window),
        f32_ptr(slopes), f32_ptr(sinks), _scale(fn, scale, width), _softcap(fn, softcap),
    )  # fmt: skip
    with kv._owner, handle_of(fn, threads, lib) as args.tp:
        room = _workspace(lib, args, lengths) if args.tp else None
        if room is not None:
            args.workspace, args.workspace_bytes = room.ctypes.data, room.nbytes
        try:
            lib.tl_paged_attn_f32(args)
        except TlError as error:
            if error.status in (TL_EINVAL, TL_ESHAPE):
                raise ValueError(f"{fn}: {error.message}") from error
            raise
    result = target if out is None else out
    return result if lse is None else (result, lse)


@overload
def flash_attention(
    q: NDArray[np.float32],
    k: NDArray[np.float32],
    v: NDArray[np.float32],
    *,
    scale: float | None = None,
    causal: bool = True,
    q_offset: int = 0,
    window: int | None = 0,
    sink_logits: NDArray[np.float32] | None = None,
    return_lse: Literal[False] = False,
    threads: int | ThreadPool | None = None,
) -> NDArray[np.float32]: ...


@overload
def flash_attention(
    q: NDArray[np.float32],
    k: NDArray[np.float32],
    v: NDArray[np.float32],
    *,
    scale: float | None = None,
    causal: bool = True,
    q_offset: int = 0,
    window: int | None = 0,
    sink_logits: NDArray[np.float32] | None = None,
    return_lse: Literal[True],
    threads: int | ThreadPool | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]: ...


def flash_attention(
    q: NDArray[np.float32],
    k: NDArray[np.float32],
    v: NDArray[np.float32],
    *,
    scale: float | None = None,
    causal: bool = True,
    q_offset: int = 0,
    window: int | None = 0,
    sink_logits: NDArray[np.float32] | None = None,
    return_lse: bool = False,
    threads: int | ThreadPool | None = None,
) -> NDArray[np.float32] | tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Attention over contiguous keys and values: out [B,H,Tq,D], with ``return_lse`` also lse [B,H,Tq]
    (natural logarithm).

    q: float32 [B,H,Tq,D], row i at position q_offset + i. k, v: float32 [B,Hkv,Tk,D], key j at position j.
    Each is copied only where it is not C-contiguous. Row p sees key j when (not causal or j <= p) and (window
    <= 0 or j > p - window). sink_logits: float32 [H], joins the denominator once per head. A row that sees
    nothing is zeros with lse -inf, or the sink.
    scale, threads: as for paged_attention_decode.

    Raises: TypeError for a wrong type or dtype; ValueError for shapes that disagree or an integer out of
    range; ClosedError; TlError.
    """
    fn = "flash_attention"
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        array(fn, name, tensor, F32, ndim=4)
    n_batch, n_heads, n_rows, width = q.shape
    n_kv, n_keys = k.shape[1:3]
    shape(fn, "k", k, (n_batch, n_kv, n_keys, width), "[B,Hkv,Tk,D]")
    shape(fn, "v", v, (n_batch, n_kv, n_keys, width), "[B,Hkv,Tk,D]")
    if n_heads and (n_kv < 1 or n_heads % n_kv):
        raise ValueError(f"{fn}: {n_heads} query heads do not divide into {n_kv} KV heads")
    if sink_logits is not None:
        array(fn, "sink_logits", sink_logits, F32, ndim=1)
        shape(fn, "sink_logits", sink_logits, (n_heads,), "[H]")
        sink_logits = packed(sink_logits)
    q_offset = integer(fn, "q_offset", q_offset, 0, INT64_MAX - n_rows)
    window = _window(fn, window)
    factor = _scale(fn, scale, width)
    q, k, v = packed(q), packed(k), packed(v)
    out = np.empty(q.shape, np.float32)
    lse = np.empty(q.shape[:3], np.float32) if return_lse else None
    lib = threads._lib if isinstance(threads, ThreadPool) else load()
    with handle_of(fn, threads, lib) as tp:
        lib.tl_flash_attn_fwd_f32(
            f32_ptr(q), f32_ptr(k), f32_ptr(v), f32_ptr(out), f32_ptr(lse),
            n_batch, n_heads, n_kv, n_rows, n_keys, width, factor,
            q_offset, bool(causal), window, f32_ptr(sink_logits), 0, 0, None, tp,
        )  # fmt: skip
    return out if lse is None else (out, lse)


def _window(fn: str, window: Any) -> int:
    return 0 if window is None else integer(fn, "window", window, -INT64_MAX - 1, INT64_MAX)


def _scale(fn: str, scale: Any, width: int) -> float:
    if scale is None:
        return float(width**-0.5) if width else 1.0
    if not _is_number(scale):
        raise TypeError(f"{fn}: scale must be a number or None, not {scale!r}")
    return float(scale)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)


def _output(fn: str, out: Any, q: NDArray[np.float32]) -> NDArray[np.float32]:
    array(fn, "out", out, F32, ndim=3)
    shape(fn, "out", out, q.shape, "[B,H,D]")
    flags = out.flags
    if not (flags.c_contiguous and flags.aligned and flags.writeable):
        raise ValueError(
            f"{fn}: out must be C-contiguous, aligned and writable; its strides are {out.strides}"
        )
    if np.may_share_memory(q, out):
        raise ValueError(f"{fn}: out overlaps q")
    return out  # type: ignore[no-any-return]


def _softcap(fn: str, softcap: Any) -> float:
    if type(softcap) in (int, float) and softcap == 0:
        return 0.0
    if not _is_number(softcap):
        raise TypeError(f"{fn}: softcap must be a number, not {softcap!r}")
    with np.errstate(over="ignore"):
        cap = float(np.float32(softcap))
    if not 0 <= cap < math.inf or (cap == 0 and softcap != 0):
        raise ValueError(f"{fn}: softcap must be 0 or a positive float32, not {softcap!r}")
    return cap


def _workspace(lib: Lib, args: PagedAttnArgs, lengths: NDArray[np.int32]) -> NDArray[np.uint8] | None:
    """Memory in which several threads can share a long sequence, where that is worth having."""
    if lengths.max(initial=0) <= TL_ATTN_SPLIT:
        return None
    size = int(lib.tl_paged_attn_workspace(args))
    return np.empty(size, np.uint8) if 0 < size <= _MOST_WORKSPACE else None


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
    if isinstance(tables, (list, tuple)):
        rows = [_block_ids(fn, f"block_tables[{s}]", np.asarray(row), 1) for s, row in enumerate(tables)]
        padded = np.full((len(rows), max([1, *map(len, rows)])), UINT32_MAX, np.uint32)
        for line, row in zip(padded, rows, strict=True):
            line[: len(row)] = row
        ids = padded
    else:
        ids = packed(_block_ids(fn, "block_tables", as_array(fn, "block_tables", tables), 2))
    if len(ids) != n_batch:
        raise ValueError(f"{fn}: block_tables has {len(ids)} tables for {n_batch} sequences")
    return ids if ids.shape[1] else np.full((n_batch, 1), UINT32_MAX, np.uint32)


def _block_ids(fn: str, name: str, ids: NDArray[Any], ndim: int) -> NDArray[np.uint32]:
    if ids.ndim != ndim:
        raise ValueError(f"{fn}: {name} must have {ndim} axes, its shape is {ids.shape}")
    if ids.dtype.kind not in "iu" and ids.size:
        raise TypeError(f"{fn}: {name} must be integers, not {ids.dtype.name}")
    if ids.dtype.isnative and ids.dtype.itemsize == 4 and ids.size:
        return ids.view(np.uint32)  # of int32 a negative entry is beyond any number of blocks
    if ids.size and ids.max() > UINT32_MAX:
        raise ValueError(f"{fn}: {name} has an entry {ids.max()}, which no uint32 holds")
    return np.where(ids < 0, UINT32_MAX, ids).astype(np.uint32)


def _per_head(fn: str, name: str, values: Any, n_heads: int) -> NDArray[np.float32] | None:
    if values is None:
        return None
    a = array(fn, name, as_array(fn, name, values), F32, ndim=1)
    shape(fn, name, a, (n_heads,), "[H]")
    return packed(a)


def _target(fn: str, out: Any, wanted: tuple[int, ...]) -> NDArray[np.float32]:
    """The memory of ``out`` as an array that a kernel can write by strides."""
    a = array(fn, "out", as_array(fn, "out", out), F32, ndim=3)
    shape(fn, "out", a, wanted, "[total_q,H,Dv]")
    if whole_rows(a) is not a or not a.flags.writeable:
        raise ValueError(
            f"{fn}: out must be aligned and writable, its last axis contiguous; its strides are {a.strides}"
        )
    return a
