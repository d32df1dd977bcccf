"""A server for the terminal commands: real sockets, recorded replies."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).parents[1] / "data" / "client"
EVENT_STREAM = "text/event-stream; charset=utf-8"


@dataclass
class Reply:
    """One reply of the fake server, sent in so many ``pieces``.

    With ``cut`` the connection ends without the last chunk; with ``hold`` it stays open until that is set,
    with ``pings`` not silently: a client notices Ctrl-C at the latest when something arrives.
    """

    body: bytes
    status: int = 200
    content_type: str = EVENT_STREAM
    pieces: int = 1
    cut: bool = False
    hold: threading.Event | None = None
    pings: bool = False


@dataclass
class FakeServer:
    """Replies in the order of ``replies``; ``requests`` are (path, headers, decoded body) as they came."""

    url: str = ""
    models: Reply = field(
        default_factory=lambda: Reply((DATA / "models.json").read_bytes(), content_type="application/json")
    )
    replies: list[Reply] = field(default_factory=list)
    requests: list[tuple[str, dict[str, str], Any]] = field(default_factory=list)


def handler_for(server: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            self.reply(None, server.models)

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            self.reply(body, server.replies.pop(0))

        def reply(self, body: Any, reply: Reply) -> None:
            server.requests.append((self.path, dict(self.headers), body))
            self.send_response(reply.status)
            self.send_header("Content-Type", reply.content_type)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            step = -(-len(reply.body) // reply.pieces) or 1
            for start in range(0, len(reply.body), step):
                piece = reply.body[start : start + step]
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
                self.wfile.flush()
            if reply.hold is not None:
                while not reply.hold.wait(0.05 if reply.pings else 60):
                    self.wfile.write(b"8\r\n: ping\n\n\r\n")
            if reply.cut or reply.hold is not None:
                self.close_connection = True
            else:
                self.wfile.write(b"0\r\n\r\n")

        def log_message(self, format: str, *args: Any) -> None:
            pass

    return Handler


class HTTPServer(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that leave early are part of the tests."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()
    with HTTPServer(("127.0.0.1", 0), handler_for(fake)) as http:
        fake.url = f"http://127.0.0.1:{http.server_port}"
        thread = threading.Thread(target=http.serve_forever, args=(0.01,))
        thread.start()
        yield fake
        for reply in fake.replies:
            if reply.hold is not None:
                reply.hold.set()
        http.shutdown()
        thread.join()


@pytest.fixture
def complete_events() -> bytes:
    """A recorded stream of /v1/completions: 8 tokens, usage, [DONE]."""
    return (DATA / "complete.sse").read_bytes()


@pytest.fixture
def chat_events() -> bytes:
    """A recorded stream of /v1/chat/completions: 8 tokens, usage with every event, [DONE]."""
    return (DATA / "chat.sse").read_bytes()


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Options of the developer's shell do not reach the tests."""
    for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def free_url() -> Iterator[str]:
    """A URL where nobody listens: its port is bound, so that nobody else takes it, but refuses."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{bound.getsockname()[1]}"
