# SPDX-License-Identifier: MIT
"""What callers give as arrays, as numpy arrays: one rule for every function.

Memory is read where it lies: numpy's, or a tensor's by DLPack or the buffer protocol, bfloat16 and
float8_e4m3fn by what their own dtype says. What is not of the type a kernel reads (lists, integers,
float64, another byte order) is converted once, and numbers that are no real numbers are refused.
"""

from __future__ import annotations

import sys
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from tinyllm._check import F16, F32, I32, INT32_MAX

Tensor: TypeAlias = Any  # a numpy array, or anything that can be read as one

BF16: Final = "bfloat16"
E4M3: Final = "float8_e4m3fn"
# What numpy has no type of is held here as integers.
HELD_AS: Final[dict[str, np.dtype[Any]]] = {BF16: np.dtype(np.uint16), E4M3: np.dtype(np.uint8)}
_LAST_29: Final = (1 << 29) - 1  # bits of a float64 that a float32 has no room for
_AT_ONCE: Final = 1 << 14


def as_array(fn: str, name: str, value: Tensor) -> tuple[NDArray[Any], str]:
    """``value`` as a plain array, over the same memory where it has any, and what its elements are:
    the name of their dtype, or "bfloat16" or "float8_e4m3fn".

    Raises: TypeError where it is no array.
    """
    if type(value) is np.ndarray:  # those that come most, before a dtype is asked for its name
        if value.dtype is F32:
            return value, "float32"
        if value.dtype is F16:
            return value, "float16"
    if isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{fn}: {name} must be a plain array, not {type(value).__name__}")
    if isinstance(value, np.ndarray):
        return _described(value)
    try:
        if (own := _dtype_name(value)) in HELD_AS:
            return _codes_of(value, HELD_AS[own]), own
        a = _converted(value)
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise TypeError(
            f"{fn}: {name} must be an array, and numpy cannot read {_said(value)} as one ({error})"
        ) from None
    if a.dtype.kind == "O":
        raise TypeError(f"{fn}: {name} must be an array of numbers, not {_said(value)}")
    return _described(a)


def floats(fn: str, name: str, value: Tensor, ndim: int) -> NDArray[Any]:
    """``value`` as float32 with ``ndim`` axes, itself where it is that.

    Raises: TypeError where it is no array of real numbers, ValueError for another number of axes.
    """
    a, element = as_array(fn, name, value)
    return as_f32(fn, name, with_axes(fn, name, a, ndim), element)


def as_f32(fn: str, name: str, a: NDArray[Any], element: str) -> NDArray[Any]:
    """What ``as_array`` gave as float32, rounded once to the nearest. Raises: TypeError."""
    if a.dtype is F32 or element == "float32":
        return a
    if element == BF16:
        return (a.astype(np.uint32) << 16).view(np.float32)
    if a.dtype.kind not in "fiu" or element == E4M3:
        raise TypeError(f"{fn}: {name} must be real numbers, not {element}")
    with np.errstate(all="ignore"):  # overflow is infinity, whatever the caller's state says
        return a.astype(np.float32)


def as_f32_for_f16(fn: str, name: str, a: NDArray[Any], element: str) -> NDArray[Any]:
    """``as_f32`` for what will be rounded to f16: of a float64 the bits behind the 24 of a float32
    leave a one at their end, so that rounding again gives what rounding once would."""
    if a.dtype.kind != "f" or a.dtype.itemsize <= 4:
        return as_f32(fn, name, a, element)
    wide = np.ascontiguousarray(a, np.float64)
    out = np.empty(a.shape, np.float32)
    bits, rounded = wide.reshape(-1).view(np.int64), out.reshape(-1)
    sticky = np.empty(_AT_ONCE, np.int64)  # one that the cache of a core holds, used again
    with np.errstate(all="ignore"):
        for begin in range(0, len(bits), _AT_ONCE):
            piece = bits[begin : begin + _AT_ONCE]
            odd = np.bitwise_and(piece, _LAST_29, out=sticky[: len(piece)])
            odd += _LAST_29  # bit 29 is 1 where any of the last 29 was
            odd &= _LAST_29 + 1
            odd |= piece
            odd &= ~_LAST_29
            rounded[begin : begin + _AT_ONCE] = odd.view(np.float64)
    return out


def integers(
    fn: str, name: str, value: Tensor, dtype: np.dtype[Any], low: int, high: int
) -> NDArray[Any]:
    """``value``, integers [n] of any type, as a contiguous array of ``dtype``, itself where it is
    that.

    Raises: TypeError where they are no integers, ValueError for another number of axes or one that
    is not in [low, high].
    """
    a, element = as_array(fn, name, value)
    if a.ndim == 0 and a.dtype.kind in "iuf":
        raise TypeError(f"{fn}: {name} must be an array or a list of integers, not one: {value!r}")
    with_axes(fn, name, a, 1)
    if not are_integers(a, element) and a.size:
        raise TypeError(f"{fn}: {name} must be integers, not {element}")
    beyond = np.flatnonzero((a < low) | (a > high))
    if beyond.size:
        i = int(beyond[0])
        raise ValueError(f"{fn}: {name}[{i}] = {a[i]} is outside {low} .. {high}")
    return packed(a) if a.dtype == dtype else a.astype(dtype)


