"""Errors that are logged instead of raised."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator


class _Failures(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(self.format(record))


@contextlib.contextmanager
def logged(*loggers: str) -> Iterator[list[str]]:
    """The errors that these loggers get meanwhile."""
    failures = _Failures()
    for name in loggers:
        logging.getLogger(name).addHandler(failures)
    try:
        yield failures.seen
    finally:
        for name in loggers:
            logging.getLogger(name).removeHandler(failures)
