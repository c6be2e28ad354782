# SPDX-License-Identifier: MIT
"""Plants each known fault in a copy of the sources; the test its patch names must fail.

    run.py [-j N] [--list] [--part K/N] [NAME or PREFIX ...]

A mutant is one patch in the folder that is named as the source it changes: c/runtime/pool.c/x.patch
for c/src/runtime/pool.c, python/errors.py/y.patch for python/tinyllm/errors.py. Above the diff
stand

    killed-by: test_paged_attn:hand_example         (a C test program and a test in it), or
    killed-by: test_paged_cache.py::test_fork       (a pytest test)
    why: one sentence
    needs: avx2                                     (where the fault shows only on a CPU with that)
    build: nothing                                  (where the killer does not need the library)

Each is planted in a copy of one unmutated build, so that only what it changed is compiled again. A
fault in a file that is compiled once per instruction set is compiled for one of them, and the test
runs on that one: the one whose name the file bears, else the best this program knows.

Killed: the test fails, dies, or hangs, and passes without the fault. Everything else fails the run:
a survivor, a patch that no longer applies, a fault that does not compile, a test that is not there
or fails anyway. So does, where all are planted, a source of the library without any mutant that
NOTHING_TO_PLANT does not list.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
TESTS = Path("tests/L9.4")
SOURCES = ("c", "python", "tests", "Makefile", "pyproject.toml")
# What marks a file that is compiled once per instruction set.
PER_ISA = (
    "c/src/numerics/",
    ".isa.c",
    "kernels/attn_score",
    "kernels/attn_values",
    "kernels/attn_walk",
    "kernels/attn_widen",
    "kernels/kv_load",
)
# Sources in which no fault can be planted that compiles and changes what the library does here.
NOTHING_TO_PLANT = {
    "c/src/kernels/isas.def": "what a set needs shows only on a CPU that lacks it",
    "c/src/kernels/kernels.def": "a kernel left out of the list does not compile",
    "c/src/kernels/kernels.h": "the declarations of it",
    "c/src/kernels/kv_positions.h": "declarations",
    "c/src/kernels/kv_store.h": "declarations",
    "c/src/kernels/table.isa.c": "the table of it",
    "c/src/numerics/arrays.def": "a part of it",
    "c/src/numerics/isa_fn.h": "names",
    "c/src/numerics/vec.h": "which of vec_<isa>.h is included",
    "c/src/numerics/vec_neon.h": "for aarch64, where parity_attn runs in a check of its own",
    "c/src/runtime/cpu.c": "what it asks the CPU shows only on one that lacks it",
    "c/src/runtime/cpu.h": "declarations",
    "c/src/runtime/cpus.h": "declarations",
    "c/src/runtime/crc32c.h": "declarations",
    "c/src/runtime/fail.h": "declarations",
    "c/src/runtime/pool_run.h": "declarations",
    "c/src/runtime/prefix_inner.h": "declarations",
}
# Killers that never run the attention kernels, which take longest to compile.
NO_ATTENTION = (
    "test_numerics:",
    "test_softmax:",
    "test_store:",
    "test_kv_append:",
    "test_kv_append_batch:",
    "test_kv_formats:",
    "test_kv_gather:",
)
# A fault may well leave something unused: that is no error here, whatever the caller has set.
MAKE = ("make", "--no-print-directory", "B=build", "CFLAGS=-O1", "WERROR=")


class Bad(Exception):
    """Why a mutant proves nothing."""


@dataclass(frozen=True)
class Hunk:
    path: str
    old: tuple[str, ...]
    new: tuple[str, ...]


@dataclass(frozen=True)
class Mutant:
    name: str
    killer: str
    why: str
    needs: str
    build: str
    hunks: tuple[Hunk, ...]

    @property
    def paths(self) -> list[str]:
        return sorted({hunk.path for hunk in self.hunks})

    @property
    def isa(self) -> str:
        """The instruction set it is compiled for and runs on; '' for all of them."""
        for path in self.paths:
            name = path.rpartition("/")[2]
            if name.startswith("vec_"):
                return name.removeprefix("vec_").removesuffix(".h")
            if any(mark in path for mark in PER_ISA):
                return here()[0]
        return ""

    @property
    def runs_here(self) -> bool:
        return self.isa in ("", *here()) and (
            self.needs in ("", *here()) or self.needs in cpu_flags()
        )

    @property
    def is_compiled(self) -> bool:
        """Whether the library is to be built anew."""
        sources = any(path.startswith("c/") or path == "Makefile" for path in self.paths)
        return sources and self.build != "nothing"


@dataclass(frozen=True)
class Result:
    mutant: Mutant
    killed: bool
    how: str
    seconds: float


# --- reading patches
# ----------------------------------------------------------------------------------------


def read_mutant(patch: Path) -> Mutant:
    head: dict[str, str] = {}
    hunks: list[Hunk] = []
    path = ""
    old: list[str] = []
    new: list[str] = []
    lines = [*patch.read_text(encoding="utf-8").splitlines(), "@@"]
    for line in lines:
        if line.startswith("@@") or line.startswith("--- "):
            if old or new:
                hunks.append(Hunk(path, tuple(old), tuple(new)))
                old, new = [], []
        elif line.startswith("+++ "):
            path = line[4:].split("\t")[0].removeprefix("b/")
        elif not path:
            key, colon, value = line.partition(": ")
            if colon:
                head[key] = value.strip()
        else:
            if line[:1] in ("-", " ", ""):
                old.append(line[1:])
            if line[:1] in ("+", " ", ""):
                new.append(line[1:])
    if "killed-by" not in head or "why" not in head or not hunks:
        raise SystemExit(f"{patch.name}: needs 'killed-by:', 'why:' and a diff")
    folder = str(patch.parent.relative_to(HERE))
    if folder not in {name_of(hunk.path) for hunk in hunks}:
        raise SystemExit(f"{patch.name}: lies in {folder} and changes {hunks[0].path}")
    needs, build = head.get("needs", ""), head.get("build", "")
    return Mutant(patch.stem, head["killed-by"], head["why"], needs, build, tuple(hunks))


def name_of(source: str) -> str:
    """The folder of a source's mutants."""
    return source.replace("c/src/", "c/").replace("python/tinyllm/", "python/")


