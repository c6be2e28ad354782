# SPDX-License-Identifier: MIT
"""``tinyllm demo``: what the library is for, on made-up numbers: one prompt, eight chats, equal
bits."""

from __future__ import annotations

import argparse
import hashlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

import tinyllm
from tinyllm._kv_format import FORMATS
from tinyllm._words import human_bytes
from tinyllm.cli.common import CliError, bold, in_process, instruction_set, kv_dtype, library
from tinyllm.cli.golden import Numbers
from tinyllm.ffi.libtinyllm import Lib, load

NAME: Final = "demo"
HELP: Final = "eight chats over one prompt: shared blocks, copies on write, equal bits"
EXAMPLES: Final = """\
  tinyllm demo              a few seconds, no download
  tinyllm demo --kv int8    with K and V in fewer bytes

The exit status is 1 where bits differ.
"""

LAYERS, HEADS, KV_HEADS, WIDTH = 2, 8, 4, 64
PROMPT, STEPS = 1100, 16  # tokens, and tokens that each chat goes on for
NAMES: Final = "12345678"  # of the chats
CHATS: Final = len(NAMES)
PLAIN: Final = "float16"  # what K and V are unless something else is asked for


@dataclass(frozen=True)
class Way:
    """A way to compute the chats."""

    name: str
    block: int = 16
    threads: int = 1
    together: bool = True  # all chats in one call for a layer, not one call each
    shared: bool = True  # forks of one prompt, not each with a prompt of its own


WAYS: Final = (
    Way("each chat alone", together=False),
    Way("all eight in one call"),
    Way("all eight, 2 threads", threads=2),
    Way("all eight, blocks of 5 tokens", block=5),
    Way("all eight, nothing shared", shared=False),
)


class Chats:
    """A cache with one prompt in it and what a model might make of it: its numbers come from a
    generator."""

    def __init__(self, lib: Lib, way: Way, dtype: str = PLAIN) -> None:
        copies = 1 if way.shared else CHATS
        blocks = copies * (PROMPT // way.block + 1) + CHATS * (STEPS // way.block + 2)
        sizes = (blocks, way.block, LAYERS, KV_HEADS, WIDTH)
        self.cache = tinyllm.PagedKVCache(lib, *sizes, dtype=dtype)
        self.way = way
        self._pool = tinyllm.ThreadPool(way.threads, lib=lib)
        self._prompt = Numbers(1).floats(LAYERS, 2, KV_HEADS, PROMPT, WIDTH)
        self._new = Numbers(2).floats(STEPS, LAYERS, CHATS, 2, KV_HEADS, 1, WIDTH)
        self._q = 4 * Numbers(3).floats(STEPS, LAYERS, CHATS, HEADS, WIDTH)

    def __enter__(self) -> Chats:
        return self

    def __exit__(self, *exc: object) -> None:
        self.cache.close()
        self._pool.close()

    def read_prompt(self, name: str) -> None:
        """K and V of the prompt, as a sequence of that name."""
        self.cache.add_seq(name)
        for layer, (k, v) in enumerate(self._prompt):
            self.cache.append(name, layer, k, v)

    def begin(self) -> None:
        """The chats, each a fork of the prompt, or with a prompt of its own."""
        for name in NAMES:
            if self.way.shared:
                self.cache.fork("prompt", name)
            else:
                self.read_prompt(name)

    def step(self, t: int) -> Iterator[NDArray[np.float32]]:
        """One more token for each chat: its K and V are stored, and the outputs of every layer are
        yielded."""
        names = list(NAMES)
        batches = [slice(None)]
        if not self.way.together:
            batches = [slice(i, i + 1) for i in range(CHATS)]
        for layer in range(LAYERS):
            for name, (k, v) in zip(names, self._new[t, layer], strict=True):
                self.cache.append(name, layer, k, v)
            q = self._q[t, layer]
            for rows in batches:
                yield tinyllm.paged_attention_decode(
                    q[rows], self.cache, names[rows], layer, threads=self._pool
                )


def outcome(lib: Lib, way: Way, dtype: str = PLAIN) -> str:
    """A digest of everything that attention gives, computed that way."""
    sha = hashlib.sha256()
    with Chats(lib, way, dtype) as chats:
        if way.shared:
            chats.read_prompt("prompt")
        chats.begin()
        for t in range(STEPS):
            for out in chats.step(t):
                sha.update(np.ascontiguousarray(out, "<f4").tobytes())
    return sha.hexdigest()


def main(dtype: str = PLAIN) -> None:
    """For a process of its own, on the instruction set its environment names."""
    print(outcome(load(), WAYS[1], dtype))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--kv",
        type=kv_dtype,
        default=PLAIN,
        metavar="NAME",
        help=f"dtype of K and V ({PLAIN}): {', '.join(FORMATS)}",
    )


