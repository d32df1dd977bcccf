"""HTTP/2 and HTTP/1.1 on one port with real clients over real sockets: curl, nghttp2, httpx (h2), Node."""

from __future__ import annotations

import asyncio
import shutil
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvloop

from penstock.config.serve import ServeConfig
from penstock.http.errors import ApiError
from penstock.http.http2 import frames
from penstock.http.http2.header_blocks import encode_fields
from penstock.http.request import HttpRequest
from penstock.http.server import HttpServer
from penstock.http.server_state import Limits
from penstock.http.sockets.connection_source import ListeningSocket
from penstock.http.tls import server_context
from tests.certificates import Certificates
from tests.http.http2.clients import GET, Recorder, Streaming

PATIENCE_S = 60.0
LARGE = 1_000_000
EVENTS = 20

NODE = """
const http2 = require('http2');
const [url, ca] = process.argv.slice(1);
const client = http2.connect(url, {ca: require('fs').readFileSync(ca)});
let left = 4;
function ask(path, body) {
  const request = client.request({':path': path, ':method': body ? 'POST' : 'GET'});
  let status = 0, text = '';
  request.on('response', (headers) => { status = headers[':status']; });
  request.on('data', (part) => { text += part; });
  request.on('end', () => {
    console.log(path, status, text.length < 50 ? text : text.length);
    if (--left === 0) client.close();
  });
  request.end(body);
}
ask('/large');
ask('/events');
ask('/body', 'x'.repeat(500000));
const forever = client.request({':path': '/forever'});
forever.once('data', () => forever.close(http2.constants.NGHTTP2_CANCEL));
forever.on('close', () => ask('/gone'));
"""


class App:
    """``/large``, ``/events``, ``/forever``; ``/early`` answers before the body comes; ``/gone`` says how
    many replies have lost their client; any other path echoes the size of its body."""

    def __init__(self) -> None:
        self.gone = 0

    async def __call__(self, http: HttpRequest) -> None:
        path = http.path
        if path == "/large":
            await http.reply_json(b"x" * LARGE)
        elif path in ("/events", "/forever"):
            Events(self, http.sink, last=EVENTS - 1 if path == "/events" else -1)
        elif path == "/early":
            await http.reply_json(b"{}", 413)
        elif path == "/gone":
            await http.reply_json(b"%d" % self.gone)
        else:
            body = await http.read_body(2**26, lambda limit: ApiError(413, "too large"))
            http.sink.release()
            await http.reply_json(b'{"size":%d,"version":"%b"}' % (len(body), http.version.encode()))


class Events(Recorder):
    """Sends an event per turn of the event loop; ``last``: the number of the last one."""

    def __init__(self, app: App, sink: Any, last: int) -> None:
        super().__init__()
        self._app, self._sink, self._last, self._number = app, sink, last, 0
        sink.listen(self)
        self._send()

    def _send(self) -> None:
        if "disconnect" in self.told:
            return
        last = self._number == self._last
        self._sink.send(b"data: %d\n\n" % self._number, last=last)
        self._number += 1
        if not last:
            asyncio.get_running_loop().call_soon(self._send)

    def on_disconnect(self) -> None:
        super().on_disconnect()
        self._app.gone += 1


