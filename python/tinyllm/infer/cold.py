# SPDX-License-Identifier: MIT
"""ColdTier: blocks that the prefix index had to give up, kept in a store until somebody asks for
their tokens again. Every method but ``ask`` is for who is inside.

An entry is a block's envelope and, beside it, the namespace and the tokens of the whole text up to
its end. They are compared when it comes back: its key is a SHA-256 of them, and decides nothing.
"""

from __future__ import annotations

import hashlib
import warnings

import numpy as np
from numpy.typing import NDArray

from tinyllm.errors import StoreError
from tinyllm.infer.blocks import Blocks
from tinyllm.infer.offload import get_block, put_block
from tinyllm.infer.prefixes import Prefixes, Text
from tinyllm.infer.stores import Store

_FN = "cold tier"


class ColdTier:
    """A store behind the index of one cache."""

    def __init__(self, fn: str, store: Store, blocks: Blocks, prefixes: Prefixes) -> None:
        """Raises TypeError for what is no store."""
        if not isinstance(store, Store):
            raise TypeError(f"{fn}: cold must be a mapping of str to bytes, not {store!r}")
        self._store, self._blocks, self._prefixes = store, blocks, prefixes

    def before_taking(self, n: int) -> None:
        """Keeps the blocks of the index that an allocation of ``n`` is about to evict. Where the
        store fails they are evicted all the same, and a warning says so."""
        for block in self._blocks.next_evicted(n):
            text = self._prefixes.text_of(block)
            if text is None:  # registered under a hash by somebody else
                continue
            try:
                packed = text.packed()
                put_block(_FN, self._blocks, block, self._store, _key(packed), packed)
            except StoreError as error:
                warnings.warn(f"{error}; what it was to keep is evicted", UserWarning, stacklevel=2)
                return

    def ask(self, text: Text, first: int, n: int) -> list[NDArray[np.uint8]]:
        """The envelopes of blocks ``first`` .. n-1 of a text, as far as the store has them in a
        row. An entry that is damaged, or another text's, ends them; a warning tells of damage."""
        found: list[NDArray[np.uint8]] = []
        b = self._blocks.block_size
        for end in range((first + 1) * b, n * b + 1, b):
            part = Text(text.namespace, text.tokens[:end]).packed()
            try:
                block = get_block(_FN, self._blocks, self._store, _key(part))
            except StoreError as error:
                warnings.warn(f"{error}; its tokens are computed", UserWarning, stacklevel=3)
                break
            if block is None or block[1] != part:
                break
            found.append(block[0])
        return found


def _key(packed: bytes) -> str:
    return f"block-{hashlib.sha256(packed).hexdigest()}"
