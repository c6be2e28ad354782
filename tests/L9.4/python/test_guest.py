# SPDX-License-Identifier: MIT
"""A guest in any program: threads that read, write and look at once, fork, copies, numpy's error
state, the end of the interpreter."""

from __future__ import annotations

import copy
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import tinyllm
from tinyllm import (
    ConcurrentUseError,
    KVView,
    PagedKVCache,
    ThreadPool,
    flash_attention,
    paged_attention,
    paged_attention_decode,
)
from tinyllm.ffi.libtinyllm import Lib

ONE = np.ones((1, 1, 2), np.float32)


def make(**changes: Any) -> PagedKVCache:
    sizes = {"num_blocks": 16, "block_size": 4, "n_layers": 1, "n_kv_heads": 1, "d_head": 2}
    return PagedKVCache(**{**sizes, **changes})  # type: ignore[call-overload,no-any-return]


@pytest.fixture
def cache() -> Iterator[PagedKVCache]:
    """One sequence "a" of 6 positions in 16 blocks of 4."""
    with make() as c:
        c.add_seq("a")
        c.append("a", 0, *np.ones((2, 1, 6, 2), np.float32))
        yield c


def elsewhere(call: Callable[[], Any]) -> Any:
    """What ``call`` returns or raises in another thread."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    return found[0]


# --- readers and writers
# --------------------------------------------------------------------------------------------------


def test_every_writer_is_refused_beside_a_reader_and_a_writer(cache: PagedKVCache) -> None:
    envelope = cache.export_seq("a")
    writes = {
        "add_seq": lambda: cache.add_seq("b"),
        "fork": lambda: cache.fork("a", "b"),
        "free": lambda: cache.free("a"),
        "truncate": lambda: cache.truncate("a", 1),
        "trim_front": lambda: cache.trim_front("a", 1),
        "append": lambda: cache.append("a", 0, ONE, ONE),
        "import_seq": lambda: cache.import_seq("b", envelope),
        "close": cache.close,
    }
    before = cache.snapshot()
    for inside, how in ((cache._handle.read, "read"), (cache._handle.write, "written")):
        with inside():
            for name, call in writes.items():
                error = elsewhere(call)
                assert isinstance(error, ConcurrentUseError), name
                assert f"this PagedKVCache is being {how} by " in str(error)
    assert cache.snapshot() == before
    for name, call in writes.items():
        if name not in ("free", "fork", "add_seq"):
            assert elsewhere(call) is None, name


def test_readers_are_refused_beside_a_writer_and_free_beside_each_other(
    cache: PagedKVCache,
) -> None:
    view, table = cache.view(0), [cache.block_table("a")]
    reads = {
        "gather": lambda: cache.gather("a", 0),
        "export_seq": lambda: cache.export_seq("a"),
        "batch": lambda: cache.batch(["a"]),
        "decode": lambda: paged_attention_decode(ONE, cache, ["a"], 0),
        "paged_attention": lambda: paged_attention(ONE, view, table, [6]),
        "states": lambda: tinyllm.paged_attention_states(ONE, view, table, [6], 0, 1),
        "mass": lambda: tinyllm.attention_mass(ONE, view, table, [6]),
    }
    with cache._handle.write():
        for name, call in reads.items():
            assert isinstance(elsewhere(call), ConcurrentUseError), name
    with cache._handle.read():
        for name, call in reads.items():
            assert not isinstance(elsewhere(call), Exception), name


def test_what_is_only_looked_at_is_free_at_any_time(cache: PagedKVCache) -> None:
    looks = {
        "seq_len": lambda: cache.seq_len("a"),
        "block_table": lambda: cache.block_table("a"),
        "in": lambda: "a" in cache,
        "len": lambda: len(cache),
        "iter": lambda: list(cache),
        "nbytes": lambda: cache.nbytes,
        "repr": lambda: repr(cache),
    }
    with cache._handle.write(), cache._handle.turn:
        for name, call in looks.items():
            assert not isinstance(elsewhere(call), Exception), name


@pytest.mark.parametrize("look", ["stats", "num_free_blocks", "snapshot", "metrics", "look"])
def test_a_look_waits_for_the_writer_and_the_writer_for_it(cache: PagedKVCache, look: str) -> None:
    done = threading.Event()

    def call() -> None:
        getattr(cache, look)()
        done.set()

    thread = threading.Thread(target=call)
    with cache._handle.write(), cache._handle.turn:
        thread.start()
        assert not done.wait(0.1)
    thread.join(30)
    assert done.is_set()
    written = threading.Event()
    thread = threading.Thread(target=lambda: (cache.add_seq("b"), written.set()))
    with cache._handle.look():
        thread.start()
        assert not written.wait(0.1)
    thread.join(30)
    assert "b" in cache


def test_a_call_inside_a_call_of_the_same_thread_is_refused_and_does_not_hang(
    cache: PagedKVCache,
) -> None:
    """As a signal handler or an observer would make it."""
    with cache._handle.write(), cache._handle.turn:
        for call in (cache.snapshot, cache.stats, cache.close, lambda: cache.add_seq("b")):
            with pytest.raises(ConcurrentUseError, match="written by a call of this very thread"):
                call()
    with cache._handle.look():
        assert cache.stats()["used"] == 2
        with pytest.raises(ConcurrentUseError, match="looked at by a call of this very thread"):
            cache.add_seq("b")
    with cache._handle.read():
        with pytest.raises(ConcurrentUseError, match="being read"):
            cache.free("a")
        assert cache.stats()["used"] == 2
    cache.add_seq("b")


def test_two_threads_that_append_never_own_one_block_in_silence() -> None:
    rows = np.ones((2, 8, 40, 64), np.float32)
    cache = make(num_blocks=2000, n_kv_heads=8, d_head=64)
    refused, stop = [0, 0], time.monotonic() + 1.0

    def work(me: int) -> None:
        cache_id = ("seq", me)
        while not _tried(cache.add_seq, cache_id):
            pass
        while time.monotonic() < stop:
            refused[me] += not _tried(cache.append, cache_id, 0, *rows)
            if cache.seq_len(cache_id) > 2000:
                _tried(cache.truncate, cache_id, 0)

    threads = [threading.Thread(target=work, args=(me,)) for me in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    counters = cache.snapshot().counters
    tables = [cache.block_table(seq).tolist() for seq in cache]
    assert not set(tables[0]) & set(tables[1])
    assert (counters["leaked"], counters["dangling"]) == (0, 0)
    assert sum(refused) > 0, "the threads never met"
    cache.close()


def _tried(call: Callable[..., Any], *args: Any) -> bool:
    try:
        call(*args)
    except ConcurrentUseError:
        return False
    return True


def test_snapshots_and_metrics_beside_an_engine_at_work_are_right() -> None:
    """An engine that forks, appends, cuts and frees; a scrape that finds no leak in any of it."""
    cache = make(num_blocks=4000, n_layers=2, n_kv_heads=2, d_head=16)
    rows = np.ones((2, 2, 9, 16), np.float32)
    stop, wrong, taken = threading.Event(), [], [0]

    def scrape() -> None:
        while not stop.is_set():
            try:
                text = cache.metrics()
                counters = cache.snapshot().counters
                cache.look()
                states = cache.stats()
            except Exception as error:
                wrong.append(error)
                return
            taken[0] += 1
            if counters["leaked"] or counters["dangling"] or "leaked_references 0" not in text:
                wrong.append(counters)
            if states["free"] + states["used"] + states["cached"] != 4000:
                wrong.append(states)

    thread = threading.Thread(target=scrape)
    thread.start()
    ends = time.monotonic() + 1.5
    for i in range(10**9):
        if time.monotonic() > ends:
            break
        cache.add_seq(i)
        for layer in range(2):
            cache.append(i, layer, *rows)
        cache.fork(i, -i - 1)
        cache.append(-i - 1, 0, *rows)
        if i >= 20:
            cache.truncate(i - 10, 3)
            cache.free(i - 20)
            cache.free(-(i - 20) - 1)
    stop.set()
    thread.join(60)
    assert not wrong
    assert taken[0] > 10
    cache.close()


def test_an_engine_is_not_refused_because_somebody_scrapes(cache: PagedKVCache) -> None:
    stop = threading.Event()

    def scrape() -> None:
        while not stop.is_set():
            cache.snapshot()

    thread = threading.Thread(target=scrape)
    thread.start()
    try:
        for _ in range(2000):
            cache.append("a", 0, ONE, ONE)
            cache.truncate("a", 6)
    finally:
        stop.set()
        thread.join(30)


# --- fork
# --------------------------------------------------------------------------------------------------

FORKED = """
import os, threading, time, warnings
import numpy as np
from tinyllm import ConcurrentUseError, PagedKVCache, ThreadPool, flash_attention
warnings.simplefilter("ignore")
cache = PagedKVCache(num_blocks=8, block_size=4, n_layers=1, n_kv_heads=1, d_head=2)
pool = ThreadPool(2)
cache.add_seq("a")
row = np.ones((1, 1, 2), np.float32)
cache.append("a", 0, row, row)
entered, leave = threading.Event(), threading.Event()
def stay(*blocks):
    def run():
        with pool._handle.read():
            with blocks[0](), blocks[-1]():
                entered.set()
                leave.wait()
    thread = threading.Thread(target=run)
    thread.start()
    entered.wait()
    return thread
