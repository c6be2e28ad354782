# SPDX-License-Identifier: MIT
"""Handle: a C object with one owner in Python, destroyed once and never while a call is inside it."""

from __future__ import annotations

from collections.abc import Callable

from tinyllm.errors import ClosedError


class Handle:
    """The address of a C object. ``with handle as address:`` surrounds every call that uses it.

    The owner closes it; a finalizer of the owner calls ``release``, which leaves the object alone
    where a call is still inside (a daemon thread at interpreter exit): the process takes the memory
    back.
    """

    __slots__ = ("_address", "_destroy", "_inside", "_what")

    def __init__(self, what: str, address: int, destroy: Callable[[int], object]) -> None:
        self._what = what
        self._address: int | None = address
        self._destroy = destroy
        self._inside: list[
            None
        ] = []  # one element per call inside: append, pop and len need no lock

    def __enter__(self) -> int:
        self._inside.append(None)
        address = self._address
        if address is None:
            self._inside.pop()
            raise ClosedError(f"this {self._what} is closed")
        return address

    def __exit__(self, *exc: object) -> None:
        self._inside.pop()

    def close(self) -> None:
        """Destroys the object; nothing happens the second time. RuntimeError while a call is inside."""
        if self._inside:
            raise RuntimeError(f"this {self._what} is in use by a call and cannot be closed")
        address, self._address = self._address, None
        if address is not None:
            self._destroy(address)

    def release(self) -> None:
        """``close`` for finalizers: does not raise."""
        if not self._inside:
            self.close()
