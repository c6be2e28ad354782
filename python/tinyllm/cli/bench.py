# SPDX-License-Identifier: MIT
"""``tinyllm bench``: how fast a decode step of given shapes is here, beside the speed of reading
its bytes.

A shape is measured over several layers with the same contents, one after the other, so that what a
call reads has left the caches since it was last read. Turn by turn the layers are decoded and then
merely read, the same bytes in the same order on as many threads: that is the roof, and whatever
else the machine does slows both.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import tinyllm
from tinyllm._check import INT32_MAX
from tinyllm._terminal import is_terminal
from tinyllm._words import human_bytes, human_time
from tinyllm.cli import machine
from tinyllm.cli.common import (
    CliError,
    add_json,
    bold,
    counts,
    heads,
    instruction_set,
    interrupts_deferred,
    library,
    number,
    print_json,
)
from tinyllm.ffi.libtinyllm import TL_POOL_MAX_THREADS, Lib, i32_ptr, u32_ptr, u64_ptr

NAME: Final = "bench"
HELP: Final = "how fast is a decode step of your shapes here, and how near the speed of memory?"
EXAMPLES: Final = """\
  tinyllm bench                                    one long chat, 32/8 heads
  tinyllm bench --ctx 1024,4096 --batch 1,8        how it grows
  tinyllm bench --heads 9/3 --dim 64 --threads 1   your model, your threads
  TINYLLM_ISA=avx2 tinyllm bench                   another instruction set

