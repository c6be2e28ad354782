# SPDX-License-Identifier: MIT
"""``tinyllm info``: which library is used, and what the machine offers it."""

from __future__ import annotations

import argparse
import sys
from typing import Any, Final

import numpy as np

import tinyllm
from tinyllm import _cgroup
from tinyllm._check import INT32_MAX
from tinyllm._kv_format import FORMATS, KvFormat
from tinyllm._words import human_bytes
from tinyllm.cli import machine
from tinyllm.cli.common import (
    CliError,
    add_json,
    bold,
    heads,
    instruction_set,
    kv_dtype,
    library,
    number,
    print_json,
)

NAME: Final = "info"
HELP: Final = "which library is used, on which instruction set, and what this machine offers it"
EXAMPLES: Final = """\
  tinyllm info
  tinyllm info --json                                to go with a report
  tinyllm info --heads 32/8 --dim 128 --layers 32    what such a cache takes

Where the library is not found or cannot be used, the rest is printed, the
reason goes to stderr, and the exit status is 2.
"""

_HUGE_PAGES: Final = {
    "always": "a cache lies in large ones where there are any",
    "madvise": "a cache asks for large ones, and gets what there are",
    "never": "there are no large ones, and a big cache is walked more slowly",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)
    size = number(1, INT32_MAX)
    shape = parser.add_argument_group("what a cache takes", "all but the last two together")
    shape.add_argument("--heads", type=heads, metavar="H/KV", help="query heads and KV heads")
    shape.add_argument("--dim", type=size, metavar="D", help="head width")
    shape.add_argument("--layers", type=size, metavar="N", help="layers")
    shape.add_argument(
        "--block", type=size, default=16, metavar="N", help="positions in a block (16)"
    )
    shape.add_argument(
        "--dtype", type=kv_dtype, default="float16", metavar="NAME", help="of K and V (float16)"
    )


def run(args: argparse.Namespace) -> int:
    facts: dict[str, Any] = {"version": tinyllm.__version__}
    shape = (args.heads, args.dim, args.layers)
    if None in shape and shape != (None,) * 3:
        raise CliError(
            "--heads, --dim and --layers say together what a cache takes: give all three"
        )
    problem = None
    try:
        facts |= library_facts()
        instruction_set(library())
    except (CliError, tinyllm.AbiMismatch, OSError) as error:
        problem = str(error)
    facts |= machine_facts()
    if args.heads:
        facts["cache"] = cache_facts(
            args.heads[1], args.dim, args.layers, args.block, FORMATS[args.dtype]
        )
    if args.json:
        print_json(facts | {"problem": problem})
    else:
        print_facts(facts)
    if problem is not None:
        raise CliError(problem)
    return 0


def library_facts() -> dict[str, Any]:
    """What the library says of itself."""
    lib = library()
    return {
        "library": str(lib.path),
        "library_version": lib.tl_version().decode(),
        "abi_version": lib.abi_version(),
        "numerics_version": int(lib.tl_numerics_version()),
        "isa": lib.tl_isa_name().decode(),
        "isa_names": lib.tl_isa_names().decode().split(),
    }


def machine_facts() -> dict[str, Any]:
    """What the library works on and with."""
    usable, present = machine.cpus()
    total, available = machine.memory()
    return {
        "cpu": machine.cpu_model(),
        "cpus_usable": usable,
        "cpus": present,
        "cpu_quota": _cgroup.cpu_quota(),
        "last_level_cache_bytes": machine.last_level_cache(),
        "memory_bytes": total,
        "memory_limit_bytes": _cgroup.memory_limit(),
        "memory_available_bytes": available,
        "huge_pages": machine.huge_pages(),
        "python": sys.version.split()[0],
        "numpy": np.__version__,
    }


def cache_facts(
    kv_heads: int, dim: int, layers: int, block: int, form: KvFormat
) -> dict[str, int | str]:
    """What K and V of all layers take, as ``tl_kv_pool`` lays a block out."""
    strips = 2 * kv_heads * layers
    return {
        "dtype": form.name,
        "block_tokens": block,
        "token_bytes": strips * form.row_bytes(dim),
        "block_bytes": strips * form.strip_bytes(block, dim),
        "blocks_for_1024_tokens": -(-1024 // block),
    }


def print_facts(facts: dict[str, Any]) -> None:
    """The facts by subject; what is not known is left out."""
    print(bold(f"tinyllm {facts['version']}"))
    if "library" in facts:
        versions = "{library_version}, ABI {abi_version}, numerics {numerics_version}".format_map(
            facts
        )
        line("library", facts["library"])
        line("version", versions)
        line("runs on", facts["isa"])
        line("could run on", f"{' '.join(facts['isa_names'])} (TINYLLM_ISA names another one)")
    line("Python", f"{facts['python']}, numpy {facts['numpy']}")
    print(bold("machine"))
    line("CPU", facts["cpu"])
    quota = f" (a quota of {facts['cpu_quota']:.3g})" if facts["cpu_quota"] else ""
    line("CPUs", f"{facts['cpus_usable']} that this process may use, of {facts['cpus']}{quota}")
    if facts["last_level_cache_bytes"] is not None:
        line("cache", human_bytes(facts["last_level_cache_bytes"]))
    if facts["memory_bytes"] is not None:
        limited = facts["memory_bytes"] == facts["memory_limit_bytes"]
        whose = " (the limit of this container)" if limited else ""
        line("memory", f"{human_bytes(facts['memory_bytes'])}{whose}")
    if facts["memory_available_bytes"] is not None:
        line("free", human_bytes(facts["memory_available_bytes"]))
    mode = facts["huge_pages"]
    line("pages", f"{mode}: {_HUGE_PAGES[mode]}" if mode else "not known")
    if "cache" in facts:
        print_cache(facts["cache"], facts["memory_available_bytes"])


def print_cache(cache: dict[str, Any], free: int | None) -> None:
    """What a cache takes, and what there is room for."""
    block, token = cache["block_tokens"], cache["token_bytes"]
    print(bold(f"K and V in {cache['dtype']}, blocks of {block}"))
    line("a block", human_bytes(cache["block_bytes"]))
    line("1024 tokens", f"{cache['blocks_for_1024_tokens']} blocks, {human_bytes(1024 * token)}")
    if free is not None:
        line("room for", f"{free // cache['block_bytes']} blocks, in what is free now")


def line(name: str, value: str) -> None:
    print(f"  {name:13} {value}")
