# SPDX-License-Identifier: MIT
"""The names a program can be linked against: exported ones, kept in symbols.txt in the order they
came, and those of the archive."""

from __future__ import annotations

import os
from pathlib import Path

from elf import archive_names, read_elf
from tinyllm.ffi.libtinyllm import Lib

KEPT = Path(__file__).with_name("symbols.txt")
BUILD = os.environ.get("TINYLLM_BUILD", "c/build")


def test_no_exported_function_vanishes_and_new_ones_are_kept(lib: Lib) -> None:
    kept = KEPT.read_text().split()
    exported = read_elf(lib.path).exported
    gone, new = [name for name in kept if name not in exported], sorted(exported - set(kept))
    assert gone == [], (
        f"{lib.path} no longer exports {', '.join(gone)}: programs built with an earlier one will "
        "not start. Bring them back; or raise TL_ABI_VERSION and the soname and take them out of "
        "symbols.txt"
    )
    assert new == [], f"new functions: append to {KEPT} the lines\n" + "\n".join(new)
    assert len(kept) == len(set(kept)), "a name stands there twice"


def test_every_global_name_of_the_archive_has_the_prefix(root: Path) -> None:
    names = archive_names(root / BUILD / "libtinyllm.a")
    assert {"tl_version", "tl_exp_n_scalar"} <= set(names)
    assert [name for name in names if not name.startswith("tl_")] == []
    assert len(names) == len(set(names)), "a name stands there twice"
