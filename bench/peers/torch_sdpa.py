# SPDX-License-Identifier: MIT
"""torch's scaled_dot_product_attention on K and V that are contiguous already: gathering them out
of a paged cache is not counted.

In decode a group of query heads can be passed as heads (``enable_gqa``) or, as there is no mask, as
the rows of its KV head; in prefill as heads or with K and V repeated for each. The faster of the
two ways is the one that is compared.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from inputs import F32, Inputs, Shape
from peer import NotCompared, Run

Attend = Callable[[int], Any]


class TorchSdpa:
    def __init__(self, dtype: str) -> None:
        import torch

        self._torch = torch
        self._dtype = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}[dtype]
        self.name = f"torch {dtype}"
        self.version = str(torch.__version__)
        self.bf16 = dtype == "bf16"
        self.tolerance = {"f16": 5e-3, "bf16": 4e-2, "f32": 1e-5}[dtype]

    def prepare(self, inputs: Inputs, threads: int) -> Run:
        torch, s = self._torch, inputs.shape
        if s.prefill and self._dtype != torch.float32:
            raise NotCompared("prefill is compared in f32")
        torch.set_num_threads(threads)
        q = self._tensor(inputs.q)
        keys, values = (
            [self._tensor(x) for _ in range(inputs.copies)] for x in (inputs.k, inputs.v)
        )
        ways = self._ways(s, q, keys, values)
        note, attend = min(ways.items(), key=lambda way: _seconds(way[1], inputs.copies))
        last: list[Any] = [None]

        def call(i: int) -> None:
            last[0] = attend(i)

        def output() -> F32:
            out: F32 = last[0].reshape(s.B, s.H, s.rows, s.D).float().numpy()
            return out

        return Run(call, output, note if len(ways) > 1 else "")

    def _ways(self, s: Shape, q: Any, keys: list[Any], values: list[Any]) -> dict[str, Attend]:
        sdpa = self._torch.nn.functional.scaled_dot_product_attention
        grouped, causal = s.group > 1, s.prefill
        ways = {
            "enable_gqa": lambda i: sdpa(
                q, keys[i], values[i], is_causal=causal, enable_gqa=grouped
            )
        }
        if grouped and not s.prefill:
            rows = q.reshape(s.B, s.Hkv, s.group, s.D)
            ways["a group as rows"] = lambda i: sdpa(rows, keys[i], values[i])
        elif grouped:
            k, v = (x[0].repeat_interleave(s.group, 1) for x in (keys, values))
            ways["K and V repeated"] = lambda i: sdpa(q, k, v, is_causal=True)
        return ways

    def _tensor(self, x: np.ndarray[Any, np.dtype[np.float16]]) -> Any:
        """In memory of torch's own allocator."""
        return self._torch.empty(x.shape, dtype=self._dtype).copy_(self._torch.from_numpy(x))


def _seconds(attend: Attend, copies: int) -> float:
    attend(0)
    times = []
    for i in range(5):
        start = time.perf_counter()
        attend(i % copies)
        times.append(time.perf_counter() - start)
    return min(times)
