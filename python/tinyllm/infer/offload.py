# SPDX-License-Identifier: MIT
"""Sequences out of the pool into a store, and back with every bit.

Words. entry: what a store keeps under one key,

    "TLKS", u32 version, u32 bytes of the key, u32 of extra, u64 of body; key, extra, body; u32
    CRC-32C of all before it                            little-endian

part: an entry whose body is the envelope (kv_pool.h) of some blocks of a sequence, under
"<key>/<number>". head: the entry under "<key>/head", which says what the sequence is and which
parts belong to it. It is written last and removed first, so that a store holds a sequence exactly
when its head is there.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from tinyllm._check import INT32_MAX
from tinyllm._kv_format import FORMATS
from tinyllm._words import plural
from tinyllm.errors import ConcurrentUseError, OutOfBlocks, StoreError, TlError
from tinyllm.ffi.libtinyllm import TL_KV_ENVELOPE_HEADER, Lib, Step
from tinyllm.infer.batch import CachedSequence
from tinyllm.infer.blocks import NO_BLOCK, Blocks, fill_of
from tinyllm.infer.prefixes import Text
from tinyllm.infer.stores import Store

if TYPE_CHECKING:
    from tinyllm.infer.paged import PagedKVCache

Progress = Callable[[int, int], object]

_PART_BYTES = 64 << 20  # of K and V in one entry, where a block is not more
_MAGIC: Final = b"TLKS"
_VERSION: Final = 1
_ENTRY: Final = struct.Struct("<4sIIIQ")
_SEQUENCE: Final = struct.Struct("<QQ")  # in a head behind an envelope's header: gone, parts


# --- keys and entries
# -------------------------------------------------------------------------------------------------


def key_of(fn: str, seq_id: Hashable, key: str | None) -> str:
    """``key``, or the one that follows from an id that is a text, an integer or bytes.

    Raises: TypeError for another id, or a key that is no text; ValueError for an empty one.
    """
    if key is not None:
        if not isinstance(key, str):
            raise TypeError(f"{fn}: key must be a str, not {key!r}")
        if not key:
            raise ValueError(f"{fn}: key is empty")
        return key
    if isinstance(seq_id, (int, np.integer)):
        return f"int-{int(seq_id)}"
    if not isinstance(seq_id, (str, bytes)):
        raise TypeError(
            f"{fn}: sequence {seq_id!r} has no key of its own, for it is no str, int or bytes: "
            "give key"
        )
    kind, raw = ("bytes", seq_id) if isinstance(seq_id, bytes) else ("str", _encoded(seq_id))
    name = quote(raw, safe="")
    if len(name) > 100:  # file names end at 255 bytes, and a store may quote once more
        return f"{kind}-sha256-{hashlib.sha256(raw).hexdigest()}"
    return f"{kind}-{name}"


def put(fn: str, lib: Lib, store: Store, key: str, body: Any, extra: bytes = b"") -> None:
    """Stores an entry and reads it back.

    Raises: StoreError where the store raised, or gives something else back.
    """
    name = _encoded(key)
    front = _ENTRY.pack(_MAGIC, _VERSION, len(name), len(extra), len(body)) + name + extra
    crc = _crc(lib, body, _crc(lib, front))
    entry = b"".join((front, memoryview(body), struct.pack("<I", crc)))
    try:
        store[key] = entry
    except Exception as error:
        raise _failed(fn, "keep", key, error) from error
    found = _fetch(fn, store, key)
    if type(found) is not bytes:  # two of them are compared much faster
        found = _view(fn, key, found)
    if found != entry:
        raise StoreError(f"{fn}: the store does not give {key!r} back as it was stored")


def get(fn: str, lib: Lib, store: Store, key: str) -> tuple[memoryview, bytes] | None:
    """Body and extra of an entry; None where there is none under ``key``.

    Raises: StoreError where the store failed, for damaged bytes, and for another key's.
    """
    entry = _read(fn, store, key)
    if entry is None:
        return None
    n = len(entry)
    if n < _ENTRY.size + 4 or bytes(entry[:4]) != _MAGIC:
        raise StoreError(f"{fn}: the {n} bytes under {key!r} are no entry of a store")
    _, version, n_key, n_extra, n_body = _ENTRY.unpack_from(entry)
    if version != _VERSION:
        raise StoreError(f"{fn}: {key!r} has version {version}, not {_VERSION}")
    if n != _ENTRY.size + n_key + n_extra + n_body + 4:
        raise StoreError(f"{fn}: {key!r} has {n} bytes, which its own lengths contradict")
    if _crc(lib, entry[:-4]) != _last_word(entry):
        raise StoreError(f"{fn}: {key!r} is damaged: its checksum does not fit")
    name = bytes(entry[_ENTRY.size :][:n_key])
    if name != _encoded(key):
        raise StoreError(f"{fn}: under {key!r} the store has what belongs to {name!r}")
    begin = _ENTRY.size + n_key
    return entry[begin + n_extra : -4], bytes(entry[begin:][:n_extra])


def discard(fn: str, store: Store, keys: list[str]) -> None:
    """Removes entries, in this order; those that are not there are none. Raises StoreError."""
    for key in keys:
        try:
            del store[key]
        except KeyError:
            continue
        except Exception as error:
            raise _failed(fn, "remove", key, error) from error


def _read(fn: str, store: Store, key: str) -> memoryview | None:
    return _view(fn, key, _fetch(fn, store, key))


def _fetch(fn: str, store: Store, key: str) -> Any:
    """What the store has, None for nothing."""
    if not isinstance(store, Store):
        raise TypeError(f"{fn}: store must be a mapping of str to bytes, not {store!r}")
    try:
        return store[key]
    except KeyError:
        return None
    except Exception as error:
        raise _failed(fn, "give", key, error) from error


def _view(fn: str, key: str, found: Any) -> memoryview | None:
    if found is None:
        return None
    try:
        return memoryview(found).cast("B")
    except TypeError:
        raise StoreError(
            f"{fn}: the store gives a {type(found).__name__} for {key!r}, not bytes"
        ) from None


def _failed(fn: str, verb: str, key: str, error: Exception) -> StoreError:
    return StoreError(f"{fn}: the store cannot {verb} {key!r}: {type(error).__name__}: {error}")


def _crc(lib: Lib, data: Any, before: int = 0) -> int:
    if not len(data):
        return before
    memory = np.frombuffer(data, np.uint8)
    return int(lib.tl_crc32c(memory.ctypes.data, len(memory), before))


def _last_word(data: Any) -> int:
    return int.from_bytes(bytes(data[-4:]), "little")


def _encoded(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


# --- one block, for who keeps more than sequences
# -------------------------------------------------------------------------------------------------


def put_block(
    fn: str, blocks: Blocks, block: int, store: Store, key: str, extra: bytes = b""
) -> None:
    """Stores one full block, in whatever state it is, and ``extra`` with it. For who is inside.
    Raises StoreError."""
    held = np.full((1, blocks.n_layers), blocks.block_size)
    put(fn, blocks.lib, store, key, blocks.envelope([block], held), extra)


def get_block(
    fn: str, blocks: Blocks, store: Store, key: str
) -> tuple[NDArray[np.uint8], bytes] | None:
    """The envelope of such a block, for ``Blocks.load_all``, and its extra; None where there is
    none. Raises StoreError, also for a block of another cache's sizes or dtype."""
    found = get(fn, blocks.lib, store, key)
    if found is None:
        return None
    body, extra = found
    _refuse_other(fn, blocks, key, body, 1)
    return np.frombuffer(body, np.uint8), extra


