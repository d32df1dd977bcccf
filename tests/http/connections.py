"""One connection without a socket."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from penstock.http.http1.connection import ServerProtocol
from penstock.http.request import HttpRequest
from penstock.http.server_state import ServerState

REQUEST = b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n"


class Clock:
    """Stands still until a test moves it. Its times are whole numbers of seconds, to which any limit adds up
    exactly: after an uptime of 2,030 s, 30.0 more are not 30.0 later."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def timed(state: ServerState | None) -> tuple[ServerState, Clock]:
    """``state``, or a new one, and its clock: what a limit allows must not depend on a machine's load."""
    state = state or ServerState()
    if not isinstance(state.clock, Clock):
        state.clock = Clock()
    return state, state.clock


class FakeTransport(asyncio.Transport):
    """Keeps what is written; ``unread`` of it is said to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.unread = 0
        self.end = ""
        self.high_water: int | None = None
        self.reading = True
        self.extra = dict[str, Any]()
        self.protocol: Any = None

    def write(self, data: Any) -> None:
        assert not self.end
        self.written += data

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self.high_water = high

    def get_write_buffer_size(self) -> int:
        return self.unread

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self.extra.get(name, default)

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.end = "eof"

    def set_protocol(self, protocol: Any) -> None:
        self.protocol = protocol

    def is_closing(self) -> bool:
        return self.end in ("close", "abort")

    def close(self) -> None:
        self.end = "close" if self.end != "abort" else self.end

    def abort(self) -> None:
        self.end = "abort"

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


App = Callable[[HttpRequest], Coroutine[Any, Any, None]]


async def answer(http: HttpRequest) -> None:
    await http.reply_json(b"{}")


def connection(
    app: App = answer, state: ServerState | None = None, **extra: Any
) -> tuple[ServerProtocol, FakeTransport]:
    """A connection of a server with ``app``, within a running loop; ``extra``: of its transport."""
    protocol = ServerProtocol(app, timed(state)[0])
    transport = FakeTransport()
    transport.extra |= extra
    protocol.connection_made(transport)
    protocol.timer.idle_since = 0.0
    return protocol, transport


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)
