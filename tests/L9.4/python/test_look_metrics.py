# SPDX-License-Identifier: MIT
"""cache.metrics(): a strict reader of Prometheus' text format finds the counters in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from tinyllm import OutOfBlocks, PagedKVCache
from tinyllm.ffi.libtinyllm import Lib, u32_ptr

Labels = tuple[tuple[str, str], ...]


def parsed(text: str) -> dict[str, tuple[str, str, dict[Labels, float]]]:
    """Name to (type, help, samples by labels). Anything the format does not allow, or that a
    scraper only tolerates, fails: HELP then TYPE then samples, one group a name, each sample once,
    a newline at the end.
    """
    families: dict[str, tuple[str, str, dict[Labels, float]]] = {}
    assert text.endswith("\n") and "\r" not in text
    lines = iter(text[:-1].split("\n"))
    line = next(lines, None)
    while line is not None:
        named = re.fullmatch(r"# HELP ([a-zA-Z_:][a-zA-Z0-9_:]*) ((?:[^\\]|\\\\|\\n)+)", line)
        assert named is not None, line
        name, told = named.groups()
        typed = re.fullmatch(rf"# TYPE {name} (counter|gauge)", next(lines))
        assert typed is not None and name not in families
        samples: dict[Labels, float] = {}
        line = next(lines, None)
        while line is not None and not line.startswith("#"):
            labels, value = _sample(name, line)
            assert labels not in samples
            samples[labels] = value
            line = next(lines, None)
        assert samples
        families[name] = typed[1], told, samples
    return families


def _sample(name: str, line: str) -> tuple[Labels, float]:
    one = r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\\n]|\\\\|\\"|\\n)*)"'
    whole = re.fullmatch(rf"{name}(?:{{({one}(?:,{one})*)}})? ([-+0-9.eE]+)", line)
    assert whole is not None, line
    unescape = {r"\\": "\\", r"\"": '"', r"\n": "\n"}
    labels = tuple(
        (key, re.sub(r"\\.", lambda m: unescape[m[0]], value))
        for key, value in re.findall(one, whole[1] or "")
    )
    assert len(dict(labels)) == len(labels)
    return labels, float(line.rsplit(" ", 1)[1])


def rows(n_tokens: int) -> Any:
    return np.ones((1, n_tokens, 2), np.float32)


@pytest.fixture
def cache(lib: Lib) -> Iterator[PagedKVCache]:
    """8 blocks of 4: one shared, one copied, one cached, two evicted, one leaked, a failure."""
    with PagedKVCache(lib, 8, 4, 1, 1, 2) as c:
        c.add_seq("old")
        c.append("old", 0, rows(12), rows(12))
        for i, block in enumerate(c.block_table("old").tolist()):
            c.lib.tl_kv_register(c.pool, block, i + 1)
        c.free("old")
        c.add_seq("a")
        c.append("a", 0, rows(6), rows(6))
        c.fork("a", "b")
        c.append("b", 0, rows(1), rows(1))
        c.add_seq("long")
        c.append("long", 0, rows(12), rows(12))
        c.lib.tl_kv_alloc(c.pool, 1, u32_ptr(np.empty(1, np.uint32)))
        with pytest.raises(OutOfBlocks):
            c.append("a", 0, rows(16), rows(16))
        yield c


EXPECTED = {
    "tinyllm_kv_cache_usage_ratio": ("gauge", 7 / 8),
    "tinyllm_kv_token_usage_ratio": ("gauge", (6 + 3 + 12) / 32),
    "tinyllm_kv_blocks_total": ("gauge", 8),
    "tinyllm_kv_blocks_used": ("gauge", 7),
    "tinyllm_kv_blocks_shared": ("gauge", 1),
    "tinyllm_kv_blocks_saved": ("gauge", 1),
    "tinyllm_kv_blocks_cached": ("gauge", 1),
    "tinyllm_kv_blocks_high_water": ("gauge", 7),
    "tinyllm_kv_bytes": ("gauge", 256),
    "tinyllm_kv_tokens": ("gauge", 21),
    "tinyllm_kv_tail_waste_tokens": ("gauge", 7),
    "tinyllm_kv_sequences": ("gauge", 3),
    "tinyllm_kv_leaked_references": ("gauge", 1),
    "tinyllm_kv_dangling_references": ("gauge", 0),
    "tinyllm_kv_cow_total": ("counter", 1),
    "tinyllm_kv_evictions_total": ("counter", 2),
    "tinyllm_kv_alloc_failures_total": ("counter", 1),
    "tinyllm_kv_unrepresentable_total": ("counter", 0),
    "tinyllm_kv_blocks_pinned": ("gauge", 0),
    "tinyllm_kv_prefix_queries_total": ("counter", 0),
    "tinyllm_kv_prefix_tokens_asked_total": ("counter", 0),
    "tinyllm_kv_prefix_tokens_found_total": ("counter", 0),
}


def test_every_metric_has_its_type_and_the_value_of_its_counter(cache: PagedKVCache) -> None:
    families = parsed(cache.metrics())
    assert families.pop("tinyllm_kv_info")[::2] == ("gauge", {(("dtype", "float16"),): 1})
    found = {name: (kind, samples[()]) for name, (kind, _, samples) in families.items()}
    assert found == EXPECTED


def test_labels_are_on_every_sample_and_escaped(cache: PagedKVCache) -> None:
    labels = {"model": 'a "quoted" \\ name\nof two lines', "pool_0": "", "_x": "ü"}
    for name, (kind, told, samples) in parsed(cache.metrics(**labels)).items():
        more = {"dtype": "float16"} if name == "tinyllm_kv_info" else {}
        assert list(samples) == [tuple({**labels, **more}.items())], (kind, told)


@pytest.mark.parametrize("name", ["", "0a", "a-b", "a b", "__name__", "ä", 'a="1",b'])
def test_a_name_that_no_label_has_is_refused(cache: PagedKVCache, name: str) -> None:
    with pytest.raises(ValueError, match="no label name"):
        cache.metrics(**{name: "x"})


def test_a_label_that_is_no_string_is_refused(cache: PagedKVCache) -> None:
    with pytest.raises(TypeError, match="label model"):
        cache.metrics(model=3)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "# HELP a b\n# TYPE a gauge\na 1",
        "# TYPE a gauge\na 1\n",
        "# HELP a b\na 1\n",
        "# HELP a b\n# TYPE a gauge\n",
        "# HELP a b\n# TYPE a gauge\na 1\na 2\n",
        '# HELP a b\n# TYPE a gauge\na{x="\n"} 1\n',
        '# HELP a b\n# TYPE a gauge\na{x="1",x="1"} 1\n',
        "# HELP a b\n# TYPE a gauge\nb 1\n",
        "# HELP a b\n# TYPE a gauge\na one\n",
    ],
)
def test_the_reader_is_strict(text: str) -> None:
    with pytest.raises((AssertionError, StopIteration, ValueError)):
        parsed(text)
