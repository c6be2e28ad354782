# SPDX-License-Identifier: MIT
"""Ctrl-C at any moment: a call has happened whole or not at all, nothing is lost, everything goes
on, and the interrupt is what is heard."""

from __future__ import annotations

import gc
import itertools
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import tinyllm
from tinyllm import PagedKVCache, ThreadPool, flash_attention, paged_attention
from tinyllm import paged_attention_decode as decode
from tinyllm._observers import OBSERVERS, observing
from tinyllm.ffi.libtinyllm import Lib

# A cache whose K at position p of layer l is p + l everywhere, whoever holds it.
COMMON = """
import random, signal, sys
import numpy as np
from tinyllm import PagedKVCache, ThreadPool, paged_attention_decode

def interrupt(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)
dice = random.Random(7)

def rows(cache, seq, layer, n):
    begin = cache.seq_len(seq, layer)
    return np.broadcast_to(np.arange(begin + layer, begin + layer + n)[:, None], (2, n, 4))

def check(cache):
    counters = cache.snapshot().counters
    assert (counters["leaked"], counters["dangling"]) == (0, 0), counters
    for seq in cache:
        lengths = [cache.seq_len(seq, layer) for layer in range(2)]
        assert len(cache.block_table(seq)) == -(-max(lengths) // 4)
        for layer, length in enumerate(lengths):
            for a in cache.gather(seq, layer):
                wanted = np.arange(layer, layer + length)[None, :, None]
                assert (a == wanted).all(), (seq, layer, length)
        for i, block in enumerate(cache.block_table(seq)):
            fill = cache.lib.tl_kv_fill(cache.pool, int(block))
            assert fill >= min(max(min(lengths) - 4 * i, 0), 4), (seq, lengths, i, fill)
"""


def test_hundreds_of_interrupts_lose_nothing(run_silently: Callable[..., str]) -> None:
    said = run_silently(
        COMMON
        + """
from tinyllm import OutOfBlocks
kept, names, TEXT = [], iter(range(10**9)), list(range(2000))
cache = PagedKVCache(num_blocks=300, block_size=4, n_layers=2, n_kv_heads=2, d_head=4)
pool = ThreadPool(2)
cache.add_seq("first")
q = np.ones((1, 2, 4), np.float32)

def step():
    seq = dice.choice(list(cache))
    what = dice.randrange(13)
    if what == 10:
        cache.add_seq(next(names), TEXT[: dice.randrange(30)])
    elif what >= 11:
        held, said = max(cache.seq_len(seq), cache.seq_len(seq, 1)), len(cache.said(seq))
        if said <= held:
            cache.extend(seq, TEXT[said : held + dice.randrange(3)])
    elif what < 3:
        layer, dtype = dice.randrange(2), dice.choice([np.float16, np.float32, np.float64])
        cache.append(seq, layer, *[rows(cache, seq, layer, dice.randrange(1, 9)).astype(dtype)] * 2)
    elif what == 3:
        cache.fork(seq, next(names))
    elif what == 4 and len(cache) > 3:
        cache.free(seq)
    elif what == 5:
        cache.truncate(seq, dice.randrange(max(cache.seq_len(seq), cache.seq_len(seq, 1)) + 1))
    elif what == 6 and 0 < cache.seq_len(seq) == cache.seq_len(seq, 1):
        cache.import_seq(next(names), cache.export_seq(seq))
    elif what == 7:
        layer, seqs = dice.randrange(2), dice.sample(list(cache), dice.randrange(1, len(cache) + 1))
        new = np.concatenate([rows(cache, seq, layer, 2) for seq in seqs], 1).transpose(1, 0, 2)
        cache.append_batch(seqs, layer, new, new, list(range(0, 2 * len(seqs) + 1, 2)))
    elif what == 8 and cache.seq_len(seq):
        paged_attention_decode(q, cache, [seq], 0, threads=dice.choice([None, pool]))
    else:
        cache.stats(), cache.block_table(seq), pool.threads

heard = 0
for _ in range(500):
    try:
        signal.setitimer(signal.ITIMER_REAL, dice.uniform(2e-5, 4e-4))
        while True:
            try:
                step()
            except OutOfBlocks:
                for seq in list(cache)[1:]:
                    cache.free(seq)
                cache.truncate(next(iter(cache)), 0)
    except KeyboardInterrupt as error:
        kept.append(error)  # as a console keeps the last one: with every frame on the way
        heard += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    check(cache)
    del kept[:-5]
cache.close()
pool.close()
print(heard)
"""
    )
    assert said == "500\n"


