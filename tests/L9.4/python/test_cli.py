# SPDX-License-Identifier: MIT
"""The command ``tinyllm``: its answers, its refusals, how it ends. Each command is run once or so
as a user runs it; what does not depend on that is asked of ``main`` in this process."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tinyllm
from hypothesis import given, settings
from hypothesis import strategies as st
from tinyllm import cli, reference
from tinyllm.cli import bench, common, demo, golden, machine, selftest
from tinyllm.ffi.libtinyllm import Lib, load

Done = subprocess.CompletedProcess[str]
Run = Callable[..., Done]
NAMES = [command.NAME for command in cli.COMMANDS]
OWN = ("info", "selftest", "bench", "demo")


@pytest.fixture(scope="module")
def environment(lib: Lib, root: Path) -> dict[str, str]:
    """The environment of a user with this package and this library."""
    plain = {
        k: v
        for k, v in os.environ.items()
        if k not in ("TINYLLM_ISA", "NO_COLOR", "PYTHONIOENCODING")
    }
    return plain | {
        "PYTHONPATH": str(root / "python"),
        "TINYLLM_LIB": str(lib.path),
        "TERM": "xterm",
    }


@pytest.fixture(scope="module")
def run(environment: dict[str, str]) -> Run:
    """Runs ``python -m tinyllm`` with arguments and perhaps other variables."""

    def tinyllm(*argv: str, **env: str) -> Done:
        return subprocess.run(
            [sys.executable, "-m", "tinyllm", *argv],
            env=environment | env, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    return tinyllm


@pytest.fixture
def here(
    environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """The same in this process, for what no process of its own is needed for."""

    def tinyllm(*argv: str, **env: str) -> Done:
        with monkeypatch.context() as patch:
            for name, value in (environment | env).items():
                patch.setenv(name, value)
            try:
                status = cli.main(argv)
            except SystemExit as end:  # argparse, after help or the version
                status = int(end.code or 0)
        said = capsys.readouterr()
        return subprocess.CompletedProcess(argv, status, said.out, said.err)

    return tinyllm


@pytest.fixture
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """A last level cache that few layers leave, so that bench has little to fill."""
    monkeypatch.setattr(machine, "last_level_cache", lambda: 1 << 14)


def good(done: Done) -> str:
    """What a command printed that had nothing to complain about."""
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return done.stdout


# --- help and arguments ---------------------------------------------------------------------------


def test_version_is_that_of_the_package(run: Run) -> None:
    assert good(run("--version")) == f"tinyllm {tinyllm.__version__}\n"


def test_help_names_every_command_and_every_exit_status(here: Run) -> None:
    text = good(here("--help"))
    for name in NAMES:
        assert re.search(rf"^    {name} ", text, re.MULTILINE), name
    for status in ("0", "1", "2", "130, 141"):
        assert re.search(rf"^  {status}  ", text, re.MULTILINE), status
    assert all(len(line) <= 80 for line in text.splitlines())


@pytest.mark.parametrize("name", OWN)
def test_help_of_a_command_has_examples_that_its_parser_takes(name: str, here: Run) -> None:
    text = good(here(name, "--help"))
    examples = re.findall(rf"^  (?:\w+=\w+ )?tinyllm ({name}.*?)(?:   .*)?$", text, re.MULTILINE)
    assert examples and all(len(line) <= 80 for line in text.splitlines())
    for example in examples:
        cli._parser().parse_args(example.split())


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ([], "tinyllm: the following arguments are required: COMMAND"),
        (["dance"], "tinyllm: no command 'dance'; there are info, selftest"),
        (["info", "--jso"], "tinyllm info: unknown arguments: --jso (tinyllm info --help)"),
        (["info", "--heads", "4"], "tinyllm info: --heads, --dim and --layers"),
        (["selftest", "now"], "tinyllm selftest: unknown arguments: now"),
        (["bench", "--heads", "32/7"], "tinyllm bench: --heads 32/7: 32 is no multiple of 7"),
        (
            ["bench", "--heads", "32/8/2"],
            "tinyllm bench: --heads 32/8/2: not query heads / KV heads",
        ),
        (["bench", "--heads", "0"], "tinyllm bench: --heads 0: not within 1 .. "),
        (["bench", "--heads", ""], "tinyllm bench: --heads : not a whole number"),
        (["bench", "--heads"], "tinyllm bench: --heads expected one argument"),
        (["bench", "--dim", "12.5"], "tinyllm bench: --dim 12.5: not a whole number"),
        (["bench", "--ctx", "100,,200"], "tinyllm bench: --ctx : not a whole number"),
        (
            ["bench", "--ctx", "2147483648"],
            "tinyllm bench: --ctx 2147483648: not within 1 .. 2147483647",
        ),
        (["bench", "--ctx", "9" * 5000], "not a whole number"),
        (["bench", "--batch", "-1"], "tinyllm bench: --batch -1: not a whole number"),
        (["bench", "--threads", "5000"], "tinyllm bench: --threads 5000: not within 0 .. 4096"),
        (["bench", "--block", "0"], "tinyllm bench: --block 0: not within"),
        (["bench", "--window", "x"], "tinyllm bench: --window x: not a whole number"),
        (["bench", "--dtype", "fp8"], "tinyllm bench: --dtype fp8: not one of float16, bfloat16, "),
        (["bench", "--dtype", "int8,"], "tinyllm bench: --dtype : not one of float16, "),
        (["bench", "--seconds", "nan"], "tinyllm bench: --seconds nan: not a number of seconds"),
        (["bench", "--seconds", "0"], "tinyllm bench: --seconds 0: not a number of seconds"),
        (
            ["bench", "--ctx", "2000000000", "--batch", "1000000"],
            "--ctx 2000000000 --batch 1000000 takes ",
        ),
        (["demo", "--kv", "fp8"], "tinyllm demo: --kv fp8: not one of float16, bfloat16, "),
        (["demo", "--json"], "tinyllm demo: unknown arguments: --json"),
    ],
)
@pytest.mark.usefixtures("lib")
def test_bad_arguments_are_refused_in_one_line(
    argv: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    said = capsys.readouterr()
    assert line in said.err and said.err.count("\n") == 1 and said.out == ""


def test_a_refusal_reaches_the_shell(run: Run) -> None:
    done = run("bench", "--heads", "32/7")
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr
        == "tinyllm bench: --heads 32/7: 32 is no multiple of 7 (tinyllm bench --help)\n"
    )


WORDS = st.sampled_from(
    [
        *NAMES,
        "--json",
        "--heads",
        "--ctx",
        "--seconds",
        "--help",
        "--",
        "32/8",
        "1,2",
        "-1",
        "é",
        "\udcff",
        "%s",
    ]
)


@settings(deadline=None)
@given(argv=st.lists(WORDS | st.text(max_size=6), max_size=5))
def test_no_arguments_give_a_traceback(argv: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        for command in cli.COMMANDS:
            patch.setattr(command, "run", lambda args: 0)
        try:
            status = cli.main(argv)
        except SystemExit as end:  # argparse, after help or the version
            status = end.code
            assert any(word.startswith("-") for word in argv)
    assert status in (0, 2)


# --- info -----------------------------------------------------------------------------------------


def test_info_tells_what_the_library_says(run: Run, here: Run, lib: Lib) -> None:
    facts = json.loads(good(run("info", "--json")))
    assert facts["library"] == str(lib.path)
    assert (facts["version"], facts["library_version"]) == (
        tinyllm.__version__,
        lib.tl_version().decode(),
    )
    assert (facts["abi_version"], facts["numerics_version"]) == (1, golden.NUMERICS_VERSION)
    assert facts["isa"] == facts["isa_names"][0] and facts["isa_names"][-1] == "scalar"
    assert facts["cpus_usable"] == len(os.sched_getaffinity(0)) and facts["problem"] is None
    assert facts["numpy"] == np.__version__
    text = good(here("info"))
    for word in (str(lib.path), facts["isa"], facts["cpu"], tinyllm.__version__, np.__version__):
        assert word in text


def test_info_follows_the_affinity_of_the_process(here: Run) -> None:
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, [min(before)])
    try:
        assert json.loads(good(here("info", "--json")))["cpus_usable"] == 1
    finally:
        os.sched_setaffinity(0, before)


def test_info_counts_the_bytes_that_a_cache_has(here: Run, lib: Lib) -> None:
    argv = ("--heads", "12/3", "--dim", "40", "--layers", "5", "--block", "24")
    cache = json.loads(good(here("info", "--json", *argv)))["cache"]
    with tinyllm.PagedKVCache(lib, 1, 24, 5, 3, 40) as real:
        assert cache["block_bytes"] == lib.tl_kv_block_bytes(real.pool)
    assert (
        cache["blocks_for_1024_tokens"] == 43 and cache["token_bytes"] * 24 == cache["block_bytes"]
    )
    assert "43 blocks" in good(here("info", *argv))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float32", "int8", "float8_e4m3fn"])
def test_info_counts_the_bytes_of_every_dtype(dtype: str, here: Run, lib: Lib) -> None:
    """Three rows of 5 codes a strip: 15 bytes, one of padding, three scales."""
    argv = ("--heads", "2", "--dim", "5", "--layers", "2", "--block", "3", "--dtype", dtype)
    cache = json.loads(good(here("info", "--json", *argv)))["cache"]
    with tinyllm.PagedKVCache(lib, 1, 3, 2, 2, 5, dtype=dtype) as real:
        assert cache["block_bytes"] == lib.tl_kv_block_bytes(real.pool)
    assert cache["dtype"] == dtype and f"in {dtype}, blocks" in good(here("info", *argv))


@pytest.mark.parametrize("name", OWN)
def test_a_library_that_is_not_there_is_named(name: str, here: Run, tmp_path: Path) -> None:
    done = here(name, TINYLLM_LIB=str(tmp_path / "gone.so"))
    assert done.returncode == 2 and "Traceback" not in done.stderr and done.stderr.count("\n") == 1
    assert done.stderr.startswith(f"tinyllm {name}: ") and "gone.so" in done.stderr
    assert ("numpy" in done.stdout) == (name == "info")  # which says what it can


@pytest.mark.parametrize("name", OWN)
def test_a_file_that_is_no_library_is_named(name: str, here: Run, tmp_path: Path) -> None:
    (tmp_path / "text.so").write_text("no library")
    done = here(name, TINYLLM_LIB=str(tmp_path / "text.so"))
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "text.so" in done.stderr


def test_the_problem_stands_in_the_json_of_info(here: Run) -> None:
    done = here("info", "--json", TINYLLM_LIB="/nowhere.so")
    facts = json.loads(done.stdout)
    assert done.returncode == 2 and "/nowhere.so" in facts["problem"] and "isa" not in facts


def test_an_instruction_set_that_is_not_here_is_refused(environment: dict[str, str]) -> None:
    """By each of the commands, in one process: it is chosen once in each."""
    code = "from tinyllm.cli import main; print([main([c]) for c in ('info', 'bench', 'demo')])"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment | {"TINYLLM_ISA": "mmx"}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.endswith("[2, 2, 2]\n")
    lines = done.stderr.splitlines()
    assert [line.split(":")[0] for line in lines] == [
        f"tinyllm {name}" for name in ("info", "bench", "demo")
    ]
    assert all("TINYLLM_ISA=mmx" in line and "scalar" in line for line in lines)


def test_a_library_older_than_the_package_is_named(
    lib: Lib, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(common, "signatures", lambda: {"tl_version": (), "tl_of_the_future": ()})
    assert cli.main(["info"]) == 2
    assert "tl_of_the_future" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "mode"),
    [
        ("always [madvise] never\n", "madvise"),
        ("[always] madvise never\n", "always"),
        ("", None),
        (None, None),
    ],
)
def test_the_mode_of_huge_pages_is_the_one_in_brackets(
    content: str | None, mode: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if content is not None:
        (tmp_path / "enabled").write_text(content)
    monkeypatch.setattr(machine, "_HUGE_PAGES", tmp_path / "enabled")
    assert machine.huge_pages() == mode


# --- selftest -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def genuine(lib: Lib) -> dict[str, Done]:
    """What the process of each instruction set answers, whatever TINYLLM_ISA is here."""
    code = "from tinyllm.cli import golden; golden.main()"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TINYLLM_ISA", "scalar")
        return {i: common.in_process(code, lib, i) for i in lib.tl_isa_names().decode().split()}


@pytest.fixture
def answered(genuine: dict[str, Done], monkeypatch: pytest.MonkeyPatch) -> None:
    """Selftest gets those answers without running anything."""
    monkeypatch.setattr(selftest, "in_process", lambda code, lib, isa: genuine[isa])


@pytest.mark.usefixtures("answered")
def test_selftest_finds_the_bits_right_on_every_instruction_set(here: Run, lib: Lib) -> None:
    text, n = good(here("selftest")), len(golden.GROUPS)
    names = lib.tl_isa_names().decode().split()
    for isa in names:
        line = rf"^  {isa} +{n} groups of {n}: these bits are numerics version \d "
        assert re.search(line, text, re.MULTILINE)
    report = json.loads(good(here("selftest", "--json")))
    assert [v["isa"] for v in report["instruction_sets"]] == names
    assert report["same_bits"] is True and report["expected_digests"] == golden.DIGESTS


@pytest.mark.usefixtures("answered")
def test_selftest_names_a_group_whose_digest_is_another(
    lib: Lib, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    right = golden.DIGESTS["softmax"]
    monkeypatch.setitem(golden.DIGESTS, "softmax", "0" * 64)
    assert cli.main(["selftest"]) == 1
    text, n = capsys.readouterr().out, len(lib.tl_isa_names().split())
    assert (
        text.count("DIFFERS: softmax, 1 thread\n")
        == text.count("DIFFERS: softmax, 2 threads\n")
        == n
    )
    assert text.count(right) == text.count("0" * 64) == 2 * n
    assert "exp" not in text.replace("expected", "") and "these bits are" not in text


ATTENTION = {
    name for name in golden.GROUPS if name.startswith(("decode", "chunks", "prefill", "two and"))
}


@pytest.mark.skipif(
    os.uname().machine != "x86_64", reason="constants may not stand in the code as they are"
)
@pytest.mark.parametrize(
    ("constants", "groups"),
    [
        (["EXP_C2"], ATTENTION | {"softmax", "exp"}),
        (
            ["EXP_C6", "TANH_C3"],
            {
                "exp",
                "chunks f16, every option",
                "chunks bf16, softcap",
                "two and three stretches",
                "chunks e4m3, per position",
            },
        ),
    ],
)
def test_selftest_sees_a_library_with_other_bits(
    constants: list[str], groups: set[str], lib: Lib, tmp_path: Path
) -> None:
    """Coefficients of exp and tanh are off by one ulp: what is built on them, differs."""
    code = Path(lib.path).read_bytes()
    for constant in constants:
        right = getattr(reference, constant)
        wrong = np.nextafter(right, np.float32(1))
        assert right.tobytes() in code
        code = code.replace(right.tobytes(), wrong.tobytes())
    (tmp_path / "libtinyllm.so").write_bytes(code)
    changed = load(tmp_path / "libtinyllm.so")
    for isa in lib.tl_isa_names().decode().split():
        verdict = selftest.examine(changed, isa)
        assert not verdict.good and verdict.problem is None
        for threads in golden.THREADS:
            differ = {d.group for d in verdict.differences if d.threads == threads}
            assert differ == groups, isa


@pytest.mark.usefixtures("answered")
def test_selftest_says_that_the_library_has_another_numerics_version(
    lib: Lib, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = golden.NUMERICS_VERSION
    monkeypatch.setattr(golden, "NUMERICS_VERSION", known + 1)
    assert cli.main(["selftest"]) == 1
    said = capsys.readouterr().err
    assert f"the library has numerics version {known}" in said
    assert f"digests of version {known + 1}" in said


@pytest.mark.parametrize(
    ("status", "stderr", "words"),
    [
        (-signal.SIGILL, "", "was ended by SIGILL"),
        (-33, "", "was ended by signal 33"),
        (3, "warning\nOSError: gone\n", "ended with status 3: OSError: gone"),
        (4, "", "ended with status 4: nothing on stderr"),
    ],
)
def test_selftest_survives_a_process_that_does_not(
    status: int,
    stderr: str,
    words: str,
    lib: Lib,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(
        selftest,
        "in_process",
        lambda code, lib, isa: subprocess.CompletedProcess([], status, "", stderr),
    )
    assert cli.main(["selftest"]) == 1
    assert f"FAILED: the process {words}" in capsys.readouterr().out


# --- bench ----------------------------------------------------------------------------------------

SMALL = ("--heads", "4/2", "--dim", "16", "--seconds", "0.05", "--threads", "1,2")
QUICK = ("--heads", "4/2", "--dim", "16", "--seconds", "0.01", "--threads", "1", "--ctx", "40")


@pytest.mark.usefixtures("small_cache")
def test_bench_prints_a_row_for_every_combination(here: Run) -> None:
    text = good(here("bench", *SMALL, "--ctx", "3,900", "--batch", "5"))
    rows = re.findall(r"^ +(\d+) +(\d+) +(\d+) .*%$", text, re.MULTILINE)
    assert rows == [("3", "5", "1"), ("3", "5", "2"), ("900", "5", "1"), ("900", "5", "2")]
    assert all(len(line) <= 80 for line in text.splitlines())


def test_bench_says_that_a_small_shape_stays_in_the_cache(
    lib: Lib, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "last_level_cache", lambda: 1 << 30)
    assert cli.main(["bench", *SMALL, "--ctx", "3"]) == 0
    assert "partly from the cache" in capsys.readouterr().out
    monkeypatch.setattr(machine, "last_level_cache", lambda: 1024)
    assert cli.main(["bench", *SMALL, "--ctx", "30"]) == 0
    assert "partly from the cache" not in capsys.readouterr().out


@pytest.mark.usefixtures("small_cache")
def test_bench_in_json_counts_the_bytes_that_a_call_reads(here: Run) -> None:
    report = json.loads(
        good(here("bench", *SMALL, "--json", "--ctx", "10,33", "--window", "20", "--block", "5"))
    )
    assert [s["call_bytes"] for s in report["shapes"]] == [n * 2 * 16 * 4 for n in (10, 10, 20, 20)]
    for s in report["shapes"]:
        blocks = -(-s["ctx"] // 5)
        assert s["pool_bytes"] == blocks * 5 * 2 * 16 * 4 * s["layers"]
        assert (
            s["p10_seconds"] <= s["median_seconds"] <= s["p90_seconds"]
            and s["calls"] >= 3 * s["layers"]
        )
        assert s["of_roof"] == pytest.approx(s["bytes_per_second"] / s["roof_bytes_per_second"])
        assert s["bytes_per_second"] == pytest.approx(s["call_bytes"] / s["median_seconds"])
        assert 0 <= s["error_of_largest_value"] < 1e-5


DTYPES = ("float16", "bfloat16", "float32", "int8", "float8_e4m3fn")


@pytest.mark.usefixtures("small_cache")
def test_bench_sets_every_dtype_beside_float16(here: Run) -> None:
    text = good(here("bench", *SMALL, "--ctx", "3,90", "--dtype", "int8,float32,int8"))
    line = r"^  (\w+) .*% +\d+\.\d\d$"
    assert re.findall(line, text, re.MULTILINE) == ["float16", "int8", "float32"] * 4
    assert re.findall(r"^ctx .*$", text, re.MULTILINE) == [
        f"ctx {ctx}, batch 1, {threads}" for ctx in (3, 90) for threads in ("1 thread", "2 threads")
    ]
    assert all(len(line) <= 80 for line in text.splitlines())


@pytest.mark.usefixtures("small_cache")
def test_bench_counts_the_bytes_of_every_dtype(here: Run, lib: Lib) -> None:
    argv = ("--heads", "4/2", "--dim", "7", "--block", "5", "--ctx", "12", "--window", "9")
    done = here("bench", *argv, "--json", "--seconds", "0.05", "--dtype", ",".join(DTYPES[1:]))
    shapes = json.loads(good(done))["shapes"]
    assert [s["dtype"] for s in shapes] == list(DTYPES)
    for s, row in zip(shapes, (14, 14, 28, 11, 11), strict=True):
        assert s["call_bytes"] == 2 * 9 * 2 * row
        with tinyllm.PagedKVCache(lib, 3, 5, s["layers"], 2, 7, dtype=s["dtype"]) as cache:
            assert s["pool_bytes"] == cache.nbytes
        assert 0 <= s["error_of_largest_value"] < 1e-5
        assert s["times_as_fast_as_float16"] > 0
    assert shapes[0]["times_as_fast_as_float16"] == 1
    alone = json.loads(good(here("bench", *argv, "--json", "--seconds", "0.01")))["shapes"]
    assert [s["times_as_fast_as_float16"] for s in alone] == [None]


def test_bench_knows_what_a_cache_holds(lib: Lib) -> None:
    x = np.random.default_rng(0).standard_normal((9, 24), np.float32)
    bits = reference.bf16_to_f32(reference.f32_to_bf16(x))
    stored = [reference.stored_to_f32(*f(x)) for f in (reference.store_i8, reference.store_e4m3)]
    for dtype, wanted in zip(DTYPES, (x.astype(np.float16), bits, x, *stored), strict=True):
        held = bench.as_stored(lib, x, dtype)
        assert held.dtype == np.float64 and (held == wanted).all(), dtype


def test_bench_goes_through_four_times_the_cache_or_what_memory_has_room_for() -> None:
    shape = bench.Shape(32, 8, 128, 1024, 1, 16, 0, 1)
    assert shape.layer_bytes == shape.call_bytes == 4 << 20
    assert shape.fitted(1 << 40, 32 << 20).layers == 32
    assert shape.fitted(None, 33 << 20).layers == 33
    assert (
        replace(shape, ctx=1 << 20, window=16).fitted(None, 1 << 30).layers == 4
    )  # 4 GiB each, hardly seen
    assert replace(shape, ctx=1, batch=2048).fitted(None, 1 << 30).layers == 4  # 2048 appends each
    assert replace(shape, ctx=1).fitted(None, 1 << 30).layers == 1024
    assert replace(shape, dtype="int8").fitted(1 << 40, 33 << 20).layers == 64
    assert shape.fitted(256 << 20, 1 << 30, 2).layers < shape.fitted(256 << 20, 1 << 30).layers / 2
    tight = shape.fitted(64 << 20, 32 << 20)
    assert 1 <= tight.layers < 16 and tight.layers * (4 << 20) + tight.other_bytes <= 0.8 * (
        64 << 20
    )


@pytest.mark.usefixtures("lib", "small_cache")
@pytest.mark.parametrize(
    "argv",
    [
        ("--heads", "4096/1", "--dim", "1", "--ctx", "2"),
        ("--heads", "1", "--dim", "4096", "--ctx", "1"),
        ("--heads", "1", "--dim", "1", "--ctx", "3", "--block", "1000000"),
        ("--heads", "2", "--dim", "4", "--ctx", "5", "--batch", "30"),
        ("--heads", "1", "--dim", "8", "--ctx", "2000", "--window", "7"),
    ],
)
def test_bench_measures_shapes_at_the_edges(argv: tuple[str, ...]) -> None:
    assert cli.main(["bench", "--seconds", "0.01", "--threads", "2", *argv]) == 0


@pytest.mark.usefixtures("lib")
def test_bench_refuses_what_does_not_fit_before_it_takes_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def forbidden(*args: Any, **sizes: Any) -> None:
        raise AssertionError("memory was taken")

    monkeypatch.setattr(machine, "memory", lambda: (1 << 30, 100 << 20))
    monkeypatch.setattr(tinyllm, "PagedKVCache", forbidden)
    assert cli.main(["bench", "--ctx", "64,1000000"]) == 2
    said = capsys.readouterr()
    assert (
        "tinyllm bench: --ctx 1000000 --batch 1 takes 13.4 GiB" in said.err
        and "100 MiB" in said.err
    )
    assert said.out == ""
    argv = ["--ctx", "5000", "--heads", "8/2"]
    assert cli.main(["bench", *argv, "--dtype", ",".join(DTYPES)]) == 2
    assert "--ctx 5000 --batch 1 takes " in capsys.readouterr().err  # five fit only one by one
    with pytest.raises(AssertionError, match="memory was taken"):
        cli.main(["bench", *argv])


@pytest.mark.usefixtures("lib", "small_cache")
@pytest.mark.parametrize(("layers", "wrong_by"), [("all", 0.01), ("all", np.nan), ("one", 0.01)])
def test_bench_finds_wrong_results(
    layers: str,
    wrong_by: float,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    right = bench.Workload.decode

    def wrong(self: bench.Workload, layer: int) -> None:
        right(self, layer)
        if layers == "all" or layer == 1:
            self.out[-1, -1, -1] += np.float32(wrong_by)

    monkeypatch.setattr(bench.Workload, "decode", wrong)
    assert cli.main(["bench", *SMALL, "--ctx", "50"]) == 1
    assert "ctx 50, batch 1: wrong results" in capsys.readouterr().err


# --- demo -----------------------------------------------------------------------------------------


def test_demo_proves_that_the_bits_are_the_same(run: Run, lib: Lib) -> None:
    text = good(run("demo", PYTHONIOENCODING="ascii"))  # and a terminal of ASCII gets an answer
    digests = re.findall(r" ([0-9a-f]{16})$", text, re.MULTILINE)
    assert (
        len(digests) == len(demo.WAYS) + len(lib.tl_isa_names().split()) - 1
        and len(set(digests)) == 1
    )
    assert "Equal, to the last bit." in text and "DIFFERS" not in text
    assert "8 copies, and no other ever" in text and "make demo" in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_demo_of_another_dtype_has_bits_of_its_own(here: Run, lib: Lib) -> None:
    text = good(here("demo", "--kv", "int8"))
    digests = set(re.findall(r" ([0-9a-f]{16})$", text, re.MULTILINE))
    assert len(digests) == 1 and "Equal, to the last bit." in text
    assert not digests & {demo.outcome(lib, demo.WAYS[1])[:16]}
    assert "In int8 a token takes 1088 bytes; in float16 it would be 2048." in text
    assert all(len(line) <= 80 for line in text.splitlines())


def test_demo_finds_a_way_that_differs(here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        demo, "outcome", lambda lib, way, dtype: ("0" if way.block == 5 else "1") * 64
    )
    monkeypatch.setattr(demo, "on", lambda lib, isa, dtype: "1" * 64)
    done = here("demo")
    assert (done.returncode, done.stderr) == (1, "")
    text = done.stdout
    assert re.findall(r"^ +(.*), \w+ +0{16}  DIFFERS$", text, re.MULTILINE) == [
        "all eight, blocks of 5 tokens"
    ]
    assert "They differ" in text and "Equal" not in text


def test_outcomes_of_the_demo_follow_what_the_chats_hold(
    lib: Lib, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal digests mean something: another number in one token of one chat gives another."""
    before = demo.outcome(lib, demo.WAYS[1])
    make = demo.Chats.__init__

    def changed(self: demo.Chats, *args: Any) -> None:
        make(self, *args)
        self._new[3, 1, 5, 0, 0, 0, 0] *= 2

    monkeypatch.setattr(demo.Chats, "__init__", changed)
    assert demo.outcome(lib, demo.WAYS[1]) != before


