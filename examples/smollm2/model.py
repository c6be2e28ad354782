# SPDX-License-Identifier: MIT
"""A llama-type transformer in numpy, its attention by tinyllm over a paged KV cache.

One method does all the work: :meth:`Model.forward` takes new tokens for any number of sequences,
stores their K and V in the cache and returns next-token logits. Prefill, decode and any mixture of
them are one `paged_attention` call a layer, over K and V as the cache holds them: so all give the
same bits, whatever the dtype of the cache. (`flash_attention` over what `gather` reads back would
differ in int8 and float8_e4m3fn, whose scales the call applies to sums, not to every element.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from tinyllm import PagedKVCache, paged_attention

from .gguf import GGUF, GGUFError
from .rows import (
    Crew,
    FixedTileLinear,
    Floats,
    rms_norm,
    rotate_pairs,
    rotation_table,
    silu,
    whole_tiles,
)

Work = Sequence[tuple[str, Sequence[int]]]  # (sequence, its new tokens), each sequence once


@dataclass(frozen=True)
class Config:
    """The dimensions of a model."""

    layers: int
    width: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    vocabulary: int
    context: int
    eps: float = 1e-5
    rope_base: float = 10000.0

    @property
    def q_width(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.kv_heads * self.head_dim


@dataclass(frozen=True)
class Layer:
    attention_norm: Floats
    qkv: FixedTileLinear
    attention_out: FixedTileLinear
    ffn_norm: Floats
    gate_up: FixedTileLinear
    down: FixedTileLinear


@dataclass
class Clock:
    """Seconds spent, in all and in attention (storing K and V and reading them back included)."""

    total: float = 0.0
    attention: float = 0.0


@dataclass(frozen=True)
class _Rows:
    """The rows of one forward call: sequence i's new tokens are rows starts[i] .. starts[i + 1]."""

    names: list[str]
    starts: list[int]
    cos: Floats
    sin: Floats

    @property
    def n(self) -> int:
        return self.starts[-1]


class Model:
    """Weights and the forward pass. Make one with :func:`from_gguf` or :func:`random_model`."""

    def __init__(self, config: Config, layers: list[Layer], norm: Floats, head: FixedTileLinear,
                 embedding: Floats | None = None) -> None:  # fmt: skip
        self.config, self.layers, self.norm, self.head = config, layers, norm, head
        self._embedding = head.weight if embedding is None else embedding
        self._eps = np.float32(config.eps)
        self._cos, self._sin = rotation_table(config.context, config.head_dim, config.rope_base)

    def new_cache(self, n_blocks: int, block_tokens: int, dtype: str = "float16") -> PagedKVCache:
        c = self.config
        return PagedKVCache(
            None, n_blocks, block_tokens, c.layers, c.kv_heads, c.head_dim, dtype=dtype
        )

    def forward(
        self,
        cache: PagedKVCache,
        work: Work,
        crew: Crew,
        clock: Clock | None = None,
        *,
        every: bool = False,
    ) -> Floats:
        """Store the new tokens of `work` and return the logits after each sequence's last one,
        [len(work), vocabulary]; with `every` those after every token."""
        clock = clock if clock is not None else Clock()
        begin = time.perf_counter()
        rows = self._lay_out(cache, work)
        x = np.zeros((whole_tiles(rows.n), self.config.width), np.float32)
        x[: rows.n] = self._embed([token for _, tokens in work for token in tokens])
        for index, layer in enumerate(self.layers):
            qkv = layer.qkv(rms_norm(x, layer.attention_norm, self._eps), crew)
            x += layer.attention_out(self._attend(cache, index, rows, qkv, crew, clock), crew)
            gate_up = layer.gate_up(rms_norm(x, layer.ffn_norm, self._eps), crew)
            gate, up = np.split(gate_up, 2, axis=1)
            x += layer.down(silu(gate) * up, crew)
        last = x[: rows.n] if every else x[[end - 1 for end in rows.starts[1:]]]
        logits = self.head(rms_norm(last, self.norm, self._eps), crew)
        clock.total += time.perf_counter() - begin
        return logits

    def _lay_out(self, cache: PagedKVCache, work: Work) -> _Rows:
        names: list[str] = []
        starts = [0]
        positions: list[int] = []
        for name, tokens in work:
            offset, n = cache.seq_len(name), len(tokens)
            if n < 1 or name in names:
                raise ValueError(f"sequence {name!r} must come once, with at least one new token")
            if offset + n > self.config.context:
                raise ValueError(
                    f"{offset + n} tokens in sequence {name!r}; the model reads "
                    f"{self.config.context}"
                )
            names.append(name)
            starts.append(starts[-1] + n)
            positions.extend(range(offset, offset + n))
        return _Rows(names, starts, self._cos[positions], self._sin[positions])

    def _embed(self, tokens: list[int]) -> Floats:
        if not all(0 <= token < self.config.vocabulary for token in tokens):
            raise ValueError(f"a token id outside 0..{self.config.vocabulary - 1}")
        return self._embedding[tokens]

    def _attend(
        self, cache: PagedKVCache, layer: int, rows: _Rows, qkv: Floats, crew: Crew, clock: Clock
    ) -> Floats:
        """Attention of all rows, [whole tiles of rows, heads * head_dim]; the rows that fill the
        last tile are zero."""
        c = self.config
        q_end, k_end = c.q_width, c.q_width + c.kv_width
        q = rotate_pairs(
            qkv[: rows.n, :q_end].reshape(rows.n, c.heads, c.head_dim), rows.cos, rows.sin
        )
        k = rotate_pairs(
            qkv[: rows.n, q_end:k_end].reshape(rows.n, c.kv_heads, c.head_dim), rows.cos, rows.sin
        )
        v = qkv[: rows.n, k_end:].reshape(rows.n, c.kv_heads, c.head_dim)
        out = np.zeros((len(qkv), c.heads, c.head_dim), np.float32)

        begin = time.perf_counter()
        cache.append_batch(rows.names, layer, k, v, rows.starts, threads=crew.pool)
        paged_attention(
            q, cache, rows.names, layer,
            cu_seqlens_q=rows.starts, threads=crew.pool, out=out[: rows.n],
        )  # fmt: skip
        clock.attention += time.perf_counter() - begin
        return out.reshape(len(qkv), c.q_width)


