"""Many streaming clients in one thread, half of them over HTTP/1.1 and half over HTTP/2."""

from __future__ import annotations

import json
import re
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

import httpx

from penstock.http.http2.frames import DEFAULT_WINDOW
from tests.http2_client import Http2Client
from tests.integration.server import Server, wait_until

PATIENCE_S = 300.0
"""Far more than streams take; what reaches it has failed."""
SHARED = 8
"""Streams of an HTTP/2 connection."""
PATH = "/v1/completions"
_EVENT = re.compile(rb"data: (.*?)\n\n", re.DOTALL)


class Completion:
    """One streamed completion; over HTTP/2 the receiver of its reply."""

    def __init__(self, body: dict[str, Any], headers: Sequence[tuple[bytes, bytes]] = ()) -> None:
        self.headers = headers
        self.content = json.dumps(body | {"stream": True}).encode()
        self.pieces: list[str] = []
        self.failure: tuple[str, str] | None = None
        """Code and message."""
        self.token_ids: list[int] = []
        """If the request asks for them."""
        self.last_choice: dict[str, Any] = {}
        """The choice of the event with the finish reason."""
        self.done = self.ended = False
        self.last = 0.0
        """When its latest event came, time.monotonic()."""
        self.unread = b""

    def on_body(self, data: bytes) -> None:
        self.unread += data
        end = 0
        for event in _EVENT.finditer(self.unread):
            self._on_event(event.group(1))
            end = event.end()
        self.unread = self.unread[end:]

    def _on_event(self, data: bytes) -> None:
        self.last = time.monotonic()
        if data == b"[DONE]":
            self.done = True
            return
        event = json.loads(data)
        if "error" in event:
            self.failure = event["error"]["code"], event["error"]["message"]
        else:
            for choice in event["choices"]:
                self.pieces.append(choice["text"])
                self.token_ids += choice.get("token_ids") or []
                if choice["finish_reason"] is not None:
                    self.last_choice = choice

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    def begin(self, status: int, headers: dict[bytes, bytes]) -> None: ...

    def end(self) -> None:
        self.ended = True
        if not self.done and self.failure is None:
            self.failure = ("truncated", self.unread.decode())

    def cut(self, reason: str, *, refused: bool = False) -> None:
        self.failure, self.ended = ("connection", reason), True


class _Http1Connection:
    """One client."""

    def __init__(self, address: tuple[str, int], clients: Sequence[Completion]) -> None:
        (self._client,) = self.clients = clients
        content = self._client.content
        head = f"POST {PATH} HTTP/1.1\r\nhost: test\r\ncontent-length: {len(content)}\r\n"
        head += "".join(f"{name.decode()}: {value.decode()}\r\n" for name, value in self._client.headers)
        self.socket = socket.create_connection(address)
        self.socket.sendall(head.encode() + b"content-type: application/json\r\n\r\n" + content)
        self.socket.setblocking(False)

    def receive(self) -> None:
        client = self._client
        try:
            data = self.socket.recv(1 << 18)
        except BlockingIOError:
            return
        except ConnectionError as error:
            client.cut(str(error))
            return
        client.on_body(data)
        if not data or client.unread.endswith(b"0\r\n\r\n") or self._is_whole_error():
            client.end()

    def _is_whole_error(self) -> bool:
        unread = self._client.unread
        status, _, _ = unread.partition(b"\r\n")
        return status.startswith(b"HTTP") and b" 200 " not in status and unread.endswith(b"}}")


class Http2Connection:
    """Several clients. A context; streams have the numbers 0, 1, ... in the order of their requests."""

    def __init__(
        self, address: tuple[str, int], clients: Sequence[Completion], window: int = DEFAULT_WINDOW
    ) -> None:
        """``window``: of each stream."""
        self.clients = list[Completion]()
        self.http2 = Http2Client("test", window)
        self.closed = False
        self._ids: list[int] = []
        self.socket = socket.create_connection(address, timeout=PATIENCE_S)
        self.start(*clients)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.socket.close()

    def start(self, *clients: Completion) -> None:
        self._ids += [
            self.http2.start(PATH, client.content, client, headers=client.headers) for client in clients
        ]
        self.clients += clients
        self._send()

    def cancel(self, number: int) -> None:
        self.http2.reset(self._ids[number])
        self._send()

    def shut_window(self, number: int) -> None:
        self.http2.hold(self._ids[number])

    def open_window(self, number: int) -> None:
        self.http2.open(self._ids[number])
        self._send()

    def receive(self) -> None:
        try:
            data = self.socket.recv(1 << 18)
            self.http2.feed(data)
            self._send()
        except ConnectionError as error:
            self.http2.lost(str(error))
            return
        if not data:
            self.closed = True
            self.http2.lost()

    def until(self, condition: Callable[[], object]) -> None:
        while not condition():
            assert not self.closed, "the server has closed the connection"
            self.receive()

    def until_each_has(self, events: int) -> None:
        self.until(lambda: all(each.ended or len(each.pieces) >= events for each in self.clients))

    def until_all_ended(self) -> None:
        self.until(lambda: all(each.ended for each in self.clients))

    def _send(self) -> None:
        output = self.http2.take_output()
        if output:
            self.socket.sendall(output)


