# SPDX-License-Identifier: MIT
"""Pictures of a cache: what is in them is what is in the cache, they keep to their width and size,
and no name of a sequence can break them."""

from __future__ import annotations

import itertools
import math
import re
import unicodedata
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tinyllm import ClosedError, PagedKVCache
from tinyllm._terminal import harmless
from tinyllm.ffi.libtinyllm import Lib, u32_ptr
from tinyllm.observe.palette import KEYS, PALETTE, colour_of, key_of
from tinyllm.observe.pool.picture import Picture
from tinyllm.observe.pool.snapshot import BLOCK, SequenceState, Snapshot

B = 4
HOSTILE = (
    "\x1b]0;owned\x07\x1b[2J",
    "</text><script>alert(1)</script>",
    "a & b < c > \"d\" 'e' ]]>",
    "line\nbreak\ttab\rreturn\x00nul\x7f\x85",
    "\u202eright to left\u2066",
    "\ud800 lone \udfff",
    "\ufffe\uffff",
    "漢字" * 40,
    "e\u0301" * 30 + "👩‍👩‍👧",
    "x" * 5000,
    "",
    b"\xff\x00",
    ("tuple", 3),
)


def rows(n_tokens: int) -> Any:
    return np.ones((1, n_tokens, 2), np.float32)


@pytest.fixture
def cache(lib: Lib) -> Iterator[PagedKVCache]:
    """24 blocks of 4 positions: a prefix of 2 blocks shared by three, one with a hole in its order,
    one cut at the front, one block of the prefix index without an owner."""
    with PagedKVCache(lib, 24, B, 1, 1, 2) as c:
        c.add_seq("old")
        c.append("old", 0, rows(B), rows(B))
        c.lib.tl_kv_register(c.pool, int(c.block_table("old")[0]), 99)
        c.add_seq("base")
        c.append("base", 0, rows(2 * B + 1), rows(2 * B + 1))
        for name in ("left", "right"):
            c.fork("base", name)
        c.append("left", 0, rows(B), rows(B))
        c.append("base", 0, rows(2 * B), rows(2 * B))
        c.add_seq("window")
        c.append("window", 0, rows(3 * B), rows(3 * B))
        c.trim_front("window", B)
        c.free("old")
        yield c


@pytest.fixture
def hostile(lib: Lib) -> Iterator[PagedKVCache]:
    with PagedKVCache(lib, 64, B, 1, 1, 2) as c:
        for name in HOSTILE:
            c.add_seq(name)
            c.append(name, 0, rows(3), rows(3))
        yield c


def display_width(text: str) -> int:
    """Columns, counted the long way."""
    total = 0
    for c in text:
        assert unicodedata.category(c) not in ("Cc", "Cs", "Cf"), f"{c!r} would act on a terminal"
        zero = unicodedata.combining(c) or unicodedata.category(c) in ("Mn", "Me")
        total += 0 if zero else 2 if unicodedata.east_asian_width(c) in "WF" else 1
    return total


