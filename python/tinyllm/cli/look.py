# SPDX-License-Identifier: MIT
"""``tinyllm look``: what a KV cache looked like when ``PagedKVCache.snapshot`` wrote a file of
it."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Sequence
from typing import Any, Final

from tinyllm.cli.common import CliError, add_json, print_json
from tinyllm.observe.pool.layout import SORTS, ordered
from tinyllm.observe.pool.metrics import prometheus
from tinyllm.observe.pool.picture import Picture
from tinyllm.observe.pool.snapshot import Snapshot
from tinyllm.observe.pool.terminal import LEAST_WIDTH, MOST_WIDTH

NAME: Final = "look"
HELP: Final = "a picture of a KV cache from a snapshot file"
EXAMPLES: Final = """\
  tinyllm look cache.json
  tinyllm look cache.json --svg cache.svg
  tinyllm look cache.json --sort blocks
  tinyllm look cache.json --sequences anna,ben
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
    parser.add_argument("--no-colour", action="store_true", help="letters without colours")
    parser.add_argument(
        "--sequences",
        metavar="NAME,NAME",
        type=_names,
        help='show these alone, in this order; a name with a comma is "quoted"',
    )
    parser.add_argument(
        "--sort", choices=SORTS, help="show those with most blocks or tokens first, or by name"
    )
    parser.add_argument("--metrics", action="store_true", help="print Prometheus metrics instead")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    if args.metrics and args.json:
        raise CliError("--metrics and --json exclude each other")
    try:
        snapshot = Snapshot.load(args.file)
    except ValueError as error:
        raise CliError(str(error)) from None
    chosen = None if args.sequences is None else _places(snapshot, args.sequences)
    try:
        picture = Picture(snapshot, sequences=chosen, sort=args.sort)
    except ValueError as error:
        raise CliError(str(error).removeprefix("look: ")) from None
    if args.svg is not None:
        picture.save(args.svg)
    if args.json:
        print_json(facts_of(snapshot, ordered(snapshot, chosen, args.sort)))
    elif args.metrics:
        print(prometheus(snapshot), end="")
    else:
        print(picture.text(args.width, colour=False if args.no_colour else None))
    return 1 if snapshot.unowned.any() else 0


def facts_of(snapshot: Snapshot, places: Sequence[int]) -> dict[str, Any]:
    """What the picture shows, for machines: sizes, counters, the sequences at ``places``, and
    blocks whose references are not those of their holders."""
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
            for s in map(snapshot.sequences.__getitem__, places)
        ],
        "surplus_references": dict(zip(map(str, ids), surplus, strict=True)),
    }


def _names(text: str) -> list[str]:
    try:
        (names,) = csv.reader([text], strict=True)
    except (ValueError, csv.Error):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of names") from None
    return names


def _places(snapshot: Snapshot, names: Sequence[str]) -> list[int]:
    """Where sequences of these names stand: all of a name, where ids of two types read alike."""
    places: dict[str, list[int]] = {}
    for i, sequence in enumerate(snapshot.sequences):
        places.setdefault(sequence.name, []).append(i)
    for name in names:
        if name not in places:
            some = ", ".join(f"{there!r:.40}" for there in [*places][:6])
            more = ", ..." if len(places) > 6 else ""
            raise CliError(f"no sequence {name!r:.40}; there are {len(places)}: {some}{more}")
    return [i for name in names for i in places[name]]


def _width(text: str) -> int:
    if not text.isdecimal() or not LEAST_WIDTH <= int(text) <= MOST_WIDTH:
        raise argparse.ArgumentTypeError(f"{text!r} is no width of {LEAST_WIDTH} .. {MOST_WIDTH}")
    return int(text)
