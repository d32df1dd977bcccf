"""A client of one HTTP/2 connection without a socket: it gives the connection bytes and reads its frames."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from functools import wraps
from typing import Any

import hpack

from penstock.http.http2 import frames
from penstock.http.http2.connection import Http2Connection
from penstock.http.http2.faults import ErrorCode
from penstock.http.http2.frames import Frame, FrameScanner
from penstock.http.request import HttpRequest
from penstock.http.server_state import ServerState
from penstock.http.sink import Listener
from tests.http.connections import App, FakeTransport, answer, timed

GET = [(b":method", b"GET"), (b":scheme", b"http"), (b":path", b"/x"), (b":authority", b"h")]
POST = [(b":method", b"POST"), *GET[1:]]
TIMES = (30.0, 75.0)
"""For a request to arrive, and for an idle connection."""


class Transport(FakeTransport):
    """Tells its protocol when it holds much, as asyncio's do: what is written is held while ``stalled``."""

    protocol: Http2Connection
    stalled = False
    congested = False

    def __init__(self) -> None:
        super().__init__()
        self.written = bytearray()  # type: ignore[assignment]

    def write(self, data: Any) -> None:
        super().write(data)
        if self.stalled:
            self.unread += len(data)
            if self.unread > (self.high_water or 0) and not self.congested:
                self.congested = True
                self.protocol.pause_writing()

    def drain(self) -> None:
        """The client reads everything."""
        self.unread = 0
        if self.congested:
            self.congested = False
            self.protocol.resume_writing()


class Client:
    """Speaks to a connection of a server with ``app``, within a running loop."""

    def __init__(self, app: App = answer, state: ServerState | None = None, **settings: int) -> None:
        """``settings``: of the client's first SETTINGS frame, by their names in ``frames``."""
        self.state, self.clock = timed(state)
        self.connection = Http2Connection(app, self.state)
        self.transport = Transport()
        self.transport.protocol = self.connection
        self.connection.connection_made(self.transport)
        self.encoder = hpack.Encoder()
        self.decoder = hpack.Decoder()
        self._scanner = FrameScanner(frames.LARGEST_FRAME_SIZE)
        self._scanned = 0
        values = {getattr(frames, name): value for name, value in settings.items()}
        self.send(frames.PREFACE + frames.settings_frame(values))
        self.received()

    def send(self, data: bytes) -> None:
        self.connection.data_received(data)

    def headers(
        self, stream_id: int, fields: Sequence[tuple[bytes, bytes]] = GET, *, end: bool = True, flags: int = 0
    ) -> bytes:
        """A HEADERS frame."""
        flags |= frames.END_HEADERS | (frames.END_STREAM if end else 0)
        return frames.frame(frames.HEADERS, flags, stream_id, self.encoder.encode(fields))

    def received(self) -> list[Frame]:
        """The frames that have come since the last call."""
        self._scanner.receive(bytes(self.transport.written[self._scanned :]))
        self._scanned = len(self.transport.written)
        return self._scanner.take_frames(1_000_000)

    async def frames(self) -> list[Frame]:
        """The same, after some turns of the event loop."""
        await settle()
        return self.received()

    async def reply(self, stream_id: int = 1) -> tuple[dict[bytes, bytes], bytes]:
        """The headers and body of the only complete reply that has come."""
        headers, body, ended = dict[bytes, bytes](), b"", False
        for kind, flags, identifier, payload in await self.frames():
            assert identifier in (0, stream_id)
            if kind == frames.HEADERS:
                headers = dict(self.decoder.decode(payload, raw=True))  # type: ignore[arg-type]
            elif kind == frames.DATA:
                body += payload
            ended = ended or (kind < 2 and bool(flags & frames.END_STREAM))
        assert ended
        return headers, body

    async def goaway(self) -> tuple[ErrorCode, str]:
        """Code and reason of the GOAWAY frame, after which the connection has ended."""
        for kind, _, _, payload in await self.frames():
            if kind == frames.GOAWAY:
                assert self.transport.end == "eof"
                return ErrorCode(frames.unpack_goaway(payload)[1]), payload[8:].decode()
        raise AssertionError("no GOAWAY")

    async def resets(self) -> dict[int, ErrorCode]:
        """Codes of RST_STREAM frames, by stream."""
        return {
            stream_id: ErrorCode(frames.unpack_long(payload, ""))
            for kind, _, stream_id, payload in await self.frames()
            if kind == frames.RST_STREAM
        }


class Recorder(Listener):
    """Records what its reply is told."""

    def __init__(self) -> None:
        self.told = list[str]()

    def on_disconnect(self) -> None:
        self.told.append("disconnect")

    def on_pause(self) -> None:
        self.told.append("pause")

    def on_resume(self) -> None:
        self.told.append("resume")


class Streaming:
    """An application that leaves its sinks to the test."""

    def __init__(self) -> None:
        self.sinks = list[Any]()
        self.listeners = list[Recorder]()

    async def __call__(self, http: HttpRequest) -> None:
        listener = Recorder()
        self.sinks.append(http.sink)
        self.listeners.append(listener)
        http.sink.listen(listener)


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


def in_loop(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """``test``, run in an event loop."""

    @wraps(test)
    def run(*args: Any, **named: Any) -> None:
        asyncio.run(test(*args, **named))

    return run
