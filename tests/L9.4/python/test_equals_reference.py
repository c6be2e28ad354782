# SPDX-License-Identifier: MIT
"""The C library equals ``tinyllm.reference`` bit for bit (ABI.md R9, R10): prefill with every
option, decode through the pool, softmax, exp and the conversions, on ordinary and on hostile
values.

The C tests hold every instruction set to the same bits; here it is the one that runs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tinyllm
from numpy.typing import NDArray
from tinyllm import reference
from tinyllm.ffi.libtinyllm import f32_ptr, load

F32 = np.float32
HOSTILE = np.array([0, -0.0, np.inf, -np.inf, np.nan, 1e-42, -1e-45, 3e38, -3e38, 1e-30], F32)
INF = np.inf
SINKS = np.array([-np.inf, 0, 3, -2, 50, -100, 1e30, np.nan, np.inf, 0.7], F32)


def bits(a: Any) -> NDArray[np.uint32]:
    return np.ascontiguousarray(a, F32).view(np.uint32)


def spoil(rng: np.random.Generator, a: NDArray[np.float32]) -> None:
    hit = rng.random(a.shape) < 0.02
    a[hit] = rng.choice(HOSTILE, int(hit.sum()))


@pytest.mark.parametrize("seed", range(60))
def test_prefill(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n_kv, group = int(rng.integers(1, 3)), int(rng.integers(1, 6))
    width = int(rng.choice([0, 1, 3, 8, 15, 16, 17, 33, 64, 80, 128, 300, 1100]))
    n_rows = int(rng.choice([1, 2, 5, 20]))
    n_keys = int(rng.choice([0, 1, 15, 16, 17, 100, 1023, 1025, 2100]))
    if n_keys > 1000:
        n_rows = 1
    spread = F32(rng.choice([1, 3, 6]))
    q = spread * rng.standard_normal((1, n_kv * group, n_rows, width), F32)
    k = spread * rng.standard_normal((1, n_kv, n_keys, width), F32)
    v = rng.standard_normal((1, n_kv, n_keys, width), F32)
    if seed % 4 == 3:
        for a in (q, k, v):
            spoil(rng, a)
    options: dict[str, Any] = {
        "scale": float(F32(rng.choice([0.25, 1, -2, 0]))),
        "q_offset": int(rng.choice([0, 3, max(n_keys - n_rows, 0), n_keys + 5])),
        "causal": bool(rng.random() < 0.7),
        "window": int(rng.choice([0, -3, 1, 5, 21, 1200, 2**63 - 1])),
        "sink_logits": rng.choice(SINKS, n_kv * group) if seed % 2 else None,
    }
    out, lse = tinyllm.flash_attention(q, k, v, return_lse=True, **options)
    want_out, want_lse = reference.flash_attn_fwd(q, k, v, **options)
    np.testing.assert_array_equal(
        bits(out), bits(want_out), f"out of {q.shape}, {k.shape}, {options}"
    )
    np.testing.assert_array_equal(
        bits(lse), bits(want_lse), f"lse of {q.shape}, {k.shape}, {options}"
    )


@pytest.mark.parametrize(
    ("n_rows", "n_keys", "q_offset", "options"),
    [
        (3, 18000, 17997, {}),
        (1, 33000, 32999, {"window": 17000, "sink_logits": np.array([2, -INF], F32)}),
        (2, 19000, 0, {"causal": False}),
    ],
)
def test_prefill_over_stretches(
    n_rows: int, n_keys: int, q_offset: int, options: dict[str, Any]
) -> None:
    rng = np.random.default_rng(n_keys)
    q = 2 * rng.standard_normal((1, 2, n_rows, 4), F32)
    k, v = rng.standard_normal((2, 1, 1, n_keys, 4), F32)
    options = {"scale": 0.5, "q_offset": q_offset, **options}
    out, lse = tinyllm.flash_attention(q, k, v, return_lse=True, **options)
    want_out, want_lse = reference.flash_attn_fwd(q, k, v, **options)
    np.testing.assert_array_equal(bits(out), bits(want_out))
    np.testing.assert_array_equal(bits(lse), bits(want_lse))


@pytest.mark.parametrize("window", [0, 20000])
def test_decode_over_stretches(window: int) -> None:
    rng = np.random.default_rng(window)
    k, v = rng.standard_normal((2, 1, 33000, 4), F32)
    q = 2 * rng.standard_normal((1, 2, 4), F32)
    with tinyllm.PagedKVCache(None, 331, 100, 1, 1, 4) as cache:
        cache.add_seq(0)
        cache.append(0, 0, k, v)
        out = tinyllm.paged_attention_decode(q, cache, [0], 0, scale=0.5, window=window, threads=2)
        k16, v16 = (a[None] for a in cache.gather(0, 0))
    table, ctx = np.array([[0]]), np.array([33000])
    want = reference.paged_attn_decode(q, k16, v16, table, ctx, scale=0.5, window=window)
    np.testing.assert_array_equal(bits(out), bits(want))


@pytest.mark.parametrize("seed", range(30))
def test_decode_through_the_pool(seed: int) -> None:
    rng = np.random.default_rng(1000 + seed)
    n_kv, group = int(rng.integers(1, 4)), int(rng.choice([1, 2, 3, 4, 5, 9, 17]))
    width, block = (
        int(rng.choice([1, 7, 16, 40, 64, 128, 130])),
        int(rng.choice([1, 3, 16, 33, 300])),
    )
    lengths = [int(n) for n in rng.choice([1, 2, 15, 16, 17, 90, 1025, 1400], 3)]
    window, scale = int(rng.choice([0, 1, 20, 1030])), float(F32(width**-0.5))
    n_blocks = sum(-(-n // block) for n in lengths) + 2
    with tinyllm.PagedKVCache(None, n_blocks, block, 1, n_kv, width) as cache:
        for s, n in enumerate(lengths):
            cache.add_seq(s)
            cache.append(
                s, 0, *(rng.standard_normal((2, n_kv, n, width), F32) * F32(rng.choice([1, 4])))
            )
        q = rng.standard_normal((3, n_kv * group, width), F32)
        out = tinyllm.paged_attention_decode(
            q, cache, [0, 1, 2], 0, scale=scale, window=window, threads=2
        )
        for s in range(3):
            k, v = (a[None].astype(F32) for a in cache.gather(s, 0))
            want, _ = reference.flash_attn_fwd(
                q[s][None, :, None], k, v, scale=scale, q_offset=lengths[s] - 1, window=window
            )
            np.testing.assert_array_equal(
                bits(out[s]), bits(want[0, :, 0]), f"sequence {s} of {lengths}"
            )


@pytest.mark.parametrize("name", ["softmax", "softmax_online"])
def test_softmax(name: str) -> None:
    rng = np.random.default_rng(5)
    run = getattr(load(), f"tl_{name}_f32")
    for i in range(120):
        cols = int(rng.integers(1, 200))
        x = F32(rng.choice([1, 10, 100, 1e30])) * rng.standard_normal((3, cols), F32)
        if i % 3 == 0:
            spoil(rng, x)
        y = np.empty_like(x)
        run(f32_ptr(x), f32_ptr(y), 3, cols)
        np.testing.assert_array_equal(
            bits(y), bits(getattr(reference, name)(x)), f"{cols} columns, case {i}"
        )


def every_nth_float(n: int) -> NDArray[np.float32]:
    return np.arange(0, 2**32, n, dtype=np.uint64).astype(np.uint32).view(F32)


def test_exp() -> None:
    x = every_nth_float(20011)
    y = np.empty_like(x)
    load().tl_exp_f32(f32_ptr(x), f32_ptr(y), x.size)
    np.testing.assert_array_equal(bits(y), bits(reference.expf(x)))


@pytest.mark.parametrize("name", ["f16", "bf16", "e4m3", "e5m2"])
def test_conversions(name: str) -> None:
    lib = load()
    x = every_nth_float(20011)
    narrowed = getattr(reference, f"f32_to_{name}")(x)
    narrow, widen = getattr(lib, f"tl_f32_to_{name}"), getattr(lib, f"tl_{name}_to_f32")
    assert [narrow(float(value)) for value in x[::7]] == narrowed[::7].tolist()
    codes = np.arange(np.iinfo(narrowed.dtype).max + 1, dtype=narrowed.dtype)
    got = np.array([widen(int(code)) for code in codes], F32)
    # Any NaN equals any other here: which quiet NaN a code widens to is not fixed.
    np.testing.assert_array_equal(got, getattr(reference, f"{name}_to_f32")(codes))
