# SPDX-License-Identifier: MIT
"""The friendly surface: right numbers or an exception, for any array; threads, lifetimes, fork and
exit."""

from __future__ import annotations

import gc
import importlib
import os
import shutil
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinyllm
from numpy.typing import NDArray
from tinyllm import (
    ClosedError,
    PagedKVCache,
    ThreadPool,
    TlError,
    flash_attention,
    paged_attention,
    paged_attention_decode,
    windowed_attention,
)
from tinyllm.ffi.libtinyllm import Lib

H, HKV, D, BLOCK, LAYERS = 6, 2, 8, 4, 2
LENGTHS = {"short": 1, "middle": 9, "long": 30}
SEQS = list(LENGTHS)


def normal(*shape: int, seed: int = 1) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.fixture
def cache(lib: Lib) -> Iterator[PagedKVCache]:
    """Three sequences of 1, 9 and 30 positions in two layers."""
    with PagedKVCache(lib, 80, BLOCK, LAYERS, HKV, D) as c:
        for i, (seq, n) in enumerate(LENGTHS.items()):
            c.add_seq(seq)
            for layer in range(LAYERS):
                k, v = normal(2, HKV, n, D, seed=10 * i + layer)
                c.append(seq, layer, k, v)
        yield c


@pytest.fixture
def q() -> NDArray[np.float32]:
    return normal(len(SEQS), H, D, seed=99)


def specified(
    cache: PagedKVCache, q: Any, seqs: Any, layer: int, scale: Any = None, window: int = 0
) -> Any:
    """What a decode step is, in float64, sequence by sequence."""
    rows = []
    for row, seq in zip(q, seqs, strict=True):
        k, v = cache.gather(seq, layer)
        n = k.shape[1]
        out, _ = windowed_attention(
            row[None, :, None], k[None], v[None], window=window or None, q_offset=n - 1, scale=scale
        )
        rows.append(out[0, :, 0])
    return np.array(rows)


def assert_same_bits(a: NDArray[Any], b: NDArray[Any]) -> None:
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert a.tobytes() == b.tobytes()


# --- decode
# -------------------------------------------------------------------------------------------------


def test_hand_example(lib: Lib) -> None:
    with PagedKVCache(lib, 4, 2, 1, 1, 2) as cache:
        cache.add_seq("a")
        k = np.array([[[1, 0], [0, 1], [1, 1]]], np.float32)
        v = np.array([[[1, 2], [3, 4], [5, 6]]], np.float32)
        cache.append("a", 0, k, v)
        out = paged_attention_decode(np.array([[[1, 0]]], np.float32), cache, ["a"], 0)
        np.testing.assert_allclose(out, [[[3, 4]]], rtol=3e-7)


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("window", [0, 1, 5, 100])
@pytest.mark.parametrize("scale", [None, 0.25, 1, 0, np.float32(2)])
def test_decode_agrees_with_the_specification(
    cache: Any, q: Any, layer: int, window: int, scale: Any
) -> None:
    out = paged_attention_decode(q, cache, SEQS, layer, scale=scale, window=window)
    assert (out.dtype, out.shape) == (np.float32, q.shape)
    np.testing.assert_allclose(out, specified(cache, q, SEQS, layer, scale, window), atol=2e-5)


def test_decode_and_prefill_have_the_same_bits(cache: PagedKVCache, q: Any) -> None:
    decoded = paged_attention_decode(q, cache, SEQS, 1, window=7)
    for row, seq, out in zip(q, SEQS, decoded, strict=True):
        k, v = (a.astype(np.float32)[None] for a in cache.gather(seq, 1))
        prefilled = flash_attention(row[None, :, None], k, v, q_offset=LENGTHS[seq] - 1, window=7)
        assert_same_bits(prefilled[0, :, 0], out)


def test_a_row_is_the_same_alone_in_any_order_and_twice_in_a_batch(
    cache: PagedKVCache, q: Any
) -> None:
    together = paged_attention_decode(q, cache, SEQS, 0)
    for i, seq in enumerate(SEQS):
        assert_same_bits(paged_attention_decode(q[i : i + 1], cache, [seq], 0), together[i : i + 1])
    assert_same_bits(paged_attention_decode(q[::-1], cache, SEQS[::-1], 0), together[::-1].copy())
    twice = paged_attention_decode(np.concatenate([q, q]), cache, (*SEQS, *SEQS), 0)
    assert_same_bits(twice, np.concatenate([together, together]))


