# SPDX-License-Identifier: MIT
"""generate() over a PagedCache: the tokens of eager attention, and no block kept."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import CACHE, KINDS, apart, apart_from, generate, models, padded, prompts
from tinyllm.hf import PagedCache

ROUNDED = 1e-3  # of the largest logit; 2e-4 was seen
PROMPTS = {
    "alone": prompts(11),
    "of one length": prompts(9, 9, 9),
    "left-padded": prompts(7, 13, 2),
}


@pytest.fixture(scope="module", params=KINDS)
def trio(request: pytest.FixtureRequest) -> list[Any]:
    """One model with three attentions."""
    return models(request.param, "tinyllm", "exact16", "eager")


def used(cache: PagedCache) -> int:
    return 0 if cache.kv is None else cache.kv.stats()["used"]


@pytest.mark.parametrize("batch", PROMPTS)
def test_tokens_are_those_of_attention_over_rounded_keys(trio: list[Any], batch: str) -> None:
    model, exact16, eager = trio
    inputs = padded(PROMPTS[batch])
    wanted = generate(exact16, inputs)
    with PagedCache(model.config, num_blocks=64, block_size=4) as cache:
        got = generate(model, inputs, cache)
        assert torch.equal(got.sequences, wanted.sequences)
        assert len(set(got.sequences[0, -12:].tolist())) > 3, (
            "a model that repeats itself shows little"
        )
        assert apart(got, wanted) < ROUNDED
        assert apart_from(eager, inputs, got) < 5e-2  # what float16 keys and values change
        assert cache.n_columns == inputs["input_ids"].shape[1] + 11
        cache.reset()
        assert used(cache) == 0


@pytest.mark.parametrize("batch", ["of one length", "left-padded"])
def test_a_cache_of_transformers_gives_the_tokens_of_eager(trio: list[Any], batch: str) -> None:
    model, _, eager = trio
    inputs = padded(PROMPTS[batch])
    got, wanted = generate(model, inputs), generate(eager, inputs)
    assert torch.equal(got.sequences, wanted.sequences)
    assert apart(got, wanted) < 2e-5  # nothing is rounded on the way


@pytest.mark.parametrize("batch", ["of one length", "left-padded"])
def test_without_a_cache_logits_are_those_of_eager(trio: list[Any], batch: str) -> None:
    model, _, eager = trio
    inputs = padded(PROMPTS[batch])
    with torch.no_grad():
        got, wanted = (m(**inputs, use_cache=False).logits for m in (model, eager))
    seen = inputs["attention_mask"].bool()
    torch.testing.assert_close(
        got[seen], wanted[seen], rtol=0, atol=2e-5 * float(wanted.abs().max())
    )


@pytest.mark.parametrize("batch", ["of one length", "left-padded"])
def test_beams_are_those_of_attention_over_rounded_keys(trio: list[Any], batch: str) -> None:
    model, exact16, _ = trio
    inputs = padded(PROMPTS[batch])
    wanted = exact16.generate(**inputs, num_beams=3, do_sample=False, max_new_tokens=10)
    with PagedCache(model.config, num_blocks=128, block_size=4) as cache:
        got = model.generate(
            **inputs, num_beams=3, do_sample=False, max_new_tokens=10, **{CACHE: cache}
        )
        assert torch.equal(got, wanted)
        separate = sum(-(-cache.kv.seq_len(s) // 4) for s in cache.seq_ids)
        assert (
            len(cache.seq_ids) == 3 * len(inputs["input_ids"]) and used(cache) < separate
        )  # beams share
        cache.reset()
        assert used(cache) == 0


def test_prompt_lookup_takes_back_what_was_not_accepted(trio: list[Any]) -> None:
    """Against plain greedy decoding: some versions of transformers cannot crop their own windowed
    cache, and the oldest goes one token too far."""
    model, exact16, _ = trio
    period = prompts(5)[0]
    inputs = padded([period * 3])
    wanted = generate(exact16, inputs, n=20, eos_token_id=96).sequences
    with PagedCache(model.config, num_blocks=32, block_size=4) as cache:
        crops = []
        crop, cache.crop = cache.crop, lambda n: (crops.append(n), crop(n))
        got = generate(
            model, inputs, cache, n=20, prompt_lookup_num_tokens=3, eos_token_id=96
        ).sequences
        assert torch.equal(got[:, : wanted.shape[1]], wanted)
        assert crops
        cache.reset()
        assert used(cache) == 0


def test_a_second_turn_goes_on_from_the_first(trio: list[Any]) -> None:
    model, exact16, _ = trio
    first, second = prompts(9, 6, seed=3)
    with PagedCache(model.config, num_blocks=32, block_size=4) as cache:
        turn = generate(model, padded([first]), cache, n=5).sequences
        inputs = padded([turn[0].tolist() + second])
        got, wanted = generate(model, inputs, cache, n=6), generate(exact16, inputs, n=6)
        assert torch.equal(got.sequences, wanted.sequences)
        assert apart(got, wanted) < ROUNDED
        cache.reset()
        assert used(cache) == 0


@pytest.mark.parametrize("batch", ["of one length", "left-padded"])
def test_a_prompt_in_chunks_gives_the_same_tokens(trio: list[Any], batch: str) -> None:
    """Of the left-padded ones some chunks hold nothing but padding."""
    model, exact16, _ = trio
    inputs = padded(PROMPTS[batch])
    wanted = generate(exact16, inputs, n=4)
    with PagedCache(model.config, num_blocks=64, block_size=4) as cache:
        got = generate(model, inputs, cache, n=4, prefill_chunk_size=3)
        assert torch.equal(got.sequences, wanted.sequences)
        assert apart(got, wanted) < ROUNDED


TURNS = [prompts(7, 13, 2), prompts(4, 1, 6, seed=5), prompts(1, 5, 3, seed=6)]


def turn_of(inputs: dict[str, Any] | None, told: Any, turn: list[list[int]]) -> dict[str, Any]:
    """The text so far and another turn, padded on its left: old padding lies between tokens."""
    new = padded(turn)
    if inputs is None:
        return new
    n_new = told.shape[1] - inputs["attention_mask"].shape[1]
    seen = [inputs["attention_mask"], torch.ones(len(told), n_new, dtype=torch.long)]
    return {
        "input_ids": torch.cat([told, new["input_ids"]], 1),
        "attention_mask": torch.cat([*seen, new["attention_mask"]], 1),
    }


def test_turns_of_a_padded_batch_are_those_of_each_row_alone(trio: list[Any]) -> None:
    """Of models without a window they are those of a whole batch too, which counts the padding."""
    model, exact16, _ = trio
    windowed = getattr(model.config, "sliding_window", None)
    inputs, told = None, None
    alone: list[list[int]] = [[], [], []]
    with PagedCache(model.config, num_blocks=64, block_size=4) as cache:
        for turn in TURNS:
            inputs = turn_of(inputs, told, turn)
            got = generate(model, inputs, cache, n=4)
            told = got.sequences
            if not windowed:
                wanted = generate(exact16, inputs, n=4)
                assert torch.equal(told, wanted.sequences)
                assert apart(got, wanted) < ROUNDED
            for s, row in enumerate(alone):
                row += turn[s]
                row[:] = generate(exact16, padded([row]), n=4).sequences[0].tolist()
                assert row[-4:] == told[s, -4:].tolist()
        lengths = [cache.kv.seq_len(s) for s in cache.seq_ids]
        assert lengths == [len(row) - 1 for row in alone]
        cache.crop(-9)
        kept = inputs["attention_mask"][:, : cache.n_columns].sum(1).tolist()
        assert [cache.kv.seq_len(s) for s in cache.seq_ids] == kept
        cache.reset()
        assert used(cache) == 0


def test_padding_anywhere_gives_the_logits_of_eager(trio: list[Any]) -> None:
    """On the left, between tokens and on the right, in one forward, in chunks, and with the keys of
    the call alone."""
    model, exact16, eager = trio
    if getattr(model.config, "sliding_window", None):
        ids, mask = torch.tensor(prompts(6)), torch.tensor([[1, 1, 0, 0, 1, 1]])
        with torch.no_grad(), pytest.raises(ValueError, match=r"between tokens.*PagedCache"):
            model(ids, attention_mask=mask, use_cache=False)
        return
    ids = torch.tensor(prompts(8, 8, 8, 8))
    mask = torch.tensor(
        [[1, 1, 0, 0, 1, 1, 0, 1], [0, 1, 1, 1, 1, 0, 0, 0], [1] * 8, [0, 0, 0, 0, 1, 0, 1, 1]]
    )
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    seen = mask.bool()
    with torch.no_grad():
        wanted = exact16(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        plain = eager(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        given = model(ids, attention_mask=mask, position_ids=positions, use_cache=False).logits
        torch.testing.assert_close(given[seen], plain[seen], rtol=0, atol=2e-5 * plain.abs().max())
        for size in (8, 3, 1):
            with PagedCache(model.config, num_blocks=64, block_size=4) as cache:
                chunks = [
                    model(
                        ids[:, i : i + size], attention_mask=mask[:, : i + size],
                        position_ids=positions[:, i : i + size], **{CACHE: cache},
                    ).logits
                    for i in range(0, 8, size)
                ]  # fmt: skip
            logits = torch.cat(chunks, 1)
            torch.testing.assert_close(
                logits[seen], wanted[seen], rtol=0, atol=ROUNDED * wanted.abs().max()
            )
