# SPDX-License-Identifier: MIT
"""Many sequences in one forward: the tokens of generate() one by one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import KINDS, config_of, generate, models, padded, prompts
from tinyllm import OutOfBlocks
from tinyllm.hf import Packed, forward_packed, new_kv


def serve(model: Any, kv: Any, texts: list[list[int]], n_new: int, budget: int) -> list[list[int]]:
    """Greedy tokens of all texts, by forwards of up to ``budget`` tokens: chunks beside decode."""
    todo = {i: list(text) for i, text in enumerate(texts)}
    answers: list[list[int]] = [[] for _ in texts]
    for i in todo:
        kv.add_seq(i)
    while todo:
        work: dict[Any, list[int]] = {}
        for i, tokens in todo.items():
            take = min(len(tokens), budget - sum(map(len, work.values())))
            if take:
                work[i] = tokens[:take]
        for i, row in zip(work, forward_packed(model, kv, work), strict=True):
            todo[i] = todo[i][len(work[i]) :]
            if not todo[i]:
                answers[i].append(int(row.argmax()))
                todo[i] = answers[i][-1:]
            if len(answers[i]) == n_new:
                kv.free(i)
                del todo[i]
    return answers


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("budget", [5, 64])
def test_tokens_are_those_of_generate_one_by_one(kind: str, budget: int) -> None:
    model, exact16 = models(kind, "tinyllm", "exact16")
    texts = prompts(5, 11, 17, 3)
    wanted = [
        generate(exact16, padded([text]), n=8).sequences[0, len(text) :].tolist() for text in texts
    ]
    with new_kv(model.config, num_blocks=64, block_size=4) as kv:
        assert serve(model, kv, texts, 8, budget) == wanted
        assert kv.stats()["used"] == 0


def test_forks_share_a_prefix() -> None:
    (model,) = models("llama", "tinyllm")
    prefix, left, right = prompts(16, 3, 5)
    with new_kv(model.config, num_blocks=16, block_size=4) as kv:
        kv.add_seq("prefix")
        forward_packed(model, kv, {"prefix": prefix})
        kv.fork("prefix", "left")
        kv.fork("prefix", "right")
        got = forward_packed(model, kv, {"left": left, "right": right})
        assert kv.stats()["used"] == 4 + 1 + 2
        for row, text in zip(got, (left, right), strict=True):
            wanted = generate(model, padded([prefix + text]), n=1).logits[0][0]
            torch.testing.assert_close(row, wanted, rtol=0, atol=1e-2 * float(wanted.abs().max()))
            assert row.argmax() == wanted.argmax()


def test_a_batch_tells_positions_and_places() -> None:
    (model,) = models("llama", "tinyllm")
    with new_kv(model.config, num_blocks=16) as kv:
        for name in "ab":
            kv.add_seq(name)
        forward_packed(model, kv, {"a": prompts(4)[0]})
        batch = Packed(kv, ["a", "b"], [2, 3])
    assert batch.position_ids.tolist() == [[4, 5, 0, 1, 2]] and batch.last.tolist() == [1, 4]


def test_a_forward_that_fails_leaves_what_was_there() -> None:
    (model,) = models("llama", "tinyllm")
    with new_kv(model.config, num_blocks=3, block_size=4) as kv:
        for name in "ab":
            kv.add_seq(name)
        forward_packed(model, kv, {"a": prompts(6)[0]})
        before = [kv.gather("a", layer)[0].tobytes() for layer in range(4)]
        with pytest.raises(OutOfBlocks):
            forward_packed(model, kv, {"b": prompts(4)[0], "a": prompts(3)[0]})
        assert (kv.seq_len("a"), kv.seq_len("b"), kv.stats()["used"]) == (6, 0, 2)
        assert [kv.gather("a", layer)[0].tobytes() for layer in range(4)] == before


@pytest.mark.parametrize(
    ("seq_ids", "counts", "error"),
    [
        (["a", "a"], [1, 1], "each once"),
        (["a"], [1, 1], "with as many counts"),
        (["a"], [0], "at least one token"),
        ([], [], "at least one token"),
    ],
)
def test_bad_batches_are_refused(seq_ids: list[str], counts: list[int], error: str) -> None:
    with new_kv(config_of("llama"), num_blocks=4) as kv:
        kv.add_seq("a")
        with pytest.raises(ValueError, match=error):
            Packed(kv, seq_ids, counts)
        with pytest.raises(KeyError, match="'b'"):
            Packed(kv, ["b"], [1])


def test_a_row_of_another_length_is_refused() -> None:
    (model,) = models("llama", "tinyllm")
    with new_kv(model.config, num_blocks=4) as kv, torch.no_grad():
        kv.add_seq("a")
        batch = Packed(kv, ["a"], [4])
        with pytest.raises(ValueError, match="4 tokens were announced"):
            model(torch.tensor(prompts(5)), use_cache=False, tl_batch=batch)
        assert kv.stats()["used"] == 0


def test_a_pool_takes_its_shape_from_the_configuration() -> None:
    with new_kv(config_of("gemma3"), num_blocks=4, block_size=8) as kv:
        assert (kv.n_layers, kv.n_kv_heads, kv.d_head, kv.block_size) == (4, 2, 16, 8)
    with pytest.raises(ValueError, match="num_blocks"):
        new_kv(config_of("gemma3"), num_blocks=0)