def address_of(url: str) -> tuple[str, int]:
    parsed = httpx.URL(url)
    assert parsed.port is not None
    return parsed.host, parsed.port


class Streams:
    """Streamed completions, one per body, read in a thread. A context; leaving it cuts what runs.

    The first, third, fifth ... go over connections of their own, the others share connections of HTTP/2.
    """

    def __init__(self, url: str, bodies: Sequence[dict[str, Any]], rank: int | None = None) -> None:
        """``rank``: of the engine that is to run them."""
        address = address_of(url)
        headers = [] if rank is None else [(b"x-data-parallel-rank", b"%d" % rank)]
        self._clients = [Completion(body, headers) for body in bodies]
        alone, shared = self._clients[::2], self._clients[1::2]
        self._connections: list[_Http1Connection | Http2Connection] = [
            *(_Http1Connection(address, [client]) for client in alone),
            *(Http2Connection(address, shared[at : at + SHARED]) for at in range(0, len(shared), SHARED)),
        ]
        self._changed = threading.Condition()
        self._leaving = False
        self._thread = threading.Thread(target=self._read, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._leaving = True
        self._thread.join(30)
        for connection in self._connections:
            connection.socket.close()

    def _read(self) -> None:
        with selectors.DefaultSelector() as selector:
            for connection in self._connections:
                selector.register(connection.socket, selectors.EVENT_READ, connection)
            while selector.get_map() and not self._leaving:
                for key, _ in selector.select(0.1):
                    key.data.receive()
                    if all(client.ended for client in key.data.clients):
                        selector.unregister(key.fileobj)
                        key.data.socket.close()
                with self._changed:
                    self._changed.notify_all()

    # -- to wait for

    def _until(self, condition: Any, what: str, seconds: float = PATIENCE_S) -> None:
        with self._changed:
            assert self._changed.wait_for(condition, seconds), f"not within {seconds} s: {what}"

    def until_each_has(self, events: int) -> None:
        self._until(
            lambda: all(client.ended or len(client.pieces) >= events for client in self._clients),
            f"{events} events for each stream",
        )

    def until_all_ended(self, seconds: float = PATIENCE_S) -> None:
        self._until(lambda: all(client.ended for client in self._clients), "the end of all streams", seconds)

    def longest_pause_after(self, moment: float) -> float:
        """Waits until every stream has ended or had an event after ``moment``; the seconds that took."""
        self._until(
            lambda: all(client.ended or client.last > moment for client in self._clients),
            "an event for each stream",
        )
        return max(client.last for client in self._clients) - moment

    # -- what came

    @property
    def completions(self) -> list[Completion]:
        return self._clients

    @property
    def running(self) -> int:
        return sum(not client.ended for client in self._clients)

    @property
    def texts(self) -> list[str]:
        return [client.text for client in self._clients]

    @property
    def outcomes(self) -> list[tuple[str, str] | None]:
        """None, or code and message of an error, a truncated reply or a broken connection, per stream."""
        return [client.failure for client in self._clients]

    @property
    def connections(self) -> int:
        return len(self._connections)

    @property
    def broken_connections(self) -> int:
        """Connections with a stream that failed."""
        return sum(any(client.failure for client in each.clients) for each in self._connections)

    @property
    def failures(self) -> list[tuple[str, str]]:
        """The outcomes of the streams that failed."""
        return [outcome for outcome in self.outcomes if outcome is not None]


def until_interrupted(server: Server, attempt: Callable[[], None]) -> None:
    """Repeat what kills an engine under streams until one of them was resumed: on a busy machine all may have
    ended before."""

    def resumed() -> bool:
        wait_until(lambda: server.metric("penstock:engine_up") == 2, PATIENCE_S, "both engines being up")
        attempt()
        return server.metric("penstock:streams_interrupted_total", outcome="resumed") > 0

    wait_until(resumed, PATIENCE_S, "a stream that is resumed")


def texts_of(url: str, bodies: Sequence[dict[str, Any]]) -> list[str]:
    """What a server answers that nothing happens to."""
    with Streams(url, bodies) as streams:
        streams.until_all_ended()
    assert streams.failures == []
    return streams.texts
