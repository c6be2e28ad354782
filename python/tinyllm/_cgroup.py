# SPDX-License-Identifier: MIT
"""What the control groups of Linux leave this process: a container's memory and its share of the
CPUs. A group is a directory, and those above it limit it too. Version 2 of them lies below
``/sys/fs/cgroup``, version 1 below one directory for each controller, and a machine may have both.

A container may be told the name of a group that it does not see, and have its own at the top: what
cannot be read limits nothing, and nothing here raises.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

_ROOT: Path = Path("/")  # another one in tests
_UNLIMITED: Final = 1 << 62  # version 1 says so in numbers near 2**63


def memory_limit() -> int | None:
    """Bytes that the processes of this container may have together; None where nothing says."""
    return min((limit for limit, _ in _memory()), default=None)


def memory_room() -> int | None:
    """Bytes still to be had below the limit that is nearest, the file cache counted as free."""
    return min((max(limit - used, 0) for limit, used in _memory()), default=None)


def cpu_quota() -> float | None:
    """CPUs whose time the quota pays for, 1.5 for instance; None where there is none."""
    quotas = []
    for version, group in _groups("cpu"):
        if version == 2:
            words = _text(group / "cpu.max").split()
        else:
            words = _text(group / "cpu.cfs_quota_us").split()
            words += _text(group / "cpu.cfs_period_us").split()
        if len(words) == 2 and all(word.isdecimal() and int(word) > 0 for word in words):
            quotas.append(int(words[0]) / int(words[1]))
    return min(quotas, default=None)


def _memory() -> Iterator[tuple[int, int]]:
    """Limit and use of every group that has a limit."""
    for version, group in _groups("memory"):
        names = ("memory.max", "memory.current", "inactive_file")
        if version == 1:
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        limit, used = _text(group / names[0]).strip(), _text(group / names[1]).strip()
        if limit.isdecimal() and used.isdecimal() and int(limit) < _UNLIMITED:
            cached = re.search(rf"^{names[2]} (\d+)$", _text(group / "memory.stat"), re.MULTILINE)
            yield int(limit), max(int(used) - (int(cached[1]) if cached else 0), 0)


def _groups(controller: str) -> Iterator[tuple[int, Path]]:
    """Version and directory of this process's groups and of all above them. A line reads
    ``number:controllers:group``; that of version 2 has number 0 and no controllers."""
    top = _ROOT / "sys/fs/cgroup"
    for line in _text(_ROOT / "proc/self/cgroup").splitlines():
        number, _, rest = line.partition(":")
        controllers, _, name = rest.partition(":")
        if number == "0" and not controllers:
            version, mount = 2, top
        elif controller in controllers.split(","):
            version, mount = 1, top / controller
        else:
            continue
        group = mount / name.lstrip("/")
        while group != mount:
            yield version, group
            group = group.parent
        yield version, mount


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""
