"""A hostile client that speaks HTTP/2: streams, windows and frames as no client should use them."""

from __future__ import annotations

import asyncio
import enum
import socket
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import msgspec

from penstock.http.http2 import frames
from penstock.http.http2.faults import ErrorCode
from tests.http2_client import Http2Client
from tests.soak.hostile_client import MAX_TOKENS, Attacker, reset_at_close
from tests.soak.http2_client import ClientConnection
from tests.soak.received_reply import ReceivedReply
from tests.soak.request_mix import COMPLETIONS

MAX_STREAMS = 60
_EMPTY_FRAMES = {
    "ping": frames.ping(bytes(8)),
    "settings": frames.settings_frame({}),
    "window": frames.window_update(1, 1),
    "data": frames.frame(frames.DATA, 0, 1),
    "priority": frames.frame(frames.PRIORITY, 0, 3, bytes(5)),
}
_BAD_PATHS = ("", "no-slash", "/\0", "/" + "a" * 70_000, "*", "/\x7f")
FLOOD = 20_000
"""Frames: more than a server takes."""
PAUSE_S = 1.5
"""Maximum time in which a client reads nothing, or leaves a frame incomplete."""


class HostileHttp2Act(enum.StrEnum):
    """What the client does on one connection."""

    RESET = enum.auto()
    """Streams that are reset at any moment."""
    GOAWAY = enum.auto()
    """GOAWAY behind the requests, whose replies are read."""
    TINY_WINDOW = enum.auto()
    """Windows of a byte."""
    CLOSED_WINDOW = enum.auto()
    """Windows of 0 for a while, opened by SETTINGS."""
    UNREAD = enum.auto()
    """Many streams of which nothing is read, and the end of the connection."""
    CUT = enum.auto()
    """Many streams that are read, and the end of the connection."""
    HALF_FRAME = enum.auto()
    """A request that breaks off anywhere."""
    FLOOD = enum.auto()
    """Frames that carry nothing, or requests that are reset at once."""
    GARBAGE = enum.auto()
    """Anything behind the preface."""
    MALFORMED = enum.auto()
    """Requests that are none."""


