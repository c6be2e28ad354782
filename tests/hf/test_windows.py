# SPDX-License-Identifier: MIT
"""Models with windows: their layers hold what a window reaches and no more, and every bit is that
of a cache that keeps everything."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from tiny import CACHE, KINDS, config_of, generate, models, padded, prompts
from tinyllm import LayeredKVCache
from tinyllm.hf import PagedCache, forward_packed, new_kv
from tinyllm.hf.config import windows_of

# The layers of "gemma3" see the last 5 positions, all, 5, all.
WINDOWED = ["gemma3", "gpt-oss", "qwen3-window", "mistral", "gemma2"]
N_LAYERS = 4


def caches(model: Any, **more: Any) -> tuple[PagedCache, PagedCache]:
    """One that gives back, and one that keeps everything."""
    sizes: dict[str, Any] = {"num_blocks": 400, "block_size": 4, **more}
    return PagedCache(model.config, slack=3, **sizes), PagedCache(model.config, slack=None, **sizes)


def used(cache: PagedCache) -> list[int]:
    """Blocks in use, of layers with a window and of those that see all."""
    return [
        sum(g.stats()["used"] for g in cache.kv.groups if bool(g.layers[0].window) == windowed)
        for windowed in (True, False)
    ]


@pytest.mark.parametrize(
    ("kind", "windows"),
    [
        ("llama", [0, 0, 0, 0]),
        ("qwen3", [0, 0, 0, 0]),
        ("qwen3-window", [0, 0, 5, 5]),
        ("mistral", [5, 5, 5, 5]),
        ("gemma2", [5, 0, 5, 0]),
        ("gemma3", [5, 0, 5, 0]),
        ("gpt-oss", [5, 0, 5, 0]),
    ],
)
def test_the_configuration_says_which_layers_have_a_window(kind: str, windows: list[int]) -> None:
    config = config_of(kind)
    assert windows_of("test", config) == windows
    with new_kv(config, num_blocks=8) as kv:
        assert isinstance(kv, LayeredKVCache) == any(windows)
        assert [layer.window for layer in kv.layers] == windows
    with new_kv(config, num_blocks=8, slack=None) as kv:
        assert not isinstance(kv, LayeredKVCache) and len(kv.layers) == N_LAYERS


@pytest.mark.parametrize("kind", WINDOWED)
def test_generate_gives_every_bit_of_a_cache_that_keeps_everything(kind: str) -> None:
    (model,) = models(kind, "tinyllm")
    given, kept = caches(model)
    with given, kept:
        for inputs in (padded(prompts(50, 9)), padded(prompts(70))):
            got, wanted = (generate(model, inputs, cache, n=40) for cache in (given, kept))
            assert torch.equal(got.sequences, wanted.sequences)
            assert torch.equal(torch.stack(got.logits), torch.stack(wanted.logits))
            given.reset()
            kept.reset()


def test_blocks_of_a_window_stay_as_many_while_the_context_grows() -> None:
    (model,) = models("gemma3", "tinyllm", max_position_embeddings=1024)
    tokens = prompts(600)[0]
    given, kept = caches(model)
    with given, kept, torch.no_grad():
        for begin in range(0, 600, 20):
            ids = torch.tensor([tokens[begin : begin + 20]])
            a, b = (model(ids, **{CACHE: cache}).logits for cache in (given, kept))
            assert torch.equal(a, b)
            near, full = used(given)
            assert full == (begin + 20) // 4
            assert near <= (5 + 3 + 2 * 20) // 4 + 2
        assert kept.kv.stats()["used"] == 150
        for token in tokens[:30]:
            a, b = (model(torch.tensor([[token]]), **{CACHE: c}).logits for c in (given, kept))
            assert torch.equal(a, b)
        assert used(given)[0] <= (5 + 3 + 2) // 4 + 2


def test_packed_sequences_give_back_too() -> None:
    (model,) = models("gemma3", "tinyllm")
    texts = dict(enumerate(prompts(30, 44, 5)))
    sizes = {"num_blocks": 200, "block_size": 4}
    with (
        new_kv(model.config, slack=0, **sizes) as kv,
        new_kv(model.config, slack=None, **sizes) as kept,
    ):
        for seq in texts:
            kv.add_seq(seq)
            kept.add_seq(seq)
        work = {seq: text[:15] for seq, text in texts.items()}
        for _ in range(40):
            a, b = (forward_packed(model, each, work) for each in (kv, kept))
            assert torch.equal(a, b)
            work = {seq: [int(row.argmax())] for seq, row in zip(texts, a, strict=True)}
        near = next(group for group in kv.groups if group.layers[0].window)
        assert near.stats()["used"] <= 3 * 3


def test_beams_and_copies_share_what_is_left() -> None:
    (model,) = models("gemma3", "tinyllm")
    inputs = padded(prompts(40))
    given, kept = caches(model)
    with given, kept:
        got, wanted = (
            generate(model, inputs, cache, n=30, num_beams=3).sequences for cache in (given, kept)
        )
        assert torch.equal(got, wanted)
        given.reset()
        kept.reset()
        first, turn = prompts(60, 4)
        for cache in (given, kept):
            generate(model, padded([first]), cache, n=8)
        before = used(given)
        twins = [copy.deepcopy(cache) for cache in (given, kept)]
        assert used(given) == before
        columns = given.n_columns
        with torch.no_grad():
            a, b = (model(torch.tensor([turn]), **{CACHE: twin}).logits for twin in twins)
        assert torch.equal(a, b) and given.n_columns == columns
        assert repr(twins[0].kv) == repr(given.kv)


def test_crop_goes_back_within_the_slack_and_no_further() -> None:
    (model,) = models("gemma3", "tinyllm")
    given, kept = caches(model)
    with given, kept, torch.no_grad():
        for cache in (given, kept):
            generate(model, padded(prompts(40)), cache, n=20)
        assert given.n_columns == 59
        before = given.kv.snapshot()
        with pytest.raises(
            ValueError,
            match=r"with 20 columns row 0 has 20 positions, and its layers with a window have "
            r"given back what it takes to go on before \d+: PagedCache\(config, slack=n\)",
        ):
            given.crop(-39)
        assert given.n_columns == 59 and given.kv.snapshot() == before
        for cache in (given, kept):
            cache.crop(-3)
        a, b = (model(torch.tensor([[7, 8]]), **{CACHE: c}).logits for c in (given, kept))
        assert torch.equal(a, b)
        kept.crop(-30)
        given.crop(-200)
        assert given.n_columns == 0 and given.kv.stats()["used"] == 0


def test_a_text_that_begins_before_the_windows_is_refused_and_the_cache_stays() -> None:
    """generate() that goes on from a text which the cache holds further than that."""
    (model,) = models("gemma3", "tinyllm")
    text = prompts(40)[0]
    given, kept = caches(model)
    with given, kept, torch.no_grad():
        for cache in (given, kept):
            for token in text:
                model(torch.tensor([[token]]), **{CACHE: cache})
        mask, ids = torch.ones(1, 20, dtype=torch.long), torch.tensor([text[15:20]])
        positions = torch.arange(15, 20)[None]
        more = {"attention_mask": mask, "position_ids": positions}
        with pytest.raises(ValueError, match="with 15 columns row 0 has 15 positions"):
            model(ids, **more, **{CACHE: given})
        model(ids, **more, **{CACHE: kept})
        assert (given.n_columns, kept.n_columns) == (40, 20)
        model(torch.tensor([[5]]), **{CACHE: given})
        assert given.n_columns == 41


def test_prompt_lookup_crops_drafts_of_models_with_windows() -> None:
    (model,) = models("gemma3", "tinyllm")
    text = prompts(10)[0] * 4
    given, kept = caches(model)
    with given, kept:
        got, wanted = (
            generate(
                model, padded([text]), cache, n=30, prompt_lookup_num_tokens=6, eos_token_id=96
            ).sequences
            for cache in (given, kept)
        )
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("slack", [-1, 1.5, "3"])
def test_a_slack_is_a_count_or_none(slack: Any) -> None:
    config = config_of("gemma3")
    with pytest.raises(ValueError, match="PagedCache: slack"):
        PagedCache(config, slack=slack)


def test_all_kinds_with_windows_are_tried() -> None:
    assert {kind for kind in KINDS if any(windows_of("test", config_of(kind)))} == set(WINDOWED)
