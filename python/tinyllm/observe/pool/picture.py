# SPDX-License-Identifier: MIT
"""Picture: a snapshot that draws itself, as text for a terminal and as SVG for a page."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tinyllm._files import write_whole
from tinyllm._terminal import prints, wants_colour
from tinyllm.observe.pool.layout import SHOWN, ordered
from tinyllm.observe.pool.snapshot import Snapshot
from tinyllm.observe.pool.svg import svg
from tinyllm.observe.pool.terminal import LEAST_WIDTH, MOST_WIDTH, terminal

__all__ = ["Picture"]

_GLYPHS: Final = "·░▁█"  # some of those that text is drawn with


class Picture:
    """What ``PagedKVCache.look`` gives: printed it is text, in a notebook a picture.

    Text is as wide as the terminal, 80 columns elsewhere. It is coloured on a terminal, unless
    NO_COLOR is set or TERM is dumb; where the encoding of stdout has no block glyphs it is ASCII.
    """

    def __init__(
        self,
        snapshot: Snapshot,
        mass: Mapping[int, NDArray[Any]] | None = None,
        *,
        sequences: Iterable[int] | None = None,
        sort: str | None = None,
    ) -> None:
        """mass: of the i-th sequence of the snapshot, float [heads, n] or [n], n entries of a table
        or more. sequences: whose tables are shown, by their places in the snapshot and in this
        order; None is the first 20 of all. sort: "blocks" or "tokens", most first, or "name".

        The map is of the whole pool, and a sequence keeps its letter and its colour, whichever are
        shown.

        Raises: ValueError for another shape, an index without a sequence, a sequence named twice,
        an unknown ``sort``; TypeError for no such array, no list of integers.
        """
        self.snapshot = snapshot
        self._mass = {i: _checked(snapshot, i, a) for i, a in (mass or {}).items()}
        order = ordered(snapshot, sequences, sort)
        self._shown = order[:SHOWN] if sequences is None else order

    def text(
        self, width: int | None = None, *, colour: bool | None = None, glyphs: bool | None = None
    ) -> str:
        """The picture in lines of at most ``width`` columns (40 .. 1000).

        width: None is that of the terminal. colour: escape sequences may be used; None where
        stdout is a terminal that wants them. glyphs: characters beyond ASCII may; None where stdout
        can print them.
        """
        if width is None:
            width = min(max(shutil.get_terminal_size((80, 24)).columns, LEAST_WIDTH), MOST_WIDTH)
        if colour is None:
            colour = wants_colour(sys.stdout)
        if glyphs is None:
            glyphs = prints(sys.stdout, _GLYPHS)
        return terminal(self.snapshot, self._mass, self._shown, width, colour=colour, glyphs=glyphs)

    def svg(self) -> str:
        """The picture as an SVG document: no scripts, no fonts to fetch, its own background."""
        return svg(self.snapshot, self._mass, self._shown)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes ``svg()`` to a file, whole or not at all. Raises: OSError."""
        write_whole(path, self.svg())

    def _repr_svg_(self) -> str:
        return self.svg()

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__


def _checked(snapshot: Snapshot, i: int, a: NDArray[Any]) -> NDArray[np.float64]:
    """``a`` as [heads, entries of the table]."""
    if not 0 <= i < len(snapshot.sequences):
        raise ValueError(f"look: mass is for sequence {i} of {len(snapshot.sequences)}")
    sequence = snapshot.sequences[i]
    if not isinstance(a, np.ndarray) or a.dtype.kind != "f":
        raise TypeError(
            f"look: mass of {sequence.name!r} must be an array of floats, not {type(a).__name__}"
        )
    n = len(sequence.table)
    if a.ndim not in (1, 2) or a.shape[-1] < n or a.shape[0] < 1:
        raise ValueError(
            f"look: mass of {sequence.name!r} has shape {a.shape}, expected [heads, n >= {n}] or "
            f"[n >= {n}]"
        )
    return np.atleast_2d(a)[:, :n].astype(np.float64)
