"""Handles API servers' messages to an engine: Hello, streams, calls, desired states, queries, Disconnect.

A stream that cannot run fails alone. A peer whose messages cannot be understood, or that breaks the protocol,
is refused: its streams are dropped, it is told, and named in the log once a minute. Nothing that one peer
sends ends the engine or another peer's stream.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from penstock.engine.base import Engine, RequestRejected, StreamFailure
from penstock.engine.loop.identity import EngineIdentity
from penstock.engine.loop.peers import Peer, peer_name
from penstock.engine.loop.publisher import Publisher
from penstock.engine.loop.rpc import RpcServer
from penstock.engine.loop.state_reconciler import StateReconciler
from penstock.engine.loop.stats import EngineStats
from penstock.engine.loop.stream_spans import StreamSpans
from penstock.engine.weights.weight_loader import BrokenWeights
from penstock.logging_setup import RateLimitedLog
from penstock.wire.decoding import decode_from_server
from penstock.wire.media.items import PagePiece
from penstock.wire.messages import (
    ENGINE_PROTOCOL_VERSION,
    Abort,
    ApplyStates,
    Disconnect,
    EngineMetricsQuery,
    FromServer,
    Hello,
    InvalidSubmit,
    RpcCall,
    Submit,
    Welcome,
    WireError,
)
from penstock.wire.parts import Part
from penstock.wire.sockets import server_identity
from penstock.wire.submits import split_submit

log = logging.getLogger(__name__)

MAX_REFUSED_PEERS = 1024
"""Refused connections remembered, each of which is answered once."""
INTERNAL_ERROR = "the engine could not handle this request; its log says more"


class InboxHooks(NamedTuple):
    """What an inbox asks and tells the engine's loop."""

    on_metrics_query: Callable[[int, EngineMetricsQuery], None] = lambda server, query: None
    """Takes the query of an API server."""
    refuse_streams: Callable[[], RequestRejected | None] = lambda: None
    """Returns why new streams are refused; None: they are not."""
    current_head: Callable[[], int] = lambda: 0
    """Returns the incarnation of the head that this engine belongs to; 0: unknown."""
    probe: Callable[[], None] = lambda: None
    """Drops the API servers whose connection has broken."""


