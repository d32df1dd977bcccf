"""One attempt of a request at one endpoint: relays the reply to the client and observes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

from penstock.gateway.relay.plain_events import PlainEvents
from penstock.gateway.responses.expected_reply import ExpectedReply, make_observer
from penstock.gateway.responses.held_bytes import HeldBytes
from penstock.gateway.responses.outcome import TransportResult
from penstock.gateway.responses.response_observer import (
    NOTHING_SEEN,
    Observation,
    ReplyObserver,
    StreamObserver,
)
from penstock.gateway.upstream.exchange import Exchange, Failure, Headers, without_hop_by_hop
from penstock.gateway.upstream.reply_scanner import PlainEventShape
from penstock.gateway.upstream.timeouts import Timeouts
from penstock.http.admission import retry_headers
from penstock.http.eager import TasklessFuture
from penstock.http.errors import ApiError

if TYPE_CHECKING:
    from penstock.gateway.relay.client_connection import HttpClientConnection
    from penstock.gateway.translation.translation import Translation

BACKPRESSURE_S = 5.0
"""Seconds after a pause for a slow client within which a broken reply is due to that client: what the model
server sent before it broke may still have to be read and relayed."""
STOPPED = "the gateway was stopped"
RESULTS = {
    Failure.NETWORK: TransportResult.BROKEN,
    Failure.SERVER: TransportResult.SERVER_FAILED,
    Failure.IDLE_CLOSED: TransportResult.IDLE_CLOSED,
    Failure.UNPROCESSED: TransportResult.UNPROCESSED,
}
RESENT = frozenset({TransportResult.IDLE_CLOSED, TransportResult.UNPROCESSED})
"""After these the same endpoint may be sent the request again, on a new connection."""
_NO_REPLY = ReplyObserver(json=False, seen=NOTHING_SEEN)


class Requester(Protocol):
    """The request that an attempt is made for: what the attempt asks and tells it."""

    translation: Translation | None
    """What makes the reply one of the client's API; None: it is one."""

    def screen(self, status: int, headers: Headers) -> Headers | None:
        """The headers to relay of a reply with this status and these ``headers``; None: the reply is
        discarded."""
        ...

    def error_event(self, code: str, message: str) -> bytes: ...

    def on_response(self, id: str) -> None:
        """The reply belongs to a stored response."""
        ...

    def on_first_token(self) -> None:
        """A stream's first token has come."""
        ...


class TimeLimits(NamedTuple):
    """How long an attempt may take, in seconds on ``clock``."""

    timeouts: Timeouts
    deadline: float
    """When the request has taken too long."""
    clock: Callable[[], float]


