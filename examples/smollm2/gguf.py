# SPDX-License-Identifier: MIT
"""Reader for GGUF model files: the metadata, and the tensors as float32.

GGUF in three words: *metadata* (typed key/value pairs), *tensor infos* (name, shape, element type,
place) and one *data section* that the places count from. The file is mapped, never read whole. It
comes from outside, so nothing in it is trusted: every length is checked against the bytes that are
there, and whatever does not fit raises :class:`GGUFError`, which names the file and the spot.

Quantised rows are cut into blocks of 32 values that share a scale ``d`` (and, in ``Q4_1``, an
offset ``m``). A block of four-bit codes keeps values 0..15 in the low halves of its 16 bytes and
values 16..31 in the high halves.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Bytes = npt.NDArray[np.uint8]

_F16: Final = np.dtype("<f2")
_F32: Final = np.dtype("<f4")
QK: Final = 32  # values in a quantised block
_MAX_DIMS: Final = 4
_MAX_NESTING: Final = 4  # arrays of arrays: files have no deeper ones


class GGUFError(ValueError):
    """The file is not a GGUF file this reader can use; the message says where and why."""


# --- element types --------------------------------------------------------------------------------


def _widened(raw: Bytes, stored: np.dtype[np.floating]) -> Floats:
    """Bytes as the little-endian floats they are, in float32 and in memory of their own."""
    wide: Floats = np.ascontiguousarray(raw).view(stored).astype(np.float32)
    return wide


def _f16_column(blocks: Bytes, byte: int) -> Floats:
    """The float16 at `byte` of every block, as a column that broadcasts over the block's values."""
    return _widened(blocks[:, byte : byte + 2], _F16)


def _nibbles(codes: Bytes) -> Floats:
    low_then_high: Floats = np.concatenate([codes & 15, codes >> 4], axis=1).astype(np.float32)
    return low_then_high


def _from_f32(blocks: Bytes) -> Floats:
    return _widened(blocks, _F32)


def _from_f16(blocks: Bytes) -> Floats:
    return _widened(blocks, _F16)


def _from_q4_0(blocks: Bytes) -> Floats:  # d | 16 bytes of codes
    centred: Floats = _nibbles(blocks[:, 2:]) - np.float32(8)
    return centred * _f16_column(blocks, 0)


def _from_q4_1(blocks: Bytes) -> Floats:  # d | m | 16 bytes of codes
    return _nibbles(blocks[:, 4:]) * _f16_column(blocks, 0) + _f16_column(blocks, 2)


def _from_q8_0(blocks: Bytes) -> Floats:  # d | 32 signed codes
    return blocks[:, 2:].view(np.int8).astype(np.float32) * _f16_column(blocks, 0)


@dataclass(frozen=True)
class ElementType:
    """How `values` numbers are kept in `size` bytes, and the way back to float32."""

    name: str
    values: int
    size: int
    to_f32: Callable[[Bytes], Floats]


ELEMENT_TYPES: Final = {
    0: ElementType("F32", 1, 4, _from_f32),
    1: ElementType("F16", 1, 2, _from_f16),
    2: ElementType("Q4_0", QK, 18, _from_q4_0),
    3: ElementType("Q4_1", QK, 20, _from_q4_1),
    8: ElementType("Q8_0", QK, 34, _from_q8_0),
}


# --- metadata values ------------------------------------------------------------------------------

