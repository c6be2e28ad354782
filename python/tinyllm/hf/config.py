# SPDX-License-Identifier: MIT
"""What a configuration of transformers says about keys and values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tinyllm.infer.layers import Layer


def windows_of(fn: str, config: Any) -> list[int]:
    """The window of each layer of a model, 0 where it sees all; a PagedKVCache can serve them all.

    A configuration with a window that does not say which layers have it means every layer, as the
    caches of transformers read it.

    Raises: ValueError where it cannot.
    """
    text = config.get_text_config(decoder=True)
    window = int(getattr(text, "sliding_window", None) or 0)
    plain = "sliding_attention" if window else "full_attention"
    n_layers = int(text.num_hidden_layers)
    kinds = (getattr(text, "layer_types", None) or [plain] * n_layers)[:n_layers]
    if other := set(kinds) - {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"{fn}: layers of kind {sorted(other)}; only full and sliding attention are supported"
        )
    if getattr(text, "num_kv_shared_layers", 0):
        raise ValueError(
            f"{fn}: {text.num_kv_shared_layers} layers share the keys of others: not supported"
        )
    if getattr(text, "kv_lora_rank", None):
        raise ValueError(f"{fn}: a model with compressed keys (MLA) has no plain KV heads")
    return [window if kind == "sliding_attention" else 0 for kind in kinds]


def kv_shape_of(config: Any) -> tuple[int, int]:
    """KV heads and elements of a head."""
    text = config.get_text_config(decoder=True)
    n_heads = int(text.num_attention_heads)
    width = getattr(text, "head_dim", None) or text.hidden_size // n_heads
    return int(getattr(text, "num_key_value_heads", None) or n_heads), int(width)


def layers_with(
    windows: Sequence[int], n_kv_heads: int, width: int, slack: int | None
) -> list[Layer]:
    """Layers of one shape; ``slack`` None: none of them gives anything back."""
    return [Layer(n_kv_heads, width, 0 if slack is None else window) for window in windows]
