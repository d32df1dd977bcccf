"""What API servers ask of an engine: their messages, checked and handed on.

An API server is known from its Hello until its Bye, a broken connection, or a message that cannot be
understood. Whatever ends it, its streams end with it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from penstock.engine.base import Engine, RequestRejected, StreamFailure
from penstock.engine.calls import EngineCalls
from penstock.engine.publisher import Publisher
from penstock.engine.stats import EngineStats
from penstock.wire.messages import (
    PROTOCOL_VERSION,
    Abort,
    Bye,
    Call,
    FromServer,
    Hello,
    Submit,
    Welcome,
    WireError,
    decode_from_server,
)
from penstock.wire.sockets import server_identity

log = logging.getLogger(__name__)

MOST_SERVERS = 1024
"""As ``--api-server-count`` allows."""
MOST_HANDLES = 1 << 22
"""API servers number their streams from 0 and use numbers again, so these are streams at the same time."""
REFUSALS_KEPT = 1024
"""Refused peers remembered, so that each connection is told and each process logged once."""


class Inbox:
    """Takes one message after the other; answers go out through the publisher."""

    def __init__(
        self,
        engine: Engine,
        publisher: Publisher,
        rank: int,
        epoch: int,
        calls: EngineCalls,
        stats: EngineStats,
        clock: Callable[[], float] = time.monotonic,
        incarnation: int = 0,
        refuse_streams: Callable[[], RequestRejected | None] = lambda: None,
    ) -> None:
        """``refuse_streams`` says why no stream is taken at all."""
        self._engine = engine
        self._calls = calls
        self._refuse_streams = refuse_streams
        self._stats = stats
        self._clock = clock
        self._publisher = publisher
        self._rank = rank
        self._epoch = epoch
        self._incarnation = incarnation
        self._servers: dict[bytes, Hello] = {}
        """How the known API servers have introduced themselves, by identity."""
        self._refused: set[bytes] = set()

    def take(self, identity: bytes, parts: list[bytes]) -> None:
        """One ZMQ message: one or more control messages of one API server. Never raises for what a peer
        sent."""
        try:
            for part in parts:
                self._on_message(identity, decode_from_server(part))
        except WireError as error:
            self._refuse(identity, str(error))

    def forget(self, server: int) -> None:
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
            self.forget(known.server)
        if identity in self._refused:
            return
        if len(self._refused) >= REFUSALS_KEPT:
            self._refused.clear()
        process = identity.rpartition(b"-")[0] or identity  # it may connect again and again
        if process not in self._refused:
            log.error("peer %r: %s; its streams are dropped", identity, reason)
        self._refused |= {identity, process}
        self._publisher.dismiss(identity, reason)

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
            case Call():
                self._calls.take(server, message)
            case Bye():
                self.forget(server)

    def _on_hello(self, identity: bytes, hello: Hello) -> None:
        """A Hello is the first message of a connection: streams of an earlier one have lost their reader."""
        if hello.protocol != PROTOCOL_VERSION:
            raise WireError(f"Hello.protocol is {hello.protocol}, this engine speaks {PROTOCOL_VERSION}")
        if identity != server_identity(hello.server, hello.epoch, hello.incarnation, hello.connection):
            raise WireError(f"{hello} is not this peer's")
        if hello.server >= MOST_SERVERS:
            raise WireError(f"Hello.server is {hello.server}, at most {MOST_SERVERS - 1} is taken")
        for known in self._servers.values():
            if known.server == hello.server and _order(hello) < _order(known):
                raise WireError(f"{hello} was followed by {known}")
        self.forget(hello.server)
        self._refused.discard(identity)
        self._servers[identity] = hello
        self._publisher.attach(hello.server, identity)
        welcome = Welcome(PROTOCOL_VERSION, self._rank, self._epoch, self._engine.info, self._incarnation)
        self._publisher.send(hello.server, welcome)

    def _on_submit(self, server: int, request: Submit) -> None:
        if request.stream >= MOST_HANDLES:
            raise WireError(f"Submit.stream is {request.stream}, at most {MOST_HANDLES - 1} is taken")
        self._publisher.took_submit(server)
        try:
            refusal = self._refuse_streams()
            if refusal is not None:
                raise refusal
            self._engine.submit(server, request)
        except RequestRejected as error:
            failure = StreamFailure(server, request.stream, request.resumed, error.code, str(error))
            self._publisher.fail(failure, self._engine.load())
        else:
            self._stats.arrive(server, request, self._clock())


def _order(hello: Hello) -> tuple[int, int, int]:
    """Later ones of an API server are greater, also those of a server that was started anew."""
    return hello.incarnation, hello.epoch, hello.connection
