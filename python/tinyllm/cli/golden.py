# SPDX-License-Identifier: MIT
"""What ``tinyllm selftest`` computes, and the digests it must give wherever numerics version 2
does.

A group feeds fixed numbers to an ``Engine`` and yields arrays; the SHA-256 of their bytes,
little-endian, is its digest. ``Library`` is the engine that runs the C code.
tests/L9.4/python/test_cli_golden.py has another one, ``tinyllm.reference``: the digests below are
what both of them give.

The numbers come from integers alone, scaled by powers of two: no library of mathematics and no
version of numpy has a say in them.
"""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

import tinyllm
from tinyllm.ffi.libtinyllm import Lib, f32_ptr, load, u32_ptr

Array = NDArray[Any]

NUMERICS_VERSION: Final = 2
THREADS: Final = (1, 2)
_MASK: Final = 2**64 - 1


# --- numbers
# ------------------------------------------------------------------------------------------------


class Numbers:
    """The numbers of splitmix64 from the (``seed`` * 2**32)-th on."""

    def __init__(self, seed: int) -> None:
        self._drawn = seed << 32

    def bits(self, *shape: int) -> NDArray[np.uint64]:
        """64 bits each."""
        n = int(np.prod(shape, dtype=np.int64))
        first = np.full(1, self._drawn, np.uint64)
        self._drawn += n
        z = (first + np.arange(n, dtype=np.uint64)) * np.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed: NDArray[np.uint64] = (z ^ (z >> np.uint64(31))).reshape(shape)
        return mixed

    def floats(self, *shape: int, fraction: int = 23) -> NDArray[np.float32]:
        """Of (-2, 2), with as many bits as ``fraction`` and a sign, times 1, 1/2, 1/4 or 1/8."""
        b = self.bits(*shape)
        whole = (b >> np.uint64(63 - fraction)).astype(np.int64) - (1 << fraction)
        step = np.array([2.0 / (1 << fraction + e) for e in range(4)], np.float32)
        value: NDArray[np.float32] = (
            whole.astype(np.float32) * step[(b & np.uint64(3)).astype(np.int64)]
        )
        return value

    def halves(self, *shape: int) -> NDArray[np.float16]:
        """``floats`` that a float16 holds."""
        return self.floats(*shape, fraction=10).astype(np.float16)

    def bf16(self, *shape: int) -> NDArray[np.uint16]:
        """``floats`` that a bfloat16 holds, as its codes."""
        upper = self.floats(*shape, fraction=7).view(np.uint32) >> np.uint32(16)
        codes: NDArray[np.uint16] = upper.astype(np.uint16)
        return codes

    def order(self, n: int) -> NDArray[np.int64]:
        """0 .. n - 1, shuffled."""
        return np.argsort(self.bits(n), kind="stable")

    def any_floats(self, n: int) -> NDArray[np.float32]:
        """Any bits at all, infinities, NaNs and subnormals among them."""
        value: NDArray[np.float32] = (
            (self.bits(n) >> np.uint64(32)).astype(np.uint32).view(np.float32)
        )
        return value


# --- engines
# ------------------------------------------------------------------------------------------------


class Engine(Protocol):
    """What can compute the groups.

    K and V of a sequence are [Hkv, T, D], of blocks [n_blocks, Hkv, b, D].
    """

    def decode(self, q: Array, kv: list[tuple[Array, Array]], scale: float, window: int) -> Array:
        """One new token of each sequence: q [B, H, D], K and V float16."""

    def paged(
        self, q: Array, k: Array, v: Array, tables: Array, lengths: Array, **options: Any
    ) -> list[Array]:
        """[out, lse] of ``paged_attention``; K and V float16, float32, or bfloat16 as uint16."""

    def flash(self, q: Array, k: Array, v: Array, **options: Any) -> list[Array]:
        """[out, lse] of ``flash_attention``."""

    def softmax(self, x: Array) -> list[Array]:
        """The softmax of rows and the online one."""

    def exp(self, x: Array) -> Array:
        """e^x."""

    def convert(self, name: str, x: Array) -> Array:
        """The conversion ``name``: "f32_to_f16" and the like."""

    def envelope(self, k: Array, v: Array, block_tokens: int, tokens: Array) -> bytes:
        """The export of a sequence, K, V float16 [layers, Hkv, T, D]; full blocks registered."""


