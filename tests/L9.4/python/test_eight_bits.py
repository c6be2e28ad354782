# SPDX-License-Identifier: MIT
"""K and V in eight bits: rows with a scale each, stored and computed with.

Expected bits come from ``tinyllm.reference``; what that says of eight bits is held here to hand
examples, to its own float32 arithmetic where scales are powers of two, and to float64.
"""

from __future__ import annotations

import ctypes
import gc
import hashlib
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from test_arrays import FloatEightTensor, to_bfloat16
from tinyllm import (
    KVView,
    TlError,
    merge_states,
    paged_attention,
    paged_attention_states,
    reference,
)
from tinyllm.ffi.libtinyllm import Lib, f32_ptr, i8_ptr, u8_ptr

F32 = np.float32
INT8, E4M3 = "int8", "float8_e4m3fn"
DTYPES = (INT8, E4M3)
STORE: dict[str, Any] = {INT8: reference.store_i8, E4M3: reference.store_e4m3}
NAN_CODES = (0x7F, 0xFF)
# Scales that no storing gives are read all the same.
STRANGE = np.array(
    [np.nan, np.inf, -np.inf, 0, -0.0, 3e38, -3e38, 1e-45, -1e-42, 1e-30, -1, 2.0**-8], F32
)
SINKS = np.array([0.5, -np.inf, 30, np.nan], F32)
SLOPES = np.array([0.5, 2.0**-8, 0, -0.3], F32)


@pytest.fixture(autouse=True)
def _library(lib: Lib) -> None:
    """Says so once where the library is not built."""


def bits(a: Any) -> NDArray[np.uint32]:
    return np.ascontiguousarray(a, F32).view(np.uint32)


def assert_same_bits(a: Any, b: Any, what: str = "") -> None:
    assert a.dtype == b.dtype == F32
    np.testing.assert_array_equal(bits(a), bits(b), what)


# --- rows stored
# --------------------------------------------------------------------------------------------


def stored_by_c(lib: Lib, x: NDArray[np.float32], dtype: str) -> tuple[Any, Any]:
    codes = np.empty(x.shape, np.int8 if dtype == INT8 else np.uint8)
    scales = np.empty(len(x), F32)
    if dtype == INT8:
        lib.tl_store_i8_f32(f32_ptr(x), i8_ptr(codes), f32_ptr(scales), *x.shape)
    else:
        lib.tl_store_e4m3_f32(f32_ptr(x), u8_ptr(codes), f32_ptr(scales), *x.shape)
    return codes, scales


@pytest.mark.parametrize(
    ("dtype", "row", "scale", "codes"),
    [
        # ties go to even: 62.5 to 62, -63.5 to -64
        (INT8, [127, 62.5, -63.5, 0.5, -0.0], 1, [127, 62, -64, 0, 0]),
        (INT8, [-254, 254, 2], 2, [-127, 127, 1]),
        (INT8, [2.0**-100 * 127, 2.0**-100], 2.0**-100, [127, 1]),
        (INT8, [2.0**-101, 2.0**-110], 0, [0, 0]),
        (E4M3, [448, -448, 1, -1, 17, 19, -0.0], 1, [0x7E, 0xFE, 0x38, 0xB8, 0x58, 0x5A, 0x80]),
        (E4M3, [896, 2.0**-8, 2.0**-9], 2, [0x7E, 0x01, 0x00]),
        (E4M3, [2.0**-101, 0], 0, [0, 0]),
    ],
)
def test_rows_are_stored_as_worked_out(
    lib: Lib, dtype: str, row: list[float], scale: float, codes: list[int]
) -> None:
    x = np.array([row], F32)
    for found in (STORE[dtype](x), stored_by_c(lib, x, dtype)):
        assert found[0].tolist() == [codes]
        assert found[1].tolist() == [scale]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
def test_a_row_with_nan_or_infinity_is_nan(lib: Lib, dtype: str, bad: float) -> None:
    x = np.array([[1, 2, bad, 4], [1, 2, 3, 4]], F32)
    for codes, scales in (STORE[dtype](x), stored_by_c(lib, x, dtype)):
        assert bits(scales)[0] == 0x7FC00000
        assert not codes[0].any()
        assert codes[1].all()
        read = reference.stored_to_f32(codes, scales)
        assert np.isnan(read[0]).all()
        assert not np.isnan(read[1]).any()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [0, 1, 3, 15, 16, 17, 100, 257])
