# SPDX-License-Identifier: MIT
"""``tinyllm bench``: how fast a decode step of given shapes is here, beside the speed of reading
its bytes.

A shape is measured over several layers with the same contents, one after the other, so that what a
call reads has left the caches since it was last read. Turn by turn the layers are decoded and then
merely read, the same bytes in the same order on as many threads: that is the roof, and whatever
else the machine does slows both. Where K and V are to be stored in another way than float16, a
shape is filled in each dtype and all of them take turns.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

import tinyllm
from tinyllm._check import INT32_MAX
from tinyllm._kv_format import FORMATS, e4m3_values
from tinyllm._terminal import is_terminal
from tinyllm._words import human_bytes, human_time, plural
from tinyllm.cli import machine
from tinyllm.cli.common import (
    CliError,
    add_json,
    bold,
    counts,
    heads,
    instruction_set,
    interrupts_deferred,
    kv_dtype,
    library,
    number,
    print_json,
)
from tinyllm.ffi.libtinyllm import (
    TL_POOL_MAX_THREADS,
    Lib,
    f32_ptr,
    i8_ptr,
    i32_ptr,
    u8_ptr,
    u16_ptr,
    u32_ptr,
    u64_ptr,
)

NAME: Final = "bench"
HELP: Final = "how fast is a decode step of your shapes here, and how near the speed of memory?"
EXAMPLES: Final = """\
  tinyllm bench                                    one long chat, 32/8 heads
  tinyllm bench --ctx 1024,4096 --batch 1,8        how it grows
  tinyllm bench --heads 9/3 --dim 64 --threads 1   your model, your threads
  tinyllm bench --dtype int8,float8_e4m3fn         K and V in fewer bytes
  TINYLLM_ISA=avx2 tinyllm bench                   another instruction set

