# SPDX-License-Identifier: MIT
"""Models of Hugging Face transformers 5.x on the library: ``pip install '.[hf]'`` in a checkout.

Install torch first, with pip's ``--index-url`` and the CPU index that PyTorch's own install page
names: the build that pip takes by itself brings 5 GB for GPUs.

``register`` makes ``attn_implementation="tinyllm"`` known. With it ``PagedCache`` serves
``generate()`` and ``forward_packed`` an engine of one's own; ``make_batch_invariant`` carries the
same bits through the rest of the model. docs/transformers.md tells more.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

_INSTALL = (
    "pip install '.[hf]' in a checkout, after torch from the CPU index that PyTorch's own install "
    "page names (transformers 5.0.0 and 5.24.0 with torch 2.13.0 are tested)"
)


def _demand(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        raise ImportError(f"tinyllm.hf needs {package}: {_INSTALL}", name=package) from None


_demand("torch")
if (_found := _demand("transformers")).split(".")[0] != "5":
    raise ImportError(
        f"tinyllm.hf needs transformers 5.x, not {_found}: {_INSTALL}", name="transformers"
    )

from tinyllm.hf.attention import register  # noqa: E402
from tinyllm.hf.cache import CACHE_KEYWORD, PagedCache  # noqa: E402
from tinyllm.hf.invariant import FixedTileLinear, make_batch_invariant  # noqa: E402
from tinyllm.hf.packed import Packed, forward_packed, new_kv  # noqa: E402

__all__ = [
    "CACHE_KEYWORD",
    "FixedTileLinear",
    "Packed",
    "PagedCache",
    "forward_packed",
    "make_batch_invariant",
    "new_kv",
    "register",
]
