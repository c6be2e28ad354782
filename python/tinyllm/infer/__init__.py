# SPDX-License-Identifier: MIT
"""State of a running inference: the paged KV cache."""

from tinyllm.infer.paged import OutOfBlocks, PagedKVCache

__all__ = ["OutOfBlocks", "PagedKVCache"]
