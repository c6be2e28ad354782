# SPDX-License-Identifier: MIT
"""paged_attention_states and merge_states: states of splits, divided any way, finish to the bits of
one call.

One call's bits are those of ``tinyllm.reference`` (test_paged_attention.py); the state of a split
itself is checked against the reference's states.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tinyllm
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from test_paged_attention import SINKS, Batch, assert_same_bits, bits, make_batch
from tinyllm import ClosedError, KVView, ThreadPool, merge_states, paged_attention_states, reference
from tinyllm.ffi.libtinyllm import Lib

F32 = np.float32
SLOPES = np.array([0.5, 2.0**-8, 0, -0.3], F32)
LONG = [(1, 2500), (3, 1024), (2, 1026), (1, 7), (0, 40), (5, 3073)]
N_SPLITS = 4  # that LONG reaches


@pytest.fixture(autouse=True)
def _library(lib: Lib) -> None:
    """Says so once where the library is not built."""


@pytest.fixture(scope="module")
def batch() -> Batch:
    return make_batch(1, LONG, block=48)


def states(batch: Batch, first: int, n: int, **changes: Any) -> NDArray[np.float32]:
    options = {**batch.options, **changes}
    options.pop("sink_logits", None)
    options.setdefault("cu_seqlens_q", batch.starts)
    view = KVView.from_arrays(batch.k, batch.v, dtype=batch.dtype)
    return paged_attention_states(batch.q, view, batch.tables, batch.ctx_lens, first, n, **options)


# --- the bits
# -----------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_any_division_of_the_splits_merges_to_the_bits_of_one_call(batch: Batch, data: Any) -> None:
    options: dict[str, Any] = {
        "window": data.draw(st.sampled_from([0, 1, 1025, 1500])),
        "softcap": data.draw(st.sampled_from([0.0, 3.0])),
        "alibi_slopes": data.draw(st.sampled_from([None, SLOPES])),
        "scale": data.draw(st.sampled_from([None, -0.75])),
    }
    sinks = data.draw(st.sampled_from([None, SINKS[:4], SINKS[4:8]]))
    last = data.draw(st.integers(N_SPLITS, N_SPLITS + 3))
    cuts = sorted(data.draw(st.sets(st.integers(1, last - 1))))
    parts = [
        (
            states(
                batch, first, end - first, threads=data.draw(st.sampled_from([None, 2])), **options
            ),
            first,
        )
        for first, end in zip([0, *cuts], [*cuts, last], strict=True)
    ]
    threads = data.draw(st.sampled_from([None, 1, 3]))
    out, lse = merge_states(parts, sink_logits=sinks, return_lse=True, threads=threads)
    want_out, want_lse = batch.run(sink_logits=sinks, **options)
    assert_same_bits(out, want_out)
    assert_same_bits(lse, want_lse)
    assert_same_bits(merge_states(parts, sink_logits=sinks), want_out)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("hostile", [False, True])
def test_merged_states_equal_the_reference(dtype: str, hostile: bool) -> None:
    batch = make_batch(
        2, [(2, 1030), (1, 2050)], dtype=dtype, hostile=hostile, dims=(8, 12), softcap=4.0
    )
    out, lse = merge_states([(states(batch, i, 1), i) for i in range(3)], return_lse=True)
    want_out, want_lse = batch.wanted()
    assert_same_bits(out, want_out)
    assert_same_bits(lse, want_lse)


@pytest.mark.parametrize("window", [0, 17000])
def test_states_over_stretches_merge_to_the_bits_of_one_call(window: int) -> None:
    batch = make_batch(6, [(2, 33000)], block=100, dims=(4, 3))
    division = [(0, 7), (7, 9), (16, 17)]
    parts = [(states(batch, first, n, window=window), first) for first, n in division]
    out, lse = merge_states(parts, return_lse=True)
    want_out, want_lse = batch.run(window=window)
    assert_same_bits(out, want_out)
    assert_same_bits(lse, want_lse)
    view = parts[2][0].reshape(-1, 17, 5)
    seen = view[:, :, 0] > -np.inf
    assert seen.any(axis=1).all() and (window or seen.all())


def test_a_state_is_that_of_the_reference() -> None:
    batch = make_batch(3, [(1, 2100)], block=50)
    got = states(batch, 0, 3)
    held = np.arange(2100)
    block, slot = batch.tables[0][held // 50].astype(int), held % 50
    for head in range(4):
        g = head // 2
        k, v = (reference.widened(a[block, g, slot]) for a in (batch.k, batch.v))
        rows = reference.Rows(batch.q[0, head][None], np.array([0]), np.array([2100]))
        for split in range(3):
            want = reference.split_state(
                rows.scored(k, 8**-0.5), v, rows.low, rows.high, 1024 * split
            )
            row = np.concatenate([want.m, want.L, want.a[0]])
            np.testing.assert_array_equal(
                bits(got[0, head, split]), bits(row), f"head {head}, split {split}"
            )


def test_a_split_that_no_row_sees_is_empty(batch: Batch) -> None:
    empty = np.zeros((len(batch.q), 4, 2, 10), F32)
    empty[..., 0] = -np.inf
    assert_same_bits(states(batch, 5, 2), empty)


def test_splits_of_others_are_not_looked_at(batch: Batch) -> None:
    """A table whose entries outside the split name no block: that of a machine with a part."""
    part = make_batch(1, LONG, block=48)
    per_split = np.arange(part.tables.shape[1])
    elsewhere = (per_split * 48 + 47 < 1024) | (per_split * 48 >= 2048)
    part.tables[:, elsewhere] = 0xFFFFFFFF
    assert_same_bits(states(part, 1, 1), states(batch, 1, 1))
    with pytest.raises(ValueError, match=r"paged_attention_states: .*block"):
        states(part, 0, 1)


def test_out_is_written_and_returned(batch: Batch) -> None:
    out = np.full((len(batch.q), 4, 2, 10), np.nan, F32)
    assert states(batch, 1, 2, out=out) is out
    assert_same_bits(out, states(batch, 1, 2))


def test_no_rows_have_no_states() -> None:
    batch = make_batch(4, [(0, 30), (0, 0)])
    got = states(batch, 0, 2)
    assert got.shape == (0, 4, 2, 10)
    out, lse = merge_states([(got, 0)], return_lse=True)
    assert (out.shape, lse.shape) == ((0, 4, 8), (0, 4))


# --- what is refused
# ----------------------------------------------------------------------------------------

BAD_STATES: list[tuple[str, tuple[Any, Any], dict[str, Any], type[Exception], str]] = [
    ("first below 0", (-1, 1), {}, ValueError, "first_split = -1"),
    ("no splits", (0, 0), {}, ValueError, "n_splits = 0"),
    ("past int64", (2**63 - 1, 1), {}, ValueError, "n_splits = 1 is outside"),
    ("fraction", (0.0, 1), {}, TypeError, "first_split must be an integer"),
    ("bool", (0, True), {}, TypeError, "n_splits must be an integer"),
    ("q_rows", (0, 1), {"cu_seqlens_q": [0, 1]}, ValueError, "cu_seqlens_q"),
    ("scale", (0, 1), {"scale": "1"}, TypeError, "scale must be a number"),
    ("nan scale", (0, 1), {"scale": float("nan")}, ValueError, "scale"),
    ("softcap", (0, 1), {"softcap": -1}, ValueError, "softcap"),
    ("window", (0, 1), {"window": 1.5}, TypeError, "window must be an integer"),
    ("slopes", (0, 1), {"alibi_slopes": SLOPES[:3]}, ValueError, "alibi_slopes has shape"),
    ("threads", (0, 1), {"threads": -1}, ValueError, "threads = -1"),
    ("out shape", (0, 1), {"out": np.empty((12, 4, 2, 10), F32)}, ValueError, "out has shape"),
    ("out dtype", (0, 1), {"out": np.empty((12, 4, 1, 10))}, TypeError, "out must be float32"),
    (
        "out strides",
        (0, 1),
        {"out": np.empty((12, 4, 1, 20), F32)[..., ::2]},
        ValueError,
        "C-contiguous",
    ),
]


@pytest.mark.parametrize(
    ("name", "splits", "changes", "error", "text"), BAD_STATES, ids=[case[0] for case in BAD_STATES]
)
def test_states_refuse(
    batch: Batch, name: str, splits: Any, changes: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=f"^paged_attention_states: .*{text}"):
        states(batch, *splits, **changes)


def test_states_refuse_an_out_that_overlaps_q() -> None:
    batch = make_batch(5, [(1, 9)], dims=(8, 6))
    memory = np.zeros((1, 4, 1, 8), F32)
    batch.q = memory[:, :, 0]
    with pytest.raises(ValueError, match=r"paged_attention_states: .*overlap"):
        states(batch, 0, 1, out=memory)


def test_states_refuse_other_types(batch: Batch) -> None:
    with pytest.raises(TypeError, match="paged_attention_states: kv must be a KVView"):
        paged_attention_states(batch.q, None, batch.tables, batch.ctx_lens, 0, 1)  # type: ignore[arg-type]
    view = KVView.from_arrays(batch.k, batch.v)
    with pytest.raises(TypeError, match="paged_attention_states: q must be real numbers"):
        paged_attention_states(batch.q.astype(bool), view, batch.tables, batch.ctx_lens, 0, 1)


def part(
    n_splits: int = 1, shape: tuple[int, ...] = (2, 4), width: int = 10
) -> NDArray[np.float32]:
    return np.zeros((*shape, n_splits, width), F32)


BAD_PARTS: list[tuple[str, Any, dict[str, Any], type[Exception], str]] = [
    ("none", [], {}, ValueError, "parts is empty"),
    ("no pair", [part()], {}, TypeError, r"parts\[0\] must be \(states, first_split\)"),
    ("no array", [({1.0}, 0)], {}, TypeError, r"parts\[0\]\[0\] must be an array"),
    (
        "dtype",
        [(part(), 0), (part().astype(complex), 1)],
        {},
        TypeError,
        r"parts\[1\]\[0\] must be real numbers, not complex",
    ),
    ("axes", [(part()[0], 0)], {}, ValueError, r"parts\[0\]\[0\] must have 4 axes"),
    ("heads", [(part(), 0), (part(shape=(2, 3)), 1)], {}, ValueError, r"parts\[1\]\[0\] has shape"),
    ("rows", [(part(), 0), (part(shape=(3, 4)), 1)], {}, ValueError, r"parts\[1\]\[0\] has shape"),
    ("widths", [(part(), 0), (part(width=11), 1)], {}, ValueError, r"parts\[1\]\[0\] has shape"),
    ("no values", [(part(width=2), 0)], {}, ValueError, r"parts\[0\]\[0\] has shape"),
    ("no splits", [(part(0), 0)], {}, ValueError, "n_splits|split"),
    ("fraction", [(part(), 0.0)], {}, TypeError, r"parts\[0\]\[1\] must be an integer"),
    ("negative", [(part(), -1)], {}, ValueError, r"parts\[0\]\[1\] = -1"),
    ("begins late", [(part(), 1)], {}, ValueError, "split"),
    ("overlap", [(part(2), 0), (part(), 1)], {}, ValueError, "split"),
    ("twice", [(part(), 0), (part(), 0)], {}, ValueError, "split"),
    ("gap", [(part(), 0), (part(), 2)], {}, ValueError, "split"),
    ("falling", [(part(), 1), (part(), 0)], {}, ValueError, "split"),
    (
        "sinks",
        [(part(), 0)],
        {"sink_logits": np.zeros(3, F32)},
        ValueError,
        "sink_logits has shape",
    ),
    (
        "sink type",
        [(part(), 0)],
        {"sink_logits": np.zeros(4, bool)},
        TypeError,
        "sink_logits must be real numbers, not bool",
    ),
    ("threads", [(part(), 0)], {"threads": "two"}, TypeError, "threads must be"),
]


@pytest.mark.parametrize(
    ("name", "parts", "options", "error", "text"), BAD_PARTS, ids=[case[0] for case in BAD_PARTS]
)
def test_merge_refuses(
    name: str, parts: Any, options: dict[str, Any], error: type[Exception], text: str
) -> None:
    with pytest.raises(error, match=f"^merge_states: .*({text})"):
        merge_states(parts, **options)


def test_what_is_not_contiguous_is_merged_all_the_same(batch: Batch) -> None:
    whole = states(batch, 0, N_SPLITS)
    padded = np.full((*whole.shape[:3], 17), np.nan, F32)
    padded[..., :10] = whole
    assert_same_bits(merge_states([(padded[..., :10], 0)]), batch.run()[0])


def test_a_closed_cache_is_said_so() -> None:
    with tinyllm.PagedKVCache(None, 4, 4, 1, 1, 8) as cache:
        cache.add_seq("a")
        cache.append("a", 0, *np.ones((2, 1, 3, 8), F32))
        view, tables = cache.view(0), [cache.block_table("a")]
    with pytest.raises(ClosedError):
        paged_attention_states(np.ones((1, 2, 8), F32), view, tables, [3], 0, 1)


def test_a_closed_pool_is_said_so(batch: Batch) -> None:
    pool = ThreadPool(2)
    pool.close()
    with pytest.raises(ClosedError):
        states(batch, 0, 1, threads=pool)
    with pytest.raises(ClosedError):
        merge_states([(part(), 0)], threads=pool)


# --- stretches, and parts of a table
# ---------------------------------------------------------------------------------------------

STRETCH, PER_STRETCH = 16384, 16


@pytest.fixture(scope="module")
def long() -> Batch:
    """Rows over two stretches and a little of a third."""
    return make_batch(3, [(2, 2 * STRETCH + 900), (1, STRETCH + 5), (1, 70)], block=64)


def test_states_of_stretches_and_of_splits_merge_to_the_bits_of_one_call(long: Batch) -> None:
    want_out, want_lse = long.run(sink_logits=SINKS[:4])
    whole = states(long, 0, 48, span=STRETCH)
    assert whole.shape == (*long.q.shape[:2], 3, 10)
    first, rest = states(long, 0, 16, span=STRETCH), states(long, 16, 17)
    for parts in (
        [(whole, 0, STRETCH)],
        [(states(long, 0, 33), 0, 1024)],
        [(first, 0, STRETCH), (rest, 16)],
        [(states(long, 0, 16), 0), (whole[:, :, 1:], 16, STRETCH)],
    ):
        out, lse = merge_states(parts, sink_logits=SINKS[:4], return_lse=True)
        assert_same_bits(out, want_out)
        assert_same_bits(lse, want_lse)


@pytest.mark.parametrize("span", [1024, STRETCH])
def test_who_holds_a_part_needs_no_table_but_its_own(long: Batch, span: int) -> None:
    view = KVView.from_arrays(long.k, long.v)
    held = slice(STRETCH // 64, 2 * STRETCH // 64)
    mine = paged_attention_states(
        long.q, view, long.tables[:, held], long.ctx_lens, 16, 16,
        cu_seqlens_q=long.starts, span=span, first_block=held.start,
    )  # fmt: skip
    assert_same_bits(mine, states(long, 16, 16, span=span))
    for tables, first_block in (
        (long.tables[:, held], held.start + 1),
        (long.tables[:, held][:, :-1], held.start),
    ):
        with pytest.raises(ValueError, match=r"^paged_attention_states: "):
            paged_attention_states(
                long.q, view, tables, long.ctx_lens, 16, 16,
                cu_seqlens_q=long.starts, span=span, first_block=first_block,
            )  # fmt: skip


@pytest.mark.parametrize(
    ("first", "n", "options", "says"),
    [
        (0, 16, {"span": 2048}, "span must be 1024 or 16384, not 2048"),
        (0, 16, {"span": 0}, "span must be 1024 or 16384, not 0"),
        (0, 15, {"span": STRETCH}, "first_split = 0 and n_splits = 15 must be multiples of 16"),
        (8, 16, {"span": STRETCH}, "first_split = 8 and n_splits = 16 must be multiples of 16"),
        (0, 16, {"first_block": -1}, "first_block = -1"),
    ],
)
def test_spans_and_first_blocks_that_there_are_not(
    long: Batch, first: int, n: int, options: dict[str, int], says: str
) -> None:
    with pytest.raises(ValueError, match=f"^paged_attention_states: {says}"):
        states(long, first, n, **options)


def test_parts_of_stretches_begin_and_end_at_stretches() -> None:
    with pytest.raises(ValueError, match=r"parts\[0\]\[2\] must be 1024 or 16384, not 7"):
        merge_states([(part(), 0, 7)])
    for parts in ([(part(15), 0), (part(), 15, STRETCH)], [(part(), 0, STRETCH), (part(), 1)]):
        with pytest.raises(ValueError, match=r"^merge_states: "):
            merge_states(parts)
