# SPDX-License-Identifier: MIT
"""State of a running inference: the paged KV cache."""

from tinyllm.infer.layered import LayeredKVCache
from tinyllm.infer.layers import Layer
from tinyllm.infer.paged import Batch, Needs, OutOfBlocks, PagedKVCache

__all__ = ["Batch", "Layer", "LayeredKVCache", "Needs", "OutOfBlocks", "PagedKVCache"]
