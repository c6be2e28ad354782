# SPDX-License-Identifier: MIT
"""The serving loop of the examples: whatever arrives when, in whichever small pool, every answer
has the tokens it has alone, and nothing is left behind."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
sys.path.insert(0, str(EXAMPLES))

from smollm2.model import Model, random_model  # noqa: E402
from smollm2.rows import Crew  # noqa: E402

_spec = importlib.util.spec_from_file_location("serve", EXAMPLES / "16_serve.py")
assert _spec is not None
assert _spec.loader is not None
serve: Any = importlib.util.module_from_spec(_spec)
sys.modules["serve"] = serve  # dataclasses look their module up
_spec.loader.exec_module(serve)


@pytest.fixture(scope="module")
def model() -> Model:
    return random_model(serve.TINY, seed=2)


@pytest.fixture(scope="module")
def crew() -> Iterator[Crew]:
    with Crew(1) as crew:
        yield crew


def alone(model: Model, crew: Crew, request: Any) -> list[int]:
    """The answer without a cache of others, a chunk or a sampler of anybody else's: the whole text
    is read anew for every token."""
    dice, text = np.random.default_rng(request.seed), list(request.prompt)
    for _ in range(request.n_new):
        with model.new_cache(32, block_tokens=16) as cache:
            cache.add_seq("alone")
            logits = model.forward(cache, [("alone", text)], crew)[0]
        if request.temperature == 0:
            text.append(int(logits.argmax()))
        else:
            weights = np.exp((logits - logits.max()).astype(np.float64) / request.temperature)
            text.append(int(np.searchsorted(weights.cumsum(), dice.random() * weights.sum())))
    return text[len(request.prompt) :]


# A prompt is a piece of one text and tokens of its own, so that many begin alike.
requests = st.lists(
    st.tuples(
        st.integers(0, 30),  # tokens of the common text
        st.lists(st.integers(0, 100), min_size=1, max_size=12),
        st.integers(1, 6),  # new tokens
        st.sampled_from([0.0, 1.0]),
        st.integers(0, 4),  # steps before it arrives
        st.sampled_from([None, None, None, 1, 3]),  # steps until it is cancelled
    ),
    min_size=1,
    max_size=7,
)


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(told=requests, blocks=st.integers(7, 20), budget=st.integers(1, 40))
def test_every_answer_has_the_tokens_it_has_alone(
    model: Model, crew: Crew, told: list[Any], blocks: int, budget: int
) -> None:
    common = [int(t) for t in np.random.default_rng(1).integers(0, 101, 30)]
    asked, ends = [], {}
    with model.new_cache(blocks, block_tokens=8) as cache:
        server = serve.Server(model, cache, crew, budget)
        finished: list[Any] = []
        for i, (n, own, n_new, temperature, before, ends_after) in enumerate(told):
            for _ in range(before):
                finished += server.step() if server.running or server.waiting else []
            request = serve.Request(f"r{i}", common[:n] + own, n_new, i, temperature)
            asked.append(request)
            server.submit(request)
            if ends_after:
                ends[i] = ends_after
            for j in list(ends):
                ends[j] -= 1
                if ends[j] == 0:
                    server.cancel(asked[j])
                    del ends[j]
        for _ in range(2000):
            if not server.running and not server.waiting:
                break
            finished += server.step()
        assert not server.running
        assert not server.waiting
        stats = cache.snapshot().counters
        assert (stats["blocks_used"], stats["leaked"], stats["sequences"]) == (0, 0, 0)
    for request in asked:
        want = alone(model, crew, request)
        if request in finished:
            assert request.answer == want
        else:
            assert request.answer == want[: len(request.answer)]


def test_a_common_beginning_is_computed_once(model: Model, crew: Crew) -> None:
    common = [int(t) for t in np.random.default_rng(1).integers(0, 101, 64)]
    with model.new_cache(64, block_tokens=8) as cache:
        server = serve.Server(model, cache, crew, 100)
        for i in range(4):
            server.submit(serve.Request(f"r{i}", [*common, i], 1))
            while server.running or server.waiting:
                server.step()
        assert (server.computed, server.found) == (65 + 3, 3 * 64)


def test_who_is_put_off_goes_on_where_he_was(model: Model, crew: Crew) -> None:
    with model.new_cache(12, block_tokens=8) as cache:
        server = serve.Server(model, cache, crew, 32)
        asked = [serve.Request(f"r{i}", [i] * 30, 16, i, 1.0) for i in range(3)]
        for request in asked:
            server.submit(request)
        while server.running or server.waiting:
            server.step()
        assert server.put_off > 0
    assert [r.answer for r in asked] == [alone(model, crew, r) for r in asked]


def test_a_request_that_no_empty_pool_holds_is_refused(model: Model, crew: Crew) -> None:
    with model.new_cache(4, block_tokens=8) as cache:
        server = serve.Server(model, cache, crew)
        server.submit(serve.Request("fits", [1] * 30, 2))
        with pytest.raises(ValueError, match="a request of 5 blocks, and there are 4"):
            server.submit(serve.Request("large", [1] * 30, 3))


def test_a_second_turn_has_the_logits_of_a_cold_start(model: Model, crew: Crew) -> None:
    """With the demo's architecture and random weights: prompts computed in chunks, an answer
    decoded token by token, and then all of it at once without a cache."""
    with model.new_cache(64, 16) as cache, model.new_cache(64, 16) as cold:
        turn = [int(t) for t in np.random.default_rng(0).integers(0, model.config.vocabulary, 50)]
        cache.add_seq("one", turn)
        logits = model.forward(cache, [("one", turn[:33])], crew)
        logits = model.forward(cache, [("one", turn[33:])], crew)
        for _ in range(40):
            turn.append(int(logits[0].argmax()))
            cache.extend("one", turn[-1:])
            logits = model.forward(cache, [("one", turn[-1:])], crew)
        cache.free("one")
        turn += [1, 2, 3]
        found = cache.add_seq("two", turn, leave=1)
        assert found == 80  # five full blocks of 90 positions
        warm = model.forward(cache, [("two", turn[found:])], crew)
        cold.add_seq("cold")
        assert np.array_equal(warm, model.forward(cold, [("cold", turn)], crew))
