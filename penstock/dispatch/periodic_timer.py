"""A timer of the event loop that goes on after an exception."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from penstock.logging_setup import RateLimitedLog

_log_fault = RateLimitedLog(logging.getLogger(__name__), logging.ERROR)

_START = time.monotonic()
"""Differs between processes, so that not all of a machine wake up at the same time."""


class PeriodicTimer:
    """Calls ``callback`` every ``interval_s`` seconds until it is cancelled. An exception is logged, once a
    minute per ``name``, and does not end it.

    The timers of a process whose intervals are multiples of each other run together, as an idle process that
    wakes up takes about 0.1 ms of CPU time.
    """

    def __init__(self, name: str, interval_s: float, callback: Callable[[], None]) -> None:
        self._name = name
        self._interval_s = interval_s
        self._callback = callback
        self._loop = asyncio.get_running_loop()
        self.lag_s = 0.0
        """How late the loop made the latest call."""
        self._handle = self._schedule()

    def cancel(self) -> None:
        self._handle.cancel()

    def _schedule(self) -> asyncio.TimerHandle:
        return self._loop.call_later(self._delay(), self._on_timer)

    def _delay(self) -> float:
        """Seconds to the next multiple of the interval."""
        interval_s = self._interval_s
        delay = interval_s - (self._loop.time() - _START) % interval_s
        return delay if delay > interval_s / 16 else delay + interval_s  # it has run a moment too early

    def _on_timer(self) -> None:
        self.lag_s = max(0.0, time.monotonic() - self._handle.when())  # both clocks are monotonic seconds
        self._handle = self._schedule()  # the callback may cancel it
        try:
            self._callback()
        except Exception:  # noqa: BLE001 - the timer goes on
            _log_fault(self._name, "the timer of %s failed", self._name, exc_info=True)
