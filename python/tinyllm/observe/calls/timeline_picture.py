# SPDX-License-Identifier: MIT
"""A timeline as text and as SVG: a lane for each worker, bars for what it did.

Bars too narrow to see are drawn as one with their neighbours, so that the size of the SVG is
bounded whatever happened.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final
from xml.sax.saxutils import escape

import numpy as np
from numpy.typing import NDArray

from tinyllm._words import human_time, percent, plural
from tinyllm.ffi.libtinyllm import TL_TRACE_MERGE, TL_TRACE_SHARED
from tinyllm.observe.page import COLUMN, LEFT, MUTED, SLATE, document, letters
from tinyllm.observe.palette import INK, PALETTE, PAPER, colour_of, key_of

if TYPE_CHECKING:
    from tinyllm.observe.calls.timeline import TracedCall

Busy = NDArray[np.float64]

_X0, _X1 = 104, 880  # where lanes begin and end
_LANE, _GAP = 26, 8
_NARROW: Final = 0.5  # pixels below which a bar joins its neighbour
_LABEL: Final = 52  # pixels from which a bar says what it is
_LINE, _CALL, _MERGE = "#d3dae2", "#eef2f6", "#9aa5b1"

# What a cell of text shows: the place of a sequence in its call, or one of these.
_NOTHING, _SHARED, _MERGED = -1, -2, -3
_LETTERS: Final = {_NOTHING: ".", _SHARED: "=", _MERGED: "+"}
_CODES: Final = {_NOTHING: "38;5;245", _SHARED: "48;5;240;38;5;255", _MERGED: "48;5;250;38;5;16"}


def name_of(event: Any) -> str:
    """What a bar is called."""
    if event["what"] == TL_TRACE_MERGE:
        return "merge"
    shared = "shared from " if event["what"] == TL_TRACE_SHARED else ""
    return f"{shared}seq {event['seq']} head {event['kv_head']}"


def title(calls: Sequence[TracedCall], busy: Busy) -> str:
    """What was watched, how long it took, how much of that was work."""
    if not calls:
        return "no call was watched"
    names = " and ".join(sorted({call.fn for call in calls}))
    many = f"{plural(len(calls), 'call')} of {names}" if len(calls) > 1 else names
    took = _duration(sum(call.end_ns - call.begin_ns for call in calls))
    parts = [
        plural(max(call.n_sequences for call in calls), "sequence"),
        plural(len(busy), "worker"),
        took,
    ]
    lost = sum(call.n_lost for call in calls)
    if lost:
        parts.append(f"{plural(lost, 'event')} lost")
    return f"{many}: {', '.join(parts)}, {percent(float(busy.mean()))} busy"


def _duration(ns: int) -> str:
    return human_time(int(ns) / 1e9)


def _span(calls: Sequence[TracedCall]) -> tuple[int, int]:
    begin = min((call.begin_ns for call in calls), default=0)
    return begin, max(max((call.end_ns for call in calls), default=0), begin + 1)


def _ticks(span_ns: int, most: int) -> tuple[list[int], str, int]:
    """Nanoseconds of round times, ``most`` at most, their unit and its size."""
    step = next(s for e in range(20) for s in (10**e, 2 * 10**e, 5 * 10**e) if span_ns / s < most)
    unit, size = next(
        (u, s) for u, s in (("s", 10**9), ("ms", 10**6), ("us", 1000)) if step >= s or s == 1000
    )
    return list(range(0, span_ns + 1, step)), unit, size


# --- text -----------------------------------------------------------------------------------------


def text(
    calls: Sequence[TracedCall], events: NDArray[Any], busy: Busy, width: int, colour: bool
) -> str:
    """Lanes of ``width`` characters, a time axis and a legend, without a newline at the end."""
    lines = [title(calls, busy)]
    if not calls:
        return lines[0]
    begin, end = _span(calls)
    head = len(f"worker {len(busy) - 1}")
    for worker, part in enumerate(busy):
        own = events[events["worker"] == worker]
        label = f"worker {worker}"
        lines.append(
            f"{label:{head}}  {_lane(own, begin, end, width, colour)}  {percent(float(part))}"
        )
    lines.append(f"{'':{head}}  {_axis(end - begin, width)}")
    lines.append(f"{'':{head}}  {_legend(events)}")
    return "\n".join(lines)


def _lane(events: NDArray[Any], begin: int, end: int, width: int, colour: bool) -> str:
    """What took most of the time of each cell."""
    edges = begin + np.arange(width + 1) * ((end - begin) / width)
    shares: list[dict[int, float]] = [{} for _ in range(width)]
    for event in events:
        first = int(np.searchsorted(edges, event["begin_ns"], "right")) - 1
        last = int(np.searchsorted(edges, event["end_ns"], "left"))
        for cell in range(max(0, first), min(last, width)):
            here = min(event["end_ns"], edges[cell + 1]) - max(event["begin_ns"], edges[cell])
            shares[cell][_key(event)] = shares[cell].get(_key(event), 0) + here
    half = (end - begin) / width / 2
    cells = [
        max(share, key=lambda k: share[k]) if sum(share.values()) >= half else _NOTHING
        for share in shares
    ]
    runs = [(what, len(list(run))) for what, run in groupby(cells)]
    return "".join(_painted(what, n) if colour else n * _letter(what) for what, n in runs)


def _key(event: Any) -> int:
    if event["what"] == TL_TRACE_MERGE:
        return _MERGED
    return _SHARED if event["what"] == TL_TRACE_SHARED else int(event["seq"])


def _letter(what: int) -> str:
    return _LETTERS.get(what) or key_of(what)


def _painted(what: int, n: int) -> str:
    """``n`` cells of it."""
    code = _CODES.get(what) or f"48;5;{colour_of(what).ansi};38;5;16"
    return f"\x1b[{code}m{n * _letter(what)}\x1b[0m"


def _axis(span: int, width: int) -> str:
    ticks, unit, size = _ticks(span, max(2, width // 12))
    line = ""
    for i, tick in enumerate(ticks):
        label = f"|{tick / size:g}" + (f" {unit}" if i == len(ticks) - 1 else "")
        at = round(tick / span * width)
        line = line.ljust(at) + label if len(line) <= at else line
    return line


def _legend(events: NDArray[Any]) -> str:
    kinds = set(events["what"].tolist())
    rows = sorted({int(s) for s in events["seq"][events["what"] < TL_TRACE_SHARED]})
    shown = ", ".join(f"{key_of(s)} sequence {s}" for s in rows[:6])
    more = ", ..." if len(rows) > 6 else ""
    entries = [shown + more] if rows else []
    entries += ["= shared walk"] if TL_TRACE_SHARED in kinds else []
    entries += ["+ merge"] if TL_TRACE_MERGE in kinds else []
    return "  ".join([*entries, ". nothing"])


# --- svg ------------------------------------------------------------------------------------------


def svg(calls: Sequence[TracedCall], events: NDArray[Any], busy: Busy) -> str:
    """The document."""
    top = 56
    bottom = top + len(busy) * (_LANE + _GAP)
    height = bottom + 72 if calls else 64
    said = title(calls, busy)
    body = [letters(LEFT, 34, said, weight=600)]
    if calls:
        scale = _Scale(*_span(calls))
        body += _calls(calls, scale, top, bottom)
        for worker, part in enumerate(busy):
            y = top + worker * (_LANE + _GAP)
            body += [
                letters(_X0 - 12, y + 13.5, f"worker {worker}", anchor="end"),
                *_bars(events[events["worker"] == worker], scale, y),
                letters(_X1 + 12, y + 13.5, percent(float(part)), fill=MUTED),
            ]
        body += [*_time_axis(scale, bottom), *_key_line(events, bottom + 50)]
    return document(said, height, _LINE, "\n".join(body))


class _Scale:
    """Where a time is drawn."""

    def __init__(self, begin: int, end: int) -> None:
        self.begin, self.span = begin, end - begin

    def __call__(self, ns: int) -> float:
        return _X0 + (int(ns) - self.begin) / self.span * (_X1 - _X0)


def _calls(calls: Sequence[TracedCall], scale: _Scale, top: int, bottom: int) -> Iterator[str]:
    """A band behind the lanes for each call, so that the time between calls shows."""
    for i, call in enumerate(calls):
        x, wide = scale(call.begin_ns), scale(call.end_ns) - scale(call.begin_ns)
        said = escape(f"call {i}: {call.fn}, {_duration(call.end_ns - call.begin_ns)}")
        yield (
            f'<rect x="{x:.2f}" y="{top - 4}" width="{wide:.2f}" height="{bottom - top}" '
            f'fill="{_CALL}"><title>{said}</title></rect>'
        )


def _bars(events: NDArray[Any], scale: _Scale, y: float) -> Iterator[str]:
    """The bars of a lane; runs of narrow ones of a colour are one."""
    run: list[Any] = []
    for event in events:
        if run and not (
            _paint(event) == _paint(run[-1])
            and scale(event["end_ns"]) - scale(event["begin_ns"]) < _NARROW
            and scale(event["begin_ns"]) - scale(run[-1]["end_ns"]) < _NARROW
        ):
            yield _bar(run, scale, y)
            run = []
        run.append(event)
    if run:
        yield _bar(run, scale, y)


def _paint(event: Any) -> tuple[str, str]:
    """Fill and ink."""
    if event["what"] == TL_TRACE_MERGE:
        return _MERGE, INK
    if event["what"] == TL_TRACE_SHARED:
        return SLATE, PAPER
    return colour_of(int(event["seq"]))[:2]


def _bar(run: list[Any], scale: _Scale, y: float) -> str:
    event, (fill, ink) = run[0], _paint(run[0])
    x, wide = scale(event["begin_ns"]), scale(run[-1]["end_ns"]) - scale(event["begin_ns"])
    more = f" and {plural(len(run) - 1, 'narrow bar')} after it" if len(run) > 1 else ""
    drawn = (
        f'<rect x="{x:.2f}" y="{y}" width="{max(wide - 0.6, 0.3):.2f}" height="{_LANE - 8}" '
        f'fill="{fill}"/>'
    )
    if event["what"] == TL_TRACE_SHARED:  # stripes: a line as thick as the bar, dashed
        drawn += (
            f'<path d="M{x:.2f} {y + (_LANE - 8) / 2}h{max(wide - 0.6, 0):.2f}" stroke="{PAPER}" '
            f'stroke-opacity="0.3" stroke-width="{_LANE - 8}" stroke-dasharray="2 5"/>'
        )
    label = {TL_TRACE_MERGE: "merge", TL_TRACE_SHARED: "shared"}.get(int(event["what"]))
    label = label or f"s{event['seq']} h{event['kv_head']}"
    if wide >= max(_LABEL, COLUMN * len(label)) and len(run) == 1:
        drawn += letters(round(x + wide / 2, 2), y + 13, label, fill=ink, anchor="middle")
    return f"<g><title>{escape(_said(event, scale) + more)}</title>{drawn}</g>"


def _said(e: Any, scale: _Scale) -> str:
    """The tooltip."""
    tokens = f"rows {_range(e['first_token'], e['n_tokens'])} of q"
    if e["what"] == TL_TRACE_SHARED:  # of any sequences of the batch
        tokens = f"{plural(int(e['n_tokens']), 'row')} of q"
    splits = f"splits {_range(e['first_split'], e['n_splits'])}" if e["n_splits"] else "no split"
    took, begin = _duration(e["end_ns"] - e["begin_ns"]), _duration(e["begin_ns"] - scale.begin)
    return f"{name_of(e)}: {tokens}, {splits}, {took} from {begin} on"


def _range(first: int, n: int) -> str:
    return f"{first}" if n == 1 else f"{first}-{first + n - 1}"


def _time_axis(scale: _Scale, y: float) -> Iterator[str]:
    ticks, unit, size = _ticks(scale.span, 9)
    for i, tick in enumerate(ticks):
        x = scale(scale.begin + tick)
        said = f"{tick / size:g}" + (f" {unit}" if i == len(ticks) - 1 else "")
        yield f'<path d="M{x:.2f} {y - 4}v5" stroke="{MUTED}"/>'
        yield letters(round(x, 2), y + 16, said, fill=MUTED, anchor="middle")
    yield f'<path d="M{_X0} {y - 4}H{_X1}" stroke="{MUTED}"/>'


def _key_line(events: NDArray[Any], y: float) -> Iterator[str]:
    """The legend."""
    rows = sorted({int(s) for s in events["seq"][events["what"] < TL_TRACE_SHARED]})
    kinds = set(events["what"].tolist())
    entries = [(colour_of(s).fill, f"sequence {s}") for s in rows[: len(PALETTE)]]
    if len(rows) > len(PALETTE):
        entries = [(PALETTE[0].fill, f"{len(rows)} sequences in {len(PALETTE)} colours")]
    entries += [(SLATE, "shared walk")] if TL_TRACE_SHARED in kinds else []
    entries += [(_MERGE, "merge of states")] if TL_TRACE_MERGE in kinds else []
    x = float(_X0)
    for fill, words in entries:
        yield f'<rect x="{x:.1f}" y="{y - 10}" width="12" height="12" fill="{fill}"/>'
        if fill == SLATE:
            yield (
                f'<path d="M{x:.1f} {y - 4}h12" stroke="{PAPER}" stroke-opacity="0.3" '
                f'stroke-width="12" stroke-dasharray="2 5"/>'
            )
        yield letters(round(x + 18, 2), y, words, fill=MUTED)
        x += 18 + 6.8 * len(words) + 16
