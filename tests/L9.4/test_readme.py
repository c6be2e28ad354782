# SPDX-License-Identifier: MIT
"""What the README shows is what is there: its Python runs, its C stands in the example, which prints what was
worked out by hand."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILD = ROOT / os.environ.get("TINYLLM_BUILD", "c/build")


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.S)
    assert found, f"the README has no {language} block"
    return found[1]


def test_the_python_of_the_readme_runs() -> None:
    exec(compile(block("python"), "README.md", "exec"), {})


def test_the_c_of_the_readme_stands_in_the_example() -> None:
    assert block("c") in (ROOT / "examples/decode.c").read_text()


def test_the_c_example_prints_the_hand_worked_result(tmp_path: Path) -> None:
    program = tmp_path / "decode"
    command = [os.environ.get("CC", "cc"), "-std=c11", "-Wall", "-Wextra", "-pedantic", "-Werror"]
    command += ["-I", str(ROOT / "c/include"), "-o", str(program), str(ROOT / "examples/decode.c")]
    subprocess.run([*command, str(BUILD / "libtinyllm.a"), "-lm", "-pthread"], check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    assert printed == "[3.0000, 4.0000]\n"


def test_the_rules_name_every_status_with_its_value() -> None:
    header = (ROOT / "c/include/tinyllm/abi.h").read_text()
    rules = (ROOT / "ABI.md").read_text()
    statuses = re.findall(r"X\((TL_\w+), (\d+)\)", header)
    assert len(statuses) >= 20
    for name, value in statuses:
        assert f"`{name}` | {value} |" in rules or f"`{name}` {value}" in rules, name
