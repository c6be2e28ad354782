# SPDX-License-Identifier: MIT
"""The attention function and the mask function that transformers calls, and ``register``.

Where K and V lie decides who answers: a ``Packed`` batch that came as the keyword ``tl_batch``, the
``PagedCache`` that marked the keys, or nobody: then attention reads the keys and values it was
given (no cache, or a cache of transformers that returns the whole past). Whatever would change the
result and is not computed here raises.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, causal_mask_function

from tinyllm.attention import paged_attention
from tinyllm.hf.rows import Scoring, Tensor, as_f32, in_a_row, new_f32, rows_of, threads_of
from tinyllm.kv_view import KVView

__all__ = ["register"]

MARK = "_tinyllm_cache"  # attribute of keys that a PagedCache has yet to store

# Arguments of some models that would change the result, and what to do about them.
_NOT_COMPUTED = {
    "position_bias": "attention with a position bias is not supported",
    "head_mask": "masks of heads are not supported",
    "output_attentions": "attention weights are never there: use attn_implementation='eager'",
    "cu_seq_lens_q": "sequences packed into one row: see tinyllm.hf.forward_packed",
    "cu_seq_lens_k": "sequences packed into one row: see tinyllm.hf.forward_packed",
}


def register(name: str = "tinyllm") -> None:
    """Makes ``attn_implementation=name`` known to transformers; a second time changes nothing.

    >>> register()
    >>> model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="tinyllm")

    Raises: ValueError for a name with a slash (transformers would download it) or with "flash" in
    it (transformers would look for a flash library).
    """
    if "/" in name or "|" in name or "flash" in name:
        raise ValueError(
            f"register: name = {name!r} means something else to transformers: no '/', '|' or "
            "'flash'"
        )
    AttentionInterface.register(name, attention)
    AttentionMaskInterface.register(name, padding_mask)


def attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    tl_batch: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers calls in every layer; returns [B,T,H,D] in the type of ``query``, and no
    weights.

    Raises: ValueError and RuntimeError that say what to do; the errors of ``paged_attention``.
    """
    cache = key.__dict__.pop(MARK, None)
    try:
        _refuse(module, (query, key, value), dropout, kwargs)
        scoring = Scoring(
            scale=scaling,
            window=sliding_window or 0,
            softcap=softcap or 0.0,
            sink_logits=None if s_aux is None else as_f32(s_aux),
        )
        if tl_batch is not None:
            out = tl_batch.attend(module.layer_idx, query, key, value, scoring)
        elif cache is not None:
            _refuse_another_depth(module, len(cache))
            positions = kwargs.get("position_ids")
            out = cache.attend(
                module.layer_idx, query, key, value, attention_mask, scoring, positions
            )
        else:
            out = attend_given(query, key, value, attention_mask, scoring)
        return out.to(query.dtype), None
    except BaseException:  # a forward that fails leaves a cache as it was
        if cache is not None:
            with contextlib.suppress(Exception):  # what cannot be now, the next forward does
                cache.take_back()
        raise


def _refuse_another_depth(module: Any, n_layers: int) -> None:
    """Raises ValueError for a model of more or fewer layers: no forward of it would be whole."""
    depth = getattr(getattr(module, "config", None), "num_hidden_layers", n_layers)
    if depth != n_layers:
        raise ValueError(
            f"PagedCache: the model has {depth} layers, and the cache is made for {n_layers}"
        )


def _refuse(
    module: Any, tensors: tuple[Tensor, ...], dropout: float, kwargs: dict[str, Any]
) -> None:
    """Raises for what is not computed here."""
    if dropout:
        raise ValueError(f"tinyllm attention: dropout = {dropout} is for training: model.eval()")
    if any(t.requires_grad for t in tensors):
        raise RuntimeError(
            "tinyllm attention has no backward pass: call the model under torch.no_grad()"
        )
    if any(t.device.type != "cpu" for t in tensors):
        raise ValueError(
            f"tinyllm attention runs on the CPU, and the model is on {tensors[0].device}"
        )
    causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if causal is None else causal):
        raise ValueError(
            "tinyllm attention is causal, and this layer is not: use another attn_implementation"
        )
    for name, hint in _NOT_COMPUTED.items():
        given = kwargs.get(name)
        if given is not None and given is not False:
            raise ValueError(f"tinyllm attention: {name} was given; {hint}")


def attend_given(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring
) -> Tensor:
    """Attention over the keys and values of the call, in their own type: the last query at the last
    key.

    Raises: ValueError for padding between tokens where there is a window, which counts columns here
    and tokens in the kernel.
    """
    n_batch, n_heads, n_columns, _ = query.shape
    out = new_f32(n_batch, n_columns, n_heads, value.shape[-1]).zero_()
    rows, flat, n_keys = rows_of(query), out.flatten(0, 1), key.shape[2]
    if mask is None:
        _over(rows, key, value, n_columns, scoring, flat)
        return out
    for s, seen in enumerate(seen_columns(mask, n_batch, n_keys).numpy()):
        columns = np.flatnonzero(seen)
        mine = columns[columns >= n_keys - n_columns] - (n_keys - n_columns) + s * n_columns
        if len(mine):
            keys, places = in_a_row(columns), in_a_row(mine)
            if scoring["window"] and not isinstance(keys, slice):
                raise ValueError(
                    "tinyllm attention: attention_mask hides columns between tokens, and the layer "
                    "has a window: use tinyllm.hf.PagedCache, where a window counts tokens"
                )
            some = flat[places]  # of a slice a view
            k, v = key[s, None][:, :, keys], value[s, None][:, :, keys]
            _over(rows[places], k, v, len(mine), scoring, some)
            flat[places] = some
    return out


