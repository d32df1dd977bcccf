"""Resumes the streams of an engine that died on another engine, or ends them with an error.

The other engine gets the prompt followed by all delivered tokens, and their number. Limits, penalties, seed
and position continue from there, so it generates the tokens that the lost engine would have generated. Text,
stop strings and the client's connection stay in the API server.
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
from penstock.wire.messages import PAUSED, SLEEPING, Submit
from penstock.wire.submits import without_inputs

log = logging.getLogger(__name__)

MAX_FAILED_RESUMES = 2
"""A resume fails if the engine is lost after it began to run the stream and before it sends MIN_PROGRESS
tokens of it: the stream may have crashed it. Streams that only wait in its queue are not the cause. After a
failed resume the stream is quarantined: such streams are resumed one at a time, so that another loss
identifies the cause. A stream with this many failed resumes is ended. Progress resets the count."""
MIN_PROGRESS = 2
"""An engine sends a stream's first token at once, so only a second one shows that it went on."""
RESUMED_INTERVAL = 16
"""Maximum tokens per row of a resumed stream, and with it the tokens that another loss costs: without that a
stream whose rows are far apart would advance by one token per engine that is lost. Suspects have rows of one
token."""

RETRY_S = 1.0
"""Time until a stream is submitted again that an engine had no memory for."""

Entry: TypeAlias = tuple[float, Stream]
"""When a stream that no engine runs expires, and the stream."""


