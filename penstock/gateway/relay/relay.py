"""Relays one request: picks an endpoint, sends, relays the reply; retries while nothing was relayed."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import ceil
from time import perf_counter
from typing import TYPE_CHECKING, Literal

from penstock.gateway.relay.attempt import (
    RESENT,
    Attempt,
    TimeLimits,
    local_reply_headers,
    too_late,
)
from penstock.gateway.relay.client_connection import HttpClientConnection
from penstock.gateway.relay.plain_events import PlainEvents
from penstock.gateway.relay.retry_policy import (
    KEY_REFUSALS,
    NOT_FOUND,
    AttemptProgress,
    RetryPolicy,
    is_safe,
    progress_of,
    refused_with_usage,
)
from penstock.gateway.relay.upload import parts_of, upload
from penstock.gateway.requests.apis import gateway_error, rejection_reason
from penstock.gateway.requests.body_rest import BodyRest
from penstock.gateway.requests.byte_rounds import ByteRounds
from penstock.gateway.requests.generation_body import CheckedRest, HeldRest
from penstock.gateway.requests.incoming_request import IncomingRequest
from penstock.gateway.requests.request_body import STREAMING_PATHS
from penstock.gateway.responses.expected_reply import expected_reply
from penstock.gateway.responses.held_bytes import HeldBytes
from penstock.gateway.responses.outcome import (
    ENDPOINT_FAULTS,
    Outcome,
    TransportResult,
    classify_outcome,
)
from penstock.gateway.responses.request_record import FailedAttempt, RequestRecord, failure_reason
from penstock.gateway.routing.backoff import read_retry_after
from penstock.gateway.routing.circuit_breaker import CircuitBreaker
from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.routing.pick_request import OWNER_UNAVAILABLE, NoEndpointError, PickRequest
from penstock.gateway.routing.router import Router
from penstock.gateway.upstream.exchange import Exchange, Headers, UpstreamError, UpstreamRequest
from penstock.gateway.upstream.timeouts import Timeouts
from penstock.http.admission import BEGUN, retry_headers
from penstock.http.errors import ApiError
from penstock.http.request import ClientGone
from penstock.logging_setup import RateLimitedLog

if TYPE_CHECKING:
    from penstock.gateway.translation.translation import Translation

log = logging.getLogger(__name__)
_log_denial = RateLimitedLog(log, logging.ERROR)


@dataclass(slots=True)
class Relay:
    """What all requests of a gateway share. ``clock`` gives seconds."""

    router: Router
    retry_policy: RetryPolicy
    timeouts: Timeouts
    plain_events: PlainEvents = field(default_factory=PlainEvents)
    include_usage: Literal["auto", "off", "require"] = "auto"
    held: HeldBytes = field(default_factory=HeldBytes)
    """Bytes of replies that are held to read them."""
    sending: ByteRounds = field(default_factory=ByteRounds)
    """The held bodies that are sent."""
    running: set[Attempt] = field(default_factory=set)

    @property
    def clock(self) -> Callable[[], float]:
        return self.router.clock

    def check_timeouts(self) -> None:
        """End attempts that exceed a time-out; called several times a second."""
        now = self.clock()
        for attempt in [each for each in self.running if now >= each.check_at]:
            attempt.check_timeouts(now)

    def stop(self) -> int:
        """End all requests, as the gateway ends; returns how many there were."""
        stopped = list(self.running)
        for attempt in stopped:
            attempt.stop()
        return len(stopped) + self.router.stop()

    async def run(
        self,
        incoming: IncomingRequest,
        client: HttpClientConnection,
        record: RequestRecord,
        owners: Sequence[Endpoint] | None = None,
    ) -> None:
        """Relay one request; afterwards ``record`` holds its outcome. ``owners``: the endpoints that have the
        response which it continues, if that is known. Does not raise for failures of clients and endpoints,
        but ApiError for a request that no endpoint may get."""
        self.retry_policy.budget.on_request(self.clock())
        try:
            request = await self.router.prepare(incoming, record, client.gone, owners)
        except NoEndpointError as refusal:
            reply_without_endpoint(client, record, refusal)
            return
        client.reply_headers = record.reply_headers
        try:
            await _RequestRelay(self, client, record=record, request=request).run()
        finally:
            self.router.finish(request, record)

    # -- for _RequestRelay

    def wants_usage(self, incoming: IncomingRequest, endpoint: Endpoint) -> bool:
        """Whether the gateway adds include_usage to the request for this endpoint."""
        body = incoming.body
        if body is None or not body.stream or incoming.path not in STREAMING_PATHS:
            return False
        if incoming.rest is not None:  # nothing is added to what is not known
            return False
        if self.include_usage == "require":
            return body.include_usage is not True
        return self.include_usage == "auto" and body.include_usage is None and not endpoint.rejects_usage

    @staticmethod
    def is_denied(endpoint: Endpoint, method: str, status: int | None) -> bool:
        """Whether an endpoint that answers so refuses the gateway's own key for it. What it says of a
        preflight is about the browser's page."""
        return status in KEY_REFUSALS and method != "OPTIONS" and bool(endpoint.upstream.key_source)

    @staticmethod
    def denial(endpoint: Endpoint, status: int | None) -> str:
        """What is told of an endpoint that refuses the gateway's own key; logs it."""
        url = endpoint.url
        said = f"refuses the key of {endpoint.upstream.key_source} (status {status})"
        _log_denial(url, "%s %s: requests are sent to others, or fail", url, said)
        return f"the model server {said}"

    def stop_asking_for_usage(self, endpoint: Endpoint) -> None:
        log.warning("%s rejects stream_options.include_usage; it is no longer sent there", endpoint.url)
        endpoint.rejects_usage = True


