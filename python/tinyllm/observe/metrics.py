# SPDX-License-Identifier: MIT
"""The counters of a snapshot in the text format that Prometheus scrapes (version 0.0.4)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from tinyllm.observe.snapshot import Snapshot

__all__ = ["prometheus"]

# Name, type, key of Snapshot.counters, help.
_COUNTERS: Final = (
    ("kv_blocks_total", "gauge", "blocks_total", "Blocks of the pool."),
    ("kv_blocks_used", "gauge", "blocks_used", "Blocks with at least one reference."),
    ("kv_blocks_shared", "gauge", "blocks_shared", "Blocks with more than one reference."),
    (
        "kv_blocks_saved",
        "gauge",
        "blocks_saved",
        "Blocks that would be used besides if nothing were shared.",
    ),
    (
        "kv_blocks_cached",
        "gauge",
        "blocks_cached",
        "Blocks kept for the prefix index, which may be evicted.",
    ),
    (
        "kv_blocks_high_water",
        "gauge",
        "blocks_high_water",
        "The most blocks that were used at once.",
    ),
    ("kv_tokens", "gauge", "tokens", "Positions stored in used blocks; a shared one counts once."),
    ("kv_tail_waste_tokens", "gauge", "tail_waste", "Slots of used blocks that hold no token."),
    ("kv_sequences", "gauge", "sequences", "Live sequences."),
    (
        "kv_leaked_references",
        "gauge",
        "leaked",
        "References on blocks that no sequence of the cache holds.",
    ),
    (
        "kv_dangling_references",
        "gauge",
        "dangling",
        "Blocks in tables of sequences without a reference.",
    ),
    (
        "kv_cow_total",
        "counter",
        "copies_on_write",
        "Blocks copied because somebody else held them.",
    ),
    ("kv_evictions_total", "counter", "evictions", "Cached blocks taken by allocations."),
    (
        "kv_alloc_failures_total",
        "counter",
        "failed_allocations",
        "Calls that found too few blocks.",
    ),
)


def prometheus(snapshot: Snapshot, labels: Mapping[str, str] | None = None) -> str:
    """Metrics named ``tinyllm_kv_...``, each with its HELP and TYPE line and the same ``labels``.

    Raises: ValueError for a label name that is none; TypeError for a value that is no string.
    """
    c = snapshot.counters
    told = _label_text(labels or {})
    ratios = (
        (
            "kv_cache_usage_ratio",
            "Used blocks by all blocks.",
            c["blocks_used"] / c["blocks_total"],
        ),
        (
            "kv_token_usage_ratio",
            "Stored positions by slots of the pool.",
            c["tokens"] / c["slots"],
        ),
    )
    lines = [_metric(name, "gauge", text, told, repr(value)) for name, text, value in ratios]
    lines += [_metric(name, kind, text, told, str(c[key])) for name, kind, key, text in _COUNTERS]
    return "".join(lines)


def _metric(name: str, kind: str, text: str, labels: str, value: str) -> str:
    name = f"tinyllm_{name}"
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n{name}{labels} {value}\n"


def _label_text(labels: Mapping[str, str]) -> str:
    for name, value in labels.items():
        if not re.fullmatch("[a-zA-Z_][a-zA-Z0-9_]*", name) or name.startswith("__"):
            raise ValueError(
                f"metrics: {name!r} is no label name: letters, digits and single underscores"
            )
        if not isinstance(value, str):
            raise TypeError(f"metrics: label {name} must be a string, not {value!r}")
    told = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    return f"{{{told}}}" if told else ""


def _escaped(value: str) -> str:
    return value.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
