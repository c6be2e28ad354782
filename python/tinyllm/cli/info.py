# SPDX-License-Identifier: MIT
"""``tinyllm info``: which library is used, and what the machine offers it."""

from __future__ import annotations

import argparse
import sys
from typing import Any, Final

import numpy as np

import tinyllm
from tinyllm.cli import machine
from tinyllm.cli.common import CliError, add_json, human_bytes, library, print_json

NAME: Final = "info"
HELP: Final = "which library is used, on which instruction set, and what this machine offers it"
EXAMPLES: Final = """\
  tinyllm info
  tinyllm info --json        to paste into a bug report
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    facts: dict[str, Any] = {"version": tinyllm.__version__}
    problem = None
    try:
        facts |= library_facts()
    except (CliError, tinyllm.AbiMismatch, OSError) as error:
        problem = str(error)
    facts |= machine_facts()
    if args.json:
        print_json(facts | {"problem": problem})
    else:
        print_facts(facts)
    if problem is not None:
        print(f"tinyllm info: {problem}", file=sys.stderr)
    return 0 if problem is None else 2


def library_facts() -> dict[str, Any]:
    """What the library says of itself."""
    lib = library()
    return {
        "library": str(lib.path),
        "abi_version": lib.abi_version(),
        "numerics_version": int(lib.tl_numerics_version()),
        "isa": lib.tl_isa_name().decode(),
    }


def machine_facts() -> dict[str, Any]:
    """What the library works on and with."""
    usable, present = machine.cpus()
    total, available = machine.memory()
    return {
        "cpu": machine.cpu_model(),
        "cpus_usable": usable,
        "cpus": present,
        "last_level_cache_bytes": machine.last_level_cache(),
        "memory_bytes": total,
        "memory_available_bytes": available,
        "huge_pages": machine.huge_pages(),
        "python": sys.version.split()[0],
        "numpy": np.__version__,
    }


def print_facts(facts: dict[str, Any]) -> None:
    """The facts, one a line."""
    for name, value in facts.items():
        shown = human_bytes(value) if name.endswith("_bytes") and value is not None else value
        print(f"{name.removesuffix('_bytes').replace('_', ' '):20} {'unknown' if shown is None else shown}")
