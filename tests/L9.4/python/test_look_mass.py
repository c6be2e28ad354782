# SPDX-License-Identifier: MIT
"""attention_mass: shares of a float64 softmax over gathered keys, by block, with all options."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinyllm
from numpy.typing import NDArray
from tinyllm import ClosedError, KVView, PagedKVCache, attention_mass
from tinyllm.ffi.libtinyllm import Lib
from tinyllm.observe.pool import mass as mass_module

H, HKV, D, DV = 6, 2, 24, 8
LENGTHS = (1, 7, 16, 33, 50)


def expected(
    q: NDArray[np.float32],
    k: NDArray[Any],
    ctx: int,
    b: int,
    n: int,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Any = None,
    slopes: Any = None,
    scale: float = D**-0.5,
) -> NDArray[np.float64]:
    """q [H,D] and k [Hkv,ctx,D] of one sequence: the softmax in float64, position by position."""
    out = np.zeros((len(q), n))
    for h in range(len(q)):
        s = float(np.float32(scale)) * (
            k[h // (len(q) // len(k))].astype(np.float64) @ q[h].astype(np.float64)
        )
        if softcap:
            s = softcap * np.tanh(s / softcap)
        if slopes is not None:
            s = s + float(slopes[h]) * (np.arange(ctx) - (ctx - 1))
        if window > 0:
            s[: max(ctx - window, 0)] = -np.inf
        logits = s if sinks is None else np.append(s, float(sinks[h]))
        p = np.exp(s - logits.max()) / np.exp(logits - logits.max()).sum()
        for j in range(ctx):
            out[h, j // b] += p[j]
    return out


class Paged:
    """Keys of some sequences in shuffled blocks of float32."""

    def __init__(self, b: int, lengths: tuple[int, ...] = LENGTHS) -> None:
        rng = np.random.default_rng(11)
        self.b, self.lengths = b, lengths
        counts = [-(-length // b) for length in lengths]
        ids = rng.permutation(sum(counts) + 3)
        self.k = rng.standard_normal((len(ids), HKV, b, D)).astype(np.float32)
        self.v = rng.standard_normal((len(ids), HKV, b, DV)).astype(np.float32)
        cuts = np.cumsum([0, *counts])
        self.tables = [ids[i:j].astype(np.int32) for i, j in itertools.pairwise(cuts)]
        self.width = max(counts)
        self.q = 3 * rng.standard_normal((len(lengths), H, D)).astype(np.float32)
        self.view = KVView.from_arrays(self.k, self.v)

    def keys(self, s: int) -> NDArray[np.float32]:
        k = self.k[self.tables[s]].transpose(1, 0, 2, 3).reshape(HKV, -1, D)
        return k[:, : self.lengths[s]]

    def check(self, **options: Any) -> NDArray[np.float32]:
        got = attention_mass(self.q, self.view, self.tables, self.lengths, **options)
        assert got.shape == (len(self.lengths), H, self.width) and got.dtype == np.float32
        named = {"sink_logits": "sinks", "alibi_slopes": "slopes"}
        wanted = {named.get(key, key): value for key, value in options.items() if key != "threads"}
        for s, length in enumerate(self.lengths):
            want = expected(self.q[s], self.keys(s), length, self.b, self.width, **wanted)
            np.testing.assert_allclose(got[s], want, rtol=2e-5, atol=1e-7)
            np.testing.assert_array_equal(got[s] == 0, want == 0)
        return got


SINKS = np.linspace(-1, 6, H, dtype=np.float32)
SLOPES = (0.5 ** np.arange(H)).astype(np.float32)


@pytest.mark.parametrize("b", [1, 4, 16, 64])
@pytest.mark.parametrize("window", [0, 1, 3, 16, 17, 49, 1000, -2])
@pytest.mark.parametrize(
    ("softcap", "sinks", "slopes"),
    [
        (0.0, None, None),
        (2.5, None, None),
        (0.0, SINKS, None),
        (0.0, None, SLOPES),
        (2.5, SINKS, SLOPES),
    ],
)
def test_equals_the_softmax_over_gathered_keys(
    b: int, window: int, softcap: float, sinks: Any, slopes: Any
) -> None:
    Paged(b).check(window=window, softcap=softcap, sink_logits=sinks, alibi_slopes=slopes)


def test_a_scale_is_obeyed_and_none_is_the_usual_one() -> None:
    paged = Paged(4)
    paged.check(scale=0.7)
    np.testing.assert_array_equal(paged.check(), paged.check(scale=D**-0.5))


def test_blocks_longer_than_a_split() -> None:
    Paged(1500, (1, 1024, 1025, 3001)).check(window=1400, sink_logits=SINKS)
    Paged(1500, (3001,)).check()


def test_threads_and_the_size_of_a_call_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    paged = Paged(4)
    options = {"window": 19, "sink_logits": SINKS, "alibi_slopes": SLOPES, "softcap": 3.0}
    whole = paged.check(**options)
    np.testing.assert_array_equal(paged.check(threads=3, **options), whole)
    for size in (1, 3000, 10_000):
        monkeypatch.setattr(mass_module, "_BYTES_AT_ONCE", size)
        np.testing.assert_array_equal(paged.check(**options), whole)


def test_what_is_missing_to_one_is_the_sinks() -> None:
    paged = Paged(16)
    np.testing.assert_allclose(paged.check().sum(axis=2), 1, rtol=1e-6)
    masses = paged.check(sink_logits=SINKS)
    _, lse = tinyllm.paged_attention(
        paged.q, paged.view, paged.tables, paged.lengths, sink_logits=SINKS, return_lse=True
    )
    np.testing.assert_allclose(1 - masses.sum(axis=2), np.exp(SINKS - lse), rtol=1e-4, atol=1e-6)


def test_far_positions_keep_their_share_under_alibi() -> None:
    """Equal scores, so that all there is comes from the shift between blocks."""
    k = np.zeros((40, 1, 4, 8), np.float32)
    slope = np.array([0.05], np.float32)
    got = attention_mass(
        np.ones((1, 1, 8), np.float32),
        KVView.from_arrays(k, k),
        [list(range(40))],
        [158],
        alibi_slopes=slope,
    )
    p = np.exp(float(slope[0]) * np.arange(-157, 1))
    want = np.append(p, [0, 0]).reshape(40, 4).sum(axis=1) / p.sum()
    np.testing.assert_allclose(got[0, 0], want, rtol=1e-5)


def test_over_a_cache_with_its_front_given_up(lib: Lib) -> None:
    rng = np.random.default_rng(3)
    k = rng.standard_normal((2, 30, 16)).astype(np.float32)
    q = rng.standard_normal((2, 4, 16)).astype(np.float32)
    with PagedKVCache(lib, 16, 4, 1, 2, 16) as cache:
        cache.add_seq("a")
        cache.append("a", 0, k, k)
        cache.fork("a", "b")
        cache.trim_front("b", 10)
        assert cache.block_table("b")[0] == -1
        tables = [cache.block_table(seq) for seq in "ab"]
        got = attention_mass(q, cache.view(0), tables, [30, 30], window=10)
        for s in range(2):
            stored = k.astype(np.float16)
            want = expected(q[s], stored, 30, 4, 8, window=10, scale=0.25)
            np.testing.assert_allclose(got[s], want, rtol=2e-5, atol=1e-7)
        with pytest.raises(
            ValueError, match=r"attention_mass: block_tables\[1\]\[0\] = -1 is needed"
        ):
            attention_mass(q, cache.view(0), tables, [30, 30])
        assert "head 3" in str(cache.look({"a": got[0], "b": got[1]}))


def test_a_nan_makes_its_heads_nan_and_no_others() -> None:
    paged = Paged(4)
    paged.k[paged.tables[3][2], 1, 0, 0] = np.nan
    got = attention_mass(paged.q, paged.view, paged.tables, paged.lengths)
    assert np.isnan(got[3, 3:, :9]).all() and not np.isnan(got[3, :3]).any()
    assert not np.isnan(got[[0, 1, 2, 4]]).any()


def test_scores_that_are_all_minus_infinity_have_no_mass() -> None:
    k = np.full((1, 1, 4, 2), -np.inf, np.float32)
    got = attention_mass(
        np.ones((1, 1, 2), np.float32), KVView.from_arrays(k, np.ones_like(k)), [[0]], [4]
    )
    np.testing.assert_array_equal(got, 0)


def test_nobody_records_the_calls_behind_it(tmp_path: Path) -> None:
    paged = Paged(4)
    seen: list[Any] = []

    class Watcher:
        def before(self, call: Any) -> None:
            seen.append(call)

        def after(self, call: Any) -> None:
            seen.append(call)

    from tinyllm._observers import observing

    with observing(Watcher()):
        paged.check()
        assert seen == []
        tinyllm.paged_attention(paged.q, paged.view, paged.tables, paged.lengths)
        assert len(seen) == 2


def test_no_sequences_have_no_mass() -> None:
    paged = Paged(4)
    assert attention_mass(paged.q[:0], paged.view, np.zeros((0, 5), np.int32), []).shape == (
        0,
        H,
        5,
    )


BAD: list[tuple[str, dict[str, Any], type[Exception], str]] = [
    ("q is complex", {"q": np.zeros((5, H, D), complex)}, TypeError, "q must be real numbers"),
    ("q is too narrow", {"q": np.zeros((5, H, D - 1), np.float32)}, ValueError, "Dk = 24"),
    (
        "heads do not divide",
        {"q": np.zeros((5, 3, D), np.float32)},
        ValueError,
        "H a multiple of 2",
    ),
    (
        "rows for other sequences",
        {"q": np.zeros((4, H, D), np.float32)},
        ValueError,
        "4 rows for 5",
    ),
    ("kv is an array", {"kv": np.zeros(3)}, TypeError, "kv must be a KVView"),
    (
        "no context",
        {"ctx_lens": [1, 7, 0, 33, 50]},
        ValueError,
        r"ctx_lens\[2\] = 0 is outside 1 .. 52",
    ),
    (
        "too long",
        {"ctx_lens": [1, 7, 16, 33, 53]},
        ValueError,
        r"ctx_lens\[4\] = 53 is outside 1 .. 52",
    ),
    ("tables of floats", {"block_tables": [[0.5]] * 5}, TypeError, "integers"),
    ("too few tables", {"block_tables": [[0]]}, ValueError, "1 tables for 5"),
    (
        "no such block",
        {"block_tables": [[99] * 13] * 5},
        ValueError,
        r"block_tables\[0\]\[0\] = 99 is needed",
    ),
    ("window", {"window": 1.5}, TypeError, "window"),
    ("scale", {"scale": "x"}, TypeError, "scale"),
    ("scale is no number", {"scale": float("nan")}, ValueError, "scale"),
    ("softcap", {"softcap": -1.0}, ValueError, "softcap"),
    ("sinks", {"sink_logits": np.zeros(2, np.float32)}, ValueError, "sink_logits"),
    ("slopes", {"alibi_slopes": np.zeros(H, bool)}, TypeError, "alibi_slopes"),
    ("threads", {"threads": -1}, ValueError, "threads"),
]


@pytest.mark.parametrize(("what", "wrong", "error", "message"), BAD, ids=[what for what, *_ in BAD])
def test_bad_arguments_are_named(
    what: str, wrong: dict[str, Any], error: type[Exception], message: str
) -> None:
    paged = Paged(4)
    good = {"q": paged.q, "kv": paged.view, "block_tables": paged.tables, "ctx_lens": paged.lengths}
    with pytest.raises(error, match=f"attention_mass: .*{message}"):
        attention_mass(**{**good, **wrong})


def test_a_closed_cache_has_no_mass(lib: Lib) -> None:
    cache = PagedKVCache(lib, 2, 4, 1, 1, 2)
    view = cache.view(0)
    cache.close()
    with pytest.raises(ClosedError):
        attention_mass(np.zeros((1, 1, 2), np.float32), view, [[0]], [1])
