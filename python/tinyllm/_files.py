# SPDX-License-Identifier: MIT
"""Files that are there whole or not at all."""

from __future__ import annotations

import os
import secrets
from pathlib import Path


class Replacement:
    """A file that takes the place of ``path`` when the ``with`` block ends, or is removed where the
    block raises.

    part: where it is written meanwhile, a hidden neighbour of what ``path`` leads to. A device or a
    pipe cannot be replaced: part is ``path`` itself then.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._place = self.part = Path(path)
        if not self._place.exists() or self._place.is_file():
            self._place = Path(os.path.realpath(path))  # a link stays one
            name = f".{self._place.name}.{secrets.token_hex(4)}.part"
            self.part = self._place.with_name(name)

    def __enter__(self) -> Path:
        return self.part

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.part == self._place:
            return
        try:
            if kind is None:
                self._reach_the_disk()
                os.replace(self.part, self._place)
        finally:
            self.part.unlink(missing_ok=True)

    def _reach_the_disk(self) -> None:
        file = os.open(self.part, os.O_RDONLY)
        try:
            os.fsync(file)
        finally:
            os.close(file)


def write_whole(path: str | os.PathLike[str], text: str) -> None:
    """``text`` in UTF-8 at ``path``; a file of that name is replaced. Raises OSError, and then the
    old file is still there."""
    with Replacement(path) as part:
        part.write_text(text, encoding="utf-8")
