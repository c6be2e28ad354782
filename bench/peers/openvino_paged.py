# SPDX-License-Identifier: MIT
"""OpenVINO's PagedAttentionExtension on its CPU plugin, alone in a model; blocks of 32 positions.

The operation writes the newest position into the cache before it attends: it is given the K and V
that stand there already. One request is bound to each copy beforehand, so that a call is one
``infer``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from inputs import F32, Inputs, Shape, bf16_bits, in_blocks
from peer import NotCompared, Run, Unavailable

BLOCK = 32


class OpenVinoPaged:
    def __init__(self, dtype: str) -> None:
        import openvino

        self._ov = openvino
        self._core = openvino.Core()
        kinds = {"f16": openvino.Type.f16, "bf16": openvino.Type.bf16, "u8": openvino.Type.u8}
        self._dtype = kinds[dtype]
        self.name = f"OpenVINO {dtype}"
        self.version = openvino.__version__
        self.bf16 = dtype == "bf16"
        self.tolerance = {"f16": 1e-3, "bf16": 4e-2, "u8": 1e-1}[dtype]

    def prepare(self, inputs: Inputs, threads: int) -> Run:
        s, ov = inputs.shape, self._ov
        if s.prefill:
            raise NotCompared("decode only")
        compute = self._dtype if self.bf16 else ov.Type.f32
        compiled = self._core.compile_model(
            self._model(s),
            "CPU",
            {
                "INFERENCE_NUM_THREADS": threads,
                "NUM_STREAMS": 1,
                "ENABLE_CPU_PINNING": False,
                "KV_CACHE_PRECISION": self._dtype,
                "INFERENCE_PRECISION_HINT": compute,
            },
        )
        n_table = -(-s.ctx // BLOCK)
        n_blocks = s.B * n_table * inputs.copies
        tables = inputs.shuffled(n_blocks).astype(np.int32).reshape(inputs.copies, -1)
        bound = {
            "q": _rows(inputs.q[:, :, -1]),
            "k": _rows(inputs.k[:, :, -1]),
            "v": _rows(inputs.v[:, :, -1]),
            "past_lens": np.full(s.B, s.ctx - 1, np.int32),
            "subsequence_begins": np.arange(s.B + 1, dtype=np.int32),
            "block_indices_begins": np.arange(s.B + 1, dtype=np.int32) * np.int32(n_table),
        }
        tensors = {name: ov.Tensor(x) for name, x in bound.items()}
        if self._dtype == ov.Type.u8:
            tensors |= self._written(compiled, inputs, tables)
        else:
            for name, x in (("key_cache.0", inputs.k), ("value_cache.0", inputs.v)):
                tensors[name] = self._cache(compiled.input(name), x, tables)

        requests = []
        for table in tables:
            request = compiled.create_infer_request()
            for name, tensor in (tensors | {"block_indices": ov.Tensor(table.copy())}).items():
                request.set_tensor(name, tensor)
            requests.append(request)
        last = [requests[0]]

        def call(i: int) -> None:
            last[0] = requests[i]
            requests[i].infer()

        def output() -> F32:
            out: F32 = (
                last[0].get_output_tensor(0).data.reshape(s.B, s.H, 1, s.D).astype(np.float32)
            )
            return out

        return Run(call, output)

    def _model(self, s: Shape) -> Any:
        """One attention without window, ALiBi, rotation, sparse blocks and sinks."""
        from openvino.op import _PagedAttentionExtension as PagedAttention

        ov, op = self._ov, self._ov.opset13
        f32, i32 = ov.Type.f32, ov.Type.i32

        def parameter(name: str, kind: Any, sizes: list[int]) -> Any:
            node = op.parameter(ov.PartialShape(sizes), kind)
            node.output(0).get_tensor().set_names({name})
            return node

        def number(value: float, kind: type = np.int32) -> Any:
            return op.constant(np.array(value, kind))

        def nothing(kind: type = np.int32) -> Any:
            return op.constant(np.zeros(0, kind))

        given = [
            parameter("q", f32, [-1, s.H * s.D]),
            parameter("k", f32, [-1, s.Hkv * s.D]),
            parameter("v", f32, [-1, s.Hkv * s.D]),
            parameter("key_cache.0", ov.Type.dynamic, [-1, BLOCK, -1]),
            parameter("value_cache.0", ov.Type.dynamic, [-1, BLOCK, -1]),
            parameter("past_lens", i32, [-1]),
            parameter("subsequence_begins", i32, [-1]),
            parameter("block_indices", i32, [-1]),
            parameter("block_indices_begins", i32, [-1]),
        ]
        options = [
            number(s.scale, np.float32),
            number(0),  # sliding window
            nothing(np.float32),  # ALiBi slopes
            number(s.ctx),  # longest context
            nothing(),  # score aggregation window
            *(nothing(), nothing(), nothing(np.float32)),  # rotation: blocks, deltas, table
            *(
                nothing(np.float32),
                number(64),
                number(8),
            ),  # sparse attention: threshold, block size, stride
            nothing(np.float32),  # sinks
            *(
                number(0),
                nothing(),
                nothing(),
                nothing(),
            ),  # eviction: start, sizes, sets, their begins
            nothing(),  # token types
            *(nothing(np.uint8), nothing()),  # query-to-query bias and its begins
        ]
        attention = PagedAttention([node.output(0) for node in given + options])
        info = attention.get_rt_info()
        info["num_k_heads"] = info["num_v_heads"] = s.Hkv
        info["k_head_size"] = info["v_head_size"] = s.D
        return ov.Model([attention.output(0)], given, "attention")

    def _written(self, compiled: Any, inputs: Inputs, tables: Any) -> dict[str, Any]:
        """Caches whose layout is its own: written by the operation, as a prompt, in the blocks of
        the first copy, and from there to the others."""
        s, ov = inputs.shape, self._ov
        caches = {}
        for name in ("key_cache.0", "value_cache.0"):
            port = compiled.input(name)
            sizes = [d.get_length() for d in list(port.get_partial_shape())[1:]]
            caches[name] = ov.Tensor(port.get_element_type(), ov.Shape([tables.size, *sizes]))
        n_table = tables.shape[1] // s.B
        prompt = {
            "q": np.zeros((s.B * s.ctx, s.H * s.D), np.float32),
            "k": _rows(inputs.k.swapaxes(1, 2).reshape(s.B * s.ctx, s.Hkv, s.D)),
            "v": _rows(inputs.v.swapaxes(1, 2).reshape(s.B * s.ctx, s.Hkv, s.D)),
            "past_lens": np.zeros(s.B, np.int32),
            "subsequence_begins": np.arange(s.B + 1, dtype=np.int32) * np.int32(s.ctx),
            "block_indices_begins": np.arange(s.B + 1, dtype=np.int32) * np.int32(n_table),
            "block_indices": tables[0].copy(),
        }
        request = compiled.create_infer_request()
        for name, tensor in ({k: ov.Tensor(x) for k, x in prompt.items()} | caches).items():
            request.set_tensor(name, tensor)
        request.infer()
        for tensor in caches.values():
            for table in tables[1:]:
                tensor.data[table] = tensor.data[tables[0]]
        return caches

    def _cache(self, port: Any, x: np.ndarray[Any, np.dtype[np.float16]], tables: Any) -> Any:
        """All copies of K or V in the compiled model's layout, in OpenVINO's memory."""
        blocks = in_blocks(x, BLOCK)
        asked = [d.get_length() for d in list(port.get_partial_shape())[1:]]
        if port.get_element_type() != self._dtype or asked != list(blocks.shape[1:]):
            raise Unavailable(f"its cache is {port.get_element_type()} {asked}, not known here")
        tensor = self._ov.Tensor(self._dtype, self._ov.Shape([tables.size, *asked]))
        tensor.data.view(np.uint16)[tables] = (
            bf16_bits(blocks) if self.bf16 else blocks.view(np.uint16)
        )
        return tensor


def _rows(x: np.ndarray[Any, np.dtype[np.float16]]) -> F32:
    """[B, heads, D] as [B, heads * D]."""
    return np.ascontiguousarray(x.reshape(len(x), -1), np.float32)
