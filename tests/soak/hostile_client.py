"""Clients that keep to no rule: what they send is refused or answered, and never costs others anything.

That of HTTP/1.1 is here, that of HTTP/2 in :mod:`tests.soak.hostile_http2`.
"""

from __future__ import annotations

import asyncio
import enum
import random
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import msgspec

from tests.soak.exchange import SentRequest
from tests.soak.request_mix import COMPLETIONS

REPLY_S = 150.0
"""Time limit of a reply, as that of an honest request: its process may hang meanwhile."""
SLOW_S = 1.5
"""Time over which slow bytes come."""
PIPELINED = 200
HUGE_BYTES = 1_000_000
HUGE_HEADERS = 300_000
MAX_TOKENS = 200
SHOWN = 200


class HostileAct(enum.StrEnum):
    """What the client does on one connection."""

    MALFORMED = enum.auto()
    """Bytes that are not HTTP, or a body that is not JSON."""
    BAD_HEADERS = enum.auto()
    """A head that says two things, or nothing."""
    HUGE = enum.auto()
    """A head, a body or trailers beyond all limits."""
    CANCELLED = enum.auto()
    """Requests for streams, with a reset instead of reading them."""
    PIPELINED = enum.auto()
    """Many requests before the first reply is read."""
    SLOW = enum.auto()
    """Some bytes now and then."""
    HALF_CLOSED = enum.auto()
    """A whole request; then the sending side is closed, and the reply read."""


Act = Callable[[socket.socket], Awaitable[str]]
"""Returns what is wrong with the server's answer, or nothing."""


class _Attack(NamedTuple):
    data: bytes
    statuses: frozenset[int]
    """Of the first reply; empty: any but 5xx."""
    tokens: int = 0
    """Maximum tokens that engines generate for it."""
    closes: bool = True
    """Whether the server must close the connection."""


class Attacker:
    """``find`` records a defect, ``count`` a request that may generate that many tokens; ``killed`` returns
    whether a connection's server process was killed before its end."""

    acts: Mapping[str, Act]

    def __init__(
        self,
        url: str,
        rng: random.Random,
        find: Callable[[str, str], None],
        count: Callable[[int], None],
        killed: Callable[[SentRequest], bool],
    ) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname or "", parts.port or 80
        self._random = rng
        self._find = find
        self._count = count
        self._killed = killed

    async def once(self, act: str | None = None) -> None:
        """One connection and what is done on it, at random unless ``act`` says it."""
        act = act or self._random.choice(list(self.acts))
        attempt = SentRequest(0, time.monotonic(), reused=False)
        problem = ""
        with socket.socket() as sock:
            sock.setblocking(False)
            try:
                async with asyncio.timeout(REPLY_S):
                    await asyncio.get_running_loop().sock_connect(sock, (self._host, self._port))
                    attempt.port = sock.getsockname()[1]
                    problem = await self.acts[act](sock)
            except TimeoutError:
                problem = f"no end in {REPLY_S:g} s"
            except OSError as error:
                problem = f"{error!r}"
        attempt.ended_at = time.monotonic()
        if problem and not self._killed(attempt):
            self._find("hostile client", f"{act}: {problem}")


