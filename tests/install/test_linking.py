# SPDX-License-Identifier: MIT
"""Programs of three lines, in C and C++, find the library by pkg-config, CMake and FetchContent."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
from conftest import ROOT, run

PROGRAM = """\
#include <stdio.h>
#include <tinyllm.h>
int main(void)
{
    return printf("%s %08x\\n", tl_version(), (unsigned)tl_crc32c("123456789", 9, 0)) < 0;
}
"""
LANGUAGES = {"c": ["cc", "-std=c11", "-pedantic"], "cc": ["c++", "-std=c++17", "-pedantic"]}

PROJECT = """\
cmake_minimum_required(VERSION 3.18)
project(app LANGUAGES C CXX)
{find}
foreach(lang c cc)
  add_executable(shared_${{lang}} app.${{lang}})
  target_link_libraries(shared_${{lang}} tinyllm::tinyllm)
  add_executable(static_${{lang}} app.${{lang}})
  target_link_libraries(static_${{lang}} tinyllm::tinyllm_static)
endforeach()
"""


LIBDIR = f"lib/{run('cc', '-print-multiarch', cwd=ROOT).strip()}".rstrip("/")  # as Debian names it


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A prefix with the library in it."""
    prefix = tmp_path_factory.mktemp("installed") / "usr"
    run("make", "install", f"PREFIX={prefix}", f"LIBDIR={prefix}/{LIBDIR}", cwd=ROOT)
    return prefix


@pytest.fixture(scope="module")
def moved(installed: Path) -> Path:
    """The same tree after it was copied elsewhere."""
    return Path(shutil.copytree(installed, installed.parent / "moved", symlinks=True))


def write_programs(folder: Path) -> None:
    for lang in LANGUAGES:
        (folder / f"app.{lang}").write_text(PROGRAM)


def pkg_config(prefix: Path, *words: str) -> list[str]:
    folder = prefix / LIBDIR / "pkgconfig"
    return shlex.split(
        run("pkg-config", *words, "tinyllm", cwd=prefix, PKG_CONFIG_PATH=str(folder))
    )


@pytest.mark.parametrize("lang", LANGUAGES)
def test_pkg_config_links_the_shared_library(
    installed: Path, tmp_path: Path, version: str, lang: str
) -> None:
    write_programs(tmp_path)
    flags = pkg_config(installed, "--cflags", "--libs")
    run(*LANGUAGES[lang], "-Wall", "-Werror", f"app.{lang}", *flags, "-o", "app", cwd=tmp_path)
    lib = str(installed / LIBDIR)
    assert run("./app", cwd=tmp_path, LD_LIBRARY_PATH=lib) == f"{version} e3069283\n"
    assert "libtinyllm.so.0" in run(
        "./app", cwd=tmp_path, ok=False
    )  # it is that one, and by its soname


@pytest.mark.parametrize("lang", LANGUAGES)
def test_pkg_config_links_the_static_library(
    installed: Path, tmp_path: Path, version: str, lang: str
) -> None:
    write_programs(tmp_path)
    archive = installed / LIBDIR / "libtinyllm.a"
    flags = [
        archive if f == "-ltinyllm" else f
        for f in pkg_config(installed, "--static", "--cflags", "--libs")
    ]
    assert archive in flags
    run(*LANGUAGES[lang], "-Wall", "-Werror", f"app.{lang}", *flags, "-o", "app", cwd=tmp_path)
    assert run("./app", cwd=tmp_path) == f"{version} e3069283\n"


def test_pkg_config_knows_the_version_and_follows_a_tree_that_moved(
    installed: Path, moved: Path, version: str
) -> None:
    assert pkg_config(installed, "--modversion") == [version]
    assert pkg_config(installed, "--libs") == [f"-L{installed}/{LIBDIR}", "-ltinyllm"]
    assert pkg_config(moved, f"--define-variable=prefix={moved}", "--cflags") == [
        f"-I{moved}/include"
    ]


def check_the_four_programs(folder: Path, version: str) -> None:
    run("cmake", "--build", "build", "-j2", cwd=folder, CFLAGS="-O1")
    for lang in LANGUAGES:
        for kind in ("shared", "static"):
            program = f"build/{kind}_{lang}"
            assert run(program, cwd=folder) == f"{version} e3069283\n"
            assert ("libtinyllm" in run("ldd", program, cwd=folder)) == (kind == "shared")


