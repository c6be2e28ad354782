# SPDX-License-Identifier: MIT
"""One rule for arrays in every function: memory is read where it lies, anything else that is real
numbers is converted once, and what is none is refused in words."""

from __future__ import annotations

import array
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays as np_arrays
from numpy.typing import NDArray
from tinyllm import (
    KVView,
    PagedKVCache,
    flash_attention,
    merge_states,
    paged_attention,
    paged_attention_decode,
    paged_attention_states,
)

F32 = np.dtype(np.float32)


def numbers(*shape: int, seed: int = 1) -> NDArray[np.float32]:
    """Small integers, which every type here holds."""
    return np.random.default_rng(seed).integers(-8, 8, shape).astype(np.float32)


class Tensor:
    """Memory of another library: it is known by DLPack alone."""

    def __init__(self, a: NDArray[Any]) -> None:
        self._a = a

    def __dlpack__(self, **options: Any) -> Any:
        return self._a.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._a.__dlpack_device__()


class Dtype:
    def __init__(self, name: str) -> None:
        self._name = name

    def __repr__(self) -> str:
        return self._name


int16, bfloat16 = Dtype("torch.int16"), Dtype("torch.bfloat16")
uint8, float8_e4m3fn = Dtype("torch.uint8"), Dtype("torch.float8_e4m3fn")


class BfloatTensor(Tensor):
    """As torch has them: numpy cannot read one, but it can show itself as int16."""

    dtype = bfloat16

    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("numpy has no bfloat16")

    def view(self, dtype: Dtype) -> Tensor:
        assert dtype is int16
        return Tensor(self._a.view(np.int16))


class FloatEightTensor(BfloatTensor):
    """The same of float8_e4m3fn, made of its codes."""

    dtype = float8_e4m3fn

    def view(self, dtype: Dtype) -> Tensor:
        assert dtype is uint8
        return Tensor(self._a)


def to_bfloat16(a: NDArray[np.float32]) -> BfloatTensor:
    """Of numbers that bfloat16 holds."""
    codes = (np.ascontiguousarray(a).view(np.uint32) >> 16).astype(np.uint16)
    assert ((codes.astype(np.uint32) << 16).view(np.float32) == a).all()
    return BfloatTensor(codes)


FORMS: dict[str, Callable[[NDArray[np.float32]], Any]] = {
    "float32": lambda a: a,
    "float16": lambda a: a.astype(np.float16),
    "float64": lambda a: a.astype(np.float64),
    "longdouble": lambda a: a.astype(np.longdouble),
    "int8": lambda a: a.astype(np.int8),
    "int64": lambda a: a.astype(np.int64),
    "big_endian": lambda a: a.astype(">f4"),
    "list": lambda a: a.tolist(),
    "list_of_ints": lambda a: a.astype(int).tolist(),
    "list_of_arrays": list,
    "memoryview": memoryview,
    "dlpack": Tensor,
    "dlpack_float16": lambda a: Tensor(a.astype(np.float16)),
    "bfloat16": to_bfloat16,
    "backwards": lambda a: a[::-1].copy()[::-1],
    "read_only": lambda a: np.broadcast_to(a, a.shape),
}
each_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())


@pytest.fixture
def cache() -> Iterator[PagedKVCache]:
    """One sequence "a" of 6 positions, 2 KV heads of width 8."""
    with PagedKVCache(num_blocks=16, block_size=4, n_layers=1, n_kv_heads=2, d_head=8) as c:
        c.add_seq("a")
        c.append("a", 0, numbers(2, 6, 8), numbers(2, 6, 8, seed=2))
        yield c


def same(a: Any, b: Any) -> None:
    assert type(a) is np.ndarray
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert a.tobytes() == b.tobytes()


@each_form
def test_append_takes_every_form(cache: PagedKVCache, form: Callable[[Any], Any]) -> None:
    k, v = numbers(2, 5, 8, seed=3), numbers(2, 5, 8, seed=4)
    cache.add_seq("b")
    with np.errstate(all="raise"), warnings.catch_warnings():
        warnings.simplefilter("error")
        cache.append("b", 0, form(k), form(v))
        cache.append("b", 0, form(k), v)
        cache.append("b", 0, k.astype(np.float16), form(v))
    for a, stored in zip((k, v), cache.gather("b", 0), strict=True):
        assert (stored == np.tile(a, (1, 3, 1))).all()


