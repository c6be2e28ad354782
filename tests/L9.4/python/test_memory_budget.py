# SPDX-License-Identifier: MIT
"""A cache that is given memory takes no more of it than that, and no more than there is; what free
blocks hold goes back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinyllm import (
    ConcurrentUseError,
    OutOfMemory,
    PagedKVCache,
    TlError,
    _cgroup,
    _machine,
)
from tinyllm.ffi.libtinyllm import Lib

GIB = 1 << 30
SIZES: dict[str, Any] = {"block_size": 16, "n_layers": 3, "n_kv_heads": 2, "d_head": 5}
# K and V of 3 layers, 2 heads, 16 positions: rows of 5 elements, or of 5 bytes and a scale of 4.
BLOCK_BYTES = {
    "float16": 2 * 3 * 2 * 16 * 5 * 2,
    "bfloat16": 2 * 3 * 2 * 16 * 5 * 2,
    "float32": 2 * 3 * 2 * 16 * 5 * 4,
    "int8": 2 * 3 * 2 * 16 * (5 + 4),
    "float8_e4m3fn": 2 * 3 * 2 * 16 * (5 + 4),
}


@pytest.fixture(autouse=True)
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Says what a made-up machine has free, and what its control group leaves. At first that is
    much."""

    def write(available: int, room: int) -> None:
        texts = {
            "proc/meminfo": f"MemTotal: {64 << 30} kB\nMemAvailable: {available >> 10} kB\n",
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": f"{room + GIB}\n",
            "sys/fs/cgroup/memory.current": f"{GIB}\n",
        }
        for name, text in texts.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)

    monkeypatch.setattr(_cgroup, "_ROOT", tmp_path)
    monkeypatch.setattr(_machine, "_MEMORY", tmp_path / "proc/meminfo")
    write(1 << 50, 1 << 50)
    return write


def blocks_of(lib: Lib, memory: Any, **options: Any) -> int:
    with PagedKVCache(lib=lib, memory=memory, **SIZES, **options) as cache:
        assert cache.nbytes == cache.num_blocks * lib.tl_kv_block_bytes(cache.pool)
        return cache.num_blocks


@pytest.mark.parametrize("dtype", BLOCK_BYTES)
def test_a_cache_has_the_most_blocks_that_fit(lib: Lib, dtype: str) -> None:
    one = BLOCK_BYTES[dtype]
    for memory, n in ((one, 1), (2 * one - 1, 1), (2 * one, 2), (100 * one + one // 2, 100)):
        assert blocks_of(lib, memory, dtype=dtype) == n
    assert blocks_of(lib, np.int64(7 * one), dtype=dtype) == 7
    with pytest.raises(ValueError, match=rf"memory = {one - 1} is less than the {one:,} bytes"):
        blocks_of(lib, one - 1, dtype=dtype)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4GiB", 4 * 1024**3),
        ("4 GiB", 4 * 1024**3),
        (" 100KiB ", 102400),
        ("1.5MiB", 1572864),
        ("0.001 TiB", 1099511627),
        ("0.0009TB", 900000000),
        ("30kB", 30000),
        ("3MB", 3000000),
        ("0.3GB", 300000000),
    ],
)
def test_a_text_is_a_number_and_a_unit(lib: Lib, text: str, nbytes: int) -> None:
    assert blocks_of(lib, text) == nbytes // BLOCK_BYTES["float16"]


@pytest.mark.parametrize(
    ("memory", "error", "said"),
    [
        (text, ValueError, "like '4GiB', not ")
        for text in (
            "", "4", "GiB", "4gib", "4 gb", "4Kb", "-4GiB", "4GiB!", "4 G", "1e3MB", "1,5GiB",
            "4\nGiB", "٤GiB", "inf GiB", "9" * 5000 + "GiB", "1.GiB",
        )
    ]
    + [
        ("0GiB", ValueError, "memory = 0 is outside 1 .. 9223372036854775807"),
        ("0.0001kB", ValueError, "memory = 0 is outside"),
        ("8388608TiB", ValueError, "memory = 9223372036854775808 is outside"),
        (0, ValueError, "memory = 0 is outside"),
        (-1, ValueError, "memory = -1 is outside"),
        (4.0, TypeError, "memory must be an integer, not 4.0"),
        (True, TypeError, "memory must be an integer, not True"),
        (b"4GiB", TypeError, "memory must be an integer, not b'4GiB'"),
    ],
)  # fmt: skip
def test_other_memory_is_refused(lib: Lib, memory: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=rf"^PagedKVCache: .*{said}"):
        blocks_of(lib, memory)