class HostileClient(Attacker):
    """Over HTTP/1.1."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.acts = {
            HostileAct.MALFORMED: lambda sock: self._expect(sock, self._malformed()),
            HostileAct.BAD_HEADERS: lambda sock: self._expect(sock, self._bad_headers()),
            HostileAct.HUGE: lambda sock: self._expect(sock, self._huge()),
            HostileAct.CANCELLED: self._cancel,
            HostileAct.PIPELINED: self._pipeline,
            HostileAct.SLOW: self._dawdle,
            HostileAct.HALF_CLOSED: self._half_close,
        }

    # -- acts; each returns what is wrong with the server's answer, or nothing

    async def _expect(self, sock: socket.socket, attack: _Attack) -> str:
        """Sends and reads the first reply; afterwards the connection must be closed by the server."""
        self._count(attack.tokens)
        # The server may answer and close while it is still being sent to.
        sending = asyncio.ensure_future(send(sock, attack.data))
        try:
            reply = await _read(sock, until_end=attack.closes)
        finally:
            sending.cancel()
            await asyncio.wait([sending])
        status = _status(reply)
        expected = status in attack.statuses if attack.statuses else 200 <= status < 500
        if not expected and (reply or len(attack.data) < HUGE_HEADERS):  # a reset may destroy the reply
            return f"status {status} {reply[:SHOWN]!r} to {attack.data[:SHOWN]!r}"
        return ""

    async def _cancel(self, sock: socket.socket) -> str:
        tokens = self._random.choice((1, 30, MAX_TOKENS))
        choices = self._random.choice((1, 2, 3))
        self._count(tokens * choices)
        await send(sock, self._completion(tokens, n=choices, stream=self._random.random() < 0.7))
        await asyncio.sleep(self._random.uniform(0.0, 0.3))
        reset_at_close(sock)
        return ""

    async def _pipeline(self, sock: socket.socket) -> str:
        """All replies come in the end, or the server closes after some."""
        requests = self._head("GET", "/version") * PIPELINED
        sending = asyncio.ensure_future(send(sock, requests))
        await asyncio.sleep(self._random.uniform(0.0, 0.5))  # reads nothing meanwhile
        data = b""
        try:
            while data.count(b"HTTP/1.1 ") < PIPELINED:
                more = await receive(sock)
                if not more:
                    break
                data += more
        finally:
            sending.cancel()
            await asyncio.wait([sending])
        answered = data.count(b"HTTP/1.1 200")
        return "" if answered and data.count(b"HTTP/1.1 5") == 0 else f"{answered} replies: {data[:SHOWN]!r}"

    async def _dawdle(self, sock: socket.socket) -> str:
        data = self._completion(5)
        end = time.monotonic() + self._random.uniform(0.1, SLOW_S)
        for at in range(len(data) - 1):
            await send(sock, data[at : at + 1])
            if time.monotonic() > end:
                break
            await asyncio.sleep(0.02)
        return ""

    async def _half_close(self, sock: socket.socket) -> str:
        tokens = self._random.randrange(1, 40)
        self._count(tokens)
        # Without a pause: a gateway gives up a reply that has begun when the client closes.
        sock.send(self._completion(tokens, stream=self._random.random() < 0.5))
        sock.shutdown(socket.SHUT_WR)
        reply = await _read(sock, until_end=True)
        return "" if _status(reply) == 200 and _whole(reply) else f"half a reply: {reply[-SHOWN:]!r}"

    # -- bytes

    def _head(self, method: str, path: str, *lines: str) -> bytes:
        return "\r\n".join([f"{method} {path} HTTP/1.1", f"Host: {self._host}", *lines, "\r\n"]).encode()

    def _post(self, body: bytes, *lines: str) -> bytes:
        length = f"Content-Length: {len(body)}"
        return self._head("POST", COMPLETIONS, "Content-Type: application/json", length, *lines) + body

    def _completion(self, tokens: int, **fields: object) -> bytes:
        body = {"prompt": "hostile", "max_tokens": tokens, "ignore_eos": True, **fields}
        return self._post(msgspec.json.encode(body))

    def _malformed(self) -> _Attack:
        refused = frozenset((400, 404, 405, 505))
        return self._random.choice(
            (
                _Attack(self._random.randbytes(64) + b"\r\n\r\n", refused),
                _Attack(b"GET /\r\n\r\n", refused),
                _Attack(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(40), refused),
                _Attack(b"PRI * HTTP/2.0\r\n\r\nXX\r\n\r\n", refused),
                _Attack(self._post(b'{"prompt": ' + b"[" * 50_000, "Connection: close"), frozenset((400,))),
                _Attack(self._post(b"\xff\xfe{}", "Connection: close"), frozenset((400,))),
                _Attack(self._post(b'{"prompt": "x", "max_tokens": 1e999}', "Connection: close"), refused),
            )
        )

    def _bad_headers(self) -> _Attack:
        refused = frozenset((400, 411, 501))
        body = b'{"prompt": "x", "max_tokens": 1}'
        chunked = "Transfer-Encoding: chunked"
        return self._random.choice(
            (
                _Attack(b"GET /health HTTP/1.1\r\n\r\n", refused),
                _Attack(self._head("GET", "/health", f"Host: {self._host}"), refused),
                _Attack(
                    self._head("POST", COMPLETIONS, "Content-Length: 5", "Content-Length: 6") + body, refused
                ),
                _Attack(self._head("POST", COMPLETIONS, "Content-Length: 5", chunked) + body, refused),
                _Attack(self._head("POST", COMPLETIONS, "Content-Length: -1") + body, refused),
                _Attack(self._head("POST", COMPLETIONS, chunked) + b"ZZ\r\n" + body, refused),
                _Attack(self._head("GET", "/health", "X\0Y: 1"), refused),
                _Attack(self._head("GET", "/health", "Space : 1"), refused),
            )
        )

    def _huge(self) -> _Attack:
        chunked = self._head("POST", "/ping", "Transfer-Encoding: chunked")
        trailers = b"0\r\n" + b"".join(b"T-%d: %b\r\n" % (at, b"t" * 1000) for at in range(300)) + b"\r\n"
        return self._random.choice(
            (
                _Attack(self._head("GET", "/" + "a" * HUGE_HEADERS), frozenset((400, 414, 431))),
                _Attack(self._head("GET", "/health", "X: " + "a" * HUGE_HEADERS), frozenset((400, 431))),
                _Attack(
                    self._head("POST", COMPLETIONS, f"Content-Length: {1 << 40}"), frozenset((413,)), 0, False
                ),
                _Attack(
                    self._post(b'{"prompt": "' + b"a b" * (HUGE_BYTES // 3) + b'"}', "Connection: close"),
                    frozenset((400,)),
                ),
                _Attack(chunked + trailers, frozenset(), 0, False),
                _Attack(chunked + b"1;" + b"e" * HUGE_HEADERS, frozenset((400, 413, 431))),
            )
        )


# -- sockets


def reset_at_close(sock: socket.socket) -> None:
    """RST, not FIN."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")


async def send(sock: socket.socket, data: bytes) -> None:
    """Ignores that the server has closed: its reply says why."""
    try:
        await asyncio.get_running_loop().sock_sendall(sock, data)
    except ConnectionError:
        return


async def receive(sock: socket.socket) -> bytes:
    try:
        return await asyncio.get_running_loop().sock_recv(sock, 1 << 16)
    except ConnectionError:
        return b""


async def _read(sock: socket.socket, *, until_end: bool) -> bytes:
    """What comes until the connection closes, or only the first reply's head."""
    data = b""
    while (until_end or b"\r\n\r\n" not in _final(data)) and (more := await receive(sock)):
        data += more
    return _final(data)


def _final(data: bytes) -> bytes:
    """Without interim replies such as 100 (Continue)."""
    while data.startswith(b"HTTP/1.1 1") and b"\r\n\r\n" in data:
        _, _, data = data.partition(b"\r\n\r\n")
    return data


def _status(reply: bytes) -> int:
    """0 without a reply."""
    return int(reply[9:12]) if reply.startswith(b"HTTP/1.1 ") else 0


def _whole(reply: bytes) -> bool:
    head, _, body = reply.partition(b"\r\n\r\n")
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return len(body) == int(line.partition(b":")[2])
    return body.endswith(b"0\r\n\r\n")