class _RequestRelay:
    """Relays one request, to one endpoint after the other until one answers. Its attempts ask it, as their
    :class:`penstock.gateway.relay.attempt.Requester`."""

    def __init__(
        self,
        relay: Relay,
        client: HttpClientConnection,
        *,
        record: RequestRecord,
        request: PickRequest,
    ) -> None:
        self._relay = relay
        self._client = client
        self._record = record
        self._request = request
        self._owner_failed = ""
        """How the endpoint that has the response has failed; empty: it has not."""
        self._endpoint: Endpoint
        """The current one,"""
        self._sent_at = 0.0
        """and when it was chosen."""
        self._with_usage = False
        """Whether the gateway has asked it for usage."""
        self.translation: Translation | None = None
        self._had_token = False
        """The reply's first token has come."""
        self._progress = AttemptProgress.NOT_BEGUN
        """How far it got."""
        self._backs_off = False
        """Whether the endpoint has said when to come back."""
        self._clock = relay.clock
        self._rest: BodyRest | HeldRest | None = None
        """What is sent to it after the beginning of the body."""
        self._deadline = 0.0
        """When the request has taken too long for the current endpoint."""

    @property
    def _incoming(self) -> IncomingRequest:
        """The request, for the model that it is sent to."""
        incoming = self._request.incoming
        assert incoming is not None, "the router has prepared it"
        return incoming

    async def run(self) -> None:
        while True:
            began = perf_counter()
            try:
                endpoint = self._relay.router.pick(self._request)
            except NoEndpointError as refusal:
                self._reply_without_endpoint(refusal)
                return
            self._record.pick_s += perf_counter() - began
            if await self._try_endpoint(endpoint):
                return
            if (problem := self._owner_failed) and not await self._find_another_owner():
                self._reply_locally(503, OWNER_UNAVAILABLE, problem)
                return
            record, now = self._record, self._clock()
            record.failures.append(FailedAttempt(now, endpoint.url, record.outcome, record.reason))

    def _reply_without_endpoint(self, refusal: NoEndpointError) -> None:
        """No endpoint may be sent the request. After failed attempts the outcome of the last one stays."""
        record = self._record
        if not record.attempts:
            reply_without_endpoint(self._client, record, refusal)
        else:
            status = 502 if record.status == 0 else record.status
            error = gateway_error(status, "upstream_failed", record.reason)
            error.headers = refusal.as_error().headers
            reply_locally(self._client, record, error)

    def _reply_locally(self, status: int, code: str, message: str) -> None:
        """Answer with an error of the gateway's own."""
        reply_locally(self._client, self._record, gateway_error(status, code, message))

    async def _find_another_owner(self) -> bool:
        """Whether the request may be sent to another endpoint that has the response: of the same store."""
        relay, request = self._relay, self._request
        self._owner_failed = ""
        response = self._incoming.response
        assert response is not None
        request.owners = await relay.router.search.elsewhere(
            response, self._incoming.headers, self._clock(), request.tried
        )
        return self._claim_retry()

    # -- one endpoint

    async def _try_endpoint(self, endpoint: Endpoint) -> bool:
        """Send the request to ``endpoint``; returns whether the request has ended."""
        tokens = self._request.tokens
        self._request.tried.add(endpoint)
        self._record.attempts += 1
        self._record.endpoint, self._record.pool = endpoint.url, endpoint.pool
        self._endpoint, self._sent_at, self._had_token = endpoint, self._clock(), False
        self._progress, self._backs_off = AttemptProgress.NOT_BEGUN, False
        self._deadline = self._record.began_at + endpoint.upstream.timeouts.total
        endpoint.request_sent(tokens, self._sent_at)
        try:
            return await self._send_until_answered(endpoint)
        finally:
            endpoint.request_ended(tokens)

    async def _send_until_answered(self, endpoint: Endpoint) -> bool:
        relay, record = self._relay, self._record
        self.translation = await self._translate(endpoint)
        incoming = self._incoming if self.translation is None else self.translation.incoming
        self._with_usage = relay.wants_usage(incoming, endpoint)
        # What is sent in parts does not go on a connection that may be closing.
        fresh = incoming.rest is not None or bool(incoming.values)
        while True:
            try:
                exchange = self._ready_exchange(endpoint, fresh=fresh)
                if exchange is None:
                    exchange = await self._connect(endpoint, fresh=fresh)
            except UpstreamError as error:
                return self._finish_attempt(endpoint, TransportResult.BROKEN, None, str(error))
            except TimeoutError:
                reason = too_late(endpoint.upstream.timeouts.total)
                return self._finish_attempt(endpoint, TransportResult.TIMEOUT, None, reason)
            if exchange is None:
                return self._finish_attempt(endpoint, TransportResult.CLIENT_GONE, None, "")
            attempt = self._start_attempt(endpoint, exchange)
            try:
                await attempt.ended
            finally:
                if (rest := self._rest) is not None and rest.sending is not None:
                    rest.sending.cancel()
                relay.running.discard(attempt)
                self._client.listen(None)  # breaks a reference cycle
            ending, with_usage = attempt.ended.result(), self._with_usage
            if refused_with_usage(attempt.status, with_usage=with_usage, relayed=attempt.relayed):
                self._with_usage = fresh = False
                continue
            if ending in RESENT and not fresh and self._claim_resend(attempt):
                fresh = True
                continue
            if not with_usage and relay.wants_usage(incoming, endpoint) and attempt.status == 200:
                relay.stop_asking_for_usage(endpoint)
            record.bytes_out = attempt.bytes_out
            if rest is not None and self._end_upload(endpoint, attempt, rest):
                return True
            if relay.is_denied(endpoint, record.method, attempt.status):
                reason = relay.denial(endpoint, attempt.status)
                return self._finish_attempt(endpoint, TransportResult.DENIED, attempt, reason)
            return self._finish_attempt(endpoint, ending, attempt, attempt.reason)

    def _end_upload(self, endpoint: Endpoint, attempt: Attempt, rest: BodyRest | HeldRest) -> bool:
        """Returns whether the request has ended, as the client has not sent the rest of its body, or more
        than it may: the endpoint is not at fault."""
        record, error = self._record, rest.refusal
        record.bytes_in += rest.size
        if error is None:
            if not rest.complete:
                attempt.reason = attempt.reason or "the request body is incomplete"
            return False
        endpoint.breaker.release_probe(self._sent_at)
        record.outcome, record.reason = Outcome.REJECTED, rejection_reason(error)
        if attempt.relayed:
            record.status = attempt.status or 0
            self._client.cut()
        else:
            reply_locally(self._client, record, error)
        return True

    def _claim_resend(self, attempt: Attempt) -> bool:
        """Decide whether to send the endpoint a request again whose connection had ended, and count that as a
        failed attempt that is no fault of the endpoint."""
        record, now = self._record, self._clock()
        unprocessed = attempt.ended.result() is TransportResult.UNPROCESSED
        if (rest := self._incoming.rest) is not None and rest.begun:
            return False
        if not (unprocessed or self._relay.retry_policy.claim_resend(self._incoming, self._request, now)):
            return False
        record.attempts += 1
        record.failures.append(FailedAttempt(now, record.endpoint, Outcome.NETWORK_ERROR, attempt.reason))
        return True

    def _ready_exchange(self, endpoint: Endpoint, *, fresh: bool) -> Exchange | None:
        """A stream or a connection to the endpoint that need not be waited for; None: there is none. Raises
        UpstreamError."""
        if self._client.gone.done():
            return None
        if self._client.connections is not None:
            return self._client.connections(endpoint).acquire_exchange(fresh=fresh)
        return self._relay.router.pool.connections(endpoint).acquire_exchange(fresh=fresh)

    async def _connect(self, endpoint: Endpoint, *, fresh: bool) -> Exchange | None:
        """A stream or a connection to the endpoint; None when the client disconnects first. Raises
        UpstreamError, and TimeoutError at the deadline."""
        own = self._client.connections
        connections = self._relay.router.pool.connections(endpoint) if own is None else own(endpoint)
        connecting = asyncio.ensure_future(connections.acquire(fresh=fresh))
        left_s = max(0.0, self._deadline - self._clock())
        await asyncio.wait(
            (connecting, self._client.gone), timeout=left_s, return_when=asyncio.FIRST_COMPLETED
        )
        if connecting.done() and not self._client.gone.done():
            return connecting.result()
        connecting.cancel()
        with suppress(asyncio.CancelledError, UpstreamError):
            (await connecting).abort()
        if not self._client.gone.done():
            raise TimeoutError
        return None

    async def _translate(self, endpoint: Endpoint) -> Translation | None:
        """The request as a chat completion; None: the endpoint speaks its API. Waits for the whole body if
        it is changed. Raises ApiError, ClientGone."""
        if endpoint.apis is None and not isinstance(self._incoming.rest, CheckedRest):
            return None
        try:
            translated = self._is_translated(endpoint)
            if isinstance(self._incoming.rest, CheckedRest) and (
                translated or self._incoming.is_changed or self._relay.include_usage == "require"
            ):
                self._request.incoming = whole = await self._incoming.whole()
                self._record.bytes_in = whole.size
            if not translated:
                return None
            from penstock.gateway.translation import translation  # with its dialects, and only where needed

            hosted = endpoint.upstream.hosted
            return await translation.translate(self._incoming, self._record.request_id, hosted=hosted)
        except (ApiError, ClientGone) as error:
            if isinstance(error, ApiError) and not isinstance(error.code, str):
                self._record.reason = "bad_body"
            endpoint.breaker.release_probe(self._sent_at)
            raise

    def _is_translated(self, endpoint: Endpoint) -> bool:
        """Raises ApiError."""
        if endpoint.apis is None:
            return False
        from penstock.gateway.translation import translation

        return translation.is_translated(endpoint.apis, self._incoming)

    def _start_attempt(self, endpoint: Endpoint, exchange: Exchange) -> Attempt:
        """Send the request."""
        relay, translation, with_usage = self._relay, self.translation, self._with_usage
        incoming = self._request.incoming_for(endpoint) if translation is None else translation.incoming
        body = incoming.body
        self._record.sent_at = self._clock()
        attempt = Attempt(
            self._client,
            exchange,
            relay.plain_events,
            expects=expected_reply(body, incoming.path),
            strip_usage=with_usage and translation is None,
            requester=self,
            held=relay.held,
            limits=TimeLimits(endpoint.upstream.timeouts, self._deadline, self._clock),
        )
        raw = body.with_usage() if with_usage and body is not None else incoming.raw
        first, rest = parts_of(incoming, raw, relay.sending)
        self._rest, left = rest, 0 if rest is None else rest.left
        request = UpstreamRequest(incoming.method.encode(), incoming.target, incoming.headers, first, left)
        exchange.send(request, attempt)
        relay.running.add(attempt)
        self._client.listen(attempt)
        if rest is not None:
            rest.sending = asyncio.ensure_future(upload(rest, exchange, attempt, incoming.path))
        return attempt

    # -- see Requester

    def error_event(self, code: str, message: str) -> bytes:
        return (self._record if self.translation is None else self.translation).error_event(code, message)

    def on_response(self, id: str) -> None:
        self._relay.router.owners.learn(id, self._endpoint)

    def on_first_token(self) -> None:
        """The endpoint works: its circuit breaker closes long before a long reply ends."""
        self._had_token = True
        self._endpoint.breaker.record_success(self._clock(), self._sent_at, self._record.client)

    def screen(self, status: int, headers: Headers) -> Headers | None:
        """Take a reply's head; returns the headers to relay, None if the reply is discarded to send the
        request again. A client that nobody can serve learns when somebody can."""
        relay, request, endpoint, now = self._relay, self._request, self._endpoint, self._clock()
        if status == 400 and self._with_usage and relay.include_usage == "auto":
            return None
        if relay.is_denied(endpoint, self._record.method, status):
            return None
        progress = progress_of(status, headers)
        if status == NOT_FOUND and relay.router.on_not_found(request, endpoint):
            progress = AttemptProgress.NOT_BEGUN
        if progress is None:
            return headers
        self._progress = progress
        wait_s = read_retry_after(headers, time.time()) if progress is AttemptProgress.REFUSED else None
        if wait_s is not None:
            self._backs_off = True
            endpoint.refused(status, wait_s, request.client, request.model, now)
        if self._claim_retry():
            return None
        if wait_s is None:
            return headers
        least_s = min(wait_s, relay.router.least_backoff_s(request))
        kept = [header for header in headers if header[0] not in (b"retry-after", b"retry-after-ms")]
        return [*kept, *retry_headers(ceil(1000 * least_s))]

    def _claim_retry(self) -> bool:
        """Decide whether the request is sent to another endpoint."""
        now, rest = self._clock(), self._incoming.rest
        if rest is not None and rest.begun:
            return False
        return now < self._deadline and self._relay.retry_policy.claim(
            self._progress, self._incoming, self._request, now
        )

    # -- the outcome

    def _finish_attempt(
        self, endpoint: Endpoint, ending: TransportResult, attempt: Attempt | None, reason: str
    ) -> bool:
        """Record the outcome of an attempt; returns whether the request has ended."""
        record = self._record
        if attempt is not None:
            denied = ending is TransportResult.DENIED  # then the client does not get that status
            record.seen, record.status = attempt.seen, 0 if denied else attempt.status or 0
        status = record.status if attempt is not None else None
        record.outcome = classify_outcome(ending, status or None, record.seen, record.path)
        stopped = record.outcome is Outcome.REJECTED
        record.reason = "draining" if stopped else reason or failure_reason(record)
        if record.outcome in ENDPOINT_FAULTS:
            own_status = 0 if attempt is None else attempt.status or 0
            endpoint.note_failure(record.outcome, record.reason, own_status, record.request_id)
        self._tell_breaker(endpoint.breaker, ending, connected=attempt is not None)
        first_token_at = None if record.is_replay else record.seen.first_token_at
        if first_token_at is not None and record.sent_at is not None:
            endpoint.add_ttft(first_token_at - record.sent_at)
        if ending is TransportResult.CLIENT_GONE or (attempt is not None and attempt.relayed):
            return True
        if ending is TransportResult.STOPPED:
            error = gateway_error(503, "draining", reason)
            error.headers = [BEGUN]
            reply_locally(self._client, record, error)
            return True
        if ending is TransportResult.COMPLETE:
            record.reason = f"the model server answered with status {status}"
            return False  # the reply was discarded for a retry
        begun = attempt is not None and ending not in (TransportResult.UNPROCESSED, TransportResult.DENIED)
        self._progress = AttemptProgress.BEGUN if begun else AttemptProgress.NOT_BEGUN
        if self._claim_retry():
            return False
        if ending is TransportResult.TIMEOUT:
            self._reply_locally(504, "upstream_timeout", reason)
            return True
        if self._request.owners is not None and (not begun or is_safe(self._incoming)):
            self._owner_failed = (
                f"no answer from {endpoint.url}, which has the response that the request names: {reason}"
            )
            return False
        self._reply_locally(502, "upstream_failed", f"no answer from a model server: {reason}")
        return True

    def _tell_breaker(self, breaker: CircuitBreaker, ending: TransportResult, *, connected: bool) -> None:
        record, now, sent_at = self._record, self._clock(), self._sent_at
        refused = ending is TransportResult.COMPLETE and self._progress is AttemptProgress.REFUSED
        if not connected and ending is TransportResult.BROKEN:
            breaker.record_unavailable(now, sent_at)
        elif not connected or (refused and self._backs_off):
            breaker.release_probe(sent_at)
        elif refused and record.outcome is Outcome.MODEL_SERVER_ERROR:
            breaker.record_unavailable(now, sent_at, connected=True)
        else:
            breaker.record_outcome(record.outcome, now, sent_at, record.client, had_token=self._had_token)


def reply_without_endpoint(
    client: HttpClientConnection, record: RequestRecord, refusal: NoEndpointError
) -> None:
    """Refuse a request that no endpoint may be sent."""
    record.outcome, record.reason = Outcome.REJECTED, refusal.reason
    reply_locally(client, record, refusal.as_error())


def reply_locally(client: HttpClientConnection, record: RequestRecord, error: ApiError) -> None:
    """Answer with an error of the gateway's own."""
    body = record.error_body(error)
    record.status = error.status
    client.start(error.status, [*local_reply_headers(error), (b"content-length", b"%d" % len(body))])
    client.write(body)
    client.end()


def reply_with_json(client: HttpClientConnection, record: RequestRecord, body: bytes) -> None:
    """Answer with what the gateway knows itself."""
    record.outcome, record.status, record.bytes_out = Outcome.OK, 200, len(body)
    client.start(200, [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))])
    client.write(body)
    client.end()
