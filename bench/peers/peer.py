# SPDX-License-Identifier: MIT
"""The interface that the library and its peers share in this benchmark."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from inputs import F32, Inputs


class Unavailable(Exception):
    """This implementation cannot be had here, or not for this shape; says why."""


class NotCompared(Unavailable):
    """This implementation is not meant to be compared on this shape."""


@dataclass
class Run:
    """An implementation made ready for one shape."""

    call: Callable[[int], object]  # computes over copy i, 0 <= i < inputs.copies
    output: Callable[[], F32]  # of the last call, [B,H,rows,D]
    note: str = ""  # a choice that was made here, such as the faster of two ways to call
    close: Callable[[], object] = lambda: None


class Peer(Protocol):
    """One implementation with one type of stored K and V. Making one imports its package; that, and
    ``prepare``, may raise Unavailable."""

    name: str
    version: str  # of the package
    bf16: bool  # the values are rounded to bf16, so the answer is that of rounded values
    tolerance: float  # largest error relative to the largest element of the answer

    def prepare(self, inputs: Inputs, threads: int) -> Run: ...


def check(peer: Peer, run: Run, inputs: Inputs) -> float:
    """Runs every copy and returns the largest error. Raises Unavailable where it is too large."""
    answer = inputs.answer(peer.bf16)
    largest = float(np.abs(answer).max())
    worst = 0.0
    for i in range(inputs.copies):
        run.call(i)
        error = float(np.abs(run.output() - answer).max()) / largest
        worst = error if not error <= worst else worst  # a NaN stays
    if not worst <= peer.tolerance:
        raise Unavailable(
            f"wrong result: error {worst:.1e}, allowed {peer.tolerance:.0e}, of the largest element"
        )
    return worst