def apply(mutant: Mutant, tree: Path) -> None:
    """Line numbers are not looked at: what a hunk replaces must stand in its file exactly once."""
    there = [path for path in mutant.paths if (tree / path).is_file()]
    texts = {path: (tree / path).read_text(encoding="utf-8") for path in there}
    for hunk in mutant.hunks:
        if hunk.path not in texts:
            raise Bad(f"no longer applies: {hunk.path} is gone")
        old, new = ("".join(line + "\n" for line in lines) for lines in (hunk.old, hunk.new))
        text = "\n" + texts[hunk.path]
        found = text.count("\n" + old)
        if found != 1:
            where = (
                "is not there" if found == 0 else f"is there {found} times: give it more context"
            )
            line = hunk.old[len(hunk.old) // 2].strip()
            raise Bad(f"no longer applies: in {hunk.path}, {line!r} {where}")
        texts[hunk.path] = text.replace("\n" + old, "\n" + new)[1:]
    for path, text in texts.items():
        (tree / path).write_text(text, encoding="utf-8")


# --- building and running
# -----------------------------------------------------------------------------------


@functools.cache
def cpu_flags() -> set[str]:
    """What Linux says this CPU has."""
    try:
        return set(Path("/proc/cpuinfo").read_text(encoding="ascii", errors="ignore").split())
    except OSError:
        return set()


@functools.cache
def here() -> tuple[str, ...]:
    """The instruction sets of this CPU, first the one that per-ISA faults are compiled for."""
    if platform.machine() == "aarch64":
        return ("neon", "scalar")
    if not {"avx2", "fma", "f16c"} <= cpu_flags():
        return ("scalar",)
    wide = {"avx512f", "avx512bw", "avx512dq", "avx512vl"} <= cpu_flags()
    return ("avx2", "scalar", "avx512") if wide else ("avx2", "scalar")


def program(killer: str) -> str:
    """The C program of a killer, or '' for a pytest test."""
    return "" if ".py::" in killer else killer.partition(":")[0]


def make(tree: Path, *arguments: str) -> None:
    done = subprocess.run(
        [*MAKE, *arguments], cwd=tree, capture_output=True, text=True, check=False
    )
    if done.returncode != 0:
        lines = (done.stdout + done.stderr).splitlines()
        errors = [line.strip() for line in lines if "error" in line or "***" in line]
        raise Bad("did not compile: " + (errors or ["make failed"])[0])


def environment(tree: Path, isa: str) -> dict[str, str]:
    ours = ("TINYLLM_", "MAKE", "PARITY_")
    env = {key: value for key, value in os.environ.items() if not key.startswith(ours)}
    env["PYTHONPATH"] = os.pathsep.join(str(tree / part) for part in ("python", TESTS / "harness"))
    env["PYTHONDONTWRITEBYTECODE"] = "1"
    env["TINYLLM_LIB"] = str(tree / "build/libtinyllm.so")
    env["TINYLLM_BUILD"] = "build"
    if isa:
        env["TINYLLM_ISA"] = isa
    return env


def run_test(tree: Path, killer: str, isa: str, seconds: float) -> str:
    """'' where the test passes, else how it failed. Raises Bad where it cannot run."""
    name = program(killer)
    if name:
        command = [f"build/tests/{name}", killer.partition(":")[2]]
    else:
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            str(TESTS / "python" / killer),
        ]
    child = subprocess.Popen(
        command,
        cwd=tree,
        env=environment(tree, isa),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output = child.communicate(timeout=seconds)[0].decode(errors="replace")
    except subprocess.TimeoutExpired:
        return "hang"
    finally:  # and whatever the test itself started
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    if child.returncode == 0:
        return ""
    if child.returncode == -signal.SIGALRM:
        return "hang"  # the test's own watchdog
    if child.returncode < 0:
        return f"crash ({signal.Signals(-child.returncode).name})"
    if name and "0 passed, 0 failed" in output:
        raise Bad(f"{name} has no test {command[1]}")
    if child.returncode == 1:
        return "failed check"
    if name:
        return f"exit status {child.returncode}"
    raise Bad(f"pytest could not run {killer}: " + (output.strip().splitlines() or ["?"])[-1])


class Bench:
    """The unmutated tree, built once, and its copies."""

    def __init__(self, root: Path, jobs: int) -> None:
        self.root, self.jobs, self.base = root, jobs, root / "base"
        self.baseline: dict[tuple[str, str], tuple[str, float]] = {}

    def build(self, mutants: Iterable[Mutant]) -> None:
        self.base.mkdir()
        ignore = shutil.ignore_patterns("build", "__pycache__", "mutants")
        for name in SOURCES:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(source, self.base / name, ignore=ignore)
            else:
                shutil.copy2(source, self.base / name)
        programs = sorted({program(mutant.killer) for mutant in mutants} - {""})
        there = [name for name in programs if any((self.base / TESTS).glob(f"*/{name}.c"))]
        make(self.base, f"-j{self.jobs}", "all", *(f"build/tests/{name}" for name in there))

    def check_baseline(self, killer: str, isa: str) -> None:
        """The killer must pass without any fault, else it proves nothing. One that goes by the
        clock may stumble once on a busy machine."""
        started = time.monotonic()
        try:
            name = program(killer)
            if name and not (self.base / f"build/tests/{name}").is_file():
                raise Bad(f"there is no {TESTS}/*/{name}.c")
            how = run_test(self.base, killer, isa, 240) and run_test(self.base, killer, isa, 240)
            trouble = f"{killer} fails without the fault, too: {how}" if how else ""
        except Bad as bad:
            trouble = str(bad)
        self.baseline[killer, isa] = trouble, time.monotonic() - started

    def run(self, mutant: Mutant) -> Result:
        started = time.monotonic()
        tree = self.root / mutant.name
        try:
            how = self.attempt(mutant, tree)
            killed, how = bool(how), how or "SURVIVED"
        except Bad as bad:
            killed, how = False, str(bad)
        shutil.rmtree(tree, ignore_errors=True)
        return Result(mutant, killed, how, time.monotonic() - started)

    def attempt(self, mutant: Mutant, tree: Path) -> str:
        isa, name = mutant.isa, program(mutant.killer)
        trouble, seconds = self.baseline[mutant.killer, isa]
        self.copy(tree, mutant)
        apply(mutant, tree)  # first: a stale patch is to be heard of in any case
        if trouble:
            raise Bad(trouble)
        if mutant.is_compiled:
            keep = self.stale_objects(tree, mutant, isa) if isa else []
            make(tree, *keep, f"build/tests/{name}" if name else "build/libtinyllm.so")
        return run_test(tree, mutant.killer, isa, 8 + 10 * seconds)

    def copy(self, tree: Path, mutant: Mutant) -> None:
        """What the mutant needs of the unmutated tree. Files keep their times, by which make sees
        what is newer; of the test programs, which are most of the bytes, a C killer needs one."""
        build, name = self.base / "build", program(mutant.killer)

        def unused(folder: str, names: list[str]) -> set[str]:
            if Path(folder) == self.base:
                return {"build"}
            is_tests = name and Path(folder) == build / "tests"
            return {other for other in names if is_tests and other.partition(".")[0] != name}

        shutil.copytree(self.base, tree, ignore=unused)
        if mutant.is_compiled:
            shutil.copytree(build, tree / "build", ignore=unused)
        else:
            (tree / "build").symlink_to(build)

    def stale_objects(self, tree: Path, mutant: Mutant, isa: str) -> list[str]:
        """What make is to leave as it is: objects for other instruction sets, and what the killer
        never runs."""
        skip = "attn_rows." if mutant.killer.startswith(NO_ATTENTION) else "/"
        return [
            f"--assume-old={path.relative_to(tree)}"
            for path in (tree / "build/obj").glob("*/*.*.o")
            if not path.name.endswith(f".{isa}.o") or path.name.startswith(skip)
        ]


# --- the run
# ------------------------------------------------------------------------------------------------


def choose(mutants: list[Mutant], wanted: list[str]) -> list[Mutant]:
    for prefix in wanted:
        if not any(mutant.name.startswith(prefix) for mutant in mutants):
            raise SystemExit(f"no mutant is called {prefix}...")
    return [mutant for mutant in mutants if not wanted or mutant.name.startswith(tuple(wanted))]


def part_of(mutants: list[Mutant], part: str) -> list[Mutant]:
    """Every N-th mutant from the K-th on, of K/N; the others must at least fit their sources."""
    k, slash, n = part.partition("/")
    if not (slash and k.isdigit() and n.isdigit() and int(k) < int(n)):
        raise SystemExit(f"--part is K/N with 0 <= K < N, not {part!r}")
    return [mutant for i, mutant in enumerate(mutants) if i % int(n) == int(k)]


def stale_patches(mutants: list[Mutant]) -> int:
    """Says which patches no longer fit, without planting them; how many."""
    stale = 0
    for mutant in mutants:
        for hunk in mutant.hunks:
            source = ROOT / hunk.path
            text = "\n" + source.read_text(encoding="utf-8") if source.is_file() else ""
            if text.count("\n" + "".join(line + "\n" for line in hunk.old)) != 1:
                print(f"  {mutant.name}.patch no longer applies to {hunk.path}")
                stale += 1
                break
    return stale


def run_all(mutants: list[Mutant], jobs: int, root: Path) -> list[Result]:
    bench = Bench(root, jobs)
    print(f"building the unmutated tree; {len(mutants)} mutants, {jobs} at a time", flush=True)
    bench.build(mutants)
    with ThreadPoolExecutor(jobs) as threads:
        killers = sorted({(mutant.killer, mutant.isa) for mutant in mutants})
        list(threads.map(lambda killer: bench.check_baseline(*killer), killers))
        results: list[Result] = []
        for result in threads.map(bench.run, mutants):
            results.append(result)
            mark = "killed" if result.killed else "FAILED"
            print(f"  {len(results):3}/{len(mutants)}  {mark}  {result.mutant.name}", flush=True)
    return results


def table(results: list[Result]) -> str:
    rows = [("mutant", "file", "killed by", "    s", "how")]
    for r in results:
        files = [
            path.removeprefix("c/src/").removeprefix("python/tinyllm/") for path in r.mutant.paths
        ]
        rows.append((r.mutant.name, ", ".join(files), r.mutant.killer, f"{r.seconds:5.1f}", r.how))
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, [*widths, 0], strict=True))
        for row in rows
    )


