"""A file of an option that is read again when it has changed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from penstock.config.errors import ConfigError

log = logging.getLogger(__name__)

T = TypeVar("T")
Stamp = tuple[int, int, int]
"""Time of the last change, size and inode."""


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
        try:
            self._stamp = self._stamp_now()
            self._value = self._read_now()
        except (OSError, ValueError) as error:
            raise ConfigError(f"{self._where}: {_reason(error)}") from None

    def latest(self) -> T:
        """The value of the file; the same object until it changes, and while the file is invalid."""
        try:
            stamp = self._stamp_now()
            if stamp != self._stamp:
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

    def _read_now(self) -> T:
        return self._read(self._path.read_text(encoding="utf-8"))


def _reason(error: Exception) -> str:
    return str((isinstance(error, OSError) and error.strerror) or error)
