# SPDX-License-Identifier: MIT
"""What a 64-bit little-endian ELF library says of itself, read without binutils."""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from pathlib import Path

DT_NEEDED, DT_SONAME = 1, 14
SHT_DYNAMIC, SHT_DYNSYM = 6, 11


@dataclass
class Elf:
    """machine: ``e_machine``; soname and needed as in the dynamic section; exported: what others
    may use."""

    machine: int
    soname: str = ""
    needed: list[str] = field(default_factory=list)
    exported: set[str] = field(default_factory=set)


def read_elf(path: Path) -> Elf:
    image = path.read_bytes()
    assert image[:6] == b"\x7fELF\x02\x01", f"{path} is no 64-bit little-endian ELF file"
    elf = Elf(*struct.unpack_from("<H", image, 18))
    (table,) = struct.unpack_from("<Q", image, 40)
    size, n = struct.unpack_from("<HH", image, 58)
    # name, type, flags, address, offset, size, link (the section that holds its strings)
    sections = [struct.unpack_from("<IIQQQQI", image, table + i * size) for i in range(n)]

    def string(strings: int, at: int) -> str:
        start = sections[strings][4] + at
        return image[start : image.index(b"\0", start)].decode()

    for _, kind, _, _, offset, length, link in sections:
        body = image[offset : offset + length]
        if kind == SHT_DYNAMIC:
            entries = [(tag, string(link, value)) for tag, value in struct.iter_unpack("<QQ", body)
                       if tag in (DT_NEEDED, DT_SONAME)]  # fmt: skip
            elf.needed = [text for tag, text in entries if tag == DT_NEEDED]
            elf.soname = "".join(text for tag, text in entries if tag == DT_SONAME)
        elif kind == SHT_DYNSYM:
            elf.exported = {
                string(link, name)
                for name, info, _, section, _, _ in struct.iter_unpack("<IBBHQQ", body)
                if section != 0 and info >> 4 != 0  # neither undefined nor local
            }
    return elf


def archive_names(path: Path) -> list[str]:
    """The global names that the index of an archive lists, its first member."""
    image = path.read_bytes()
    assert image[:24] == b"!<arch>\n/".ljust(24), f"{path} is no archive with an index"
    index = image[68 : 68 + int(image[56:66])]
    n = int.from_bytes(index[:4], "big")
    names = index[4 + 4 * n :].split(b"\0")[:n]
    return [name.decode() for name in names]