def test_decode_follows_every_change_of_the_tables(cache: PagedKVCache, q: Any) -> None:
    """The tables a call reads are kept from one call to the next; no change may be missed."""
    for step in range(12):
        for seq in SEQS[: 1 + step % 3]:
            for layer in range(LAYERS):
                k, v = normal(2, HKV, 5, D, seed=1000 + step)
                cache.append(seq, layer, k, v)
        for layer in range(LAYERS):
            out = paged_attention_decode(q, cache, SEQS, layer)
            np.testing.assert_allclose(out, specified(cache, q, SEQS, layer), atol=2e-5)
    cache.fork("middle", "child")
    k, v = normal(2, HKV, 3, D, seed=5000)
    cache.append("child", 0, k, v)
    cache.free("short")
    cache.add_seq("short")
    cache.append("short", 0, k, v)
    for seqs in (SEQS, ["child", "short", "middle"], ["child"] * 3):
        np.testing.assert_allclose(
            paged_attention_decode(q, cache, seqs, 0), specified(cache, q, seqs, 0), atol=2e-5
        )


def test_decode_of_no_sequences_is_empty(cache: PagedKVCache) -> None:
    assert paged_attention_decode(np.empty((0, H, D), np.float32), cache, [], 0).shape == (0, H, D)


def test_out_is_written_and_returned(cache: PagedKVCache, q: Any) -> None:
    wanted = paged_attention_decode(q, cache, SEQS, 0)
    room = np.full((5, *q.shape[1:]), np.nan, np.float32)
    out = room[1:4]
    assert paged_attention_decode(q, cache, SEQS, 0, out=out) is out
    assert_same_bits(out, wanted)
    assert np.isnan(room[[0, 4]]).all()


def q_layouts(q: NDArray[np.float32]) -> dict[str, NDArray[np.float32]]:
    """The numbers of q in other memory layouts."""
    wide = np.full((*q.shape[:2], 2 * q.shape[2]), np.nan, np.float32)
    wide[:, :, ::2] = q
    raw = np.zeros(q.nbytes + 1, np.uint8)
    raw[1:] = np.frombuffer(q.tobytes(), np.uint8)
    readonly = q.copy()
    readonly.flags.writeable = False
    return {
        "every_other_element": wide[:, :, ::2],
        "transposed": np.ascontiguousarray(q.T).T,
        "heads_first": np.ascontiguousarray(q.transpose(1, 0, 2)).transpose(1, 0, 2),
        "reversed": q[::-1].copy()[::-1],
        "misaligned": raw[1:].view(np.float32).reshape(q.shape),
        "readonly": readonly,
        "subclass": q.view(type("Subclass", (np.ndarray,), {})),
    }


@pytest.mark.parametrize("name", list(q_layouts(np.zeros((1, 1, 1), np.float32))))
def test_any_layout_of_q_gives_the_same_bits_and_q_stays(
    cache: PagedKVCache, q: Any, name: str
) -> None:
    a = q_layouts(q)[name]
    out = paged_attention_decode(a, cache, SEQS, 0)
    assert type(out) is np.ndarray
    assert_same_bits(out, paged_attention_decode(q, cache, SEQS, 0))
    assert (a == q).all()


def test_a_broadcast_q_gives_the_numbers_it_shows(cache: PagedKVCache, q: Any) -> None:
    a = np.broadcast_to(q[0], q.shape)
    assert_same_bits(
        paged_attention_decode(a, cache, SEQS, 0),
        paged_attention_decode(np.array(a), cache, SEQS, 0),
    )


