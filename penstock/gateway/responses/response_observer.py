"""Observes one reply while it is relayed: tokens, usage, errors, end; may strip its usage event."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.gateway.metric_definitions import ITL
from penstock.gateway.responses.error_kind import error_kind
from penstock.gateway.responses.event_reader import (
    EMPTY_EVENT,
    TOKENS_ONLY,
    ContentError,
    ParsedEvent,
    read_error,
    read_event,
    read_reply,
)
from penstock.gateway.responses.event_template import EventParts, EventTemplate
from penstock.gateway.responses.held_bytes import HeldBytes
from penstock.gateway.responses.line_reader import LineParser, read_line
from penstock.gateway.responses.token_usage import CountedTokens, ReportedUsage, UsageFields, read_usage
from penstock.gateway.responses.vector_usage import END_BYTES, usage_in_body
from penstock.streaming.sse_parser import Event, SSEError, SSEParser

_GAP_BOUNDS = ITL.bounds
MAX_ERROR_BYTES = 16 << 10
"""Bytes of an error reply that are read for its type and code. What is longer and says 200 is no error."""
MAX_EXCERPT = 500
"""Bytes of content that are kept of what went wrong, for ``--log-content``."""


ResponseCallback = Callable[[str], None]


def _ignore(id: str) -> None: ...


def _ignore_token() -> None: ...


class EventCounts(NamedTuple):
    """Events with tokens and nothing else."""

    events: int
    size: int
    """Bytes."""
    last_at: float
    itl_bucket_counts: list[int]


@dataclass(slots=True)
class Observation:
    """What was observed so far. Times are seconds of the caller's clock."""

    stream: bool = False
    """Whether the reply is an event stream."""
    first_token_at: float | None = None
    """When the first event with tokens came; roles and comments do not count."""
    last_token_at: float | None = None
    token_events: int = 0
    itl_bucket_counts: list[int] = field(default_factory=lambda: [0] * (len(_GAP_BOUNDS) + 1))
    """Intervals between events with tokens, counted by the buckets of
    :data:`penstock.gateway.metric_definitions.ITL`."""
    usage: ReportedUsage | None = None
    """The latest counts reported; earlier ones are not added."""
    deferred: bool = False
    """The reply is a response that goes on in the background, so that it has no usage yet."""
    response_id: str | None = None
    """Id of the response, in the responses API."""
    error: str | None = None
    """Type and code of the first error in it; empty: it has none of them."""
    may_stop: bool = False
    """Whether the reply may end in order without its terminator: a stored response that is cancelled, or a
    stream of which nothing is known."""
    ended: bool = False
    """The terminator of the stream came, or the whole body of another reply."""
    finished_at_event: int | None = None
    """Events with tokens up to the latest event that gave its choices a finish reason; None: none did."""
    content_problem: str | None = None
    """Why the content cannot be parsed; the bytes are relayed nevertheless. It has none of the content."""
    excerpt: bytes = b""
    """Begin of the error, or of the content that cannot be parsed."""
    unread: str = ""
    """Why the gateway does not read the reply, or no more of it; that is no fault of the server."""

    def note_error(self, error: bytes) -> None:
        """The reply has an error, as JSON."""
        if self.error is None:
            self.error, self.excerpt = error_kind(error), error[:MAX_EXCERPT]

    def note_problem(self, problem: str, content: bytes = b"") -> None:
        """The content cannot be parsed."""
        if self.content_problem is None:
            self.content_problem, self.excerpt = problem, content[:MAX_EXCERPT]

    def give_up(self, reason: str) -> None:
        """No more of the reply is read: it may end as it likes."""
        self.unread, self.may_stop = reason, True

    @property
    def reported_output(self) -> int | None:
        """Output tokens as the server counted them; None if it did not, or not all of a broken stream:
        messages start with an output of one token."""
        output = None if self.usage is None else self.usage.output_tokens
        return None if output is None or not (self.ended or output >= self.token_events) else output

    @property
    def tokens(self) -> CountedTokens:
        """The tokens that count: as the server counted them; else of the output the events with tokens."""
        usage, output = self.usage, self.reported_output
        if usage is None:
            return CountedTokens(output=self.token_events or None)
        if output is None:
            return CountedTokens(usage.input_tokens, usage.cached_tokens, self.token_events or None)
        return CountedTokens(usage.input_tokens, usage.cached_tokens, output, usage.reasoning_tokens)

    def add(self, counts: EventCounts) -> None:
        """Add events with tokens that were observed elsewhere, after the first one."""
        self.token_events += counts.events
        self.last_token_at = counts.last_at
        before = self.itl_bucket_counts
        self.itl_bucket_counts = [
            count + more for count, more in zip(before, counts.itl_bucket_counts, strict=True)
        ]

    @property
    def lacks_end(self) -> bool:
        """Whether something of the stream is missing if it ends here: more than the terminator after a
        finish reason, which some servers leave out."""
        return (
            self.stream
            and not self.may_stop
            and not self.ended
            and self.error is None
            and self.content_problem is None
            and self.finished_at_event != self.token_events
        )


