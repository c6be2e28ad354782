# SPDX-License-Identifier: MIT
"""One version, written in abi.h; every copy of the package answers with its own."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tinyllm
from tinyllm.ffi.libtinyllm import Lib


def version_said_by(site: Path, *path: Path) -> str:
    """``tinyllm.__version__`` of the package in ``site``, with further folders behind it on the
    path."""
    program = (
        f"import sys; sys.path[:0] = {[str(site), *map(str, path)]!r}\n"
        "import tinyllm; print(tinyllm.__version__)"
    )
    return subprocess.run(
        [sys.executable, "-c", program], check=True, capture_output=True, text=True, cwd=site
    ).stdout.strip()


def copied(root: Path, site: Path) -> Path:
    shutil.copytree(
        root / "python/tinyllm", site / "tinyllm", ignore=shutil.ignore_patterns("__pycache__")
    )
    return site


def with_metadata(site: Path, version: str) -> Path:
    info = site / f"libtinyllm-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: libtinyllm\nVersion: {version}\n")
    return site


def test_package_header_and_library_have_the_same_version(root: Path, lib: Lib) -> None:
    (version,) = re.findall(
        r'^#define TL_VERSION "(.+)"$', (root / "c/include/tinyllm/abi.h").read_text(), flags=re.M
    )
    assert re.fullmatch(r"\d+\.\d+\.\d+(\.dev\d+|rc\d+)?", version), "pip and CMake both order it"
    assert tinyllm.__version__ == version == lib.tl_version().decode()


def test_a_checkout_answers_with_its_header_whatever_else_is_installed(
    root: Path, tmp_path: Path
) -> None:
    checkout = copied(root, tmp_path / "checkout/python").parent
    header = checkout / "c/include/tinyllm/abi.h"
    header.parent.mkdir(parents=True)
    header.write_text('#define TL_VERSION "7.8.9"\n')
    installed = with_metadata(copied(root, tmp_path / "site"), "1.2.3")
    assert version_said_by(checkout / "python", installed) == "7.8.9"
    assert version_said_by(installed, checkout / "python") == "1.2.3"


def test_an_installed_copy_answers_with_its_own_metadata(root: Path, tmp_path: Path) -> None:
    other = with_metadata(tmp_path / "other", "9.9.9")
    assert (
        version_said_by(with_metadata(copied(root, tmp_path / "site"), "1.2.3"), other) == "1.2.3"
    )
    assert version_said_by(copied(root, tmp_path / "bare"), other) == "0+unknown"


@pytest.mark.parametrize("text", ["", '#define TL_VERSION "1"\n#define TL_VERSION "2"\n'])
def test_a_header_without_one_version_is_not_passed_over(
    root: Path, tmp_path: Path, text: str
) -> None:
    site = with_metadata(copied(root, tmp_path / "checkout/python"), "1.2.3")
    header = tmp_path / "checkout/c/include/tinyllm/abi.h"
    header.parent.mkdir(parents=True)
    header.write_text(text)
    with pytest.raises(subprocess.CalledProcessError):
        version_said_by(site)
