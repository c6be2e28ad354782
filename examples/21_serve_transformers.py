# SPDX-License-Identifier: MIT
"""21_serve_transformers.py: continuous batching through an unmodified transformers model.
Needs torch and transformers; --smollm2 takes a real model (93 MB, once). Run it with python."""

import argparse

import torch
from tinyllm.hf import (
    CACHE_KEYWORD,
    PagedCache,
    forward_packed,
    make_batch_invariant,
    new_kv,
    register,
)
from transformers import LlamaConfig, LlamaForCausalLM


def serve(
    model, prompts: "list[list[int]]", n_new: int, budget: int = 32, end: int = -1
) -> "list[list[int]]":
    """Greedy answers of up to ``n_new`` tokens. A step is one forward of at most ``budget`` tokens:
    whoever writes brings one, and what is left goes to prompts, in chunks."""
    todo: dict[int, list[int]] = {}
    answers: list[list[int]] = [[] for _ in prompts]
    blocks = sum(-(-(len(prompt) + n_new) // 16) for prompt in prompts)
    with new_kv(model.config, num_blocks=blocks, block_size=16) as kv:
        for i, prompt in enumerate(prompts):
            found = kv.add_seq(i, tokens=prompt, leave=1)  # what another one has computed
            todo[i] = prompt[found:]
        while todo:
            work, room = {}, budget
            for i in sorted(todo, key=lambda i: not answers[i]):  # those that write come first
                if room:
                    work[i] = todo[i][:room]
                    room -= len(work[i])
            for i, logits in zip(work, forward_packed(model, kv, work), strict=True):
                todo[i] = todo[i][len(work[i]) :]
                if todo[i]:
                    continue  # more of the prompt is to come
                answers[i].append(int(logits.argmax()))
                todo[i] = answers[i][-1:]
                kv.extend(i, todo[i])
                if len(answers[i]) == n_new or answers[i][-1] == end:
                    kv.free(i)
                    del todo[i]
    return answers


def random_model() -> "tuple[LlamaForCausalLM, list[list[int]], None]":
    """A model with random weights, and twelve prompts of random tokens."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=4,
        num_attention_heads=8, num_key_value_heads=2, eos_token_id=None, initializer_range=0.2,
    )  # fmt: skip
    model = LlamaForCausalLM._from_config(config, attn_implementation="tinyllm").eval()
    return model, [torch.randint(512, (n,)).tolist() for n in range(3, 60, 5)], None


def smollm2() -> "tuple[LlamaForCausalLM, list[list[int]], object]":
    """SmolLM2-135M-Instruct, and some questions."""
    from smollm2.fetch import model_path
    from smollm2.gguf import GGUF
    from smollm2.tokenizer import BpeTokenizer
    from smollm2.torch_model import torch_model

    questions = ["What is the capital of France?", "Name three colours.", "What is two plus two?"]
    with GGUF(model_path(say=print)) as file:
        words = BpeTokenizer(file)
        texts = [
            words.turn("user", question) + words.opening("assistant") for question in questions
        ]
        return torch_model(file, "tinyllm"), [words.encode(text) for text in texts], words


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument(
        "--smollm2", action="store_true", help="a real model instead of a random one"
    )
    register()
    model, prompts, words = smollm2() if arguments.parse_args().smollm2 else random_model()
    make_batch_invariant(
        model
    )  # so that the tokens below are the same by construction, not by luck
    end = words.end if words else -1
    answers = serve(model, prompts, n_new=24, end=end)
    for prompt, answer in zip(prompts, answers, strict=True):
        ids = torch.tensor([prompt])
        with PagedCache(model.config) as cache:
            alone = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False,
                pad_token_id=0, **{CACHE_KEYWORD: cache},
            )  # fmt: skip
        same = alone[0, len(prompt) :].tolist() == answer
        text = (
            words.decode(answer).replace("\n", " ")
            if words
            else " ".join(map(str, answer[:8])) + " ..."
        )
        verdict = "equal to generate()" if same else "OTHER THAN generate()"
        print(f"{len(prompt):2d} + {len(answer):2d} tokens, {verdict}: {text}")


if __name__ == "__main__":
    main()
