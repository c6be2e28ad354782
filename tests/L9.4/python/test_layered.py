# SPDX-License-Identifier: MIT
"""A cache whose layers are of different kinds: attention of every layer is that over all it was
ever given, a layer with a window holds no more than its window reaches, and a call that fails or is
interrupted leaves no group ahead of another."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import tinyllm
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from numpy.typing import NDArray
from test_interrupts import interrupted
from tinyllm import (
    ClosedError,
    ConcurrentUseError,
    Layer,
    LayeredKVCache,
    OutOfBlocks,
    PagedKVCache,
    paged_attention,
    paged_attention_decode,
    reference,
)

B = 4  # positions of a block
NEAR, FULL, OTHER = Layer(1, 8, window=5), Layer(2, 4), Layer(2, 4, window=9)
LAYERS = [NEAR, FULL, NEAR, OTHER]  # in the groups 0, 1, 0, 2
SLACK = 3
F32 = np.float32


def make(num_blocks: int = 64, layers: Any = LAYERS, **more: Any) -> PagedKVCache:
    return PagedKVCache(
        num_blocks=num_blocks, block_size=B, layers=layers, **{"slack": SLACK, **more}
    )


@pytest.fixture
def cache() -> Iterator[PagedKVCache]:
    with make() as cache:
        yield cache


def kv(layer: Layer, n: int, seed: int) -> NDArray[np.float16]:
    """K and V [2, heads, n, width] that float16 holds."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((2, layer.n_kv_heads, n, layer.d_head), F32).astype(np.float16)


def append_step(cache: PagedKVCache, seq: Any, n: int, seed: int = 0) -> None:
    for i, layer in enumerate(cache.layers):
        cache.append(seq, i, *kv(layer, n, seed + i))


def used(cache: Any) -> list[int]:
    return [group.stats()["used"] for group in cache.groups]


# --- what is made
# -------------------------------------------------------------------------------------------------


def test_layers_of_one_kind_that_see_all_are_a_plain_cache() -> None:
    with PagedKVCache(num_blocks=8, block_size=B, layers=[FULL] * 3) as cache:
        assert type(cache) is PagedKVCache
        assert (cache.n_layers, cache.n_kv_heads, cache.d_head) == (3, 2, 4)
        assert cache.layers == (FULL,) * 3
    with PagedKVCache(None, 8, B, 3, 2, 4) as cache:
        assert cache.layers == (FULL,) * 3


def test_layers_of_several_kinds_are_groups_in_the_order_of_their_first_layers() -> None:
    with make() as cache:
        assert type(cache) is LayeredKVCache and isinstance(cache, PagedKVCache)
        assert cache.layers == tuple(LAYERS)
        assert [group.numbers for group in cache.groups] == [(0, 2), (1,), (3,)]
        assert [group.layers[0] for group in cache.groups] == [NEAR, FULL, OTHER]
        assert cache.nbytes == sum(group.nbytes for group in cache.groups)
        assert (cache.num_blocks, cache.block_size, cache.n_layers) == (64, B, 4)
        for name in ("n_kv_heads", "d_head"):
            with pytest.raises(AttributeError, match=f"{name} differs between layers"):
                getattr(cache, name)
        with pytest.raises(AttributeError, match="no attribute 'nothing'"):
            cache.nothing  # noqa: B018
        with pytest.raises(TypeError, match=r"a pool for each kind of layer: cache.groups\[i\]"):
            cache.pool  # noqa: B018
        assert repr(cache) == (
            f"LayeredKVCache(num_blocks=64, block_size=4, layers 0,2: {NEAR}; 1: {FULL}; 3: "
            f"{OTHER}, slack=3, dtype='float16')"
        )
        assert repr(cache.groups[0]) == f"<LayerGroup: layers 0,2, {NEAR}>"
    with make(layers=[NEAR] * 3) as cache:
        assert [group.numbers for group in cache.groups] == [(0, 1, 2)]
        assert (cache.n_kv_heads, cache.d_head) == (1, 8)


