# SPDX-License-Identifier: MIT
"""The memory of this machine, as Linux tells it. What it does not tell is None; nothing raises."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from tinyllm import _cgroup

_MEMORY: Final = Path("/proc/meminfo")


def memory() -> tuple[int | None, int | None]:
    """Bytes of memory there are, and bytes still to be had, both within the container's limit."""
    kib = dict(re.findall(r"^(\w+):\s*(\d+) kB$", text_of(_MEMORY), re.MULTILINE))
    total, free = (
        int(kib[key]) << 10 if key in kib else None for key in ("MemTotal", "MemAvailable")
    )
    return _least(total, _cgroup.memory_limit()), _least(free, _cgroup.memory_room())


def text_of(path: Path) -> str:
    """What a file of the system says; nothing where it cannot be read."""
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _least(a: int | None, b: int | None) -> int | None:
    return min((x for x in (a, b) if x is not None), default=None)
