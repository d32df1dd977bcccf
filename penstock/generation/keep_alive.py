"""Comments on event streams that are silent, so that no proxy or client takes them for dead."""

from __future__ import annotations

import asyncio
import time

from penstock.generation.streamed import StreamedReply
from penstock.streaming.output_processor import OutputProcessor

TICKS = 4
"""Looks at the streams per interval: a stream is silent for at most the interval, and for at least three
quarters of it, before its client gets a comment."""


class KeepAlive:
    """One timer for all streams of a process; a tick touches only those that are silent."""

    def __init__(self, streams: OutputProcessor, interval_s: float) -> None:
        """``interval_s``: longest silence, above 0."""
        self._streams = streams
        self._interval = interval_s
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(interval_s / TICKS, self._on_timer)

    def cancel(self) -> None:
        """Ends the timer."""
        self._timer.cancel()

    def _on_timer(self) -> None:
        self.tick(time.monotonic())
        self._timer = self._loop.call_later(self._interval / TICKS, self._on_timer)

    def tick(self, now: float) -> None:
        """Sends a comment on every stream that would be silent for too long by the next tick."""
        since = now - self._interval * (1 - 1 / TICKS)
        for stream in self._streams.streams_idle_since(since):
            if isinstance(stream.reply, StreamedReply):
                stream.reply.send_keep_alive(since, now)
