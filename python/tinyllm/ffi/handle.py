# SPDX-License-Identifier: MIT
"""Handle: a C object with one owner in Python, destroyed once and never while a call is inside it;
and who may be inside at the same time.

Words. reader: a call during which nothing may change; any number at a time. writer: one at a time,
beside no reader. Both are refused rather than kept waiting, as sqlite3 does. look: short, from any
thread at any time; it waits for the writer, and the next writer for it.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from threading import RLock, get_ident
from typing import Any
from weakref import WeakSet

from tinyllm._not_copied import NotCopied
from tinyllm.errors import ClosedError, ConcurrentUseError
from tinyllm.ffi.libtinyllm import Function, address_cell, store_address

__all__ = ["Handle", "address_of", "reading"]


class Handle(NotCopied):
    """The address of a C object. Every call that uses it stands in a with block:

        with handle.read():                             # or: with handle.look():
            use(handle.address)
        with handle.write(), handle.turn:
            change(handle.address)

    An exception that a signal handler raises, KeyboardInterrupt for one, cannot leave anybody
    inside. What ``read`` and ``write`` give is a memoryview of a bytearray, and a bytearray that
    is viewed cannot be resized: that is how it shows. The view ends with its block by a function
    of C, before which no handler runs; where the block was not reached, it ends with the frame.
    """

    __slots__ = (
        "__weakref__", "_cell", "_destroy", "_gate", "_readers", "_torn", "_what", "_writer",
        "_writing_thread", "turn",
    )  # fmt: skip
    _instead = "its owner is the one that uses it"

    def __init__(self, what: str, destroy: Callable[[int], object]) -> None:
        self._what, self._destroy = what, destroy
        self._cell = address_cell()
        self._torn = False
        self._writing_thread = 0  # while somebody writes, who
        self._nobody_inside()
        _handles.add(self)

    def create(self, function: Function, *args: Any) -> None:
        """Calls ``function``, a ``*_create``. Raises TlError."""
        store_address(self._cell, function, *args)

    @property
    def address(self) -> int:
        """The object, for who is inside. Raises: ClosedError; ConcurrentUseError where the process
        was forked while another thread wrote."""
        address = self._cell.value
        if not address:
            raise ClosedError(f"this {self._what} is closed")
        if self._torn:
            raise ConcurrentUseError(
                f"this {self._what} was being written by another thread when the process was "
                "forked; in the child it can only be closed"
            )
        return int(address)

    @property
    def closed(self) -> bool:
        """Whether the object is gone."""
        return not self._cell.value

    def read(self) -> memoryview:
        """Raises: ClosedError; ConcurrentUseError while somebody writes."""
        with self._gate:
            if _is_viewed(self._writer):
                raise self._refusal("written", self._writing_thread)
            self.address  # noqa: B018  it says that this is closed
            return memoryview(self._readers)

    def write(self) -> memoryview:
        """Raises: ConcurrentUseError while somebody reads or writes."""
        with self._gate:
            if _is_viewed(self._writer):
                raise self._refusal("written", self._writing_thread)
            if _is_viewed(self._readers):
                raise self._refusal("read", 0)
            if self.turn._is_owned():  # a signal handler, during a look of its own thread
                raise self._refusal("looked at", get_ident())
            self._writing_thread = get_ident()
            return memoryview(self._writer)

    def look(self) -> AbstractContextManager[Any]:
        """Raises: ConcurrentUseError inside a write of the same thread, which cannot wait for
        itself."""
        if self._writing_thread == get_ident() and _is_viewed(self._writer):
            raise self._refusal("written", self._writing_thread)
        return self.turn  # type: ignore[no-any-return]

    def close(self) -> None:
        """Destroys the object; nothing happens the second time.

        Raises: ConcurrentUseError while a call is inside.
        """
        if self.closed:
            return
        try:
            with self.write(), self.turn:
                self._end()
        except ConcurrentUseError as error:
            raise ConcurrentUseError(f"{error}, so it cannot be closed") from None

    def close_after(self, exception: object) -> None:
        """``close`` for the end of a with block. Where ``exception`` is on its way it is not
        hidden: what cannot be closed now is left to the finalizer."""
        try:
            self.close()
        except ConcurrentUseError:
            if exception is None:
                raise

    def release(self) -> None:
        """``close`` for finalizers: does not raise and does not wait. Where a call is still inside
        (a daemon thread at interpreter exit) the process takes the memory back."""
        with self._gate:
            if _is_viewed(self._writer) or _is_viewed(self._readers):
                return
            if self.turn.acquire(blocking=False):
                self._end()
                self.turn.release()

    def _end(self) -> None:
        address, self._cell.value = self._cell.value, None
        if address:
            self._destroy(address)

    def _refusal(self, how: str, thread: int) -> ConcurrentUseError:
        names = {known.ident: known.name for known in threading.enumerate()}
        who = f"by thread {names.get(thread, thread)!r}" if thread else "by a call"
        if thread == get_ident():
            who = (
                "by a call of this very thread, which an observer or a signal handler is inside of"
            )
        return ConcurrentUseError(f"this {self._what} is being {how} {who}")

    def _nobody_inside(self) -> None:
        self._readers, self._writer = bytearray(1), bytearray(1)
        self._gate = RLock()  # around the checks, which a second thread must not run between
        self.turn: Any = RLock()  # held by the writer and by who looks

    def _forget_other_threads(self) -> None:
        """In a forked child, where the threads that were inside are not."""
        self._torn |= _is_viewed(self._writer) and self._writing_thread != get_ident()
        self._nobody_inside()


def reading(handle: Handle | None) -> AbstractContextManager[Any]:
    """``handle.read()``; nothing where there is none."""
    return _NOTHING if handle is None else handle.read()


def address_of(handle: Handle | None) -> int | None:
    """``handle.address``; NULL where there is none."""
    return None if handle is None else handle.address


_NOTHING: AbstractContextManager[None] = nullcontext()


def _is_viewed(cell: bytearray) -> bool:
    """Whether a memoryview of ``cell`` lives, which forbids another length."""
    try:
        cell[:] = b"xx" if len(cell) == 1 else b"x"
    except BufferError:
        return True
    return False


_handles: WeakSet[Handle] = WeakSet()


def _after_fork_in_child() -> None:
    for handle in list(_handles):
        handle._forget_other_threads()


def _at_exit() -> None:
    """Nothing is taken from under threads that go on to the last moment; without any, all ends."""
    if len(sys._current_frames()) == 1:
        for handle in list(_handles):
            handle.release()


os.register_at_fork(after_in_child=_after_fork_in_child)
atexit.register(_at_exit)
