# SPDX-License-Identifier: MIT
"""Forwards that fail, are interrupted or refused: the cache is as before, and the same call again
gives the bits of one that nobody disturbed."""

from __future__ import annotations

import contextlib
import copy
import pickle
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import pytest
import tinyllm.hf
import torch
from tiny import CACHE, generate, models, padded, prompts
from tinyllm.hf import Packed, PagedCache, attention, forward_packed, new_kv, rows

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


# Elsewhere whatever comes next takes back what the forward that failed has stored.
AT_ONCE = {
    "before_the_write",
    "one_row_is_appended",
    "all_rows_are_appended",
    "inside_attention",
    "attention_is_done",
}


@pytest.mark.parametrize("layer", range(N_LAYERS))
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("turn", [0, 1])
def test_a_forward_that_failed_can_be_called_again(
    model: Any, cache: PagedCache, undisturbed: list[Any], stage: str, layer: int, turn: int
) -> None:
    error = (KeyboardInterrupt, MemoryError, Stop)[(layer + turn) % 3]

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


def test_an_interrupt_is_not_hidden_by_what_cannot_be_taken_back(
    model: Any, cache: PagedCache, undisturbed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*args: Any, **kwargs: Any) -> None:
        raise KeyboardInterrupt

    def busy(*args: Any) -> None:
        raise RuntimeError("in use")

    read(model, cache, 0)
    with monkeypatch.context() as m:
        m.setattr(rows, "paged_attention", stop)
        m.setattr(cache.kv, "truncate", busy)
        with pytest.raises(KeyboardInterrupt):
            read(model, cache, 1)
    assert torch.equal(read(model, cache, 1), undisturbed[1])


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
def test_a_forward_can_fail_at_every_line(turn: int) -> None:
    """In the last lines the forward is stored, and says so."""
    (model,) = models("llama", "tinyllm", num_hidden_layers=2)

    def disturbed(n: int, wanted: list[Any]) -> tuple[int, bool]:
        """How many lines there were, and whether the forward was stored."""
        with PagedCache(model.config, num_blocks=32, block_size=4) as cache:
            for i in range(turn):
                read(model, cache, i)
            before = cache.n_columns
            with contextlib.suppress(Stop), Tripwire(FILES, n) as wire:
                wanted.append(read(model, cache, turn))
            stored = cache.n_columns > before
            if n >= 0 and stored:
                cache.crop(before - cache.n_columns)
            if n >= 0:
                assert torch.equal(read(model, cache, turn), wanted[0]), n
            return wire.count, stored

    wanted: list[Any] = []
    n_lines, _ = disturbed(-1, wanted)
    assert n_lines > 300
    stored = [n for n in range(n_lines) if disturbed(n, wanted)[1]]
    assert stored == list(range(n_lines - len(stored), n_lines)) and len(stored) < 3


# --- signals
# ----------------------------------------------------------------------------------------------


