# SPDX-License-Identifier: MIT
"""timeline: which worker did what when in calls of paged attention; as numbers, text, SVG or Chrome
trace.

An event is one walk of a worker over K and V: rows of one sequence and KV head; or shared, rows of
several sequences over the blocks that they begin with; or a merge of states.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from tinyllm._check import integer
from tinyllm._files import write_whole
from tinyllm._observers import observing
from tinyllm.ffi.libtinyllm import (
    TL_ATTN_SPLIT,
    TL_TRACE_MERGE,
    TL_TRACE_ROWS,
    TL_TRACE_SHARED,
    Trace,
    TraceEvent,
    struct_ptr,
)
from tinyllm.observe.calls import timeline_picture

if TYPE_CHECKING:
    from tinyllm._paged_call import PagedCall

__all__ = ["EVENT", "MERGE", "ROWS", "SHARED", "Timeline", "TracedCall", "timeline"]

ROWS, SHARED, MERGE = TL_TRACE_ROWS, TL_TRACE_SHARED, TL_TRACE_MERGE
_FIELDS: Final[Any] = np.dtype(TraceEvent)
EVENT: Final = np.dtype([("call", np.int64), *_FIELDS.descr])
_MOST_EVENTS: Final = 1 << 18  # of one call; memory that no event is written to costs nothing


@contextmanager
def timeline() -> Iterator[Timeline]:
    """Collects what each worker did in the calls of ``paged_attention`` and
    ``paged_attention_decode`` in the block.

    A watched decode goes through the C function of ``paged_attention``, which gives the same bits.
    Blocks may be nested, also with ``record``. What counts are calls of the context (thread,
    asyncio task) that entered the block.

    >>> with tinyllm.timeline() as t:
    ...     tinyllm.paged_attention(q, view, tables, lengths, threads=2)
    >>> print(t)
    >>> t.save("call.json")  # or "call.svg"
    """
    found = Timeline()
    with observing(found):
        yield found


class _Buffer:
    """What one call writes its events into."""

    def __init__(self, capacity: int) -> None:
        self.events = np.empty(capacity, _FIELDS)
        self.struct = Trace(struct_ptr(TraceEvent.from_buffer(self.events.data)), capacity, 0)


def _most_events(call: PagedCall) -> int:
    """Enough where every row and split is walked on its own, up to a limit."""
    splits = int(call.ctx_lens.max(initial=0)) // TL_ATTN_SPLIT + 2
    return min(len(call.q) * call.kv.n_kv_heads * splits + 1024, _MOST_EVENTS)


@dataclass(frozen=True)
class TracedCall:
    """A call that was traced. Nanoseconds are those of ``time.monotonic_ns``. n_lost: events that
    found no room."""

    fn: str
    n_sequences: int
    n_workers: int
    begin_ns: int
    end_ns: int
    n_lost: int


class Timeline:
    """The events of the calls that ``timeline`` watched; it prints itself, and shows itself in
    notebooks.

    calls: a ``TracedCall`` each, in the order in which they ended.
    """

    def __init__(self) -> None:
        self.calls: list[TracedCall] = []
        self._events: list[NDArray[Any]] = []
        self._lock = Lock()

    # --- collecting -------------------------------------------------------------------------------

    def before(self, call: PagedCall) -> None:
        if call.trace is None:
            call.trace = _Buffer(_most_events(call))
            call.args.trace = struct_ptr(call.trace.struct)

    def after(self, call: PagedCall) -> None:
        n_workers = int(call.lib.tl_pool_threads(call.args.tp)) if call.args.tp else 1
        found, n = call.trace.events, int(call.trace.struct.n)
        traced = TracedCall(
            call.fn,
            len(call.ctx_lens),
            n_workers,
            call.begin_ns,
            call.end_ns,
            max(0, n - len(found)),
        )
        events = np.empty(min(n, len(found)), EVENT)
        for name in _FIELDS.names:
            events[name] = found[name][: len(events)]
        with self._lock:
            events["call"] = len(self.calls)
            self.calls.append(traced)
            self._events.append(events[np.lexsort((events["worker"], events["begin_ns"]))])

    # --- what was collected -----------------------------------------------------------------------

    @property
    def events(self) -> NDArray[Any]:
        """Every event as a structured array of dtype ``EVENT``, call by call, by its begin.

        call: index into ``calls``. worker: 0 is the thread that called. what: ROWS, SHARED or
        MERGE. seq: of SHARED the first of its sequences, of MERGE -1, as kv_head. first_token,
        n_tokens: rows of q from first_token on; of SHARED n_tokens in all, wherever they are.
        first_split, n_splits: of 1024 positions, those that any of the rows sees. begin_ns, end_ns:
        on the clock of ``time.monotonic_ns``.
        """
        return np.concatenate([np.empty(0, EVENT), *self._events])

    @property
    def n_lost(self) -> int:
        """Events that found no room, of all calls."""
        return sum(call.n_lost for call in self.calls)

    def busy(self, call: int | None = None) -> NDArray[np.float64]:
        """float64 [workers]: the part of the call, or of all calls together, in which each had an
        event.

        Raises: TypeError or ValueError for a ``call`` that is none.
        """
        calls, events = self._chosen(call)
        time = np.zeros(max((c.n_workers for c in calls), default=0))
        np.add.at(time, events["worker"], events["end_ns"] - events["begin_ns"])
        whole = sum(c.end_ns - c.begin_ns for c in calls)
        return time / max(whole, 1)

    # --- showing ----------------------------------------------------------------------------------

    def text(self, call: int | None = None, *, width: int = 100, colour: bool = False) -> str:
        """A lane of ``width`` characters for each worker, over one call or from the first to the
        last.

        A character is what most of its time went to: a letter is a sequence, = a shared walk, + a
        merge of states, . nothing.

        Raises: TypeError or ValueError for a ``call`` or ``width`` that is none.
        """
        width = integer("Timeline.text", "width", width, 10, 10000)
        return timeline_picture.text(*self._chosen(call), self.busy(call), width, colour)

    def svg(self, call: int | None = None) -> str:
        """The same as a picture: colours are sequences, striped bars shared walks, grey ones
        merges; the pointer on a bar shows what it is. Raises as ``text``."""
        return timeline_picture.svg(*self._chosen(call), self.busy(call))

    def _repr_svg_(self) -> str:
        return self.svg()

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<Timeline of {len(self.calls)} calls, {len(self.events)} events>"

    def to_chrome(self) -> dict[str, Any]:
        """The Chrome trace format, which Perfetto and chrome://tracing open: microseconds from the
        begin of the first call; tid is the worker, and one more thread holds the calls."""
        origin = min((call.begin_ns for call in self.calls), default=0)
        n_workers = max((call.n_workers for call in self.calls), default=0)
        events: list[dict[str, Any]] = []

        def add(ph: str, tid: int, name: str, args: dict[str, Any], **more: Any) -> None:
            events.append({"ph": ph, "pid": 1, "tid": tid, "name": name, **more, "args": args})

        def add_bar(
            tid: int, name: str, args: dict[str, Any], kind: str, begin: int, end: int
        ) -> None:
            add("X", tid, name, args, cat=kind, ts=(begin - origin) / 1e3, dur=(end - begin) / 1e3)

        for tid, lane in enumerate([*(f"worker {i}" for i in range(n_workers)), "calls"]):
            add("M", tid, "thread_name", {"name": lane})
            add(
                "M", tid, "thread_sort_index", {"sort_index": (tid + 1) % (n_workers + 1)}
            )  # calls on top
        for i, call in enumerate(self.calls):
            facts = {
                "call": i,
                "sequences": call.n_sequences,
                "workers": call.n_workers,
                "lost": call.n_lost,
            }
            add_bar(n_workers, call.fn, facts, "call", call.begin_ns, call.end_ns)
        for e in self.events:
            values = {name: int(e[name]) for name in EVENT.names or ()}
            worker, what, begin, end = (
                values.pop(n) for n in ("worker", "what", "begin_ns", "end_ns")
            )
            kind = ("rows", "shared", "merge")[what]
            add_bar(worker, timeline_picture.name_of(e), values, kind, begin, end)
        return {"traceEvents": events, "displayTimeUnit": "ns", "otherData": {"lost": self.n_lost}}

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes ``svg()`` where ``path`` ends in ".svg", else ``to_chrome()`` as JSON, whole or
        not at all. Raises OSError."""
        is_svg = os.fspath(path).lower().endswith(".svg")
        write_whole(path, self.svg() if is_svg else json.dumps(self.to_chrome()))

    def _chosen(self, call: int | None) -> tuple[list[TracedCall], NDArray[Any]]:
        if call is None:
            return self.calls, self.events
        call = integer("Timeline", "call", call, 0, len(self.calls) - 1)
        return [self.calls[call]], self._events[call]
