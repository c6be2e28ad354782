# SPDX-License-Identifier: MIT
"""Layer: what a cache is told of one layer of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from tinyllm._check import INT32_MAX, UINT32_MAX, integer

__all__ = ["Layer", "checked_layers", "kinds_of", "named_layers"]

_SIZES: Final = {
    "n_kv_heads": (1, UINT32_MAX),
    "d_head": (1, UINT32_MAX),
    "window": (0, INT32_MAX),
}


@dataclass(frozen=True)
class Layer:
    """One layer of a model, for ``PagedKVCache(layers=[...])``.

    n_kv_heads, d_head: KV heads, and elements of a row.
    window: how many of the last positions attention sees, the row's own included; 0: all.

    Raises: ValueError for what is no integer, for sizes outside 1 .. 2**32-1, and for a window
    outside 0 .. 2**31-1.
    """

    n_kv_heads: int
    d_head: int
    window: int = 0

    def __post_init__(self) -> None:
        for name, (low, high) in _SIZES.items():
            size = integer("Layer", name, getattr(self, name), low, high, ValueError)
            object.__setattr__(self, name, size)


def checked_layers(fn: str, layers: Any) -> tuple[Layer, ...]:
    """``layers`` as a tuple. Raises TypeError for what is no sequence of layers, ValueError where
    there are none."""
    if not isinstance(layers, Sequence) or not all(isinstance(layer, Layer) for layer in layers):
        raise TypeError(f"{fn}: layers must be a list of tinyllm.Layer, not {layers!r}")
    if not layers:
        raise ValueError(f"{fn}: layers is empty; a cache has one at least")
    return tuple(layers)


def kinds_of(layers: Sequence[Layer]) -> dict[Layer, list[int]]:
    """The kinds of layers, each with the numbers of those that are of it, in order."""
    kinds: dict[Layer, list[int]] = {}
    for i, layer in enumerate(layers):
        kinds.setdefault(layer, []).append(i)
    return kinds


def named_layers(numbers: Sequence[int]) -> str:
    """Rising numbers of layers as a text: "0-4,6"."""
    runs: list[list[int]] = []
    for i in numbers:
        if runs and i == runs[-1][-1] + 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