def test_an_interrupt_comes_out_of_a_with_block(run_silently: Callable[..., str]) -> None:
    said = run_silently(
        COMMON
        + """
heard = 0
for _ in range(300):
    try:
        with PagedKVCache(num_blocks=4, block_size=4, n_layers=1, n_kv_heads=2, d_head=4) as cache:
            with ThreadPool(1) as pool:
                cache.add_seq(0)
                signal.setitimer(signal.ITIMER_REAL, dice.uniform(1e-5, 1e-4))
                while True:
                    cache.seq_len(0), pool.threads, cache.stats()
    except KeyboardInterrupt:
        heard += 1
    assert cache._handle.closed and pool._handle.closed
print(heard)
"""
    )
    assert said == "300\n"


OURS = os.path.dirname(tinyllm.__file__)


class AtCall:
    """Raises KeyboardInterrupt at the n-th place of the package's own code where Python looks for
    signals: as a function begins, and behind a call that has just returned."""

    def __init__(self, n: int, events: tuple[str, ...]) -> None:
        self.left, self.events = n, events

    def __call__(self, frame: Any, event: str, result: Any) -> None:
        del result  # this frame is in the traceback, and must keep nothing alive by itself
        callers = {frame.f_code.co_name, frame.f_back.f_code.co_name}
        if "release" in callers or not frame.f_code.co_filename.startswith(OURS):
            return  # what Python raises in a finalizer it prints, and that is that
        if event in self.events:
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt


def interrupted(
    call: Callable[[], Any], n: int, events: tuple[str, ...] = ("call", "return", "c_return")
) -> KeyboardInterrupt | None:
    """What came out of ``call``, interrupted at the n-th place; None where it was done before."""
    before = sys.getprofile()
    sys.setprofile(AtCall(n, events))
    try:
        call()
    except KeyboardInterrupt as error:
        return error
    finally:
        sys.setprofile(before)
    return None


def filled() -> PagedKVCache:
    """Sequences a and b, which share two blocks, in 8 blocks of 4; a has one layer ahead."""
    cache = PagedKVCache(num_blocks=8, block_size=4, n_layers=2, n_kv_heads=1, d_head=2)
    cache.add_seq("a")
    for layer in range(2):
        cache.append("a", layer, *np.ones((2, 1, 6, 2), np.float32))
    cache.fork("a", "b")
    return cache


ENVELOPE = b""  # of a sequence of ``filled``
ROWS = np.ones((2, 1, 5, 2), np.float32)
TOKENS = np.ones((2, 6, 1, 2), np.float32)
WRITES: dict[str, Callable[[PagedKVCache], object]] = {
    "append": lambda cache: cache.append("a", 1, *ROWS),
    "append_batch": lambda cache: cache.append_batch(["a", "b"], 1, *TOKENS, [0, 5, 6]),
    "append_f16": lambda cache: cache.append("a", 1, *ROWS.astype(np.float16)),
    "add_seq": lambda cache: cache.add_seq("c"),
    "fork": lambda cache: cache.fork("a", "c"),
    "free": lambda cache: cache.free("a"),
    "truncate": lambda cache: cache.truncate("a", 3),
    "trim_front": lambda cache: cache.trim_front("a", 1),
    "import_seq": lambda cache: cache.import_seq("c", ENVELOPE),
    "close": lambda cache: cache.close(),
}


