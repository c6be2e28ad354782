# SPDX-License-Identifier: MIT
"""Numbers as arguments: checks whose messages name the function, the argument and the value."""

from __future__ import annotations

from operator import index
from typing import Any

import numpy as np

F16, F32, F64 = np.dtype(np.float16), np.dtype(np.float32), np.dtype(np.float64)
I32, I64 = np.dtype(np.int32), np.dtype(np.int64)
INT32_MAX, UINT32_MAX, INT64_MAX = 2**31 - 1, 2**32 - 1, 2**63 - 1


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