# --- where models come from -----------------------------------------------------------------------

_LAYER_TENSORS: Final = (
    "attn_norm", "attn_q", "attn_k", "attn_v", "attn_output",
    "ffn_norm", "ffn_gate", "ffn_up", "ffn_down",
)  # fmt: skip


def read_config(file: GGUF) -> Config:
    """The dimensions in a GGUF file's metadata; GGUFError for another architecture or variant."""
    name = file.text("general.architecture")
    if name != "llama":
        raise GGUFError(f"{file.path}: architecture {name!r}; this model code is for 'llama'")
    if (
        file.metadata.get("llama.rope.scaling.type", "none") != "none"
        or "rope_freqs.weight" in file.tensors
    ):
        raise GGUFError(f"{file.path}: scaled rotary positions are not supported here")
    width, heads = (
        file.integer("llama.embedding_length"),
        file.integer("llama.attention.head_count"),
    )
    kv_heads = file.integer("llama.attention.head_count_kv")
    if min(width, heads, kv_heads) < 1 or width % heads or heads % kv_heads or width // heads % 2:
        raise GGUFError(
            f"{file.path}: width {width} with {heads} heads and {kv_heads} KV heads does not add up"
        )
    head_dim = width // heads
    for key in (
        "llama.attention.key_length",
        "llama.attention.value_length",
        "llama.rope.dimension_count",
    ):
        if key in file.metadata and file.integer(key) != head_dim:
            raise GGUFError(f"{file.path}: {key} is {file.integer(key)}, the head width {head_dim}")
    return Config(
        layers=file.integer("llama.block_count"),
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=file.integer("llama.feed_forward_length"),
        vocabulary=len(file.texts("tokenizer.ggml.tokens")),
        context=file.integer("llama.context_length"),
        eps=file.number("llama.attention.layer_norm_rms_epsilon"),
        rope_base=file.number("llama.rope.freq_base")
        if "llama.rope.freq_base" in file.metadata
        else 10000.0,
    )


def from_gguf(file: GGUF, progress: Callable[[int, int], None] = lambda done, of: None) -> Model:
    """The model in a GGUF file, in float32; `progress` is called with layers ready and in all."""
    c = read_config(file)
    expected = {"token_embd.weight", "output_norm.weight", "output.weight"}
    expected |= {f"blk.{i}.{part}.weight" for i in range(c.layers) for part in _LAYER_TENSORS}
    if unknown := sorted(set(file.tensors) - expected):
        raise GGUFError(f"{file.path}: tensor {unknown[0]!r} has no place in this model code")

    def tensor(name: str, *shape: int) -> Floats:
        if name in file.tensors and file.tensors[name].shape != shape:
            raise GGUFError(
                f"{file.path}: tensor {name!r} has shape {file.tensors[name].shape}, not {shape}"
            )
        return file.tensor(name)

    def stacked(index: int, *parts: tuple[str, int]) -> FixedTileLinear:
        """Weights that read the same rows, as one matrix."""
        return FixedTileLinear(
            np.concatenate([tensor(f"blk.{index}.{p}.weight", n, c.width) for p, n in parts])
        )

    layers = []
    for i in range(c.layers):
        out = tensor(f"blk.{i}.attn_output.weight", c.width, c.q_width)
        layers.append(Layer(
            attention_norm=tensor(f"blk.{i}.attn_norm.weight", c.width),
            qkv=stacked(i, ("attn_q", c.q_width), ("attn_k", c.kv_width), ("attn_v", c.kv_width)),
            attention_out=FixedTileLinear(out),
            ffn_norm=tensor(f"blk.{i}.ffn_norm.weight", c.width),
            gate_up=stacked(i, ("ffn_gate", c.ffn), ("ffn_up", c.ffn)),
            down=FixedTileLinear(tensor(f"blk.{i}.ffn_down.weight", c.width, c.ffn)),
        ))  # fmt: skip
        progress(i + 1, c.layers)
    embedding = tensor("token_embd.weight", c.vocabulary, c.width)
    norm = tensor("output_norm.weight", c.width)
    if "output.weight" not in file.tensors:
        return Model(c, layers, norm, FixedTileLinear(embedding))
    return Model(
        c, layers, norm, FixedTileLinear(tensor("output.weight", c.vocabulary, c.width)), embedding
    )


def random_model(config: Config, seed: int) -> Model:
    """An untrained model: seeded normal weights, scaled so that activations keep their size."""
    rng = np.random.default_rng(seed)

    def linear(columns: int, width: int) -> FixedTileLinear:
        return FixedTileLinear(
            rng.standard_normal((columns, width), np.float32) * np.float32(width**-0.5)
        )

    c, ones = config, np.ones(config.width, np.float32)
    layers = [
        Layer(
            attention_norm=ones,
            qkv=linear(c.q_width + 2 * c.kv_width, c.width),
            attention_out=linear(c.width, c.q_width),
            ffn_norm=ones,
            gate_up=linear(2 * c.ffn, c.width),
            down=linear(c.width, c.ffn),
        )
        for _ in range(c.layers)
    ]
    return Model(config, layers, ones, linear(c.vocabulary, c.width))
