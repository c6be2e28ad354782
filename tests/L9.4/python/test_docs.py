# SPDX-License-Identifier: MIT
"""What the pages show is what is there.

A page is a session. Its blocks run from top to bottom in one new directory, and each page on its
own:

    ```python                  runs, in the page's one namespace
    ```sh                      runs (sh -eu); `tinyllm` is the command of this checkout
    ```text printed            is what the block before it printed; "..." stands for anything in a
                               line, and a line of it alone for any lines
    ```c                       a whole program: is compiled without a warning, linked, and runs
    ```c examples/NAME.c       stands there, character for character
    ```python no-run (WHY)     is only compiled; sh no-run (WHY) and c no-run (WHY) are only shown

Links of every page lead to files and headings that exist.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from run_page import matches
from tinyllm import errors
from tinyllm.cli import COMMANDS
from tinyllm.ffi.libtinyllm import STATUS_NAMES

ROOT = Path(__file__).resolve().parents[3]
BUILD = ROOT / os.environ.get("TINYLLM_BUILD", "c/build")
PAGES = sorted(
    p for where in ("", "bench", "docs", "examples") for p in (ROOT / where).glob("*.md")
)
NEEDS_MORE = {"docs/transformers.md"}  # its blocks run in tests/hf, which has torch
MINUTES = 3
RUN_PAGE = Path(__file__).parents[1] / "harness" / "run_page.py"


@dataclass(frozen=True)
class Block:
    """A fenced block: the words after its fence, its text, and the line of its first character."""

    info: str
    text: str
    line: int

    @property
    def language(self) -> str:
        return self.info.split()[0] if self.info else ""

    @property
    def is_run(self) -> bool:
        return self.info == self.language


def blocks_of(markdown: str) -> list[Block]:
    fence = re.compile(r"^```([^\n`]*)\n(.*?)^```$", re.M | re.S)
    return [
        Block(m[1].strip(), m[2], markdown[: m.start(2)].count("\n") + 1)
        for m in fence.finditer(markdown)
    ]


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def with_blocks(*languages: str) -> list[object]:
    """The pages that have such a block and are tested here."""
    here = [page for page in PAGES if name_of(page) not in NEEDS_MORE]
    return [
        pytest.param(page, id=name_of(page))
        for page in here
        if any(block.language in languages for block in blocks_of(page.read_text()))
    ]


# --- Python and shell -----------------------------------------------------------------------------


@pytest.mark.parametrize("page", with_blocks("python", "sh"))
def test_python_and_shell_of_a_page_run_from_top_to_bottom(page: Path, tmp_path: Path) -> None:
    run_session(page.read_text(), name_of(page), tmp_path)


def run_session(markdown: str, name: str, directory: Path) -> None:
    command = directory / "bin" / "tinyllm"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m tinyllm "$@"\n')
    command.chmod(0o755)
    work = directory / "work"
    work.mkdir()
    environment = {
        **os.environ,
        "PATH": f"{command.parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT / "python"),
        "TINYLLM_LIB": str((BUILD / "libtinyllm.so").resolve()),
        "PYTHONWARNINGS": "error",
        "COLUMNS": "80",
    }
    done = subprocess.run(
        [sys.executable, "-X", "faulthandler", str(RUN_PAGE)],
        input=json.dumps([name, session_of(markdown)]), env=environment, cwd=work,
        capture_output=True, text=True, timeout=60 * MINUTES, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


def session_of(markdown: str) -> list[tuple[str, str, int, str | None]]:
    """Language, text, line and what is printed (None: not said) of the blocks that are run."""
    session: list[tuple[str, str, int, str | None]] = []
    before: Block | None = None
    for block in blocks_of(markdown):
        if block.info == "text printed":
            assert before is not None and before.is_run, (
                f"line {block.line}: nothing ran that could print it"
            )
            session[-1] = (*session[-1][:3], block.text)
        elif block.language in ("python", "sh") and block.is_run:
            session.append((block.language, block.text, block.line, None))
        before = block
    return session


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_blocks_say_what_they_are(page: Path) -> None:
    for block in blocks_of(page.read_text()):
        where = f"{name_of(page)}:{block.line}: ```{block.info}"
        known = r"|text|text printed|python|sh|c|c examples/\w+\.c|(python|sh|c) no-run \(.{10,}\)"
        assert re.fullmatch(known, block.info), (
            f"{where}: {Path(__file__).name} says what may stand there"
        )
        if block.language == "python":
            compile(block.text, where, "exec")


@pytest.mark.parametrize("page", sorted((ROOT / "docs").glob("*.md")), ids=name_of)
def test_prose_ends_at_100_columns(page: Path) -> None:
    lines = without_blocks(page.read_text()).splitlines()
    longer = [line for line in lines if len(line) > 100 and line.lstrip()[:1] not in ("|", "!")]
    assert longer == []  # but for tables and pictures


def test_a_session_notices_what_a_page_gets_wrong(tmp_path: Path) -> None:
    good = (
        "```python\nx = 1\n```\n```sh\necho a\n```\n```text printed\na\n```\n"
        "```python\nprint(x)\n```\n```text printed\n1\n```\n"
    )
    run_session(good, "good", tmp_path)
    faults = [("echo a", "false"), ("print(x)", "print(y)"), ("\n1\n", "\n2\n"), ("\na\n", "\nb\n")]
    for i, (old, new) in enumerate(faults):
        (tmp_path / str(i)).mkdir()
        with pytest.raises(AssertionError, match=r"bad:\d|bad\", line 11"):
            run_session(good.replace(old, new), "bad", tmp_path / str(i))


def test_dots_stand_for_what_is_not_shown() -> None:
    assert matches("a ... d\n", "a b c d\n") and not matches("a ... d\n", "a b\nc d\n")
    assert matches("a\n...\nd\n", "a\nb\nc\nd\n") and matches("a\n...\nd\n", "a\nd\n")
    assert not matches("a\n...\n", "b\n") and not matches("a.c\n", "abc\n")


# --- C --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", with_blocks("c"))
def test_c_of_a_page_compiles_and_runs_or_stands_in_an_example(page: Path, tmp_path: Path) -> None:
    for block in blocks_of(page.read_text()):
        where = f"{name_of(page)}:{block.line}"
        if block.info.startswith("c examples/"):
            source = block.info.removeprefix("c ")
            assert block.text in (ROOT / source).read_text(), (
                f"{where}: this does not stand in {source}"
            )
        elif block.info == "c":
            assert "int main(" in block.text, f"{where}: an excerpt says ```c examples/..."
            program = compile_c(block.text, tmp_path / f"line{block.line}")
            done = subprocess.run(
                [program], capture_output=True, text=True, timeout=60, check=False
            )
            assert done.returncode == 0, f"{where}: {done.stdout}{done.stderr}"


def compile_c(text: str, program: Path) -> Path:
    source = program.with_suffix(".c")
    source.write_text(text)
    strict = ["-Wall", "-Wextra", "-pedantic", "-Werror", f"-I{ROOT / 'c/include'}"]
    linked = [str(BUILD / "libtinyllm.a"), "-lm", "-pthread", "-o", str(program)]
    subprocess.run([os.environ.get("CC", "cc"), *strict, str(source), *linked], check=True)
    return program


# --- links ----------------------------------------------------------------------------------------


def without_blocks(markdown: str) -> str:
    return re.sub(r"^```.*?^```$", "", markdown, flags=re.M | re.S)


def anchors_of(markdown: str) -> set[str]:
    """Names of headings: lower case, no punctuation, hyphens for blanks, numbered if repeated."""
    anchors: set[str] = set()
    for title in re.findall(r"^#{1,6} +(.+?) *$", without_blocks(markdown), re.M):
        plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", title)
        anchor = re.sub(r"[^\w\- ]", "", plain.lower()).replace(" ", "-")
        n = 0
        while (named := f"{anchor}-{n}" if n else anchor) in anchors:
            n += 1
        anchors.add(named)
    return anchors


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"`[^`\n]*`", "code", without_blocks(page.read_text()))
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", target):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{name_of(page)}: no {path}"
        assert ROOT in file.parents or file == ROOT, (
            f"{name_of(page)}: {path} is outside the checkout"
        )
        assert not anchor or anchor in anchors_of(file.read_text()), (
            f"{name_of(page)}: no heading {target}"
        )


def test_anchors_follow_the_headings() -> None:
    text = "# A `b_c`, d!\n```sh\n# no heading\n```\n## A b\n## A b\n### [x](y) z\n"
    assert anchors_of(text) == {"a-b_c-d", "a-b", "a-b-1", "x-z"}


# --- figures and rules ----------------------------------------------------------------------------


def test_the_index_names_every_command_and_page() -> None:
    index = (ROOT / "docs/README.md").read_text()
    for command in COMMANDS:
        assert f"`{command.NAME}`" in index
    for page in (ROOT / "docs").glob("*.md"):
        assert page.name == "README.md" or f"]({page.name})" in index


def test_figures_of_the_performance_page_are_measured_ones() -> None:
    """They stand in the README: whoever measures anew changes both."""
    measured = set(re.findall(r"\d+(?:\.\d+)?", (ROOT / "README.md").read_text()))
    page = without_blocks((ROOT / "docs/performance.md").read_text())
    figures = re.findall(r"(\d+(?:\.\d+)?)(?:%| ms| µs)", page)
    assert len(figures) > 10
    assert set(figures) <= measured


def test_rules_and_faults_name_every_status_with_its_value() -> None:
    header = (ROOT / "c/include/tinyllm/abi.h").read_text()
    rules = (ROOT / "ABI.md").read_text()
    statuses = re.findall(r"X\((TL_\w+), (\d+)\)", header)
    assert len(statuses) >= 20
    for name, value in statuses:
        assert f"`{name}` | {value} |" in rules or f"`{name}` {value}" in rules, name
    faults = (ROOT / "docs/faults.md").read_text()
    for value, name in STATUS_NAMES.items():
        assert f"\n| `{name}` {value} |" in faults, name
    for name in errors.__all__:
        assert f"\n| `tinyllm.{name}` |" in faults, name
