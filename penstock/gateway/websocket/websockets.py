"""The WebSockets of a gateway: the handshake, and what all of them share."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import urlsplit

from penstock.gateway.admission.intake import Intake
from penstock.gateway.metric_definitions import WEBSOCKETS, Figure
from penstock.gateway.own_routes import OwnRoutes
from penstock.gateway.relay.client_connection import REQUEST_ID
from penstock.gateway.relay.relay import Relay
from penstock.gateway.relay.write_batch import WriteBatch
from penstock.gateway.requests.apis import rejection_reason
from penstock.gateway.requests.via import Via
from penstock.gateway.responses.request_record import RequestRecord
from penstock.gateway.telemetry.metrics import GatewayMetrics
from penstock.gateway.telemetry.request_recorder import RequestRecorder
from penstock.gateway.upstream.exchange import Headers
from penstock.gateway.websocket.client_session import ClientSession, Handshake
from penstock.http.errors import ApiError
from penstock.http.request import MAX_REQUEST_ID, HttpRequest
from penstock.http.websocket.channel import Channel
from penstock.http.websocket.handshake import accepted
from penstock.http.websocket.socket import WebSocket
from penstock.telemetry.trace_context import TracePropagator

CHECK_S = 5.0
"""Seconds between two checks of the connections to model servers."""
_OF_HANDSHAKES = (b"sec-websocket-", b"content-", b"accept-encoding", b"origin")
"""How headers begin that are not of the requests of a connection."""


@dataclass(slots=True)
class WebSockets:
    """Those of one worker."""

    own_routes: OwnRoutes
    intake: Intake
    relay: Relay
    metrics: GatewayMetrics
    recorder: RequestRecorder
    tracing: TracePropagator
    write_batch: WriteBatch
    via: Via
    in_flight: int = 0
    """Requests that have not ended."""
    sessions: set[ClientSession] = field(default_factory=set)
    _check_at: float = -math.inf

    def check(self) -> None:
        """Called several times a second."""
        now = self.relay.clock()
        if now >= self._check_at:
            self._check_at = now + CHECK_S
            for session in list(self.sessions):
                session.check()

    def figures(self) -> list[Figure]:
        """For ``/metrics``."""
        return [Figure(WEBSOCKETS, len(self.sessions))]

    async def open(self, http: HttpRequest, new_id: str) -> None:
        """Make a WebSocket of the connection of a request, if its client may use it. ``new_id``: its id,
        unless the client has one. Raises ApiError."""
        request_id = http.fields.get(REQUEST_ID, b"").decode("latin-1")
        if not 0 < len(request_id) <= MAX_REQUEST_ID:
            request_id = new_id
        record = RequestRecord(http.path, request_id, "POST", began_at=self.relay.clock())
        try:
            handshake = await self._read(http, record)
            http.sink.upgrade(
                accepted(http.fields, connects=http.method == "CONNECT"), partial(self._serve, handshake)
            )
        except ApiError as error:
            record.status, record.reason = error.status, rejection_reason(error)
            record.ended_at = self.relay.clock()
            self.recorder.finish(record)
            error.headers = [*error.headers, (REQUEST_ID, request_id.encode("latin-1"))]
            raise

    def _serve(self, handshake: Handshake, channel: Channel) -> WebSocket:
        socket = WebSocket(channel, self.intake.bodies.max_read)
        session = ClientSession(self, socket, handshake)
        self.sessions.add(session)
        socket.open(session)
        return socket

    async def _read(self, http: HttpRequest, record: RequestRecord) -> Handshake:
        """Raises ApiError."""
        self.own_routes.check_open()
        intake, fields, headers = self.intake, http.fields, http.headers
        await intake.authorize(record, fields, http.address)
        if not intake.keys.guards(http.path):
            _check_origin(fields.get(b"origin"), fields.get(b"host", b""))
        self.via.refuse_loops(headers)
        relayed: Headers = [
            header
            for header in intake.relayed_headers(headers, reads_reply=True)
            if header[0] != REQUEST_ID and not header[0].startswith(_OF_HANDSHAKES)
        ]
        relayed.append((b"accept-encoding", b"identity"))
        return Handshake(
            record.request_id,
            http.target,
            headers,
            fields,
            http.address,
            relayed,
            self.via.entry(http.version),
            intake.session_in(headers),
        )


def _check_origin(origin: bytes | None, host: bytes) -> None:
    """Refuse a page of another site in a browser, which may open WebSockets to any host. Raises ApiError."""
    if (
        origin is not None
        and urlsplit(origin.decode("latin-1")).netloc.lower().encode("latin-1") != host.lower()
    ):
        raise ApiError(
            403,
            "The gateway has no keys, so pages of other sites may open no WebSocket (header Origin).",
            code="origin",
        )
