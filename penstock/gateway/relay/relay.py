"""One request's way through the gateway: pick, send, relay; elsewhere again while nothing was relayed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal, Protocol

from penstock.gateway.relay.attempt import (
    RETRIABLE_STATUSES,
    Attempt,
    ClientStream,
    error_body,
    expected_reply,
    local_reply_headers,
)
from penstock.gateway.relay.request_record import FailedAttempt, RequestRecord, failure_reason
from penstock.gateway.relay.retry_budget import RetryBudget
from penstock.gateway.requests.request_body import STREAMING_PATHS, RequestBody
from penstock.gateway.responses.outcome import Outcome, TransportResult, classify_outcome
from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.routing.endpoint_pool import EndpointPool
from penstock.gateway.routing.picker import NoEndpointError, Picker, PickRequest, pick_request
from penstock.gateway.upstream.http_client import Connection, Headers, UpstreamError, request_bytes
from penstock.gateway.upstream.timeouts import Timeouts

log = logging.getLogger(__name__)


class ClientConnection(ClientStream, Protocol):
    """The connection that the request came on, and who is told about it."""

    def listen(self, attempt: Attempt | None) -> None:
        """From here on ``attempt`` is told of disconnects and of a full write buffer; None: nobody is."""
        ...

    @property
    def gone(self) -> asyncio.Future[None]:
        """Done when the client has left."""
        ...


@dataclass(frozen=True, slots=True)
class IncomingRequest:
    """A request as it came."""

    method: str
    target: bytes
    """Path and query."""
    path: str
    headers: Headers
    """End-to-end ones."""
    raw: bytes
    body: RequestBody | None
    """None: not a generation request; it is relayed as it is."""
    session: str | None = None


@dataclass(slots=True)
class Relay:
    """Shared by all requests of a gateway."""

    pool: EndpointPool
    picker: Picker
    timeouts: Timeouts
    clock: Callable[[], float]
    include_usage: Literal["auto", "off", "require"] = "auto"
    max_attempts: int = 3
    ttft_slo_s: float | None = None
    retry_budget: RetryBudget = field(default_factory=RetryBudget)
    _running: set[Attempt] = field(default_factory=set)
    _without_usage: set[Endpoint] = field(default_factory=set)
    """Endpoints that refuse include_usage."""

    def check_timeouts(self) -> None:
        """End what takes too long; called several times a second."""
        now = self.clock()
        for attempt in list(self._running):
            attempt.check_timeouts(now)

    def forget(self, endpoint: Endpoint) -> None:
        """The endpoint was taken out."""
        self.picker.forget(endpoint)
        self._without_usage.discard(endpoint)

    async def run(self, incoming: IncomingRequest, client: ClientConnection, record: RequestRecord) -> None:
        """Relay one request; ``record`` says afterwards how it ended. Never raises for what others do."""
        now = self.clock()
        self.retry_budget.on_request(now)
        request = pick_request(incoming.body, incoming.session, self.ttft_slo_s)
        run = _RequestRelay(self, incoming, client, record, request)
        await run.run()

    # -- for runs

    def add_attempt(self, attempt: Attempt) -> None:
        self._running.add(attempt)

    def remove_attempt(self, attempt: Attempt) -> None:
        self._running.discard(attempt)

    def wants_usage(self, incoming: IncomingRequest, endpoint: Endpoint) -> bool:
        """Whether the gateway adds include_usage to the request."""
        body = incoming.body
        if body is None or not body.stream or incoming.path not in STREAMING_PATHS:
            return False
        if self.include_usage == "require":
            return body.include_usage is not True
        silent = self.include_usage == "auto" and body.include_usage is None
        return silent and endpoint not in self._without_usage

    def stop_asking_for_usage(self, endpoint: Endpoint) -> None:
        log.warning("%s refuses stream_options.include_usage and is not asked for it again", endpoint.url)
        self._without_usage.add(endpoint)


class _RequestRelay:
    """One request."""

    def __init__(
        self,
        relay: Relay,
        incoming: IncomingRequest,
        client: ClientConnection,
        record: RequestRecord,
        request: PickRequest,
    ) -> None:
        self._relay = relay
        self._incoming = incoming
        self._client = client
        self._record = record
        self._request = request
        self._sent_at = 0.0
        """When the latest endpoint was chosen."""

    async def run(self) -> None:
        while True:
            began = perf_counter()
            try:
                endpoint = self._relay.picker.pick(
                    self._request, self._relay.pool.endpoints, self._relay.clock()
                )
            except NoEndpointError as refusal:
                self._reply_without_endpoint(refusal)
                return
            self._record.pick_s += perf_counter() - began
            if await self._try_endpoint(endpoint):
                return
            record = self._record
            failure = FailedAttempt(self._relay.clock(), endpoint.url, record.outcome, record.reason)
            record.failures.append(failure)

    def _reply_without_endpoint(self, refusal: NoEndpointError) -> None:
        """Nobody may get it; what an earlier attempt met is the outcome then."""
        record = self._record
        if not record.attempts:
            record.outcome, record.reason = Outcome.REJECTED, refusal.reason
            self._reply_locally(refusal.status, refusal.reason, str(refusal))
        else:
            self._reply_locally(
                502 if record.status == 0 else record.status, "upstream_failed", record.reason
            )

    def _reply_locally(self, status: int, code: str, message: str) -> None:
        """An answer of the gateway's own."""
        body = error_body(code, message)
        self._record.status = status
        self._client.start(status, [*local_reply_headers(status), (b"content-length", b"%d" % len(body))])
        self._client.write(body)
        self._client.end()

    # -- one endpoint

    async def _try_endpoint(self, endpoint: Endpoint) -> bool:
        """Whether the request has ended with it."""
        relay, tokens = self._relay, self._request.tokens
        self._request.tried.add(endpoint)
        self._record.attempts += 1
        self._record.endpoint = endpoint.url
        self._sent_at = relay.clock()
        endpoint.request_sent(tokens, self._sent_at)
        try:
            return await self._send_until_answered(endpoint)
        finally:
            endpoint.request_ended(tokens)

    async def _send_until_answered(self, endpoint: Endpoint) -> bool:
        relay, record = self._relay, self._record
        with_usage = relay.wants_usage(self._incoming, endpoint)
        fresh = False
        while True:
            try:
                connection = await self._connect(endpoint, fresh=fresh)
            except UpstreamError as error:
                return self._finish_attempt(endpoint, TransportResult.BROKEN, None, str(error))
            if connection is None:
                return self._finish_attempt(endpoint, TransportResult.CLIENT_GONE, None, "")
            was_used = connection.was_used
            attempt = await self._attempt(connection, with_usage)
            ending = attempt.ended.result()
            if with_usage and attempt.status == 400 and not attempt.relayed:
                with_usage, fresh = False, False  # perhaps because of what the gateway added
                continue
            if ending is TransportResult.BROKEN and was_used and not connection.answered and not fresh:
                fresh = True  # the server had closed the kept connection: nothing to do with the request
                continue
            if not with_usage and relay.wants_usage(self._incoming, endpoint) and attempt.status == 200:
                relay.stop_asking_for_usage(endpoint)
            record.bytes_out = attempt.bytes_out
            return self._finish_attempt(endpoint, ending, attempt, attempt.reason)

    async def _connect(self, endpoint: Endpoint, *, fresh: bool) -> Connection | None:
        """None: the client has left meanwhile."""
        connecting = asyncio.ensure_future(self._relay.pool.connections(endpoint).acquire(fresh=fresh))
        await asyncio.wait((connecting, self._client.gone), return_when=asyncio.FIRST_COMPLETED)
        if connecting.done() and not self._client.gone.done():
            return connecting.result()
        connecting.cancel()
        with suppress(asyncio.CancelledError, UpstreamError):
            (await connecting).abort()
        return None

    async def _attempt(self, connection: Connection, with_usage: bool) -> Attempt:
        relay, incoming, body = self._relay, self._incoming, self._incoming.body
        self._record.sent_at = relay.clock()
        attempt = Attempt(
            self._client,
            connection,
            expects=expected_reply(body),
            strip_usage=with_usage,
            wanted=lambda status: self._is_wanted(status, with_usage),
            timeouts=relay.timeouts,
            clock=relay.clock,
        )
        raw = body.with_usage() if with_usage and body is not None else incoming.raw
        sent = request_bytes(
            incoming.method.encode(), incoming.target, connection.authority, incoming.headers, raw
        )
        relay.add_attempt(attempt)
        try:
            connection.send(sent, attempt)
            self._client.listen(attempt)
            await asyncio.wait((attempt.ended,))
        finally:
            relay.remove_attempt(attempt)
            self._client.listen(None)  # they refer to each other
        return attempt

    def _is_wanted(self, status: int, with_usage: bool) -> bool:
        """Whether a reply is relayed, rather than thrown away for another attempt."""
        if status == 400 and with_usage and self._relay.include_usage == "auto":
            return False
        return status not in RETRIABLE_STATUSES or not self._take_retry()

    def _take_retry(self) -> bool:
        relay = self._relay
        others = [
            endpoint
            for endpoint in relay.pool.endpoints
            if endpoint not in self._request.tried and endpoint.breaker.allows(relay.clock())
        ]
        return (
            bool(others)
            and self._record.attempts < relay.max_attempts
            and relay.retry_budget.try_take(relay.clock())
        )

    # -- what became of it

    def _finish_attempt(
        self, endpoint: Endpoint, ending: TransportResult, attempt: Attempt | None, reason: str
    ) -> bool:
        """Account for one exchange; whether the request has ended with it."""
        record = self._record
        now = self._relay.clock()
        if attempt is not None:
            record.seen, record.status = attempt.seen, attempt.status or 0
        status = record.status if attempt is not None else None
        record.outcome = classify_outcome(ending, status or None, record.seen, record.path)
        record.reason = reason or failure_reason(record)
        endpoint.breaker.record_outcome(record.outcome, now, self._sent_at)
        if record.seen.first_token_at is not None and record.sent_at is not None:
            endpoint.add_ttft(record.seen.first_token_at - record.sent_at)
        if ending is TransportResult.CLIENT_GONE or (attempt is not None and attempt.relayed):
            return True
        if ending is TransportResult.COMPLETE:
            record.reason = f"the model server answered with status {status}"
            return False  # thrown away for another attempt
        if self._take_retry():
            return False
        if ending is TransportResult.TIMEOUT:
            self._reply_locally(504, "upstream_timeout", reason)
            return True
        self._reply_locally(502, "upstream_failed", f"no answer from a model server: {reason}")
        return True
