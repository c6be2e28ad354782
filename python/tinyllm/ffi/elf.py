# SPDX-License-Identifier: MIT
"""What the header of a library file tells before it is loaded, for errors that name the cause.

Offsets are those of 64-bit ELF; of a 32-bit file only the machine is looked at, which is another
one."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

__all__ = ["reason_not_to_load"]

_MACHINES: Final = {
    3: "x86 (32 bits)",
    21: "PowerPC (64 bits)",
    22: "IBM Z",
    40: "Arm (32 bits)",
    62: "x86-64",
    183: "aarch64 (Arm, 64 bits)",
    243: "RISC-V",
    258: "LoongArch",
}


def reason_not_to_load(file: Path) -> str | None:
    """Why this process cannot load ``file``, as far as its first page tells; None where it tells
    nothing.

    To be asked before the system's loader, which dies of a library that was cut short (SIGBUS).
    """
    head = _head(file)
    if head is None or not sys.platform.startswith("linux"):
        return None
    if not head:
        return "it is empty"
    if head[:4] != b"\x7fELF":
        return "it is no shared library"
    machine, ours = _machine(head), _machine(_head(Path("/proc/self/exe")) or head)
    if machine != ours:
        return f"it is for another machine, {machine}; this Python runs on {ours}"
    size, needed = file.stat().st_size, _loaded_size(head)
    if size < needed:
        return f"it is cut short: {size} bytes are there of at least {needed}"
    return None


def _head(file: Path) -> bytes | None:
    try:
        with file.open("rb") as stream:
            return stream.read(4096)
    except OSError:
        return None


def _number(head: bytes, at: int, size: int) -> int:
    return int.from_bytes(head[at : at + size], "big" if head[5:6] == b"\x02" else "little")


def _machine(head: bytes) -> str:
    number = _number(head, 18, 2)
    return _MACHINES.get(number, f"number {number} of the ELF standard")


def _loaded_size(head: bytes) -> int:
    """Bytes of a 64-bit file up to the end of its table of segments and of each segment that is
    loaded."""
    table, entry_size, n = _number(head, 32, 8), _number(head, 54, 2), _number(head, 56, 2)
    entries = [table + i * entry_size for i in range(n)]
    loaded = [at for at in entries if _number(head, at, 4) == 1]
    ends = [
        _number(head, at + 8, 8) + _number(head, at + 32, 8) for at in loaded
    ]  # offset, size in the file
    return max(table + n * entry_size, *ends, 64)
