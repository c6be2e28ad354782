# SPDX-License-Identifier: MIT
"""attention_mass: where in its context a query's attention lies, block by block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tinyllm._arrays import Tensor
from tinyllm._check import UINT32_MAX
from tinyllm._observers import OBSERVERS
from tinyllm._paged_call import PagedCall, per_head
from tinyllm.kv_view import KVView
from tinyllm.threads import ThreadPool

__all__ = ["attention_mass"]

_BYTES_AT_ONCE: Final = 1 << 22  # of queries and outputs that one call of the library is given


def attention_mass(
    q: Tensor,
    kv: KVView,
    block_tables: Any,
    ctx_lens: Any,
    *,
    scale: float | None = None,
    window: int | None = 0,
    softcap: float = 0.0,
    sink_logits: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    threads: int | ThreadPool | None = None,
) -> NDArray[np.float32]:
    """How much of its softmax the newest position of each sequence gives to each block: float32
    [B,H,n], of n entries in a table; 0 where none of a block is visible. What is missing to 1 is
    the sink's.

    q: float32 [B,H,Dk], row s at position ctx_lens[s] - 1. The other arguments are those of
    ``paged_attention``.

    >>> mass = attention_mass(q, cache.view(0), [cache.block_table("a")], [cache.seq_len("a")])
    >>> cache.look({"a": mass[0]})

    It costs a few times what the attention does; some 32 * B * H * n bytes and a few MiB are taken
    meanwhile.
    ``record`` and ``timeline`` see nothing of it.

    Raises: as ``paged_attention``.
    """
    fn = "attention_mass"
    whole = PagedCall(
        fn, q, kv, block_tables, ctx_lens, None, scale, window, softcap, alibi_slopes, threads
    )
    n_heads = whole.q.shape[1]
    if n_heads < 1 or n_heads % kv.n_kv_heads:
        raise ValueError(
            f"{fn}: q has shape {whole.q.shape}, expected [B,H,Dk] with H a multiple of "
            f"{kv.n_kv_heads}"
        )
    sinks = per_head(fn, "sink_logits", sink_logits, n_heads)
    with kv.reading(), _unobserved():
        visible, lse = _lse_of_blocks(whole)
    # What follows is softmax over blocks, [B,n,H], with the sink as one more.
    rest = np.full(n_heads, -np.inf) if sinks is None else sinks.astype(np.float64)
    with np.errstate(invalid="ignore", over="ignore"):
        top = np.maximum(lse.max(axis=1, keepdims=True), rest)
        top[np.isneginf(top)] = 0  # nothing anywhere: its mass is 0
        weight = np.exp(lse - top)
        total = weight.sum(axis=1, keepdims=True) + np.exp(rest - top)
        mass = np.divide(weight, total, out=np.zeros_like(weight), where=total != 0)
    mass[~visible] = 0
    return np.ascontiguousarray(mass.transpose(0, 2, 1), np.float32)


def _lse_of_blocks(whole: PagedCall) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
    """Which entries of the tables are seen, [B,n], and ln(sum of e^score) over what is seen of
    each, float64 [B,n,H].

    The library is asked as if each block were a sequence of its own, whose query stands at its last
    position.
    """
    kv, b, ctx = whole.kv, whole.kv.block_size, whole.ctx_lens.astype(np.int64)
    n_batch, n_entries = whole.block_tables.shape
    _refuse_lengths(whole, n_entries * b)
    first = np.maximum(ctx - whole.window, 0) if whole.window > 0 else np.zeros_like(ctx)
    starts = b * np.arange(n_entries)
    visible = (starts + b > first[:, None]) & (starts < ctx[:, None])
    seq, entry = np.nonzero(visible)
    _refuse_blocks(whole, seq, entry)
    filled = np.minimum(ctx[seq] - starts[entry], b)
    seen = filled - np.maximum(first[seq] - starts[entry], 0)
    window = np.where(seen < filled, seen, 0)  # of the block that the window cuts

    n_heads, dim_v = whole.q.shape[1], kv.head_dims[1]
    lse = np.full((n_batch, n_entries, n_heads), -np.inf)
    at_once = max(1, _BYTES_AT_ONCE // (4 * n_heads * (sum(kv.head_dims) + 1)))
    out = np.empty((min(at_once, len(seq)), n_heads, dim_v), np.float32)
    for cut in np.unique(window).tolist():
        of_this_cut = np.flatnonzero(window == cut)
        for i in range(0, len(of_this_cut), at_once):
            some = of_this_cut[i : i + at_once]
            s, e = seq[some], entry[some]
            call = PagedCall(
                whole.fn, whole.q[s], kv, whole.block_tables[s, e][:, None], filled[some], None,
                whole.scale, cut, whole.softcap, whole.alibi_slopes, whole.threads,
            )  # fmt: skip
            part = np.empty((len(some), n_heads), np.float32)
            call.attend(out[: len(some)], part, None)
            lse[s, e] = part
    if whole.alibi_slopes is not None:
        # Distances were counted from the last position of each block.
        lse[seq, entry] += np.multiply.outer(starts[entry] + filled - ctx[seq], whole.alibi_slopes)
    return visible, lse


def _refuse_lengths(whole: PagedCall, most: int) -> None:
    for s, length in enumerate(whole.ctx_lens.tolist()):
        if not 1 <= length <= most:
            raise ValueError(f"{whole.fn}: ctx_lens[{s}] = {length} is outside 1 .. {most}")


def _refuse_blocks(whole: PagedCall, seq: NDArray[np.int64], entry: NDArray[np.int64]) -> None:
    """Raises ValueError where an entry that is needed names no block."""
    ids = whole.block_tables[seq, entry]
    bad = np.flatnonzero(ids >= whole.kv.num_blocks)
    if bad.size:
        s, e, block = seq[bad[0]], entry[bad[0]], int(ids[bad[0]])
        named = block - UINT32_MAX - 1 if block > UINT32_MAX // 2 else block
        raise ValueError(
            f"{whole.fn}: block_tables[{s}][{e}] = {named} is needed and names none of "
            f"{whole.kv.num_blocks} blocks"
        )


@contextmanager
def _unobserved() -> Iterator[None]:
    """Calls made here are seen by no observer."""
    token = OBSERVERS.set(())
    try:
        yield
    finally:
        OBSERVERS.reset(token)
