# SPDX-License-Identifier: MIT
"""Every numbered example does what it says: it is built and run as its head says, and what it
prints is worked out here in another way, by hand or from the definition of the arithmetic."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from tinyllm import reference, windowed_attention

ROOT = Path(__file__).resolve().parents[3]
BUILD = ROOT / os.environ.get("TINYLLM_BUILD", "c/build")
EXAMPLES = sorted(p.name for p in (ROOT / "examples").glob("[01]?_*.*"))


def output_of(name: str, tmp_path: Path) -> str:
    """What an example prints; nothing may be left on standard error."""
    source = ROOT / "examples" / name
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "PYTHONWARNINGS": "error"}
    environment["TINYLLM_LIB"] = str((BUILD / "libtinyllm.so").resolve())
    command = [sys.executable, str(source)] if name.endswith(".py") else [built(source, tmp_path)]
    done = subprocess.run(
        command,
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    return done.stdout


def built(source: Path, tmp_path: Path) -> str:
    """The program that the command in the head of ``source`` makes, against this checkout."""
    command = re.search(r"^ \* (cc .*) && \./a\.out \*/$", source.read_text(), re.M)
    assert command, f"{source.name} does not say how it is built"
    (tmp_path / "libtinyllm.so").symlink_to((BUILD / "libtinyllm.so").resolve())
    (tmp_path / "libtinyllm.so.0").symlink_to("libtinyllm.so")
    _, name, *libraries = command[1].split()
    assert name == source.name
    strict = ["-Wall", "-Wextra", "-pedantic", "-Werror", f"-I{ROOT / 'c/include'}"]
    place = [f"-L{tmp_path}", f"-Wl,-rpath,{tmp_path}", "-o", f"{tmp_path}/a.out"]
    subprocess.run(
        [os.environ.get("CC", "cc"), *strict, str(source), *libraries, *place], check=True
    )
    return f"{tmp_path}/a.out"


def digest(rows: NDArray[np.float32]) -> str:
    return hashlib.sha256(rows.tobytes()).hexdigest()[:16]


# --- what they print ------------------------------------------------------------------------------


def every_answer_as_alone(printed: str) -> None:
    """What the loop computed is each request's own; the one that was cancelled has less."""
    requests = re.findall(r"^request (\d): (\d+) \+ +(\d+) tokens, (.*)$", printed, re.M)
    sizes = [(str(i), str(43 + 5 * i)) for i in range(8)]
    assert [(i, prompt) for i, prompt, _, _ in requests] == sizes
    assert [(n, how) for i, _, n, how in requests if i != "4"] == [("12", "as alone")] * 7
    assert requests[4][3] == "cancelled"
    assert re.search(r"^\d+ tokens computed, \d+ found, [1-9]\d* times put off$", printed, re.M)


def lines(*expected: str) -> Callable[[str], None]:
    def check(printed: str) -> None:
        assert printed.splitlines() == list(expected)

    return check


def means_and_counts(printed: str) -> None:
    """The row at position p sees 0 .. p, values that are their positions."""
    rows = [f"row {i}: {p / 2:.4f}, log of the number of positions seen: {np.log(p + 1):.4f}"
            for i, p in enumerate((2, 3, 4, 5))]  # fmt: skip
    assert printed.splitlines() == rows


def merged(printed: str) -> None:
    """Attention over the formula's keys and values, in float64."""

    def value(i: NDArray[np.uint64]) -> NDArray[np.float64]:
        return ((i * 2654435761 & 0xFFFFFFFF) >> 8) / 2.0**24 - 0.5

    d, j = np.arange(32, dtype=np.uint64), np.arange(40000, dtype=np.uint64)[:, None]
    k, v = 8 * value(64 * j + d), value(64 * j + 32 + d)
    q = value(0xFFFFFFFF - np.arange(64, dtype=np.uint64)).reshape(1, 2, 1, 32)
    out, _ = windowed_attention(q, k[None, None], v[None, None], q_offset=39999, scale=0.25)
    *pair, verdict = printed.splitlines()
    assert verdict == "64 of 64 values have the same bits"
    for line in pair:
        shown = [float(x) for x in re.findall(r"[+-]\d\.\d+", line)]
        np.testing.assert_allclose(shown, out[0, 0, 0, :2], atol=2e-6)


