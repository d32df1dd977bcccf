"""What becomes of streams whose engine is gone: they go on on another one, wait for one, or end truthfully.

An engine that is asked to go on gets the prompt with all delivered tokens behind it, and how many of these
are output. Limits, penalties, seed and position go on from there, so its tokens are those the lost engine
would have given. Text, stop strings and the connection never left the API server.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable
from typing import TypeAlias

import msgspec

from penstock.streaming.output_processor import OutputProcessor
from penstock.streaming.stream import Stream, StreamError
from penstock.wire.arrays import I32
from penstock.wire.messages import Submit

log = logging.getLogger(__name__)

MOST_SETBACKS = 2
"""A stream has a setback when the engine that resumed it is lost before it gave it a token: it may be what
ends engines. With a setback it goes on only while no other such stream does, so that the next loss tells
which one it is; with so many it is given up. Any token clears it."""

Entry: TypeAlias = tuple[float, Stream]
"""A stream that no engine runs, and when it has waited too long."""


class Resumption:
    """Streams between two engines. Times are seconds of any monotonic clock."""

    def __init__(
        self,
        streams: OutputProcessor,
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
        self._waiting: deque[Entry] = deque()
        """In order of their time; streams that have left are skipped."""
        self._suspects: deque[Entry] = deque()
        """Streams with a setback, which go on one by one."""
        self._trial: Stream | None = None
        """The suspect that goes on."""

    # -- events

    def on_lost(self, rank: int, message: str, now: float) -> None:
        """Engine ``rank`` is gone; ``message`` says why to the clients of streams that cannot go on."""
        orphans = self._streams.detach_engine(rank)
        if not orphans:
            return
        before = self._outcomes.copy()
        if self._closed or self._timeout_s == 0:
            for stream in orphans:
                self._end(stream, "ended", message)
        else:
            for stream in orphans:
                self._judge(stream, message)
            self._resume([(now + self._timeout_s, stream) for stream in orphans])
        if not self._closed:
            waiting = len(self._waiting) + len(self._suspects)
            became = {**(self._outcomes - before), "waiting": waiting}
            told = ", ".join(f"{count} {outcome}" for outcome, count in sorted(became.items()))
            log.warning("engine %d lost with %d streams: %s", rank, len(orphans), told)

    def on_engine(self) -> None:
        """An engine takes streams again."""
        waiting, self._waiting = self._waiting, deque()
        self._resume(list(waiting))

    def tick(self, now: float) -> None:
        """Go on with the next suspect; end the streams that have waited too long for an engine."""
        self._try_suspect()
        self._expire(self._waiting, now)
        if self._trial is None:  # none goes on, for want of an engine
            self._expire(self._suspects, now)

    def close(self, message: str) -> None:
        """The server stops: what waits ends, and so do streams whose engine is left from here on."""
        self._closed = True
        for entries in (self._waiting, self._suspects):
            while entries:
                self._end(entries.popleft()[1], "ended", message)

    # -- streams

    def _judge(self, stream: Stream, message: str) -> None:
        """Give a stream up that may be what ends engines."""
        if stream.resumed_at != self._streams.num_delivered(stream):
            stream.failed_resumes = 0
            return
        stream.failed_resumes += 1
        if stream.failed_resumes == MOST_SETBACKS:
            self._end(
                stream,
                "given_up",
                f"This request is not tried again: {MOST_SETBACKS} engines that resumed it ended before its "
                f"next token, so it may be the cause. The last one: {message}",
            )

    def _resume(self, entries: list[Entry]) -> None:
        self._suspects += [entry for entry in entries if entry[1].failed_resumes]
        self._waiting += self._go_on([entry for entry in entries if not entry[1].failed_resumes])
        self._try_suspect()

    def _go_on(self, entries: list[Entry]) -> list[Entry]:
        """Have engines go on with streams; returns those for which there is none.

        Streams that ended meanwhile, as other choices of a request that failed, are skipped.
        """
        entries = [entry for entry in entries if self._streams.is_unassigned(entry[1])]
        if not entries:
            return []
        delivered = self._streams.delivered_tokens([stream for _, stream in entries])
        left = []
        for entry, tokens in zip(entries, delivered, strict=True):
            stream = entry[1]
            if self._submit(stream, _continuation(stream, tokens)):
                stream.resumed_at = len(tokens)
                self._outcomes["resumed"] += 1
            else:
                left.append(entry)
        return left

    def _try_suspect(self) -> None:
        """Go on with the next suspect when the one before it has had a token, has ended or has left."""
        if self._trial is not None and self._awaits_token(self._trial):
            return
        self._trial = None
        while self._suspects and self._trial is None:
            entry = self._suspects.popleft()
            if self._go_on([entry]):
                self._suspects.appendleft(entry)
                return
            if self._awaits_token(entry[1]):
                self._trial = entry[1]

    def _awaits_token(self, stream: Stream) -> bool:
        """Whether an engine that resumed the stream has not given it a token yet."""
        return self._streams.is_running(stream) and self._streams.num_delivered(stream) == stream.resumed_at

    def _expire(self, entries: deque[Entry], now: float) -> None:
        while entries and entries[0][0] <= now:
            self._end(
                entries.popleft()[1],
                "expired",
                f"The engine that ran this request is gone, and no other was ready within "
                f"{self._timeout_s:g} s (--resume-timeout).",
            )

    def _end(self, stream: Stream, outcome: str, message: str) -> None:
        if self._streams.is_unassigned(stream):
            self._outcomes[outcome] += 1
            code = "server_stopped" if self._closed else "engine_died"
            self._streams.end(stream, StreamError(503, code, message))


def _continuation(stream: Stream, delivered: I32) -> Submit:
    """The stream's request as of its next token. Logprobs of the prompt came with its first one, and a KV
    cache that was fetched for the prompt is gone."""
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
        kv_transfer_params=None,
    )
