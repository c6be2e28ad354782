# SPDX-License-Identifier: MIT
"""docs/transformers.md and the example do what they say; what is missing or too old is named."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/transformers.md"


def run(*command: str) -> subprocess.CompletedProcess[str]:
    found = os.pathsep.join([os.environ["PYTHONPATH"], str(ROOT / "python")])
    return subprocess.run(
        [sys.executable, "-W", "ignore", *command], env={**os.environ, "PYTHONPATH": found},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


def test_the_blocks_of_the_page_run_from_top_to_bottom() -> None:
    """The blocks of Python are one session; "text printed" is what the one before it printed."""
    blocks = re.findall(r"^```(python|text printed)\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    programs = [text for kind, text in blocks if kind == "python"]
    done = run("-c", "\nprint('-' * 9)\n".join(programs))
    assert done.returncode == 0, done.stdout + done.stderr
    printed = done.stdout.split("-" * 9 + "\n")
    assert len(printed) == len(programs) >= 4
    i = -1
    for kind, text in blocks:
        i += kind == "python"
        assert kind == "python" or printed[i] == text


@pytest.mark.parametrize("options", [[], ["--smollm2"]])
def test_the_example_serves_the_tokens_of_generate(options: list[str]) -> None:
    done = run(str(ROOT / "examples/21_serve_transformers.py"), *options)
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if not line.startswith("fetching")]
    assert len(lines) >= 3 and all("equal to generate()" in line for line in lines), done.stdout
    assert not options or "The capital of France is Paris." in lines[0]


def test_the_package_does_not_load_torch() -> None:
    done = run(
        "-c",
        "import sys, tinyllm; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)",
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ({"torch": None}, "tinyllm.hf needs torch: pip install '.[hf]' in a"),
        ({"transformers": None}, "tinyllm.hf needs transformers: pip install '.[hf]' in"),
        ({"transformers": "4.57.6"}, "tinyllm.hf needs transformers 5.x, not 4.57.6: pip install"),
        ({"transformers": "6.0.0"}, "tinyllm.hf needs transformers 5.x, not 6.0.0: pip install"),
    ],
)
def test_what_is_missing_or_too_old_is_named(versions: dict[str, str | None], message: str) -> None:
    pretend = f"""
import importlib.metadata as metadata
found = metadata.version
def version(name, pretended={versions!r}):
    if name in pretended and pretended[name] is None:
        raise metadata.PackageNotFoundError(name)
    return pretended.get(name) or found(name)
metadata.version = version
import tinyllm.hf
"""
    done = run("-c", pretend)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1 and last.startswith(f"ImportError: {message}"), done.stderr
    assert "transformers 5.0.0 and 5.24.0 with torch 2.13.0 are tested" in last
