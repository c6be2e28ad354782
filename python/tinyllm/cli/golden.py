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
_E4M3: Final = "float8_e4m3fn"


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

    def eights(self, kind: str, *shape: int) -> Array:
        """Codes of int8, or of float8_e4m3fn as uint8 and without NaN."""
        codes: Array = (self.bits(*shape) >> np.uint64(56)).astype(np.uint8)
        return codes.view(np.int8) if kind == "int8" else codes - (codes & 0x7F == 0x7F)

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

    def decode(
        self, q: Array, kv: list[tuple[Array, Array]], scale: float, window: int, dtype: str
    ) -> Array:
        """One new token of each sequence: q [B, H, D], K and V float16, or float32 to be stored as
        ``dtype``."""

    def rows(self, dtype: str, k: Array, v: Array) -> list[Array]:
        """What a cache of ``dtype`` holds of float32 K and V, as it reads it back; of eight bits
        the codes and the scales too."""

    def write(self, x: Array, scale: np.float32) -> Array:
        """Codes of e4m3 that rows float32 [T, D] become in a view with this one scale."""

    def paged(
        self, q: Array, k: Array, v: Array, tables: Array, lengths: Array, **options: Any
    ) -> list[Array]:
        """[out, lse] of ``paged_attention``; K and V float16, float32, bfloat16 as uint16, int8, or
        e4m3 as uint8, the last two with k_scale and v_scale."""

    def flash(self, q: Array, k: Array, v: Array, **options: Any) -> list[Array]:
        """[out, lse] of ``flash_attention``."""

    def softmax(self, x: Array) -> list[Array]:
        """The softmax of rows and the online one."""

    def exp(self, x: Array) -> Array:
        """e^x."""

    def convert(self, name: str, x: Array) -> Array:
        """The conversion ``name``: "f32_to_f16" and the like."""

    def envelope(self, k: Array, v: Array, block_tokens: int, tokens: Array, dtype: str) -> bytes:
        """The export of a sequence, K and V [layers, Hkv, T, D] of float16, or float32 to be stored
        as ``dtype``; full blocks registered."""


