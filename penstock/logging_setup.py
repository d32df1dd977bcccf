"""Logging of every process: to standard error, each line with time, level and process name."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable

REPEAT_INTERVAL_S = 60.0
"""Minimum time between two lines of a :class:`RateLimitedLog` about the same subject."""
MAX_SUBJECTS = 256
"""Subjects that a :class:`RateLimitedLog` remembers; it forgets the oldest."""
_OWN = ("penstock", "uvicorn")


def configure(process: str, level: str) -> None:
    """Logs our messages from ``level`` on, and those of other libraries from warning on.

    ``process`` is the name in each line, such as ``engine 0``; ``level`` is a value of ``--log-level``.
    """
    own = logging.getLevelNamesMapping()[level.upper()]
    handler = _StandardError()
    handler.setFormatter(_PrefixFormatter(process))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(own, logging.WARNING))
    for name in _OWN:
        logging.getLogger(name).setLevel(own)
    logging.captureWarnings(True)


class RateLimitedLog:
    """Logs events that a peer can cause at any rate: one line per subject and minute, which says how many
    events it stands for.

    A subject is what the line is about, such as ``engine 3``; the texts of its events may differ.
    """

    def __init__(
        self,
        log: logging.Logger,
        level: int = logging.WARNING,
        interval_s: float = REPEAT_INTERVAL_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._log = log
        self._level = level
        self._interval_s = interval_s
        self._clock = clock
        self._subjects: dict[str, tuple[float, int]] = {}
        """Per subject: time of its last line, and events since that line."""

    def __call__(self, subject: str, message: str, *arguments: object, exc_info: bool = False) -> None:
        """Logs ``message % arguments``, unless ``subject`` had a line within the interval; with ``exc_info``
        and the traceback of the exception that is being handled."""
        now = self._clock()
        logged_at, suppressed = self._subjects.pop(subject, (-float("inf"), 0))
        if now < logged_at + self._interval_s:
            self._subjects[subject] = logged_at, suppressed + 1
            return
        if len(self._subjects) >= MAX_SUBJECTS:
            del self._subjects[next(iter(self._subjects))]
        self._subjects[subject] = now, 0
        if suppressed:
            message += " (and %d more like it since the last line)"
            arguments = (*arguments, suppressed)
        self._log.log(self._level, message, *arguments, exc_info=exc_info)


class _PrefixFormatter(logging.Formatter):
    """Prefixes every line of a record, including those of a traceback."""

    def __init__(self, process: str) -> None:
        super().__init__("%(message)s")
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        time = f"{self.formatTime(record, '%H:%M:%S')}.{int(record.msecs):03d}"
        prefix = f"{time} {record.levelname:<7} {self._process:<12} "
        return "\n".join(prefix + line for line in super().format(record).splitlines() or [""])


class _StandardError(logging.Handler):
    """Writes to the current ``sys.stderr``, which a progress display replaces for a while.

    One write per record, so that lines of several processes do not mix.
    """

    def emit(self, record: logging.LogRecord) -> None:
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except OSError:
            pass  # the terminal or pipe is closed; the server continues
