# SPDX-License-Identifier: MIT
"""A model that people use: SmolLM2-135M-Instruct, which the demonstration fetches by hash."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import apart, apart_from, generate, padded
from tinyllm.hf import PagedCache, forward_packed, make_batch_invariant, new_kv

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples"))

from smollm2.fetch import model_path  # noqa: E402
from smollm2.gguf import GGUF  # noqa: E402
from smollm2.tokenizer import BpeTokenizer  # noqa: E402
from smollm2.torch_model import torch_model  # noqa: E402

QUESTIONS = ["What is the capital of France?", "Name three colours.", "Who wrote Hamlet?"]


@pytest.fixture(scope="module")
def file() -> Any:
    with GGUF(model_path()) as file:
        yield file


@pytest.fixture(scope="module")
def words(file: GGUF) -> BpeTokenizer:
    return BpeTokenizer(file)


@pytest.fixture(scope="module")
def model(file: GGUF) -> Any:
    return torch_model(file, "tinyllm")


@pytest.fixture(scope="module")
def chats(words: BpeTokenizer) -> list[list[int]]:
    return [
        words.encode(words.turn("user", text) + words.opening("assistant")) for text in QUESTIONS
    ]


def eager(model: Any) -> Any:
    model.set_attn_implementation("eager")
    return model


@pytest.fixture
def plain(model: Any) -> Any:
    """The same model with eager attention; afterwards with ours again."""
    yield eager(model)
    model.set_attn_implementation("tinyllm")


def test_it_answers_as_with_eager_attention(
    model: Any, plain: Any, chats: list[list[int]], words: Any
) -> None:
    inputs = padded(chats)
    wanted = generate(plain, inputs, n=12, pad_token_id=2)
    model.set_attn_implementation("tinyllm")
    with PagedCache(model.config, num_blocks=64) as cache:
        got = generate(model, inputs, cache, n=12, pad_token_id=2)
    assert torch.equal(got.sequences, wanted.sequences)
    assert "The capital of France is Paris." in words.decode(got.sequences[0].tolist())
    assert apart(got, wanted) < 5e-3
    eager(model)
    assert apart_from(model, inputs, got) < 5e-3


def test_packed_it_answers_the_same(
    model: Any, chats: list[list[int]], words: BpeTokenizer
) -> None:
    with new_kv(model.config, num_blocks=64) as kv:
        for i in range(len(chats)):
            kv.add_seq(i)
        rows = forward_packed(model, kv, dict(enumerate(chats)))
        answers = [[int(row.argmax())] for row in rows]
        for _ in range(6):
            rows = forward_packed(model, kv, {i: answer[-1:] for i, answer in enumerate(answers)})
            for answer, row in zip(answers, rows, strict=True):
                answer.append(int(row.argmax()))
    assert words.decode(answers[0]) == "The capital of France is Paris."
    for chat, answer in zip(chats, answers, strict=True):
        with PagedCache(model.config, num_blocks=16) as cache:
            one = (
                generate(model, padded([chat]), cache, n=7, pad_token_id=2)
                .sequences[0, len(chat) :]
                .tolist()
            )
        assert answer[: len(one)] == one


def test_a_second_turn_has_the_logits_of_a_cold_start(file: GGUF, words: BpeTokenizer) -> None:
    """Bit for bit: what prefill and decode of the first turn left in the pool is what reading both
    turns at once computes."""
    model = torch_model(file, "tinyllm")
    make_batch_invariant(model)
    text = words.encode(words.turn("user", QUESTIONS[0]) + words.opening("assistant"))
    with new_kv(model.config, num_blocks=32) as kv, new_kv(model.config, num_blocks=32) as cold:
        kv.add_seq("first", tokens=text)
        for _ in range(40):
            row = forward_packed(model, kv, {"first": text[kv.seq_len("first") :]})[0]
            text.append(int(row.argmax()))
            kv.extend("first", text[-1:])
        kv.free("first")
        text += words.encode(words.turn("user", QUESTIONS[1]) + words.opening("assistant"))
        found = kv.add_seq("second", tokens=text, leave=1)
        held = len(text) - len(words.encode(words.turn("user", QUESTIONS[1])
                                            + words.opening("assistant"))) - 1  # fmt: skip
        assert found == held // 16 * 16 >= 48
        warm = forward_packed(model, kv, {"second": text[found:]})
        cold.add_seq("both")
        assert torch.equal(warm, forward_packed(model, cold, {"both": text}))


def test_its_weights_are_those_that_transformers_reads(model: Any) -> None:
    """transformers reads the file with the gguf package, and turns rows of q and k by itself."""
    from transformers import AutoModelForCausalLM

    path = Path(model_path())
    theirs = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    ours, weights = model.state_dict(), theirs.state_dict()
    assert ours.keys() == weights.keys()
    assert all(torch.equal(ours[name], weights[name]) for name in ours)
    for name in ("rms_norm_eps", "max_position_embeddings", "num_key_value_heads", "eos_token_id"):
        assert getattr(model.config, name) == getattr(theirs.config, name), name
    assert model.config.rope_parameters["rope_theta"] == theirs.config.rope_parameters["rope_theta"]
