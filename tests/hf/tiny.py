# SPDX-License-Identifier: MIT
"""Random models small enough to run in milliseconds, and two attentions in plain torch to compare
with.

"exact16" is eager attention over keys and values rounded to float16, as a pool stores them. Against
it only the order of sums differs; but a key that lies between two float16 may then fall to the
other side, so logits agree less closely than float32 would let them. "eager" is transformers' own,
without the rounding.
"""

from __future__ import annotations

import copy
from typing import Any

import tinyllm.hf
import torch
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

SIZES = {
    "vocab_size": 97,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "bos_token_id": 1,
    "pad_token_id": 0,
}
# The seed is the one of sixteen with which tokens stay furthest from ties in the tests of
# generate(): the first logit of a step is ahead of the second by 0.2% of the largest of all or
# more.
KINDS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "llama": ("llama", 0, {}),
    "qwen3": ("qwen3", 13, {}),
    "qwen3-window": (
        "qwen3",
        8,
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 2},
    ),
    "mistral": ("mistral", 7, {"sliding_window": 5}),
    "gemma2": (
        "gemma2",
        15,
        {"sliding_window": 5, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    ),
    "gemma3": ("gemma3_text", 3, {"sliding_window": 5, "sliding_window_pattern": 2}),
    "gpt-oss": (
        "gpt_oss",
        4,
        {"sliding_window": 5, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
}
WITHOUT_EXPERTS = [kind for kind in KINDS if kind != "gpt-oss"]
CACHE = tinyllm.hf.CACHE_KEYWORD


def config_of(kind: str, **more: Any) -> Any:
    model_type, _, own = KINDS[kind]
    return AutoConfig.for_model(model_type, **{**SIZES, **own, **more})


def models(kind: str, *attentions: str, **more: Any) -> list[Any]:
    """The same random model once for each attention, on configurations that they do not share."""
    config = config_of(kind, **more)
    first, *rest = (
        AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation=name).eval()
        for name in attentions
    )
    torch.manual_seed(KINDS[kind][1])
    with torch.no_grad():
        for name, parameter in first.named_parameters():
            if parameter.dim() > 1 or "sinks" in name:
                parameter.normal_(0, 1 if "sinks" in name else 0.3)
    for model in rest:
        model.load_state_dict(first.state_dict())
    return [first, *rest]


def prompts(*lengths: int, seed: int = 1) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 97, (n,), generator=generator).tolist() for n in lengths]


def padded(sequences: list[list[int]]) -> dict[str, Any]:
    """input_ids and attention_mask, the padding on the left."""
    n = max(map(len, sequences))
    ids = torch.tensor([[0] * (n - len(s)) + s for s in sequences])
    mask = torch.tensor([[0] * (n - len(s)) + [1] * len(s) for s in sequences])
    return {"input_ids": ids, "attention_mask": mask}


def generate(
    model: Any, inputs: dict[str, Any], cache: Any = None, n: int = 12, **more: Any
) -> Any:
    """The greedy output with its logits: ``.sequences`` and ``.logits``, a tensor [B,V] a token."""
    if cache is not None:
        more[CACHE] = cache
    return model.generate(
        **inputs,
        max_new_tokens=n,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
        **more,
    )


def apart(a: Any, b: Any) -> float:
    """The largest difference of two outputs' logits, as a part of the largest logit."""
    x, y = torch.stack(a.logits), torch.stack(b.logits)
    return float((x - y).abs().max() / x.abs().max())


def apart_from(plain: Any, inputs: dict[str, Any], got: Any) -> float:
    """The same for the logits that another model gives along the tokens of ``got``."""
    n_new = len(got.logits)
    mask = torch.cat(
        [inputs["attention_mask"], torch.ones(len(got.sequences), n_new, dtype=torch.long)], 1
    )
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = plain(
            got.sequences, attention_mask=mask, position_ids=positions, use_cache=False
        ).logits
    x, y = torch.stack(got.logits, 1), logits[:, -n_new - 1 : -1]
    return float((x - y).abs().max() / y.abs().max())


def register_references() -> None:
    tinyllm.hf.register()
    AttentionInterface.register("exact16", exact16)
    AttentionMaskInterface.register("exact16", ALL_MASK_ATTENTION_FUNCTIONS["eager"])


def exact16(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    scaling: float,
    **kwargs: Any,
) -> tuple[Any, None]:
    n_rows, n_keys = query.shape[2], key.shape[2]
    key, value = (
        t.half().float().repeat_interleave(query.shape[1] // t.shape[1], 1) for t in (key, value)
    )
    scores = query.float() @ key.transpose(2, 3) * scaling
    if (cap := kwargs.get("softcap")) is not None:
        scores = torch.tanh(scores / cap) * cap
    scores = scores + attention_mask[..., :n_rows, :n_keys]
    if (sinks := kwargs.get("s_aux")) is not None:
        scores = torch.cat(
            [scores, sinks.view(1, -1, 1, 1).expand(len(query), -1, n_rows, 1)], dim=-1
        )
    weights = torch.softmax(scores, dim=-1)[..., :n_keys]
    return (weights @ value).transpose(1, 2).contiguous().to(query.dtype), None
