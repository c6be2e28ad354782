# SPDX-License-Identifier: MIT
"""Every exception this package defines.

Bad arguments raise Python's own TypeError, ValueError, KeyError and OverflowError.
"""

from __future__ import annotations

from pathlib import Path

__all__ = [
    "AbiMismatch",
    "ClosedError",
    "ConcurrentUseError",
    "OutOfBlocks",
    "OutOfMemory",
    "StoreError",
    "TlError",
]


class TlError(RuntimeError):
    """A C function returned a status other than ``TL_OK``.

    fn: the function; status: the number; name: its name, ``"TL_EINVAL"``; message: the error slot's
    line.
    """

    def __init__(self, fn: str, status: int, name: str, message: str) -> None:
        super().__init__(fn, status, name, message)  # all four, so that it can be pickled
        self.fn, self.status, self.name, self.message = fn, status, name, message

    @property
    def reason(self) -> str:
        """The message without the function at its head, for callers that name themselves."""
        return self.message.removeprefix(f"{self.fn}: ")

    def __str__(self) -> str:
        return f"{self.name} ({self.status}): {self.message or self.fn}"


class AbiMismatch(RuntimeError):
    """The library at ``path`` speaks ABI version ``found``; this package speaks ``expected``.

    what_next: what the message ends with, the command that mends it.
    """

    def __init__(self, path: Path, found: int, expected: int, what_next: str = "") -> None:
        super().__init__(path, found, expected, what_next)
        self.path, self.found, self.expected, self.what_next = path, found, expected, what_next

    def __str__(self) -> str:
        what_next = self.what_next or "`make` in a checkout rebuilds it"
        return (
            f"{self.path} has ABI version {self.found}, this package needs {self.expected}. "
            f"{what_next}"
        )


class OutOfBlocks(RuntimeError):
    """The pool cannot give the blocks a call needs; nothing was changed.

    message: what was wanted, in words. needed: how many blocks, copies of shared ones included;
    free, cached: how many there are of either. So ``needed - free - cached`` are missing.
    """

    def __init__(self, message: str = "", needed: int = 0, free: int = 0, cached: int = 0) -> None:
        super().__init__(message)
        self.needed, self.free, self.cached = needed, free, cached


class OutOfMemory(MemoryError):
    """A cache would take more memory than the machine or its control group has to give; nothing was
    reserved."""


class StoreError(RuntimeError):
    """A store of sequences did not keep what it was given, or gave something else. Nothing is lost
    that was there before the call: what was to leave the cache is still in it."""


class ClosedError(RuntimeError):
    """The object was closed before the call."""


class ConcurrentUseError(RuntimeError):
    """A call would write while another call reads or writes, or read while one writes. Nothing was
    changed; who wants to wait has a lock of his own around the calls."""