@pytest.mark.parametrize("tree", ["installed", "moved"])
def test_cmake_finds_both_libraries_wherever_the_tree_lies(
    tree: str, tmp_path: Path, version: str, request: pytest.FixtureRequest
) -> None:
    prefix = request.getfixturevalue(tree)
    write_programs(tmp_path)
    asked = 'find_package(tinyllm 0.1 CONFIG REQUIRED)\nmessage(STATUS "is ${tinyllm_VERSION}")'
    (tmp_path / "CMakeLists.txt").write_text(PROJECT.format(find=asked))
    said = run("cmake", "-S", ".", "-B", "build", f"-DCMAKE_PREFIX_PATH={prefix}", cwd=tmp_path)
    assert f"-- is {version}\n" in said
    check_the_four_programs(tmp_path, version)
    assert str(prefix) in run("ldd", "build/shared_c", cwd=tmp_path)


def test_cmake_takes_a_version_that_will_do(installed: Path, tmp_path: Path, version: str) -> None:
    answers = {
        "": True, "0": True, "0.1": True, f"{version} EXACT": True,
        "0.0.1 EXACT": False, "0.999": False, "1": False, "1.0": False,
    }  # fmt: skip
    questions = "".join(
        f"find_package(tinyllm {asked} CONFIG QUIET)\n"
        f'message(STATUS "[{asked}] ${{tinyllm_FOUND}}")\n'
        "unset(tinyllm_DIR CACHE)\n"
        for asked in answers
    )
    (tmp_path / "CMakeLists.txt").write_text(
        f"cmake_minimum_required(VERSION 3.18)\nproject(app C)\n{questions}"
    )
    said = run("cmake", "-S", ".", "-B", "build", f"-DCMAKE_PREFIX_PATH={installed}", cwd=tmp_path)
    assert {
        asked: found == "1" for asked, found in re.findall(r"-- \[(.*)\] (\d)", said)
    } == answers


def project_of(app: Path, source: Path, extra: str = "") -> None:
    """A project in ``app`` that takes the library in by FetchContent."""
    app.mkdir()
    write_programs(app)
    fetch = (
        f'include(FetchContent)\nFetchContent_Declare(tinyllm SOURCE_DIR "{source}")\n'
        f"FetchContent_MakeAvailable(tinyllm)\n{extra}"
    )
    (app / "CMakeLists.txt").write_text(PROJECT.format(find=fetch))


@pytest.mark.parametrize("name", ["app", "an app"])
def test_fetch_content_builds_both_libraries_and_leaves_the_source_as_it_was(
    name: str, checkout: Path, pristine: Path, tmp_path: Path, version: str
) -> None:
    source = pristine if " " in name else checkout
    before, app = set(source.rglob("*")), tmp_path / name
    project_of(app, source)
    run("cmake", "-S", ".", "-B", "build", cwd=app)
    check_the_four_programs(app, version)
    assert set(source.rglob("*")) == before


@pytest.mark.parametrize("arguments", ["", " -DFIRST -DSECOND"])
def test_fetch_content_takes_a_compiler_with_arguments_and_one_in_a_folder_with_blanks(
    arguments: str, pristine: Path, tmp_path: Path, quick_compiler: Path
) -> None:
    compiler = tmp_path / ("tools/cc" if arguments else "my tools/cc")
    compiler.parent.mkdir()
    compiler.symlink_to(quick_compiler)
    app = tmp_path / "app"
    project_of(app, pristine)
    chosen = {"CC": f"{compiler}{arguments}"} if arguments else {}
    words = [] if arguments else [f"-DCMAKE_C_COMPILER={compiler}"]
    run("cmake", "-S", ".", "-B", "build", *words, cwd=app, **chosen)
    run("cmake", "--build", "build", "--target", "tinyllm_make", "-j2", cwd=app)
    flags = (app / "build/_deps/tinyllm-build/tree/build/flags").read_text()
    assert flags.startswith(f"'{compiler}'{arguments} ")
