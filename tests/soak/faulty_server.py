"""A model server of the outcome soak, as a process: it behaves as it is told, line by line, on its input.

``python -m tests.soak.faulty_server PORT``. The text of its replies is the ``user`` of the request, so that a
client knows what is its own.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
import socket
import struct
import sys
from typing import Any, cast

GOOD = "good"
BEHAVIOURS = (
    GOOD,
    "slow",
    "stalled",
    "stalling",
    "garbage",
    "malformed",
    "busy",
    "unready",
    "failing",
    "error",
    "resetting",
    "truncating",
)
"""slow: late, but in time. stalled: it answers no request. stalling: streams stop in the middle. garbage: no
HTTP. malformed: no JSON. busy, unready, failing: 429 with Retry-After, 503, 500. error: an error event.
resetting: connections break at any time. truncating: streams end in order, but too early."""
TOKENS = 12
TOKEN_S = 0.02
SLOW_S = 1.0
LOAD = b"vllm:num_requests_waiting 0\nvllm:num_requests_running 0\n"
_LENGTH = re.compile(rb"content-length: (\d+)", re.IGNORECASE)
_STREAM = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def event(fields: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % json.dumps(fields, separators=(",", ":")).encode()


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def reply(status: int, body: bytes, *headers: str) -> bytes:
    lines = [
        f"HTTP/1.1 {status} X",
        "content-type: application/json",
        f"content-length: {len(body)}",
        *headers,
    ]
    return "\r\n".join([*lines, "", ""]).encode() + body


def error(message: str) -> bytes:
    return json.dumps({"error": {"message": message, "type": "server_error", "code": "soak"}}).encode()


class Server:
    """What all connections share."""

    def __init__(self) -> None:
        self.behaviour = GOOD
        self.rng = random.Random()
        self.connections: set[Connection] = set()

    def behave(self, name: str) -> None:
        self.behaviour = name


class Connection(asyncio.Protocol):
    """One connection, with one request at a time."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._read = b""
        self._running: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._running is not None:
            self._running.cancel()

    def data_received(self, data: bytes) -> None:
        self._read += data
        head, found, body = self._read.partition(b"\r\n\r\n")
        if not found:
            return
        if head.startswith(b"PRI"):
            self._transport.write(reply(400, b"{}"))
            self._transport.close()
            return
        length = _LENGTH.search(head)
        if len(body) < (int(length[1]) if length else 0):
            return
        self._read = b""
        if head.startswith(b"GET"):
            models = head.startswith(b"GET /v1/models")
            self._transport.write(reply(200, b'{"object":"list","data":[{"id":"m"}]}' if models else LOAD))
        else:
            self._running = asyncio.ensure_future(self._answer(json.loads(body)))

    async def _answer(self, asked: dict[str, Any]) -> None:
        behaviour, rng = self._server.behaviour, self._server.rng
        text, streamed = asked["user"], asked.get("stream", False)
        usage = {"prompt_tokens": 3, "completion_tokens": TOKENS}
        match behaviour:
            case "stalled":
                return
            case "garbage":
                self._transport.write(rng.randbytes(200))
                return
            case "busy":
                self._transport.write(reply(429, error("busy"), "retry-after: 1"))
                return
            case "unready" | "failing":
                self._transport.write(reply(503 if behaviour == "unready" else 500, error(behaviour)))
                return
            case "slow":
                await asyncio.sleep(SLOW_S)
            case "resetting" if rng.random() < 0.5:
                self._reset()
                return
        if not streamed:
            await asyncio.sleep(TOKENS * TOKEN_S)
            whole = json.dumps({"choices": [{"text": text * TOKENS}], "usage": usage}).encode()
            if behaviour == "resetting":
                self._transport.write(reply(200, whole)[:-9])
                self._reset()
            elif behaviour == "truncating":
                self._transport.write(reply(200, whole)[:-9])
                self._transport.close()
            elif behaviour == "error":
                self._transport.write(reply(200, error("engine gone")))
            elif behaviour == "malformed":
                self._transport.write(reply(200, whole[:-9]))
            elif behaviour != "stalling":
                self._transport.write(reply(200, whole))
            return
        self._transport.write(_STREAM)
        for number in range(TOKENS):
            if number == TOKENS // 2 and await self._misbehave(behaviour):
                return
            self._transport.write(chunk(event({"choices": [{"index": 0, "text": text}]})))
            await asyncio.sleep(TOKEN_S)
        self._transport.write(
            chunk(event({"choices": [{"index": 0, "text": "", "finish_reason": "length"}]}))
        )
        if (asked.get("stream_options") or {}).get("include_usage"):
            self._transport.write(chunk(event({"choices": [], "usage": usage})))
        self._transport.write(chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n")

    async def _misbehave(self, behaviour: str) -> bool:
        """In the middle of a stream; returns whether the reply has ended."""
        match behaviour:
            case "stalling":
                return True
            case "resetting":
                self._reset()
                return True
            case "truncating":
                self._transport.write(b"0\r\n\r\n")
                return True
            case "error":
                self._transport.write(chunk(b"data: %b\n\n" % error("engine gone")) + b"0\r\n\r\n")
                return True
            case "malformed":
                self._transport.write(chunk(b'data: {"choices":[\n\n'))
        return False

    def _reset(self) -> None:
        sock = self._transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._transport.abort()


async def serve(port: int) -> None:
    """Until its input ends."""
    loop, server = asyncio.get_running_loop(), Server()
    listening = await loop.create_server(lambda: Connection(server), "127.0.0.1", port, backlog=512)
    commands = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    print(listening.sockets[0].getsockname()[1], flush=True)
    while line := await commands.readline():
        server.behave(line.decode().strip())


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))
