# SPDX-License-Identifier: MIT
"""``tinyllm look``: the picture, the metrics and the facts of a snapshot file, and one line for
what it cannot read."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tinyllm import PagedKVCache
from tinyllm.cli import main
from tinyllm.ffi.libtinyllm import Lib, u32_ptr


@pytest.fixture
def cache(lib: Lib) -> Any:
    with PagedKVCache(lib, 64, 4, 1, 1, 2) as c:
        c.add_seq("\x1b[2Jchat")
        c.append("\x1b[2Jchat", 0, np.ones((1, 9, 2), np.float32), np.ones((1, 9, 2), np.float32))
        yield c


@pytest.fixture
def file(cache: PagedKVCache, tmp_path: Path) -> str:
    cache.snapshot(tmp_path / "cache.json")
    return str(tmp_path / "cache.json")


Capture = pytest.CaptureFixture[str]


def test_prints_the_picture(cache: PagedKVCache, file: str, capsys: Capture) -> None:
    assert main(["look", file, "--width", "72", "--no-colour"]) == 0
    out, err = capsys.readouterr()
    assert (out, err) == (cache.look().text(72, colour=False) + "\n", "")


def test_colour_is_for_terminals_and_can_be_refused(
    file: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(["look", file]) == 0
    assert "\x1b[" in capsys.readouterr().out
    assert main(["look", file, "--no-colour"]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_writes_the_svg(cache: PagedKVCache, file: str, tmp_path: Path, capsys: Capture) -> None:
    assert main(["look", file, "--svg", str(tmp_path / "cache.svg")]) == 0
    assert (tmp_path / "cache.svg").read_text(encoding="utf-8") == cache.look().svg()
    ET.parse(tmp_path / "cache.svg")


def test_prints_the_metrics(cache: PagedKVCache, file: str, capsys: Capture) -> None:
    assert main(["look", file, "--metrics"]) == 0
    assert capsys.readouterr().out == cache.metrics()


def test_prints_facts_for_machines(cache: PagedKVCache, file: str, capsys: Capture) -> None:
    assert main(["look", file, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts == {
        "pool": cache.snapshot().sizes,
        "counters": cache.snapshot().counters,
        "sequences": [{"name": "\x1b[2Jchat", "lengths": [9], "held": 3, "gone": 0, "runs": 1}],
        "surplus_references": {},
    }


def test_sequences_are_chosen_by_name_and_sorted(
    cache: PagedKVCache, tmp_path: Path, capsys: Capture
) -> None:
    for name, n in (("a", 3), ("b", 9), ("c,d", 1), (1, 2), ("1", 4)):
        cache.add_seq(name)
        cache.append(name, 0, np.ones((1, n, 2), np.float32), np.ones((1, n, 2), np.float32))
    cache.snapshot(tmp_path / "cache.json")
    plain = [str(tmp_path / "cache.json"), "--width", "72", "--no-colour"]
    for options, picture in (
        (["--sequences", "b,a"], cache.look(sequences=["b", "a"])),
        (["--sequences", '"c,d",a', "--sort", "tokens"], cache.look(sequences=["a", "c,d"])),
        (["--sequences", "1"], cache.look(sequences=[1, "1"])),  # both read alike
        (["--sort", "blocks"], cache.look(sort="blocks")),
    ):
        assert main(["look", *plain, *options, "--svg", str(tmp_path / "cache.svg")]) == 0
        assert capsys.readouterr().out == picture.text(72, colour=False) + "\n"
        assert (tmp_path / "cache.svg").read_text(encoding="utf-8") == picture.svg()
    assert main(["look", plain[0], "--json", "--sequences", "b,a"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert [sequence["name"] for sequence in facts["sequences"]] == ["b", "a"]


@pytest.mark.parametrize("options", [[], ["--metrics"], ["--json"]])
def test_a_leak_is_a_finding(
    cache: PagedKVCache, tmp_path: Path, options: list[str], capsys: Capture
) -> None:
    cache.lib.tl_kv_alloc(cache.pool, 1, u32_ptr(np.empty(1, np.uint32)))
    cache.snapshot(tmp_path / "leak.json")
    assert main(["look", str(tmp_path / "leak.json"), *options]) == 1
    out = capsys.readouterr().out
    if "--json" in options:
        assert json.loads(out)["surplus_references"] == {"3": 1}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["none.json"], "none.json"),
        (["README.md"], "README.md: no snapshot of a KV cache"),
        (["."], "directory"),
        (["FILE", "--width", "39"], "--width '39' is no width of 40 .. 1000"),
        (["FILE", "--width", "wide"], "--width 'wide' is no width"),
        (["FILE", "--metrics", "--json"], "--metrics and --json"),
        (["FILE", "--svg", "no/such/folder/x.svg"], "no/such/folder"),
        (["FILE", "--sequences", "a,b"], "no sequence 'a'; there are 1: '\\x1b[2Jchat'"),
        (["FILE", "--sequences", 'a,"b'], "--sequences 'a,\"b' is no list of names"),
        (
            ["FILE", "--sequences", "\x1b[2Jchat,\x1b[2Jchat"],
            "sequences has '\\x1b[2Jchat' 2 times",
        ),
        (["FILE", "--sort", "size"], "--sort invalid choice: 'size'"),
        ([], "FILE.json"),
    ],
)
def test_what_cannot_be_done_is_one_line_and_status_2(
    file: str,
    arguments: list[str],
    said: str,
    capsys: Capture,
    root: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(root)
    assert main(["look", *(file if a == "FILE" else a for a in arguments)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err and err.count("\n") == 1 and err.startswith("tinyllm look: ")