class TestDecodeRefuses:
    """Every bad call raises and leaves ``out`` as it was."""

    @pytest.fixture(autouse=True)
    def _prepared(self, cache: PagedKVCache, q: NDArray[np.float32]) -> Iterator[None]:
        self.cache, self.q = cache, q
        self.out = np.full(q.shape, 7, np.float32)
        yield
        assert (self.out == 7).all()

    def call(self, **changes: Any) -> None:
        given = {
            "q": self.q,
            "cache": self.cache,
            "seq_ids": SEQS,
            "layer": 0,
            "out": self.out,
            **changes,
        }
        paged_attention_decode(**given)

    @pytest.mark.parametrize("dtype", [bool, complex, object, "S4", "M8[s]"])
    def test_q_of_what_are_no_real_numbers(self, dtype: Any) -> None:
        with pytest.raises(
            TypeError, match=r"^paged_attention_decode: q must be real numbers, not"
        ):
            self.call(q=self.q.astype(dtype))

    def test_no_array_at_all(self) -> None:
        for bad in (None, {1.0}, "q", [[["1"]]], [[1.0], [2.0, 3.0]], np.ma.array(self.q)):
            with pytest.raises(TypeError, match=r"^paged_attention_decode: q must be"):
                self.call(q=bad)
        with pytest.raises(ValueError, match=r"^paged_attention_decode: q must have 3 axes"):
            self.call(q=1.0)

    @pytest.mark.parametrize(
        "shape",
        [
            (3, H),
            (3, H, D, 1),
            (3, H, D + 1),
            (3, H, D - 1),
            (3, 5, D),
            (3, 0, D),
            (3, D, H),
            (3, 1, D),
        ],
    )
    def test_wrong_rank_width_or_heads(self, shape: tuple[int, ...]) -> None:
        with pytest.raises(ValueError, match="paged_attention_decode: q"):
            self.call(q=np.zeros(shape, np.float32))

    def test_another_number_of_sequences(self) -> None:
        for seqs in ([], SEQS[:2], [*SEQS, "long"]):
            with pytest.raises(ValueError, match=f"3 rows for {len(seqs)} sequences"):
                self.call(seq_ids=seqs)

    def test_unknown_and_empty_sequences(self) -> None:
        with pytest.raises(KeyError, match="nobody"):
            self.call(seq_ids=["short", "nobody", "long"])
        self.cache.add_seq("new")
        k = np.ones((HKV, 1, D), np.float32)
        self.cache.append("new", 1, k, k)
        with pytest.raises(ValueError, match="'new' holds no position in layer 0"):
            self.call(seq_ids=["short", "new", "long"])

    @pytest.mark.parametrize("layer", [-1, LAYERS, 2**32, 1.0, None])
    def test_bad_layers(self, layer: Any) -> None:
        with pytest.raises(ValueError, match="paged_attention_decode: layer"):
            self.call(layer=layer)

    @pytest.mark.parametrize("window", [2**63, -(2**63) - 1, 2**64, 2**64 + 3])
    def test_a_window_its_c_type_cannot_hold(self, window: int) -> None:
        with pytest.raises((OverflowError, ValueError), match=f"window = {window}"):
            self.call(window=window)

    def test_arguments_of_another_type(self) -> None:
        for changes in (
            {"window": 1.0}, {"window": "3"}, {"window": True}, {"scale": "1"}, {"scale": [1.0]},
            {"scale": True}, {"threads": 1.5}, {"threads": "2"}, {"threads": True}, {"cache": None},
        ):  # fmt: skip
            with pytest.raises(TypeError, match=f"paged_attention_decode: {next(iter(changes))}"):
                self.call(**changes)

    def test_thread_counts_out_of_range(self) -> None:
        for threads in (-1, 4097, 2**32 + 1):
            with pytest.raises(ValueError, match=f"threads = {threads}"):
                self.call(threads=threads)

    def test_an_out_that_cannot_be_written_as_it_is(self) -> None:
        wide = np.full((3, H, 2 * D), 7, np.float32)
        readonly = self.out.copy()
        readonly.flags.writeable = False
        for out in (
            wide[..., ::2],
            np.asfortranarray(self.out),
            readonly,
            self.out[:2],
            self.out[0],
            np.zeros((3, H, D + 1), np.float32),
        ):
            with pytest.raises(ValueError, match="paged_attention_decode: out"):
                self.call(out=out)
        for out in (self.out.astype(np.float64), self.out.astype(">f4"), self.out.tolist()):
            with pytest.raises(TypeError, match="paged_attention_decode: out"):
                self.call(out=out)
        assert (wide == 7).all()

    def test_an_out_that_overlaps_q(self) -> None:
        before = self.q.copy()
        room = np.zeros((5, H, D), np.float32)
        room[:3] = self.q
        for q, out in ((self.q, self.q), (room[:3], room[2:])):
            with pytest.raises(ValueError, match="overlaps q"):
                self.call(q=q, out=out)
        assert (self.q == before).all()
        assert (room[:3] == before).all()

    def test_positional_options(self) -> None:
        with pytest.raises(TypeError):
            paged_attention_decode(self.q, self.cache, SEQS, 0, 1.0)  # type: ignore[misc]


def test_window_none_zero_and_negative_are_no_window(cache: PagedKVCache, q: Any) -> None:
    wanted = paged_attention_decode(q, cache, SEQS, 0)
    for window in (None, 0, -1, -(2**63), 2**63 - 1, 30, np.int64(0)):
        assert_same_bits(paged_attention_decode(q, cache, SEQS, 0, window=window), wanted)


# --- prefill
# ------------------------------------------------------------------------------------------------


