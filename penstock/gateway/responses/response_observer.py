"""Watches one reply go by: first token, tokens, usage, errors, end; and what of it the client is to get."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from penstock.gateway.metric_definitions import ITL
from penstock.gateway.responses.event_reader import (
    EMPTY_EVENT,
    TOKENS_ONLY,
    ContentError,
    ParsedEvent,
    read_event,
    read_reply,
)
from penstock.gateway.responses.event_template import EventTemplate
from penstock.gateway.responses.token_usage import TokenUsage
from penstock.streaming.sse_parser import Event, SSEError, SSEParser

_GAP_BOUNDS = ITL.bounds


@dataclass(slots=True)
class Observation:
    """What was seen so far. Times are seconds of the caller's clock."""

    stream: bool = False
    """It is an event stream."""
    first_token_at: float | None = None
    """When the first event with tokens came: not the first byte, a role, a comment."""
    last_token_at: float | None = None
    token_events: int = 0
    itl_bucket_counts: list[int] = field(default_factory=lambda: [0] * (len(_GAP_BOUNDS) + 1))
    """How many of the times between events with tokens are in each bucket of :data:`.names.ITL`."""
    usage: TokenUsage | None = None
    """The last one said; statements before it are not added up."""
    error: bytes | None = None
    """JSON of the first error event."""
    ended: bool = False
    """The protocol's terminator came."""
    content_problem: str | None = None
    """Why the content cannot be understood; the bytes are relayed nevertheless."""


@dataclass(slots=True)
class StreamObserver:
    """Of a ``text/event-stream``.

    With ``strip_usage`` the event that carries nothing but usage is taken out: the gateway asked for it,
    the client did not. Then an event is passed on once it is complete; otherwise every byte at once.
    """

    strip_usage: bool = False
    seen: Observation = field(default_factory=lambda: Observation(stream=True))
    _parser: SSEParser = field(default_factory=SSEParser)
    _template: EventTemplate = field(default_factory=EventTemplate)
    _between_events: bool = False
    """What comes next begins an event: the parser says so, which most events do not reach."""
    _broken: bool = False
    """It cannot be cut into events any more."""
    _dropped: bool = False
    """The last event was not passed on."""

    def feed(self, chunk: bytes, now: float) -> bytes:
        """The next bytes of the stream; returns what to pass on."""
        if self._between_events and self._template.matches(chunk):
            self._count_tokens(now)
            self._dropped = False
            return chunk
        if self._broken:
            return chunk
        held = self._parser.pending if self.strip_usage else b""
        try:
            events = self._parser.feed(chunk)
            self._between_events = self._parser.between_events
        except SSEError as error:
            self._broken, self._between_events = True, False
            self.seen.content_problem = str(error)
            return held + chunk
        if not self.strip_usage:
            for event in events:
                self._read(event, now)
            return chunk
        return b"".join([event.raw for event in events if self._is_kept(event, now)])

    def finish(self, now: float) -> bytes:
        """The server has ended the stream in order; returns what was held back.

        An event whose empty line is missing is read as well where it is whole: some servers end so.
        """
        pending = self._parser.pending
        seen = self.seen
        if not pending or self._broken:
            return b""
        malformed = seen.content_problem
        meaning = EMPTY_EVENT
        for event in self._parser.feed(b"\n\n"):
            meaning = self._read(event, now)
        seen.content_problem = malformed  # an event that was cut off says nothing about the content
        return pending if self.strip_usage and not meaning.usage_only else b""

    def _is_kept(self, event: Event, now: float) -> bool:
        """Not the usage event, nor what is left of its line ends."""
        usage_only = self._read(event, now).usage_only
        rest = self._dropped and event.raw == b"\n"
        self._dropped = usage_only
        return not usage_only and not rest

    def _read(self, event: Event, now: float) -> ParsedEvent:
        if event.data is None:
            return EMPTY_EVENT
        if self._template.matches(event.raw):
            self._count_tokens(now)
            return TOKENS_ONLY
        seen = self.seen
        try:
            meaning = read_event(event.data, event.name)
        except ContentError as error:
            if seen.content_problem is None:
                seen.content_problem = str(error)
            return EMPTY_EVENT
        if meaning.tokens:
            self._count_tokens(now)
            if meaning is TOKENS_ONLY:
                self._template.learn(event.raw)
                return meaning
        if meaning.usage is not None:
            seen.usage = meaning.usage if seen.usage is None else seen.usage.merged_with(meaning.usage)
        if meaning.error is not None and seen.error is None:
            seen.error = meaning.error
        if meaning.end:
            seen.ended = True
        return meaning

    def _count_tokens(self, now: float) -> None:
        seen = self.seen
        seen.token_events += 1
        if seen.last_token_at is None:
            seen.first_token_at = now
        else:
            seen.itl_bucket_counts[bisect_left(_GAP_BOUNDS, now - seen.last_token_at)] += 1
        seen.last_token_at = now


@dataclass(slots=True)
class ReplyObserver:
    """Of a body that is not streamed. ``json`` says whether it must be JSON; it is read when it is whole."""

    json: bool = True
    max_bytes: int = 64 << 20
    seen: Observation = field(default_factory=Observation)
    _body: bytearray = field(default_factory=bytearray)

    def feed(self, chunk: bytes, now: float) -> bytes:
        """The next bytes; all of them are passed on."""
        if self.json and len(self._body) <= self.max_bytes:
            self._body += chunk
        return chunk

    def finish(self, now: float) -> bytes:
        """The body is whole."""
        seen = self.seen
        if self.json and len(self._body) > self.max_bytes:
            seen.content_problem = f"a reply of more than {self.max_bytes} bytes"
        elif self.json:
            try:
                meaning = read_reply(bytes(self._body))
                seen.usage, seen.error = meaning.usage, meaning.error
            except ContentError as error:
                seen.content_problem = str(error)
        seen.ended = True
        self._body.clear()
        return b""
