# SPDX-License-Identifier: MIT
"""Where sequences lie that have left the pool: what a store is, and three of them."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any, Final, Protocol, runtime_checkable
from urllib.parse import quote, unquote, urlsplit

from tinyllm._files import Replacement
from tinyllm._words import human_bytes
from tinyllm.errors import StoreError
from tinyllm.infer.memory import byte_count

__all__ = ["FileStore", "FsspecStore", "MemoryStore", "Store", "open_store"]

_SUFFIX: Final = ".kv"
_ABANDONED: Final = 3600  # seconds: nobody writes one entry for an hour


@runtime_checkable
class Store(Protocol):
    """Anything that keeps bytes under a text, a dict for instance. What was given under a key comes
    back, all of it, or KeyError; any other exception says that the store has failed. One that lies
    on a disk or elsewhere replaces what a key had at once or not at all."""

    def __getitem__(self, key: str, /) -> bytes | bytearray | memoryview: ...

    def __setitem__(self, key: str, value: bytes, /) -> None: ...

    def __delitem__(self, key: str, /) -> None: ...


class MemoryStore(MutableMapping[str, bytes]):
    """A store in this process's memory, outside every pool.

    limit: bytes, or a text like "4GiB", that all it keeps may take together; what goes beyond it
    raises StoreError. None: there is no limit. Any number of threads may use it.
    """

    def __init__(self, limit: int | str | None = None) -> None:
        self.limit = None if limit is None else byte_count("MemoryStore", "limit", limit)
        self._kept: dict[str, bytes] = {}
        self._lock = threading.Lock()
        self._counted = 0  # bytes of all it keeps, or more where an interrupt came between

    @property
    def nbytes(self) -> int:
        """Bytes of all it keeps."""
        return sum(map(len, list(self._kept.values())))

    def __getitem__(self, key: str) -> bytes:
        return self._kept[key]

    def __setitem__(self, key: str, value: bytes) -> None:
        with self._lock:
            grown = len(value) - len(self._kept.get(key, b""))
            if self.limit is not None and self._counted + grown > self.limit:
                self._counted = self.nbytes
                if self._counted + grown > self.limit:
                    raise StoreError(
                        f"MemoryStore: {human_bytes(self._counted + grown)} would be more than its "
                        f"limit of {human_bytes(self.limit)}"
                    )
            self._counted += max(grown, 0)
            self._kept[key] = bytes(value)
            self._counted += min(grown, 0)

    def __delitem__(self, key: str) -> None:
        with self._lock:
            self._counted -= len(self._kept.pop(key))

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._kept))

    def __len__(self) -> int:
        return len(self._kept)


class FileStore(MutableMapping[str, bytes]):
    """A store in the files of one directory, which is made where it is missing.

    A file is there whole or not at all, whenever the process or the machine stops: it is written
    beside its place, brought to the disk and then renamed. What a stopped process left unfinished
    is never read, and removed when a store is opened there an hour later or more.

    path: the directory. Several processes may share it, as long as their keys differ.
    Raises: OSError.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.mkdir(parents=True, exist_ok=True)
        for part in self.path.glob(".*.part"):
            try:
                if time.time() - part.stat().st_mtime > _ABANDONED:
                    part.unlink()
            except FileNotFoundError:  # somebody else removed it
                continue

    def __getitem__(self, key: str) -> bytes:
        try:
            return self._file(key).read_bytes()
        except FileNotFoundError:
            raise KeyError(key) from None

    def __setitem__(self, key: str, value: bytes) -> None:
        with Replacement(self._file(key)) as part:
            part.write_bytes(value)
        self._sync()

    def __delitem__(self, key: str) -> None:
        try:
            self._file(key).unlink()
        except FileNotFoundError:
            raise KeyError(key) from None
        self._sync()

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and self._file(key).is_file()

    def __iter__(self) -> Iterator[str]:
        return iter([_key_of(file.name) for file in sorted(self.path.glob(f"*{_SUFFIX}"))])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        return f"FileStore({str(self.path)!r})"

    def _file(self, key: str) -> Path:
        return self.path / _name_of(key)

    def _sync(self) -> None:
        """A new name is on the disk when its directory is."""
        directory = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


class FsspecStore(MutableMapping[str, bytes]):
    """A store in a directory of any file system of fsspec; ``open_store`` opens it by its URL.

    fs: the file system. root: the directory.
    Whether a file is replaced at once is the file system's affair. Object stores do it; where one
    does not, what was cut short is found by its checksum and refused.
    """

    def __init__(self, fs: Any, root: str) -> None:
        self.fs, self.root = fs, root.rstrip("/")

    def __getitem__(self, key: str) -> bytes:
        try:
            return bytes(self.fs.cat_file(self._file(key)))
        except FileNotFoundError:
            raise KeyError(key) from None

    def __setitem__(self, key: str, value: bytes) -> None:
        try:
            self.fs.pipe_file(self._file(key), value)
        except FileNotFoundError:
            self.fs.makedirs(self.root, exist_ok=True)
            self.fs.pipe_file(self._file(key), value)

    def __delitem__(self, key: str) -> None:
        try:
            self.fs.rm_file(self._file(key))
        except FileNotFoundError:
            raise KeyError(key) from None

    def __contains__(self, key: object) -> bool:
        return isinstance(key, str) and bool(self.fs.isfile(self._file(key)))

    def __iter__(self) -> Iterator[str]:
        try:
            files = self.fs.ls(self.root, detail=False, refresh=True)
        except FileNotFoundError:
            files = []
        names = sorted(file.rpartition("/")[2] for file in files)
        return iter([_key_of(name) for name in names if name.endswith(_SUFFIX)])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        return f"FsspecStore({self.fs!r}, {self.root!r})"

    def _file(self, key: str) -> str:
        return f"{self.root}/{_name_of(key)}"


def open_store(place: str | os.PathLike[str], **options: Any) -> FileStore | FsspecStore:
    """The store at ``place``: a directory, by its path or a ``file://`` URL, is a FileStore; any
    other URL goes to fsspec, with ``options`` (``pip install fsspec`` and what it
    needs for that kind of URL).

    >>> store = open_store("s3://bucket/sequences", anon=False)

    Raises: TypeError for options of a directory; ImportError where fsspec is not installed; what
    opening raises: OSError, ValueError.
    """
    text = os.fspath(place)
    scheme, separator, _ = text.partition("://")
    if separator and scheme != "file":
        return _of_fsspec(text, options)
    if options:
        raise TypeError(
            f"open_store: a directory takes no options, and {', '.join(options)} is given"
        )
    return FileStore(unquote(urlsplit(text).path) if separator else text)


def _of_fsspec(url: str, options: dict[str, Any]) -> FsspecStore:
    try:
        from fsspec.core import url_to_fs
    except ImportError:
        raise ImportError(
            f"open_store: {url} needs fsspec: pip install fsspec", name="fsspec"
        ) from None
    return FsspecStore(*url_to_fs(url, **options))


def _name_of(key: str) -> str:
    """The file of a key: letters, digits and %, so that no key leaves the directory."""
    if not isinstance(key, str):
        raise TypeError(f"a key is a str, not {key!r}")
    return quote(key, safe="").replace(".", "%2E") + _SUFFIX


def _key_of(name: str) -> str:
    return unquote(name.removesuffix(_SUFFIX))
