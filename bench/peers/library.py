# SPDX-License-Identifier: MIT
"""libtinyllm through ctypes: the C functions, called with arguments that were prepared before."""

from __future__ import annotations

import ctypes
from ctypes import c_float, c_int, c_int32, c_int64, c_uint32, c_void_p
from typing import Any

import numpy as np
from inputs import Inputs
from peer import Run, Unavailable
from tinyllm.ffi.libtinyllm import (
    TL_F8_E4M3,
    TL_F16,
    TL_I8,
    TL_KV_FORMAT_E4M3,
    TL_KV_FORMAT_F16,
    TL_KV_FORMAT_I8,
    KvConfig,
    f32_ptr,
    load,
    new_handle,
    u32_ptr,
)

BLOCK = 16
# (dtype, format) of a pool, and the tolerance of what it stores
DTYPES = {
    "float16": (TL_F16, TL_KV_FORMAT_F16, 1e-5),
    "int8": (TL_I8, TL_KV_FORMAT_I8, 5e-2),
    "float8_e4m3fn": (TL_F8_E4M3, TL_KV_FORMAT_E4M3, 2e-1),
}


class Library:
    name = "libtinyllm"
    bf16 = False

    def __init__(self, dtype: str) -> None:
        *self._format, self.tolerance = DTYPES[dtype]
        self._lib = load()
        self._raw = ctypes.CDLL(
            str(self._lib.path)
        )  # the same library, without the checks of its wrapper
        self.version = f"{self._lib.tl_isa_name().decode()} kernels, blocks of {BLOCK}"

    def prepare(self, inputs: Inputs, threads: int) -> Run:
        workers = c_void_p(new_handle(self._lib.tl_pool_create, threads) if threads > 1 else None)
        run = (self._prefill if inputs.shape.prefill else self._decode)(inputs, workers)
        free_kv = run.close
        run.close = lambda: (free_kv(), self._lib.tl_pool_destroy(workers))
        return run

    def _decode(self, inputs: Inputs, workers: c_void_p) -> Run:
        s, n_table = inputs.shape, -(-inputs.shape.ctx // BLOCK)
        n_blocks = s.B * n_table
        config = KvConfig(n_blocks, BLOCK, inputs.copies, s.Hkv, s.D, *self._format)
        kv = new_handle(self._lib.tl_kv_pool_create, ctypes.byref(config))
        ids = np.empty(n_blocks, np.uint32)
        self._lib.tl_kv_alloc(kv, n_blocks, u32_ptr(ids))
        tables = ids[inputs.shuffled(n_blocks)]

        k, v = (x.astype(np.float32) for x in (inputs.k, inputs.v))
        for layer, seq in np.ndindex(inputs.copies, s.B):  # a copy is a layer
            table = tables[seq * n_table : (seq + 1) * n_table]
            rows = (f32_ptr(k[seq]), f32_ptr(v[seq]), s.ctx * s.D, s.D)
            self._lib.tl_kv_append_f32(kv, layer, u32_ptr(table), n_table, 0, s.ctx, *rows)

        q, out = inputs.q.astype(np.float32), np.zeros(inputs.q.shape, np.float32)
        lengths = np.full(s.B, s.ctx, np.int32)
        given = [_at(tables), c_int32(n_table), _at(lengths), _at(out)]
        sizes = [c_int64(n) for n in (s.B, s.H, s.Hkv, s.D)]
        steps = [
            [
                _at(q),
                c_void_p(kv),
                c_uint32(layer),
                *given,
                *sizes,
                c_float(s.scale),
                c_int64(0),
                workers,
            ]
            for layer in range(inputs.copies)
        ]
        run = self._run("tl_paged_attn_decode_f32", steps, out)
        run.close = lambda: self._lib.tl_kv_pool_destroy(kv)
        return run

    def _prefill(self, inputs: Inputs, workers: c_void_p) -> Run:
        s, null = inputs.shape, c_void_p()
        q, k, v = (x.astype(np.float32) for x in (inputs.q, inputs.k, inputs.v))
        out = np.zeros(q.shape, np.float32)
        sizes = [c_int64(n) for n in (s.B, s.H, s.Hkv, s.rows, s.ctx, s.D)]
        causal, any_window, any_tile = [c_int64(0), c_int(1)], c_int64(0), c_int64(0)
        step = [
            *map(_at, (q, k, v, out)),
            null,
            *sizes,
            c_float(s.scale),
            *causal,
            any_window,
            null,
        ]
        return self._run("tl_flash_attn_fwd_f32", [[*step, any_tile, any_tile, null, workers]], out)

    def _run(
        self, function: str, steps: list[list[Any]], out: np.ndarray[Any, np.dtype[np.float32]]
    ) -> Run:
        c_call = self._raw[function]

        def call(i: int) -> None:
            if c_call(*steps[i]):
                raise Unavailable(self._lib.last_error())

        return Run(call, lambda: out)


def _at(a: np.ndarray[Any, Any]) -> c_void_p:
    """The address of ``a``, which lives as long."""
    address = c_void_p(a.ctypes.data)
    address.array = a  # type: ignore[attr-defined]
    return address
