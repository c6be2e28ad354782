# SPDX-License-Identifier: MIT
"""What the demonstration draws: progress, a live table, a map of the pool, a table of verdicts.

On a terminal lines are drawn over and coloured (NO_COLOR is obeyed); anywhere else, in a file or a
log, every line is final and plain.
"""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Final, TextIO

_STYLES: Final = {"bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "blue": "34"}
_OWNERS: Final = (
    31,
    32,
    33,
    35,
    36,
    91,
    92,
    95,
)  # colours of the sequences' own blocks; blue is for shared ones
_CELLS: Final = 64  # blocks in a row of the map
_QUARTERS: Final = 4

FREE, SHARED = ".", "S"


class Screen:
    def __init__(self, out: TextIO = sys.stdout) -> None:
        self._out = out
        self.live = out.isatty() and os.environ.get("TERM") != "dumb"
        self.colour = self.live and not os.environ.get("NO_COLOR")
        self._drawn = 0  # lines of the live table on the screen
        self._quarter = -1

    @property
    def width(self) -> int:
        return max(40, shutil.get_terminal_size((100, 24)).columns)

    def say(self, line: str = "") -> None:
        self._write(line + "\n")

    def heading(self, line: str) -> None:
        self.say()
        self.say(self.paint(line, "bold"))

    def paint(self, text: str, style: str) -> str:
        return self._sgr(text, _STYLES[style])

    def _sgr(self, text: str, code: str) -> str:
        return f"\033[{code}m{text}\033[0m" if self.colour else text

    def _write(self, text: str) -> None:
        encoding = self._out.encoding or "ascii"
        self._out.write(text.encode(encoding, "replace").decode(encoding))
        self._out.flush()

    # --- progress ---

    def progress(self, label: str, done: int, of: int, unit: str) -> None:
        """A bar that fills; away from a terminal a line for each quarter reached."""
        if self.live:
            filled = done * 30 // of
            bar = "#" * filled + "-" * (30 - filled)
            self._write(f"\r  {label} [{bar}] {done}/{of} {unit}" + ("\n" if done == of else ""))
            return
        quarter = done * _QUARTERS // of
        if quarter != self._quarter:
            self._write(f"  {label}: {done}/{of} {unit}\n")
        self._quarter = -1 if done == of else quarter

    # --- lines drawn over ---

    def redraw(self, lines: Sequence[str]) -> None:
        """Draw `lines` over the ones drawn before; away from a terminal nothing is drawn."""
        if not self.live:
            return
        up = f"\033[{self._drawn}A" if self._drawn else ""
        self._write(up + "".join(f"\033[2K{line[: self.width - 1]}\n" for line in lines))
        self._drawn = len(lines)

    def erase(self) -> None:
        """Take away what `redraw` drew."""
        if self._drawn:
            self._write(f"\033[{self._drawn}A\033[J")
            self._drawn = 0

    # --- pictures ---

    def pool_map(self, owners: Sequence[str]) -> None:
        """One cell a block: FREE, SHARED, or the one-letter name of its only sequence."""
        for begin in range(0, len(owners), _CELLS):
            runs = groupby(owners[begin : begin + _CELLS])
            self.say(
                f"  {begin:5d} "
                + "".join(self._cells(owner, len(list(run))) for owner, run in runs)
            )

    def _cells(self, owner: str, n: int) -> str:
        if owner == FREE:
            return self.paint(FREE * n, "dim")
        if owner == SHARED:
            return self.paint(SHARED * n, "blue")
        return self._sgr(owner * n, str(_OWNERS[ord(owner) % len(_OWNERS)]))

    # --- verdicts ---

    def working(self, what: str) -> None:
        """Say what is being computed; the verdict takes the place of it."""
        if self.live:
            self._write(f"  {what} ...")

    def verdict(self, what: str, expected: str, found: str) -> None:
        equal = expected == found
        word = self.paint("equal", "green") if equal else self.paint("DIFFERS", "red")
        if not equal and not _is_digest(found):
            word += f" {found}"
        self._write("\r\033[2K" if self.live else "")
        self.say(f"  {what:<52} {expected[:12]}  {found[:12]}  {word}")


def _is_digest(text: str) -> bool:
    return set(text) <= set("0123456789abcdef")


def owners_of(tables: Mapping[str, Sequence[int]], n_blocks: int) -> list[str]:
    """Who holds each block of a pool: `tables` has the blocks of sequences of one letter."""
    owners = [FREE] * n_blocks
    for name, table in tables.items():
        for block in table:
            owners[block] = name if owners[block] == FREE else SHARED
    return owners
