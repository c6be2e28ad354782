# SPDX-License-Identifier: MIT
"""What the pictures of a cache have in common: cells of the pool, ranges of a table, bars of a
strip, a choice of sequences, words.

A cell stands for one block, or for ``per`` neighbours where a pool has more blocks than a picture
has room.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tinyllm._check import integer
from tinyllm._words import human_bytes, percent, plural
from tinyllm.observe.pool.snapshot import SequenceState, Snapshot

FREE, CACHED, OWNED, SHARED, SEVERAL, UNOWNED = range(6)  # kinds of cells

MOST_HEADS: Final = 8  # strips drawn one by one; of more heads the mean is drawn

# Of the i-th sequence: [heads, entries of its table].
Mass: TypeAlias = Mapping[int, NDArray[np.float64]]


@dataclass(frozen=True)
class Cells:
    """Cells in the order of their blocks, as arrays of one length.

    kind: FREE and CACHED: nothing is in use; OWNED: all that is in use has one holder, ``owner``
    (an index into ``sequences``); SHARED: all that is in use has more than one reference, ``refs``
    at most; SEVERAL: a mixture; UNOWNED: some block whose references are not those of its holders.
    level: the part of its slots that hold a token, 0 .. 1.
    """

    per: int
    kind: NDArray[np.int64]
    owner: NDArray[np.int64]
    refs: NDArray[np.int64]
    level: NDArray[np.float64]


def pool_cells(snapshot: Snapshot, most: int) -> Cells:
    """The pool in at most ``most`` cells of 1, 2, 4, 8, ... blocks."""
    per = 1
    while -(-snapshot.num_blocks // per) > most:
        per *= 2
    n = -(-snapshot.num_blocks // per)
    blocks = snapshot.blocks
    cell, used = blocks["id"] // per, blocks["refs"] > 0
    low, high = _holder_range(snapshot)

    kind, refs = np.full(n, FREE), np.zeros(n, np.int64)
    kind[cell[~used & (blocks["hash"] != 0)]] = CACHED
    kind[cell[used]] = SEVERAL
    np.maximum.at(refs, cell[used], blocks["refs"][used])
    first, last, fewest = np.full(n, len(snapshot.sequences)), np.full(n, -1), np.full(n, 1 << 40)
    np.minimum.at(first, cell[used], low[used])
    np.maximum.at(last, cell[used], high[used])
    np.minimum.at(fewest, cell[used], blocks["refs"][used])
    kind[(kind == SEVERAL) & (first == last)] = OWNED
    kind[(kind != FREE) & (kind != CACHED) & (fewest > 1)] = SHARED
    kind[cell[snapshot.unowned != 0]] = UNOWNED

    tokens = np.bincount(cell[used], blocks["fill"][used], minlength=n)
    wide = np.full(n, per)
    wide[-1] = snapshot.num_blocks - per * (n - 1)
    return Cells(per, kind, first, refs, tokens / (wide * snapshot.block_size))


def _holder_range(snapshot: Snapshot) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first and the last sequence that holds each row of ``blocks``; without one,
    len(sequences) and -1."""
    low = np.full(len(snapshot.blocks), len(snapshot.sequences))
    high = np.full(len(snapshot.blocks), -1)
    for i, rows in enumerate(snapshot.rows):
        low[rows] = np.minimum(low[rows], i)
        high[rows] = i
    return low, high


# --- block tables ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Range:
    """Neighbouring blocks that follow each other in a table, all shared or none."""

    first: int
    last: int
    shared: bool

    def __str__(self) -> str:
        return str(self.first) if self.first == self.last else f"{self.first}-{self.last}"

    def __len__(self) -> int:
        return self.last - self.first + 1