def plain(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


def map_rows(text: str, n: int) -> str:
    """The cells of the first ``n`` blocks."""
    rows = re.findall(r"^ {2,}\d+ (\S+)$", plain(text), re.MULTILINE)
    return "".join(rows)[:n]


# --- text -----------------------------------------------------------------------------------------


def test_each_cell_says_whose_its_block_is_and_whether_it_is_full(cache: PagedKVCache) -> None:
    cells = map_rows(cache.look().text(80, colour=False), 24)
    owners = {"A": "base", "B": "left", "C": "right", "D": "window"}
    tables = {key: cache.block_table(name) for key, name in owners.items()}
    held = np.concatenate([table[table >= 0] for table in tables.values()])
    for block, cell in enumerate(cells):
        owners = [key for key, table in tables.items() if block in table]
        refs = cache.lib.tl_kv_refs(cache.pool, block)
        full = cache.lib.tl_kv_fill(cache.pool, block) == B
        if refs > 1:
            assert cell == str(refs)
        elif owners:
            assert cell == (owners[0] if full else owners[0].lower())
        else:
            assert block not in held
            assert cell in ".~"
    assert cells.count("~") == 1
    assert {"3", "A", "a", "b", "c", "D", "."} <= set(cells)


def coloured(text: str) -> list[tuple[str, int, int]]:
    """The characters of the map, each with the codes of its ink and its ground (-1: none)."""
    cells: list[tuple[str, int, int]] = []
    for line in text.splitlines():
        if re.match(r" {2,}\d+ \S+$", plain(line)):
            spans = re.findall(r"\x1b\[([0-9;]*)m([^\x1b]*)\x1b\[0m", line)[1:]
            for code, letters in spans:
                ink, ground = ([*re.findall(f"{n};5;(\\d+)", code), -1][0] for n in (38, 48))
                cells += [(letter, int(ink), int(ground)) for letter in letters]
    return cells


@pytest.fixture
def filling(lib: Lib) -> Iterator[PagedKVCache]:
    """Eight sequences of one block: of 8 positions they fill 1, 2, ..., 8."""
    with PagedKVCache(lib, 9, 8, 1, 1, 2) as cache:
        for fill in range(1, 9):
            cache.add_seq(fill)
            cache.append(fill, 0, rows(fill), rows(fill))
        yield cache


def test_colours_keep_the_letters(filling: PagedKVCache, cache: PagedKVCache) -> None:
    assert map_rows(filling.look().text(80, colour=True), 8) == "abcdefgH"
    for some in (filling, cache):
        letters = map_rows(some.look().text(80, colour=False), some.num_blocks)
        shown = map_rows(some.look().text(80, colour=True), some.num_blocks)
        assert shown.translate(str.maketrans("·░", ".~")) == letters


def test_the_ground_of_a_letter_is_its_owners_colour_and_shows_the_fill(
    filling: PagedKVCache,
) -> None:
    cells = coloured(filling.look().text(80, colour=True))
    for i, (_, ink, ground) in enumerate(cells[:8]):
        colour, fill = PALETTE[i % 7], i + 1
        if fill == 8:
            assert (ink, ground) == (16, colour.ansi)
        elif fill >= 4:
            assert (ink, ground) == (231, colour.dark)
        else:
            assert (ink, ground) == (colour.ansi, 235)


def luminance(ansi: int) -> float:
    """Relative luminance (WCAG 2) of one of a terminal's 256 colours, of its cube or its greys."""
    step = (0, 95, 135, 175, 215, 255)
    n = ansi - 16
    rgb = (
        (step[n // 36], step[n // 6 % 6], step[n % 6])
        if ansi < 232
        else (8 + 10 * (ansi - 232),) * 3
    )
    linear = [c / 255 / 12.92 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in rgb]
    return sum(w * c for w, c in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def test_every_letter_reads_on_its_ground(filling: PagedKVCache) -> None:
    pairs = {(ink, ground) for _, ink, ground in coloured(filling.look().text(80, colour=True))[:8]}
    pairs |= {p for c in PALETTE for p in ((16, c.ansi), (231, c.dark), (c.ansi, 235))}
    for ink, ground in pairs:
        low, high = sorted((luminance(ink), luminance(ground)))
        assert (high + 0.05) / (low + 0.05) > 3.8, (ink, ground)


def test_tables_are_ranges_with_what_is_shared_marked(cache: PagedKVCache) -> None:
    text = cache.look().text(100, colour=False)
    tables = {name: cache.block_table(name).tolist() for name in ("base", "left", "window")}
    first, second = tables["base"][:2]
    assert second == first + 1
    assert re.search(rf"A base +17 tokens, 5 blocks, \d runs? +{first}-{second}\* ", text)
    assert re.search(
        rf"B left +13 tokens, 4 blocks, \d runs? +{first}-{second}\* {tables['left'][2]}", text
    )
    (last,) = tables["window"][2:]
    assert re.search(
        rf"D window +12 tokens, 1 block, 1 run +\(2 gone\) {last}$", text, re.MULTILINE
    )


def test_lengths_of_layers_that_differ_are_both_said(lib: Lib) -> None:
    with PagedKVCache(lib, 4, B, 2, 1, 2) as cache:
        cache.add_seq("a")
        cache.append("a", 1, rows(5), rows(5))
        assert "0-5 tokens" in str(cache.look())


def test_the_counters_are_in_words(cache: PagedKVCache) -> None:
    c = cache.snapshot().counters
    text = cache.look().text(100, colour=False)
    assert f"blocks   {c['blocks_used']} of 24 used" in text
    assert f"{c['blocks_shared']} blocks shared, {c['blocks_saved']} saved by it" in text
    assert f"{c['tokens']} in 96 slots" in text
    assert "LEAK" not in text


def test_leaks_are_called_out_with_their_blocks(cache: PagedKVCache) -> None:
    taken = np.empty(3, np.uint32)
    cache.lib.tl_kv_alloc(cache.pool, 3, u32_ptr(taken))
    assert sorted(taken.tolist()) == [9, 10, 12]
    text = cache.look().text(80, colour=False)
    assert "LEAK     3 references without an owner: blocks 9-10, 12\n" in text
    assert [block for block, cell in enumerate(map_rows(text, 24)) if cell == "?"] == [9, 10, 12]
    window = int(cache.block_table("window")[2])
    cache.lib.tl_kv_unref(cache.pool, window)
    assert f"1 owner without a reference: block {window}" in cache.look().text(80)
    assert f"1 owner without a reference: block {window}" in cache.look().svg()
    assert "leak: 3 references without an owner: blocks 9-10, 12" in texts(cache.look().svg())
    cache.lib.tl_kv_alloc(cache.pool, 1, u32_ptr(taken))


@pytest.mark.parametrize("width", [40, 41, 53, 64, 79, 80, 100, 137, 200])
@pytest.mark.parametrize("colour", [False, True])
def test_no_line_is_wider_than_it_may_be(
    cache: PagedKVCache, hostile: PagedKVCache, width: int, colour: bool
) -> None:
    for some in (cache, hostile):
        mass = {seq: np.full((9, 6), 1 / 6, np.float32) for seq in some._sequences}
        for glyphs in (False, True):
            for line in some.look(mass).text(width, colour=colour, glyphs=glyphs).splitlines():
                assert display_width(plain(line)) <= width


@pytest.mark.parametrize("glyphs", [False, True])
def test_without_colour_there_are_no_escapes_and_without_glyphs_only_ascii(
    hostile: PagedKVCache, glyphs: bool
) -> None:
    text = hostile.look().text(80, colour=False, glyphs=glyphs)
    assert "\x1b" not in text
    names = "".join(harmless(name if isinstance(name, str) else repr(name), 20) for name in HOSTILE)
    assert set(text) - set(names) <= set(map(chr, range(32, 127))) | {"\n"}


@pytest.mark.parametrize(
    ("width", "error"),
    [(39, ValueError), (1001, ValueError), (-1, ValueError), ("80", TypeError), (80.0, TypeError)],
)
def test_a_width_nobody_can_draw_in_is_refused(
    cache: PagedKVCache, width: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match="width"):
        cache.look().text(width)


def test_long_lists_end_in_how_many_more_there_are(lib: Lib) -> None:
    with PagedKVCache(lib, 400, 1, 1, 1, 2) as cache:
        for seq in range(25):
            cache.add_seq(seq)
        for _, seq in itertools.product(range(15), range(25)):
            cache.append(seq, 0, rows(1), rows(1))
        text = cache.look().text(80, colour=False)
        assert '  ... and 5 more: "sequences" names which to show, "sort" which first' in text
        row = re.search(r"^  A 0 .* runs +([0-9 ]+) \.\.\. and (\d+) more$", text, re.MULTILINE)
        assert row is not None
        shown = [int(block) for block in row[1].split()]
        assert shown == cache.block_table(0)[: len(shown)].tolist()
        assert len(shown) + int(row[2]) == 15


def test_print_obeys_no_color_and_what_is_no_terminal(
    cache: PagedKVCache, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "64")
    print(cache.look())
    out = capsys.readouterr().out
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 64
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert "\x1b[" in str(cache.look())
    assert repr(cache.look()) == str(cache.look())
    for name, value in (("NO_COLOR", "1"), ("TERM", "dumb")):
        with monkeypatch.context() as m:
            m.setenv(name, value)
            assert "\x1b" not in str(cache.look())


def test_stdout_that_cannot_print_bars_gets_letters(run_silently: Any) -> None:
    code = """
import numpy as np, tinyllm
with tinyllm.PagedKVCache(None, 4, 4, 1, 1, 2) as c:
    c.add_seq("a")
    c.append("a", 0, np.ones((1, 5, 2), np.float32), np.ones((1, 5, 2), np.float32))
    print(c.look({"a": np.array([[0.25, 0.75]])}))
"""
    assert "  0 Aa.." in run_silently(code, PYTHONIOENCODING="ascii")
    assert "▃█" in run_silently(code, PYTHONIOENCODING="utf-8")


# --- SVG ------------------------------------------------------------------------------------------

SVG = "{http://www.w3.org/2000/svg}"


def texts(document: str) -> list[str]:
    return [
        e.text or ""
        for e in ET.fromstring(document).iter()
        if e.tag in (f"{SVG}text", f"{SVG}title")
    ]


def test_an_svg_is_well_formed_whatever_the_names_are(hostile: PagedKVCache) -> None:
    document = hostile.look({name: np.ones((2, 1), np.float32) for name in HOSTILE}).svg()
    document.encode("utf-8")
    root = ET.fromstring(document)
    assert root.tag == f"{SVG}svg"
    assert {e.tag.removeprefix(SVG) for e in root.iter()} == {
        "svg",
        "rect",
        "text",
        "title",
        "g",
        "path",
    }
    assert "</text><script>alert(1)</script>" in "".join(texts(document))
    assert any(t.startswith("</text><s") and "..." in t for t in texts(document))
    assert not any("href" in key or key.startswith("on") for e in root.iter() for key in e.attrib)


def test_every_used_block_has_a_tooltip_that_names_its_holders(cache: PagedKVCache) -> None:
    said = [t for t in texts(cache.look().svg()) if re.match(r"block \d+:", t)]
    first = int(cache.block_table("base")[0])
    assert f"block {first}: base, left, right; 3 references; 4 of 4 tokens" in said
    assert "block 0: no holder; cached; 4 of 4 tokens; hash 0000000000000063" in said
    assert len(said) == cache.stats()["used"] + cache.stats()["cached"]


def test_everything_lies_inside_the_page(cache: PagedKVCache, hostile: PagedKVCache) -> None:
    for some in (cache, hostile):
        root = ET.fromstring(some.look({seq: np.ones((8, 5)) / 5 for seq in some._sequences}).svg())
        width, height = float(root.attrib["width"]), float(root.attrib["height"])
        for e in root.iter(f"{SVG}rect"):
            x, y = float(e.attrib.get("x", 0)), float(e.attrib.get("y", 0))
            assert x >= 0 and y >= 0
            assert x + float(e.attrib["width"]) <= width and y + float(e.attrib["height"]) <= height
        for e in root.iter(f"{SVG}text"):
            room = display_width(e.text or "") * float(root.attrib["font-size"]) * 0.5
            end = {"start": 1.0, "middle": 0.5, "end": 0.0}[e.attrib.get("text-anchor", "start")]
            x = float(e.attrib["x"])
            assert x - (1 - end) * room >= 0 and x + end * room <= width
            assert 0 <= float(e.attrib["y"]) <= height


def test_all_type_of_a_picture_has_one_size(cache: PagedKVCache, hostile: PagedKVCache) -> None:
    leaked = np.empty(1, np.uint32)
    cache.lib.tl_kv_alloc(cache.pool, 1, u32_ptr(leaked))
    pictures = [
        some.look({seq: np.ones((3, 5)) / 5 for seq in some._sequences}).svg()
        for some in (cache, hostile)
    ]
    for document in (*pictures, Picture(large(100_000, 300)).svg()):
        sized = [e for e in ET.fromstring(document).iter() if "font-size" in e.attrib]
        assert [e.tag for e in sized] == [f"{SVG}svg"]
        assert not any("transform" in e.attrib for e in ET.fromstring(document).iter())


def test_no_leak_is_cut(lib: Lib) -> None:
    ids = np.arange(8) * 10_000_000 + 1_000_000_000
    blocks = np.zeros(8, BLOCK)
    blocks["id"], blocks["refs"] = ids, 1
    document = Picture(Snapshot(2**31 - 1, B, 1, 1, 2, 16, blocks, ())).svg()
    said = "leak: 8 references without an owner: blocks " + ", ".join(map(str, ids))
    assert said in " ".join(texts(document))


def test_no_letter_leaves_its_cell(lib: Lib) -> None:
    with PagedKVCache(lib, 600, 1, 1, 1, 2) as cache:
        cache.add_seq("a")
        cache.append("a", 0, rows(3), rows(3))
        for child in range(12):
            cache.fork("a", child)
        drawn = ET.fromstring(cache.look().svg())
        small = [g.findtext(f"{SVG}text") for g in drawn.iter(f"{SVG}g")]
        assert small == ["+"] * 3  # 13 has no room
    with PagedKVCache(lib, 60, 1, 1, 1, 2) as cache:
        cache.add_seq("a")
        cache.append("a", 0, rows(3), rows(3))
        for child in range(12):
            cache.fork("a", child)
        drawn = ET.fromstring(cache.look().svg())
        assert [g.findtext(f"{SVG}text") for g in drawn.iter(f"{SVG}g")] == ["13"] * 3


def test_a_notebook_finds_the_svg_of_a_cache_and_of_a_picture(cache: PagedKVCache) -> None:
    assert cache._repr_svg_() == cache.look()._repr_svg_() == cache.look().svg()


def test_a_picture_is_kept_in_a_file(cache: PagedKVCache, tmp_path: Any) -> None:
    cache.look().save(tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_text(encoding="utf-8") == cache.look().svg()


# --- large pools ----------------------------------------------------------------------------------


def large(n_blocks: int, n_sequences: int) -> Snapshot:
    """A pool nearly full of sequences whose blocks are strewn about."""
    rng = np.random.default_rng(7)
    ids = rng.permutation(n_blocks)[: n_blocks * 9 // 10].astype(np.int64)
    blocks = np.zeros(len(ids), BLOCK)
    blocks["id"], blocks["refs"], blocks["fill"] = np.sort(ids), 1, B
    tables = np.array_split(ids, n_sequences)
    sequences = tuple(SequenceState(f"s{i}", t, (len(t) * B,)) for i, t in enumerate(tables))
    return Snapshot(n_blocks, B, 1, 1, 2, 16, blocks, sequences)


@pytest.mark.parametrize("n_blocks", [1000, 1025, 100_000, 1_000_000, 2**31 - 1])
def test_a_large_pool_is_drawn_in_cells_of_many_blocks(n_blocks: int) -> None:
    some = min(n_blocks, 1_000_000)
    seen = large(some, 300)
    object.__setattr__(seen, "num_blocks", n_blocks)
    text, document = Picture(seen).text(80, colour=True), Picture(seen).svg()
    assert len(text) < 40_000 and len(document) < 400_000
    assert len(text.splitlines()) < 60
    ET.fromstring(document)
    (per,) = re.findall(r"1 cell = (\d+) blocks", plain(text)) or ["1"]
    cells = re.findall(r"^ {2,}\d+ (\S+)$", plain(text), re.MULTILINE)
    assert len("".join(cells)) == -(-n_blocks // int(per)) <= 1024


def test_cells_of_many_blocks_say_what_is_in_all_of_them() -> None:
    blocks = np.zeros(3072, BLOCK)
    blocks["id"], blocks["refs"], blocks["fill"] = np.arange(3072), 1, B
    blocks["refs"][8:16] = 2
    blocks["fill"][16:24] = 1
    owner = np.arange(3072) // 4 % 2
    owner[:4] = owner[4:8] = 0
    owner[16:32] = 1
    a = np.flatnonzero((owner == 0) | (blocks["refs"] == 2))
    b = np.flatnonzero((owner == 1) | (blocks["refs"] == 2))
    seen = Snapshot(
        4096, B, 1, 1, 2, 16, blocks,
        (SequenceState("a", a, (len(a) * B,)), SequenceState("b", b, (len(b) * B,))),
    )  # fmt: skip
    text = Picture(seen).text(80, colour=False)
    assert "1 cell = 4 blocks" in text
    assert map_rows(text, 1024) == "AA22bbBB" + "AB" * 380 + "." * 256
    text = Picture(seen).text(48, colour=False)
    assert "1 cell = 8 blocks" in text
    assert map_rows(text, 512) == "A2bB" + "*" * 380 + "." * 128


# --- which sequences, in which order --------------------------------------------------------------


@pytest.fixture
def many(lib: Lib) -> Iterator[PagedKVCache]:
    """300 sequences of 1 .. 12 positions, some of the same length."""
    with PagedKVCache(lib, 1000, B, 1, 1, 2) as c:
        for i in range(300):
            c.add_seq(f"chat-{i}")
            c.append(f"chat-{i}", 0, rows(1 + 7 * i % 12), rows(1 + 7 * i % 12))
        yield c


def shown(text: str) -> list[tuple[str, str]]:
    """Letter and name of the sequences whose tables are shown."""
    return re.findall(r"^  ([A-Z]) (\S+) +\d+ tokens?, ", plain(text), re.MULTILINE)


def table_texts(document: str) -> list[str]:
    """Names of the tables of an SVG, in their order."""
    return [
        e.text or "" for e in ET.fromstring(document).iter(f"{SVG}text")
        if e.attrib.get("x") == "50" and e.attrib.get("font-weight") == "600"
    ]  # fmt: skip


def test_sequences_are_shown_as_chosen_and_the_pool_whole(many: PagedKVCache) -> None:
    chosen = ["chat-299", "chat-3", "chat-150"]
    picture = many.look(sequences=chosen)
    text = picture.text(80, colour=False)
    assert [name for _, name in shown(text)] == table_texts(picture.svg()) == chosen
    assert map_rows(text, 1000) == map_rows(many.look().text(80, colour=False), 1000)
    assert "... and 297 more" in text and "... and 297 more" in picture.svg()
    assert len(shown(many.look(sequences=list(many)).text(80))) == 300
    assert "more" not in many.look(sequences=list(many)).text(200)
    assert shown(many.look(sequences=[]).text(80)) == []
    places = [299, 3, 150]
    assert Picture(many.snapshot(), sequences=places).text(80) == picture.text(80)


@pytest.mark.parametrize("sort", ["blocks", "tokens", "name"])
def test_sorted_ones_are_those_of_all_and_equals_stay_in_order(
    many: PagedKVCache, sort: str
) -> None:
    keys = {
        "blocks": lambda name: -len(many.block_table(name)),
        "tokens": lambda name: -many.seq_len(name),
        "name": lambda name: int(name[5:]),
    }
    picture = many.look(sort=sort)
    expected = sorted(many, key=keys[sort])
    assert [name for _, name in shown(picture.text(80))] == expected[:20]
    assert table_texts(picture.svg()) == expected[:20]
    chosen = ["chat-100", "chat-20", "chat-3", "chat-107"]
    found = [name for _, name in shown(many.look(sequences=chosen, sort=sort).text(80))]
    assert found == sorted(chosen, key=keys[sort])
    assert map_rows(picture.text(80), 1000) == map_rows(many.look().text(80), 1000)


def test_names_of_any_kind_can_be_sorted(hostile: PagedKVCache) -> None:
    for name in ("9" * 5000, "10", "9", "\u00b2", "\u0661\u0660", 7):
        hostile.add_seq(name)
    text = hostile.look(sequences=["10", "9", 7], sort="name").text(80)
    assert [name for _, name in shown(text)] == ["7", "9", "10"]
    hostile.look(sort="name").text(80)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"sequences": ["chat-1", "chat-300"]}, KeyError, "look: no sequence 'chat-300'"),
        ({"sequences": ["chat-1", "chat-2", "chat-1"]}, ValueError, "has 'chat-1' 2 times"),
        ({"sequences": "chat-1"}, TypeError, "look: sequences must be a list, not 'chat-1'"),
        ({"sequences": {"chat-1"}}, TypeError, "look: sequences must be a list, not {'chat-1'}"),
        ({"sequences": 3}, TypeError, "look: sequences must be a list, not 3"),
        ({"sort": "size"}, ValueError, "look: sort is 'size', none of blocks, tokens, name"),
        ({"sort": ["name"]}, ValueError, "look: sort is .'name'., none of"),
    ],
)
def test_a_choice_that_cannot_be_shown_is_refused(
    many: PagedKVCache, options: Any, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        many.look(**options)


@pytest.mark.parametrize(
    ("place", "error"), [(4, ValueError), (-1, ValueError), ("base", TypeError), (1.0, TypeError)]
)
def test_a_place_without_a_sequence_is_refused(
    cache: PagedKVCache, place: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match=r"look: sequences\[1\]"):
        Picture(cache.snapshot(), sequences=[0, place])


def test_a_sequence_has_one_letter_and_one_colour_whatever_is_shown(many: PagedKVCache) -> None:
    """In map, table and strips of both pictures: those of its place in the snapshot."""
    ids = list(many)
    mass = {seq: np.full((1, 3), 0.3) for seq in ids}
    chosen = [ids[i] for i in (299, 8, 26, 7, 0)]
    owners = {int(many.block_table(seq)[0]): i for i, seq in enumerate(ids)}
    for options in (
        {},
        {"sequences": chosen},
        {"sort": "tokens"},
        {"sequences": chosen, "sort": "name"},
    ):
        picture = many.look(mass, **options)
        text, document = picture.text(100, colour=True), picture.svg()
        for block, (letter, ink, ground) in enumerate(coloured(text)):
            if block in owners:
                own = PALETTE[owners[block] % 7]
                assert letter.upper() == KEYS[owners[block] % 26]
                assert {ink, ground} & {own.ansi, own.dark}
        lines = text.splitlines()
        drawn = table_texts(document)
        keys = [e for e in ET.fromstring(document).iter(f"{SVG}rect") if e.attrib.get("x") == "24"]
        keys = [e.attrib["fill"] for e in keys if e.attrib["width"] == "18"]
        bars = [e.attrib["stroke"] for e in ET.fromstring(document).iter(f"{SVG}path")
                if "v-" in e.attrib["d"]]  # fmt: skip
        assert len(drawn) == len(keys) == len(bars) == len(shown(text))
        for (letter, name), fill, stroke in zip(shown(text), keys, bars, strict=True):
            i = int(name[5:])
            assert (letter, fill, stroke) == (
                KEYS[i % 26],
                PALETTE[i % 7].fill,
                PALETTE[i % 7].fill,
            )
            (at,) = (n for n, line in enumerate(lines) if f"{letter}\x1b[0m {name} " in line)
            assert f";48;5;{PALETTE[i % 7].ansi}m{letter}" in lines[at]
            assert f"\x1b[38;5;{PALETTE[i % 7].ansi};48;5;235m" in lines[at + 1]


def test_letter_and_colour_tell_182_sequences_apart() -> None:
    n = math.lcm(7, 26)
    assert len({(key_of(i), colour_of(i)) for i in range(n)}) == n == 182
    for sequences, again in ((182, False), (183, True)):
        picture = Picture(large(900, sequences))
        assert ("letters and colours return" in picture.text(80, colour=True)) == again
        assert ("letters and colours return" in picture.svg()) == again
        assert "letters return" in picture.text(80, colour=False)


def test_names_that_differ_at_an_end_differ_in_the_picture(lib: Lib) -> None:
    with PagedKVCache(lib, 9, B, 1, 1, 2) as cache:
        for i in range(9):
            cache.add_seq(f"conversation-of-a-customer-{i}")
        picture = cache.look()
        for names in ([name for _, name in shown(picture.text(80))], table_texts(picture.svg())):
            assert [name[-1] for name in names] == list("012345678")
            assert all(name.startswith("conversa") and "..." in name for name in names)
        assert "conversation-of-a-customer-8  0 tokens" in picture.text(120)


# --- attention mass in pictures -------------------------------------------------------------------


def test_strips_show_the_mass_of_each_head(cache: PagedKVCache) -> None:
    mass = np.zeros((2, 5), np.float32)
    mass[0] = [0.0, 0.5, 0.25, 0.0, 0.25]
    mass[1] = [0.125, 0.0, 0.0, 0.0, 0.75]
    table = cache.block_table("base")
    text = cache.look({"base": mass}).text(90, colour=False)
    assert f"head 0      ▅▃ ▃ 50 % in block {table[1]}\n" in text
    assert f"head 1     ▁   █ 75 % in block {table[4]}, sink 12.5 %\n" in text
    said = texts(cache.look({"base": mass}).svg())
    assert f"block {table[1]}: 50 %" in said
    assert f"75 % in block {table[4]}, sink 12.5 %" in said


def bars_of(text: str) -> list[str]:
    return re.findall(r"^      (?:head \d|mean of \d+) +([ ▁▂▃▄▅▆▇█]+) \d", text, re.MULTILINE)


def heights_of(document: str) -> list[list[float]]:
    """Of each strip the heights of its bars; those of nothing are not drawn."""
    paths = [e.attrib["d"] for e in ET.fromstring(document).iter(f"{SVG}path")]
    return [[float(h) for h in re.findall(r"v-([\d.]+)", d)] for d in paths if "v-" in d]


def test_all_heads_and_sequences_of_a_picture_have_one_scale_and_it_says_so(
    cache: PagedKVCache,
) -> None:
    mass = {
        "base": np.array([[0.8, 0.1, 0.0, 0.0, 0.1], [0.2, 0.2, 0.2, 0.2, 0.2]]),
        "right": np.array([[0.4, 0.4, 0.2]]),
    }
    text, document = cache.look(mass).text(90, colour=False), cache.look(mass).svg()
    assert "   █ 80 % of a head's attention\n" in text
    assert "a full bar is 80 % of a head's attention" in "".join(texts(document))
    assert bars_of(text) == ["█▁  ▁", "▂▂▂▂▂", "▄▄▂"]
    full, second, third = heights_of(document)
    assert max(full) == max(*full, *second, *third)
    assert second == pytest.approx([full[0] / 4] * 5, rel=0.01)
    assert third == pytest.approx([full[0] / 2] * 2 + [full[0] / 4], rel=0.01)


def test_the_scale_is_that_of_what_is_shown(cache: PagedKVCache) -> None:
    mass = {"base": np.full((1, 5), 0.2), "right": np.array([[0.4, 0.4, 0.2]])}
    text = cache.look(mass, sequences=["base"]).text(90, colour=False)
    assert "   █ 20 % of a head's attention\n" in text
    assert bars_of(text) == ["█" * 5]
    assert "attention" not in cache.look(mass, sequences=["left"]).text(90, colour=False)


def test_a_share_that_is_nearly_nothing_is_said_to_be_so(cache: PagedKVCache) -> None:
    mass = np.array([[1e-5, 0.0, 0.5, 1e-5, 0.49998]])
    document, table = cache.look({"base": mass}).svg(), cache.block_table("base")
    assert {
        f"block {table[0]}: <0.1 %",
        f"block {table[1]}: 0 %",
        f"block {table[2]}: 50 %",
    } <= set(texts(document))
    assert "head 0     ▁ █▁" in cache.look({"base": mass}).text(80)


def test_of_many_heads_the_mean_is_drawn_and_of_many_blocks_sums(lib: Lib) -> None:
    with PagedKVCache(lib, 200, 1, 1, 1, 2) as cache:
        cache.add_seq("a")
        cache.append("a", 0, rows(144), rows(144))
        mass = np.zeros((16, 144), np.float32)
        mass[:8, 100], mass[8:, 143] = 1, 1
        text = cache.look({"a": mass}).text(80, colour=False)
        assert "1 bar = 4 blocks" in text
        assert f"mean of 16 {' ' * 25}█{' ' * 9}█ 50 % in block" in text


def test_one_row_of_mass_is_one_strip_and_padding_is_cut(cache: PagedKVCache) -> None:
    n = len(cache.block_table("right"))
    padded = np.r_[np.full(n, 1 / n), np.zeros(7)]
    assert f"head 0     {'█' * n} " in cache.look({"right": padded}).text(80)


def test_mass_that_is_not_a_number_is_drawn_as_nothing(cache: PagedKVCache) -> None:
    picture = cache.look({"right": np.full((1, 3), np.nan, np.float32)})
    assert "nan %" in picture.text(80)
    ET.fromstring(picture.svg())


@pytest.mark.parametrize(
    ("mass", "error"),
    [
        ({"nobody": np.ones((1, 9))}, KeyError),
        ({"base": np.ones((1, 4))}, ValueError),
        ({"base": np.ones((1, 1, 5))}, ValueError),
        ({"base": np.ones((0, 5))}, ValueError),
        ({"base": np.float64(1)}, TypeError),
        ({"base": [1.0] * 5}, TypeError),
        ({"base": np.ones((1, 5), np.int64)}, TypeError),
    ],
)
def test_mass_for_nobody_or_of_another_shape_is_refused(
    cache: PagedKVCache, mass: Any, error: type[Exception]
) -> None:
    with pytest.raises(error, match="look"):
        cache.look(mass)


def test_mass_for_a_sequence_that_the_snapshot_has_not_is_refused(cache: PagedKVCache) -> None:
    for i in (-1, 4):
        with pytest.raises(ValueError, match=f"sequence {i} of 4"):
            Picture(cache.snapshot(), {i: np.ones((1, 5))})


# --- closed ---------------------------------------------------------------------------------------


def test_a_closed_cache_is_not_looked_at(lib: Lib) -> None:
    cache = PagedKVCache(lib, 2, B, 1, 1, 2)
    picture = cache.look()
    cache.close()
    for call in (cache.look, cache.metrics, cache._repr_svg_):
        with pytest.raises(ClosedError):
            call()
    assert "0 of 2 used" in str(picture)


def test_an_empty_cache_has_a_picture(lib: Lib) -> None:
    with PagedKVCache(lib, 1, 1, 1, 1, 1) as cache:
        assert "0 of 1 used (0 %)" in str(cache.look())
        ET.fromstring(cache.look().svg())
        cache.add_seq("a")
        assert "A a  0 tokens, 0 blocks, 0 runs" in str(cache.look())
        ET.fromstring(cache.look({"a": np.ones((1, 0))}).svg())
