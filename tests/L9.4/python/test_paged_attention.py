# SPDX-License-Identifier: MIT
"""paged_attention over views of anyone's memory, and sequences cut at either end.

Bits come from ``tinyllm.reference`` and from decode, closeness from float64, and what a cut leaves
behind from a dictionary of what was stored.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import tinyllm
from numpy.typing import NDArray
from tinyllm import (
    ClosedError,
    ConcurrentUseError,
    KVView,
    OutOfBlocks,
    PagedKVCache,
    ThreadPool,
    TlError,
    paged_attention,
    paged_attention_decode,
    reference,
)
from tinyllm.ffi.libtinyllm import Lib, u32_ptr

F32 = np.float32
HOSTILE = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e-42, -1e-45, 3e38, -3e38, 1e-30], F32)
SINKS = np.array([-np.inf, 0, 3, -2, 50, -100, 1e30, np.nan, np.inf, 0.7], F32)
DTYPES = ("float32", "float16", "bfloat16")


def bits(a: Any) -> NDArray[np.uint32]:
    return np.ascontiguousarray(a, F32).view(np.uint32)


def assert_same_bits(a: Any, b: Any, what: str = "") -> None:
    assert a.dtype == b.dtype == F32
    np.testing.assert_array_equal(bits(a), bits(b), what)


def narrowed(a: NDArray[np.float32], dtype: str) -> NDArray[Any]:
    """float32 rounded to what a view stores, bfloat16 as its codes."""
    with np.errstate(all="ignore"):
        return reference.f32_to_bf16(a) if dtype == "bfloat16" else a.astype(dtype)


@dataclass
class Batch:
    """Rows of some sequences over blocks [n_blocks, Hkv, b, D] in random order; what nobody holds
    is NaN."""

    q: NDArray[np.float32]
    k: NDArray[Any]
    v: NDArray[Any]
    dtype: str
    tables: NDArray[np.uint32]
    ctx_lens: NDArray[np.int32]
    starts: NDArray[np.int32]
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, view: KVView | None = None, **changes: Any) -> tuple[Any, Any]:
        given: dict[str, Any] = {"cu_seqlens_q": self.starts, **self.options, **changes}
        view = view or KVView.from_arrays(self.k, self.v, dtype=self.dtype)
        return paged_attention(self.q, view, self.tables, self.ctx_lens, return_lse=True, **given)

    def wanted(self) -> tuple[Any, Any]:
        options = {"scale": self.q.shape[2] ** -0.5, **self.options}
        return reference.paged_attn(
            self.q, self.k, self.v, self.tables, self.ctx_lens, cu_seqlens_q=self.starts, **options
        )


def make_batch(
    seed: int,
    lengths: list[tuple[int, int]],
    *,
    n_kv: int = 2,
    group: int = 2,
    dims: tuple[int, int] = (8, 8),
    block: int = 4,
    dtype: str = "float16",
    spread: float = 1,
    hostile: bool = False,
    **options: Any,
) -> Batch:
    """lengths: (rows, context) of each sequence."""
    rng = np.random.default_rng(seed)
    needed = [-(-ctx // block) for _, ctx in lengths]
    ids = rng.permutation(sum(needed) + 3).astype(np.uint32)
    tables = np.full((len(lengths), max([1, *needed]) + 1), 0xDEADBEEF, np.uint32)
    k, v = (np.full((len(ids), n_kv, block, d), np.nan, F32) for d in dims)
    for s, (_, ctx) in enumerate(lengths):
        tables[s, : needed[s]], ids = ids[: needed[s]], ids[needed[s] :]
        for j in range(ctx):
            for a in (k, v):
                row = spread * rng.standard_normal((n_kv, a.shape[3]), F32)
                if hostile:
                    hit = rng.random(row.shape) < 0.01
                    row[hit] = rng.choice(HOSTILE, int(hit.sum()))
                a[tables[s, j // block], :, j % block] = row
    n_rows = [rows for rows, _ in lengths]
    q = F32(spread) * rng.standard_normal((sum(n_rows), n_kv * group, dims[0]), F32)
    return Batch(
        q, narrowed(k, dtype), narrowed(v, dtype), dtype, tables,
        np.array([ctx for _, ctx in lengths], np.int32), np.cumsum([0, *n_rows]).astype(np.int32),
        options,
    )  # fmt: skip


MIXED = [(1, 1), (1, 40), (5, 5), (0, 7), (3, 33), (17, 30), (0, 0)]


@pytest.fixture(autouse=True)
def _library(lib: Lib) -> None:
    """Says so once where the library is not built."""


# --- the bits
# -----------------------------------------------------------------------------------------------

ALONE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "v_wider_than_k": {"dims": (16, 40)},
    "k_wider_than_v": {"dims": (40, 16)},
    "latent": {"dims": (576, 512), "n_kv": 1, "group": 5},
    "softcap": {"softcap": 2.0, "spread": 3},
    "small_softcap": {"softcap": 0.03},
    "alibi": {"alibi_slopes": np.array([0.5, 2.0**-8, 0, -0.3], F32)},
    "alibi_and_softcap": {"alibi_slopes": np.array([0.5, 2.0**-8, 0, -0.3], F32), "softcap": 5.0},
    "sinks": {"sink_logits": np.array([0.5, -np.inf, 30, np.nan], F32)},
    "window": {"window": 6},
    "window_of_one": {"window": 1},
    "scale": {"scale": -1.75},
}


@pytest.mark.parametrize("name", list(ALONE))
def test_each_option_has_the_bits_of_the_reference(name: str) -> None:
    batch = make_batch(11, MIXED, **ALONE[name])
    out, lse = batch.run()
    want_out, want_lse = batch.wanted()
    assert_same_bits(out, want_out)
    assert_same_bits(lse, want_lse)


@pytest.mark.parametrize("seed", range(40))
def test_all_options_together_have_the_bits_of_the_reference(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n_kv, group = int(rng.integers(1, 3)), int(rng.choice([1, 2, 3, 5, 8]))
    heads = n_kv * group
    lengths = []
    for _ in range(int(rng.integers(1, 5))):
        rows = int(rng.choice([0, 1, 1, 2, 7, 19]))
        lengths.append((rows, max(1, rows) + int(rng.choice([0, 1, 15, 16, 60]))))
    if seed % 8 == 0:
        lengths.append((2, int(rng.choice([1025, 1100, 2060]))))
    batch = make_batch(
        seed, lengths, n_kv=n_kv, group=group, block=int(rng.choice([1, 3, 16, 33])),
        dims=(int(rng.choice([1, 8, 33, 64, 128])), int(rng.choice([1, 16, 40, 130]))),
        dtype=str(rng.choice(DTYPES)), spread=float(rng.choice([1, 4])), hostile=seed % 4 == 3,
        scale=float(F32(rng.choice([0.25, 1, -2]))),
        window=int(rng.choice([0, 1, 9, 40, 1030, 2**63 - 1])),
        softcap=float(F32(rng.choice([0, 0.5, 30, 50]))),
        alibi_slopes=F32(0.25) * rng.standard_normal(heads, F32) if seed % 3 else None,
        sink_logits=rng.choice(SINKS, heads) if seed % 2 else None,
    )  # fmt: skip
    out, lse = batch.run(threads=2 if seed % 5 == 0 else None)
    want_out, want_lse = batch.wanted()
    assert_same_bits(out, want_out, f"out of {lengths}, {batch.options}")
    assert_same_bits(lse, want_lse, f"lse of {lengths}, {batch.options}")


def plain(batch: Batch) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What the options mean, in float64, one row and one head after the other."""
    k, v = (reference.widened(a).astype(np.float64) for a in (batch.k, batch.v))
    n_heads, block = batch.q.shape[1], k.shape[2]
    group = n_heads // k.shape[1]
    window, cap = batch.options.get("window", 0), batch.options.get("softcap", 0)
    slopes, sinks = batch.options.get("alibi_slopes"), batch.options.get("sink_logits")
    out, lse = np.zeros((*batch.q.shape[:2], v.shape[3])), np.zeros(batch.q.shape[:2])
    for s, ctx in enumerate(batch.ctx_lens):
        for row in range(batch.starts[s], batch.starts[s + 1]):
            p = ctx - batch.starts[s + 1] + row
            j = np.arange(max(0, p - window + 1) if window > 0 else 0, p + 1)
            blocks = batch.tables[s][j // block]
            for h in range(n_heads):
                score = k[blocks, h // group, j % block] @ batch.q[row, h].astype(np.float64)
                score *= batch.options.get("scale", k.shape[3] ** -0.5)
                if cap:
                    score = cap * np.tanh(score / cap)
                if slopes is not None:
                    score = score + float(slopes[h]) * (j - p)
                joined = score if sinks is None else np.append(score, sinks[h])
                lse[row, h] = np.log(np.exp(joined - joined.max()).sum()) + joined.max()
                out[row, h] = np.exp(score - lse[row, h]) @ v[blocks, h // group, j % block]
    return out, lse


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_options_mean_what_they_say(dtype: str) -> None:
    batch = make_batch(
        5, MIXED, dims=(16, 24), dtype=dtype, spread=2, window=21, softcap=3.0, scale=0.6,
        alibi_slopes=np.array([0.5, 0.25, 0.125, 0.0625], F32),
        sink_logits=np.array([1, -1, 3, 0], F32),
    )  # fmt: skip
    for got, want in zip(batch.run(), plain(batch), strict=True):
        np.testing.assert_allclose(got, want, atol=2e-5)


def test_hand_example() -> None:
    """Two keys. Equal scores halve the values; a slope of ln 2 halves the weight of the older one;
    a sink that scores as they do takes a third."""
    k, v = np.zeros((1, 1, 2, 1), F32), np.array([[[[3, 0], [6, 9]]]], F32)
    view, q = KVView.from_arrays(k, v), np.ones((1, 1, 1), F32)

    def run(**options: Any) -> Any:
        return paged_attention(q, view, [[0]], [2], **options)[0, 0]

    np.testing.assert_allclose(run(), [4.5, 4.5], rtol=1e-6)
    np.testing.assert_allclose(run(alibi_slopes=np.log([2]).astype(F32)), [5, 6], rtol=1e-6)
    np.testing.assert_allclose(run(sink_logits=np.zeros(1, F32)), [3, 3], rtol=1e-6)
    np.testing.assert_array_equal(run(window=1), [6, 9])


def test_values_that_every_type_holds_give_the_same_bits_from_each() -> None:
    rng = np.random.default_rng(3)
    k, v = rng.integers(-100, 100, (2, 9, 2, 4, 8)).astype(F32) / 16
    q = rng.standard_normal((6, 4, 8), F32)
    outs = [
        paged_attention(
            q, KVView.from_arrays(narrowed(k, dtype), narrowed(v, dtype), dtype=dtype),
            [[7, 3, 1, 0, 2]], [18], cu_seqlens_q=[0, 6],
        )
        for dtype in DTYPES
    ]  # fmt: skip
    assert_same_bits(outs[0], outs[1])
    assert_same_bits(outs[0], outs[2])


# --- one function, every cut
# --------------------------------------------------------------------------------


@pytest.fixture
def cache() -> Iterator[PagedKVCache]:
    """40 blocks of 4 positions, two layers, 2 KV heads of 8."""
    with PagedKVCache(None, 40, 4, 2, 2, 8) as c:
        yield c


def fill(cache: PagedKVCache, seq: Any, n: int, seed: int = 0) -> None:
    """Adds n positions to every layer."""
    rng = np.random.default_rng(seed)
    for layer in range(cache.n_layers):
        k, v = rng.standard_normal((2, cache.n_kv_heads, n, cache.d_head), F32)
        cache.append(seq, layer, k, v)


def over(cache: PagedKVCache, seqs: Any, q: Any, layer: int = 0, **options: Any) -> Any:
    """paged_attention over sequences of a cache, one row each unless told otherwise."""
    tables = [cache.block_table(seq) for seq in seqs]
    return paged_attention(
        q, cache.view(layer), tables, [cache.seq_len(s, layer) for s in seqs], **options
    )


@pytest.mark.parametrize("window", [0, 1, 5])
@pytest.mark.parametrize("layer", [0, 1])
def test_single_rows_have_the_bits_of_decode(cache: PagedKVCache, window: int, layer: int) -> None:
    for seed, (seq, n) in enumerate({"a": 1, "b": 9, "c": 30}.items()):
        cache.add_seq(seq)
        fill(cache, seq, n, seed)
    q = np.random.default_rng(9).standard_normal((3, 6, 8), F32)
    decoded = paged_attention_decode(q, cache, ["a", "b", "c"], layer, window=window, scale=0.3)
    assert_same_bits(over(cache, ["a", "b", "c"], q, layer, window=window, scale=0.3), decoded)


OVER_A_CACHE: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale": {"scale": 0.3},
    "window": {"window": 5},
    "softcap": {"softcap": 2.0},
    "slopes": {"alibi_slopes": np.linspace(0.1, 0.6, 6)},
    "sinks": {"sink_logits": np.arange(6)},
    "lse": {"return_lse": True},
    "threads": {"threads": 2},
    "rows": {"cu_seqlens_q": [0, 1, 4, 6]},
    "all": {
        "cu_seqlens_q": [0, 1, 4, 6], "scale": 0.3, "window": 5, "softcap": 2.0, "threads": 2,
        "alibi_slopes": np.linspace(0.1, 0.6, 6), "sink_logits": np.arange(6), "return_lse": True,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", OVER_A_CACHE)
def test_a_cache_and_a_batch_of_it_are_what_their_tables_say(
    cache: PagedKVCache, name: str
) -> None:
    """Also where tables, and the lengths of one layer before those of the other, change between two
    calls over one batch."""
    seqs, options = ["a", "b", "c"], OVER_A_CACHE[name]
    for seed, (seq, n) in enumerate({"a": 3, "b": 9, "c": 30}.items()):
        cache.add_seq(seq)
        fill(cache, seq, n, seed)
    rng = np.random.default_rng(11)
    q = rng.standard_normal((6 if "cu_seqlens_q" in options else 3, 6, 8), F32)
    with cache.batch(seqs) as step:
        assert (step.seq_ids, len(step)) == (seqs, 3)
        for _turn in range(5):
            for layer in (0, 1):
                cache.append_batch(seqs, layer, *rng.standard_normal((2, 3, 2, 8), F32))
                for read in (0, 1):
                    want = over(cache, seqs, q, read, **options)
                    assert_all_same(paged_attention(q, cache, seqs, read, **options), want)
                    assert_all_same(paged_attention(q, step, read, **options), want)
                    assert_all_same(paged_attention(q, step, layer=read, **options), want)
                    lengths = step.lengths(read)
                    assert lengths.dtype == np.int32
                    assert lengths.tolist() == [cache.seq_len(seq, read) for seq in seqs]
                    assert_all_same(
                        paged_attention(q, cache.view(read), step.tables, lengths, **options), want
                    )
            cache.free("b")
            cache.fork("a", "b")  # another sequence of that name


def assert_all_same(found: Any, want: Any) -> None:
    if type(want) is not tuple:
        found, want = (found,), (want,)
    for a, b in zip(found, want, strict=True):
        assert_same_bits(a, b)


def test_out_of_a_call_over_a_batch_may_lie_anywhere(cache: PagedKVCache) -> None:
    cache.add_seq("a")
    fill(cache, "a", 9)
    q = np.ones((1, 4, 8), F32)
    want = paged_attention(q, cache, ["a"], 0)
    for out in (np.empty((1, 4, 8), F32), np.empty((4, 1, 9), F32)[:, :, :8].transpose(1, 0, 2)):
        assert paged_attention(q, cache, ["a"], 0, out=out) is out
        assert_same_bits(out, want)


def test_a_batch_of_nobody_is_empty(cache: PagedKVCache) -> None:
    q = np.empty((0, 4, 8), F32)
    with cache.batch([]) as step:
        assert paged_attention(q, step, 0).shape == (0, 4, 8)
        assert paged_attention(q, step, 1, return_lse=True)[1].shape == (0, 4)
        assert step.lengths(0).shape == (0,)
        assert step.tables.shape[0] == 0


def test_calls_over_a_cache_that_are_refused_write_nothing(cache: PagedKVCache) -> None:
    for seq in ("a", "empty", "trimmed"):
        cache.add_seq(seq)
    fill(cache, "a", 9)
    fill(cache, "trimmed", 20)
    cache.trim_front("trimmed", 10)
    q, out = np.ones((1, 4, 8), F32), np.full((1, 4, 8), 7, F32)
    view, a, late = cache.view(0), cache.batch(["a"]), cache.batch(["trimmed"])
    cache.fork("a", "gone")
    gone = cache.batch(["gone"])
    cache.free("gone")
    rows = {"cu_seqlens_q": [0, 1], "window": 13}
    for args, options, error, words in (
        ((cache,), {}, TypeError, "over a cache seq_ids must be given"),
        ((cache, ["a"]), {}, TypeError, "it takes seq_ids and layer, over a batch layer"),
        ((cache, ["a"], 0), {"layer": 0}, TypeError, "it takes seq_ids and layer"),
        ((a,), {}, TypeError, "it takes seq_ids and layer, over a batch layer"),
        ((a, [[0]], [9]), {}, TypeError, "it takes seq_ids and layer"),
        ((view, [[0]], [9]), {"layer": 0}, TypeError, "a view is of one layer"),
        ((cache, "a", 0), {}, TypeError, "seq_ids must be a list of ids, not 'a'"),
        ((cache, ["x"], 0), {}, KeyError, "paged_attention: no sequence 'x'"),
        ((gone, 0), {}, KeyError, "paged_attention: no sequence 'gone'"),
        ((cache, ["empty"], 0), {}, ValueError, "sequence 'empty' holds no position in layer 0"),
        ((cache, ["a"], 2), {}, ValueError, "layer = 2"),
        ((a, -1), {}, ValueError, "layer = -1"),
        ((a, 2), {"softcap": 1.0}, ValueError, "layer = 2"),
        ((cache, ["a", "a"], 0), {}, ValueError, "q has 1 rows for 2 sequences"),
        ((late, 0), {"window": 13}, ValueError, "position 7 of sequence 'trimmed'"),
        ((late, 0), rows, ValueError, "position 7 of sequence 'trimmed'"),
        ((late, 0), {"softcap": 1.0}, ValueError, "position 0 of sequence 'trimmed'"),
        ((a, 0), {"cu_seqlens_q": [0, 2]}, ValueError, "q has 1 rows"),
        ((late, 0), {"cu_seqlens_q": [0, 1, 1], "window": 9}, ValueError, "cu_seqlens_q"),
        ((a, 0), {"out": q}, ValueError, "out overlaps q"),
    ):  # fmt: skip
        with pytest.raises(error, match=words):
            paged_attention(q, *args, **{"out": out, **options})  # type: ignore[arg-type]
    assert (out == 7).all()
    assert (q == 1).all()
    two = np.ones((2, 4, 8), F32)
    paged_attention(two, late, 0, cu_seqlens_q=[0, 2], window=11)  # from position 8 on
    with pytest.raises(ValueError, match="position 7 of sequence 'trimmed'"):
        paged_attention(two, late, 0, cu_seqlens_q=[0, 2], window=12)
    with pytest.raises(KeyError, match="batch: no sequence 'x'"):
        cache.batch(["a", "x"])
    with pytest.raises(ValueError, match="lengths: layer = 2"):
        a.lengths(2)


def test_every_row_of_a_chunk_has_the_bits_of_decode_at_its_length(cache: PagedKVCache) -> None:
    cache.add_seq("a")
    fill(cache, "a", 23)
    q = np.random.default_rng(9).standard_normal((23, 6, 8), F32)
    rows = over(cache, ["a"], q, 1, cu_seqlens_q=[0, 23], window=10)
    for p in reversed(range(23)):
        cache.truncate("a", p + 1)
        assert_same_bits(
            paged_attention_decode(q[p : p + 1], cache, ["a"], 1, window=10)[0], rows[p], str(p)
        )


@pytest.mark.parametrize("cuts", [[], [1], [16], [5, 6, 20], list(range(1, 45))])
@pytest.mark.parametrize("threads", [None, 2])
def test_a_prompt_cut_anywhere_has_the_same_bits(cuts: list[int], threads: Any) -> None:
    whole = make_batch(7, [(45, 45)], softcap=4.0, alibi_slopes=np.array([0.5, 0.1, 0.2, 0.3], F32))
    out, lse = whole.run()
    view = KVView.from_arrays(whole.k, whole.v)
    for begin, end in zip([0, *cuts], [*cuts, 45], strict=True):
        part, part_lse = paged_attention(
            whole.q[begin:end], view, whole.tables, [end], cu_seqlens_q=[0, end - begin],
            return_lse=True, threads=threads, **whole.options,
        )  # fmt: skip
        assert_same_bits(part, out[begin:end])
        assert_same_bits(part_lse, lse[begin:end])
    together = paged_attention(  # the pieces as so many sequences of one batch
        whole.q, view, np.repeat(whole.tables, len(cuts) + 1, axis=0), [*cuts, 45],
        cu_seqlens_q=[0, *cuts, 45], threads=threads, **whole.options,
    )  # fmt: skip
    assert_same_bits(together, out)


def test_a_sequence_alone_has_the_bits_it_has_in_a_batch() -> None:
    batch = make_batch(8, MIXED, window=9)
    out, lse = batch.run()
    view = KVView.from_arrays(batch.k, batch.v)
    for s, (n_rows, ctx) in enumerate(MIXED):
        own = slice(batch.starts[s], batch.starts[s + 1])
        alone, alone_lse = paged_attention(
            batch.q[own], view, batch.tables[s : s + 1], [ctx], cu_seqlens_q=[0, n_rows], window=9,
            return_lse=True,
        )  # fmt: skip
        assert_same_bits(alone, out[own])
        assert_same_bits(alone_lse, lse[own])


def test_threads_change_no_bit() -> None:
    batch = make_batch(9, [*MIXED, (1, 1100)], softcap=10.0)
    out, lse = batch.run()
    with ThreadPool(3) as pool:
        for threads in (0, 1, 2, pool, np.int64(2)):
            for got, want in zip(batch.run(threads=threads), (out, lse), strict=True):
                assert_same_bits(got, want)
    with pytest.raises(ClosedError, match="ThreadPool is closed"):
        batch.run(threads=pool)


def test_threads_that_share_a_long_sequence_change_no_bit() -> None:
    sinks = np.array([1, 30, -np.inf, 0], F32)
    lengths = [(1, 9000), (2, 5100), (1, 900)]
    batch = make_batch(10, lengths, n_kv=1, group=4, block=64, dims=(64, 32), sink_logits=sinks)
    out, lse = batch.run()
    for threads in (2, 3):
        for got, want in zip(batch.run(threads=threads), (out, lse), strict=True):
            assert_same_bits(got, want)


# --- anyone's memory
# ----------------------------------------------------------------------------------------


def layouts(k: Any, v: Any) -> dict[str, tuple[Any, Any, Any]]:
    """K and V [n, Hkv, b, D] as other engines lay them out: k, v, and the name of the layout."""
    tokens_first = [np.ascontiguousarray(a.transpose(0, 2, 1, 3)) for a in (k, v)]
    side_by_side = np.stack([k, v], axis=2)  # [n, Hkv, 2, b, D]
    fused = np.stack(tokens_first, axis=1)  # [n, 2, b, Hkv, D]
    halves = np.stack([k, v])  # [2, n, Hkv, b, D]
    width = k.shape[3]
    padded = np.zeros((*k.shape[:3], 2 * width + 3), k.dtype)
    padded[..., 1 : 1 + width], padded[..., 2 + width : 2 + 2 * width] = k, v
    all_layers = np.zeros((k.shape[0], 3, 2, *k.shape[1:]), k.dtype)
    all_layers[:, 1, 0], all_layers[:, 1, 1] = k, v
    heads_first = [
        np.ascontiguousarray(a.transpose(1, 0, 2, 3)).transpose(1, 0, 2, 3) for a in (k, v)
    ]
    return {
        "hnd": (k, v, "HND"),
        "nhd": (*tokens_first, "NHD"),
        "k_and_v_side_by_side": (side_by_side[:, :, 0], side_by_side[:, :, 1], "HND"),
        "fused": (fused[:, 0], fused[:, 1], "NHD"),
        "halves": (halves[0], halves[1], "HND"),
        "padded": (padded[..., 1 : 1 + width], padded[..., 2 + width : 2 + 2 * width], "HND"),
        "a_layer_of_many": (all_layers[:, 1, 0], all_layers[:, 1, 1], "HND"),
        "heads_first": (*heads_first, "HND"),
        "one_of_each": (k, tokens_first[1].transpose(0, 2, 1, 3), "HND"),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", list(layouts(*np.zeros((2, 1, 1, 1, 1)))))
def test_every_layout_is_read_in_place_and_gives_the_same_bits(name: str, dtype: str) -> None:
    batch = make_batch(21, MIXED, dtype=dtype)
    out, _ = batch.run()
    k, v, layout = layouts(batch.k, batch.v)[name]
    view = KVView.from_arrays(k, v, layout, dtype)
    assert (view.num_blocks, view.n_kv_heads, view.block_size, view.head_dims) == (
        len(batch.k),
        2,
        4,
        (8, 8),
    )
    assert_same_bits(batch.run(view)[0], out)
    v[...] = narrowed(
        np.ones((), F32), dtype
    )  # no copy was made: what is written now is what is read
    ones = batch.run(view)[0]
    np.testing.assert_allclose(ones, 1, rtol=1e-6)


def test_contiguous_tensors_are_blocks_of_their_own_length() -> None:
    rng = np.random.default_rng(2)
    k, v = rng.standard_normal((2, 3, 2, 50, 8), F32)
    q = rng.standard_normal((3, 4, 12, 8), F32)
    want = tinyllm.flash_attention(q, k, v, q_offset=38, window=30)
    rows = np.ascontiguousarray(q.transpose(0, 2, 1, 3)).reshape(36, 4, 8)
    got = paged_attention(
        rows,
        KVView.from_arrays(k, v),
        [[0], [1], [2]],
        [50] * 3,
        cu_seqlens_q=[0, 12, 24, 36],
        window=30,
    )
    assert_same_bits(got.reshape(3, 12, 4, 8).transpose(0, 2, 1, 3), want)


def test_one_block_head_or_slot_may_have_any_stride() -> None:
    batch = make_batch(4, [(2, 3)], n_kv=1, group=2)
    one = int(batch.tables[0, 0])
    k, v = (np.lib.stride_tricks.as_strided(a[one : one + 1], strides=(-64, 0, *a.strides[2:]))
            for a in (batch.k, batch.v))  # fmt: skip
    got = paged_attention(batch.q, KVView.from_arrays(k, v), [[0]], [3], cu_seqlens_q=[0, 2])
    assert_same_bits(got, batch.run()[0])


def test_sixteen_bit_integers_hold_what_their_name_says() -> None:
    for dtype, code in (("bfloat16", np.int16), ("bfloat16", np.uint16), ("float16", np.uint16)):
        batch = make_batch(5, MIXED, dtype=dtype)
        view = KVView.from_arrays(batch.k.view(code), batch.v.view(code), dtype=dtype)
        assert view.dtype == dtype
        assert_same_bits(batch.run(view)[0], batch.wanted()[0])


class Capsule:
    """An array of another library: nothing but DLPack."""

    def __init__(self, a: NDArray[Any]) -> None:
        self.a = a

    def __dlpack__(self, **options: Any) -> Any:
        return self.a.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self.a.__dlpack_device__()


@pytest.mark.parametrize("wrap", [Capsule, memoryview])
def test_arrays_of_other_libraries_are_read_and_written_in_place(
    wrap: Callable[[Any], Any],
) -> None:
    batch = make_batch(6, MIXED, dtype="float32")
    sinks = np.array([0, 1, 2, 3], F32)
    want, _ = batch.run(sink_logits=sinks)
    room = np.zeros_like(batch.q)
    writes_tensors = np.lib.NumpyVersion(np.__version__) >= "2.2.5"
    out = wrap(room) if wrap is memoryview or writes_tensors else room
    given = paged_attention(
        wrap(batch.q), KVView.from_arrays(wrap(batch.k), wrap(batch.v)), wrap(batch.tables),
        wrap(batch.ctx_lens), cu_seqlens_q=wrap(batch.starts), sink_logits=wrap(sinks), out=out,
    )  # fmt: skip
    assert given is out
    assert_same_bits(room, want)


def test_a_view_keeps_its_memory_alive(cache: PagedKVCache) -> None:
    batch = make_batch(7, [(1, 9)])
    k = batch.k.copy()
    gone = weakref.ref(k)
    view = KVView.from_arrays(k, k)
    del k
    gc.collect()
    assert gone() is not None
    batch.run(view)
    del view
    gc.collect()
    assert gone() is None

    own = PagedKVCache(None, 4, 4, 1, 2, 8)
    own.add_seq("a")
    fill(own, "a", 5)
    q = np.ones((1, 2, 8), F32)
    want = paged_attention_decode(q, own, ["a"], 0)
    view, table = own.view(0), own.block_table("a")
    del own
    gc.collect()
    assert_same_bits(paged_attention(q, view, [table], [5]), want)


def test_the_view_of_a_closed_cache_says_closed() -> None:
    cache = PagedKVCache(None, 4, 4, 1, 2, 8)
    cache.add_seq("a")
    fill(cache, "a", 5)
    view, table = cache.view(0), cache.block_table("a")
    with view.reading(), pytest.raises(ConcurrentUseError, match="so it cannot be closed"):
        cache.close()
    cache.close()
    with pytest.raises(ClosedError, match="PagedKVCache is closed"):
        paged_attention(np.ones((1, 2, 8), F32), view, [table], [5])


# --- tables, lengths, rows and outputs in other forms
# -------------------------------------------------------


def test_tables_and_lengths_of_any_integer_type() -> None:
    batch = make_batch(13, MIXED)
    out, _ = batch.run()
    view = KVView.from_arrays(batch.k, batch.v)
    used = [-(-ctx // 4) for _, ctx in MIXED]
    ragged = [row[:n] for row, n in zip(batch.tables, used, strict=True)]
    wide = np.full((len(MIXED), max(used)), -1)
    for line, row in zip(wide, ragged, strict=True):
        line[: len(row)] = row
    narrow = wide.astype(np.int32)
    forms: list[Any] = [
        wide, narrow, wide.astype(np.int16), wide.astype(np.uint32), wide.astype(">i4"),
        np.asfortranarray(wide), np.asfortranarray(narrow), np.repeat(narrow, 2, axis=1)[:, ::2],
        ragged, [row.tolist() for row in ragged], tuple(row.astype(np.uint8) for row in ragged),
    ]  # fmt: skip
    for tables in forms:
        got = paged_attention(batch.q, view, tables, batch.ctx_lens, cu_seqlens_q=batch.starts)
        assert_same_bits(got, out)
    both = batch.ctx_lens, batch.starts
    lists: list[Any] = [
        [a.astype(t) for a in both] for t in (np.int64, np.uint8, np.uint64, ">i2", "<i4")
    ]
    lists += [
        [a.tolist() for a in both],
        [tuple(a) for a in both],
        [np.repeat(a, 2)[::2] for a in both],
    ]
    for lengths, starts in lists:
        got = paged_attention(batch.q, view, batch.tables, lengths, cu_seqlens_q=starts)
        assert_same_bits(got, out)


def test_only_entries_of_visible_positions_are_looked_at() -> None:
    batch = make_batch(14, [(3, 33), (1, 9)], window=6)
    out, _ = batch.run()
    tables = batch.tables.copy()
    tables[0, :6] = 0xFFFFFFFF  # rows at 30 .. 32 see 25 .. 32; block 6 begins at 24
    tables[1, 0] = 0xFFFFFFFF  # the row at 8 sees 3 .. 8, so block 0 is needed after all
    view = KVView.from_arrays(batch.k, batch.v)
    with pytest.raises(ValueError, match=r"sequence 1: .*4294967295"):
        paged_attention(batch.q, view, tables, batch.ctx_lens, cu_seqlens_q=batch.starts, window=6)
    tables[1, 0] = batch.tables[1, 0]
    got = paged_attention(
        batch.q, view, tables, batch.ctx_lens, cu_seqlens_q=batch.starts, window=6
    )
    assert_same_bits(got, out)


def test_rows_of_q_may_lie_anywhere_and_stay_as_they_are() -> None:
    batch = make_batch(15, MIXED)
    out, _ = batch.run()
    q = batch.q
    fused = np.full((len(q), 3, *q.shape[1:]), np.nan, F32)
    fused[:, 1] = q
    wide = np.full((*q.shape[:2], 16), np.nan, F32)
    wide[:, :, ::2] = q
    raw = np.zeros(q.nbytes + 1, np.uint8)
    raw[1:] = np.frombuffer(q.tobytes(), np.uint8)
    readonly = q.copy()
    readonly.flags.writeable = False
    for a in (
        fused[:, 1],
        np.ascontiguousarray(q.transpose(1, 0, 2)).transpose(1, 0, 2),
        q[::-1, ::-1].copy()[::-1, ::-1],
        np.ascontiguousarray(q[..., ::-1])[..., ::-1],
        wide[:, :, ::2],
        raw[1:].view(F32).reshape(q.shape),
        readonly,
    ):
        before = a.copy()
        batch.q = a
        assert_same_bits(batch.run()[0], out)
        np.testing.assert_array_equal(a, before)
    batch.q = np.broadcast_to(q[:1, :1], q.shape)
    spread_out = batch.run()[0]
    batch.q = batch.q.copy()
    assert_same_bits(batch.run()[0], spread_out)


def test_out_is_written_where_it_lies_and_nothing_beside_it() -> None:
    batch = make_batch(16, MIXED, dims=(8, 12))
    want, want_lse = batch.run()
    shape = want.shape
    beside = np.full((shape[0] + 2, 3, *shape[1:]), np.nan, F32)
    heads_first = np.full((shape[1], shape[0], shape[2] + 5), np.nan, F32)
    for room, out in (
        (beside, beside[1:-1, 1]),
        (heads_first, heads_first[:, :, 2:-3].transpose(1, 0, 2)),
    ):
        given, lse = batch.run(out=out)
        assert given is out
        assert_same_bits(out, want)
        assert_same_bits(lse, want_lse)
        assert np.isnan(room).sum() == room.size - out.size


def test_results_have_the_types_and_shapes_they_say() -> None:
    batch = make_batch(17, [(2, 5), (1, 1)], dims=(8, 3))
    view = KVView.from_arrays(batch.k, batch.v)
    out = paged_attention(batch.q, view, batch.tables, batch.ctx_lens, cu_seqlens_q=batch.starts)
    assert type(out) is np.ndarray
    assert out.dtype == F32
    assert out.shape == (3, 4, 3)
    both = batch.run()
    assert (both[1].dtype, both[1].shape) == (F32, (3, 4))
    assert_same_bits(out, both[0])
    nobody = paged_attention(batch.q[:0], view, np.empty((0, 3), np.uint32), [], return_lse=True)
    assert [a.shape for a in nobody] == [(0, 4, 3), (0, 4)]
    assert paged_attention(batch.q[:0], view, [[], []], [0, 0], cu_seqlens_q=[0, 0, 0]).shape == (
        0,
        4,
        3,
    )


def test_window_none_zero_and_negative_are_no_window() -> None:
    batch = make_batch(18, MIXED)
    out, _ = batch.run()
    for window in (None, 0, -1, -(2**63), 40, 2**63 - 1):
        assert_same_bits(batch.run(window=window)[0], out)


# --- what is refused
# ----------------------------------------------------------------------------------------


class TestRefused:
    """Every bad call raises, with the function, the argument and the value, and leaves ``out``
    alone."""

    @pytest.fixture(autouse=True)
    def _prepared(self) -> Iterator[None]:
        self.batch = make_batch(30, [(2, 5), (1, 9)])
        self.out = np.full(self.batch.q.shape, 7, F32)
        yield
        assert (self.out == 7).all()

    def refuses(self, error: type[Exception], says: str, **changes: Any) -> None:
        b = self.batch
        given: dict[str, Any] = {
            "q": b.q, "kv": KVView.from_arrays(b.k, b.v), "block_tables": b.tables,
            "ctx_lens": b.ctx_lens, "cu_seqlens_q": b.starts, "out": self.out, **changes,
        }  # fmt: skip
        with pytest.raises(error, match=f"^paged_attention: {says}"):
            paged_attention(**given)

    def test_no_view(self) -> None:
        words = "kv must be a KVView, a PagedKVCache or a batch of one, not tuple"
        self.refuses(TypeError, words, kv=(self.batch.k, self.batch.v))

    def test_q(self) -> None:
        q = self.batch.q
        for dtype in (bool, complex, object, "S4"):
            self.refuses(TypeError, "q must be real numbers, not", q=q.astype(dtype))
        for bad in (None, {1.0}, [[["1"]]], [[1.0], [2.0, 3.0]], np.ma.array(q)):
            self.refuses(TypeError, "q must be", q=bad)
        self.refuses(ValueError, r"q must have 3 axes, its shape is \(\)", q=1.0)
        self.refuses(ValueError, r"q must have 3 axes, its shape is \(3, 4\)", q=q[..., 0])
        self.refuses(ValueError, r"q has shape \(3, 4, 7\).* Dk = 8", q=q[..., :7])
        self.refuses(
            ValueError, ".*H = 3 is not a positive multiple of .* 2 KV heads", q=q[:, :3], out=None
        )
        self.refuses(
            ValueError, ".*H = 0 is not a positive multiple of .* 2 KV heads", q=q[:, :0], out=None
        )

    def test_row_starts(self) -> None:
        for starts, says in (
            ([0, 2], r"cu_seqlens_q has shape \(2,\), expected \[B\+1\] = \(3,\)"),
            ([0, 2, 4], r"cu_seqlens_q\[2\] = 4, q has 3 rows"),
            ([0, 2, 2], r"cu_seqlens_q\[2\] = 2, q has 3 rows"),
            ([1, 2, 3], r".*cu_seqlens_q\[0\] = 1"),
            ([0, 4, 3], r".*sequence 1: .*3.*4|.*cu_seqlens_q\[2\] = 3"),
            ([0, 2, 2**31], rf"cu_seqlens_q\[2\] = {2**31} is outside"),
            ([[0, 2, 3]], "cu_seqlens_q must have 1 axis"),
            (None, "q has 3 rows for 2 sequences"),
        ):
            self.refuses(ValueError, says, cu_seqlens_q=starts)
        for bad in ([0, 2.0, 3], np.array([False, True, True]), "023", 3):
            self.refuses(TypeError, "cu_seqlens_q must be", cu_seqlens_q=bad)

    def test_lengths(self) -> None:
        for lengths, says in (
            ([1, 9], ".*sequence 0: .*1"),
            ([5, 0], ".*sequence 1: .*0"),
            ([5, 17], ".*sequence 1: .*17"),
            ([5, -1], ".*sequence 1: .*-1"),
            ([5, 2**31], rf"ctx_lens\[1\] = {2**31} is outside"),
            ([5, 2**32 + 9], rf"ctx_lens\[1\] = {2**32 + 9} is outside"),
            ([5], r"cu_seqlens_q has shape \(3,\), expected \[B\+1\] = \(2,\)"),
        ):
            self.refuses(ValueError, says, ctx_lens=lengths)
        self.refuses(
            TypeError, "ctx_lens must be integers, not float64", ctx_lens=np.array([5.0, 9.0])
        )

    def test_tables(self) -> None:
        tables = self.batch.tables
        beyond = tables.copy()
        beyond[1, 2] = n_blocks = len(self.batch.k)
        for bad, says in (
            (beyond, rf".*sequence 1: .*\[2\] = {n_blocks}"),
            (tables[:1], "block_tables has 1 tables for 2 sequences"),
            (tables[0], "block_tables must have 2 axes"),
            (tables[:, :2], ".*sequence 1: .*9"),
            ([tables[0], tables[1, :2]], ".*sequence 1: .*4294967295"),
            (tables[..., None], "block_tables must have 2 axes"),
            ([[2**32, 0], [1, 2, 3]], r"block_tables\[0\] has an entry 4294967296"),
            (np.array([[0, 2**40]] * 2), f"block_tables has an entry {2**40}"),
            ([], "block_tables has 0 tables for 2 sequences"),
        ):
            self.refuses(ValueError, says, block_tables=bad)
        self.refuses(
            TypeError, "block_tables must be integers, not float32", block_tables=tables.astype(F32)
        )
        self.refuses(TypeError, r"block_tables\[1\] must be integers", block_tables=[[0, 1], [0.5]])
        self.refuses(TypeError, "block_tables must be an array", block_tables=None)

    def test_options(self) -> None:
        out_of_range: list[tuple[dict[str, Any], str]] = [
            ({"window": 2**63}, f"window = {2**63}"),
            ({"softcap": -1.0}, "softcap must be 0 or a positive float32, not -1.0"),
            ({"softcap": float("nan")}, "softcap must be"),
            ({"softcap": float("inf")}, "softcap must be"),
            ({"softcap": 1e60}, r"softcap must be .* not 1e\+60"),
            ({"softcap": 1e-60}, "softcap must be .* not 1e-60"),
            ({"scale": float("nan")}, ".*scale is NaN"),
            ({"threads": -1}, "threads = -1"),
            (
                {"sink_logits": np.zeros(3, F32)},
                r"sink_logits has shape \(3,\), expected \[H\] = \(4,\)",
            ),
            ({"alibi_slopes": np.zeros((1, 4), F32)}, "alibi_slopes must have 1 axis, "),
        ]
        for changes, says in out_of_range:
            self.refuses(ValueError, says, **changes)
        of_another_type: list[tuple[dict[str, Any], str]] = [
            ({"window": 1.0}, "window must be an integer"),
            ({"softcap": "1"}, "softcap must be a number"),
            ({"softcap": None}, "softcap must be a number"),
            ({"softcap": True}, "softcap must be a number"),
            ({"scale": np.bool_(True)}, "scale must be a number"),
            ({"threads": 1.5}, "threads must be"),
            ({"sink_logits": np.zeros(4, bool)}, "sink_logits must be real numbers, not bool"),
            ({"alibi_slopes": "0000"}, "alibi_slopes must be"),
        ]
        for changes, says in of_another_type:
            self.refuses(TypeError, says, **changes)

    def test_out(self) -> None:
        shape = self.out.shape
        readonly = np.zeros(shape, F32)
        readonly.flags.writeable = False
        for out in (np.zeros((*shape[:2], 16), F32)[..., ::2], readonly, np.zeros(shape[1:], F32),
                    np.zeros((*shape[:2], 9), F32), np.zeros((4, *shape[1:]), F32)):  # fmt: skip
            self.refuses(ValueError, "out", out=out)
        for bad in (np.zeros(shape), np.zeros(shape, ">f4"), [[[0.0]]]):
            self.refuses(TypeError, "out must be", out=bad)
        one_row = np.lib.stride_tricks.as_strided(np.zeros(8, F32), shape, (0, 0, 4))
        self.refuses(ValueError, ".*out .*share memory", out=one_row)
        self.refuses(ValueError, ".*out overlaps q", out=self.batch.q)
        assert np.isfinite(self.batch.q).all()

    def test_an_out_in_the_cache_it_reads(self) -> None:
        batch = make_batch(31, [(1, 5)], n_kv=1, group=1, dtype="float32")
        before = batch.k.copy(), batch.v.copy()
        for a in (batch.k, batch.v):
            with pytest.raises(ValueError, match="out overlaps"):
                batch.run(out=a[:1, :, 0])
        for a, b in zip((batch.k, batch.v), before, strict=True):
            np.testing.assert_array_equal(a, b)

    def test_an_instruction_set_that_is_not_here(self, run_python: Any) -> None:
        done = run_python(
            """
import numpy as np
import tinyllm
q = np.ones((1, 1, 1), np.float32)
try:
    tinyllm.paged_attention(q, tinyllm.KVView.from_arrays(q[None], q[None]), [[0]], [1])
except tinyllm.TlError as error:
    print(error.name, error.fn)
""",
            TINYLLM_ISA="mmx",
        )
        assert (done.stdout, done.stderr) == ("TL_EUNSUPPORTED tl_paged_attn_f32\n", "")

    def test_a_pool_of_another_library(self, cache: PagedKVCache, tmp_path: Any) -> None:
        twin = tmp_path / "twin.so"
        twin.write_bytes(cache.lib.path.read_bytes())
        with ThreadPool(1, lib=Lib(twin)) as pool, pytest.raises(ValueError, match=r"twin\.so"):
            paged_attention(self.batch.q[:0], cache.view(0), [], [], threads=pool)


def test_memory_no_view_can_describe_is_refused() -> None:
    fn = "^KVView.from_arrays: "
    a = np.zeros((3, 2, 4, 8), F32)
    many = np.broadcast_to(a[:1, :1, :1, :1], (2**31, 1, 1, 1))
    for k, v, says in (
        (a[0], a, r"k must have 4 axes, its shape is \(2, 4, 8\)"),
        (a, a[:2], "only the last axis may differ"),
        (a, a[:, :, :2], "only the last axis may differ"),
        (a[:, :0], a[:, :0], "no other axis empty"),
        (a, a[..., :0], "no other axis empty"),
        (a[..., ::2], a, "k has strides of .* the last axis contiguous"),
        (a, a[::-1], "v has strides of .* no stride negative"),
        (a.T, a.T, "the last axis contiguous"),
        (many, many, "0 .. 2147483647"),
    ):
        with pytest.raises(ValueError, match=fn + ".*" + says):
            KVView.from_arrays(k, v)
    odd = np.zeros(2 * a.nbytes, np.uint8)[1 : 1 + a.nbytes].view(F32).reshape(a.shape)
    with pytest.raises(ValueError, match="whole, aligned elements"):
        KVView.from_arrays(a, odd)
    for layout in ("hnd", "NHDX", None, ()):
        with pytest.raises((ValueError, TypeError), match=fn + "layout must be"):
            KVView.from_arrays(a, a, layout)  # type: ignore[arg-type]
    half, codes = a.astype(np.float16), a.astype(np.uint16)
    for k, v, dtype, says in (
        (a, half, None, "k is float32 and v float16"),
        (a.astype(np.float64), a, None, "it is float64"),
        (a.astype(">f4"), a, None, "it is >f4"),
        (codes, codes, None, "it is uint16, and dtype None"),
        (codes, codes, "float32", "it is uint16"),
        (half, half, "bfloat16", "it is float16, and dtype 'bfloat16'"),
        (
            a,
            a,
            "float64",
            "dtype must be one of float16, bfloat16, float32, int8, .*, not 'float64'",
        ),
        (a.tolist(), a, None, "it is float64"),
        (None, a, None, "k must be an array"),
    ):
        with pytest.raises(TypeError, match=fn + ".*" + says):
            KVView.from_arrays(k, v, dtype=dtype)


def test_rows_that_share_memory_are_no_cache() -> None:
    one = np.broadcast_to(np.zeros((1, 1, 1, 8), F32), (3, 2, 4, 8))
    with pytest.raises(ValueError, match=r"paged_attention: .*k_.*stride = 0"):
        paged_attention(np.ones((1, 2, 8), F32), KVView.from_arrays(one, one), [[0]], [1])


# --- writing through a view
# ---------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
def test_slots_are_written_rounded_and_no_other(dtype: str, layout: Any) -> None:
    rng = np.random.default_rng(1)
    k, v = (narrowed(np.full((5, 2, 4, d), 9, F32), dtype) for d in (6, 3))
    if layout == "NHD":
        k, v = (a.transpose(0, 2, 1, 3) for a in (k, v))
    view = KVView.from_arrays(k, v, layout, dtype)
    slots = [7, -1, 0, 19]
    new = [rng.standard_normal((4, 2, d), F32) for d in (6, 3)]
    view.write_slots(slots, *new)
    for a, given in zip((k, v), new, strict=True):
        stored = a if layout == "HND" else a.transpose(0, 2, 1, 3)
        want = narrowed(np.full(stored.shape, 9, F32), dtype)
        for t, slot in enumerate(slots):
            if slot >= 0:
                want[slot // 4, :, slot % 4] = narrowed(given[t], dtype)
        np.testing.assert_array_equal(stored, want)
    before = k.copy(), v.copy()
    own = [narrowed(a, dtype).transpose(1, 0, 2).copy().transpose(1, 0, 2) for a in new]
    k[...], v[...] = narrowed(np.full((), 9, F32), dtype), narrowed(np.full((), 9, F32), dtype)
    view.write_slots(
        np.array(slots, np.int32), *own
    )  # its own type is copied as it is, by any strides
    np.testing.assert_array_equal(k, before[0])
    np.testing.assert_array_equal(v, before[1])


def test_writes_that_are_refused_write_nothing(cache: PagedKVCache) -> None:
    a = np.zeros((5, 2, 4, 8), np.float16)
    view = KVView.from_arrays(a, a.copy())
    new = np.ones((2, 2, 8), F32)
    fn = "^KVView.write_slots: "
    for slots, k, v, error, says in (
        ([0, 20], new, new, ValueError, r".*slots\[1\] = 20"),
        ([0, -2], new, new, ValueError, r"slots\[1\] = -2 is outside -1"),
        ([3, 3], new, new, ValueError, ".*both 3"),
        ([3], new, new, ValueError, r"k has shape \(2, 2, 8\), expected \[T,Hkv,D\] = \(1, 2, 8\)"),
        ([0, 1], new, new[:, :1], ValueError, "v has shape"),
        ([0.0, 1.0], new, new, TypeError, "slots must be integers"),
        (0, new, new, TypeError, "slots must be an array or a list of integers, not one: 0"),
        ([0, 1], new, new.astype(bool), TypeError, "v must be real numbers, not bool"),
    ):
        with pytest.raises(error, match=fn + says):
            view.write_slots(slots, k, v)
    assert not a.any()
    a.flags.writeable = False
    for readonly in (KVView.from_arrays(a, a), cache.view(0)):
        with pytest.raises(ValueError, match="is read-only"):
            readonly.write_slots([0, 1], new, new)


# --- sequences cut at their end
# -----------------------------------------------------------------------------


def kv(n: int, seed: int, n_heads: int = 2, width: int = 8) -> Any:
    return (
        np.random.default_rng(seed).standard_normal((2, n_heads, n, width), F32).astype(np.float16)
    )


def refs(cache: PagedKVCache, seq: Any) -> list[int]:
    return [cache.lib.tl_kv_refs(cache.pool, int(b)) for b in cache.block_table(seq) if b >= 0]


def fills(cache: PagedKVCache, seq: Any) -> list[int]:
    return [cache.lib.tl_kv_fill(cache.pool, int(b)) for b in cache.block_table(seq) if b >= 0]


@pytest.fixture
def flat() -> Iterator[PagedKVCache]:
    """8 blocks of 4 positions, one layer."""
    with PagedKVCache(None, 8, 4, 1, 2, 8) as c:
        yield c


@pytest.mark.parametrize("length", [0, 1, 3, 4, 5, 8, 9, 10])
def test_a_cut_sequence_is_as_though_it_had_never_grown(flat: PagedKVCache, length: int) -> None:
    k, v = kv(10, 1)
    flat.add_seq("a")
    flat.append("a", 0, k, v)
    table = flat.block_table("a").tolist()
    flat.truncate("a", length)
    needed = -(-length // 4)
    assert flat.seq_len("a") == length
    assert flat.block_table("a").tolist() == table[:needed]
    assert flat.stats() == {
        "free": 8 - needed,
        "used": needed,
        "cached": 0,
        "evictions": 0,
        "unrepresentable": 0,
    }
    assert fills(flat, "a") == [min(4, length - 4 * i) for i in range(needed)]
    more = kv(7, 2)
    flat.append("a", 0, *more)
    for got, old, new in zip(flat.gather("a", 0), (k, v), more, strict=True):
        np.testing.assert_array_equal(got, np.concatenate([old[:, :length], new], axis=1))
    flat.free("a")
    assert flat.stats()["free"] == 8


def test_every_layer_is_cut(cache: PagedKVCache) -> None:
    (k, v), (k1, v1) = kv(10, 1), kv(3, 2)
    cache.add_seq("a")
    cache.append("a", 0, k, v)
    cache.append("a", 1, k1, v1)
    cache.truncate("a", 6)
    assert [cache.seq_len("a", layer) for layer in (0, 1)] == [6, 3]
    assert fills(cache, "a") == [3, 0]
    cache.truncate("a", 2)
    assert [cache.seq_len("a", layer) for layer in (0, 1)] == [2, 2]
    assert fills(cache, "a") == [2]
    assert len(cache.block_table("a")) == 1
    cache.append("a", 1, k1, v1)
    np.testing.assert_array_equal(cache.gather("a", 1)[0], np.concatenate([k1[:, :2], k1], axis=1))
    np.testing.assert_array_equal(cache.gather("a", 0)[0], k[:, :2])


@pytest.mark.parametrize("writer", ["a", "b"])
def test_a_cut_never_shows_in_a_fork(flat: PagedKVCache, writer: str) -> None:
    k, v = kv(10, 1)
    flat.add_seq("a")
    flat.append("a", 0, k, v)
    flat.fork("a", "b")
    flat.truncate("b", 6)
    assert (refs(flat, "a"), refs(flat, "b")) == ([2, 2, 1], [2, 2])
    assert fills(flat, "a") == [
        4,
        4,
        2,
    ]  # the block that is cut is shared, and stays full for the other
    assert flat.stats()["used"] == 3
    more = kv(3, 2)
    flat.append(writer, 0, *more)
    lengths = {"a": 10, "b": 6}
    for seq, n in lengths.items():
        for got, old, new in zip(flat.gather(seq, 0), (k, v), more, strict=True):
            want = old[:, :n] if seq != writer else np.concatenate([old[:, :n], new], axis=1)
            np.testing.assert_array_equal(got, want)
    assert fills(flat, "b") == ([4, 4, 1] if writer == "b" else [4, 4])
    flat.free("a")
    flat.free("b")
    assert flat.stats()["free"] == 8


def test_a_cut_registered_block_can_still_be_found_and_is_not_written(flat: PagedKVCache) -> None:
    k, v = kv(4, 1)
    flat.add_seq("a")
    flat.append("a", 0, k, v)
    (block,) = flat.block_table("a").tolist()
    flat.lib.tl_kv_register(flat.pool, block, 77)
    flat.truncate("a", 2)
    assert fills(flat, "a") == [4]
    flat.append("a", 0, *kv(1, 2))
    assert flat.block_table("a").tolist() != [block]
    assert fills(flat, "a") == [3]
    found = np.zeros(1, np.uint32)
    flat.lib.tl_kv_lookup(flat.pool, 77, u32_ptr(found))
    assert found[0] == block
    np.testing.assert_array_equal(flat._blocks.slab(block, 0, 0), k)
    assert flat.stats()["used"] == 2


def test_decode_follows_a_cut(cache: PagedKVCache) -> None:
    cache.add_seq("a")
    fill(cache, "a", 9)
    cache.fork("a", "short")
    q = np.random.default_rng(3).standard_normal((1, 4, 8), F32)
    want = paged_attention_decode(q, cache, ["a"], 1)
    fill(cache, "a", 8, seed=5)  # a draft
    other = paged_attention_decode(q, cache, ["a"], 1)
    assert (other != want).any()
    cache.truncate("a", 9)
    assert_same_bits(paged_attention_decode(q, cache, ["a"], 1), want)
    fill(cache, "a", 1, seed=6)
    fill(cache, "short", 1, seed=6)
    both = paged_attention_decode(np.concatenate([q, q]), cache, ["a", "short"], 1)
    assert_same_bits(both[0], both[1])


def test_cuts_that_are_refused_change_nothing(flat: PagedKVCache) -> None:
    flat.add_seq("a")
    flat.append("a", 0, *kv(6, 1))
    before = flat.stats(), flat.block_table("a").tolist(), fills(flat, "a")
    with pytest.raises(KeyError, match="truncate: no sequence 'b'"):
        flat.truncate("b", 0)
    for length in (7, -1, 2**64):
        with pytest.raises(ValueError, match=f"truncate: length = {length} is outside 0 .. 6"):
            flat.truncate("a", length)
    for bad in (1.0, None, True):
        with pytest.raises(TypeError, match="truncate: length must be an integer"):
            flat.truncate("a", bad)  # type: ignore[arg-type]
    assert (flat.stats(), flat.block_table("a").tolist(), fills(flat, "a")) == before
    flat.truncate("a", np.int64(6))
    assert (flat.stats(), flat.block_table("a").tolist(), fills(flat, "a")) == before


# --- sequences cut at their front
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "window", "gone"), [
    (10, 1, 2), (10, 2, 2), (10, 3, 1), (10, 6, 1), (10, 7, 0), (10, 100, 0), (10, 2**63 - 1, 0),
    (8, 1, 1), (8, 4, 1), (8, 5, 0), (1, 1, 0), (0, 1, 0),
])  # fmt: skip
def test_blocks_wholly_behind_the_window_are_given_up(
    flat: PagedKVCache, n: int, window: int, gone: int
) -> None:
    flat.add_seq("a")
    if n:
        flat.append("a", 0, *kv(n, 1))
    table = flat.block_table("a").tolist()
    for _ in "12":  # the second time there is nothing left to do
        flat.trim_front("a", window)
        assert flat.block_table("a").tolist() == [-1] * gone + table[gone:]
        assert flat.seq_len("a") == n
        used = len(table) - gone
        assert flat.stats() == {
            "free": 8 - used,
            "used": used,
            "cached": 0,
            "evictions": 0,
            "unrepresentable": 0,
        }
    flat.free("a")
    assert flat.stats()["free"] == 8


def test_attention_within_the_window_goes_on_with_the_same_bits(cache: PagedKVCache) -> None:
    for seq in "ab":
        cache.add_seq(seq)
    q = np.random.default_rng(3).standard_normal((1, 4, 8), F32)
    for step in range(12):
        for seq in "ab":
            fill(cache, seq, 3, seed=step)
        cache.trim_front("a", 10)
        for layer in (0, 1):
            for window in (10, 7, 1):
                want = paged_attention_decode(q, cache, ["b"], layer, window=window)
                assert_same_bits(
                    paged_attention_decode(q, cache, ["a"], layer, window=window), want
                )
                assert_same_bits(over(cache, ["a"], q, layer, window=window), want)
    assert (len(refs(cache, "a")), len(refs(cache, "b"))) == (3, 9)


def test_attention_that_would_read_what_is_gone_is_a_clear_error(cache: PagedKVCache) -> None:
    cache.add_seq("whole")
    cache.add_seq("a")
    fill(cache, "whole", 20)
    fill(cache, "a", 20)
    cache.trim_front("a", 10)  # keeps 8 .. 19
    q = np.ones((2, 4, 8), F32)
    out = np.full(q.shape, 7, F32)
    for window, first in ((0, 0), (None, 0), (13, 7), (40, 0), (-5, 0)):
        with pytest.raises(
            ValueError, match=f"decode: position {first} of sequence 'a' .* before 8"
        ):
            paged_attention_decode(q, cache, ["whole", "a"], 0, window=window, out=out)
        with pytest.raises(
            ValueError, match=r"paged_attention: .*sequence 1: .*\[[01]\] = 4294967295"
        ):
            over(cache, ["whole", "a"], q, window=window, out=out)
    assert (out == 7).all()
    paged_attention_decode(q, cache, ["whole", "a"], 0, window=12)
    with pytest.raises(ValueError, match="gather: position 0 of sequence 'a'"):
        cache.gather("a", 0)


def test_a_layer_that_lags_keeps_its_window(cache: PagedKVCache) -> None:
    cache.add_seq("a")
    cache.append("a", 0, *kv(20, 1))
    cache.append("a", 1, *kv(9, 2))
    cache.trim_front("a", 4)  # layer 1 still sees 5 .. 8
    assert (cache.block_table("a") < 0).tolist() == [True, False, False, False, False]
    more = kv(11, 3)
    cache.append("a", 1, *more)
    assert fills(cache, "a") == [4] * 4
    q = np.ones((1, 2, 8), F32)
    got = paged_attention_decode(q, cache, ["a"], 1, window=4)
    cache.add_seq("b")
    cache.append("b", 1, *kv(9, 2))
    cache.append("b", 1, *more)
    assert_same_bits(got, paged_attention_decode(q, cache, ["b"], 1, window=4))


def test_a_trimmed_front_stays_with_a_fork(flat: PagedKVCache) -> None:
    k, v = kv(14, 1)
    flat.add_seq("a")
    flat.append("a", 0, k, v)
    flat.fork("a", "whole")
    flat.trim_front("a", 5)  # keeps 8 .. 13
    assert refs(flat, "whole") == [1, 1, 2, 2]
    flat.fork("a", "b")
    assert refs(flat, "whole") == [1, 1, 3, 3]
    assert flat.block_table("b").tolist() == flat.block_table("a").tolist()
    np.testing.assert_array_equal(flat.gather("whole", 0)[0], k)
    flat.free("whole")
    assert flat.stats() == {"free": 6, "used": 2, "cached": 0, "evictions": 0, "unrepresentable": 0}
    flat.append("b", 0, *kv(1, 2))
    assert refs(flat, "a") == [2, 1]
    flat.free("a")
    assert flat.stats()["used"] == 2
    flat.free("b")
    assert flat.stats()["free"] == 8


def test_a_registered_block_behind_the_window_is_cached(flat: PagedKVCache) -> None:
    flat.add_seq("a")
    flat.append("a", 0, *kv(9, 1))
    first, second, _ = flat.block_table("a").tolist()
    for name, block in ((77, first), (78, second)):
        flat.lib.tl_kv_register(flat.pool, block, name)
    flat.trim_front("a", 1)
    assert flat.stats() == {"free": 5, "used": 1, "cached": 2, "evictions": 0, "unrepresentable": 0}
    flat.append("a", 0, *kv(27, 2))  # 6 blocks more, 5 are free: the tail of the chain is the sixth
    assert flat.stats() == {"free": 0, "used": 7, "cached": 1, "evictions": 1, "unrepresentable": 0}
    found = np.zeros(1, np.uint32)
    flat.lib.tl_kv_lookup(flat.pool, 77, u32_ptr(found))
    assert found[0] == first


def test_both_ends_can_be_cut(flat: PagedKVCache) -> None:
    k, v = kv(14, 1)
    flat.add_seq("a")
    flat.append("a", 0, k, v)
    flat.trim_front("a", 5)  # keeps 8 .. 13
    before = flat.stats(), flat.block_table("a").tolist()
    for length in (1, 7):
        with pytest.raises(
            ValueError, match=f"truncate: length = {length} .* before 8 were given back"
        ):
            flat.truncate("a", length)
    assert (flat.stats(), flat.block_table("a").tolist()) == before
    flat.truncate("a", 9)
    assert flat.stats()["used"] == 1
    flat.append("a", 0, *kv(1, 2))
    assert fills(flat, "a") == [2]
    flat.truncate("a", 8)
    assert (flat.stats()["used"], flat.block_table("a").tolist(), flat.seq_len("a")) == (
        0,
        [-1, -1],
        8,
    )
    more = kv(2, 3)
    flat.append("a", 0, *more)
    block = int(flat.block_table("a")[2])
    np.testing.assert_array_equal(flat._blocks.slab(block, 0, 1)[:, :2], more[1])
    flat.truncate("a", 0)
    assert (flat.stats()["free"], flat.block_table("a").tolist()) == (8, [])
    flat.append("a", 0, k, v)
    np.testing.assert_array_equal(flat.gather("a", 0)[1], v)


def test_bad_windows_are_refused(flat: PagedKVCache) -> None:
    flat.add_seq("a")
    with pytest.raises(KeyError, match="trim_front: no sequence 'b'"):
        flat.trim_front("b", 1)
    for window in (0, -1, 2**63):
        with pytest.raises(ValueError, match=f"trim_front: window = {window} is outside 1 .. "):
            flat.trim_front("a", window)
    for bad in (1.0, None, True):
        with pytest.raises(TypeError, match="trim_front: window must be an integer"):
            flat.trim_front("a", bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(25))
def test_random_cuts_agree_with_a_model(seed: int) -> None:
    """Forks, appends and cuts at both ends over two layers, against lists of what each sequence
    holds."""
    rng = np.random.default_rng(seed)
    n_blocks, b, names = 24, 4, iter(range(10**6))
    held: dict[int, list[NDArray[np.float16]]] = {}  # [2, heads, length, width] of each layer
    gone: dict[int, int] = {}
    with PagedKVCache(None, n_blocks, b, 2, 2, 8) as cache:

        def add() -> None:
            seq = next(names)
            cache.add_seq(seq)
            held[seq], gone[seq] = [kv(0, 0), kv(0, 0)], 0

        for step in range(60):
            if not held or rng.random() < 0.05:
                add()
            seq = int(rng.choice(list(held)))
            layers = held[seq]
            lengths = [a.shape[2] for a in layers]
            what = rng.choice(["append", "append", "append", "fork", "truncate", "trim", "free"])
            if what == "append":
                new = kv(int(rng.integers(1, 9)), step)
                for layer in (0, 1) if rng.random() < 0.7 else (int(rng.integers(2)),):
                    try:
                        cache.append(seq, layer, *new)
                    except OutOfBlocks:
                        continue
                    layers[layer] = np.concatenate([layers[layer], new], axis=2)
            elif what == "fork":
                child = next(names)
                cache.fork(seq, child)
                held[child], gone[child] = list(layers), gone[seq]
            elif what == "truncate":
                length = int(rng.integers(0, max(lengths) + 1))
                if 0 < length < gone[seq] * b:
                    with pytest.raises(ValueError, match="were given back"):
                        cache.truncate(seq, length)
                    continue
                cache.truncate(seq, length)
                held[seq] = [a[:, :, :length] for a in layers]
                gone[seq] = min(gone[seq], -(-length // b))
            elif what == "trim":
                window = int(rng.integers(1, 20))
                cache.trim_front(seq, window)
                behind = [i + 1 for i in range(n_blocks) if (i + 1) * b <= min(lengths) - window]
                gone[seq] = max([gone[seq], *behind])
            else:
                cache.free(seq)
                del held[seq]
            check_against_model(cache, held, gone)
        for seq in list(held):
            cache.free(seq)
        assert cache.stats()["free"] == n_blocks


def check_against_model(cache: PagedKVCache, held: Any, gone: Any) -> None:
    owners: dict[int, int] = {}
    for seq, layers in held.items():
        table = cache.block_table(seq).tolist()
        assert len(table) == -(-max(a.shape[2] for a in layers) // cache.block_size)
        assert table[: gone[seq]] == [-1] * gone[seq]
        for block in table[gone[seq] :]:
            owners[block] = owners.get(block, 0) + 1
        for layer, a in enumerate(layers):
            assert cache.seq_len(seq, layer) == a.shape[2]
            for j in range(gone[seq] * cache.block_size, a.shape[2]):
                for is_v in (0, 1):
                    slab = cache._blocks.slab(int(table[j // cache.block_size]), layer, is_v)
                    np.testing.assert_array_equal(slab[:, j % cache.block_size], a[is_v, :, j])
    for block in range(cache.num_blocks):
        assert cache.lib.tl_kv_refs(cache.pool, block) == owners.get(block, 0)
    assert cache.stats()["used"] == len(owners)


def test_a_view_needs_a_layer_there_is(cache: PagedKVCache) -> None:
    for layer in (-1, 2, 2**32, 1.0, None):
        with pytest.raises(ValueError, match="view: layer"):
            cache.view(layer)  # type: ignore[arg-type]
    assert repr(cache.view(1)) == (
        "KVView(num_blocks=40, block_size=4, n_kv_heads=2, head_dims=(8, 8), dtype='float16')"
    )
    assert issubclass(TlError, RuntimeError)