def run(args: argparse.Namespace) -> int:
    lib = library()
    isa = instruction_set(lib)
    print(f"libtinyllm {tinyllm.__version__}, {isa}; made-up numbers, nothing is downloaded\n")
    with Chats(lib, Way("shown"), args.kv) as chats:
        walk_through(chats)
    return compare_ways(lib, args.kv)


# --- the story ------------------------------------------------------------------------------------


def walk_through(chats: Chats) -> None:
    """Prompt, forks, tokens: what the blocks do meanwhile."""
    cache, b = chats.cache, chats.cache.block_size
    chats.read_prompt("prompt")
    prompt = cache.stats()["used"]
    print(bold("1. A prompt is read once"))
    print(f"   {PROMPT} tokens, {LAYERS} layers: K and V lie in {prompt} blocks of {b} tokens.")
    if cache.dtype != PLAIN:
        each, plain = cache.nbytes // (cache.num_blocks * b), 4 * LAYERS * KV_HEADS * WIDTH
        print(f"   In {cache.dtype} a token takes {each} bytes; in {PLAIN} it would be {plain}.")
    print()

    begin = time.perf_counter()
    chats.begin()
    took = time.perf_counter() - begin
    more = cache.stats()["used"] - prompt
    print(bold(f"2. {CHATS} chats begin with it"))
    print(
        f"   {CHATS} forks took {1e3 * took:.1f} ms and {more} blocks: they share the prompt's.\n"
    )

    begin = time.perf_counter()
    for t in range(STEPS):
        list(chats.step(t))
    took = time.perf_counter() - begin
    copied = cache.snapshot().counters["copies_on_write"]
    used, alone = cache.stats()["used"], prompt + CHATS * -(-(PROMPT + STEPS) // b)
    saved = human_bytes((alone - used) * int(cache.lib.tl_kv_block_bytes(cache.pool)))
    print(bold(f"3. Each goes its own way, {STEPS} tokens, all in one batch"))
    print(
        f"   The first token of each goes to the prompt's last block, {PROMPT % b} of {b} full and"
    )
    print(f"   shared, which is copied before it is written: {copied} copies, and no other ever.")
    print(
        f"   {1e3 * took / STEPS:.1f} ms a step. {used} blocks in use, not {alone}: {saved} saved."
    )
    print()
    print(bold("4. What the pool looks like now, by cache.look()"))
    print(cache.look(), end="\n\n")


def compare_ways(lib: Lib, dtype: str) -> int:
    """The same chats in every way, on every instruction set: 0 where all bits are the same."""
    print(bold("5. The bits do not depend on how"))
    print(
        f"   All that attention gave, {STEPS} steps x {LAYERS} layers x {CHATS} chats, as SHA-256:"
    )
    print()
    digests = []
    own = instruction_set(lib)
    for way in WAYS:
        digests.append(outcome(lib, way, dtype))
        show(f"{way.name}, {own}", digests)
    for isa in lib.tl_isa_names().decode().split():
        if isa != own:
            digests.append(on(lib, isa, dtype))
            show(f"all eight, {isa}", digests)
    same = len(set(digests)) == 1
    verdict = "Equal, to the last bit." if same else "They differ: `tinyllm selftest` looks closer."
    print(f"\n   {bold(verdict)}\n\n`make demo` in a checkout runs a real language model this way.")
    return 0 if same else 1


def on(lib: Lib, isa: str, dtype: str) -> str:
    """The digest that another instruction set gives."""
    done = in_process(f"from tinyllm.cli import demo; demo.main({dtype!r})", lib, isa)
    if done.returncode != 0:
        raise CliError(
            f"{isa}: the process ended with status {done.returncode}: {done.stderr.strip()}"
        )
    return done.stdout.strip()


def show(name: str, digests: list[str]) -> None:
    """The last digest, and whether it is the first one."""
    note = "" if digests[-1] == digests[0] else "  DIFFERS"
    print(f"   {name:42} {digests[-1][:16]}{note}", flush=True)
