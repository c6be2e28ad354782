# SPDX-License-Identifier: MIT
"""The registered function: what it copies, what it rounds, what it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tinyllm
import torch
from tiny import CACHE, apart, config_of, generate, models, padded, prompts
from tinyllm.hf import PagedCache, register, rows
from tinyllm.hf.attention import attention, padding_mask
from tinyllm.hf.rows import as_stored, rows_of
from transformers import AutoModelForCausalLM


class Layer(torch.nn.Module):
    layer_idx = 0
    is_causal = True


def qkv(
    n_batch: int = 2, n_columns: int = 6, dtype: torch.dtype = torch.float32
) -> tuple[Any, Any, Any]:
    """[B,H,T,D] views of [B,T,H,D] memory, as a layer gives them."""
    generator = torch.Generator().manual_seed(0)
    return tuple(  # type: ignore[return-value]
        torch.randn(n_batch, n_columns, n_heads, 16, generator=generator).to(dtype).transpose(1, 2)
        for n_heads in (4, 2, 2)
    )


# --- memory
# -------------------------------------------------------------------------------------------------


def test_queries_and_keys_are_read_where_they_are() -> None:
    for n_columns in (1, 6):
        q, k, v = qkv(n_columns=n_columns)
        assert rows_of(q).data_ptr() == q.data_ptr()
        for tensor in (k, v, k.half()):
            assert np.shares_memory(as_stored(tensor), tensor.numpy())


@pytest.mark.parametrize("n_columns", [1, 6])
def test_an_append_copies_nothing_on_the_way(
    n_columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what a model hands over, the pool's own function gets the addresses."""
    (model,) = models("llama", "tinyllm")
    offered: list[int] = []
    written: list[int] = []
    with PagedCache(model.config) as cache:
        with torch.no_grad():
            model(torch.tensor(prompts(3)), **{CACHE: cache})
        blocks = cache.kv._blocks
        attend, write = cache.attend, blocks.write

        def watch(layer: int, query: Any, key: Any, value: Any, *rest: Any) -> Any:
            offered.extend([key.data_ptr(), value.data_ptr()])
            return attend(layer, query, key, value, *rest)

        def note(layer: int, *step: Any) -> None:
            rows = step[3]
            written.extend([rows.k.ctypes.data, rows.v.ctypes.data])
            write(layer, *step)

        monkeypatch.setattr(cache, "attend", watch)
        monkeypatch.setattr(blocks, "write", note)
        with torch.no_grad():
            model(torch.tensor(prompts(n_columns)), **{CACHE: cache})
    assert len(offered) == 2 * 4 and written == offered


def test_keys_of_a_float32_model_are_rounded_once() -> None:
    q, k, v = qkv()
    with PagedCache(config_of("llama", num_hidden_layers=1)) as cache:
        k, v = cache.update(k, v, 0)
        attention(Layer(), q, k, v, None)
        for row, seq_id in enumerate(cache.seq_ids):
            stored = cache.kv.gather(seq_id, 0)
            np.testing.assert_array_equal(stored[0], k[row].numpy().astype(np.float16))
            np.testing.assert_array_equal(stored[1], v[row].numpy().astype(np.float16))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_models_of_sixteen_bits_run_and_keep_their_type(dtype: torch.dtype) -> None:
    """Without a cache only the result is rounded; float16 keys lose nothing in a pool either."""
    q, k, v = qkv(dtype=dtype)
    exact, _ = attention(Layer(), q.float(), k.float(), v.float(), None)
    given, _ = attention(Layer(), q, k, v, None)
    assert given.dtype == dtype and torch.equal(given, exact.to(dtype))
    with PagedCache(config_of("llama", num_hidden_layers=1)) as cache:
        k, v = cache.update(k, v, 0)
        cached, _ = attention(Layer(), q, k, v, None)
    assert cached.dtype == dtype
    if dtype == torch.float16:
        assert torch.equal(cached, given)
    (model,) = models("llama", "tinyllm")
    model = model.to(dtype)
    inputs = padded(prompts(7, 4))
    with PagedCache(model.config) as cache:
        assert apart(generate(model, inputs, cache, n=1), generate(model, inputs, n=1)) < 2e-2


