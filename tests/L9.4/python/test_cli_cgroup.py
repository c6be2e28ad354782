# SPDX-License-Identifier: MIT
"""What `tinyllm info` and `tinyllm bench` take for this machine inside a container: the files of
both versions of control groups, made up."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from tinyllm import _cgroup, _machine
from tinyllm.cli import bench, info, machine
from tinyllm.cli.common import CliError

GIB = 1 << 30
NEVER = 9223372036854771712  # what version 1 says where there is no limit

Files = Callable[[dict[str, str]], None]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    """Writes files that stand for the system's; the machine has 64 GiB, 60 of them free, 8 CPUs."""

    def write(texts: dict[str, str]) -> None:
        for name, text in texts.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)

    monkeypatch.setattr(_cgroup, "_ROOT", tmp_path)
    monkeypatch.setattr(_machine, "_MEMORY", tmp_path / "proc/meminfo")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    write({"proc/meminfo": f"MemTotal: {64 << 20} kB\nMemAvailable: {60 << 20} kB\n"})
    return write


def test_without_control_groups_the_machine_counts(files: Files) -> None:
    assert machine.memory() == (64 * GIB, 60 * GIB)
    assert machine.cpus() == (8, 16)
    assert (_cgroup.memory_limit(), _cgroup.memory_room(), _cgroup.cpu_quota()) == (
        None,
        None,
        None,
    )


TOP = "sys/fs/cgroup"


@pytest.mark.parametrize(
    ("texts", "memory"),
    [
        pytest.param(
            {
                "proc/self/cgroup": "0::/\n",
                f"{TOP}/memory.max": f"{4 * GIB}\n",
                f"{TOP}/memory.current": f"{3 * GIB}\n",
            },
            (4 * GIB, GIB),
            id="version 2, the group at the top",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/\n",
                f"{TOP}/memory.max": f"{4 * GIB}\n",
                f"{TOP}/memory.current": f"{3 * GIB}\n",
                f"{TOP}/memory.stat": f"anon {GIB}\ninactive_file {2 * GIB}\nactive_file 5\n",
            },
            (4 * GIB, 3 * GIB),
            id="the file cache is free",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/a/b\n",
                f"{TOP}/a/b/memory.max": "max\n",
                f"{TOP}/a/b/memory.current": "0\n",
                f"{TOP}/a/memory.max": f"{2 * GIB}\n",
                f"{TOP}/a/memory.current": f"{GIB}\n",
            },
            (2 * GIB, GIB),
            id="version 2, a limit further up",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/a/b\n",
                f"{TOP}/a/b/memory.max": f"{8 * GIB}\n",
                f"{TOP}/a/b/memory.current": f"{GIB}\n",
                f"{TOP}/a/memory.max": f"{16 * GIB}\n",
                f"{TOP}/a/memory.current": f"{14 * GIB}\n",
            },
            (8 * GIB, 2 * GIB),
            id="one group limits most, another is fullest",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/not/seen/from/here\n",
                f"{TOP}/memory.max": f"{2 * GIB}\n",
                f"{TOP}/memory.current": f"{3 * GIB}\n",
            },
            (2 * GIB, 0),
            id="a name from outside, and more used than allowed",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "5:cpuset:/x\n4:cpu,memory:/docker/1\n0::/\n",
                f"{TOP}/memory/docker/1/memory.limit_in_bytes": f"{GIB}\n",
                f"{TOP}/memory/docker/1/memory.usage_in_bytes": f"{GIB // 2}\n",
                f"{TOP}/memory/docker/1/memory.stat": "inactive_file 1\ntotal_inactive_file 4096\n",
            },
            (GIB, GIB // 2 + 4096),
            id="version 1",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "4:memory:/\n",
                f"{TOP}/memory/memory.limit_in_bytes": f"{NEVER}\n",
                f"{TOP}/memory/memory.usage_in_bytes": "0\n",
            },
            (64 * GIB, 60 * GIB),
            id="version 1 without a limit",
        ),
        pytest.param(
            {
                "proc/self/cgroup": "0::/\nnonsense\n",
                f"{TOP}/memory.max": "many\n",
                f"{TOP}/memory.current": "\n",
            },
            (64 * GIB, 60 * GIB),
            id="nonsense",
        ),
    ],
)
def test_memory_is_what_the_tightest_control_group_leaves(
    files: Files, texts: dict[str, str], memory: tuple[int, int]
) -> None:
    files(texts)
    assert machine.memory() == memory


