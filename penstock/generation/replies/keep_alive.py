"""Sends comments on silent event streams, so that proxies and clients do not time out."""

from __future__ import annotations

import time

from penstock.dispatch.periodic_timer import PeriodicTimer
from penstock.generation.replies.streamed import StreamedReply
from penstock.streaming.output_processor import OutputProcessor

TICKS = 4
"""Checks per interval. A client gets a comment after a silence of at least three quarters of the interval and
at most the whole interval."""


class KeepAlive:
    """One timer for all streams of a process; a tick visits only the silent ones."""

    def __init__(self, streams: OutputProcessor, interval_s: float) -> None:
        """``interval_s``: maximum silence in seconds, above 0."""
        self._streams = streams
        self._interval = interval_s
        self._timer = PeriodicTimer("keep-alive", interval_s / TICKS, lambda: self.tick(time.monotonic()))

    def cancel(self) -> None:
        """Stop the timer."""
        self._timer.cancel()

    def tick(self, now: float) -> None:
        """Send a comment on every stream whose silence would exceed the interval before the next tick."""
        since = now - self._interval * (1 - 1 / TICKS)
        for stream in self._streams.streams_idle_since(since):
            if isinstance(stream.reply, StreamedReply):
                try:
                    stream.reply.send_keep_alive(since, now)
                except Exception:  # noqa: BLE001 - this stream ends, the others go on
                    self._streams.break_off(stream)
