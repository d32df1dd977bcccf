"""10,000 streams through two workers, of which one is killed: its own connections break, and no other."""

from __future__ import annotations

import asyncio
import resource

import pytest

from tests.gateway.processes import Gateway, gateway
from tests.gateway.workers.held_streams import BODY, END, END_ALL, EVENT, held_streams

STREAMS = 10_000
WAVE = 100
"""Streams that are opened at a time."""
LIMIT_S = 300.0
REQUEST = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(BODY), BODY)


class Client(asyncio.Protocol):
    """One stream."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.data = b""
        self.begun: asyncio.Future[None] = loop.create_future()
        self.over: asyncio.Future[None] = loop.create_future()
        self.port = 0
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport, self.port = transport, transport.get_extra_info("sockname")[1]
        transport.write(REQUEST)

    def data_received(self, data: bytes) -> None:
        self.data += data
        if EVENT in self.data and not self.begun.done():
            self.begun.set_result(None)
        if self.data.endswith(b"0\r\n\r\n"):
            self._end()

    def connection_lost(self, error: Exception | None) -> None:
        self._end()

    def _end(self) -> None:
        for future in (self.begun, self.over):
            if not future.done():
                future.set_result(None)

    @property
    def complete(self) -> bool:
        return self.data.endswith(b"0\r\n\r\n") and END in self.data


async def run_streams(front: Gateway, server_port: int) -> None:
    loop, port = asyncio.get_running_loop(), int(front.url.rpartition(":")[2])
    clients: list[Client] = []
    try:
        while len(clients) < STREAMS:
            opened = await asyncio.gather(
                *(loop.create_connection(Client, "127.0.0.1", port) for _ in range(WAVE))
            )
            wave = [client for _, client in opened]
            clients += wave
            await asyncio.gather(*(client.begun for client in wave))
        assert all(EVENT in client.data for client in clients)
        victim = front.workers[0]
        remote = [each.raddr.port for each in victim.net_connections("tcp") if each.laddr.port == port]
        of_victim = set(remote)
        assert STREAMS * 0.4 < len(of_victim) < STREAMS * 0.6
        victim.kill()
        await asyncio.gather(*(client.over for client in clients if client.port in of_victim))
        _, writer = await asyncio.open_connection("127.0.0.1", server_port)
        writer.write(END_ALL)
        await asyncio.gather(*(client.over for client in clients))
        writer.close()
        assert {client.port for client in clients if not client.complete} == of_victim
    finally:
        for client in clients:
            client.transport.abort()


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 60)
def test_a_killed_worker_breaks_its_own_connections_alone() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < STREAMS + 1000:
        pytest.skip(f"each process needs {STREAMS + 1000} open files, {hard} are allowed")

    async def limited() -> None:
        async with asyncio.timeout(LIMIT_S):
            await run_streams(front, server_port)

    options = ("--workers=2", "--access-log=none", "--upstream-http2=off", "--include-usage=off")
    with (
        held_streams() as server_port,
        gateway(f"http://127.0.0.1:{server_port}", options=options) as front,
    ):
        asyncio.run(limited())
        assert front.process.poll() is None
