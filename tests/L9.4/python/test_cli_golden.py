# SPDX-License-Identifier: MIT
"""The digests of ``tinyllm selftest`` are those of ``tinyllm.reference``, which shares no code with
the C library (the one of an export: of ``struct`` and a checksum that goes byte by byte)."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from test_fixtures import crc32c
from tinyllm import reference
from tinyllm.cli import golden
from tinyllm.ffi.libtinyllm import Lib

Array = NDArray[Any]


class Exact:
    """The engine that is ``tinyllm.reference``."""

    def decode(self, q: Array, kv: list[tuple[Array, Array]], scale: float, window: int) -> Array:
        """Each sequence alone, in one block that holds it all."""
        rows = [
            reference.paged_attn_decode(
                q[s : s + 1], k[None], v[None], np.zeros((1, 1), np.int32), np.array([k.shape[1]]),
                scale=scale, window=window,
            )
            for s, (k, v) in enumerate(kv)
        ]  # fmt: skip
        return np.concatenate(rows)

    def paged(
        self, q: Array, k: Array, v: Array, tables: Array, lengths: Array, **options: Any
    ) -> list[Array]:
        return list(reference.paged_attn(q, k, v, tables, lengths, **options))

    def flash(self, q: Array, k: Array, v: Array, **options: Any) -> list[Array]:
        return list(reference.flash_attn_fwd(q, k, v, **options))

    def softmax(self, x: Array) -> list[Array]:
        return [reference.softmax(x), reference.softmax_online(x)]

    def exp(self, x: Array) -> Array:
        return reference.expf(x)

    def convert(self, name: str, x: Array) -> Array:
        y: Array = getattr(reference, name)(x)
        return y

    def envelope(self, k: Array, v: Array, block_tokens: int, tokens: Array) -> bytes:
        n_layers, n_kv, n, width = k.shape
        n_blocks = -(-n // block_tokens)
        body = struct.pack("<4sHH5I", b"TLKV", 1, 1, n_blocks, block_tokens, n_layers, n_kv, width)
        name = 0
        for i in range(n_blocks):
            begin, fill = i * block_tokens, min(n - i * block_tokens, block_tokens)
            full = fill == block_tokens
            name = (
                fnv1a(struct.pack(f"<Q{fill}I", name, *tokens[begin : begin + fill])) if full else 0
            )
            slabs = np.zeros((n_layers, 2, n_kv, block_tokens, width), "<f2")
            slabs[:, 0, :, :fill], slabs[:, 1, :, :fill] = (
                a[:, :, begin : begin + fill] for a in (k, v)
            )
            body += struct.pack("<QI", name, fill) + slabs.tobytes()
        return body + struct.pack("<I", crc32c(body))


def fnv1a(data: bytes) -> int:
    h = 0xCBF29CE484222325
    for byte in data:
        h = (h ^ byte) * 0x100000001B3 % 2**64
    return h


@pytest.mark.parametrize(("seed", "name"), list(enumerate(golden.GROUPS, 1)))
def test_the_digests_kept_are_those_of_the_reference(seed: int, name: str) -> None:
    assert golden.digest(golden.GROUPS[name](Exact(), seed)) == golden.DIGESTS[name]


def test_the_numbers_are_those_of_splitmix64() -> None:
    """The first outputs of its published code for seed 0."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F, 0xF88BB8A8724C81EC]
    assert golden.Numbers(0).bits(5)[1:].tolist() == published


def test_numbers_fit_the_types_they_are_drawn_for() -> None:
    n = golden.Numbers(7)
    x = n.floats(1000)
    assert x.dtype == np.float32 and (np.abs(x) < 2).all() and len(np.unique(x)) == 1000
    assert (golden.Numbers(7).halves(1000) == golden.Numbers(7).floats(1000, fraction=10)).all()
    codes = golden.Numbers(7).bf16(1000)
    assert (reference.bf16_to_f32(codes) == golden.Numbers(7).floats(1000, fraction=7)).all()


def test_attention_groups_give_numbers_that_differ(lib: Lib) -> None:
    """No digest is one of zeros or NaN: rows are finite, and few are equal (those of one key)."""
    engine = golden.Library(lib, 1)
    for seed, (name, group) in enumerate(golden.GROUPS.items(), 1):
        if name.startswith(("decode", "chunks", "two and three")):
            out = next(iter(group(engine, seed)))
            rows = out.reshape(-1, out.shape[-1])
            assert np.isfinite(rows).all() and len(np.unique(rows, axis=0)) > len(rows) / 2, name