@pytest.mark.parametrize(
    ("error", "message", "more"),
    [
        (TypeError, r"layers must be a list of tinyllm.Layer, not \[3\]", {"layers": [3]}),
        (TypeError, "layers must be a list of tinyllm.Layer, not 7", {"layers": 7}),
        (ValueError, "layers is empty", {"layers": []}),
        (TypeError, "layers and n_layers are given", {"n_layers": 4}),
        (TypeError, "layers and d_head are given", {"d_head": 4}),
        (TypeError, "layers and d_head are given", {"d_head": 4, "layers": [FULL]}),
        (ValueError, "slack = -1 is outside 0 .. ", {"slack": -1}),
        (ValueError, "slack = -1 is outside 0 .. ", {"slack": -1, "layers": [FULL]}),
        (ValueError, "slack must be an integer, not 1.5", {"slack": 1.5}),
        (ValueError, "num_blocks = 0 is outside 1 .. ", {"num_blocks": 0}),
        (TypeError, "dtype must be one of", {"dtype": "int3"}),
        (TypeError, "lib must be a Lib or None", {"lib": 3}),
    ],
)
def test_what_no_cache_can_be_made_of_is_refused(
    error: Any, message: str, more: dict[str, Any]
) -> None:
    with pytest.raises(error, match=f"^PagedKVCache: {message}"):
        make(**more)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 8), "n_kv_heads = 0 is outside 1 .. 4294967295"),
        ((1, -1), "d_head = -1 is outside 1 .. 4294967295"),
        ((1, 8, -1), "window = -1 is outside 0 .. 2147483647"),
        ((1, 8, None), "window must be an integer, not None"),
        ((True, 8), "n_kv_heads must be an integer, not True"),
    ],
)
def test_a_layer_has_sizes(sizes: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"^Layer: {message}"):
        Layer(*sizes)


def test_numpys_integers_make_the_same_layer() -> None:
    assert {Layer(np.int64(1), np.uint8(8), np.int32(5))} == {NEAR}


def test_a_pool_that_cannot_be_reserved_takes_the_others_with_it(lib: Any) -> None:
    watched, alive = tinyllm.ffi.libtinyllm.Lib(lib.path), set()
    create, destroy = watched.tl_kv_pool_create, watched.tl_kv_pool_destroy

    def counted_create(config: Any, out: Any) -> None:
        create(config, out)
        alive.add(out._obj.value)

    def counted_destroy(address: int) -> None:
        alive.remove(address)
        destroy(address)

    vars(watched).update(tl_kv_pool_create=counted_create, tl_kv_pool_destroy=counted_destroy)
    with pytest.raises(ValueError, match=r"^PagedKVCache: ") as caught:
        make(2**31 - 1, layers=[NEAR, Layer(2**32 - 1, 2**32 - 1)], lib=watched)
    assert caught.traceback and not alive


# --- against a model
# -------------------------------------------------------------------------------------------------

Held = dict[int, list[NDArray[np.float16]]]  # of a sequence K and V [2, heads, n, width] of layers


