# SPDX-License-Identifier: MIT
"""ThreadPool: the threads that attention runs on; mirrors ``tinyllm/pool.h``."""

from __future__ import annotations

import os
import weakref
from typing import Any

from tinyllm._check import integer
from tinyllm._not_copied import NotCopied
from tinyllm.errors import TlError
from tinyllm.ffi.handle import Handle
from tinyllm.ffi.libtinyllm import TL_EINVAL, TL_POOL_MAX_THREADS, Lib, load

__all__ = ["ThreadPool"]


class ThreadPool(NotCopied):
    """``n`` threads, the caller among them; 0 means the CPUs this process may run on.

    Results have the same bits on any number of threads.
    A forked child may go on using a pool it inherited: the work then runs on the child's calling
    thread. Two Python threads may use one pool; the second waits.

    >>> with ThreadPool(4) as pool:
    ...     out = paged_attention_decode(q, cache, ["a", "b"], layer=0, threads=pool)

    lib: a loaded library; None is the default one.

    Raises: TypeError for an ``n`` that is no integer, ValueError outside 0 .. 4096, TlError where a
    thread cannot be started.
    """

    _instead = "make another, of as many threads"

    def __init__(self, n: int = 0, *, lib: Lib | None = None) -> None:
        n = integer("ThreadPool", "n", n, 0, TL_POOL_MAX_THREADS)
        self._lib = lib = load() if lib is None else lib
        self._handle = Handle("ThreadPool", lib.tl_pool_destroy)
        self._finalizer = weakref.finalize(self, self._handle.release)
        self._finalizer.atexit = False  # Handle has its own way to end with the interpreter
        try:
            self._handle.create(lib.tl_pool_create, n)
        except TlError as error:
            if error.status == TL_EINVAL:
                raise ValueError(f"ThreadPool: {error.reason}") from error
            raise

    @property
    def threads(self) -> int:
        """Threads that may work, the caller included."""
        with self._handle.read():
            return int(self._lib.tl_pool_threads(self._handle.address))

    def close(self) -> None:
        """Joins the threads; nothing happens the second time. Using the pool then raises
        ClosedError.

        Raises: ConcurrentUseError while another thread is using the pool.
        """
        self._handle.close()

    def __enter__(self) -> ThreadPool:
        self._handle.address  # noqa: B018  it says that this is closed
        return self

    def __exit__(self, kind: object, exception: object, traceback: object) -> None:
        self._handle.close_after(exception)

    def __repr__(self) -> str:
        return f"ThreadPool({'closed' if self._handle.closed else self.threads})"


_shared: dict[tuple[Lib, int], ThreadPool] = {}

# A forked child has none of its parent's workers: it makes pools of its own when it asks for
# threads.
os.register_at_fork(after_in_child=_shared.clear)


def handle_of(fn: str, threads: Any, lib: Lib) -> Handle | None:
    """The handle of the ``tl_pool`` that ``threads`` means; None for the calling thread.

    A count stands for one pool per process, made when it is first asked for.
    """
    if threads is None:
        return None
    if isinstance(threads, ThreadPool):
        if threads._lib is not lib:
            raise ValueError(f"{fn}: threads belongs to {threads._lib.path}, not {lib.path}")
        return threads._handle
    try:
        n = integer(fn, "threads", threads, 0, TL_POOL_MAX_THREADS)
    except TypeError:
        raise TypeError(
            f"{fn}: threads must be None, a count or a ThreadPool, not {threads!r}"
        ) from None
    if n == 1:
        return None
    pool = _shared.get((lib, n))
    if pool is None:
        pool = _shared.setdefault((lib, n), ThreadPool(n, lib=lib))
    return pool._handle
