# SPDX-License-Identifier: MIT
"""windowed_attention against cases worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinyllm.modern.window import windowed_attention

INF, NAN = math.inf, math.nan


def means(n_keys: int, n_rows: int, **options: Any) -> tuple[list[float], list[float]]:
    """Out and lse over K = 0 and V = j: the mean of what a row sees, the log of their number."""
    q, k = np.ones((1, 1, n_rows, 1)), np.zeros((1, 1, n_keys, 1))
    v = np.arange(float(n_keys)).reshape(1, 1, n_keys, 1)
    out, lse = windowed_attention(q, k, v, **options)
    return out.ravel().tolist(), lse.ravel().tolist()


def logs(*counts: float) -> Any:
    return pytest.approx([math.log(n) if n else -INF for n in counts], abs=1e-15)


def test_three_keys_two_of_which_score_one() -> None:
    # Scores 1, 0, 1 at scale 1: (e*1 + 3 + e*5) / (2e + 1) = 3, and 4 for the other component.
    k = np.array([[1.0, 0], [0, 1], [1, 1]]).reshape(1, 1, 3, 2)
    v = np.array([[1.0, 2], [3, 4], [5, 6]]).reshape(1, 1, 3, 2)
    out, lse = windowed_attention(
        np.array([1.0, 0]).reshape(1, 1, 1, 2), k, v, q_offset=2, scale=1.0
    )
    np.testing.assert_allclose(out.ravel(), [3, 4], rtol=1e-15)
    np.testing.assert_allclose(lse.ravel(), [math.log(2 * math.e + 1)], rtol=1e-15)


def test_row_i_stands_at_q_offset_plus_i() -> None:
    assert means(4, 2, q_offset=2) == ([1.0, 1.5], logs(3, 4))
    assert means(4, 4) == ([0.0, 0.5, 1.0, 1.5], logs(1, 2, 3, 4))
    assert means(2, 4) == (
        [0.0, 0.5, 0.5, 0.5],
        logs(1, 2, 2, 2),
    )  # past the keys every key is seen


@pytest.mark.parametrize(
    ("window", "mean"),
    [(1, 7.0), (2, 6.5), (3, 6.0), (8, 3.5), (9, 3.5), (None, 3.5), (2**62, 3.5)],
)
def test_the_window_counts_the_rows_own_position(window: int | None, mean: float) -> None:
    assert means(8, 1, q_offset=7, window=window)[0] == [mean]


def test_rows_that_see_nothing_are_zeros_with_lse_minus_infinity() -> None:
    v = np.array([3.0, 5.0]).reshape(1, 1, 2, 1)
    q, k = np.ones((1, 1, 4, 1)), np.zeros((1, 1, 2, 1))
    for window, wanted, counts in (
        (1, [3.0, 5, 0, 0], (1, 1, 0, 0)), (2, [3.0, 4, 5, 0], (1, 2, 1, 0)),
        (None, [3.0, 4, 4, 4], (1, 2, 2, 2)),
        (0, [0.0] * 4, (0, 0, 0, 0)),
    ):  # fmt: skip
        out, lse = windowed_attention(q, k, v, window=window)
        assert out.ravel().tolist() == wanted
        assert lse.ravel().tolist() == logs(*counts)
    none = np.zeros((1, 1, 0, 1))
    out, lse = windowed_attention(np.ones((1, 1, 3, 1)), none, none)
    assert out.ravel().tolist() == [0.0] * 3
    assert lse.ravel().tolist() == [-INF] * 3


def test_the_first_keys_stay_visible_as_sinks() -> None:
    # Row 7 sees 6 and 7 through a window of 2, and 0 and 1 as sinks: mean 14/4. Sinks are causal
    # too.
    assert means(8, 1, q_offset=7, window=2, n_sink=2) == ([3.5], logs(4))
    assert means(8, 2, window=1, n_sink=2) == ([0.0, 0.5], logs(1, 2))
    assert means(8, 1, q_offset=7, window=8, n_sink=2) == (
        [3.5],
        logs(8),
    )  # a key in both counts once
    assert means(8, 1, q_offset=7, window=0, n_sink=3) == ([1.0], logs(3))


def test_a_sink_logit_joins_the_denominator_once_per_head_and_is_not_scaled() -> None:
    q, k, v = (
        np.ones((1, 2, 1, 1)),
        np.zeros((1, 1, 2, 1)),
        np.array([3.0, 5.0]).reshape(1, 1, 2, 1),
    )
    out, lse = windowed_attention(q, k, v, q_offset=1, sink_logits=[math.log(2), -INF], scale=100.0)
    np.testing.assert_allclose(
        out.ravel(), [8 / 4, 4.0], rtol=1e-15
    )  # two keys of weight 1 and a sink of weight 2
    np.testing.assert_allclose(lse.ravel(), [math.log(4), math.log(2)], rtol=1e-15)
    nothing = np.zeros((1, 1, 0, 1))
    out, lse = windowed_attention(q, nothing, nothing, sink_logits=[1.25, -INF])
    assert out.ravel().tolist() == [0.0, 0.0]
    assert lse.ravel().tolist() == [1.25, -INF]


def test_query_heads_read_the_kv_head_of_their_group() -> None:
    v = np.array([1.0, 2.0]).reshape(1, 2, 1, 1)
    out, _ = windowed_attention(np.ones((1, 6, 1, 1)), np.zeros((1, 2, 1, 1)), v)
    assert out.ravel().tolist() == [1, 1, 1, 2, 2, 2]
    out, _ = windowed_attention(np.ones((1, 3, 1, 1)), np.zeros((1, 1, 1, 1)), v[:, 1:])
    assert out.ravel().tolist() == [2, 2, 2]


def test_scores_are_shifted_so_large_ones_neither_overflow_nor_change_lse() -> None:
    k = np.array([1000.0, 999, -1000]).reshape(1, 1, 3, 1)
    v = np.array([1.0, 2, 4]).reshape(1, 1, 3, 1)
    out, lse = windowed_attention(np.ones((1, 1, 1, 1)), k, v, q_offset=2)
    np.testing.assert_allclose(
        [out.item(), lse.item()], [1.2689414213699952, 1000.3132616875182], rtol=1e-15
    )
    out, lse = windowed_attention(
        np.ones((1, 1, 1, 1)), np.full((1, 1, 1, 1), -5.0), np.full((1, 1, 1, 1), 0.1)
    )
    assert (out.item(), lse.item()) == (0.1, -5.0)


def test_scale_none_is_one_over_the_root_of_the_width() -> None:
    q, k = np.ones((1, 1, 1, 4)), np.array([[1.0] * 4, [0.0] * 4]).reshape(1, 1, 2, 4)
    _, lse = windowed_attention(q, k, np.zeros((1, 1, 2, 4)), q_offset=1)
    np.testing.assert_allclose(lse.item(), math.log(math.exp(2.0) + 1))  # 4 * 4**-0.5
    out, lse = windowed_attention(
        np.ones((1, 1, 1, 0)), np.ones((1, 1, 2, 0)), np.ones((1, 1, 2, 0)), q_offset=1
    )
    assert (out.shape, lse.item()) == ((1, 1, 1, 0), pytest.approx(math.log(2)))


@pytest.mark.parametrize("poison", [NAN, INF, -INF])
def test_what_a_row_does_not_see_has_no_influence(poison: float) -> None:
    rng = np.random.default_rng(5)
    q, k, v = (rng.standard_normal((1, 1, 6, 2)) for _ in range(3))
    clean = windowed_attention(q, k, v, window=2)
    k[:, :, 5] = v[:, :, 5] = poison
    for got, wanted in zip(windowed_attention(q, k, v, window=2), clean, strict=True):
        assert got[:, :, :5].tolist() == wanted[:, :, :5].tolist()


@pytest.mark.parametrize("score", [NAN, INF])
def test_a_visible_score_that_is_nan_or_infinite_makes_its_row_nan(score: float) -> None:
    k = np.array([0.0, score, 0]).reshape(1, 1, 3, 1)
    out, lse = windowed_attention(np.ones((1, 1, 3, 1)), k, np.ones((1, 1, 3, 1)), window=1)
    assert np.isnan(out.ravel()).tolist() == np.isnan(lse.ravel()).tolist() == [False, True, False]
    out, lse = windowed_attention(
        np.ones((1, 1, 1, 1)), k[:, :, :1], k[:, :, :1], sink_logits=[score]
    )
    assert np.isnan([out.item(), lse.item()]).all()


def test_scores_of_minus_infinity_have_no_weight() -> None:
    k = np.array([-INF, 0.0]).reshape(1, 1, 2, 1)
    v = np.array([3.0, 5.0]).reshape(1, 1, 2, 1)
    out, lse = windowed_attention(np.ones((1, 1, 2, 1)), k, v)
    assert out.ravel().tolist() == [0.0, 5.0]
    assert lse.ravel().tolist() == [-INF, 0.0]


def test_results_are_float64_of_the_documented_shapes_and_inputs_stay() -> None:
    q = np.ones((2, 4, 3, 5), np.float32)
    k = v = np.ones((2, 2, 7, 5), np.float16)
    before = q.copy(), k.copy()
    out, lse = windowed_attention(q, k, v, window=3, sink_logits=np.zeros(4, np.float32))
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (
        (2, 4, 3, 5),
        np.float64,
        (2, 4, 3),
        np.float64,
    )
    assert (q == before[0]).all()
    assert (k == before[1]).all()


@given(
    st.integers(0, 9),
    st.integers(0, 9),
    st.integers(0, 12),
    st.one_of(st.none(), st.integers(0, 12)),
    st.integers(0, 4),
)
@settings(deadline=None)
def test_every_row_sees_exactly_the_keys_of_the_rule(
    rows: int, keys: int, offset: int, window: int | None, n_sink: int
) -> None:
    """V is one bit per key, so that out times the number of keys spells the set of keys seen."""
    v = 2.0 ** np.arange(keys).reshape(1, 1, keys, 1)
    out, lse = windowed_attention(
        np.ones((1, 1, rows, 1)),
        np.zeros((1, 1, keys, 1)),
        v,
        window=window,
        n_sink=n_sink,
        q_offset=offset,
    )
    for i in range(rows):
        p = offset + i
        seen = {
            j for j in range(keys) if j <= p and (window is None or j > p - window or j < n_sink)
        }
        assert round(out[0, 0, i, 0] * len(seen)) == sum(2**j for j in seen)
        assert lse[0, 0, i] == (pytest.approx(math.log(len(seen)), abs=1e-12) if seen else -INF)


@pytest.mark.parametrize(
    ("q", "k", "v"),
    [
        ((1, 1, 1), (1, 1, 1, 1), (1, 1, 1, 1)),
        ((1, 1, 1, 1), (1, 1, 1), (1, 1, 1)),
        ((1, 1, 1, 1), (2, 1, 1, 1), (2, 1, 1, 1)),
        ((1, 1, 1, 2), (1, 1, 1, 1), (1, 1, 1, 1)),
        ((1, 1, 1, 1), (1, 1, 2, 1), (1, 1, 1, 1)),
        ((1, 1, 1, 1), (1, 1, 1, 1), (2, 1, 1, 1)),
        ((1, 2, 1, 1), (1, 1, 1, 1), (1, 2, 1, 1)),
        ((1, 3, 1, 1), (1, 2, 1, 1), (1, 2, 1, 1)),
        ((1, 2, 1, 1), (1, 3, 1, 1), (1, 3, 1, 1)),
        ((1, 1, 1, 1), (1, 0, 1, 1), (1, 0, 1, 1)),
    ],
)
def test_shapes_that_disagree_are_a_value_error(q: Any, k: Any, v: Any) -> None:
    with pytest.raises(ValueError, match="windowed_attention"):
        windowed_attention(np.ones(q), np.ones(k), np.ones(v))


@pytest.mark.parametrize("width", [0, 1, 3, 7])
def test_values_may_have_another_width_than_keys(width: int) -> None:
    """Column by column what values of the width of the keys give: no column looks at another."""
    rng = np.random.default_rng(6)
    q, k = rng.standard_normal((2, 4, 3, 2)), rng.standard_normal((2, 2, 5, 2))
    v = rng.standard_normal((2, 2, 5, width))
    options: dict[str, Any] = {"q_offset": 3, "window": 4, "sink_logits": rng.standard_normal(4)}
    out, lse = windowed_attention(q, k, v, **options)
    assert (out.shape, lse.shape) == ((2, 4, 3, width), (2, 4, 3))
    for d in range(width):
        one, one_lse = windowed_attention(q, k, np.repeat(v[..., d : d + 1], 2, axis=3), **options)
        np.testing.assert_allclose(out[..., d], one[..., 0], rtol=1e-13)
        np.testing.assert_allclose(lse, one_lse, rtol=1e-15)


@pytest.mark.parametrize("name", ["n_sink", "q_offset"])
@pytest.mark.parametrize("value", [-1, -(2**63)])
def test_negative_sinks_and_offsets_are_a_value_error(name: str, value: int) -> None:
    one = np.ones((1, 1, 1, 1))
    with pytest.raises(ValueError, match=f"windowed_attention: {name} = {value}"):
        windowed_attention(one, one, one, **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 1), (1, 2)])
def test_sink_logits_of_another_shape_are_a_value_error(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="sink_logits"):
        windowed_attention(
            np.ones((1, 2, 1, 1)),
            np.ones((1, 1, 1, 1)),
            np.ones((1, 1, 1, 1)),
            sink_logits=np.ones(shape),
        )
