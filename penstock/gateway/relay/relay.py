"""Relays one request: picks an endpoint, sends, relays the reply; retries while nothing was relayed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

from penstock.gateway.relay.attempt import Attempt, expected_reply, local_reply_headers
from penstock.gateway.relay.client_connection import HttpClientConnection
from penstock.gateway.relay.plain_events import PlainEvents
from penstock.gateway.relay.request_record import FailedAttempt, RequestRecord, failure_reason
from penstock.gateway.relay.response_search import ResponseSearch
from penstock.gateway.relay.retry_policy import RETRIABLE_STATUSES, RetryPolicy, refused_with_usage
from penstock.gateway.requests.apis import gateway_error
from penstock.gateway.requests.request_body import STREAMING_PATHS, RequestBody, response_of
from penstock.gateway.responses.outcome import Outcome, TransportResult, classify_outcome
from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.routing.endpoint_pool import EndpointPool
from penstock.gateway.routing.picker import (
    OWNER_UNAVAILABLE,
    NoEndpointError,
    Picker,
    PickRequest,
    pick_request,
)
from penstock.gateway.routing.response_owners import ResponseOwners
from penstock.gateway.upstream.exchange import Exchange, Headers, UpstreamError, UpstreamRequest
from penstock.gateway.upstream.timeouts import Timeouts

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class IncomingRequest:
    """A request as the client sent it, with the headers that the endpoint gets."""

    method: str
    target: bytes
    """Path and query."""
    path: str
    headers: Headers
    """End-to-end headers, see :func:`~penstock.gateway.upstream.exchange.without_hop_by_hop`."""
    raw: bytes
    """The body's bytes."""
    body: RequestBody | None
    """None when the request does not generate; its body is relayed unread."""
    session: str | None = None


@dataclass(slots=True)
class Relay:
    """What all requests of a gateway share. ``clock`` gives seconds."""

    pool: EndpointPool
    picker: Picker
    retry_policy: RetryPolicy
    timeouts: Timeouts
    clock: Callable[[], float]
    plain_events: PlainEvents = field(default_factory=PlainEvents)
    include_usage: Literal["auto", "off", "require"] = "auto"
    ttft_slo_s: float | None = None
    owners: ResponseOwners = field(default_factory=ResponseOwners)
    running: set[Attempt] = field(default_factory=set)
    search: ResponseSearch = field(init=False)
    _without_usage: set[Endpoint] = field(default_factory=set)
    """Endpoints that reject include_usage."""

    def __post_init__(self) -> None:
        self.search = ResponseSearch(self.pool, self.owners)

    def check_timeouts(self) -> None:
        """End attempts that exceed a time-out; called several times a second."""
        now = self.clock()
        for attempt in [each for each in self.running if now >= each.check_at]:
            attempt.check_timeouts(now)

    def stop(self) -> int:
        """End all attempts, as the gateway ends; returns how many were running."""
        stopped = list(self.running)
        for attempt in stopped:
            attempt.stop()
        return len(stopped)

    def forget(self, endpoint: Endpoint) -> None:
        """The endpoint was removed."""
        self.picker.forget(endpoint)
        self.owners.forget(endpoint)
        self._without_usage.discard(endpoint)

    async def run(
        self, incoming: IncomingRequest, client: HttpClientConnection, record: RequestRecord
    ) -> None:
        """Relay one request; afterwards ``record`` holds its outcome. Does not raise for failures of clients
        and endpoints, but ApiError if no endpoint has the response that the request names."""
        self.retry_policy.budget.on_request(self.clock())
        request = pick_request(incoming.body, incoming.session, self.ttft_slo_s)
        id = response_of(incoming.path, incoming.body)
        if id is not None:
            request.owners = await self.search.find(
                id, incoming.headers, self.clock(), previous=incoming.body is not None
            )
        await _RequestRelay(self, incoming, client, record=record, request=request, response=id).run()

    # -- for _RequestRelay

    def wants_usage(self, incoming: IncomingRequest, endpoint: Endpoint) -> bool:
        """Whether the gateway adds include_usage to the request for this endpoint."""
        body = incoming.body
        if body is None or not body.stream or incoming.path not in STREAMING_PATHS:
            return False
        if self.include_usage == "require":
            return body.include_usage is not True
        return (
            self.include_usage == "auto"
            and body.include_usage is None
            and endpoint not in self._without_usage
        )

    def stop_asking_for_usage(self, endpoint: Endpoint) -> None:
        log.warning("%s rejects stream_options.include_usage; it is no longer sent there", endpoint.url)
        self._without_usage.add(endpoint)


