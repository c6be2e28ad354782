# SPDX-License-Identifier: MIT
"""The picture of a cache as SVG: what ``terminal`` shows, with tooltips.

Its size is bounded whatever the pool's is.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final
from xml.sax.saxutils import escape

from tinyllm._terminal import harmless
from tinyllm._words import percent, plural
from tinyllm.ffi.libtinyllm import TL_KV_HASH_PREFIX
from tinyllm.observe.page import LEFT, MUTED, RIGHT, SLATE, document, letters
from tinyllm.observe.palette import INK, PALETTE, PAPER, colour_of, key_of
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
    pool_cells,
    ranges_of,
    strips_of,
    title,
    tokens_of,
    warnings,
)
from tinyllm.observe.pool.snapshot import SequenceState, Snapshot

__all__ = ["svg"]

_LABELS: Final = 64  # width of the block ids left of the map
_MAP: Final = LEFT + _LABELS
# Cells of the map; twice as many across where they do not fit in half the rows.
_ACROSS, _ROWS = 32, 16
_SEQUENCES: Final = 20
_TABLE: Final = 430  # where ids and strips begin
_STRIP: Final = 320  # width of a strip, 64 bars at most

_EMPTY, _HATCHED, _SEVERAL, _ALARM = "#e6eaee", "#f5f7fa", "#8895a3", "#c81e1e"
_HEAT: Final = ((0xEE, 0xF2, 0xF7), (0x08, 0x30, 0x6B))  # nothing, the most


def svg(snapshot: Snapshot, mass: Mass) -> str:
    """The document, well-formed XML whatever the sequences are called."""
    page = _Page(snapshot, mass)
    body = "\n".join(page.draw())
    return document(title(snapshot), page.y, _EMPTY, body)


class _Page:
    """Draws from the top down; ``y`` is where the next thing goes."""

    def __init__(self, snapshot: Snapshot, mass: Mass) -> None:
        self.snapshot, self.mass = snapshot, mass
        self.names = [harmless(s.name, 40) for s in snapshot.sequences]
        self.y = 0.0

    def draw(self) -> Iterator[str]:
        yield letters(LEFT, 34, title(self.snapshot), size=15, weight=600, room=RIGHT - LEFT)
        self.y = 52
        yield from self.tiles()
        yield from self.alarm()
        yield from self.pool_map()
        yield from self.tables()
        self.y += 16

    # --- numbers ---

    def tiles(self) -> Iterator[str]:
        c = self.snapshot.counters
        tiles = (
            ("blocks", percent(c["blocks_used"] / c["blocks_total"]),
             f"{c['blocks_used']:,} of {c['blocks_total']:,} used",
             f"{c['blocks_cached']:,} cached, {c['blocks_free']:,} free"),
            ("tokens", percent(c["tokens"] / c["slots"]),
             f"{c['tokens']:,} in {plural(c['slots'], 'slot')}",
             f"{plural(c['tail_waste'], 'slot')} of used blocks empty"),
            ("sharing", plural(c["blocks_shared"], "block"),
             f"{plural(c['blocks_saved'], 'block')} saved by it",
             f"{plural(c['copies_on_write'], 'block')} copied on write"),
            ("pressure", plural(c["failed_allocations"], "failed allocation"),
             f"{plural(c['evictions'], 'cached block')} evicted",
             f"most ever used {plural(c['blocks_high_water'], 'block')}"),
        )  # fmt: skip
        wide, gap = 219, 12
        for i, (head, big, *lines) in enumerate(tiles):
            x = LEFT + i * (wide + gap)
            yield f'<rect x="{x}" y="{self.y:g}" width="{wide}" height="82" rx="6" fill="#f5f7fa"/>'
            yield letters(x + 12, self.y + 19, head, fill=MUTED, size=11)
            yield letters(x + 12, self.y + 42, big, size=20, weight=600, room=wide - 24)
            for j, line in enumerate(lines):
                yield letters(
                    x + 12, self.y + 59 + 15 * j, line, fill=MUTED, size=11, room=wide - 24
                )
        self.y += 82

    def alarm(self) -> Iterator[str]:
        for warning in warnings(self.snapshot):
            self.y += 12
            wide, said = RIGHT - LEFT, f"leak: {warning}"
            yield (
                f'<rect x="{LEFT}" y="{self.y:g}" width="{wide}" height="26" rx="6" '
                f'fill="{_ALARM}"/>'
            )
            yield letters(LEFT + 12, self.y + 17.5, said, fill=PAPER, weight=600, room=wide - 24)
            self.y += 26

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
            yield letters(_MAP - 8, y + 4, first, fill=MUTED, size=10, anchor="end", mono=True)
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
            return box.filled(level, SLATE, PAPER, str(refs) if refs < 100 else "+")
        if kind == SEVERAL:
            return box.filled(level, _SEVERAL, INK, "")
        owner = int(cells.owner[i])
        fill, ink, _ = colour_of(owner)
        return box.filled(level, fill, ink, key_of(owner))

    def legend(self, cells: Cells) -> Iterator[str]:
        there = set(cells.kind.tolist())
        many = len(self.snapshot.sequences) > len(PALETTE)
        again = "; colours and letters return" if many else ""
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
                OWNED: box.filled(0.6, PALETTE[0].fill, PALETTE[0].ink, ""),
                SHARED: box.filled(1, SLATE, PAPER, "2"),
                SEVERAL: box.filled(0.6, _SEVERAL, INK, ""),
                CACHED: box.cached(),
                FREE: box.filled(1, _EMPTY, INK, ""),
                UNOWNED: box.alarm(),
            }[kind]
            yield letters(x + 22, self.y + 12, words, fill=MUTED, size=11)
            x += 22 + 6.2 * len(words) + 20
        self.y += 16

    def heading(self, word: str, more: str) -> str:
        self.y += 34
        drawn = letters(LEFT, self.y, word, size=14, weight=600) + letters(
            LEFT + 9.2 * len(word) + 10, self.y, more, fill=MUTED, size=11
        )
        self.y += 12
        return drawn

    # --- the tables ---

    def tables(self) -> Iterator[str]:
        sequences = self.snapshot.sequences
        if not sequences:
            return
        yield self.heading("sequences", "block ids in the order of the table; dark ones are shared")
        for i, sequence in enumerate(sequences[:_SEQUENCES]):
            fill, ink, _ = colour_of(i)
            yield _Box(LEFT, self.y, 18).filled(1, fill, ink, key_of(i))
            yield letters(LEFT + 26, self.y + 13, harmless(sequence.name, 22), weight=600, room=158)
            blocks, runs = plural(len(sequence.held), "block"), plural(sequence.runs, "run")
            counts = f"{tokens_of(sequence)} · {blocks} · {runs}"
            yield letters(
                LEFT + 196, self.y + 13, counts, fill=MUTED, size=11, room=_TABLE - LEFT - 206
            )
            yield from self.chips(i, fill)
            self.y += 24
            if i in self.mass:
                yield from self.strips(i, sequence)
        if len(sequences) > _SEQUENCES:
            yield letters(
                LEFT + 26, self.y + 13, f"... and {len(sequences) - _SEQUENCES} more", fill=MUTED
            )
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
            yield letters(x + 5, self.y + 12.5, text, fill=MUTED, size=10, mono=True)
            x += _chip(text) + 4
        for piece in ranges_of(self.snapshot, i, 64):
            text, more = str(piece), f"... and {left} more"
            if x + _chip(text) + (_chip(more) if left > len(piece) else 0) > RIGHT:
                yield letters(x + 2, self.y + 12.5, more, fill=MUTED, size=10, mono=True)
                return
            paint = f'fill="{SLATE}"' if piece.shared else f'fill="{fill}" fill-opacity="0.35"'
            yield (
                f'<rect x="{x:g}" y="{self.y:g}" width="{_chip(text):g}" height="18" rx="4" '
                f"{paint}/>"
            )
            ink = PAPER if piece.shared else INK
            yield letters(x + 5, self.y + 12.5, text, fill=ink, size=10, mono=True)
            x, left = x + _chip(text) + 4, left - len(piece)

    def strips(self, i: int, sequence: SequenceState) -> Iterator[str]:
        for strip in strips_of(self.mass[i], 64):
            yield letters(_TABLE - 10, self.y + 9.5, strip.label, fill=MUTED, size=10, anchor="end")
            pitch = min(16.0, _STRIP / len(strip.bars))
            for j, bar in enumerate(strip.bars):
                first = j * strip.per
                last = min(first + strip.per, len(sequence.table)) - 1
                where = (
                    f"block {sequence.table[first]}" if first == last else f"entries {first}-{last}"
                )
                said = f"{where}: {percent(float(bar))}"
                yield (
                    f'<rect x="{_TABLE + j * pitch:g}" y="{self.y:g}" width="{pitch - 1:g}" '
                    f'height="12" fill="{_heat(float(bar), strip)}">'
                    f"<title>{escape(said)}</title></rect>"
                )
            said = f"{percent(strip.most)} in block {sequence.table[strip.peak]}"
            said += f", sink {percent(strip.rest)}" if strip.rest > 5e-4 else ""
            yield letters(
                _TABLE + pitch * len(strip.bars) + 6, self.y + 9.5, said, fill=MUTED, size=10
            )
            self.y += 15
        self.y += 6


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
        if not text or self.side < 10:
            return ""
        size = min(11.0, 0.8 * self.side, 1.4 * self.side / len(text))
        x, y = self.x + self.side / 2, self.y + self.side / 2 + 0.36 * size
        return letters(x, y, text, fill=ink, size=size, anchor="middle", weight=600)

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


def _heat(bar: float, strip: Strip) -> str:
    tallest = float(strip.bars.max())
    part = bar / tallest if tallest > 0 else 0.0
    low, high = _HEAT
    return "#" + "".join(f"{round(a + (b - a) * part):02x}" for a, b in zip(low, high, strict=True))


def _chip(text: str) -> float:
    return 10 + 6.1 * len(text)
