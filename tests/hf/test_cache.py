# SPDX-License-Identifier: MIT
"""PagedCache by itself: what its operations keep, share and give back, and what it refuses."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny import CACHE, config_of, generate, models, padded, prompts
from tinyllm import ClosedError, OutOfBlocks
from tinyllm.hf import PagedCache, new_kv


@pytest.fixture(scope="module")
def model() -> Any:
    return models("llama", "tinyllm")[0]


@pytest.fixture
def cache(model: Any) -> Iterator[PagedCache]:
    with PagedCache(model.config, num_blocks=32, block_size=4) as cache:
        yield cache


def read(model: Any, cache: PagedCache, sequences: list[list[int]], **more: Any) -> Any:
    """The logits of a forward."""
    with torch.no_grad():
        return model(**{**padded(sequences), **more}, **{CACHE: cache}).logits


def used(cache: PagedCache) -> int:
    return int(cache.kv.stats()["used"])


def content(cache: PagedCache) -> list[bytes]:
    """What every layer of every sequence holds."""
    layers = range(len(cache))
    return [a.tobytes() for s in cache.seq_ids for i in layers for a in cache.kv.gather(s, i)]


# --- crop, copies, repeated rows
# ----------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "left"), [(-3, 6), (6, 6), (0, 9), (-9, 0), (-20, 0), (30, 9)])
def test_crop_takes_columns_away_and_keeps_the_rest(
    model: Any, cache: PagedCache, n: int, left: int
) -> None:
    (sequence,) = prompts(9)
    read(model, cache, [sequence])
    cache.crop(n)
    assert cache.n_columns == left and cache.get_seq_length() == left
    assert used(cache) == -(-left // 4)
    if left:
        kept = content(cache)
        with PagedCache(model.config, num_blocks=32, block_size=4) as other:
            read(model, other, [sequence])
            other.crop(left)
            assert content(other) == kept
    read(model, cache, [sequence[left:] or [5]], attention_mask=None)  # and it goes on from there


def test_crop_of_padded_rows_takes_from_their_ends(model: Any, cache: PagedCache) -> None:
    read(model, cache, prompts(9, 2))
    cache.crop(-4)
    assert [cache.kv.seq_len(s) for s in cache.seq_ids] == [5, 0]
    assert cache.n_columns == 5


def test_a_copy_shares_blocks_and_goes_its_own_way(model: Any, cache: PagedCache) -> None:
    first, left, right = prompts(9, 3, 3)
    read(model, cache, [first])
    before, blocks = content(cache), used(cache)
    twin = copy.deepcopy(cache)
    assert used(cache) == blocks and content(twin) == before
    for turn, own in ((left, cache), (right, twin)):
        inputs = padded([first + turn])
        assert torch.equal(
            generate(model, inputs, own, n=4).sequences, generate(model, inputs, n=4).sequences
        )
    assert (
        used(cache) == 2 + 2 + 2
    )  # two blocks of the prompt are full; the third each of them copied
    del twin, own
    gc.collect()
    assert used(cache) == 2 + 2


def test_closing_a_copy_leaves_the_rest_and_closing_the_first_ends_all(model: Any) -> None:
    with PagedCache(model.config, num_blocks=32, block_size=4) as cache:
        read(model, cache, prompts(9))
        with copy.deepcopy(cache) as twin:
            read(model, twin, prompts(4), attention_mask=None)
            assert used(cache) == 2 + 1 + 2
        assert used(cache) == 3
        read(model, cache, prompts(1), attention_mask=None)
        with pytest.raises(ClosedError, match="this PagedCache is closed"):
            read(model, twin, prompts(1), attention_mask=None)
        late = copy.deepcopy(cache)
    with pytest.raises(ClosedError):
        read(model, late, prompts(1), attention_mask=None)


def test_a_prompt_read_once_serves_a_batch(model: Any, cache: PagedCache) -> None:
    (prompt,), turns = prompts(8), prompts(3, 3, 3, seed=5)
    read(model, cache, [prompt])
    assert used(cache) == 2
    cache.batch_repeat_interleave(3)
    assert used(cache) == 2
    inputs = padded([prompt + turn for turn in turns])
    got, wanted = generate(model, inputs, cache, n=4), generate(model, inputs, n=4)
    assert torch.equal(got.sequences, wanted.sequences)
    assert used(cache) == 2 + 3 * 2


def test_rows_can_be_chosen(model: Any, cache: PagedCache) -> None:
    read(model, cache, prompts(9, 9, 9))
    before = content(cache)
    cache.batch_select_indices(torch.tensor([2, 0]))
    n = len(before) // 3
    assert content(cache) == before[2 * n :] + before[:n]
    assert used(cache) == 2 * 3


def test_a_reset_cache_takes_another_batch(model: Any, cache: PagedCache) -> None:
    read(model, cache, prompts(9, 9, 9))
    with pytest.raises(
        ValueError, match=r"a forward of 1 sequences, and the cache holds 3: reset\(\)"
    ):
        read(model, cache, prompts(1), attention_mask=None)
    cache.reset()
    assert used(cache) == 0 and cache.seq_ids == []
    assert torch.equal(
        read(model, cache, prompts(7)), read(model, PagedCache(model.config), prompts(7))
    )


def test_a_collected_cache_gives_its_blocks_back(model: Any, cache: PagedCache) -> None:
    read(model, cache, prompts(9))
    kv, twin = cache.kv, copy.deepcopy(cache)
    cache.reset()
    assert kv.stats()["used"] == 3
    del twin
    gc.collect()
    assert kv.stats()["used"] == 0


# --- what goes wrong
# ----------------------------------------------------------------------------------------


def test_a_pool_too_small_says_how_large_and_leaves_the_cache_as_it_was(model: Any) -> None:
    first, second = prompts(9, 30)
    with PagedCache(model.config, num_blocks=6, block_size=4) as cache:
        read(model, cache, [first])
        before = content(cache)
        with pytest.raises(
            OutOfBlocks,
            match=r"1 sequences of up to 39 positions take up to 10 blocks of 4; the pool has 6",
        ):
            read(model, cache, [second], attention_mask=None)
        assert content(cache) == before and cache.n_columns == 9
        inputs = padded([first + second[:3]])
        assert torch.equal(
            generate(model, inputs, cache, n=3).sequences, generate(model, inputs, n=3).sequences
        )
        cache.reset()
        with pytest.raises(
            OutOfBlocks, match="2 sequences of up to 15 positions take up to 8 blocks"
        ):
            read(model, cache, prompts(15, 15))
        assert used(cache) == 0 and cache.seq_ids == []


def test_a_model_with_another_attention_is_noticed(cache: PagedCache) -> None:
    (eager,) = models("llama", "eager")
    with pytest.raises(
        RuntimeError, match=r"nobody took the keys of layer 0.*set_attn_implementation"
    ):
        read(eager, cache, prompts(5))


def test_a_mask_that_forgets_the_padding_is_refused(model: Any, cache: PagedCache) -> None:
    read(model, cache, prompts(5, 3))
    with pytest.raises(ValueError, match="row 1 holds 3 positions, and by attention_mask 5"):
        read(model, cache, prompts(1, 1), attention_mask=None)


def test_a_closed_cache_is_closed(model: Any) -> None:
    cache = PagedCache(model.config)
    read(model, cache, prompts(5))
    cache.close()
    cache.close()
    with pytest.raises(ClosedError, match="PagedCache is closed"):
        read(model, cache, prompts(5))
    with pytest.raises(ClosedError), cache:
        pass


@pytest.mark.parametrize("size", ["num_blocks", "block_size"])
@pytest.mark.parametrize("value", [0, -1, 2**40, "4", None])
def test_sizes_are_positive_integers(size: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"PagedCache: {size}"):
        PagedCache(config_of("llama"), **{size: value})


@pytest.mark.parametrize(
    ("own", "what"),
    [
        (
            {
                "layer_types": [
                    "full_attention",
                    "chunked_attention",
                    "linear_attention",
                    "full_attention",
                ]
            },
            "chunked",
        ),
        ({"num_kv_shared_layers": 2}, "2 layers share the keys of others"),
        ({"kv_lora_rank": 16}, "compressed keys"),
    ],
)
def test_models_it_cannot_serve_are_refused(own: dict[str, Any], what: str) -> None:
    config = config_of("llama")
    for name, value in own.items():
        object.__setattr__(config, name, value)
    with pytest.raises(ValueError, match=what):
        PagedCache(config)


def test_its_picture_tells_what_it_holds(model: Any, cache: PagedCache) -> None:
    sizes = "num_blocks=32, block_size=4, dtype='float16'"
    assert repr(cache) == f"PagedCache({sizes}, sequences=0, columns=0)"
    read(model, cache, prompts(9, 9))
    assert repr(cache) == f"PagedCache({sizes}, sequences=2, columns=9)"


def test_a_dtype_that_is_none_is_refused(model: Any) -> None:
    for wrong in ("fp8", torch.float64, None):
        with pytest.raises(TypeError, match="PagedCache: dtype must be one of float16, bfloat16"):
            PagedCache(model.config, dtype=wrong)


# --- texts that were there before


@pytest.fixture
def kv(model: Any) -> Iterator[Any]:
    with new_kv(model.config, num_blocks=64, block_size=4) as kv:
        yield kv


def answered(model: Any, kv: Any, text: list[int], n: int, namespace: bytes = b"") -> Any:
    """What generate() answers over a pool that others use too, and how many columns were there."""
    with PagedCache(model.config, prefix=kv) as cache:
        found = cache.recall(torch.tensor([text]), namespace)
        assert cache.n_columns == found
        out = generate(model, padded([text]), cache, n=n).sequences
        cache.remember(out)
    return out[0].tolist(), found


def test_what_a_cache_remembers_another_recalls_to_the_token(model: Any, kv: Any) -> None:
    text = prompts(22)[0]
    first, found = answered(model, kv, text, 6)
    assert found == 0
    again, found = answered(model, kv, text, 6)
    assert (again, found) == (first, 21)  # the last token's output is wanted
    other = [*text[:9], (text[9] + 1) % 97, *text[10:]]
    assert answered(model, kv, other, 6)[1] == 9
    turn = [*first, 5, 6, 7]
    answer, found = answered(model, kv, turn, 6)
    assert found == (len(first) - 1) // 4 * 4
    with PagedCache(model.config, num_blocks=32, block_size=4) as alone:
        assert answer == generate(model, padded([turn]), alone, n=6).sequences[0].tolist()
    assert kv.stats()["used"] == 0


def test_recalled_rows_of_a_batch_begin_where_all_have_something(model: Any, kv: Any) -> None:
    text = prompts(16)[0]
    answered(model, kv, text, 2)
    rows = torch.tensor([text, [*text[:6], *[3] * 10]])
    with PagedCache(model.config, prefix=kv) as cache:
        assert cache.recall(rows) == 6
        got = generate(model, padded(rows.tolist()), cache, n=5).sequences
    with PagedCache(model.config, num_blocks=32, block_size=4) as alone:
        assert torch.equal(got, generate(model, padded(rows.tolist()), alone, n=5).sequences)


def test_a_namespace_recalls_its_own(model: Any, kv: Any) -> None:
    text = prompts(16)[0]
    answered(model, kv, text, 2, b"a")
    assert answered(model, kv, text, 2, b"b")[1] == 0
    assert answered(model, kv, text, 2, b"a")[1] == 15


def test_what_cannot_be_recalled_or_remembered_changes_nothing(model: Any, kv: Any) -> None:
    ids = torch.tensor(prompts(8))
    own = PagedCache(model.config, num_blocks=8)
    with own, pytest.raises(ValueError, match="recall: this cache was made without prefix"):
        own.recall(ids)
    with PagedCache(model.config, prefix=kv) as cache:
        for bad in (ids[0], [[1, 2]], ids[:, :0]):
            with pytest.raises(ValueError, match=r"token ids are \[B,T\]"):
                cache.recall(bad)
        read(model, cache, ids.tolist())
        with pytest.raises(ValueError, match="holds a text already"):
            cache.recall(ids)
        with pytest.raises(ValueError, match="7 columns, and the cache holds 8"):
            cache.remember(ids[:, :7])
        cache.batch_repeat_interleave(2)
        with pytest.raises(ValueError, match="none chosen, repeated or padded"):
            cache.remember(ids.repeat(2, 1))
        assert kv.prefix_stats()["blocks"] == 0
    with pytest.raises(TypeError, match="prefix must be a PagedKVCache"):
        PagedCache(model.config, prefix=7)
    other = config_of("llama", num_hidden_layers=2)
    with pytest.raises(ValueError, match="prefix has layers, KV heads and width"):
        PagedCache(other, prefix=kv)


def test_a_failed_forward_leaves_nothing_to_be_recalled_wrongly(model: Any) -> None:
    """The blocks of a forward that found no room say nothing under the tokens of the next one."""
    with new_kv(model.config, num_blocks=6, block_size=4) as kv:
        first, second = prompts(30, 20)
        with PagedCache(model.config, prefix=kv) as cache:
            cache.recall(torch.tensor([first]))
            with pytest.raises(OutOfBlocks):
                read(model, cache, [first])
            read(model, cache, [second])
            cache.remember(torch.tensor([second]))
        with PagedCache(model.config, prefix=kv) as cache:
            assert cache.recall(torch.tensor([first])) == 0
            assert cache.recall(torch.tensor([second])) == 19
