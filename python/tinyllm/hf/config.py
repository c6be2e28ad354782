# SPDX-License-Identifier: MIT
"""What a configuration of transformers says about keys and values."""

from __future__ import annotations

from typing import Any


def layers_of(fn: str, config: Any) -> int:
    """How many layers a model has, all of which a PagedKVCache can serve.

    Raises: ValueError where it cannot.
    """
    text = config.get_text_config(decoder=True)
    n_layers = int(text.num_hidden_layers)
    kinds = set(getattr(text, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise ValueError(
            f"{fn}: layers of kind {sorted(kinds)}; only full and sliding attention are supported"
        )
    if getattr(text, "num_kv_shared_layers", 0):
        raise ValueError(
            f"{fn}: {text.num_kv_shared_layers} layers share the keys of others: not supported"
        )
    if getattr(text, "kv_lora_rank", None):
        raise ValueError(f"{fn}: a model with compressed keys (MLA) has no plain KV heads")
    return n_layers


def kv_shape_of(config: Any) -> tuple[int, int]:
    """KV heads and elements of a head."""
    text = config.get_text_config(decoder=True)
    n_heads = int(text.num_attention_heads)
    width = getattr(text, "head_dim", None) or text.hidden_size // n_heads
    return int(getattr(text, "num_key_value_heads", None) or n_heads), int(width)
