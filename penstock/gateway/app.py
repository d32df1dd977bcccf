"""The gateway's HTTP application: answers its own routes, relays all other requests, records each outcome."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from penstock.dialects.messages.errors import is_anthropic
from penstock.gateway.admission.intake import Intake
from penstock.gateway.own_routes import OWN_PATHS, OwnRoutes
from penstock.gateway.relay.client_connection import REQUEST_ID, HttpClientConnection
from penstock.gateway.relay.relay import Relay, reply_with_json
from penstock.gateway.relay.write_batch import WriteBatch
from penstock.gateway.requests.apis import error_body, rejection_reason
from penstock.gateway.requests.bounded_name import bounded_name
from penstock.gateway.requests.generation_body import read_generation
from penstock.gateway.requests.incoming_request import IncomingRequest
from penstock.gateway.requests.named_response import RESPONSES
from penstock.gateway.requests.via import Via
from penstock.gateway.responses.outcome import Outcome
from penstock.gateway.responses.request_record import RequestRecord
from penstock.gateway.telemetry.metrics import GatewayMetrics
from penstock.gateway.telemetry.request_recorder import RequestRecorder
from penstock.gateway.upstream.exchange import Headers
from penstock.gateway.websocket.websockets import WebSockets
from penstock.http.access_keys import with_query_key, without_query_key
from penstock.http.errors import ApiError
from penstock.http.request import MAX_REQUEST_ID, ClientGone, HttpRequest
from penstock.http.websocket.handshake import wants_websocket
from penstock.streaming.rows.io_submit import BurstWriter
from penstock.telemetry.trace_context import TracePropagator, inject_trace_context

log = logging.getLogger(__name__)


class GatewayApp:
    """The application of the gateway process."""

    def __init__(
        self,
        *,
        own_routes: OwnRoutes,
        intake: Intake,
        relay: Relay,
        metrics: GatewayMetrics,
        recorder: RequestRecorder,
        tracing: TracePropagator,
        burst: BurstWriter,
        via: Via,
    ) -> None:
        """``burst`` writes to the sockets of several connections; ``via`` names this gateway to others."""
        self.own_routes = own_routes
        self.in_flight = 0
        """Requests over HTTP that have not ended, but for those for routes of the gateway itself."""
        self._intake = intake
        self._relay = relay
        self._metrics = metrics
        self._recorder = recorder
        self._tracing = tracing
        self._clock = relay.clock
        self._via = via
        self._write_batch = WriteBatch(burst)
        self.websockets = WebSockets(
            own_routes, intake, relay, metrics, recorder, tracing, self._write_batch, via
        )
        metrics.sources.append(self.websockets.figures)
        self._ids = _request_ids()

    @property
    def is_busy(self) -> bool:
        """Whether a request has not ended."""
        return self.in_flight > 0 or self.websockets.in_flight > 0

    def set_keys(self, keys: Iterable[str], admin_keys: Iterable[str]) -> None:
        """Requests need these keys without a name from here on."""
        self._intake.keys.set_keys(keys, admin_keys)

    def refused(self, error: ApiError) -> None:
        """Count and log a request that the connection answered itself: without complete headers."""
        now, reason = self._clock(), rejection_reason(error)
        record = RequestRecord("", reason=reason, status=error.status, began_at=now, ended_at=now)
        self._recorder.finish(record)

    async def __call__(self, http: HttpRequest) -> None:
        path = self._intake.routes.route(http.path)
        if path is not http.path:
            http.path, http.target = path, self._intake.routes.target(http.method, path, http.target)
        try:
            if path == "/" and http.method in ("GET", "HEAD"):  # load balancers and Claude Code ask so
                await http.reply_json(b"{}" if http.method == "GET" else b"")
            elif path in OWN_PATHS:
                await self.own_routes.answer(http)
            elif (
                http.method != "POST"
                and path == RESPONSES
                and (http.method == "CONNECT" or (http.method == "GET" and wants_websocket(http.fields)))
            ):
                await self.websockets.open(http, next(self._ids))
            elif self.own_routes.controls(path) and not self._intake.routes.allows(http.method, path):
                await self._control(http)
            else:
                await self._relay_request(http)
        except ApiError as error:
            id = next((value for name, value in error.headers if name == REQUEST_ID), b"").decode("latin-1")
            messages = is_anthropic(path, http.fields)
            await http.reply_error(error, error_body(error, id, messages=messages, path=path))

    async def _control(self, http: HttpRequest) -> None:
        self.in_flight += 1
        try:
            await self.own_routes.answer_control(http)
        except ClientGone:
            pass
        finally:
            self.in_flight -= 1

    # -- relaying

    async def _relay_request(self, http: HttpRequest) -> None:
        request_id = http.fields.get(REQUEST_ID, b"").decode("latin-1")
        if not 0 < len(request_id) <= MAX_REQUEST_ID:
            request_id = next(self._ids)
        trace = self._tracing.extract(http.headers)
        record = RequestRecord(
            http.path,
            request_id,
            http.method,
            trace,
            began_at=self._clock(),
            messages_errors=is_anthropic(http.path, http.fields),
        )
        self._metrics.request_started(record)
        self.in_flight += 1
        named = (REQUEST_ID, request_id.encode("latin-1"))
        try:
            incoming = await self._incoming(http, record)
            client = HttpClientConnection(http.sink, named, self._write_batch)
            if (
                http.method != "POST"
                and (listing := self._relay.router.models.reply(record, http.fields)) is not None
            ):
                reply_with_json(client, record, listing)
            else:
                await self._relay.run(incoming, client, record)
        except ClientGone:
            record.outcome = Outcome.CLIENT_DISCONNECT
            record.reason = record.reason or "the request body is incomplete"
        except ApiError as error:
            record.status, record.reason = error.status, record.reason or rejection_reason(error)
            error.headers = [*error.headers, named]
            raise
        except Exception:
            log.exception("%s failed in the gateway", bounded_name(record.path))
            record.outcome, record.status, record.reason = Outcome.REJECTED, 500, "internal"
            raise ApiError(500, "The gateway failed to handle this request.", headers=[named]) from None
        finally:
            self.in_flight -= 1
            record.ended_at = self._clock()
            self._recorder.finish(record)

    async def _incoming(self, http: HttpRequest, record: RequestRecord) -> IncomingRequest:
        self.own_routes.check_open()
        intake, fields = self._intake, with_query_key(http.path, http.target, http.fields)
        await intake.authorize(record, fields, http.address)
        derived = http.derived
        head: _Head | None = None if derived is None else derived.get(self)
        if head is None:
            head = self._read_head(http, record)
            if derived is not None:
                derived[self] = head
        if intake.generates(record.method, record.path):
            received = await read_generation(http, record.caller, intake.bodies)
        else:
            received = await intake.bodies.read(http, record.caller)
        added = [*head.relayed, (REQUEST_ID, record.request_id.encode("latin-1")), head.via]
        return intake.read(
            record,
            http.headers,
            received,
            session=head.session,
            relayed_headers=inject_trace_context(added, record.trace),
            target=without_query_key(http.path, http.target),
        )

    def _read_head(self, http: HttpRequest, record: RequestRecord) -> _Head:
        """Check the head of a request, and find out what is relayed of it. Raises ApiError."""
        intake, headers = self._intake, http.headers
        self._via.refuse_loops(headers)
        _check_upgrade(http)
        if intake.generates(record.method, record.path):
            http.check_coding()
        reads_reply = intake.reads_reply(record.method, record.path)
        relayed = intake.relayed_headers(headers, reads_reply=reads_reply)
        return _Head(
            [header for header in relayed if header[0] != REQUEST_ID],
            # Tells model servers that the client is remote, even when the gateway runs on their own machine.
            self._via.entry(http.version),
            intake.session_in(headers),
        )


class _Head(NamedTuple):
    """What the gateway reads in the head of a request: the same in all requests with the same head."""

    relayed: Headers
    """Without what is of one request."""
    via: tuple[bytes, bytes]
    session: str | None


def _request_ids() -> Iterator[str]:
    """Ids of 64 random bits; a call of the system for each would take as long as all the rest of it."""
    while True:
        digits = os.urandom(_IDS_AT_ONCE * 8).hex()
        yield from (digits[at : at + 16] for at in range(0, len(digits), 16))


_IDS_AT_ONCE = 64


def _check_upgrade(http: HttpRequest) -> None:
    """Refuse a request for a WebSocket: relayed without its upgrade it would be another one. Raises
    ApiError."""
    if http.method == "CONNECT" or http.fields.get(b"upgrade", b"").strip().lower() == b"websocket":
        raise ApiError(
            501,
            "The gateway relays WebSockets of /v1/responses alone. Connect to a model server that has others "
            "directly.",
            code="websocket",
        )