def tensors(
    b: int = 2, h: int = H, hkv: int = HKV, tq: int = 5, tk: int = 9, d: int = D
) -> tuple[Any, Any, Any]:
    return normal(b, h, tq, d, seed=1), normal(b, hkv, tk, d, seed=2), normal(b, hkv, tk, d, seed=3)


@pytest.mark.parametrize("window", [0, 1, 4])
@pytest.mark.parametrize("q_offset", [0, 4, 20])
@pytest.mark.parametrize("sinks", [False, True])
def test_prefill_agrees_with_the_specification(
    lib: Lib, window: int, q_offset: int, sinks: bool
) -> None:
    q, k, v = tensors()
    logits = normal(H, seed=4) if sinks else None
    out, lse = flash_attention(
        q, k, v, q_offset=q_offset, window=window, sink_logits=logits, return_lse=True
    )
    wanted, wanted_lse = windowed_attention(q, k, v, window or None, 0, logits, q_offset)
    np.testing.assert_allclose(out, wanted, atol=2e-5)
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-5, atol=1e-5)
    assert (out.dtype, out.shape, lse.dtype, lse.shape) == (
        np.float32,
        q.shape,
        np.float32,
        q.shape[:3],
    )
    assert_same_bits(
        flash_attention(q, k, v, q_offset=q_offset, window=window, sink_logits=logits), out
    )


def test_not_causal_sees_later_keys_too(lib: Lib) -> None:
    q, k, v = tensors(tq=1)
    everything, _ = windowed_attention(q, k, v, q_offset=8)
    np.testing.assert_allclose(flash_attention(q, k, v, causal=False), everything, atol=2e-5)
    np.testing.assert_array_equal(
        flash_attention(q, k, v)[0, 0, 0], v[0, 0, 0]
    )  # row 0 sees key 0 alone


@pytest.mark.parametrize("which", range(3))
def test_prefill_of_any_layout_gives_the_same_bits(lib: Lib, which: int) -> None:
    arrays = list(tensors())
    wanted = flash_attention(*arrays)
    a = arrays[which]
    wide = np.zeros((*a.shape[:3], 2 * D), np.float32)
    wide[..., ::2] = a
    for other in (
        np.asfortranarray(a),
        wide[..., ::2],
        a[:, :, ::-1].copy()[:, :, ::-1],
        a.swapaxes(1, 2).copy().swapaxes(1, 2),
    ):
        assert not other.flags.c_contiguous
        arrays[which] = other
        before = other.copy()
        assert_same_bits(flash_attention(*arrays), wanted)
        assert (other == before).all()
    sinks = np.repeat(normal(H), 2)
    assert_same_bits(
        flash_attention(*tensors(), sink_logits=sinks[::2]),
        flash_attention(*tensors(), sink_logits=sinks[::2].copy()),
    )


@pytest.mark.parametrize(
    "sizes",
    [
        {"b": 0},
        {"tq": 0},
        {"h": 0},
        {"tk": 0},
        {"d": 0},
        {"h": 0, "hkv": 0},
        {"tk": 0, "d": 0},
        {"b": 0, "tk": 0},
    ],
)
def test_empty_prefill_has_the_shape_and_values_of_the_specification(
    lib: Lib, sizes: dict[str, int]
) -> None:
    q, k, v = tensors(**sizes)
    out, lse = flash_attention(q, k, v, return_lse=True)
    wanted, wanted_lse = windowed_attention(q, k, v)
    np.testing.assert_allclose(out, wanted, atol=2e-5)
    np.testing.assert_allclose(lse, wanted_lse, rtol=1e-6)


def test_prefill_refuses_what_does_not_fit(lib: Lib) -> None:
    q, k, v = tensors()
    fn = "flash_attention"
    for i, name in enumerate("qkv"):
        for dtype in (bool, complex, object, "S4"):
            args = [q, k, v]
            args[i] = args[i].astype(dtype)
            with pytest.raises(TypeError, match=f"^{fn}: {name} must be real numbers, not"):
                flash_attention(*args)
        args = [q, k, v]
        args[i] = args[i][0]
        with pytest.raises(ValueError, match=f"{fn}: {name} must have 4 axes"):
            flash_attention(*args)
    for bad in ((q, k[:, :, :8], v), (q, k, v[:1]), (q[:1], k, v), (q[..., :4], k, v),
                (q, k[:, :0], v[:, :0]), (q[:, :5], k, v),
                (q[:, :1], k, v)):  # fmt: skip
        with pytest.raises(ValueError, match=fn):
            flash_attention(*bad)
    for logits, error in (
        (normal(H + 1), ValueError),
        (normal(1, H), ValueError),
        (np.zeros(H, bool), TypeError),
        ({0.0}, TypeError),
    ):
        with pytest.raises(error, match=f"{fn}: sink_logits"):
            flash_attention(q, k, v, sink_logits=logits)
    for options in (
        {"q_offset": -1},
        {"q_offset": 2**63 - 4},
        {"q_offset": 2**64},
        {"window": 2**63},
        {"threads": -1},
    ):
        with pytest.raises(ValueError, match=f"{fn}: {next(iter(options))}"):
            flash_attention(q, k, v, **options)
    for options in ({"q_offset": 1.0}, {"window": 1.5}, {"threads": "2"}, {"scale": "1"}):
        with pytest.raises(TypeError, match=f"{fn}: {next(iter(options))}"):
            flash_attention(q, k, v, **options)
    assert np.isfinite(
        flash_attention(q, k, v, q_offset=2**63 - 6)
    ).all()  # the last offset there is


