# SPDX-License-Identifier: MIT
"""libtinyllm: the attention step of LLM inference on CPUs over a paged KV cache, with the same bits always.

The library is loaded when something first needs it, not by the import.
"""

import tinyllm._requirements  # noqa: F401  first, for it says what is missing before anything else stumbles
from tinyllm._version import __version__
from tinyllm.attention import (
    flash_attention,
    merge_states,
    paged_attention,
    paged_attention_decode,
    paged_attention_states,
)
from tinyllm.errors import AbiMismatch, ClosedError, OutOfBlocks, TlError
from tinyllm.infer.paged import PagedKVCache
from tinyllm.kv_view import KVView
from tinyllm.modern.window import windowed_attention
from tinyllm.observe.diff import diff
from tinyllm.observe.mass import attention_mass
from tinyllm.observe.recording import Recording, record
from tinyllm.observe.snapshot import Snapshot
from tinyllm.observe.timeline import timeline
from tinyllm.threads import ThreadPool

__all__ = [
    "AbiMismatch",
    "ClosedError",
    "KVView",
    "OutOfBlocks",
    "PagedKVCache",
    "Recording",
    "Snapshot",
    "ThreadPool",
    "TlError",
    "__version__",
    "attention_mass",
    "diff",
    "flash_attention",
    "merge_states",
    "paged_attention",
    "paged_attention_decode",
    "paged_attention_states",
    "record",
    "timeline",
    "windowed_attention",
]
