# SPDX-License-Identifier: MIT
"""The picture of a cache as text: a map of the pool, the block tables, the counters, a legend.

A cell is the letter of its owner, a capital where the block is full. With colours its ground is the
owner's: bright where the block is full, dark where it is at least half full, else that of an empty
one with a letter in the colour.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from textwrap import wrap
from typing import Final

from tinyllm._check import integer
from tinyllm._terminal import columns, harmless
from tinyllm._words import percent, plural
from tinyllm.observe.palette import KEYS, N_PAIRS, colour_of, key_of
from tinyllm.observe.pool.layout import (
    CACHED,
    FREE,
    OWNED,
    SEVERAL,
    SHARED,
    UNOWNED,
    Cells,
    Mass,
    Strip,
    facts,
    hidden,
    pool_cells,
    ranges_of,
    strips_of,
    tallest_of,
    title,
    tokens_of,
    warnings,
)
from tinyllm.observe.pool.snapshot import Snapshot

__all__ = ["LEAST_WIDTH", "MOST_WIDTH", "terminal"]

LEAST_WIDTH: Final = 40
MOST_WIDTH: Final = 1000

_ROWS: Final = 16  # of the map
_NAME: Final = 18  # columns at least, where a quarter of the width is less
_LEAST_IDS: Final = 26  # columns; with fewer the ids of a table have a line of their own
_EIGHTHS: Final = " ▁▂▃▄▅▆▇█"
_TENTHS: Final = " .:-=+*#%@"  # where the eighths cannot be printed

_BLOCK: Final = "48;5;235"  # the empty part of a block
_DIM: Final = "38;5;245"
_BOLD: Final = "1"
_FULL_SHARED: Final = "38;5;16;48;5;252"
_PART_SHARED: Final = "38;5;252;48;5;240"
_SEVERAL: Final = f"38;5;252;{_BLOCK}"
_ALARM: Final = "1;38;5;231;48;5;160"

Span = tuple[str, str]  # printable text and its SGR code


def terminal(
    snapshot: Snapshot,
    mass: Mass,
    shown: Sequence[int],
    width: int = 80,
    *,
    colour: bool,
    glyphs: bool,
) -> str:
    """The picture, no line wider than ``width`` columns, without a newline at its end.

    shown: places of the sequences whose tables are drawn, in their order. colour: escape sequences
    may be used. glyphs: characters beyond ASCII may be.

    Raises: TypeError, ValueError for a width that is no integer of 40 .. 1000.
    """
    width = integer("look", "width", width, LEAST_WIDTH, MOST_WIDTH)
    drawn = _Drawn(snapshot, mass, shown, width, colour, glyphs)
    return "\n".join(_render(line, width, colour) for line in drawn.lines())


def _render(line: list[Span], width: int, colour: bool) -> str:
    text = ""
    for piece, code in line:
        if not piece:
            continue
        shown = harmless(piece, width)
        width -= columns(shown)
        text += f"\x1b[{code}m{shown}\x1b[0m" if colour and code and shown else shown
    return text if colour else text.rstrip()


class _Drawn:
    """The lines as spans."""

    def __init__(
        self,
        snapshot: Snapshot,
        mass: Mass,
        shown: Sequence[int],
        width: int,
        colour: bool,
        glyphs: bool,
    ) -> None:
        self.snapshot, self.shown, self.width, self.colour = snapshot, shown, width, colour
        self.bars, self.ramp = colour and glyphs, _EIGHTHS if glyphs else _TENTHS
        most = max(8, width - 44)
        self.strips_of = {i: strips_of(mass[i], most) for i in shown if i in mass}
        self.tallest = tallest_of(chain.from_iterable(self.strips_of.values()))

    def lines(self) -> Iterator[list[Span]]:
        s = self.snapshot
        yield from self.wrapped("", _BOLD, title(s), _BOLD)
        for subject, said in facts(s):
            yield from self.wrapped(f"  {subject:9}", _DIM, said, "")
        for warning in warnings(s):
            yield from self.wrapped("  LEAK     ", _ALARM, warning, _ALARM)
        yield []
        yield from self.pool_map()
        yield from self.tables()

    def wrapped(self, head: str, head_code: str, said: str, code: str) -> Iterator[list[Span]]:
        for line in wrap(said, self.width - len(head)):
            yield [(head, head_code), (line, code)]
            head, head_code = " " * len(head), ""

    # --- the map ---

    def pool_map(self) -> Iterator[list[Span]]:
        digits = len(str(self.snapshot.num_blocks - 1))
        across = max(8, (self.width - digits - 4) // 8 * 8)
        if across >= 64:
            across = across // 64 * 64
        cells = pool_cells(self.snapshot, across * _ROWS)
        n = len(cells.kind)
        for begin in range(0, n, across):
            row = [self.cell(cells, i) for i in range(begin, min(begin + across, n))]
            yield [(f"  {begin * cells.per:{digits}} ", _DIM), *_joined(row)]
        yield from self.legend(cells)

    def cell(self, cells: Cells, i: int) -> Span:
        kind, level = cells.kind[i], float(cells.level[i])
        if kind == FREE:
            return ("·" if self.bars else "."), _DIM
        if kind == CACHED:
            return ("░" if self.bars else "~"), _DIM
        if kind == UNOWNED:
            return "?", _ALARM
        if kind == SHARED:
            refs = int(cells.refs[i])
            return (str(refs) if refs < 10 else "+"), _FULL_SHARED if level == 1 else _PART_SHARED
        if kind == SEVERAL:
            return (_EIGHTHS[_step(level, 8)] if self.bars else "*"), _SEVERAL
        owner = int(cells.owner[i])
        key = key_of(owner)
        return (key if level == 1 else key.lower()), _ground(owner, level)

    def legend(self, cells: Cells) -> Iterator[list[Span]]:
        if cells.per > 1:
            yield [(f"  1 cell = {cells.per} blocks", _BOLD)]
        there = set(cells.kind.tolist())
        n, what = (N_PAIRS, "letters and colours") if self.colour else (len(KEYS), "letters")
        again = f", {what} return" if len(self.snapshot.sequences) > n else ""
        if self.colour:
            owned: list[Span] = [("A", _ground(0, 1)), ("a", _ground(0, 0.5)), ("a", _ground(0, 0))]
            owned += [(f" full, half or more, less{again}", _DIM)]
        else:
            owned = [(f"Aa A full, a partly filled{again}", "")]
        entries: list[tuple[int, list[Span]]] = [
            (OWNED, owned),
            (SHARED, [("2", _FULL_SHARED), (" shared, references", _DIM)]),
            (SEVERAL, [(_EIGHTHS[5] if self.bars else "*", _SEVERAL), (" of several", _DIM)]),
            (CACHED, [("░" if self.bars else "~", _DIM), (" cached", _DIM)]),
            (FREE, [("·" if self.bars else ".", _DIM), (" free", _DIM)]),
            (UNOWNED, [("?", _ALARM), (" leak", _DIM)]),
        ]
        line: list[Span] = []
        for kind, spans in entries:
            if kind not in there:
                continue
            if line and _wide(line) + _wide(spans) + 2 > self.width:
                yield line
                line = []
            line += [("  ", ""), *spans]
        yield line

    # --- the tables ---

    def tables(self) -> Iterator[list[Span]]:
        sequences = self.snapshot.sequences
        if not sequences:
            return
        yield []
        yield from self.heading()
        shown = [sequences[i] for i in self.shown]
        names = [harmless(s.name, max(_NAME, self.width // 4)) for s in shown]
        counts = [
            f"{tokens_of(s)}, {plural(len(s.held), 'block')}, {plural(s.runs, 'run')}"
            for s in shown
        ]
        name_width, count_width = (
            max(map(columns, names), default=0),
            max(map(len, counts), default=0),
        )
        for i, name, count in zip(self.shown, names, counts, strict=True):
            pad = " " * (name_width - columns(name))
            head: list[Span] = [
                ("  ", ""),
                (key_of(i), _ground(i, 1)),
                (f" {name}{pad}", ""),
                (f"  {count:{count_width}}  ", ""),
            ]
            room = self.width - _wide(head)
            if room < _LEAST_IDS:
                yield head
                head, room = [("      ", "")], self.width - 6
            yield head + self.ids(i, room)
            yield from self.strips(i)
        yield from self.wrapped("  ", "", hidden(self.snapshot, self.shown), _DIM)

    def heading(self) -> Iterator[list[Span]]:
        said = ["* shared"] if self.snapshot.counters["blocks_shared"] else []
        if self.strips_of:
            said.append(f"{self.ramp[-1]} {percent(self.tallest)} of a head's attention")
        yield [("sequences", _BOLD), ("".join(f"   {words}" for words in said), _DIM)]

    def ids(self, i: int, room: int) -> list[Span]:
        """The ranges of a table that fit in ``room`` columns, and how many blocks are not shown."""
        sequence = self.snapshot.sequences[i]
        spans: list[Span] = [(f"({sequence.gone} gone) ", _DIM)] if sequence.gone else []
        left = len(sequence.held)
        for piece in ranges_of(self.snapshot, i, room):
            span = (f"{piece}* ", _DIM) if piece.shared else (f"{piece} ", "")
            more = f"... and {left} more"
            fits = _wide(spans) + len(span[0]) + (len(more) if left > len(piece) else -1) <= room
            if not fits:
                return [*spans, (more, _DIM)]
            spans, left = [*spans, span], left - len(piece)
        return spans

    def strips(self, i: int) -> Iterator[list[Span]]:
        strips = self.strips_of.get(i, [])
        if strips and strips[0].per > 1:
            yield [(f"      1 bar = {strips[0].per} blocks", _DIM)]
        table = self.snapshot.sequences[i].table
        for strip in strips:
            said = f" {percent(strip.most)} in block {table[strip.peak]}"
            if strip.rest > 5e-4:
                said += f", sink {percent(strip.rest)}"
            yield [
                (f"      {strip.label:10} ", _DIM),
                (self.bars_of(strip), f"{_owner(i)};{_BLOCK}"),
                (said, _DIM),
            ]

    def bars_of(self, strip: Strip) -> str:
        """Its bars against the tallest of the picture."""
        steps, parts = len(self.ramp) - 1, strip.bars / (self.tallest or 1)
        return "".join(self.ramp[_step(part, steps)] for part in parts.tolist())


def _step(part: float, steps: int) -> int:
    """0 for nothing, ``steps`` for all; a little is 1."""
    if part >= 1:
        return steps
    return 0 if part <= 0 else max(1, min(steps - 1, round(part * steps)))


def _owner(i: int) -> str:
    return f"38;5;{colour_of(i).ansi}"


def _ground(i: int, level: float) -> str:
    """The colours of a letter of the i-th sequence whose block is filled so far."""
    colour = colour_of(i)
    if level == 1:
        return f"38;5;16;48;5;{colour.ansi}"
    return f"38;5;231;48;5;{colour.dark}" if level >= 0.5 else f"{_owner(i)};{_BLOCK}"


def _wide(spans: list[Span]) -> int:
    return sum(columns(text) for text, _ in spans)


def _joined(spans: list[Span]) -> list[Span]:
    """Neighbours of one colour as one span."""
    joined: list[Span] = []
    for text, code in spans:
        if joined and joined[-1][1] == code:
            joined[-1] = (joined[-1][0] + text, code)
        else:
            joined.append((text, code))
    return joined
