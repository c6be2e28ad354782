# SPDX-License-Identifier: MIT
"""What a terminal can show, and how wide text is on it."""

from __future__ import annotations

import os
import unicodedata
from typing import Any, Final

_CUT: Final = "..."


def is_terminal(stream: Any) -> bool:
    """Whether ``stream`` is a terminal that can do more than print (TERM=dumb); a closed one is
    None."""
    return stream is not None and bool(stream.isatty()) and os.environ.get("TERM") != "dumb"


def wants_colour(stream: Any) -> bool:
    """Whether ``stream`` is such a terminal and NO_COLOR does not ask for plain text."""
    return is_terminal(stream) and not os.environ.get("NO_COLOR")


def prints(stream: Any, letters: str) -> bool:
    """Whether the encoding of ``stream`` has these letters."""
    try:
        letters.encode(getattr(stream, "encoding", None) or "ascii")
    except (LookupError, UnicodeEncodeError):
        return False
    return True


def harmless(name: str, width: int) -> str:
    """``name`` in at most ``width`` columns: what a terminal or a page would act on is spelled out,
    and no name at all is two quotes.

    A longer one is cut in its middle, since ids are often told apart by their ends.
    """
    width = max(0, width)
    short = len(name) <= 4 * width  # beyond that even letters without a width are too many
    seen = name if short else name[: 2 * width] + name[-2 * width :]
    pieces = [c if c.isprintable() else ascii(c)[1:-1] for c in seen]
    if short and sum(map(columns, pieces)) <= width:
        return "".join(pieces) or "''"
    room = width - len(_CUT)
    head = _first(pieces, room - room // 2)
    tail = _first(pieces[::-1], room // 2)[::-1]
    return "".join([*head, _CUT[:width], *tail])


def _first(pieces: list[str], room: int) -> list[str]:
    """As many of ``pieces`` as fit in ``room`` columns."""
    for i, piece in enumerate(pieces):
        room -= columns(piece)
        if room < 0:
            return pieces[:i]
    return pieces


def columns(text: str) -> int:
    """Columns that printable ``text`` takes on a terminal."""
    return len(text) if text.isascii() else sum(map(_columns, text))


def _columns(c: str) -> int:
    if unicodedata.combining(c) or unicodedata.category(c) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(c) in "WF" else 1
