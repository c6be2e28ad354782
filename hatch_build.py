# SPDX-License-Identifier: MIT
"""What pip runs to build the package: make builds the library, which goes into the wheel.

A wheel fits every Python 3 of its platform. Its library is built from nothing in a folder of its
own, so that neither objects lying in c/build nor flags of the environment get into it, and it has
every instruction set.
An editable install uses c/build/libtinyllm.so of the checkout and brings it up to date.

Either uses as many CPUs as MAX_JOBS or the -j of MAKEFLAGS says, else all of them.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

# -march=native would make a wheel for this machine alone. The warnings of a newer compiler are no
# reason not to install.
_FLAGS = ["CFLAGS=-O3", "LDFLAGS=", "WARN="]
_NEEDS = (
    "make and a C compiler are needed to build libtinyllm "
    "(Debian: apt-get install make gcc libc6-dev)"
)


class LibraryHook(BuildHookInterface):  # type: ignore[type-arg]
    """Named in pyproject.toml."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Before the files are collected; ``version`` is "standard" or "editable"."""
        if version == "editable":
            self._make(Path(self.root))
            return
        self._folder = tempfile.TemporaryDirectory(prefix="libtinyllm-")
        tree = Path(self._folder.name)
        for name in ("Makefile", "c"):  # make works there: its paths are then free of blanks
            (tree / name).symlink_to(Path(self.root, name))
        self._make(tree, "B=build", *_FLAGS, "build/libtinyllm.so")
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["force_include"][str(tree / "build/libtinyllm.so")] = (
            "tinyllm/_lib/libtinyllm.so"
        )
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """After the wheel is written."""
        if version != "editable":
            self._folder.cleanup()

    def _make(self, folder: Path, *words: str) -> None:
        if shutil.which("make") is None:
            self.app.abort(f"there is no make: {_NEEDS}")
        done = subprocess.run(
            ["make", "--no-print-directory", *words],
            cwd=folder,
            env=_environment(),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            return
        why = f": {_NEEDS}" if "no C compiler" in done.stdout else ""
        self.app.abort(f"{done.stdout}make has failed, see above{why}")


def _environment() -> dict[str, str]:
    """That of pip. Of a make that runs pip, the number of jobs: its job server is closed to us."""
    dropped = ("MFLAGS", "MAKELEVEL")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    words = kept.get("MAKEFLAGS", "").split()
    kept["MAKEFLAGS"] = " ".join(word for word in words if not word.startswith("--jobserver"))
    return kept