@each_form
def test_every_attention_takes_every_form(cache: PagedKVCache, form: Callable[[Any], Any]) -> None:
    q = numbers(1, 4, 8, seed=5)
    view, table, sinks = cache.view(0), [cache.block_table("a")], numbers(4, seed=7)
    formed, formed_sinks = form(q), form(sinks)
    same(
        paged_attention_decode(formed, cache, ["a"], 0), paged_attention_decode(q, cache, ["a"], 0)
    )
    slopes = {"alibi_slopes": form(numbers(4, seed=6))}
    wanted = paged_attention(
        q, view, table, [6], alibi_slopes=numbers(4, seed=6), sink_logits=sinks
    )
    same(paged_attention(formed, view, table, [6], sink_logits=formed_sinks, **slopes), wanted)
    states = paged_attention_states(formed, view, table, [6], 0, 1, **slopes)
    same(merge_states([(states, 0)], sink_logits=formed_sinks), wanted)
    four = [numbers(1, 4, 3, 8, seed=8), numbers(1, 2, 3, 8, seed=9), numbers(1, 2, 3, 8, seed=10)]
    same(
        flash_attention(*[form(a) for a in four], sink_logits=formed_sinks),
        flash_attention(*four, sink_logits=sinks),
    )


def test_float64_rows_become_the_nearest_float32() -> None:
    q, k, v = np.random.default_rng(1).standard_normal((3, 1, 1, 4, 8))
    same(flash_attention(q, k, v), flash_attention(*(a.astype(np.float32) for a in (q, k, v))))


@settings(max_examples=200, deadline=None)
@given(np_arrays(np.float64, (1, 7, 1), elements=st.floats(width=64) | st.floats(-7e4, 7e4)))
def test_float64_is_rounded_to_float16_once(a: NDArray[np.float64]) -> None:
    with np.errstate(all="ignore"):
        wanted = a.astype(np.float16)  # numpy rounds once
    with PagedKVCache(num_blocks=2, block_size=4, n_layers=1, n_kv_heads=1, d_head=1) as cache:
        cache.add_seq(0)
        cache.append(0, 0, a, a)
        stored, _ = cache.gather(0, 0)
    nan = np.isnan(a)
    assert (stored.view(np.uint16)[nan] == 0x7E00).all()
    assert stored[~nan].tobytes() == wanted[~nan].tobytes()


