# SPDX-License-Identifier: MIT
"""paged_attention and its states, paged_attention_decode, flash_attention; mirror
``tinyllm/attention.h``.

A row of a result has the same bits in any batch, on any number of threads, on every instruction
set, in any blocks, by each of the functions.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Literal, overload

import numpy as np
from numpy.typing import NDArray

from tinyllm._arrays import Tensor, floats, output, packed, shape, whole_rows
from tinyllm._check import INT64_MAX, integer
from tinyllm._observers import OBSERVERS
from tinyllm._paged_call import PagedCall, obey, per_head, scale_of, window_of
from tinyllm._pieces import LONG, in_pieces, positions_seen
from tinyllm.ffi.handle import address_of, reading
from tinyllm.ffi.libtinyllm import (
    TL_ATTN_SPLIT,
    TL_ATTN_STRETCH,
    AttnPart,
    f32_ptr,
    i32_ptr,
    load,
)
from tinyllm.infer.batch import Batch
from tinyllm.infer.paged import PagedKVCache, ids_in_order
from tinyllm.kv_view import KVView
from tinyllm.threads import ThreadPool, handle_of

__all__ = [
    "flash_attention",
    "merge_states",
    "paged_attention",
    "paged_attention_decode",
    "paged_attention_states",
]

_STATES = "[total_q,H,n,2+Dv]"


def paged_attention_decode(
    q: Tensor,
    cache: PagedKVCache,
    seq_ids: Sequence[Hashable],
    layer: int,
    *,
    scale: float | None = None,
    window: int | None = 0,
    threads: int | ThreadPool | None = None,
    out: Tensor | None = None,
) -> NDArray[np.float32]:
    """Attention of one new token per sequence over what ``layer`` of ``cache`` holds, the token
    included.

    q: [B,H,D], one row per entry of ``seq_ids``; copied only where it is not C-contiguous float32.
    H is a multiple of the cache's KV heads; query head h reads KV head h // (H // n_kv_heads).
    scale: what dot products are multiplied by, rounded to float32; None is D ** -0.5.
    window: how many of the last positions are seen, the newest included; 0 or less, or None, is
    all.
    threads: None is the calling thread; a count stands for a pool the process keeps (0: all CPUs it
    may use); or a ThreadPool.
    out: C-contiguous float32 [B,H,D] that does not overlap q, written and returned; None makes a
    new one.

    Arrays are numpy's, tensors that give their memory by DLPack (bfloat16 too) or the buffer
    protocol, or lists. What is not float32 is converted once.

    Raises: TypeError for a wrong type; ValueError for a wrong shape, layer or count, or a sequence
    that holds nothing in ``layer`` or lacks positions the window sees (``trim_front``);
    OverflowError or ValueError for an integer out of range; KeyError for an unknown sequence;
    ClosedError; ConcurrentUseError; TlError (``TL_EUNSUPPORTED`` where TINYLLM_ISA names what is
    not here). ``out`` is then untouched. After KeyboardInterrupt some rows of it may be written.
    """
    fn = "paged_attention_decode"
    if not isinstance(cache, PagedKVCache):
        raise TypeError(f"{fn}: cache must be a PagedKVCache, not {type(cache).__name__}")
    cache, layer = cache._of_layer(fn, layer)
    with Batch(cache, seq_ids) as step:
        return _decode(fn, q, step, layer, scale, window, threads, out)


def _decode(
    fn: str,
    q: Tensor,
    step: Batch,
    layer: int,
    scale: float | None,
    window: int | None,
    threads: int | ThreadPool | None,
    out: Tensor | None,
) -> NDArray[np.float32]:
    """``paged_attention_decode`` over a batch."""
    cache = step._cache
    lib = cache.lib
    q = packed(floats(fn, "q", q, 3))
    n_batch, n_heads, width = q.shape
    if width != cache.d_head or n_heads < 1 or n_heads % cache.n_kv_heads:
        raise ValueError(
            f"{fn}: q has shape {q.shape}, expected [B,H,D] with H a multiple of "
            f"{cache.n_kv_heads} and D = {cache.d_head}"
        )
    seq_ids = ids_in_order(fn, step.seq_ids)
    if len(seq_ids) != n_batch:
        raise ValueError(f"{fn}: q has {n_batch} rows for {len(seq_ids)} sequences")
    window = window_of(fn, window)
    factor = scale_of(fn, scale, width)
    given = out
    out = np.empty(q.shape, np.float32) if out is None else _packed_output(fn, out, q.shape)
    if np.may_share_memory(q, out):
        raise ValueError(f"{fn}: out overlaps q")
    workers = handle_of(fn, threads, lib)
    with cache._handle.read():
        if n_batch:
            table, lengths = step._over(fn, layer, window)
            if OBSERVERS.get() or q.size * table.width * cache.block_size > LONG:
                # The general call gives the same bits, is watched, and is cut where it is long.
                view, tables = cache.view(layer), table.first(n_batch)
                PagedCall(
                    fn, q, view, tables, lengths, None, factor, window, 0, None, threads
                ).attend(out, None, None)
            else:
                with reading(workers):
                    lib.tl_paged_attn_decode_f32(
                        f32_ptr(q), cache._handle.address, layer, table.ptr, table.width,
                        i32_ptr(lengths), f32_ptr(out), n_batch, n_heads, cache.n_kv_heads, width,
                        factor, window, address_of(workers),
                    )  # fmt: skip
    return out if given is None else given


@overload
def paged_attention(
    q: Tensor,
    kv: KVView | PagedKVCache | Batch,
    block_tables: Any = None,
    ctx_lens: Any = None,
    *,
    layer: int | None = None,
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
    kv: KVView | PagedKVCache | Batch,
    block_tables: Any = None,
    ctx_lens: Any = None,
    *,
    layer: int | None = None,
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
    kv: KVView | PagedKVCache | Batch,
    block_tables: Any = None,
    ctx_lens: Any = None,
    *,
    layer: int | None = None,
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
    """Attention of any rows of B sequences over what ``kv`` holds: decode, chunks of prompts, the
    check of a draft, or all of them in one call. out [total_q,H,Dv], with ``return_lse`` also lse
    [total_q,H] (natural logarithm).

    >>> out = paged_attention(q, cache, ["a", "b"], layer)  # sequences of a cache
    >>> out = paged_attention(q, step, layer)  # the same: step is cache.batch(["a", "b"])
    >>> out = paged_attention(q, view, block_tables, ctx_lens)  # anyone's memory

    q: [total_q,H,Dk], copied only where it is not float32 with a contiguous last axis. H is a
    multiple of the KV heads; query head h reads KV head h // (H // n_kv_heads).
    kv: a PagedKVCache, of which seq_ids and layer come next; a batch of one, of which layer comes
    next; or a KVView, with block_tables and ctx_lens. Of a cache all that the sequences hold in
    that layer is the context.
    block_tables: integers [B,n], or one sequence of integers for each sequence; position j is slot
    j % b of block table[j // b]. What no visible position needs may be anything; a negative entry
    names no block.
    Copied where it is no C-contiguous array of 32-bit integers.
    layer: of a cache or batch only, also by position.
    ctx_lens: integers [B], positions a sequence holds, its own rows included.
    cu_seqlens_q: integers [B+1] from 0 to total_q: sequence s owns the rows from cu_seqlens_q[s] up
    to cu_seqlens_q[s+1], the last of them at position ctx_lens[s] - 1. None: one row each.
    scale, window, threads: as for paged_attention_decode, the scale of Dk.
    softcap: where it is above 0 a score s becomes softcap * tanh(s / softcap).
    alibi_slopes: [H], times key position minus row position is added to the score, after
    the cap.
    sink_logits: [H], joins the denominator once per head.
    out: float32 [total_q,H,Dv] whose last axis is contiguous, written and returned; None makes a
    new one. Where it is no numpy array, numpy 2.2.5 or newer can write to it.

    Arrays are numpy's, tensors that give their memory by DLPack (bfloat16 too) or the buffer
    protocol, or lists. What is not of the type named is converted once.
    A call that takes longer than about a second is made in pieces, rows from the first to the last,
    so that an interrupt is heard between them; the rows of those that are done are then written,
    the others untouched.

    Raises: TypeError for a wrong type; ValueError for a wrong shape, an integer out of range,
    lengths that do not fit each other or their tables, a table entry that is needed and names no
    block, or an ``out`` that overlaps something; over a cache also ValueError for a bad layer, or a
    sequence that holds nothing in it or lacks positions the window sees (``trim_front``), and
    KeyError for an unknown sequence; ClosedError; ConcurrentUseError while somebody writes to the
    cache; TlError (``TL_EUNSUPPORTED``). ``out`` is then untouched.
    """
    fn = "paged_attention"
    if isinstance(kv, KVView):
        if layer is not None:
            raise TypeError(f"{fn}: a view is of one layer; layer = {layer!r} is for a cache")
        return _attend(
            fn, q, kv, block_tables, ctx_lens, cu_seqlens_q, scale, window, softcap, alibi_slopes,
            threads, sink_logits, return_lse, out,
        )  # fmt: skip
    batch, layer = _batch_of(fn, kv, block_tables, ctx_lens, layer)
    with batch as step:
        if (
            cu_seqlens_q is sink_logits is alibi_slopes is None
            and not return_lse
            and type(softcap) in (int, float)
            and softcap == 0
            and (out is None or _is_packed(out))
        ):
            return _decode(fn, q, step, layer, scale, window, threads, out)
        cache, window = step._cache, window_of(fn, window)
        with cache._handle.read():
            table, lengths = step._over(fn, layer, window, cu_seqlens_q)
            return _attend(
                fn, q, cache.view(layer), table.first(len(lengths)), lengths, cu_seqlens_q, scale,
                window, softcap, alibi_slopes, threads, sink_logits, return_lse, out,
            )  # fmt: skip


def _attend(
    fn: str,
    q: Tensor,
    view: KVView,
    block_tables: Any,
    ctx_lens: Any,
    cu_seqlens_q: Any,
    scale: float | None,
    window: int | None,
    softcap: float,
    alibi_slopes: Tensor | None,
    threads: int | ThreadPool | None,
    sink_logits: Tensor | None,
    return_lse: bool,
    out: Tensor | None,
) -> NDArray[np.float32] | tuple[NDArray[np.float32], NDArray[np.float32]]:
    """``paged_attention`` over a view."""
    call = PagedCall(
        fn, q, view, block_tables, ctx_lens, cu_seqlens_q, scale, window, softcap, alibi_slopes,
        threads,
    )  # fmt: skip
    n_rows, n_heads, _ = call.q.shape
    sinks = per_head(fn, "sink_logits", sink_logits, n_heads)
    wanted = (n_rows, n_heads, view.head_dims[1])
    target = np.empty(wanted, np.float32) if out is None else _target(fn, out, wanted)
    lse = np.empty((n_rows, n_heads), np.float32) if return_lse else None
    call.attend(target, lse, sinks)
    result = target if out is None else out
    return result if lse is None else (result, lse)


def _batch_of(
    fn: str, kv: Any, block_tables: Any, ctx_lens: Any, layer: Any
) -> tuple[AbstractContextManager[Batch], int]:
    """The batch that a call over a cache, or over a batch, is about, and the layer in it."""
    given = [value for value in (block_tables, ctx_lens) if value is not None]
    if not isinstance(kv, (Batch, PagedKVCache)):
        raise TypeError(
            f"{fn}: kv must be a KVView, a PagedKVCache or a batch of one, not {type(kv).__name__}"
        )
    seq_ids: Sequence[Hashable] = ()
    if not isinstance(kv, Batch):
        if not given:
            raise TypeError(f"{fn}: over a cache seq_ids must be given")
        seq_ids = ids_in_order(fn, given.pop(0))
    if given and layer is None:
        layer = given.pop(0)
    if given or layer is None:
        raise TypeError(
            f"{fn}: over a cache it takes seq_ids and layer, over a batch layer; tables and "
            "lengths are theirs"
        )
    if isinstance(kv, Batch):  # which its own with block ends
        step, layer = kv._of_layer(fn, layer)
        return nullcontext(step), layer
    cache, layer = kv._of_layer(fn, layer)
    return Batch(cache, seq_ids), layer


def paged_attention_states(
    q: Tensor,
    kv: KVView,
    block_tables: Any,
    ctx_lens: Any,
    first_split: int,
    n_splits: int,
    *,
    cu_seqlens_q: Any = None,
    scale: float | None = None,
    window: int | None = 0,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    threads: int | ThreadPool | None = None,
    out: NDArray[np.float32] | None = None,
    span: int = TL_ATTN_SPLIT,
    first_block: int = 0,
) -> NDArray[np.float32]:
    """What splits first_split .. first_split + n_splits - 1 leave of each row, for
    ``merge_states``: out [total_q,H,n,2+Dv].

    A split is 1024 positions from a multiple of 1024 on, a stretch 16 of them from a multiple of
    16384 on. The state of either is m, the largest score; L, the sum of exp(s - m); and the values
    weighted by exp(s - m), unnormalised. Where a row sees nothing of it, m is -inf and the rest
    zeros.
    Only K and V of those splits are read, and only table entries that hold their visible positions
    looked at: who holds a part of a context can work on that part.

    q, kv, block_tables, ctx_lens, cu_seqlens_q, scale, window, softcap, alibi_slopes, threads: as
    for ``paged_attention``.
    span: positions of one state: 1024, and n is n_splits; or 16384, and n is n_splits / 16, with
    first_split and n_splits multiples of 16.
    first_block: which block of a context the first entry of its table is: who holds a part needs no
    table but its own.
    out: C-contiguous float32 [total_q,H,n,2+Dv] that overlaps no other argument, written and
    returned; None makes a new one.

    Raises: as ``paged_attention``; ValueError also for first_split below 0, n_splits below 1,
    splits past what an int64 counts or that make no whole stretches, another span, and positions
    needed before first_block; MemoryError. ``out`` is then untouched.
    """
    fn = "paged_attention_states"
    call = PagedCall(
        fn,
        q,
        kv,
        block_tables,
        ctx_lens,
        cu_seqlens_q,
        scale,
        window,
        softcap,
        alibi_slopes,
        threads,
    )
    first_split = integer(fn, "first_split", first_split, 0, INT64_MAX)
    n_splits = integer(fn, "n_splits", n_splits, 1, INT64_MAX - first_split)
    span = _span(fn, "span", span)
    first_block = integer(fn, "first_block", first_block, 0, INT64_MAX)
    per_state = span // TL_ATTN_SPLIT
    if first_split % per_state or n_splits % per_state:
        raise ValueError(
            f"{fn}: first_split = {first_split} and n_splits = {n_splits} must be multiples of "
            f"{per_state}, for states of stretches"
        )
    n_rows, n_heads, _ = call.q.shape
    wanted = (n_rows, n_heads, n_splits // per_state, 2 + kv.head_dims[1])
    given = out
    out = np.empty(wanted, np.float32) if out is None else _packed_output(fn, out, wanted, _STATES)
    call.states(first_split, n_splits, out, span=span, first_block=first_block)
    return out if given is None else given


@overload
def merge_states(
    parts: Sequence[tuple[Tensor, int] | tuple[Tensor, int, int]],
    *,
    sink_logits: Tensor | None = None,
    return_lse: Literal[False] = False,
    threads: int | ThreadPool | None = None,
) -> NDArray[np.float32]: ...


@overload
def merge_states(
    parts: Sequence[tuple[Tensor, int] | tuple[Tensor, int, int]],
    *,
    sink_logits: Tensor | None = None,
    return_lse: Literal[True],
    threads: int | ThreadPool | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]: ...


def merge_states(
    parts: Sequence[tuple[Tensor, int] | tuple[Tensor, int, int]],
    *,
    sink_logits: Tensor | None = None,
    return_lse: bool = False,
    threads: int | ThreadPool | None = None,
) -> NDArray[np.float32] | tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Finishes rows from the states of their splits: out [total_q,H,Dv], with ``return_lse`` also
    lse [total_q,H]; bit for bit what one call of ``paged_attention`` gives, however the splits were
    divided.

    parts: (states, first_split), or (states, first_split, span) for another span than 1024, in
    rising order: [total_q,H,n,2+Dv] as ``paged_attention_states`` gives them, copied only where
    they are not C-contiguous float32. Together they hold split 0 up to some last one, each once;
    splits behind the last that any row sees may be missing.
    sink_logits, threads: as for ``paged_attention``.

    Raises: TypeError for a wrong type or dtype; ValueError for no parts, shapes that disagree,
    parts that overlap, leave a gap, are out of order or do not begin at split 0; ClosedError;
    TlError.
    """
    fn = "merge_states"
    held = [_part(fn, i, part) for i, part in enumerate(parts)]
    if not held:
        raise ValueError(f"{fn}: parts is empty; the part that holds split 0 is needed at least")
    n_rows, n_heads, _, width = held[0][0].shape
    if width < 3:
        raise ValueError(f"{fn}: parts[0][0] has shape {held[0][0].shape}, expected {_STATES}")
    for i, (states, _, _) in enumerate(held):
        shape(fn, f"parts[{i}][0]", states, (n_rows, n_heads, states.shape[2], width), _STATES)
    sinks = per_head(fn, "sink_logits", sink_logits, n_heads)
    out = np.empty((n_rows, n_heads, width - 2), np.float32)
    lse = np.empty((n_rows, n_heads), np.float32) if return_lse else None
    table = (AttnPart * len(held))(
        *[
            AttnPart(f32_ptr(a), first, a.shape[2] * span // TL_ATTN_SPLIT, span)
            for a, first, span in held
        ]
    )
    lib = threads._lib if isinstance(threads, ThreadPool) else load()
    workers = handle_of(fn, threads, lib)
    with reading(workers):
        obey(
            fn, lib.tl_attn_merge_f32, table, len(held), n_rows * n_heads, n_heads, width - 2,
            f32_ptr(sinks), f32_ptr(out), f32_ptr(lse), address_of(workers),
        )  # fmt: skip
    return out if lse is None else (out, lse)


@overload
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    q_offset: int = 0,
    window: int | None = 0,
    sink_logits: Tensor | None = None,
    return_lse: Literal[False] = False,
    threads: int | ThreadPool | None = None,
) -> NDArray[np.float32]: ...


@overload
def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    q_offset: int = 0,
    window: int | None = 0,
    sink_logits: Tensor | None = None,
    return_lse: Literal[True],
    threads: int | ThreadPool | None = None,
) -> tuple[NDArray[np.float32], NDArray[np.float32]]: ...


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float | None = None,
    causal: bool = True,
    q_offset: int = 0,
    window: int | None = 0,
    sink_logits: Tensor | None = None,
    return_lse: bool = False,
    threads: int | ThreadPool | None = None,
) -> NDArray[np.float32] | tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Attention over contiguous keys and values: out [B,H,Tq,D], with ``return_lse`` also lse
    [B,H,Tq] (natural logarithm).

    q: [B,H,Tq,D], row i at position q_offset + i. k, v: [B,Hkv,Tk,D], key j at position j.
    Each is copied only where it is not C-contiguous float32. Row p sees key j when (not causal or
    j <= p) and (window <= 0 or j > p - window). sink_logits: [H], joins the denominator once per
    head. A row that sees nothing is zeros with lse -inf, or the sink.
    scale, threads: as for paged_attention_decode; arrays, and long calls, as for paged_attention.

    Raises: TypeError for a wrong type; ValueError for shapes that disagree or an integer out of
    range; ClosedError; TlError.
    """
    fn = "flash_attention"
    q, k, v = (packed(floats(fn, name, a, 4)) for name, a in (("q", q), ("k", k), ("v", v)))
    n_batch, n_heads, n_rows, width = q.shape
    n_kv, n_keys = k.shape[1:3]
    shape(fn, "k", k, (n_batch, n_kv, n_keys, width), "[B,Hkv,Tk,D]")
    shape(fn, "v", v, (n_batch, n_kv, n_keys, width), "[B,Hkv,Tk,D]")
    if n_heads and (n_kv < 1 or n_heads % n_kv):
        raise ValueError(f"{fn}: {n_heads} query heads do not divide into {n_kv} KV heads")
    sinks = per_head(fn, "sink_logits", sink_logits, n_heads)
    q_offset = integer(fn, "q_offset", q_offset, 0, INT64_MAX - n_rows)
    window = window_of(fn, window)
    factor = scale_of(fn, scale, width)
    out = np.empty(q.shape, np.float32)
    lse = np.empty(q.shape[:3], np.float32) if return_lse else None
    lib = threads._lib if isinstance(threads, ThreadPool) else load()
    workers = handle_of(fn, threads, lib)

    def run(q: Any, out: Any, lse: Any, offset: int) -> None:
        lib.tl_flash_attn_fwd_f32(
            f32_ptr(q), f32_ptr(k), f32_ptr(v), f32_ptr(out), f32_ptr(lse),
            n_batch, n_heads, n_kv, q.shape[2], n_keys, width, factor,
            offset, bool(causal), window, f32_ptr(sinks), 0, 0, None, address_of(workers),
        )  # fmt: skip

    def run_rows(begin: int, end: int) -> None:
        part = np.ascontiguousarray(q[:, :, begin:end])
        done = np.empty_like(part)
        sums = None if lse is None else np.empty(part.shape[:3], np.float32)
        run(part, done, sums, q_offset + begin)
        out[:, :, begin:end] = done
        if lse is not None:
            lse[:, :, begin:end] = sums

    with reading(workers):
        if q.size * n_keys <= LONG:
            run(q, out, lse, q_offset)
        else:
            rows = np.arange(n_rows) + min(q_offset, n_keys)
            seen = positions_seen(rows, n_keys, window, causal)
            in_pieces(seen * q[:, :, :1].size, run_rows)
    return out if lse is None else (out, lse)


def _packed_output(
    fn: str, out: Tensor, wanted: tuple[int, ...], axes: str = "[B,H,D]"
) -> NDArray[np.float32]:
    """The memory of ``out``, which C can write from end to end."""
    a = output(fn, out, wanted, axes)
    if not a.flags.c_contiguous:
        raise ValueError(f"{fn}: out must be C-contiguous; its strides are {a.strides}")
    return a


def _target(fn: str, out: Tensor, wanted: tuple[int, ...]) -> NDArray[np.float32]:
    """The memory of ``out``, which a kernel can write by strides."""
    a = output(fn, out, wanted, "[total_q,H,Dv]")
    if whole_rows(a) is not a:
        raise ValueError(f"{fn}: out must have a contiguous last axis; its strides are {a.strides}")
    return a


def _part(fn: str, i: int, part: Any) -> tuple[NDArray[np.float32], int, int]:
    """One of the parts of ``merge_states``: its states, contiguous, first split and span."""
    if not isinstance(part, (tuple, list)) or len(part) not in (2, 3):
        raise TypeError(
            f"{fn}: parts[{i}] must be (states, first_split) or (states, first_split, span), not "
            f"{type(part).__name__}"
        )
    states, first, span = (*part, TL_ATTN_SPLIT)[:3]
    states = packed(floats(fn, f"parts[{i}][0]", states, 4))
    first = integer(fn, f"parts[{i}][1]", first, 0, INT64_MAX)
    return states, first, _span(fn, f"parts[{i}][2]", span)


def _is_packed(out: Any) -> bool:
    """Whether ``out`` is as ``paged_attention_decode`` takes it."""
    return type(out) is np.ndarray and out.dtype == np.float32 and out.flags.carray


def _span(fn: str, name: str, span: Any) -> int:
    n = integer(fn, name, span, 0, INT64_MAX)
    if n not in (TL_ATTN_SPLIT, TL_ATTN_STRETCH):
        raise ValueError(f"{fn}: {name} must be {TL_ATTN_SPLIT} or {TL_ATTN_STRETCH}, not {n}")
    return n