NOTHING_SEEN = Observation()
"""Of no reply; it does not change."""


@dataclass(slots=True)
class StreamObserver:
    """Observes a ``text/event-stream``, or JSON lines.

    With ``strip_usage`` the usage event is removed: the gateway requested it, the client did not. Events are
    then passed on when they are complete, otherwise bytes are passed on as they come.
    """

    strip_usage: bool = False
    on_response: ResponseCallback = _ignore
    """Called with the id of the response that the stream belongs to, in the responses API."""
    known: bool = True
    """Whether the stream is of an API whose events are JSON; of another one nothing can be wrong."""
    held: HeldBytes = field(default_factory=HeldBytes)
    """Bytes of incomplete events, and of replies, that all observers hold together."""
    on_first_token: Callable[[], None] = _ignore_token
    seen: Observation = field(default_factory=lambda: Observation(stream=True))
    lines: bool = False
    """Whether its events are lines (:mod:`penstock.gateway.responses.line_reader`)."""
    _parser: SSEParser | LineParser = field(default_factory=SSEParser)
    _template: EventTemplate = field(default_factory=EventTemplate)
    _between_events: bool = False
    """The next byte starts an event. A copy of the parser's state, since most events bypass the parser."""
    _holds: int = 0
    """Bytes of an incomplete event that are counted in ``held``."""
    _dropped: bool = False
    """The last event was removed."""
    _usage: UsageFields | None = None
    """All counts reported so far."""

    def __post_init__(self) -> None:
        if self.lines:
            self._parser = LineParser()

    def plain_parts(self, chunk: bytes) -> EventParts | None:
        """What ``chunk`` has in common with an earlier event if it is one that differs from it only in its
        text and number, and is not observed in another way. None: it is not."""
        if not (self._between_events and self._template.matches(chunk)):
            return None
        self._dropped = False
        return self._template.parts

    def feed(self, chunk: bytes, now: float) -> bytes:
        """Observe the next bytes of the stream; returns the bytes to pass on."""
        if self._between_events and (count := self._template.count(chunk)):
            for _ in range(count):
                self._count_tokens(now)
            self._dropped = False
            return chunk
        if self.seen.unread:
            return chunk
        try:
            events = self._parser.feed(chunk)
        except SSEError as error:
            return self._give_up(str(error), chunk)
        self._between_events = self._parser.between_events
        if not self.strip_usage:
            for event in events:
                self._read(event, now)
            passed_on = chunk
        else:
            passed_on = b"".join([event.raw for event in events if self._is_kept(event, now)])
        if (self._holds or not self._between_events) and not self._hold(self._parser.pending_bytes):
            return passed_on + self._give_up("replies of many requests are read at the same time", b"")
        return passed_on

    def _hold(self, count: int) -> bool:
        """Count the bytes of an incomplete event; returns whether so many may be held."""
        granted = self.held.reserve_bytes(count - self._holds)
        if granted:
            self._holds = count
        return granted

    def _give_up(self, reason: str, chunk: bytes) -> bytes:
        """Read no more of the stream; returns what is to be passed on of it and the rest of ``chunk``."""
        self.seen.give_up(reason)
        self._between_events = False
        pending, self._parser = self._parser.pending, type(self._parser)()
        self.close()
        return pending if self.strip_usage else chunk

    def close(self) -> None:
        """Nothing more will come."""
        self.held.release_bytes(self._holds)
        self._holds = 0

    def finish(self, now: float) -> bytes:
        """The server has ended the stream in order; returns the bytes held back.

        A last event without its empty line is read too if it is complete: some servers end streams so. Some
        leave the terminator out.
        """
        pending = self._parser.pending
        seen = self.seen
        meaning = EMPTY_EVENT
        if pending:
            problem, excerpt = seen.content_problem, seen.excerpt
            for event in self._parser.feed(b"\n\n"):
                meaning = self._read(event, now)
            if problem is None:
                seen.content_problem, seen.excerpt = None, excerpt  # a truncated event is no fault of content
        self.close()
        if seen.finished_at_event == seen.token_events:
            seen.ended = True
        return pending if self.strip_usage and not meaning.usage_only else b""

    def _is_kept(self, event: Event, now: float) -> bool:
        """Whether an event is passed on: not the usage event, and not the rest of its line ends."""
        usage_only = self._read(event, now).usage_only
        rest = self._dropped and event.raw == b"\n"
        self._dropped = usage_only
        return not usage_only and not rest

    def _read(self, event: Event, now: float) -> ParsedEvent:
        if event.data is None:
            self._read_bare(event.raw)
            return EMPTY_EVENT
        if self._template.matches(event.raw):
            self._count_tokens(now)
            return TOKENS_ONLY
        seen = self.seen
        try:
            read = read_line if self.lines else read_event
            meaning = read(event.data, event.name)
        except ContentError as error:
            if self.known and not seen.ended:
                seen.note_problem(f"an event is {error}", event.data)
            return EMPTY_EVENT
        if seen.ended:  # what follows the terminator counts nothing
            return meaning
        if meaning.tokens:
            self._count_tokens(now)
            if meaning is TOKENS_ONLY:
                self._template.learn(event.raw)
                return meaning
        if meaning.finish:
            seen.finished_at_event = seen.token_events
        if meaning.usage is not None:
            self._usage = meaning.usage if self._usage is None else self._usage.merged_with(meaning.usage)
            seen.usage = read_usage(self._usage)
        if meaning.response_id is not None and seen.response_id is None:
            seen.response_id = meaning.response_id
            self.on_response(meaning.response_id)
        if meaning.error is not None:
            seen.note_error(meaning.error)
        if meaning.end:
            seen.ended = True
            self._template = EventTemplate()  # without it nothing bypasses this method
        return meaning

    def _read_bare(self, raw: bytes) -> None:
        """What is no event may be an error: Gemini's clients look for it there."""
        bare = self.known and not self.seen.ended and len(raw) <= MAX_ERROR_BYTES and raw.lstrip()[:1] == b"{"
        if bare and (error := read_error(raw)) is not None:
            self.seen.note_error(error)

    def _count_tokens(self, now: float) -> None:
        seen = self.seen
        seen.token_events += 1
        if seen.last_token_at is None:
            seen.first_token_at = now
            self.on_first_token()
        else:
            seen.itl_bucket_counts[bisect_left(_GAP_BOUNDS, now - seen.last_token_at)] += 1
        seen.last_token_at = now


