"""Both ends of the gateway's WebSockets: a client, and a model server."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Callable, Iterator
from typing import Any, Self

import httpx
import msgspec

from penstock.http.websocket.codec import ENDED, Closed, Codec, Ping, Pong, Text
from penstock.http.websocket.handshake import accepted, new_key, opening
from tests.gateway.processes import WAIT_S, Call, Gateway, eventually

MAX_BYTES = 64 << 20
ENDS = ("response.completed", "response.failed", "response.incomplete", "error")


class Side:
    """One side of a WebSocket."""

    def __init__(self, connection: socket.socket, *, client: bool, data: bytes = b"") -> None:
        self.connection = connection
        self.codec = Codec(client=client, max_bytes=MAX_BYTES)
        self.closed: Closed | None = None
        """How the other side has closed it."""
        self.pings = 0
        self.known: set[str] = set()
        """Responses that were made on it."""
        self._events: list[Any] = []
        self._data = data

    def send(self, message: bytes) -> None:
        self.connection.sendall(self.codec.text(message))

    def send_json(self, **fields: Any) -> None:
        self.send(msgspec.json.encode(fields))

    def messages(self) -> Iterator[bytes]:
        """Until the other side closes, or breaks the connection."""
        while (message := self.receive()) is not None:
            yield message

    def receive(self) -> bytes | None:
        """The next message; None: the other side has closed."""
        while True:
            while self._events:
                match self._events.pop(0):
                    case Text(data):
                        return data
                    case Ping(payload):
                        self.pings += 1
                        self.connection.sendall(self.codec.pong(payload))
                    case Pong():
                        pass
                    case Closed() as closed:
                        self.closed = closed
                        with contextlib.suppress(OSError):
                            self.connection.sendall(self.codec.close(closed.code))
                        return None
            if not self.codec.has_more:
                data, self._data = self._data or self._read(), b""
                if not data:
                    return None
                self.codec.receive(data)
            self._events += self.codec.events()

    def _read(self) -> bytes:
        try:
            return self.connection.recv(65536)
        except ConnectionError:
            return b""


class ServerSide(Side):
    """A model server's side: accepts the request ``call``."""

    def __init__(self, call: Call) -> None:
        fields = {name.encode(): value.encode() for name, value in call.headers.items()}
        lines = [b"%b: %b\r\n" % header for header in accepted(fields)]
        call.send(b"HTTP/1.1 101 Switching Protocols\r\n" + b"".join(lines) + b"\r\n")
        super().__init__(call.connection, client=False, data=call.body)

    def begin(self, id: str = "resp_1") -> None:
        self.send_json(type="response.created", response={"id": id, "status": "in_progress"})

    def delta(self, text: str = "a") -> None:
        self.send_json(type="response.output_text.delta", delta=text)

    def complete(self, id: str = "resp_1", tokens: int = 2) -> None:
        usage = {"input_tokens": 3, "output_tokens": tokens, "total_tokens": 3 + tokens}
        self.send_json(type="response.completed", response={"id": id, "status": "completed", "usage": usage})

    def respond(self, id: str = "resp_1", *texts: str) -> None:
        self.begin(id)
        for text in texts or ("a", "b"):
            self.delta(text)
        self.complete(id)


Answer = Callable[[ServerSide, dict[str, Any]], None]


def by_socket(answer: Answer, *, made: list[dict[str, Any]] | None = None) -> Callable[[Call], None]:
    """The behaviour of a model server that answers each message; ``made`` gets them all."""

    def behave(call: Call) -> None:
        if call.headers.get("upgrade") != "websocket":
            call.reply(404, b'{"error":{"message":"not here"}}')
            return
        side = ServerSide(call)
        for message in side.messages():
            fields = msgspec.json.decode(message)
            if made is not None:
                made.append(fields)
            answer(side, fields)
        call.gone.set()

    return behave


def by_turns(side: ServerSide, fields: dict[str, Any]) -> None:
    """The state of a conversation is the connection's."""
    previous = fields.get("previous_response_id")
    if previous is not None and previous not in side.known:
        error = {"code": "previous_response_not_found", "message": "no", "type": "invalid_request_error"}
        side.send_json(type="error", status=400, error=error)
        return
    side.known.add(f"resp_{fields['input']}")
    side.respond(f"resp_{fields['input']}")


def as_stream(call: Call, id: str = "resp_h") -> None:
    """A model server's answer over HTTP."""
    usage = '{"input_tokens":3,"output_tokens":1,"total_tokens":4}'
    call.stream(
        f'{{"type":"response.created","response":{{"id":"{id}","status":"in_progress"}}}}',
        '{"type":"response.output_text.delta","delta":"h"}',
        f'{{"type":"response.completed","response":{{"id":"{id}","status":"completed","usage":{usage}}}}}',
    )


class RefusedError(Exception):
    """The handshake was answered with another status than 101."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"status {status}: {body!r}")
        self.status = status
        self.body = body


class ClientSide(Side):
    """A client's side: connects, and asks for responses."""

    def __init__(self, front: Gateway | str, path: str = "/v1/responses", **headers: str) -> None:
        url = httpx.URL(front if isinstance(front, str) else front.url)
        connection = socket.create_connection((url.host, url.port or 80), timeout=WAIT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        given = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        lines = [b"%b: %b\r\n" % header for header in (*opening(new_key()), *given)]
        connection.sendall(b"GET %b HTTP/1.1\r\nhost: x\r\n%b\r\n" % (path.encode(), b"".join(lines)))
        data = b""
        while b"\r\n\r\n" not in data:
            data += (more := connection.recv(65536))
            assert more, data
        head, _, rest = data.partition(b"\r\n\r\n")
        status = int(head[9:12])
        if status != 101:
            connection.close()
            raise RefusedError(status, rest)
        super().__init__(connection, client=True, data=rest)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.connection.close()

    def close(self) -> None:
        """In order."""
        self.connection.sendall(self.codec.close(ENDED))
        assert self.receive() is None

    def create(self, **fields: Any) -> list[dict[str, Any]]:
        """The events of one response."""
        self.begin(**fields)
        return self.rest()

    def begin(self, **fields: Any) -> None:
        self.send_json(**{"type": "response.create", "model": "m", "input": "p", **fields})

    def rest(self) -> list[dict[str, Any]]:
        """The events up to the end of a response."""
        events = []
        for message in self.messages():
            events.append(msgspec.json.decode(message))
            if events[-1]["type"] in ENDS:
                break
        return events


def texts(events: list[dict[str, Any]]) -> str:
    return "".join(event["delta"] for event in events if event["type"].endswith(".delta"))


def logged(front: Gateway, id: str, count: int) -> list[dict[str, Any]]:
    """The lines of the access log of a connection's responses, once there are so many. ``id``: what its
    handshake was called."""
    found: list[dict[str, Any]] = []

    def there() -> bool:
        lines = [line[line.index("{") :] for line in list(front.lines) if f'"request_id": "{id}.' in line]
        found[:] = map(json.loads, lines)
        return len(found) >= count

    eventually(there)
    return found