# --- threads
# ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [None, 0, 1, 2, 3, np.int32(2), 5])
def test_threads_change_no_bit(cache: PagedKVCache, q: Any, threads: Any) -> None:
    assert_same_bits(
        paged_attention_decode(q, cache, SEQS, 0, threads=threads),
        paged_attention_decode(q, cache, SEQS, 0),
    )
    assert_same_bits(flash_attention(*tensors(), threads=threads), flash_attention(*tensors()))


def test_a_thread_pool_serves_until_it_is_closed(cache: PagedKVCache, q: Any) -> None:
    wanted = paged_attention_decode(q, cache, SEQS, 0)
    with ThreadPool(3) as pool:
        assert pool.threads == 3
        for _ in range(3):
            assert_same_bits(paged_attention_decode(q, cache, SEQS, 0, threads=pool), wanted)
        assert_same_bits(flash_attention(*tensors(), threads=pool), flash_attention(*tensors()))
    pool.close()
    for use in (
        lambda: pool.threads, lambda: paged_attention_decode(q, cache, SEQS, 0, threads=pool),
        pool.__enter__, lambda: flash_attention(*tensors(), threads=pool),
    ):  # fmt: skip
        with pytest.raises(ClosedError, match="ThreadPool is closed"):
            use()


def test_a_pool_of_zero_is_the_cpus_this_process_may_use(lib: Lib) -> None:
    with ThreadPool() as pool:
        assert pool.threads == len(os.sched_getaffinity(0))
    with ThreadPool(1) as pool:
        assert pool.threads == 1


def test_bad_thread_counts(lib: Lib) -> None:
    for n in (-1, 4097, 2**32 + 1, 2**64):
        with pytest.raises(ValueError, match=f"ThreadPool: n = {n}"):
            ThreadPool(n)
    for n in (1.0, "2", None, True):
        with pytest.raises(TypeError, match="ThreadPool: n must be an integer"):
            ThreadPool(n)


def test_a_pool_of_another_library_is_refused(cache: PagedKVCache, q: Any, tmp_path: Path) -> None:
    twin = tmp_path / "twin.so"
    shutil.copy(cache.lib.path, twin)
    with ThreadPool(1, lib=Lib(twin)) as pool, pytest.raises(ValueError, match=r"twin\.so"):
        paged_attention_decode(q, cache, SEQS, 0, threads=pool)


def n_threads(at_most: int = 2**31) -> int:
    """Threads of this process, after a moment for those that were joined to leave the list."""
    deadline = time.monotonic() + 5
    while (n := len(os.listdir("/proc/self/task"))) > at_most and time.monotonic() < deadline:
        time.sleep(0.01)
    return n


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="reads /proc")
def test_a_count_starts_its_threads_once_and_a_collected_pool_leaves_none(
    cache: PagedKVCache, q: Any
) -> None:
    paged_attention_decode(q, cache, SEQS, 0, threads=3)
    before = n_threads()
    for _ in range(5):
        paged_attention_decode(q, cache, SEQS, 0, threads=3)
    assert n_threads() == before
    pool = ThreadPool(4)
    assert n_threads() == before + 3
    del pool
    gc.collect()
    assert n_threads(before) == before