def test_the_library_stores_rows_as_the_reference(lib: Lib, dtype: str, width: int) -> None:
    rng = np.random.default_rng(width)
    size = 2.0 ** rng.integers(-140, 125, (400, 1))
    x = (rng.standard_normal((400, width)) * size).astype(F32)
    x[rng.random(x.shape) < 0.2] = 0
    x[-1] = 3.4028235e38
    codes, scales = stored_by_c(lib, x, dtype)
    want_codes, want_scales = STORE[dtype](x)
    assert_same_bits(scales, want_scales)
    np.testing.assert_array_equal(codes, want_codes)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_was_read_back_and_stored_again_is_the_same(dtype: str) -> None:
    rng = np.random.default_rng(3)
    x = (rng.standard_normal((3000, 40)) * 2.0 ** rng.integers(-90, 110, (3000, 1))).astype(F32)
    codes, scales = STORE[dtype](x)
    again, scales_again = STORE[dtype](reference.stored_to_f32(codes, scales))
    assert_same_bits(scales_again, scales)
    np.testing.assert_array_equal(again, codes)
    top = {INT8: 127, E4M3: 448}[dtype]
    largest = np.abs(x.astype(np.float64)).max(axis=1, keepdims=True)
    error = np.abs(reference.stored_to_f32(codes, scales) - x.astype(np.float64))
    step = largest / top if dtype == INT8 else np.maximum(np.abs(x) / 8, largest / top / 512)
    assert (error <= step * 0.5001).all()


# --- attention
# ----------------------------------------------------------------------------------------------


@dataclass
class Batch:
    """Rows of some sequences over codes [n_blocks, Hkv, b, D] and scales [n_blocks, Hkv, b]; what
    nobody sees has NaN codes and NaN scales."""

    dtype: str
    q: NDArray[np.float32]
    codes: list[NDArray[Any]]
    scales: list[NDArray[np.float32]]
    tables: NDArray[np.uint32]
    ctx_lens: NDArray[np.int32]
    starts: NDArray[np.int32]
    options: dict[str, Any] = field(default_factory=dict)

    def view(self) -> KVView:
        return KVView.from_arrays(
            *self.codes, dtype=self.dtype, k_scale=self.scales[0], v_scale=self.scales[1]
        )

    def run(self, view: KVView | None = None, **changes: Any) -> tuple[Any, Any]:
        given: dict[str, Any] = {"cu_seqlens_q": self.starts, **self.options, **changes}
        view = view or self.view()
        return paged_attention(self.q, view, self.tables, self.ctx_lens, return_lse=True, **given)

    def wanted(self, **changes: Any) -> tuple[Any, Any]:
        options = {"scale": self.q.shape[2] ** -0.5, **self.options, **changes}
        return reference.paged_attn(
            self.q, *self.codes, self.tables, self.ctx_lens, cu_seqlens_q=self.starts,
            k_scale=self.scales[0], v_scale=self.scales[1], **options,
        )  # fmt: skip


