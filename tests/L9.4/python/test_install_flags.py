# SPDX-License-Identifier: MIT
"""What the library is built with: flags that would change results stop the build, and calls within
the library stay there."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

BUILD = os.environ.get("TINYLLM_BUILD", "c/build")
CC = shlex.split(os.environ.get("CC", "cc"))
# What GCC and clang have that lets them compute something else than was written.
REFUSED = (
    "-Ofast", "-ffast-math", "-funsafe-math-optimizations", "-ffinite-math-only",
    "-fassociative-math", "-freciprocal-math", "-fno-signed-zeros", "-fno-honor-nans",
    "-fno-honor-infinities", "-fapprox-func", "-fsingle-precision-constant", "-ffp-model=fast",
    "-ffp-model=aggressive", "-mdaz-ftz", "-mfpmath=387", "-mpc32", "-mpc64",
    "-fdenormal-fp-math=preserve-sign", "-fdenormal-fp-math=positive-zero",
)  # fmt: skip

Make = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def make(root: Path) -> Make:
    """What make would do, with nothing of the environment that tells it how."""

    def run(**variables: str) -> subprocess.CompletedProcess[str]:
        ours = ("MAKE", "MFLAGS", "CFLAGS", "LDFLAGS", "MAX_JOBS")
        return subprocess.run(
            ["make", "-n", "-B", "WERROR=", "B=nowhere", "all",
             *(f"{name}={value}" for name, value in variables.items())],
            cwd=root, capture_output=True, text=True, check=False,
            env={name: value for name, value in os.environ.items() if not name.startswith(ours)},
        )  # fmt: skip

    return run


@pytest.mark.parametrize("variable", ["CFLAGS", "LDFLAGS", "CC"])
def test_make_names_every_flag_that_changes_results(make: Make, variable: str) -> None:
    compiler = f"{shlex.join(CC)} " if variable == "CC" else ""
    done = make(**{variable: f"{compiler}-O3 {' '.join(REFUSED)} -g"})
    assert done.returncode != 0
    assert f"*** {' '.join(REFUSED)} changes the results of the library" in done.stderr
    assert "CC, CFLAGS and LDFLAGS (-O3 is as fast here)" in done.stderr
    assert done.stdout == ""


def test_make_takes_flags_that_change_no_result(make: Make) -> None:
    harmless = "-O2 -march=native -frounding-math -ffp-contract=fast -funroll-loops"
    done = make(CFLAGS=harmless, LDFLAGS="-Wl,-O1")
    assert done.returncode == 0, done.stderr
    compiling = [line for line in done.stdout.splitlines() if " -c " in line]
    assert len(compiling) > 20
    for line in compiling:  # the last one counts
        assert re.findall(r"-ffp-contract=\w+", line)[-1] == "-ffp-contract=off"


def compiled(root: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*CC, "-std=c11", "-fsyntax-only", "-Ic/include", "-Ic/src", "-D_GNU_SOURCE",
         "-DTL_ISA=scalar", "-DTL_ISA_scalar=1", *flags, "c/src/numerics/expf.isa.c"],
        cwd=root, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("-Ofast", "-ffast-math, or -Ofast, changes results"),
        ("-O2 -ffast-math", "-ffast-math, or -Ofast, changes results"),
        ("-ffinite-math-only", "-ffinite-math-only breaks NaN and infinity"),
        ("-D__ASSOCIATIVE_MATH__", "-funsafe-math-optimizations, or a part of it, changes"),
        ("-D__RECIPROCAL_MATH__", "-funsafe-math-optimizations, or a part of it, changes"),
        ("-D__NO_SIGNED_ZEROS__", "-funsafe-math-optimizations, or a part of it, changes"),
        ("-U__GCC_IEC_559 -D__GCC_IEC_559=0", "makes floats differ from IEEE 754"),
        ("-U__FLT_EVAL_METHOD__ -D__FLT_EVAL_METHOD__=2", "computed in more than 32 bits"),
    ],
)
def test_the_arithmetic_refuses_such_flags_without_make_too(
    root: Path, flags: str, message: str
) -> None:
    done = compiled(root, *flags.split())
    assert done.returncode != 0
    assert '#error "libtinyllm: ' in done.stderr
    assert message in done.stderr


def test_the_arithmetic_compiles_without_make(root: Path) -> None:
    done = compiled(root, "-O2", "-frounding-math")
    assert done.returncode == 0, done.stderr


def test_every_source_sees_the_header_that_refuses(make: Make, root: Path) -> None:
    lines = [line for line in make().stdout.splitlines() if " -c " in line]
    sources = {str(path.relative_to(root)) for path in (root / "c/src").glob("*/*.c")}
    guarded = {
        source
        for line in lines
        if "-include c/src/numerics/float_flags.h" in line
        for source in sources
        if f" -c {source} " in line
    }
    assert guarded == sources


@pytest.fixture
def compiler(tmp_path: Path) -> Path:
    """A compiler in a folder with a blank, that does not have -fstack-clash-protection."""
    path = tmp_path / "my tools/cc"
    path.parent.mkdir()
    path.write_text(
        '#!/bin/sh\ncase "$*" in *-fstack-clash-protection*) exit 1 ;; esac\n'
        f'exec {shlex.join(CC)} "$@"\n'
    )
    path.chmod(0o755)
    return path


def test_frames_are_probed_where_the_compiler_has_that(make: Make, compiler: Path) -> None:
    flag = "-fstack-clash-protection"
    has = subprocess.run([*CC, "-Werror", flag, "-c", "-x", "c", "/dev/null", "-o", "/dev/null"])
    for cc, expected in ((shlex.join(CC), has.returncode == 0), (f"'{compiler}'", False)):
        lines = [line for line in make(CC=cc).stdout.splitlines() if " -c " in line]
        assert len(lines) > 20
        assert {flag in line for line in lines} == {expected}


def test_a_compiler_may_have_arguments_and_blanks_in_its_path(make: Make, compiler: Path) -> None:
    done = make(CC=f"'{compiler}' -DONE -DTWO")
    assert done.returncode == 0, done.stderr
    assert f"'{compiler}' -DONE -DTWO -O3 -g -std=c11" in done.stdout
    done = make(CC="'/no such/compiler' -DONE")
    assert done.returncode != 0
    assert "*** no C compiler ''/no such/compiler' -DONE': install one" in done.stderr


def test_a_build_folder_with_blanks_is_refused_for_what_it_is(make: Make) -> None:
    done = make(B="/a b/build")
    assert done.returncode != 0
    assert "*** B is one path without blanks" in done.stderr
    assert "not '/a b/build'" in done.stderr


# Loaded first, and seen by all that is loaded later, as an older copy is, or a host built with
# -rdynamic. A call that goes astray ends the process.
AMONG_OTHERS = """\
import ctypes, sys
ctypes.CDLL({foreign!r}, ctypes.RTLD_GLOBAL)
import numpy as np, tinyllm
from tinyllm.ffi.libtinyllm import load
cache = tinyllm.PagedKVCache(None, 8, 2, 1, 1, 2)
cache.add_seq("a")
k = np.array([[[1, 0], [0, 1], [1, 1]]], np.float32)
v = np.array([[[1, 2], [3, 4], [5, 6]]], np.float32)
cache.append("a", 0, k, v)
envelope = cache.export_seq("a")
cache.import_seq("b", envelope)
print(tinyllm.paged_attention_decode(np.zeros((1, 1, 2), np.float32), cache, ["b"], 0).tolist())
print(f"{{load().tl_crc32c(b'123456789', 9, 0):08x}}")
envelope[-1] ^= 1
try:
    cache.import_seq("c", envelope)
except ValueError as error:
    print(error)
"""


def test_names_of_another_library_do_not_reach_into_this_one(
    run_python: Callable[..., subprocess.CompletedProcess[str]], root: Path, tmp_path: Path
) -> None:
    names = (root / "tests/L9.4/python/symbols.txt").read_text().split()
    source, foreign = tmp_path / "foreign.c", tmp_path / "foreign.so"
    source.write_text(
        "#include <stdlib.h>\n" + "".join(f"void {name}(void) {{ abort(); }}\n" for name in names)
    )
    subprocess.run([*CC, "-shared", "-fPIC", "-o", foreign, source], check=True)
    done = run_python(AMONG_OTHERS.format(foreign=str(foreign)))
    assert (done.returncode, done.stderr) == (0, "")
    out, crc, error = done.stdout.splitlines()
    assert out == "[[[3.0, 4.0]]]"  # three keys alike: the mean of the values
    assert crc == "e3069283"
    assert re.search("checksum 0x[0-9A-F]{8} stored, 0x[0-9A-F]{8} found$", error)