def test_many_python_threads_decode_on_one_cache_and_one_pool(cache: PagedKVCache, q: Any) -> None:
    batches = [
        (SEQS, slice(0, 3)),
        (["long"], slice(2, 3)),
        (["middle", "long"], slice(1, 3)),
        (SEQS[:2], slice(0, 2)),
    ]
    wanted = [
        [paged_attention_decode(q[rows], cache, seqs, layer) for layer in range(LAYERS)]
        for seqs, rows in batches
    ]
    wrong: list[Any] = []

    def work(pool: ThreadPool, which: int) -> None:
        seqs, rows = batches[which]
        for i in range(60):
            layer = i % LAYERS
            threads = (None, pool, 2)[i % 3]
            out = paged_attention_decode(q[rows], cache, seqs, layer, threads=threads)
            if out.tobytes() != wanted[which][layer].tobytes():
                wrong.append((which, i))

    with ThreadPool(2) as pool:
        workers = [threading.Thread(target=work, args=(pool, i % len(batches))) for i in range(8)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join(60)
            assert not worker.is_alive()
    assert wrong == []


def test_nothing_is_closed_under_a_call(lib: Lib) -> None:
    cache, pool = PagedKVCache(lib, 1, 1, 1, 1, 1), ThreadPool(1)
    for owner in (cache, pool):
        for inside in (owner._handle.read, owner._handle.write):
            with inside(), pytest.raises(RuntimeError, match="so it cannot be closed"):
                owner.close()
    assert pool.threads == 1
    assert cache.stats()["free"] == 1
    for owner in (cache, pool):
        owner.close()


# --- lifetimes
# ----------------------------------------------------------------------------------------------


def test_after_close_every_method_says_closed(lib: Lib) -> None:
    cache = PagedKVCache(lib, 4, 2, 1, 1, 1)
    cache.add_seq("a")
    k = np.ones((1, 1, 1), np.float32)
    cache.append("a", 0, k, k)
    step = cache.batch(["a"])
    cache.close()
    cache.close()
    calls: dict[str, Callable[[], Any]] = {
        "pool": lambda: cache.pool,
        "add_seq": lambda: cache.add_seq("b"),
        "fork": lambda: cache.fork("a", "b"),
        "append": lambda: cache.append("a", 0, k, k),
        "append_batch": lambda: cache.append_batch(["a"], 0, k, k),
        "needs": lambda: cache.needs({"a": 1}),
        "step": lambda: paged_attention(k, step, 0),
        "step.tables": lambda: step.tables,
        "step.lengths": lambda: step.lengths(0),
        "truncate": lambda: cache.truncate("a", 0),
        "trim_front": lambda: cache.trim_front("a", 1),
        "view": lambda: cache.view(0),
        "batch": lambda: cache.batch(["a"]),
        "nbytes": lambda: cache.nbytes,
        "resident_bytes": lambda: cache.resident_bytes,
        "trim": cache.trim,
        "swap_out": lambda: cache.swap_out("a", {}),
        "swap_in": lambda: cache.swap_in("b", {}),
        "__contains__": lambda: "a" in cache,
        "__iter__": lambda: list(cache),
        "__len__": lambda: len(cache),
        "block_table": lambda: cache.block_table("a"),
        "seq_len": lambda: cache.seq_len("a"),
        "least_length": lambda: cache.least_length("a"),
        "gather": lambda: cache.gather("a", 0),
        "gather_codes": lambda: cache.gather_codes("a", 0),
        "export_seq": lambda: cache.export_seq("a"),
        "import_seq": lambda: cache.import_seq("b", b""),
        "free": lambda: cache.free("a"),
        "extend": lambda: cache.extend("a", [1]),
        "said": lambda: cache.said("a"),
        "match_len": lambda: cache.match_len([1]),
        "pin": lambda: cache.pin([1, 2]),
        "unpin": lambda: cache.unpin([1, 2]),
        "drop_namespace": lambda: cache.drop_namespace(b""),
        "prefix_stats": cache.prefix_stats,
        "stats": cache.stats,
        "num_free_blocks": cache.num_free_blocks,
        "snapshot": cache.snapshot,
        "look": cache.look,
        "metrics": cache.metrics,
        "__enter__": cache.__enter__,
        "decode": lambda: paged_attention_decode(k, cache, ["a"], 0),
        "attention": lambda: paged_attention(k, cache, ["a"], 0),
    }
    public = {
        name
        for name, member in vars(PagedKVCache).items()
        if not name.startswith("_") and name != "close" and name not in cache.__annotations__
    }
    assert public < set(calls)
    for call in calls.values():
        with pytest.raises(ClosedError, match="PagedKVCache is closed"):
            call()
    assert issubclass(ClosedError, RuntimeError)
    assert repr(cache).endswith("d_head=1, dtype='float16', closed)")
    pool = ThreadPool(2)
    assert repr(pool) == "ThreadPool(2)"
    pool.close()
    assert repr(pool) == "ThreadPool(closed)"


def test_leaving_a_with_block_by_an_exception_closes(lib: Lib) -> None:
    with (
        pytest.raises(ZeroDivisionError),
        PagedKVCache(lib, 1, 1, 1, 1, 1) as cache,
        ThreadPool(2) as pool,
    ):
        raise ZeroDivisionError
    for owner in (cache, pool):
        with pytest.raises(ClosedError):
            owner.__enter__()


def test_collection_destroys_exactly_once_also_in_a_cycle(lib: Lib) -> None:
    destroyed: list[int] = []
    watched = Lib(lib.path)

    def watch(name: str) -> None:
        function = getattr(watched, name)

        def destroy(address: int) -> None:
            destroyed.append(address)
            function(address)

        setattr(watched, name, destroy)

    watch("tl_kv_pool_destroy")
    watch("tl_pool_destroy")
    for make in (lambda: PagedKVCache(watched, 1, 1, 1, 1, 1), lambda: ThreadPool(2, lib=watched)):
        owner: Any = make()
        address = owner._handle.address
        owner.itself = owner
        gone = weakref.ref(owner)
        del owner
        gc.collect()
        assert gone() is None
        assert destroyed == [address]
        destroyed.clear()
        owner = make()
        owner.close()
        owner.close()
        del owner
        gc.collect()
        assert len(destroyed) == 1
        destroyed.clear()


def test_a_constructor_that_raises_leaves_nothing_behind(run_silently: Callable[..., str]) -> None:
    assert (
        run_silently("""
import gc
from tinyllm import PagedKVCache, ThreadPool
for make in (lambda: PagedKVCache(None, 0, 1, 1, 1, 1),
             lambda: PagedKVCache(None, 2**31 - 1, 2**32 - 1, 2**32 - 1, 2**32 - 1, 1),
             lambda: ThreadPool(-1), lambda: ThreadPool('x'),
             lambda: PagedKVCache(object(), 1, 1, 1, 1, 1)):
    try:
        make()
    except (ValueError, TypeError, AttributeError):
        print('raised')
    gc.collect()
""")
        == "raised\n" * 5
    )


def test_objects_alive_at_exit_are_closed_without_a_word(run_silently: Callable[..., str]) -> None:
    assert (
        run_silently("""
import atexit, sys
import numpy as np
from tinyllm import PagedKVCache, ThreadPool, paged_attention_decode
pool, cache = ThreadPool(4), PagedKVCache(None, 8, 4, 1, 1, 4)
cache.add_seq(0)
k = np.ones((1, 5, 4), np.float32)
cache.append(0, 0, k, k)
q = np.ones((1, 1, 4), np.float32)
for threads in (pool, 3):
    print(paged_attention_decode(q, cache, [0], 0, threads=threads).tolist())
pool.cycle = cache.cycle = [pool, cache]
sys.keep = (pool, cache)
""")
        == "[[[1.0, 1.0, 1.0, 1.0]]]\n" * 2
    )


def test_exit_under_a_daemon_thread_that_decodes(run_silently: Callable[..., str]) -> None:
    assert (
        run_silently("""
import threading, time
import numpy as np
from tinyllm import PagedKVCache, ThreadPool, paged_attention_decode
pool, cache = ThreadPool(2), PagedKVCache(None, 80, 16, 1, 2, 64)
cache.add_seq(0)
k = np.ones((2, 1200, 64), np.float32)
cache.append(0, 0, k, k)
q = np.ones((1, 8, 64), np.float32)
def forever(threads):
    while True:
        paged_attention_decode(q, cache, [0], 0, threads=threads)
for threads in (None, pool):
    threading.Thread(target=forever, args=(threads,), daemon=True).start()
time.sleep(0.2)
print('leaving')
""")
        == "leaving\n"
    )


def test_a_thousand_caches_and_pools_leave_no_growth(run_silently: Callable[..., str]) -> None:
    assert (
        run_silently("""
import gc, os, time
import numpy as np
from tinyllm import PagedKVCache, ThreadPool, paged_attention_decode
k, q = np.ones((1, 3, 8), np.float32), np.ones((1, 1, 8), np.float32)
threads = len(os.listdir('/proc/self/task'))  # numpy may have some
def pages():
    gc.collect()
    with open('/proc/self/statm') as f:
        return int(f.read().split()[1])
def cycle():
    cache = PagedKVCache(None, 1000, 16, 2, 1, 8)
    cache.add_seq(0)
    cache.append(0, 0, k, k)
    with ThreadPool(2) as pool:
        paged_attention_decode(q, cache, [0], 0, threads=pool)
    cache.close()
for _ in range(200):
    cycle()
before = pages()
for _ in range(1000):
    cycle()
grown = (pages() - before) * os.sysconf('SC_PAGE_SIZE')
deadline = time.monotonic() + 5
while len(os.listdir('/proc/self/task')) > threads and time.monotonic() < deadline:
    time.sleep(0.01)  # a joined thread takes a moment to leave the list
print(len(os.listdir('/proc/self/task')) - threads, grown < 2 << 20 or grown)
""")
        == "0 True\n"
    )


# --- fork
# --------------------------------------------------------------------------------------------------

FORKED = """
import os, signal, sys, time, warnings
import numpy as np
from tinyllm import PagedKVCache, ThreadPool, paged_attention_decode
warnings.simplefilter('ignore')  # newer interpreters warn of forking with threads
rng = np.random.default_rng(0)
cache = PagedKVCache(None, 40, 16, 1, 2, 16)
cache.add_seq(0)
k, v = rng.standard_normal((2, 2, 300, 16), np.float32)
cache.append(0, 0, k, v)
q = rng.standard_normal((1, 4, 16), np.float32)
pool = ThreadPool(4)
wanted = paged_attention_decode(q, cache, [0], 0).tobytes()
def right():
    for threads in (None, pool, 4, 3):
        if paged_attention_decode(q, cache, [0], 0, threads=threads).tobytes() != wanted:
            return False
    return True
def reap(child):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return 'hangs'
"""


@pytest.mark.parametrize(
    "before", ["", "assert right()"], ids=["before_first_use", "after_first_use"]
)
@pytest.mark.parametrize(
    "end", ["os._exit(not ok)", "pool.close(); cache.close(); os._exit(not ok)", "sys.exit(not ok)"]
)
def test_a_forked_child_decodes_with_inherited_pools_and_leaves(
    run_silently: Any, before: str, end: str
) -> None:
    assert (
        run_silently(
            FORKED
            + f"""
{before}
for _ in range(3):
    child = os.fork()
    if child == 0:
        ok = right() and pool.threads == 4
        cache.append(0, 0, k, v)  # the child's copy
        {end}
    print(reap(child), right(), cache.seq_len(0))
"""
        )
        == "0 True 300\n" * 3
    )


def test_multiprocessing_by_fork(run_silently: Callable[..., str]) -> None:
    assert (
        run_silently(
            FORKED
            + """
import multiprocessing
right()
context = multiprocessing.get_context('fork')
def work(_):
    return right()
with context.Pool(2) as processes:
    print(processes.map(work, range(6)))
print(right())
"""
        )
        == f"{[True] * 6}\nTrue\n"
    )


# --- what cannot run
# --------------------------------------------------------------------------------------------------


def test_an_instruction_set_that_is_not_here_is_an_exception(run_python: Any) -> None:
    done: subprocess.CompletedProcess[str] = run_python(
        """
import numpy as np
import tinyllm
q = np.ones((1, 1, 1, 1), np.float32)
try:
    tinyllm.flash_attention(q, q, q)
except tinyllm.TlError as error:
    print(error.name, error.fn, 'scalar' in error.message)
""",
        TINYLLM_ISA="mmx",
    )
    assert (done.stdout, done.stderr) == ("TL_EUNSUPPORTED tl_flash_attn_fwd_f32 True\n", "")


def test_the_scalar_instruction_set_gives_the_same_bits(
    cache: PagedKVCache, run_silently: Any
) -> None:
    program = """
import hashlib
import numpy as np
import tinyllm
q, k, v = np.random.default_rng(3).standard_normal((3, 2, 2, 33, 24), np.float32)
out, lse = tinyllm.flash_attention(q, k, v, window=20, return_lse=True)
print(hashlib.sha256(out.tobytes() + lse.tobytes()).hexdigest())
"""
    assert run_silently(program) == run_silently(program, TINYLLM_ISA="scalar")


def test_the_surface_is_what_it_says(lib: Lib) -> None:
    assert dir(tinyllm) == sorted(tinyllm.__all__)
    for name in tinyllm.__all__:
        assert getattr(tinyllm, name) is not None
    places = {
        "tinyllm.ffi.libtinyllm": ("TlError", "AbiMismatch"),
        "tinyllm.infer": ("OutOfBlocks", "PagedKVCache"),
        "tinyllm.infer.paged": ("OutOfBlocks", "PagedKVCache"),
        "tinyllm.modern": ("windowed_attention",),
        "tinyllm.kv_view": ("KVView",),
        "tinyllm.modern.window": ("windowed_attention",),
    }
    for module, names in places.items():
        for name in names:
            assert getattr(importlib.import_module(module), name) is getattr(tinyllm, name)
    assert issubclass(TlError, RuntimeError)
