# SPDX-License-Identifier: MIT
"""The picture of a cache as text: a map of the pool, the block tables, the counters, a legend.

With colours a cell is a bar as high as its block is full, in the colour of its owner; without them
it is the owner's letter, a capital where the block is full.
"""

from __future__ import annotations

from collections.abc import Iterator
from textwrap import wrap
from typing import Final

from tinyllm._check import integer
from tinyllm._terminal import columns, harmless
from tinyllm._words import percent, plural
from tinyllm.observe.palette import KEYS, PALETTE, colour_of, key_of
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
    pool_cells,
    ranges_of,
    strips_of,
    title,
    tokens_of,
    warnings,
)
from tinyllm.observe.pool.snapshot import Snapshot

__all__ = ["LEAST_WIDTH", "MOST_WIDTH", "terminal"]

LEAST_WIDTH: Final = 40
MOST_WIDTH: Final = 1000

_ROWS: Final = 16  # of the map
_SEQUENCES: Final = 20
_NAME: Final = 18  # columns
_LEAST_IDS: Final = 26  # columns; with fewer the ids of a table have a line of their own
_EIGHTHS: Final = " ▁▂▃▄▅▆▇█"
_TENTHS: Final = " .:-=+*#%@"  # where the eighths cannot be printed

_BLOCK: Final = "48;5;237"  # the empty part of a block
_DIM: Final = "38;5;245"
_BOLD: Final = "1"
_FULL_SHARED: Final = "38;5;16;48;5;252"
_PART_SHARED: Final = "38;5;252;48;5;240"
_SEVERAL: Final = f"38;5;252;{_BLOCK}"
_ALARM: Final = "1;38;5;231;48;5;160"

Span = tuple[str, str]  # printable text and its SGR code


def terminal(snapshot: Snapshot, mass: Mass, width: int = 80, *, colour: bool, glyphs: bool) -> str:
    """The picture, no line wider than ``width`` columns, without a newline at its end.

    colour: escape sequences may be used. glyphs: characters beyond ASCII may be.

    Raises: TypeError, ValueError for a width that is no integer of 40 .. 1000.
    """
    width = integer("look", "width", width, LEAST_WIDTH, MOST_WIDTH)
    drawn = _Drawn(snapshot, mass, width, colour and glyphs, glyphs)
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
    """The lines as spans; bars: cells are bars, else letters."""

    def __init__(
        self, snapshot: Snapshot, mass: Mass, width: int, bars: bool, glyphs: bool
    ) -> None:
        self.snapshot, self.mass, self.width = snapshot, mass, width
        self.bars, self.glyphs = bars, glyphs

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
        owner = int(cells.owner[i])
        code = _SEVERAL if kind == SEVERAL else f"{_owner(owner)};{_BLOCK}"
        if self.bars:
            return _EIGHTHS[_step(level, 8)], code
        key = "*" if kind == SEVERAL else key_of(owner)
        return (key if level == 1 else key.lower()), code

    def legend(self, cells: Cells) -> Iterator[list[Span]]:
        if cells.per > 1:
            yield [(f"  1 cell = {cells.per} blocks", _BOLD)]
        there = set(cells.kind.tolist())
        what, n_owners = ("colours", len(PALETTE)) if self.bars else ("letters", len(KEYS))
        again = f", {what} return" if len(self.snapshot.sequences) > n_owners else ""
        full = (
            f"colour: owner{again}, height: fill"
            if self.bars
            else f"A full, a partly filled{again}"
        )
        entries: list[tuple[int, list[Span]]] = [
            (
                OWNED,
                [(_EIGHTHS[5] if self.bars else "Aa", f"{_owner(0)};{_BLOCK}"), (f" {full}", _DIM)],
            ),
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
        any_shared = self.snapshot.counters["blocks_shared"] > 0
        yield [("sequences", _BOLD), ("   * shared" if any_shared else "", _DIM)]
        shown = sequences[:_SEQUENCES]
        names = [harmless(s.name, _NAME) for s in shown]
        counts = [
            f"{tokens_of(s)}, {plural(len(s.held), 'block')}, {plural(s.runs, 'run')}"
            for s in shown
        ]
        name_width, count_width = max(map(columns, names)), max(map(len, counts))
        for i, (name, count) in enumerate(zip(names, counts, strict=True)):
            pad = " " * (name_width - columns(name))
            key = [("█ " if self.bars else f"{key_of(i)} ", _owner(i))]
            head: list[Span] = [
                ("  ", ""),
                *key,
                (name + pad, ""),
                (f"  {count:{count_width}}  ", ""),
            ]
            room = self.width - _wide(head)
            if room < _LEAST_IDS:
                yield head
                head, room = [("      ", "")], self.width - 6
            yield head + self.ids(i, room)
            if i in self.mass:
                yield from self.strips(i)
        if len(sequences) > len(shown):
            yield [(f"  ... and {len(sequences) - len(shown)} more", _DIM)]

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
        ramp = _EIGHTHS if self.glyphs else _TENTHS
        strips = strips_of(self.mass[i], max(8, self.width - 44))
        if strips and strips[0].per > 1:
            yield [(f"      1 bar = {strips[0].per} blocks", _DIM)]
        table = self.snapshot.sequences[i].table
        for strip in strips:
            bars = "".join(ramp[_step(part, len(ramp) - 1)] for part in _relative(strip))
            said = f" {percent(strip.most)} in block {table[strip.peak]}"
            if strip.rest > 5e-4:
                said += f", sink {percent(strip.rest)}"
            yield [
                (f"      {strip.label:10} ", _DIM),
                (bars, f"{_owner(i)};{_BLOCK}"),
                (said, _DIM),
            ]


def _relative(strip: Strip) -> list[float]:
    """Bars against the tallest."""
    tallest = float(strip.bars.max())
    return [float(bar) / tallest if tallest > 0 else 0.0 for bar in strip.bars]


def _step(part: float, steps: int) -> int:
    """0 for nothing, ``steps`` for all; a little is 1."""
    if part >= 1:
        return steps
    return 0 if part <= 0 else max(1, min(steps - 1, round(part * steps)))


def _owner(i: int) -> str:
    return f"38;5;{colour_of(i).ansi}"


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
