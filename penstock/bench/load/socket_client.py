"""A client of ``/v1/responses`` over WebSocket: one response at a time, on a blocking socket."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any, Self
from urllib.parse import urlsplit

import msgspec
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, Message, Request, TextMessage

from penstock.bench.errors import BenchError

TIMEOUT_S = 60
READ_BYTES = 1 << 16


class SocketClient:
    """One connection; use it as a context."""

    def __init__(self, url: str) -> None:
        """``url``: of the server. Raises BenchError and OSError."""
        place = urlsplit(url)
        self._socket = socket.create_connection((place.hostname, place.port), TIMEOUT_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._states = WSConnection(ConnectionType.CLIENT)
        self._socket.sendall(self._states.send(Request(host=place.netloc, target="/v1/responses")))
        answer = next(self._events())
        if not isinstance(answer, AcceptConnection):
            self.close()
            raise BenchError(f"the server does not open a WebSocket: {answer}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def response(self, body: bytes) -> dict[str, Any]:
        """The response to the message ``body``. Raises BenchError and OSError."""
        self._socket.sendall(self._states.send(Message(body.decode())))
        pieces: list[str] = []
        for event in self._events():
            if not isinstance(event, TextMessage):
                raise BenchError(f"the connection was closed: {event}")
            pieces.append(event.data)
            if not event.message_finished:
                continue
            text = "".join(pieces)
            pieces.clear()
            if text.startswith('{"type":"response.completed"') or '"type":"error"' in text[:40]:
                return self._completed(text)
            if text.startswith(('{"type":"response.failed"', '{"type":"response.incomplete"')):
                return self._completed(text)
        raise BenchError("the server has closed the connection")

    def _completed(self, text: str) -> dict[str, Any]:
        event: dict[str, Any] = msgspec.json.decode(text)
        response: dict[str, Any] | None = event.get("response")
        if response is None or response["status"] not in ("completed", "incomplete"):
            raise BenchError(f"a turn failed: {text[:500]}")
        return response

    def _events(self) -> Iterator[Any]:
        """What comes, until the connection is closed."""
        while data := self._socket.recv(READ_BYTES):
            self._states.receive_data(data)
            yield from self._states.events()
