"""What becomes of streams whose engine is gone: they go on on another one, wait for one, or end truthfully.

An engine that is asked to go on gets the prompt with all delivered tokens behind it, and how many of these
are output. Limits, penalties, seed and position go on from there, so its tokens are those the lost engine
would have given. Text, stop strings and the connection never left the API server.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable

import msgspec

from ..streaming.stream import Stream, StreamError
from ..streaming.table import StreamTable
from ..wire.frames import I32
from ..wire.messages import Submit

log = logging.getLogger(__name__)

MOST_SETBACKS = 2
"""A stream is given up when this many engines in a row that resumed it were lost before they gave it a token:
it may be what ends them. Any token in between clears it, so engines may be lost under a long stream."""


class Resumption:
    """Streams between two engines. Times are seconds of any monotonic clock."""

    def __init__(
        self,
        streams: StreamTable,
        timeout_s: float,
        submit: Callable[[Stream, Submit], bool],
        outcomes: Counter[str],
    ) -> None:
        """``timeout_s``: how long a stream waits for an engine; 0: streams end with their engine.

        ``submit`` gives a stream to an engine; False when there is none to take it. ``outcomes`` counts
        streams that were interrupted by what became of them: resumed, expired, given_up, ended.
        """
        self._streams = streams
        self._timeout_s = timeout_s
        self._submit = submit
        self._outcomes = outcomes
        self._closed = False
        self._waiting: deque[tuple[float, Stream]] = deque()
        """With the time at which each has waited too long, in that order. Those that left are skipped."""

    # -- events

    def on_lost(self, rank: int, message: str, now: float) -> None:
        """Engine ``rank`` is gone; ``message`` says why to the clients of streams that cannot go on."""
        orphans = self._streams.orphan(rank)
        if not orphans:
            return
        before = self._outcomes.copy()
        for stream in orphans:
            if self._closed or self._timeout_s == 0:
                self._end(stream, "ended", message)
            else:
                self._judge(stream, message)
        self._resume([(now + self._timeout_s, stream) for stream in orphans])
        if not self._closed:
            became = {**(self._outcomes - before), "waiting": len(self._waiting)}
            told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(became.items()))
            log.warning("engine %d lost with %d streams: %s", rank, len(orphans), told)

    def on_engine(self) -> None:
        """An engine takes streams again."""
        waiting, self._waiting = self._waiting, deque()
        self._resume(list(waiting))

    def tick(self, now: float) -> None:
        """End the streams that have waited too long."""
        while self._waiting and self._waiting[0][0] <= now:
            _, stream = self._waiting.popleft()
            self._end(
                stream,
                "expired",
                f"The engine that ran this request is gone, and no other was ready within "
                f"{self._timeout_s:g} s (--resume-timeout).",
            )

    def close(self, message: str) -> None:
        """The server stops: what waits ends, and so do streams whose engine is left from here on."""
        self._closed = True
        while self._waiting:
            _, stream = self._waiting.popleft()
            self._end(stream, "ended", message)

    # -- streams

    def _judge(self, stream: Stream, message: str) -> None:
        """Give a stream up that may be what ends engines."""
        if stream.resumed_at != self._streams.generated(stream):
            stream.setbacks = 0
            return
        stream.setbacks += 1
        if stream.setbacks == MOST_SETBACKS:
            self._end(
                stream,
                "given_up",
                f"This request is not tried again: {MOST_SETBACKS} engines that resumed it ended before its "
                f"next token, so it may be the cause. The last one: {message}",
            )

    def _resume(self, streams: list[tuple[float, Stream]]) -> None:
        """Streams that ended meanwhile, as other choices of a request that failed, are skipped."""
        streams = [entry for entry in streams if self._streams.waits(entry[1])]
        delivered = self._streams.delivered([stream for _, stream in streams])
        for entry, tokens in zip(streams, delivered, strict=True):
            stream = entry[1]
            if self._submit(stream, _continuation(stream, tokens)):
                stream.resumed_at = len(tokens)
                self._outcomes["resumed"] += 1
            else:
                self._waiting.append(entry)

    def _end(self, stream: Stream, outcome: str, message: str) -> None:
        if self._streams.waits(stream):
            self._outcomes[outcome] += 1
            code = "server_stopped" if self._closed else "engine_died"
            self._streams.end(stream, StreamError(503, code, message))


def _continuation(stream: Stream, delivered: I32) -> Submit:
    """The stream's request as of its next token. Logprobs of the prompt came with its first one."""
    request = stream.request
    assert request is not None  # every stream is opened to be submitted
    if not len(delivered):
        return request
    sampling = request.sampling
    if sampling.prompt_logprobs >= 0:
        sampling = msgspec.structs.replace(sampling, prompt_logprobs=-1)
    return msgspec.structs.replace(
        request,
        prompt=request.prompt + delivered.astype("<i4").tobytes(),
        sampling=sampling,
        resumed=len(delivered),
    )
