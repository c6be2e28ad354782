# SPDX-License-Identifier: MIT
"""The one place where calls of paged attention can be watched.

Every call looks at ``OBSERVERS`` once. Nobody there is the usual case, and costs that look.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from tinyllm._paged_call import PagedCall


class Observer(Protocol):
    """Who is told of a call before the library runs it, and after it succeeded. What it raises, the
    call raises."""

    def before(self, call: PagedCall) -> None: ...

    def after(self, call: PagedCall) -> None: ...


OBSERVERS: Final[ContextVar[tuple[Observer, ...]]] = ContextVar("tinyllm.observers", default=())


@contextmanager
def observing(observer: Observer) -> Iterator[None]:
    """``observer`` watches the calls that this context (thread, or asyncio task) makes in the
    block."""
    before = OBSERVERS.get()
    try:  # with the setting inside: an interrupt behind it must not leave the observer there
        OBSERVERS.set((*before, observer))
        yield
    finally:
        OBSERVERS.set(before)
