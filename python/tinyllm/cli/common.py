# SPDX-License-Identifier: MIT
"""What the commands share: their error, the library, sizes for people, JSON."""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any, TextIO

from tinyllm.ffi.libtinyllm import Lib, load, signatures


class CliError(Exception):
    """A command cannot do what it was asked; one line, and the exit status is 2."""


def library() -> Lib:
    """The library, with every function this package knows. Raises: CliError, OSError, AbiMismatch."""
    lib = load()
    for name in signatures():
        try:
            getattr(lib, name)
        except AttributeError as error:
            raise CliError(
                f"{error}: it is older than this package; `make` in a checkout rebuilds it"
            ) from None
    return lib


def add_json(parser: argparse.ArgumentParser) -> None:
    """The option ``--json``."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def print_json(value: Any) -> None:
    """One JSON document on stdout."""
    print(json.dumps(value, indent=2, allow_nan=False))


def human_bytes(n: float) -> str:
    """``n`` bytes with three digits: 640 B, 1.50 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if n < 1000 or (unit == "B" and n < 1024):
            return f"{n:.0f} B" if unit == "B" else f"{n:.3g} {unit}"
        n /= 1024
    return f"{n:.3g} TiB"


def has_colour(stream: TextIO) -> bool:
    """Whether ``stream`` is a terminal that wants colour (NO_COLOR and TERM=dumb say no)."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def bold(text: str) -> str:
    """``text`` for stdout, bold where that shows."""
    return f"\x1b[1m{text}\x1b[0m" if has_colour(sys.stdout) else text
