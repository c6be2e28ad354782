# SPDX-License-Identifier: MIT
"""record: calls of paged attention in a file, with everything that decides their bits; Recording
reads it.

Words. span: the positions [low, high) that a row, or any row of a sequence, sees. piece: what the
rows of one sequence see of one split. side: K or V of a piece, [positions, Hkv, D] in the order of
positions, whatever the blocks; and where K and V have scales the scales of K, of V [positions,
Hkv].

The file is an .npz without pickles, nothing in it compressed: one array per member
``calls/<i>/<name>.npy``, with ``keep_kv`` the bytes of pieces under ``kv/<their SHA-256>.npy``,
each content once, and ``record.json``, which says the rest.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from tinyllm._files import Replacement
from tinyllm._kv_format import FORMATS
from tinyllm._observers import observing
from tinyllm._version import __version__
from tinyllm.ffi.libtinyllm import TL_ATTN_SPLIT

if TYPE_CHECKING:
    from tinyllm._paged_call import PagedCall

__all__ = ["Call", "Recorder", "Recording", "record"]

FORMAT: Final = "tinyllm record"
FORMAT_VERSION: Final = 1
_INDEX: Final = "record.json"
SIDES: Final = ("K", "V", "scales of K", "scales of V")
_OPTIONAL: Final = ("alibi_slopes", "sink_logits", "lse")


# --- who sees what --------------------------------------------------------------------------------


def sequence_of_row(starts: NDArray[Any]) -> NDArray[np.int64]:
    """The sequence of each of ``starts[-1]`` rows."""
    return np.repeat(np.arange(len(starts) - 1), np.diff(starts))


def row_spans(starts: NDArray[Any], ctx_lens: NDArray[Any], window: int) -> NDArray[np.int64]:
    """int64 [total_q,2]: the positions each row sees, low and high."""
    sequence = sequence_of_row(starts)
    last_row, length = starts[1:].astype(np.int64)[sequence], ctx_lens.astype(np.int64)[sequence]
    position = np.arange(len(sequence)) + length - last_row
    low = np.maximum(position + 1 - window, 0) if window > 0 else np.zeros_like(position)
    return np.stack([low, position + 1], axis=1)


def sequence_spans(starts: NDArray[Any], spans: NDArray[np.int64]) -> NDArray[np.int64]:
    """int64 [B,2]: the positions that any row of each sequence sees; [0, 0) where there are no
    rows."""
    found = np.zeros((len(starts) - 1, 2), np.int64)
    owner = np.flatnonzero(np.diff(starts))
    found[owner, 0], found[owner, 1] = spans[starts[owner], 0], spans[starts[owner + 1] - 1, 1]
    return found


def split_ranges(spans: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first split of each span, and how many it reaches into."""
    first = spans[:, 0] // TL_ATTN_SPLIT
    return first, np.where(spans[:, 0] < spans[:, 1], -(-spans[:, 1] // TL_ATTN_SPLIT) - first, 0)


def enumerated(spans: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(which span, which split) of every split that the spans reach into, in order."""
    first, count = split_ranges(spans)
    which = np.repeat(np.arange(len(spans)), count)
    before = np.cumsum(count) - count
    return which, first[which] + np.arange(len(which)) - before[which]


# --- writing --------------------------------------------------------------------------------------


@contextmanager
def record(path: str | os.PathLike[str], *, keep_kv: bool = False) -> Iterator[Recorder]:
    """Records the calls of ``paged_attention`` and ``paged_attention_decode`` in the block to a
    file at ``path``, for ``tinyllm.diff``.

    Of each call: q, tables, lengths and options; a SHA-256 of the K and V, and their scales, that
    each sequence sees of each split of 1024 positions, and with ``keep_kv`` their bytes, each
    content once; out, and
    lse where it was asked for; the state of every row, head and split, which a second call works
    out; versions, instruction set, library and threads. Calls of ``flash_attention`` and
    ``paged_attention_states`` are not recorded.
    It takes 4 * (Dk + Dv + splits * (2 + Dv)) bytes of file a row and head.

    The file appears when the block ends, also by an exception, whole or not at all: until then it
    is a hidden neighbour whose name ends in ".part". An existing file is replaced. Blocks may be
    nested; each records.
    What counts are calls of the context (thread, asyncio task) that entered the block.

    Raises: TypeError for a path or ``keep_kv`` that is none; OSError where the file cannot be
    written, in the block from the call whose record found no room.

    >>> with tinyllm.record("run.tlrec"):
    ...     tinyllm.paged_attention_decode(q, cache, ["a", "b"], layer=0)
    """
    recorder = Recorder(path, keep_kv)
    try:
        with observing(recorder):
            yield recorder
    finally:
        recorder.close()


class Recorder:
    """What ``with record(path) as recorder:`` gives. ``n_calls``: how many were recorded so far."""

    def __init__(self, path: str | os.PathLike[str], keep_kv: bool) -> None:
        self.path = Path(path)
        if not isinstance(keep_kv, bool):
            raise TypeError(f"record: keep_kv must be True or False, not {keep_kv!r}")
        self._keep_kv = keep_kv
        self._calls: list[dict[str, Any]] = []
        self._kept: set[str] = set()
        self._lock = Lock()
        if self.path.is_dir():
            raise IsADirectoryError(f"record: {self.path} is a directory")
        self._file = Replacement(path)
        self._zip: zipfile.ZipFile | None = zipfile.ZipFile(self._file.part, "x")

    @property
    def n_calls(self) -> int:
        return len(self._calls)

    def before(self, call: PagedCall) -> None:
        """A call is recorded when it is over."""

    def after(self, call: PagedCall) -> None:
        with self._lock:
            if self._zip is not None:  # a thread that inherited the context may outlive the block
                self._add(self._zip, call)

    def close(self) -> None:
        """Finishes the file and puts it where it belongs; nothing happens the second time."""
        with self._lock:
            archive, self._zip = self._zip, None
            if archive is None:
                return
            index = {
                "format": FORMAT,
                "version": FORMAT_VERSION,
                "package": __version__,
                "keep_kv": self._keep_kv,
                "calls": self._calls,
            }
            with self._file, archive:
                archive.writestr(_member(_INDEX), json.dumps(index, indent=1))

    def _add(self, archive: zipfile.ZipFile, call: PagedCall) -> None:
        kv, lib = call.kv, call.lib
        starts = np.arange(len(call.ctx_lens) + 1, dtype=np.int32)
        if call.cu_seqlens_q is not None:
            starts = call.cu_seqlens_q
        spans = row_spans(starts, call.ctx_lens, call.window)
        arrays = {
            "q": call.q,
            "ctx_lens": call.ctx_lens,
            "cu_seqlens_q": starts,
            "block_tables": call.block_tables,
            "alibi_slopes": call.alibi_slopes,
            "sink_logits": call.sink_logits,
            "out": call.out,
            "lse": call.lse,
            "states": _states(call, spans),
            "digests": self._digests(archive, call, sequence_spans(starts, spans)),
        }
        for name, a in arrays.items():
            if a is not None:
                archive.writestr(_member(f"calls/{len(self._calls)}/{name}.npy"), _npy(a))
        self._calls.append(
            {
                "fn": call.fn,
                "dtype": kv.dtype,
                "block_tokens": kv.block_size,
                "n_kv_heads": kv.n_kv_heads,
                "head_dims": kv.head_dims,
                "window": call.window,
                "scale": float(np.float32(call.scale)).hex(),
                "softcap": call.softcap.hex(),
                "has": [name for name in _OPTIONAL if arrays[name] is not None],
                "facts": {
                    "version": lib.tl_version().decode(),
                    "numerics": lib.tl_numerics_version(),
                    "isa": lib.tl_isa_name().decode(),
                    "threads": int(lib.tl_pool_threads(call.args.tp)) if call.args.tp else 1,
                    "library": str(lib.path),
                },
            }
        )

    def _digests(
        self, archive: zipfile.ZipFile, call: PagedCall, spans: NDArray[np.int64]
    ) -> NDArray[np.uint8]:
        """uint8 [pieces,sides,32]: SHA-256 of the sides of each piece. Pieces in the same blocks
        are read once."""
        b, sides = call.kv.block_size, (*call.kv._codes(), *call.kv._scales())
        found: list[bytes] = []
        known: dict[tuple[bytes, int, int], bytes] = {}
        for sequence, split in zip(*enumerated(spans), strict=True):
            low = max(int(spans[sequence, 0]), int(split) * TL_ATTN_SPLIT)
            high = min(int(spans[sequence, 1]), (int(split) + 1) * TL_ATTN_SPLIT)
            held = call.block_tables[sequence, low // b : -(-high // b)]
            key = (held.tobytes(), low, high)
            if key not in known:
                position = np.arange(low, high)
                block, slot = held[position // b - low // b], position % b
                known[key] = b"".join(self._keep(archive, a[block, :, slot]) for a in sides)
            found.append(known[key])
        return np.frombuffer(b"".join(found), np.uint8).reshape(len(found), len(sides), 32)

    def _keep(self, archive: zipfile.ZipFile, piece: NDArray[Any]) -> bytes:
        """The digest of a side; with ``keep_kv`` it is written as unsigned integers, once."""
        content = np.ascontiguousarray(piece).view(f"u{piece.itemsize}")
        content = content.astype(content.dtype.newbyteorder("<"), copy=False)
        digest = hashlib.sha256(content.data)
        name = digest.hexdigest()
        if self._keep_kv and name not in self._kept:
            archive.writestr(_member(f"kv/{name}.npy"), _npy(content.reshape(-1)))
            self._kept.add(name)
        return digest.digest()


def _states(call: PagedCall, spans: NDArray[np.int64]) -> NDArray[np.float32]:
    """float32 [n,H,2+Dv]: the state of every row and every split that it sees, row by row; a call a
    split."""
    first, count = split_ranges(spans)
    at = np.cumsum(count) - count
    n_rows, n_heads, _ = call.q.shape
    width = 2 + call.kv.head_dims[1]
    kept = np.empty((int(count.sum()), n_heads, width), np.float32)
    state = np.empty((n_rows, n_heads, 1, width), np.float32)
    for split in range(int(first.min(initial=0)), int((first + count).max(initial=0))):
        rows = np.flatnonzero((first <= split) & (split < first + count))
        if rows.size:
            call.states(split, 1, state)
            kept[at[rows] + split - first[rows]] = state[rows, :, 0]
    return kept


def _member(name: str) -> zipfile.ZipInfo:
    """No time, so that the same calls give the same bytes; and nothing is compressed, so that no
    file grows when read."""
    info = zipfile.ZipInfo(name)
    info.external_attr = 0o644 << 16
    return info


def _npy(a: NDArray[Any]) -> bytes:
    file = io.BytesIO()
    little = np.ascontiguousarray(a, a.dtype.newbyteorder("<"))
    np.lib.format.write_array(file, little, version=(1, 0), allow_pickle=False)
    return file.getvalue()


# --- reading --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Call:
    """One recorded call; arrays as ``paged_attention`` takes and gives them, ``cu_seqlens_q`` never
    None.

    states: float32 [n,H,2+Dv] of every (row, split) of ``state_index``. digests: uint8
    [pieces,sides,32], SHA-256 of K and V and, where they have scales, of those, of every (sequence,
    split) of ``piece_index``.
    facts: what no bit depends on: version, numerics, isa, threads, library.
    """

    index: int
    fn: str
    dtype: str
    block_tokens: int
    n_kv_heads: int
    head_dims: tuple[int, int]
    window: int
    scale: float
    softcap: float
    q: NDArray[np.float32]
    ctx_lens: NDArray[np.int32]
    cu_seqlens_q: NDArray[np.int32]
    block_tables: NDArray[np.uint32]
    alibi_slopes: NDArray[np.float32] | None
    sink_logits: NDArray[np.float32] | None
    out: NDArray[np.float32]
    lse: NDArray[np.float32] | None
    states: NDArray[np.float32]
    digests: NDArray[np.uint8]
    facts: dict[str, Any]

    @property
    def spans(self) -> NDArray[np.int64]:
        """int64 [total_q,2]: the positions each row sees, low and high."""
        return row_spans(self.cu_seqlens_q, self.ctx_lens, self.window)

    def state_index(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(row, split) of each of ``states``."""
        return enumerated(self.spans)

    def piece_index(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(sequence, split) of each of ``digests``."""
        return enumerated(sequence_spans(self.cu_seqlens_q, self.spans))

    def piece_span(self, piece: int) -> tuple[int, int]:
        """The positions [low, high) of a piece."""
        sequence, split = (int(i[piece]) for i in self.piece_index())
        low, high = (int(i) for i in sequence_spans(self.cu_seqlens_q, self.spans)[sequence])
        return max(low, split * TL_ATTN_SPLIT), min(high, (split + 1) * TL_ATTN_SPLIT)


class Recording:
    """A file that ``record`` wrote. ``len``, indexing and iteration give its calls, read when asked
    for.

    Not thread-safe. A context manager; ``close`` ends it.

    >>> with Recording.load("run.tlrec") as run:
    ...     run[0].out
    """

    def __init__(self, path: Path, archive: zipfile.ZipFile, index: dict[str, Any]) -> None:
        self.path, self._zip = path, archive
        self.package = _typed(index, "package", str)
        self.keep_kv = _typed(index, "keep_kv", bool)
        self._calls = _typed(index, "calls", list)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Recording:
        """Raises: OSError where there is no such file to read; ValueError for a file that is no
        record, is damaged, or was written by another version of the format."""
        place = Path(path)
        file = open(place, "rb")  # noqa: SIM115
        try:
            with _reading(place):
                archive = zipfile.ZipFile(file)
                index = json.loads(_stored(archive, _INDEX))
                if not isinstance(index, dict) or index.get("format") != FORMAT:
                    raise ValueError(f"{_INDEX} does not say {FORMAT!r}")
                if index.get("version") != FORMAT_VERSION:
                    raise OtherVersion(
                        f"{place} is a record of format {index.get('version')!r}; "
                        f"tinyllm {__version__} reads format {FORMAT_VERSION}"
                    )
                return cls(place, archive, index)
        except BaseException:
            file.close()
            raise

    def __len__(self) -> int:
        return len(self._calls)

    def __getitem__(self, i: int) -> Call:
        """Raises: IndexError; ValueError for a call that is damaged or makes no sense."""
        entry = self._calls[i]
        index = i % len(self)
        with _reading(self.path, f"call {index}"):
            return self._call(index, entry)

    def __iter__(self) -> Iterator[Call]:
        return (self[i] for i in range(len(self)))

    def kv(self, call: Call, piece: int) -> tuple[NDArray[Any], ...] | None:
        """K [positions,Hkv,Dk] and V [positions,Hkv,Dv] of a piece of ``call`` as unsigned
        integers, then, of types with scales, the bits of those of K and of V, uint32
        [positions,Hkv]; or None where they were not kept. Raises ValueError where they are
        damaged."""
        if not self.keep_kv:
            return None
        low, high = call.piece_span(piece)
        form, heads = FORMATS[call.dtype], call.n_kv_heads
        kinds = [form.code.newbyteorder("<")] * 2 + [np.dtype("<u4")] * 2
        rows = [(heads, d) for d in call.head_dims] + [(heads,)] * 2
        digests = call.digests[piece]
        with _reading(self.path, f"K and V of call {call.index}"):
            stored = [
                self._array(f"kv/{d.tobytes().hex()}", kind)
                for d, kind in zip(digests, kinds, strict=False)
            ]
            sides = tuple(a.reshape(-1, *row) for a, row in zip(stored, rows, strict=False))
            if any(len(side) != high - low for side in sides):
                raise ValueError(f"{[len(side) for side in sides]} positions, not {high - low}")
            if (
                b"".join(hashlib.sha256(a.data).digest() for a in stored)
                != call.digests[piece].tobytes()
            ):
                raise ValueError("not the bytes that were digested")
            return sides

    def close(self) -> None:
        """Nothing can be read afterwards; nothing happens the second time."""
        file = self._zip.fp
        self._zip.close()
        if file is not None:
            file.close()

    def __enter__(self) -> Recording:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Recording({str(self.path)!r}, {len(self)} calls)"

    def _call(self, index: int, entry: dict[str, Any]) -> Call:
        names = _typed(entry, "has", list)
        dims = _typed(entry, "head_dims", list)
        dtype, n_kv = _typed(entry, "dtype", str), _count(entry, "n_kv_heads")
        if (
            dtype not in FORMATS
            or len(dims) != 2
            or not all(type(d) is int and d >= 1 for d in dims)
        ):
            raise ValueError(f"K and V of {dtype!r} and {dims!r}")

        def held(name: str, kind: str, *shape: int | None) -> NDArray[Any]:
            a = self._array(f"calls/{index}/{name}", np.dtype(kind))
            if a.ndim != len(shape) or any(
                w not in (n, None) for n, w in zip(a.shape, shape, strict=True)
            ):
                raise ValueError(f"{name} has shape {a.shape}")
            return a

        q = held("q", "<f4", None, None, dims[0])
        n_rows, n_heads, _ = q.shape
        lengths = held("ctx_lens", "<i4", None)
        starts = held("cu_seqlens_q", "<i4", len(lengths) + 1)
        own = np.diff(starts.astype(np.int64))
        if starts[0] != 0 or starts[-1] != n_rows or (own < 0).any() or (own > lengths).any():
            raise ValueError("the rows of its sequences do not fit")
        window = entry["window"]
        if type(window) is not int or not -(2**63) <= window < 2**63 or n_heads % n_kv:
            raise ValueError(f"window {window!r}, {n_heads} heads of {n_kv}")
        spans = row_spans(starts, lengths, window)
        n_states = int(split_ranges(spans)[1].sum())
        n_pieces = int(split_ranges(sequence_spans(starts, spans))[1].sum())
        return Call(
            index=index,
            fn=_text(entry, "fn"),
            dtype=dtype,
            block_tokens=_count(entry, "block_tokens"),
            n_kv_heads=n_kv,
            head_dims=(dims[0], dims[1]),
            window=window,
            scale=float.fromhex(_typed(entry, "scale", str)),
            softcap=float.fromhex(_typed(entry, "softcap", str)),
            q=q,
            ctx_lens=lengths,
            cu_seqlens_q=starts,
            block_tables=held("block_tables", "<u4", len(lengths), None),
            alibi_slopes=held("alibi_slopes", "<f4", n_heads) if "alibi_slopes" in names else None,
            sink_logits=held("sink_logits", "<f4", n_heads) if "sink_logits" in names else None,
            out=held("out", "<f4", n_rows, n_heads, dims[1]),
            lse=held("lse", "<f4", n_rows, n_heads) if "lse" in names else None,
            states=held("states", "<f4", n_states, n_heads, 2 + dims[1]),
            digests=held("digests", "|u1", n_pieces, 4 if FORMATS[dtype].has_scales else 2, 32),
            facts=_facts(entry["facts"]),
        )

    def _array(self, name: str, dtype: np.dtype[Any]) -> NDArray[Any]:
        content = _stored(self._zip, f"{name}.npy")
        file = io.BytesIO(content)
        if np.lib.format.read_magic(file) != (1, 0):
            raise ValueError(f"{name} is another version of npy")
        shape, fortran, found = np.lib.format.read_array_header_1_0(file)
        if fortran or found != dtype:
            raise ValueError(f"{name} is {found}, expected {dtype}")
        return np.frombuffer(content[file.tell() :], found).reshape(shape)


class OtherVersion(ValueError):
    """The file is a record, of a format this package does not read."""


@contextmanager
def _reading(path: Path, what: str = "") -> Iterator[None]:
    """Whatever a file of hostile bytes provokes is one ValueError."""
    try:
        yield
    except (OtherVersion, MemoryError):
        raise
    except Exception as error:
        where = f"{path}: {what}" if what else str(path)
        raise ValueError(f"{where}: no record of tinyllm's, or a damaged one ({error})") from error


def _stored(archive: zipfile.ZipFile, name: str) -> bytes:
    info = archive.getinfo(name)
    if info.file_size > archive.start_dir:
        raise ValueError(f"{name} is larger than the file")
    if info.compress_type != zipfile.ZIP_STORED or info.file_size != info.compress_size:
        raise ValueError(f"{name} is compressed")
    return archive.read(info)


_T = TypeVar("_T")


def _typed(entry: dict[str, Any], key: str, kind: type[_T]) -> _T:
    value = entry[key]
    if not isinstance(value, kind):
        raise ValueError(f"{key} is {value!r}")
    return value


def _text(entry: dict[str, Any], key: str) -> str:
    """A string that may be shown: nothing in it acts on a terminal."""
    value = _typed(entry, key, str)
    if not value.isprintable():
        raise ValueError(f"{key} is {value!r}")
    return value


def _facts(entry: dict[str, Any]) -> dict[str, Any]:
    numbers = {name: _count(entry, name) for name in ("numerics", "threads")}
    path = _typed(entry, "library", str)
    texts = {"version": _text(entry, "version"), "isa": _text(entry, "isa")}
    return {**texts, **numbers, "library": path if path.isprintable() else ascii(path)}


def _count(entry: dict[str, Any], key: str) -> int:
    value = entry[key]
    if type(value) is not int or value < 1:
        raise ValueError(f"{key} is {value!r}")
    return value
