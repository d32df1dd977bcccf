"""Connections that the supervisor hands over, in a running event loop."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import uvloop

from penstock.http.sockets.connection_source import HandedOverConnections
from penstock.wire.handover import HandoverReceiver, HandoverReport, HandoverSender
from tests.certificates import Certificates

PATIENCE_S = 60.0


class Echo(asyncio.Protocol):
    """A connection: in ``connections`` while it is open, and ``source`` is told when it is lost."""

    def __init__(self, connections: set[Echo], source: HandedOverConnections) -> None:
        self._connections = connections
        self._connection_source = source

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._connections.add(self)

    def data_received(self, data: bytes) -> None:
        self._transport.write(data)

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.discard(self)
        self._connection_source.on_lost()


class Side:
    """The supervisor that hands connections over, and the server's source."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self.sender = HandoverSender()
        stack.callback(self.sender.close)
        self.source = HandedOverConnections(HandoverReceiver(os.dup(self.sender.server_end)))
        self.connections: set[Echo] = set()
        self.latest: HandoverReport | None = None

    async def open(self, tls: ssl.SSLContext | None = None) -> None:
        await self.source.open(lambda: Echo(self.connections, self.source), tls, PATIENCE_S)

    def give(self) -> socket.socket:
        """The client's end of a connection that is handed over."""
        client, connection = socket.socketpair()
        self._stack.enter_context(client)
        client.setblocking(False)
        with connection:
            assert self.sender.send(connection)
        return client

    async def reports(self, expected: HandoverReport) -> None:
        """Until it is the latest."""
        async with asyncio.timeout(PATIENCE_S):
            while self.latest != expected:
                await asyncio.sleep(0.001)
                self.latest = self.sender.report() or self.latest


@asynccontextmanager
async def a_side() -> AsyncIterator[Side]:
    with ExitStack() as stack:
        side = Side(stack)
        yield side
        side.source.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await test()

    uvloop.run(main())


def test_connections_are_served_and_reported() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        async with a_side() as side:
            await side.open()
            await side.reports(HandoverReport(0, 0, True))
            clients = [side.give(), side.give()]
            for client in clients:
                await loop.sock_sendall(client, b"hello")
                assert await loop.sock_recv(client, 10) == b"hello"
            await side.reports(HandoverReport(2, 2, True))
            clients[0].close()
            await side.reports(HandoverReport(2, 1, True))
            side.source.close()
            await side.reports(HandoverReport(2, 1, False))
            assert len(side.connections) == 1

    run(test)


def test_what_comes_after_the_close_is_not_taken() -> None:
    async def test() -> None:
        async with a_side() as side:
            await side.open()
            side.source.close()
            side.source.close()
            side.give()
            await side.reports(HandoverReport(0, 0, False))
            await asyncio.sleep(0)
            count, connections = side.sender.reclaim()
            assert count == len(connections) == 1
            connections[0].close()

    run(test)


def test_a_connection_that_does_not_agree_on_tls_is_not_open(certificates: Certificates) -> None:
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    tls.load_cert_chain(certificates.both)

    async def test() -> None:
        loop = asyncio.get_running_loop()
        async with a_side() as side:
            await side.open(tls)
            client = side.give()
            await side.reports(HandoverReport(1, 1, True))
            await loop.sock_sendall(client, b"GET / HTTP/1.1\r\n\r\n")
            await side.reports(HandoverReport(1, 0, True))
            side.give().close()
            await side.reports(HandoverReport(2, 0, True))

    run(test)


def test_a_report_that_finds_no_room_comes_later() -> None:
    async def test() -> None:
        async with a_side() as side:
            await side.open()
            full = HandoverReceiver(os.dup(side.sender.server_end))
            number = 100
            while full.report(number, accepts=True):
                number += 1
            full.close()
            client = side.give()
            loop = asyncio.get_running_loop()
            await loop.sock_sendall(client, b"x")
            assert await loop.sock_recv(client, 1) == b"x"
            await side.reports(HandoverReport(1, 1, True))

    run(test)
