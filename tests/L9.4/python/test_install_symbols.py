# SPDX-License-Identifier: MIT
"""The functions a program can be linked against, kept in symbols.txt in the order they came."""

from __future__ import annotations

from pathlib import Path

from elf import read_elf
from tinyllm.ffi.libtinyllm import Lib

KEPT = Path(__file__).with_name("symbols.txt")


def test_no_exported_function_vanishes_and_new_ones_are_kept(lib: Lib) -> None:
    kept = KEPT.read_text().split()
    exported = read_elf(lib.path).exported
    gone, new = [name for name in kept if name not in exported], sorted(exported - set(kept))
    assert gone == [], (
        f"{lib.path} no longer exports {', '.join(gone)}: programs built with an earlier one will not start. "
        "Bring them back; or raise TL_ABI_VERSION and the soname and take them out of symbols.txt"
    )
    assert new == [], f"new functions: append to {KEPT} the lines\n" + "\n".join(new)
    assert len(kept) == len(set(kept)), "a name stands there twice"
