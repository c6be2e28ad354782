# SPDX-License-Identifier: MIT
"""What the tests of installing share: a checkout to build from, and clean places to run what
comes of it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOT_OURS = re.compile(
    r"TINYLLM_.*|PYTHON.*|CC|CFLAGS|LDFLAGS|MAKE.*|MFLAGS|MAX_JOBS|CMAKE_BUILD_PARALLEL_LEVEL"
    r"|VIRTUAL_ENV|PKG_CONFIG_.*|LD_LIBRARY_PATH"
)


def run(*command: object, cwd: Path, ok: bool = True, **variables: str) -> str:
    """What a command prints, both streams; it must end well, or, with ``ok=False``, must not."""
    clean = {name: value for name, value in os.environ.items() if not NOT_OURS.fullmatch(name)}
    done = subprocess.run(
        [*map(str, command)],
        cwd=cwd,
        env={**clean, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert (done.returncode == 0) == ok, (
        f"{' '.join(map(str, command))}: {done.returncode}\n{done.stdout}"
    )
    return done.stdout


def pytest_sessionstart() -> None:
    missing = [
        tool
        for tool in ("make", "cc", "c++", "cmake", "pkg-config", "git")
        if shutil.which(tool) is None
    ]
    if missing:
        pytest.exit(
            f"there is no {', '.join(missing)} "
            "(Debian: apt-get install make gcc g++ cmake pkg-config git)",
            2,
        )


@pytest.fixture(scope="session")
def version() -> str:
    header = (ROOT / "c/include/tinyllm/abi.h").read_text()
    (found,) = re.findall(r'^#define TL_VERSION "(.+)"$', header, flags=re.M)
    return str(found)


def clone(copy: Path) -> Path:
    """A copy of this checkout as git would clone it, with the changes that are not committed."""
    for name in run(
        "git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT
    ).splitlines():
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    return copy


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of this checkout, to be built or changed."""
    return clone(tmp_path / "checkout")


@pytest.fixture(scope="session")
def pristine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of this checkout in a folder whose name has blanks, that stays as it is."""
    return clone(tmp_path_factory.mktemp("with blanks") / "a check out")


# Counts in $0.log how many of it run at once, and makes empty objects of the library's sources.
QUICK_COMPILER = """\
#!/bin/sh
case "$*" in *" -c c/src/"*) ;; *) exec cc "$@" ;; esac
mkdir -p "$0.now"
touch "$0.now/$$"
sleep 0.02
ls "$0.now" | wc -l >>"$0.log"
for object; do :; done
cc -c -x c /dev/null -o "$object"
rm "$0.now/$$"
"""


@pytest.fixture
def quick_compiler(tmp_path: Path) -> Path:
    """A compiler for tests of how it is called; what it makes is of no use."""
    compiler = tmp_path / "quick/cc"
    compiler.parent.mkdir()
    compiler.write_text(QUICK_COMPILER)
    compiler.chmod(0o755)
    return compiler


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with an sdist of this checkout and the wheel made from it, as for a release."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, ROOT, cwd=folder)
    return folder


class Python:
    """A fresh virtual environment and an empty folder to run in, far from any checkout."""

    def __init__(self, folder: Path) -> None:
        self.home, self.bin = folder / "home", folder / "venv/bin"
        self.home.mkdir(parents=True)
        run(sys.executable, "-m", "venv", folder / "venv", cwd=self.home)

    def pip(self, *words: object, ok: bool = True, **variables: str) -> str:
        return run(self.bin / "python", "-m", "pip", *words, cwd=self.home, ok=ok, **variables)

    def says(self, program: str, **variables: str) -> str:
        return run(self.bin / "python", "-c", program, cwd=self.home, ok=True, **variables)


@pytest.fixture
def python(tmp_path: Path) -> Python:
    return Python(tmp_path / "python")