def test_values_between_two_float16_are_rounded_once() -> None:
    """Ties of float16 and their neighbours among float64, which float32 cannot tell from them."""
    codes = np.arange(0x7C00, dtype=np.uint16)
    low = codes.view(np.float16).astype(np.float64)
    tie = (low + np.append(low[1:], 65536.0)) / 2
    values = np.concatenate([tie, np.nextafter(tie, 0), np.nextafter(tie, np.inf)])
    values = np.concatenate([values, -values]).reshape(1, -1, 1)
    n = values.shape[1]
    with PagedKVCache(None, -(-n // 512), 512, 1, 1, 1) as cache, np.errstate(over="ignore"):
        cache.add_seq(0)
        cache.append(0, 0, values, values)
        same(cache.gather(0, 0)[0], values.astype(np.float16))


def test_a_tensor_of_bfloat16_is_a_view_in_place() -> None:
    k, v = numbers(3, 2, 4, 8), numbers(3, 2, 4, 8, seed=2)
    views = [KVView.from_arrays(form(k), form(v)) for form in (to_bfloat16, FORMS["float32"])]
    assert [view.dtype for view in views] == ["bfloat16", "float32"]
    q = numbers(1, 4, 8) / 8
    same(*[paged_attention(q, view, [[2, 0, 1]], [11]) for view in views])
    tensors = to_bfloat16(k), to_bfloat16(v)
    view = KVView.from_arrays(*tensors)
    tensors[1]._a[...] = 0x3F80  # 1.0, written behind the view's back
    np.testing.assert_allclose(paged_attention(q, view, [[2, 0, 1]], [11]), 1, rtol=1e-6)


@each_form
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_write_slots_takes_every_form(dtype: str, form: Callable[[Any], Any]) -> None:
    k, v = numbers(3, 2, 8, seed=3), numbers(3, 2, 8, seed=4)
    memory = [np.zeros((2, 2, 4, 8), np.uint16 if dtype == "bfloat16" else dtype) for _ in "kv"]
    view = KVView.from_arrays(*memory, dtype=dtype)
    view.write_slots([6, 1, 3], form(k), form(v))
    held = [a.astype(np.uint32) << 16 for a in memory] if dtype == "bfloat16" else memory
    for a, rows in zip(held, (k, v), strict=True):
        a = a.view(np.float32) if dtype == "bfloat16" else a
        assert (a[1, :, 2] == rows[0]).all() and (a[0, :, 1] == rows[1]).all()
        assert (a[0, :, 3] == rows[2]).all()


def test_integers_of_every_form(cache: PagedKVCache) -> None:
    q, view, table = numbers(1, 4, 8), cache.view(0), cache.block_table("a")
    wanted = paged_attention(q, view, [table], [6])
    for lengths in ([6], (6,), np.int64([6]), array.array("q", [6]), Tensor(np.int16([6]))):
        for tables in (
            [table],
            table[None],
            [table.tolist()],
            Tensor(table[None]),
            (Tensor(table),),
        ):
            same(paged_attention(q, view, tables, lengths), wanted)


def test_what_is_no_list_of_integers_is_said_in_words(cache: PagedKVCache) -> None:
    q, view, table = numbers(1, 4, 8), cache.view(0), [cache.block_table("a")]
    fn = "^paged_attention: "
    for lengths, error, says in (
        (20, TypeError, "ctx_lens must be an array or a list of integers, not one: 20$"),
        (np.int32(20), TypeError, r"ctx_lens must be an array or a list of integers, not one"),
        (None, TypeError, "ctx_lens must be an array, and numpy cannot read None as one"),
        ("20", TypeError, "ctx_lens must be an array, and numpy cannot read '20' as one"),
        ({20}, TypeError, r"ctx_lens must be an array, and numpy cannot read \{20\} as one"),
        ([[6]], ValueError, "ctx_lens must have 1 axis"),
        ([6.0], TypeError, "ctx_lens must be integers, not float64"),
        ([True], TypeError, "ctx_lens must be integers, not bool"),
        (["6"], TypeError, "ctx_lens must be integers"),
    ):
        with pytest.raises(error, match=fn + says):
            paged_attention(q, view, table, lengths)
    for tables in (5, None, "0", {0}, [[0.5]], [[0], [[1]]], [0, 1]):
        with pytest.raises((TypeError, ValueError), match=fn + "block_tables"):
            paged_attention(q, view, tables, [6])


@pytest.mark.parametrize("ids", ["a", b"a", {"a"}, frozenset("a"), {"a": 1}, iter(["a"]), None, 1])
def test_one_string_or_a_set_is_no_list_of_sequence_ids(cache: PagedKVCache, ids: Any) -> None:
    says = "seq_ids must be a list of ids, not"
    with pytest.raises(TypeError, match=f"^paged_attention_decode: {says}"):
        paged_attention_decode(numbers(1, 4, 8), cache, ids, 0)
    with pytest.raises(TypeError, match=f"^batch: {says}"):
        cache.batch(ids)


def test_lists_tuples_and_arrays_of_ids(cache: PagedKVCache) -> None:
    cache.fork("a", 7)
    q = numbers(1, 4, 8)
    wanted = paged_attention_decode(q, cache, ["a"], 0)
    for ids in ((7,), np.array([7]), range(7, 8)):
        same(paged_attention_decode(q, cache, ids, 0), wanted)


def test_an_out_that_cannot_be_written_says_why(cache: PagedKVCache) -> None:
    q, view, table = numbers(1, 4, 8), cache.view(0), [cache.block_table("a")]
    good = np.full((1, 4, 8), 7, np.float32)
    locked = good.copy()
    locked.flags.writeable = False
    calls: dict[str, Callable[[Any], Any]] = {
        "paged_attention_decode": lambda out: paged_attention_decode(q, cache, ["a"], 0, out=out),
        "paged_attention": lambda out: paged_attention(q, view, table, [6], out=out),
    }
    for fn, call in calls.items():
        for out, error, says in (
            (locked, ValueError, "out is read-only$"),
            (good.tolist(), TypeError, "out must be an array to be written"),
            (
                good.astype(np.float64),
                TypeError,
                "out must be float32 in native byte order",
            ),
            (good[:, :3], ValueError, r"out has shape \(1, 3, 8\), expected"),
            (to_bfloat16(good), TypeError, "out must be float32 .* not bfloat16"),
        ):
            with pytest.raises(error, match=f"^{fn}: {says}"):
                call(out)
    assert (good == 7).all() and (locked == 7).all()


def test_a_tensor_as_out_is_written_or_says_what_it_takes(cache: PagedKVCache) -> None:
    q = numbers(1, 4, 8)
    wanted = paged_attention_decode(q, cache, ["a"], 0)
    memory = np.full((1, 4, 8), 7, np.float32)
    if np.lib.NumpyVersion(np.__version__) >= "2.2.5":
        out = Tensor(memory)
        assert paged_attention_decode(q, cache, ["a"], 0, out=out) is out
        same(memory, wanted)
        memory.flags.writeable = False
        with pytest.raises(ValueError, match=r"^paged_attention_decode: out is read-only$"):
            paged_attention_decode(q, cache, ["a"], 0, out=Tensor(memory))
    else:
        with pytest.raises(ValueError, match=r"out is read-only: .*2\.2\.5.*out\.numpy\(\)"):
            paged_attention_decode(q, cache, ["a"], 0, out=Tensor(memory))


def test_messages_name_their_function_once(cache: PagedKVCache) -> None:
    q, view, table = numbers(1, 4, 8), cache.view(0), [cache.block_table("a")]
    bad_calls: tuple[Callable[[], Any], ...] = (
        lambda: paged_attention(q, view, [[99, 99]], [6]),
        lambda: paged_attention(q, view, table, [60]),
        lambda: paged_attention_states(q, view, table, [60], 0, 1),
        lambda: merge_states([(np.zeros((1, 1, 1, 3)), 1)]),
        lambda: cache.import_seq("b", b"no envelope of any cache, to be sure"),
        lambda: KVView.from_arrays(*np.zeros((2, 1, 1, 1, 1), F32)).write_slots(
            [5], *np.zeros((2, 1, 1, 1))
        ),
        lambda: PagedKVCache(None, 2**31 - 1, 2**32 - 1, 2**32 - 1, 2**32 - 1, 2**32 - 1),
    )
    for call in bad_calls:
        with pytest.raises(ValueError) as caught:
            call()
        assert "tl_" not in str(caught.value).partition(":")[2][:5], caught.value


def test_torch(cache: PagedKVCache) -> None:
    torch = pytest.importorskip("torch")
    k, v = (torch.from_numpy(numbers(2, 5, 8, seed=seed)) for seed in (3, 4))
    wanted = None
    for dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8):
        cache.add_seq(dtype)
        cache.append(dtype, 0, k.to(dtype), v.to(dtype))
        q = torch.from_numpy(numbers(1, 4, 8)).to(dtype)
        out = paged_attention_decode(q, cache, [dtype], 0)
        wanted = out if wanted is None else wanted
        same(out, wanted)
        same(
            flash_attention(*[q[:, :, None]] * 3),
            flash_attention(*[numbers(1, 4, 8)[:, :, None]] * 3),
        )
    blocks = torch.from_numpy(numbers(3, 2, 4, 8)).to(torch.bfloat16)
    assert KVView.from_arrays(blocks, blocks).dtype == "bfloat16"
    with pytest.raises(TypeError, match=r"^append: k must be an array.*require"):
        cache.append("a", 0, k.clone().requires_grad_(), v)
    into = torch.zeros(1, 4, 8)
    paged_attention_decode(numbers(1, 4, 8), cache, [torch.float32], 0, out=into.numpy())
    same(into.numpy(), wanted)