@asynccontextmanager
async def serving(tls: ssl.SSLContext | None, app: Any) -> AsyncIterator[tuple[int, HttpServer]]:
    """Its port, and the server."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=1024)
    listening = asyncio.Event()
    server = HttpServer(app, ListeningSocket(listener, 1000), Limits(), tls=tls, on_listening=listening.set)
    running = asyncio.ensure_future(server.run_to_the_end())
    await listening.wait()
    try:
        yield listener.getsockname()[1], server
    finally:
        server.stop()
        await running


def with_server(
    test: Callable[[int, HttpServer], Awaitable[None]], tls: ssl.SSLContext | None = None, app: Any = None
) -> None:
    async def main() -> None:
        async with asyncio.timeout(PATIENCE_S), serving(tls, app or App()) as (port, server):
            await test(port, server)

    uvloop.run(main())


async def output(*command: str) -> str:
    """What ``command`` prints; skips the test if there is no such program."""
    if shutil.which(command[0]) is None:
        pytest.skip(f"there is no {command[0]}")
    process = await asyncio.create_subprocess_exec(
        *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        text, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, text
    return text.decode()


def context(certificates: Certificates) -> ssl.SSLContext:
    config = ServeConfig(ssl_certfile=certificates.chain, ssl_keyfile=certificates.key)
    made = server_context(config)
    assert made is not None
    return made


@pytest.mark.parametrize("flag", ["--http2-prior-knowledge", "--http1.1", "--http2"])
def test_curl_speaks_either_protocol_on_one_port(flag: str) -> None:
    """``--http2`` asks for an upgrade of HTTP/1.1, which is not done (RFC 9113 has removed it)."""
    version = "2" if flag == "--http2-prior-knowledge" else "1.1"

    async def test(port: int, server: HttpServer) -> None:
        url = f"http://127.0.0.1:{port}"
        text = await output("curl", "-sS", flag, "-d", "x" * 1000, f"{url}/body")
        assert text == f'{{"size":1000,"version":"{version}"}}'
        text = await output("curl", "-sSN", flag, f"{url}/events")
        assert text.endswith(f"data: {EVENTS - 1}\n\n")

    with_server(test)


def test_a_reply_reaches_clients_that_still_send_their_request(tmp_path: Path) -> None:
    """curl 7.88 and httpx fail if RST_STREAM follows the reply."""
    (tmp_path / "body").write_bytes(b"x" * 3_000_000)

    async def test(port: int, server: HttpServer) -> None:
        url = f"http://127.0.0.1:{port}/early"
        flags = ["-sS", "-w", "%{http_code}", "--http2-prior-knowledge"]
        assert await output("curl", *flags, "--data-binary", f"@{tmp_path / 'body'}", url) == "{}413"
        async with httpx.AsyncClient(http1=False, http2=True, timeout=PATIENCE_S) as client:
            assert (await client.post(url, content=b"x" * 3_000_000)).status_code == 413
            assert (await client.post(url[:-5] + "large")).status_code == 200

    with_server(test)


def test_alpn_chooses_the_protocol(certificates: Certificates) -> None:
    async def test(port: int, server: HttpServer) -> None:
        url = f"https://127.0.0.1:{port}/body"
        for flag, version in (("--http2", "2"), ("--http1.1", "1.1"), ("--no-alpn", "1.1")):
            text = await output("curl", "-sS", flag, "--cacert", certificates.authority, "-d", "x", url)
            assert text == f'{{"size":1,"version":"{version}"}}'
        text = await output("curl", "-sS", "--http2", "--cacert", certificates.authority, url[:-4] + "large")
        assert len(text) == LARGE

    with_server(test, context(certificates))


@pytest.mark.parametrize("window", ["16", "30"])
def test_nghttp2_loads_many_streams(window: str) -> None:
    """``h2load`` with the smallest and the largest of its windows, 2^16 and 2^30 bytes."""

    async def test(port: int, server: HttpServer) -> None:
        url = f"http://127.0.0.1:{port}"
        small = ["h2load", "-n", "2000", "-c", "4", "-m", "200", f"-w{window}", f"-W{window}"]
        assert "2000 succeeded, 0 failed, 0 errored" in await output(*small, f"{url}/events")
        large = ["h2load", "-n", "40", "-c", "2", "-m", "10", f"-w{window}", f"-W{window}"]
        text = await output(*large, f"{url}/large")
        assert "40 succeeded, 0 failed, 0 errored" in text
        assert f"({40 * LARGE}) data" in text

    with_server(test)


def test_nghttp_follows_the_frames() -> None:
    async def test(port: int, server: HttpServer) -> None:
        text = await output(
            "nghttp",
            "-nv",
            f"http://127.0.0.1:{port}/events",
            "-H",
            "x: " + "v" * 20_000,
            "--header-table-size=0",
        )
        assert text.count("recv DATA frame") == EVENTS
        assert "END_STREAM" in text

    with_server(test)


def test_node_speaks_http2_and_cancels_a_stream(certificates: Certificates) -> None:
    async def test(port: int, server: HttpServer) -> None:
        text = await output("node", "-e", NODE, f"https://127.0.0.1:{port}", certificates.authority)
        lines = {*text.splitlines()}
        assert {f"/large 200 {LARGE}", '/body 200 {"size":500000,"version":"2"}', "/gone 200 1"} < lines
        assert len(lines) == 4

    with_server(test, context(certificates))


def test_httpx_shares_a_connection_until_the_server_drains() -> None:
    async def test(port: int, server: HttpServer) -> None:
        url = f"http://127.0.0.1:{port}"
        async with (
            httpx.AsyncClient(http1=False, http2=True, timeout=PATIENCE_S) as client,
            client.stream("GET", f"{url}/events") as reply,
        ):
            lines = reply.aiter_lines()
            assert await anext(lines) == "data: 0"
            others = await asyncio.gather(*[client.post(url, content=b"x" * n) for n in (1, 1000, 300_000)])
            assert [other.json()["size"] for other in others] == [1, 1000, 300_000]
            assert {other.http_version for other in others} == {"HTTP/2"}
            assert server.connection_count == 1
            server.drain()
            assert len([line async for line in lines if line]) == EVENTS - 1
        await server.run_to_the_end()

    with_server(test)


def test_an_event_overtakes_a_large_reply_that_a_slow_client_has_not_read() -> None:
    """Neither the transport nor the kernel takes more of a large reply than a client reads soon."""
    streaming = Streaming()

    async def app(http: HttpRequest) -> None:
        if http.path == "/large":
            await http.reply_json(b"x" * 8_000_000)
        else:
            await streaming(http)

    def request(stream_id: int, path: bytes) -> bytes:
        block = encode_fields([*GET[:2], (b":path", path), GET[3]])
        return frames.header_frames(stream_id, block, end_stream=True, max_frame_size=16_384)

    async def test(port: int, server: HttpServer) -> None:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 32_768)
            client.connect(("127.0.0.1", port))
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            windows = frames.settings_frame({frames.INITIAL_WINDOW_SIZE: 2**30}) + frames.window_update(
                0, 2**30
            )
            await loop.sock_sendall(
                client, frames.PREFACE + windows + request(1, b"/x") + request(3, b"/large")
            )
            scanner, before, found = frames.FrameScanner(2**20), 0, False
            while not found:
                await asyncio.sleep(0.002)  # the server fills what it can while the client does not read
                if before > 300_000 and not streaming.sinks[0].request.started:
                    streaming.sinks[0].send(b"event", last=False)
                    before = 0
                scanner.receive(await loop.sock_recv(client, 16_384))
                for kind, _, stream_id, payload in scanner.take_frames(1000):
                    found = found or (kind == frames.DATA and stream_id == 1)
                    before += len(payload) if stream_id == 3 and not found else 0
            assert before < 500_000

    with_server(test, app=app)
