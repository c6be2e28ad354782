# SPDX-License-Identifier: MIT
"""make_batch_invariant: the logits of a sequence have the same bits alone and among others."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny import CACHE, WITHOUT_EXPERTS, generate, models, padded, prompts
from tinyllm.hf import FixedTileLinear, PagedCache, forward_packed, make_batch_invariant, new_kv
from torch import nn

EIGHT = prompts(5, 11, 17, 3, 40, 8, 1, 33)
# Widths that fill no vector: what a loop does with the last few elements would show.
ODD = {"hidden_size": 72, "intermediate_size": 99}


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def packed_logits(model: Any, texts: dict[int, list[int]]) -> dict[int, list[Any]]:
    """After each text, and after one token more, in one forward each."""
    with new_kv(model.config, num_blocks=256, block_size=4) as kv:
        for i in texts:
            kv.add_seq(i)
        forwards = [
            forward_packed(model, kv, texts),
            forward_packed(model, kv, {i: [7] for i in texts}),
        ]
        return {i: [logits[place] for logits in forwards] for place, i in enumerate(texts)}


def generated_logits(model: Any, texts: list[list[int]]) -> list[list[Any]]:
    """Of four tokens that generate() chooses for each text."""
    with PagedCache(model.config, num_blocks=256, block_size=4) as cache:
        logits = generate(model, padded(texts), cache, n=4).logits
    return [[step[row] for step in logits] for row in range(len(texts))]


def same(a: list[Any], b: list[Any]) -> bool:
    return all(x.numpy().tobytes() == y.numpy().tobytes() for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("kind", WITHOUT_EXPERTS)
def test_packed_a_sequence_has_the_bits_it_has_alone(kind: str) -> None:
    (model,) = models(kind, "tinyllm", **ODD, **uncapped(kind))
    packed_is_alone(make_batch_invariant(model))


@pytest.mark.parametrize("kind", WITHOUT_EXPERTS)
def test_left_padded_a_sequence_has_the_bits_it_has_alone(kind: str) -> None:
    (model,) = models(kind, "tinyllm", **ODD, **uncapped(kind))
    padded_is_alone(make_batch_invariant(model))


def test_on_any_number_of_threads_a_sequence_has_the_bits_it_has_alone(threads: int) -> None:
    (model,) = models("llama", "tinyllm", **ODD)
    make_batch_invariant(model)
    packed_is_alone(model)
    padded_is_alone(model)


@pytest.mark.parametrize(
    "dtype", ["float16", torch.bfloat16, "float32", "int8", torch.float8_e4m3fn]
)
def test_in_every_dtype_a_text_has_the_bits_that_it_has_token_by_token(dtype: Any) -> None:
    (model,) = models("llama", "tinyllm")
    make_batch_invariant(model)
    (text,) = prompts(23)
    name = str(dtype).removeprefix("torch.")

    def logits(*cuts: int) -> Any:
        with PagedCache(model.config, num_blocks=32, block_size=4, dtype=dtype) as cache:
            parts = zip((0, *cuts), (*cuts, len(text)), strict=True)
            with torch.no_grad():
                steps = [
                    model(torch.tensor([text[begin:end]]), **{CACHE: cache}).logits
                    for begin, end in parts
                ]
            assert cache.kv is not None and cache.kv.dtype == name
            assert f"dtype={name!r}" in repr(cache) and copy.deepcopy(cache).kv is cache.kv
        return torch.cat(steps, dim=1)

    whole = logits()
    assert same([logits(*range(1, 23))], [whole])
    assert same([logits(9, 17)], [whole])
    with new_kv(model.config, num_blocks=8, block_size=4, dtype=dtype) as kv:
        kv.add_seq("a")
        assert kv.dtype == name
        assert same([forward_packed(model, kv, {"a": text})[0]], [whole[0, -1]])


def packed_is_alone(model: Any) -> None:
    together = packed_logits(model, dict(enumerate(EIGHT)))
    for i, text in enumerate(EIGHT):
        assert same(packed_logits(model, {i: text})[i], together[i]), f"sequence {i}"


def padded_is_alone(model: Any) -> None:
    together = generated_logits(model, EIGHT)
    for i, text in enumerate(EIGHT):
        assert same(generated_logits(model, [text])[0], together[i]), f"sequence {i}"


def test_packed_and_padded_have_the_same_bits() -> None:
    (model,) = models("llama", "tinyllm", **ODD)
    make_batch_invariant(model)
    packed, padded_ = packed_logits(model, dict(enumerate(EIGHT))), generated_logits(model, EIGHT)
    assert all(same(packed[i][:1], padded_[i][:1]) for i in range(len(EIGHT)))


def test_in_bfloat16_too() -> None:
    (model,) = models("llama", "tinyllm", **ODD)
    model = make_batch_invariant(model.to(torch.bfloat16))
    together = [
        [x.float() for x in steps]
        for steps in packed_logits(model, dict(enumerate(EIGHT))).values()
    ]
    for i, text in enumerate(EIGHT):
        assert same([x.float() for x in packed_logits(model, {i: text})[i]], together[i]), (
            f"sequence {i}"
        )


def test_without_it_logits_agree_to_rounding_only(capsys: pytest.CaptureFixture[str]) -> None:
    """That bits differ is a property of a machine and a build of torch: told, not asserted."""
    (model,) = models("llama", "tinyllm", **ODD)
    together = packed_logits(model, dict(enumerate(EIGHT)))
    alone = {i: packed_logits(model, {i: text})[i] for i, text in enumerate(EIGHT)}
    for i, steps in alone.items():
        torch.testing.assert_close(
            steps, together[i], rtol=0, atol=1e-2 * float(steps[0].abs().max())
        )
    n = sum(not same(alone[i], together[i]) for i in alone)
    with capsys.disabled():
        print(
            f"\n(without make_batch_invariant {n} of {len(EIGHT)} sequences have other bits alone)"
        )


def uncapped(kind: str) -> dict[str, Any]:
    return {"final_logit_softcapping": None} if kind == "gemma2" else {}


def test_norms_tables_and_activations_see_pieces_of_one_size_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (model,) = models("qwen3", "tinyllm", **ODD)
    kinds = {type(m) for m in make_batch_invariant(model).modules() if "forward" in vars(m)}
    seen: dict[str, set[tuple[int, ...]]] = {}

    def watched(kind: Any, plain: Any) -> Any:
        def forward(self: Any, x: Any, *rest: Any) -> Any:
            seen.setdefault(kind.__name__, set()).add(tuple((rest[0] if rest else x).shape))
            return plain(self, x, *rest)

        return forward

    for kind in kinds:
        monkeypatch.setattr(kind, "forward", watched(kind, kind.forward))
    packed_logits(model, dict(enumerate(EIGHT)))
    assert seen.pop("Qwen3RMSNorm") == {(16, 72), (16, 16)}  # of rows, and of heads
    assert seen.pop("Qwen3RotaryEmbedding") == {(1, 16)}
    assert list(seen.values()) == [{(8192,)}]


# --- what it does to a model
# --------------------------------------------------------------------------------


def test_results_are_those_of_the_plain_model() -> None:
    for kind in WITHOUT_EXPERTS:
        plain, model = models(kind, "tinyllm", "tinyllm", **uncapped(kind))
        make_batch_invariant(model)
        ids = torch.tensor(prompts(20))
        with torch.no_grad():
            a, b = plain(ids, use_cache=False).logits, model(ids, use_cache=False).logits
        torch.testing.assert_close(a, b, rtol=0, atol=2e-5 * float(a.abs().max()))


def test_parameters_keep_their_names_and_their_memory() -> None:
    (model,) = models("llama", "tinyllm", tie_word_embeddings=True)
    before = {name: p.data_ptr() for name, p in model.named_parameters()}
    assert make_batch_invariant(make_batch_invariant(model)) is model
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == before
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert all(type(m) is FixedTileLinear for m in model.modules() if isinstance(m, nn.Linear))


def test_a_copy_has_weights_of_its_own() -> None:
    (model,) = models("llama", "tinyllm")
    twin = copy.deepcopy(make_batch_invariant(model))
    with torch.no_grad():
        wanted = model(torch.tensor(prompts(5)), use_cache=False).logits
        for parameter in model.parameters():
            parameter.zero_()
    del model
    gc.collect()
    with torch.no_grad():
        assert torch.equal(twin(torch.tensor(prompts(5)), use_cache=False).logits, wanted)


def test_experts_are_refused_and_nothing_is_changed() -> None:
    (model,) = models("gpt-oss", "tinyllm")
    with pytest.raises(
        ValueError, match=r"make_batch_invariant: model.layers.0.mlp.\w+ .*weights of its own"
    ):
        make_batch_invariant(model)
    assert not any(isinstance(m, FixedTileLinear) or "forward" in vars(m) for m in model.modules())


def test_capped_logits_are_refused() -> None:
    (model,) = models("gemma2", "tinyllm", final_logit_softcapping=30.0)
    with pytest.raises(ValueError, match="final_logit_softcapping = None"):
        make_batch_invariant(model)


def test_frequencies_that_follow_the_longest_sequence_are_refused() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    (model,) = models("llama", "tinyllm", rope_parameters=rope)
    with pytest.raises(
        ValueError, match="rotary_emb: dynamic frequencies follow the longest sequence"
    ):
        make_batch_invariant(model)


# --- the linear layer
# ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "shape", [(33,), (1, 33), (5, 33), (16, 33), (2, 17, 33), (0, 33), (2, 3, 4, 33)]
)
def test_a_layer_computes_what_it_did(shape: tuple[int, ...], bias: bool) -> None:
    plain = nn.Linear(33, 17, bias=bias)
    x = torch.randn(shape)
    tiled = FixedTileLinear(plain)
    torch.testing.assert_close(tiled(x), plain(x), rtol=1e-5, atol=1e-5)
    assert tiled.weight is plain.weight and tiled.bias is plain.bias


def test_a_row_has_its_bits_at_every_place_among_any_rows(threads: int) -> None:
    for n_in, n_out in ((33, 17), (64, 97), (576, 1536)):
        layer, row = FixedTileLinear(nn.Linear(n_in, n_out)), torch.randn(n_in)
        with torch.no_grad():
            seen = {layer(row[None])[0].numpy().tobytes()}
            for place in (0, 1, 5, 15, 16, 30):
                x = torch.randn(place + 3, n_in)
                x[place] = row
                seen.add(layer(x)[place].numpy().tobytes())
        assert len(seen) == 1


def test_where_places_of_a_tile_disagree_every_row_gets_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def uneven(self: FixedTileLinear, tile: Any) -> Any:
        return tile @ self.weight.t() + torch.arange(len(tile))[:, None]

    layer, x = FixedTileLinear(nn.Linear(8, 4, bias=False)), torch.randn(20, 8)
    wanted = torch.cat([layer(row[None]) for row in x])
    assert layer._agree()
    monkeypatch.setattr(FixedTileLinear, "_tile", uneven)
    again = FixedTileLinear(layer)
    assert not again._agree()
    assert torch.equal(again(x), wanted)
    assert again(x[:0]).shape == (0, 4)


def test_gradients_flow_through_a_layer() -> None:
    plain, x = nn.Linear(8, 4), torch.randn(20, 8)
    FixedTileLinear(plain)(x).sum().backward()
    tiled, plain.weight.grad = plain.weight.grad, None
    plain(x).sum().backward()
    torch.testing.assert_close(tiled, plain.weight.grad)
