# SPDX-License-Identifier: MIT
"""What everybody computes: shapes, one set of values, and the float64 answer.

K and V are drawn once as f16; each implementation writes them into its own layout, ``copies`` times
over, so that a call after a call finds none of them in a cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

F16 = NDArray[np.float16]
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]


@dataclass(frozen=True)
class Shape:
    """B sequences of ctx positions, H query heads on Hkv KV heads, D wide; rows queries a sequence:
    1 in decode, ctx (causal) in prefill."""

    B: int
    ctx: int
    H: int
    Hkv: int
    D: int
    rows: int = 1

    @classmethod
    def parse(cls, text: str) -> Shape:
        """``B,ctx,H,Hkv,D`` or ``prefill,T,H,Hkv,D``."""
        first, *rest = text.split(",")
        ctx, H, Hkv, D = (int(x) for x in rest)
        return (
            cls(1, ctx, H, Hkv, D, ctx) if first == "prefill" else cls(int(first), ctx, H, Hkv, D)
        )

    @property
    def prefill(self) -> bool:
        return self.rows > 1

    @property
    def group(self) -> int:
        return self.H // self.Hkv

    @property
    def scale(self) -> float:
        return float(self.D**-0.5)

    @property
    def kv_bytes(self) -> int:
        """K and V in f16, whatever an implementation stores."""
        return 4 * self.B * self.ctx * self.Hkv * self.D

    @property
    def flops(self) -> float:
        """Two products over what a row sees; of a causal square only the lower half counts."""
        seen = self.rows * (self.rows + 1) / 2 if self.prefill else self.ctx
        return 4.0 * self.B * self.H * self.D * seen

    def __str__(self) -> str:
        heads = f"H {self.H}/{self.Hkv}, D {self.D}"
        return (
            f"prefill {self.ctx}, {heads}"
            if self.prefill
            else f"B {self.B}, ctx {self.ctx}, {heads}"
        )


@dataclass
class Inputs:
    """q [B,H,rows,D]; k, v [B,Hkv,ctx,D]. All are f16 values."""

    shape: Shape
    q: F16
    k: F16
    v: F16
    copies: int
    seed: int
    _answers: dict[bool, F64] = field(default_factory=dict)

    @classmethod
    def draw(cls, shape: Shape, seed: int = 1) -> Inputs:
        s, rng = shape, np.random.default_rng(seed)
        kv = (s.B, s.Hkv, s.ctx, s.D)
        q, k, v = (
            rng.standard_normal(size, np.float32).astype(np.float16)
            for size in ((s.B, s.H, s.rows, s.D), kv, kv)
        )
        copies = 1 if s.prefill else 4 * last_level_cache() // s.kv_bytes + 1
        return cls(shape, q, k, v, copies, seed)

    def shuffled(self, n: int) -> NDArray[np.int64]:
        """0 .. n-1 in no order: where the blocks of a paged cache lie."""
        return np.random.default_rng(self.seed + 1).permutation(n)

    def answer(self, bf16: bool) -> F64:
        """[B,H,rows,D] in float64, from values as they are stored: f16, or rounded to bf16."""
        if bf16 not in self._answers:
            stored = (
                to_bf16(x) if bf16 else x.astype(np.float32) for x in (self.q, self.k, self.v)
            )
            self._answers[bf16] = attention_f64(self.shape, *stored)
        return self._answers[bf16]


def attention_f64(s: Shape, q: F32, k: F32, v: F32) -> F64:
    """Attention as it is defined, head by head."""
    out = np.empty(q.shape, np.float64)
    hidden = np.triu(np.full((s.rows, s.ctx), -np.inf), 1) if s.prefill else np.zeros((1, 1))
    for b, h in np.ndindex(s.B, s.H):
        keys, values = (x[b, h // s.group].astype(np.float64) for x in (k, v))
        score = q[b, h].astype(np.float64) @ keys.T * s.scale + hidden
        weight = np.exp(score - score.max(axis=1, keepdims=True))
        out[b, h] = weight @ values / weight.sum(axis=1, keepdims=True)
    return out


def bf16_bits(x: NDArray[Any]) -> NDArray[np.uint16]:
    """Rounded to the nearest bf16, ties to even; finite values only."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def to_bf16(x: NDArray[Any]) -> F32:
    return (bf16_bits(x).astype(np.uint32) << 16).view(np.float32)


def in_blocks(x: NDArray[Any], size: int) -> NDArray[Any]:
    """[B,Hkv,ctx,D] to [B * blocks of a sequence, Hkv, size, D]; last blocks end in zeros."""
    B, Hkv, ctx, D = x.shape
    n = -(-ctx // size)
    padded = np.zeros((B, Hkv, n * size, D), x.dtype)
    padded[:, :, :ctx] = x
    blocks: NDArray[Any] = (
        padded.reshape(B, Hkv, n, size, D).swapaxes(1, 2).reshape(B * n, Hkv, size, D)
    )
    return blocks


def last_level_cache() -> int:
    """Bytes; 32 MiB where the system does not say."""
    unit = {"K": 1 << 10, "M": 1 << 20}
    sizes = [
        p.read_text().strip()
        for p in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")
    ]
    return max((int(s[:-1]) * unit[s[-1]] for s in sizes if s and s[-1] in unit), default=32 << 20)