def in_child(work):
    child = os.fork()
    if child == 0:
        work()
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    leave.set()
    return status
"""


def test_a_child_forked_while_a_thread_read_goes_on_and_closes(
    run_silently: Callable[..., str],
) -> None:
    said = run_silently(
        FORKED
        + """
thread = stay(cache._handle.read, cache._handle.look)
def work():
    cache.append("a", 0, row, row)
    assert cache.snapshot().counters["leaked"] == 0 and cache.seq_len("a") == 2
    flash_attention(*np.ones((3, 1, 1, 1, 2), np.float32), threads=pool)
    cache.close()
    pool.close()
print(in_child(work))
thread.join()
cache.append("a", 0, row, row)
cache.close()
"""
    )
    assert said == "0\n"


def test_a_child_forked_while_a_thread_wrote_can_close_and_says_why_no_more(
    run_silently: Callable[..., str],
) -> None:
    said = run_silently(
        FORKED
        + """
thread = stay(cache._handle.write, lambda: cache._handle.turn)
def work():
    for call in (lambda: cache.append("a", 0, row, row), cache.stats, lambda: cache.gather("a", 0)):
        try:
            call()
        except ConcurrentUseError as error:
            assert "when the process was forked" in str(error)
        else:
            os._exit(2)
    cache.close()
