# SPDX-License-Identifier: MIT
"""Timing in one process whose implementations have thread pools of their own.

Library and peer take turns in short batches. Workers of OpenMP, TBB and ONNX Runtime go on spinning
for some milliseconds after a call; before a batch begins, ``settle`` waits until the process uses
no CPU time any more, so that no batch pays for workers of the one before. Then calls that are not
counted wake the batch's own workers, which may spin between its calls as they do by default.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

BATCH_SECONDS = 5e-3
BATCH_CALLS = (3, 16)  # fewest and most that are timed in a batch
WARM_SECONDS = 1e-3
TWO_CORES = 1.4  # two threads must do this many times the work of one
LONG_SECONDS = (
    20e-3  # a shorter batch is judged as a whole: looking makes a gap of 0.1 ms between calls
)
MAY_WAIT = 0.05  # of a repetition: how long threads that could run may have waited for a CPU
FEWEST = 5  # pairs of batches that a median is made of
REST_SECONDS = 0.05  # after a disturbance


@dataclass
class Turn:
    """An implementation that takes turns: its calls, where in the copies it is, what it took."""

    name: str
    call: Callable[[int], object]
    copies: int
    at: int = 0
    seconds: list[float] = field(default_factory=list)

    def next(self) -> float:
        self.at = (self.at + 1) % self.copies
        start = time.perf_counter()
        self.call(self.at)
        return time.perf_counter() - start

    def batch(self) -> list[float]:
        """The repetitions that count, in seconds."""
        settle()
        warm = last = self.next()
        while warm < WARM_SECONDS:
            last = self.next()
            warm += last
        fewest, most = BATCH_CALLS
        calls = min(most, max(fewest, round(BATCH_SECONDS / last)))
        together = calls if calls * last < LONG_SECONDS else 1
        kept: list[float] = []
        for _ in range(calls // together):
            waited = waiting_seconds()
            seconds = [self.next() for _ in range(together)]
            if waiting_seconds() - waited <= MAY_WAIT * sum(seconds):
                kept += seconds
        return kept


@dataclass
class Pairs:
    """A peer's turns, each beside one of the library's."""

    peer: Turn
    ratios: list[float] = field(
        default_factory=list
    )  # the peer's median of a pair over the library's
    dropped: int = 0


def take_turns(
    ours: Turn, peers: Sequence[Turn], threads: int, seconds: float, most: int, patience: float
) -> list[Pairs]:
    """``most`` pairs of batches for each peer, or as many as fit into ``seconds``; no fewer than
    FEWEST, unless other programs take so much that ``patience`` times that long is too little."""
    cores, pairs = TwoCores() if threads > 1 else None, [Pairs(peer) for peer in peers]
    begin, turn_about = time.perf_counter(), itertools.cycle((False, True))
    while (passed := time.perf_counter() - begin) < patience * seconds:
        wanted = most if passed < seconds else FEWEST
        waiting = [pair for pair in pairs if len(pair.ratios) < wanted]
        if not waiting:
            break
        peer_first = next(turn_about)
        for pair in waiting:
            order = (pair.peer, ours) if peer_first else (ours, pair.peer)
            undisturbed = not cores or cores.here()
            took = {turn.name: turn.batch() for turn in order} if undisturbed else {}
            if took and all(took.values()) and (not cores or cores.here()):
                for turn in order:
                    turn.seconds += took[turn.name]
                theirs, own = (statistics.median(took[turn.name]) for turn in (pair.peer, ours))
                pair.ratios.append(theirs / own)
            else:
                pair.dropped += 1
                time.sleep(REST_SECONDS)
    return pairs


def settle(at_most: float = 0.5) -> None:
    """Waits until every thread of the process sleeps."""
    end = time.perf_counter() + at_most
    while time.perf_counter() < end:
        cpu = time.process_time()
        time.sleep(2e-3)
        if time.process_time() - cpu < 2e-4:
            return


def waiting_seconds() -> float:
    """How long the threads of this process have waited so far for a CPU in use by another."""
    nanoseconds = 0
    for task in os.scandir("/proc/self/task"):
        try:
            with open(f"{task.path}/schedstat", "rb") as file:
                nanoseconds += int(file.read().split()[1])
        except (OSError, IndexError):  # it has ended, or the system does not count this
            pass
    return nanoseconds * 1e-9


class TwoCores:
    """Whether two threads have two cores at the moment; on a shared host they may not.

    Both are pinned meanwhile: the scheduler may leave two short pieces of work on one CPU.
    """

    def __init__(self) -> None:
        self._cpus = sorted(os.sched_getaffinity(0))
        self._work = bytes(1 << 21)
        self._other = ThreadPoolExecutor(1)
        self._other.submit(
            os.sched_setaffinity, 0, self._cpus[-1:]
        ).result()  # 0: the calling thread

    def here(self) -> bool:
        settle()
        os.sched_setaffinity(0, self._cpus[:1])
        alone = min(self._hash() for _ in range(3))
        start = time.perf_counter()
        other = self._other.submit(self._hash)
        self._hash()
        other.result()
        together = time.perf_counter() - start
        os.sched_setaffinity(0, self._cpus)
        return 2 * alone >= TWO_CORES * together

    def _hash(self) -> float:
        """A millisecond or so outside the interpreter lock."""
        start = time.perf_counter()
        hashlib.sha256(self._work).digest()
        return time.perf_counter() - start


def quantile(sample: Sequence[float], q: float) -> float:
    return sorted(sample)[round(q * (len(sample) - 1))]
