# SPDX-License-Identifier: MIT
"""What Linux says of the machine. A fact it does not tell is None; nothing here raises."""

from __future__ import annotations

import math
import os
import platform
import re
from pathlib import Path
from typing import Final

from tinyllm.cli import cgroup

_MEMORY: Final = Path("/proc/meminfo")
_HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def cpu_model() -> str:
    """What the CPU calls itself, else its architecture."""
    name = re.search(r"^model name\s*:\s*(.+)$", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    return name[1].strip() if name else platform.machine()


def cpus() -> tuple[int, int]:
    """CPUs this process may use, those it may run on but no more than its quota pays for, and CPUs
    of the machine."""
    usable, quota = len(os.sched_getaffinity(0)), cgroup.cpu_quota()
    return min(usable, math.ceil(quota)) if quota else usable, os.cpu_count() or 1


def memory() -> tuple[int | None, int | None]:
    """Bytes of memory there are, and bytes still to be had, both within the container's limit."""
    kib = dict(re.findall(r"^(\w+):\s*(\d+) kB$", _text(_MEMORY), re.MULTILINE))
    total, free = (
        int(kib[key]) << 10 if key in kib else None for key in ("MemTotal", "MemAvailable")
    )
    return _least(total, cgroup.memory_limit()), _least(free, cgroup.memory_room())


def last_level_cache() -> int | None:
    """Bytes of the largest cache that the first usable CPU reads data through."""
    cpu = min(os.sched_getaffinity(0))
    sizes = []
    for index in Path(f"/sys/devices/system/cpu/cpu{cpu}/cache").glob("index*"):
        size = re.fullmatch(r"(\d+)([KMG]?)", _text(index / "size").strip())
        if size and _text(index / "type").strip() != "Instruction":
            sizes.append(int(size[1]) << {"": 0, "K": 10, "M": 20, "G": 30}[size[2]])
    return max(sizes, default=None)


def huge_pages() -> str | None:
    """The mode of transparent huge pages: ``always``, ``madvise`` or ``never``."""
    chosen = re.search(r"\[(\w+)\]", _text(_HUGE_PAGES))
    return chosen[1] if chosen else None


def _least(a: int | None, b: int | None) -> int | None:
    return min((x for x in (a, b) if x is not None), default=None)


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
