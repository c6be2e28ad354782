# SPDX-License-Identifier: MIT
"""Attention of libtinyllm beside the other CPU implementations that a user could take.

    bench_peers.py [--quick] [--threads 1,2] [--shapes SHAPE ...] [--only PEER ...] [--json FILE]
                   [--dtype int8]

All compute the same thing from the same K and V values (``inputs.py``), each in its own layout:
paged, with the blocks in random order, where it pages, contiguous where it does not. There are as
many copies as make four times the last-level cache, and every call takes the next, so K and V come
from memory. Each result is compared with float64 on the data that is timed, before it is timed.

For each number of threads there is one process, pinned to as many CPUs; in it the library and each
peer take turns in short batches (``timing.py`` keeps them from disturbing each other).
The library is called through ctypes with arguments prepared beforehand, the peers through their own
bindings likewise. A ratio is the median over pairs of neighbouring batches, so it may differ a
little from the quotient of the two medians. Repetitions that other processes kept from a CPU for
more than 5% of their time are dropped; on two threads so are pairs of batches around which two
threads had not 1.4 times the speed of one.

What cannot be installed, loaded or run, or is wrong, is named with the reason, and the rest goes
on: a peer that takes the process down is left out when it is started again.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from inputs import Inputs, Shape
from library import DTYPES, Library
from peer import NotCompared, Peer, Run, Unavailable, check
from timing import FEWEST, Turn, quantile, take_turns


def _torch(dtype: str) -> Peer:
    from torch_sdpa import TorchSdpa

    return TorchSdpa(dtype)


def _vllm(dtype: str) -> Peer:
    from vllm_kernels import VllmKernel

    return VllmKernel(dtype)


def _sglang(dtype: str) -> Peer:
    from vllm_kernels import SglangKernel

    return SglangKernel(dtype)


def _openvino(dtype: str) -> Peer:
    from openvino_paged import OpenVinoPaged

    return OpenVinoPaged(dtype)


def _onnx(dtype: str) -> Peer:
    from onnx_gqa import OnnxGqa

    return OnnxGqa(dtype)


PEERS: dict[str, tuple[Callable[[str], Peer], str]] = {
    f"{name} {dtype}": (make, dtype)
    for name, make, dtypes in (
        ("vLLM", _vllm, ("f16", "bf16", "fp8")),
        ("SGLang", _sglang, ("f16",)),
        ("torch", _torch, ("f16", "bf16", "f32")),
        ("OpenVINO", _openvino, ("f16", "bf16", "u8")),
        ("ONNX RT", _onnx, ("f16", "f32")),
    )
    for dtype in dtypes
}

QUICK = ["1,4096,32,8,128", "8,1024,32,8,128", "1,4096,32,32,128", "8,2048,9,3,64"]
SHAPES = [
    "1,1024,32,8,128",
    "1,4096,32,8,128",
    "1,16384,32,8,128",
    "8,1024,32,8,128",
    "32,1024,32,8,128",
    "1,4096,32,32,128",
    "8,2048,9,3,64",
    "1,4096,64,8,128",
    "prefill,2048,32,8,128",
]


# ---- the process that measures ----


def emit(**line: Any) -> None:
    print(json.dumps(line), flush=True)


def measure(args: argparse.Namespace) -> None:
    """One JSON line per shape, and one before each thing that could end the process."""
    threads = int(args.threads)
    ours = Library(args.dtype)
    emit(version=[ours.name, ours.version])
    peers = {}
    for key in args.only:
        make, dtype = PEERS[key]
        emit(doing=key, shape=None)
        try:
            peers[key] = make(dtype)
            emit(version=[key, peers[key].version])
        except Exception as error:
            emit(missing=key, why=f"{type(error).__name__}: {error}")
    for text in args.shapes:
        shape = Shape.parse(text)
        emit(doing="the inputs", shape=text)
        inputs = Inputs.draw(shape)
        runs: dict[str, tuple[Run, float]] = {}
        failed = {}
        for key, peer in {ours.name: ours, **peers}.items():
            emit(doing=key, shape=text)
            try:
                run = peer.prepare(inputs, threads)
                runs[key] = run, check(peer, run, inputs)
            except NotCompared:
                pass
            except Unavailable as error:
                failed[key] = str(error)
            except Exception as error:
                failed[key] = f"{type(error).__name__}: {error}"
        if ours.name not in runs:
            raise SystemExit(f"{shape}: {failed[ours.name]}")
        emit(shape=text, **time_shape(args, shape, inputs, runs, ours.name), failed=failed)
        for run, _ in runs.values():
            run.close()
        del runs, run
        gc.collect()


def time_shape(
    args: argparse.Namespace,
    shape: Shape,
    inputs: Inputs,
    runs: dict[str, tuple[Run, float]],
    ours: str,
) -> dict[str, Any]:
    threads = int(args.threads)
    turns = {key: Turn(key, run.call, inputs.copies) for key, (run, _) in runs.items()}
    emit(doing="the turns", shape=str(shape))
    seconds, most = (2.0, 5) if args.quick else (10.0, 25)
    pairs = take_turns(
        turns[ours],
        [t for k, t in turns.items() if k != ours],
        threads,
        seconds,
        most,
        args.patience,
    )
    rows = {}
    for key, turn in turns.items():
        run, error = runs[key]
        rows[key] = {
            "error": error,
            "note": run.note,
            "us": [round(s * 1e6, 2) for s in turn.seconds],
        }
    for pair in pairs:
        rows[pair.peer.name] |= {
            "ratios": [round(r, 4) for r in pair.ratios],
            "dropped": pair.dropped,
        }
    return {"rows": rows, "copies": inputs.copies, "huge": huge_page_bytes()}


def huge_page_bytes() -> int:
    """Of the whole process at the moment."""
    try:
        lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("AnonHugePages"))


# ---- the process that prints ----


def child(
    args: argparse.Namespace, threads: int, shapes: list[str], peers: list[str]
) -> subprocess.Popen[str]:
    """Measures on ``threads`` of the CPUs this process may use, those that are idlest now."""
    cpus = idlest_cpus()[:threads]
    env = os.environ | {"OMP_NUM_THREADS": str(threads), "OPENBLAS_NUM_THREADS": "1"}
    if args.isa:
        env["TINYLLM_ISA"] = args.isa
    if args.huge_pages:
        env["THP_MEM_ALLOC_ENABLE"] = "1"
    command = [sys.executable, __file__, "--measure", "--threads", str(threads)]
    command += ["--patience", str(args.patience), "--dtype", args.dtype]
    command += ["--quick"] * args.quick
    command += ["--shapes", *shapes, "--only", *peers]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        text=True,
        env=env,
        preexec_fn=lambda: os.sched_setaffinity(0, cpus),
    )


def idlest_cpus(seconds: float = 0.5) -> list[int]:
    """The CPUs this process may use, by how much they idle in the next half second."""

    def idle_ticks() -> dict[int, int]:
        rows = [line.split() for line in Path("/proc/stat").read_text().splitlines()]
        return {
            int(row[0][3:]): int(row[4]) for row in rows if row[0][:3] == "cpu" and row[0] != "cpu"
        }

    before = idle_ticks()
    time.sleep(seconds)
    after = idle_ticks()
    return sorted(os.sched_getaffinity(0), key=lambda cpu: before[cpu] - after[cpu])


class Report:
    """What is known so far, and how it is printed."""

    def __init__(self, not_installed: dict[str, str]) -> None:
        self.versions: dict[str, str] = {}
        self.missing: dict[str, str] = {}
        self.failed: list[str] = []
        self.notes: Counter[str] = Counter()
        self.rows: list[dict[str, Any]] = []
        self._not_installed = not_installed

    def miss(self, key: str, why: str) -> None:
        for package, reason in self._not_installed.items():
            if key.split()[0].lower().replace("onnx", "onnxruntime") in package:
                why = f"{package} was not installed: {reason}"
        self.missing.setdefault(key, why)

    def run(self, args: argparse.Namespace, threads: int) -> None:
        peers, shapes = list(args.only), list(args.shapes)
        self.heading(threads, peers)
        while shapes:
            doing = ""
            process = child(args, threads, shapes, peers)
            assert process.stdout
            for line in process.stdout:
                news = json.loads(line)
                if "version" in news:
                    self.versions[news["version"][0]] = news["version"][1]
                elif "missing" in news:
                    self.miss(news["missing"], news["why"])
                elif "rows" in news:
                    shapes.remove(news["shape"])
                    self.rows.append({"threads": threads, **news})
                    self.row(threads, news, args.only)
                else:
                    doing = str(news["doing"])
            status = process.wait()
            if status == 0:
                return
            what = f"the process ended with status {status}"
            if doing in peers:
                self.miss(doing, what)
                peers.remove(doing)
            elif doing:  # among the turns: of which peer is not known
                self.failed.append(f"{shapes[0]}, {count(threads)}: {what}")
                shapes.pop(0)
            else:
                raise SystemExit(what)

    def heading(self, threads: int, peers: list[str]) -> None:
        print(f"\n{count(threads)}\n")
        columns = ["shape", "libtinyllm (p10-p90)", "rate", *peers]
        print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|", flush=True)

    def row(self, threads: int, said: dict[str, Any], peers: list[str]) -> None:
        shape, rows = Shape.parse(said["shape"]), said["rows"]
        for key, why in said["failed"].items():
            self.failed.append(f"{key} at {shape}, {count(threads)}: {why}")
        for key, row in rows.items():
            if row["note"]:
                self.notes[f"{key}{', prefill' * shape.prefill}: {row['note']}"] += 1
        timed = {k: r for k, r in rows.items() if len(r.get("ratios", ())) >= FEWEST}
        fastest = min(timed, key=lambda k: quantile(timed[k]["ratios"], 0.5), default=None)
        us = rows["libtinyllm"]["us"]
        if not us:
            print(f"| {shape} | disturbed all the time |" + " |" * (len(peers) + 1), flush=True)
            return
        median = quantile(us, 0.5)
        work, unit = (shape.flops, "GFLOP/s") if shape.prefill else (shape.kv_bytes, "GB/s")
        rate = f"{work / median / 1e3:.1f} {unit}"
        cells = [
            str(shape),
            f"{ms(median)} ({ms(quantile(us, 0.1))}-{ms(quantile(us, 0.9))})",
            rate,
        ]
        for key in peers:
            if key in timed:
                us, ratio = (quantile(timed[key][what], 0.5) for what in ("us", "ratios"))
                text = f"{ms(us)} x{ratio:.2f}"
                cells.append(f"**{text}**" if key == fastest else text)
            else:
                cells.append(
                    "disturbed" if key in rows else "failed" if key in said["failed"] else ""
                )
        print("| " + " | ".join(cells) + " |", flush=True)

    def ending(self) -> None:
        dropped = sum(r.get("dropped", 0) for said in self.rows for r in said["rows"].values())
        kept = sum(len(r.get("ratios", ())) for said in self.rows for r in said["rows"].values())
        print("\nms; xR: libtinyllm is R times as fast; bold: the fastest peer.")
        print("GB/s of K and V in f16; GFLOP/s of the causal half.")
        print(f"{kept} pairs of batches kept, {dropped} dropped as disturbed.")
        for title, lines in (
            ("Versions", [f"{k}: {v}" for k, v in self.versions.items()]),
            ("Not compared", [f"{k}: {v}" for k, v in self.missing.items()]),
            ("Failed", self.failed),
            ("The faster way to call", [f"{k} ({n} times)" for k, n in self.notes.items()]),
        ):
            if lines:
                print(f"\n{title}")
                for line in lines:
                    print("  " + line.replace("\n", " ")[:400])


def count(threads: int) -> str:
    return "1 thread" if threads == 1 else f"{threads} threads"


def ms(microseconds: float) -> str:
    return f"{microseconds / 1e3:.3g}" if microseconds < 1e5 else f"{microseconds / 1e3:.0f}"


def machine() -> Iterator[tuple[str, str]]:
    info = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    model = [
        line.split(":")[1].strip() for line in info.splitlines() if line.startswith("model name")
    ]
    thp = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    yield (
        "CPU",
        f"{model[0] if model else platform.machine()}, {len(os.sched_getaffinity(0))} CPUs usable",
    )
    yield "huge pages", thp.read_text().strip() if thp.exists() else "unknown"
    yield (
        "system",
        f"{platform.platform()}, Python {platform.python_version()}, numpy {np.__version__}",
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description="libtinyllm beside other CPU attention implementations"
    )
    parser.add_argument(
        "--quick", action="store_true", help="four shapes, fewer repetitions, one thread"
    )
    parser.add_argument("--threads", help="counts, such as 1,2 (the default)")
    parser.add_argument(
        "--shapes", nargs="+", help="B,ctx,H,Hkv,D or prefill,T,H,Hkv,D; default: nine"
    )
    parser.add_argument(
        "--only", nargs="+", metavar="PEER", help=f"of {', '.join(PEERS)}; or a first word"
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="every repetition, for other programs"
    )
    parser.add_argument(
        "--dtype", choices=list(DTYPES), default="float16", help="what the library's K and V are in"
    )
    parser.add_argument("--isa", help="sets TINYLLM_ISA; default: the best there is")
    parser.add_argument(
        "--huge-pages", action="store_true", help="let torch have huge pages as well"
    )
    parser.add_argument(
        "--patience", type=float, default=10, help="how much longer to wait for a quiet machine"
    )
    parser.add_argument("--measure", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    wanted = args.only or list(PEERS)
    args.only = [key for key in PEERS if key in wanted or key.rsplit(" ", 1)[0] in wanted]
    args.shapes = args.shapes or (QUICK if args.quick else SHAPES)
    args.threads = args.threads or ("1" if args.quick else "1,2")
    if args.measure:
        measure(args)
        return
    log = Path(sys.prefix) / "not-installed.txt"
    lines = [line.split("\t", 1) for line in log.read_text().splitlines()] if log.exists() else []
    report = Report({package: why for package, why in lines})
    about = dict(machine())
    print("\n".join(f"{key}: {value}" for key, value in about.items()))
    told = "torch was told to" if args.huge_pages else "the peers do as they do by default"
    print(f"libtinyllm stores {args.dtype} and asks for huge pages itself; {told}")
    for threads in map(int, args.threads.split(",")):
        report.run(args, threads)
    report.ending()
    if args.json:
        args.json.write_text(
            json.dumps(
                {
                    "machine": about,
                    "huge_pages_for_torch": args.huge_pages,
                    "isa_asked_for": args.isa,
                    "versions": report.versions,
                    "missing": report.missing,
                    "failed": report.failed,
                    "notes": report.notes,
                    "rows": report.rows,
                }
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