def _refuse_other(fn: str, blocks: Blocks, key: str, envelope: memoryview, n: int) -> None:
    """Raises StoreError for what is no envelope of ``n`` blocks of this pool."""
    wanted = blocks.lib.tl_kv_export_bytes(blocks.handle.address, n)
    if len(envelope) != wanted or envelope[:TL_KV_ENVELOPE_HEADER] != blocks.header(n):
        raise StoreError(f"{fn}: {key!r} is not {plural(n, 'block')} of a cache like this")


# --- heads
# -------------------------------------------------------------------------------------------------


class Head(NamedTuple):
    """lengths: of each layer. gone, n_blocks: at the front given back; held behind them. parts: the
    checksum at the end of the envelope of each. (That of the entry says nothing of what is in it:
    the CRC of bytes and their own CRC is always the same.)"""

    lengths: list[int]
    gone: int
    n_blocks: int
    parts: list[int]
    text: Text | None = None  # what was said of its tokens: the entry's extra

    def packed(self, blocks: Blocks) -> bytes:
        return b"".join((
            blocks.header(self.n_blocks),
            _SEQUENCE.pack(self.gone, len(self.parts)),
            np.array(self.lengths, "<i8").tobytes(),
            np.array(self.parts, "<u4").tobytes(),
        ))  # fmt: skip

    @classmethod
    def read(cls, fn: str, blocks: Blocks, store: Store, key: str) -> Head:
        """Raises: KeyError where there is none; ValueError for a sequence of another cache's sizes
        or dtype; StoreError."""
        found = get(fn, blocks.lib, store, _head_of(key))
        if found is None:
            raise KeyError(f"{fn}: the store holds no {key!r}")
        body, begin = found[0], TL_KV_ENVELOPE_HEADER + _SEQUENCE.size
        broken = StoreError(f"{fn}: {key!r} is no sequence")
        if len(body) < begin or body[:4] != blocks.header(0)[:4]:
            raise broken
        n_blocks = int.from_bytes(body[8:12], "little")
        _refuse_sizes(fn, blocks, key, bytes(body[:TL_KV_ENVELOPE_HEADER]))
        gone, n_parts = _SEQUENCE.unpack_from(body, TL_KV_ENVELOPE_HEADER)
        if len(body) != begin + 8 * blocks.n_layers + 4 * n_parts:
            raise broken
        lengths = np.frombuffer(body, "<i8", blocks.n_layers, begin).tolist()
        parts = np.frombuffer(body, "<u4", n_parts, begin + 8 * blocks.n_layers).tolist()
        held = -(-max(lengths) // blocks.block_size) - gone
        in_range = min(lengths) >= 0 and max(lengths) <= INT32_MAX and held == n_blocks
        if not in_range or gone * blocks.block_size > min(lengths):
            raise broken
        try:
            text = Text.unpacked(found[1]) if found[1] else None
        except ValueError:
            raise broken from None
        return cls(lengths, gone, n_blocks, parts, text)


def _refuse_sizes(fn: str, blocks: Blocks, key: str, header: bytes) -> None:
    """Raises ValueError where a header is of a cache unlike this one."""
    names = ("block_size", "n_layers", "n_kv_heads", "d_head")
    found, own = ((h[4:8], struct.unpack_from("<4I", h, 12)) for h in (header, blocks.header(0)))
    if found[0] != own[0]:
        version = int.from_bytes(found[0][:2], "little")
        dtype = {form.tl_format: name for name, form in FORMATS.items()}.get(version, "another")
        raise ValueError(f"{fn}: {key!r} is {dtype}, and the cache {blocks.form.name}")
    for name, its, ours in zip(names, found[1], own[1], strict=True):
        if its != ours:
            raise ValueError(f"{fn}: {key!r} has {name} = {its}, and the cache {ours}")


def _head_of(key: str) -> str:
    return f"{key}/head"


def _parts_of(key: str, n: int) -> list[str]:
    return [f"{key}/{i}" for i in range(n)]


def _entries_of(key: str, n_parts: int) -> list[str]:
    """In the order in which they are removed."""
    return [_head_of(key), *_parts_of(key, n_parts)]


# --- swapping
# -------------------------------------------------------------------------------------------------


def swap_out(
    cache: PagedKVCache,
    seq_id: Hashable,
    store: Store,
    key: str | None,
    replace: bool,
    progress: Progress | None,
) -> None:
    """``PagedKVCache.swap_out``"""
    fn, blocks = "swap_out", cache._blocks
    with cache._handle.look():
        cache._refuse_closed()
        seen = _Seen(cache, seq_id, cache._sequence(fn, seq_id))
    key, held = key_of(fn, seq_id, key), seen.table[seen.gone :].tolist()
    _make_room(fn, blocks, store, key, replace)
    per_part = max(1, _PART_BYTES // blocks.block_bytes)
    parts = [range(i, min(i + per_part, len(held))) for i in range(0, len(held), per_part)]
    left: list[bool] = []  # True once the sequence is no longer in the cache
    told = _told(progress, len(held) * blocks.block_bytes)
    try:
        told(0)
        crcs = []
        for part, name in zip(parts, _parts_of(key, len(parts)), strict=True):
            with cache._handle.look():
                envelope = seen.envelope(fn, part)
            put(fn, blocks.lib, store, name, envelope)
            crcs.append(_last_word(envelope))
            told(part.stop * blocks.block_bytes)
        head = Head(seen.lengths, seen.gone, len(held), crcs)
        text = seen.text
        put(
            fn,
            blocks.lib,
            store,
            _head_of(key),
            head.packed(blocks),
            text.packed() if text else b"",
        )
        with cache._handle.write(), cache._handle.turn:
            cache._settle()
            seen.refuse_change(fn)
            with suppress(TlError):  # as ``free``: others find it
                cache._enter(seen.sequence)
            blocks.commit(
                partial(cache._sequences.pop, seq_id),
                partial(left.append, True),
                blocks.unref(held),
            )
            cache._trim_idle()
    except BaseException:
        if not left:  # what the store has so far is of no use
            with suppress(StoreError):
                discard(fn, store, _entries_of(key, len(parts)))
        raise


def swap_in(
    cache: PagedKVCache,
    seq_id: Hashable,
    store: Store,
    key: str | None,
    keep: bool,
    progress: Progress | None,
) -> StoreError | None:
    """``PagedKVCache.swap_in``. Returns why the store did not remove what is in the pool again."""
    fn, blocks = "swap_in", cache._blocks
    cache._refuse_closed()
    cache._refuse_live(fn, seq_id)
    key = key_of(fn, seq_id, key)
    head = Head.read(fn, blocks, store, key)
    with cache._handle.look():  # before all is read for nothing
        cache._settle()
        _refuse_full(cache, seq_id, head.n_blocks)
    envelopes = _read_parts(fn, blocks, store, key, head, progress)
    with cache._handle.write(), cache._handle.turn:
        cache._settle()
        cache._refuse_live(fn, seq_id)
        _refuse_full(cache, seq_id, head.n_blocks)
        try:
            fresh = blocks.load_all(envelopes, head.n_blocks)
        except TlError as error:
            raise StoreError(f"{fn}: {key!r}: {error.reason}") from error
        table = np.concatenate((np.full(head.gone, NO_BLOCK, np.uint32), fresh))
        begun = CachedSequence(table, head.lengths, head.gone, head.text)
        blocks.commit(
            partial(cache._sequences.__setitem__, seq_id, begun),
            *_fills(blocks, begun),
            blocks.keep(),
        )
    if not keep:
        try:
            discard(fn, store, _entries_of(key, len(head.parts)))
        except StoreError as error:
            return error
    return None


class _Seen:
    """A sequence as it was when a swap began, table and lengths, which no write changes in place.
    Every method is for who is inside."""

    def __init__(self, cache: PagedKVCache, seq_id: Hashable, sequence: CachedSequence) -> None:
        self.cache, self.seq_id, self.sequence = cache, seq_id, sequence
        self.table, self.lengths, self.gone = sequence.table, sequence.lengths, sequence.gone
        self.text = sequence.text.copy() if sequence.text else None

    def refuse_change(self, fn: str) -> None:
        """Raises ConcurrentUseError where the sequence is another, or has changed."""
        now = self.cache._sequences.get(self.seq_id)
        if now is self.sequence and now.table is self.table and now.lengths is self.lengths:
            said = len(now.text.tokens) if now.text else 0
            if said == (len(self.text.tokens) if self.text else 0):
                return
        raise ConcurrentUseError(f"{fn}: sequence {self.seq_id!r} was written meanwhile")

    def envelope(self, fn: str, part: range) -> NDArray[np.uint8]:
        """Some of the blocks it holds. Raises ConcurrentUseError, ClosedError."""
        self.cache._refuse_closed()
        self.refuse_change(fn)
        b, places = self.cache.block_size, [self.gone + i for i in part]
        held = [[fill_of(length, i, b) for length in self.lengths] for i in places]
        return self.cache._blocks.envelope(self.table[places].tolist(), np.array(held))


def _make_room(fn: str, blocks: Blocks, store: Store, key: str, replace: bool) -> None:
    """Raises ValueError where the store has something under ``key``, unless it may be replaced."""
    if _read(fn, store, _head_of(key)) is None:
        return
    if not replace:
        raise ValueError(
            f"{fn}: the store holds {key!r} already: another key, or replace=True, which forgets it"
        )
    n_parts = 0
    with suppress(StoreError, ValueError):  # of what cannot be read, the head alone is known
        n_parts = len(Head.read(fn, blocks, store, key).parts)
    discard(fn, store, _entries_of(key, n_parts))


def _read_parts(
    fn: str, blocks: Blocks, store: Store, key: str, head: Head, progress: Progress | None
) -> list[NDArray[np.uint8]]:
    told = _told(progress, head.n_blocks * blocks.block_bytes)
    told(0)
    envelopes, done = [], 0
    for name, wanted in zip(_parts_of(key, len(head.parts)), head.parts, strict=True):
        found = get(fn, blocks.lib, store, name)
        if found is None:
            raise StoreError(f"{fn}: {name!r}, a part of {key!r}, is missing")
        body, _ = found
        n = int.from_bytes(body[8:12], "little")
        _refuse_other(fn, blocks, name, body, n)
        if _last_word(body) != wanted or done + n > head.n_blocks:
            raise StoreError(f"{fn}: {name!r} is of another moment than {key!r}")
        envelopes.append(np.frombuffer(body, np.uint8))
        done += n
        told(done * blocks.block_bytes)
    if done != head.n_blocks:
        raise StoreError(f"{fn}: {key!r} has {done} of its {plural(head.n_blocks, 'block')}")
    return envelopes


def _fills(blocks: Blocks, sequence: CachedSequence) -> list[Step]:
    """What every layer holds of each block: an envelope says what any does."""
    complete, b = min(sequence.lengths), blocks.block_size
    behind = range(max(complete // b, sequence.gone), len(sequence.table))
    fills = [(int(sequence.table[i]), fill_of(complete, i, b)) for i in behind]
    return [blocks.set_fills(fills)] if fills else []


def _told(progress: Progress | None, total: int) -> Callable[[int], object]:
    return (lambda done: None) if progress is None else (lambda done: progress(done, total))


def _refuse_full(cache: PagedKVCache, seq_id: Hashable, n: int) -> None:
    """Raises OutOfBlocks where there are not ``n``. For who is inside."""
    stats = cache._blocks.stats()
    if n > stats.free + stats.cached:
        cache._failures += 1
        raise OutOfBlocks(
            f"swap_in: sequence {seq_id!r} needs {n} blocks; {stats.free} are free and "
            f"{stats.cached} cached of {cache.num_blocks}"
        )
