# SPDX-License-Identifier: MIT
"""Forwards that fail, are interrupted or refused: the cache is as before, and the same call again
gives the bits of one that nobody disturbed."""

from __future__ import annotations

import contextlib
import copy
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import tinyllm.hf
import torch
from tiny import CACHE, generate, models, padded, prompts
from tinyllm.hf import PagedCache, attention, forward_packed, new_kv, rows

N_LAYERS = 4
FIRST, SECOND = prompts(9, 4), prompts(3, 3, seed=5)  # two turns of two rows
SOURCES = Path(tinyllm.hf.__file__).parent


@pytest.fixture(scope="module")
def model() -> Any:
    return models("llama", "tinyllm")[0]


@pytest.fixture
def cache(model: Any) -> Iterator[PagedCache]:
    with PagedCache(model.config, num_blocks=32, block_size=4) as cache:
        yield cache


def turns(n: int) -> dict[str, Any]:
    """What forward ``n`` brings; the mask of the second covers the padding of the first."""
    first = padded(FIRST)
    if n == 0:
        return first
    new = torch.tensor(SECOND)
    mask = torch.cat([first["attention_mask"], torch.ones_like(new)], 1)
    positions = (mask.cumsum(1) - 1)[:, -3:]
    return {"input_ids": new, "attention_mask": mask, "position_ids": positions}


def read(model: Any, cache: PagedCache, n: int) -> Any:
    with torch.no_grad():
        return model(**turns(n), **{CACHE: cache}).logits


def state(cache: PagedCache) -> tuple[int, list[list[int]], list[bytes]]:
    """Columns, the positions of each layer of each row, and all that is stored."""
    layers = range(len(cache))
    if cache.kv is None:
        return cache.n_columns, [], []
    lengths = [[cache.kv.seq_len(s, i) for i in layers] for s in cache.seq_ids]
    stored = [a.tobytes() for s in cache.seq_ids for i in layers for a in cache.kv.gather(s, i)]
    return cache.n_columns, lengths, stored


@pytest.fixture(scope="module")
def undisturbed(model: Any) -> list[Any]:
    """The logits of both turns."""
    with PagedCache(model.config, num_blocks=32, block_size=4) as cache:
        return [read(model, cache, n) for n in range(2)]


def used(cache: PagedCache) -> int:
    return 0 if cache.kv is None else int(cache.kv.stats()["used"])


class Stop(BaseException):
    """Neither an Exception nor a KeyboardInterrupt."""


# --- where it fails
# ----------------------------------------------------------------------------------------------

Fail = Callable[[], None]


def before_attention(
    model: Any, cache: PagedCache, layer: int, fail: Fail, m: pytest.MonkeyPatch
) -> None:
    """Behind the layer before, with nothing offered."""
    m.setattr(model.model.layers[layer].self_attn, "forward", lambda *a, **k: fail())


def keys_are_offered(
    model: Any, cache: PagedCache, layer: int, fail: Fail, m: pytest.MonkeyPatch
) -> None:
    """Between the cache and the attention function."""
    real = cache.offer

    def offer(index: int, key: Any) -> None:
        real(index, key)
        if index == layer:
            fail()

    m.setattr(cache, "offer", offer)


def before_the_write(
    model: Any, cache: PagedCache, layer: int, fail: Fail, m: pytest.MonkeyPatch
) -> None:
    real = attention._refuse

    def refuse(module: Any, *rest: Any) -> None:
        real(module, *rest)
        if module.layer_idx == layer:
            fail()

    m.setattr(attention, "_refuse", refuse)


def _around_append(n: int) -> Callable[..., None]:
    def install(
        model: Any, cache: PagedCache, layer: int, fail: Fail, m: pytest.MonkeyPatch
    ) -> None:
        real, seen = tinyllm.PagedKVCache.append, []

        def append(kv: Any, seq_id: Any, index: int, k: Any, v: Any) -> None:
            real(kv, seq_id, index, k, v)
            if index == layer:
                seen.append(seq_id)
                if len(seen) == n:
                    fail()

        m.setattr(tinyllm.PagedKVCache, "append", append)

    return install


one_row_is_appended, all_rows_are_appended = _around_append(1), _around_append(2)


def _around_kernel(first: bool) -> Callable[..., None]:
    def install(
        model: Any, cache: PagedCache, layer: int, fail: Fail, m: pytest.MonkeyPatch
    ) -> None:
        real, calls = rows.paged_attention, []

        def kernel(*args: Any, **kwargs: Any) -> Any:
            calls.append(None)
            now = len(calls) == layer + 1
            if now and first:
                fail()
            result = real(*args, **kwargs)
            if now:
                fail()
            return result

        m.setattr(rows, "paged_attention", kernel)

    return install


inside_attention, attention_is_done = _around_kernel(True), _around_kernel(False)


def behind_attention(
    model: Any, cache: PagedCache, layer: int, fail: Fail, m: pytest.MonkeyPatch
) -> None:
    """In the rest of the layer; of the last one the forward is stored by then."""
    m.setattr(model.model.layers[layer].mlp, "forward", lambda *a, **k: fail())