# --- how it ends ----------------------------------------------------------------------------------


@pytest.fixture
def start(environment: dict[str, str]) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """Starts ``python -m tinyllm``; what is still there at the end is killed."""
    started = []

    def popen(*argv: str, **options: Any) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", "tinyllm", *argv],
            **{"env": environment, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options,
        )
        started.append(process)
        return process

    yield popen
    for process in started:
        with process:
            process.kill()


@pytest.mark.parametrize("argv", [["info"], ["bench", *QUICK], ["demo"]])
def test_a_reader_that_has_gone_is_no_trouble(argv: list[str], start: Any) -> None:
    process = start(*argv)
    process.stdout.close()
    assert process.stderr.read() == b""
    assert process.wait(60) == 141


def test_help_does_not_mind_a_reader_that_has_gone(start: Any) -> None:
    process = start("--help")
    process.stdout.close()
    assert process.stderr.read() == b""


def test_a_full_disk_is_named(start: Any) -> None:
    with open("/dev/full", "w") as full:
        process = start("info", stdout=full)
        assert b"No space left" in process.stderr.read()
        assert process.wait(60) == 2


@pytest.mark.parametrize("argv", [["info"], ["bench", *QUICK]])
def test_closed_streams_are_no_trouble(argv: list[str], environment: dict[str, str]) -> None:
    command = ["sh", "-c", '"$@" >&- 2>&-', "sh", sys.executable, "-m", "tinyllm", *argv]
    assert subprocess.run(command, env=environment, timeout=60, check=False).returncode == 0


