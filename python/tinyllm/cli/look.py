# SPDX-License-Identifier: MIT
"""``tinyllm look``: what a KV cache looked like when ``PagedKVCache.snapshot`` wrote a file of
it."""

from __future__ import annotations

import argparse
from typing import Any, Final

from tinyllm.cli.common import CliError, add_json, print_json
from tinyllm.observe.pool.metrics import prometheus
from tinyllm.observe.pool.picture import Picture
from tinyllm.observe.pool.snapshot import Snapshot
from tinyllm.observe.pool.terminal import LEAST_WIDTH, MOST_WIDTH

NAME: Final = "look"
HELP: Final = "a picture of a KV cache from a snapshot file"
EXAMPLES: Final = """\
  tinyllm look cache.json
  tinyllm look cache.json --svg cache.svg
  tinyllm look cache.json --metrics > cache.prom

cache.snapshot("cache.json") writes such a file. The exit status is 1 where the
references on some block are not those of the sequences that hold it: a leak, or
a block taken by functions of the C headers, past the cache.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", metavar="FILE.json", help="a snapshot")
    parser.add_argument(
        "--svg", metavar="OUT.svg", help="write the picture there too, to open in a browser"
    )
    parser.add_argument(
        "--width", metavar="N", type=_width, help="columns to draw in (the terminal's)"
    )
    parser.add_argument("--no-colour", action="store_true", help="letters instead of coloured bars")
    parser.add_argument("--metrics", action="store_true", help="print Prometheus metrics instead")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    if args.metrics and args.json:
        raise CliError("--metrics and --json exclude each other")
    try:
        snapshot = Snapshot.load(args.file)
    except ValueError as error:
        raise CliError(str(error)) from None
    picture = Picture(snapshot)
    if args.svg is not None:
        picture.save(args.svg)
    if args.json:
        print_json(facts_of(snapshot))
    elif args.metrics:
        print(prometheus(snapshot), end="")
    else:
        print(picture.text(args.width, colour=False if args.no_colour else None))
    return 1 if snapshot.unowned.any() else 0


def facts_of(snapshot: Snapshot) -> dict[str, Any]:
    """What the picture shows, for machines: sizes, counters, sequences, and blocks whose references
    are not those of their holders."""
    amiss = snapshot.unowned != 0
    ids, surplus = snapshot.blocks["id"][amiss].tolist(), snapshot.unowned[amiss].tolist()
    return {
        "pool": snapshot.sizes,
        "counters": snapshot.counters,
        "sequences": [
            {
                "name": s.name,
                "lengths": list(s.lengths),
                "held": len(s.held),
                "gone": s.gone,
                "runs": s.runs,
            }
            for s in snapshot.sequences
        ],
        "surplus_references": dict(zip(map(str, ids), surplus, strict=True)),
    }


def _width(text: str) -> int:
    if not text.isdecimal() or not LEAST_WIDTH <= int(text) <= MOST_WIDTH:
        raise argparse.ArgumentTypeError(f"{text!r} is no width of {LEAST_WIDTH} .. {MOST_WIDTH}")
    return int(text)
