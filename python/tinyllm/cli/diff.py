# SPDX-License-Identifier: MIT
"""``tinyllm diff``: where two recordings stop having the same bits."""

from __future__ import annotations

import argparse
from typing import Final

import tinyllm
from tinyllm.cli.common import CliError, add_json, print_json

NAME: Final = "diff"
HELP: Final = "where two recordings of attention calls stop having the same bits"
EXAMPLES: Final = """\
  tinyllm diff before.tlrec after.tlrec
  tinyllm diff before.tlrec after.tlrec --all
  tinyllm diff before.tlrec after.tlrec --json

Recordings are made in Python: with tinyllm.record("before.tlrec"): ...
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("a", metavar="A", help="a file that tinyllm.record wrote")
    parser.add_argument("b", metavar="B", help="another one, of the same calls")
    parser.add_argument(
        "--all", action="store_true", help="show every call that differs, not only the first"
    )
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    try:
        found = tinyllm.diff(args.a, args.b)
    except ValueError as error:
        raise CliError(str(error)) from error
    if args.json:
        print_json(found.to_json())
    else:
        print(found.report(every=args.all))
    return 0 if found.equal else 1
