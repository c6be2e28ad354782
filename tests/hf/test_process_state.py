# SPDX-License-Identifier: MIT
"""What a process has set for itself changes no bit: default dtype and device, grad mode, threads,
numpy's error state, warnings, locale."""

from __future__ import annotations

import locale
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from tiny import CACHE, generate, models, padded, prompts
from tinyllm.hf import (
    FixedTileLinear,
    Packed,
    PagedCache,
    forward_packed,
    make_batch_invariant,
    new_kv,
)
from tinyllm.hf.attention import attention


@contextmanager
def setting(set_it: Callable[[Any], Any], value: Any, back: Any) -> Iterator[None]:
    set_it(value)
    try:
        yield
    finally:
        set_it(back)


@contextmanager
def warnings_raise() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


@contextmanager
def another_locale() -> Iterator[None]:
    old = locale.setlocale(locale.LC_ALL)
    for name in ("de_DE.UTF-8", "fr_FR.UTF-8", "C.UTF-8"):
        try:
            locale.setlocale(locale.LC_ALL, name)
            break
        except locale.Error:
            continue
    try:
        yield
    finally:
        locale.setlocale(locale.LC_ALL, old)


STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    **{
        f"default dtype {dtype}": lambda d=dtype: setting(torch.set_default_dtype, d, torch.float32)
        for dtype in (torch.float16, torch.bfloat16, torch.float64)
    },
    "default device meta": lambda: torch.device("meta"),
    "gradients": torch.enable_grad,
    "inference mode": torch.inference_mode,
    "numpy raises": lambda: np.errstate(all="raise"),
    "denormals flushed": lambda: setting(torch.set_flush_denormal, True, False),
    "deterministic": lambda: setting(torch.use_deterministic_algorithms, True, False),
    "warnings raise": warnings_raise,
    "locale": another_locale,
    "2 threads": lambda: setting(torch.set_num_threads, 2, 1),
}


class Layer(torch.nn.Module):
    layer_idx = 0
    is_causal = True


def everything(dtype: torch.dtype) -> list[Any]:
    """Results of all that is here and takes tensors, from tensors that are there already."""
    generator = torch.Generator("cpu").manual_seed(0)
    shapes = [(2, 6, 4, 16), (2, 6, 2, 16), (2, 6, 2, 16)]
    q, k, v = (
        torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")
        .to(dtype)
        .transpose(1, 2)
        for shape in shapes
    )
    seen = torch.tensor([[1] * 6, [0, 0, 1, 0, 1, 1]], device="cpu")
    sinks = torch.tensor([0.5, 1.0, -1.0, 1e-40], dtype=torch.float32, device="cpu")
    results = []
    for mask in (None, seen):
        results.append(attention(Layer(), q, k, v, mask, scaling=0.3, softcap=5.0, s_aux=sinks)[0])
        with PagedCache(CONFIG, block_size=4) as cache:
            cache.update(k, v, 0)
            results.append(attention(Layer(), q, k, v, mask, scaling=0.3, s_aux=sinks)[0])
            cache.reorder_cache(torch.tensor([1, 0], device="cpu"))
            cache.crop(-1)
            results += [torch.from_numpy(a) for s in cache.seq_ids for a in cache.kv.gather(s, 0)]
    with new_kv(CONFIG, 16) as kv:
        kv.add_seq("a")
        batch = Packed(kv, ["a"], [6])
        results += [batch.position_ids, batch.last]
        results.append(attention(Layer(), q[:1], k[:1], v[:1], None, tl_batch=batch)[0])
    linear = FixedTileLinear(LINEAR.to(dtype))
    x = q.transpose(1, 2).reshape(12, 64)
    results.append(linear(x))
    return results


(MODEL,) = models("llama", "tinyllm")
CONFIG = models("llama", "tinyllm", num_hidden_layers=1)[0].config
LINEAR = torch.nn.Linear(64, 8)
for parameter in (*MODEL.parameters(), *LINEAR.parameters()):
    parameter.requires_grad_(False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("state", STATES)
def test_functions_give_the_same_bits(state: str, dtype: torch.dtype) -> None:
    wanted = everything(dtype)
    with STATES[state]():
        got = everything(dtype)
    for a, b in zip(wanted, got, strict=True):
        assert a.dtype == b.dtype and a.device == b.device and torch.equal(a, b)


# On a default device transformers makes tensors; denormals and threads change torch's own bits.
@pytest.mark.parametrize(
    "state", [s for s in STATES if not s.startswith(("default device", "denormals", "2 threads"))]
)
def test_models_give_the_same_bits(state: str) -> None:
    inputs = padded(prompts(7, 4))

    def run() -> list[Any]:
        results = []
        with PagedCache(MODEL.config, block_size=4) as cache:
            results.append(MODEL(**inputs, **{CACHE: cache}).logits)
        with PagedCache(MODEL.config, block_size=4) as cache:
            results += generate(MODEL, inputs, cache, n=3).logits
        with new_kv(MODEL.config, 16) as kv:
            kv.add_seq("a")
            kv.add_seq("b")
            work = dict(zip("ab", prompts(7, 4), strict=True))
            results.append(forward_packed(MODEL, kv, work))
        results.append(MODEL(**inputs, use_cache=False).logits)
        return results

    wanted = run()
    with STATES[state]():
        got = run()
    assert len(wanted) == len(got) == 6
    for a, b in zip(wanted, got, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("state", [s for s in STATES if "dtype" in s])
def test_an_invariant_model_gives_the_same_bits(state: str) -> None:
    wanted = None
    for enter in (STATES["inference mode"], STATES[state]):
        (model,) = models("llama", "tinyllm")
        make_batch_invariant(model.requires_grad_(False))
        with enter(), new_kv(model.config, 16) as kv:
            kv.add_seq("a")
            logits = forward_packed(model, kv, {"a": [5, 6, 7]})
        wanted = logits if wanted is None else wanted
        assert torch.equal(logits, wanted)