class Attempt:
    """Receives one reply and relays it; listens to the client's connection.

    The client gets nothing before the first byte of the body: until then a request that fails at one server
    can be retried at another.
    """

    def __init__(
        self,
        client: HttpClientConnection,
        exchange: Exchange,
        plain_events: PlainEvents,
        *,
        expects: ExpectedReply,
        strip_usage: bool,
        requester: Requester,
        held: HeldBytes,
        limits: TimeLimits,
    ) -> None:
        """``strip_usage``: the gateway has asked for usage that the client does not want."""
        self.ended: TasklessFuture[TransportResult] = TasklessFuture()
        self.status: int | None = None
        self.relayed = False
        """Whether the client was sent anything."""
        self.reason = ""
        """Why the attempt failed."""
        self.bytes_out = 0
        self._client = client
        self.sink = client.sink
        self._exchange = exchange
        self._plain_events = plain_events
        self._slot = -1
        """Slot of the stream in the columns of plain events; -1: it has not had the fast path."""
        self._on_fast_path = False
        self._has_fast_path = False
        """Whether plain events may come by the fast path."""
        self.expects = expects
        self._strip_usage = strip_usage
        self._requester = requester
        self._held = held
        self._timeouts = timeouts = limits.timeouts
        self._deadline = deadline = limits.deadline
        self._clock = clock = limits.clock
        self._sent_at = self._read_at = now = clock()
        self.check_at = min(now + timeouts.event, now + timeouts.first_token, deadline)
        """No time-out is exceeded before."""
        self._paused_at: float | None = None
        """Since when the client's write buffer is full."""
        self._resumed_at = -math.inf
        """When it was last full."""
        self._headers: Headers = []
        self._observer: StreamObserver | ReplyObserver = _NO_REPLY

    @property
    def seen(self) -> Observation:
        return self._observer.seen

    # -- the reply

    def on_head(self, status: int, headers: Headers) -> None:
        self.status = status
        relayed = self._requester.screen(status, headers)
        if relayed is None:
            self._exchange.abort()
            self._end(TransportResult.COMPLETE)
            return
        self._headers = without_hop_by_hop(relayed)
        self._observer = make_observer(
            status,
            headers,
            self.expects,
            on_response=self._requester.on_response,
            strip_usage=self._strip_usage,
            held=self._held,
        )
        if (translation := self._requester.translation) is not None:
            self._observer = translation.observer(
                status, self._observer, on_failed=self._end_early, on_error=self._answer_error
            )
            streamed = isinstance(self._observer, StreamObserver)
            self._headers = translation.headers(self._headers, streamed=streamed)
        if isinstance(self._observer, StreamObserver):
            self._observer.on_first_token = self._requester.on_first_token
        if self.seen.stream:  # it may get an error event, or lose its usage
            self._has_fast_path = translation is None
            self._headers = [header for header in self._headers if header[0] != b"content-length"]

    def on_body(self, data: bytes, now: float) -> None:
        self._read_at = now
        if self._on_fast_path:
            self.leave_fast_path()
        if self._has_fast_path and self._enter_fast_path(data, now):
            return
        self._write(self._observer.feed(data, now))

    def on_other_event(self, event: bytes, now: float) -> None:
        """An event that came by the fast path and is not plain, or follows such a one."""
        self.leave_fast_path()
        self._exchange.leave_fast_path(len(event))
        self.on_body(event, now)

    def _enter_fast_path(self, data: bytes, now: float) -> bool:
        """Relay an event by the fast path, as those that follow, if it is plain and the client takes it at
        once."""
        observer, path = self._observer, self._client.write_target
        if path is None or self.seen.last_token_at is None or not isinstance(observer, StreamObserver):
            return False
        parts = observer.plain_parts(data)
        if parts is None:
            return False
        if self._slot < 0:
            self._slot = self._plain_events.open(self)
        shape = PlainEventShape(*parts, len(parts.head) + len(parts.tail), self._slot)
        allowed = self._exchange.enter_fast_path(shape, self._plain_events, len(data))
        if not allowed:
            return False
        self._on_fast_path = True
        self._plain_events.enter(self._slot, path, self.seen.last_token_at, allowed)
        self._plain_events.add_event(self._slot, data, now)
        return True

    def leave_fast_path(self, *, gone: bool = False) -> None:
        """Events come by :meth:`on_body` again. ``gone``: the client has disconnected."""
        if not self._on_fast_path:
            return
        self._on_fast_path = False
        came = self._plain_events.leave(self._slot, gone=gone)
        self._exchange.leave_fast_path(came.size)
        self.bytes_out += came.size
        self.seen.add(came)
        self._read_at = came.last_at

    def _write(self, data: bytes) -> None:
        if not data:
            return
        if not self.relayed:
            self._start()
        self.bytes_out += len(data)
        self._client.write(data)

    def _start(self) -> None:
        self.relayed = True
        assert self.status is not None
        self._client.start(self.status, self._headers)

    def on_end(self) -> None:
        self.leave_fast_path()
        self._write(self._observer.finish(self._clock()))
        if self.expects == "stream" and self.status == 200 and self.seen.lacks_end:
            self.on_broken("the stream ended without its terminator", Failure.NETWORK)
            return
        if not self.relayed:  # it had no body
            self._start()
        self._client.end()
        self._end(TransportResult.COMPLETE)

    def _answer_error(self, status: int, reason: str) -> None:
        """The client gets an error in the place of the reply. Nothing was relayed yet."""
        self.status, self.reason = status, reason

    def _end_early(self) -> None:
        """The client has the end of its stream, whatever the server sends besides."""
        if not self.ended.done():
            self._exchange.abort()
            self._client.end()
            self._end(TransportResult.COMPLETE)

    def on_broken(self, reason: str, failure: Failure) -> None:
        """A model server may break the reply off because it waited for too long: servers bound what they hold
        for a slow client."""
        self.leave_fast_path()
        if self.relayed and not self.seen.ended and self._client_was_slow(self._clock()):
            self._give_up(f"the client read slowly: {reason}")
        else:
            self._break(RESULTS[failure], reason)

    # -- the client

    def on_disconnect(self) -> None:
        if not self.ended.done():
            self.leave_fast_path(gone=True)
            self._exchange.abort()
            self._end(TransportResult.CLIENT_GONE)

    def on_uploaded(self) -> None:
        """The server has taken another part of the request's body: the wait for its reply begins anew."""
        self._sent_at = self._clock()

    def on_pause(self) -> None:
        self.leave_fast_path()
        self._paused_at = self._clock()
        self._exchange.pause(self)

    def on_resume(self) -> None:
        self._paused_at = None
        self._read_at = self._resumed_at = self._clock()  # nothing was read from the server during the pause
        self._exchange.resume(self)

    def _client_was_slow(self, now: float) -> bool:
        """Whether the model server waits for this client, or did until recently."""
        return self._paused_at is not None or now - self._resumed_at < BACKPRESSURE_S

    # -- the clock

    def check_timeouts(self, now: float) -> None:
        """End the attempt if it exceeds a time-out. A client that does not read counts as disconnected, not
        as a failure of the server."""
        if self.ended.done():
            return
        timeouts = self._timeouts
        self.check_at = now + timeouts.event
        if self._paused_at is not None:
            self.check_at = self._paused_at + timeouts.event
            if now > self.check_at:
                self._give_up(f"the client read nothing for {timeouts.event:g} s")
            return
        waits_for_token = self.seen.stream and not self.seen.may_stop
        begun = self.seen.first_token_at is not None or (self.relayed and not waits_for_token)
        if begun:
            due_at = self._latest_read() + timeouts.event
        else:
            due_at = self._sent_at + timeouts.first_token
        self.check_at = min(self.check_at, due_at, self._deadline)
        if now > self._deadline:
            reason = too_late(timeouts.total)
            if self.relayed and self._client_was_slow(now):
                self._give_up(f"the client read slowly: {reason}")
                return
        elif now <= due_at:
            return
        elif begun:
            reason = f"nothing came for {timeouts.event:g} s"
        else:
            reason = f"no token came within {timeouts.first_token:g} s"
        self.leave_fast_path()
        self._exchange.abort()
        self._break(TransportResult.TIMEOUT, reason)

    def _latest_read(self) -> float:
        return self._plain_events.last_at(self._slot) if self._on_fast_path else self._read_at

    # -- the end

    def stop(self) -> None:
        """End the attempt, as the gateway ends."""
        if not self.ended.done():
            self.leave_fast_path()
            self._exchange.abort()
            self._break(TransportResult.STOPPED, STOPPED)

    def _give_up(self, reason: str) -> None:
        self.reason = reason
        self.leave_fast_path()
        self._exchange.abort()
        self._end(TransportResult.CLIENT_GONE)
        self._client.cut()

    def _break(self, ending: TransportResult, reason: str) -> None:
        """A reply that has started cannot be retried: a stream ends with an error event, another reply with a
        broken connection."""
        self.reason = reason
        if self.relayed and not self.seen.ended:
            if self.seen.stream:
                code = "server_stopped" if ending is TransportResult.STOPPED else "upstream_broken"
                self._client.write(self._requester.error_event(code, reason))
                self._client.end()
            else:
                self._client.cut()
        elif self.relayed:
            self._client.end()
        self._end(ending)

    def _end(self, ending: TransportResult) -> None:
        self._observer.close()
        if not self.ended.done():
            self.ended.set_result(ending)
        if self._slot >= 0:
            self._plain_events.close(self._slot)
            self._slot = -1


def too_late(total_s: float) -> str:
    return f"the request took more than {total_s:g} s"


def local_reply_headers(error: ApiError) -> Headers:
    """Headers of an error that the gateway answers itself, without content-length."""
    headers = [(b"content-type", b"application/json"), *error.headers]
    if error.status in (429, 503) and not any(name == b"retry-after" for name, _ in headers):
        headers += retry_headers(1000)
    return headers