def test_an_interrupt_ends_it_without_a_traceback(start: Any) -> None:
    process = start(
        "bench", *QUICK, "--seconds", "60",
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert process.stdout.readline()
    process.send_signal(signal.SIGINT)
    assert process.stderr.read() == b""
    assert process.wait(60) == 130


@pytest.mark.usefixtures("lib")
def test_an_interrupt_while_modules_load_is_not_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def loads_like_a_compiled_module(seed: int) -> None:
        with contextlib.suppress(BaseException):
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(np.random, "default_rng", loads_like_a_compiled_module)
    handler = signal.getsignal(signal.SIGINT)
    assert cli.main(["bench", *QUICK]) == 130
    assert capsys.readouterr() == ("", "")
    assert signal.getsignal(signal.SIGINT) is handler


def test_interrupts_are_deferred_where_they_arrive() -> None:
    reached = []
    with pytest.raises(KeyboardInterrupt), common.interrupts_deferred():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        reached.append("the end of the block")
    assert reached

    def in_a_thread() -> None:
        with common.interrupts_deferred():
            reached.append("another thread")

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert reached[1:] == ["another thread"]


def test_an_interrupt_that_leaves_a_call_half_done_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args: Any) -> int:
        try:
            raise KeyboardInterrupt
        finally:
            raise RuntimeError("this PagedKVCache is in use by a call and cannot be closed")

    monkeypatch.setattr(demo, "run", run)
    assert cli.main(["demo"]) == 130