def are_integers(a: NDArray[Any], element: str) -> bool:
    """Whether what ``as_array`` gave are integers, and not floats held as such."""
    return a.dtype.kind in "iu" and element not in HELD_AS


def int32s(fn: str, name: str, value: Tensor) -> NDArray[Any]:
    """``integers`` that an int32 holds."""
    if type(value) is np.ndarray and value.dtype is I32 and value.ndim == 1:
        return packed(value)
    return integers(fn, name, value, I32, -INT32_MAX - 1, INT32_MAX)


def output(fn: str, out: Tensor, wanted: tuple[int, ...], axes: str) -> NDArray[np.float32]:
    """The memory of ``out``, to be written: float32 of the shape ``wanted``, spelled ``axes``.

    Raises: TypeError for anything else than float32; ValueError for another shape, and for memory
    that is read-only or not aligned.
    """
    if isinstance(out, (list, tuple, int, float)):
        raise TypeError(f"{fn}: out must be an array to be written, not {_said(out)}")
    a, element = as_array(fn, "out", out)
    if element != "float32":
        raise TypeError(f"{fn}: out must be float32 in native byte order, not {element}")
    shape(fn, "out", a, wanted, axes)
    if not a.flags.writeable:
        raise ValueError(f"{fn}: out is read-only{_why_read_only(out)}")
    if not a.flags.aligned:
        raise ValueError(f"{fn}: out is not aligned to {F32.itemsize} bytes")
    return a


def _why_read_only(out: Tensor) -> str:
    if isinstance(out, np.ndarray) or np.lib.NumpyVersion(np.__version__) >= "2.2.5":
        return ""
    return (
        f": numpy {np.__version__} writes to no tensor of another library; numpy 2.2.5 or newer "
        "does, or give an array over its memory (out.numpy())"
    )


def with_axes(fn: str, name: str, a: NDArray[Any], ndim: int) -> NDArray[Any]:
    """``a``. Raises: ValueError where it has another number of axes."""
    if a.ndim != ndim:
        axes = "1 axis" if ndim == 1 else f"{ndim} axes"
        raise ValueError(f"{fn}: {name} must have {axes}, its shape is {a.shape}")
    return a


def shape(fn: str, name: str, value: NDArray[Any], wanted: tuple[int, ...], axes: str) -> None:
    """Raises ValueError where the shape of ``value`` is another than ``wanted``, spelled ``axes``
    in the message."""
    if value.shape != wanted:
        raise ValueError(f"{fn}: {name} has shape {value.shape}, expected {axes} = {wanted}")


def packed(value: NDArray[Any]) -> NDArray[Any]:
    """``value`` itself where it is C-contiguous and aligned, else a copy that is."""
    flags = value.flags
    if flags.c_contiguous and flags.aligned:
        return value
    return np.array(value, order="C", subok=False)


def whole_rows(a: NDArray[Any]) -> NDArray[Any]:
    """``a`` itself where its rows can be read by strides of whole elements, else a copy."""
    flags = a.flags
    if flags.c_contiguous and flags.aligned:
        return a
    uneven = not flags.aligned or any(stride % a.itemsize for stride in a.strides)
    if not uneven and (a.shape[-1] <= 1 or a.strides[-1] == a.itemsize):
        return a
    return np.array(a, order="C", subok=False)


def _described(a: NDArray[Any]) -> tuple[NDArray[Any], str]:
    dtype = a.dtype
    if dtype.name in HELD_AS:  # of a library that gives numpy the type
        return a.view(HELD_AS[dtype.name]), str(dtype.name)
    return a, str(dtype.name if dtype.isnative else dtype.str)


def _dtype_name(value: Any) -> str:
    return str(getattr(value, "dtype", "")).rpartition(".")[2]


def _codes_of(tensor: Any, code: np.dtype[Any]) -> NDArray[Any]:
    """A tensor of a type that numpy does not have as ``code``: its own library shows it as
    integers, which numpy reads."""
    library = sys.modules[type(tensor).__module__.partition(".")[0]]
    integers = library.int16 if code.itemsize == 2 else library.uint8
    return np.from_dlpack(tensor.view(integers)).view(code)


def _converted(value: Any) -> NDArray[Any]:
    if hasattr(value, "__dlpack__") and not isinstance(value, np.generic):
        return np.from_dlpack(value)
    if isinstance(value, (list, tuple)) or hasattr(value, "__array__"):
        return np.asarray(value)
    if isinstance(value, (int, float)):
        return np.asarray(value)  # without axes, which the caller then speaks of
    return np.asarray(memoryview(value))


def _said(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"a {type(value).__name__}"
