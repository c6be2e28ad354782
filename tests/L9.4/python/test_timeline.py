# SPDX-License-Identifier: MIT
"""timeline: every piece of work is in it once and within its call; what it shows is what it holds;
nothing of the result changes. No test asserts how long anything takes."""

from __future__ import annotations

import contextvars
import json
import re
import threading
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import tinyllm
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from test_paged_attention import Batch, assert_same_bits, make_batch
from tinyllm import PagedKVCache, paged_attention_decode, record
from tinyllm import timeline as watched
from tinyllm.ffi.libtinyllm import Lib
from tinyllm.observe.calls import timeline as module
from tinyllm.observe.calls.timeline import EVENT, MERGE, ROWS, SHARED, Timeline, TracedCall
from tinyllm.observe.palette import KEYS, PALETTE

F32 = np.float32


@pytest.fixture(autouse=True)
def _library(lib: Lib) -> None:
    """Says so once where the library is not built."""


LENGTHS = [(1, 1), (1, 2100), (5, 5), (0, 7), (3, 1026), (40, 1100), (0, 0)]


@pytest.fixture(scope="module")
def batch() -> Batch:
    return make_batch(1, LENGTHS, block=64)


def walked(timeline: Timeline, batch: Batch, n_kv: int = 2) -> NDArray[np.int64]:
    """How often (row, KV head, split) was walked, where the row sees something of the split."""
    n_splits = 1 + int(batch.ctx_lens.max()) // 1024
    times = np.zeros((len(batch.q), n_kv, n_splits), np.int64)
    for e in timeline.events:
        if e["what"] != MERGE:
            rows = slice(e["first_token"], e["first_token"] + e["n_tokens"])
            times[rows, e["kv_head"], e["first_split"] : e["first_split"] + e["n_splits"]] += 1
    window = batch.options.get("window", 0)
    for s in range(len(batch.ctx_lens)):
        for row in range(batch.starts[s], batch.starts[s + 1]):
            position = batch.ctx_lens[s] - batch.starts[s + 1] + row
            low = max(0, position + 1 - window) if window > 0 else 0
            unseen = [k for k in range(n_splits) if k < low // 1024 or k > position // 1024]
            times[row, :, unseen] = 1
    return times


# --- what is in it --------------------------------------------------------------------------------


@settings(deadline=None, max_examples=30)
@given(
    lengths=st.lists(
        st.tuples(st.integers(0, 40), st.sampled_from([0, 1, 30, 1024, 1025, 2300])).map(
            lambda pair: (min(pair), max(pair[1], min(pair)))
        ),
        min_size=1,
        max_size=5,
    ),
    window=st.sampled_from([0, 1, 1500]),
    threads=st.sampled_from([None, 2, 3]),
)
def test_every_row_and_split_is_walked_once(lengths: Any, window: int, threads: Any) -> None:
    batch = make_batch(2, lengths, block=64, window=window)
    with watched() as found:
        batch.run(threads=threads)
    assert (walked(found, batch) == 1).all()
    rows = found.events[found.events["what"] == ROWS]
    for e in rows:  # no walk is of two sequences
        assert batch.starts[e["seq"]] <= e["first_token"]
        assert e["first_token"] + e["n_tokens"] <= batch.starts[e["seq"] + 1]
    assert not (found.events["what"] == SHARED).any()


def sharing_cache() -> PagedKVCache:
    cache = PagedKVCache(None, 300, 16, 1, 2, 16)
    rng = np.random.default_rng(3)
    cache.add_seq(0)
    cache.append(0, 0, *rng.standard_normal((2, 2, 2060, 16), F32))
    for child in range(1, 6):
        cache.fork(0, child)
        cache.append(child, 0, *rng.standard_normal((2, 2, child, 16), F32))
    return cache


def test_shared_walks_and_the_rest_cover_everything_once() -> None:
    q = np.random.default_rng(4).standard_normal((6, 4, 16), F32)
    with sharing_cache() as cache:
        unwatched = paged_attention_decode(q, cache, range(6), 0)
        with watched() as found:
            assert_same_bits(paged_attention_decode(q, cache, range(6), 0), unwatched)
    batch = Batch(q, q, q, "", q, np.array([2060, *range(2061, 2066)]), np.arange(7))  # type: ignore[arg-type]
    assert (walked(found, batch) == 1).all()
    shared = found.events[found.events["what"] == SHARED]
    assert set(shared["kv_head"].tolist()) == {0, 1}
    assert (shared["first_split"] == 0).all() and (shared["n_splits"] == 2).all()
    assert found.calls[0].fn == "paged_attention_decode"


@pytest.mark.parametrize("threads", [None, 2, 3])
def test_events_are_within_their_call_and_one_after_another(batch: Batch, threads: Any) -> None:
    with watched() as found:
        for _ in range(3):
            batch.run(threads=threads)
    assert len(found.calls) == 3
    for i, call in enumerate(found.calls):
        assert (call.n_workers, call.n_sequences, call.n_lost) == (threads or 1, len(LENGTHS), 0)
        assert i == 0 or found.calls[i - 1].end_ns <= call.begin_ns < call.end_ns
        events = found.events[found.events["call"] == i]
        assert len(events)
        assert (events["begin_ns"] >= call.begin_ns).all() and (
            events["end_ns"] <= call.end_ns
        ).all()
        assert (events["begin_ns"] <= events["end_ns"]).all()
        for worker in range(call.n_workers):
            own = events[events["worker"] == worker]
            assert (own["begin_ns"][1:] >= own["end_ns"][:-1]).all()
        assert set(events["worker"].tolist()) <= set(range(call.n_workers))


def test_a_long_sequence_on_two_threads_is_merged(batch: Batch) -> None:
    one = make_batch(5, [(1, 9000)], block=64)
    with watched() as found:
        watched_bits = one.run(threads=2)
    merges = found.events[found.events["what"] == MERGE]
    assert len(merges) and set(merges["seq"].tolist()) == {-1}
    assert (walked(found, one) == 1).all()
    assert_same_bits(watched_bits[0], one.run()[0])


def test_bits_are_those_of_an_unwatched_call(batch: Batch) -> None:
    unwatched = batch.run(threads=2)
    with watched():
        seen = batch.run(threads=2)
    for a, b in zip(seen, unwatched, strict=True):
        assert_same_bits(a, b)


def test_events_that_found_no_room_are_counted(
    batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    with watched() as whole:
        batch.run()
    monkeypatch.setattr(module, "_MOST_EVENTS", 3)
    with watched() as found:
        seen = batch.run()
    assert len(found.events) == 3
    assert found.n_lost == found.calls[0].n_lost == len(whole.events) - 3 > 0
    assert f"{found.n_lost} events lost" in str(found)
    assert found.to_chrome()["otherData"] == {"lost": found.n_lost}
    assert_same_bits(seen[0], batch.run()[0])


# --- whose calls ----------------------------------------------------------------------------------


def test_nested_timelines_and_records_see_the_same_call(batch: Batch, tmp_path: Path) -> None:
    with record(tmp_path / "a"), watched() as outer, record(tmp_path / "b"), watched() as inner:
        batch.run()
    assert len(outer.events) == len(inner.events) > 0
    assert outer.events.tobytes() == inner.events.tobytes()
    assert outer.calls == inner.calls
    assert (
        walked(outer, batch) == 1
    ).all()  # the calls by which states are recorded leave no trace
    assert tinyllm.diff(tmp_path / "a", tmp_path / "b").equal


def test_failed_and_other_calls_are_not_in_it(batch: Batch) -> None:
    with watched() as found:
        with pytest.raises(ValueError, match="scale"):
            batch.run(scale=float("nan"))
        thread = threading.Thread(target=lambda: contextvars.Context().run(batch.run))
        thread.start()
        thread.join()
    batch.run()
    assert (found.calls, len(found.events)) == ([], 0)


def test_calls_of_several_threads_are_kept_apart(batch: Batch) -> None:
    with watched() as found:
        contexts = [contextvars.copy_context() for _ in range(6)]
        threads = [threading.Thread(target=context.run, args=(batch.run,)) for context in contexts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(found.calls) == 6
    for i in range(6):
        one = Timeline()
        one.calls, one._events = [found.calls[i]], [found.events[found.events["call"] == i]]
        assert (walked(one, batch) == 1).all()


# --- what it shows --------------------------------------------------------------------------------


def made(
    events: list[tuple[int, ...]], *, n_workers: int = 2, calls: list[tuple[int, int]] | None = None
) -> Timeline:
    """Events as (call, worker, what, seq, kv_head, begin, end) in us."""
    timeline = Timeline()
    calls = calls or [(1000, 1100)]
    timeline.calls = [
        TracedCall("paged_attention", 3, n_workers, a * 1000, b * 1000, 0) for a, b in calls
    ]
    rows = [
        (call, worker, what, seq, head, 0, 2, 0, 1, begin * 1000, end * 1000)
        for call, worker, what, seq, head, begin, end in events
    ]
    every = np.array(rows, EVENT)
    timeline._events = [every[every["call"] == i] for i in range(len(calls))]
    return timeline


WORK = [
    (0, 0, SHARED, 0, 0, 1000, 1030),
    (0, 0, ROWS, 2, 0, 1030, 1080),
    (0, 1, ROWS, 1, 1, 1020, 1040),
    (0, 1, MERGE, -1, -1, 1090, 1100),
]


def test_busy_is_the_part_of_the_time_with_an_event() -> None:
    np.testing.assert_allclose(made(WORK).busy(), [0.8, 0.3])
    two = made([*WORK, (1, 1, ROWS, 0, 0, 2000, 2100)], calls=[(1000, 1100), (2000, 2300)])
    np.testing.assert_allclose(two.busy(), [80 / 400, 130 / 400])
    np.testing.assert_allclose(two.busy(1), [0, 1 / 3])


def test_text_is_a_lane_for_each_worker() -> None:
    assert made(WORK).text(width=20).splitlines() == [
        "paged_attention: 3 sequences, 2 workers, 100 us, 55 % busy",
        "worker 0  ======CCCCCCCCCC....  80 %",
        "worker 1  ....BBBB..........++  30 %",
        "          |0                  |100 us",
        "          B sequence 1, C sequence 2  = shared walk  + merge  . nothing",
    ]


def test_text_shows_what_most_of_a_cell_went_to() -> None:
    lane = made(
        [
            (0, 0, ROWS, 0, 0, 1000, 1004),
            (0, 0, ROWS, 1, 0, 1004, 1010),
            (0, 0, ROWS, 2, 0, 1010, 1014),
        ]
    )
    assert lane.text(width=10).splitlines()[1] == "worker 0  B.........  14 %"


def test_colour_adds_nothing_but_colour() -> None:
    plain, coloured = (made(WORK).text(width=30, colour=colour) for colour in (False, True))
    assert "\x1b[" in coloured
    assert re.sub(r"\x1b\[[0-9;]*m", "", coloured) == plain


@settings(deadline=None)
@given(
    work=st.lists(
        st.tuples(
            st.just(0), st.integers(0, 2), st.integers(0, 2), st.integers(0, 100),
            st.integers(0, 9), st.integers(1000, 1100), st.integers(0, 100),
        ),
        max_size=20,
    ),
    width=st.integers(10, 300),
)  # fmt: skip
def test_any_timeline_can_be_shown(work: Any, width: int) -> None:
    timeline = made([(*e[:5], e[5], min(1100, e[5] + e[6])) for e in work], n_workers=3)
    lines = timeline.text(width=width).splitlines()
    assert [len(line[10 : 10 + width]) for line in lines[1:4]] == [width] * 3
    ElementTree.fromstring(timeline.svg())
    json.dumps(timeline.to_chrome(), allow_nan=False)


def svg_of(timeline: Timeline, call: int | None = None) -> ElementTree.Element:
    return ElementTree.fromstring(timeline.svg(call))


def texts(svg: ElementTree.Element, tag: str) -> list[str]:
    return [e.text or "" for e in svg.iter(f"{{http://www.w3.org/2000/svg}}{tag}")]


def test_the_picture_names_every_bar() -> None:
    svg = svg_of(made(WORK))
    assert [t for t in texts(svg, "title") if not t.startswith("call")] == [
        "shared from seq 0 head 0: 2 rows of q, splits 0, 30.0 us from 0 ns on",
        "seq 2 head 0: rows 0-1 of q, splits 0, 50.0 us from 30.0 us on",
        "seq 1 head 1: rows 0-1 of q, splits 0, 20.0 us from 20.0 us on",
        "merge: rows 0-1 of q, splits 0, 10.0 us from 90.0 us on",
    ]
    shown = texts(svg, "text")
    assert shown[0] == "paged_attention: 3 sequences, 2 workers, 100 us, 55 % busy"
    assert {
        "worker 0",
        "worker 1",
        "80 %",
        "30 %",
        "shared",
        "s2 h0",
        "merge",
        "sequence 1",
    } <= set(shown)
    assert not [e for e in svg.iter() if "id" in e.attrib or e.tag.endswith(("style", "script"))]


def test_a_sequence_has_the_letter_and_the_colour_of_its_place() -> None:
    """Those that a picture of a cache gives to the sequence of that place."""
    places = (0, 6, 7, 26, 181)
    events = [(0, 0, ROWS, s, 0, 1000 + 20 * n, 1020 + 20 * n) for n, s in enumerate(places)]
    svg = svg_of(made(events))
    fills = [
        rect.attrib["fill"]
        for g in svg.iter("{http://www.w3.org/2000/svg}g")
        if (rect := g.find("{http://www.w3.org/2000/svg}rect")) is not None
    ]
    assert fills == [PALETTE[s % 7].fill for s in places]
    lane = made(events).text(width=10, colour=True).splitlines()[1]
    painted = re.findall(r"\x1b\[48;5;(\d+);38;5;16m(\w+)\x1b", lane)
    assert painted == [(str(PALETTE[s % 7].ansi), 2 * KEYS[s % 26]) for s in places]
    sizes = [e.attrib["font-size"] for e in svg.iter() if "font-size" in e.attrib]
    assert sizes == ["12"]


def test_bars_stand_where_their_times_are() -> None:
    svg = svg_of(made(WORK))
    bars = [
        g.find("{http://www.w3.org/2000/svg}rect")
        for g in svg.iter("{http://www.w3.org/2000/svg}g")
    ]
    at = [(float(r.attrib["x"]), float(r.attrib["width"])) for r in bars if r is not None]
    left, right = at[0][0], at[3][0] + at[3][1] + 0.6
    per_us = (right - left) / 100
    for (x, wide), (begin, end) in zip(at, [(0, 30), (30, 80), (20, 40), (90, 100)], strict=True):
        assert x == pytest.approx(left + begin * per_us, abs=0.1)
        assert wide == pytest.approx((end - begin) * per_us - 0.6, abs=0.1)


def test_narrow_bars_are_drawn_as_one() -> None:
    many = made(
        [(0, 0, ROWS, 0, 0, 1000 + i, 1001 + i) for i in range(50000)], calls=[(1000, 51000)]
    )
    assert [t for t in texts(svg_of(many), "title") if "and 49,999 narrow bars after it" in t]
    assert len(many.svg()) < 10000


def test_calls_are_bands_and_one_can_be_shown_alone() -> None:
    two = made([*WORK, (1, 1, ROWS, 0, 0, 2000, 2100)], calls=[(1000, 1100), (2000, 2300)])
    bands = [t for t in texts(svg_of(two), "title") if t.startswith("call")]
    assert bands == ["call 0: paged_attention, 100 us", "call 1: paged_attention, 300 us"]
    assert (
        texts(svg_of(two, 1), "text")[0]
        == "paged_attention: 3 sequences, 2 workers, 300 us, 16.7 % busy"
    )
    assert two.text(1).startswith("paged_attention: 3 sequences")
    assert two.text().startswith("2 calls of paged_attention: 3 sequences")


def test_nothing_watched_is_said() -> None:
    with watched() as found:
        pass
    assert str(found) == "no call was watched"
    assert texts(svg_of(found), "text") == ["no call was watched"]
    assert found.to_chrome()["traceEvents"] == [
        {"ph": "M", "name": "thread_name", "pid": 1, "tid": 0, "args": {"name": "calls"}},
        {"ph": "M", "name": "thread_sort_index", "pid": 1, "tid": 0, "args": {"sort_index": 0}},
    ]
    assert found.busy().shape == (0,)


def test_notebooks_get_the_picture(batch: Batch) -> None:
    with watched() as found:
        batch.run(threads=2)
    assert found._repr_svg_() == found.svg()
    ElementTree.fromstring(found._repr_svg_())


def test_chrome_json_holds_every_event(batch: Batch, tmp_path: Path) -> None:
    with watched() as found:
        batch.run(threads=2)
        batch.run(threads=2)
    found.save(tmp_path / "call.json")
    trace = json.loads((tmp_path / "call.json").read_text())
    named = [e for e in trace["traceEvents"] if e["name"] == "thread_name"]
    names = {e["tid"]: e["args"]["name"] for e in named}
    assert names == {0: "worker 0", 1: "worker 1", 2: "calls"}
    bars = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert {e["ph"] for e in trace["traceEvents"]} == {"M", "X"}
    assert all(e["ts"] >= 0 and e["dur"] >= 0 and e["tid"] in names and e["pid"] == 1 for e in bars)
    calls, work = ([e for e in bars if (e["tid"] == 2) == is_call] for is_call in (True, False))
    assert [(c["name"], c["args"]["call"]) for c in calls] == [
        ("paged_attention", 0),
        ("paged_attention", 1),
    ]
    assert calls[0]["ts"] == 0
    for bar, event in zip(work, found.events, strict=True):
        assert bar["tid"] == event["worker"]
        assert bar["cat"] == ("rows", "shared", "merge")[event["what"]]
        assert bar["args"]["seq"] == event["seq"]
        assert bar["name"] == (
            "merge" if event["what"] == MERGE else f"seq {event['seq']} head {event['kv_head']}"
        )
        call = calls[event["call"]]
        assert call["ts"] <= bar["ts"] and bar["ts"] + bar["dur"] <= call["ts"] + call["dur"] + 1e-6
        assert bar["dur"] == pytest.approx((event["end_ns"] - event["begin_ns"]) / 1e3)


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"width": 9}, ValueError, "width = 9 is outside"),
        ({"width": 1.5}, TypeError, "width must be an integer"),
        ({"call": 1}, ValueError, r"call = 1 is outside 0 \.\. 0"),
        ({"call": -1}, ValueError, "call = -1 is outside"),
        ({"call": "0"}, TypeError, "call must be an integer"),
    ],
)
def test_showing_refuses(options: dict[str, Any], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"Timeline.*{text}"):
        made(WORK).text(**options)
    if "call" in options:
        for show in (made(WORK).svg, made(WORK).busy):
            with pytest.raises(error, match=text):
                show(**options)


@pytest.mark.parametrize("name", ["call.svg", "call.SVG"])
def test_a_name_that_ends_in_svg_gets_the_picture(name: str, tmp_path: Path) -> None:
    made(WORK).save(tmp_path / name)
    assert (tmp_path / name).read_text(encoding="utf-8") == made(WORK).svg()
    made(WORK).save(tmp_path / "svg")
    assert json.loads((tmp_path / "svg").read_text()) == made(WORK).to_chrome()


def test_save_says_where_it_cannot_write(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        made(WORK).save(tmp_path / "missing" / "call.json")
