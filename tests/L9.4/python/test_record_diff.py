# SPDX-License-Identifier: MIT
"""diff: a bit planted anywhere is found exactly there; what no bit depends on is no difference."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinyllm
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from test_paged_attention import Batch, make_batch
from tinyllm import record
from tinyllm._observers import observing
from tinyllm._paged_call import PagedCall
from tinyllm.cli import main
from tinyllm.ffi.libtinyllm import Lib
from tinyllm.observe.calls.diff import Diff, Finding, Value, ulps

F32 = np.float32
LENGTHS = [(1, 2100), (3, 1024), (2, 1026), (0, 40), (1, 7)]
ROWS = [0, 1, 1, 1, 2, 2, 4]  # whose each row is
UNSIGNED = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16}

no_deadline = settings(
    deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture(autouse=True)
def _library(lib: Lib) -> None:
    """Says so once where the library is not built."""


def new_batch(dtype: str = "float16", **options: Any) -> Batch:
    return make_batch(1, LENGTHS, block=48, dims=(8, 6), dtype=dtype, **options)


def write(path: Path, *batches: Batch, keep_kv: bool = False, **changes: Any) -> Path:
    with record(path, keep_kv=keep_kv):
        for batch in batches:
            batch.run(**changes)
    return path


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, lib: Lib) -> Path:
    return write(tmp_path_factory.mktemp("diff") / "good", *[new_batch()] * 3, keep_kv=True)


def flipped(a: NDArray[Any], at: tuple[int, ...], bit: int) -> tuple[str, str]:
    """Flips one bit of one element; its bits before and after."""
    codes = a.view(f"u{a.itemsize}")
    texts = [f"0x{int(codes[at]):0{2 * a.itemsize}x}"]
    codes[at] ^= codes.dtype.type(1 << bit)
    return texts[0], f"0x{int(codes[at]):0{2 * a.itemsize}x}"


def only(found: Diff, part: str) -> Finding:
    own = [finding for finding in found.findings if finding.part == part]
    assert len(own) == 1, own
    return own[0]


def places(shape: tuple[int, ...]) -> st.SearchStrategy[tuple[int, ...]]:
    return st.tuples(*(st.integers(0, n - 1) for n in shape))


# --- a planted bit --------------------------------------------------------------------------------


@no_deadline
@given(at=places((7, 4, 8)), bit=st.integers(0, 31))
def test_a_bit_of_q(good: Path, tmp_path: Path, at: tuple[int, int, int], bit: int) -> None:
    batch = new_batch()
    values = flipped(batch.q, at, bit)
    found = tinyllm.diff(good, write(tmp_path / "b", new_batch(), batch, new_batch()))
    assert {finding.call for finding in found.findings} == {1}
    q = only(found, "input")
    row, head, element = at
    position = LENGTHS[ROWS[row]][1] - (sum(s == ROWS[row] for s in ROWS[row + 1 :])) - 1
    assert (q.what, q.n, q.total, (q.a.bits, q.b.bits)) == ("q", 1, 224, values)
    where = {
        "sequence": ROWS[row],
        "row": row,
        "position": position,
        "head": head,
        "element": element,
    }
    assert q.where == where
    assert not found.facts
    for result in found.findings[1:]:  # only the row and head that saw it can differ
        assert (result.part, result.where["row"], result.where["head"]) == ("result", row, head)


@no_deadline
@given(
    data=st.data(), dtype=st.sampled_from(["float32", "float16", "bfloat16"]), kept=st.booleans()
)
def test_a_bit_of_k_or_v(tmp_path: Path, data: Any, dtype: str, kept: bool) -> None:
    batch = new_batch(dtype)
    a = write(tmp_path / "a", batch, keep_kv=kept)
    side = data.draw(st.sampled_from("KV"))
    s = data.draw(st.sampled_from([0, 1, 2, 4]))
    position = data.draw(st.integers(0, LENGTHS[s][1] - 1))
    stored = batch.k if side == "K" else batch.v
    kv_head, element = data.draw(places((2, stored.shape[3])))
    at = (int(batch.tables[s, position // 48]), kv_head, position % 48, element)
    bit = data.draw(st.integers(0, 8 * stored.itemsize - 1))
    values = flipped(stored, at, bit)
    found = only(tinyllm.diff(a, write(tmp_path / "b", batch, keep_kv=True)), "input")
    split, end = position // 1024, LENGTHS[s][1]
    where = {
        "sequence": s,
        "split": split,
        "positions": [1024 * split, min(1024 * split + 1024, end) - 1],
    }
    if kept:
        where |= {"position": position, "kv_head": kv_head, "element": element}
        assert (found.a.bits, found.b.bits) == values
    else:
        assert found.a.text.startswith("sha256 ") and found.a != found.b
    assert (found.what, found.n, found.total, found.where) == (side, 1, 7, where)


class Planter:
    """Flips a bit of what a call gives, before those who watch within see it."""

    def __init__(self, flip: Callable[[PagedCall], object]) -> None:
        self.flip = flip

    def before(self, call: PagedCall) -> None: ...

    def after(self, call: PagedCall) -> None:
        self.flip(call)


@no_deadline
@given(at=places((7, 4, 6)), bit=st.integers(0, 31))
def test_a_bit_of_out(good: Path, tmp_path: Path, at: tuple[int, int, int], bit: int) -> None:
    with observing(Planter(lambda call: flipped(call.out, at, bit))):  # type: ignore[arg-type]
        found = tinyllm.diff(good, write(tmp_path / "b", *[new_batch()] * 3))
    assert [(f.call, f.part, f.what, f.n) for f in found.findings] == [
        (i, "result", "out", 1) for i in range(3)
    ]
    where = found.findings[0].where
    assert (where["row"], where["head"], where["element"]) == at
    assert where["sequence"] == ROWS[at[0]]
    assert list(found.facts) == [0, 1, 2]


@no_deadline
@given(at=places((7, 4)), bit=st.integers(0, 31))
def test_a_bit_of_lse(good: Path, tmp_path: Path, at: tuple[int, int], bit: int) -> None:
    with observing(Planter(lambda call: flipped(call.lse, at, bit))):  # type: ignore[arg-type]
        found = tinyllm.diff(good, write(tmp_path / "b", *[new_batch()] * 3)).findings[0]
    assert (found.what, found.where["row"], found.where["head"], found.n) == ("lse", *at, 1)


@contextmanager
def planted_in_states(where: set[tuple[int, int, int]], element: int) -> Iterator[None]:
    """Flips the lowest bit of an element of the states of some (row, head, split)."""
    genuine = PagedCall.states

    def states(self: PagedCall, first: int, n: int, out: NDArray[np.float32]) -> None:
        genuine(self, first, n, out)
        for row, head, split in where:
            if first <= split < first + n:
                flipped(out, (row, head, split - first, element), 0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(PagedCall, "states", states)
        yield


SEEN = [
    (row, split) for row, s in enumerate(ROWS) for split in range(1 + (LENGTHS[s][1] - 1) // 1024)
]


@no_deadline
@given(
    where=st.sets(st.tuples(st.sampled_from(SEEN), st.integers(0, 3)), min_size=1, max_size=4),
    element=st.integers(0, 7),
)
@example(where={((0, 1), 0), ((0, 0), 1)}, element=3)  # head by head, not split by split
def test_a_bit_of_the_states(good: Path, tmp_path: Path, where: Any, element: int) -> None:
    """Of several the first by sequence, row, head and split."""
    places = {(row, head, split) for (row, split), head in where}
    with planted_in_states(places, element):
        found = tinyllm.diff(good, write(tmp_path / "b", *[new_batch()] * 3)).findings[0]
    row, head, split = min(places)
    assert (found.call, found.part, found.what, found.n) == (0, "result", "states", len(places))
    of = (
        {"of": "m"}
        if element == 0
        else {"of": "L"}
        if element == 1
        else {"of": "values", "element": element - 2}
    )
    position = found.where["position"]
    assert found.where == {
        "sequence": ROWS[row], "row": row, "position": position, "head": head, "split": split, **of
    }  # fmt: skip
    assert found.ulps == 1


# --- options and shapes ---------------------------------------------------------------------------

SLOPES, ZEROS = np.array([0.5, 2.0**-8, 0, -0.3], F32), np.zeros(4, F32)


@pytest.mark.parametrize(
    ("a", "b", "what", "where", "texts"),
    [
        ({"scale": 0.25}, {"scale": 0.5}, "scale", {}, ("0.25", "0.5")),
        ({"softcap": 3.0}, {}, "softcap", {}, ("3.0", "0.0")),
        ({"window": 2}, {"window": -1}, "window", {}, ("2", "None")),
        ({"alibi_slopes": SLOPES}, {}, "alibi_slopes", {}, ("given", "none")),
        ({"sink_logits": SLOPES}, {"sink_logits": SLOPES[::-1]}, "sink_logits", {"head": 0},
         ("0.5", "-0.3")),
        ({"sink_logits": ZEROS}, {"sink_logits": -ZEROS}, "sink_logits", {"head": 0},
         ("0.0", "-0.0")),
    ],
)  # fmt: skip
def test_an_option(tmp_path: Path, a: Any, b: Any, what: str, where: Any, texts: Any) -> None:
    pair = [{k: np.array(v, F32) if np.ndim(v) else v for k, v in side.items()} for side in (a, b)]
    paths = [write(tmp_path / str(i), new_batch(**side)) for i, side in enumerate(pair)]
    found = only(tinyllm.diff(*paths), "input")
    assert (found.what, found.where, (found.a.text, found.b.text)) == (what, where, texts)


def test_no_window_is_no_window(tmp_path: Path) -> None:
    paths = [write(tmp_path / str(w), new_batch(window=w)) for w in (0, -5)]
    assert tinyllm.diff(*paths).equal


@pytest.mark.parametrize(
    ("change", "what", "texts"),
    [
        ({"dtype": "bfloat16"}, "K and V type", ("float16", "bfloat16")),
        ({"n_kv": 4, "group": 1}, "KV heads", ("2", "4")),
        ({"group": 3}, "query heads", ("4", "6")),
        ({"dims": (8, 7)}, "head dims of K and V", ("(8, 6)", "(8, 7)")),
        ({"lengths": LENGTHS[:2]}, "sequences", ("5", "2")),
        ({"lengths": [*LENGTHS[:3], (0, 41), LENGTHS[4]]}, "context length", ("40", "41")),
        ({"lengths": [*LENGTHS[:3], (1, 40), LENGTHS[4]]}, "rows of a sequence", ("0", "1")),
    ],
)
def test_a_shape(tmp_path: Path, change: dict[str, Any], what: str, texts: Any) -> None:
    base: dict[str, Any] = {"lengths": LENGTHS, "dims": (8, 6), "dtype": "float16"}
    paths = [
        write(tmp_path / str(i), make_batch(1, **given))
        for i, given in enumerate((base, base | change))
    ]
    found = tinyllm.diff(*paths)
    assert [(f.part, f.what, (f.a.text, f.b.text)) for f in found.findings] == [
        ("shape", what, texts)
    ]
    assert not found.facts
    assert "not compared" in str(found)


def test_a_call_that_is_missing(good: Path, tmp_path: Path) -> None:
    found = tinyllm.diff(good, write(tmp_path / "b", new_batch()))
    assert (found.equal, found.findings, found.compared) == (False, (), 1)
    assert "a has 3 calls, b has 1; 1 call compared." in str(found)


# --- what no bit depends on -----------------------------------------------------------------------


def test_threads_blocks_and_kept_bytes_are_no_difference(good: Path, tmp_path: Path) -> None:
    other = make_batch(1, LENGTHS, block=48, dims=(8, 6))
    order = np.random.default_rng(0).permutation(len(other.k))
    moved = np.argsort(order).astype(np.uint32)
    other.tables = np.where(
        other.tables < len(moved), moved[np.minimum(other.tables, len(moved) - 1)], 77
    )
    other.k, other.v = other.k[order], other.v[order]
    for threads in (None, 2, 3):
        found = tinyllm.diff(good, write(tmp_path / "b", *[other] * 3, threads=threads))
        assert found.equal and not found.findings, str(found)
        assert "Equal, bit for bit: inputs and results of 3 calls." in str(found)


PROGRAM = """
import sys
import numpy as np
import tinyllm
rng = np.random.default_rng(0)
with tinyllm.PagedKVCache(None, 200, 16, 1, 2, 64) as cache, tinyllm.record(sys.argv[1]):
    for name, n in (("a", 1500), ("b", 100)):
        cache.add_seq(name)
        cache.append(name, 0, *rng.standard_normal((2, 2, n, 64), np.float32))
    for _ in range(3):
        q = rng.standard_normal((2, 8, 64), np.float32)
        tinyllm.paged_attention_decode(q, cache, ["a", "b"], 0)