class Alarm:
    """SIGINT after some seconds, which Python turns into a KeyboardInterrupt."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.late = seconds, False

    def _ring(self, *args: Any) -> None:
        if not self.late:
            raise KeyboardInterrupt

    def __enter__(self) -> Alarm:
        self._old = signal.signal(signal.SIGALRM, self._ring)
        signal.setitimer(signal.ITIMER_REAL, self.seconds)
        return self

    def __exit__(self, *exc: object) -> None:
        self.late = True
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._old)


def test_forwards_under_signals_can_be_called_again(model: Any, undisturbed: list[Any]) -> None:
    seconds = [1e-4 * (1 + i % 60) for i in range(240)]
    n_interrupted = 0
    for i, wait in enumerate(seconds):
        with PagedCache(model.config, num_blocks=32, block_size=4) as cache:
            for n in range(2):
                held = cache.n_columns
                while True:
                    try:
                        with Alarm(wait if i % 2 == n else 10):
                            logits = read(model, cache, n)
                        break
                    except KeyboardInterrupt:
                        n_interrupted += 1
                        wait = 10
                        if cache.n_columns > held:
                            cache.crop(held - cache.n_columns)
                assert torch.equal(logits, undisturbed[n])
    assert n_interrupted > 20


class Told:
    """A streamer: the tokens so far."""

    def __init__(self) -> None:
        self.ids: list[int] = []

    def put(self, ids: Any) -> None:
        self.ids += ids.reshape(-1).tolist()

    def end(self) -> None:
        pass


@pytest.mark.parametrize("crops", [True, False])
def test_generate_goes_on_from_the_text_so_far(model: Any, crops: bool) -> None:
    """Also without a crop, where the versions of transformers at hand allow it; then a prompt may
    be read again."""
    (prompt,) = prompts(9)
    wanted = generate(model, padded([prompt]), n=12).sequences[0].tolist()
    n_interrupted = 0
    for i in range(30):
        with PagedCache(model.config, num_blocks=32, block_size=4) as cache:
            text, wait = prompt, 1e-3 * (1 + i)
            while len(text) < len(wanted):
                told = Told()
                try:
                    with Alarm(wait):
                        n = len(wanted) - len(text)
                        if crops and cache.n_columns:
                            cache.crop(len(text) - 1)
                        text = (
                            generate(model, padded([text]), cache, n=n, streamer=told)
                            .sequences[0]
                            .tolist()
                        )
                except KeyboardInterrupt:
                    n_interrupted += 1
                    wait = 10
                    text = told.ids or text
                except IndexError:  # transformers 5.0 has no columns to bring then
                    assert not crops and CACHE == "past_key_values"
                    cache.crop(len(text) - 1)
            assert text == wanted
    assert n_interrupted > 10


@pytest.mark.skipif(CACHE == "past_key_values", reason="that transformers brings no columns then")
@pytest.mark.parametrize("batch", [prompts(9), prompts(9, 6)])
@pytest.mark.parametrize("shorter", [0, 1, 4])
def test_generate_begins_again_from_a_text_that_the_cache_holds(
    model: Any, batch: list[list[int]], shorter: int
) -> None:
    inputs = padded(batch)
    wanted = generate(model, inputs, n=8).sequences
    n = 9 + 8 - 1 - shorter
    text = {
        "input_ids": wanted[:, :n],
        "attention_mask": torch.cat(
            [inputs["attention_mask"], torch.ones(len(batch), n - 9, dtype=torch.long)], 1
        ),
    }
    with PagedCache(model.config, num_blocks=32, block_size=4) as cache:
        assert torch.equal(generate(model, inputs, cache, n=8).sequences, wanted)
        assert cache.n_columns == n + shorter
        got = generate(model, text, cache, n=17 - n).sequences
        assert torch.equal(got, wanted) and cache.n_columns == 16


@pytest.mark.skipif(CACHE == "past_key_values", reason="that transformers brings no columns then")
def test_a_text_far_behind_the_cache_is_told_to_crop(model: Any, cache: PagedCache) -> None:
    generate(model, padded(prompts(9)), cache, n=12)
    with pytest.raises(ValueError, match=r"a forward of no columns.*cache\.crop\(n - 1\)"):
        generate(model, padded(prompts(9)), cache, n=2)
    cache.crop(8)
    generate(model, padded(prompts(9)), cache, n=2)


def test_a_mask_of_the_new_columns_alone_is_refused(model: Any, cache: PagedCache) -> None:
    read(model, cache, 0)
    new = torch.tensor(SECOND)
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match=r"the 9 .* and the 3 of this"),
    ):
        model(new, attention_mask=torch.ones_like(new), **{CACHE: cache})


# --- what is refused
# ----------------------------------------------------------------------------------------------


REFUSED: dict[str, tuple[type[Exception], dict[str, Any]]] = {
    "output_attentions": (ValueError, {"output_attentions": True}),
    "head_mask": (ValueError, {"head_mask": torch.ones(1)}),
    "packed": (ValueError, {"cu_seq_lens_q": torch.tensor([0, 1])}),
    "pairs": (ValueError, {"attention_mask": torch.ones(2, 1, 4, 40)}),
    "rows": (ValueError, {"input_ids": torch.ones(3, 2, dtype=torch.long), "position_ids": None}),
    "no no_grad": (RuntimeError, {}),
}


@pytest.mark.parametrize("n_layers", [1, N_LAYERS])
@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.parametrize("what", REFUSED)
def test_a_refused_call_leaves_nothing_behind(what: str, turn: int, n_layers: int) -> None:
    (model,) = models("llama", "tinyllm", num_hidden_layers=n_layers)
    error, given = REFUSED[what]
    if what == "rows" and turn == 0:
        given = {**given, "attention_mask": torch.tensor([[0, 1]] * 2)}
    with PagedCache(model.config, block_size=4) as cache:
        wanted = [read(model, cache, n) for n in range(2)]
    with PagedCache(model.config, block_size=4) as cache:
        for n in range(2):
            if n == turn:
                before, blocks = state(cache), used(cache)
                with pytest.raises(error), torch.set_grad_enabled(what == "no no_grad"):
                    model(**{**turns(n), **given}, **{CACHE: cache})
                assert used(cache) == blocks and state(cache)[:2] == before[:2]
            assert torch.equal(read(model, cache, n), wanted[n])


def test_a_refused_model_leaves_no_pool_of_its_shape(model: Any) -> None:
    (narrow,) = models("llama", "tinyllm", head_dim=8)
    with PagedCache(model.config) as cache, PagedCache(model.config) as plain:
        with pytest.raises(RuntimeError, match="no backward pass"):
            narrow(**turns(0), **{CACHE: cache})
        assert torch.equal(read(model, cache, 0), read(model, plain, 0))
        with pytest.raises(
            ValueError,
            match="2 KV heads of 8, and the cache holds 2 of 16",
        ):
            read(narrow, cache, 1)
        assert torch.equal(read(model, cache, 1), read(model, plain, 1))
        twin = copy.deepcopy(cache)
        cache.reset()
        read(narrow, cache, 0)  # another pool; copies keep theirs
        assert cache.kv.d_head == 8
        twin.crop(-1)
        assert state(twin)[0] == 11


# --- two models, two threads
# ----------------------------------------------------------------------------------------------


def test_a_model_of_fewer_layers_is_refused(model: Any, cache: PagedCache) -> None:
    (shallow,) = models("llama", "tinyllm", num_hidden_layers=2)
    read(model, cache, 0)
    before = state(cache)
    with pytest.raises(ValueError, match="the model has 2 layers, and the cache is made for 4"):
        read(shallow, cache, 1)
    assert state(cache) == before


def test_a_model_cut_behind_its_configuration_is_noticed() -> None:
    (model,) = models("llama", "tinyllm")
    model.model.layers = model.model.layers[:2]
    with PagedCache(model.config) as cache:
        read(model, cache, 0)
        with torch.no_grad(), pytest.raises(RuntimeError, match="went through 2 of 4 layers"):
            model(torch.tensor([[5], [6]]), **{CACHE: cache})


def test_a_model_that_leaves_a_layer_out_is_noticed() -> None:
    (model,) = models("llama", "tinyllm")
    del model.model.layers[1]
    with (
        PagedCache(model.config) as cache,
        pytest.raises(RuntimeError, match=r"layer 2 does not follow.*leaves layers out"),
    ):
        read(model, cache, 0)


def test_of_two_threads_in_one_cache_one_is_told(
    model: Any, cache: PagedCache, undisturbed: list[Any]
) -> None:
    """The second thread runs a whole forward while the first is between two layers."""
    read(model, cache, 0)
    results: list[Any] = []

    def other(*args: Any) -> None:
        hook.remove()
        thread = threading.Thread(target=lambda: results.append(read(model, cache, 1)))
        thread.start()
        thread.join()

    hook = model.model.layers[2].register_forward_pre_hook(other)
    with pytest.raises(RuntimeError, match="another forward began on this cache"):
        read(model, cache, 1)
    assert torch.equal(results[0], undisturbed[1])
    assert cache.n_columns == 12
    assert all(len(set(lengths)) == 1 for lengths in state(cache)[1])


def test_a_thread_does_not_go_on_in_the_forward_of_another(
    model: Any, cache: PagedCache, undisturbed: list[Any]
) -> None:
    """The second thread stops before the very layer that the first comes to next."""
    read(model, cache, 0)

    def stop(*args: Any) -> None:
        raise Stop

    def interrupted() -> None:
        inner = model.model.layers[2].register_forward_pre_hook(stop)
        with contextlib.suppress(Stop), torch.no_grad():
            model(**{**turns(1), "input_ids": torch.tensor(SECOND).flip(1)}, **{CACHE: cache})
        inner.remove()

    def other(*args: Any) -> None:
        hook.remove()
        thread = threading.Thread(target=interrupted)
        thread.start()
        thread.join()

    hook = model.model.layers[2].register_forward_pre_hook(other)
    with pytest.raises(RuntimeError, match="another forward began on this cache"):
        read(model, cache, 1)
    assert torch.equal(read(model, cache, 1), undisturbed[1])


def test_threads_that_collide_at_random_corrupt_nothing(model: Any, undisturbed: list[Any]) -> None:
    told: list[str] = []
    old = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for _ in range(20):
            with PagedCache(model.config, num_blocks=32, block_size=4) as cache:
                read(model, cache, 0)
                ready = threading.Barrier(3)

                def run(cache: PagedCache = cache, ready: Any = ready) -> None:
                    ready.wait()
                    try:
                        read(model, cache, 1)
                    except (RuntimeError, ValueError) as error:
                        told.append(str(error))

                threads = [threading.Thread(target=run) for _ in range(3)]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
                assert cache.n_columns >= 12
                cache.crop(12)
                cache.crop(9)
                assert torch.equal(read(model, cache, 1), undisturbed[1])
    finally:
        sys.setswitchinterval(old)
    assert told
    # the forward itself, or its mask or its keys, which the other one changed under it
    named = ("another forward began", "attention_mask", "keys end at")
    for message in told:
        assert any(words in message for words in named), message


# --- copies and beams
# ----------------------------------------------------------------------------------------------


def test_what_cannot_be_copied_says_what_can(model: Any, cache: PagedCache) -> None:
    read(model, cache, 0)
    for attempt in (copy.copy, pickle.dumps):
        with pytest.raises(TypeError, match=r"PagedCache cannot be pickled.*copy\.deepcopy"):
            attempt(cache)


@pytest.mark.parametrize("operation", ["reorder", "repeat", "deepcopy", "crop", "reset"])
def test_an_operation_can_fail_at_every_line(model: Any, operation: str) -> None:
    """Then the cache is as before or as after; blocks that nobody has are given back."""
    (shallow,) = models("llama", "tinyllm", num_hidden_layers=2)
    run = {
        "reorder": lambda c: c.reorder_cache(torch.tensor([1, 1])),
        "repeat": lambda c: c.batch_repeat_interleave(2),
        "deepcopy": copy.deepcopy,
        "crop": lambda c: c.crop(-5),
        "reset": lambda c: c.reset(),
    }[operation]

    def disturbed(n: int, seen: list[Any]) -> int:
        with PagedCache(shallow.config, num_blocks=32, block_size=4) as cache:
            read(shallow, cache, 0)
            seen.append(state(cache))
            with contextlib.suppress(Stop), Tripwire(FILES, n) as wire:
                run(cache)
            if n < 0:
                seen.append(state(cache))
            cache.crop(100)  # anything: it ends what was begun
            assert state(cache) in seen, n
            own = {block for s in cache.seq_ids for block in cache.kv.block_table(s).tolist()}
            assert used(cache) == len(own), n
        return wire.count

    seen: list[Any] = []
    for n in range(disturbed(-1, seen)):
        disturbed(n, seen[:2])


def test_beams_are_right_after_an_interrupt() -> None:
    (model,) = models("llama", "tinyllm")
    inputs = padded(prompts(7, 13))
    asked = {"num_beams": 3, "do_sample": False, "max_new_tokens": 8}
    with PagedCache(model.config, num_blocks=128, block_size=4) as cache:
        wanted = model.generate(**inputs, **asked, **{CACHE: cache})
        for i in range(20):
            cache.reset()
            with contextlib.suppress(KeyboardInterrupt), Alarm(3e-3 * (1 + i)):
                model.generate(**inputs, **asked, **{CACHE: cache})
            cache.reset()
            assert not cache.kv.snapshot().sequences
        assert torch.equal(model.generate(**inputs, **asked, **{CACHE: cache}), wanted)


# --- packed
# ----------------------------------------------------------------------------------------------


def test_packed_layers_of_other_lengths_go_back_to_the_shortest(model: Any) -> None:
    """As an interrupt during the taking back leaves them."""
    work = {"a": [5, 6, 7], "b": [8, 9]}

    def begun() -> Any:
        kv = new_kv(model.config, num_blocks=16, block_size=4)
        for name in work:
            kv.add_seq(name)
        forward_packed(model, kv, {"a": [3, 4], "b": [3, 4, 5]})
        return kv

    with begun() as kv:
        wanted = forward_packed(model, kv, work)
    with begun() as kv:
        ones = np.ones((2, 3, 16), np.float32)
        for layer, name in ((0, "a"), (0, "b"), (1, "a")):
            kv.append(name, layer, ones, ones)
        assert torch.equal(forward_packed(model, kv, work), wanted)
        assert [kv.seq_len(name, i) for name in work for i in range(4)] == [5] * 8


def test_a_packed_batch_serves_one_forward(model: Any) -> None:
    with new_kv(model.config, num_blocks=16, block_size=4) as kv:
        kv.add_seq("a")
        batch = Packed(kv, ["a"], [3])
        ids = torch.tensor([[5, 6, 7]])
        for again in (False, True):
            with torch.no_grad():
                run = partial(
                    model, ids, position_ids=batch.position_ids, use_cache=False, tl_batch=batch
                )
                if again:
                    with pytest.raises(ValueError, match="holds 3 positions in layer 0, not 0"):
                        run()
                else:
                    run()
        assert kv.seq_len("a") == 3
