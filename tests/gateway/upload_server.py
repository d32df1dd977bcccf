"""A model server that takes large bodies as they come, and says what it got."""

from __future__ import annotations

import hashlib
import socketserver
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from typing import Any

from tests.gateway.threaded_server import InThread

PIECE = 1 << 16


@dataclass
class Got:
    """A request: its headers, and its body as far as it has come."""

    headers: dict[str, str]
    size: int = 0
    digest: Any = field(default_factory=hashlib.sha256)
    beginning: bytes = b""
    end: bytes = b""

    def add(self, data: bytes) -> None:
        self.size += len(data)
        self.digest.update(data)
        self.beginning = (self.beginning + data)[:4096] if len(self.beginning) < 4096 else self.beginning
        self.end = (self.end + data)[-4096:]


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: UploadServer

    def do_POST(self) -> None:
        got = Got({name.lower(): value for name, value in self.headers.items()})
        self.server.got.append(got)
        self.server.behaviour(self, got)

    def pieces(self, got: Got) -> None:
        """Read the body to its end."""
        if "content-length" in got.headers:
            left = int(got.headers["content-length"])
            while left and (data := self.rfile.read(min(left, PIECE))):
                left -= len(data)
                got.add(data)
            return
        while size := int(self.rfile.readline(), 16):
            got.add(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()

    def answer(self, status: int, body: bytes = b"{}", size: int | None = None) -> None:
        """A reply; ``size``: its length, if more follows."""
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body) if size is None else size))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def takes_all(handler: Handler, got: Got) -> None:
    handler.pieces(got)
    handler.answer(200)


class UploadServer(InThread, socketserver.ThreadingTCPServer):
    allow_reuse_address = True

    def __init__(self, behaviour: Callable[[Handler, Got], None] = takes_all) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.behaviour = behaviour
        self.got: list[Got] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