@pytest.mark.parametrize("mark", ["4", "4 gb", "-4GiB", -1, 4.0, True, b"4GiB"])
def test_another_mark_is_refused(lib: Lib, mark: Any) -> None:
    with pytest.raises((ValueError, TypeError), match=r"^PagedKVCache: trim_above "):
        PagedKVCache(lib=lib, num_blocks=1, trim_above=mark, **SIZES)


def test_blocks_or_memory_and_not_both(lib: Lib) -> None:
    with pytest.raises(TypeError, match="memory and num_blocks are given"):
        PagedKVCache(lib=lib, num_blocks=4, memory="1GiB", **SIZES)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="PagedKVCache: num_blocks must be given"):
        PagedKVCache(lib=lib, **SIZES)
    with pytest.raises(TypeError, match="PagedKVCache: d_head must be given"):
        PagedKVCache(memory="1GiB", block_size=1, n_layers=1, n_kv_heads=1)  # type: ignore[call-overload]


def test_more_than_the_machine_or_its_container_has_is_refused(
    lib: Lib, machine: Callable[[int, int], None]
) -> None:
    one = BLOCK_BYTES["float16"]
    for available, room in ((1 << 20, 1 << 40), (1 << 40, 1 << 20)):
        machine(available, room)
        fitting = (1 << 20) // one
        assert blocks_of(lib, fitting * one) == fitting
        with pytest.raises(
            OutOfMemory, match=r"memory = '2MiB' would take 2 MiB, .* 1 MiB to give"
        ):
            blocks_of(lib, "2MiB")
        with pytest.raises(MemoryError):
            blocks_of(lib, (fitting + 1) * one)
        assert blocks_of(lib, "2MiB", force=True) == (2 << 20) // one
        # Blocks that are counted are reserved, as ever: memory is taken when they are used.
        PagedKVCache(lib=lib, num_blocks=2 * fitting, **SIZES).close()


def test_a_machine_that_does_not_say_what_it_has_refuses_nothing(
    lib: Lib, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_cgroup, "_ROOT", tmp_path / "nothing")
    monkeypatch.setattr(_machine, "_MEMORY", tmp_path / "nothing")
    assert blocks_of(lib, "1GiB") == GIB // BLOCK_BYTES["float16"]


# --- giving back
# -------------------------------------------------------------------------------------------------

KIB_BLOCKS: dict[str, Any] = {"block_size": 16, "n_layers": 1, "n_kv_heads": 4, "d_head": 256}
BLOCK = 2 * 16 * 4 * 256 * 2  # 64 KiB


@pytest.fixture
def cache(lib: Lib) -> Iterator[PagedKVCache]:
    """40 blocks, of which "a" has had 8, "b" 4 and "c" 6."""
    with PagedKVCache(lib=lib, num_blocks=40, **KIB_BLOCKS) as cache:
        for seq, n in (("a", 8), ("b", 4), ("c", 6)):
            fill(cache, seq, n)
        yield cache


def fill(cache: PagedKVCache, seq: str, n_blocks: int) -> None:
    cache.add_seq(seq)
    cache.append(seq, 0, *np.ones((2, 4, 16 * n_blocks, 256), np.float16))


def is_about(given: int, n_blocks: int) -> bool:
    """Whether that many blocks were given back, of which a page at each end may not be theirs
    alone."""
    return (n_blocks - 1) * BLOCK < given <= n_blocks * BLOCK


