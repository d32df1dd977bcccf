"""What of Redis the gateway needs for fair shares, for machines without its server, in RESP3."""

from __future__ import annotations

import socketserver
from pathlib import Path

from tests.gateway.threaded_server import InThread


class Handler(socketserver.StreamRequestHandler):
    server: RedisStandIn

    def handle(self) -> None:
        while line := self.rfile.readline():
            words = []
            for _ in range(int(line[1:])):
                size = int(self.rfile.readline()[1:])
                words.append(self.rfile.read(size + 2)[:-2].decode())
            self.wfile.write(self.server.answer(words))


class RedisStandIn(InThread, socketserver.ThreadingUnixStreamServer):
    def __init__(self, directory: Path) -> None:
        super().__init__(str(directory / "redis"), Handler)
        self.url = f"unix://{directory / 'redis'}"
        self.sums: dict[str, float] = {}
        self.asked: list[str] = []
        """Keys that were read."""

    def answer(self, words: list[str]) -> bytes:
        match [words[0].upper(), *words[1:]]:
            case ["HELLO", *_]:
                return b"%1\r\n$5\r\nproto\r\n:3\r\n"
            case ["INCRBYFLOAT", key, amount]:
                assert float(amount) > 0
                self.sums[key] = self.sums.get(key, 0.0) + float(amount)
                text = str(self.sums[key])
                return f"${len(text)}\r\n{text}\r\n".encode()
            case ["PEXPIRE", _, _]:
                return b":1\r\n"
            case ["GET", key]:
                self.asked.append(key)
                text = str(self.sums.get(key, ""))
                return f"${len(text)}\r\n{text}\r\n".encode() if text else b"_\r\n"
        return b"+OK\r\n"
