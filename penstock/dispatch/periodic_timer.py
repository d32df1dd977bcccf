"""A timer of the event loop that goes on after an exception."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from penstock.logging_setup import RateLimitedLog

_log_fault = RateLimitedLog(logging.getLogger(__name__), logging.ERROR)


class PeriodicTimer:
    """Calls ``callback`` every ``interval_s`` seconds until it is cancelled. An exception is logged, once a
    minute per ``name``, and does not end it."""

    def __init__(self, name: str, interval_s: float, callback: Callable[[], None]) -> None:
        self._name = name
        self._interval_s = interval_s
        self._callback = callback
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_later(interval_s, self._on_timer)

    def cancel(self) -> None:
        self._handle.cancel()

    def _on_timer(self) -> None:
        self._handle = self._loop.call_later(self._interval_s, self._on_timer)  # the callback may cancel it
        try:
            self._callback()
        except Exception:  # noqa: BLE001 - the timer goes on
            _log_fault(self._name, "the timer of %s failed", self._name, exc_info=True)
