# SPDX-License-Identifier: MIT
"""Many sequences packed into one forward: a transformers model as the model of an engine of one's
own.

Chunks of prompts and single tokens stand side by side in a row [1,T] without padding; a ``Packed``
batch says which are whose, and reaches the attention function as the keyword ``tl_batch``, which
transformers passes on.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from tinyllm.hf.config import kv_shape_of, layers_with, windows_of
from tinyllm.hf.rows import (
    Scoring,
    Tensor,
    Threads,
    as_stored,
    attend_sequences,
    new_f32,
    rows_of,
)
from tinyllm.infer.paged import SLACK, PagedKVCache

__all__ = ["Packed", "forward_packed", "new_kv"]


def new_kv(
    config: Any,
    num_blocks: int,
    block_size: int = 16,
    *,
    dtype: Any = "float16",
    slack: int | None = SLACK,
) -> PagedKVCache:
    """A PagedKVCache of ``dtype`` for the layers and KV heads of a model, from ``model.config``.

    Layers with a window give back what it has gone past, but for ``slack`` positions, which
    ``truncate`` can always take back; None: they keep all.

    Raises: ValueError for a model it cannot serve, and as PagedKVCache.
    """
    windows = windows_of("new_kv", config)
    layers = layers_with(windows, *kv_shape_of(config), slack)
    return PagedKVCache(
        num_blocks=num_blocks, block_size=block_size, layers=layers, slack=slack or 0, dtype=dtype
    )


class Packed:
    """The batch of one forward over ``kv``: sequence s brings counts[s] >= 1 tokens; in input_ids
    [1,T] they stand one sequence after the other.

    >>> batch = Packed(kv, ["a", "b"], [5, 1])
    >>> model(input_ids=ids, position_ids=batch.position_ids, use_cache=False, tl_batch=batch)

    position_ids: int64 [1,T], from what the sequences hold when the batch is made. last: int64 [B],
    the place of each sequence's last token in the row, for ``logits_to_keep``.
    A batch serves one forward, which appends to every sequence in every layer; where it fails
    ``truncate`` takes back what it has appended.

    Raises: KeyError for an unknown sequence; ValueError where one comes twice or brings nothing.
    """

    def __init__(
        self,
        kv: PagedKVCache,
        seq_ids: Sequence[Hashable],
        counts: Sequence[int],
        *,
        threads: Threads = None,
    ) -> None:
        if len(seq_ids) != len(counts) or len(set(seq_ids)) != len(seq_ids):
            raise ValueError(
                f"Packed: {len(seq_ids)} sequences, each once, with as many counts, not "
                f"{len(counts)}"
            )
        if not seq_ids or min(counts) < 1:
            raise ValueError(
                f"Packed: every sequence brings at least one token, counts are {list(counts)}"
            )
        self._kv, self._seq_ids, self._threads = kv, list(seq_ids), threads
        self._held = held = [_whole_layers(kv, seq_id) for seq_id in seq_ids]
        self._starts = np.cumsum([0, *counts], dtype=np.int32)
        self.position_ids = torch.cat(
            [torch.arange(h, h + n, device="cpu") for h, n in zip(held, counts, strict=True)]
        )[None]
        self.last = torch.from_numpy(self._starts[1:].astype(np.int64) - 1)

    def attend(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring
    ) -> Tensor:
        """Stores the new keys and values of one layer, then attention of all rows: [1,T,H,D]."""
        n_batch, n_heads, n_rows, width = query.shape
        if (n_batch, n_rows) != (1, self._starts[-1]) or key.shape[2] != n_rows:
            raise ValueError(
                f"Packed: {self._starts[-1]} tokens were announced; queries are "
                f"{tuple(query.shape)} and keys {tuple(key.shape)}: input_ids is [1,T], and "
                "use_cache=False"
            )
        for seq_id, held in zip(self._seq_ids, self._held, strict=True):
            if (now := self._kv.seq_len(seq_id, layer)) != held:
                raise ValueError(
                    f"Packed: sequence {seq_id!r} holds {now} positions in layer {layer}, not "
                    f"{held} as when the batch was made; a batch serves one forward"
                )
        k, v = (as_stored(side)[0].transpose(1, 0, 2) for side in (key, value))
        self._kv.append_batch(self._seq_ids, layer, k, v, self._starts)
        out = new_f32(1, n_rows, n_heads, width)
        attend_sequences(
            self._kv, layer, self._seq_ids, self._starts, rows_of(query), scoring, self._threads,
            out[0],
        )  # fmt: skip
        return out


def _whole_layers(kv: PagedKVCache, seq_id: Hashable) -> int:
    """Positions that every layer of a sequence holds. Where a forward failed and could not be taken
    back whole, the first layers hold more, which are given up."""
    held = kv.seq_len(seq_id, kv.n_layers - 1)
    if kv.seq_len(seq_id) > held:
        kv.truncate(seq_id, held, unsay=False)
    return held


def forward_packed(
    model: Any, kv: PagedKVCache, work: Mapping[Hashable, Sequence[int]], *, threads: Threads = None
) -> Tensor:
    """Appends the new tokens of some sequences in one forward: logits [len(work), vocabulary] after
    the last of each, in order.

    model: a causal language model of transformers whose attn_implementation is "tinyllm".
    kv: from ``new_kv``; its sequences are begun, forked and ended by the caller.
    work: the new tokens, at least one, of each sequence. threads: as for PagedCache.

    Raises: as Packed and PagedKVCache.append; every sequence then holds what it held.
    """
    batch = Packed(kv, list(work), [len(tokens) for tokens in work.values()], threads=threads)
    held = {seq_id: kv.seq_len(seq_id) for seq_id in work}
    tokens = [token for tokens in work.values() for token in tokens]
    ids = torch.tensor([tokens], dtype=torch.int64, device="cpu")
    try:
        with torch.no_grad():
            out = model(
                input_ids=ids, position_ids=batch.position_ids, use_cache=False,
                logits_to_keep=batch.last, tl_batch=batch,
            )  # fmt: skip
    except BaseException:
        for seq_id, length in held.items():
            kv.truncate(seq_id, length, unsay=False)
        raise
    return out.logits[0]