A decode step reads all K and V once, and memory limits it. `roof` is how fast
the same blocks are merely read, in the same order, on as many threads, in turns
with the call. Blocks lie in order, as in a new cache; `make bench` in a
checkout walks blocks that lie anywhere, which is slower. Times are those of one
call for one layer, from Python. Outputs are compared with float64 first. Run it
on a quiet machine.
"""

_CACHES: Final = 4  # times the last level cache: what is read before the same bytes come again
_SOME_CACHE: Final = 64 << 20  # where the system does not tell
_MOST_LAYERS: Final = 1024  # this and the next two: so that filling takes seconds at most
_MOST_APPENDS: Final = 8192
_MOST_POOL: Final = 16  # times the last level cache, where one layer is not larger
_MEMORY_SHARE: Final = 0.8  # of what can be had: more than this is refused
_FEWEST_TURNS: Final = 3
_BUSY: Final = 2.0  # times p10: a p90 above that comes from other programs
_TOLERANCE: Final = 2e-5  # of the largest |v|: float32 arithmetic against float64


@dataclass(frozen=True)
class Shape:
    """One decode step, of ``layers`` that are walked in turn."""

    heads: int
    kv_heads: int
    dim: int
    ctx: int
    batch: int
    block: int
    window: int
    threads: int
    layers: int = 1

    @property
    def call_bytes(self) -> int:
        """K and V that one call reads."""
        seen = min(self.ctx, self.window) if self.window else self.ctx
        return 4 * self.batch * seen * self.kv_heads * self.dim

    @property
    def blocks(self) -> int:
        return self.batch * -(-self.ctx // self.block)

    @property
    def layer_bytes(self) -> int:
        """What a layer takes in the pool."""
        return 4 * self.blocks * self.block * self.kv_heads * self.dim

    @property
    def other_bytes(self) -> int:
        """What is made besides: the float32 that fills the pool, queries and results, a head in
        float64."""
        filling = 8 * (self.ctx + self.batch) * self.kv_heads * self.dim
        checking = 16 * self.ctx * (self.dim + self.heads // self.kv_heads)
        return filling + checking + 8 * self.batch * self.heads * self.dim

    def fitted(self, available: int | None, cache: int | None) -> Shape:
        """With so many layers that a round leaves the caches, or as many as memory has room for."""
        room = None if available is None else int(_MEMORY_SHARE * available) - self.other_bytes
        if room is not None and self.layer_bytes > room:
            wanted = human_bytes(self.layer_bytes + self.other_bytes)
            raise CliError(
                f"--ctx {self.ctx} --batch {self.batch} takes {wanted} of memory, and of the "
                f"{human_bytes(available or 0)} that can be had a fifth is left alone: make --ctx, "
                "--batch, --heads or --dim smaller"
            )
        cache = cache or _SOME_CACHE
        most = min(
            _MOST_LAYERS, _MOST_APPENDS // self.batch, _MOST_POOL * cache // self.layer_bytes
        )
        if room is not None:
            most = min(most, room // self.layer_bytes)
        return replace(self, layers=max(1, min(most, -(-_CACHES * cache // self.call_bytes))))


@dataclass(frozen=True)
class Result:
    """Of one shape: seconds of a call, bytes a second of the median call and of the median reading,
    the share of the one in the other, the calls there were, the error of the results."""

    median: float
    p10: float
    p90: float
    rate: float
    roof: float
    of_roof: float
    calls: int
    error: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    size = counts(1, INT32_MAX)
    parser.add_argument(
        "--heads",
        type=heads,
        default=(32, 8),
        metavar="H/KV",
        help="query heads and KV heads (32/8)",
    )
    parser.add_argument(
        "--dim", type=number(1, 1 << 16), default=128, metavar="D", help="head width (128)"
    )
    parser.add_argument("--ctx", type=size, default=[4096], metavar="N,..", help="positions (4096)")
    parser.add_argument("--batch", type=size, default=[1], metavar="N,..", help="sequences (1)")
    parser.add_argument(
        "--threads",
        type=counts(0, TL_POOL_MAX_THREADS),
        default=[0],
        metavar="N,..",
        help="threads; 0, the default, is every CPU this process may use",
    )
    parser.add_argument(
        "--block",
        type=number(1, INT32_MAX),
        default=16,
        metavar="N",
        help="positions in a block (16)",
    )
    parser.add_argument(
        "--window",
        type=number(0, INT32_MAX),
        default=0,
        metavar="N",
        help="positions seen; 0 is all (0)",
    )
    parser.add_argument(
        "--seconds", type=_seconds, default=5.0, metavar="S", help="for all shapes together (5)"
    )
    add_json(parser)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value <= 86400:
        raise argparse.ArgumentTypeError(f"{text}: not a number of seconds, 0 < S <= 86400")
    return value


def run(args: argparse.Namespace) -> int:
    lib = library()
    isa = instruction_set(lib)
    shapes = list(_shapes(args))
    with interrupts_deferred():
        np.random.default_rng(0)  # loads numpy.random, where one would be lost
    if not args.json:
        print_head(isa, args)
    results = []
    for shape in shapes:
        with workload(lib, shape) as work:
            result = measure(work, args.seconds / len(shapes))
        results.append(result)
        if not args.json:
            print_row(shape, result)
    if args.json:
        print_json(report(isa, shapes, results))
    wrong = [s for s, r in zip(shapes, results, strict=True) if not r.error <= _TOLERANCE]
    for shape in wrong:
        print(
            f"tinyllm bench: ctx {shape.ctx}, batch {shape.batch}: wrong results", file=sys.stderr
        )
    return 1 if wrong else 0


def _shapes(args: argparse.Namespace) -> Iterator[Shape]:
    _, available = machine.memory()
    n_heads, n_kv = args.heads
    for ctx, batch, threads in product(args.ctx, args.batch, args.threads):
        workers = threads or machine.cpus()[0]
        shape = Shape(n_heads, n_kv, args.dim, ctx, batch, args.block, args.window, workers)
        yield shape.fitted(available, machine.last_level_cache())


# --- the work -------------------------------------------------------------------------------------


class Workload:
    """A filled cache, queries, and the threads of both sides."""

    def __init__(
        self,
        shape: Shape,
        cache: tinyllm.PagedKVCache,
        pool: tinyllm.ThreadPool,
    ) -> None:
        self.shape, self.cache, self._pool = shape, cache, pool
        rng = np.random.default_rng(1)
        self.k, self.v = (
            rng.standard_normal((shape.kv_heads, shape.ctx + shape.batch, shape.dim), np.float32)
            for _ in "kv"
        )
        self.q = rng.standard_normal((shape.batch, shape.heads, shape.dim), np.float32)
        self.out = np.empty_like(self.q)
        self._ids = list(range(shape.batch))
        for s in self._ids:
            cache.add_seq(s)
            for layer in range(shape.layers):
                cache.append(s, layer, *self.kv(s))
        self._tables = np.array([cache.block_table(s) for s in self._ids], np.uint32)
        self._lengths = np.full(shape.batch, shape.ctx, np.int32)
        self._word = np.empty(1, np.uint64)  # the result of tl_kv_read, not used

    def kv(self, s: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """K and V of sequence ``s``, as appended: sequences are shifted against each other."""
        return self.k[:, s : s + self.shape.ctx], self.v[:, s : s + self.shape.ctx]

    def decode(self, layer: int) -> None:
        """The call that is measured."""
        tinyllm.paged_attention_decode(
            self.q, self.cache, self._ids, layer,
            window=self.shape.window, threads=self._pool, out=self.out,
        )  # fmt: skip

    def read(self, layer: int) -> None:
        """Reads what that call reads, and computes nothing."""
        with self._pool._handle.read():
            self.cache.lib.tl_kv_read(
                self.cache.view(layer)._pointer, u32_ptr(self._tables), self._tables.shape[1],
                i32_ptr(self._lengths), len(self._lengths), self.shape.window,
                self._pool._handle.address, u64_ptr(self._word),
            )  # fmt: skip

    def error(self) -> float:
        """The largest difference of a result from float64, in units of the largest value; infinity
        where layers that hold the same disagree in any bit."""
        self.decode(0)
        first = self.out.copy()
        worst = np.max([self._error_of(s) for s in {0, self.shape.batch - 1}])  # NaN if any is
        for layer in range(1, self.shape.layers):
            self.decode(layer)
            if self.out.tobytes() != first.tobytes():
                return float("inf")
        return float(worst)

    def _error_of(self, s: int) -> float:
        shape = self.shape
        seen = min(shape.ctx, shape.window or shape.ctx)
        group = shape.heads // shape.kv_heads
        worst = 0.0
        # One head at a time: float64 is large.
        for g, (k, v) in enumerate(zip(*self.kv(s), strict=True)):
            k, v = (a[-seen:].astype(np.float16).astype(np.float64) for a in (k, v))
            own = slice(g * group, (g + 1) * group)
            scores = self.q[s, own].astype(np.float64) @ k.T * shape.dim**-0.5
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            exact = weights @ v / weights.sum(axis=1, keepdims=True)
            worst = np.maximum(worst, np.abs(self.out[s, own] - exact).max() / np.abs(v).max())
        return float(worst)


@contextmanager
def workload(lib: Lib, shape: Shape) -> Iterator[Workload]:
    """Makes a workload and takes it down."""
    size = human_bytes(shape.layer_bytes * shape.layers)
    progress(f"ctx {shape.ctx}, batch {shape.batch}: filling {size}")
    cache = tinyllm.PagedKVCache(
        lib, shape.blocks, shape.block, shape.layers, shape.kv_heads, shape.dim
    )
    with cache, tinyllm.ThreadPool(shape.threads, lib=lib) as pool:
        yield Workload(shape, cache, pool)
        progress("")


def measure(work: Workload, seconds: float) -> Result:
    """Rounds of calls and of plain reading, in turns, for so many seconds."""
    shape, clock = work.shape, time.perf_counter
    progress(f"ctx {shape.ctx}, batch {shape.batch}: checking")
    error = work.error()
    calls: list[float] = []
    reads: list[float] = []
    begin = clock()
    turn = 0
    while turn < _FEWEST_TURNS or clock() - begin < seconds:
        progress(f"ctx {shape.ctx}, batch {shape.batch}: {clock() - begin:.0f} of {seconds:.0f} s")
        for run, times in ((work.decode, calls), (work.read, reads)):
            marks = [clock()]
            for layer in range(shape.layers):
                run(layer)
                marks.append(clock())
            times += np.diff(marks).tolist()
        turn += 1
    p10, median, p90 = np.percentile(calls, (10, 50, 90)).tolist()
    rate, roof = shape.call_bytes / median, shape.call_bytes / float(np.median(reads))
    return Result(median, p10, p90, rate, roof, rate / roof, len(calls), error)


# --- showing it -----------------------------------------------------------------------------------


def progress(text: str) -> None:
    """A line on stderr that the next one replaces, where stderr is a terminal."""
    if is_terminal(sys.stderr):
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def print_head(isa: str, args: argparse.Namespace) -> None:
    usable, present = machine.cpus()
    window = f"window {args.window}" if args.window else "no window"
    print(f"{machine.cpu_model()}, {usable} of {present} CPUs, {isa}")
    heads = f"heads {args.heads[0]}/{args.heads[1]}, width {args.dim}"
    print(f"{heads}, blocks of {args.block}, {window}, f16\n")
    columns = "     ctx  batch threads    median       p10       p90    GB/s    roof  of roof"
    print(bold(columns), flush=True)


def print_row(shape: Shape, r: Result) -> None:
    times = "".join(f"{human_time(t):>10}" for t in (r.median, r.p10, r.p90))
    print(
        f"{shape.ctx:8} {shape.batch:6} {shape.threads:7}{times}"
        f"{r.rate / 1e9:8.1f}{r.roof / 1e9:8.1f}{100 * r.of_roof:8.0f}%",
        flush=True,
    )
    total, cache = shape.call_bytes * shape.layers, machine.last_level_cache()
    if cache and total < _CACHES * cache:
        sizes = f"{human_bytes(total)} in all, the last level cache has {human_bytes(cache)}"
        print(f"         partly from the cache: {sizes}", flush=True)
    if r.p90 > _BUSY * r.p10:
        print("         the machine was busy: run it again when it is quiet", flush=True)


def report(isa: str, shapes: list[Shape], results: list[Result]) -> dict[str, Any]:
    """The same for machines: seconds, bytes, bytes a second."""
    return {
        "version": tinyllm.__version__,
        "cpu": machine.cpu_model(),
        "isa": isa,
        "last_level_cache_bytes": machine.last_level_cache(),
        "shapes": [
            asdict(s)
            | {"call_bytes": s.call_bytes, "pool_bytes": s.layer_bytes * s.layers}
            | {
                "median_seconds": r.median,
                "p10_seconds": r.p10,
                "p90_seconds": r.p90,
                "bytes_per_second": r.rate,
                "roof_bytes_per_second": r.roof,
                "of_roof": r.of_roof,
                "calls": r.calls,
                "error_of_largest_value": r.error if np.isfinite(r.error) else None,
            }
            for s, r in zip(shapes, results, strict=True)
        ],
    }
