# SPDX-License-Identifier: MIT
"""Replacement: a file is there whole or as it was before, whatever happens while it is written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tinyllm._files import Replacement, write_whole


def names(directory: Path) -> list[str]:
    return sorted(os.listdir(directory))


def test_a_file_appears_when_the_block_ends(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with Replacement(path) as part:
        part.write_text("new")
        assert names(tmp_path) == [part.name] and part.name.startswith(".file.")
    assert (names(tmp_path), path.read_text()) == (["file"], "new")


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_a_block_that_raises_leaves_the_old_file_and_nothing_else(
    error: type[BaseException], tmp_path: Path
) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with pytest.raises(error), Replacement(path) as part:  # noqa: PT012
        part.write_text("ne")
        raise error
    assert (names(tmp_path), path.read_text()) == (["file"], "old")


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_fails_leaves_the_old_file_and_nothing_else(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise OSError("no space left")

    path = tmp_path / "file"
    path.write_text("old")
    monkeypatch.setattr(os, call, fails)
    with pytest.raises(OSError, match="no space"):
        write_whole(path, "new")
    assert (names(tmp_path), path.read_text()) == (["file"], "old")


def test_two_that_write_at_once_do_not_mix(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with Replacement(path) as one, Replacement(path) as two:
        one.write_text("one")
        two.write_text("two")
    assert (names(tmp_path), path.read_text()) == (["file"], "one")


def test_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there/file")  # which is not there yet
    for text in ("new", "newer"):
        write_whole(tmp_path / "link", text)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "there" / "file").read_text() == text
    assert (names(tmp_path), names(tmp_path / "there")) == (["link", "there"], ["file"])


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    write_whole(tmp_path / "pipe", "text")
    assert os.read(reader, 100) == b"text"
    os.close(reader)
    assert names(tmp_path) == ["pipe"] and (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize(
    ("path", "error"), [(".", IsADirectoryError), ("no/such/file", FileNotFoundError)]
)
def test_what_cannot_be_written_is_refused(
    path: str, error: type[OSError], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error):
        write_whole(path, "text")
    assert names(tmp_path) == []