@dataclass(slots=True)
class ReplyObserver:
    """Observes a body that is not streamed. With ``json`` it must be JSON; it is parsed when complete. Of an
    ``error`` type and code are read if it has them. A ``result`` may be of any kind; a short one may turn out
    to be an error. One with ``vectors`` is searched for its usage, whatever its size."""

    json: bool = True
    error: bool = False
    result: bool = False
    vectors: bool = False
    on_response: ResponseCallback = _ignore
    """Called with the id of the response, in the responses API."""
    max_bytes: int = 64 << 20
    held: HeldBytes = field(default_factory=HeldBytes)
    """Bytes of incomplete events, and of replies, that all observers hold together."""
    seen: Observation = field(default_factory=Observation)
    _body: bytearray = field(default_factory=bytearray)
    """Of an error or a result its beginning."""
    _end: bytes = b""
    """The last bytes of vectors."""

    def feed(self, chunk: bytes, now: float) -> bytes:
        """Observe the next bytes; all of them are passed on."""
        if self.vectors:
            self._end = (chunk if len(chunk) >= END_BYTES else self._end + chunk)[-END_BYTES:]
        if self.error or self.result:
            self._body += chunk[: MAX_ERROR_BYTES + 1 - len(self._body)]
        elif self.json and not self.seen.unread:
            if len(self._body) + len(chunk) > self.max_bytes:
                self._give_up(f"a reply of more than {self.max_bytes} bytes")
            elif not self.held.reserve_bytes(len(chunk)):
                self._give_up("replies of many requests are read at the same time")
            else:
                self._body += chunk
        return chunk

    def _give_up(self, reason: str) -> None:
        self.seen.give_up(reason)
        self.close()

    def close(self) -> None:
        """Nothing more will come."""
        if self.json:
            self.held.release_bytes(len(self._body))
        self._body.clear()

    def finish(self, now: float) -> bytes:
        """The body is complete."""
        seen, body = self.seen, bytes(self._body)
        if self.error:
            seen.note_error(body)
        elif self.result:
            self._read_result(body)
        elif self.json and not seen.unread:
            try:
                self._read(read_reply(body))
            except ContentError as error:
                seen.note_problem(f"the reply is {error}", body)
        seen.ended = True
        self.close()
        return b""

    def _read_result(self, begin: bytes) -> None:
        seen = self.seen
        if self.vectors and seen.usage is None:
            seen.usage = usage_in_body(begin, self._end)
            if seen.usage is not None:
                return  # it is no error
        if len(begin) <= MAX_ERROR_BYTES and (error := read_error(begin)) is not None:
            seen.note_error(error)

    def _read(self, meaning: ParsedEvent) -> None:
        seen = self.seen
        seen.usage = None if meaning.usage is None else read_usage(meaning.usage)
        seen.deferred = meaning.deferred
        if meaning.error is not None:
            seen.note_error(meaning.error)
        if meaning.response_id is not None:
            seen.response_id = meaning.response_id
            self.on_response(meaning.response_id)