def ranges_of(snapshot: Snapshot, i: int, most: int) -> list[Range]:
    """What the i-th sequence holds, the first ``most`` ranges of it."""
    held = snapshot.sequences[i].held
    if not len(held):
        return []
    shared = snapshot.blocks["refs"][snapshot.rows[i]] > 1
    pieces = _pieces((np.diff(held) != 1) | (shared[1:] != shared[:-1]), most)
    return [Range(int(held[i]), int(held[j]), bool(shared[i])) for i, j in pieces]


def _pieces(ends: NDArray[np.bool_], most: int) -> list[tuple[int, int]]:
    """First and last place of each piece of a list, where ``ends`` says of all but its last place
    whether a piece ends there; ``most`` pieces at most."""
    last = np.flatnonzero(ends)[:most].tolist()
    return list(zip([0, *(i + 1 for i in last)], [*last, len(ends)], strict=True))[:most]


def id_ranges(ids: NDArray[np.int64], most: int) -> str:
    """Rising ids as text: ``3, 7-9 and 12 more``."""
    pieces = _pieces(np.diff(ids) != 1, most)
    text = ", ".join(str(Range(int(ids[i]), int(ids[j]), False)) for i, j in pieces)
    left = len(ids) - 1 - pieces[-1][1]
    return f"{text} and {left} more" if left else text


# --- attention mass -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Strip:
    """Attention mass of one row of the picture: ``bars`` add up ``per`` entries each; ``peak`` is
    the entry with most, ``rest`` what no entry has: the sink's."""

    label: str
    bars: NDArray[np.float64]
    per: int
    peak: int
    most: float
    rest: float


