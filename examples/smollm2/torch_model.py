# SPDX-License-Identifier: MIT
"""The same model for transformers: a LlamaForCausalLM with the GGUF file's weights, in float32."""

from __future__ import annotations

from typing import Any, Final

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from .gguf import GGUF, GGUFError
from .model import read_config
from .rows import Floats

_NAMES: Final = {  # in the file, in transformers
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def torch_model(file: GGUF, attn_implementation: str) -> Any:
    """A LlamaForCausalLM in evaluation mode. Raises GGUFError for another kind of model."""
    c = read_config(file)
    if "output.weight" in file.tensors:
        raise GGUFError(f"{file.path}: an output matrix of its own is not supported here")
    config = LlamaConfig(
        vocab_size=c.vocabulary,
        hidden_size=c.width,
        intermediate_size=c.ffn,
        num_hidden_layers=c.layers,
        num_attention_heads=c.heads,
        num_key_value_heads=c.kv_heads,
        head_dim=c.head_dim,
        rms_norm_eps=c.eps,
        max_position_embeddings=c.context,
        tie_word_embeddings=True,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=file.integer("tokenizer.ggml.eos_token_id"),
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_base},
    )
    weights = {
        "model.embed_tokens.weight": file.tensor("token_embd.weight"),
        "lm_head.weight": file.tensor("token_embd.weight"),
        "model.norm.weight": file.tensor("output_norm.weight"),
    }
    for i in range(c.layers):
        for theirs, ours in _NAMES.items():
            weight = file.tensor(f"blk.{i}.{theirs}.weight")
            if theirs in ("attn_q", "attn_k"):
                weight = halves_of_pairs(weight, c.head_dim)
            weights[f"model.layers.{i}.{ours}.weight"] = weight
    with torch.device("meta"):
        model = LlamaForCausalLM._from_config(config, attn_implementation=attn_implementation)
    model.load_state_dict({name: torch.from_numpy(w) for name, w in weights.items()}, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config)  # its table is no weight
    return model.eval()


def halves_of_pairs(weight: Floats, head_dim: int) -> Floats:
    """Rows of q or k in the order of transformers, where rotary positions turn dimension i with i +
    D / 2; in the file they turn 2i with 2i + 1."""
    heads = weight.reshape(-1, head_dim // 2, 2, weight.shape[1])
    rows: Floats = heads.transpose(0, 2, 1, 3).reshape(weight.shape)
    return rows