def seen(cache: PagedKVCache) -> Any:
    if cache._handle.closed:
        return "closed"
    taken = cache.snapshot()
    assert (taken.counters["leaked"], taken.counters["dangling"]) == (0, 0)
    fills = {int(row["id"]): int(row["fill"]) for row in taken.blocks if row["refs"]}
    lengths = {seq: [cache.seq_len(seq, layer) for layer in range(2)] for seq in cache}
    tables = {seq: (cache.block_table(seq) >= 0).tolist() for seq in cache}
    return lengths, tables, sorted(fills.values()), taken.counters["blocks_used"]


@pytest.mark.parametrize("name", WRITES)
def test_a_write_stopped_at_any_place_is_whole_or_nothing(name: str) -> None:
    global ENVELOPE
    with filled() as cache:
        ENVELOPE = bytes(cache.export_seq("a"))
        before = seen(cache)
        WRITES[name](cache)
        after = seen(cache)
    assert before != after
    kept, outcomes = [], set()
    for n in itertools.count(1):
        cache = filled()
        kept.append(interrupted(partial(WRITES[name], cache), n))  # and its frames, as consoles do
        found = seen(cache)
        assert found in (before, after), f"place {n}"
        outcomes.add(found == after)
        if found != "closed":
            for seq in list(cache):  # nobody is left inside
                cache.free(seq)
            assert cache.stats()["free"] == 8
            cache.close()
        if kept[-1] is None:
            break
    assert len(kept) > 5
    assert outcomes == {False, True}


@pytest.mark.parametrize(
    "read",
    [
        lambda cache, pool: cache.seq_len("a"),
        lambda cache, pool: cache.gather("a", 0),
        lambda cache, pool: cache.export_seq("a"),
        lambda cache, pool: cache.stats(),
        lambda cache, pool: decode(np.ones((1, 1, 2)), cache, ["a"], 0, threads=pool),
        lambda cache, pool: paged_attention(
            np.ones((1, 1, 2)), cache.view(0), [cache.block_table("a")], [6], threads=pool
        ),
        lambda cache, pool: flash_attention(*np.ones((3, 1, 1, 1, 2)), threads=pool),
        lambda cache, pool: pool.threads,
    ],
    ids=["seq_len", "gather", "export_seq", "stats", "decode", "paged", "flash", "threads"],
)
def test_a_read_stopped_at_any_place_leaves_nobody_inside(read: Callable[..., Any]) -> None:
    kept = []
    for n in itertools.count(1):
        cache, pool = filled(), ThreadPool(2)
        kept.append(interrupted(partial(read, cache, pool), n))
        cache.free("a")
        pool.close()
        cache.close()
        if kept[-1] is None:
            break
    assert len(kept) > 2


def test_a_pool_that_was_made_when_the_interrupt_came_is_destroyed(lib: Lib) -> None:
    watched, alive = Lib(lib.path), set()
    create, destroy = watched.tl_kv_pool_create, watched.tl_kv_pool_destroy

    def counted_create(config: Any, out: Any) -> None:
        try:
            create(config, out)
        finally:
            alive.add(out._obj.value)

    def counted_destroy(address: int) -> None:
        alive.remove(address)
        destroy(address)

    vars(watched).update(tl_kv_pool_create=counted_create, tl_kv_pool_destroy=counted_destroy)
    sizes = {"block_size": 1, "n_layers": 1, "n_kv_heads": 1, "d_head": 1}
    for n in itertools.count(1):
        error = interrupted(lambda: PagedKVCache(watched, num_blocks=1, **sizes), n)
        done = error is None
        del error
        gc.collect()
        assert not alive - {None}, f"place {n}"
        if done:
            break
    assert n > 20


def test_an_observer_does_not_outstay_an_interrupt() -> None:
    def watch() -> None:
        with observing(object()):  # type: ignore[arg-type]
            OBSERVERS.get()

    for n in itertools.count(1):
        error = interrupted(watch, n, ("call", "c_return"))  # a yield is no return
        done = error is None
        del error
        gc.collect()
        assert OBSERVERS.get() == (), f"place {n}"
        if done:
            break
    assert n > 3
