"""One client's WebSocket: each ``response.create`` is relayed, counted and logged as a request of its own."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from penstock.gateway.relay.client_connection import REQUEST_ID, HttpClientConnection
from penstock.gateway.requests.apis import rejection_reason
from penstock.gateway.requests.generation_body import received_whole
from penstock.gateway.requests.incoming_request import IncomingRequest
from penstock.gateway.requests.long_values import NO_VALUES
from penstock.gateway.requests.named_response import RESPONSES
from penstock.gateway.responses.outcome import Outcome
from penstock.gateway.responses.request_record import RequestRecord
from penstock.gateway.routing.endpoint import Endpoint
from penstock.gateway.upstream.exchange import Headers
from penstock.gateway.websocket.create_message import CreateMessage, concerns_all, read_message
from penstock.gateway.websocket.server_message import NOT_FOUND, PREVIOUS
from penstock.gateway.websocket.socket_sink import SocketSink
from penstock.gateway.websocket.upstream_sockets import ResponseConnections, UpstreamSockets
from penstock.http.errors import ApiError, shown
from penstock.http.request import ClientGone
from penstock.http.websocket.socket import WebSocket
from penstock.telemetry.trace_context import inject_trace_context

if TYPE_CHECKING:
    from penstock.gateway.websocket.websockets import WebSockets

log = logging.getLogger(__name__)

MAX_LANES = 16
"""Responses of a connection that run at the same time."""
MAX_MESSAGES = 32
"""Messages of a connection that run or wait, from which on no more are read."""


class Handshake(NamedTuple):
    """What the requests of a connection take from it."""

    request_id: str
    target: bytes
    headers: Headers
    fields: Mapping[bytes, bytes]
    """The same by name."""
    address: str
    """The client's."""
    relayed: Headers
    """Headers that endpoints get, without what is of one request."""
    via: tuple[bytes, bytes]
    session: str | None


