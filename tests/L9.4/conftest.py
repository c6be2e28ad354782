# SPDX-License-Identifier: MIT
"""What the Python tests share: the package on the path, the library (which they never build),
subprocesses."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT / "python") not in sys.path:
    sys.path.insert(0, str(ROOT / "python"))

from tinyllm.ffi.libtinyllm import Lib, load  # noqa: E402


@pytest.fixture(scope="session")
def root() -> Path:
    """The top of the checkout."""
    return ROOT


@pytest.fixture(scope="session")
def lib() -> Lib:
    """The library under test: $TINYLLM_LIB, else c/build/libtinyllm.so."""
    try:
        return load()
    except FileNotFoundError as error:
        missing = str(error)
    pytest.fail(f"the library is not built, run make first: {missing}", pytrace=False)


RunPython = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_python(lib: Lib) -> RunPython:
    """Runs a program in a fresh interpreter that sees the package and the same library, for a
    minute at most."""

    def run(code: str, **env: str) -> subprocess.CompletedProcess[str]:
        environment = {
            **os.environ,
            "PYTHONPATH": str(ROOT / "python"),
            "TINYLLM_LIB": str(lib.path),
            **env,
        }
        return subprocess.run(
            [sys.executable, "-X", "faulthandler", "-c", code],
            env=environment, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    return run


@pytest.fixture
def run_silently(run_python: RunPython) -> Callable[..., str]:
    """``run_python`` for programs that must end with status 0 and nothing on stderr; gives what
    they print."""

    def run(code: str, **env: str) -> str:
        done = run_python(code, **env)
        assert (done.returncode, done.stderr) == (0, ""), done.stderr
        return done.stdout

    return run
