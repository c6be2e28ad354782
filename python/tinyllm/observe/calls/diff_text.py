# SPDX-License-Identifier: MIT
"""A Diff as text for people."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import TYPE_CHECKING, Any, Final

from tinyllm._words import plural

if TYPE_CHECKING:
    from tinyllm.observe.calls.diff import Diff, Finding, Side

_MOST_NAMED: Final = 8  # calls, or runs of them, in one line
_OF: Final = {"m": "m, the largest score", "L": "L, the sum of exp(s - m)"}


def report(d: Diff, every: bool) -> str:
    """What was compared, the first call that differs (or ``every`` one), the others, and what to
    conclude."""
    return "\n".join([*_sides(d), "", *_calls(d, every), *_verdict(d)])


def _sides(d: Diff) -> Iterator[str]:
    widths = [
        max(len(text) for text in column) for column in zip(*map(_cells, (d.a, d.b)), strict=True)
    ]
    for name, side in (("a", d.a), ("b", d.b)):
        cells = [cell.ljust(width) for cell, width in zip(_cells(side), widths, strict=True)]
        yield "  ".join([name, *cells]).rstrip()


def _cells(side: Side) -> list[str]:
    f = side.facts or dict.fromkeys(("version", "numerics", "isa", "threads"), 0)
    build = f"tinyllm {f['version']}, numerics {f['numerics']}, {f['isa']}"
    facts = f"{build}, {plural(f['threads'], 'thread')}" if side.facts else ""
    return [side.path, plural(side.calls, "call"), facts]


def _calls(d: Diff, every: bool) -> Iterator[str]:
    differing = sorted(d.headlines)
    if not differing:
        return
    same = [i for i in range(d.compared) if i not in d.headlines]
    if same:
        yield f"{_named(same)}: the same inputs, the same bits"
        yield ""
    for call in differing if every else differing[:1]:
        yield f"call {call}  {d.headlines[call]}"
        yield from _findings(d.of_call(call))
        yield ""
    later = [] if every else differing[1:]
    if later:
        yield f"{_named(later)} {'differs' if len(later) == 1 else 'differ'} too"
        yield ""


def _findings(findings: list[Finding]) -> Iterator[str]:
    parts: dict[str, list[Finding]] = {"shape": [], "input": [], "result": []}
    for finding in findings:
        parts[finding.part].append(finding)
    otherwise = {"input": "the same bits", "result": "the same bits"}
    if parts["shape"]:
        otherwise = {
            "shape": "",
            "input": "the same options; the rest was not compared",
            "result": "not compared",
        }
    width = max(len(finding.what) for finding in findings)
    for part, nothing in otherwise.items():
        yield f"  {part}s" if parts[part] else f"  {part}s: {nothing}"
        for finding in parts[part]:
            first, *others = _finding(finding)
            yield f"    {finding.what:<{width}}  {first}"
            yield from (f"    {'':<{width}}  {line}" for line in others)


def _finding(f: Finding) -> Iterator[str]:
    values = [" ".join(filter(None, (value.text, value.bits))) for value in (f.a, f.b)]
    if not f.where:
        yield " | ".join(values)
        return
    yield from filter(None, (_amount(f), _place(f.where)))
    width = max(len(f.a.text), len(f.b.text))
    for name, value in (("a", f.a), ("b", f.b)):
        yield f"  {name}  {value.text:<{width}}  {value.bits or ''}".rstrip()
    if f.ulps is not None:
        yield f"  {_distance(f)}"


def _amount(f: Finding) -> str:
    if f.n is None or f.total == 1:
        return ""
    noun = {"states": "state", "K": "piece", "V": "piece"}.get(f.what, "element")
    if f.what in ("context length", "rows of a sequence"):
        noun = "sequence"
    text = f"{f.n:,} of {plural(f.total or 0, noun)} {'differs' if f.n == 1 else 'differ'}"
    if f.most_ulps is not None and f.n > 1:
        text += f", by at most {plural(f.most_ulps, 'ulp')}"
    return text


def _place(where: dict[str, Any]) -> str:
    names = dict(where)
    positions, position = names.pop("positions", None), names.get("position")
    if positions is not None:
        names["split"] = f"{names['split']} (positions {positions[0]} to {positions[1]})"
    elif position is not None:
        names["row"] = f"{names['row']} (position {names.pop('position')})"
    of = names.pop("of", None)
    parts = [f"{'KV head' if name == 'kv_head' else name} {value}" for name, value in names.items()]
    return ", ".join(parts) + (f": {_OF[of]}" if of in _OF else " of the values" if of else "")


def _distance(f: Finding) -> str:
    nans = [value.text == "nan" for value in (f.a, f.b)]
    if all(nans):
        return "two NaNs with different bits"
    if any(nans):
        return "one of them is NaN"
    return f"{plural(f.ulps or 0, 'ulp')} apart"


def _verdict(d: Diff) -> Iterator[str]:
    if d.a.calls != d.b.calls:
        both = f"a has {plural(d.a.calls, 'call')}, b has {d.b.calls:,}"
        yield f"{both}; {plural(d.compared, 'call')} compared."
    if d.equal:
        yield f"Equal, bit for bit: inputs and results of {plural(d.compared, 'call')}."
        return
    first = d.findings[0] if d.findings else None
    if first is not None and first.part != "result":
        other = f"Call {first.call} had other inputs, first of all {first.what}"
        yield f"{other}: look at what made them."
    for call, facts in list(d.facts.items())[:1]:
        yield (
            f"Call {call}: same inputs, other bits. Of what no bit may depend on, "
            "this is not the same:"
        )
        if facts:
            width = max(map(len, facts))
            yield from (f"  {name:<{width}}  {x} | {y}" for name, (x, y) in facts.items())
        else:
            yield "  nothing that was recorded: are K and V written during the call?"
    if len(d.facts) > 1:
        yield f"The same inputs and other bits have also {_named(list(d.facts)[1:])}."


def _named(calls: list[int]) -> str:
    """calls 0 to 6, 8, 9 and 11 to 13"""
    texts: list[str] = []
    for _, group in groupby(enumerate(calls), lambda pair: pair[1] - pair[0]):  # consecutive ones
        run = [call for _, call in group]
        texts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else map(str, run)
    if len(texts) > _MOST_NAMED:
        texts[_MOST_NAMED - 1 :] = ["others"]
    named = " and ".join(filter(None, (", ".join(texts[:-1]), texts[-1])))
    return f"call{'s' * (len(calls) > 1)} {named}"