def test_the_bits_are_those_of_the_decode_call() -> None:
    q, k, v = qkv(n_batch=1)
    with PagedCache(config_of("llama", num_hidden_layers=1), block_size=4) as cache:
        k, v = cache.update(k, v, 0)
        out, _ = attention(Layer(), q, k, v, None, scaling=0.3, sliding_window=4)
        row = tinyllm.paged_attention_decode(
            np.ascontiguousarray(q[:, :, -1].numpy()),
            cache.kv,
            cache.seq_ids,
            0,
            scale=0.3,
            window=4,
        )
    np.testing.assert_array_equal(out[:, -1].numpy(), row)


@pytest.mark.parametrize("cached", [False, True])
def test_rows_of_padding_are_zero(cached: bool) -> None:
    q, k, v = qkv()
    with PagedCache(config_of("llama", num_hidden_layers=1)) as cache:
        if cached:
            k, v = cache.update(k, v, 0)
        out, _ = attention(Layer(), q, k, v, torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]]))
    assert not out[1, :2].any() and out[1, 2:].all() and out[0].all()


def test_the_layers_of_a_forward_go_by_one_mask() -> None:
    """Layers of several kinds have a mask each; of one content it is."""
    second = Layer()
    second.layer_idx = 1
    mask = torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]])
    for other in (mask.bool(), None, mask.flip(0)):
        with PagedCache(config_of("llama", num_hidden_layers=2)) as cache:
            q, k, v = qkv()
            cache.update(k, v, 0)
            attention(Layer(), q, k, v, mask)
            cache.update(k, v, 1)
            if other is not None and other.dtype == torch.bool:
                attention(second, q, k, v, other)
                lengths = [[cache.kv.seq_len(s, i) for s in cache.seq_ids] for i in range(2)]
                assert lengths == [[6, 4]] * 2
            else:
                with pytest.raises(ValueError, match="of layer 1 hides other columns"):
                    attention(second, q, k, v, other)
                assert cache.kv.stats()["used"] == 0


def test_attention_runs_on_as_many_threads_as_torch_or_as_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    real = rows.paged_attention

    def watched(*args: Any, threads: Any, **kwargs: Any) -> Any:
        asked.append(threads)
        return real(*args, threads=threads, **kwargs)

    monkeypatch.setattr(rows, "paged_attention", watched)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    results = []
    for threads in (None, 1, 3):
        with PagedCache(config_of("llama", num_hidden_layers=1), threads=threads) as cache:
            q, k, v = qkv()
            k, v = cache.update(k, v, 0)
            results.append(attention(Layer(), q, k, v, None)[0])
    assert asked == [2, 1, 3]
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


# --- refusals
# -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "error", "what"),
    [
        ({"dropout": 0.1}, ValueError, r"dropout = 0.1.*model.eval\(\)"),
        ({"is_causal": False}, ValueError, "this layer is not"),
        ({"position_bias": torch.zeros(1)}, ValueError, "position_bias was given"),
        ({"head_mask": torch.zeros(1)}, ValueError, "head_mask was given"),
        ({"output_attentions": True}, ValueError, "output_attentions was given"),
        (
            {"cu_seq_lens_q": torch.tensor([0, 6])},
            ValueError,
            "cu_seq_lens_q was given.*forward_packed",
        ),
        ({"cu_seq_lens_k": torch.tensor([0, 6])}, ValueError, "cu_seq_lens_k was given"),
        (
            {"attention_mask": torch.zeros(2, 1, 6, 6)},
            ValueError,
            r"shape \(2, 1, 6, 6\), expected \[B,T\] = \(2, 6\)",
        ),
        ({"attention_mask": torch.ones(2, 7)}, ValueError, r"shape \(2, 7\)"),
    ],
)
@pytest.mark.parametrize("cached", [False, True])
def test_what_would_change_the_result_raises(
    given: dict[str, Any], error: type[Exception], what: str, cached: bool
) -> None:
    q, k, v = qkv()
    with PagedCache(config_of("llama", num_hidden_layers=1)) as cache:
        if cached:
            k, v = cache.update(k, v, 0)
        with pytest.raises(error, match=what):
            attention(Layer(), q, k, v, **{"attention_mask": None, **given})
        assert cache.kv is None or cache.kv.stats()["used"] == 0


