# SPDX-License-Identifier: MIT
"""How much memory a cache may take: sizes as people write them, and what the machine can give."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any, Final

from tinyllm import _machine
from tinyllm._check import INT32_MAX, INT64_MAX, integer
from tinyllm._words import human_bytes
from tinyllm.errors import OutOfMemory

UNITS: Final = {
    "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
    "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40,
}  # fmt: skip
_SIZE: Final = re.compile(rf"([0-9]{{1,18}}(?:\.[0-9]{{1,18}})?) ?({'|'.join(UNITS)})")


def byte_count(fn: str, name: str, size: Any, low: int = 1) -> int:
    """``size``, an integer or a text like ``"1.5 GiB"``, as whole bytes, ``low`` or more.

    Raises: TypeError for what is neither; ValueError for another text, or a size below ``low`` or
    beyond 2**63.
    """
    if isinstance(size, str):
        read = _SIZE.fullmatch(size.strip())
        if not read:
            raise ValueError(
                f"{fn}: {name} must be a number and one of {', '.join(UNITS)}, like '4GiB', not "
                f"{size!r}"
            )
        size = int(Fraction(read[1]) * UNITS[read[2]])
    return integer(fn, name, size, low, INT64_MAX)


def blocks_within(fn: str, memory: Any, block_bytes: int, *, force: bool) -> int:
    """How many blocks fit in ``memory``, a size as ``byte_count`` reads it.

    Raises: ValueError where not one does; OutOfMemory for more than the machine and its control
    group can give now, unless ``force``.
    """
    budget = byte_count(fn, "memory", memory)
    n = min(budget // block_bytes, INT32_MAX)
    if n == 0:
        raise ValueError(
            f"{fn}: memory = {memory!r} is less than the {block_bytes:,} bytes of one block"
        )
    _, room = _machine.memory()
    if room is not None and n * block_bytes > room and not force:
        raise OutOfMemory(
            f"{fn}: memory = {memory!r} would take {human_bytes(n * block_bytes)}, and this "
            f"machine or container has {human_bytes(room)} to give; force=True reserves it anyway"
        )
    return n
