"""Stream intervals: after how many tokens, or how much time, an engine sends a stream's tokens.

The engine applies the interval, so a coarser one reduces all later work: frames, rows, events, writes. The
first and the last tokens are always sent immediately.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.config.serve import ServeConfig
from penstock.generation.request.schemas import GenerateRequest
from penstock.http.errors import refused


class StreamInterval(NamedTuple):
    """A row has at least ``tokens`` tokens (half of them if they are many, and another stream's row is due)
    and follows the previous row after at least ``ms`` ms."""

    tokens: int
    ms: int = 0


EVERY_TOKEN = StreamInterval(1)
NOT_STREAMED = StreamInterval(256)
"""Interval of streams that are not streamed to a client: few rows, and little to regenerate if the engine is
lost."""


class IntervalPolicy:
    """Chooses the intervals of one server's streams."""

    def __init__(self, config: ServeConfig) -> None:
        if config.stream_interval_ms is not None:
            self._default = StreamInterval(1, config.stream_interval_ms)
        elif config.stream_interval == "auto":
            self._default = EVERY_TOKEN
        else:
            self._default = StreamInterval(config.stream_interval)

    def interval(self, request: GenerateRequest, *, streamed: bool) -> StreamInterval:
        """The interval of a request. ``streamed``: its tokens are needed before its end.

        Raises ApiError for a request with both a number of tokens and a time.
        """
        tokens, ms = request.stream_interval, request.stream_interval_ms
        if tokens is not None and ms is not None:
            raise refused(
                "Events are paced by `stream_interval` or by `stream_interval_ms`, not by both.",
                "stream_interval_ms",
                ms,
            )
        if not streamed:
            return NOT_STREAMED
        if tokens is not None:
            return StreamInterval(tokens)
        if ms is not None:
            return StreamInterval(1, ms)
        return self._default
