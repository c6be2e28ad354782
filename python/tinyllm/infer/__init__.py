# SPDX-License-Identifier: MIT
"""State of a running inference: the paged KV cache."""

from tinyllm.infer.layered import LayeredKVCache
from tinyllm.infer.layers import Layer
from tinyllm.infer.paged import OutOfBlocks, PagedKVCache

__all__ = ["Layer", "LayeredKVCache", "OutOfBlocks", "PagedKVCache"]
