# SPDX-License-Identifier: MIT
"""A model in which no row can see its neighbours.

Attention of the library gives a row the same bits in any batch. A model keeps that only if all else
does, and torch does not: it picks a matrix kernel by the number of rows, and the last few elements
of a vector loop may be computed in another way than the rest, wherever an array happens to end or
threads happen to cut it. So here every module that multiplies, sums or calls a transcendental
function works in pieces of one size: matrix products and norms on tiles of 16 rows, rotary tables
on 16 positions, activations on 8192 elements; the last piece is filled up. What is left, +, -, *, /
and sqrt of elements, is rounded correctly wherever it stands.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch
from torch import nn

from tinyllm.hf.rows import Tensor

__all__ = ["FixedTileLinear", "make_batch_invariant"]

TILE: Final = 16  # rows of every matrix product
_ELEMENTS: Final = (
    8192  # of an activation at once: whole vectors, and too few for torch to share out
)
_ACTIVATIONS: Final = ("transformers.activations", "torch.nn.modules.activation")
_DEPENDS_ON_ALL: Final = (
    "dynamic",
    "longrope",
)  # frequencies that follow the longest sequence of a batch


class FixedTileLinear(nn.Linear):  # type: ignore[misc]
    """An ``nn.Linear`` in which each row of the result is a function of the same row of x alone.

    Made from a linear layer, whose parameters it shares. Rows go through the matrix product 16 at a
    time, the last tile filled up with zeros. Where that product treats the places of a tile
    differently (tried once for each number of threads) every row gets a tile of its own: slow, and
    right.
    """

    def __init__(self, linear: Any) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self._places_agree: dict[int, bool] = {}

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, self.in_features)
        if self._agree() or len(rows) < 2:
            y = _in_pieces(self._tile, rows, TILE)
        else:
            y = torch.cat([_in_pieces(self._tile, row[None], TILE) for row in rows])
        y = y.reshape(*x.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias

    def _tile(self, tile: Tensor) -> Tensor:
        return tile @ self.weight.t()

    def _agree(self) -> bool:
        """Whether sixteen times the same row gives sixteen times the same result."""
        n_threads = torch.get_num_threads()
        if n_threads not in self._places_agree:
            generator = torch.Generator("cpu").manual_seed(0)
            row = torch.randn(
                1, self.in_features, generator=generator, dtype=torch.float32, device="cpu"
            )
            with torch.no_grad():
                y = self._tile(row.to(self.weight.dtype).expand(TILE, -1).contiguous())
            self._places_agree[n_threads] = bool((y == y[0]).all())
        return self._places_agree[n_threads]


def make_batch_invariant(model: Any) -> Any:
    """Makes a model, in place, give a row the same bits whatever else is in the batch; returns it.

    Replaces every ``nn.Linear`` by a FixedTileLinear over the same parameters, and lets norms,
    rotary tables and activations work in pieces of one size. Names of parameters stay. A second
    time changes nothing.
    The bits are those of one machine, one build of torch and one number of torch's threads.

    Raises: ValueError for a model with parts that cannot be made so, before anything is changed:
    weights in modules that are neither linear layers, embeddings nor norms (experts of a mixture,
    convolutions), rotary frequencies that follow the longest sequence, a soft cap of the logits.
    """
    changes = [
        change for name, module in model.named_modules() if (change := _change(name, module))
    ]
    if getattr(model.config.get_text_config(decoder=True), "final_logit_softcapping", None):
        raise ValueError(
            "make_batch_invariant: the model caps its logits outside of any module; set "
            "config.final_logit_softcapping = None, which leaves greedy tokens as they are"
        )
    for name, module, forward in changes:
        if forward is not None:
            module.forward = partial(forward, module)
        else:
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, FixedTileLinear(module))
    return model


# The name of a module, the module, and its new forward; None where another module takes its place.
Change = tuple[str, Any, Callable[..., Any] | None]


def _change(name: str, module: Any) -> Change | None:
    """What is to be done to one module; None for nothing.

    Raises: ValueError where nothing would help.
    """
    kind = type(module).__name__
    if isinstance(module, (FixedTileLinear, nn.Embedding)) or "forward" in vars(module):
        return None
    if type(module) is nn.Linear:
        return name, module, None
    if kind.endswith("Norm"):
        return name, module, _norm
    if kind.endswith("RotaryEmbedding"):
        kinds = getattr(module, "rope_type", "default")
        if set(kinds.values() if isinstance(kinds, dict) else [kinds]) & set(_DEPENDS_ON_ALL):
            raise ValueError(
                f"make_batch_invariant: {name}: {kinds} frequencies follow the longest sequence"
            )
        return name, module, _rotary
    weights = [own for own, p in module.named_parameters(recurse=False) if p.dim() > 1]
    if weights:
        raise ValueError(
            f"make_batch_invariant: {name} ({kind}) has weights of its own, {', '.join(weights)}, "
            "and their products depend on the batch"
        )
    return (name, module, _activation) if type(module).__module__ in _ACTIVATIONS else None


def _norm(module: Any, x: Tensor) -> Tensor:
    """Every row of the last axis by itself, 16 of them at a time."""
    run = partial(type(module).forward, module)
    return _in_pieces(run, x.reshape(-1, x.shape[-1]), TILE).reshape(x.shape)


def _activation(module: Any, x: Tensor) -> Tensor:
    return _in_pieces(partial(type(module).forward, module), x.reshape(-1), _ELEMENTS).reshape(
        x.shape
    )


def _rotary(
    module: Any, x: Tensor, position_ids: Tensor, *args: Any, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """cos and sin [B,T,D] of 16 positions at a time."""

    def run(positions: Tensor) -> Tensor:
        return torch.stack(
            type(module).forward(module, x, positions[None], *args, **kwargs), dim=2
        )[0]

    both = _in_pieces(run, position_ids.reshape(-1), TILE)
    cos, sin = both.reshape(*position_ids.shape, *both.shape[1:]).unbind(-2)
    return cos, sin


def _in_pieces(run: Callable[[Tensor], Tensor], x: Tensor, size: int) -> Tensor:
    """``run`` on ``size`` entries of the first axis at a time; zeros fill the last piece up."""
    n = len(x)
    pieces = [run(_filled(x[begin : begin + size], size)) for begin in range(0, max(n, 1), size)]
    return (pieces[0] if len(pieces) == 1 else torch.cat(pieces))[:n]


def _filled(x: Tensor, size: int) -> Tensor:
    """x as it is where it has ``size`` entries, else a copy with zeros behind."""
    if len(x) == size:
        return x
    full = x.new_zeros((size, *x.shape[1:]))
    full[: len(x)] = x
    return full
