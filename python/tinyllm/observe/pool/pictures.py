# SPDX-License-Identifier: MIT
"""Pictures: those of the groups of a cache whose layers are of different kinds."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from tinyllm._files import write_whole
from tinyllm.observe.page import WIDTH
from tinyllm.observe.pool.picture import Picture

__all__ = ["Pictures"]


class Pictures:
    """What ``LayeredKVCache.look`` gives: a ``Picture`` of each group below its name. Printed it is
    text, in a notebook a picture. parts: the name and picture of each."""

    def __init__(self, parts: Mapping[str, Picture]) -> None:
        self.parts = dict(parts)

    def text(
        self, width: int | None = None, *, colour: bool | None = None, glyphs: bool | None = None
    ) -> str:
        """As ``Picture.text``; the names may be wider."""
        return "\n".join(
            f"{name}\n{picture.text(width, colour=colour, glyphs=glyphs)}"
            for name, picture in self.parts.items()
        )

    def svg(self) -> str:
        """All in one SVG document, whose description gives the names in order."""
        drawn, y = [], 0.0
        for picture in self.parts.values():
            page = picture.svg()
            drawn.append(page.replace("<svg ", f'<svg y="{y:g}" ', 1))
            y += float(re.search(r'height="([0-9.]+)"', page)[1]) + 12  # type: ignore[index]
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{y - 12:g}">\n'
            f"{''.join(drawn)}</svg>\n"
        )

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes ``svg()`` to a file, whole or not at all. Raises: OSError."""
        write_whole(path, self.svg())

    def _repr_svg_(self) -> str:
        return self.svg()

    def __str__(self) -> str:
        return self.text()

    __repr__ = __str__
