"""Logging of every process: to standard error, each line with time, level and process name."""

from __future__ import annotations

import logging
import sys

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
