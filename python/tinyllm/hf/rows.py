# SPDX-License-Identifier: MIT
"""Tensors of transformers as the arrays of the library, and back.

Words. T columns: what a forward brings for every sequence of its batch, padding included. row: one
query of one sequence. Tensors come as [B,H,T,D] views of [B,T,H,D] memory; by strides that is rows
[B*T,H,D] as it is.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, TypedDict

import numpy as np
import torch
from numpy.typing import NDArray

from tinyllm.attention import paged_attention
from tinyllm.infer.paged import PagedKVCache
from tinyllm.threads import ThreadPool

Tensor = Any  # torch.Tensor, for a type checker that has no torch
Threads = int | ThreadPool | None


class Scoring(TypedDict):
    """How one layer turns dot products into weights: arguments of ``paged_attention``."""

    scale: float | None
    window: int
    softcap: float
    sink_logits: NDArray[np.float32] | None


def rows_of(query: Tensor) -> Tensor:
    """[B,H,T,D] as [B*T,H,D]: of the usual memory a view."""
    n_batch, n_heads, n_columns, width = query.shape
    return query.transpose(1, 2).reshape(n_batch * n_columns, n_heads, width)


def new_f32(*shape: int) -> Tensor:
    """float32 on the CPU, whatever torch makes by default."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def as_f32(tensor: Tensor) -> NDArray[np.float32]:
    """The memory of a float32 tensor; a copy of another one."""
    array: NDArray[np.float32] = tensor.detach().float().numpy()
    return array


def as_stored(tensor: Tensor) -> NDArray[Any]:
    """The memory of a float32 or float16 tensor, which a pool rounds by itself; of bfloat16, which
    numpy does not have, a float32 copy."""
    array: NDArray[Any] = (
        (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).detach().numpy()
    )
    return array


def in_a_row(places: NDArray[np.int64]) -> slice | NDArray[np.int64]:
    """Rising places, at least one, as a slice where none is left out: that copies nothing."""
    first, end = int(places[0]), int(places[-1]) + 1
    return slice(first, end) if end - first == len(places) else places


def threads_of(threads: Threads) -> int | ThreadPool:
    """``threads`` of a call; None is as many as torch uses."""
    return int(torch.get_num_threads()) if threads is None else threads


def attend_sequences(
    kv: PagedKVCache,
    layer: int,
    seq_ids: Sequence[Hashable],
    starts: NDArray[np.int32],
    rows: Tensor,
    scoring: Scoring,
    threads: Threads,
    out: Tensor,
) -> None:
    """One call for the last rows of some sequences: those of sequence s are
    rows[starts[s]:starts[s+1]]."""
    with kv.batch(seq_ids) as step:
        paged_attention(
            as_f32(rows), step, layer, cu_seqlens_q=starts, threads=threads_of(threads),
            out=out.numpy(), **scoring,
        )  # fmt: skip