STAGES = {
    f.__name__: f for f in (before_attention, keys_are_offered, before_the_write, behind_attention)
} | {
    "one_row_is_appended": one_row_is_appended,
    "all_rows_are_appended": all_rows_are_appended,
    "inside_attention": inside_attention,
    "attention_is_done": attention_is_done,
}


# Elsewhere the next forward, or whatever comes first, takes back what the one that failed has stored.
AT_ONCE = {
    "before_the_write",
    "one_row_is_appended",
    "all_rows_are_appended",
    "inside_attention",
    "attention_is_done",
}


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError, Stop])
@pytest.mark.parametrize("layer", range(N_LAYERS))
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("turn", [0, 1])
def test_a_forward_that_failed_can_be_called_again(
    model: Any, cache: PagedCache, undisturbed: list[Any], stage: str, layer: int, turn: int,
    error: type[BaseException],
) -> None:  # fmt: skip
    def fail() -> None:
        raise error

    for n in range(turn):
        read(model, cache, n)
    before, blocks = state(cache), used(cache)
    with pytest.MonkeyPatch.context() as m:
        STAGES[stage](model, cache, layer, fail, m)
        with pytest.raises(error):
            read(model, cache, turn)
    n_columns = before[0]
    if stage == "behind_attention" and layer == N_LAYERS - 1:
        n_new = turns(turn)["input_ids"].shape[1]
        assert cache.n_columns == n_columns + n_new
        cache.crop(-n_new)
    assert cache.n_columns == cache.get_seq_length() == n_columns
    if stage in AT_ONCE:
        assert state(cache) == before and used(cache) == blocks
    for n in range(turn, 2):
        assert torch.equal(read(model, cache, n), undisturbed[n])


def test_what_was_left_unfinished_ends_with_whatever_comes_next(model: Any) -> None:
    def stop(*args: Any) -> None:
        raise KeyboardInterrupt

    operations: list[tuple[Callable[[PagedCache], Any], int, int]] = [
        (lambda c: c.crop(-1), 8, 2),
        (lambda c: c.reorder_cache(torch.tensor([1, 0])), 9, 2),
        (lambda c: c.batch_repeat_interleave(2), 9, 4),
        (lambda c: c.batch_select_indices(torch.tensor([1])), 9, 1),
        (copy.deepcopy, 9, 2),
        (lambda c: c.reset(), 0, 0),
    ]
    for operation, n_columns, n_rows in operations:
        with PagedCache(model.config, num_blocks=64, block_size=4) as cache:
            read(model, cache, 0)
            hook = model.model.layers[2].register_forward_pre_hook(stop)
            with pytest.raises(KeyboardInterrupt):
                read(model, cache, 1)
            hook.remove()
            assert cache.n_columns == 9
            other = operation(cache)
            for one in (cache, other) if isinstance(other, PagedCache) else (cache,):
                _, lengths, _ = state(one)
                assert one.n_columns == n_columns and len(lengths) == n_rows
                assert all(len(set(layers)) == 1 for layers in lengths)


# --- every line
# ----------------------------------------------------------------------------------------------


class Tripwire:
    """Raises ``error`` at the n-th line that is run of some files; counts them without one."""

    def __init__(self, files: tuple[str, ...], n: int = -1, error: type[BaseException] = Stop):
        self.files, self.n, self.error, self.count = files, n, error, 0

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "call" and not frame.f_code.co_filename.endswith(self.files):
            return None
        if event in ("line", "return"):
            if self.count == self.n:
                self.count += 1
                sys.settrace(None)
                raise self.error
            self.count += 1
        return self

    def __enter__(self) -> Tripwire:
        sys.settrace(self)
        return self

    def __exit__(self, *exc: object) -> None:
        sys.settrace(None)


FILES = tuple(str(SOURCES / name) for name in ("attention.py", "cache.py", "rows.py"))


@pytest.mark.parametrize("turn", [0, 1])
def test_a_forward_can_fail_at_every_line(model: Any, undisturbed: list[Any], turn: int) -> None:
    """In the last lines the forward is stored, and says so."""

    def disturbed(n: int) -> tuple[int, bool]:
        with PagedCache(model.config, num_blocks=32, block_size=4) as cache:
            for i in range(turn):
                read(model, cache, i)
            before = cache.n_columns
            with contextlib.suppress(Stop), Tripwire(FILES, n) as wire:
                read(model, cache, turn)
            stored = cache.n_columns > before
            if stored and wire.count > n >= 0:
                cache.crop(before - cache.n_columns)
            if n >= 0:
                for i in range(turn, 2):
                    assert torch.equal(read(model, cache, i), undisturbed[i]), n
                assert used(cache) == 3 + 2, n
            return wire.count, stored

    n_lines, _ = disturbed(-1)
    assert n_lines > 300
    stored = [n for n in range(n_lines) if disturbed(n)[1]]
    assert stored == list(range(n_lines - len(stored), n_lines)) and len(stored) < 3
