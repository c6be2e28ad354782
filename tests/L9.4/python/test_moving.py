# SPDX-License-Identifier: MIT
"""A sequence leaves a cache as bytes and comes back anywhere with every bit; no bytes do harm."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tinyllm import OutOfBlocks, PagedKVCache, paged_attention_decode
from tinyllm.ffi.libtinyllm import Lib

LAYERS, HEADS, BLOCK, WIDTH = 2, 2, 4, 3


def make(
    lib: Lib, num_blocks: int = 8, block_size: int = BLOCK, width: int = WIDTH
) -> PagedKVCache:
    return PagedKVCache(lib, num_blocks, block_size, LAYERS, HEADS, width)


def filled(lib: Lib, n_tokens: int, num_blocks: int = 8) -> PagedKVCache:
    """A cache whose sequence "a" holds n_tokens positions, in blocks that are not in order."""
    cache, rng = make(lib, num_blocks), np.random.default_rng(n_tokens)
    cache.add_seq("other")
    cache.append("other", 0, *rng.standard_normal((2, HEADS, BLOCK + 1, WIDTH), np.float32))
    cache.add_seq("a")
    for layer in range(LAYERS):
        cache.append("a", layer, *rng.standard_normal((2, HEADS, n_tokens, WIDTH), np.float32))
    cache.free("other")
    return cache


@pytest.mark.parametrize("n_tokens", [1, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK, 4 * BLOCK - 1])
def test_a_sequence_comes_back_bit_for_bit_and_goes_on(lib: Lib, n_tokens: int) -> None:
    with filled(lib, n_tokens) as here, make(lib, 5) as there:
        there.add_seq("in the way")
        there.append("in the way", 0, *np.ones((2, HEADS, 1, WIDTH), np.float32))
        there.import_seq("b", here.export_seq("a"))
        more = np.random.default_rng(0).standard_normal((2, HEADS, 1, WIDTH), np.float32)
        q = np.random.default_rng(1).standard_normal((1, 4, WIDTH), np.float32)
        for layer in range(LAYERS):
            assert there.seq_len("b", layer) == n_tokens
            for mine, its in zip(here.gather("a", layer), there.gather("b", layer), strict=True):
                np.testing.assert_array_equal(mine.view(np.uint16), its.view(np.uint16))
            here.append("a", layer, *more)
            there.append("b", layer, *more)
            mine, its = (
                paged_attention_decode(q, c, [s], layer) for c, s in ((here, "a"), (there, "b"))
            )
            np.testing.assert_array_equal(mine.view(np.uint32), its.view(np.uint32))


def test_equal_sequences_give_equal_bytes_of_the_documented_size(lib: Lib) -> None:
    with filled(lib, 6) as one, filled(lib, 6, num_blocks=20) as two:
        two.fork("a", "b")
        payload = LAYERS * 2 * HEADS * BLOCK * WIDTH * 2
        envelope = one.export_seq("a")
        assert envelope == two.export_seq("b")
        assert len(envelope) == 28 + 2 * (12 + payload) + 4
        assert struct.unpack_from("<4sHH", envelope) == (b"TLKV", 1, 1)


def test_imported_blocks_belong_to_the_sequence_alone(lib: Lib) -> None:
    with filled(lib, 6) as here, make(lib) as there:
        envelope = here.export_seq("a")
        there.import_seq("b", envelope)
        there.import_seq("c", memoryview(bytes(envelope)))
        assert there.stats()["used"] == 4
        assert there.snapshot().high_water == 4
        there.free("b")
        there.free("c")
        assert there.stats()["free"] == 8


def test_what_is_no_whole_sequence_is_not_exported(lib: Lib) -> None:
    with make(lib) as cache:
        with pytest.raises(KeyError, match="export_seq: no sequence 'a'"):
            cache.export_seq("a")
        cache.add_seq("a")
        with pytest.raises(
            ValueError, match="export_seq: the layers of sequence 'a' hold 0 to 0 positions"
        ):
            cache.export_seq("a")
        cache.append("a", 0, *np.ones((2, HEADS, 9, WIDTH), np.float32))
        with pytest.raises(ValueError, match="hold 0 to 9 positions"):
            cache.export_seq("a")
        cache.append("a", 1, *np.ones((2, HEADS, 9, WIDTH), np.float32))
        cache.trim_front("a", 2)
        with pytest.raises(ValueError, match="export_seq"):
            cache.export_seq("a")


def of(lib: Lib, fills: list[int]) -> bytearray:
    """A sound envelope whose blocks hold these many positions; 0 blocks too."""
    with filled(lib, BLOCK * max(len(fills), 1)) as cache:
        envelope = cache.export_seq("a")
    record = 12 + LAYERS * 2 * HEADS * BLOCK * WIDTH * 2
    envelope = envelope[: 28 + record * len(fills)]
    struct.pack_into("<I", envelope, 8, len(fills))
    for i, fill in enumerate(fills):
        struct.pack_into("<I", envelope, 28 + i * record + 8, fill)
    return envelope + struct.pack("<I", lib.tl_crc32c(bytes(envelope), len(envelope), 0))


@pytest.mark.parametrize("fills", [[], [1, 1], [4, 3, 4], [4, 4, 1, 2]])
def test_blocks_of_no_sequence_are_refused_and_nothing_has_changed(
    lib: Lib, fills: list[int]
) -> None:
    with filled(lib, 5) as cache:
        before = cache.snapshot()
        with pytest.raises(
            ValueError, match=f"import_seq: {len(fills)} blocks with .* no sequence's"
        ):
            cache.import_seq("b", of(lib, fills))
        assert cache.snapshot() == before
        cache.add_seq("b")  # the name is still free


def test_an_envelope_made_by_hand_is_taken(lib: Lib) -> None:
    with make(lib) as cache:
        cache.import_seq("b", of(lib, [4, 4, 3]))
        assert cache.seq_len("b", 1) == 11


def test_other_sizes_a_live_name_and_a_full_pool_are_refused_and_nothing_has_changed(
    lib: Lib,
) -> None:
    wide, long = make(lib, width=5), make(lib, block_size=8)
    with filled(lib, 9) as here, make(lib, 2) as small, wide, long:
        envelope = here.export_seq("a")
        with pytest.raises(ValueError, match=r"import_seq: .*'a'"):
            here.import_seq("a", envelope)
        with pytest.raises(OutOfBlocks, match="import_seq: sequence 'b'"):
            small.import_seq("b", envelope)
        assert small.stats()["free"] == 2
        assert small.snapshot().failed_allocations == 1
        for other in (wide, long):
            with pytest.raises(ValueError, match="import_seq"):
                other.import_seq("b", envelope)
            assert other.stats()["free"] == 8
        with pytest.raises(TypeError):
            here.import_seq("b", "text")  # type: ignore[arg-type]


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_damaged_bytes_raise_and_change_nothing(lib: Lib, data: st.DataObject) -> None:
    with filled(lib, 7) as cache:
        envelope = cache.export_seq("a")
        kind = data.draw(st.sampled_from(["flip", "cut", "longer", "noise"]))
        if kind == "flip":
            bit = data.draw(st.integers(0, 8 * len(envelope) - 1))
            envelope[bit // 8] ^= 1 << bit % 8
        elif kind == "cut":
            del envelope[data.draw(st.integers(0, len(envelope) - 1)) :]
        elif kind == "longer":
            envelope += data.draw(st.binary(min_size=1, max_size=40))
        else:
            envelope = bytearray(data.draw(st.binary(max_size=200)))
        before = cache.snapshot()
        with pytest.raises(ValueError, match="import_seq"):
            cache.import_seq("b", envelope)
        assert cache.snapshot() == before
