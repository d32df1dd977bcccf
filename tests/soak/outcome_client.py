"""A client of the outcome soak: what it saw of each request, for comparison with what the gateway says."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import json
import random
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from penstock.gateway.responses.outcome import Outcome
from tests.soak.faulty_server import TOKENS


class Seen(enum.StrEnum):
    """How a request ended, as its client saw it."""

    WHOLE = enum.auto()
    STATUS = enum.auto()
    """It got an error as the reply."""
    GATEWAY_EVENT = enum.auto()
    """The stream ended with the gateway's error event."""
    SERVER_EVENT = enum.auto()
    """The reply has an error of the model server."""
    MALFORMED = enum.auto()
    """It ended in order, with content that is no JSON."""
    CUT = enum.auto()
    LEFT = enum.auto()
    """The client has left before the end."""
    WRONG = enum.auto()
    """Content of another request, or not all of its own."""


SAME_AS = {
    Seen.WHOLE: {Outcome.OK},
    Seen.GATEWAY_EVENT: {Outcome.NETWORK_ERROR},
    Seen.SERVER_EVENT: {Outcome.MODEL_SERVER_ERROR},
    Seen.MALFORMED: {Outcome.CONTENT_ERROR},
    Seen.CUT: {Outcome.NETWORK_ERROR},
    Seen.LEFT: set(Outcome) - {Outcome.REJECTED},  # the server may have failed in the same moment
    Seen.WRONG: set(),
}
"""The gateway's outcomes that say the same. Those of an error reply follow from its status."""


def outcomes_of(status: int, *, by_gateway: bool) -> set[Outcome]:
    """The outcomes that an error reply with ``status`` may have, by who made it."""
    if by_gateway:
        return {Outcome.NETWORK_ERROR, Outcome.MODEL_SERVER_ERROR, Outcome.REJECTED}
    return {Outcome.CLIENT_ERROR if status < 500 else Outcome.MODEL_SERVER_ERROR}


@dataclass
class View:
    """What a client saw of one request. Times are seconds."""

    id: str
    began: float = field(default_factory=time.monotonic)
    seen: Seen = Seen.CUT
    status: int = 0
    by_gateway: bool = False
    """The error reply is the gateway's own."""
    took: float = 0.0
    longest_gap: float = 0.0
    """Longest time without a byte, after the first one."""

    def disagrees(self, outcome: str, status: int) -> str:
        """How the gateway's outcome and status differ from this; empty: they do not."""
        allowed = (
            outcomes_of(self.status, by_gateway=self.by_gateway)
            if self.seen is Seen.STATUS
            else SAME_AS[self.seen]
        )
        if outcome not in allowed:
            return f"{self.id}: the client saw {self.seen} {self.status}, the gateway {outcome} {status}"
        if self.status and status != self.status:
            return f"{self.id}: the client got {self.status}, the gateway says {status} ({outcome})"
        return ""


class OutcomeClient:
    """Sends one request after the other, on one connection as long as it holds."""

    def __init__(self, url: str, name: str, rng: random.Random) -> None:
        parts = urlsplit(url)
        self._host, self._port = parts.hostname, parts.port
        self._name, self._rng = name, rng
        self._number = 0
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def once(self) -> View:
        """One request. Raises OSError if there is no connection to the gateway."""
        self._number += 1
        view = View(f"{self._name}-{self._number}")
        streamed, leaves = self._rng.random() < 0.7, self._rng.random() < 0.1
        if self._writer is None or self._writer.is_closing():
            self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        body = {"model": "m", "prompt": f"p {self._rng.randrange(300)}", "user": view.id, "stream": streamed}
        raw = json.dumps(body).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: h\r\nx-request-id: {view.id}\r\n"
        view.began = time.monotonic()
        try:
            self._writer.write(f"{head}content-length: {len(raw)}\r\n\r\n".encode() + raw)
            await self._read(view, streamed=streamed, leaves_at=self._rng.randrange(300) if leaves else None)
        except (OSError, EOFError, ValueError) as problem:
            view.seen = Seen.WRONG if isinstance(problem, ValueError) else Seen.CUT
        if view.seen in (Seen.CUT, Seen.LEFT, Seen.WRONG):
            self.close()
        view.took = time.monotonic() - view.began
        return view

    def close(self) -> None:
        if self._writer is not None:
            self._writer.transport.abort()
            self._writer = None

    async def _read(self, view: View, *, streamed: bool, leaves_at: int | None) -> None:
        """``leaves_at``: bytes of the body after which it leaves. Raises EOFError, OSError, and ValueError
        for what is no HTTP."""
        assert self._reader is not None
        head = await self._reader.readuntil(b"\r\n\r\n")
        view.status = int(head.split(b" ", 2)[1])
        body, latest = b"", time.monotonic()
        async with contextlib.aclosing(self._pieces(head.lower())) as pieces:
            async for piece in pieces:
                now = time.monotonic()
                view.longest_gap, latest = max(view.longest_gap, now - latest), now
                body += piece
                if leaves_at is not None and view.status == 200 and len(body) > leaves_at:
                    view.seen = Seen.LEFT
                    return
        view.seen, view.by_gateway = judge(view.status, body, view.id, streamed=streamed)

    async def _pieces(self, head: bytes) -> AsyncGenerator[bytes, None]:
        reader = self._reader
        assert reader is not None
        if b"transfer-encoding: chunked" not in head:
            yield await reader.readexactly(int(head.split(b"content-length: ")[1].split(b"\r\n")[0]))
            return
        while size := int(await reader.readuntil(b"\r\n"), 16):
            yield (await reader.readexactly(size + 2))[:-2]
        await reader.readexactly(2)


def judge(status: int, body: bytes, own: str, *, streamed: bool) -> tuple[Seen, bool]:
    """How a reply that ended in order is seen, and whether the gateway made its error."""
    if status != 200:
        error = json.loads(body)["error"]
        return Seen.STATUS, error["type"] == "gateway_error"
    lines = body.split(b"\n") if streamed else [b"data: " + body]
    datas = [line.removeprefix(b"data: ") for line in lines if line.startswith(b"data: ")]
    text = ""
    for data in datas:
        if data.startswith(b"[DONE]"):
            continue
        try:
            event = json.loads(data)
        except ValueError:
            return Seen.MALFORMED, False
        if (error := event.get("error")) is not None:
            by_gateway = error.get("type") == "gateway_error"
            return (Seen.GATEWAY_EVENT if by_gateway else Seen.SERVER_EVENT), by_gateway
        text += "".join(choice["text"] for choice in event["choices"])
    return (Seen.WHOLE if text == own * TOKENS else Seen.WRONG), False