def test_gradients_are_refused() -> None:
    (model,) = models("llama", "tinyllm")
    with pytest.raises(RuntimeError, match=r"no backward pass.*torch.no_grad\(\)"):
        model(torch.tensor(prompts(5)))


def test_a_layer_that_is_not_causal_is_refused() -> None:
    layer = Layer()
    layer.is_causal = False
    with pytest.raises(ValueError, match="this layer is not"):
        attention(layer, *qkv(), None)


def test_keys_on_a_device_are_refused() -> None:
    with pytest.raises(ValueError, match="runs on the CPU, and the model is on meta"):
        attention(Layer(), *(t.to("meta") for t in qkv()), None)


def test_keys_and_values_of_other_shapes_are_refused() -> None:
    q, k, v = qkv()
    with PagedCache(config_of("llama", num_hidden_layers=1)) as cache:
        k, _ = cache.update(k, v, 0)
        with pytest.raises(ValueError, match=r"keys are \(2, 2, 6, 16\) and values \(2, 2, 6, 8\)"):
            attention(Layer(), q, k, v[..., :8], None)


@pytest.mark.parametrize("name", ["my/attention", "flash_tiny", "paged|tiny"])
def test_names_that_mean_something_else_to_transformers_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"register: name"):
        register(name)


def test_another_name_can_be_registered() -> None:
    register("other-name")
    (model,) = models("llama", "other-name")
    with PagedCache(model.config) as cache:
        assert generate(model, padded(prompts(5)), cache, n=2).sequences.shape == (1, 7)


# --- masks
# --------------------------------------------------------------------------------------------------


def test_a_static_cache_is_refused() -> None:
    (model,) = models("llama", "tinyllm")
    with pytest.raises(ValueError, match="as in a static cache"):
        generate(
            model, padded(prompts(5)), n=2, cache_implementation="static", disable_compile=True
        )


def test_bidirectional_masks_are_refused() -> None:
    from transformers.masking_utils import bidirectional_mask_function

    with pytest.raises(ValueError, match="neither causal nor a sliding window"):
        padding_mask(
            batch_size=1, kv_length=4, q_length=4, mask_function=bidirectional_mask_function
        )


def test_a_mask_of_a_modality_is_refused() -> None:
    from transformers.masking_utils import causal_mask_function, or_masks

    image = or_masks(causal_mask_function, lambda b, h, q, k: k < 3)
    with pytest.raises(ValueError, match="neither causal nor a sliding window"):
        padding_mask(batch_size=1, kv_length=4, q_length=4, mask_function=image)


def test_chunked_attention_is_refused() -> None:
    from transformers.masking_utils import chunked_causal_mask_function

    pattern = chunked_causal_mask_function(4, torch.zeros(1, dtype=torch.int))
    with pytest.raises(ValueError, match="neither causal nor a sliding window"):
        padding_mask(batch_size=1, kv_length=8, q_length=8, mask_function=pattern)


@pytest.mark.parametrize("kind", ["llama", "mistral"])
def test_sequences_packed_into_a_row_are_refused_without_a_batch(kind: str) -> None:
    (model,) = models(kind, "tinyllm")
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    with (
        torch.no_grad(),
        pytest.raises(
            ValueError, match=r"packed into one row go through tinyllm\.hf\.forward_packed"
        ),
    ):
        model(torch.tensor(prompts(5)), position_ids=positions, use_cache=False)


def test_masks_of_pairs_are_refused() -> None:
    (model,) = models("llama", "tinyllm")
    with torch.no_grad(), pytest.raises(ValueError, match="masks of pairs are not supported"):
        model(torch.tensor(prompts(5)), attention_mask=torch.ones(1, 1, 5, 5).tril().bool())


def test_a_model_asked_for_weights_says_that_there_are_none() -> None:
    model = AutoModelForCausalLM.from_config(
        config_of("llama"), attn_implementation="tinyllm"
    ).eval()
    with torch.no_grad(), pytest.raises(ValueError, match=r"attn_implementation|output_attentions"):
        model(torch.tensor(prompts(5)), output_attentions=True)