class HostileHttp2Client(Attacker):
    """Over HTTP/2."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        acts: dict[str, Callable[[ClientConnection], Awaitable[str]]] = {
            HostileHttp2Act.RESET: self._reset,
            HostileHttp2Act.GOAWAY: self._go_away,
            HostileHttp2Act.TINY_WINDOW: self._tiny_window,
            HostileHttp2Act.CLOSED_WINDOW: self._closed_window,
            HostileHttp2Act.UNREAD: self._unread,
            HostileHttp2Act.CUT: self._cut,
            HostileHttp2Act.HALF_FRAME: self._half_frame,
            HostileHttp2Act.FLOOD: self._flood,
            HostileHttp2Act.GARBAGE: self._garbage,
            HostileHttp2Act.MALFORMED: self._malformed,
        }
        self.acts = {name: partial(self._connected, act) for name, act in acts.items()}

    async def _connected(self, act: Callable[[ClientConnection], Awaitable[str]], sock: socket.socket) -> str:
        """On a connection that ends by a reset, or not."""
        if self._random.random() < 0.5:
            reset_at_close(sock)
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: ClientConnection(f"{self._host}:{self._port}", frames.DEFAULT_WINDOW), sock=sock
        )
        try:
            return await act(connection)
        finally:
            connection.close()

    # -- acts

    async def _reset(self, connection: ClientConnection) -> str:
        http2, rng = connection.http2, self._random
        for _ in range(rng.randint(1, 20)):
            stream, reply = self._start(http2, rng.choice((1, 30, MAX_TOKENS)))
            connection.flush()
            await asyncio.sleep(rng.choice((0.0, 0.05)))
            http2.reset(stream, rng.choice((ErrorCode.CANCEL, ErrorCode.NO_ERROR, ErrorCode.INTERNAL_ERROR)))
            if reply.error:
                return reply.error
        return await self._still_serves(connection)

    async def _go_away(self, connection: ClientConnection) -> str:
        http2 = connection.http2
        replies = [self._start(http2, self._random.randrange(1, 40))[1] for _ in range(5)]
        http2.write(frames.goaway(0, ErrorCode.NO_ERROR, "the client leaves"))
        return await self._all_whole(connection, replies)

    async def _tiny_window(self, connection: ClientConnection) -> str:
        connection.http2.change_window(1)
        replies = [self._start(connection.http2, 2)[1] for _ in range(2)]
        return await self._all_whole(connection, replies)

    async def _closed_window(self, connection: ClientConnection) -> str:
        http2 = connection.http2
        http2.change_window(0)
        replies = [self._start(http2, 20)[1] for _ in range(10)]
        connection.flush()
        await asyncio.sleep(self._random.uniform(0.0, PAUSE_S))
        http2.change_window(frames.DEFAULT_WINDOW)
        return await self._all_whole(connection, replies)

    async def _unread(self, connection: ClientConnection) -> str:
        connection.stop_reading()
        connection.http2.change_window(frames.MAX_WINDOW)
        connection.http2.write(frames.window_update(0, frames.MAX_WINDOW - frames.DEFAULT_WINDOW))
        for _ in range(self._random.randint(1, MAX_STREAMS)):
            self._start(connection.http2, MAX_TOKENS)
        connection.flush()
        await asyncio.sleep(self._random.uniform(0.0, PAUSE_S))
        return ""

    async def _cut(self, connection: ClientConnection) -> str:
        for _ in range(self._random.randint(1, MAX_STREAMS)):
            self._start(connection.http2, MAX_TOKENS, stream=self._random.random() < 0.8)
        connection.flush()
        await asyncio.sleep(self._random.uniform(0.0, 0.5))
        return connection.http2.failure

    async def _half_frame(self, connection: ClientConnection) -> str:
        """Not counted: the bytes of the last request are never all sent."""
        http2 = connection.http2
        connection.stop_reading()  # so nothing follows the half frame
        connection.flush()
        http2.start(COMPLETIONS, _completion(5, stream=True), ReceivedReply())
        output = http2.take_output()
        http2.write(output[: self._random.randrange(1, len(output))])
        connection.flush()
        await asyncio.sleep(self._random.uniform(0.0, PAUSE_S))
        return http2.failure

    async def _flood(self, connection: ClientConnection) -> str:
        http2 = connection.http2
        kind = self._random.choice((*_EMPTY_FRAMES, "reset"))
        if kind == "reset":
            for _ in range(FLOOD // 4):
                http2.reset(http2.start(COMPLETIONS, b"", ReceivedReply(), ends=False))
        else:
            http2.start(COMPLETIONS, b"", ReceivedReply(), ends=False)
            http2.write(_EMPTY_FRAMES[kind] * FLOOD)
        await connection.until(lambda: bool(http2.failure))
        return "" if "ENHANCE_YOUR_CALM" in http2.failure else f"{kind}: {http2.failure}"

    async def _garbage(self, connection: ClientConnection) -> str:
        connection.http2.write(self._random.randbytes(self._random.choice((9, 100, 30_000))))
        await connection.until(lambda: False)
        return ""

    async def _malformed(self, connection: ClientConnection) -> str:
        """Each is refused by a status or RST_STREAM, and the connection goes on."""
        replies = []
        for path in self._random.sample(_BAD_PATHS, 3):
            replies.append(ReceivedReply())
            connection.http2.start(path, b"{", replies[-1])
        await connection.until(lambda: not connection.http2.running)
        wrong = [reply for reply in replies if not (reply.cut_reason or 400 <= reply.status < 500)]
        return f"status {wrong[0].status}" if wrong else await self._still_serves(connection)

    # -- parts

    def _start(self, http2: Http2Client, tokens: int, *, stream: bool = True) -> tuple[int, ReceivedReply]:
        self._count(tokens)
        reply = ReceivedReply()
        return http2.start(COMPLETIONS, _completion(tokens, stream=stream), reply), reply

    async def _all_whole(self, connection: ClientConnection, replies: list[ReceivedReply]) -> str:
        await connection.until(lambda: not connection.http2.running)
        broken = [reply for reply in replies if not (reply.whole and reply.done)]
        return "" if not broken else f"{len(broken)} replies broke off: {broken[0].cut_reason}"

    async def _still_serves(self, connection: ClientConnection) -> str:
        """What is wrong with the connection's next request."""
        reply = ReceivedReply()
        connection.http2.start("/version", b"", reply)
        await connection.until(lambda: not connection.http2.running)
        refused = reply.refused or not connection.http2.usable  # its API server is replaced
        return "" if reply.status == 200 or refused else f"no other request: {reply.cut_reason}"


def _completion(tokens: int, *, stream: bool) -> bytes:
    body = {"prompt": "hostile", "max_tokens": tokens, "ignore_eos": True, "stream": stream}
    return msgspec.json.encode(body)