class Inbox:
    """Handles one message at a time; replies go out through the publisher."""

    def __init__(
        self,
        engine: Engine,
        publisher: Publisher,
        identity: EngineIdentity,
        *,
        calls: RpcServer,
        states: StateReconciler,
        stats: EngineStats,
        spans: StreamSpans,
        hooks: InboxHooks,
    ) -> None:
        self._engine = engine
        self._calls = calls
        self._states = states
        self._spans = spans
        self._hooks = hooks
        self._stats = stats
        self._publisher = publisher
        self._peers = publisher.peers
        self._identity = identity
        self._head = 0
        """Incarnation of the head whose desired states the engine has followed last; 0: none's."""
        self._parts: deque[tuple[bytes, Part]] = deque()
        """Messages received and not handled yet, with their peer."""
        self._refused: set[bytes] = set()
        """Peers that have been refused and told so."""
        self._warn = RateLimitedLog(log, logging.ERROR)

    @property
    def waiting(self) -> bool:
        return bool(self._parts)

    def receive(self, identity: bytes, parts: list[Part]) -> None:
        """One ZMQ message: any number of control messages of one API server."""
        self._parts += [(identity, part) for part in parts]

    def handle(self) -> int:
        """Handle the next control message that was received. Returns its length in bytes, with that of a
        prefix to which it refers. Raises BrokenWeights."""
        identity, part = self._parts.popleft()
        size = len(part)
        try:
            message = decode_from_server(part)
            if isinstance(message, Submit) and message.prefix is not None:
                size += 4 * message.prefix.tokens
            self._on_message(identity, message)
        except InvalidSubmit as error:
            self._on_invalid_submit(identity, error)
        except WireError as error:
            self._refuse(identity, str(error))
        except BrokenWeights:
            raise
        except Exception:  # noqa: BLE001 - one peer's message must not end the others' engine
            self._log_defect("message", identity)
            self._refuse(identity, "the engine could not handle its message")
        self.drop_disconnected()
        return size

    def drop_disconnected(self) -> None:
        """Drop the streams of API servers that have been detached."""
        for peer in self._peers.take_disconnected():
            self._engine.drop_server(peer.server)
            self._stats.drop(peer.streams.values())
            self._spans.drop(peer.streams.values())
            self._peers.close_all(peer)

    def _log_defect(self, what: str, identity: bytes) -> None:
        self._warn("defect", "a %s of %s could not be handled", what, peer_name(identity), exc_info=True)

    def _refuse(self, identity: bytes, reason: str) -> None:
        self._stats.refuse()
        peer = self._peers.find_peer(identity)
        if peer is not None:
            self._peers.detach(peer)
        if identity in self._refused:
            return
        if len(self._refused) >= MAX_REFUSED_PEERS:
            self._refused.clear()
        self._refused.add(identity)
        if self._publisher.reject_peer(identity, reason):
            name = peer_name(identity)
            self._warn(name, "%s is refused: %s; its streams are dropped", name, reason)

    def _on_message(self, identity: bytes, message: FromServer) -> None:
        if isinstance(message, Hello):
            self._on_hello(identity, message)
            return
        peer = self._peers.find_peer(identity)
        if peer is None:
            if isinstance(message, Disconnect):
                return  # it has been refused before, or never attached
            raise WireError("it sent a message before its Hello")
        match message:
            case Submit():
                gone = None
                try:
                    message = self._peers.prompts.restore(peer.identity, message)
                except RequestRejected as error:
                    gone = error
                for request in split_submit(message):
                    self._on_submit(peer, request, gone)
            case Abort():
                self._on_abort(peer, message)
            case RpcCall():
                self._calls.handle(peer.server, message)
            case PagePiece():
                if self._engine.pages is not None:
                    self._engine.pages.receive(peer.server, message)
            case ApplyStates():
                self._states.apply(peer.server, message.states)
            case EngineMetricsQuery():
                self._hooks.on_metrics_query(peer.server, message)
            case Disconnect():
                self._peers.detach(peer)

    def _on_hello(self, identity: bytes, hello: Hello) -> None:
        """Attach an API server. Streams of its earlier connection are dropped, and that is told, in case
        another process has taken its number."""
        if hello.protocol != ENGINE_PROTOCOL_VERSION:
            raise WireError(
                f"its protocol version is {hello.protocol}, this engine speaks {ENGINE_PROTOCOL_VERSION}"
            )
        build = self._identity.build
        if build and hello.build and hello.build != build:
            raise WireError(f"its build is {hello.build}, this engine's is {build}")
        if identity != server_identity(hello.server, hello.epoch, hello.incarnation, hello.connection):
            raise WireError(f"its Hello, of API server {hello.server}, is not this peer's")
        if self._peers.find_peer(identity) is not None:
            raise WireError("it sent a second Hello on a connection")
        order = hello.incarnation, hello.epoch, hello.connection
        self._make_way(hello.server, order)
        if hello.incarnation != self._head and hello.incarnation == self._hooks.current_head():
            self._head = hello.incarnation
            self._states.forget()
        self._refused.discard(identity)
        self._publisher.attach(hello.server, identity, order)
        welcome = Welcome(
            protocol=ENGINE_PROTOCOL_VERSION,
            rank=self._identity.rank,
            epoch=self._identity.epoch,
            info=self._engine.info,
            incarnation=self._identity.incarnation,
            kept_prompt_bytes=self._peers.prompts.room,
        )
        self._publisher.send(hello.server, welcome)

    def _make_way(self, server: int, order: tuple[int, int, int]) -> None:
        """Detach the API server that has this one's number. Raises WireError if it keeps the number.

        Incarnations tell only whether two processes are of one run. Of two runs, the head's takes the
        number; another one takes it only from a process that is gone.
        """
        known = self._peers.get(server)
        if known is not None and known.order[0] == order[0]:
            if order < known.order:
                raise WireError(f"a later process or connection serves as API server {server}")
        elif known is not None and order[0] != self._hooks.current_head():
            self._hooks.probe()
            known = self._peers.get(server)
            if known is not None:
                raise WireError(f"it is not of this engine's head, whose API server {server} is connected")
        if known is not None:
            self._publisher.dismiss(known, f"another process or connection serves as API server {server}")
        self.drop_disconnected()

    def _on_submit(self, peer: Peer, request: Submit, refusal: RequestRejected | None = None) -> None:
        """``refusal``: why the engine cannot take it; None: that is to be found out."""
        peer.accepted += 1
        handle = request.stream
        number = self._peers.open(peer, handle, request.ids)
        try:
            refusal = refusal or self._hooks.refuse_streams()
            if refusal is not None:
                raise refusal
            if request.pooling is not None and self._engine.info.pooling is None:
                raise RequestRejected("pooling: this engine makes text alone")
            if request.media and self._engine.info.media is None:
                raise RequestRejected("media: this engine takes text alone")
            numbered = msgspec.structs.replace(request, stream=number)
            self._engine.submit(peer.server, numbered)
            self._stats.arrive(numbered, time.monotonic())
            self._spans.begin(numbered)
        except RequestRejected as error:
            self._fail(peer, handle, request.resumed, error.code, str(error))
        except Exception:  # noqa: BLE001 - this stream fails, the others do not notice
            self._log_defect("request", peer.identity)
            self._fail(peer, handle, request.resumed, "engine_error", INTERNAL_ERROR)

    def _fail(self, peer: Peer, handle: int, position: int, code: str, message: str) -> None:
        """End a stream that the engine has not accepted."""
        self._peers.close(peer, handle)
        failure = StreamFailure(peer.server, handle, position=position, code=code, message=message)
        self._publisher.fail(failure, self._engine.load())

    def _on_invalid_submit(self, identity: bytes, error: InvalidSubmit) -> None:
        """Fail the streams of a request that has a field out of bounds, and only these."""
        peer = self._peers.find_peer(identity)
        if peer is None or any(handle in peer.streams for handle, _ in error.streams):
            self._refuse(identity, str(error))
            return
        self._stats.refuse()
        peer.accepted += len(error.streams)
        name = peer_name(identity)
        self._warn(name, "%s sent a request with %s; it fails", name, error)
        for handle, position in error.streams:
            failure = StreamFailure(peer.server, handle, position, "invalid_request", str(error))
            self._publisher.fail(failure, self._engine.load())

    def _on_abort(self, peer: Peer, message: Abort) -> None:
        numbers = [peer.streams[handle] for handle in message.streams if handle in peer.streams]
        if message.stopped:
            self._stats.stop(numbers)
        self._engine.abort(peer.server, numbers)
