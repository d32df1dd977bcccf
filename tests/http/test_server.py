"""How the server ends: clients that do not close hardly delay it, and requests that wait are answered."""

from __future__ import annotations

import asyncio
import socket
import ssl

import pytest
import uvloop

from penstock.config.serve import ServeConfig
from penstock.http.http2 import frames
from penstock.http.http2.header_blocks import encode_fields
from penstock.http.request import HttpRequest
from penstock.http.server import HttpServer
from penstock.http.server_state import LINGER_S, Limits
from penstock.http.sockets.connection_source import ListeningSocket
from penstock.http.tls import server_context
from tests.certificates import Certificates
from tests.http.connections import REQUEST, answer
from tests.http.http2.clients import GET

H2_REQUEST = (
    frames.PREFACE
    + frames.settings_frame({})
    + frames.header_frames(1, encode_fields(GET), end_stream=True, max_frame_size=frames.DEFAULT_FRAME_SIZE)
)


@pytest.mark.parametrize("tls", [False, True], ids=["clear", "tls"])
@pytest.mark.parametrize("request_bytes", [REQUEST, H2_REQUEST], ids=["http1", "http2"])
def test_a_client_that_does_not_close_hardly_delays_a_drain(
    request_bytes: bytes, tls: bool, certificates: Certificates
) -> None:
    async def run() -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        config = ServeConfig(ssl_certfile=certificates.chain, ssl_keyfile=certificates.key)
        context = server_context(config) if tls else None
        server = HttpServer(answer, ListeningSocket(listener, 1000), Limits(), tls=context)
        running = asyncio.ensure_future(server.run_to_the_end())
        client = await asyncio.to_thread(ask, listener.getsockname()[1], tls)
        with client:
            server.drain()
            async with asyncio.timeout(LINGER_S - 1.0):
                await running

    def ask(port: int, tls: bool) -> socket.socket:
        client = socket.create_connection(("127.0.0.1", port), timeout=60.0)
        if tls:
            client = ssl.create_default_context(cafile=certificates.authority).wrap_socket(
                client, server_hostname="127.0.0.1"
            )
        client.sendall(request_bytes)
        received = b""
        while b"{}" not in received:
            received += client.recv(65536)
        return client

    uvloop.run(run())


@pytest.mark.parametrize("request_bytes", [REQUEST, H2_REQUEST], ids=["http1", "http2"])
def test_a_request_that_waits_when_the_server_stops_may_answer(request_bytes: bytes) -> None:
    async def run() -> None:
        waits = asyncio.Event()

        async def wait(request: HttpRequest) -> None:
            try:
                waits.set()
                await asyncio.get_running_loop().create_future()
            except asyncio.CancelledError:
                await request.reply_json(b"stopped")

        listener = socket.create_server(("127.0.0.1", 0))
        server = HttpServer(wait, ListeningSocket(listener, 1000), Limits())
        running = asyncio.ensure_future(server.run_to_the_end())
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(request_bytes)
        await waits.wait()
        server.stop()
        async with asyncio.timeout(60):
            await running
            assert b"stopped" in await reader.read()
        writer.close()

    uvloop.run(run())
