# SPDX-License-Identifier: MIT
"""Argument checks whose messages name the function, the argument and the value."""

from __future__ import annotations

from operator import index
from typing import Any, TypeAlias

import numpy as np

F16, F32, F64 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)
I32, I64 = np.dtype(np.int32), np.dtype(np.int64)
INT32_MAX, UINT32_MAX, INT64_MAX = 2**31 - 1, 2**32 - 1, 2**63 - 1

Tensor: TypeAlias = Any  # a numpy array, or what gives its memory by DLPack or the buffer protocol


def integer(
    fn: str, name: str, value: Any, low: int, high: int, not_an_integer: type[Exception] = TypeError
) -> int:
    """``value`` as an int of [low, high]; numpy integers are integers, bools are not.

    Raises: ``not_an_integer``, or ValueError out of range.
    """
    if type(value) is not int:
        try:
            if isinstance(value, (bool, np.bool_)):
                raise TypeError
            value = index(value)
        except TypeError:
            raise not_an_integer(f"{fn}: {name} must be an integer, not {value!r}") from None
    if not low <= value <= high:
        raise ValueError(f"{fn}: {name} = {value} is outside {low} .. {high}")
    return int(value)


def array(
    fn: str, name: str, value: Any, *dtypes: np.dtype[Any], ndim: int
) -> np.ndarray[Any, Any]:
    """``value``, which must be a plain array of one of ``dtypes`` in native byte order, with
    ``ndim`` axes.

    Raises: TypeError for anything else than such an array, ValueError for another number of axes.
    """
    if not isinstance(value, np.ndarray) or isinstance(value, np.ma.MaskedArray):
        raise TypeError(f"{fn}: {name} must be a numpy array, not {type(value).__name__}")
    if value.dtype not in dtypes:
        wanted = " or ".join(d.name for d in dtypes)
        raise TypeError(
            f"{fn}: {name} must be {wanted} in native byte order, not {value.dtype.str} ({value.dtype.name})"
        )
    if value.ndim != ndim:
        raise ValueError(f"{fn}: {name} must have {ndim} axes, its shape is {value.shape}")
    return value


def as_array(fn: str, name: str, value: Tensor) -> np.ndarray[Any, Any]:
    """``value`` as a plain array over the same memory.

    Raises: TypeError where it gives none.
    """
    if isinstance(value, np.ndarray):
        if isinstance(value, np.ma.MaskedArray):
            raise TypeError(f"{fn}: {name} must be a plain array, not {type(value).__name__}")
        return value
    try:
        if hasattr(value, "__dlpack__"):
            return np.from_dlpack(value)
        return np.asarray(memoryview(value))
    except (TypeError, ValueError, RuntimeError, BufferError) as error:
        raise TypeError(
            f"{fn}: {name} must be an array; numpy cannot read the memory of {type(value).__name__} ({error})"
        ) from None


def integers(
    fn: str, name: str, value: Any, dtype: np.dtype[Any], low: int, high: int
) -> np.ndarray[Any, Any]:
    """``value``, integers [n] of any type, as a contiguous array of ``dtype``, copied only where it
    is none.

    Raises: TypeError where they are no integers, ValueError for another number of axes or one that
    is not in [low, high].
    """
    a = np.asarray(value) if isinstance(value, (list, tuple)) else as_array(fn, name, value)
    if a.ndim != 1:
        raise ValueError(f"{fn}: {name} must have 1 axis, its shape is {a.shape}")
    if a.dtype.kind not in "iu" and a.size:
        raise TypeError(f"{fn}: {name} must be integers, not {a.dtype.name}")
    beyond = np.flatnonzero((a < low) | (a > high))
    if beyond.size:
        i = int(beyond[0])
        raise ValueError(f"{fn}: {name}[{i}] = {a[i]} is outside {low} .. {high}")
    return packed(a) if a.dtype == dtype else a.astype(dtype)


def int32s(fn: str, name: str, value: Any) -> np.ndarray[Any, Any]:
    """``integers`` that an int32 holds."""
    if type(value) is np.ndarray and value.dtype is I32 and value.ndim == 1:
        return packed(value)
    return integers(fn, name, value, I32, -INT32_MAX - 1, INT32_MAX)


def shape(
    fn: str, name: str, value: np.ndarray[Any, Any], wanted: tuple[int, ...], axes: str
) -> None:
    """Raises ValueError where the shape of ``value`` is another than ``wanted``, spelled ``axes``
    in the message."""
    if value.shape != wanted:
        raise ValueError(f"{fn}: {name} has shape {value.shape}, expected {axes} = {wanted}")


def packed(value: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """``value`` itself where it is C-contiguous and aligned, else a copy that is."""
    flags = value.flags
    if flags.c_contiguous and flags.aligned:
        return value
    return np.array(value, order="C", subok=False)
