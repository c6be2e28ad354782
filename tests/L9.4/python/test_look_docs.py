# SPDX-License-Identifier: MIT
"""The pictures of docs/look.md are those that its code makes."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest
from tinyllm import PagedKVCache
from tinyllm.ffi.libtinyllm import Lib
from tinyllm.observe.palette import PALETTE

PICTURES = ("look.svg", "look-mass.svg")


@pytest.mark.usefixtures("lib")
def test_the_pictures_of_the_page_are_what_its_code_draws(root: Path, tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location(
        "look_pictures", root / "docs" / "look_pictures.py"
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.remake(tmp_path)
    page = (root / "docs" / "look.md").read_text()
    for name in PICTURES:
        drawn = (tmp_path / name).read_text(encoding="utf-8")
        kept = (root / "docs" / name).read_text(encoding="utf-8")
        assert drawn == kept, f"docs/{name} is another picture: docs/look_pictures.py remakes it"
        assert len(kept) < 60_000
        assert f"]({name})" in page


@pytest.mark.parametrize("name", [*PICTURES, "timeline.svg", "tables.svg"])
def test_pictures_of_sequences_share_one_size_of_type_and_one_palette(
    root: Path, name: str
) -> None:
    drawn = (root / "docs" / name).read_text(encoding="utf-8")
    assert re.findall(r'font-size="(.+?)"', drawn) == ["12"]
    first, second = (colour.fill for colour in PALETTE[:2])
    assert first in drawn and second in drawn


def test_every_metric_is_on_the_page_and_no_other(root: Path, lib: Lib) -> None:

    page = (root / "docs" / "look.md").read_text()
    listed = re.findall(r"`(kv_[a-z_]+)`", page)
    with PagedKVCache(lib, 1, 1, 1, 1, 1) as cache:
        told = re.findall(r"^tinyllm_(kv_\w+)", cache.metrics(), re.M)
    assert sorted(listed) == sorted(told)