@pytest.mark.parametrize(
    ("texts", "quota", "usable"),
    [
        ({f"{TOP}/cpu.max": "200000 100000\n"}, 2, 2),
        ({f"{TOP}/cpu.max": "150000 100000\n"}, 1.5, 2),
        ({f"{TOP}/cpu.max": "1000 100000\n"}, 0.01, 1),
        ({f"{TOP}/cpu.max": "max 100000\n"}, None, 8),
        ({f"{TOP}/cpu.max": "3200000 100000\n"}, 32, 8),
        ({f"{TOP}/cpu.max": "300000 100000\n", f"{TOP}/a/cpu.max": "500000 100000\n"}, 3, 3),
        ({f"{TOP}/cpu.max": "300000 100000\n", f"{TOP}/a/b/cpu.max": "50000 50000\n"}, 1, 1),
        (
            {
                "proc/self/cgroup": "2:cpu,cpuacct:/a\n1:cpuset:/\n",
                f"{TOP}/cpu/a/cpu.cfs_quota_us": "400000\n",
                f"{TOP}/cpu/a/cpu.cfs_period_us": "100000\n",
                f"{TOP}/cpu/cpu.cfs_quota_us": "-1\n",
                f"{TOP}/cpu/cpu.cfs_period_us": "100000\n",
            },
            4,
            4,
        ),
        ({f"{TOP}/cpu.max": "0 0\n"}, None, 8),
    ],
)
def test_cpus_are_those_that_the_tightest_quota_pays_for(
    files: Files, texts: dict[str, str], quota: float | None, usable: int
) -> None:
    files({"proc/self/cgroup": "0::/a/b\n", **texts})
    assert _cgroup.cpu_quota() == quota
    assert machine.cpus() == (usable, 16)


LIMITED = {
    "proc/self/cgroup": "0::/\n",
    f"{TOP}/memory.max": f"{GIB}\n",
    f"{TOP}/memory.current": f"{GIB // 2}\n",
    f"{TOP}/cpu.max": "150000 100000\n",
}


def test_info_says_whose_limits_they_are(files: Files, capsys: pytest.CaptureFixture[str]) -> None:
    parser = argparse.ArgumentParser()
    info.add_arguments(parser)
    files(LIMITED)
    info.run(parser.parse_args(["--heads", "8/8", "--dim", "128", "--layers", "1"]))
    said = capsys.readouterr().out
    assert "2 that this process may use, of 16 (a quota of 1.5)" in said
    assert " 1 GiB (the limit of this container)" in said
    assert "8192 blocks, in what is free now" in said  # half a GiB, blocks of 64 KiB
    info.run(parser.parse_args(["--json"]))
    facts = json.loads(capsys.readouterr().out)
    assert (facts["cpu_quota"], facts["cpus_usable"], facts["cpus"]) == (1.5, 2, 16)
    assert (facts["memory_limit_bytes"], facts["memory_bytes"]) == (GIB, GIB)
    assert facts["memory_available_bytes"] == GIB // 2


def test_bench_takes_no_more_than_the_container_has(files: Files) -> None:
    parser = argparse.ArgumentParser()
    bench.add_arguments(parser)
    words = ("--heads", "8/8", "--dim", "128", "--batch", "8", "--ctx", "20000", "--threads", "0")
    args = parser.parse_args(words)
    ((shape,),) = bench._turns(args)
    assert shape.threads == 8
    files(LIMITED)
    with pytest.raises(CliError, match=r"and of the 512 MiB that can be had"):
        list(bench._turns(args))
    files({f"{TOP}/memory.max": f"{8 * GIB}\n"})
    ((shape,),) = bench._turns(args)
    assert shape.threads == 2