A decode step reads all K and V once, and memory limits it. `roof` is how fast
the same blocks are merely read, in the same order, on as many threads, in turns
with the call. Blocks lie in order, as in a new cache; `make bench` in a
checkout walks blocks that lie anywhere, which is slower. Times are those of one
call for one layer, from Python. Outputs are compared with float64 first. With
--dtype each dtype takes turns with float16: `to f16` is how many times as fast
it is, turn by turn, the median. Run it on a quiet machine.
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
_PLAIN: Final = "float16"  # what every other dtype is set beside


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
    dtype: str = _PLAIN
    layers: int = 1

    @property
    def row_bytes(self) -> int:
        """A position of one KV head, of K or of V."""
        return FORMATS[self.dtype].row_bytes(self.dim)

    @property
    def call_bytes(self) -> int:
        """K and V that one call reads."""
        seen = min(self.ctx, self.window) if self.window else self.ctx
        return 2 * self.batch * seen * self.kv_heads * self.row_bytes

    @property
    def blocks(self) -> int:
        return self.batch * -(-self.ctx // self.block)

    @property
    def layer_bytes(self) -> int:
        """What a layer takes in the pool."""
        strip = FORMATS[self.dtype].strip_bytes(self.block, self.dim)
        return 2 * self.blocks * self.kv_heads * strip

    @property
    def other_bytes(self) -> int:
        """What is made besides: the float32 that fills the pool, queries and results, a head in
        float64."""
        filling = 8 * (self.ctx + self.batch) * self.kv_heads * self.dim
        checking = 16 * self.ctx * (self.dim + self.heads // self.kv_heads)
        return filling + checking + 8 * self.batch * self.heads * self.dim

    def fitted(self, available: int | None, cache: int | None, sharing: int = 1) -> Shape:
        """With so many layers that a round leaves the caches, or as many as memory has room for
        where that is shared by ``sharing`` shapes like this."""
        room = None
        if available is not None:
            room = int(_MEMORY_SHARE * available) // sharing - self.other_bytes
        if room is not None and self.layer_bytes > room:
            wanted = human_bytes(sharing * (self.layer_bytes + self.other_bytes))
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
    the share of the one in the other, the calls there were, the error of the results, and how many
    times as fast as float16 it was beside it."""

    median: float
    p10: float
    p90: float
    rate: float
    roof: float
    of_roof: float
    calls: int
    error: float
    to_float16: float | None = None


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
        "--dtype",
        type=lambda text: [kv_dtype(name) for name in text.split(",")],
        default=[_PLAIN],
        metavar="NAME,..",
        help=f"of K and V ({_PLAIN}): {', '.join(FORMATS)}",
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
    turns = list(_turns(args))
    with interrupts_deferred():
        np.random.default_rng(0)  # loads numpy.random, where one would be lost
    if not args.json:
        print_head(isa, args)
    results: list[tuple[Shape, Result]] = []
    for shapes in turns:
        with ExitStack() as stack:
            works = [stack.enter_context(workload(lib, shape)) for shape in shapes]
            measured = list(zip(shapes, measure(works, args.seconds / len(turns)), strict=True))
        results += measured
        if not args.json:
            print_turns(measured)
    if args.json:
        print_json(report(isa, results))
    wrong = [shape for shape, r in results if not r.error <= _TOLERANCE]
    for shape in wrong:
        print(f"tinyllm bench: {named(shape)}: wrong results", file=sys.stderr)
    return 1 if wrong else 0


def _turns(args: argparse.Namespace) -> Iterator[list[Shape]]:
    """The shapes that take turns: one in each of the dtypes, float16 first."""
    _, available = machine.memory()
    n_heads, n_kv = args.heads
    dtypes = list(dict.fromkeys([_PLAIN, *args.dtype]))
    for ctx, batch, threads in product(args.ctx, args.batch, args.threads):
        workers = threads or machine.cpus()[0]
        one = Shape(n_heads, n_kv, args.dim, ctx, batch, args.block, args.window, workers)
        yield [
            replace(one, dtype=dtype).fitted(available, machine.last_level_cache(), len(dtypes))
            for dtype in dtypes
        ]


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
            k, v = (as_stored(self.cache.lib, a[-seen:], shape.dtype) for a in (k, v))
            own = slice(g * group, (g + 1) * group)
            scores = self.q[s, own].astype(np.float64) @ k.T * shape.dim**-0.5
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            exact = weights @ v / weights.sum(axis=1, keepdims=True)
            worst = np.maximum(worst, np.abs(self.out[s, own] - exact).max() / np.abs(v).max())
        return float(worst)


def as_stored(lib: Lib, rows: NDArray[np.float32], dtype: str) -> NDArray[np.float64]:
    """The values that a cache of ``dtype`` holds of rows [n, D]."""
    form = FORMATS[dtype]
    if dtype == "bfloat16":
        codes = np.empty(rows.shape, form.element)
        lib.tl_f32_to_bf16_n(f32_ptr(rows), u16_ptr(codes), rows.size)
        return (codes.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if not form.has_scales:
        return rows.astype(form.element).astype(np.float64)
    codes, scales = np.empty(rows.shape, form.element), np.empty((len(rows), 1), np.float32)
    if dtype == "int8":
        lib.tl_store_i8_f32(f32_ptr(rows), i8_ptr(codes), f32_ptr(scales), *rows.shape)
        return (scales * codes.astype(np.float32)).astype(np.float64)
    lib.tl_store_e4m3_f32(f32_ptr(rows), u8_ptr(codes), f32_ptr(scales), *rows.shape)
    return (scales * e4m3_values()[codes]).astype(np.float64)


@contextmanager
def workload(lib: Lib, shape: Shape) -> Iterator[Workload]:
    """Makes a workload and takes it down."""
    size = human_bytes(shape.layer_bytes * shape.layers)
    progress(f"{named(shape)}: filling {size}")
    cache = tinyllm.PagedKVCache(
        lib, shape.blocks, shape.block, shape.layers, shape.kv_heads, shape.dim, dtype=shape.dtype
    )
    with cache, tinyllm.ThreadPool(shape.threads, lib=lib) as pool:
        yield Workload(shape, cache, pool)
        progress("")


def measure(works: list[Workload], seconds: float) -> list[Result]:
    """Rounds of calls and of plain reading, in turns, for so many seconds."""
    clock = time.perf_counter
    errors = []
    for work in works:
        progress(f"{named(work.shape)}: checking")
        errors.append(work.error())
    calls: list[list[NDArray[np.float64]]] = [[] for _ in works]  # a turn each, of all layers
    reads: list[list[NDArray[np.float64]]] = [[] for _ in works]
    begin = clock()
    while len(calls[0]) < _FEWEST_TURNS or clock() - begin < seconds:
        for i, work in enumerate(works):
            progress(f"{named(work.shape)}: {clock() - begin:.0f} of {seconds:.0f} s")
            calls[i].append(walk(work.decode, work.shape.layers))
            reads[i].append(walk(work.read, work.shape.layers))
    plain = [float(np.median(turn)) for turn in calls[0]]
    results = []
    for work, own, plainly, error in zip(works, calls, reads, errors, strict=True):
        times, size = np.concatenate(own), work.shape.call_bytes
        p10, median, p90 = np.percentile(times, (10, 50, 90)).tolist()
        rate, roof = size / median, size / float(np.median(np.concatenate(plainly)))
        turns = [p / float(np.median(turn)) for p, turn in zip(plain, own, strict=True)]
        to_float16 = float(np.median(turns)) if len(works) > 1 else None
        results.append(
            Result(median, p10, p90, rate, roof, rate / roof, len(times), error, to_float16)
        )
    return results


def walk(run: Callable[[int], None], layers: int) -> NDArray[np.float64]:
    """Seconds of ``run`` for each layer."""
    marks = [time.perf_counter()]
    for layer in range(layers):
        run(layer)
        marks.append(time.perf_counter())
    return np.diff(marks)


# --- showing it -----------------------------------------------------------------------------------


def progress(text: str) -> None:
    """A line on stderr that the next one replaces, where stderr is a terminal."""
    if is_terminal(sys.stderr):
        print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)


def named(shape: Shape) -> str:
    dtype = "" if shape.dtype == _PLAIN else f", {shape.dtype}"
    return f"ctx {shape.ctx}, batch {shape.batch}{dtype}"


def print_head(isa: str, args: argparse.Namespace) -> None:
    usable, present = machine.cpus()
    window = f"window {args.window}" if args.window else "no window"
    alone = args.dtype == [_PLAIN]
    print(f"{machine.cpu_model()}, {usable} of {present} CPUs, {isa}")
    heads = f"heads {args.heads[0]}/{args.heads[1]}, width {args.dim}"
    print(f"{heads}, blocks of {args.block}, {window}{', f16' if alone else ''}\n")
    first = "     ctx  batch threads" if alone else f"  {'dtype':13}"
    last = "" if alone else "   to f16"
    print(bold(f"{first}    median       p10       p90    GB/s    roof  of roof{last}"), flush=True)


def print_turns(measured: list[tuple[Shape, Result]]) -> None:
    """A row for each, below what they have in common where there are several."""
    (one, _), *others = measured
    if others:
        threads = plural(one.threads, "thread")
        print(f"ctx {one.ctx}, batch {one.batch}, {threads}")
    for shape, r in measured:
        first = f"{shape.ctx:8} {shape.batch:6} {shape.threads:7}"
        last = "" if r.to_float16 is None else f"{r.to_float16:9.2f}"
        times = "".join(f"{human_time(t):>10}" for t in (r.median, r.p10, r.p90))
        print(
            f"{f'  {shape.dtype:13}' if others else first}{times}"
            f"{r.rate / 1e9:8.1f}{r.roof / 1e9:8.1f}{100 * r.of_roof:8.0f}%{last}",
            flush=True,
        )
        print_doubts(shape, r)


def print_doubts(shape: Shape, r: Result) -> None:
    """What makes a row worth less."""
    total, cache = shape.call_bytes * shape.layers, machine.last_level_cache()
    if cache and total < _CACHES * cache:
        sizes = f"{human_bytes(total)} in all, the last level cache has {human_bytes(cache)}"
        print(f"         partly from the cache: {sizes}", flush=True)
    if r.p90 > _BUSY * r.p10:
        print("         the machine was busy: run it again when it is quiet", flush=True)


def report(isa: str, results: list[tuple[Shape, Result]]) -> dict[str, Any]:
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
                "times_as_fast_as_float16": r.to_float16,
                "calls": r.calls,
                "error_of_largest_value": r.error if np.isfinite(r.error) else None,
            }
            for s, r in results
        ],
    }
