# SPDX-License-Identifier: MIT
"""How far the next-token distributions of a model move when K and V are stored in another way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tinyllm import PagedKVCache

from .model import Model
from .rows import Crew, Floats

Doubles = npt.NDArray[np.float64]
_CHUNK = 128  # tokens a call: their logits are large


class Divergence(NamedTuple):
    """Of every token of a text: the KL divergence of the distribution after it from the expected
    one, in nats, and whether the likeliest next token is the same."""

    kl: Doubles
    kept: npt.NDArray[np.bool_]


def read_beside(
    model: Model,
    expected: PagedKVCache,
    others: Sequence[PagedKVCache],
    name: str,
    tokens: Sequence[int],
    crew: Crew,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> list[Divergence]:
    """Store `tokens` as a new sequence in every cache, some at a time, and tell how far what comes
    out with each of `others` is from what comes out with `expected`."""
    for cache in (expected, *others):
        cache.add_seq(name)
    parts: list[list[Divergence]] = [[] for _ in others]
    for begin in range(0, len(tokens), _CHUNK):
        work = [(name, tokens[begin : begin + _CHUNK])]
        wanted = log_softmax(model.forward(expected, work, crew, every=True))
        for cache, own in zip(others, parts, strict=True):
            own.append(divergence(wanted, model.forward(cache, work, crew, every=True)))
        progress(min(begin + _CHUNK, len(tokens)), len(tokens))
    return [Divergence(*map(np.concatenate, zip(*own, strict=True))) for own in parts]


def divergence(expected: Doubles, found: Floats) -> Divergence:
    """Of logits [n, vocabulary] from ``log_softmax`` of the expected ones."""
    own = log_softmax(found)
    kl: Doubles = (np.exp(expected) * (expected - own)).sum(axis=1)
    return Divergence(kl, expected.argmax(axis=1) == own.argmax(axis=1))


def log_softmax(logits: Floats) -> Doubles:
    x = logits.astype(np.float64)
    x -= x.max(axis=1, keepdims=True)
    x -= np.log(np.exp(x).sum(axis=1, keepdims=True))
    return x
