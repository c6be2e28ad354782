# SPDX-License-Identifier: MIT
"""What numerics version 2 left as it was: rows that see positions of one stretch have the bits of
version 1, in ``tinyllm.reference`` and in the library."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any, Final

import numpy as np
import pytest
from numpy.typing import NDArray
from test_cli_golden import Exact
from tinyllm import reference
from tinyllm.cli import golden
from tinyllm.ffi.libtinyllm import Lib

Array = NDArray[Any]
STRETCH: Final = reference.STRETCH

# Fixed by numerics version 1, by its reference and its library: the groups of ``tinyllm selftest``
# that attend, none of whose rows goes beyond one stretch ...
SELFTEST: Final = {
    "decode D=40": "cc71f1f9e0e9cab0a2e53f44891b752c1b8ff5570ec176e4130050dd15a01be7",
    "decode D=64": "67e253dfee2d9b38c001afa195683e39db839129484ccbb9fa07ff08cbbff74e",
    "decode D=80": "b6ec9d9777cd2702e3c73b0b60b27e9da2d536583f336a493148c58393b0d8ef",
    "decode D=128": "7616886f7ee243f5ed4a60dc84ddf54762cbecc3b1a2f3b01e4fed6041e1634e",
    "chunks f16": "9ad42ce4aae336179be9e63707b1b5d5d603917ff83b08b754fe608526d065ba",
    "chunks f16, every option": "2d403a2093f0f722f6e3441f0bc9228c2c0217ba3575c0d9edf8cd0a4a4ea047",
    "chunks bf16, softcap": "897742e8a7beecd764cd90ec6747f7c2e4186272bdd61694e27a29a96ca2dca6",
    "chunks f32, Dk != Dv": "e9c33986f58f3117a2315eddfe43fa6afb0c9df8ed143f9fc2ca76d74d6bad13",
    "prefill": "7467f9ac9742eaa701c202de5aabf73204230cb4e23351001f195970a571e5cb",
}

# ... and rows that fill a stretch to its last position, or see a part of a later one: context
# length, window, digest of (out, lse).
AT_THE_EDGES: Final = {
    "the first stretch whole": (
        STRETCH,
        0,
        "3c716449cd03320873e7c1a427948fe2fd67f362db13ad4bfaf8e60e470ae7d4",
    ),
    "its last splits": (
        STRETCH,
        3000,
        "9ab0a2e32ca04de15199dee84c04560798185ea417e4428aa8efc670e20a5312",
    ),
    "the second from its first position on": (
        STRETCH + 2500,
        2500,
        "13b47f1b1e043100da8ea69008c0d65d4d83d6999808ff3172d11df5848f3272",
    ),
    "the third whole": (
        3 * STRETCH,
        STRETCH,
        "b998d3a247714e8f180feb3ff983a9e7f0ed86b7e6ecc9ee3f92d7567ae785b5",
    ),
    "the middle of the third": (
        2 * STRETCH + 9000,
        5000,
        "d09ba96349eec507cd587f45c405b5d541371b7716e5a1f5447653db77435c30",
    ),
}


def edge(engine: golden.Engine, ctx: int, window: int) -> Iterator[Array]:
    """A row of two heads whose keys and values repeat: tables name 31 blocks over and over."""
    numbers = golden.Numbers(ctx + window)
    k, v = (numbers.halves(31, 1, 64, 5) for _ in range(2))
    q = 4 * numbers.floats(1, 2, 5)
    tables = (np.arange(-(-ctx // 64), dtype=np.int32) * 7 % 31)[None]
    options: dict[str, Any] = {"window": window, "scale": 0.5, "sink_logits": numbers.floats(2)}
    yield from engine.paged(q, k, v, tables, np.array([ctx], np.int32), **options)


@pytest.mark.parametrize("name", SELFTEST)
def test_selftest_groups_of_one_stretch_keep_their_digests(name: str) -> None:
    """test_cli_golden.py and ``tinyllm selftest`` hold both engines to golden.DIGESTS."""
    assert golden.DIGESTS[name] == SELFTEST[name]


@pytest.mark.parametrize("name", AT_THE_EDGES)
@pytest.mark.parametrize("engine", ["reference", "library"])
def test_rows_of_one_stretch_keep_the_bits_of_version_1(lib: Lib, engine: str, name: str) -> None:
    ctx, window, digest = AT_THE_EDGES[name]
    made: dict[str, Any] = {"reference": Exact, "library": partial(golden.Library, lib, 1)}
    assert golden.digest(edge(made[engine](), ctx, window)) == digest
