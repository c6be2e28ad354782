# SPDX-License-Identifier: MIT
"""counts.py: compares the instruction counts that count_step prints with those kept in counts.txt.

    count_step | python counts.py [--update] [--why TEXT]

Prints step, new count, kept count and change. A change above 2% either way, or a step that is not
kept, must be explained: exit status 1 until ``--update --why TEXT`` writes the new counts and adds
a line of history.
Counts made with another compiler or C library are not comparable: printed, exit status 0;
``--update`` starts from them.
"""

from __future__ import annotations

import argparse
import sys
from datetime import date
from pathlib import Path

KEPT = Path(__file__).with_name("counts.txt")
LIMIT = 0.02
HEAD = "made with: "

Counts = dict[tuple[str, str], int]


def parse(lines: list[str]) -> tuple[str, Counts]:
    """What the counts were made with, and the counts by step and instruction set."""
    made_with, counts = "", {}
    for line in lines:
        if line.startswith(HEAD):
            made_with = line[len(HEAD) :].strip()
        elif line.strip() and not line.startswith("#"):
            step, isa, count = line.split()
            counts[step, isa] = int(count)
    return made_with, counts


def change(old: int | None, new: int) -> float | None:
    """By what part ``new`` is more than ``old``."""
    return None if old is None else new / old - 1


def show(new: Counts, old: Counts) -> tuple[bool, list[str]]:
    """Prints the comparison; gives whether a change has to be explained, and a line for each."""
    unexplained, changes = False, []
    print(f"{'step':32} {'':7} {'now':>10} {'kept':>10} {'change':>8}")
    for (step, isa), count in new.items():
        kept = old.get((step, isa))
        part = change(kept, count)
        text = "new" if part is None else f"{100 * part:+.1f}%"
        print(f"{step:32} {isa:7} {count:10} {kept or '-':>10} {text:>8}")
        unexplained |= part is None or abs(part) > LIMIT
        if part is not None and abs(part) > LIMIT:
            changes.append(f"  {step} {isa} {kept} -> {count} ({text})")
    return unexplained, changes


def write(made_with: str, new: Counts, history: list[str], today: list[str]) -> None:
    """Writes counts.txt."""
    lines = [
        "# Instructions of small fixed steps (count_step.c), compared by `make counts`. A change",
        "# above 2% is explained in the history: make counts UPDATE=1 WHY='...'. Other compilers",
        "# give other counts.",
        f"{HEAD}{made_with}",
        *(f"{step:32} {isa:7} {count:10}" for (step, isa), count in new.items()),
        "# History",
        *history,
        *(f"# {line}" for line in today),
    ]
    KEPT.write_text("\n".join(lines) + "\n")


def main() -> int:
    """Compares standard input with counts.txt."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--update", action="store_true")
    parser.add_argument("--why", default="")
    options = parser.parse_args()
    made_with, new = parse(sys.stdin.read().splitlines())
    if not new:
        print("counts: nothing was counted (x86-64 only)")
        return 0
    kept_lines = KEPT.read_text().splitlines() if KEPT.exists() else []
    kept_with, old = parse(kept_lines)
    print(f"counts: {HEAD}{made_with}")
    comparable = made_with == kept_with
    unexplained, changes = show(new, old)
    if not comparable and kept_lines:
        print(f"counts: not comparable, those kept were {HEAD}{kept_with}")
    if not options.update:
        if comparable and unexplained:
            print("counts: changed by more than 2%; explain it: make counts UPDATE=1 WHY='...'")
        return int(comparable and unexplained)
    if unexplained and not options.why:
        print("counts: nothing written, WHY='...' is missing")
        return 1
    at = kept_lines.index("# History") + 1 if "# History" in kept_lines else len(kept_lines)
    today = (
        [f"{date.today()}: {options.why}", *(changes if comparable else [])] if unexplained else []
    )
    write(made_with, {**(old if comparable else {}), **new}, kept_lines[at:], today)
    print(f"counts: {KEPT.name} written")
    return 0


if __name__ == "__main__":
    sys.exit(main())
