# SPDX-License-Identifier: MIT
"""KVView: where the K and V of one layer lie, in whoever's memory; mirrors ``tinyllm/kv_view.h``.

A view owns no block: it says how memory is cut, keeps that memory alive, and is read in place.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray

from tinyllm._arrays import (
    BF16,
    Tensor,
    as_array,
    as_f32,
    as_f32_for_f16,
    integers,
    shape,
    whole_rows,
    with_axes,
)
from tinyllm._check import I64, INT32_MAX, INT64_MAX
from tinyllm._not_copied import NotCopied
from tinyllm.errors import TlError
from tinyllm.ffi.handle import Handle, reading
from tinyllm.ffi.libtinyllm import (
    KV_VIEW_BYTES,
    TL_BF16,
    TL_EINVAL,
    TL_F16,
    TL_F32,
    KvView,
    Lib,
    block_view,
    i64_ptr,
    load,
    struct_ptr,
)

__all__ = ["KVView"]

_CODES: Final = {"float32": TL_F32, "float16": TL_F16, BF16: TL_BF16}
_LAYOUTS: Final = {
    "HND": (0, 2, 1, 3),
    "NHD": (0, 1, 2, 3),
}  # where blocks, slots, heads and elements stand


class KVView(NotCopied):
    """K and V of one layer in blocks, as ``paged_attention`` reads them; made by
    ``KVView.from_arrays`` or ``PagedKVCache.view``.

    It keeps its arrays, or its cache, alive. What they hold may change between calls.
    dtype: "float32", "float16" or "bfloat16". head_dims: elements in a row of K, and in one of V.

    >>> view = KVView.from_arrays(kv[:, 0], kv[:, 1], layout="NHD")  # kv: [blocks, 2, b, Hkv, D]
    """

    __slots__ = (
        "_keep", "_lib", "_owner", "_pointer", "_struct", "_writable", "dtype", "head_dims",
    )  # fmt: skip
    _instead = "make another over the same memory, by KVView.from_arrays or PagedKVCache.view"

    def __init__(
        self,
        struct: KvView,
        dtype: str,
        keep: object,
        *,
        owner: Handle | None = None,
        lib: Lib | None = None,
        writable: bool = False,
    ) -> None:
        """For the two that make views. ``owner``, if any, is read from in every call."""
        self._struct, self.dtype, self._keep = struct, dtype, keep
        self._owner, self._lib, self._writable = owner, lib, writable
        self._pointer = struct_ptr(struct)
        self.head_dims: tuple[int, int] = (struct.head_dim_k, struct.head_dim_v)

    @classmethod
    def from_arrays(
        cls,
        k: Tensor,
        v: Tensor,
        layout: Literal["HND", "NHD"] = "HND",
        dtype: str | None = None,
        *,
        lib: Lib | None = None,
    ) -> KVView:
        """The view of two arrays, read where they are: nothing is copied.

        k: [blocks, Hkv, b, Dk] in the layout "HND", [blocks, b, Hkv, Dk] in "NHD"; v: the same with
        Dv. Numpy arrays, or what gives its memory by DLPack or the buffer protocol (torch's
        bfloat16 too); no stride negative, the last axis contiguous. Contiguous K and V [B,Hkv,T,D]
        are B blocks of T positions.
        dtype: None where the arrays are float32, float16 or bfloat16 and say so; the name of what
        they hold where they are 16-bit integers, ``dtype="bfloat16"`` for one. Other types are not
        converted, for a view shows what its memory will hold later, too.
        lib: a loaded library; None is the default one, loaded when the view is first used.

        Raises: TypeError for another type, or two; ValueError for another layout, shapes that
        disagree, an empty axis other than blocks, more blocks than an int32 can name, or strides
        that no view has.
        """
        fn = "KVView.from_arrays"
        if layout not in _LAYOUTS:
            raise ValueError(f"{fn}: layout must be 'HND' or 'NHD', not {layout!r}")
        sides, held = {}, []
        for name, side in (("k", k), ("v", v)):
            a, element = as_array(fn, name, side)
            sides[name] = with_axes(fn, name, a, 4)
            held.append(_element(fn, name, element, dtype))
        if held[0] != held[1]:
            raise TypeError(f"{fn}: k is {held[0]} and v {held[1]}")
        shapes = f"k has shape {sides['k'].shape} and v {sides['v'].shape}"
        k, v = (a.transpose(_LAYOUTS[layout]) for a in sides.values())
        if k.shape[:3] != v.shape[:3]:
            raise ValueError(f"{fn}: {shapes}; only the last axis may differ")
        if k.shape[0] > INT32_MAX or 0 in k.shape[1:] or 0 in v.shape[1:]:
            raise ValueError(
                f"{fn}: {shapes}; blocks may be 0 .. {INT32_MAX}, and no other axis empty"
            )
        steps = [*_steps(fn, "k", k), *_steps(fn, "v", v)]
        struct = KvView(
            KV_VIEW_BYTES, k.ctypes.data, v.ctypes.data, _CODES[held[0]], 0, *k.shape, v.shape[3],
            *steps,
        )  # fmt: skip
        return cls(
            struct, held[0], sides, lib=lib, writable=k.flags.writeable and v.flags.writeable
        )

    @property
    def num_blocks(self) -> int:
        """Blocks that a table can name, from 0 on."""
        return int(self._struct.n_blocks)

    @property
    def block_size(self) -> int:
        """Positions in a block."""
        return int(self._struct.block_tokens)

    @property
    def n_kv_heads(self) -> int:
        """KV heads."""
        return int(self._struct.n_kv_heads)

    def write_slots(self, slots: Any, k: Tensor, v: Tensor) -> None:
        """Writes K and V of T tokens into the slots an engine's own tables gave them.

        slots: integers [T], block * block_size + offset, or -1 for a token that is skipped. k
        [T,Hkv,Dk] and v [T,Hkv,Dv]: float32, which is rounded to the view's type, or that type
        itself, copied only where the last axis is not contiguous; or any other real numbers.

        Raises: TypeError for what are no real numbers; ValueError for a wrong shape, a slot that is
        not there or is given twice, and for memory that is not written this way: read-only arrays,
        and a PagedKVCache, which has ``append``; TlError (``TL_ENOMEM``). Nothing is written then.
        """
        fn = "KVView.write_slots"
        if not self._writable:
            raise ValueError(f"{fn}: {self!r} is read-only")
        slots = integers(fn, "slots", slots, I64, -1, INT64_MAX)
        sides = [
            (*as_array(fn, name, side), (len(slots), self.n_kv_heads, width))
            for name, side, width in zip("kv", (k, v), self.head_dims, strict=True)
        ]
        for name, (a, _, wanted) in zip("kv", sides, strict=True):
            shape(fn, name, a, wanted, "[T,Hkv,D]")
        stored = all(element == self.dtype or self._is_code(element) for a, element, _ in sides)
        rounded = as_f32_for_f16 if self.dtype == "float16" else as_f32
        a, b = (
            whole_rows(a if stored else rounded(fn, name, a, element))
            for name, (a, element, _) in zip("kv", sides, strict=True)
        )
        given = self.dtype if stored else "float32"
        steps = [stride // side.itemsize for side in (a, b) for stride in side.strides[:2]]
        try:
            self._library().tl_kv_write_slots(
                self._struct,
                i64_ptr(slots),
                len(slots),
                a.ctypes.data,
                b.ctypes.data,
                _CODES[given],
                *steps,
            )
        except TlError as error:
            if error.status == TL_EINVAL:
                raise ValueError(f"{fn}: {error.reason}") from error
            raise

    def reading(self) -> AbstractContextManager[Any]:
        """What every call that reads the memory stands in. Raises: ClosedError; ConcurrentUseError
        while somebody writes to the cache."""
        return reading(self._owner)

    def arrays(self) -> list[NDArray[Any]]:
        """The arrays it was made of; none of a cache's."""
        return list(self._keep.values()) if isinstance(self._keep, dict) else []

    def _is_code(self, element: str) -> bool:
        """Whether integers of that type are taken for the view's own."""
        return self.dtype != "float32" and element in ("uint16", "int16")

    def _codes(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """K and V where they lie, as unsigned integers [blocks, Hkv, b, D]; valid as long as that
        memory, so only inside ``with view.reading()``."""
        s, width = self._struct, 4 if self.dtype == "float32" else 2
        sides = (
            (s.k, s.head_dim_k, s.k_block_stride, s.k_head_stride, s.k_token_stride),
            (s.v, s.head_dim_v, s.v_block_stride, s.v_head_stride, s.v_token_stride),
        )
        axes = (s.n_blocks, s.n_kv_heads, s.block_tokens)
        k, v = (
            _strided(address, width, (*axes, dim), (*steps, 1)) for address, dim, *steps in sides
        )
        return k, v

    def _library(self) -> Lib:
        self._lib = self._lib or load()
        return self._lib

    def __repr__(self) -> str:
        names = ("num_blocks", "block_size", "n_kv_heads", "head_dims", "dtype")
        return f"KVView({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


def _strided(
    address: int, width: int, axes: tuple[int, ...], steps: tuple[int, ...]
) -> NDArray[Any]:
    """Memory as unsigned integers of ``width`` bytes; an axis of one may have any step."""
    if 0 in axes:
        return np.empty(axes, f"u{width}")
    n = 1 + sum((count - 1) * step for count, step in zip(axes, steps, strict=True))
    flat = block_view(address, (n * width // 2,)).view(f"u{width}")
    return np.lib.stride_tricks.as_strided(flat, axes, [step * width for step in steps])


def _element(fn: str, name: str, own: str, named: str | None) -> str:
    """What an array holds: float32, float16 or bfloat16, by its own word or by the caller's."""
    if named is not None and named not in _CODES:
        raise TypeError(f"{fn}: dtype must be one of {', '.join(_CODES)}, not {named!r}")
    if own in _CODES and named in (None, own):
        return own
    if own in ("uint16", "int16") and named in ("float16", BF16):
        return named
    raise TypeError(
        f"{fn}: {name} must be float32, float16 or bfloat16, or integers of 16 bits that dtype "
        f"names; it is {own}, and dtype {named!r}"
    )


def _steps(fn: str, name: str, a: NDArray[Any]) -> tuple[int, int, int]:
    """Strides of blocks, heads and slots in elements, of [blocks, b, Hkv, D]; 0 along an axis of
    one."""
    strides = [stride if n > 1 else 0 for n, stride in zip(a.shape, a.strides, strict=True)]
    uneven = [stride for stride in strides if stride < 0 or stride % a.itemsize]
    if uneven or strides[3] not in (0, a.itemsize) or not a.flags.aligned:
        raise ValueError(
            f"{fn}: {name} has strides of {a.strides} bytes; a view needs whole, aligned elements "
            f"of {a.itemsize}, no stride negative, and the last axis contiguous"
        )
    return strides[0] // a.itemsize, strides[2] // a.itemsize, strides[1] // a.itemsize
