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

    def decode(
        self, q: Array, kv: list[tuple[Array, Array]], scale: float, window: int, dtype: str
    ) -> Array:
        """Each sequence alone, in one block that holds it all."""
        rows = []
        for s, sides in enumerate(kv):
            (k, k_scale), (v, v_scale) = (stored(dtype, a[None]) for a in sides)
            out, _ = reference.paged_attn(
                q[s : s + 1], k, v, np.zeros((1, 1), np.int32), np.array([k.shape[2]]),
                scale=scale, window=window, k_scale=k_scale, v_scale=v_scale,
            )  # fmt: skip
            rows.append(out)
        return np.concatenate(rows)

    def rows(self, dtype: str, k: Array, v: Array) -> list[Array]:
        (k, k_scale), (v, v_scale) = stored(dtype, k), stored(dtype, v)
        if k_scale is None or v_scale is None:
            wide = {"bfloat16": reference.bf16_to_f32}.get(dtype, lambda codes: codes)
            return [wide(k), wide(v)]
        back = [reference.stored_to_f32(*side) for side in ((k, k_scale), (v, v_scale))]
        return [*back, k, v, k_scale, v_scale]

    def write(self, x: Array, scale: np.float32) -> Array:
        with np.errstate(all="ignore"):
            return reference.f32_to_e4m3(x * (np.float32(1) / scale))

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

    def envelope(self, k: Array, v: Array, block_tokens: int, tokens: Array, dtype: str) -> bytes:
        n_layers, n_kv, n, width = k.shape
        n_blocks = -(-n // block_tokens)
        sizes = (n_blocks, block_tokens, n_layers, n_kv, width)
        body = struct.pack("<4sHH5I", b"TLKV", *NUMBERS[dtype], *sizes)
        name = 0
        for i in range(n_blocks):
            begin, fill = i * block_tokens, min(n - i * block_tokens, block_tokens)
            full = fill == block_tokens
            name = (
                fnv1a(struct.pack(f"<Q{fill}I", name, *tokens[begin : begin + fill])) if full else 0
            )
            body += struct.pack("<QI", name, fill)
            for layer in range(n_layers):
                for side in (k, v):
                    for head in side[layer, :, begin : begin + fill]:
                        body += strip(dtype, head, block_tokens)
        return body + struct.pack("<I", crc32c(body))


NUMBERS = {  # of the format, of the dtype
    "float16": (1, 1), "float8_e4m3fn": (2, 3), "int8": (3, 5), "bfloat16": (4, 2),
    "float32": (5, 0),
}  # fmt: skip


def strip(dtype: str, rows: Array, block_tokens: int) -> bytes:
    """Rows [fill, D] of a block as they lie there: elements, zeros up to a multiple of 4 bytes, and
    the scales."""
    codes, scales = stored(dtype, rows)
    elements = np.zeros((block_tokens, rows.shape[1]), codes.dtype.newbyteorder("<"))
    elements[: len(rows)] = codes
    raw = elements.tobytes()
    if scales is None:
        return raw
    each = np.zeros(block_tokens, "<f4")
    each[: len(rows)] = scales
    return raw + bytes(-len(raw) % 4) + each.tobytes()


def stored(dtype: str, rows: Array) -> tuple[Array, Array | None]:
    """Rows [..., D] as the reference stores them, and their scales [...], where they have any."""
    if dtype == "int8":
        return reference.store_i8(rows)
    if dtype == "float8_e4m3fn":
        return reference.store_e4m3(rows)
    if dtype == "bfloat16":
        return reference.f32_to_bf16(rows), None
    if dtype == "float16" and rows.dtype != np.float16:
        return reference.f32_to_f16(rows).view(np.float16), None
    return rows, None


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
    eights = golden.Numbers(7).eights("float8_e4m3fn", 5000)
    assert np.isfinite(reference.e4m3_to_f32(eights)).all() and len(np.unique(eights)) == 254
    assert len(np.unique(golden.Numbers(7).eights("int8", 5000))) == 256
    codes = golden.Numbers(7).bf16(1000)
    assert (reference.bf16_to_f32(codes) == golden.Numbers(7).floats(1000, fraction=7)).all()


@pytest.mark.filterwarnings("ignore:append")  # of NaN, on purpose
def test_attention_groups_give_numbers_that_differ(lib: Lib) -> None:
    """No digest is one of zeros or NaN: rows are finite, and few are equal (those of one key)."""
    engine = golden.Library(lib, 1)
    for seed, (name, group) in enumerate(golden.GROUPS.items(), 1):
        if name.startswith(("decode", "chunks", "two and three")):
            out = next(iter(group(engine, seed)))
            rows = out.reshape(-1, out.shape[-1])
            assert np.isfinite(rows).all() and len(np.unique(rows, axis=0)) > len(rows) / 2, name
