# SPDX-License-Identifier: MIT
"""Paged steps recorded in files: written by Python and read by C, and the reverse
(fixtures/README.md).

``python tests/L9.4/python/test_fixtures.py`` writes the committed files anew, their outputs worked
out by ``tinyllm.reference``.
"""

from __future__ import annotations

import ctypes
import os
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from numpy.typing import NDArray

ROOT: Final = Path(__file__).resolve().parents[3]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "python"))

from tinyllm import reference  # noqa: E402
from tinyllm.ffi.libtinyllm import (  # noqa: E402
    TL_F16,
    TL_KV_FORMAT_V1,
    KvConfig,
    Lib,
    block_view,
    f32_ptr,
    i32_ptr,
    new_handle,
    u32_ptr,
)

F32 = NDArray[np.float32]
U16 = NDArray[np.uint16]

FOLDER: Final = Path(__file__).resolve().parents[1] / "fixtures"
HEADER: Final = struct.Struct(
    "<4s9IqfI"
)  # magic, version, arithmetic, seven dimensions, window, scale, 0
MAGIC: Final = b"TLFX"
VERSION: Final = 1
DIMENSIONS: Final = ("B", "H", "Hkv", "D", "block_tokens", "n_blocks", "max_blocks")
POISON: Final = np.array([0x7E00, 0xFE01, 0x7C00, 0xFC00, 0x7BFF, 0x0001], np.uint16)


class BadFixture(ValueError):
    """Bytes that are not a whole fixture of this version."""


@dataclass
class Fixture:
    """One paged step. q, out: float32 [B, H, D]; k, v: f16 codes [n_blocks, Hkv, b, D]; tables:
    uint32 [B, max_blocks]; ctx_lens: int32 [B]."""

    q: F32
    k: U16
    v: U16
    tables: NDArray[np.uint32]
    ctx_lens: NDArray[np.int32]
    out: F32
    scale: np.float32
    window: int

    @property
    def dimensions(self) -> tuple[int, ...]:
        (batch, heads, width), (n_blocks, kv_heads, block_tokens, _) = self.q.shape, self.k.shape
        return batch, heads, kv_heads, width, block_tokens, n_blocks, self.tables.shape[1]

    def arrays(self) -> tuple[NDArray[Any], ...]:
        """In the order of the file."""
        return self.q, self.ctx_lens, self.tables, self.k, self.v, self.out


# --- the format
# ---------------------------------------------------------------------------------------------


def _crc_table() -> list[int]:
    table = []
    for byte in range(256):
        for _ in range(8):
            byte = byte >> 1 ^ (0x82F63B78 if byte & 1 else 0)
        table.append(byte)
    return table


_CRC: Final = _crc_table()


