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
    Tensor,
    as_array,
    as_f32,
    as_f32_for_f16,
    integers,
    shape,
    whole_rows,
    with_axes,
)
from tinyllm._check import F32, I64, INT32_MAX, INT64_MAX
from tinyllm._kv_format import FORMATS, KvFormat, format_named
from tinyllm._not_copied import NotCopied
from tinyllm.errors import TlError
from tinyllm.ffi.handle import Handle, reading
from tinyllm.ffi.libtinyllm import (
    KV_VIEW_BYTES,
    TL_EINVAL,
    KvView,
    Lib,
    address_of_floats,
    float_pointer,
    i64_ptr,
    load,
    memory_at,
    struct_ptr,
)

__all__ = ["KVView"]

_LAYOUTS: Final = {
    "HND": (0, 2, 1, 3),
    "NHD": (0, 1, 2, 3),
}  # where blocks, slots, heads and elements stand


class KVView(NotCopied):
    """K and V of one layer in blocks, as ``paged_attention`` reads them; made by
    ``KVView.from_arrays`` or ``PagedKVCache.view``.

    It keeps its arrays, or its cache, alive. What they hold may change between calls.
    dtype: "float16", "bfloat16", "float32", "int8" or "float8_e4m3fn"; of the last two a value is
    scale * element. head_dims: elements in a row of K, and in one of V.

    >>> view = KVView.from_arrays(kv[:, 0], kv[:, 1], layout="NHD")  # kv: [blocks, 2, b, Hkv, D]
    """

    __slots__ = (
        "_keep", "_lib", "_owner", "_pointer", "_scales_writable", "_struct", "_writable", "dtype",
        "head_dims",
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
        scales_writable: bool = True,
    ) -> None:
        """For the two that make views. ``owner``, if any, is read from in every call."""
        self._struct, self.dtype, self._keep = struct, dtype, keep
        self._owner, self._lib = owner, lib
        self._writable, self._scales_writable = writable, scales_writable
        self._pointer = struct_ptr(struct)
        self.head_dims: tuple[int, int] = (struct.head_dim_k, struct.head_dim_v)

    @classmethod
    def from_arrays(
        cls,
        k: Tensor,
        v: Tensor,
        layout: Literal["HND", "NHD"] = "HND",
        dtype: Any = None,
        *,
        k_scale: Tensor | float | None = None,
        v_scale: Tensor | float | None = None,
        lib: Lib | None = None,
    ) -> KVView:
        """The view of two arrays, read where they are: nothing is copied.

        k: [blocks, Hkv, b, Dk] in the layout "HND", [blocks, b, Hkv, Dk] in "NHD"; v: the same with
        Dv. Numpy arrays, or what gives its memory by DLPack or the buffer protocol (torch's
        bfloat16 too); no stride negative, the last axis contiguous. Contiguous K and V [B,Hkv,T,D]
        are B blocks of T positions.
        dtype: None where the arrays are float16, bfloat16, float32, int8 or float8_e4m3fn and say
        so; the name of what they hold where they are integers of that size, ``dtype="bfloat16"``
        for one, ``dtype="float8_e4m3fn"`` for uint8. Other types are not converted, for a view
        shows what its memory will hold later, too.
        k_scale, v_scale: of int8 and float8_e4m3fn, where a value is scale * element, and of no
        other. A number, or float32 that broadcasts to the first three axes of k, as they stand
        there: [blocks, Hkv, b] in "HND", [blocks, b, Hkv] in "NHD". They are read where they are;
        numbers, other types and strides that are negative are copied once.
        lib: a loaded library; None is the default one, loaded when the view is first used.

        Raises: TypeError for another type, or two, and for scales that are missing or that the type
        has not; ValueError for another layout, shapes that disagree, an empty axis other than
        blocks, more blocks than an int32 can name, or strides that no view has.
        """
        fn = "KVView.from_arrays"
        if layout not in _LAYOUTS:
            raise ValueError(f"{fn}: layout must be 'HND' or 'NHD', not {layout!r}")
        named = None if dtype is None else format_named(fn, dtype)
        sides, held = {}, []
        for name, side in (("k", k), ("v", v)):
            a, element = as_array(fn, name, side)
            sides[name] = with_axes(fn, name, a, 4)
            held.append(_element(fn, name, element, named))
        form = held[0]
        if form is not held[1]:
            raise TypeError(f"{fn}: k is {form.name} and v {held[1].name}")
        shapes = f"k has shape {sides['k'].shape} and v {sides['v'].shape}"
        axes = _LAYOUTS[layout]
        k, v = (a.transpose(axes) for a in sides.values())
        if k.shape[:3] != v.shape[:3]:
            raise ValueError(f"{fn}: {shapes}; only the last axis may differ")
        if k.shape[0] > INT32_MAX or 0 in k.shape[1:] or 0 in v.shape[1:]:
            raise ValueError(
                f"{fn}: {shapes}; blocks may be 0 .. {INT32_MAX}, and no other axis empty"
            )
        steps = [*_steps(fn, "k", k), *_steps(fn, "v", v)]
        struct = KvView(
            KV_VIEW_BYTES, k.ctypes.data, v.ctypes.data, form.tl_dtype, 0, *k.shape, v.shape[3],
            *steps,
        )  # fmt: skip
        scales_writable = True
        for name, given in (("k_scale", k_scale), ("v_scale", v_scale)):
            _refuse_scale(fn, name, given, form)
            if given is not None:
                own, in_place = _scale(fn, name, given, sides["k"].shape[:3])
                sides[name] = own
                _point_at(struct, name, own.transpose(axes[:3]))
                scales_writable &= in_place or _is_one_for_all(own)  # which is read, and stays
        writable = k.flags.writeable and v.flags.writeable
        return cls(
            struct, form.name, sides, lib=lib, writable=writable, scales_writable=scales_writable
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
        [T,Hkv,Dk] and v [T,Hkv,Dv]: the view's type itself, or its codes, which are copied as they
        are, and no scale is written; or float32 or any other real numbers, which are rounded to the
        view's type. In int8 and float8_e4m3fn each row gets codes and a scale of its own, as in a
        PagedKVCache; but where a view of float8_e4m3fn has one scale for all, that is read and
        stays, and what it cannot reach saturates. Copied on the way is what has no contiguous last
        axis, and what is neither the view's type nor float32 (for eight bits float16 and bfloat16
        either).

        Raises: TypeError for what are no real numbers; ValueError for a wrong shape, a slot that is
        not there or is given twice, and for memory that is not written this way: read-only arrays,
        scales among them, and a PagedKVCache, which has ``append``; TlError (``TL_ENOMEM``, and
        ``TL_EUNSUPPORTED`` where rows share scales in another way). Nothing is written then.
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
        form = FORMATS[self.dtype]
        given = self._given(form, [element for _, element, _ in sides])
        if form.has_scales and given is not form and not self._scales_writable:
            raise ValueError(
                f"{fn}: {self!r} has scales that are read-only, or a copy of what from_arrays was "
                "given: float32 that can be written is read and written in place"
            )
        rounded = as_f32_for_f16 if self.dtype == "float16" else as_f32
        a, b = (
            whole_rows(a if given.name != "float32" else rounded(fn, name, a, element))
            for name, (a, element, _) in zip("kv", sides, strict=True)
        )
        steps = [stride // side.itemsize for side in (a, b) for stride in side.strides[:2]]
        try:
            self._library().tl_kv_write_slots(
                self._struct,
                i64_ptr(slots),
                len(slots),
                a.ctypes.data,
                b.ctypes.data,
                given.tl_dtype,
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

    def _given(self, form: KvFormat, elements: list[str]) -> KvFormat:
        """What the library is given of k and v: the view's type where both are that or codes of it,
        what else it takes where both are that, or float32."""
        if all(element == form.name or _is_code(element, form) for element in elements):
            return form
        taken = ("float16", "bfloat16") if form.has_scales else ()
        same = elements[0] == elements[1] and elements[0] in taken
        return FORMATS[elements[0] if same else "float32"]

    def _codes(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """K and V where they lie, as unsigned integers [blocks, Hkv, b, D]; valid as long as that
        memory, so only inside ``with view.reading()``."""
        return codes_of(self._struct, FORMATS[self.dtype])

    def _scales(self) -> tuple[NDArray[np.float32], ...]:
        """Their scales likewise, float32 [blocks, Hkv, b]; none of a type without."""
        return scales_of(self._struct) if FORMATS[self.dtype].has_scales else ()

    def _library(self) -> Lib:
        self._lib = self._lib or load()
        return self._lib

    def __repr__(self) -> str:
        names = ("num_blocks", "block_size", "n_kv_heads", "head_dims", "dtype")
        return f"KVView({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"


def codes_of(struct: KvView, form: KvFormat) -> tuple[NDArray[Any], NDArray[Any]]:
    """K and V of a view where they lie, as unsigned integers [blocks, Hkv, b, D]."""
    s, axes = struct, (struct.n_blocks, struct.n_kv_heads, struct.block_tokens)
    k = s.k_block_stride, s.k_head_stride, s.k_token_stride, 1
    v = s.v_block_stride, s.v_head_stride, s.v_token_stride, 1
    return (
        _strided(s.k, form.code, (*axes, s.head_dim_k), k),
        _strided(s.v, form.code, (*axes, s.head_dim_v), v),
    )


def scales_of(struct: KvView) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """The scales of K and of V likewise, float32 [blocks, Hkv, b], of a view that has them."""
    s, axes = struct, (struct.n_blocks, struct.n_kv_heads, struct.block_tokens)
    k = s.k_scale_block_stride, s.k_scale_head_stride, s.k_scale_token_stride
    v = s.v_scale_block_stride, s.v_scale_head_stride, s.v_scale_token_stride
    return (
        _strided(address_of_floats(s.k_scale), F32, axes, k),
        _strided(address_of_floats(s.v_scale), F32, axes, v),
    )


def _strided(
    address: int, dtype: np.dtype[Any], axes: tuple[int, ...], steps: tuple[int, ...]
) -> NDArray[Any]:
    """Memory as an array; an axis of one may have any step."""
    if 0 in axes:
        return np.empty(axes, dtype)
    n = 1 + sum((count - 1) * step for count, step in zip(axes, steps, strict=True))
    flat = memory_at(address, n * dtype.itemsize).view(dtype)
    return np.lib.stride_tricks.as_strided(flat, axes, [step * dtype.itemsize for step in steps])


def _element(fn: str, name: str, own: str, named: KvFormat | None) -> KvFormat:
    """What an array holds, by its own word or by the caller's."""
    if own in FORMATS and named in (None, FORMATS[own]):
        return FORMATS[own]
    if named is not None and _is_code(own, named):
        return named
    told = None if named is None else named.name
    raise TypeError(
        f"{fn}: {name} must be one of {', '.join(FORMATS)}, or integers of the size that dtype "
        f"names; it is {own}, and dtype {told!r}"
    )


def _is_code(element: str, form: KvFormat) -> bool:
    """Whether integers of that type are taken for what ``form`` holds."""
    bits = 8 * form.element.itemsize
    return element in (f"uint{bits}", f"int{bits}") and form.name not in ("float32", "int8")


def _refuse_scale(fn: str, name: str, scale: Any, form: KvFormat) -> None:
    """Raises TypeError for a scale that is missing, and for one that does not belong there."""
    if form.has_scales and scale is None:
        raise TypeError(
            f"{fn}: {name} must be given, a number or an array: of {form.name} a value is scale * "
            "element"
        )
    if not form.has_scales and scale is not None:
        raise TypeError(f"{fn}: {name} is given, and {form.name} has no scales")


def _scale(
    fn: str, name: str, given: Tensor | float, wanted: tuple[int, ...]
) -> tuple[NDArray[np.float32], bool]:
    """Scales as float32 in the shape ``wanted``, by strides over as much memory as there is; and
    whether they are the caller's, to be written."""
    a, element = as_array(fn, name, given)
    scales = as_f32(fn, name, a, element)
    if any(stride < 0 or stride % F32.itemsize for stride in scales.strides) or (
        not scales.flags.aligned
    ):
        scales = np.array(scales, order="C")
    try:
        spread = np.broadcast_to(scales, wanted)
    except ValueError:
        raise ValueError(
            f"{fn}: {name} has shape {a.shape}, which does not broadcast to {wanted}, the first "
            "axes of k"
        ) from None
    return spread, np.may_share_memory(scales, a) and a.flags.writeable


def _is_one_for_all(scales: NDArray[np.float32]) -> bool:
    """Whether there are several, in one place."""
    steps = [stride for n, stride in zip(scales.shape, scales.strides, strict=True) if n > 1]
    return bool(steps) and not any(steps)


def _point_at(struct: KvView, name: str, scales: NDArray[np.float32]) -> None:
    """Tells a view of its ``k_scale`` or ``v_scale`` [blocks, b, Hkv]."""
    block, token, head = (
        stride // F32.itemsize if n > 1 else 0
        for n, stride in zip(scales.shape, scales.strides, strict=True)
    )
    setattr(struct, name, float_pointer(scales.ctypes.data))
    setattr(struct, f"{name}_block_stride", block)
    setattr(struct, f"{name}_head_stride", head)
    setattr(struct, f"{name}_token_stride", token)


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
