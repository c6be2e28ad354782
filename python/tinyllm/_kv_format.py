# SPDX-License-Identifier: MIT
"""What an element of K and V may be: the one list, and what follows from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from tinyllm._arrays import BF16, E4M3, HELD_AS
from tinyllm.ffi.libtinyllm import (
    TL_BF16,
    TL_F8_E4M3,
    TL_F16,
    TL_F32,
    TL_I8,
    TL_KV_FORMAT_BF16,
    TL_KV_FORMAT_E4M3,
    TL_KV_FORMAT_F16,
    TL_KV_FORMAT_F32,
    TL_KV_FORMAT_I8,
)


@dataclass(frozen=True)
class KvFormat:
    """name: of the dtype, numpy's or (bfloat16, float8_e4m3fn) that of libraries that have it.
    element: how numpy holds one here, unsigned integers where it has no such type. code: its bits.
    has_scales: a value is scale * element.
    lost: the values it has nothing for. advice: what to do about them.
    """

    name: str
    tl_dtype: int
    tl_format: int
    lost: str
    advice: str

    @property
    def element(self) -> np.dtype[Any]:
        return np.dtype(HELD_AS.get(self.name, self.name))

    @property
    def code(self) -> np.dtype[Any]:
        return np.dtype(f"u{self.element.itemsize}")

    @property
    def has_scales(self) -> bool:
        return self.element.itemsize == 1

    def row_bytes(self, dim: int) -> int:
        """A position of one KV head, of K or of V, with its scale."""
        return dim * self.element.itemsize + 4 * self.has_scales

    def strip_bytes(self, block_tokens: int, dim: int) -> int:
        """A block's positions of one KV head: their elements are filled up to whole floats where
        scales follow (kv_pool.h)."""
        padding = -block_tokens * dim % 4 if self.has_scales else 0
        return block_tokens * self.row_bytes(dim) + padding


_WIDER: Final = f"a cache of dtype={BF16!r} holds all but NaN"
FORMATS: Final = {
    form.name: form
    for form in (
        KvFormat("float16", TL_F16, TL_KV_FORMAT_F16, "NaN, or beyond 65504", _WIDER),
        KvFormat(
            BF16, TL_BF16, TL_KV_FORMAT_BF16, "NaN, or beyond 3.39e38",
            "a cache of dtype='float32' holds all but NaN",
        ),
        KvFormat("float32", TL_F32, TL_KV_FORMAT_F32, "NaN", "no dtype has: look where it began"),
        KvFormat("int8", TL_I8, TL_KV_FORMAT_I8, "NaN or infinite: the row is NaN", _WIDER),
        KvFormat(E4M3, TL_F8_E4M3, TL_KV_FORMAT_E4M3, "NaN or infinite: the row is NaN", _WIDER),
    )
}  # fmt: skip


def format_named(fn: str, dtype: Any) -> KvFormat:
    """The format of ``dtype``: its name, or the dtype itself of numpy or of a library like torch.

    Raises: TypeError for any other.
    """
    name = dtype if isinstance(dtype, str) else _name_of(dtype)
    if name not in FORMATS:
        raise TypeError(f"{fn}: dtype must be one of {', '.join(FORMATS)}, not {dtype!r}")
    return FORMATS[name]


def _name_of(dtype: Any) -> str:
    if isinstance(dtype, (np.dtype, type)):
        try:
            found = np.dtype(dtype)
        except TypeError:
            return ""
        return str(found.name) if found.isnative else ""
    return str(dtype).rpartition(".")[2]  # torch.bfloat16


def value_of(code: int, dtype: str) -> Any:
    """The number that has these bits: a numpy scalar, of a type that holds it."""
    if dtype == BF16:
        return np.uint32(code << 16).view(np.float32)
    if dtype == E4M3:
        return e4m3_values()[code]
    form = FORMATS[dtype]
    return form.code.type(code).view(form.element)


def e4m3_values() -> NDArray[np.float32]:
    """The value of each of the 256 codes."""
    code = np.arange(256, dtype=np.uint16)
    # A sign, 4 bits of exponent and 3 of fraction stand in a float16 so that 2^-8 of the value
    # comes out.
    scaled = ((code & 0x80) << 8 | (code & 0x7F) << 7).view(np.float16)
    values: NDArray[np.float32] = scaled.astype(np.float32) * np.float32(256)
    values[code & 0x7F == 0x7F] = np.nan
    return values
