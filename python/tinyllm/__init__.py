# SPDX-License-Identifier: MIT
"""libtinyllm: the attention step of LLM inference on CPUs over a paged KV cache, with the same bits
always.

The library is loaded when something first needs it, not by the import; so are the parts that look
at caches and calls, which an engine does without.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

import tinyllm._requirements  # noqa: F401  first, for it says what is missing before anything else stumbles
from tinyllm._version import __version__
from tinyllm.attention import (
    flash_attention,
    merge_states,
    paged_attention,
    paged_attention_decode,
    paged_attention_states,
)
from tinyllm.errors import (
    AbiMismatch,
    ClosedError,
    ConcurrentUseError,
    OutOfBlocks,
    OutOfMemory,
    StoreError,
    TlError,
)
from tinyllm.infer.layered import LayeredKVCache
from tinyllm.infer.layers import Layer
from tinyllm.infer.paged import PagedKVCache
from tinyllm.kv_view import KVView
from tinyllm.modern.window import windowed_attention
from tinyllm.threads import ThreadPool

if TYPE_CHECKING:
    from tinyllm.infer.stores import FileStore, MemoryStore, open_store
    from tinyllm.observe.calls.diff import diff
    from tinyllm.observe.calls.recording import Recording, record
    from tinyllm.observe.calls.timeline import timeline
    from tinyllm.observe.pool.mass import attention_mass
    from tinyllm.observe.pool.snapshot import Snapshot

__all__ = [
    "AbiMismatch",
    "ClosedError",
    "ConcurrentUseError",
    "FileStore",
    "KVView",
    "Layer",
    "LayeredKVCache",
    "MemoryStore",
    "OutOfBlocks",
    "OutOfMemory",
    "PagedKVCache",
    "Recording",
    "Snapshot",
    "StoreError",
    "ThreadPool",
    "TlError",
    "__version__",
    "attention_mass",
    "diff",
    "flash_attention",
    "merge_states",
    "open_store",
    "paged_attention",
    "paged_attention_decode",
    "paged_attention_states",
    "record",
    "timeline",
    "windowed_attention",
]

_LATER = {
    "FileStore": "tinyllm.infer.stores",
    "MemoryStore": "tinyllm.infer.stores",
    "Recording": "tinyllm.observe.calls.recording",
    "Snapshot": "tinyllm.observe.pool.snapshot",
    "attention_mass": "tinyllm.observe.pool.mass",
    "diff": "tinyllm.observe.calls.diff",
    "open_store": "tinyllm.infer.stores",
    "record": "tinyllm.observe.calls.recording",
    "timeline": "tinyllm.observe.calls.timeline",
}


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'tinyllm' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LATER[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