def crc32c(data: bytes) -> int:
    """CRC-32C, a byte at a time: the library's own is what this one is to check."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _CRC[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def encode(fixture: Fixture) -> bytes:
    """The bytes of a file."""
    header = HEADER.pack(
        MAGIC,
        VERSION,
        reference.NUMERICS_VERSION,
        *fixture.dimensions,
        fixture.window,
        fixture.scale,
        0,
    )
    little = (a.astype(a.dtype.newbyteorder("<")).tobytes() for a in fixture.arrays())
    body = b"".join((header, *little))
    return body + struct.pack("<I", crc32c(body))


def decode(data: bytes) -> Fixture:
    """The step in the bytes of a file. Raises BadFixture, in the order of fixtures/README.md."""
    if len(data) < HEADER.size + 4:
        raise BadFixture(f"{len(data)} bytes are no fixture")
    magic, version, arithmetic, *rest = HEADER.unpack_from(data)
    dimensions, (window, scale, reserved) = rest[:7], rest[7:]
    if magic != MAGIC:
        raise BadFixture(f"magic is {magic.hex()}, not TLFX")
    if version != VERSION:
        raise BadFixture(f"version {version}, not {VERSION}")
    if arithmetic != reference.NUMERICS_VERSION:
        raise BadFixture(f"arithmetic version {arithmetic}, not {reference.NUMERICS_VERSION}")
    for name, n in zip(DIMENSIONS, dimensions, strict=True):
        if n == 0:
            raise BadFixture(f"{name} is 0")
    if reserved != 0:
        raise BadFixture(f"the reserved word is {reserved}")
    batch, heads, kv_heads, width, block_tokens, n_blocks, max_blocks = dimensions
    rows, slab = (batch, heads, width), (n_blocks, kv_heads, block_tokens, width)
    layout: list[tuple[str, tuple[int, ...]]] = [
        ("<f4", rows), ("<i4", (batch,)), ("<u4", (batch, max_blocks)),
        ("<u2", slab), ("<u2", slab), ("<f4", rows),
    ]  # fmt: skip
    expected = HEADER.size + sum(int(t[2]) * _product(shape) for t, shape in layout) + 4
    if len(data) != expected:
        raise BadFixture(f"length {len(data)}, not {expected}")
    stored, computed = struct.unpack("<I", data[-4:])[0], crc32c(data[:-4])
    if stored != computed:
        raise BadFixture(f"checksum {stored:08x}, not {computed:08x}")
    arrays, at = [], HEADER.size
    for dtype, shape in layout:
        a = np.frombuffer(data, dtype, _product(shape), at).reshape(shape)
        arrays.append(a.astype(a.dtype.newbyteorder("=")))
        at += a.nbytes
    q, ctx_lens, tables, k, v, out = arrays
    return Fixture(q, k, v, tables, ctx_lens, out, np.float32(scale), window)


def _product(shape: tuple[int, ...]) -> int:
    n = 1
    for axis in shape:
        n *= axis
    return n


# --- the committed files
# ------------------------------------------------------------------------------------


class Stream:
    """Numbers that are the same with every version of numpy: splitmix64."""

    def __init__(self, seed: int) -> None:
        self.count = np.uint64(seed << 32)

    def bits(self, n: int) -> NDArray[np.uint64]:
        with np.errstate(over="ignore"):
            x = (self.count + np.arange(1, n + 1, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
            self.count += np.uint64(n)
            x = (x ^ x >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
            x = (x ^ x >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
        return np.asarray(x ^ x >> np.uint64(31))

    def unit(self, *shape: int) -> NDArray[np.float64]:
        """In [-1, 1)."""
        x = (self.bits(_product(shape)) >> np.uint64(11)).astype(np.float64)
        return np.asarray(x.reshape(shape) * 2.0**-52 - 1)

    def shuffled(self, n: int) -> NDArray[np.uint32]:
        return np.argsort(self.bits(n), kind="stable").astype(np.uint32)


def make(
    seed: int, ctx: list[int], heads: int, kv_heads: int, width: int, block_tokens: int, *,
    window: int = 0, scale: float | None = None, shrink: float = 1,
) -> Fixture:  # fmt: skip
    """A step with random values wherever a row looks, poison and garbage elsewhere, out unset."""
    stream = Stream(seed)
    first = [0 if window <= 0 else max(n - window, 0) // block_tokens for n in ctx]
    last = [-(-n // block_tokens) for n in ctx]
    n_blocks = sum(last) - sum(first) + 1
    max_blocks = max(last) + seed % 2
    ids, taken = stream.shuffled(n_blocks), 0
    garbage = np.array([2**32 - 1, 2**31, 2**31 - 1, n_blocks, 0], np.uint32)
    tables = garbage[np.add.outer(np.arange(len(ctx)), np.arange(max_blocks)) % 5]
    shape = (n_blocks, kv_heads, block_tokens, width)
    k, v = (np.resize(POISON, shape) for _ in range(2))
    for s, n in enumerate(ctx):
        needed = last[s] - first[s]
        tables[s, first[s] : last[s]] = ids[taken : taken + needed]
        taken += needed
        low = 0 if window <= 0 else max(n - window, 0)
        position = np.arange(low, n)
        block, slot = tables[s, position // block_tokens], position % block_tokens
        for store, size in ((k, 1.5), (v, 4.0)):
            values = (stream.unit(len(position), kv_heads, width) * size).astype(np.float16)
            store[block, :, slot] = values.view(np.uint16)
    q = (stream.unit(len(ctx), heads, width) * 2 * shrink).astype(np.float32)
    return Fixture(
        q, k, v, tables, np.array(ctx, np.int32), np.zeros_like(q),
        np.float32(width**-0.5 if scale is None else scale), window,
    )  # fmt: skip


def with_special_values() -> Fixture:
    """Rows that see NaN or infinities in K or V, and one that sees nothing but scores of -inf."""
    step = make(6, [7, 7, 7, 7, 7, 7], heads=2, kv_heads=1, width=5, block_tokens=3, scale=1.0)
    step.q[:] = np.abs(step.q) + np.float32(0.5)

    def place(store: U16, sequence: int, position: int, d: int, code: int) -> None:
        store[step.tables[sequence, position // 3], 0, position % 3, d] = code

    place(step.k, 0, 2, 1, 0x7C00)
    place(step.k, 1, 4, 0, 0xFE01)
    place(step.v, 2, 5, 3, 0xFC00)
    place(step.k, 3, 0, 4, 0xFC00)
    place(step.v, 3, 6, 2, 0x7E00)
    for position in range(7):
        place(step.k, 4, position, 0, 0xFC00)
    return step


def stretches() -> Fixture:
    """Rows over three stretches and over two, whose tables name twenty blocks over and over."""
    step = make(8, [2000], heads=2, kv_heads=1, width=3, block_tokens=100, scale=2.0)
    step.q = (Stream(9).unit(2, 2, 3) * 2).astype(np.float32)
    step.tables = np.stack([np.resize(np.roll(step.tables[0, :20], s), 331) for s in (0, 7)])
    step.ctx_lens, step.out = np.array([33000, 18500], np.int32), np.zeros_like(step.q)
    return step


def subnormal() -> Fixture:
    step = make(
        7, [3, 40], heads=2, kv_heads=2, width=16, block_tokens=8, scale=2.0**121, shrink=2.0**-127
    )
    for store in (step.k, step.v):
        small = store.view(np.float16)
        finite = np.abs(small) < 30000
        small[finite] = (small[finite].astype(np.float32) * np.float32(2.0**-14)).astype(np.float16)
    return step


STEPS: Final[dict[str, Callable[[], Fixture]]] = {
    "smallest": lambda: make(1, [1], 1, 1, 1, 1),
    "gqa": lambda: make(2, [1, 9, 22], heads=6, kv_heads=2, width=24, block_tokens=4),
    "window": lambda: make(3, [30, 41], 4, 1, 17, 5, window=13, scale=0.3),
    "splits": lambda: make(4, [2060], heads=2, kv_heads=1, width=3, block_tokens=100, scale=2.0),
    "wide": lambda: make(5, [20], heads=9, kv_heads=1, width=130, block_tokens=16),
    "stretches": stretches,
    "special": with_special_values,
    "subnormal": subnormal,
}


def expected(step: Fixture) -> F32:
    """What the reference makes of a step."""
    return reference.paged_attn_decode(
        step.q, step.k.view(np.float16), step.v.view(np.float16), step.tables, step.ctx_lens,
        scale=float(step.scale), window=step.window,
    )  # fmt: skip


def committed_bytes(name: str) -> bytes:
    step = STEPS[name]()
    step.out = expected(step)
    return encode(step)


# --- the library and the C program
# --------------------------------------------------------------------------


def by_library(lib: Lib, step: Fixture) -> F32:
    """What the library makes of a step, through ctypes."""
    batch, heads, kv_heads, width, block_tokens, n_blocks, max_blocks = step.dimensions
    config = KvConfig(n_blocks, block_tokens, 1, kv_heads, width, TL_F16, TL_KV_FORMAT_V1)
    pool = new_handle(lib.tl_kv_pool_create, ctypes.byref(config))
    try:
        for is_v, store in enumerate((step.k, step.v)):
            for block in range(n_blocks):
                address = lib.tl_kv_block_ptr(pool, block, 0, is_v)
                block_view(address, step.k.shape[1:]).view(np.uint16)[:] = store[block]
        out = np.full_like(step.q, 7)
        lib.tl_paged_attn_decode_f32(
            f32_ptr(step.q), pool, 0, u32_ptr(step.tables), max_blocks, i32_ptr(step.ctx_lens),
            f32_ptr(out), batch, heads, kv_heads, width, float(step.scale), step.window, None,
        )  # fmt: skip
    finally:
        lib.tl_kv_pool_destroy(pool)
    return out


def run_tool(*arguments: object) -> subprocess.CompletedProcess[str]:
    """The C side of the fixtures, from the build folder in $TINYLLM_BUILD (default c/build)."""
    tool = ROOT / os.environ.get("TINYLLM_BUILD", "c/build") / "tests/test_fixtures"
    if not tool.is_file():
        pytest.fail(f"{tool} is not built: make test-c builds it", pytrace=False)
    return subprocess.run(
        [str(tool), *map(str, arguments)],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def same_bits(a: F32, b: F32) -> bool:
    return a.shape == b.shape and np.array_equal(a.view(np.uint32), b.view(np.uint32))


# --- the tests
# ----------------------------------------------------------------------------------------------


def test_crc32c_is_castagnoli() -> None:
    assert crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize("name", STEPS)
def test_committed_file_is_what_the_reference_gives(name: str) -> None:
    assert (FOLDER / f"{name}.tlfx").read_bytes() == committed_bytes(name)


def test_no_other_files_are_committed() -> None:
    files = sorted(p.name for p in FOLDER.glob("*.tlfx"))
    assert files == sorted(f"{name}.tlfx" for name in STEPS)
    assert sum(p.stat().st_size for p in FOLDER.glob("*.tlfx")) < 200_000


@pytest.mark.parametrize("name", STEPS)
def test_library_gives_the_recorded_bits(lib: Lib, name: str) -> None:
    step = decode((FOLDER / f"{name}.tlfx").read_bytes())
    assert same_bits(by_library(lib, step), step.out)


def test_special_rows_are_as_worked_out_by_hand() -> None:
    out = decode((FOLDER / "special.tlfx").read_bytes()).out.view(np.uint32)
    nan, minus_inf = 0x7FC00000, 0xFF800000
    assert (out[0] == nan).all() and (out[1] == nan).all()  # a score of +inf, of NaN
    assert (out[2, :, 3] == minus_inf).all() and (out[2, :, :3] & 0x7F800000 != 0x7F800000).all()
    assert (out[3, :, 2] == nan).all() and (
        out[3, :, [0, 1, 3, 4]] & 0x7F800000 != 0x7F800000
    ).all()
    assert (out[4] == 0).all()  # nothing but -inf
    assert (out[5] & 0x7F800000 != 0x7F800000).all()


def test_subnormal_step_leaves_the_normal_range() -> None:
    step = decode((FOLDER / "subnormal.tlfx").read_bytes())
    products = np.abs(step.q).max() * np.float64(2.0**-13)
    assert 0 < products < np.finfo(np.float32).tiny
    assert np.isfinite(step.out).all() and np.ptp(step.out) > 0


@pytest.mark.parametrize("seed", range(10))
def test_file_written_by_c(lib: Lib, tmp_path: Path, seed: int) -> None:
    path = tmp_path / "step.tlfx"
    done = run_tool("--write", path, seed)
    assert (done.returncode, done.stderr) == (0, "")
    data = path.read_bytes()
    step = decode(data)
    assert same_bits(step.out, expected(step))
    assert same_bits(step.out, by_library(lib, step))
    assert encode(step) == data


@pytest.mark.parametrize("seed", range(20, 30))
def test_c_reads_what_python_writes(tmp_path: Path, seed: int) -> None:
    r = Stream(seed).bits(8) >> np.uint64(8)
    kv_heads = 1 + int(r[0] % 3)
    ctx = [1 + int(n % 90) for n in r[1 : 2 + seed % 3]]
    step = make(
        seed, ctx, kv_heads * (1 + int(r[5] % 4)), kv_heads, 1 + int(r[6] % 50), 1 + int(r[7] % 20),
        window=0 if seed % 2 else 1 + int(r[4] % 40),
    )  # fmt: skip
    step.out = expected(step)
    path = tmp_path / "step.tlfx"
    path.write_bytes(encode(step))
    done = run_tool("--check", path)
    assert (done.returncode, done.stderr) == (0, "")

    step.out.view(np.uint32)[-1, -1, -1] ^= 1  # one wrong bit
    path.write_bytes(encode(step))
    done = run_tool("--check", path)
    assert done.returncode == 1 and str(path) in done.stderr


def _changed(data: bytes, at: int, value: bytes) -> bytes:
    body = data[:at] + value + data[at + len(value) : -4]
    return body + struct.pack("<I", crc32c(body))


_ONES: Final = b"\xff" * 4
BAD: Final[dict[str, Callable[[bytes], bytes]]] = {
    "magic": lambda d: _changed(d, 0, b"TLFY"),
    "version 2": lambda d: _changed(d, 4, b"\x02"),
    "arithmetic version 3": lambda d: _changed(d, 8, b"\x03"),
    "Hkv is 0": lambda d: _changed(d, 20, bytes(4)),
    "reserved": lambda d: _changed(d, 52, b"\x01"),
    "length": lambda d: _changed(d, 12, _ONES * 7),
    "length 755": lambda d: d[:755],
    "length 12049": lambda d: d + bytes(1),
    "checksum": lambda d: d[:100] + bytes([d[100] ^ 4]) + d[101:],
    "59 bytes": lambda d: d[:59],
    "0 bytes": lambda d: b"",
}


@pytest.mark.parametrize("says", BAD)
def test_bad_file_is_refused_by_both(tmp_path: Path, says: str) -> None:
    data = BAD[says](committed_bytes("gqa"))
    with pytest.raises(BadFixture, match=says):
        decode(data)
    path = tmp_path / "bad.tlfx"
    path.write_bytes(data)
    done = run_tool("--check", path)
    assert done.returncode == 1 and says in done.stderr


def test_every_truncation_and_bit_flip_is_refused() -> None:
    data = committed_bytes("smallest")
    for n in range(len(data)):
        with pytest.raises(BadFixture):
            decode(data[:n])
    for bit in range(8 * len(data)):
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BadFixture):
            decode(bytes(flipped))


def test_missing_file_and_unwritable_path_are_reported(tmp_path: Path) -> None:
    done = run_tool("--check", tmp_path / "none.tlfx")
    assert done.returncode == 1 and "cannot be read" in done.stderr
    done = run_tool("--write", tmp_path / "no" / "folder.tlfx")
    assert done.returncode == 1 and done.stderr


if __name__ == "__main__":
    for fixture_name in STEPS:
        (FOLDER / f"{fixture_name}.tlfx").write_bytes(committed_bytes(fixture_name))
        print(f"{fixture_name}.tlfx")
