"""An HTTP/2 server of scripted replies, by the h2 library, over real sockets."""

from __future__ import annotations

import contextlib
import socket
import socketserver
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import h2.config
import h2.connection
import h2.events
import h2.settings

from tests.bench.conftest import DONE, EVENT

HEAD = [(b":status", b"200"), (b"content-type", b"text/event-stream")]
Reply = Callable[[h2.connection.H2Connection, int], None]


def stream(events: int) -> Reply:
    """A whole reply with so many events, each a frame."""

    def reply(connection: h2.connection.H2Connection, number: int) -> None:
        connection.send_headers(number, HEAD)
        for _ in range(events):
            connection.send_data(number, EVENT)
        connection.send_data(number, DONE, end_stream=True)

    return reply


@dataclass
class Scripted2:
    """What the server does: ``reply`` gets the number of a request and gives what is done with its stream.

    ``settings`` are the first of each connection. With ``closing``, a connection is closed after the reply.
    ``granted`` is done when the window of a stream grows.
    """

    port: int = 0
    reply: Callable[[int], Reply] = lambda number: stream(3)
    closing: Callable[[int], bool] = lambda number: False
    settings: dict[h2.settings.SettingCodes, int] = field(default_factory=dict)
    granted: Reply = lambda connection, number: None
    context: ssl.SSLContext | None = None
    pieces: int = 1 << 20
    """Bytes of each write."""
    lock: threading.Lock = field(default_factory=threading.Lock)
    requests: list[tuple[dict[bytes, bytes], bytes]] = field(default_factory=list)
    connections: int = 0
    resets: int = 0


class _Peer:
    """One connection."""

    def __init__(self, script: Scripted2, connection: socket.socket) -> None:
        self._script = script
        self._socket = connection
        config = h2.config.H2Configuration(client_side=False, header_encoding=None)
        self._h2 = h2.connection.H2Connection(config)
        self._heads: dict[int, dict[bytes, bytes]] = {}
        self._bodies: dict[int, bytes] = {}

    def serve(self) -> None:
        self._h2.local_settings = h2.settings.Settings(False, self._script.settings)
        self._h2.initiate_connection()
        self._send()
        with contextlib.suppress(OSError):
            while data := self._socket.recv(65536):
                for event in self._h2.receive_data(data):
                    self._handle(event)
                self._send()

    def _handle(self, event: h2.events.Event) -> None:
        script = self._script
        if isinstance(event, h2.events.RequestReceived):
            self._heads[event.stream_id] = dict(event.headers)
            self._bodies[event.stream_id] = b""
        elif isinstance(event, h2.events.DataReceived):
            self._bodies[event.stream_id] += event.data
            self._h2.acknowledge_received_data(event.flow_controlled_length, event.stream_id)
        elif isinstance(event, h2.events.WindowUpdated) and event.stream_id:
            script.granted(self._h2, event.stream_id)
        elif isinstance(event, h2.events.StreamReset):
            script.resets += 1
        elif isinstance(event, h2.events.StreamEnded):
            with script.lock:
                number = len(script.requests)
                script.requests.append((self._heads.pop(event.stream_id), self._bodies.pop(event.stream_id)))
            script.reply(number)(self._h2, event.stream_id)
            if script.closing(number):
                self._send()
                self._socket.shutdown(socket.SHUT_RDWR)

    def _send(self) -> None:
        data = self._h2.data_to_send()
        for start in range(0, len(data), self._script.pieces):
            self._socket.sendall(data[start : start + self._script.pieces])


@contextlib.contextmanager
def running() -> Iterator[Scripted2]:
    """A server that serves until the context ends."""
    script = Scripted2()
    sockets: list[socket.socket] = []

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            connection: socket.socket = self.request
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if script.context is not None:
                connection = script.context.wrap_socket(connection, server_side=True)
            with script.lock:
                script.connections += 1
                sockets.append(connection)
            with connection:
                _Peer(script, connection).serve()

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        script.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield script
        for connection in sockets:
            with contextlib.suppress(OSError):  # closed already
                connection.shutdown(socket.SHUT_RDWR)
        server.shutdown()
        thread.join()