class Library:
    """The C library, on so many threads."""

    def __init__(self, lib: Lib, threads: int) -> None:
        self._lib, self._threads = lib, threads

    def decode(self, q: Array, kv: list[tuple[Array, Array]], scale: float, window: int) -> Array:
        """Through a cache whose sequences grew side by side, over blocks that were used before."""
        (n_kv, _, width), batch, piece = kv[0][0].shape, range(len(kv)), 48
        longest = max(k.shape[1] for k, _ in kv)
        with tinyllm.PagedKVCache(
            self._lib, len(kv) * (longest // 16 + 2), 16, 2, n_kv, width
        ) as cache:
            for s in batch:
                cache.add_seq(s)
                cache.append(
                    s, 1, *(np.full((n_kv, 16 * (2 * s + 1), width), np.nan, np.float16),) * 2
                )
            for s in batch:
                cache.truncate(s, 0)
            for begin in range(0, longest, piece):
                for s, (k, v) in enumerate(kv):
                    if begin < k.shape[1]:
                        cache.append(s, 1, k[:, begin : begin + piece], v[:, begin : begin + piece])
            return tinyllm.paged_attention_decode(
                q, cache, list(batch), 1, scale=scale, window=window, threads=self._threads
            )

    def paged(
        self, q: Array, k: Array, v: Array, tables: Array, lengths: Array, **options: Any
    ) -> list[Array]:
        codes = "bfloat16" if k.dtype == np.uint16 else None
        view = tinyllm.KVView.from_arrays(k, v, dtype=codes, lib=self._lib)
        out = tinyllm.paged_attention(
            q, view, tables, lengths, return_lse=True, threads=self._threads, **options
        )
        return list(out)

    def flash(self, q: Array, k: Array, v: Array, **options: Any) -> list[Array]:
        with tinyllm.ThreadPool(self._threads, lib=self._lib) as pool:
            return list(tinyllm.flash_attention(q, k, v, return_lse=True, threads=pool, **options))

    def softmax(self, x: Array) -> list[Array]:
        results = []
        for call in (self._lib.tl_softmax_f32, self._lib.tl_softmax_online_f32):
            results.append(np.empty_like(x))
            call(f32_ptr(x), f32_ptr(results[-1]), *x.shape)
        return results

    def exp(self, x: Array) -> Array:
        y = np.empty_like(x)
        self._lib.tl_exp_f32(f32_ptr(x), f32_ptr(y), len(x))
        return y

    def convert(self, name: str, x: Array) -> Array:
        y = np.empty(len(x), _TYPES[name.split("_to_")[1]])
        getattr(self._lib, f"tl_{name}_n")(_pointer(x), _pointer(y), len(x))
        return y

    def envelope(self, k: Array, v: Array, block_tokens: int, tokens: Array) -> bytes:
        n_layers, n_kv, n, width = k.shape
        with tinyllm.PagedKVCache(self._lib, n, block_tokens, n_layers, n_kv, width) as cache:
            cache.add_seq(0)
            for layer in range(n_layers):
                cache.append(0, layer, k[layer], v[layer])
            table, parent = cache.block_table(0).astype(np.uint32), 0
            for i in range(n // block_tokens):
                part = tokens[i * block_tokens : (i + 1) * block_tokens]
                parent = self._lib.tl_kv_block_hash(parent, u32_ptr(part), block_tokens)
                self._lib.tl_kv_register(cache.pool, int(table[i]), parent)
            size, written = (
                self._lib.tl_kv_export_bytes(cache.pool, len(table)),
                np.zeros(1, np.uintp),
            )
            data = np.empty(size, np.uint8)
            self._lib.tl_kv_export(
                cache.pool, u32_ptr(table), len(table), data.ctypes.data, size, _pointer(written)
            )
            return data[: written[0]].tobytes()


_TYPES: Final = {
    "f32": np.float32, "f16": np.uint16, "bf16": np.uint16, "e4m3": np.uint8, "e5m2": np.uint8,
}  # fmt: skip


def _pointer(a: Array) -> Any:
    return f32_ptr(a) if a.dtype == np.float32 else np.ctypeslib.as_ctypes(a)


def _scale(width: int) -> float:
    """Near width ** -0.5, from integers: a power of two."""
    return 2.0 ** -((width.bit_length() + 1) // 2)


# --- groups
# -------------------------------------------------------------------------------------------------


def decode(engine: Engine, seed: int, *, width: int, heads: int, kv_heads: int) -> Iterator[Array]:
    """Ragged contexts, one of more than a split, without a window and with two."""
    numbers = Numbers(seed)
    lengths = (1, 33, 1090, 250)
    kv = [(numbers.halves(kv_heads, n, width), numbers.halves(kv_heads, n, width)) for n in lengths]
    q = 4 * numbers.floats(len(lengths), heads, width)
    for window in (0, 1, 77):
        yield engine.decode(q, kv, _scale(width), window)


def chunks(
    engine: Engine, seed: int, *, kind: str, widths: tuple[int, int], options: Mapping[str, float]
) -> Iterator[Array]:
    """Rows of prompts, drafts and decode in one call, over shuffled blocks of ten.

    ``options`` are those of paged_attention; slopes and sinks are drawn where they are named.
    """
    numbers, heads, kv_heads, block = Numbers(seed), 4, 2, 10
    lengths = np.array([1047, 7, 64, 50], np.int32)
    starts = np.array([0, 3, 3, 4, 13], np.int32)
    n = -(-int(lengths.max()) // block)
    tables = numbers.order(len(lengths) * n).astype(np.int32).reshape(len(lengths), n)
    kinds: dict[str, Callable[..., Array]] = {
        "float16": numbers.halves,
        "float32": numbers.floats,
        "bfloat16": numbers.bf16,
    }
    k, v = (kinds[kind](tables.size, kv_heads, block, width) for width in widths)
    q = 4 * numbers.floats(int(starts[-1]), heads, widths[0])
    given: dict[str, Any] = {"scale": _scale(widths[0]), "cu_seqlens_q": starts, **options}
    given |= {
        name: 2 * numbers.floats(heads)
        for name in ("alibi_slopes", "sink_logits")
        if name in options
    }
    yield from engine.paged(q, k, v, tables, lengths, **given)


def stretches(engine: Engine, seed: int) -> Iterator[Array]:
    """Rows that cross three stretches and two; through a window, a part of the first.

    Tables name 37 blocks of 96 positions over and over.
    """
    numbers, blocks = Numbers(seed), 37
    k, v = (numbers.halves(blocks, 1, 96, 8) for _ in range(2))
    q = 4 * numbers.floats(3, 2, 8)
    lengths = np.array([35000, 18500], np.int32)
    tables = np.stack([np.arange(365, dtype=np.int32) * step % blocks for step in (5, 11)])
    given: dict[str, Any] = {"scale": _scale(8), "cu_seqlens_q": np.array([0, 2, 3], np.int32)}
    yield from engine.paged(q, k, v, tables, lengths, **given)
    given |= {"window": 19000, "softcap": 3.0, "sink_logits": numbers.floats(2)}
    yield from engine.paged(q, k, v, tables, lengths, **given)


def prefill(engine: Engine, seed: int) -> Iterator[Array]:
    """Contiguous K and V: causal and not, at an offset, windowed, with sinks; on any bits."""
    numbers, shape = Numbers(seed), (2, 2, 45, 40)
    q, k, v = 4 * numbers.floats(2, 4, 9, 40), numbers.floats(*shape), numbers.floats(*shape)
    options: dict[str, Any] = {"scale": _scale(40), "causal": True, "q_offset": 36, "window": 0}
    yield from engine.flash(q, k, v, **options)
    yield from engine.flash(q, k, v, **options | {"causal": False, "q_offset": 0})
    yield from engine.flash(q, k, v, **options | {"window": 20, "sink_logits": numbers.floats(4)})
    wild = [numbers.any_floats(a.size).reshape(a.shape) for a in (q, k, v)]
    yield from engine.flash(*wild, **options)


def softmax(engine: Engine, seed: int) -> Iterator[Array]:
    """Rows around one tile and many, with -inf, and rows of any bits at all."""
    numbers = Numbers(seed)
    for columns in (1, 15, 16, 17, 1000):
        x = 8 * numbers.floats(5, columns)
        x[1, :: columns // 2 + 1] = -np.inf
        x[2] = -np.inf
        x[3] = numbers.any_floats(columns)
        yield from engine.softmax(x)


def exp(engine: Engine, seed: int) -> Iterator[Array]:
    """Floats of every exponent, and a million whose e^x is mostly an ordinary number."""
    numbers = Numbers(seed)
    yield engine.exp(numbers.any_floats(20000))
    yield engine.exp(64 * numbers.floats(1 << 20))


def conversions(engine: Engine, seed: int) -> Iterator[Array]:
    """Every code of the small formats; and floats, those halfway between two codes included."""
    numbers = Numbers(seed)
    x = np.concatenate(
        (numbers.any_floats(20000), numbers.floats(20000), 512 * numbers.floats(20000))
    )
    halfway = (numbers.bits(20000) >> np.uint64(32)).astype(np.uint32)
    halfway &= np.array([0xFFFFF000, 0xFFFF8000, 0xFFF80000, 0xFFF00000], np.uint32).repeat(5000)
    x = np.concatenate((x, halfway.view(np.float32)))
    for name, codes in (("f16", 2**16), ("bf16", 2**16), ("e4m3", 2**8), ("e5m2", 2**8)):
        yield engine.convert(f"f32_to_{name}", x)
        wide = engine.convert(f"{name}_to_f32", np.arange(codes).astype(_TYPES[name]))
        yield np.where(np.isnan(wide), np.float32(0), wide)  # which NaN it is, is not promised
        yield np.isnan(wide).astype(np.uint8)


def envelope(engine: Engine, seed: int) -> Iterator[Array]:
    """The bytes of an export, its checksum included."""
    numbers, shape = Numbers(seed), (2, 2, 21, 24)
    tokens = (numbers.bits(21) >> np.uint64(44)).astype(np.uint32)
    data = engine.envelope(numbers.halves(*shape), numbers.halves(*shape), 8, tokens)
    yield np.frombuffer(data, np.uint8)


_EVERYTHING: Final[Mapping[str, float]] = {
    "window": 1030,
    "softcap": 2.5,
    "alibi_slopes": 1,
    "sink_logits": 1,
}

GROUPS: Final[dict[str, Callable[[Engine, int], Iterable[Array]]]] = {
    "decode D=40": partial(decode, width=40, heads=3, kv_heads=1),
    "decode D=64": partial(decode, width=64, heads=4, kv_heads=2),
    "decode D=80": partial(decode, width=80, heads=2, kv_heads=2),
    "decode D=128": partial(decode, width=128, heads=8, kv_heads=1),
    "chunks f16": partial(chunks, kind="float16", widths=(64, 64), options={}),
    "chunks f16, every option": partial(
        chunks, kind="float16", widths=(80, 80), options=_EVERYTHING
    ),
    "chunks bf16, softcap": partial(
        chunks, kind="bfloat16", widths=(64, 64), options={"softcap": 1.5}
    ),
    "chunks f32, Dk != Dv": partial(
        chunks, kind="float32", widths=(72, 40), options={"alibi_slopes": 1}
    ),
    "prefill": prefill,
    "softmax": softmax,
    "exp": exp,
    "conversions": conversions,
    "export": envelope,
    "two and three stretches": stretches,
}


def digest(arrays: Iterable[Array]) -> str:
    """SHA-256 of the bytes of all, little-endian, in hexadecimal."""
    sha = hashlib.sha256()
    for a in arrays:
        sha.update(np.ascontiguousarray(a, a.dtype.newbyteorder("<")).tobytes())
    return sha.hexdigest()


def compute(engine: Engine) -> dict[str, str]:
    """The digest of every group."""
    return {
        name: digest(group(engine, seed)) for seed, (name, group) in enumerate(GROUPS.items(), 1)
    }


DIGESTS: Final[dict[str, str]] = {
    "decode D=40": "cc71f1f9e0e9cab0a2e53f44891b752c1b8ff5570ec176e4130050dd15a01be7",
    "decode D=64": "67e253dfee2d9b38c001afa195683e39db839129484ccbb9fa07ff08cbbff74e",
    "decode D=80": "b6ec9d9777cd2702e3c73b0b60b27e9da2d536583f336a493148c58393b0d8ef",
    "decode D=128": "7616886f7ee243f5ed4a60dc84ddf54762cbecc3b1a2f3b01e4fed6041e1634e",
    "chunks f16": "9ad42ce4aae336179be9e63707b1b5d5d603917ff83b08b754fe608526d065ba",
    "chunks f16, every option": "2d403a2093f0f722f6e3441f0bc9228c2c0217ba3575c0d9edf8cd0a4a4ea047",
    "chunks bf16, softcap": "897742e8a7beecd764cd90ec6747f7c2e4186272bdd61694e27a29a96ca2dca6",
    "chunks f32, Dk != Dv": "e9c33986f58f3117a2315eddfe43fa6afb0c9df8ed143f9fc2ca76d74d6bad13",
    "prefill": "7467f9ac9742eaa701c202de5aabf73204230cb4e23351001f195970a571e5cb",
    "softmax": "88804f34dbb91410abff5cf10c55645d5220e83174a15320d40c100191e30279",
    "exp": "05063df976e80ba43b58711bdde5adad54be361613038db66f610222939c75a7",
    "conversions": "b202ebc4aa27454cd1a524705152315fbd1cc1d5941f747fd39f9c5d0ba2dbee",
    "export": "f3297e6365ddbc05c54a15460840273a1ae4b1c789bbd760d4b95c7d01baa2ed",
    "two and three stretches": "1fa83c4fe387c22c55b6bb12640ddd25569f06e2482f496f0617de8b3be87dd9",
}


def main() -> None:
    """For a process of its own, since an instruction set is chosen once: prints its digests."""
    lib = load()
    warnings.filterwarnings("ignore", "append: .* has nothing for")  # NaN is appended on purpose
    digests = {threads: compute(Library(lib, threads)) for threads in THREADS}
    print(json.dumps({"isa": lib.tl_isa_name().decode(), "digests": digests}), flush=True)
