# SPDX-License-Identifier: MIT
"""record: what is in the file is what the calls were given and gave; when and how the file appears;
which calls are recorded; what bytes that are no record do."""

from __future__ import annotations

import contextvars
import hashlib
import io
import json
import os
import threading
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinyllm
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from test_paged_attention import Batch, assert_same_bits, bits, make_batch
from tinyllm import (
    PagedKVCache,
    Recording,
    merge_states,
    paged_attention,
    paged_attention_decode,
    record,
)
from tinyllm.ffi.libtinyllm import Lib

F32 = np.float32
LENGTHS = [(1, 2500), (3, 1024), (2, 1026), (0, 40), (1, 7)]
SLOPES = np.array([0.5, 2.0**-8, 0, -0.3], F32)
SINKS = np.array([0.5, -np.inf, 3, 1], F32)


@pytest.fixture(autouse=True)
def _library(lib: Lib) -> None:
    """Says so once where the library is not built."""


@pytest.fixture(scope="module")
def batch() -> Batch:
    return make_batch(
        1,
        LENGTHS,
        block=48,
        dims=(8, 6),
        window=1500,
        softcap=4.0,
        alibi_slopes=SLOPES,
        sink_logits=SINKS,
    )


def recorded(path: Path, batch: Batch, **options: Any) -> Recording:
    with record(path, **options):
        batch.run(threads=2)
    return Recording.load(path)


def seen(batch: Batch, s: int) -> range:
    """The positions that some row of a sequence sees."""
    rows, ctx = int(batch.starts[s + 1] - batch.starts[s]), int(batch.ctx_lens[s])
    return range(max(0, ctx - rows + 1 - batch.options["window"]), ctx) if rows else range(0)