"""


def test_instruction_sets_are_no_difference(run_silently: Any, lib: Lib, tmp_path: Path) -> None:
    names = lib.tl_isa_names().decode().split()
    paths = [tmp_path / name for name in names]
    for name, path in zip(names, paths, strict=True):
        run_silently(PROGRAM.replace("sys.argv[1]", repr(str(path))), TINYLLM_ISA=name)
    for path in paths:
        found = tinyllm.diff(paths[0], path)
        assert found.equal, str(found)
        assert (found.b.facts["isa"], found.compared) == (path.name, 3)


def test_same_inputs_and_other_bits_name_what_is_not_the_same(good: Path, tmp_path: Path) -> None:
    with observing(Planter(lambda call: flipped(call.out, (0, 0, 0), 3))):  # type: ignore[arg-type]
        found = tinyllm.diff(good, write(tmp_path / "b", *[new_batch()] * 3, threads=2))
        unchanged = tinyllm.diff(good, write(tmp_path / "c", *[new_batch()] * 3))
    assert found.facts == {i: {"threads": (1, 2)} for i in range(3)}
    assert "Call 0: same inputs, other bits." in str(found)
    assert "threads  1 | 2" in str(found)
    assert "are K and V written during the call?" in str(unchanged)


# --- floats ---------------------------------------------------------------------------------------


def code(x: float) -> int:
    return int(F32(x).view(np.uint32))


@pytest.mark.parametrize(
    ("a", "b", "steps"),
    [
        (code(1), code(1), 0),
        (code(1), code(1) + 1, 1),
        (code(0.0), code(-0.0), 1),
        (code(1e-45), code(-1e-45), 3),
        (0, 1, 1),
        (0x80000000, 0x80000001, 1),
        (code(3.4028235e38), code(np.inf), 1),
        (code(np.inf), 0x7F800001, 1),
        (0x7FC00000, 0x7FC00003, 3),
        (0x7FFFFFFF, 0xFFFFFFFF, 2**32 - 1),
        (code(1), code(-1), 2 * code(1) + 1),
    ],
)
def test_ulps(a: int, b: int, steps: int) -> None:
    for pair in ((a, b), (b, a)):
        assert ulps(*np.array(pair, np.uint32)) == steps


@given(st.floats(width=16), st.floats(width=16))
def test_ulps_count_the_floats_between(x: float, y: float) -> None:
    """Of float16 there are few enough to count."""
    every = np.arange(2**16, dtype=np.uint16)
    order = every[
        np.argsort(np.where(every < 0x8000, every, 0x7FFF - every.astype(int)), kind="stable")
    ]
    values = order.view(np.float16)
    finite = values[~np.isnan(values)]
    assert (
        np.diff(finite.astype(float)[np.isfinite(finite)]) >= 0
    ).all()  # the order is that of the values
    a, b = np.array([x, y], np.float16).view(np.uint16)
    distance = int(np.flatnonzero(order == a)[0]) - int(np.flatnonzero(order == b)[0])
    assert ulps(a, b) == abs(distance)


@pytest.mark.parametrize(
    ("bits", "dtype", "value"),
    [
        (0x3F800001, "float32", Value("1.0000001", "0x3f800001")),
        (0x80000000, "float32", Value("-0.0", "0x80000000")),
        (0x3C01, "float16", Value("1.001", "0x3c01")),
        (0x3F81, "bfloat16", Value("1.0078125", "0x3f81")),
        (0x7FC1, "bfloat16", Value("nan", "0x7fc1")),
    ],
)
def test_values_are_shown_exactly(bits: int, dtype: str, value: Value) -> None:
    assert Value.of(UNSIGNED[dtype](bits), dtype) == value


@pytest.mark.parametrize(
    ("a", "b", "text"),
    [
        (0x7FC00000, 0x7FC00001, "two NaNs with different bits"),
        (0x7FC00000, 0x3F800000, "one of them is NaN"),
        (0x00000000, 0x80000000, "1 ulp apart"),
    ],
)
def test_nans_and_zeros_differ_by_their_bits(tmp_path: Path, a: int, b: int, text: str) -> None:
    paths = []
    for i, bits in enumerate((a, b)):
        batch = new_batch()
        batch.q.view(np.uint32)[2, 1, 3] = bits
        paths.append(write(tmp_path / str(i), batch))
    found = tinyllm.diff(*paths)
    assert only(found, "input").where["element"] == 3
    assert text in str(found)


# --- the command ----------------------------------------------------------------------------------


def test_the_command_says_equal_with_0(good: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diff", str(good), str(good)]) == 0
    assert "Equal, bit for bit" in capsys.readouterr().out


def test_the_command_says_different_with_1(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    batch = new_batch()
    flipped(batch.q, (4, 2, 5), 0)
    other = write(tmp_path / "b", new_batch(), batch, batch)
    assert main(["diff", str(good), str(other)]) == 1
    brief = capsys.readouterr().out
    assert "call 0: the same inputs, the same bits" in brief
    assert "sequence 2, row 4 (position 1024), head 2, element 5" in brief
    assert "call 2 differs too" in brief
    assert main(["diff", str(good), str(other), "--all"]) == 1
    assert (
        capsys.readouterr().out.count("sequence 2, row 4 (position 1024), head 2, element 5") == 2
    )
    assert main(["diff", str(good), str(other), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert (found["equal"], found["compared"], found["findings"][0]["call"]) == (False, 3, 1)
    assert found["findings"][0]["ulps"] == 1


def test_the_command_says_bad_input_with_2(
    good: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "garbage").write_bytes(b"PK\x03\x04 and more")
    for path in (tmp_path / "garbage", tmp_path / "missing", tmp_path):
        assert main(["diff", str(good), str(path)]) == 2
        output = capsys.readouterr()
        assert output.out == ""
        assert output.err.startswith("tinyllm diff: ") and str(path) in output.err
        assert output.err.count("\n") == 1


def test_the_command_runs_as_a_module(good: Path, root: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tinyllm", "diff", str(good), str(good), "--json"],
        env={"PYTHONPATH": str(root / "python")}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["equal"] is True


@example(name="a")
@given(name=st.sampled_from("ab"))
def test_diff_refuses_what_is_no_path(good: Path, name: str) -> None:
    with pytest.raises(TypeError):
        tinyllm.diff(**{"a": good, "b": good, name: 5})


def test_diff_takes_recordings_and_leaves_them_open(good: Path) -> None:
    with tinyllm.Recording.load(good) as run:
        assert tinyllm.diff(run, good).equal
        assert run[0].index == 0


def test_many_calls_are_named_in_runs(tmp_path: Path) -> None:
    small = [make_batch(9, [(1, 3)]) for _ in range(6)]
    a = write(tmp_path / "a", *small)
    for i in (1, 3, 4):
        small[i].q[0, 0, 0] = 5
    text = str(tinyllm.diff(a, write(tmp_path / "b", *small)))
    assert "calls 0, 2 and 5: the same inputs, the same bits" in text
    assert "calls 3 and 4 differ too" in text