def sources_without() -> list[str]:
    """The library's sources without a mutant, and what else is wrong with NOTHING_TO_PLANT."""
    sources = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "c/src").glob("*/*")
        if path.suffix in (".c", ".h", ".def")
    }
    with_one = {name for name in sources if any((HERE / name_of(name)).glob("*.patch"))}
    amiss = [f"{name}: is not listed" for name in sources - with_one - set(NOTHING_TO_PLANT)]
    amiss += [f"{name}: is listed, and has one" for name in with_one & set(NOTHING_TO_PLANT)]
    amiss += [f"{name}: is listed, and is gone" for name in set(NOTHING_TO_PLANT) - sources]
    return sorted(amiss)


def report_sources() -> int:
    """Says which sources are without a mutant for no reason given; how many."""
    amiss = sources_without()
    for line in amiss:
        print(f"NOTHING_TO_PLANT: {line}")
    return len(amiss)


def report(results: list[Result]) -> int:
    """Prints what was done, what failed last, where a log that is cut short still shows it; how
    many."""
    failed = [result for result in results if not result.killed]
    print(table([result for result in results if result.killed]))
    if failed:
        print("\nfailed:")
    for result in failed:
        print(f"  {result.mutant.name}, {result.mutant.killer}: {result.how}")
    return len(failed)


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Plants known faults; every one must be killed by its test."
    )
    cpus = os.cpu_count() or 1
    parser.add_argument("-j", type=int, default=cpus, metavar="N", help="mutants at a time (CPUs)")
    parser.add_argument("--list", action="store_true", help="print the mutants and stop")
    parser.add_argument(
        "--part", default="0/1", metavar="K/N", help="every N-th mutant, from the K-th on"
    )
    parser.add_argument("names", nargs="*", help="names of mutants, or how they begin (all)")
    args = parser.parse_args()
    patches = sorted(HERE.rglob("*.patch"), key=lambda patch: patch.name)
    every = choose([read_mutant(patch) for patch in patches], args.names)
    mutants = part_of(every, args.part)
    if args.list:
        for mutant in mutants:
            print(f"{mutant.name}\n    {mutant.why}\n    killed by {mutant.killer}")
        return 0
    unseen = [mutant for mutant in mutants if not mutant.runs_here]
    with tempfile.TemporaryDirectory(prefix="tinyllm-mutants-") as root:
        try:
            planted = [mutant for mutant in mutants if mutant not in unseen]
            results = run_all(planted, max(1, args.j), Path(root))
        except Bad as bad:
            print(f"the unmutated tree: {bad}\n0 passed, {len(mutants)} failed")
            return 1
    for mutant in unseen:
        print(f"{mutant.name}: not planted, this CPU has no {mutant.needs or mutant.isa}")
    amiss = 0 if args.names else report_sources() + stale_patches(every)
    failed = report(results)
    print(f"{len(results) - failed} passed, {failed} failed")
    return 1 if failed or amiss or not results else 0


if __name__ == "__main__":
    sys.exit(main())
