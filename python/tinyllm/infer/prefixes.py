# SPDX-License-Identifier: MIT
"""Prefixes: the prefix index over the blocks of a cache (``tinyllm/prefix.h``), and Text: what a
sequence was told of its tokens. Every method is for who is inside (``handle``).

Words. said: token ids that the caller named, position by position from the first. entered: a block
that is in the index, under its namespace, its tokens and those of all blocks before it. twin: a
block of another sequence that the index has in the place of one's own.
"""

from __future__ import annotations

import contextlib
import struct
from array import array
from functools import partial
from itertools import chain
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tinyllm.errors import TlError
from tinyllm.ffi.handle import Handle
from tinyllm.ffi.libtinyllm import (
    TL_ENOTFOUND,
    TL_PREFIX_NONE,
    Lib,
    PrefixBlock,
    PrefixStats,
    Step,
    i64_ptr,
    memory_at,
    u32_ptr,
)

_PACKED: Final = struct.Struct("<?I")  # dropped, bytes of the namespace, which follows; then tokens


class Text:
    """The tokens of a sequence as far as they were said, its namespace, and how many blocks at the
    front of its table are in the index. dropped: no more are to be. Changed in place, by who
    writes."""

    __slots__ = ("dropped", "entered", "namespace", "tokens")

    def __init__(self, namespace: bytes, tokens: array[int], entered: int = 0) -> None:
        self.namespace, self.tokens, self.entered = namespace, tokens, entered
        self.dropped = False

    def copy(self) -> Text:
        """The same for another sequence."""
        twin = Text(self.namespace, self.tokens[:], self.entered)
        twin.dropped = self.dropped
        return twin

    def packed(self) -> bytes:
        """As bytes, for who keeps a sequence elsewhere."""
        ids = np.array(self.tokens, "<u4").tobytes()
        return _PACKED.pack(self.dropped, len(self.namespace)) + self.namespace + ids

    @classmethod
    def unpacked(cls, raw: bytes) -> Text:
        """What ``packed`` made; none of its blocks is in the index. Raises ValueError."""
        if len(raw) < _PACKED.size:
            raise ValueError("no text")
        dropped, n = _PACKED.unpack_from(raw)
        ids = raw[_PACKED.size + n :]
        if len(raw) < _PACKED.size + n or len(ids) % 4:
            raise ValueError("no text")
        tokens = array("I", np.frombuffer(ids, "<u4").tolist())
        text = cls(raw[_PACKED.size :][:n], tokens)
        text.dropped = dropped
        return text

    def cut(self, length: int, block_size: int, unsay: bool) -> list[Step]:
        """What happens to it where its sequence is cut."""
        entered = partial(setattr, self, "entered", min(self.entered, length // block_size))
        return [entered, partial(self.tokens.__delitem__, slice(length, None))][: 1 + unsay]


class PrefixCounts(NamedTuple):
    """What ``PagedKVCache.prefix_stats`` gives. queries: sequences begun with tokens; tokens_asked,
    tokens_found: theirs. blocks, namespaces, pins: held now. evictions: blocks of the index that
    others took, mean_age and last_age: seconds that those had lain unused."""

    queries: int = 0
    tokens_asked: int = 0
    tokens_found: int = 0
    blocks: int = 0
    namespaces: int = 0
    pins: int = 0
    evictions: int = 0
    mean_age: float = 0.0
    last_age: float = 0.0


class Prefixes:
    """The index, made when it is first written to, over the pool of ``handle``."""

    def __init__(self, lib: Lib, handle: Handle, block_size: int) -> None:
        self._lib, self._pool, self._block_size = lib, handle, block_size
        self._handle = Handle("prefix index", lib.tl_prefix_destroy)
        self.release = self._handle.release  # before or after the pool

    def _made(self) -> int:
        if self._handle.closed:
            self._handle.create(self._lib.tl_prefix_create, self._pool.address)
        return self._handle.address

    def match(self, text: Text, n_tokens: int, table: NDArray[np.uint32]) -> int:
        """Writes the blocks of the longest prefix of its first ``n_tokens`` to ``table``, a
        reference taken on each; how many tokens that is. Raises TlError."""
        found = np.zeros(1, np.int64)
        self._lib.tl_prefix_match(
            self._made(), *_bytes(text.namespace), u32_ptr(_ids(text.tokens)), n_tokens,
            u32_ptr(table), i64_ptr(found),
        )  # fmt: skip
        return int(found[0])

    def peek(self, namespace: bytes, tokens: array[int]) -> int:
        """How many of ``tokens`` would be found."""
        found = np.zeros(1, np.int64)
        if not self._handle.closed:
            self._lib.tl_prefix_peek(
                self._handle.address, *_bytes(namespace), u32_ptr(_ids(tokens)), len(tokens),
                i64_ptr(found),
            )  # fmt: skip
        return int(found[0])

    def enter(self, text: Text, table: NDArray[np.uint32], twins: NDArray[np.uint32]) -> None:
        """Enters blocks of ``table`` behind those that are, one for each entry of ``twins``: there
        the twins are written, a reference taken on each. Raises TlError."""
        first, n = text.entered, len(twins)
        tokens = text.tokens[first * self._block_size : (first + n) * self._block_size]
        self._lib.tl_prefix_insert(
            self._made(), *_bytes(text.namespace), u32_ptr(_ids(tokens)), first, n,
            u32_ptr(table), u32_ptr(twins),
        )  # fmt: skip

    def pin(self, namespace: bytes, tokens: array[int]) -> None:
        """Raises LookupError where not all full blocks of ``tokens`` are there; TlError."""
        self._named("pin", self._lib.tl_prefix_pin, namespace, tokens)

    def unpin(self, namespace: bytes, tokens: array[int]) -> None:
        """Raises LookupError where ``tokens`` are not pinned; TlError."""
        self._named("unpin", self._lib.tl_prefix_unpin, namespace, tokens)

    def _named(self, fn: str, function: Any, namespace: bytes, tokens: array[int]) -> None:
        try:
            function(self._made(), *_bytes(namespace), u32_ptr(_ids(tokens)), len(tokens))
        except TlError as error:
            if error.status != TL_ENOTFOUND:
                raise
            missing = "pinned" if fn == "unpin" else "in the index"
            raise LookupError(
                f"{fn}: the {len(tokens) // self._block_size} full blocks of these {len(tokens)} "
                f"tokens are not {missing}"
            ) from None

    def drop(self, namespace: bytes) -> None:
        """Forgets what is under ``namespace``."""
        if not self._handle.closed:
            self._lib.tl_prefix_drop(self._handle.address, *_bytes(namespace))

    def counts(self) -> PrefixCounts:
        """What it has counted, and holds now."""
        if self._handle.closed:
            return PrefixCounts()
        c = PrefixStats()
        self._lib.tl_prefix_stats_get(self._handle.address, c)
        return PrefixCounts(
            c.queries, c.tokens_asked, c.tokens_found, c.blocks, c.namespaces, c.pins, c.evictions,
            c.age_ns / 1e9 / max(c.evictions, 1), c.last_age_ns / 1e9,
        )  # fmt: skip

    def text_of(self, block: int) -> Text | None:
        """The whole text up to the end of a block; None where the index does not have it."""
        known, parts = PrefixBlock(), []
        namespace = b""
        while block != TL_PREFIX_NONE:
            try:
                self._lib.tl_prefix_block_get(self._handle.address, block, known)
            except TlError:
                return None
            parts.append(known.tokens[: self._block_size])
            namespace, block = memory_at(known.ns, known.ns_bytes).tobytes(), known.parent
        return Text(namespace, array("I", chain.from_iterable(reversed(parts))))

    def pinned(self, blocks: NDArray[np.int64]) -> tuple[int, ...]:
        """Those of some blocks that the index itself has references on, once for each."""
        known, look = PrefixBlock(), self._lib.tl_prefix_block_get
        found = []
        for block in blocks.tolist():
            with contextlib.suppress(TlError):  # not in the index
                look(self._handle.address, block, known)
                found += [block] * known.pins
        return tuple(found)


def tokens_of(fn: str, tokens: Any) -> array[int]:
    """Token ids: a list, an array or a tensor of integers below 2**32, in one dimension.

    Raises: TypeError for anything else, ValueError for an id out of range.
    """
    if isinstance(tokens, (str, bytes, bytearray, memoryview)):
        raise TypeError(f"{fn}: tokens must be token ids, not {type(tokens).__name__}")
    try:
        return array("I", tokens.tolist() if hasattr(tokens, "tolist") else tokens)
    except OverflowError:
        raise ValueError(f"{fn}: tokens has ids outside 0 .. {2**32 - 1}") from None
    except TypeError as error:
        raise TypeError(f"{fn}: tokens must be integers in one dimension ({error})") from None


def namespace_of(fn: str, namespace: Any) -> bytes:
    """Raises TypeError for what are no bytes."""
    if not isinstance(namespace, (bytes, bytearray, memoryview)):
        raise TypeError(f"{fn}: namespace must be bytes, not {type(namespace).__name__}")
    return bytes(namespace)


def _ids(tokens: array[int]) -> NDArray[np.uint32]:
    """A copy: whoever looks into ``tokens`` itself keeps it from growing."""
    return np.array(tokens, np.uint32)


def _bytes(namespace: bytes) -> tuple[bytes, int]:
    return namespace, len(namespace)
