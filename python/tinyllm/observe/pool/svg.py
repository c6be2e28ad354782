# SPDX-License-Identifier: MIT
"""The picture of a cache as SVG: what ``terminal`` shows, with tooltips.

Its size is bounded whatever the pool's is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from textwrap import wrap
from typing import Final
from xml.sax.saxutils import escape

from tinyllm._terminal import harmless
from tinyllm._words import percent, plural
from tinyllm.ffi.libtinyllm import TL_KV_HASH_PREFIX
from tinyllm.observe.page import COLUMN, LEFT, MUTED, RIGHT, SIZE, SLATE, document, letters
from tinyllm.observe.palette import INK, N_PAIRS, PALETTE, PAPER, colour_of, key_of
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

__all__ = ["svg"]

_LABELS: Final = 64  # width of the block ids left of the map
_MAP: Final = LEFT + _LABELS
# Cells of the map; twice as many across where they do not fit in half the rows.
_ACROSS, _ROWS = 32, 16
_COUNTS: Final = LEFT + 196  # where the counts of a sequence begin
_TABLE: Final = 460  # where ids and strips begin
_STRIP: Final = 300  # width of a strip, 64 bars at most
_LINE: Final = 17  # from a line of text to the next
_HIGH: Final = 14  # height of a strip
_MONO: Final = 7.3  # pixels of a letter of equal width

_EMPTY, _HATCHED, _SEVERAL, _ALARM = "#e6eaee", "#f5f7fa", "#8895a3", "#c81e1e"


def svg(snapshot: Snapshot, mass: Mass, shown: Sequence[int]) -> str:
    """The document, well-formed XML whatever the sequences are called.

    shown: places of the sequences whose tables are drawn, in their order.
    """
    page = _Page(snapshot, mass, shown)
    body = "\n".join(page.draw())
    return document(title(snapshot), page.y, _EMPTY, body)


class _Page:
    """Draws from the top down; ``y`` is where the next thing goes."""

    def __init__(self, snapshot: Snapshot, mass: Mass, shown: Sequence[int]) -> None:
        self.snapshot, self.shown = snapshot, shown
        self.strips_of = {i: strips_of(mass[i], 64) for i in shown if i in mass}
        self.tallest = tallest_of(chain.from_iterable(self.strips_of.values()))
        self.names = [harmless(s.name, 40) for s in snapshot.sequences]
        self.y = 0.0

    def draw(self) -> Iterator[str]:
        yield letters(LEFT, 32, title(self.snapshot), weight=600, room=RIGHT - LEFT)
        self.y = 46
        yield from self.numbers()
        yield from self.alarm()
        yield from self.pool_map()
        yield from self.tables()
        self.y += 16

    # --- numbers ---

    def numbers(self) -> Iterator[str]:
        """The counters in words, on a ground of their own."""
        words, top, drawn = LEFT + 88, self.y, []
        self.y += 4
        for subject, said in facts(self.snapshot):
            drawn.append(letters(LEFT + 12, self.y + _LINE, subject, fill=MUTED))
            for line in wrap(said, int((RIGHT - 12 - words) / COLUMN)):
                self.y += _LINE
                drawn.append(letters(words, self.y, line))
        self.y += 12
        yield (
            f'<rect x="{LEFT}" y="{top:g}" width="{RIGHT - LEFT}" height="{self.y - top:g}" '
            f'rx="6" fill="{_HATCHED}"/>'
        )
        yield from drawn

    def alarm(self) -> Iterator[str]:
        for warning in warnings(self.snapshot):
            self.y += 12
            wide = RIGHT - LEFT
            lines = wrap(f"leak: {warning}", int((wide - 24) / COLUMN))
            high = 9 + _LINE * len(lines)
            yield (
                f'<rect x="{LEFT}" y="{self.y:g}" width="{wide}" height="{high}" rx="6" '
                f'fill="{_ALARM}"/>'
            )
            for i, line in enumerate(lines, 1):
                yield letters(LEFT + 12, self.y + _LINE * i, line, fill=PAPER, weight=600)
            self.y += high

    # --- the map ---

    def pool_map(self) -> Iterator[str]:
        small = self.snapshot.num_blocks <= _ACROSS * _ROWS // 2
        across = _ACROSS if small else 2 * _ACROSS
        cells = pool_cells(self.snapshot, across * _ROWS)
        pitch = (RIGHT - _MAP) / across
        side = pitch - (2 if small else 1.5)
        holders = self.holders() if cells.per == 1 else {}
        yield self.heading(
            "pool", f"a cell is {plural(cells.per, 'block')}, coloured as high as it is filled"
        )
        n = len(cells.kind)
        for begin in range(0, n, across):
            end = min(begin + across, n)
            y = self.y + side / 2
            first = str(begin * cells.per)
            yield letters(_MAP - 8, y + 4, first, fill=MUTED, anchor="end", mono=True)
            yield (
                f'<path d="M{_MAP} {y:g}h{(end - begin) * pitch:g}" stroke="{_EMPTY}" '
                f'stroke-width="{side:g}" stroke-dasharray="{side:g} {pitch - side:g}"/>'
            )
            for i in range(begin, end):
                if cells.kind[i] != FREE:
                    said = escape(self.said(cells, i, holders))
                    box = _Box(_MAP + (i - begin) * pitch, self.y, side)
                    yield f"<g><title>{said}</title>{self.cell(cells, i, box)}</g>"
            self.y += pitch
        yield from self.legend(cells)

    def holders(self) -> dict[int, list[int]]:
        """Who holds each block."""
        found: dict[int, list[int]] = {}
        for i, sequence in enumerate(self.snapshot.sequences):
            for block in sequence.held.tolist():
                found.setdefault(block, []).append(i)
        return found

    def said(self, cells: Cells, i: int, holders: dict[int, list[int]]) -> str:
        """The tooltip of a cell."""
        s, first = self.snapshot, i * cells.per
        filled = f"{percent(float(cells.level[i]))} filled"
        if cells.per > 1:
            return f"blocks {first}-{min(first + cells.per, s.num_blocks) - 1}: {filled}"
        row = s.blocks[s.blocks["id"].searchsorted(first)]
        who = holders.get(first, [])
        names = ", ".join(self.names[j] for j in who[:6]) or "no holder"
        more = f" and {len(who) - 6} more" if len(who) > 6 else ""
        state = "cached" if cells.kind[i] == CACHED else plural(int(row["refs"]), "reference")
        parts = [
            f"block {first}: {names}{more}",
            state,
            f"{row['fill']} of {plural(s.block_size, 'token')}",
        ]
        if row["hash"] == TL_KV_HASH_PREFIX:
            parts.append(
                "pinned in the prefix index" if first in s.pinned else "in the prefix index"
            )
        elif row["hash"]:
            parts.append(f"hash {row['hash']:016x}")
        return "; ".join(parts)

    def cell(self, cells: Cells, i: int, box: _Box) -> str:
        kind, level = cells.kind[i], float(cells.level[i])
        if kind == CACHED:
            return box.cached()
        if kind == UNOWNED:
            return box.alarm()
        if kind == SHARED:
            refs = int(cells.refs[i])
            return box.filled(level, SLATE, PAPER, str(refs))
        if kind == SEVERAL:
            return box.filled(level, _SEVERAL, INK, "")
        owner = int(cells.owner[i])
        fill, ink = colour_of(owner)[:2]
        return box.filled(level, fill, ink, key_of(owner))

    def legend(self, cells: Cells) -> Iterator[str]:
        there = set(cells.kind.tolist())
        many = len(self.snapshot.sequences) > N_PAIRS
        again = "; letters and colours return" if many else ""
        entries = (
            (OWNED, f"of one sequence{again}"),
            (SHARED, "shared (references)"),
            (SEVERAL, "of several"),
            (CACHED, "cached"),
            (FREE, "free"),
            (UNOWNED, "leak"),
        )
        x = float(_MAP)
        self.y += 8
        for kind, words in entries:
            if kind not in there:
                continue
            box = _Box(x, self.y, 16)
            yield {
                OWNED: box.filled(0.6, PALETTE[0].fill, PALETTE[0].ink, key_of(0)),
                SHARED: box.filled(1, SLATE, PAPER, "2"),
                SEVERAL: box.filled(0.6, _SEVERAL, INK, ""),
                CACHED: box.cached(),
                FREE: box.filled(1, _EMPTY, INK, ""),
                UNOWNED: box.alarm(),
            }[kind]
            yield letters(x + 22, self.y + 12, words, fill=MUTED)
            x += 22 + 6.8 * len(words) + 18
        self.y += 16

    def heading(self, word: str, more: str) -> str:
        self.y += 34
        drawn = letters(LEFT, self.y, word, weight=600) + letters(
            LEFT + 7.8 * len(word) + 12, self.y, more, fill=MUTED
        )
        self.y += 12
        return drawn

    # --- the tables ---

    def tables(self) -> Iterator[str]:
        sequences = self.snapshot.sequences
        if not sequences:
            return
        scale = f"; a full bar is {percent(self.tallest)} of a head's attention"
        yield self.heading(
            "sequences",
            "block ids in the order of the table; dark ones are shared"
            + (scale if self.strips_of else ""),
        )
        for i in self.shown:
            sequence, (fill, ink) = sequences[i], colour_of(i)[:2]
            yield _Box(LEFT, self.y, 18).filled(1, fill, ink, key_of(i))
            name_room, room = _COUNTS - LEFT - 34, _TABLE - _COUNTS - 8
            yield letters(LEFT + 26, self.y + 13, sequence.name, weight=600, room=name_room)
            blocks, runs = plural(len(sequence.held), "block"), plural(sequence.runs, "run")
            counts = f"{tokens_of(sequence)} · {blocks} · {runs}"
            yield letters(_COUNTS, self.y + 13, counts, fill=MUTED, room=room)
            yield from self.chips(i, fill)
            self.y += 24
            yield from self.strips(i)
        more = hidden(self.snapshot, self.shown)
        if more:
            yield letters(LEFT + 26, self.y + 13, more, fill=MUTED)
            self.y += 24

    def chips(self, i: int, fill: str) -> Iterator[str]:
        """The ranges of a table."""
        sequence = self.snapshot.sequences[i]
        x, left = float(_TABLE), len(sequence.held)
        if sequence.gone:
            text = f"{sequence.gone} gone"
            yield (
                f'<rect x="{x + 0.5:g}" y="{self.y + 0.5:g}" width="{_chip(text) - 1:g}" '
                f'height="17" rx="4" fill="none" stroke="{MUTED}" stroke-dasharray="3 2"/>'
            )
            yield letters(x + 5, self.y + 13, text, fill=MUTED, mono=True)
            x += _chip(text) + 4
        for piece in ranges_of(self.snapshot, i, 64):
            text, more = str(piece), f"... and {left} more"
            if x + _chip(text) + (_chip(more) if left > len(piece) else 0) > RIGHT:
                yield letters(x + 2, self.y + 13, more, fill=MUTED, mono=True)
                return
            paint = f'fill="{SLATE}"' if piece.shared else f'fill="{fill}" fill-opacity="0.35"'
            yield (
                f'<rect x="{x:g}" y="{self.y:g}" width="{_chip(text):g}" height="18" rx="4" '
                f"{paint}/>"
            )
            ink = PAPER if piece.shared else INK
            yield letters(x + 5, self.y + 13, text, fill=ink, mono=True)
            x, left = x + _chip(text) + 4, left - len(piece)

    def strips(self, i: int) -> Iterator[str]:
        """The attention of each head, as bars in the colour of the sequence."""
        table, strips = self.snapshot.sequences[i].table, self.strips_of.get(i, [])
        for strip in strips:
            y, pitch = self.y + 11, min(16.0, _STRIP / len(strip.bars))
            yield letters(_TABLE - 10, y, strip.label, fill=MUTED, anchor="end")
            for j, bar in enumerate(strip.bars.tolist()):
                first = j * strip.per
                last = min(first + strip.per, len(table)) - 1
                where = f"block {table[first]}" if first == last else f"entries {first}-{last}"
                yield (
                    f'<rect x="{_TABLE + j * pitch:g}" y="{self.y:g}" width="{pitch - 1:g}" '
                    f'height="{_HIGH}" fill="{_EMPTY}">'
                    f"<title>{escape(f'{where}: {percent(bar)}')}</title></rect>"
                )
            yield self.bars(strip, pitch, colour_of(i).fill)
            said = f"{percent(strip.most)} in block {table[strip.peak]}"
            said += f", sink {percent(strip.rest)}" if strip.rest > 5e-4 else ""
            yield letters(_TABLE + pitch * len(strip.bars) + 6, y, said, fill=MUTED)
            self.y += _LINE
        self.y += 6 if strips else 0

    def bars(self, strip: Strip, pitch: float, fill: str) -> str:
        """Bars against the tallest of the picture, as lines as thick as a bar; a little is seen."""
        lines = "".join(
            f"M{_TABLE + (j + 0.5) * pitch - 0.5:g} {self.y + _HIGH:g}"
            f"v-{max(1.0, _HIGH * bar / self.tallest):.3g}"
            for j, bar in enumerate(strip.bars.tolist())
            if bar > 0
        )
        return (
            f'<path d="{lines}" stroke="{fill}" stroke-width="{pitch - 1:g}" '
            f'pointer-events="none"/>'
        )


class _Box:
    """A square cell at x, y."""

    def __init__(self, x: float, y: float, side: float) -> None:
        self.x, self.y, self.side = x, y, side

    def _rect(self, part: float, paint: str) -> str:
        """The lower ``part`` of it."""
        high = self.side * part
        top = self.y + self.side - high
        return f'<rect x="{self.x:g}" y="{top:g}" width="{self.side:g}" height="{high:g}" {paint}/>'

    def _mark(self, text: str, ink: str) -> str:
        if text.isdecimal() and _MONO * len(text) > self.side:
            text = "+"  # a number without room
        if not text or _MONO * len(text) > self.side:
            return ""
        x, y = self.x + self.side / 2, self.y + self.side / 2 + 0.36 * SIZE
        return letters(x, y, text, fill=ink, anchor="middle", mono=True, weight=600)

    def filled(self, level: float, fill: str, ink: str, mark: str) -> str:
        """Filled from below, the rest in a light shade."""
        if level == 1:
            return self._rect(1, f'fill="{fill}"') + self._mark(mark, ink)
        whole = self._rect(1, f'fill="{fill}" fill-opacity="0.25"')
        return (
            whole
            + self._rect(level, f'fill="{fill}"')
            + self._mark(mark, ink if level > 0.7 else INK)
        )

    def cached(self) -> str:
        """Hatched."""
        x, y, n, half = self.x, self.y, self.side, self.side / 2
        lines = f"M{x:g} {y + half:g}l{half:g} {-half:g}m0 {n:g}l{half:g} {-half:g}"
        lines += f"M{x:g} {y + n:g}l{n:g} {-n:g}"
        hatch = f'<path d="{lines}" stroke="{_SEVERAL}" stroke-width="1.5"/>'
        return self._rect(1, f'fill="{_HATCHED}"') + hatch

    def alarm(self) -> str:
        """Red, with a question mark where there is room."""
        return self._rect(1, f'fill="{_ALARM}"') + self._mark("?", PAPER)


def _chip(text: str) -> float:
    return 10 + _MONO * len(text)
