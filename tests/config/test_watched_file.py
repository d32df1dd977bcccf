from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.config.errors import ConfigError
from penstock.config.watched_file import MAX_CHARACTERS, WatchedFile


class File:
    """A file of digits, and how often it was read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.now = 0
        self.reads = 0
        self.write("1")
        self.watched = WatchedFile("--digits", str(path), self._read, lambda value: f"{value} keys")

    def write(self, text: str) -> None:
        self.now += 5
        self.path.write_text(text)
        os.utime(self.path, (self.now, self.now))

    def _read(self, text: str) -> int:
        self.reads += 1
        return int(text)


@pytest.fixture
def file(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> File:
    caplog.set_level(logging.INFO)
    return File(tmp_path / "file")


def test_what_is_in_effect_is_logged(file: File, caplog: pytest.LogCaptureFixture) -> None:
    assert (file.watched.latest(), file.watched.latest(), file.reads) == (1, 1, 1)
    assert not caplog.messages
    file.write("2")
    assert (file.watched.latest(), file.watched.latest(), file.reads) == (2, 2, 2)
    assert caplog.messages == [f"--digits {file.path}: 2 keys are in effect"]


def test_an_invalid_file_is_read_once_and_one_line_tells_of_its_end(
    file: File, caplog: pytest.LogCaptureFixture
) -> None:
    file.write("two")
    assert [file.watched.latest() for _ in range(3)] == [1, 1, 1]
    assert file.reads == 2
    file.write("3")
    assert [file.watched.latest() for _ in range(3)] == [3, 3, 3]
    bad, good = caplog.messages
    assert "'two'" in bad
    assert bad.endswith("; 1 keys stay in effect")
    assert good == f"--digits {file.path}: 3 keys are in effect again"


@pytest.mark.parametrize(
    ("before", "cut", "problem"),
    [
        ("12\n", "", "it is empty"),
        ("12\n", " \n# 7\n", "it is empty"),
        ("12\n", "1", "its last line has no end, as if it were cut there"),
        ("12\n", "34", "its last line has no end, as if it were cut there"),
        ("12", "1", "its last line has no end, as if it were cut there"),
    ],
)
def test_a_file_that_is_not_complete(
    file: File, caplog: pytest.LogCaptureFixture, before: str, cut: str, problem: str
) -> None:
    file.write(before)
    assert file.watched.latest() == 12
    caplog.clear()
    file.write(cut)
    assert [file.watched.latest() for _ in range(3)] == [12, 12, 12]
    assert caplog.messages == [f"--digits {file.path}: {problem}; 12 keys stay in effect"]
    file.write("5\n")
    assert file.watched.latest() == 5


def test_a_file_that_is_being_written_is_read_at_its_end(file: File) -> None:
    """One that was moved to its place is there at once."""
    soon = time.time() + 3600
    for text in ("2\n", "23\n", "234\n"):
        file.path.write_text(text)
        os.utime(file.path, (soon, soon))
        soon += 1
        assert file.watched.latest() == 1
    assert file.watched.latest() == 234
    moved = file.path.with_name("new")
    moved.write_text("5\n")
    moved.rename(file.path)
    assert file.watched.latest() == 5


def test_a_file_that_is_away_for_a_while(file: File, caplog: pytest.LogCaptureFixture) -> None:
    aside = file.path.rename(file.path.with_name("aside"))
    assert [file.watched.latest() for _ in range(3)] == [1, 1, 1]
    aside.rename(file.path)
    assert [file.watched.latest() for _ in range(3)] == [1, 1, 1]
    assert caplog.messages == [
        f"--digits {file.path}: No such file or directory; 1 keys stay in effect",
        f"--digits {file.path}: 1 keys are in effect again",
    ]


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _long(path: Path) -> None:
    path.write_text("1" * (MAX_CHARACTERS + 1))


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (_pipe, "it is a pipe, not a file"),
        (_endless, "it is a device, not a file"),
        (Path.mkdir, "it is a directory, not a file"),
        (_long, f"it is longer than {MAX_CHARACTERS} characters"),
    ],
)
def test_what_can_not_be_read_to_its_end_stops_nobody(
    file: File, caplog: pytest.LogCaptureFixture, make: Callable[[Path], None], problem: str
) -> None:
    file.path.unlink()
    make(file.path)
    if file.path.is_file():
        os.utime(file.path, (7, 7))
    assert [file.watched.latest() for _ in range(3)] == [1, 1, 1]
    assert caplog.messages == [f"--digits {file.path}: {problem}; 1 keys stay in effect"]
    with pytest.raises(ConfigError, match=problem):
        WatchedFile("--digits", str(file.path), int, str)


def test_a_first_file_must_be_good(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--digits .*/none: No such file or directory$"):
        WatchedFile("--digits", str(tmp_path / "none"), int, str)
