# SPDX-License-Identifier: MIT
"""Prefixes found by themselves: what a sequence is given of other texts is what it would have
computed, bit for bit, and all that is there is found, to the token."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tinyllm
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from tinyllm import ClosedError, ConcurrentUseError, OutOfBlocks, PagedKVCache

BLOCK, LAYERS = 4, 2
SIZES: dict[str, Any] = {"block_size": BLOCK, "n_layers": LAYERS, "n_kv_heads": 1, "d_head": 4}


def row(namespace: bytes, tokens: list[int], layer: int) -> int:
    """Stands for a model: K at the last of ``tokens``, which depends on all of them."""
    return hash((namespace, tuple(tokens), layer)) % 2039


def rows(namespace: bytes, tokens: list[int], begin: int, layer: int) -> np.ndarray:
    """K of positions ``begin`` and on: [1, n, 4]."""
    values = [row(namespace, tokens[: i + 1], layer) for i in range(begin, len(tokens))]
    return np.repeat(np.array(values, np.float16)[None, :, None], 4, axis=2)


def write(cache: PagedKVCache, seq: Any, tokens: list[int], namespace: bytes = b"") -> None:
    """Appends what a sequence does not hold of ``tokens``."""
    for layer in range(cache.n_layers):
        k = rows(namespace, tokens, cache.seq_len(seq, layer), layer)
        if k.shape[1]:
            cache.append(seq, layer, k, -k)


def check(cache: PagedKVCache, seq: Any, tokens: list[int], namespace: bytes = b"") -> None:
    """That it holds K and V of ``tokens``, as far as it holds any."""
    for layer in range(cache.n_layers):
        k, v = cache.gather(seq, layer)
        want = rows(namespace, tokens[: cache.seq_len(seq, layer)], 0, layer)
        assert np.array_equal(k, want)
        assert np.array_equal(v, -want)


def common(a: list[int], b: list[int]) -> int:
    """How many first tokens are the same."""
    n = 0
    while n < min(len(a), len(b)) and a[n] == b[n]:
        n += 1
    return n


class Cache(RuleBasedStateMachine):
    """A cache beside a plain list of what was said and computed. Tokens are 0 and 1, so that texts
    meet often."""

    @initialize(blocks=st.sampled_from([12, 400]))
    def begin(self, blocks: int) -> None:
        self.cache = PagedKVCache(num_blocks=blocks, **SIZES)
        self.texts: dict[int, list[int]] = {}  # what a sequence holds or was told
        self.said: dict[int, int] = {}
        self.under: dict[int, bytes] = {}
        self.known: set[tuple[bytes, tuple[int, ...]]] = set()  # whole blocks that are findable
        self.dropped: set[int] = set()
        self.names = iter(range(10**9))

    def teardown(self) -> None:
        if hasattr(self, "cache"):
            self.cache.close()

    def held(self, seq: int) -> list[int]:
        return [self.cache.seq_len(seq, layer) for layer in range(LAYERS)]

    def enter(self, seq: int) -> None:
        """What may be found from now on."""
        if seq not in self.dropped:
            n = min(self.said[seq], *self.held(seq)) // BLOCK * BLOCK
            for end in range(BLOCK, n + 1, BLOCK):
                self.known.add((self.under[seq], tuple(self.texts[seq][:end])))

    def best(self, namespace: bytes, tokens: list[int]) -> int:
        return max([common(tokens, list(t)) for n, t in self.known if n == namespace], default=0)

    tokens = st.lists(st.integers(0, 1), max_size=22)

    @rule(
        tokens=tokens,
        namespace=st.sampled_from([b"", b"a", b"a\0"]),
        leave=st.integers(0, 2),
    )
    def add(self, tokens: list[int], namespace: bytes, leave: int) -> None:
        seq = next(self.names)
        for other in self.texts:
            self.enter(other)
        asked = tokens[: max(len(tokens) - leave, 0)]
        want = self.best(namespace, asked)
        found = self.cache.add_seq(seq, tokens, namespace, leave=leave)
        self.texts[seq], self.said[seq], self.under[seq] = list(tokens), len(tokens), namespace
        assert found <= want
        if self.cache.stats()["evictions"] == 0:
            assert found == want
        assert self.held(seq) == [found] * LAYERS
        check(self.cache, seq, tokens, namespace)

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), layer=st.integers(0, LAYERS - 1), n=st.integers(1, 9))
    def append(self, data: Any, layer: int, n: int) -> None:
        seq = data.draw(st.sampled_from(sorted(self.texts)))
        text, held = self.texts[seq], self.held(seq)[layer]
        more = data.draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))
        text += more[: max(0, held + n - len(text))]
        k = rows(self.under[seq], text[: held + n], held, layer)
        try:
            self.cache.append(seq, layer, k, -k)
        except OutOfBlocks:
            del text[max(self.said[seq], *self.held(seq)) :]

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), more=st.lists(st.integers(0, 1), max_size=5))
    def extend(self, data: Any, more: list[int]) -> None:
        seq = data.draw(st.sampled_from(sorted(self.texts)))
        text, said = self.texts[seq], self.said[seq]
        text += more
        self.cache.extend(seq, text[said:])
        self.said[seq] = len(text)
        self.enter(seq)
        assert self.cache.said(seq) == text

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def free(self, data: Any) -> None:
        seq = data.draw(st.sampled_from(sorted(self.texts)))
        self.enter(seq)
        self.cache.free(seq)
        for of in (self.texts, self.said, self.under):
            del of[seq]
        self.dropped.discard(seq)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def fork(self, data: Any) -> None:
        seq = data.draw(st.sampled_from(sorted(self.texts)))
        child = next(self.names)
        self.cache.fork(seq, child)
        self.texts[child], self.said[child] = list(self.texts[seq]), self.said[seq]
        self.under[child] = self.under[seq]
        if seq in self.dropped:
            self.dropped.add(child)
        # What was computed but not said is the child's to say, and may be said as it is only.

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), unsay=st.booleans())
    def truncate(self, data: Any, unsay: bool) -> None:
        seq = data.draw(st.sampled_from(sorted(self.texts)))
        length = data.draw(st.integers(0, max(self.held(seq))))
        self.cache.truncate(seq, length, unsay=unsay)
        text = self.texts[seq]
        if unsay:
            self.said[seq] = min(self.said[seq], length)
        del text[max(self.said[seq], length) :]

    @rule(namespace=st.sampled_from([b"", b"a"]))
    def drop(self, namespace: bytes) -> None:
        self.cache.drop_namespace(namespace)
        self.known = {(n, t) for n, t in self.known if n != namespace}
        self.dropped |= {seq for seq, n in self.under.items() if n == namespace}

    @invariant()
    def everything_is_as_it_was_computed(self) -> None:
        if not hasattr(self, "cache"):
            return
        for seq, text in self.texts.items():
            check(self.cache, seq, text, self.under[seq])
        counters = self.cache.snapshot().counters
        assert (counters["leaked"], counters["dangling"]) == (0, 0)
        assert self.cache.prefix_stats()["blocks"] <= len(self.known)


TestCache = Cache.TestCase
TestCache.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@pytest.fixture
def cache() -> Any:
    with PagedKVCache(num_blocks=16, **SIZES) as cache:
        yield cache


TEXT = [5, 6, 7, 8, 9, 10, 11, 12, 13, 14]


def say(cache: PagedKVCache, seq: Any, tokens: list[int], namespace: bytes = b"") -> int:
    """A sequence of ``tokens``, computed as far as it is not there; how much was."""
    found = cache.add_seq(seq, tokens, namespace)
    write(cache, seq, tokens, namespace)
    return found


@pytest.mark.parametrize("n_same", range(9))
def test_a_match_ends_at_the_first_other_token(cache: PagedKVCache, n_same: int) -> None:
    say(cache, "a", TEXT)
    other = [*TEXT[:n_same], *range(100, 110)]
    assert say(cache, "b", other) == n_same
    check(cache, "a", TEXT)
    check(cache, "b", other)


def test_a_block_that_is_not_full_is_not_found(cache: PagedKVCache) -> None:
    say(cache, "a", TEXT)
    assert cache.add_seq("b", TEXT) == 8


def test_leave_keeps_the_last_tokens_to_be_computed(cache: PagedKVCache) -> None:
    say(cache, "a", TEXT[:8])
    assert [cache.add_seq(leave, TEXT[:8], leave=leave) for leave in (0, 1, 5, 99)] == [8, 7, 3, 0]


def test_whole_blocks_end_a_match_at_a_block(cache: PagedKVCache) -> None:
    say(cache, "a", TEXT)
    assert cache.add_seq("b", [*TEXT[:7], 99], whole_blocks=True) == 4
    assert cache.add_seq("c", TEXT, whole_blocks=True) == 8
    assert cache.add_seq("d", [*TEXT[:3], 99], whole_blocks=True) == 0
    check(cache, "b", TEXT)
    assert cache.snapshot().counters["leaked"] == 0


def test_a_leave_that_is_no_count_begins_nothing(cache: PagedKVCache) -> None:
    for leave, error in ((-1, ValueError), (2**31, ValueError), (1.5, TypeError), ("1", TypeError)):
        with pytest.raises(error, match="add_seq: leave"):
            cache.add_seq("a", TEXT, leave=leave)
    assert "a" not in cache


def test_what_ended_is_found_until_its_room_is_needed(cache: PagedKVCache) -> None:
    say(cache, "a", TEXT)
    cache.free("a")
    assert cache.add_seq("b", TEXT) == 8
    cache.free("b")
    say(cache, "c", list(range(1000, 1060)))  # 15 of 16 blocks
    assert cache.match_len(TEXT) == 4  # the end of the text went first
    assert cache.prefix_stats()["evictions"] == 1


def test_generated_tokens_are_found_by_a_second_turn(cache: PagedKVCache) -> None:
    say(cache, "a", TEXT[:6], b"x")
    for token in TEXT[6:]:
        cache.extend("a", [token])
        write(cache, "a", cache.said("a"), b"x")
    cache.free("a")
    assert cache.add_seq("b", [*TEXT, 1, 2], b"x") == 8
    check(cache, "b", TEXT, b"x")


@pytest.mark.parametrize("other", [b"", b"a", b"tenant ", b"tenant\0", b"tenant" * 100])
def test_another_namespace_finds_nothing(cache: PagedKVCache, other: bytes) -> None:
    say(cache, "a", TEXT, b"tenant")
    assert cache.add_seq("b", TEXT, other) == cache.match_len(TEXT, other) == 0
    assert cache.match_len(TEXT, bytearray(b"tenant")) == 8


def test_a_dropped_namespace_is_forgotten_for_good(cache: PagedKVCache) -> None:
    say(cache, "a", TEXT, b"x")
    say(cache, "b", TEXT, b"y")
    assert cache.add_seq("e", TEXT, b"x") == 8
    cache.free("e")
    cache.drop_namespace(b"x")
    cache.extend("a", [99, 98, 97])
    write(cache, "a", cache.said("a"), b"x")
    cache.extend("a", [96])  # behind three full blocks
    assert cache.add_seq("c", TEXT, b"x") == 0
    assert cache.add_seq("d", TEXT, b"y") == 8
    check(cache, "a", [*TEXT, 99, 98, 97], b"x")


def test_a_fork_says_what_its_parent_said_and_then_its_own(cache: PagedKVCache) -> None:
    say(cache, "a", TEXT[:6])
    cache.fork("a", "b")
    for seq, more in (("a", [1, 2, 3]), ("b", [4, 5, 6])):
        cache.extend(seq, more)
        write(cache, seq, cache.said(seq))
        cache.extend(seq, [])
    assert cache.said("a") == [*TEXT[:6], 1, 2, 3]
    assert cache.said("b") == [*TEXT[:6], 4, 5, 6]
    assert cache.match_len([*TEXT[:6], 1, 2, 7]) == 8
    assert cache.match_len([*TEXT[:6], 4, 5, 7]) == 8


def test_a_cut_text_goes_on_with_other_tokens(cache: PagedKVCache) -> None:
    say(cache, "a", TEXT)
    assert cache.add_seq("b", TEXT) == 8
    other = [*TEXT[:2], *range(50, 62)]
    cache.truncate("a", 2)
    assert cache.said("a") == TEXT[:2]
    cache.extend("a", other[2:])
    write(cache, "a", other)
    cache.extend("a", [])
    assert cache.match_len(other) == 12
    check(cache, "a", other)
    check(cache, "b", TEXT)


def test_a_cut_that_does_not_unsay_is_appended_again(cache: PagedKVCache) -> None:
    cache.add_seq("a", TEXT)
    write(cache, "a", TEXT[:6])
    cache.truncate("a", 0, unsay=False)  # a forward that failed
    assert cache.said("a") == TEXT
    write(cache, "a", TEXT)
    cache.extend("a", [1])
    assert cache.match_len(TEXT) == 8


def test_two_that_compute_the_same_at_once_share_it_after_extend(cache: PagedKVCache) -> None:
    for seq in "ab":
        cache.add_seq(seq, TEXT)
    for seq in "ab":
        write(cache, seq, TEXT)
    used = cache.stats()["used"]
    for seq in "ab":
        cache.extend(seq, [1])
    assert cache.stats()["used"] == used - 2
    assert cache.block_table("a")[:2].tolist() == cache.block_table("b")[:2].tolist()
    for seq in "ab":
        write(cache, seq, [*TEXT, 1])
        check(cache, seq, [*TEXT, 1])


def test_a_pinned_text_outlives_what_needs_its_room(cache: PagedKVCache) -> None:
    say(cache, "a", TEXT)
    cache.free("a")
    cache.pin(TEXT)
    cache.pin(TEXT[:5])
    with pytest.raises(OutOfBlocks):
        say(cache, "b", list(range(1000, 1060)))
    assert cache.match_len(TEXT) == 8
    assert cache.snapshot().counters["leaked"] == 0
    cache.unpin(TEXT)
    cache.free("b")
    say(cache, "c", list(range(1000, 1060)))
    assert cache.match_len(TEXT) == 4
    cache.unpin(TEXT[:4])
    with pytest.raises(LookupError, match="1 full blocks of these 4 tokens are not pinned"):
        cache.unpin(TEXT[:4])
    with pytest.raises(LookupError, match="2 full blocks of these 10 tokens are not in the index"):
        cache.pin(TEXT)
    with pytest.raises(ValueError, match="3 tokens fill no block of 4"):
        cache.pin(TEXT[:3])


def test_extend_refuses_to_say_less_than_is_held(cache: PagedKVCache) -> None:
    cache.add_seq("a")
    write(cache, "a", TEXT)
    with pytest.raises(ValueError, match="holds 10 positions, and with these 9 tokens are said"):
        cache.extend("a", TEXT[:9])
    assert cache.said("a") == []
    cache.extend("a", TEXT)
    assert cache.add_seq("b", TEXT) == 8


def test_extend_refuses_other_tokens_for_blocks_that_a_fork_said(cache: PagedKVCache) -> None:
    cache.add_seq("a")
    write(cache, "a", TEXT)
    cache.fork("a", "b")
    cache.extend("a", TEXT)
    with pytest.raises(ValueError, match=r"extend: sequence 'b': .* at another place"):
        cache.extend("b", [1] * 10)
    assert cache.said("b") == []
    cache.extend("b", TEXT)
    assert cache.add_seq("c", [1] * 10) == 0


@pytest.mark.parametrize(
    ("tokens", "error"),
    [
        ("text", TypeError),
        (b"text", TypeError),
        ([1.5], TypeError),
        ([[1, 2]], TypeError),
        (np.ones((2, 2), int), TypeError),
        (np.float32([1]), TypeError),
        (7, TypeError),
        ([-1], ValueError),
        ([2**32], ValueError),
    ],
)
def test_what_are_no_tokens_changes_nothing(
    cache: PagedKVCache, tokens: Any, error: type[Exception]
) -> None:
    cache.add_seq("a")
    calls: list[Callable[[], Any]] = [
        lambda: cache.add_seq("b", tokens),
        lambda: cache.extend("a", tokens),
        lambda: cache.match_len(tokens),
        lambda: cache.pin(tokens),
    ]
    for call in calls:
        with pytest.raises(error, match="tokens"):
            call()
    assert list(cache) == ["a"]
    assert cache.said("a") == []


def test_a_namespace_is_bytes(cache: PagedKVCache) -> None:
    for call in (cache.add_seq, cache.pin, cache.unpin):
        with pytest.raises(TypeError, match="namespace must be bytes, not str"):
            call(TEXT if call != cache.add_seq else "a", namespace="a")
    with pytest.raises(TypeError, match="namespace must be bytes"):
        cache.drop_namespace("a")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [list, tuple, np.array, np.int64, np.uint32, np.uint8])
def test_tokens_come_as_lists_and_arrays(cache: PagedKVCache, kind: Any) -> None:
    say(cache, "a", TEXT)
    assert cache.add_seq("b", kind(TEXT)) == 8


def test_stats_count_what_was_asked_and_found(cache: PagedKVCache) -> None:
    assert set(cache.prefix_stats().values()) == {0}
    say(cache, "a", TEXT)
    say(cache, "b", [*TEXT[:6], 1])
    stats = cache.prefix_stats()
    told = [stats[name] for name in ("queries", "tokens_asked", "tokens_found", "blocks")]
    assert told == [2, 17, 6, 2]
    assert stats["namespaces"] == 1


def test_hits_show_in_pictures_and_metrics(cache: PagedKVCache) -> None:
    assert "prefix" not in cache.look().text(80, colour=False)
    say(cache, "a", TEXT)
    say(cache, "b", TEXT)
    assert (
        "prefix   8 of 20 tokens found (40 %), 2 sequences begun with tokens"
        in cache.look().text(80, colour=False)
    )
    assert "tinyllm_kv_prefix_tokens_found_total 8" in cache.metrics()
    assert "tinyllm_kv_prefix_tokens_asked_total 20" in cache.metrics()


def test_a_closed_cache_says_so(cache: PagedKVCache) -> None:
    say(cache, "a", TEXT)
    cache.close()
    for call in (cache.match_len, cache.pin, cache.add_seq, cache.said):
        with pytest.raises(ClosedError):
            call(TEXT)


def test_four_threads_one_of_which_writes(cache: PagedKVCache) -> None:
    """Readers are right or refused while texts come and go."""
    stop, wrong = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            try:
                if cache.match_len([*TEXT, 1]) not in (0, 4, 8):
                    wrong.append("match_len")
                if cache.prefix_stats()["tokens_found"] % 4:
                    wrong.append("prefix_stats")
            except ConcurrentUseError:
                continue

    threads = [threading.Thread(target=read) for _ in range(3)]
    for thread in threads:
        thread.start()
    done = 0
    while done < 300:
        try:
            if "a" not in cache:
                cache.add_seq("a", TEXT)
            for layer in range(LAYERS):
                k = rows(b"", TEXT, cache.seq_len("a", layer), layer)
                if k.shape[1]:
                    cache.append("a", layer, k, -k)
            check(cache, "a", TEXT)
            cache.free("a")
            done += 1
        except ConcurrentUseError:
            continue
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_prefix_stats_are_documented() -> None:
    named = tinyllm.PagedKVCache.prefix_stats.__doc__ or ""
    with PagedKVCache(num_blocks=1, **SIZES) as cache:
        for name in cache.prefix_stats():
            assert name in named
