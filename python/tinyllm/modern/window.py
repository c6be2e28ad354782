# SPDX-License-Identifier: MIT
"""windowed_attention: what attention with a window and sinks is, in float64; clear, not fast."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["windowed_attention"]


def windowed_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    window: int | None = None,
    n_sink: int = 0,
    sink_logits: ArrayLike | None = None,
    q_offset: int = 0,
    scale: float | None = None,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Causal attention in float64: ``(out [B,H,Tq,Dv], lse [B,H,Tq])``.

    q: [B,H,Tq,D]; k: [B,Hkv,Tk,D]; v: [B,Hkv,Tk,Dv]; query head h reads KV head h // (H // Hkv).
    The inputs are converted to float64, copied where that is needed. Query i stands at p = q_offset
    + i and sees key j when

        j <= p and (window is None or p - j < window or j < n_sink)

    sink_logits: [H], joins each head's denominator once, unscaled, with no value; -inf is no sink.
    scale: None is D ** -0.5.
    A row that sees nothing is zeros with lse -inf (with a sink: lse is the sink). A visible score
    that is NaN or +inf makes its row NaN; what a row does not see has no influence on it, NaN
    included.

    Raises: ValueError for shapes that disagree, H % Hkv != 0, sink_logits not [H], or a negative
    n_sink or q_offset.
    """
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    sinks = None if sink_logits is None else np.asarray(sink_logits, np.float64)
    _check(q, k, v, sinks)
    _not_negative(n_sink=n_sink, q_offset=q_offset)
    n_batch, n_heads, n_rows, width = q.shape
    if scale is None:
        scale = width**-0.5 if width else 1.0
    group = n_heads // k.shape[1] if n_heads else 1
    k, v = (np.repeat(a, group, axis=1)[:, :n_heads] for a in (k, v))
    sink = np.full(n_heads, -np.inf) if sinks is None else sinks
    out = np.zeros((n_batch, n_heads, n_rows, v.shape[3]))
    lse = np.empty((n_batch, n_heads, n_rows))
    j = np.arange(k.shape[2])
    for i in range(n_rows):
        p = q_offset + i
        near = np.ones_like(j, bool) if window is None else (p - j < window) | (j < n_sink)
        seen = np.flatnonzero(near & (j <= p))
        out[:, :, i], lse[:, :, i] = _row(q[:, :, i], k[:, :, seen], v[:, :, seen], sink, scale)
    return out, lse


def _row(
    q: NDArray[np.float64],
    k: NDArray[np.float64],
    v: NDArray[np.float64],
    sink: NDArray[np.float64],
    scale: float,
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """One query per head, q [B,H,D], over the keys it sees, k [B,H,n,D], v [B,H,n,Dv].

    out [B,H,Dv], lse [B,H].
    """
    with np.errstate(all="ignore"):  # infinities and NaN follow the rules of IEEE 754
        scores = scale * np.einsum("bhd,bhnd->bhn", q, k)
        top = np.maximum(scores.max(axis=2, initial=-np.inf), sink)
        shift = np.where(top == -np.inf, 0.0, top)
        weights = np.exp(scores - shift[:, :, None])
        total = weights.sum(axis=2) + np.exp(sink - shift)
        out = np.einsum("bhn,bhnd->bhd", weights, v) / total[:, :, None]
        return np.where(total[:, :, None] == 0.0, 0.0, out), shift + np.log(total)


def _check(
    q: NDArray[np.float64],
    k: NDArray[np.float64],
    v: NDArray[np.float64],
    sinks: NDArray[np.float64] | None,
) -> None:
    fn = "windowed_attention"
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        raise ValueError(
            f"{fn}: q, k and v have 4 axes, the shapes are {q.shape}, {k.shape} and {v.shape}"
        )
    if k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"{fn}: k has shape {k.shape} and v {v.shape}: they differ in B, Hkv or Tk"
        )
    if (q.shape[0], q.shape[3]) != (k.shape[0], k.shape[3]):
        raise ValueError(f"{fn}: q {q.shape} and k {k.shape} differ in B or D")
    n_heads, n_kv = q.shape[1], k.shape[1]
    if n_heads and (n_kv == 0 or n_heads % n_kv):
        raise ValueError(f"{fn}: {n_heads} query heads do not divide into {n_kv} KV heads")
    if sinks is not None and sinks.shape != (n_heads,):
        raise ValueError(f"{fn}: sink_logits has shape {sinks.shape}, expected [H] = ({n_heads},)")


def _not_negative(**numbers: int) -> None:
    for name, value in numbers.items():
        if value < 0:
            raise ValueError(f"windowed_attention: {name} = {value} is negative")
