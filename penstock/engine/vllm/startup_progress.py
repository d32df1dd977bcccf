"""Shows vLLM's log lines as progress while it starts; afterwards they are logged."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator


class _Shown(logging.Handler):
    """Reports INFO lines as progress, which also extends the engine's start timeout, and logs warnings and
    errors."""

    def __init__(self, progress: Callable[[str, float | None], None]) -> None:
        super().__init__()
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING:
            logging.getLogger().handle(record)
        elif record.levelno >= logging.INFO:
            text = record.getMessage().partition("\n")[0]
            self._progress(f"vLLM: {text[:100]}", None)


@contextlib.contextmanager
def startup_progress(progress: Callable[[str, float | None], None]) -> Iterator[None]:
    """While the block runs, vLLM's lines are progress. Afterwards warnings and errors are logged, or all
    lines with ``--log-level debug``."""
    logger = logging.getLogger("vllm")
    handler = _Shown(progress)
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = True
        debug = logging.getLogger("penstock").isEnabledFor(logging.DEBUG)
        logger.setLevel(logging.DEBUG if debug else logging.WARNING)