def test_a_fault_of_a_command_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(args: Any) -> int:
        raise RuntimeError("a fault")

    monkeypatch.setattr(demo, "run", run)
    with pytest.raises(RuntimeError, match="a fault"):
        cli.main(["demo"])


def on_a_terminal(start: Any, *argv: str, **env: str) -> bytes:
    """What a command shows whose stdout and stderr are one terminal."""
    ours, theirs = pty.openpty()
    process = start(*argv, stdout=theirs, stderr=theirs, env=env)
    os.close(theirs)
    shown = b""
    while True:
        try:
            shown += os.read(ours, 4096)
        except OSError:  # the other side is closed
            break
    os.close(ours)
    assert process.wait(60) == 0, shown
    return shown


def test_colour_and_progress_are_for_terminals_that_want_them(
    start: Any, environment: dict[str, str]
) -> None:
    argv = ("bench", *QUICK)
    shown = on_a_terminal(start, *argv, **environment)
    assert b"\x1b[1m" in shown and b"\r\x1b[K" in shown and b"checking" in shown
    shown = on_a_terminal(start, *argv, **environment, NO_COLOR="1")
    assert b"\x1b[1m" not in shown and b"checking" in shown
    shown = on_a_terminal(start, *argv, **environment | {"TERM": "dumb"})
    assert b"\x1b" not in shown and b"checking" not in shown


@pytest.mark.parametrize("argv", [["--help"], ["info"]])
def test_an_ascii_terminal_gets_an_answer(argv: list[str], run: Run) -> None:
    good(run(*argv, PYTHONIOENCODING="ascii"))