def make_batch(
    seed: int,
    dtype: str,
    lengths: list[tuple[int, int]],
    *,
    n_kv: int = 2,
    group: int = 2,
    dims: tuple[int, int] = (8, 8),
    block: int = 4,
    odd: float = 0,
    powers: bool = False,
    **options: Any,
) -> Batch:
    """lengths: (rows, context) of each sequence. odd: how many rows in all have a strange scale,
    and how many codes of e4m3 are NaN. powers: scales are powers of two."""
    rng = np.random.default_rng(seed)
    needed = [-(-ctx // block) for _, ctx in lengths]
    ids = rng.permutation(sum(needed) + 3).astype(np.uint32)
    tables = np.full((len(lengths), max([1, *needed]) + 1), 0xDEADBEEF, np.uint32)
    shape = (len(ids), n_kv, block)
    nothing = -128 if dtype == INT8 else 0xFF
    codes = [np.full((*shape, d), nothing, np.int8 if dtype == INT8 else np.uint8) for d in dims]
    scales = [np.full(shape, np.nan, F32) for _ in dims]
    for s, (_, ctx) in enumerate(lengths):
        tables[s, : needed[s]], ids = ids[: needed[s]], ids[needed[s] :]
        for j in range(ctx):
            at = (tables[s, j // block], slice(None), j % block)
            for code, scale in zip(codes, scales, strict=True):
                x = rng.standard_normal((n_kv, code.shape[3]), F32)
                code[at], scale[at] = STORE[dtype](x)
                if powers:
                    scale[at] = 2.0 ** rng.integers(-9, -4, n_kv)
                strange = rng.random(n_kv) < odd
                scale[at] = np.where(strange, rng.choice(STRANGE, n_kv), scale[at])
                if dtype == E4M3:
                    hit = rng.random(x.shape) < odd / 20
                    code[at] = np.where(hit, rng.choice(NAN_CODES, x.shape), code[at])
    n_rows = [rows for rows, _ in lengths]
    q = rng.standard_normal((sum(n_rows), n_kv * group, dims[0]), F32)
    starts = np.cumsum([0, *n_rows]).astype(np.int32)
    ctx_lens = np.array([ctx for _, ctx in lengths], np.int32)
    return Batch(dtype, q, codes, scales, tables, ctx_lens, starts, options)


MIXED = [(1, 1), (1, 40), (5, 5), (0, 7), (3, 33), (17, 30), (0, 0)]


@pytest.mark.parametrize("dtype", DTYPES)
def test_hand_example(dtype: str) -> None:
    # Scores 0 and ln 2: weights 1/3 and 2/3 of the values 3 and 6.
    one = 1 if dtype == INT8 else 0x38
    codes = np.full((1, 1, 2, 1), one, np.int8 if dtype == INT8 else np.uint8)
    k_scale = np.array([[[0, np.log(2)]]], F32)
    v_scale = np.array([[[3, 6]]], F32)
    view = KVView.from_arrays(codes, codes, dtype=dtype, k_scale=k_scale, v_scale=v_scale)
    out = paged_attention(np.ones((1, 1, 1), F32), view, [[0]], [2], scale=1.0)
    np.testing.assert_allclose(out, 5, rtol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_that_are_powers_of_two_give_the_bits_of_the_float32_values(dtype: str) -> None:
    batch = make_batch(7, dtype, MIXED, dims=(40, 24), powers=True, softcap=3.0)
    values = [reference.stored_to_f32(c, s) for c, s in zip(batch.codes, batch.scales, strict=True)]
    plain = reference.paged_attn(
        batch.q, *values, batch.tables, batch.ctx_lens, cu_seqlens_q=batch.starts,
        scale=40**-0.5, softcap=3.0,
    )  # fmt: skip
    for a, b, c in zip(batch.wanted(), plain, batch.run(), strict=True):
        assert_same_bits(a, b)
        assert_same_bits(c, b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_result_is_attention_of_scale_times_element(dtype: str) -> None:
    batch = make_batch(8, dtype, [(1, 60)], group=3)
    k, v = (
        reference.stored_to_f32(c, s)[batch.tables[0, :15]].transpose(1, 0, 2, 3).reshape(2, 60, 8)
        for c, s in zip(batch.codes, batch.scales, strict=True)
    )
    q = batch.q[0].astype(np.float64).reshape(2, 3, 8)
    s = np.einsum("hgd,hjd->hgj", q, k.astype(np.float64)) * 8**-0.5
    p = np.exp(s - s.max(axis=2, keepdims=True))
    want = np.einsum("hgj,hjd->hgd", p, v.astype(np.float64)) / p.sum(axis=2, keepdims=True)
    np.testing.assert_allclose(batch.run()[0][0].reshape(2, 3, 8), want, rtol=1e-5, atol=1e-6)


ALONE: dict[str, dict[str, Any]] = {
    "nothing": {},
    "v_wider_than_k": {"dims": (16, 40)},
    "latent": {"dims": (576, 512), "n_kv": 1, "group": 5},
    "softcap": {"softcap": 2.0},
    "alibi": {"alibi_slopes": SLOPES},
    "sinks": {"sink_logits": SINKS},
    "window": {"window": 6},
    "window_of_one": {"window": 1},
    "scale": {"scale": -1.75},
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", list(ALONE))
def test_each_option_has_the_bits_of_the_reference(name: str, dtype: str) -> None:
    batch = make_batch(11, dtype, MIXED, **ALONE[name])
    for got, want in zip(batch.run(), batch.wanted(), strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("seed", range(40))
def test_strange_scales_and_nan_codes_have_the_bits_of_the_reference(seed: int, dtype: str) -> None:
    rng = np.random.default_rng(seed)
    n_kv, group = int(rng.integers(1, 4)), int(rng.choice([1, 2, 3, 5, 8, 17]))
    longest = int(rng.choice([3, 20, 70, 1100]))
    lengths = [(1, longest), (int(rng.integers(1, 20)), int(rng.integers(20, 50)))]
    batch = make_batch(
        seed, dtype, lengths, n_kv=n_kv, group=group, odd=float(rng.choice([0, 0.01, 0.3])),
        dims=(int(rng.choice([1, 8, 17, 64])), int(rng.choice([1, 16, 33]))),
        block=int(rng.choice([1, 3, 16, 33, 300])),
        window=int(rng.choice([0, 1, 5, 40])),
        softcap=float(rng.choice([0, 2])),
        alibi_slopes=rng.standard_normal(n_kv * group, F32) if seed % 3 == 0 else None,
        sink_logits=rng.choice(SINKS, n_kv * group) if seed % 2 else None,
    )  # fmt: skip
    for threads in (None, 2):
        for got, want in zip(batch.run(threads=threads), batch.wanted(), strict=True):
            assert_same_bits(got, want, f"{threads} threads")


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_over_stretches_have_the_bits_of_the_reference(dtype: str) -> None:
    batch = make_batch(5, dtype, [(1, 16500)], n_kv=1, dims=(4, 4), block=600)
    for got, want in zip(batch.run(threads=2), batch.wanted(), strict=True):
        assert_same_bits(got, want)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("block", [1, 3, 16, 64])
def test_single_rows_chunks_and_blocks_of_any_size_give_the_same_bits(
    dtype: str, block: int
) -> None:
    whole = make_batch(21, dtype, [(50, 50)], block=50, window=30)
    out, lse = whole.run()
    held = int(whole.tables[0, 0])
    n = -(-50 // block)
    sides = []
    for a in (*whole.codes, *whole.scales):
        cut = np.zeros((2, n * block, *a.shape[3:]), a.dtype)
        cut[:, :50] = a[held]
        sides.append(cut.reshape(2, n, block, *a.shape[3:]).swapaxes(0, 1).copy())
    view = KVView.from_arrays(*sides[:2], dtype=dtype, k_scale=sides[2], v_scale=sides[3])
    table = np.arange(n)[None]
    for rows in (1, 7, 50):
        for begin in range(0, 50, rows):
            end = min(begin + rows, 50)
            part, part_lse = paged_attention(
                whole.q[begin:end], view, table, [end], cu_seqlens_q=[0, end - begin], window=30,
                return_lse=True,
            )  # fmt: skip
            assert_same_bits(part, out[begin:end], f"rows {begin} to {end}")
            assert_same_bits(part_lse, lse[begin:end])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("span", [1024, 16384])
def test_states_have_the_bits_of_the_reference_and_merge_to_those_of_one_call(
    dtype: str, span: int
) -> None:
    n_splits = 32 if span == 16384 else 3
    batch = make_batch(9, dtype, [(3, 2100)], block=50, odd=0.0005)
    view, scale = batch.view(), 8**-0.5
    states = paged_attention_states(
        batch.q, view, batch.tables, batch.ctx_lens, 0, n_splits, cu_seqlens_q=batch.starts,
        span=span,
    )  # fmt: skip
    want = reference.paged_attn_states(
        batch.q, *batch.codes, batch.tables, batch.ctx_lens, 0, n_splits, scale=scale,
        cu_seqlens_q=batch.starts, state_span=span, k_scale=batch.scales[0],
        v_scale=batch.scales[1],
    )  # fmt: skip
    np.testing.assert_array_equal(states, want)  # any NaN equals any other: states are not final
    out, lse = merge_states([(states, 0, span)], return_lse=True)
    for got, one_call in zip((out, lse), batch.run(), strict=True):
        assert_same_bits(got, one_call)


DIGEST = """
import sys, hashlib, numpy as np
sys.path.insert(0, {folder!r})
from test_eight_bits import digest_of_batches
print(digest_of_batches())
"""


def digest_of_batches() -> str:
    found = hashlib.sha256()
    for dtype in DTYPES:
        for seed, (width, group) in enumerate([(8, 1), (17, 4), (64, 5), (130, 2)]):
            batch = make_batch(
                seed, dtype, [*MIXED, (1, 1100)], dims=(width, width), group=group, odd=0.002
            )
            for threads in (None, 2):
                for a in batch.run(threads=threads):
                    found.update(a.tobytes())
    return found.hexdigest()


def test_every_instruction_set_gives_the_same_bits(lib: Lib, run_silently: Any) -> None:
    folder = str(Path(__file__).parent)
    names = lib.tl_isa_names().decode().replace(",", " ").split()
    assert "scalar" in names
    want = digest_of_batches()
    for name in names:
        found = run_silently(DIGEST.format(folder=folder), TINYLLM_ISA=name)
        assert found.strip() == want, name


@pytest.mark.parametrize("dtype", DTYPES)
def test_scales_of_positions_that_are_not_seen_reach_nothing(dtype: str) -> None:
    batch = make_batch(4, dtype, [(1, 30), (2, 22)], window=5)
    out, lse = batch.run()
    for s, (rows, ctx) in enumerate([(1, 30), (2, 22)]):
        for j in range(ctx - rows + 1 - 5):
            at = (batch.tables[s, j // 4], slice(None), j % 4)
            for scale in batch.scales:
                scale[at] = np.nan
    for got, want in zip(batch.run(), (out, lse), strict=True):
        assert_same_bits(got, want)
    assert not np.isnan(out).any()


# --- views with scales
# --------------------------------------------------------------------------------------


def spread(scale: Any, shape: tuple[int, ...]) -> NDArray[np.float32]:
    return np.broadcast_to(np.asarray(scale, F32), shape).copy()


def scale_forms(n: int, heads: int, b: int) -> dict[str, Any]:
    rng = np.random.default_rng(2)
    each = (rng.random((n, heads, b)) + 0.5).astype(F32)
    padded = np.zeros((n, heads, 2 * b + 1), F32)
    padded[..., 1::2] = each
    return {
        "a_number": 0.25,
        "an_integer": 2,
        "a_numpy_number": F32(0.25),
        "an_array_of_one": np.array([0.25], F32),
        "each": each,
        "of_positions": each[:, :1],
        "of_heads": each[:1, :, :1],
        "of_blocks": each[:, :1, :1],
        "of_slots": each[0, 0],
        "apart": padded[..., 1::2],
        "in_another_order": each.transpose(2, 1, 0).copy().transpose(2, 1, 0),
        "backwards": each[::-1],
        "float64": each.astype(np.float64),
        "a_list": each.tolist(),
    }


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("layout", ["HND", "NHD"])
@pytest.mark.parametrize("name", list(scale_forms(1, 1, 1)))
def test_scales_of_every_form_are_read_as_the_numbers_they_show(
    name: str, layout: Any, dtype: str
) -> None:
    batch = make_batch(21, dtype, MIXED)
    n, heads, b = batch.scales[0].shape
    given = scale_forms(n, heads, b)[name]
    plain = spread(given, (n, heads, b))
    batch.scales = [plain, plain]
    out, _ = batch.wanted()
    codes = batch.codes
    if layout == "NHD":
        codes = [a.transpose(0, 2, 1, 3) for a in codes]
        if isinstance(given, list):
            given = np.array(given).swapaxes(1, 2).tolist()
        elif name == "of_slots":
            given = given[:, None]
        elif np.ndim(given) == 3:
            given = given.swapaxes(1, 2)
    view = KVView.from_arrays(*codes, layout, dtype, k_scale=given, v_scale=given)
    assert_same_bits(batch.run(view)[0], out)
    if isinstance(given, np.ndarray) and given.dtype == F32 and name != "backwards":
        given *= 0  # no copy was made: what is written now is what is read
        assert not batch.run(view)[0].any()


def test_scales_are_kept_alive_and_let_go() -> None:
    batch = make_batch(21, INT8, MIXED)
    out, _ = batch.wanted()
    scale = batch.scales[0].copy()
    seen = weakref.ref(scale)
    view = KVView.from_arrays(*batch.codes, k_scale=scale, v_scale=batch.scales[1].copy())
    del scale
    gc.collect()
    junk = [np.full(batch.scales[0].shape, 9, F32) for _ in range(50)]
    assert seen() is not None
    assert_same_bits(batch.run(view)[0], out)
    del view, junk
    gc.collect()
    assert seen() is None


def test_a_tensor_of_float8_is_a_view_in_place_and_no_numbers() -> None:
    batch = make_batch(21, E4M3, MIXED)
    k, v = (FloatEightTensor(a) for a in batch.codes)
    view = KVView.from_arrays(k, v, k_scale=batch.scales[0], v_scale=batch.scales[1])
    assert view.dtype == E4M3
    assert_same_bits(batch.run(view)[0], batch.wanted()[0])
    batch.codes[1][...] = 0
    assert_same_bits(batch.run(view)[0], batch.wanted()[0])
    with pytest.raises(TypeError, match="q must be real numbers, not float8_e4m3fn"):
        paged_attention(FloatEightTensor(np.zeros((1, 4, 8), np.uint8)), view, [[0]], [1])
    with pytest.raises(TypeError, match="ctx_lens must be integers, not float8_e4m3fn"):
        paged_attention(batch.q[:1], view, [[0]], FloatEightTensor(np.ones(1, np.uint8)))


def test_scales_that_are_missing_wrong_or_out_of_place_are_refused() -> None:
    fn = "^KVView.from_arrays: "
    codes = np.zeros((3, 2, 4, 8), np.int8)
    half, good = codes.astype(np.float16), np.ones((3, 2, 4), F32)
    for k, scales, error, says in (
        (codes, {}, TypeError, "k_scale must be given, a number or an array: of int8"),
        (codes, {"k_scale": 1.0}, TypeError, "v_scale must be given"),
        (half, {"v_scale": good}, TypeError, "v_scale is given, and float16 has no scales"),
        (half, {"k_scale": 1}, TypeError, "k_scale is given, and float16 has no scales"),
        (codes, {"k_scale": good[:2], "v_scale": good}, ValueError,
         r"k_scale has shape \(2, 2, 4\), which does not broadcast to \(3, 2, 4\)"),
        (codes, {"k_scale": good, "v_scale": good[..., None]}, ValueError,
         r"v_scale has shape \(3, 2, 4, 1\), which does not broadcast to \(3, 2, 4\)"),
        (codes, {"k_scale": "1", "v_scale": good}, TypeError, "k_scale must be an array"),
        (codes, {"k_scale": True, "v_scale": good}, TypeError, "k_scale must be real numbers"),
        (codes, {"k_scale": good.astype(complex), "v_scale": 1}, TypeError,
         "k_scale must be real numbers, not complex128"),
        (codes.view(np.uint8), {"k_scale": 1, "v_scale": 1}, TypeError,
         "k must be one of float16, .*; it is uint8, and dtype None"),
    ):  # fmt: skip
        with pytest.raises(error, match=fn + says):
            KVView.from_arrays(k, k, **scales)
    with pytest.raises(TypeError, match=fn + "k must be .* it is uint8, and dtype 'int8'"):
        KVView.from_arrays(*[codes.view(np.uint8)] * 2, dtype="int8", k_scale=1, v_scale=1)
    nhd = codes.transpose(0, 2, 1, 3)
    with pytest.raises(ValueError, match=r"does not broadcast to \(3, 4, 2\)"):
        KVView.from_arrays(nhd, nhd, "NHD", k_scale=good, v_scale=good)


# --- writing through a view
# ---------------------------------------------------------------------------------


def empty_view(dtype: str, **scales: Any) -> tuple[KVView, list[NDArray[Any]]]:
    code = np.int8 if dtype == INT8 else np.uint8
    k, v = (np.full((5, 2, 4, d), 9, code) for d in (6, 3))
    return KVView.from_arrays(k, v, dtype=dtype, **scales), [k, v]


SLOTS = [7, -1, 0, 19]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("given", ["float32", "float16", "bfloat16", "float64", "mixed"])
def test_each_row_that_is_written_gets_its_codes_and_scale(dtype: str, given: str) -> None:
    rng = np.random.default_rng(1)
    scales = [np.full((5, 2, 4), 7, F32) for _ in "kv"]
    view, sides = empty_view(dtype, k_scale=scales[0], v_scale=scales[1])
    new: list[Any] = [rng.standard_normal((4, 2, d)).astype(F32) for d in (6, 3)]
    if given == "float16":
        new = [a.astype(np.float16) for a in new]
    elif given == "float64":
        new = [rng.standard_normal(a.shape) for a in new]
    elif given == "mixed":
        new = [new[0].astype(np.float16), new[1]]
    plain = [np.asarray(a, F32) for a in new]
    if given == "bfloat16":
        plain = [(bits(a) & np.uint32(0xFFFF0000)).view(F32) for a in plain]
        new = [to_bfloat16(a) for a in plain]
    view.write_slots(SLOTS, *new)
    for side, scale, x in zip(sides, scales, plain, strict=True):
        want, want_scale = np.full_like(side, 9), np.full((5, 2, 4), 7, F32)
        for t, slot in enumerate(SLOTS):
            if slot >= 0:
                at = (slot // 4, slice(None), slot % 4)
                want[at], want_scale[at] = STORE[dtype](x[t])
        np.testing.assert_array_equal(side, want)
        np.testing.assert_array_equal(scale, want_scale)


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_are_copied_as_they_are_and_no_scale_is_written(dtype: str) -> None:
    scales = np.full((5, 2, 4), 7, F32)
    view, sides = empty_view(dtype, k_scale=scales, v_scale=0.5)
    code = sides[0].dtype
    rng = np.random.default_rng(5)
    new = [rng.integers(0, 256, (4, 2, d)).astype(np.uint8).view(code) for d in (6, 3)]
    view.write_slots(SLOTS, *new)
    for side, x in zip(sides, new, strict=True):
        for t, slot in enumerate(SLOTS):
            if slot >= 0:
                np.testing.assert_array_equal(side[slot // 4, :, slot % 4], x[t])
    assert (scales == 7).all()


def test_one_scale_for_all_of_e4m3_is_read_and_stays() -> None:
    scale = np.array(0.5, F32)
    view, sides = empty_view(E4M3, k_scale=scale, v_scale=2)
    x = np.array([1000, -1000, 3, 0.1, np.nan, np.inf], F32)
    rows = np.broadcast_to(x, (1, 2, 6))
    view.write_slots([3], rows, np.ascontiguousarray(rows[..., :3]))
    np.testing.assert_array_equal(sides[0][0, 1, 3], reference.f32_to_e4m3(x * F32(2)))
    np.testing.assert_array_equal(sides[1][0, 0, 3], reference.f32_to_e4m3(x[:3] * F32(0.5)))
    assert scale == 0.5


def test_writes_that_scales_do_not_allow_are_refused_and_write_nothing() -> None:
    fn = r"KVView\.write_slots: "
    new = [np.ones((1, 2, d), F32) for d in (6, 3)]
    each = np.ones((5, 2, 4), F32)
    still = each.copy()
    still.flags.writeable = False
    for dtype, scales, error, says in (
        (INT8, {"k_scale": each, "v_scale": still}, ValueError, "scales that are read-only"),
        (INT8, {"k_scale": each.astype(float), "v_scale": each}, ValueError, "or a copy"),
        (E4M3, {"k_scale": each[::-1], "v_scale": each}, ValueError, "or a copy"),
        (INT8, {"k_scale": 1.0, "v_scale": 1.0}, TlError, "TL_EUNSUPPORTED"),
        (E4M3, {"k_scale": each[:, :1], "v_scale": each[:, :1]}, TlError, "TL_EUNSUPPORTED"),
    ):
        view, sides = empty_view(dtype, **scales)
        with pytest.raises(error, match=says if error is TlError else f"^{fn}.*{says}"):
            view.write_slots([1], *new)
        assert all((side == 9).all() for side in sides)
        assert (each == 1).all()
        view.write_slots([1], *(np.ones_like(side[:1, :, 0]) for side in sides))  # codes may
        assert all((side[0, :, 1] == 1).all() for side in sides)


def test_a_scale_pointer_reaches_the_library(lib: Lib) -> None:
    scales = np.arange(24, dtype=F32).reshape(3, 2, 4)
    codes = np.zeros((3, 2, 4, 8), np.int8)
    view = KVView.from_arrays(codes, codes, k_scale=scales, v_scale=scales.transpose(2, 1, 0).T)
    struct = view._struct
    assert ctypes.cast(struct.k_scale, ctypes.c_void_p).value == scales.ctypes.data
    assert (
        struct.k_scale_block_stride, struct.k_scale_head_stride, struct.k_scale_token_stride
    ) == (8, 4, 1)  # fmt: skip
    np.testing.assert_array_equal(view._scales()[0], scales)
