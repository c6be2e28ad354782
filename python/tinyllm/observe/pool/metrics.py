# SPDX-License-Identifier: MIT
"""The counters of a snapshot in the text format that Prometheus scrapes (version 0.0.4)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Final

from tinyllm.observe.pool.snapshot import Snapshot

__all__ = ["prometheus"]

# Name, key of Snapshot.counters, help.
_GAUGES: Final = (
    ("kv_blocks_total", "blocks_total", "Blocks of the pool."),
    ("kv_blocks_used", "blocks_used", "Blocks with at least one reference."),
    ("kv_blocks_shared", "blocks_shared", "Blocks with more than one reference."),
    ("kv_blocks_saved", "blocks_saved", "More blocks that would be used if nothing were shared."),
    ("kv_blocks_cached", "blocks_cached", "Blocks kept for the prefix index, to be evicted."),
    ("kv_blocks_pinned", "blocks_pinned", "Blocks that the prefix index itself keeps in use."),
    ("kv_blocks_high_water", "blocks_high_water", "The most blocks that were used at once."),
    ("kv_bytes", "bytes", "Bytes of K and V of all blocks, scales included."),
    ("kv_tokens", "tokens", "Positions stored in used blocks; a shared one counts once."),
    ("kv_tail_waste_tokens", "tail_waste", "Slots of used blocks that hold no token."),
    ("kv_sequences", "sequences", "Live sequences."),
    ("kv_leaked_references", "leaked", "References on blocks that no sequence of the cache holds."),
    ("kv_dangling_references", "dangling", "Blocks in tables of sequences without a reference."),
)
_COUNTERS: Final = (
    ("kv_cow_total", "copies_on_write", "Blocks copied because another sequence held them."),
    ("kv_evictions_total", "evictions", "Cached blocks taken by allocations."),
    ("kv_alloc_failures_total", "failed_allocations", "Calls that found too few blocks."),
    ("kv_unrepresentable_total", "unrepresentable", "Values that the dtype had nothing for."),
    ("kv_prefix_queries_total", "prefix_queries", "Sequences begun with tokens."),
    ("kv_prefix_tokens_asked_total", "prefix_tokens_asked", "Tokens of those sequences."),
    ("kv_prefix_tokens_found_total", "prefix_tokens_found", "Of them, tokens that were there."),
)


def prometheus(snapshot: Snapshot, labels: Mapping[str, str] | None = None) -> str:
    """Metrics named ``tinyllm_kv_...``, each with its HELP and TYPE line and the same ``labels``;
    the last one, ``tinyllm_kv_info``, has the label ``dtype`` besides.

    Raises: ValueError for a label name that is none; TypeError for a value that is no string.
    """
    c = snapshot.counters
    told = _label_text(labels or {})
    used, stored = c["blocks_used"] / c["blocks_total"], c["tokens"] / c["slots"]
    lines = [
        _metric("kv_cache_usage_ratio", "gauge", "Used blocks by all blocks.", told, used),
        _metric("kv_token_usage_ratio", "gauge", "Stored positions by slots.", told, stored),
    ]
    for kind, metrics in (("gauge", _GAUGES), ("counter", _COUNTERS)):
        lines += [_metric(name, kind, text, told, c[key]) for name, key, text in metrics]
    dtype = _label_text({**(labels or {}), "dtype": snapshot.dtype})
    lines.append(_metric("kv_info", "gauge", "What K and V are stored as.", dtype, 1))
    return "".join(lines)


def _metric(name: str, kind: str, text: str, labels: str, value: float) -> str:
    name = f"tinyllm_{name}"
    return f"# HELP {name} {text}\n# TYPE {name} {kind}\n{name}{labels} {value!r}\n"


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


def together(texts: Iterable[str]) -> str:
    """Several texts of ``prometheus``, whose labels differ, as one: each metric with its lines of
    all of them."""
    each = [text.splitlines(keepends=True) for text in texts]
    first = each[0]
    return "".join(
        "".join([*first[i : i + 2], *(lines[i + 2] for lines in each)])
        for i in range(0, len(first), 3)  # HELP, TYPE, and the value
    )
