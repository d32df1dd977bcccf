"""Handles API servers' messages to an engine: Hello, Submit, Abort, RpcCall, Disconnect.

An API server is attached from its Hello until its Disconnect, a broken connection, or a message that cannot
be decoded. In each case its streams are dropped.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from penstock.engine.base import Engine, RequestRejected, StreamFailure
from penstock.engine.loop.publisher import Publisher
from penstock.engine.loop.rpc import RpcServer
from penstock.engine.loop.stats import EngineStats
from penstock.wire.messages import (
    ENGINE_PROTOCOL_VERSION,
    Abort,
    Disconnect,
    FromServer,
    Hello,
    RpcCall,
    Submit,
    Welcome,
    WireError,
    decode_from_server,
)
from penstock.wire.sockets import server_identity

log = logging.getLogger(__name__)

MAX_SERVERS = 1024
"""The bound of ``--api-server-count``."""
MAX_HANDLES = 1 << 22
"""Concurrent streams per API server, which numbers them from 0 and reuses numbers."""
MAX_REFUSED_PEERS = 1024
"""Refused peers remembered: each connection is answered once, each process logged once."""


class Inbox:
    """Handles one message at a time; replies go out through the publisher."""

    def __init__(
        self,
        engine: Engine,
        publisher: Publisher,
        *,
        rank: int,
        epoch: int,
        incarnation: int = 0,
        calls: RpcServer,
        stats: EngineStats,
        clock: Callable[[], float] = time.monotonic,
        refuse_streams: Callable[[], RequestRejected | None] = lambda: None,
        current_head: Callable[[], int] = lambda: 0,
        probe: Callable[[], None] = lambda: None,
    ) -> None:
        """``refuse_streams`` returns why new streams are refused, None: they are not. ``current_head``
        returns the incarnation of the head that this engine belongs to, 0: unknown. ``probe`` drops the API
        servers whose connection has broken."""
        self._engine = engine
        self._calls = calls
        self._refuse_streams = refuse_streams
        self._current_head = current_head
        self._probe = probe
        self._stats = stats
        self._clock = clock
        self._publisher = publisher
        self._rank = rank
        self._epoch = epoch
        self._incarnation = incarnation
        self._servers: dict[bytes, Hello] = {}
        """The Hello of each attached API server, by ZMQ identity."""
        self._refused: set[bytes] = set()

    def handle(self, identity: bytes, parts: list[bytes]) -> None:
        """One ZMQ message: one or more control messages of one API server. Refuses the peer, and does not
        raise, when one of them is invalid."""
        try:
            for part in parts:
                self._on_message(identity, decode_from_server(part))
        except WireError as error:
            self._refuse(identity, str(error))

    def drop_server(self, server: int) -> None:
        """The connection of an API server broke: drop its streams."""
        for identity, known in list(self._servers.items()):
            if known.server == server:
                del self._servers[identity]
        self._calls.drop_server(server)
        self._publisher.detach(server)
        self._engine.drop_server(server)
        self._stats.drop_server(server)

    def _refuse(self, identity: bytes, reason: str) -> None:
        known = self._servers.get(identity)
        if known is not None:
            self.drop_server(known.server)
        if identity in self._refused:
            return
        if len(self._refused) >= MAX_REFUSED_PEERS:
            self._refused.clear()
        process = identity.rpartition(b"-")[0] or identity  # it may connect again and again
        if process not in self._refused:
            log.error("peer %r: %s; its streams are dropped", identity, reason)
        self._refused |= {identity, process}
        self._publisher.reject_peer(identity, reason)

    def _on_message(self, identity: bytes, message: FromServer) -> None:
        if isinstance(message, Hello):
            self._on_hello(identity, message)
            return
        if identity not in self._servers:
            raise WireError(f"{type(message).__name__} before Hello")
        server = self._servers[identity].server
        match message:
            case Submit():
                self._on_submit(server, message)
            case Abort():
                if message.stopped:
                    self._stats.stop(server, message.streams)
                self._engine.abort(server, message.streams)
            case RpcCall():
                self._calls.handle(server, message)
            case Disconnect():
                self.drop_server(server)

    def _on_hello(self, identity: bytes, hello: Hello) -> None:
        """Attach an API server. Streams of its earlier connection are dropped: nobody reads them."""
        if hello.protocol != ENGINE_PROTOCOL_VERSION:
            raise WireError(
                f"Hello.protocol is {hello.protocol}, this engine speaks {ENGINE_PROTOCOL_VERSION}"
            )
        if identity != server_identity(hello.server, hello.epoch, hello.incarnation, hello.connection):
            raise WireError(f"{hello} is not this peer's")
        if hello.server >= MAX_SERVERS:
            raise WireError(f"Hello.server is {hello.server}, at most {MAX_SERVERS - 1} is taken")
        self._make_way(hello)
        self._refused.discard(identity)
        self._servers[identity] = hello
        self._publisher.attach(hello.server, identity)
        welcome = Welcome(
            protocol=ENGINE_PROTOCOL_VERSION,
            rank=self._rank,
            epoch=self._epoch,
            info=self._engine.info,
            incarnation=self._incarnation,
        )
        self._publisher.send(hello.server, welcome)

    def _make_way(self, hello: Hello) -> None:
        """Drop the API server that has this one's number. Raises WireError if it keeps the number.

        Incarnations tell only whether two processes are of one run. Of two runs, the head's takes the
        number; another one takes it only from a process that is gone.
        """
        known = self._find(hello.server)
        if known is not None and known.incarnation == hello.incarnation:
            if (hello.epoch, hello.connection) < (known.epoch, known.connection):
                raise WireError(f"{hello} was followed by {known}")
        elif known is not None and hello.incarnation != self._current_head():
            self._probe()
            if self._find(hello.server) is not None:
                raise WireError(f"{hello} is not of this engine's head, and {known} is connected")
        self.drop_server(hello.server)

    def _find(self, server: int) -> Hello | None:
        return next((known for known in self._servers.values() if known.server == server), None)

    def _on_submit(self, server: int, request: Submit) -> None:
        if request.stream >= MAX_HANDLES:
            raise WireError(f"Submit.stream is {request.stream}, at most {MAX_HANDLES - 1} is taken")
        self._publisher.count_submit(server)
        try:
            refusal = self._refuse_streams()
            if refusal is not None:
                raise refusal
            self._engine.submit(server, request)
        except RequestRejected as error:
            failure = StreamFailure(
                server, request.stream, position=request.resumed, code=error.code, message=str(error)
            )
            self._publisher.fail(failure, self._engine.load())
        else:
            self._stats.arrive(server, request, self._clock())
