"""Sends comments on silent event streams, so that proxies and clients do not time out."""

from __future__ import annotations

import asyncio
import time

from penstock.generation.streamed import StreamedReply
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
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(interval_s / TICKS, self._on_timer)

    def cancel(self) -> None:
        """Stop the timer."""
        self._timer.cancel()

    def _on_timer(self) -> None:
        self.tick(time.monotonic())
        self._timer = self._loop.call_later(self._interval / TICKS, self._on_timer)

    def tick(self, now: float) -> None:
        """Send a comment on every stream whose silence would exceed the interval before the next tick."""
        since = now - self._interval * (1 - 1 / TICKS)
        for stream in self._streams.streams_idle_since(since):
            if isinstance(stream.reply, StreamedReply):
                stream.reply.send_keep_alive(since, now)
