"""Files of options that are read again: when they have changed, or on SIGHUP.

Editors and scripts write in place: such a file is empty for a moment, or ends within a line, and a full disk
leaves it so. Neither is what its owner meant to say, so it changes nothing. Nor does a pipe or a device: who
opens or reads it may wait forever.
"""

from __future__ import annotations

import logging
import os
import re
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from penstock.config.errors import ConfigError

log = logging.getLogger(__name__)

T = TypeVar("T")
Stamp = tuple[int, int, int]
"""Time of the last change, size and inode."""
MAX_CHARACTERS = 16 << 20
"""Maximum size of a file."""
SETTLE_S = 1.0
"""A file that was written in place is read when it has not changed for so long, or from one look to the next:
another part may follow. One that takes its name by a move is complete."""
_ENDS = ("\n", "]", "}", '"', "'")
"""Last characters of a text that is not cut within a word; what was cut within brackets or quotes is not
valid."""
_KINDS = ((stat.S_ISFIFO, "a pipe"), (stat.S_ISDIR, "a directory"), (stat.S_ISCHR, "a device"))
_says_something = re.compile(r"^[ \t]*[^#\s]", re.MULTILINE).search


def check_regular(path: str) -> None:
    """Raises OSError, and ValueError for what is no regular file."""
    _check_kind(os.stat(path).st_mode)


def read_regular(path: str) -> str:
    """The text of a regular file. Raises OSError and ValueError."""
    with open(path, encoding="utf-8", opener=_open_regular) as file:
        text = file.read(MAX_CHARACTERS + 1)
    if len(text) > MAX_CHARACTERS:
        raise ValueError(f"it is longer than {MAX_CHARACTERS} characters")
    return text


def _open_regular(path: str, flags: int) -> int:
    fd = os.open(path, flags | os.O_NONBLOCK)
    try:
        _check_kind(os.fstat(fd).st_mode)
    except ValueError:
        os.close(fd)
        raise
    return fd


def _check_kind(mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for is_kind, name in _KINDS if is_kind(mode)), "something else")
        raise ValueError(f"it is {kind}, not a file")


class TextFiles:
    """The files that a process reads at its start and on SIGHUP. At the start they may be pipes, such as a
    shell's ``<(…)``, and end without a line end, as Kubernetes' secrets do."""

    def __init__(self) -> None:
        self.started = False
        """Files are read again, or while the process serves."""
        self._texts: dict[str, str] = {}
        """Texts by path, as they were read last."""

    def read_file(self, path: str, ends: tuple[str, ...] = _ENDS) -> str:
        """The text of a file. ``ends``: see :func:`_check_complete`. Raises OSError, and ValueError
        for one that is not complete."""
        if self.started:
            text = read_regular(path)
            before = self._texts.get(path, text)
            if text != before:
                _check_complete(text, before, ends)
        else:
            with open(path, encoding="utf-8") as file:
                text = file.read()
        self._texts[path] = text
        return text


class WatchedFile(Generic[T]):
    """A file of which the last valid contents are in effect. Each change is logged once."""

    def __init__(
        self, option: str, path: str, read: Callable[[str], T], describe: Callable[[T], str]
    ) -> None:
        """``read`` makes the value of a text, or raises ValueError, which is shown; ``describe`` tells how
        much there is, in the plural. Raises ConfigError for a file that cannot be used."""
        self._where = f"{option} {path}"
        self._path = Path(path)
        self._read = read
        self._describe = describe
        self._problem = ""
        """The problem logged last, so that it is not logged every second."""
        self._stamp: Stamp | None = None
        """Stamp of the contents that were read last, valid or not; None: they could not be read."""
        self._looked_at: Stamp | None = None
        """What the latest look saw."""
        try:
            self._stamp = self._stamp_now()
            self._text = read_regular(path)
            self._value = self._read(self._text)
        except (OSError, ValueError) as error:
            problems = reason(error).splitlines()
            raise ConfigError("\n".join(f"{self._where}: {each}" for each in problems)) from None
        if not _says_something(self._text):
            log.warning("%s is empty: %s until it is not", self._where, describe(self._value))

    def latest(self) -> T:
        """The value of the file; the same object until it changes, and while the file is invalid."""
        try:
            stamp = self._stamp_now()
            if stamp != self._stamp and self._is_settled(stamp):
                self._stamp = stamp  # an invalid file is not read again until it changes
                self._value = self._read_now()
                again = " again" if self._problem else ""
                log.info("%s: %s are in effect%s", self._where, self._describe(self._value), again)
                self._problem = ""
        except (OSError, ValueError) as error:
            if isinstance(error, OSError):
                self._stamp = None
            problem = f"{self._where}: {'; '.join(reason(error).splitlines())}"
            if problem != self._problem:
                log.error("%s; %s stay in effect", problem, self._describe(self._value))
            self._problem = problem
        return self._value

    def _stamp_now(self) -> Stamp:
        status = self._path.stat()
        return status.st_mtime_ns, status.st_size, status.st_ino

    def _is_settled(self, stamp: Stamp) -> bool:
        before, self._looked_at = self._looked_at, stamp
        moved_here = self._stamp is not None and stamp[2] != self._stamp[2]
        return moved_here or stamp == before or time.time() - stamp[0] / 1e9 >= SETTLE_S

    def _read_now(self) -> T:
        text = read_regular(str(self._path))
        _check_complete(text, self._text, _ENDS)
        value = self._read(text)
        self._text = text
        return value


def _check_complete(text: str, before: str, ends: tuple[str, ...]) -> None:
    """Raises ValueError for a text that says nothing, or ends within a line: not with one of ``ends``, as the
    text ``before`` it did."""
    if not _says_something(text):
        raise ValueError("it is empty")
    ends_as_before = text.endswith(ends) or not before.endswith("\n")
    if not ends_as_before or _is_cut(text, before):
        raise ValueError("its last line has no end, as if it were cut there")


def _is_cut(text: str, before: str) -> bool:
    """Whether ``text`` is the begin of ``before``, to within a line."""
    return text != before and before.startswith(text) and "\n" not in (text[-1], before[len(text)])


def reason(error: Exception) -> str:
    """Why a file cannot be used."""
    return str((isinstance(error, OSError) and error.strerror) or error)
