# SPDX-License-Identifier: MIT
"""``tinyllm selftest``: whether this machine gives the bits of the numerics version."""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from typing import Any, Final

from tinyllm.cli import golden
from tinyllm.cli.common import add_json, in_process, library, print_json
from tinyllm.ffi.libtinyllm import Lib

NAME: Final = "selftest"
HELP: Final = "do the results have the right bits, on every instruction set this machine has?"
EXAMPLES: Final = f"""\
  tinyllm selftest           a few seconds; exit status 1 where any bit differs
  tinyllm selftest --json    the digests, to compare with another machine's

It computes {len(golden.GROUPS)} groups of results (decode, chunks and prefill with their options,
K and V stored in every dtype and read back, softmax, exp, conversions,
exports) from fixed numbers, on 1 and 2 threads, once per instruction set in a
process of its own, and compares their SHA-256 with those kept for numerics
version {golden.NUMERICS_VERSION}. Machines that pass give each other's bits.
"""


@dataclass
class Difference:
    """A group whose bits are others than those kept."""

    group: str
    threads: int
    digest: str
    expected: str


@dataclass
class Verdict:
    """What one instruction set computed; ``problem`` where it did not come to an end."""

    isa: str
    seconds: float = 0.0
    differences: list[Difference] = field(default_factory=list)
    problem: str | None = None

    @property
    def good(self) -> bool:
        return not self.differences and self.problem is None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    lib = library()
    version = int(lib.tl_numerics_version())
    if not args.json:
        print(f"{lib.path}: numerics version {version}")
    verdicts = []
    for isa in lib.tl_isa_names().decode().split():
        verdicts.append(examine(lib, isa))
        if not args.json:
            print_verdict(verdicts[-1])
    known = version == golden.NUMERICS_VERSION
    if not known:
        print(
            f"tinyllm selftest: the library has numerics version {version}, this package keeps "
            f"the digests of version {golden.NUMERICS_VERSION}: use a library and a package of one "
            "release",
            file=sys.stderr,
        )
    good = known and all(verdict.good for verdict in verdicts)
    if args.json:
        print_json(report(lib, version, verdicts, good))
    return 0 if good else 1


def examine(lib: Lib, isa: str) -> Verdict:
    """Computes the groups on one instruction set, in a process of its own, and compares digests."""
    begin = time.perf_counter()
    try:
        done = in_process("from tinyllm.cli import golden; golden.main()", lib, isa)
    except subprocess.TimeoutExpired:
        return Verdict(isa, problem=f"not done after {time.perf_counter() - begin:.0f} seconds")
    verdict = Verdict(isa, time.perf_counter() - begin)
    if done.returncode != 0:
        verdict.problem = _death(done.returncode, done.stderr)
        return verdict
    answer = json.loads(done.stdout)
    if answer["isa"] != isa:
        verdict.problem = f"the library chose {answer['isa']}"
    for threads, digests in answer["digests"].items():
        for group, digest in digests.items():
            if digest != golden.DIGESTS[group]:
                verdict.differences.append(
                    Difference(group, int(threads), digest, golden.DIGESTS[group])
                )
    return verdict


def _death(status: int, stderr: str) -> str:
    if status < 0:
        try:
            return f"the process was ended by {signal.Signals(-status).name}"
        except ValueError:
            return f"the process was ended by signal {-status}"
    last = stderr.strip().splitlines()[-1:] or ["nothing on stderr"]
    return f"the process ended with status {status}: {last[0]}"


def print_verdict(verdict: Verdict) -> None:
    """One line that is good news, or the groups that differ with both digests."""
    head, n = f"  {verdict.isa:8}", len(golden.GROUPS)
    if verdict.problem is not None:
        print(f"{head}FAILED: {verdict.problem}")
    elif verdict.good:
        print(
            f"{head}{n} groups of {n}: these bits are numerics version {golden.NUMERICS_VERSION}"
            f"   ({verdict.seconds:.1f} s)"
        )
    for d in verdict.differences:
        print(f"{head}DIFFERS: {d.group}, {d.threads} thread{'s' * (d.threads > 1)}")
        print(f"            here      {d.digest}")
        print(f"            expected  {d.expected}")


def report(lib: Lib, version: int, verdicts: list[Verdict], good: bool) -> dict[str, Any]:
    """The same for machines."""
    return {
        "library": str(lib.path),
        "numerics_version": version,
        "expected_numerics_version": golden.NUMERICS_VERSION,
        "expected_digests": golden.DIGESTS,
        "same_bits": good,
        "instruction_sets": [
            {
                "isa": v.isa,
                "same_bits": v.good,
                "problem": v.problem,
                "differences": [vars(d) for d in v.differences],
            }
            for v in verdicts
        ],
    }
