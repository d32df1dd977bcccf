"""A file of an option that is read again when it has changed.

Editors and scripts write in place: such a file is empty for a moment, or ends within a line, and a full disk
leaves it so. Neither is what its owner meant to say, so it changes nothing.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from penstock.config.errors import ConfigError

log = logging.getLogger(__name__)

T = TypeVar("T")
Stamp = tuple[int, int, int]
"""Time of the last change, size and inode."""
SETTLE_S = 1.0
"""A file that was written in place is read when it has not changed for so long, or from one look to the next:
another part may follow. One that takes its name by a move is complete."""
_ENDS = ("\n", "]", "}", '"', "'")
"""Of a text that is not cut within a word; what was cut within brackets or quotes is not valid."""
_says_something = re.compile(r"^[ \t]*[^#\s]", re.MULTILINE).search


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
        """Of the contents that were read last, valid or not; None: they could not be read."""
        self._looked_at: Stamp | None = None
        """What the latest look saw."""
        try:
            self._stamp = self._stamp_now()
            self._text = self._path.read_text(encoding="utf-8")
            self._value = self._read(self._text)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self._where}: {_reason(error)}") from None
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
            problem = f"{self._where}: {_reason(error)}"
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
        text = self._path.read_text(encoding="utf-8")
        if not _says_something(text):
            raise ValueError("it is empty")
        ends_as_before = text.endswith(_ENDS) or not self._text.endswith("\n")
        if not ends_as_before or _is_cut(text, self._text):
            raise ValueError("its last line has no end, as if it were cut there")
        value = self._read(text)
        self._text = text
        return value


def _is_cut(text: str, before: str) -> bool:
    """Whether ``text`` is the begin of ``before``, to within a line."""
    return text != before and before.startswith(text) and "\n" not in (text[-1], before[len(text)])


def _reason(error: Exception) -> str:
    return str((isinstance(error, OSError) and error.strerror) or error)
