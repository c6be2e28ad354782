# SPDX-License-Identifier: MIT
"""paged_attention_decode and flash_attention; mirror ``tinyllm/attention.h``.

A row of a result has the same bits in any batch, on any number of threads, on every instruction set, in any
blocks, by either function.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from tinyllm._check import F32, INT64_MAX, array, integer, packed, shape
from tinyllm.ffi.libtinyllm import f32_ptr, load
from tinyllm.infer.paged import PagedKVCache
from tinyllm.threads import ThreadPool, handle_of

__all__ = ["flash_attention", "paged_attention_decode"]


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
    that holds nothing in ``layer``; OverflowError or ValueError for an integer out of range; KeyError for an
    unknown sequence; ClosedError; TlError (``TL_EUNSUPPORTED`` where TINYLLM_ISA names what is not here).
    ``out`` is then untouched.
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
        batch = cache._borrow(fn, seq_ids, layer)
        with workers as tp:
            lib.tl_paged_attn_decode_f32(
                f32_ptr(q), kv, layer, batch.table_ptr, batch.width, batch.lengths_ptr, f32_ptr(out),
                n_batch, n_heads, cache.n_kv_heads, width, factor, window, tp,
            )  # fmt: skip
        cache._spare.append(batch)
        return out


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
    if isinstance(scale, (bool, np.bool_)) or not isinstance(scale, (int, float, np.integer, np.floating)):
        raise TypeError(f"{fn}: scale must be a number or None, not {scale!r}")
    return float(scale)


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