print(in_child(work))
thread.join()
cache.append("a", 0, row, row)
"""
    )
    assert said == "0\n"


# --- copies
# --------------------------------------------------------------------------------------------------


def test_what_has_one_body_is_not_copied(cache: PagedKVCache, lib: Lib) -> None:
    arrays = KVView.from_arrays(*np.zeros((2, 1, 1, 1, 1), np.float32))
    pool = ThreadPool(1)
    for thing, advice in (
        (cache, "fork begins a sequence"),
        (pool, "make another"),
        (lib, r"load\(path\)"),
        (lib.tl_abi_version, "belongs to a Lib"),
        (cache.view(0), "KVView.from_arrays or PagedKVCache.view"),
        (arrays, "KVView.from_arrays or PagedKVCache.view"),
        (cache._handle, "its owner"),
    ):
        name = type(thing).__name__
        for duplicate in (copy.copy, copy.deepcopy, pickle.dumps, lambda x: copy.deepcopy([x])):
            with pytest.raises(TypeError, match=f"^a {name} cannot be copied .*{advice}"):
                duplicate(thing)
    pool.close()


# --- the process's state
# --------------------------------------------------------------------------------------------------


def test_numpys_error_state_and_warnings_are_the_callers_and_change_nothing() -> None:
    big = np.full((1, 1, 2, 2), 1e300)
    small = np.full((1, 1, 2, 2), 1e-300)
    with np.errstate(all="raise"):
        with make() as cache:
            cache.add_seq("a")
            cache.append("a", 0, big[0], small[0])
            k, v = cache.gather("a", 0)
            assert np.isinf(k).all()
            assert (v == 0).all()
            paged_attention_decode(small[0, :, :1], cache, ["a"], 0)
            paged_attention(small[0, :, :1], cache.view(0), [[0]], [2], softcap=1e-30)
        flash_attention(small, small, big)


# --- the end
# --------------------------------------------------------------------------------------------------


def held_to_the_end(owner: Any, error: type[Exception] | None) -> memoryview:
    """Leaves the with block of ``owner`` while somebody is inside, by ``error`` if there is one."""
    with owner:
        inside: memoryview = owner._handle.read()
        if error:
            raise error
    return inside


def test_an_exception_on_its_way_is_not_hidden_by_a_cache_in_use() -> None:
    for owner in (make(), ThreadPool(1)):
        with pytest.raises(ZeroDivisionError) as caught:
            held_to_the_end(owner, ZeroDivisionError)
        assert not owner._handle.closed
        with pytest.raises(ConcurrentUseError, match="so it cannot be closed"):
            owner.close()
        del caught  # and with it the frame that is inside
        with pytest.raises(ConcurrentUseError, match="so it cannot be closed"):
            held_to_the_end(owner, None)
        owner.close()


def test_exit_under_daemon_threads_between_their_calls(run_silently: Callable[..., str]) -> None:
    said = run_silently("""
import atexit, threading, time
atexit.register(time.sleep, 0.3)  # the last of all: the threads go on meanwhile
from tinyllm import PagedKVCache, ThreadPool
cache = PagedKVCache(num_blocks=8, block_size=4, n_layers=1, n_kv_heads=1, d_head=2)
pool = ThreadPool(2)
cache.add_seq("a")
started = threading.Barrier(3)
def forever(call):
    started.wait()
    while True:
        call()
for call in (cache.stats, lambda: (cache.truncate("a", 0), pool.threads)):
    threading.Thread(target=forever, args=(call,), daemon=True).start()
started.wait()
print("leaving")
""")
    assert said == "leaving\n"


def test_everything_ends_at_exit_where_no_thread_is_left(run_silently: Callable[..., str]) -> None:
    said = run_silently("""
import atexit
from tinyllm import PagedKVCache, ThreadPool
atexit.register(lambda: print(cache._handle.closed, pool._handle.closed))  # runs last
import tinyllm.ffi.handle as handle
atexit.unregister(handle._at_exit)
atexit.register(handle._at_exit)
cache, pool = PagedKVCache(None, 1, 1, 1, 1, 1), ThreadPool(2)
""")
    assert said == "True True\n"