def _over(
    rows: Tensor, key: Tensor, value: Tensor, n_rows: int, scoring: Scoring, out: Tensor
) -> None:
    """``n_rows`` rows of each sequence over its keys and values, read in place: a block is a
    sequence."""
    n_batch, _, n_keys, _ = key.shape
    view = KVView.from_arrays(
        _in_place(key), _in_place(value), dtype=str(key.dtype).removeprefix("torch.")
    )
    paged_attention(
        as_f32(rows), view, np.arange(n_batch, dtype=np.int32)[:, None], [n_keys] * n_batch,
        cu_seqlens_q=np.arange(n_batch + 1, dtype=np.int32) * np.int32(n_rows),
        threads=threads_of(None), out=out.numpy(), **scoring,
    )  # fmt: skip


def _in_place(tensor: Tensor) -> NDArray[Any]:
    """The memory of K or V; bfloat16, which numpy does not have, as the integers it is."""
    tensor = tensor.detach() if tensor.stride(-1) == 1 else tensor.detach().contiguous()
    array: NDArray[Any] = (
        tensor.view(torch.uint16) if tensor.dtype == torch.bfloat16 else tensor
    ).numpy()
    return array


def seen_columns(mask: Tensor, n_batch: int, n_columns: int) -> Tensor:
    """The mask that transformers hands over, bool [B,T]: False for padding.

    Raises: ValueError for a mask of another form.
    """
    if mask.ndim != 2 or tuple(mask.shape) != (n_batch, n_columns):
        raise ValueError(
            f"tinyllm attention: attention_mask has shape {tuple(mask.shape)}, expected [B,T] = "
            f"{(n_batch, n_columns)}; masks of pairs are not supported, and sequences packed into "
            "one row go through tinyllm.hf.forward_packed"
        )
    return mask.bool()


# --- masks
# --------------------------------------------------------------------------------------------------


def padding_mask(
    batch_size: int,
    kv_length: int,
    q_length: int | None = None,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Callable[..., Any] = causal_mask_function,
    attention_mask: Tensor | None = None,
    cache_position: Tensor | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """What transformers calls before the layers: the columns that are padding, bool [B,T], or None
    for none.

    The causal edge and the window are the kernel's own. Sequences packed into one row give a mask
    that nobody but a ``Packed`` batch accepts.

    Raises: ValueError for a pattern that is neither causal nor a causal window, and for a cache
    longer than what it holds (a static one).
    """
    pattern = _pattern(mask_function)
    if pattern is None:
        raise ValueError(
            "tinyllm attention: the model asks for a mask that is neither causal nor a sliding "
            "window (bidirectional, chunked or of a modality): use another attn_implementation"
        )
    if q_length is None and cache_position is not None:  # before transformers 5.6
        q_length = len(cache_position)
        q_offset = int(cache_position[0]) if q_length else 0
    if q_length == 0:
        raise ValueError(
            "tinyllm attention: a forward of no columns; generate() goes on from a text that the "
            "cache holds to its end after cache.crop(n - 1), n being the length of that text"
        )
    # Less is harmless: 5.0 counts one too many after a prompt in chunks.
    if kv_offset + kv_length > q_offset + (q_length or 0):
        raise ValueError(
            f"tinyllm attention: keys end at {kv_offset + kv_length} and queries at "
            f"{q_offset + (q_length or 0)}, as in a static cache: use tinyllm.hf.PagedCache or a "
            "dynamic one"
        )
    if pattern == "packed":
        return torch.empty(0, device="cpu")
    if attention_mask is None:
        return None
    if attention_mask.shape[-1] < kv_offset + kv_length:
        return attention_mask  # too narrow: what that means says who attends
    seen = attention_mask[:, -kv_length:]
    return None if seen.all() else seen


def _pattern(mask_function: Callable[..., Any]) -> str | None:
    """One of causal, window and packed; None for a function that transformers made otherwise."""
    if mask_function is causal_mask_function:
        return "causal"
    name = getattr(mask_function, "__qualname__", "").split(".")[0]
    if name not in ("and_masks", "remap_positions_for_packed_sequence"):
        return None
    values = inspect.getclosurevars(mask_function).nonlocals.values()
    several = (value if isinstance(value, tuple) else (value,) for value in values)
    parts = [part for some in several for part in some if callable(part)]
    if name == "and_masks" and len(parts) == 2:
        first, second = (getattr(part, "__qualname__", "").split(".")[0] for part in parts)
        if first == "sliding_window_overlay" and parts[1] is causal_mask_function:
            return "window"
        if second == "packed_sequence_mask_function" and _pattern(parts[0]):
            return "packed"
    if name == "remap_positions_for_packed_sequence" and len(parts) == 1:
        return _pattern(parts[0])
    return None