class AgainstAModel(RuleBasedStateMachine):
    """A cache beside plain arrays of all that each sequence was ever given, and the position from
    which on each of its groups still holds it."""

    layers, slack = LAYERS, SLACK

    def __init__(self) -> None:
        super().__init__()
        self.cache: Any = make(200, self.layers, slack=self.slack)
        self.held: Held = {}
        self.first: dict[int, list[int]] = {}  # of a sequence, one a group
        self.names, self.seeds = itertools.count(), itertools.count(1)

    def teardown(self) -> None:
        for seq in list(self.held):
            self.cache.free(seq)
        assert self.cache.stats()["free"] == 200 * len(self.cache.groups)
        self.cache.close()

    def lengths(self, seq: int) -> list[int]:
        return [a.shape[2] for a in self.held[seq]]

    def append(self, seq: int, i: int, n: int) -> None:
        layer, new = self.layers[i], kv(self.layers[i], n, next(self.seeds))
        g = next(g for g, group in enumerate(self.cache.groups) if i in group.numbers)
        shortest = min(self.lengths(seq)[j] for j in self.cache.groups[g].numbers)
        self.cache.append(seq, i, *new)
        self.held[seq][i] = np.concatenate([self.held[seq][i], new], axis=2)
        if layer.window:
            behind = (shortest - layer.window - self.slack) // B * B
            self.first[seq][g] = max(self.first[seq][g], behind)

    @rule()
    def add(self) -> None:
        seq = next(self.names)
        self.cache.add_seq(seq)
        self.held[seq] = [kv(layer, 0, 0) for layer in self.layers]
        self.first[seq] = [0] * len(self.cache.groups)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), n=st.integers(1, 13))
    def step(self, data: Any, n: int) -> None:
        """A forward: what every layer attends over is what it was ever given."""
        seq = data.draw(st.sampled_from(sorted(self.held)))
        longest = max(self.lengths(seq))
        for i, layer in enumerate(self.layers):  # a layer that lagged catches up
            self.append(seq, i, longest + n - self.lengths(seq)[i])
            k, v = self.held[seq][i].astype(F32)[:, None]
            q = np.random.default_rng(next(self.seeds)).standard_normal(
                (1, 2, n, layer.d_head), F32
            )
            wanted, _ = reference.flash_attn_fwd(
                q, k, v, scale=0.5, causal=True, q_offset=longest, window=layer.window
            )
            with self.cache.batch([seq]) as batch:
                got = paged_attention(
                    q[0].transpose(1, 0, 2), batch, i,
                    cu_seqlens_q=[0, n], scale=0.5, window=layer.window,
                )  # fmt: skip
            np.testing.assert_array_equal(got, wanted[0].transpose(1, 0, 2))
            one = paged_attention_decode(
                q[0, None, :, -1], self.cache, [seq], i, scale=0.5, window=layer.window
            )
            np.testing.assert_array_equal(one[0], wanted[0, :, -1])

    @precondition(lambda self: self.held)
    @rule(data=st.data(), i=st.integers(0, len(LAYERS) - 1), n=st.integers(1, 9))
    def append_to_one_layer(self, data: Any, i: int, n: int) -> None:
        seq = data.draw(st.sampled_from(sorted(self.held)))
        self.append(seq, i % len(self.layers), n)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def fork(self, data: Any) -> None:
        seq, child = data.draw(st.sampled_from(sorted(self.held))), next(self.names)
        self.cache.fork(seq, child)
        self.held[child], self.first[child] = list(self.held[seq]), list(self.first[seq])

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def truncate(self, data: Any) -> None:
        seq = data.draw(st.sampled_from(sorted(self.held)))
        lengths = self.lengths(seq)
        length = data.draw(st.integers(0, max(lengths)))
        for group, first in zip(self.cache.groups, self.first[seq], strict=True):
            window = group.layers[0].window
            shortest = min(lengths[i] for i in group.numbers)
            sees = max(length - window + 1, 0) if window else length
            if 0 < length < shortest and sees < first:
                before = self.cache.snapshot()
                with pytest.raises(ValueError, match=f"truncate: length = {length} .*given back"):
                    self.cache.truncate(seq, length)
                assert self.cache.snapshot() == before
                assert length < self.cache.least_length(seq)
                return
        assert length == 0 or length >= min(self.cache.least_length(seq), *lengths)
        self.cache.truncate(seq, length)
        self.held[seq] = [a[:, :, :length] for a in self.held[seq]]
        ends = [-(-length // B) * B] * len(self.cache.groups)
        self.first[seq] = [min(*pair) for pair in zip(self.first[seq], ends, strict=True)]

    @precondition(lambda self: len(self.held) > 1)
    @rule(data=st.data())
    def free(self, data: Any) -> None:
        seq = data.draw(st.sampled_from(sorted(self.held)))
        self.cache.free(seq)
        del self.held[seq], self.first[seq]

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def move(self, data: Any) -> None:
        """Out and in again, unless something is gone."""
        seq, twin = data.draw(st.sampled_from(sorted(self.held))), next(self.names)
        lengths = self.lengths(seq)
        if any(self.first[seq]) or len(set(lengths)) > 1 or lengths[0] == 0:
            with pytest.raises(ValueError, match=r"^export_seq: "):
                self.cache.export_seq(seq)
            return
        self.cache.import_seq(twin, self.cache.export_seq(seq))
        self.held[twin], self.first[twin] = list(self.held[seq]), list(self.first[seq])

    @invariant()
    def everything_is_there(self) -> None:
        assert sorted(self.cache) == sorted(self.held)
        for g, (group, taken) in enumerate(
            zip(self.cache.groups, self.cache.snapshot(), strict=True)
        ):
            assert (taken.counters["leaked"], taken.counters["dangling"]) == (0, 0)
            assert sorted(group) == sorted(self.held)
            blocks = set()
            for seq in self.held:
                lengths = [self.lengths(seq)[i] for i in group.numbers]
                first, table = self.first[seq][g], group.block_table(seq).tolist()
                assert len(table) == -(-max(lengths) // B)
                assert [block < 0 for block in table] == [j * B < first for j in range(len(table))]
                blocks |= set(table) - {-1}
                self.check_contents(group, seq, first, table)
            assert taken.counters["blocks_used"] == len(blocks)

    def check_contents(self, group: Any, seq: int, first: int, table: list[int]) -> None:
        for j, i in enumerate(group.numbers):
            a = self.held[seq][i]
            assert self.cache.seq_len(seq, i) == a.shape[2]
            for is_v in (0, 1):
                slabs = [group._blocks.slab(b, j, is_v) for b in table[first // B :]]
                stored = np.concatenate([a[is_v][:, :0], *slabs], axis=1)
                np.testing.assert_array_equal(stored[:, : a.shape[2] - first], a[is_v][:, first:])


class OneWindowedKind(AgainstAModel):
    layers, slack = [NEAR, NEAR], 0


@pytest.mark.parametrize("machine", [AgainstAModel, OneWindowedKind])
def test_any_calls_agree_with_arrays_that_keep_everything(machine: Any) -> None:
    run_state_machine_as_test(
        machine, settings=settings(max_examples=60, stateful_step_count=30, deadline=None)
    )


# --- what is given back
# -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 3, 8])
def test_a_layer_with_a_window_holds_no_more_however_long_the_sequence(n: int) -> None:
    with make(1000) as cache:
        cache.add_seq("a")
        for step in range(200 // n):
            append_step(cache, "a", n, step)
            near, full, other = used(cache)
            assert full == -(-n * (step + 1) // B)
            for blocks, window in ((near, 5), (other, 9)):
                assert blocks <= -(-(window + SLACK + 2 * n) // B) + 1
        assert cache.stats()["used"] == near + full + other
        assert cache.num_free_blocks() == 1000 - full


@pytest.mark.parametrize("slack", [0, 1, 4, 11])
def test_truncate_can_always_go_back_by_the_slack(slack: int) -> None:
    for n in range(1, 40):
        with make(slack=slack) as cache:
            cache.add_seq("a")
            for _ in range(n):
                append_step(cache, "a", 1)
            back = max(n - 1 - slack, 0)
            cache.truncate("a", back)
            assert cache.seq_len("a") == back
            append_step(cache, "a", 1)
            for i, layer in enumerate(LAYERS):
                q = np.ones((1, 2, layer.d_head), F32)
                paged_attention_decode(q, cache, ["a"], i, window=layer.window)


def test_a_layer_that_lags_keeps_its_window(cache: Any) -> None:
    cache.add_seq("a")
    for n in (10, 10, 10, 10):
        cache.append("a", 0, *kv(NEAR, n, 0))
    cache.append("a", 2, *kv(NEAR, 9, 0))
    assert (cache.block_table("a") < 0).sum() == 0
    q = np.ones((1, 2, 8), F32)
    for _ in range(20):
        cache.append("a", 2, *kv(NEAR, 1, 0))
        paged_attention_decode(q, cache, ["a"], 2, window=5)
    assert (cache.block_table("a") < 0).sum() == (28 - 5 - SLACK) // B


def test_memory_above_the_mark_goes_back_whatever_frees_it() -> None:
    block = 2 * 2 * 8 * 2 * 256  # bytes: K and V, 2 heads of 8 in f16, 256 positions
    layers, rows = [Layer(2, 8, window=8), Layer(2, 8)], np.ones((2, 2, 25600, 8), F32)
    with PagedKVCache(
        num_blocks=400, block_size=256, layers=layers, slack=0, trim_above=4 * block
    ) as cache:
        cache.add_seq("a")
        for n in (25600, 1):
            for layer in range(2):
                cache.append("a", layer, *rows[:, :, :n])
        held = [group.resident_bytes // block for group in cache.groups]
        assert used(cache) == [2, 101] and held[0] <= 2 + 4 and held[1] == 101
        cache.truncate("a", 0)
        assert used(cache) == [0, 0] and cache.resident_bytes <= 2 * 4 * block


def test_a_cut_below_the_window_is_refused_and_changes_nothing(cache: Any) -> None:
    cache.add_seq("a")
    for step in range(30):
        append_step(cache, "a", 1, step)
    before = cache.snapshot()  # of layers 0 and 2 with 20 .. 29, of layer 3 with 16 .. 29
    assert cache.least_length("a") == 24
    with pytest.raises(
        ValueError,
        match="truncate: length = 23 of sequence 'a', whose positions before 20 were given back, "
        "and a row sees 5 positions",
    ):
        cache.truncate("a", 23)
    assert cache.snapshot() == before
    cache.truncate("a", 24)
    assert [cache.seq_len("a", i) for i in range(4)] == [24] * 4
    cache.truncate("a", 0)
    assert used(cache) == [0, 0, 0] and cache.least_length("a") == 0


def test_what_would_read_a_lost_position_is_refused(cache: Any) -> None:
    cache.add_seq("a")
    for _ in range(30):
        append_step(cache, "a", 1)
    q = np.ones((1, 2, 8), F32)
    for window, first in ((0, 0), (11, 19), (None, 0)):
        with pytest.raises(
            ValueError,
            match=f"position {first} of sequence 'a' is needed, and a window of 5 gave up those "
            "before 20",
        ):
            paged_attention_decode(q, cache, ["a"], 0, window=window)
    with pytest.raises(ValueError, match="paged_attention: position 0 of sequence 'a'"):
        paged_attention(q, cache.batch(["a"]), 2)
    with pytest.raises(ValueError, match="gather: position 0 of sequence 'a'"):
        cache.gather("a", 0)
    with pytest.raises(ValueError, match=r"export_seq: position 0 .* a window of 5 gave up"):
        cache.export_seq("a")
    assert cache.gather("a", 1)[0].shape == (2, 30, 4)
    assert paged_attention_decode(q, cache, ["a"], 0, window=10).shape == q.shape


def test_trim_front_reaches_the_layers_that_see_all(cache: Any) -> None:
    cache.add_seq("a")
    append_step(cache, "a", 30)
    assert used(cache) == [8, 8, 8]
    cache.trim_front("a", 20)
    assert used(cache) == [6, 6, 6]
    cache.truncate("a", 30)  # nothing to cut, and nothing refused
    for window in (0, 1.5):
        with pytest.raises((ValueError, TypeError), match="trim_front: window"):
            cache.trim_front("a", window)


# --- all or nothing
# -------------------------------------------------------------------------------------------------


def test_a_group_without_blocks_says_which_layers_it_is_for() -> None:
    with make(4) as cache:
        cache.add_seq("a")
        append_step(cache, "a", 15)
        before = cache.snapshot()
        with pytest.raises(
            OutOfBlocks,
            match=r"sequence 'a' needs 1 more blocks .* 0 are free .* of 4, for layers 0,2$",
        ):
            cache.append("a", 0, *kv(NEAR, 2, 0))
        failed = [taken.failed_allocations for taken in cache.snapshot()]
        assert failed == [1, 0, 0]
        assert [taken.blocks.tolist() for taken in cache.snapshot()] == [
            taken.blocks.tolist() for taken in before
        ]
        append_step(cache, "a", 1)
        cache.free("a")
        assert cache.num_free_blocks() == 4


def test_an_import_that_one_group_has_no_room_for_takes_nothing() -> None:
    with make() as cache, make(4) as small:
        cache.add_seq("a")
        append_step(cache, "a", 8)
        envelope = cache.export_seq("a")
        small.add_seq("b")
        small.append("b", 3, *kv(OTHER, 12, 0))
        before = used(small)
        with pytest.raises(OutOfBlocks, match=r"import_seq: sequence 'a': .* for layers 3$"):
            small.import_seq("a", envelope)
        assert used(small) == before and list(small) == ["b"]
        small.truncate("b", 8)
        small.import_seq("a", envelope)
        for i in range(4):
            for mine, theirs in zip(small.gather("a", i), cache.gather("a", i), strict=True):
                np.testing.assert_array_equal(mine, theirs)


def test_any_bytes_are_safe_to_import(cache: Any) -> None:
    cache.add_seq("a")
    append_step(cache, "a", 9)
    whole = bytes(cache.export_seq("a"))
    with make() as other:
        other.add_seq("b")
        append_step(other, "b", 5)
        parts = [bytes(group.export_seq("b")) for group in other.groups]
    first = len(cache.groups[0].export_seq("a"))
    rng = np.random.default_rng(1)
    damaged = [whole[:n] for n in (0, 1, 12, first - 1, first, first + 40, len(whole) - 1)]
    damaged += [whole + b"x", whole[first:], whole[:first] + b"".join(parts[1:])]
    for place in rng.integers(0, len(whole), 200).tolist():
        damaged.append(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
    before = [taken.blocks.tolist() for taken in cache.snapshot()]
    for bad in damaged:
        with pytest.raises(ValueError, match=r"^import_seq: "):
            cache.import_seq("c", bad)
        assert (
            list(cache) == ["a"] and [taken.blocks.tolist() for taken in cache.snapshot()] == before
        )
    with pytest.raises(ValueError, match="sequence 'a' is live already"):
        cache.import_seq("a", whole)
    with pytest.raises(TypeError):
        cache.import_seq("c", 7)


WRITES: dict[str, Callable[[Any], object]] = {
    "append": lambda cache: cache.append("a", 1, *kv(FULL, 5, 1)),
    "append_batch": lambda cache: cache.append_batch(
        ["a", "b"], 1, *kv(FULL, 5, 1).transpose(0, 2, 1, 3), [0, 3, 5]
    ),
    "append_to_a_window": lambda cache: cache.append("a", 3, *kv(OTHER, 1, 1)),
    "add_seq": lambda cache: cache.add_seq("c"),
    "fork": lambda cache: cache.fork("a", "c"),
    "free": lambda cache: cache.free("a"),
    "truncate": lambda cache: cache.truncate("a", 13),
    "trim_front": lambda cache: cache.trim_front("a", 1),
    "import_seq": lambda cache: cache.import_seq("c", ENVELOPE),
    "close": lambda cache: cache.close(),
}
ENVELOPE = b""


def filled() -> Any:
    """Sequences a and b, which share what they hold but for three positions of layers 0 to 2."""
    cache = make(16)
    cache.add_seq("a")
    append_step(cache, "a", 16)
    cache.fork("a", "b")
    for i in range(3):
        cache.append("a", i, *kv(LAYERS[i], 3, 1))
    return cache


def seen(cache: Any) -> Any:
    if cache._handle.closed:
        return "closed"
    pictures = []
    for group, taken in zip(cache.groups, cache.snapshot(), strict=True):
        assert (taken.counters["leaked"], taken.counters["dangling"]) == (0, 0)
        assert list(group) == list(cache)
        lengths = {seq: [group.seq_len(seq, i) for i in range(group.n_layers)] for seq in group}
        tables = {seq: (group.block_table(seq) >= 0).tolist() for seq in group}
        pictures.append((lengths, tables, sorted(taken.blocks["fill"].tolist())))
    return pictures


@pytest.mark.parametrize("name", WRITES)
def test_a_write_stopped_at_any_place_is_whole_or_nothing(name: str) -> None:
    """Of an append both halves are: the new positions, and what is given back for them."""
    global ENVELOPE
    with filled() as cache:
        ENVELOPE = bytes(cache.export_seq("b"))
        states = [seen(cache)]
        cache.groups[-1]._give_back = lambda *args: None  # type: ignore[method-assign]
        if name == "append_to_a_window":
            WRITES[name](cache)
            states.append(seen(cache))
    with filled() as cache:
        WRITES[name](cache)
        states.append(seen(cache))
    assert states[0] != states[-1]
    kept, outcomes = [], set()
    for n in itertools.count(1):
        cache = filled()
        kept.append(interrupted(partial(WRITES[name], cache), n))  # and its frames, as consoles do
        found = seen(cache)
        assert found in states, f"place {n}"
        outcomes.add(states.index(found))
        if found != "closed":
            for seq in list(cache):  # nobody is left inside
                cache.free(seq)
            assert cache.stats()["free"] == 3 * 16
            cache.close()
        if kept[-1] is None:
            break
    assert len(kept) > 5
    assert {0, len(states) - 1} <= outcomes


def test_a_call_on_any_group_keeps_writers_of_all_out(cache: Any) -> None:
    cache.add_seq("a")
    append_step(cache, "a", 3)
    writes: list[Callable[[], object]] = [
        lambda: cache.add_seq("b"), lambda: cache.fork("a", "b"), lambda: cache.free("a"),
        lambda: cache.truncate("a", 1), lambda: cache.trim_front("a", 1), cache.close,
    ]  # fmt: skip
    before = cache.snapshot()
    for group in cache.groups:
        for inside in (group._handle.read, group._handle.write):
            for write in writes:
                with inside(), pytest.raises(ConcurrentUseError):
                    write()
    assert cache.snapshot() == before
    with pytest.raises(ConcurrentUseError), cache, cache.groups[2]._handle.read():
        cache.close()
    other: Any = make()
    inside = other.groups[1]._handle.read()
    with pytest.raises(KeyError, match="zero"), other:
        raise KeyError("zero")  # which is what is heard
    inside.release()
    with pytest.raises(ConcurrentUseError, match="so it cannot be closed"), other:
        inside = other.groups[1]._handle.read()
    inside.release()
    other.close()


def test_an_append_beside_a_reader_of_its_group_gives_back_with_the_next_one() -> None:
    with make(slack=0) as cache:
        cache.add_seq("a")
        append_step(cache, "a", 14)
        group = cache.groups[2]
        write, entered = group._handle.write, []

        def refused_the_second_time() -> Any:
            entered.append(1)
            if len(entered) == 2:
                raise ConcurrentUseError("a reader")
            return write()

        group._handle = _With(group._handle, write=refused_the_second_time)
        cache.append("a", 3, *kv(OTHER, 1, 0))
        assert (cache.seq_len("a", 3), used(cache)[2]) == (15, 4)
        group._handle = group._handle.of
        cache.append("a", 3, *kv(OTHER, 1, 0))
        assert used(cache)[2] == 3


class _With:
    """An object with some attributes instead of its own."""

    def __init__(self, of: Any, **own: Any) -> None:
        self.of = of
        vars(self).update(own)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.of, name)


def test_threads_may_write_one_at_a_time_and_look_at_any(cache: Any) -> None:
    cache.add_seq("a")
    stop, wrong = threading.Event(), []

    def look() -> None:
        while not stop.is_set():
            taken = cache.snapshot()
            names = {tuple(s.name for s in group.sequences) for group in taken}
            if len(names) > 1:
                wrong.append(names)
            cache.stats()

    threads = [threading.Thread(target=look) for _ in range(2)]
    for thread in threads:
        thread.start()
    for i in range(300):
        cache.fork("a", i)
        cache.free(i)
    stop.set()
    for thread in threads:
        thread.join(60)
    assert wrong == []


# --- steps of many sequences
# -------------------------------------------------------------------------------------------------


def test_a_step_of_many_sequences_is_that_of_each(cache: Any) -> None:
    """Bits, lengths, and what is given back."""
    with make() as other:
        for each in (cache, other):
            for seq in "abc":
                each.add_seq(seq)
        for n in range(40):
            counts = [n % 4, 1, 2]
            starts = np.cumsum([0, *counts])
            for i, layer in enumerate(LAYERS):
                new = kv(layer, int(starts[-1]), 7 * n + i)
                cache.append_batch(list("abc"), i, *new.transpose(0, 2, 1, 3), starts)
                for seq, begin, end in zip("abc", starts, starts[1:], strict=False):
                    if end > begin:
                        other.append(seq, i, *new[:, :, begin:end])
                q = np.ones((2, 2, layer.d_head), F32)
                with cache.batch(["b", "c"]) as step, other.batch(["b", "c"]) as alone:
                    got = paged_attention(q, step, i, window=layer.window)
                    wanted = paged_attention(q, alone, i, window=layer.window)
                    np.testing.assert_array_equal(step.lengths(i), alone.lengths(i))
                np.testing.assert_array_equal(got, wanted)
            assert [used(cache)[1], used(cache)[0] <= used(other)[0] + 1] == [used(other)[1], True]
            for seq in "abc":
                for i in range(4):
                    assert cache.seq_len(seq, i) == other.seq_len(seq, i)
        assert used(cache)[0] < used(cache)[1] / 2
    with pytest.raises(TypeError, match=r"tables of its own: cache.groups\[i\]"):
        cache.batch(["a"]).tables  # noqa: B018


def test_needs_are_those_of_the_group_that_has_least_to_spare() -> None:
    with make(10) as cache:
        cache.add_seq("a")
        append_step(cache, "a", 16)
        cache.append("a", 3, *kv(OTHER, 12, 0))  # holds 28, of which 4 are given back
        needs = cache.needs({"a": 17})
        assert (needs.fresh, needs.copies, needs.available) == (5, 0, 4)
        with pytest.raises(OutOfBlocks, match=r"append_batch: .*, for layers 3$"):
            cache.append_batch(["a"], 3, *kv(OTHER, 17, 0).transpose(0, 2, 1, 3), [0, 17])
        needs = cache.needs({"a": 16})
        assert needs.total == needs.available == 4
        cache.append_batch(["a"], 3, *kv(OTHER, 16, 0).transpose(0, 2, 1, 3), [0, 16])


# --- everything else
# -------------------------------------------------------------------------------------------------


def test_every_public_method_is_of_all_groups() -> None:
    """Whatever a plain cache offers, this one does in its own way: none of its pools is reached
    through what it inherits."""
    inherited = {"__contains__", "__iter__", "__len__", "__bool__"}
    for name, member in vars(PagedKVCache).items():
        if callable(member) or isinstance(member, property):
            if not name.startswith("_"):
                assert name in vars(LayeredKVCache), name
            assert not (name in inherited and name in vars(LayeredKVCache))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8", "float8_e4m3fn"])
def test_every_dtype_gives_the_bits_of_a_plain_cache(dtype: str) -> None:
    window, shape = 6, (2, 2, 16)
    layers = [Layer(2, 16, window=window), Layer(2, 16)]
    rng = np.random.default_rng(3)
    with (
        make(layers=layers, dtype=dtype) as cache,
        PagedKVCache(None, 64, B, 2, 2, 16, dtype=dtype) as plain,
    ):
        assert cache.dtype == dtype
        for each in (cache, plain):
            each.add_seq("a")
        for n in (7, 1, 1, 12, 1, 1, 5):
            new = rng.standard_normal((2, *shape[1:2], n, 16), F32)
            q = rng.standard_normal((1, 4, 16), F32)
            for i, seen_of in enumerate((window, 0)):
                got = []
                for each in (cache, plain):
                    each.append("a", i, *new)
                    got.append(paged_attention_decode(q, each, ["a"], i, window=seen_of))
                np.testing.assert_array_equal(*got)
        if dtype in ("int8", "float8_e4m3fn"):
            for mine, theirs in zip(
                cache.gather_codes("a", 1), plain.gather_codes("a", 1), strict=True
            ):
                np.testing.assert_array_equal(mine, theirs)
        else:
            with pytest.raises(TypeError, match="which has no scales"):
                cache.gather_codes("a", 1)


def test_errors_name_the_layers_as_the_model_counts_them(cache: Any) -> None:
    cache.add_seq("a")
    cache.append("a", 0, *kv(NEAR, 2, 0))
    with pytest.raises(ValueError, match=r"sequence 'a' holds no position in layer 2"):
        paged_attention(np.ones((1, 2, 8), F32), cache, ["a"], 2)
    with pytest.raises(ValueError, match=r"layer = 4 is outside 0 .. 3"):
        cache.append("a", 4, *kv(NEAR, 1, 0))
    for call in (cache.view, partial(cache.block_table, "a"), partial(cache.seq_len, "a"),
                 partial(cache.gather, "a"), cache.batch(["a"]).lengths):  # fmt: skip
        with pytest.raises(ValueError, match=r"layer = 4 is outside 0 .. 3"):
            call(4)
    with pytest.raises(ValueError, match=r"k has shape .* = \(2, T, 4\)"):
        cache.append("a", 1, *kv(NEAR, 1, 0))
    with pytest.raises(ValueError, match="D = 4"):
        paged_attention_decode(np.ones((1, 2, 8)), cache, ["a"], 1)
    for name, call in (
        ("fork", lambda: cache.fork("x", "y")), ("free", lambda: cache.free("x")),
        ("truncate", lambda: cache.truncate("x", 0)), ("append", lambda: cache.append(
            "x", 0, *kv(NEAR, 1, 0))), ("trim_front", lambda: cache.trim_front("x", 1)),
        ("export_seq", lambda: cache.export_seq("x")),
        ("least_length", lambda: cache.least_length("x")),
    ):  # fmt: skip
        with pytest.raises(KeyError, match=f"{name}: no sequence 'x'"):
            call()
    for name, call in (("add_seq", lambda: cache.add_seq("a")),
                       ("fork", lambda: cache.fork("a", "a"))):  # fmt: skip
        with pytest.raises(ValueError, match=f"{name}: sequence 'a' is live already"):
            call()
    with pytest.raises(ValueError, match=r"truncate: length = 3 is outside 0 .. 2"):
        cache.truncate("a", 3)
    with pytest.raises(ValueError, match=r"hold 0 to 2 positions"):
        cache.export_seq("a")


def test_layers_of_a_group_that_lag_keep_a_cut_within_what_they_hold(cache: Any) -> None:
    cache.add_seq("a")
    cache.append("a", 0, *kv(NEAR, 9, 0))
    cache.truncate("a", 6)  # beyond what the other groups hold
    assert [cache.seq_len("a", i) for i in range(4)] == [6, 0, 0, 0]


def test_a_warning_points_at_whoever_appended(cache: Any) -> None:
    cache.add_seq("a")
    huge = np.full((2, 4, 4), 1e30, F32)
    with pytest.warns(UserWarning, match="append: float16 has nothing") as caught:
        cache.append("a", 1, huge[:, :1], huge[:, :1])
    assert caught[0].filename == __file__
    assert cache.stats()["unrepresentable"] == 16


def test_pictures_and_metrics_tell_the_groups_apart(cache: Any, tmp_path: Any) -> None:
    cache.add_seq("a")
    append_step(cache, "a", 9)
    with pytest.raises(TypeError, match=r"cache.groups\[i\].snapshot\(path\)"):
        cache.snapshot(tmp_path / "x.json")
    picture = cache.look({"a": np.ones(3)}, layer=3)
    text = picture.text(80, colour=False, glyphs=False)
    assert [line for line in text.splitlines() if line.startswith("<")] == [
        repr(group) for group in cache.groups
    ]
    assert text.count("KV cache: 64 blocks") == 3 and text.count("head 0") == 1
    import xml.etree.ElementTree as ET

    page = ET.fromstring(picture.svg())
    heights = [(float(part.get("y", "nan")), float(part.get("height", "nan"))) for part in page]
    assert len(heights) == 3
    assert all(y + h < below for (y, h), (below, _) in itertools.pairwise(heights))
    picture.save(tmp_path / "x.svg")
    assert (
        (tmp_path / "x.svg").read_text()
        == picture.svg()
        == cache.look({"a": np.ones(3)}, 3)._repr_svg_()
    )
    lines = cache.metrics(model="m").splitlines()
    found = [line for line in lines if line.startswith("tinyllm_kv_blocks_used")]
    assert found == [
        f'tinyllm_kv_blocks_used{{model="m",layers="{name}"}} 3' for name in ("0,2", "1", "3")
    ]
    assert len({line for line in lines if line.startswith("# TYPE")}) * 5 == len(lines)
    with pytest.raises(ValueError, match="metrics: layers is the label"):
        cache.metrics(layers="x")


def test_a_closed_cache_says_so() -> None:
    cache: Any = make()
    cache.add_seq("a")
    view = cache.view(0)
    cache.close()
    cache.close()
    calls = [
        lambda: cache.add_seq("b"), lambda: cache.append("a", 0, *kv(NEAR, 1, 0)), cache.stats,
        lambda: cache.fork("a", "b"), lambda: cache.free("a"), lambda: cache.truncate("a", 0),
        lambda: cache.seq_len("a"), lambda: cache.view(3), lambda: "a" in cache, cache.snapshot,
        lambda: cache.import_seq("b", b""), lambda: cache.export_seq("a"), cache.look,
        cache.metrics, cache.__enter__, lambda: cache.least_length("a"), lambda: len(cache),
        lambda: cache.nbytes, cache.num_free_blocks, lambda: cache.trim_front("a", 1),
        lambda: paged_attention(np.ones((1, 1, 8)), view, [[0]], [1]),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(ClosedError):
            call()
    assert repr(cache).endswith("closed)")
