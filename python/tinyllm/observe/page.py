# SPDX-License-Identifier: MIT
"""What the SVG pictures share: the page and its lettering.

A page is one self-contained document with its own background, so that it reads on light and on dark
pages; no scripts, styles or ids that could clash with those of the page it stands in. Its type has
one size: weight and colour tell headings apart, and text without room is cut, never made smaller.
"""

from __future__ import annotations

from typing import Final
from xml.sax.saxutils import escape, quoteattr

from tinyllm._terminal import harmless
from tinyllm.observe.palette import INK, PAPER

WIDTH: Final = 960
SIZE: Final = 12  # of all type
COLUMN: Final = 7.4  # pixels of a letter of that size in the widest of the fonts, on average
LEFT, RIGHT = 24, 936  # where contents begin and end
MUTED: Final = "#5f6b7a"
SLATE: Final = "#3e4c59"  # what several sequences have in common

_SANS: Final = "system-ui, 'Segoe UI', 'Helvetica Neue', 'DejaVu Sans', sans-serif"
_MONO: Final = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"


def document(label: str, height: float, border: str, body: str) -> str:
    """The page around ``body``; ``label``, which may hold anything, is for screen readers."""
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height:g}" '
        f'viewBox="0 0 {WIDTH} {height:g}" font-family="{_SANS}" font-size="{SIZE}" fill="{INK}" '
        f'role="img" aria-label={quoteattr(label)}>\n'
        f'<rect width="{WIDTH}" height="{height:g}" rx="8" fill="{PAPER}" stroke="{border}"/>\n'
        f"{body}\n</svg>\n"
    )


def letters(
    x: float,
    y: float,
    words: str,
    *,
    fill: str = INK,
    weight: int = 400,
    anchor: str = "start",
    mono: bool = False,
    room: float | None = None,
) -> str:
    """A line of text; what may not fit in ``room`` pixels is cut in its middle."""
    if room is not None:
        words = harmless(words, int(room / COLUMN))
    more = f' fill="{fill}"' if fill != INK else ""
    more += f' font-weight="{weight}"' if weight != 400 else ""
    more += f' text-anchor="{anchor}"' if anchor != "start" else ""
    more += f' font-family="{_MONO}"' if mono else ""
    return f'<text x="{x:g}" y="{y:g}"{more}>{escape(words)}</text>'