_STRING: Final = 8
_ARRAY: Final = 9
_SCALARS: Final = {  # value type: struct code, which is numpy's letter too
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip


class _Cursor:
    """Walks the head of the file; every step is checked before it is taken."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self.data, self.path, self.at = data, path, 0

    def fail(self, what: str) -> GGUFError:
        return GGUFError(f"{self.path}: {what} (at byte {self.at})")

    def left(self) -> int:
        return len(self.data) - self.at

    def take(self, n: int, what: str) -> bytes:
        if n > self.left():
            raise self.fail(f"file ends inside {what}: {n} bytes wanted, {self.left()} left")
        self.at += n
        return self.data[self.at - n : self.at]

    def scalar(self, code: str, what: str) -> int | float | bool:
        raw = self.take(struct.calcsize("<" + code), what)
        value: int | float | bool = struct.unpack("<" + code, raw)[0]
        return value

    def count(self, code: str, what: str, at_least: int = 0) -> int:
        """An unsigned number of things that take `at_least` bytes each: more than the file can hold
        is refused at once."""
        n = int(self.scalar(code, what))
        if at_least and n > self.left() // at_least:
            raise self.fail(f"{what} is {n}, more than the rest of the file can hold")
        return n

    def string(self, what: str) -> str:
        raw = self.take(self.count("Q", f"the length of {what}", at_least=1), what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            raise self.fail(f"{what} is not UTF-8") from None

    def value(self, kind: int, what: str, depth: int = 0) -> object:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind], what)
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY and depth < _MAX_NESTING:
            return self.array(what, depth)
        raise self.fail(f"{what} has value type {kind}, which is unknown here")

    def array(self, what: str, depth: int) -> object:
        kind = int(self.scalar("I", f"the item type of {what}"))
        if kind in _SCALARS:
            item = np.dtype("<" + _SCALARS[kind]) if kind != 7 else np.dtype(np.bool_)
            n = self.count("Q", f"the length of {what}", at_least=item.itemsize)
            return np.frombuffer(self.take(n * item.itemsize, what), item)
        n = self.count("Q", f"the length of {what}", at_least=8)
        return [self.value(kind, f"{what}[{i}]", depth + 1) for i in range(n)]


@dataclass(frozen=True)
class TensorInfo:
    """One tensor's place in the file; `shape` is numpy's, slowest axis first."""

    name: str
    shape: tuple[int, ...]
    type: ElementType
    start: int
    n_bytes: int


class GGUF:
    """An open GGUF file.

    >>> with GGUF("model.gguf") as file:                                     # doctest: +SKIP
    ...     layers = file.integer("llama.block_count")
    # float32, a copy of its own
    ...     norm = file.tensor("output_norm.weight")

    ``metadata`` and ``tensors`` hold everything by name. ``integer``, ``number``, ``text``,
    ``texts`` and ``integers`` read one metadata value and raise :class:`GGUFError` when it is
    missing or of another type.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise GGUFError(f"{self.path}: {error.strerror or error}") from error
        except ValueError:  # an empty file cannot be mapped
            raise GGUFError(f"{self.path}: the file is empty") from None
        self.metadata: dict[str, object] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            self._read_head(_Cursor(self._data, self.path))
        except BaseException:
            self._data.close()
            raise

    def close(self) -> None:
        self._data.close()

    def __enter__(self) -> GGUF:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    # --- the head of the file ---

    def _read_head(self, cursor: _Cursor) -> None:
        if cursor.take(4, "the magic") != b"GGUF":
            raise GGUFError(f"{self.path}: not a GGUF file (it does not begin with 'GGUF')")
        version = cursor.scalar("I", "the version")
        if version not in (2, 3):
            raise GGUFError(
                f"{self.path}: GGUF version {version}; versions 2 and 3, little-endian, are read"
            )
        n_tensors = cursor.count(
            "Q", "the number of tensors", at_least=24
        )  # name length, rank, type, offset
        n_pairs = cursor.count(
            "Q", "the number of metadata pairs", at_least=12
        )  # key length, value type
        for _ in range(n_pairs):
            key = cursor.string("a metadata key")
            if key in self.metadata:
                raise cursor.fail(f"metadata key {key!r} is there twice")
            self.metadata[key] = cursor.value(
                int(cursor.scalar("I", f"the type of {key!r}")), f"{key!r}"
            )
        raw = [self._read_info(cursor) for _ in range(n_tensors)]
        self._place(cursor, raw)

    def _read_info(self, cursor: _Cursor) -> tuple[str, tuple[int, ...], ElementType, int]:
        name = cursor.string("a tensor's name")
        rank = int(cursor.scalar("I", f"the rank of {name!r}"))
        if not 1 <= rank <= _MAX_DIMS:
            raise cursor.fail(
                f"tensor {name!r} has {rank} dimensions; 1 to {_MAX_DIMS} are possible"
            )
        fastest_first = [int(cursor.scalar("Q", f"the shape of {name!r}")) for _ in range(rank)]
        kind = int(cursor.scalar("I", f"the element type of {name!r}"))
        offset = int(cursor.scalar("Q", f"the offset of {name!r}"))
        if kind not in ELEMENT_TYPES:
            known = ", ".join(t.name for t in ELEMENT_TYPES.values())
            raise cursor.fail(f"tensor {name!r} has element type {kind}; this reader takes {known}")
        element = ELEMENT_TYPES[kind]
        if min(fastest_first) < 1 or fastest_first[0] % element.values:
            raise cursor.fail(
                f"tensor {name!r} of type {element.name} cannot have rows of shape {fastest_first}"
            )
        return name, tuple(reversed(fastest_first)), element, offset

    def _place(
        self, cursor: _Cursor, raw: list[tuple[str, tuple[int, ...], ElementType, int]]
    ) -> None:
        """Turn offsets into places in the file, none of which may leave it."""
        alignment = (
            self.integer("general.alignment") if "general.alignment" in self.metadata else 32
        )
        if alignment < 1 or alignment & (alignment - 1):
            raise GGUFError(f"{self.path}: general.alignment is {alignment}, not a power of two")
        base = -(-cursor.at // alignment) * alignment
        for name, shape, element, offset in raw:
            n_values = 1
            for size in shape:  # Python integers: no product can wrap
                n_values *= size
            n_bytes = n_values // element.values * element.size
            start = base + offset
            if name in self.tensors:
                raise GGUFError(f"{self.path}: tensor {name!r} is there twice")
            if offset % alignment:
                raise GGUFError(
                    f"{self.path}: tensor {name!r} lies at offset {offset}, no multiple of "
                    f"{alignment}"
                )
            if start + n_bytes > len(self._data):
                end, size = start + n_bytes, len(self._data)
                raise GGUFError(
                    f"{self.path}: tensor {name!r} ends at byte {end}, the file at {size}: "
                    "cut short?"
                )
            self.tensors[name] = TensorInfo(name, shape, element, start, n_bytes)

    # --- what callers ask for ---

    def tensor(self, name: str) -> Floats:
        """The tensor as float32, C-contiguous, in memory of its own."""
        if name not in self.tensors:
            raise GGUFError(f"{self.path}: there is no tensor {name!r}")
        info = self.tensors[name]
        raw = np.frombuffer(self._data[info.start : info.start + info.n_bytes], np.uint8)
        return info.type.to_f32(raw.reshape(-1, info.type.size)).reshape(info.shape)

    def _metadata(self, key: str, kinds: tuple[type, ...], wanted: str) -> object:
        if key not in self.metadata:
            raise GGUFError(f"{self.path}: metadata {key!r} is missing")
        value = self.metadata[key]
        if not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds):
            raise GGUFError(
                f"{self.path}: metadata {key!r} is {type(value).__name__}, not {wanted}"
            )
        return value

    def integer(self, key: str) -> int:
        value = self._metadata(key, (int,), "an integer")
        assert isinstance(value, int)
        return value

    def number(self, key: str) -> float:
        value = self._metadata(key, (int, float), "a number")
        assert isinstance(value, (int, float))
        return float(value)

    def text(self, key: str) -> str:
        value = self._metadata(key, (str,), "text")
        assert isinstance(value, str)
        return value

    def texts(self, key: str) -> list[str]:
        value = self._metadata(key, (list,), "a list of texts")
        assert isinstance(value, list)
        if not all(isinstance(item, str) for item in value):
            raise GGUFError(f"{self.path}: metadata {key!r} is not a list of texts")
        return value

    def integers(self, key: str) -> list[int]:
        value = self._metadata(key, (np.ndarray,), "a list of integers")
        assert isinstance(value, np.ndarray)
        if value.dtype.kind not in "iu":
            raise GGUFError(f"{self.path}: metadata {key!r} is not a list of integers")
        return [int(item) for item in value]
