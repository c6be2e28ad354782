# SPDX-License-Identifier: MIT
"""The executable definition of the bits, tinyllm.reference, against oracles that share nothing with
it.

Exact arithmetic with fractions stands in for one rounding, float64 for closeness, a scalar walk
over one row for the order of operations, and numbers worked out by hand for the rules. "K = 0, V =
j" below: every score is 0 and every value at position j is j, so that a row's result is the plain
mean of the positions it sees.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tinyllm import reference as ref

ROOT = Path(__file__).resolve().parents[3]
Array = npt.NDArray[Any]
F32 = npt.NDArray[np.float32]
NAN_BITS = 0x7FC00000
INF, NAN = math.inf, math.nan


def f32(*values: float) -> F32:
    return np.array(values, np.float32)


def of_bits(*words: int) -> F32:
    return np.array(words, np.uint32).view(np.float32)


def bits(x: npt.ArrayLike) -> Array:
    return np.ascontiguousarray(x, np.float32).view(np.uint32)


def same_bits(x: npt.ArrayLike, y: npt.ArrayLike) -> bool:
    return np.array_equal(bits(x), bits(y))


def all_canonical_nan(x: F32) -> bool:
    return bool((bits(x) == NAN_BITS).all())


def hostile(seed: int, n: int) -> F32:
    """Random words with every special value and every exponent mixed in; no period in the lanes."""
    rng = np.random.default_rng(seed)
    special = f32(
        0, -0.0, 1, -1, INF, -INF, NAN, 1e-45, -1e-45, 2**-126, 3.4028235e38, 2**24, 1 + 2**-23
    )
    words = rng.integers(0, 2**32, n, np.uint64).astype(np.uint32).view(np.float32)
    near = ((1 + rng.integers(-9, 10, n) * 2.0**-23) * 2.0 ** rng.integers(-30, 30, n)).astype(
        np.float32
    )
    kind = rng.integers(0, 3, n)
    return np.where(kind == 0, rng.choice(special, n), np.where(kind == 1, words, near))


# --- one rounding
# -------------------------------------------------------------------------------------------


def round_exactly(x: Fraction) -> np.float32:
    """The float32 nearest to a fraction other than 0, ties to even."""
    m = abs(x)
    e = m.numerator.bit_length() - m.denominator.bit_length()
    e -= m < Fraction(2) ** e
    quantum = Fraction(2) ** (max(e, -126) - 23)
    value = round(m / quantum) * quantum
    magnitude = math.inf if value >= 2**128 else float(value)
    rounded: np.float32 = np.float32(math.copysign(magnitude, x))
    return rounded


def fma_exactly(x: float | np.float32, y: float | np.float32, z: float | np.float32) -> np.float32:
    a, b, c = float(x), float(y), float(z)
    if math.isfinite(a) and math.isfinite(b) and math.isfinite(c):
        exact = Fraction(a) * Fraction(b) + Fraction(c)
        if exact:
            return round_exactly(exact)
    with np.errstate(all="ignore"):
        special: np.float32 = np.float32(a * b + c)  # or a zero, whose sign IEEE addition gives
        return special


def agree(x: np.float32, y: np.float32) -> bool:
    return bool(np.isnan(x) and np.isnan(y)) or same_bits(x, y)


floats32 = st.floats(width=32) | st.integers(0, 2**32 - 1).map(lambda w: float(of_bits(w)[0]))


@settings(max_examples=400, deadline=None)
@given(floats32, floats32, floats32)
@example(1 + 2**-12, 1 + 2**-12, 2.0**-80)
@example(1 + 2**-12, 1 + 2**-12, -(2.0**-80))
@example(2.0**-75, 2.0**-75, 2.0**-149)
@example(1.5 * 2.0**-75, 2.0**-75, 2.0**-149)
def test_fma_rounds_the_exact_value_once(a: float, b: float, c: float) -> None:
    assert agree(ref.fma32(f32(a), f32(b), f32(c))[0], fma_exactly(a, b, c))


def test_fma_rounds_hostile_triples_once() -> None:
    a, b, c = hostile(1, 4000), hostile(2, 4000), hostile(3, 4000)
    with np.errstate(all="ignore"):
        c[::3] = -(
            a[::3] * b[::3]
        )  # cancellation: what is left is the rounding error of the product
    got = ref.fma32(a, b, c)
    for i in range(len(a)):
        assert agree(got[i], fma_exactly(a[i], b[i], c[i])), (a[i], b[i], c[i])


def test_fma_is_not_fooled_by_ties_of_the_wider_format() -> None:
    """1 + 2^-11 + 2^-24 is a float32 tie, and a float64 sum forgets the 2^-80 that decides it."""
    a, tiny = f32(1 + 2**-12), f32(2.0**-80)
    assert same_bits(ref.fma32(a, a, tiny), f32(1 + 2**-11 + 2**-23))
    assert same_bits(ref.fma32(a, a, -tiny), f32(1 + 2**-11))
    assert same_bits((a.astype(np.float64) ** 2 + tiny).astype(np.float32), f32(1 + 2**-11))


def test_fma_special_values() -> None:
    big = 3.4028234663852886e38
    cases = [
        (INF, 0, 1, NAN), (INF, 1, -INF, NAN), (INF, 1, 1, INF), (1, 1, -INF, -INF),
        (big, 1, 2.0**103, INF),
        (big, 1, 2.0**102, big), (-0.0, 1, -0.0, -0.0), (-0.0, 1, 0.0, 0.0), (1, 1, -1, 0.0),
    ]  # fmt: skip
    for a, b, c, expected in cases:
        assert agree(ref.fma32(f32(a), f32(b), f32(c))[0], f32(expected)[0]), (a, b, c)


@given(st.floats(width=32), st.floats(width=32))
@example(NAN, 1.0)
@example(1.0, NAN)
@example(0.0, -0.0)
@example(-0.0, 0.0)
def test_maximum_keeps_nan_and_the_first_of_equals(x: float, y: float) -> None:
    got = ref.maximum(f32(x), f32(y))[0]
    if math.isnan(x) or math.isnan(y):
        assert np.isnan(got)
    else:
        assert same_bits(got, f32(y if y > x else x))


# --- exp, log and tanh
# --------------------------------------------------------------------------------------


def test_coefficients_are_those_of_the_header() -> None:
    text = (ROOT / "c/src/numerics/coef.h").read_text()
    defined = dict(re.findall(r"^#define ((?:EXP|LOG|TANH)_\w+)\s+(\S+)", text, re.M))
    assert len(defined) >= 26
    magic = defined.pop("EXP_MAGIC")  # rounds to an integer by addition; the reference says rint
    assert float.fromhex(magic.rstrip("f")) == 1.5 * 2**23
    for name, value in defined.items():
        if value in defined:
            expected = getattr(ref, value)
        elif name == "LOG_SQRT_HALF":
            expected = of_bits(int(value, 16))[0]
        else:
            expected = (
                float.fromhex(value.rstrip("f")) if "x" in value else float(value.rstrip("f"))
            )
        assert getattr(ref, name) == expected, name


def ulps(got: F32, exact: Array) -> Array:
    """Error in units in the last place of ``exact``, long doubles that are normal float32."""
    return np.asarray(np.abs(got - exact) / np.spacing(np.abs(exact).astype(np.float32)))


def every_nth_float(low: float, high: float, n: int) -> F32:
    """Floats of one sign, rising in magnitude, every n-th word."""
    start, stop = (int(w) for w in bits(f32(low, high)))
    return of_bits(*range(start, stop, n))


def test_exp_is_within_its_bound_wherever_e_to_x_is_normal() -> None:
    x = np.concatenate(
        [every_nth_float(0, 88.7228317, 9973), every_nth_float(-0.0, -87.3365402, 9973)]
    )
    error = ulps(ref.expf(x), np.exp(x.astype(np.longdouble)))
    assert error.max() <= 1.5, x[error.argmax()]


def test_exp_never_falls_by_more_than_an_ulp() -> None:
    x = np.concatenate(
        [every_nth_float(-0.0, -104, 9973)[::-1], every_nth_float(0, 88.7228317, 9973)]
    )
    y = bits(ref.expf(x)).astype(np.int64)
    assert (np.diff(y) >= -1).all()


def test_exp_edges() -> None:
    assert same_bits(ref.expf(of_bits(0x42B17217)), f32(3.4027985e38))
    assert (ref.expf(of_bits(0x42B17218, 0x7F7FFFFF, 0x7F800000)) == INF).all()
    assert same_bits(
        ref.expf(of_bits(0xC2AEAC50, 0xC2CFF1B6, 0xFF7FFFFF, 0xFF800000)), f32(0, 0, 0, 0)
    )
    last = ref.expf(of_bits(0xC2AEAC4F))  # the lowest x whose e^x is normal
    assert same_bits(last, f32(1.1754997e-38))
    assert same_bits(ref.expf(f32(0, -0.0, 1e-45, -1e-45)), f32(1, 1, 1, 1))
    assert same_bits(ref.expf(f32(1, -1, 10)), f32(2.7182817, 0.36787945, 22026.465))
    assert all_canonical_nan(ref.expf(of_bits(0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF)))


def test_exp_has_no_subnormal_result() -> None:
    x = every_nth_float(-87.0, -104.5, 7)
    y = ref.expf(x)
    assert ((y == 0) | (y >= np.float32(2**-126))).all()
    assert not np.signbit(y).any()
    assert (y[x > -87.33] > 0).all() and (y[x < -87.34] == 0).all()


def test_log_is_within_its_bound() -> None:
    x = np.concatenate([every_nth_float(2**-126, 3.4e38, 20011), every_nth_float(0.5, 2, 101)])
    x = x[x != 1]
    error = ulps(ref.log32(x), np.log(x.astype(np.longdouble)))
    assert error.max() <= 1, x[error.argmax()]


def test_log_edges() -> None:
    assert same_bits(ref.log32(f32(1, 0, -0.0, INF)), f32(0, -INF, -INF, INF))
    assert all_canonical_nan(ref.log32(f32(-1, -INF, NAN)))
    assert same_bits(ref.log32(f32(2, 8)), f32(0.6931472, 2.0794415))


def test_tanh_is_within_its_bound_and_odd() -> None:
    x = np.concatenate([every_nth_float(1e-45, 20, 20011), every_nth_float(0.5, 9.1, 301)])
    error = ulps(ref.tanh32(x), np.tanh(x.astype(np.longdouble)))
    assert error.max() <= 1.371, x[error.argmax()]
    assert same_bits(ref.tanh32(-x), -ref.tanh32(x))


def test_tanh_edges() -> None:
    x = f32(0, -0.0, 1e-45, -1e-45, 9.02, 1e30, INF, -INF)
    assert same_bits(ref.tanh32(x), f32(0, -0.0, 1e-45, -1e-45, 1, 1, 1, -1))
    assert all_canonical_nan(ref.tanh32(f32(NAN)))
    assert same_bits(ref.tanh32(f32(0.5, 1, -2)), f32(0.46211717, 0.76159418, -0.9640276))


# --- sixteen lanes
# ------------------------------------------------------------------------------------------


def test_fold_goes_by_halves() -> None:
    """2^24, 1, -2^24 sum to 1, unless 2^24 and 1 meet first: a tie, to even, and the 1 is lost."""

    def meet(
        i: int, j: int
    ) -> int:  # the step at which lanes i and j become one: 8 is the first, 1 the last
        return next(half for half in (8, 4, 2, 1) if (i - j) % half == 0)

    outcomes = set()
    for big, one, minus in itertools.permutations(range(16), 3):
        lanes = np.zeros(16, np.float32)
        lanes[[big, one, minus]] = 2**24, 1, -(2**24)
        expected = 0 if meet(big, one) > max(meet(big, minus), meet(one, minus)) else 1
        assert ref.fold(lanes) == expected, (big, one, minus)
        outcomes.add(expected)
    assert outcomes == {0, 1}


def fold_exactly(lanes: list[np.float32]) -> np.float32:
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [lanes[i] + lanes[i + half] for i in range(half)]
    total: np.float32 = lanes[0]
    return total


def dot_exactly(a: F32, b: F32) -> np.float32:
    lanes = [np.float32(0)] * 16
    for d in range(len(a)):
        lanes[d % 16] = fma_exactly(a[d], b[d], lanes[d % 16])
    return fold_exactly(lanes)


@pytest.mark.parametrize("width", [0, 1, 15, 16, 17, 33, 64, 100])
def test_dot_sums_in_sixteen_lanes_by_rising_d(width: int) -> None:
    rng = np.random.default_rng(width)
    for _ in range(5):
        a, b = rng.standard_normal((2, width), np.float32)
        assert same_bits(ref.dot(a, b), dot_exactly(a, b))


# --- a row, step by step
# ------------------------------------------------------------------------------------


def row_exactly(
    q: F32, k: F32, v: F32, scale: float, low: int, high: int
) -> tuple[F32, np.float32]:
    """One row over positions low .. high - 1, a scalar operation a step; exp and log of ``ref``."""

    def exp(x: np.float32) -> np.float32:
        y: np.float32 = np.float32(ref.exp32(np.asarray(x, np.float32)))
        return y

    width = len(q)
    State = tuple[np.float32, np.float32, list[np.float32]]

    def merged(x: State | None, y: State | None) -> State | None:
        if x is None or y is None:
            return y if x is None else x
        top = max(x[0], y[0])
        old, new = exp(x[0] - top), exp(y[0] - top)
        a = [fma_exactly(old, x[2][d], new * y[2][d]) for d in range(width)]
        return top, fma_exactly(old, x[1], new * y[1]), a

    total: State | None = None
    stretch: State | None = None
    for split in range(0, high, 1024):
        if split % 16384 == 0:
            total, stretch = merged(total, stretch), None
        m, lanes, a = np.float32(-INF), [np.float32(0)] * 16, [np.float32(0)] * width
        for tile in range(split, min(split + 1024, high), 16):
            seen = range(max(low, tile), min(high, tile + 16))
            s = {j: np.float32(scale) * dot_exactly(q, k[j]) for j in seen}
            top = max([m, *s.values()])
            if top == -INF:
                continue
            if top > m:
                alpha = exp(m - top)
                lanes, a, m = [x * alpha for x in lanes], [x * alpha for x in a], top
            for j in seen:
                p = exp(s[j] - m)
                lanes[j % 16] = lanes[j % 16] + p
                a = [fma_exactly(p, v[j, d], a[d]) for d in range(width)]
        if m != -INF:
            stretch = merged(stretch, (m, fold_exactly(lanes), a))
    total = merged(total, stretch)
    if total is None:
        return np.zeros(width, np.float32), np.float32(-INF)
    r = np.float32(1) / total[1]
    return np.array([x * r for x in total[2]], np.float32), total[0] + ref.log32(
        np.asarray(total[1])
    )


@pytest.mark.parametrize(
    ("n", "width", "window"),
    [
        (1, 3, 0),
        (15, 17, 0),
        (16, 4, 0),
        (50, 33, 0),
        (70, 5, 20),
        (1025, 1, 0),
        (2100, 2, 0),
        (2100, 2, 1500),
        (2060, 1, 5),
        (33000, 1, 17000),
        (16400, 1, 20),
    ],
)
def test_a_row_equals_a_scalar_walk_bitwise(n: int, width: int, window: int) -> None:
    rng = np.random.default_rng(n)
    q, k, v = (2 * rng.standard_normal(s, np.float32) for s in (width, (n, width), (n, width)))
    with np.errstate(over="ignore", invalid="ignore"):
        expected, lse = row_exactly(q, k, v, 0.7, max(0, n - window) if window else 0, n)
    o, got_lse = ref.flash_attn_fwd(
        q.reshape(1, 1, 1, width),
        k[None, None],
        v[None, None],
        scale=0.7,
        q_offset=n - 1,
        window=window,
    )
    assert same_bits(o[0, 0, 0], expected)
    assert same_bits(got_lse[0, 0, 0], lse)


def test_the_maximum_of_later_splits_may_be_lower_or_higher() -> None:
    rng = np.random.default_rng(5)
    v = rng.standard_normal((1045, 1), np.float32)
    for slope in (-0.01, 0.01, -1, 1):
        k = np.float32(slope) * np.arange(1045, dtype=np.float32)[:, None]
        expected, lse = row_exactly(f32(1), k, v, 1, 0, 1045)
        o, got_lse = ref.flash_attn_fwd(
            np.ones((1, 1, 1, 1), np.float32), k[None, None], v[None, None], scale=1, causal=False
        )
        assert same_bits(o[0, 0, 0], expected) and same_bits(got_lse[0, 0, 0], lse)


# --- attention in plain float64
# -----------------------------------------------------------------------------


def plain(
    q: F32, k: F32, v: F32, scale: float, q_offset: int, causal: bool, window: int, sink: F32 | None
) -> tuple[Array, Array]:
    group = q.shape[1] // k.shape[1]
    k64, v64 = (np.repeat(x.astype(np.float64), group, axis=1) for x in (k, v))
    s = scale * np.einsum("bhid,bhjd->bhij", q.astype(np.float64), k64)
    p, j = q_offset + np.arange(q.shape[2])[:, None], np.arange(k.shape[2])[None, :]
    seen = (j <= p) | (not causal)
    if window > 0:
        seen &= j > p - window
    weight = np.where(seen, np.exp(np.where(seen, s, 0)), 0)
    total = weight.sum(axis=-1)
    if sink is not None:
        total = total + np.exp(sink.astype(np.float64))[None, :, None]
    with np.errstate(divide="ignore"):
        inverse = np.where(total > 0, 1 / np.where(total > 0, total, 1), 0)
        return np.einsum("bhij,bhjd->bhid", weight, v64) * inverse[..., None], np.log(total)


@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(*(st.integers(1, n) for n in (2, 3, 3, 5, 40))),
    n_keys=st.integers(0, 70),
    q_offset=st.integers(0, 60),
    causal=st.booleans(),
    window=st.integers(-1, 30),
    with_sink=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_prefill_is_close_to_plain_attention(
    shape: tuple[int, ...],
    n_keys: int,
    q_offset: int,
    causal: bool,
    window: int,
    with_sink: bool,
    seed: int,
) -> None:
    batch, kv_heads, group, rows, width = shape
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((batch, kv_heads * group, rows, width), np.float32)
    k, v = rng.standard_normal((2, batch, kv_heads, n_keys, width), np.float32)
    sink = rng.standard_normal(kv_heads * group, np.float32) if with_sink else None
    o, lse = ref.flash_attn_fwd(
        q, k, v, scale=0.3, q_offset=q_offset, causal=causal, window=window, sink_logits=sink
    )
    expected, expected_lse = plain(q, k, v, 0.3, q_offset, causal, window, sink)
    assert np.abs(o - expected).max() <= 1e-5 * max(1.0, np.abs(v).max(initial=0))
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=1e-5)


# --- a row is a function of the row alone
# -------------------------------------------------------------------


def paged(k: F32, v: F32, block_tokens: int, seed: int) -> tuple[Array, Array, Array]:
    """K and V [Hkv, n, D] as f16 in shuffled blocks, the rest NaN: (k_blocks, v_blocks, table)."""
    kv_heads, n, width = k.shape
    used = -(-n // block_tokens)
    table = np.random.default_rng(seed).permutation(used + 3).astype(np.uint32)
    k_blocks, v_blocks = np.full((2, used + 3, kv_heads, block_tokens, width), NAN, np.float16)
    for j in range(n):
        k_blocks[table[j // block_tokens], :, j % block_tokens] = k[:, j]
        v_blocks[table[j // block_tokens], :, j % block_tokens] = v[:, j]
    table[used:] = 0xFFFFFFFF
    return k_blocks, v_blocks, table


def f16_values(seed: int, *shape: int) -> F32:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float16).astype(np.float32)


@pytest.mark.parametrize(("n", "window"), [(1, 0), (37, 0), (150, 7), (1030, 0), (1100, 90)])
def test_decode_in_any_blocks_equals_prefill_bitwise(n: int, window: int) -> None:
    k, v, q = f16_values(1, 2, n, 9), f16_values(2, 2, n, 9), f16_values(3, 6, 9)
    o, _ = ref.flash_attn_fwd(
        q[None, :, None], k[None], v[None], scale=0.4, q_offset=n - 1, window=window
    )
    for block_tokens in (1, 2, 16, 23, 2048):
        k_blocks, v_blocks, table = paged(k, v, block_tokens, n)
        out = ref.paged_attn_decode(
            q[None],
            k_blocks,
            v_blocks,
            table[None],
            np.array([n], np.int32),
            scale=0.4,
            window=window,
        )
        assert same_bits(out[0], o[0, :, 0]), block_tokens


@pytest.mark.parametrize("window", [0, 7])
def test_chunked_prefill_equals_one_call_bitwise(window: int) -> None:
    q, k, v = f16_values(1, 1, 2, 150, 8), f16_values(2, 1, 1, 150, 8), f16_values(3, 1, 1, 150, 8)
    o, lse = ref.flash_attn_fwd(q, k, v, scale=0.35, window=window)
    for chunk in (1, 3, 64, 149):
        for at in range(0, 150, chunk):
            end = min(at + chunk, 150)
            part, part_lse = ref.flash_attn_fwd(
                q[:, :, at:end],
                k[:, :, :end],
                v[:, :, :end],
                scale=0.35,
                q_offset=at,
                window=window,
            )
            assert same_bits(part, o[:, :, at:end]) and same_bits(part_lse, lse[:, :, at:end])


def test_a_sequence_alone_equals_itself_in_a_batch_bitwise() -> None:
    ctx = np.array([1, 2, 17, 64, 65, 500, 1100], np.int32)
    k, v, q = f16_values(1, 1, 1100, 4), f16_values(2, 1, 1100, 4), f16_values(3, 7, 3, 4)
    k_blocks, v_blocks, table = paged(k, v, 16, 4)
    tables = np.repeat(table[None], 7, axis=0)
    together = ref.paged_attn_decode(q, k_blocks, v_blocks, tables, ctx, scale=1)
    backwards = ref.paged_attn_decode(
        q[::-1].copy(), k_blocks, v_blocks, tables, ctx[::-1], scale=1
    )
    assert same_bits(backwards[::-1], together)
    for s in range(7):
        for h in range(3):
            alone = ref.paged_attn_decode(
                q[s : s + 1, h : h + 1].copy(),
                k_blocks,
                v_blocks,
                tables[s : s + 1],
                ctx[s : s + 1],
                scale=1,
            )
            assert same_bits(alone[0, 0], together[s, h])


def test_positions_a_row_does_not_see_cannot_be_noticed() -> None:
    q, k, v = f16_values(1, 1, 1, 40, 3), f16_values(2, 1, 1, 60, 3), f16_values(3, 1, 1, 60, 3)
    o, lse = ref.flash_attn_fwd(q, k, v, scale=1, q_offset=10, window=4)
    for garbage in (NAN, INF, -INF, 3e38):
        k2, v2 = k.copy(), v.copy()
        k2[..., [0, 6, 50, 59], :] = v2[..., [0, 6, 50, 59], :] = garbage
        o2, lse2 = ref.flash_attn_fwd(q, k2, v2, scale=1, q_offset=10, window=4)
        assert same_bits(o2, o) and same_bits(lse2, lse)


# --- numbers worked out by hand
# -----------------------------------------------------------------------------


def mean_prefill(rows: int, n_keys: int, **options: Any) -> tuple[F32, F32]:
    """K = 0, V = j, one head, D 1."""
    q, k = np.ones((1, 1, rows, 1), np.float32), np.zeros((1, 1, n_keys, 1), np.float32)
    v = np.arange(n_keys, dtype=np.float32).reshape(k.shape)
    o, lse = ref.flash_attn_fwd(q, k, v, scale=1, **options)
    return o[0, 0, :, 0], lse[0, 0]


def mean_decode(ctx: int, window: int) -> float:
    k = np.zeros((1, ctx, 1), np.float32)
    v = np.arange(ctx, dtype=np.float32).reshape(k.shape)
    k_blocks, v_blocks, table = paged(k, v, 4, 1)
    q, ctx_lens = np.ones((1, 1, 1), np.float32), np.array([ctx], np.int32)
    out = ref.paged_attn_decode(
        q, k_blocks, v_blocks, table[None], ctx_lens, scale=1, window=window
    )
    return float(out[0, 0, 0])


def row_of_scores(
    scores: Sequence[float], values: Sequence[float], **options: Any
) -> tuple[F32, F32]:
    q, k, v = (np.array(x, np.float32).reshape(1, 1, -1, 1) for x in ([1], scores, values))
    o, lse = ref.flash_attn_fwd(q, k, v, scale=1, causal=False, **options)
    return o[0, 0, 0], lse[0, 0, 0]


def test_hand_example() -> None:
    """Scores 1, 0, 1 over values [1,2] [3,4] [5,6]: the outer two have the inner one as mean."""
    k, v = np.zeros((2, 4, 1, 2, 2), np.float16)
    k[3, 0], k[1, 0, 0] = [[1, 0], [0, 1]], [1, 1]
    v[3, 0], v[1, 0, 0] = [[1, 2], [3, 4]], [5, 6]
    q = f32(1, 0).reshape(1, 1, 2)
    out = ref.paged_attn_decode(
        q, k, v, np.array([[3, 1]], np.uint32), np.array([3], np.int32), scale=1
    )
    np.testing.assert_allclose(out[0, 0], [3, 4], rtol=2e-7)


def test_tiles_masked_from_the_front_leave_no_nan() -> None:
    o, lse = mean_prefill(640, 640, window=10)
    n = np.minimum(10, np.arange(640) + 1)
    np.testing.assert_allclose(o, np.arange(640) - (n - 1) / 2, rtol=2e-7)
    np.testing.assert_allclose(lse, np.log(n), rtol=2e-7)
    assert (o[0], o[9], o[639]) == (0, 4.5, 634.5)


def test_large_logits_and_a_natural_lse() -> None:
    o, lse = row_of_scores([1000, 999, -1000], [1, 2, 4])
    assert o[0] == pytest.approx(1.2689414, abs=2e-7) and same_bits(lse, f32(1000.31326)[0])
    assert same_bits(row_of_scores([0] * 8, [1] * 8)[1], f32(2.0794415)[0])
    assert same_bits(row_of_scores([0], [1])[1], f32(0)[0])
    o, lse = row_of_scores([-5], [0.1])
    assert same_bits(o, f32(0.1)) and lse == -5


def test_rows_without_a_key_are_zero_with_lse_minus_infinity() -> None:
    q, k = np.ones((1, 1, 4, 1), np.float32), np.zeros((1, 1, 2, 1), np.float32)
    v = f32(3, 5).reshape(1, 1, 2, 1)
    for window, expected in ((1, [3, 5, 0, 0]), (2, [3, 4, 5, 0]), (0, [3, 4, 4, 4])):
        o, lse = ref.flash_attn_fwd(q, k, v, scale=1, window=window)
        assert same_bits(o[0, 0, :, 0], f32(*expected)), window
        if window == 1:
            assert same_bits(lse[0, 0], f32(0, 0, -INF, -INF))
    o, lse = mean_prefill(3, 0)
    assert same_bits(o, f32(0, 0, 0)) and same_bits(lse, f32(-INF, -INF, -INF))


def test_rows_stand_at_q_offset() -> None:
    np.testing.assert_allclose(mean_prefill(2, 4, q_offset=2)[0], [1.0, 1.5], rtol=2e-7)
    _, lse = mean_prefill(
        2, 4, q_offset=2**63 - 3, window=2**63 - 3
    )  # sees keys 1, 2, 3, then 2, 3
    assert same_bits(lse, f32(math.log(3), math.log(2)))


def test_the_window_counts_the_row_itself() -> None:
    means = {1: 7, 2: 6.5, 3: 6, 8: 3.5, 9: 3.5, 0: 3.5, -1: 3.5, 2**63 - 1: 3.5}
    for window, expected in means.items():
        assert mean_decode(8, window) == pytest.approx(expected, rel=2e-7)
        assert mean_prefill(8, 8, window=window)[0][7] == pytest.approx(expected, rel=2e-7)
    assert (mean_decode(3, 2), mean_decode(9, 2)) == (1.5, 7.5)


def test_heads_of_a_group_are_neighbours() -> None:
    v = np.ones((1, 2, 1, 1), np.float32)
    v[0, 1] = 2
    o, _ = ref.flash_attn_fwd(np.ones((1, 6, 1, 1), np.float32), np.zeros_like(v), v, scale=1)
    assert same_bits(o.ravel(), f32(1, 1, 1, 2, 2, 2))


# --- values that are no numbers
# -----------------------------------------------------------------------------


@pytest.mark.parametrize("position", [0, 5, 17, 1023, 1024, 2047, 2100])
@pytest.mark.parametrize("score", [NAN, -NAN, INF])
def test_a_score_that_is_nan_or_infinite_makes_the_row_nan(position: int, score: float) -> None:
    scores = [0.5] * 2101
    scores[position] = score
    o, lse = row_of_scores(scores, [1] * 2101)
    assert all_canonical_nan(o) and all_canonical_nan(lse)


def test_scores_of_minus_infinity_weigh_nothing() -> None:
    assert same_bits(row_of_scores([-INF] * 20, [1] * 20)[0], f32(0))
    assert same_bits(row_of_scores([-INF] * 20, [1] * 20)[1], f32(-INF)[0])
    o, lse = row_of_scores([-INF] * 17 + [2, -INF], [9] * 17 + [7, 9])
    assert same_bits(o, f32(7)) and same_bits(lse, f32(2)[0])
    o, lse = row_of_scores([2, -INF], [7, INF])  # visible, with weight +0: 0 * inf is NaN
    assert all_canonical_nan(o) and same_bits(lse, f32(2)[0])


def test_a_nan_among_the_values_stays_in_its_element() -> None:
    v = np.ones((1, 1, 3, 2), np.float32)
    v[0, 0, 1, 0] = of_bits(0xFFC12345)[0]
    q, k = np.zeros((1, 1, 1, 2), np.float32), np.zeros_like(v)
    o, lse = ref.flash_attn_fwd(q, k, v, scale=1, causal=False)
    assert all_canonical_nan(o[..., 0])
    assert o[..., 1] == 1
    assert np.isfinite(lse).all()


@pytest.mark.parametrize("keys", [0, 3])
def test_sinks(keys: int) -> None:
    sinks = f32(-INF, NAN, INF, 0, 50, -50)
    q, k = np.zeros((1, 6, 1, 1), np.float32), np.zeros((1, 1, keys, 1), np.float32)
    v = np.ones_like(k)
    bare, bare_lse = ref.flash_attn_fwd(q, k, v, scale=1, causal=False)
    o, lse = ref.flash_attn_fwd(q, k, v, scale=1, causal=False, sink_logits=sinks)
    assert same_bits(o[0, 0], bare[0, 0]) and same_bits(lse[0, 0], bare_lse[0, 0])
    assert all_canonical_nan(o[0, 1:3]) and all_canonical_nan(lse[0, 1:3])
    if keys == 0:
        assert same_bits(o[0, 3:], np.zeros((3, 1, 1))) and same_bits(lse[0, 3:, 0], sinks[3:])
    else:
        np.testing.assert_allclose(o[0, 3:, 0, 0], 3 / (3 + np.exp([0.0, 50.0, -50.0])), rtol=5e-7)
        np.testing.assert_allclose(lse[0, 3:, 0], np.log(3 + np.exp([0.0, 50.0, -50.0])), rtol=5e-7)


def test_a_head_without_width_still_has_an_lse() -> None:
    empty = np.zeros((1, 1, 4, 0), np.float32)
    o, lse = ref.flash_attn_fwd(empty, empty, empty, scale=1)
    assert o.shape == (1, 1, 4, 0)
    np.testing.assert_allclose(lse[0, 0], np.log([1, 2, 3, 4]), rtol=2e-7)


def test_merging_rounds_the_later_product_first() -> None:
    """fma(alpha_x, x, alpha_y * y): only the product of the later state is rounded by itself."""
    rng = np.random.default_rng(8)
    mx, my, lx, ly, ax, ay = rng.uniform(1, 3, (6, 100)).astype(np.float32)
    merged = ref.merge(ref.State(mx, lx, ax[:, None]), ref.State(my, ly, ay[:, None]))
    for i in range(100):
        top = max(mx[i], my[i])
        alpha_x, alpha_y = (ref.expf(f32(m - top))[0] for m in (mx[i], my[i]))
        assert same_bits(merged.m[i], top)
        assert same_bits(merged.L[i], fma_exactly(alpha_x, lx[i], alpha_y * ly[i]))
        assert same_bits(merged.a[i, 0], fma_exactly(alpha_x, ax[i], alpha_y * ay[i]))


def test_merging_with_what_saw_nothing_changes_nothing() -> None:
    x = ref.State(f32(1, -2), f32(3, 4), f32(5, -0.0, 1e-42, NAN).reshape(2, 2))
    nothing = ref.State.empty(2, 2)
    for merged in (ref.merge(x, nothing), ref.merge(nothing, x)):
        assert same_bits(merged.m, x.m) and same_bits(merged.L, x.L) and same_bits(merged.a, x.a)


# --- states
# -------------------------------------------------------------------------------------------------

LONG = 33000  # three stretches; 33 splits


@dataclass
class Long:
    """Two sequences over three stretches and two; tables name 23 blocks of 80 over and over."""

    q: F32
    k: Array
    v: Array
    tables: Array
    ctx: Array
    options: dict[str, Any]

    @classmethod
    def make(cls, seed: int, **options: Any) -> Long:
        rng = np.random.default_rng(seed)
        k, v = rng.standard_normal((2, 23, 1, 80, 4)).astype(np.float16)
        tables = np.stack([np.resize(rng.permutation(23), 413) for _ in range(2)])
        q = 2 * rng.standard_normal((3, 2, 4), np.float32)
        options = {"scale": 0.5, "cu_seqlens_q": np.array([0, 2, 3])} | options
        return cls(q, k, v, tables, np.array([LONG, 16390]), options)

    def rows(self, **changes: Any) -> tuple[F32, F32]:
        args = self.q, self.k, self.v, self.tables, self.ctx
        return ref.paged_attn(*args, **self.options, **changes)

    def states(self, first: int, n: int, **changes: Any) -> F32:
        args = self.q, self.k, self.v, changes.pop("tables", self.tables), self.ctx
        return ref.paged_attn_states(*args, first, n, **self.options, **changes)


@pytest.mark.parametrize("window", [17000, 700])
def test_states_of_splits_and_of_stretches_merge_to_the_bits_of_one_call(window: int) -> None:
    x = Long.make(31, window=window, softcap=5.0, alibi_slopes=np.array([2.0**-9, 0], np.float32))
    sinks = np.array([1.5, -INF], np.float32)
    want = x.rows(sink_logits=sinks)
    S, T = ref.SPLIT, ref.STRETCH
    splits, stretches = x.states(0, 33), x.states(0, 48, state_span=T)
    divisions = [
        [(splits, 0, S)],
        [(splits[:, :, :20], 0, S), (splits[:, :, 20:], 20, S)],
        [(stretches, 0, T)],
        [(stretches[:, :, :1], 0, T), (splits[:, :, 16:], 16, S)],
        [(splits[:, :, :32], 0, S), (stretches[:, :, 2:], 32, T)],
    ]
    for parts in divisions:
        for got, wanted in zip(ref.attn_merge(parts, sink_logits=sinks), want, strict=True):
            assert same_bits(got, wanted)


def test_the_state_of_a_stretch_is_that_of_its_splits_merged() -> None:
    x = Long.make(32)
    splits, stretches = x.states(16, 16), x.states(16, 16, state_span=ref.STRETCH)
    flat = splits.reshape(6, 16, 6)
    state = ref.State.empty(6, 4)
    for i in range(16):
        state = ref.merge(state, ref.State(flat[:, i, 0], flat[:, i, 1], flat[:, i, 2:]))
    packed = np.concatenate([state.m[:, None], state.L[:, None], state.a], axis=1)
    assert same_bits(stretches.reshape(6, 6), packed)
    assert (state.m[:4] > -INF).all()
    nothing = x.states(48, 16, state_span=ref.STRETCH).reshape(6, 6)
    assert same_bits(nothing, np.tile(f32(-INF, 0, 0, 0, 0, 0), (6, 1)))


def test_rows_over_stretches_are_close_to_float64() -> None:
    x = Long.make(33)
    out, lse = x.rows()
    for row, (s, n) in enumerate([(0, LONG - 1), (0, LONG), (1, 16390)]):
        j = np.arange(n)
        block = x.tables[s][j // 80]
        k, v = (a[block, 0, j % 80].astype(np.float64) for a in (x.k, x.v))
        for h in range(2):
            scores = k @ x.q[row, h] * 0.5
            top = scores.max()
            weights = np.exp(scores - top)
            want = weights @ v / weights.sum()
            np.testing.assert_allclose(out[row, h], want, rtol=1e-5, atol=1e-6)
            np.testing.assert_allclose(lse[row, h], top + np.log(weights.sum()), rtol=1e-6)


@pytest.mark.parametrize("position", [0, 16383, 16384, 32767, 32768, LONG - 1])
@pytest.mark.parametrize("score", [NAN, INF])
def test_a_bad_score_in_any_stretch_makes_the_row_nan(position: int, score: float) -> None:
    k, v = np.zeros((1, 1, LONG, 1), np.float32), np.ones((1, 1, LONG, 1), np.float32)
    k[0, 0, position] = score
    o, lse = ref.flash_attn_fwd(
        np.ones((1, 1, 1, 1), np.float32), k, v, scale=1.0, q_offset=LONG - 1
    )
    assert all_canonical_nan(o) and all_canonical_nan(lse)


def test_a_part_of_the_blocks_is_enough_for_its_splits() -> None:
    """Tables of blocks 204 (position 16320) to 409 hold stretch 1; others are not read."""
    x = Long.make(34)
    whole = x.states(16, 16, state_span=ref.STRETCH)
    part = x.tables[:, 204:410]
    assert same_bits(x.states(16, 16, state_span=ref.STRETCH, tables=part, first_block=204), whole)
    for first_block, table in ((205, x.tables[:, 205:410]), (204, x.tables[:, 204:409])):
        with pytest.raises(ValueError, match="sequence 0: positions 16384 to 32767"):
            x.states(16, 16, tables=table, first_block=first_block)


@pytest.mark.parametrize(
    ("first", "n", "span"), [(-1, 1, 1024), (0, 0, 1024), (8, 16, 16384), (0, 8, 16384), (0, 1, 7)]
)
def test_splits_that_are_no_states_are_refused(first: int, n: int, span: int) -> None:
    with pytest.raises(ValueError, match=r"states of|splits"):
        Long.make(35).states(first, n, state_span=span)


def test_parts_that_do_not_follow_each_other_are_refused() -> None:
    part, S, T = np.zeros((1, 1, 2, 3), np.float32), ref.SPLIT, ref.STRETCH
    bad: list[list[tuple[F32, int, int]]] = [
        [(part, 1, S)],
        [(part, 0, S), (part, 1, S)],
        [(part, 0, S), (part, 3, S)],
        [(part, 0, S), (part, 2, T)],
        [(part, 0, T), (part, 31, S)],
        [(part, 0, 2048)],
    ]
    for parts in bad:
        with pytest.raises(ValueError, match="states of"):
            ref.attn_merge(parts)


def test_wrong_types_shapes_and_tables_are_refused() -> None:
    q, k = np.ones((1, 2, 1), np.float32), np.ones((3, 1, 4, 1), np.float16)
    table = np.array([[2, 3]], np.uint32)

    def decode(q: Array, k: Array, ctx: int, window: int = 0) -> F32:
        return ref.paged_attn_decode(q, k, k, table, np.array([ctx]), scale=1, window=window)

    with pytest.raises(TypeError):
        decode(q.astype(np.float64), k, 1)
    with pytest.raises(TypeError):
        decode(q, k.astype(np.float32), 1)
    with pytest.raises(ValueError):
        decode(np.ones((1, 2, 2), np.float32), k, 1)
    for ctx in (0, -1, 9, 5):  # the last needs entry 3 of a pool of three blocks
        with pytest.raises(ValueError):
            decode(q, k, ctx)
    assert decode(q, k, 4).shape == (1, 2, 1)


# --- softmax
# ------------------------------------------------------------------------------------------------

SOFTMAXES = pytest.mark.parametrize("softmax", [ref.softmax, ref.softmax_online])


@SOFTMAXES
def test_softmax_is_close_to_float64(softmax: Any) -> None:
    for cols in (1, 2, 15, 16, 17, 100):
        x = 5 * np.random.default_rng(cols).standard_normal((4, cols), np.float32)
        e = np.exp(x.astype(np.float64) - x.max(axis=1, keepdims=True))
        np.testing.assert_allclose(softmax(x), e / e.sum(axis=1, keepdims=True), rtol=3e-6)


@SOFTMAXES
def test_softmax_of_degenerate_rows(softmax: Any) -> None:
    assert same_bits(softmax(f32(0, -INF)[None]), f32(1, 0)[None])
    assert same_bits(softmax(np.full((2, 20), -INF, np.float32)), np.zeros((2, 20)))
    assert same_bits(softmax(f32(3e38)[None]), f32(1)[None])
    assert same_bits(softmax(f32(1e30, -1e30, 1e30)[None]), f32(0.5, 0, 0.5)[None])
    for bad in (NAN, -NAN, INF):
        for at in (0, 3, 16, 20):
            x = np.arange(21, dtype=np.float32)
            x[at] = bad
            assert all_canonical_nan(softmax(x[None]))
    assert softmax(np.zeros((3, 0), np.float32)).shape == (3, 0)
    cols = 100003 if softmax is ref.softmax else 10007
    assert abs(softmax(np.full((1, cols), 7, np.float32)).astype(np.float64).sum() - 1) <= 1e-5


@SOFTMAXES
def test_softmax_equals_a_scalar_walk_bitwise(softmax: Any) -> None:
    x = 4 * np.random.default_rng(3).standard_normal(75, np.float32)
    m, lanes = np.float32(-INF), [np.float32(0)] * 16
    if softmax is ref.softmax:
        m = x.max()
        for j in range(75):
            lanes[j % 16] = lanes[j % 16] + ref.expf(x[j] - m)
    else:
        for tile in range(0, 75, 16):
            top = max(m, x[tile : tile + 16].max())
            if top > m:
                lanes, m = [lane * ref.expf(m - top) for lane in lanes], top
            for j in range(tile, min(tile + 16, 75)):
                lanes[j % 16] = lanes[j % 16] + ref.expf(x[j] - m)
    r = np.float32(1) / fold_exactly(lanes)
    assert same_bits(softmax(x[None])[0], np.array([ref.expf(v - m) * r for v in x], np.float32))


# --- small formats
# ------------------------------------------------------------------------------------------

ALL16, ALL8 = np.arange(65536, dtype=np.uint16), np.arange(256, dtype=np.uint8)


@pytest.mark.parametrize(
    ("x", "code"),
    [
        (0x33800000, 0x0001), (0x33000000, 0x0000), (0x33000001, 0x0001), (0x33C00000, 0x0002),
        (0x34200000, 0x0002), (0x387FDFFF, 0x03FF), (0x387FE000, 0x0400), (0x3F801000, 0x3C00),
        (0x3F803000, 0x3C02), (0x477FE000, 0x7BFF), (0x477FEFFF, 0x7BFF), (0x477FF000, 0x7C00),
        (0x7F800000, 0x7C00), (0xFF800000, 0xFC00), (0x80000000, 0x8000), (0xB3800000, 0x8001),
        (0x7F800001, 0x7E00), (0x7FFFFFFF, 0x7E00), (0xFF800001, 0x7E00),
    ],
)  # fmt: skip
def test_f32_to_f16(x: int, code: int) -> None:
    assert ref.f32_to_f16(of_bits(x))[0] == code


@pytest.mark.parametrize(
    ("x", "code"),
    [
        (0x3F808000, 0x3F80), (0x3F808001, 0x3F81), (0x3F818000, 0x3F82), (0x7F7F7FFF, 0x7F7F),
        (0x7F7F8000, 0x7F80), (0x7F7FFFFF, 0x7F80), (0x00008000, 0x0000), (0x00008001, 0x0001),
        (0x7F800001, 0x7FC0), (0xFFFFFFFF, 0x7FC0), (0x80000000, 0x8000), (0xFF800000, 0xFF80),
    ],
)  # fmt: skip
def test_f32_to_bf16(x: int, code: int) -> None:
    assert ref.f32_to_bf16(of_bits(x))[0] == code


@pytest.mark.parametrize(
    ("x", "code"),
    [
        (0.0, 0x00), (-0.0, 0x80), (1.0, 0x38), (-1.0, 0xB8),
        (448.0, 0x7E), (449.0, 0x7E), (-INF, 0xFE), (INF, 0x7E),
        (3e38, 0x7E), (NAN, 0x7F), (-NAN, 0x7F), (2.0**-9, 0x01),
        (2.0**-10, 0x00), (-(2.0**-10), 0x80), (1.0001 * 2.0**-10, 0x01), (2.0**-6, 0x08),
        (1.0625, 0x38), (1.1875, 0x3A), (15.5, 0x58),
    ],
)  # fmt: skip
def test_f32_to_e4m3(x: float, code: int) -> None:
    assert ref.f32_to_e4m3(f32(x))[0] == code


@pytest.mark.parametrize(
    ("x", "code"),
    [
        (0.0, 0x00), (-0.0, 0x80), (1.0, 0x3C), (-2.0, 0xC0),
        (57344.0, 0x7B), (65536.0, 0x7B), (-3e38, 0xFB), (INF, 0x7C),
        (-INF, 0xFC), (NAN, 0x7F), (-NAN, 0x7F), (2.0**-16, 0x01),
        (2.0**-17, 0x00), (1.125, 0x3C), (1.375, 0x3E),
    ],
)  # fmt: skip
def test_f32_to_e5m2(x: float, code: int) -> None:
    assert ref.f32_to_e5m2(f32(x))[0] == code


def test_f16_agrees_with_the_f16_of_numpy() -> None:
    wide = ref.f16_to_f32(ALL16)
    own = ALL16.view(np.float16).astype(np.float32)
    number = ~np.isnan(own)
    assert same_bits(wide[number], own[number]) and all_canonical_nan(wide[~number])
    x = np.random.default_rng(1).uniform(-7e4, 7e4, 20000).astype(np.float32)
    x = np.concatenate([x, hostile(9, 20000)])
    x = x[~np.isnan(x)]
    with np.errstate(over="ignore"):
        assert np.array_equal(ref.f32_to_f16(x), x.astype(np.float16).view(np.uint16))


def test_small_formats_widen_to_their_definition() -> None:
    assert np.array_equal(bits(ref.bf16_to_f32(ALL16)), ALL16.astype(np.uint32) << 16)
    e5m2 = ref.e5m2_to_f32(ALL8)  # the upper byte of an f16
    upper = (ALL8.astype(np.uint16) << 8).view(np.float16).astype(np.float32)
    number = ~np.isnan(upper)
    assert same_bits(e5m2[number], upper[number]) and all_canonical_nan(e5m2[~number])
    assert (~number).sum() == 6
    for code, value in enumerate(ref.e4m3_to_f32(ALL8)):
        field, fraction = code >> 3 & 15, code & 7
        magnitude = math.ldexp(8 + fraction, field - 10) if field else math.ldexp(fraction, -9)
        expected = NAN if code & 127 == 127 else math.copysign(magnitude, -1 if code & 128 else 1)
        assert agree(value, f32(expected)[0]), hex(code)


@pytest.mark.parametrize("name", ["f16", "bf16", "e4m3", "e5m2"])
def test_every_code_comes_back_and_every_midpoint_goes_to_even(name: str) -> None:
    narrow, widen = getattr(ref, f"f32_to_{name}"), getattr(ref, f"{name}_to_f32")
    codes = ALL8 if name.startswith("e") else ALL16
    value = widen(codes)
    number = ~np.isnan(value)
    assert np.array_equal(narrow(value[number]), codes[number])
    assert len(set(narrow(value[~number]))) == 1

    half = len(codes) // 2
    low = codes[:half][np.isfinite(value[:half])][:-1]
    middle = ((widen(low).astype(np.float64) + widen(low + low.dtype.type(1))) / 2).astype(
        np.float32
    )
    sign_bit = low.dtype.type(half)
    for sign, flag in ((1, low.dtype.type(0)), (-1, sign_bit)):
        with_sign = np.float32(sign) * middle
        assert np.array_equal(narrow(with_sign), (low + (low & 1)) | flag)
        assert np.array_equal(narrow(np.nextafter(with_sign, np.float32(0))), low | flag)
        assert np.array_equal(
            narrow(np.nextafter(with_sign, np.float32(sign * INF))), (low + 1) | flag
        )


def test_conversions_refuse_other_types() -> None:
    for name in ("f16", "bf16", "e4m3", "e5m2"):
        with pytest.raises(TypeError):
            getattr(ref, f"f32_to_{name}")(np.ones(3))
        with pytest.raises(TypeError):
            getattr(ref, f"{name}_to_f32")(np.ones(3, np.int64))
