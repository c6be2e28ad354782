# SPDX-License-Identifier: MIT
"""diff: where two recordings of the same calls stop having the same bits.

Call by call, first the inputs: shapes and lengths, options, q, K and V. Then the results in the
order in which they come about: states of splits, lse, out. What no bit depends on (blocks and
tables, threads, instruction set, the function that was called) is no difference; it is named where
bits differ without another reason.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tinyllm._kv_format import FORMATS, value_of
from tinyllm._words import plural
from tinyllm.observe.calls.diff_text import report
from tinyllm.observe.calls.recording import SIDES, Call, Recording, sequence_of_row

__all__ = ["Diff", "Finding", "Value", "diff", "ulps"]

Part: TypeAlias = Literal["shape", "input", "result"]

_CHUNK: Final = 1 << 20  # elements whose distances are worked out at a time


# --- bits -----------------------------------------------------------------------------------------


def ulps(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.int64]:
    """How many steps apart floats are whose bits are ``a`` and ``b``, unsigned integers of one
    width.

    A step leads from a float to the next larger one; -0 is the one before +0. Beyond the infinities
    the steps go on through the NaNs by their payloads, negative ones below.
    """
    distance: NDArray[np.int64] = np.abs(_rank(a) - _rank(b))
    return distance


def _rank(codes: NDArray[Any]) -> NDArray[np.int64]:
    half = 1 << (8 * codes.dtype.itemsize - 1)
    wide = codes.astype(np.int64)
    return np.where(wide < half, wide, half - 1 - wide)


def _farthest(a: NDArray[Any], b: NDArray[Any]) -> int:
    flat = a.reshape(-1), b.reshape(-1)
    steps = range(0, flat[0].size, _CHUNK)
    return max(
        (int(ulps(*(side[i : i + _CHUNK] for side in flat)).max()) for i in steps), default=0
    )


@dataclass(frozen=True)
class Value:
    """A value of one side: as text, and, of an element, its bits."""

    text: str
    bits: str | None = None

    @classmethod
    def of(cls, code: Any, dtype: str) -> Value:
        """Of the element that has these bits."""
        digits = 2 * FORMATS[dtype].element.itemsize
        return cls(str(value_of(int(code), dtype)), f"0x{int(code):0{digits}x}")


# --- findings -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finding:
    """One thing that differs in one call: its first place, both values, and how much of it differs.

    part: "shape" (of a call where something has no counterpart: nothing but options is compared
    then), "input" or "result". what: "q", "K", "scales of K", "scale", "states", ... where: the
    first place by name: sequence, row, position, head, split, kv_head, element. n of total:
    elements that differ (of "states": states; of "K", "V" and their scales: pieces, the positions
    of one split that one sequence sees). ulps: between the two values, where they are floats;
    most_ulps: the most of any element.
    See the function ``ulps``.
    """

    call: int
    part: Part
    what: str
    a: Value
    b: Value
    where: dict[str, Any]
    n: int | None = None
    total: int | None = None
    ulps: int | None = None
    most_ulps: int | None = None


@dataclass(frozen=True)
class Side:
    """A recording that was compared. facts: of its first call."""

    path: str
    calls: int
    facts: dict[str, Any]


@dataclass(frozen=True)
class Diff:
    """What ``diff`` found. ``print`` it; ``to_json`` is for machines.

    headlines: one line about each call with findings, by its index. facts: one entry for each call
    that has the same inputs and other bits: what is not the same of all that no bit should depend
    on.
    """

    a: Side
    b: Side
    compared: int
    findings: tuple[Finding, ...]
    headlines: dict[int, str]
    facts: dict[int, dict[str, tuple[Any, Any]]]

    @property
    def equal(self) -> bool:
        """Whether every bit of inputs and results is the same, and the number of calls."""
        return not self.findings and self.a.calls == self.b.calls

    def of_call(self, call: int) -> list[Finding]:
        """The findings of one call."""
        return [finding for finding in self.findings if finding.call == call]

    def to_json(self) -> dict[str, Any]:
        """Everything as what ``json.dumps`` takes."""
        return {
            "equal": self.equal,
            "a": asdict(self.a),
            "b": asdict(self.b),
            "compared": self.compared,
            "findings": [asdict(finding) for finding in self.findings],
            "same_inputs_other_bits": [
                {"call": call, "facts": {name: list(pair) for name, pair in facts.items()}}
                for call, facts in self.facts.items()
            ],
        }

    def report(self, *, every: bool = False) -> str:
        """The findings for people: the first call in full, the others counted; with ``every`` all
        in full."""
        return report(self, every)

    def __str__(self) -> str:
        return self.report()


# --- comparing ------------------------------------------------------------------------------------


def diff(a: str | os.PathLike[str] | Recording, b: str | os.PathLike[str] | Recording) -> Diff:
    """Compares two recordings bit by bit; a and b are files that ``record`` wrote, or
    ``Recording``s, which stay open.

    >>> print(tinyllm.diff("before.tlrec", "after.tlrec"))

    Raises: TypeError for another type; OSError where a file cannot be read; ValueError where it is
    no record, or a damaged one.
    """
    if not isinstance(a, Recording):
        with Recording.load(a) as opened:
            return diff(opened, b)
    if not isinstance(b, Recording):
        with Recording.load(b) as opened:
            return diff(a, opened)
    compared = min(len(a), len(b))
    findings: list[Finding] = []
    headlines: dict[int, str] = {}
    facts: dict[int, dict[str, tuple[Any, Any]]] = {}
    for i in range(compared):
        x, y = a[i], b[i]
        found = list(_compare(a, x, b, y))
        if found:
            findings += found
            headlines[i] = _headline(x)
        if found and found[0].part == "result":
            facts[i] = _facts(x, y)
    return Diff(_side(a), _side(b), compared, tuple(findings), headlines, facts)


def _side(recording: Recording) -> Side:
    return Side(str(recording.path), len(recording), recording[0].facts if len(recording) else {})


def _headline(call: Call) -> str:
    n_rows, n_heads, _ = call.q.shape
    dims = " and ".join(map(str, dict.fromkeys(call.head_dims)))
    batch = f"{plural(len(call.ctx_lens), 'sequence')}, {plural(n_rows, 'row')}"
    shape = f"{n_heads} heads over {call.n_kv_heads}, D {dims}, {call.dtype} K and V"
    return f"{call.fn}: {batch}, {shape}"


def _facts(a: Call, b: Call) -> dict[str, tuple[Any, Any]]:
    """What differs and should not matter."""
    pairs = {
        name: (a.facts.get(name), b.facts.get(name)) for name in dict.fromkeys([*a.facts, *b.facts])
    }
    pairs["function"] = a.fn, b.fn
    pairs["block size"] = a.block_tokens, b.block_tokens
    if a.block_tables.tobytes() != b.block_tables.tobytes():
        pairs["block tables"] = "one", "another"
    return {name: (x, y) for name, (x, y) in pairs.items() if x != y}


def _compare(ra: Recording, a: Call, rb: Recording, b: Call) -> Iterator[Finding]:
    shapes = list(_shapes(a, b))
    yield from shapes
    yield from _options(a, b)
    if shapes:
        return  # nothing else stands at the same places
    yield from _elements("input", "q", a, a.q, b.q, _row_place)
    if np.array_equal(a.spans, b.spans):  # another window makes other pieces
        yield from _pieces(ra, a, rb, b)
        yield from _states(a, b)
    if a.lse is not None and b.lse is not None:
        yield from _elements("result", "lse", a, a.lse, b.lse, _row_place)
    yield from _elements("result", "out", a, a.out, b.out, _row_place)


def _shapes(a: Call, b: Call) -> Iterator[Finding]:
    def said(what: str, x: Any, y: Any, **where: int) -> Iterator[Finding]:
        if x != y:
            yield Finding(a.index, "shape", what, Value(str(x)), Value(str(y)), where)

    yield from said("K and V type", a.dtype, b.dtype)
    yield from said("KV heads", a.n_kv_heads, b.n_kv_heads)
    yield from said("head dims of K and V", a.head_dims, b.head_dims)
    yield from said("query heads", a.q.shape[1], b.q.shape[1])
    yield from said("sequences", len(a.ctx_lens), len(b.ctx_lens))
    if len(a.ctx_lens) != len(b.ctx_lens):
        return
    for what, x, y in (
        ("context length", a.ctx_lens, b.ctx_lens),
        ("rows of a sequence", np.diff(a.cu_seqlens_q), np.diff(b.cu_seqlens_q)),
    ):
        for s in np.flatnonzero(x != y)[:1].tolist():
            n = int(np.count_nonzero(x != y))
            yield Finding(
                a.index,
                "shape",
                what,
                Value(str(x[s])),
                Value(str(y[s])),
                {"sequence": s},
                n,
                len(x),
            )


def _options(a: Call, b: Call) -> Iterator[Finding]:
    for what in ("scale", "softcap"):
        x, y = (np.array([getattr(call, what)], np.float32) for call in (a, b))
        yield from _elements("input", what, a, x, y, lambda call, at: {})
    windows = [Value(str(max(call.window, 0) or None)) for call in (a, b)]
    if windows[0] != windows[1]:
        yield Finding(a.index, "input", "window", windows[0], windows[1], {})
    for what in ("alibi_slopes", "sink_logits"):
        s, t = getattr(a, what), getattr(b, what)
        if s is not None and t is not None and s.shape == t.shape:
            yield from _elements("input", what, a, s, t, lambda call, at: {"head": at[0]})
        elif (s is None) != (t is None):
            given = [Value("none" if side is None else "given") for side in (s, t)]
            yield Finding(a.index, "input", what, given[0], given[1], {})


def _elements(
    part: Part,
    what: str,
    call: Call,
    a: NDArray[np.float32],
    b: NDArray[np.float32],
    place: Any,
) -> Iterator[Finding]:
    """The finding, if any, of two float32 arrays of one shape; ``place(call, index)`` names a
    place."""
    x, y = a.view(np.uint32), b.view(np.uint32)
    differs = x != y
    if differs.any():
        at = tuple(int(i) for i in np.unravel_index(int(differs.argmax()), x.shape))
        first = Value.of(x[at], "float32"), Value.of(y[at], "float32")
        yield Finding(
            call.index, part, what, *first, place(call, at),
            int(np.count_nonzero(differs)), x.size, int(ulps(x[at], y[at])), _farthest(x, y),
        )  # fmt: skip


def _row_place(call: Call, at: tuple[int, ...]) -> dict[str, int]:
    row, head, *element = at
    place = {
        "sequence": int(sequence_of_row(call.cu_seqlens_q)[row]),
        "row": row,
        "position": int(call.spans[row, 1]) - 1,
        "head": head,
    }
    return {**place, "element": element[0]} if element else place


def _pieces(ra: Recording, a: Call, rb: Recording, b: Call) -> Iterator[Finding]:
    """K, V and their scales by their digests, and by their elements where both kept them."""
    differs = (a.digests != b.digests).any(axis=2)
    sequence, split = a.piece_index()
    for side, name in enumerate(SIDES[: differs.shape[1]]):
        for piece in np.flatnonzero(differs[:, side])[:1].tolist():
            low, high = a.piece_span(piece)
            where: dict[str, Any] = {"sequence": int(sequence[piece]), "split": int(split[piece])}
            where["positions"] = [low, high - 1]
            digests = [
                Value(f"sha256 {call.digests[piece, side].tobytes().hex()[:16]}") for call in (a, b)
            ]
            values, distance = digests, None
            kept = ra.kv(a, piece), rb.kv(b, piece)
            if kept[0] is not None and kept[1] is not None:
                x, y = kept[0][side], kept[1][side]
                at = tuple(int(i) for i in np.unravel_index(int((x != y).argmax()), x.shape))
                names = ("position", "kv_head", "element")  # a scale has no element
                where |= dict(zip(names, (low + at[0], *at[1:]), strict=False))
                dtype = a.dtype if side < 2 else "float32"
                values = [Value.of(codes[at], dtype) for codes in (x, y)]
                distance = None if dtype == "int8" else int(ulps(x[at], y[at]))
            n = int(np.count_nonzero(differs[:, side]))
            yield Finding(
                a.index, "input", name, values[0], values[1], where, n, len(differs), distance
            )


def _states(a: Call, b: Call) -> Iterator[Finding]:
    """The first by sequence, row, head and split; of a state m, then L, then the values."""
    x, y = a.states.view(np.uint32), b.states.view(np.uint32)
    differs = (x != y).any(axis=2)
    if not differs.any():
        return
    rows, splits = a.state_index()
    row = int(rows[differs.any(axis=1).argmax()])
    own = np.flatnonzero(rows == row)
    head = int(differs[own].any(axis=0).argmax())
    state = int(own[differs[own, head].argmax()])
    i = int((x[state, head] != y[state, head]).argmax())
    where: dict[str, Any] = _row_place(a, (row, head)) | {"split": int(splits[state])}
    where |= (
        {"of": "m"} if i == 0 else {"of": "L"} if i == 1 else {"of": "values", "element": i - 2}
    )
    codes = x[state, head, i], y[state, head, i]
    first = Value.of(codes[0], "float32"), Value.of(codes[1], "float32")
    yield Finding(
        a.index, "result", "states", *first, where,
        int(np.count_nonzero(differs)), differs.size, int(ulps(*codes)), _farthest(x, y),
    )  # fmt: skip