class Library:
    """The C library, on so many threads."""

    def __init__(self, lib: Lib, threads: int) -> None:
        self._lib, self._threads = lib, threads

    def decode(
        self, q: Array, kv: list[tuple[Array, Array]], scale: float, window: int, dtype: str
    ) -> Array:
        """Through a cache whose sequences grew side by side, over blocks that were used before."""
        (n_kv, _, width), batch, piece = kv[0][0].shape, range(len(kv)), 48
        longest = max(k.shape[1] for k, _ in kv)
        with tinyllm.PagedKVCache(
            self._lib, len(kv) * (longest // 16 + 2), 16, 2, n_kv, width, dtype=dtype
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

    def rows(self, dtype: str, k: Array, v: Array) -> list[Array]:
        n_kv, n, width = k.shape
        with tinyllm.PagedKVCache(self._lib, n, 16, 1, n_kv, width, dtype=dtype) as cache:
            cache.add_seq(0)
            cache.append(0, 0, k, v)
            codes = cache.gather_codes(0, 0) if dtype in ("int8", _E4M3) else ()
            return [*cache.gather(0, 0), *codes]

    def write(self, x: Array, scale: np.float32) -> Array:
        codes: Array = np.zeros((1, 1, *x.shape), np.uint8)
        one = np.full((1, 1, 1), scale)
        view = tinyllm.KVView.from_arrays(
            codes, codes.copy(), dtype=_E4M3, k_scale=one, v_scale=one, lib=self._lib
        )
        view.write_slots(np.arange(len(x)), x[:, None], x[:, None])
        return codes.reshape(x.shape)

    def paged(
        self, q: Array, k: Array, v: Array, tables: Array, lengths: Array, **options: Any
    ) -> list[Array]:
        held = {"uint16": "bfloat16", "uint8": _E4M3}.get(k.dtype.name)
        scales = {name: options.pop(name, None) for name in ("k_scale", "v_scale")}
        view = tinyllm.KVView.from_arrays(k, v, dtype=held, lib=self._lib, **scales)
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

    def envelope(self, k: Array, v: Array, block_tokens: int, tokens: Array, dtype: str) -> bytes:
        n_layers, n_kv, n, width = k.shape
        with tinyllm.PagedKVCache(
            self._lib, n, block_tokens, n_layers, n_kv, width, dtype=dtype
        ) as cache:
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


def decode(
    engine: Engine, seed: int, *, width: int, heads: int, kv_heads: int, dtype: str = "float16"
) -> Iterator[Array]:
    """Ragged contexts, one of more than a split, without a window and with two."""
    numbers = Numbers(seed)
    lengths = (1, 33, 1090, 250)
    draw: Callable[..., Array] = numbers.halves if dtype == "float16" else numbers.floats
    kv = [(draw(kv_heads, n, width), draw(kv_heads, n, width)) for n in lengths]
    q = 4 * numbers.floats(len(lengths), heads, width)
    for window in (0, 1, 77):
        yield engine.decode(q, kv, _scale(width), window, dtype)


def rows(engine: Engine, seed: int, *, dtype: str) -> Iterator[Array]:
    """Rows of every size, and of any bits at all, stored and read back."""
    numbers, size = Numbers(seed), np.ldexp(np.float32(1), np.arange(-126, 127))
    for k, v in (
        (numbers.floats(2, len(size), 24) * size[:, None] for _ in "kv"),
        (numbers.any_floats(2 * 150 * 8).reshape(2, 150, 8) for _ in "kv"),
    ):
        for stored in engine.rows(dtype, k, v):
            broken = np.isnan(stored)
            yield np.where(broken, stored.dtype.type(0), stored)  # which NaN, is not promised
            yield broken.astype(np.uint8)
    if dtype == _E4M3:
        x = np.concatenate((256 * numbers.floats(50, 24), numbers.any_floats(480).reshape(20, 24)))
        yield engine.write(x, np.float32(0.75))


def chunks(
    engine: Engine,
    seed: int,
    *,
    kind: str,
    widths: tuple[int, int],
    options: Mapping[str, float],
    scales: str = "",
) -> Iterator[Array]:
    """Rows of prompts, drafts and decode in one call, over shuffled blocks of ten.

    ``options`` are those of paged_attention; slopes and sinks are drawn where they are named.
    scales: of eight bits, which of the axes block, head and slot have several, as in "bhs".
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
        "int8": partial(numbers.eights, "int8"),
        _E4M3: partial(numbers.eights, _E4M3),
    }
    k, v = (kinds[kind](tables.size, kv_heads, block, width) for width in widths)
    q = 4 * numbers.floats(int(starts[-1]), heads, widths[0])
    given: dict[str, Any] = {"scale": _scale(widths[0]), "cu_seqlens_q": starts, **options}
    if kind in ("int8", _E4M3):
        axes = dict(zip("bhs", k.shape, strict=False))
        shape = [n if axis in scales else 1 for axis, n in axes.items()]
        part = np.float32(1 / 32 if kind == "int8" else 1 / 128)
        given |= {name: part * np.abs(numbers.floats(*shape)) for name in ("k_scale", "v_scale")}
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


def envelope(engine: Engine, seed: int, *, dtypes: Iterable[str], width: int) -> Iterator[Array]:
    """The bytes of an export, its checksum included."""
    numbers, shape = Numbers(seed), (2, 2, 21, width)
    tokens = (numbers.bits(21) >> np.uint64(44)).astype(np.uint32)
    for dtype in dtypes:
        draw: Callable[..., Array] = numbers.halves if dtype == "float16" else numbers.floats
        data = engine.envelope(draw(*shape), draw(*shape), 8, tokens, dtype)
        yield np.frombuffer(data, np.uint8)


_SHORT: Final = {
    "f16": "float16", "bf16": "bfloat16", "f32": "float32", "int8": "int8", "e4m3": _E4M3
}  # fmt: skip
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
    "export": partial(envelope, dtypes=("float16",), width=24),
    "two and three stretches": stretches,
    **{f"rows {short}": partial(rows, dtype=dtype) for short, dtype in _SHORT.items()},
    "decode bf16": partial(decode, width=40, heads=4, kv_heads=2, dtype="bfloat16"),
    "decode f32": partial(decode, width=64, heads=3, kv_heads=1, dtype="float32"),
    "decode int8": partial(decode, width=72, heads=4, kv_heads=2, dtype="int8"),
    "decode e4m3": partial(decode, width=64, heads=8, kv_heads=1, dtype=_E4M3),
    "chunks int8, every option": partial(
        chunks, kind="int8", widths=(80, 40), options=_EVERYTHING, scales="bhs"
    ),
    "chunks e4m3, one scale": partial(chunks, kind=_E4M3, widths=(64, 64), options={}),
    "chunks e4m3, per position": partial(
        chunks, kind=_E4M3, widths=(40, 72), options={"softcap": 1.5}, scales="bs"
    ),
    "export of other formats": partial(envelope, dtypes=[*_SHORT.values()][1:], width=5),
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
    "rows f16": "08574b44e646f44c1c2d71854506dd5a0a789fc5274be480f6022aaa4364c2d3",
    "rows bf16": "b164b727608871bda558130e137de6ebd764ad730972774abad3929430086854",
    "rows f32": "0294679192d5d6a8de07b20f892dc925e73824dfb989a9319a0e94e6a86a7607",
    "rows int8": "2895f15a8a154c4a0b1ced065bf29239c0ae621f448363d6af4ee7c4b83b95d9",
    "rows e4m3": "448d0344a9c17d29152212ca9b55e54df4f88f16256a8894abb2373143b753ae",
    "decode bf16": "2f3cb5fb5bba7b721b87fafa7a345a37c55954e09a8ce48455406cc7050a832f",
    "decode f32": "8dd9f4b2e25904da436570139f0efa0f3022374c306a62feb7626d774b37e48d",
    "decode int8": "0e5802b388f578506cabf9d943610b0905db422e6f1de847ce5f9a0957554bcf",
    "decode e4m3": "4175a32f7585bd4f223a4b5652744d618068b3f89119ed261470397239f127fb",
    "chunks int8, every option": "575180b394e76858a08b8eba5979546ac6671850f7692cc8476f37040caee9c1",
    "chunks e4m3, one scale": "a1e8d73e4bc345395ea5336701938866f5209d7a908a08e8899304c653870070",
    "chunks e4m3, per position": "57fb0f00684cc0ea2b8c0d2b959d7f123159a31effec3c67ab11d57735ae15bb",
    "export of other formats": "0ffafc7141599efd672c981084f9152fe03b2b0532dd06b92ecfb67c202ebbb1",
}


def main() -> None:
    """For a process of its own, since an instruction set is chosen once: prints its digests."""
    lib = load()
    warnings.filterwarnings("ignore", "append: .* has nothing for")  # NaN is appended on purpose
    digests = {threads: compute(Library(lib, threads)) for threads in THREADS}
    print(json.dumps({"isa": lib.tl_isa_name().decode(), "digests": digests}), flush=True)