class ClientSession:
    """Handles the messages of one connection, see :class:`~penstock.http.websocket.socket.MessageHandler`.
    Responses of a lane come one after the other."""

    def __init__(self, shared: WebSockets, socket: WebSocket, handshake: Handshake) -> None:
        self._shared = shared
        self._socket = socket
        self._handshake = handshake
        self._count = 0
        self._lanes: dict[str | None, deque[CreateMessage]] = {}
        """Messages that wait, by lane; nothing runs of a lane without an entry."""
        self._messages = 0
        """How many run or wait."""
        self.held = 0
        """Their bytes."""
        self._running: set[asyncio.Task[None]] = set()
        self._sinks: set[SocketSink] = set()
        relay = shared.relay
        id = (REQUEST_ID, handshake.request_id.encode("latin-1"))
        headers = [*handshake.relayed, id, handshake.via]
        self._upstreams = UpstreamSockets(relay.router.pool, handshake.target, headers, relay.held)

    # -- the connection

    @property
    def busy(self) -> bool:
        return bool(self._running)

    @property
    def full(self) -> bool:
        return self._messages >= MAX_MESSAGES or self.held >= 2 * self._shared.intake.bodies.max_read

    def on_message(self, data: bytes) -> None:
        try:
            create = read_message(data)
            if create is None:
                # Later, as what came before it has begun then.
                asyncio.get_running_loop().call_soon(self._cancel, data)
                return
            if create.lane not in self._lanes and len(self._lanes) >= MAX_LANES:
                text = f"No more than {MAX_LANES} responses run at the same time on a connection (stream_id)."
                raise ApiError(429, text, param="stream_id", code="too_many_streams")
        except ApiError as error:
            self._refuse(error)
            return
        self._messages += 1
        self.held += create.size
        if create.lane in self._lanes:
            self._lanes[create.lane].append(create)
            return
        self._lanes[create.lane] = deque([create])
        task = asyncio.ensure_future(self._run_lane(create.lane))
        self._running.add(task)
        task.add_done_callback(self._on_lane_done)

    def _cancel(self, message: bytes) -> None:
        """Tell the servers, also those that get their response later."""
        self._upstreams.tell(message)
        if concerns_all(message):
            for sink in self._sinks:
                sink.cancelled = True

    def on_written(self) -> None:
        """All that is sent goes through the channel."""

    def on_pause(self) -> None:
        for sink in list(self._sinks):
            sink.on_pause()

    def on_resume(self) -> None:
        for sink in list(self._sinks):
            sink.on_resume()

    def on_closed(self) -> None:
        """What runs is cancelled, and what waits does not begin."""
        self._shared.sessions.discard(self)
        for waiting in self._lanes.values():
            waiting.clear()
        for sink in list(self._sinks):
            sink.on_disconnect()
        self._upstreams.close()

    def check(self) -> None:
        """Called every few seconds."""
        self._upstreams.check()

    def _refuse(self, error: ApiError) -> None:
        """What is no request gets an error, and counts as one that was rejected."""
        now, reason = self._shared.relay.clock(), rejection_reason(error)
        record = RequestRecord(RESPONSES, self._handshake.request_id, "POST", began_at=now, ended_at=now)
        record.reason, record.status = reason, error.status
        self._shared.recorder.finish(record)
        SocketSink(self._socket, None).refuse(error)

    # -- lanes

    async def _run_lane(self, lane: str | None) -> None:
        waiting = self._lanes[lane]
        try:
            while waiting:
                create = waiting.popleft()
                try:
                    await self._relay(create)
                finally:
                    self._messages -= 1
                    self.held -= create.size
                    self._socket.read_on()
        finally:
            del self._lanes[lane]

    def _on_lane_done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("a WebSocket failed in the gateway", exc_info=error)
        if not self._running:
            self._socket.on_idle()

    # -- one response

    async def _relay(self, create: CreateMessage) -> None:
        """As :meth:`penstock.gateway.app.GatewayApp` relays a request."""
        shared, handshake = self._shared, self._handshake
        self._count += 1
        request_id = f"{handshake.request_id}.{self._count}"
        trace = shared.tracing.extract(handshake.headers)
        record = RequestRecord(RESPONSES, request_id, "POST", trace, began_at=shared.relay.clock())
        shared.metrics.request_started(record)
        shared.in_flight += 1
        sink = SocketSink(self._socket, create.lane)
        self._sinks.add(sink)
        try:
            await self._send(create, record, sink)
        except ClientGone:
            record.outcome, record.reason = Outcome.CLIENT_DISCONNECT, record.reason or "the client has gone"
        except ApiError as error:
            record.status, record.reason = error.status, record.reason or rejection_reason(error)
            sink.refuse(error)
        except Exception:
            log.exception("%s failed in the gateway", RESPONSES)
            record.outcome, record.status, record.reason = Outcome.REJECTED, 500, "internal"
            sink.refuse(ApiError(500, "The gateway failed to handle this request."))
        finally:
            self._sinks.discard(sink)
            shared.in_flight -= 1
            record.status = sink.status or record.status
            record.ended_at = shared.relay.clock()
            shared.recorder.finish(record)

    async def _send(self, create: CreateMessage, record: RequestRecord, sink: SocketSink) -> None:
        """Raises ApiError."""
        incoming = await self._incoming(create, record)
        sink.continues = incoming.response is not None
        got: list[ResponseConnections] = []

        def connections(endpoint: Endpoint) -> ResponseConnections:
            got.append(ResponseConnections(self._upstreams, endpoint, create, incoming.response, sink))
            return got[-1]

        named = (REQUEST_ID, record.request_id.encode("latin-1"))
        client = HttpClientConnection(sink, named, self._shared.write_batch)
        client.connections = connections
        await self._shared.relay.run(incoming, client, record, await self._owners(incoming))
        made = record.seen.response_id
        if made is not None and got and got[-1].socket is not None:
            self._upstreams.learn(made, got[-1].endpoint, got[-1].socket)

    async def _incoming(self, create: CreateMessage, record: RequestRecord) -> IncomingRequest:
        """Raises ApiError."""
        intake, head = self._shared.intake, self._handshake
        self._shared.own_routes.check_open()
        await intake.authorize(record, head.fields, head.address)
        id = (REQUEST_ID, record.request_id.encode("latin-1"))
        added = [*head.relayed, (b"content-type", b"application/json"), id, head.via]
        received = await received_whole(create.raw)
        incoming = intake.read(
            record,
            head.headers,
            received,
            session=head.session,
            relayed_headers=inject_trace_context(added, record.trace),
            target=head.target,
        )
        if received.values and incoming.body is not None:  # counted without them; a message is sent whole
            body = msgspec.structs.replace(incoming.body, raw=create.raw)
            incoming = msgspec.structs.replace(incoming, raw=create.raw, body=body, values=NO_VALUES)
        if incoming.session is None and (incoming.body is None or incoming.body.session is None):
            incoming = msgspec.structs.replace(incoming, session=f"websocket {head.request_id}")
        return incoming

    async def _owners(self, incoming: IncomingRequest) -> list[Endpoint] | None:
        """The endpoints that have the response which a request continues, if one of this connection's has
        made it; None: that is to be found out. Raises ApiError."""
        router, response = self._shared.relay.router, incoming.response
        maker = self._upstreams.maker(response)
        if response is None or maker is None:
            return None
        now = router.clock()
        if maker.is_ready(now):
            return [maker]
        if owners := await router.search.elsewhere(response, incoming.headers, now, {maker}):
            return list(owners)
        text = f"The endpoint that has made the response {shown(response)!r} takes no more requests."
        raise ApiError(400, text, param=PREVIOUS, code=NOT_FOUND)