def one_digest_for_the_prompt(printed: str) -> None:
    rng = np.random.default_rng(0)
    q = rng.standard_normal((100, 6, 32), np.float32)
    k, v = rng.standard_normal((2, 2, 100, 32), np.float32).astype(np.float16)
    rows, _ = reference.paged_attn(
        q,
        k[None],
        v[None],
        np.array([[0]]),
        np.array([100]),
        scale=32**-0.5,
        cu_seqlens_q=np.array([0, 100]),
    )
    assert [line.split()[-1] for line in printed.splitlines()] == 4 * [digest(rows)]


def near_float64(printed: str) -> None:
    off = [float(x) for x in re.findall(r"off by (\S+) from float64", printed)]
    assert len(off) == 2 and max(off) < 1e-5
    assert printed.endswith("59 slots written, none copied to be read\n")


def one_digest_for_the_row(printed: str) -> None:
    rng = np.random.default_rng(2)
    k, v = rng.standard_normal((2, 2, 2500, 64), np.float32).astype(np.float16)
    rng.standard_normal((7, 2, 2, 300, 64), np.float32)
    q = rng.standard_normal((8, 8, 64), np.float32)[:1]
    row = reference.paged_attn_decode(
        q, k[None], v[None], np.array([[0]]), np.array([2500]), scale=0.125
    )
    digests = [line.split()[-1] for line in printed.splitlines()]
    assert len(digests) >= 8 and set(digests) == {digest(row[0])}


EXPECTED: dict[str, Callable[[str], None]] = {
    "01_decode.c": lines("[3.0000, 4.0000]"),
    "02_fork_and_batch.c": lines(
        "a: mean of 1 2 3 = 2",
        "b: mean of 1 2 3 10 = 4",
        "3 blocks are used; block 0 has 2 holders",
    ),
    "03_own_memory.c": means_and_counts,
    "04_merge_across_processes.c": merged,
    "11_first_decode.py": lines(
        "a: 6 positions in blocks [0, 1], mean 3.5000",
        f"b: 7 positions in blocks [0, 2], mean {(21 + 27) / 7:.4f}",
        "blocks: {'free': 5, 'used': 3, 'cached': 0, 'evictions': 0, 'unrepresentable': 0}",
    ),
    "12_chunked_prefill.py": one_digest_for_the_prompt,
    "13_your_arrays.py": near_float64,
    "14_same_bits.py": one_digest_for_the_row,
    "15_prefix_cache.py": lines(
        "anna    0 of  9 tokens were there: blocks [0, 1, 2]",
        "ben     6 of  8 tokens were there: blocks [0, 3]",  # 4 of one block, 2 of the next
        "anna   12 of 13 tokens were there: blocks [0, 1, 2, 4]",
        "eve     0 of  8 tokens were there: blocks [5, 6]",
        "18 of 34 tokens found; {'free': 1, 'used': 7, 'cached': 0, 'evictions': 0, "
        "'unrepresentable': 0}",
    ),
    "16_serve.py": every_answer_as_alone,
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_prints_what_was_worked_out(name: str, tmp_path: Path) -> None:
    EXPECTED[name](output_of(name, tmp_path))


def test_every_expectation_has_its_example_and_every_example_its_line() -> None:
    assert sorted(EXPECTED) == EXAMPLES
    listed = re.findall(
        r"^\| \[`(\d\d_\w+\.\w+)`\]\(\1\) \|", (ROOT / "examples/README.md").read_text(), re.M
    )
    assert [name for name in listed if name[0] in "01"] == EXAMPLES


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_says_what_it_shows_and_how_it_is_run(name: str) -> None:
    licence, first, second = (ROOT / "examples" / name).read_text().splitlines()[:3]
    assert "SPDX-License-Identifier: MIT" in licence
    assert f"{name}: " in first
    assert (second == f" * cc {name} -ltinyllm && ./a.out */") or second.endswith(
        'Run it with python."""'
    )
