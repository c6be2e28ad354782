# SPDX-License-Identifier: MIT
"""What the commands share: their error, the library, bold text, JSON, types of arguments."""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from tinyllm._kv_format import FORMATS
from tinyllm._terminal import wants_colour
from tinyllm.ffi.libtinyllm import Lib, load, signatures

_PACKAGE: Final = Path(__file__).resolve().parents[2]  # what holds the package, for sys.path


class CliError(Exception):
    """A command cannot do what it was asked; one line, and the exit status is 2."""


def library() -> Lib:
    """The library, with every function this package knows.

    Raises: CliError, OSError, AbiMismatch.
    """
    lib = load()
    for name in signatures():
        try:
            getattr(lib, name)
        except AttributeError as error:
            raise CliError(
                f"{error}: it is older than this package; `make` in a checkout rebuilds it"
            ) from None
    return lib


def instruction_set(lib: Lib) -> str:
    """The instruction set that ``lib`` runs on. Raises: CliError for an unknown TINYLLM_ISA."""
    name, names = str(lib.tl_isa_name().decode()), lib.tl_isa_names().decode()
    if name not in names.split():
        raise CliError(
            f"TINYLLM_ISA={name} is no instruction set of this machine and build; there are: "
            f"{names}"
        )
    return name


def in_process(code: str, lib: Lib, isa: str) -> subprocess.CompletedProcess[str]:
    """Runs ``code`` with this package, ``lib`` and the instruction set ``isa``, which a process
    chooses once.

    Raises: subprocess.TimeoutExpired after five minutes.
    """
    path = os.pathsep.join(filter(None, (str(_PACKAGE), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {
        "PYTHONPATH": path,
        "TINYLLM_LIB": str(lib.path),
        "TINYLLM_ISA": isa,
    }
    environment["PYTHONSAFEPATH"] = "1"  # nothing from the current directory
    return subprocess.run(
        [sys.executable, "-c", code],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """An interrupt that comes in the block is raised at its end: for what compiled modules do, some
    of which drop the exception where it finds them."""
    if threading.current_thread() is not threading.main_thread():
        yield  # which is where interrupts go
        return
    came: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_DFL if before is None else before)
        if came:
            signal.raise_signal(signal.SIGINT)


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option ``--json``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=2, allow_nan=False))


def bold(text: str) -> str:
    """``text`` for stdout, bold where that shows."""
    return f"\x1b[1m{text}\x1b[0m" if wants_colour(sys.stdout) else text


# --- arguments ------------------------------------------------------------------------------------


def number(low: int, high: int) -> Callable[[str], int]:
    """The type of an argument that is an integer of [low, high]."""

    def parse(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,19}", text):
            raise argparse.ArgumentTypeError(f"{text}: not a whole number")
        value = int(text)
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text}: not within {low} .. {high}")
        return value

    return parse


def counts(low: int, high: int) -> Callable[[str], list[int]]:
    """The type of an argument that is integers of [low, high] with commas between them."""
    one = number(low, high)
    return lambda text: [one(part) for part in text.split(",")]


def heads(text: str) -> tuple[int, int]:
    """``32/8``: query heads and KV heads; one number stands for both."""
    parts = [number(1, 1 << 16)(part) for part in text.split("/")]
    if len(parts) > 2:
        raise argparse.ArgumentTypeError(f"{text}: not query heads / KV heads, such as 32/8")
    if parts[0] % parts[-1]:
        raise argparse.ArgumentTypeError(f"{text}: {parts[0]} is no multiple of {parts[-1]}")
    return parts[0], parts[-1]


def kv_dtype(text: str) -> str:
    """What K and V are stored as, by name."""
    if text not in FORMATS:
        raise argparse.ArgumentTypeError(f"{text}: not one of {', '.join(FORMATS)}")
    return text
