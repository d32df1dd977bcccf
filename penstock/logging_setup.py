"""Logging of every process: to standard error, as text or JSON, each line with time, level and process name.

A line of JSON is one record, also where it has a traceback: ``time`` (UTC), ``level``, ``process``,
``logger``, ``message``; ``exception``, a traceback; ``fields``, the values of an event (:func:`log_event`).
"""

from __future__ import annotations

import json
import logging
import sys
import threading
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Literal, TypeAlias

REPEAT_INTERVAL_S = 60.0
"""Minimum time between two lines of a :class:`RateLimitedLog` about the same subject."""
MAX_SUBJECTS = 256
"""Subjects that a :class:`RateLimitedLog` remembers; it forgets the oldest."""
LogFormat: TypeAlias = Literal["text", "json"]


def configure(process: str, level: str, format: LogFormat = "text") -> None:
    """Log our messages from ``level`` on, and those of other libraries from warning on.

    ``process`` is the name in each line, such as ``engine 0``; ``level`` and ``format`` are values of
    ``--log-level`` and ``--log-format``.
    """
    own = logging.getLevelNamesMapping()[level.upper()]
    handler = _StandardError()
    handler.setFormatter(JsonFormatter(process) if format == "json" else _PrefixFormatter(process))
    if format == "json":
        sys.excepthook = _log_uncaught
        threading.excepthook = lambda thread: _log_uncaught(
            thread.exc_type, thread.exc_value, thread.exc_traceback
        )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(max(own, logging.WARNING))
    logging.getLogger("penstock").setLevel(own)
    logging.captureWarnings(True)


def log_event(logger: logging.Logger, event: str, fields: Mapping[str, object], text: str) -> None:
    """Log an event with values: as ``text``, or in JSON as ``event`` with ``fields``."""
    logger.info("%s", text, extra={"event": event, "fields": fields})


def _log_uncaught(
    kind: type[BaseException], error: BaseException | None, trace: TracebackType | None
) -> None:
    if error is not None and not issubclass(kind, KeyboardInterrupt | SystemExit):
        logging.getLogger("penstock").critical("an exception was not caught", exc_info=(kind, error, trace))


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
        """Log ``message % arguments``, unless ``subject`` had a line within the interval; with ``exc_info``
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


class JsonFormatter(logging.Formatter):
    """One JSON object per record."""

    def __init__(self, process: str) -> None:
        super().__init__("%(message)s")
        self._process = process

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {
            "time": f"{at[:-6]}Z",
            "level": record.levelname.lower(),
            "process": self._process,
            "logger": record.name,
            "message": getattr(record, "event", None) or record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        if record.stack_info:
            line["stack"] = record.stack_info
        fields = getattr(record, "fields", None)
        if fields:
            line["fields"] = fields
        return json.dumps(line, default=str)


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