def test_trim_gives_back_what_free_blocks_hold_once(cache: PagedKVCache) -> None:
    assert cache.resident_bytes == 18 * BLOCK
    assert cache.trim() == 0
    cache.free("a")
    assert cache.trim(keep=8) == 0
    cache.free("c")
    assert cache.resident_bytes == 18 * BLOCK
    assert is_about(cache.trim(keep=5), 9)
    assert cache.resident_bytes == (4 + 5) * BLOCK
    assert cache.trim(keep=5) == 0
    assert is_about(cache.trim(), 5)
    assert cache.trim() == 0
    assert cache.resident_bytes == 4 * BLOCK
    k, _ = cache.gather("b", 0)
    assert (k == 1).all()
    fill(cache, "d", 10)
    assert cache.resident_bytes == 14 * BLOCK
    k, _ = cache.gather("d", 0)
    assert (k == 1).all()


def test_trim_is_a_write_with_a_count_of_blocks(cache: PagedKVCache) -> None:
    for keep, error in ((-1, ValueError), (1 << 32, ValueError), (1.0, TypeError)):
        with pytest.raises(error, match=r"^trim: keep"):
            cache.trim(keep=keep)  # type: ignore[arg-type]
    with cache._handle.read(), pytest.raises(ConcurrentUseError):
        cache.trim()


@pytest.mark.parametrize("how", ["free", "truncate", "trim_front", "swap_out"])
def test_free_memory_past_the_mark_goes_back_by_itself_down_to_half(lib: Lib, how: str) -> None:
    with PagedKVCache(lib=lib, num_blocks=40, trim_above=6 * BLOCK, **KIB_BLOCKS) as cache:
        fill(cache, "a", 7)
        fill(cache, "b", 6)
        cache.free("b")
        assert cache.resident_bytes == 13 * BLOCK  # 6 free ones are not past it
        if how == "free":
            cache.free("a")
            left = 0
        elif how == "truncate":
            cache.truncate("a", 16 * 6)
            left = 6
        elif how == "trim_front":
            cache.trim_front("a", 16 * 6)
            left = 6
        else:
            cache.swap_out("a", {})
            left = 0
        assert cache.resident_bytes == (left + 3) * BLOCK
        assert is_about(cache.trim(), 3)


def test_without_a_mark_nothing_goes_back_and_with_0_all_does(lib: Lib) -> None:
    for mark, left in ((None, 9), (0, 0), ("1GiB", 9)):
        with PagedKVCache(lib=lib, num_blocks=40, trim_above=mark, **KIB_BLOCKS) as cache:
            fill(cache, "a", 9)
            cache.free("a")
            assert cache.resident_bytes == left * BLOCK


def test_what_was_freed_is_free_where_the_system_refuses_the_memory(lib: Lib) -> None:
    stubborn = Lib(lib.path)

    def refuse(*_: Any) -> None:
        raise TlError("tl_kv_trim", 10, "TL_EIO", "tl_kv_trim: no")

    vars(stubborn).update(tl_kv_trim=refuse)
    with PagedKVCache(lib=stubborn, num_blocks=40, trim_above=0, **KIB_BLOCKS) as cache:
        fill(cache, "a", 9)
        cache.free("a")
        assert cache.stats()["free"] == 40
        assert cache.resident_bytes == 9 * BLOCK
        with pytest.raises(TlError, match="TL_EIO"):
            cache.trim()


def test_the_process_is_smaller_after_a_trim(run_silently: Callable[..., str]) -> None:
    said = run_silently(
        """
import numpy as np
from tinyllm import PagedKVCache

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

rows = np.ones((2, 8, 1024, 128), np.float16)
with PagedKVCache(num_blocks=1000, block_size=64, n_layers=1, n_kv_heads=8, d_head=128) as cache:
    before = resident()
    cache.add_seq(0)
    for _ in range(16):  # 64 MiB
        cache.append(0, 0, *rows)
    grown = resident() - before
    cache.free(0)
    assert 63 << 20 < cache.trim() <= 64 << 20
    print(grown > 60 << 20, resident() - before < 8 << 20)
"""
    )
    assert said == "True True\n"
