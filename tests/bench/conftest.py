"""A server of scripted replies over real sockets."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from io import BufferedIOBase

import pytest

from penstock.bench import kernel_floor

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENT = (
    b'data: {"id":"cmpl-1","choices":[{"index":0,"text":" \\"error\\" [DONE] data: [","logprobs":null}]}\n\n'
)
DONE = b"data: [DONE]\n\n"
LAST_CHUNK = b"0\r\n\r\n"


@pytest.fixture
def few_sends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A short measurement of the kernel's share."""
    monkeypatch.setattr(kernel_floor, "SENDS", 2000)


def chunk(data: bytes) -> bytes:
    """One chunk of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(data), data)


def stream(events: int) -> bytes:
    """A whole reply with so many events."""
    return HEAD + chunk(EVENT) * events + chunk(DONE) + LAST_CHUNK


def refusal(status: bytes, body: bytes) -> bytes:
    """A whole reply that is not a stream."""
    return b"HTTP/1.1 %b\r\ncontent-length: %d\r\n\r\n%b" % (status, len(body), body)


@dataclass
class Scripted:
    """What the server does: ``reply`` gets the number of a request and gives its bytes.

    A connection is closed after a reply in ``closing``, then ``closed`` is released. Nothing is sent until
    ``hold`` is set.
    """

    port: int = 0
    reply: Callable[[int], bytes] = lambda number: stream(3)
    closing: Callable[[int], bool] = lambda number: False
    hold: threading.Event = field(default_factory=threading.Event)
    closed: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(0))
    lock: threading.Lock = field(default_factory=threading.Lock)
    requests: list[tuple[bytes, bytes]] = field(default_factory=list)
    connections: int = 0


def read_request(lines: BufferedIOBase) -> tuple[bytes, bytes] | None:
    """Head and body of one request; None at the end of the connection."""
    head = b""
    while not head.endswith(b"\r\n\r\n"):
        line = lines.readline()
        if not line:
            return None
        head += line
    length = next(
        int(x.split(b":")[1]) for x in head.split(b"\r\n") if x.lower().startswith(b"content-length")
    )
    return head, lines.read(length)


@pytest.fixture
def scripted() -> Iterator[Scripted]:
    """A running server; it serves until the test ends."""
    script = Scripted()
    script.hold.set()
    sockets: list[socket.socket] = []

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            with script.lock:
                script.connections += 1
                sockets.append(self.connection)
            while (request := read_request(self.rfile)) is not None:
                with script.lock:
                    number = len(script.requests)
                    script.requests.append(request)
                script.hold.wait(60)
                self.wfile.write(script.reply(number))
                if script.closing(number):
                    self.connection.shutdown(socket.SHUT_RDWR)
                    script.closed.release()
                    return

    class Server(socketserver.ThreadingTCPServer):
        request_queue_size = 256

        def handle_error(self, request: object, client_address: object) -> None:
            pass  # a client that left in the middle of a reply is part of several tests

    with Server(("127.0.0.1", 0), Handler) as server:
        script.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield script
        script.hold.set()
        for connection in sockets:
            with contextlib.suppress(OSError):  # closed already
                connection.shutdown(socket.SHUT_RDWR)
        server.shutdown()
        thread.join()
