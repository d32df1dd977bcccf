"""When a stream's tokens leave its engine: after so many tokens, or after so much time.

The engine applies the interval, so all later work (frames, the loop over rows, events, writes) costs less the
coarser the interval. The first token and the last ones are always sent at once.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.config.options import ServeConfig
from penstock.generation.request_schemas import GenerateRequest
from penstock.http.errors import refused


class StreamInterval(NamedTuple):
    """A row is sent when it has at least ``tokens`` tokens and ``ms`` milliseconds after the one before."""

    tokens: int
    ms: int = 0


EVERY_TOKEN = StreamInterval(1)
NOT_STREAMED = StreamInterval(256)
"""Of streams nobody watches: few rows, and not much to generate again when their engine is lost."""


class IntervalPolicy:
    """The paces of one server's streams."""

    def __init__(self, config: ServeConfig) -> None:
        self._least = config.min_stream_interval
        if config.stream_interval_ms is not None:
            self._default = StreamInterval(self._least, config.stream_interval_ms)
        elif config.stream_interval == "auto":
            self._default = StreamInterval(self._least)
        else:
            self._default = StreamInterval(config.stream_interval)

    def interval(self, request: GenerateRequest, *, streamed: bool) -> StreamInterval:
        """The pace of a request. ``watched``: its tokens are looked at before its end.

        Raises ApiError for a request that names both a number of tokens and a time.
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
            return StreamInterval(max(tokens, self._least))
        if ms is not None:
            return StreamInterval(self._least, ms)
        return self._default