def strips_of(mass: NDArray[np.float64], most: int) -> list[Strip]:
    """A strip per head, or one for the mean of many, with at most ``most`` bars."""
    n_heads, n = mass.shape
    rows = {f"head {h}": row for h, row in enumerate(mass)}
    if n_heads > MOST_HEADS:
        rows = {f"mean of {n_heads}": mass.mean(axis=0)}
    per = max(1, -(-n // most))
    return [_strip(label, row, per) for label, row in rows.items() if n]


def tallest_of(strips: Iterable[Strip]) -> float:
    """The most mass that a bar of them has: what is drawn as a full one, so that all of a picture
    have one scale."""
    return max((float(strip.bars.max()) for strip in strips), default=0.0)


def _strip(label: str, row: NDArray[np.float64], per: int) -> Strip:
    shown = np.nan_to_num(row, nan=0.0)
    bars = np.add.reduceat(shown, range(0, len(row), per))
    peak = int(shown.argmax())
    return Strip(label, bars, per, peak, float(row[peak]), float(1 - row.sum()))


# --- which sequences, in which order --------------------------------------------------------------

SHOWN: Final = 20  # sequences, where nobody chose
SORTS: Final = ("blocks", "tokens", "name")  # most first; 9 before 10 in names


def listed(sequences: Any) -> list[Any]:
    """Raises TypeError for what has no order, or is one name."""
    unordered = isinstance(sequences, (str, bytes, bytearray, Mapping, Set))
    if unordered or not isinstance(sequences, Iterable):
        raise TypeError(f"look: sequences must be a list, not {sequences!r:.40}")
    return list(sequences)


def ordered(snapshot: Snapshot, sequences: Iterable[Any] | None, sort: str | None) -> list[int]:
    """The places of these sequences, or of all: in the order given, or sorted; equals keep theirs.

    Raises: ValueError for a place given twice or without a sequence, or an unknown ``sort``;
    TypeError for no list of places.
    """
    if sort not in (None, *SORTS):
        raise ValueError(f"look: sort is {sort!r}, none of {', '.join(SORTS)}")
    there = snapshot.sequences
    if sequences is None:
        places = list(range(len(there)))
    else:
        places = [
            integer("look", f"sequences[{n}]", i, 0, len(there) - 1)
            for n, i in enumerate(listed(sequences))
        ]
    for i, times in Counter(places).items():
        if times > 1:
            raise ValueError(f"look: sequences has {there[i].name!r} {times} times")
    return places if sort is None else sorted(places, key=lambda i: _rank(there[i], sort))


def _rank(sequence: SequenceState, sort: str) -> Any:
    if sort == "blocks":
        return -len(sequence.held)
    if sort == "tokens":
        return -max(sequence.lengths)
    pieces = re.split(r"(\d+)", sequence.name)  # every other one is a number: longer is more
    return [(len(p.lstrip("0")), p.lstrip("0")) if i % 2 else p for i, p in enumerate(pieces)]


# --- words ----------------------------------------------------------------------------------------


def hidden(snapshot: Snapshot, shown: Sequence[int]) -> str:
    """How many sequences are not shown, and what shows them; nothing where all are."""
    n = len(snapshot.sequences) - len(shown)
    return f'... and {n} more: "sequences" names which to show, "sort" which first' if n else ""


def tokens_of(sequence: SequenceState) -> str:
    """``100 tokens``; where layers differ, ``96-100 tokens``."""
    low, high = min(sequence.lengths), max(sequence.lengths)
    return plural(high, "token") if low == high else f"{low:,}-{plural(high, 'token')}"


def facts(snapshot: Snapshot) -> list[tuple[str, str]]:
    """The counters in words: subject and what is to say of it."""
    c = snapshot.counters
    used, stored = percent(c["blocks_used"] / c["blocks_total"]), percent(c["tokens"] / c["slots"])
    found = (
        f"{c['prefix_tokens_found']:,} of {plural(c['prefix_tokens_asked'], 'token')} found "
        f"({percent(c['prefix_tokens_found'] / max(c['prefix_tokens_asked'], 1))}), "
        f"{plural(c['prefix_queries'], 'sequence')} begun with tokens"
    )
    lost = f"{plural(c['unrepresentable'], 'value')} that {snapshot.dtype} has nothing for"
    return [
        (
            "blocks",
            f"{c['blocks_used']:,} of {c['blocks_total']:,} used ({used}), "
            f"{c['blocks_cached']:,} cached, {c['blocks_free']:,} free; "
            f"most ever {c['blocks_high_water']:,}",
        ),
        (
            "tokens",
            f"{c['tokens']:,} in {plural(c['slots'], 'slot')} ({stored}); "
            f"{plural(c['tail_waste'], 'slot')} of used blocks empty",
        ),
        (
            "sharing",
            f"{plural(c['blocks_shared'], 'block')} shared, {c['blocks_saved']:,} saved by it; "
            f"{c['copies_on_write']:,} copied on write",
        ),
        (
            "pressure",
            f"{plural(c['evictions'], 'eviction')}, "
            f"{plural(c['failed_allocations'], 'failed allocation')}",
        ),
        *([("prefix", found)] if c["prefix_queries"] else []),
        *([("lost", lost)] if c["unrepresentable"] else []),
    ]


def title(snapshot: Snapshot) -> str:
    """What kind of pool it is."""
    s = snapshot
    return (
        f"KV cache: {plural(s.num_blocks, 'block')} of {plural(s.block_size, 'token')} "
        f"and {human_bytes(s.block_bytes)}; {plural(s.n_layers, 'layer')}, "
        f"{plural(s.n_kv_heads, 'KV head')} of {s.d_head} {s.dtype}"
    )


def warnings(snapshot: Snapshot) -> list[str]:
    """References and holders that do not match; nothing where all is well."""
    ids, surplus, c = snapshot.blocks["id"], snapshot.unowned, snapshot.counters
    leaked, dangling = ids[surplus > 0], ids[surplus < 0]
    said = []
    if len(leaked):
        said.append(f"{plural(c['leaked'], 'reference')} without an owner: {_named(leaked)}")
    if len(dangling):
        said.append(f"{plural(c['dangling'], 'owner')} without a reference: {_named(dangling)}")
    return said


def _named(ids: NDArray[np.int64]) -> str:
    return f"block{'s'[: len(ids) > 1]} {id_ranges(ids, 8)}"
