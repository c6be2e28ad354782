# SPDX-License-Identifier: MIT
"""Numbers in words, as pictures, reports and commands show them."""

from __future__ import annotations


def plural(n: int, noun: str) -> str:
    """``1 block``, ``1,024 blocks``."""
    return f"{n:,} {noun}" if n == 1 else f"{n:,} {noun}s"


def percent(part: float) -> str:
    """``12.5 %``, to a tenth; a little more than nothing is ``<0.1 %``."""
    if 0 < part < 0.0005:
        return "<0.1 %"
    return f"{100 * part:.1f}".removesuffix(".0") + " %"


def human_bytes(n: float) -> str:
    """``n`` bytes with at most three digits: 640 B, 1.5 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1000 or (unit == "B" and n < 1024):
            return f"{n:.0f} B" if unit == "B" else f"{n:.3g} {unit}"
        n /= 1024
    return f"{n:.3g} TiB"


def human_time(seconds: float) -> str:
    """``seconds`` with three digits, in letters of ASCII: 1.23 us, 100 ms; nanoseconds are whole
    ones."""
    if seconds < 999.5e-9:
        return f"{seconds * 1e9:.0f} ns"
    for unit, size in (("us", 1e-6), ("ms", 1e-3), ("s", 1)):
        if seconds < 999.5 * size:
            return f"{seconds / size:#.3g}".rstrip(".") + f" {unit}"
    return f"{seconds:.0f} s"