class Resumption:
    """The streams that no engine runs. Times are seconds of any monotonic clock."""

    def __init__(
        self,
        streams: OutputProcessor,
        timeout_s: float,
        submit: Callable[[Stream, Submit], bool],
        outcomes: Counter[str],
        closed: Callable[[], str],
    ) -> None:
        """``timeout_s``: how long a stream waits for an engine; 0: streams end with their engine.

        ``submit`` submits a stream to any engine; False if none accepts it. ``outcomes`` counts interrupted
        streams by outcome: resumed, expired, given_up, ended. ``closed()``: why no engine will accept
        any, SLEEPING or PAUSED; empty if some may.
        """
        self._streams = streams
        self._timeout_s = timeout_s
        self._submit = submit
        self._outcomes = outcomes
        self._closed_by = closed
        self._closed = False
        self._waiting: deque[Entry] = deque()
        """Ordered by time; streams that have ended meanwhile are skipped."""
        self._quarantined: deque[Entry] = deque()
        """Streams with a failed resume, which are resumed one at a time."""
        self._probe: Stream | None = None
        """The quarantined stream that was resumed last."""
        self._retry_at: float | None = None
        """When streams that were refused are submitted again; None: none was."""

    # -- events

    def on_lost(self, rank: int, message: str, now: float, accepted: int) -> None:
        """Engine ``rank`` is gone. ``message``: the reason, for clients of streams that are not resumed.
        ``accepted``: number of streams that it had taken from its connection before its last step that ended.
        """
        orphans = self._streams.detach_engine(rank)
        if not orphans:
            return
        before = self._outcomes.copy()
        if self._closed or self._timeout_s == 0:
            for stream in orphans:
                self._end(stream, "ended", message)
        else:
            for stream in orphans:
                self._count_failed_resume(stream, message, accepted)
            self._resume([(now + self._timeout_s, stream) for stream in orphans])
        if not self._closed:
            waiting = len(self._waiting) + len(self._quarantined)
            outcomes = {**(self._outcomes - before), "waiting": waiting}
            counts = ", ".join(f"{count} {outcome}" for outcome, count in sorted(outcomes.items()))
            log.warning("engine %d lost with %d streams: %s", rank, len(orphans), counts)

    def on_refused(self, stream: Stream, now: float) -> None:
        """The engine that was to resume the stream has no memory for it."""
        self._streams.detach(stream)
        if self._closed:
            self._end(stream, "ended", "The server stops.")
            return
        waiting = self._quarantined if stream.failed_resumes else self._waiting
        waiting.append((now + self._timeout_s, stream))
        self._retry_at = now + RETRY_S

    def on_engine(self) -> None:
        """An engine accepts streams again."""
        waiting, self._waiting = self._waiting, deque()
        self._resume(list(waiting))

    @property
    def waits(self) -> bool:
        """Whether :meth:`tick` has something to do, now or later."""
        return bool(self._waiting or self._quarantined or self._retry_at is not None)

    def tick(self, now: float) -> None:
        """Resume the next quarantined stream and streams that were refused, and end the streams that have
        expired, or all if the engines are to take none."""
        closed = self._closed_by()
        if closed == SLEEPING:
            self._end_waiting("No engine runs this request, and the server was put to sleep.", SLEEPING)
        elif closed == PAUSED:
            self._abort_waiting()
        if self._retry_at is not None and now >= self._retry_at:
            self._retry_at = None
            self.on_engine()
        if self._retry_at is None:
            self._resume_quarantined()
        self._expire(self._waiting, now)
        if self._probe is None:  # none was resumed, for lack of an engine
            self._expire(self._quarantined, now)

    def close(self, message: str) -> None:
        """The server stops: waiting streams end, and so do those of engines lost from here on."""
        self._closed = True
        self._end_waiting(message)

    # -- streams

    def _count_failed_resume(self, stream: Stream, message: str, accepted: int) -> None:
        """Count a failed resume of a stream that has just lost its engine, and end one with too many."""
        if not self._awaits_progress(stream):
            stream.failed_resumes = 0
            return
        if not self._may_have_run(stream, accepted):
            return
        stream.failed_resumes += 1
        if stream.failed_resumes == MAX_FAILED_RESUMES:
            self._end(
                stream,
                "given_up",
                f"This request is not tried again: {MAX_FAILED_RESUMES} engines that resumed it ended before "
                f"its next token, so it may be the cause. The last one: {message}",
            )

    def _resume(self, entries: list[Entry]) -> None:
        self._quarantined += [entry for entry in entries if entry[1].failed_resumes]
        self._waiting += self._go_on([entry for entry in entries if not entry[1].failed_resumes])
        self._resume_quarantined()

    def _go_on(self, entries: list[Entry]) -> list[Entry]:
        """Resume streams on engines; return those that no engine accepts.

        Skips streams that have ended meanwhile, such as other choices of a failed request.
        """
        entries = [entry for entry in entries if self._streams.is_unassigned(entry[1])]
        if not entries:
            return []
        delivered = self._streams.delivered_tokens([stream for _, stream in entries])
        left = []
        for entry, tokens in zip(entries, delivered, strict=True):
            stream = entry[1]
            position = self._streams.num_delivered(stream)
            try:
                submitted = self._submit(stream, _continuation(stream, tokens, position))
            except Exception:  # noqa: BLE001 - this stream ends, the others go on
                self._streams.break_off(stream)
                continue
            if submitted:
                stream.resumed_at = position
                self._outcomes["resumed"] += 1
            else:
                left.append(entry)
        return left

    def _resume_quarantined(self) -> None:
        """Resume the next quarantined stream, once the one before has made progress or has ended."""
        probe = self._probe
        if probe is not None and self._streams.is_running(probe) and self._awaits_progress(probe):
            return
        self._probe = None
        waiting: list[Entry] = []
        while self._quarantined and self._probe is None:
            entry = self._quarantined.popleft()
            if self._go_on([entry]):
                waiting.append(entry)
                if entry[1].pinned_rank is None and not _has_adapter(entry[1]):  # no engine accepts any
                    break
            elif self._streams.is_running(entry[1]):
                self._probe = entry[1]
        self._quarantined.extendleft(reversed(waiting))

    def _awaits_progress(self, stream: Stream) -> bool:
        """Whether the stream was resumed and has not made progress since."""
        if stream.resumed_at < 0:
            return False
        return self._streams.num_delivered(stream) - stream.resumed_at < MIN_PROGRESS

    def _may_have_run(self, stream: Stream, accepted: int) -> bool:
        """Whether the lost engine may have run the resumed stream: it said so, or has not ended a step since
        it took the stream."""
        delivered = self._streams.num_delivered(stream) > stream.resumed_at
        return stream.started or delivered or stream.submit_number > accepted

    def _expire(self, entries: deque[Entry], now: float) -> None:
        while entries and entries[0][0] <= now:
            stream = entries.popleft()[1]
            within = f"within {self._timeout_s:g} s (--resume-timeout)"
            if stream.pinned_rank is None:
                other = "other"
                if stream.request is not None and stream.request.adapter is not None:
                    other = f"engine with the adapter {stream.request.adapter!r}"
                message = f"The engine that ran this request is gone, and no {other} was ready {within}."
            else:
                message = (
                    f"Engine {stream.pinned_rank}, the only one that may run this request "
                    f"(X-data-parallel-rank), is gone and was not back {within}."
                )
            self._end(stream, "expired", message)

    def _abort_waiting(self) -> None:
        """End all with what they have, as engines do that are paused."""
        for entries in (self._waiting, self._quarantined):
            while entries:
                stream = entries.popleft()[1]
                if self._streams.is_unassigned(stream):
                    self._outcomes["ended"] += 1
                    self._streams.abort_unassigned(stream)

    def _end_waiting(self, message: str, code: str = "") -> None:
        for entries in (self._waiting, self._quarantined):
            while entries:
                self._end(entries.popleft()[1], "ended", message, code)

    def _end(self, stream: Stream, outcome: str, message: str, code: str = "") -> None:
        """``code``: of the error; empty: it says whether the server or the engine has ended."""
        if self._streams.is_unassigned(stream):
            self._outcomes[outcome] += 1
            code = code or ("server_stopped" if self._closed else "engine_died")
            self._streams.end(stream, StreamError(503, code, message))


def _has_adapter(stream: Stream) -> bool:
    """Whether only engines with its adapter may run the stream."""
    return stream.request is not None and stream.request.adapter is not None


def _continuation(stream: Stream, delivered: I32, position: int) -> Submit:
    """The request for the stream's next token onwards, or for its inputs from ``position`` on. It has no
    prompt logprobs, which came before the first token, and no KV transfer parameters, since the KV cache
    fetched for the prompt is lost."""
    request = stream.request
    assert request is not None  # every stream is opened to be submitted
    request = msgspec.structs.replace(request, resubmitted=True)
    if stream.failed_resumes:
        request = msgspec.structs.replace(request, interval=1, interval_ms=0)
    elif request.interval > RESUMED_INTERVAL:
        request = msgspec.structs.replace(request, interval=RESUMED_INTERVAL)
    if request.pooling is not None:
        return without_inputs(request, position)
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
