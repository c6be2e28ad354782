# SPDX-License-Identifier: MIT
"""Long calls are made in pieces, and nobody can tell but by how soon Ctrl-C is heard."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tinyllm
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from tinyllm import (
    KVView,
    PagedKVCache,
    _paged_call,
    _pieces,
    attention,
    flash_attention,
    paged_attention,
    paged_attention_decode,
)

F32 = np.float32


def normal(*shape: int, seed: int = 1) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, F32)


class Small:
    """Every call counts as long, and pieces are of a few rows, of another number each time."""

    def __init__(self, patch: pytest.MonkeyPatch, rows: list[int]) -> None:
        self.pieces: list[tuple[int, int]] = []

        def in_pieces(work: NDArray[Any], call: Callable[[int, int], None]) -> None:
            begin, turn = 0, 0
            assert (np.asarray(work) > 0).all()
            while begin < len(work):
                end = min(begin + rows[turn % len(rows)], len(work))
                self.pieces.append((begin, end))
                call(begin, end)
                begin, turn = end, turn + 1

        for module in (attention, _paged_call):
            patch.setattr(module, "in_pieces", in_pieces)
            patch.setattr(module, "LONG", 0)


@pytest.fixture
def patch() -> Iterator[pytest.MonkeyPatch]:
    with pytest.MonkeyPatch.context() as context:
        yield context


COUNTS = st.lists(st.tuples(st.integers(0, 7), st.integers(0, 40)), min_size=1, max_size=5)


@settings(deadline=None, max_examples=60)
@given(COUNTS, st.lists(st.integers(1, 6), min_size=1, max_size=4), st.sampled_from([0, 1, 9]))
def test_rows_of_a_batch_cut_anywhere_have_their_bits(
    counts: list[tuple[int, int]], rows: list[int], window: int
) -> None:
    n_rows = [n for n, _ in counts]
    lengths = [n + before for n, before in counts]
    starts = np.cumsum([0, *n_rows])
    blocks = -(-max(max(lengths), 1) // 4)
    k, v = normal(2, blocks * len(counts), 2, 4, 8)
    tables = np.arange(blocks * len(counts)).reshape(len(counts), -1)[:, ::-1]
    q = normal(int(starts[-1]), 4, 8, seed=3)
    options: dict[str, Any] = {
        "cu_seqlens_q": starts, "window": window, "alibi_slopes": normal(4, seed=4),
        "sink_logits": normal(4, seed=5), "return_lse": True,
    }  # fmt: skip
    view = KVView.from_arrays(k, v)
    wanted = paged_attention(q, view, tables, lengths, **options)
    with pytest.MonkeyPatch.context() as patch:
        small = Small(patch, rows)
        found = paged_attention(q, view, tables, lengths, **options)
        assert len(small.pieces) == 0 or small.pieces[-1][1] == len(q)
    for a, b in zip(found, wanted, strict=True):
        assert a.tobytes() == b.tobytes()


@pytest.mark.parametrize("threads", [None, 2])
def test_a_decode_and_a_call_without_row_starts_are_cut_between_sequences(
    patch: pytest.MonkeyPatch, threads: int | None
) -> None:
    with PagedKVCache(num_blocks=64, block_size=4, n_layers=1, n_kv_heads=2, d_head=8) as cache:
        for seq in range(7):
            cache.add_seq(seq)
            cache.append(seq, 0, *normal(2, 2, 3 * seq + 1, 8, seed=seq))
        q = normal(7, 4, 8)
        tables = [cache.block_table(seq) for seq in range(7)]
        lengths = [cache.seq_len(seq) for seq in range(7)]
        wanted = paged_attention_decode(q, cache, range(7), 0, window=9)
        small, out = Small(patch, [2, 1]), np.empty_like(q)
        assert (
            paged_attention_decode(q, cache, range(7), 0, window=9, threads=threads, out=out) is out
        )
        assert out.tobytes() == wanted.tobytes()
        assert small.pieces == [(0, 2), (2, 3), (3, 5), (5, 6), (6, 7)]
        small.pieces.clear()
        found = paged_attention(q, cache.view(0), tables, lengths, window=9, threads=threads)
        assert found.tobytes() == wanted.tobytes()
        assert len(small.pieces) == 5


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("window", [0, 5])
@pytest.mark.parametrize("q_offset", [0, 6, 2**60])
def test_prefill_cut_anywhere_has_its_bits(
    patch: pytest.MonkeyPatch, causal: bool, window: int, q_offset: int
) -> None:
    q, k, v = normal(2, 4, 11, 8), normal(2, 2, 17, 8, seed=2), normal(2, 2, 17, 8, seed=3)
    options: dict[str, Any] = {
        "causal": causal, "window": window, "q_offset": q_offset, "sink_logits": normal(4, seed=4),
        "return_lse": True,
    }  # fmt: skip
    wanted = flash_attention(q, k, v, **options)
    monkey = Small(patch, [3, 1, 4])
    patch.setattr(attention, "positions_seen", lambda rows, *_: np.ones(len(rows), np.int64))
    for a, b in zip(flash_attention(q, k, v, **options), wanted, strict=True):
        assert a.tobytes() == b.tobytes()
    assert len(monkey.pieces) == 4


def test_a_long_call_that_is_refused_is_refused_before_it_writes(
    patch: pytest.MonkeyPatch,
) -> None:
    """What is wrong lies in the last rows, and the message is that of the whole call."""
    k, v = normal(2, 6, 2, 4, 8)
    view, q, tables = KVView.from_arrays(k, v), normal(6, 4, 8), np.arange(6).reshape(3, 2)
    good = {"block_tables": tables, "ctx_lens": [5, 5, 5], "cu_seqlens_q": [0, 2, 4, 6]}
    bad_table = tables.copy()
    bad_table[2, 1] = 77
    room = normal(12, 4, 8)
    wrongs: tuple[dict[str, Any], ...] = (
        {"block_tables": bad_table},
        {"ctx_lens": [5, 5, 9]},
        {"ctx_lens": [5, 5, 1]},
        {"cu_seqlens_q": [0, 5, 4, 6]},
        {"cu_seqlens_q": [1, 2, 4, 6]},
        {"q": room[2:8], "out": room[4:10]},
    )
    for wrong in wrongs:
        messages = []
        for rows in (None, [1]):
            out = np.full((6, 4, 8), 7, F32)
            call = {"q": q, "out": out, **good, **wrong}
            before = call["out"].copy()
            with pytest.MonkeyPatch.context() as context:
                if rows:
                    Small(context, rows)
                with pytest.raises(ValueError) as caught:
                    paged_attention(kv=view, **call)
            messages.append(str(caught.value))
            assert (call["out"] == before).all()
        assert messages[0] == messages[1]


def test_a_table_entry_that_no_row_needs_may_be_anything_when_cut_too(
    patch: pytest.MonkeyPatch,
) -> None:
    k, v = normal(2, 6, 2, 4, 8)
    view, q = KVView.from_arrays(k, v), normal(3, 4, 8)
    options: dict[str, Any] = {"cu_seqlens_q": [0, 0, 3], "window": 2}
    tables = [[-1, -1, -1, -1], [-1, 3, 1, -1]]
    wanted = paged_attention(q, view, tables, [0, 9], **options)
    small = Small(patch, [1])
    assert paged_attention(q, view, tables, [0, 9], **options).tobytes() == wanted.tobytes()
    assert len(small.pieces) == 3


def test_an_interrupt_between_pieces_leaves_the_rows_that_are_done(
    patch: pytest.MonkeyPatch,
) -> None:
    k, v = normal(2, 6, 2, 4, 8)
    view, q = KVView.from_arrays(k, v), normal(10, 4, 8)
    tables, out = [[0, 1, 2, 3, 4, 5]], np.full((10, 4, 8), 7, F32)
    wanted = paged_attention(q, view, tables, [20], cu_seqlens_q=[0, 10])
    small = Small(patch, [4])
    whole = _paged_call.PagedCall._run

    def stopped(self: Any, tp: Any) -> None:
        if len(small.pieces) == 3:
            raise KeyboardInterrupt
        whole(self, tp)

    patch.setattr(_paged_call.PagedCall, "_run", stopped)
    with pytest.raises(KeyboardInterrupt):
        paged_attention(q, view, tables, [20], cu_seqlens_q=[0, 10], out=out)
    assert out[:8].tobytes() == wanted[:8].tobytes()
    assert (out[8:] == 7).all()


def test_who_watches_sees_one_call(patch: pytest.MonkeyPatch) -> None:
    k, v = normal(2, 6, 2, 4, 8)
    small = Small(patch, [1])
    with tinyllm.timeline() as found:
        paged_attention(
            normal(4, 4, 8), KVView.from_arrays(k, v), [[0, 1]], [8], cu_seqlens_q=[0, 4]
        )
    assert len(found.calls) == 1
    assert not small.pieces


# --- how long a piece is
# --------------------------------------------------------------------------------------------------


def test_pieces_cover_all_rows_and_take_about_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now, speed, took = [0.0], 3e9, []
    monkeypatch.setattr(_pieces, "monotonic", lambda: now[0])
    work = np.arange(1, 24001) * 16 * 64
    ends = [0]

    def call(begin: int, end: int) -> None:
        assert begin == ends[-1] < end
        ends.append(end)
        took.append(work[begin:end].sum() / speed)
        now[0] += took[-1]

    _pieces.in_pieces(work, call)
    assert ends[-1] == 24000
    assert took[0] < 0.5  # nothing is known of the machine yet
    assert max(took) < 1.01
    assert min(took[1:-1]) > 0.98


def test_a_row_longer_than_a_second_is_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.count(step=5)
    monkeypatch.setattr(_pieces, "monotonic", lambda: next(clock))
    pieces: list[tuple[int, int]] = []
    _pieces.in_pieces(np.full(3, 1 << 40), lambda begin, end: pieces.append((begin, end)))
    assert pieces == [(0, 1), (1, 2), (2, 3)]


def test_ctrl_c_is_heard_within_seconds(run_python: Any) -> None:
    done = run_python("""
import signal, time
import numpy as np
import tinyllm
signal.signal(signal.SIGALRM, signal.default_int_handler)
n = 16000  # half a minute of work and more
q, k, v = np.ones((3, 1, 8, n, 64), np.float32)
blocks = k.reshape(8, n // 16, 16, 64).transpose(1, 0, 2, 3)
view, table = tinyllm.KVView.from_arrays(blocks, blocks), [np.arange(n // 16)]
rows = np.ascontiguousarray(q[0].transpose(1, 0, 2))
out = np.zeros_like(rows)
for call in (
    lambda: tinyllm.flash_attention(q, k, v),
    lambda: tinyllm.paged_attention(rows, view, table, [n], cu_seqlens_q=[0, n], out=out),
):
    signal.setitimer(signal.ITIMER_REAL, 1.0)
    started = time.monotonic()
    try:
        call()
    except KeyboardInterrupt:
        print(time.monotonic() - started < 20)
print(out[0].all(), out[-1].any())
""")
    assert (done.stdout, done.stderr) == ("True\nTrue\nTrue False\n", "")
