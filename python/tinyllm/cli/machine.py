# SPDX-License-Identifier: MIT
"""What Linux says of the machine. A fact it does not tell is None; nothing here raises."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path
from typing import Final

_HUGE_PAGES: Final = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_CGROUP: Final = Path("/sys/fs/cgroup")


def cpu_model() -> str:
    """What the CPU calls itself, else its architecture."""
    name = re.search(r"^model name\s*:\s*(.+)$", _text(Path("/proc/cpuinfo")), re.MULTILINE)
    return name[1].strip() if name else platform.machine()


def cpus() -> tuple[int, int]:
    """CPUs this process may run on, and CPUs of the machine."""
    return len(os.sched_getaffinity(0)), os.cpu_count() or 1


def memory() -> tuple[int | None, int | None]:
    """Bytes of memory there are, and bytes still to be had, within the limit of the container if any."""
    kib = dict(re.findall(r"^(\w+):\s*(\d+) kB$", _text(Path("/proc/meminfo")), re.MULTILINE))
    total, free = (
        int(kib[key]) << 10 if key in kib else None for key in ("MemTotal", "MemAvailable")
    )
    limit, used = (_text(_CGROUP / name).strip() for name in ("memory.max", "memory.current"))
    if limit.isdigit() and used.isdigit():
        total = min(total or int(limit), int(limit))
        free = min(int(limit) if free is None else free, max(int(limit) - int(used), 0))
    return total, free


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


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