class _RequestRelay:
    """Relays one request, to one endpoint after the other until one answers."""

    def __init__(
        self,
        relay: Relay,
        incoming: IncomingRequest,
        client: HttpClientConnection,
        *,
        record: RequestRecord,
        request: PickRequest,
        response: str | None,
    ) -> None:
        """``response``: id of the stored response that the request names."""
        self._relay = relay
        self._incoming = incoming
        self._client = client
        self._record = record
        self._request = request
        self._response = response
        self._owner_failed = ""
        """How the endpoint that has the response has failed; empty: it has not."""
        self._sent_at = 0.0
        """When the current endpoint was chosen."""

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
            if (problem := self._owner_failed) and not await self._find_another_owner():
                self._reply_locally(503, OWNER_UNAVAILABLE, problem)
                return
            record, now = self._record, self._relay.clock()
            record.failures.append(FailedAttempt(now, endpoint.url, record.outcome, record.reason))

    def _reply_without_endpoint(self, refusal: NoEndpointError) -> None:
        """No endpoint may be sent the request. After failed attempts the outcome of the last one stays."""
        record = self._record
        if not record.attempts:
            record.outcome, record.reason = Outcome.REJECTED, refusal.reason
            self._reply_locally(refusal.status, refusal.reason, str(refusal))
        else:
            self._reply_locally(
                502 if record.status == 0 else record.status, "upstream_failed", record.reason
            )

    def _reply_locally(self, status: int, code: str, message: str) -> None:
        """Answer with an error of the gateway's own."""
        body = self._record.error_body(gateway_error(status, code, message))
        self._record.status = status
        self._client.start(status, [*local_reply_headers(status), (b"content-length", b"%d" % len(body))])
        self._client.write(body)
        self._client.end()

    async def _find_another_owner(self) -> bool:
        """Whether the request may be sent to another endpoint that has the response: of the same store."""
        relay, request = self._relay, self._request
        self._owner_failed = ""
        assert self._response is not None
        request.owners = await relay.search.elsewhere(
            self._response, self._incoming.headers, relay.clock(), request.tried
        )
        return relay.retry_policy.claim(request, relay.clock())

    # -- one endpoint

    async def _try_endpoint(self, endpoint: Endpoint) -> bool:
        """Send the request to ``endpoint``; returns whether the request has ended."""
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
                exchange = await self._connect(endpoint, fresh=fresh)
            except UpstreamError as error:
                return self._finish_attempt(endpoint, TransportResult.BROKEN, None, str(error))
            if exchange is None:
                return self._finish_attempt(endpoint, TransportResult.CLIENT_GONE, None, "")
            attempt = await self._attempt(endpoint, exchange, with_usage)
            ending = attempt.ended.result()
            if refused_with_usage(attempt.status, with_usage=with_usage, relayed=attempt.relayed):
                with_usage, fresh = False, False
                continue
            if ending is TransportResult.UNPROCESSED and not fresh and self._claim_resend(attempt):
                fresh = True
                continue
            if not with_usage and relay.wants_usage(self._incoming, endpoint) and attempt.status == 200:
                relay.stop_asking_for_usage(endpoint)
            record.bytes_out = attempt.bytes_out
            return self._finish_attempt(endpoint, ending, attempt, attempt.reason)

    def _claim_resend(self, attempt: Attempt) -> bool:
        """Decide whether to send the endpoint a request again that it has not processed, and count that as a
        failed attempt that is no fault of the endpoint."""
        record, now = self._record, self._relay.clock()
        if not self._relay.retry_policy.claim_resend(now):
            return False
        record.attempts += 1
        record.failures.append(FailedAttempt(now, record.endpoint, Outcome.NETWORK_ERROR, attempt.reason))
        return True

    async def _connect(self, endpoint: Endpoint, *, fresh: bool) -> Exchange | None:
        """A stream or a connection to the endpoint; None when the client disconnects first. Raises
        UpstreamError."""
        connections = self._relay.pool.connections(endpoint)
        if not self._client.gone.done() and (exchange := connections.take(fresh=fresh)) is not None:
            return exchange
        connecting = asyncio.ensure_future(connections.acquire(fresh=fresh))
        await asyncio.wait((connecting, self._client.gone), return_when=asyncio.FIRST_COMPLETED)
        if connecting.done() and not self._client.gone.done():
            return connecting.result()
        connecting.cancel()
        with suppress(asyncio.CancelledError, UpstreamError):
            (await connecting).abort()
        return None

    async def _attempt(self, endpoint: Endpoint, exchange: Exchange, with_usage: bool) -> Attempt:
        relay, incoming, body = self._relay, self._incoming, self._incoming.body
        self._record.sent_at = relay.clock()
        attempt = Attempt(
            self._client,
            exchange,
            relay.plain_events,
            expects=expected_reply(body, incoming.path),
            strip_usage=with_usage,
            discards=lambda status: self._claim_discard(status, with_usage),
            error_event=self._record.error_event,
            on_response=lambda id: relay.owners.learn(id, endpoint),
            timeouts=relay.timeouts,
            clock=relay.clock,
        )
        raw = body.with_usage() if with_usage and body is not None else incoming.raw
        request = UpstreamRequest(incoming.method.encode(), incoming.target, incoming.headers, raw)
        relay.running.add(attempt)
        try:
            exchange.send(request, attempt)
            self._client.listen(attempt)
            await attempt.ended
        finally:
            relay.running.discard(attempt)
            self._client.listen(None)  # breaks a reference cycle
        return attempt

    def _claim_discard(self, status: int, with_usage: bool) -> bool:
        """Decide whether a reply is discarded, to send the request again; takes a retry from the budget."""
        relay = self._relay
        if status == 400 and with_usage and relay.include_usage == "auto":
            return True
        return status in RETRIABLE_STATUSES and relay.retry_policy.claim(self._request, relay.clock())

    # -- the outcome

    def _finish_attempt(
        self, endpoint: Endpoint, ending: TransportResult, attempt: Attempt | None, reason: str
    ) -> bool:
        """Record the outcome of an attempt; returns whether the request has ended."""
        record, now = self._record, self._relay.clock()
        if attempt is not None:
            record.seen, record.status = attempt.seen, attempt.status or 0
        status = record.status if attempt is not None else None
        record.outcome = classify_outcome(ending, status or None, record.seen, record.path)
        stopped = record.outcome is Outcome.REJECTED
        record.reason = "draining" if stopped else reason or failure_reason(record)
        endpoint.breaker.record_outcome(record.outcome, now, self._sent_at, record.client)
        if record.seen.first_token_at is not None and record.sent_at is not None:
            endpoint.add_ttft(record.seen.first_token_at - record.sent_at)
        if ending is TransportResult.CLIENT_GONE or (attempt is not None and attempt.relayed):
            return True
        if ending is TransportResult.STOPPED:
            self._reply_locally(503, "draining", reason)
            return True
        if ending is TransportResult.COMPLETE:
            record.reason = f"the model server answered with status {status}"
            return False  # the reply was discarded for a retry
        if self._relay.retry_policy.claim(self._request, now):
            return False
        if ending is TransportResult.TIMEOUT:
            self._reply_locally(504, "upstream_timeout", reason)
            return True
        if self._request.owners is not None:
            self._owner_failed = (
                f"no answer from {endpoint.url}, which has the response that the request names: {reason}"
            )
            return False
        self._reply_locally(502, "upstream_failed", f"no answer from a model server: {reason}")
        return True
