# SPDX-License-Identifier: MIT
"""What Linux says of the machine. A fact it does not tell is None; nothing here raises."""

from __future__ import annotations

import math
import os
import platform
import re
from pathlib import Path
from typing import Final

from tinyllm import _cgroup
from tinyllm._machine import memory, text_of

__all__ = ["cpu_model", "cpus", "huge_pages", "last_level_cache", "memory"]

_HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def cpu_model() -> str:
    """What the CPU calls itself, else its architecture."""
    name = re.search(r"^model name\s*:\s*(.+)$", text_of(Path("/proc/cpuinfo")), re.MULTILINE)
    return name[1].strip() if name else platform.machine()


def cpus() -> tuple[int, int]:
    """CPUs this process may use, those it may run on but no more than its quota pays for, and CPUs
    of the machine."""
    usable, quota = len(os.sched_getaffinity(0)), _cgroup.cpu_quota()
    return min(usable, math.ceil(quota)) if quota else usable, os.cpu_count() or 1


def last_level_cache() -> int | None:
    """Bytes of the largest cache that the first usable CPU reads data through."""
    cpu = min(os.sched_getaffinity(0))
    sizes = []
    for index in Path(f"/sys/devices/system/cpu/cpu{cpu}/cache").glob("index*"):
        size = re.fullmatch(r"(\d+)([KMG]?)", text_of(index / "size").strip())
        if size and text_of(index / "type").strip() != "Instruction":
            sizes.append(int(size[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[size[2]])
    return max(sizes, default=None)


def huge_pages() -> str | None:
    """The mode of transparent huge pages: ``always``, ``madvise`` or ``never``."""
    chosen = re.search(r"\[(\w+)\]", text_of(_HUGE_PAGES))
    return chosen[1] if chosen else None
