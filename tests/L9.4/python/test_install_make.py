# SPDX-License-Identifier: MIT
"""``make install``: what it writes and where, and that programs build and run against it."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tinyllm
from elf import read_elf

BUILD = os.environ.get("TINYLLM_BUILD", "c/build")
VERSIONED, SONAME = f"libtinyllm.so.{tinyllm.__version__}", "libtinyllm.so.0"
FILES_OF_LIB = {
    VERSIONED, SONAME, "libtinyllm.so", "libtinyllm.a", "pkgconfig/tinyllm.pc",
    "cmake/tinyllm/tinyllmConfig.cmake", "cmake/tinyllm/tinyllmConfigVersion.cmake",
}  # fmt: skip

PROGRAM = """\
#include <stdio.h>
#include <tinyllm.h>
int main(void)
{
    return printf("%s %08x\\n", tl_version(), (unsigned)tl_crc32c("123456789", 9, 0)) < 0;
}
"""

Make = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def make(root: Path) -> Make:
    """Runs make on the library as it is built: no test rebuilds what others are using."""

    def run(target: str, **variables: object) -> subprocess.CompletedProcess[str]:
        built = [
            word for name in ("libtinyllm.so", "libtinyllm.a") for word in ("-o", f"{BUILD}/{name}")
        ]
        assignments = [f"{name}={value}" for name, value in {"B": BUILD, **variables}.items()]
        return subprocess.run(
            ["make", "--no-print-directory", *built, target, *assignments],
            cwd=root, capture_output=True, text=True, check=False,
        )  # fmt: skip

    return run


def done(run: subprocess.CompletedProcess[str]) -> str:
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.is_dir()}


def headers(root: Path) -> set[str]:
    found = files_below(root / "c/include")
    assert len(found) > 5
    return found


def test_it_writes_this_tree_below_destdir_and_nothing_else(
    root: Path, make: Make, tmp_path: Path
) -> None:
    prefix, destdir = tmp_path / "prefix", tmp_path / "a folder with blanks"
    done(make("install", PREFIX=prefix, DESTDIR=destdir))
    assert files_below(tmp_path) == {
        str((destdir / prefix.relative_to("/") / name).relative_to(tmp_path))
        for name in {f"lib/{name}" for name in FILES_OF_LIB}
        | {f"include/{name}" for name in headers(root)}
    }
    texts = [*destdir.rglob("*.pc"), *destdir.rglob("*.cmake")]
    assert len(texts) == 3
    for text in texts:
        assert destdir.name not in text.read_text()
        assert not re.search(r"@[A-Z]+@", text.read_text()), (
            f"{text.name} has a gap that was not filled"
        )


def test_libdir_and_includedir_may_lie_anywhere(root: Path, make: Make, tmp_path: Path) -> None:
    lib, include = tmp_path / "usr/lib/x86_64-linux-gnu", tmp_path / "opt/headers"
    done(make("install", PREFIX=tmp_path / "usr", LIBDIR=lib, INCLUDEDIR=include))
    assert files_below(lib) == FILES_OF_LIB
    assert files_below(include) == headers(root)
    pc = (lib / "pkgconfig/tinyllm.pc").read_text()
    assert "libdir=${prefix}/lib/x86_64-linux-gnu\n" in pc
    assert f"includedir={include}\n" in pc


def test_the_shared_library_goes_by_its_soname_and_needs_only_the_system(
    make: Make, tmp_path: Path
) -> None:
    done(make("install", PREFIX=tmp_path))
    lib = tmp_path / "lib"
    assert os.readlink(lib / "libtinyllm.so") == SONAME
    assert os.readlink(lib / SONAME) == VERSIONED
    elf = read_elf(lib / VERSIONED)
    assert elf.soname == SONAME
    assert [
        name
        for name in elf.needed
        if not re.match(r"(libc|libm|libpthread|ld-linux[\w-]*)\.", name)
    ] == []


def test_everyone_may_read_it_whatever_the_umask(make: Make, tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        done(make("install", PREFIX=tmp_path / "p"))
    finally:
        os.umask(before)
    for path in (tmp_path / "p").rglob("*"):
        if path.is_file():
            assert path.stat().st_mode & 0o777 == (0o755 if ".so" in path.name else 0o644), path


def test_installing_twice_is_installing_once_and_uninstall_leaves_what_is_not_its_own(
    make: Make, tmp_path: Path
) -> None:
    done(make("install", PREFIX=tmp_path))
    first = files_below(tmp_path)
    done(make("install", PREFIX=tmp_path))
    assert files_below(tmp_path) == first
    for name in ("include/tinyllm/mine.h", "lib/other.so"):
        (tmp_path / name).touch()
    done(make("uninstall", PREFIX=tmp_path))
    assert files_below(tmp_path) == {"include/tinyllm/mine.h", "lib/other.so"}
    assert not (tmp_path / "lib/cmake/tinyllm").exists()
    done(make("uninstall", PREFIX=tmp_path))  # and once more: nothing is there, nothing is wrong


@pytest.mark.parametrize("name", ["PREFIX", "LIBDIR", "INCLUDEDIR"])
@pytest.mark.parametrize("value", ["relative/path", "/a b"])
def test_a_directory_that_is_not_absolute_or_has_blanks_is_refused(
    make: Make, tmp_path: Path, name: str, value: str
) -> None:
    for target in ("install", "uninstall"):
        run = make(target, **{"DESTDIR": tmp_path / "d", name: value})
        assert run.returncode != 0
        assert "absolute paths without blanks" in run.stderr
        assert f"'{value}'" in run.stderr
    assert files_below(tmp_path) == set()


@pytest.fixture
def flags(make: Make, tmp_path: Path) -> Callable[[str], list[str]]:
    """Installs, and reads a field of tinyllm.pc as pkg-config would."""
    done(make("install", PREFIX=tmp_path / "usr"))
    pc = (tmp_path / "usr/lib/pkgconfig/tinyllm.pc").read_text()
    variables = dict(re.findall(r"^(\w+)=(.*)$", pc, flags=re.M))

    def expand(text: str) -> str:
        return (
            expand(re.sub(r"\$\{(\w+)\}", lambda m: variables[m[1]], text))
            if "${" in text
            else text
        )

    return lambda field: shlex.split(
        expand(re.findall(rf"^{re.escape(field)}: (.*)$", pc, flags=re.M)[0])
    )


def built(tmp_path: Path, flags: list[str]) -> Path:
    source, program = tmp_path / "program.c", tmp_path / "program"
    source.write_text(PROGRAM)
    subprocess.run(
        [
            *shlex.split(os.environ.get("CC", "cc")),
            "-Wall",
            "-Werror",
            source,
            "-o",
            program,
            *flags,
        ],
        check=True,
    )
    return program


def said(program: Path, **env: Any) -> str:
    clean = {name: value for name, value in os.environ.items() if name != "LD_LIBRARY_PATH"}
    return subprocess.run(
        [program], env={**clean, **env}, check=True, capture_output=True, text=True
    ).stdout


EXPECTED = f"{tinyllm.__version__} e3069283\n"


def test_a_program_links_the_shared_library_with_the_flags_of_the_pc_file(
    flags: Callable[[str], list[str]], tmp_path: Path
) -> None:
    assert flags("Version") == [tinyllm.__version__]
    lib = str(tmp_path / "usr/lib")
    program = built(tmp_path, [*flags("Cflags"), *flags("Libs")])
    assert SONAME in read_elf(program).needed
    assert said(program, LD_LIBRARY_PATH=lib) == EXPECTED
    with pytest.raises(subprocess.CalledProcessError):  # so it was that one
        said(program)
    assert (
        said(built(tmp_path, [*flags("Cflags"), *flags("Libs"), f"-Wl,-rpath,{lib}"])) == EXPECTED
    )


def test_a_program_links_the_static_library_with_the_private_flags(
    flags: Callable[[str], list[str]], tmp_path: Path
) -> None:
    archive = tmp_path / "usr/lib/libtinyllm.a"
    program = built(tmp_path, [*flags("Cflags"), str(archive), *flags("Libs.private")])
    assert SONAME not in read_elf(program).needed
    assert said(program) == EXPECTED


def test_the_static_library_may_become_part_of_a_shared_one(
    flags: Callable[[str], list[str]], tmp_path: Path
) -> None:
    archive, plugin = tmp_path / "usr/lib/libtinyllm.a", tmp_path / "plugin.so"
    whole = ["-Wl,--whole-archive", str(archive), "-Wl,--no-whole-archive", *flags("Libs.private")]
    compiler = shlex.split(os.environ.get("CC", "cc"))
    subprocess.run([*compiler, "-shared", "-Wl,-z,text", "-o", plugin, *whole], check=True)
    assert "tl_version" in read_elf(plugin).exported


def test_a_program_linked_against_the_build_folder_runs(
    root: Path, lib: Any, tmp_path: Path
) -> None:
    folder = lib.path.parent
    if folder != (root / BUILD).resolve():
        pytest.skip("the library under test is not that of the build folder")
    program = built(tmp_path, [f"-I{root}/c/include", f"-L{folder}", "-ltinyllm"])
    assert said(program, LD_LIBRARY_PATH=folder) == EXPECTED


def test_a_lonely_makefile_says_which_compiler_is_missing(root: Path, tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "make", "sed", "expand", "nproc"):
        (tools / name).symlink_to(str(shutil.which(name)))
    environment = {"PATH": str(tools)}  # and no CC, no MAKEFLAGS
    run = subprocess.run(
        ["make"], cwd=root, env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode != 0
    assert "no C compiler 'cc'" in run.stderr
    assert "apt-get install gcc libc6-dev" in run.stderr
    done(
        subprocess.run(
            ["make", "help"], cwd=root, env=environment, capture_output=True, text=True, check=False
        )
    )
