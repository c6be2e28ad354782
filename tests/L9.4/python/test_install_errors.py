# SPDX-License-Identifier: MIT
"""What a newcomer reads when something is missing: each message names the cause and the next
command."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from elf import read_elf
from tinyllm.ffi import libtinyllm as ffi
from tinyllm.ffi.libtinyllm import AbiMismatch, Lib, library_path, load

AARCH64, RISCV, UNHEARD_OF = 183, 243, 0xABCD


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package believes to be that of a checkout in ``tmp_path``, which is given back."""
    monkeypatch.delenv("TINYLLM_LIB", raising=False)
    monkeypatch.setattr(ffi, "_PACKAGE", tmp_path / "python/tinyllm")
    monkeypatch.setattr(ffi, "_CHECKOUT", tmp_path)
    (tmp_path / "Makefile").touch()
    return tmp_path


@pytest.fixture
def installed(tmp_path: Path, places: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The package believes to be installed in the folder given back."""
    monkeypatch.setattr(ffi, "_PACKAGE", tmp_path / "site/tinyllm")
    monkeypatch.setattr(ffi, "_CHECKOUT", tmp_path / "nothing")
    return tmp_path / "site/tinyllm"


def compiled(target: Path, code: str) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    source = target.with_suffix(".c")
    source.write_text(code)
    compiler = shlex.split(os.environ.get("CC", "cc"))
    subprocess.run([*compiler, "-shared", "-fPIC", "-o", target, source], check=True)
    return target


def patched(original: Path, target: Path, at: int, new: bytes) -> Path:
    image = bytearray(original.read_bytes())
    image[at : at + len(new)] = new
    target.write_bytes(image)
    return target


# --- no library
# ---------------------------------------------------------------------------------------------


def test_the_packaged_library_comes_first_and_that_of_a_checkout_last(places: Path) -> None:
    folders = ("c/build", "python", "python/tinyllm", "python/tinyllm/_lib")
    for folder in folders:  # each later one comes before those already there
        (places / folder).mkdir(parents=True, exist_ok=True)
        (places / folder / "libtinyllm.so").touch()
        assert library_path() == places / folder / "libtinyllm.so"


def test_a_checkout_that_is_not_built_says_where_to_run_make(places: Path) -> None:
    with pytest.raises(FileNotFoundError, match=re.escape(f"Run `make` in {places}")) as caught:
        load()
    for folder in ("python/tinyllm/_lib", "python/tinyllm", "python", "c/build"):
        assert str(places / folder / "libtinyllm.so") in str(caught.value)


def test_an_installed_package_without_its_library_says_how_to_install_it(installed: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"pip install --force-reinstall \."):
        load()


def test_a_variable_that_names_nothing_says_so(
    places: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINYLLM_LIB", str(places / "gone.so"))
    with pytest.raises(
        FileNotFoundError, match=r"gone\.so \(TINYLLM_LIB\)\. Unset TINYLLM_LIB, .*`make`"
    ):
        load()


# --- a library of another ABI
# -------------------------------------------------------------------------------

OTHER_ABI = "unsigned tl_abi_version(void) { return 7; }\n"


def mismatch(path: Path | None = None) -> str:
    with pytest.raises(AbiMismatch, match=r"has ABI version 7, this package needs 1\. ") as caught:
        load(path)
    return str(caught.value)


def test_another_abi_names_the_command_that_mends_it_in_a_checkout(places: Path) -> None:
    compiled(places / "c/build/libtinyllm.so", OTHER_ABI)
    assert mismatch().endswith(f"Run `make` in {places}")


def test_another_abi_names_the_command_that_mends_it_in_an_installed_package(
    installed: Path,
) -> None:
    compiled(installed / "_lib/libtinyllm.so", OTHER_ABI)
    assert "`pip install --force-reinstall .`" in mismatch()


def test_another_abi_names_the_variable_that_leads_to_it(
    places: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = compiled(tmp_path_factory.mktemp("other") / "other.so", OTHER_ABI)
    assert mismatch(other).endswith("`make` in a checkout builds c/build/libtinyllm.so")
    monkeypatch.setenv("TINYLLM_LIB", str(other))
    assert "Unset TINYLLM_LIB" in mismatch()


def test_a_library_older_than_the_package_says_so_at_the_first_function_it_lacks(
    places: Path,
) -> None:
    compiled(places / "c/build/libtinyllm.so", OTHER_ABI.replace("7", str(ffi.ABI_VERSION)))
    lib = load()
    with pytest.raises(
        AttributeError, match=r"does not export tl_crc32c: is it older .*\? Run `make` in "
    ):
        lib.tl_crc32c(b"", 0, 0)
    lib.declare("tl_mine", None, [])
    with pytest.raises(AttributeError, match=r"does not export tl_mine$"):
        lib.tl_mine()


# --- a file that cannot be loaded
# ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("machine", "name"),
    [(AARCH64, "aarch64"), (RISCV, "RISC-V"), (UNHEARD_OF, "number 43981 of the ELF standard")],
)
def test_a_library_for_another_machine_is_named_with_both_machines(
    lib: Lib, tmp_path: Path, machine: int, name: str
) -> None:
    if machine == read_elf(lib.path).machine:
        machine, name = 62, "x86-64"
    foreign = patched(lib.path, tmp_path / "foreign.so", 18, machine.to_bytes(2, "little"))
    with pytest.raises(
        OSError, match=rf"foreign\.so cannot be loaded: .* another machine, {name}"
    ) as caught:
        load(foreign)
    assert re.search(r"this Python runs on (x86-64|aarch64|RISC-V|number \d+)", str(caught.value))
    assert "`make`" in str(caught.value)


def test_a_library_of_the_other_byte_order_is_for_another_machine(lib: Lib, tmp_path: Path) -> None:
    foreign = patched(lib.path, tmp_path / "foreign.so", 5, b"\x02")  # big-endian
    foreign = patched(foreign, foreign, 18, (22).to_bytes(2, "big"))
    with pytest.raises(OSError, match=r"another machine, IBM Z"):
        load(foreign)


@pytest.mark.skipif(
    shutil.which("aarch64-linux-gnu-gcc") is None, reason="needs aarch64-linux-gnu-gcc"
)
def test_a_library_that_was_compiled_for_arm_is_recognised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", "aarch64-linux-gnu-gcc -nostdlib")
    foreign = compiled(tmp_path / "arm.so", OTHER_ABI)
    if read_elf(foreign).machine == read_elf(Path(sys.executable)).machine:
        pytest.skip("this machine is one")
    with pytest.raises(OSError, match=r"arm\.so cannot be loaded: .* another machine, aarch64"):
        load(foreign)


def test_a_library_that_was_cut_short_is_refused_and_does_not_take_python_with_it(
    lib: Lib, run_silently: Any, tmp_path: Path
) -> None:
    image = lib.path.read_bytes()
    cut = tmp_path / "cut.so"
    program = (
        "import os, tinyllm\nfrom tinyllm.ffi.libtinyllm import load\n"
        "try:\n    load(os.environ['CUT'])\nexcept OSError as error:\n    print(error)"
    )
    for n in (1, 64, 1000, 4096, 20000, 100000):  # the system's loader dies of 1000 and more
        cut.write_bytes(image[:n])
        said = run_silently(program, CUT=str(cut))
        assert "cut.so cannot be loaded: it is " in said, said
        assert "`make`" in said
    assert f"cut short: {n} bytes are there of at least " in said


@pytest.mark.parametrize(
    ("content", "reason"), [(b"", "it is empty"), (b"#!/bin/sh\n", "it is no shared library")]
)
def test_a_file_that_is_no_library_is_called_that(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    file = tmp_path / "file.so"
    file.write_bytes(content)
    with pytest.raises(OSError, match=rf"file\.so cannot be loaded: {reason}\. .*`make`"):
        load(file)


def test_a_library_that_needs_what_is_not_there_gives_the_words_of_the_system(
    tmp_path: Path,
) -> None:
    needs = compiled(
        tmp_path / "needs.so", "int nowhere(void); int f(void) { return nowhere(); }\n"
    )
    with pytest.raises(
        OSError, match=r"needs\.so cannot be loaded: the system says: .*nowhere.*`make`"
    ):
        load(needs)


def test_a_file_that_is_not_there_gives_the_words_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(
        OSError, match=r"gone\.so cannot be loaded: the system says: .*No such file"
    ):
        Lib(tmp_path / "gone.so")


# --- no numpy, an old Python
# --------------------------------------------------------------------------------


def last_words(run_python: Any, code: str) -> list[str]:
    done = run_python(code)
    assert done.returncode == 1
    assert done.stdout == ""
    return str(done.stderr).splitlines()


@pytest.mark.parametrize("name", ["tinyllm", "tinyllm.ffi.libtinyllm", "tinyllm.cli"])
def test_without_numpy_one_sentence_says_what_to_run(run_python: Any, name: str) -> None:
    lines = last_words(run_python, f"import sys\nsys.modules['numpy'] = None\nimport {name}")
    assert (
        lines[-1]
        == f"ImportError: tinyllm needs numpy: run `{sys.executable} -m pip install numpy`"
    )
    assert sum(line.startswith("Traceback") for line in lines) == 1


def test_a_numpy_that_is_broken_is_not_called_missing(run_python: Any, tmp_path: Path) -> None:
    (tmp_path / "numpy.py").write_text("import part_of_numpy_that_is_gone\n")
    lines = last_words(
        run_python, f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport tinyllm"
    )
    assert lines[-1] == "ModuleNotFoundError: No module named 'part_of_numpy_that_is_gone'"


def test_an_old_python_is_told_which_one_is_needed(run_python: Any) -> None:
    old = "import sys\nsys.version_info, sys.version = (3, 9, 2), '3.9.2 (main)'\nimport tinyllm"
    assert last_words(run_python, old)[-1] == (
        "ImportError: tinyllm needs Python 3.10 or newer, and this is 3.9.2"
    )


def test_an_old_python_can_read_what_tells_it_so(root: Path) -> None:
    import ast

    for name in ("__init__.py", "_requirements.py"):
        ast.parse((root / "python/tinyllm" / name).read_text(), feature_version=(3, 7))


# --- words of installing
# ------------------------------------------------------------------------------------


def test_no_text_sends_anybody_to_a_package_of_this_name_or_names_an_index(root: Path) -> None:
    """There is no such package yet: whoever asked for it would get what somebody else put there."""
    texts = [
        path
        for folder in ("c", "docs", "examples", "python", "bench")
        for path in (root / folder).rglob("*")
        if path.suffix in (".c", ".h", ".md", ".py", ".toml", ".txt", ".sh")
        and not path.is_relative_to(root / "c/build")
    ]
    texts += root.glob("*.*")
    assert len(texts) > 100
    wrong = re.compile(r"pip3? install[^\n]*\blibtinyllm\b|libtinyllm\[|index-url[= ]+http")
    assert [
        f"{path}: {found[0]}"
        for path in texts
        if path.is_file() and (found := wrong.search(path.read_text(errors="ignore")))
    ] == []
