"""A client that streams completions over one HTTP/2 connection, frame by frame."""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

from penstock.http.http2 import frames
from penstock.http.http2.header_blocks import encode_fields
from tests.integration.clients import PATIENCE_S

_EVENT = re.compile(rb"data: (.*?)\n\n", re.DOTALL)


class Http2Client:
    """Use it as a context. Streams have the numbers 0, 1, … in the order of their requests."""

    def __init__(self, url: str, *, window: int = 2**30) -> None:
        """``window``: of each stream."""
        parts = urlsplit(url)
        self._authority = parts.netloc.encode()
        self.socket = socket.create_connection((parts.hostname, parts.port), timeout=PATIENCE_S)
        self.socket.sendall(
            frames.PREFACE
            + frames.settings_frame({frames.INITIAL_WINDOW_SIZE: window})
            + frames.window_update(0, 2**30)
        )
        self._scanner = frames.FrameScanner(2**20)
        self._bodies: list[bytearray] = []
        self.resets: dict[int, int] = {}
        """Codes of RST_STREAM by number of the stream."""
        self.ended: set[int] = set()
        self.goaways: list[int] = []
        """Their last streams."""
        self.closed = False

    def __enter__(self) -> Http2Client:
        return self

    def __exit__(self, *exc: object) -> None:
        self.socket.close()

    def request(self, *bodies: dict[str, Any]) -> None:
        data = []
        for body in bodies:
            content = json.dumps(body | {"stream": True}).encode()
            stream_id = 2 * len(self._bodies) + 1
            fields = [
                (b":method", b"POST"),
                (b":scheme", b"http"),
                (b":path", b"/v1/completions"),
                (b":authority", self._authority),
                (b"content-type", b"application/json"),
            ]
            data.append(frames.frame(frames.HEADERS, frames.END_HEADERS, stream_id, encode_fields(fields)))
            data.append(frames.frame(frames.DATA, frames.END_STREAM, stream_id, content))
            self._bodies.append(bytearray())
        self.socket.sendall(b"".join(data))

    def cancel(self, number: int) -> None:
        self.socket.sendall(frames.rst_stream(2 * number + 1, 8))

    def open_window(self, number: int, size: int) -> None:
        self.socket.sendall(frames.window_update(2 * number + 1, size))

    def read_until(self, condition: Callable[[], object]) -> None:
        while not condition():
            data = self.socket.recv(2**18)
            self.closed = not data
            self._scanner.receive(data)
            for frame in self._scanner.take(2**20):
                self._on_frame(*frame)
            assert not self.closed or condition(), "the server has closed the connection"

    def _on_frame(self, kind: int, flags: int, stream_id: int, payload: bytes) -> None:
        number = stream_id // 2
        if kind == frames.DATA:
            self._bodies[number] += payload
        elif kind == frames.RST_STREAM:
            self.resets[number] = int.from_bytes(payload, "big")
        elif kind == frames.GOAWAY:
            self.goaways.append(frames.unpack_goaway(payload)[0])
        elif kind == frames.PING and not flags & frames.ACK:
            self.socket.sendall(frames.ping(payload, ack=True))
        if kind in (frames.DATA, frames.HEADERS) and flags & frames.END_STREAM:
            self.ended.add(number)

    def events(self, number: int) -> list[bytes]:
        """The data of the events that have come."""
        return _EVENT.findall(bytes(self._bodies[number]))

    def text(self, number: int) -> str:
        """What has come of the reply's text."""
        parsed = [json.loads(event) for event in self.events(number) if event != b"[DONE]"]
        return "".join(choice["text"] for event in parsed for choice in event["choices"])

    def all_begun(self) -> bool:
        return all(self._bodies)

    def all_ended(self) -> bool:
        return len(self.ended) + len(self.resets) == len(self._bodies)
