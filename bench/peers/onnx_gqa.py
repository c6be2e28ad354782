# SPDX-License-Identifier: MIT
"""ONNX Runtime's GroupQueryAttention on the CPU; past and present share one buffer, as its
generation library has it.

The operator appends the newest position before it attends: it is given the K and V that stand there
already.
Everything is bound beforehand, in memory of ONNX Runtime's own allocator.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from inputs import F32, Inputs, Shape
from peer import NotCompared, Run


class OnnxGqa:
    bf16 = False

    def __init__(self, dtype: str) -> None:
        import onnx
        import onnxruntime

        self._onnx, self._ort = onnx, onnxruntime
        self._dtype = {"f16": np.float16, "f32": np.float32}[dtype]
        self.name = f"ONNX RT {dtype}"
        self.version = onnxruntime.__version__
        self.tolerance = {"f16": 5e-3, "f32": 1e-5}[dtype]

    def prepare(self, inputs: Inputs, threads: int) -> Run:
        s = inputs.shape
        if s.prefill:
            raise NotCompared("decode only")
        options = self._ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
        session = self._ort.InferenceSession(
            self._model(s), options, providers=["CPUExecutionProvider"]
        )
        newest = {
            "query": self._value(inputs.q.reshape(s.B, 1, -1)),
            "key": self._value(inputs.k[:, :, -1].reshape(s.B, 1, -1)),
            "value": self._value(inputs.v[:, :, -1].reshape(s.B, 1, -1)),
            "past_lengths": self._value(np.full(s.B, s.ctx - 1, np.int32)),
            "total_length": self._value(np.array([s.ctx], np.int32)),
        }
        out = self._value(np.zeros((s.B, 1, s.H * s.D), self._dtype))
        bindings = []
        for _ in range(inputs.copies):
            binding = session.io_binding()
            for name, value in newest.items():
                binding.bind_ortvalue_input(name, value)
            binding.bind_ortvalue_output("out", out)
            for name, x in (("key", inputs.k), ("value", inputs.v)):
                cache = self._value(x)
                binding.bind_ortvalue_input(f"past_{name}", cache)
                binding.bind_ortvalue_output(f"present_{name}", cache)
            bindings.append(binding)

        def output() -> F32:
            answer: F32 = out.numpy().reshape(s.B, s.H, 1, s.D).astype(np.float32)
            return answer

        return Run(lambda i: session.run_with_iobinding(bindings[i]), output)

    def _model(self, s: Shape) -> bytes:
        make, kinds = self._onnx.helper, self._onnx.TensorProto
        kind = kinds.FLOAT16 if self._dtype is np.float16 else kinds.FLOAT

        def tensor(name: str, *sizes: int, of: int = kind) -> Any:
            return make.make_tensor_value_info(name, of, sizes)

        cache = (s.B, s.Hkv, s.ctx, s.D)
        takes = [
            tensor("query", s.B, 1, s.H * s.D),
            tensor("key", s.B, 1, s.Hkv * s.D),
            tensor("value", s.B, 1, s.Hkv * s.D),
            tensor("past_key", *cache),
            tensor("past_value", *cache),
            tensor("past_lengths", s.B, of=kinds.INT32),
            tensor("total_length", 1, of=kinds.INT32),
        ]
        gives = [
            tensor("out", s.B, 1, s.H * s.D),
            tensor("present_key", *cache),
            tensor("present_value", *cache),
        ]
        node = make.make_node(
            "GroupQueryAttention",
            [t.name for t in takes],
            [t.name for t in gives],
            domain="com.microsoft",
            num_heads=s.H,
            kv_num_heads=s.Hkv,
            scale=s.scale,
        )
        opsets = [make.make_opsetid("", 17), make.make_opsetid("com.microsoft", 1)]
        model = make.make_model(
            make.make_graph([node], "attention", takes, gives), opset_imports=opsets
        )
        model.ir_version = 8
        serialized: bytes = model.SerializeToString()
        return serialized

    def _value(self, x: np.ndarray[Any, Any]) -> Any:
        """x in ONNX Runtime's memory; floats in the type that is compared."""
        x = np.ascontiguousarray(x.astype(self._dtype) if x.dtype.kind == "f" else x)
        value = self._ort.OrtValue.ortvalue_from_shape_and_type(x.shape, x.dtype.type, "cpu")
        value.update_inplace(x)
        return value