def of_split(positions: range, split: int) -> list[int]:
    return [p for p in positions if p // 1024 == split]


def held(batch: Batch, a: NDArray[Any], s: int, positions: list[int]) -> NDArray[Any]:
    """K or V of a sequence [positions, Hkv, D], one by one."""
    b = a.shape[2]
    return np.stack([a[batch.tables[s, p // b], :, p % b] for p in positions])


# --- what is in it --------------------------------------------------------------------------------


def test_arrays_and_options_are_those_of_the_call(batch: Batch, tmp_path: Path) -> None:
    out, lse = batch.run()
    with recorded(tmp_path / "r", batch) as run:
        assert len(run) == 1
        call = run[0]
    assert_same_bits(call.q, batch.q)
    assert_same_bits(call.out, out)
    assert_same_bits(call.lse, lse)
    assert_same_bits(call.alibi_slopes, SLOPES)
    assert_same_bits(call.sink_logits, SINKS)
    np.testing.assert_array_equal(call.ctx_lens, batch.ctx_lens)
    np.testing.assert_array_equal(call.cu_seqlens_q, batch.starts)
    np.testing.assert_array_equal(call.block_tables, batch.tables)
    assert (call.window, call.softcap, call.scale) == (1500, 4.0, float(F32(8**-0.5)))
    assert (call.fn, call.dtype, call.block_tokens, call.n_kv_heads) == (
        "paged_attention",
        "float16",
        48,
        2,
    )
    assert call.head_dims == (8, 6)


def test_facts_name_library_and_threads(batch: Batch, tmp_path: Path, lib: Lib) -> None:
    with recorded(tmp_path / "r", batch) as run:
        assert run[0].facts == {
            "version": tinyllm.__version__,
            "numerics": lib.tl_numerics_version(),
            "isa": lib.tl_isa_name().decode(),
            "threads": 2,
            "library": str(lib.path),
        }


def test_states_are_of_every_row_and_split_and_merge_to_out(batch: Batch, tmp_path: Path) -> None:
    with recorded(tmp_path / "r", batch) as run:
        call = run[0]
    rows, splits = call.state_index()
    expected = [
        (row, split)
        for s in range(len(LENGTHS))
        for row in range(batch.starts[s], batch.starts[s + 1])
        for position in [batch.ctx_lens[s] - batch.starts[s + 1] + row]
        for split in range(3)
        if of_split(range(max(0, position + 1 - 1500), position + 1), split)
    ]
    assert list(zip(rows.tolist(), splits.tolist(), strict=True)) == expected
    full = np.zeros((len(batch.q), 4, 3, 8), F32)
    full[..., 0] = -np.inf
    full[rows, :, splits] = call.states
    assert_same_bits(merge_states([(full, 0)], sink_logits=SINKS), call.out)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32"])
def test_digests_and_bytes_are_those_of_what_the_rows_see(dtype: str, tmp_path: Path) -> None:
    batch = make_batch(2, LENGTHS, block=48, dims=(8, 6), dtype=dtype, window=1500)
    pieces = [
        (s, split)
        for s in range(len(LENGTHS))
        for split in range(3)
        if of_split(seen(batch, s), split)
    ]
    with recorded(tmp_path / "r", batch, keep_kv=True) as run:
        call = run[0]
        sequences, splits = call.piece_index()
        assert list(zip(sequences.tolist(), splits.tolist(), strict=True)) == pieces
        for i, (s, split) in enumerate(pieces):
            positions = of_split(seen(batch, s), split)
            assert call.piece_span(i) == (positions[0], positions[-1] + 1)
            kept = run.kv(call, i)
            assert kept is not None
            for side, a in enumerate((batch.k, batch.v)):
                wanted = held(batch, a, s, positions)
                assert call.digests[i, side].tobytes() == hashlib.sha256(wanted.tobytes()).digest()
                assert kept[side].tobytes() == wanted.tobytes()
                assert kept[side].shape == wanted.shape


def test_without_keep_kv_no_bytes_of_k_and_v_are_kept(batch: Batch, tmp_path: Path) -> None:
    with recorded(tmp_path / "r", batch) as run:
        assert run.kv(run[0], 0) is None
    assert not [
        name for name in zipfile.ZipFile(tmp_path / "r").namelist() if name.startswith("kv")
    ]


def test_the_same_content_is_kept_once(batch: Batch, tmp_path: Path) -> None:
    with record(tmp_path / "once", keep_kv=True):
        batch.run()
    with record(tmp_path / "twice", keep_kv=True):
        batch.run()
        batch.run()
    names = [zipfile.ZipFile(tmp_path / name).namelist() for name in ("once", "twice")]
    assert [n for n in names[0] if n.startswith("kv")] == [
        n for n in names[1] if n.startswith("kv")
    ]


def test_layout_reaches_no_digest(tmp_path: Path) -> None:
    """A view by other strides, of blocks in another order, holds the same K and V."""
    batch = make_batch(3, [(2, 50), (1, 9)], block=4)
    order = np.random.default_rng(0).permutation(len(batch.k))
    moved = np.argsort(order).astype(np.uint32)
    tables = np.where(
        batch.tables < len(moved), moved[np.minimum(batch.tables, len(moved) - 1)], batch.tables
    )
    nhd = [np.ascontiguousarray(a[order].transpose(0, 2, 1, 3)) for a in (batch.k, batch.v)]
    view = tinyllm.KVView.from_arrays(*nhd, layout="NHD")
    with record(tmp_path / "r"):
        batch.run()
        paged_attention(batch.q, view, tables, batch.ctx_lens, cu_seqlens_q=batch.starts)
    with Recording.load(tmp_path / "r") as run:
        np.testing.assert_array_equal(run[0].digests, run[1].digests)
        assert run[1].lse is None


def test_a_shared_block_seen_to_another_length_has_a_digest_of_its_own(tmp_path: Path) -> None:
    batch = make_batch(6, [(1, 12)], block=16)
    view, table = tinyllm.KVView.from_arrays(batch.k, batch.v), batch.tables[0]
    with record(tmp_path / "r"):
        paged_attention(np.repeat(batch.q, 3, axis=0), view, [table] * 3, [12, 9, 12])
    with Recording.load(tmp_path / "r") as run:
        digests = run[0].digests
    for i, n in enumerate((12, 9, 12)):
        for side, a in enumerate((batch.k, batch.v)):
            wanted = held(batch, a, 0, list(range(n)))
            assert digests[i, side].tobytes() == hashlib.sha256(wanted.tobytes()).digest()


def test_the_same_calls_give_the_same_file(batch: Batch, tmp_path: Path) -> None:
    for name in ("a", "b"):
        recorded(tmp_path / name, batch, keep_kv=True).close()
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_numpy_opens_it(batch: Batch, tmp_path: Path) -> None:
    recorded(tmp_path / "r", batch).close()
    with np.load(tmp_path / "r", allow_pickle=False) as file:
        assert_same_bits(file["calls/0/q"], batch.q)
        assert json.loads(file["record.json"])["format"] == "tinyllm record"


def test_nobody_and_nothing_are_recorded_too(tmp_path: Path) -> None:
    batch = make_batch(4, [(0, 0), (0, 5)])
    with record(tmp_path / "r"):
        batch.run()
        paged_attention(batch.q, tinyllm.KVView.from_arrays(batch.k, batch.v), batch.tables[:0], [])
    with Recording.load(tmp_path / "r") as run:
        assert [(call.states.shape, call.digests.shape) for call in run] == [
            ((0, 4, 10), (0, 2, 32))
        ] * 2


# --- decode ---------------------------------------------------------------------------------------


def small_cache() -> PagedKVCache:
    cache = PagedKVCache(None, 300, 16, 2, 2, 16)
    rng = np.random.default_rng(7)
    for name, n in (("a", 1100), ("b", 30)):
        cache.add_seq(name)
        for layer in range(2):
            cache.append(name, layer, *rng.standard_normal((2, 2, n, 16), F32))
    return cache


def test_decode_is_recorded_with_the_bits_it_has_unwatched(tmp_path: Path) -> None:
    q = np.random.default_rng(8).standard_normal((2, 4, 16), F32)
    with small_cache() as cache:
        for options in ({}, {"window": 20}, {"scale": 0.1}):
            unwatched = paged_attention_decode(q, cache, ["b", "a"], 1, **options)
            out = np.empty_like(q)
            with record(tmp_path / "r") as recorder:
                assert (
                    paged_attention_decode(q, cache, ["b", "a"], 1, out=out, threads=2, **options)
                    is out
                )
                assert recorder.n_calls == 1
            assert_same_bits(out, unwatched)
            with Recording.load(tmp_path / "r") as run:
                call = run[0]
            assert call.fn == "paged_attention_decode"
            assert_same_bits(call.out, unwatched)
            np.testing.assert_array_equal(call.ctx_lens, [30, 1100])


def test_decode_refuses_the_same_when_watched(tmp_path: Path) -> None:
    q = np.zeros((1, 4, 16), F32)
    with small_cache() as cache, record(tmp_path / "r") as recorder:
        with pytest.raises(KeyError, match="no sequence 'c'"):
            paged_attention_decode(q, cache, ["c"], 0)
        with pytest.raises(ValueError, match=r"paged_attention_decode: layer"):
            paged_attention_decode(q, cache, ["a"], 2)
        with pytest.raises(ValueError, match=r"paged_attention_decode: out overlaps q"):
            paged_attention_decode(q, cache, ["a"], 0, out=q)
        assert paged_attention_decode(q[:0], cache, [], 0).shape == (0, 4, 16)
        assert recorder.n_calls == 0


# --- when the file is there -----------------------------------------------------------------------


def test_the_file_appears_at_the_end_and_replaces_another(batch: Batch, tmp_path: Path) -> None:
    path = tmp_path / "r"
    path.write_text("before")
    with record(path) as recorder:
        batch.run()
        assert (recorder.path, recorder.n_calls, path.read_text()) == (path, 1, "before")
    assert os.listdir(tmp_path) == ["r"]
    with Recording.load(path) as run:
        assert len(run) == 1


def test_an_exception_goes_on_and_what_was_recorded_is_kept(batch: Batch, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), record(tmp_path / "r"):  # noqa: PT012
        batch.run()
        raise KeyboardInterrupt
    assert os.listdir(tmp_path) == ["r"]
    with Recording.load(tmp_path / "r") as run:
        assert_same_bits(run[0].q, batch.q)


def test_a_call_that_fails_is_not_recorded(batch: Batch, tmp_path: Path) -> None:
    with record(tmp_path / "r") as recorder:
        with pytest.raises(ValueError, match="scale"):
            batch.run(scale=float("nan"))
        assert recorder.n_calls == 0
        batch.run()
    with Recording.load(tmp_path / "r") as run:
        assert len(run) == 1


def test_a_file_that_cannot_be_finished_leaves_nothing(
    batch: Batch, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"), record(tmp_path / "r"):  # noqa: PT012
        batch.run()
        monkeypatch.setattr(zipfile.ZipFile, "writestr", full)
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize(
    ("path", "keep_kv", "error", "text"),
    [
        (5, False, TypeError, "path|PathLike"),
        ("r", "yes", TypeError, "record: keep_kv must be True or False"),
        ("r", 1, TypeError, "record: keep_kv must be True or False"),
        (".", False, IsADirectoryError, "is a directory"),
        ("missing/r", False, FileNotFoundError, "missing"),
    ],
)
def test_record_refuses(
    tmp_path: Path,
    path: Any,
    keep_kv: Any,
    error: type[Exception],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=text), record(path, keep_kv=keep_kv):
        pytest.fail("the block was entered")
    assert os.listdir(tmp_path) == []


# --- whose calls ----------------------------------------------------------------------------------


def test_nested_records_record_both(batch: Batch, tmp_path: Path) -> None:
    with record(tmp_path / "outer"):
        batch.run()
        with record(tmp_path / "inner"):
            batch.run()
        batch.run()
    counts = [len(Recording.load(tmp_path / name)) for name in ("outer", "inner")]
    assert counts == [3, 1]


def test_only_the_own_context_is_recorded(batch: Batch, tmp_path: Path) -> None:
    def in_a_thread(run: Any) -> None:
        thread = threading.Thread(target=run)
        thread.start()
        thread.join()

    empty = contextvars.Context()
    with record(tmp_path / "r") as recorder:
        in_a_thread(lambda: empty.run(batch.run))
        assert recorder.n_calls == 0
        context = contextvars.copy_context()
        in_a_thread(lambda: context.run(batch.run))
        assert recorder.n_calls == 1
    context.run(batch.run)  # the block is over for those who inherited it, too
    with Recording.load(tmp_path / "r") as run:
        assert len(run) == 1


def test_calls_of_several_threads_are_recorded_whole(batch: Batch, tmp_path: Path) -> None:
    with record(tmp_path / "r"):
        contexts = [contextvars.copy_context() for _ in range(8)]
        threads = [threading.Thread(target=context.run, args=(batch.run,)) for context in contexts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    with Recording.load(tmp_path / "r") as run:
        assert len(run) == 8
        assert all(bits(call.out).tobytes() == bits(run[0].out).tobytes() for call in run)


# --- bytes that are no record ---------------------------------------------------------------------


def read_whole(path: Path) -> int:
    with Recording.load(path) as run:
        for call in run:
            for piece in range(len(call.digests)):
                run.kv(call, piece)
        return len(run)


@pytest.fixture(scope="module")
def small_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("record") / "r"
    recorded(path, make_batch(5, [(2, 9), (1, 3)], sink_logits=SINKS), keep_kv=True).close()
    return path.read_bytes()


@settings(
    deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_damage_is_a_value_error_or_changes_nothing(
    small_file: bytes, tmp_path: Path, data: Any
) -> None:
    """Damage of what the file says never passes: members carry checksums."""
    content = bytearray(small_file)
    kind = data.draw(st.sampled_from(["flip", "cut", "insert", "zero"]))
    at = data.draw(st.integers(0, len(content) - 1))
    if kind == "flip":
        content[at] ^= 1 << data.draw(st.integers(0, 7))
    elif kind == "cut":
        del content[at:]
    elif kind == "insert":
        content[at:at] = data.draw(st.binary(min_size=1, max_size=30))
    else:
        content[at : at + 40] = bytes(len(content[at : at + 40]))
    path = tmp_path / "damaged"
    path.write_bytes(content)
    whole = tmp_path / "whole"
    whole.write_bytes(small_file)
    try:
        read_whole(path)
    except ValueError as error:
        assert str(path) in str(error)  # noqa: PT017
    else:
        assert tinyllm.diff(path, whole).equal


@given(content=st.binary(max_size=300))
def test_garbage_is_a_value_error(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "garbage"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"garbage: no record of tinyllm's, or a damaged one"):
        Recording.load(path)


def rewritten(content: bytes, change: Any, compression: int = zipfile.ZIP_STORED) -> bytes:
    """The file with its members as ``change(name, bytes)`` makes them; None leaves one out."""
    file = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(content)) as old,
        zipfile.ZipFile(file, "w", compression) as new,
    ):
        for name in old.namelist():
            member = change(name, old.read(name))
            if member is not None:
                new.writestr(name, member)
    return file.getvalue()


def indexed(change: Any) -> Any:
    """A change of record.json."""

    def of_member(name: str, member: bytes) -> bytes:
        if name != "record.json":
            return member
        index = json.loads(member)
        return json.dumps(change(index) or index).encode()

    return of_member


def call_says(**values: Any) -> Any:
    return indexed(lambda index: index["calls"][0].update(values))


def replaced(member: str, content: bytes | None) -> Any:
    return lambda name, old: content if name == member else old


def npy(a: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.lib.format.write_array(file, np.asarray(a), **options)
    return file.getvalue()


def zeros_like(member: bytes) -> bytes:
    return npy(np.zeros_like(np.load(io.BytesIO(member))))


BIG = (
    b"\x93NUMPY\x01\x00v\x00"
    + b"{'descr': '<f4', 'fortran_order': False, 'shape': (1099511627776, 4, 8), }".ljust(117)
    + b"\n"
)
NONSENSE: dict[str, Any] = {
    "no index": replaced("record.json", None),
    "index is a list": indexed(lambda index: [index]),
    "another format": indexed(lambda index: index.update(format="other")),
    "deep json": replaced("record.json", b"[" * 100000),
    "calls is no list": indexed(lambda index: index.update(calls={"0": 1})),
    "a call is a number": indexed(lambda index: index.update(calls=[5])),
    "no q": replaced("calls/0/q.npy", None),
    "q of pickles": replaced("calls/0/q.npy", npy([{}, 1], allow_pickle=True)),
    "q of doubles": replaced("calls/0/q.npy", npy(np.zeros((3, 4, 8)))),
    "q too large": replaced("calls/0/q.npy", BIG),
    "q with fewer rows": replaced("calls/0/q.npy", npy(np.zeros((2, 4, 8), F32))),
    "q of other heads": replaced("calls/0/q.npy", npy(np.zeros((3, 3, 8), F32))),
    "q with an axis less": replaced("calls/0/q.npy", npy(np.zeros((3, 32), F32))),
    "fewer states": replaced("calls/0/states.npy", npy(np.zeros((2, 4, 10), F32))),
    "fewer digests": replaced("calls/0/digests.npy", npy(np.zeros((1, 2, 32), np.uint8))),
    "a long context": replaced("calls/0/ctx_lens.npy", npy(np.array([2**31 - 1, 3], np.int32))),
    "a short context": replaced("calls/0/ctx_lens.npy", npy(np.array([1, 3], np.int32))),
    "falling starts": replaced("calls/0/cu_seqlens_q.npy", npy(np.array([0, 4, 3], np.int32))),
    "late starts": replaced("calls/0/cu_seqlens_q.npy", npy(np.array([1, 2, 3], np.int32))),
    "no starts": replaced("calls/0/cu_seqlens_q.npy", npy(np.array([], np.int32))),
    "other kv bytes": lambda name, old: zeros_like(old) if name.startswith("kv/") else old,
    "fewer kv bytes": lambda name, old: (
        npy(np.zeros(3, np.uint16)) if name.startswith("kv/") else old
    ),
    "dtype": call_says(dtype="float8"),
    "head dims": call_says(head_dims=[8]),
    "negative dims": call_says(head_dims=[-8, 8]),
    "kv heads": call_says(n_kv_heads=0),
    "window": call_says(window=2**63),
    "window text": call_says(window="all"),
    "scale": call_says(scale="much"),
    "scale as number": call_says(scale=1.0),
    "terminal codes": call_says(fn="\x1b[31m"),
    "no facts": call_says(facts={}),
    "threads": call_says(
        facts={"version": "", "numerics": 1, "isa": "", "threads": "2", "library": ""}
    ),
}


@pytest.mark.parametrize("change", NONSENSE.values(), ids=NONSENSE)
def test_nonsense_is_a_value_error(small_file: bytes, tmp_path: Path, change: Any) -> None:
    path = tmp_path / "r"
    path.write_bytes(rewritten(small_file, lambda name, old: old))
    assert read_whole(path) == 1  # rewriting alone does no harm
    path.write_bytes(rewritten(small_file, change))
    with pytest.raises(ValueError, match=r"no record of tinyllm's, or a damaged one"):
        read_whole(path)


def test_nothing_compressed_is_read(small_file: bytes, tmp_path: Path) -> None:
    (tmp_path / "r").write_bytes(rewritten(small_file, lambda name, old: old, zipfile.ZIP_DEFLATED))
    with pytest.raises(ValueError, match=r"record.json is compressed"):
        read_whole(tmp_path / "r")


def test_another_version_is_named(small_file: bytes, tmp_path: Path) -> None:
    change = indexed(lambda index: index.update(version=2))
    (tmp_path / "r").write_bytes(rewritten(small_file, change))
    with pytest.raises(ValueError, match=r"is a record of format 2; tinyllm \S+ reads format 1"):
        Recording.load(tmp_path / "r")


def test_what_cannot_be_opened_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        Recording.load(tmp_path / "missing")
    with pytest.raises(IsADirectoryError):
        Recording.load(tmp_path)
    with pytest.raises(TypeError):
        Recording.load(5)  # type: ignore[arg-type]


def test_calls_are_indexed_like_a_list(batch: Batch, tmp_path: Path) -> None:
    with recorded(tmp_path / "r", batch) as run:
        assert run[-1].index == 0
        with pytest.raises(IndexError):
            run[1]
        assert repr(run) == f"Recording({str(tmp_path / 'r')!r}, 1 calls)"
