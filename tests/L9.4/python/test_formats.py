# SPDX-License-Identifier: MIT
"""Caches of every dtype: what they store, that no bit depends on how it came there, and what those
who look at them are told.

What is stored is worked out by ``tinyllm.reference``, and attention over it likewise.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinyllm
from numpy.typing import NDArray
from test_arrays import BfloatTensor, FloatEightTensor, to_bfloat16
from test_eight_bits import assert_same_bits, bits
from tinyllm import (
    PagedKVCache,
    Recording,
    Snapshot,
    TlError,
    paged_attention,
    paged_attention_decode,
    record,
    reference,
)
from tinyllm.ffi.libtinyllm import Lib
from tinyllm.observe.calls.diff import Value

F32 = np.float32
EIGHT: dict[str, Any] = {"int8": reference.store_i8, "float8_e4m3fn": reference.store_e4m3}
DTYPES = ("float16", "bfloat16", "float32", *EIGHT)
HEADS, WIDTH, BLOCK = 2, 7, 5


@pytest.fixture(autouse=True)
def _library(lib: Lib) -> None:
    """Says so once where the library is not built."""


def new(dtype: Any = "float16", num_blocks: int = 24, **changes: int) -> PagedKVCache:
    sizes = {"block_size": BLOCK, "n_layers": 2, "n_kv_heads": HEADS, "d_head": WIDTH, **changes}
    return PagedKVCache(num_blocks=num_blocks, dtype=dtype, **sizes)


def kv(n: int, seed: int = 0) -> NDArray[np.float32]:
    """K and V [n_kv_heads, n, d_head]; rows of different size."""
    rng = np.random.default_rng([n, seed])
    x = rng.standard_normal((2, HEADS, n, WIDTH)) * 2.0 ** rng.integers(-6, 7, (2, HEADS, n, 1))
    return x.astype(F32)


def held(x: NDArray[np.float32], dtype: str) -> NDArray[np.float32]:
    """What is read back of x."""
    if dtype in EIGHT:
        return reference.stored_to_f32(*EIGHT[dtype](x))
    if dtype == "bfloat16":
        return reference.bf16_to_f32(reference.f32_to_bf16(x))
    return x.astype(dtype).astype(F32)


def both(cache: PagedKVCache, seq: Any, k: Any, v: Any) -> None:
    for layer in range(cache.n_layers):
        cache.append(seq, layer, k, v)


def assert_holds(cache: PagedKVCache, seq: Any, x: NDArray[np.float32]) -> None:
    for layer in range(cache.n_layers):
        for got, side in zip(cache.gather(seq, layer), x, strict=True):
            assert got.dtype == (np.float16 if cache.dtype == "float16" else F32)
            np.testing.assert_array_equal(got, held(side, cache.dtype))


# --- what is stored
# --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [[13], [1] * 13, [5, 5, 3], [4, 9]])
@pytest.mark.parametrize("dtype", DTYPES)
def test_gather_gives_back_what_the_dtype_holds_of_what_was_appended(
    dtype: str, pieces: list[int]
) -> None:
    with new(dtype) as cache:
        cache.add_seq("a")
        x, begin = kv(13), 0
        for n in pieces:
            both(cache, "a", *x[:, :, begin : begin + n])
            begin += n
        assert_holds(cache, "a", x)
        cache.add_seq("empty")
        assert [a.shape for a in cache.gather("empty", 0)] == [(HEADS, 0, WIDTH)] * 2


@pytest.mark.parametrize("dtype", list(EIGHT))
def test_gather_codes_gives_codes_and_scales_as_stored(dtype: str) -> None:
    with new(dtype) as cache:
        cache.add_seq("a")
        x = kv(13)
        both(cache, "a", *x)
        k, v, k_scales, v_scales = cache.gather_codes("a", 1)
        for side, codes, scales in ((x[0], k, k_scales), (x[1], v, v_scales)):
            want, want_scales = EIGHT[dtype](side)
            assert codes.dtype == want.dtype
            np.testing.assert_array_equal(codes, want)
            assert_same_bits(scales, want_scales)
        k[...], k_scales[...] = 1, 9
        assert_holds(cache, "a", x)
        assert [a.shape for a in cache.gather_codes("a", 0)[2:]] == [(HEADS, 13)] * 2


def test_codes_of_a_cache_without_scales_are_refused() -> None:
    for dtype in ("float16", "bfloat16", "float32"):
        with new(dtype) as cache, pytest.raises(TypeError, match=f"gather_codes: .* is {dtype}"):
            cache.gather_codes("a", 0)
    with new("int8") as cache:
        with pytest.raises(KeyError, match="gather_codes: no sequence 'a'"):
            cache.gather_codes("a", 0)
        with pytest.raises(ValueError, match="gather_codes: layer"):
            cache.gather_codes("a", 2)


FORMS: dict[str, Callable[[NDArray[np.float32]], Any]] = {
    "float16": lambda a: a.astype(np.float16),
    "bfloat16": to_bfloat16,
    "float64": lambda a: a.astype(np.float64),
    "list": lambda a: a.tolist(),
    "backwards": lambda a: a[:, ::-1].copy()[:, ::-1],
    "tokens_first": lambda a: a.transpose(1, 0, 2).copy().transpose(1, 0, 2),
    "no_contiguous_axis": lambda a: a.transpose(2, 1, 0).copy().transpose(2, 1, 0),
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_of_every_form_are_stored_alike(dtype: str, form: Any) -> None:
    # Numbers that every type holds.
    k, v = np.round(kv(13) * 4).clip(-200, 200)
    with new(dtype) as cache:
        for seq, sides in enumerate([(k, v), (form(k), form(v)), (form(k), v), (k, form(v))]):
            cache.add_seq(seq)
            both(cache, seq, *sides)
            for got, want in zip(cache.gather(seq, 1), cache.gather(0, 1), strict=True):
                np.testing.assert_array_equal(got, want)
        assert_holds(cache, 0, np.stack([k, v]))


def test_the_own_dtype_is_stored_bit_for_bit_nan_included() -> None:
    codes = np.random.default_rng(1).integers(0, 1 << 32, (2, HEADS, 3, WIDTH), dtype=np.uint32)
    codes[..., 0] = 0x7FC12345
    with new("float32") as cache:
        cache.add_seq(0)
        with pytest.warns(UserWarning, match="float32 has nothing for"):
            cache.append(0, 0, *codes.view(F32))
        for got, want in zip(cache.gather(0, 0), codes, strict=True):
            np.testing.assert_array_equal(bits(got), want)
    short = (codes >> 16).astype(np.uint16)
    short[..., 0] = 0x7FC1
    with new("bfloat16") as cache:
        cache.add_seq(0)
        with pytest.warns(UserWarning, match="bfloat16 has nothing for"):
            cache.append(0, 0, *(BfloatTensor(a) for a in short))
        for got, want in zip(cache.gather(0, 0), short, strict=True):
            np.testing.assert_array_equal(bits(got), want.astype(np.uint32) << 16)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", *EIGHT])
def test_float64_is_rounded_to_float32_first(dtype: str) -> None:
    x = np.random.default_rng(1).standard_normal((2, HEADS, 40, WIDTH))
    with new(dtype) as cache:
        cache.add_seq("a")
        both(cache, "a", *x)
        assert_holds(cache, "a", x.astype(F32))


def test_codes_of_float8_are_no_numbers_to_append() -> None:
    a = FloatEightTensor(np.zeros((HEADS, 1, WIDTH), np.uint8))
    with new("float8_e4m3fn") as cache:
        cache.add_seq("a")
        with pytest.raises(TypeError, match="append: k must be real numbers, not float8_e4m3fn"):
            cache.append("a", 0, a, a)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_cache_has_the_bytes_that_its_dtype_takes(dtype: str) -> None:
    row = {"float16": 14, "bfloat16": 14, "float32": 28, "int8": 11, "float8_e4m3fn": 11}[dtype]
    strip = BLOCK * row + (-BLOCK * WIDTH) % 4 * (dtype in EIGHT)
    with new(dtype) as cache:
        assert cache.nbytes == 24 * 2 * 2 * HEADS * strip
        assert cache.dtype == dtype == cache.view(1).dtype
        assert repr(cache).endswith(f"dtype={dtype!r})")


# --- names of dtypes
# ----------------------------------------------------------------------------------------


class Named:
    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


@pytest.mark.parametrize(
    ("given", "dtype"),
    [
        (np.float16, "float16"),
        (np.dtype("f4"), "float32"),
        (np.int8, "int8"),
        (Named("torch.bfloat16"), "bfloat16"),
        (Named("torch.float8_e4m3fn"), "float8_e4m3fn"),
    ],
)
def test_a_dtype_may_be_given_itself(given: Any, dtype: str) -> None:
    with new(given) as cache:
        assert cache.dtype == dtype


@pytest.mark.parametrize(
    "wrong",
    ["fp16", "float8", "float64", "uint8", "f2", "", None, 16, np.float64, ">f2", np.dtype(">f4"),
     Named("torch.float64"), Named("torch.uint8"), list, np.zeros(2)],
)  # fmt: skip
def test_another_dtype_is_refused_with_those_there_are(wrong: Any) -> None:
    says = (
        "^PagedKVCache: dtype must be one of float16, bfloat16, float32, int8, float8_e4m3fn, not "
    )
    with pytest.raises(TypeError, match=says):
        new(wrong)


# --- what changes nothing
# -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_forks_share_and_are_copied_when_written(dtype: str) -> None:
    with new(dtype) as cache:
        cache.add_seq("a")
        x, y = kv(13), kv(4, seed=1)
        both(cache, "a", *x)
        cache.fork("a", "b")
        assert cache.stats()["used"] == 3
        both(cache, "b", *y)
        assert_holds(cache, "b", np.concatenate([x, y], axis=2))
        assert_holds(cache, "a", x)
        cache.truncate("b", 7)
        both(cache, "b", *y)
        assert_holds(cache, "b", np.concatenate([x[:, :, :7], y], axis=2))
        assert_holds(cache, "a", x)
        cache.free("a")
        assert_holds(cache, "b", np.concatenate([x[:, :, :7], y], axis=2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_sequence_moves_to_another_cache_bit_for_bit(dtype: str) -> None:
    x = kv(13)
    with new(dtype) as cache, new(dtype, num_blocks=5) as other:
        cache.add_seq("a")
        both(cache, "a", *x)
        envelope = cache.export_seq("a")
        other.import_seq("b", envelope)
        assert other.export_seq("b") == envelope
        assert_holds(other, "b", x)
        both(other, "b", *kv(2))
        assert_holds(other, "b", np.concatenate([x, kv(2)], axis=2))


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_envelope_of_another_dtype_is_refused_and_named(dtype: str) -> None:
    with new(dtype) as cache:
        cache.add_seq("a")
        both(cache, "a", *kv(6))
        envelope = cache.export_seq("a")
    for name in DTYPES:
        if name != dtype:
            with new(name) as other:
                says = f"import_seq: version .*; it is {dtype}, and the cache {name}$"
                with pytest.raises(ValueError, match=says) as caught:
                    other.import_seq("a", envelope)
                assert isinstance(caught.value.__cause__, TlError)
                assert caught.value.__cause__.name == "TL_EFORMAT"
                assert "a" not in other
                assert other.stats()["free"] == 24


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_over_a_cache_has_the_bits_of_the_reference(dtype: str) -> None:
    rng = np.random.default_rng(5)
    x, q = kv(40), rng.standard_normal((40, 2 * HEADS, WIDTH), F32)
    scale = WIDTH**-0.5
    if dtype in EIGHT:
        (k, ks), (v, vs) = (EIGHT[dtype](side) for side in x)
        scales = {"k_scale": ks[None], "v_scale": vs[None]}
    else:
        as_stored = reference.f32_to_bf16 if dtype == "bfloat16" else lambda a: a.astype(dtype)
        (k, v), scales = (as_stored(side) for side in x), {}
    for window in (0, 9):
        want, want_lse = reference.paged_attn(
            q, k[None], v[None], np.array([[0]]), np.array([40]), scale=scale, window=window,
            cu_seqlens_q=np.array([0, 40]), **scales,
        )  # fmt: skip
        for block in (1, 5, 16, 40):
            with new(dtype, num_blocks=45, block_size=block, n_layers=1) as cache:
                cache.add_seq("a")
                cache.append("a", 0, *x)
                view, tables = cache.view(0), [cache.block_table("a")]
                out, lse = paged_attention(
                    q, view, tables, [40], cu_seqlens_q=[0, 40], window=window, return_lse=True,
                    threads=2,
                )  # fmt: skip
                assert_same_bits(out, want, f"blocks of {block}")
                assert_same_bits(lse, want_lse)
                last = paged_attention_decode(q[-1:], cache, ["a"], 0, window=window)
                assert_same_bits(last, want[-1:])
                for n in (39, 17, 1):
                    cache.truncate("a", n)
                    one = paged_attention_decode(q[n - 1 : n], cache, ["a"], 0, window=window)
                    assert_same_bits(one, want[n - 1 : n], f"{n} positions")


# --- what a dtype has nothing for
# -----------------------------------------------------------------------------


HUGE = 3.4e38
LOST = [  # dtype, values, how many it has nothing for, what the warning says besides
    ("float16", [65519, -65519.9, np.inf], 0, ""),
    ("float16", [65520, -1e30, np.nan, np.inf, 1], 3, "beyond 65504.*'bfloat16'"),
    ("bfloat16", [3.38e38, -np.inf, 0], 0, ""),
    ("bfloat16", [HUGE, np.nan, -HUGE, -np.inf, 0], 3, "beyond 3.39e38.*'float32'"),
    ("float32", [HUGE, np.inf], 0, ""),
    ("float32", [np.nan, np.inf, 0], 1, "NaN.*look where it began"),
    ("int8", [HUGE, 1e-45], 0, ""),
    ("int8", [np.nan, np.inf, -np.inf, 1], 3, "the row is NaN.*'bfloat16'"),
    ("float8_e4m3fn", [HUGE, 1e-45], 0, ""),
    ("float8_e4m3fn", [np.nan, np.inf, -np.inf, 1], 3, "the row is NaN.*'bfloat16'"),
]


@pytest.mark.parametrize(("dtype", "values", "n", "says"), LOST)
def test_what_a_dtype_has_nothing_for_is_counted_and_said_once(
    dtype: str, values: list[float], n: int, says: str
) -> None:
    k = np.zeros((1, 2, 8), F32)
    k[0, 1, : len(values)] = values
    v = np.ones_like(k)
    with new(dtype, n_kv_heads=1, d_head=8) as cache, warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.add_seq("a")
        cache.append("a", 0, v, v)
        assert cache.stats()["unrepresentable"] == 0
        if n:
            with pytest.warns(UserWarning, match=f"append: {dtype} has nothing for {n} .*{says}"):
                cache.append("a", 0, v, k)
        cache.append("a", 0, v, k)
        cache.append("a", 1, k, v)
        total = n * (3 if n else 2)
        assert cache.stats()["unrepresentable"] == total
        assert cache.snapshot().counters["unrepresentable"] == total
        assert f"\ntinyllm_kv_unrepresentable_total {total}\n" in cache.metrics()
        assert ("nothing for" in cache.look().text(100, colour=False)) == bool(n)


@pytest.mark.parametrize("dtype", DTYPES)
def test_float64_beyond_float32_is_counted_too(dtype: str) -> None:
    k = np.ones((HEADS, 1, WIDTH))
    k[0, 0, :2] = 1e300, -np.inf
    with new(dtype) as cache:
        cache.add_seq("a")
        with pytest.warns(UserWarning, match="nothing for"):
            cache.append("a", 0, k, np.ones_like(k))
        assert cache.stats()["unrepresentable"] == (2 if dtype in EIGHT else 1)


def test_a_warning_that_is_an_error_comes_when_all_is_stored() -> None:
    k = np.full((HEADS, 1, WIDTH), np.nan, F32)
    with new() as cache, warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.add_seq("a")
        with pytest.raises(UserWarning, match="float16 has nothing for 28 appended values"):
            cache.append("a", 0, k, k)
        assert cache.seq_len("a", 0) == 1
        cache.append("a", 1, k, k)
        assert np.isnan(cache.gather("a", 1)[0]).all()


# --- looking
# --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
def test_looks_metrics_and_snapshots_say_the_dtype(dtype: str, tmp_path: Path) -> None:
    with new(dtype) as cache:
        cache.add_seq("a")
        both(cache, "a", *kv(6))
        taken = cache.snapshot(tmp_path / "s")
        assert f"2 KV heads of 7 {dtype}" in cache.look().text(120, colour=False)
        assert f"2 KV heads of 7 {dtype}" in cache.look().svg()
        told = cache.metrics(model="m")
        assert f'\ntinyllm_kv_info{{model="m",dtype="{dtype}"}} 1\n' in told
        assert f'\ntinyllm_kv_bytes{{model="m"}} {cache.nbytes}\n' in told
    read = Snapshot.load(tmp_path / "s")
    assert read == taken
    assert (read.dtype, read.counters["bytes"]) == (dtype, cache.num_blocks * read.block_bytes)


def test_a_snapshot_from_before_there_were_dtypes_is_float16(tmp_path: Path) -> None:
    with new() as cache:
        taken = cache.snapshot(tmp_path / "s")
    document = json.loads((tmp_path / "s").read_text())
    del document["pool"]["dtype"], document["counts"]["unrepresentable"]
    (tmp_path / "s").write_text(json.dumps(document))
    assert Snapshot.load(tmp_path / "s") == taken
    document["pool"]["dtype"] = "float64"
    (tmp_path / "s").write_text(json.dumps(document))
    with pytest.raises(ValueError, match="'dtype' of pool is 'float64', none of float16"):
        Snapshot.load(tmp_path / "s")


def recorded(path: Path, dtype: str, flip: Callable[..., None] | None = None) -> Path:
    """One call over 13 positions, of which the row sees the last 8."""
    with new(dtype, n_layers=1) as cache, record(path, keep_kv=True):
        cache.add_seq("a")
        cache.append("a", 0, *kv(13))
        view = cache.view(0)
        if flip is not None:
            block, slot = divmod(9, BLOCK)
            flip(view, (int(cache.block_table("a")[block]), 1, slot))
        q = np.random.default_rng(2).standard_normal((1, HEADS, WIDTH), F32)
        paged_attention(q, view, [cache.block_table("a")], [13], window=8)
    return path


@pytest.mark.parametrize("dtype", DTYPES)
def test_recordings_keep_what_was_seen_scales_included(dtype: str, tmp_path: Path) -> None:
    with Recording.load(recorded(tmp_path / "r", dtype)) as run:
        call = run[0]
        assert call.dtype == dtype
        kept = run.kv(call, 0)
    assert kept is not None
    sides = [side.transpose(1, 0, 2)[5:] for side in kv(13)]
    if dtype in EIGHT:
        assert len(kept) == call.digests.shape[1] == 4
        for i, side in enumerate(sides):
            codes, scales = EIGHT[dtype](np.ascontiguousarray(side))
            np.testing.assert_array_equal(kept[i], codes.view(np.uint8))
            np.testing.assert_array_equal(kept[2 + i], bits(scales))
    else:
        assert len(kept) == call.digests.shape[1] == 2
        form = "uint16" if dtype == "bfloat16" else dtype
        for got, side in zip(kept, sides, strict=True):
            narrow = reference.f32_to_bf16(side) if dtype == "bfloat16" else side.astype(dtype)
            np.testing.assert_array_equal(got.view(form), narrow)


@pytest.mark.parametrize("dtype", list(EIGHT))
@pytest.mark.parametrize("side", ["K", "V", "scales of K", "scales of V"])
def test_a_difference_of_codes_and_scales_is_found(dtype: str, side: str, tmp_path: Path) -> None:
    def flip(view: Any, at: tuple[int, ...]) -> None:
        if side.startswith("scales"):
            bits_of = view._scales()["KV".index(side[-1])].view(np.uint32)
            bits_of[at] += 3
        else:
            view._codes()["KV".index(side)][(*at, 4)] ^= 1

    a, b = recorded(tmp_path / "a", dtype), recorded(tmp_path / "b", dtype, flip)
    assert tinyllm.diff(a, a).equal
    found = next(f for f in tinyllm.diff(a, b).findings if f.part == "input")
    place = {"sequence": 0, "split": 0, "positions": [5, 12], "position": 9, "kv_head": 1}
    if side.startswith("scales"):
        assert (found.what, found.where, found.ulps) == (side, place, 3)
    else:
        steps = None if dtype == "int8" else 1
        assert (found.what, found.where, found.ulps) == (side, {**place, "element": 4}, steps)
    assert (found.n, found.total) == (1, 1)
    assert side in str(tinyllm.diff(a, b))


@pytest.mark.parametrize(
    ("code", "dtype", "value"),
    [
        (0x80, "int8", Value("-128", "0x80")),
        (0x7F, "int8", Value("127", "0x7f")),
        (0x7E, "float8_e4m3fn", Value("448.0", "0x7e")),
        (0x81, "float8_e4m3fn", Value("-0.001953125", "0x81")),
        (0xFF, "float8_e4m3fn", Value("nan", "0xff")),
    ],
)
def test_values_of_eight_bits_are_shown_exactly(code: int, dtype: str, value: Value) -> None:
    assert Value.of(np.uint8(code), dtype) == value


def test_every_code_of_e4m3_is_shown_as_its_value() -> None:
    values = reference.e4m3_to_f32(np.arange(256, dtype=np.uint8))
    told = [Value.of(np.uint8(code), "float8_e4m3fn").text for code in range(256)]
    assert told == [str(value) for value in values]
